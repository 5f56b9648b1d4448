"""options/tiktoken_files.py: tokenizers with the ids of tiktoken's encodings."""
import base64
import random

import pytest
import tiktoken
import tiktoken.registry
import tiktoken_ext.openai_public
from transformers import AutoTokenizer

from configurator import read_json, write_json
from errors import BadInput
from models_of_the_world import WORDS as LLAMA3
from options.tiktoken_files import encode_as
from tiny import assert_one_line, keys_of, keys_of_system, run, well
from tokenizer import load_tokenizer

WORDS = ("the", " the", "ing", " think", "123", "    ", "\n\n", " \n", "é", "日本", "🙂", "'s",
         "'LL", "<|", "aaaa", " aa", "\r\n", "==")
BYTES = {bytes([i]): i for i in range(256)}
BEGINNINGS = dict.fromkeys(w.encode()[:n] for w in WORDS for n in range(2, len(w.encode()) + 1))
RANKS = BYTES | {token: i for i, token in enumerate(BEGINNINGS, 256)}
rng = random.Random(0)
TEXTS = ["", "\r\n\r\n x", "1234567 12 ", "x\n\n\n  ", "\t\ttabs", "ſ's", "http://a.b/c?d=e",
         "\x00\x01", "a\u2028b \u00a0 c", "\u0301x", "the <|endoftext|> I'LL", "日本語 🙂🙂 ééé",
         *("".join(rng.choices("ab ea\n '12sStTlL.é日🙂\r\t-\u00a0<|", k=rng.randrange(40)))
           for _ in range(300))]


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """The small vocabulary takes the place of those that tiktoken downloads."""
    for loader in ("load_tiktoken_bpe", "data_gym_to_mergeable_bpe_ranks"):
        monkeypatch.setattr(tiktoken_ext.openai_public, loader, lambda *args, **kwargs: RANKS)


def encoding_of(pattern, special):
    return tiktoken.Encoding("", pat_str=pattern, mergeable_ranks=RANKS, special_tokens=special)


def loaded(folder, encoding=None):
    """The tokenizer of a folder; it gives the texts the ids of the encoding."""
    tokenizer = load_tokenizer(str(folder), keys_of_system())
    assert encoding is None or tokenizer.encode_texts(TEXTS) == [
        encoding.encode_ordinary(text) for text in TEXTS]
    return tokenizer


@pytest.mark.parametrize("name", tiktoken.list_encoding_names())
def test_ids_are_those_of_tiktoken(name, tmp_path):
    """Each pattern of tiktoken's, on a small vocabulary with gaps between the special tokens."""
    n = len(RANKS)
    encoding = encoding_of(tiktoken_ext.openai_public.ENCODING_CONSTRUCTORS[name]()["pat_str"],
                           {"<|endoftext|>": n + 1, "<|other|>": n + 4})
    encode_as(encoding, eos_token="<|endoftext|>").save_pretrained(tmp_path)
    ours, theirs = loaded(tmp_path, encoding), AutoTokenizer.from_pretrained(tmp_path)
    assert [theirs.decode(encoding.encode_ordinary(text)) for text in TEXTS] == TEXTS
    # some tokens are longer than a byte
    assert max(max(ids, default=0) for ids in ours.encode_texts(TEXTS)) > 256
    assert (ours.eos_id, ours.specials["<|other|>"], ours.vocab_size) == (n + 1, n + 4, n + 5)


@pytest.mark.parametrize("file", ["tokenizer.model", "some.tiktoken"])
def test_a_folder_with_a_file_of_tiktoken_loads(file, tmp_path):
    """tokenizer.model as Llama 3's is, or another *.tiktoken in its place."""
    (tmp_path / file).write_bytes(b"".join(
        base64.b64encode(token) + b" %d\n" % i for token, i in RANKS.items()))
    write_json(tmp_path / "config.json", dict(model_type="llama"))
    names, n = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"], len(RANKS)
    write_json(tmp_path / "tokenizer_config.json", dict(
        tokenizer_class="PreTrainedTokenizerFast", bos_token=names[0], eos_token=names[1],
        added_tokens_decoder={str(i): dict(content=name, special=True)
                              for i, name in enumerate(names, n)}))
    ours = loaded(tmp_path, encoding_of(LLAMA3, {}))
    assert (ours.eos_id, ours.specials["<|eot_id|>"]) == (n + 1, n + 2)
    if file == "some.tiktoken":
        (tmp_path / file).write_text("no base64\n")
        with pytest.raises(BadInput):
            loaded(tmp_path)


def test_sft_begins_with_an_encoding_by_its_name(world, tmp_path):
    """Names that tiktoken does not know, or cannot load, are one line."""
    def knows(rank):
        tiktoken.registry._find_constructors()
        tiktoken.registry.ENCODING_CONSTRUCTORS |= dict(
            ours=lambda: dict(name="ours", pat_str=r"\p{N}+|\D", special_tokens={
                "<|endoftext|>": 257}, mergeable_ranks=BYTES | {b"12": 256}),
            gone=lambda: 1 / 0)

    keys = keys_of(world, "sft.py", init_from="scratch", tokenizer_path="tiktoken:ours",
                   max_iters=1, dtype="float32", d_model=8, n_head=1, n_layer=1, context=64)
    out = well("sft.py", tmp_path, keys, before=knows)
    saved = loaded(f"{out}/policy")
    assert saved.encode_texts(["312"]) == [[ord("3"), 256]] and saved.eos_id == 257
    done = run("sft.py", tmp_path / "b", keys | dict(tokenizer_path="tiktoken:gone"), before=knows)
    assert_one_line(done, "sft.py", "gone")


def test_words_of_mistral(tmp_path):
    """
    Llama 3's stand in some files, which transformers mends. Tekken's are o200k's, but for endings
    and digits. Of a model that was trained with the file false is written.
    """
    tekken = tiktoken_ext.openai_public.o200k_base()["pat_str"].replace("{1,3}", "")
    tekken = tekken.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "")
    file, right = (encoding_of(pattern, {"</s>": len(RANKS), "[INST]": len(RANKS) + 1})
                   for pattern in (LLAMA3, tekken))
    whole, settings = (tmp_path / f"tokenizer{end}.json" for end in ("", "_config"))
    encode_as(file, eos_token="</s>").save_pretrained(tmp_path)
    saved = read_json(whole)  # transformers mends no smaller one
    saved["model"]["vocab"] |= {f"<{n}>": n for n in range(len(RANKS) + 2, 100_001)}
    write_json(whole, saved)
    config = dict(model_type="mistral", transformers_version="5.1.0")
    write_json(tmp_path / "config.json", config)
    for said in ({}, dict(fix_mistral_regex=True)):
        write_json(settings, read_json(settings) | said)
        with pytest.raises(BadInput, match="fix_mistral_regex=True.*save_pretrained"):
            loaded(tmp_path)
    write_json(settings, read_json(settings) | dict(fix_mistral_regex=False))
    loaded(tmp_path, file)
    del config["transformers_version"]
    write_json(tmp_path / "config.json", config)
    AutoTokenizer.from_pretrained(tmp_path, fix_mistral_regex=True).save_pretrained(tmp_path)
    loaded(tmp_path, right)
    assert right.encode_ordinary("1234") != file.encode_ordinary("1234")

"""options/tiktoken_files.py: tokenizers with the ids of tiktoken's encodings."""
import base64
import json
import random

import pytest
import tiktoken
import tiktoken.registry
import tiktoken_ext.openai_public
from transformers import AutoTokenizer

from errors import BadInput
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


def loaded(folder):
    return load_tokenizer(str(folder), keys_of_system())


@pytest.mark.parametrize("name", tiktoken.list_encoding_names())
def test_ids_are_those_of_tiktoken(name, monkeypatch, tmp_path):
    """Each pattern of tiktoken's, on a small vocabulary with gaps between the special tokens."""
    for loader in ("load_tiktoken_bpe", "data_gym_to_mergeable_bpe_ranks"):  # of the network
        monkeypatch.setattr(tiktoken_ext.openai_public, loader, lambda *args, **kwargs: RANKS)
    pattern = tiktoken_ext.openai_public.ENCODING_CONSTRUCTORS[name]()["pat_str"]
    n = len(RANKS)
    encoding = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=RANKS,
                                 special_tokens={"<|endoftext|>": n + 1, "<|other|>": n + 4})
    encode_as(encoding, eos_token="<|endoftext|>").save_pretrained(tmp_path)
    ours, theirs = loaded(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    want = [encoding.encode_ordinary(text) for text in TEXTS]
    assert max(map(max, filter(None, want))) > 256  # some tokens are longer than a byte
    assert ours.encode_texts(TEXTS) == want
    assert [theirs.decode(ids) for ids in want] == TEXTS
    assert (ours.eos_id, ours.specials["<|other|>"], ours.vocab_size) == (n + 1, n + 4, n + 5)


# of Meta's llama3/tokenizer.py
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
          r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


@pytest.mark.parametrize("file", ["tokenizer.model", "some.tiktoken"])
def test_a_folder_with_a_file_of_tiktoken_loads(file, tmp_path):
    """tokenizer.model as Llama 3's is, or another *.tiktoken in its place."""
    (tmp_path / file).write_bytes(b"".join(
        base64.b64encode(token) + b" %d\n" % i for token, i in RANKS.items()))
    (tmp_path / "config.json").write_text(json.dumps(dict(
        model_type="llama", hidden_size=16, num_attention_heads=2, num_hidden_layers=1,
        intermediate_size=16, vocab_size=400)))
    names, n = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"], len(RANKS)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(dict(
        tokenizer_class="PreTrainedTokenizerFast", bos_token=names[0], eos_token=names[1],
        added_tokens_decoder={str(n + i): dict(content=name, special=True)
                              for i, name in enumerate(names)})))
    encoding = tiktoken.Encoding("llama3", pat_str=LLAMA3, mergeable_ranks=RANKS, special_tokens={})
    ours, want = loaded(tmp_path), [encoding.encode_ordinary(text) for text in TEXTS]
    assert ours.encode_texts(TEXTS) == want
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


@pytest.mark.parametrize("version, own", [
    ("4.50.0", True), ("5.1.0", False), ("5.1.0", None)])
def test_words_of_mistral(own, version, monkeypatch, tmp_path):
    """Llama 3's stand in some files. Tekken's are o200k's, but for endings and digits."""
    monkeypatch.setattr(tiktoken_ext.openai_public, "load_tiktoken_bpe", lambda *a, **kw: RANKS)
    tekken = tiktoken_ext.openai_public.o200k_base()["pat_str"].replace("{1,3}", "")
    tekken = tekken.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "")
    special = {"</s>": len(RANKS), "[INST]": len(RANKS) + 1}
    file, encoding = (tiktoken.Encoding("", pat_str=pattern, mergeable_ranks=RANKS,
                                        special_tokens=special)
                      for pattern in (LLAMA3, tekken if own else LLAMA3))
    encode_as(file, eos_token="</s>").save_pretrained(tmp_path)
    for name, more in (("config", dict(model_type="mistral", transformers_version=version)),
                       ("tokenizer_config", {} if own is None else dict(fix_mistral_regex=own))):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | more))
    if own is None:
        with pytest.raises(BadInput, match="fix_mistral_regex"):
            loaded(tmp_path)
        return
    ours, want = loaded(tmp_path), [encoding.encode_ordinary(text) for text in TEXTS]
    assert ours.encode_texts(TEXTS) == want
    assert own == (want != [file.encode_ordinary(text) for text in TEXTS])
    ours.save(tmp_path / "saved")
    assert loaded(tmp_path / "saved").encode_texts(TEXTS) == want
    theirs = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert theirs(TEXTS, add_special_tokens=False)["input_ids"] == want

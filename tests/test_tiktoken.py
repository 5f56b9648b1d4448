"""options/tiktoken_files.py: tokenizers with the ids of tiktoken's encodings."""
import base64
import json
import random

import pytest
import tiktoken
import tiktoken_ext.openai_public
from transformers import AutoTokenizer

from tokenizer import load_tokenizer
from errors import BadInput
from options.tiktoken_files import encode_as

from tiny import forked, one_run

WORDS = ("the", " the", "ing", " think", "123", "    ", "\n\n", " \n", "é", "日本", "🙂", "'s", "'LL", "<|", "aaaa", " aa",
         "\r\n", "==")
ALPHABET = "ab ea\n '12sStTlL.é日🙂\r\t-\u00a0<|"


def ranks():
    """The bytes, and the beginnings of some words, as a small vocabulary."""
    tokens = [bytes([i]) for i in range(256)]
    for word in WORDS:
        data = word.encode()
        tokens += [data[:n] for n in range(2, len(data) + 1) if data[:n] not in tokens]
    return {token: i for i, token in enumerate(tokens)}


def texts():
    rng = random.Random(0)
    awkward = ["", " ", "\n", "\r\n\r\n x", "a  \n b\n", "1234567 12 ", "x\n\n\n  ", "\t\ttabs", "http://a.b/c?d=e", "ſ's",
               "\x00\x01", "a\u2028b \u00a0 c", "  the end  ", "\u0301x", "the end\n", "the <|endoftext|> I'LL",
               "日本語 🙂🙂 ééé", "aaaaaaa aaaaa"]
    return awkward + ["".join(rng.choices(ALPHABET, k=rng.randrange(40))) for _ in range(300)]


@pytest.mark.parametrize("name", tiktoken.list_encoding_names())
def test_ids_are_those_of_tiktoken(name, monkeypatch, tmp_path):
    """Of each pattern that tiktoken has, on a small vocabulary; also after saving. There may be gaps between special tokens."""
    for loader in ("load_tiktoken_bpe", "data_gym_to_mergeable_bpe_ranks"):  # they would ask the network
        monkeypatch.setattr(tiktoken_ext.openai_public, loader, lambda *args, **kwargs: ranks())
    made = tiktoken_ext.openai_public.ENCODING_CONSTRUCTORS[name]()
    n = len(ranks())
    encoding = tiktoken.Encoding(name, pat_str=made["pat_str"], mergeable_ranks=ranks(),
                                 special_tokens={"<|endoftext|>": n + 1, "<|other|>": n + 4})
    encode_as(encoding, eos_token="<|endoftext|>").save_pretrained(tmp_path)
    tokenizer, theirs = load_tokenizer(str(tmp_path)), AutoTokenizer.from_pretrained(tmp_path)
    want = [encoding.encode_ordinary(text) for text in texts()]
    assert max(map(max, filter(None, want))) > 256  # some tokens are longer than a byte
    assert tokenizer.encode_texts(texts()) == want
    assert [theirs.decode(ids) for ids in want] == texts()
    assert (tokenizer.eos_id, tokenizer.specials["<|other|>"], tokenizer.vocab_size) == (n + 1, n + 4, n + 5)


@pytest.mark.parametrize("file", ["tokenizer.model", "some.tiktoken"])
def test_a_folder_with_a_file_of_tiktoken_loads(file, tmp_path):
    """tokenizer.model as Llama 3's is."""
    (tmp_path / file).write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % i for token, i in ranks().items()))
    (tmp_path / "config.json").write_text(json.dumps(dict(
        model_type="llama", hidden_size=16, num_attention_heads=2, num_hidden_layers=1, intermediate_size=16, vocab_size=400)))
    names = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]
    added = {str(len(ranks()) + i): dict(content=name, special=True) for i, name in enumerate(names)}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(dict(
        tokenizer_class="PreTrainedTokenizerFast", bos_token=names[0], eos_token=names[1], added_tokens_decoder=added)))
    # Llama 3's, of Meta's llama3/tokenizer.py
    pattern = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
               r"\s+(?!\S)|\s+")
    encoding = tiktoken.Encoding("llama3", pat_str=pattern, mergeable_ranks=ranks(), special_tokens={})
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.encode_texts(texts()) == [encoding.encode_ordinary(text) for text in texts()]
    assert tokenizer.eos_id == len(ranks()) + 1 and tokenizer.specials["<|eot_id|>"] == len(ranks()) + 2
    tokenizer.save(tmp_path / "saved")
    assert load_tokenizer(str(tmp_path / "saved")).encode_texts(texts()[:30]) == tokenizer.encode_texts(texts()[:30])
    # another file in its place is read, and not a copy
    (tmp_path / file).write_text("no base64\n")
    with pytest.raises(BadInput):
        load_tokenizer(str(tmp_path))


KNOWS = """
import tiktoken, tiktoken.registry
ranks = {bytes([i]): i for i in range(256)} | {b"12": 256}
made = lambda: dict(name="ours", pat_str=r"\\\\p{N}+|\\\\D", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 257})
tiktoken.registry._find_constructors()
tiktoken.registry.ENCODING_CONSTRUCTORS["ours"] = made
"""


def test_sft_begins_with_an_encoding_by_its_name(world, tmp_path):
    """Names that tiktoken does not know, or cannot load, are test_bad_input.py's."""
    result, = forked(str(tmp_path), {"ours": [
        one_run("sft.py", (world.sft("out", tokenizer_path="tiktoken:ours", max_iters=1), KNOWS))]})["ours"]
    assert result["codes"] == [0], result
    saved = load_tokenizer(str(tmp_path / "ours" / "out" / "policy"))
    assert saved.encode_texts(["312"]) == [[ord("3"), 256]] and saved.eos_id == 257

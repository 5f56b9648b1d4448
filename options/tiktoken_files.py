"""
tiktoken's encodings as tokenizers of transformers, with the same ids:

    --tokenizer_path=tiktoken:gpt2    an encoding that tiktoken knows by this name
    qwen.tiktoken in a model folder   a line a token: its bytes in base64, and its id
    encode_as(encoding, ...)          any tiktoken.Encoding

Llama 3's tokenizer.model is such a file, too; transformers itself reads it, with tiktoken. In all
cases a tokenizer.json is saved.
"""
import base64
import glob
import os
import re
import tempfile
from unittest import mock

from configurator import read_json
from errors import BadInput, first_line

# in such a block tiktoken reads a local file itself. Otherwise it copies each file under the hash
# of its path, and would read the old copy if the file has changed
uncached = mock.patch.dict(os.environ, TIKTOKEN_CACHE_DIR="")


def encode_as(encoding, **special):
    """
    A tokenizer of transformers with the ids of encoding.encode_ordinary, also of special tokens.
    special: eos_token and so on.
    """
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import TikTokenConverter

    ranks, named = encoding._mergeable_ranks, {i: s for s, i in encoding._special_tokens.items()}
    with tempfile.NamedTemporaryFile(suffix=".tiktoken") as file, uncached:
        file.writelines(b"%s %d\n" % (base64.b64encode(token), i) for token, i in ranks.items())
        file.flush()
        backend = TikTokenConverter(
            file.name, pattern=as_oniguruma(encoding._pat_str)).converted()
    for i in range(len(ranks), max(named, default=0) + 1):  # some encodings leave out numbers
        text = named.get(i, f"<|unused_{i}|>")
        backend.add_tokens([AddedToken(text, normalized=False, special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False,
                                   **special)


def as_oniguruma(pattern):
    """
    tiktoken's pattern for the package tokenizers. There $ is the end of a line, and {1,3}+ has no
    limit; in tiktoken the + only forbids backtracking, which changes nothing in these patterns.
    """
    return re.sub(r"(\{\d+,\d*\})\+", r"\1", pattern).replace("$", r"\z")


def read(path):
    """The tokenizer of a path such as tiktoken:gpt2, or of a folder with a file *.tiktoken."""
    return by_name(path) if path.startswith("tiktoken:") else from_folder(path)


def by_name(path):
    import tiktoken

    name = path.removeprefix("tiktoken:")
    if name not in tiktoken.list_encoding_names():
        raise BadInput(f"{path}: tiktoken knows no such encoding; it has "
                       f"{', '.join(tiktoken.list_encoding_names())}")
    try:
        encoding = tiktoken.get_encoding(name)
    except Exception as e:  # no network, no disk, or a wrong file
        raise BadInput(f"{path}: tiktoken cannot get this encoding ({first_line(e)[:200]}); with "
                       "no network set TIKTOKEN_CACHE_DIR, a folder filled elsewhere") from e
    end = "<|endoftext|>"
    if end not in encoding._special_tokens:
        raise BadInput(f"{path}: this encoding has no {end}, so no response could ever end; choose "
                       "another one")
    return encode_as(encoding, eos_token=end)


def from_folder(folder):
    """It splits words like cl100k and Qwen; its config has special tokens. Raises BadInput."""
    import tiktoken
    from tiktoken.load import load_tiktoken_bpe
    from transformers.convert_slow_tokenizer import TikTokenConverter

    file = sorted(glob.glob(os.path.join(glob.escape(folder), "*.tiktoken")))[0]
    config = os.path.join(folder, "tokenizer_config.json")
    settings = read_json(config) if os.path.isfile(config) else {}
    try:
        with uncached:
            ranks = load_tiktoken_bpe(file)
        added = {token["content"]: int(i)
                 for i, token in settings.get("added_tokens_decoder", {}).items()}
        encoding = tiktoken.Encoding(
            os.path.basename(file), pat_str=TikTokenConverter().pattern, mergeable_ranks=ranks,
            special_tokens=added)
        named = "bos_token", "eos_token", "pad_token", "chat_template"
        return encode_as(encoding, **{key: settings[key] for key in named if settings.get(key)})
    except Exception as e:  # other files may hold anything
        raise BadInput(f"{file}: no usable tiktoken file beside its tokenizer_config.json "
                       f"({first_line(e)[:200]}); download both again") from e

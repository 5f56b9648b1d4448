"""
Tokenizers whose class in transformers does not cut texts as their tokenizer.json says: those of
many families in version 5, and Mistral's Tekken.

    "fix_mistral_regex": true    in tokenizer_config.json: Tekken's words for Mistral's models
"""
from errors import BadInput

# how Mistral's Tekken splits a text into words
TEKKEN = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
          r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}|"
          r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def use_parts_of_file(hf, path):
    """
    Cut texts as tokenizer.json says. Version 5 of transformers makes the tokenizers of some classes
    anew, with their family's rules: SmolLM2 would read other ids for the line breaks in "\\n\\n1".
    """
    from transformers.utils import cached_file

    file = cached_file(path, "tokenizer.json", _raise_exceptions_for_missing_entries=False)
    backend, blank = getattr(hf, "backend_tokenizer", None), hf.init_kwargs.get("add_prefix_space")
    read = type(backend).from_file(file) if file and backend and not blank else None
    if read and (blank is None or "ByteLevel" in repr(read.decoder)):  # else the settings count
        for part in ("normalizer", "pre_tokenizer", "decoder", "model"):
            setattr(backend, part, getattr(read, part))
    if backend and backend.token_to_id("[INST]") and "{1,3}" in repr(backend.pre_tokenizer):
        use_words_of_tekken(hf, path)


def use_words_of_tekken(hf, path):
    """
    Tekken's own words, where tokenizer.json has those of cl100k, as in some of Mistral's folders,
    and fix_mistral_regex is true. transformers does it before version 5 only; and only warns where
    the setting is missing: then this raises BadInput.
    """
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

    own = hf.init_kwargs.get("fix_mistral_regex")
    if own is None:
        raise BadInput(f"{path}: its tokenizer.json splits words otherwise than Mistral's models "
                       'know them; write "fix_mistral_regex": true into tokenizer_config.json, or '
                       "false for a model that was trained with this file")
    if own:
        hf.backend_tokenizer.pre_tokenizer = Sequence([
            Split(Regex(TEKKEN), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)])

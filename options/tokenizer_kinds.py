"""
Tokenizers whose class in transformers does not cut texts as their tokenizer.json says: those of
many families in version 5. And Mistral's, whose tokenizer.json may have the wrong words.
"""
from errors import BadInput


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
    # in some of Mistral's folders stand the words of cl100k, and its models know those of Tekken;
    # transformers writes these where config.json names no version of its own from 5 on
    if (backend and backend.token_to_id("[INST]") and "{1,3}" in repr(backend.pre_tokenizer)
            and hf.init_kwargs.get("fix_mistral_regex") is not False):
        raise BadInput(f"{path}: its tokenizer.json splits words otherwise than Mistral's models "
                       'know them; mend a copy of the folder: take "transformers_version" out of '
                       "its config.json, and in Python AutoTokenizer.from_pretrained(DIR, "
                       "fix_mistral_regex=True).save_pretrained(DIR); or, for a model that was "
                       'trained with this file, write "fix_mistral_regex": false into its '
                       "tokenizer_config.json")

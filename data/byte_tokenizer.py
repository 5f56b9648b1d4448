"""
A tokenizer for small tasks, with a token for each byte. Nothing is to be downloaded for it.
"""
import json
import os


def write_byte_tokenizer(folder, markers=()):
    """
    Write tokenizer.json and tokenizer_config.json: the tokens are the 256 bytes, then markers (such
    as <think>, which text may contain), <eos> and <pad>.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    names = {shown: byte for byte, shown in bytes_to_unicode().items()}  # as GPT-2 writes bytes
    backend = Tokenizer(models.BPE(vocab=names, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(s, normalized=False) for s in markers])
    backend.add_special_tokens(["<eos>", "<pad>"])
    os.makedirs(folder, exist_ok=True)
    backend.save(os.path.join(folder, "tokenizer.json"))
    with open(os.path.join(folder, "tokenizer_config.json"), "w", encoding="utf-8") as f:
        json.dump(dict(tokenizer_class="PreTrainedTokenizerFast", eos_token="<eos>",
                       pad_token="<pad>", clean_up_tokenization_spaces=False), f, indent=2)

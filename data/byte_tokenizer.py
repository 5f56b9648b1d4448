"""
A tokenizer for small tasks, with a token for each byte. Nothing is to be downloaded for it.
"""
import importlib.util
import sys

if not importlib.util.find_spec("tokenizers"):
    sys.exit(f"{sys.executable} has no tokenizers; type: source .venv/bin/activate")


def write_byte_tokenizer(folder, markers=(), chat_template=None):
    """
    Write it as a tokenizer of transformers, tokenizer.json and tokenizer_config.json, and the chat
    template, if there is one. Its ids are the 256 bytes, then markers (such as <think>, which text
    may contain), <eos> and <pad>.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = {letter: byte for byte, letter in bytes_to_unicode().items()}  # a byte is a letter
    backend = Tokenizer(models.BPE(vocab=letters, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    for text in (*markers, "<eos>", "<pad>"):
        backend.add_tokens([AddedToken(text, normalized=False, special=text not in markers)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>",
                                        pad_token="<pad>", clean_up_tokenization_spaces=False)
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)

"""
A tokenizer for small tasks, with a token for each byte. Nothing is to be downloaded for it.
"""
import os
import sys

# Python looks for modules in this file's folder, data/; ours are in the folder above it.
sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import tiktoken  # noqa: E402

from options.tiktoken_files import encode_as  # noqa: E402


def byte_encoding(markers=()):
    """
    The encoding whose ids are the 256 bytes, then markers (such as <think>, which text may
    contain), <eos> and <pad>.
    """
    special = {text: 256 + i for i, text in enumerate([*markers, "<eos>", "<pad>"])}
    return tiktoken.Encoding("bytes", pat_str=r"[\s\S]+", special_tokens=special,
                             mergeable_ranks={bytes([i]): i for i in range(256)})


def write_byte_tokenizer(folder, markers=()):
    """Write it as a tokenizer of transformers: tokenizer.json and tokenizer_config.json."""
    encode_as(byte_encoding(markers), markers, eos_token="<eos>",
              pad_token="<pad>").save_pretrained(folder)

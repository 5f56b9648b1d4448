"""
The padding token of a reward model that is saved. transformers and TRL read a score at the last
token that is not config.json's pad_token_id. Without one they refuse batches, and where it is the
end of a turn they read the token in front of it, for which the model was not trained. So the folder
of a reward model gets a padding token that ends nothing.
"""
import glob
import os
import re

import torch

from engine.disk import write_json
from folders import read_json

NEW = "[PAD]"  # where a tokenizer has nothing to pad with, as GPT-2's


def give_padding(folder, tokenizer, hf):
    """
    Write a padding token into the folder of a saved reward model, into config.json and the
    tokenizer's files. tokenizer: the one that was saved there; hf: the model that was. Where that
    tokenizer has no token for it, the folder's gets a new one, behind all others, and the model an
    embedding for it, of zeros: nothing ever reads it. All other ids stay as they are.
    """
    text, number = choose_padding(tokenizer)
    if text == NEW and number is None:
        number = add_token(folder, tokenizer)
    file = os.path.join(folder, "config.json")
    config = read_json(file) | {"pad_token_id": number}
    if number >= config["vocab_size"]:
        add_embeddings(folder, hf, number + 1 - config["vocab_size"])
        config["vocab_size"] = number + 1
    write_json(file, config)
    name_padding(folder, text)


def choose_padding(tokenizer):
    """
    (text, id) of the padding token: the tokenizer's own, unless it ends a turn or a text; else a
    special token that was made for it, or one that this kind of model never meets. (NEW, None) if
    there is none.
    """
    ends = {tokenizer.eos_id, getattr(tokenizer, "turn_end", None)}
    backend = getattr(tokenizer, "backend", None)
    if backend is None:  # the built-in one, whose padding is its own; or GPT-2's, which has none
        own = tokenizer.pad_id not in ends
        return (tokenizer.settings["pad"], tokenizer.pad_id) if own else (NEW, None)
    if backend.pad_token_id is not None and backend.pad_token_id not in ends:
        return backend.pad_token, backend.pad_token_id
    special = {t.content: i for i, t in backend.added_tokens_decoder.items()
               if t.special and i not in ends and i != backend.bos_token_id}
    padding = [s for s in special if "pad" in s.lower()]
    wanted = [s for s in padding if not re.search("fim|vision|image|video|audio", s)]
    wanted += [s for s in ("<|endoftext|>", "<unk>") if s in special] + padding
    wanted += [s for s in special if "reserved" in s or "control" in s]
    return (wanted[0], special[wanted[0]]) if wanted else (NEW, None)


def add_token(folder, tokenizer):
    """Add NEW to the tokenizer's files in a folder, and return its id."""
    from tokenizers import Tokenizer as Backend

    file = os.path.join(folder, "tokenizer.json")
    if os.path.isfile(file):
        backend = Backend.from_file(file)
        backend.add_special_tokens([NEW])
        backend.save(file)
        return backend.token_to_id(NEW)
    return tokenizer.vocab_size  # transformers adds a pad_token that it does not know at the end


def name_padding(folder, text):
    """
    Make `text` the pad_token in the tokenizer's settings in a folder, where it is not: a class of
    transformers may have one of its own, in some versions.
    """
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        file = os.path.join(folder, name)
        there = os.path.isfile(file)
        settings = read_json(file) if there else {}
        given = settings.get("pad_token")
        given = given.get("content") if isinstance(given, dict) else given
        if given != text and (there or name == "tokenizer_config.json"):
            write_json(file, settings | {"pad_token": text})


def add_embeddings(folder, hf, count):
    """Add rows of zeros to the embedding of a model, hf, that was just saved in a folder."""
    from safetensors.torch import load_file, save_file

    table = hf.get_input_embeddings().weight
    name = next(name for name, p in hf.named_parameters() if p is table)
    for file in glob.glob(os.path.join(glob.escape(folder), "*.safetensors")):
        tensors = load_file(file)
        if name in tensors:
            rows = tensors[name].new_zeros(count, tensors[name].shape[1])
            tensors[name] = torch.cat([tensors[name], rows])
            save_file(tensors, file, metadata={"format": "pt"})

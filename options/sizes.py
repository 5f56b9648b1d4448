"""
A model's folder that may ask for more than a machine has: sizes in its config.json that its weights
cannot hold, or a tokenizer that makes each text many times longer. transformers would build what
the files say, for hours, or until no memory is left.
"""
import contextlib
import json
import math
import os
import re

import torch

from configurator import read_json
from errors import BadInput

LAYERS = 1000  # more layers than any model has
GROWTH = 10_000  # so many letters for one are more than any tokenizer writes


def check_sizes(path, head=""):
    """
    Raise BadInput where a folder's files say more layers, labels or weights than it has, or where
    its tokenizer makes texts many times longer. head: that of the model, see load.load; "": no
    model is read, only a tokenizer.
    """
    count, held = tensors_in(path)
    for key, n in counts_in(read_settings(path, "config.json")):
        if n > max(LAYERS, count if "layer" in key else held if key == "num_labels" else 2**62):
            raise BadInput(f"{path}: its config.json says {key} = {n:,}, and its files have {count}"
                           f" tensors of {held:,} numbers; is the download complete?")
    if head:
        return check_weights(path, head, held) if held else None
    if (growth := growth_of(read_settings(path, "tokenizer.json"))) > GROWTH:
        raise BadInput(f"{path}: its tokenizer.json replaces letters by texts that are together "
                       f"{growth:,.0f} times as long; give another tokenizer")


def check_weights(path, head, held):
    """Raise BadInput where a model would have many more weights than the `held` of its files."""
    from transformers import AutoConfig

    from load import auto_class

    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    config.num_labels, needed = 1 if head == "scalar" else config.num_labels, 0
    # on this device it takes no memory; what transformers raises, it raises again when it loads
    with contextlib.suppress(Exception), torch.device("meta"):
        needed = sum(p.numel() for p in auto_class(head).from_config(config).parameters())
    # a table may be stored once and used twice; of quantized weights one number has several
    if needed > held * (16 if getattr(config, "quantization_config", None) else 2) + 10**6:
        raise BadInput(f"{path}: by its config.json the model has {needed:,} weights, and its files"
                       f" have {held:,}; is the download complete?")


def read_settings(path, file):
    """The content of a JSON file of the folder; {} where it is none: its readers say it."""
    try:
        return read_json(os.path.join(path, file))
    except (OSError, ValueError, RecursionError):
        return {}


def counts_in(settings):
    """(key, number) of the layers, labels and ids in settings, and in those of a model's parts."""
    for key, x in settings.items() if isinstance(settings, dict) else ():
        # Gemma 3n's vocab_size_per_layer_input counts ids, and no layers
        if type(x) is int and re.search("layers?$|num_labels|_id$", key):
            yield key, x
        elif isinstance(x, dict):
            yield from counts_in(x)


def tensors_in(path):
    """
    How many tensors a model's safetensors have, and how many numbers, from their headers; 0 where
    its weights are in another format: safetensors beside them, as an adapter's, are not the model.
    """
    count, held, names = 0, 0, os.listdir(path)
    if not any(name.startswith("model.safetensors") for name in names):  # nor the list of several
        return count, held
    for name in names:
        if name.endswith(".safetensors") and os.path.isfile(os.path.join(path, name)):
            with open(os.path.join(path, name), "rb") as f:
                size = min(int.from_bytes(f.read(8), "little"), os.path.getsize(f.fileno()))
                try:
                    shapes = [x["shape"] for key, x in json.loads(f.read(size)).items()
                              if key != "__metadata__"]
                    count, held = count + len(shapes), held + sum(map(math.prod, shapes))
                except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                    continue  # the library that reads the file says it
    return count, held


def growth_of(tokenizer):
    """How many times longer the Replace rules of a tokenizer.json may make a text, together."""
    growth, parts = 1.0, [tokenizer]
    while parts:
        part = parts.pop()
        if isinstance(part, dict) and part.get("type") == "Replace":
            pattern, letters = part.get("pattern"), len(str(part.get("content")))
            found = pattern.get("String") if isinstance(pattern, dict) else None
            if found or letters <= 1 and takes_a_letter(pattern):  # \s+ and the like: one blank
                growth *= max(letters / len(found or "a"), 1.0)
            else:  # a regular expression may fit between any two letters
                growth *= letters + 1
        elif isinstance(part, dict):
            parts += [x for key, x in part.items() if key not in ("vocab", "merges")]
        elif isinstance(part, list):
            parts += part
    return growth


def takes_a_letter(pattern):
    """Whether the regular expression of a rule cannot fit between two letters."""
    expression = pattern.get("Regex") if isinstance(pattern, dict) else None
    if not isinstance(expression, str) or re.search(r"\(\?[=!<]|\\[bBGKyY]", expression):
        return False
    try:
        return not re.search(expression, "")
    except (re.error, OverflowError, RecursionError):  # tokenizers has more signs than Python
        return False

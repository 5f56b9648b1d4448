"""
What the files of a folder may not say: more layers or labels than any model has, or a tokenizer
that makes each text many times longer, which transformers would build, for hours; or that the
weights are no safetensors, or in another folder.
"""
import json
import os
import re

from configurator import read_json
from errors import BadInput

LARGEST = {"layer": 1000, "layers": 1000, "num_labels": 10**6}  # the ends of names -> most
GROWTH = 10_000  # a text that is so many times longer is an attack


def check_sizes(path, file):
    """Raise BadInput where this file of a folder, config.json or tokenizer.json, is such a one."""
    growth = 1.0

    def look(part):
        """At each JSON object in the file."""
        nonlocal growth
        for key, n in part.items() if file == "config.json" else ():
            most = next((most for end, most in LARGEST.items() if key.endswith(end)), None)
            if most and isinstance(n, int) and n > most:
                raise BadInput(f"{path}: its {file} says {key} = {n:,}, more than any model has; "
                               "is it the right file?")
        if part.get("type") == "Replace":
            pattern, letters = part.get("pattern"), len(str(part.get("content")))
            found = pattern.get("String") if isinstance(pattern, dict) else None
            if not found and fits_between(pattern):
                letters += 1  # the one beside it stays
            growth *= max(letters / len(found or "a"), 1)
        return part

    try:
        with open(os.path.join(path, file), "rb") as f:
            json.load(f, object_hook=look)
    except BadInput:
        raise
    except (OSError, ValueError, TypeError, RecursionError):  # its readers say it
        return
    if growth > GROWTH:
        raise BadInput(f"{path}: its tokenizer.json replaces letters by texts that are together "
                       f"{growth:,.0f} times as long; give another tokenizer")


def fits_between(pattern):
    """Whether a rule's regular expression may fit between two letters, and so lengthen a text."""
    try:
        around = re.search(r"\(\?[=!<]|\\[bBGKyY]", pattern["Regex"])  # it looks at letters around
        return bool(around or re.search(pattern["Regex"], ""))
    except (re.error, TypeError, KeyError, OverflowError, RecursionError):  # none that Python knows
        return True


def check_index(path, config):
    """
    Raise BadInput where the list of a model's files of weights names others than safetensors in its
    own folder: transformers would read a pickle, or a file of another folder.
    """
    from transformers.utils import cached_file

    for name in "model.safetensors.index.json", getattr(config, "transformers_weights", None) or "":
        file = name.endswith(".json") and cached_file(
            path, name, _raise_exceptions_for_missing_entries=False)
        for part in set(read_json(file)["weight_map"].values()) if file else ():
            if not part.endswith(".safetensors") or os.path.isabs(part) or ".." in part.split("/"):
                raise BadInput(f"{file} names {part!r}, which is no file of safetensors in its "
                               "folder; convert the model with save_pretrained")

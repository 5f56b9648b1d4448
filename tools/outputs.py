"""
Where a tool writes. It says before its work what it would overwrite: a file that it reads, or one
that a run or a model needs, is refused; any other file that is there is named.
"""
import os
import re

from errors import BadInput, say
from options.sources import files_in

# what runs and models are made of, and no tool
KEPT = re.compile(r"(log|samples|rollouts)\.jsonl|.*\.safetensors|.*(config|index)\.json|"
                  r"(state|manifest|tokenizer|vocab|special_tokens_map|added_tokens)\.json")


def check_outputs(key, paths, sources):
    """
    Raise BadInput where a tool may not write one of these paths, of its key such as --out; and say
    which of them is there already. sources: the paths that the tool reads.
    """
    for path in paths:
        known = [source for source in sources if is_same(path, source)]
        beside = os.path.join(os.path.dirname(path), "config.json")
        if os.path.isdir(path):
            why = "is a folder"
        elif known:
            why = f"is {known[0]}, which this reads"
        elif os.path.lexists(path) and os.path.isfile(beside) and KEPT.fullmatch(
                os.path.basename(path)):
            why = "is a file of a run or a model"
        else:
            if os.path.lexists(path):
                say(f"{path} is there, and is replaced")
            continue
        raise BadInput(f"{path} {why}, and would be overwritten; type another {key}")


def is_same(path, other):
    """Whether two paths lead to one file, by links or other letters, too; there need be none."""
    if os.path.exists(path) and os.path.exists(other):
        return os.path.samefile(path, other)
    return os.path.realpath(path) == os.path.realpath(other)


def files_of(spec):
    """The files on this disk that a path of data such as a.jsonl,0.3*b.jsonl,hf:DIR:train names."""
    parts = [part.rpartition("*")[2].strip() for part in spec.split(",")]
    parts = [spec] if os.path.exists(spec) else parts
    return [file for part in parts for file in (
        files_in(part) if os.path.isdir(part[3:].split(":")[0]) and part.startswith("hf:")
        else [part])]

"""
The files that a tool writes: which it may, and how.
"""
import contextlib
import os
import re

from errors import BadInput
from folders import CONFIGS

# in the folder of a run
RUN_FILES = ("config.json", "log.jsonl", "samples.jsonl", "rollouts.jsonl")


def check_writable(path, key="out", reads=(), made=b"(?!)"):
    """
    Raise BadInput now, and not after hours, unless the file of this key may be written: it is new,
    or this tool has written it (see fault_of). The file's folder is made; nothing else stays.
    """
    folder, name = os.path.split(path)
    if not name.removesuffix(".jsonl").removesuffix(".json"):
        raise BadInput(f"{key} names no file: {path!r}; type --{key}=FOLDER/NAME")
    try:
        os.makedirs(folder or ".", exist_ok=True)
        fault = fault_of(path, reads, made)
        if not fault:
            part = part_of(path)
            open(part, "x").close()
            os.remove(part)
    except OSError as e:
        raise BadInput(f"{key} = {path!r} cannot be written: {e.strerror}; choose another "
                       f"--{key}") from e
    if fault:
        raise BadInput(f"{key} = {path!r} {fault}; choose another --{key}")


def fault_of(path, reads, made):
    """
    The reason why a tool must not write this file; "" where it may. reads: the files and model
    folders that are read. made: a pattern for the beginning of files that the tool has written.
    """
    folder, name = os.path.split(path)
    near = os.listdir(folder or ".")
    tensors = any(x.endswith((".safetensors", "tokenizer.json")) for x in near)
    if "manifest.json" in near or tensors and set(near).intersection(CONFIGS):
        return "would lie in the folder of a model or a checkpoint"
    if name in RUN_FILES and set(near).intersection(RUN_FILES):
        return "is the name of a file of the run in that folder"
    if not os.path.lexists(path):
        return ""
    if os.path.islink(path) or not os.path.isfile(path):
        return "exists and is not a plain file"
    if any(os.path.exists(source) and os.path.samefile(path, source) for source in reads):
        return "is read here"
    with open(path, "rb") as f:
        ours = re.match(made, f.read(2**24))
    return "" if ours else "exists, and this tool, as it is now, has not written it (delete it)"


def part_of(path):
    """A new name in the same folder as a file."""
    return f"{path}.{os.urandom(4).hex()}.part"


@contextlib.contextmanager
def written(path, mode="x"):
    """A new file: it gets the name `path` if the block ends well, else it is removed."""
    part = part_of(path)
    try:
        with open(part, mode, encoding=None if "b" in mode else "utf-8") as f:
            yield f
        os.replace(part, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(part)

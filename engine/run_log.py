"""
log.jsonl: one object an iteration, appended whole, and cut back to the checkpoint that a run resumes from.
"""
import json
import math
import os

from engine.disk import patiently, read_bytes
from engine.together import together
from errors import Stop
from parallel import rank_and_size


def read_log(out_dir):
    """[(iteration, line)] of log.jsonl; None for the iteration of a line that a kill has cut short. Raises Stop."""
    try:
        text = patiently(read_bytes, os.path.join(out_dir, "log.jsonl")).decode(errors="replace")
    except FileNotFoundError:
        return []
    found = []
    for line in text.split("\n"):
        try:
            found.append((int(json.loads(line)["iteration"]), line))
        except (ValueError, KeyError, TypeError, OverflowError):
            found.append((None, line))
    return found if text else []


def cut_log(out_dir, iteration):
    """Drop what log.jsonl says of this and later iterations: they will be run again."""
    file = os.path.join(out_dir, "log.jsonl")
    kept = [f"{line}\n" for i, line in read_log(out_dir) if i is not None and i < iteration]
    with open(file + ".tmp", "w", encoding="utf-8") as f:
        f.writelines(kept)
    os.replace(file + ".tmp", file)


def write_log(out_dir, record):
    """
    A collective: rank 0 appends one iteration's object to log.jsonl, the whole line or nothing. Numbers that are not
    finite are written as null, for JSON has no others. Raises Stop, on all ranks, when the disk is full.
    """
    finite = {k: None if isinstance(x, float) and not math.isfinite(x) else x for k, x in record.items()}
    line = json.dumps(finite, allow_nan=False) + "\n"

    def append():
        file = os.path.join(out_dir, "log.jsonl")
        size = os.path.getsize(file) if os.path.exists(file) else 0
        try:
            with open(file, "a", encoding="utf-8") as f:
                f.write(line)
        except OSError as e:
            if os.path.exists(file):
                os.truncate(file, size)
            raise Stop(f"{file} cannot be written: {e.strerror}; it ends with the iteration before. Make room, and resume with "
                       "the same command") from e

    together(append if rank_and_size()[0] == 0 else lambda: None)

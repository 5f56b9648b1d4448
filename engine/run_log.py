"""
log.jsonl of a run: one JSON object a line, one line an iteration.

Every line is complete, and a resumed run cuts the log back to its checkpoint: the iterations after
the checkpoint run again, and are logged again.
"""
import json
import math
import os

from engine.disk import patiently, read_bytes
from engine.together import together
from errors import Stop
from parallel import rank_and_size


def write_log(out_dir, record):
    """
    A collective. Append one iteration's record, the whole line or nothing. Rank 0 writes.

    A float that is NaN or infinite becomes null, as JSON has no such numbers. Raises Stop, on all
    ranks, when the disk is full.
    """
    finite = {k: None if isinstance(x, float) and not math.isfinite(x) else x
              for k, x in record.items()}
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
            raise Stop(f"{file} cannot be written: {e.strerror}; it ends with the iteration before."
                       " Make room, and resume with the same command") from e

    together(append if rank_and_size()[0] == 0 else lambda: None)


def read_log(out_dir):
    """
    [(iteration, line)] of log.jsonl, [] if there is none; the iteration is None where a line cannot
    be read, as a kill while writing may leave one. Raises Stop if the file cannot be read.
    """
    try:
        content = patiently(read_bytes, os.path.join(out_dir, "log.jsonl"))
    except FileNotFoundError:
        return []
    text = content.decode(errors="replace")
    found = []
    for line in text.split("\n"):
        try:
            found.append((int(json.loads(line)["iteration"]), line))
        except (ValueError, KeyError, TypeError, OverflowError):
            found.append((None, line))
    return found if text else []


def cut_log(out_dir, iteration):
    """Delete the lines of this iteration and later ones, and lines that cannot be read."""
    file = os.path.join(out_dir, "log.jsonl")
    kept = [f"{line}\n" for i, line in read_log(out_dir) if i is not None and i < iteration]
    with open(file + ".tmp", "w", encoding="utf-8") as f:
        f.writelines(kept)
    os.replace(file + ".tmp", file)

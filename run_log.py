"""
log.jsonl of a run: one JSON object a line, one line an iteration. And samples.jsonl: one line for
each response of an evaluation that is kept, so that it can be read later what earned which score.

Every line is complete, and a resumed run cuts both files back to its checkpoint: the iterations
after the checkpoint run again, and are logged again.
"""
import json
import math
import os

from errors import Stop, warn
from parallel import rank_and_size
from together import together

LOG_FILES = "log.jsonl", "samples.jsonl"


def write_log(out_dir, record):
    """
    A collective. Append one iteration's record, the whole line or nothing. Rank 0 writes.

    A float that is NaN or infinite becomes null, as JSON has no such numbers. Raises Stop, on all
    ranks, when the disk is full.
    """
    finite = {k: None if isinstance(x, float) and not math.isfinite(x) else x
              for k, x in record.items()}
    line, file = json.dumps(finite, allow_nan=False) + "\n", os.path.join(out_dir, "log.jsonl")
    together((lambda: append(file, line)) if rank_and_size()[0] == 0 else lambda: None)


def write_samples(out_dir, samples):
    """
    A collective. Append an evaluation's samples to samples.jsonl: a list of dicts, whose first
    entry is the iteration. All of their lines or none. Rank 0 writes. Raises Stop like write_log.
    """
    lines = "".join(json.dumps(sample, allow_nan=False) + "\n" for sample in samples)
    file = os.path.join(out_dir, "samples.jsonl")
    together((lambda: append(file, lines)) if rank_and_size()[0] == 0 else lambda: None)


def append(file, text):
    """Write text at the end of a file; where the disk is full, the file stays as it was."""
    size = os.path.getsize(file) if os.path.exists(file) else 0
    try:
        with open(file, "a", encoding="utf-8") as f:
            f.write(text)
    except OSError as e:
        if os.path.exists(file):
            os.truncate(file, size)
        raise Stop(f"{file} cannot be written: {e.strerror}; it ends with the iteration before."
                   " Make room, and resume with the same command") from e


def read_log(out_dir, name="log.jsonl"):
    """
    [(iteration, line)] of a file of LOG_FILES, [] if there is none. A line that cannot be read, as
    a kill while writing may leave one, has the iteration None.
    """
    try:
        with open(os.path.join(out_dir, name), encoding="utf-8", errors="replace") as f:
            text = f.read()
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
    """
    Delete the lines of this iteration and later ones, and lines that cannot be read, from both
    files. log.jsonl is there afterwards, if only empty. What is missing before them is said.
    """
    expected = set(range(iteration))
    for name in LOG_FILES:
        file = os.path.join(out_dir, name)
        kept = [(i, line) for i, line in read_log(out_dir, name) if i is not None and i < iteration]
        if name == "log.jsonl" or os.path.exists(file):
            with open(file + ".tmp", "w", encoding="utf-8") as f:
                f.writelines(f"{line}\n" for _, line in kept)
            os.replace(file + ".tmp", file)
            missing = sorted(expected - {i for i, _ in kept})
            if missing:
                warn(f"{file} was cut or damaged: of the iterations before {iteration} it lacks "
                     f"{len(missing)}, from {missing[0]} to {missing[-1]}, and the run goes on")
        expected = {i for i, line in kept if '"eval/' in line}  # of samples.jsonl

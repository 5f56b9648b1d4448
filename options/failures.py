"""
What an exception of Python's or torch's means for a user: a full disk, too little memory, a folder
where one may not write, another rank that is lost. errors.py asks when a program ends by one.
"""
import errno
import os
import re
import traceback

from errors import BadInput, Lost, Stop, first_line

# the functions that read a folder of somebody's, their argument `path`. In it anything may be
# wrong, and libraries raise anything, Rust's even a panic that is no Exception
READERS = ("load.py", "load"), ("tokenizer.py", "load_tokenizer")


def meaning_of(error, phase):
    """The BadInput or Stop that says it in one line; None for a bug. phase: of the run."""
    if isinstance(error, OSError):
        return of_the_disk(error)
    if type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error):
        return Stop(f"out of memory ({str(error)[:200]}); lower micro_batch_size or "
                    "rollout_batch_size, or the model's size")
    its = lost(error, phase) if isinstance(error, RuntimeError) else None
    return its or of_a_folder(error)


def of_a_folder(error):
    """Of whatever is raised while a model's or a tokenizer's folder is read; None elsewhere."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        place = os.path.basename(frame.f_code.co_filename), frame.f_code.co_name
        if place in READERS:
            return BadInput(f"{frame.f_locals.get('path')}: this model or tokenizer cannot be "
                            f"used: {first_line(error)[:300]}")
    return None


def of_the_disk(error):
    """Of an OSError: of a full disk, or of a place such as an out_dir that one may not write."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Stop(f"{error.filename or 'the output'} cannot be written: {error.strerror}; make "
                    "room and run the same again")
    if error.errno in (errno.EROFS, errno.ELOOP) or isinstance(
            error, (PermissionError, FileExistsError, NotADirectoryError)):
        return BadInput(f"{error.filename}: {error.strerror}")
    return None


def lost(error, phase):
    """The Lost for an exception of torch's that comes from a lost rank; None for any other."""
    import torch.distributed as dist  # slow; such an exception comes long after

    words = "gloo|nccl|connection (closed|reset)|timed out|broken pipe"
    if not isinstance(error, dist.DistError) and not (
            dist.is_initialized() and re.search(words, str(error), re.IGNORECASE)):
        return None
    reason = str(error).strip().split("\n")[0].rpartition("] ")[2].partition(". ")[0]
    return Lost(f"{phase}: lost touch with another rank: it was killed, or hangs, or (in a fork) "
                f"did not reach a COLLECTIVE that this rank waits in ({reason}). The "
                "last checkpoint is good; resume with the same command")

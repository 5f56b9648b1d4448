"""
What an exception of Python's or torch's means for a user: a full disk, too little memory, a folder
where one may not write, another rank that is lost. errors.py asks when a program ends by one.
"""
import errno
import re

from errors import BadInput, Lost, Stop


def meaning_of(error, phase):
    """The BadInput or Stop that says it in one line; None for a bug. phase: of the run."""
    if isinstance(error, OSError):
        return of_the_disk(error)
    if type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error):
        return Stop(f"out of memory ({str(error)[:200]}); lower micro_batch_size or "
                    "rollout_batch_size, or the model's size")
    return lost(error, phase) if isinstance(error, RuntimeError) else None


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

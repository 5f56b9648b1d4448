"""
What an exception of Python's or torch's means for a user: a full disk, too little memory, a folder
where one may not write, another rank that is lost. errors.py asks when a program ends by one. And
what a run says of a rule that fails, of an optional package that is not there, of a gradient that
is not finite, and to torchrun.
"""
import contextlib
import errno
import importlib
import json
import math
import os
import re
import time
import traceback

from errors import BadInput, Lost, Stop, first_line, translated

# the functions that read a folder of somebody's, their argument `path`. In it anything may be
# wrong, and libraries raise anything, Rust's even a panic that is no Exception
READERS = ("load.py", "load"), ("tokenizer.py", "load_tokenizer")


def meaning_of(error, phase):
    """The BadInput or Stop that says it in one line; None for a bug. phase: of the run."""
    if isinstance(error, OSError):
        return of_the_disk(error)
    if isinstance(error, RuntimeError) and re.search(
            "out of memory|ALLOC_FAILED|can't allocate memory", str(error)):  # of all libraries
        return Stop(f"out of memory ({str(error)[:200]}); lower micro_batch_size or "
                    "rollout_batch_size, or the model's size")
    its = lost(error, phase) if isinstance(error, RuntimeError) else None
    return its or of_a_folder(error)


def package(name, what, module=""):
    """An optional package, or a module that needs it, imported; what: for it. Raises BadInput."""
    try:
        return importlib.import_module(module or name)
    except ImportError as e:  # it is not there, or does not find what it needs itself
        raise BadInput(f"{what}: the package {name} cannot be imported ({first_line(e)}); type pip "
                       f"install {name}, or leave it out") from e


def of_a_rule(name, error):
    """A rule's error as a Stop that names the place; a BadInput or Stop stays as it is."""
    error = translated(error) if isinstance(error, ModuleNotFoundError) else error
    if isinstance(error, (BadInput, Stop)):
        return error
    place = place_of(traceback.extract_tb(error.__traceback__))
    return Stop(f"reward {name!r} failed{place}: {first_line(error)}")


def place_of(trace):
    """" at FILE, line N": the innermost place of a traceback that is not in installed code."""
    own = [at for at in trace if not re.search("/lib/python|<frozen|user_code.py", at.filename)]
    return f" at {os.path.relpath(own[-1].filename)}, line {own[-1].lineno}" if own else ""


def of_a_gradient(run, norms):
    """The Stop of a step whose norms, {model: number}, are not all finite."""
    import parallel  # not at the top: a program may ask what an error means before torch is there

    name = next(name for name, norm in norms.items() if not math.isfinite(norm))
    bad = [n for n, p in run.trained[name].named_parameters()
           if p.grad is not None and not parallel.my_part(p.grad).isfinite().all()]
    return Stop(f"iteration {run.iteration}: the gradient of {name}'s "
                f"{(bad + ['norm (overflow)'])[0]} is not finite; stopped before the step. "
                "Lower the learning rate, or look at this iteration's scores and data")


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


def tell_torchrun(line):
    """torchrun's report of an error ends with this line, and not with a hint at other errors."""
    extra = dict(py_callstack=line, timestamp=str(int(time.time())))
    with contextlib.suppress(OSError), open(
            os.environ["TORCHELASTIC_ERROR_FILE"], "w", encoding="utf-8") as f:
        json.dump(dict(message=dict(message=line, extraInfo=extra)), f)

"""
How a script says what is wrong: four exceptions, and the hook that turns each into one line on
stderr and an exit code.
"""
import errno
import io
import os
import sys
import time
import traceback

import status


class BadInput(ValueError):
    """The user's input makes no sense. In one line: what is wrong, where, what to type instead."""


class BadConfig(BadInput):
    """A BadInput that every rank meets alike, so that it is enough when rank 0 says it."""


class Stop(RuntimeError):
    """To go on would be wrong, as the run itself has noticed. Raised on all ranks together."""


class Lost(Stop):
    """Another rank has ended or does not answer. Each rank that is left says so: it may be the one
    whose output is read."""


# Functions that a run of several ranks puts here, at its start:
torn = None  # error -> the Lost that it means, or None if the error does not come from a lost rank
leads = False  # whether this rank is the first one of its role
leaving = None  # tells ranks of other roles with which BadInput or Stop this one ends
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # of a disk


def report_errors():
    """At a script's start: errors are lines, and names that are no UTF-8 can be printed."""
    sys.excepthook = report_and_exit
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def report_and_exit(kind, error, trace):
    """
    sys.excepthook of the scripts. BadInput is one line and exit code 2. Stop, a full disk and too
    little memory are one line and exit code 1, and Ctrl-C one line and 130. A closed pipe ends a
    script without a message. Any other exception is a bug, and is shown with its traceback.
    """
    if torn and issubclass(kind, RuntimeError) and not issubclass(kind, Stop):
        error = torn(error) or error
    kind, message = type(error), str(error)
    if issubclass(kind, BrokenPipeError):
        os._exit(1)
    elif issubclass(kind, KeyboardInterrupt):
        places = traceback.extract_tb(trace)[-1:]  # a file of the user's may have raised it
        message = "interrupted" + "".join(f" at {at.filename}, line {at.lineno}" for at in places)
    elif issubclass(kind, OSError) and error.errno in FULL:
        message = (f"{error.filename or 'the output'} cannot be written: {error.strerror}; make "
                   "room and run the same again")
    elif is_out_of_memory(kind, message):
        message = (f"out of memory ({first_line(error)[:200]}); lower micro_batch_size or "
                   "rollout_batch_size, or the model's size")
    elif issubclass(kind, ModuleNotFoundError) and error.name.startswith(("options", "grading")):
        wanted = traceback.extract_tb(trace)[-1].line  # such as from options.roles import Ahead
        kind, message = BadConfig, (f"{wanted}: there is no such file here, and a key of this run "
                                    "needs it; copy it from quartet, or leave that key out")
    elif not issubclass(kind, (BadInput, Stop)):
        sys.__excepthook__(kind, error, trace)
        return
    if leaving and isinstance(error, (BadInput, Stop)):
        leaving(error)
    rank = int(os.environ.get("RANK", 0))
    if speaks(kind, rank):
        status.clear()
        where = f" (rank {rank})" if rank else ""
        # sys.__stderr__: while this hook runs, torch.distributed has a buffer of its own in
        # sys.stderr, which os._exit below would not write out
        print(f"{os.path.basename(sys.argv[0])}: error{where}: {one_line(message)}",
              file=sys.__stderr__, flush=True)
    else:
        time.sleep(1)  # torchrun kills all ranks when one ends: first let the one that speaks end
    try:
        sys.stdout.flush()
    except OSError:
        pass  # a full disk or a closed pipe
    # _exit: to leave the group of ranks in order would wait for a rank that may have ended
    os._exit(130 if issubclass(kind, KeyboardInterrupt) else 2 if issubclass(kind, BadInput) else 1)


def speaks(kind, rank):
    """Whether this rank prints an error of this class, which others may have as well."""
    if rank == 0 or issubclass(kind, Lost):
        return True
    if issubclass(kind, BadInput):  # hosts may have other files, and roles read other models
        first = leads or os.environ.get("LOCAL_RANK", "0") == "0"
        return first and not issubclass(kind, BadConfig)
    return not issubclass(kind, (Stop, KeyboardInterrupt))  # a Stop is raised on all ranks


def is_out_of_memory(kind, message):
    """Whether an exception of this class and message says that there is too little memory."""
    # torch's allocators have their own words; CUDA and cuBLAS say it where torch has not asked them
    words = "can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED"
    return (kind.__name__ == "OutOfMemoryError" or issubclass(kind, MemoryError)
            or any(phrase in message for phrase in words))


def say(message):
    """Print something on rank 0, in one line."""
    if os.environ.get("RANK", "0") == "0":
        status.clear()
        print(one_line(message), flush=True)


def warn(message):
    """Print on rank 0, in one line, something that is strange but may be meant."""
    say(f"warning: {message}")


# -------------------------------------------------------------------------------------------------
# text that fits on one line


def first_line(error):
    """An exception's class and the first line of its message."""
    try:
        lines = str(error).splitlines()[:1]
    except Exception:  # an exception class of the user's, whose own __str__ fails
        lines = []
    return ": ".join([type(error).__name__, *lines])


def shorten(value, width=60):
    """repr, cut to width, for error lines."""
    try:
        text = repr(value)
    except Exception:  # an int of more than 4300 digits, or a __repr__ that fails
        text = "(cannot be printed)"
    return text if len(text) <= width else text[:width] + "..."


def one_line(text, longest=700):
    """
    A message that a terminal shows on one line: control characters and halves of surrogate pairs
    are spelled out, as \\x1b or \\ud800, and of a message of more than `longest` characters the
    middle is left out.
    """
    text = text.strip()
    if len(text) > 2 * longest:  # spelling out only makes it longer: the rest will not be seen
        text = text[:longest] + text[-longest:]
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    keep = longest // 2
    return text if len(text) <= longest else f"{text[:keep]} ... {text[-keep + 5:]}"

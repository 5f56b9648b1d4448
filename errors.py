"""
Errors of a script: four exceptions, and the hook that makes each one line on stderr and an exit
code.
"""
import errno
import io
import os
import sys
import time
import traceback

import status


class BadInput(ValueError):
    """The user's input is wrong. In one line: what is wrong, where, what to type instead."""


class BadConfig(BadInput):
    """A BadInput that is the same on every rank, so only rank 0 says it."""


class Stop(RuntimeError):
    """The run has noticed that it must not go on. Raised on all ranks together."""


class Lost(Stop):
    """Another rank has ended or does not answer. Each rank that is left says so, because the user
    may read the output of any of them."""


# A run of several ranks sets these at its start:
torn = None  # a function: error -> Lost, or None if the error does not come from a lost rank
leads = False  # whether this rank is the first one of its role
leaving = None  # a function: sends this rank's BadInput or Stop to the ranks of other roles
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # of a disk


def report_errors():
    """At a script's start: errors become lines, and names that are not UTF-8 can be printed."""
    sys.excepthook = report_and_exit
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def report_and_exit(kind, error, trace):
    """
    sys.excepthook of the scripts. BadInput is one line and exit code 2. Stop, a full disk and too
    little memory are one line and exit code 1, and Ctrl-C is one line and 130. A closed pipe ends a
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
    elif lacks_option(kind, error):
        # from options.roles import Ahead, or from options import roles
        words = traceback.extract_tb(trace)[-1].line.split()
        file = words[1] if "." in words[1] else f"{words[1]}.{words[3]}"
        kind, message = BadConfig, (f"{file.replace('.', '/')}.py is not in this folder, and a key "
                                    "or the data of this run needs it; copy it from quartet, or do "
                                    "without that")
    elif not issubclass(kind, (BadInput, Stop)):
        sys.__excepthook__(kind, error, trace)
        return
    if leaving and isinstance(error, (BadInput, Stop)):
        leaving(error)
    rank = int(os.environ.get("RANK", 0))
    if speaks(kind, rank):
        status.clear()
        where = f" (rank {rank})" if rank else ""
        # sys.__stderr__: while this hook runs, sys.stderr is a buffer of torch.distributed, and
        # os._exit below would lose its contents
        print(f"{os.path.basename(sys.argv[0])}: error{where}: {one_line(message)}",
              file=sys.__stderr__, flush=True)
    else:
        time.sleep(1)  # torchrun kills all ranks when one ends: the one that prints must end first
    try:
        sys.stdout.flush()
    except OSError:
        pass  # a full disk or a closed pipe
    # _exit, because leaving the group of ranks in order would wait for ranks that may have ended
    os._exit(130 if issubclass(kind, KeyboardInterrupt) else 2 if issubclass(kind, BadInput) else 1)


def lacks_option(kind, error):
    """Whether an exception is the import of a file of options/ or grading/ that is not there."""
    if issubclass(kind, ModuleNotFoundError):
        return error.name.startswith(("options", "grading"))
    return issubclass(kind, ImportError) and error.name in ("options", "grading")


def speaks(kind, rank):
    """Whether this rank prints an error of this class; other ranks may have it, too."""
    if rank == 0 or issubclass(kind, Lost):
        return True
    if issubclass(kind, BadInput):  # files may differ between hosts, models between roles
        first = leads or os.environ.get("LOCAL_RANK", "0") == "0"
        return first and not issubclass(kind, BadConfig)
    return not issubclass(kind, (Stop, KeyboardInterrupt))  # a Stop is raised on all ranks


def is_out_of_memory(kind, message):
    """Whether an exception of this class and message says that there is too little memory."""
    # torch's allocators have one message; CUDA and cuBLAS have others for their own memory
    words = "can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED"
    return (kind.__name__ == "OutOfMemoryError" or issubclass(kind, MemoryError)
            or any(phrase in message for phrase in words))


def say(message):
    """Print a message on rank 0, in one line."""
    if os.environ.get("RANK", "0") == "0":
        status.clear()
        print(one_line(message), flush=True)


def warn(message):
    """Print a warning on rank 0, in one line: of something strange that may be right."""
    say(f"warning: {message}")


# -------------------------------------------------------------------------------------------------
# text that fits on one line


def first_line(error):
    """An exception's class and the first line of its message."""
    try:
        lines = str(error).splitlines()[:1]
    except Exception:  # an exception class of the user's with a __str__ that fails
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
    are written as \\x1b or \\ud800, and a message of more than `longest` characters loses its
    middle.
    """
    text = text.strip()
    if len(text) > 2 * longest:  # escapes only make it longer: the middle is left out anyway
        text = text[:longest] + text[-longest:]
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    keep = longest // 2
    return text if len(text) <= longest else f"{text[:keep]} ... {text[-keep + 5:]}"

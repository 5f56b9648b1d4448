"""
How a script says what is wrong: four exceptions, and the hook that turns each into one line and an exit code.
"""
import errno
import os
import sys
import time


class BadInput(ValueError):
    """What the user gave makes no sense. The message is one line: what is wrong, where, and what to type instead."""


class BadConfig(BadInput):
    """A BadInput that every rank sees alike, so that one rank saying it is enough."""


class Stop(RuntimeError):
    """The run itself noticed that going on would be wrong; raised on all ranks together, with one line that says why."""


class Lost(Stop):
    """Another rank is gone or does not answer. Each rank that is left says so: nobody knows which of them is being read."""

tell_others = None  # set with several ranks: takes a message, returns whether rank 0 leaves with the same, None once all agree
torn = None  # set with several ranks: takes an error, returns the Lost that it is if it came of a lost rank
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def report_and_exit(kind, error, trace):
    """
    sys.excepthook of our scripts: BadInput is one line and exit code 2; Stop, a full disk, or too little memory one line
    and 1. A closed pipe or Ctrl-C ends a tool without a word. Whatever else is a bug, and keeps its traceback.
    """
    rank = os.environ.get("RANK", "0")
    if torn and issubclass(kind, RuntimeError) and not issubclass(kind, Stop):
        error = torn(error) or error
    kind, message = type(error), str(error)
    if issubclass(kind, (KeyboardInterrupt, BrokenPipeError)):
        os._exit(130 if kind is KeyboardInterrupt else 1)
    elif issubclass(kind, OSError) and error.errno in FULL:
        message = f"{error.filename or 'the output'} cannot be written: {error.strerror}; make room and run the same again"
    elif kind.__name__ == "OutOfMemoryError" or issubclass(kind, MemoryError) or "can't allocate memory" in message:
        message = f"out of memory ({first_line(error)[:200]}); lower micro_batch_size or rollout_batch_size, or the model's size"
    elif not issubclass(kind, (BadInput, Stop)):
        sys.__excepthook__(kind, error, trace)
        return
    message = one_line(message)
    speaks = rank == "0" or not issubclass(kind, (BadConfig, Stop)) or issubclass(kind, Lost)
    if tell_others is None and issubclass(kind, BadConfig):  # rank 0 may be on another host, with another config
        speaks = rank == "0" or os.environ.get("LOCAL_RANK", "0") == "0"
    elif tell_others and issubclass(kind, BadInput) and rank != "0":
        said = said_by_rank_0(message)
        speaks = speaks if said is None else not said
    if speaks:
        where = "" if rank == "0" else f" (rank {rank})"
        # torch.distributed swaps sys.stderr for a buffer while this hook runs, and the buffer would die with us
        print(f"{os.path.basename(sys.argv[0])}: error{where}: {message}", file=sys.__stderr__, flush=True)
    else:
        time.sleep(1)  # torchrun kills all ranks when the first one ends; let the one that speaks do so
    if tell_others and issubclass(kind, BadInput) and rank == "0":
        said_by_rank_0(message)
    try:
        sys.stdout.flush()
    except OSError:
        pass  # a full disk or a closed pipe, and nobody to tell
    os._exit(2 if issubclass(kind, BadInput) else 1)  # no farewell: a rank may be gone, and its group would wait for it


def warn(message):
    """Say on rank 0, in one line, what is strange but may be meant."""
    if os.environ.get("RANK", "0") == "0":
        print(f"warning: {one_line(message)}", flush=True)


def said_by_rank_0(message):
    """Let the ranks that wait for us know that we leave; whether rank 0 leaves for the same reason, None if all have agreed."""
    try:
        return tell_others(message)
    except Stop:  # they are gone themselves
        return False


def first_line(error):
    """An exception's class and the first line of what it says."""
    try:
        said = str(error).splitlines()[:1]
    except Exception:  # an exception of the user's own, which fails once more as it is printed
        said = []
    return ": ".join([type(error).__name__, *said])


def shorten(value, width=60):
    """repr, cut to width, for error lines."""
    try:
        text = repr(value)
    except Exception:  # an int of more than 4300 digits, a list in itself a thousand times, an object of the user's own
        text = "(cannot be printed)"
    return text if len(text) <= width else text[:width] + "..."


def one_line(text, longest=700):
    """
    A message as it leaves for a terminal: on one line, with control characters and halves of surrogate
    pairs spelled out, as \\x1b or \\ud800; and of a message that is too long, beginning and end.
    """
    text = text.strip()
    if len(text) > 2 * longest:  # spelling out may only make it longer, so no more than this can be seen
        text = text[:longest] + text[-longest:]
    text = "".join(ch if ch.isprintable() else ch.encode("unicode_escape").decode() for ch in text)
    keep = longest // 2
    return text if len(text) <= longest else f"{text[:keep]} ... {text[-keep + 5:]}"

"""
The lines that a user sees. An error is one line on stderr, and an exit code. A program whose output
nobody reads any more goes on. Each program imports this file before torch, whose import takes
seconds: even then Ctrl-C gives one line.
"""
import contextlib
import errno
import importlib.util
import io
import os
import re
import signal
import sys
import time
import traceback

ROOT = os.path.relpath(os.path.dirname(os.path.abspath(__file__)))
PARENT = os.getppid()  # when this process begins; see ranks.init
phase = "start"  # what the run does now; see enter


class BadInput(ValueError):
    """The user's input is wrong. In one line: what is wrong, where, what to type instead."""

    exit_code = 2


class Stop(RuntimeError):
    """The run has noticed that it must not go on. Mostly raised on all ranks together."""

    exit_code = 1


class Lost(Stop):
    """Another rank has ended or does not answer. Each of the other ranks says so."""


def enter(what):
    """Note the phase that begins now, such as "iteration 7, update": error lines name it."""
    global phase
    phase = what


def report_error(kind, error, trace):
    """
    sys.excepthook of all programs. BadInput is one line and exit code 2, Stop is one line and 1,
    and so is what `translated` makes of others. Any other exception is a bug: with its traceback.
    """
    error = error if hasattr(error, "exit_code") else translated(error)
    code, rank = getattr(error, "exit_code", 0), int(os.environ.get("RANK") or 0)
    if rank and code and not isinstance(error, Lost):
        # mostly all ranks have the same error: rank 0 prints it, and torchrun ends the others while
        # they wait here. If only this rank has the error, it prints the line after this second
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(1)
    # sys.__stderr__: while this hook runs, sys.stderr is a buffer of torch.distributed
    if not code:
        traceback.print_exception(error, file=sys.__stderr__)
    else:
        where, message = f" (rank {rank})" * (rank > 0), " ".join(visible(str(error)).split())
        line = f"{os.path.basename(sys.argv[0])}: error{where}: {message}"
        print(line, file=sys.__stderr__, flush=True)
        if "TORCHELASTIC_ERROR_FILE" in os.environ:
            optional("failures.tell_torchrun")(line)
    with contextlib.suppress(OSError):  # the disk is full: the line above says so
        sys.stdout.flush()
    # _exit, because leaving the group of ranks in order would wait for ranks that may have ended
    os._exit(code or 1)


def translated(error):
    """The BadInput or Stop that says in a line what an exception means; or the exception itself."""
    if isinstance(error, KeyboardInterrupt):  # before the run has begun: nothing could be saved
        error = Stop("interrupted")
        error.exit_code = 130
    if isinstance(error, ImportError) and re.match(r"(options|grading)\b", error.name or ""):
        line = traceback.extract_tb(error.__traceback__)[-1].line  # it names the file, or RULES do
        folder, file = re.search(r"(options|grading)(?:\.| import )(\w+|\*)",
                                 f"{error.name} {line} {error.name}.*").groups()
        return BadInput(f"{'an input is wrong, and ' * (file == 'mistakes')}this run needs "
                        f"{folder}/{file}.py; type mkdir -p {ROOT}/{folder}; cp QUARTET/{folder}/"
                        f"{file}.py {ROOT}/{folder}/ (QUARTET: what this is a copy of)")
    return optional("failures.meaning_of")(error, phase) or error


def optional(name):
    """FILE.FUNCTION of options/. In a fork without the file: a function that does nothing."""
    file, function = name.split(".")
    try:
        return getattr(importlib.import_module(f"options.{file}"), function)
    except ModuleNotFoundError as e:
        if e.name not in ("options", f"options.{file}"):
            raise
        return lambda *args: None


def mistake(kind, *args):
    """The BadInput that a function of options/mistakes.py, `kind`, makes of what was given."""
    from options import mistakes

    return getattr(mistakes, kind)(*args)


def say(message):
    """Print a message on rank 0."""
    if os.environ.get("RANK") in (None, "", "0"):
        print(visible(message), flush=True)


def visible(text):
    r"""
    A text as a terminal may get it. Control characters (all but line breaks and tabs), and those
    that turn the direction of writing, become texts such as \x1b: in a response, or in the name of
    a folder, they could move the cursor, write over other lines, or type for the user.
    """
    return re.sub("[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
                  "\ud800-\udfff]", lambda found: ascii(found[0])[1:-1], text)


def first_line(error):
    """An exception's class and the first line of its message."""
    return ": ".join([type(error).__name__, *str(error).splitlines()[:1]])


def shorten(value):
    """repr, cut to 60 characters, for error lines."""
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."


class Output(io.FileIO):
    """stdout or stderr: without a reader, in a closed pipe or terminal, a write does nothing."""

    def write(self, text):
        try:
            return super().write(text)
        except OSError as e:
            if e.errno in (errno.EPIPE, errno.EIO):  # EIO: the terminal is closed
                return len(text)
            raise


def outlast_readers():
    """Let stdout and stderr survive a closed pipe, and letters that their encoding lacks."""
    for name in "stdout", "stderr":
        old = getattr(sys, name)  # None: it is closed
        if old is getattr(sys, f"__{name}__"):  # else it is pytest's, or a notebook's
            raw = Output(old.fileno() if old else os.open(os.devnull, os.O_WRONLY), "w",
                         closefd=False)
            new = io.TextIOWrapper(io.BufferedWriter(raw), old and old.encoding,
                                   "backslashreplace", line_buffering=True)
            sys.__dict__.update({name: new, f"__{name}__": new})


outlast_readers()
sys.excepthook = report_error
if not importlib.util.find_spec("torch"):  # mostly the virtual environment is not active
    raise BadInput(f"{sys.executable} has no torch; type: source .venv/bin/activate")

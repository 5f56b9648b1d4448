"""
What a user is told. An error is one line on stderr, and an exit code; what is said survives its
reader. A program imports this file before torch, which takes seconds: so Ctrl-C is one line even
then.
"""
import contextlib
import difflib
import errno
import importlib.util
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import traceback

PARENT = os.getppid()  # as this process begins: see ranks.init
phase = "start"  # of the run; see enter


class BadInput(ValueError):
    """The user's input is wrong. In one line: what is wrong, where, what to type instead."""

    exit_code = 2


class Stop(RuntimeError):
    """The run has noticed that it must not go on. Mostly raised on all ranks together."""

    exit_code = 1


class Lost(Stop):
    """Another rank has ended or does not answer. Each rank that is left says so."""


def enter(what):
    """Note the phase that begins now, such as "iteration 7, update": error lines name it."""
    global phase
    phase = what


def report_error(kind, error, trace):
    """
    sys.excepthook of all programs. BadInput is one line and exit code 2. Stop, a lost rank, a full
    disk and too little memory are one line and exit code 1, and Ctrl-C is one line and 130. Any
    other exception is a bug, and is shown with its traceback.
    """
    error = lost(error) or error
    rank, message = int(os.environ.get("RANK", 0)), str(error)
    code = getattr(error, "exit_code", None)
    if issubclass(kind, KeyboardInterrupt):
        code, message = 130, "interrupted"
    elif issubclass(kind, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        code, message = 1, (f"{error.filename or 'the output'} cannot be written: "
                            f"{error.strerror}; make room and run the same again")
    elif issubclass(kind, (PermissionError, FileExistsError, NotADirectoryError)) or getattr(
            error, "errno", None) == errno.EROFS:
        code, message = 2, f"{error.filename}: {error.strerror}"  # such as an out_dir
    elif kind.__name__ == "OutOfMemoryError" or "can't allocate memory" in message:
        code, message = 1, (f"out of memory ({message[:200]}); lower micro_batch_size or "
                            "rollout_batch_size, or the model's size")
    elif issubclass(kind, ImportError) and re.search(r"\b(options|grading)\b", message):
        code, message = 2, ("this run needs a file that is not in this folder "
                            f"({message}); copy the folders options and grading from quartet, or "
                            "do without its key")
    # sys.__stderr__: while this hook runs, sys.stderr is a buffer of torch.distributed
    if code is None:
        traceback.print_exception(error, file=sys.__stderr__)
    elif rank and not isinstance(error, Lost):
        # mostly all ranks have the same error: rank 0 says it, and torchrun ends the others while
        # they wait here. An error of this rank alone is said by it
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(1)
    if code is not None:
        where, message = f" (rank {rank})" if rank else "", visible(message)
        line = f"{os.path.basename(sys.argv[0])}: error{where}: {' '.join(message.split())}"
        print(line, file=sys.__stderr__, flush=True)
        tell_torchrun(line)
    with contextlib.suppress(OSError):  # of a full disk, which is said above
        sys.stdout.flush()
    # _exit, because leaving the group of ranks in order would wait for ranks that may have ended
    os._exit(1 if code is None else code)


def tell_torchrun(line):
    """Under torchrun: its report ends with this line, and not with a hint at other errors."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = dict(py_callstack=line, timestamp=str(int(time.time())))
        with contextlib.suppress(OSError), open(file, "w", encoding="utf-8") as f:
            json.dump(dict(message=dict(message=line, extraInfo=extra)), f)


def lost(error):
    """The Lost for an exception of torch's that comes from a lost rank; None for any other."""
    if not isinstance(error, RuntimeError) or isinstance(error, Stop):
        return None
    import torch.distributed as dist  # slow; such an exception comes long after

    words = "gloo|nccl|connection (closed|reset)|timed out|broken pipe"
    if not isinstance(error, dist.DistError) and not (
            dist.is_initialized() and re.search(words, str(error), re.IGNORECASE)):
        return None
    reason = str(error).strip().split("\n")[0].rpartition("] ")[2].partition(". ")[0]
    return Lost(f"{phase}: lost touch with another rank: it was killed, or hangs ({reason}). The "
                "last checkpoint is good; resume with the same command")


def say(message):
    """Print a message on rank 0."""
    if os.environ.get("RANK", "0") == "0":
        print(visible(message), flush=True)


def say_last(message):
    """
    Say it; under torchrun in a terminal once more when torchrun has ended. It comments its own
    Ctrl-C with a traceback of 30 lines, and what the run has said is no longer on the screen.
    """
    say(message)
    if os.environ.get("RANK") == "0" and "TORCHELASTIC_RUN_ID" in os.environ and os.isatty(1):
        wait = f"for i in $(seq 300); do kill -0 {PARENT} || break; sleep 0.1; done 2>/dev/null"
        subprocess.Popen(["sh", "-c", f"{wait}; echo; echo {shlex.quote(visible(message))}"],
                         stdin=subprocess.DEVNULL, start_new_session=True)


def visible(text):
    r"""
    A text as a terminal may have it: control characters (all but line breaks and tabs), and those
    that turn the direction of writing, as \x1b. In a text of a policy, or in the name of a folder,
    they could move the cursor, write over other lines, or type for the user.
    """
    return re.sub("[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
                  "\ud800-\udfff]", lambda found: ascii(found[0])[1:-1], text)


def first_line(error):
    """An exception's class and the first line of its message."""
    return ": ".join([type(error).__name__, *str(error).splitlines()[:1]])


def place_of(trace):
    """" at FILE, line N": the innermost place of a traceback that is not in installed code."""
    own = [at for at in trace if not re.search(r"/lib/python|<frozen", at.filename)]
    return f" at {os.path.relpath(own[-1].filename)}, line {own[-1].lineno}" if own else ""


def nearest(path):
    """
    "; it is a folder" where a path is one, and a file was wanted; "; did you mean FILE?" if beside
    it lies a file of nearly its name; or "".
    """
    if os.path.isdir(path):
        return "; it is a folder: give a file in it"
    folder, name = os.path.split(path)
    names = os.listdir(folder or ".") if os.path.isdir(folder or ".") else []
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.85)  # not sft_val for rl_val
    return f"; did you mean {os.path.join(folder, near[0])}?" if near else ""


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
            if e.errno in (errno.EPIPE, errno.EIO):  # EIO: of a terminal
                return len(text)
            raise


def outlast_readers():
    """Let stdout and stderr survive their readers, and letters that their encoding has not."""
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

"""
What torchrun says of a run at its end: the run's own words, and not a traceback of torchrun's.
"""
import contextlib
import json
import os
import shlex
import subprocess
import time

from errors import PARENT, visible


def tell(line):
    """Torchrun's report of an error ends with this line, and not with a hint at other errors."""
    extra = dict(py_callstack=line, timestamp=str(int(time.time())))
    with contextlib.suppress(OSError), open(
            os.environ["TORCHELASTIC_ERROR_FILE"], "w", encoding="utf-8") as f:
        json.dump(dict(message=dict(message=line, extraInfo=extra)), f)


def say_again(message):
    """
    On rank 0, in a terminal: say it once more when torchrun has ended. It comments its own Ctrl-C
    with a traceback of 30 lines, and what the run has said is no longer on the screen.
    """
    if os.environ.get("RANK") == "0" and os.isatty(1):
        wait = f"for i in $(seq 300); do kill -0 {PARENT} || break; sleep 0.1; done 2>/dev/null"
        subprocess.Popen(["sh", "-c", f"{wait}; echo; echo {shlex.quote(visible(message))}"],
                         stdin=subprocess.DEVNULL, start_new_session=True)

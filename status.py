"""
The line that shows that a run is alive, while an iteration takes long: on a terminal it is written
over itself, elsewhere, as in a file, there is one a minute. Rank 0 alone writes it.
"""
import os
import shutil
import sys
import time

phase = ""  # what the run does now, such as "iteration 7, rollout"; empty: this is no run
shown = False  # whether the line stands on the terminal
last = time.monotonic()  # when a line was written


def show(text):
    """Say how far the phase has come, such as "token 41 of 512"; cheap, for inner loops."""
    global shown, last
    now = time.monotonic()
    if not phase or now - last < 0.2 or os.environ.get("RANK", "0") != "0":
        return
    line = f"{phase}: {text}"
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns - 1
        print(f"\r\x1b[K{line[:width]}", end="", flush=True)
        shown, last = True, now
    elif now - last >= 60:
        print(line, flush=True)
        last = now


def clear():
    """Take the line away, before another one is printed."""
    global shown, last
    if shown:
        print("\r\x1b[K", end="", flush=True)
    shown, last = False, time.monotonic()

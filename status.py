"""
A line that shows the progress inside a long iteration. On a terminal each line replaces the one
before; elsewhere, such as in a file, there is one line a minute. Only rank 0 writes it.
"""
import os
import shutil
import sys
import time

phase = ""  # of the run, such as "iteration 7, rollout"; empty: this is no run
shown = False  # whether the line is on the terminal
last = time.monotonic()  # the time of the last line


def show(text):
    """Show the progress of the phase, such as "token 41 of 512"; fast, for inner loops."""
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
    """Delete the line, before another one is printed."""
    global shown, last
    if shown:
        print("\r\x1b[K", end="", flush=True)
    shown, last = False, time.monotonic()

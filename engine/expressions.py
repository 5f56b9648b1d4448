r"""
The reward `math`: whether two answers are the same expression, by algebra: x + 1 and 1 + x are, and
so are \sqrt{8} and 2\sqrt{2}. The package math-verify (github.com/huggingface/Math-Verify) reads
and compares them. It is not among our requirements: pip install math-verify.

A model's text may be an expression that takes hours to compute, or all memory. So math-verify works
in processes of its own, with a limit of memory. One that has not answered in SECONDS is ended, its
answer counts as wrong, and the next pair gets a new process.
"""
import atexit
import contextlib
import importlib.util
import json
import math
import os
import queue
import select
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from engine import CPUS
from engine.answers import final_answer, same_answer, whole_responses
from engine.sandbox import cpus_of_a_rank
from errors import BadInput, Stop

SECONDS = 10  # for one pair; math-verify itself gives up after 5 for each of reading and comparing
START_SECONDS = 60  # to import math-verify and sympy
LONGEST = 2000  # characters of an answer; a longer one is wrong
idle = queue.SimpleQueue()  # processes that wait for work

# A line in: [given, truth] as JSON; a line out: 1 or 0. An answer without dollars is one
# expression. Whatever math-verify prints goes to stderr.
WORKER = r"""
import json, logging, os, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (4 * 2**30, 4 * 2**30))
out = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
logging.disable(logging.CRITICAL)
from math_verify import parse, verify
def read(text):
    written = "$" in text or "\\(" in text or "\\[" in text or "\\boxed" in text
    return parse(text) if written else parse(f"${text}$") or parse(text)
print("ready", file=out, flush=True)
for line in sys.stdin:
    try:
        given, truth = map(read, json.loads(line))
        same = bool(given) and bool(truth) and verify(truth, given)
    except (Exception, RecursionError, MemoryError):
        same = False
    print(int(same), file=out, flush=True)
"""


def math_answer(batch):
    """
    The reward `math`, a list of B scores: 1.0 where the final answer of the response is the row's
    `answer`, as for accuracy, or the same expression by algebra; else 0.0. Algebra has 4/5 of
    batch["seconds"]; what is not graded by then scores 0, and a printed line says so.
    """
    pairs = [(final_answer(text), final_answer(str(row["answer"])))
             for text, row in zip(whole_responses(batch), batch["rows"], strict=True)]
    said = {pair: same_answer(*pair) for pair in pairs}
    # wrong as texts and numbers, but perhaps right by algebra; thinking that never ends is not
    asked = [(given, truth) for (given, truth), same in said.items()
             if not same and given and "<think>" not in given]
    seconds = 0.8 * batch.get("seconds", math.inf)
    said |= zip(asked, same_expressions(asked, cpus_of_a_rank(), seconds), strict=True)
    late = sum(said[pair] is None for pair in pairs)
    if late:
        print(f"reward 'math': {late} of {len(pairs)} answers were not compared in "
              f"{seconds:.0f} s, and score 0; raise reward_timeout", flush=True)
    return [float(bool(said[pair])) for pair in pairs]


def check_installed(rows, path):
    """Raise BadInput unless math-verify is installed."""
    if importlib.util.find_spec("math_verify") is None:
        raise BadInput("the reward 'math' grades with the package math-verify, which is not "
                       "installed; type pip install math-verify, or use accuracy")


math_answer.check_rows = check_installed  # for engine/reward_mix.py


def same_expressions(pairs, workers, seconds):
    """
    Whether the answers of each of the pairs [(given, truth), ...] are the same expression, a list
    of bools; None where there was no time left. workers: processes at once. seconds: for all pairs.
    """
    end = time.monotonic() + seconds
    # OpenMP may have pinned this thread to one CPU, and new threads and processes inherit that
    with ThreadPoolExecutor(workers, initializer=lambda: os.sched_setaffinity(0, CPUS)) as pool:
        return list(pool.map(lambda pair: same_expression(*pair, end), pairs))


def same_expression(given, truth, end):
    """The same for one pair. end: when it must be over, by time.monotonic()."""
    if max(len(given), len(truth)) > LONGEST:
        return False
    if time.monotonic() >= end:
        return None
    with contextlib.suppress(queue.Empty):
        process = idle.get_nowait()
        return ask(process, given, truth, end)
    return ask(start(), given, truth, end)


def start():
    """A new process that has imported math-verify. Raises Stop."""
    process = subprocess.Popen([sys.executable, "-c", WORKER], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                               start_new_session=True)  # Ctrl-C is for us, and not for it
    if read_line(process, START_SECONDS) != b"ready\n":
        stop(process)
        raise Stop("the reward 'math' could not start math-verify; does python -c 'import "
                   "math_verify' work?")
    return process


def ask(process, given, truth, end):
    """What a process says of a pair; it is ended where it says nothing in time."""
    left = min(SECONDS, end - time.monotonic())
    try:
        process.stdin.write(json.dumps([given, truth]).encode() + b"\n")
        process.stdin.flush()
        said = read_line(process, max(left, 0))
    except BrokenPipeError:  # it has ended meanwhile
        said = b""
    if said in (b"0\n", b"1\n"):
        idle.put(process)
        return said == b"1\n"
    stop(process)
    return None if time.monotonic() >= end else False


def read_line(process, seconds):
    """The next line that it writes, b"" if it has written none in that time or has ended."""
    ready, _, _ = select.select([process.stdout], [], [], seconds)
    return process.stdout.readline() if ready else b""


def stop(process):
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


@atexit.register
def stop_all():
    """Its stdin closed, a process ends by itself; this one does not leave before."""
    with contextlib.suppress(queue.Empty):
        while True:
            stop(idle.get_nowait())

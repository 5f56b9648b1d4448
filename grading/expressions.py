r"""
The reward `math`: whether two answers are the same expression, by algebra: x + 1 and 1 + x are, and
so are \sqrt{8} and 2\sqrt{2}. The package math-verify (github.com/huggingface/Math-Verify) reads
and compares them. It is not in requirements.txt: pip install math-verify.

A model's text may be an expression that takes hours, or all memory. So math-verify works in a
process of its own, with a limit of memory. If a pair takes SECONDS, the process ends itself, the
pair counts as wrong, and a new process goes on with the next pair.
"""
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from grading.sandbox import CPUS
from grading.answers import final_answer, whole_responses
from errors import BadInput, Stop
from grading.sandbox import cpus_of_a_rank
from grading.same import DENIED, clash, plain, read_answer, same_answer

SECONDS = 10  # for one pair; math-verify itself stops reading after 5, and comparing after 5
LONGEST = 2000  # characters of an answer; a longer one is wrong

# In: SECONDS, and then a line [given, truth] for each pair. Out: "ready", and a line 1 or 0 for
# each pair. An answer without dollars is one expression. faulthandler's timer is a thread: it ends
# the process even during one long multiplication.
WORKER = r"""
import faulthandler, json, logging, os, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (4 * 2**30, 4 * 2**30))
out = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # whatever math-verify prints goes to stderr
logging.disable(logging.CRITICAL)
from math_verify import parse, verify
def read(text):
    written = "$" in text or "\\(" in text or "\\[" in text or "\\boxed" in text
    return parse(text) if written else parse(f"${text}$") or parse(text)
print("ready", file=out, flush=True)
seconds = float(sys.stdin.readline())
for line in sys.stdin:
    faulthandler.dump_traceback_later(seconds, exit=True)
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
    batch["seconds"]; answers that are not compared then score 0, and a printed line says so.
    """
    pairs = [(final_answer(text), final_answer(str(row["answer"])))
             for text, row in zip(whole_responses(batch), batch["rows"], strict=True)]
    verdicts = {pair: same_answer(*pair) for pair in pairs}
    # wrong as texts and numbers, but perhaps right by algebra; thinking that never ends is wrong
    asked = [pair for pair, same in verdicts.items()
             if not same and pair[0] and "<think>" not in pair[0] and not unlike(*pair)]
    seconds = 0.8 * batch.get("seconds", math.inf)
    verdicts |= zip(asked, same_expressions(asked, cpus_of_a_rank(), seconds), strict=True)
    late = sum(verdicts[pair] is None for pair in pairs)
    if late:
        print(f"reward 'math': {late} of {len(pairs)} answers were not compared in "
              f"{seconds:.0f} s, and score 0; raise reward_timeout", flush=True)
    return [float(bool(verdicts[pair])) for pair in pairs]


def unlike(given, truth):
    """
    Whether two answers differ for a reason that math-verify does not see: a denial (cannot be 5),
    units (5 cm, 5 m), names, the order of letters (act, cat), 4 am and 4 pm.
    """
    if max(len(given), len(truth)) > LONGEST or DENIED.search(given) and not DENIED.search(truth):
        return True
    given, truth = plain(given), plain(truth)
    words = given.isalpha() and truth.isalpha() and len(given) != 2  # xy may be x times y
    hours, others = (re.findall(r"\d ([ap])m\b", text) for text in (given, truth))
    return words or hours != others or clash(read_answer(given, loose=True), read_answer(truth))


def check_installed(rows, path):
    """Raise BadInput unless math-verify is installed."""
    if importlib.util.find_spec("math_verify") is None:
        raise BadInput("the reward 'math' grades with the package math-verify, which is not "
                       "installed; type pip install math-verify, or use accuracy")


math_answer.check_rows = check_installed  # rewards.py calls it


def same_expressions(pairs, workers, seconds):
    """
    Whether the two answers of each pair [(given, truth), ...] are the same expression, a list of
    bools; None where there was no time left. workers: processes at once. seconds: for all pairs.
    """
    end = time.monotonic() + seconds
    found = [False] * len(pairs)
    short = [i for i, pair in enumerate(pairs) if max(map(len, pair)) <= LONGEST]
    workers = min(workers, 1 + len(short) // 16)  # a start takes as long as a hundred pairs
    parts = [short[i::workers] for i in range(workers)]
    # OpenMP may have bound this thread to one CPU, and new threads and processes inherit that
    with ThreadPoolExecutor(workers, initializer=lambda: os.sched_setaffinity(0, CPUS)) as pool:
        verdicts = pool.map(lambda part: ask([pairs[i] for i in part], end), parts)
        for part, answers in zip(parts, verdicts, strict=True):
            for i, same in zip(part, answers, strict=True):
                found[i] = same
    return found


def ask(pairs, end):
    """The same with one process after the other. end: the last moment, by time.monotonic()."""
    verdicts = []
    while len(verdicts) < len(pairs):
        left = end - time.monotonic()
        if left <= 0:
            return verdicts + [None] * (len(pairs) - len(verdicts))
        lines = [str(SECONDS), *map(json.dumps, pairs[len(verdicts):])]
        try:
            written = subprocess.run(
                [sys.executable, "-c", WORKER], input="\n".join(lines).encode(),
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
                timeout=None if left == math.inf else left).stdout
        except subprocess.TimeoutExpired as e:
            verdicts += [line == b"1" for line in (e.stdout or b"").splitlines()[1:]]
            continue  # there is no time left
        answers = written.splitlines()
        if not answers:
            raise Stop("the reward 'math' could not start math-verify; does python -c 'import "
                       "math_verify' work?")
        verdicts += [line == b"1" for line in answers[1:]]
        if len(verdicts) < len(pairs):
            verdicts.append(False)  # the pair at which the process has ended
    return verdicts

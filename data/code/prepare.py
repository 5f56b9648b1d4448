"""
The second built-in task: one-line programs, checked by running them. Nothing is downloaded; runs in
two seconds.

    python data/code/prepare.py

A prompt says in words what a function returns, and a demonstration is a line of Python:

    f(a, b): the larger of a and b, plus 3
    def f(a, b): return max(a, b) + 3

Every problem has two steps, the second one with a number. 1 demonstration in 4 is right; each other
one has one mistake, in one of the steps: min for max, the operands swapped, another operation, or a
number that is too small or too large by one. A small model that is trained on them does the same.
So something is left for GRPO to find out, by running programs: which ones are right.

Writes beside itself:
    sft_train.jsonl, sft_val.jsonl   {"prompt", "completion"}
    rl_train.jsonl, rl_val.jsonl     {"prompt", "tests"}, for the reward `code` of rewards.py
    tokenizer/                       the byte-level tokenizer
No problem of a _val file is in a _train file. No demonstration with a mistake passes the tests of
its problem.
"""
import os
import random
import string
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
# Python looks for modules in this file's folder; these are in the folder above it.
sys.path.insert(0, os.path.dirname(HERE))

from byte_tokenizer import write_byte_tokenizer  # noqa: E402
from files import parser_of, write_rows  # noqa: E402

# Shares of the demonstrations: right; a mistake in the first step; another operation in the second
# step; a number too small by one; a number too large by one
SHARES = [0.25, 0.55, 0.1, 0.05, 0.05]
CASES = 5  # tests of a problem; more, if its mistakes pass that many
NUMBERS = range(2, 10)  # the numbers of the second step
HELD_OUT = 200  # problems
DEMONSTRATIONS = {"val": 500, "train": 20_000}

# The first step, by the function's parameters: {in words: [the right code, the mistake]}
FIRST = {
    "a, b": {
        "the larger of a and b": ["max(a, b)", "min(a, b)"],
        "the smaller of a and b": ["min(a, b)", "max(a, b)"],
        "a plus b": ["(a + b)", "(a - b)"],
        "a minus b": ["(a - b)", "(b - a)"],
        "a times b": ["(a * b)", "(a + b)"],
        "the distance of a and b": ["abs(a - b)", "abs(a + b)"]},
    "xs": {
        "the sum of xs": ["sum(xs)", "sum(xs[1:])"],
        "the largest of xs": ["max(xs)", "min(xs)"],
        "the smallest of xs": ["min(xs)", "max(xs)"],
        "the length of xs": ["len(xs)", "len(xs[1:])"],
        "the first of xs": ["xs[0]", "xs[1]"],
        "the last of xs": ["xs[-1]", "xs[-2]"]},
    "s": {
        "s reversed": ["s[::-1]", "s[::1]"],
        "s in capitals": ["s.upper()", "s.lower()"],
        "s in small letters": ["s.lower()", "s.upper()"],
        "s without its first letter": ["s[1:]", "s[0:]"],
        "s without its last letter": ["s[:-1]", "s[:1]"],
        "s twice": ["(s + s)", "(s)"]},
}
# The second step, by the kind of the first one's result, x: {in words: [right code, mistake]}
SECOND = {
    "number": {
        "plus {k}": ["{x} + {k}", "{x} - {k}"],
        "minus {k}": ["{x} - {k}", "{x} + {k}"],
        "times {k}": ["{x} * {k}", "{x} + {k}"],
        "modulo {k}": ["{x} % {k}", "{x} // {k}"],
        "subtracted from {k}": ["{k} - {x}", "{x} - {k}"],
        "but at least {k}": ["max({x}, {k})", "min({x}, {k})"],
        "but at most {k}": ["min({x}, {k})", "max({x}, {k})"]},
    "text": {
        "{k} times": ["{x} * {k}", "{x}[:{k}]"],
        "only the first {k} letters": ["{x}[:{k}]", "{x}[{k}:]"],
        "only the last {k} letters": ["{x}[-{k}:]", "{x}[{k}:]"],
        "without the first {k} letters": ["{x}[{k}:]", "{x}[:{k}]"],
        "without the last {k} letters": ["{x}[:-{k}]", "{x}[:{k}]"]},
}


def problems():
    """[(parameters, first step, second step, number)] of every problem that there is."""
    return [(parameters, first, second, k)
            for parameters in FIRST
            for first in FIRST[parameters]
            for second in SECOND["text" if parameters == "s" else "number"]
            for k in NUMBERS]


def prompt(parameters, first, second, k):
    """A problem in words."""
    return f"f({parameters}): {first}, {second.format(k=k)}\n"


def programs(parameters, first, second, k):
    """[(code, function)] of the five programs for a problem, in the order of SHARES."""
    right, habit = FIRST[parameters][first]
    join, other = SECOND["text" if parameters == "s" else "number"][second]
    choices = [(right, join, k), (habit, join, k), (right, other, k),
               (right, join, k - 1), (right, join, k + 1)]
    bodies = [b.format(x=a, k=n) for a, b, n in choices]
    # eval: of the pieces of code above, and of no other text
    return [(f"def f({parameters}): return {body}", eval(f"lambda {parameters}: {body}"))
            for body in bodies]


def arguments(rng, parameters):
    """Random arguments for a call."""
    if parameters == "s":
        return ["".join(rng.choices(string.ascii_letters, k=rng.randint(3, 13)))]
    size = 2 if parameters == "a, b" else rng.randint(3, 13)
    numbers = [rng.randint(-20, 20) for _ in range(size)]
    return numbers if parameters == "a, b" else [numbers]


def examine(rng, problem):
    """
    The tests of a problem, and {code: share} of the programs that demonstrate it. A program such as
    (b - a) % 2 for (a - b) % 2, which returns the right result for all arguments, is left out.
    """
    (code, right), *wrong = programs(*problem)
    inputs, caught = [], set()
    for given in (arguments(rng, problem[0]) for _ in range(300)):
        new = {text for text, function in wrong if function(*given) != right(*given)} - caught
        if new:
            inputs.append(given)
            caught |= new
    while len(inputs) < CASES:
        inputs.append(arguments(rng, problem[0]))
    tests = [{"fn": "f", "inputs": inputs, "outputs": [right(*given) for given in inputs]}]
    shares = zip(programs(*problem), SHARES, strict=True)
    return tests, {text: share for (text, _), share in shares if text in caught | {code}}


def rows():
    """(file, row) of all files, from the shuffled problems."""
    everything, rng = problems(), random.Random(1)
    rng.shuffle(everything)
    for part, chosen in ("val", everything[:HELD_OUT]), ("train", everything[HELD_OUT:]):
        examined = [(prompt(*problem), *examine(rng, problem)) for problem in chosen]
        for words, tests, _ in examined:
            yield f"rl_{part}", {"prompt": words, "tests": tests}
        for words, _, shares in rng.choices(examined, k=DEMONSTRATIONS[part]):
            completion = rng.choices([*shares], [*shares.values()])[0]
            yield f"sft_{part}", {"prompt": words, "completion": completion}


if __name__ == "__main__":
    parser_of(__doc__).parse_args()  # there is only --help
    write_rows(HERE, ["rl_val", "sft_val", "rl_train", "sft_train"], rows())
    write_byte_tokenizer(os.path.join(HERE, "tokenizer"))

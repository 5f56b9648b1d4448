"""
The second built-in task: one-line programs, checked by running them. Nothing is downloaded; runs in two seconds.

    python data/code/prepare.py

A prompt says in words what a function returns, f(a, b): the larger of a and b, plus 3; a demonstration is a line of Python,
def f(a, b): return max(a, b) + 3. What is asked for has two steps, and the second a number. The demonstrator is careless: in 3
of 4 cases he makes one mistake, in either step: min for max, the operands swapped, another operation, a number off by one.
Supervised on that, a small model does the same, so there is something left to find out, by running programs: which are right.

Writes beside itself, or into --out: sft_train.jsonl, sft_val.jsonl {"prompt", "completion"}; rl_train.jsonl, rl_val.jsonl
{"prompt", "tests"}, for the reward `code` of rewards.py; tokenizer/, the byte-level one. What is in the files _val is in no
file _train. The tests of a problem are such that none of the demonstrator's mistakes passes them. No text is ever evaluated
here: what a piece of code does is written beside it, as a function.
"""
import argparse
import json
import os
import random
import string
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
# how often the demonstrator is right, makes his usual mistake in the first step, mistakes the operation of the second step, takes
# a number too small by one, too large by one
SHARES = [0.25, 0.55, 0.1, 0.05, 0.05]
CASES = 5  # tests of a problem, or more where its mistakes take more to be told from the right program
NUMBERS = range(2, 10)  # what may stand in the second step
TOKENIZER = {"markers": [], "eos": "<eos>", "pad": "<pad>"}

# the first step, by the function's parameters: in words, the right code, and the mistake that he is used to making there
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
# the second step, for x, the first one's result, a number or a text: in words, the right code, and what he may put instead
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
# what the code does
DOES = {
    "max(a, b)": lambda a, b: max(a, b), "min(a, b)": lambda a, b: min(a, b), "(a + b)": lambda a, b: a + b,
    "(a - b)": lambda a, b: a - b, "(b - a)": lambda a, b: b - a, "(a * b)": lambda a, b: a * b,
    "abs(a - b)": lambda a, b: abs(a - b), "abs(a + b)": lambda a, b: abs(a + b),
    "sum(xs)": lambda xs: sum(xs), "sum(xs[1:])": lambda xs: sum(xs[1:]), "max(xs)": lambda xs: max(xs),
    "min(xs)": lambda xs: min(xs), "len(xs)": lambda xs: len(xs), "len(xs[1:])": lambda xs: len(xs[1:]),
    "xs[0]": lambda xs: xs[0], "xs[1]": lambda xs: xs[1], "xs[-1]": lambda xs: xs[-1], "xs[-2]": lambda xs: xs[-2],
    "s[::-1]": lambda s: s[::-1], "s[::1]": lambda s: s[::1], "s.upper()": lambda s: s.upper(), "s.lower()": lambda s: s.lower(),
    "s[1:]": lambda s: s[1:], "s[0:]": lambda s: s[0:], "s[:-1]": lambda s: s[:-1], "s[:1]": lambda s: s[:1],
    "(s + s)": lambda s: s + s, "(s)": lambda s: s,
    "{x} + {k}": lambda x, k: x + k, "{x} - {k}": lambda x, k: x - k, "{k} - {x}": lambda x, k: k - x,
    "{x} * {k}": lambda x, k: x * k, "{x} % {k}": lambda x, k: x % k, "{x} // {k}": lambda x, k: x // k,
    "max({x}, {k})": lambda x, k: max(x, k), "min({x}, {k})": lambda x, k: min(x, k),
    "{x}[:{k}]": lambda x, k: x[:k], "{x}[{k}:]": lambda x, k: x[k:],
    "{x}[:-{k}]": lambda x, k: x[:-k], "{x}[-{k}:]": lambda x, k: x[-k:],
}


def stop(message):
    print(f"prepare.py: error: {message}", file=sys.stderr)
    sys.exit(2)


def problems():
    """Every problem there is: (parameters, first step, second step, number)."""
    return [(parameters, first, second, k) for parameters in FIRST for first in FIRST[parameters]
            for second in SECOND["text" if parameters == "s" else "number"] for k in NUMBERS]


def prompt(parameters, first, second, k):
    return f"f({parameters}): {first}, {second.format(k=k)}\n"


def programs(parameters, first, second, k):
    """The programs for a problem as (code, function), in the order of SHARES."""
    right, habit = FIRST[parameters][first]
    join, other = SECOND["text" if parameters == "s" else "number"][second]
    choices = [(right, join, k), (habit, join, k), (right, other, k), (right, join, k - 1), (right, join, k + 1)]
    return [(f"def f({parameters}): return {b.format(x=a, k=n)}", lambda *given, a=a, b=b, n=n: DOES[b](DOES[a](*given), n))
            for a, b, n in choices]


def arguments(rng, parameters):
    """Random arguments for a call."""
    if parameters == "s":
        return ["".join(rng.choices(string.ascii_letters, k=rng.randint(3, 13)))]
    size = 2 if parameters == "a, b" else rng.randint(3, 13)
    numbers = [rng.randint(-20, 20) for _ in range(size)]
    return numbers if parameters == "a, b" else [numbers]


def examine(rng, problem):
    """
    The tests of a problem, and {code: share} of the programs that the demonstrator writes. A mistake that no arguments show, as
    (b - a) % 2 for (a - b) % 2, is none and left out.
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
    return tests, {text: share for (text, _), share in zip(programs(*problem), SHARES, strict=True) if text in caught | {code}}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = stop
    parser.add_argument("--out", default=HERE, help="folder to write into (default: this script's)")
    parser.add_argument("--sft", type=int, default=20_000, help="demonstrations to learn from (default: %(default)s)")
    parser.add_argument("--val", type=int, default=200, help="held-out problems (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="decides everything else (default: %(default)s)")
    args = parser.parse_args()
    everything = problems()
    for name, largest in (("sft", 1_000_000), ("val", len(everything) - 1)):
        if not 1 <= getattr(args, name) <= largest:
            stop(f"--{name}={getattr(args, name)} is out of range: [1..{largest}]")

    rng = random.Random(args.seed)
    rng.shuffle(everything)
    files = {}
    for part, chosen, size in (("val", everything[:args.val], 500), ("train", everything[args.val:], args.sft)):
        examined = [(prompt(*problem), *examine(rng, problem)) for problem in chosen]
        files[f"rl_{part}.jsonl"] = [{"prompt": words, "tests": tests} for words, tests, _ in examined]
        files[f"sft_{part}.jsonl"] = [{"prompt": words, "completion": rng.choices([*shares], [*shares.values()])[0]}
                                      for words, _, shares in rng.choices(examined, k=size)]
    files[os.path.join("tokenizer", "tiktoken.json")] = TOKENIZER
    try:
        os.makedirs(os.path.join(args.out, "tokenizer"), exist_ok=True)
        for name, content in files.items():
            with open(os.path.join(args.out, name) + ".part", "w", encoding="utf-8") as f:
                if isinstance(content, list):
                    f.writelines(json.dumps(row) + "\n" for row in content)
                else:
                    json.dump(content, f, indent=2)
        for name, content in files.items():  # all or none: an old file might share problems with a new one
            os.replace(os.path.join(args.out, name) + ".part", os.path.join(args.out, name))
            if isinstance(content, list):
                print(f"{name}: {len(content)} rows")
    except OSError as e:
        stop(f"--out={args.out}: {e.strerror}")
    print("tokenizer/: 256 bytes, <eos>, <pad>")

if __name__ == "__main__":
    main()

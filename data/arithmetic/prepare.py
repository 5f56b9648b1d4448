"""
The built-in task: addition with thinking out loud. Nothing is downloaded; runs in a second.

    python data/arithmetic/prepare.py

A demonstration answers 123+456= in one of two ways. It thinks first: it writes down the sums of the
columns from the right, each with its carry, as <think>3+6+0=09;2+5+0=07;1+4+0=05</think>579. Or it
answers at once, as 579. Of 10 demonstrations 3 think, and are right; 7 answer at once, and 1 in 10
of these is right. A small model that is trained on them does the same. So something is left for PPO
to find out: that thinking pays.

Writes beside itself, with no problem in two of the first four:
    sft_train.jsonl, sft_val.jsonl   {"prompt", "completion"}
    rl_train.jsonl, rl_val.jsonl     {"prompt", "answer"}
    sft_hints.jsonl                  those of sft_train that think, with the solution before the
                                     prompt, too: for recipes/self_distillation.diff
    tokenizer/                       the byte-level tokenizer with the two markers
The preference pairs are made later, of the SFT model's answers: data/arithmetic/pairs.py.
"""
import itertools
import os
import random
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
# Python looks for modules in this file's folder; these are in the folder above it.
sys.path.insert(0, os.path.dirname(HERE))

from byte_tokenizer import write_byte_tokenizer  # noqa: E402
from files import parser_of, write_rows  # noqa: E402

DIGITS = 3
THINKS = 0.3  # share of the demonstrations that think
LUCKY = 0.1  # share of the others that are right
SIZES = {"sft_train": 50_000, "sft_val": 500, "rl_train": 20_000, "rl_val": 500}


def think(a, b):
    """
    The sums of the columns of a + b from the right, each with the carry from the column before:
    (147, 215) -> 7+5+0=12;4+1+1=06;1+2+0=03.
    """
    columns, carry = [], 0
    for x, y in zip(reversed(f"{a:0{DIGITS}d}"), reversed(f"{b:0{DIGITS}d}"), strict=True):
        total = int(x) + int(y) + carry
        columns.append(f"{x}+{y}+{carry}={total:02d}")
        carry = total // 10
    return ";".join(columns)


def guess(rng, total):
    """An answer given without thinking: right with probability LUCKY, else with one digit wrong."""
    digits = list(str(total))
    if rng.random() >= LUCKY:
        place = rng.randrange(len(digits))
        others = [d for d in "0123456789" if d != digits[place] and (d != "0" or place > 0)]
        digits[place] = rng.choice(others)
    return "".join(digits)


def problems(rng, n):
    """n different pairs of DIGITS-digit numbers."""
    low, high = 10 ** (DIGITS - 1), 10**DIGITS
    pairs = rng.sample(range((high - low) ** 2), n)
    return [(low + p // (high - low), low + p % (high - low)) for p in pairs]


def rows():
    """(file, row) of all files."""
    rng = random.Random(0)
    everything = iter(problems(rng, sum(SIZES.values())))
    for name, size in SIZES.items():
        for a, b in itertools.islice(everything, size):
            row = {"prompt": f"{a}+{b}="}
            if name.startswith("sft"):
                thinks = rng.random() < THINKS
                thought = f"<think>{think(a, b)}</think>{a + b}"
                row["completion"] = thought if thinks else guess(rng, a + b)
                if thinks and name == "sft_train":
                    yield "sft_hints", row | {"prompt": f"{thought}\n{row['prompt']}"}
            else:
                row["answer"] = str(a + b)
            yield name, row


if __name__ == "__main__":
    parser_of(__doc__).parse_args()  # there is only --help
    write_rows(HERE, [*SIZES, "sft_hints"], rows())
    write_byte_tokenizer(os.path.join(HERE, "tokenizer"), ["<think>", "</think>"])

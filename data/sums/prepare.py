"""
Sums of two and three numbers below 100 as chats, with worked solutions that end in "#### 101":
problems for a small model on CPUs, in the form of data/gsm_symbolic. Nothing is downloaded.

    python data/sums/prepare.py

Writes beside itself: sft_train.jsonl (500 rows), rl_train.jsonl (2,000), rl_val.jsonl (200), and
rl_new.jsonl (100 sums of four numbers). No sum is in two of them.
"""
import os
import random
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
# Python looks for modules in this file's folder; this one is in the folder above it.
sys.path.insert(0, os.path.dirname(HERE))

from files import parser_of, write_rows  # noqa: E402

ROWS = dict(sft_train=500, rl_train=2000, rl_val=200, rl_new=100)


def row(numbers):
    """The problem and its solution: 48 + 36 + 17 is 48 + 36 = 84, 84 + 17 = 101."""
    total, steps = numbers[0], []
    for number in numbers[1:]:
        steps.append(f"{total} + {number} = {total + number}")
        total += number
    asked = f"What is {' + '.join(map(str, numbers))}? End with #### and the number."
    return dict(prompt=[dict(role="user", content=asked)], answer=str(total), completion=[
        dict(role="assistant", content="\n".join([*steps, f"#### {total}"]))])


def rows():
    """(file, row) of all files; the rows of prompts to sample for have no completion."""
    rng, seen = random.Random(0), set()
    for name, count in ROWS.items():
        before = len(seen)
        while len(seen) < before + count:
            size = 4 if name == "rl_new" else rng.choice((2, 3))
            numbers = tuple(rng.randint(10, 99) for _ in range(size))
            if numbers not in seen:
                seen.add(numbers)
                made = row(numbers)
                if name != "sft_train":
                    del made["completion"]
                yield name, made


if __name__ == "__main__":
    parser_of(__doc__).parse_args()  # there is only --help
    write_rows(HERE, ROWS, rows())

"""
A task of several turns: products of two numbers of three digits, which a tiny model cannot compute,
and a calculator that it may call. Nothing is downloaded; runs in a second.

    python data/calculator/prepare.py

A demonstration answers 123*456= in one of two ways. It calls the calculator, calc(123*456), hears
56088 and says that; or it guesses. Of 10 demonstrations 3 call, and 7 guess, of which 1 in 10 is
right. A model that is trained on them does the same, and finds out by its reward that calling pays.
The calculator is in calculator.py.

Writes beside itself, with no problem in two of the files:
    sft_train.jsonl, sft_val.jsonl   {"prompt", "completion"}, lists of messages
    rl_train.jsonl, rl_val.jsonl     {"prompt", "answer"}
    tokenizer/                       a token for each byte, and a chat template: the bare contents,
                                     with <eos> behind the assistant's
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

CALLS = 0.3  # share of the demonstrations that call the calculator
LUCKY = 0.1  # share of the others that are right
SIZES = {"sft_train": 30_000, "sft_val": 500, "rl_train": 20_000, "rl_val": 256}
TEMPLATE = ("{% for message in messages %}{{ message['content'] }}"
            "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}")


def said(role, text):
    return {"role": role, "content": text}


def rows():
    """(file, row) of all files."""
    rng = random.Random(0)
    pairs = iter(rng.sample(range(900 * 900), sum(SIZES.values())))
    for name, size in SIZES.items():
        for n in itertools.islice(pairs, size):
            a, b = 100 + n // 900, 100 + n % 900
            row = {"prompt": [said("user", f"{a}*{b}=")]}
            if name.startswith("rl"):
                row["answer"] = str(a * b)
            elif rng.random() < CALLS:
                row["completion"] = [said("assistant", f"calc({a}*{b})"),
                                     said("user", f"{a * b}\n"), said("assistant", str(a * b))]
            else:
                guess = a * b if rng.random() < LUCKY else rng.randint(10_000, 998_001)
                row["completion"] = [said("assistant", str(guess))]
            yield name, row


if __name__ == "__main__":
    parser_of(__doc__).parse_args()  # there is only --help
    write_rows(HERE, SIZES, rows())
    write_byte_tokenizer(os.path.join(HERE, "tokenizer"), chat_template=TEMPLATE)

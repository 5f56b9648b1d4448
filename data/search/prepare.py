"""
The task of search: put + or - between four numbers, so that the result is the target. Nothing is
downloaded; runs in a second.

    python data/search/prepare.py

A response to 2,6,5,4>7: is attempts, each with its running results and a mark, ! for a hit and ?
for a miss: 2-6=-4-5=-9-4=-13?2+6=8-5=3+4=7! It is right if its last attempt hits. There are only
eight ways to put the signs, so whoever tries them all will hit.

Demonstrators stop at a hit. There are three kinds of them: 75 of 100 try signs by chance and soon
give up, after each miss in half of the cases; 15 try by chance, too, but eight times; 10 go through
the eight ways in their order: +++, ++-, and so on. So 40 % of the demonstrations are right, and
have 2.5 attempts. A small model that is trained on them does the same, and something is left for
PPO and GRPO to find out: that going on pays, and going on in order even more. Both take longer.

Writes beside itself, the held-out problems into the val files, all others into the train files:
    sft_train.jsonl, sft_val.jsonl   {"prompt", "completion"}
    rl_train.jsonl, rl_val.jsonl     {"prompt", "numbers", "target"}, for the rules of reward.py
    tokenizer/                       the byte-level tokenizer
"""
import itertools
import os
import random
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
# Python looks for modules in this file's folder; some of ours are in the folder above it.
sys.path[:0] = [HERE, os.path.dirname(HERE)]

from byte_tokenizer import write_byte_tokenizer  # noqa: E402
from files import parser_of, write_rows  # noqa: E402
from reward import ways  # noqa: E402

NUMBERS, LARGEST = 4, 6  # a problem has so many numbers, from 1 to LARGEST
CARELESS, PATIENT = 0.75, 0.15  # shares of the demonstrators; the others go on in order
HELD_OUT = 500  # of the 8,874 problems
TIMES = 5  # demonstrations of each of the other problems


def demonstrate(rng, numbers, target):
    """The response of a demonstrator of one of the three kinds."""
    kind, response = rng.random(), ""
    for attempt in ways(numbers):
        if kind < CARELESS + PATIENT:
            attempt = rng.choice(list(ways(numbers)))
        hit = ways(numbers)[attempt] == target
        response += attempt + ("!" if hit else "?")
        if hit or kind < CARELESS and rng.random() < 0.5:
            break
    return response


def problems(rng):
    """All (numbers, target) that can be solved, shuffled."""
    found = [(numbers, target)
             for numbers in itertools.product(range(1, LARGEST + 1), repeat=NUMBERS)
             for target in sorted(set(ways(numbers).values()))]
    return rng.sample(found, len(found))


def rows():
    """(file, row) of all files."""
    rng = random.Random(0)
    tasks = problems(rng)
    for part, some, times in ("val", tasks[:HELD_OUT], 1), ("train", tasks[HELD_OUT:], TIMES):
        asked = [{"prompt": f"{','.join(map(str, numbers))}>{target}:", "numbers": numbers,
                  "target": target} for numbers, target in some]
        for row in asked:
            yield f"rl_{part}", row
        for row in times * asked:
            response = demonstrate(rng, row["numbers"], row["target"])
            yield f"sft_{part}", {"prompt": row["prompt"], "completion": response}


if __name__ == "__main__":
    parser_of(__doc__).parse_args()  # there is only --help
    write_rows(HERE, ["rl_val", "sft_val", "rl_train", "sft_train"], rows())
    write_byte_tokenizer(os.path.join(HERE, "tokenizer"))

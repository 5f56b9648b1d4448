"""
Sums of two and three numbers below 100 as chats, with worked solutions that end in "#### 101":
problems for a small model on CPUs, in the form of data/gsm_symbolic. Nothing is downloaded.

    python data/sums/prepare.py

Writes beside itself: sft_train.jsonl (500 rows), rl_train.jsonl (2,000), rl_val.jsonl (200), and
rl_new.jsonl (100 sums of four numbers). No sum is in two of them.
"""
import json
import os
import random
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
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


def rows(seed=0):
    """{file: rows}; the rows of prompts to sample for have no completion."""
    rng, seen, made = random.Random(seed), set(), {}
    for name, count in ROWS.items():
        made[name] = []
        while len(made[name]) < count:
            size = 4 if name == "rl_new" else rng.choice((2, 3))
            numbers = tuple(rng.randint(10, 99) for _ in range(size))
            if numbers not in seen:
                seen.add(numbers)
                made[name].append(row(numbers))
    for name in ("rl_train", "rl_val", "rl_new"):
        for problem in made[name]:
            del problem["completion"]
    return made


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv[1:]):
        sys.exit(print(__doc__.strip()))
    for name, some in rows().items():
        with open(os.path.join(HERE, f"{name}.jsonl"), "w", encoding="utf-8") as f:
            f.writelines(json.dumps(one) + "\n" for one in some)
        print(f"{name}.jsonl: {len(some)} rows")

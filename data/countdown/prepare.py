"""
Countdown: reach a target with some numbers and + - * /, each number exactly once. Nothing is
downloaded.

    python data/countdown/prepare.py            # for base models: the prompt opens the thinking
    python data/countdown/prepare.py --chat     # for instruct models: the prompt is a chat message

Writes beside itself, or into --out: rl_train.jsonl and rl_val.jsonl {"prompt", "numbers",
"target"}, for the reward in reward.py, the example of a reward of your own.

The task is TinyZero's (github.com/Jiayi-Pan/TinyZero, its data Jiayi-Pan/Countdown-Tasks-3to4): 3
or 4 numbers from 1 to 99, a target from 10 to 100, thinking in <think> and the answer in
<answer>. The prompt for base models says what theirs says, in our words.

The problems are our own. A random expression is drawn first; its value becomes the target, if it
is an integer in range. So every problem has a solution, but targets that are easily reached come
more often than in TinyZero's. No two problems have the same target and the same numbers, in any
order. The problems of rl_val are drawn first, so they depend on --seed, --val and the ranges
alone.
"""
import itertools
import os
import random
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.dirname(HERE)]

from convert import BASE, parser_of, write_rows  # noqa: E402
from reward import evaluate_arithmetic  # noqa: E402

NUMBERS = (3, 4)  # how many numbers a problem has
LARGEST = 99  # the numbers are from 1 to this
TARGETS = (10, 100)  # the least and the largest target
TASK = """Using the numbers {numbers}, find an expression that equals {target}. You may use \
addition, subtraction, multiplication and division (+, -, *, /) and parentheses, and you must use \
every number exactly once. Reason between <think> and </think>, then give the expression alone \
between <answer> and </answer>, for example <answer>(1 + 2) / 3</answer>."""


def random_expression(rng, numbers):
    """A random expression of the numbers in their order: [3, 5, 2] -> "(3 * (5 - 2))"."""
    if len(numbers) == 1:
        return str(numbers[0])
    cut = rng.randrange(1, len(numbers))
    left = random_expression(rng, numbers[:cut])
    operation = rng.choice("+-*/")
    return f"({left} {operation} {random_expression(rng, numbers[cut:])})"


def problem(rng):
    """A problem that has a solution: (its numbers, shuffled, its target)."""
    size, value = rng.choice(NUMBERS), None
    while value is None or value.denominator != 1 or not TARGETS[0] <= value <= TARGETS[1]:
        numbers = [rng.randint(1, LARGEST) for _ in range(size)]
        # a Fraction, so that nothing is rounded; None for a division by zero
        value = evaluate_arithmetic(random_expression(rng, numbers))
    rng.shuffle(numbers)  # or their order would be a hint
    return numbers, int(value)


def problems(rng):
    """Yield (numbers, target) of problems without end, no two with the same numbers and target."""
    seen = set()
    while True:
        numbers, target = problem(rng)
        key = (*sorted(numbers), target)
        if key not in seen:
            seen.add(key)
            yield numbers, target


def prompt(numbers, target, chat):
    """A problem's prompt: text for a base model, a chat message for an instruct model."""
    task = TASK.format(numbers=numbers, target=target)
    return [{"role": "user", "content": task}] if chat else BASE.format(task=task)


def rows(args):
    """(our file, row): first the held-out problems, then those to train on."""
    walk = problems(random.Random(args.seed))
    for name, size in (("rl_val", args.val), ("rl_train", args.train)):
        for numbers, target in itertools.islice(walk, size):
            words = prompt(numbers, target, args.chat)
            yield name, {"prompt": words, "numbers": numbers, "target": target}


def main():
    parser = parser_of(__doc__)
    parser.add_argument("--out", default=HERE,
                        help="folder to write into (default: this script's)")
    parser.add_argument("--train", type=int, default=20_000,
                        help="problems to train on (default: %(default)s)")
    parser.add_argument("--val", type=int, default=500,
                        help="held-out problems (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1,
                        help="decides the problems (default: %(default)s)")
    parser.add_argument("--chat", action="store_true",
                        help="prompts as chat messages, for models with a chat template")
    args = parser.parse_args()
    write_rows(args.out, ["rl_train", "rl_val"], rows(args))


if __name__ == "__main__":
    main()

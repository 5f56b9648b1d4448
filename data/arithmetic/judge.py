"""
Data to train a judge of the built-in addition task: answers to problems, and what to say of them.

    python data/arithmetic/judge.py      # after data/arithmetic/prepare.py

A row's prompt is a question, its completion the judge's answer, A (right) or B (wrong). Two kinds:

    163+930=<think>3+0+0=03;6+3+0=09;1+9+0=10</think>1093?     A     judge.txt, filled in
    163+930=<think>3+0+0=03;6+3+0=08~                          B     right so far?

An answer is right where its number is, and each step of its thinking. Half of those that think have
one slip: in a digit that is copied, in a sum, in a carry, or in the number at the end; some end too
early, or are not closed. Of those that do not think 1 in 10 is right, which a small model cannot
see: it learns that they are mostly wrong. The second kind is there to be learned from alone: the
fewer the steps, the plainer which of them was wrong.

The true answers are used here for the last time: whatever is trained with the judge's word has seen
none. The problems are those of sft_train.jsonl, in which no problem of the other files is.

Writes beside itself: judge_train.jsonl and judge_val.jsonl {"prompt", "completion"}.
"""
import os
import random
import re
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
# Python looks for modules in this file's folder; files.py is above it, and knows where ours are.
sys.path.insert(0, os.path.dirname(HERE))

from files import write_rows  # noqa: E402

from configurator import configure  # noqa: E402
from options.judging import answers_and_question, fill, template_text  # noqa: E402
from prepare import guess, think  # noqa: E402
from demonstrations import dialogue  # noqa: E402
from prompts import read_rows  # noqa: E402

rows = 64000  # to train on; 1000 more are held out [>= 10]
so_far = 0.4  # share of the rows of the second kind [0..1]
seed = 1  # decides the rows [>= 0]
config, _ = configure(globals())


def slip(rng, text):
    """A text with one of its digits changed."""
    places = [found.start() for found in re.finditer("[0-9]", text)]
    place = rng.choice(places)
    digit = rng.choice([d for d in "0123456789" if d != text[place]])
    return text[:place] + digit + text[place + 1:]


def answer(rng, a, b):
    """(an answer to a + b, whether it is right)."""
    right = str(a + b)
    if rng.random() < 0.2:
        number = guess(rng, a + b)
        return number, number == right
    text = f"<think>{think(a, b)}</think>{right}"
    kind = rng.random()
    if kind < 0.5:
        return text, True
    if kind < 0.9:
        return slip(rng, text), False
    steps = think(a, b).split(";")
    return rng.choice([
        text[:rng.randrange(len("<think>"), len(text))], f"<think></think>{right}",
        f"<think>{';'.join(steps[:-1])}</think>{right}", f"<think>{';'.join(steps)}{right}"]), False


def beginning(rng, a, b):
    """(the first steps of an answer to a + b, whether they are right)."""
    text = "<think>" + ";".join(think(a, b).split(";")[:rng.choice([1, 1, 2, 3])])
    return (text, True) if rng.random() < 0.5 else (slip(rng, text), False)


rng = random.Random(f"judge {seed}")
_, question = answers_and_question(template_text(os.path.join(HERE, "judge.txt")))
problems = [tuple(map(int, row["prompt"].rstrip("=").split("+")))
            for row in read_rows(os.path.join(HERE, "sft_train.jsonl"), dialogue)]
names, made = ("judge_train", "judge_val"), []  # made: (file, row)
for i in range(rows + 1000):
    a, b = rng.choice(problems)
    if rng.random() < so_far:
        text, right = beginning(rng, a, b)
        asked = f"{a}+{b}={text}~"
    else:
        text, right = answer(rng, a, b)
        asked = fill(question, dict(prompt=f"{a}+{b}=", response=text))
    made.append((names[i >= rows], dict(prompt=asked, completion="BA"[right])))
write_rows(HERE, names, made)

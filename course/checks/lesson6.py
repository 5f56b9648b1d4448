"""What lesson 6's functions should return, and what they return by each typical mistake."""
import math
from types import SimpleNamespace

import torch
from pairs import pairs

DRAWN = torch.Generator().manual_seed(6)


def drawn(n):
    return 2 * torch.randn(n, generator=DRAWN, dtype=torch.float64)


def right(chosen, rejected):
    total = 0.0
    for c, r in zip(chosen.tolist(), rejected.tolist(), strict=True):
        x = c - r  # log(1 + e^-x), without e^500
        total += math.log1p(math.exp(-abs(x))) + max(-x, 0.0)
    return total / len(chosen)


MISTAKES = {
    "chosen and rejected are the wrong way round: this teaches the worse answer":
        lambda c, r: right(r, c),
    "you add up the pairs; take their mean": lambda c, r: right(c, r) * len(c),
    "the logarithm is missing: this is the mean probability that the chosen one wins":
        lambda c, r: (c - r).sigmoid().mean(),
    "the sign is wrong: a loss is minus the log-probability": lambda c, r: -right(c, r),
    "log(sigmoid(x)) is -inf for a large negative x, and a run ends with NaN: use logsigmoid":
        lambda c, r: -(c - r).sigmoid().log().mean(),
    "you take the loss of the mean difference; take the mean of the pairs' losses":
        lambda c, r: right(c.mean()[None], r.mean()[None]),
    "this is the loss of a margin without a sigmoid: -(chosen - rejected) has no end":
        lambda c, r: (r - c).mean(),
}


def judge(function):
    """Is the score of the chosen one higher, in pairs that the student has not seen?"""
    held_out = pairs(77, 400)
    share = sum(float(function(c)) > float(function(r)) for c, r in held_out) / len(held_out)
    if share > 0.97:
        return ""
    words = f"score in exercise6.py is right in {share:.0%} of 400 new pairs; 98 % is wanted. "
    lengths = sum(len(c) > len(r) for c, r in held_out) / len(held_out)
    polite = sum(c.startswith("certainly") for c, r in held_out) / len(held_out)
    if share < 0.1:
        return words + "You found it, and score it the wrong way round"
    if abs(share - lengths) < 0.02:
        return words + "That is the length, which is right in 7 of 10: look further"
    if abs(share - polite) < 0.02:
        return words + "That is the politeness, which is right in 6 of 10: look further"
    if share == 0:
        return words + "All responses have the same score"
    return words + "Print more pairs: python course/pairs.py"


HUGE = torch.tensor([500.0, -900.0, 0.0], dtype=torch.float64)
CHECKS = {
    "pair_loss": SimpleNamespace(
        right=right, MISTAKES=MISTAKES,
        CASES=[(drawn(n), drawn(n)) for n in (1, 4, 9)] + [(HUGE, -HUGE)]),
    "score": SimpleNamespace(judge=judge)}

"""What lesson 6's functions should return, and what they return by each typical mistake."""
import math
from types import SimpleNamespace

import torch
from pairs import pairs

DRAWN = torch.Generator().manual_seed(6)


def drawn(n):
    return 2 * torch.randn(n, generator=DRAWN, dtype=torch.float64)


def right(chosen, rejected):
    return -torch.nn.functional.logsigmoid(chosen - rejected).mean()


MISTAKES = {
    "chosen and rejected are the wrong way round: this teaches the worse answer":
        lambda c, r: right(r, c),
    "you add up the pairs; take their mean": lambda c, r: right(c, r) * len(c),
    "the logarithm is missing: this is the mean probability that the chosen one wins":
        lambda c, r: (c - r).sigmoid().mean(),
    "you take each score's sigmoid; the sigmoid of the *difference* is wanted":
        lambda c, r: -(c.sigmoid() - r.sigmoid()).mean(),
}
BIG = {
    "there is a small number such as 1e-8 inside your logarithm: there the loss has no slope, and "
    "a pair that is very wrong teaches nothing. Use logsigmoid":
        lambda c, r: -((c - r).sigmoid() + 1e-8).log().mean(),
}


FEATURES = {
    lambda text: len(text): "It goes with the length, which is right in 7 of 10",
    lambda text: len(text.split()): "It goes with the number of words, which is right in 7 of 10",
    lambda text: text.startswith("certainly"):
        "That is the politeness, which is right in 6 of 10",
}


def judge(score):
    """Is the score of the chosen one higher, in pairs that the student has not seen?"""
    held_out = pairs(77, 400)
    pairs_of = [(score(c), score(r)) for c, r in held_out]
    scores = [x for both in pairs_of for x in both]
    share = sum(c > r for c, r in pairs_of) / len(held_out)
    if share > 0.97:
        return ""
    words = f" is right in {share:.0%} of 400 new pairs; 98 % is wanted. "
    if any(math.isnan(x) for x in scores):
        return words + "Some of its scores are NaN"
    ties = sum(c == r for c, r in pairs_of) / len(held_out)
    if ties > 0.97:
        return words + "Both responses of a pair have the same score"
    if share + ties < 0.03:
        return words + "You found it, and score it the wrong way round"
    for feature, says in FEATURES.items():
        signs = [(feature(c) - feature(r)) * (x - y)
                 for (c, r), (x, y) in zip(held_out, pairs_of, strict=True)]
        for how, sign in {"look further": 1, "and you have it turned round": -1}.items():
            if sum(x * sign > 0 for x in signs) > 0.9 * len(held_out):
                return f"{words}{says}: {how}"
    return f"{words}In {ties:.0%} both have the same score. Print more: python course/pairs.py"


HUGE = torch.tensor([500.0, -900.0, 0.0], dtype=torch.float64)
CHECKS = {
    "pair_loss": SimpleNamespace(
        right=right, MISTAKES=MISTAKES, gradient_of=[0, 1],
        CASES=[(drawn(n), drawn(n)) for n in (1, 4, 9)],
        LARGE=([(HUGE, -HUGE), (-HUGE, HUGE)], "for scores such as -500 and 500 it is not finite: "
               "exp(1000) is inf, and sigmoid(-1000) is 0, which has no logarithm: use logsigmoid",
               BIG)),
    "score": SimpleNamespace(judge=judge)}

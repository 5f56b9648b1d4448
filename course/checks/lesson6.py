"""What lesson 6's functions should return, and what they return by each typical mistake."""
import math
from types import SimpleNamespace

import torch
from pairs import pairs

from checks import small

DRAWN = torch.Generator().manual_seed(6)


def drawn(n):
    return 2 * torch.randn(n, generator=DRAWN, dtype=torch.float64)


def right(chosen, rejected, difference=lambda c, r: c - r, log=torch.nn.functional.logsigmoid,
          mean=lambda x: x.mean()):
    return -mean(log(difference(chosen, rejected)))


MISTAKES = {
    "chosen and rejected are the wrong way round: this teaches the worse answer":
        dict(difference=lambda c, r: r - c),
    "you add up the pairs; take their mean": dict(mean=lambda x: x.sum()),
    "the logarithm is missing: this is the mean probability that the chosen one wins":
        dict(log=lambda x: -x.sigmoid()),
    "the logarithm is missing: this is the mean probability that the rejected one wins":
        dict(log=lambda x: x.sigmoid() - 1),
    "you take the logarithm of the mean; the mean of the logarithms is wanted":
        dict(log=torch.sigmoid, mean=lambda x: x.mean().log()),
    "you take each score's sigmoid; the sigmoid of the *difference* is wanted":
        dict(difference=lambda c, r: c.sigmoid() - r.sigmoid(), log=lambda x: x),
    "you take the sigmoid twice: logsigmoid has it already":
        dict(difference=lambda c, r: (c - r).sigmoid()),
    "you compare each chosen one with each rejected one; only those of one pair belong together":
        dict(difference=lambda c, r: c[:, None] - r),
    "you take the mean of the scores first; each pair has its own loss":
        dict(difference=lambda c, r: c.mean() - r.mean()),
}
FEATURES = {
    len: "It goes with the length, which is right in 7 of 10",
    lambda text: "certainly" in text: "That is the politeness, which is right in 6 of 10",
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
        LARGE=([(HUGE, -HUGE), (-HUGE, HUGE)],
               small(lambda e, x: (x.sigmoid() + e).log()))),
    "score": SimpleNamespace(judge=judge)}

"""What lesson 3's function should return, and what it returns by each typical mistake."""
from types import SimpleNamespace

import torch

DRAWN = torch.Generator().manual_seed(3)


def case(mask, gamma, lam):
    mask = torch.tensor([mark == "T" for mark in mask])
    rewards, values = torch.randn(2, len(mask), generator=DRAWN, dtype=torch.float64)
    return rewards, values, mask, gamma, lam


def loop(r, v, mask, gamma, lam, delta=lambda r, v, after, gamma: r + gamma * after - v,
         decay=lambda gamma, lam: gamma * lam, everywhere=False, gaps=False, column=False,
         reset=False):
    """GAE; or with one of its parts wrong."""
    found, advantage, after = torch.zeros(len(r), dtype=torch.float64), 0.0, 0.0
    last = len(r) - 1 if everywhere else int(mask.nonzero().max())
    for t in range(last, -1, -1):
        if not (mask[t] or everywhere):
            if gaps:  # a step of reward 0 and value 0
                advantage, after = gamma * after + decay(gamma, lam) * advantage, 0.0
            if reset:
                advantage = after = 0.0
            continue
        if column:
            after = v[t + 1] if t + 1 < len(r) else 0.0
        advantage = delta(r[t], v[t], after, gamma) + decay(gamma, lam) * advantage
        found[t], after = advantage, v[t]
    return found


def right(rewards, values, mask, gamma, lam):
    return loop(rewards, values, mask, gamma, lam)


def mistake(**how):
    return lambda *arguments: loop(*arguments, **how)


MISTAKES = {
    "you do not use the mask: padding and gaps are no tokens of the policy":
        mistake(everywhere=True),
    "you read the value of the next *column*; in front of a gap or of padding that is no value of "
    "the policy's: take the next True token, and 0 behind the last one": mistake(column=True),
    "a gap counts as a step of time, with reward and value 0; leave it out":
        mistake(gaps=True),
    "your advantage of the next token is not multiplied by lam":
        mistake(decay=lambda gamma, lam: gamma),
    "your advantage of the next token is not multiplied by gamma":
        mistake(decay=lambda gamma, lam: lam),
    "the next value is not multiplied by gamma":
        mistake(delta=lambda r, v, after, gamma: r + after - v),
    "delta lacks the value of the token itself: how much *better than expected* was it?":
        mistake(delta=lambda r, v, after, gamma: r + gamma * after),
    "delta lacks the next value": mistake(delta=lambda r, v, after, gamma: r - v),
    "these are the returns, advantage + value; wanted are the advantages":
        lambda *a: loop(*a) + a[1] * a[2],
    "you compute with padding and gaps, and apply the mask only at the end: what stands there is "
    "already in the tokens before": lambda *a: loop(*a, everywhere=True) * a[2],
    "a gap ends your response: the value and the advantage behind it belong to the token before it":
        mistake(reset=True),
    "these are the deltas alone, as with lam = 0: the advantage of the next is missing":
        mistake(decay=lambda gamma, lam: 0.0),
    "delta has no values at all: these are the discounted rewards to come":
        mistake(delta=lambda r, v, after, gamma: r),
}


CHECKS = {"gae": SimpleNamespace(right=right, MISTAKES=MISTAKES, CASES=[
    case("TTTT", 0.9, 0.8), case("FTTTFFTTFF", 0.95, 0.7), case("TFTFTTF", 0.8, 0.5),
    case("FFTF", 0.9, 0.9)])}

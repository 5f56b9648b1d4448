"""What lesson 3's function should return, and what it returns by each typical mistake."""
from types import SimpleNamespace

import torch

DRAWN = torch.Generator().manual_seed(3)


def case(mask, gamma, lam):
    mask = torch.tensor([mark == "T" for mark in mask])
    rewards, values = torch.randn(2, len(mask), generator=DRAWN, dtype=torch.float64)
    return rewards, values, mask, gamma, lam


def right(rewards, values, mask, gamma, lam, all_columns=False, blank=False, column=False,
          reset=False, tail=0.0, delta=lambda r, v, after, gamma: r + gamma * after - v,
          decay=lambda gamma, lam: gamma * lam, order=reversed, final=lambda x, v, mask: x,
          reward=lambda r: r):
    t = torch.arange(len(mask))[mask | all_columns]  # the columns that are steps of time
    r, v = (x[t].masked_fill(~mask[t] & blank, 0.0) for x in (reward(rewards), values))
    after = torch.cat([v[1:], tail * v[-1:]])
    if column:
        after = torch.nn.functional.pad(values, (0, 1))[t + 1]
    ends = torch.nn.functional.pad(t.diff() > 1, (0, 1)) & reset
    deltas = delta(r, v, after.masked_fill(ends, 0.0), gamma)
    found, advantage = torch.zeros_like(rewards), 0.0
    for i in order(range(len(t))):
        advantage = deltas[i] + decay(gamma, lam) * advantage * ~ends[i]
        found[t[i]] = advantage
    return final(found, values, mask)


MISTAKES = {
    "you do not use the mask: padding and gaps are no tokens of the policy":
        dict(all_columns=True),
    "you apply the mask only at the end: padding and gaps are already in the tokens before":
        dict(all_columns=True, final=lambda x, v, mask: x * mask),
    "a gap counts as a step of time, with reward and value 0; leave it out":
        dict(all_columns=True, blank=True, final=lambda x, v, mask: x * mask),
    "you read the value of the next *column*: take the next True token's, and 0 behind the last":
        dict(column=True),
    "a gap ends your response: what is behind it belongs to the token before it": dict(reset=True),
    "behind the last token the value is 0; you take the last token's own there": dict(tail=1.0),
    "you take the reward of the next column": dict(reward=lambda r: r.roll(-1)),
    "your loop goes forward in time; an advantage needs that of the *next* token":
        dict(order=iter),
    "the next advantage is not multiplied by lam": dict(decay=lambda gamma, lam: gamma),
    "the next advantage is not multiplied by gamma": dict(decay=lambda gamma, lam: lam),
    "the next advantage is multiplied by neither gamma nor lam": dict(decay=lambda gamma, lam: 1.0),
    "these are the deltas alone, as with lam = 0: the next advantage is missing":
        dict(decay=lambda gamma, lam: 0.0),
    "the next value is not multiplied by gamma":
        dict(delta=lambda r, v, after, gamma: r + after - v),
    "delta lacks the value of the token itself: how much *better than expected* was it?":
        dict(delta=lambda r, v, after, gamma: r + gamma * after),
    "delta lacks the next value": dict(delta=lambda r, v, after, gamma: r - v),
    "delta has no values at all: these are the discounted rewards to come":
        dict(delta=lambda r, v, after, gamma: r),
    "both values have the wrong sign in delta":
        dict(delta=lambda r, v, after, gamma: r - gamma * after + v),
    "you take the token's own value for the next one, too":
        dict(delta=lambda r, v, after, gamma: r + gamma * v - v),
    "these are the returns, advantage + value; wanted are the advantages":
        dict(final=lambda x, v, mask: x + v * mask),
    "these are whitened; wanted are the advantages themselves": dict(
        final=lambda x, v, mask: (x - x[mask].mean()) / (x[mask].var(correction=0) + 1e-8).sqrt()
        * mask),
}
CHECKS = {"gae": SimpleNamespace(right=right, MISTAKES=MISTAKES, CASES=[
    case("TTTT", 0.9, 0.8), case("FTTTFFTTFF", 0.95, 0.7), case("TFTFTTF", 0.8, 0.5),
    case("FFTF", 0.9, 0.9)])}

"""What lesson 4's functions should return, and what they return by each typical mistake."""
from types import SimpleNamespace

import torch

DRAWN = torch.Generator().manual_seed(4)


def case(B, T, cliprange):
    old, change, advantages = torch.randn(3, B, T, generator=DRAWN, dtype=torch.float64)
    lengths = torch.randint(1, T + 1, (B,), generator=DRAWN)
    lengths[0], lengths[1] = T, 1
    mask = torch.arange(T) < lengths[:, None]
    # behind the mask: numbers of no meaning
    return (old + 0.4 * change).masked_fill(~mask, 3.0), old, advantages, mask, cliprange


def far():
    """One row: ratios far outside, and at 1.21 and 0.81, whose logarithms lie on the other side."""
    ratio = torch.tensor([[8.0, 8.0, 0.05, 0.05, 1.21, 0.81]], dtype=torch.float64)
    signs = torch.tensor([[-1.0, 0.5, 1.5, -0.7, 2.0, -0.9]], dtype=torch.float64)
    return ratio.log() - 1.5, torch.full_like(ratio, -1.5), signs, signs != 0, 0.2


def loss(new, old, advantages, mask, c, ratio=lambda new, old: (new - old).exp(),
         losses=torch.maximum, mean=lambda x, mask: x[mask].mean(), sign=-1,
         clip=lambda r, c: r.clamp(1 - c, 1 + c)):
    """The loss; or with one of its parts wrong."""
    r = ratio(new, old)
    return mean(losses(sign * advantages * r, sign * advantages * clip(r, c)), mask)


def right(logprobs, old_logprobs, advantages, mask, cliprange):
    return loss(logprobs, old_logprobs, advantages, mask, cliprange)


def mistake(**how):
    return lambda *arguments: loss(*arguments, **how)


def rows(x, mask):
    return torch.stack([row[m].mean() for row, m in zip(x, mask, strict=True)]).mean()


MISTAKES = {
    "you take the smaller of the two losses; the larger one is the cautious choice. (The paper "
    "has the minimum, of gains: a loss has the other sign)": mistake(losses=torch.minimum),
    "you use the clipped loss alone: then a bad token whose ratio has risen has no gradient "
    "either, and nothing pulls it down": mistake(losses=lambda plain, clipped: clipped),
    "there is no clip": mistake(losses=lambda plain, clipped: plain),
    "padding changes your mean: it goes over all columns; take the True ones, and their number":
        mistake(mean=lambda x, mask: x.mean()),
    "you divide by the number of all columns; divide by the number of True tokens":
        mistake(mean=lambda x, mask: x[mask].sum() / mask.numel()),
    "you take the mean of the rows' means: a token of a short response counts more":
        mistake(mean=rows),
    "you add up the tokens; take their mean": mistake(mean=lambda x, mask: x[mask].sum()),
    "the sign of the advantage is wrong: this lowers the probability of good tokens":
        mistake(sign=1),
    "your ratio is upside down: new over old": mistake(ratio=lambda new, old: (old - new).exp()),
    "the ratio is exp(logprob - old_logprob); the exp is missing":
        mistake(ratio=lambda new, old: new - old),
    "the range is one of the ratio, 1 - cliprange to 1 + cliprange; you keep its logarithm within "
    "-cliprange and cliprange": mistake(clip=lambda r, c: r.log().clamp(-c, c).exp()),
    "you clip above only; below 1 - cliprange a bad token has nothing more to gain, either":
        mistake(clip=lambda r, c: r.clamp(max=1 + c)),
}


def gradient(ratio, advantages, c):
    return (advantages > 0) & (ratio < 1 + c) | (advantages < 0) & (ratio > 1 - c)


GRADIENT = {
    "the clip takes the gradient only where there is nothing more to gain: above 1 + cliprange for "
    "a good token, below 1 - cliprange for a bad one": lambda r, a, c: (r - 1).abs() < c,
    "an advantage of 0 has no gradient": lambda r, a, c: ~(
        (a > 0) & (r > 1 + c) | (a < 0) & (r < 1 - c)),
    "the other way round: you say where it is 0": lambda r, a, c: ~gradient(r, a, c),
    "you say where the clip takes the gradient away; and an advantage of 0 has no gradient":
        lambda r, a, c: (a > 0) & (r > 1 + c) | (a < 0) & (r < 1 - c),
    "you compare the logarithm of the ratio with cliprange; the range is one of the ratio":
        lambda r, a, c: gradient(1 + r.log(), a, c),
}
RATIOS = torch.tensor([0.5, 0.5, 0.9, 0.9, 1.1, 1.1, 1.5, 1.5, 1.5, 0.5,
                       1.21, 1.21, 0.81, 0.81, 1.0]).double()
SIGNS = torch.tensor([1.0, -1.0, 2.0, -0.5, 1.0, -1.0, 0.5, -2.0, 0.0, 0.0,
                      1.0, -1.0, 1.0, -1.0, 0.0]).double()
CHECKS = {
    "clipped_loss": SimpleNamespace(
        right=right, MISTAKES=MISTAKES, gradient_of=[0],
        CASES=[case(3, 6, 0.2), case(2, 4, 0.1), case(5, 9, 0.3), far()]),
    "has_gradient": SimpleNamespace(
        right=gradient, MISTAKES=GRADIENT,
        CASES=[(RATIOS, SIGNS, 0.2), (RATIOS, SIGNS, 0.05), (RATIOS, SIGNS, 0.3)])}

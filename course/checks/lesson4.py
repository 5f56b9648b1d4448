"""What lesson 4's functions should return, and what they return by each typical mistake."""
import math
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


def right(logprobs, old_logprobs, advantages, mask, cliprange, sign=-1, larger=torch.maximum,
          ratio=lambda new, old: (new - old).exp(), clip=lambda r, c: r.clamp(1 - c, 1 + c),
          kept=lambda a, r, c, clip: a * clip(r, c), mean=lambda x, mask: x[mask].mean()):
    r, a = ratio(logprobs, old_logprobs), sign * advantages
    return mean(larger(a * r, kept(a, r, cliprange, clip)), mask)


MISTAKES = {
    "you take the smaller of the two losses; take the larger. (The paper has a minimum, of gains)":
        dict(larger=torch.minimum),
    "you use the clipped loss alone: nothing pulls down a bad token whose ratio has risen":
        dict(larger=lambda plain, clipped: clipped),
    "there is no clip": dict(larger=lambda plain, clipped: plain),
    "padding changes your mean: take the True columns": dict(mean=lambda x, mask: x.mean()),
    "you divide by the number of all columns; divide by the number of True tokens":
        dict(mean=lambda x, mask: (x * mask).mean()),
    "you divide by the number of rows; divide by the number of True tokens":
        dict(mean=lambda x, mask: x[mask].sum() / len(x)),
    "you take the mean of the rows' means: a token of a short response counts more":
        dict(mean=lambda x, mask: ((x * mask).sum(1) / mask.sum(1)).mean()),
    "you add up the tokens; take their mean": dict(mean=lambda x, mask: x[mask].sum()),
    "the sign of the advantage is wrong: this lowers the probability of good tokens": dict(sign=1),
    "your ratio is upside down: new over old": dict(ratio=lambda new, old: (old - new).exp()),
    "the ratio is exp(logprob - old_logprob); the exp is missing":
        dict(ratio=lambda new, old: new - old),
    "the ratio is exp(logprob - old_logprob); you divide the log-probs":
        dict(ratio=lambda new, old: new / old),
    "you keep its logarithm within -cliprange and cliprange; the range is one of the ratio":
        dict(clip=lambda r, c: r.clamp(math.exp(-c), math.exp(c))),
    "you clip ratio - 1, and have not added the 1 again":
        dict(clip=lambda r, c: (r - 1).clamp(-c, c)),
    "you keep the ratio within -cliprange and cliprange; the range lies around 1":
        dict(clip=lambda r, c: r.clamp(-c, c)),
    "you clip above only; below 1 - cliprange a bad token has nothing more to gain, either":
        dict(clip=lambda r, c: r.clamp(max=1 + c)),
    "you clip below only; above 1 + cliprange a good token has nothing more to gain, either":
        dict(clip=lambda r, c: r.clamp(min=1 - c)),
    "your range begins at 1 / (1 + cliprange); wanted is 1 - cliprange":
        dict(clip=lambda r, c: r.clamp(1 / (1 + c), 1 + c)),
    "you clip the product of advantage and ratio; clip the ratio, and multiply then":
        dict(kept=lambda a, r, c, clip: -clip(-a * r, c)),
}


def gradient(ratio, advantages, cliprange, sign=1, good=lambda a: a > 0, bad=lambda a: a < 0,
             zero=lambda a: a == 0, log=lambda r: r, final=lambda x: x):
    r, a, c = log(ratio), sign * advantages, cliprange
    return final(~(good(a) & (r > 1 + c) | bad(a) & (r < 1 - c) | zero(a)))


ALWAYS, NEVER = (lambda a: a == a), (lambda a: a != a)
GRADIENT = {
    "the clip takes the gradient only where there is nothing more to gain: above for a good token, "
    "below for a bad one": dict(good=ALWAYS, bad=ALWAYS),
    "above 1 + cliprange a bad token has a gradient": dict(good=ALWAYS),
    "below 1 - cliprange a good token has a gradient": dict(bad=ALWAYS),
    "above 1 + cliprange a good token has no gradient, either": dict(good=NEVER),
    "below 1 - cliprange a bad token has no gradient, either": dict(bad=NEVER),
    "an advantage of 0 has no gradient": dict(zero=NEVER),
    "the other way round: you say where it is 0": dict(final=torch.logical_not),
    "good and bad tokens are exchanged": dict(sign=-1),
    "you compare the logarithm of the ratio with cliprange; the range is one of the ratio":
        dict(log=lambda r: 1 + r.log()),
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

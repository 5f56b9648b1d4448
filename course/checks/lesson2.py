"""What lesson 2's functions should return, and what they return by each typical mistake."""
from types import SimpleNamespace

import torch

DRAWN = torch.Generator().manual_seed(2)


def drawn(*shape):
    return torch.randn(*shape, generator=DRAWN, dtype=torch.float64)


def exact(logits, rewards, probs=lambda z: z.softmax(0), weights=lambda p: p,
          baseline=lambda p, r: (p * r).sum(), final=lambda x: x):
    p = probs(logits)
    return final(weights(p) * (rewards - baseline(p, rewards)))


def sampled(logits, words, rewards, baseline, reward=lambda r, b: r - b,
            push=lambda one, p: one - p, mean=lambda x: x.mean(0)):
    one = torch.eye(len(logits), dtype=torch.float64)[words]  # (N, V), 1 at the sampled word
    return mean(reward(rewards, baseline)[:, None] * push(one, logits.softmax(0)))


EXACT = {
    "raising a word's logit lowers all other words: so J is subtracted from each reward":
        dict(baseline=lambda p, r: 0.0),
    "you subtract the mean of the rewards; J weighs the words by their probabilities":
        dict(baseline=lambda p, r: r.mean()),
    "you have only what a logit does to its own word, p * (1 - p); it moves all other words, too":
        dict(baseline=lambda p, r: p * r),
    "each entry is p times (reward - J); the p is missing": dict(weights=lambda p: 1.0),
    "you divide by V; the probabilities are weights already": dict(final=lambda x: x / len(x)),
    "your p is exp(logit), which does not add up to 1: softmax": dict(probs=torch.exp),
}
SAMPLED = {
    "you add up the samples; take their mean": dict(mean=lambda x: x.sum(0)),
    "you divide by n - 1, as in a variance": dict(mean=lambda x: x.sum(0) / (len(x) - 1)),
    "you divide by the number of words; divide by the number of samples":
        dict(mean=lambda x: x.sum(0) / x.shape[1]),
    "you add the baseline; subtract it": dict(reward=lambda r, b: r + b),
    "the baseline is missing": dict(reward=lambda r, b: r),
    "you multiply the mean reward by the mean gradient; each sample has *its own* reward":
        dict(reward=lambda r, b: (r - b).mean().expand_as(r)),
    "the gradient of log p of a word is 1 at that word, *minus p at all words*":
        dict(push=lambda one, p: one),
    "p is subtracted, not added": dict(push=lambda one, p: one + p),
    "this is the gradient of p; of log p is wanted, which is the same divided by p":
        dict(push=lambda one, p: (one - p) * (one @ p)[:, None]),
}
CHECKS = {
    "exact_gradient": SimpleNamespace(
        right=exact, MISTAKES=EXACT, CASES=[(drawn(n), drawn(n)) for n in (3, 2, 5)]),
    "sampled_gradient": SimpleNamespace(
        right=sampled, MISTAKES=SAMPLED,
        CASES=[(drawn(3), torch.randint(3, (n,), generator=DRAWN), drawn(n), b)
               for n, b in ((4, 0.5), (2, -1.5), (7, 0.25))])}

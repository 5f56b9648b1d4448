"""What lesson 2's functions should return, and what they return by each typical mistake."""
from types import SimpleNamespace

import torch

DRAWN = torch.Generator().manual_seed(2)


def drawn(*shape):
    return torch.randn(*shape, generator=DRAWN, dtype=torch.float64)


def exact(logits, rewards):
    p = logits.softmax(0)
    return p * (rewards - (p * rewards).sum())


def pushes(logits, words):
    """The gradient of log p of each sampled word: (N, V)."""
    return torch.eye(len(logits), dtype=torch.float64)[words] - logits.softmax(0)


def sampled(logits, words, rewards, baseline):
    return ((rewards - baseline)[:, None] * pushes(logits, words)).mean(0)


EXACT = {
    "you differentiate p as if it were one logit: raising a word's logit lowers all other words, "
    "so J is subtracted from each reward": lambda logits, rewards: logits.softmax(0) * rewards,
    "you subtract the mean of the rewards, where each word counts the same; J weighs the words by "
    "their probabilities": lambda logits, rewards: logits.softmax(0) * (rewards - rewards.mean()),
    "this is the mean over the words, divided by V; the probabilities are the weights already":
        lambda logits, rewards: exact(logits, rewards) / len(logits),
}
SAMPLED = {
    "you add up the samples; take their mean": lambda logits, words, r, b:
        ((r - b)[:, None] * pushes(logits, words)).sum(0),
    "you add the baseline; subtract it": lambda logits, words, r, b:
        sampled(logits, words, r, -b),
    "the baseline is missing": lambda logits, words, r, b: sampled(logits, words, r, 0.0),
    "the gradient of log p of a word is 1 at that word *minus p* at all words; you left out the "
    "probabilities": lambda logits, words, r, b: ((r - b)[:, None] * torch.eye(
        len(logits), dtype=torch.float64)[words]).mean(0),
    "you divide by n - 1, as in a variance; a mean is divided by n": lambda logits, words, r, b:
        sampled(logits, words, r, b) * len(words) / (len(words) - 1),
    "you multiply the mean reward by the mean gradient; each sample's gradient has *its own* "
    "reward": lambda logits, words, r, b: (r - b).mean() * pushes(logits, words).mean(0),
}
CHECKS = {
    "exact_gradient": SimpleNamespace(
        right=exact, MISTAKES=EXACT, CASES=[(drawn(n), drawn(n)) for n in (3, 2, 5)]),
    "sampled_gradient": SimpleNamespace(
        right=sampled, MISTAKES=SAMPLED,
        CASES=[(drawn(3), torch.randint(3, (n,), generator=DRAWN), drawn(n), b)
               for n, b in ((4, 0.5), (2, -1.5), (7, 0.25))])}

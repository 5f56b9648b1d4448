"""What lesson 1's function should return, and what it returns by each typical mistake."""
import operator
from types import SimpleNamespace

import torch

from checks import small

DRAWN = torch.Generator().manual_seed(1)


def case(length, vocabulary, temperature):
    logits = 2 * torch.randn(length, vocabulary, generator=DRAWN, dtype=torch.float64)
    return logits, torch.randint(vocabulary, (length,), generator=DRAWN), temperature


def right(logits, ids, temperature, rows=slice(-1), chosen=slice(1, None), scale=operator.truediv,
          log=lambda z: z.log_softmax(-1), final=lambda x, temperature: x):
    found = log(scale(logits[rows], temperature))  # row t speaks of the token behind token t
    return final(found[range(len(found)), ids[chosen]], temperature)


MISTAKES = {
    "your rows are shifted by one: row t of the logits speaks of token t + 1":
        dict(rows=slice(1, None)),
    "your ids are shifted by one: row t belongs to ids[t + 1], you took ids[t]":
        dict(chosen=slice(-1)),
    "you return probabilities; take their logarithm": dict(log=lambda z: z.softmax(-1)),
    "you multiply the logits by the temperature; divide": dict(scale=operator.mul),
    "you do not use the temperature": dict(scale=lambda z, c: z),
    "you divide the log-probs by the temperature; divide the logits, before the softmax":
        dict(scale=lambda z, c: z, final=lambda x, c: x / c),
    "you return logits; subtract the logarithm of the sum of all exp(logit): log_softmax":
        dict(log=lambda z: z),
    "your softmax goes over the text; it must go over the vocabulary, the last dimension":
        dict(log=lambda z: z.log_softmax(0)),
    "this is minus the log-prob: a loss, such as F.cross_entropy, has the other sign":
        dict(final=lambda x, c: -x),
}
CHECKS = {"logprobs": SimpleNamespace(
    right=right, MISTAKES=MISTAKES, gradient_of=[0],
    CASES=[case(4, 5, 0.7), case(2, 3, 1.0), case(6, 9, 1.5), case(5, 4, 0.25)],
    LARGE=([(400 * case(4, 5, 1.0)[0], torch.tensor([0, 3, 1, 4]), 1.0)],
           small(lambda e, z: (z.softmax(-1) + e).log())))}

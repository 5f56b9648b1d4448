"""What lesson 1's function should return, and what it returns by each typical mistake."""
from types import SimpleNamespace

import torch

DRAWN = torch.Generator().manual_seed(1)


def case(length, vocabulary, temperature):
    logits = 2 * torch.randn(length, vocabulary, generator=DRAWN, dtype=torch.float64)
    return logits, torch.randint(vocabulary, (length,), generator=DRAWN), temperature


def pick(rows, ids):
    return rows[range(len(ids)), ids]


def right(logits, ids, temperature):  # row t speaks of the token behind token t
    return pick((logits[:-1] / temperature).log_softmax(-1), ids[1:])


MISTAKES = {
    "your rows are shifted by one: logits[t] is what the model says of token t + 1, and you read "
    "it for token t": lambda logits, ids, c: pick((logits[1:] / c).log_softmax(-1), ids[1:]),
    "your ids are shifted by one: row t belongs to ids[t + 1], you took ids[t]":
        lambda logits, ids, c: pick((logits[:-1] / c).log_softmax(-1), ids[:-1]),
    "you return probabilities; take their logarithm":
        lambda logits, ids, c: pick((logits[:-1] / c).softmax(-1), ids[1:]),
    "you multiply the logits by the temperature; divide: a low temperature makes the differences "
    "larger": lambda logits, ids, c: pick((logits[:-1] * c).log_softmax(-1), ids[1:]),
    "you do not use the temperature":
        lambda logits, ids, c: pick(logits[:-1].log_softmax(-1), ids[1:]),
    "you return logits; subtract the logarithm of the sum of all exp(logit): log_softmax":
        lambda logits, ids, c: pick(logits[:-1] / c, ids[1:]),
    "your softmax goes over the text; it must go over the vocabulary, the last dimension":
        lambda logits, ids, c: pick((logits[:-1] / c).log_softmax(0), ids[1:]),
    "this is minus the log-prob: a loss, such as F.cross_entropy, has the other sign":
        lambda logits, ids, c: -right(logits, ids, c),
}
BIG = {
    "there is a small number such as 1e-8 inside your logarithm: it hides how unlikely a token is. "
    "log_softmax needs none": lambda logits, ids, c: (
        pick((logits[:-1] / c).softmax(-1), ids[1:]) + 1e-8).log(),
}
CHECKS = {"logprobs": SimpleNamespace(
    right=right, MISTAKES=MISTAKES, gradient_of=[0],
    CASES=[case(4, 5, 0.7), case(2, 3, 1.0), case(6, 9, 1.5), case(5, 4, 0.25)],
    LARGE=([(400 * case(4, 5, 1.0)[0], torch.tensor([0, 3, 1, 4]), 1.0)],
           "for logits of 800 it is not finite: exp(800) is inf, and the log of a probability that "
           "has become 0 is -inf. log_softmax subtracts the largest logit first", BIG))}

"""What lesson 5's functions should return, and what they return by each typical mistake."""
from types import SimpleNamespace

import torch

DRAWN = torch.Generator().manual_seed(5)


def drawn(n):
    return torch.randn(n, generator=DRAWN, dtype=torch.float64)


def exact(logits, ref_logits):
    return (logits.softmax(0) * (logits.log_softmax(0) - ref_logits.log_softmax(0))).sum()


EXACT = {
    "this is KL(reference || policy): the weights and the numerator are the *policy's* p":
        lambda logits, ref: exact(ref, logits),
    "logits are no log-probs: subtract the logarithm of the sum of all exp(logit) first":
        lambda logits, ref: (logits.softmax(0) * (logits - ref)).sum(),
    "this is minus the entropy of the policy: log q is missing":
        lambda logits, ref: (logits.softmax(0) * logits.log_softmax(0)).sum(),
    "this is the cross-entropy: the entropy of the policy is missing":
        lambda logits, ref: -(logits.softmax(0) * ref.log_softmax(0)).sum(),
    "you divide by the number of tokens of the vocabulary; p has weighed them already. (F.kl_div "
    "does so, unless reduction is \"sum\")": lambda logits, ref: exact(logits, ref) / len(logits),
}
BIG = {
    "there is a small number such as 1e-8 inside your logarithm: it hides how unlikely a token is. "
    "log_softmax needs none": lambda logits, ref: (logits.softmax(0) * (
        (logits.softmax(0) + 1e-8).log() - (ref.softmax(0) + 1e-8).log())).sum(),
}


def rows(k1=lambda x: x, k2=lambda x: x**2 / 2, k3=lambda x: (-x).exp() - 1 + x):
    return lambda logprobs, ref: torch.stack([k(logprobs - ref) for k in (k1, k2, k3)])


def estimates(logprobs, ref_logprobs):
    return rows()(logprobs, ref_logprobs)


ESTIMATES = {
    "k1 is the other way round: log p - log q": rows(k1=lambda x: -x),
    "k2 lacks the half": rows(k2=lambda x: x**2),
    "k3 has p / q where q / p belongs: this one is not unbiased, and its mean may be anything":
        rows(k3=lambda x: x.exp() - 1 - x),
    "k3 lacks the 1: for p = q it must be 0": rows(k3=lambda x: (-x).exp() + x),
    "k3 lacks its logarithm: q / p - 1 - log(q / p)": rows(k3=lambda x: (-x).exp() - 1),
    "p and q are the wrong way round, in all three": lambda a, b: estimates(b, a),
}
LARGE = [(torch.tensor([800.0, 0.0, -3.0]).double(), torch.tensor([775.0, 799.0, 800.0]).double())]
CHECKS = {
    "exact_kl": SimpleNamespace(right=exact, MISTAKES=EXACT,
                                CASES=[(drawn(n), drawn(n)) for n in (2, 4, 7)],
                                LARGE=(LARGE, "for logits of 800 it is not finite: exp(800) is "
                                       "inf, and a probability of 0 has no logarithm. Take "
                                       "log_softmax for both logarithms", BIG)),
    "kl_estimates": SimpleNamespace(right=estimates, MISTAKES=ESTIMATES, parts=("k1", "k2", "k3"),
                                    CASES=[(drawn(n) - 2, drawn(n) - 2) for n in (1, 3, 6)])}

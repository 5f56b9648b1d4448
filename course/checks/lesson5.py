"""What lesson 5's functions should return, and what they return by each typical mistake."""
from types import SimpleNamespace

import torch

from checks import small

DRAWN = torch.Generator().manual_seed(5)


def drawn(n):
    return torch.randn(n, generator=DRAWN, dtype=torch.float64)


def exact(logits, ref_logits, swap=False, probs=lambda z: z.softmax(0),
          log=lambda z: z.log_softmax(0), weights=lambda p, q: p,
          difference=lambda p, q: p - q, total=lambda x: x.sum()):
    p, q = (ref_logits, logits) if swap else (logits, ref_logits)
    return total(weights(probs(p), probs(q)) * difference(log(p), log(q)))


def estimates(logprobs, ref_logprobs, x=lambda p, q: p - q, k1=lambda x: x, k2=lambda x: x**2 / 2,
              k3=lambda x: (-x).exp() - 1 + x):
    return torch.stack([k(x(logprobs, ref_logprobs)) for k in (k1, k2, k3)])


EXACT = {
    "this is KL(reference || policy): the weights and the numerator are the *policy's* p":
        dict(swap=True),
    "the weights are the policy's p; you take the reference's q": dict(weights=lambda p, q: q),
    "the weights are missing: log(p / q) counts p times": dict(weights=lambda p, q: 1.0),
    "logits are no log-probs: subtract the logarithm of the sum of all exp(logit) first":
        dict(log=lambda z: z),
    "you take the log_softmax of probabilities; of logits is wanted":
        dict(log=lambda z: z.softmax(0).log_softmax(0)),
    "this is minus the entropy of the policy: log q is missing": dict(difference=lambda p, q: p),
    "this is the cross-entropy: the entropy of the policy is missing":
        dict(difference=lambda p, q: -q),
    "log q is outside of the bracket: p weighs both logarithms":
        dict(difference=lambda p, q: p - q / p.exp()),
    "you take away the sign of each log(p / q); single ones may be negative":
        dict(difference=lambda p, q: (p - q).abs()),
    "you divide by V; p has weighed the tokens already. (F.kl_div does so, unless its reduction is "
    "\"sum\")": dict(total=lambda x: x.mean()),
}
ESTIMATES = {
    "p and q are the wrong way round": dict(x=lambda p, q: q - p),
    "p / q is exp(log p - log q); you divide the log-probs": dict(x=lambda p, q: (p / q).log()),
    "its half is missing": dict(k2=lambda x: x**2),
    "it has no square: log(p / q)^2 / 2": dict(k2=lambda x: x.abs() / 2),
    "p / q stands where q / p belongs: then its mean is not the KL":
        dict(k3=lambda x: x.exp() - 1 - x),
    "its 1 is missing: for p = q it must be 0": dict(k3=lambda x: (-x).exp() + x),
    "its logarithm is missing: q / p - 1 - log(q / p)": dict(k3=lambda x: (-x).exp() - 1),
    "its logarithm is added; subtract it: q / p - 1 - log(q / p)":
        dict(k3=lambda x: (-x).exp() - 1 - x),
}
LARGE = [(torch.tensor([800.0, 0.0, -3.0]).double(), torch.tensor([775.0, 799.0, 800.0]).double())]
CHECKS = {
    "exact_kl": SimpleNamespace(right=exact, MISTAKES=EXACT,
                                CASES=[(drawn(n), drawn(n)) for n in (2, 4, 7)],
                                LARGE=(LARGE, small(lambda e, z: (z.softmax(0) + e).log()))),
    "kl_estimates": SimpleNamespace(right=estimates, MISTAKES=ESTIMATES, rows=("k1", "k2", "k3"),
                                    CASES=[(drawn(n) - 2, drawn(n) - 2) for n in (1, 3, 6)])}

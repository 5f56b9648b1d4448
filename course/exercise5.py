"""Lesson 5: the KL, exact and estimated. Write two bodies; then: python course/check.py 5"""
import torch  # noqa: F401


def exact_kl(logits, ref_logits):
    """
    KL(policy || reference) of two distributions over V tokens, one number in nats: the sum over all
    tokens of p * log(p / q), p of the policy, q of the reference. logits, ref_logits: (V,).

    For p = [0.5, 0.5] and q = [0.25, 0.75]: 0.1438.
    """
    raise NotImplementedError


def kl_estimates(logprobs, ref_logprobs):
    """
    Three estimates from tokens that the policy has sampled, (3, N): the rows are k1 = log(p / q),
    k2 = log(p / q)^2 / 2, k3 = q / p - 1 - log(q / p). logprobs, ref_logprobs: (N,), log p, log q.

    For p = 0.5, q = 0.25: 0.6931, 0.2402, 0.1931.
    """
    raise NotImplementedError

"""Lesson 2: the policy gradient of three words. Write two bodies; then: python course/check.py 2"""
import torch  # noqa: F401


def exact_gradient(logits, rewards):
    """
    The gradient of the expected reward J, (V,): how J changes with each logit.

    The policy says one word of V: word k with the probability p_k, where p = softmax(logits).
    Word k earns rewards[k]; so J = p_0 rewards[0] + p_1 rewards[1] + ... logits, rewards: (V,).

    For logits = [0, 0] and rewards = [1, 0] it is [0.25, -0.25].
    """
    raise NotImplementedError


def sampled_gradient(logits, words, rewards, baseline):
    """
    The same gradient, (V,), estimated from N words that the policy has sampled (REINFORCE with a
    baseline): the mean over the samples of (reward - baseline) times the gradient of log p of the
    word that was sampled.

    logits: (V,). words: (N,) int64. rewards: (N,), the reward of each sample. baseline: a number.

    For logits = [0, 0], words = [0], rewards = [1] and baseline 0.5 it is [0.25, -0.25].
    """
    raise NotImplementedError

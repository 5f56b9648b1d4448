"""Lesson 3: GAE, with a loop over time. Write the body; then: python course/check.py 3"""
import torch  # noqa: F401


def gae(rewards, values, mask, gamma, lam):
    """
    The advantage of each token of one response, (T,), 0 where the mask is False.

    rewards, values: (T,). mask: (T,) bool, True where the policy sampled the token. Its tokens are
    the True ones, one after the other: a gap (the output of a tool) is no step of time, and behind
    the last one the value is 0. With "next" the next True token:

        delta = reward + gamma * value of the next - value
        advantage = delta + gamma * lam * advantage of the next

    For rewards [0, 0, 1], values [0.5, 0.5, 0.75], gamma = 1, lam = 0.5 and a mask that is True
    everywhere: [0.1875, 0.375, 0.25].
    """
    raise NotImplementedError

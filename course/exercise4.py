"""Lesson 4: the clip. Write two bodies; then: python course/check.py 4"""
import torch  # noqa: F401


def clipped_loss(logprobs, old_logprobs, advantages, mask, cliprange):
    """
    PPO's policy loss, one number: the mean over all True tokens of the batch of the larger one of
    -advantage * ratio and -advantage * (the ratio, kept within 1 - cliprange and 1 + cliprange).
    The ratio of a token is its probability now, over that before the update.

    logprobs, old_logprobs, advantages: (B, T). mask: (B, T) bool, True on sampled tokens; where it
    is False there may be any finite number.

    One token, ratio 1.5, advantage 2, cliprange 0.2: the loss is -2.4. With advantage -2: 3.
    """
    raise NotImplementedError


def has_gradient(ratio, advantages, cliprange):
    """
    For which tokens this loss has a gradient that is not 0: (N,) bool. ratio, advantages: (N,); no
    ratio is exactly at the edge of the range.

    For ratios [1.5, 1.5], advantages [1, -1], cliprange 0.2: [False, True].
    """
    raise NotImplementedError

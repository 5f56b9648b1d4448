"""Lesson 6: a reward model's loss; a shortcut. Write two bodies; then: python course/check.py 6"""
import torch  # noqa: F401


def pair_loss(chosen, rejected):
    """
    The mean over N pairs of -log(sigmoid(score of the chosen - score of the rejected)), one number.
    chosen, rejected: (N,) scores. It must be a finite number also for scores such as -500 and 500.

    For the scores 1 and 0 of a single pair: 0.3133.
    """
    raise NotImplementedError


def score(text):
    """
    A reward model in one line: a number for a response. Print some pairs of pairs.py. In all of
    them the chosen response has more of something than the rejected one; find it. A reward model
    finds it, too, and a policy that is trained on this reward model will say nothing else.
    """
    raise NotImplementedError

"""Lesson 1: the log-probs of a text. Write the body; then: python course/check.py 1"""
import torch  # noqa: F401


def logprobs(logits, ids, temperature):
    """
    The log-prob of each token of a text but the first, when tokens are sampled at a temperature.

    ids: (T,) int64, the tokens of one text. logits: (T, V), what the model says of the vocabulary's
    V tokens after it has read the tokens 0 to t: row t. temperature: a number above 0.
    Returns (T - 1,): at place 0 the log-prob of ids[1].

    For ids = [0, 1], a vocabulary of two tokens, logits[0] = [0, 0] and any temperature it is
    [-0.6931], the logarithm of one half. For logits[0] = [0, 1] and temperature 0.5 it is
    [-0.1269]: log(e^2 / (e^0 + e^2)).
    """
    raise NotImplementedError

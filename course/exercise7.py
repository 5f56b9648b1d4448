"""Lesson 7: GRPO and its relatives. Write two bodies; then: python course/check.py 7"""
import torch  # noqa: F401


def advantages(scores, group_size, kind):
    """
    One advantage for each response: (B,). scores: (B,), the responses to a prompt side by side:
    with group_size = 2 the responses 0 and 1 are to the first prompt. kind:

    "grpo"     (score - mean of the group) / (deviation of the group + 1e-4); the deviation's sum of
               squares is divided by group_size - 1
    "dr_grpo"  score - mean of the group
    "rloo"     score - mean of the *other* scores of the group
    "maxrl"    (score - mean of the group) / (mean of the group + 1e-4)

    For the scores 1, 0, 0, 0 of a group: "grpo" 1.4997, -0.4999, ...; "dr_grpo" 0.75, -0.25, ...;
    "rloo" 1, -0.3333, ...; "maxrl" 2.9988, -0.9996, ...
    """
    raise NotImplementedError


def weights(lengths, kind, max_length):
    """
    The weight of each token of a response in the loss of a batch: (B,), one number for all tokens
    of a response. lengths: (B,) int64, tokens of each response. max_length: the longest allowed.

    "grpo"     first a mean over the tokens of each response, then over the responses
    "dapo"     a mean over all tokens of the batch
    "dr_grpo"  the sum over all tokens, divided by max_length and by the number of responses

    For lengths [1, 3] and max_length 4: "grpo" [1/2, 1/6], "dapo" [1/4, 1/4], "dr_grpo" [1/8, 1/8].
    """
    raise NotImplementedError

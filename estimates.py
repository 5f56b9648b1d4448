"""
How far to trust the probabilities that a reward model gives, and how alike two reward models are.
"""
import torch


def calibration_error(probabilities, bins=10):
    """
    The expected calibration error of the probabilities (n,) that the chosen answer of a pair is the
    better one, from a reward model (Guo et al., arXiv 1706.04599, equation 3). A probability below
    1/2 is a wrong guess, with the confidence 1 - probability. The guesses are put into bins of
    equal width from 1/2 to 1; the error of a bin is the distance of its mean confidence from its
    share of right guesses, and the result is the mean of the errors over all guesses. With 0.9, 0.9
    and 0.1: three guesses of confidence 0.9, 2/3 of them right, so 0.233.
    """
    sure = torch.maximum(probabilities, 1 - probabilities)  # (n,)
    right = (probabilities > 0.5).double() + 0.5 * (probabilities == 0.5)
    number = ((sure - 0.5) * 2 * bins).long().clamp(max=bins - 1)  # (n,), of each guess's bin
    gaps = torch.zeros(bins, dtype=torch.float64).index_add(0, number, sure.double() - right)
    return gaps.abs().sum().item() / len(probabilities)


def agreement(scores, others):
    """The share of n pairs (n, 2) that two reward models put into the same order."""
    return ((scores[:, 0] > scores[:, 1]) == (others[:, 0] > others[:, 1])).double().mean().item()


def correlation(scores, others):
    """Pearson's correlation of two reward models' scores, of one shape; 0 where one is constant."""
    both = torch.stack([scores.flatten(), others.flatten()]).double()  # (2, n)
    return torch.corrcoef(both)[0, 1].nan_to_num().item()

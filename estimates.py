"""
Measures of a policy from samples: pass@k, majority@k, best of k, the win rate of two policies,
means with errors. And of reward models: calibration, agreement, correlation. Plain functions of
numbers and texts.
"""
import math

import torch

from same import same_answer


def pass_at_k(n, right, k):
    """
    The probability that at least one of k samples is right, 1 <= k <= n, estimated from n samples;
    `right` of them are right. It is the share of all sets of k of the n samples with a right one:

        1 - C(n - right, k) / C(n, k)  =  1 - product of (1 - k / i) for i from n - right + 1 to n

    (Chen et al., arXiv 2107.03374, equation 1; the product, because binomials may be huge.) It is
    unbiased; 1 - (1 - right / n)^k is not. With n = 4, right = 1, k = 2: 1 - (1 - 2/4) = 0.5.
    """
    if n - right < k:
        return 1.0  # there are not k wrong ones
    return 1.0 - math.prod(1.0 - k / i for i in range(n - right + 1, n + 1))


def best_of_k(scores, values, k):
    """
    The mean value of the best of k samples, estimated from n >= k samples. The best one has the
    highest score; of equal ones it is any. scores, values: n numbers.

    It is the mean over all sets of k of the n samples, and so unbiased: the best of a set is the
    sample of rank i from the top (i = 0, 1, ...) in C(n - 1 - i, k - 1) of C(n, k) sets. With the
    scores and values 3, 1, 2 and k = 2: the sets' best are 3, 3, 2, mean 2.667.
    """
    ranked, n = sorted(zip(scores, values, strict=True), reverse=True), len(scores)
    total, above = 0.0, 0  # samples of higher scores
    while above < n:
        tied = [value for score, value in ranked if score == ranked[above][0]]
        # the share of sets with one of these as the best: the sets without a higher one, minus
        # those that also have none of these
        share = none_of(above, n, k) - none_of(above + len(tied), n, k)
        total += share * math.fsum(tied) / len(tied)
        above += len(tied)
    return total


def none_of(m, n, k):
    """The share of all sets of k of n that have none of certain m: C(n - m, k) / C(n, k)."""
    return math.prod((n - m - i) / (n - i) for i in range(k)) if n - m >= k else 0.0


def majority(answers):
    """
    The place in `answers` (texts of answers.final_answer) of the most frequent answer; None if
    there is none. An answer joins the first class with the same first member (same_answer in one of
    the two orders: 0.5, 1/2 and x + y = 1/2 are the same). Of classes of equal size the one that
    began first wins.

    Empty answers, and those of thinking that never ended, do not count.
    """
    classes = []  # lists of places
    for place, answer in enumerate(answers):
        if not answer.strip() or "<think>" in answer:
            continue
        mine = next((c for c in classes if same_answer(answers[c[0]], answer)
                     or same_answer(answer, answers[c[0]])), None)
        if mine is None:
            classes.append([place])
        else:
            mine.append(place)
    return max(classes, key=len)[0] if classes else None  # max returns the first of the largest


def majority_at_k(answers, right, k):
    """
    How often the majority of k samples is right: the n samples are cut into n // k groups of k; it
    is the share of groups with a right majority. answers: n texts; right: n numbers, 1.0 for right
    ones. A group without any answer is wrong.
    """
    groups = [range(i, i + k) for i in range(0, len(answers) - k + 1, k)]
    winners = [(group, majority([answers[i] for i in group])) for group in groups]
    return sum(right[group[w]] for group, w in winners if w is not None) / len(groups)


def wins(ours, theirs):
    """
    How often a score of `ours` is above one of `theirs`, over all pairs; a tie counts half. Both
    are the scores of responses to one prompt: [3, 1] and [2, 1] make (1 + 1 + 0 + 0.5) / 4 = 0.625.
    """
    pairs = [(a > b) + 0.5 * (a == b) for a in ours for b in theirs]
    return sum(pairs) / len(pairs)


def mean_and_error(values):
    """
    The mean of `values`, one for each prompt, and half the width of its 95 % confidence interval:
    1.96 standard errors. The error of a single value is NaN.
    """
    n = len(values)
    mean = math.fsum(values) / n
    if n < 2:
        return mean, math.nan
    return mean, 1.96 * math.sqrt(math.fsum((x - mean) ** 2 for x in values) / (n - 1) / n)


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

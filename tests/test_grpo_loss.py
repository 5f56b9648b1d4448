"""
relatives.py where whole runs see little: equal scores, missing scores, and what estimators mean, by
enumeration of every outcome. (The losses of whole steps, with every switch, are worked out in by_hand.py.)
"""
import itertools
import math

import pytest
import torch

from loss import kl_estimate
from relatives import flat_groups, group_advantages, gspo_log_ratio, token_weights

KINDS = list(itertools.product(("std", "batch", "none"), ("mean", "others")))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_scores_give_exactly_nothing(dtype):
    """However the mean rounds: 0.1 three times has another mean than 0.1, and / 1e-4 makes that large."""
    rounded = 0
    for value, size in itertools.product((0.1, 1 / 3, 1e-8, -0.7, 0.0, 1e30), range(2, 40)):
        scores = torch.full((2 * size,), value, dtype=dtype)
        scores[size:] = torch.linspace(-1, 1, size)  # beside a group that does learn
        rounded += bool((scores[:size] - scores[:size].sum() / size != 0).any())
        assert flat_groups(scores, size).tolist() == [True, False]
        for scale, baseline in KINDS:
            advantages = group_advantages(scores, size, scale, baseline)
            assert (advantages[:size] == 0).all() and (advantages[size:] != 0).any()
    assert rounded > 20  # the trap is there
    nearly = torch.full((8,), 0.1, dtype=dtype)
    nearly[3] = torch.nextafter(nearly[3], torch.tensor(1.0, dtype=dtype))  # one of them an ulp above the others
    assert not flat_groups(nearly, 8).any() and 0 < group_advantages(nearly, 8).abs().max() < 1e-3


@pytest.mark.parametrize("scale, baseline", KINDS)
def test_a_response_without_a_score_counts_nowhere(scale, baseline):
    """Its group has the advantages of a smaller one, and it has none."""
    scores = torch.tensor([[0.5, -1.0, 2.0], [3.0, 0.1, 0.7]], dtype=torch.float64)
    gap = torch.full((2, 1), math.nan, dtype=torch.float64)
    got = group_advantages(torch.cat([scores[:, :1], gap, scores[:, 1:]], 1).flatten(), 4, scale, baseline).view(2, 4)
    want = group_advantages(scores.flatten(), 3, scale, baseline).view(2, 3)
    assert (got[:, 1] == 0).all() and torch.allclose(got[:, [0, 2, 3]], want, rtol=1e-12)
    assert flat_groups(torch.tensor([1.0, math.nan, 1.0]), 3).tolist() == [True]


# ---------------------------------------------------------------------------------------------------------------------
# expectations, by enumeration

OUTCOMES = [(1,), (0, 1), (0, 0, 1), (0, 0, 0)]  # token 1 is the EOS; at most three tokens
REWARDS = torch.tensor([0.3, 1.0, -0.5, 2.0], dtype=torch.float64)


def expected_gradient(size, scale, baseline, aggregation):
    """The mean of the on-policy gradient over every group of `size` responses, and the gradient of E[reward]."""
    theta = torch.tensor([0.3, -0.4, 0.9], dtype=torch.float64, requires_grad=True)  # for going on at each of three places
    go, stop, zero = torch.nn.functional.logsigmoid(theta), torch.nn.functional.logsigmoid(-theta), theta.new_zeros(())
    logprobs = torch.stack([torch.stack([stop[t] if token else go[t] for t, token in enumerate(outcome)]
                                        + [zero] * (3 - len(outcome))) for outcome in OUTCOMES])  # (4, 3)
    mask = torch.tensor([[t < len(outcome) for t in range(3)] for outcome in OUTCOMES])
    probability = logprobs.sum(1).exp()
    truth = torch.autograd.grad((probability * REWARDS).sum(), theta, retain_graph=True)[0]
    total = 0
    for group in itertools.product(range(4), repeat=size):
        rows = torch.tensor(group)
        gains = group_advantages(REWARDS[rows], size, scale, baseline)[:, None] * logprobs[rows]  # the ratio is 1
        gain = (gains * token_weights(mask[rows], aggregation, 3)).sum()
        total = total + probability[rows].prod().detach() * gain
    return torch.autograd.grad(total, theta)[0], truth


def test_rloo_and_dr_grpo_are_the_policy_gradient():
    """
    RLOO's expected gradient is that of E[reward] (over the constant longest response), whatever the group's size; with the
    group's own mean it is (G - 1) / G of it. GRPO's is neither: its 1 / |o| and its deviation bias it (Dr. GRPO, section 3.1).
    """
    for size in (2, 3):
        rloo, truth = expected_gradient(size, "none", "others", "seq-mean-token-sum-norm")
        assert (rloo * 3 - truth).abs().max() < 1e-15
        dr_grpo, _ = expected_gradient(size, "none", "mean", "seq-mean-token-sum-norm")
        assert (dr_grpo * 3 * size / (size - 1) - truth).abs().max() < 1e-15
        for scale, aggregation in (("none", "seq-mean-token-mean"), ("none", "token-mean"), ("std", "seq-mean-token-sum-norm")):
            other, _ = expected_gradient(size, scale, "others", aggregation)
            assert torch.nn.functional.cosine_similarity(other, truth, dim=0) < 0.9999, (size, scale, aggregation)


def test_which_kl_losses_have_the_kls_gradient():
    """
    On-policy: k2 as it is, k1 and k3 times the ratio. Off-policy, as from the second step of a batch on: only k1 and k3 times
    the ratio. k1 alone pushes nowhere, k3 alone towards another divergence; and k2 times the ratio is wrong even on-policy,
    which is why recipes/deepseek_v32.diff, which multiplies by it, refuses k2; and grpo.py refuses k1.
    """
    right = {("k2", False, True), ("k1", True, True), ("k3", True, True), ("k1", True, False), ("k3", True, False)}
    theta, moved, ref = torch.randn(3, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    theta.requires_grad_()
    logprobs, ref = theta.log_softmax(0), ref.log_softmax(0)
    truth = torch.autograd.grad((logprobs.exp() * (logprobs - ref)).sum(), theta, retain_graph=True)[0]
    for estimator, correction, on_policy in itertools.product(("k1", "k2", "k3"), (False, True), (False, True)):
        old = logprobs.detach() if on_policy else (theta.detach() + 0.4 * moved).log_softmax(0)
        losses = kl_estimate(logprobs, ref, estimator)
        losses = losses * (logprobs - old).exp() if correction else losses
        got = torch.autograd.grad((old.exp() * losses).sum(), theta, retain_graph=True)[0]
        error = ((got - truth).norm() / truth.norm()).item()
        assert (error < 1e-14) == ((estimator, correction, on_policy) in right), (estimator, correction, on_policy, error)


@pytest.mark.parametrize("aggregation, weights", [
    ("token-mean", [[1 / 4, 0, 0], [1 / 4, 1 / 4, 1 / 4], [0, 0, 0]]),
    ("seq-mean-token-mean", [[1 / 2, 0, 0], [1 / 6, 1 / 6, 1 / 6], [0, 0, 0]]),
    ("seq-mean-token-sum-norm", [[1 / 15, 0, 0], [1 / 15, 1 / 15, 1 / 15], [0, 0, 0]])])  # three responses of up to 5
def test_what_a_token_counts(aggregation, weights):
    mask = torch.tensor([[True, False, False], [True, True, True], [False, False, False]])
    got = token_weights(mask, aggregation, 5)
    assert (got - torch.tensor(weights, dtype=torch.float64)).abs().max() < 1e-15


def test_a_ratio_of_a_whole_response():
    """The ratios 2 and 8 have the mean sqrt(2 * 8) = 4; what stands behind a response stays 0, also where all is empty."""
    mask = torch.tensor([[True, True, False], [False, False, False]])
    log_ratio = torch.tensor([[math.log(2), math.log(8), 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    want = torch.tensor([[math.log(4), math.log(4), 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    assert (gspo_log_ratio(log_ratio, mask) - want).abs().max() < 1e-15

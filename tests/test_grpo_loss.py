"""
relatives.py in float64: against loops over plain numbers, and by enumeration of every outcome. (The
losses of whole steps, with every switch, are worked out in by_hand.py.)
"""
import itertools
import math
import random
import statistics

import pytest
import torch

from loss import kl_estimate
from relatives import dual_clipped_loss, flat_groups, group_advantages, gspo_log_ratio, token_weights

KINDS = list(itertools.product(("std", "batch", "none"), ("mean", "others")))


def advantages_by_loops(scores, size, scale, baseline):
    """GRPO (2402.03300, 4.1.2), Dr. GRPO (2503.20783, 3.2), RLOO (2402.14740, eq. 7); None is no score."""
    spread = statistics.stdev([x for x in scores if x is not None])
    advantages = []
    for start in range(0, len(scores), size):
        row = scores[start:start + size]
        group = [x for x in row if x is not None]
        for i, score in enumerate(row):
            if score is None or len(set(group)) < 2:
                advantages.append(0.0)
                continue
            others = group if baseline == "mean" else [x for j, x in enumerate(row) if j != i and x is not None]
            deviation = {"std": statistics.stdev(group) + 1e-4, "batch": spread + 1e-4, "none": 1.0}[scale]
            advantages.append((score - statistics.fmean(others)) / deviation)
    return advantages


@pytest.mark.parametrize("scale, baseline", KINDS)
def test_advantages_against_loops(scale, baseline):
    rng = random.Random(1)
    for size in (2, 3, 8, 64):
        scores = [rng.gauss(0, 1) * 10 ** rng.randint(-3, 3) for _ in range(5 * size)]
        scores[size:2 * size] = [scores[0]] * size
        scores[2 * size] = scores[4 * size] = None
        want = advantages_by_loops(scores, size, scale, baseline)
        numbers = torch.tensor([math.nan if x is None else x for x in scores], dtype=torch.float64)
        for dtype, tolerance in ((torch.float64, 1e-11), (torch.float32, 1e-3)):
            got = group_advantages(numbers.to(dtype), size, scale, baseline)
            assert got.dtype == dtype
            assert all(abs(x - y) < tolerance * max(1, abs(y)) for x, y in zip(got.tolist(), want, strict=True))
        flat = [len({x for x in scores[i:i + size] if x is not None}) < 2 for i in range(0, len(scores), size)]
        assert flat_groups(numbers, size).tolist() == flat and flat[1]


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


def test_the_examples_in_the_docstrings():
    """By hand: ratios 2 and 8 are 4 for both; A = -2 and ratio 50 lose 6, not 100; scores 1, 0, 0, 1; what tokens count."""
    mask = torch.tensor([[True, True, False]])
    log_ratio = torch.tensor([[2.0, 8.0, 1.0]], dtype=torch.float64).log()
    assert gspo_log_ratio(log_ratio, mask).exp().tolist() == [pytest.approx([4.0, 4.0, 1.0])]
    assert (gspo_log_ratio(log_ratio, ~mask & False) == 0).all()  # a response without tokens
    A = torch.tensor([[-2.0, 2.0, -2.0]])
    losses, clipped = dual_clipped_loss(torch.tensor([[100.0, 9.0, 5.8]]), torch.tensor([[False, True, False]]), A, 3.0)
    assert losses.tolist() == [pytest.approx([6.0, 9.0, 5.8])] and clipped.tolist() == [[True, True, False]]
    got = group_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0]), 4)
    assert got.tolist() == pytest.approx([0.866, -0.866, -0.866, 0.866], abs=5e-4)
    mask = torch.arange(3) < torch.tensor([[1], [3], [0]])  # the last response is masked
    for aggregation, short, long in (("token-mean", 1 / 4, 1 / 4), ("seq-mean-token-mean", 1 / 2, 1 / 6),
                                     ("seq-mean-token-sum-norm", 1 / 12, 1 / 12)):
        weights = token_weights(mask, aggregation, 4)
        assert weights.tolist() == [pytest.approx([short, 0, 0]), pytest.approx([long] * 3), [0.0] * 3]
        assert (token_weights(mask & False, aggregation, 4) == 0).all()
    with pytest.raises(ValueError):
        token_weights(mask, "mean", 10)


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
    which is why grpo.py refuses it.
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

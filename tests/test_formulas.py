"""formulas.py, groups.py and metrics.py: each formula by enumeration or on paper."""
import math
import warnings

import pytest
import torch

from groups import LOSSES, flat_groups, group_advantages, token_weights
from formulas import (importance_weights, kl_estimate, learning_rate_at, masked_mean, masked_sum,
                      masked_whiten)
from metrics import explained_variance, gap, gap_limit, summarize
from model import entropy_of

NAN, INF = float("nan"), float("inf")


def doubles(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def test_masked_reductions():
    x = doubles([1.0, 2.0, 3.0], [4.0, 5.0, 6.0])
    mask = torch.tensor([[True, False, True], [False, True, False]])
    white = [-2 / math.sqrt(8 / 3), 0, 2 / math.sqrt(8 / 3)]  # of 1, 3, 5: the mean is 3
    for garbage in (NAN, INF, 1e30):
        dirty = x.masked_fill(~mask, garbage).requires_grad_()
        assert masked_sum(dirty, mask).item() == 9
        mean = masked_mean(dirty, mask)
        mean.backward()
        assert mean.item() == 3 and torch.equal(dirty.grad, mask.double() / 3)
        got = masked_whiten(dirty.detach(), mask)
        assert got[mask].tolist() == pytest.approx(white, abs=1e-7) and not got[~mask].any()


def test_impossible_tokens_take_no_probability_and_make_no_nan():
    logits = doubles([0, 0, 0, 0], [7, 7, 7, -INF], [3, -INF, -INF, -INF]).requires_grad_()
    entropy = entropy_of(logits.log_softmax(-1))
    assert entropy.tolist() == pytest.approx([math.log(4), math.log(3), 0], abs=1e-12)
    entropy.sum().backward()
    assert logits.grad.isfinite().all()


def test_gaps_and_their_limits():
    """The largest difference, in 16 bits the mean. The limit of 2 forwards in float32 holds."""
    log_ratio, mask = torch.tensor([[0.5, -3.0, 9.0]]), torch.tensor([[True, True, False]])
    assert gap(log_ratio, mask, "float32") == 3 and gap(log_ratio, mask, "bfloat16") == 1.75
    assert gap(log_ratio[:0], mask[:0], "float32") == gap(log_ratio[:0], mask[:0], "float16") == 0
    drawn = torch.Generator().manual_seed(0)
    logits = 10 * torch.randn(50, 200, generator=drawn)
    other = logits * (1 + 2e-7 * torch.randn(50, 200, generator=drawn).sign())
    for T in (0.05, 1.0):  # cold logits differ by 1 / T times as much
        a, b, hot = ((x / t).log_softmax(-1)[:, 7] for x, t in (
            (logits, T), (other, T), (logits, 1.01 * T)))
        assert (a - b).abs().max() < gap_limit("float32", T) < (a - hot).abs().max()
    assert gap_limit("float64", 2.0) == 1e-10


def test_importance_weights():
    """p / q is 1.5, 0.8 and 0.25."""
    p, q = doubles(0.3, 0.4, 0.2).log().requires_grad_(), doubles(0.2, 0.5, 0.8).log()
    mb = dict(old_logprobs=p, sampler_logprobs=q)
    assert importance_weights(mb, 0) == 1
    assert importance_weights(mb, 1.3).tolist() == pytest.approx([1.3, 0.8, 0.25])
    assert not importance_weights(mb, 1.3).requires_grad


def test_what_the_kl_estimators_mean():
    """By enumeration of four tokens: expectations, and those of the gradients as a loss."""
    logits = doubles(0.3, -1.0, 2.0, 0.5).requires_grad_()
    logp, logq = logits.log_softmax(0), doubles(1.0, 0.2, -0.4, 0.1).log_softmax(0)
    kl, reverse = (logp.exp() * (logp - logq)).sum(), (logq.exp() * (logq - logp)).sum()
    for kind, unbiased, as_a_loss in (("k1", True, 0 * kl), ("k2", False, kl),
                                      ("k3", True, reverse)):
        mean = (logp.detach().exp() * kl_estimate(logp, logq, kind)).sum()  # of what is sampled
        assert (abs(mean - kl) < 1e-12) == unbiased, kind
        found, wanted = (torch.autograd.grad(x, logits, retain_graph=True)[0]
                         for x in (mean, as_a_loss))
        assert (found - wanted).abs().max() < 1e-12, kind
    assert kl_estimate(doubles(0.5).log(), doubles(0.25).log(), "k2").item() == pytest.approx(
        math.log(2) ** 2 / 2)


def test_the_figures_of_a_batch():
    mask = torch.tensor([[True, True], [True, False]])
    batch = dict(response_mask=mask, scores=doubles(2, NAN), finished=torch.tensor([True, False]),
                 accuracy=doubles(1, 0), thinks=doubles(0, 0),
                 old_logprobs=doubles([-1, -2], [-3, 0]), ref_logprobs=doubles([-2, -2], [-2, 0]),
                 sampler_logprobs=doubles([-1, -1], [-3, 0]),
                 **{"reward/a": doubles(1, NAN), "reward/b": doubles(1, 3)})
    figures = summarize(batch, "x", ["a", "b"], importance_cap=0.9)
    weights = [0.9, math.exp(-1), 0.9]
    assert figures == pytest.approx({
        "x/scores": 2, "x/scored": 0.5, "x/entropy": 3, "x/kl": 0, "x/length": 1.5,
        "x/finished": 0.5, "x/accuracy": 0.5, "x/thinks": 0, "x/reward/a": 1, "x/reward/b": 2,
        "policy/importance": sum(weights) / 3, "policy/importance_capped": 2 / 3,
        "policy/effective_tokens": sum(weights) ** 2 / sum(w * w for w in weights) / 3})


def test_group_advantages():
    """Right, wrong, wrong, right: mean 0.5, deviation 0.577. A score of NaN is none."""
    groups = doubles(1, 0, 0, 1, 4, NAN, -2, NAN, 3, NAN, NAN, NAN)
    unit = 0.5 / (math.sqrt(1 / 3) + 1e-4)
    other = 3 / (math.sqrt(18) + 1e-4)
    assert group_advantages(groups, 4).tolist() == pytest.approx(
        [unit, -unit, -unit, unit, other, 0, -other, 0, 0, 0, 0, 0])
    assert group_advantages(groups, 4, "none", "others").tolist() == pytest.approx(
        [2 / 3, -2 / 3, -2 / 3, 2 / 3, 6, 0, -6, 0, 0, 0, 0, 0])
    assert flat_groups(groups, 4).tolist() == [False, False, True]


def test_equal_scores_teach_exactly_nothing():
    """Their mean may differ from them by rounding; divided by 1e-4 that would be large."""
    assert not group_advantages(torch.full((21,), 0.1), 7).any()


@pytest.mark.parametrize("aggregation, want", [
    ("token-mean", [[1 / 4, 0, 0], [1 / 4, 1 / 4, 1 / 4], [0, 0, 0]]),
    ("seq-mean-token-mean", [[1 / 2, 0, 0], [1 / 6, 1 / 6, 1 / 6], [0, 0, 0]]),
    ("seq-mean-token-sum-norm", [[1 / 12, 0, 0], [1 / 12, 1 / 12, 1 / 12], [0, 0, 0]])])
def test_weights_of_tokens(aggregation, want):
    """One token, three tokens, none; at most 4 are allowed."""
    mask = torch.tensor([[1, 0, 0], [1, 1, 1], [0, 0, 0]]).bool()
    assert torch.allclose(token_weights(mask, aggregation, 4), doubles(*want))


def test_nothing_to_whiten_by_is_0_and_not_nan():
    x, all_of_it = torch.full((2, 3), 2.5), torch.ones(2, 3).bool()
    assert not masked_whiten(x, all_of_it).any() and not masked_whiten(x, ~all_of_it).any()


@pytest.mark.parametrize("kind, want, clipped, slopes", [
    # a row of two tokens of ratios 2 and 8, then padding; advantage 1; the range is 0.5 to 5
    ("clip", [[-2, -5, 0]], [[False, True, False]], [[-2, 0, 0]]),
    ("gspo", [[-4, -4, 0]], [[False, False, False]], [[-4, -4, 0]]),  # sqrt(2 * 8), of the row
    ("cispo", [[2, 10, 0]], [[False, True, False]], [[-2, -5, 0]])])  # ratio * -log p of -1, -2
def test_losses_of_a_policy(kind, want, clipped, slopes):
    mask = torch.tensor([[True, True, False]])
    logprobs = torch.tensor([[-1.0, -2.0, 900.0]], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([[-1 - math.log(2), -2 - math.log(8), 0.0]], dtype=torch.float64)
    losses, found = LOSSES[kind](logprobs, old, torch.ones(1, 3), mask, 0.5, 4.0)
    masked_sum(losses, mask).backward()
    assert torch.allclose(torch.where(mask, losses, 0), torch.tensor(want).double())
    assert (found & mask).tolist() == clipped
    assert torch.allclose(logprobs.grad, torch.tensor(slopes).double())


@pytest.mark.parametrize("decay, middle", [("constant", 8), ("linear", 4), ("cosine", 4)])
def test_a_learning_rate_rises_and_falls_and_is_0_before_iteration_0(decay, middle):
    """A fork may begin a model's schedule later: learning_rate_at(iteration - begins, ...)."""
    rates = [learning_rate_at(i, 8.0, 4, 20, decay) for i in (-100, -1, 0, 1, 2, 3, 4, 12)]
    assert rates == pytest.approx([0, 0, 2, 4, 6, 8, 8, middle])
    assert [learning_rate_at(i, 8.0, 0, 20, decay) for i in (-100, -1, 0)] == [0, 0, 8]


def test_a_batch_of_one():
    """One token, or one response with a score: nothing to compare it with, and no warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one, none = torch.tensor([[True, False]]), torch.tensor([[False, False]])
        for mask in one, none:
            assert explained_variance(torch.tensor([[1., 2.]]), torch.tensor([[3., 5.]]), mask) == 0
        for scores in ([math.nan, 2.0], [math.nan, math.nan]):
            for scale_by in "std", "batch", "none":
                assert group_advantages(torch.tensor(scores), 2, scale_by).tolist() == [0, 0]

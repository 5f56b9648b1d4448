"""loss.py and groups.py: each formula by enumeration or on paper, and numbers where it is hard."""
import math

import pytest
import torch

from groups import flat_groups, group_advantages, gspo_log_ratio, token_weights
from loss import (explained_variance, gap, gap_limit, importance_weights, kl_estimate,
                  learning_rate_at, masked_mean, masked_sum, masked_whiten, summarize)
from model import entropy_of, scaled_logits

NAN, INF = float("nan"), float("inf")


def doubles(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


# --------------------------------------------------------------------------------------------------
# masks


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


def test_nothing_to_whiten_by_is_0_and_not_nan():
    x, all_of_it = torch.full((2, 3), 2.5), torch.ones(2, 3).bool()
    assert not masked_whiten(x, all_of_it).any() and not masked_whiten(x, ~all_of_it).any()
    assert masked_mean(x, ~all_of_it).item() == 0


# --------------------------------------------------------------------------------------------------
# log-probs


def test_half_precision_logits_give_float32():
    """0.07 nats would be lost by a softmax in bfloat16."""
    logits = (5 * torch.randn(7, 50, generator=torch.Generator().manual_seed(0))).bfloat16()
    want = logits.double() - logits.double().exp().sum(-1, keepdim=True).log()
    got = scaled_logits(logits).log_softmax(-1)
    assert got.dtype == torch.float32 and (got - want).abs().max() < 4e-6
    assert (entropy_of(got) + (want.exp() * want).sum(-1)).abs().max() < 4e-6


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


# --------------------------------------------------------------------------------------------------
# KL


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


def test_k3_of_a_tiny_difference_is_no_rounding_noise():
    x = torch.logspace(-3, -1, 100)
    want = x.double()**2 / 2 - x.double()**3 / 6 + x.double()**4 / 24
    got = kl_estimate(x, torch.zeros_like(x), "k3")
    assert (got >= 0).all() and ((got - want).abs() / want).max() < 2e-4


# --------------------------------------------------------------------------------------------------
# figures


def test_learning_rates():
    rates = [learning_rate_at(i, 8.0, 2, 6, "linear") for i in range(6)]
    assert rates == [4, 8, 8, 6, 4, 2]
    assert [learning_rate_at(i, 8.0, 0, 4, "constant") for i in range(4)] == [8] * 4
    cosine = [learning_rate_at(i, 8.0, 0, 4, "cosine") for i in range(4)]
    assert cosine == pytest.approx([8, 4 + 4 / math.sqrt(2), 4, 4 - 4 / math.sqrt(2)])


def test_explained_variance():
    returns, mask = doubles([1, 2, 3, 9]), torch.tensor([[True, True, True, False]])
    for values, share in (([1, 2, 3, 0], 1), ([2, 2, 2, 0], 0), ([3, 2, 1, 0], -3)):
        assert explained_variance(doubles(values), returns, mask).item() == pytest.approx(share)


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


# --------------------------------------------------------------------------------------------------
# groups.py


def advantages_by_hand(scores, size, scale_by, baseline):
    """Loops over groups and members."""
    every = [x for x in scores if not math.isnan(x)]
    found = []
    for group in zip(*[iter(scores)] * size, strict=True):
        known = [x for x in group if not math.isnan(x)]
        for i, x in enumerate(group):
            if math.isnan(x) or len(set(known)) < 2:
                found.append(0.0)
                continue
            rest = list(known)
            if baseline == "others":
                rest.remove(x)
            unit = {"none": [0, 1], "std": known, "batch": every}[scale_by]
            middle = sum(unit) / len(unit)
            deviation = math.sqrt(sum((y - middle) ** 2 for y in unit) / (len(unit) - 1)) + 1e-4
            found.append((x - sum(rest) / len(rest)) / (1 if scale_by == "none" else deviation))
    return found


@pytest.mark.parametrize("baseline", ["mean", "others"])
@pytest.mark.parametrize("scale_by", ["std", "batch", "none"])
def test_group_advantages(scale_by, baseline):
    scores = [1, 0, 0, 1, 0.3, 0.3, 0.3, 0.3, 5, NAN, -2, 4, NAN, NAN, 7, NAN]
    got = group_advantages(doubles(*scores), 4, scale_by, baseline).tolist()
    assert got == pytest.approx(advantages_by_hand(scores, 4, scale_by, baseline), abs=1e-12)
    assert flat_groups(doubles(*scores), 4).tolist() == [False, True, False, True]


def test_equal_scores_teach_exactly_nothing():
    """Their mean may differ from them by rounding; divided by 1e-4 that would be large."""
    assert not group_advantages(torch.full((21,), 0.1), 7).any()


def test_one_ratio_for_a_response():
    """Two tokens with the ratios 2 and 8 both get 4."""
    log_ratio = doubles([2, 8, 1], [3, 1, 1]).log()
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]]).bool()
    assert gspo_log_ratio(log_ratio, mask).exp().tolist() == [pytest.approx([4, 4, 1]),
                                                               pytest.approx([3, 1, 1])]


@pytest.mark.parametrize("aggregation, want", [
    ("token-mean", [[1 / 4, 0, 0], [1 / 4, 1 / 4, 1 / 4], [0, 0, 0]]),
    ("seq-mean-token-mean", [[1 / 2, 0, 0], [1 / 6, 1 / 6, 1 / 6], [0, 0, 0]]),
    ("seq-mean-token-sum-norm", [[1 / 12, 0, 0], [1 / 12, 1 / 12, 1 / 12], [0, 0, 0]])])
def test_weights_of_tokens(aggregation, want):
    """One token, three tokens, none; at most 4 are allowed."""
    mask = torch.tensor([[1, 0, 0], [1, 1, 1], [0, 0, 0]]).bool()
    assert torch.allclose(token_weights(mask, aggregation, 4), doubles(*want))

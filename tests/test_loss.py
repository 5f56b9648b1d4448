"""
loss.py where whole runs in float64 (by_hand.py) see little: 16 and 32 bits, garbage under masks, extreme numbers. (What the
KL's estimators mean, test_grpo_loss.py enumerates.)
"""
import numpy as np
import pytest
import torch

from examples import calibration_error
from examples import preference_loss
from loss import (gap, gap_limit, importance_weights, kl_estimate, masked_mean, masked_sum,
                  masked_whiten)
from model import entropy_of, scaled_logits
from report import figures_of_weights

GARBAGE = [float("nan"), float("inf"), -float("inf"), 1e30]


def log_softmax(logits):
    """NumPy's, in float64."""
    x = np.asarray(logits, dtype=np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def logprobs_of(logits, tokens):
    """Log-probs (...) of tokens (...), of logits (..., V) in at least float32."""
    return scaled_logits(logits).log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_give_float32(dtype):
    logits, tokens = (5 * randn(3, 7, 50)).to(dtype), torch.arange(21).view(3, 7)
    exact = log_softmax(logits.double().numpy())
    got = logprobs_of(logits, tokens)
    assert got.dtype == torch.float32
    assert np.abs(got.numpy() - np.take_along_axis(exact, tokens.numpy()[..., None], -1)[..., 0]).max() < 4e-6
    assert np.abs(logits.log_softmax(-1).double().numpy() - exact).max() > 1e-3  # what half precision would have given
    entropy = entropy_of(scaled_logits(logits).log_softmax(-1))
    assert entropy.dtype == torch.float32 and np.abs(entropy.numpy() + (np.exp(exact) * exact).sum(-1)).max() < 4e-6


def test_extreme_and_impossible_logits():
    """No overflow, and no NaN, in values and in gradients; the padding of a vocabulary takes no probability."""
    logits = torch.tensor([[[1e4, 0.0, 1e4]]], dtype=torch.float64, requires_grad=True)
    logprob = logprobs_of(logits, torch.tensor([[2]]))
    assert logprob.item() == pytest.approx(-np.log(2), abs=1e-12)
    logprob.sum().backward()
    assert torch.allclose(logits.grad, torch.tensor([[[-0.5, 0.0, 0.5]]], dtype=torch.float64), atol=1e-12)
    inf = float("inf")
    logits = torch.tensor([[0.0, 0, 0, 0], [7, 7, 7, -inf], [3, -inf, -inf, -inf], [0, np.log(3), -inf, -inf]],
                          dtype=torch.float64, requires_grad=True)
    entropy = entropy_of(scaled_logits(logits).log_softmax(-1))
    assert np.abs(entropy.detach().numpy() - [np.log(4), np.log(3), 0.0, np.log(4) - 0.75 * np.log(3)]).max() < 1e-14
    entropy.sum().backward()
    assert logits.grad.isfinite().all() and (logits.grad[:, 2:][logits.detach()[:, 2:] == -inf] == 0).all()
    logits = randn(2, 3, 8)
    scaled = scaled_logits(logits, 0.5, 5)
    assert torch.equal(scaled[..., :5], 2 * logits[..., :5]) and (scaled[..., 5:] == -inf).all()


def test_masked_reductions():
    x = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], dtype=torch.float64)
    mask = torch.tensor([[True, False, True], [False, True, False]])
    white = masked_whiten(x, mask)
    assert white[mask].tolist() == pytest.approx([-2 / 1.632993, 0, 2 / 1.632993], abs=1e-5) and (white[~mask] == 0).all()
    assert masked_mean(x, torch.zeros_like(mask)).item() == 0.0
    for garbage in GARBAGE:
        dirty = x.masked_fill(~mask, garbage).requires_grad_()
        assert masked_sum(dirty, mask).item() == 9.0
        mean = masked_mean(dirty, mask)
        assert mean.item() == 3.0
        mean.backward()
        assert torch.equal(dirty.grad, mask.double() / 3)
        assert torch.equal(masked_whiten(dirty.detach(), mask), white)
    # nothing to scale: zeros, not NaN
    assert (masked_whiten(x, torch.zeros_like(mask)) == 0).all()
    assert (masked_whiten(torch.full_like(x, 2.5), mask) == 0).all()


def test_k3_of_a_tiny_difference():
    """In float32 exp(-x) - 1 + x would be rounding noise for small x; x^2 / 2 is wanted, and never less than 0."""
    x = torch.logspace(-3, -1, 200)
    want = x.double() ** 2 / 2 - x.double() ** 3 / 6 + x.double() ** 4 / 24
    got = kl_estimate(x, torch.zeros_like(x), "k3")
    assert ((got.double() - want).abs() / want).max() < 2e-4
    assert (got >= 0).all()


def test_preferences_of_extreme_differences():
    chosen = torch.tensor([2.5, 2.5 + np.log(3), 1000.0, -1000.0], dtype=torch.float64, requires_grad=True)
    loss = preference_loss(chosen, torch.tensor([2.5, 2.5, 0.0, 0.0], dtype=torch.float64))
    assert loss.tolist() == pytest.approx([np.log(2), np.log(4 / 3), 0.0, 1000.0], abs=1e-12)
    loss.sum().backward()
    assert chosen.grad.tolist() == pytest.approx([-0.5, -0.25, 0.0, -1.0], abs=1e-12)


@pytest.mark.parametrize("T", [0.02, 0.5])
def test_cold_logits_round_no_further_than_the_limit(T):
    """
    Two sound float32 forwards differ in the last bits of their logits; at a low temperature their log-probs differ by 1 / T
    times as much. The limit must allow that, and not let a temperature of 1.01 instead of 1 through, nor anything when hot.
    """
    assert gap_limit("float32", 1.0) == gap_limit("float32", 2.0) == 1e-4 and gap_limit("float64", 1.0) == 1e-10
    assert gap_limit("bfloat16", 0.5) == 2 * gap_limit("float16", 1.0) == 0.04
    generator = torch.Generator().manual_seed(0)
    logits = 10 * torch.randn(50, 200, generator=generator)
    other = (logits.double() * (1 + 4e-7 * torch.randn(50, 200, generator=generator, dtype=torch.float64))).float()
    tokens = torch.randint(0, 200, (50,), generator=generator)
    a, b, hot = (logprobs_of(x / t, tokens) for x, t in ((logits, T), (other, T), (logits, 1.01 * T)))
    assert (a - b).abs().max() < gap_limit("float32", T) < (a - hot).abs().max()


def test_a_gap_is_the_largest_one_and_in_16_bits_the_mean():
    log_ratio, mask = torch.tensor([[0.5, -3.0, 9.0]]), torch.tensor([[True, True, False]])
    assert gap(log_ratio, mask, "float32") == 3 and gap(log_ratio, mask, "bfloat16") == 1.75
    nobody = torch.zeros(0, 3)
    assert gap(nobody, nobody.bool(), "float32") == gap(nobody, nobody.bool(), "float16") == 0


def test_weights_of_tokens():
    """p / q is 1.5, 0.8 and 0.25."""
    q, p = (torch.tensor([x], dtype=torch.float64).log() for x in ([0.2, 0.5, 0.8], [0.3, 0.4, 0.2]))
    mb = dict(old_logprobs=p.requires_grad_(), sampler_logprobs=q)
    for cap, want in ((1.3, [1.3, 0.8, 0.25]), (2.0, [1.5, 0.8, 0.25])):
        weights = importance_weights(mb, cap)
        assert not weights.requires_grad and weights.flatten().tolist() == pytest.approx(want, rel=1e-12)
    assert importance_weights(mb, 0) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_figures_of_weights(dtype):
    """(1.1 + 1.1 + 0.8 + 0)^2 / (1.1^2 + 1.1^2 + 0.8^2) = 2.941 of 4 tokens; 1.1 has other bits in float32."""
    figures = figures_of_weights(torch.tensor([9.0, 1.2, 0.8, 0.0], dtype=dtype).clamp(max=1.1), 1.1)
    assert figures == pytest.approx({"policy/importance": 0.75, "policy/importance_capped": 0.5,
                                     "policy/effective_tokens": 9 / 3.06 / 4}, rel=1e-6)


@pytest.mark.parametrize("probabilities, error", [
    ([0.9, 0.9, 0.1], 0.7 / 3),  # three guesses, 90 % sure, two of them right: a right and a wrong one cancel out
    ([0.9, 0.2], 0.45),  # in two bins: 0.1 too modest, 0.8 too sure
    ([0.5, 1.0], 0.0)])  # half of a guess is right, and is half sure
def test_calibration_error(probabilities, error):
    assert calibration_error(torch.tensor(probabilities, dtype=torch.float64)) == pytest.approx(error, abs=1e-12)

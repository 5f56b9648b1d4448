"""gae.py against a loop over the tokens in float64: masks of every shape, lengths around the block size, garbage."""
import pytest
import torch

from gae import compute_gae

COEFFICIENTS = [0.0, 0.5, 0.95, 1.0]


def reference(rewards, values, mask, gamma, lam):
    """Equation 16 of the paper, a token at a time in Python floats, over the True positions of each row."""
    advantages = torch.zeros(rewards.shape, dtype=torch.float64)
    returns = torch.zeros(rewards.shape, dtype=torch.float64)
    for row in range(len(rewards)):
        r, v = rewards[row].tolist(), values[row].tolist()
        a, next_value = 0.0, 0.0
        for t in reversed(mask[row].nonzero().flatten().tolist()):
            a = r[t] + gamma * next_value - v[t] + gamma * lam * a
            advantages[row, t], returns[row, t] = a, a + v[t]
            next_value = v[t]
    return advantages, returns


def case(T, seed=0):
    """Random rewards and values (5, T) float64 with masks: full, a prefix, random, one gap in the middle, nothing."""
    generator = torch.Generator().manual_seed(1000 * seed + T)
    rewards, values = torch.randn(2, 5, T, generator=generator, dtype=torch.float64)
    mask = torch.ones(5, T, dtype=torch.bool)
    mask[1, (T + 1) // 2:] = False
    mask[2] = torch.rand(T, generator=generator) < 0.7
    mask[3, T // 3:T // 2] = False
    mask[4] = False
    return rewards, values, mask


def assert_close(got, want, tolerance):
    """Both advantages and returns, relative to their size."""
    for g, w in zip(got, want, strict=True):
        assert g.shape == w.shape
        assert (g.double() - w).abs().max() <= tolerance * max(1.0, w.abs().max().item())


@pytest.mark.parametrize("T", [1, 2, 63, 64, 65, 129, 4097])
def test_equals_the_loop(T):
    """And nothing under the mask can be seen in a bit of it; nor does it pass a gradient on."""
    rewards, values, mask = case(T)
    some = COEFFICIENTS if T < 1000 else [0.95, 1.0]
    for gamma in some:
        for lam in some:
            want = reference(rewards, values, mask, gamma, lam)
            clean = compute_gae(rewards, values.requires_grad_(), mask, gamma, lam)
            assert_close(clean, want, 1e-12)
            assert not any(x.requires_grad or x[~mask].any() for x in clean)
    for garbage in (float("nan"), -float("inf"), 1e300):
        dirty = compute_gae(rewards.masked_fill(~mask, garbage), values.detach().masked_fill(~mask, garbage), mask, gamma, lam)
        assert all(torch.equal(x, y) for x, y in zip(clean, dirty, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_half_precision_is_computed_in_float32(dtype):
    rewards, values, mask = case(700)
    rewards, values = rewards.to(dtype), values.to(dtype)
    got = compute_gae(rewards, values, mask, 1.0, 0.95)
    assert got[0].dtype == got[1].dtype == torch.float32
    assert_close(got, reference(rewards, values, mask, 1.0, 0.95), 2e-6)
    long = case(4097)
    assert_close(compute_gae(*(x.float() if x.is_floating_point() else x for x in long), 1.0, 1.0),
                 reference(*long, 1.0, 1.0), 1e-5)

"""gae.py against the loop of its own paper, a token at a time in Python's floats."""
import pytest
import torch

from gae import compute_gae


def by_loop(rewards, values, mask, gamma, lam):
    """Equation 16, over the True positions of each row."""
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


def case(T):
    """Rewards, values (5, T), and masks: full, a prefix, random, one gap, nothing."""
    drawn = torch.Generator().manual_seed(T)
    rewards, values = torch.randn(2, 5, T, generator=drawn, dtype=torch.float64)
    mask = torch.ones(5, T, dtype=torch.bool)
    mask[1, (T + 1) // 2:] = False
    mask[2] = torch.rand(T, generator=drawn) < 0.7
    mask[3, T // 3:T // 2] = False
    mask[4] = False
    return rewards, values, mask


def test_the_example_of_the_header():
    rewards = torch.tensor([[-0.125, 0, 1]])
    values = torch.tensor([[0.5, 0.5, 0.75]])
    advantages, returns = compute_gae(rewards, values, torch.ones(1, 3).bool(), 1.0, 0.5)
    assert advantages.tolist() == [[0.0625, 0.375, 0.25]]
    assert returns.tolist() == [[0.5625, 0.875, 1]]


@pytest.mark.parametrize("T", [1, 2, 63, 64, 65, 129, 4097])
@pytest.mark.parametrize("gamma, lam", [(1.0, 0.95), (0.95, 1.0), (0.5, 0.5), (1.0, 0.0), (0, 1)])
def test_equals_the_loop(T, gamma, lam):
    rewards, values, mask = case(T)
    for dtype, tolerance in (torch.float64, 1e-12), (torch.float32, 2e-6):
        given = rewards.to(dtype), values.to(dtype).requires_grad_()
        got = compute_gae(*given, mask, gamma, lam)
        for g, w in zip(got, by_loop(*given, mask, gamma, lam), strict=True):
            assert g.dtype == dtype and (g - w).abs().max() <= tolerance * max(1, w.abs().max())
        assert not any(x.requires_grad or x[~mask].any() for x in got)


@pytest.mark.parametrize("garbage", [float("nan"), -float("inf"), 1e300])
def test_what_is_masked_changes_no_bit(garbage):
    rewards, values, mask = case(129)
    clean = compute_gae(rewards, values, mask, 1.0, 0.95)
    dirty = compute_gae(rewards.masked_fill(~mask, garbage), values.masked_fill(~mask, garbage),
                        mask, 1.0, 0.95)
    assert all(torch.equal(x, y) for x, y in zip(clean, dirty, strict=True))

"""gae.py against a loop over the tokens in float64: masks of every shape, lengths around the block size, garbage."""
import re
import textwrap

import pytest
import torch

import gae
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


def test_the_header_says_what_the_code_does():
    """The loop in gae.py's header, run as it is printed there, and the numbers of its worked example."""
    loop = textwrap.dedent(re.search(r"^    advantage, next_value.*?\n\n", gae.__doc__, re.DOTALL | re.MULTILINE)[0])
    table = {name: [float(x) for x in numbers.split()] for name, numbers in
             re.findall(r"^    (rewards|values|delta|advantages|returns) ((?: +-?[0-9.]+){3})", gae.__doc__, re.MULTILINE)}
    assert list(table) == ["rewards", "values", "delta", "advantages", "returns"]
    gamma, lam, c = map(float, re.search(r"gamma = ([0-9.]+), lam = ([0-9.]+), so c = ([0-9.]+)", gae.__doc__).groups())
    names = dict(rewards=table["rewards"], values=table["values"], gamma=gamma, lam=lam, T=3,
                 advantages=[0.0] * 3, returns=[0.0] * 3)
    exec(loop, names)
    assert c == gamma * lam and names["advantages"] == table["advantages"] and names["returns"] == table["returns"]
    rewards, values = (torch.tensor([table[name]]) for name in ("rewards", "values"))
    advantages, returns = compute_gae(rewards, values, torch.ones(1, 3, dtype=torch.bool), gamma, lam)
    assert advantages.tolist() == [table["advantages"]] and returns.tolist() == [table["returns"]]


def test_masks_by_hand():
    """A gap is skipped without a discount, the last True position is terminal, and False positions are 0."""
    rewards = torch.tensor([[1.0, 100.0, 4.0, 100.0]] * 3, dtype=torch.float64)
    values = torch.tensor([[2.0, 100.0, 6.0, 100.0]] * 3, dtype=torch.float64)
    mask = torch.tensor([[True, False, True, False], [True, False, False, False], [False] * 4])
    advantages, returns = compute_gae(rewards, values, mask, 0.5, 0.5)
    # row 0: delta = [1 + 3 - 2, 4 - 6] = [2, -2]; row 1: delta = [1 - 2]
    assert advantages.tolist() == [[1.5, 0.0, -2.0, 0.0], [-1.0, 0.0, 0.0, 0.0], [0.0] * 4]
    assert returns.tolist() == [[3.5, 0.0, 4.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0.0] * 4]


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


def test_long_memory():
    """A reward at the end reaches the first of 4097 tokens, multiplied by c^4096, across all levels of blocks."""
    T = 4097
    rewards, values = torch.zeros(2, 1, T, dtype=torch.float64)
    rewards[0, -1] = 1.0
    advantages, _ = compute_gae(rewards, values, torch.ones(1, T, dtype=torch.bool), 0.9995, 1.0)
    want = 0.9995 ** torch.arange(T - 1, -1, -1, dtype=torch.float64)
    assert want[0] > 0.1
    assert (advantages[0] - want).abs().max() < 1e-12


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


def test_empty_batches():
    for shape in [(0, 5), (3, 0)]:
        empty = torch.zeros(shape)
        advantages, returns = compute_gae(empty, empty, empty.bool(), 1.0, 0.95)
        assert advantages.shape == returns.shape == shape

"""gae.py against a loop over the tokens in float64: masks of every shape, lengths around the block size, garbage, speed."""
import re
import statistics
import textwrap
import time

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
        out = [[0.0] * len(r), [0.0] * len(r)]
        for t in reversed(mask[row].nonzero().flatten().tolist()):
            a = r[t] + gamma * next_value - v[t] + gamma * lam * a
            out[0][t], out[1][t] = a, a + v[t]
            next_value = v[t]
        advantages[row], returns[row] = torch.tensor(out, dtype=torch.float64)
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


def test_by_hand():
    """gamma = 1/2, lam = 1/2: delta = r + V'/2 - V, A = delta + A'/4."""
    rewards = torch.tensor([[1.0, 2.0, 4.0]], dtype=torch.float64)
    values = torch.tensor([[2.0, 4.0, 6.0]], dtype=torch.float64)
    advantages, returns = compute_gae(rewards, values, torch.ones(1, 3, dtype=torch.bool), 0.5, 0.5)
    # delta = [1 + 2 - 2, 2 + 3 - 4, 4 + 0 - 6] = [1, 1, -2]
    assert advantages.tolist() == [[1.125, 0.5, -2.0]]
    assert returns.tolist() == [[3.125, 4.5, 4.0]]


def test_the_header_says_what_the_code_does():
    """The loop in gae.py's header, run as it is printed there, and the numbers of its worked example."""
    loop = textwrap.dedent(re.search(r"^    advantage, next_value.*?\n\n", gae.__doc__, re.DOTALL | re.MULTILINE)[0])
    assert loop.count("\n") == 7  # six lines and a blank one
    table = {name: [float(x) for x in numbers.split()] for name, numbers in
             re.findall(r"^    (rewards|values|delta|advantages|returns) ((?: +-?[0-9.]+){3})", gae.__doc__, re.MULTILINE)}
    assert list(table) == ["rewards", "values", "delta", "advantages", "returns"]
    gamma, lam, c = map(float, re.search(r"gamma = ([0-9.]+), lam = ([0-9.]+), so c = ([0-9.]+)", gae.__doc__).groups())
    names = dict(rewards=table["rewards"], values=table["values"], gamma=gamma, lam=lam, T=3,
                 advantages=[0.0] * 3, returns=[0.0] * 3)
    exec(loop, names)
    assert c == gamma * lam and names["advantages"] == table["advantages"] and names["returns"] == table["returns"]
    assert (torch.tensor(table["delta"]) @ gae.discount_matrix(3, c, torch.zeros(1))).tolist() == table["advantages"]
    rewards, values = (torch.tensor([table[name]]) for name in ("rewards", "values"))
    advantages, returns = compute_gae(rewards, values, torch.ones(1, 3, dtype=torch.bool), gamma, lam)
    assert advantages.tolist() == [table["advantages"]] and returns.tolist() == [table["returns"]]
    mask = torch.tensor([[True, False, True, False]])  # the example of closing gaps
    number = mask.long().cumsum(1) - 1
    assert number.tolist() == [[0, 0, 1, 1]] and number.masked_fill(~mask, 4).tolist() == [[0, 4, 1, 4]]


def test_masks_by_hand():
    """A gap is skipped without a discount, the last True position is terminal, and False positions are 0."""
    rewards = torch.tensor([[1.0, 100.0, 4.0, 100.0]] * 3, dtype=torch.float64)
    values = torch.tensor([[2.0, 100.0, 6.0, 100.0]] * 3, dtype=torch.float64)
    mask = torch.tensor([[True, False, True, False], [True, False, False, False], [False] * 4])
    advantages, returns = compute_gae(rewards, values, mask, 0.5, 0.5)
    # row 0: delta = [1 + 3 - 2, 4 - 6] = [2, -2]; row 1: delta = [1 - 2]
    assert advantages.tolist() == [[1.5, 0.0, -2.0, 0.0], [-1.0, 0.0, 0.0, 0.0], [0.0] * 4]
    assert returns.tolist() == [[3.5, 0.0, 4.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0.0] * 4]


@pytest.mark.parametrize("T", [1, 2, 3, 63, 64, 65, 127, 128, 129, 4095, 4096, 4097])
def test_equals_the_loop(T):
    rewards, values, mask = case(T)
    short = T < 1000
    for gamma in COEFFICIENTS if short else [0.95, 1.0]:
        for lam in COEFFICIENTS if short else [0.95, 1.0]:
            want = reference(rewards, values, mask, gamma, lam)
            assert_close(compute_gae(rewards, values, mask, gamma, lam), want, 1e-12)


def test_long_memory():
    """A reward at the end reaches the first of 4097 tokens, multiplied by c^4096, across all levels of blocks."""
    T = 4097
    rewards, values = torch.zeros(2, 1, T, dtype=torch.float64)
    rewards[0, -1] = 1.0
    advantages, _ = compute_gae(rewards, values, torch.ones(1, T, dtype=torch.bool), 0.9995, 1.0)
    want = 0.9995 ** torch.arange(T - 1, -1, -1, dtype=torch.float64)
    assert want[0] > 0.1
    assert (advantages[0] - want).abs().max() < 1e-12


@pytest.mark.parametrize("T", [5, 64, 300])
def test_closed_forms(T):
    """lam = 0: the one-step error. lam = 1: the discounted sum of what is still to come, minus V."""
    rewards, values, _ = case(T)
    mask = torch.ones(5, T, dtype=torch.bool)
    next_values = torch.cat([values[:, 1:], torch.zeros(5, 1, dtype=torch.float64)], 1)
    one_step = rewards + 0.9 * next_values - values
    assert_close(compute_gae(rewards, values, mask, 0.9, 0.0), (one_step, one_step + values), 1e-13)
    t = torch.arange(T, dtype=torch.float64)
    to_come = torch.stack([(rewards[:, i:] * 0.9 ** (t[i:] - i)).sum(1) for i in range(T)], 1)
    assert_close(compute_gae(rewards, values, mask, 0.9, 1.0), (to_come - values, to_come), 1e-13)


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -float("inf"), 1e6, 1e300])
def test_nothing_under_the_mask_matters(garbage):
    rewards, values, mask = case(200)
    for gamma, lam in [(1.0, 0.95), (0.95, 1.0), (1.0, 0.0)]:
        clean = compute_gae(rewards.masked_fill(~mask, 0), values.masked_fill(~mask, 0), mask, gamma, lam)
        dirty = compute_gae(rewards.masked_fill(~mask, garbage), values.masked_fill(~mask, garbage), mask, gamma, lam)
        for c, d in zip(clean, dirty, strict=True):
            assert c[mask].abs().min() > 0
            assert torch.equal(c, d)
            assert (d[~mask] == 0).all()


def test_padding_and_other_rows_do_not_matter():
    """A row alone, or with padding on its right beyond a block's end, or among other rows, has the same advantages."""
    rewards, values, mask = case(130)
    batch = compute_gae(rewards, values, mask, 0.99, 0.95)
    padding = torch.zeros(5, 70, dtype=torch.float64)
    wide = compute_gae(torch.cat([rewards, padding + 7], 1), torch.cat([values, padding - 7], 1),
                       torch.cat([mask, padding.bool()], 1), 0.99, 0.95)
    for b, w in zip(batch, wide, strict=True):
        assert (w[:, :130] - b).abs().max() < 1e-12
        assert (w[:, 130:] == 0).all()
    for row in range(5):
        one = slice(row, row + 1)
        assert_close(compute_gae(rewards[one], values[one], mask[one], 0.99, 0.95), [x[one] for x in batch], 1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_half_precision_is_computed_in_float32(dtype):
    rewards, values, mask = case(700)
    rewards, values = rewards.to(dtype), values.to(dtype)
    want = reference(rewards, values, mask, 1.0, 0.95)
    got = compute_gae(rewards, values, mask, 1.0, 0.95)
    assert got[0].dtype == got[1].dtype == torch.float32
    assert_close(got, want, 2e-6)
    long = case(4097)
    assert_close(compute_gae(*(x.float() if x.is_floating_point() else x for x in long), 1.0, 1.0),
                 reference(*long, 1.0, 1.0), 1e-5)


def test_inputs_stay_and_carry_no_gradient():
    """Advantages are constants of the losses, even if a caller forgets to detach the values."""
    rewards, values, mask = case(70)
    kept = rewards.clone(), values.clone(), mask.clone()
    advantages, returns = compute_gae(rewards, values.requires_grad_(), mask, 1.0, 0.95)
    assert not advantages.requires_grad and not returns.requires_grad
    for now, before in zip((rewards, values, mask), kept, strict=True):
        assert torch.equal(now, before)


def test_empty_batches():
    for shape in [(0, 5), (0, 100), (3, 0)]:
        empty = torch.zeros(shape)
        advantages, returns = compute_gae(empty, empty, empty.bool(), 1.0, 0.95)
        assert advantages.shape == returns.shape == shape


def loop_over_time(rewards, values, mask, gamma, lam):
    """The usual loop, for masks that are True throughout: one step of small operations a token."""
    steps, a, next_value = [], 0.0, 0.0
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        a = delta + gamma * lam * a
        next_value = values[:, t]
        steps.append(a)
    advantages = torch.stack(steps[::-1], 1)
    return advantages, advantages + values


def test_speed():
    """64 responses of 4096 tokens: at least 6 times faster than the loop over time, by the medians of alternating runs."""
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 64, 4096, generator=generator)
    mask = torch.ones(64, 4096, dtype=torch.bool)
    times = {loop_over_time: [], compute_gae: []}
    results = {}
    for _ in range(7):
        for f in (loop_over_time, compute_gae, compute_gae, compute_gae):
            start = time.perf_counter()
            results[f] = f(rewards, values, mask, 1.0, 0.95)
            times[f].append(time.perf_counter() - start)
    for slow, fast in zip(results[loop_over_time], results[compute_gae], strict=True):
        assert (slow - fast).abs().max() < 1e-4
    medians = {f.__name__: statistics.median(seconds) for f, seconds in times.items()}
    assert medians["loop_over_time"] > 6 * medians["compute_gae"], medians

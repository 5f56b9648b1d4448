"""loss.py in float64 against values worked out by hand, by NumPy or by enumerating every outcome of a small distribution."""
import itertools
import re

import numpy as np
import pytest
import torch

from loss import (adapt_kl_coef, centring_loss, gap_limit, in_rows, kl_estimate, learning_rate_at, masked_mean, masked_sum,
                  masked_whiten, preference_loss, soft_preference_loss, standard_deviation, update_moments)
from model import at_least_float32, entropy_of, scaled_logits
from relatives import clipped_loss

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


# log-probs and entropy


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_give_float32(dtype):
    logits = (5 * randn(3, 7, 50)).to(dtype)
    tokens = torch.arange(21).view(3, 7)
    exact = log_softmax(logits.double().numpy())
    want = np.take_along_axis(exact, tokens.numpy()[..., None], -1)[..., 0]
    got = logprobs_of(logits, tokens)
    assert got.dtype == torch.float32
    assert np.abs(got.numpy() - want).max() < 4e-6
    assert np.abs(logits.log_softmax(-1).double().numpy() - exact).max() > 1e-3  # what half precision would have given
    entropy = entropy_of(scaled_logits(logits).log_softmax(-1))
    assert entropy.dtype == torch.float32
    assert np.abs(entropy.numpy() + (np.exp(exact) * exact).sum(-1)).max() < 4e-6
    assert at_least_float32(logits).dtype == scaled_logits(logits).dtype == torch.float32
    assert at_least_float32(logits.double()).dtype == scaled_logits(logits.double(), 0.5).dtype == torch.float64


def test_logprobs_of_large_logits():
    """No overflow, and the gradient is one-hot minus softmax."""
    logits = torch.tensor([[[1e4, 0.0, 1e4]]], dtype=torch.float64, requires_grad=True)
    logprob = logprobs_of(logits, torch.tensor([[2]]))
    assert logprob.item() == pytest.approx(-np.log(2), abs=1e-12)
    logprob.sum().backward()
    assert torch.allclose(logits.grad, torch.tensor([[[-0.5, 0.0, 0.5]]], dtype=torch.float64), atol=1e-12)


def test_entropy():
    inf = float("inf")
    logits = torch.tensor([[0.0, 0, 0, 0], [7, 7, 7, -inf], [3, -inf, -inf, -inf], [0, np.log(3), -inf, -inf]],
                          dtype=torch.float64, requires_grad=True)
    entropy = entropy_of(scaled_logits(logits).log_softmax(-1))
    want = [np.log(4), np.log(3), 0.0, np.log(4) - 0.75 * np.log(3)]
    assert np.abs(entropy.detach().numpy() - want).max() < 1e-14
    entropy.sum().backward()
    assert logits.grad.isfinite().all()
    # dH / dlogit = -p (log p + H)
    p = np.array([0.25, 0.75])
    assert np.abs(logits.grad[3, :2].numpy() + p * (np.log(p) + want[3])).max() < 1e-14
    assert (logits.grad[:, 2:][logits.detach()[:, 2:] == -inf] == 0).all()
    x = randn(5, 6, 11)
    exact = log_softmax(x.numpy())
    assert np.abs(entropy_of(scaled_logits(x).log_softmax(-1)).numpy() + (np.exp(exact) * exact).sum(-1)).max() < 1e-14


def test_scaled_logits():
    logits = randn(2, 3, 8)
    kept = logits.clone()
    assert torch.equal(scaled_logits(logits), kept)
    assert torch.equal(scaled_logits(logits, 0.5), 2 * kept)
    for vocab_size in (None, 8, 9):
        assert torch.equal(scaled_logits(logits, 2.0, vocab_size), kept / 2)
    scaled = scaled_logits(logits, 0.5, 5)
    assert torch.equal(scaled[..., :5], 2 * kept[..., :5])
    assert (scaled[..., 5:] == -torch.inf).all()
    assert torch.equal(logits, kept)
    # the padding takes no probability from the rest
    tokens = torch.tensor([[0, 1, 2], [3, 4, 0]])
    want = np.take_along_axis(log_softmax(2 * kept[..., :5].numpy()), tokens.numpy()[..., None], -1)[..., 0]
    assert np.abs(logprobs_of(scaled, tokens).numpy() - want).max() < 1e-14


def test_in_rows():
    mask = torch.tensor([[True, True, False], [False, False, False], [True, False, False]])
    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    got = in_rows(x, mask)
    assert got.tolist() == [[1.0, 2.0, 0.0], [0.0] * 3, [3.0, 0.0, 0.0]]
    (got * torch.arange(9.0).view(3, 3)).sum().backward()
    assert x.grad.tolist() == [0.0, 1.0, 6.0]


# masked reductions


def test_masked_sum_and_mean():
    x = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], dtype=torch.float64)
    mask = torch.tensor([[True, False, True], [False, True, False]])
    assert masked_sum(x, mask).item() == 9.0
    assert masked_mean(x, mask).item() == 3.0
    assert masked_mean(x, torch.zeros_like(mask)).item() == 0.0
    for garbage in GARBAGE:
        dirty = x.masked_fill(~mask, garbage).requires_grad_()
        assert masked_sum(dirty, mask).item() == 9.0
        mean = masked_mean(dirty, mask)
        assert mean.item() == 3.0
        mean.backward()
        assert torch.equal(dirty.grad, mask.double() / 3)


def test_whitening():
    x = 3 + 5 * randn(6, 9)
    mask = torch.rand(6, 9, generator=torch.Generator().manual_seed(1)) < 0.6
    mask[2] = False
    white = masked_whiten(x, mask)
    chosen = x[mask].numpy()
    assert np.abs(white[mask].numpy() - (chosen - chosen.mean()) / chosen.std()).max() < 1e-8
    assert abs(white[mask].mean().item()) < 1e-14
    assert white[mask].var(correction=0).item() == pytest.approx(1, abs=1e-8)
    assert (white[~mask] == 0).all()
    for garbage in GARBAGE:
        assert torch.equal(masked_whiten(x.masked_fill(~mask, garbage), mask), white)
    # nothing to scale: zeros, not NaN
    assert (masked_whiten(x, torch.zeros_like(mask)) == 0).all()
    assert (masked_whiten(torch.full_like(x, 2.5), mask) == 0).all()
    one = torch.zeros_like(mask)
    one[3, 3] = True
    assert (masked_whiten(x, one) == 0).all()


def test_whitening_is_over_the_whole_batch():
    """Rows of +1 and of +9 whiten to -1 and +1 together; each for itself would be 0."""
    x = torch.tensor([[1.0, 1.0], [9.0, 9.0]], dtype=torch.float64)
    white = masked_whiten(x, torch.ones(2, 2, dtype=torch.bool))
    assert torch.allclose(white, torch.tensor([[-1.0, -1.0], [1.0, 1.0]], dtype=torch.float64), atol=1e-8)


# KL


def test_kl_estimators_by_enumeration():
    """
    Over every outcome of a categorical: k1 and k3 average to the KL, k2 does not. As losses, E[grad k1] = 0, E[grad k2] is
    the gradient of KL(policy || ref), E[grad k3] that of KL(ref || policy): all three exact, with their closed forms.
    """
    V = 6
    theta, ref_logits = randn(V), randn(V, seed=1)
    logp, logq = log_softmax(theta.numpy()), log_softmax(ref_logits.numpy())
    p, q = np.exp(logp), np.exp(logq)
    kl = (p * (logp - logq)).sum()
    values = dict(k1=kl, k2=(p * (logp - logq) ** 2).sum() / 2, k3=kl)
    gradients = dict(k1=np.zeros(V), k2=p * (logp - logq - kl), k3=p - q)
    assert abs(values["k2"] - kl) > 0.05 * kl
    assert np.abs(gradients["k3"] - gradients["k2"]).max() > 0.1 * np.abs(gradients["k2"]).max()
    for kind in ("k1", "k2", "k3"):
        leaf = theta.clone().requires_grad_()
        logprobs = leaf.log_softmax(-1)  # of every outcome
        estimates = kl_estimate(logprobs, torch.tensor(logq), kind)
        mean = (torch.tensor(p) * estimates).sum()  # the sampling is not differentiated, as in PPO
        mean.backward()
        assert mean.item() == pytest.approx(values[kind], abs=1e-14), kind
        assert np.abs(leaf.grad.numpy() - gradients[kind]).max() < 2e-15, kind


def test_kl_estimates_by_hand():
    logprobs = torch.log(torch.tensor([0.5, 0.25, 0.5], dtype=torch.float64))
    ref = torch.log(torch.tensor([0.25, 0.5, 0.5], dtype=torch.float64))
    ln2 = np.log(2)
    for kind, want in dict(k1=[ln2, -ln2, 0], k2=[ln2**2 / 2, ln2**2 / 2, 0], k3=[ln2 - 0.5, 1 - ln2, 0]).items():
        assert np.abs(kl_estimate(logprobs, ref, kind).numpy() - want).max() < 1e-15
        docstring = float(re.search(rf"{kind} = ([0-9.]+)", kl_estimate.__doc__)[1])  # p = 0.5, q = 0.25
        assert docstring == pytest.approx(want[0], abs=5e-4)
    with pytest.raises(ValueError, match="k4"):
        kl_estimate(logprobs, ref, "k4")


def test_k3_of_a_tiny_difference():
    """In float32 exp(-x) - 1 + x would be rounding noise for small x; x^2 / 2 is wanted, and never less than 0."""
    x = torch.logspace(-3, -1, 200)
    want = x.double() ** 2 / 2 - x.double() ** 3 / 6 + x.double() ** 4 / 24
    got = kl_estimate(x, torch.zeros_like(x), "k3")
    assert ((got.double() - want).abs() / want).max() < 2e-4
    assert (got >= 0).all()


# policy and value losses

POLICY_CASES = [  # advantage, ratio, loss, its gradient in the log-prob, clipped; cliprange 0.2
    (2.0, 1.0, -2.0, -2.0, False),
    (2.0, 1.1, -2.2, -2.2, False),
    (2.0, 1.5, -2.4, 0.0, True),
    (2.0, 0.9, -1.8, -1.8, False),
    (2.0, 0.5, -1.0, -1.0, False),  # worse than before: the way back is never clipped
    (-3.0, 1.0, 3.0, 3.0, False),
    (-3.0, 1.1, 3.3, 3.3, False),
    (-3.0, 1.5, 4.5, 4.5, False),
    (-3.0, 0.9, 2.7, 2.7, False),
    (-3.0, 0.5, 2.4, 0.0, True),
    (0.0, 1.5, 0.0, 0.0, False),
]


def test_clipped_loss_by_hand():
    advantages, ratio, loss, gradient, clipped = (torch.tensor([x], dtype=torch.float64) for x in zip(*POLICY_CASES, strict=True))
    old = randn(*ratio.shape)
    logprobs = (old + ratio.log()).requires_grad_()
    got, was_clipped = clipped_loss(logprobs, old, advantages, torch.ones_like(ratio, dtype=torch.bool), 0.2)
    assert (got - loss).abs().max() < 1e-14
    assert torch.equal(was_clipped, clipped.bool())
    got.sum().backward()
    assert (logprobs.grad - gradient).abs().max() < 1e-14

@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_under_the_mask(garbage):
    """Whichever argument holds it: zero loss, zero gradient and no clipping there, and nothing changes elsewhere."""
    mask = torch.tensor([[True, True, False], [True, False, False]])
    new, old, target = (randn(2, 3, seed=i) for i in range(3))

    results = []
    for dirty in [(), (0,), (1,), (2,), (0, 1, 2)]:
        leaves = [(x.masked_fill(~mask, garbage) if i in dirty else x.clone()).requires_grad_()
                  for i, x in enumerate((new, old, target))]
        loss, clipped = clipped_loss(*leaves, mask, 0.2)
        loss.sum().backward()
        gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]
        results.append([loss, clipped, *gradients])
    clean = results[0]
    assert clean[0][mask].abs().min() > 0
    for result in results:
        for x in result:
            assert (x[~mask] == 0).all()
        for x, y in zip(result, clean, strict=True):
            assert torch.equal(x, y)


def test_every_split_into_micro_batches_has_the_same_gradient():
    """
    Rows of 1 to 8 tokens, all 128 ways to cut them into micro-batches: divided by the tokens of the whole step the gradient
    is always the same. A mean of micro-batch means is not: the second half shows that this test could see it.
    """
    B, R, V, d = 8, 8, 5, 4
    features, old, advantages = randn(B, R, d), -1.6 + 0.2 * randn(B, R, seed=1), randn(B, R, seed=2)
    tokens = torch.randint(0, V, (B, R), generator=torch.Generator().manual_seed(3))
    lengths = torch.tensor([3, 8, 1, 5, 7, 2, 6, 4])
    mask = torch.arange(R) < lengths[:, None]
    weights = randn(d, V, seed=4)

    def gradient(parts, mean_of_means):
        leaf = weights.clone().requires_grad_()
        for rows in parts:
            logprobs = logprobs_of(features[rows] @ leaf, tokens[rows])
            losses, _ = clipped_loss(logprobs, old[rows], advantages[rows], mask[rows], 0.2)
            if mean_of_means:
                loss = masked_mean(losses, mask[rows]) / len(parts)
            else:
                loss = masked_sum(losses, mask[rows]) / mask.sum()
            loss.backward()
        return leaf.grad

    whole = gradient([slice(0, B)], False)
    assert whole.abs().max() > 0.01
    for cuts in itertools.product([False, True], repeat=B - 1):
        edges = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), B]
        parts = [slice(a, b) for a, b in itertools.pairwise(edges)]
        assert (gradient(parts, False) - whole).abs().max() < 1e-12
        if len({int(mask[rows].sum()) for rows in parts}) > 1:  # by accident, equal counts weigh tokens equally
            assert (gradient(parts, True) - whole).abs().max() > 1e-6
    assert (gradient([slice(i, i + 1) for i in range(B)], True) - whole).abs().max() > 0.1 * whole.abs().max()


# preferences and the KL controller


def test_preference_loss():
    difference = np.array([0.0, np.log(3), -np.log(3), 1000.0, -1000.0])
    chosen = (torch.tensor(difference) + 2.5).requires_grad_()
    rejected = torch.full((5,), 2.5, dtype=torch.float64, requires_grad=True)
    loss = preference_loss(chosen, rejected)
    want = [np.log(2), np.log(4 / 3), np.log(4), 0.0, 1000.0]
    assert loss.shape == (5,)
    assert np.abs(loss.detach().numpy() - want).max() < 1e-12
    loss.sum().backward()
    slope = np.array([-0.5, -0.25, -0.75, 0.0, -1.0])  # -sigmoid(rejected - chosen)
    assert np.abs(chosen.grad.numpy() - slope).max() < 1e-12
    assert np.abs(rejected.grad.numpy() + slope).max() < 1e-12


def test_margin_and_smoothing():
    """By hand: x = chosen - rejected - margin is log 3, so sigmoid(x) = 3/4 and sigmoid(-x) = 1/4."""
    log = np.log
    chosen = torch.tensor([5.0, 5.0], dtype=torch.float64).requires_grad_()
    rejected = torch.tensor([3.0, 4.0], dtype=torch.float64)
    margin = torch.tensor([2.0 - log(3), 1.0 - log(3)], dtype=torch.float64)
    for smoothing, want, slope in ((0.0, log(4 / 3), -1 / 4), (0.1, 0.9 * log(4 / 3) + 0.1 * log(4), 0.9 * -1 / 4 + 0.1 * 3 / 4),
                                   (0.25, 0.75 * log(4 / 3) + 0.25 * log(4), 0.0), (0.5, 0.5 * log(16 / 3), 0.25)):
        loss = preference_loss(chosen, rejected, margin, smoothing)
        assert np.abs(loss.detach().numpy() - want).max() < 1e-12
        chosen.grad = None
        loss.sum().backward()
        assert np.abs(chosen.grad.numpy() - slope).max() < 1e-12
    # a pair that is labelled the wrong way round with smoothing 0.2 is one with 0.8 the right way round
    a, b = torch.randn(2, 9, dtype=torch.float64)
    assert (preference_loss(a, b, 0.0, 0.2) - preference_loss(b, a, 0.0, 0.8)).abs().max() < 1e-12


def test_soft_preferences():
    """The mean loss of labels that are drawn with the probability; the entropy where the scores have that difference."""
    p = torch.tensor([0.0, 0.2, 0.5, 1.0], dtype=torch.float64)
    d = torch.tensor([1.5, -0.3, 2.0, -40.0], dtype=torch.float64, requires_grad=True)
    zero = torch.zeros(4, dtype=torch.float64)
    drawn = p * preference_loss(d, zero) + (1 - p) * preference_loss(zero, d)
    assert (soft_preference_loss(d, p) - drawn).abs().max() < 1e-12
    soft_preference_loss(d, p).sum().backward()
    assert (d.grad - (d.detach().sigmoid() - p)).abs().max() < 1e-12
    p = p[1:3]
    assert (soft_preference_loss(p.logit(), p) + p * p.log() + (1 - p) * (1 - p).log()).abs().max() < 1e-12


def test_centring():
    assert centring_loss(torch.tensor([[1.0, 2.0], [1.0, -1.0], [-3.0, 0.5]])).tolist() == [9.0, 0.0, 6.25]


@pytest.mark.parametrize("kl, want", [(6.0, 0.1), (12.0, 0.101024), (1e9, 0.101024), (6.6, 0.100512), (5.4, 0.099488),
                                      (0.0, 0.098976), (-3.0, 0.098976)])
def test_kl_controller(kl, want):
    """target 6, 512 of 10000 episodes: the coefficient moves by the relative error, at most 0.2, times 0.0512."""
    assert adapt_kl_coef(0.1, kl, 6.0, 512) == pytest.approx(want, abs=1e-15)


def test_moments_are_those_of_all_numbers_so_far():
    """By hand for two batches, then against numpy over many, also far from 0 where naive sums of squares lose all digits."""
    moments = update_moments([0, 0.0, 0.0], torch.tensor([1.0, 3.0]))
    assert moments == [2, 2.0, 2.0] and standard_deviation(moments) == 1.0
    moments = update_moments(moments, torch.tensor([5.0]))
    assert moments == [3, 3.0, 8.0] and standard_deviation(moments) == pytest.approx((8 / 3) ** 0.5)
    assert standard_deviation([0, 0.0, 0.0]) == standard_deviation(update_moments([0, 0.0, 0.0], torch.full((4,), 7.0))) == 1.0
    rng = np.random.default_rng(0)
    for shift in (0.0, 1e7):
        batches, moments = [rng.normal(shift, 0.3, size=n) for n in (1, 5, 2, 64, 7)], [0, 0.0, 0.0]
        for batch in batches:
            moments = update_moments(moments, torch.tensor(batch))
        everything = np.concatenate(batches)
        assert moments[0] == len(everything) and moments[1] == pytest.approx(everything.mean(), rel=1e-14)
        assert standard_deviation(moments) == pytest.approx(everything.std(), rel=1e-7)
        assert [type(x) for x in moments] == [int, float, float]  # which JSON keeps to the last bit


def test_learning_rate_at_by_hand():
    """Warm-up of 4 steps to 8, then 8 steps down: the first is above 0, the peak comes at the end of the warm-up."""
    assert [learning_rate_at(i, 8.0, 4, 12, "linear") for i in range(5)] == [2.0, 4.0, 6.0, 8.0, 8.0]
    assert [learning_rate_at(i, 8.0, 4, 12, "linear") for i in (6, 8, 11, 12)] == [6.0, 4.0, 1.0, 0.0]
    assert [learning_rate_at(i, 8.0, 0, 12, "constant") for i in (0, 7, 12)] == [8.0, 8.0, 8.0]
    assert [learning_rate_at(i, 8.0, 4, 12, "cosine") for i in (4, 8, 12)] == pytest.approx([8.0, 4.0, 0.0])
    assert learning_rate_at(6, 8.0, 4, 12, "cosine") == pytest.approx(4 + 2 * 2**0.5)  # a quarter of the way: cos 45 degrees


@pytest.mark.parametrize("T", [0.02, 0.05, 0.5])
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

"""
GRPO and its relatives in float64: against loops over plain numbers written from the papers, whose gradients come from complex
steps; against enumeration of every outcome; and, where trl is installed, against TRL's own code on the same numbers.
"""
import cmath
import itertools
import math
import random
import statistics
from types import SimpleNamespace

import pytest
import torch

from loss import kl_estimate
from relatives import (cispo_loss, clipped_loss, dual_clipped_loss, flat_groups, group_advantages, gspo_log_ratio,
                       token_weights)

GARBAGE = [float("nan"), float("inf"), -float("inf"), 1e30]
G, R = 4, 8
LENGTHS = [[5, 1, 3, 8], [8, 2, 8, 1], [4, 6, 7, 2]]  # of the responses to three prompts
SCORES = [[1.0, 0.0, 0.25, 1.0], [0.1, 0.1, 0.1, 0.1], [-0.5, 2.0, 0.0, 0.5]]
UNFINISHED = [(0, 3), (1, 0), (2, 2)]  # (group, response); the last one was cut short of R tokens, as a context might
PLAIN = dict(baseline="mean", scale_by="std", loss_type="clip", importance="token",
             aggregation="seq-mean-token-mean", truncated="keep", low=0.2, high=0.2, dual=0.0,
             kl_coef=0.0, estimator="k3", correction=False)


def make_case(seed=0):
    """Responses as lists of numbers: old log-probs, the new ones (some ratios beyond every clip), the reference's."""
    rng, responses = random.Random(seed), []
    for g, i in itertools.product(range(len(LENGTHS)), range(G)):
        n = LENGTHS[g][i]
        old = [-rng.uniform(0.1, 4) for _ in range(n)]
        responses.append(SimpleNamespace(
            old=old, new=[x + rng.gauss(0, 0.4) for x in old], ref=[x + rng.gauss(0, 0.3) for x in old], score=SCORES[g][i],
            finished=(g, i) not in UNFINISHED))
    responses[-1].new[0] = responses[-1].old[0] + 1.5  # a bad token that has become 4.5 times as likely
    return responses

CASE = make_case()
CASE[10].score, CASE[11].score = 0.5, 0.0  # the bad token's response is a bad one

# ---------------------------------------------------------------------------------------------------------------------
# the papers, in loops. Numbers may be complex: f(x + ih).imag / h is the derivative, to the last digit


def smaller(a, b):
    return a if a.real <= b.real else b


def clip(x, low, high):
    return low if x.real < low else high if x.real > high else x


def paper_advantages(scores, baseline, scale, group_size=G):
    """
    GRPO (2402.03300, 4.1.2): (r - mean) / std. Dr. GRPO (2503.20783, 3.2): r - mean. RLOO (2402.14740, eq. 7): r - the mean of
    the others. With the sample deviation and 1e-4 beside it, which no paper names and TRL has.
    """
    advantages = []
    for start in range(0, len(scores), group_size):
        group = scores[start:start + group_size]
        for i, score in enumerate(group):
            others = group if baseline == "mean" else group[:i] + group[i + 1:]
            deviation = {"std": statistics.stdev(group) + 1e-4, "batch": statistics.stdev(scores) + 1e-4, "none": 1.0}[scale]
            advantages.append((score - statistics.fmean(others)) / deviation)
    return advantages


def paper_token(r, logprob, A, k):
    """Minus what a token adds to the objective; r: the ratio that it is weighed with."""
    if k.loss_type == "cispo":  # 2506.13585, eqs. 4, 5: sg(clip(r)) A log p
        return -clip(r.real, 1 - k.low, 1 + k.high) * A * logprob
    gain = smaller(r * A, clip(r, 1 - k.low, 1 + k.high) * A)  # 2402.03300, eq. 3; clip-higher: 2503.14476, eq. 10
    if k.dual and A < 0 and gain.real < k.dual * A:  # 1912.09729, eq. 5: max(min(...), c A)
        gain = k.dual * A
    return -gain


def paper_kl(new, old, ref, k):
    """Schulman's estimators; 2402.03300, eq. 4, is k3. DeepSeek-V3.2 (2512.02556, eq. 7) multiplies by the ratio."""
    estimate = {"k1": new - ref, "k2": (new - ref) ** 2 / 2, "k3": cmath.exp(ref - new) - (ref - new) - 1}[k.estimator]
    return estimate * cmath.exp(new - old) if k.correction else estimate


def paper_sum(response, new, A, k):
    """The losses of a response's tokens, added up; new: their log-probs."""
    log_ratios = [x - y for x, y in zip(new, response.old, strict=True)]
    total = 0
    for t, logprob in enumerate(new):
        r = cmath.exp(log_ratios[t])
        if k.importance == "sequence" and k.loss_type == "clip":  # GSPO, 2507.18071, eq. 7
            r = cmath.exp(sum(log_ratios) / len(log_ratios))
        total += paper_token(r, logprob, A, k)
        if k.kl_coef:
            total += k.kl_coef * paper_kl(logprob, response.old[t], response.ref[t], k)
    return total


def paper_divisor(response, counted, rows, k):
    """What that sum is divided by, in a step over so many rows, of which these are counted."""
    if k.aggregation == "token-mean":  # DAPO, 2503.14476, eq. 12
        return sum(len(other.old) for other in counted)
    if k.aggregation == "seq-mean-token-mean":  # GRPO, 2402.03300, eq. 3
        return len(response.old) * len(counted)
    return R * rows  # Dr. GRPO, 2503.20783, listing 1: a constant, whoever is masked


def paper_step(case, only=None, **keys):
    """The loss of one optimizer step over these responses (or only some of them), and its derivative in each log-prob."""
    k = SimpleNamespace(**(PLAIN | keys))
    advantages = paper_advantages([response.score for response in case], k.baseline, k.scale_by)
    rows = range(len(case)) if only is None else only
    numbers = [i for i in rows if k.truncated == "keep" or case[i].finished]
    counted = [case[i] for i in numbers]
    loss, gradient, h = 0.0, [], 1e-30
    for i, (response, A) in enumerate(zip(case, advantages, strict=True)):
        slopes = [0.0] * len(response.new)
        if i in numbers:
            divisor = paper_divisor(response, counted, len(rows), k)
            loss += paper_sum(response, response.new, A, k).real / divisor
            for t, x in enumerate(response.new):
                beside = response.new[:t] + [x + h * 1j] + response.new[t + 1:]
                slopes[t] = complex(paper_sum(response, beside, A, k)).imag / h / divisor
        gradient.append(slopes)
    return loss, gradient


# ---------------------------------------------------------------------------------------------------------------------
# the same from loss.py, put together as grpo.py does


def padded(rows, fill=0.0, dtype=torch.float64):
    """Lists of numbers -> (B, R)."""
    return torch.tensor([list(row) + [fill] * (R - len(row)) for row in rows], dtype=dtype)


def our_loss(case, logprobs, garbage=0.0, parts=1, **keys):
    """As grpo.py: the sum of weight * loss over micro-batches; garbage: what is under the masks."""
    k = SimpleNamespace(**(PLAIN | keys))
    old, ref = (padded([getattr(response, name) for response in case], garbage, logprobs.dtype) for name in ("old", "ref"))
    mask = torch.arange(R) < torch.tensor([[len(response.old)] for response in case])
    finished = torch.tensor([response.finished for response in case])
    advantages = group_advantages(torch.tensor([response.score for response in case], dtype=logprobs.dtype), G, k.scale_by,
                                  k.baseline)[:, None].expand_as(mask)
    counted = mask & finished[:, None] if k.truncated == "mask" else mask
    weights = token_weights(counted, k.aggregation, R).to(logprobs)
    total = 0
    for rows in torch.arange(len(case)).tensor_split(parts):
        m, new = counted[rows], logprobs[rows]
        if k.loss_type == "cispo":
            losses, _ = cispo_loss(new, old[rows], advantages[rows], m, k.low, k.high)
        else:
            losses, _ = clipped_loss(new, old[rows], advantages[rows], m, k.low, k.high, k.dual, k.importance)
        assert (losses[~m] == 0).all()
        if k.kl_coef:
            kl = kl_estimate(new, ref[rows], k.estimator)
            if k.correction:
                kl = kl * torch.where(m, new - old[rows], 0).exp()
            losses = losses + k.kl_coef * torch.where(m, kl, 0)
        total = total + (losses * weights[rows]).sum()
    return total


def our_gradient(case, garbage=0.0, **keys):
    """The loss, and its gradient in the log-probs as paper_step has it."""
    leaf = padded([response.new for response in case], garbage).requires_grad_()
    loss = our_loss(case, leaf, garbage, **keys)
    loss.backward()
    return loss.item(), [row[:len(response.new)].tolist() for row, response in zip(leaf.grad, case, strict=True)], leaf.grad


def flattened(rows):
    return [x for row in rows for x in row]


def close(a, b, tolerance=1e-13):
    assert len(a) == len(b)
    return max(abs(x - y) for x, y in zip(a, b, strict=True)) < tolerance

SURROGATES = dict(
    clip={}, higher=dict(high=0.28), dual=dict(dual=1.7), sequence=dict(importance="sequence", low=0.05, high=0.1),
    sequence_dual=dict(importance="sequence", dual=1.01, low=0.005, high=0.007), cispo=dict(loss_type="cispo", high=0.5))
KLS = [{}] + [dict(kl_coef=0.3, estimator=e, correction=c) for e in ("k1", "k2", "k3") for c in (False, True)]
AGGREGATIONS = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
NAMED = {  # what the papers' names mean in grpo.py's keys
    "GRPO": dict(kl_coef=0.04), "Dr. GRPO": dict(scale_by="none", aggregation="seq-mean-token-sum-norm"),
    "DAPO": dict(high=0.28, aggregation="token-mean", truncated="mask"),
    "GSPO": dict(importance="sequence", low=3e-4, high=4e-4),
    "RLOO": dict(scale_by="none", baseline="others", aggregation="seq-mean-token-sum-norm", kl_coef=0.1, estimator="k2"),
    "CISPO": dict(loss_type="cispo", low=1.0, high=2.0, aggregation="token-mean"),
    "DeepSeek-V3.2": dict(kl_coef=0.1, correction=True), "whole batch's deviation": dict(scale_by="batch", baseline="others"),
}


def check(**keys):
    want, gradient = paper_step(CASE, **keys)
    got, ours, _ = our_gradient(CASE, **keys)
    assert abs(got - want) < 1e-13, keys
    assert close(flattened(ours), flattened(gradient)), keys
    assert max(map(abs, flattened(gradient))) > 1e-3, keys
    return gradient


def test_the_named_algorithms():
    """Value and gradient; and no two of them are the same here, or the case would show nothing."""
    gradients = {name: flattened(check(**keys)) for name, keys in NAMED.items()}
    assert not any(close(gradients[a], gradients[b], 1e-6) for a, b in itertools.combinations(NAMED, 2))


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_every_combination(surrogate):
    for kl, aggregation, truncated in itertools.product(KLS, AGGREGATIONS, ["keep", "mask"]):
        check(**SURROGATES[surrogate], **kl, aggregation=aggregation, truncated=truncated)


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_what_clipping_reports(surrogate):
    """A clipped token has no gradient, though its advantage is not 0; CISPO's has, with the weight at its bound."""
    k = SimpleNamespace(**(PLAIN | SURROGATES[surrogate]))
    gradient = our_gradient(CASE, **SURROGATES[surrogate], scale_by="none", aggregation="token-mean")[2]
    advantages = group_advantages(torch.tensor([response.score for response in CASE], dtype=torch.float64), G, "none")
    new, old = (padded([getattr(response, name) for response in CASE]) for name in ("new", "old"))
    mask = torch.arange(R) < torch.tensor([[len(response.old)] for response in CASE])
    if k.loss_type == "cispo":
        _, clipped = cispo_loss(new, old, advantages[:, None].expand_as(mask), mask, k.low, k.high)
        assert torch.equal(clipped, mask & (((new - old).exp() > 1 + k.high) | ((new - old).exp() < 1 - k.low)))
        assert (gradient[mask & (advantages != 0)[:, None]] != 0).all()
    else:
        _, clipped = clipped_loss(new, old, advantages[:, None].expand_as(mask), mask, k.low, k.high, k.dual, k.importance)
        assert torch.equal(clipped, mask & (advantages != 0)[:, None] & (gradient == 0))
    assert 0 < clipped.sum() < mask.sum()
    assert not clipped[4:8].any() or k.loss_type == "cispo"  # the flat group


def test_dual_clip_by_hand():
    """A = -2, c = 3, clip 0.2: the loss follows the ratio up to 3, and stays there; a good token never feels it."""
    ratio = torch.tensor([[0.5, 1.0, 2.9, 3.1, 50.0]], dtype=torch.float64)
    mask = torch.ones_like(ratio, dtype=torch.bool)
    for A, want, slope, gone in ((-2.0, [1.6, 2.0, 5.8, 6.0, 6.0], [0, 2.0, 5.8, 0, 0], [True, False, False, True, True]),
                                 (2.0, [-1.0, -2.0, -2.4, -2.4, -2.4], [-1.0, -2.0, 0, 0, 0], [False, False, True, True, True])):
        leaf = ratio.log().requires_grad_()
        losses, clipped = clipped_loss(leaf, torch.zeros_like(ratio), torch.full_like(ratio, A), mask, 0.2, None, 3.0)
        losses.sum().backward()
        assert losses.tolist() == [pytest.approx(want)] and leaf.grad.tolist() == [pytest.approx(slope)]
        assert clipped.tolist() == [gone]


def test_sequence_ratio_by_hand():
    """GSPO, eq. 7: ratios 2 and 8 of two tokens are 4 for both; the third token is not there. Each token gets s A / 2."""
    leaf = torch.tensor([[2.0, 8.0, 5.0]], dtype=torch.float64).log().requires_grad_()
    mask = torch.tensor([[True, True, False]])
    losses, clipped = clipped_loss(leaf, torch.zeros(1, 3), torch.full((1, 3), -1.0), mask, 0.2, importance="sequence")
    assert losses.tolist() == [pytest.approx([4.0, 4.0, 0.0])] and not clipped.any()
    (losses / 2).sum().backward()  # seq-mean-token-mean of one response
    assert leaf.grad.tolist() == [pytest.approx([2.0, 2.0, 0.0])]


def test_the_examples_in_the_docstrings():
    """relatives.py, by hand: ratios 2 and 8 are 4 for both; A = -2 and ratio 50 lose 6, not 100; scores 1, 0, 0, 1."""
    mask = torch.tensor([[True, True, False]])
    log_ratio = torch.tensor([[2.0, 8.0, 1.0]], dtype=torch.float64).log()
    assert gspo_log_ratio(log_ratio, mask).exp().tolist() == [pytest.approx([4.0, 4.0, 1.0])]
    assert (gspo_log_ratio(log_ratio, ~mask & False) == 0).all()  # a response without tokens
    A = torch.tensor([[-2.0, 2.0]])
    losses, clipped = dual_clipped_loss(torch.tensor([[100.0, -2.4]]), torch.tensor([[False, True]]), A, 3.0)
    assert losses.tolist() == [[6.0, pytest.approx(-2.4)]] and clipped.tolist() == [[True, True]]
    losses, clipped = dual_clipped_loss(torch.tensor([[5.8, -2.4]]), torch.tensor([[False, False]]), A, 3.0)
    assert losses.tolist() == [pytest.approx([5.8, -2.4])] and clipped.tolist() == [[False, False]]
    got = group_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0]), 4)
    assert got.tolist() == [pytest.approx(x, abs=5e-4) for x in (0.866, -0.866, -0.866, 0.866)]
    mask = torch.arange(3) < torch.tensor([[1], [3]])
    for aggregation, short, long in (("token-mean", 1 / 4, 1 / 4), ("seq-mean-token-mean", 1 / 2, 1 / 6),
                                     ("seq-mean-token-sum-norm", 1 / 8, 1 / 8)):
        assert token_weights(mask, aggregation, 4).tolist() == [pytest.approx([short, 0, 0]), pytest.approx([long] * 3)]


def test_grpos_gradient_coefficient():
    """On-policy, GRPO's gradient in a log-prob is -(A + kl_coef (ref / p - 1)) / (|o| B): 2402.03300, eq. 21."""
    case = [SimpleNamespace(**{**vars(response), "new": response.old}) for response in CASE]
    _, gradient, _ = our_gradient(case, kl_coef=0.04)
    for row, response, A in zip(gradient, case, paper_advantages([response.score for response in case], "mean", "std"),
                                strict=True):
        want = [-(A + 0.04 * (math.exp(ref - p) - 1)) / (len(response.old) * len(case))
                for ref, p in zip(response.ref, response.old, strict=True)]
        assert close(row, want, 1e-15)


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_garbage_under_the_mask_and_micro_batches(surrogate):
    """Neither can be seen in a bit of the loss or the gradient, but for the order of a sum."""
    for truncated, kl in itertools.product(["keep", "mask"], [{}, KLS[-1]]):
        keys = dict(SURROGATES[surrogate], truncated=truncated, **kl)
        clean = our_gradient(CASE, **keys)
        for garbage in GARBAGE:
            if not kl or not math.isnan(garbage) and not math.isinf(garbage):  # grpo.py's log-probs are 0 there, see below
                dirty = our_gradient(CASE, garbage, **keys)
                assert dirty[0] == clean[0] and torch.equal(dirty[2], clean[2]), (garbage, keys)
        for parts in (2, 5, 12):
            split = our_gradient(CASE, parts=parts, **keys)
            assert abs(split[0] - clean[0]) < 1e-14 and torch.allclose(split[2], clean[2], rtol=0, atol=1e-15)


# ---------------------------------------------------------------------------------------------------------------------
# advantages and weights


def test_advantages_by_hand():
    scores = torch.tensor([1.0, 0.0, 0.0, 3.0, 2.0, 2.0, 2.0, 2.0], dtype=torch.float64)
    root = 2**0.5  # of the variance (0 + 1 + 1 + 4) / 3
    flat = [0.0] * 4
    assert group_advantages(scores, 4, "none").tolist() == [0, -1, -1, 2, *flat]
    assert group_advantages(scores, 4).tolist() == pytest.approx([0, -1 / (root + 1e-4), -1 / (root + 1e-4), 2 / (root + 1e-4),
                                                                  *flat], abs=1e-15)
    assert group_advantages(scores, 4, "none", "others").tolist() == pytest.approx([0, -4 / 3, -4 / 3, 8 / 3, *flat], abs=1e-15)
    root = (sum((x - 1.5) ** 2 for x in scores.tolist()) / 7) ** 0.5  # of all: mean 1.5
    assert group_advantages(scores, 4, "batch").tolist() == pytest.approx([x / (root + 1e-4) for x in (0, -1, -1, 2, *flat)])
    assert flat_groups(scores, 4).tolist() == [False, True] and flat_groups(scores, 8).tolist() == [False]


@pytest.mark.parametrize("baseline", ["mean", "others"])
@pytest.mark.parametrize("scale", ["std", "batch", "none"])
def test_advantages_against_loops(baseline, scale):
    rng = random.Random(1)
    for size in (2, 3, 8, 64):
        scores = [rng.gauss(0, 1) * 10 ** rng.randint(-3, 3) for _ in range(5 * size)]
        scores[size:2 * size] = [scores[0]] * size
        want = paper_advantages(scores, baseline, scale, size)
        got = group_advantages(torch.tensor(scores, dtype=torch.float64), size, scale, baseline)
        assert close([x / max(1, abs(y)) for x, y in zip(got.tolist(), want, strict=True)],
                     [y / max(1, abs(y)) for y in want], 1e-11)
        single = group_advantages(torch.tensor(scores), size, scale, baseline)  # float32 in and out
        assert single.dtype == torch.float32
        assert close([x / max(1, abs(y)) for x, y in zip(single.tolist(), want, strict=True)],
                     [y / max(1, abs(y)) for y in want], 1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_scores_give_exactly_nothing(dtype):
    """However the mean rounds: 0.1 three times has another mean than 0.1, and / 1e-4 makes that large."""
    rounded = 0
    for value in (0.1, 1 / 3, 1e-8, 1e8, -0.7, 0.0, -0.0, 1e30, 123456.789):
        for size in range(2, 65):
            scores = torch.full((2 * size,), value, dtype=dtype)
            scores[size:] = torch.linspace(-1, 1, size)  # beside a group that does learn
            rounded += bool((scores[:size] - scores[:size].sum() / size != 0).any())
            assert flat_groups(scores, size).tolist() == [True, False]
            for scale, baseline in itertools.product(("std", "batch", "none"), ("mean", "others")):
                advantages = group_advantages(scores, size, scale, baseline)
                assert (advantages[:size] == 0).all() and (advantages[size:] != 0).any()
                assert (group_advantages(scores[:size], size, scale, baseline) == 0).all()
    assert rounded > 50  # the trap is there


def test_weighted_sums_of_equal_rewards_are_equal():
    """As grpo.py adds them: 0.3 * 0.1 + 0.7 * 1/3 in float32 has the same bits for all responses of a group."""
    for size in (2, 3, 5, 8, 16, 31, 64):
        scores = sum(w * torch.full((3 * size,), x) for w, x in ((0.3, 0.1), (0.7, 1 / 3), (-1e-3, 7.7)))
        assert flat_groups(scores, size).all() and (group_advantages(scores, size) == 0).all()


def test_nearly_equal_scores_are_not_flat_and_do_not_explode():
    """One score an ulp above the others: the 1e-4 beside the deviation keeps the advantage small."""
    scores = torch.full((8,), 0.1)
    scores[3] = torch.nextafter(scores[3], torch.tensor(1.0))
    assert not flat_groups(scores, 8).any()
    assert 0 < group_advantages(scores, 8).abs().max() < 1e-3


def test_token_weights_by_hand():
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 0]], dtype=torch.bool)
    third = 1 / 3  # three responses count; the masked one does not, but in the last one's constant
    want = {"token-mean": [0.125] * 4 + [0.125] + [0.125] * 3, "seq-mean-token-mean": [third / 4] * 4 + [third] + [third / 3] * 3,
            "seq-mean-token-sum-norm": [1 / 40] * 8}
    for aggregation, numbers in want.items():
        weights = token_weights(mask, aggregation, 10)
        assert weights[mask].tolist() == pytest.approx(numbers, abs=1e-17) and (weights[~mask] == 0).all()
        nothing = token_weights(torch.zeros_like(mask), aggregation, 10)
        assert nothing.shape == mask.shape and (nothing == 0).all()
    with pytest.raises(ValueError, match="one of token-mean"):
        token_weights(mask, "mean", 10)


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_nothing_to_learn_is_exactly_nothing(surrogate):
    """All truncated and masked, or all groups flat: loss and gradient are 0, not NaN."""
    cut = [SimpleNamespace(**{**vars(response), "finished": False}) for response in CASE]
    flat = [SimpleNamespace(**{**vars(response), "score": 0.1}) for response in CASE]
    for case, aggregation in itertools.product((cut, flat), AGGREGATIONS):
        loss, _, gradient = our_gradient(case, truncated="mask", aggregation=aggregation, **SURROGATES[surrogate])
        assert loss == 0 and (gradient == 0).all()


# ---------------------------------------------------------------------------------------------------------------------
# expectations, by enumeration

OUTCOMES = [(1,), (0, 1), (0, 0, 1), (0, 0, 0)]  # token 1 is the EOS; at most three tokens
REWARDS = [0.3, 1.0, -0.5, 2.0]


def tree(theta):
    """Log-probs of each outcome's tokens, of a model with a logit for going on at each of three places: (4, 3) and a mask."""
    go, stop = torch.nn.functional.logsigmoid(theta), torch.nn.functional.logsigmoid(-theta)
    zero = theta.new_zeros(())
    rows = [[stop[t] if token else go[t] for t, token in enumerate(outcome)] for outcome in OUTCOMES]
    return (torch.stack([torch.stack(row + [zero] * (3 - len(row))) for row in rows]),
            torch.tensor([[t < len(outcome) for t in range(3)] for outcome in OUTCOMES]))


def expected_gradient(size, scale, baseline, aggregation):
    """The mean of GRPO's on-policy gradient over every group of `size` responses, and the gradient of E[reward]."""
    theta = torch.tensor([0.3, -0.4, 0.9], dtype=torch.float64, requires_grad=True)
    logprobs, mask = tree(theta)
    probability = logprobs.sum(1).exp()
    truth = torch.autograd.grad((probability * torch.tensor(REWARDS, dtype=torch.float64)).sum(), theta, retain_graph=True)[0]
    total = 0
    for group in itertools.product(range(4), repeat=size):
        rows = torch.tensor(group)
        scores = torch.tensor(REWARDS, dtype=torch.float64)[rows]
        advantages = group_advantages(scores, size, scale, baseline)[:, None].expand(size, 3)
        losses, _ = clipped_loss(logprobs[rows], logprobs[rows].detach(), advantages, mask[rows], 0.2)
        loss = (losses * token_weights(mask[rows], aggregation, 3)).sum()
        total = total + probability[rows].prod().detach() * -loss
    return torch.autograd.grad(total, theta)[0], truth


def test_rloo_and_dr_grpo_are_the_policy_gradient():
    """
    RLOO's expected gradient is that of E[reward] (over the constant longest response), whatever the group's size; with the
    group's own mean it is (G - 1) / G of it. GRPO's is neither: its 1 / |o| and its deviation bias it (Dr. GRPO, section 3.1).
    """
    for size in (2, 3, 4):
        rloo, truth = expected_gradient(size, "none", "others", "seq-mean-token-sum-norm")
        assert (rloo * 3 - truth).abs().max() < 1e-15
        dr_grpo, _ = expected_gradient(size, "none", "mean", "seq-mean-token-sum-norm")
        assert (dr_grpo * 3 * size / (size - 1) - truth).abs().max() < 1e-15
        for scale, aggregation in (("none", "seq-mean-token-mean"), ("none", "token-mean"), ("std", "seq-mean-token-sum-norm")):
            other, _ = expected_gradient(size, scale, "others", aggregation)
            cosine = torch.nn.functional.cosine_similarity(other, truth, dim=0)
            assert cosine < 0.9999, (size, scale, aggregation)


def softmax_step(estimator, correction, on_policy):
    """E over samples of the old policy of the gradient of the KL loss; the gradient of KL(policy || ref)."""
    generator = torch.Generator().manual_seed(3)
    theta, old, ref = (torch.randn(6, generator=generator, dtype=torch.float64) for _ in range(3))
    theta.requires_grad_()
    logprobs, ref = theta.log_softmax(0), ref.log_softmax(0)
    old = logprobs.detach() if on_policy else (theta.detach() + 0.4 * old).log_softmax(0)
    losses = kl_estimate(logprobs, ref, estimator)
    if correction:
        losses = losses * (logprobs - old).exp()
    got = torch.autograd.grad((old.exp() * losses).sum(), theta, retain_graph=True)[0]
    truth = torch.autograd.grad((logprobs.exp() * (logprobs - ref)).sum(), theta)[0]
    return got, truth, (logprobs.exp() * (logprobs - ref)).sum().item(), (old.exp() * losses).sum().item()


def test_which_kl_losses_have_the_kls_gradient():
    """
    On-policy: k2 as it is, k1 and k3 times the ratio. Off-policy, as from the second step of a batch on: only k1 and k3 times
    the ratio, and those also have the KL's value. k1 alone pushes nowhere, k3 alone towards another divergence; and k2 times the
    ratio is wrong even on-policy, which is why grpo.py refuses it.
    """
    right = {("k2", False, True), ("k1", True, True), ("k3", True, True), ("k1", True, False), ("k3", True, False)}
    for estimator, correction, on_policy in itertools.product(("k1", "k2", "k3"), (False, True), (False, True)):
        got, truth, kl, value = softmax_step(estimator, correction, on_policy)
        error = ((got - truth).norm() / truth.norm()).item()
        if (estimator, correction, on_policy) in right:
            assert error < 1e-14
        else:
            assert error > 0.05, (estimator, correction, on_policy)
        if correction and estimator != "k2" or on_policy and estimator != "k2":
            assert value == pytest.approx(kl, abs=1e-14)
    assert softmax_step("k1", False, True)[0].abs().max() < 1e-15


# ---------------------------------------------------------------------------------------------------------------------
# TRL's own code, where it is installed


@pytest.fixture(scope="module")
def trl():
    return pytest.importorskip("trl.trainer.grpo_trainer", reason="pip install trl requests", exc_type=ImportError)


class Metrics(dict):
    def __missing__(self, key):
        return self.setdefault(key, Metrics() if key in ("train", "rewards", "extra") else [])


def bare(kind, **attributes):
    """A trainer of TRL's without what its __init__ would need: a model, a data set, an optimizer."""
    trainer = object.__new__(kind)
    accelerator = SimpleNamespace(num_processes=1, process_index=0, device=torch.device("cpu"), gather=lambda x: x,
                                  reduce=lambda x, reduction: x, sync_gradients=True)
    names = dict.fromkeys(("environment_factories", "environments", "tools", "pad_to_multiple_of", "off_policy_mask_threshold",
                           "reward_clip_range"))
    trainer.__dict__.update(
        names, accelerator=accelerator, model=SimpleNamespace(training=True, is_gradient_checkpointing=False), _metrics=Metrics(),
        aux_loss_enabled=False, top_entropy_quantile=1.0, use_vllm=False, vllm_importance_sampling_correction=False,
        _entropy_bonus_enabled=False, current_gradient_accumulation_steps=1, max_completion_length=R, **attributes)
    return trainer


def trl_loss(case, advantages, keys, steps_per_generation=1, all_tokens=None, correction=False):
    """TRL 1.12's GRPOTrainer._compute_loss on these responses: the loss and its gradient in the log-probs."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    leaf = padded([response.new for response in case]).requires_grad_()
    mask = torch.arange(R) < torch.tensor([[len(response.old)] for response in case])
    if keys.get("truncated") == "mask":
        mask = mask & torch.tensor([[response.finished] for response in case])
    k = dict(loss_type="grpo", importance_sampling_level="token", beta=0.0, epsilon_low=0.2, epsilon_high=0.2)
    k |= {name: x for name, x in keys.items() if name not in ("truncated", "delta")}
    trainer = bare(GRPOTrainer, **k, args=SimpleNamespace(
        delta=keys.get("delta"), use_bias_correction_kl=correction, steps_per_generation=steps_per_generation))
    trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: (leaf, torch.zeros_like(leaf), None)
    ids = torch.zeros(len(case), R, dtype=torch.int64)
    loss = trainer._compute_loss(None, dict(
        prompt_ids=ids[:, :1], prompt_mask=ids[:, :1] + 1, completion_ids=ids, completion_mask=mask.long(), advantages=advantages,
        old_per_token_logps=padded([response.old for response in case]),
        ref_per_token_logps=padded([response.ref for response in case]),
        num_items_in_batch=torch.tensor(all_tokens or int(mask.sum()))))
    loss.backward()
    return loss.item(), flattened(row[:len(response.new)].tolist() for row, response in zip(leaf.grad, case, strict=True))


def trl_advantages(kind, scores, size, **keys):
    """What a trainer's _generate_and_score_completions makes of scores, with the generation and the rewards given."""
    n = len(scores)
    trainer = bare(
        kind, mask_truncated_completions=False, beta=0.0, num_generations=size, num_iterations=1, reward_weights=torch.ones(1),
        multi_objective_aggregation="sum_then_normalize", reward_func_names=["r"], reward_funcs=[None], ref_model=None,
        normalize_advantages=False, _pending_extra_logs={}, _pending_metrics={}, log_multimodal=False, chat_template_kwargs={},
        args=SimpleNamespace(per_device_train_batch_size=n, steps_per_generation=1, gradient_accumulation_steps=1,
                             gradient_checkpointing_kwargs=None), **keys)
    trainer._tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=1)
    trainer.processing_class = SimpleNamespace(batch_decode=lambda ids, **_: [""] * len(ids))
    trainer._logs = dict(prompt=[], completion=[], rewards=dict(r=[]), advantages=[], extra={}, images=[])
    lists = [[5]] * n
    if kind.__name__ == "RLOOTrainer":
        trainer._generate = lambda prompts: (lists, lists, lists)
    else:
        trainer._generate = lambda prompts: (lists, lists, None, [""] * n, None, {}, None, None)
    trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: (torch.zeros(n, 1), torch.zeros(n, 1), None)
    trainer._calculate_rewards = lambda *args: torch.tensor(scores)[:, None]
    return trainer._generate_and_score_completions([dict(prompt="") for _ in range(n)])["advantages"]

AGREE = {  # TRL's keys -> ours
    "grpo": (dict(loss_type="grpo"), {}),
    "grpo, k3": (dict(loss_type="grpo", beta=0.1), dict(kl_coef=0.1)),
    "grpo, k3 corrected": (dict(loss_type="grpo", beta=0.1, use_bias_correction_kl=True), dict(kl_coef=0.1, correction=True)),
    "grpo, clip-higher": (dict(loss_type="grpo", epsilon_high=0.28), dict(high=0.28)),
    "grpo, delta": (dict(loss_type="grpo", delta=1.7), dict(dual=1.7)),
    "gspo": (dict(loss_type="grpo", importance_sampling_level="sequence", epsilon_low=0.05, epsilon_high=0.1, beta=0.1),
             dict(importance="sequence", low=0.05, high=0.1, kl_coef=0.1)),
    "bnpo": (dict(loss_type="bnpo", beta=0.1), dict(aggregation="token-mean", kl_coef=0.1)),
    "bnpo, truncated": (dict(loss_type="bnpo", truncated="mask"), dict(aggregation="token-mean", truncated="mask")),
    "dr_grpo": (dict(loss_type="dr_grpo", beta=0.1), dict(aggregation="seq-mean-token-sum-norm", kl_coef=0.1)),
    "dr_grpo, truncated": (dict(loss_type="dr_grpo", truncated="mask"),
                           dict(aggregation="seq-mean-token-sum-norm", truncated="mask")),
    "dapo": (dict(loss_type="dapo", epsilon_high=0.28, truncated="mask"),
             dict(high=0.28, aggregation="token-mean", truncated="mask")),
    "cispo": (dict(loss_type="cispo", epsilon_high=1.5), dict(loss_type="cispo", low=1.0, high=0.5, aggregation="token-mean")),
}


@pytest.fixture(scope="module")
def advantages():
    return group_advantages(torch.tensor([response.score for response in CASE], dtype=torch.float64), G)


@pytest.mark.parametrize("name", AGREE)
def test_trl_agrees(trl, advantages, name):
    theirs, ours = AGREE[name]
    theirs = dict(theirs)
    loss, gradient = trl_loss(CASE, advantages, theirs, correction=theirs.pop("use_bias_correction_kl", False))
    want, ours = our_gradient(CASE, **ours)[:2]
    assert abs(loss - want) < 1e-14 and close(gradient, flattened(ours), 1e-15)


def test_trl_counts_masked_responses_in_its_means(trl, advantages):
    """grpo with mask_truncated_completions: TRL divides by all responses, we by those left."""
    n = sum(response.finished for response in CASE)
    loss, gradient = trl_loss(CASE, advantages, dict(loss_type="grpo", truncated="mask"))
    want, ours, _ = our_gradient(CASE, truncated="mask")
    assert n < len(CASE) and loss * len(CASE) / n == pytest.approx(want, abs=1e-14)
    assert close([x * len(CASE) / n for x in gradient], flattened(ours), 1e-14)


def test_trls_cispo_has_one_absolute_cap(trl, advantages):
    """TRL (and ScaleRL) cap the weight at epsilon_high itself and not below; the paper has 1 + eps_high, and 1 - eps_low."""
    loss, gradient = trl_loss(CASE, advantages, dict(loss_type="cispo", epsilon_high=0.5))
    paper = dict(loss_type="cispo", aggregation="token-mean", low=1.0)
    assert not close(gradient, flattened(our_gradient(CASE, **paper, high=0.5)[1]), 1e-3)
    assert close(gradient, flattened(our_gradient(CASE, **paper, high=-0.5)[1]), 1e-15)
    assert not close(flattened(our_gradient(CASE, **paper, high=0.5)[1]), flattened(our_gradient(CASE, **(paper | dict(
        low=0.2)), high=0.5)[1]), 1e-3)


def test_trls_dapo_divides_by_an_average_step(trl, advantages):
    """
    dapo and cispo: TRL divides by the tokens of the whole generation batch / its steps, we by those of the step, as eq. 12 reads
    for a minibatch. With ragged responses a step of few tokens counts less in TRL; over a batch of one step they agree (above).
    """
    lengths, half, keys = [len(response.old) for response in CASE], CASE[:8], dict(loss_type="dapo")
    loss, gradient = trl_loss(half, advantages[:8], keys, steps_per_generation=2, all_tokens=sum(lengths))
    want, alone = trl_loss(half, advantages[:8], keys)
    share = sum(lengths[:8]) / (sum(lengths) / 2)
    assert share != 1 and loss == pytest.approx(want * share) and close(gradient, [x * share for x in alone])


def test_trls_delta_below_the_clip_range_is_another_bound(trl, advantages):
    """delta < 1 + eps: TRL bounds the good tokens by it, and the bad ones by 1 + eps; ours bounds the bad ones alone."""
    theirs = ours = 0
    for response, A in zip(CASE, advantages.tolist(), strict=True):
        ratios = [math.exp(x - y) for x, y in zip(response.new, response.old, strict=True)]
        n = len(ratios) * len(CASE)
        theirs += sum(-A * (min(r, 1.1) if A > 0 else max(min(r, 1.1), min(max(r, 0.8), 1.2))) for r in ratios) / n
        ours += sum(-A * (min(r, 1.2) if A > 0 else min(max(r, 0.8), 1.1)) for r in ratios) / n
    assert trl_loss(CASE, advantages, dict(loss_type="grpo", delta=1.1))[0] == pytest.approx(theirs, abs=1e-14)
    assert our_gradient(CASE, dual=1.1)[0] == pytest.approx(ours, abs=1e-14) and abs(theirs - ours) > 1e-3


def test_trl_corrects_gspos_kl_by_the_responses_ratio(trl, advantages):
    """use_bias_correction_kl with importance_sampling_level="sequence": DeepSeek-V3.2's ratio is the token's, and so is ours."""
    theirs = trl_loss(CASE, advantages, dict(importance_sampling_level="sequence", beta=0.1), correction=True)[1]
    ours = flattened(our_gradient(CASE, importance="sequence", kl_coef=0.1, correction=True)[1])
    assert not close(theirs, ours, 1e-3)


def test_trls_clip_metric_is_ours(trl, advantages):
    """clip_ratio/region_mean is policy/clipfrac, tokens that clipping left without a gradient; but TRL's leaves delta out."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    new, old = (padded([getattr(response, name) for response in CASE]) for name in ("new", "old"))
    mask = torch.arange(R) < torch.tensor([[len(response.old)] for response in CASE])
    _, clipped = clipped_loss(new, old, advantages[:, None].expand_as(mask), mask, 0.2)
    found = []
    original = GRPOTrainer.__dict__["_compute_loss"]

    def spy(trainer, *args):
        loss = original(trainer, *args)
        found.append(trainer._metrics["train"]["clip_ratio/region_mean"][0])
        return loss

    GRPOTrainer._compute_loss = spy
    try:
        trl_loss(CASE, advantages, dict(loss_type="grpo"))
    finally:
        GRPOTrainer._compute_loss = original
    assert found == [pytest.approx(clipped.sum().item() / mask.sum().item())]


@pytest.mark.parametrize("theirs, ours", [("group", "std"), ("batch", "batch"), ("none", "none")])
def test_trls_advantages(trl, theirs, ours):
    from trl.trainer.grpo_trainer import GRPOTrainer

    scores = [response.score for response in CASE]
    scores[4:8] = [0.25] * 4  # 0.1 would show the next test's disagreement
    got = trl_advantages(GRPOTrainer, scores, G, scale_rewards=theirs)
    assert torch.allclose(got, group_advantages(torch.tensor(scores), G, ours), rtol=1e-5, atol=1e-7)
    assert got.abs().max() > 0.5


def test_trls_equal_rewards_may_have_advantages(trl):
    """In float32 the mean of equal rewards need not be the reward; / (0 + 1e-4), TRL trains on what is left. Ours are 0."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    sizes = [size for size in range(2, 33) if trl_advantages(GRPOTrainer, [0.1] * size, size, scale_rewards="group").any()]
    assert sizes and all((group_advantages(torch.full((size,), 0.1), size) == 0).all() for size in sizes)


def test_trls_rloo(trl):
    """The advantages are alike, with the KL left out: TRL takes it off the scores, grpo.py has it in the loss."""
    from trl.trainer.rloo_trainer import RLOOTrainer

    scores = [response.score for response in CASE]
    got = trl_advantages(RLOOTrainer, scores, G)
    assert torch.allclose(got, group_advantages(torch.tensor(scores), G, "none", "others"), rtol=1e-5, atol=1e-6)


def test_trls_rloo_has_one_ratio_a_response(trl):
    """
    TRL: the ratio of the whole responses' probabilities, clipped; ours: each token's. On-policy the gradients are the same, but
    for the constant that aggregation "seq-mean-token-sum-norm" divides by.
    """
    from trl.trainer.rloo_trainer import RLOOTrainer

    advantages = group_advantages(torch.tensor([response.score for response in CASE], dtype=torch.float64), G, "none", "others")
    keys = dict(scale_by="none", baseline="others", aggregation="seq-mean-token-sum-norm")
    on_policy = [SimpleNamespace(**{**vars(response), "new": response.old}) for response in CASE]
    for case, same in ((on_policy, True), (CASE, False)):
        leaf = padded([response.new for response in case]).requires_grad_()
        old, ids = padded([response.old for response in case]), torch.zeros(len(case), R, dtype=torch.int64)
        mask = torch.arange(R) < torch.tensor([[len(response.old)] for response in case])
        trainer = bare(RLOOTrainer, epsilon_low=0.2, epsilon_high=0.2)
        trainer._get_per_token_logps_and_entropies = lambda *_, leaf=leaf, **__: (leaf, torch.zeros_like(leaf), None)
        trainer._compute_loss(None, dict(prompt_ids=ids[:, :1], prompt_mask=ids[:, :1] + 1, completion_ids=ids,
                                         completion_mask=mask.long(), advantages=advantages, old_logps=old.sum(1))).backward()
        ours = our_gradient(case, **keys)[2]
        assert ((leaf.grad / R - ours).abs().max() < 1e-15) == same

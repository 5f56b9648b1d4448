"""
The formulas. Tensors in, tensors out: no configuration, no globals. First the parts of all losses:
sums under a mask, whitening, KL estimators, the learning rate; then GRPO and its relatives; then
the figures of a batch. The losses themselves are in the loops of ppo.py and grpo.py, and in rm.py.

The scripts add up the losses of the tokens, and divide by one count: the trained tokens of the
whole optimizer step, over all micro-batches and all ranks. They never take a mean of the
micro-batches' means: there a token in a micro-batch of few tokens would count more.

B responses, R the longest response, G the responses to a prompt (a group), side by side.
"""
import math

import torch


# --------------------------------------------------------------------------------------------------
# sums and means over a mask


def masked_sum(x, mask):
    """The sum of x where mask is True. where, and not x * mask: NaN * 0 is NaN."""
    return torch.where(mask, x, 0).sum()


def masked_mean(x, mask):
    """The mean of x where mask is True; 0 where it never is. A bool x: give it as x.double()."""
    return masked_sum(x, mask) / mask.sum().clamp(min=1)


def masked_whiten(x, mask):
    """
    x (B, R), shifted and scaled to mean 0 and standard deviation 1 over all True positions; 0
    elsewhere (N+ detail 25; the variance is the population's, as in OpenRLHF).

    Give it the batch of all ranks: if each rank whitened its own share, each rank would have
    another objective.
    """
    mean = masked_mean(x, mask)
    variance = masked_mean((x - mean) ** 2, mask)
    return torch.where(mask, (x - mean) * torch.rsqrt(variance + 1e-8), 0)


# --------------------------------------------------------------------------------------------------
# checks: two ways to compute the same log-probs must agree


def gap(log_ratio, mask, dtype):
    """
    The distance of log-probs that should be equal, a scalar tensor in nats. log_ratio: (B, R), the
    difference of the two, in theory 0. The largest absolute difference where mask is True; for 16
    bits the mean, because rounding alone makes single differences large.
    """
    log_ratio = torch.where(mask, log_ratio.detach().abs(), 0)
    if dtype in ("bfloat16", "float16"):
        return masked_mean(log_ratio, mask)
    return log_ratio.max() if log_ratio.numel() else log_ratio.sum()  # 0 if there are no rows


def gap_limit(dtype, temperature):
    """
    The largest gap that rounding may cause, in nats. Below temperature 1 the limit grows: log-probs
    are of logits / temperature, so the logits' rounding errors are divided by it, too.
    """
    return {"float64": 1e-10, "float32": 1e-4}.get(dtype, 0.02) / min(temperature, 1.0)


def importance_weights(mb, cap):
    """
    The factor of each token's policy loss, (b, R), where the sampler's probabilities q differ a
    little from the probabilities p of the training forward, as in 16 bits: min(p / q, cap),
    truncated importance sampling (Yao et al., "Your efficient RL framework secretly brings you
    off-policy RL training", 2025). It has no gradient. cap = 0 is no correction: 1.

    It is not PPO's ratio: that is the policy's probability now / p, both by the training forward
    (decoupled PPO, arXiv 2505.24298). recipes/masked_importance.diff has other weights.

    mb: old_logprobs, log p; sampler_logprobs, log q; (b, R) each. For q = 0.2, 0.5 and p = 0.3, 0.4
    the weights are 1.5, 0.8, and with cap = 1.3 they are 1.3, 0.8.
    """
    if cap == 0:
        return 1.0
    return (mb["old_logprobs"] - mb["sampler_logprobs"]).detach().exp().clamp(max=cap)


# --------------------------------------------------------------------------------------------------
# KL


def kl_estimate(logprobs, ref_logprobs, kind):
    """
    Estimates of KL(policy || reference) at each token, (B, R), from the one token that the policy
    sampled (Schulman, joschu.net/blog/kl-approx.html). p and q are its probabilities under policy
    and reference:

        kind   estimate             value                        as a loss, its gradient is
        k1     log(p/q)             unbiased, may be negative    0 on average: no penalty
        k2     log(p/q)^2 / 2       biased, low variance         that of KL(policy || reference)
        k3     q/p - 1 - log(q/p)   unbiased, never negative     that of KL(reference || policy)

    For p = 0.5 and q = 0.25: k1 = 0.693, k2 = 0.240, k3 = 0.193 nats.
    Raises ValueError for another kind.
    """
    log_ratio = logprobs - ref_logprobs  # log(p/q)
    if kind == "k1":
        return log_ratio
    if kind == "k2":
        return 0.5 * log_ratio**2
    if kind == "k3":
        return torch.expm1(-log_ratio) + log_ratio  # expm1(x): exp(x) - 1, exact for small x
    raise ValueError(f"kind = {kind!r}; one of k1, k2, k3")


# --------------------------------------------------------------------------------------------------
# numbers that change from iteration to iteration


def learning_rate_at(iteration, peak, warmup, max_iters, shape):
    """
    The learning rate of an iteration, counted from 0: a linear warm-up to peak over `warmup`
    iterations, then shape = "constant", or down to 0 at max_iters: "linear", in a straight line, or
    "cosine", half a cosine. It depends only on the iteration: there is no scheduler to save.
    """
    if iteration < warmup:
        return peak * (iteration + 1) / warmup
    progress = (iteration - warmup) / max(max_iters - warmup, 1)  # from 0 to 1
    share = {"constant": 1.0,
             "linear": 1 - progress,
             "cosine": 0.5 + 0.5 * math.cos(math.pi * progress)}[shape]
    return peak * share


def explained_variance(values, returns, mask):
    """
    The share of the returns' variance that the values (B, R) predicted:
    1 - var(returns - values) / var(returns). 1 is perfect; 0 is as good as a constant.
    """
    residual = (returns - values)[mask]
    return 1 - residual.var() / returns[mask].var().clamp(min=1e-8)


# --------------------------------------------------------------------------------------------------
# GRPO, and what its relatives change. config/ has a file of keys for each of them (dr_grpo.py, ...)
#
#   relative   change                                          where              arXiv paper
#   RLOO       a score minus the mean of the *other* scores    group_advantages   2402.14740, eq. 7
#   Dr. GRPO   no division by the group's deviation            group_advantages   2503.20783, 3.2
#              no division by the response's length            token_weights      its listing 1
#   DAPO       a wider clip range above 1 than below           grpo.py's clip     2503.14476, eq. 10
#              other prompts replace groups of equal scores    flat_groups        its eq. 11
#              every token counts the same                     token_weights      its eq. 12
#              too long responses lose score                   rewards.length     its eq. 13
#   GSPO       one ratio for all tokens of a response          gspo_log_ratio     2507.18071, eq. 7
#   CISPO      a clipped weight instead of a clipped loss      grpo.py's loop     2506.13585, eq. 4


def group_advantages(scores, group_size, scale_by="std", baseline="mean"):
    """
    The advantage of each response: its score compared with the scores of its group.

    scores: (B,), the group_size responses to a prompt side by side. Returns (B,) in their dtype.

    Plain GRPO (arXiv 2402.03300, section 4.1.2): (score - mean of the group) / (its standard
    deviation + 1e-4). With the scores 1, 0, 0, 1 of a group (two answers right, two wrong), mean
    0.5, deviation 0.577: advantages 0.866, -0.866, -0.866, 0.866.

    baseline: "mean" as above, or "others": a score minus the mean of the *other* scores of its
        group (RLOO, arXiv 2402.14740, equation 7).
    scale_by: "std" as above; "batch": divide by the standard deviation of all B scores; "none": do
        not divide (Dr. GRPO, arXiv 2503.20783, section 3.2).

    The variances are divided by n - 1; the 1e-4 is TRL's. A score of NaN is no score: means and
    deviations are those of the other scores, and the response's advantage is 0.
    """
    groups = scores.double().view(-1, group_size)  # (B / G, G)
    advantages = groups - groups.nanmean(1, keepdim=True)
    scored = ~groups.isnan()  # (B / G, G)
    n = scored.sum(1, keepdim=True)  # (B / G, 1): G, where all have a score
    variances = advantages.square().nansum(1, keepdim=True) / (n - 1)  # (B / G, 1)
    if baseline == "others":
        # score - (sum of the group - score) / (n - 1) = (score - mean of the group) * n / (n - 1)
        advantages = advantages * n / (n - 1)
    if scale_by == "std":
        advantages = advantages / (variances.sqrt() + 1e-4)
    elif scale_by == "batch":
        advantages = advantages / (groups[scored].std() + 1e-4)
    # Equal scores have advantages of exactly 0. Their mean may differ from them by rounding, and
    # the division by 1e-4 would make the difference large.
    nothing = flat_groups(scores, group_size)[:, None] | ~scored
    return advantages.masked_fill(nothing, 0).flatten().to(scores.dtype)


def flat_groups(scores, group_size):
    """
    Which groups have equal scores, and so teach nothing: scores (B,) -> (B / G,) bool. DAPO
    replaces them by groups of other prompts (arXiv 2503.14476, equation 11). NaN is no score: a
    group with one score, or none, is flat.
    """
    groups = scores.view(-1, group_size)
    none = groups.isnan()
    lowest = groups.masked_fill(none, torch.inf).amin(1)
    return lowest >= groups.masked_fill(none, -torch.inf).amax(1)


def gspo_log_ratio(log_ratio, response_mask):
    """
    GSPO (arXiv 2507.18071, equation 7): the log of one ratio for the whole response, the geometric
    mean of its tokens' ratios. Two tokens with the ratios 2 and 8 both get sqrt(2 * 8) = 4.

    log_ratio: (B, R), log p - log p_old of each token, 0 where the mask is False. response_mask:
    (B, R) bool; the whole response must be in its row. Returns (B, R): the mean of a row at each of
    its tokens, 0 elsewhere.

    With the aggregation "seq-mean-token-mean" the tokens' losses, which are all the same, average
    to the loss of the response (equation 5).
    """
    lengths = response_mask.sum(1, keepdim=True).clamp(min=1)  # (B, 1)
    mean = log_ratio.sum(1, keepdim=True) / lengths  # (B, 1)
    return torch.where(response_mask, mean, 0)


def token_weights(mask, aggregation, max_length):
    """
    The weight of each token, (B, R) float64: the loss of an optimizer step is the sum of weight *
    loss over its tokens.

    mask: (B, R) bool of the *whole* step, of all micro-batches and ranks: True on the tokens that
    count. max_length: the most tokens that a response may have.
    n is the number of responses that have tokens that count.

    "token-mean": 1 / all tokens. Every token counts the same (DAPO, arXiv 2503.14476, eq. 12).
    "seq-mean-token-mean": 1 / (tokens of its response * n). Every response counts the same (GRPO,
        arXiv 2402.03300, eq. 3).
    "seq-mean-token-sum-norm": 1 / (max_length * B), a constant. Otherwise a token of a long wrong
        answer would be punished less than one of a short wrong answer (Dr. GRPO, arXiv 2503.20783,
        listing 1). A response without tokens counts in B, and adds 0.

    For two responses of 1 and 3 tokens and max_length = 4:

        "token-mean"               1/4            1/4  1/4  1/4
        "seq-mean-token-mean"      1/2            1/6  1/6  1/6
        "seq-mean-token-sum-norm"  1/8            1/8  1/8  1/8

    Raises ValueError for another aggregation.
    """
    weights = mask.double()
    if aggregation == "token-mean":
        return weights / weights.sum().clamp(min=1)
    lengths = weights.sum(1, keepdim=True)  # (B, 1)
    if aggregation == "seq-mean-token-mean":
        return weights / lengths.clamp(min=1) / (lengths > 0).sum().clamp(min=1)
    if aggregation == "seq-mean-token-sum-norm":
        return weights / max_length / len(mask)
    raise ValueError(f"aggregation = {aggregation!r}; one of token-mean, seq-mean-token-mean, "
                     "seq-mean-token-sum-norm")


# --------------------------------------------------------------------------------------------------
# the figures of a batch


def summarize(batch, prefix, reward_names=(), importance_cap=0.0):
    """
    The figures of a batch, {"prefix/name": number}: means over its responses. With an
    importance_cap there are also the figures of the weights (importance_weights).

    KL and entropy are in nats a response, estimated from the sampled tokens (k1); they need the
    models' columns in the batch. reward_names: if there are several, the mean of each. Responses to
    which a reward does not apply are left out of its mean. "scored": the share of the responses
    that have a score, if not all have one.
    """
    mask = batch["response_mask"]  # (B, R)
    figures = dict(scores=mean_of(batch["scores"]))
    if batch["scores"].isnan().any():
        figures["scored"] = (~batch["scores"].isnan()).double().mean()
    if "old_logprobs" in batch:
        figures["entropy"] = -batch["old_logprobs"].sum(1).mean()
    if {"old_logprobs", "ref_logprobs"} <= batch.keys():
        figures["kl"] = (batch["old_logprobs"] - batch["ref_logprobs"]).sum(1).mean()
    figures["length"] = mask.sum(1).double().mean()
    figures["finished"] = batch["finished"].double().mean()
    if not batch["accuracy"].isnan().any():  # NaN: the data has no answers
        figures["accuracy"] = batch["accuracy"].mean()
        figures["thinks"] = batch["thinks"].mean()
    for name in reward_names if len(reward_names) > 1 else ():
        figures[f"reward/{name}"] = mean_of(batch[f"reward/{name}"])
    figures = {f"{prefix}/{name}": x.item() for name, x in figures.items()}
    if importance_cap > 0:
        weights = importance_weights(batch, importance_cap)[mask]  # (tokens,)
        capped = weights == importance_cap  # in their own dtype: 1.1 has other bits in float64
        weights = weights.double()
        # the effective sample size (Kong, 1992)
        worth = weights.sum() ** 2 / (weights**2).sum().clamp(min=1e-30)  # tokens
        figures |= {"policy/importance": weights.mean().item(),
                    "policy/importance_capped": capped.double().mean().item(),
                    "policy/effective_tokens": (worth / len(weights)).item()}
    return figures


def mean_of(scores):
    """The mean of the scores (B,) that are not NaN; 0 where all are NaN."""
    known = scores[~scores.isnan()]
    return known.mean() if len(known) else torch.zeros(())


def add_up(sums, mask, tensors):
    """
    Add tensors {name: (b, R)} of a micro-batch to sums {name: (sum, count)}: the sum where the mask
    (b, R) is True, and the number of these places. sums may be empty at first. In the end
    parallel.all_reduce_metrics computes the mean over all micro-batches and ranks.
    """
    for name, x in tensors.items():
        pair = torch.stack([masked_sum(x.detach().double(), mask), mask.sum()])
        sums[name] = sums.get(name, 0) + pair

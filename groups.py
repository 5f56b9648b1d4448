"""
The formulas of GRPO, and the changes of its relatives. Tensors in, tensors out, as in formulas.py.
config/ has a file of keys for each of them (dr_grpo.py, ...).

  relative   change                                          where              arXiv paper
  RLOO       a score minus the mean of the *other* scores    group_advantages   2402.14740, eq. 7
  Dr. GRPO   no division by the group's deviation            group_advantages   2503.20783, 3.2
             no division by the response's length            token_weights      its listing 1
  DAPO       a wider clip range above 1 than below           clipped_losses     2503.14476, eq. 10
             other prompts replace groups of equal scores    flat_groups        its eq. 11
             every token counts the same (see there)         token_weights      its eq. 12
             too long responses lose score                   grading/forms.py   its eq. 13
  GSPO       one ratio for all tokens of a response          gspo_losses        2507.18071, eq. 7
  CISPO      a clipped weight instead of a clipped loss      cispo_losses       2506.13585, eq. 4

B responses, G of them (a group) to each prompt, side by side, in T columns: the head of batches.py.
"""
import torch


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
    elif scale_by == "batch" and scored.sum() > 1:
        advantages = advantages / (groups[scored].std() + 1e-4)
    # Equal scores have advantages of exactly 0. Their mean may differ from them by rounding, and
    # the division by 1e-4 would make the difference large.
    zero = flat_groups(scores, group_size)[:, None] | ~scored
    return advantages.masked_fill(zero, 0).flatten().to(scores.dtype)


def flat_groups(scores, group_size):
    """
    Which groups have equal scores, and so teach nothing: scores (B,) -> (B / G,) bool. DAPO
    replaces them by groups of other prompts (arXiv 2503.14476, equation 11). NaN is no score: a
    group with one score, or none, is flat.
    """
    groups = scores.view(-1, group_size)
    unscored = groups.isnan()
    lowest = groups.masked_fill(unscored, torch.inf).amin(1)
    return lowest >= groups.masked_fill(unscored, -torch.inf).amax(1)


def summarize_groups(scores, flat):
    """Figures for the log: the deviation of all scores (B,) that are not NaN; how many are flat."""
    scored = scores[~scores.isnan()]
    return {"objective/score_std": scored.std().item() if len(scored) > 1 else 0.0,
            "objective/flat_groups": flat.double().mean().item()}


def clipped_losses(logprobs, old_logprobs, advantages, mask, low, high):
    """
    The policy's loss of each token, and where the clip has taken its gradient away: (b, W) each.
    It is PPO's and GRPO's (arXiv 2402.03300, eq. 3): the larger one of -advantage * ratio and
    -advantage * (the ratio, clipped to 1 - low .. 1 + high). The ratio is p / p_old of the token.

    logprobs, old_logprobs: log p and log p_old; advantages; (b, W) each. mask: (b, W) bool, the
    tokens that count. With low = high = 0.2:

        ratio   advantage   loss   its gradient
        1.5      1          -1.2   none: the clip has taken it away
        1.5     -1           1.5   makes the token less likely
        0.5      1          -0.5   makes the token likelier
    """
    # 0 where the mask is False, because exp could overflow there
    log_ratio = torch.where(mask, logprobs - old_logprobs, 0)
    return larger_losses(log_ratio.exp(), advantages, low, high)


def gspo_losses(logprobs, old_logprobs, advantages, mask, low, high):
    """
    GSPO (arXiv 2507.18071, eq. 5 and 7): as clipped_losses, but all tokens of a response have one
    ratio, the geometric mean of their ratios. Two tokens with the ratios 2 and 8 both get
    sqrt(2 * 8) = 4. The whole response must be in its row.

    With the aggregation "seq-mean-token-mean" the tokens' losses, which are all the same, average
    to the loss of the response (its eq. 5).
    """
    log_ratio = torch.where(mask, logprobs - old_logprobs, 0)
    mean = log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)  # (b, 1)
    return larger_losses(torch.where(mask, mean, 0).exp(), advantages, low, high)


def cispo_losses(logprobs, old_logprobs, advantages, mask, low, high):
    """
    CISPO (arXiv 2506.13585, eq. 4): REINFORCE's loss, -advantage * log p, times the clipped ratio
    as a weight without a gradient. So each token has a gradient; the clip only bounds its size.
    Ratio 3, advantage 1, high 0.5: the gradient in log p is -1.5, where clipped_losses has none.
    Arguments and results are those of clipped_losses.
    """
    ratio = torch.where(mask, logprobs - old_logprobs, 0).exp()
    clipped_ratio = ratio.clamp(1 - low, 1 + high)
    return -advantages * clipped_ratio.detach() * logprobs, clipped_ratio != ratio


LOSSES = dict(clip=clipped_losses, gspo=gspo_losses, cispo=cispo_losses)  # of the key loss_type


def larger_losses(ratio, advantages, low, high):
    """The larger of the losses with and without the clip, and where it is the clip's: (b, W)."""
    losses1 = -advantages * ratio
    losses2 = -advantages * ratio.clamp(1 - low, 1 + high)
    return torch.max(losses1, losses2), losses2 > losses1


def token_weights(mask, aggregation, max_length):
    """
    The weight of each token, (B, T) float64. An optimizer step's loss: the sum of weight * loss.

    mask: (B, T) bool of the *whole* step, of all micro-batches and ranks: True on the tokens that
    count. max_length: the most tokens that a response may have.
    n is the number of responses that have tokens that count.

    "token-mean": 1 / all tokens of the step. Every token counts the same, as in verl, TRL and
        OpenRLHF. DAPO's eq. 12 (arXiv 2503.14476) and CISPO's eq. 4 (2506.13585) divide by the
        tokens of *one prompt's* responses, inside of an expectation: there every prompt counts the
        same. That form is recipes/every_prompt.diff.
    "seq-mean-token-mean": 1 / (tokens of its response * n). Every response counts the same (GRPO,
        arXiv 2402.03300, eq. 3).
    "seq-mean-token-sum-norm": 1 / (max_length * B), a constant. Otherwise a token of a long wrong
        answer would be punished less than one of a short wrong answer (Dr. GRPO, arXiv 2503.20783,
        listing 1). A response without tokens counts in B, and adds 0.

    For two responses of 1 and 3 tokens and max_length = 4:

        "token-mean"               1/4            1/4  1/4  1/4
        "seq-mean-token-mean"      1/2            1/6  1/6  1/6
        "seq-mean-token-sum-norm"  1/8            1/8  1/8  1/8
    """
    weights = mask.double()
    if aggregation == "token-mean":
        return weights / weights.sum().clamp(min=1)
    lengths = weights.sum(1, keepdim=True)  # (B, 1)
    if aggregation == "seq-mean-token-mean":
        return weights / lengths.clamp(min=1) / (lengths > 0).sum().clamp(min=1)
    return weights / max_length / len(mask)  # seq-mean-token-sum-norm

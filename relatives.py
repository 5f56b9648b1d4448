"""
GRPO's relatives: what RLOO, Dr. GRPO, DAPO, GSPO and CISPO change in it. Pure functions, as in loss.py.
"""
import torch


def cispo_loss(logprobs, old_logprobs, advantages, response_mask, cliprange, cliprange_high):
    """
    CISPO (MiniMax-M1, arXiv 2506.13585, eqs. 4 and 5): REINFORCE whose importance weight is clipped and has no gradient, so
    that no token's gradient is ever taken away: -clip(r, 1 - eps, 1 + eps_high) A log p. All (B, R). Returns the loss a token
    and whether its weight was clipped.
    """
    log_ratio = torch.where(response_mask, logprobs - old_logprobs, 0)
    ratio = log_ratio.detach().exp()
    weight = ratio.clamp(1 - cliprange, 1 + cliprange_high)
    logprobs, advantages = torch.where(response_mask, logprobs, 0), torch.where(response_mask, advantages, 0)
    return -weight * advantages * logprobs, response_mask & (weight != ratio)


def group_advantages(scores, group_size, scale_by="std", baseline="mean"):
    """
    scores (B,), the group_size responses to a prompt side by side -> advantages (B,): a score minus what its prompt gives.

    baseline: "mean" of the group (GRPO, arXiv 2402.03300, section 4.1.2), or "others", the mean of the other responses (RLOO,
    arXiv 2402.14740, eq. 7). scale_by: "std" divides by the group's standard deviation (GRPO), "batch" by that of all scores,
    "none" leaves the difference (Dr. GRPO, arXiv 2503.20783). The deviations are unbiased (n - 1) and plus 1e-4, as in TRL.
    Exactly 0 where all scores of a group are equal: their mean need not be, in floating point.
    """
    groups = scores.double().view(-1, group_size)  # (prompts, G)
    advantages = groups - groups.mean(1, keepdim=True)
    if baseline == "others":
        advantages = advantages * group_size / (group_size - 1)
    if scale_by == "std":
        advantages = advantages / (groups.std(1, keepdim=True) + 1e-4)
    elif scale_by == "batch":
        advantages = advantages / (groups.std() + 1e-4)
    return advantages.masked_fill(flat_groups(scores, group_size)[:, None], 0).flatten().to(scores.dtype)


def flat_groups(scores, group_size):
    """Which groups have nothing to learn from, all scores being equal: (B,) -> (B / group_size,) bool."""
    groups = scores.view(-1, group_size)
    return (groups == groups[:, :1]).all(1)


def token_weights(mask, aggregation, max_length):
    """
    What each token's loss counts, (B, R), so that the loss of an optimizer step is the sum of weight * loss. mask (B, R) is
    that of the *whole* step, all micro-batches and ranks, False on what shall not count. With n the responses that have tokens:

    "token-mean": every token alike, 1 / tokens (DAPO, arXiv 2503.14476, eq. 12);
    "seq-mean-token-mean": every response alike, 1 / (its tokens * n) (GRPO, arXiv 2402.03300, eq. 3);
    "seq-mean-token-sum-norm": 1 / (max_length * B), so that a long wrong answer is not excused
    (Dr. GRPO, arXiv 2503.20783, listing 1). This one is a constant: a response without tokens, as
    all of them are masked, is one of the B and adds 0.
    """
    weights = mask.double()
    if aggregation == "token-mean":
        return weights / weights.sum().clamp(min=1)
    lengths = weights.sum(1, keepdim=True)  # (B, 1)
    if aggregation == "seq-mean-token-mean":
        return weights / lengths.clamp(min=1) / (lengths > 0).sum().clamp(min=1)
    if aggregation == "seq-mean-token-sum-norm":
        return weights / max_length / len(mask)
    raise ValueError(f"aggregation = {aggregation!r}; one of token-mean, seq-mean-token-mean, seq-mean-token-sum-norm")

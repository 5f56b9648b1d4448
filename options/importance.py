"""The key importance_cap: how far the policy of an update is from the one that sampled."""
from formulas import importance_weights, kl_estimate, masked_mean


def figures_of_importance(batch, cap, prefix):
    """{metric: number} of a batch: its importance weights, and what they are worth."""
    mask, weights = batch["response_mask"], importance_weights(batch, cap)  # (B, T) each
    figures = figures_of_older(batch, weights, mask, prefix) if "age" in batch else {}
    weights = weights[mask]  # (tokens,)
    capped = weights == cap  # in their own dtype: 1.1 has other bits in float64
    weights = weights.double()
    # the effective sample size (Kong, 1992)
    worth = weights.sum() ** 2 / (weights**2).sum().clamp(min=1e-30)  # tokens
    return figures | {"policy/importance": weights.mean().item(),
                      "policy/importance_capped": capped.double().mean().item(),
                      "policy/effective_tokens": (worth / len(weights)).item()}


def figures_of_older(batch, weights, mask, prefix):
    """
    Of a batch that an older policy has sampled: its KL to the policy of the update; and entropy and
    KL of metrics.summarize, which would be those of the older policy. weights: (B, T).
    """
    off = kl_estimate(batch["sampler_logprobs"], batch["old_logprobs"], "k3")
    columns = dict(entropy=-batch["old_logprobs"])
    if "ref_logprobs" in batch:
        columns["kl"] = batch["old_logprobs"] - batch["ref_logprobs"]
    return {"policy/off_policy_kl": masked_mean(off, mask).item()} | {
        f"{prefix}/{name}": (x * weights).sum(1).mean().item() for name, x in columns.items()}

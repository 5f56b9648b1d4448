"""The key importance_cap: how far the policy of an update is from the one that sampled."""
from formulas import importance_weights, kl_estimate, masked_mean


def figures_of_importance(batch, cap, prefix):
    """{metric: number} of a batch: its importance weights, and what they are worth."""
    mask, weights = batch["response_mask"], importance_weights(batch, cap)  # (B, T) each
    figures = {}
    if "age" in batch:  # entropy and KL of metrics.summarize would be those of the older policy
        off = kl_estimate(batch["sampler_logprobs"], batch["old_logprobs"], "k3")
        figures["policy/off_policy_kl"] = masked_mean(off, mask).item()
        columns = dict(entropy=-batch["old_logprobs"])
        if "ref_logprobs" in batch:
            columns["kl"] = batch["old_logprobs"] - batch["ref_logprobs"]
        for name, x in columns.items():
            figures[f"{prefix}/{name}"] = (x * weights).sum(1).mean().item()
    weights = weights[mask]  # (tokens,)
    capped = weights == cap  # in their own dtype: 1.1 has other bits in float64
    weights = weights.double()
    # the effective sample size (Kong, 1992)
    worth = weights.sum() ** 2 / (weights**2).sum().clamp(min=1e-30)  # tokens
    return figures | {"policy/importance": weights.mean().item(),
                      "policy/importance_capped": capped.double().mean().item(),
                      "policy/effective_tokens": (worth / len(weights)).item()}

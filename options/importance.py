"""The key importance_cap: how far the policy of an update is from the one that sampled."""
from loss import importance_weights, kl_estimate, masked_mean


def figures_of_importance(batch, cap):
    """{metric: number} of a batch: its importance weights (loss.py), and what they are worth."""
    mask, figures = batch["response_mask"], {}  # (B, T)
    if "age" in batch:  # an older policy has sampled it: from that one to that of the update
        off = kl_estimate(batch["sampler_logprobs"], batch["old_logprobs"], "k3")
        figures["policy/off_policy_kl"] = masked_mean(off, mask).item()
    weights = importance_weights(batch, cap)[mask]  # (tokens,)
    capped = weights == cap  # in their own dtype: 1.1 has other bits in float64
    weights = weights.double()
    # the effective sample size (Kong, 1992)
    worth = weights.sum() ** 2 / (weights**2).sum().clamp(min=1e-30)  # tokens
    return figures | {"policy/importance": weights.mean().item(),
                      "policy/importance_capped": capped.double().mean().item(),
                      "policy/effective_tokens": (worth / len(weights)).item()}

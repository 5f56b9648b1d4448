"""
The formulas: tensors in, tensors out. The losses are in the loop of ppo.py, in groups.py, and in
rm.py. A loss is the sum over the tokens divided by one count: the trained tokens of the whole
optimizer step, of all micro-batches and all ranks. In a mean of the micro-batches' means a token of
a micro-batch with few tokens would count more.

B responses in T columns, b of them in the W columns of a micro-batch: see the head of batches.py.
"""
import math

import torch


def masked_sum(x, mask):
    """The sum of x where mask is True. where, and not x * mask: NaN * 0 is NaN."""
    return torch.where(mask, x, 0).sum()


def masked_mean(x, mask):
    """The mean of x where mask is True; 0 where it never is. Convert a bool x by x.double()."""
    return masked_sum(x, mask) / mask.sum().clamp(min=1)


def masked_whiten(x, mask):
    """
    x (B, T), shifted and scaled to mean 0 and standard deviation 1 over all places where mask is
    True; 0 where it is False (N+ detail 25; the variance is the population's, as in OpenRLHF). x is
    the batch of all ranks, so that all have one objective; its size is about 1, for the 1e-8.
    """
    mean = masked_mean(x, mask)
    variance = masked_mean((x - mean) ** 2, mask)
    return torch.where(mask, (x - mean) * torch.rsqrt(variance + 1e-8), 0)


def importance_weights(mb, cap):
    """
    The factor of each token's policy loss, (b, W), where the sampler's probabilities q differ a
    little from the probabilities p of the training forward, as in 16 bits. It is min(p / q, cap),
    truncated importance sampling (Yao et al., "Your efficient RL framework secretly brings you
    off-policy RL training", 2025), without a gradient; 1 if cap = 0. PPO's ratio is another
    number: the policy's probability now, divided by p, both by the training forward (as in
    decoupled PPO, arXiv 2505.24298).

    mb: old_logprobs, log p; sampler_logprobs, log q; (b, W) each. For q = 0.2, 0.5 and p = 0.3, 0.4
    the weights are 1.5, 0.8, and with cap = 1.3 they are 1.3, 0.8.
    """
    if cap == 0:
        return 1.0
    return (mb["old_logprobs"] - mb["sampler_logprobs"]).detach().exp().clamp(max=cap)


def kl_estimate(logprobs, ref_logprobs, kind):
    """
    Estimates of KL(policy || reference) at each token, (B, T), from the one token that the policy
    sampled (Schulman, joschu.net/blog/kl-approx.html). p and q are its probabilities under policy
    and reference:

        kind   estimate             value                        as a loss, its gradient is
        k1     log(p/q)             unbiased, may be negative    0 on average: no penalty
        k2     log(p/q)^2 / 2       biased, low variance         that of KL(policy || reference)
        k3     q/p - 1 - log(q/p)   unbiased, never negative     that of KL(reference || policy)

    For p = 0.5 and q = 0.25: k1 = 0.693, k2 = 0.240, k3 = 0.193 nats. As a loss, k3 has the slope
    1 - q/p in log p, which nothing bounds: -22025 where q/p = e^10.
    """
    log_ratio = logprobs - ref_logprobs  # log(p/q)
    if kind == "k1":
        return log_ratio
    if kind == "k2":
        return 0.5 * log_ratio**2
    return torch.expm1(-log_ratio) + log_ratio  # k3; expm1(x): exp(x) - 1, exact for small x


def learning_rate_at(iteration, peak, warmup, max_iters, decay):
    """
    The learning rate of an iteration, counted from 0: a linear warm-up to peak over `warmup`
    iterations; then decay = "constant", or "linear" or "cosine", down to 0 at max_iters. Before
    iteration 0 it is 0. It depends only on the iteration: there is no scheduler to save.
    """
    if iteration < max(warmup, 0):
        return peak * max(iteration + 1, 0) / max(warmup, 1)
    progress = (iteration - warmup) / max(max_iters - warmup, 1)  # from 0 to 1
    share = {"constant": 1.0,
             "linear": 1 - progress,
             "cosine": 0.5 + 0.5 * math.cos(math.pi * progress)}[decay]
    return peak * share

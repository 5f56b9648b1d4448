"""
The formulas: log-probs, KL estimators, clipped losses, aggregation. Tensors in, tensors out; no configuration, no globals.

Losses come back a token at a time, (B, R), 0 where the mask is False. The script sums them and divides by one count: the
trained tokens of the whole optimizer step, over all micro-batches and all ranks. A mean of means weighs tokens by accident.
"""
import math

import torch

from model import at_least_float32


def scaled_logits(logits, temperature=1.0, vocab_size=None):
    """
    The distribution that is sampled, trained and compared: logits (..., V) / temperature in at least float32, with the ids
    from vocab_size on (the padding of a vocabulary) impossible. Sampler and scorers all pass here, so they agree.
    """
    logits = at_least_float32(logits)
    logits = logits if temperature == 1.0 else logits / temperature  # spare a copy of the largest tensor there is
    if vocab_size is not None and vocab_size < logits.shape[-1]:
        padding = torch.arange(logits.shape[-1], device=logits.device) >= vocab_size
        logits = logits.masked_fill(padding, -torch.inf)
    return logits


def logprobs_from_logits(logits, tokens):
    """log p(tokens) under logits (B, R, V), tokens (B, R) -> (B, R). No shift: logits[:, t] must be those that chose token t."""
    logits = at_least_float32(logits)
    return logits.gather(-1, tokens[..., None]).squeeze(-1) - logits.logsumexp(-1)


def logprobs_and_entropy(hidden, weight, tokens, temperature=1.0, vocab_size=None, chunk=0, entropy=True):
    """
    log p(tokens) and the entropy of each distribution, (b, R) both, from the states hidden (b, R, d) that the LM head with this
    weight (V, d) reads. tokens (b, R). entropy=False: 0 instead of it. chunk > 0: so many tokens' logits at a time, computed
    again in the backward pass, so that all (b, R, V) of them never exist.
    """
    settings = temperature, vocab_size, entropy
    if chunk == 0:
        # not *settings: the tuple of arguments would hold the unscaled logits as long as the call takes
        return of_logits(torch.nn.functional.linear(hidden, weight), tokens, temperature, vocab_size, entropy)
    logprobs, entropies = HeadInChunks.apply(hidden.flatten(0, 1), weight, tokens.flatten(), chunk, settings)
    return logprobs.view(tokens.shape), entropies.view(tokens.shape)


def of_logits(logits, tokens, temperature, vocab_size, entropy):
    """logprobs_and_entropy, from the logits (..., V) of tokens (...)."""
    logits = scaled_logits(logits, temperature, vocab_size)
    logprobs = logprobs_from_logits(logits, tokens)
    return logprobs, entropy_from_logits(logits) if entropy else torch.zeros_like(logprobs)


class HeadInChunks(torch.autograd.Function):
    """
    logprobs_and_entropy for hidden (N, d), tokens (N,). Rather than by torch's checkpoint for each chunk: what is small and stays
    is allocated before what is large and goes, or the heap fills with holes a little too small for the next chunk.
    """

    @staticmethod
    def forward(ctx, hidden, weight, tokens, chunk, settings):
        kind = hidden.device.type
        ctx.save_for_backward(hidden, weight, tokens)
        ctx.rest = chunk, settings, (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        results = hidden.new_empty(2, len(hidden), dtype=torch.promote_types(hidden.dtype, torch.float32))
        for i in range(0, len(hidden), chunk):
            logits = torch.nn.functional.linear(hidden[i:i + chunk], weight)  # (chunk, V)
            results[0, i:i + chunk], results[1, i:i + chunk] = of_logits(logits, tokens[i:i + chunk], *settings)
        return results[0].clone(), results[1].clone()

    @staticmethod
    def backward(ctx, *outer):
        (hidden, weight, tokens), (chunk, settings, (kind, dtype, lowered)) = ctx.saved_tensors, ctx.rest
        grad_hidden, grad_weight = (torch.zeros_like(x) if needed else None
                                    for x, needed in zip((hidden, weight), ctx.needs_input_grad, strict=False))
        temperature, vocab_size, entropy = settings
        for i in range(0, len(hidden), chunk):
            h, t = hidden[i:i + chunk], tokens[i:i + chunk, None]
            for_logprob, for_entropy = (g[i:i + chunk, None] for g in outer)
            with torch.autocast(kind, dtype, enabled=lowered):  # as it was in the forward pass
                logprobs = scaled_logits(torch.nn.functional.linear(h, weight), temperature, vocab_size)  # (chunk, V), logits yet
            logprobs = logprobs - logprobs.logsumexp(-1, keepdim=True)
            # d log p(t) / d logits = (1 at t) - p, and d entropy / d logits = -p (log p + entropy)
            grad = logprobs.exp()
            if entropy:
                finite = logprobs.masked_fill_(logprobs == -torch.inf, 0)
                inner = (grad * finite).sum(-1, keepdim=True)  # minus the entropy
                grad.mul_(finite.sub_(inner).mul_(-for_entropy).sub_(for_logprob))
            else:
                grad.mul_(-for_logprob)
            grad.scatter_add_(-1, t, for_logprob.to(grad.dtype)).div_(temperature)
            if grad_hidden is not None:
                grad_hidden[i:i + chunk] = grad.to(hidden.dtype) @ weight.to(hidden.dtype)
            if grad_weight is not None:
                grad_weight.addmm_(grad.t().to(weight.dtype), h.to(weight.dtype))
        return grad_hidden, grad_weight, None, None, None


def entropy_from_logits(logits):
    """Entropy in nats of each distribution: logits (..., V) -> (...)."""
    logits = at_least_float32(logits)
    logprobs = logits - logits.logsumexp(-1, keepdim=True)
    # an impossible token (logit -inf) adds p log p = 0, not 0 * -inf = NaN
    return -(logprobs.exp() * logprobs.masked_fill(logprobs == -torch.inf, 0)).sum(-1)


def masked_sum(x, mask):
    """Sum of x where mask is True. Through where, for NaN * 0 is NaN."""
    return torch.where(mask, x, 0).sum()


def masked_mean(x, mask):
    """Mean of x where mask is True; 0 when it never is."""
    return masked_sum(x, mask) / mask.sum().clamp(min=1)


def masked_whiten(x, mask):
    """
    x (B, R) to mean 0 and standard deviation 1 over all True positions, 0 elsewhere (N+ detail 25; population variance, as
    OpenRLHF). Give it the global batch: whitening each rank by itself would train each rank on another objective.
    """
    mean = masked_mean(x, mask)
    variance = masked_mean((x - mean) ** 2, mask)
    return torch.where(mask, (x - mean) * torch.rsqrt(variance + 1e-8), 0)


def gap(log_ratio, mask, dtype):
    """How far log-ratios (B, R) that are 0 on paper are from 0: the largest, or, as 16 bits round so much, the mean."""
    log_ratio = torch.where(mask, log_ratio.detach().abs(), 0)
    if dtype in ("bfloat16", "float16"):
        return masked_mean(log_ratio, mask)
    return log_ratio.max() if log_ratio.numel() else log_ratio.sum()  # of no rows, 0


def gap_limit(dtype, temperature):
    """
    How large rounding may make that gap, in nats. Below temperature 1 it grows: log-probs are of logits / temperature, and
    so are their errors.
    """
    return {"float64": 1e-10, "float32": 1e-4}.get(dtype, 0.02) / min(temperature, 1.0)


def kl_estimate(logprobs, ref_logprobs, kind):
    """
    Estimate of KL(policy || reference) at each token from one sample (Schulman, joschu.net/blog/kl-approx.html), (B, R):
    k1 = log(p/q), unbiased, may be negative; k2 = log(p/q)^2 / 2, biased, low variance; k3 = q/p - 1 - log(q/p), unbiased and
    >= 0. As a *loss* their gradients differ from their values: k1's is 0 on average, k2's is the KL's, k3's that of KL(q || p).
    """
    log_ratio = logprobs - ref_logprobs
    if kind == "k1":
        return log_ratio
    if kind == "k2":
        return 0.5 * log_ratio**2
    if kind == "k3":
        return torch.expm1(-log_ratio) + log_ratio
    raise ValueError(f"kind = {kind!r}; one of k1, k2, k3")


def policy_loss(logprobs, old_logprobs, advantages, response_mask, cliprange, cliprange_high=None, dual_clip=0.0,
                importance="token"):
    """
    PPO's clipped surrogate (arXiv 1707.06347, equation 7), as a loss: max(-A r, -A clip(r, 1 - eps, 1 + eps)).
    All (B, R). Returns the loss a token and whether clipping took the token's gradient away.

    cliprange_high: another eps above 1 (clip-higher: DAPO, arXiv 2503.14476, eq. 10). dual_clip: where A < 0 the loss stays
    below -A dual_clip, so that a token that has become likely against all advice does not rule the step (arXiv 1912.09729,
    eq. 5), 0 = off. importance: "token", or "sequence": r is the geometric mean over a response's tokens (GSPO, arXiv
    2507.18071, eq. 7), which needs the whole response in its row.
    """
    log_ratio = torch.where(response_mask, logprobs - old_logprobs, 0)  # before exp: garbage under the mask may overflow
    if importance == "sequence":
        mean = log_ratio.sum(1, keepdim=True) / response_mask.sum(1, keepdim=True).clamp(min=1)
        log_ratio = torch.where(response_mask, mean, 0)
    advantages = torch.where(response_mask, advantages, 0)
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - cliprange, 1 + (cliprange if cliprange_high is None else cliprange_high))
    losses, gone = torch.maximum(unclipped, clipped), clipped > unclipped
    if dual_clip > 0:
        bound = -advantages * dual_clip
        gone = gone | (advantages < 0) & (losses > bound)
        losses = torch.where(advantages < 0, torch.minimum(losses, bound), losses)
    return losses, gone


def value_loss(values, old_values, returns, response_mask, cliprange_value):
    """
    Half the squared error, with the new value kept within cliprange_value of the old one (OpenAI baselines, ppo2):
    max((V - R)^2, (clip(V, V_old - eps, V_old + eps) - R)^2) / 2. cliprange_value = 0 turns the clipping off.
    All (B, R). Returns the loss a token and whether the clipped term won.
    """
    values, old_values, returns = (torch.where(response_mask, x, 0) for x in (values, old_values, returns))
    squared = (values - returns) ** 2
    if cliprange_value == 0:
        return 0.5 * squared, torch.zeros_like(response_mask)
    near = old_values + (values - old_values).clamp(-cliprange_value, cliprange_value)
    clipped = (near - returns) ** 2
    # by an ulp, clipped may win where near is values, rounded
    return 0.5 * torch.maximum(squared, clipped), (clipped > squared) & ((values - old_values).abs() > cliprange_value)


def preference_loss(chosen, rejected):
    """Bradley-Terry: -log sigmoid(score of the chosen - score of the rejected), (B,) each (arXiv 2009.01325, section 3.4)."""
    return -torch.nn.functional.logsigmoid(chosen - rejected)


def update_moments(moments, x):
    """
    Count, mean and sum of squared deviations of all numbers so far, from those before and a tensor of new ones (Chan, Golub
    and LeVeque, 1979, eq. 2.1). moments: [count, mean, M2], plain numbers, [0, 0.0, 0.0] at first; so is the result.
    """
    (n, mean, m2), x = moments, x.double()
    k, new_mean = x.numel(), x.mean().item()
    delta = new_mean - mean
    return [n + k, mean + delta * k / (n + k), m2 + (x - new_mean).square().sum().item() + delta**2 * n * k / (n + k)]


def standard_deviation(moments):
    """Of the numbers in moments (see update_moments); 1 while they are all the same."""
    n, _, m2 = moments
    return (m2 / n) ** 0.5 if m2 > 0 else 1.0


def adapt_kl_coef(kl_coef, kl, target, horizon, episodes):
    """
    The proportional controller of Ziegler et al. (arXiv 1909.08593, section 2.2): kl is the measured KL a *response* (summed
    over its tokens, nats), target what it should be; kl_coef changes by at most 20 % in `horizon` episodes.
    Of 5 horizons or more at once it would make 0 or less: ppo.py refuses those keys.
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return kl_coef * (1 + error * episodes / horizon)


def learning_rate_at(iteration, peak, warmup, max_iters, shape):
    """
    The learning rate of an iteration, counted from 0: linear warm-up to peak over `warmup` iterations, then constant, or down
    to 0 at max_iters in a straight line or half a cosine. A function of the iteration, so there is no scheduler to save.
    """
    if iteration < warmup:
        return peak * (iteration + 1) / warmup
    progress = (iteration - warmup) / max(max_iters - warmup, 1)
    return peak * {"constant": 1.0, "linear": 1 - progress, "cosine": 0.5 + 0.5 * math.cos(math.pi * progress)}[shape]

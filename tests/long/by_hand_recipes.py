"""
What recipes of 2025 and 2026 compute, by hand: what takes the place of by_hand.py's functions in
test_recipes.py, and the cases.
"""
import torch

import by_hand
from by_hand import decode, encode, flat, mean, seen
from test_by_hand import GRPO
from tiny import PROMPTS

clipped_surrogate, grpo_update = by_hand.clipped_surrogate, by_hand.grpo_update
models_of, summary = by_hand.models_of, by_hand.summary


def soft_gate(ratio, advantage, low, high):
    """SAPO (arXiv 2511.20347) as a loss; the bound is PPO's."""
    tau = 1.0 if advantage > 0 else 1.05
    gate = 4 / tau / (1 + torch.exp(-tau * (ratio - 1)))
    return -advantage * gate, clipped_surrogate(ratio, advantage, low, high)[1]


def held_entropy(c, models, adam, batch, iteration):
    """The bonus of an iteration depends on the entropies of those before it."""
    if iteration == 0:
        c.walk, c.step, c.entropy_coef = c.entropy_coef, c.entropy_coef, 0.0
    figures = grpo_update(c, models, adam, batch, iteration)
    entropy = -mean(flat(r.old for r in batch))
    seen["too low" if entropy <= 2.2 else "high enough"] += 1
    c.walk = max(0.0, c.walk + c.step if entropy <= 2.2 else c.walk - c.step)
    c.entropy_coef = c.walk if entropy <= 2.2 else 0.0
    return figures


def kept_models(c):
    c.models = models_of(c)
    return c.models


def summary_with_hints(c, batch, prefix):
    """In training the reference reads what the policy has not read: a solution, then the prompt."""
    for i, r in enumerate(batch) if prefix == "objective" else ():
        others = batch[i - i % c.group_size:][:c.group_size]
        found = [x.text for x in others if x is not r and x.score >= 0.5][:1]
        prompt = decode(r.prompt)
        if len(prompt) % 2:
            found = [PROMPTS[5 * PROMPTS.index(prompt) % 12]]  # the row's answer
        r.left_out = not found
        seen["no hint" if r.left_out else "answer" if len(prompt) % 2 else "another's"] += 1
        if found:
            with torch.no_grad():
                logprobs, _ = by_hand.logprobs_of(
                    c.models.reference, encode(f"{found[0]}\n{prompt}"), r.response, c.temperature)
            r.reference = [x.item() for x in logprobs]
    figures = summary(c, batch, prefix)
    if prefix == "objective":
        figures["objective/hinted"] = mean([not r.left_out for r in batch])
    return figures


def from_the_teacher(c, groups):
    for r in flat(groups):
        r.advantages = [c.kl_coef * (q - p) for p, q in zip(r.old, r.reference, strict=True)]
        r.judged = r.score + sum(r.advantages)
        r.advantage = any(r.advantages)


def losses_of_tokens(c, models, r, weight):
    """by_hand.grpo_losses, where each token has its own advantage."""
    logprobs, _ = by_hand.logprobs_of(models.policy, r.prompt, r.response, c.temperature)
    total, figures = 0.0, []
    for logprob, old, reference, advantage in zip(
            logprobs, r.old, r.reference, r.advantages, strict=True):
        loss, bound = clipped_surrogate(
            torch.exp(logprob - old), advantage, c.cliprange, c.cliprange_high)
        seen[bound] += 1
        total = total + loss
        figures.append({
            "loss/policy": by_hand.number(loss), "loss/kl": logprob.item() - reference,
            "policy/clipfrac": bool(bound),
            "policy/approx_kl": by_hand.kl_estimate(old, logprob.item(), "k3")})
    (total * weight).backward()
    return figures


# diffs, texts that are changed in them, script, keys, functions by hand, branches -----------------

CASES = {
    "SAPO, an entropy target": (
        ["SAPO", "entropy target"], [("0.2 * trained", "2.2 * trained")], "grpo",
        GRPO | dict(entropy_coef=0.05, num_iterations=3, max_iters=5),
        dict(clipped_surrogate=soft_gate, grpo_update=held_entropy),
        ["above", "below", "too low", "high enough"]),
    # prompts of odd length have a demonstration, their answer
    "self_distillation": (
        ["self_distillation"],
        [("SOLVED = 1.0", "SOLVED = 0.5"), ('[row["demonstration"]] if "demonstration" in row',
                                            '[row["answer"]] if len(row["prompt"]) % 2')], "grpo",
        GRPO | dict(kl_in="reward", kl_estimator="k1", kl_coef=0.7, ref_path="policy", max_iters=3,
                    batch_size=9),
        dict(models_of=kept_models, summary=summary_with_hints,
             find_group_advantages=from_the_teacher, grpo_losses=losses_of_tokens),
        ["above", "below", "no hint", "answer", "another's"])}

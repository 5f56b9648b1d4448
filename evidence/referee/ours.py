"""
The formulas of quartet, from its functions and from the lines of ppo.py's loss, in float64; each
returns one vector. Their keywords are choices that others make: see trainers.CHOICES.
"""
import os
import types
from functools import partial

import torch

import formulas
import groups
from evidence.referee.cut import Module
from gae import compute_gae
from grading import forms

G, T, EPS, LOW, HIGH = 4, 10, 0.2, 0.2, 0.28  # a group; columns; clip ranges
GAMMA, LAM, CAP = 0.97, 0.9, 1.5
STEPS = [1, 80, 81, 90, 100]  # tokens of responses, at most 100


def make_batch(seed, rows_without_tokens=False):
    """
    B = 12 responses in 3 groups, T columns: with padding, gaps, one token, equal scores, wild
    ratios. (B, T): mask, and m, its float; span, mask without gaps; last, 1 at a last token;
    log-probs of now, old, ref, sampler; rewards, values; no number is 0 only because mask is False.
    (B,): scores.
    """
    torch.manual_seed(seed)
    B = 3 * G
    mask = torch.arange(T) < torch.randint(2, T, (B, 1))
    mask[0], mask[1] = True, torch.arange(T) == 0  # the longest one; a single token
    mask[2, 0], mask[5, 2:4], mask[6, 1], mask[8, 1:4] = False, False, False, False
    mask[5, 4:7], mask[6, 2:5], mask[8, 4:8], mask[2, 1:3] = True, True, True, True
    if rows_without_tokens:
        mask[3] = mask[9] = False
    draw = lambda *shape: torch.randn(*shape, dtype=torch.float64)  # noqa: E731
    b = types.SimpleNamespace(
        mask=mask, m=mask.double(), rewards=draw(B, T), values=draw(B, T), old_values=draw(B, T),
        old=draw(B, T) - 2, ref=draw(B, T) - 2, sampler=draw(B, T) - 2,
        scores=(draw(B) * 2).round(decimals=1), advantages=draw(B, 1).expand(B, T),
        index=[f"prompt {i // G}" for i in range(B)])
    b.span = mask.flip(1).cumsum(1).flip(1) > 0  # up to the last token: gaps belong to it
    b.logprobs = b.old + 0.3 * draw(B, T)
    b.scores[2 * G:] = 0.1  # equal scores: a group that teaches nothing
    b.last = b.m * (b.m.cumsum(1) == b.m.sum(1, keepdim=True))  # 1 at each last token
    for row, shift in ((0, 25.0), (0, -25.0), (4, 12.0), (4, -12.0), (10, 3.0)):
        column = int(shift) % 2 + (shift < 0) if row else 3 + (shift < 0)
        b.logprobs[row, column], b.ref[row, column] = b.old[row, column] + shift, b.old[row, column]
    return b


def graded(loss_of, b, at="logprobs"):
    """A loss, and its gradient at each token. loss_of: a function of the tensor b.AT."""
    leaf = getattr(b, at).clone().requires_grad_()
    total = loss_of(leaf)
    total.backward()
    return torch.cat([total.detach().double().view(1), leaf.grad[b.mask]])


FORMULAS = vars(formulas)
with open(f"{os.path.dirname(formulas.__file__)}/ppo.py", encoding="utf-8") as page:
    PPO = Module(page.read(), "ppo.py")


# PPO ----------------------------------------------------------------------------------------------

def gae(b, steps="", cut=False):
    rewards, values, mask, last = b.rewards.clone(), b.values, b.mask, b.mask[:, -1]
    if steps == "empty":  # a gap is a step of reward 0 and value 0
        rewards, values, mask = rewards * b.m, values * b.m, b.span
    elif steps == "all":
        mask = torch.ones_like(mask)
    if cut:  # a value behind the last token of a row that was cut
        rewards[:, -1] += GAMMA * last * b.old_values[:, 0]
    return compute_gae(rewards, values, mask, GAMMA, LAM)[0][b.mask]


def whiten(b, minus=0, outside=0.0):
    if minus or outside:
        kept = b.rewards[b.mask]
        variance = (kept - kept.mean()).square().sum() / (len(kept) - minus)
        return (kept - kept.mean()) / ((variance + 1e-8 * (not outside)).sqrt() + outside)
    return formulas.masked_whiten(b.rewards, b.mask)[b.mask]


def kl(b, kind, most=torch.inf):
    def total(x):
        return formulas.kl_estimate(x, b.ref, kind).clamp(-most, most)[b.mask].mean()
    return graded(total, b)


def clip(b, dual=False):
    def total(logprobs):
        found = PPO.lines(
            "ratio = ", "pg_loss = ", **FORMULAS, logprobs=logprobs, m=b.mask, cliprange=EPS,
            importance_cap=0, token_count=b.mask.sum(),
            mb=dict(old_logprobs=b.old, advantages=b.advantages))
        bounded = torch.minimum(found.pg_losses, -3 * b.advantages)
        bounded = torch.where(b.advantages < 0, bounded, found.pg_losses)
        return bounded[b.mask].mean() if dual else found.pg_loss
    return graded(total, b)


def value_loss(b, rows=False):
    def total(values):
        found = PPO.lines(
            "change = ", "vf_loss = ", **FORMULAS, values=values, m=b.mask, vf_coef=1.0,
            value_range=EPS, unit=1.0, token_count=b.mask.sum(),
            mb=dict(values=b.old_values, returns=b.rewards))
        of_rows = (found.vf_losses * b.m).sum(1) / b.m.sum(1)
        return of_rows.mean() if rows else found.vf_loss
    return graded(total, b, "values")


# GRPO and its relatives ---------------------------------------------------------------------------

def per_token(b, advantages):
    """Advantages, (B,), at each token of their rows."""
    return advantages[:, None].expand_as(b.mask)[b.mask]


def advantages(b, scale_by="std", baseline="mean", epsilon=1e-4):
    found = groups.group_advantages(b.scores, G, scale_by, baseline)
    deviation = b.scores.view(-1, G).std(1).repeat_interleave(G)
    return per_token(b, found * (deviation + 1e-4) / (deviation + epsilon))


def aggregation(b, kind, empty=False):
    """empty: rows without tokens count."""
    weights = groups.token_weights(b.mask, kind, 2 * T)
    share = b.mask.any(1).double().mean() if empty else 1
    return graded(lambda x: (x * weights * share)[b.mask].sum(), b)


def grpo_loss(b, losses, kind="token-mean", low=LOW):
    def total(logprobs):
        found, _ = losses(logprobs, b.old, b.advantages, b.mask, low, HIGH)
        return (found * groups.token_weights(b.mask, kind, T))[b.mask].sum()
    return graded(total, b)


def importance(b):
    mb = dict(old_logprobs=b.old, sampler_logprobs=b.sampler)
    return formulas.importance_weights(mb, CAP)[b.mask]


# the rest -----------------------------------------------------------------------------------------

def length(b):
    mask = torch.arange(100) < torch.tensor(STEPS)[:, None]
    return forms.length(dict(response_mask=mask, max_new_tokens=100))


# {row: (function, where it stands, its source)}
ROWS = {
    "GAE, with gaps": (gae, "gae.py: compute_gae", "1506.02438, eq. 16"),
    "whitening": (whiten, "formulas.py: masked_whiten", "2403.17031, detail 25"),
    "k1": (partial(kl, kind="k1"), "formulas.py: kl_estimate", "joschu.net/blog/kl-approx.html"),
    "k2": (partial(kl, kind="k2"), "the same", "the same"),
    "k3": (partial(kl, kind="k3"), "the same", "the same"),
    "clipped loss": (clip, "ppo.py", "1707.06347, eq. 7"),
    "value loss": (value_loss, "ppo.py", "2403.17031"),
    "GRPO": (advantages, "groups.py: group_advantages", "2402.03300, 4.1.2"),
    "Dr. GRPO": (partial(advantages, scale_by="none"), "the same", "2503.20783, 3.2"),
    "RLOO": (partial(advantages, scale_by="none", baseline="others"), "the same",
             "2402.14740, eq. 7"),
    "token-mean": (partial(aggregation, kind="token-mean"), "groups.py: token_weights",
                   "see there"),
    "seq-mean-token-mean": (partial(aggregation, kind="seq-mean-token-mean"), "the same",
                            "2402.03300, eq. 3"),
    "seq-mean-token-sum-norm": (partial(aggregation, kind="seq-mean-token-sum-norm"), "the same",
                                "2503.20783, listing 1"),
    "GSPO": (partial(grpo_loss, losses=groups.gspo_losses, kind="seq-mean-token-mean"),
             "groups.py: gspo_losses", "2507.18071, eq. 5 to 7"),
    "CISPO": (partial(grpo_loss, losses=groups.cispo_losses, low=1.0), "groups.py: cispo_losses",
              "2506.13585, eq. 4, 5"),
    "importance weights": (importance, "formulas.py: importance_weights", "Yao et al., 2025"),
    "DAPO's length": (length, "grading/forms.py", "2503.14476, eq. 13")}

"""
The formulas of quartet, from its functions and from the lines of its pages, in float64; each
returns one vector. Their keywords are choices that others make: see trainers.CHOICES.
"""
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import types
from functools import partial

# Python looks for modules in this file's folder; ours are two folders above it.
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, ROOT)

import torch  # noqa: E402
from cut import Module  # noqa: E402

import groups  # noqa: E402
import formulas  # noqa: E402
from gae import compute_gae  # noqa: E402

G, T, EPS, LOW, HIGH = 4, 10, 0.2, 0.2, 0.28  # a group; columns; clip ranges
GAMMA, LAM, BETA, CAP = 0.97, 0.9, 0.1, 1.5
MOVES = [(12.0, 512), (6.6, 512), (1.0, 512), (12.0, 20_000)]  # KL, responses: of a controller
STEPS = [1, 80, 81, 90, 100]  # tokens of responses, at most 100
ROWS_MEAN = "seq-mean-token-mean"
FORMULAS = vars(formulas) | vars(groups)


def make_batch(seed, rows_without_tokens=False):
    """
    B = 12 responses in 3 groups, T columns: with padding, gaps, one token, equal scores, wild
    ratios. (B, T): mask, and m, its float; span, mask without gaps; last, 1 at a last token;
    log-probs of now, old, ref, sampler; rewards, values; no number is 0 only because mask is False.
    (B,): scores; other, of a second reward; right, 1 or 0. pairs (8, 4): log-probs of chosen and
    rejected, then those of the reference.
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
        scores=(draw(B) * 2).round(decimals=1), other=draw(B), advantages=draw(B, 1).expand(B, T),
        pairs=draw(8, 4), index=[f"prompt {i // G}" for i in range(B)])
    b.span = mask.flip(1).cumsum(1).flip(1) > 0  # up to the last token: gaps belong to it
    b.logprobs = b.old + 0.3 * draw(B, T)
    b.scores[2 * G:] = 0.1  # equal scores: a group that teaches nothing
    b.right = (b.scores > 0).double()
    chosen, rejected, *of_reference = b.pairs.T
    b.margin = chosen - rejected - of_reference[0] + of_reference[1]
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


@functools.cache
def page(name, recipe="", numbers=()):
    """The Module of a file, with a diff of recipes/. numbers: pairs of an old text and a new."""
    with tempfile.TemporaryDirectory() as folder:
        file = shutil.copy(f"{ROOT}/{name}", folder)
        if recipe:
            diff = f"{ROOT}/recipes/{recipe}.diff"
            for command in (["init", "-q"], ["apply", f"--include={name}", diff]):
                subprocess.run(["git", "-C", folder, *command], check=True)
        with open(file, encoding="utf-8") as f:
            text = f.read()
    for old, new in numbers:
        text = text.replace(old, new)
    return Module(text, name)


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


def whiten(b, x=None, minus=0, epsilon=1e-8, outside=0.0):
    x = b.rewards if x is None else x
    if minus or outside:
        kept = x[b.mask]
        variance = (kept - kept.mean()).square().sum() / (len(kept) - minus)
        return (kept - kept.mean()) / ((variance + epsilon * (not outside)).sqrt() + outside)
    return formulas.masked_whiten(x, b.mask)[b.mask]


def kl(b, kind="k1", most=None):
    def total(x):
        found = formulas.kl_estimate(x, b.ref, kind)
        return (found if most is None else found.clamp(-most, most))[b.mask].mean()
    return graded(total, b)


def clip(b, clamp=None, dual=False):
    def total(logprobs):
        if clamp:
            logprobs = b.old + (logprobs - b.old).clamp(-clamp, clamp)
        return page("ppo.py", "dual_clip" if dual else "").lines(
            "ratio = ", "pg_loss = ", **FORMULAS, logprobs=logprobs, m=b.mask, cliprange=EPS,
            importance_cap=0, token_count=b.mask.sum(), mb=dict(
                old_logprobs=b.old, advantages=b.advantages, response_mask=b.mask)).pg_loss
    return graded(total, b)


def value_loss(b, rows=False):
    def total(values):
        found = page("ppo.py").lines(
            "change = ", "vf_loss = ", **FORMULAS, values=values, m=b.mask, vf_coef=1.0,
            value_range=EPS, unit=1.0, token_count=b.mask.sum(),
            mb=dict(values=b.old_values, returns=b.rewards))
        return (found.vf_losses * b.m / b.m.sum(1, keepdim=True)).sum(1).mean() if rows else (
            found.vf_loss)
    return graded(total, b, "values")


def kl_controller(b, cap=True):
    moved = []
    for kl_now, responses in MOVES:
        run = types.SimpleNamespace(state={})
        page("ppo.py", "kl_controller").lines(
            "error = ", "run.state['kl_factor']", run=run, record={"objective/kl": kl_now},
            kl_target=6.0, kl_factor=1.0, batch_size=responses)
        moved.append(run.state["kl_factor"])
    if not cap:
        moved[3] = 1 + 0.2 * 20_000 / 10_000
    return torch.tensor(moved, dtype=torch.float64)


# advantages ---------------------------------------------------------------------------------------

def per_token(b, advantages):
    return advantages[:, None].expand_as(b.mask)[b.mask]


def advantages(b, recipe="", scale_by="std", baseline="mean", batch=None, terms=()):
    """The advantages, (B,), that the page has with a recipe."""
    space = dict(shape_scores=lambda batch: b.scores, group_size=G, scale_by=scale_by,
                 baseline=baseline, batch=batch, terms=terms, mask=b.mask, kl_in="loss", kl_coef=0,
                 reward_names=[name for _, name, _ in terms], missing_eos_penalty=0)
    return page("grpo.py", recipe).lines(
        "scores = shape_scores", "parallel.check", **FORMULAS | space).advantages


def of_groups(*how):
    """A row: advantages by groups."""
    return lambda b: per_token(b, advantages(b, *how))


def divided(b, advantages, divisor, epsilon):
    """Advantages where epsilon is added to the divisor of each group, (B / G,), and not 1e-4."""
    divisor = divisor.repeat_interleave(G)
    return per_token(b, advantages * (divisor + 1e-4) / (divisor + epsilon))


def grpo(b, epsilon=1e-4):
    return divided(b, advantages(b), b.scores.view(-1, G).std(1), epsilon)


def maxrl(b, epsilon=1e-4):
    b = types.SimpleNamespace(**vars(b) | dict(scores=b.right))
    return divided(b, advantages(b, "maxrl"), b.right.view(-1, G).mean(1), epsilon)


def reinforce(b, minus=0, resets=False):
    """REINFORCE++ without a baseline: PPO with values of 0, gamma = lam = 1."""
    rewards, mask = b.rewards, b.mask
    if resets:  # what comes behind a gap does not count before it
        returns = torch.zeros_like(rewards)
        for t in reversed(range(T)):
            later = returns[:, t + 1] * b.m[:, t + 1] if t + 1 < T else 0
            returns[:, t] = rewards[:, t] * b.m[:, t] + later
    else:
        returns, _ = compute_gae(rewards, torch.zeros_like(rewards), mask, 1, 1)
    return whiten(b, returns, minus)


def reinforce_baseline(b, tokens=False, minus=0):
    if tokens:
        return whiten(b, advantages(b, scale_by="none")[:, None].expand_as(b.mask), minus)
    return per_token(b, advantages(b, "reinforce_pp"))


def gdpo(b, tokens=False, epsilon=1e-4, minus=1):
    rewards, terms = {"a": b.scores, "b": b.other}, [(1.0, "a", None), (0.5, "b", None)]
    if not tokens and epsilon == 1e-4:
        batch = {f"reward/{name}": x for name, x in rewards.items()}
        return per_token(b, advantages(b, "gdpo", batch=batch, terms=terms))
    each = [x.view(-1, G) for x in rewards.values()]
    mixed = sum(weight * ((x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + epsilon))
                for weight, x in zip((1.0, 0.5), each, strict=True)).flatten()
    if tokens:
        return whiten(b, mixed[:, None].expand_as(b.mask), minus)
    return per_token(b, (mixed - mixed.mean()) / (mixed.std() + epsilon))


# losses of a response -----------------------------------------------------------------------------

def aggregation(b, kind="", empty=False):
    """kind "": of recipes/token_sum.diff. empty: rows without tokens count."""
    weights = groups.token_weights(b.mask, kind, 2 * T) if kind else page(
        "grpo.py", "token_sum").lines("weights = ", "weights = ", counted=b.mask,
                                      index=torch.arange(len(b.mask))).weights
    share = b.mask.any(1).double().mean() if empty else 1
    return graded(lambda x: (x * weights * share)[b.mask].sum(), b)


def prompt_mean(b):
    space = dict(counted=b.mask, index=torch.arange(len(b.mask)), group_size=G)
    found = page("grpo.py", "every_prompt").lines(
        "weights, group = ", "weights = weights / weights.sum", **FORMULAS | space)
    return graded(lambda x: (x * found.weights)[b.mask].sum(), b)


def grpo_loss(b, recipe="", kind="token-mean", low=LOW, high=HIGH, clamp=None, more=(), numbers=(),
              **keys):
    weights = groups.token_weights(b.mask, kind, T)
    space = FORMULAS | dict(
        loss_type="clip", importance_cap=0, cliprange=low, m=b.mask, cliprange_high=high) | keys
    name = {"clip": "clipped"}.get(space["loss_type"], space["loss_type"])
    space["LOSSES"] = {space["loss_type"]: getattr(page("groups.py", recipe), f"{name}_losses")}

    def total(logprobs):
        if clamp:
            logprobs = b.old + (logprobs - b.old).clamp(-clamp, clamp)
        first = "log_ratio = " if recipe == "kl_cov" else "pg_losses, pg_clipped = "
        return page("grpo.py", recipe, numbers).lines(
            first, "pg_loss = ", **space, logprobs=logprobs,
            mb=dict(more, old_logprobs=b.old, advantages=b.advantages, weights=weights,
                    response_mask=b.mask, sampler_logprobs=b.sampler)).pg_loss
    return graded(total, b)


def gspo_weighted(b, own=False):
    """GSPO with importance_cap; own: each token keeps its weight. The loss is the same."""
    how = dict(kind=ROWS_MEAN, loss_type="gspo")
    found = grpo_loss(b, **how, importance_cap=CAP)
    return torch.cat([found[:1], grpo_loss(b, **how)[1:] * importance(b)]) if own else found


def covariance(b, recipe, name, numbers=()):
    """A recipe that chooses tokens of the batch; the log-probs of sampling are those of now."""
    batch = dict(advantages=b.advantages, sampler_logprobs=b.logprobs)
    page("grpo.py", recipe, numbers).lines(
        "batch['counted'] = ", f"batch['{name}'] = ", **FORMULAS, batch=batch, mask=b.mask,
        left_out=torch.zeros(len(b.mask), dtype=torch.bool),
        permutation=lambda n, *_: torch.arange(n), seed=0, iteration=0)
    return grpo_loss(b, recipe, high=LOW, more={name: batch[name]})


def clip_cov(b):
    """With all in the range drawn. The gradient alone: verl's loss also has what PPO clips."""
    return covariance(b, "clip_cov", "stays", (("0.0002 *", "1.0 *"),))[1:]


def importance(b, recipe=""):
    mb = dict(old_logprobs=b.old, sampler_logprobs=b.sampler, response_mask=b.mask)
    return page("formulas.py", recipe).importance_weights(mb, CAP)[b.mask]


# the rest -----------------------------------------------------------------------------------------

def length(b):
    mask = torch.arange(100) < torch.tensor(STEPS)[:, None]
    return page("grading/forms.py").length(dict(response_mask=mask, max_new_tokens=100))


def pair_loss(b):
    return page("rm.py").preference_loss(b.pairs[:, 0] - b.pairs[:, 1]).mean()


def dpo(b):
    rewards = dict(chosen=BETA * (b.pairs[:, 0] - b.pairs[:, 2]),
                   rejected=BETA * (b.pairs[:, 1] - b.pairs[:, 3]))
    return page("recipes/dpo.py").lines(
        "margin = ", "losses = ", label_smoothing=0.0, **rewards).losses.mean()


# {row: (function, where it stands, its source)}
ROWS = {
    "GAE, with gaps": (gae, "gae.py: compute_gae", "1506.02438, eq. 16"),
    "whitening": (whiten, "formulas.py: masked_whiten", "2403.17031, detail 25"),
    "k1": (kl, "formulas.py: kl_estimate", "joschu.net/blog/kl-approx.html"),
    "k2": (partial(kl, kind="k2"), "the same", "the same"),
    "k3": (partial(kl, kind="k3"), "the same", "the same"),
    "clipped loss": (clip, "ppo.py, grpo.py", "1707.06347, eq. 7"),
    "dual clip": (partial(clip, dual=True), "recipes/dual_clip.diff", "1912.09729, eq. 5"),
    "value loss": (value_loss, "ppo.py", "2403.17031"),
    "KL controller": (kl_controller, "recipes/kl_controller.diff", "1909.08593, 2.2"),
    "GRPO": (grpo, "groups.py: group_advantages", "2402.03300, 4.1.2"),
    "Dr. GRPO": (of_groups("", "none"), "the same", "2503.20783, 3.2"),
    "RLOO": (of_groups("", "none", "others"), "the same", "2402.14740, eq. 7"),
    "REINFORCE++": (reinforce, "gae.py, values of 0; formulas.py", "2501.03262"),
    "REINFORCE++ baseline": (reinforce_baseline, "recipes/reinforce_pp.diff", "2501.03262"),
    "GDPO": (gdpo, "recipes/gdpo.diff", "2601.05242"),
    "MaxRL": (maxrl, "recipes/maxrl.diff", "2602.02710"),
    "OPO": (of_groups("opo"), "recipes/opo.diff", "2505.23585"),
    "pass@k": (of_groups("pass_at_k"), "recipes/pass_at_k.diff", "2503.19595"),
    "token-mean": (partial(aggregation, kind="token-mean"), "groups.py: token_weights",
                   "see there"),
    ROWS_MEAN: (partial(aggregation, kind=ROWS_MEAN), "the same", "2402.03300, eq. 3"),
    "seq-mean-token-sum-norm": (partial(aggregation, kind="seq-mean-token-sum-norm"), "the same",
                                "2503.20783, listing 1"),
    "seq-mean-token-sum": (aggregation, "recipes/token_sum.diff", ""),
    "prompt mean": (prompt_mean, "recipes/every_prompt.diff", "2503.14476, eq. 12"),
    "GSPO": (partial(grpo_loss, kind=ROWS_MEAN, loss_type="gspo"), "grpo.py; groups.py",
             "2507.18071, eq. 5 to 7"),
    "CISPO": (partial(grpo_loss, loss_type="cispo", low=1.0), "grpo.py", "2506.13585, eq. 4, 5"),
    "SAPO": (partial(grpo_loss, recipe="sapo", kind=ROWS_MEAN, loss_type="sapo"),
             "recipes/sapo.diff", "2511.20347"),
    "GMPO": (partial(grpo_loss, recipe="gmpo", kind=ROWS_MEAN, low=0.4, high=0.4, loss_type="gmpo"),
             "recipes/gmpo.diff", "2507.20673"),
    "KL-Cov": (partial(covariance, recipe="kl_cov", name="pays"), "recipes/kl_cov.diff",
               "2505.22617"),
    "Clip-Cov": (clip_cov, "recipes/clip_cov.diff", "2505.22617"),
    "importance weights": (importance, "formulas.py: importance_weights", "Yao et al., 2025"),
    "one for a response": (partial(importance, recipe="response_weight"),
                           "recipes/response_weight.diff", "the same"),
    "GSPO, with weights": (gspo_weighted, "grpo.py", "the same"),
    "DAPO's length": (length, "grading/forms.py", "2503.14476, eq. 13"),
    "pair loss": (pair_loss, "rm.py: preference_loss", "2009.01325, 3.4"),
    "DPO": (dpo, "recipes/dpo.py", "2305.18290, eq. 7")}

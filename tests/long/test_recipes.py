"""
recipes/*.diff and the diffs in docs/algorithms.md: each applies to a copy of the files, and the
copy runs with nothing else of the repository, on two ranks, killed and resumed. What comes out is
what by_hand.py works out, with the functions of this file in the place of its own.
"""
import glob
import itertools
import math
import os
import re
import runpy
import shutil
import signal
import statistics
import subprocess
import sys

import pytest
import torch

import by_hand
import by_hand_recipes
import test_by_hand
import test_by_hand_options as with_options
from by_hand import flat, is_flat, mean, seen
from conftest import ROOT
from test_by_hand import GRPO, PPO, assert_agrees
from tiny import at, run

with open(f"{ROOT}/docs/algorithms.md", encoding="utf-8") as f:
    BLOCKS = re.findall(r"((?:[^\n]+\n)+)```diff\n(.*?)```", f.read(), re.DOTALL)


def diff_of(words):
    """The text of a recipe, or of the block in the docs behind a paragraph with these words."""
    if os.path.exists(f"{ROOT}/recipes/{words}.diff"):
        with open(f"{ROOT}/recipes/{words}.diff", encoding="utf-8") as f:
            return f.read()
    (block,) = [block for paragraph, block in BLOCKS if words in paragraph]
    return block


def fork(folder, diffs, numbers=()):
    """
    A copy of the files in folder/mine, as docs/algorithms.md says, with these diffs; of the numbers
    in it, pairs (old, new) of text are changed. Returns the copy's folder.
    """
    os.makedirs(mine := f"{folder}/mine")
    for path in glob.glob(f"{ROOT}/*.py"):
        shutil.copy(path, mine)
    for name in ("config", "grading", "options"):
        shutil.copytree(f"{ROOT}/{name}", f"{mine}/{name}")
    subprocess.run(["git", "init", "-q", folder], check=True)
    for words in diffs:
        text = diff_of(words)
        for old, new in numbers:
            text = text.replace(old, new)
        subprocess.run(["git", "apply", "--directory=mine", "-"], input=text, text=True, cwd=folder,
                       check=True)
    return mine


def run_fork(mine, script, folder, keys, also=()):
    """A run in processes that have our modules already: those of the copy take their place."""
    ours = {os.path.basename(path)[:-3] for path in glob.glob(f"{ROOT}/*.py")} | {
        "grading", "options"}

    def before(rank):
        for name in [name for name in sys.modules if name.partition(".")[0] in ours]:
            del sys.modules[name]
        sys.path[:] = [mine] + [path for path in sys.path if path != ROOT]
        for patch in also:
            patch(rank)

    return run(f"{mine}/{script}.py", folder, keys, ranks=2, before=before)


# A sampler that is wrong: its log-probs are off by a function of the token and its place


def off(token, t):
    return 0.9 * math.sin(3 * token + t)


def wrong_sampler(rank):
    import rollout
    from run import Run

    right = rollout.sample_batch

    def sample_batch(*args, **more):
        batch = right(*args, **more)
        q, token = batch["sampler_logprobs"], batch["tokens"]
        t = torch.arange(q.shape[1]) - batch["begins"][:, None]  # the place in the response
        batch["sampler_logprobs"] = q + 0.9 * torch.sin((3 * token + t).to(q))
        return batch

    rollout.sample_batch, Run.sampler_gap = sample_batch, lambda self, batch: 0.0


# by hand: what takes the place of by_hand's functions ---------------------------------------------

find_advantages, find_group_advantages = by_hand.find_advantages, by_hand.find_group_advantages
clipped_surrogate, finish_scores = by_hand.clipped_surrogate, by_hand.finish_scores
grpo_update = by_hand.grpo_update


def adapting_kl_coef(c, batch):
    figures = find_advantages(c, batch) | {"objective/kl_coef": c.kl_coef}
    kl = mean([sum(r.old) - sum(r.reference) for r in batch])
    seen["kl_coef up" if kl > c.kl_target else "kl_coef down"] += 1
    c.kl_coef *= 1 + min(max(kl / c.kl_target - 1, -0.2), 0.2) * len(batch) / 10_000
    return figures


def dual_clipped(ratio, advantage, low, high):
    loss, bound = clipped_surrogate(ratio, advantage, low, high)
    if advantage < 0 and loss > -advantage * 1.1:
        seen["dual"] += 1
        return -advantage * 1.1, bound
    return loss, bound


def with_price(c, batch, missing=None):
    finish_scores(c, batch, missing)
    for r in batch:
        if r.finished or not c.missing_eos_penalty:
            r.score -= 0.3 * len(r.response)


def too_far(c, figures):
    seen["too far"] += (end := mean([one["policy/approx_kl"] for one in figures]) > c.target_kl)
    return end


class FirstWaits(by_hand.AdamW):
    """The policy's AdamW, which is made before the value model's, makes no step in iteration 0."""

    def __init__(self, parameters, c):
        super().__init__(parameters, c)
        self.waits = 0 if hasattr(c, "made") else c.ppo_epochs * c.num_minibatches
        c.made = True

    def step(self, lr):
        self.waits -= 1
        if self.waits < 0:
            super().step(lr)


def centre_and_width(x):
    return mean(x), math.sqrt(statistics.pvariance(x) + 1e-8)


def white_rewards(c, batch):
    figures = find_advantages(c, batch)
    middle, deviation = centre_and_width(flat(r.rewards for r in batch))
    for r in batch:
        r.rewards = [(x - middle) / deviation + middle for x in r.rewards]
        r.advantages, r.returns = by_hand.advantages_and_returns(
            r.rewards, r.values, c.gamma, c.lam)
    middle, deviation = centre_and_width(flat(r.advantages for r in batch))
    for r in batch:
        r.advantages = [(x - middle) / deviation for x in r.advantages]
    del figures["val/explained_variance"]  # of other returns
    return figures


def with_weights(c, batch):
    figures, every = find_advantages(c, batch), []
    for r in batch:
        weights = [math.exp(-off(token, t)) for t, token in enumerate(r.response)]
        r.counts = [w if 0.5 <= w <= c.importance_cap else 0.0 for w in weights]
        every += r.counts
    seen["left out"] += every.count(0.0)
    return figures | {
        "policy/importance": mean(every), "policy/importance_capped": every.count(0) / len(every),
        "policy/effective_tokens": sum(every)**2 / sum(w * w for w in every) / len(every)}


def with_weights_of_responses(c, batch):
    """min(the product of p / q over the response, cap), at each of its tokens."""
    figures, every = find_advantages(c, batch), []
    for r in batch:
        product = math.exp(-sum(off(token, t) for t, token in enumerate(r.response)))
        r.counts = [min(product, c.importance_cap)] * len(r.response)
        every += r.counts
        seen["at the cap" if product > c.importance_cap else "below the cap"] += 1
    return figures | {
        "policy/importance": mean(every),
        "policy/importance_capped": mean([x == c.importance_cap for x in every]),
        "policy/effective_tokens": sum(every)**2 / sum(w * w for w in every) / len(every)}


def divide(groups):
    unit = statistics.stdev([r.advantage for r in flat(groups)]) + 1e-4
    for r in flat(groups):
        r.advantage /= unit


def each_reward_alone(c, groups):
    for r in flat(groups):
        r.judged, r.advantage = r.score, 0.0
    for group in groups:
        for weight, name in c.mix:
            x = [r.each[name] for r in group]
            for r in group if not is_flat(x) else ():
                r.advantage += weight * (r.each[name] - mean(x)) / (statistics.stdev(x) + 1e-4)
    divide(groups)


def over_the_mean(c, groups):
    find_group_advantages(c, groups)
    for group in groups:
        middle = mean([r.judged for r in group])
        seen["mean above 0" if middle > 0 else "mean below 0"] += 1
        for r in group:
            r.advantage = r.advantage / (middle + 1e-4) if middle > 0 else 0.0


def losses_of_one_step(c, models, r, weight, advantages, kl_has_the_ratio):
    """by_hand.grpo_losses where the old policy is the policy. advantages: of each token."""
    logprobs, _ = by_hand.logprobs_of(models.policy, r.prompt, r.response, c.temperature, r.own)
    total, figures = 0.0, []
    for t, logprob in enumerate(logprobs):
        ratio, x = torch.exp(logprob - r.old[t]), r.reference[t] - logprob
        kl = (ratio if kl_has_the_ratio else 1) * (torch.exp(x) - 1 - x)
        total = total - ratio * advantages[t] + c.kl_coef * kl
        figures.append({"loss/policy": -advantages[t], "loss/kl": kl.item(), "policy/clipfrac": 0,
                        "policy/approx_kl": 0})
    (total * weight).backward()
    return figures


def deepseek_losses(c, models, r, weight):
    distance = mean([off(token, t) for t, token in enumerate(r.response)])  # the policy is the old
    r.left_out_now = r.advantage < 0 and distance > c.off_policy_limit
    seen["left out" if r.left_out_now else "worse, and kept" if r.advantage < 0 else "good"] += 1
    advantage = 0 if r.left_out_now else r.advantage
    return losses_of_one_step(c, models, r, weight, [advantage] * len(r.own), True)


def deepseek_update(c, models, adam, batch, iteration):
    figures = grpo_update(c, models, adam, batch, iteration)
    share = sum(len(r.own) * r.left_out_now for r in batch) / sum(len(r.own) for r in batch)
    return figures | {"policy/left_out": share}


def by_turns(c, groups):
    for group in groups:
        for r in group:
            r.judged, r.advantages, r.worth = r.score, [], {}
            r.turn_of = [sum(b > a + 1 for a, b in itertools.pairwise(r.own[:t + 1]))
                         for t in range(len(r.own))]  # a new turn behind a gap
            for t, turn in enumerate(r.turn_of):
                r.worth.setdefault(turn, r.score - sum(r.paid[:t]))
        for r in group:
            for turn in r.turn_of:
                x = [other.worth[turn] for other in group if turn in other.worth]
                r.advantages.append(0.0 if is_flat(x) else
                                    (r.worth[turn] - mean(x)) / (statistics.stdev(x) + 1e-4))
                seen["alone" if len(x) == 1 else f"turn {turn}"] += 1
            r.advantage = any(r.advantages)


def losses_of_turns(c, models, r, weight):
    return losses_of_one_step(c, models, r, weight, r.advantages, False)


# the cases: diffs, numbers that are changed in them, script, keys, functions by hand, branches ----

ONE_STEP = dict(num_minibatches=1, num_iterations=1, max_iters=3)
CASES = {
    "kl_controller, dual clip, length": (
        ["kl_controller", "Dual clip", "price of length"], [("* 3, ", "* 1.1, "), ("0.01", "0.3")],
        "ppo", PPO | dict(kl_target=0.02, missing_eos_penalty=2.0, max_iters=3),
        dict(find_advantages=adapting_kl_coef, clipped_surrogate=dual_clipped,
             finish_scores=with_price), ["dual", "kl_coef up", "kl_coef down", "no end"]),
    "target_kl, whitened rewards": (
        ["target_kl", "Whitened rewards"], [], "ppo",
        PPO | dict(target_kl=0.15, ppo_epochs=3, max_iters=3, value_init="policy"),
        dict(too_far=too_far, find_advantages=white_rewards), ["too far"]),
    "masked_importance, a value model alone": (
        ["masked_importance", "first learns alone"], [(">= 10", ">= 1")], "ppo",
        PPO | dict(importance_cap=1.5, max_iters=3),
        dict(AdamW=FirstWaits, find_advantages=with_weights), ["left out"]),
    "one weight for a response": (
        ["One weight for a response"], [], "ppo", PPO | dict(importance_cap=1.5, max_iters=3),
        dict(find_advantages=with_weights_of_responses), ["at the cap", "below the cap"]),
    "target_kl, REINFORCE++": (
        ["target_kl", "REINFORCE++** with"], [], "grpo",
        GRPO | dict(target_kl=0.25, scale_by="none", kl_estimator="k2", num_iterations=3,
                    max_iters=3, mix=[(1.0, "some")]),
        dict(too_far=too_far, find_group_advantages=by_hand_recipes.divided),
        ["too far", "no score"]),
    "GDPO": (
        ["GDPO"], [], "grpo",
        GRPO | dict(mix=[(1.0, "letters"), (0.5, "length")], batch_size=9, max_new_tokens=5,
                    max_iters=3), dict(find_group_advantages=each_reward_alone), []),
    "MaxRL, a KL that ends": (
        ["MaxRL", "A KL that ends"], [("max=10", "max=0.05")], "grpo",
        GRPO | dict(scale_by="none", max_iters=3, missing_eos_penalty=1.0),
        dict(find_group_advantages=over_the_mean, kl_estimate=by_hand_recipes.short_kl),
        ["mean above 0", "mean below 0", "short", "too long"]),
    "deepseek_v32": (
        ["deepseek_v32"], [], "grpo",
        GRPO | ONE_STEP | dict(off_policy_limit=0.1),
        dict(grpo_losses=deepseek_losses, grpo_update=deepseek_update),
        ["left out", "worse, and kept", "good"]),
    "turn_credit": (
        ["turn_credit"], [], "grpo", with_options.GRPO | ONE_STEP | dict(
            turns=3, mix=[(0.7, "environment"), (0.5, "letters")], missing_eos_penalty=0.3,
            batch_size=8, group_size=4, max_new_tokens=14, seed=1),
        dict(find_group_advantages=by_turns, grpo_losses=losses_of_turns),
        ["alone", "turn 1", "no end"])}
CASES |= by_hand_recipes.CASES


world = with_options.world  # a fixture: tiny's world, and an environment


@pytest.mark.parametrize("name", CASES)
def test_it_is_what_it_is_by_hand(world, tmp_path, monkeypatch, name):
    """A run on two ranks. If it keeps numbers in run.state, a rank is killed, and it goes on."""
    diffs, numbers, script, keys, functions, branches = CASES[name]
    if "ref_path" in keys:
        keys = keys | dict(ref_path=",".join(getattr(world, x) for x in keys["ref_path"].split()))
    how = with_options if "turns" in keys else test_by_hand
    mine, folder = fork(f"{tmp_path}/fork", diffs, numbers), f"{tmp_path}/run"
    also = [wrong_sampler] if {"masked_importance", "deepseek_v32",
                              "One weight for a response"} & {*diffs} else []
    typed = how.typed_keys(world, keys, script, dict(out_dir="out", checkpoint_interval=1))
    if keeps := any("run.state" in diff_of(words) for words in diffs):
        killed = run_fork(mine, script, folder, typed, [*also, at(2, signal.SIGKILL, rank=1)])
        assert killed.codes[1] == -signal.SIGKILL and killed.codes[0] != 0, killed
    ended = run_fork(mine, script, folder, typed, also)
    assert ended.codes == [0, 0] and ("resuming from" in ended.out[0]) == keeps, ended
    for function, other in functions.items():
        monkeypatch.setattr(by_hand, function, other)
    seen.clear()
    assert_agrees(f"{folder}/out", *how.work_out(world, keys, script))
    assert not [branch for branch in branches if not seen[branch]], seen


@pytest.mark.parametrize("cap, lowest, level, wanted", [
    (1.3, 0.5, "token", [0, 0.8, 0, 0, 0]), (5.0, 0.5, "sequence", [1.2, 1.2, 4, 4, 0])])
def test_weights_of_tokens_and_of_responses(tmp_path, cap, lowest, level, wanted):
    """p / q is 1.5, 0.8; then 2, 2 behind a token that the policy did not sample; then 0.25."""
    mine = fork(tmp_path, ["masked_importance"])
    weights = runpy.run_path(f"{mine}/loss.py")["importance_weights"]
    weights.__globals__.update(MASKED=level, LOWEST=lowest)
    q = torch.tensor([[0.2, 0.5, 0.1], [0.1, 0.25, 0.2], [0.8, 0.5, 0.5]]).double()
    p = torch.tensor([[0.3, 0.4, 0.9], [0.9, 0.5, 0.4], [0.2, 0.1, 0.1]]).double()
    mask = torch.tensor([[1, 1, 0], [0, 1, 1], [1, 0, 0]]).bool()
    p[~mask] = torch.nan  # what stands there has no say
    mb = dict(old_logprobs=p.log().requires_grad_(), sampler_logprobs=q.log(), response_mask=mask)
    found = weights(mb, cap)
    assert not found.requires_grad
    assert torch.allclose(found[mask], torch.tensor(wanted, dtype=torch.float64))


def test_the_kl_of_the_top_k():
    """The example in the recipe's head, of three tokens; and a policy that is certain."""
    text = diff_of("top_k_distillation")
    (code,) = re.findall(r"^\+(OTHERS = .*?)^ def minibatches", text, re.DOTALL | re.MULTILINE)
    exec(re.sub(r"^\+", "", code, flags=re.MULTILINE), names := dict(torch=torch))
    p, q = torch.tensor([[0.5, 0.3, 0.2], [0.6, 0.3, 0.1]], dtype=torch.float64).log()
    for k, wanted in ((1, 0.0204), (2, 0.0475)):
        kl = names["top_k_kl"](p[None, :k], q[None, :k]).item()
        assert round(kl, 4) == wanted and str(wanted) in text
    assert names["top_k_kl"](p[None, :2], p[None, :2]).item() == 0
    certain = torch.tensor([[1.0, 1e-20]]).log().requires_grad_()  # the others: 1 - sum = 0
    kl = names["top_k_kl"](certain, torch.tensor([[0.5, 0.25]]).log()).sum()
    kl.backward()
    assert kl.isfinite() and certain.grad.isfinite().all()


def test_gdpo_refuses_what_is_no_reward(world, tmp_path):
    keys = GRPO | dict(missing_eos_penalty=1.0)
    ended = run_fork(fork(tmp_path / "fork", ["GDPO"]), "grpo", f"{tmp_path}/run",
                     test_by_hand.typed_keys(world, keys, "grpo", {}))
    assert ended.codes == [2, 2] and "--missing_eos_penalty=0" in "".join(ended.err), ended


def test_each_diff_has_a_case():
    recipes = {os.path.basename(path)[:-5] for path in glob.glob(f"{ROOT}/recipes/*.diff")}
    used = {diff_of(words) for diffs, *_ in CASES.values() for words in diffs}
    assert used == {diff_of(name) for name in recipes} | {block for _, block in BLOCKS}

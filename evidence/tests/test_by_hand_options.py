"""
Whole runs with options against by_hand_options.py, within 1e-9, as in test_by_hand.py: on several
ranks, with roles, stopped or killed, and begun again, perhaps in another layout. And runs whose
keys are drawn, combinations of which nobody has thought: with QUARTET_DRAWN=50 in the environment
50 of each script.
"""
import inspect
import os
import random
import re
import shutil
import signal
from types import SimpleNamespace

import by_hand
import by_hand_options
import pytest
import test_by_hand
from test_by_hand import GRPO, PAIRS, PPO, TUNED, assert_agrees, files_of, folders_of
from tiny import assert_one_line, assert_stopped, at, jsonl, run, well, write
from transformers import AutoModelForSequenceClassification

DRAWN = int(os.environ.get("QUARTET_DRAWN", 4))
LAYOUTS = test_by_hand.LAYOUTS | {
    "generate": (2, dict(roles="train=1,generate=1")),
    "three roles": (3, dict(roles="train=1,generate=1,score=1"))}
NONE = dict(ref_path="", staleness=0, importance_cap=0.0, turns=0, lora=(), ema_decay=0.0,
            keep_best="")
PPO = PPO | NONE | dict(texts=False, ptx_coef=1.0)
GRPO = GRPO | NONE | dict(max_refills=0, refill_by="")
RM = PAIRS | dict(
    max_iters=3, lora=(), teacher="", score_coef=0.0, preference_coef=1.0, train="pairs")
DPO = TUNED | dict(
    beta=0.3, label_smoothing=0.1, max_iters=3, batch_size=7, warmup_iters=1, lr_decay="cosine",
    eval_size=3, grad_clip=1.0, weight_decay=0.1, policy_path="policy", lora=(),
    demonstrations=False)
NOT_OF = {True: ["label_smoothing", "centre_coef", "use_confidence"],  # keys, with a teacher or not
          False: ["score_coef", "preference_coef"]}
EVAL = dict(eval_interval=1, eval_size=0)
CASES = {  # name: (layout, branches that must be taken, keys)
    # an environment's words count nowhere, and its pay for a turn counts from there on
    "ppo, turns": ("three roles", ["reply", "no end", "a later unit"], PPO | dict(
        turns=3, mix=[(0.7, "environment"), (1.0, "letters"), (0.2, "steps")], seed=1,
        value_init="policy", gamma=0.9, lam=0.8, missing_eos_penalty=0.7, max_new_tokens=12)),
    "grpo, turns": ("generate, stopped", ["reply", "older", "refill 0"], GRPO | dict(
        turns=4, mix=[(1.0, "environment"), (0.5, "length")], staleness=1, max_refills=1, seed=5,
        max_new_tokens=15, max_iters=3)),
    # a reward model that does not say its zero; the value model has the same
    "ppo, centred": ("stage 1, stopped", ["centred, some", "best later", "not the best"], (
        PPO | EVAL | dict(reward_path="uncentered", missing_eos_penalty=1.0, keep_best="score",
                          max_iters=3, seed=1, ppo_epochs=1))),
    # the batch of an iteration was sampled up to two updates ago
    "ppo, stale": ("one rank, stopped in three roles", ["older"], PPO | dict(
        staleness=2, max_iters=4, ema_decay=0.7, texts=True, ptx_coef=2.5, ref_path="older")),
    "ppo, stale, capped": ("one rank", ["older", "capped", "a later unit"], PPO | dict(
        staleness=1, importance_cap=1.1, max_iters=3, value_init="shared", kl_estimator="k2",
        texts=True, ema_decay=0.5)),
    "grpo, stale, capped": ("one rank, stopped", ["older", "capped", "refill 1"], GRPO | dict(
        staleness=2, importance_cap=1.3, num_minibatches=1, kl_in="reward", kl_estimator="k1",
        max_iters=4, mix=[(1.0, "sometimes"), (0.5, "length")], max_refills=2, seed=4,
        max_new_tokens=5)),
    "grpo, refills": ("stage 3", ["refill 1", "left out", "not the best"], GRPO | EVAL | dict(
        mix=[(1.0, "sometimes"), (0.7, "reward_model")], refill_by="sometimes", max_refills=2,
        batch_size=8, group_size=2, kl_coef=0.0, ema_decay=0.6, keep_best="score", max_iters=3,
        num_iterations=1, seed=0)),
    "ppo, lora": ("two ranks", ["a later unit"], PPO | dict(
        lora=(2, 5), value_init="policy", weight_decay=0.1, grad_clip=0.5)),
    # the value model's trunk is the policy's, with its adapter
    "ppo, lora, shared": ("one rank, stopped", ["a later unit"], PPO | dict(
        lora=(2, 5), value_init="shared", mix=[(40.0, "letters")], max_iters=3)),
    # no response has an end: the first scores are equal, so the values are in scores
    "ppo, endless": ("two ranks, stopped", ["equal scores"], PPO | dict(
        value_init="policy", missing_eos_penalty=2.0, max_new_tokens=2)),
    "rm, adapter": ("two ranks", [], RM | dict(
        init_from="policy", lora=(2, 5), weight_decay=0.1, eval_size=2)),
    # two teachers, of which one reads the text in its own tokens; pairs, and single responses
    "rm, taught": ("stage 2", [], RM | dict(
        init_from="tied", teacher="other reward", score_coef=0.7, preference_coef=1.3)),
    "rm, responses": ("two ranks", ["long gradient"], RM | dict(
        init_from="policy", teacher="reward", score_coef=0.5, train="sft", grad_clip=0.5)),
    "recipes/dpo": ("stage 3, killed", ["a tie", "a margin"], DPO),
    "recipes/dpo, lora": ("one rank", [], DPO | dict(
        lora=(2, 6), head_chunk=4, label_smoothing=0.0))}


def drawn(script, number):
    """A case whose keys are drawn."""
    rng = random.Random(f"{script} {number}")
    keys = dict(
        temperature=(0.8, 1.2), missing_eos_penalty=(0.0, 1.0), grad_clip=(0.0, 0.5),
        staleness=(0, 0, 1), importance_cap=(0.0, 1.1), cliprange=(0.2, 0.03), seed=range(9),
        entropy_coef=(0.0, 0.05), ema_decay=(0.0, 0.7), keep_best=("", "score", "eval/length"),
        policy_path=("policy", "tied"), kl_estimator=("k1", "k2", "k3"), kl_coef=(0.3, 0.3, 0.0),
        weight_decay=(0.0, 0.1), lr_decay=("constant", "linear", "cosine"), warmup_iters=(0, 2),
        turns=(0, 0, 0, 3), max_new_tokens=(5, 10), num_minibatches=(1, 2, 3), eval_size=(0, 2),
        reward_path=("reward", "other", "uncentered"),
        mix=([(1.0, "reward_model")], [(0.6, "reward_model"), (1.0, "sometimes")],
             [(1.0, "some"), (0.5, "length")]))
    keys |= dict(
        gamma=(1.0, 0.9), lam=(0.95, 0.0, 1.0), ppo_epochs=(1, 2), cliprange_value=(0.0, 0.2),
        vf_coef=(0.1, 0.5), batch_size=(4, 5, 7), value_init=("policy", "shared", "reward"),
        texts=(False, True), ptx_coef=(1.0, 2.5)) if script == "ppo" else dict(
        group_size=(2, 3), num_iterations=(1, 2), max_refills=(0, 1), baseline=("mean", "others"),
        scale_by=("std", "batch", "none"), loss_type=("clip", "clip", "cispo", "gspo"),
        truncated=("keep", "mask"), kl_in=("loss", "reward"),
        cliprange_high=(0.3, 0.04), batch_size=(6, 12),
        aggregation=("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"))
    keys |= dict(lora=((), (), (2, 5)))
    keys = {key: rng.choice(values) for key, values in keys.items()}
    learned = "reward_model" in [name for _, name in keys["mix"]]
    if script == "ppo" and (not learned or keys["reward_path"] == "other"):
        keys["value_init"] = keys["value_init"].replace("reward", "policy")
    if script == "grpo" and keys["kl_in"] == "loss" and keys["kl_estimator"] == "k1":
        keys["kl_estimator"] = "k3"  # the other one is refused
    layouts = ["one rank", "two ranks", "parts", "tokens"]
    if keys["lora"]:  # by hand they are GPT-2's, and those of now; in stage 3 policy=params is none
        keys |= dict(ema_decay=0.0, keep_best="", policy_path="policy", staleness=0)
        layouts += ["stage 2"]
    elif keys["ema_decay"] == 0:
        layouts += ["stage 2", "stage 3"]
    if keys["staleness"]:
        layouts, keys["max_iters"] = [*layouts, "generate"], 3
    way = rng.choice(layouts) + rng.choice(["", f", stopped in {rng.choice(layouts)}"])
    return way, [], (PPO if script == "ppo" else GRPO) | keys


CASES |= {f"{script}, drawn {i}": drawn(script, i) for script in ("ppo", "grpo")
          for i in range(DRAWN)}


@pytest.fixture(scope="module")
def world(world, tmp_path_factory):
    """tiny's world, and an environment."""
    file = write(tmp_path_factory.mktemp("environment") / "environment.py",
                 inspect.getsource(by_hand_options.answered))
    return SimpleNamespace(**vars(world) | dict(environment=file))


def data_of(keys, script):
    """The data's files, as test_by_hand.files_of."""
    files = files_of(keys, script)
    if script == "rm":
        files["train_path"] = f"{keys['train']}_train"
    return files | dict(ptx_path="texts") if keys.get("texts") else files


def typed_keys(world, keys, script, more):
    """The keys as a user types them."""
    plain = {key: x for key, x in keys.items()
             if key not in ("turns", "texts", "train", "lora")}
    typed = test_by_hand.typed_keys(world, plain, script, more)
    typed |= {key: getattr(world, name, "") for key, name in data_of(keys, script).items()}
    typed["lora"] = ":".join(map(str, keys["lora"]))
    if keys.get("turns"):
        typed |= dict(environment=f"{world.environment}:answered", max_turns=keys["turns"])
    left_out = NOT_OF[bool(keys.get("teacher"))] + ["ptx_coef"] * (not keys.get("texts"))
    left_out += ["demonstrations_path"] * (script == "recipes/dpo")
    return {key: x for key, x in typed.items() if key not in left_out}


def work_out(world, keys, script):
    """(log, models) by hand."""
    c = SimpleNamespace(**keys | folders_of(world, keys))
    rows = [world.rows.get(name, []) for name in data_of(keys, script).values()]
    return getattr(by_hand_options, script.removeprefix("recipes/"))(c, *rows)


@pytest.mark.parametrize("name", CASES, ids=[f"{name}: {case[0]}" for name, case in CASES.items()])
def test_a_run_agrees_with_one_by_hand(world, tmp_path, name):
    (way, branches, keys), script = CASES[name], name.partition(",")[0]
    layout, *cut = re.split(", (stopped|killed)", way)
    if cut:  # in iteration 1, in this layout or in another one
        ranks, more = LAYOUTS[cut[1].removeprefix(" in ") or layout]
        # one rank, or all without roles, then draw the rows of a batch that is sampled ahead
        ahead = 1 + ("roles" not in more) * keys.get("staleness", 0)
        kills = cut[0] == "killed"
        typed = typed_keys(world, keys, script, more | dict(checkpoint_interval=int(kills)))
        result = run(f"{script}.py", tmp_path, typed, ranks=ranks, before=at(
            ahead, signal.SIGKILL if kills else signal.SIGTERM))
        if kills:
            assert -signal.SIGKILL in result.codes, result
        else:
            assert_stopped(result, tmp_path)
    ranks, more = LAYOUTS[layout]
    out = well(f"{script}.py", tmp_path, typed_keys(world, keys, script, more), ranks=ranks)
    by_hand.seen.clear()
    assert_agrees(out, *work_out(world, keys, script))
    assert not [branch for branch in branches if not by_hand.seen[branch]], by_hand.seen


def test_a_row_too_long_for_a_teacher(world, tmp_path):
    """Left out for the teacher alone, each row behind it would get the score of the next one."""
    short = shutil.copytree(world.reward, tmp_path / "short")
    AutoModelForSequenceClassification.from_pretrained(
        short, n_positions=24, ignore_mismatched_sizes=True).save_pretrained(short)
    rows = [dict(prompt="a" * n, chosen="b", rejected="c") for n in (40, 1, 2, 3, 4)]
    keys = dict(init_from=world.policy, train_path=jsonl(tmp_path / "pairs.jsonl", rows),
                teacher=short, max_iters=1, batch_size=2, device_type="cpu", too_long="drop")
    assert_one_line(run("rm.py", tmp_path, keys), "rm.py", "short", "max_tokens=24")
    well("rm.py", tmp_path, keys | dict(max_tokens=24))

"""
Whole runs of ppo.py, grpo.py, sft.py and rm.py, as a user starts them, against by_hand.py: the same
runs worked out with transformers' models and plain loops. Final weights and all figures that both
log must agree within 1e-9. Only the command line and what a run leaves are used here, so a script
may be rewritten from top to bottom.

Each case is run in one of the LAYOUTS: on one rank, on several, in parts, or sharded. What must
come out is always the one by hand.
"""
import math
from types import SimpleNamespace

import pytest

import by_hand
from tiny import ENDS, read_jsonl, well

TOLERANCE = 1e-9
LAYOUTS = {  # ranks, and keys that change no result
    "one rank": (1, {}),
    "two ranks": (2, {}),
    "three ranks": (3, {}),
    "parts": (1, dict(rollout_batch_size=3, head_chunk=4, gradient_checkpointing=True)),
    "tokens": (2, dict(micro_batch_tokens=30)),
    "stage 1": (2, dict(zero_stage="1")),
    "stage 2": (2, dict(zero_stage="2", gradient_checkpointing=True)),
    "stage 3": (2, dict(zero_stage="3", offload="policy=params", micro_batch_size=1))}

ADAM = dict(weight_decay=0.0, beta1=0.9, beta2=0.99, adam_eps=1e-5, grad_clip=0.0, warmup_iters=0,
            learning_rate=1e-2, lr_decay="constant", micro_batch_size=2, eval_interval=2)
SAMPLED = ADAM | dict(
    seed=3, max_iters=2, eval_size=2, policy_path="policy", reward_path="reward", max_new_tokens=6,
    temperature=0.8, missing_eos_penalty=0.0, cliprange=0.2, entropy_coef=0.0, kl_coef=0.3)
PPO = SAMPLED | dict(
    batch_size=5, mix=[(1.0, "reward_model")], value_init="reward", kl_estimator="k1", gamma=1.0,
    lam=0.95, ppo_epochs=2, num_minibatches=2, cliprange_value=0.2, vf_coef=0.1,
    value_learning_rate=2e-2, value_warmup_iters=0, value_lr_decay="constant")
GRPO = SAMPLED | dict(
    batch_size=6, group_size=3, mix=[(1.0, "letters")], baseline="mean", scale_by="std",
    loss_type="clip", aggregation="token-mean", truncated="keep", kl_in="loss",
    kl_estimator="k3", num_iterations=2, num_minibatches=2, cliprange_high=0.3)
TUNED = ADAM | dict(seed=5, max_iters=4, eval_size=0, batch_size=5)
PAIRS = TUNED | dict(margin_coef=0.0, label_smoothing=0.0, centre_coef=0.0, use_confidence=False,
                     new_head=True, demonstrations=True)
CASES = {  # name: (layout, branches of the formulas that must be taken in it, keys)
    # the value model starts as the reward model; k1; a learning rate that falls
    "ppo, learned": ("two ranks", ["no end", "value clipped", "above", "below"], PPO | dict(
        missing_eos_penalty=2.0, lr_decay="linear", value_warmup_iters=2, max_iters=3,
        eval_interval=1, eval_size=0)),
    # a value head on the policy's trunk; the reward model reads other tokens; k2; clipped gradients
    "ppo, shared": ("stage 2", ["long gradient", "a first unit"], PPO | dict(
        value_init="shared", reward_path="other", kl_estimator="k2", gamma=0.9, lam=0.8,
        cliprange_value=0.0, grad_clip=0.5, vf_coef=0.5, entropy_coef=0.05, temperature=1.2,
        weight_decay=0.1, warmup_iters=2, value_lr_decay="cosine", batch_size=6, max_iters=3)),
    # several rewards: one does not always apply, one is of tokens; value_init=policy; k3
    "ppo, mixed": ("parts", ["value clipped", "a later unit"], PPO | dict(
        mix=[(0.7, "reward_model"), (-0.5, "some"), (0.6, "steps")], value_init="policy",
        policy_path="tied", kl_estimator="k3", temperature=1.0, num_minibatches=1,
        value_learning_rate=0.0, lr_decay="cosine", value_lr_decay="linear", max_new_tokens=5)),
    # the value model of another run, which counts in scores
    "ppo, a value model": ("two ranks", [], PPO | dict(
        mix=[(9.0, "steps")], value_init="uncentered", kl_coef=0.0, gamma=0.9)),
    "ppo, rules": ("stage 3", ["no score", "a later unit"], PPO | dict(
        mix=[(1.0, "some")], value_init="policy", kl_coef=0.0, cliprange=0.03, weight_decay=0.1,
        ppo_epochs=1)),
    "grpo": ("three ranks", ["no end", "long gradient", "above", "below"], GRPO | dict(
        mix=[(0.5, "reward_model"), (1.0, "steps")], aggregation="seq-mean-token-mean",
        missing_eos_penalty=0.9, lr_decay="linear", entropy_coef=0.02, grad_clip=1.0, max_iters=3)),
    "grpo, dr. grpo": ("one rank", ["flat minibatch"], GRPO | dict(
        mix=[(1.0, "sometimes")], scale_by="none", aggregation="seq-mean-token-sum-norm",
        num_minibatches=5, kl_estimator="k2", weight_decay=0.1, warmup_iters=2, lr_decay="cosine",
        seed=6, max_new_tokens=10, max_iters=3)),
    "grpo, gspo": ("tokens", ["masked", "flat minibatch"], GRPO | dict(
        loss_type="gspo", scale_by="batch", truncated="mask",
        aggregation="seq-mean-token-mean", cliprange=0.02, cliprange_high=0.05, batch_size=8,
        group_size=4, num_minibatches=5, reward_path="other", mix=[(1.0, "reward_model")], seed=1)),
    "grpo, cispo": ("two ranks", ["weight"], GRPO | dict(
        loss_type="cispo", baseline="others", scale_by="none", kl_estimator="k2",
        num_minibatches=1, cliprange=0.02, cliprange_high=0.03, max_iters=3)),
    # the KL is in the score, and some responses have none
    "grpo, rloo": ("stage 1", ["no score"], GRPO | dict(
        baseline="others", scale_by="none", kl_in="reward", kl_estimator="k1",
        mix=[(-1.0, "some"), (0.0, "length")], batch_size=9, policy_path="tied", kl_coef=0.4,
        max_new_tokens=5)),
    "sft": ("stage 3", ["long gradient"], TUNED | dict(
        init_from="policy", warmup_iters=2, lr_decay="cosine", weight_decay=0.1, grad_clip=2.5)),
    "rm": ("two ranks", ["tie", "long gradient"], PAIRS | dict(
        init_from="policy", warmup_iters=2, lr_decay="linear", weight_decay=0.1, grad_clip=2.0)),
    # a second training; without demonstrations the chosen ones of the held-out pairs score 0
    "rm, again": ("one rank", [], PAIRS | dict(
        init_from="reward", new_head=False, eval_size=2, demonstrations=False, margin_coef=0.7,
        label_smoothing=0.15, centre_coef=0.05, use_confidence=True))}
IDS = [f"{name}: {layout}" for name, (layout, _, _) in CASES.items()]


def files_of(keys, script):
    """{key: the name of a file} of a script's data, in the order in which by_hand.py takes it."""
    if "mix" in keys:
        return dict(prompts_path="rl_train", eval_path="rl_val")
    if script == "sft":
        return dict(train_path="sft_train", val_path="sft_val")
    return dict(train_path="pairs_train", val_path="pairs_val",
                demonstrations_path="sft_val" if keys["demonstrations"] else "")


def folders_of(world, keys):
    """The models' folders; that of a reward model only where it is used; of some, several."""
    unused = "reward_model" not in [name for _, name in keys.get("mix", ())]
    named = ["policy_path", "reward_path", "init_from", "ref_path", "teacher"]
    if keys.get("value_init") not in ("reward", "policy", "shared"):
        named.append("value_init")
    return {key: "" if key == "reward_path" and unused else
            ",".join(getattr(world, name) for name in keys[key].split())
            for key in named if key in keys}


def typed_keys(world, keys, script, more):
    """The keys as a user types them."""
    typed = {key: x for key, x in keys.items() if key not in ("mix", "new_head", "demonstrations")}
    typed |= dict(dtype="float64", device_type="cpu", timeout=60, checkpoint_interval=0)
    typed |= {key: getattr(world, name, "") for key, name in files_of(keys, script).items()}
    if "mix" in keys:
        own = "letters", "sometimes", "some", "steps"
        where = {name: f"{world.rules}:{name}" for name in own}
        typed["reward_functions"] = ",".join(f"{x}*{where.get(name, name)}"
                                             for x, name in keys["mix"])
    return typed | folders_of(world, keys) | more


def work_out(world, keys, script):
    """(log, models) by hand."""
    c = SimpleNamespace(**keys | folders_of(world, keys))
    rows = [world.rows.get(name, []) for name in files_of(keys, script).values()]
    return getattr(by_hand, script)(c, *rows)


@pytest.mark.parametrize("name", CASES, ids=IDS)
def test_a_run_agrees_with_one_by_hand(world, tmp_path, name):
    (layout, branches, keys), script = CASES[name], name.partition(",")[0]
    ranks, more = LAYOUTS[layout]
    out = well(f"{script}.py", tmp_path, typed_keys(world, keys, script, more), ranks=ranks)
    by_hand.seen.clear()
    assert_agrees(out, *work_out(world, keys, script))
    assert not [branch for branch in branches if not by_hand.seen[branch]], by_hand.seen


def assert_agrees(out, log, models):
    """What a run has left in out is the log and the models by hand."""
    records = read_jsonl(f"{out}/log.jsonl")
    assert [record["iteration"] for record in records] == list(range(len(log)))
    for record, figures in zip(records, log, strict=True):
        for key, x in figures.items():
            near = abs(record.get(key, math.inf) - x) <= TOLERANCE * max(1, abs(x))
            assert near, f"{key} of {record['iteration']}: {record.get(key)}, by hand {x}"
    for name, model in models.items():
        scalar = isinstance(model, SimpleNamespace)
        left = (by_hand.scalar_model if scalar else by_hand.language_model)(f"{out}/{name}")
        if scalar:
            assert abs(left.shift - model.shift) <= TOLERANCE, (left.shift, model.shift)
        else:
            assert left.generation_config.eos_token_id == ENDS
        wanted = model if isinstance(model, dict) else by_hand.parameters_of(model)
        found = by_hand.parameters_of(left)
        assert wanted.keys() == found.keys()
        far = {key: (p - wanted[key]).abs().max().item() for key, p in found.items()}
        worst = max(far, key=far.get)
        assert far[worst] <= TOLERANCE, f"{name}, {worst}: {far[worst]:.2g}"

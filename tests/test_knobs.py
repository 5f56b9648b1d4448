"""
Every key of ppo.py and grpo.py is turned here. A key must change what is learned, or it must change
nothing at all. What it does must not depend on ranks, on shards or on a stop in the middle: each
group of turned keys is run once more on two ranks, sharded, and it must end as the run on one rank
has ended. Where keys add to what a checkpoint holds, that run is stopped by a signal and resumed.

A new key needs a place in PPO, GRPO or UNMOVING, below, or the first test fails.
"""
import json
import os

import pytest
import torch

from configurator import read_keys
from engine.checkpoint import save_model
from engine.tokenizers import load_tokenizer
from model import load_model

import tiny
from tiny import alike, in_a_row, measured, one_run

HELD = dict(dtype="float64", max_iters=2, micro_batch_size=64)
LETTERS = str([chr(i) for i in range(33, 127) if i % 3])  # stop strings: one token each
SWAPPED = "answer>prompt,prompt>answer"
SAVED = dict(checkpoint_interval=1, keep_checkpoints=9)  # where the first iteration is looked at, too
JUDGED = dict.fromkeys(("judge_path", "judge_template"), "FIRST")
# Name -> (keys that are turned together, what else is set so that each of them matters). Without any
# one of its keys, a group's run must end in another policy.
PPO = {
    "world": (dict(policy_path="OTHER", prompts_path="OTHER", seed=2, batch_size=8, max_new_tokens=9,
                   temperature=1.2, ppo_epochs=1, num_minibatches=3, entropy_coef=0.1,
                   cliprange=0.02, ref_path="OTHER"), dict(kl_estimator="k2")),
    "scores": (dict(reward_path="OTHER", reward_functions="0.5*reward_model,length",
                    scale_scores="running", missing_eos_penalty=3.0, cliprange_value=0.0, vf_coef=1.0,
                    target_kl=0.01, fields=SWAPPED, epochs=0.5, max_prompt_tokens=2),
               dict(value_init="policy", grad_clip=2.0, too_long="cut")),
    "adaptive": (dict(kl_estimator="k3", kl_coef=0.5, kl_coef_target=5.0,
                      reward_clip=0.1, lr_decay="cosine", value_lr_decay="constant",
                      whiten_rewards="keep-mean", critic_warmup_iters=1,
                      max_iters=3, lora="policy=2,value=2:8:c_attn"), {}),
    "adam": (dict(weight_decay=0.1, beta1=0.5, beta2=0.9, adam_eps=1e-2, learning_rate=1e-3,
                  value_learning_rate=1e-3, warmup_iters=2, value_warmup_iters=2, grad_clip=0.05,
                  value_init="policy", gamma=0.8, lam=0.5), SAVED),
    "stale": (dict(staleness=1), dict(max_iters=3)),
    "judge": (dict(judge_path="OTHER", judge_template="OTHER"),
               dict(reward_functions="judge,length", value_init="policy") | JUDGED),
    "ends": (dict(stop_strings=LETTERS), dict(max_new_tokens=12)),
    "ptx": (dict(ptx_path="TEXTS", ptx_coef=3.0), dict(prompts_path="TEXTS", eval_path="")),
    "optim": (dict(optim="adafactor"), SAVED),
    "dtype": (dict(dtype="float32"), SAVED),
    "16 bits": (dict(master_weights=False), SAVED | dict(dtype="bfloat16")),
}
GRPO = {
    "world": (dict(policy_path="OTHER", prompts_path="OTHER", seed=2, batch_size=18, max_new_tokens=9,
                   temperature=1.2, num_iterations=1, num_minibatches=3, learning_rate=1e-3,
                   ref_path="OTHER"), {}),
    "scores": (dict(reward_path="OTHER", reward_functions="0.5*reward_model,length", group_size=5,
                    missing_eos_penalty=3.0, baseline="others", scale_by="none",
                    fields=SWAPPED,
                    epochs=0.2, max_prompt_tokens=2), dict(too_long="cut")),
    "refills": (dict(max_refills=1, refill_by="odd", truncated="mask", aggregation="token-mean",
                     loss_type="cispo", kl_estimator="k2", kl_coef=0.5, entropy_coef=0.1),
                dict(reward_functions="ODD,reward_model")),
    "sequence": (dict(importance="sequence", cliprange=0.02, cliprange_high=0.02, dual_clip=1.01,
                      kl_correction=True), dict(num_iterations=4, learning_rate=1e-2)),
    "ends": (dict(stop_strings=LETTERS), dict(max_new_tokens=12)),
    "penalty": (dict(kl_in="reward", reward_clip=0.1, target_kl=0.001, lr_decay="cosine", max_iters=3,
                     lora="4"), dict(missing_eos_penalty=0.05)),
    "adam": (dict(weight_decay=0.1, beta1=0.5, beta2=0.9, adam_eps=1e-2, warmup_iters=2,
                  grad_clip=0.05), SAVED | dict(num_minibatches=1)),
    "stale": (dict(staleness=1), dict(max_iters=3)),
    "judge": (dict(judge_path="OTHER", judge_template="OTHER"),
              dict(reward_functions="judge,0.1*length") | JUDGED),
    "optim": (dict(optim="adafactor"), SAVED),
    "dtype": (dict(dtype="float32"), SAVED),
    "16 bits": (dict(master_weights=False), SAVED | dict(dtype="bfloat16")),
}
# Only memory, files or prints depend on these. The first eleven may change a rounding.
UNMOVING = {
    "zero_stage": "3", "offload": "policy=optimizer,ref=params,reward=params", "share_base": False,
    "ema_decay": 0.5, "micro_batch_size": 7, "micro_batch_tokens": 1, "rollout_batch_size": 3, "head_chunk": 5,
    "gradient_checkpointing": True, "device_type": "auto", "timeout": 61, "reward_timeout": 61,
    "out_dir": None, "eval_interval": 1, "eval_size": 0, "eval_path": "OTHER", "too_long": "drop",
    "checkpoint_interval": 1, "keep_checkpoints": 2, "keep_best": True, "sync_check_interval": 1,
    "deterministic": True, "report_to": None,
    "generate_tp": 1,  # refused so far
    # in float64 this changes a rounding, or nothing: test_off_policy.py turns it
    "importance_cap": 0.0,
    "code_seconds": 6,  # test_sandbox.py turns these
    "compile": False,  # to compile takes long: test_compile.py turns it
    "roles": "",  # one rank has all of them: test_roles.py turns it
    # this world has no chats: test_tokenizers.py and test_judge.py turn these
    "chat_template": "", "template_kwargs": "", "system_prompt": ""}
ROUNDING = ("micro_batch_size", "micro_batch_tokens", "rollout_batch_size", "head_chunk", "gradient_checkpointing")
GROUPS = [("ppo.py", name) for name in PPO] + [("grpo.py", name) for name in GRPO]
KEYS = [(script, name, key) for script, name in GROUPS
        for key in {"ppo.py": PPO, "grpo.py": GRPO}[script][name][0]]
MODELS = {"ppo.py": ("policy", "value_model"), "grpo.py": ("policy",)}
# The models that a key must move, where it is not the policy alone: each model that is trained, after
# one iteration (later, a model moves because another one has), or the value model.
ALL = ("weight_decay", "beta1", "beta2", "adam_eps", "grad_clip", "dtype", "master_weights", "optim")
VALUE = ("value_init", "cliprange_value", "vf_coef", "value_learning_rate", "value_warmup_iters",
         "value_lr_decay")

# How the two ranks hold a group's models: stage, offload, micro_batch_size, gradient_checkpointing,
# head_chunk. (Stage 1 has tests in test_zero.py.)
SPLIT = {
    ("ppo.py", "world"): (3, "none", 1, False, 0),
    ("ppo.py", "scores"): (3, "params", 2, True, 0),
    ("ppo.py", "adaptive"): (2, "none", 64, False, 0),
    ("ppo.py", "adam"): (2, "params", 1, False, 5),
    ("ppo.py", "stale"): (3, "params", 1, True, 5),
    ("ppo.py", "ends"): (3, "none", 2, False, 5),
    ("ppo.py", "ptx"): (3, "none", 2, False, 5),
    ("ppo.py", "optim"): (1, "none", 64, False, 0),
    ("ppo.py", "16 bits"): (3, "none", 64, False, 0),
    ("ppo.py", "judge"): (3, "params", 2, True, 0),
    ("grpo.py", "judge"): (2, "none", 64, False, 0),
    ("grpo.py", "world"): (2, "optimizer", 1, True, 0),
    ("grpo.py", "scores"): (2, "params", 64, False, 0),
    ("grpo.py", "refills"): (2, "none", 64, True, 5),
    ("grpo.py", "sequence"): (2, "none", 2, False, 0),
    ("grpo.py", "penalty"): (2, "optimizer", 2, False, 5),
    ("grpo.py", "ends"): (2, "none", 2, False, 5),
    ("grpo.py", "stale"): (2, "none", 2, False, 0),
    ("grpo.py", "adam"): (3, "optimizer", 64, False, 5),
    ("grpo.py", "optim"): (1, "none", 64, False, 0),
    ("grpo.py", "16 bits"): (2, "none", 64, False, 0),
}  # but for "dtype": all others are run in float64, and "16 bits" in another dtype
# These have in their checkpoints what those of other groups have: they run through.
THROUGH = {("ppo.py", "world"), ("grpo.py", "world"), ("grpo.py", "scores"), ("grpo.py", "sequence")}


@pytest.mark.parametrize("script", ["ppo.py", "grpo.py"])
def test_every_key_is_listed(script):
    keys = read_keys(os.path.join(tiny.ROOT, script)).keys()
    listed = [key for listed, _, key in KEYS if listed == script] + list(UNMOVING)
    assert keys == set(listed), "give the new key a place in PPO, GRPO or UNMOVING, and remove the old one"
    assert len(listed) == len(set(listed))


def split(script, group):
    """The keys of SPLIT."""
    stage, offload, micro, again, chunk = SPLIT[script, group]
    trained = ("policy", "value") if script == "ppo.py" else ("policy",)
    models = {"none": (), "optimizer": trained, "params": (*trained, "ref", "reward", "judge")}[offload]
    return dict(zero_stage=str(stage), offload=",".join(f"{model}={offload}" for model in models),
                micro_batch_size=micro, gradient_checkpointing=again, head_chunk=chunk,
                rollout_batch_size=3)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return tiny.build(str(tmp_path_factory.mktemp("world")))


@pytest.fixture(scope="module")
def turned(world, tmp_path_factory):
    """
    The folder with the runs, each as "SCRIPT GROUP without KEY", "SCRIPT GROUP", "SCRIPT GROUP split",
    "SCRIPT plain", "SCRIPT unevaluated", "SCRIPT unmoving"; and {name: what came of it on each rank}.
    """
    folder = str(tmp_path_factory.mktemp("knobs"))
    policy = load_model(world.policy)
    with torch.no_grad():
        policy.hf.lm_head.weight.mul_(1.1)
    save_model(f"{folder}/other_policy", policy, load_tokenizer(world.policy))
    texts = dict(ptx_path=world.texts, prompts_path=world.sft_train)
    others = dict(policy_path=f"{folder}/other_policy", ref_path=world.policy, reward_path=world.second_reward,
                  prompts_path=world.rl_val, eval_path=world.rl_train, judge_path=world.other_judge,
                  judge_template=f"{world.root}/other_question.txt")
    firsts = world.judged()

    def run(script, keys, ranks=1, code=""):
        given = {"OTHER": others, "FIRST": firsts, "TEXTS": texts}
        keys = {key: given[value][key] if value in given else value for key, value in keys.items()}
        if "ODD" in keys.get("reward_functions", ""):
            keys["reward_functions"] = keys["reward_functions"].replace("ODD", world.rule("odd"))
        return one_run(script, *[(getattr(world, script[:-3])("out", **keys), code)] * ranks)

    jobs = {}
    for script, name in GROUPS:
        keys, more = {"ppo.py": PPO, "grpo.py": GRPO}[script][name]
        ranks = 2 if name == "optim" else 1  # adafactor makes whole steps of rounding, too
        jobs[f"{script} {name}"] = run(script, HELD | more | keys, ranks)
        for key in keys:
            rest = {k: value for k, value in keys.items() if k != key}
            if key in ALL:  # looked at after one iteration
                rest["max_iters"] = 1
            # without evaluations, which move nothing either
            jobs[f"{script} {name} without {key}"] = run(script, HELD | more | rest | dict(eval_path=""), ranks)
        if (script, name) not in SPLIT:
            continue
        both = HELD | more | keys | split(script, name)
        if (script, name) not in THROUGH:
            jobs[f"{script} {name} stopped"] = run(script, both, 2, tiny.stops(1, 1)) | dict(folder=f"{script} {name} split")
        jobs[f"{script} {name} split"] = run(script, both, 2)
    for script in MODELS:
        held = HELD | dict(missing_eos_penalty=0.0)  # so that the shaped score is the one that is logged
        jobs[f"{script} plain"] = run(script, held)
        jobs[f"{script} unevaluated"] = run(script, held | dict(eval_path=""))
        jobs[f"{script} unmoving"] = run(script, held | {
            key: value for key, value in UNMOVING.items() if value and key not in ROUNDING})
    for i, keys in enumerate((dict(max_iters=1, kl_coef=0.0), dict(kl_coef=0.7), dict(kl_coef=0.7, keep_best=True))):
        job = run("ppo.py", HELD | dict(checkpoint_interval=1, missing_eos_penalty=0.0) | keys)
        jobs[f"ppo.py, part {i}"] = job | dict(folder="ppo.py in parts")
    fixed, adapted = dict(kl_coef=0.05, scale_scores="running"), dict(kl_coef=0.5, kl_coef_target=3.0)
    for i, keys in enumerate((fixed | dict(max_iters=1), adapted | dict(max_iters=2), adapted | dict(max_iters=3))):
        job = run("ppo.py", HELD | dict(checkpoint_interval=1, missing_eos_penalty=0.0, max_new_tokens=2) | keys)
        jobs[f"ppo.py, stage {i}"] = job | dict(folder="ppo.py in stages")
    return folder, in_a_row(folder, jobs)


@pytest.mark.parametrize("script, name, key", KEYS)
def test_every_key_moves_something(turned, script, name, key):
    folder, outcomes = turned
    ours, others = f"{script} {name}", f"{script} {name} without {key}"
    assert [each["kind"] for each in outcomes[ours] + outcomes[others]] == [""] * 2 * len(outcomes[ours])
    models = MODELS[script] if key in (*ALL, "lora") else ("value_model",) if key in VALUE else ("policy",)
    for model in models:
        model = f"checkpoint-000001/{model}" if key in ALL else model
        moved = tiny.distance(f"{folder}/{ours}/out/{model}", f"{folder}/{others}/out/{model}")
        assert moved > 1e-9, f"{key} changes nothing in {model}"  # rounding is 1e-12


@pytest.mark.parametrize("script, name", SPLIT)
def test_two_ranks_with_shards_and_a_stop_change_nothing(turned, script, name):
    folder, outcomes = turned
    resumed = outcomes[f"{script} {name} split"]
    assert [each["kind"] for each in resumed] == ["", ""], resumed
    if (script, name) not in THROUGH:
        stopped = outcomes[f"{script} {name} stopped"]
        assert [each["kind"] + each["message"] for each in stopped] == ["SystemExit0"] * 2, stopped
        at = 0 if name == "stale" else 1  # the second batch, which asks for it, is sampled an update ahead
        assert f"stopped before the update of iteration {at}" in stopped[0]["stdout"]
        assert f"resuming from out/checkpoint-00000{at}" in resumed[0]["stdout"]
    whole, parts = f"{folder}/{script} {name}/out", f"{folder}/{script} {name} split/out"
    if name == "16 bits":  # where rounding is not to be compared
        assert len(tiny.read_log(whole)) == len(tiny.read_log(parts)) == 3
        return
    logs = [[measured(record) for record in tiny.read_log(out)] for out in (whole, parts)]
    assert [r.get("objective/texts") for r in logs[0]] == [r.get("objective/texts") for r in logs[1]]
    assert alike(*logs, tolerance=1e-9)
    for model in MODELS[script]:
        assert tiny.distance(f"{whole}/{model}", f"{parts}/{model}") < 1e-9


@pytest.mark.parametrize("script", MODELS)
def test_keys_of_memory_and_files_move_nothing(turned, script):
    plain, unmoving, unevaluated = (f"{turned[0]}/{script} {name}/out" for name in ("plain", "unmoving", "unevaluated"))
    for model in MODELS[script]:
        assert tiny.distance(f"{plain}/{model}", f"{unmoving}/{model}") == 0
        assert tiny.distance(f"{plain}/{model}", f"{unevaluated}/{model}") == 0
    assert len([f for f in os.listdir(unmoving) if f.startswith("checkpoint-")]) == 2


@pytest.mark.parametrize("script", MODELS)
def test_the_best_policy_is_kept(turned, script):
    """It is the policy of the iteration with the highest held-out score."""
    out = f"{turned[0]}/{script} unmoving/out"
    scores = [record["eval/scores"] for record in tiny.read_log(out)]
    with open(f"{out}/checkpoint-000002/state.json", encoding="utf-8") as f:
        assert len(scores) == 3 and json.load(f)["best_score"] == max(scores)
    best = scores.index(max(scores))
    if best == 0:  # the policy that it began with, of which there is no checkpoint: neither of the later ones
        assert min(tiny.distance(f"{out}/checkpoint-00000{k}/policy", f"{out}/best_policy") for k in (1, 2)) > 0
    else:
        assert tiny.distance(f"{out}/checkpoint-00000{best}/policy", f"{out}/best_policy") == 0
    assert not os.path.exists(f"{turned[0]}/{script} plain/out/best_policy")


def test_a_resumed_run_takes_another_kl_coef(turned):
    """Here the reference is there only since then."""
    records = tiny.read_log(f"{turned[0]}/ppo.py in parts/out")
    assert [record["objective/kl_coef"] for record in records[:-1]] == [0.0, 0.7]
    assert "objective/kl" not in records[0] and records[0]["objective/non_score_reward"] == 0
    assert records[1]["objective/kl"] != 0
    said = [turned[1][f"ppo.py, part {i}"][0]["stdout"] for i in range(2)]
    assert ["ref_policy " in text for text in said] == [False, True]


def test_what_a_resumed_run_takes_of_its_checkpoint_and_what_of_its_keys(turned):
    """Another kl_coef counts, and then what it is adapted to; and scores that are not to be scaled any more are not."""
    records = tiny.read_log(f"{turned[0]}/ppo.py in stages/out")
    assert [record["objective/kl_coef"] for record in records[:2]] == [0.05, 0.5]
    assert records[2]["objective/kl_coef"] == pytest.approx(0.5 * (1 - 0.2 * 7 / 10_000))  # a KL of less than 2.4
    assert records[1]["objective/kl"] < 2.4
    gaps = [r["objective/rlhf_reward"] - r["objective/non_score_reward"] - r["objective/scores"] for r in records[:3]]
    assert abs(gaps[0]) > 0.01 and max(map(abs, gaps[1:])) < 1e-9


def test_a_finished_run_that_is_to_keep_the_best_now_saves_it(turned):
    """Its last evaluation is repeated, and changes the state; the checkpoint that is there has another one."""
    folder, outcomes = turned
    out = f"{folder}/ppo.py in parts/out"
    assert "resuming from out/checkpoint-000002" in outcomes["ppo.py, part 2"][0]["stdout"]
    with open(f"{out}/checkpoint-000002/state.json", encoding="utf-8") as f:
        assert json.load(f)["best_score"] == pytest.approx(tiny.read_log(out)[-1]["eval/scores"])
    assert tiny.distance(f"{out}/best_policy", f"{out}/policy") == 0


@pytest.mark.parametrize("group, key, mine, other", [
    ("adam", "learning_rate", "policy", "value_model"),
    ("adam", "value_learning_rate", "value_model", "policy")])
def test_policy_and_value_model_have_their_own_optimizers(turned, group, key, mine, other):
    """In the first iteration, the learning rate of one model is nothing to the other."""
    with_key, without = (f"{turned[0]}/ppo.py {group}{end}/out/checkpoint-000001"
                         for end in ("", f" without {key}"))
    assert tiny.distance(f"{with_key}/{mine}", f"{without}/{mine}") > 1e-5
    assert tiny.distance(f"{with_key}/{other}", f"{without}/{other}") == 0

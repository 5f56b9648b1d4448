"""The scripts as a user runs them, each once; then sabotage: what one rank computes otherwise stops all before the step."""
import glob
import math
import os
import re

import pytest
import yaml
from safetensors.torch import load_file

import tiny
from tiny import forked, in_a_row, one_run


# ---------------------------------------------------------------------------------------------------------------------
# every script once


@pytest.fixture(scope="module")
def chain(world, tmp_path_factory):
    """sft.py from scratch -> rm.py -> ppo.py, each from the folder that the one before has left. Returns their folder."""
    folder = str(tmp_path_factory.mktemp("chain"))
    results = forked(folder, {"run": [
        one_run("sft.py", world.sft("sft")), one_run("rm.py", world.rm("rm", init_from="sft/policy")),
        one_run("ppo.py", world.ppo("ppo", policy_path="sft/policy", reward_path="rm/reward_model",
                                    max_iters=2, keep_best=True))]})["run"]
    assert [result["codes"] + result["stderr"] for result in results] == [[0, ""]] * 3, results
    return f"{folder}/run"


def test_each_script_logs_its_figures(chain):
    """At every iteration, and those of evaluations where there was one; all are finite. (Which they are: test_readme.py.)"""
    sft, rm, ppo = (tiny.read_log(f"{chain}/{name}") for name in ("sft", "rm", "ppo"))
    assert [[r["iteration"] for r in log] for log in (sft, rm, ppo)] == [[0, 1, 2, 3]] * 2 + [[0, 1, 2]]
    assert sft[-1]["eval/loss"] < sft[0]["eval/loss"]
    evaluation = {"eval/scores", "eval/kl", "eval/entropy", "eval/length", "eval/finished", "eval/accuracy", "eval/thinks"}
    assert evaluation <= ppo[0].keys() and evaluation <= ppo[-1].keys() and not evaluation & ppo[1].keys()
    assert all(math.isfinite(v) for record in sft + rm + ppo for v in record.values() if not isinstance(v, str))


def test_model_cards_say_what_a_model_is(chain):
    for run, name in (("sft", "policy"), ("rm", "reward_model"), ("ppo", "policy"), ("ppo", "best_policy"),
                      ("ppo", "value_model")):
        _, head, text = tiny.read_text(f"{chain}/{run}/{name}/README.md").split("---\n", 2)
        scalar = name in ("reward_model", "value_model")
        assert yaml.safe_load(head) == dict(library_name="transformers", tags=["quartet"],
                                            pipeline_tag="text-classification" if scalar else "text-generation")
        keys = tiny.read_json(f"{chain}/{run}/config.json").keys() - {"sha256", "format", "command", "commit"}
        assert keys and all(re.search(rf"^    {key} = ", text, re.MULTILINE) for key in keys)
        assert chain not in text and f"{run}.py" in text and ("made from `" in text or run == "sft")


def test_sample(chain, world, tmp_path):
    alone = [f"--policy_path={chain}/ppo/policy", "--max_new_tokens=6"]
    given = [*alone, f"--reward_path={chain}/rm/reward_model", f"--prompts={world.rl_val}", "--limit=3"]
    typed = "import io, sys; sys.stdin = io.TextIOWrapper(io.BytesIO(b'1+2=\\n\\n3+4=\\n'))"
    results = forked(str(tmp_path), {
        "one": [one_run("tools/sample.py", [*alone, "--prompt=1+2="])],
        "chat": [one_run("tools/sample.py", (alone, typed))],
        "six": [one_run("tools/sample.py", [*given, "--samples=6"])]})
    for (result,) in results.values():
        assert result["codes"] == [0] and result["stderr"] == [""], result
    one, chat, six = (result["stdout"][0] for (result,) in results.values())
    prompts = [row["prompt"] for row in tiny.read_jsonl(world.rl_val)][:3]
    assert [line[2:] for line in six.split("\n") if line.startswith("> ")] == prompts
    assert len(re.findall(r"\(score -?\d+\.\d\d\)$", six, re.M)) == 18
    # the first line of a chat draws the noise of the first prompt: the same question, the same answer
    answer = one.split("> 1+2=\n")[1]
    assert answer and f"\n{answer}" in chat and chat.split(answer, 1)[1]


# ---------------------------------------------------------------------------------------------------------------------
# sabotage

# what DEED names goes wrong; in iteration 1, unless a run ends in iteration 0, and on the last rank, unless it says otherwise
SABOTAGE = """
import torch
import model, parallel, prompts, rewards, rollout
now, held = -1, []

def patch(owner, name, change):
    original = getattr(owner, name)
    original = getattr(original, "original", original)  # another run of this process may have been here
    def changed(*args, **kwargs):
        return change(original, *args, **kwargs)
    changed.original = original
    setattr(owner, name, changed)

def due(*deeds):
    return now == 1 and RANK == RANKS - 1 and DEED in deeds

def matrix(number):
    return parallel.my_part(held[number].get_parameter("hf.transformer.h.0.mlp.c_fc.weight").data)

def broadcast(original, models):
    held[:] = models = list(models)
    original(models)
    if DEED == "another reference everywhere":
        matrix(1)[1, 2] += 0.25

def batch_rows(original, seed, iteration, *rest):  # may be called twice
    global now
    now = iteration
    if due("a bit of the reference") or now == 1 and DEED == "a bit of the reference everywhere":
        matrix(1).view(torch.int32).flatten()[3] += 1
    if due("a weight of model 0", "a weight of model 3"):  # the audit of this iteration has passed
        parallel.my_part(list(held[int(DEED[-1])].parameters())[-1].data).view(-1)[0] = torch.nan
    return original(seed, iteration, *rest)

def step(original, optimizer, *args, **kwargs):
    with open(f"steps-{RANK}", "a") as f:
        f.write(".")
    if due("the policy"):  # not earlier, or the on-policy check would notice first
        matrix(0)[1, 2] += 0.25
    if due("a moment"):
        state = list(optimizer.state.values())[-1]
        parallel.my_part(state["exp_avg"]).view(-1)[0] = torch.nan
    return original(optimizer, *args, **kwargs)

def scores(original, *args):
    x = original(*args)
    if due("a score"):
        x[0] = torch.nan
    return x

def spoil(name):
    def change(original, *args, **kwargs):  # the number is right, its gradient is not
        said = original(*args, **kwargs)
        x = said[0] if name == "policy" else said
        if due(f"the gradient of the {name}") and x.requires_grad:
            x.register_hook(lambda gradient: gradient * torch.nan)
        return said
    return change

def generate(original, policy, prompts, n, temperature, *rest, **kwargs):
    return original(policy, prompts, n, temperature * (1.2 if DEED == "the sampler" else 1), *rest, **kwargs)

def logits(original, self, states):
    if torch.is_grad_enabled() and DEED == "NaN forward" and RANK == RANKS - 1:
        states = states * torch.nan
    return original(self, states * (1.01 if DEED == "the forward" and torch.is_grad_enabled() else 1))

patch(prompts, "batch_rows", batch_rows)
patch(parallel, "broadcast_parameters", broadcast)
patch(rewards, "score_sequences", scores)
patch(model, "response_logprobs", spoil("policy"))
patch(model, "response_values", spoil("value model"))
patch(rollout, "generate", generate)
patch(model.Model, "logits", logits)
patch(torch.optim.AdamW, "step", step)
"""
# what goes wrong; what is said; how many optimizer steps come before; ranks, script and keys
STEPS = 2 * 2 * 2  # of both optimizers in an iteration: 2 epochs of 2 minibatches
FIRST = "iteration 0: before any update, the log-probs of "
LATE = dict(sync_check_interval=1000, max_iters=3, checkpoint_interval=1)  # no audit looks between, but before a save
MATRIX = r"parameter hf\.transformer\.h\.0\.mlp\.c_fc\.weight"
APART = rf"iteration 2: the ranks have drifted apart: policy, {MATRIX}, differs on rank 0 and rank 1"
CHANGED = rf"iteration 2: the frozen ref_policy has changed: {MATRIX} is not what it was at the start on rank "
GRADIENT = r"iteration 1: the gradient of {}'s \w\S+ is not finite; stopped before the step"
CASES = {
    "rank 1's policy": ("the policy", APART, 2 * STEPS, 2, "ppo", {}),
    # the log-probs differ first: the model is named all the same
    "rank 1's policy, late audit": ("the policy", APART, 2 * STEPS, 2, "ppo", LATE | dict(checkpoint_interval=0)),
    "reference": ("a bit of the reference everywhere", CHANGED + "0 and rank 1", 2 * STEPS, 2, "ppo", {}),
    "sharded reference": ("a bit of the reference", CHANGED + "1", 2 * STEPS, 2, "ppo", dict(zero_stage="ref=3")),
    "score": ("a score", r"iteration 1: reward/reward_model is not finite \(first in response \d ", STEPS, 2, "ppo", {}),
    "gradient": ("the gradient of the policy", GRADIENT.format("policy"), STEPS, 2, "ppo", {}),
    "another gradient": ("the gradient of the value model", GRADIENT.format("value_model"), STEPS, 2, "ppo", {}),
    "another reference": ("another reference everywhere", FIRST + "the reference differ", 0, 2, "ppo", {}),
    "sampler": ("the sampler", FIRST + "the sampler differ .*temperature", 0, 2, "ppo", {}),
    "forward": ("the forward", FIRST + "the training forward differ", 0, 2, "ppo", {}),
    "NaN forward": ("NaN forward", FIRST + "the training forward differ", 0, 2, "ppo", {}),
    "NaN forward alone": ("NaN forward", FIRST + "the training forward differ", 0, 1, "ppo", {}),
    # what is not finite is named by model and parameter
    **{name: (deed, f"iteration [12]: .*{words}", None, ranks, script, LATE | keys)
       for name, deed, words, ranks, script, keys in (
           ("weight", "a weight of model 0", "policy's hf.lm_head.weight", 1, "ppo", {}),
           ("weight of a shard", "a weight of model 0", "policy's hf.lm_head.weight is not finite on rank 1", 2, "grpo",
            dict(zero_stage="3")),
           ("weight of the value model", "a weight of model 3", "value_model's hf.score.weight", 1, "ppo", {}),
           ("weight of rm", "a weight of model 0", "reward_model's hf.score.weight", 1, "rm", {}),
           ("moment", "a moment", "the optimizer's state of policy's hf.lm_head.weight", 1, "grpo", {}),
           ("moment at stage 1", "a moment", "the optimizer's state of policy's hf.", 2, "grpo", dict(zero_stage="1")),
           ("moment of an adapter", "a moment", "the optimizer's state of reward_model's adapters.", 1, "rm", dict(lora="2")))},
}


@pytest.fixture(scope="module")
def sabotaged(world, tmp_path_factory):
    jobs = {}
    for case, (deed, _, _, ranks, script, keys) in CASES.items():
        keys = dict(max_iters=2, sync_check_interval=1) | keys
        args = getattr(world, script)("out", **keys)
        jobs[case] = one_run(f"{script}.py", *[(args, f"DEED, RANKS = {deed!r}, {ranks}\n{SABOTAGE}")] * ranks)
    return in_a_row(tmp_path_factory.mktemp("sabotage"), jobs)


@pytest.mark.parametrize("case", CASES)
def test_sabotage_stops_all_ranks_before_the_step(sabotaged, case):
    """And what a run that resumes begins with is finite."""
    _, pattern, steps, *_ = CASES[case]
    first, last = sabotaged[case][0], sabotaged[case][-1]
    assert first["kind"] == last["kind"] == "Stop" and first["message"] == last["message"], (first, last)
    message = first["message"]
    assert re.match(pattern, message) and "\n" not in message and "sampler_logprobs" not in message, message
    for rank in range(len(sabotaged[case])):
        file = f"{sabotaged.folder}/{case}/steps-{rank}"
        assert steps is None or (os.path.getsize(file) if steps else os.path.exists(file)) == steps
    saved = glob.glob(f"{sabotaged.out(case)}/checkpoint-*/**/*.safetensors", recursive=True)
    assert all(t.isfinite().all() for file in saved for t in load_file(file).values())
    assert saved or not CASES[case][-1].get("checkpoint_interval")

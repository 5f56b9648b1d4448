"""The scripts as a user runs them, each once; then sabotage: what one rank computes otherwise stops all before the step."""
import json
import math
import os
import re

import pytest
import yaml

import tiny
from tiny import forked, one_run


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
    """At every iteration, and those of evaluations where there was one; all are finite."""
    sft, rm, ppo = (tiny.read_log(f"{chain}/{name}") for name in ("sft", "rm", "ppo"))
    assert [[r["iteration"] for r in log] for log in (sft, rm, ppo)] == [[0, 1, 2, 3]] * 2 + [[0, 1, 2]]
    assert sft[-1]["eval/loss"] < sft[0]["eval/loss"]
    assert {"eval/loss", "eval/accuracy", "loss/preference", "train/accuracy", "reward_model/grad_norm"} <= rm[0].keys()
    evaluation = {"eval/scores", "eval/kl", "eval/entropy", "eval/length", "eval/finished", "eval/accuracy", "eval/thinks"}
    assert evaluation <= ppo[0].keys() and evaluation <= ppo[-1].keys() and not evaluation & ppo[1].keys()
    wanted = {"objective/texts", "objective/accuracy", "policy/ratio_gap", "policy/sampler_gap", "time/rollout", "time/score",
              "time/update", "time/iteration", "mem/peak_mib"}  # the others are by_hand.py's
    for record in ppo[:-1]:
        assert wanted <= record.keys() and all(math.isfinite(v) for v in record.values() if not isinstance(v, str))
    assert ppo[0]["objective/kl"] == ppo[0]["eval/kl"] == 0 != ppo[1]["objective/kl"]


def card_of(folder):
    """(the YAML head, the text) of a model card."""
    with open(os.path.join(folder, "README.md"), encoding="utf-8") as f:
        _, head, text = f.read().split("---\n", 2)
    return yaml.safe_load(head), text


def test_model_cards_say_what_a_model_is(chain):
    for run, name in (("sft", "policy"), ("rm", "reward_model"), ("ppo", "policy"), ("ppo", "best_policy"),
                      ("ppo", "value_model")):
        head, text = card_of(f"{chain}/{run}/{name}")
        scalar = name in ("reward_model", "value_model")
        assert head == dict(library_name="transformers", tags=["quartet"],
                            pipeline_tag="text-classification" if scalar else "text-generation")
        with open(f"{chain}/{run}/config.json", encoding="utf-8") as f:
            keys = json.load(f).keys() - {"sha256", "format", "command", "commit"}
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
    prompts = [json.loads(line)["prompt"] for line in open(world.rl_val, encoding="utf-8")][:3]
    assert [line[2:] for line in six.split("\n") if line.startswith("> ")] == prompts
    assert len(re.findall(r"\(score -?\d+\.\d\d\)$", six, re.M)) == 18
    # the first line of a chat draws the noise of the first prompt: the same question, the same answer
    answer = one.split("> 1+2=\n")[1]
    assert answer and f"\n{answer}" in chat and chat.split(answer, 1)[1]


# ---------------------------------------------------------------------------------------------------------------------
# sabotage

SABOTAGE = """
import json, torch
import prompts, model, parallel, rewards, rollout
case, now, held, steps = os.environ.get("CASE"), -1, {}, 0

def patch(owner, name, change):
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: change(original, *args, **kwargs))

def hurt(name):
    held[name].get_parameter("hf.transformer.h.0.mlp.c_fc.weight").data[1, 2] += 0.25

def broadcast(original, models):
    models = list(models)
    held.update(zip(("policy", "ref_policy", "reward_model", "value_model"), models))
    original(models)
    if case == "another reference":
        hurt("ref_policy")

def batch_rows(original, seed, iteration, *rest):
    global now
    now = iteration
    if now == 1 and case == "ref_policy on all ranks":
        hurt("ref_policy")
    return original(seed, iteration, *rest)

def step(original, optimizer, *args):
    global steps
    steps += 1
    if now == 1 and RANK == 1 and case.startswith("policy"):  # not earlier, or the on-policy check would notice first
        hurt("policy")
    return original(optimizer, *args)

def scores(original, *args):
    x = original(*args)
    if now == 1 and RANK == 1 and case == "NaN score":
        x[0] = torch.nan
    return x

def spoil(name):
    def change(original, *args, **kwargs):  # the number is right, its gradient is not
        said = original(*args, **kwargs)
        x = said[0] if name == "policy" else said
        if now == 1 and RANK == 1 and case == f"NaN {name}" and x.requires_grad:
            x.register_hook(lambda gradient: gradient * torch.nan)
        return said
    return change

def generate(original, policy, prompts, n, temperature, *rest, **kwargs):
    return original(policy, prompts, n, temperature * (1.2 if case == "sampler" else 1), *rest, **kwargs)

def logits(original, self, states):
    if torch.is_grad_enabled() and case.startswith("NaN forward") and RANK in (1, case.endswith("alone") - 1):
        states = states * torch.nan
    return original(self, states * (1.01 if case == "forward" and torch.is_grad_enabled() else 1))

patch(prompts, "batch_rows", batch_rows)
patch(parallel, "broadcast_parameters", broadcast)
patch(rewards, "score_sequences", scores)
patch(model, "response_logprobs", spoil("policy"))
patch(model, "response_values", spoil("value_model"))
patch(rollout, "generate", generate)
patch(model.Model, "logits", logits)
patch(torch.optim.AdamW, "step", step)
"""

# Runs the script, and writes what it raised, instead of ending as it would.
RAISED = """
import runpy
def run_path(original, *args, **kwargs):
    kind, message = "nothing", ""
    try:
        original(*args, **kwargs)
    except Exception as e:
        kind, message = type(e).__name__, str(e)
    finite = all(bool(p.isfinite().all()) for m in ("policy", "value_model") for p in held[m].parameters())
    with open(f"said{RANK}.json", "w") as f:
        json.dump(dict(kind=kind, message=message, steps=steps, finite=finite), f)
patch(runpy, "run_path", run_path)
"""

STEPS = 2 * 2 * 2  # of both optimizers in an iteration: 2 epochs of 2 minibatches
CASES = {  # case -> what is said, optimizer steps before
    "policy on rank 1": (r"iteration 2: .*: policy, parameter \S+, differs on rank 0 and rank 1", 2 * STEPS),
    # between two audits, the log-probs differ first: the model is named all the same
    "policy on rank 1, late audit": (r"iteration 2: the ranks have drifted apart: policy, parameter \S+, differs on", 2 * STEPS),
    "ref_policy on all ranks": (
        r"iteration 2: the frozen ref_policy has changed: parameter hf\.transformer\.h\.0\.mlp\.c_fc\.weight", 2 * STEPS),
    "NaN score": (r"iteration 1: reward/reward_model is not finite \(first in response \d ", STEPS),
    "NaN policy": (r"iteration 1: the gradient of policy's \w\S+ is not finite; stopped before the step", STEPS),
    "NaN value_model": (r"iteration 1: the gradient of value_model's \w\S+ is not finite; stopped before the step", STEPS),
    "another reference": (r"iteration 0: before any update, the log-probs of the reference differ", 0),
    "sampler": (r"iteration 0: before any update, the log-probs of the sampler differ .*temperature", 0),
    "forward": (r"iteration 0: before any update, the log-probs of the training forward differ", 0),
    "NaN forward": (r"iteration 0: before any update, the log-probs of the training forward differ", 0),
    "NaN forward alone": (r"iteration 0: before any update, the log-probs of the training forward differ", 0),
}


@pytest.fixture(scope="module")
def sabotaged(world, tmp_path_factory):
    """What each of two ranks, or the only one, raised in each case: {case: [rank 0's, rank 1's]}."""
    out, runs = tmp_path_factory.mktemp("sabotage"), {}
    for case in CASES:
        code = f"import os\nos.environ['CASE'] = {case!r}\n{SABOTAGE}{RAISED}"
        late = dict(sync_check_interval=1000, max_iters=3) if "late audit" in case else dict(max_iters=2)
        args = world.ppo("out", **dict(sync_check_interval=1, timeout=20, eval_path="") | late)
        runs[case] = [one_run("ppo.py", *[(args, code)] * (1 if "alone" in case else 2))]
    results = {case: result for case, (result,) in forked(str(out), runs, at_once=4).items()}
    assert all(set(result["codes"]) == {0} for result in results.values()), results
    return {case: [json.loads((out / case / f"said{rank}.json").read_text()) for rank in range(len(result["codes"]))]
            for case, result in results.items()}


@pytest.mark.parametrize("case", CASES)
def test_sabotage_stops_all_ranks_before_the_step(sabotaged, case):
    pattern, steps = CASES[case]
    for said in sabotaged[case]:
        assert said["kind"] == "Stop", said
        assert re.search(pattern, said["message"]) and "\n" not in said["message"], said
        assert said["steps"] == steps and said["finite"], said
    assert sabotaged[case][0]["message"] == sabotaged[case][-1]["message"]

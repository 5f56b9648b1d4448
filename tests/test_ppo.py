"""The scripts as a user runs them: each once; then what ppo.py promises about ranks and sabotage."""
import json
import math
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from model import load_model

import tiny
from tiny import alike, forked, in_a_row, measured, one_run


FROZEN, TRAINED = ("ref_policy", "reward_model"), ("policy", "value_model")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return tiny.build(str(tmp_path_factory.mktemp("world")))


def succeeded(result):
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    return result


# ---------------------------------------------------------------------------------------------------------------------
# every script once


@pytest.fixture(scope="module")
def chain_and_stopped(world, tmp_path_factory):
    """The two fixtures below, one beside the other."""
    def chain(out):
        policy, reward = f"{out}/sft/policy", f"{out}/rm/reward_model"
        succeeded(tiny.run("sft.py", *world.sft(f"{out}/sft")))
        succeeded(tiny.run("rm.py", *world.rm(f"{out}/rm", init_from=policy)))
        succeeded(tiny.run("ppo.py", *world.ppo(f"{out}/ppo", policy_path=policy, reward_path=reward)))
        return out

    def stopped(out):
        wrapper, began = tiny.wrap(f"{out}/wrapper.py", SABOTAGE), time.time()
        result = tiny.run("ppo.py", *world.ppo(f"{out}/out", sync_check_interval=1), ranks=2, wrapper=wrapper,
                          env={"CASE": "policy on rank 1"})
        return out, result, time.time() - began

    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(run, str(tmp_path_factory.mktemp(run.__name__))) for run in (chain, stopped)]
    return [one.result() for one in both]


@pytest.fixture(scope="module")
def chain(chain_and_stopped):
    """sft.py from scratch -> rm.py -> ppo.py, each from the folder that the one before has left. Returns their folder."""
    return chain_and_stopped[0]


@pytest.fixture(scope="module")
def stopped(chain_and_stopped):
    """ppo.py on two ranks by torchrun, where the policy changes on rank 1: its folder, result and seconds."""
    return chain_and_stopped[1]


def test_sft_and_rm_leave_models_and_logs(chain):
    log = tiny.read_log(f"{chain}/sft")
    assert [r["iteration"] for r in log] == [0, 1, 2, 3]
    assert {"eval/loss", "loss/sft", "policy/grad_norm", "policy/lr", "time/iteration"} <= log[0].keys()
    assert log[-1]["eval/loss"] < log[0]["eval/loss"]
    log = tiny.read_log(f"{chain}/rm")
    assert {"eval/loss", "eval/accuracy", "loss/preference", "train/accuracy", "reward_model/grad_norm"} <= log[0].keys()
    assert {"eval/loss", "eval/accuracy"} <= log[-1].keys() and log[-1]["iteration"] == 3
    reward_model = load_model(f"{chain}/rm/reward_model", head="scalar")
    assert not reward_model.new_head and reward_model.score_shift != 0


def test_ppo_logs_every_phase(chain):
    log = tiny.read_log(f"{chain}/ppo")
    assert [r["iteration"] for r in log] == [0, 1, 2, 3]
    evaluation = {"eval/scores", "eval/kl", "eval/entropy", "eval/length", "eval/finished", "eval/accuracy", "eval/thinks"}
    assert evaluation <= log[0].keys() and evaluation <= log[-1].keys() and not evaluation & log[1].keys()
    wanted = {"objective/texts", "objective/scores", "objective/kl", "objective/entropy", "objective/accuracy",
              "objective/kl_coef", "objective/non_score_reward", "objective/rlhf_reward", "loss/policy", "loss/value",
              "policy/approx_kl", "policy/clipfrac", "policy/ratio_gap", "policy/sampler_gap", "policy/grad_norm", "policy/lr",
              "val/clipfrac", "val/explained_variance", "val/grad_norm", "val/lr", "time/rollout", "time/score", "time/update",
              "mem/peak_mib"}
    for record in log[:-1]:
        assert wanted <= record.keys()
        assert all(math.isfinite(v) for v in record.values() if not isinstance(v, str))
    assert log[0]["objective/kl"] == log[0]["eval/kl"] == 0 != log[1]["objective/kl"]


@torch.no_grad()
def test_transformers_loads_what_ppo_leaves(chain, world):
    import transformers as hf

    tokens = torch.randint(0, 260, (3, 12), generator=torch.Generator().manual_seed(0))
    theirs = hf.AutoModelForCausalLM.from_pretrained(f"{chain}/ppo/policy").eval()(tokens).logits
    ours = load_model(f"{chain}/ppo/policy")
    assert theirs.std() > 0.1 and (theirs - ours.logits(ours.states(tokens))).abs().max() < 1e-4
    values = hf.AutoModelForSequenceClassification.from_pretrained(f"{chain}/ppo/value_model").eval()
    theirs = values.score(values.base_model(tokens).last_hidden_state)[..., 0]
    ours = load_model(f"{chain}/ppo/value_model", head="scalar")
    assert (theirs + ours.score_shift - ours.scalars(ours.states(tokens))).abs().max() < 1e-4
    backend = hf.AutoTokenizer.from_pretrained(f"{chain}/ppo/policy")
    assert backend("<think>1</think>2=é")["input_ids"] == [256, 49, 257, 50, 61, 0xC3, 0xA9]


def test_sample_and_plot(chain, world, tmp_path):
    policy, reward = f"--policy_path={chain}/ppo/policy", f"--reward_path={chain}/rm/reward_model"
    picture = tmp_path / "new" / "two.png"
    size = "--max_new_tokens=6"
    chat, plot = tiny.run_all([
        (("tools/sample.py", policy, size), dict(stdin="1+2=\n\n3+4=\n")),
        (("tools/plot.py", f"--runs={chain}/ppo,{chain}/sft", f"--out={picture}"), {}),
    ])
    for result in (chat, plot):
        assert succeeded(result).stderr == ""
    results = forked(str(tmp_path), {
        "one": [one_run("tools/sample.py", [policy, size, "--prompt=1+2="])],
        "file": [one_run("tools/sample.py", [policy, size, f"--prompts={world.rl_val}", "--limit=3", "--samples=2", reward])],
        "six": [one_run("tools/sample.py", [policy, size, f"--prompts={world.rl_val}", "--limit=3", "--samples=6", reward])],
        "best": [one_run("tools/sample.py", [policy, size, f"--prompts={world.rl_val}", "--limit=3", "--samples=2", reward,
                                             "--best_of=3", "--batch_size=4"])]})
    for (result,) in results.values():
        assert result["codes"] == [0] and result["stderr"] == [""], result
    one, file, six, best = (result["stdout"][0] for (result,) in results.values())
    prompts = [json.loads(line)["prompt"] for line in open(world.rl_val, encoding="utf-8")][:3]
    assert [line[2:] for line in one.split("\n") if line.startswith("> ")] == ["1+2="]
    assert [line[2:] for line in file.split("\n") if line.startswith("> ")] == prompts
    assert len(re.findall(r"\(score -?\d+\.\d\d\)$", file, re.M)) == 6
    # of each three of the six responses, best_of = 3 shows the one of the highest score
    each, kept = (re.findall(r"^(.*)   \(score (-?\d+\.\d\d)\)$", text, re.M) for text in (six, best))
    highest = [max(float(score) for _, score in each[i:i + 3]) for i in range(0, 18, 3)]
    assert len(each) == 18 and highest == [float(score) for _, score in kept]
    assert all(kept[i] in each[3 * i:3 * i + 3] for i in range(6)) and best.count("\n> ") == 3
    assert "the best of 3 by its score: at most 0.432 nats" in best
    # the first line of a chat draws the noise of the first prompt: the same question, the same answer
    answer = one.split("> 1+2=\n")[1]
    assert answer and f"\n{answer}" in chat.stdout and chat.stdout.split(answer, 1)[1]
    data = picture.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and len(data) > 5000
    rows = [line.split() for line in plot.stdout.splitlines() if line.startswith(("ppo ", "sft "))]
    assert [row[:2] for row in rows] == [["ppo", "0"], ["ppo", "3"], ["sft", "0"], ["sft", "3"]]


# ---------------------------------------------------------------------------------------------------------------------
# one run, any number of ranks, any memory knob

IN_REWARD = dict(dtype="float64", num_minibatches=4, kl_coef_target=1.0)  # of 2, 2, 2, 1 rows: fewer than ranks
IN_LOSS = dict(dtype="float64", kl_estimator="k2", entropy_coef=0.05, target_kl=0.15, value_init="policy",
               gamma=0.95, reward_clip=0.7, cliprange_value=0.0, grad_clip=0.3, weight_decay=0.1, warmup_iters=2, max_iters=4,
               learning_rate=3e-3)
MEMORY = dict(micro_batch_size=64, rollout_batch_size=3, head_chunk=5, gradient_checkpointing=True)


@pytest.fixture(scope="module")
def ranks(world, tmp_path_factory):
    """The same runs on one rank, on three with other memory knobs, and some on two: RANKS/NAME in this folder."""
    out = str(tmp_path_factory.mktemp("ranks"))
    in_loss = IN_LOSS | dict(reward_path=world.other_reward)

    def calls(folder, more, micro):
        return [("ppo.py", world.ppo(f"{folder}/reward", **IN_REWARD | more)),
                ("ppo.py", world.ppo(f"{folder}/loss", **in_loss | more)),
                ("ppo.py", world.ppo(f"{folder}/single", dtype="float32")),
                ("sft.py", world.sft(f"{folder}/sft", dtype="float64", micro_batch_size=micro)),
                ("rm.py", world.rm(f"{folder}/rm", dtype="float64", micro_batch_size=micro)),
                ("grpo.py", world.grpo(f"{folder}/grpo", dtype="float64", max_iters=1))]

    half = [("ppo.py", world.ppo(f"{out}/half", dtype="bfloat16"))]
    jobs = {f"job {n} {i}": one_run(script, *[args] * n)
            for n, work in ((3, calls(f"{out}/3", MEMORY, 1)[:5]), (2, calls(f"{out}/2", {}, 7)[2:]),
                            (1, calls(f"{out}/1", {}, 3) + half))
            for i, (script, args) in enumerate(work)}
    outcomes = in_a_row(out, jobs)
    for name, each in outcomes.items():
        assert {outcome["kind"] for outcome in each} == {""}, (name, each)
    return out


@pytest.mark.parametrize("name", ["reward", "loss"])
def test_ranks_and_memory_do_not_change_a_run(ranks, world, name):
    """(On two ranks, with shards: test_knobs.py.)"""
    one, three = f"{ranks}/1/{name}", f"{ranks}/3/{name}"
    logs = [[measured(r) for r in tiny.read_log(folder)] for folder in (one, three)]
    assert [r.get("objective/texts") for r in logs[0]] == [r.get("objective/texts") for r in logs[1]]
    assert alike(*logs, tolerance=1e-9)
    for model in TRAINED:
        assert tiny.distance(f"{one}/{model}", f"{three}/{model}") < 1e-9


def test_those_runs_had_something_to_get_wrong(ranks, world):
    """Weights moved, lengths and endings differed, the adaptive coefficient moved, target_kl cut some iterations short."""
    for name, value_start in (("reward", world.reward), ("loss", None)):
        folder = f"{ranks}/1/{name}"
        assert tiny.distance(world.policy, f"{folder}/policy") > 1e-3
        if value_start:
            assert tiny.distance(value_start, f"{folder}/value_model") > 1e-3
        log = tiny.read_log(folder)[:-1]
        assert len(log) >= 3 and len({r["objective/texts"] for r in log}) == len(log)
        assert any(0 < r["objective/finished"] < 1 for r in log)
        assert all(r["policy/clipfrac"] > 0 for r in log)
    assert len({r["objective/kl_coef"] for r in tiny.read_log(f"{ranks}/1/reward")[:-1]}) == 3
    steps = [r["policy/steps"] for r in tiny.read_log(f"{ranks}/1/loss")[:-1]]
    assert min(steps) < 4 == max(steps)


def test_another_tokenizers_reward_model_scores_the_text(ranks, world):
    """IN_LOSS has a reward model whose markers have each other's ids; the policy's text is tokenized anew for it."""
    from engine.tokenizers import load_tokenizer

    tokenizers = [load_tokenizer(path) for path in (world.policy, world.other_reward)]
    assert tokenizers[0].fingerprint != tokenizers[1].fingerprint
    assert all(math.isfinite(r["objective/scores"]) for r in tiny.read_log(f"{ranks}/1/loss")[:-1])


def test_float32_samples_the_same_texts_on_two_ranks(ranks):
    texts = [[r["objective/texts"] for r in tiny.read_log(f"{ranks}/{n}/single")[:-1]] for n in (1, 2, 3)]
    assert texts[0] == texts[1] == texts[2] and len(set(texts[0])) == 3


@pytest.mark.parametrize("name, model", [("sft", "policy"), ("rm", "reward_model")])
def test_ranks_and_memory_do_not_change_sft_and_rm(ranks, name, model):
    one = f"{ranks}/1/{name}"
    for other in ("2", "3"):
        logs = [[measured(r) for r in tiny.read_log(folder)] for folder in (one, f"{ranks}/{other}/{name}")]
        assert alike(*logs, tolerance=1e-9), other
        assert tiny.distance(f"{one}/{model}", f"{ranks}/{other}/{name}/{model}") < 1e-9, other


def test_two_ranks_do_not_change_grpo(ranks):
    """Its other promises about ranks have their tests in test_grpo.py."""
    logs = [[measured(r) for r in tiny.read_log(folder)] for folder in (f"{ranks}/1/grpo", f"{ranks}/2/grpo")]
    assert alike(*logs, tolerance=1e-9) and len(logs[0]) == 2
    assert tiny.distance(f"{ranks}/1/grpo/policy", f"{ranks}/2/grpo/policy") < 1e-9


def test_bfloat16_stays_on_policy(ranks):
    log = tiny.read_log(f"{ranks}/half")[:-1]
    assert len(log) == 3 and all(0 < r["policy/sampler_gap"] < 0.02 for r in log)


# ---------------------------------------------------------------------------------------------------------------------
# sabotage

SABOTAGE = """
import json, torch
import data, loss, model, parallel, rewards, rollout
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
    if now == 2 and (case == "reward_model on rank 1" and RANK == 1 or case == "ref_policy on all ranks"):
        hurt("reward_model" if RANK == 1 and case.startswith("reward_model") else "ref_policy")
    return original(seed, iteration, *rest)

def step(original, optimizer, *args):
    global steps
    steps += 1
    if now == 2 and RANK == 1 and case == "policy on rank 1":  # not earlier, or the on-policy check would notice first
        hurt("policy")
    return original(optimizer, *args)

def scores(original, *args):
    x = original(*args)
    if now == 2 and RANK == 1 and case == "NaN score":
        x[0] = torch.nan
    return x

def spoil(name):
    def change(original, *args, **kwargs):  # the number is right, its gradient is not
        said = original(*args, **kwargs)
        x = said[0] if name == "policy" else said
        if now == 2 and RANK == 1 and case == f"NaN {name}" and x.requires_grad:
            x.register_hook(lambda gradient: gradient * torch.nan)
        return said
    return change

def generate(original, policy, prompts, n, temperature, *rest, **kwargs):
    return original(policy, prompts, n, temperature * (1.2 if case == "sampler" else 1), *rest, **kwargs)

def logits(original, self, states):
    return original(self, states * (1.01 if case == "forward" and torch.is_grad_enabled() else 1))

patch(data, "batch_rows", batch_rows)
patch(parallel, "broadcast_parameters", broadcast)
patch(rewards, "score_sequences", scores)
patch(loss, "response_logprobs", spoil("policy"))
patch(loss, "response_values", spoil("value_model"))
patch(rollout, "generate_in_parts", generate)
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
    "reward_model on rank 1": (
        r"iteration 3: .*: reward_model, parameter hf\.transformer\.h\.0\.mlp\.c_fc\.weight, differs on .*rank 1", 3 * STEPS),
    "ref_policy on all ranks": (
        r"iteration 3: the frozen ref_policy has changed: parameter hf\.transformer\.h\.0\.mlp\.c_fc\.weight", 3 * STEPS),
    "NaN score": (r"iteration 2: reward/reward_model is not finite \(first in response 3 ", 2 * STEPS),
    "NaN policy": (r"iteration 2: the gradient of policy's \w\S+ is not finite; stopped before the step", 2 * STEPS),
    "NaN value_model": (r"iteration 2: the gradient of value_model's \w\S+ is not finite; stopped before the step", 2 * STEPS),
    "another reference": (r"iteration 0: before any update, the log-probs of the reference differ", 0),
    "sampler": (r"iteration 0: before any update, the log-probs of the sampler differ .*temperature", 0),
    "forward": (r"iteration 0: before any update, the log-probs of the training forward differ", 0),
    "": ("", 3 * STEPS),  # without sabotage, the sabotaged script is ppo.py
}


@pytest.fixture(scope="module")
def sabotaged(world, tmp_path_factory):
    """What each of two ranks raised in each case: {case: [rank 0's, rank 1's]}."""
    out, runs = tmp_path_factory.mktemp("sabotage"), {}
    for case in CASES:
        code = f"import os\nos.environ['CASE'] = {case!r}\n{SABOTAGE}{RAISED}"
        args = world.ppo("out", sync_check_interval=1, timeout=20, eval_path="")
        runs[case or "none"] = [one_run("ppo.py", (args, code), (args, code))]
    for (result,) in forked(str(out), runs, at_once=4).values():
        assert result["codes"] == [0, 0], result
    return {case: [json.loads((out / (case or "none") / f"said{rank}.json").read_text()) for rank in (0, 1)] for case in CASES}


@pytest.mark.parametrize("case", CASES)
def test_sabotage_stops_all_ranks_before_the_step(sabotaged, case):
    pattern, steps = CASES[case]
    for said in sabotaged[case]:
        assert said["kind"] == ("Stop" if case else "nothing"), said
        assert re.search(pattern, said["message"]) and "\n" not in said["message"], said
        assert said["steps"] == steps and said["finite"], said
    assert sabotaged[case][0]["message"] == sabotaged[case][1]["message"]


def test_a_stopped_job_ends_at_once_with_one_line(stopped):
    """The real thing: the policy changes on rank 1, and the user sees one line and the exit code of a failure."""
    folder, result, seconds = stopped
    assert result.returncode != 0 and seconds < 120
    lines = [line for line in result.stderr.splitlines() if "ppo.py" in line and "error" in line]
    assert len(lines) == 1, result.stderr
    assert re.search(r"ppo\.py: error: iteration 3: .*: policy, parameter \S+, differs on .*rank 1 ", lines[0])
    assert 'ppo.py", line' not in result.stderr  # no traceback of ours (torchrun prints its own)
    assert not os.path.exists(f"{folder}/out/policy")

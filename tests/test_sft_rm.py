"""
The keys of engine/keys.py in sft.py and rm.py: how a model is split, offloaded or stored changes what a
run holds and not what it learns. Whole runs, in float64, compared with a plain one on one rank.
"""
import json
import os
import re

import pytest

import tiny
from configurator import read_keys
from test_zero import in_a_row, succeeded
from tiny import forked, one_run

PRODUCTS = {"sft.py": "policy", "rm.py": "reward_model"}
LOSSES = {"sft.py": ["loss/sft", "eval/loss"], 
          "rm.py": ["loss/preference", "eval/loss", "eval/accuracy", "eval/calibration_error", "loss/centring"]}
NAMES = {"sft.py": "policy", "rm.py": "reward"}  # what the one model is called in the keys
scripts = pytest.mark.parametrize("script", PRODUCTS)

# writes what each rank holds: numbers of weights after the start, and of the optimizer's states after each step
WATCH = """
import json
import parallel
from engine import optimizers
original_broadcast, original_step, held = parallel.broadcast_parameters, optimizers.step, {}

def write(**facts):
    held.update(facts)
    with open(f"held-{RANK}.json", "w") as f:
        json.dump(held, f)

def broadcast(models):
    models = list(models)
    original_broadcast(models)
    parts = [parallel.my_part(p) for m in models for p in m.parameters()]
    write(weights=sum(p.numel() for p in parts), dtypes=sorted({str(p.dtype) for p in parts}), steps=0)

def step(optimizer, lr):
    original_step(optimizer, lr)
    inner = optimizers.inner(optimizer)
    states = [parallel.my_part(t) for state in inner.state.values() for t in state.values()]
    write(optimizer=type(inner).__name__, states=sum(t.numel() for t in states), steps=held["steps"] + 1)

parallel.broadcast_parameters, optimizers.step = broadcast, step
"""

# name: (ranks, keys, the run that it must equal); NAME is the model's name in the keys
RUNS = {
    "plain": (1, {}, None),
    "two ranks": (2, {}, "plain"),
    "stage 1": (2, dict(zero_stage="1"), "plain"),
    "stage 2": (2, dict(zero_stage="NAME=2", gradient_checkpointing=True), "plain"),
    "stage 3": (2, dict(zero_stage="3", micro_batch_size=1), "plain"),
    "stage 3, three ranks": (3, dict(zero_stage="3"), "plain"),
    "offload": (2, dict(offload="optimizer"), "plain"),
    "stage 3, offload": (2, dict(zero_stage="3", offload="NAME=optimizer"), "plain"),
    "stage 3, params": (2, dict(zero_stage="NAME=3", offload="NAME=params"), "plain"),
    # one row for two ranks: one of them has none, to learn from or to evaluate on
    "one row": (1, dict(batch_size=1, eval_size=1), None),
    "one row, stage 3": (2, dict(batch_size=1, eval_size=1, zero_stage="3"), "one row"),
    "adapter": (1, dict(lora="2"), None),
    "adapter, stage 3": (2, dict(lora="NAME=2", zero_stage="3"), "adapter"),
    # where a gradient is 0 on paper, Adafactor's step is one of noise: it depends on the number of ranks
    "adafactor": (2, dict(optim="adafactor"), None),
    "adafactor, stage 1": (2, dict(optim="NAME=adafactor", zero_stage="1"), "adafactor"),
}
SFT_RUNS = {
    "head_chunk": (1, dict(head_chunk=5), "plain"),
    "stage 3, head_chunk": (2, dict(zero_stage="3", head_chunk=5), "plain"),
    "scratch": (1, dict(init_from="scratch"), None),
    "scratch, stage 3": (2, dict(init_from="scratch", zero_stage="3", offload="params"), "scratch"),
    "scratch, stage 2": (2, dict(init_from="scratch", zero_stage="2", gradient_checkpointing=True), "scratch"),
}
# name: (first the ranks and keys of a run of 2 iterations, then of its third)
GOES_ON = {
    "3 to 1": ((2, dict(zero_stage="3")), (2, dict(zero_stage="1", offload="optimizer"))),
    "0 to 3": ((1, {}), (2, dict(zero_stage="3"))),
}
FLOAT16 = {  # name: (keys, the step in which rank 1 overflows, steps that are taken)
    "float16": ({}, 0, 3), "float16, an overflow": ({}, 2, 2), "float16, an overflow of a shard": (dict(zero_stage="3"), 2, 2)}
PRECISE = {"bfloat16": (True, ["torch.float32"]), "pure bfloat16": (False, ["torch.bfloat16"])}


def runs_of(script):
    return RUNS | (SFT_RUNS if script == "sft.py" else {})


def job(world, script, ranks, code="", only=None, **keys):
    """A run of a script on the tiny world, watched; code is put in before it, on all ranks or only on one."""
    keys = dict(init_from=world.policy, dtype="float64", eval_interval=1, eval_size=5, weight_decay=0.1) | keys
    keys = {k: v.replace("NAME", NAMES[script]) if isinstance(v, str) else v for k, v in keys.items()}
    arguments = getattr(world, script.removesuffix(".py"))("out", **keys)
    return one_run(script, *((arguments, WATCH + (code if only in (None, rank) else "")) for rank in range(ranks)))


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return tiny.build(str(tmp_path_factory.mktemp("world")))


@pytest.fixture(scope="module")
def done(world, tmp_path_factory):
    """A folder with a folder of each run, and what came of the runs (of the last part, where there are two)."""
    root, runs, second = str(tmp_path_factory.mktemp("runs")), {}, {}
    for script in PRODUCTS:
        def add(name, *args, to=runs, script=script, **keys):
            to[f"{script} {name}"] = job(world, script, *args, **keys)

        for name, (ranks, keys, _) in runs_of(script).items():
            add(name, ranks, **keys)
        for name, parts in GOES_ON.items():
            for (ranks, keys), iterations, to in zip(parts, (2, 3), (runs, second), strict=True):
                add(name, ranks, to=to, max_iters=iterations, lr_decay="constant", **keys)
        add("whole", 1, lr_decay="constant")
        for name, (keys, number, _) in FLOAT16.items():
            add(name, 2, tiny.overflow(f"steps == {number}"), 1, dtype="float16", **keys)
        for name, (master, _) in PRECISE.items():
            add(name, 2, dtype="bfloat16", master_weights=master, zero_stage="3")
        add("float32", 2, dtype="float32")
    return root, succeeded(in_a_row(root, runs)) | succeeded(in_a_row(root, second))


def folder(done, script, name):
    return f"{done[0]}/{script} {name}/out"


def apart(done, script, *names):
    """The largest difference between the products of two runs."""
    return tiny.distance(*(f"{folder(done, script, name)}/{PRODUCTS[script]}" for name in names))


def held(done, script, name, rank=0):
    with open(f"{folder(done, script, name)}/../held-{rank}.json", encoding="utf-8") as f:
        return json.load(f)


PAIRS = [(script, name) for script in PRODUCTS for name, (_, _, other) in runs_of(script).items() if other]


@pytest.mark.parametrize("script, name", PAIRS)
def test_how_a_model_is_held_changes_nothing(done, script, name):
    other = runs_of(script)[name][2]
    assert apart(done, script, name, other) < 1e-9
    logs = [tiny.read_log(folder(done, script, n)) for n in (name, other)]
    assert len(logs[0]) == len(logs[1]) == 4
    for ours, theirs in zip(*logs, strict=True):
        for key in LOSSES[script]:
            assert (key in ours) == (key in theirs)
            assert key not in ours or abs(ours[key] - theirs[key]) < 1e-9, (key, ours, theirs)
    configs = [json.load(open(f"{folder(done, script, n)}/{PRODUCTS[script]}/config.json")) for n in (name, other)]
    shifts = [config.pop("score_shift", 0.0) for config in configs]
    assert abs(shifts[0] - shifts[1]) < 1e-9 and configs[0] == configs[1]
    assert (shifts[0] != 0) == (script == "rm.py")


@scripts
def test_those_runs_moved(done, world, script):
    for name in runs_of(script):
        if script == "sft.py" and "scratch" not in name:
            assert tiny.distance(world.policy, f"{folder(done, script, name)}/policy") > 1e-4, name
        losses = [record["eval/loss"] for record in tiny.read_log(folder(done, script, name))]
        assert len(set(losses)) == 4, name


@scripts
def test_a_rank_holds_what_its_stage_says(done, script):
    plain = held(done, script, "plain")
    assert plain["optimizer"] == "AdamW" and plain["states"] > 2 * plain["weights"]  # two for each, and each step's number
    for name, parts in (("two ranks", 1), ("offload", 1), ("stage 1", 1), ("stage 2", 2), ("stage 3", 2), ("stage 3, params", 2)):
        ranks = [held(done, script, name, rank) for rank in (0, 1)]
        for facts in ranks:
            assert abs(facts["weights"] - plain["weights"] / parts) < 0.05 * plain["weights"], name
            if name != "stage 1":
                assert abs(facts["states"] - plain["states"] / parts) < 0.05 * plain["states"], name
        if name == "stage 1":  # whole parameters, dealt out
            assert sum(facts["states"] for facts in ranks) == plain["states"]
            assert max(facts["states"] for facts in ranks) < 0.9 * plain["states"]
    assert held(done, script, "offload")["optimizer"] == held(done, script, "stage 3, offload")["optimizer"] == "OffloadedAdamW"
    adafactor = held(done, script, "adafactor")
    assert adafactor["optimizer"] == "Adafactor" and adafactor["states"] < 0.2 * plain["states"]


@scripts
@pytest.mark.parametrize("name", GOES_ON)
def test_a_run_goes_on_at_another_stage(done, script, name):
    assert "resuming from out/checkpoint-000002" in done[1][f"{script} {name}"][0]["stdout"]
    assert held(done, script, name)["steps"] == 1, "only the third step is taken by the second part"
    assert apart(done, script, name, "whole") < 1e-9


@scripts
@pytest.mark.parametrize("name", FLOAT16)
def test_float16(done, world, script, name):
    """A step whose gradients overflow is skipped by both ranks, and the scale of the loss is halved."""
    out, (_, number, steps) = folder(done, script, name), FLOAT16[name]
    said = [line for line in done[1][f"{script} {name}"][0]["stdout"].splitlines() if "overflowed" in line]
    assert [held(done, script, name, rank)["steps"] for rank in (0, 1)] == [steps, steps]
    with open(f"{out}/checkpoint-000003/state.json", encoding="utf-8") as f:
        state = json.load(f)
    scale = 2.0**15 if number else 2.0**16
    assert state == dict(iteration=3, loss_scale=scale, clean_steps=1 if number else 3, skipped=0)
    assert len(said) == (number > 0)
    with open(f"{out}/log.jsonl", encoding="utf-8") as f:
        assert not re.search("Infinity|NaN", f.read()), "JSON has no such numbers"
    log, single = (tiny.read_log(folder(done, script, n)) for n in (name, "float32"))
    norms = [record[f"{PRODUCTS[script]}/grad_norm"] for record in log[:-1]]
    assert [norm == 0 for norm in norms] == [i + 1 == number for i in range(3)]
    losses = [record["eval/loss"] for record in log]
    assert [before == after for before, after in zip(losses[:-1], losses[1:], strict=True)] == [i + 1 == number for i in range(3)]
    for record, other in zip(log[:number or 3], single[:3], strict=False):  # alike until a step is left out
        for key in LOSSES[script][:2]:
            assert abs(record[key] - other[key]) < 0.01 * other[key]


@scripts
@pytest.mark.parametrize("name", PRECISE)
def test_bfloat16_with_and_without_master_weights(done, script, name):
    facts = held(done, script, name)
    assert facts["dtypes"] == PRECISE[name][1]
    weights = tiny.read_weights(f"{folder(done, script, name)}/{PRODUCTS[script]}")
    assert {str(t.dtype) for t in weights.values()} == set(facts["dtypes"])
    assert all(t.isfinite().all() for t in weights.values())
    for record, other in zip(*(tiny.read_log(folder(done, script, n)) for n in (name, "float32")), strict=True):
        assert 0 < abs(record["eval/loss"] - other["eval/loss"]) < 0.1 * other["eval/loss"]


BAD = [  # (script, keys, what is said)
    ("sft.py", dict(zero_stage="reward=3"), r"zero_stage = 'reward=3': cannot read .* NAME is one of policy and"),
    ("rm.py", dict(zero_stage="policy=3"), r"zero_stage = 'policy=3': cannot read .* NAME is one of reward and"),
    ("sft.py", dict(zero_stage="4"), r"zero_stage = '4': .* VALUE 0, 1, 2 or 3"),
    ("rm.py", dict(lora="reward=x"), r"lora = 'reward=x': .* VALUE RANK"),
    ("sft.py", dict(optim="sgd"), r"optim = 'sgd': .* VALUE adamw or adafactor"),
    ("sft.py", dict(optim="adafactor", zero_stage="3"), r"adafactor needs whole matrices at hand, so policy must be at stage"),
    ("rm.py", dict(optim="adafactor", offload="optimizer"), r"adafactor needs whole matrices at hand, so reward must be"),
    ("sft.py", dict(offload="params"), r"parameters of policy .* --zero_stage=policy=3"),
    ("rm.py", dict(offload="params", zero_stage="3", lora="2"), r"parameters of reward .* --zero_stage=reward=3"),
    ("sft.py", dict(master_weights=False, dtype="float16"), r"master_weights = False .* only works in bfloat16"),
    ("rm.py", dict(master_weights=False), r"master_weights = False .* only works in bfloat16"),
    ("rm.py", dict(head_chunk=5), r"unknown key 'head_chunk'"),
    ("rm.py", dict(zero=3), r"unknown key 'zero' \(--zero=3\); it is called 'zero_stage' now"),
]


@pytest.fixture(scope="module")
def refused(world, tmp_path_factory):
    """The folder, and {case: [what came of it]}."""
    folder, cases = str(tmp_path_factory.mktemp("refused")), {}
    for case, (script, keys, _) in enumerate(BAD):
        arguments = getattr(world, script.removesuffix(".py"))("out", **{"init_from": world.policy} | keys)
        cases[str(case)] = [one_run(script, arguments)]
    return folder, forked(folder, cases)


@pytest.mark.parametrize("case", range(len(BAD)))
def test_what_a_script_cannot_do_is_one_line(refused, case):
    folder, results = refused
    (result,), (script, _, said) = results[str(case)], BAD[case]
    assert result["codes"] == [2], result
    assert re.fullmatch(rf"{script}: error: [^\n]*{said}[^\n]*\n", result["stderr"][0]), result
    assert not os.path.exists(f"{folder}/{case}/out")


def test_every_shared_key_is_the_scripts_own_or_refused():
    shared = read_keys(os.path.join(tiny.ROOT, "ppo.py")).keys() & read_keys(os.path.join(tiny.ROOT, "grpo.py")).keys()
    shared &= read_keys(os.path.join(tiny.ROOT, "engine", "keys.py")).keys()
    assert shared == read_keys(os.path.join(tiny.ROOT, "sft.py")).keys() & shared
    assert shared - read_keys(os.path.join(tiny.ROOT, "rm.py")).keys() == {"head_chunk"}

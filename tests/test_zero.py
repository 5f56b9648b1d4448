"""
Where models lie (engine/placement.py, optimizers.py): what a run needs, and nothing that it computes. One rank's
plain run is what all others must be, in float64, however shards, ranks, adapters, offload, an average and recomputation
are crossed; and runs that are stopped go on elsewhere. placement.on_device needs a second device: tests/test_gpu.py has it.
"""
import glob
import json
import os
import re

import pytest
import torch
from safetensors.torch import load_file

from engine import optimizers, placement
from errors import BadConfig, Stop
from model import load_model

import tiny
from tiny import forked, in_a_row, one_run

P = placement.Place

# what a watched run leaves beside its product: each rank's dtypes and checksums of its models, before the first step
WATCH = """
import json, os, torch
import data, parallel
from engine import audit, launch, optimizers, placement
now, seen = -1, {}
original_rows, original_broadcast = data.batch_rows, parallel.broadcast_parameters

def at(iteration):  # cases put in here what is to happen as an iteration begins
    pass

def batch_rows(seed, iteration, *rest):
    global now
    now = iteration
    at(iteration)
    return original_rows(seed, iteration, *rest)

def broadcast(models):
    names = ["policy", "ref_policy", "reward_model", "value_model"]
    models = list(models)
    seen.update(zip(names, models) if len(models) > 3 else {"policy": models[0]})
    original_broadcast(models)
    facts = dict(dtypes=[sorted({(p.dim(), str(p.dtype)) for p in m.parameters()}) for m in models],
                 sums=[audit.checksums({"": m}).tolist() for m in models])
    with open(f"facts-{RANK}.json", "w") as f:
        json.dump(facts, f)

data.batch_rows, parallel.broadcast_parameters = batch_rows, broadcast
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """
    tiny's world, beside it a policy of another family, tied, with sizes that no number of ranks divides, and a reward model
    that is an adapter on the policy.
    """
    world = tiny.build(str(tmp_path_factory.mktemp("world")))
    tiny.add_qwen(world)
    folder = str(tmp_path_factory.mktemp("reward"))
    succeeded(in_a_row(folder, {"run": one_run("rm.py", world.rm("out", lora="4"))}))
    os.symlink(f"{folder}/run/out/reward_model_adapter", f"{world.root}/adapter")
    return world


def run(world, script="ppo.py", ranks=1, code="", only=None, folder=None, **keys):
    """A run of a script; code is put in before it, on all ranks or only on one. folder: it goes on there."""
    if keys.get("share_base"):
        keys["reward_path"] = world.adapter
    if script == "sft.py":
        keys["init_from"] = world.policy
    if keys.pop("odd", False):
        keys["policy_path"] = world.qwen
    arguments = getattr(world, script[:-3])("out", **keys)
    made = one_run(script, *((arguments, code if only in (None, rank) else "") for rank in range(ranks)))
    return made | (dict(folder=folder) if folder else {})


def ppo(world, ranks=2, code="", only=None, **keys):
    """A run of ppo.py, watched, and small: minibatches of 3 and 2 rows."""
    made = run(world, "ppo.py", ranks, code, only, **dict(batch_size=5, ppo_epochs=1) | keys)
    for rank in made["ranks"]:
        rank["code"] = f"{WATCH}\n{rank['code']}"
    return made


def facts(folder, rank=0):
    with open(f"{folder}/facts-{rank}.json", encoding="utf-8") as f:
        return json.load(f)


def succeeded(outcomes):
    for name, each in outcomes.items():
        assert {outcome["kind"] for outcome in each} == {""}, (name, each)
    return outcomes


# ---------------------------------------------------------------------------------------------------------------------
# all that can be crossed

PLAIN = {  # the runs of one rank with which the others are compared: script, keys
    "ppo": ("ppo.py", dict(ema_decay=0.7, weight_decay=0.1)),
    "two rows": ("ppo.py", dict(batch_size=2, num_minibatches=2, eval_size=1, max_iters=1, grad_clip=0.3)),
    "lora": ("ppo.py", dict(lora="4", ema_decay=0.7)),
    "one trunk": ("ppo.py", dict(lora="4", share_base=True)),
    "one trunk, shared": ("ppo.py", dict(lora="policy=4:8:attn.c_attn", share_base=True, value_init="shared")),
    "adafactor": ("ppo.py", dict(lora="4", optim="adafactor", max_iters=1)),
    "grpo": ("grpo.py", dict(odd=True, ema_decay=0.5, eval_size=1)),  # tied; layers' norms of 2 numbers for 3 ranks
    "rm": ("rm.py", dict(lora="4")),
}
ALL_AWAY = "policy=params,value=params,ref=params,reward=params"
CROSSED = [  # of which plain run, ranks, keys; by_hand.py has plain stages 1, 2 and 3
    ("ppo", 3, dict(zero_stage="1", offload="optimizer", gradient_checkpointing=True)),
    ("ppo", 2, dict(zero_stage="3", offload=ALL_AWAY, gradient_checkpointing=True, head_chunk=5, micro_batch_tokens=40)),
    ("two rows", 3, dict(zero_stage="policy=3,value=2,ref=1", micro_batch_size=1)),
    ("lora", 3, dict(zero_stage="2", offload="reward=params", head_chunk=4)),
    ("one trunk", 2, dict(zero_stage="3", gradient_checkpointing=True)),
    ("one trunk, shared", 3, dict(zero_stage="2")),
    ("adafactor", 2, dict(zero_stage="1")),
    ("grpo", 3, dict(zero_stage="3")),
    ("rm", 2, dict(zero_stage="2", offload="optimizer")),
]
GOES_ON = [  # of which plain run; ranks and keys until SIGTERM in iteration 1, and from there on
    ("ppo", (2, dict(zero_stage="3", offload="policy=optimizer,value=params")), (3, dict(zero_stage="2"))),
    ("lora", (2, dict(zero_stage="3")), (1, {})),
]


def named(case):
    """Such as "ppo, 2 zero_stage=2 head_chunk=5 then 3"."""
    parts = case[1:] if case in GOES_ON else [case[1:]]
    said = (" ".join([str(ranks), *(f"{key}={value}" for key, value in keys.items())]) for ranks, keys in parts)
    return f"{case[0]}, {' then '.join(said)}"


@pytest.fixture(scope="module")
def group(world, tmp_path_factory):
    """A function: name of a plain run -> (folder, outcomes) of it and of all that are compared with it, run when first asked."""
    root, done = str(tmp_path_factory.mktemp("groups")), {}

    def of(name):
        if name not in done:
            script, plain = PLAIN[name]
            plain = dict(dtype="float64", sync_check_interval=1, max_iters=2) | plain
            plain |= dict(eval_interval=1) if script == "ppo.py" else {}
            jobs = {"plain": run(world, script, **plain)}
            going_on = [case for case in GOES_ON if case[0] == name]
            for i, (_, (ranks, keys), _) in enumerate(going_on):
                jobs[f"first {i}"] = run(world, script, ranks, tiny.stops(1), 0, f"on {i}", **plain | keys)
            folder = f"{root}/{name}"
            os.mkdir(folder)
            outcomes = in_a_row(folder, jobs)
            jobs = {named(case): run(world, script, case[1], **plain | case[2]) for case in CROSSED if case[0] == name}
            for i, case in enumerate(going_on):
                ranks, keys = case[2]
                jobs[named(case)] = run(world, script, ranks, folder=f"on {i}", **plain | keys)
            done[name] = folder, succeeded({"plain": outcomes["plain"]} | in_a_row(folder, jobs))
        return done[name]

    return of


@pytest.mark.parametrize("case", CROSSED + GOES_ON, ids=named)
def test_shards_and_ranks_and_a_stop_change_nothing(group, case):
    folder, outcomes = group(case[0])
    where = named(case) if case in CROSSED else f"on {[c for c in GOES_ON if c[0] == case[0]].index(case)}"
    assert not any(outcome["stderr"] for outcome in outcomes[named(case)])
    records, wanted = ([tiny.measured(r) for r in tiny.read_log(f"{folder}/{run}/out")] for run in (where, "plain"))
    assert tiny.alike(wanted, records, 1e-8)
    products = {"sft.py": ["policy"], "rm.py": ["reward_model"]}.get(PLAIN[case[0]][0], ["policy", "value_model", "ema_policy"])
    products = [product for product in products if os.path.isdir(f"{folder}/plain/out/{product}")]
    for product in products:
        assert tiny.distance(f"{folder}/plain/out/{product}", f"{folder}/{where}/out/{product}") < 1e-9, product
    files = [os.path.basename(f) for f in glob.glob(f"{folder}/plain/out/checkpoint-*/*.safetensors")]
    assert files and ("ema.safetensors" in files) == ("ema_policy" in products)
    for file in files:  # states of optimizers, and the average
        a, b = (load_file(glob.glob(f"{folder}/{x}/out/checkpoint-*/{file}")[0]) for x in ("plain", where))
        assert a.keys() == b.keys() and all(a[n].shape == b[n].shape for n in a)
        assert max((a[n].double() - b[n].double()).abs().max().item() for n in a) < 1e-9, file


def test_those_runs_moved_and_the_average_lags_behind(group, world):
    folder, _ = group("ppo")
    policy, average = (f"{folder}/plain/out/{name}" for name in ("policy", "ema_policy"))
    assert 1e-5 < tiny.distance(average, policy) < tiny.distance(world.policy, policy)


# ---------------------------------------------------------------------------------------------------------------------
# 16 bits: the reference is the policy, to the bit, until the first step

SHORT = {
    "bfloat16, sharded": dict(dtype="bfloat16", zero_stage="3", head_chunk=5),
    "pure, sharded": dict(dtype="bfloat16", master_weights=False, zero_stage="3"),
    "float16, one trunk, lora": dict(dtype="float16", lora="4", share_base=True, zero_stage="3", gradient_checkpointing=True),
}


@pytest.fixture(scope="module")
def short(world, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("short"))
    cases = {name: ppo(world, 2 if "zero_stage" in keys else 1, max_iters=1, num_minibatches=1, **keys)
             for name, keys in SHORT.items()}
    return folder, succeeded(in_a_row(folder, cases))


@pytest.mark.parametrize("name", SHORT)
def test_in_16_bits_the_reference_is_the_policy_at_first(short, name):
    folder = f"{short[0]}/{name}"
    first, last = tiny.read_log(f"{folder}/out")
    assert first["objective/kl"] == 0 == first["eval/kl"] and first["policy/ratio_gap"] == 0
    assert last["eval/kl"] != 0
    if "lora" not in SHORT[name]:
        short_, wide = ("bfloat16", "bfloat16" if "pure" in name else "float32")
        # the table of embeddings, whose rows autocast does not round, stays as it is
        assert {tuple(x) for x in facts(folder)["dtypes"][1]} == {
            (1, f"torch.{wide}"), (2, f"torch.{short_}"), (2, f"torch.{wide}")}
        assert {dtype for _, dtype in facts(folder)["dtypes"][0]} == {f"torch.{wide}"}


# ---------------------------------------------------------------------------------------------------------------------
# what one rank has stops all, of a sharded model too

MATRIX = "hf.transformer.h.0.mlp.c_fc.weight"
FLIP = f"""
def at(iteration):
    if iteration == 1:
        part = parallel.my_part(seen["ref_policy"].get_parameter("{MATRIX}").data)
        part.view(torch.int32).flatten()[3] += 1  # not ^= 1: this may be called twice
"""
POISON = f"""
original_metrics = parallel.all_reduce_metrics
def after(metrics):
    if now == 1:
        parallel.my_part(seen["policy"].get_parameter("{MATRIX}").data)[1, 2] = float("nan")
    return original_metrics(metrics)
parallel.all_reduce_metrics = after
"""
STOPPED = {  # name -> (code on rank 1, keys, what rank 0 says)
    "a bit of ref_policy": (FLIP, dict(zero_stage="ref=3"), "iteration 2: the frozen ref_policy has changed: parameter "
                            rf"{re.escape(MATRIX)} is not what it was at the start on rank 1"),
    "a NaN in the policy": (POISON, dict(zero_stage="policy=3"), rf"iteration 2: policy's {re.escape(MATRIX)} is not finite "
                            "on rank 1; the last checkpoint"),
}
SKIPS = {  # name -> (the step, counted from 1, in which rank 1 overflows, keys)
    "the only step, of a shard": (1, dict(max_iters=1, num_minibatches=1, zero_stage="3")),
    "one of many": (4, dict(zero_stage="policy=3,value=1", batch_size=7))}


def is_one_line(result, pattern):
    """Whether rank 0 has said this, beside torch's own warnings of how ranks meet."""
    said = "".join(line for line in result["stderr"][0].splitlines(True) if "waitForInput" not in line)
    return re.fullmatch(r"ppo\.py: error: [^\n]+\n", said) and re.search(pattern, said)


def test_a_failing_rule_is_one_line(world, tmp_path):
    """Rank 0 must not gather the reward model's layers while rank 1 says that its rule has failed."""
    ruled = ppo(world, zero_stage="reward=3", reward_functions=f"{world.rule('raises_on_1')},reward_model", timeout=6,
                reward_timeout=3)
    (ruled,), = forked(str(tmp_path), dict(ruled=[ruled])).values()
    assert ruled["codes"] == [1, 1] and is_one_line(ruled, "reward 'raises_on_1' failed at .*rules.py, line"), ruled
    assert "Traceback" not in ruled["stderr"][1] and "lost touch" not in ruled["stderr"][1], ruled


@pytest.fixture(scope="module")
def stopped(world, tmp_path_factory):
    folder, jobs = str(tmp_path_factory.mktemp("stopped")), {}
    audited = dict(sync_check_interval=1, timeout=20, batch_size=4)
    for name, (code, keys, _) in STOPPED.items():
        jobs[name] = ppo(world, code=code, only=1, **audited | keys)
    for name, (step, keys) in SKIPS.items():
        jobs[name] = ppo(world, code=tiny.overflow(f"steps == {step}"), only=1, dtype="float16", **audited | keys)
    jobs["stage 3"] = ppo(world, zero_stage="3", max_iters=1)
    return folder, in_a_row(folder, jobs)


@pytest.mark.parametrize("name", STOPPED)
def test_what_one_rank_has_stops_both(stopped, name):
    each = stopped[1][name]
    assert [outcome["kind"] for outcome in each] == ["Stop", "Stop"], each
    assert each[0]["message"] == each[1]["message"] and re.match(STOPPED[name][2], each[0]["message"]), each


def checksum(t):
    """The definition, in Python's integers: the sum of the bits, in words of 32, times 1, 3, 5, ..., modulo 2**64, signed."""
    words = t.contiguous().flatten().view(torch.int32).tolist()
    total = sum(word * (2 * i + 1) for i, word in enumerate(words)) % 2**64
    return total - 2**64 if total >= 2**63 else total


def test_checksums_of_shards_add_up(stopped, world):
    each = [facts(f"{stopped[0]}/stage 3", rank)["sums"][0] for rank in range(2)]
    want = [checksum(p.detach()) for p in load_model(world.policy).parameters()]
    assert [(sum(parts) + 2**63) % 2**64 - 2**63 for parts in zip(*each, strict=True)] == want
    assert len(want) > 10 and each[0] != each[1]


# ---------------------------------------------------------------------------------------------------------------------
# float16's scale of the loss


def test_the_loss_scale_by_hand():
    for scale, clean, over, want in ((65536.0, 7, True, (32768.0, 0)), (65536.0, 7, False, (65536.0, 8)),
                                     (65536.0, 199, False, (131072.0, 0)), (1.5, 0, True, (1.0, 0)),
                                     (2.0**24, 199, False, (2.0**24, 0)), (2.0**23, 199, False, (2.0**24, 0))):
        state = dict(loss_scale=scale, clean_steps=clean, skipped=0)
        assert optimizers.overflowed(state, [torch.tensor(torch.inf if over else 1.0)], 0) == over
        assert (state["loss_scale"], state["clean_steps"]) == want


def test_twenty_overflows_are_skipped_and_one_more_stops():
    state = dict(loss_scale=2.0**16, clean_steps=5, skipped=0)
    good, bad = torch.tensor(1.0), torch.tensor(torch.inf)
    assert not optimizers.overflowed(state, (good, good), 0) and state == dict(loss_scale=2.0**16, clean_steps=6, skipped=0)
    for i in range(20):
        assert optimizers.overflowed(state, (good, bad if i % 2 else bad * 0), 3)
    assert state["loss_scale"] == 1.0 and state["skipped"] == 20  # 2**16 has been halved to 1, and stays there
    with pytest.raises(Stop):
        optimizers.overflowed(state, (bad, good), 3)
    assert not optimizers.overflowed(state, (good,), 0) and state["skipped"] == 0


@pytest.mark.parametrize("name", SKIPS)
def test_an_overflow_on_one_rank_skips_the_step_on_all(stopped, world, name):
    result, (step, keys) = stopped[1][name], SKIPS[name]
    succeeded({name: result})  # the audit at every iteration says that the ranks' weights are finite and the same
    out = f"{stopped[0]}/{name}/out"
    records = tiny.read_log(out)[:-1]
    with open(f"{out}/checkpoint-{len(records):06d}/state.json", encoding="utf-8") as f:
        state = json.load(f)
    total = keys.get("num_minibatches", 2) * len(records)
    assert state["loss_scale"] == 2.0**15 and state["clean_steps"] == total - step and state["skipped"] == 0 ** (total - step)
    assert sum(r["policy/steps"] for r in records) == total - 1, "policy/steps counts steps that were taken"
    moved = tiny.distance(world.policy, f"{out}/policy")
    assert moved == 0 if step == total else moved > 1e-4  # all that there was to step was skipped, or not
    text = open(f"{out}/log.jsonl", encoding="utf-8").read()
    assert not re.search("Infinity|NaN", text), "log.jsonl is JSON, which has no such numbers"


# ---------------------------------------------------------------------------------------------------------------------
# an optimizer without a run


@pytest.mark.parametrize("size", [1e-3, 1e3])
def test_adafactors_learning_rate_is_not_relative_to_the_weights(size):
    """
    Adafactor, 1804.04235, algorithms 4 and 5 without the relative step of section 8, in a loop:
    whatever the weights' size, a step's is the learning rate's. Decay is AdamW's.
    """
    generator = torch.Generator().manual_seed(0)
    model = torch.nn.Linear(4, 3, dtype=torch.float64)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, size, generator=generator)
    optimizer = optimizers.make_optimizer(model, P(optimizer="adafactor"), 0.01, (0.5, 0.9), 1e-5, 0.1)
    want = {name: p.detach().clone() for name, p in model.named_parameters()}
    rows, columns, vector = (torch.zeros(n, dtype=torch.float64) for n in (3, 4, 3))
    for t, lr in enumerate((0.01, 0.02, 0.005, 0.0), 1):
        decay = 1 - t**-0.8
        for name, p in model.named_parameters():
            p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64) * 10.0 ** -t
            square = p.grad**2
            if name == "weight":
                rows = decay * rows + (1 - decay) * square.mean(1)
                columns = decay * columns + (1 - decay) * square.mean(0)
                variance = torch.outer(rows, columns) / rows.mean()
            else:
                variance = vector = decay * vector + (1 - decay) * square
            update = p.grad / variance.sqrt()
            update /= max(1.0, update.square().mean().sqrt().item())
            want[name] = want[name] * (1 - 0.1 * lr) - lr * update
        optimizers.step(optimizer, lr)
        for name, p in model.named_parameters():
            assert torch.allclose(p, want[name], rtol=1e-12, atol=1e-15)


# ---------------------------------------------------------------------------------------------------------------------
# the keys

ALL = ("policy", "ref", "reward", "judge", "value")
PLACES = [  # zero_stage, offload, lora, optimizer -> places that are not as usual
    (("", "", "", "adamw"), {}),
    (("3", "", "", "adamw"), {n: P(3) for n in ALL}),
    (("policy=3", "", "", "adamw"), dict(policy=P(3), ref=P(3))),  # the reference follows
    (("policy=3,ref=0", "", "", "adamw"), dict(policy=P(3))), (("ref=3", "", "", "adamw"), dict(ref=P(3))),
    ((" 1 , value = 2 ", "", "", "adamw"), dict(policy=P(1), ref=P(1), reward=P(1), judge=P(1), value=P(2))),
    (("", "policy=optimizer,reward=params", "", "adamw"), dict(policy=P(0, "optimizer"), reward=P(0, "params"))),
    (("value=2", "value=params", "", "adamw"), dict(value=P(2, "params"))),
    (("1", "", "", "policy=adafactor"), {n: P(1) for n in ALL} | dict(policy=P(1, optimizer="adafactor"))),
    (("judge=3", "judge=params", "", "adamw"), dict(judge=P(3, "params"))),
]


@pytest.mark.parametrize("keys, places", PLACES, ids=str)
def test_places_by_hand(keys, places):
    assert placement.placements(("policy", "value"), *keys) == {n: places.get(n, P()) for n in ALL}


CONFLICTS = [  # as above -> the key that is named; the last six of them parse
    (("4", "", "", "adamw"), "zero_stage"), (("critic=3", "", "", "adamw"), "zero_stage"),
    (("", "params=policy", "", "adamw"), "offload"), (("", "", "4:0", "adamw"), "lora"),
    (("", "ref=optimizer", "", "adamw"), "offload"), (("policy=2", "", "", "adafactor"), "optim"),
    (("3", "value=params", "value=4", "adamw"), "offload"), (("", "", "value=4", "adamw", False, "shared"), "value_init"),
    (("", "", "", "adamw", True, "policy"), "share_base"), (("", "ref=params", "4", "adamw"), "offload")]


@pytest.mark.parametrize("keys, named", CONFLICTS, ids=str)
def test_what_cannot_be_is_one_line(keys, named):
    with pytest.raises(BadConfig) as e:
        placement.placements(("policy", "value"), *keys)
    message = str(e.value)
    assert message.startswith(named) and len(message) < 300 and "\n" not in message, message


def test_a_reference_of_its_own_can_be_moved_beside_lora():
    keys = dict(zero_stage="", offload="ref=params", lora="4", optim="adamw")
    assert placement.placements(("policy",), **keys, ref_path="another")["ref"].offload == "params"

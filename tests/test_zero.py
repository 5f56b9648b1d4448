"""
Where models lie (engine/places.py, placement.py, optimizers.py): what a run needs, and nothing that it computes. One rank's
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
from engine import places as places_room
from errors import BadConfig, Stop
from model import load_model

import tiny
from tiny import forked, in_a_row, one_run

P = places_room.Place

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
    "uneven": ("ppo.py", dict(batch_size=5, num_minibatches=5, ppo_epochs=1, eval_size=1, grad_clip=0.3, max_iters=1)),
    "two rows": ("ppo.py", dict(batch_size=2, num_minibatches=2, eval_size=1, max_iters=1)),
    "shared": ("ppo.py", dict(value_init="shared")),
    "lora": ("ppo.py", dict(lora="4", ema_decay=0.7)),
    "head": ("ppo.py", dict(lora="policy=4:8:attn.c_attn", value_init="shared")),
    "one trunk": ("ppo.py", dict(lora="4", share_base=True)),
    "one trunk, shared": ("ppo.py", dict(lora="policy=4", share_base=True, value_init="shared")),
    "adafactor": ("ppo.py", dict(lora="4", optim="adafactor")),
    "grpo": ("grpo.py", dict(odd=True, ema_decay=0.5, eval_size=1)),  # tied; layers' norms of 2 numbers for 3 ranks
    "grpo, lora": ("grpo.py", dict(lora="2:4", num_minibatches=1)),
    "sft": ("sft.py", dict()),
    "rm": ("rm.py", dict(lora="4")),
}
ALL_AWAY = "policy=params,value=params,ref=params,reward=params"
CROSSED = [  # of which plain run, ranks, keys
    ("ppo", 3, dict(zero_stage="1", offload="optimizer", gradient_checkpointing=True)),
    ("ppo", 2, dict(zero_stage="2", offload="ref=params,reward=params", head_chunk=5, micro_batch_size=64)),
    ("ppo", 2, dict(zero_stage="3", offload=ALL_AWAY, gradient_checkpointing=True, head_chunk=5, micro_batch_tokens=40)),
    ("uneven", 2, dict(zero_stage="policy=3,value=2,ref=1", micro_batch_size=1)),
    ("two rows", 3, dict(zero_stage="3")),
    ("shared", 2, dict(zero_stage="3", gradient_checkpointing=True)),
    ("lora", 2, dict(zero_stage="1", offload="reward=params")),
    ("lora", 3, dict(zero_stage="2", head_chunk=4)),
    ("lora", 2, dict(zero_stage="3", gradient_checkpointing=True, head_chunk=3)),
    ("lora", 1, dict(offload="optimizer", gradient_checkpointing=True, micro_batch_tokens=40)),
    ("head", 3, dict(zero_stage="3", gradient_checkpointing=True)),
    ("one trunk", 2, dict(zero_stage="3", gradient_checkpointing=True)),
    ("one trunk", 3, dict(offload="optimizer")),
    ("one trunk, shared", 2, dict(zero_stage="2")),
    ("adafactor", 2, dict(zero_stage="1")),
    ("grpo", 3, dict(zero_stage="3")),
    ("grpo, lora", 3, dict(zero_stage="3")),
    ("sft", 2, dict(zero_stage="3", gradient_checkpointing=True)),
    ("rm", 2, dict(zero_stage="2")),
]
GOES_ON = [  # of which plain run; ranks and keys until SIGTERM in iteration 1, and from there on
    ("ppo", (2, dict(zero_stage="3", offload="policy=optimizer,value=params")), (3, dict(zero_stage="2"))),
    ("ppo", (2, {}), (2, dict(zero_stage="3"))),
    ("shared", (2, dict(zero_stage="policy=3")), (2, dict(zero_stage="1"))),
    ("lora", (2, dict(zero_stage="3")), (1, {})),
    ("one trunk", (1, {}), (2, dict(zero_stage="3"))),
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
            plain = dict(dtype="float64", sync_check_interval=1) | plain | (dict(eval_interval=1) if script == "ppo.py" else {})
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
    "bfloat16": dict(dtype="bfloat16"),
    "bfloat16, sharded": dict(dtype="bfloat16", zero_stage="3", head_chunk=5),
    "bfloat16, shared": dict(dtype="bfloat16", value_init="shared"),
    "bfloat16, lora, sharded": dict(dtype="bfloat16", lora="4", zero_stage="3"),
    "bfloat16, one trunk": dict(dtype="bfloat16", lora="4", share_base=True, zero_stage="3", gradient_checkpointing=True),
    "pure": dict(dtype="bfloat16", master_weights=False),
    "pure, sharded": dict(dtype="bfloat16", master_weights=False, zero_stage="3"),
    "float16, lora, sharded": dict(dtype="float16", lora="4", zero_stage="3"),
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


SPY = """
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm
seen = set()
def spy(kind, what, matrix):
    plain = kind.forward
    def forward(self, *args):
        said = f"{what} in {self.get_parameter(matrix).dtype}"
        if torch.is_grad_enabled() and said not in seen:
            print(said)
            seen.add(said)
        return plain(self, *args)
    kind.forward = forward
spy(Qwen3MLP, "matrix", "up_proj.weight")
spy(Qwen3RMSNorm, "norm", "weight")
"""
WIDE = """
import engine.placement, torch.distributed.fsdp as fsdp
shard, policy = engine.placement.shard, fsdp.MixedPrecisionPolicy
def wide(*args):  # cut as ever, and not rounded: norms alone would add up gradients in another order
    fsdp.MixedPrecisionPolicy = lambda **_: policy()
    shard(*args)
    fsdp.MixedPrecisionPolicy = policy
engine.placement.shard = wide
"""

def test_layers_are_gathered_in_16_bits_with_the_same_bits(world, tmp_path):
    """Autocast would round the matrices anyway; norms it would not."""
    keys = dict(odd=True, dtype="bfloat16", max_iters=2, head_chunk=5, zero_stage="3", gradient_checkpointing=True)
    results = succeeded(in_a_row(str(tmp_path), {name: run(world, "grpo.py", 2, SPY + code, **keys)
                                                 for name, code in (("short", ""), ("wide", WIDE))}))
    assert tiny.distance(tmp_path / "short/out/policy", tmp_path / "wide/out/policy") == 0
    for name, bits in (("short", "bfloat16"), ("wide", "float32")):
        said = {line for line in results[name][0]["stdout"].splitlines() if re.match("(matrix|norm) in", line)}
        assert said == {f"matrix in torch.{bits}", "norm in torch.float32"}


def test_frozen_matrices_alone_are_stored_in_16_bits(world):
    cpu, tables = torch.device("cpu"), {"hf.transformer.wte.weight", "hf.transformer.wpe.weight"}
    frozen = placement.load_placed(world.policy, P(), cpu, matrices=torch.bfloat16)
    for name, p in frozen.named_parameters():
        assert (p.dtype == torch.bfloat16) == (p.dim() == 2 and name not in tables) and not p.requires_grad, name
    trained = placement.load_placed(world.policy, P(), cpu, matrices=torch.bfloat16, trained=True)
    assert {p.dtype for p in trained.parameters()} == {torch.float32} and all(p.requires_grad for p in trained.parameters())


# ---------------------------------------------------------------------------------------------------------------------
# what one rank has stops all, of a sharded model too

MATRIX = "hf.transformer.h.0.mlp.c_fc.weight"
FLIP = f"""
def at(iteration):
    if iteration == 1:
        part = parallel.my_part(seen["ref_policy"].get_parameter("{MATRIX}").data)
        part.view(torch.int32).flatten()[3] ^= 1
"""
POISON = f"""
original_metrics = parallel.all_reduce_metrics
def after(metrics):
    if now == 1:
        parallel.my_part(seen["policy"].get_parameter("{MATRIX}").data)[1, 2] = float("nan")
    return original_metrics(metrics)
parallel.all_reduce_metrics = after
"""
DIE = tiny.ONCE + tiny.ends(8) + "import loss, rewards\n"
STOPPED = {  # name -> (code on rank 1, keys, what rank 0 says)
    "a bit of ref_policy": (FLIP, dict(zero_stage="ref=3"), "iteration 2: the frozen ref_policy has changed: parameter "
                            rf"{re.escape(MATRIX)} is not what it was at the start \(on rank 1\)"),
    "a NaN in the policy": (POISON, dict(zero_stage="policy=3"), rf"iteration 2: policy's {re.escape(MATRIX)} is not finite "
                            r"\(on rank 1\); the last checkpoint"),
}
SKIPS = {  # name -> (the step, counted from 1, in which rank 1 overflows, keys)
    "the only step, of a shard": (1, dict(max_iters=1, num_minibatches=1, zero_stage="3")),
    "one of many": (4, dict(zero_stage="policy=3,value=1", batch_size=7))}
SIGNALLED = {"stage 3": {}, "stage 3, lora": dict(lora="4")}


def is_one_line(result, pattern):
    """Whether rank 0 has said this, beside torch's own warnings of how ranks meet."""
    said = "".join(line for line in result["stderr"][0].splitlines(True) if "waitForInput" not in line)
    return re.fullmatch(r"ppo\.py: error: [^\n]+\n", said) and re.search(pattern, said)


def test_a_lost_rank_and_a_failing_rule_are_one_line_each(world, tmp_path):
    lost = ppo(world, code=DIE + "once(loss, 'learning_rate_at', die)", only=1, zero_stage="3", timeout=20)
    # rank 0 must not gather the reward model's layers while rank 1 says that its rule has failed
    ruled = ppo(world, zero_stage="reward=3", reward_functions=f"{world.rule('raises_on_1')},reward_model", timeout=6,
                reward_timeout=3)
    results = forked(str(tmp_path), dict(lost=[lost], ruled=[ruled]), at_once=4)
    (lost,), (ruled,) = results["lost"], results["ruled"]
    pattern = "error: iteration 1, update: lost touch with the other ranks.*resume with the same command"
    assert lost["codes"] == [1, -9] and is_one_line(lost, pattern) and max(lost["seconds"]) < 30, lost
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
    code = DIE + "def term():\n    os.kill(os.getpid(), signal.SIGTERM)\nonce(loss, 'learning_rate_at', term)"
    for name, keys in SIGNALLED.items():
        keys = dict(zero_stage="3", max_iters=2) | keys
        jobs |= {name: ppo(world, code=code, only=1, **keys), f"{name}, whole": ppo(world, **keys)}
    outcomes = in_a_row(folder, jobs)
    again = {name: ppo(world, zero_stage="3", max_iters=2, **keys) for name, keys in SIGNALLED.items()}
    return folder, outcomes, in_a_row(folder, again)


@pytest.mark.parametrize("name", STOPPED)
def test_what_one_rank_has_stops_both(stopped, name):
    each = stopped[1][name]
    assert [outcome["kind"] for outcome in each] == ["Stop", "Stop"], each
    assert each[0]["message"] == each[1]["message"] and re.match(STOPPED[name][2], each[0]["message"]), each


@pytest.mark.parametrize("name", SIGNALLED)
def test_sigterm_in_an_update_at_stage_3_loses_nothing(stopped, name):
    folder, before, again = stopped[0], stopped[1][name], stopped[2][name]
    assert [x["kind"] + x["message"] for x in before] == ["SystemExit0"] * 2 and [x["kind"] for x in again] == ["", ""], before
    for model in ("policy", "value_model"):
        assert tiny.distance(f"{folder}/{name}/out/{model}", f"{folder}/{name}, whole/out/{model}") == 0


def checksum(t):
    """The definition, in Python's integers: the sum of the bits, in words of 32, times 1, 3, 5, ..., modulo 2**64, signed."""
    words = t.contiguous().flatten().view(torch.int32).tolist()
    total = sum(word * (2 * i + 1) for i, word in enumerate(words)) % 2**64
    return total - 2**64 if total >= 2**63 else total


def test_checksums_of_shards_add_up(stopped, world):
    each = [facts(f"{stopped[0]}/stage 3, whole", rank)["sums"][0] for rank in range(2)]
    want = [checksum(p.detach()) for p in load_model(world.policy).parameters()]
    assert [(sum(parts) + 2**63) % 2**64 - 2**63 for parts in zip(*each, strict=True)] == want
    assert len(want) > 10 and each[0] != each[1]


# ---------------------------------------------------------------------------------------------------------------------
# float16's scale of the loss


def test_next_loss_scale_by_hand():
    for scale, clean, over, want in ((65536.0, 7, True, (32768.0, 0)), (65536.0, 7, False, (65536.0, 8)),
                                     (65536.0, 199, False, (131072.0, 0)), (1.5, 0, True, (1.0, 0)),
                                     (2.0**24, 199, False, (2.0**24, 0)), (2.0**23, 199, False, (2.0**24, 0))):
        assert optimizers.next_loss_scale(scale, clean, over) == want


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
# optimizers and the moving average, without a run


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
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


def small(dtype=torch.float32):
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 3)).to(dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(generator=generator)
    return model


def train(model, optimizer, steps=5):
    generator = torch.Generator().manual_seed(1)
    for i in range(steps):
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizers.step(optimizer, 1e-2 / (i + 1))
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_offloaded_adamw_is_adamw_to_the_bit(dtype):
    results = []
    for offload in ("none", "optimizer"):
        model = small(dtype)
        optimizer = optimizers.make_optimizer(model, P(offload=offload), 1.0, (0.9, 0.99), 1e-6, 0.1)
        assert isinstance(optimizer, optimizers.OffloadedAdamW) == (offload == "optimizer")
        results.append(train(model, optimizer))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(results[0], small(dtype).parameters(), strict=True))


def test_optimizer_states_by_name_come_back():
    """optimizer_tensors -> fill_optimizer, between an offloaded optimizer and a plain one, then two more steps."""
    whole, first, second = small(), small(), small()
    kinds = [optimizers.make_optimizer(m, P(offload=o), 1.0, (0.9, 0.99), 1e-6, 0.0)
             for m, o in ((whole, "none"), (first, "none"), (second, "optimizer"))]
    want = train(whole, kinds[0], 4)
    train(first, kinds[1], 2)
    second.load_state_dict(first.state_dict())
    tensors = optimizers.optimizer_tensors(first, kinds[1])
    assert tensors.keys() == {f"{i}.{kind}.{key}" for i in (0, 1) for kind in ("weight", "bias")
                              for key in ("step", "exp_avg", "exp_avg_sq")}
    optimizers.fill_optimizer(second, kinds[2], tensors)
    generator = torch.Generator().manual_seed(1)
    for i in range(4):
        for p in second.parameters():
            p.grad = torch.randn(p.shape, generator=generator)
        if i >= 2:
            optimizers.step(kinds[2], 1e-2 / (i + 1))
    assert all(torch.equal(a, b) for a, b in zip(want, second.parameters(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_moving_average_by_hand(dtype):
    model = small(dtype)
    model[0].bias.requires_grad_(False)
    ema = optimizers.MovingAverage(model, 0.75)
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    want = {n: p.detach().double().clone() for n, p in model.named_parameters() if p.requires_grad}
    for i in range(4):
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.1 + i)
        ema.update()
        want = {n: 0.75 * want[n] + 0.25 * model.get_parameter(n).detach().double() for n in names}
    averages = ema.tensors()
    assert list(averages) == names and len(names) == 3
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for n in names:
        assert averages[n].dtype == wide
        assert (averages[n] - want[n]).abs().max() < 1e-6 * want[n].abs().max()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    with ema.in_place():
        for n in names:
            assert torch.equal(model.get_parameter(n), averages[n].to(dtype))
        assert torch.equal(model[0].bias, before["0.bias"])
    with pytest.raises(KeyError), ema.in_place():
        raise KeyError
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    other = optimizers.MovingAverage(model, 0.5)
    other.fill({n: t + 1 for n, t in averages.items()})
    assert all(torch.equal(t, averages[n] + 1) for n, t in other.tensors().items())


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
    assert places_room.placements(("policy", "value"), *keys) == {n: places.get(n, P()) for n in ALL}


def test_places_of_other_scripts():
    assert places_room.placements(("policy",), "3", "reward=params", "", "adamw") == dict(
        policy=P(3), ref=P(3), reward=P(3, "params"), judge=P(3))
    for lora, want in (("16", dict(rank=16, alpha=32.0)), ("2:3:q+v", dict(rank=2, alpha=3.0, targets="q,v"))):
        assert places_room.place_of_one("reward", "", "", lora, "adamw") == P(lora=want)
    assert places_room.place_of_one("reward", "3", "reward=optimizer", "", "adamw") == P(3, "optimizer")
    assert places_room.place_of_one("policy", "policy=1", "", "", "policy=adafactor") == P(1, optimizer="adafactor")
    for names, key in ((("policy",), "value=3"), (("policy",), "judge")):
        with pytest.raises(BadConfig, match="zero_stage"):
            places_room.placements(names, key, "", "", "adamw")


BAD = [  # as above -> the key that is named
    (("4", "", "", "adamw"), "zero_stage"), (("policy", "", "", "adamw"), "zero_stage"),
    (("critic=3", "", "", "adamw"), "zero_stage"), (("policy=3,", "", "", "adamw"), "zero_stage"),
    (("=3", "", "", "adamw"), "zero_stage"), (("policy==3", "", "", "adamw"), "zero_stage"),
    (("policy=3\nref=3", "", "", "adamw"), "zero_stage"), (("", "params=policy", "", "adamw"), "offload"),
    (("", "", "0", "adamw"), "lora"), (("", "", "4:0", "adamw"), "lora"), (("", "", "ref=4", "adamw"), "lora"),
    (("", "", "", "ref=adamw"), "optim")]
CONFLICTS = [  # as above -> the key that is named; all of them parse
    (("", "ref=optimizer", "", "adamw"), "offload"), (("", "ref=params", "4", "adamw"), "offload"),
    (("", "reward=params", "4", "adamw", True, "policy"), "offload"),
    (("policy=2", "", "", "adafactor"), "optim"), (("", "policy=optimizer", "", "adafactor"), "optim"),
    (("", "policy=params", "", "adamw"), "offload"), (("1", "value=params", "", "adamw"), "offload"),
    (("3", "value=params", "value=4", "adamw"), "offload"),
    (("", "value=optimizer", "", "adamw", False, "shared"), "value_init"),
    (("", "", "value=4", "adamw", False, "shared"), "value_init"),
    (("", "", "", "adamw", True, "policy"), "share_base"), (("", "", "policy=4", "adamw", True, "policy"), "share_base")]


@pytest.mark.parametrize("keys, named", BAD + CONFLICTS, ids=str)
def test_what_cannot_be_is_one_line(keys, named):
    with pytest.raises(BadConfig) as e:
        places_room.placements(("policy", "value"), *keys)
    message = str(e.value)
    assert message.startswith(named) and len(message) < 300 and "\n" not in message, message


def test_precisions():
    """Autocast rounds trained weights when they are used, frozen ones are stored so; or all weights are of 16 bits."""
    cpu, f32, b16 = torch.device("cpu"), torch.float32, torch.bfloat16
    for dtype, master, want in (("float64", True, (torch.float64, None)), ("float32", True, (f32, None)),
                                ("float16", True, (f32, torch.float16)), ("bfloat16", True, (f32, b16)),
                                ("bfloat16", False, (b16, None))):
        autocast, *found = places_room.precisions(dtype, master, cpu)
        assert tuple(found) == want
        with autocast:
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == (want[1] or f32)
    for dtype in ("float32", "float16", "float64"):
        with pytest.raises(BadConfig, match="^master_weights"):
            places_room.precisions(dtype, False, cpu)

"""
engine/placement.py, optimizers.py and audit.py: where models lie and in which precision changes what
a run needs, and nothing that it computes. Here that is stage 0's run on the same ranks, or a formula on paper;
and runs that are stopped go on at other stages, as if they had not been.
placement.on_device needs a second device: on a CPU there is nothing to see, so it has no test here.
"""
import glob
import json
import os
import random
import re

import pytest
import torch
from safetensors.torch import load_file

from engine import optimizers, placement
from engine import places as places_room
from engine.tokenizers import load_tokenizer
from errors import BadConfig, Stop
from model import from_scratch, load_model

import tiny
from tiny import forked, in_a_row, one_run

TRAINED = ("policy", "value_model")

# what every run here leaves beside its product: each rank's dtypes, checksums and memory of its models, before the first step
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
                 sums=[audit.checksums({"": m}).tolist() for m in models],
                 places={p.data_ptr(): p.numel() for m in models for p in m.parameters() if not parallel.is_shard(p)})
    with open(f"facts-{RANK}.json", "w") as f:
        json.dump(facts, f)

data.batch_rows, parallel.broadcast_parameters = batch_rows, broadcast
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """tiny's world, and beside it a policy of the Llama family, tied, with sizes that no number of ranks divides."""
    world = tiny.build(str(tmp_path_factory.mktemp("world")))
    tiny.add_qwen(world)
    return world


def ppo(world, ranks=2, code="", only=None, **keys):
    """A run of ppo.py, watched; code is put in before it, on all ranks or only on one."""
    codes = [f"{WATCH}\n{code if only in (None, rank) else ''}" for rank in range(ranks)]
    return one_run("ppo.py", *((world.ppo("out", **keys), c) for c in codes))


def facts(folder, rank=0):
    with open(f"{folder}/facts-{rank}.json", encoding="utf-8") as f:
        return json.load(f)


def said(result, rank=0):
    """What a rank has said on stderr, without torch's own warnings of how ranks meet."""
    return "".join(line for line in result["stderr"][rank].splitlines(True) if "waitForInput" not in line)


def succeeded(outcomes):
    for name, each in outcomes.items():
        assert {outcome["kind"] for outcome in each} == {""}, (name, each)
    return outcomes


def apart(folder, other, models=TRAINED):
    return max(tiny.distance(f"{folder}/out/{m}", f"{other}/out/{m}") for m in models)


# ---------------------------------------------------------------------------------------------------------------------
# stages, offload, and what of a batch is computed at once

ROWS = [  # stage, offload, gradient_checkpointing, head_chunk. (In float64, with every two of these: test_knobs.py.)
    (1, "policy=optimizer,value=optimizer", True, 0), (2, "ref=params,reward=params", False, 5),
    (3, "policy=params,value=params,ref=params,reward=params", True, 5)]
# The bias of gpt2's keys has a gradient of 0 on paper: it shifts all scores of a query alike. What Adam sees there is rounding,
# which it scales up to whole steps. So float32 is compared at a small rate: at 3e-3 that bias is 4e-6 apart, and nothing else.
SMALL = dict(batch_size=5, ppo_epochs=1)  # minibatches of 3 and 2 rows, on 2 ranks
SINGLE = SMALL | dict(dtype="float32", max_iters=2, learning_rate=1e-4, value_learning_rate=1e-4)
UNEVEN = {  # in float64: rows and prompts that ranks do not share evenly, or of which some have none
    "two rows": dict(batch_size=2, num_minibatches=2, eval_size=1),
    "five minibatches": dict(batch_size=5, num_minibatches=5, ppo_epochs=1, eval_size=1, micro_batch_size=1, grad_clip=0.3)}
STAGES = {"two rows": "3", "five minibatches": "policy=3,value=2,ref=1"}


def settings(stage, offload, again, chunk):
    return dict(zero_stage=str(stage), offload=offload, micro_batch_size=64, gradient_checkpointing=again, head_chunk=chunk)


@pytest.fixture(scope="module")
def stages(world, tmp_path_factory):
    folder, cases = str(tmp_path_factory.mktemp("stages")), {}
    cases["single"] = ppo(world, micro_batch_size=64, **SINGLE)
    for row in ROWS:
        cases[f"single {row[0]}"] = ppo(world, **SINGLE, **settings(*row))
    for name, keys in UNEVEN.items():
        keys = dict(dtype="float64", max_iters=1) | keys
        cases[name] = ppo(world, ranks=1, **keys)
        cases[f"{name} split"] = ppo(world, zero_stage=STAGES[name], **keys)
    for ranks, stage in ((1, ""), (3, "3")):
        # as much as a tiny model has: a layer's norm of 2 numbers for 3 ranks
        cases[f"grpo {ranks}"] = one_run("grpo.py", *[(world.grpo(
            "out", dtype="float64", zero_stage=stage, policy_path=world.qwen, eval_size=1, ema_decay=0.5,
            max_iters=2), WATCH)] * ranks)
    return folder, succeeded(in_a_row(folder, cases))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_stages_change_nothing_in_float32(stages, stage):
    assert apart(f"{stages[0]}/single {stage}", f"{stages[0]}/single") < 1e-6


@pytest.mark.parametrize("name", UNEVEN)
def test_ranks_without_rows_come_along(stages, name):
    assert apart(f"{stages[0]}/{name}", f"{stages[0]}/{name} split") < 1e-9


def test_three_ranks_and_odd_sizes(stages):
    assert apart(f"{stages[0]}/grpo 1", f"{stages[0]}/grpo 3", ["policy", "ema_policy"]) < 1e-9


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_adafactors_learning_rate_is_not_relative_to_the_weights(size, capsys):
    """
    Adafactor, 1804.04235, algorithms 4 and 5 without the relative step of section 8, in a loop:
    whatever the weights' size, a step's is the learning rate's. Decay is AdamW's. And it is said
    that Adam's keys are not used.
    """
    generator = torch.Generator().manual_seed(0)
    model = torch.nn.Linear(4, 3, dtype=torch.float64)
    model.head = "lm"
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, size, generator=generator)
    place = places_room.Place(optimizer="adafactor")
    optimizer = optimizers.make_optimizer(model, place, 0.01, (0.5, 0.9), 1e-5, 0.1)
    said = capsys.readouterr().out
    assert said.startswith("policy: adafactor has no beta1, beta2") and said.count("\n") == 1
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


def test_those_runs_moved(stages, world):
    for name in stages[1]:
        start, least = (world.qwen, 1e-4) if name.startswith("grpo") else (world.policy, 1e-4)
        assert tiny.distance(start, f"{stages[0]}/{name}/out/policy") > least, name


def test_stages_say_nothing_on_stderr(stages):
    for name, each in stages[1].items():
        assert {outcome["stderr"] for outcome in each} == {""}, (name, each)


def test_folders_are_alike_at_all_stages(stages):
    """The same tensors of the same shapes, and the same config.json."""
    def shapes(folder):
        return {n: (t.shape, t.dtype) for n, t in tiny.read_weights(folder).items()}, open(f"{folder}/config.json").read()

    for stage in (1, 2, 3):
        for model in (*TRAINED, "checkpoint-000002/policy"):
            ours, theirs = (f"{stages[0]}/{name}/out/{model}" for name in (f"single {stage}", "single"))
            assert shapes(ours) == shapes(theirs)


# ---------------------------------------------------------------------------------------------------------------------
# checksums and the audit of what ranks hold parts of


def checksum(t):
    """The definition, in Python's integers: the sum of the bits, in words of 32, times 1, 3, 5, ..., modulo 2**64, signed."""
    words = t.contiguous().flatten().view(torch.int32).tolist()
    total = sum(word * (2 * i + 1) for i, word in enumerate(words)) % 2**64
    return total - 2**64 if total >= 2**63 else total


@pytest.mark.parametrize("name, ranks, path", [("single 3", 2, "policy"), ("grpo 3", 3, "qwen")])
def test_checksums_of_shards_add_up(stages, world, name, ranks, path):
    each = [facts(f"{stages[0]}/{name}", rank)["sums"][0] for rank in range(ranks)]
    model = load_model(getattr(world, path), dtype=torch.float64 if name == "grpo 3" else torch.float32)
    want = [checksum(p.detach()) for p in model.parameters()]
    assert [(sum(parts) + 2**63) % 2**64 - 2**63 for parts in zip(*each, strict=True)] == want
    assert len(want) > 10 and each[0] != each[1]

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
AUDITED = dict(sync_check_interval=1, timeout=20, batch_size=4, ppo_epochs=1)
STOPPED = {  # name -> (code on rank 1, keys, what rank 0 says)
    "a bit of ref_policy": (FLIP, dict(zero_stage="ref=3"), "iteration 2: the frozen ref_policy has changed: parameter "
                            rf"{re.escape(MATRIX)} is not what it was at the start \(on rank 1\)"),
    "a NaN in the policy": (POISON, dict(zero_stage="policy=3"), rf"iteration 2: policy's {re.escape(MATRIX)} is not finite "
                            r"\(on rank 1\); the last checkpoint"),
    "21 overflows": (tiny.overflow("True"), dict(dtype="float16", zero_stage="policy=3", ppo_epochs=21,
                                                            num_minibatches=1, micro_batch_size=64),
                     "iteration 0: the gradients are not finite at any scale of the loss, 20 steps in a row"),
}
LOST = {  # name -> (what rank 1 does in iteration 1, its exit code, the phase in which rank 0 misses it)
    "dies in the update": ("once(loss, 'learning_rate_at', die)", -9, "update"),
    "dies in the score": ("once(rewards, 'score_sequences', die)", -9, "score"),
    "hangs in the update": ("once(loss, 'learning_rate_at', hang)", 9, "update")}
RULED = {"a rule fails beside a sharded reward model": ("raises_on_1", "reward 'raises_on_1' failed at .*rules.py, line")}
SKIPS = {  # name -> (the step, counted from 1, in which rank 1 overflows, keys)
    "the only step": (1, dict(max_iters=1, num_minibatches=1)),
    "the only step, of a shard": (1, dict(max_iters=1, num_minibatches=1, zero_stage="3")),
    "one of many": (4, dict(zero_stage="policy=3,value=1", batch_size=7)), "none": (0, dict(max_iters=1, num_minibatches=1))}
SIGNALLED = {"score": "once(rewards, 'score_sequences', term)",
             "update": "once(loss, 'learning_rate_at', term)"}


@pytest.fixture(scope="module")
def hurt(world, tmp_path_factory):
    folder, cases = str(tmp_path_factory.mktemp("hurt")), {}
    for name, (action, _, _) in LOST.items():
        cases[name] = [ppo(world, code=DIE + action, only=1, zero_stage="3", timeout=4 if "hangs" in name else 20,
                           reward_timeout=3, **SMALL)]
    for name, (rule, _) in RULED.items():
        cases[name] = [ppo(world, zero_stage="reward=3", reward_functions=f"{world.rule(rule)},reward_model", timeout=6,
                           reward_timeout=3, **SMALL)]
    return folder, forked(folder, cases, at_once=6)


@pytest.fixture(scope="module")
def stopped(world, tmp_path_factory):
    folder, jobs = str(tmp_path_factory.mktemp("stopped")), {}
    for name, (code, keys, _) in STOPPED.items():
        jobs[name] = ppo(world, code=code, only=1, **AUDITED | keys)
    for name, (step, keys) in SKIPS.items():
        jobs[name] = ppo(world, code=tiny.overflow(f"steps == {step}"), only=1, dtype="float16", **AUDITED | keys)
    keys = SMALL | dict(zero_stage="3", dtype="float64", max_iters=2)
    for name, action in SIGNALLED.items():
        code = DIE + f"def term():\n    os.kill(os.getpid(), signal.SIGTERM)\n{action}"
        jobs[f"SIGTERM in the {name}"] = ppo(world, code=code, only=1, **keys)
    jobs["no SIGTERM"] = ppo(world, **keys)
    outcomes = in_a_row(folder, jobs)
    again = {f"SIGTERM in the {name}": ppo(world, **keys) for name in SIGNALLED}
    return folder, outcomes, in_a_row(folder, again)


def is_one_line(text, pattern):
    return re.fullmatch(r"ppo\.py: error: [^\n]+\n", text) and re.search(pattern, text)


@pytest.mark.parametrize("name", STOPPED)
def test_what_one_rank_has_stops_both(stopped, name):
    each = stopped[1][name]
    assert [outcome["kind"] for outcome in each] == ["Stop", "Stop"], each
    assert each[0]["message"] == each[1]["message"] and re.match(STOPPED[name][2], each[0]["message"]), each
    assert "\n" not in each[0]["message"]


@pytest.mark.parametrize("name", LOST)
def test_a_lost_rank_is_one_line_from_a_sharded_model_too(hurt, name):
    result, (_, code, phase) = hurt[1][name][0], LOST[name]
    assert result["codes"] == [1, code], result
    pattern = f"error: iteration 1, {phase}: lost touch with the other ranks.*resume with the same command"
    assert is_one_line(said(result), pattern), result
    assert max(result["seconds"]) < 30


@pytest.mark.parametrize("name", RULED)
def test_a_failing_rule_stops_ranks_that_gather_the_reward_model(hurt, name):
    """Rank 0 must not gather the reward model's layers while rank 1 says that its rule has failed."""
    result = hurt[1][name][0]
    assert result["codes"] == [1, 1] and is_one_line(said(result), RULED[name][1]), result
    assert "Traceback" not in said(result, 1) and "lost touch" not in said(result, 1), result


@pytest.mark.parametrize("name", SIGNALLED)
def test_sigterm_at_stage_3_loses_nothing(stopped, name):
    folder, before, again = stopped[0], *(outcomes[f"SIGTERM in the {name}"] for outcomes in stopped[1:])
    assert [x["kind"] + x["message"] for x in before] == ["SystemExit0"] * 2 and [x["kind"] for x in again] == ["", ""], before
    assert "resume with the same command" in before[0]["stdout"] and "resuming from" in again[0]["stdout"]
    assert apart(f"{folder}/SIGTERM in the {name}", f"{folder}/no SIGTERM") == 0


# ---------------------------------------------------------------------------------------------------------------------
# float16's scale of the loss


def test_next_loss_scale_by_hand():
    halves, counts, doubles = optimizers.next_loss_scale(65536.0, 7, True), optimizers.next_loss_scale(65536.0, 7, False), \
        optimizers.next_loss_scale(65536.0, 199, False)
    assert halves == (32768.0, 0) and counts == (65536.0, 8) and doubles == (131072.0, 0)
    assert optimizers.next_loss_scale(1.0, 0, True) == (1.0, 0) and optimizers.next_loss_scale(1.5, 0, True) == (1.0, 0)
    assert optimizers.next_loss_scale(2.0**24, 199, False) == (2.0**24, 0)
    assert optimizers.next_loss_scale(2.0**23, 199, False)[0] == 2.0**24
    assert optimizers.next_loss_scale(8.0, 2, False, growth_interval=3) == (16.0, 0)
    scale, clean = 1.0, 0
    for _ in range(1000):  # 1000 = 5 x 200
        scale, clean = optimizers.next_loss_scale(scale, clean, False)
    assert (scale, clean) == (32.0, 0)


def test_twenty_overflows_are_skipped_and_one_more_stops(capsys):
    state = dict(loss_scale=2.0**16, clean_steps=5, skipped=0)
    good, bad = torch.tensor(1.0), torch.tensor(torch.inf)
    assert not optimizers.overflowed(state, (good, good), 0) and state == dict(loss_scale=2.0**16, clean_steps=6, skipped=0)
    for i in range(20):
        assert optimizers.overflowed(state, (good, bad if i % 2 else bad * 0), 3)
    assert state["loss_scale"] == 1.0 and state["skipped"] == 20  # 2**16 has been halved to 1, and stays there
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 20 and "iteration 3: a float16 gradient overflowed at loss scale 65536; step skipped" == lines[0]
    with pytest.raises(Stop, match="20 steps in a row"):
        optimizers.overflowed(state, (bad, good), 3)
    state = dict(loss_scale=2.0**16, clean_steps=0, skipped=19)
    assert optimizers.overflowed(state, (bad,), 0) and not optimizers.overflowed(state, (good,), 0) and state["skipped"] == 0


@pytest.mark.parametrize("name", SKIPS)
def test_an_overflow_on_one_rank_skips_the_step_on_all(stopped, world, name):
    result, (step, keys) = stopped[1][name], SKIPS[name]
    succeeded({name: result})  # the audit at every iteration says that the ranks' weights are finite and the same
    lines = [line for line in result[0]["stdout"].splitlines() if "overflowed" in line]
    out = f"{stopped[0]}/{name}/out"
    iterations = len(tiny.read_log(out)) - 1
    with open(f"{out}/checkpoint-{iterations:06d}/state.json", encoding="utf-8") as f:
        state = json.load(f)
    taken = sum(r["policy/steps"] for r in tiny.read_log(out)[:-1])
    total = keys.get("num_minibatches", 2) * iterations
    if step:
        assert len(lines) == 1 and "at loss scale 65536; step skipped" in lines[0], result
        assert state["loss_scale"] == 2.0**15 and state["clean_steps"] == total - step and state["skipped"] == 0 ** (total - step)
    else:
        assert not lines and state["loss_scale"] == 2.0**16 and state["clean_steps"] == total
    moved = tiny.distance(world.policy, f"{out}/policy")
    assert moved == 0 if step == total else moved > 1e-4  # all that there was to step was skipped, or not
    assert taken == total - bool(step), "policy/steps counts steps that were taken"
    text = open(f"{out}/log.jsonl", encoding="utf-8").read()
    assert not re.search("Infinity|NaN", text), "log.jsonl is JSON, which has no such numbers"


# ---------------------------------------------------------------------------------------------------------------------
# precision: the reference is the policy, to the bit, until the first step

PRECISE = {
    "float32": dict(dtype="float32"), "bfloat16": dict(dtype="bfloat16"), "float16": dict(dtype="float16"),
    "pure": dict(dtype="bfloat16", master_weights=False)}
FROZEN = {"float32": ("float32", "float32"), "bfloat16": ("float32", "bfloat16"), "float16": ("float32", "float16"),
          "pure": ("bfloat16", "bfloat16")}  # of vectors and of matrices
WAYS = {"plain": dict(), "sharded": dict(zero_stage="3", head_chunk=5), "shared": dict(value_init="shared")}


# float32 and float16 are sharded, and have a shared trunk, in other tests
KINDS = [(kind, way, keys) for kind in PRECISE for way, keys in WAYS.items()
         if way == "plain" or kind in ("bfloat16", "pure")]


@pytest.fixture(scope="module")
def precise(world, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("precise"))
    cases = {f"{kind} {way}": ppo(world, 2 if "zero_stage" in keys else 1, max_iters=1, ppo_epochs=1, num_minibatches=1,
                                  **PRECISE[kind], **keys)
             for kind, way, keys in KINDS}
    return folder, in_a_row(folder, cases)


@pytest.mark.parametrize("kind, way", [(kind, way) for kind, way, _ in KINDS])
def test_the_kl_is_zero_until_the_first_step(precise, world, kind, way):
    folder, each = f"{precise[0]}/{kind} {way}", precise[1][f"{kind} {way}"]
    succeeded({way: each})
    first, last = tiny.read_log(f"{folder}/out")
    assert first["objective/kl"] == 0 == first["eval/kl"]
    if kind != "float16" or "overflowed" not in each[0]["stdout"]:
        assert last["eval/kl"] != 0
    vectors, matrices = FROZEN[kind]
    ref = [tuple(x) for x in facts(folder)["dtypes"][1]]
    # the table of embeddings, whose rows autocast does not round, stays as it is
    assert ref == sorted({(1, f"torch.{vectors}"), (2, f"torch.{matrices}"), (2, f"torch.{vectors}")})
    trained = {dtype for _, dtype in facts(folder)["dtypes"][0]}
    assert trained == {"torch.bfloat16" if kind == "pure" else "torch.float32"}
    stored = {t.dtype for t in tiny.read_weights(f"{folder}/out/policy").values()}
    assert stored <= {torch.float32, torch.bfloat16, torch.float16}


SPY = """
import torch
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP
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
spy(GPT2MLP, "matrix", "c_fc.weight")
spy(Qwen3MLP, "matrix", "up_proj.weight")
spy(torch.nn.LayerNorm, "norm", "weight")
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
SHORT = dict(dtype="bfloat16", max_iters=2, head_chunk=5, micro_batch_size=3)
SHORT_RUNS = {"ppo 2": dict(zero_stage="2"), "ppo 3": dict(zero_stage="3", gradient_checkpointing=True),
              "grpo 3": dict(zero_stage="3")}


@pytest.fixture(scope="module")
def short(world, tmp_path_factory):
    folder, cases = str(tmp_path_factory.mktemp("short")), {}
    for name, keys in SHORT_RUNS.items():
        for end, code in (("", SPY), (", wide", SPY + WIDE)):
            if "ppo" in name:
                cases[name + end] = ppo(world, code=code, **SHORT, **keys)
            else:
                args = world.grpo("out", policy_path=world.qwen, **SHORT, **keys)
                cases[name + end] = one_run("grpo.py", *[(args, code)] * 2)
    return folder, succeeded(in_a_row(folder, cases))


@pytest.mark.parametrize("name", SHORT_RUNS)
def test_layers_are_gathered_in_16_bits_with_the_same_bits(short, name):
    """Autocast would round the matrices anyway; norms it would not."""
    folder, results = short
    for model in TRAINED if "ppo" in name else TRAINED[:1]:
        assert tiny.distance(f"{folder}/{name}/out/{model}", f"{folder}/{name}, wide/out/{model}") == 0
    for case, bits in ((name, "bfloat16"), (f"{name}, wide", "float32")):
        said = {line for line in results[case][0]["stdout"].splitlines() if re.match("(matrix|norm) in", line)}
        assert said == {f"matrix in torch.{bits}", "norm in torch.float32"}


def test_frozen_matrices_alone_are_stored_in_16_bits(world):
    cpu, tables = torch.device("cpu"), {"hf.transformer.wte.weight", "hf.transformer.wpe.weight"}
    frozen = placement.load_placed(world.policy, places_room.Place(), cpu, matrices=torch.bfloat16)
    for name, p in frozen.named_parameters():
        assert (p.dtype == torch.bfloat16) == (p.dim() == 2 and name not in tables) and not p.requires_grad, name
    trained = placement.load_placed(world.policy, places_room.Place(), cpu, matrices=torch.bfloat16, trained=True)
    assert {p.dtype for p in trained.parameters()} == {torch.float32} and all(p.requires_grad for p in trained.parameters())


# ---------------------------------------------------------------------------------------------------------------------
# going on at another stage

GOES_ON = {  # name -> (first: zero_stage and offload, ranks; then the same), an iteration each
    "3 to 0 on one": (("3", 2), ("", 1)), "3 to 1": (("3 policy=optimizer,value=params", 2), ("1", 2)),
    "0 to 3": (("", 2), ("3", 2)), "3 to 2 on three": (("3", 2), ("2", 3))}
CONSTANT = dict(dtype="float64", lr_decay="constant", value_lr_decay="constant", ema_decay=0.7, weight_decay=0.1,
                ppo_epochs=1, micro_batch_size=64)


@pytest.fixture(scope="module")
def resumed(world, tmp_path_factory):
    """The outcomes of the second parts, and of the runs that are whole, in one folder."""
    folder = str(tmp_path_factory.mktemp("resumed"))
    kinds = dict(whole=({}, GOES_ON), shared=(dict(value_init="shared"), {"shared, 3 to 1": (("policy=3", 2), ("1", 2))}))
    for part, iterations in enumerate((1, 2)):
        jobs = {}
        for kind, (keys, chains) in kinds.items():
            for name, parts in chains.items():
                stage, _, offload = parts[part][0].partition(" ")
                jobs[name] = ppo(world, parts[part][1], zero_stage=stage, offload=offload, max_iters=iterations,
                                 **CONSTANT | keys)
            if part == 1:
                jobs[kind] = ppo(world, 1, max_iters=2, **CONSTANT | keys)
        outcomes = in_a_row(folder, jobs)
    return folder, outcomes


@pytest.mark.parametrize("name", [*GOES_ON, "shared, 3 to 1"])
def test_runs_go_on_at_another_stage(resumed, name):
    folder, outcomes = resumed
    succeeded({name: outcomes[name]})
    assert "resuming from out/checkpoint-000001" in outcomes[name][0]["stdout"]
    whole = name.split(",")[0] if "," in name else "whole"
    assert apart(f"{folder}/{whole}", f"{folder}/{name}", (*TRAINED, "ema_policy")) < 1e-9
    names = sorted(os.path.basename(f) for f in glob.glob(f"{folder}/{whole}/out/checkpoint-000002/*.safetensors"))
    assert names == ["ema.safetensors", "policy_optimizer.safetensors", "value_model_optimizer.safetensors"]
    for file in names:
        a, b = (load_file(f"{folder}/{x}/out/checkpoint-000002/{file}") for x in (whole, name))
        assert {n: t.shape for n, t in a.items()} == {n: t.shape for n, t in b.items()} and a
        assert max((a[n].double() - b[n].double()).abs().max().item() for n in a) < 1e-9, file
        assert file == "ema.safetensors" or {n.rpartition(".")[2] for n in a} == {"step", "exp_avg", "exp_avg_sq"}


def test_the_average_lags_behind(resumed, world):
    """After 2 x 2 steps with 0.7 it is near the policy, and not it."""
    out = f"{resumed[0]}/whole/out"
    assert 1e-5 < tiny.distance(f"{out}/ema_policy", f"{out}/policy") < tiny.distance(world.policy, f"{out}/policy")


# ---------------------------------------------------------------------------------------------------------------------
# value_init = shared: one trunk for both losses

DUMP = """
original_batches, original_check, dumped = data.my_micro_batches, audit.check_gradients, {}
def batches(batch, *rest):
    if "advantages" in batch:
        dumped.update(batch)
    return original_batches(batch, *rest)
def check(norm, model, name, iteration):
    dumped.update({f"gradient/{name}/{n}": p.grad.clone() for n, p in model.named_parameters()})
    if name == "value_model":
        torch.save(dumped, "dump.pt")
    original_check(norm, model, name, iteration)
data.my_micro_batches, audit.check_gradients = batches, check
"""


@pytest.fixture(scope="module")
def both(world, tmp_path_factory):
    """The batch, and the gradients, of a single step on the shared trunk; weights before it."""
    folder = str(tmp_path_factory.mktemp("both"))
    keys = dict(dtype="float64", value_init="shared", max_iters=1, ppo_epochs=1, num_minibatches=1, vf_coef=0.3)
    succeeded(in_a_row(folder, {"both": ppo(world, 1, code=DUMP, **keys), "policy": ppo(world, 1, code=DUMP, **keys | dict(
        vf_coef=1e-300))}))
    return [torch.load(f"{folder}/{name}/dump.pt") for name in ("both", "policy")]


def test_the_shared_trunk_learns_from_both_losses(both, world):
    """One step by hand: transformers' GPT-2 with two heads in float64, a response at a time, without padding."""
    import transformers as hf

    batch = both[0]
    ours = {n.removeprefix("gradient/"): g for n, g in batch.items() if n.startswith("gradient/")}
    model = hf.AutoModelForCausalLM.from_pretrained(world.policy, dtype=torch.float64).eval()
    config = json.load(open(f"{world.policy}/config.json", encoding="utf-8"))
    head = from_scratch(config, "scalar", seed=1, dtype=torch.float64).hf.score.weight.detach().requires_grad_()
    V, count, loss = load_tokenizer(world.policy).vocab_size, batch["response_mask"].sum(), 0
    R = batch["response_mask"].shape[1]
    for i in range(len(batch["tokens"])):
        real = batch["attention_mask"][i]
        tokens, n = batch["tokens"][i][real], int(batch["response_mask"][i].sum())
        if n == 0:
            continue
        states = model.transformer(tokens[None]).last_hidden_state[0, -n - 1:-1]
        logprobs = (model.lm_head(states)[:, :V] / 0.9).log_softmax(-1)[torch.arange(n), tokens[-n:]]
        values = states @ head[0]
        assert (logprobs - batch["old_logprobs"][i, :n]).abs().max() < 1e-6
        assert (values - batch["values"][i, :n]).abs().max() < 1e-6 and real[:-R].any()
        # before the first step the ratio is 1 and the value is the old one: nothing is clipped
        loss = loss - (batch["advantages"][i, :n] * (logprobs - logprobs.detach()).exp()).sum() / count
        loss = loss + 0.3 * 0.5 * (values - batch["returns"][i, :n]).square().sum() / count
    loss.backward()
    scale = max(g.abs().max() for g in ours.values())
    assert (ours["value_model/score.weight"] - head.grad).abs().max() < 1e-9 * scale
    theirs = dict(model.named_parameters())
    for name in ours:
        if name.startswith("policy/"):
            assert (ours[name] - theirs[name.removeprefix("policy/hf.")].grad).abs().max() < 1e-9 * scale, name
    # and the value loss has its part in it: without it the trunk's gradient is another, the language head's the same
    alone = {n: (ours[f"policy/hf.{n}"] - both[1][f"gradient/policy/hf.{n}"]).abs().max()
             for n in ("transformer.wte.weight", "lm_head.weight")}
    assert alone["transformer.wte.weight"] > 1e-3 * scale and alone["lm_head.weight"] < 1e-12 * scale


# ---------------------------------------------------------------------------------------------------------------------
# optimizers and the moving average, without a run


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_offloaded_adamw_is_adamw_to_the_bit(dtype, weight_decay):
    results = []
    for offload in ("none", "optimizer"):
        model = small(dtype)
        optimizer = optimizers.make_optimizer(model, places_room.Place(offload=offload), 1.0, (0.9, 0.99), 1e-6, weight_decay)
        assert isinstance(optimizer, optimizers.OffloadedAdamW) == (offload == "optimizer")
        results.append(train(model, optimizer))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(results[0], small(dtype).parameters(), strict=True))


def test_offloaded_adamw_is_the_paper():
    """Adam (arXiv 1412.6980, algorithm 1) with decoupled decay (arXiv 1711.05101), on one number, in Python's floats."""
    p = torch.nn.Parameter(torch.tensor([1.5], dtype=torch.float64))
    optimizer = optimizers.OffloadedAdamW([p], lr=1.0, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.2)
    x, m, v = 1.5, 0.0, 0.0
    for t, (g, lr) in enumerate([(0.3, 0.1), (-2.0, 0.05), (0.0, 0.2), (1.0, 0.0)], 1):
        p.grad = torch.tensor([g], dtype=torch.float64)
        optimizers.step(optimizer, lr)
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g
        x = x * (1 - lr * 0.2) - lr * (m / (1 - 0.8**t)) / ((v / (1 - 0.9**t)) ** 0.5 + 1e-3)
        assert abs(p.item() - x) < 1e-12
    p.grad = None
    optimizers.step(optimizer, 1.0)
    assert abs(p.item() - x) < 1e-12


def test_optimizer_states_by_name_come_back():
    """optimizer_tensors -> fill_optimizer, between an offloaded optimizer and a plain one, then two more steps."""
    whole, first, second = small(), small(), small()
    kinds = [optimizers.make_optimizer(m, places_room.Place(offload=o), 1.0, (0.9, 0.99), 1e-6, 0.0)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
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
    other = optimizers.MovingAverage(small(dtype), 0.5)
    model[0].bias.requires_grad_(True)
    other.fill(averages | {"0.bias": torch.ones(5)})
    assert all(torch.equal(t, (averages | {"0.bias": torch.ones(5)})[n]) for n, t in other.tensors().items())


# ---------------------------------------------------------------------------------------------------------------------
# the keys

ALL = ("policy", "ref", "reward", "judge", "value")
P = places_room.Place
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


def test_places_without_a_value_model():
    assert places_room.placements(("policy",), "3", "reward=params", "", "adamw") == dict(
        policy=P(3), ref=P(3), reward=P(3, "params"), judge=P(3))
    with pytest.raises(BadConfig, match="value"):
        places_room.placements(("policy",), "value=3", "", "", "adamw")


def test_the_place_of_a_script_s_one_model():
    assert places_room.place_of_one("reward", "", "", "", "adamw") == P()
    assert places_room.place_of_one("reward", "3", "reward=optimizer", "", "adamw") == P(3, "optimizer")
    assert places_room.place_of_one("policy", "policy=1", "", "", "policy=adafactor") == P(
        1, optimizer="adafactor")
    with pytest.raises(BadConfig, match="NAME is one of reward and"):
        places_room.place_of_one("reward", "policy=3", "", "", "adamw")

BAD = [  # as above -> the key that is named
    (("4", "", "", "adamw"), "zero_stage"), (("policy=-1", "", "", "adamw"), "zero_stage"),
    (("policy", "", "", "adamw"), "zero_stage"),
    (("critic=3", "", "", "adamw"), "zero_stage"), (("policy=3,", "", "", "adamw"), "zero_stage"),
    (("=3", "", "", "adamw"), "zero_stage"),
    (("policy==3", "", "", "adamw"), "zero_stage"), (("policy=3;ref=3", "", "", "adamw"), "zero_stage"),
    (("3.0", "", "", "adamw"), "zero_stage"),
    (("policy=3\nref=3", "", "", "adamw"), "zero_stage"), (("", "params=policy", "", "adamw"), "offload"),
    (("", "all", "", "adamw"), "offload"), (("", "", "", "sgd"), "optim"), (("", "", "", "ref=adamw"), "optim")]
CONFLICTS = [  # as above -> the key that is named; all of them parse
    (("", "ref=optimizer", "", "adamw"), "offload"), (("", "reward=optimizer", "", "adamw"), "offload"),
    (("policy=2", "", "", "adafactor"), "optim"), (("", "policy=optimizer", "", "adafactor"), "optim"),
    (("", "policy=params", "", "adamw"), "offload"), (("1", "value=params", "", "adamw"), "offload"),
    (("", "value=optimizer", "", "adamw", False, "shared"), "value_init"),
    (("", "", "", "adamw", True, "policy"), "share_base")]


@pytest.mark.parametrize("keys, named", BAD + CONFLICTS, ids=str)
def test_what_cannot_be_is_one_line(keys, named):
    with pytest.raises(BadConfig) as e:
        places_room.placements(("policy", "value"), *keys)
    message = str(e.value)
    assert message.startswith(named) and len(message) < 300 and "\n" not in message, message
    assert (keys, named) not in BAD or "wanted VALUE, or NAME=VALUE" in message, message


def test_no_text_makes_a_traceback():
    """Bits of good values put together at random: places, or one short line."""
    rng, taken = random.Random(0), 0
    bits = ["policy", "value", "ref", "reward", "=", "=", ",", "3", "0", "16", ":", "q+v", "optimizer", "params", "none",
            "adafactor", "adamw", " ", "", "-1", "9" * 400, "\n", "é", "\0", "²", "1_0", "+", "."]
    for _ in range(3000):
        keys = ["", "", "", "adamw"]
        for i in rng.sample(range(4), 2):
            keys[i] = "".join(rng.choice(bits) for _ in range(rng.randrange(5)))
        try:
            places = places_room.placements(("policy", "value"), *keys, rng.random() < 0.2, rng.choice(["reward", "shared"]))
            assert set(places) == set(ALL)
            assert all(place.stage in range(4) for place in places.values())
            taken += 1
        except BadConfig as e:
            assert "\n" not in str(e) and len(str(e)) < 300, str(e)
    assert 30 < taken < 2000, taken


def test_precisions():
    cpu, f32, b16, f16 = torch.device("cpu"), torch.float32, torch.bfloat16, torch.float16
    for dtype, master, wanted, under in (("float32", True, (f32, None), None), ("float64", True, (torch.float64, None), None),
                                         ("bfloat16", True, (f32, b16), b16), ("float16", True, (f32, f16), f16),
                                         ("bfloat16", False, (b16, None), None)):
        context, *kinds = places_room.precisions(dtype, master, cpu)
        assert tuple(kinds) == wanted
        with context:
            assert torch.is_autocast_enabled("cpu") == (under is not None)
            assert under is None or torch.get_autocast_dtype("cpu") == under
    for dtype in ("float32", "float16", "float64"):
        with pytest.raises(BadConfig, match=f"^master_weights = False .*not in {dtype}; type --dtype=bfloat16"):
            places_room.precisions(dtype, False, cpu)

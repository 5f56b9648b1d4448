"""parallel.py alone and with two and three gloo ranks: shares, gathers, sums, gradients, and an audit that misses nothing."""
import ast
import functools
import itertools
import json
import math
import os
import re

import pytest
import torch

import parallel
import batches
from engine import audit, launch, together
from errors import Stop

from engine.run import Run
from rewards import Scorer
from rollout import Sampler

import tiny
from tiny import forked, one_run


def two_layers(seed=0, dtype=torch.float32):
    model, generator = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 7)), torch.Generator().manual_seed(seed)
    for p in model.parameters():  # not by torch's own draw, which forked runs leave out
        p.data.normal_(generator=generator)
    return model.to(dtype)


# ---------------------------------------------------------------------------------------------------------------------
# one process


def test_my_share_covers_everything_once(monkeypatch):
    for size in (1, 2, 3, 5, 8):
        for n in (0, 1, 2, 3, 7, 8, 100):
            shares = []
            for rank in range(size):
                monkeypatch.setattr(parallel, "rank_and_size", lambda r=rank, s=size: (r, s))
                shares.append(parallel.my_share(list(range(n))))
            assert sum(shares, []) == list(range(n))
            assert max(map(len, shares)) - min(map(len, shares)) <= 1


def all_parts(lengths, ranks, *limits):
    return [parallel.my_micro_batches(lengths, *limits, whose=(rank, ranks)) for rank in range(ranks)]


def test_micro_batches_by_hand():
    assert all_parts([5, 2, 3, 4], 2, 2) == [[[0, 2]], [[3, 1]]]  # the docstring's
    assert all_parts([2, 2, 2], 3, 8) == [[[0]], [[1]], [[2]]] and all_parts([], 2, 8) == [[], []]
    assert all_parts([1, 9, 2], 2, 1) == [[[1], [0]], [[2], []]]  # rank 1 has as many
    assert all_parts([5, 4, 3, 2, 1], 1, 2) == [[[0, 1], [2, 3], [4]]]
    assert all_parts([300, 44, 43, 40], 1, 9) == [[[0, 1], [2, 3]]]  # 300 - 44 is PADDING, with 43 it would be more
    assert all_parts([5, 4, 3, 20], 1, 99, 8) == [[[3], [0], [1, 2]]]  # 20 is too long; 5 and 4 are, with padding, 10
    assert all_parts([6, 1, 1, 1], 1, 1, 6) == [[[0], [1, 2, 3]]]


def test_micro_batches_of_all_ranks():
    """Each row is in one; they keep the limits; there are as many on every rank, and all ranks have like numbers of tokens."""
    lengths = torch.randint(1, 100, (61,), generator=torch.Generator().manual_seed(0)).tolist()
    for ranks, size, most in itertools.product((1, 2, 7, 100), (1, 5, 64), (0, 150)):
        parts = all_parts(lengths, ranks, size, most)
        flat = [sum(part, []) for part in parts]
        assert sorted(sum(flat, [])) == list(range(61)) and len({len(part) for part in parts}) == 1
        for mb in sum(parts, []):
            assert len(mb) <= size if not most else len(mb) <= 1 or max(lengths[i] for i in mb) * len(mb) <= most
            held = [lengths[i] for i in mb]
            assert len(mb) * max(held, default=0) - sum(held) <= parallel.PADDING
        tokens = [sum(lengths[i] for i in mine) for mine in flat]
        assert max(tokens) - min(tokens) <= max(lengths)  # dealt like cards


def test_one_process_starts_and_stops_alone(monkeypatch):
    assert together.from_rank(lambda: {"a": (1, None)}) == {"a": (1, None)}
    together.agree({"anything": 1})
    assert not launch.stop_asked() and not launch.stop_agreed()
    monkeypatch.setattr(launch, "signalled_at", 1.0)
    assert launch.stop_asked() and launch.stop_agreed()


def test_a_parameter_that_is_not_finite_is_no_secret():
    """As after a step with a huge learning rate and finite gradients: the audit, which comes before every save, stops it."""
    model = two_layers()
    audit.audit({"policy": model}, {}, 1)
    with torch.no_grad():
        model[1].bias[3] = torch.inf
    with pytest.raises(Stop, match=r"iteration 2: policy's 1\.bias is not finite \(on all ranks\); the last checkpoint is good"):
        audit.audit({"policy": model}, {}, 2)


def test_one_process_needs_no_group():
    batch = {"x": torch.arange(3), "mask": torch.tensor([True, False, True])}
    assert parallel.gather_rows(batch, 3) is batch
    assert parallel.rank_and_size() == (0, 1)
    assert parallel.all_reduce_metrics({"a": [6.0, 4], "b": [torch.tensor(3.0), torch.tensor(0)]}) == {"a": 1.5, "b": 3.0}
    x = torch.tensor([1.0, -2.0])
    assert torch.equal(parallel.all_reduce_max(x), x)
    model = two_layers()
    buffers = parallel.flatten_gradients(model.parameters())
    (3 * model[0].bias.sum()).backward()
    parallel.all_reduce_gradients(buffers)
    assert model[0].bias.grad.tolist() == [3.0] * 3
    parallel.all_reduce_gradients(buffers, scale=4.0)
    assert model[0].bias.grad.tolist() == [0.75] * 3
    before = [p.clone() for p in model.parameters()]
    parallel.broadcast_parameters([model])
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    launch.finish()


def test_flat_gradients_are_views_of_one_buffer_per_dtype():
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 7).double(), torch.nn.Linear(2, 2))
    buffers = parallel.flatten_gradients(model.parameters())
    assert {b.flat.dtype: len(b.flat) for b in buffers} == {torch.float32: 18 + 6, torch.float64: 28}
    starts = {b.flat.dtype: b.flat.data_ptr() for b in buffers}
    for p in model.parameters():
        assert p.grad.shape == p.shape and starts[p.dtype] <= p.grad.data_ptr()
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    want = torch.autograd.grad(model[1](model[0](x).double()).square().sum(), list(model[:2].parameters()))
    for _ in range(2):  # backward adds in place, so that the views stay views
        model[1](model[0](x).double()).square().sum().backward()
    assert all(torch.allclose(p.grad, 2 * g) for p, g in zip(model[:2].parameters(), want, strict=True))
    assert sum((b.flat != 0).sum() for b in buffers) == sum((g != 0).sum() for g in want)
    parallel.zero_gradients(buffers)
    assert all(not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("max_norm", [0.0, 0.5, 1e6])
def test_clip_gradients_equals_torch(max_norm):
    ours, theirs = two_layers().double(), two_layers().double()
    buffers = parallel.flatten_gradients(ours.parameters())
    x = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for model in (ours, theirs):
        model(x).square().sum().backward()
    want = torch.nn.utils.clip_grad_norm_(theirs.parameters(), max_norm or math.inf)
    assert want > 1
    assert parallel.clip_gradients(buffers, max_norm).item() == pytest.approx(want.item(), rel=1e-12)
    assert all(torch.allclose(p.grad, q.grad, rtol=1e-12) for p, q in zip(ours.parameters(), theirs.parameters(), strict=True))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_check_gradients_names_the_parameter(bad):
    model = two_layers()
    buffers = parallel.flatten_gradients(model.parameters())
    for p in model.parameters():
        p.grad.fill_(1.0)
    audit.check_gradients(parallel.clip_gradients(buffers, 0), model, "policy", 7)
    model[1].weight.grad[2, 1] = bad
    with pytest.raises(Stop, match=r"^iteration 7: the gradient of policy's 1\.weight is not finite"):
        audit.check_gradients(parallel.clip_gradients(buffers, 0), model, "policy", 7)


def test_check_finite_names_the_tensor_and_row():
    tensors = {"values": torch.zeros(3, 2), "scores": torch.zeros(3)}
    audit.check_finite(tensors, 4)
    tensors["scores"][1] = -math.inf
    with pytest.raises(Stop, match=r"^iteration 4: scores is not finite \(first in response 1 "):
        audit.check_finite(tensors, 4)
    tensors["values"][2, 0] = math.nan
    with pytest.raises(Stop, match=r"^iteration 4: values is not finite \(first in response 2 "):
        audit.check_finite(tensors, 4)


# ---------------------------------------------------------------------------------------------------------------------
# checksums

INTEGERS = {torch.float64: torch.int64, torch.float32: torch.int32, torch.bfloat16: torch.int16}
all_dtypes = pytest.mark.parametrize("dtype", INTEGERS, ids=str)


def one_parameter(values):
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(values.clone())
    return model


def differ(a, b):
    return not torch.equal(audit.checksums({"a": a}), audit.checksums({"a": b}))


@all_dtypes
def test_checksums_see_every_single_bit(dtype):
    values = torch.randn(5, generator=torch.Generator().manual_seed(0)).to(dtype)
    for place in range(5):
        for bit in range(8 * values.element_size()):
            flipped = values.clone()
            bits = flipped.view(INTEGERS[dtype])
            top = bit == 8 * values.element_size() - 1
            bits[place] ^= -(1 << bit) if top else 1 << bit
            assert differ(one_parameter(values), one_parameter(flipped)), f"bit {bit} of entry {place}"


@all_dtypes
def test_checksums_see_order(dtype):
    values = torch.randn(6, generator=torch.Generator().manual_seed(0)).to(dtype)
    values[5] = -values[0]  # the two differ in their sign alone
    for i in range(6):
        for j in range(i):
            swapped = values.clone()
            swapped[[i, j]] = values[[j, i]]
            assert differ(one_parameter(values), one_parameter(swapped)), (i, j)
    matrix = values.view(2, 3)
    assert differ(one_parameter(matrix), one_parameter(matrix.t().contiguous().view(2, 3)))


def test_checksums_see_order_across_chunks():
    """Large parameters are summed in chunks: a swap between two of them, one place further on, must show as well."""
    values = torch.zeros(2**22 + 8, dtype=torch.float32)
    for place in (2**22, 2**22 + 1):  # 1 is as far into its chunk as the second of these
        values[1], values[place] = 1.0, 2.0
        swapped = values.clone()
        swapped[1], swapped[place] = 2.0, 1.0
        assert differ(one_parameter(values), one_parameter(swapped))
        values[place] = 0


def test_checksums_by_hand():
    """The bits of 1.0, 2.0 and -0.0 are 0x3f800000, 0x40000000 and, with the sign, -0x80000000. Weights 1, 3, 5."""
    model = one_parameter(torch.tensor([1.0, 2.0, -0.0]))
    assert audit.checksums({"m": model}).tolist() == [0x3f800000 + 3 * 0x40000000 - 5 * 0x80000000]
    values = torch.zeros(2**20 + 6)
    values[2**20 + 5] = 1.0
    assert audit.checksums({"m": one_parameter(values)}).tolist() == [0x3f800000 * (2 * (2**20 + 5) + 1)]
    assert audit.checksums({"m": one_parameter(torch.tensor([1.0, 1.0]).bfloat16())}).tolist() == [0x3f80 * 4]


def test_audit_of_one_process_watches_the_frozen():
    models, frozen = {"policy": two_layers(0), "ref_policy": two_layers(1).requires_grad_(False)}, {}
    audit.audit(models, frozen, 0)
    with torch.no_grad():
        models["policy"][0].weight.add_(1)  # may move
    audit.audit(models, frozen, 1)
    models["ref_policy"][1].bias.data[6] += 1e-7
    with pytest.raises(Stop, match=r"^iteration 2: the frozen ref_policy has changed: parameter 1\.bias "):
        audit.audit(models, frozen, 2)


# ---------------------------------------------------------------------------------------------------------------------
# several processes


WORKER = """
import json, os, sys
import torch
import parallel
from engine import audit, launch, together
from errors import Stop
from test_parallel import two_layers

rank, size, device = launch.init("cpu", 30)
said = dict(rank=[rank, size, str(device)])

said["gathers"] = []
for n in (7, 3, 2, 1):  # more rows than ranks, as many, fewer
    everything = dict(mask=torch.arange(3 * n).view(n, 3) % 2 == 0,  # first: what follows begins at odd bytes
                      ids=torch.arange(2 * n).view(2, n).t() * 2**40,  # not contiguous
                      scores=torch.arange(n) / 3, exact=torch.arange(n, dtype=torch.float64) / 7, flag=torch.arange(n) % 2 == 1,
                      half=(torch.arange(2 * n) / 3).bfloat16().view(n, 1, 2),
                      odd=torch.tensor([-0.0, torch.nan, -torch.inf, 1e-45, 3.4e38, 0.1, 1.0][:n]))
    got = parallel.gather_rows({k: parallel.my_share(x) for k, x in everything.items()}, n)
    bits = lambda t: t.contiguous().view(torch.uint8)  # of equal bits, also where NaN != NaN and -0.0 == 0.0
    said["gathers"].append(list(got) == list(everything) and all(
        torch.equal(bits(got[k]), bits(x)) and (got[k].dtype, got[k].shape) == (x.dtype, x.shape) for k, x in everything.items()))

# a mean of means would be off: rank r has r + 1 items of value r
said["metrics"] = parallel.all_reduce_metrics({"mean": [float(rank * (rank + 1)), rank + 1], "none": [0.0, 0],
                                               "tensor": [torch.tensor(float(rank)), torch.tensor(1)]})
x = torch.tensor([float(rank), -float(rank), torch.nan if rank == size - 1 else 0.0])
said["max"] = [str(v) for v in parallel.all_reduce_max(x).tolist()]

model = two_layers(seed=rank)
parallel.broadcast_parameters([model])
said["broadcast"] = all(torch.equal(p, q) for p, q in zip(model.parameters(), two_layers(seed=0).parameters()))
buffers = parallel.flatten_gradients(model.parameters())
for buffer in buffers:
    buffer.flat.fill_(rank + 1.0)
parallel.all_reduce_gradients(buffers)
said["gradients"] = [p.grad.unique().tolist() for p in model.parameters()]
if rank == 1:
    buffers[0].flat[3] = torch.nan
parallel.all_reduce_gradients(buffers)

def caught(f, *args):
    try:
        return f(*args)
    except Stop as e:
        return str(e)

said["check"] = caught(audit.check_gradients, parallel.clip_gradients(buffers, 0), model, "value_model", 5)
models, frozen = dict(policy=model, reward_model=two_layers(seed=9).requires_grad_(False)), {}
said["audits"] = [caught(audit.audit, models, frozen, 0)]
for name, owners in (("policy", [1]), ("reward_model", [size - 1]), ("reward_model", range(size))):
    p = models[name][1].weight
    before = p.detach().clone()
    if rank in owners:
        p.data[6, 2] *= 1.0000002  # the last bit or two
    said["audits"].append(caught(audit.audit, models, frozen, 1))
    p.data.copy_(before)
said["audits"].append(caught(audit.audit, models, frozen, 2))
with open(os.path.join(sys.argv[1], f"{size}-{rank}.json"), "w") as f:
    json.dump(said, f)
launch.finish()
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What the ranks of a job of two and of a job of three found: {size: [rank 0's, ...]}."""
    out = tmp_path_factory.mktemp("workers")
    worker = out / "worker.py"
    worker.write_text(WORKER)
    for size, (result,) in forked(str(out), {n: [one_run(str(worker), *[[str(out)]] * int(n))] for n in "23"}).items():
        assert result["codes"] == [0] * int(size), result
    return {size: [json.loads((out / f"{size}-{rank}.json").read_text()) for rank in range(size)] for size in (2, 3)}


@pytest.mark.parametrize("size", [2, 3])
def test_collectives(said, size):
    for rank, record in enumerate(said[size]):
        assert record["rank"] == [rank, size, "cpu"]
        assert record["gathers"] == [True] * 4
        total, count = sum(r * (r + 1) for r in range(size)), sum(r + 1 for r in range(size))
        assert record["metrics"] == {"mean": pytest.approx(total / count), "none": 0.0, "tensor": pytest.approx((size - 1) / 2)}
        assert record["max"] == [str(float(size - 1)), "-0.0", "inf"]
        assert record["broadcast"] is True
        assert record["gradients"] == [[float(count)]] * 4  # a sum, not a mean
        assert record["check"].startswith("iteration 5: the gradient of value_model's 0.weight is not finite")


@pytest.mark.parametrize("size", [2, 3])
def test_audit_names_model_parameter_and_ranks(said, size):
    everyone = " and ".join(f"rank {r}" for r in range(size))
    for record in said[size]:  # all ranks stop, with the same words
        well, policy, reward, frozen, again = record["audits"]
        assert well is None and again is None
        assert policy.startswith("iteration 1: the ranks have drifted apart: policy, parameter 1.weight, differs on "
                                 f"{'rank 1' if size == 3 else everyone} (1 parameters")
        assert f"reward_model, parameter 1.weight, differs on {'rank 2' if size == 3 else everyone} (" in reward
        assert frozen.startswith("iteration 1: the frozen reward_model has changed: parameter 1.weight")


# ---------------------------------------------------------------------------------------------------------------------
# the collectives of an iteration, against the list in the docstring of parallel.py

# Notes each of torch's collectives in iteration 1: [the outermost function of these ROOMS that led to it, torch's call, how many
# elements].
RECORD = """
import json, os, sys
ROOMS = ("parallel.py", "together.py", "launch.py", "audit.py", "run_log.py")
import torch.distributed as dist
def record(name):
    original = getattr(dist, name)
    def recorded(*args, **kwargs):
        frame, function = sys._getframe(1), None
        while frame and "max_iters" not in frame.f_globals:  # up to the script, by one of its keys
            if os.path.basename(frame.f_code.co_filename) in ROOMS:
                function = frame.f_code.co_qualname.partition(".")[0]  # of a function in a function, the outer one
            frame = frame.f_back
        if frame and getattr(frame.f_globals.get("run"), "iteration", None) == 1:
            sent = args[1] if name == "all_gather" else args[0]
            with open(f"collectives-{RANK}.jsonl", "a") as f:
                print(json.dumps([function, name, sent.numel()]), file=f)
        return original(*args, **kwargs)
    setattr(dist, name, recorded)
for name in ("all_reduce", "all_gather", "all_gather_into_tensor", "broadcast", "reduce", "gather", "scatter", "reduce_scatter",
             "reduce_scatter_tensor", "all_to_all", "barrier", "all_gather_object", "broadcast_object_list"):
    record(name)
"""
LINE = re.compile(r"^ *(\d+)  (\w+) +(\w+) +(\w+) +(.+?)   *(\S.*)$", re.M)  # no, phase, function, torch's call, numbers, ...


def listed_for(script, sizes):
    """
    The docstring's list -> {no: [function, torch's call, elements]}; sizes: what the words of the column "numbers" mean. For
    grpo.py as its sentences change it.
    """
    lines = {int(no): [function, call, words] for no, _, function, call, words, _ in LINE.findall(parallel.__doc__)}
    assert list(lines) == list(range(1, len(lines) + 1))
    if script == "grpo.py":
        (without, one, words_1, other, words_2), = re.findall(
            r"grpo\.py .* without (\d+); (\d+) has (.+) numbers and (\d+) has (\d+)\.", parallel.__doc__)
        lines[int(one)][2], lines[int(other)][2] = words_1, words_2
        del lines[int(without)]
    return {no: [function, call, int(sizes.get(words, words))] for no, (function, call, words) in lines.items()}


def in_order(lines, steps, one_minibatch=False):
    """
    The list with its steps written out: the gradients in each one, the ratio in the first alone, as the sentence below it
    says; and with one minibatch as that sentence says it.
    """
    (*each, once), = [tuple(map(int, found)) for found in re.findall(
        r"(\d+) and (\d+) run once in each optimizer step, (\d+) only in the first", parallel.__doc__)]
    step = [lines[no] for no in each if no in lines]
    before, after, first = [x for no, x in lines.items() if no < each[0]], [x for no, x in lines.items() if no > once], step
    if one_minibatch:
        (fewer, again, later, where), = [tuple(map(int, found)) for found in re.findall(
            r"With one minibatch\s+(\d+) has B R numbers, .*; an? (\d+) of its old_logprobs and (\d+) come just before (\d+)\.",
            parallel.__doc__)]
        assert fewer == again and later == again + 1 == len(before) and where == each[0]
        before[fewer - 1][2] //= 2
        first = [before[again - 1], before.pop()] + step
    return before + first + [lines[once]] + (steps - 1) * step + after


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """{run: each rank's collectives of iteration 1}, and the number of parameters of the two trained models."""
    folder = str(tmp_path_factory.mktemp("recorded"))
    world = tiny.build(f"{folder}/world")
    runs = {"ppo.py": world.ppo("out", max_iters=2), "grpo.py": world.grpo("out", max_iters=2),
            "grpo.py, one minibatch": world.grpo("out", max_iters=2, num_minibatches=1)}
    results = forked(folder, {run: [one_run(run.split(",")[0], *[(args, RECORD)] * 2)] for run, args in runs.items()})
    collectives = {}
    for run, (result,) in results.items():
        assert result["codes"] == [0, 0], result
        collectives[run] = []
        for rank in range(2):
            with open(f"{folder}/{run}/collectives-{rank}.jsonl", encoding="utf-8") as f:
                collectives[run].append([json.loads(line) for line in f])
    weights = {name: sum(t.numel() for t in tiny.read_weights(f"{folder}/ppo.py/out/{name}").values())
               for name in ("policy", "value_model")}
    return collectives, weights


@pytest.mark.parametrize("run, batch_size", [("ppo.py", 7), ("grpo.py", 15), ("grpo.py, one minibatch", 15)])
def test_an_iterations_collectives_are_those_in_the_docstring(recorded, run, batch_size):
    collectives, weights = recorded
    most_rows, R = (batch_size + 1) // 2, 8  # max_new_tokens
    seen, (script, *one) = collectives[run], run.split(",")
    assert seen[0] == seen[1]
    rows, scores = [numbers for function, _, numbers in seen[0] if function == "gather_rows"]
    assert rows > scores > 0 and rows % most_rows == scores % most_rows == 0
    sizes = {"B/n rows": rows, "B/n scores": scores, "3 B R": 3 * batch_size * R, "2 B R": 2 * batch_size * R, **weights}
    steps = 2 if one else 4  # two epochs of one or two minibatches
    assert seen[0] == in_order(listed_for(script, sizes), steps, one_minibatch=bool(one))


def is_collective(function):
    if isinstance(function, type):
        return function in (Run, batches.Batches)  # their __init__ calls some
    return callable(function) and (function.__doc__ or "").strip().startswith("A collective")


SCRIPTS = ("ppo.py", "grpo.py", "batches.py", "rollout.py", "rewards.py", "engine/run.py")


def collectives_in(script):
    """The names of the collectives that a script calls, each on a marked line. Nothing else may be marked."""
    with open(os.path.join(tiny.ROOT, script), encoding="utf-8") as f:
        source = f.read()
    marked = {n for n, line in enumerate(source.split("\n"), 1) if "# COLLECTIVE" in line}
    tree, names, used, called = ast.parse(source), {}, set(), set()
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    exec(compile(ast.Module(imports, []), script, "exec"), names)
    names |= {node.name: functions_like(node) for node in tree.body if isinstance(node, ast.FunctionDef)}
    names |= dict(run=Run, scorer=Scorer, sampler=Sampler, batches=batches.Batches,
                  self={"engine/run.py": Run, "batches.py": batches.Batches}.get(script))
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        function = re.sub(r"^self\.(run|sampler|scorer)\.", r"\1.", ast.unparse(call.func))
        first, *rest = function.split(".")  # "parallel", ["gather_rows"]
        if is_collective(functools.reduce(lambda owner, name: getattr(owner, name, None), rest, names.get(first))):
            marks = marked & set(range(call.lineno, call.end_lineno + 1))
            assert marks, f"{script}:{call.lineno}: {ast.unparse(call.func)} is a collective"
            used |= marks
            called.add((rest or [first])[-1])
    assert used == marked, f"{script}: no collective is called on lines {sorted(marked - used)}"
    return called


def functions_like(node):
    """A function with the docstring of one in a script."""
    def function():
        pass
    function.__doc__ = ast.get_docstring(node)
    return function


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_scripts_mark_their_collectives(script):
    """A call of a function that is a collective is marked # COLLECTIVE."""
    assert collectives_in(script)


def test_every_collective_of_the_list_is_marked_somewhere():
    listed = {function for _, _, function, *_ in LINE.findall(parallel.__doc__)}
    assert listed <= set().union(*map(collectives_in, SCRIPTS))

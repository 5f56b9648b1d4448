"""parallel.py alone and with two and three gloo ranks: shares, gathers, sums, gradients, and an audit that misses nothing."""
import ast
import glob
import itertools
import json
import math
import os
import re

import pytest
import torch

import parallel
from engine import audit
from errors import Stop

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


def test_a_parameter_that_is_not_finite_is_no_secret():
    """As after a step with a huge learning rate and finite gradients: the audit, which comes before every save, stops it."""
    model = two_layers()
    audit.audit({"policy": model}, {}, 1)
    with torch.no_grad():
        model[1].bias[3] = torch.inf
    with pytest.raises(Stop, match=r"iteration 2: policy's 1\.bias is not finite on rank 0; the last checkpoint is good"):
        audit.audit({"policy": model}, {}, 2)


def test_check_gradients_names_the_parameter():
    model = two_layers()
    buffers = parallel.flatten_gradients(model.parameters())
    for p in model.parameters():
        p.grad.fill_(1.0)
    audit.check_gradients(parallel.clip_gradients(buffers, 0), model, "policy", 7)
    model[1].weight.grad[2, 1] = math.nan
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


def test_checksums_see_order_across_chunks():
    """Large parameters are summed in chunks: a swap between two of them, one place further on, must show as well."""
    values = torch.zeros(2**22 + 8, dtype=torch.float32)
    for place in (2**22, 2**22 + 1):  # 1 is as far into its chunk as the second of these
        values[1], values[place] = 1.0, 2.0
        swapped = values.clone()
        swapped[1], swapped[place] = 2.0, 1.0
        assert differ(one_parameter(values), one_parameter(swapped))
        values[place] = 0


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
# the marks of collectives, and the list in the docstring of parallel.py

SCRIPTS = ("ppo.py", "grpo.py", "batches.py", "rollout.py", "rewards.py", "engine/run.py")
OTHERS = r"(torch|math|os|os\.path)\.\w+|' \| '\.join|iterations|read|sample|self\.to_save"  # no collectives


def parsed(script):
    with open(os.path.join(tiny.ROOT, script), encoding="utf-8") as f:
        source = f.read()
    return ast.parse(source), {n for n, line in enumerate(source.split("\n"), 1) if "# COLLECTIVE" in line}


def test_every_collective_is_marked_and_nothing_else():
    """A call of what says "A collective" in its docstring is marked # COLLECTIVE, or the class whose __init__ calls some."""
    files = [os.path.relpath(path, tiny.ROOT) for folder in ("", "engine") for path in glob.glob(f"{tiny.ROOT}/{folder}/*.py")]
    collectives, called = {"Run", "Placement", "Sampler"}, set()
    for file in files:
        collectives |= {node.name for node in ast.walk(parsed(file)[0]) if isinstance(node, ast.FunctionDef)
                        and (ast.get_docstring(node) or "").startswith("A collective")}
    for script in SCRIPTS:
        tree, marked = parsed(script)
        used = set()
        for call in [node for node in ast.walk(tree) if isinstance(node, ast.Call)]:
            function = ast.unparse(call.func)
            name = function.split(".")[-1]
            if name in collectives and not re.fullmatch(OTHERS, function):
                marks = marked & set(range(call.lineno, call.end_lineno + 1))
                assert marks, f"{script}:{call.lineno}: {function} is a collective"
                used |= marks
                called.add(name)
        assert used == marked, f"{script}: no collective is called on lines {sorted(marked - used)}"
    listed = re.findall(r"^ *\d+  \w+ +(\w+) ", parallel.__doc__, re.M)
    assert len(listed) > 5 and set(listed) <= called

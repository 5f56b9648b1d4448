"""
What only a GPU can show, in under three minutes on one: runs/gpu.sh names it in QUARTET_GPU, which
has the value of CUDA_VISIBLE_DEVICES. Without it these tests are skipped; QUARTET_GPU=cpu runs them
on a CPU, to test the tests.

    QUARTET_GPU=0 python -m pytest evidence/needs/test_gpu.py
"""
import json
import os
import re
import subprocess
import sys

import pytest
import torch

import ranks
from gae import compute_gae
from load import load
from model import response_values
from options import decoding_graph
from rollout import draw
from test_families import NO_SCORES, READ, rows_of_texts, save
from tiny import (ROOT, answer, assert_same_run, assert_same_weights, keys_of, keys_of_system,
                  read_log, typed)

GPU = os.environ.get("QUARTET_GPU", "")
DEVICE, ON_GPU = "cpu" if GPU == "cpu" else "cuda", GPU not in ("", "cpu")
pytestmark = pytest.mark.skipif(not GPU, reason="QUARTET_GPU names no GPU")
VISIBLE = dict(CUDA_VISIBLE_DEVICES=GPU if ON_GPU else "")
if ON_GPU:
    os.environ |= VISIBLE  # conftest.py hides it from all other tests


def figure(name, value, unit=""):
    """Print a figure, for the report of runs/gpu.sh."""
    print(f"\n{name}: {value:.4g} {unit}")


@pytest.fixture(scope="module", autouse=True)
def kernels():
    """Those of a run."""
    ranks.choose_kernels(False)


# models: CPU and GPU compute the same


@pytest.mark.parametrize("name", READ)
def test_sampling_agrees_with_the_cpu(name, tmp_path, monkeypatch):
    """With a cache, in parts of three, step by step and by CUDA graphs: the same texts."""
    monkeypatch.setattr(decoding_graph, "off", "")
    monkeypatch.setattr(decoding_graph, "uncompiled", "")
    save(tmp_path, name)
    prompts = [[5, 17, 80, 33, 9], [41, 2, 2, 60, 7, 7, 23, 90, 11], [64], [3, 50, 3, 8], [64]]
    out, ways = [], [("cpu", False), (DEVICE, False), (DEVICE, True)]
    if ON_GPU and name in ("GPT-2", "Llama"):  # it takes half a minute
        ways.append((DEVICE, "compiled"))
    for device, graphs in ways:
        policy = load(str(tmp_path), "policy", keys_of_system(), torch.device(device))
        policy.tokenizer.eos_ids = set(range(0, 260, 9))
        out.append(answer(policy, prompts, 20, at_once=3, graphs=graphs))
    for batch in out[1:]:
        assert torch.equal(batch["tokens"].cpu(), out[0]["tokens"])
        gap = batch["sampler_logprobs"].cpu() - out[0]["sampler_logprobs"]
        assert gap.abs().max() < 1e-4
    print(name, decoding_graph.off or "no reason against graphs", decoding_graph.uncompiled)


@pytest.mark.skipif(not ON_GPU, reason="a CPU has no graphs")
def test_old_graphs_keep_no_memory(tmp_path, monkeypatch):
    for name, value in dict(off="", COLUMNS=8, MULTIPLE=8).items():
        monkeypatch.setattr(decoding_graph, name, value)
    save(tmp_path, "Llama")
    policy = load(str(tmp_path), "policy", keys_of_system(), torch.device(DEVICE))
    policy.tokenizer.eos_ids, reserved = {263}, []
    for _ in range(4):
        answer(policy, [[5, 17, 80], [41]], 50, graphs=True)  # six graphs, of 2 MiB at least
        reserved.append(torch.cuda.memory_reserved())
    assert not decoding_graph.off and reserved[3] - reserved[1] < 8 * 2**20, reserved


@pytest.mark.parametrize("name", READ)
def test_gradients_and_scores_agree_with_the_cpu(name, tmp_path):
    save(tmp_path / "lm", name)
    if name not in NO_SCORES:
        save(tmp_path / "scalar", name, scalar=True)
    tokens, mask = rows_of_texts()
    last, found = torch.tensor([8, 11, 1, 4]), []
    system = keys_of_system(gradient_checkpointing=True)
    for device in map(torch.device, ("cpu", DEVICE)):
        model = load(f"{tmp_path}/lm", "policy", system, device, trained=True)
        ids, m = tokens.to(device), mask.to(device)
        logprobs, entropies = model.logprobs(ids, m, 0.7, 7, entropy=True)
        (logprobs.mean() + 0.3 * entropies.mean()).backward()
        rewards = torch.linspace(-1, 1, 48, dtype=torch.float64, device=device).view(4, 12)
        here = [logprobs.detach(), *(p.grad for p in model.parameters() if p.grad is not None),
                *compute_gae(rewards, rewards.cos(), m, 0.99, 0.95)]
        if name not in NO_SCORES:
            scorer = load(f"{tmp_path}/scalar", "reward", system, device, "scalar")
            values = response_values(scorer, dict(tokens=ids, response_mask=m))
            here += [scorer.scores(ids, last.to(device)), values]
        found.append([x.cpu() for x in here])
    for a, b in zip(*found, strict=True):
        assert (a - b).abs().max() < 3e-4 * max(1, a.abs().max())


@pytest.mark.parametrize("V", [50_257, 151_936])
@torch.no_grad()
def test_no_impossible_token_in_many_draws(V):
    """10^7 draws in all on a GPU; half of the tokens are impossible; each as often as it should."""
    rows, draws = (4096, 5_000_000) if ON_GPU else (64, 640)
    drawn = torch.Generator(DEVICE).manual_seed(V)
    logits = 4 * torch.randn(V, generator=drawn, device=DEVICE)
    impossible = torch.rand(V, generator=drawn, device=DEVICE) < 0.5
    logits[impossible] = -torch.inf
    likely, probs = logits.topk(100).indices, logits.double().softmax(-1)
    wrong, counts, n = 0, torch.zeros(V, dtype=torch.int64, device=DEVICE), 0
    batch = logits.expand(rows, V).contiguous()
    while n < draws:
        u = torch.rand(rows, generator=drawn, device=DEVICE, dtype=torch.float64)
        token, logprob = draw(batch, u, 1.0)
        wrong += impossible[token].sum() + (~logprob.isfinite()).sum()
        counts.index_add_(0, token, torch.ones_like(token))
        n += rows
    figure("impossible tokens", float(wrong))
    expected = n * probs[likely]
    assert wrong == 0 and ((counts[likely] - expected).abs() < 6 * expected.sqrt() + 3).all()


@pytest.mark.skipif(not ON_GPU, reason="memory can be pinned only for a GPU")
def test_what_is_offloaded_is_pinned(world):
    from options.shards import fetched

    device = torch.device(DEVICE)
    model = load(world.reward, "reward", keys_of_system(offload="params"), device, "scalar")
    assert all(p.is_pinned() for p in model.parameters())
    with fetched(model, device):
        assert all(p.is_cuda for p in model.parameters())
    assert all(p.is_pinned() for p in model.parameters())


# runs of scripts, in processes of their own: CUDA does not survive a fork

DRIVER = """
import json, os, runpy, sys
sys.path[:0] = json.loads(sys.argv[2])
import torch
import torch.distributed as dist
import rollout
plain, results = rollout.decode, []
for folder, script, before, args in json.loads(sys.argv[1]):
    os.makedirs(folder, exist_ok=True)
    os.chdir(folder)
    exec(before)
    sys.argv = [script, *args]
    runpy.run_path(script, run_name="__main__")
    rollout.decode = plain
"""
GROUP_OF_ONE = f"""dist.init_process_group(
    "{'nccl' if ON_GPU else 'gloo'}", store=dist.HashStore(), rank=0, world_size=1,
    device_id=torch.device("cuda", 0) if {ON_GPU} else None)"""


def command(jobs):
    """The command of (folder, script, Python to run before it, keys) one after the other."""
    work = [[str(folder), f"{ROOT}/{script}", before, typed(dict(out_dir="out") | keys)]
            for folder, script, before, keys in jobs]
    return [sys.executable, "-c", DRIVER, json.dumps(work), json.dumps([ROOT, f"{ROOT}/data"])]


def finish(jobs):
    """What these runs have said, when they have come to their end."""
    return subprocess.run(command(jobs), env=os.environ | VISIBLE, capture_output=True, text=True,
                          timeout=150)


KINDS = {  # name: Python before the run, keys
    "cpu": ("", dict(device_type="cpu", dtype="float64")),
    "bfloat16": ("", dict(dtype="bfloat16")), "float16": ("", dict(dtype="float16")),
    "float32": ("", dict(dtype="float32")), "float64": ("", dict(dtype="float64")),
    "offloaded": ("", dict(
        offload="policy=optimizer,value=optimizer,ref=params,reward=params")),
    "group of one": (GROUP_OF_ONE, dict(dtype="float64"))}


@pytest.fixture(scope="module")
def runs(world, tmp_path_factory):
    """A function: name in KINDS -> the out_dir of its run."""
    root = tmp_path_factory.mktemp("runs")
    done = finish([(root / name, "ppo.py", before, keys_of(
        world, "ppo.py", **dict(device_type=DEVICE, max_iters=2) | keys))
        for name, (before, keys) in KINDS.items()])
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return lambda name: f"{root}/{name}/out"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_sampler_and_training_agree(runs, dtype):
    """Promise 1, measured; before any update the KL to the reference is 0, the ratio 1."""
    records = read_log(runs(dtype))[:2]
    figure(f"gap {dtype}", max(r["policy/sampler_gap"] for r in records), "nats")
    assert records[0]["objective/kl"] == 0
    assert all(r["policy/ratio_gap"] == 0 for r in records)


@pytest.mark.parametrize("name", ["float64", "offloaded", "group of one"])
def test_a_run_is_that_of_the_cpu(runs, name):
    """In float64: the same texts and metrics; with nccl's collectives, and what is offloaded."""
    assert_same_run(runs("cpu"), runs(name), ("policy", "value_model"), 1e-8)


def test_deterministic_runs_resume_bit_for_bit(world, tmp_path):
    """bfloat16: a run of four iterations, the same again, and one that begins anew after two."""
    keys = keys_of(world, "ppo.py", device_type=DEVICE, dtype="bfloat16", deterministic=True,
                   lr_decay="constant", value_lr_decay="constant")
    done = finish([(tmp_path / name, "ppo.py", "", keys | dict(max_iters=n)) for name, n in (
        ("whole", 4), ("again", 4), ("parts", 2), ("parts", 4))])
    assert done.returncode == 0, done.stderr
    for name in ("again", "parts"):
        assert_same_weights(f"{tmp_path}/whole/out", f"{tmp_path}/{name}/out")


HUNGRY = f"""
calls = []
def hungry(*args, **kwargs):
    calls.append(1)
    len(calls) == 2 and torch.empty(10**14, device={DEVICE!r})
    return plain(*args, **kwargs)
rollout.decode = hungry
"""


def test_too_little_memory_is_one_line(world, tmp_path):
    """And the last checkpoint is good."""
    keys = keys_of(world, "ppo.py", max_iters=2, checkpoint_interval=1, eval_path="",
                   device_type=DEVICE)
    done = finish([(tmp_path, "ppo.py", HUNGRY, keys)])
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert re.search("error: out of memory .*lower micro_batch_size", done.stderr)
    done = finish([(tmp_path, "ppo.py", "", keys)])
    assert done.returncode == 0 and "resuming from" in done.stdout, done.stderr

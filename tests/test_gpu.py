"""
What only a GPU can show, in under three minutes on one: `pytest -m gpu`, also in `bash runs/gpu.sh`. Without a GPU
these tests are skipped. QUARTET_GPU_TESTS=cpu runs them on a CPU, to test the tests. What they compare with, and whatever of
them means something without a GPU, is in the other files: families in test_model.py, the sampler and the places of tensors in
test_device.py, stops and kills in test_reliability.py.
"""
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch

import decoding_graph
import launch
from gae import compute_gae
from model import freeze
from load import load_model
from rollout import draw, generate

import tiny
from conftest import ROOT
from families import NO_CLASSIFIER, VARIANTS, make, padded

pytestmark = pytest.mark.gpu
DEVICE = os.environ.get("QUARTET_GPU_TESTS") or "cuda"
ON_GPU = DEVICE == "cuda"


def figure(name, value, unit=""):
    """Print a figure, for the report of runs/gpu.sh."""
    print(f"\n{name}: {value:.4g} {unit}")


@pytest.fixture(scope="module", autouse=True)
def kernels():
    """Those of a run."""
    launch.choose_kernels(False)


# ---------------------------------------------------------------------------------------------------------------------
# models: CPU and GPU compute the same


def precision(variant):
    """(dtype, limit); of other families transformers computes norms and rotations in float32 all the same."""
    return (torch.float64, 1e-9) if variant.startswith("gpt2") else (torch.float32, 1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_sampling_agrees_with_the_cpu(variant, tmp_path, monkeypatch):
    """With a cache, in parts of three, step by step and by CUDA graphs: the same texts."""
    monkeypatch.setattr(decoding_graph, "off", "")
    make(variant).save_pretrained(tmp_path)
    dtype, limit = precision(variant)
    length = 3 if "longrope" in variant else 20  # its context has 12 tokens
    prompts = [[5, 17, 80, 33, 9], [41, 2, 2, 60, 7, 7, 23, 90, 11], [64], [3, 50, 3, 8], [12, 95], [64]]
    want, got, graphed = (
        generate(freeze(load_model(str(tmp_path), dtype=dtype, device=device)), prompts, length,
                 eos_ids=range(0, 97, 9), batch_size=3, graphs=graphs)
        for device, graphs in (("cpu", False), (DEVICE, False), (DEVICE, True)))
    for batch in got, graphed:
        assert torch.equal(batch["tokens"].cpu(), want["tokens"])
        assert (batch["sampler_logprobs"].cpu() - want["sampler_logprobs"]).abs().max() < limit
    print(variant, decoding_graph.off or "no reason against graphs")
    # mixtures choose experts on the CPU; transformers before 5.23 asks there how far longrope's positions go
    assert not decoding_graph.off or variant in ("mixtral", "phi3-longrope")


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_and_scores_agree_with_the_cpu(variant, tmp_path):
    """Log-probs and entropies in chunks, with layers computed again, and their gradients; scores; the advantages of GAE."""
    make(variant).save_pretrained(tmp_path / "lm")
    if variant not in NO_CLASSIFIER:
        make(variant, head="scalar").save_pretrained(tmp_path / "scalar")
    dtype, limit = precision(variant)
    tokens, mask = padded([9, 12, 5], left=False)
    chosen, last = mask & (torch.arange(12) > 0), mask.sum(1) - 1
    found = []
    for device in ("cpu", DEVICE):
        model, ids = load_model(str(tmp_path / "lm"), dtype=dtype, device=device), tokens.clamp(max=89).to(device)
        model.recompute()
        logprobs, entropies = model.logprobs(ids, chosen.to(device), 0.7, 90, 7, entropy=True)
        (logprobs.sum() + 0.3 * entropies.sum()).backward()
        rewards = torch.linspace(-1, 1, 36, dtype=torch.float64, device=device).view(3, 12)
        gae = compute_gae(rewards, rewards.cos(), mask.to(device), 0.99, 0.95)
        here = [logprobs.detach(), *(p.grad for p in model.parameters()), *gae]
        if variant not in NO_CLASSIFIER:
            scorer = freeze(load_model(str(tmp_path / "scalar"), "scalar", dtype=dtype, device=device))
            here += [scorer.scores(ids, last.to(device)), scorer.values(ids, chosen.to(device))]
        found.append([x.cpu() for x in here])
    assert all((a - b).abs().max() < limit * max(1, a.abs().max()) for a, b in zip(*found, strict=True))


# ---------------------------------------------------------------------------------------------------------------------
# the sampler


@pytest.mark.parametrize("V", [50_257, 151_936])
@torch.no_grad()
def test_no_impossible_token_in_many_draws(V):
    """10^7 draws in all on a GPU; half of the tokens are impossible; and each as often as it should be."""
    rows, draws = (4096, 5_000_000) if ON_GPU else (64, 640)
    generator = torch.Generator(DEVICE).manual_seed(V)
    logits = 4 * torch.randn(V, generator=generator, device=DEVICE)
    impossible = torch.rand(V, generator=generator, device=DEVICE) < 0.5
    logits[impossible] = -torch.inf
    likely = logits.topk(100).indices
    probs = logits.double().softmax(-1)
    wrong, counts, n = 0, torch.zeros(V, dtype=torch.int64, device=DEVICE), 0
    batch = logits.expand(rows, V).contiguous()
    while n < draws:
        u = torch.rand(rows, generator=generator, device=DEVICE, dtype=torch.float64)
        token, logprob = draw(batch, u, 1.0)
        wrong += impossible[token].sum() + (~logprob.isfinite()).sum()
        counts.index_add_(0, token, torch.ones_like(token))
        n += rows
    figure("impossible tokens", float(wrong))
    assert wrong == 0
    expected = n * probs[likely]
    assert ((counts[likely] - expected).abs() < 6 * expected.sqrt() + 3).all()


# ---------------------------------------------------------------------------------------------------------------------
# runs of scripts

DRIVER = f"""
import json, os, runpy, sys
sys.path[:0] = [{ROOT!r}, {ROOT + "/tests"!r}]
import torch, parallel, loss, rollout, prompts
import launch
import run
import together

ours, work, results = (parallel, loss, rollout, prompts, launch, run, together), sys.argv[1], []
for script, code, args in json.load(open(work)):
    sys.argv, result, before = [script, *args], "", [dict(vars(module)) for module in ours]
    try:
        exec(code, globals())
        runpy.run_path(script, run_name="__main__")
    except BaseException as e:
        result = type(e).__name__ + ": " + str(e)
    results.append(result)
    for module, variables in zip(ours, before):
        vars(module).update(variables)
json.dump(results, open(work + ".results", "w"))
sys.stdout.flush()
os._exit(0)
"""


def environment():
    return {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0") if ON_GPU else "",
            "PYTHONPATH": os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))}


def in_one_process(folder, calls):
    """[(script, Python to run before it, its arguments), ...] -> ["" or its error]; a GPU starts only once for all of them."""
    work, driver = os.path.join(folder, "work.json"), os.path.join(folder, "driver.py")
    with open(driver, "w", encoding="utf-8") as f:
        f.write(DRIVER)
    with open(work, "w", encoding="utf-8") as f:
        json.dump([[os.path.join(ROOT, script), code, args] for script, code, args in calls], f)
    done = tiny.run(driver, work, env=environment(), timeout=150)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    with open(f"{work}.results", encoding="utf-8") as f:
        return json.load(f)


GROUP_OF_ONE = f"""
import datetime
import torch.distributed as dist
dist.init_process_group("{'nccl' if ON_GPU else 'gloo'}", store=dist.HashStore(), rank=0, world_size=1,
                        device_id=torch.device("cuda", 0) if {ON_GPU} else None)
together.usual_wait = datetime.timedelta(seconds=60)
"""
OFFLOAD = "policy=optimizer,value=optimizer,ref=params,reward=params"
KINDS = {  # name -> (Python before the run, keys)
    "bfloat16": ("", dict(dtype="bfloat16")),
    "float16": ("", dict(dtype="float16")),
    "float32": ("", dict()),
    "float64": ("", dict(dtype="float64")),
    "offloaded": ("", dict(dtype="float64", offload=OFFLOAD)),
    "group of one": (GROUP_OF_ONE, dict(dtype="float64")),
}


@pytest.fixture(scope="module")
def runs(world, tmp_path_factory):
    """{name: (folder, what came of it)}, of KINDS; "cpu": the run in float64 on a CPU."""
    folder = str(tmp_path_factory.mktemp("runs"))
    calls = [("ppo.py", code, world.ppo(f"{folder}/{name}", **dict(device_type=DEVICE, max_iters=2) | keys))
             for name, (code, keys) in KINDS.items()]
    calls.insert(0, ("ppo.py", "", world.ppo(f"{folder}/cpu", dtype="float64", max_iters=2)))
    results = in_one_process(folder, calls)
    return {name: (f"{folder}/{name}", result) for name, result in zip(["cpu", *KINDS], results, strict=True)}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_sampler_and_training_agree(runs, dtype):
    """Promise 1, measured; and before any update the KL to the reference is 0, and the ratio 1, to the last bit."""
    folder, problem = runs[dtype]
    assert problem == ""
    records = tiny.read_log(folder)[:2]
    figure(f"gap {dtype}", max(r["policy/sampler_gap"] for r in records), "nats")
    figure(f"ratio gap {dtype}", max(r["policy/ratio_gap"] for r in records), "nats")
    assert records[0]["objective/kl"] == 0
    assert all(r["policy/ratio_gap"] == 0 for r in records)


@pytest.mark.parametrize("name", ["float64", "offloaded", "group of one"])
def test_a_run_is_that_of_the_cpu(runs, name):
    """In float64: the same texts and metrics; with nccl's collectives, and with what is offloaded."""
    assert runs["cpu"][1] == runs[name][1] == ""
    tiny.assert_same_run(runs["cpu"][0], runs[name][0], tolerance=1e-8)


@pytest.mark.skipif(not ON_GPU, reason="memory can be pinned only for a GPU")
def test_what_is_offloaded_is_pinned(world):
    from models import load
    from options.shards import here
    from tools.policies import plain

    model = load(world.reward, "reward", plain(offload="params"), torch.device(DEVICE), "scalar")
    assert all(p.is_pinned() for p in model.parameters())
    with here(model, torch.device(DEVICE)):
        assert all(p.is_cuda for p in model.parameters())
    assert all(p.is_pinned() for p in model.parameters())


# ---------------------------------------------------------------------------------------------------------------------
# the same bits again


def test_deterministic_runs_resume_bit_for_bit(world, tmp_path):
    """bfloat16: a run of four iterations, the same again, and one that begins anew after two."""
    keys = dict(device_type=DEVICE, dtype="bfloat16", deterministic=True, lr_decay="constant", value_lr_decay="constant")
    sizes = [("whole", 4), ("again", 4), ("parts", 2), ("parts", 4)]
    results = in_one_process(str(tmp_path), [
        ("ppo.py", "", world.ppo(str(tmp_path / name), max_iters=n, **keys)) for name, n in sizes])
    assert results == [""] * 4
    saved = [f"checkpoint-000004/{model}" for model in ("policy", "value_model")]
    for name in ("again", "parts"):
        tiny.assert_same_run(f"{tmp_path}/whole", f"{tmp_path}/{name}", saved)


# ---------------------------------------------------------------------------------------------------------------------
# stops, kills, too little memory


def started(args):
    return subprocess.Popen([sys.executable, os.path.join(ROOT, "ppo.py"), *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            text=True, cwd=ROOT, env=os.environ | environment() | {"OMP_NUM_THREADS": "1"})


def wait_for_log(out_dir, lines):
    """Until a run has written so many lines of its log: its kernels are running."""
    began, path = time.monotonic(), os.path.join(out_dir, "log.jsonl")
    while not os.path.exists(path) or open(path).read().count("\n") < lines:
        assert time.monotonic() - began < 60, "the run has written no log"
        time.sleep(0.02)


def test_stopped_and_killed_while_kernels_run(world, tmp_path):
    """SIGTERM: it saves and ends with 0. SIGKILL: the same command goes on from what was saved."""
    out = str(tmp_path / "out")
    keys = dict(device_type=DEVICE, eval_path="", lr_decay="constant", value_lr_decay="constant", checkpoint_interval=3)
    for what, code in ((signal.SIGTERM, 0), (signal.SIGKILL, -9)):
        done = len(tiny.read_log(out)) if code else 0
        run = started(world.ppo(out, max_iters=10**6, **keys))
        wait_for_log(out, done + 4)
        run.send_signal(what)
        said, errors = run.communicate(timeout=60)
        assert run.returncode == code, errors
    last = max(int(name[-6:]) for name in os.listdir(out) if re.fullmatch(r"checkpoint-\d+", name))
    assert last > done - 1
    run = started(world.ppo(out, max_iters=last + 2, **keys))
    said, errors = run.communicate(timeout=60)
    assert run.returncode == 0 and f"checkpoint-{last:06d}" in said, errors
    assert [r["iteration"] for r in tiny.read_log(out)] == list(range(last + 3))


def test_too_little_memory_is_one_line(world, tmp_path):
    """And the last checkpoint is good."""
    out, code = str(tmp_path / "out"), (
        "import torch, rollout\ndecode = rollout.decode\ncalls = 0\n"
        "def hungry(*args, **kwargs):\n    global calls\n    calls += 1\n"
        f"    calls == 2 and torch.empty(10**14, device={DEVICE!r})\n    return decode(*args, **kwargs)\n"
        "rollout.decode = hungry\n")
    wrapper = tiny.wrap(tmp_path / "wrapper.py", code)
    args = world.ppo(out, max_iters=2, checkpoint_interval=1, eval_path="", device_type=DEVICE)
    done = tiny.run("ppo.py", *args, wrapper=wrapper, env=environment())
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert re.search("error: out of memory .*lower micro_batch_size", done.stderr)
    done = tiny.run("ppo.py", *args, env=environment())
    assert done.returncode == 0 and "resuming from" in done.stdout, done.stderr

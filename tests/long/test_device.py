"""
What would go wrong on a GPU, found without one: tensors in two places, operations without an exact
kernel, memory that was never written. test_gpu.py has what needs a GPU.
"""
import contextlib
import json
import os
import signal
from functools import partial

import pytest
import torch
import torch.distributed as dist

import parallel
import pretend
import ranks
import tiny
from load import load
from options import decoding_graph
from prompts import micro_batch
from test_decoding_compiled import PROMPTS
from test_families import rows_of_texts, save
from tiny import answer, assert_same_run, keys_of, keys_of_system, read_jsonl, run


def checked(collective, *args, **kwargs):
    assert all(pretend.place(t) == "gpu" for t in pretend.tensors_of(args)), collective
    return collective(*args, **kwargs)


def begin(rank):
    """For Started: the run is on a pretended GPU, as the only rank of a group."""
    ranks.choose_device = lambda device: pretend.GPU
    for name in ("synchronize", "set_device"):
        setattr(torch.cuda, name, lambda *args: None)
    torch.cuda.max_memory_allocated = lambda: 7 * 2**20
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel.wire = lambda: torch.device("cuda")
    for name in ("all_reduce", "all_gather", "broadcast"):  # as nccl wants it
        setattr(dist, name, partial(checked, getattr(dist, name)))
    context = pretend.gpu()
    seen, leave = context.__enter__(), ranks.leave

    def finish():
        context.__exit__(None, None, None)
        with open("seen.json", "w") as f:
            json.dump(dict(inexact=sorted(seen.inexact), operations=len(seen.operations),
                           recorded=seen.recorded), f)
        leave()
        os._exit(0)

    ranks.leave = finish


RUNS = {
    "ppo.py": dict(ppo_epochs=1, num_minibatches=1, deterministic=True, kl_estimator="k2",
                   entropy_coef=0.1, ema_decay=0.5, head_chunk=5),
    "grpo.py": dict(max_refills=1, grad_clip=0.1, rollout_batch_size=4, gradient_checkpointing=True,
                    optim="adafactor", offload="ref=params", save_rollouts=1),
    "grpo.py, 16 bits": dict(dtype="bfloat16", importance_cap=2),
    "grpo.py, turns": dict(environment="RULES:talks", max_turns=3, max_new_tokens=12,
                           reward_functions="environment,0.5*length", save_rollouts=1),
    "sft.py": {}, "rm.py": dict(lora="2")}


@pytest.mark.parametrize("name", RUNS)
def test_all_tensors_of_a_run_are_on_the_gpu(world, tmp_path, name):
    """
    It uses no operation that has no exact kernel there, or deterministic = True would be an error;
    and it is the run of a CPU.
    """
    script = name.partition(",")[0]
    keys = keys_of(world, script, max_iters=1, **RUNS[name])
    if "environment" in keys:
        keys["environment"] = keys["environment"].replace("RULES", world.rules)
    done = run(script, tmp_path / "gpu", keys, before=begin)
    assert done.codes == [0], done
    seen = json.load(open(tmp_path / "gpu" / "seen.json"))
    assert seen["operations"] > 50 and seen["inexact"] == []
    assert bool(seen["recorded"]) == (script in ("ppo.py", "grpo.py"))
    assert read_jsonl(tmp_path / "gpu" / "out" / "log.jsonl")[0]["mem/peak_mib"] == 7
    if "dtype" in RUNS[name]:  # a graph rounds attention otherwise, and samples other tokens
        first = tiny.read_log(tmp_path / "gpu" / "out")[0]
        assert first["objective/kl"] == 0 and first["policy/sampler_gap"] < 0.02
        return
    models = ("reward_model",) if script == "rm.py" else ("policy",)
    on_cpu = tiny.well(script, tmp_path / "cpu", keys | dict(offload=""))
    assert_same_run(tmp_path / "gpu" / "out", on_cpu, models, 1e-9)


@pytest.mark.parametrize("name, inexact", [
    ("Qwen3.5 (text)", {"cumsum"}), ("LFM2 MoE", set()), ("Falcon-H1", {"cumsum"})])
def test_families_that_keep_a_state(tmp_path, name, inexact):
    """Sampled and trained as on a CPU; docs/scale.md names those that cannot be deterministic."""
    save(tmp_path, name)
    found = []
    for context in (contextlib.nullcontext(), pretend.gpu()):
        with context as seen:
            device = pretend.GPU if seen else torch.device("cpu")
            system = keys_of_system(gradient_checkpointing=True)
            policy = load(str(tmp_path), "policy", system, device, trained=True)
            policy.tokenizer.eos_ids, before = set(range(0, 260, 20)), seen and seen.waits
            rows, plain = [], policy.next_logits  # of each step: as without graphs
            policy.next_logits = lambda *given, rows=rows, plain=plain: (
                rows.append(len(given[0])) or plain(*given))
            batch = answer(policy, PROMPTS, 12, graphs=bool(seen))
            steps = int((batch["lengths"] - batch["begins"]).max())
            assert not seen or seen.waits - before < 3 * steps + 20
            tokens, mask = (x.to(device) for x in rows_of_texts())
            logprobs, entropies = policy.logprobs(tokens, mask, 0.7, 7, entropy=True)
            (logprobs.mean() + 0.3 * entropies.mean()).backward()
            gradients = [p.grad.cpu() for p in policy.parameters() if p.grad is not None]
            found.append([torch.tensor(rows), batch["tokens"].cpu(), *gradients])
    assert seen.inexact == inexact
    assert all((a - b).abs().max() < 1e-6 for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("roles", ["", "train=1,generate=1"])
def test_nccl_is_told_which_gpu_is_mine(monkeypatch, roles):
    """Rank 5 may be the first of its machine. With roles, no group is split off the first one."""
    told = {}
    monkeypatch.setattr(ranks, "choose_device", lambda device: torch.device("cuda", 3))
    monkeypatch.setattr("options.roles.begin", lambda system: ("train", ("sample", "score"), None))
    monkeypatch.setattr(dist, "init_process_group", lambda **keys: told.update(keys))
    monkeypatch.setattr(dist, "barrier", lambda device_ids: told.update(barrier=device_ids))
    monkeypatch.setenv("WORLD_SIZE", "8")
    before = [(number, signal.getsignal(number)) for number in ranks.REQUESTS]
    ranks.init(keys_of_system(roles=roles))
    for number, handler in before:
        signal.signal(number, handler)
    assert told["backend"] == "nccl" and told["barrier"] == [3]
    assert told.get("device_id") == (None if roles else torch.device("cuda", 3))


def test_nothing_reads_memory_that_was_never_written(world):
    """torch can fill all new tensors with NaN. Zeros, as in a fresh page, would hide a read."""
    policy = load(world.tied, "policy", keys_of_system(), torch.device("cpu")).requires_grad_(False)

    def go():
        out = answer(policy, [[97, 17, 80, 33, 10], [41, 2], [64, 3, 3]], 12, at_once=2)
        mb = micro_batch(out, torch.arange(3), int(out["lengths"].max()))
        return (out["tokens"], out["sampler_logprobs"],
                policy.logprobs(mb["tokens"], mb["response_mask"])[0])

    want = go()
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        assert all(torch.equal(a, b) for a, b in zip(want, go(), strict=True))
    finally:
        torch.use_deterministic_algorithms(False)


def by_graphs(name, folder, monkeypatch):
    """
    What a decoding of a family samples plainly, and by graphs, a graph for each 8 columns, on a
    pretended GPU with little memory; what was seen there; and why there are no graphs.
    """
    for key, value in dict(off="", last=None, stream=None, COLUMNS=8, MULTIPLE=4).items():
        monkeypatch.setattr(decoding_graph, key, value)
    save(folder, name)
    with pretend.gpu() as seen:
        policy = load(str(folder), "policy", keys_of_system(), pretend.GPU)
        policy.tokenizer.eos_ids = set(range(0, 260, 20))
        plain = answer(policy, PROMPTS, 30, temperature=0.8)
        seen.full, seen.waits = True, 0
        graphs = answer(policy, PROMPTS, 30, temperature=0.8, graphs=True)
    assert torch.equal(plain["tokens"], graphs["tokens"])
    assert (plain["sampler_logprobs"] - graphs["sampler_logprobs"]).abs().max() < 1e-5
    return seen, decoding_graph.off


@pytest.mark.parametrize("name", ["GPT-2", "Llama", "Falcon"])
def test_a_recorded_step_samples_the_same(name, tmp_path, monkeypatch):
    """Nothing in it waits, Python decides nothing, the graphs share memory; one finds it full."""
    seen, off = by_graphs(name, tmp_path, monkeypatch)
    assert not off and seen.recorded > 3 and seen.replays > 10
    assert len(seen.pools) == 2 and not seen.full and len(seen.graphs) == 1  # the last one
    assert seen.waits < seen.replays + 25  # one for each token, and some at the start


def test_a_step_that_waits_is_never_recorded(tmp_path, monkeypatch):
    """Dynamic rope asks for the largest position. A recording that fails harms torch's memory."""
    seen, off = by_graphs("Llama with dynamic rope", tmp_path, monkeypatch)
    assert "waits" in off and seen.recorded == 0 and not seen.no_waits

"""
What would go wrong on a GPU, found without one: tensors in two places, operations without an exact kernel, memory that was never
written, an impossible token. tests/test_gpu.py has what needs a GPU, and computes with it what is computed here.
"""
import os

import pytest
import torch

from prompts import micro_batch
import launch
from model import freeze
from scratch import from_scratch
from rollout import draw, generate

from tiny import assert_same_run, forked, one_run, read_json


# ---------------------------------------------------------------------------------------------------------------------
# the pretended GPU


PRETEND = """
import datetime, json
import torch
import torch.distributed as dist
import pretend
import launch
import together
import parallel

launch.choose_device = lambda device: "cuda:0"
for name in ("synchronize", "set_device", "reset_peak_memory_stats"):
    setattr(torch.cuda, name, lambda *args: None)
torch.cuda.max_memory_allocated = lambda: 0
torch.cuda.is_initialized, torch.cuda.get_device_name = lambda: True, lambda *args: "a pretended GPU"
# a group of one, whose tensors must all be on the GPU, as nccl wants it
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
together.usual_wait = datetime.timedelta(seconds=60)
parallel.wire = lambda: torch.device("cuda")
collective, counts = parallel.collective, []

def checked(operation, *args, **kwargs):
    assert all(pretend.place(t) == "gpu" for t in pretend.tensors_of(args, kwargs)), operation
    return collective(operation, *args, **kwargs)

parallel.collective = checked
context = pretend.gpu()
seen = context.__enter__()

def finish():
    context.__exit__(None, None, None)
    with open("seen.json", "w") as f:
        json.dump(dict(inexact=sorted(seen.inexact), operations=len(seen.operations)), f)

launch.finish = finish
"""


@pytest.fixture(scope="module")
def pretended(world, tmp_path_factory):
    odd = f"{world.rule('odd')},0.5*reward_model"
    runs = dict(
        ppo=world.ppo("out", max_iters=1, dtype="float64", deterministic=True, kl_estimator="k2", entropy_coef=0.1,
                      ema_decay=0.5, eval_path="", head_chunk=5, ppo_epochs=1),
        grpo=world.grpo("out", max_iters=1, max_refills=1, reward_functions=odd, grad_clip=0.1, rollout_batch_size=4,
                        reward_path=world.other_reward, gradient_checkpointing=True, num_iterations=1, eval_path="",
                        optim="adafactor", offload="reward=params,ref=params", cuda_graphs=False),
        sft=world.sft("out", max_iters=1), rm=world.rm("out", max_iters=1))
    cases = {name: [one_run(f"{name}.py", (args, PRETEND))] for name, args in runs.items()}
    cases["on the CPU"] = [one_run("ppo.py", runs["ppo"])]
    return forked(tmp_path_factory.mktemp("pretended"), cases)


@pytest.mark.parametrize("name", ["ppo", "grpo", "sft", "rm"])
def test_all_tensors_of_a_run_are_on_the_gpu(pretended, name):
    """And it uses no operation that has no exact kernel there, or deterministic = True would be an error."""
    result, = pretended[name]
    assert result["codes"] == [0], result["stderr"][0][-3000:]
    seen = read_json(f"{pretended.folder}/{name}/seen.json")
    assert seen["operations"] > 50 and seen["inexact"] == []
    assert result["stdout"][0].count("a pretended GPU, torch") == 1
    assert ("decoding without CUDA graphs: " in result["stdout"][0]) == (name == "ppo")  # tried, unless the key forbids it
    said = read_json(f"{pretended.out(name)}/config.json")["gpu"]
    assert (said["tf32"], said["sums_in_16_bits"], said["deterministic"]) == (False, False, name == "ppo")


def test_what_a_gpu_does_in_another_way_is_the_same(pretended):
    """Micro-batches are made beforehand, for example: in float64 the run of a CPU."""
    assert_same_run(pretended.out("ppo"), pretended.out("on the CPU"), tolerance=1e-9)


# ---------------------------------------------------------------------------------------------------------------------
# kernels


@pytest.fixture
def kernels(monkeypatch):
    """What choose_kernels sets is as before after the test."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True


def test_deterministic_is_strict(kernels):
    """With warn_only the backward of flash attention, and cuDNN's, would still add up in any order."""
    launch.choose_kernels(False)
    assert not torch.are_deterministic_algorithms_enabled() and "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    launch.choose_kernels(True)
    assert torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert torch.get_float32_matmul_precision() == "highest" and not torch.backends.cuda.cudnn_sdp_enabled()


# ---------------------------------------------------------------------------------------------------------------------
# memory that was never written


LLAMA = dict(model_type="llama", hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=64, vocab_size=97, tie_word_embeddings=False, initializer_range=0.2)


def test_nothing_reads_memory_that_was_never_written(kernels):
    """torch can fill all new tensors with NaN. Zeros, which a fresh page of a CPU has, would hide such a read."""
    policy = freeze(from_scratch(LLAMA))
    prompts = [[5, 17, 80, 33, 9], [41, 2], [64, 3, 3]]

    def run():
        out = generate(policy, prompts, 12, eos_ids=range(0, 97, 9), batch_size=2)
        tokens, mask = out["tokens"], out["attention_mask"]
        mb = micro_batch(dict(tokens=tokens, attention_mask=mask, response_mask=out["response_mask"]), torch.arange(3))
        return out["tokens"], out["sampler_logprobs"], policy.logprobs(mb["tokens"], mb["target_mask"])[0]

    want = run()
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(3).isnan().all()
    assert all(torch.equal(a, b) for a, b in zip(want, run(), strict=True))


# ---------------------------------------------------------------------------------------------------------------------
# the sampler


def parallel_cumsum(x):
    """Cumulated sums along dimension 1 in log2(n) steps, each for all entries at once, as a GPU adds up (Kogge and Stone)."""
    far = 1
    while far < x.shape[1]:
        x = torch.cat([x[:, :far], x[:, far:] + x[:, :-far]], 1)
        far *= 2
    return x


@pytest.mark.parametrize("V", [300, 32_000, 151_936])
def test_no_impossible_token_at_the_edges_of_the_cdf(V, monkeypatch):
    """The uniforms lie just before, on and just behind what impossible tokens would have of [0, 1). Sums are made in parallel."""
    plain = torch.Tensor.cumsum
    monkeypatch.setattr(torch.Tensor, "cumsum",
                        lambda x, dim: plain(x, dim) if dim == 0 or not x.is_floating_point() else parallel_cumsum(x))
    generator = torch.Generator().manual_seed(V)
    logits = (3 * torch.randn(1, V, generator=generator))
    impossible = torch.rand(V, generator=generator) < 0.5
    impossible[:3] = impossible[-3:] = True
    logits[:, impossible] = -torch.inf
    exact = logits[0].double().softmax(-1).cumsum(0)
    edges = exact[impossible.nonzero().flatten()][:: max(V // 60, 1)]
    u = torch.cat([edges - 1e-9, edges, edges + 1e-9, torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)])
    u = u.clamp(0, 1 - 2.0**-53)
    token, logprob = draw(logits.expand(len(u), V), u, 1.0)
    assert not impossible[token].any() and logprob.isfinite().all()
    # and otherwise it is the inverse CDF: of the rounding of float32 away from an edge
    before = exact[token] - logits[0].double().softmax(-1)[token]
    assert (before - 1e-6 <= u).all() and (u <= exact[token] + 1e-6).all()

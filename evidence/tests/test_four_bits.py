"""
The trunk under LoRA in 4 bits, and AdamW with states of 8 bits (skipped where bitsandbytes does not
work: pip install bitsandbytes); Adafactor, by hand.
"""
import signal
from types import SimpleNamespace

import pretend
import pytest
import torch

from load import load, probe
from model import Model
from options.four_bits import in_full, quantize
from options.trunk import layers_of
from options.optimizers import other_optimizer
from test_families import SIZES, random_model, save
from test_model import CPU
from tiny import (assert_same_run, at, keys_of, keys_of_system, read_log, read_weights, run, well)

try:
    import bitsandbytes

    linear = bitsandbytes.nn.Linear4bit(64, 64, compute_dtype=torch.float32, quant_type="nf4")
    linear.to("cpu")(torch.ones(2, 64, requires_grad=True)).sum().backward()
    trouble = ""
except Exception as e:
    trouble = f"bitsandbytes: {e}"
needs_four_bits = pytest.mark.skipif(bool(trouble), reason=trouble)


@needs_four_bits
@torch.no_grad()
def test_maps_in_four_bits_compute_with_the_rounded_matrix():
    sizes = SIZES | dict(hidden_size=64, intermediate_size=128)
    dense, *others = (Model(random_model("llama", sizes)).requires_grad_(False) for _ in range(3))
    small, in_16_bits = map(quantize, others, (CPU, CPU), (torch.float32, torch.bfloat16))
    bytes_of_both = [sum(p.numel() * p.element_size() for p in model.parameters())
                     for model in (dense, small)]
    matrices = sum(p.numel() for layer in layers_of(dense) for p in layer.parameters()
                   if p.dim() > 1)
    assert bytes_of_both[0] - bytes_of_both[1] == int(matrices * 3.5)  # 4 became half of one
    probe(small, CPU)
    for (name, p), q in zip(dense.hf.named_parameters(), small.hf.parameters(), strict=True):
        W = small.as_saved(name, q)
        assert W.shape == p.shape and (
            torch.equal(W, p) or 0 < (W - p).abs().max() < 0.2 * p.abs().max()), name
    linear, x = layers_of(small)[0].mlp.up_proj, torch.randn(3, 64)
    assert (linear(x) - x @ in_full(linear.weight).T).abs().max() < 1e-5
    with torch.autocast("cpu", torch.bfloat16):  # a map gives what autocast's do
        assert layers_of(in_16_bits)[0].mlp.up_proj(x).dtype == torch.bfloat16


@needs_four_bits
def test_a_run_in_four_bits_resumes_to_the_same_bits(world, tmp_path):
    """And saves the whole policy: the rounded trunk with its adapter."""
    save(tmp_path / "policy", "Qwen3")
    keys = keys_of(world, "grpo.py", policy_path=f"{tmp_path}/policy", quantize="4bit",
                   lora="2:4:q+v", optim="adamw8bit", dtype="float32", checkpoint_interval=1)
    whole = well("grpo.py", tmp_path / "whole", keys, before=pretend.begin)
    killed = run("grpo.py", tmp_path / "parts", keys, before=lambda rank: (
        pretend.begin(rank), at(2, signal.SIGKILL)(rank)))
    assert killed.codes == [-9], killed
    parts = well("grpo.py", tmp_path / "parts", keys, before=pretend.begin)
    assert_same_run(whole, parts)
    first = read_log(whole)[0]
    assert first["policy/ratio_gap"] == 0 == first["objective/kl"]
    assert first["policy/sampler_gap"] < 1e-4
    source, trained = (read_weights(folder) for folder in (tmp_path / "policy", f"{whole}/policy"))
    assert source.keys() == trained.keys()
    for name, t in source.items():
        gap = (trained[name] - t).abs().max()
        assert gap < 0.4 * t.abs().max() and (gap > 0) == ("_proj" in name), name
    load(f"{whole}/policy", "policy", keys_of_system(), CPU)


def adafactor_by_hand(W, gradients, lr, decay):
    """arXiv 1804.04235, algorithm 4, with the learning rate as the size of a step."""
    R, C, V = torch.zeros(W.shape[0]).double(), torch.zeros(W.shape[-1]).double(), 0
    for t, G in enumerate(gradients, 1):
        beta, square = 1 - t**-0.8, G**2 + 1e-30
        if W.dim() > 1:  # a sum a row and a column
            R, C = beta * R + (1 - beta) * square.sum(1), beta * C + (1 - beta) * square.sum(0)
            V = R[:, None] * C[None] / R.sum()
        else:
            V = beta * V + (1 - beta) * square
        U = G / V.sqrt()
        U = U / max(1, U.square().mean().sqrt())  # clipped: d = 1
        W = W - lr * decay * W - lr * U
    return W


@pytest.mark.parametrize("shape", [(5, 7), (6,)])
def test_adafactor_by_hand(shape):
    drawn = torch.Generator().manual_seed(0)
    W, *gradients = (torch.randn(shape, generator=drawn, dtype=torch.float64) for _ in range(5))
    gradients[2] *= 100  # so that its step is clipped
    p = torch.nn.Parameter(W.clone())
    system = SimpleNamespace(optim="adafactor", zero_stage="", offload="", weight_decay=0.3)
    kind, settings = other_optimizer(None, system, "policy", 1e-2, None, None)
    optimizer = kind([p], **settings)
    for p.grad in gradients:
        optimizer.step()
    assert (p - adafactor_by_hand(W, gradients, 1e-2, 0.3)).abs().max() < 1e-9

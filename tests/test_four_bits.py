"""The trunk under LoRA in 4 bits, and AdamW with states of 8 bits: skipped where bitsandbytes does not work."""
from types import SimpleNamespace

import pytest
import torch

from model import in_full
from folders import optional_package
from options.four_bits import check_four_bits, quantize
from options.optimizers import check_optimizers
from errors import BadConfig
from model import freeze
from load import probe
from scratch import from_scratch
from tools import dry_run

import tiny


def trouble():
    """Why matrices in 4 bits do not work here, or ""."""
    try:
        import bitsandbytes

        linear = bitsandbytes.nn.Linear4bit(64, 64, compute_dtype=torch.float32, quant_type="nf4").to("cpu")
        linear(torch.ones(2, 64, requires_grad=True)).sum().backward()
    except Exception as e:
        return f"bitsandbytes: {e}"
    return ""


needs_four_bits = pytest.mark.skipif(bool(trouble()), reason=trouble() or "it works")


def llama():
    return from_scratch(dict(model_type="llama", vocab_size=100, hidden_size=64, num_hidden_layers=2, num_attention_heads=2,
                             num_key_value_heads=1, intermediate_size=128, max_position_embeddings=64, bos_token_id=None), seed=1)


@needs_four_bits
def test_maps_in_four_bits_compute_with_the_rounded_matrix():
    torch.manual_seed(0)
    dense, small = freeze(llama()), freeze(llama())
    before = sum(p.numel() * p.element_size() for p in small.parameters())
    quantize(small, torch.device("cpu"), torch.float32)
    after = sum(p.numel() * p.element_size() for p in small.parameters())
    in_layers = sum(p.numel() for layer in dense.layers() for p in layer.parameters() if p.dim() == 2)
    assert before - after == int(in_layers * 3.5)  # 4 bytes became half of one
    probe(small)
    for (name, p), q in zip(dense.hf.named_parameters(), small.hf.parameters(), strict=True):
        W = in_full(q)
        assert W.shape == p.shape and (torch.equal(W, p) or (W - p).abs().max() < 0.2 * p.abs().max()), name
    linear = small.layers()[0].mlp.up_proj
    x = torch.randn(3, 64)
    torch.testing.assert_close(linear(x), x @ in_full(linear.weight).T)
    with torch.autocast("cpu", torch.bfloat16):  # a map gives what autocast's do, or keys and values would have 32 bits
        rounded = freeze(llama())
        quantize(rounded, torch.device("cpu"), torch.bfloat16)
        assert rounded.layers()[0].mlp.up_proj(x).dtype == torch.bfloat16


@pytest.mark.parametrize("said, keys", [
    ("type --lora=16", {}), ("cannot be split", dict(lora="4", zero_stage="3")),
    ("cannot be split", dict(lora="4", generate_tp=2)), ("no kernels for float64", dict(lora="4", dtype="float64"))])
def test_keys_that_do_not_go_together(said, keys):
    system = SimpleNamespace(**dict(lora="", zero_stage="", generate_tp=1, dtype="float32") | keys)
    with pytest.raises(BadConfig, match=said):
        check_four_bits(system, ("policy",))
    system = SimpleNamespace(zero_stage="", offload="optimizer", optim="adamw8bit")
    with pytest.raises(BadConfig, match="adamw8bit"):
        check_optimizers(system, ("policy",))


@needs_four_bits
def test_what_is_counted_is_what_is_held():
    """tools/memory.py counts without bitsandbytes: matrices of even and odd sizes, states of small and large parameters."""
    def held(tensors):
        return sum(t.numel() * t.element_size() for t in tensors)

    for shape in (64, 64), (63, 129), (300, 517):
        linear = torch.nn.Linear(*shape[::-1], bias=False)
        settings = dict(requires_grad=False, quant_type="nf4", module=linear)
        real = optional_package("bitsandbytes", "here").nn.Params4bit(linear.weight.data, **settings).to("cpu")
        state = real.quant_state
        tensors = real.data, state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code
        assert dry_run.Params4bit(linear.weight, **settings).numel() == held(tensors)
        parameters = [torch.nn.Parameter(torch.randn(shape)), torch.nn.Parameter(torch.randn(7))]
        sizes = []
        for package in optional_package("bitsandbytes", "here"), dry_run.BITSANDBYTES:
            optimizer = package.optim.AdamW8bit(parameters, lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0)
            for p in parameters:
                p.grad = torch.randn_like(p)
            optimizer.step()
            sizes.append(held(t for states in optimizer.state.values() for key, t in states.items()
                              if torch.is_tensor(t) and "qmap" not in str(key)))  # all parameters share the two tables
        assert sizes[0] == sizes[1]


@needs_four_bits
def test_a_run_in_four_bits_resumes_to_the_same_bits(world, tmp_path):
    tiny.add_qwen(world)
    keys = dict(policy_path=world.qwen, quantize="4bit", lora="2", optim="adamw8bit", checkpoint_interval=1, timeout=300)
    for out, stops in ("whole", [4]), ("parts", [2, 4]):
        for iters in stops:
            done = tiny.run("grpo.py", *world.grpo(f"{tmp_path}/{out}", max_iters=iters, **keys))
            assert done.returncode == 0, done.stderr
    assert tiny.assert_same_run(f"{tmp_path}/whole", f"{tmp_path}/parts")[0]["policy/sampler_gap"] < 1e-4

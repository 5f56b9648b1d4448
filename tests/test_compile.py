"""The key compile: compiled layers compute what the plain ones do, in any number of tokens, and what is lacking is said."""
import os
import shutil
import sysconfig

import pytest
import torch

import tiny
from engine.adapters import Adapted
from engine.checkpoint import save_model
from engine.pretrained import from_scratch
from engine.placement import compile_layers, lacking_to_compile
from engine.tokenizers import load_tokenizer
from errors import BadConfig
from model import compiled_parts
from rollout import generate

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(bool(lacking_to_compile(CPU)), reason=lacking_to_compile(CPU) or "-")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """tiny's, but policy and reward model are Llamas of two layers."""
    folder = str(tmp_path_factory.mktemp("world"))
    world = tiny.build(folder)
    tokenizer = load_tokenizer(world.tokenizer)
    config = dict(model_type="llama", hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                  intermediate_size=24, max_position_embeddings=64, tie_word_embeddings=False, vocab_size=tokenizer.vocab_size,
                  bos_token_id=None, eos_token_id=tokenizer.eos_id, pad_token_id=tokenizer.pad_id)
    for name, head in (("policy", "lm"), ("reward", "scalar")):
        save_model(f"{folder}/{name}", from_scratch(config, head, seed=5), tokenizer)
    world.config = config
    return world


def computed(model, rows, T):
    """Logits without gradients, logits with them, and the gradients of a loss."""
    tokens = torch.randint(200, (rows, T), generator=torch.Generator().manual_seed(rows * T))
    with torch.no_grad():
        read = model(tokens)
    trained = model(tokens)
    model.zero_grad()
    trained.square().mean().backward()
    return [read, trained.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def draw(model):
    """Fill a model with numbers, so that nothing of it is 0."""
    for i, p in enumerate(model.parameters()):
        with torch.no_grad():
            p.normal_(generator=torch.Generator().manual_seed(i)).mul_(0.3)


@pytest.mark.parametrize("rank", [0, 2])
def test_layers_are_traced_once_and_compute_the_same(world, monkeypatch, rank):
    """
    Whatever the number of tokens, even if at first it is the width, and of documents of one length. Here torch.compile
    reads the code and makes graphs, forward and backward; to make kernels of these would take half a minute.
    """
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    compiled_parts.cache_clear()
    whole = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *args, **keys: whole(*args, backend="aot_eager", **keys))
    plain, compiled = (from_scratch(world.config, seed=5, dtype=torch.float64) for _ in range(2))
    trunk = compiled
    if rank:
        plain, compiled = Adapted(plain, rank=rank), Adapted(compiled, rank=rank)
    draw(plain), draw(compiled)
    compile_layers(trunk, True, CPU)
    counters.clear()
    texts = [generate(model, [[1, 2, 3], [4]], 6, eos_ids=[7]) for model in (plain, compiled)]
    assert torch.equal(texts[0]["sampler_logprobs"], texts[1]["sampler_logprobs"]) and not counters["stats"]
    for i, (rows, T) in enumerate([(2, 8), (3, 11), (1, 50), (2, 9)]):
        compiled.recompute(i == 3)
        for a, b in zip(computed(plain, rows, T), computed(compiled, rows, T), strict=True):
            assert (a - b).abs().max() <= 1e-12 * max(1, a.abs().max())
        # two parts, with gradients and without; the first layer has no gradient to give to a frozen embedding
        assert counters["stats"]["unique_graphs"] == (6 if rank else 4), (rows, T)
    assert not counters["graph_break"]
    nothing = torch.zeros(0, 5, dtype=torch.int64)
    assert compiled(nothing).shape == plain(nothing).shape
    compiled_parts.cache_clear()


@needs_compiler
def test_a_run_with_compile_is_the_run_without(world):
    """It takes half a minute of a core."""
    runs = [("ppo.py", *world.ppo(f"{world.root}/{name}", dtype="float64", max_iters=1, micro_batch_size=4, eval_size=0, **keys))
            for name, keys in (("plain", {}), ("compiled", dict(compile=True)))]
    env = dict(TORCHINDUCTOR_CACHE_DIR=f"{world.root}/kernels")
    done = tiny.run_all([(run, dict(env=env, timeout=600)) for run in runs])
    assert [one.returncode for one in done] == [0, 0], done[1].stderr
    logs = (tiny.read_log(f"{world.root}/{name}") for name in ("plain", "compiled"))
    plain, compiled = ([tiny.measured(record) for record in log] for log in logs)
    assert tiny.alike(plain, compiled, 1e-9) and plain[0]["policy/ratio_gap"] == 0
    for name in ("policy", "value_model"):
        assert tiny.distance(f"{world.root}/plain/{name}", f"{world.root}/compiled/{name}") < 1e-9
    assert os.listdir(f"{world.root}/kernels")  # the key has reached the layers


def test_what_compiling_lacks_is_said(world, monkeypatch):
    model = from_scratch(world.config)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BadConfig, match="^compile = True needs a C.. compiler, and there is no no-such-compiler [^\n]*$"):
        compile_layers(model, True, CPU)
    compile_layers(model, False, CPU)  # off needs nothing
    assert not any(layer.compiled for layer in model.layers)
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: "/nowhere")
    assert lacking_to_compile(CPU).endswith("there is no /nowhere/Python.h")

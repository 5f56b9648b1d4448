"""The key compile: a compiled trunk computes what the plain one does, in any number of tokens."""
import os
import shutil

import pytest
import torch

import tiny
from scratch import from_scratch
from rollout import generate

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(not shutil.which(os.environ.get("CXX", "g++")), reason="there is no C++ compiler")


CONFIG = dict(model_type="llama", hidden_size=16, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
              intermediate_size=24, max_position_embeddings=64, tie_word_embeddings=False, initializer_range=0.25, vocab_size=200)


def computed(model, rows, T):
    """States without gradients, log-probs with them, and the gradients of a loss."""
    tokens = torch.randint(200, (rows, T), generator=torch.Generator().manual_seed(rows * T))
    with torch.no_grad():
        read = model.states(tokens)
    logprobs, _ = model.logprobs(tokens, torch.arange(T).expand(rows, T) > 1)
    model.zero_grad()
    logprobs.square().mean().backward()
    return [read, logprobs.detach(), *(p.grad.clone() for p in model.parameters())]


@needs_compiler
def test_a_trunk_is_traced_once_and_computes_the_same(monkeypatch):
    """
    Whatever the number of rows and tokens, even if at first it is the width, with layers that are computed again; and decoding
    does not use it. Here torch.compile reads the code and makes a graph, which is run as it is; to make kernels of it would
    take half a minute.
    """
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    whole = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *args, **keys: whole(*args, backend="eager", **keys))
    plain, compiled = (from_scratch(CONFIG, seed=5, dtype=torch.float64) for _ in range(2))
    compiled.recompute()
    compiled.compile_trunk()
    assert [n for n, _ in compiled.named_parameters()] == [n for n, _ in plain.named_parameters()]
    counters.clear()
    texts = [generate(model, [[1, 2, 3], [4]], 6, eos_ids=[7]) for model in (plain, compiled)]
    assert torch.equal(texts[0]["sampler_logprobs"], texts[1]["sampler_logprobs"]) and not counters["stats"]
    graphs = []
    for rows, T in [(2, 16), (3, 11), (2, 50)]:
        for a, b in zip(computed(plain, rows, T), computed(compiled, rows, T), strict=True):
            assert (a - b).abs().max() <= 1e-12 * max(1, a.abs().max())
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] > 0 and len(set(graphs)) == 1, graphs
    assert not counters["graph_break"]


@needs_compiler
@pytest.mark.campaign  # a minute and more: it makes kernels
def test_a_run_with_compile_is_the_run_without(world, tmp_path):
    """In float64, for GPT-2 computes everything in it; of one model, for each takes ten seconds."""
    keys = dict(dtype="float64", max_iters=1, micro_batch_size=4, eval_path="", kl_coef=0.0,
                reward_functions=world.rule("letters"))
    runs = [("grpo.py", *world.grpo(f"{tmp_path}/{name}", **keys | more))
            for name, more in (("plain", {}), ("compiled", dict(compile=True)))]
    env = dict(TORCHINDUCTOR_CACHE_DIR=f"{tmp_path}/kernels")
    done = [tiny.run(*run, env=env) for run in runs]
    assert [one.returncode for one in done] == [0, 0], done[1].stderr
    log = tiny.assert_same_run(f"{tmp_path}/plain", f"{tmp_path}/compiled", tolerance=1e-9)
    assert log[0]["policy/ratio_gap"] == 0
    assert os.listdir(f"{tmp_path}/kernels")  # the key has reached the trunk

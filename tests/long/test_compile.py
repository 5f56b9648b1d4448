"""The key compile: a compiled trunk computes what the plain one does, in any number of tokens."""
import os
import shutil

import pytest
import torch

from load import load
from test_families import save
from test_model import CPU
from tiny import answer, in_a_fork, keys_of_system


def computed(model, rows, T):
    """States without gradients, log-probs with them, and the gradients of a loss."""
    tokens = torch.randint(200, (rows, T), generator=torch.Generator().manual_seed(rows * T))
    with torch.no_grad():
        read = model.states(tokens)
    logprobs, _ = model.logprobs(tokens, torch.arange(T).expand(rows, T) > 1)
    model.zero_grad()
    logprobs.square().mean().backward()
    return [read, logprobs.detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.skipif(not shutil.which(os.environ.get("CXX", "g++")), reason="no C++ compiler")
def test_a_trunk_is_traced_once_and_computes_the_same(tmp_path, monkeypatch):
    """In a fork: torch.compile leaves operators behind that MemTracker, in other tests, refuses."""
    in_a_fork(compare, tmp_path, monkeypatch)


def compare(tmp_path, monkeypatch):
    """
    Whatever the number of rows and tokens, even if at first it is the width, with layers that are
    computed again; and decoding does not use it. Here torch.compile reads the code and makes a
    graph, which is run as it is; to make kernels of it would take half a minute.
    """
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    whole = torch.compile
    monkeypatch.setattr(torch, "compile",
                        lambda *args, **keys: whole(*args, backend="eager", **keys))
    save(tmp_path, "Llama")
    plain, compiled = (load(str(tmp_path), "policy", keys_of_system(
        dtype="float64", compile=on, gradient_checkpointing=on), CPU, trained=True)
        for on in (False, True))
    assert [n for n, _ in compiled.named_parameters()] == [n for n, _ in plain.named_parameters()]
    counters.clear()
    texts = [answer(model, [[1, 2, 3], [4]], 6) for model in (plain, compiled)]
    assert torch.equal(texts[0]["sampler_logprobs"], texts[1]["sampler_logprobs"])
    assert not counters["stats"]
    graphs = []
    for rows, T in [(2, 32), (3, 11)]:
        for a, b in zip(computed(plain, rows, T), computed(compiled, rows, T), strict=True):
            assert (a - b).abs().max() <= 1e-12 * max(1, a.abs().max())
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] > 0 and len(set(graphs)) == 1 and not counters["graph_break"], graphs

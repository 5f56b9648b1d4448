"""
options/decoding_graph.py with the key compile: the compiled step of a decoding samples what the
plain one does. A CPU has no CUDA graphs: here each step is computed anew, by the same code.
torch.compile reads the code and makes a graph, which is run as it is: to make kernels of it would
take half a minute. And a compiled trunk; and the cache of a decoding.
"""
import os
import shutil

import pytest
import torch
from transformers import DynamicCache, Gemma3TextConfig, GPT2Config
from transformers.cache_utils import DynamicSlidingWindowLayer

from load import autocast, load
from model import SPARE, decoding_cache, roomy_layer
from options import decoding_graph
from rollout import decoding_copy
from test_families import save
from test_model import CPU
from tiny import answer, in_a_fork, keys_of_system

# prompts of several lengths, one of them twice; rows leave at different steps
PROMPTS = [[5, 17, 80, 33, 9], [41, 2, 2, 60, 7, 7, 23, 90, 11], [64], [3, 50, 3, 8], [64], [5, 6]]


def begin(backend):
    """As in a new process; torch.compile with this backend, and a graph for every 8 columns."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    torch.compile = lambda *args, **keys: whole(*args, backend=backend, **keys)
    decoding_graph.off = decoding_graph.uncompiled = ""
    decoding_graph.said, decoding_graph.COLUMNS, decoding_graph.MULTIPLE = False, 8, 4
    return counters["stats"]


whole = torch.compile


def sampled(policy, compiled, prompts=PROMPTS, R=20, **keys):
    """A batch, by compiled steps or by plain ones."""
    return answer(policy, prompts, R, graphs="compiled" if compiled else False, **keys)


def wrong(what):
    """A backend whose graphs change their outputs."""
    def backend(graph, inputs):
        def run(*args):
            return [what(x) if torch.is_tensor(x) else x for x in graph(*args)]

        return run

    return backend


def fails(graph, inputs):
    raise OSError("no compiler")


ONE = dict(num_hidden_layers=1)
CASES = [  # a family, its layers (else two), a backend, why it is not used
    # each computes something in its own way: positions, heads, experts, compressed keys. And
    # layers; the second one of DeepSeek is of another kind
    ("GPT-2", {}, "eager", ""), ("OPT", ONE, "eager", ""), ("Falcon", ONE, "eager", ""),
    ("Mixtral", ONE, "eager", ""), ("DeepSeek-V3", {}, "eager", ""),
    ("OPT", ONE, fails, "no compiler"),
    ("OPT", ONE, wrong(lambda x: x if x.shape[-1] != 264 else 1.1 * x), "logits differ"),
    ("OPT", ONE, wrong(lambda x: x if x.shape[-1] != 264 else x * torch.nan), "logits differ"),
    ("OPT", ONE, wrong(lambda x: x if x.dtype != torch.int64 or x.dim() != 1 else x ^ 1),
     "other tokens")]


def test_families_sample_the_same_and_a_wrong_step_is_never_used(tmp_path, capfd):
    """
    One graph for all columns, and all rows that go on, and nothing is left uncompiled; or a line
    says why, the tokens are the plain ones, and the next decoding does not try it again.
    """
    def check():
        for n, (name, layers, backend, why) in enumerate(CASES):
            stats = begin(backend)
            save(tmp_path / str(n), name, **layers)
            policy = load(f"{tmp_path}/{n}", "policy", keys_of_system(), CPU)
            policy.tokenizer.eos_ids = set(range(0, 260, 9))
            plain, compiled = (sampled(policy, on, temperature=0.8) for on in (False, True))
            gap = plain["sampler_logprobs"] - compiled["sampler_logprobs"]
            assert torch.equal(plain["tokens"], compiled["tokens"]) and gap.abs().max() < 1e-5, name
            assert why in decoding_graph.uncompiled and not decoding_graph.off
            if why:
                sampled(policy, True)
            assert bool(why) == bool(decoding_graph.uncompiled) and stats["unique_graphs"] <= 1
            assert why or stats["unique_graphs"] == 1, name

    in_a_fork(check)
    lines = [line for line in capfd.readouterr().out.splitlines()
             if "decoding without torch.compile" in line]
    for line, why in zip(lines, [why for *_, why in CASES if why], strict=True):
        assert why in line


def test_it_is_compiled_once(tmp_path, capfd):
    """
    For other batches, lengths and weights, and for each iteration's copy in 16 bits; not for a
    single row, and greedy decoding. And it says so once.
    """
    def check():
        stats = begin("eager")
        save(tmp_path, "Llama", **ONE)
        system = keys_of_system(dtype="bfloat16")
        policy = load(str(tmp_path), "policy", system, CPU, trained=True)
        graphs = []
        for prompts, R, temperature in [(PROMPTS, 9, 0.8), (PROMPTS * 3, 20, 0.8),
                                        (PROMPTS[1:4], 40, 0.8), (PROMPTS, 9, 0)]:
            with autocast(system, CPU), decoding_copy(policy, system, CPU) as decoder:
                assert decoder is not policy
                sampled(decoder, True, prompts, R, temperature=temperature)
            assert not decoding_graph.uncompiled  # the first step was alike
            graphs.append(stats["unique_graphs"])
            with torch.no_grad():
                for p in policy.parameters():
                    p.mul_(1.01)
        assert graphs == [1, 1, 1, 2], graphs

    in_a_fork(check)
    assert capfd.readouterr().out.count("compiled the decoding step in") == 1


# --------------------------------------------------------------------------------------------------
# a compiled trunk, in any number of tokens


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
def test_a_trunk_is_traced_once_and_computes_the_same(tmp_path):
    """
    Whatever the number of rows and tokens, even if at first it is the width, with layers that are
    computed again; and decoding does not use it. In a fork: torch.compile leaves operators behind
    that MemTracker, in other tests, refuses.
    """
    def check():
        save(tmp_path, "Llama")
        stats = begin("eager")
        plain, compiled = (load(str(tmp_path), "policy", keys_of_system(
            dtype="float64", compile=on, gradient_checkpointing=on), CPU, trained=True)
            for on in (False, True))
        stats.clear()
        names = [[n for n, _ in model.named_parameters()] for model in (plain, compiled)]
        texts = [answer(model, [[1, 2, 3], [4]], 6) for model in (plain, compiled)]
        assert torch.equal(texts[0]["sampler_logprobs"], texts[1]["sampler_logprobs"])
        assert names[0] == names[1] and not stats
        graphs = []
        for rows, T in [(2, 32), (3, 11)]:
            for a, b in zip(computed(plain, rows, T), computed(compiled, rows, T), strict=True):
                assert (a - b).abs().max() <= 1e-12 * max(1, a.abs().max())
            graphs.append(stats["unique_graphs"])
        breaks = torch._dynamo.utils.counters["graph_break"]
        assert graphs[0] > 0 and len(set(graphs)) == 1 and not breaks, (graphs, breaks)

    in_a_fork(check)


# --------------------------------------------------------------------------------------------------
# the cache of a decoding: the columns of transformers' own, and none is copied


def test_columns_and_rows_are_those_of_transformers():
    config, drawn = GPT2Config(n_layer=1), torch.Generator().manual_seed(1)
    ours, theirs = decoding_cache(config), DynamicCache(config=config)
    lengths = [5, *[1] * (SPARE - 1), 3, *[1] * 70]  # room for all of the first, then not
    select = {0: [2, 0, 0, 1], SPARE - 2: [3, 1], SPARE: [1, 0, 1], SPARE + 9: [2]}
    rows, moved = 3, 0
    for step, k in enumerate(lengths):
        new = [torch.randn(rows, 2, k, 4, generator=drawn) for _ in range(2)]
        place = ours.layers[0].buffers[0].data_ptr() if step else None
        for a, b in zip(ours.update(*new, 0), theirs.update(*new, 0), strict=True):
            assert torch.equal(a, b)
        assert ours.get_seq_length() == theirs.get_seq_length() == sum(lengths[:step + 1])
        moved += ours.layers[0].buffers[0].data_ptr() != place
        if step in select:
            rows = len(select[step])
            for cache in (ours, theirs):
                cache.batch_select_indices(torch.tensor(select[step]))
    assert moved == 3  # at the first step, and where the buffers were full


def test_layers_that_see_less_are_left_as_they_are():
    kinds = ["full_attention", "sliding_attention"]
    config = Gemma3TextConfig(num_hidden_layers=2, layer_types=kinds)
    assert [type(x) for x in decoding_cache(config).layers] == [
        roomy_layer(), DynamicSlidingWindowLayer]

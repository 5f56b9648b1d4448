"""
options/decoding_graph.py with the key compile: the compiled step of a decoding samples what the
plain one does. A CPU has no CUDA graphs: here each step is computed anew, by the same code.
torch.compile reads the code and makes a graph, which is run as it is.
"""

import torch

from load import autocast, load
from options import decoding_graph
from rollout import decoding_copy
from test_families import FAMILIES, random_model, written
from test_model import CPU
from tiny import answer, in_a_fork, keys_of_system

# prompts of several lengths, one of them twice; rows leave at different steps
PROMPTS = [[5, 17, 80, 33, 9], [41, 2, 2, 60, 7, 7, 23, 90, 11], [64], [3, 50, 3, 8], [64], [5, 6]]
# each computes something in its own way: positions, heads, experts, compressed keys. And layers;
# the second one of DeepSeek is of another kind
LAYERS = {"GPT-2": 2, "OPT": 1, "Falcon": 1, "Mixtral": 1, "DeepSeek-V3": 2}


def save(folder, name, layers=2):
    """A family's random model, of so many layers."""
    kind, settings = FAMILIES[name]
    written(folder, random_model(kind, settings | {
        "n_layer" if name == "GPT-2" else "num_hidden_layers": layers}))


def compare(name, folder, backend, temperature=1.0, layers=2):
    """
    A decoding of a family, plain and compiled: (whether the tokens are the same, how far the
    log-probs are apart, the graphs that were compiled, why it went on without).
    """
    from torch._dynamo.utils import counters

    begin(backend)
    save(folder, name, layers)
    policy = load(folder, "policy", keys_of_system(), CPU)
    policy.tokenizer.eos_ids = set(range(0, 260, 9))
    plain, compiled = (sampled(policy, on, temperature=temperature) for on in (False, True))
    gap = (plain["sampler_logprobs"] - compiled["sampler_logprobs"]).abs().max().item()
    said = decoding_graph.uncompiled + decoding_graph.off
    return torch.equal(plain["tokens"], compiled["tokens"]), gap, counters["stats"], said


def begin(backend):
    """As in a new process; torch.compile with this backend, and a graph for every 8 columns."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    torch.compile = lambda *args, **keys: whole(*args, backend=backend, **keys)
    decoding_graph.off = decoding_graph.uncompiled = ""
    decoding_graph.said, decoding_graph.COLUMNS, decoding_graph.MULTIPLE = False, 8, 4


whole = torch.compile


def sampled(policy, compiled, prompts=PROMPTS, R=20, **keys):
    """A batch, by compiled steps or by plain ones."""
    return answer(policy, prompts, R, graphs="compiled" if compiled else False, **keys)


def test_families_sample_the_same(tmp_path):
    """One graph for all columns, and all rows that go on; nothing is left uncompiled."""
    def check():
        for name, layers in LAYERS.items():
            same, gap, stats, said = compare(name, f"{tmp_path}/{name}", "eager", 0.8, layers)
            assert same and gap < 1e-5 and stats["unique_graphs"] == 1 and not said, (
                name, gap, stats, said)

    in_a_fork(check)


def test_it_is_compiled_once(tmp_path, capfd):
    """
    For other batches, lengths and weights, and for each iteration's copy in 16 bits; not for a
    single row, and greedy decoding. And it says so once.
    """
    def check():
        from torch._dynamo.utils import counters

        begin("eager")
        save(tmp_path, "Llama", layers=1)
        system = keys_of_system(dtype="bfloat16")
        policy = load(str(tmp_path), "policy", system, CPU, trained=True)
        graphs = []
        for prompts, R, temperature in [(PROMPTS, 9, 0.8), (PROMPTS * 3, 20, 0.8),
                                        (PROMPTS[1:4], 40, 0.8), (PROMPTS, 9, 0)]:
            with autocast(system, CPU), decoding_copy(policy, system, CPU) as decoder:
                assert decoder is not policy
                sampled(decoder, True, prompts, R, temperature=temperature)
            assert not decoding_graph.uncompiled  # the first step was alike
            graphs.append(counters["stats"]["unique_graphs"])
            with torch.no_grad():
                for p in policy.parameters():
                    p.mul_(1.01)
        assert graphs == [1, 1, 1, 2], graphs

    in_a_fork(check)
    assert capfd.readouterr().out.count("compiled the decoding step in") == 1


def wrong(what):
    """A backend whose graphs change their float outputs, or their whole numbers."""
    def backend(graph, inputs):
        def run(*args):
            return [what(x) if torch.is_tensor(x) else x for x in graph(*args)]

        return run

    return backend


def fails(graph, inputs):
    raise OSError("no compiler")


WRONG = {  # a backend, and the reason that is printed
    "no compiler": (fails, "no compiler"),
    "logits": (wrong(lambda x: x if x.shape[-1] != 264 else 1.1 * x), "logits differ"),
    "tokens": (wrong(lambda x: x if x.dtype != torch.int64 or x.dim() != 1 else x ^ 1),
               "other tokens"),
    "nan": (wrong(lambda x: x if x.shape[-1] != 264 else x * torch.nan), "logits differ")}


def test_a_wrong_step_is_never_used(tmp_path, capfd):
    """One line; the tokens are the plain ones; the next decoding does not try it again."""
    def check():
        for name, (backend, reason) in WRONG.items():
            same, gap, stats, said = compare("GPT-2", f"{tmp_path}/{name}", backend, layers=1)
            assert same and gap < 1e-5 and reason in said and not decoding_graph.off, (name, said)
            sampled(load(f"{tmp_path}/{name}", "policy", keys_of_system(), CPU), True)
            assert stats["unique_graphs"] <= 1, name

    in_a_fork(check)
    lines = [line for line in capfd.readouterr().out.splitlines()
             if "decoding without torch.compile" in line]
    assert len(lines) == len(WRONG)
    assert all(reason in line for line, (_, reason) in zip(lines, WRONG.values(), strict=True))

"""
engine/tensor_parallel.py: ranks that decode together say what one rank says, token for token, and each holds its part of the
policy. The one rank is rollout.generate on the whole model, in float64.
"""
import dataclasses
import json
import os
import re

import pytest
import transformers

from engine.hf_config import parse_config
from engine.tensor_parallel import check_split, part_config, places
from errors import BadConfig

import tiny
from families import VARIANTS, make
from tiny import forked, one_run

SIZES = (2, 4)
# Each rank samples with its part of every family, and once more with an adapter. A first run, on one rank, samples with the
# whole. What differs from that is written.
WORKER = """
import json, os, sys
import torch
from engine import launch, placement
from engine.adapters import Adapted
from engine.pretrained import from_pretrained
from engine.tensor_parallel import neighbours
from model import freeze
from rollout import generate

folder, max_iters = sys.argv[1], 0
rank, size, device = launch.init("cpu", 300)
found = {}
prompts = [[5, 9, 11], [7], [5, 9, 11], [96, 3, 0, 8, 2, 48, 49, 24, 25], [73, 72]]
settings = dict(temperature=0.8, eos_ids=[3], pad_id=96, vocab_size=95, seed=3)

for variant in json.loads(sys.argv[2]):
    policy = freeze(from_pretrained(f"{folder}/{variant}", dtype="float64"))
    adapted = Adapted(policy, rank=3, seed=1)
    generator = torch.Generator().manual_seed(2)
    for p in adapted.parameters():
        p.data.normal_(0, 0.1, generator=generator)
    # all at once, and two at a time, where ended rows give way to others
    for name, model, batch_size in ((variant, policy, 2), (f"{variant}, adapted", adapted, 0)):
        if size == 1:
            torch.save(generate(model, prompts, 6, batch_size=batch_size, **settings), f"{folder}/{name}.pt")
            continue
        whole = torch.load(f"{folder}/{name}.pt")
        part = placement.decoding_copy(model, None, device, neighbours(size))
        got = generate(part, prompts, 6, batch_size=batch_size, **settings)
        found[name] = dict(equal=all(torch.equal(got[k], whole[k]) for k in whole if k != "sampler_logprobs"),
                           gap=(got["sampler_logprobs"] - whole["sampler_logprobs"]).abs().max().item(),
                           moved=whole["response_mask"].sum().item(), texts=got["tokens"].tolist(),
                           held={n: p.numel() for n, p in placement.trunk_of(part).named_parameters()},
                           whole={n: p.numel() for n, p in policy.named_parameters()})
json.dump(found, open(f"{folder}/{size}-{rank}.json", "w"))
launch.finish()
"""


@pytest.fixture(scope="module")
def sampled(tmp_path_factory):
    """{size: [what each rank has found]}."""
    folder = tmp_path_factory.mktemp("split")
    for variant in VARIANTS:
        make(variant).save_pretrained(folder / variant)
    (folder / "worker.py").write_text(WORKER)
    args = [str(folder), json.dumps(list(VARIANTS))]
    runs = [one_run(str(folder / "worker.py"), *[args] * n) for n in (1, *SIZES)]
    for result in forked(str(folder), {"ranks": runs})["ranks"]:
        assert set(result["codes"]) == {0}, result["stderr"]
    return {n: [json.loads((folder / f"{n}-{rank}.json").read_text()) for rank in range(n)] for n in SIZES}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("size", SIZES)
def test_ranks_together_say_what_one_says(sampled, size, variant):
    for name in (variant, f"{variant}, adapted"):
        each = [found[name] for found in sampled[size]]
        assert all(one["equal"] and one["gap"] < 1e-9 and one["moved"] > 5 for one in each), each
        assert all(one["texts"] == each[0]["texts"] for one in each)
    # an adapter changes something, or this shows nothing
    assert sampled[size][0][variant]["texts"] != sampled[size][0][f"{variant}, adapted"]["texts"]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("size", SIZES)
def test_every_number_is_somewhere_and_matrices_are_split(sampled, size, variant):
    """Of each matrix the parts add up to the whole; of heads of keys and values that are fewer than the ranks, to a multiple."""
    each, c = [found[variant] for found in sampled[size]], config_of(variant)
    copies = max(size // c.n_kv_heads, 1)
    for name, numbers in each[0]["whole"].items():
        module, kind = name.split(".")[-2:]
        width = c.qk_norm == "width" and module in ("q_norm", "k_norm")
        rows, columns = ("embed", "lm_head", "q", "k", "v", "gate", "up"), ("o", "down")
        split = module in rows or module in columns and kind == "weight" or width
        times = (copies if module in ("k", "v", "k_norm") else 1) if split else size
        assert sum(one["held"][name] for one in each) == numbers * times, name


# ---------------------------------------------------------------------------------------------------------------------
# by hand


def config_of(variant):
    family, keys = VARIANTS[variant]
    return parse_config(getattr(transformers, f"{family}Config")(**keys).to_dict())


def test_places_by_hand():
    """4 heads of 8, 2 heads of keys and values, a width of 56, and 97 tokens, which nothing divides."""
    c = config_of("llama3-gqa-tied")
    assert places(c, 1, 2) == dict(q=slice(16, 32), o=slice(16, 32), k=slice(8, 16), v=slice(8, 16), gate=slice(28, 56),
                                   up=slice(28, 56), down=slice(28, 56), embed=slice(48, 97), lm_head=slice(48, 97))
    # of 4 ranks, 0 and 1 have the first head of keys
    assert [places(c, rank, 4)["k"] for rank in range(4)] == [slice(0, 8)] * 2 + [slice(8, 16)] * 2
    assert [places(c, rank, 4)["q"] for rank in range(4)] == [slice(8 * rank, 8 * rank + 8) for rank in range(4)]
    part = part_config(c, 3, 4)
    assert (part.n_heads, part.n_kv_heads, part.head_dim, part.d_ff, part.vocab_size, part.d_model) == (1, 1, 8, 14, 25, 32)


@pytest.mark.parametrize("n, variant, said", [
    (3, "gpt2", "generate_tp = 3: the policy has 4 attention heads, which so many ranks cannot share; possible are 1, 2, 4$"),
    (8, "llama3-gqa-tied", "has 4 attention heads and 2 heads of keys and values, which so many .*; possible are 1, 2, 4$")])
def test_heads_that_ranks_cannot_share_are_one_line(n, variant, said):
    with pytest.raises(BadConfig, match=said):
        check_split(config_of(variant), n)
    # 4 divides the heads, but not those of keys, and is not a multiple of them
    six = dataclasses.replace(config_of(variant), n_heads=12, n_kv_heads=6)
    with pytest.raises(BadConfig, match="possible are 1, 2, 3, 6, 12$"):
        check_split(six, 4)


# ---------------------------------------------------------------------------------------------------------------------
# whole runs

EXACT = dict(dtype="float64", max_iters=2, rollout_batch_size=3, eval_interval=1, eval_size=3, timeout=200)
SAME = {  # name -> (script, ranks, keys): each ends as the same script on one rank. The policy has 4 heads, 2 of keys and values
    "ppo, 2 of 2": ("ppo.py", 2, dict(generate_tp=2)),
    "ppo, 2 of 4, shards": ("ppo.py", 4, dict(generate_tp=2, zero_stage="3")),
    "grpo, 4 of 4, shards": ("grpo.py", 4, dict(generate_tp=4, zero_stage="2", rollout_batch_size=0)),
    "grpo, 2 of 4": ("grpo.py", 4, dict(generate_tp=2)),
}
AT_TOKEN = """
import os, signal
import parallel, rollout
sample, tokens = rollout.sample, 0
def sampled(*args):
    global tokens
    tokens += parallel.phase == "iteration 1, rollout"
    if tokens == 5:
        ACTION
    return sample(*args)
rollout.sample = sampled
"""
TERM, DIE = (f"os.kill(os.getpid(), signal.{name})" for name in ("SIGTERM", "SIGKILL"))
BAD = {  # name -> (ranks, keys, what is said)
    "not a divisor": (2, dict(generate_tp=3), "generate_tp = 3 does not divide the 2 ranks of this run"),
    "one rank": (1, dict(generate_tp=2), "generate_tp = 2 does not divide the 1 rank of this run"),
    "heads": (4, dict(generate_tp=4), "generate_tp = 4: the policy has 2 attention heads, .* possible are 1, 2$"),
    "graphs": (2, dict(generate_tp=2, cuda_graphs=True), "cuda_graphs with generate_tp: .*leave one of them out$"),
    "zero": (1, dict(generate_tp=0), r"generate_tp = 0 .*is out of range: \[1\.\.1024\]"),
}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    world = tiny.build(str(tmp_path_factory.mktemp("world")))
    tiny.add_qwen(world)
    return world


@pytest.fixture(scope="module")
def ended(world, tmp_path_factory):
    """The folder, and {name: [what came of each run of it]}."""
    def run(script, ranks, code="", **keys):
        arguments = getattr(world, script[:-3])("out", **keys)
        return one_run(script, *[(arguments, code if rank == 1 else "") for rank in range(ranks)])

    exact = EXACT | dict(policy_path=world.qwen, value_init="policy")
    cases = {f"{script}, one": [run(script, 1, **{k: v for k, v in exact.items() if script == "ppo.py" or k != "value_init"})]
             for script in ("ppo.py", "grpo.py")}
    for name, (script, ranks, keys) in SAME.items():
        keys = exact | keys
        if script == "grpo.py":
            del keys["value_init"]
        cases[name] = [run(script, ranks, **keys)]
    both = EXACT | dict(generate_tp=2, eval_interval=100, eval_size=1)
    cases["through"] = [run("grpo.py", 2, **both)]
    cases["stopped"] = [run("grpo.py", 2, AT_TOKEN.replace("ACTION", TERM), **both), run("grpo.py", 2, **both)]
    cases["killed"] = [run("grpo.py", 2, AT_TOKEN.replace("ACTION", DIE), **both)]
    cases["adapter, 16 bits"] = [run("ppo.py", 2, **both | dict(dtype="bfloat16", lora="4", zero_stage="3", max_iters=1))]
    for name, (ranks, keys, _) in BAD.items():
        cases[name] = [run("grpo.py", ranks, **keys)]
    folder = str(tmp_path_factory.mktemp("runs"))
    return folder, forked(folder, cases, at_once=4)


@pytest.mark.parametrize("name", SAME)
def test_a_run_ends_as_on_one_rank(ended, name):
    folder, results = ended
    assert set(results[name][0]["codes"]) == {0}, results[name][0]["stderr"]
    one, ours = (f"{folder}/{x}/out" for x in (f"{SAME[name][0]}, one", name))
    logs = [[tiny.measured(record) for record in tiny.read_log(out)] for out in (one, ours)]
    assert [r.get("objective/texts") for r in logs[0]] == [r.get("objective/texts") for r in logs[1]]
    assert tiny.alike(*logs, tolerance=1e-9)
    assert tiny.distance(f"{one}/policy", f"{ours}/policy") < 1e-9


def test_a_stop_within_a_response_loses_nothing(ended):
    folder, results = ended
    stopped, again = results["stopped"]
    assert stopped["codes"] == again["codes"] == [0, 0], results["stopped"]
    assert "stopped before the update of iteration 1" in stopped["stdout"][0] and "resuming from" in again["stdout"][0]
    assert tiny.distance(f"{folder}/stopped/out/policy", f"{folder}/through/out/policy") == 0


def test_a_rank_that_is_lost_within_a_response_is_one_line(ended):
    result, = ended[1]["killed"]
    assert result["codes"] == [1, -9], result
    said = [line for line in result["stderr"][0].splitlines() if "waitForInput" not in line]
    assert len(said) == 1 and "iteration 1, rollout: lost touch with the other ranks" in said[0], said


def test_an_adapter_in_16_bits_samples_what_is_trained(ended):
    """The run itself compares the log-probs of sampler and training forward."""
    result, = ended[1]["adapter, 16 bits"]
    assert result["codes"] == [0, 0], result
    assert 0 < tiny.read_log(f"{ended[0]}/adapter, 16 bits/out")[0]["policy/sampler_gap"] < 0.02


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_nothing_is_written(ended, name):
    result, (ranks, _, said) = ended[1][name][0], BAD[name]
    assert result["codes"] == [2] * ranks, result
    lines = [line for line in result["stderr"][0].splitlines() if "waitForInput" not in line]
    assert len(lines) == 1 and re.search(said, lines[0]), lines
    assert not os.path.exists(f"{ended[0]}/{name}/out")


def test_under_torchrun(world, tmp_path):
    keys = dict(generate_tp=2, max_iters=1, zero_stage="3")
    calls = [("ppo.py", world.ppo(tmp_path / "ppo", **keys)), ("grpo.py", world.grpo(tmp_path / "grpo", **keys))]
    result = tiny.run_in_one(tmp_path, "both", calls, ranks=2)
    assert result.returncode == 0, result.stderr
    for name in ("ppo", "grpo"):
        assert os.path.exists(tmp_path / name / "policy")

"""
vLLM as the sampler. Everything but vLLM itself is tested with a stand-in (stand_in/vllm.py), which
samples with our own model: a run with it must be the run without it. What needs the real one is
skipped without it.
"""
import os
import re
import sys
from types import SimpleNamespace

import pytest

from tiny import assert_one_line, assert_same_run, keys_of, read_jsonl, read_log, run, well

STAND_IN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "stand_in")


def stands_in(wrong="", rank=0):
    """For `before`: the stand-in takes vLLM's place, and does something wrong on this rank."""
    def before(mine):
        sys.path.insert(0, STAND_IN)
        import vllm

        import options.vllm

        plain = options.vllm.load
        options.vllm.load = lambda **given: plain(**given | dict(sleeps=True))  # as on a GPU
        options.vllm.subprocess = SimpleNamespace(Popen=vllm.Forked, DEVNULL=None)
        vllm.wrong = wrong if mine == rank else ""

    return before


CASES = {  # name: script, ranks, keys; all in float32, which is vLLM's
    "adapters": ("ppo.py", 1, dict(lora="2", value_init="shared")),
    "shards, stop strings": ("grpo.py", 2, dict(
        zero_stage="policy=3", stop_strings="b", num_minibatches=1)),
    "roles": ("grpo.py", 2, dict(roles="train=1,generate=1", staleness=1, importance_cap=2))}


@pytest.mark.parametrize("name", CASES)
def test_a_run_with_another_sampler_is_the_same_run(world, tmp_path, name):
    script, ranks, more = CASES[name]
    keys = keys_of(world, script, dtype="float32", max_iters=2, **more)
    own = well(script, tmp_path / "own", keys, ranks=ranks)
    other = well(script, tmp_path, keys | dict(sampler="vllm"), ranks=ranks, before=stands_in())
    # its log-probs are rounded in other groups of rows
    assert_same_run(own, other, tolerance=1e-4)
    assert all(a["objective/texts"] == b["objective/texts"] for a, b in zip(
        read_log(own)[:-1], read_log(other)[:-1], strict=True))


def test_several_turns(world, tmp_path):
    """Each turn has a noise of its own; the policy reads what the environment has said."""
    keys = keys_of(world, "grpo.py", environment=f"{world.rules}:talks", max_turns=3,
                   max_new_tokens=14, save_rollouts=1, dtype="float32", max_iters=1, sampler="vllm")
    out = well("grpo.py", tmp_path, keys, before=stands_in())
    texts = [[m["content"] for m in row["messages"]] for row in read_jsonl(f"{out}/rollouts.jsonl")]
    assert all(said[1::2] == ["x", "y"][:len(said) // 2] for said in texts)
    assert read_log(out)[0]["policy/sampler_gap"] < 1e-4
    assert len({said[2] for said in texts if len(said) > 2}) > 1


BAD = {  # keys, ranks, what the last rank's stand-in does wrong, what is said, the exit code
    "no cap": (dict(staleness=1), 1, "", "--importance_cap=2", 2),
    "unknown": ({}, 1, "unknown", r"not supported; type --sampler=own", 2),
    "forgets": ({}, 2, "forgets", "not taken all weights .*; type --sampler=own", 2),
    "dies": (dict(roles="train=1,generate=1"), 2, "dies 3", "vLLM has ended, with exit code 7", 1),
    "hangs": (dict(timeout=4, reward_timeout=3), 1, "hangs 2", "not answered for timeout = 4", 1),
    "no room": ({}, 1, "cuts 2", "no room for a prompt of .*; raise vllm_cache", 1)}


@pytest.mark.parametrize("name", BAD)
def test_what_vllm_does_wrong_ends_a_run_in_a_line(world, tmp_path, name):
    more, ranks, wrong, said, code = BAD[name]
    keys = keys_of(world, "grpo.py", **dict(dtype="float32", sampler="vllm", eval_path="") | more)
    result = run("grpo.py", tmp_path, keys, ranks=ranks, before=stands_in(wrong, ranks - 1))
    lines = [line for text in result.err for line in text.splitlines()]
    assert all(line.startswith("grpo.py: error") for line in lines), result
    assert any(re.search(said, line) for line in lines) and code in result.codes, result
    assert 0 not in result.codes and len(lines) <= ranks, result


@pytest.mark.parametrize("python, said", [("", "install it"), ("/no/python", "/no/python")])
def test_a_missing_vllm_is_one_line(world, tmp_path, python, said):
    """Not installed; or VLLM_PYTHON names an interpreter that is not there."""
    def before(rank):
        if python:
            os.environ["VLLM_PYTHON"] = python
        else:
            stands_in()(rank)
            sys.modules["vllm"] = None  # an import of it fails

    keys = keys_of(world, "grpo.py", dtype="float32", sampler="vllm", eval_path="")
    assert_one_line(run("grpo.py", tmp_path, keys, before=before), "grpo.py", said)

"""
The reference policy, where it is not the policy that a run starts from: another folder's
(ref_path), or the policy of some iterations ago (ref_reset_iters).
"""
import json
import os

import pytest

from engine.checkpoint import save_model
from engine.tokenizers import load_tokenizer
from model import from_scratch

import tiny
from tiny import forked, measured, one_run

SETTINGS = dict(dtype="float64", eval_interval=1, max_iters=5, checkpoint_interval=1,
                keep_checkpoints=9)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """{name: (out_dir, results)}; the second stage starts from a policy of the first."""
    folder = str(tmp_path_factory.mktemp("reference"))
    world = tiny.build(folder)
    tokenizer = load_tokenizer(world.policy)
    config = dict(model_type="gpt2", n_embd=32, n_layer=2, n_head=2, n_positions=32,
                  vocab_size=tokenizer.vocab_size + 4, bos_token_id=None, eos_token_id=258,
                  pad_token_id=259)
    save_model(f"{folder}/deeper", from_scratch(config), tokenizer)
    config |= dict(n_layer=1, n_inner=64, tie_word_embeddings=False)
    save_model(f"{folder}/swapped", from_scratch(config),
               load_tokenizer(f"{folder}/other_tokenizer"))

    first = {"first": [one_run("ppo.py", world.ppo("out", **SETTINGS | dict(max_iters=2)))]}
    done = forked(folder, first)
    moved = f"{folder}/first/out/policy"
    went_on = dict(policy_path=moved, ref_path=world.policy) | SETTINGS
    cases = {
        "ppo on": [one_run("ppo.py", world.ppo("out", **went_on))],
        "grpo on": [one_run("grpo.py", world.grpo("out", **went_on))],
        "deeper": [one_run("ppo.py", world.ppo("out", ref_path=f"{folder}/deeper"))],
        "swapped": [one_run("ppo.py", world.ppo("out", ref_path=f"{folder}/swapped"))],
        "no kl": [one_run("grpo.py", world.grpo("out", ref_path=world.policy, kl_coef=0.0))],
        "no kl reset": [one_run("ppo.py", world.ppo("out", ref_reset_iters=1, kl_coef=0.0))],
        "dropped": [one_run("ppo.py", world.ppo("out", **went_on | dict(max_iters=1))),
                    one_run("ppo.py", world.ppo("out", **went_on | dict(max_iters=1, ref_path="")))],
        "half reset": [one_run("ppo.py", world.ppo("out", dtype="bfloat16", ref_reset_iters=1))]}
    for script, make in (("ppo.py", world.ppo), ("grpo.py", world.grpo)):
        arguments = make("out", ref_reset_iters=2, **SETTINGS)
        cases[f"{script} reset"] = [one_run(script, arguments)]
        for at in (2, 3):  # at a reset, and behind one
            cases[f"{script} stopped {at}"] = [one_run(script, (arguments, tiny.stops(at))),
                                               one_run(script, arguments)]
    done |= forked(folder, {f"_{name}": case for name, case in cases.items()})
    return {name.removeprefix("_"): (f"{folder}/{name}/out", results)
            for name, results in done.items()}


def succeeded(run):
    out, results = run
    assert [set(result["codes"]) for result in results] == [{0}] * len(results), results
    return out


@pytest.mark.parametrize("name", ["ppo on", "grpo on"])
def test_a_run_goes_on_against_the_original_reference(runs, name):
    """What the first run measured last, the second one measures first: same policy, same noise."""
    before = tiny.read_log(succeeded(runs["first"]))[-1]["eval/kl"]
    record = tiny.read_log(succeeded(runs[name]))[0]
    assert abs(before) > 1e-3 and record["eval/kl"] == pytest.approx(before, abs=1e-9)
    assert record["objective/kl"] != 0


@pytest.mark.parametrize("script", ["ppo.py", "grpo.py"])
def test_the_reference_becomes_the_policy(runs, script):
    out = succeeded(runs[f"{script} reset"])
    records = tiny.read_log(out)
    assert [abs(r["eval/kl"]) < 1e-9 for r in records] == [True, False, True, False, True, False]
    assert [abs(r["objective/kl"]) < 1e-9 for r in records[:-1]] == [True, False, True, False, True]
    for checkpoint, is_of in ((2, 2), (3, 2), (4, 4), (5, 4)):
        reference, policy = (f"{out}/checkpoint-00000{i}/{model}"
                             for i, model in ((checkpoint, "ref_policy"), (is_of, "policy")))
        assert tiny.distance(reference, policy) == 0


@pytest.mark.parametrize("at", [2, 3])
@pytest.mark.parametrize("script", ["ppo.py", "grpo.py"])
def test_a_run_that_resets_resumes_to_the_same_bits(runs, script, at):
    whole, resumed = succeeded(runs[f"{script} reset"]), succeeded(runs[f"{script} stopped {at}"])
    assert f"stopped before the update of iteration {at}" in str(runs[f"{script} stopped {at}"][1])
    logs = [[measured(r) for r in tiny.read_log(out)] for out in (whole, resumed)]
    assert logs[0] == logs[1]
    assert tiny.distance(f"{whole}/policy", f"{resumed}/policy") == 0


def test_in_16_bits_too(runs):
    records = tiny.read_log(succeeded(runs["half reset"]))
    assert len(records) == 4 and all(abs(r["objective/kl"]) < 0.05 for r in records[:-1])


@pytest.mark.parametrize("name, said", [
    ("deeper", "is not of the policy's architecture"),
    ("swapped", "has another tokenizer than the policy"),
    ("no kl", "with kl_coef = 0: there is no reference then; type --kl_coef=0.05"),
    ("no kl reset", "ref_reset_iters = 1 with kl_coef = 0"),
    ("dropped", "holds a run with ref_path = ")])
def test_bad_keys_get_one_line(runs, name, said):
    result = runs[name][1][-1]
    lines = [line for line in result["stderr"][0].splitlines() if "error" in line]
    assert result["codes"] == [2] and len(lines) == 1 and said in lines[0], result


def test_the_checkpoint_says_that_it_has_a_reference(runs):
    for name, there in (("ppo.py reset", True), ("ppo on", False)):
        folder = f"{runs[name][0]}/checkpoint-000005"
        with open(f"{folder}/state.json", encoding="utf-8") as f:
            assert json.load(f)["ref_is_saved"] == there == os.path.isdir(f"{folder}/ref_policy")

"""The reference policy, where it is not the policy that a run starts from: another folder's (ref_path)."""
import pytest

from engine.checkpoint import save_model
from engine.tokenizers import load_tokenizer
from model import from_scratch

import tiny
from tiny import forked, one_run

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
        "dropped": [one_run("ppo.py", world.ppo("out", **went_on | dict(max_iters=1))),
                    one_run("ppo.py", world.ppo("out", **went_on | dict(max_iters=1, ref_path="")))]}
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


@pytest.mark.parametrize("name, said", [
    ("deeper", "is not of the policy's architecture"),
    ("swapped", "has another tokenizer than the policy"),
    ("no kl", "with kl_coef = 0: there is no reference then; type --kl_coef=0.05"),
    ("dropped", "holds a run with ref_path = ")])
def test_bad_keys_get_one_line(runs, name, said):
    result = runs[name][1][-1]
    lines = [line for line in result["stderr"][0].splitlines() if "error" in line]
    assert result["codes"] == [2] and len(lines) == 1 and said in lines[0], result

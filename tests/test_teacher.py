"""
rm.py --teacher: what is refused, and that another teacher is another run. Whole runs, with two teachers of which one reads the
text in its own tokens, on pairs and on single responses, are worked out in test_by_hand.py.
"""
import re
import shutil

import pytest
from safetensors.torch import load_file, save_file

import tiny
from tiny import forked, jsonl, one_run


def refused(world, folder):
    """{name: (keys, what the one line says)}"""
    return {
        "missing": (dict(teacher="out/nothing"), "out/nothing: no such model folder"),
        "zeros": (dict(teacher=f"{folder}/all_zeros"), "all_zeros gives all of .*pairs_train.jsonl the same score"),
        "smooth": (dict(teacher=world.reward, label_smoothing=0.1), "label_smoothing"),
        "nothing": (dict(teacher=world.reward, score_coef=0, preference_coef=0), "--score_coef=1"),
        "mixed": (dict(teacher=world.reward, train_path=f"{folder}/mixed.jsonl"), "mixed.jsonl has 1 pairs and 1 single"),
        "too long": (dict(teacher=world.short_reward, train_path=f"{folder}/long.jsonl", val_path=""),
                     "long.jsonl, row 2: it has 1[0-9] tokens, and the model's context is 10; "),
        "another": (dict(teacher=world.reward, max_iters=2), "teacher"),  # than that of the run in this folder
    }


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """(world, folder, {name: results})"""
    folder, world = str(tmp_path_factory.mktemp("taught")), tiny.build(str(tmp_path_factory.mktemp("world")))
    pair = dict(prompt="1=", chosen="2", rejected="3")
    jsonl(f"{folder}/mixed.jsonl", [pair, dict(prompt="1=", completion="2")])
    jsonl(f"{folder}/long.jsonl", [pair, pair | dict(rejected="123456789")])
    shutil.copytree(world.reward, f"{folder}/all_zeros")
    tensors = load_file(f"{folder}/all_zeros/model.safetensors")
    save_file(tensors | {"score.weight": 0 * tensors["score.weight"]}, f"{folder}/all_zeros/model.safetensors",
              metadata={"format": "pt"})
    cases = {name: [one_run("rm.py", world.rm("out", **keys))] for name, (keys, _) in refused(world, folder).items()}
    # with LoRA, by a teacher in shards, so that one run shows both
    first = world.rm("out", teacher=world.other_reward, max_iters=1, lora="2", zero_stage="3")
    cases["another"].insert(0, one_run("rm.py", first, first))
    return world, folder, forked(folder, cases)


@pytest.mark.parametrize("name", refused(tiny.World(""), ""))
def test_what_cannot_be_taught_is_refused_in_one_line(done, name):
    world, folder, results = done
    *first, result = results[name]
    assert all(set(run["codes"]) == {0} for run in first), first
    assert result["codes"] == [2], result
    assert re.fullmatch(rf"rm\.py: error: [^\n]*{refused(world, folder)[name][1]}[^\n]*\n", result["stderr"][0]), result["stderr"]

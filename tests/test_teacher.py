"""
rm.py --teacher: a small reward model learns what a large one says. by_hand.py works out whole runs; here it is shown that a
teacher is read as others read it, that shards change nothing, and what is refused.
"""
import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

import tiny
from engine.tokenizers import load_tokenizer
from tiny import forked, jsonl, one_run

STEADY = dict(dtype="float64", lr_decay="constant", eval_interval=1, max_iters=3)
SAVES = """
import torch, loss
said = []
centred = loss.centred
def kept(x):
    said.append(centred(x))
    torch.save(said, f"said-{RANK}.pt")
    return said[-1]
loss.centred = kept
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return tiny.build(str(tmp_path_factory.mktemp("world")))


def refused(world, folder):
    """{name: (keys, what the one line says)}"""
    mixed, long = f"{folder}/mixed.jsonl", f"{folder}/long.jsonl"
    return {
        "missing": (dict(teacher="out/nothing"), "out/nothing: no such model folder"),
        "zeros": (dict(teacher=f"{folder}/all_zeros"),
                  "the teacher .*/all_zeros gives all of .*pairs_train.jsonl the same score"),
        "smooth": (dict(teacher=world.reward, label_smoothing=0.1), "centre_coef and use_confidence .* leave them out"),
        "nothing": (dict(teacher=world.reward, score_coef=0, preference_coef=0), "leave nothing to learn .*--score_coef=1"),
        "mixed": (dict(teacher=world.reward, train_path=mixed),
                  "mixed.jsonl has 1 pairs and 1 single responses; .* one of them alone"),
        "too long": (dict(teacher=world.short_reward, train_path=long, val_path=""),
                     "long.jsonl, row 2: it has 1[0-9] tokens, and the model's context is 10; "),
    }


@pytest.fixture(scope="module")
def done(world, tmp_path_factory):
    """(folder, {name: result})"""
    folder = str(tmp_path_factory.mktemp("taught"))
    pair = dict(prompt="1=", chosen="2", rejected="3")
    jsonl(f"{folder}/mixed.jsonl", [pair, dict(prompt="1=", completion="2")])
    jsonl(f"{folder}/long.jsonl", [pair, pair | dict(rejected="123456789")])
    shutil.copytree(world.reward, f"{folder}/all_zeros")
    tensors = load_file(f"{folder}/all_zeros/model.safetensors")
    save_file(tensors | {"score.weight": torch.zeros_like(tensors["score.weight"])}, f"{folder}/all_zeros/model.safetensors",
              metadata={"format": "pt"})
    two = dict(teacher=f"{world.reward},{world.other_reward}", **STEADY)
    alone = dict(teacher=world.second_reward, train_path=world.sft_train, val_path="", **STEADY)

    def run(ranks=1, code="", **keys):
        return one_run("rm.py", *[(world.rm("out", **keys), code)] * ranks)

    cases = {
        "whole": [run(code=SAVES, **two)],
        "two ranks": [run(2, code=SAVES, zero_stage="3", micro_batch_size=2, **two)],
        "other": [run(**two | dict(max_iters=1)), run(**two | dict(teacher=world.reward))],
        "adapter": [run(**two | dict(lora="2"))],
        "responses": [run(**alone)],
    }
    cases |= {name: [run(**keys)] for name, (keys, _) in refused(world, folder).items()}
    return folder, forked(folder, cases)


def test_runs_end(done):
    for name in ("whole", "two ranks", "adapter", "responses"):
        for result in done[1][name]:
            assert set(result["codes"]) == {0}, (name, result["stderr"])


@pytest.mark.parametrize("name", refused(tiny.World(""), ""))
def test_what_cannot_be_taught_is_refused_in_one_line(done, world, name):
    (result,), (_, said) = done[1][name], refused(world, done[0])[name]
    assert result["codes"] == [2], result
    assert re.fullmatch(rf"rm\.py: error: [^\n]*{said}[^\n]*\n", result["stderr"][0]), result["stderr"]


def test_shards_and_ranks_change_nothing_and_another_teacher_is_another_run(done):
    folder = done[0]
    assert tiny.distance(f"{folder}/whole/out/reward_model", f"{folder}/two ranks/out/reward_model") < 1e-9
    _, other = done[1]["other"]
    assert other["codes"] == [2] and "teacher" in other["stderr"][0], other["stderr"]


def test_teachers_say_what_they_say_in_transformers(done, world):
    """Each one's own scores of the text in its own tokens, less their mean; the two markers are another token to each."""
    said = torch.load(f"{done[0]}/whole/said-0.pt")  # of each teacher: training pairs, held-out pairs
    assert len(said) == 4
    for teacher, name in enumerate(("reward", "other_reward")):
        path = getattr(world, name)
        model, tokenizer = AutoModelForSequenceClassification.from_pretrained(path).eval(), load_tokenizer(path)
        for kind, ours in zip(("train", "val"), said[2 * teacher:], strict=False):
            with open(f"{world.root}/pairs_{kind}.jsonl", encoding="utf-8") as f:
                rows = [json.loads(line) for line in f]
            theirs = []
            for row in rows:
                texts = [row["prompt"] + row[field] for field in ("chosen", "rejected")]
                ids = [found + [tokenizer.eos_id] for found in tokenizer.encode_texts(texts)]
                with torch.no_grad():  # one text, without padding
                    states = [model.transformer(torch.tensor([x])).last_hidden_state[0, -1] for x in ids]
                theirs.append([(model.score.weight[0] @ s).item() for s in states])
            theirs = torch.tensor(theirs)
            assert (ours - (theirs - theirs.mean())).abs().max() < 1e-4 < 0.01 < ours.std()
    on_ranks = [torch.load(f"{done[0]}/two ranks/said-{rank}.pt") for rank in range(2)]
    assert all((a - b).abs().max() < 1e-12 for told in on_ranks for a, b in zip(told, said, strict=True))

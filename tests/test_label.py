"""data/label.py: its pairs against a loop written by hand, in both orders; what it prints; and what it refuses."""
import json
import math
import os
import re
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.tokenizers import load_tokenizer
from model import load_model
from rollout import generate, response_uniforms, texts_of

import tiny
from tiny import arguments, forked, one_run

SEED, SAMPLES, R = 3, 16, 8


def keys_of(world, **keys):
    return arguments(dict(
        policy_path=world.policy, judge_path=world.judge, judge_template=f"{world.root}/compare.txt", out="labels.jsonl",
        prompts_path=world.rl_train, samples=SAMPLES, max_new_tokens=R, batch_size=80, micro_batch_size=7, seed=SEED,
        dtype="float64", device_type="cpu") | keys)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    world = tiny.build(str(tmp_path_factory.mktemp("world")))
    for name, text in (("compare", "answers: a b\n{prompt}{first}|{second}"), ("grade", "answers: A B\n{prompt}{response}?"),
                       ("half", "{prompt}{first}")):
        with open(f"{world.root}/{name}.txt", "w") as f:
            f.write(text)
    shutil.copytree(world.policy, f"{world.root}/talks")
    with open(f"{world.root}/talks/chat_template.jinja", "w") as f:
        f.write("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    chats = [dict(prompt=[dict(role="user", content=row["prompt"])]) for row in read(world.rl_train)]
    tiny.jsonl(f"{world.root}/chats.jsonl", chats)
    return world


@pytest.fixture(scope="module")
def runs(world, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("runs"))
    cases = dict(
        compare={}, again={}, other_batches=dict(batch_size=48, micro_batch_size=64), parts=dict(pairs=5, held_out=2),
        grade=dict(judge_template=f"{world.root}/grade.txt"), sure=dict(min_confidence=0.8),
        chain=dict(min_confidence=0.5),
        half=dict(judge_template=f"{world.root}/half.txt"),
        nothing=dict(min_confidence=1.0), folder=dict(out="/proc/labels.jsonl"), long=dict(judge_template="compare"))
    jobs = {name: [one_run("data/label.py", keys_of(world, **keys))] for name, keys in cases.items()}
    labels = f"{folder}/chain/labels.jsonl"
    tiny.jsonl(f"{folder}/own_val.jsonl", [dict(prompt="1+1=")])
    os.symlink(world.judge, f"{folder}/linked")
    own = dict(link=dict(out=f"{folder}/linked/config.json"),
               own=dict(prompts_path="../own_val.jsonl", out="../own.jsonl", held_out=1))
    for name, keys in own.items():
        jobs[name] = [one_run("data/label.py", keys_of(world, **keys))]
    jobs["two"] = [one_run("data/label.py", *[keys_of(world)] * 2)]
    jobs["chain"].append(one_run("rm.py", world.rm("rm", train_path=labels, val_path=labels, max_iters=1)))
    talks, labels = f"{world.root}/talks", f"{folder}/chat/labels.jsonl"
    jobs["chat"] = [one_run("data/label.py", keys_of(world, policy_path=talks, prompts_path=f"{world.root}/chats.jsonl")),
                    one_run("rm.py", world.rm("rm", init_from=talks, train_path=labels, val_path="", max_iters=1))]
    tiny.jsonl(f"{folder}/alike.jsonl", [dict(prompt="1+1=", chosen="2", rejected=text) for text in "2312"])
    jobs["alike"] = [one_run("rm.py", world.rm("rm", train_path="../alike.jsonl", max_iters=1))]
    return folder, forked(folder, jobs)


def read(path):
    with open(path, encoding="utf-8") as f:
        return [json.loads(line) for line in f]


@pytest.fixture(scope="module")
@torch.no_grad()
def by_hand(world):
    """[(prompt, one answer, the other one, log-odds that the first is better: one first, other first)], and the answers' ends."""
    tokenizer, theirs = load_tokenizer(world.policy), load_tokenizer(world.judge)
    policy = load_model(world.policy, dtype=torch.float64)
    judge = AutoModelForCausalLM.from_pretrained(world.judge, dtype=torch.float64).eval()

    def odds(text, a, b):
        logits = judge(torch.tensor([theirs.encode_texts([text])[0]])).logits[0, -1]
        return (logits[ord(a)] - logits[ord(b)]).item()

    found, left_out = [], dict(ended=0, same=0)
    for i, row in enumerate(read(world.rl_train)):
        answers = []
        for sample in range(SAMPLES):
            prompt = tokenizer.encode_texts([row["prompt"]])
            batch = generate(policy, prompt, R, 1.0, tokenizer.eos_ids, tokenizer.pad_id,
                             tokenizer.vocab_size, response_uniforms(SEED, "label", 0, [i], R, [sample]))
            text = texts_of([(row, prompt[0])], batch, tokenizer)["completions"][0]
            answers.append((text, batch["finished"].item()))
        for (one, ended), (other, too) in zip(answers[::2], answers[1::2], strict=True):
            if not (ended and too and one.strip() and other.strip()):
                left_out["ended"] += 1
            elif one == other:
                left_out["same"] += 1
            else:
                found.append((row["prompt"], one, other, odds(f"{row['prompt']}{one}|{other}", "a", "b"),
                              odds(f"{row['prompt']}{other}|{one}", "a", "b"), odds(f"{row['prompt']}{one}?", "A", "B"),
                              odds(f"{row['prompt']}{other}?", "A", "B")))
    return found, left_out


def test_pairs_by_hand(runs, by_hand):
    """Kept is what is said in both orders; the margin is the mean of both."""
    found, left_out = by_hand
    want, unsure = [], 0
    for prompt, one, other, f, b, _, _ in found:
        if f > 0 > b or f < 0 < b:
            chosen, rejected = (one, other) if f > 0 else (other, one)
            want.append(dict(prompt=prompt, chosen=chosen, rejected=rejected, confidence=1 / (1 + math.exp(-abs(f - b) / 2))))
        else:
            unsure += 1
    got, result = read(f"{runs[0]}/compare/labels.jsonl"), runs[1]["compare"][0]
    assert result["codes"] == [0], result
    assert len(got) == len(want) > 5 and unsure > 5 and left_out["ended"] > 5
    for a, b in zip(got, want, strict=True):
        assert a | dict(confidence=0) == b | dict(confidence=0) and a["confidence"] == pytest.approx(b["confidence"], abs=1e-9)
    said = result["stdout"][0]
    first = sum(f > 0 and b > 0 for _, _, _, f, b, _, _ in found)
    second = sum(f < 0 and b < 0 for _, _, _, f, b, _, _ in found)
    assert (f"left out: cut off or empty {left_out['ended']}, the same text {left_out['same']}, "
            f"no answer both times {unsure},") in said
    n = len(found)
    assert (f"it names the same answer in {len(want) / n:.1%} of {n} pairs, the first place in {first / n:.1%}, the second in "
            f"{second / n:.1%}\n") in said


def test_graded_pairs_by_hand(runs, by_hand):
    """A judge that sees one answer at a time has no order: the better grade wins."""
    got = read(f"{runs[0]}/grade/labels.jsonl")
    assert len(got) == len(by_hand[0]) and "place" not in runs[1]["grade"][0]["stdout"][0]
    for row, (prompt, one, other, _, _, a, b) in zip(got, by_hand[0], strict=True):
        chosen, rejected = (one, other) if a > b else (other, one)
        assert (row["prompt"], row["chosen"], row["rejected"]) == (prompt, chosen, rejected)
        assert row["confidence"] == pytest.approx(1 / (1 + math.exp(-abs(a - b))), abs=1e-9)


def test_the_same_command_writes_the_same(runs):
    """Bit for bit; with other batches to rounding; and parts of it."""
    folder, _ = runs
    whole = read(f"{folder}/compare/labels.jsonl")
    assert read(f"{folder}/again/labels.jsonl") == whole
    other = read(f"{folder}/other_batches/labels.jsonl")
    assert [row["chosen"] for row in other] == [row["chosen"] for row in whole]
    assert read(f"{folder}/parts/labels.jsonl") == whole[:5] and read(f"{folder}/parts/labels_val.jsonl") == whole[5:7]
    sure = [row for row in whole if row["confidence"] >= 0.8]
    assert read(f"{folder}/sure/labels.jsonl") == sure and 0 < len(sure) < len(whole)


@pytest.mark.parametrize("name", ["chain", "chat"])
def test_rm_reads_them(name, runs):
    assert [result["codes"] for result in runs[1][name]] == [[0], [0]], runs[1][name]
    if name == "chat":  # what a chat is asked is what the same text is asked
        plain, chats = (read(f"{runs[0]}/{each}/labels.jsonl") for each in ("compare", "chat"))
        assert [row["chosen"] for row in plain] == [row["chosen"][0]["content"] for row in chats]


def test_pairs_of_one_text_are_counted(runs):
    result, = runs[1]["alike"]
    assert result["codes"] == [0] and "warning: in 2 pairs " in result["stdout"][0], result


REFUSED = {
    "two": "torchrun", "half": "{second}", "folder": "/proc/labels.jsonl", "nothing": "only 0 pairs are left",
    "own": "'../own_val.jsonl'", "link": "linked/config.json", "long": "row 1: "}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_one_line(name, runs):
    result, = runs[1][name]
    lines = result["stderr"][0].strip().splitlines()
    assert set(result["codes"]) == {2} and len(lines) == 1, result
    assert re.search(REFUSED[name].replace("{s", r"\{s"), lines[0]), lines
    assert not "".join(result["stderr"][1:])
    assert not [file for file in os.listdir(f"{runs[0]}/{name}") if "labels" in file]

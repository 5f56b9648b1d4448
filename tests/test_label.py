"""data/label.py: its pairs against a loop written by hand, in both orders; rm.py reads them; and what it refuses."""
import json
import math
import os
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from tokenizer import load_tokenizer
from load import load_model
from rollout import generate, response_uniforms, texts_of

import tiny
from tiny import arguments, forked, is_one_line, one_run, user

SEED, SAMPLES, R = 3, 16, 8
REFUSED = {  # name: (keys, what is named)
    "half": (dict(judge_template="half"), "{second}"), "nothing": (dict(min_confidence=1.0, samples=2), "0 pairs"),
    "own": (dict(prompts_path="../own_val.jsonl", out="../own.jsonl", held_out=1), "'../own_val.jsonl'"),
    "long": (dict(judge_template="compare"), "row 1: ")}


def keys_of(world, **keys):
    return arguments(dict(
        policy_path=world.policy, judge_path=world.judge, judge_template=f"{world.root}/compare.txt", out="labels.jsonl",
        prompts_path=world.rl_train, samples=SAMPLES, max_new_tokens=R, batch_size=80, micro_batch_size=7, seed=SEED,
        dtype="float64", device_type="cpu") | keys)


@pytest.fixture(scope="module")
def world(world):
    for name, text in (("compare", "answers: a b\n{prompt}{first}|{second}"), ("grade", "answers: A B\n{prompt}{response}?"),
                       ("half", "{prompt}{first}")):
        with open(f"{world.root}/{name}.txt", "w") as f:
            f.write(text)
    shutil.copytree(world.policy, f"{world.root}/talks")
    with open(f"{world.root}/talks/chat_template.jinja", "w") as f:
        f.write("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    chats = [dict(prompt=[user(row["prompt"])]) for row in read(world.rl_train)]
    tiny.jsonl(f"{world.root}/chats.jsonl", chats)
    return world


@pytest.fixture(scope="module")
def runs(world, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("runs"))
    talks, chats = f"{world.root}/talks", f"{world.root}/chats.jsonl"
    cases = dict(compare={}, grade=dict(judge_template=f"{world.root}/grade.txt"),
                 chat=dict(policy_path=talks, prompts_path=chats),
                 parts=dict(pairs=5, held_out=2, min_confidence=0.6, batch_size=48, micro_batch_size=64))
    for name, (keys, _) in REFUSED.items():
        cases[name] = keys | (dict(judge_template=f"{world.root}/half.txt") if name == "half" else {})
    jobs = {name: [one_run("data/label.py", keys_of(world, **keys))] for name, keys in cases.items()}
    tiny.jsonl(f"{folder}/own_val.jsonl", [dict(prompt="1+1=")])
    for name, policy in (("compare", world.policy), ("chat", talks)):
        jobs[name].append(one_run("rm.py", world.rm("rm", init_from=policy, train_path="labels.jsonl", val_path="", max_iters=1)))
    return forked(folder, jobs)


def read(path):
    with open(path, encoding="utf-8") as f:
        return [json.loads(line) for line in f]


@pytest.fixture(scope="module")
@torch.no_grad()
def by_hand(world):
    """
    [(prompt, one answer, the other one, log-odds that the first is better: one first, other first; each one's grade)], and how
    many pairs are left out.
    """
    tokenizer, theirs = load_tokenizer(world.policy), load_tokenizer(world.judge)
    policy = load_model(world.policy, dtype=torch.float64)
    judge = AutoModelForCausalLM.from_pretrained(world.judge, dtype=torch.float64).eval()

    def odds(text, a, b):
        logits = judge(torch.tensor([theirs.encode_texts([text])[0]])).logits[0, -1]
        return (logits[ord(a)] - logits[ord(b)]).item()

    found, left_out = [], dict(ended=0, same=0)
    for i, row in enumerate(read(world.rl_train)):
        prompt, = tokenizer.encode_texts([row["prompt"]])
        uniforms = response_uniforms(SEED, "label", 0, [i] * SAMPLES, R, list(range(SAMPLES)))
        batch = generate(policy, [prompt] * SAMPLES, R, 1.0, tokenizer.eos_ids, tokenizer.pad_id, tokenizer.vocab_size, uniforms)
        texts = texts_of([(row, prompt)] * SAMPLES, batch, tokenizer)["completions"]
        answers = list(zip(texts, batch["finished"].tolist(), strict=True))
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


def alike(got, want):
    assert [row | dict(confidence=0) for row in got] == [row | dict(confidence=0) for row in want]
    assert [row["confidence"] for row in got] == pytest.approx([row["confidence"] for row in want], abs=1e-9)


def pair(prompt, one, other, odds):
    chosen, rejected = (one, other) if odds > 0 else (other, one)
    return dict(prompt=prompt, chosen=chosen, rejected=rejected, confidence=1 / (1 + math.exp(-abs(odds))))


def test_pairs_by_hand(runs, by_hand):
    """Kept is what is said in both orders; the margin is the mean of both. Other batches, parts of it; and chats say the same."""
    found, left_out = by_hand
    want = [pair(prompt, one, other, (f - b) / 2) for prompt, one, other, f, b, _, _ in found if f > 0 > b or f < 0 < b]
    (result, rm), folder = runs["compare"], runs.folder
    assert result["codes"] == rm["codes"] == [0], (result, rm)
    assert len(want) > 5 and len(found) - len(want) > 5 and left_out["ended"] > 5
    alike(read(f"{folder}/compare/labels.jsonl"), want)
    said = result["stdout"][0]
    assert f"cut off or empty {left_out['ended']}, the same text {left_out['same']}, " in said
    first, second = (sum(f * sign > 0 and b * sign > 0 for _, _, _, f, b, _, _ in found) for sign in (1, -1))
    for count in (len(want), first, second):
        assert f"{count / len(found):.1%}" in said
    sure = [row for row in want if row["confidence"] >= 0.6]
    assert len(sure) < len(want)
    alike(read(f"{folder}/parts/labels.jsonl"), sure[:5])
    alike(read(f"{folder}/parts/labels_val.jsonl"), sure[5:7])
    assert [result["codes"] for result in runs["chat"]] == [[0], [0]], runs["chat"]
    assert [row["chosen"][0]["content"] for row in read(f"{folder}/chat/labels.jsonl")] == [row["chosen"] for row in want]


def test_graded_pairs_by_hand(runs, by_hand):
    """A judge that sees one answer at a time has no order: the better grade wins."""
    want = [pair(prompt, one, other, a - b) for prompt, one, other, _, _, a, b in by_hand[0]]
    alike(read(f"{runs.folder}/grade/labels.jsonl"), want)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_one_line(name, runs):
    is_one_line(runs[name][0], "label.py", [REFUSED[name][1]])
    assert not [file for file in os.listdir(f"{runs.folder}/{name}") if "labels" in file]

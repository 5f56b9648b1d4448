"""
recipes/dpo.py: its loss and its steps by hand, equation 7 of arXiv 2305.18290 one pair and one token at a time, on models of
transformers in float64; on two ranks, in shards, with LoRA; stopped and resumed.
"""
import json
import math
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

import tiny
from by_hand import (EOS, MARKERS, Adapters, AdamW, encode, held_out_of, language_model, logprobs_of, mean, parameters_of,
                     train)
from conftest import ROOT
from test_recipes import ANEW, fork
from tiny import assert_same_run, forked, in_a_row, jsonl, one_run

KEYS = dict(beta=0.3, label_smoothing=0.1, max_iters=3, batch_size=7, micro_batch_size=3, warmup_iters=1, learning_rate=3e-3,
            eval_interval=2, eval_size=5, lr_decay="cosine", beta1=0.9, beta2=0.95, adam_eps=1e-8, grad_clip=1.0, seed=1,
            weight_decay=0.1)
WAYS = {  # ranks, keys of the layout, keys of the algorithm
    "alone": (1, {}, {}),
    "two": (2, {}, {}),
    "stage 3": (2, dict(zero_stage="3", micro_batch_size=1, gradient_checkpointing=True), {}),
    "adapter": (2, dict(head_chunk=4), dict(lora="2:6", label_smoothing=0.0, grad_clip=0.0)),
}


def dpo_by_hand(world, keys):
    """(records, the policy)"""
    c = SimpleNamespace(**KEYS | keys)
    policy, reference = language_model(world.policy), language_model(world.policy)
    adapters = Adapters(policy.base_model, c.lora, c.seed) if "lora" in keys else None
    if adapters:
        policy.lm_head.requires_grad_(False)
    adam = AdamW((adapters or policy).parameters(), c)
    train_rows, val = ([json.loads(line) for line in open(f"{world.root}/pairs_{part}.jsonl")] for part in ("train", "val"))

    def reward(row, side):
        prompt, completion = (encode(row[field], MARKERS["tokenizer"]) for field in ("prompt", side))
        with torch.no_grad():
            theirs = logprobs_of(reference, prompt, completion + [EOS], 1.0)[0]
        return c.beta * sum(p - q for p, q in zip(logprobs_of(policy, prompt, completion + [EOS], 1.0)[0], theirs, strict=True))

    def compare(rows, wrong):
        """The mean loss of pairs, of which this share is labelled the wrong way round, and what else is measured."""
        losses, figures = [], []
        for row in rows:
            good, bad = reward(row, "chosen"), reward(row, "rejected")
            p = 1 / (1 + torch.exp(bad - good))  # Bradley-Terry
            losses.append(-(1 - wrong) * torch.log(p) - wrong * torch.log(1 - p))
            good, bad = good.item(), bad.item()
            figures.append((losses[-1].item(), 0.5 if good == bad else float(good > bad), good - bad, good, bad))
        names = "loss", "accuracy", "margin", "chosen_reward", "rejected_reward"
        return sum(losses) / len(losses), dict(zip(names, map(mean, zip(*figures, strict=True)), strict=True))

    def evaluate():
        return {f"eval/{name}": x for name, x in compare(held_out_of(c, val), 0.0)[1].items()}

    def learn(picked):
        loss, figures = compare([train_rows[i] for i in picked], c.label_smoothing)
        return loss, {f"train/{name}": x for name, x in figures.items()}

    log = train(c, adam, "policy", evaluate, learn, len(train_rows), Counter())
    if adapters:
        adapters.merge()
    return log, policy


@pytest.fixture(scope="module")
def runs(world, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("dpo"))
    jobs = {name: one_run("recipes/dpo.py", *[world.dpo("out", **KEYS | algorithm | layout)] * ranks)
            for name, (ranks, layout, algorithm) in WAYS.items()}
    stopped, whole = ([world.dpo("out", **KEYS | dict(dtype="float32"))] * 2 for _ in range(2))
    results = in_a_row(folder, jobs).succeeded()
    home = f"{folder}/home"
    fork.fork("dpo", home, [])
    done = forked(folder, {
        "fork": [one_run(f"{home}/dpo.py", (world.dpo("out", **KEYS), f"HOME, ROOT = {home!r}, {ROOT!r}\n{ANEW}"))],
        "whole": [one_run("recipes/dpo.py", *whole)],
        "stopped": [one_run("recipes/dpo.py", *[(args, tiny.stops(1)) for args in stopped]),
                    one_run("recipes/dpo.py", *stopped)]}).succeeded()
    return results, done


@pytest.mark.parametrize("name", WAYS)
def test_a_run_agrees_with_one_by_hand(world, runs, name):
    runs, _ = runs
    log, policy = dpo_by_hand(world, WAYS[name][2])
    records = runs.log(name)
    assert len(records) == len(log) == 4
    for record, figures in zip(records, log, strict=True):
        far = {key: (record[key], x) for key, x in figures.items() if not abs(record[key] - x) <= 1e-9 * max(1, abs(x))}
        assert not far
    found = parameters_of(language_model(f"{runs.out(name)}/policy"))
    assert max((p - found[key]).abs().max().item() for key, p in parameters_of(policy).items()) < 1e-9
    # before the first step the policy is the reference, and then no longer
    assert records[0]["train/accuracy"] == 0.5 and abs(records[0]["train/loss"] - math.log(2)) < 1e-12
    assert records[-1]["eval/accuracy"] != 0.5 and abs(records[-1]["eval/margin"]) > 1e-3


def test_a_run_that_is_stopped_and_resumed_is_the_same_to_the_bit(runs):
    _, done = runs
    assert "stopped" in done["stopped"][0]["stdout"][0]
    assert_same_run(done.out("whole"), done.out("stopped"))


def test_a_fork_alone_leaves_the_same(runs):
    alone, fork = (done.out(name) for name, done in zip(("alone", "fork"), runs, strict=True))
    assert tiny.distance(f"{fork}/policy", f"{alone}/policy") == 0


def test_a_pair_that_is_too_long_is_dropped_as_a_whole(world, tmp_path):
    """Whichever of its sides is too long. (What is refused: test_bad_input.py.)"""
    pair = dict(prompt="1=", chosen="2", rejected="3")
    jsonl(tmp_path / "long.jsonl", [pair, pair | dict(rejected="1" * 40)])
    run, = forked(str(tmp_path), {"dropped": [one_run("recipes/dpo.py", world.dpo(
        "out", train_path=f"{tmp_path}/long.jsonl", too_long="drop", max_iters=1))]})["dropped"]
    assert run["codes"] == [0] and "\n1 pairs, " in run["stdout"][0], run


def test_equal_texts_are_a_tie(world, tmp_path):
    """When the policy has moved, too, and the two have last bits of their own."""
    ties = [dict(prompt=f"{i}=", chosen=f"{i}" * (1 + i % 4), rejected=f"{i}" * (1 + i % 4)) for i in range(20)]
    jsonl(tmp_path / "ties.jsonl", ties)
    runs = forked(str(tmp_path), {"ties": [one_run("recipes/dpo.py", world.dpo(
        "out", val_path=f"{tmp_path}/ties.jsonl", eval_size=0, dtype="float64", micro_batch_size=3))]}).succeeded()
    last = runs.log("ties")[-1]
    assert last["eval/accuracy"] == 0.5 and last["eval/chosen_reward"] == last["eval/rejected_reward"] != 0

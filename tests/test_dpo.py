"""
recipes/dpo.py: its loss and its steps by hand, equation 7 of arXiv 2305.18290 one pair and one token at a time, on models of
transformers in float64; on two ranks, in shards, with LoRA; stopped and resumed; and what it refuses.
"""
import json
import math
import os
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

import tiny
from by_hand import (EOS, MARKERS, Adapters, AdamW, encode, held_out_of, language_model, learning_rate, logprobs_of, mean,
                     parameters_of, prompts_of)
from conftest import ROOT
from test_recipes import ANEW, fork
from tiny import forked, in_a_row, jsonl, one_run

KEYS = dict(beta=0.3, label_smoothing=0.1, max_iters=3, batch_size=7, micro_batch_size=3, warmup_iters=1, learning_rate=3e-3,
            eval_interval=2, eval_size=5, lr_decay="cosine", beta1=0.9, beta2=0.95, adam_eps=1e-8, grad_clip=1.0, seed=1,
            weight_decay=0.1)
WAYS = {  # ranks, keys of the layout, keys of the algorithm
    "alone": (1, {}, {}),
    "two": (2, {}, {}),
    "stage 3": (2, dict(zero_stage="3", micro_batch_size=1, gradient_checkpointing=True), {}),
    "adapter": (2, dict(head_chunk=4), dict(lora="2:6", label_smoothing=0.0, grad_clip=0.0)),
}


def arguments(world, **keys):
    given = dict(out_dir="out", policy_path=world.policy, train_path=world.pairs_train, val_path=world.pairs_val, timeout=60,
                 device_type="cpu", dtype="float64", checkpoint_interval=0)
    return tiny.arguments(given | keys)


def dpo_by_hand(world, keys):
    """(records, the policy)"""
    c = SimpleNamespace(**KEYS | keys)
    policy, reference = language_model(world.policy), language_model(world.policy)
    adapters = Adapters(policy.base_model, c.lora, c.seed) if "lora" in keys else None
    if adapters:
        policy.lm_head.requires_grad_(False)
    adam, log, seen = AdamW((adapters or policy).parameters(), c), [], Counter()
    train, val = ([json.loads(line) for line in open(f"{world.root}/pairs_{part}.jsonl")] for part in ("train", "val"))

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

    for iteration in range(c.max_iters + 1):
        record = {}
        log.append(record)
        if iteration % c.eval_interval == 0 or iteration == c.max_iters:
            record |= {f"eval/{name}": x for name, x in compare(held_out_of(c, val), 0.0)[1].items()}
        if iteration == c.max_iters:
            if adapters:
                adapters.merge()
            return log, policy
        adam.zero_gradients()
        loss, figures = compare([train[i] for i in prompts_of(c, iteration, c.batch_size, len(train))], c.label_smoothing)
        loss.backward()
        record |= {f"train/{name}": x for name, x in figures.items()}
        record["policy/grad_norm"] = adam.clip(seen)
        record["policy/lr"] = learning_rate(iteration, c.learning_rate, c.warmup_iters, c.max_iters, c.lr_decay)
        adam.step(record["policy/lr"])


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return tiny.build(str(tmp_path_factory.mktemp("world")))


@pytest.fixture(scope="module")
def runs(world, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("dpo"))
    jobs = {name: one_run("recipes/dpo.py", *[arguments(world, **KEYS | algorithm | layout)] * ranks)
            for name, (ranks, layout, algorithm) in WAYS.items()}
    stopped, whole = ([arguments(world, **KEYS | dict(dtype="float32"))] * 2 for _ in range(2))
    results = in_a_row(folder, jobs)
    home = f"{folder}/home"
    fork.fork("dpo", home, [])
    done = forked(folder, {
        "fork": [one_run(f"{home}/dpo.py", (arguments(world, **KEYS), f"HOME, ROOT = {home!r}, {ROOT!r}\n{ANEW}"))],
        "whole": [one_run("recipes/dpo.py", *whole)],
        "stopped": [one_run("recipes/dpo.py", *[(args, tiny.stops(1)) for args in stopped]),
                    one_run("recipes/dpo.py", *stopped)]})
    return folder, results, done


@pytest.mark.parametrize("name", WAYS)
def test_a_run_agrees_with_one_by_hand(world, runs, name):
    folder, results, _ = runs
    assert not [outcome for outcome in results[name] if outcome["kind"]], results[name]
    log, policy = dpo_by_hand(world, WAYS[name][2])
    records = tiny.read_log(f"{folder}/{name}/out")
    assert len(records) == len(log) == 4
    for record, figures in zip(records, log, strict=True):
        far = {key: (record[key], x) for key, x in figures.items() if not abs(record[key] - x) <= 1e-9 * max(1, abs(x))}
        assert not far
    found = parameters_of(language_model(f"{folder}/{name}/out/policy"))
    assert max((p - found[key]).abs().max().item() for key, p in parameters_of(policy).items()) < 1e-9
    # before the first step the policy is the reference, and then no longer
    assert records[0]["train/accuracy"] == 0.5 and abs(records[0]["train/loss"] - math.log(2)) < 1e-12
    assert records[-1]["eval/accuracy"] != 0.5 and abs(records[-1]["eval/margin"]) > 1e-3


def test_a_run_that_is_stopped_and_resumed_is_the_same_to_the_bit(runs):
    folder, _, done = runs
    assert all(set(run["codes"]) == {0} for case in done.values() for run in case), done
    assert "stopped" in done["stopped"][0]["stdout"][0]
    a, b = ([tiny.measured(record) for record in tiny.read_log(f"{folder}/{name}/out")] for name in ("whole", "stopped"))
    assert a == b and tiny.distance(f"{folder}/whole/out/policy", f"{folder}/stopped/out/policy") == 0


def test_a_fork_alone_leaves_the_same(runs):
    folder = runs[0]
    assert tiny.distance(f"{folder}/fork/out/policy", f"{folder}/alone/out/policy") == 0


REFUSED = {
    "cut": (dict(too_long="cut"), ["too_long", "--too_long=drop"]),
    "too long": (dict(train_path="long.jsonl"), ["long.jsonl", "row 2", "--too_long=drop"]),
    "no field": (dict(train_path="half.jsonl"), ["half.jsonl", "rejected"]),
    "empty": (dict(train_path="mute.jsonl"), ["mute.jsonl", "line 1", "prompt"]),
    "no file": (dict(val_path="nowhere.jsonl"), ["nowhere.jsonl"]),
    "no model": (dict(policy_path="nowhere"), ["nowhere"]),
    "a range": (dict(beta=0), ["beta", "> 0"]),
    "another beta": (dict(beta=0.2), ["beta", "0.2"]),
}


@pytest.fixture(scope="module")
def refused(world, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("refused"))
    pair = dict(prompt="1=", chosen="2", rejected="3")
    jsonl(f"{folder}/long.jsonl", [pair, pair | dict(rejected="1" * 40)])
    jsonl(f"{folder}/half.jsonl", [dict(prompt="1=", chosen="2")])
    jsonl(f"{folder}/mute.jsonl", [pair | dict(prompt="", chosen="")])
    cases = {}
    for name, (keys, _) in REFUSED.items():
        keys = {key: f"{folder}/{x}" if str(x).endswith(".jsonl") else x for key, x in keys.items()}
        cases[name] = [one_run("recipes/dpo.py", arguments(world, **KEYS | keys))]
    cases["another beta"].insert(0, one_run("recipes/dpo.py", arguments(world, **KEYS | dict(max_iters=1))))
    # a pair of which one side is too long goes as a whole
    cases["dropped"] = [one_run("recipes/dpo.py", arguments(
        world, **KEYS | dict(train_path=f"{folder}/long.jsonl", too_long="drop", max_iters=1)))]
    return folder, forked(folder, cases)


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_one_line(refused, name):
    _, results = refused
    last = results[name][-1]
    assert last["codes"] == [2], last
    line, = last["stderr"][0].splitlines()
    assert line.startswith("dpo.py: error: ") and all(word in line for word in REFUSED[name][1]), line


def test_a_pair_that_is_too_long_is_dropped_as_a_whole(refused):
    folder, results = refused
    run, = results["dropped"]
    assert run["codes"] == [0] and "\n1 pairs, " in run["stdout"][0], run
    assert os.path.isdir(f"{folder}/dropped/out/policy")

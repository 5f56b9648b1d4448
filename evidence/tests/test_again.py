"""
A run that is typed again: it has ended, with the same keys or with others; it goes on with a larger
max_iters, or with other keys; its end is killed at every call.
"""
import itertools
import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from checkpoint import cut_logs
from test_checkpoint import dies_at
from tiny import (assert_one_line, assert_same_run, at, jsonl, keys_of, read_jsonl, read_log,
                  read_weights, run, well, write)


def contents(out):
    """{path in it: (bytes, when it was written)} of a run's files; {path: False} of its folders."""
    return {path.relative_to(out): path.is_file() and (path.read_bytes(), path.stat().st_mtime_ns)
            for path in Path(out).rglob("*")}


# a run that has ended

RUNS = {  # a name: the script, ranks, keys
    "ppo": ("ppo.py", 1, dict(ema_decay=0.5, keep_best="score")),
    "sft": ("sft.py", 1, dict(lora="2")),
    "roles": ("ppo.py", 3, dict(roles="train=1,generate=1,score=1", staleness=1))}


@pytest.fixture(scope="module")
def ended(world, tmp_path_factory):
    """{name: (script, the folder of a run that has ended, its keys, ranks)}"""
    folder, runs = tmp_path_factory.mktemp("ended"), {}
    for name, (script, ranks, more) in RUNS.items():
        keys = keys_of(world, script, max_iters=2, checkpoint_interval=1, **more)
        well(script, folder / name, keys, ranks=ranks)
        runs[name] = script, folder / name, keys, ranks
    return runs


@pytest.mark.parametrize("name, typed, was", [
    # keys that change no result, if any
    ("ppo", dict(timeout=50, micro_batch_size=3, keep_checkpoints=2, save_rollouts=1), ""),
    ("sft", {}, ""), ("roles", {}, ""),
    # others; what the run had
    ("ppo", dict(cliprange=20, timeout=50), "cliprange = 0.2"),
    ("ppo", dict(keep_best="eval/length"), "keep_best = 'score'"),
    ("ppo", dict(ema_decay=0.25), "ema_decay = 0.5"), ("sft", dict(lr_decay="linear"), "lr_decay")])
def test_a_run_that_has_ended_says_so_and_changes_nothing(ended, name, typed, was):
    """Other keys would have given other results: it is not said to have had them."""
    script, folder, keys, ranks = ended[name]
    before = contents(folder / "out")
    result = run(script, folder, keys | typed, ranks=ranks)
    if was:
        assert_one_line(result, script, "ended at iteration 2", was, "--max_iters", "--out_dir")
    else:
        assert set(result.codes) == {0} and "ended at iteration 2" in result.out[0], result
        assert "saved" not in result.out[0]
    assert contents(folder / "out") == before


@pytest.mark.parametrize("name, lost", [
    ("ppo", ["value_model/model.safetensors", "ema_policy"]), ("sft", ["policy_adapter"])])
def test_models_that_are_missing_or_in_another_dtype_are_written(ended, tmp_path, name, lost):
    """And the checkpoint stays as it is, to its last file."""
    script, folder, keys, _ = ended[name]
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    for path in (tmp_path / "out" / each for each in lost):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    before = contents(tmp_path / "out/checkpoint-000002")
    out = well(script, tmp_path, keys)
    assert_same_run(folder / "out", out)
    assert contents(folder / "out").keys() == contents(out).keys()
    well(script, tmp_path, keys | dict(save_dtype="bfloat16"))
    assert contents(f"{out}/checkpoint-000002") == before
    for model in {"policy", "value_model"} & {*os.listdir(out)}:
        assert {t.dtype for t in read_weights(f"{out}/{model}").values()} == {torch.bfloat16}
    assert "ended" in run(script, tmp_path, keys | dict(save_dtype="bfloat16")).out[0]


def evaluations(out):
    """[(iteration, figures)] of the log; [iteration] of the samples; each as often as it stands."""
    made = [(record["iteration"], {k: x for k, x in record.items() if k.startswith("eval/")})
            for record in read_jsonl(f"{out}/log.jsonl")]
    samples = read_jsonl(f"{out}/samples.jsonl") if os.path.exists(f"{out}/samples.jsonl") else []
    return [(i, figures) for i, figures in made if figures], [x["iteration"] for x in samples]


def test_killed_at_every_call_of_its_end_the_same_command_ends_it(world, tmp_path):
    """
    With all that a run can leave: one iteration more, in copies of a run that has ended, in each of
    which the kill comes some calls later. No kill loses an evaluation.
    """
    keys = keys_of(world, "ppo.py", max_iters=1, ema_decay=0.5, keep_best="score", lora="2",
                   value_init="policy", checkpoint_interval=0)
    first, _ = evaluations(well("ppo.py", tmp_path / "begun", keys))
    keys["max_iters"] = 2
    shutil.copytree(tmp_path / "begun", tmp_path / "whole")
    whole, ends = well("ppo.py", tmp_path / "whole", keys), 0
    for number in itertools.count(3, 17):
        folder = shutil.copytree(tmp_path / "begun", tmp_path / str(number))
        codes = run("ppo.py", folder, keys, before=dies_at(number)).codes
        if codes == [0]:
            break
        assert codes == [-9] and evaluations(folder / "out")[0][:2] == first
        ends += os.path.exists(folder / "out/checkpoint-000002")
        out = well("ppo.py", folder, keys)  # again, and as if nothing had happened
        assert_same_run(whole, out, ("policy", "value_model", "ema_policy", "best_policy"))
        assert contents(whole).keys() == contents(out).keys()
        assert read_jsonl(f"{whole}/samples.jsonl") == read_jsonl(f"{out}/samples.jsonl")
    assert number > 100 and ends > 1


# a run that goes on

@pytest.mark.parametrize("script, interval, more", [
    ("ppo.py", 3, dict(save_rollouts=1)), ("sft.py", 2, {}), ("rm.py", 3, {})])
def test_an_evaluation_that_was_made_stands_once(world, tmp_path, script, interval, more):
    """3 -> 5 iterations; the evaluation at 3 is due again, or not; killed before a checkpoint."""
    keys = keys_of(world, script, eval_interval=interval, checkpoint_interval=0, **more)
    out = well(script, tmp_path, keys)
    first, samples = evaluations(out)
    assert [i for i, _ in first] == sorted({0, interval, 3})
    for how in (dict(before=at(3, signal.SIGKILL)), dict(before=at(4, signal.SIGKILL)), {}):
        result = run(script, tmp_path, keys | dict(max_iters=5), **how)
        assert result.codes == [-9 if how else 0], result
        now, said = evaluations(out)
        assert now[:len(first)] == first and said[:len(samples)] == samples
    assert [i for i, _ in now] == sorted({0, interval, 3, 2 * interval, 5} - {6})
    assert len(said) == len(samples) // len(first) * len(now)
    log = read_log(out)
    assert [record["iteration"] for record in log] == [0, 1, 2, 3, 4, 5]
    assert len(log[3]) > 3 + len(first[-1][1])  # with what training has logged


def test_an_evaluation_of_a_run_that_begins_anew_is_not_kept(tmp_path):
    """One that goes on keeps it, with its samples; a rollout's texts are written again."""
    log = jsonl(tmp_path / "log.jsonl", [{"iteration": 0, "eval/loss": 1.5}])
    assert cut_logs(str(tmp_path), 0) == {} and not os.path.exists(log)
    jsonl(log, [{"iteration": 3, "eval/loss": 1.5, "loss/sft": 2.0}])
    for file in ("samples", "rollouts"):
        jsonl(tmp_path / f"{file}.jsonl", [dict(iteration=i) for i in (2, 3, 4)])
    with open(log, "a") as f:
        f.write('{"iteration": 2, "x')  # a kill has cut it
    for _ in range(2):  # a run that is killed at once, too
        assert cut_logs(str(tmp_path), 3) == {"eval/loss": 1.5}
        assert read_jsonl(log) == [{"iteration": 3, "eval/loss": 1.5}]
        assert [row["iteration"] for row in read_jsonl(tmp_path / "samples.jsonl")] == [2, 3]
        assert [row["iteration"] for row in read_jsonl(tmp_path / "rollouts.jsonl")] == [2]


RULE = """
import os

def scripted(batch):  # what an evaluation gets, by the length of the log
    log = open("out/log.jsonl").readlines() if os.path.exists("out/log.jsonl") else []
    return [(1, 2, 5, 3, 4)[sum('"loss/policy"' in line for line in log)]] * len(batch["rows"])
"""


def test_the_best_policy_outlives_the_end_of_its_run(world, tmp_path):
    """The best evaluation is the last one, behind the last checkpoint; then come worse ones."""
    rule = write(tmp_path / "mine.py", RULE)
    keys = keys_of(world, "grpo.py", reward_functions=f"{rule}:scripted", keep_best="score",
                   eval_interval=1, checkpoint_interval=1)
    for count in 2, 4:
        out = well("grpo.py", tmp_path, keys | dict(max_iters=count))
        about = json.loads(Path(f"{out}/best_policy/run.json").read_text())
        assert (about["iteration"], about["figures"]["score"]) == (2, 5)


# keys that a resume changes

def test_keys_that_a_resume_changes_are_in_the_state_and_on_the_card(world, tmp_path):
    """
    A run changes its mind before the next checkpoint, and behind it; then it is made longer, with
    an average, which begins with the weights of then.
    """
    keys = keys_of(world, "ppo.py", max_iters=3, checkpoint_interval=1, num_minibatches=1,
                   ppo_epochs=1)
    for more, how, code in (({}, at(1, signal.SIGTERM), 0),
                            (dict(cliprange=0.3), at(1, signal.SIGKILL), -9),
                            (dict(cliprange=0.4), at(2, signal.SIGTERM), 0)):
        assert run("ppo.py", tmp_path, keys | more, before=how).codes == [code]
    keys["cliprange"] = 0.3
    out = well("ppo.py", tmp_path, keys)
    before = read_weights(f"{out}/policy")
    longer = dict(max_iters=4, temperature=0.9, micro_batch_size=3, ema_decay=0.75)
    well("ppo.py", tmp_path, keys | longer)
    after, average = (read_weights(f"{out}/{name}") for name in ("policy", "ema_policy"))
    for name, t in average.items():
        assert (t - 0.75 * before[name] - 0.25 * after[name]).abs().max() < 1e-12
    state = json.loads(Path(f"{out}/checkpoint-000004/state.json").read_text())
    assert state["run/changes"] == [
        [0, dict(cliprange=0.2, max_iters=3, temperature=0.8, micro_batch_size=2, ema_decay=0.0)],
        [1, dict(cliprange=0.4)], [2, dict(cliprange=0.3)], [3, longer]]
    for name in ("policy", "value_model"):
        card = Path(f"{out}/{name}/README.md").read_text()
        for line in ("1 on: `cliprange=0.4`", "2 on: `cliprange=0.3`",
                     "3 on: `temperature=0.9 max_iters=4 ema_decay=0.75`"):
            assert f"From iteration {line}" in card

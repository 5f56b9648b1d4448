"""
A run that is typed again: it has ended, with the same keys or with others; it goes on with a larger
max_iters, or with other keys; its end is killed at every call.
"""
import glob
import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import (assert_one_line, assert_same_run, at, keys_of, read_jsonl, read_log, read_weights,
                  run, well, write)

from checkpoint import cut_logs
from test_checkpoint import dies_at


def contents(out):
    """{path: (bytes, when it was written)} of all files of a run."""
    return {path: (path.read_bytes(), path.stat().st_mtime_ns)
            for path in map(Path, glob.glob(f"{out}/**", recursive=True)) if path.is_file()}


# a run that has ended

@pytest.fixture(scope="module")
def ended(world, tmp_path_factory):
    """{script: (the folder of a run that has ended, its keys)}"""
    folder, runs = tmp_path_factory.mktemp("ended"), {}
    for script, more in {"ppo.py": dict(ema_decay=0.5, keep_best="score"), "sft.py": dict(lora="2"),
                         "grpo.py": {}, "rm.py": {}}.items():
        keys = keys_of(world, script, max_iters=2, checkpoint_interval=1, **more)
        well(script, folder / script, keys)
        runs[script] = folder / script, keys
    return runs


@pytest.mark.parametrize("script, key", [
    ("ppo.py", dict(cliprange=20)), ("ppo.py", dict(keep_best="eval/length")),
    ("ppo.py", dict(eval_size=1)), ("ppo.py", dict(ema_decay=0.25)),
    ("grpo.py", dict(learning_rate=1e-3, timeout=50)), ("sft.py", dict(lr_decay="linear")),
    ("rm.py", dict(label_smoothing=0.1))])
def test_a_run_that_has_ended_is_not_said_to_have_other_keys(ended, script, key):
    folder, keys = ended[script]
    before = contents(folder / "out")
    name = next(iter(key))
    values = f"{name} = {keys[name]!r}" if name in keys else f"{key[name]}"
    assert_one_line(run(script, folder, keys | key), script, "ended at iteration 2", name, values,
                    "--max_iters", "--out_dir")
    assert contents(folder / "out") == before


@pytest.mark.parametrize("script, key", [
    ("ppo.py", dict(timeout=50, micro_batch_size=3, keep_checkpoints=2)), ("sft.py", {}),
    ("grpo.py", dict(checkpoint_interval=2, save_rollouts=1)), ("rm.py", {})])
def test_a_run_that_has_ended_says_so_and_changes_nothing(ended, script, key):
    folder, keys = ended[script]
    before = contents(folder / "out")
    result = run(script, folder, keys | key)
    assert result.codes == [0] and "ended at iteration 2" in result.out[0], result
    assert "saved" not in result.out[0] and contents(folder / "out") == before


def test_several_ranks_leave_a_run_that_has_ended(world, tmp_path):
    keys = keys_of(world, "ppo.py", max_iters=1, roles="train=1,generate=1,score=1", staleness=1)
    out = well("ppo.py", tmp_path, keys, ranks=3)
    before = contents(out)
    result = run("ppo.py", tmp_path, keys, ranks=3)
    assert set(result.codes) == {0} and "ended at iteration 1" in result.out[0], result
    assert contents(out) == before


@pytest.mark.parametrize("script, lost", [
    ("ppo.py", ["value_model/model.safetensors", "ema_policy"]), ("sft.py", ["policy_adapter"])])
def test_models_that_are_missing_or_in_another_dtype_are_written(ended, tmp_path, script, lost):
    """And the checkpoint stays as it is, to its last file."""
    folder, keys = ended[script]
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    for name in lost:
        path = tmp_path / "out" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    before = contents(tmp_path / "out" / "checkpoint-000002")
    out = well(script, tmp_path, keys)
    assert contents(f"{out}/checkpoint-000002") == before
    assert_same_run(folder / "out", out)
    there = [{path.relative_to(o) for path in Path(o).rglob("*")} for o in (folder / "out", out)]
    assert there[0] == there[1]
    well(script, tmp_path, keys | dict(save_dtype="bfloat16"))
    assert contents(f"{out}/checkpoint-000002") == before
    for model in {"policy", "value_model"} & {*os.listdir(out)}:
        tensors = load_file(f"{out}/{model}/model.safetensors").values()
        assert {t.dtype for t in tensors} == {torch.bfloat16}
    assert "ended" in run(script, tmp_path, keys | dict(save_dtype="bfloat16")).out[0]


def test_killed_at_every_call_of_its_end_the_same_command_ends_it(world, tmp_path):
    """With all that a run can leave; each kill is of a copy of a run before its end."""
    keys = keys_of(world, "ppo.py", max_iters=2, ema_decay=0.5, keep_best="score", lora="2",
                   value_init="policy", checkpoint_interval=0)
    whole = well("ppo.py", tmp_path / "whole", keys)
    assert run("ppo.py", tmp_path / "begun", keys, before=at(1, signal.SIGTERM)).codes == [0]
    number, codes, ends = 14, [-9], 0
    while codes != [0]:
        folder = shutil.copytree(tmp_path / "begun", tmp_path / f"killed {number}")
        codes = run("ppo.py", folder, keys, before=dies_at(number)).codes
        assert codes in ([0], [-9])
        ends += (folder / "out" / "checkpoint-000002").exists()
        if codes != [0]:  # again, and as if nothing had happened
            well("ppo.py", folder, keys)
        assert_same_run(whole, f"{folder}/out", ("policy", "value_model", "ema_policy",
                                                 "best_policy"))
        there = [{path.relative_to(o) for path in Path(o).rglob("*")}
                 for o in (whole, f"{folder}/out")]
        assert there[0] == there[1]
        assert read_jsonl(f"{whole}/samples.jsonl") == read_jsonl(f"{folder}/out/samples.jsonl")
        number += 23
    assert ends > 1


# a run that goes on

def evaluations(out):
    """[(iteration, figures)] of the log; [iteration] of the samples; each as often as it stands."""
    made = [(record["iteration"], {k: x for k, x in record.items() if k.startswith("eval/")})
            for record in read_jsonl(f"{out}/log.jsonl")]
    samples = [sample["iteration"] for sample in read_jsonl(f"{out}/samples.jsonl")] if (
        os.path.exists(f"{out}/samples.jsonl")) else []
    return [(i, figures) for i, figures in made if figures], samples


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
    iterations = [record["iteration"] for record in read_log(out)]
    assert iterations == [0, 1, 2, 3, 4, 5]
    assert len(read_log(out)[3]) > 3 + len(first[-1][1])  # with what training has logged


def test_a_kill_at_any_call_loses_no_evaluation(world, tmp_path):
    keys = keys_of(world, "sft.py", max_iters=1, eval_interval=5, checkpoint_interval=0)
    first = evaluations(well("sft.py", tmp_path / "first", keys))[0]
    number, codes = 0, [-9]
    while codes != [0]:
        folder = shutil.copytree(tmp_path / "first", tmp_path / str(number))
        codes = run("sft.py", folder, keys | dict(max_iters=2), before=dies_at(number)).codes
        if (folder / "out" / "log.jsonl").exists():
            assert evaluations(f"{folder}/out")[0][:2] == first
        well("sft.py", folder, keys | dict(max_iters=2))
        assert [i for i, _ in evaluations(f"{folder}/out")[0]] == [0, 1, 2]
        number += 11
    assert number > 20


def test_an_evaluation_of_a_run_that_begins_anew_is_not_kept(tmp_path):
    line = json.dumps({"iteration": 0, "eval/loss": 1.5, "loss/sft": 2.0})
    write(tmp_path / "log.jsonl", line + "\n")
    assert cut_logs(str(tmp_path), 0) == {} and not (tmp_path / "log.jsonl").exists()
    write(tmp_path / "log.jsonl", line.replace("0", "3", 1) + "\n")
    write(tmp_path / "samples.jsonl", '{"iteration": 3}\n{"iteration": 4}\n')
    write(tmp_path / "rollouts.jsonl", '{"iteration": 2}\n{"iteration": 3}\n')
    assert cut_logs(str(tmp_path), 3) == {"eval/loss": 1.5}
    assert read_jsonl(tmp_path / "log.jsonl") == [{"iteration": 3, "eval/loss": 1.5}]
    assert read_jsonl(tmp_path / "samples.jsonl") == [dict(iteration=3)]
    assert read_jsonl(tmp_path / "rollouts.jsonl") == [dict(iteration=2)]
    assert cut_logs(str(tmp_path), 3) == {"eval/loss": 1.5}


SCORES = """
import os

def scripted(batch):  # what an evaluation gets, by the length of the log
    log = open("out/log.jsonl").readlines() if os.path.exists("out/log.jsonl") else []
    number = sum('"loss/policy"' in line for line in log)
    return [float(open("scores").read().split()[number])] * len(batch["completions"])
"""


def test_the_best_policy_outlives_the_end_of_its_run(world, tmp_path):
    """The best evaluation is the last one, behind the last checkpoint; then come worse ones."""
    rule = write(tmp_path / "scripted.py", SCORES)
    write(tmp_path / "scores", "1 2 5 3 4 6")
    keys = keys_of(world, "grpo.py", reward_functions=f"{rule}:scripted", keep_best="score",
                   eval_interval=1, checkpoint_interval=1)
    best = []  # after 2, 3 and 4 iterations, and after 5
    for count in (2, 3, 4, 5):
        out = well("grpo.py", tmp_path, keys | dict(max_iters=count))
        about = json.loads(Path(f"{out}/best_policy/run.json").read_text())
        best.append((about["iteration"], about["figures"]["score"]))
        assert f"eval/scores              {best[-1][1]:.0f}" in Path(
            f"{out}/best_policy/README.md").read_text()
        if count == 2:
            weights, finished = read_weights(f"{out}/best_policy"), read_weights(f"{out}/policy")
            assert all(torch.equal(weights[name], t) for name, t in finished.items())
    assert best == [(2, 5), (2, 5), (2, 5), (5, 6)]


# keys that a resume changes

def test_keys_that_a_resume_changes_are_in_the_state_and_on_the_card(world, tmp_path):
    keys = keys_of(world, "ppo.py", max_iters=3, checkpoint_interval=1)
    assert run("ppo.py", tmp_path, keys, before=at(1, signal.SIGTERM)).codes == [0]
    other = keys | dict(cliprange=0.3)
    # it changes its mind before the next checkpoint, and behind it; then the run is made longer
    assert run("ppo.py", tmp_path, other, before=at(1, signal.SIGKILL)).codes == [-9]
    assert run("ppo.py", tmp_path, keys | dict(cliprange=0.4),
               before=at(2, signal.SIGTERM)).codes == [0]
    out = well("ppo.py", tmp_path, other)
    well("ppo.py", tmp_path, other | dict(max_iters=4, temperature=0.9, micro_batch_size=3))
    state = json.loads(Path(f"{out}/checkpoint-000004/state.json").read_text())
    assert state["run/changes"] == [
        [0, dict(cliprange=0.2, max_iters=3, temperature=0.8, micro_batch_size=2)],
        [1, dict(cliprange=0.4)], [2, dict(cliprange=0.3)],
        [3, dict(max_iters=4, temperature=0.9, micro_batch_size=3)]]
    for name in ("policy", "value_model"):
        card = Path(f"{out}/{name}/README.md").read_text()
        for line in ("From iteration 1 on: `cliprange=0.4`", "From iteration 2 on: `cliprange=0.3`",
                     "From iteration 3 on: `temperature=0.9 max_iters=4`"):
            assert line in card

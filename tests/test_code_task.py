"""The second toy: its data, and grpo.py with the reward `code`, through the sandbox, as a user runs it."""
import json

import pytest

from grading.programs import run_all
from grading.sandbox import check_sandbox
from errors import BadInput, Stop

import tiny
from tiny import forked, one_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The task's files, and an SFT model that has hardly learned anything: Runs."""
    folder = str(tmp_path_factory.mktemp("code"))
    sft = dict(out_dir="sft", train_path="sft_train.jsonl", val_path="sft_val.jsonl", tokenizer_path="tokenizer", context=112,
               n_head=2, d_model=16, d_ff=16, max_iters=2, batch_size=4, eval_size=4, device_type="cpu")
    made = one_run("data/code/prepare.py", ["--out=.", "--sft=400", "--val=60"])
    return forked(folder, dict(task=[made, one_run("sft.py", tiny.arguments(sft))])).succeeded()


@pytest.fixture(scope="module")
def rows(runs):
    """{name of a file: its rows}"""
    found = {}
    for name in ("sft_train", "sft_val", "rl_train", "rl_val"):
        with open(f"{runs.folder}/task/{name}.jsonl", encoding="utf-8") as f:
            found[name] = [json.loads(line) for line in f]
    return found


def test_what_is_held_out_is_held_out(rows):
    held_out = {row["prompt"] for row in rows["rl_val"]}
    assert len(held_out) == 60 and not held_out & {row["prompt"] for row in rows["rl_train"] + rows["sft_train"]}
    assert {row["prompt"] for row in rows["sft_val"]} <= held_out


@pytest.mark.needs_bwrap
def test_a_quarter_of_the_demonstrations_pass(rows):
    """Or a little more, where a mistake makes no difference; 3 standard deviations."""
    tests = {row["prompt"]: row["tests"] for row in rows["rl_val"] + rows["rl_train"]}
    verdicts = run_all([(row["completion"], tests[row["prompt"]]) for row in rows["sft_train"][:60]], 4)
    assert 8 <= sum(verdict.reason == "pass" for verdict in verdicts) <= 30
    assert all(verdict.total >= 5 and verdict.reason in ("pass", "fail", "error") for verdict in verdicts)


@pytest.mark.needs_bwrap
def test_grpo_runs_on_verdicts(runs, tmp_path):
    (tmp_path / "mine.py").write_text(
        "def seconds(batch):\n"
        "    assert batch['seconds'] == 40\n"
        "    return [0.0] * len(batch['rows'])\n")
    task = f"{runs.folder}/task"
    args = tiny.arguments(dict(
        out_dir="out", policy_path=f"{task}/sft/policy", prompts_path=f"{task}/rl_train.jsonl", eval_path=f"{task}/rl_val.jsonl",
        eval_size=2, reward_functions=f"code,0.5*length,{tmp_path}/mine.py:seconds", reward_timeout=40, batch_size=8,
        group_size=4, max_new_tokens=8, rollout_batch_size=4, micro_batch_size=4, max_iters=2, device_type="cpu"))
    result, = forked(str(tmp_path), {"run": [one_run("grpo.py", args)]})["run"]
    assert result["codes"] == [0] and result["stderr"] == [""], result
    log = tiny.read_log(tmp_path / "run" / "out")
    assert [r["iteration"] for r in log] == [0, 1, 2] and all(0 <= r["objective/reward/code"] <= 1 for r in log[:-1])


def test_bwrap_fails_or_is_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BadInput, match="apt install bubblewrap"):
        check_sandbox()
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for script, message in (("exit 0", "exit code 0"), ("echo 'bwrap: No permissions' >&2; exit 1", "bwrap: No permissions"),
                            ("kill -9 $$", "exit code -9")):
        (tmp_path / "bwrap").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "bwrap").chmod(0o755)
        with pytest.raises(Stop, match=message):
            run_all([("", {"stdin": "", "stdout": ""})] * 5, 2)
        with pytest.raises(BadInput, match=message):
            check_sandbox()

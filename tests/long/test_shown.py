"""What runs/ shows: the zoo's page with a row, and the line of the record, as a user types."""
import os
import re
import shutil
import subprocess
import sys

import pytest
from tiny import ROOT, jsonl, read_jsonl, write


@pytest.fixture
def copy(world, tmp_path):
    """The repository without what it has made, a tiny policy as its SFT model, and few problems."""
    for path in os.listdir(ROOT):
        if os.path.isfile(f"{ROOT}/{path}"):
            shutil.copy(f"{ROOT}/{path}", tmp_path)
    for folder in ("config", "options", "grading", "runs", "recipes", "tools", "docs", "data"):
        shutil.copytree(f"{ROOT}/{folder}", tmp_path / folder,
                        ignore=shutil.ignore_patterns("__pycache__", "*.jsonl"))
    sums = [dict(prompt=f"{n}+1=", answer=str(n + 1)) for n in range(20)]
    for name in ("rl_train", "rl_val", "sft_hints"):
        jsonl(tmp_path / f"data/arithmetic/{name}.jsonl", sums)
    shutil.copytree(world.policy, tmp_path / "out/zoo/1/sft/policy")
    for row in ("sft", "rm", "rm_lora", "hints"):  # as if they had been made
        os.makedirs(tmp_path / f"out/zoo/1/{row}", exist_ok=True)
        write(tmp_path / f"out/zoo/1/{row}/cost.json", '{"seconds": 1, "mib": 2}')
    return tmp_path


def bash(folder, *command, **environment):
    done = subprocess.run(["bash", *command], cwd=folder, capture_output=True, text=True,
                          env=os.environ | environment | dict(QUARTET_PYTHON=sys.executable))
    return done.returncode, done.stdout + done.stderr


def test_a_row_of_the_zoo(copy):
    """By a diff, in a copy of the code; the table has its figures, and those of the start."""
    keys = "--max_iters=1 --batch_size=8 --max_new_tokens=4 --reward_functions=-1*length"
    code, said = bash(copy, "runs/zoo.sh", "--seeds=1", "--rows=maxrl",
                      f"--more={keys} --learning_rate=1e-2")
    assert code == 0, said
    page = open(copy / "out/zoo/zoo.md", encoding="utf-8").read()
    rows = {cells[0]: [float(x.strip("%")) for x in cells[2:]] for cells in (
        line.strip("| ").split(" | ") for line in page.splitlines()
        if re.match(r"\| (sft|grpo|maxrl)", line))}
    assert list(rows) == ["sft", "maxrl"], page
    assert rows["sft"][2] == 0 and rows["sft"][5:] == [1, 2]  # the KL to itself; cost.json
    assert rows["maxrl"][2] != 0
    pages = [open(f"{copy}/{code}grpo.py").read() for code in ("", "out/zoo/code/MaxRL/")]
    assert ["torch.where(means > 0" in page for page in pages] == [False, True]
    assert len(read_jsonl(copy / "out/zoo/1/maxrl/log.jsonl")) == 2
    assert os.path.exists(copy / "out/zoo/zoo.png")


STAND_IN = """
import os, sys
from safetensors.numpy import load_file, save_file  # no torch: it would take seconds
assert sys.argv[1].endswith("trl_same.py") and sys.argv[2] == "ppo"
batch = load_file("batch.safetensors")
assert batch["tokens"].shape == batch["response_mask"].shape == (24, batch["begins"].max() + 16)
assert (batch["lengths"] == batch["begins"] + 16).all()  # all are cut
assert (batch["response_mask"].sum(1) == 16).all()
for name, begin, part in ("policy", "policy", 0.75), ("value_model", "reward_model", 1.0):
    start, ours = load_file(begin + "/model.safetensors"), load_file(name + "_ours.safetensors")
    save_file({key: start[key] + part * (t - start[key]) for key, t in ours.items()},
              name + "_trl.safetensors")
print("a stand-in")
"""


def test_beside_another_implementation(tmp_path):
    """One that takes three quarters of each step: the distance is a quarter of the way."""
    python = write(tmp_path / "python", f"#!/bin/sh\nexec {sys.executable} {tmp_path}/it.py \"$@\"")
    write(tmp_path / "it.py", STAND_IN)
    os.chmod(python, 0o755)
    code, said = bash(ROOT, "runs/peers.sh", "same", "--rows=PPO",
                      PPO_PYTHON=python, GRPO_PYTHON=python)
    assert code == 0 and "| PPO | a stand-in | 2.5e-01, " in said, said
    assert float(said.split()[-2]) < 1e-15

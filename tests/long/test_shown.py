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
    for place in ("zoo", "speedrun"):
        shutil.copytree(world.policy, tmp_path / f"out/{place}/1/sft/policy")
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


def test_the_record_has_its_line(copy):
    run = "grpo.py config/arithmetic_grpo.py --max_iters=1 --batch_size=8 --eval_size=4"
    code, said = bash(copy, "runs/speedrun.sh", "1", RUN=run, TARGET="0")
    line = r"\d+\.\d % in \d+\.\d+ s, \d+\.\d+ \+ \d+\.\d+ s of CPU: reached"
    assert code == 0 and re.fullmatch(line, said.splitlines()[-1]), said

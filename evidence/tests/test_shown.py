"""
What runs/ shows, as a user types: the zoo's page with a row; the line of the record; the referee's
page, of a wheel that is made here: a function is right, one a choice, one wrong; and two steps
beside an implementation that is made here.
"""
import glob
import os
import re
import shutil
import subprocess
import sys
import zipfile

import pytest
from evidence.referee.ours import ROWS, make_batch
from tiny import ROOT, Started, jsonl, read_jsonl, write


@pytest.fixture
def copy(world, tmp_path):
    """The repository without what it has made, a tiny policy as its SFT model, and few problems."""
    for path in glob.glob(f"{ROOT}/*.py"):
        shutil.copy(path, tmp_path)
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
    pages = [open(f"{copy}/{code}grpo.py").read() for code in ("", "out/zoo/code/maxrl.diff/")]
    assert ["torch.where(means > 0" in page for page in pages] == [False, True]
    assert len(read_jsonl(copy / "out/zoo/1/maxrl/log.jsonl")) == 2
    assert os.path.exists(copy / "out/zoo/zoo.png")


def test_the_record_has_its_line(copy):
    run = "grpo.py config/arithmetic_grpo.py --max_iters=1 --batch_size=8 --eval_size=4"
    code, said = bash(copy, "runs/speedrun.sh", "1", RUN=run, TARGET="0")
    line = r"\d+\.\d % in \d+\.\d+ s, \d+\.\d+ \+ \d+\.\d+ s of CPU: reached"
    assert code == 0 and re.fullmatch(line, said.splitlines()[-1]), said


LOSS = """
from openrlhf.somewhere import register
from .utils import masked_mean
import torch.nn as nn

@register("value")
class ValueLoss(nn.Module):
    def __init__(self, reach: Unknown):
        super().__init__()
        self.reach = reach

    def forward(self, values, old, returns, mask):
        assert isinstance(mask, Unknown)
        near = old + (values - old).clamp(-self.reach, self.reach)
        losses = ((values - returns) ** 2).maximum((near - returns) ** 2)
        return masked_mean(losses, mask) / 2

def aggregate_loss(loss, mask, token_level=True):  # wrong: of all places
    return loss.mean()
"""
UTILS = """
import somebody_elses

def masked_mean(x, mask):
    somebody_elses.logger.info("a loss")
    return (x * mask).sum() / mask.sum()

def compute_approx_kl(logprobs, ref_logprobs, kl_estimator):  # by choice: it is cut
    x = logprobs - ref_logprobs
    return dict(k1=x, k2=x**2 / 2, k3=(-x).exp() - 1 + x)[kl_estimator].clamp(-10, 10)
"""


def test_the_formulas_of_the_referee_stand_in_the_pages():
    """Each is cut out of today's files, and gives numbers."""
    for row, (formula, *_) in ROWS.items():
        assert formula(make_batch(1)).isfinite().all(), row


def test_a_cell_is_equal_or_named_or_not_explained(tmp_path):
    with zipfile.ZipFile(tmp_path / "openrlhf-0.11.2-py3-none-any.whl", "w") as f:
        folder = "openrlhf-0.11.2.data/purelib/openrlhf"
        for name, text in (("models/loss", LOSS), ("models/utils", UTILS),
                           ("trainer/ppo_utils/experience_maker", "")):
            f.writestr(f"{folder}/{name}.py", text)
    ended = Started("evidence/referee/table.py", [
        f"--wheels={tmp_path}", f"--page={tmp_path}/page.md"], str(tmp_path)).wait()
    assert ended.codes == [1] and ended.err[0].endswith(
        "not explained: token-mean, OpenRLHF 0.11.2; seq-mean-token-mean, OpenRLHF 0.11.2\n"), ended
    page = (tmp_path / "page.md").read_text()
    cells = dict(re.findall(r"^\| (\w[\w -]*?) +\| ([^|]*?) +\|$", page, re.MULTILINE))
    assert cells.pop("value loss").startswith("equal (")
    assert cells == {"formula": "OpenRLHF 0.11.2"} | {
        kind: "`KL <= 10`" for kind in ("k1", "k2", "k3")} | {
        f"{kind}token-mean": "**not explained**" for kind in ("", "seq-mean-")}
    assert "  - k1, OpenRLHF: 2e-02 -> 0e+00\n" in page
    (absent,) = re.findall("could not be had: (.*)", page)
    assert absent.count(",") == 3 and "verl 0.9.1" in absent and "openrlhf" not in absent


STAND_IN = """
import os, sys
from safetensors.numpy import load_file, save_file  # no torch: it would take seconds
assert sys.argv[1].endswith("of_trl.py") and sys.argv[2:4] == ["same", "ppo"]
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
    ended = Started("evidence/peers/same.py", [
        "--rows=PPO", f"--ppo_python={python}", f"--grpo_python={python}"], str(tmp_path)).wait()
    assert ended.codes == [0] and "| PPO | a stand-in | 2.5e-01, " in ended.out[0], ended
    assert float(ended.out[0].split()[-2]) < 1e-15

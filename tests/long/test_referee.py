"""
runs/referee.sh, on a wheel that is made here: a function is right, one a choice, one wrong. And
runs/peers.sh same, beside an implementation that is made here.
"""
import os
import re
import subprocess
import sys
import zipfile

from tiny import ROOT, write

LOSS = """
from openrlhf.somewhere import register
from .utils import below
import torch.nn as nn

@register("pair")
class PairWiseLoss(nn.Module):
    def forward(self, chosen: Unknown, rejected, margin=None):
        assert isinstance(chosen, Unknown)
        return below(chosen - rejected)

class DPOLoss(nn.Module):
    def __init__(self, beta):
        super().__init__()

    def forward(self, *of_a_pair):  # wrong: without beta
        chosen, rejected, ref_chosen, ref_rejected = of_a_pair
        return below(chosen - rejected - ref_chosen + ref_rejected), None, None
"""
UTILS = """
import somebody_elses
import torch.nn.functional as F

def below(x):
    somebody_elses.logger.info("a loss")
    return -F.logsigmoid(x).mean()
"""
CONTROLLER = """
class AdaptiveKLController:
    def __init__(self, value, target, horizon):
        self.value, self.target, self.horizon = value, target, horizon

    def update(self, kl, responses):  # by choice: without a cap
        self.value *= 1 + min(max(kl / self.target - 1, -0.2), 0.2) * responses / self.horizon
"""


def test_a_cell_is_equal_or_named_or_not_explained(tmp_path):
    with zipfile.ZipFile(tmp_path / "openrlhf-0.11.2-py3-none-any.whl", "w") as f:
        folder = "openrlhf-0.11.2.data/purelib/openrlhf"
        for name, text in (("models/loss", LOSS), ("models/utils", UTILS),
                           ("trainer/ppo_utils/kl_controller", CONTROLLER),
                           ("trainer/ppo_utils/experience_maker", "")):
            f.writestr(f"{folder}/{name}.py", text)
    done = subprocess.run(
        ["bash", f"{ROOT}/runs/referee.sh", f"--wheels={tmp_path}", f"--page={tmp_path}/page.md"],
        capture_output=True, text=True, env=os.environ | {"QUARTET_PYTHON": sys.executable})
    assert done.returncode == 1 and done.stderr.splitlines()[-1].endswith(
        "not explained: DPO, OpenRLHF 0.11.2"), done.stderr
    page = (tmp_path / "page.md").read_text()
    cells = dict(re.findall(r"^\| (\w[\w ]*?) +\| ([^|]*?) +\|$", page, re.MULTILINE))
    assert cells.pop("pair loss").startswith("equal (")
    assert cells == {"formula": "OpenRLHF 0.11.2",
                     "DPO": "**not explained**",
                     "KL controller": "`no cap`"}
    assert "  - KL controller, OpenRLHF: 1e-01 -> 0e+00\n" in page
    (absent,) = re.findall("could not be had: (.*)", page)
    assert absent.count(",") == 7 and "verl 0.9.1" in absent and "openrlhf" not in absent


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
    done = subprocess.run(
        ["bash", "runs/peers.sh", "same", "--rows=PPO"], capture_output=True, text=True, cwd=ROOT,
        env=os.environ | dict(PPO_PYTHON=python, GRPO_PYTHON=python, QUARTET_PYTHON=sys.executable))
    said = done.stdout + done.stderr
    assert done.returncode == 0 and "| PPO | a stand-in | 2.5e-01, " in said, said
    assert float(said.split()[-2]) < 1e-15

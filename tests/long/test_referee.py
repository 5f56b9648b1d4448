"""runs/referee.sh, on a wheel that is made here: a function is right, one a choice, one wrong."""
import os
import re
import subprocess
import sys
import zipfile

from conftest import ROOT

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

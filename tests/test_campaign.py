"""
Kill it anywhere, get the same weights: a sample of the fault campaign (campaign.py says what it does), and a damaged checkpoint
is refused. The long campaign is `pytest -m campaign tests/test_campaign.py`.
"""
import json
import os
import subprocess
import sys

import pytest

CAMPAIGN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "campaign.py")


def campaign(folder, *options, timeout=3600):
    """Run the campaign, in a process that forks others and so must be its own. Returns its report and what it printed."""
    report = os.path.join(folder, "report.json")
    result = subprocess.run([sys.executable, CAMPAIGN, *options, f"--folder={folder}/work", f"--report={report}"],
                            capture_output=True, text=True, timeout=timeout)
    said = result.stdout + result.stderr
    assert os.path.exists(report), said
    with open(report, encoding="utf-8") as f:
        report = json.load(f)
    assert not report["problems"], said
    return report


def test_killed_and_damaged_runs_end_in_the_same_bits(tmp_path):
    """Of four scripts on one and two ranks: weights, optimizer states, metrics, and no other file than without the kill."""
    report = campaign(str(tmp_path), "--kills=12", "--seed=27", "--corrupt=sft.py", "--corrupt-step=4", timeout=600)
    assert report["kills"] >= 12 and len(report["by_kind"]) == 5 and len(report["by_job"]) == 8, report
    assert report["damages"] > 1000


@pytest.mark.campaign
def test_the_whole_campaign(tmp_path):
    report = campaign(str(tmp_path), "--kills=240", "--signals=60", "--corrupt=ppo.py")
    assert report["kills"] >= 200 and len(report["by_kind"]) == 5 and len(report["by_job"]) == 8, report
    assert report["graceful"] > 20


@pytest.mark.campaign
def test_ranks_of_any_role(tmp_path):
    """Trainers, generators and scorers, at staleness 0, 1 and 2, and sharded models."""
    report = campaign(str(tmp_path), "--roles", "--kills=120", "--signals=12")
    assert report["kills"] >= 100 and len(report["by_kind"]) == 5 and len(report["by_job"]) == 9, report

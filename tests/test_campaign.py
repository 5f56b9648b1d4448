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


def campaign(folder, *options, timeout):
    """Run the campaign, in a process that forks others and so must be its own. Returns its report and what it printed."""
    report = os.path.join(folder, "report.json")
    result = subprocess.run([sys.executable, CAMPAIGN, *options, f"--folder={folder}/work", f"--report={report}"],
                            capture_output=True, text=True, timeout=timeout)
    said = result.stdout + result.stderr
    assert os.path.exists(report), said
    with open(report, encoding="utf-8") as f:
        return json.load(f), said


def all_kinds(report):
    return {"collective", "compute", "file", "write", "time"} == report["by_kind"].keys()


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    options = "--kills=12", "--seed=27", "--corrupt=sft.py", "--corrupt-step=4"
    return campaign(str(tmp_path_factory.mktemp("sample")), *options, timeout=600)


def test_killed_runs_end_in_the_same_bits(sample):
    """Of four scripts on one and two ranks: weights, optimizer states, metrics, and no other file than without the kill."""
    report, said = sample
    assert not report["problems"], said
    assert report["kills"] >= 12 and all_kinds(report) and len(report["by_job"]) == 8, said


def test_a_checkpoint_damaged_anywhere_is_refused(sample):
    report, said = sample
    assert report["damages"] > 1000 and not report["accepted"], said


@pytest.mark.campaign
def test_the_whole_campaign(tmp_path):
    report, said = campaign(str(tmp_path), "--kills=240", "--real", "--corrupt=ppo.py", timeout=3600)
    assert not report["problems"] and not report["accepted"], said
    assert report["kills"] >= 200 and all_kinds(report) and len(report["by_job"]) == 8, said


@pytest.mark.campaign
def test_ranks_of_any_role(tmp_path):
    """Trainers, generators and scorers, at staleness 0, 1 and 2; what is sampled ahead is in the checkpoints."""
    report, said = campaign(str(tmp_path), "--roles", "--kills=120", "--real-kills=18", timeout=3600)
    assert not report["problems"] and report["kills"] >= 100 and all_kinds(report) and len(report["by_job"]) == 6, said


@pytest.mark.campaign
def test_ranks_that_save_side_by_side(tmp_path):
    """Sharded models, in many files that all trainers write; one of them dies, before, in or after a file of its own."""
    report, said = campaign(str(tmp_path), "--sharded", "--kills=60", timeout=3600)
    assert not report["problems"] and report["kills"] >= 50 and all_kinds(report) and len(report["by_job"]) == 4, said


@pytest.mark.campaign
def test_runs_that_are_asked_to_stop(tmp_path):
    """SIGTERM and SIGINT, to one rank or to all, at any time: all end with 0, and the same command goes on to the same bits."""
    report, said = campaign(str(tmp_path), "--signals=60", timeout=3600)
    assert not report["problems"] and report["graceful"] > 20, said

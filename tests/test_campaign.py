"""
Kill it anywhere, get the same weights: a sample of the fault campaign (campaign.py says what it does).
The long campaign is `pytest -m campaign tests/test_campaign.py`.
"""
import json

import pytest

import tiny

KINDS = {"collective", "file", "write", "time", "compute", "signal"}


def campaign(folder, **options):
    """Run the campaign, in the process that forks runs. Returns its report."""
    report = f"{folder}/report.json"
    tiny.ask_forker(dict(report=report, work=f"{folder}/work", **options))
    with open(report, encoding="utf-8") as f:
        report = json.load(f)
    assert not report["problems"], "\n".join(report["problems"])
    return report


def test_killed_runs_end_in_the_same_bits(tmp_path):
    """Weights, optimizer states, metrics, and no other file than without the kill."""
    report = campaign(str(tmp_path), kills=6, seed=27, jobs=[("ppo.py", 2)])
    assert report["kills"] >= 6 and report["by_kind"].keys() == KINDS, report


@pytest.mark.campaign
def test_the_whole_campaign(tmp_path):
    report = campaign(str(tmp_path), kills=300)
    assert report["kills"] >= 250 and report["by_kind"].keys() == KINDS and len(report["by_job"]) == 8, report


@pytest.mark.campaign
def test_ranks_of_any_role(tmp_path):
    """Trainers, generators and scorers, at staleness 0, 1 and 2, and sharded models."""
    report = campaign(str(tmp_path), kills=130, roles=True)
    assert report["kills"] >= 100 and report["by_kind"].keys() == KINDS and len(report["by_job"]) == 9, report

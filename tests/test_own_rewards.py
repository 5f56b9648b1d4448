"""Rewards that do not apply to some responses (None): in the mix, in a group, and in runs; and a reward that fails in a run."""
import math
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from engine.report import deviation_of, mean_of, summarize
from loss import update_moments
from relatives import flat_groups, group_advantages
from rewards import Scorer

import tiny

NAN = math.nan
PLACEMENT = SimpleNamespace(device=torch.device("cpu"), autocast=nullcontext(), system=SimpleNamespace(
    micro_batch_tokens=0, reward_timeout=1, code_seconds=5))


def test_the_mix_leaves_out_what_does_not_apply(capsys):
    """By hand: 2 a - b + 0 c. c is only logged: it gives nobody a score."""
    terms = [(2.0, "a", None), (-1.0, "b", None), (0.0, "c", None)]
    scorer = Scorer(terms, None, None, None, None, 1, PLACEMENT)
    a, b = torch.tensor([1.0, NAN, 3.0, NAN]), torch.tensor([0.5, 0.5, NAN, NAN])
    batch = {"reward/a": a, "reward/b": b, "reward/c": torch.tensor([9.0, 9.0, NAN, 9.0]), "tokens": torch.zeros(4, 2)}
    scorer.add_up(batch)
    assert batch["scores"][:3].tolist() == [1.5, -0.5, 6.0] and batch["scores"][3].isnan()
    assert capsys.readouterr().out.splitlines() == [
        f"the reward {name!r} gives None for {n} of 4 responses: it does not apply to them"
        for name, n in (("a", 2), ("b", 2), ("c", 1))]
    scorer.add_up(batch)
    assert not capsys.readouterr().out  # said once
    mask = torch.ones(4, 2).bool()
    figures = summarize(batch | dict(response_mask=mask, finished=mask[:, 0], accuracy=a, thinks=a), "eval", ["a", "b", "c"])
    assert figures["eval/scores"] == pytest.approx(7 / 3) and figures["eval/scored"] == 0.75
    assert [figures[f"eval/reward/{name}"] for name in "abc"] == [2, 0.5, 9]
    assert mean_of(a * NAN) == deviation_of(a * NAN) == deviation_of(a[:2]) == 0 and deviation_of(a) == pytest.approx(2**0.5)
    assert update_moments([2, 1.0, 3.0], a[:0]) == [2, 1.0, 3.0]
    nan = torch.tensor([math.nan, 3.0])  # no reward applies to the first response
    assert update_moments([1, 1.0, 0.0], nan) == [2, 2.0, 2.0] and update_moments([2, 1.0, 3.0], nan[:1]) == [2, 1.0, 3.0]


@pytest.mark.parametrize("scale_by", ["std", "batch", "none"])
@pytest.mark.parametrize("baseline", ["mean", "others"])
def test_a_group_without_some_scores(scale_by, baseline):
    """As if those responses were not there: each group by numpy, with its NaNs taken out."""
    rng = np.random.default_rng(0)
    groups = rng.normal(size=(6, 4))
    groups[0, 1] = groups[1, :2] = groups[2, 1:] = groups[3] = groups[4, 3] = NAN
    groups[4, :3] = 0.7
    got = group_advantages(torch.tensor(groups).flatten(), 4, scale_by, baseline).view(6, 4).numpy()
    everyone = groups[~np.isnan(groups)]
    for found, group in zip(got, groups, strict=True):
        there = ~np.isnan(group)
        x, n = group[there], there.sum()
        assert (found[~there] == 0).all()
        if n < 2 or (x == x[0]).all():
            assert (found == 0).all()
            continue
        rest = x.mean() if baseline == "mean" else (x.sum() - x) / (n - 1)
        scale = dict(std=x.std(ddof=1) + 1e-4, batch=everyone.std(ddof=1) + 1e-4, none=1)[scale_by]
        assert np.allclose(found[there], (x - rest) / scale, atol=1e-12)
    assert flat_groups(torch.tensor(groups).flatten(), 4).tolist() == [False, False, True, True, True, False]


# runs

MINE = """
import asyncio
import os

def sometimes(prompts, completions, **columns):  # every third length, and every prompt that begins with 1, has no score
    return [None if len(text) % 3 == 0 or prompt[0] == "1" else len(text) / 8 for prompt, text in zip(prompts, completions)]

async def grader(completions, answer, **columns):
    await asyncio.sleep(0)
    return [float(text[:1] == truth[:1]) for text, truth in zip(completions, answer)]

calls = 0

def down(batch):  # the server is gone in the third call: the first evaluation and a rollout are over
    global calls
    calls += 1
    if calls > 2 and os.path.exists("../nobody-answers"):
        raise ConnectionRefusedError("nobody is there")
    return [len(text) / 8 for text in batch["completions"]]

def late(completions, **columns):  # at first all have the same score; in refills and later some have none
    global calls
    calls += 1
    return [0.1] * len(completions) if calls == 1 else [None if len(text) % 2 else len(text) / 8 for text in completions]
"""


def test_runs(tmp_path):
    """Scores that are missing, in GRPO and in PPO. A grader that is down saves the run, which then goes on as if nothing was."""
    (tmp_path / "world").mkdir()
    world = tiny.build(str(tmp_path / "world"))
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "nobody-answers").write_text("")
    mine = f"{tmp_path}/mine.py"
    down = world.grpo("out", reward_functions=f"{mine}:down", reward_timeout=1)
    jobs = {
        "none": tiny.one_run("grpo.py", world.grpo("out", reward_functions=f"{mine}:sometimes")),
        "mix": tiny.one_run("grpo.py", world.grpo("out", reward_functions=f"{mine}:sometimes,0.5*{mine}:grader")),
        "ppo": tiny.one_run("ppo.py", world.ppo("out", reward_functions=f"{mine}:sometimes", value_init="policy",
                                                missing_eos_penalty=0, scale_scores="running")),
        "late": tiny.one_run("grpo.py", world.grpo("out", reward_functions=f"{mine}:late", max_refills=1, max_iters=1,
                                                   eval_path="")),
        "down": tiny.one_run("grpo.py", down),
    }
    done = {name: outcome for name, (outcome,) in tiny.in_a_row(tmp_path, jobs).items()}
    for name in ("none", "mix", "ppo"):
        assert not done[name]["kind"], done[name]
        log = tiny.read_log(tmp_path / name / "out")
        assert all(math.isfinite(x) for record in log for x in record.values() if isinstance(x, float))
        assert tiny.distance(world.policy, f"{tmp_path}/{name}/out/policy") > 1e-4
        scored = [record.get("objective/scored") for record in log[:-1]]
        assert scored == [None] * 3 if name == "mix" else all(0 < x < 1 for x in scored), scored
        assert "the reward 'sometimes' gives None for " in done[name]["stdout"]
    refilled = tiny.read_log(tmp_path / "late" / "out")[0]  # objective: of what was sampled before the refills
    assert refilled["objective/scores"] == pytest.approx(0.1) and "objective/scored" not in refilled
    assert 0 < refilled["trained/scored"] < 1 and refilled["objective/kl"] == 0
    said = done["down"]["message"]
    assert done["down"]["kind"] == "Stop" and said.startswith(f"reward 'down' failed at {mine}, line ")
    assert said.endswith("nobody is there. The run is saved before iteration 1: the same command goes on from there")
    assert (tmp_path / "down" / "out" / "checkpoint-000001").is_dir()

    (tmp_path / "nobody-answers").unlink()
    jobs = dict(again=tiny.one_run("grpo.py", down) | dict(folder="down"), steady=tiny.one_run("grpo.py", down))
    for name, (outcome,) in tiny.in_a_row(tmp_path, jobs).items():
        assert not outcome["kind"], (name, outcome)
    logs = [[tiny.measured(record) for record in tiny.read_log(tmp_path / name / "out")] for name in ("down", "steady")]
    assert logs[0] == logs[1] and len(logs[0]) == 4
    assert tiny.distance(f"{tmp_path}/down/out/policy", f"{tmp_path}/steady/out/policy") == 0

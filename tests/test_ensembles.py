"""Several reward models in reward_path: what they say together, that each of them is audited, and what is refused."""
import re
import statistics

import pytest
import torch

import tiny
from rewards import ensemble_score
from tiny import forked, one_run


def test_what_an_ensemble_says():
    scores = [[1.0, 3.0, -1.0], [3.0, 3.0, 0.5], [8.0, 3.0, -4.0]]  # of three models, each of three responses
    together, columns = torch.tensor(scores, dtype=torch.float64), list(zip(*scores, strict=True))
    assert ensemble_score(together, "mean", 9.0).tolist() == pytest.approx([4, 3, -1.5])
    assert ensemble_score(together, "min", 9.0).tolist() == [1, 3, -4]
    want = [statistics.mean(x) - 0.7 * statistics.pstdev(x) for x in columns]
    assert ensemble_score(together, "penalised", 0.7).tolist() == pytest.approx(want)
    for how in ("mean", "min", "penalised"):  # one model is no ensemble; no responses are fine
        assert ensemble_score(together[:1], how, 2.0).tolist() == scores[0]
        assert ensemble_score(together[:, :0], how, 2.0).shape == (0,)


SPOILT = """
import rewards, torch
score = rewards.Scorer.score
def spoilt(self, *rest):
    with torch.no_grad():
        self.reward_models[1].hf.score.weight.add_(1e-3)
    return score(self, *rest)
rewards.Scorer.score = spoilt
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return tiny.build(str(tmp_path_factory.mktemp("world")))


@pytest.fixture(scope="module")
def done(world, tmp_path_factory):
    """{name: result} of a run whose second reward model moves, and of what is refused."""
    two, one = f"{world.reward},{world.second_reward}", world.reward
    runs = {"spoilt": one_run("ppo.py", (world.ppo("out", reward_path=two, sync_check_interval=1), SPOILT))}
    runs |= {name: one_run(script, getattr(world, script[:-3])("out", **keys))
             for name, (script, keys, _) in refused(two, one, world).items()}
    folder = str(tmp_path_factory.mktemp("ensembles"))
    return forked(folder, {name: [run] for name, run in runs.items()})


def refused(two, one, world):
    """{name: (script, keys, what the one line says)}"""
    return {
        "hole": ("ppo.py", dict(reward_path=f"{one},,{two}"),
                 "a name between two commas is missing; wanted one folder, or several"),
        "twice": ("grpo.py", dict(reward_path=f"{two},{one}"), "reward_path: '.*/reward' is given twice; keep one"),
        "another tokenizer": ("ppo.py", dict(reward_path=f"{one},{world.other_reward}"),
                              "reward_path: .*/other_reward does not read a text as .*/reward does"),
        "a policy": ("ppo.py", dict(reward_path=f"{one},{world.policy}"),
                     "policy' has no score head, it is a plain language model"),
        "missing": ("ppo.py", dict(reward_path=f"{one},out/nothing"), "out/nothing: no such model folder"),
        "alone": ("ppo.py", dict(reward_ensemble="min"),
                  "reward_ensemble = 'min' .* is for several reward models; type --reward_path=A,B,C"),
        "coef alone": ("grpo.py", dict(reward_ensemble_coef=2.0), "reward_ensemble_coef = 2 is for several reward models"),
        "rules": ("grpo.py", dict(reward_ensemble="penalised", reward_path=two, reward_functions="accuracy"),
                  "reward_ensemble = 'penalised' .* is for several"),
        "unknown": ("ppo.py", dict(reward_ensemble="max", reward_path=two), r"reward_ensemble = 'max'.*mean \| min \| penalised"),
    }


@pytest.mark.parametrize("name", refused("", "", tiny.World("")))
def test_what_is_no_ensemble_is_refused_in_one_line(done, world, name):
    (result,), (_, _, said) = done[name], refused("", "", world)[name]
    assert result["codes"] == [2], result
    assert re.fullmatch(rf"\w+\.py: error: [^\n]*{said}[^\n]*\n", result["stderr"][0]), result["stderr"]


def test_a_member_that_moves_stops_the_run(done):
    (result,) = done["spoilt"]
    assert result["codes"] != [0] and "the frozen reward_model 2 has changed: parameter hf.score.weight" in result["stderr"][0]

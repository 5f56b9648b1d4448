"""
Ranks with roles, and batches that are sampled ahead. What must stand: who does what changes no text
and no weight; and a batch is sampled by the version of the policy that `staleness` names, always.
Runs are forked (tiny.forked); by_hand.py works out a stale run with plain loops (test_by_hand.py).
"""
import pytest

import tiny
from tiny import alike, forked, measured, one_run

HELD = dict(dtype="float64", max_iters=4, eval_interval=2)
LAYOUTS = {  # the key roles -> how many ranks
    "": 1, "train=1,generate=1": 2, "train=1,score=1": 2, "train=2,generate=1,score=1": 4, "train=1,generate=2,score=2": 5}
CASES = {  # name -> (script, keys)
    "ppo": ("ppo.py", {}),
    "ppo, lora": ("ppo.py", dict(lora="2", value_init="shared", num_minibatches=1)),
    "grpo": ("grpo.py", {}),
    "grpo, refilled": ("grpo.py", dict(max_refills=2, num_minibatches=1, kl_in="reward")),
}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return tiny.build(str(tmp_path_factory.mktemp("world")))


def on(world, script, ranks, code="", **keys):
    """A run for forked, on so many ranks."""
    if keys.get("max_refills"):
        keys["reward_functions"] = f"{world.rule('odd')},0.5*reward_model"
    arguments = getattr(world, script.removesuffix(".py"))("out", **HELD | keys)
    return one_run(script, *[(arguments, code)] * ranks)


@pytest.fixture(scope="module")
def runs(world, tmp_path_factory):
    """{(case, staleness, roles): result}, and the folder."""
    folder, cases, names = str(tmp_path_factory.mktemp("layouts")), {}, []
    for name, (script, keys) in CASES.items():
        for staleness in (0, 1, 2):
            for roles, ranks in LAYOUTS.items():
                if name in ("ppo", "grpo") or roles in ("", "train=2,generate=1,score=1"):
                    cases[f"{name} {staleness} {roles}"] = [
                        on(world, script, ranks, staleness=staleness, roles=roles, **keys)]
                    names.append((name, staleness, roles))
    results = forked(folder, cases, at_once=3)
    return folder, {name: result for name, (result,) in zip(names, results.values(), strict=True)}


def test_roles_change_no_text_and_no_weight(runs):
    folder, results = runs
    for (name, staleness, roles), result in results.items():
        assert set(result["codes"]) == {0}, (name, staleness, roles, result)
        outs = [f"{folder}/{name} {staleness} {layout}/out" for layout in ("", roles)]
        logs = [[measured(record) for record in tiny.read_log(out)] for out in outs]
        texts = [[record.get("objective/texts") for record in log] for log in logs]
        assert texts[0] == texts[1], (name, staleness, roles)
        assert alike(*logs, tolerance=1e-9), (name, staleness, roles)
        for model in ("policy", "value_model")[:1 + (name == "ppo")]:
            assert tiny.distance(*(f"{out}/{model}" for out in outs)) < 1e-9, (name, staleness, roles)

"""docs/make_it_yours.md: each of its diffs is applied to a copy of the script and run: alone, on two ranks, and resumed."""
import ast
import os
import re

import pytest

import tiny
from conftest import ROOT
from tiny import forked, one_run

with open(os.path.join(ROOT, "docs", "make_it_yours.md"), encoding="utf-8") as f:
    PAGE = f.read()
DIFFS = dict(re.findall(r"```diff\n--- \S+\n\+\+\+ (\S+)\n(.*?)```", PAGE, re.DOTALL))


def patched(source, diff):
    """A source after a diff of the page: its @@ have no line numbers, and a line -... stands for all lines up to the next one."""
    for hunk in filter(None, re.split(r"^@@\n", diff, flags=re.MULTILINE)):
        lines = hunk.splitlines()
        pattern, new, gap = "", "", False
        for line in lines:
            if line == "-...":
                gap = True
            elif line[:1] in ("-", " ", ""):
                pattern += ("(?:.*\n)*?" if gap else "") + re.escape(line[1:]) + "\n"
                gap = False
            if line[:1] in ("+", " ", ""):
                new += line[1:] + "\n"
        found = re.findall(rf"^{pattern}", source, re.MULTILINE)
        assert not pattern or len(found) == 1, f"{len(found)} places for\n{hunk}"
        source = source.replace(found[0], new) if pattern else new
    return source


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder like the repository, with the changed scripts, and a world beside it."""
    folder = tmp_path_factory.mktemp("yours")
    world = tiny.build(f"{folder}")
    (folder / "home").mkdir()
    for file in ("keys.py", "rl_keys.py"):  # where a script looks for them
        os.symlink(os.path.join(ROOT, file), folder / "home" / file)
    with open(os.path.join(ROOT, "ppo.py"), encoding="utf-8") as f:
        ppo = f.read()
    for name, diff in DIFFS.items():
        (folder / "home" / name).write_text(patched("" if name == "digits.py" else ppo, diff))
    return folder, world


@pytest.fixture(scope="module")
def runs(home):
    folder, world = home
    gone = ("--ppo_epochs", "--num_minibatches")  # keys that the fork has not
    keys = dict(eval_interval=2, checkpoint_interval=1)

    def arguments(**more):
        return world.ppo("out", **keys | more)

    def fork(**more):
        return [argument for argument in arguments(**more) if not argument.startswith(gone)]

    script = {name: f"{folder}/home/{name}" for name in DIFFS}
    same = dict(dtype="float64", lr_decay="constant", value_lr_decay="constant")
    cases = {
        "fork": [one_run(script["reinforce.py"], fork(**same))],
        "fork on two": [one_run(script["reinforce.py"], *[fork(**same, max_iters=n)] * 2) for n in (1, 3)],
        "length": [one_run(script["length.py"], arguments(length_coef=0.5, max_iters=1))],
        "penalty": [one_run(script["penalty.py"], [a for a in arguments(**same) if "cliprange=" not in a])],
        "penalty resumed": [one_run(script["penalty.py"], arguments(**same, max_iters=n)) for n in (1, 3)],
        "metric": [one_run("ppo.py", arguments(
            reward_functions=f"reward_model,0*{folder}/home/digits.py:digits", max_iters=1))]}
    results = forked(str(folder), cases)
    for name, done in results.items():
        assert {code for result in done for code in result["codes"]} == {0}, (name, done)
    return folder, {name: [tiny.measured(record) for record in tiny.read_log(f"{folder}/{name}/out")] for name in cases}


def test_the_fork_has_no_dead_key(home):
    source = (home[0] / "home" / "reinforce.py").read_text()
    above, below = source.split("\nconfig, system = configure(")
    keys = re.findall(r"^([a-z]\w*) = ", above, re.MULTILINE)
    read = {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    assert len(keys) > 30 and not {key for key in keys if key not in read}
    assert not re.search(r"\bcliprange|\bppo_epochs|\bnum_minibatches|\blam\b", below)


def test_the_fork_runs_on_two_ranks_and_resumes(runs):
    folder, logs = runs
    assert len(logs["fork"]) == 4 and tiny.alike(logs["fork"], logs["fork on two"], 1e-9)
    assert tiny.distance(f"{folder}/fork/out/policy", f"{folder}/fork on two/out/policy") < 1e-9
    assert logs["fork"][0]["policy/grad_norm"] > 0


def test_the_length_costs_in_one_place_and_a_metric_nothing(runs):
    """The first iteration samples the same: what is maximised differs by the mean length, less than half where EOS is missing."""
    first, plain = runs[1]["length"][0], runs[1]["metric"][0]
    assert first["objective/texts"] == plain["objective/texts"] and first["objective/scores"] == plain["objective/scores"]
    assert first["objective/rlhf_reward"] < plain["objective/rlhf_reward"] - 0.5
    assert 0 <= plain["objective/reward/digits"] <= 1 and "eval/reward/digits" in plain


def test_the_penalty_adapts_and_resumes(runs):
    log = runs[1]["penalty"]
    assert log == runs[1]["penalty resumed"]
    weights = [record["policy/penalty"] for record in log[:-1]]
    assert weights[0] == 1.0
    for before, after, record in zip(weights, weights[1:], log, strict=False):
        moved = record["policy/approx_kl"]
        assert after == before * (2 if moved > 0.015 else 0.5 if moved < 0.01 / 1.5 else 1)

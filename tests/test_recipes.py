"""
recipes/*.diff: each is applied by tools/fork.py, and runs in the folder that this leaves, with nothing else of the repository, on
two ranks; stopped in the middle and resumed it ends in the same bits; and what comes out is what by_hand.py works out.
"""
import os
import re
import shutil
import sys

import pytest

import test_by_hand
import tiny
from conftest import ROOT
from test_by_hand import GRPO, PPO, command, differences, worked_out
from tiny import forked, one_run

sys.path.append(os.path.join(ROOT, "tools"))

import fork  # noqa: E402
from errors import BadInput  # noqa: E402

REINFORCE_HAS_NOT = ["ppo_epochs", "num_minibatches", "lam", "cliprange", "cliprange_value", "importance_cap", "target_kl"]

# The runs: {name: (recipes, script, keys of by_hand.py)}; what a recipe is without is the key's value there. BRANCHES: what each
# must have seen.
CASES = {
    "whiten_rewards": ("whiten_rewards", "ppo.py", PPO | dict(whiten_rewards="keep-mean", missing_eos_penalty=1.0)),
    "whiten_rewards, zero-mean": ("whiten_rewards", "ppo.py", PPO | dict(whiten_rewards="zero-mean")),
    "length": ("length", "ppo.py", PPO | dict(length_coef=0.3, scale_scores="running")),
    "text_metric": ("text_metric", "ppo.py", PPO | dict(mix=[(1.0, "reward_model"), (0.0, "distinct")])),
    "kl_penalty": ("kl_penalty", "ppo.py", PPO | dict(penalty=1.5, penalty_target=0.02, gone=["cliprange"], max_iters=4)),
    "vapo_lambda": ("vapo_lambda", "ppo.py", PPO | dict(lam=1.0, lam_alpha=0.5)),
    "reinforce": ("reinforce", "ppo.py", PPO | dict(
        recipe="reinforce", gone=REINFORCE_HAS_NOT, ppo_epochs=1, num_minibatches=1, lam=1.0, cliprange_value=0.0,
        entropy_coef=0.05, grad_clip=0.5, ema_decay=0.6, ptx="texts", ptx_coef=0.5)),
    "reinforce_pp": ("reinforce_pp", "grpo.py", GRPO | dict(
        recipe="reinforce_pp", gone=["scale_by"], scale_by="none", kl_estimator="k2")),
    "gdpo": ("gdpo", "grpo.py", GRPO | dict(
        recipe="gdpo", mix=[(1.0, "letters"), (0.5, "length")], batch_size=9, max_new_tokens=5)),
    "maxrl": ("maxrl", "grpo.py", GRPO | dict(recipe="maxrl", gone=["scale_by"], scale_by="none", num_minibatches=1)),
}
BRANCHES = {"kl_penalty": ["penalty up", "penalty down"]}

# In a process that has our modules already: those of the folder take their place, and the repository cannot be imported
ANEW = """
import sys
import campaign
for name in ["before_torch", "decoding_cache", "options", "grading", *campaign.OURS]:
    sys.modules.pop(name, None)
sys.path[:] = [HOME] + [path for path in sys.path if path != ROOT]
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory, request):
    """{name: (out_dir of the whole run, that of the one that was stopped, the run by hand)} of the cases that are asked for."""
    folder = str(tmp_path_factory.mktemp("recipes"))
    world = test_by_hand.build(folder)
    asked = {value for item in request.session.items if item.path == request.path and hasattr(item, "callspec")
             for value in item.callspec.params.values()}
    cases = {}
    for name in asked & CASES.keys():
        recipe, script, keys = CASES[name]
        home = f"{folder}/home of {name}"
        scripts, _ = fork.fork(recipe, home, ["foreign_rewards"])
        new = next(new for new, old in scripts.items() if old == script)
        code = f"HOME, ROOT = {home!r}, {ROOT!r}\n{ANEW}"
        arguments = [argument.replace("HOME", home) for argument in command(world, script, keys)]
        cases[f"{name}, whole"] = [one_run(f"{home}/{new}", *[(arguments, code)] * 2)]
        cases[f"{name}, stopped"] = [one_run(f"{home}/{new}", *[(arguments, code + more)] * 2) for more in (tiny.stops(1), "")]
    for name, results in forked(folder, cases, at_once=4).items():
        assert {code for result in results for code in result["codes"]} == {0}, (name, results)
        if len(results) > 1:
            assert "stopped before the update" in results[0]["stdout"][0], (name, results[0])
    return {name: (f"{folder}/{name}, whole/out", f"{folder}/{name}, stopped/out", worked_out(world, *CASES[name][1:]))
            for name in asked & CASES.keys()}


@pytest.mark.parametrize("name", CASES)
def test_a_recipe_is_what_it_is_by_hand(runs, name):
    whole, _, expected = runs[name]
    assert not differences(whole, expected)
    assert not [branch for branch in BRANCHES.get(name, ()) if not expected.seen[branch]], expected.seen


@pytest.mark.parametrize("name", CASES)
def test_a_recipe_resumes_to_the_bit(runs, name):
    whole, stopped, expected = runs[name]
    for model in expected.models:
        assert tiny.distance(f"{whole}/{model}", f"{stopped}/{model}") == 0
    one, other = (list(map(tiny.measured, tiny.read_log(out))) for out in (whole, stopped))
    assert one == other


def test_each_recipe_is_run_and_says_what_it_is():
    run = {recipe for recipes, *_ in CASES.values() for recipe in recipes.split(",")}
    files = {file.removesuffix(".diff") for file in os.listdir(fork.RECIPES) if file.endswith(".diff")}
    assert files == run
    for name in files:
        head, changes = fork.read_recipe(name)
        assert re.search(r"\(.*\barXiv \d{4}\.\d{4,5}|\bN\+", head) and "What changes in a run" in head, name
        for _, _, hunks in changes:  # as few lines as can be: what stays is named to find a place, and for nothing else
            assert all(sum(line[:1] in (" ", "") for line in hunk) <= 1 for hunk in hunks), name
            assert max(len(line) for hunk in hunks for line in hunk if line.startswith("+")) <= 101, name


def test_a_changed_script_has_no_dead_key():
    for name in {recipe for recipe, *_ in CASES.values()}:
        for old, _, hunks in fork.read_recipe(name)[1]:
            if old not in fork.SCRIPTS:
                continue
            above, below = fork.apply(hunks, fork.read(f"{ROOT}/{old}"), name).split("\nconfig, system = configure(")
            keys = re.findall(r"^([a-z]\w*) = ", above, re.MULTILINE)
            dead = {key for key in keys if not re.search(rf"\b{key}\b", below)}
            assert len(keys) > 30 and not dead, (name, dead)


# ---------------------------------------------------------------------------------------------------------------------
# tools/fork.py


@pytest.fixture
def book(tmp_path, monkeypatch):
    """A repository of one script of three lines, with a recipe for it; returns a function that writes a recipe's hunks."""
    (tmp_path / "recipes").mkdir()
    (tmp_path / "ppo.py").write_text("a = 1\nif a:\n    b = 2\n    c = 3\n")
    monkeypatch.setattr(fork, "ROOT", str(tmp_path))
    monkeypatch.setattr(fork, "RECIPES", str(tmp_path / "recipes"))
    return lambda body: (tmp_path / "recipes" / "more.diff").write_text(f"Why.\n--- ppo.py\n+++ mine.py\n{body}")


def applied():
    (_, _, hunks), = fork.read_recipe("more")[1]
    return fork.apply(hunks, fork.read(f"{fork.ROOT}/ppo.py"), "here")


def test_hunks_are_found_by_their_text(book):
    book("@@\n     b = 2\n+    d = 4\n@@\n-a = 1\n+a = 5\n")
    assert applied() == "a = 5\nif a:\n    b = 2\n    d = 4\n    c = 3\n"
    book("@@\n-if a:\n-...\n-    c = 3\n+e = 6\n")
    assert applied() == "a = 1\ne = 6\n"


@pytest.mark.parametrize("body, words", [
    ("@@\n x = 1\n+y = 2\n", "no line 'x = 1'"), ("@@\n-    b = 2\n-if a:\n+y = 2\n", "0 places"),
    ("@@\n-a = 1\n+a = 2\n@@\n-a = 1\n+a = 3\n", "no line 'a = 1'")])
def test_a_hunk_that_has_not_one_place_is_refused(book, body, words):
    book(body)
    with pytest.raises(BadInput, match=words):
        applied()


def test_refresh_mends_what_moved_and_names_what_is_gone(book, tmp_path):
    book("@@\n     b = 2\n+    d = 4\n@@\n a = 1\n-if a:\n+if not a:\n")
    assert fork.refresh() == ([], False)
    (tmp_path / "ppo.py").write_text("c = 3\na = 1\n\nif a:\n    while c:\n        b = 2\n")
    lines, broken = fork.refresh()
    assert lines == ["recipes/more.diff is mended"] and not broken
    assert applied() == "c = 3\na = 1\n\nif not a:\n    while c:\n        b = 2\n        d = 4\n"
    assert fork.refresh() == ([], False) and fork.read_recipe("more")[0] == "Why.\n"
    (tmp_path / "ppo.py").write_text("a = 1\nif a > 0:\n    b = 2\n")
    (line,), broken = fork.refresh()
    assert broken and "more.diff" in line and "ppo.py" in line and "'if a:'" in line


def test_all_recipes_are_in_step(tmp_path, monkeypatch):
    """If not: python tools/fork.py --refresh."""
    shutil.copytree(fork.RECIPES, tmp_path / "recipes")
    monkeypatch.setattr(fork, "RECIPES", str(tmp_path / "recipes"))
    assert fork.refresh() == ([], False)


def test_a_fork_has_what_its_script_needs_and_no_more(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["fork.py", "grpo.py", str(tmp_path / "mine"), "lora"])
    fork.main()
    assert "config/arithmetic_grpo.py" in capsys.readouterr().out
    files = {os.path.relpath(os.path.join(parent, file), tmp_path / "mine")
             for parent, _, names in os.walk(tmp_path / "mine") for file in names}
    assert {"grpo.py", "keys.py", "rl_keys.py", "options/lora.py", "relatives.py", "decoding_cache.py",
            "config/arithmetic_grpo.py"} <= files
    assert not files & {"ppo.py", "gae.py", "options/roles.py"} and len(files) < 45
    for what, where, more in (("grpo.py", "mine", []), ("grpo.py", "new", ["nothing"]), ("nothing", "new", [])):
        with pytest.raises(BadInput):
            fork.fork(what, str(tmp_path / where), more)

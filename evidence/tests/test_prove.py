"""
tools/prove.py: each of evidence/proved.py's mistakes, by the one check that finds it; two right
forks, which it must not accuse, by all checks; what is typed wrong, and what cannot be run.
"""
import faulthandler
import subprocess
import sys

import pytest

from conftest import ROOT
from errors import BadInput
from evidence.proved import FORKS, MISTAKES, broken, copy_of, prove, try_mistake, typed
from tiny import write


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """No data of this machine's; and no second Python, but where the order of a set matters."""
    monkeypatch.chdir(tmp_path)
    faulthandler.disable()  # in a run it would write into the terminal
    yield
    faulthandler.enable()


@pytest.mark.parametrize("name", [name for name, found in MISTAKES.items() if found[1]])
def test_a_mistake_is_found_and_named(name, tmp_path, monkeypatch):
    _, check, word, *_ = MISTAKES[name]
    if name != "set_order":
        start = prove.start
        monkeypatch.setattr(prove, "start", lambda spec: start(spec, twin=False))
    more = {"noise": 1, "parts": 1, "ranks": 2, "padding": 1, "ids": 1, "trained": 2}
    more = [f"--max_iters={more[check]}"] if check in more else []
    hard, notes = broken(try_mistake(name, tmp_path, more=more))
    (found,) = [x for found, x in (hard | notes).items() if check in found]
    assert word in str(found["lines"]), found
    if check == "resume":  # a name that the resumed run's set-up has otherwise is none that is lost
        assert "`out_dir`" not in str(found) and "`rows`" not in str(found), found
    assert (check in prove.NOTES) == bool(found["note"]) and not hard.keys() & prove.NOTES.keys()


@pytest.mark.parametrize("name", ["dapo", "value_first"])
def test_a_right_fork_is_not_accused(name, tmp_path):
    script, more = FORKS.get(name) or ("ppo", [])
    copy_of(tmp_path / "copy", diffs=[name] * (name not in FORKS))
    verdicts, runs = prove.prove(f"{tmp_path}/copy/{script}.py", typed(script, more),
                                 f"{tmp_path}/runs", say=lambda text: None)
    assert broken(verdicts) == ({}, {}) and not verdicts.untried
    assert {"noise", "parts", "ranks", "padding", "ids", "evaluation", "resume", "trained", "score",
            "turns, padding", "turns, ranks"} <= verdicts.found.keys()
    assert {0} == {code for name, run in runs.ended.items() for code in run.codes
                   if not name.startswith("resume")}


@pytest.mark.parametrize("typed, code, words", [
    ("", 0, ["grpo.py", "resume"]), ("--help", 0, ["What it cannot see"]),
    ("gae.py", 2, ["is no script"]), ("none.py", 2, ["none.py"]), ("--deep", 2, ["--deep"]),
    ("ROOT/nano/ppo.py", 2, ["nano/ppo.py"]), ("ROOT/ppo.py --only=kills", 2, ["kills", "resume"]),
    ("ROOT/ppo.py --learning_rat=1", 2, ["learning_rat"]), ("ROOT/ppo.py none.py", 2, ["none.py"]),
    ("ROOT/ppo.py --only=ids --group_size=2", 2, ["group_size"]),
    ("ROOT/grpo.py --only=ids --policy_path=none", 3, ["the small run fails", "none"]),
    ("ROOT/grpo.py --only=ids --reward_functions=mine.py:f", 3, ["difficulty", "--prompts_path"])])
def test_what_is_typed_wrong_is_one_line(typed, code, words, capsys):
    write("mine.py", "f = lambda batch: [row['difficulty'] for row in batch['rows']]")
    try:
        found, said = prove.main(typed.replace("ROOT", ROOT).split()), capsys.readouterr()
        said = said.err if found else said.out
    except BadInput as e:
        found, said = e.exit_code, f"{e}\n"
    assert found == code and all(word in said for word in words), said
    assert not code or said.count("\n") == 1, said


def test_an_error_of_its_own_is_one_line():
    done = subprocess.run([sys.executable, f"{ROOT}/tools/prove.py", "none.py"], text=True,
                          capture_output=True, check=False)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done

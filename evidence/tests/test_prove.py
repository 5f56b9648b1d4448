"""
tools/prove.py: a mistake of evidence/proved.py for each promise, by the one check that finds it; a
right fork, which it must not accuse, by all checks; what is typed wrong, and what cannot be run.
All other mistakes and forks are tried by hand: python evidence/proved.py.
"""
import ast
import faulthandler
import os
import subprocess
import sys

import pytest

from conftest import ROOT
from errors import BadInput
from evidence.proved import MISTAKES, broken, copy_of, prove, try_fork, try_mistake, typed
from tiny import write

TRIED = {  # a mistake for each promise; and how many iterations find it
    "no_mask_whitened": 1, "mean_of_means": 1, "old_in_place": 2, "randn": 1, "variable": 4,
    "length_from_ids": 1, "no_detach": 2, "groups_crossed": 1, "evaluation_moves": 2,
    "kl_sign_grpo": 3, "advantage_sign": 1, "last_by_count": 1, "mask_of_texts": 1}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch, world):
    """No data of this machine's, the tests' own world; and no second Python: it costs seconds."""
    def build(folder):
        os.rmdir(folder), os.symlink(world.root, folder)
        return world

    monkeypatch.setenv("PYTHONHASHSEED", "4242")
    monkeypatch.setattr(prove.small_world, "build", build)
    monkeypatch.chdir(tmp_path)
    faulthandler.disable()  # in a run it would write into the terminal
    yield
    faulthandler.enable()


def test_each_mistake_can_be_made(tmp_path):
    """Its texts stand once in their files, and what takes their place is Python."""
    for name, (script, _, _, *edits) in MISTAKES.items():
        copy_of(f"{tmp_path}/{name}", edits, script=script)
        for file, _, _ in edits:
            with open(f"{tmp_path}/{name}/{file or script + '.py'}", encoding="utf-8") as f:
                ast.parse(f.read())


def test_every_promise_has_a_mistake():
    in_other_words = {"same", "long", "lora"}  # the same checks, of other runs
    assert {MISTAKES[name][1] for name in TRIED} == prove.PROMISES.keys() - in_other_words


@pytest.mark.parametrize("name", TRIED)
def test_a_mistake_is_found_and_named(name, tmp_path):
    _, check, word, *_ = MISTAKES[name]
    hard, notes = broken(try_mistake(name, tmp_path, more=[f"--max_iters={TRIED[name]}"]))
    (found,) = [x for found, x in (hard | notes).items() if check in found]
    assert word in str(found["lines"]), found
    if check == "resume":  # a name that the resumed run's set-up has otherwise is none that is lost
        assert "`out_dir`" not in str(found) and "`rows`" not in str(found), found
    assert (check in prove.NOTES) == bool(found["note"]) and not hard.keys() & prove.NOTES.keys()


def test_a_right_fork_is_not_accused(tmp_path):
    """DAPO, which asks for more groups; what is typed stays as it is."""
    proof = prove.Proof(f"{ROOT}/grpo.py", typed("grpo", [
        f"{ROOT}/config/dapo.py", "--max_refills=1", "--batch_size=6", "--group_size=2",
        "--micro_batch_size=3", "--max_new_tokens=3"]), f"{tmp_path}/runs", say=lambda text: None)
    proof.of()
    assert broken(proof) == ({}, {}) and not proof.untried
    assert {"noise", "parts", "ranks", "padding", "ids", "evaluation", "resume", "trained", "score",
            "turns, padding", "turns, ranks"} <= proof.found.keys()
    assert {0} == {code for name, run in proof.runs.ended.items() for code in run.codes
                   if not name.startswith("resume")}


@pytest.mark.parametrize("name, only", [
    ("vapo", "parts"), ("process_supervision", "ranks"), ("trees", "turns")])
def test_recipes_that_are_whole_papers(name, only, tmp_path):
    """By the check that fits best; python evidence/proved.py --forks tries all checks of each."""
    proof = try_fork(name, tmp_path, only)
    assert broken(proof) == ({}, {}) and not proof.untried and proof.found


@pytest.mark.parametrize("typed, code, words", [
    ("", 0, ["grpo.py", "resume"]), ("--help", 0, ["What it cannot see"]),
    ("gae.py", 2, ["is no script"]), ("ROOT/nano/ppo.py", 2, ["nano/ppo.py"]),
    ("ROOT/ppo.py --only=kills", 2, ["kills", "resume"]), ("ROOT/ppo.py none.py", 2, ["none.py"]),
    ("ROOT/ppo.py --only=ids --group_size=2", 2, ["group_size"]),
    ("ROOT/grpo.py --only=ids --policy_path=none", 3, ["small run fails", "--policy_path is what"]),
    ("ROOT/ppo.py --only=ids", 3, ["; reward_path is '' here; the small run's"]),  # no other key
    ("ROOT/grpo.py --only=ids --batch_size=7", 3, ["--batch_size is what", "group_size is 3"]),
    ("ROOT/grpo.py --only=ids --reward_functions=mine.py:f", 3, [
        "difficulty", "rl_train.jsonl: no such file", "--prompts_path="]),
    ("ROOT/sft.py --only=parts --train_path=mine.py", 3, ["mine.py", "that you typed"]),
    ("ROOT/grpo.py --only=ids --reward_functions=mine.py:g", 3, ["no_package", "needs of yours"]),
    ("ROOT/grpo.py --only=ids --lora=2:4:q_proj", 3, ["q_proj", "GPT-2", "--policy_path="]),
    ("mine/grpo.py --only=ids", 3, ["NameError", "(mine/grpo.py, line ", "--batch_size"])])
def test_what_is_typed_wrong_is_one_line(typed, code, words, capsys):
    """And where the small run fails, which of what it has is the cause, as far as it says so."""
    write("mine.py", "f = lambda batch: [row['difficulty'] for row in batch['rows']]\n"
          "def g(batch):\n    import no_package")
    copy_of(os.path.abspath("mine"), [
        ("grpo.py", "    record = {}\n", "    record = not_there\n")])
    try:
        found, said = prove.main(typed.replace("ROOT", ROOT).split()), capsys.readouterr().out
    except BadInput as e:
        found, said = e.exit_code, f"{e}\n"
    assert found == code and all(word in said for word in words), said
    assert not code or said.count("\n") == 1, said


def test_an_error_of_its_own_is_one_line():
    done = subprocess.run([sys.executable, f"{ROOT}/tools/prove.py", "none.py"], text=True,
                          capture_output=True, check=False)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done

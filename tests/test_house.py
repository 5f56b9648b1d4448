"""Rules of the house: a key belongs to its script, every collective is marked, and nothing pickled is read."""
import ast
import glob
import os
import re

import pytest

from configurator import read_keys

from conftest import ROOT

SCRIPTS = ("ppo.py", "grpo.py", "sft.py", "rm.py", "recipes/dpo.py")


def tree_of(path):
    with open(os.path.join(ROOT, path), encoding="utf-8") as f:
        return ast.parse(f.read())


def imported(path):
    """The files of the repository that a file imports."""
    found = set()
    for node in ast.walk(tree_of(path)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        files = [name.replace(".", "/") + ".py" for name in names]
        found |= {file for file in files if os.path.isfile(os.path.join(ROOT, file))}
    return found


def closure(path):
    """The files that a script takes along."""
    seen, left = set(), [path]
    while left:
        for file in imported(left.pop()) - seen:
            seen.add(file)
            left.append(file)
    return seen


def own_keys(script):
    """The keys that stand in the script itself."""
    shared = {name for file in ("keys.py", "rl_keys.py") for name in read_keys(os.path.join(ROOT, file))}
    return read_keys(os.path.join(ROOT, script)).keys() - shared


@pytest.mark.parametrize("script", SCRIPTS)
def test_each_key_is_used_on_its_page_and_nowhere_else(script):
    keys = own_keys(script)
    used = {node.id for node in ast.walk(tree_of(script)) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    assert keys and keys <= used
    for file in closure(script):
        for node in ast.walk(tree_of(file)):  # config["key"], config.get("key"), system.key
            if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
                owner, name = ast.unparse(node.value), node.slice.value
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get" and node.args:
                owner, name = ast.unparse(node.func.value), getattr(node.args[0], "value", None)
            elif isinstance(node, ast.Attribute):
                owner, name = ast.unparse(node.value), node.attr
            else:
                continue
            assert not (owner.split(".")[-1] in ("config", "system") and name in keys), f"{file}, line {node.lineno}: {name}"


def test_each_shared_key_is_read():
    options = glob.glob("options/*.py", root_dir=ROOT)
    files = {*SCRIPTS, *options, *(file for script in SCRIPTS for file in closure(script))}
    read = {node.attr for file in files for node in ast.walk(tree_of(file)) if isinstance(node, ast.Attribute)}
    for file in ("keys.py", "rl_keys.py"):
        assert read_keys(os.path.join(ROOT, file)).keys() <= read


# a call of what says "A collective" in its docstring is marked # COLLECTIVE, and so is the class whose __init__ calls some
COLLECTIVES = {"Run", "first_batch", "sample_now", "score_here", "work"} | {
    node.name for folder in ("", "options/") for file in glob.glob(f"{folder}*.py", root_dir=ROOT)
    for node in ast.walk(tree_of(file)) if isinstance(node, ast.FunctionDef)
    and (ast.get_docstring(node) or "").startswith("A collective")}
OTHERS = r"(torch|math|os|os\.path)\.\w+|'[^']*'\.join|iterations|self\.to_save"  # no collectives


@pytest.mark.parametrize("script", ["ppo.py", "grpo.py", "options/roles.py", "rollout.py", "rewards.py", "run.py"])
def test_every_collective_is_marked_and_nothing_else(script):
    with open(os.path.join(ROOT, script), encoding="utf-8") as f:
        marked = {n for n, line in enumerate(f, 1) if "# COLLECTIVE" in line}
    used = set()
    for call in [node for node in ast.walk(tree_of(script)) if isinstance(node, ast.Call)]:
        function = ast.unparse(call.func)
        if function.split(".")[-1] in COLLECTIVES and not re.fullmatch(OTHERS, function):
            marks = marked & set(range(call.lineno, call.end_lineno + 1))
            assert marks, f"{script}:{call.lineno}: {function} is a collective"
            used |= marks
    assert used == marked, f"{script}: no collective is called on lines {sorted(marked - used)}"


# sandbox.py writes marshal, for the sandbox to read: nothing that comes back is read so
PICKLES = r"(pickle|cloudpickle|dill|joblib|shelve)(\..*)?|torch\.(save|load)|.*\.\w+_objects?(_list)?|allow_pickle|marshal\.load"


def test_no_pickle_anywhere():
    files = [file for folder in ("", "options/", "grading/", "tools/") for file in glob.glob(f"{folder}*.py", root_dir=ROOT)]
    assert len(files) >= 10
    for file in files:
        for node in ast.walk(tree_of(file)):
            name = ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else getattr(
                node, "module", None) or getattr(node, "name", None) or getattr(node, "arg", None)
            assert not re.fullmatch(PICKLES, name or ""), f"{file}: {name}"

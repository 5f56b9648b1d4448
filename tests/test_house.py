"""The rule of the house that a fork relies on: a key belongs to its script."""
import ast
import glob
import os

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

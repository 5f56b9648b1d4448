"""
Other systems than the one that the tests run on: a Mac is simulated, by taking away what Linux
alone has, so a script that uses it ends with a traceback. And what the requirements say.
"""
import builtins
import ctypes
import os
import re
import resource
import shutil
import sys

from packaging.requirements import Requirement

import tiny
from tiny import ROOT, keys_of, of_copy, run, well


def become_a_mac(rank):
    os.environ["TORCHELASTIC_RUN_ID"] = "none"  # as under torchrun
    of_copy(ROOT)(rank)  # all is imported anew; torch knows its own system
    for name in [name for name in vars(os) if name.startswith((
            "sched_", "memfd_", "pidfd", "eventfd", "splice", "posix_fallocate"))]:
        delattr(os, name)
    delattr(resource, "prlimit")
    sys.platform, opened, exists, library = "darwin", open, os.path.exists, ctypes.CDLL

    def elsewhere(path):
        """The path, or another one in the place of what Linux alone has."""
        return f"/none{path}" if str(path).startswith(("/proc", "/sys")) else path

    def no_library(*args, **kwargs):
        if kwargs:  # a package of others, which knows what it may call there
            return library(*args, **kwargs)
        raise OSError("there is no such call")

    builtins.open = lambda path, *args, **kwargs: opened(elsewhere(path), *args, **kwargs)
    os.path.exists = lambda path: exists(elsewhere(path))
    shutil.which = lambda name, *args, **kwargs: None
    ctypes.CDLL = no_library


def test_a_mac_runs_everything_but_the_sandbox(world, tmp_path):
    """PPO with a rule and a reward model; code as a reward is refused in one line."""
    keys = keys_of(world, "ppo.py", reward_functions=f"{world.rules}:letters,reward_model",
                   max_iters=1)
    out = well("ppo.py", tmp_path, keys, before=become_a_mac)
    assert tiny.read_jsonl(f"{out}/log.jsonl")[0]["mem/peak_mib"] == 0  # unknown there
    prompts = tiny.jsonl(tmp_path / "prompts.jsonl", [dict(prompt="a", tests=["assert f(1) == 1"])])
    keys = keys_of(world, "grpo.py", reward_functions="code", prompts_path=prompts, eval_path="")
    tiny.assert_one_line(run("grpo.py", tmp_path / "code", keys, before=become_a_mac), "grpo.py",
                         "bwrap", "Linux")


def requirements(name):
    with open(f"{ROOT}/{name}", encoding="utf-8") as f:
        lines = [line.partition("#")[0].strip() for line in f]
    return {r.name: r for r in map(Requirement, filter(None, lines))}


def test_the_lock_is_within_the_ranges():
    """And it is exact; the torch that the pages name is that of the lock."""
    lock = requirements("requirements.lock")
    versions = {name: str(r.specifier).removeprefix("==") for name, r in lock.items()}
    assert all(re.fullmatch(r"[\w.]+", version) for version in versions.values()), versions
    for name, r in requirements("requirements.txt").items():
        assert versions[name] in r.specifier, name
    for page in ("README.md", "requirements.txt"):
        with open(f"{ROOT}/{page}", encoding="utf-8") as f:
            assert set(re.findall(r"torch==([\w.]+)", f.read())) <= {versions["torch"]}, page

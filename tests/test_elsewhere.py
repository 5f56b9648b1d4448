"""
Other systems than the one that the tests run on. A Mac is simulated: what Linux alone has is taken away, so a script that uses
it ends with a traceback. And what the requirements say.
"""
import os
import re
import subprocess
import sys

from packaging.requirements import Requirement

import tiny
from conftest import ROOT
from tiny import forked, one_run

MAC = """
import builtins, ctypes, os, shutil, resource, sys
import campaign

os.environ["TORCHELASTIC_RUN_ID"] = "none"  # as under torchrun
for name in ["before_torch", "options", "grading", *campaign.OURS]:  # imported anew; torch and transformers know their own system
    sys.modules.pop(name, None)
for name in [name for name in vars(os) if name.startswith(("sched_", "memfd_", "pidfd", "eventfd", "splice", "posix_fallocate"))]:
    delattr(os, name)
for name in ("RLIMIT_SIGPENDING", "RLIMIT_OFILE", "prlimit"):
    if hasattr(resource, name):
        delattr(resource, name)
sys.platform = "darwin"
os_open, os_exists, run_usage = open, os.path.exists, resource.getrusage

def is_linux(path):
    return isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(("/proc", "/sys"))

def mac_open(path, *args, **kwargs):
    if is_linux(path):
        raise FileNotFoundError(2, "No such file or directory", path)
    return os_open(path, *args, **kwargs)

builtins.open = mac_open
os.path.exists = lambda path: not is_linux(path) and os_exists(path)
shutil.which = lambda name, *args, **kwargs: None

class Usage:
    ru_maxrss = 300 * 2**20  # in bytes there

resource.getrusage = lambda who: Usage

library = ctypes.CDLL

def no_library(*args, **kwargs):
    if kwargs:  # a package of others, which knows what it may call there
        return library(*args, **kwargs)
    raise OSError("there is no such call")

ctypes.CDLL = no_library
"""


CODE_REWARD = """
from grading import sandbox
from errors import BadInput

try:
    sandbox.check_sandbox()
except BadInput as e:
    print("refused:", e)
"""


def test_a_mac_runs_everything_but_the_sandbox(world, tmp_path):
    """PPO with a rule and a reward model, as under torchrun, whose death is then not noticed; code as a reward is refused."""
    args = world.ppo("out", reward_functions=f"{world.rule('letters')},reward_model", max_iters=1)
    (result,), = forked(str(tmp_path), {"mac": [one_run("ppo.py", (args, MAC + CODE_REWARD))]}).values()
    assert result["codes"] == [0] and result["stderr"] == [""], result
    assert tiny.read_log(f"{tmp_path}/mac/out")[0]["mem/peak_mib"] == 300
    assert re.search(r"^refused: .*bwrap, which needs Linux; run it in docker", result["stdout"][0], re.M), result


def test_windows_is_told_to_use_wsl():
    done = subprocess.run([sys.executable, "-c", "import sys; sys.platform = 'win32'; import before_torch, run_folder"], cwd=ROOT,
                          capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "WSL" in done.stderr, done.stderr


# ---------------------------------------------------------------------------------------------------------------------
# the requirements


def requirements(name):
    with open(os.path.join(ROOT, name), encoding="utf-8") as f:
        lines = [line.partition("#")[0].strip() for line in f]
    return {r.name: r for r in map(Requirement, filter(None, lines))}


def test_the_lock_is_within_the_ranges():
    """And it is exact; the torch that the README names is that of the lock."""
    lock = requirements("requirements.lock")
    versions = {name: str(r.specifier).removeprefix("==") for name, r in lock.items()}
    assert all(re.fullmatch(r"[\w.]+", version) for version in versions.values()), versions
    for name, r in (requirements("requirements.txt") | requirements("requirements-dev.txt")).items():
        assert versions[name] in r.specifier, name
    for page in ("README.md", "requirements.txt", "Dockerfile"):
        with open(os.path.join(ROOT, page), encoding="utf-8") as f:
            assert set(re.findall(r"torch==([\w.]+)", f.read())) <= {versions["torch"]}, page

"""Shared by the tests: the repository on the path, one thread, and the process that forks runs, started early."""
import collections
import functools
import os
import runpy
import socket
import subprocess
import sys


os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

import pytest  # noqa: E402
import torch  # noqa: E402


torch.set_num_threads(1)


def runs_scripts(item):
    return any(hasattr(item.module, name) for name in ("tiny", "forked", "in_a_row"))


def pytest_collection_modifyitems(items):
    """Files that run scripts come first, for they take longest: at the end, short ones keep all processes busy."""
    items.sort(key=lambda item: not runs_scripts(item))


def pytest_collection_finish(session):
    """While other tests run, start the process that forks the runs of some."""
    if not session.config.option.collectonly and any(map(runs_scripts, session.items)):
        import tiny

        tiny.start_forker()


@functools.cache
def bwrap_trouble():
    """Why bwrap does not work here, whatever grading/sandbox.py does with it; or ""."""
    try:
        done = subprocess.run("bwrap --ro-bind / / --unshare-pid --unshare-net true".split(),
                              capture_output=True, text=True)
    except OSError as e:
        return f"bwrap: {e.strerror}"
    return f"bwrap: {done.stderr.strip()}" if done.returncode else ""


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """tiny's world, one for all files: a test may add to it, and changes nothing that is there."""
    import tiny

    return tiny.build(str(tmp_path_factory.mktemp("world")))


@pytest.fixture(scope="session")
def families(tmp_path_factory):
    """{name: the folder of a language model of each family of models_of_the_world.py}"""
    import models_of_the_world

    root = tmp_path_factory.mktemp("families")
    return {name: models_of_the_world.make(root / name, name, context=1024) for name in models_of_the_world.FAMILIES}


@pytest.fixture
def run_here(monkeypatch, capsys):
    """A script of data/ in this process: exit code, stdout, stderr."""
    def run(script, *args):
        monkeypatch.setattr(sys, "argv", [script, *map(str, args)])
        monkeypatch.setattr(sys, "path", list(sys.path))
        monkeypatch.setattr(socket, "setdefaulttimeout", lambda seconds: None)  # it would outlive the test
        try:
            runpy.run_path(script, run_name="__main__")
            code = 0
        except SystemExit as e:
            code = e.code
        return code, *capsys.readouterr()
    return run


def pytest_runtest_setup(item):
    """Tests that are marked needs_bwrap run programs in the sandbox. Without bwrap they are skipped; and without a GPU, gpu's."""
    if item.get_closest_marker("gpu") and os.environ.get("QUARTET_GPU_TESTS") != "cpu" and not torch.cuda.is_available():
        pytest.skip("there is no GPU here")
    if item.get_closest_marker("needs_bwrap") and bwrap_trouble():
        pytest.skip(bwrap_trouble())


def pytest_terminal_summary(terminalreporter):
    """The last lines: how many tests were skipped, by reason."""
    reasons = collections.Counter(str(report.longrepr[2]).removeprefix("Skipped: ")
                                  for report in terminalreporter.stats.get("skipped", ()))
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"skipped {count:3}: {reason}")

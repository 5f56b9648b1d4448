"""runs/gpu.sh without a GPU: what it would do, that it says so, and the report of checks that pass, fail and hang."""
import importlib.util
import json
import os
import subprocess
import sys
import time

import pytest

import tiny
from conftest import ROOT
from tiny import forked, one_run


def load(name):
    """A file of runs/ as a module: the folder is not a package."""
    spec = importlib.util.spec_from_file_location(name, os.path.join(ROOT, "runs", f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


gpu, profiler = load("gpu"), load("gpu_profile")


def command(*arguments):
    environment = os.environ | dict(CUDA_VISIBLE_DEVICES="", PYTHON=sys.executable)
    return subprocess.run(["bash", "runs/gpu.sh", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)


def test_without_a_gpu_it_says_so_in_a_line():
    done = command()
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert "sees no GPU here; there is nothing to run" in done.stderr


def test_a_dry_run_lists_what_it_would_do():
    done = command("--dry-run")
    assert done.returncode == 0 and done.stderr == ""
    for words in ("-m pytest -q -m gpu", "tools/bench.py", "grpo.py config/arithmetic_grpo.py", "runs/gpu_profile.py"):
        assert words in done.stdout
    assert [line.partition(":")[0] for line in done.stdout.splitlines() if not line.startswith(" ")] == list(gpu.CHECKS)
    refused = command("everything")
    assert refused.returncode == 2 and "'everything' is no check; they are tests, toy" in refused.stderr


def test_what_is_missing_is_said_in_a_line(monkeypatch):
    monkeypatch.setattr(gpu, "NEEDED", ["torch", "no_such_module"])
    assert "no_such_module cannot be imported" in gpu.what_is_missing() and "\n" not in gpu.what_is_missing()
    monkeypatch.setattr(gpu, "NEEDED", [])
    monkeypatch.setattr(gpu, "TORCH", (99, 0))
    assert "torch 2.11 or later is needed, and this is" in gpu.what_is_missing()


def test_every_command_names_scripts_and_keys_that_there_are():
    from test_readme import check_command

    for check in gpu.CHECKS.values():
        for words in check.commands:
            if words[0] == "-m":
                assert all(os.path.exists(os.path.join(ROOT, x)) for x in words if x.endswith(".py"))
            elif words[0].startswith("runs/"):
                assert os.path.exists(os.path.join(ROOT, words[0]))
            else:
                check_command(["python", *words])


FIGURE = "import json, os; open(os.environ['QUARTET_FIGURES'], 'a').write(json.dumps(dict(name={!r}, value={})) + '\\n')"
HANGS = "import subprocess; print('hm', flush=True); subprocess.run(['sleep', '60'])"


def fakes():
    def unreadable():
        raise KeyError("eval/accuracy")

    one = [["-c", "print('fine')"]]
    return {
        "passes": gpu.Check("a check that passes", 20, [["-c", "print('first')"], ["-c", FIGURE.format("gpu busy", 93.25)]],
                            lambda: [gpu.figure("of its own", 2, "s")]),
        "fails": gpu.Check("one that fails", 20, [["-c", "import sys; print('oh'); sys.exit(3)"], ["-c", "print('never')"]]),
        "hangs": gpu.Check("one that hangs", 1, [["-c", HANGS]]),
        "unreadable": gpu.Check("one without its figures", 20, one, unreadable),
        "last": gpu.Check("the last", 20, one)}


def test_the_report_has_what_passed_failed_and_hung(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "OUT", str(tmp_path / "out"))
    monkeypatch.setattr(gpu, "CHECKS", fakes())
    began = time.monotonic()
    with pytest.raises(SystemExit) as e:
        gpu.all_of(gpu.CHECKS, {"GPU": "a fake"}, str(tmp_path / "report"))
    assert e.value.code == 1 and time.monotonic() - began < 10
    assert capsys.readouterr().out.endswith("report.md: fails, hangs, unreadable did not pass\n")
    report = json.loads((tmp_path / "report.json").read_text())
    outcomes = {name: done["outcome"] for name, done in report["checks"].items()}
    assert outcomes == dict(passes="passed", fails="failed", hangs="timed out", unreadable="failed", last="passed")
    assert report["checks"]["fails"]["said"] == ["oh", "[python -c import sys; print('oh'); sys.exit(3): exit code 3]"]
    assert report["checks"]["hangs"]["said"][0] == "hm" and "time is up" in report["checks"]["hangs"]["said"][-1]
    text = (tmp_path / "report.md").read_text()
    for line in ("- GPU: a fake", "of PPO in which the GPU computes | 90 % at least | 93.25 |",
                 "| of its own |  | - | 2 s |", "## fails: failed", "    oh"):
        assert line in text, line
    assert "| toy accuracy after | the same after 20 iterations of GRPO | above 80 % | missing |" in text
    assert "nobody has run it" in gpu.page(None) and "nobody" not in gpu.page(report) and "93.25" in gpu.page(report)


def test_when_the_time_is_over_the_rest_is_not_run(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "OUT", str(tmp_path / "out"))
    monkeypatch.setattr(gpu, "MINUTES", 0.05)
    with pytest.raises(SystemExit) as e:
        gpu.all_of(fakes(), {}, str(tmp_path / "report"))
    assert e.value.code == 1 and not (tmp_path / "out").exists()


def test_the_page_is_what_the_command_makes():
    with open(gpu.PAGE, encoding="utf-8") as f:
        assert f.read() == gpu.page(gpu.kept_report())


def test_busy_is_the_union_of_the_kernels():
    assert profiler.busy_seconds([(0, 2), (5, 6), (1, 3), (5.25, 5.5)]) == 4
    assert profiler.busy_seconds([]) == 0


def test_an_iteration_is_profiled(tmp_path):
    """On a CPU, where torch's operations stand in the place of kernels."""
    world = tiny.build(str(tmp_path / "world"))
    args = ["--out=prof", "ppo.py", *world.ppo("out", max_iters=4, eval_path="")]
    result, = forked(str(tmp_path), {"profile": [one_run("runs/gpu_profile.py", args)]})["profile"]
    assert result["codes"] == [0], result["stderr"]
    assert "aten::addmm" in result["stdout"][0] and "the GPU was busy" not in result["stdout"][0]
    assert os.path.getsize(tmp_path / "profile" / "prof" / "trace.json") > 1000
    assert len(tiny.read_log(tmp_path / "profile" / "out")) == 5

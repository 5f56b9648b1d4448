"""evidence/bench.py, data/arithmetic/pairs.py, and the shell scripts of runs/."""
import os
import re
import shlex
import shutil
import signal
import subprocess

import pretend
import pytest
from configurator import read_arguments, read_keys
from tiny import ROOT, Started, jsonl, keys_of, read_jsonl, typed, well

ENV = dict(os.environ, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")


def test_bench_prints_one_page(tmp_path):
    """The machine's speeds are given: to measure them takes long."""
    def before(rank):
        from tools import work

        work.products, work.bandwidth = lambda *_: 1e12, lambda *_: 1e10

    keys = dict(d_model=32, n_layer=1, n_head=2, n_kv_head=1, d_ff=48, vocab_size=64, batch_size=4,
                prompt_length=6, max_new_tokens=5, repeats=1, micro_batch_size=2, device_type="cpu",
                work="sampling,update")
    result = Started("evidence/bench.py", typed(keys), str(tmp_path), before=before).wait()
    took = r"[\d.]+ s \(\d+%\)"
    for line in (rf"^  quartet: {took}, \d+ tokens/s, [\d.]+ ms a step",
                 rf"^  transformers: {took}", rf"^  update: {took}, [\d.]+ TFLOP/s$"):
        assert re.search(line, result.out[0], re.MULTILINE), (line, result)


def test_pairs_are_right_over_wrong_but_for_the_mistakes(world, tmp_path):
    """By a model that has learned to answer 5 or 6, whatever it is asked."""
    right = {"1+4=": "5", "2+4=": "6"}
    rows = jsonl(tmp_path / "sft.jsonl", [dict(prompt="1+4=", completion=x) for x in "56"])
    asked = jsonl(tmp_path / "rl.jsonl", [dict(prompt=x, answer=y) for x, y in right.items()])
    out = well("sft.py", tmp_path, keys_of(world, "sft.py", train_path=rows, val_path="",
                                           max_iters=40, batch_size=8, dtype="float32"))
    keys = dict(policy_path=f"{out}/policy", prompts_path=asked, pairs=40, max_new_tokens=4,
                dtype="float64")
    for more, how in (({}, {}), (dict(mistakes=0.25, name="noisy"), {}),
                      (dict(name="two"), dict(ranks=2, before=pretend.begin))):
        made = Started("data/arithmetic/pairs.py", typed(keys | more), str(tmp_path), **how).wait()
        assert set(made.codes) == {0}, made
    train, val, noisy, *same = (read_jsonl(tmp_path / f"{name}.jsonl") for name in (
        "pairs_train", "pairs_val", "noisy_train", "noisy_val", "two_val", "two_train"))
    assert len(train) == 40 and len(val) == 4 and same == [val, val, train]
    for row in train + val:
        assert row["chosen"] == right[row["prompt"]] != row["rejected"]
    swapped = [row | dict(chosen=row["rejected"], rejected=row["chosen"]) for row in train]
    assert all(row in pair for row, *pair in zip(noisy, train, swapped, strict=True))
    # of 40, each with probability 0.25: further away by chance in 1 of 1000 cases
    assert 3 <= sum(map(dict.__ne__, noisy, train)) <= 19


def noting(folder, after=""):
    """
    A copy of runs/, and a python that only notes what it is asked to run, in the file `said`. The
    environment of a script.
    """
    shutil.copytree(f"{ROOT}/runs", folder / "runs")
    python = folder / "python"
    python.write_text(f'#!/bin/bash\nprintf "%q " "$@" >> said; echo >> said\n{after}')
    python.chmod(0o755)
    return ENV | {"QUARTET_PYTHON": str(python), "PYTHON": str(python), "RANKS": "1"}


def hears_ctrl_c():
    """A shell ignores SIGINT to its end if it begins so, as these tests do behind nohup or &."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def bash(folder, *command, env, **how):
    return subprocess.run(["bash", *command], cwd=folder, env=env, capture_output=True, text=True,
                          **how)


@pytest.mark.parametrize("script, steps", [
    ("quickstart.sh", 8), ("calculator.sh", 6), ("code.sh", 5), ("overoptimize.sh", 8),
    ("judge.sh 1 labels", 6), ("judge.sh 1 reward", 4), ("vllm.sh 1", 5), ("smollm2.sh", 13),
    ("gpu.sh", 9)])  # the last two as on a GPU
def test_each_step_of_a_script_is_a_command_that_there_is(tmp_path, script, steps):
    """Its script is in the repository, and has its keys."""
    for name in ("out/arithmetic_sft/config.json", "data/arithmetic/noisy_train.jsonl", "bwrap"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('{"seed": 1}' * name.endswith(".json"))
    (tmp_path / "bwrap").chmod(0o755)
    env = noting(tmp_path) | dict(SFT="--max_iters=9", PAIRS="--pairs=10 --samples=2", RANKS="3",
                                  RM="--max_iters=9", PPO="--max_iters=9 --lora=2")
    env["PATH"] = f"{tmp_path}:{env['PATH']}"
    result = bash(tmp_path, *f"runs/{script}".split(), env=env)
    assert result.returncode == 0, result
    said = [shlex.split(line) for line in (tmp_path / "said").read_text().split("\n") if line]
    on_ranks = {args[2] for args in said if args[:2] == ["runs/ranks.py", "3"] and args[2:]}
    said = [args[2:] or ["-"] if args[0] == "runs/ranks.py" else args for args in said]
    said = [[f"{args[1].replace('.', '/')}.py", *args[2:]] if args[0] == "-m" else args
            for args in said if args[:2] not in (["-m", "pip"], ["-m", "pytest"])]
    said = [args for args in said if args[0][0] != "-" and args[-1][:4] != "out/"]
    assert len(said) == steps, said
    assert script in ("vllm.sh 1", "gpu.sh") or on_ranks == {args[0] for args in said} & {
        "sft.py", "rm.py", "ppo.py", "grpo.py", "data/arithmetic/pairs.py"}
    more = sum({"--max_iters=9", "--pairs=10", "--lora=2"} & {*args} != set() for args in said)
    assert more == (4 if script in ("quickstart.sh", "smollm2.sh") else 0), said
    shared = read_keys(f"{ROOT}/config/keys.py")
    for file, *args in said:
        if file == "tools/memory.py":  # behind it stands the command of a run
            file, *args = args
        keys = read_keys(f"{ROOT}/{file}")  # of those without keys nothing is asked
        read_arguments(keys | shared, [arg if arg.startswith("--") else f"{ROOT}/{arg}"
                                       for arg in args])
        assert keys or not args, (file, args)


@pytest.mark.parametrize("meets", [True, False])
def test_the_number_of_ranks_is_kept(tmp_path, meets):
    """By a run that goes on; by another seed it is typed, or found. And ranks that do not meet."""
    env = noting(tmp_path, "" if meets else '[[ "$*" != "runs/ranks.py "? ]]')
    (tmp_path / "out").mkdir()

    def quickstart(seed, **more):
        (tmp_path / "said").unlink(missing_ok=True)
        result = bash(tmp_path, "runs/quickstart.sh", str(seed), env=env | more)
        assert result.returncode == 0, result
        found = re.findall(r"(?m)^runs/ranks.py (\d+) sft.py", (tmp_path / "said").read_text())
        assert result.stdout.count("$ torchrun --nproc_per_node") == 4 * len(found)
        assert ("do not meet" in result.stdout) == (not meets and more.get("RANKS") != "1")
        assert "step 2 of 8\n" in result.stdout and "--watch" in result.stdout
        return found

    (tmp_path / "out" / "quickstart_seed").write_text("5 3\n")
    assert quickstart(5, RANKS="2") == ["3"] * meets
    assert quickstart(5, RANKS="2") == ["2"] * meets
    assert quickstart(5, RANKS="1") == []
    wrong = bash(tmp_path, "runs/quickstart.sh", "5", env=env | dict(RANKS="two"))
    assert wrong.returncode == 2 and "RANKS='two'" in wrong.stderr and wrong.stdout == ""


# a python that leaves what each step leaves, and a Ctrl-C in its call number $STOP, which ends well
STEPS = """
case "$1" in
    sft.py | ppo.py) made=policy ;;
    rm.py) made=reward_model ;;
esac
case "$1" in
    sft.py | rm.py | ppo.py) mkdir -p "out/arithmetic_${1%.py}" ;;
    tools/plot.py) touch "${3#--out=}" ;;
esac
if [ "$(wc -l < said)" = "$STOP" ]; then trap 'exit 0' INT; kill -INT 0; sleep 9; fi
if [ -n "${made-}" ]; then mkdir "out/arithmetic_${1%.py}/$made"; fi
"""


@pytest.mark.parametrize("stopped", [1, 6])
def test_quickstart_goes_on_after_ctrl_c(tmp_path, stopped):
    """
    What has ended is not repeated, the rest is; then, or with another seed, it begins anew, and
    deletes what README says, no other run. A wrong seed deletes nothing.
    """
    env, other = noting(tmp_path, STEPS), tmp_path / "out" / "arithmetic_grpo"
    other.mkdir(parents=True)

    def quickstart(seed, stop=0):
        """The steps of one call, in short: "sft.py sample.py"."""
        result = bash(tmp_path, "runs/quickstart.sh", str(seed), env=env | {"STOP": str(stop)},
                      start_new_session=True, preexec_fn=hears_ctrl_c)
        assert result.returncode == (130 if stop else 0), result
        said = (tmp_path / "said").read_text()
        (tmp_path / "said").unlink()
        assert said.count(f"--seed={seed} ") == said.count("--seed=")
        return re.findall(r"^\S*?(\w+\.py) ", said, re.MULTILINE)

    whole = ["prepare.py", "sft.py", "pairs.py", "rm.py", "sample.py", "ppo.py", "sample.py",
             "plot.py"]
    left = [step for i, step in enumerate(whole, 1) if i >= stopped or i in (1, 5, 7, 8)]
    assert quickstart(3, stop=stopped) == whole[:stopped]
    assert quickstart(3) == left
    assert quickstart(3) == whole
    quickstart(3, stop=stopped)
    there = {*tmp_path.rglob("*")}
    assert bash(tmp_path, "runs/quickstart.sh", "one", env=env).returncode == 2
    assert {*tmp_path.rglob("*")} == there
    assert quickstart(4) == whole and other.is_dir()

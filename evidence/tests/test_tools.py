"""evidence/bench.py, data/arithmetic/pairs.py, and the shell scripts of runs/."""
import glob
import os
import re
import shlex
import shutil
import signal
import subprocess
from types import SimpleNamespace

import pytest
from configurator import read_arguments, read_keys
from tiny import ROOT, Started, jsonl, keys_of, read_jsonl, typed, well

ENV = dict(os.environ, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")


def test_bench_prints_one_page(tmp_path):
    keys = dict(d_model=32, n_layer=1, n_head=2, n_kv_head=1, d_ff=48, vocab_size=64, batch_size=4,
                prompt_length=6, max_new_tokens=5, repeats=1, micro_batch_size=2, device_type="cpu",
                work="sampling,update")
    result = Started("evidence/bench.py", typed(keys), str(tmp_path)).wait()
    took = r"[\d.]+ s \(\d+%\)"
    for line in (rf"^  quartet: {took}, \d+ tokens/s, [\d.]+ ms a step",
                 rf"^  transformers: {took}", rf"^  update: {took}, [\d.]+ TFLOP/s$"):
        assert re.search(line, result.out[0], re.MULTILINE), (line, result)


def test_the_limits_of_bench_by_hand(tmp_path):
    """A layer of 32 x 48, two heads that share keys; 4 responses of 4 tokens to prompts of 6."""
    from evidence.bench import make_models, work_of

    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
                 num_attention_heads=2, num_key_value_heads=1)
    make_models(str(tmp_path), sizes, 6, 5, 0.0, SimpleNamespace(device_type="cpu"), ppo=False)
    layer, head = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48, 32 * 64

    def trunk(T):  # two FLOP a weight and token; twice two for each pair of tokens and each number
        return 2 * layer * T + 2 * 2 * T * T * 32

    def alike(flop, numbers):  # some versions of transformers multiply matrices for the angles
        return pytest.approx(flop, rel=2e-3), numbers

    found = work_of("grpo", str(tmp_path), 4, 6, 4, 5, samples=2)
    read = 5 * (layer + head + 3 * 32) + 4 * 4 * (6 + 4 / 2) * 2 * 16
    steps = 4 * (trunk(10) - trunk(6) + 4 * 2 * head)
    assert found["rollout"] == alike(2 * trunk(6) + steps, read)
    assert found["score"] == alike(4 * (trunk(10) + 4 * 2 * head), 0)
    assert found["update"] == alike(3 * 4 * (trunk(10) + 4 * 2 * head), 0)
    found = work_of("ppo", str(tmp_path), 4, 6, 4, 5)
    assert found["rollout"] == alike(4 * trunk(6) + steps, read)
    assert found["score"] == alike(4 * (4 * trunk(10) + 2 * 4 * 2 * head), 0)
    assert found["update"] == alike(4 * 4 * 3 * (2 * trunk(10) + 4 * 2 * head), 0)


def test_pairs_are_right_over_wrong_but_for_the_mistakes(world, tmp_path):
    """In a copy of the task, by a model that has learned to answer 5 or 6, whatever it is asked."""
    task = tmp_path / "data" / "arithmetic"
    shutil.copytree(f"{ROOT}/data/arithmetic", task, ignore=shutil.ignore_patterns("*.jsonl"))
    for path in [*glob.glob(f"{ROOT}/*.py"), f"{ROOT}/config"]:
        os.symlink(path, tmp_path / os.path.basename(path))
    rows = jsonl(tmp_path / "sft.jsonl", [dict(prompt="1+4=", completion=x) for x in "56"])
    jsonl(task / "rl_train.jsonl", [dict(prompt="1+4=", answer="5"), dict(prompt="2+4=", answer=6)])
    policy = well("sft.py", tmp_path / "run", keys_of(
        world, "sft.py", train_path=rows, val_path="", max_iters=40, batch_size=8,
        dtype="float32")) + "/policy"
    for more in ([], ["--mistakes=0.25", "--name=noisy"]):
        result = Started(f"{task}/pairs.py", [f"--policy_path={policy}", "--pairs=40",
                                              "--max_new_tokens=4", *more], str(tmp_path)).wait()
        assert result.codes == [0], result
    found = {name: read_jsonl(f"{task}/{name}.jsonl")
             for name in ("pairs_train", "pairs_val", "noisy_train", "noisy_val")}
    assert len(found["pairs_train"]) == 40 and len(found["pairs_val"]) == 4
    assert found["noisy_val"] == found["pairs_val"]
    right = {"1+4=": "5", "2+4=": "6"}
    for row in found["pairs_train"] + found["pairs_val"]:
        assert row["chosen"] == right[row["prompt"]] != row["rejected"]
    swapped = 0
    for noisy, row in zip(found["noisy_train"], found["pairs_train"], strict=True):
        swapped += noisy != row
        assert noisy in (row, row | dict(chosen=row["rejected"], rejected=row["chosen"]))
    # of 40, each with probability 0.25: further away by chance in 1 of 1000 cases
    assert 3 <= swapped <= 19


def noting(folder, after=""):
    """A python that only notes what it is asked to run, in the file `said`."""
    python = folder / "python"
    python.write_text(f'#!/bin/bash\nprintf "%q " "$@" >> said; echo >> said\n{after}')
    python.chmod(0o755)
    return ENV | {"QUARTET_PYTHON": str(python)}


def hears_ctrl_c():
    """A shell ignores SIGINT to its end if it begins so, as these tests do behind nohup or &."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def bash(folder, *command, env):
    return subprocess.run(["bash", *command], cwd=folder, env=env, capture_output=True, text=True)


@pytest.mark.parametrize("script, steps", [
    ("quickstart.sh", 8), ("calculator.sh", 6), ("code.sh", 5), ("overoptimize.sh", 8),
    ("judge.sh 1 labels", 6), ("judge.sh 1 reward", 4), ("vllm.sh 1", 5)])
def test_each_step_of_a_script_is_a_command_that_there_is(tmp_path, script, steps):
    """Its script is in the repository, and has its keys."""
    shutil.copytree(f"{ROOT}/runs", tmp_path / "runs")
    for name, text in (("out/arithmetic_sft/config.json", '{"seed": 1}'), ("bwrap", ""),
                       ("data/arithmetic/noisy_train.jsonl", "")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "bwrap").chmod(0o755)
    env = noting(tmp_path) | dict(SFT="--max_iters=9", PAIRS="--pairs=10 --samples=2",
                                  RM="--max_iters=9", PPO="--max_iters=9 --lora=2")
    env["PATH"] = f"{tmp_path}:{env['PATH']}"
    result = bash(tmp_path, *f"runs/{script}".split(), env=env)
    assert result.returncode == 0, result
    said = [shlex.split(line) for line in (tmp_path / "said").read_text().split("\n") if line]
    said = [args for args in said if args[0] != "-" and not args[0].startswith("out/")]
    assert len(said) == steps, said
    more = sum({"--max_iters=9", "--pairs=10", "--lora=2"} & {*args} != set() for args in said)
    assert more == (4 if script == "quickstart.sh" else 0), said
    shared = read_keys(f"{ROOT}/config/keys.py")
    for file, *args in said:
        keys = read_keys(f"{ROOT}/{file}")  # of those without keys nothing is asked
        read_arguments(keys | shared, [arg if arg.startswith("--") else f"{ROOT}/{arg}"
                                       for arg in args])
        assert keys or not args, (file, args)


def test_quickstart_deletes_what_the_readme_says(tmp_path):
    """And a wrong seed deletes nothing."""
    shutil.copytree(f"{ROOT}/runs", tmp_path / "runs")
    for of in ("sft", "rm", "ppo", "grpo"):
        (tmp_path / "out" / f"arithmetic_{of}").mkdir(parents=True)
    env = noting(tmp_path)
    assert bash(tmp_path, "runs/quickstart.sh", "one", env=env).returncode == 2
    assert len(os.listdir(tmp_path / "out")) == 4 and not (tmp_path / "said").exists()
    assert bash(tmp_path, "runs/quickstart.sh", env=env).returncode == 0
    assert os.listdir(tmp_path / "out") == ["arithmetic_grpo"]


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
    """What has ended is not repeated, the rest is; then, or with another seed, it begins anew."""
    shutil.copytree(f"{ROOT}/runs", tmp_path / "runs")
    env = noting(tmp_path, STEPS)

    def quickstart(seed, stop=0):
        """The steps of one call, in short: "sft.py sample.py"."""
        result = subprocess.run(
            ["bash", "runs/quickstart.sh", str(seed)], cwd=tmp_path, env=env | {"STOP": str(stop)},
            capture_output=True, text=True, start_new_session=True, preexec_fn=hears_ctrl_c)
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
    assert quickstart(4) == whole

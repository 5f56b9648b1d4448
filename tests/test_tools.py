"""tools/bench.py, data/arithmetic/pairs.py and the shell scripts, as a user runs them."""
import glob
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from conftest import ROOT
from tiny import arguments, forked, one_run, read_jsonl, write_byte_tokenizer

ENV = dict(os.environ, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")


# bench.py runs ppo.py and grpo.py as new processes; a fork has torch and transformers in memory already
FORKS = """
import os, runpy, subprocess, sys

def run(command, **_):
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            sys.argv = command[1:]
            runpy.run_path(command[1], run_name="__main__")
        finally:
            os._exit(0)  # of a script that has failed there is no complete log, which bench.py would miss
    os.waitpid(pid, 0)
    return subprocess.CompletedProcess(command, 0, "", "")

subprocess.run = run
"""


def test_bench_prints_one_page(tmp_path):
    keys = dict(d_model=32, n_layer=1, n_head=2, n_kv_head=1, d_ff=48, vocab_size=64, batch_size=4, group_size=2, prompt_length=6,
                max_new_tokens=5, repeats=1, micro_batch_size=2, device_type="cpu", run_keys="rollout_batch_size=3,head_chunk=2")
    result, = forked(str(tmp_path), {"bench": [one_run("tools/bench.py", (arguments(keys), FORKS))]})["bench"]
    assert result["codes"] == [0], result
    page = result["stdout"][0]
    for line in (r"^  quartet: [\d.]+ s, \d+ tokens/s, \d+ GB/s$", r"^  transformers: [\d.]+ s, \d+ tokens/s, \d+ GB/s$",
                 r"^  ppo.py: .* iteration [\d.]+ s; 5 tokens ", r"^  grpo.py: .* iteration [\d.]+ s; 5 tokens "):
        assert re.search(line, page, re.MULTILINE), (line, page)


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the repository, for what writes beside itself; with a model that answers 5 or 6, whatever the problem."""
    folder = tmp_path_factory.mktemp("repository")
    for file in glob.glob(os.path.join(ROOT, "*.py")):
        shutil.copy(file, folder)
    task = folder / "data" / "arithmetic"
    task.mkdir(parents=True)
    for file in glob.glob(os.path.join(ROOT, "data", "arithmetic", "*.py")):
        shutil.copy(file, task)
    write_byte_tokenizer(task / "tokenizer", ["<think>", "</think>"])
    demonstrations = [{"prompt": "1+4=", "completion": str(answer)} for answer in (5, 6)]
    for name in ("sft_train", "sft_val"):
        (task / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in demonstrations))
    (task / "rl_train.jsonl").write_text('{"prompt": "1+4=", "answer": "5"}\n{"prompt": "2+4=", "answer": "6"}\n')
    keys = dict(d_model=16, d_ff=16, n_layer=1, n_head=2, max_iters=60, batch_size=16, learning_rate=0.02, device_type="cpu",
                train_path=task / "sft_train.jsonl", val_path=task / "sft_val.jsonl", tokenizer_path=task / "tokenizer",
                out_dir=folder / "out" / "sft")
    forked(str(folder), {"sft": [one_run("sft.py", arguments(keys))]}).succeeded()
    return folder


def test_pairs_are_right_over_wrong_but_for_the_mistakes(copy):
    args = [f"--policy_path={copy}/out/sft/policy", "--pairs=40", "--max_new_tokens=4"]
    runs = [one_run(f"{copy}/data/arithmetic/pairs.py", args + more) for more in ([], ["--mistakes=0.25", "--name=noisy"])]
    forked(str(copy), {"pairs": runs}).succeeded()
    rows = {name: read_jsonl(copy / "data" / "arithmetic" / f"{name}.jsonl")
            for name in ("pairs_train", "pairs_val", "noisy_train", "noisy_val")}
    assert (len(rows["pairs_train"]), len(rows["pairs_val"])) == (40, 4) and rows["noisy_val"] == rows["pairs_val"]
    right = {"1+4=": "5", "2+4=": "6"}
    for row in rows["pairs_train"] + rows["pairs_val"]:
        assert row["chosen"] == right[row["prompt"]] != row["rejected"]
    swapped = [noisy == row | dict(chosen=row["rejected"], rejected=row["chosen"])
               for noisy, row in zip(rows["noisy_train"], rows["pairs_train"], strict=True)]
    assert 3 <= sum(swapped) <= 19  # of 40, each with probability 0.25: further away by chance in 1 of 1000 cases
    assert [row for row, swap in zip(rows["noisy_train"], swapped, strict=True) if not swap] == [
        row for row, swap in zip(rows["pairs_train"], swapped, strict=True) if not swap]


def test_a_copy_without_options_runs_and_names_the_file_that_a_key_needs(copy):
    """In processes of their own, which have imported nothing."""
    assert not (copy / "options").exists()
    given = ["--max_iters=1", "--d_model=16", "--d_ff=16", "--n_layer=1", "--n_head=2", "--batch_size=4", "--device_type=cpu"]
    given += [f"--{key}={copy}/data/arithmetic/{name}" for key, name in dict(
        train_path="sft_train.jsonl", val_path="sft_val.jsonl", tokenizer_path="tokenizer").items()]
    runs = [subprocess.Popen([sys.executable, "sft.py", *given, f"--out_dir=out/{name}", *more], cwd=copy, env=ENV, text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            for name, *more in (["plain"], ["tracked", "--report_to=wandb"])]
    (plain, said), (_, refused) = (run.communicate() for run in runs)
    assert runs[0].returncode == 0 and "saved out/plain/policy" in plain, said
    assert runs[1].returncode == 2 and refused.count("\n") == 1 and "options/trackers.py" in refused, refused


def test_shell_scripts_parse():
    for script in [*glob.glob(os.path.join(ROOT, "runs", "*.sh")), os.path.join(ROOT, ".ci", "run")]:
        subprocess.run(["bash", "-n", script], check=True)


def test_quickstart_deletes_what_the_readme_says(tmp_path):
    """In a folder with runs/ and what it left the last time, where python only notes what it is asked."""
    shutil.copytree(os.path.join(ROOT, "runs"), tmp_path / "runs")
    for of in ("sft", "rm", "ppo", "grpo"):
        (tmp_path / "out" / f"arithmetic_{of}").mkdir(parents=True)
    for picture in ("arithmetic_ppo.png", "arithmetic_ppo.html"):  # an earlier quartet's would be refused at the end
        (tmp_path / "out" / picture).write_text("old")
    python = tmp_path / "python"
    python.write_text('#!/bin/bash\necho "$@" >> said\n')
    python.chmod(0o755)

    def quickstart(*seed):
        return subprocess.run(["bash", "runs/quickstart.sh", *seed], cwd=tmp_path, env=ENV | {"QUARTET_PYTHON": str(python)})

    assert quickstart("one").returncode == 2 and len(os.listdir(tmp_path / "out")) == 6
    assert quickstart().returncode == 0
    assert os.listdir(tmp_path / "out") == ["arithmetic_grpo"] and "--seed=1\n" in (tmp_path / "said").read_text()
    assert "`out/arithmetic_{sft,rm,ppo}`" in open(f"{ROOT}/README.md").read()

    # Ctrl-C in the first step, which saves and exits 0, as sft.py does: no second step begins
    (tmp_path / "said").unlink()
    python.write_text("#!/bin/bash\ntrap 'exit 0' INT\necho \"$@\" >> said\nsleep 60 & wait\n")
    run = subprocess.Popen(["bash", "runs/quickstart.sh"], cwd=tmp_path, env=ENV | {"QUARTET_PYTHON": str(python)},
                           stderr=subprocess.PIPE, text=True, start_new_session=True)
    while not (tmp_path / "said").exists():
        time.sleep(0.05)
    os.killpg(run.pid, signal.SIGINT)  # a terminal sends it to all processes of the group
    assert "the last command above resumes" in run.communicate()[1] and run.returncode == 130
    assert (tmp_path / "said").read_text() == "data/arithmetic/prepare.py\n"

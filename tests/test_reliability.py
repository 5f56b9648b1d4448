"""
What must not happen, made to happen: ranks that start from different things, that die or hang, signals, a full disk, bad input.
(Kills at every point, and that a resumed run has the same bits, are tests/campaign.py's.) Most runs here are forked.
"""
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch

from engine.tokenizers import load_tokenizer
from model import load_model

import tiny
from conftest import ROOT
from tiny import forked, one_run


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return tiny.build(str(tmp_path_factory.mktemp("world")))


def is_one_line(text, pattern, script="ppo.py", where=""):
    """Whether this is all that a rank said on stderr: one line, of our form, that says so."""
    return re.fullmatch(re.escape(script) + r": error" + re.escape(where) + r": [^\n]+\n", text) and re.search(pattern, text)


# ---------------------------------------------------------------------------------------------------------------------
# ranks that start

OPEN = "import os; os.dup2(os.open({!r}, os.O_RDONLY), 99)"  # one path, /proc/self/fd/99, is another file on each rank
STARTS = {  # name -> (what the two ranks have at that path, key, what is said)
    "other prompts": (("rl_train", "rl_val"), "prompts_path",
                      r"rank 1 differs from rank 0 in the content of /proc/self/fd/99/rows.jsonl;"),
    "other weights": (("policy", "other_policy"), "policy_path", r"rank 1 differs from rank 0 in the weights of policy;"),
    "no prompts at all": ((None, None), "prompts_path", "/proc/self/fd/99/rows.jsonl: no such file"),
}


def folder_of(folder, file):
    """The folder, with a copy of the file as rows.jsonl in it."""
    os.makedirs(folder)
    shutil.copy(file, f"{folder}/rows.jsonl")
    return folder


NOT_SHARED = """
import os
from engine import run_folder
open_run = run_folder.open_run
def elsewhere(*args, **kwargs):
    os.mkdir("there")
    os.chdir("there")
    return open_run(*args, **kwargs)
"""


@pytest.fixture(scope="module")
def starts(world, tmp_path_factory):
    from engine.checkpoint import save_model

    folder = str(tmp_path_factory.mktemp("starts"))
    policy = load_model(world.policy)
    with torch.no_grad():
        policy.hf.lm_head.weight[0, 0] += 1e-6
    save_model(f"{folder}/other_policy", policy, load_tokenizer(world.policy))
    cases = {}
    for name, (contents, key, _) in STARTS.items():
        paths = [content and (f"{folder}/{content}" if content.startswith("other") else getattr(world, content))
                 for content in contents]
        given = "/proc/self/fd/99"
        if key == "prompts_path":  # a file's name says what it holds
            given = f"{given}/rows.jsonl"
            paths = [file and folder_of(f"{folder}/{name} {rank}", file) for rank, file in enumerate(paths)]
        cases[name] = [one_run("ppo.py", *((world.ppo("out", value_init="policy", **{key: given}),
                                            OPEN.format(path) if path else "") for path in paths))]
    cases["another setting"] = [one_run("ppo.py", world.ppo("out", kl_coef=0.1), world.ppo("out", kl_coef=0.2))]
    args = world.sft("deep/er/out")
    cases["another disk"] = [one_run("sft.py", (args, NOT_SHARED), (args, NOT_SHARED + "run_folder.open_run = elsewhere"))]
    late = "import time; import torch.distributed as dist; dist.init_process_group = lambda **_: time.sleep(60)"
    cases["nobody comes"] = [one_run("sft.py", *[(world.sft("out", timeout=2), late)] * 2)]
    return folder, forked(folder, cases, at_once=4)


@pytest.mark.parametrize("name", STARTS)
def test_ranks_start_from_the_same_or_not_at_all(starts, name):
    folder, results = starts
    result, (_, _, pattern) = results[name][0], STARTS[name]
    assert result["codes"] == [2, 2], result
    assert is_one_line(result["stderr"][0], pattern), result
    assert result["stderr"][1] == "", result
    assert max(result["seconds"]) < 20 and not os.path.exists(f"{folder}/{name}/out")


def test_ranks_start_with_the_same_settings(starts):
    result = starts[1]["another setting"][0]
    assert result["codes"] == [2, 2] and "differs from rank 0 in kl_coef;" in result["stderr"][0], result
    assert not os.path.exists(f"{starts[0]}/another setting/out")


def test_an_out_dir_that_is_not_shared_is_found_at_the_start(starts):
    """Rank 1 is in another folder, so that the same relative out_dir is another one, as on a host with a disk of its own."""
    result = starts[1]["another disk"][0]
    assert result["codes"] == [2, 2] and result["stderr"][1] == "", result
    assert is_one_line(result["stderr"][0], "rank 1 does not see .*out_dir 'deep/er/out'.* --out_dir", "sft.py"), result
    assert os.listdir(f"{starts[0]}/another disk/deep/er/out") == [".lock"] and not os.listdir(f"{starts[0]}/another disk/there")


def test_ranks_that_cannot_meet_say_what_to_look_at(starts):
    """As hosts whose names stand for 127.0.1.1. After `timeout`, which gloo alone would exceed fivefold."""
    result = starts[1]["nobody comes"][0]
    assert result["codes"] == [1, 1] and max(result["seconds"]) < 15, result
    for where, said in zip(("", " (rank 1)"), result["stderr"], strict=True):
        assert is_one_line(said, "MASTER_ADDR is 127.0.0.1.*GLOO_SOCKET_IFNAME", "sft.py", where)


# ---------------------------------------------------------------------------------------------------------------------
# ranks that die or hang; signals; a full disk

AT = tiny.NOW + tiny.ONCE + tiny.ends(6) + """
import threading
import data, loss, parallel, rewards, rollout
from engine import optimizers, run_folder
def fail():
    raise KeyError("a bug")

def later(seconds, number):
    threading.Timer(seconds, os.kill, (os.getpid(), number)).start()
"""
LOST = {  # name -> (what rank 1 does in iteration 1, its exit code, the phase in which rank 0 misses it)
    "dies in the rollout": ("once(rollout, 'generate_in_parts', die)", -9, "iteration 1, rollout"),
    "hangs in the update": ("once(loss, 'learning_rate_at', hang)", 9, "iteration 1, update"),
    "has a bug": ("once(rewards, 'score_sequences', fail)", 1, "iteration 1, score"),
}
NUDGE = """
import torch
from engine import optimizers, run_folder
take = optimizers.step
def step(optimizer, lr):
    take(optimizer, lr)
    if now == 1:
        with torch.no_grad():
            optimizer.param_groups[0]["params"][-1].mul_(1.01)
optimizers.step = step
"""
SLOW_READ = """
from engine import checkpoint
read_tensors = checkpoint.read_tensors
def slow(folder, stem):
    if stem in ("value_model_optimizer", "batches"):
        print("slow", stem)
        time.sleep(3)  # longer than the timeout of 2 s
    return read_tensors(folder, stem)
checkpoint.read_tensors = slow
"""
SLOW = "f = rollout.sample\ndef slow(*args):\n    time.sleep(1)\n    return f(*args)\nrollout.sample = slow\n"
TERM, INT = int(signal.SIGTERM), int(signal.SIGINT)
ASK = f"""
asked = []
def ask():  # once, or it would be a second signal, which does not ask
    asked or asked.append(os.kill(os.getpid(), {TERM}))
"""
SIGNALS = {  # name -> (code of each rank, exit code of all, the most seconds)
    "SIGINT to both": ([SLOW + f"later(2.5, {INT})"] * 2, 0, 14),
    "SIGTERM to rank 1 alone": (["", ASK + "once(loss, 'learning_rate_at', ask)"], 0, 20),
    "twice": ([f"once(loss, 'learning_rate_at', lambda: [later(0.1, {TERM}), later(1.6, {TERM}), "
               "time.sleep(60)])"], 128 + TERM, 30),
}
LIMIT = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))"  # no file may be larger: EFBIG


@pytest.fixture(scope="module")
def hurt(world, tmp_path_factory):
    folder, cases = str(tmp_path_factory.mktemp("hurt")), {}
    for name, (action, _, _) in LOST.items():
        args = world.ppo("out", timeout=3)
        cases[name] = [one_run("ppo.py", (args, AT), (args, AT + action))]
    args = world.ppo("out", max_iters=4)
    cases["drifts"] = [one_run("ppo.py", (args, AT), (args, AT + NUDGE))]
    args = world.ppo("out", timeout=2, reward_timeout=1, staleness=1, eval_path="")
    cases["slow disk at a resume"] = [one_run("ppo.py", (args, tiny.stops(2)), args),
                                      one_run("ppo.py", (args, AT), (args, AT + SLOW_READ))]
    whole = dict(max_iters=4, eval_interval=1, scale_scores="running")  # which is the loop's own state
    for name, (codes, _, _) in SIGNALS.items():
        args = world.ppo("out", **whole)
        cases[name] = [one_run("ppo.py", *((args, AT + code) for code in codes)), one_run("ppo.py", *(args for _ in codes))]
    constant = dict(lr_decay="constant", value_lr_decay="constant", keep_best=True, eval_interval=1)
    short, long = (world.ppo("out", max_iters=n, checkpoint_interval=1, **constant) for n in (2, 4))
    cases["full"] = [one_run("ppo.py", *[args] * 2) for args in (short, (long, LIMIT), long)]
    cases["never full"] = [one_run("ppo.py", *[long] * 2)]
    for ranks in (1, 2):
        cases[f"whole {ranks}"] = [one_run("ppo.py", *[world.ppo("out", **whole)] * ranks)]
    return folder, forked(folder, cases, at_once=6)  # most of them sleep


def contents(folder):
    """{path: bytes} of what a finished run has left in folder/out: but for times and memory in the log."""
    found = {}
    for d, _, files in os.walk(os.path.join(folder, "out")):
        for name in set(files) - {".lock", "log.jsonl"}:
            with open(os.path.join(d, name), "rb") as f:
                found[os.path.relpath(os.path.join(d, name), folder)] = f.read()
    found["log"] = [{k: v for k, v in r.items() if not k.startswith(("time/", "mem/"))} for r in tiny.read_log(f"{folder}/out")]
    return found


@pytest.mark.parametrize("name", LOST)
def test_a_lost_rank_is_one_line_that_names_the_phase(hurt, name):
    result, (_, code, phase) = hurt[1][name][0], LOST[name]
    assert result["codes"] == [1, code], result
    pattern = f"error: {phase}: lost touch with the other ranks.*resume with the same command"
    assert is_one_line(result["stderr"][0], pattern), result
    assert max(result["seconds"]) < 20


def test_a_rank_that_drifts_is_named_before_any_other_suspect(hurt):
    """Nudged at a step of iteration 1, and the next audit is due at 10: the log-probs of iteration 2 are what differs first."""
    result = hurt[1]["drifts"][0]
    assert result["codes"] == [1, 1] and result["stderr"][1] == "", result
    assert is_one_line(result["stderr"][0], r"iteration 2: the ranks have drifted apart: (policy|value_model), parameter "
                                            r"[\w.]+, differs on rank 0 and rank 1"), result


def test_ranks_wait_for_one_that_reads_its_checkpoint_slowly(hurt):
    """A slow disk is not a lost rank: weights, optimizers, and batches that were sampled ahead."""
    short, long = hurt[1]["slow disk at a resume"]
    assert short["codes"] == [0, 0], short
    assert long["codes"] == [0, 0] and long["stderr"] == ["", ""] and min(long["seconds"]) > 6, long
    assert long["stdout"][1].split("\n")[:-1] == ["slow value_model_optimizer", "slow batches"], long


@pytest.mark.parametrize("name", SIGNALS)
def test_signals_stop_all_ranks_and_lose_nothing(hurt, name):
    folder, results = hurt
    (stopped, again), (codes, code, seconds) = results[name], SIGNALS[name]
    assert stopped["codes"] == [code] * len(codes) and max(stopped["seconds"]) < seconds, stopped
    if code == 0:
        assert "resume with the same command" in stopped["stdout"][0]
        assert re.search(r"checkpoint-00000\d$", again["stdout"][0].split("resuming from ")[1].split("\n")[0]), again
    assert all(re.fullmatch(r"(SIG\w+: stopping at the next safe point[^\n]*\n)?", said) for said in stopped["stderr"]), stopped
    assert again["codes"] == [0] * len(codes), again
    assert contents(f"{folder}/{name}") == contents(f"{folder}/whole {len(codes)}")


def test_a_full_disk_is_one_line_and_what_was_there_stays(hurt):
    folder, results = hurt
    begun, full, again = results["full"]
    assert begun["codes"] == again["codes"] == [0, 0]
    assert full["codes"] == [1, 1] and full["stderr"][1] == "", full
    assert is_one_line(full["stderr"][0], r"cannot be written \(.*[Ff]ile too large.*resume with the same command"), full
    assert "checkpoint-000002" in again["stdout"][0], again
    after, whole = contents(f"{folder}/full"), contents(f"{folder}/never full")
    cards = [found.pop("out/best_policy/README.md") for found in (after, whole)]  # a card has the max_iters of who wrote it
    assert after == whole and cards[0].replace(b"max_iters = 2\n", b"max_iters = 4\n") == cards[1]
    assert not [f for f in os.listdir(f"{folder}/full/out") if f.startswith((".tmp", ".old"))]


# ---------------------------------------------------------------------------------------------------------------------
# as a user runs it


def alive(pids):
    return [pid for pid in pids if os.path.exists(f"/proc/{pid}") and "Z" not in open(f"/proc/{pid}/stat").read().split()[2]]


def test_torchrun_restarts_and_its_death_is_not_outlived(world, tmp_path):
    """Rank 1 is killed once, --max-restarts goes on; then the launcher alone is killed, and its workers die with it."""
    args = world.ppo(tmp_path / "out", max_iters=100_000, checkpoint_interval=2)
    wrapper = tiny.wrap(tmp_path / "wrapper.py", AT.replace("now == 1", "now == 5") + f"""
with open({str(tmp_path)!r} + "/pids", "a") as f:
    f.write(f"{{os.getpid()}} ")
def die_once():
    if RANK == 1 and not os.path.exists({str(tmp_path)!r} + "/died"):
        open({str(tmp_path)!r} + "/died", "w").close()
        die()
once(loss, "learning_rate_at", die_once)
""")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max-restarts=3",
               wrapper, os.path.join(ROOT, "ppo.py"), *args]
    with open(tmp_path / "said", "w") as said:
        launcher = subprocess.Popen(command, stdout=said, stderr=said, cwd=ROOT,
                                    env=os.environ | dict(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", PYTHONPATH=ROOT))
    try:
        for _ in range(1800):
            time.sleep(0.1)
            if (tmp_path / "died").exists() and "resuming from" in (tmp_path / "said").read_text():
                break
        else:
            raise AssertionError((tmp_path / "said").read_text())
        workers = [int(pid) for pid in (tmp_path / "pids").read_text().split()][-2:]
        assert len(alive(workers)) == 2
        launcher.kill()
        launcher.wait()
        for _ in range(100):
            time.sleep(0.1)
            if not alive(workers):
                break
        assert not alive(workers)
    finally:
        launcher.kill()
    # and the same command, which must not find out_dir locked
    log = tiny.read_log(tmp_path / "out") if os.path.getsize(tmp_path / "out" / "log.jsonl") else []
    args = [a for a in args if "max_iters" not in a] + [f"--max_iters={max(len(log), 8) + 2}"]
    result, = forked(str(tmp_path), {"again": [one_run("ppo.py", args)]})["again"]
    assert result["codes"] == [0] and "resuming from" in result["stdout"][0], result

"""
What must not happen, made to happen: ranks that start from different things, that hang or have a bug, slow and full disks, a
second signal. (Kills at every point, and that a resumed run has the same bits, are tests/campaign.py's.)
"""
import os
import re
import shutil
import signal
import time

import pytest
import torch

from tokenizer import load_tokenizer
from load import load_model

import tiny
from tiny import forked, is_one_line, one_run


# ---------------------------------------------------------------------------------------------------------------------
# ranks that start

OPEN = "import os; os.dup2(os.open({!r}, os.O_RDONLY), 99)"  # one path, /proc/self/fd/99, is another file on each rank
NOT_SHARED = """
import os
import run_folder
open_run = run_folder.open_run
def elsewhere(*args, **kwargs):
    os.mkdir("there")
    os.chdir("there")
    return open_run(*args, **kwargs)
if RANK == 1:
    run_folder.open_run = elsewhere
"""
NOBODY_COMES = "import time; import torch.distributed as dist; dist.init_process_group = lambda **_: time.sleep(60)"
SAID = {  # what is another on rank 1 -> what rank 0 says
    "prompts": ["rank 1 differs from rank 0", "the content of /proc/self/fd/99/rows.jsonl;"],
    "weights": ["rank 1 differs from rank 0", "the weights of policy;"],
    "setting": ["rank 1 differs from rank 0", "kl_coef;"],
    "disk": ["rank 1 does not see ", "out_dir 'deep/er/out'", " --out_dir"]}


@pytest.fixture(scope="module")
def starts(world, tmp_path_factory):
    from checkpoint import save_model

    folder = str(tmp_path_factory.mktemp("starts"))
    policy = load_model(world.policy)
    with torch.no_grad():
        policy.hf.lm_head.weight[0, 0] += 1e-6
    save_model(f"{folder}/other_policy", policy, load_tokenizer(world.policy))
    for name, file in (("train", world.rl_train), ("val", world.rl_val)):
        os.makedirs(f"{folder}/{name}")
        shutil.copy(file, f"{folder}/{name}/rows.jsonl")

    def opened(paths, **keys):
        args = world.ppo("out", value_init="policy", **keys)
        return one_run("ppo.py", *((args, OPEN.format(path)) for path in paths))

    here, late = world.ppo("deep/er/out"), world.ppo("out", timeout=2)
    return forked(folder, {
        "prompts": [opened([f"{folder}/train", f"{folder}/val"], prompts_path="/proc/self/fd/99/rows.jsonl")],
        "weights": [opened([world.policy, f"{folder}/other_policy"], policy_path="/proc/self/fd/99")],
        "setting": [one_run("ppo.py", world.ppo("out", kl_coef=0.1), world.ppo("out", kl_coef=0.2))],
        "disk": [one_run("ppo.py", *[(here, NOT_SHARED)] * 2)],
        "nobody comes": [one_run("ppo.py", *[(late, NOBODY_COMES)] * 2)]}, at_once=4)


@pytest.mark.parametrize("name", SAID)
def test_ranks_start_from_the_same_or_not_at_all(starts, name):
    result, = starts[name]
    is_one_line(result, "ppo.py", SAID[name])
    assert max(result["seconds"]) < 20 and not os.path.exists(starts.out(name))
    if name == "disk":
        assert os.listdir(f"{starts.folder}/disk/deep/er/out") == [".lock"] and not os.listdir(f"{starts.folder}/disk/there")


def test_ranks_that_cannot_meet_say_what_to_look_at(starts):
    """As hosts whose names stand for 127.0.1.1. After `timeout`, which gloo alone would exceed fivefold."""
    result, = starts["nobody comes"]
    assert result["codes"] == [1, 1] and max(result["seconds"]) < 15, result
    for where, said in zip(("", r" \(rank 1\)"), result["stderr"], strict=True):
        assert re.fullmatch(rf"ppo\.py: error{where}: [^\n]*MASTER_ADDR is 127.0.0.1[^\n]*GLOO_SOCKET_IFNAME[^\n]*\n", said), said


# ---------------------------------------------------------------------------------------------------------------------
# ranks that hang or have a bug; a slow disk, a full one; two signals

AT = tiny.NOW + tiny.ONCE + tiny.ends(6) + """
import threading
import loss, rewards
def fail():
    raise KeyError("a bug")

def later(seconds, number):
    threading.Timer(seconds, os.kill, (os.getpid(), number)).start()
"""
LOST = {  # name -> (what rank 1 does in iteration 1, its exit code, the phase in which rank 0 misses it)
    "hangs in the update": ("once(loss, 'learning_rate_at', hang)", 9, "iteration 1, update"),
    "has a bug": ("once(rewards, 'score_sequences', fail)", 1, "iteration 1, score"),
}
SLOW_DISK = """
import time
import checkpoint
def slow(name, there):
    original = getattr(checkpoint, name)
    def slowly(*args):
        if there in args:
            print("slow", there)
            time.sleep(3)  # longer than the timeout of 2 s
        return original(*args)
    setattr(checkpoint, name, slowly)
"""
SLOW_SAVE = f"{SLOW_DISK}slow('write_tensors', 'value_model_optimizer')\n"
SLOW_READ = f"{SLOW_DISK}slow('read_tensors', 'value_model_optimizer')\nslow('read_tensors', 'batches')\n"
TERM, INT = int(signal.SIGTERM), int(signal.SIGINT)
TWICE = f"once(loss, 'learning_rate_at', lambda: [later(0.1, {INT}), later(1.6, {TERM}), time.sleep(60)])"
LIMIT = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))"  # no file may be larger: EFBIG


@pytest.fixture(scope="module")
def hurt(world, tmp_path_factory):
    cases = {}
    args = world.ppo("out", timeout=3)
    for name, (action, _, _) in LOST.items():
        cases[name] = [one_run("ppo.py", (args, AT), (args, AT + action))]
    args = world.ppo("out", timeout=2, reward_timeout=1, staleness=1, eval_path="")
    cases["slow disk"] = [one_run("ppo.py", (args, tiny.stops(2) + SLOW_SAVE), args),
                          one_run("ppo.py", args, (args, SLOW_READ))]
    cases["two signals"] = [one_run("ppo.py", *[(world.ppo("out"), AT + TWICE)] * 2)]
    short, long = (world.ppo("out", max_iters=n, checkpoint_interval=1) for n in (1, 2))
    cases["full disk"] = [one_run("ppo.py", *[args] * 2) for args in (short, (long, LIMIT), long)]
    return forked(tmp_path_factory.mktemp("hurt"), cases, at_once=6)  # most of them sleep


@pytest.mark.parametrize("name", LOST)
def test_a_lost_rank_is_one_line_that_names_the_phase(hurt, name):
    (result,), (_, code, phase) = hurt[name], LOST[name]
    assert result["codes"] == [1, code], result
    assert re.fullmatch(rf"ppo\.py: error: {phase}: lost touch with the other ranks[^\n]*resume with the same command[^\n]*\n",
                        result["stderr"][0]), result
    assert max(result["seconds"]) < 20


def test_ranks_wait_for_one_that_writes_or_reads_its_checkpoint_slowly(hurt):
    """A slow disk is not a lost rank: weights, optimizers, and batches that were sampled ahead."""
    saved, resumed = hurt["slow disk"]
    for result, seconds in ((saved, 3), (resumed, 6)):
        assert result["codes"] == [0, 0] and min(result["seconds"]) > seconds, result
    assert saved["stdout"][0].count("slow value_model_optimizer") == 1 and resumed["stderr"] == ["", ""]
    assert resumed["stdout"][1].split("\n")[:-1] == ["slow value_model_optimizer", "slow batches"], resumed


def test_a_second_signal_ends_a_run_that_has_not_stopped(hurt):
    """Ctrl-C asks; what comes later does not. (That a run which is asked loses nothing, test_by_hand.py shows.)"""
    result, = hurt["two signals"]
    assert result["codes"] == [128 + TERM] * 2 and max(result["seconds"]) < 30, result
    said, other = result["stderr"]
    assert re.fullmatch(r"SIGINT: stopping at the next safe point[^\n]*\n", said) and not other, result


def test_a_full_disk_is_one_line_and_what_was_there_stays(hurt):
    begun, full, again = hurt["full disk"]
    assert begun["codes"] == again["codes"] == [0, 0]
    is_one_line(full, "ppo.py", ["cannot be written", "ile too large", "resume with the same command"], 1)
    assert "checkpoint-000001" in again["stdout"][0], again
    assert not [f for f in os.listdir(hurt.out("full disk")) if f.startswith((".tmp", ".old"))]


# ---------------------------------------------------------------------------------------------------------------------
# what is edited, damaged or cut between a run and its resume

COPY = """
import os, shutil
for source, name in ((f"{ROOT}/rules.py", "mine.py"), (f"{ROOT}/rules.py", "too.py"), (f"{ROOT}/question.txt", "ask.txt"),
                     (f"{ROOT}/rl_val.jsonl", "val.jsonl"), (f"{ROOT}/sft_val.jsonl", "shown.jsonl")):
    shutil.copy(source, name)
open("chat.jinja", "w").write("{{ messages }}")
for name in ("judge", "reward", "policy"):
    shutil.copytree(f"{ROOT}/{name}", f"my_{name}")
"""
FLIP = """
def flip(file):
    with open(file, "r+b") as f:
        f.seek(-3, 2)
        last = f.read(1)
        f.seek(-3, 2)
        f.write(bytes([last[0] ^ 1]))
def add(file, text):
    with open(file, "a") as f:
        f.write(text)
def without(file, *places):
    lines = open(file).read().splitlines(True)
    open(file, "w").writelines(line for i, line in enumerate(lines) if i not in places)
"""
TEXTS = dict(reward_functions="mine.py:letters,0.5*too.py:odd,judge", judge_path="my_judge", judge_template="ask.txt",
             ref_path="my_policy", eval_path="val.jsonl", eval_interval=1, keep_best=True, chat_template="chat.jinja")
PAIRS = dict(teacher="my_reward", demonstrations_path="shown.jsonl")
BACK = "shutil.copy(f'{ROOT}/%s/model.safetensors', 'my_%s')"
CHAINS = {  # script: one run after the other in one folder; what is done before each, what is then said, whether it is refused
    "grpo": [
        (COPY, [], False),
        ("flip('my_judge/model.safetensors')", ["judge_path", "my_judge"], True),
        (BACK % ("judge", "judge") + "; add('ask.txt', '?')", ["judge_template", "ask.txt"], True),
        ("shutil.copy(f'{ROOT}/question.txt', 'ask.txt'); flip('my_policy/model.safetensors')", ["ref_path", "my_policy"], True),
        (BACK % ("policy", "policy"), [], False),
        ("add('mine.py', '# better\\n'); add('too.py', '\\nx = 1\\n'); without('val.jsonl', 3); add('chat.jinja', '!')",
         ["chat.jinja", "mine.py", "too.py", "val.jsonl"], False),
        ("flip('out/best_policy/model.safetensors')", ["out/best_policy"], False),
        ("shutil.rmtree('out/best_policy')", ["out/best_policy"], False),
        ("", [], False),
        ("without('out/samples.jsonl', 2, 3)", ["out/samples.jsonl"], False),
        ("without('out/log.jsonl', 0)", ["out/log.jsonl", "out/samples.jsonl"], False),
        ("os.truncate('out/log.jsonl', 40); os.remove('out/samples.jsonl')", ["out/log.jsonl"], False)],
    "rm": [
        (COPY, [], False),
        ("flip('my_reward/model.safetensors')", ["teacher", "my_reward"], True),
        (BACK % ("reward", "reward") + "; without('shown.jsonl', 0)", ["shown.jsonl"], False),
        ("os.remove('out/log.jsonl')", ["out/log.jsonl"], False)]}


@pytest.fixture(scope="module")
def edited(world, tmp_path_factory):
    jobs = {}
    for script, chain in CHAINS.items():
        for number, (edit, *_) in enumerate(chain):
            iterations = 2 + max(0, number - dict(grpo=4, rm=1)[script])
            keys = (TEXTS if script == "grpo" else PAIRS) | dict(max_iters=iterations, lr_decay="constant")
            run = getattr(world, script)("out", **keys), f"import os, shutil\nROOT = {world.root!r}\n{FLIP}{edit}"
            jobs[f"{script} {number}"] = one_run(f"{script}.py", run) | dict(folder=script)
    return tiny.in_a_row(tmp_path_factory.mktemp("edited"), jobs)


@pytest.mark.parametrize("script", CHAINS)
def test_what_is_edited_damaged_or_cut_before_a_resume_is_said(edited, script):
    """Once, and nothing else is; where it would be another run, it is refused."""
    for number, (_, words, refused) in enumerate(CHAINS[script]):
        outcome, = edited[f"{script} {number}"]
        if refused:
            assert outcome["kind"] == "BadInput" and all(word in outcome["message"] for word in words), outcome
            continue
        said = sorted(line for line in outcome["stdout"].splitlines() if line.startswith("warning: "))
        assert outcome["kind"] == "" and len(said) == len(words), (number, outcome)
        assert all(any(word in line for line in said) for word in words), (words, said)
    if script == "grpo":  # what was damaged was replaced
        best = load_model(f"{edited.out('grpo')}/best_policy")
        assert all(p.isfinite().all() for p in best.parameters()) and load_tokenizer(best.path)


# ---------------------------------------------------------------------------------------------------------------------
# torchrun

# torchrun as it is, but that its workers are forks of it. Rank 1 is killed once; when it is back, the launcher alone is killed.
TORCHRUN = """
import dataclasses, os, runpy, signal, sys
from torch.distributed import run
import campaign, tiny

def worker(_, *script):
    with open("pids", "a") as f:
        f.write(f"{os.getpid()} ")
    sys.argv = [*script]
    tiny.run_patches(DEEDS, int(os.environ["RANK"]), map(sys.modules.get, campaign.OURS))
    runpy.run_path(sys.argv[0], run_name="__main__")

launch = run.elastic_launch
run.elastic_launch = lambda config, entrypoint: launch(dataclasses.replace(config, start_method="fork"), worker)
run.run(run.parse_args(sys.argv[1:]))
"""
DEEDS = tiny.NOW + tiny.ONCE + tiny.ends(0) + """
import loss
def deed():
    if not os.path.exists("died"):
        open("died", "w").close()
        die()
    os.kill(os.getppid(), signal.SIGKILL)
if RANK == 1:
    once(loss, "learning_rate_at", deed)
"""


def alive(pid):
    return os.path.exists(f"/proc/{pid}") and "Z" not in open(f"/proc/{pid}/stat").read().split()[2]


def test_torchrun_restarts_and_its_death_is_not_outlived(world, tmp_path):
    """--max-restarts goes on from the checkpoint, and workers die with their launcher."""
    (tmp_path / "torchrun.py").write_text(f"DEEDS = {DEEDS!r}\n{TORCHRUN}")
    options = ["--standalone", "--nproc_per_node=2", "--max-restarts=3", "--monitor-interval=0.1"]
    script = [f"{tiny.ROOT}/sft.py", *world.sft("out", max_iters=1000, checkpoint_interval=1)]
    (result,), = forked(str(tmp_path), {"run": [one_run(str(tmp_path / "torchrun.py"), [*options, *script])]}).values()
    assert result["codes"] == [-signal.SIGKILL] and "resuming from out/checkpoint-" in result["stdout"][0], result
    pids = (tmp_path / "run" / "pids").read_text().split()
    began = time.monotonic()
    while any(alive(pid) for pid in pids):
        assert time.monotonic() - began < 10
        time.sleep(0.1)
    assert len(pids) == 4

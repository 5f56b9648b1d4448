"""
What must not happen, made to happen: ranks that start from different things, meet nobody, hang, or
have a bug; rules that fail or hang; slow disks; a second signal. (Kills at any call, and of
torchrun alone: campaign.py.) A terminal, a pipe or a disk that no longer takes the texts; sabotage
that stops a run before the step, in one line that names it; and another system.
"""
import builtins
import ctypes
import glob
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file
from torch.optim.optimizer import register_optimizer_step_pre_hook

import errors
import parallel
from checkpoint import hash_of_model, list_checkpoints
from small_world import rooms_of, wrap
from tiny import (ROOT, assert_one_line, assert_same_run, assert_stopped, at, keys_of,
                  of_copy, read_jsonl, read_log, run, save_random, well, write)


def on(rank, name, first):
    """For `before`: on this rank first(*args) comes before each call of a room's function."""
    return lambda mine: mine == rank and wrap(rooms_of(ROOT), name, first)


# ranks that start


@pytest.mark.parametrize("typed, file, old, new", [
    (["--kl_coef=0.4"], "rules.py", "", ""), ([], "val.jsonl", "}", ', "level": 1}'),
    ([], "rules.py", "a number for", "one for")])
def test_ranks_start_with_the_same_or_not_at_all(world, tmp_path, typed, file, old, new):
    """Other keys on one rank, another field of a held-out row, another file of a rule."""
    def before(rank):
        os.chdir(str(rank))  # the same relative paths on each host
        sys.argv += typed * rank

    for host in "0", "1":
        os.mkdir(tmp_path / host)
        shutil.copy(world.rl_val, tmp_path / host / "val.jsonl")
        shutil.copy(world.rules, tmp_path / host / "rules.py")
    text = (tmp_path / "1" / file).read_text()
    assert old in text
    write(tmp_path / "1" / file, text.replace(old, new, 1))
    keys = keys_of(world, "grpo.py", eval_path="val.jsonl", reward_functions="rules.py:letters")
    result = run("grpo.py", tmp_path, keys, ranks=2, before=before)
    assert_one_line(result, "grpo.py", "on rank 1", "other settings, rows")
    assert not [*tmp_path.rglob("out")]


def test_a_folder_that_only_rank_0_sees(world, tmp_path):
    """Each machine has an older run there, and nothing of it is touched."""
    keys = keys_of(world, "sft.py", zero_stage="2")
    for place in (tmp_path, there := tmp_path / "there"):
        well("sft.py", place, keys | dict(max_iters=1))
    before = sorted(there.rglob("*"))
    result = run("sft.py", tmp_path, keys, ranks=2,
                 before=on(1, "open_folder", lambda *_: os.chdir(there)))
    assert_one_line(result, "sft.py", "on rank 1", "does not see", "out_dir 'out'")
    assert sorted(there.rglob("*")) == before
    assert not glob.glob(f"{tmp_path}/out/.new-*")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_meets_nobody_ends_after_the_timeout(world, tmp_path, rank):
    def alone(_):
        os.environ |= dict(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE="2",
                           MASTER_ADDR="127.0.0.1", MASTER_PORT=str(29000 + os.getpid() % 3000))

    began = time.time()
    result = run("sft.py", tmp_path, keys_of(world, "sft.py", timeout=2), before=alone)
    said = result.err[0].splitlines()  # before it torch complains of the socket
    assert result.codes == [1] and "timeout = 2" in said[-1], result
    assert len(said) == 1 or rank == 1 and "sft.py" not in "".join(said[:-1]), said
    assert time.time() - began < 90


# ranks that hang or have a bug; slow disks


def test_a_rank_that_hangs_is_one_line_that_names_the_phase(world, tmp_path):
    """Of the other rank. (One that is killed: tests/test_parallel.py.)"""
    def hang(iteration, *_):
        while iteration == 1:
            time.sleep(0.1)
            if os.path.getsize("stderr-0"):  # the other rank has given up
                os._exit(9)

    keys = keys_of(world, "grpo.py", timeout=4, reward_timeout=2)
    result = run("grpo.py", tmp_path, keys, ranks=2, before=on(1, "learning_rate_at", hang))
    assert result.codes == [1, 9], result
    assert re.fullmatch(r"grpo.py: error: iteration 1, update: lost touch with another rank"
                        r"[^\n]*\n", result.err[0]), result


def test_ranks_wait_for_one_whose_disk_is_slow(world, tmp_path):
    """It is not lost: neither while it reads a checkpoint, nor while it writes one."""
    def slow(folder, stem, *_):
        if stem == "policy_optimizer":
            print("slow", flush=True)
            time.sleep(6)  # longer than the timeout

    keys = keys_of(world, "sft.py", timeout=4, val_path="")
    stopped = run("sft.py", tmp_path, keys, ranks=2, before=at(1, signal.SIGTERM))
    assert_stopped(stopped, tmp_path)
    result = run("sft.py", tmp_path, keys, ranks=2, before=lambda rank: (
        on(1, "read_tensors", slow)(rank), on(0, "write_tensors", slow)(rank)))
    assert result.codes == [0, 0], result
    assert [said.count("slow") for said in result.out] == [1, 1], result


def test_a_kill_before_the_last_older_checkpoint_goes(world, tmp_path):
    """The run that resumes saves nothing more, and deletes it."""
    def die(out_dir, iteration, keep):
        if iteration == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    keys = keys_of(world, "sft.py", checkpoint_interval=1, max_iters=2)
    whole = well("sft.py", tmp_path / "whole", keys)
    assert run("sft.py", tmp_path, keys, before=on(0, "delete_older", die)).codes == [-9]
    assert sorted(os.listdir(well("sft.py", tmp_path, keys))) == sorted(os.listdir(whole))


# requests to stop


def closes(rank):
    """A terminal closes: the shell and the kernel send a SIGHUP each, and no text can be shown."""
    reader, writer = os.openpty()
    for number in (1, 2):
        os.dup2(writer, number)
    errors.outlast_readers()

    def close():
        os.close(reader)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGHUP)

    at(1, close)(rank)


def under_nohup(rank):
    closes(rank)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def test_a_run_saves_when_its_terminal_is_closed(world, tmp_path):
    """And under nohup it goes on."""
    keys = keys_of(world, "sft.py")
    whole = well("sft.py", tmp_path / "whole", keys)
    assert_stopped(run("sft.py", tmp_path, keys, before=closes), tmp_path)
    assert list_checkpoints(f"{tmp_path}/out")
    assert_same_run(whole, well("sft.py", tmp_path, keys))
    assert_same_run(whole, well("sft.py", tmp_path / "nohup", keys, before=under_nohup))


TALK = r"""
import sys
import errors
for _ in range(9999):
    errors.say("\u00e9 \u27c2 \ud800")
print("last", end="")
print("done", file=sys.stderr)
"""


@pytest.mark.parametrize("shell, shown", [
    ("{} | head -n 1", "done\n\u00e9 \u27c2 \\ud800\n0 0"), ("{} >&-", "done\n0"),
    ("PYTHONIOENCODING=ascii {} | tail -n 1 | cut -c 1-6", "done\nlast\n0 0 0"),
    ("{} >/dev/full", "one line\n1")])
def test_texts_that_nobody_can_read_harm_nobody(tmp_path, shell, shown):
    """Without a reader, in other encodings, closed; but a full disk is said."""
    program = write(tmp_path / "talk.py", TALK)
    shell = shell.format(f"{sys.executable} {program}") + '; echo "${PIPESTATUS[@]}"'
    done = subprocess.run(["bash", "-c", shell], capture_output=True, encoding="utf-8",
                          env=os.environ | dict(PYTHONPATH=ROOT, PYTHONUTF8="1"))
    found = done.stderr + done.stdout
    if "full" in shell:
        assert "cannot be written" in done.stderr
        found = done.stderr.count("\n") * "one line\n" + done.stdout
    assert found == f"{shown}\n"


# other models


@pytest.mark.parametrize("script, key, more", [
    ("grpo.py", "ref_path", {}), ("rm.py", "init_from", dict(lora="2"))])
def test_a_run_does_not_go_on_with_other_models(world, tmp_path, script, key, more):
    """
    With other weights in the folder of a frozen model it is refused; with the old ones not, by
    another number of ranks. The policy may change beside its reference: its weights are the
    checkpoint's.
    """
    model, policy = (shutil.copytree(world.policy, tmp_path / x) for x in ("model", "policy"))
    given = dict(policy_path=policy) if script == "grpo.py" else {}
    keys = keys_of(world, script, **more | given) | {key: model}
    whole = well(script, tmp_path / "whole", keys)
    assert run(script, tmp_path, keys, before=at(2, signal.SIGTERM)).codes == [0]
    for folder in (model, policy):
        save_random(folder, seed=77)
    log = read_log(f"{tmp_path}/out")
    assert_one_line(run(script, tmp_path, keys, ranks=1 + (script == "grpo.py")), script,
                    f"{model} has other weights", "--out_dir")
    assert read_log(f"{tmp_path}/out") == log
    shutil.copytree(world.policy, model, dirs_exist_ok=True)
    out = well(script, tmp_path, keys, ranks=2)
    name = "reward_model" if script == "rm.py" else "policy"
    assert_same_run(whole, out, [name], 1e-9)


def test_the_hash_of_a_model(world, tmp_path):
    """Of its weights and its config.json, with an adapter's also those of its base."""
    model, adapter = (shutil.copytree(world.policy, tmp_path / x) for x in ("model", "adapter"))
    os.remove(adapter / "config.json")
    write(adapter / "adapter_config.json", json.dumps(dict(base_model_name_or_path=str(model))))
    os.rename(adapter / "model.safetensors", adapter / "adapter_model.safetensors")
    known = {hash_of_model(str(model)), hash_of_model(str(adapter))}
    assert {hash_of_model(name) for name in ("a/other", "/none", "../a", "a b", "a/b/c")} == {None}
    for file in ("README.md", "config.json", "model-00002-of-00002.safetensors"):
        write(model / file, " ")
        now = {hash_of_model(str(model)), hash_of_model(str(adapter))}
        assert now == known if file == "README.md" else not now & known
        known = now


# rules of the user's

RULE = """
import os, re, subprocess

def late(batch):
    letters = [sum(ch in "abcd" for ch in text) / 4 for text in batch["completions"]]
    if os.environ.get("RANK") == "1" and batch["rows"] and os.path.exists("wrong"):
        deed, now = open("wrong").read().split()
        log = open("out/log.jsonl") if os.path.exists("out/log.jsonl") else ()
        if len([*log]) == int(now):
            re.fullmatch("(a+)+b", "a" * 60) if deed == "hangs" else letters[99]  # line 10
    return letters

def asked(batch):
    me = os.getpid()
    subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -INT {me}; sleep 0.5; kill -TERM {me}"])
    re.fullmatch("(a+)+b", "a" * 60)
"""


def test_a_rule_that_hangs_or_fails_on_one_rank_saves_the_run_and_is_named(world, tmp_path):
    """With its file and line; when it is mended, the same command goes on."""
    rule = write(tmp_path / "mine.py", RULE)
    keys = keys_of(world, "grpo.py", reward_functions=f"{rule}:late", timeout=6, reward_timeout=3)
    whole = well("grpo.py", tmp_path / "whole", keys)
    for deed, now in (("hangs", 1), ("failed", 2)):
        write(tmp_path / "wrong", f"{deed} {now}")
        result = run("grpo.py", tmp_path, keys, ranks=2)
        assert_one_line(result, "grpo.py", "on rank 1", f"'late' {deed} at mine.py, line 10",
                        f"saved before iteration {now}", code=1)
        assert len(read_log(f"{tmp_path}/out")) == now
    os.remove(tmp_path / "wrong")
    assert_same_run(whole, well("grpo.py", tmp_path, keys, ranks=2), tolerance=1e-9)


def test_two_requests_end_a_run_whose_rule_lets_no_other_thread_run(world, tmp_path):
    rule = write(tmp_path / "mine.py", RULE)
    keys = keys_of(world, "grpo.py", reward_functions=f"{rule}:asked", eval_path="")
    result = run("grpo.py", tmp_path, keys)
    assert result.codes == [128 + signal.SIGTERM], result
    assert result.err[0].count("\n") == 1 and result.err[0].startswith("SIGINT: stopping"), result


# sabotage: what one rank, or one of two computations of the same thing, gets wrong

def saboteur(deed, ranks):
    """For `before`: the deed, in iteration 1 on the last rank unless its name says otherwise."""
    def before(rank):
        from model import Model
        from run import Run

        rooms, runs, mine = rooms_of(ROOT), [], rank == ranks - 1

        def due(*deeds):
            return deed in deeds and mine and runs[0].iteration == 1

        def weights(name):
            part = runs[0].models[name].get_parameter("hf.transformer.ln_f.bias").data
            return parallel.my_part(part).view(-1)

        def enter(run, phase):
            runs[:] = [run]
            if phase != "rollout":  # before it the audit has passed
                return
            if deed == "another reference everywhere" and run.iteration == 0:
                weights("ref_policy")[2] += 0.25
            if due("a bit of the reference"):
                weights("ref_policy").view(torch.int64)[0] ^= 1
            if due("a bit of the policy"):  # not the last one, which a step may round away
                weights("policy").view(torch.int64)[0] ^= 1 << 12
            for name in ("policy", "value_model"):
                if due(f"a weight of {name}"):
                    weights(name)[0] = torch.nan

        def step(optimizer, *args):
            with open(f"steps-{rank}", "a") as f:
                f.write(".")
            if due("a moment"):
                state = list(optimizer.state.values())[-1]
                parallel.my_part(state["exp_avg"]).view(-1)[0] = torch.nan

        def scores(x, *args):
            if due("a score"):
                x[0] = torch.nan

        def values(x, *args):  # the number is right, its gradient is not
            if due("the gradient of the value model") and x.requires_grad:
                x.register_hook(lambda gradient: gradient * torch.nan)

        def logits(x, *args):
            return x * torch.nan if x.requires_grad and deed == "NaN forward" and mine else x

        wrap([Run], "enter", first=enter)
        wrap([Model], "logits", then=logits)
        wrap(rooms, "score_sequences", then=scores)
        wrap(rooms, "response_values", then=values)
        register_optimizer_step_pre_hook(step)

    return before


# deed: what is said; how many steps were made before, of both optimizers; ranks; keys
FIRST = "iteration 0: before any update, the log-probs of "
LATE = dict(sync_check_interval=1000, checkpoint_interval=1)  # no audit but before a save
SABOTAGE = {
    "a bit of the reference": (
        "iteration 2: the frozen ref_policy, parameter .* has changed on rank 1", 8, 2,
        dict(zero_stage="ref=3", sync_check_interval=1, num_minibatches=1, ppo_epochs=2)),
    "a bit of the policy": (
        "iteration 2: the ranks have drifted apart: policy, parameter .*ln_f.bias differs on", 8, 2,
        dict(sync_check_interval=1, num_minibatches=1, ppo_epochs=2)),
    "a score": (r"iteration 1, score: reward/reward_model is not finite \(first in response \d",
                8, 2, {}),
    "the gradient of the value model": (
        r"iteration 1: the gradient of value_model's \w\S+ is not finite; stopped before the step",
        8, 2, {}),
    "another reference everywhere": (FIRST + "the reference differ", 0, 1, {}),
    "NaN forward": (FIRST + "the training forward differ", 0, 2, {}),
    "a weight of policy": ("iteration 1, .* is not finite", None, 1, LATE),
    "a weight of value_model": ("iteration 1, score: values is not finite", None, 1, LATE),
    "a moment": ("iteration [12]: .*(policy|value_model).* is not finite", None, 1, LATE)}


@pytest.mark.parametrize("deed", SABOTAGE)
def test_sabotage_stops_the_run_before_the_step(world, tmp_path, deed):
    pattern, steps, ranks, more = SABOTAGE[deed]
    keys = keys_of(world, "ppo.py", value_init="policy", dtype="float64", **more)
    result = run("ppo.py", tmp_path, keys, ranks=ranks, before=saboteur(deed, ranks))
    said = {line.replace(" (rank 1)", "") for text in result.err for line in text.splitlines()}
    assert set(result.codes) == {1} and len(said) == 1, result
    assert re.match("ppo.py: error: " + pattern, *said), said
    for rank in range(ranks) if steps is not None else ():
        made = tmp_path / f"steps-{rank}"
        assert (made.stat().st_size if made.exists() else 0) == steps
    saved = glob.glob(f"{tmp_path}/out/checkpoint-*/**/*.safetensors", recursive=True)
    assert all(t.isfinite().all() for file in saved for t in load_file(file).values())
    assert saved or "checkpoint_interval" not in more


# another system: a Mac, by taking away what Linux alone has

def become_a_mac(rank):
    os.environ["TORCHELASTIC_RUN_ID"] = "none"  # as under torchrun
    of_copy(ROOT)(rank)  # all is imported anew; torch knows its own system
    sys.platform, opened, library = "darwin", open, ctypes.CDLL

    def no_library(*args, **kwargs):
        if kwargs:  # a package of others, which knows what it may call there
            return library(*args, **kwargs)
        raise OSError("there is no such call")

    def elsewhere(path, *args, **kwargs):
        return opened(f"/none{path}" if str(path).startswith(("/proc", "/sys")) else path,
                      *args, **kwargs)

    builtins.open, ctypes.CDLL = elsewhere, no_library
    shutil.which = lambda *args, **kwargs: None  # no bubblewrap
    del os.sched_getaffinity, os.memfd_create, os.pidfd_open, resource.prlimit


def test_a_mac_runs_ppo(world, tmp_path):
    """PPO with a rule and a reward model."""
    keys = keys_of(world, "ppo.py", reward_functions=f"{world.rules}:letters,reward_model",
                   max_iters=1)
    out = well("ppo.py", tmp_path, keys, before=become_a_mac)
    assert read_jsonl(f"{out}/log.jsonl")[0]["mem/peak_mib"] == 0  # unknown there

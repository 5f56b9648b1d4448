"""checkpoint.py: a kill at any moment of a save, a flipped bit, a full disk, two runs at once."""
import json
import os
import shutil
import signal

import pytest
import torch
from safetensors.torch import load_file

import checkpoint
from checkpoint import damage, find_checkpoint, list_checkpoints, save_checkpoint
from tiny import (assert_one_line, assert_same_run, at, keys_of, read_log, read_weights, run, well,
                  write)

STEPS = "sync", "move_aside", "write_json", "cut_logs", "save_file", "append"


def dies_at(number):
    """For `before`: kill -9 before the call of this number of all that touches the disk."""
    def before(rank):
        import checkpoint

        calls = iter(range(number))

        def counted(function):
            return lambda *args, **how: (next(calls, None) is None and os.kill(os.getpid(), 9),
                                         function(*args, **how))[1]

        for owner, name in [*((checkpoint, name) for name in STEPS), (os, "rename"),
                            (os, "replace"), (shutil, "rmtree")]:
            setattr(owner, name, counted(getattr(owner, name)))

    return before


def test_kills_at_all_moments_of_a_run_leave_the_same_bits(world, tmp_path):
    """Killed again and again, each time a few calls further, until the run comes to its end."""
    keys = keys_of(world, "sft.py", checkpoint_interval=1, eval_interval=1, max_iters=2)
    whole = well("sft.py", tmp_path / "whole", keys)
    number, kills, codes = 1, 0, [-9]
    while codes != [0]:
        codes = run("sft.py", tmp_path, keys, before=dies_at(number)).codes
        assert codes in ([0], [-9])
        for folder in list_checkpoints(f"{tmp_path}/out"):
            assert damage(folder) is None  # what has its name is complete
        number, kills = number + 6, kills + 1
    assert kills > 6 and list_checkpoints(whole) == [f"{whole}/checkpoint-000002"]
    assert os.stat(f"{whole}/policy/model.safetensors").st_mode & 0o444 == 0o444  # others serve it
    assert_same_run(whole, f"{tmp_path}/out")
    assert sorted(os.listdir(tmp_path / "out")) == sorted(os.listdir(whole))


def flip(file):
    with open(file, "r+b") as f:
        content = f.read()
        f.seek(-20, os.SEEK_END)
        f.write(bytes([content[-20] ^ 1]))


def test_a_damaged_checkpoint_is_refused_and_an_older_one_used(world, tmp_path):
    keys = keys_of(world, "ppo.py", checkpoint_interval=1, keep_checkpoints=3)
    out = well("ppo.py", tmp_path, keys)
    log = read_log(out)
    for number, name in ((3, "policy/model.safetensors"), (2, "value_model_optimizer.safetensors")):
        flip(f"{out}/checkpoint-00000{number}/{name}")
    result = run("ppo.py", tmp_path, keys)
    assert result.codes == [0] and "checkpoint-000001" in result.out[0]
    assert read_log(out) == log  # iterations 1 and 2 were done again, with the same figures
    for folder in list_checkpoints(out):
        assert damage(folder) is None  # they were written anew
        os.remove(f"{folder}/state.json")
    assert_one_line(run("ppo.py", tmp_path, keys), "ppo.py", "none of the checkpoints is good")


def full():
    """No file may be larger: as on a full disk, the weights cannot be written."""
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))


def test_a_full_disk_is_one_line_and_with_room_again_the_run_goes_on(world, tmp_path):
    keys = keys_of(world, "sft.py", checkpoint_interval=1)
    whole = well("sft.py", tmp_path / "whole", keys)
    result = run("sft.py", tmp_path, keys, before=at(1, full))
    assert_one_line(result, "sft.py", "cannot be written", code=1)
    assert_same_run(whole, well("sft.py", tmp_path, keys))


def test_two_runs_in_one_folder(world, tmp_path):
    """The second one waits a little, and then says why it does not begin."""
    keys = keys_of(world, "sft.py", out_dir=f"{tmp_path}/out")

    def impatient(rank):
        import checkpoint

        checkpoint.LOCK_WAIT = 1

    def second():
        result = run("sft.py", tmp_path / "second", keys, before=impatient)
        assert_one_line(result, "sft.py", "in use by another process")

    assert run("sft.py", tmp_path / "first", keys, before=at(1, second)).codes == [0]


def test_a_run_goes_on_in_another_dtype(world, tmp_path):
    """And with an adapter, whose checkpoint has nothing of its trunk, and no config.json."""
    keys = keys_of(world, "sft.py", lora="2", max_iters=3)
    whole = well("sft.py", tmp_path / "whole", keys | dict(dtype="float32"))
    assert run("sft.py", tmp_path, keys | dict(dtype="float32"),
               before=at(1, signal.SIGTERM)).codes == [0]
    (folder,) = list_checkpoints(f"{tmp_path}/out")
    assert os.listdir(f"{folder}/policy") == ["model.safetensors"]
    tensors = load_file(f"{folder}/policy/model.safetensors").values()
    assert all(t.dtype == torch.float32 and 2 in t.shape for t in tensors)  # 2: the rank
    out = well("sft.py", tmp_path, keys)
    assert_one_line(run("sft.py", tmp_path, keys | dict(lora="3")), "sft.py", "lora = '2'")
    a, b = read_weights(f"{whole}/policy"), read_weights(f"{out}/policy")
    assert 0 < max((a[name] - b[name]).abs().max().item() for name in a) < 1e-4


# folders, without models

@pytest.fixture
def out(tmp_path):
    os.mkdir(tmp_path / "out")
    write(tmp_path / "out" / "config.json", json.dumps(dict(out_dir="out")))
    return tmp_path / "out"


def save(out, iteration, keep=9, **state):
    save_checkpoint(str(out), iteration, {}, {}, state, keep)


def names(out):
    return [os.path.basename(folder) for folder in list_checkpoints(str(out))]


def test_the_newest_are_kept(out):
    """By number, not by letters; a damaged one of later never pushes out a good one."""
    for iteration in (5, 999_999, 1_000_000):
        save(out, iteration, keep=2)
    assert names(out) == ["checkpoint-999999", "checkpoint-1000000"]
    write(out / "checkpoint-1000000" / "state.json", "{}")
    shutil.copytree(out / "checkpoint-999999", out / "checkpoint-backup")
    save(out, 7, keep=1)
    assert names(out) == ["checkpoint-000007"] and os.path.exists(out / "checkpoint-backup")
    number = os.stat(out / "checkpoint-000007").st_ino
    save(out, 7, keep=1)  # as when a run is asked to stop right behind its checkpoint
    assert os.stat(out / "checkpoint-000007").st_ino == number
    save(out, 7, keep=1, again=1)
    assert find_checkpoint(str(out))[1] == dict(again=1, iteration=7)


def test_a_kill_while_a_folder_is_replaced_loses_neither(out, monkeypatch):
    """Between the two renamings the older one has no name: the next start gives it back."""
    save(out, 3)
    rename = os.rename

    def die(source, target):
        if ".tmp-" in source:
            raise KeyboardInterrupt
        rename(source, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "rename", die)
        save(out, 3, again=1)
    assert names(out) == [] and os.path.exists(out / ".old-checkpoint-000003")
    os.mkdir(out / ".gone-checkpoint-000001")
    folder, state = checkpoint.begin_or_resume(
        str(out), dict(out_dir="out", script="ppo.py"), [], 10**7)
    assert os.path.basename(folder) == "checkpoint-000003"
    assert state == {"iteration": 3, "run/weights": {}}
    assert sorted(os.listdir(out)) == [".lock", "checkpoint-000003", "config.json"]

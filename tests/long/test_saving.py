"""checkpoint.py: files in parts, other dtypes, which folders stay, damage of every kind."""
import json
import os
import random
import shutil
import signal

import pytest
import torch
from safetensors.torch import load_file

import checkpoint
from checkpoint import damage, find_checkpoint, list_checkpoints, save_checkpoint
from tiny import (assert_one_line, assert_same_run, at, keys_of, read_log, read_weights, run, well,
                  write)


def small_files(rank):
    checkpoint.FILE_BYTES = 3000


def test_weights_in_several_files(world, tmp_path):
    """As those above 5 GB: a run that has stopped with such files goes on to the same bits."""
    keys = keys_of(world, "ppo.py", value_init="shared", ema_decay=0.5)
    whole = well("ppo.py", tmp_path / "whole", keys)
    stop = at(2, signal.SIGTERM)
    assert run("ppo.py", tmp_path, keys, before=lambda rank: (
        stop(rank), small_files(rank))).codes == [0]
    folder = tmp_path / "out" / "checkpoint-000002"
    for stem in ("policy/model", "policy_optimizer", "ema"):
        files = sorted(folder.glob(f"{stem}-*.safetensors"))
        assert len(files) > 3 and files[1].name.endswith(f"-00002-of-{len(files):05d}.safetensors")
        for tensors in map(load_file, files):  # one is larger, if it is a single tensor
            assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= 3000
    assert_same_run(whole, well("ppo.py", tmp_path, keys), ("policy", "value_model", "ema_policy"))


def test_a_run_goes_on_in_another_dtype(world, tmp_path):
    """And with an adapter, whose checkpoint has nothing of its trunk, and no config.json."""
    keys = keys_of(world, "sft.py", lora="2", max_iters=4)
    whole = well("sft.py", tmp_path / "whole", keys)
    for iteration, dtype in ((1, "float64"), (2, "float32")):
        assert run("sft.py", tmp_path, keys | dict(dtype=dtype),
                   before=at(iteration, signal.SIGTERM)).codes == [0]
        (folder,) = list_checkpoints(f"{tmp_path}/out")
        folder = tmp_path / folder / "policy"
        assert os.listdir(folder) == ["model.safetensors"]
        tensors = load_file(folder / "model.safetensors")
        assert {t.dtype for t in tensors.values()} == {getattr(torch, dtype)}
        assert all(2 in t.shape for t in tensors.values())  # the rank
    out = well("sft.py", tmp_path, keys)
    assert [record["iteration"] for record in read_log(out)] == [0, 1, 2, 3, 4]
    assert_one_line(run("sft.py", tmp_path, keys | dict(lora="3")), "sft.py", "lora = '2'")
    a, b = read_weights(f"{whole}/policy"), read_weights(f"{out}/policy")
    assert 0 < max((a[name] - b[name]).abs().max().item() for name in a) < 1e-4


# folders, without models


@pytest.fixture
def out(tmp_path):
    write(tmp_path / "config.json", json.dumps(dict(out_dir="out")))
    return tmp_path


def save(out, iteration, keep=9, **state):
    save_checkpoint(str(out), iteration, {}, {}, state, keep)


def names(out):
    return [os.path.basename(folder) for folder in list_checkpoints(str(out))]


def begin(out):
    return checkpoint.begin_or_resume(str(out), dict(out_dir="out"), [], 10**7)


def test_the_newest_are_kept(out):
    """By number, not by letters; a damaged one of later never pushes out a good one."""
    for iteration in (5, 999_999, 1_000_000):
        save(out, iteration, keep=2)
    assert names(out) == ["checkpoint-999999", "checkpoint-1000000"]
    write(out / "checkpoint-1000000" / "state.json", "{}")
    shutil.copytree(out / "checkpoint-999999", out / "checkpoint-backup")
    save(out, 7, keep=1)
    assert names(out) == ["checkpoint-000007"] and os.path.exists(out / "checkpoint-backup")
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

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", die)
        with pytest.raises(KeyboardInterrupt):
            save(out, 3, again=1)
    assert names(out) == [] and {".old-checkpoint-000003", ".tmp-checkpoint-000003"} <= {
        *os.listdir(out)}
    os.mkdir(out / ".gone-checkpoint-000001")
    folder, state = begin(out)
    assert os.path.basename(folder) == "checkpoint-000003" and state == dict(iteration=3)
    assert sorted(os.listdir(out)) == [".lock", "checkpoint-000003", "config.json"]


def test_damage_of_every_kind_is_seen(out, capsys):
    """A flipped bit, a cut, a file that is gone, or is that of the checkpoint before."""
    write(out / "log.jsonl", "")
    for iteration in (1, 2):
        save(out, iteration, kl=iteration / 3)
        os.makedirs(out / f"checkpoint-00000{iteration}" / "policy", exist_ok=True)
    drawn, tried = random.Random(0), 0
    newest = out / "checkpoint-000002"
    for file in [path for path in newest.rglob("*") if path.is_file()]:
        content = file.read_bytes()
        ways = [None, content + b"\n", content[:-1], (
            out / "checkpoint-000001" / file.relative_to(newest)).read_bytes()]
        for _ in range(20):
            place, bit = drawn.randrange(len(content)), 1 << drawn.randrange(8)
            ways.append(content[:place] + bytes([content[place] ^ bit]) + content[place + 1:])
        for way in ways:
            if way == content or way == content + b"\n" and file.name == "manifest.json":
                continue
            file.unlink()
            if way is not None:
                file.write_bytes(way)
            assert damage(str(newest)) and find_checkpoint(str(out))[1]["iteration"] == 1, way
            assert "checkpoint-000002" in capsys.readouterr().out
            file.write_bytes(content)
            tried += 1
    assert tried > 60 and damage(str(newest)) is None

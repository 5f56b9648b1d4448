"""checkpoint.py: what is saved comes back bit by bit, what is damaged is refused, what is another run's is left alone."""
import glob
import json
import os
import random
import re
import shutil
import subprocess
import sys
import threading
import time

import pytest
import torch

import run_folder
from checkpoint import find_checkpoint, load_checkpoint, save_checkpoint, save_model
from run_folder import open_run
from report import write_log
from errors import BadInput
from scratch import from_scratch

from tiny import byte_tokenizer

TOKENIZER = byte_tokenizer(["<a>"])
CONFIG = dict(out_dir="x", max_iters=9, seed=1, batch_size=8, train_path="data/x.jsonl", learning_rate=0.1)
TINY = dict(model_type="llama", vocab_size=11, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=16, initializer_range=8**-0.5, bos_token_id=None, eos_token_id=None)


def tiny(head="lm", seed=0):
    return from_scratch(TINY, head=head, seed=seed)


def table(model):
    return model.hf.get_input_embeddings().weight


def adamw(model):
    return torch.optim.AdamW(model.parameters(), 0.01, (0.9, 0.95), 1e-8, 0.1, fused=True)


def listing(out_dir):
    """What is in a run's folder beside what every run has there."""
    return sorted(set(os.listdir(out_dir)) - {"config.json", "log.jsonl", ".lock"})


def save(out_dir, iteration, keep=9, seed=0, state=None):
    """A checkpoint of an untrained tiny model, in a folder as open_run leaves it."""
    model = tiny(seed=seed)
    for name, text in (("config.json", json.dumps(CONFIG)), ("log.jsonl", "")):
        if not (out_dir / name).exists():
            (out_dir / name).write_text(text)
    save_checkpoint(str(out_dir), iteration, {"policy": model}, {"policy": adamw(model)}, state or {}, TOKENIZER, keep)


MATCH = ["seed", "batch_size", "train_path"]


def every_file(folder):
    return {f: f.read_bytes() for f in folder.rglob("*") if f.is_file() and f.name != ".lock"}


def refused(out_dir, words, config=CONFIG, match=MATCH, sources=()):
    """The one line with which open_run refuses a folder, in which it then leaves every byte as it was."""
    before = every_file(out_dir)
    with pytest.raises(BadInput, match=words) as caught:
        open_run(str(out_dir), config, match, sources)
    assert every_file(out_dir) == before and "\n" not in str(caught.value)
    return str(caught.value)


def checkpoints(out_dir):
    return sorted(os.path.basename(f) for f in glob.glob(os.path.join(glob.escape(str(out_dir)), "checkpoint-*")))


# ---------------------------------------------------------------------------------------------------------------------
# saving and loading


def test_keep(tmp_path):
    for iteration in (5, 999_999, 1_000_000):  # by number, not by letters
        save(tmp_path, iteration, keep=2)
    assert checkpoints(tmp_path) == ["checkpoint-1000000", "checkpoint-999999"]
    (tmp_path / "checkpoint-1000000" / "state.json").write_text("{}")
    save(tmp_path, 1_000_000, keep=1, seed=4, state={"again": True})  # the same number once more: the damaged one is replaced
    save(tmp_path, 1_000_000, keep=1, seed=5, state={"again": True})  # but a whole one is what we resumed from, and stays
    folder, state = find_checkpoint(str(tmp_path))
    assert state["again"] and listing(tmp_path) == ["checkpoint-1000000"]
    model = tiny(seed=1)
    load_checkpoint(folder, {"policy": model}, {"policy": adamw(model)})
    assert torch.equal(table(model), table(tiny(seed=4)))


def test_what_was_just_saved_is_kept(tmp_path):
    """A damaged checkpoint of a later iteration must not push out the good one; and a copy that somebody set aside stays."""
    save(tmp_path, 10)
    save(tmp_path, 20)
    (tmp_path / "checkpoint-000020" / "state.json").write_text("{}")
    shutil.copytree(tmp_path / "checkpoint-000010", tmp_path / "checkpoint-backup")
    save(tmp_path, 12, keep=1)
    assert checkpoints(tmp_path) == ["checkpoint-000012", "checkpoint-backup"]
    assert find_checkpoint(str(tmp_path))[1] == {"iteration": 12}


def test_a_kill_while_a_folder_is_replaced_loses_neither(tmp_path, monkeypatch):
    """Between the two renamings the older checkpoint has no name: the next start gives it back."""
    open_run(str(tmp_path), CONFIG, MATCH)
    save(tmp_path, 3)
    rename = os.rename

    def die(source, target):
        if ".tmp-" in source:
            raise KeyboardInterrupt
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", die)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, 3, state={"again": True})
    assert checkpoints(tmp_path) == []
    folder, state = open_run(str(tmp_path), CONFIG, MATCH)
    assert (os.path.basename(folder), state) == ("checkpoint-000003", {"iteration": 3})
    assert listing(tmp_path) == ["checkpoint-000003"]


# ---------------------------------------------------------------------------------------------------------------------
# damage


def damages(content, older, rng):
    """(what, the bytes) of a damaged file; None: it is deleted. older: that of the checkpoint before."""
    for place in sorted({0, len(content) - 1, *(rng.randrange(len(content)) for _ in range(6))}):
        flipped = bytes([content[place] ^ 1 << rng.randrange(8)])
        yield f"a bit of byte {place}", content[:place] + flipped + content[place + 1:]
        yield f"cut to {place}", content[:place]
    middle = len(content) // 2
    yield "zeros in the middle", content[:middle] + bytes(9) + content[middle + 9:]
    yield "a newline more", content + b"\n"
    yield "deleted", None
    yield "that of the older checkpoint", older


def test_a_damaged_checkpoint_is_refused_by_name_and_the_one_before_is_used(tmp_path, capsys):
    for iteration in (1, 2):
        save(tmp_path, iteration, seed=iteration, state={"kl_coef": iteration / 3})
    older, newest = tmp_path / "checkpoint-000001", tmp_path / "checkpoint-000002"
    tried, rng = 0, random.Random(0)
    for file, content in every_file(newest).items():
        before = (older / file.relative_to(newest)).read_bytes()
        ways = list(damages(content, before, rng))
        if file.name == "manifest.json":  # a file that it does not know could be anything
            entries = json.loads(content)
            ways += [(f"without {key}", json.dumps({k: v for k, v in entries.items() if k != key}).encode()) for key in entries]
        for what, damaged in ways:
            if damaged == content:
                continue
            file.unlink(missing_ok=True)
            if damaged is not None:
                file.write_bytes(damaged)
            found, _ = find_checkpoint(str(tmp_path))
            assert found == str(older) and str(newest) in capsys.readouterr().out, (file, what)
            tried += 1
        file.write_bytes(content)
    assert find_checkpoint(str(tmp_path))[0] == str(newest) and tried > 100


def test_where_no_checkpoint_is_good_nothing_is_begun_again(tmp_path):
    """What was done would be lost: the run stops, names each checkpoint and its damage, and leaves every byte as it is."""
    for iteration in (1, 2):
        save(tmp_path, iteration)
    for name in checkpoints(tmp_path):
        (tmp_path / name / "state.json").unlink()
    write_log(str(tmp_path), [{"iteration": 0}])
    message = refused(tmp_path, "checkpoint-")
    assert all(f"{name} (state.json is missing)" in message for name in checkpoints(tmp_path))


# ---------------------------------------------------------------------------------------------------------------------
# the run's folder


def log_lines(out_dir):
    return (out_dir / "log.jsonl").read_text().splitlines()


def test_another_runs_folder_is_refused_and_left_alone(tmp_path):
    """A checkpoint's own config.json, under the manifest, says whose it is; a damaged one in out_dir is written anew."""
    open_run(str(tmp_path), CONFIG, MATCH)
    save(tmp_path, 4)
    for text in (json.dumps(CONFIG), "", "{"):
        (tmp_path / "config.json").write_text(text)
        refused(tmp_path, "seed = 1, not 2", CONFIG | {"seed": 2})
        with pytest.raises(BadInput, match="seed = 1, not 2"):  # more iterations would not help
            open_run(str(tmp_path), CONFIG | {"seed": 2}, MATCH, max_iters=3)
        with pytest.raises(BadInput, match="max_iters = 3, but .* has 4"):
            open_run(str(tmp_path), CONFIG, MATCH, max_iters=3)
        assert open_run(str(tmp_path), CONFIG, MATCH)[1] == {"iteration": 4}
        written = json.loads((tmp_path / "config.json").read_text())
        assert written == written | CONFIG | {"sha256": {}, "format": 2} and written["command"]


def test_a_checkpoint_of_another_version_is_refused_and_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("run_folder.FORMAT", 1)
    open_run(str(tmp_path), CONFIG, MATCH)
    save(tmp_path, 4)
    monkeypatch.undo()
    refused(tmp_path, "checkpoint-000004 .*another version.*c382598")


def test_other_contents_are_refused(tmp_path):
    """A data file, or a model folder, that is not what it was when the run began."""
    data, model = tmp_path / "rows.jsonl", tmp_path / "model"
    data.write_text("{}\n")
    save_model(str(model), tiny(), TOKENIZER)
    config = CONFIG | dict(train_path=str(data), policy_path=str(model))
    which = config, ["seed", "train_path", "policy_path"], ["train_path", "policy_path"]
    out_dir = tmp_path / "run"
    open_run(str(out_dir), *which)
    data.write_text("{}\n{}\n")
    open_run(str(out_dir), *which)  # nothing done yet, nothing to lose
    write_log(str(out_dir), [{"iteration": 0}])
    save(out_dir, 1)
    assert open_run(str(out_dir), *which)[1] == {"iteration": 1}
    save_model(str(model), tiny(seed=1), TOKENIZER)
    refused(out_dir, "policy_path .*model.* other contents", *which)
    save_model(str(model), tiny(), TOKENIZER)
    data.write_text("{}\n")
    refused(out_dir, "train_path .*rows.jsonl.* other contents", *which)


def test_the_log_is_cut_when_the_checkpoint_is_loaded(tmp_path):
    """Not before: a checkpoint that turns out not to fit the model leaves the log as it was."""
    open_run(str(tmp_path), CONFIG, MATCH)
    for iteration in range(6):
        write_log(str(tmp_path), [{"iteration": iteration}])
    save(tmp_path, 4)
    folder, _ = open_run(str(tmp_path), CONFIG, MATCH)
    wide = from_scratch(TINY | dict(hidden_size=16), seed=0)
    with pytest.raises(BadInput):
        load_checkpoint(folder, {"policy": wide}, {"policy": adamw(wide)})
    assert len(log_lines(tmp_path)) == 6
    load_checkpoint(folder, {"policy": tiny()}, {"policy": adamw(tiny())})
    assert len(log_lines(tmp_path)) == 4


def test_a_second_run_waits_for_the_first_or_is_refused(tmp_path, monkeypatch, capsys):
    """The lock is a process's: it goes when the process goes, however that happens."""
    script = "import fcntl, os, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); " \
             "print(f'process {os.getpid()} on x, start y', file=f, flush=True); print('locked', flush=True); time.sleep(60)"
    holder = subprocess.Popen([sys.executable, "-c", script, str(tmp_path / ".lock")], stdout=subprocess.PIPE)
    try:
        assert holder.stdout.readline() == b"locked\n"
        monkeypatch.setattr(run_folder, "LOCK_WAIT", 0.3)
        refused(tmp_path, f"{re.escape(str(tmp_path))}.* is in use by process {holder.pid} on ")
        assert f"in use by process {holder.pid}" in capsys.readouterr().out  # said while it waited
        monkeypatch.setattr(run_folder, "LOCK_WAIT", 30)
        threading.Timer(0.5, holder.kill).start()
        began = time.monotonic()
        open_run(str(tmp_path), CONFIG, MATCH)
        assert 0.3 < time.monotonic() - began < 20
        assert (tmp_path / ".lock").read_text().startswith(f"process {os.getpid()} on ")
    finally:
        holder.kill()
        holder.wait()

"""tools/memory.py: rows by hand; peaks against what torch's MemTracker sees in runs of scripts."""
import gc
import json
import os
import re
import shutil
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import transformers
from evidence.bench import keys_of, make_models
from options.shards import offload_of
from tiny import keys_of_system, said_by, typed, well, write
from tools.memory import FEWEST, dry_run, fitting, read_run, verdict
from torch.distributed._tools.mem_tracker import MemTracker

D, F, LAYERS, V = 64, 160, 1, 263
SIZES = dict(hidden_size=D, intermediate_size=F, num_hidden_layers=LAYERS, num_attention_heads=4,
             num_key_value_heads=2, vocab_size=V)
LAYER = 2 * D * D + 2 * D * D // 2 + 3 * D * F  # numbers in the matrices of a layer; k, v are half
HEADLESS = V * D + LAYERS * (LAYER + 2 * D) + D  # embeddings, layers with two norms, a last norm
POLICY, VALUE, TENSORS = HEADLESS + V * D, HEADLESS + D, 1 + LAYERS * 9 + 1 + 1


def tracked(rank):
    """Put a run's last iteration under MemTracker; the peak of each phase goes to peaks-RANK."""
    import run

    tracker, peaks, enter = MemTracker(), {}, run.Run.enter
    gc.collect()
    gc.freeze()  # the tensors of this process are not the run's
    tracker._mod_tracker = mock.MagicMock(is_bw=False)  # its hooks fail in a module called twice

    def entered(self, phase):
        ended = self.phase
        enter(self, phase)
        gc.collect()  # when Python does is chance
        if phase == "log" and not tracker._WINFO:  # weights, gradients and states are there
            tracker.track_external(*(t for t in gc.get_objects() if issubclass(
                type(t), torch.Tensor) and not t.is_meta))
            tracker.__enter__()
            return
        peaks[ended] = max(tracker._peak_mem.values(), default=0) / 2**20
        tracker._peak_mem.clear()
        if phase == "log":
            write(f"peaks-{rank}.json", json.dumps(peaks))

    run.Run.enter = entered


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A folder with policy/ and reward_model/, random Llamas, and prompts of one length."""
    folder = tmp_path_factory.mktemp("llama")
    make_models(str(folder), SIZES, 8, 40, 0.0, SimpleNamespace(device_type="cpu"), ppo=True)
    return folder


@pytest.mark.parametrize("script, ranks, more", [
    ("ppo", 1, dict(dtype="bfloat16", ema_decay=0.9, gradient_checkpointing=True, ppo_epochs=1)),
    ("grpo", 2, dict(zero_stage=3, batch_size=16, group_size=4))])  # two micro-batches
def test_peaks_are_those_of_a_run(script, ranks, more, llama, tmp_path):
    keys = keys_of(script, str(llama), dict(
        max_prompt_tokens=8, max_new_tokens=40, batch_size=8, micro_batch_size=4, max_iters=2,
        num_minibatches=1, kl_coef=0.1, timeout=60, device_type="cpu", reward_timeout=30) | more)
    well(f"{script}.py", tmp_path, keys, ranks=ranks, before=tracked)
    took = json.loads((tmp_path / "peaks-0.json").read_text())
    took["reading"] = took["score"]
    said = said_by("tools/memory.py", tmp_path, [
        f"{script}.py", *typed(keys), f"--world-size={ranks}"])
    _, rows, peaks, *_ = said.split("\n\n")
    assert rows.startswith("MiB ")
    said = {x: float(peak) for x, peak in re.findall(r"^(\w+) +([\d.]+) ", peaks, re.M)}
    assert said.keys() == {"rollout", "reading", "update"}
    # the models read one after the other: of the earlier ones a few columns are there
    # transformers 5.16 takes 8 % less in a rollout than 5.24
    rollout = 0.1 if transformers.__version__ < "5.24" else 0.05
    assert said == {phase: pytest.approx(took[phase], rel=dict(
        rollout=rollout, reading=1, update=0.05)[phase]) for phase in said}


def test_rows_by_hand(llama, tmp_path):
    """Of models with a config.json alone: 4 bytes a number; AdamW has two of each, and a count."""
    for name in ("policy", "reward_model"):
        os.makedirs(tmp_path / name)
        shutil.copy(llama / name / "config.json", tmp_path / name)
    paths = [f"--policy_path={tmp_path}/policy", f"--reward_path={tmp_path}/reward_model",
             "--max_new_tokens=40"]

    def rows(*more):
        with dry_run(*read_run(["ppo.py", *paths, *more])) as (found, _, _):
            return found

    def near(row, **sizes):
        assert row == {name: pytest.approx(sizes.get(name, 0), abs=6000) for name in row}

    plain = rows("--ema_decay=0.9")
    near(plain["policy"], weights=4 * POLICY, gradients=4 * POLICY, average=4 * POLICY,
         optimizer=8 * POLICY + 4 * TENSORS)
    near(plain["value_model"], weights=4 * VALUE, gradients=4 * VALUE,
         optimizer=8 * VALUE + 4 * TENSORS)
    near(plain["ref_policy"], weights=4 * POLICY)
    near(plain["reward_model"], weights=4 * VALUE)
    # matrices in 16 bits, but not embedding, norms and score; LoRA: rank (in + out) of each map
    short = rows("--dtype=bfloat16", "--lora=policy=16", "--device_type=cuda",
                 "--offload=value=optimizer,reward=params")
    adapters = 16 * LAYERS * (2 * (D + D) + 2 * (D + D // 2) + 3 * (D + F))
    near(short["policy"], weights=4 * adapters, gradients=4 * adapters, optimizer=8 * adapters)
    wide = V * D + D + LAYERS * 2 * D
    near(short["ref_policy"], weights=2 * (POLICY - wide) + 4 * wide)
    near(short["value_model"], weights=4 * VALUE, gradients=4 * VALUE)
    near(short["reward_model"])
    # at stage 1 a rank has the states of about half of the tensors; Adafactor has a sum a row and a
    # column of each matrix, and all sums of a vector
    split = rows("--zero_stage=policy=3,value=1", "--world_size=2", "--optim=value=adafactor")
    near(split["policy"], weights=2 * POLICY, gradients=2 * POLICY, optimizer=4 * POLICY)
    near(split["ref_policy"], weights=2 * POLICY)
    sums = LAYERS * (2 * (D + D) + 2 * (D + D // 2) + 3 * (D + F)) + V + D + 1 + D
    near(split["value_model"], weights=4 * VALUE, gradients=4 * VALUE,
         optimizer=4 * (sums + (2 * LAYERS + 1) * D + TENSORS) / 2)
    # what is offloaded of a head on the policy is the policy's
    assert offload_of(keys_of_system(offload="optimizer"), "value", True, is_head=True) == "none"


def peaks_of(step, **keys):
    peaks = {key: peak for key, (peak, _) in step(**keys)[1].items()}
    return peaks, {of: max(x for (phase, _), x in peaks.items() if phase == of)
                   for of in dict.fromkeys(phase for phase, _ in peaks)}


@pytest.mark.parametrize("script, bounds, more", [
    ("grpo.py", ("micro_batch_tokens", "rollout_batch_size"), dict(
        micro_batch_tokens=96, batch_size=512, reward_functions="accuracy")),
    ("rm.py", ("micro_batch_size",), dict(max_tokens=48, batch_size=64))])
def test_what_fits_does_and_what_does_not_is_named(script, bounds, more, llama):
    keys = dict(init_from=llama / "policy") if script == "rm.py" else dict(
        policy_path=llama / "policy", max_prompt_tokens=8, max_new_tokens=40, kl_coef=0.1,
        micro_batch_size=2)
    script, config = read_run([script, *typed(keys | more)])
    with dry_run(script, config) as (_, _, step):
        peaks, free = peaks_of(step)
        limit = max(free["reading"], free["update"]) + 2**20
        config["gpu_gb"] = limit / 2**30
        bad, good = verdict(script, config, peaks, fitting(script, config, step))
        found = {name: int(most) for name, most in re.findall(
            r"the largest (\w+) that fits into \S+ GiB is (\d+)", str(good + bad))}
        assert {*found} == {*bounds} and all(found.values())
        for phase, name in zip(("update", "rollout"), bounds, strict=False):
            # with it the phase fits; with a third more it does not
            assert peaks_of(step, **{name: found[name]})[1][phase] <= limit
            assert peaks_of(step, **{name: found[name] * 4 // 3 + 2})[1][phase] > limit
            # a line says what does not fit now, and nothing else
            over = f"{phase} takes {free[phase] / 2**30:.2f} GiB: type --{name}={found[name]}"
            assert (over in str(bad)) == (free[phase] > limit)
        least = peaks_of(step, **FEWEST)[1]["update"]
        config["gpu_gb"] = least / 2**30 - 1e-6
        bad, good = verdict(script, config, peaks, fitting(script, config, step))
        assert re.search(r"update does not fit into .* even with one row: .*gradient_check",
                         str(bad)) and not good
        (line,), _ = verdict(script, config, peaks, dict(rollout=(0, least)))  # it has no gradients
        assert "max_new_tokens" in line and "gradient_check" not in line
    assert free.get("rollout", limit + 1) > limit  # 512 rows at once

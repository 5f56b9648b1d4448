"""
Keys of memory and of files, turned together: they move no bit, or only rounding. How models are
split, on how many ranks, and a stop in the middle after which all of this is another one: the run
must be that of one rank. (by_hand.py's runs turn the keys of the algorithm.)
"""
import glob
import math
import os
import signal
from types import SimpleNamespace

import pytest
import torch
import transformers
from model import Model
from parallel import flatten_gradients
from run import make_optimizer
from safetensors.torch import load_file
from tiny import (assert_same_run, assert_stopped, at, keys_of, read_weights, run,
                  well)

# each of these letters ends a response, too
LETTERS = str([chr(i) for i in range(33, 127) if i % 3])
ROWS = dict(fields="answer>prompt,prompt>answer", max_prompt_tokens=2, too_long="cut",
            stop_strings=LETTERS, max_new_tokens=12)
AWAY = "policy=params,value=params,ref=params,reward=params"
MODELS = {"ppo.py": ["policy", "value_model"], "grpo.py": ["policy"], "sft.py": ["policy"],
          "rm.py": ["reward_model"]}
CASES = {  # script, keys; ranks and keys until a stop in iteration 1; and from there on
    "ppo, rows": ("ppo.py", ROWS | dict(
        epochs=0.9, lora="policy=2:8:c_attn", ema_decay=0.7, value_init="shared",
        reward_functions="reward_model,0.1*length"),
        (2, dict(zero_stage="3", micro_batch_size=1)),
        (1, dict(offload="policy=optimizer,reward=params", head_chunk=4))),
    "ppo, away": ("ppo.py", dict(ema_decay=0.7, weight_decay=0.1, max_iters=2, eval_path=""),
                  (2, dict(zero_stage="3", offload=AWAY, gradient_checkpointing=True)),
                  (2, dict(zero_stage="policy=1,value=2", offload="optimizer",
                           micro_batch_tokens=40))),
    # fewer rows than ranks; one rank goes on
    "ppo, two rows": ("ppo.py", dict(batch_size=2, eval_size=1, grad_clip=0.3),
                      (3, dict(zero_stage="policy=3,value=2,ref=1", micro_batch_size=1)), (1, {})),
    "grpo, tied": ("grpo.py", dict(policy_path="tied", num_minibatches=1, ref_path="older",
                                   kl_in="reward", kl_estimator="k1", max_refills=1),
                   (3, dict(zero_stage="3")), (1, dict(rollout_batch_size=2))),
    "grpo, muon": ("grpo.py", dict(optim="muon", weight_decay=0.1), (1, {}), (2, {})),
    "sft, scratch": ("sft.py", dict(
        init_from="scratch", tokenizer_path="policy", family="llama", d_model=20, n_layer=3,
        n_head=2, d_ff=24, context=64, max_tokens=12, too_long="cut", epochs=1.7),
        (2, dict(zero_stage="3", offload="params")), (1, dict(head_chunk=5))),
    "rm, adapter": ("rm.py", dict(lora="2", max_tokens=12, too_long="drop"),
                    (2, dict(zero_stage="2", offload="optimizer")),
                    (1, dict(micro_batch_tokens=30)))}
# only files, waiting, or prints depend on these
UNMOVING = dict(
    device_type="auto", timeout=61, reward_timeout=31, eval_interval=1, eval_size=0,
    checkpoint_interval=1, keep_checkpoints=2, keep_best="score", save_rollouts=1,
    sync_check_interval=1, deterministic=True, rollout_batch_size=100, ema_decay=0.5)


def keys_in(world, script, keys):
    """The keys of a run in the tiny world, with its paths for the names of its models."""
    paths = {key: getattr(world, x) for key, x in keys.items()
             if isinstance(x, str) and x and key.endswith("_path")}
    return keys_of(world, script, **keys | paths)


def shattered(rank):
    """For `before`: weights, states and the average go into many files, as those above 5 GB."""
    import checkpoint

    checkpoint.FILE_BYTES = 10_000


def assert_shattered(folder):
    for stem in ("policy/model", "policy_optimizer", "ema"):
        files = sorted(glob.glob(f"{folder}/{stem}-*.safetensors"))
        assert len(files) > 3 and files[1].endswith(f"-00002-of-{len(files):05d}.safetensors")
        for tensors in map(load_file, files):  # one is larger, if it is a single tensor
            assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= 10_000


@pytest.mark.parametrize("name", CASES)
def test_shards_and_ranks_and_a_stop_change_nothing(world, tmp_path, name):
    script, keys, (ranks, first), (later, then) = CASES[name]
    keys = keys_in(world, script, keys)
    whole = well(script, tmp_path / "whole", keys)
    stopped = run(script, tmp_path, keys | first, ranks=ranks, before=lambda rank: (
        shattered(rank), at(1, signal.SIGTERM)(rank)))
    assert_stopped(stopped, tmp_path)
    if name == "ppo, away":
        assert_shattered(*glob.glob(f"{tmp_path}/out/checkpoint-*"))
    out = well(script, tmp_path, keys | then, ranks=later)
    assert_same_run(whole, out, MODELS[script] + ["ema_policy"] * ("ema_decay" in keys), 1e-9)
    (last,) = glob.glob(f"{whole}/checkpoint-*")
    files = [os.path.basename(file) for file in glob.glob(f"{last}/*.safetensors")]
    assert any("optimizer" in file for file in files)
    for file in files:  # states of optimizers, and the average
        a, b = (load_file(f"{o}/{os.path.basename(last)}/{file}") for o in (whole, out))
        assert a.keys() == b.keys()
        assert max((a[n].double() - b[n].double()).abs().max().item() for n in a) <= 1e-9, file


@pytest.mark.parametrize("script", ["ppo.py", "grpo.py"])
def test_keys_of_files_move_no_bit(world, tmp_path, script):
    plain = well(script, tmp_path / "plain", keys_of(world, script, eval_path=""))
    out = well(script, tmp_path / "unmoving", keys_of(world, script, **UNMOVING))
    for model in MODELS[script]:
        a, b = (read_weights(f"{folder}/{model}") for folder in (plain, out))
        assert all(torch.equal(a[name], b[name]) for name in a)
    assert sorted(os.path.basename(f) for f in glob.glob(f"{out}/checkpoint-*")) == [
        "checkpoint-000002", "checkpoint-000003"]
    assert os.path.exists(f"{out}/best_policy") and os.path.exists(f"{out}/rollouts.jsonl")


# --------------------------------------------------------------------------------------------------
# master_weights=False: weights in bfloat16; their gradients and states in float32


@pytest.mark.parametrize("more", [
    dict(optim="adafactor"), dict(zero_stage="3"), dict(zero_stage="1"), dict(offload="optimizer"),
    dict(optim="muon")], ids=str)
def test_bfloat16_weights_on_two_ranks_are_resumed_to_the_bit(world, tmp_path, more):
    keys = keys_of(world, "grpo.py", dtype="bfloat16", master_weights=False, checkpoint_interval=1,
                   **more)
    whole = well("grpo.py", tmp_path / "whole", keys, ranks=2)
    assert_stopped(run("grpo.py", tmp_path, keys, ranks=2, before=at(1, signal.SIGTERM, 1)),
                   tmp_path)
    assert_same_run(whole, well("grpo.py", tmp_path, keys, ranks=2))
    last = f"{whole}/checkpoint-000003"
    assert {t.dtype for t in read_weights(f"{last}/policy").values()} == {torch.bfloat16}
    states = load_file(f"{last}/policy_optimizer.safetensors")
    assert {t.dtype for t in states.values()} == {torch.float32}


def bfloat16_model():
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=6, n_positions=4,
                                     tie_word_embeddings=False)
    return Model(transformers.AutoModelForCausalLM.from_config(config).bfloat16(), "lm")


@pytest.mark.parametrize("offload", ["", "optimizer"])
@pytest.mark.parametrize("beta2", [0.999, 0.99, 0.95])
@torch.no_grad()
def test_bfloat16_weights_make_the_steps_of_float64(beta2, offload):
    """Large gradients, and then small ones: by hand, the second moment falls in between."""
    model, (beta1, lr, eps) = bfloat16_model(), (0.9, 1e-3, 1e-8)
    system = SimpleNamespace(optim="", zero_stage="", offload=offload, weight_decay=0.0)
    optimizer = make_optimizer(model, "policy", system, lr, (beta1, beta2), eps)
    flatten_gradients(model)
    m = v = 0.0
    for t in range(1, 401):
        size = 1.0 if t <= 20 else 0.03 if t <= 300 else 0.2
        for p in model.parameters():
            p.zero_()  # then it is the step that is rounded to bfloat16
            p.grad.fill_(size)
        optimizer.step()
        m, v = beta1 * m + (1 - beta1) * size, beta2 * v + (1 - beta2) * size**2
        want = -lr * m / (1 - beta1**t) / (math.sqrt(v / (1 - beta2**t)) + eps)
        for p in model.parameters():
            assert (p.double() / want - 1).abs().max() < 1 / 256, t


def test_bfloat16_weights_and_512_equal_micro_batches():
    model = bfloat16_model()
    buffers, (one, *_) = flatten_gradients(model), model.parameters()
    for _ in range(512):
        (0.3 * one).sum().backward()
    assert torch.equal(one.grad, torch.full(one.shape, 512 * torch.tensor(0.3).bfloat16().item()))
    assert [flat.dtype for flat in buffers] == [torch.float32] and buffers[0].sum() > 0

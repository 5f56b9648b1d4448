"""
What moves no bit, or only rounding: how models are split, over how many ranks, with which roles,
who samples, and a stop in the middle after which all of this is another one. The run must be that
of one rank. (by_hand.py's runs turn the keys of the algorithm.) And weights in bfloat16.
"""
import glob
import math
import signal
from types import SimpleNamespace

import pytest
import torch
import transformers
import models_of_the_world as others
import pretend
from model import Model
from parallel import flatten_gradients
from run import make_optimizer
from safetensors.torch import load_file
from tiny import (ROOT, Started, assert_same_run, assert_stopped, at, jsonl, keys_of,
                  keys_of_system, read_log, read_weights, run, typed, well)
from tokenizer import load_tokenizer

SPLITS = hasattr(transformers.PreTrainedModel, "_resolve_parallel_plans")
MODELS = {"ppo.py": ["policy", "value_model"], "grpo.py": ["policy"], "sft.py": ["policy"]}
FLAT = dict(max_refills=2, refill_by="sometimes", kl_in="reward", num_minibatches=1, staleness=1,
            reward_functions="sometimes", max_iters=2)
CASES = {  # script, keys; ranks and keys until a stop in iteration 1, if any; and from there on
    "ppo, adapter": ("ppo.py", dict(
        epochs=0.9, lora="policy=2:8:c_attn", ema_decay=0.7, value_init="shared",
        max_prompt_tokens=2, too_long="cut", stop_strings="ab", num_minibatches=1, eval_path=""),
        (2, dict(zero_stage="3", micro_batch_size=1)),
        (1, dict(offload="policy=optimizer,reward=params", head_chunk=4))),
    "ppo, away": ("ppo.py", dict(
        ema_decay=0.7, weight_decay=0.1, max_iters=2, eval_path="", ppo_epochs=1),
                  (2, dict(zero_stage="3", offload="params", gradient_checkpointing=True)),
                  (2, dict(zero_stage="policy=1,value=2", offload="optimizer",
                           micro_batch_tokens=40))),
    "ppo, shared head, away": (
        "ppo.py", dict(value_init="shared", num_minibatches=1, max_iters=1, eval_path=""),
        (2, dict(zero_stage="3", offload="policy=params"))),
    "sft, scratch": ("sft.py", dict(
        init_from="scratch", tokenizer_path="policy", family="llama", d_model=20, n_layer=3,
        n_head=2, d_ff=24, context=64, max_tokens=12, too_long="cut", epochs=1.7),
        (2, dict(zero_stage="3", offload="params")), (1, dict(head_chunk=5))),
    # roles; each batch but the first is an update old
    "grpo, roles": ("grpo.py", FLAT, (4, dict(
        roles="train=2,generate=1,score=1", zero_stage="policy=3,ref=3", sync_check_interval=1))),
    # the generator's weights are rounded once, on its own: no figure may show it
    "ppo, roles, 16 bits": ("ppo.py", dict(
        dtype="bfloat16", lora="2", value_init="shared", num_minibatches=1, max_iters=2,
        cuda_graphs=False),
        (2, dict(roles="train=1,generate=1"))),
    # ranks sample together, at stage 3 two by two
    "grpo, tensor parallel": ("grpo.py", dict(policy_path="tied", num_minibatches=1, lora="2"), (
        4, dict(generate_tp=2, zero_stage="3", rollout_batch_size=3)))}


def keys_in(world, script, keys):
    """The keys of a run in the tiny world, with its paths for the names of its models."""
    paths = {key: getattr(world, x) for key, x in keys.items()
             if isinstance(x, str) and x and key.endswith("_path")}
    if keys.get("reward_functions") == "sometimes":
        paths["reward_functions"] = f"{world.rules}:sometimes,0.5*reward_model"
        paths["reward_path"] = world.reward
    return keys_of(world, script, **keys | paths)


def shattered(rank):
    """For `before`: weights, states and the average go into many files, as those above 5 GB."""
    import checkpoint

    checkpoint.FILE_BYTES = 10_000


def assert_shattered(folder):
    for stem in ("policy/model", "policy_optimizer", "ema"):
        files = sorted(glob.glob(f"{folder}/{stem}-*.safetensors"))
        assert len(files) > 3 and files[1].endswith(f"-00002-of-{len(files):05d}.safetensors")


@pytest.mark.parametrize("name", CASES)
def test_shards_and_ranks_and_a_stop_change_nothing(world, tmp_path, name):
    script, keys, *stopped, (ranks, more) = CASES[name]
    if "generate_tp" in more and not SPLITS:
        pytest.skip("transformers before 5.23")
    keys = keys_in(world, script, keys)
    whole = well(script, tmp_path / "whole", keys)
    for first, until in stopped:
        result = run(script, tmp_path, keys | until, ranks=first, before=lambda rank: (
            pretend.begin(rank), shattered(rank), at(1, signal.SIGTERM)(rank)))
        assert_stopped(result, tmp_path)
    if name == "ppo, away":
        assert_shattered(*glob.glob(f"{tmp_path}/out/checkpoint-*"))
    out = well(script, tmp_path, keys | more, ranks=ranks, before=pretend.begin)
    assert_same_run(whole, out, MODELS[script] + ["ema_policy"] * ("ema_decay" in keys), 1e-9)


# master_weights=False: weights in bfloat16; their gradients and states in float32

@pytest.mark.parametrize("more", [
    dict(optim="adafactor", zero_stage="1"), dict(zero_stage="3")], ids=str)
def test_bfloat16_weights_on_two_ranks_are_resumed_to_the_bit(world, tmp_path, more):
    """And an average between two of their numbers is saved as it is, beside the policy's own."""
    keys = keys_of(world, "grpo.py", dtype="bfloat16", master_weights=False, checkpoint_interval=1,
                   ema_decay=0.7, max_iters=2, **more)
    whole = well("grpo.py", tmp_path / "whole", keys, ranks=2)
    assert_stopped(run("grpo.py", tmp_path, keys, ranks=2, before=at(1, signal.SIGTERM, 1)),
                   tmp_path)
    assert_same_run(whole, well("grpo.py", tmp_path, keys, ranks=2), ("policy", "ema_policy"))
    last = f"{whole}/checkpoint-000002"
    trained, average = read_weights(f"{last}/policy"), read_weights(f"{whole}/ema_policy")
    assert {t.dtype for t in trained.values()} == {torch.bfloat16}
    assert any((t != t.bfloat16()).any() for t in average.values())
    for name, t in load_file(f"{last}/ema.safetensors").items():
        assert (average[name.removeprefix("hf.")] == t).all()
    assert all((read_weights(f"{whole}/policy")[name] == t).all() for name, t in trained.items())
    states = load_file(f"{last}/policy_optimizer.safetensors")
    assert {t.dtype for t in states.values()} == {torch.float32}


def bfloat16_model():
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=6, n_positions=4,
                                     tie_word_embeddings=False)
    return Model(transformers.AutoModelForCausalLM.from_config(config).bfloat16(), "lm")


@pytest.mark.parametrize("beta2, offload", [(0.999, "optimizer"), (0.95, "")])
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


def test_bfloat16_shards_and_micro_batches(world, tmp_path):
    """The norm of 48 micro-batches' sum: of one rank, or of shards, but for the sum of two."""
    keys = keys_of(world, "sft.py", dtype="bfloat16", master_weights=False, val_path="",
                   max_iters=1, batch_size=48, micro_batch_size=1)
    norms = [read_log(well("sft.py", tmp_path / f"{stage}{ranks}", keys | dict(zero_stage=stage),
                           ranks=ranks))[0]["policy/grad_norm"]
             for stage, ranks in (("0", 1), ("3", 2))]
    assert norms == pytest.approx([norms[0]] * 2, rel=2e-4), norms
    assert all(torch.tensor(x).bfloat16().item() != x for x in norms)


def test_the_llama_config_on_eight_ranks(tmp_path):
    """With tiny models typed as paths, chats as prompts, and in float64: as on one rank."""
    chats = [dict(prompt=[dict(role="user", content=f"Is {n} even?")]) for n in range(24)]
    keys = dict(
        policy_path=others.make(tmp_path / "policy", "llama3.2"), timeout=100, dtype="float64",
        reward_path=others.make(tmp_path / "reward", "llama3.2", head="scalar"), warmup_iters=0,
        prompts_path=jsonl(tmp_path / "prompts.jsonl", chats), batch_size=16, max_new_tokens=6,
        eval_path=jsonl(tmp_path / "val.jsonl", chats[:9]), max_iters=1, device_type="cpu")
    load_tokenizer(str(keys["policy_path"]), keys_of_system())  # compiles its template, for all
    for ranks in (8, 1):
        ended = Started("ppo.py", [f"{ROOT}/config/llama.py", *typed(keys), "--out_dir=out"],
                        tmp_path / f"{ranks}", ranks).wait()
        assert ended.codes == [0] * ranks, ended
    out = [f"{tmp_path}/{ranks}/out" for ranks in (8, 1)]
    assert_same_run(*out, ["policy", "value_model"], 1e-6)
    assert read_log(out[0])[0]["policy/grad_norm"] > 0


STACKED = {  # family, settings: the vectors that are stacked, one for each expert or head
    "gpt_oss": (dict(num_local_experts=4, num_experts_per_tok=2, head_dim=8),
                ["mlp.experts.gate_up_proj_bias", "mlp.experts.down_proj_bias"]),
    "cohere": (dict(use_qk_norm=True), ["self_attn.q_norm.weight", "self_attn.k_norm.weight"]),
    "jamba": (dict(num_experts=2, num_experts_per_tok=1, mamba_dt_rank=4, use_mamba_kernels=False),
              ["mamba.A_log"])}


@pytest.mark.parametrize("family", STACKED)
@torch.no_grad()
def test_stacked_vectors_are_vectors(family):
    """A step without gradients is the decay alone: of matrices."""
    settings, stacked = STACKED[family]
    config = transformers.AutoConfig.for_model(family, **dict(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, pad_token_id=0) | settings)
    hf = transformers.AutoModelForCausalLM.from_config(config)
    for p in hf.parameters():
        p.fill_(1.0)
        p.grad = torch.zeros_like(p)
    system = SimpleNamespace(optim="", zero_stage="", offload="", weight_decay=0.5)
    optimizer = make_optimizer(Model(hf), "policy", system, 0.1, (0.9, 0.99), 1e-8)
    optimizer.step()
    found = [name for name, p in hf.named_parameters() if p.dim() > 1 and (p == 1).all()]
    assert [name.partition(".layers.0.")[2] for name in found] == stacked
    matrices = {n for n, p in hf.named_parameters() if p.dim() > 1} - set(found)
    assert matrices and all(((hf.get_parameter(n) - 0.95).abs() < 1e-6).all() for n in matrices)

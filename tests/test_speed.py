"""engine/limits.py and engine/stand_ins.py: operations counted by hand, and random models that end when they shall."""
import json
import math
import os
import statistics

import pytest
import torch

from engine import limits, stand_ins
from engine.limits import Machine
from engine.pretrained import from_pretrained, from_scratch
from engine.tokenizers import load_tokenizer
from rollout import generate

SIZES = dict(vocab_size=5, hidden_size=4, intermediate_size=3, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)


def config(**sizes):
    return from_scratch(dict(SIZES, model_type="llama", max_position_embeddings=16, tie_word_embeddings=False) | sizes).config


def test_operations_of_a_forward_by_hand():
    c = config()
    # a layer: q 4 x 4, k and v 4 x 2 each, o 4 x 4, and 4 x 3 for gate, up, down: 16 + 16 + 16 + 36 = 84; two layers 168
    assert limits.layer_weights(c) == 168
    # texts of 3 and 1 tokens: 2 x 168 x 4 tokens; attention: queries see 1 + 2 + 3 keys and 1, 4 x 4 operations each, 2 layers;
    # two tokens get 5 logits of 4 products
    assert limits.forward_flops(c, [3, 1], headed=2) == 2 * 168 * 4 + 2 * 4 * 4 * 7 + 2 * 2 * 20


def test_operations_are_those_that_torch_does():
    c = config(hidden_size=16, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2)
    policy = from_scratch(c.hf)
    with torch.autograd.profiler.profile(with_flops=True) as seen, torch.no_grad():
        policy(torch.zeros(3, 8, dtype=torch.int64))
    products = sum(e.flops for e in seen.function_events if e.name in ("aten::mm", "aten::addmm"))  # attention has none of these
    attention = 2 * 3 * 2 * 16 * 8 * 9
    assert products == limits.forward_flops(c, [8] * 3, 24) - attention


def test_the_slower_of_products_and_memory_counts():
    c = config()
    # prompts of 2 tokens, read with a head each; then one step for the row with 2 tokens, none for that with 1
    step = 2 * (168 + 20) + 4 * 4 * 2 * 3  # it sees 3 keys in 2 layers
    read = 4 * (168 + 20 + 2 * 2 * 2 * 3)  # weights, and 3 keys and values of 2 numbers in 2 layers
    prefill = limits.forward_flops(c, [2, 2], 2)
    assert limits.decode_seconds(Machine(1.0, 1e9), c, 2, [2, 1], 4) == pytest.approx(prefill + step)
    assert limits.decode_seconds(Machine(1e9, 1.0), c, 2, [2, 1], 4) == pytest.approx(read, rel=1e-6)


def test_an_iteration_by_hand():
    c, machine = config(), Machine(10.0, math.inf)
    trunk, policy = limits.forward_flops(c, [4, 3]), limits.forward_flops(c, [4, 3], 3)
    assert policy - trunk == 3 * 2 * 20
    ppo = limits.iteration_seconds(machine, c, 2, [2, 1], 4, passes=4, value_model=True)
    assert ppo["score"] == pytest.approx((policy + 2 * trunk) / 10)  # reference, value model, reward model
    assert ppo["update"] == pytest.approx(4 * 3 * (policy + trunk) / 10)
    grpo = limits.iteration_seconds(machine, c, 2, [2, 1], 4, passes=1, value_model=False)
    assert (grpo["score"], grpo["update"]) == (pytest.approx(policy / 10), pytest.approx(3 * policy / 10))
    assert ppo["rollout"] == grpo["rollout"] == limits.decode_seconds(machine, c, 2, [2, 1], 4)


def test_a_machine_is_measured():
    machine = limits.measure("cpu", torch.float32, seconds=0.01)
    assert 1e8 < machine.products < 1e14 and 1e8 < machine.memory < 1e13


@pytest.mark.parametrize("share", [0.0, 0.125])
def test_stand_ins_end_as_often_as_they_shall(tmp_path, share):
    sizes = SIZES | dict(vocab_size=40, hidden_size=16)
    stand_ins.make(tmp_path, sizes, prompt_length=3, longest=16, end_share=share, prompts=400)
    policy, tokenizer = from_pretrained(tmp_path / "policy"), load_tokenizer(tmp_path / "policy")
    assert (tokenizer.eos_id, tokenizer.pad_id) == (38, 39)
    prompts = [tokenizer.encode_prompt(json.loads(line)["prompt"]) for line in (tmp_path / "prompts.jsonl").open()]
    assert len(prompts) == 400 and all(len(ids) == 3 and max(ids) < 38 for ids in prompts)
    out = generate(policy, prompts, 16, eos_ids=tokenizer.eos_ids, pad_id=39)
    lengths = out["response_mask"].sum(1).tolist()
    sampled = out["tokens"][:, -16:][out["response_mask"]]
    assert (sampled != 39).all() and len(sampled.unique()) >= 38
    if share == 0:
        assert set(lengths) == {16} and not out["finished"].any()
    else:  # 1 / share x (1 - (1 - share)^16) = 7.06; the mean of 400 has a deviation of 0.26
        assert statistics.mean(lengths) == pytest.approx(7.06, abs=0.9)
        assert (sampled == 38).double().mean().item() == pytest.approx(0.125, abs=0.03)
    assert from_pretrained(tmp_path / "reward_model", "scalar").head == "scalar" and os.listdir(tmp_path)

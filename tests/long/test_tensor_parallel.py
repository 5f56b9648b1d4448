"""Tensor-parallel generation: ranks decode together, and a run is what it is without."""
import pytest
import torch
import transformers

from byte_tokenizer import write_byte_tokenizer
from tiny import (EOS, MARKERS, PAD, assert_one_line, assert_same_run, keys_of, read_log, run, well,
                  write)

SIZES = dict(vocab_size=264, bos_token_id=None, eos_token_id=EOS, pad_token_id=PAD, hidden_size=32,
             num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
             max_position_embeddings=64, initializer_range=0.2)
KINDS = {"gpt_neox": {}, "llama": dict(num_key_value_heads=2, tie_word_embeddings=True)}
CASES = {  # family, ranks, keys
    "each rank two layers' half, at stage 3": ("gpt_neox", 4, dict(
        zero_stage="3", rollout_batch_size=3, num_minibatches=1)),
    "tied, two heads of keys": ("llama", 2, dict(lora="4"))}


@pytest.mark.skipif(not hasattr(transformers.PreTrainedModel, "_resolve_parallel_plans"),
                    reason="transformers before 5.23")
@pytest.mark.parametrize("name", CASES)
def test_a_split_policy_samples_what_the_whole_one_samples(world, tmp_path, name):
    """After each update; and it sees its weights move."""
    kind, ranks, more = CASES[name]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SIZES, **KINDS[kind])
    transformers.AutoModelForCausalLM.from_config(config).double().save_pretrained(
        tmp_path / "policy")
    write_byte_tokenizer(str(tmp_path / "policy"), MARKERS)
    rule = write(tmp_path / "mine.py", "def odd(batch):\n    return [sum(map(ord, text)) % 7 / 7"
                                       " for text in batch['completions']]\n")
    keys = keys_of(world, "grpo.py", reward_functions=f"{rule}:odd", eval_path="", max_iters=2,
                   policy_path=str(tmp_path / "policy"), **more)
    whole = well("grpo.py", tmp_path / "whole", keys | dict(zero_stage=""))
    split = well("grpo.py", tmp_path, keys | dict(generate_tp=2), ranks=ranks)
    logs = [read_log(out) for out in (whole, split)]
    assert logs[0][1]["objective/kl"] > 0
    # some of llama's numbers are float32, whatever the weights are
    tolerance = 1e-9 if kind == "gpt_neox" else 1e-5
    if kind == "gpt_neox":
        assert_same_run(whole, split, tolerance=tolerance)
    for a, b in zip(*(log[:-1] for log in logs), strict=True):
        assert a["objective/texts"] == b["objective/texts"]
        assert b["policy/sampler_gap"] < tolerance


def test_what_cannot_be_split_is_one_line(world, tmp_path):
    """GPT-2, for which transformers has no plan."""
    result = run("grpo.py", tmp_path, keys_of(world, "grpo.py", generate_tp=2), ranks=2)
    assert_one_line(result, "grpo.py", "generate_tp")

"""
The real vLLM samples what the policy would (all but it is tested by evidence/tests/test_vllm.py):

    VLLM_PYTHON=... python -m pytest evidence/needs/test_real_vllm.py
"""
import importlib.util
import os
import sys

import pytest
import torch

from load import load
from test_families import GPT, SIZES
from test_model import CPU, random_model, written
from tiny import EOS, keys_of_system


def find_vllm():
    """An interpreter with vLLM, or None."""
    if "VLLM_PYTHON" in os.environ:
        return os.environ["VLLM_PYTHON"]
    return sys.executable if importlib.util.find_spec("vllm") else None


@pytest.mark.skipif(not find_vllm(), reason="no vLLM here, and VLLM_PYTHON names none")
@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3"])
def test_vllm_samples_what_the_policy_would(tmp_path, family):
    """Log-probs as we compute them, also of new weights; an end only at an end; a seed's noise."""
    from options.vllm import VLLM

    # vLLM's kernels want heads of 32 numbers
    config = GPT | dict(n_embd=64, n_head=2) if family == "gpt2" else SIZES | dict(
        hidden_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
        tie_word_embeddings=family == "qwen3")
    system = keys_of_system(timeout=600, vllm_cache=0.25, rollout_batch_size=64)
    policy = load(written(tmp_path, random_model(family, config)), "policy", system, CPU,
                  trained=True)
    vllm = VLLM(policy, system, CPU)
    policy.tokenizer.eos_ids = {EOS, 65, 66, 67}
    prompts = [[49 + i, 43, 50] for i in range(6)] * 2

    for _ in range(2):
        vllm.take_weights(policy)
        for temperature in (0.7, 1.0):
            responses, logprobs, lengths, finished = vllm.respond(
                prompts, 20, temperature, range(12))
            assert responses.shape == (12, 20) and responses.max() < 260
            for row, n in enumerate(lengths.tolist()):
                ids = torch.tensor([prompts[row] + responses[row, :n].tolist()])
                with torch.no_grad():
                    wanted, _ = policy.logprobs(ids, torch.arange(ids.shape[1])[None] >= 3,
                                                temperature)
                assert (logprobs[row, :n] - wanted).abs().max() < 2e-5
                ends = [int(i) in policy.tokenizer.eos_ids for i in ids[0, 3:]]
                assert not any(ends[:-1]) and (ends[-1] or n == 20)
                assert ends[-1] == bool(finished[row])
        again, other = (vllm.respond(prompts, 20, 1.0, seeds)[0]
                        for seeds in (range(12), range(100, 112)))
        assert torch.equal(again, responses) and not torch.equal(again, other)
        with torch.no_grad():
            for p in policy.parameters():
                p.add_(0.02 * torch.randn_like(p))
    vllm.connection.close()
    assert vllm.process.wait(30) == 0

"""How speed is measured: with random models that end when they shall (tools/bench.py)."""
import json
import statistics

import pytest

from engine.tokenizers import load_tokenizer
from model import load_model
from rollout import generate
from tools.bench import make_models

SIZES = dict(vocab_size=40, hidden_size=16, intermediate_size=3, num_hidden_layers=2, num_attention_heads=2,
             num_key_value_heads=1)


@pytest.mark.parametrize("share", [0.0, 0.125])
def test_random_models_end_as_often_as_they_shall(tmp_path, share):
    make_models(tmp_path, SIZES, prompt_length=3, longest=16, end_share=share, prompts=400)
    policy, tokenizer = load_model(tmp_path / "policy"), load_tokenizer(tmp_path / "policy")
    assert (tokenizer.eos_id, tokenizer.pad_id) == (38, 39)
    prompts = tokenizer.encode_prompts([json.loads(line)["prompt"] for line in (tmp_path / "prompts.jsonl").open()])
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
    reward_model = load_model(tmp_path / "reward_model", "scalar")
    assert not reward_model.new_head and reward_model.hf.config.score_shift == 0

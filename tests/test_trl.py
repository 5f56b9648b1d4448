"""
Reward models that TRL's RewardTrainer has trained, and those of rm.py in TRL's hands. Skipped where TRL is not installed
(pip install trl); it is no requirement of quartet's.
"""

import pytest
import torch

pytest.importorskip("trl")

from datasets import Dataset  # noqa: E402
from transformers import AutoModelForSequenceClassification, AutoTokenizer  # noqa: E402
from trl import RewardConfig, RewardTrainer  # noqa: E402


import models_of_the_world as world  # noqa: E402
from test_reward_models import PAIRS, as_chat, load, padded_scores, scores_of, texts_of  # noqa: E402


@pytest.mark.parametrize("pad", ["its own", "another"])
@pytest.mark.parametrize("name", ["llama3.2", "qwen2.5", "pythia"])
def test_trained_by_trl(name, pad, tmp_path):
    """All scores within 1e-4 of transformers' on a padded batch, and every pair in the same order."""
    policy = world.make(tmp_path / "policy", name)
    tokenizer = AutoTokenizer.from_pretrained(policy)
    if pad == "another":
        tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    rows = [as_chat(row) if tokenizer.chat_template else row for row in PAIRS]
    arguments = RewardConfig(str(tmp_path / "run"), max_steps=6, per_device_train_batch_size=4, learning_rate=3e-3,
                             report_to="none", use_cpu=True, bf16=False, gradient_checkpointing=False, save_strategy="no",
                             disable_tqdm=True, max_length=None)
    model = AutoModelForSequenceClassification.from_pretrained(policy, num_labels=1)
    if len(tokenizer) > model.config.vocab_size:
        model.resize_token_embeddings(len(tokenizer))
    trainer = RewardTrainer(model, arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    trainer.train()
    folder = str(tmp_path / "reward")
    trainer.save_model(folder)
    theirs = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    own = pad == "another" or name in ("qwen3", "pythia", "gemma")  # a padding that ends nothing
    assert (theirs.config.pad_token_id == tokenizer.eos_token_id) == (not own)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    want = padded_scores(theirs, tokenizer, texts_of(tokenizer, PAIRS))  # (2 * pairs,)

    got = scores_of(PAIRS, *load(folder), name in world.CHATS)
    assert (got - want).abs().max() < 1e-4 and want.std() > 0.01
    assert torch.equal(got[::2] > got[1::2], want[::2] > want[1::2])

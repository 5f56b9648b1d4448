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
from tiny import jsonl, run  # noqa: E402


@pytest.mark.parametrize("pad", ["its own", "another"])
@pytest.mark.parametrize("name", world.FAMILIES)
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


@pytest.mark.parametrize("name", world.FAMILIES)
def test_trl_evaluates_what_rm_py_leaves(name, tmp_path):
    """TRL finds the same pairs right, in padded batches."""
    policy, chat = world.make(tmp_path / "policy", name), name in world.CHATS
    rows = [as_chat(row) if chat else row for row in PAIRS]
    jsonl(tmp_path / "pairs.jsonl", rows)
    jsonl(tmp_path / "demos.jsonl", [dict(prompt=row["prompt"], completion=row["chosen"]) for row in rows])
    done = run("rm.py", f"--init_from={policy}", f"--out_dir={tmp_path}/rm", f"--train_path={tmp_path}/pairs.jsonl",
               f"--val_path={tmp_path}/pairs.jsonl", f"--demonstrations_path={tmp_path}/demos.jsonl", "--max_iters=3",
               "--batch_size=5", "--learning_rate=3e-3", "--device_type=cpu")
    assert done.returncode == 0, done.stderr
    folder = str(tmp_path / "rm" / "reward_model")
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    before = model.config.pad_token_id
    arguments = RewardConfig(str(tmp_path / "run"), per_device_eval_batch_size=5, report_to="none", use_cpu=True, bf16=False,
                             gradient_checkpointing=False, disable_tqdm=True, max_length=None, remove_unused_columns=False)
    trainer = RewardTrainer(model, arguments, train_dataset=Dataset.from_list(rows), eval_dataset=Dataset.from_list(rows),
                            processing_class=tokenizer)
    found = trainer.evaluate()
    assert model.config.pad_token_id == before
    got = scores_of(PAIRS, *load(folder), chat)
    margins = got[::2] - got[1::2]
    assert found["eval_accuracy"] == pytest.approx((margins > 0).double().mean().item())
    assert found["eval_margin"] == pytest.approx(margins.mean().item(), abs=1e-4)


def test_rewards_of_trl_work_as_they_are(tmp_path):
    """TRL's own reward functions, by FILE.py:FUNCTION, give what they give when TRL calls them."""
    from trl.rewards import think_format_reward

    from engine.reward_mix import call_rewards, parse_rewards

    (tmp_path / "mine.py").write_text("from trl.rewards import get_soft_overlong_punishment, think_format_reward\n"
                                      "overlong = get_soft_overlong_punishment(max_completion_len=8, soft_punish_cache=4)\n")
    rewards = parse_rewards("mine.py:think_format_reward,mine.py:overlong", {}, str(tmp_path))
    texts = ["<think>\na\n</think>\nb", "b", "<think>\n</think>"]
    rows = [dict(prompt=[dict(role="user", content="?")], answer="b")] * 3
    mask = torch.arange(9) < torch.tensor([[3], [6], [9]])
    given = call_rewards(rewards, dict(rows=rows, completions=texts, tokens=torch.zeros(3, 12), response_mask=mask))
    want = think_format_reward([[dict(role="assistant", content=text)] for text in texts])
    assert given["think_format_reward"].tolist() == want and len(set(want)) == 2
    assert given["overlong"].tolist() == [0, -0.5, -1]

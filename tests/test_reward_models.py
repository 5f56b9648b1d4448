"""
Reward models of others are read as transformers reads them, and those of rm.py are read by transformers as by us, in batches.
The truth is AutoModelForSequenceClassification on what apply_chat_template writes, in tiny models of the world's families.
"""
import json
import os
import random

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from engine.build import load_reward_model, load_value_model
from engine.pretrained import from_pretrained
from engine.reading import Reader, reader_of
from engine.tokenizers import load_tokenizer
from errors import BadInput
from model import freeze
from rewards import reward_model_scores, score_sequences

import models_of_the_world as world
from tiny import jsonl, run, run_in_one

WORDS = ["Paris", "is", "1+2=3", "the fox", "dog,", "It", "Sure!", "caf\u00e9", "\n", "  ", "helpful assistant", "user"]
rng = random.Random(0)


def some(n):
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, n)))


PAIRS = [dict(prompt=some(9) + "?", chosen=some(30), rejected=some(12)) for _ in range(16)]


def as_chat(row):
    """A pair with messages in the place of its strings."""
    roles = dict(prompt="user", chosen="assistant", rejected="assistant")
    return {field: [dict(role=role, content=row[field])] for field, role in roles.items()}


def texts_of(tokenizer, pairs):
    """What a user of transformers writes of pairs, chosen and rejected in turn: the template's text; or all in a row, and EOS."""
    chats = [(as_chat(row), field) for row in pairs for field in ("chosen", "rejected")]
    if tokenizer.chat_template:
        return [tokenizer.apply_chat_template(row["prompt"] + row[field], tokenize=False) for row, field in chats]
    return [row["prompt"] + row[field] + tokenizer.eos_token for row in pairs for field in ("chosen", "rejected")]


def padded_scores(model, tokenizer, texts):
    """Scores by transformers of texts in a padded batch, as TRL does it: BOS is the template's, or the tokenizer's own."""
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(model.config.pad_token_id)
    batch = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt",
                      add_special_tokens=not tokenizer.chat_template)
    assert not batch["attention_mask"].bool().all()
    batch.pop("token_type_ids", None)
    with torch.no_grad():
        return model(**batch).logits[:, 0]


def batch_of(pairs, chat=False):
    """The batch of a run whose responses are the chosen and the rejected ones, in turn."""
    rows = [(as_chat(row) if chat else row, row[field]) for row in pairs for field in ("chosen", "rejected")]
    return dict(rows=[dict(prompt=row["prompt"]) for row, _ in rows], completions=[text for _, text in rows],
                tokens=torch.zeros(len(rows), 1, dtype=torch.int64), finished=torch.ones(len(rows), dtype=torch.bool))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """{name: a reward model of others'}"""
    root = tmp_path_factory.mktemp("world")
    return {name: world.make(root / name, name, head="scalar") for name in world.FAMILIES}


def edit(folder, file, **changes):
    path = os.path.join(folder, file)
    with open(path, encoding="utf-8") as f:
        value = json.load(f) | changes
    with open(path, "w", encoding="utf-8") as f:
        json.dump({k: x for k, x in value.items() if x is not None}, f)


def load(folder, reward_format="auto", dtype="float32"):
    reward_model, tokenizer = freeze(from_pretrained(folder, "scalar", dtype)), load_tokenizer(folder)
    return reward_model, *reader_of(reward_model, tokenizer, reward_format, folder)


# others'


@pytest.mark.parametrize("pad", ["as it is", "other", "none"])
@pytest.mark.parametrize("name", world.FAMILIES)
def test_others_score_as_transformers(name, pad, folders, tmp_path):
    """Prompts as strings and as messages; with pad = EOS, with another pad (read at EOS, or behind it), and without one."""
    folder = folders[name]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    theirs = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    own = load_tokenizer(folder)
    reward_model = freeze(from_pretrained(folder, "scalar"))
    texts = texts_of(tokenizer, PAIRS)
    if pad == "as it is":
        want = padded_scores(theirs, tokenizer, texts)
    else:
        # an id that no text ends with; without a pad_token_id, transformers takes one text at a time
        number = own.encode("+")[0] if pad == "other" else None
        theirs.config.pad_token_id = number
        reward_model.config.hf = reward_model.config.hf | dict(pad_token_id=number)
        ids = [tokenizer(text, add_special_tokens=not tokenizer.chat_template, return_tensors="pt")["input_ids"] for text in texts]
        with torch.no_grad():
            want = torch.cat([theirs(x).logits for x in ids])[:, 0]
    reader, said = reader_of(reward_model, own, "auto", folder)
    chat = name in world.CHATS
    assert ("in its own chat template" if chat else "as plain text") in said and f"reward model {folder}: not trained" in said
    for as_messages in (False, True)[:1 + chat]:
        for size in (1, 5, 100):
            got = reward_model_scores(batch_of(PAIRS, as_messages), reward_model, reader, own, size)
            assert (got - want).abs().max() < 1e-4 < 0.05 < want.std()
            assert torch.equal(got[::2] > got[1::2], want[::2] > want[1::2])
    if pad == "as it is":  # which is EOS, or stands behind it in no text
        plain = score_sequences(reward_model, *padded_ids(reader, own), 8)
        assert (name in ("qwen2.5", "qwen3")) == (plain - want).abs().max().lt(1e-4).item()


def padded_ids(reader, tokenizer):
    from data import right_pad

    sequences = [reader.encode_response(row["prompt"], row[field]) for row in PAIRS for field in ("chosen", "rejected")]
    return right_pad(sequences, tokenizer.pad_id)

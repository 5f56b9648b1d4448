"""
A reward model is read as transformers and TRL read it, to the end of its chat template, by ppo.py as by rm.py in training. The
truth is AutoModelForSequenceClassification on what apply_chat_template writes, in tiny models of the world's families.
"""
import json
import os
import random
import shutil

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tokenizer import load_reader, load_tokenizer
from model import freeze
from load import load_model
from rewards import score_sequences

import models_of_the_world as world
from tiny import arguments, in_a_row, jsonl, one_run, read_log

WORDS = ["Paris", "is", "1+2=3", "the fox", "dog,", "It", "Sure!", "caf\u00e9", "\n", "  ", "helpful assistant", "user"]
rng = random.Random(0)


def some(n):
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, n)))


PAIRS = [dict(prompt=some(9) + "?", chosen=some(30), rejected=some(12)) for _ in range(10)]


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


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """{name: a reward model of others'}"""
    root = tmp_path_factory.mktemp("world")
    return {name: world.make(root / name, name, head="scalar") for name in world.FAMILIES}


def load(folder, dtype=torch.float32):
    """(a reward model, its tokenizer)"""
    reward_model = freeze(load_model(folder, "scalar", dtype))
    return reward_model, load_reader(folder, reward_model, load_tokenizer(folder))


def scores_of(pairs, reward_model, reader, chat=False, size=5):
    """What a run gives the chosen and the rejected ones, in turn."""
    texts = [((as_chat(row) if chat else row)["prompt"], row[field]) for row in pairs for field in ("chosen", "rejected")]
    return score_sequences(reward_model, reader.encode_scored(*zip(*texts, strict=True)), size, "cpu")


@pytest.mark.parametrize("name", world.FAMILIES)
def test_others_score_as_transformers(name, folders):
    """Prompts as strings and as messages; with pad = EOS, with another pad (read at EOS, or behind it), and without one."""
    folder, chat = folders[name], name in world.CHATS
    tokenizer, own = AutoTokenizer.from_pretrained(folder), load_tokenizer(folder)
    theirs = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    reward_model = freeze(load_model(folder, "scalar"))
    texts = texts_of(tokenizer, PAIRS)
    ids = [tokenizer(text, add_special_tokens=not chat, return_tensors="pt")["input_ids"] for text in texts]
    seen = []
    for pad in (theirs.config.pad_token_id, own.encode_texts(["+"])[0][-1], None):  # no text ends with a +
        theirs.config.pad_token_id = reward_model.hf.config.pad_token_id = pad
        if pad == own.eos_id or pad == own.pad_id:
            want = padded_scores(theirs, tokenizer, texts)
        else:  # transformers takes one text at a time
            want = torch.cat([theirs(x).logits for x in ids])[:, 0].detach()
        reader = load_reader(folder, reward_model, own)
        for as_messages, size in [(False, 3), (True, 5)][:1 + chat]:
            got = scores_of(PAIRS, reward_model, reader, as_messages, size)
            assert (got - want).abs().max() < 1e-5 < 0.05 < want.std()
        assert torch.equal(got[::2] > got[1::2], want[::2] > want[1::2])
        seen.append(want)
    # with pad = EOS at the very end, the score is read in front of it; behind some ends of turn there is a line break
    at_the_end = (seen[0] - seen[2]).abs().max() < 1e-4
    assert at_the_end == (name in ("qwen2.5", "qwen3", "gemma")) and (seen[1] - seen[2]).abs().max() < 1e-4


# those of rm.py


@pytest.fixture(scope="module")
def trained(families, tmp_path_factory):
    """{name: the folder that rm.py leaves}"""
    root = tmp_path_factory.mktemp("trained")
    jobs, found = {}, {}
    for chat in (False, True):
        rows = [as_chat(row) if chat else row for row in PAIRS]
        jsonl(root / f"pairs{chat}.jsonl", rows)
        jsonl(root / f"demos{chat}.jsonl", [dict(prompt=row["prompt"], completion=row["chosen"]) for row in rows])
    for name, policy in families.items():
        chat = name in world.CHATS
        found[name] = f"{root}/{name}/rm/reward_model"
        pairs, demos = (f"{root}/{kind}{chat}.jsonl" for kind in ("pairs", "demos"))
        keys = ["--batch_size=5", "--micro_batch_size=5", "--device_type=cpu", "--learning_rate=3e-3", "--max_iters=3"]
        jobs[name] = one_run("rm.py", [f"--init_from={policy}", "--out_dir=rm", f"--train_path={pairs}", f"--val_path={pairs}",
                                       f"--demonstrations_path={demos}", *keys])
    in_a_row(root, jobs).succeeded()
    return found


@pytest.mark.parametrize("name", world.FAMILIES)
def test_what_rm_py_trains_is_what_others_read(name, trained):
    """
    The whole template: the loss that rm.py logs of its held-out pairs is that of transformers' scores in a padded batch, every
    pair is in the same order, and a run of PPO scores the same, but for score_shift.
    """
    folder, chat = trained[name], name in world.CHATS
    theirs = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer, (reward_model, reader) = AutoTokenizer.from_pretrained(folder), load(folder)
    assert tokenizer.pad_token_id == theirs.config.pad_token_id == reader.skipped_id
    want = padded_scores(theirs, tokenizer, texts_of(tokenizer, PAIRS))
    got = scores_of(PAIRS, reward_model, reader, chat) - reward_model.score_shift
    assert (got - want).abs().max() < 1e-5 < 0.01 < want.std()
    logged = read_log(os.path.dirname(folder))[-1]
    margins = (want[::2] - want[1::2]).double()
    assert logged["eval/loss"] == pytest.approx(-torch.nn.functional.logsigmoid(margins).mean().item(), abs=1e-5)
    assert logged["eval/accuracy"] == (margins > 0).double().mean().item()
    assert reward_model.score_shift == pytest.approx(-want[::2].mean().item(), abs=1e-5)
    # a padding token that ends nothing, where the family has one: then the score is read at the very end
    assert tokenizer.pad_token == dict(qwen3="<|endoftext|>", pythia="<|padding|>", mistral="<unk>", gemma="<pad>",
                                       ).get(name, tokenizer.eos_token)


# as a user runs them


def test_runs_with_reward_models_of_others(folders, families, tmp_path):
    """A run with a reward model of others: its scores are transformers'; and one whose tokenizer has no chat template."""
    jsonl(tmp_path / "prompts.jsonl", [dict(prompt=as_chat(row)["prompt"]) for row in PAIRS])
    keys = dict(prompts_path="../prompts.jsonl", eval_path="../prompts.jsonl", batch_size=4, micro_batch_size=4, max_new_tokens=6,
                max_iters=1, device_type="cpu", eval_size=4, policy_path=families["qwen3"], group_size=2,
                reward_functions="reward_model", out_dir="out")
    zero = shutil.copytree(folders["llama3.2"], tmp_path / "zero")  # says its zero: its scores are logged as they are
    config = json.loads((zero / "config.json").read_text())
    (zero / "config.json").write_text(json.dumps(config | dict(score_shift=0.0)))
    done = {name: x for name, (x,) in in_a_row(tmp_path, {
        name: one_run("grpo.py", arguments(keys | dict(reward_path=folder)))
        for name, folder in (("grpo", zero), ("refused", folders["gpt2"]))}).items()}
    assert not done["grpo"]["kind"], done["grpo"]
    assert done["refused"]["kind"] == "BadInput" and "--chat_template=FILE" in done["refused"]["message"]
    # the score of each sample of the evaluation is transformers', of its text
    theirs = AutoModelForSequenceClassification.from_pretrained(folders["llama3.2"]).eval()
    tokenizer = AutoTokenizer.from_pretrained(folders["llama3.2"])
    with open(tmp_path / "grpo" / "out" / "samples.jsonl", encoding="utf-8") as f:
        samples = [json.loads(line) for line in f]
    assert len(samples) >= 2
    for sample in samples:
        messages = [*sample["prompt"], dict(role="assistant", content=sample["text"])]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        assert abs(padded_scores(theirs, tokenizer, [text, text + "a"])[0].item() - sample["scores"]["scores"]) < 1e-4

"""
A reward model is read as transformers and TRL read it, to the end of its chat template, by ppo.py
as by rm.py in training. The truth is AutoModelForSequenceClassification on what
apply_chat_template writes, in the tiny models of models_of_the_world.py.
"""
import os
import random

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import models_of_the_world as others
from load import load, load_reward_model
from rewards import score_sequences
from test_model import CPU
from test_tokenizer import assistant, user
from tiny import jsonl, keys_of_system, read_log, well, write
from tokenizer import load_tokenizer

WORDS = ["Paris", "is", "1+2=3", "the fox", "dog,", "It", "Sure!", "caf\u00e9", "\n", "  ",
         "helpful assistant", "user"]
rng = random.Random(0)


def some(n):
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, n)))


PAIRS = [dict(prompt=some(9) + "?", chosen=some(30), rejected=some(12)) for _ in range(10)]
CHATS = [dict(prompt=[user(row["prompt"])], chosen=[assistant(row["chosen"])],
              rejected=[assistant(row["rejected"])]) for row in PAIRS]


def texts_of(tokenizer):
    """
    What a user of transformers writes of PAIRS, chosen and rejected in turn: the template's text;
    or prompt, completion and EOS.
    """
    if tokenizer.chat_template:
        return [tokenizer.apply_chat_template(row["prompt"] + row[field], tokenize=False,
                                              date_string="26 Jul 2024")
                for row in CHATS for field in ("chosen", "rejected")]
    return [row["prompt"] + row[field] + tokenizer.eos_token for row in PAIRS
            for field in ("chosen", "rejected")]


def padded_scores(model, tokenizer, texts):
    """transformers' scores in a padded batch, as in TRL: BOS is the template's, or its own."""
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(model.config.pad_token_id)
    batch = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt",
                      add_special_tokens=not tokenizer.chat_template)
    assert not batch["attention_mask"].bool().all()
    batch.pop("token_type_ids", None)
    with torch.no_grad():
        return model(**batch).logits[:, 0]


def our_scores(reward_model, rows):
    """What a run gives the chosen and the rejected ones, in turn."""
    texts = [(row["prompt"], row[field]) for row in rows for field in ("chosen", "rejected")]
    sequences = reward_model.tokenizer.encode_scored(*zip(*texts, strict=True))
    return score_sequences(reward_model, sequences, 3, CPU)


def ours(folder):
    return load_reward_model(folder, None, keys_of_system(), CPU)


@pytest.mark.parametrize("name", others.FAMILIES)
def test_others_score_as_transformers(name, tmp_path):
    """Prompts as strings and as messages; pad = EOS, another pad (at EOS, or behind it), none."""
    folder = others.make(tmp_path, name, head="scalar")
    tokenizer, chat = AutoTokenizer.from_pretrained(folder), name in others.CHATS
    theirs, mine = AutoModelForSequenceClassification.from_pretrained(folder).eval(), ours(folder)
    texts, t, seen = texts_of(tokenizer), mine.tokenizer, []
    ids = [tokenizer(text, add_special_tokens=not chat, return_tensors="pt")["input_ids"]
           for text in texts]
    for pad in (theirs.config.pad_token_id, t.encode_texts(["+"])[0][-1], None):  # none ends in a +
        theirs.config.pad_token_id = t.skipped_id = pad
        if pad in (t.eos_id, t.pad_id):
            want = padded_scores(theirs, tokenizer, texts)
        else:  # transformers takes one text at a time
            want = torch.cat([theirs(x).logits for x in ids])[:, 0].detach()
        for rows in [PAIRS, CHATS][:1 + chat]:
            assert (our_scores(mine, rows) - want).abs().max() < 1e-4 < 0.05 < want.std()
        seen.append(want)
    # with pad = EOS at the very end, the score is read in front of it; behind some ends of turn
    # there is a line break
    at_the_end = (seen[0] - seen[2]).abs().max() < 1e-4
    assert at_the_end == (name in ("qwen2.5", "qwen3"))
    assert (seen[1] - seen[2]).abs().max() < 1e-4


# what pads in a family: its EOS; a token that ends nothing, or <unk> where there is none (the score
# is then read at the very end)
PADS = {"qwen2.5": "<|endoftext|>", "pythia": "<|padding|>", "mistral": "<unk>"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """{name: the folder that rm.py leaves}"""
    root, made = tmp_path_factory.mktemp("trained"), {}
    for name in PADS:
        policy, rows = others.make(root / f"policy {name}", name), [PAIRS, CHATS]
        rows = rows[name in others.CHATS]
        pairs = jsonl(root / f"{name}.jsonl", rows)
        demos = jsonl(root / f"demos-{name}.jsonl", [
            dict(prompt=row["prompt"], completion=row["chosen"]) for row in rows])
        made[name] = well("rm.py", root / name, dict(
            init_from=policy, train_path=pairs, val_path=pairs, demonstrations_path=demos,
            batch_size=5, micro_batch_size=5, device_type="cpu", learning_rate=3e-3, max_iters=2))
    return {name: f"{out}/reward_model" for name, out in made.items()}


@pytest.mark.parametrize("name", PADS)
def test_what_rm_py_trains_is_what_others_read(name, trained):
    """The loss that rm.py logs of its held-out pairs is that of transformers' padded scores."""
    folder, mine = trained[name], ours(trained[name])
    theirs = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.pad_token_id == theirs.config.pad_token_id == mine.tokenizer.skipped_id
    want = padded_scores(theirs, tokenizer, texts_of(tokenizer))
    got = our_scores(mine, CHATS if name in others.CHATS else PAIRS) - mine.score_shift
    assert (got - want).abs().max() < 1e-4 < 0.01 < want.std()
    logged, margins = read_log(os.path.dirname(folder))[-1], (want[::2] - want[1::2]).double()
    loss = -torch.nn.functional.logsigmoid(margins).mean().item()
    assert logged["eval/loss"] == pytest.approx(loss, abs=1e-4)
    assert logged["eval/accuracy"] == (margins > 0).double().mean().item()
    assert mine.score_shift == pytest.approx(-want[::2].mean().item(), abs=1e-4)
    assert tokenizer.pad_token == PADS[name]


# whose template

KEYS = [dict(system_prompt="Be short."), dict(template_kwargs="enable_thinking=False,x='y'"),
        dict(chat_template="{% for m in messages %}{{ m.role + m.content + eos_token }}"
                           "{% endfor %}{{ 'y' if x }}")]


@pytest.mark.parametrize("lora", ["", "4"])
def test_a_reward_model_reads_as_it_was_trained(tmp_path, lora):
    """
    Trained by rm.py with a system prompt, a template and variables of its own, it gives a
    response the same score whatever the policy's keys are: that of transformers with its own.
    """
    policy = others.make(tmp_path / "policy", "qwen2.5")
    pairs = jsonl(tmp_path / "pairs.jsonl", CHATS)
    file = write(tmp_path / "t.jinja", KEYS[2]["chat_template"])
    out = well("rm.py", tmp_path / "rm", KEYS[0] | dict(
        init_from=policy, train_path=pairs, chat_template=file, template_kwargs="x=1", lora=lora,
        device_type="cpu", batch_size=4, max_iters=1, learning_rate=1e-2))
    whole = f"{out}/reward_model"
    theirs = AutoModelForSequenceClassification.from_pretrained(whole).eval()
    tokenizer = AutoTokenizer.from_pretrained(whole)
    texts = [tokenizer.apply_chat_template(
        [dict(role="system", content="Be short."), *row["prompt"], *row[field]], tokenize=False,
        x=1) for row in CHATS for field in ("chosen", "rejected")]
    wanted = padded_scores(theirs, tokenizer, texts) + theirs.config.score_shift
    assert {text[-1] for text in texts} == {"y"} and texts[0].startswith("systemBe short.")
    for keys in ({}, KEYS[0], dict(system_prompt="Think!"), KEYS[1], dict(chat_template=file)):
        got = [load_reward_model(whole, None, keys_of_system(**keys), CPU)]
        if lora:
            adapter, keyed = f"{out}/reward_model_adapter", keys_of_system(lora=lora, **keys)
            got.append(load_reward_model(adapter, None, keyed, CPU))
            keyed.share_base = True
            trained = load(policy, "policy", keyed, CPU, trained=True)
            got.append(load_reward_model(adapter, trained, keyed, CPU))
            assert trained.tokenizer.chats.system_prompt == keys.get("system_prompt", "")
        for model in got:
            assert (our_scores(model, CHATS) - wanted).abs().max() < 1e-4 < 0.01 < wanted.std()


def test_the_policys_template_is_only_the_policys(tmp_path):
    """Of policy, reference and a reward model in training; a foreign one, and a judge, has none."""
    folder = others.make(tmp_path / "policy", "qwen2.5")
    file = write(tmp_path / "t.jinja", KEYS[2]["chat_template"])
    plain, keyed = keys_of_system(), keys_of_system(**KEYS[0], chat_template=file)
    chat = [user("a"), assistant("b")]
    own, run_s = (load_tokenizer(folder, s).encode_prompts([chat[:1]]) for s in (plain, keyed))
    for name, head, trained, which in (
            ("policy", "lm", True, run_s), ("policy", "lm", False, run_s),
            ("ref", "lm", False, run_s), ("reward", "scalar", True, run_s),
            ("reward", "scalar", False, own), ("judge", "lm", False, own)):
        model = load(folder, name, keyed, CPU, head, trained)
        assert model.tokenizer.encode_prompts([chat[:1]]) == which, (name, trained)
    assert own != run_s

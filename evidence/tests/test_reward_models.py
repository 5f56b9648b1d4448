"""
A reward model is read as transformers and TRL read it, to the end of its chat template, by ppo.py
as by rm.py in training. The truth is AutoModelForSequenceClassification on what
apply_chat_template writes, in the tiny models of models_of_the_world.py.
"""
import random

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import models_of_the_world as others
from load import load, load_reward_model
from rewards import score_sequences
from test_model import CPU
from test_tokenizer import assistant, turn, user
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


def texts_of(tokenizer, system=(), **kwargs):
    """
    What a user of transformers writes of PAIRS, chosen and rejected in turn: the template's text;
    or prompt, completion and EOS.
    """
    if not tokenizer.chat_template:
        return [row["prompt"] + row[field] + tokenizer.eos_token for row in PAIRS
                for field in ("chosen", "rejected")]
    return [tokenizer.apply_chat_template([*system, *row["prompt"], *row[field]], tokenize=False,
                                          date_string="26 Jul 2024", **kwargs)
            for row in CHATS for field in ("chosen", "rejected")]


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


def ours(folder, policy=None, **keys):
    return load_reward_model(folder, policy, keys_of_system(**keys), CPU)


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


# a run of rm.py: its family; what pads there: its EOS, a token that ends nothing, or <unk> where
# there is none (the score is then read at the very end); its keys of chats
# its texts end with EOS, which is padding, too, so that an adapter must know which one it skips
CHATTY = dict(system_prompt="Be short.", template_kwargs="x=1", chat_template="""
{{- 'y' if x }}{% for m in messages %}{{ m.role + m.content + eos_token }}{% endfor %}""")
RUNS = [("pythia", "<|padding|>", {}), ("mistral", "<unk>", {}), ("qwen2.5", "<|endoftext|>", {}),
        ("qwen2.5", "<|endoftext|>", CHATTY | dict(lora="4"))]
# those of a policy's run
OTHERS = [{}, dict(system_prompt="Be short."), dict(system_prompt="Think!"),
          dict(template_kwargs="enable_thinking=False,x='y'"),
          dict(chat_template=CHATTY["chat_template"])]


def in_files(keys, folder):
    """Keys of a run: its template is a file."""
    text = keys.get("chat_template")
    return keys | (dict(chat_template=write(folder / "t.jinja", text)) if text else {})


@pytest.mark.parametrize("family, pad, keys", RUNS)
def test_what_rm_py_trains_is_what_others_read(family, pad, keys, tmp_path):
    """
    The loss that rm.py logs of its held-out pairs is that of transformers' padded scores; and with
    a system prompt, a template and variables of its own the model gives a response this score
    whatever the policy's keys are.
    """
    policy, rows = others.make(tmp_path / "policy", family), (
        CHATS if family in others.CHATS else PAIRS)
    pairs = jsonl(tmp_path / "pairs.jsonl", rows)
    demonstrations = jsonl(tmp_path / "demonstrations.jsonl", [
        dict(prompt=row["prompt"], completion=row["chosen"]) for row in rows])
    out = well("rm.py", tmp_path, in_files(keys, tmp_path) | dict(
        init_from=policy, train_path=pairs, val_path=pairs, demonstrations_path=demonstrations,
        batch_size=5, device_type="cpu", learning_rate=3e-3, max_iters=2))
    folder = f"{out}/reward_model"
    theirs = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer, shift = AutoTokenizer.from_pretrained(folder), theirs.config.score_shift
    assert tokenizer.pad_token == pad and tokenizer.pad_token_id == theirs.config.pad_token_id
    texts = texts_of(tokenizer, [turn("system", "Be short.")] * bool(keys), x=1)
    assert not keys or texts[0].startswith("ysystemBe short.") and texts[0].endswith(pad)
    want = padded_scores(theirs, tokenizer, texts)
    logged, margins = read_log(out)[-1], (want[::2] - want[1::2]).double()
    loss = -torch.nn.functional.logsigmoid(margins).mean().item()
    assert logged["eval/loss"] == pytest.approx(loss, abs=1e-4)
    assert logged["eval/accuracy"] == (margins > 0).double().mean().item()
    assert shift == pytest.approx(-want[::2].mean().item(), abs=1e-4)
    for typed in [in_files(other, tmp_path) for other in (OTHERS if keys else OTHERS[:1])]:
        models = [ours(folder, **typed)]
        assert models[0].tokenizer.skipped_id == tokenizer.pad_token_id
        if keys:  # and the adapter alone, on a base of its own or on the policy's
            shared = typed | dict(lora="4", share_base=True)
            trained = load(policy, "policy", keys_of_system(**shared), CPU, trained=True)
            models += [ours(f"{folder}_adapter", lora="4", **typed),
                       ours(f"{folder}_adapter", trained, **shared)]
            assert trained.tokenizer.chats.system_prompt == typed.get("system_prompt", "")
        for model in models:
            gap = our_scores(model, rows) - shift - want
            assert gap.abs().max() < 1e-4 < 0.01 < want.std()
            assert model.score_shift == shift


# whose template


def test_the_policys_template_is_only_the_policys(tmp_path):
    """It is the reference's, too; a foreign reward model and a judge have their own."""
    folder = others.make(tmp_path / "policy", "qwen2.5")
    system = keys_of_system(**in_files(CHATTY, tmp_path))
    own, of_run = (load_tokenizer(folder, keys).encode_prompts([[user("a")]])
                   for keys in (keys_of_system(), system))
    assert own != of_run
    for name, head, trained, which in (
            ("policy", "lm", False, of_run), ("ref", "lm", False, of_run),
            ("reward", "scalar", False, own), ("judge", "lm", False, own)):
        model = load(folder, name, system, CPU, head, trained)
        assert model.tokenizer.encode_prompts([[user("a")]]) == which, (name, trained)

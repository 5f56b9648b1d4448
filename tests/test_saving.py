"""finished.py: dtypes, files that transformers loads, model cards. (What ranks with shards save: test_knobs.py.)"""
import json

import pytest
import torch
import transformers as hf

from checkpoint import save_model
from finished import model_card, public
from tokenizer import load_tokenizer
from load import load_model

import tiny
from families import make, padded
from tiny import forked, one_run, read_weights, write_byte_tokenizer


def test_models_are_saved_as_their_source_was(tmp_path):
    """Made from a bfloat16 folder, a model is trained and kept in float32, and saved in bfloat16; here by two ranks."""
    world = tiny.build(str(tmp_path / "world"))
    source = f"{world.root}/in 16 bits"
    save_model(source, load_model(world.policy), load_tokenizer(world.policy), dtype=torch.bfloat16)
    (result,), = forked(str(tmp_path), {"run": [
        one_run("sft.py", *[world.sft("out", init_from=source, zero_stage="3")] * 2)]}).values()
    assert result["codes"] == [0, 0], result
    out = tmp_path / "run" / "out"
    short, whole = read_weights(out / "policy"), read_weights(out / "checkpoint-000003" / "policy")
    assert {t.dtype for t in short.values()} == {torch.bfloat16} and {t.dtype for t in whole.values()} == {torch.float32}
    assert all(torch.equal(whole[name].bfloat16(), t) for name, t in short.items())
    assert hf.AutoModelForCausalLM.from_pretrained(out / "policy", dtype="auto").dtype == torch.bfloat16


# ---------------------------------------------------------------------------------------------------------------------
# files


@pytest.mark.parametrize("head", ["lm", "scalar"])
@pytest.mark.parametrize("variant", ["gpt2", "llama3-gqa-tied", "gemma2", "mixtral"])
@torch.no_grad()
def test_what_is_saved_transformers_loads(variant, head, tmp_path):
    """Weights that were trained, in the names and with the settings of the folder that they came from; and we load it again."""
    theirs = make(variant, head)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_model(str(tmp_path / "theirs"), head)
    for p in (*ours.parameters(), *theirs.parameters()):
        p.mul_(1.25)
    ours.score_shift = -0.5
    save_model(str(tmp_path / "ours"), ours, tiny_tokenizer(tmp_path))
    kind = hf.AutoModelForCausalLM if head == "lm" else hf.AutoModelForSequenceClassification
    back, found = kind.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert type(back) is type(theirs) and not any(found.values())
    tokens, _ = padded([12], False)
    assert torch.equal(back(tokens).logits, theirs(tokens).logits)
    assert {n: t.shape for n, t in read_weights(tmp_path / "ours").items()} == {
        n: t.shape for n, t in read_weights(tmp_path / "theirs").items()}
    before, after = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("theirs", "ours"))
    assert after == before | (dict(score_shift=-0.5) if head == "scalar" else {})
    again = load_model(str(tmp_path / "ours"), head)
    assert again.score_shift == (-0.5 if head == "scalar" else 0.0) and not again.new_head
    assert all(torch.equal(p, q) for p, q in zip(again.parameters(), ours.parameters(), strict=True))


def tiny_tokenizer(folder):
    path = folder / "tokenizer"
    write_byte_tokenizer(path)
    return load_tokenizer(str(path))


# ---------------------------------------------------------------------------------------------------------------------
# the model card


def test_a_card_names_nobodys_folders():
    settings = dict(n_layer=2, train_path="hf:openai/gsm8k:main:train", val_path="/home/me/x.jsonl",
                    reward_functions="0.5*/home/me/r.py:f,length")
    text = model_card("policy", settings, "/home/me/base", "1M weights")
    assert "/home" not in text and "'x.jsonl'" in text and "0.5*r.py:f,length" in text and "made from `base`" in text
    assert "hf:openai/gsm8k:main:train" in text
    for value, left in (("file:///home/u/x", "file:x"), ("/home/my name/x", "x"), ("out/ppo", "out/ppo"),
                        ("0.3*/home/x/a.jsonl,../b/c.jsonl", "0.3*a.jsonl,../b/c.jsonl")):
        assert public(value) == left

"""What a run leaves: dtypes, parts of several ranks, model cards."""
import json
import os
import re

import pytest
import torch
import transformers as hf

from engine.checkpoint import model_card, public, save_model
from engine.tokenizers import load_tokenizer
from model import load_model

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


# Saves a model of which ranks have parts, with optimizer and average, in small files; or goes on from such a checkpoint
# and saves that again.
SAVE = """
import json, os, sys
import torch
from engine import checkpoint, launch, optimizers, placement
from engine.tokenizers import load_tokenizer
path, out, goes_on, keys = json.loads(sys.argv[1])
checkpoint.FILE_BYTES = 3000
rank, ranks, device = launch.init("cpu", 60)
place = placement.Place(**keys)
dtype = torch.bfloat16 if keys["optimizer"] == "bf16" else torch.float32
place.optimizer = "adamw"
model = placement.load_placed(path, place, device, dtype=dtype, trained=True)
optimizer = optimizers.make_optimizer(model, place, 1e-3, (0.9, 0.95), 1e-8, 0.0)
average = optimizers.MovingAverage(model, 0.5)
os.makedirs(out, exist_ok=True)
if goes_on:
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    folder, state = checkpoint.find_checkpoint(out)
    checkpoint.load_checkpoint(folder, {"policy": model}, {"policy": optimizer}, average)
else:
    with open(f"{out}/config.json", "w") as f:
        f.write("{}")
    generator, states = torch.Generator().manual_seed(3), {}
    for name, p in model.named_parameters():
        states |= {f"{name}.{key}": torch.randn(p.shape, generator=generator) for key in ("exp_avg_sq", "exp_avg")}
        states[f"{name}.step"] = torch.tensor(3.0)
    optimizers.fill_optimizer(model, optimizer, states)
    average.update()
open(f"{out}/log.jsonl", "a").close()
tokenizer = load_tokenizer(path)
checkpoint.save_checkpoint(out, 2 if goes_on else 1, {"policy": model}, {"policy": optimizer}, {}, tokenizer, 9, average)
checkpoint.save_final(out, "policy", model, tokenizer)
launch.finish()
"""
KINDS = {"16 bits": dict(stage=2, optimizer="bf16"),
         "offloaded": dict(stage=3, optimizer="adamw", offload="optimizer")}


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """A folder with one named "KIND RANKS" for each of KINDS, saved by 1 and by 3 ranks, and loaded and saved again by 2."""
    folder = str(tmp_path_factory.mktemp("side"))
    world = tiny.build(f"{folder}/world")
    tiny.add_qwen(world)
    with open(f"{folder}/save.py", "w", encoding="utf-8") as f:
        f.write(SAVE)
    cases = {}
    for kind, keys in KINDS.items():
        for ranks, goes_on in ((1, []), (3, [(2, True)])):
            cases[f"{kind} {ranks}"] = [one_run(f"{folder}/save.py", *[[json.dumps([world.qwen, "out", on, keys])]] * n)
                                        for n, on in [(ranks, False), *goes_on]]
    results = forked(folder, cases, at_once=3)
    for name, each in results.items():
        for result in each:
            assert set(result["codes"]) == {0}, (name, result)
    return folder


def every_file(folder):
    return {os.path.relpath(os.path.join(d, f), folder): open(os.path.join(d, f), "rb").read()
            for d, _, files in os.walk(folder) for f in files}


@pytest.mark.parametrize("kind", KINDS)
def test_what_several_ranks_hold_is_saved_as_of_one(parts, kind):
    """Byte for byte, manifest too; and what was loaded on another number of ranks is what was saved."""
    one = {name: every_file(f"{parts}/{kind} 1/out/{name}") for name in ("checkpoint-000001", "policy")}
    assert sum(bool(re.search(r"policy_optimizer-\d+-of-\d+.safetensors$", f)) for f in one["checkpoint-000001"]) > 2
    assert {"model.safetensors", "README.md"} <= one["policy"].keys()
    out = f"{parts}/{kind} 3/out"
    assert set(os.listdir(out)) == {"checkpoint-000001", "checkpoint-000002", "config.json", "log.jsonl", "policy"}
    for name, files in one.items():
        assert every_file(f"{out}/{name}") == files, name
    first, again = one["checkpoint-000001"], every_file(f"{out}/checkpoint-000002")
    assert again.keys() == first.keys()
    different = {name for name in first if first[name] != again[name]}
    assert different == {"manifest.json", "state.json"}  # the iteration; so its hash


def tiny_tokenizer(folder):
    path = folder / "tokenizer"
    write_byte_tokenizer(path)
    return load_tokenizer(str(path))


# ---------------------------------------------------------------------------------------------------------------------
# the model card


def test_a_card_names_nobodys_folders():
    settings = dict(n_layer=2, train_path="hf:openai/gsm8k:main:train", val_path="/home/me/x.jsonl",
                    reward_functions="0.5*/home/me/r.py:f,length")
    text = model_card("policy", settings, "/home/me/base", "1M weights", {})
    assert "/home" not in text and "'x.jsonl'" in text and "0.5*r.py:f,length" in text and "made from `base`" in text
    assert "hf:openai/gsm8k:main:train" in text
    for value, left in (("file:///home/u/x", "file:x"), ("/home/my name/x", "x"), ("out/ppo", "out/ppo"),
                        ("0.3*/home/x/a.jsonl,../b/c.jsonl", "0.3*a.jsonl,../b/c.jsonl")):
        assert public(value) == left

"""
checkpoint.py: which folders stay, damage of every kind. And files for others: what
transformers 4 reads. With QUARTET_TRANSFORMERS_4, a folder of
`pip install --target=FOLDER --no-deps "transformers<5" "huggingface_hub<1" "tokenizers<0.23"`, it
is asked.
"""
import json
import os
import random
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer

import checkpoint
import test_checkpoint
from byte_tokenizer import write_byte_tokenizer
from errors import BadInput
from checkpoint import damage, find_checkpoint, save_final
from load import load
from test_families import EXPERTS, GPT, HEADS, LLAMA3, LONGROPE, SIZES, random_model, rope, written
from test_model import CPU
from tiny import keys_of, keys_of_system, run, write
from tokenizer import load_tokenizer

out, save = test_checkpoint.out, test_checkpoint.save  # the former is a fixture

# folders, without models

OTHERS = ["policy", "value_model", "best_policy", "ema_policy", "reward_model", "policy_adapter",
          "checkpoint-000100", "checkpoint-1234567", ".tmp-policy", ".old-checkpoint-000001",
          ".gone-checkpoint-000002", ".tmp-ema_policy_adapter", "log.jsonl", "samples.jsonl",
          "rollouts.jsonl", "config.json"]
FREE = ["eval", "checkpoint-100", "checkpoint-best", ".tmp-mine", ".old-photos", ".gone-fishing",
        "policy.bak", "my_policy", "policies", ".tmp", "notes.jsonl", ".old-policy-2"]


def begin(folder, **config):
    config = dict(out_dir=str(folder), script="sft.py") | config
    return checkpoint.begin_or_resume(str(folder), config, [], 10**7)


@pytest.mark.parametrize("name", OTHERS)
def test_a_folder_with_such_a_name_is_no_out_dir(tmp_path, name):
    """Unless its config.json is a run's: of others nothing is written, moved or deleted."""
    if name.endswith(("json", "jsonl")):
        write(tmp_path / name, "{}")
    else:
        os.mkdir(tmp_path / name)
        write(tmp_path / name / "mine", "x")
    for text in None, "{}", "no JSON", "[]", '{"model_type": "gpt2"}':
        if text:
            write(tmp_path / "config.json", text)
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(BadInput, match="out_dir"):
            begin(tmp_path)
        assert sorted(tmp_path.rglob("*")) == before


def test_what_is_beside_a_run_is_left_alone(out):
    """At its start, and when it deletes what it has saved; a link's folder is not the link."""
    for name in FREE:
        os.mkdir(out / name)
        write(out / name / "mine", "x")
    for name in ("policy", "checkpoint-000003", ".tmp-policy", ".gone-checkpoint-000001"):
        os.mkdir(out.parent / f"far-{name}")
        write(out.parent / f"far-{name}" / "mine", "x")
        os.symlink(out.parent / f"far-{name}", out / name)
    with pytest.raises(BadInput, match="none of the checkpoints is good"):
        begin(out)
    os.remove(out / "checkpoint-000003")
    save(out, 1)
    os.rename(out / "checkpoint-000001", out.parent / "far-checkpoint-000001")
    os.symlink(out.parent / "far-checkpoint-000001", out / "checkpoint-000001")
    assert begin(out)[1] == dict(iteration=1)
    assert not os.path.lexists(out / ".tmp-policy")
    save(out, 2, keep=1)
    checkpoint.put_in_place(lambda folder: write(f"{folder}/new", "y"), str(out / "policy"))
    assert sorted(os.listdir(out)) == sorted([*FREE, ".lock", "checkpoint-000002", "config.json",
                                              "policy"])
    assert os.listdir(out / "policy") == ["new"]
    for folder in [*out.parent.glob("far-*"), *(out / name for name in FREE)]:
        assert (folder / "mine").exists() or damage(str(folder)) is None


@pytest.mark.parametrize("key", ["policy_path", "ref_path", "reward_path", "judge_path", "teacher",
                                 "init_from", "tokenizer_path", "prompts_path", "eval_path"])
@pytest.mark.parametrize("path", [
    ".", "policy", "policy/sub", "checkpoint-000100/policy", "../out", "link", "../link/policy",
    "x,policy", " policy , y", "samples.jsonl"])
def test_a_run_replaces_none_of_its_own_models(out, monkeypatch, key, path):
    monkeypatch.chdir(out)
    for name in ("policy/sub", "checkpoint-000100/policy", "other"):
        os.makedirs(name)
    write("samples.jsonl", "{}")
    os.symlink("policy", "link")
    os.symlink(out, "../link")
    before = sorted(out.rglob("*"))
    with pytest.raises(BadInput, match=key):
        begin(".", **{key: path})
    assert sorted(out.rglob("*")) == before


def test_models_in_other_places_of_out_dir(out, monkeypatch):
    """Above it, below it, beside it: a run begins."""
    monkeypatch.chdir(out)
    for name in ("base", "new/policy", "policy.bak"):
        os.makedirs(name)
    write("new/config.json", json.dumps(dict(out_dir="new")))
    os.rmdir("new/policy")
    for path in ("base", "policy.bak", "..", "/", "new", "gpt2", "OWNER/policy", "policy"):
        begin(".", policy_path=path)
        begin("new", policy_path="base", value_init="policy", optim="policy")


def test_damage_of_every_kind_is_seen(out):
    """A flipped bit, a cut, a file that is gone, or is that of the checkpoint before."""
    for iteration in (1, 2):
        save(out, iteration, kl=iteration / 3)
    drawn, newest = random.Random(0), out / "checkpoint-000002"
    for file in newest.iterdir():
        content, before = file.read_bytes(), out / "checkpoint-000001" / file.name
        ways = [None, content[:-1], before.read_bytes()]
        for _ in range(20):
            place, bit = drawn.randrange(len(content)), 1 << drawn.randrange(8)
            ways.append(content[:place] + bytes([content[place] ^ bit]) + content[place + 1:])
        for way in ways:
            if way != content:
                file.unlink() if way is None else file.write_bytes(way)
                assert damage(str(newest)) and find_checkpoint(str(out))[1]["iteration"] == 1, way
                file.write_bytes(content)
    assert damage(str(newest)) is None and len(os.listdir(newest)) == 3


NEVER = dict(pipe=os.mkfifo, device=lambda path: os.symlink("/dev/zero", path),
             nothing=lambda path: os.symlink("nowhere", path))


def in_time(function, *args):
    """function(*args), which would wait for a pipe for ever."""
    def late(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(30)
    try:
        return function(*args)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("kind", NEVER)
def test_a_file_that_never_ends_is_not_read(out, kind):
    """In a checkpoint it is damage, also where no manifest knows it; beside it, it is removed."""
    for iteration in (1, 2):
        save(out, iteration)
    newest = out / "checkpoint-000002"
    for name in ("state.json", "manifest.json", "config.json", "more", "policy/model.safetensors"):
        whole = out / "whole"
        shutil.copytree(newest, whole)
        os.makedirs((newest / name).parent, exist_ok=True)
        (newest / name).unlink(missing_ok=True)
        NEVER[kind](newest / name)
        assert in_time(find_checkpoint, str(out))[1]["iteration"] == 1, name
        shutil.rmtree(newest)
        os.rename(whole, newest)
    for name in ("log.jsonl", "log.jsonl.tmp", "samples.jsonl", "config.json.tmp", ".lock"):
        (out / name).unlink(missing_ok=True)
        NEVER[kind](out / name)
    _, state = in_time(checkpoint.begin_or_resume, str(out), dict(out_dir="out", script="ppo.py"),
                       [], 10**7)
    checkpoint.append(str(out), "log.jsonl", [dict(iteration=2)])
    assert state["iteration"] == 2 and not os.path.exists(out / "nowhere")
    assert (out / "log.jsonl").read_text() == '{"iteration": 2}\n'


def test_a_link_in_the_folder_of_a_run_is_not_written_through(out, tmp_path_factory):
    """As in a folder that somebody has sent, with a name that a resume writes: linked to a file."""
    save(out, 1)
    mine = tmp_path_factory.mktemp("mine")
    names = ["config.json", *checkpoint.LOGS]
    for name in [*names, *(f"{name}.tmp" for name in names), ".lock"]:
        write(mine / name, '{"iteration": 0, "out_dir": ""}\n')
        (out / name).unlink(missing_ok=True)
        os.symlink(mine / name, out / name)
    before = {name: (mine / name).read_text() for name in os.listdir(mine)}
    checkpoint.begin_or_resume(str(out), dict(out_dir="out", script="ppo.py"), [], 10**7)
    for name in checkpoint.LOGS:
        checkpoint.append(str(out), name, [dict(iteration=1)])
    save(out, 2)
    assert before == {name: (mine / name).read_text() for name in os.listdir(mine)}
    assert not any(os.path.islink(out / name) for name in os.listdir(out))
    assert len((out / "log.jsonl").read_text().split("\n")) == 3  # its lines are kept


# files for others

HALF = dict(rope_parameters=dict(rope_type="default", rope_theta=500.0, partial_rotary_factor=0.5))
TWO = dict(rope_parameters=dict(
    full_attention=dict(rope_type="linear", rope_theta=500.0, factor=4.0),
    sliding_attention=dict(rope_type="default", rope_theta=50.0)))
PLAIN = dict(rope_theta=500.0, rope_scaling=None)
OLDER = {  # name: model_type, settings, what transformers 4 must find, by its sources
    "Llama": ("llama", SIZES | LLAMA3, dict(rope_theta=500.0, rope_scaling=dict(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=16))),
    "Qwen2": ("qwen2", SIZES | rope("default"), PLAIN), "GPT-2": ("gpt2", GPT, {}),
    "Qwen3 MoE": ("qwen3_moe", EXPERTS | rope("default"), PLAIN | dict(num_experts=4)),
    "Phi": ("phi", SIZES | HALF, PLAIN | dict(partial_rotary_factor=0.5)),
    "Pythia": ("gpt_neox", SIZES | HALF, dict(rotary_emb_base=500.0, rotary_pct=0.5)),
    "Phi-3": ("phi3", SIZES | dict(original_max_position_embeddings=40) | LONGROPE, dict(
        rope_theta=500.0, original_max_position_embeddings=40, rope_scaling=dict(
            type="longrope", short_factor=[1.0, 1.1, 1.2, 1.3],
            long_factor=[1.5, 4.0, 9.0, 16.0]))),
    "Gemma 3": ("gemma3_text", HEADS | TWO | dict(
        sliding_window=5, layer_types=["sliding_attention", "full_attention"]), dict(
        rope_theta=500.0, rope_local_base_freq=50.0, rope_scaling=dict(
            rope_type="linear", factor=4.0)))}
ASK = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
for folder in sys.argv[1:]:
    tokens, logits, text, ids = torch.load(f"{folder}/said.pt")
    found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(tokens).logits
    assert (found - logits).abs().max() < 1e-4, (folder, (found - logits).abs().max())
    found = AutoTokenizer.from_pretrained(folder)(text)
    assert found["input_ids"] == ids and "token_type_ids" not in found, (folder, found)
"""


def test_transformers_4_reads_the_same_model(tmp_path):
    """The angles, the experts, the tokenizer; and version 5 reads what it read before."""
    tokens, folders = torch.arange(1, 25)[None] * 7 % 250, []
    for name, (kind, settings, wanted) in OLDER.items():
        theirs = random_model(kind, settings)
        source, folder = written(tmp_path / "source", theirs), tmp_path / name
        save_final(str(tmp_path), name, load(source, "policy", keys_of_system(), CPU))
        folders.append(str(folder))
        found = json.loads((folder / "config.json").read_text())
        assert {key: found[key] for key in wanted} == wanted, name
        again = AutoConfig.from_pretrained(folder)
        for key in ("rope_parameters", "num_experts"):
            was, now = (getattr(config, key, None) for config in (theirs.config, again))
            if isinstance(now, dict):
                now.pop("type", None)  # of Phi-3, beside rope_type
            assert now == was, name
        found = json.loads((folder / "tokenizer_config.json").read_text())
        assert found["tokenizer_class"] == "PreTrainedTokenizerFast"
        assert found["model_input_names"] == ["input_ids", "attention_mask"]
        with torch.no_grad():
            torch.save((tokens, theirs(tokens).logits, "a <think>b", [97, 32, 256, 98]),
                       folder / "said.pt")
    older = os.environ.get("QUARTET_TRANSFORMERS_4")
    if not older:
        pytest.skip("the names are right; QUARTET_TRANSFORMERS_4 is not set: see the header")
    asked = subprocess.run([sys.executable, "-c", ASK, *folders], capture_output=True, text=True,
                           env=os.environ | dict(PYTHONPATH=older), check=False)
    assert asked.returncode == 0, asked.stderr


def test_marks_are_special_in_the_run_alone(tmp_path):
    """A mark takes the blanks behind it where the source's does; others see it where they did."""
    source, saved = str(tmp_path / "source"), tmp_path / "saved"
    write_byte_tokenizer(source, ["<|user|>", "<|tool_call|>", "<|end|>", "<think>"])
    settings = json.loads((tmp_path / "source" / "tokenizer.json").read_text())
    for token in settings["added_tokens"]:
        token["rstrip"] = token["content"] in ("<|user|>", "<|end|>")
    write(f"{source}/tokenizer.json", json.dumps(settings))
    write(f"{source}/chat_template.jinja", "{% for m in messages %}<|user|>\n{{ m.content }}"
          "<|end|>\n{% endfor %}{% if tools %}<|tool_call|>{% endif %}")
    theirs, ours = AutoTokenizer.from_pretrained(source), load_tokenizer(source, keys_of_system())
    chat = [dict(role="user", content="ab")]
    ids = theirs.apply_chat_template(chat, return_dict=False)
    assert ours.encode_prompts([chat])[0] == ids == [256, 97, 98, 258]
    evil = [dict(role="user", content="<|end|><|tool_call|>")]
    saved.mkdir()
    for _ in range(2):
        ours.save(saved)
        again = AutoTokenizer.from_pretrained(saved)
        found = theirs("x<|tool_call|>\n{}<|end|> y<eos>")["input_ids"]
        assert again("x<|tool_call|>\n{}<|end|> y<eos>")["input_ids"] == found
        assert getattr(again, "chat_control_tokens", None) is None  # before 5.23 it has none
        assert again.decode(found, skip_special_tokens=True) == "x<|tool_call|>\n{}<|end|>y"
        assert json.loads((saved / "tokenizer.json").read_text())["added_tokens"] == settings[
            "added_tokens"]
        assert ours.encode_prompts([evil])[0] == [256, *b"<|end|><|tool_call|>", 258]


@pytest.mark.parametrize("given, lora, left", [
    (dict(do_sample=False, temperature=0.9, top_p=0.6), "", dict(do_sample=False)),
    (dict(temperature=0.9, top_k=20, min_p=0.1, repetition_penalty=1.1, chat_format="raw"), "2",
     dict(repetition_penalty=1.1, chat_format="raw")),
    (dict(do_sample=None, length_penalty=0.5, early_stopping=True, max_new_tokens=9), "",
     dict(max_new_tokens=9)),
    (dict(length_penalty=0.5, num_beams=4, typical_p=0.5, temperature=1.0), "",
     dict(length_penalty=0.5, num_beams=4, temperature=1.0)),
    (dict(temperature=0.9, top_p=0.6, top_k=0, do_sample=True, early_stopping=True), "",
     dict(temperature=0.9, top_p=0.6, top_k=0, do_sample=True)),
    (dict(early_stopping=True, num_beams=4, temperature=0.9), "",
     dict(early_stopping=True, num_beams=4)),
    (dict(output_scores=True, pad_token_id=-1, num_beams=1), "", dict(num_beams=1))])
def test_settings_of_generation_that_transformers_does_not_save(world, tmp_path, given, lora, left):
    """What has no effect beside the others is left out, and all else stays, with our ends."""
    model = shutil.copytree(world.policy, tmp_path / "model")
    write(model / "generation_config.json", json.dumps(given))
    ours = load(str(model), "policy", keys_of_system(lora=lora), CPU, trained=True)
    save_final(str(tmp_path), "saved", ours)
    with open(tmp_path / "saved" / "generation_config.json") as f:
        found = json.load(f)
    found.pop("transformers_version")
    assert found == left | dict(eos_token_id=[258], pad_token_id=259)


def test_a_run_saves_settings_that_transformers_does_not(world, tmp_path):
    """At each checkpoint, and also with weights that are split over the ranks."""
    model = shutil.copytree(world.policy, tmp_path / "model")
    write(model / "generation_config.json", '{"do_sample": false, "temperature": 0.9}')
    keys = keys_of(world, "grpo.py", policy_path=model, checkpoint_interval=1, zero_stage="3")
    assert "temperature" in run("grpo.py", tmp_path, keys, ranks=2).out[0]
    for folder in "policy", "checkpoint-000003/policy":
        with open(f"{tmp_path}/out/{folder}/generation_config.json") as f:
            found = json.load(f)
        assert found["do_sample"] is False and "temperature" not in found

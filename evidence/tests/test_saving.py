"""
checkpoint.py: which folders stay, damage of every kind. And files for others: what transformers 4
reads, settings of generation.
"""
import itertools
import json
import os
import re
import shutil

import pytest
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import checkpoint
import test_checkpoint
from byte_tokenizer import write_byte_tokenizer
from configurator import read_json
from errors import BadInput
from checkpoint import damage, find_checkpoint, save_final
from load import load
from test_families import rope
from test_families import save as save_family
from test_model import CPU
from tiny import ROOT, keys_of, keys_of_system, run, write
from tokenizer import load_tokenizer

out, save = test_checkpoint.out, test_checkpoint.save  # the former is a fixture

# folders, without models

FREE = ["eval", "checkpoint-100", "checkpoint-best", ".tmp-mine", ".old-photos", "policy.bak",
        "my_policy", ".tmp", "notes.jsonl", ".old-policy-2"]


def begin(folder, **config):
    config = dict(out_dir=str(folder), script="sft.py") | config
    return checkpoint.begin_or_resume(str(folder), config, [], 10**7)


@pytest.mark.parametrize("name", ["reward_model", "policy_adapter", "checkpoint-1234567",
                                  ".tmp-policy", ".old-checkpoint-000001", "rollouts.jsonl"])
@pytest.mark.parametrize("text", ["no JSON", "[]", '{"model_type": "gpt2"}'])
def test_a_folder_with_such_a_name_is_no_out_dir(tmp_path, name, text):
    """Unless its config.json is a run's: of others nothing is written, moved or deleted."""
    os.makedirs(tmp_path / name)
    write(tmp_path / "config.json", text)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(BadInput, match="out_dir"):
        begin(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before


def may_be_filled(folder):
    try:
        checkpoint.contents_of(str(folder), dict(out_dir=str(folder)))
    except BadInput as e:
        assert "out_dir" in str(e)
        return False
    return True


def test_no_run_fills_a_folder_of_code(tmp_path, monkeypatch):
    """Nor one above it, the one in which one stands, or a link to it; a run that is there stays."""
    home, mine, git = tmp_path / "home", tmp_path / "home/mine", tmp_path / "home/git/.git"
    for folder in mine / "notes", git, tmp_path / "empty":
        os.makedirs(folder)
    write(mine / "train.py", "")
    write(mine / "notes/a.txt", "")
    os.symlink(mine, tmp_path / "link")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(mine / "notes")
    code = ["config", "data/arithmetic", "docs", "options/templates", "tests", "", "..", "out/.."]
    refused = ["", ".", "..", "/", "../notes", home, mine, f"{mine}/", tmp_path, "nowhere/..",
               tmp_path / "link", git.parent, *(f"{ROOT}/{name}" for name in code)]
    assert [folder for folder in refused if may_be_filled(folder)] == []
    for folder in ("run", "../run", home / "out", tmp_path / "free", f"{ROOT}/out/a"):
        assert may_be_filled(folder), folder
    write("config.json", '{"out_dir": "notes"}')
    assert may_be_filled(".")  # it resumes from inside
    monkeypatch.chdir(tmp_path / "empty")  # nothing is in it yet
    assert not any(map(may_be_filled, (".", "../empty", tmp_path / "empty")))


def test_what_is_beside_a_run_is_left_alone(out):
    """At its start, and when it deletes what it has saved; a link's folder is not the link."""
    models, far = ["policy", "ema_policy", "best_policy"], out.parent / "far"
    for name in FREE:
        os.mkdir(out / name)
        write(out / name / "mine", "x")
    for name in (*models, "checkpoint-000003", ".tmp-policy", ".gone-checkpoint-000001"):
        os.makedirs(far / name)
        os.symlink(far / name, out / name)
        write(far / name / "mine", "x")
    with pytest.raises(BadInput, match="none of the checkpoints is good"):
        begin(out)
    os.remove(out / "checkpoint-000003")
    save(out, 1)
    os.rename(out / "checkpoint-000001", far / "checkpoint-000001")
    os.symlink(far / "checkpoint-000001", out / "checkpoint-000001")
    assert begin(out)[1]["iteration"] == 1
    assert not os.path.lexists(out / ".tmp-policy")
    save(out, 2, keep=1)
    for name in models:
        checkpoint.put_in_place(lambda folder: write(f"{folder}/mine", "y"), str(out / name))
        assert (out / name / "mine").read_text() == "y"
    assert sorted(os.listdir(out)) == sorted(
        [*FREE, *models, ".lock", "checkpoint-000002", "config.json"])
    for folder in [*far.iterdir(), *(out / name for name in FREE)]:
        assert damage(str(folder)) is None or (folder / "mine").read_text() == "x"


def test_a_run_replaces_none_of_its_own_models(out, monkeypatch):
    """And begins with a model above it, below it or beside it."""
    monkeypatch.chdir(out)
    for name in ("policy/sub", "checkpoint-000100/policy", "base"):
        os.makedirs(name)
    write("samples.jsonl", "{}")
    os.symlink("policy", "link")
    os.symlink(out, "../link")
    before = sorted(out.rglob("*"))
    for key, path in itertools.product(
            ("policy_path", "teacher", "init_from", "tokenizer_path", "prompts_path"),
            (".", "policy/sub", "checkpoint-000100/policy", "../out", "link", "../link/policy",
             "x, policy", "samples.jsonl")):
        with pytest.raises(BadInput, match=key):
            begin(".", **{key: path})
    assert sorted(out.rglob("*")) == before
    shutil.rmtree("checkpoint-000100")
    os.remove("samples.jsonl")
    for path in ("base", "..", "/", "gpt2", "OWNER/policy"):
        begin(".", policy_path=path, value_init="policy")


def test_damage_of_every_kind_is_seen(out):
    """A flipped bit, a cut, a file that is gone, or is empty JSON, or the checkpoint's before."""
    for iteration in (1, 2):
        save(out, iteration, kl=iteration / 3)
    newest = out / "checkpoint-000002"
    for file in newest.iterdir():
        content, before = file.read_bytes(), out / "checkpoint-000001" / file.name
        flipped = [content[:i] + bytes([content[i] ^ 1 << i % 8]) + content[i + 1:]
                   for i in range(0, len(content), 5)]
        others = {None, content[:-1], before.read_bytes(), b"{}", b"null", *flipped}
        for way in others - {content}:
            file.unlink() if way is None else file.write_bytes(way)
            assert damage(str(newest)) and find_checkpoint(str(out))[1]["iteration"] == 1, way
            file.write_bytes(content)
    assert damage(str(newest)) is None and len(os.listdir(newest)) == 3


def test_the_manifest_names_all_that_a_resume_reads(out):
    """A right manifest does not help where a file is gone."""
    folder = out / "checkpoint-000001"
    whole = ["policy/model.safetensors", "policy_optimizer.safetensors", "ema.safetensors",
             "value_model/model-00001-of-00002.safetensors", "batches.safetensors",
             "value_model/model-00002-of-00002.safetensors",
             "value_model_optimizer-00001-of-00001.safetensors", "config.json", "state.json"]
    for name in whole:
        os.makedirs((folder / name).parent, exist_ok=True)
        write(folder / name, "x")
    write(folder / "config.json", json.dumps(dict(ema_decay=0.9, staleness=1, script="grpo.py")))

    def seen(manifest):
        write(folder / "manifest.json", json.dumps(manifest))
        return damage(str(folder)) or ""

    good = checkpoint.hashes(folder)
    assert seen(good) == ""
    for name in whole:
        others = {one: x for one, x in good.items() if one != name}
        assert name in seen(others)
        if "-of-" not in name:  # of several files the tensors are counted when they are read
            os.rename(folder / name, out / "aside")
            assert name in seen(good) and name in seen(others)
            os.rename(out / "aside", folder / name)
    write(folder / "policy/model-2.safetensors", "x")  # a resume would read it
    assert "policy/model-2.safetensors" in seen(good)


def test_a_link_is_not_written_through(out, tmp_path_factory):
    """As in a folder that somebody has sent. The lines of a log that was a link are kept."""
    mine, text = tmp_path_factory.mktemp("mine"), '{"iteration": 0, "out_dir": ""}\n'
    save(out, 1)
    for name in [*checkpoint.LOGS, "config.json",
                 *(f"{name}.tmp" for name in ["config.json", *checkpoint.LOGS])]:
        (out / name).unlink(missing_ok=True)
        os.symlink(write(mine / name, text), out / name)
    begin(out, script="ppo.py")
    for name in checkpoint.LOGS:
        checkpoint.append(str(out), name, [dict(iteration=1)])
    save(out, 2)
    assert {(mine / name).read_text() for name in os.listdir(mine)} == {text}
    assert not [path for path in out.iterdir() if path.is_symlink()]
    assert (out / "log.jsonl").read_text().count("\n") == 2


# finished models

def test_the_size_that_is_said_is_that_of_the_files(world, tmp_path):
    keys = keys_of(world, "ppo.py", policy_path=world.tied, reward_path="", max_iters=1,
                   reward_functions=f"{world.rules}:letters", value_init="policy", eval_path="",
                   save_dtype="bfloat16", ema_decay=0.5)
    result = run("ppo.py", tmp_path, keys)
    said = dict(re.findall(r"^out/(\w+): (\d[\d.,]*) MB in \w+$", result.out[0], re.MULTILINE))
    assert set(said) == {"policy", "value_model", "ema_policy"}, result
    for name, size in said.items():
        tensors = load_file(f"{tmp_path}/out/{name}/model.safetensors").values()
        real = sum(t.numel() * t.element_size() for t in tensors) / 1e6
        assert 0 < float(size) == pytest.approx(real, abs=0.0051), name


# files for others

OLDER = {  # a family: settings that are changed, what transformers 4 must find, by its sources
    "Llama": ({}, dict(rope_theta=500.0, rope_scaling=dict(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=16))),
    "Qwen3 MoE": (rope("default"), dict(rope_theta=500.0, rope_scaling=None, num_experts=4)),
    "Pythia (GPT-NeoX)": (rope("default", partial_rotary_factor=0.5), dict(
        rotary_emb_base=500.0, rotary_pct=0.5)),
    "Phi-3 with longrope": ({}, dict(
        rope_theta=500.0, original_max_position_embeddings=40, rope_scaling=dict(
            type="longrope", short_factor=[1.0, 1.1, 1.2, 1.3],
            long_factor=[1.5, 4.0, 9.0, 16.0]))),
    "Gemma 3 (text)": (dict(rope_parameters=dict(
        full_attention=dict(rope_type="linear", rope_theta=500.0, factor=4.0),
        sliding_attention=dict(rope_type="default", rope_theta=50.0))), dict(
        rope_theta=500.0, rope_local_base_freq=50.0, rope_scaling=dict(
            rope_type="linear", factor=4.0)))}


def saved_for_older(folder):
    """Each model of OLDER, saved in folder/NAME: (its name, transformers' model)."""
    for name, (changed, _) in OLDER.items():
        theirs = save_family(folder / "source", name, **changed)
        ours = load(str(folder / "source"), "policy", keys_of_system(), CPU)
        save_final(str(folder), name, ours)
        yield name, theirs


def test_transformers_4_reads_the_same_model(tmp_path):
    """The names are right (evidence/needs asks it); and version 5 reads what it read before."""
    for name, theirs in saved_for_older(tmp_path):
        wanted, found = OLDER[name][1], read_json(tmp_path / name / "config.json")
        assert {key: found[key] for key in wanted} == wanted, name
        again = AutoConfig.from_pretrained(tmp_path / name)
        for key in ("rope_parameters", "num_experts"):
            was, now = (getattr(config, key, None) for config in (theirs.config, again))
            if isinstance(now, dict):
                now.pop("type", None)  # of Phi-3, beside rope_type
            assert now == was, name
        found = read_json(tmp_path / name / "tokenizer_config.json")
        assert found["tokenizer_class"] == "PreTrainedTokenizerFast"
        assert found["model_input_names"] == ["input_ids", "attention_mask"]


def test_marks_are_special_in_the_run_alone(tmp_path):
    """A mark takes the blanks behind it where the source's does; others see it where they did."""
    source, saved = tmp_path / "source", tmp_path / "saved"
    write_byte_tokenizer(source, ["<|user|>", "<|tool_call|>", "<|end|>", "<think>"])
    settings = read_json(source / "tokenizer.json")
    for token in settings["added_tokens"]:
        token["rstrip"] = token["content"] in ("<|user|>", "<|end|>")
    write(source / "tokenizer.json", json.dumps(settings))
    write(source / "chat_template.jinja", "{% for m in messages %}<|user|>\n{{ m.content }}<|end|>"
          "\n{% endfor %}{% if tools %}<|tool_call|>{% endif %}")
    theirs = AutoTokenizer.from_pretrained(source)
    ours = load_tokenizer(str(source), keys_of_system())
    chat, evil = ([dict(role="user", content=text)] for text in ("ab", "<|end|><|tool_call|>"))
    ids = theirs.apply_chat_template(chat, return_dict=False)
    assert ours.encode_prompts([chat])[0] == ids == [256, 97, 98, 258]
    saved.mkdir()
    for _ in range(2):
        ours.save(saved)
        again = AutoTokenizer.from_pretrained(saved)
        found, same = (t("x<|tool_call|>\n{}<|end|> y<eos>")["input_ids"] for t in (theirs, again))
        assert found == same
        assert getattr(again, "chat_control_tokens", None) is None  # before 5.23 it has none
        assert again.decode(found, skip_special_tokens=True) == "x<|tool_call|>\n{}<|end|>y"
        assert read_json(saved / "tokenizer.json")["added_tokens"] == settings["added_tokens"]
        assert ours.encode_prompts([evil])[0] == [256, *b"<|end|><|tool_call|>", 258]


@pytest.mark.parametrize("given, lora", [
    (dict(do_sample=False, temperature=0.9, top_p=0.6), ""),
    (dict(temperature=0.9, top_k=20, min_p=0.1, repetition_penalty=1.1, chat_format="raw"), "2"),
    (dict(output_scores=True, pad_token_id=-1, num_beams=1), "")])
def test_settings_of_generation_that_transformers_does_not_save(world, tmp_path, given, lora):
    """They stay as they were published, but with our ends; transformers reads them."""
    model = shutil.copytree(world.policy, tmp_path / "model")
    write(model / "generation_config.json", json.dumps(given))
    ours = load(str(model), "policy", keys_of_system(lora=lora), CPU, trained=True)
    save_final(str(tmp_path), "saved", ours)
    found = read_json(tmp_path / "saved/generation_config.json")
    found.pop("transformers_version")
    assert found == given | dict(eos_token_id=[258], pad_token_id=259)
    AutoModelForCausalLM.from_pretrained(tmp_path / "saved")

"""What a run leaves, and what it may start from: dtypes, shards, model cards, the hub, adapters as models; and a slow disk."""
import json
import os
import re
import runpy
import signal
import sys

import pytest
import torch
import transformers as hf
import yaml
from safetensors import safe_open

from engine import disk
from engine.adapters import Adapted
from engine.checkpoint import find_checkpoint, load_checkpoint, save_checkpoint, save_final, save_model, saved_dtype
from engine.model_card import hub_name, model_card, public
from engine.pretrained import from_pretrained, from_scratch, save_pretrained
from engine.tokenizers import load_tokenizer
from errors import BadInput

import tiny
from conftest import ROOT
from families import VARIANTS, make, padded
from tiny import arguments, forked, one_run, read_weights

DIES_SLOWLY = """
import os, time
from engine import checkpoint
write = checkpoint.save_model
def save_model(folder, *args):
    write(folder, *args)
    if "checkpoint" not in folder:
        time.sleep(4)  # longer than the timeout of 2 s
        os.kill(os.getpid(), 9)
checkpoint.save_model = save_model
"""


SMALL_FILES = """
from engine import disk, run_folder
disk.FILE_BYTES, disk.SEEN_WAIT = 3000, 1
"""
FAILS = {  # name -> what is wrong on rank 1, what rank 0 says
    "full": ("""
save = disk.save_file
def full(tensors, file, *rest):
    if "checkpoint-000002" in file:
        raise OSError(28, "No space left on device")
    save(tensors, file, *rest)
disk.save_file = full
""", r"checkpoint-000002 cannot be written \(on rank 1: No space left on device\); earlier checkpoints and the log are as they"),
    "elsewhere": ("""
save = disk.save_file
def elsewhere(tensors, file, *rest):
    save(tensors, file.replace("/", " ") if "checkpoint-000002" in file else file, *rest)
disk.save_file, disk.sync = elsewhere, lambda path: None
""", r"checkpoint-000002 cannot be written \(rank 1 has written model-00002-of-000\d\d.safetensors, but rank 0 does not see it: "
     "out_dir must be the same folder on all hosts"),
    "read only": ("""
def denied(path, *rest):
    raise OSError(30, "Read-only file system")
run_folder.open = denied
""", "rank 1 cannot write to out_dir 'out', which rank 0 can"),
    "dies": ("""
import os
save = disk.save_file
def dies(tensors, file, *rest):
    save(tensors, file, *rest)
    if "checkpoint-000002" in file:
        os.truncate(file, 100)
        os.kill(os.getpid(), 9)
disk.save_file = dies
""", "lost touch with the other ranks")}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """{name: results}: a chain of adapters as a user makes it, runs from a bfloat16 model, a rank 0 that dies as it saves."""
    folder = str(tmp_path_factory.mktemp("saving"))
    world = tiny.build(folder)
    short = from_pretrained(world.policy)
    save_model(f"{folder}/in 16 bits", short, load_tokenizer(world.policy), dtype=torch.bfloat16)
    adapters = dict(policy_path="out/sft/policy_adapter", reward_path="out/rm/reward_model_adapter")
    dies = world.sft("out", timeout=2)
    cases = {
        "adapters": [
            one_run("sft.py", world.sft("out/sft", init_from=world.policy, lora="2:4", report_to="")),
            one_run("rm.py", world.rm("out/rm", init_from="out/sft/policy_adapter", lora="2:4")),
            one_run("ppo.py", world.ppo("out/ppo", max_iters=1, keep_best=True, **adapters)),
            one_run("grpo.py", world.grpo("out/grpo", max_iters=1, **adapters)),
            one_run("tools/sample.py", arguments(dict(adapters, prompt="1+2=", max_new_tokens=4, device_type="cpu")))],
        "short": [one_run("sft.py", world.sft("out/auto", init_from=f"{folder}/in 16 bits")),
                  one_run("sft.py", world.sft("out/long", init_from=f"{folder}/in 16 bits", save_dtype="float32")),
                  one_run("sft.py", world.sft("out/lora", init_from=f"{folder}/in 16 bits", lora="2:4"))],
        "dies": [one_run("sft.py", (dies, DIES_SLOWLY), dies)],
        "sharded": [one_run("rm.py", *[world.rm(f"out/{lora}", max_iters=1, zero_stage="3", lora=lora)] * 2)
                    for lora in ("", "2")]}
    shards = world.sft("out", init_from=world.policy, zero_stage="3", checkpoint_interval=1, timeout=20)
    for name, (code, _) in FAILS.items():
        cases[f"fails: {name}"] = [one_run("sft.py", (shards, SMALL_FILES), (shards, SMALL_FILES + code))]
    return folder, forked(folder, cases, at_once=4)


# ---------------------------------------------------------------------------------------------------------------------
# adapters as models


def test_adapters_are_models_for_every_script(runs):
    """What is read of an adapter alone is the merged model beside it, to the rounding of the float32 in which that was saved."""
    folder, results = runs
    for result in results["adapters"]:
        assert result["codes"] == [0], result
    out = f"{folder}/adapters/out"
    merged = read_weights(f"{out}/sft/policy")
    here = os.getcwd()
    os.chdir(f"{folder}/adapters")
    try:
        policy = from_pretrained("out/sft/policy_adapter")
        save_pretrained(policy, "again")
        reward = from_pretrained("out/rm/reward_model_adapter", "scalar")
        tokenizer = load_tokenizer("out/sft/policy_adapter")
    finally:
        os.chdir(here)
    again = read_weights(f"{folder}/adapters/again")
    assert all((again[name] - t).abs().max() < 1e-6 for name, t in merged.items())
    assert tokenizer.fingerprint == load_tokenizer(f"{folder}/policy").fingerprint  # the base's
    whole = from_pretrained(f"{out}/rm/reward_model", "scalar")
    tokens, mask = padded([9, 12, 5], left=False)
    with torch.no_grad():
        assert (reward(tokens, mask) - whole(tokens, mask))[mask].abs().max() < 1e-5
    assert reward.config.score_shift == whole.config.score_shift == reward.config.hf["score_shift"] != 0
    assert "(score " in results["adapters"][-1]["stdout"][0]


def test_rm_trains_sharded_with_and_without_lora(runs):
    for result in runs[1]["sharded"]:
        assert result["codes"] == [0, 0], result


# ---------------------------------------------------------------------------------------------------------------------
# the dtype


def test_models_are_saved_as_their_source_was(runs):
    folder, results = runs
    for result in results["short"]:
        assert result["codes"] == [0], result
    for name, dtype in (("auto", "bfloat16"), ("long", "float32"), ("lora", "bfloat16")):
        saved = f"{folder}/short/out/{name}/policy"
        assert {str(t.dtype) for t in read_weights(saved).values()} == {f"torch.{dtype}"}
        assert hf.AutoConfig.from_pretrained(saved).dtype == getattr(torch, dtype)
        assert hf.AutoModelForCausalLM.from_pretrained(saved, dtype="auto").dtype == getattr(torch, dtype)
    checkpoint = read_weights(f"{folder}/short/out/auto/checkpoint-000003/policy")  # every bit
    assert {t.dtype for t in checkpoint.values()} == {torch.float32}
    exact, short = (read_weights(f"{folder}/short/out/{name}/policy") for name in ("long", "auto"))
    assert all(torch.equal(exact[name].bfloat16(), t) for name, t in short.items())
    assert any((exact[name] != t.float()).any() for name, t in short.items())
    said = [result["stdout"][0] for result in results["short"]]
    line = "policy is saved in bfloat16: what training has changed by less than about 1/256 of a weight is rounded away; "
    assert line in said[0] and "--save_dtype=float32 keeps it\n" in said[0] and "is saved in" not in said[1]
    assert "keeps it; policy_adapter beside it is the adapter alone\n" in said[2]


def test_the_dtype_of_each_kind_of_model(tmp_path):
    make("llama").save_pretrained(tmp_path / "long")
    make("llama").bfloat16().save_pretrained(tmp_path / "short")
    for source, dtype, matrices, lora, want in (
            ("long", "float32", None, False, "float32"), ("short", "float32", None, False, "bfloat16"),
            ("short", "float64", None, False, "float64"), ("long", "float64", None, True, "float64"),
            ("long", "bfloat16", None, False, "bfloat16"),  # master_weights = False: nothing is lost
            ("long", "float32", torch.bfloat16, True, "float32"), ("short", "float32", torch.bfloat16, True, "bfloat16")):
        model = from_pretrained(str(tmp_path / source), dtype=dtype, matrices=matrices)
        model = Adapted(model, "lm", 2) if lora else model
        assert saved_dtype(model, "auto") == getattr(torch, want), (source, dtype, matrices, lora)
        assert saved_dtype(model, "float16") == torch.float16
    old = from_pretrained(str(tmp_path / "long"))
    del old.config.hf["dtype"]
    old.config.hf["torch_dtype"] = "float16"  # as transformers 4 writes it
    assert saved_dtype(old, "auto") == torch.float16


# ---------------------------------------------------------------------------------------------------------------------
# shards


@pytest.mark.parametrize("variant", ["gpt2", "gpt_neox", "gemma3"])
def test_large_models_are_saved_in_shards(variant, tmp_path, monkeypatch):
    """As transformers reads them; each of at most the limit, but for a single tensor that is larger. Checkpoints, too."""
    theirs = make(variant)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = from_pretrained(str(tmp_path / "theirs"))
    save_pretrained(ours, tmp_path / "whole")
    limit = 15_000
    monkeypatch.setattr(disk, "FILE_BYTES", limit)
    save_pretrained(ours, tmp_path / "shards")
    files = sorted(f for f in os.listdir(tmp_path / "shards") if f.endswith(".safetensors"))
    assert len(files) > 2 and files == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    index = json.loads((tmp_path / "shards" / "model.safetensors.index.json").read_text())
    total, whole = 0, read_weights(tmp_path / "whole")
    for file in files:
        with safe_open(tmp_path / "shards" / file, framework="pt") as f:
            tensors = {name: f.get_tensor(name) for name in f.keys()}
        size = sum(t.numel() * t.element_size() for t in tensors.values())
        assert size <= limit or len(tensors) == 1
        assert tensors.keys() == {name for name, where in index["weight_map"].items() if where == file}
        assert all(torch.equal(t, whole.pop(name)) for name, t in tensors.items())
        total += size
    assert not whole and index["metadata"]["total_size"] == total
    tokens, _ = padded([12, 12], True)
    with torch.no_grad():
        back = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "shards").eval()
        assert torch.equal(back(tokens).logits, theirs(tokens).logits)

    out = tmp_path / "out"
    out.mkdir()
    for name, text in (("config.json", "{}"), ("log.jsonl", "")):
        (out / name).write_text(text)
    optimizer = torch.optim.AdamW(ours.parameters())
    tokenizer = tiny_tokenizer(tmp_path)
    save_checkpoint(str(out), 3, {"policy": ours}, {"policy": optimizer}, {}, tokenizer, 1)
    assert (out / "checkpoint-000003" / "policy" / "model.safetensors.index.json").exists()
    with torch.no_grad():
        for p in ours.parameters():
            p.add_(1.0)
    load_checkpoint(str(out / "checkpoint-000003"), {"policy": ours}, {"policy": optimizer})
    with torch.no_grad():
        assert torch.equal(ours(tokens), from_pretrained(str(tmp_path / "whole"))(tokens))


# Saves a model of which ranks have parts, with optimizer and average, in small files; or goes on from such a checkpoint
# and saves that again. Notes which files a rank has written, and how many bytes of tensors each had.
SAVE = """
import json, os, sys
import torch
from engine import checkpoint, disk, launch, optimizers, placement
from engine.tokenizers import load_tokenizer
path, out, goes_on, keys = json.loads(sys.argv[1])
disk.FILE_BYTES, save, written = 3000, disk.save_file, {}

def save_file(tensors, file, *rest):
    written[os.path.relpath(file, out).split(os.sep, 2)[-1]] = [sum(t.nbytes for t in tensors.values()), len(tensors)]
    save(tensors, file, *rest)

disk.save_file = save_file
rank, ranks, device = launch.init("cpu", 60)
place = placement.Place(**keys)
dtype = torch.bfloat16 if keys["optimizer"] == "bf16" else torch.float32
place.optimizer = "adamw"
model = placement.load(path, place, device, dtype=dtype, trained=True)
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
        if place.lora:  # B, which begins as 0
            p.data.normal_(generator=generator)
        states |= {f"{name}.{key}": torch.randn(p.shape, generator=generator) for key in ("exp_avg_sq", "exp_avg")}
        states[f"{name}.step"] = torch.tensor(3.0)
    optimizers.fill_optimizer(model, optimizer, states)
    average.update()
open(f"{out}/log.jsonl", "a").close()
tokenizer = load_tokenizer(path)
checkpoint.save_checkpoint(out, 2 if goes_on else 1, {"policy": model}, {"policy": optimizer}, {}, tokenizer, 9, average)
checkpoint.save_final(out, "policy", model, tokenizer)
with open(f"written-{rank}.json", "w") as f:
    json.dump(written, f)
launch.finish()
"""
KINDS = {"stage 3": dict(stage=3, optimizer="adamw"), "stage 1": dict(stage=1, optimizer="adamw"),
         "16 bits": dict(stage=2, optimizer="bf16"), "offloaded": dict(stage=3, optimizer="adamw", offload="optimizer"),
         "adapters": dict(stage=3, optimizer="adamw", lora=dict(rank=2, alpha=4.0))}


@pytest.fixture(scope="module")
def side_by_side(tmp_path_factory):
    """A folder with one named "KIND RANKS" for each of KINDS on 1, 2 and 3 ranks, saved, loaded on other ranks, saved again."""
    folder = str(tmp_path_factory.mktemp("side"))
    world = tiny.build(f"{folder}/world")
    config = dict(model_type="qwen3", hidden_size=20, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                  head_dim=2, intermediate_size=41, max_position_embeddings=32, tie_word_embeddings=True, vocab_size=263)
    save_model(f"{folder}/qwen", from_scratch(config, seed=5), load_tokenizer(world.tokenizer))
    with open(f"{folder}/save.py", "w", encoding="utf-8") as f:
        f.write(SAVE)
    cases = {}
    for kind, keys in KINDS.items():
        path = world.policy if kind == "adapters" else f"{folder}/qwen"  # of GPT-2 q, k and v are one tensor on disk
        for ranks in (1, 2, 3):
            calls = [(ranks, json.dumps([path, "out", False, keys])), (ranks % 3 + 1, json.dumps([path, "out", True, keys]))]
            cases[f"{kind} {ranks}"] = [one_run(f"{folder}/save.py", *[[call]] * n) for n, call in calls[:1 + (ranks > 1)]]
    results = forked(folder, cases, at_once=3)
    for name, each in results.items():
        for result in each:
            assert set(result["codes"]) == {0}, (name, result)
    return folder


def every_file(folder):
    return {os.path.relpath(os.path.join(d, f), folder): open(os.path.join(d, f), "rb").read()
            for d, _, files in os.walk(folder) for f in files}


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_side_by_side_write_what_one_rank_writes(side_by_side, kind):
    """Byte for byte, index and manifest too; and what was loaded on another number of ranks is what was saved."""
    one = {name: every_file(f"{side_by_side}/{kind} 1/out/{name}") for name in ("checkpoint-000001", "policy")}
    parts = [f for f in one["checkpoint-000001"] if re.search(r"policy_optimizer-\d+-of-\d+.safetensors$", f)]
    assert len(parts) > 2 and "policy_optimizer.safetensors.index.json" in one["checkpoint-000001"]
    assert "model.safetensors.index.json" in one["policy"] and "README.md" in one["policy"]
    for ranks in (2, 3):
        out = f"{side_by_side}/{kind} {ranks}/out"
        left = {"checkpoint-000001", "checkpoint-000002", "config.json", "log.jsonl", "policy"}
        assert set(os.listdir(out)) == left | ({"policy_adapter"} if kind == "adapters" else set())
        for name, files in one.items():
            assert every_file(f"{out}/{name}") == files, (name, ranks)
        first, again = one["checkpoint-000001"], every_file(f"{out}/checkpoint-000002")
        assert again.keys() == first.keys()
        different = {name for name in first if first[name] != again[name]}
        assert different == {"manifest.json", "state.json"}  # the iteration; so its hash


@pytest.mark.parametrize("kind, ranks", [("stage 3", 2), ("stage 1", 3)])
def test_each_rank_writes_files_of_its_own(side_by_side, kind, ranks):
    """File i by rank i % ranks. No rank has more than a file at a time, or a tensor that is larger than that."""
    # this run went on from a checkpoint of `ranks` ranks
    n, all_files = ranks % 3 + 1, {}
    for rank in range(n):
        with open(f"{side_by_side}/{kind} {ranks}/written-{rank}.json", encoding="utf-8") as f:
            for name, (size, tensors) in json.load(f).items():
                found = re.search(r"-(\d+)-of-(\d+)\.safetensors$", name)
                assert rank == ((int(found[1]) - 1) % n if found else 0), name
                assert size <= 3000 or tensors == 1
                all_files[name] = found
    stems = {name.partition("-0")[0] for name, found in all_files.items() if found}
    assert {stem.split("/")[-1] for stem in stems} == {"model", "policy_optimizer", "ema"}
    for stem in stems:
        numbers = sorted(int(found[1]) for name, found in all_files.items() if found and name.partition("-0")[0] == stem)
        assert numbers == list(range(1, len(numbers) + 1)) and len(numbers) > 3


def tiny_tokenizer(folder):
    path = folder / "tokenizer"
    path.mkdir()
    (path / "tiktoken.json").write_text(json.dumps(dict(markers=[], eos="<eos>", pad="<pad>")))
    return load_tokenizer(str(path))


# ---------------------------------------------------------------------------------------------------------------------
# the model card


def card_of(folder):
    """(the YAML head, the text) of a model card."""
    with open(os.path.join(folder, "README.md"), encoding="utf-8") as f:
        _, head, text = f.read().split("---\n", 2)
    return yaml.safe_load(head), text


def test_model_cards_say_what_a_model_is(runs):
    folder, _ = runs
    out = f"{folder}/adapters/out"
    for run, name, tag in (("sft", "policy", "sft"), ("rm", "reward_model", "reward-model"), ("ppo", "policy", "ppo"),
                           ("ppo", "best_policy", "ppo"), ("ppo", "value_model", "ppo"), ("grpo", "policy", "grpo")):
        head, text = card_of(f"{out}/{run}/{name}")
        scalar = name in ("reward_model", "value_model")
        assert head == dict(library_name="transformers", tags=["quartet", tag],
                            pipeline_tag="text-classification" if scalar else "text-generation")
        with open(f"{out}/{run}/config.json", encoding="utf-8") as f:
            keys = json.load(f).keys() - {"sha256"}
        assert keys and all(re.search(rf"^{key} = ", text, re.MULTILINE) for key in keys)
        assert folder not in text and "from `out/" in text or run == "sft"
        record = tiny.read_log(f"{out}/{run}")[-1]
        metrics = [key for key in record if key.startswith("eval/")]
        assert metrics and all((f"| {key} | {record[key]:.4g} |" in text) == (name != "best_policy") for key in metrics)
        assert not os.path.exists(f"{out}/{run}/checkpoint-000001/{name}/README.md")


def test_the_card_of_a_reward_model_scores_demonstrations_0(runs):
    """Its code as it stands, on the demonstrations of the training: transformers' score + score_shift is 0 on average."""
    folder, _ = runs
    code = re.search(r"```python\n(.*?)```", card_of(f"{folder}/adapters/out/rm/reward_model")[1], re.DOTALL)[1]
    code = code.replace('"out/rm', f'"{folder}/adapters/out/rm')
    with open(f"{folder}/sft_val.jsonl", encoding="utf-8") as f:
        rows = [json.loads(line) for line in f]
    scores, names = [], {}
    for row in rows:
        names["text"] = row["prompt"] + row["completion"] + "<eos>"
        with torch.no_grad():
            exec(code, names)
        scores.append(names["score"].item())
    assert abs(sum(scores) / len(scores)) < 1e-5 and max(map(abs, scores)) > 1e-3


def test_cards_name_the_base_model_of_the_hub_and_nobodys_folders(tmp_path):
    config = from_pretrained_config("llama")
    settings = dict(n_layer=2, train_path="hf:openai/gsm8k:main:train", val_path="/home/me/x.jsonl",
                    reward_functions="0.5*/home/me/r.py:f,length")
    text = model_card("policy", "out/x/policy", settings, "org/base-1B", config, 1, "float32", {})
    head = yaml.safe_load(text.split("---\n")[1])
    assert head["base_model"] == "org/base-1B" and head["datasets"] == ["openai/gsm8k"]
    assert "/home" not in text and "`x.jsonl`" in text and "0.5*r.py:f,length" in text
    (tmp_path / "README.md").write_text(text)
    (tmp_path / "config.json").write_text("{}")
    assert hub_name(str(tmp_path)) == "org/base-1B"  # the next run's card names it, too
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(dict(base_model_name_or_path=str(tmp_path))))
    assert hub_name(str(tmp_path / "adapter")) == "org/base-1B"
    assert hub_name("/nowhere/x/y/z") == "" and public("/a/b") == "b" and public(3) == 3
    head = yaml.safe_load(model_card("reward_model", "x", {}, "/gone/base", config, 1, "float32", {}).split("---\n")[1])
    assert "base_model" not in head


def from_pretrained_config(variant):
    from engine.hf_config import parse_config

    family, kwargs = VARIANTS[variant]
    return parse_config(getattr(hf, f"{family}Config")(**kwargs).to_dict())


def test_the_card_of_an_adapter(runs):
    """The reward model's is an adapter on an adapter: peft would put it on the bare base, and say nothing."""
    out = f"{runs[0]}/adapters/out"
    for run, name, code in (("sft", "policy", True), ("rm", "reward_model", False)):
        head, text = card_of(f"{out}/{run}/{name}_adapter")
        assert head["library_name"] == "peft" and "lora" in head["tags"] and f"# {name}_adapter" in text
        assert (f'AutoPeftModelForCausalLM.from_pretrained("out/{run}/{name}_adapter")' in text) == code
        assert (f"load `{name}` beside this folder" in text) != code
    assert "in adapter_model.safetensors) is what quartet adds" in text


# ---------------------------------------------------------------------------------------------------------------------
# tools/push.py


class Api:
    """A fake HfApi, which records what it is asked."""

    calls, fails = [], None

    def create_repo(self, repo, **how):
        if Api.fails:
            raise Api.fails
        Api.calls.append((repo, how))
        return f"https://huggingface.co/{repo}"

    def upload_folder(self, **how):
        Api.calls.append(how)


def test_push(runs, monkeypatch, capsys):
    import huggingface_hub

    model = f"{runs[0]}/adapters/out/sft/policy"
    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_x")
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # configure sets it

    def push(**keys):
        monkeypatch.setattr(sys, "argv", ["push.py", *arguments(keys)])
        runpy.run_path(os.path.join(ROOT, "tools", "push.py"), run_name="__main__")

    for folder, private in ((model, True), (f"{model}_adapter", False)):
        Api.calls.clear()
        push(folder=folder, repo="me/model", private=private)
        (repo, how), upload = Api.calls
        assert repo == "me/model" and how == dict(private=True if private else None, exist_ok=True)
        assert upload["repo_id"] == "me/model" and upload["folder_path"] == folder
        said = capsys.readouterr().out
        assert f"{folder} is at https://huggingface.co/me/model" in said
        assert ("is a folder of this machine" in said) == folder.endswith("_adapter")
    Api.calls.clear()
    for keys, said in ((dict(folder=model, repo="model"), "wanted NAME/MODEL"),
                       (dict(folder=os.path.dirname(model), repo="me/x"), "this is the folder of a run"),
                       (dict(folder="nowhere", repo="me/x"), "no such folder")):
        with pytest.raises(BadInput, match=said):
            push(**keys)
    Api.fails = OSError("cannot reach huggingface.co\nand more")
    with pytest.raises(BadInput, match="me/x: the hub has not taken it: OSError: cannot reach huggingface.co$"):
        push(folder=model, repo="me/x")
    assert not Api.calls


def test_push_without_a_token_is_one_line(runs, tmp_path):
    done = tiny.run("tools/push.py", f"--folder={runs[0]}/policy", "--repo=me/x", env=dict(HF_HOME=str(tmp_path), HF_TOKEN=""))
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "there is no token for the hub; type `hf auth" in done.stderr


# ---------------------------------------------------------------------------------------------------------------------
# a slow disk


def test_a_long_save_outlasts_the_timeout_and_a_death_in_it_is_one_line(runs):
    result, = runs[1]["dies"]
    assert result["codes"] == [-signal.SIGKILL, 1], result
    said = result["stderr"][1]
    assert said.count("\n") == 1 and re.search(r"error \(rank 1\): iteration 3, \w+: lost touch with the other ranks", said), said
    assert result["seconds"][1] > 4, result  # it has waited as long as rank 0 wrote
    assert os.path.isdir(f"{runs[0]}/dies/out/checkpoint-000003") and not os.path.exists(f"{runs[0]}/dies/out/policy")


@pytest.mark.parametrize("name", FAILS)
def test_a_rank_that_cannot_write_its_file_ends_all_with_one_line(runs, name):
    result, = runs[1][f"fails: {name}"]
    assert re.search(FAILS[name][1], result["stderr"][0]) and result["stderr"][0].count("\n") == 1, result
    assert result["codes"] == dict(dies=[1, -signal.SIGKILL]).get(name, [2, 2] if name == "read only" else [1, 1])
    out = f"{runs[0]}/fails: {name}/out"
    if name == "read only":
        assert not os.path.exists(out)
        return
    left = sorted(os.listdir(out))
    assert [file for file in left if "checkpoint" in file] == ["checkpoint-000001"] or name == "dies", left
    assert "checkpoint-000002" not in left
    folder, state = find_checkpoint(out)
    assert os.path.basename(folder) == "checkpoint-000001" and state["iteration"] == 1


def test_a_full_disk_leaves_the_older_model(tmp_path, monkeypatch):
    tokenizer = tiny_tokenizer(tmp_path)
    make("llama").save_pretrained(tmp_path / "base")
    model = from_pretrained(str(tmp_path / "base"))
    save_final(str(tmp_path), "policy", model, tokenizer)
    before = sorted(os.listdir(tmp_path / "policy"))
    assert "README.md" in before
    import engine.checkpoint as checkpoint
    from errors import Stop

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "model_card", full)
    with pytest.raises(Stop, match="cannot be written"):
        save_final(str(tmp_path), "policy", model, tokenizer)
    assert sorted(os.listdir(tmp_path / "policy")) == before

"""What a run leaves, and what it may start from: dtypes, shards, model cards, the hub; and a slow disk."""
import json
import os
import re
import signal

import pytest
import torch
import transformers as hf
import yaml

from engine.checkpoint import find_checkpoint, save_final, save_model, saved_dtype
from engine.model_card import model_card, public
from engine.placement import load_placed
from engine.places import Place
from engine.tokenizers import load_tokenizer, write_byte_tokenizer
from model import load_model

import tiny
from families import VARIANTS, make, padded
from tiny import forked, one_run, read_weights

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
""", r"checkpoint-000002 cannot be written \(rank 1 has written policy_optimizer-00002-of-000\d\d.safetensors, but rank 0 does "
     "not see it: out_dir must be the same folder on all hosts"),
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
    """{name: results}: the scripts one behind the other, runs from a bfloat16 model, a rank 0 that dies as it saves."""
    folder = str(tmp_path_factory.mktemp("saving"))
    world = tiny.build(folder)
    save_model(f"{folder}/in 16 bits", load_model(world.policy), load_tokenizer(world.policy), dtype=torch.bfloat16)
    made = dict(policy_path="out/sft/policy", reward_path="out/rm/reward_model")
    dies = world.sft("out", timeout=2)
    cases = {
        "chain": [
            one_run("sft.py", world.sft("out/sft", init_from=world.policy, report_to="")),
            one_run("rm.py", world.rm("out/rm", init_from="out/sft/policy")),
            one_run("ppo.py", world.ppo("out/ppo", max_iters=1, keep_best=True, **made)),
            one_run("grpo.py", world.grpo("out/grpo", max_iters=1, **made))],
        "short": [one_run("sft.py", world.sft("out/auto", init_from=f"{folder}/in 16 bits")),
                  one_run("sft.py", *[world.sft("out/sharded", init_from=f"{folder}/in 16 bits", zero_stage="3")] * 2)],
        "dies": [one_run("sft.py", (dies, DIES_SLOWLY), dies)]}
    shards = world.sft("out", init_from=world.policy, zero_stage="3", checkpoint_interval=1, timeout=20)
    for name, (code, _) in FAILS.items():
        cases[f"fails: {name}"] = [one_run("sft.py", (shards, SMALL_FILES), (shards, SMALL_FILES + code))]
    return folder, forked(folder, cases, at_once=4)


# ---------------------------------------------------------------------------------------------------------------------
# the dtype


def test_models_are_saved_as_their_source_was(runs):
    folder, results = runs
    for result in results["short"]:
        assert set(result["codes"]) == {0}, result
    for name, dtype in (("auto", "bfloat16"), ("sharded", "bfloat16")):
        saved = f"{folder}/short/out/{name}/policy"
        assert {str(t.dtype) for t in read_weights(saved).values()} == {f"torch.{dtype}"}
        assert hf.AutoConfig.from_pretrained(saved).dtype == getattr(torch, dtype)
        assert hf.AutoModelForCausalLM.from_pretrained(saved, dtype="auto").dtype == getattr(torch, dtype)
    checkpoint = read_weights(f"{folder}/short/out/auto/checkpoint-000003/policy")  # every bit
    assert {t.dtype for t in checkpoint.values()} == {torch.float32}
    short = read_weights(f"{folder}/short/out/auto/policy")
    assert all(torch.equal(checkpoint[name].bfloat16(), t) for name, t in short.items())
    said = [result["stdout"][0] for result in results["short"]]
    assert "policy is saved in bfloat16" in said[0]


def test_the_dtype_of_each_kind_of_model(tmp_path):
    make("llama").save_pretrained(tmp_path / "long")
    make("llama").bfloat16().save_pretrained(tmp_path / "short")
    cpu = torch.device("cpu")
    for source, dtype, matrices, want in (
            ("long", "float32", None, "float32"), ("short", "float32", None, "bfloat16"), ("short", "float64", None, "float64"),
            ("long", "bfloat16", None, "bfloat16"),  # master_weights = False: nothing is lost
            ("long", "float32", torch.bfloat16, "float32"), ("short", "float32", torch.bfloat16, "bfloat16")):
        model = load_placed(str(tmp_path / source), Place(), cpu, dtype=getattr(torch, dtype), matrices=matrices, trained=True)
        assert saved_dtype(model) == getattr(torch, want), (source, dtype, matrices)
    file = tmp_path / "long" / "config.json"
    config = json.loads(file.read_text())
    config["torch_dtype"] = "float16"  # as transformers 4 writes it
    del config["dtype"]
    file.write_text(json.dumps(config))
    assert saved_dtype(load_model(str(tmp_path / "long"))) == torch.float16


# ---------------------------------------------------------------------------------------------------------------------
# files


@pytest.mark.parametrize("head", ["lm", "scalar"])
@pytest.mark.parametrize("variant", VARIANTS)
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
# and saves that again. Notes which files a rank has written, and how many bytes of tensors each had.
SAVE = """
import json, os, sys
import torch
from engine import checkpoint, disk, launch, optimizers, placement, places
from engine.tokenizers import load_tokenizer
path, out, goes_on, keys = json.loads(sys.argv[1])
disk.FILE_BYTES, save, written = 3000, disk.save_file, {}

def save_file(tensors, file, *rest):
    written[os.path.relpath(file, out).split(os.sep, 2)[-1]] = [sum(t.nbytes for t in tensors.values()), len(tensors)]
    save(tensors, file, *rest)

disk.save_file = save_file
rank, ranks, device = launch.init("cpu", 60)
place = places.Place(**keys)
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
with open(f"written-{rank}.json", "w") as f:
    json.dump(written, f)
launch.finish()
"""
KINDS = {"stage 3": dict(stage=3, optimizer="adamw"), "stage 1": dict(stage=1, optimizer="adamw"),
         "16 bits": dict(stage=2, optimizer="bf16"), "offloaded": dict(stage=3, optimizer="adamw", offload="optimizer")}


@pytest.fixture(scope="module")
def side_by_side(tmp_path_factory):
    """A folder with one named "KIND RANKS" for each of KINDS on 1, 2 and 3 ranks, saved, loaded on other ranks, saved again."""
    folder = str(tmp_path_factory.mktemp("side"))
    world = tiny.build(f"{folder}/world")
    tiny.add_qwen(world)
    with open(f"{folder}/save.py", "w", encoding="utf-8") as f:
        f.write(SAVE)
    cases = {}
    for kind, keys in KINDS.items():
        for ranks in (1, 2, 3):
            goes_on = [(ranks, False), (ranks % 3 + 1, True)][:1 + (ranks > 1)]
            cases[f"{kind} {ranks}"] = [one_run(f"{folder}/save.py", *[[json.dumps([world.qwen, "out", on, keys])]] * n)
                                        for n, on in goes_on]
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
    assert {"model.safetensors", "README.md"} <= one["policy"].keys()
    for ranks in (2, 3):
        out = f"{side_by_side}/{kind} {ranks}/out"
        left = {"checkpoint-000001", "checkpoint-000002", "config.json", "log.jsonl", "policy"}
        assert set(os.listdir(out)) == left
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
    assert {stem.split("/")[-1] for stem in stems} == {"policy_optimizer", "ema"}
    for stem in stems:
        numbers = sorted(int(found[1]) for name, found in all_files.items() if found and name.partition("-0")[0] == stem)
        assert numbers == list(range(1, len(numbers) + 1)) and len(numbers) > 3


def tiny_tokenizer(folder):
    path = folder / "tokenizer"
    write_byte_tokenizer(path)
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
    out = f"{folder}/chain/out"
    for run, name, tag in (("sft", "policy", "sft"), ("rm", "reward_model", "reward-model"), ("ppo", "policy", "ppo"),
                           ("ppo", "best_policy", "ppo"), ("ppo", "value_model", "ppo"), ("grpo", "policy", "grpo")):
        head, text = card_of(f"{out}/{run}/{name}")
        scalar = name in ("reward_model", "value_model")
        assert head == dict(library_name="transformers", tags=["quartet", tag],
                            pipeline_tag="text-classification" if scalar else "text-generation")
        with open(f"{out}/{run}/config.json", encoding="utf-8") as f:
            keys = json.load(f).keys() - {"sha256"}
        assert keys and all(re.search(rf"^    {key} = ", text, re.MULTILINE) for key in keys)
        assert folder not in text and ("made from `out/" in text or run == "sft")
        record = tiny.read_log(f"{out}/{run}")[-1]
        metrics = [key for key in record if key.startswith("eval/")]
        assert metrics and all((f"    {key} = {record[key]:.4g}\n" in text) == (name != "best_policy") for key in metrics)
        assert not os.path.exists(f"{out}/{run}/checkpoint-000001/{name}/README.md")


def test_a_card_names_nobodys_folders():
    settings = dict(n_layer=2, train_path="hf:openai/gsm8k:main:train", val_path="/home/me/x.jsonl",
                    reward_functions="0.5*/home/me/r.py:f,length")
    text = model_card("policy", settings, "/home/me/base", "1M weights", {})
    assert "/home" not in text and "'x.jsonl'" in text and "0.5*r.py:f,length" in text and "made from `base`" in text
    assert "hf:openai/gsm8k:main:train" in text and public("/a/b") == "b" and public(3) == 3
    assert "made from scratch" in model_card("policy", settings, "", "1M weights", {})


def test_a_reward_models_score_is_transformers_and_the_shift(runs):
    """On the demonstrations of the training their sum is 0 on average, as the card says."""
    folder, _ = runs
    path = f"{folder}/chain/out/rm/reward_model"
    assert "with it the average demonstration scores 0" in card_of(path)[1].replace("\n", " ")
    model, tokenizer = hf.AutoModelForSequenceClassification.from_pretrained(path), hf.AutoTokenizer.from_pretrained(path)
    scores = []
    with open(f"{folder}/sft_val.jsonl", encoding="utf-8") as f:
        for row in map(json.loads, f):
            ids = tokenizer(row["prompt"] + row["completion"] + "<eos>", return_tensors="pt")["input_ids"]
            with torch.no_grad():
                scores.append(model(ids).logits.item() + model.config.score_shift)
    assert abs(sum(scores) / len(scores)) < 1e-5 and max(map(abs, scores)) > 1e-3


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
    model = load_model(str(tmp_path / "base"))
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

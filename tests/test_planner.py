"""
What memory.py predicts, against what the scripts hold: weights, gradients and optimizer states to the byte, the peak of a run
within a tenth, as torch's MemTracker counts a real run. `PYTHONPATH=. python tests/test_planner.py` prints the campaign.
"""
import json
import os
import re
import sys
import tempfile
import time
import types
from unittest import mock

import pytest
import torch
import transformers
from test_configurator import CONFIGS, script_of

from engine import memory as formulas
from engine.adapters import Adapted
from engine.hf_config import parse_config
from engine.placement import decoding_copy
from engine.pretrained import from_scratch
from errors import BadConfig, BadInput
import kernels
from model import Transformer

import tiny
from conftest import ROOT
from families import VARIANTS
from tools import memory


# ---------------------------------------------------------------------------------------------------------------------
# worlds and runs


def llama(d, layers, heads, kv_heads, ff, **more):
    return dict(model_type="llama", hidden_size=d, intermediate_size=ff, num_hidden_layers=layers, num_attention_heads=heads,
                num_key_value_heads=kv_heads, max_position_embeddings=1024, tie_word_embeddings=False) | more


def neox(d, layers, heads, ff, **more):
    return dict(model_type="gpt_neox", hidden_size=d, intermediate_size=ff, num_hidden_layers=layers, num_attention_heads=heads,
                max_position_embeddings=1024, tie_word_embeddings=False) | more


def gpt2(d, layers, heads, **more):
    return dict(model_type="gpt2", n_embd=d, n_layer=layers, n_head=heads, n_positions=256) | more

PPO = dict(batch_size=8, max_new_tokens=40, micro_batch_size=8, max_iters=1, ppo_epochs=2)
GRPO = dict(batch_size=8, max_new_tokens=40, micro_batch_size=8, max_iters=1, num_iterations=2, group_size=4,
            reward_functions="reward_model", kl_coef=0.04)
LONG = dict(batch_size=16, max_new_tokens=120)
SHORT = dict(max_new_tokens=20, eval_size=1)
SMALL = llama(64, 3, 4, 2, 176)
TOGETHER = dict(generate_tp=2, micro_batch_size=4, batch_size=4, eval_size=64)  # a long rollout, which is then the peak
# name: (script, ranks, architecture, how many more embeddings than tokens, keys). FAST is the suite's part of the campaign
FAST = {
    "ppo, llama with grouped queries": ("ppo", 1, SMALL, 0, PPO | SHORT),
    "grpo, qwen tied, chunks, recomputed, bf16": (
        "grpo", 1, llama(64, 3, 4, 2, 176, model_type="qwen2", tie_word_embeddings=True), 30,
        GRPO | SHORT | dict(dtype="bfloat16", head_chunk=32, gradient_checkpointing=True)),
    "grpo, a judge": ("grpo", 1, SMALL, 0, GRPO | SHORT | dict(reward_functions="judge", judge_path="judge")),
    "grpo, the reference judges": ("grpo", 1, SMALL, 0, GRPO | SHORT | dict(reward_functions="judge", judge_path="ref_policy")),
    "grpo, stage 3, one micro-batch of long responses": ("grpo", 2, llama(256, 4, 4, 4, 688), 900, GRPO | LONG | dict(
        zero_stage="3")),
    "grpo, stage 3, two ranks sample together": (
        "grpo", 2, llama(256, 4, 4, 4, 688), 0, GRPO | TOGETHER | dict(zero_stage="3")),
    "ppo, gpt2, LoRA": ("ppo", 1, gpt2(64, 3, 4), 0, PPO | SHORT | dict(lora="4", head_chunk=64)),
    "ppo, long texts beside it": ("ppo", 1, SMALL, 0, PPO | SHORT | dict(
        ptx_path="texts.jsonl", ptx_max_tokens=120, ptx_batch_size=8, too_long="cut")),
}
CAMPAIGN = FAST | {
    "ppo, truncated": ("ppo", 1, SMALL, 0, PPO | SHORT | dict(top_p=0.9)),
    "ppo, truncated, long and many": ("ppo", 1, SMALL, 0, PPO | dict(top_p=0.9, batch_size=64, micro_batch_size=2)),
    "grpo, truncated, a large vocabulary": ("grpo", 1, llama(64, 2, 4, 4, 176, tie_word_embeddings=True), 20_000, GRPO | dict(
        micro_batch_size=1, max_new_tokens=16, top_k=50)),
    "ppo, neox, adafactor and average": ("ppo", 1, neox(64, 2, 4, 256), 0, PPO | dict(
        optim="adafactor", ema_decay=0.9, value_init="shared", temperature=1.0)),
    "ppo, gpt2": ("ppo", 1, gpt2(64, 3, 4), 0, PPO),
    "ppo, neox, chunks, recomputed": ("ppo", 1, neox(64, 3, 4, 256), 0, PPO | dict(gradient_checkpointing=True, head_chunk=64)),
    "ppo, llama, recomputed": ("ppo", 1, llama(64, 6, 4, 4, 176), 0, PPO | dict(gradient_checkpointing=True)),
    "ppo, qwen3, entropy": ("ppo", 1, llama(64, 3, 4, 2, 176, head_dim=16, model_type="qwen3"), 0, PPO | dict(
        entropy_coef=0.01)),
    "ppo, olmo2": ("ppo", 1, llama(64, 3, 4, 2, 176, model_type="olmo2"), 0, PPO),
    "ppo, gemma3": ("ppo", 1, llama(64, 3, 4, 2, 176, head_dim=16, model_type="gemma3_text", tie_word_embeddings=True,
                                    sliding_window=40), 0, PPO),
    "ppo, mistral with a window": ("ppo", 1, llama(64, 3, 4, 1, 176, model_type="mistral", sliding_window=40), 0, PPO),
    "ppo, a large vocabulary": ("ppo", 1, llama(64, 2, 4, 4, 176, tie_word_embeddings=True), 20_000, PPO | dict(
        micro_batch_size=1, batch_size=4, max_new_tokens=16)),
    "ppo, large decoding batch": ("ppo", 1, SMALL, 0, PPO | dict(batch_size=64, micro_batch_size=1)),
    "ppo, rollout in parts": ("ppo", 1, SMALL, 0, PPO | dict(batch_size=64, micro_batch_size=2, rollout_batch_size=8)),
    "ppo, float64": ("ppo", 1, SMALL, 0, PPO | dict(dtype="float64")),
    "ppo, bf16 under autocast": ("ppo", 1, SMALL, 0, PPO | dict(dtype="bfloat16")),
    "ppo, bf16, fp32 head": ("ppo", 1, SMALL, 0, PPO | dict(dtype="bfloat16", fp32_head=True)),
    "ppo, pure bf16": ("ppo", 1, SMALL, 0, PPO | dict(dtype="bfloat16", master_weights=False)),
    "ppo, LoRA": ("ppo", 1, SMALL, 0, PPO | dict(lora="policy=4,value=8:16:q+v")),
    "ppo, one trunk": ("ppo", 1, SMALL, 0, PPO | dict(lora="4", share_base=True, reward_path="adapter")),
    "grpo, LoRA, bf16": ("grpo", 1, SMALL, 0, GRPO | dict(lora="8", dtype="bfloat16")),
    "grpo, no reference": ("grpo", 1, SMALL, 0, GRPO | dict(kl_coef=0.0)),
    "ppo, 125M llama": ("ppo", 1, llama(768, 12, 12, 12, 2048), 32_000, PPO | dict(
        micro_batch_size=2, batch_size=4, max_new_tokens=64)),
    "ppo, stage 1": ("ppo", 2, llama(256, 4, 4, 4, 688), 0, PPO | dict(micro_batch_size=1, batch_size=4, zero_stage="1")),
    "ppo, stage 2": ("ppo", 2, llama(256, 4, 4, 4, 688), 0, PPO | dict(
        micro_batch_size=1, batch_size=4, zero_stage="2", head_chunk=8)),
    "ppo, stage 2, large micro-batches": ("ppo", 2, llama(256, 4, 4, 4, 688), 0, PPO | dict(batch_size=16, zero_stage="2")),
    "grpo, stage 3, large micro-batches": ("grpo", 2, llama(256, 4, 4, 4, 688), 0, GRPO | dict(batch_size=16, zero_stage="3")),
    "grpo, stage 3, bf16, two ranks sample together": ("grpo", 2, llama(256, 4, 4, 2, 688), 900, GRPO | TOGETHER | dict(
        zero_stage="3", dtype="bfloat16")),
    "ppo, stage 2, two ranks sample together": ("ppo", 2, llama(256, 4, 4, 4, 688), 900, PPO | TOGETHER | dict(
        zero_stage="2", rollout_batch_size=48, ppo_epochs=1, max_new_tokens=120)),
    "ppo, whole weights, two ranks sample together": ("ppo", 2, llama(256, 4, 4, 4, 688), 0, PPO | TOGETHER | dict(
        lora="4", ppo_epochs=1)),
    "grpo, stage 3, two micro-batches of long responses": ("grpo", 2, llama(256, 4, 4, 4, 688), 900, GRPO | LONG | dict(
        batch_size=32, zero_stage="3")),
    "ppo, stage 2, one micro-batch of long responses": ("ppo", 2, llama(256, 4, 4, 4, 688), 900, PPO | LONG | dict(
        zero_stage="2")),
    "grpo, stage 2, bf16, one micro-batch of long responses": ("grpo", 2, llama(256, 4, 4, 4, 688), 900, GRPO | LONG | dict(
        zero_stage="2", dtype="bfloat16")),
    "grpo, stage 3, bf16, one micro-batch of long responses": ("grpo", 2, llama(256, 4, 4, 4, 688), 900, GRPO | LONG | dict(
        zero_stage="3", dtype="bfloat16")),
    "grpo, stage 3, bf16": ("grpo", 2, llama(256, 4, 4, 4, 688), 0, GRPO | dict(
        micro_batch_size=1, zero_stage="3", dtype="bfloat16")),
}
DRIVER = """
import json, os, runpy, sys
import torch
from torch.distributed._tools.mem_tracker import MemTracker
import kernels
import parallel
import engine.optimizers

kernels.onednn_is_faster = kernels.onednn_is_there = lambda: False  # the tracker cannot look at packed matrices

class Tracker(MemTracker):  # without its statistics by module, which refuse a module that is called in a loop
    _pre_fw_hook = _post_fw_hook = _pre_bw_hook = _post_bw_hook = lambda self, *args: None

def held(tensors):
    return sum(t.numel() * t.element_size() for t in {id(t): t for t in map(parallel.my_part, tensors)}.values())

results = []
for script, *args in json.load(open(sys.argv[1])):
    sys.argv, tracker = [script, *args], Tracker()
    with tracker:
        g = runpy.run_path(script, run_name="__main__")
    stepped = [engine.optimizers.inner(o).state for o in g["optimizers"].values()]
    results.append(dict(
        parameters=held([p for model in g["models"].values() for p in model.parameters()]),
        gradients=held([p.grad for model in g["run"].trained.values() for p in model.parameters() if p.grad is not None]),
        optimizer=held([t for states in stepped for state in states.values() for t in state.values()]),
        average=held(g["ema"].averages) if g["ema"] else 0,
        peak=tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]))
    del g, stepped
json.dump(results, open(OUT + os.environ.get("RANK", "0"), "w"))
"""


def build(folder, shape, more_embeddings):
    """A random policy, reward model and reward adapter of this architecture, with prompts of 20 to 28 bytes."""
    from engine.adapters import save_adapter
    from engine.checkpoint import save_model
    from engine.tokenizers import ByteTokenizer

    tokenizer = ByteTokenizer(dict(markers=[f"<{i}>" for i in range(1000)], eos="<eos>", pad="<pad>"))
    hf = shape | dict(vocab_size=tokenizer.vocab_size + more_embeddings, bos_token_id=None, eos_token_id=tokenizer.eos_id,
                      pad_token_id=tokenizer.pad_id)
    path = {name: os.path.join(folder, name)
            for name in ("policy", "reward", "adapter", "judge", "prompts.jsonl", "texts.jsonl")}
    policy = from_scratch(hf, seed=1)
    save_model(path["policy"], policy, tokenizer)
    save_model(path["reward"], from_scratch(hf, head="scalar", seed=2), tokenizer)
    save_model(path["judge"], from_scratch(hf, seed=3), tokenizer)
    save_adapter(Adapted(policy, "scalar", 4, 8), path["adapter"], path["policy"])
    tokenizer.save(path["adapter"])
    tiny.jsonl(path["texts.jsonl"], [dict(text="b" * (115 + i)) for i in range(16)])
    tiny.jsonl(path["prompts.jsonl"], [dict(prompt="a" * (18 + i % 9) + f"{i:02}") for i in range(64)])
    return path


def runs(cases, folder):
    """{name: (what memory.py predicts, what the run held)} of these cases; those of as many ranks share a process (a rank)."""
    work, plans = {}, {}
    for i, (name, (script, ranks, shape, more, keys)) in enumerate(cases.items()):
        path = build(os.path.join(folder, str(i)), shape, more)
        keys = dict(policy_path=path["policy"], reward_path=path["reward"], prompts_path=path["prompts.jsonl"], timeout=60,
                    eval_path=path["prompts.jsonl"], eval_interval=100, eval_size=2, checkpoint_interval=0, device_type="cpu",
                    reward_timeout=30, out_dir=os.path.join(folder, str(i), "out")) | keys
        keys |= dict(reward_path=path["adapter"]) if keys["reward_path"] == "adapter" else {}
        keys |= dict(judge_path=path["judge"]) if keys.get("judge_path") == "judge" else {}
        keys |= dict(ptx_path=path["texts.jsonl"]) if "ptx_path" in keys else {}
        args = tiny.arguments(keys)
        config = memory.read_config(script, args)
        policy = memory.architecture(config["policy_path"], "", "")
        P, differ, held_out, padding = memory.measure_prompts(config, policy)
        with mock.patch.multiple(kernels, onednn_is_faster=lambda: False, onednn_is_there=lambda: False):  # as in DRIVER
            plans[name] = memory.predict(config, policy, [policy], P, ranks, "cpu", differ, padding, held_out)
        work.setdefault(ranks, []).append((name, [os.path.join(ROOT, f"{script}.py"), *args]))
    results = {}
    for ranks, calls in work.items():
        driver, jobs, out = (os.path.join(folder, f"{ranks}.{kind}") for kind in ("py", "json", "out"))
        with open(driver, "w", encoding="utf-8") as f:
            f.write(f"OUT = {out!r}\n" + (tiny.ONE_GROUP if ranks > 1 else "") + DRIVER)
        with open(jobs, "w", encoding="utf-8") as f:
            json.dump([call for _, call in calls], f)
        done, = tiny.forked(folder, {f"{ranks} ranks": [tiny.one_run(driver, *[[jobs]] * ranks)]})[f"{ranks} ranks"]
        assert set(done["codes"]) == {0}, done
        files = [open(f"{out}{rank}", encoding="utf-8") for rank in range(ranks)]
        for (name, _), *each in zip(calls, *map(json.load, files), strict=True):  # of the fullest rank, as predicted
            results[name] = {key: max(result[key] for result in each) for key in each[0]}
        for file in files:
            file.close()
    return {name: (plans[name], results[name]) for name in cases}


def total(plan, row):
    """Bytes of a row, all models together."""
    return round(sum(r[row] for r in plan["rows"].values()) * 2**20)


def agrees(plan, result):
    """Weights, gradients and optimizer states to the byte; the peak within a tenth."""
    exact = [total(plan, row) == result[row] + (result["average"] if row == "optimizer" else 0) for row in memory.ROWS[:3]]
    return all(exact) and abs(plan["peak_mib"] * 2**20 / result["peak"] - 1) < 0.1


def line(name, plan, result):
    """A row of the campaign's table."""
    exact = "exact" if all(total(plan, row) == result[row] + (result["average"] if row == "optimizer" else 0)
                           for row in memory.ROWS[:3]) else "NOT EXACT"
    measured = result["peak"] / 2**20
    return f"| {name} | {plan['phase']} | {measured:.2f} | {plan['peak_mib']:.2f} | " \
           f"{100 * (plan['peak_mib'] / measured - 1):+.1f} % | {exact} |"


@pytest.fixture(scope="module")
def fast(tmp_path_factory):
    return runs(FAST, str(tmp_path_factory.mktemp("planner")))


@pytest.mark.parametrize("name", FAST)
def test_a_run_takes_what_was_predicted(fast, name):
    assert agrees(*fast[name]), line(name, *fast[name])


@pytest.mark.campaign
def test_campaign(tmp_path):
    for name, (plan, result) in runs(CAMPAIGN, str(tmp_path)).items():
        assert agrees(plan, result), line(name, plan, result)


# ---------------------------------------------------------------------------------------------------------------------
# the formulas of weights, against the models


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("head", ["lm", "scalar"])
def test_every_tensor_of_every_family(variant, head):
    family, keys = VARIANTS[variant]
    c = parse_config(getattr(transformers, f"{family}Config")(**keys).to_dict())
    with torch.device("meta"):
        model = Transformer(c, head)
        adapted = Adapted(model, head, rank=3)
    m = formulas.Model(c, head, True, 4, 4, "adapted", rank=3)
    assert sorted(shape for shape, _ in formulas.base_tensors(m)) == sorted(tuple(p.shape) for p in model.parameters())
    assert sorted(shape for shape, _ in formulas.added_tensors(m)) == sorted(tuple(p.shape) for p in adapted.parameters())


def test_shapes_by_name_are_those_of_the_hub():
    billions = {"llama-3.2-1b": 1.236, "llama-3.1-8b": 8.030, "llama-3.1-70b": 70.554, "qwen2.5-0.5b": 0.494,
                "qwen2.5-1.5b": 1.544, "qwen2.5-3b": 3.086, "qwen2.5-7b": 7.616, "pythia-1b": 1.012, "olmo-2-0425-1b": 1.485,
                "gemma-3-1b": 1.0}
    for name, shape in memory.KNOWN.items():
        m = formulas.Model(parse_config(shape), "lm", False, 1, 1)
        assert round(formulas.parameters(m) / 1e9, 3) == billions.pop(name)
    assert not billions


# ---------------------------------------------------------------------------------------------------------------------
# the tool


def tool(capsys, monkeypatch, *argv):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    memory.main([arg.replace("config/", f"{ROOT}/config/") for arg in argv])
    return capsys.readouterr().out


def test_a_table_for_70b_and_six_ways_to_train_it(capsys, monkeypatch):
    out = tool(capsys, monkeypatch, "config/llama.py", "--policy-config=llama-3.1-70b", "--world-size=16", "--zero_stage=3")
    phases = memory.PHASES.keys() - {"weights"}  # which only ranks with roles have
    assert all(f"\n{row}" in out for row in (*memory.ROWS, *phases)) and "predicted peak" in out
    assert "planned with the shape of llama-3.2-1b" in out  # the reward model's: the hub is out of reach
    out = tool(capsys, monkeypatch, "config/llama.py", "--compare", "--gpu-gb", "80")
    for column in ("PPO", "PPO + LoRA", "PPO one trunk", "GRPO", "GRPO + LoRA", "GRPO + reward model"):
        assert f"  {column}" in out
    sizes = [int(x) for x in next(line for line in out.splitlines() if line.startswith("micro-batch")).split()[1:7]]
    assert 0 < sizes[0] < sizes[3] and sizes[0] < sizes[1]  # GRPO and LoRA leave more room


def test_a_table_for_each_role(capsys, monkeypatch):
    """Generators train nothing, scorers hold what is frozen; trainers keep what is on its way to the generators."""
    models = "config/llama.py", "--policy-config=llama-3.2-1b", "--reward-config=llama-3.2-1b", "--world-size=4"
    out = tool(capsys, monkeypatch, *models, "--roles=train=2,generate=1,score=1")
    train, generate, score = out.split("1 rank(s) that ")
    assert "2 rank(s) that train" in train and "ref_policy" not in train and "value_model" in train and "\nrollout" not in train
    assert "\nweights" in generate and "\nupdate" not in generate and "value_model" not in generate
    assert "ref_policy  reward_model" in score and "\nrollout" not in score and "\nupdate" not in score

    def peak(staleness):
        out = tool(capsys, monkeypatch, *models, "--roles=train=3,generate=1", f"--staleness={staleness}")
        return float(out.split("predicted peak: ")[1].split()[0])

    policy = 1_235_814_400 * 2 / 2**30  # in 16 bits, but for the norms
    assert abs(peak(3) - peak(1) - 2 * policy) < 0.05
    with pytest.raises(BadConfig, match="has 3 ranks, but there are 4; change it, or type --world-size=3$"):
        tool(capsys, monkeypatch, *models, "--roles=train=2,generate=1")


def test_what_fits_is_said_for_each_role(capsys, monkeypatch):
    """--gpu-gb: the rows that train, decode and score at once; one row more would not fit."""
    models = ("config/llama.py", "--policy-config=llama-3.2-1b", "--reward-config=llama-3.2-1b", "--world-size=4",
              "--roles=train=2,generate=1,score=1", "--prompt-tokens=500", "--batch_size=4000")
    keys = {"train": ("micro_batch_size", 60), "generate": ("rollout_batch_size", 20), "score": ("micro_batch_size", 20)}
    for role, (key, limit) in keys.items():
        def peak_and_size(rows, role=role, key=key, limit=limit):
            out = tool(capsys, monkeypatch, *models, f"--{key}={rows}", f"--gpu-gb={limit}")
            said = out.split(f"rank(s) that {role}:")[1].split("predicted peak: ")[1].splitlines()[0]
            assert f"; of {limit} GB the largest {key} that fits is " in said
            return float(said.split()[0]) * 2**30, said.split()[-1]

        size = int(peak_and_size(1)[1])
        assert 1 < size < 1000 and peak_and_size(size)[0] <= limit * 1e9 < peak_and_size(size + 1)[0], role
    out = tool(capsys, monkeypatch, *models, "--gpu-gb=1")
    assert out.count("of 1 GB the largest ") == out.count("that fits is none") == 3


def test_a_policy_of_70b_beside_generators(capsys, monkeypatch):
    """No GPU holds it whole: the first machine's CPU does, of staleness + 1 versions. The figures of docs/scale.md are these."""
    def peaks(*more):
        out = tool(capsys, monkeypatch, "config/llama_70b_grpo.py", "--world-size=40", "--roles=train=32,generate=8",
                   "--device_type=cuda", *more)
        first = out.split("\nfirst rank")[1].split()[0]
        return *(p.split()[0] for p in out.split("predicted peak: ")[1:]), first, out

    train, generate, first, out = peaks()
    assert float(train) * 2**30 < 80e9 and float(generate) * 2**30 < 80e9 and "on it alone, in the CPU's memory" in out
    with open(os.path.join(ROOT, "docs/scale.md"), encoding="utf-8") as f:
        text = " ".join(f.read().split())
    assert f"predicts {train} GiB for a GPU that trains and {generate} GiB for one that generates" in text
    assert f"beside {first} GiB in the CPU's memory" in text
    billions = 70.553706496  # of which the norms stay in 32 bits
    assert abs(float(first) * 2**30 / 1e9 - 2 * billions) < 0.01
    stale = peaks("--staleness=2")
    assert stale[0] == train and abs(float(stale[2]) - 3 * float(first)) < 0.02
    # where they do not sample together, each generator has all of it
    assert float(peaks("--generate_tp=1")[1]) > float(first)


def test_the_largest_micro_batch_fits_and_one_more_does_not(capsys, monkeypatch):
    def peak(rows):
        out = tool(capsys, monkeypatch, "config/llama.py", f"--micro_batch_size={rows}", "--gpu-gb=60", "--num_minibatches=1")
        return float(out.split("predicted peak: ")[1].split()[0]) * 2**30, int(out.split()[-1])

    largest = peak(1)[1]
    assert peak(largest)[0] <= 60e9 < peak(largest + 1)[0]


@pytest.mark.parametrize("name", CONFIGS)
def test_which_script_a_config_is_for(name):
    if script_of(name) in ("ppo.py", "grpo.py"):
        assert f"{memory.which_script([os.path.join(ROOT, 'config', name)], '')}.py" == script_of(name)
    else:
        with pytest.raises(BadConfig, match="memory.py plans ppo and grpo"):
            memory.which_script([os.path.join(ROOT, "config", name)], "")


@pytest.mark.parametrize("argv, what", [
    (["--cuont=4"], "unknown key 'cuont'"), (["nowhere.py"], "cannot read config file"), (["--world-size=0"], "--world-size=8"),
    (["--world-size=x"], "--world-size=8"), (["--gpu-gb=nan"], "--gpu-gb=80"), (["--script=sft"], "plans ppo and grpo"),
    (["--micro_batch_size=0"], "out of range"), (["--policy-config=/nowhere.json"], "/nowhere.json"),
    (["--policy_path=out/nothing"], "train it first"), (["--policy_path=some/model"], "--policy-config=FILE.json"),
    (["--policy-config=pythia-1b", "--reward-config=pythia-1b", "--prompt-tokens=3000"], "exceed the policy's context"),
    (["--policy-config=pythia-1b", "--reward-config=pythia-1b", "--lora=x"], "lora = 'x'"),
    (["--policy-config=pythia-1b", "--reward-config=pythia-1b", "--master_weights=False"], "--dtype=bfloat16")])
def test_bad_input_is_one_line(argv, what, capsys, monkeypatch):
    with pytest.raises(BadInput) as caught:
        tool(capsys, monkeypatch, *argv)
    assert what in str(caught.value) and "\n" not in str(caught.value)


def test_bad_input_ends_with_code_2():
    done = tiny.run("tools/memory.py", "--cuont=4")
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith("memory.py: error: unknown key 'cuont'")


def test_a_prediction_takes_no_time():
    config, c = memory.read_config("ppo", ["--head_chunk=512"]), parse_config(memory.KNOWN["llama-3.1-70b"])
    memory.predict(config, c, [c])
    began = time.process_time()
    memory.predict(config, c, [c])
    assert time.process_time() - began < 0.05


def printed(monkeypatch, capsys, *argv):
    """What memory.py prints where there is no network."""
    def unreachable(path):
        raise OSError(path)

    monkeypatch.setattr(memory, "hub_file", unreachable)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.chdir(ROOT)
    memory.main(list(argv))
    return capsys.readouterr().out


@pytest.mark.parametrize("name", ["llama_70b_grpo", "llama_8b", "llama", "gsm8k_grpo", "countdown_grpo"])
def test_headers_of_configs_quote_the_prediction(name, monkeypatch, capsys):
    """What a config's header says it needs is what memory.py says of it."""
    with open(os.path.join(ROOT, "config", f"{name}.py"), encoding="utf-8") as f:
        header = f.read().split('"""')[1]
    said = printed(monkeypatch, capsys, f"config/{name}.py", "--gpu-gb=80", f"--world-size={32 if '70b' in name else 8}")
    lines = said.splitlines()
    peaks = {w[0]: w[1] for w in map(str.split, lines) if len(w) > 1 and w[0] in ("rollout", "update", "score", "audit", "save")}
    peak, always = max(peaks.values(), key=float), re.search(r"optimizer \(([\d.]+)\)", said).group(1)
    assert float(peak) < 80e9 / 2**30
    if name in ("llama_8b", "llama_70b_grpo"):
        rows = [line.strip() for line in header.splitlines() if line.strip().startswith((*memory.ROWS, "GiB"))]
        assert len(rows) == 8 and all(any(line.startswith(row) for line in lines) for row in rows), said
        assert " | ".join(f"{phase} {peaks[phase]}" for phase in peaks) in header
    else:
        assert f"{float(always):.1f} GiB of weights" in header and f"{float(peak):.1f} GiB at the" in " ".join(header.split())


def test_the_page_on_memory_quotes_the_comparison(monkeypatch, capsys):
    said = printed(monkeypatch, capsys, "config/llama_8b.py", "--world-size=8", "--compare").splitlines()
    rows = {line.split()[0]: line.split()[1:7] for line in said if line.startswith((*memory.ROWS[:3], "peak"))}
    with open(os.path.join(ROOT, "docs", "memory.md"), encoding="utf-8") as f:
        page = f.read()
    assert f"| peak | {' | '.join(rows['peak'])} |" in page, rows
    sums = [sum(float(rows[row][i]) for row in memory.ROWS[:3]) for i in range(6)]
    quoted = re.search(r"\| weights, gradients, states \| (.*) \|", page).group(1).split(" | ")
    assert [float(x) for x in quoted] == pytest.approx(sums, abs=0.011)


@pytest.mark.parametrize("script", ["ppo", "grpo"])
def test_without_a_kl_there_is_no_reference(script):
    c, planned = parse_config(memory.KNOWN["pythia-1b"]), {}
    for kl_coef in ("0", "1e-9"):
        config = memory.read_config(script, [f"--kl_coef={kl_coef}", "--dtype=bfloat16"])
        planned[kl_coef] = memory.predict(config, c, [c])
    assert planned["1e-9"]["rows"].keys() - planned["0"]["rows"].keys() == {"ref_policy"}
    assert planned["1e-9"]["peak_mib"] - planned["0"]["peak_mib"] == pytest.approx(2 * 1.012e9 / 2**20, rel=1e-3)


def test_one_trunk_is_a_third_of_four_models():
    """On a Llama of 134M parameters in fp32, micro-batch, checkpointing and chunks alike."""
    c = parse_config(llama(768, 12, 12, 12, 2048, vocab_size=32000))
    config = memory.read_config("ppo", ["--batch_size=4", "--max_new_tokens=24", "--micro_batch_size=4", "--head_chunk=64",
                                        "--gradient_checkpointing=True"])
    full, trunk = (memory.predict(config | more, c, [c], 24, device="cpu")["peak_mib"] for more in (
        {}, dict(share_base=True, lora="16")))
    assert trunk < 0.35 * full


@pytest.mark.parametrize("fp32_head", [False, True])
@pytest.mark.parametrize("weights, dtype", [
    (torch.float32, None), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)])
@pytest.mark.parametrize("tied", [True, False])
def test_a_packed_copy_has_the_matrices_that_multiply(tmp_path, monkeypatch, tied, weights, dtype, fp32_head):
    """
    The copy that decodes on a CPU where packing is faster, in 32 bits, under autocast to 16, and of a model in 16 bits:
    predicted as it is. Of the last one a head that shall be wide stays as it is, and is made wide when it is read.
    """
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(kernels, "onednn_is_faster", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    policy = from_scratch(llama(32, 2, 4, 2, 56, vocab_size=97, tie_word_embeddings=tied)).to(weights)
    policy.config.fp32_head, narrow = fp32_head, weights.itemsize == 2
    copy = decoding_copy(policy, dtype, torch.device("cpu"))
    own = {q.data_ptr() for q in policy.parameters()}
    copied = [p for p in copy.parameters() if p.is_mkldnn or p.data_ptr() not in own]
    # in each of 2 layers q+k+v, gate+up, o and down; and the head
    assert sum(p.is_mkldnn for p in copied) == 9 - (narrow and fp32_head)
    run = types.SimpleNamespace(cuda=False, autocast=dtype is not None and not narrow, a=4 if dtype is None else 2)
    m = formulas.Model(policy.config, "lm", True, weights.itemsize, 4)
    assert formulas.decoding_copy(m, run) == sum(p.numel() * p.dtype.itemsize for p in copied)
    run.cuda = True
    assert (formulas.decoding_copy(m, run) > 0) == run.autocast  # a GPU packs nothing


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        print("| run | busiest phase | measured MiB | predicted MiB | error | weights, gradients, states |")
        print("|---|---|---|---|---|---|")
        for each, outcome in runs(CAMPAIGN if len(sys.argv) == 1 else {k: CAMPAIGN[k] for k in sys.argv[1:]}, scratch).items():
            print(line(each, *outcome))

"""tools/memory.py: rows by hand, peaks against what torch's MemTracker sees in runs of the scripts, and the command line."""
import json
import os

import pytest

from conftest import ROOT
from tools import memory
from tiny import arguments, forked, jsonl, one_run, read_json, read_text

LLAMA = dict(model_type="llama", architectures=["LlamaForCausalLM"], hidden_size=8, intermediate_size=16, num_hidden_layers=8,
             num_attention_heads=2, num_key_value_heads=1, head_dim=4, vocab_size=32, max_position_embeddings=64,
             tie_word_embeddings=False, bos_token_id=None, eos_token_id=2)
# a run whose last iteration is under MemTracker, which writes the peak of each of its phases to peaks-RANK.json
TRACKED = """
import gc, json, os
from unittest import mock
import torch
import before_torch
import run
from torch.distributed._tools.mem_tracker import MemTracker

class Tracker(MemTracker):
    def __init__(self):
        super().__init__()
        self._mod_tracker = mock.MagicMock(is_bw=False)  # its hooks fail where a module is called twice

tracker, peaks, enter = Tracker(), {}, run.Run.enter

def entered(self, phase):
    ended = self.phase
    enter(self, phase)
    if phase == "log" and not tracker._WINFO:  # the first iteration is done: weights, gradients and states are there
        gc.collect()
        tracker.track_external(*(t for t in gc.get_objects() if issubclass(type(t), torch.Tensor) and not t.is_meta))
        tracker.__enter__()
        return
    peaks[ended] = max(tracker._peak_mem.values(), default=0) / 2**20
    tracker._peak_mem.clear()
    if phase == "log":
        with open("peaks-" + os.environ.get("RANK", "0") + ".json", "w") as f:
            json.dump(peaks, f)

run.Run.enter = entered
"""


def read_table(text):
    """{row: {column: number}} of the first table of the tool's output, and {phase: its peak}."""
    first, second = text.split("at the peak of\n")
    titles, *lines = [line.split() for line in first.partition("\n\n")[2].strip().splitlines()]
    n = len(titles) - 1
    rows = {" ".join(line[:-n]): dict(zip(titles[1:], map(float, line[-n:]), strict=True)) for line in lines}
    return rows, {line.split()[0]: float(line.split()[1]) for line in second.strip().splitlines() if "   " in line}


@pytest.fixture(scope="module")
def world(world):
    """The tiny world with a Llama-like policy, a reward model, an adapter on the policy, and prompts of one length."""
    from options.lora import Adapted, save_adapter
    from checkpoint import save_model
    from tokenizer import load_tokenizer
    from scratch import from_scratch

    folder, tokenizer = world.root, load_tokenizer(world.tokenizer)
    settings = {k: v for k, v in LLAMA.items() if k != "architectures"} | dict(
        hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        vocab_size=tokenizer.vocab_size + 3, eos_token_id=tokenizer.eos_id, pad_token_id=tokenizer.pad_id)
    policy = from_scratch(settings, seed=1)
    save_model(f"{folder}/llama", policy, tokenizer)
    scores = from_scratch(settings, head="scalar", seed=2)
    scores.score_shift = 0.5
    save_model(f"{folder}/scores", scores, tokenizer)
    save_adapter(Adapted(policy, "scalar", rank=4, seed=3), f"{folder}/adapter", f"{folder}/llama")
    jsonl(f"{folder}/prompts.jsonl", [dict(prompt=f"{100 + i}+{200 + i}=", answer=str(300 + 2 * i)) for i in range(40)])
    return world


SETTINGS = {  # (script, ranks, keys); those behind the line are the campaign's
    "bf16": ("ppo", 1, dict(dtype="bfloat16", ema_decay=0.9)),
    "grpo, stage 3, bf16": ("grpo", 2, dict(zero_stage=3, dtype="bfloat16", batch_size=16)),  # two micro-batches
    # ----
    "stage 3": ("ppo", 2, dict(zero_stage="policy=3,value=1", batch_size=16)),
    "one trunk": ("ppo", 1, dict(lora=4, share_base=True, value_init="policy", reward_path="{}/adapter")),
    "grpo": ("grpo", 1, dict()),
    "ppo": ("ppo", 1, dict()),
    "checkpointing": ("ppo", 1, dict(micro_batch_size=8, gradient_checkpointing=True)),
    "chunks": ("ppo", 1, dict(head_chunk=16, entropy_coef=0.01)),
    "lora": ("ppo", 1, dict(lora=4, dtype="bfloat16")),
    "shared": ("ppo", 1, dict(value_init="shared", optim="adafactor")),
}


def keys_of(world, script, more):
    keys = dict(policy_path=f"{world.root}/llama", reward_path=f"{world.root}/scores",
                prompts_path=f"{world.root}/prompts.jsonl", reward_timeout=30,
                max_prompt_tokens=8, max_new_tokens=12, batch_size=8, micro_batch_size=4, num_minibatches=1, max_iters=2,
                kl_coef=0.1, temperature=1.0, checkpoint_interval=0, timeout=60, device_type="cpu", learning_rate=1e-5)
    if script == "ppo":
        keys |= dict(ppo_epochs=1, missing_eos_penalty=0)
    else:
        keys |= dict(group_size=4, reward_functions=world.rule("letters"))
        del keys["reward_path"]
    keys |= more
    return {k: v.format(world.root) if isinstance(v, str) else v for k, v in keys.items()}


@pytest.mark.parametrize("name", [*SETTINGS][:2] + [pytest.param(name, marks=pytest.mark.campaign) for name in [*SETTINGS][2:]])
def test_peaks(name, world, tmp_path):
    """A run as MemTracker sees it, and as it is predicted."""
    script, ranks, more = SETTINGS[name]
    keys = keys_of(world, script, more)
    run, tool = forked(str(tmp_path), {"it": [
        one_run(f"{script}.py", *[(arguments(keys | dict(out_dir="out")), TRACKED)] * ranks),
        one_run("tools/memory.py", [*arguments(keys), f"--world-size={ranks}"])]})["it"]
    assert set(run["codes"] + tool["codes"]) == {0}, (run["stderr"], tool["stderr"])
    took = read_json(tmp_path / "it" / "peaks-0.json")
    took["reading"] = took["score"]
    _, said = read_table(tool["stdout"][0])
    assert said == {phase: pytest.approx(took[phase], rel=0.05 if phase != "reading" else 1) for phase in said}
    assert max(said, key=said.get) == max(said, key=took.get)


@pytest.fixture
def folders(tmp_path):
    """Folders with nothing but a config.json: a policy and a reward model."""
    for name, kind in (("policy", "LlamaForCausalLM"), ("scores", "LlamaForSequenceClassification")):
        os.makedirs(tmp_path / name)
        (tmp_path / name / "config.json").write_text(json.dumps(LLAMA | dict(architectures=[kind], num_labels=1)))
    return arguments(dict(policy_path=tmp_path / "policy", reward_path=tmp_path / "scores"))


def test_rows_by_hand(folders, monkeypatch):
    """
    A Llama of 8 layers, d = 8: embedding and head 32 x 8 each; a layer's q and o 8 x 8, k and v 4 x 8, three maps of the MLP
    8 x 16, two norms of 8; a last norm. With a score in the place of the head: 8.
    """
    layer = 2 * 64 + 2 * 32 + 3 * 128 + 2 * 8
    policy, value, tensors = 2 * 256 + 8 * layer + 8, 256 + 8 * layer + 8 + 8, 8 * 9 + 3
    monkeypatch.setattr(memory, "step_through", lambda *args: {})

    def rows(*more):
        return memory.predict(*memory.read_run([*folders, "--value_init=reward", *more]), 1)[0]

    plain = rows("--ema_decay=0.9")
    assert plain["policy"] == dict(weights=4 * policy, gradients=4 * policy, optimizer=8 * policy + 4 * tensors,
                                   average=4 * policy)
    assert plain["value_model"]["optimizer"] == 8 * value + 4 * tensors
    assert plain["ref_policy"]["weights"] == 4 * policy and plain["reward_model"]["weights"] == 4 * value
    # matrices in 16 bits, but not the embedding, norms and the score; LoRA: rank (in + out) of each linear map
    short = rows("--dtype=bfloat16", "--lora=policy=2", "--offload=value=optimizer,reward=params", "--device_type=cuda")
    adapters = 2 * 8 * (2 * (8 + 8) + 2 * (8 + 4) + 3 * (8 + 16))
    assert short["policy"]["weights"] == short["policy"]["gradients"] == 4 * adapters
    assert short["ref_policy"]["weights"] == 2 * (256 + 8 * (layer - 16)) + 4 * (256 + 8 * 16 + 8)
    assert short["value_model"] == dict(weights=4 * value, gradients=4 * value, optimizer=0, average=0)
    assert short["reward_model"]["weights"] == 0


@pytest.mark.parametrize("argv, script", [
    (["config/mine.py"], "grpo"), (["ppo.py", "config/mine.py", "--value_init=policy"], "ppo"), (["config/mine_ppo.py"], "ppo"),
    (["config/mine_rm.py"], "rm"), (["grpo.py", "--reward_path=x"], "grpo"), (["config/dapo.py"], "grpo")])
def test_which_script_is_meant(argv, script, monkeypatch):
    """mine.py has rules and fits ppo.py, too, whose value model would need a reward model; a script may be named."""
    monkeypatch.chdir(ROOT)
    assert memory.read_run(argv)[0] == script


def test_the_command(folders, tmp_path):
    """What users type, on a model of which only config.json is here, and what they mistype."""
    config = os.path.join(ROOT, "config/llama_8b.py")
    sft = [f"--init_from={tmp_path}/policy", "--max_tokens=8", "--batch_size=8", "--micro_batch_size=1", "--val_path="]
    calls = {"fits": [*sft, "--gpu-gb=80"],
             "key": [config, "--lorra=3"], "size": [config, "--world-size=x"], "roles": [config, "--roles=train=1,score=1"]}
    got = forked(str(tmp_path), {name: [one_run("tools/memory.py", argv)] for name, argv in calls.items()})
    assert "largest micro_batch_size that fits is 8\n" in got["fits"][0]["stdout"][0], got["fits"]
    for name, word in dict(key="lorra", size="world_size", roles="roles").items():
        run, = got[name]
        assert run["codes"] == [2] and run["stderr"][0].count("\n") == 1 and word in run["stderr"][0], run


@pytest.mark.campaign
def test_one_card(tmp_path, capsys):
    """The table of docs/memory.md: GRPO on Llama 3.1 8B in 4 bits."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | dict(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        head_dim=128, vocab_size=128256, max_position_embeddings=131072)))
    memory.show(*memory.predict(*memory.read_run([os.path.join(ROOT, "config/one_card.py"), f"--policy_path={tmp_path}"]), 1)[:2])
    page = read_text(os.path.join(ROOT, "docs", "memory.md"))
    said = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert "\n".join(f"    {line}".rstrip() for line in said) in page, "\n".join(said)

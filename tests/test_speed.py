"""
How speed is measured: random models that end when they shall (tools/bench.py), and the table of peers
(runs/peers).
"""
import importlib.util
import json
import os
import statistics
import subprocess
import sys

import pytest
from conftest import ROOT

from engine.tokenizers import load_tokenizer
from errors import Stop
from model import load_model
from rollout import generate
from tiny import arguments
from tools.bench import make_models

SIZES = dict(vocab_size=40, hidden_size=16, intermediate_size=3, num_hidden_layers=2, num_attention_heads=2,
             num_key_value_heads=1)


@pytest.mark.parametrize("share", [0.0, 0.125])
def test_random_models_end_as_often_as_they_shall(tmp_path, share):
    make_models(tmp_path, SIZES, prompt_length=3, longest=16, end_share=share, prompts=400)
    policy, tokenizer = load_model(tmp_path / "policy"), load_tokenizer(tmp_path / "policy")
    assert (tokenizer.eos_id, tokenizer.pad_id) == (38, 39)
    prompts = tokenizer.encode_prompts([json.loads(line)["prompt"] for line in (tmp_path / "prompts.jsonl").open()])
    assert len(prompts) == 400 and all(len(ids) == 3 and max(ids) < 38 for ids in prompts)
    out = generate(policy, prompts, 16, eos_ids=tokenizer.eos_ids, pad_id=39)
    lengths = out["response_mask"].sum(1).tolist()
    sampled = out["tokens"][:, -16:][out["response_mask"]]
    assert (sampled != 39).all() and len(sampled.unique()) >= 38
    if share == 0:
        assert set(lengths) == {16} and not out["finished"].any()
    else:  # 1 / share x (1 - (1 - share)^16) = 7.06; the mean of 400 has a deviation of 0.26
        assert statistics.mean(lengths) == pytest.approx(7.06, abs=0.9)
        assert (sampled == 38).double().mean().item() == pytest.approx(0.125, abs=0.03)
    reward_model = load_model(tmp_path / "reward_model", "scalar")
    assert not reward_model.new_head and reward_model.hf.config.score_shift == 0


# ---------------------------------------------------------------------------------------------------------------------
# the table of peers, with what bench and TRL would have said


@pytest.fixture
def table(monkeypatch):
    """runs/peers/table.py as a module."""
    keys = dict(rounds=2, steps=2, ppo_python="theirs")
    monkeypatch.setattr(sys, "argv", ["table.py", *arguments(keys)])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # configure sets it
    spec = importlib.util.spec_from_file_location("table", os.path.join(ROOT, "runs", "peers", "table.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_row_of_the_table(table, monkeypatch):
    """Medians over all steps of both turns; the peak of both."""
    ours = iter([(1.0, 3.0, 100), (2.0, 2.0, 150)])
    theirs = iter([(4.0, 5.0, 300), (6.0, 6.0, 200)])

    def iterations(script, folder, keys):
        a, b, mib = next(ours)
        assert (script, keys["max_iters"], keys["micro_batch_size"]) == ("ppo", 3, 8)
        return [{"time/iteration": a, "mem/peak_mib": mib}, {"time/iteration": b, "mem/peak_mib": mib}]

    def run(command, **_):
        a, b, mib = next(theirs)
        assert command[0] == "theirs" and command[2:] == ["ppo", "here", "2", "8"]
        return subprocess.CompletedProcess(command, 0, f'words\n[[{a}, {b}], {mib}, "TRL 1"]\n', "")

    table.iterations = iterations
    monkeypatch.setattr(subprocess, "run", run)
    assert table.row_of("ppo_real", "here") == "| PPO, real, micro-batches of 8 | 2.000 s | TRL 1 | 5.500 s | 2.75 | 150, 300 |"


def test_a_peer_that_fails_is_said(table, monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "", "Traceback\nNo module named trl\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(Stop, match="No module named trl"):
        table.of_trl("ppo", "here", 8)
    with open(os.path.join(ROOT, "runs", "peers", "trl_steps.py"), encoding="utf-8") as f:
        compile(f.read(), "trl_steps.py", "exec")

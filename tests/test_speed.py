"""
How speed is measured: random models that end when they shall (tools/bench.py), and the table of peers
(runs/peers).
"""
import importlib.util
import json
import os
import statistics
import sys

import pytest
import torch
from conftest import ROOT

from engine.tokenizers import load_tokenizer
from errors import BadConfig
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
# the table of peers, with what the measuring scripts would have printed


@pytest.fixture
def peers(tmp_path, monkeypatch):
    """runs/peers/table.py as a module; its scripts are not run, but say what peers.said has for them, in that order."""
    page = tmp_path / "page.md"
    (tmp_path / "results.json").write_text('{"grpo_real": {"line": "| of an earlier call |"}}')
    page.write_text("before\n<!-- peers: begin -->\nold\n<!-- peers: end -->\nafter\n")
    keys = dict(folder=tmp_path, rows="decode_full,ppo_real,grpo_full", rounds=2, grpo_python="theirs", page=page)
    monkeypatch.setattr(sys, "argv", ["table.py", *arguments(keys)])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # configure sets it
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    spec = importlib.util.spec_from_file_location("table", os.path.join(ROOT, "runs", "peers", "table.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.measured_flops = lambda *_: 2e11
    module.commands = []

    def say(command, **_):
        module.commands.append(command)
        said = module.said.pop(0)
        if isinstance(said, str):
            return module.subprocess.CompletedProcess(command, 1, "", said)
        return module.subprocess.CompletedProcess(command, 0, "some words\n" + json.dumps(said) + "\n", "")

    monkeypatch.setattr(module.subprocess, "run", say)
    return module


def turn(*seconds, cores=2.0, mib=100, **more):
    return dict(seconds=seconds, cpu_per_wall=cores, peak_mib=mib) | more


def test_the_table_of_peers(peers, capsys, tmp_path):
    peers.said = [turn(1.0, 3.0), turn(4.0, 5.0, mib=300, version="transformers 1"),
                  turn(2.0, mib=150), turn(6.0, cores=1.5, version="x"),
                  "a traceback\nNo module named trl\n"]
    peers.main()
    lines = capsys.readouterr().out.splitlines()[-5:]
    # medians of 1, 3, 2 and of 4, 5, 6; 1.5 cores where 2 threads should work
    assert lines[2] == "| sampling, full | 2.000 s | transformers 1 | 5.000 s | 2.50 | 150, 300 | 2.00, 1.50 contended |"
    assert lines[3] == "| PPO, real, micro-batches of 8 | | ppo: no environment | | | | |"
    assert lines[4] == "| GRPO, full, micro-batches of 32 | | grpo failed: No module named trl | | | | |"
    assert [command[0] for command in peers.commands] == [sys.executable, "theirs"] * 2 + [sys.executable]
    script, *words = peers.commands[1][1:]
    assert (os.path.basename(script), words) == ("generate.py", ["transformers", str(tmp_path / "models" / "full"), "4"])
    page = (tmp_path / "page.md").read_text()
    assert page.startswith("before\n<!-- peers: begin -->\n") and page.endswith("\n<!-- peers: end -->\nafter\n")
    assert f"{lines[2]}\n| of an earlier call |\n" in page and "old" not in page
    assert "products 200 GFLOP/s." in page
    assert json.loads((tmp_path / "results.json").read_text())["decode_full"]["peer"][1]["cpu_per_wall"] == 1.5


def test_a_page_without_marks_and_rows_that_are_none_are_refused(peers, tmp_path):
    (tmp_path / "page.md").write_text("no marks\n")
    with pytest.raises(BadConfig, match="must have one line"):
        peers.write_between_marks(tmp_path / "page.md", ["row"])
    peers.rows = "decode_full,decode_empty"
    with pytest.raises(BadConfig, match="decode_empty"):
        peers.main()


def test_a_stopwatch_leaves_the_warm_up_out(monkeypatch, capsys):
    monkeypatch.syspath_prepend(os.path.join(ROOT, "runs", "peers"))
    import stopwatch

    watch = stopwatch.Stopwatch()
    watch.clicks = [(0.0, 0.0), (9.0, 1.0), (11.0, 5.0), (14.0, 10.0)]  # steps of 9, 2 and 3 seconds
    watch.report(1, length=7)
    said = json.loads(capsys.readouterr().out)
    assert (said["seconds"], said["median"], said["cpu_per_wall"], said["length"]) == ([2.0, 3.0], 2.5, 1.8, 7)
    assert said["peak_mib"] > 50


@pytest.mark.parametrize("script", ["quartet.py", "trl_steps.py", "generate.py", "table.py", "stopwatch.py"])
def test_scripts_of_peers_compile(script):
    with open(os.path.join(ROOT, "runs", "peers", script), encoding="utf-8") as f:
        compile(f.read(), script, "exec")

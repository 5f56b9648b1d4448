"""
vLLM as the sampler. Everything but vLLM itself is tested with a stand-in (tests/stand_in/vllm.py), a package of that name which
samples with our own model: a run with it must be the run without it. What needs the real one is skipped without it.
"""
import importlib.util
import os
import re
import sys
from types import SimpleNamespace

import pytest
import torch

from options import vllm as vllm_sampler
from checkpoint import save_model
from tokenizer import load_tokenizer
from options.vllm import begin_vllm, check_vllm
from errors import BadConfig, BadInput, Lost
from load import load_model
from scratch import from_scratch

import tiny
from conftest import ROOT
from tiny import alike, distance, forked, measured, one_run

THERE = importlib.util.find_spec("vllm") is not None
STAND_IN = os.path.join(ROOT, "tests", "stand_in")
FORK = f"""
import sys, types
sys.path.insert(0, {STAND_IN!r})
import vllm
from options import vllm as vllm_sampler
vllm_sampler.subprocess = types.SimpleNamespace(Popen=vllm.Forked, DEVNULL=None)
vllm.wrong = """
CASES = {  # name: (script, ranks, keys)
    "sharded": ("grpo.py", 2, dict(policy="qwen", zero_stage="policy=3", stop_strings="1", eval_interval=2)),
    "roles": ("ppo.py", 3, dict(roles="train=1,generate=1,score=1", staleness=1, importance_cap=2, lora="2")),
}


@pytest.fixture(scope="module")
def world(world):
    tiny.add_qwen(world)
    return world


def on(world, script, ranks, sampler, wrong="", **keys):
    """A run for forked, on so many ranks, with the stand-in; what the last rank's does wrong."""
    if "policy" in keys:
        keys["policy_path"] = getattr(world, keys.pop("policy"))
    arguments = getattr(world, script.removesuffix(".py"))("out", **dict(sampler=sampler, max_iters=2) | keys)
    return one_run(script, *[(arguments, f"{FORK}{wrong if rank == ranks - 1 else ''!r}") for rank in range(ranks)])


@pytest.fixture(scope="module")
def runs(world, tmp_path_factory):
    return forked(tmp_path_factory.mktemp("runs"), {
        f"{name} {sampler}": [on(world, script, ranks, sampler, **keys)]
        for name, (script, ranks, keys) in CASES.items() for sampler in ("own", "vllm")}, at_once=3).succeeded()


@pytest.mark.parametrize("name", CASES)
def test_a_run_with_a_sampler_of_its_own_process_is_the_same_run(runs, name):
    logs = [[measured(record) for record in runs.log(f"{name} {sampler}")] for sampler in ("own", "vllm")]
    assert alike(*logs, 1e-4) and any("policy/sampler_gap" in record for record in logs[1])
    # Adam makes much of the last bits, in which the weights of importance of an older policy differ
    moved = distance(f"{runs.out(f'{name} own')}/policy", f"{runs.out(f'{name} vllm')}/policy")
    assert moved < (1e-5 if name == "sharded" else 5e-3)


def test_several_turns(world, tmp_path):
    """Of each response the first turn is that of our own sampler; each turn has the noise of its own."""
    (tmp_path / "mine.py").write_text("def env(messages, row):\n    return f'{len(messages)}x'\n\n\n"
                                      "def score(batch):\n    return list(map(len, batch['completions']))\n")
    keys = dict(environment=f"{tmp_path}/mine.py:env", reward_functions=f"{tmp_path}/mine.py:score", max_turns=3,
                max_new_tokens=14, max_iters=1, save_rollouts=1)
    runs = {sampler: [on(world, "grpo.py", 1, sampler, **keys)] for sampler in ("own", "vllm")}
    texts = {}
    for sampler in forked(str(tmp_path), runs).succeeded():
        rows = tiny.read_jsonl(f"{tmp_path}/{sampler}/out/rollouts.jsonl")
        texts[sampler] = [[m["content"] for m in row["messages"]] for row in rows]
        assert max(map(len, texts[sampler])) >= 3 and all(row["length"] <= 14 for row in rows)
    assert [of[0] for of in texts["own"]] == [of[0] for of in texts["vllm"]]
    assert texts["own"] != texts["vllm"]


BAD = {  # name: (keys, ranks, what the last rank's stand-in does wrong, what is said, exit code)
    "stale": (dict(staleness=1), 1, "", "type --importance_cap=2", 2),
    "unknown": ({}, 1, "unknown", "type --sampler=own", 2),
    "forgets": ({}, 1, "forgets", "not taken all weights that were sent .*; type --sampler=own", 2),
    "dies with roles": (dict(roles="train=1,generate=1"), 2, "dies 2", "vLLM has ended, with exit code 7", 1),
}


def test_what_ends_a_run_is_one_line(world, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("bad"))
    cases = {name: [on(world, "grpo.py", ranks, "vllm", wrong, **keys)] for name, (keys, ranks, wrong, *_) in BAD.items()}
    for name, (result,) in forked(folder, cases, at_once=2).items():
        *_, said, code = BAD[name]
        lines = [line for text in result["stderr"] for line in text.splitlines()]
        assert set(result["codes"]) == {code}, (name, result)
        assert all(line.startswith("grpo.py: error") for line in lines) and 1 <= len(lines) <= 2, (name, lines)
        assert any(re.search(said, line) for line in lines), (name, lines)
        assert code == 1 or not os.path.exists(f"{folder}/{name}/out/log.jsonl")


def settings(**keys):
    defaults = dict(dtype="float32", generate_tp=1, timeout=600, vllm_cache=0.25, rollout_batch_size=64, staleness=0)
    return SimpleNamespace(**defaults | keys)


@pytest.fixture
def stand_in(monkeypatch):
    """The stand-in, for this process."""
    monkeypatch.syspath_prepend(STAND_IN)
    module = importlib.import_module("vllm")
    monkeypatch.setattr(vllm_sampler, "subprocess", SimpleNamespace(Popen=module.Forked, DEVNULL=None))
    yield module
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        del sys.modules[name]


@pytest.mark.parametrize("wrong, said", [
    ("hangs 2", "not answered for timeout = 3 seconds"),
    ("cuts 2", "no room for a prompt of 1 tokens and max_new_tokens = 4; raise vllm_cache")])
def test_what_vllm_does_wrong_is_noticed(world, stand_in, wrong, said):
    stand_in.wrong = wrong
    policy = load_model(world.policy)
    vllm = begin_vllm(policy, load_tokenizer(world.tokenizer), settings(timeout=3), torch.device("cpu"))
    with pytest.raises(Lost, match=said):
        vllm.take_weights(policy)
        vllm.respond([[49]], 4, 1.0, {0}, 0, [1], 1)
    vllm.process.kill()
    vllm.process.wait()


@pytest.mark.parametrize("python, said", [(None, "there is no vLLM in .*; install it"), ("/no/python", "No such file")])
def test_a_missing_vllm(world, monkeypatch, python, said):
    if python is None and THERE:
        pytest.skip("vLLM is there")
    monkeypatch.setenv("VLLM_PYTHON", python or sys.executable)
    with pytest.raises(BadInput, match=said):
        begin_vllm(load_model(world.policy), load_tokenizer(world.tokenizer), settings(), torch.device("cpu"))


# ---------------------------------------------------------------------------------------------------------------------
# the real one


def find_vllm():
    """An interpreter with vLLM, or None."""
    if "VLLM_PYTHON" in os.environ:
        return os.environ["VLLM_PYTHON"]
    return sys.executable if THERE else None


needs_vllm = pytest.mark.skipif(find_vllm() is None, reason="there is no vLLM here; VLLM_PYTHON names an interpreter that has it")


def save_suited(folder, family, tokenizer):
    """A tiny policy that vLLM has kernels for on CPUs: they want heads of 32 numbers or more."""
    config = dict(model_type=family, vocab_size=tokenizer.vocab_size + 5, bos_token_id=None, eos_token_id=tokenizer.eos_id,
                  pad_token_id=tokenizer.pad_id, initializer_range=0.15)
    if family == "gpt2":
        config |= dict(n_embd=64, n_layer=2, n_head=2, n_positions=64)
    else:
        config |= dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
                       intermediate_size=96, max_position_embeddings=64, tie_word_embeddings=family == "qwen3")
    save_model(folder, from_scratch(config, seed=1), tokenizer)


@needs_vllm
@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3"])
def test_vllm_samples_what_the_policy_would(world, tmp_path, family):
    tokenizer = load_tokenizer(world.tokenizer)
    torch.manual_seed(0)
    save_suited(f"{tmp_path}/policy", family, tokenizer)
    policy = load_model(f"{tmp_path}/policy")
    reads = SimpleNamespace(stop_strings=["7"], vocab_size=tokenizer.vocab_size)
    vllm = begin_vllm(policy, reads, settings(), torch.device("cpu"))
    prompts = [[49 + i, 43, 50] for i in range(6)] * 2
    eos = {tokenizer.eos_id, 65, 66, 67}

    def sample(temperature=0.7, seeds=range(12)):
        return vllm.respond(prompts, 20, temperature, eos, tokenizer.pad_id, seeds, 5, has_stop=lambda ids: 55 in ids[-1:])

    for _ in range(2):
        vllm.take_weights(policy)
        for temperature in (0.7, 1.0, 0.0):
            batch = sample(temperature)
            tokens, mask, response = batch["tokens"], batch["attention_mask"], batch["response_mask"]
            assert tokens.shape == mask.shape == (12, 25) and response.shape == (12, 20) and tokens.max() < tokenizer.vocab_size
            ended = 0
            for row in range(12):
                ids = tokens[row][mask[row]][None]  # (1, T)
                chosen = torch.arange(ids.shape[1])[None] >= 3
                with torch.no_grad():
                    wanted, _ = policy.logprobs(ids, chosen, temperature or 1.0, tokenizer.vocab_size)
                n = len(wanted)
                assert (batch["sampler_logprobs"][row, :n] - wanted).abs().max() < 2e-5
                ends = [int(i) in eos | {55} for i in ids[0, 3:]]
                assert not any(ends[:-1]) and ends[-1] == bool(batch["finished"][row]) and (ends[-1] or n == 20)
                ended += ends[-1]
            assert 0 < ended or temperature == 0.0
        again, other = sample(), sample(seeds=range(100, 112))
        assert torch.equal(again["tokens"], sample()["tokens"]) and not torch.equal(again["tokens"], other["tokens"])
        with torch.no_grad():
            for p in policy.parameters():
                p.add_(0.02 * torch.randn_like(p))
    process = vllm.process
    vllm.connection.close()
    assert process.wait(30) == 0


def test_keys_that_vllm_cannot_have():
    for keys in (dict(dtype="float64"), dict(generate_tp=2), dict(staleness=1)):
        with pytest.raises(BadConfig):
            check_vllm(settings(**keys), importance_cap=0)
    check_vllm(settings(staleness=1), importance_cap=2)

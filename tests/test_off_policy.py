"""
Sampling by other kernels than training: what a run does about the gap, and truncated importance
sampling, and an LM head in float32. Most gaps are made here: the sampler says that its tokens were
likelier than they were.
"""
import math

import pytest
import torch

from engine.placement import decoding_copy
from engine.pretrained import from_pretrained, from_scratch, save_pretrained
from loss import (from_bits, importance_weights, logprobs_and_entropy, response_logprobs,
                  response_states)
from model import head_operands, head_precision
from packing import pack_responses
from rollout import generate

import tiny
from test_rollout import warped
from tiny import forked, one_run

OFF = """
import loss, rollout
original = rollout.sample
def sample(*args):
    token, logprob = original(*args)
    return token, logprob + {shift}
rollout.sample = sample
{more}
"""
TRUSTING = "loss.gap_limit = lambda *_: float('inf')"  # in float64, too
SHIFTS = dict(none=0.0, half=math.log(2), fourfold=-math.log(4))  # p / q is 1, 1/2, 4


def test_importance_weights():
    mb = dict(old_logprobs=torch.tensor([[0.3, 0.3, 0.1, 1.0]]).log(),
              sampler_logprobs=torch.tensor([[0.2, 0.6, 0.0125, 1.0]]).log())
    assert torch.allclose(importance_weights(mb, 2.0), torch.tensor([[1.5, 0.5, 2.0, 1.0]]))
    assert torch.allclose(importance_weights(mb, 1.2), torch.tensor([[1.2, 0.5, 1.2, 1.0]]))
    assert importance_weights(mb, 0.0) == 1.0
    mb["old_logprobs"].requires_grad_()
    assert not importance_weights(mb, 2.0).requires_grad


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """{name: (out_dir, result)}."""
    folder = str(tmp_path_factory.mktemp("off_policy"))
    world = tiny.build(folder)
    one_step = dict(dtype="float64", max_iters=1, num_minibatches=1, eval_path="")
    kinds = {
        "ppo": ("ppo.py", world.ppo("out", ppo_epochs=1, **one_step)),
        "grpo": ("grpo.py", world.grpo("out", num_iterations=1, kl_coef=0.0, **one_step)),
        "gspo": ("grpo.py", world.grpo("out", num_iterations=1, kl_coef=0.0, importance="sequence",
                                       truncated="mask", **one_step)),
        "cispo": ("grpo.py", world.grpo("out", num_iterations=1, kl_coef=0.0, loss_type="cispo",
                                        kl_in="reward", **one_step))}
    cases = {}
    for name, (script, arguments) in kinds.items():
        for shift, x in SHIFTS.items():
            code = OFF.format(shift=x, more=TRUSTING)
            cases[f"{name} {shift}"] = [one_run(script, (arguments + ["--importance_cap=2"], code))]
        code = OFF.format(shift=SHIFTS["half"], more=TRUSTING)
        cases[f"{name} off"] = [one_run(script, (arguments, code))]
    far = OFF.format(shift=0.05, more="")
    for script, make in (("ppo.py", world.ppo), ("grpo.py", world.grpo)):
        cases[f"{script} warns"] = [one_run(script, *[(make("out", dtype="bfloat16"), far)] * 2)]
        for dtype, limit in (("bfloat16", 0.03), ("bfloat16", 0.07), ("float32", 0.0)):
            arguments = make("out", dtype=dtype, sampler_gap_limit=limit, max_iters=1)
            cases[f"{script} {dtype} {limit}"] = [one_run(script, (arguments, far))]
        cases[f"{script} small cap"] = [one_run(script, make("out", importance_cap=0.5))]
    return {name: (f"{folder}/{name}/out", result)
            for name, (result,) in forked(folder, cases).items()}


@pytest.mark.parametrize("name", ["ppo", "grpo", "gspo", "cispo"])
def test_a_token_counts_as_its_importance_says(runs, name):
    """One step, whose loss has no other part: its gradient is the plain one, times the weight."""
    records = {}
    for shift in (*SHIFTS, "off"):
        out, result = runs[f"{name} {shift}"]
        assert result["codes"] == [0], result
        records[shift] = tiny.read_log(out)[0]
    plain = records["none"]["policy/grad_norm"]
    assert plain > 1e-3
    for shift, weight, capped in (("half", 0.5, 0), ("fourfold", 2, 1), ("none", 1, 0)):
        record = records[shift]
        assert record["policy/grad_norm"] == pytest.approx(weight * plain, rel=1e-9)
        assert record["loss/policy"] == pytest.approx(weight * records["none"]["loss/policy"])
        assert record["policy/importance"] == pytest.approx(weight)
        assert record["policy/importance_capped"] == capped
    assert records["off"]["policy/grad_norm"] == pytest.approx(plain, rel=1e-9)
    assert "policy/importance" not in records["off"]


@pytest.mark.parametrize("script", ["ppo.py", "grpo.py"])
def test_in_16_bits_a_gap_is_said_once_and_the_run_goes_on(runs, script):
    out, result = runs[f"{script} warns"]
    assert result["codes"] == [0, 0], result
    assert len(tiny.read_log(out)) == 4
    said = [line for line in result["stdout"][0].splitlines() if "warning" in line]
    assert len(said) == 1 and "in bfloat16 the sampler's log-probs differ" in said[0]
    assert "--importance_cap=2" in said[0] and "by 0.05" in said[0]
    assert "warning" not in result["stdout"][1]
    assert all(0.04 < r["policy/sampler_gap"] < 0.06 for r in tiny.read_log(out)[:-1])


@pytest.mark.parametrize("script", ["ppo.py", "grpo.py"])
def test_a_limit_stops_it_and_float32_has_one(runs, script):
    for name, limit in (("bfloat16 0.03", "0.03"), ("float32 0.0", "0.000111111")):
        result = runs[f"{script} {name}"][1]
        lines = [line for line in result["stderr"][0].splitlines() if "error" in line]
        assert result["codes"] == [1] and len(lines) == 1, result
        assert "log-probs of the sampler differ from the policy's by 0.05" in lines[0]
        assert f"(limit {limit})" in lines[0]
    assert runs[f"{script} bfloat16 0.07"][1]["codes"] == [0]


@pytest.mark.parametrize("script", ["ppo.py", "grpo.py"])
def test_a_cap_below_1_is_refused(runs, script):
    result = runs[f"{script} small cap"][1]
    assert result["codes"] == [2] and "importance_cap = 0.5 would" in result["stderr"][0]


# --------------------------------------------------------------------------------------------------
# the LM head in float32


def random_policy(tied):
    """A model of 16 bits' usual troubles: two layers, 300 tokens, and logits that differ."""
    config = dict(model_type="llama", vocab_size=300, hidden_size=64, intermediate_size=96,
                  num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                  max_position_embeddings=64, tie_word_embeddings=tied, bos_token_id=None,
                  eos_token_id=0, pad_token_id=0)
    policy = from_scratch(config, seed=1)
    with torch.no_grad():
        policy.lm_head_weight().mul_(4)
    return policy


@pytest.mark.parametrize("chunk", [0, 3])
@pytest.mark.parametrize("tied", [False, True])
def test_an_fp32_head_computes_as_without_autocast(tied, chunk):
    """Logits, log-probs and gradients, given the states that the trunk has computed in 16 bits."""
    policy = random_policy(tied)
    states = torch.randn(7, 64, generator=torch.Generator().manual_seed(0))
    tokens = torch.arange(7)

    def gradients(half):
        policy.zero_grad()
        x = states.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=half, cache_enabled=False):
            logits = policy.output(x)
            with head_precision(policy, x):
                logprobs, entropy = logprobs_and_entropy(*head_operands(policy, x), tokens,
                                                         chunk=chunk)
        (logprobs.sum() + 0.1 * entropy.sum()).backward()
        return logits, logprobs, x.grad, policy.lm_head_weight().grad.clone()

    plain, rounded = gradients(False), gradients(True)
    policy.config.fp32_head = True
    wide = gradients(True)
    assert all(torch.equal(a, b) for a, b in zip(plain, wide, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(plain, rounded, strict=True))


@pytest.mark.parametrize("tied", [False, True])
def test_with_an_fp32_head_the_sampler_is_nearer_to_the_training_forward(tied, tmp_path):
    prompts = torch.randint(1, 300, (24, 6), generator=torch.Generator().manual_seed(1)).tolist()
    gaps = {}
    for wide in (False, True):
        policy = random_policy(tied)
        policy.config.fp32_head = wide
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False), torch.no_grad():
            decoder = decoding_copy(policy, torch.bfloat16, torch.device("cpu"))
            batch = generate(decoder, prompts, 30, vocab_size=300)
            logprobs, _ = response_logprobs(policy, batch, 1.0, 300)
        head = decoder.lm_head_weight()
        assert head.dtype == (torch.float32 if wide else torch.bfloat16)
        assert decoder.layers[0].o.weight.dtype == torch.bfloat16
        gaps[wide] = (logprobs - batch["sampler_logprobs"]).abs().mean()
    assert 0 < gaps[True] < gaps[False]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("keys", [dict(top_k=9), dict(top_p=0.8), dict(min_p=0.3),
                                  dict(top_k=40, top_p=0.9, min_p=0.05)], ids=str)
@torch.no_grad()
def test_an_fp32_head_with_truncated_sampling(keys, tied, monkeypatch):
    """
    In 16 bits, given the states of the trunk: what may be sampled and its log-probs are those of
    transformers' warpers on logits in float32, and so are those of the training forward.
    """
    prompts, R, V = [[5, 7, 9], [11], [2, 3]], 12, 290
    heat = 12.0 if tied else 0.7  # with its large embeddings, a tied one is sure of itself
    policy = random_policy(tied)
    policy.config.fp32_head = True
    states = []  # of each token to sample, (3, d) each
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        decoder = decoding_copy(policy, torch.bfloat16, torch.device("cpu"))
        output = decoder.output
        monkeypatch.setattr(decoder, "output", lambda x: (states.append(x), output(x))[1])
        batch = generate(decoder, prompts, R, heat, vocab_size=V, seed=1, keep_sets=True,
                         truncation=dict(top_k=0, top_p=1.0, min_p=0.0) | keys)
        trained, entropy = response_logprobs(policy, batch, heat, V)
        hidden = response_states(policy, batch, pack_responses(batch))  # (3 R, d)
    assert len(states) == R
    head = policy.lm_head_weight().float()[:V]
    kept = from_bits(batch["kept"], 300)  # (3, R, 300)
    assert 1 < kept.sum(2).float().mean() < 250 and not kept[..., V:].any()
    tokens = batch["tokens"][:, -R:]
    for t, x in enumerate(states):
        want = warped(x.view(3, 64).float() @ head.T, heat, **keys)  # (3, V)
        assert torch.equal(kept[:, t, :V], want > -torch.inf)
        said = batch["sampler_logprobs"][:, t]
        assert (want.gather(1, tokens[:, t:t + 1])[:, 0] - said).abs().max() < 1e-5
        rounded = (x.view(3, 64).bfloat16() @ head.T.bfloat16()).float()  # what it would be without
        assert (rounded - x.view(3, 64).float() @ head.T).abs().max() > 1e-3
    logits = (hidden.float() @ head.T / heat).view(3, R, V)
    want = logits.masked_fill(~kept[..., :V], -torch.inf).log_softmax(-1)
    assert (want.gather(2, tokens[..., None])[..., 0] - trained).abs().max() < 1e-5
    assert ((want.exp() * -want.masked_fill(want == -torch.inf, 0)).sum(2) - entropy).abs().max() < 1e-5


def test_frozen_heads_stay_wide(tmp_path):
    for tied in (False, True):
        folder = str(tmp_path / str(tied))
        policy = random_policy(tied)
        save_pretrained(policy, folder)
        for wide in (False, True):
            frozen = from_pretrained(folder, matrices=torch.bfloat16, fp32_head=wide)
            assert frozen.layers[0].up.weight.dtype == torch.bfloat16
            assert (frozen.lm_head_weight().dtype == torch.float32) == wide
        assert torch.equal(frozen.lm_head_weight(), policy.lm_head_weight())


def test_runs_with_an_fp32_head(tmp_path):
    """Policy and reference are still the same to the last bits at first; on ranks and with LoRA."""
    world = tiny.build(str(tmp_path))
    half = dict(dtype="bfloat16", fp32_head=True)
    cases = {"ppo": [one_run("ppo.py", *[world.ppo("out", zero_stage=3, **half)] * 2)],
             "lora": [one_run("grpo.py", world.grpo("out", lora="4", **half))],
             "sft": [one_run("sft.py", world.sft("out", **half))],
             "rm": [one_run("rm.py", world.rm("out", fp32_head=True))]}
    results = forked(str(tmp_path), cases)
    for name in ("ppo", "lora"):
        assert set(results[name][0]["codes"]) == {0}, results[name]
        first = tiny.read_log(f"{tmp_path}/{name}/out")[0]
        assert abs(first["eval/kl"]) < 1e-6 and first["policy/ratio_gap"] < 1e-6
    assert results["sft"][0]["codes"] == [0] and results["rm"][0]["codes"] == [2]
    assert "fp32_head" in results["rm"][0]["stderr"][0]

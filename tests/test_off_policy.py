"""
Sampling by other kernels than training: what a run does about the gap, and truncated importance
sampling. The gaps are made here: the sampler says that its tokens were likelier than they were.
"""
import math

import pytest
import torch

from loss import importance_weights

import tiny
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
        cases[f"{script} float32"] = [one_run(script, (make("out", dtype="float32", max_iters=1), far))]
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
    assert "--importance_cap=2" in said[0]
    assert "warning" not in result["stdout"][1]
    assert all(0.04 < r["policy/sampler_gap"] < 0.06 for r in tiny.read_log(out)[:-1])


@pytest.mark.parametrize("script", ["ppo.py", "grpo.py"])
def test_float32_has_a_limit(runs, script):
    result = runs[f"{script} float32"][1]
    lines = [line for line in result["stderr"][0].splitlines() if "error" in line]
    assert result["codes"] == [1] and len(lines) == 1, result
    assert "log-probs of the sampler differ from the policy's by 0.0" in lines[0] and "(limit 0.000111111)" in lines[0]


@pytest.mark.parametrize("script", ["ppo.py", "grpo.py"])
def test_a_cap_below_1_is_refused(runs, script):
    result = runs[f"{script} small cap"][1]
    assert result["codes"] == [2] and "importance_cap = 0.5 would" in result["stderr"][0]

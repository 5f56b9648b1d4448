"""grpo.py and ppo.py where by_hand.py sees little: nothing to learn; rounding in 16 bits."""
import math

import pytest

from tiny import keys_of, read_log, read_weights, run, well, write

FADES = """
calls = []

def fades(batch):  # from the second batch of an iteration on all responses are equally good
    calls.append(1)
    good = [sum(ch in "abcd" for ch in text) / 4 for text in batch["completions"]]
    return good if len(calls) == 1 else [0.5] * len(good)
"""


def test_nothing_to_learn_is_no_step(world, tmp_path):
    """A policy that has momentum and a KL meets flat groups: it is said, and not a bit moves."""
    rule = write(tmp_path / "mine.py", FADES)
    keys = keys_of(world, "grpo.py", reward_functions=f"{rule}:fades", checkpoint_interval=1,
                   keep_checkpoints=9, entropy_coef=0.1, num_minibatches=1, eval_path="")
    result = run("grpo.py", tmp_path, keys)
    assert result.codes == [0] and result.out[0].count("nothing to learn") == 2, result
    log = read_log(f"{tmp_path}/out")
    assert [record["policy/steps"] for record in log[:-1]] == [1, 0, 0]
    for record in log[1:-1]:
        assert record["objective/flat_groups"] == 1 and record["objective/kl"] != 0
        assert record["policy/sampler_gap"] < 1e-9 < record["objective/entropy"]
        assert all(math.isfinite(x) for x in record.values() if not isinstance(x, str))
    first, *others = [[open(f"{tmp_path}/out/checkpoint-00000{i}/{name}", "rb").read() for name in (
        "policy/model.safetensors", "policy_optimizer.safetensors")] for i in (1, 2, 3)]
    assert others == [first] * 2
    moved, start = read_weights(f"{tmp_path}/out/policy"), read_weights(world.policy)
    assert max((moved[name] - start[name]).abs().max() for name in start) > 1e-3


def uneven(rank):
    """Rounding that depends on a micro-batch's tokens, as on a GPU, but larger; a sampler off."""
    import model
    import rollout

    exact, drawn = model.Model.logprobs, rollout.draw

    def logprobs(self, *args, **how):
        found, entropy = exact(self, *args, **how)
        return found + 2e-3 * (len(found) % 7), entropy

    def draw(*args):
        token, logprob = drawn(*args)
        return token, logprob + 0.05

    model.Model.logprobs, rollout.draw = logprobs, draw


STILL = dict(dtype="bfloat16", cliprange=3e-4, learning_rate=1e-30, num_minibatches=3, kl_coef=0,
             max_iters=2, eval_path="")
CASES = {"grpo": ("grpo.py", dict(cliprange_high=4e-4, num_iterations=1)),
         "ppo": ("ppo.py", dict(value_learning_rate=1e-30, ppo_epochs=1))}


@pytest.mark.parametrize("name", CASES)
def test_a_policy_that_stands_still_is_on_policy_to_the_last_bit(world, tmp_path, name):
    """
    The clip range is as narrow as bfloat16's rounding. With steps that move no weight, the ratio is
    1 in all minibatches: old log-probs come from the very micro-batches that are trained, and not
    from the sampler, whose distance is only logged.
    """
    script, keys = CASES[name]
    out = well(script, tmp_path, keys_of(world, script, **STILL | keys), before=uneven)
    for record in read_log(out)[:-1]:
        assert record["policy/steps"] > 1
        assert 0.03 < record["policy/sampler_gap"] < 0.07
        assert record["policy/clipfrac"] == record["policy/approx_kl"] == 0
        assert record["policy/ratio_gap"] == 0


def no_values(rank):
    from run import Run

    logged = Run.log_evaluation

    def log_evaluation(self, batch, *args):
        assert "values" not in batch and "ref_logprobs" in batch
        return logged(self, batch, *args)

    Run.log_evaluation = log_evaluation


def test_an_evaluation_does_not_read_what_nobody_uses(world, tmp_path):
    """Held-out responses have no returns, so the value model need not read them."""
    well("ppo.py", tmp_path, keys_of(world, "ppo.py", max_iters=1), before=no_values)

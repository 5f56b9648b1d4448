"""
Sabotage: what one rank, or one of two computations of the same thing, gets wrong stops the run
before the step, in one line that names it; and what was saved is finite.
"""
import glob
import re

import pytest
import torch
from safetensors.torch import load_file

from tiny import keys_of, run


def saboteur(deed, ranks):
    """For `before`: the deed, in iteration 1 on the last rank unless its name says otherwise."""
    def before(rank):
        import model
        import parallel
        import prompts
        import rewards

        now, models, mine = [-1], [], rank == ranks - 1

        def patch(owner, name, change):
            original = getattr(owner, name)
            setattr(owner, name, lambda *args, **how: change(original, *args, **how))

        def due(*deeds):
            return now[0] == 1 and mine and deed in deeds

        def weights(number):
            part = models[number].get_parameter("hf.transformer.ln_f.bias").data
            return parallel.my_part(part).view(-1)

        def broadcast(original, given):
            models[:] = given
            original(models)
            if deed == "another reference everywhere":
                weights(1)[2] += 0.25

        def batch_rows(original, seed, iteration, *rest, **how):  # the audit of it has passed
            now[0] = iteration
            if due("a bit of the reference"):
                weights(1).view(torch.int64)[0] ^= 1
            if due("a weight of the policy", "a weight of the value model"):
                weights(0 if "policy" in deed else 3)[0] = torch.nan
            return original(seed, iteration, *rest, **how)

        def step(original, optimizer, *args, **how):
            with open(f"steps-{rank}", "a") as f:
                f.write(".")
            if due("a moment"):
                state = list(optimizer.state.values())[-1]
                parallel.my_part(state["exp_avg"]).view(-1)[0] = torch.nan
            return original(optimizer, *args, **how)

        def scores(original, *args):
            x = original(*args)
            x[0] = torch.nan if due("a score") else x[0]
            return x

        def values(original, *args, **how):  # the number is right, its gradient is not
            x = original(*args, **how)
            if due("the gradient of the value model") and x.requires_grad:
                x.register_hook(lambda gradient: gradient * torch.nan)
            return x

        def logits(original, self, states):
            if torch.is_grad_enabled() and deed == "NaN forward" and mine:
                states = states * torch.nan
            return original(self, states)

        patch(prompts, "batch_rows", batch_rows)
        patch(parallel, "broadcast_parameters", broadcast)
        patch(rewards, "score_sequences", scores)
        patch(model, "response_values", values)
        patch(model.Model, "logits", logits)
        patch(torch.optim.AdamW, "step", step)

    return before


# deed: what is said; how many steps were made before, of both optimizers; ranks; keys
FIRST = "iteration 0: before any update, the log-probs of "
LATE = dict(sync_check_interval=1000, checkpoint_interval=1)  # no audit but before a save
CASES = {
    "a bit of the reference": (
        "iteration 2: the frozen ref_policy, parameter .* has changed on rank 1", 8, 2,
        dict(zero_stage="ref=3", sync_check_interval=1, num_minibatches=1, ppo_epochs=2)),
    "a score": (r"iteration 1, score: reward/reward_model is not finite \(first in response \d",
                8, 2, {}),
    "the gradient of the value model": (
        r"iteration 1: the gradient of value_model's \w\S+ is not finite; stopped before the step",
        8, 2, {}),
    "another reference everywhere": (FIRST + "the reference differ", 0, 1, {}),
    "NaN forward": (FIRST + "the training forward differ", 0, 2, {}),
    "a weight of the policy": ("iteration 1, .* is not finite", None, 1, LATE),
    "a weight of the value model": ("iteration 1, score: values is not finite", None, 1, LATE),
    "a moment": ("iteration [12]: .*(policy|value_model).* is not finite", None, 1, LATE)}


@pytest.mark.parametrize("deed", CASES)
def test_sabotage_stops_the_run_before_the_step(world, tmp_path, deed):
    pattern, steps, ranks, more = CASES[deed]
    keys = keys_of(world, "ppo.py", value_init="policy", dtype="float64", **more)
    result = run("ppo.py", tmp_path, keys, ranks=ranks, before=saboteur(deed, ranks))
    said = {line.replace(" (rank 1)", "") for text in result.err for line in text.splitlines()}
    assert set(result.codes) == {1} and len(said) == 1, result
    assert re.match("ppo.py: error: " + pattern, *said), said
    for rank in range(ranks) if steps is not None else ():
        made = glob.glob(f"{tmp_path}/steps-{rank}")
        assert (len(open(made[0]).read()) if made else 0) == steps
    saved = glob.glob(f"{tmp_path}/out/checkpoint-*/**/*.safetensors", recursive=True)
    assert all(t.isfinite().all() for file in saved for t in load_file(file).values())
    assert saved or "checkpoint_interval" not in more

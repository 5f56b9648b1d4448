"""
Ranks with roles, and batches that are sampled ahead: a batch is always sampled by the version that
`staleness` names. (That roles change nothing, and what goes on without them: test_knobs.py and
test_by_hand_options.py. Kills at any call: campaign.py.)
"""
import os
import signal
import time

import torch
from small_world import rooms_of, wrap
from tiny import ROOT, assert_one_line, assert_same_run, keys_of, run, well

THREE = "train=1,generate=1,score=1"  # ranks 0, 1, 2


def notes_samples(rank, then=lambda purpose: None):
    """For `before`: order-RANK gets the purpose and the iteration of all that a rank samples."""
    def sampled(*args):
        _, purpose, iteration = args[3]
        with open(f"order-{rank}", "a") as f:
            print(purpose, iteration, end=", ", file=f)
        then(purpose)

    wrap(rooms_of(ROOT), "sample_batch", first=sampled)


def test_the_next_batch_is_sampled_while_the_trainers_log_and_save(world, tmp_path):
    """
    The trainer waits in the log of iteration 0 until batch 2 is begun: the run would not end if the
    generator waited for it. Held-out prompts are the trainers' own. The policy and the value model
    have gradients where they are trained, and memory where they are in use.
    """
    def before(rank):
        def appended(out, name, records):
            end = time.time() + 60
            while name == "log.jsonl" and records[0]["iteration"] == 0 and not (
                    os.path.exists("order-1") and "rollout 1" in open("order-1").read()):
                assert time.time() < end
                time.sleep(0.01)

        def tell(buffers, model):
            with open(f"holds-{rank}", "a") as f:
                f.write(f"{any(not p.is_meta for p in model.parameters())} {len(buffers)}, ")

        notes_samples(rank)
        wrap(rooms_of(ROOT), "flatten_gradients", then=tell)
        wrap(rooms_of(ROOT), "append", first=appended)

    keys = keys_of(world, "ppo.py", roles=THREE, staleness=1)
    well("ppo.py", tmp_path, keys, ranks=3, before=before)
    order, held = ([(tmp_path / f"{name}-{rank}").read_text() for rank in range(3)]
                   for name in ("order", "holds"))
    assert order == ["eval 0, " * 3] + ["rollout 0, rollout 1, rollout 2, "] * 2
    assert held == ["True 1, True 1, ", "True 0, False 0, ", "False 0, False 0, "]


def test_the_zero_of_a_reward_model_costs_no_batch(world, tmp_path):
    """
    The first batch is sampled once, and before the first evaluation, whose scores have the shift.
    A run that is stopped in this evaluation, where it knows the shift, ends in the same bits. (What
    the shift is: test_by_hand_options.py.)
    """
    def stops(rank):
        notes_samples(rank, lambda purpose: (
            os.kill(os.getpid(), signal.SIGTERM) if purpose == "eval" and rank == 0 else None))

    own = keys_of(world, "ppo.py", reward_path=world.uncentered, roles=THREE, staleness=1)
    whole = well("ppo.py", tmp_path / "whole", own, ranks=3, before=notes_samples)
    order = [(tmp_path / "whole" / f"order-{rank}").read_text() for rank in range(3)]
    assert order[0].startswith("rollout 0, eval 0, ")
    # a scorer asks for the batch, too, and receives it
    assert "".join(order[:2]).count("rollout 0, ") == 1
    assert run("ppo.py", tmp_path, own, ranks=3, before=stops).codes == [0] * 3
    assert not os.path.exists(tmp_path / "out/log.jsonl")
    assert_same_run(whole, well("ppo.py", tmp_path, own, ranks=3), ("policy", "value_model"))
    assert_one_line(run("ppo.py", tmp_path, own | dict(roles="", staleness=2)), "ppo.py",
                    "staleness = 1", "not 2")


def test_a_copy_that_differs_ends_the_run(world, tmp_path):
    """A bit of the generator's policy."""
    def drift(_, t, tensor):
        with torch.no_grad():
            t.view(-1)[0] += 1e-9

    own = keys_of(world, "grpo.py", roles=THREE, max_iters=1, reward_timeout=30)
    result = run("grpo.py", tmp_path, own, ranks=3, before=lambda rank: (
        rank == 1 and wrap(rooms_of(ROOT), "copy_into", then=drift)))
    assert 0 not in result.codes and "policy, parameter" in result.err[1], result

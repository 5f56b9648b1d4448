"""options/: averages by hand, whole shards. (Other options: evidence/tests.)"""
import signal

from tiny import assert_same_run, assert_stopped, at, keys_of, read_weights, run, well


def test_ema(world, tmp_path):
    """Of the checkpoints of each step: average = 0.7 average + 0.3 weights."""
    keys = keys_of(world, "grpo.py", ema_decay=0.7, num_minibatches=1, checkpoint_interval=1,
                   keep_checkpoints=9)
    out = well("grpo.py", tmp_path, keys)
    average = read_weights(world.policy)
    for i in (1, 2, 3):
        weights = read_weights(f"{out}/checkpoint-00000{i}/policy")
        average = {name: 0.7 * average[name] + 0.3 * t for name, t in weights.items()}
    ema = read_weights(f"{out}/ema_policy")
    assert max((ema[name] - t).abs().max() for name, t in average.items()) < 1e-12


def test_shards_are_saved_whole(world, tmp_path):
    """Begun at stage 3 of ZeRO on two ranks, goes on with one, and ends at stage 2 on two."""
    keys = keys_of(world, "grpo.py", checkpoint_interval=1, ema_decay=0.5, num_minibatches=1)
    whole = well("grpo.py", tmp_path / "whole", keys)
    for iteration, stage, ranks in ((1, "3", 2), (2, "", 1)):
        stopped = run("grpo.py", tmp_path, keys | dict(zero_stage=stage), ranks=ranks,
                      before=at(iteration, signal.SIGTERM))
        assert_stopped(stopped, tmp_path)
    out = well("grpo.py", tmp_path, keys | dict(zero_stage="2"), ranks=2)
    assert_same_run(whole, out, ("policy", "ema_policy"), 1e-9)

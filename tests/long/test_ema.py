"""options/ema.py where a run that had no average goes on with one."""
import signal

from tiny import at, keys_of, read_weights, run, well


def test_an_average_that_begins_at_a_resume_begins_with_the_weights_of_then(world, tmp_path):
    keys = keys_of(world, "grpo.py", checkpoint_interval=1, keep_checkpoints=9, num_minibatches=1)
    assert run("grpo.py", tmp_path, keys, before=at(2, signal.SIGTERM)).codes == [0]
    out = well("grpo.py", tmp_path, keys | dict(ema_decay=0.9))
    before, after = (read_weights(f"{out}/checkpoint-00000{i}/policy") for i in (2, 3))
    average = read_weights(f"{out}/ema_policy")
    assert max((average[name] - 0.9 * t - 0.1 * after[name]).abs().max()
               for name, t in before.items()) < 1e-12

"""options/ema.py where a run that had no average goes on with one."""
import signal

import pytest
from safetensors.torch import load_file
from tiny import at, keys_of, read_weights, run, well


def test_an_average_that_begins_at_a_resume_begins_with_the_weights_of_then(world, tmp_path):
    keys = keys_of(world, "grpo.py", checkpoint_interval=1, keep_checkpoints=9, num_minibatches=1)
    assert run("grpo.py", tmp_path, keys, before=at(2, signal.SIGTERM)).codes == [0]
    out = well("grpo.py", tmp_path, keys | dict(ema_decay=0.9))
    before, after = (read_weights(f"{out}/checkpoint-00000{i}/policy") for i in (2, 3))
    average = read_weights(f"{out}/ema_policy")
    assert max((average[name] - 0.9 * t - 0.1 * after[name]).abs().max()
               for name, t in before.items()) < 1e-12


@pytest.mark.parametrize("split", [{}, dict(zero_stage="3")], ids=str)
def test_the_average_of_bfloat16_weights_is_saved_as_it_is(world, tmp_path, split):
    """Between two numbers of bfloat16; and the policy has its own weights again."""
    keys = keys_of(world, "grpo.py", dtype="bfloat16", master_weights=False, ema_decay=0.7,
                   learning_rate=0.01, **split)
    out = well("grpo.py", tmp_path, keys, ranks=1 + len(split))
    average, policy = (read_weights(f"{out}/{name}") for name in ("ema_policy", "policy"))
    known = load_file(f"{out}/checkpoint-000003/ema.safetensors")
    trained = read_weights(f"{out}/checkpoint-000003/policy")
    assert all((average[name.removeprefix("hf.")] == t).all() for name, t in known.items())
    assert all((policy[name] == t).all() for name, t in trained.items())
    assert any((t != t.bfloat16()).any() for t in average.values())

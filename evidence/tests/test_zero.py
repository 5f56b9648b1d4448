"""
Where models lie (options/shards.py), and 16 bits: the reference is the policy to the bit until the
first step, stages sample the same texts, an overflow of float16 on one rank skips the step on all,
what no text reaches stays as it is. (Stages in float64: tests/test_by_hand.py; the keys:
test_memory.py.)
"""
import json
import re

import pytest
import torch

from options import sixteen_bits
from small_world import rooms_of, wrap
from test_families import add_vision, save
from tiny import ROOT, keys_of, read_log, read_weights, run, well, write


def watch(rank):
    """Note the dtype of each parameter when the run begins."""
    def first(models):
        write("dtypes.json", json.dumps([{name: str(p.dtype).removeprefix("torch.")
                                          for name, p in m.named_parameters()} for m in models]))

    wrap(rooms_of(ROOT), "broadcast_parameters", first)


@pytest.mark.parametrize("wide, more", [
    ("float32", dict(dtype="bfloat16", zero_stage="3", head_chunk=5)),
    ("bfloat16", dict(dtype="bfloat16", master_weights=False)),
    ("", dict(dtype="float16", lora="4", zero_stage="3", gradient_checkpointing=True))])
def test_in_16_bits_the_reference_is_the_policy_at_first(world, tmp_path, wide, more):
    keys = keys_of(world, "ppo.py", max_iters=1, num_minibatches=1, value_init="policy",
                   eval_interval=1, ppo_epochs=1, micro_batch_size=3, **more)
    out = well("ppo.py", tmp_path, keys, ranks=1 + ("zero_stage" in more), before=watch)
    first, last = read_log(out)
    assert first["objective/kl"] == 0 == first["eval/kl"] and first["policy/ratio_gap"] == 0
    assert last["eval/kl"] != 0
    if wide:
        policy, *frozen, _ = json.load(open(tmp_path / "dtypes.json"))
        assert set(policy.values()) == {wide} and len(frozen) == 2
        for model in frozen:  # matrices; but no table of embeddings, and no scalar head
            matrices = r"\.c_\w+\.weight|lm_head"
            assert model == {n: "bfloat16" if re.search(matrices, n) else wide for n in model}


def test_in_16_bits_all_stages_sample_the_same_texts(world, tmp_path):
    """What samples is rounded where autocast rounds, and so are gathered layers, where they are."""
    save(tmp_path / "policy", "gpt-oss")
    path = str(tmp_path / "policy")
    keys = keys_of(world, "grpo.py", policy_path=path, eval_path="", max_iters=1,
                   num_minibatches=1, micro_batch_size=3, dtype="bfloat16")
    a, b = (read_log(well("grpo.py", tmp_path / (stage or "0"), keys | dict(zero_stage=stage),
                          ranks=2))[0] for stage in ("", "3"))
    assert a["objective/texts"] == b["objective/texts"]
    for record in (a, b):
        assert record["objective/kl"] == 0 and record["policy/sampler_gap"] < 1e-5, record


def test_a_vision_part_stays_bit_for_bit(world, tmp_path):
    """As Gemma 3 has one. Neither decay nor averages move it, and it is saved."""
    add_vision(path := str(tmp_path / "policy"))
    rule = write(tmp_path / "mine.py", "def odd(batch):\n    return [sum(map(ord, text)) % 7 / 7"
                                       " for text in batch['completions']]\n")
    keys = keys_of(world, "grpo.py", policy_path=path, reward_functions=f"{rule}:odd", eval_path="",
                   max_iters=2, num_minibatches=1, weight_decay=0.3, ema_decay=0.5,
                   sync_check_interval=1, dtype="bfloat16")
    out, before = well("grpo.py", tmp_path, keys), read_weights(path)
    seeing = {n for n in before if "vision_tower" in n or "projector" in n}
    assert len(seeing) > 30
    for product in ("policy", "ema_policy"):
        after = read_weights(f"{out}/{product}")
        assert before.keys() == after.keys()
        assert {n for n in before if torch.equal(before[n], after[n])} == seeing


# float16's scale of the loss


def overflows(steps, mine):
    """For `before`: in these steps, from 1, the policy's gradient is inf on the rank `mine`."""
    def before(rank):
        made = []

        def then(found, *args):
            if found[0].requires_grad and len(made) in steps and rank == mine:
                found[0].register_hook(lambda gradient: gradient * torch.inf)

        wrap(rooms_of(ROOT), "zero_gradients", first=made.append)
        wrap(rooms_of(ROOT), "response_logprobs", then=then)

    return before


def test_an_overflow_on_one_rank_skips_the_step_on_all(world, tmp_path):
    """
    Of a sharded model; the audit says that all ranks have the same finite weights. Five overflows
    come first: below them only a gradient above 32 would overflow by itself.
    """
    keys = keys_of(world, "ppo.py", dtype="float16", zero_stage="policy=3,value=1", max_iters=4,
                   num_minibatches=1, ppo_epochs=2, sync_check_interval=1, value_init="policy",
                   eval_path="", micro_batch_size=3)
    out = well("ppo.py", tmp_path, keys, ranks=2, before=overflows(range(1, 6), 1))
    assert [record.get("policy/steps") for record in read_log(out)] == [0, 0, 1, 2, None]
    state = json.load(open(f"{out}/checkpoint-000004/state.json"))
    assert state["run/loss_scale"] == 2.0**11 and state["run/clean_steps"] == 3


def test_the_scale_is_doubled_and_halved_and_has_an_end(world, tmp_path, monkeypatch):
    """Six overflows come first: below them only a gradient above 64 would overflow by itself."""
    monkeypatch.setattr(sixteen_bits, "GROWTH", 4)
    keys = keys_of(world, "grpo.py", dtype="float16", max_iters=6, eval_path="", num_minibatches=1,
                   num_iterations=3, reward_functions=f"{world.rules}:letters")
    out = well("grpo.py", tmp_path / "some", keys, before=overflows(range(1, 7), 0))
    state = json.load(open(f"{out}/checkpoint-000006/state.json"))
    steps = sum(record.get("policy/steps", 0) for record in read_log(out))
    assert state["run/clean_steps"] == steps > 4
    assert state["run/loss_scale"] == 2.0**10 * 2 ** (steps // 4)
    keys |= dict(max_iters=30, num_iterations=1)
    ended = run("grpo.py", tmp_path, keys, before=overflows(range(1, 99), 0))
    # 20 overflows in a row are an error
    assert ended.codes == [1] and ended.out[0].count("step skipped") == 19, ended
    assert "the gradient of policy" in ended.err[0], ended

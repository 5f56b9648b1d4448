"""options/: each option against something independent of it: by hand, by enumeration, on paper."""
import json
import runpy
import signal
from types import SimpleNamespace

import pytest
import torch

import by_hand
from prompts import Rows
from test_by_hand import TUNED, assert_agrees, typed_keys
from tiny import assert_same_run, assert_stopped, at, keys_of, read_jsonl, read_weights, run, well


@pytest.mark.parametrize("layout", [{}, dict(zero_stage="3")], ids=["whole", "stage 3"])
def test_lora(world, tmp_path, layout):
    """Training by hand, the merged model; and the adapter that is saved beside it is its sum."""
    keys = TUNED | dict(init_from="policy", weight_decay=0.1)
    typed = typed_keys(world, keys, "sft", layout | dict(lora="2:5"))
    out = well("sft.py", tmp_path, typed, ranks=2 if layout else 1)
    made = []

    def adapt(policy):
        made.append(by_hand.Adapters(policy.base_model, 2, 5, keys["seed"]))
        return made[0].parameters()

    c = SimpleNamespace(**keys | dict(init_from=world.policy))
    log, models = by_hand.sft(c, world.rows["sft_train"], world.rows["sft_val"], adapt)
    made[0].merge()
    assert_agrees(out, log, models)
    peft = json.load(open(f"{out}/policy_adapter/adapter_config.json"))
    assert (peft["r"], peft["lora_alpha"], peft["fan_in_fan_out"]) == (2, 5, True)


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


def test_refills():
    """Flat groups get other rows; rows of the wider prompt are padded; what stays flat is said."""
    from options.refill import refill

    asked = []

    def rollout(purpose, iteration, rows, numbers, slots):
        asked.append((purpose, list(numbers), list(slots)))
        scores = torch.tensor([[7.0, 7.0] if slot == 2 else [0.0, 1.0] for slot in slots]).flatten()
        n = len(scores)
        return dict(tokens=torch.full((n, 5), 8), response_mask=torch.ones(n, 5).bool(),
                    scores=scores, index=torch.arange(n), row=torch.tensor(
                        [i for i in numbers for _ in range(2)]))

    batch = dict(tokens=torch.full((6, 4), 5), response_mask=torch.ones(6, 4).bool(),
                 scores=torch.tensor([3.0, 3, 1, 2, 4, 4]), index=torch.arange(6),
                 row=torch.tensor([0, 0, 1, 1, 2, 2]))
    got, flat = refill(batch, torch.tensor([True, False, True]), lambda b: b["scores"], 2,
                       Rows(range(9)), [0, 1, 2], rollout, 1, 4, 2, pad_id=0)
    assert [(purpose, slots) for purpose, _, slots in asked] == [("refill 0", [0, 2]),
                                                                 ("refill 1", [2])]
    assert asked[0][1][0] != 0 and asked[0][1][1] != 2 and flat.tolist() == [False, False, True]
    assert got["scores"].tolist() == [0, 1, 1, 2, 7, 7] and got["index"].tolist() == [*range(6)]
    assert got["tokens"].tolist() == [[8] * 5] * 2 + [[5, 5, 5, 5, 0]] * 2 + [[8] * 5] * 2
    assert got["response_mask"][2].tolist() == [True, True, True, True, False]
    assert got["row"].tolist()[4:] == [asked[1][1][0]] * 2


def test_an_environment(world, tmp_path):
    """Of each response: the replies are the function's, and its rewards are the score."""
    talks = runpy.run_path(world.rules)["talks"]
    keys = keys_of(world, "grpo.py", environment=f"{world.rules}:talks", max_turns=4, seed=4,
                   reward_functions="2.0*environment,0*length", max_new_tokens=20, save_rollouts=1)
    out, turns = well("grpo.py", tmp_path, keys, ranks=2), []
    for sample in read_jsonl(f"{out}/rollouts.jsonl"):
        messages = [dict(role="user", content=sample["prompt"]), *sample["messages"]]
        replies = [talks(messages[:i], {}) for i in range(2, len(messages) + 1, 2)]
        for (reply, _), message in zip(replies, messages[2::2], strict=False):
            assert message == dict(role="user", content=reply)
        paid, score = [x for _, x in replies], sample["scores"]["reward/environment"]
        # a last turn that has not come to its end is not paid for
        wanted = [sum(paid)] + ([] if sample["finished"] else [sum(paid[:-1])])
        assert min(abs(score - x) for x in wanted) < 1e-9
        assert sample["scores"]["scores"] == pytest.approx(2 * score)
        turns.append(len(messages) // 2)
    assert {2, 3} <= set(turns)


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

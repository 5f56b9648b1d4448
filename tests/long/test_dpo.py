"""
recipes/dpo.py: equation 7 of arXiv 2305.18290 by hand, one pair and one token at a time, on models
of transformers in float64; on two ranks, in shards, with LoRA; killed and resumed; ties.
"""
import math
import signal
from types import SimpleNamespace

import torch

import by_hand
from configurator import read_arguments, read_keys
from conftest import ROOT
from test_by_hand import assert_agrees
from tiny import assert_one_line, at, jsonl, read_jsonl, run, well

DPO = "recipes/dpo.py"
KEYS = dict(
    beta=0.3, label_smoothing=0.1, max_iters=3, batch_size=7, micro_batch_size=3, warmup_iters=1,
    learning_rate=3e-3, eval_interval=2, eval_size=3, lr_decay="cosine", beta1=0.9, beta2=0.95,
    adam_eps=1e-8, grad_clip=1.0, seed=1, weight_decay=0.1)


def keys_of(world, **changed):
    return KEYS | dict(dtype="float64", device_type="cpu", timeout=60, policy_path=world.policy,
                       train_path=world.pairs_train, val_path=world.pairs_val) | changed


def worked_out(world, keys, lora=None):
    """(log, models) by hand. lora: rank and alpha."""
    c = SimpleNamespace(**KEYS | keys)
    policy, reference = (by_hand.language_model(world.policy) for _ in range(2))
    adapters = by_hand.Adapters(policy.base_model, *lora, c.seed) if lora else None
    trained = (adapters or policy).parameters()

    def reward(row, side):
        text = by_hand.encode(row["prompt"]), by_hand.encode(row[side]) + [by_hand.EOS]
        with torch.no_grad():
            theirs, _ = by_hand.logprobs_of(reference, *text)
        ours, _ = by_hand.logprobs_of(policy, *text)
        return c.beta * sum(p - q for p, q in zip(ours, theirs, strict=True))

    def compare(rows, wrong):
        """The loss of pairs, of which a share has the wrong label; and the means of figures."""
        losses, figures = [], []
        for row in rows:
            good, bad = reward(row, "chosen"), reward(row, "rejected")
            p = 1 / (1 + torch.exp(bad - good))  # Bradley-Terry
            losses.append(-(1 - wrong) * torch.log(p) - wrong * torch.log(1 - p))
            x, y = good.item(), bad.item()
            tie = x == y or row["chosen"] == row["rejected"]
            figures.append(dict(accuracy=0.5 if tie else float(x > y), margin=x - y,
                                chosen_reward=x, rejected_reward=y))
        loss = sum(losses) / len(losses)
        return loss, {name: by_hand.mean([one[name] for one in figures]) for name in figures[0]}

    def evaluate():
        loss, figures = compare(by_hand.held_out_of(c, world.rows["pairs_val"]), 0.0)
        return {"eval/loss": loss.item()} | {f"eval/{name}": x for name, x in figures.items()}

    def learn(picked):
        loss, figures = compare([world.rows["pairs_train"][i] for i in picked], c.label_smoothing)
        return loss, {"loss/preference": loss.item()} | {
            f"train/{name}": x for name, x in figures.items()}

    log = by_hand.train_on(c, by_hand.AdamW(trained, c), "policy", evaluate, learn,
                           len(world.rows["pairs_train"]))
    if lora:
        adapters.merge()
    return log, dict(policy=policy)


def test_killed_and_resumed_it_is_the_run_by_hand(world, tmp_path):
    keys = keys_of(world, checkpoint_interval=1)
    killed = run(DPO, tmp_path, keys, ranks=2, before=at(2, signal.SIGKILL, rank=1))
    assert killed.codes[1] == -signal.SIGKILL and killed.codes[0] != 0
    log, models = worked_out(world, {})
    assert log[0]["train/margin"] == 0 and abs(log[0]["loss/preference"] - math.log(2)) < 1e-12
    assert abs(log[-1]["eval/margin"]) > 1e-3  # it has learned something
    assert_agrees(well(DPO, tmp_path, keys | dict(zero_stage="3", micro_batch_size=1), ranks=2),
                  log, models)


def test_an_adapter(world, tmp_path):
    out = well(DPO, tmp_path, keys_of(world, head_chunk=4, lora="2:6", label_smoothing=0.0))
    assert_agrees(out, *worked_out(world, dict(label_smoothing=0.0), (2, 6)))


def test_equal_texts_are_a_tie_and_long_pairs_go_as_a_whole(world, tmp_path):
    """Ties also when the policy has moved, and the two have last bits of their own."""
    same = [f"{i}" * (1 + i % 4) for i in range(20)]
    ties = jsonl(f"{tmp_path}/ties.jsonl",
                 [dict(prompt="abc", chosen=text, rejected=text) for text in same])
    pair = dict(prompt="1=", chosen="2", rejected="3")
    long = jsonl(f"{tmp_path}/long.jsonl", [pair, pair | dict(rejected="1" * 70)])
    out = well(DPO, f"{tmp_path}/a", keys_of(world, val_path=ties, eval_size=0, max_iters=2))
    last = read_jsonl(f"{out}/log.jsonl")[-1]
    assert last["eval/accuracy"] == 0.5
    assert last["eval/chosen_reward"] == last["eval/rejected_reward"] != 0
    keys = keys_of(world, train_path=long, max_iters=1, val_path="")
    assert_one_line(run(DPO, f"{tmp_path}/b", keys), "dpo.py", "long.jsonl", "row 2")
    dropped = run(DPO, f"{tmp_path}/b", keys | dict(too_long="drop"))
    assert dropped.codes == [0] and "\n1 pairs" in dropped.out[0]
    assert_one_line(run(DPO, f"{tmp_path}/b", keys | dict(too_long="cut")), "dpo.py", "too_long")


def test_its_config_sets_its_keys():
    keys = read_keys(f"{ROOT}/{DPO}") | read_keys(f"{ROOT}/config/keys.py")
    config = read_arguments(keys, [f"{ROOT}/config/arithmetic_dpo.py"])
    assert config["train_path"][0].endswith("pairs_train.jsonl") and keys["beta"].default == 0.1

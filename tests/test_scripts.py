"""The four scripts as a user runs them: to the end, stopped, resumed; and bad input."""
import os
import shutil
import signal
from math import nan

import pytest
import torch
import transformers

from tiny import (ROOT, Started, assert_one_line, assert_same_run, assert_stopped, at, in_a_fork,
                  keys_of, read_jsonl, read_log, run, typed, well, write)

SCRIPTS = {"ppo.py": ("policy", "value_model"), "grpo.py": ("policy",), "sft.py": ("policy",),
           "rm.py": ("reward_model",)}


@pytest.mark.parametrize("script, models", SCRIPTS.items(), ids=SCRIPTS)
def test_a_run_that_was_stopped_and_killed_has_the_same_bits(world, tmp_path, script, models):
    """SIGTERM in iteration 1, kill -9 in iteration 3; the same command each time."""
    keys = keys_of(world, script, max_iters=4, checkpoint_interval=1, dtype="float32")
    whole = well(script, tmp_path / "whole", keys)
    stopped = run(script, tmp_path / "cut", keys, before=at(1, signal.SIGTERM))
    assert_stopped(stopped, tmp_path / "cut")
    assert run(script, tmp_path / "cut", keys, before=at(3, signal.SIGKILL)).codes == [-9]
    out = well(script, tmp_path / "cut", keys)
    first, *others = read_jsonl(f"{out}/log.jsonl")
    assert [record["iteration"] for record in others] == [1, 2, 3, 4]
    if os.path.exists(f"{ROOT}/options/cards.py"):  # a fork may lack it
        assert first["run/torch"] == torch.__version__ and first["run/device"]
        assert "run/commit" in first
    assert not any("run/commit" in record for record in others)
    assert_same_run(whole, out, models)
    assert not [name for name in os.listdir(out) if name.startswith((".tmp", ".old", ".gone"))]
    auto = (transformers.AutoModelForSequenceClassification if script == "rm.py" else
            transformers.AutoModelForCausalLM)
    for model in models[:1]:  # what a run leaves is a model for transformers
        theirs, info = auto.from_pretrained(f"{out}/{model}", output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        assert transformers.AutoTokenizer.from_pretrained(f"{out}/{model}").eos_token == "<eos>"


def torchrun(argv):
    from torch.distributed.run import main

    main(argv)


def test_as_it_is_typed(world, tmp_path):
    """The toy's SFT from scratch; and PPO by torchrun, which begins where the SFT has ended."""
    keys = dict(max_iters=2, batch_size=8, device_type="cpu", n_layer=1, d_model=32, n_head=2,
                context=64, out_dir=f"{tmp_path}/sft", tokenizer_path=world.policy,
                train_path=world.sft_train, val_path=world.sft_val)
    sft = Started("sft.py", [f"{ROOT}/config/arithmetic_sft.py", *typed(keys)], str(tmp_path))
    assert sft.wait().codes == [0]
    keys = keys_of(world, "ppo.py", policy_path=f"{tmp_path}/sft/policy", dtype="float32",
                   device_type="cpu", max_iters=1, out_dir=f"{tmp_path}/ppo")
    in_a_fork(torchrun, ["--nproc_per_node=2", f"{ROOT}/ppo.py", *typed(keys)])
    first, last = read_log(f"{tmp_path}/ppo")
    assert first["objective/kl"] == 0 == first["policy/ratio_gap"]  # before any update
    assert first["policy/sampler_gap"] < 1e-4
    assert last["iteration"] == 1 and os.path.isfile(f"{tmp_path}/ppo/value_model/config.json")


BAD = {  # what people type: script, keys, words of the line
    "a typo": ("ppo.py", dict(kl_coeff=0.1), ["'kl_coef'"]),
    "no file": ("grpo.py", dict(prompts_path="nowhere.jsonl"), ["nowhere.jsonl"]),
    "no folder": ("ppo.py", dict(policy_path="out/nowhere"), ["out/nowhere", "train it first"]),
    "a misspelt folder": ("ppo.py", lambda w: dict(policy_path=f"{w.root}/polcy"), ["/policy?"]),
    "a reward model's path alone": ("ppo.py", dict(reward_path=""), ["--reward_path"]),
    "a policy as the reward": ("ppo.py", lambda w: dict(reward_path=w.policy), ["rm.py"]),
    "a reward model as the policy": ("ppo.py", lambda w: dict(policy_path=w.reward), ["policy"]),
    "no value model": ("ppo.py", dict(reward_functions="length", reward_path=""), ["value_init"]),
    "empty minibatches": ("ppo.py", dict(num_minibatches=6), ["num_minibatches = 6"]),
    "a group of 4 in 6": ("grpo.py", dict(group_size=4), ["batch_size = 6", "group_size = 4"]),
    "no penalty": ("grpo.py", dict(kl_estimator="k1"), ["--kl_estimator=k2"]),
    "an unknown reward": ("grpo.py", dict(reward_functions="acuracy"), ["acuracy", "accuracy"]),
    "no answers": ("grpo.py", lambda w: dict(
        reward_functions="accuracy", prompts_path=w.sft_train), ["row 1", "'answer'"]),
    "no room": ("ppo.py", dict(max_new_tokens=64), ["max_new_tokens"]),
    "prompts that are too long": ("ppo.py", dict(max_new_tokens=59), ["row", "--too_long"]),
    "completions for pairs": ("rm.py", lambda w: dict(train_path=w.sft_train), ["'chosen'"]),
    "no GPU": ("sft.py", dict(device_type="cuda"), ["--device_type=cpu"])}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_one_line_before_anything_is_written(world, tmp_path, what):
    script, wrong, words = BAD[what]
    keys = keys_of(world, script, **(wrong(world) if callable(wrong) else wrong))
    assert_one_line(run(script, tmp_path, keys), script, *words)
    assert not os.path.exists(tmp_path / "out")


def test_another_run_in_the_folder_of_one(world, tmp_path):
    """Refused, and all is as it was; more iterations are the same run."""
    path = shutil.copy(world.sft_train, tmp_path / "rows.jsonl")
    keys = keys_of(world, "sft.py", train_path=path)
    out = well("sft.py", tmp_path, keys)
    log = read_log(out)
    for other in (dict(seed=7), dict(train_path=world.sft_val), dict(batch_size=4)):
        assert_one_line(run("sft.py", tmp_path, keys | other), "sft.py", *other, "--out_dir")
        assert read_log(out) == log
    text = open(path).read()
    write(path, text.replace("abc", "abd"))  # another letter in the same file
    assert_one_line(run("sft.py", tmp_path, keys), "sft.py", "token ids",
                    "the rows have changed", "--out_dir")
    write(path, text)
    assert_one_line(run("sft.py", tmp_path, keys | dict(max_tokens=4, too_long="cut")), "sft.py",
                    "token ids", "max_tokens = 0, not 4", "too_long = 'error', not 'cut'")
    result = run("rm.py", tmp_path, keys_of(world, "rm.py"))
    assert_one_line(result, "rm.py", "a run of sft.py", "--out_dir")
    result = run("sft.py", tmp_path, keys | dict(max_iters=4))  # goes on behind the last save
    assert result.codes == [0] and "checkpoint-000003" in result.out[0] and len(read_log(out)) == 5


def test_a_metric_of_a_fork_may_be_a_tensor(world, tmp_path):
    """It is logged as a number. And there is a blank in the out_dir."""
    def adds(metric):
        def before(rank):
            import metrics

            summarize = metrics.summarize
            metrics.summarize = lambda *args, **keys: summarize(*args, **keys) | {
                "objective/mine": metric}
        return before

    keys = keys_of(world, "ppo.py", max_iters=1, eval_path="", out_dir="a b")
    result = run("ppo.py", tmp_path, keys, before=adds(torch.tensor([2.5])))
    assert result.codes == [0] and "'--policy_path=a b/policy'" in result.out[0], result
    assert read_log(tmp_path / "a b")[0]["objective/mine"] == 2.5


def spoils(rank):
    import parallel

    parallel.all_reduce_gradients = lambda gradients, scale: gradients["policy"][0].fill_(nan)


def heats(rank):
    import rollout

    draw = rollout.draw
    rollout.draw = lambda logits, *rest: draw(logits / 1.2, *rest)


@pytest.mark.parametrize("deed, words", [(spoils, "the gradient of policy's"),
                                         (heats, "the log-probs of the sampler differ")])
def test_what_is_wrong_stops_a_run_before_its_first_step(world, tmp_path, deed, words):
    """A gradient that is not finite; and a sampler of another temperature than the models'."""
    result = run("ppo.py", tmp_path, keys_of(world, "ppo.py"), before=deed)
    assert_one_line(result, "ppo.py", "iteration 0", words, code=1)

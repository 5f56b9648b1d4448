"""
grpo.py where by_hand.py sees little: nothing to learn, rounding in 16 bits, rewards that fail on one rank or on all. (Its
steps, refills and losses are worked out by hand in test_by_hand.py.)
"""
import json
import math
import os

import pytest

import tiny
from tiny import forked, one_run

NEVER_ENDS = """
import rollout
generate_in_parts = rollout.generate_in_parts
def cut(*args, **kwargs):
    for part in generate_in_parts(*args, **kwargs):
        part["finished"] = part["finished"] & False
        yield part
rollout.generate_in_parts = cut
"""
# Rounding that depends on how many tokens the micro-batch has, as it does on a GPU, but larger.
UNEVEN = """
import model
exact = model.Model.logprobs
def uneven(self, *args, **more):
    logprobs, entropy = exact(self, *args, **more)
    return logprobs + 2e-3 * (len(logprobs) % 7), entropy
model.Model.logprobs = uneven
"""
STILL = dict(dtype="bfloat16", importance="sequence", cliprange=3e-4, cliprange_high=4e-4, learning_rate=1e-30, num_iterations=1,
             num_minibatches=4, micro_batch_size=3, kl_coef=0)
OFF = """
import rollout
original = rollout.sample
def sample(*args):
    token, logprob = original(*args)
    return token, logprob + 0.05
rollout.sample = sample
"""
FAULTS = {  # a function of tiny.RULES -> what is said beside its name
    "raises": ["rules.py, line ", "KeyError: 'missing'"], "not_a_number": ["nan", "the row with the prompt '"],
    "few": ["1"], "text": ["str"], "hangs": ["reward_timeout"]}
TOO_LONG = """
import errors, rewards
def too_long(*args):
    raise errors.BadInput("a response has 99 tokens in the reward model's tokenizer")
rewards.right_pad = too_long
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return tiny.build(str(tmp_path_factory.mktemp("world")))


@pytest.fixture(scope="module")
def runs(world, tmp_path_factory):
    """The folder with all runs, and {name: its result}."""
    folder, cases = str(tmp_path_factory.mktemp("runs")), {}
    letters = world.rule("letters")

    def add(name, code="", ranks=1, script="grpo", **keys):
        cases[name] = [one_run(f"{script}.py", *[(getattr(world, script)("out", **keys), code)] * ranks)]

    add("always flat", reward_functions=world.rule("flat"), max_refills=3, max_iters=2)
    add("later flat", reward_functions=world.rule("fades"), checkpoint_interval=1, keep_checkpoints=9, entropy_coef=0.1,
        num_minibatches=1)
    add("all cut", NEVER_ENDS, reward_functions=letters, truncated="mask", max_iters=2)
    add("no KL", reward_functions=letters, kl_coef=0, max_iters=1)
    add("still", UNEVEN, reward_functions=letters, max_iters=2, **STILL)
    add("prompts", reward_functions=world.rule("prompts"), max_iters=1)
    for script in ("ppo", "grpo"):
        add(f"{script} off", OFF, 2, script, dtype="bfloat16")
        add(f"{script} off, 32 bits", OFF, 1, script)
    for fault in FAULTS:
        add(fault, reward_functions=f"accuracy,{world.rule(fault)}", reward_timeout=1)
        add(f"{fault} on 1", "", 2, reward_functions=f"accuracy,{world.rule(fault + '_on_1')}", reward_timeout=1)
    add("ppo raises on 1", "", 2, "ppo", reward_functions=f"reward_model,{world.rule('raises_on_1')}")
    add("a rank without responses", "", 2, reward_functions=world.rule("best"), eval_size=1)
    add("too long on 1", f"if RANK == 1:{TOO_LONG}".replace("\n", "\n    "), 2, reward_path=world.other_reward)
    return folder, {name: result for name, (result,) in forked(folder, cases, at_once=4).items()}


def log_of(runs, name):
    return tiny.read_log(f"{runs[0]}/{name}/out")


@pytest.mark.parametrize("name, flat", [("always flat", 1), ("all cut", None)])
def test_nothing_to_learn_is_no_step(runs, world, name, flat):
    """max_refills bounds the search; then the iteration says so, and no bit of the policy moves."""
    folder, results = runs
    assert results[name]["codes"] == [0] and results[name]["stdout"][0].count("nothing to learn") == 2, results[name]
    assert tiny.distance(world.policy, f"{folder}/{name}/out/policy") == 0
    for record in log_of(runs, name)[:-1]:
        assert flat is None or record["objective/flat_groups"] == flat
        assert [record[f"policy/{k}"] for k in ("steps", "grad_norm", "ratio_gap", "clipfrac")] == [0, 0, 0, 0]
        assert all(math.isfinite(v) for v in record.values() if not isinstance(v, str))


def test_momentum_and_kl_move_nothing_either(runs, world):
    """A policy that has learned, and so has momentum and a KL, meets an iteration of flat groups: not a bit moves."""
    log = log_of(runs, "later flat")
    assert runs[1]["later flat"]["codes"] == [0] and [r["policy/steps"] for r in log[:-1]] == [2, 0, 0]
    # the policy has not read these batches for a step, so it has read them for the log
    assert all(r["objective/entropy"] > 0 < r["policy/sampler_gap"] < 1e-5 and r["objective/kl"] != 0 for r in log[1:-1])
    checkpoints = [f"{runs[0]}/later flat/out/checkpoint-00000{i}" for i in (1, 2, 3)]
    assert tiny.distance(world.policy, f"{checkpoints[0]}/policy") > 1e-3
    for name in ("policy/model.safetensors", "policy_optimizer.safetensors"):
        first, *others = [open(f"{checkpoint}/{name}", "rb").read() for checkpoint in checkpoints]
        assert all(other == first for other in others), name


def test_without_a_kl_there_is_no_reference(runs):
    result = runs[1]["no KL"]
    loaded = [line.split()[0] for line in result["stdout"][0].splitlines() if "M parameters" in line]
    assert result["codes"] == [0] and loaded == ["policy"]


def test_a_policy_that_stands_still_is_on_policy_to_the_last_bit(runs):
    """
    GSPO's clip range is as narrow as bfloat16's rounding. With steps too small to move a weight, all minibatches must have a
    ratio of exactly 1: the old log-probs come from the very micro-batches that are trained.
    """
    assert runs[1]["still"]["codes"] == [0], runs[1]["still"]
    for record in log_of(runs, "still")[:-1]:
        assert record["policy/steps"] == 4 and record["policy/sampler_gap"] > 0  # rounding there is
        assert record["policy/clipfrac"] == record["policy/approx_kl"] == record["policy/ratio_gap"] == 0


def test_rules_see_the_prompts_as_text(runs):
    assert log_of(runs, "prompts")[0]["objective/scores"] == log_of(runs, "prompts")[0]["eval/scores"] == 1


@pytest.mark.parametrize("script", ["ppo", "grpo"])
def test_a_sampler_that_is_off(runs, script):
    """In 16 bits that is said once, on rank 0, and the run goes on; in 32 bits it ends before the step."""
    result = runs[1][f"{script} off"]
    assert result["codes"] == [0, 0], result
    assert [text.count("warning") for text in result["stdout"]] == [1, 0] and "--importance_cap=2" in result["stdout"][0]
    assert all(0.04 < r["policy/sampler_gap"] < 0.06 for r in log_of(runs, f"{script} off")[:-1])
    result = runs[1][f"{script} off, 32 bits"]
    assert result["codes"] == [1] and result["stderr"][0].count("\n") == 1 and "sampler" in result["stderr"][0], result
    assert not os.path.exists(f"{runs[0]}/{script} off, 32 bits/out/policy")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_reward_that_fails_is_one_line_and_nobody_hangs(runs, fault):
    """On the only rank, and on rank 1 of two: rank 0 says so, and says where."""
    for name, count in ((fault, 1), (f"{fault} on 1", 2)):
        result = runs[1][name]
        assert result["codes"] == [1] * count and result["stderr"][1:] == [""] * (count - 1), result
        said = result["stderr"][0]
        wanted = FAULTS[fault] + ["on rank 1"] * (count - 1) + [fault] * (fault != "hangs")
        assert said.startswith("grpo.py: error: ") and said.count("\n") == 1 and all(word in said for word in wanted), said
        assert max(result["seconds"]) < 60


@pytest.mark.parametrize("name, script, word", [("ppo raises on 1", "ppo.py", "raises_on_1"),
                                                ("too long on 1", "grpo.py", "99 tokens")])
def test_what_fails_within_the_scoring_of_one_rank_reaches_all(runs, name, script, word):
    result = runs[1][name]
    assert result["codes"] == [1, 1] and result["stderr"][1] == "", result
    said = result["stderr"][0]
    assert said.startswith(f"{script}: error: on rank 1") and said.count("\n") == 1 and word in said, said


def test_a_rank_without_responses_calls_no_rule(runs):
    assert runs[1]["a rank without responses"]["codes"] == [0, 0], runs[1]["a rank without responses"]
    with open(f"{runs[0]}/a rank without responses/out/log.jsonl", encoding="utf-8") as f:
        assert all("eval/scores" in json.loads(line) for line in list(f)[:1])

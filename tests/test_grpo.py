"""
grpo.py where by_hand.py sees little: nothing to learn, rounding in 16 bits, rewards that fail on one rank or on all. (Its
steps, refills and losses are worked out by hand in test_by_hand.py.)
"""
import math

import pytest

import tiny
from tiny import forked, is_one_line, one_run

# Rounding that depends on how many tokens the micro-batch has, as it does on a GPU, but larger; and a sampler that is off.
UNEVEN = """
import model
exact = model.Model.logprobs
def uneven(self, *args, **more):
    logprobs, entropy = exact(self, *args, **more)
    return logprobs + 2e-3 * (len(logprobs) % 7), entropy
model.Model.logprobs = uneven
"""
OFF = """
import rollout
drawn = rollout.draw
def draw(*args):
    token, logprob = drawn(*args)
    return token, logprob + 0.05
rollout.draw = draw
"""
STILL = dict(dtype="bfloat16", cliprange=3e-4, learning_rate=1e-30, num_minibatches=4, micro_batch_size=3, kl_coef=0, max_iters=2)
STANDS = {  # name: script, keys
    "grpo": ("grpo", STILL | dict(cliprange_high=4e-4, num_iterations=1)),
    "one step": ("grpo", STILL | dict(cliprange_high=4e-4, num_iterations=1, num_minibatches=1)),
    "gspo": ("grpo", STILL | dict(cliprange_high=4e-4, num_iterations=1, importance="sequence")),
    "cispo": ("grpo", STILL | dict(cliprange_high=4e-4, num_iterations=1, loss_type="cispo")),
    "ppo": ("ppo", STILL | dict(value_learning_rate=1e-30, ppo_epochs=1))}
FAULTS = {  # a function of tiny.RULES -> what is said
    "raises": ["raises_on_1", "rules.py, line ", "KeyError: 'missing'"], "few": ["few_on_1"], "text": ["text_on_1", "str"],
    "not_a_number": ["not_a_number_on_1", "nan", "the row with the prompt '"], "hangs": ["reward_timeout"]}
TOO_LONG = """
import errors, tokenizer
def too_long(*args):
    raise errors.BadInput("a response has 99 tokens in the reward model's tokenizer")
tokenizer.Tokenizer.encode_scored = too_long
"""


@pytest.fixture(scope="module")
def runs(world, tmp_path_factory):
    cases, letters = {}, world.rule("letters")

    def add(name, code="", ranks=1, script="grpo", **keys):
        cases[name] = [one_run(f"{script}.py", *[(getattr(world, script)("out", **keys), code)] * ranks)]

    add("later flat", reward_functions=world.rule("fades"), checkpoint_interval=1, keep_checkpoints=9, entropy_coef=0.1,
        num_minibatches=1, max_refills=2)
    for name, (script, keys) in STANDS.items():
        add(f"still {name}", UNEVEN + OFF, 1, script, reward_functions=f"{letters},reward_model", **keys)
    add("off", OFF, 2, dtype="bfloat16", max_iters=1)
    for fault in FAULTS:
        add(fault, "", 2, reward_functions=f"accuracy,{world.rule(fault + '_on_1')}", reward_timeout=1)
    # rank 0 must not gather the reward model's layers while rank 1 says that its rule has failed
    add("ppo raises", "", 2, "ppo", reward_functions=f"{world.rule('raises_on_1')},reward_model", zero_stage="reward=3")
    add("a rank without responses", "", 2, reward_functions=world.rule("best"), eval_size=1, max_iters=1)
    add("too long", f"if RANK == 1:{TOO_LONG}".replace("\n", "\n    "), 2, reward_path=world.other_reward)
    return forked(tmp_path_factory.mktemp("runs"), cases, at_once=4)


def test_nothing_to_learn_is_no_step(runs, world):
    """
    A policy that has learned, and so has momentum and a KL, meets iterations of flat groups, which refills do not help: they
    are said, and not a bit moves.
    """
    log, (result,) = runs.log("later flat"), runs["later flat"]
    assert result["codes"] == [0] and result["stdout"][0].count("nothing to learn") == 2, result
    assert [r["policy/steps"] for r in log[:-1]] == [2, 0, 0] and all(r["objective/flat_groups"] == 1 for r in log[1:-1])
    assert all(math.isfinite(v) for r in log for v in r.values() if not isinstance(v, str))
    # the policy has not read these batches for a step, so it has read them for the log
    assert all(r["objective/entropy"] > 0 < r["policy/sampler_gap"] < 1e-5 and r["objective/kl"] != 0 for r in log[1:-1])
    checkpoints = [f"{runs.out('later flat')}/checkpoint-00000{i}" for i in (1, 2, 3)]
    assert tiny.distance(world.policy, f"{checkpoints[0]}/policy") > 1e-3
    for name in ("policy/model.safetensors", "policy_optimizer.safetensors"):
        first, *others = [open(f"{checkpoint}/{name}", "rb").read() for checkpoint in checkpoints]
        assert all(other == first for other in others), name


@pytest.mark.parametrize("name", STANDS)
def test_a_policy_that_stands_still_is_on_policy_to_the_last_bit(runs, name):
    """
    The clip range is as narrow as bfloat16's rounding. With steps too small to move a weight, all minibatches must have a ratio
    of exactly 1: the old log-probs are no sampler's, but come from the very micro-batches that are trained.
    """
    assert runs[f"still {name}"][0]["codes"] == [0], runs[f"still {name}"]
    for record in runs.log(f"still {name}")[:-1]:
        assert record["policy/steps"] == STANDS[name][1]["num_minibatches"] and record["policy/sampler_gap"] > 0.04
        assert record["policy/clipfrac"] == record["policy/approx_kl"] == record["policy/ratio_gap"] == 0


def test_a_sampler_that_is_off_in_16_bits_is_said_once(runs):
    """And the run goes on. (In 32 bits it ends before the step: test_ppo.py.)"""
    result, = runs["off"]
    assert result["codes"] == [0, 0], result
    assert [text.count("warning") for text in result["stdout"]] == [1, 0] and "--importance_cap=2" in result["stdout"][0]
    assert 0.04 < runs.log("off")[0]["policy/sampler_gap"] < 0.06


SAID = FAULTS | {"ppo raises": ["raises_on_1", "rules.py, line "], "too long": ["99 tokens"]}


@pytest.mark.parametrize("name", SAID)
def test_what_fails_within_the_scoring_of_one_rank_is_one_line_and_nobody_hangs(runs, name):
    """On rank 1 of two: rank 0 says so, and says where."""
    result, = runs[name]
    is_one_line(result, "ppo.py" if name == "ppo raises" else "grpo.py", ["on rank 1", *SAID[name]], 1)
    assert max(result["seconds"]) < 60


def test_a_rank_without_responses_calls_no_rule(runs):
    assert runs["a rank without responses"][0]["codes"] == [0, 0], runs["a rank without responses"]
    assert "eval/scores" in runs.log("a rank without responses")[0]

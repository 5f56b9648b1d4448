"""
grpo.py where by_hand.py sees little: nothing to learn, rounding in 16 bits, rewards that fail on one rank or on all. (Its
steps, refills and losses are worked out by hand in test_by_hand.py.)
"""
import math

import pytest

import tiny
from tiny import forked, one_run

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
original = rollout.draw
def sample(*args):
    token, logprob = original(*args)
    return token, logprob + 0.05
rollout.draw = sample
"""
FAULTS = {  # a function of tiny.RULES -> what is said beside its name
    "raises": ["rules.py, line ", "KeyError: 'missing'"], "not_a_number": ["nan", "the row with the prompt '"],
    "few": ["1"], "text": ["str"], "hangs": ["reward_timeout"]}
TOO_LONG = """
import errors, tokenizer
def too_long(*args):
    raise errors.BadInput("a response has 99 tokens in the reward model's tokenizer")
tokenizer.Tokenizer.encode_scored = too_long
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

    add("later flat", reward_functions=world.rule("fades"), checkpoint_interval=1, keep_checkpoints=9, entropy_coef=0.1,
        num_minibatches=1, max_refills=2)
    add("still", UNEVEN, reward_functions=letters, max_iters=2, **STILL)
    add("off", OFF, 2, dtype="bfloat16", max_iters=1)
    for fault in FAULTS:
        add(fault, "", 2, reward_functions=f"accuracy,{world.rule(fault + '_on_1')}", reward_timeout=1)
    # rank 0 must not gather the reward model's layers while rank 1 says that its rule has failed
    add("ppo raises", "", 2, "ppo", reward_functions=f"{world.rule('raises_on_1')},reward_model", zero_stage="reward=3")
    add("a rank without responses", "", 2, reward_functions=world.rule("best"), eval_size=1, max_iters=1)
    add("too long", f"if RANK == 1:{TOO_LONG}".replace("\n", "\n    "), 2, reward_path=world.other_reward)
    return folder, {name: result for name, (result,) in forked(folder, cases, at_once=4).items()}


def log_of(runs, name):
    return tiny.read_log(f"{runs[0]}/{name}/out")


def test_nothing_to_learn_is_no_step(runs, world):
    """
    A policy that has learned, and so has momentum and a KL, meets iterations of flat groups, which refills do not help: they
    are said, and not a bit moves.
    """
    log, result = log_of(runs, "later flat"), runs[1]["later flat"]
    assert result["codes"] == [0] and result["stdout"][0].count("nothing to learn") == 2, result
    assert [r["policy/steps"] for r in log[:-1]] == [2, 0, 0] and all(r["objective/flat_groups"] == 1 for r in log[1:-1])
    assert all(math.isfinite(v) for r in log for v in r.values() if not isinstance(v, str))
    # the policy has not read these batches for a step, so it has read them for the log
    assert all(r["objective/entropy"] > 0 < r["policy/sampler_gap"] < 1e-5 and r["objective/kl"] != 0 for r in log[1:-1])
    checkpoints = [f"{runs[0]}/later flat/out/checkpoint-00000{i}" for i in (1, 2, 3)]
    assert tiny.distance(world.policy, f"{checkpoints[0]}/policy") > 1e-3
    for name in ("policy/model.safetensors", "policy_optimizer.safetensors"):
        first, *others = [open(f"{checkpoint}/{name}", "rb").read() for checkpoint in checkpoints]
        assert all(other == first for other in others), name


def test_a_policy_that_stands_still_is_on_policy_to_the_last_bit(runs):
    """
    GSPO's clip range is as narrow as bfloat16's rounding. With steps too small to move a weight, all minibatches must have a
    ratio of exactly 1: the old log-probs come from the very micro-batches that are trained.
    """
    assert runs[1]["still"]["codes"] == [0], runs[1]["still"]
    for record in log_of(runs, "still")[:-1]:
        assert record["policy/steps"] == 4 and record["policy/sampler_gap"] > 0  # rounding there is
        assert record["policy/clipfrac"] == record["policy/approx_kl"] == record["policy/ratio_gap"] == 0


def test_a_sampler_that_is_off_in_16_bits_is_said_once(runs):
    """And the run goes on. (In 32 bits it ends before the step: test_ppo.py.)"""
    result = runs[1]["off"]
    assert result["codes"] == [0, 0], result
    assert [text.count("warning") for text in result["stdout"]] == [1, 0] and "--importance_cap=2" in result["stdout"][0]
    assert 0.04 < log_of(runs, "off")[0]["policy/sampler_gap"] < 0.06


SAID = FAULTS | {"ppo raises": ["raises_on_1", "rules.py, line "], "too long": ["99 tokens"]}


@pytest.mark.parametrize("name", SAID)
def test_what_fails_within_the_scoring_of_one_rank_is_one_line_and_nobody_hangs(runs, name):
    """On rank 1 of two: rank 0 says so, and says where."""
    result = runs[1][name]
    assert result["codes"] == [1, 1] and result["stderr"][1] == "", result
    said = result["stderr"][0]
    assert said.startswith("ppo.py: error: " if name == "ppo raises" else "grpo.py: error: ") and said.count("\n") == 1, said
    assert "on rank 1" in said and all(word in said for word in SAID[name]), said
    assert max(result["seconds"]) < 60


def test_a_rank_without_responses_calls_no_rule(runs):
    assert runs[1]["a rank without responses"]["codes"] == [0, 0], runs[1]["a rank without responses"]
    assert "eval/scores" in log_of(runs, "a rank without responses")[0]

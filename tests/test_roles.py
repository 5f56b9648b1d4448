"""
Ranks with roles, and batches that are sampled ahead. What must stand: who does what changes no text
and no weight; a batch is sampled by the version of the policy that `staleness` names, always; and a
run that is killed or stopped anywhere goes on to the same. Runs are forked (tiny.forked); by_hand.py
works out a stale run with plain loops (test_by_hand.py), campaign.py --roles kills many more runs.
"""
import os

import pytest

from errors import BadConfig
from options.messages import parse_roles
from options.roles import to_score, versions

import tiny
from tiny import assert_same_run, forked, is_one_line, one_run

HELD = dict(dtype="float64", max_iters=3, eval_interval=2)
THREE = "train=1,generate=1,score=1"
LAYOUTS = {  # the key roles -> how many ranks
    "": 1, "train=1,generate=1": 2, "train=2,generate=2": 4, "train=2,generate=1,score=1": 4, THREE: 3}
CASES = {  # name -> (script, keys, staleness, roles); by_hand.py works out others
    "sharded, refilled": ("grpo.py", dict(max_refills=2, num_minibatches=1, kl_in="reward", zero_stage="policy=3,ref=3",
                                          sync_check_interval=1), 1, "train=2,generate=1,score=1"),
    "lora": ("ppo.py", dict(lora="2", value_init="shared", num_minibatches=1), 1, "train=1,generate=1"),
    # float32 weights, which the generator gets in 16 bits; what it decodes must be what the trainers would
    "bf16": ("ppo.py", dict(dtype="bfloat16", max_iters=2), 0, "train=1,generate=1"),
}

# ---------------------------------------------------------------------------------------------------------------------
# the schedule, by enumeration


def test_the_order_of_what_is_sampled_and_scored():
    assert versions(0, 4, staleness=2) == {0: 0, 1: 0, 2: 0, 3: 1}
    assert list(versions(2, 6, 2, kept=[2, 3])) == [4, 5]  # resumed: the checkpoint has two batches
    assert versions(2, 6, 2, kept=[2, 3]) == {4: 2, 5: 3}
    assert versions(4, 6, 2) == {4: 4, 5: 4}  # a finished run gets a larger max_iters: nothing was kept
    assert list(to_score(0, 2, 2, 2)) == [
        ("eval", 0), ("rollout", 0), ("refill 0", 0), ("refill 1", 0),
        ("rollout", 1), ("refill 0", 1), ("refill 1", 1), ("eval", 2)]
    assert list(to_score(1, 2, 0, 0)) == [("rollout", 1)]
    # the versions come one after the other, and none is older than staleness allows
    for staleness in range(4):
        for start in range(5):
            kept = range(start, min(start + staleness, 9)) if start else ()
            found = versions(start, 9, staleness, kept)
            assert sorted([*kept, *found]) == list(range(start, 9))
            assert sorted(set(found.values())) == list(range(start, start + len(set(found.values()))))
            assert all(version == max(0, k - staleness) for k, version in found.items())


def test_roles_are_parsed():
    assert not parse_roles("", 4) and not parse_roles("train=4", 4) and not parse_roles("train=1, generate=0", 1)
    assert parse_roles("score=1,generate=2, train=3", 6) == dict(train=range(3), generate=range(3, 5), score=range(5, 6))
    for text in ("train=1,generate=2", "generate=2", "train=1,sample=1", "train", "train=1,generate=-1"):  # on two ranks
        with pytest.raises(BadConfig):
            parse_roles(text, 2)


# ---------------------------------------------------------------------------------------------------------------------
# who does what changes nothing


def on(world, script, roles, code="", **keys):
    """A run for forked."""
    if keys.get("max_refills"):
        keys |= dict(reward_functions=f"{world.rule('odd')},0.5*reward_model", refill_by="odd")  # of odd, groups are flat
    arguments = getattr(world, script.removesuffix(".py"))("out", roles=roles, **HELD | keys)
    return one_run(script, *[(arguments, code)] * LAYOUTS[roles])


@pytest.fixture(scope="module")
def runs(world, tmp_path_factory):
    """Each case as NAME and NAME alone."""
    cases = {}
    for name, (script, keys, staleness, roles) in CASES.items():
        for end, layout in ((" alone", ""), ("", roles)):
            cases[name + end] = [on(world, script, layout, staleness=staleness, **keys)]
    return forked(tmp_path_factory.mktemp("layouts"), cases, at_once=3)


@pytest.mark.parametrize("name", CASES)
def test_roles_change_no_text_and_no_weight(runs, name):
    script, _, staleness, _ = CASES[name]
    assert {code for end in ("", " alone") for code in runs[name + end][0]["codes"]} == {0}, (runs[name], runs[f"{name} alone"])
    models = ["policy"] + ["value_model"] * (script == "ppo.py")
    log = assert_same_run(runs.out(f"{name} alone"), runs.out(name), models, 1e-9)[:-1]
    # the batch is of the version that staleness names: at first nothing has moved, then it is so many updates old
    if name != "bf16":
        # a scorer reads refilled groups by themselves, and so rounds otherwise
        refills = "max_refills" in CASES[name][1]
        assert abs(log[0].get("objective/kl", 0)) <= (1e-12 if refills else 0) and log[0]["policy/ratio_gap"] == 0
        assert log[0]["policy/sampler_gap"] < 1e-10
        assert not refills or log[0]["objective/flat_groups"] > log[0]["trained/flat_groups"]
    for iteration, record in enumerate(log):
        age = min(iteration, staleness)
        assert record.get("policy/staleness", 0) == age
        assert (record.get("policy/off_policy_kl", 0) > 1e-6) == (age > 0) == ("policy/sampler_gap" not in record)


# The trainers wait in the log of iteration 0, and in the checkpoint of 2, until the next batch is being sampled. And what each
# rank holds when it has begun
MEANWHILE = """
import json, os, time
import rollout
import checkpoint
import run
import report
def wait_for(iteration):
    began = time.monotonic()
    while not os.path.exists(f"began-{iteration}"):
        if time.monotonic() - began > 60:
            raise RuntimeError(f"nobody samples the batch of iteration {iteration}")
        time.sleep(0.01)
def before(owner, name, wait):
    f = getattr(owner, name)
    def changed(*args, **kwargs):
        wait(*args)
        return f(*args, **kwargs)
    setattr(owner, name, changed)
def sampling(*args):
    _, purpose, iteration = args[4]
    with open("order", "a") as f:
        f.write(f"{purpose} {iteration}, ")
    open(f"began-{iteration}", "w").close()
def holds(settings):
    with open(f"held-{RANK}", "a") as f:
        f.write(" ".join(sorted(settings)))
before(run, "agree", holds)
if RANK == 0:
    before(report, "write_log", lambda out, records, *samples: not samples and records[0]["iteration"] == 0 and wait_for(2))
    before(checkpoint, "save_checkpoint", lambda out, iteration, *rest: iteration == 2 and wait_for(3))
else:
    before(rollout, "sample_batch", sampling)
"""


def test_the_next_batch_is_sampled_while_the_trainers_log_and_save(world, tmp_path):
    (result,), = forked(str(tmp_path), {"run": [
        on(world, "ppo.py", THREE, MEANWHILE, staleness=1, checkpoint_interval=2, max_iters=4)]}).values()
    assert set(result["codes"]) == {0}, result
    # held-out prompts are the trainers'
    assert (tmp_path / "run" / "order").read_text() == "rollout 0, rollout 1, rollout 2, rollout 3, "
    held = [(tmp_path / "run" / f"held-{rank}").read_text() for rank in range(3)]
    names = [{name for name in ("policy", "ref_policy", "reward_model", "value_model") if f"the weights of {name}" in text}
             for text in held]
    assert names == [{"policy", "value_model"}, {"policy"}, {"ref_policy", "reward_model"}]


# ---------------------------------------------------------------------------------------------------------------------
# killed, stopped, with other roles

ACT = tiny.ends(9) + """
import prompts, loss, rewards, rollout
def at(owner, name, call, action):
    f, calls = getattr(owner, name), []
    def changed(*args, **kwargs):
        calls.append(1)
        if len(calls) == call:
            action()
        return f(*args, **kwargs)
    setattr(owner, name, changed)
def ask():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(1)  # the others look now and then
"""
WHEN = dict(train="at(loss, 'learning_rate_at', 3, {})", generate="at(rollout, 'sample_batch', CALL, {})",
            score="at(rewards, 'score_batch', CALL, {})")


def acts(role, action, call=3):
    """Code: the rank of a role in THREE kills itself, hangs, or asks to stop, in the middle of the run."""
    code = f"{ACT}if RANK == {list(WHEN).index(role)}:\n    {WHEN[role].format(action)}\n"
    return code.replace("CALL", str(call))  # a generator or scorer, at this call


STOPS_IN_A_REFILL = """
import os, signal
import rollout
sample = rollout.sample_batch
def asked(policy, tokenizer, rows, row_numbers, noise, *rest, **more):
    _, purpose, iteration = noise
    if purpose.startswith("refill") and iteration >= 2:
        os.kill(os.getpid(), signal.SIGTERM)
    return sample(policy, tokenizer, rows, row_numbers, noise, *rest, **more)
rollout.sample_batch = asked
"""


@pytest.fixture(scope="module")
def resumed(world, tmp_path_factory):
    cases = {}

    def run(roles, code="", **more):
        return on(world, "ppo.py", roles, code, **dict(staleness=1, checkpoint_interval=0) | more)

    cases["whole"] = [run("")]
    cases["asked"] = [run(THREE, acts("generate", "ask")), run("", staleness=2), run("")]
    keys = dict(staleness=1, checkpoint_interval=1, max_iters=4, max_refills=2)
    cases["whole 2"] = [on(world, "grpo.py", THREE, **keys)]
    cases["refilling"] = [on(world, "grpo.py", "", code, **keys) for code in (STOPS_IN_A_REFILL, "")]
    cases["killed"] = [on(world, "grpo.py", THREE, code, **keys) for code in (*(acts(role, "die", 1) for role in WHEN), "")]
    return forked(tmp_path_factory.mktemp("resumed"), cases, at_once=3)


def miss(result, who):
    """In a run of THREE, all ranks but this one have ended, and each says in one line whom it misses."""
    for rank in {0, 1, 2} - {who}:
        assert result["codes"][rank] == 1 and result["stderr"][rank].count("\n") == 1, result
        assert ": lost touch with the ranks that " in result["stderr"][rank], result


def test_a_run_that_a_generator_stops_goes_on_without_it(resumed):
    """The batches that were sampled ahead are in the checkpoint, and nothing is sampled twice."""
    first, refused, second = resumed["asked"]
    assert {*first["codes"], *second["codes"]} == {0} and not "".join(first["stderr"] + second["stderr"]).count("error")
    assert "resume with the same command" in first["stdout"][0] and "resuming from out/checkpoint-" in second["stdout"][0]
    assert_same_run(resumed.out("whole"), resumed.out("asked"), ("policy", "value_model"), 1e-9)
    # what the batches ahead were sampled with must stay
    is_one_line(refused, "ppo.py", ["staleness = 1, not 2"])


def test_a_run_whose_ranks_are_killed_one_after_the_other_goes_on_to_the_same_bits(resumed):
    *killed, last = resumed["killed"]
    for (who, role), result in zip(enumerate(WHEN), killed, strict=True):
        miss(result, who)
        assert any(f"lost touch with the ranks that {role}" in text for text in result["stderr"]), result
    assert set(last["codes"]) == {0} and "resuming from out/checkpoint-" in last["stdout"][0], last
    assert_same_run(resumed.out("whole 2"), resumed.out("killed"))


def test_a_stop_while_groups_are_sampled_again_saves_the_batch_that_they_are_for(resumed):
    stopped, again = resumed["refilling"]
    assert stopped["codes"] == again["codes"] == [0] and "before the update of iteration" in stopped["stdout"][0], stopped
    assert_same_run(resumed.out("whole 2"), resumed.out("refilling"), tolerance=1e-9)


# ---------------------------------------------------------------------------------------------------------------------
# what must not happen

NUDGE = """
import parallel
from options import roles
f = roles.take_weights
def nudged(policy, version):
    checksum = f(policy, version)
    parallel.my_part(policy.hf.lm_head.weight.data)[0, 0] += 1e-13
    return checksum
if RANK in NUDGED:
    roles.take_weights = nudged
"""
MISTAKEN = """
from options import roles
versions = roles.versions
if RANK == 1:
    roles.versions = lambda *args: {k + 1: version for k, version in versions(*args).items()}
"""
LONG_END = """
import time
import run
f = run.save_final
def slow(*args):
    time.sleep(4)
    f(*args)
run.save_final = slow
"""


@pytest.fixture(scope="module")
def failures(world, tmp_path_factory):
    rule = dict(reward_functions=world.rule("raises_late"), value_init="policy")
    cases = {f"{role} hangs": [on(world, "ppo.py", THREE, acts(role, "hang"), staleness=i, timeout=4, reward_timeout=3)]
             for i, role in enumerate(("train", "generate"))}
    cases["a reward fails"] = [on(world, "ppo.py", THREE, staleness=1, **rule)]
    # one of two copies is another one; and the only one
    cases["a copy has drifted"] = [on(world, "ppo.py", "train=2,generate=2", f"NUDGED = [3]{NUDGE}",
                                      zero_stage="policy=3,value=3", sync_check_interval=1)]
    cases["all copies have drifted"] = [on(world, "grpo.py", "train=1,generate=1", f"NUDGED = [1]{NUDGE}")]
    cases["a message of another iteration"] = [on(world, "ppo.py", THREE, MISTAKEN)]
    # the generator has sampled all that it shall when the trainers save their models, for longer than `timeout`
    cases["a long end"] = [on(world, "grpo.py", "train=1,generate=1", LONG_END, staleness=2, timeout=3, reward_timeout=2)]
    return forked(tmp_path_factory.mktemp("failures"), cases, at_once=8)  # most of them sleep


@pytest.mark.parametrize("role", ["train", "generate"])
def test_a_rank_that_hangs_ends_the_run_after_the_timeout(failures, role):
    (result,), who = failures[f"{role} hangs"], list(WHEN).index(role)
    miss(result, who)
    assert all(seconds < 20 for rank, seconds in enumerate(result["seconds"]) if rank != who), result


def test_the_last_ones_may_take_their_time(failures):
    result, = failures["a long end"]
    assert result["codes"] == [0, 0] and min(result["seconds"]) > 4, result


SAID = {  # what fails -> what is said, on rank 0 alone
    "a reward fails": "raises_late", "a copy has drifted": "drifted apart",
    "all copies have drifted": "drifted apart: a generator's",
    "a message of another iteration": "['rollout', 1] where those that"}


@pytest.mark.parametrize("name", SAID)
def test_what_fails_on_any_rank_is_one_line(failures, name):
    result, = failures[name]
    is_one_line(result, "grpo.py" if name.startswith("all") else "ppo.py", [SAID[name]], 1)
    if name == "a reward fails":
        assert "The run is saved before iteration" in result["stderr"][0]
        assert any(name.startswith("checkpoint-") for name in os.listdir(failures.out(name)))

"""
Ranks with roles, and batches that are sampled ahead. What must stand: who does what changes no text
and no weight; and a batch is sampled by the version of the policy that `staleness` names, always.
Runs are forked (tiny.forked); by_hand.py works out a stale run with plain loops (test_by_hand.py).
"""
import collections
import json
import os
import shutil

import pytest
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from engine.crew import Crew, parse_roles
from errors import BadConfig

import tiny
from tiny import alike, forked, measured, one_run

HELD = dict(dtype="float64", max_iters=4, eval_interval=2)
LAYOUTS = {  # the key roles -> how many ranks
    "": 1, "train=1,generate=1": 2, "train=1,score=1": 2, "train=2,generate=1,score=1": 4, "train=1,generate=2,score=2": 5}
CASES = {  # name -> (script, keys)
    "ppo": ("ppo.py", {}),
    "ppo, lora": ("ppo.py", dict(lora="2", value_init="shared", num_minibatches=1)),
    "grpo": ("grpo.py", {}),
    # the reference becomes the policy, and the scores get their zero: what scorers hold changes
    "ppo, reset": ("ppo.py", dict(ref_reset_iters=2, center_scores="always")),
    "grpo, reset": ("grpo.py", dict(ref_reset_iters=1, center_scores="always", eval_interval=1000)),
    "grpo, refilled": ("grpo.py", dict(max_refills=2, num_minibatches=1, kl_in="reward")),
}
IN_SHARDS = dict(zero_stage="policy=3,value=3", sync_check_interval=1)
# What a rank holds of the policy, and by how many bytes its memory has grown at the worst moment of sending and taking it
WATCHED = """
import gc, json
import torch
import batches
import parallel
import serving
from engine import crew, placement
from parallel import is_shard, my_part
parallel.PIECE = 2**14
found, base = dict(grown=0, pieces=[], held={}), None
def in_memory():
    storages = [t.untyped_storage() for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter) and not t.is_meta]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())
def look():
    if base is not None:
        found["grown"] = max(found["grown"], in_memory() - base)
def watch(owner, name, within=False):
    f = getattr(owner, name)
    def watched(*args):
        global base
        if within:
            base = in_memory()
        result = f(*args)
        look()
        if within:
            base = None
            policy = args[0].policy
            found["held"] = {n: [is_shard(p), my_part(p).numel(), p.numel()] for n, p in policy.named_parameters()}
            json.dump(found, open(f"held-{RANK}.json", "w"))
        return result
    setattr(owner, name, watched)
unpack = crew.unpack
def unpacked(buffer, layout):
    found["pieces"].append([len(buffer), len(layout)])
    return unpack(buffer, layout)
crew.unpack = unpacked
watch(placement, "gather")
watch(serving, "fill")
watch(batches.Batches, "send_weights", within=True)
watch(serving.Generator, "take_weights", within=True)
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return tiny.build(str(tmp_path_factory.mktemp("world")))


def on(world, script, ranks, code="", **keys):
    """A run for forked, on so many ranks."""
    if keys.get("max_refills"):
        keys["reward_functions"] = f"{world.rule('odd')},0.5*reward_model"
    arguments = getattr(world, script.removesuffix(".py"))("out", **HELD | keys)
    return one_run(script, *[(arguments, code)] * ranks)


@pytest.fixture(scope="module")
def runs(world, tmp_path_factory):
    """{(case, staleness, roles): result}, and the folder."""
    folder, cases, names = str(tmp_path_factory.mktemp("layouts")), {}, []
    for name, (script, keys) in CASES.items():
        plain = name in ("ppo", "grpo")
        for staleness in (0, 1, 2) if plain else (0, 1):
            for roles in LAYOUTS if plain and staleness < 2 else ("", "train=2,generate=1,score=1"):
                cases[f"{name} {staleness} {roles}"] = [
                    on(world, script, LAYOUTS[roles], staleness=staleness, roles=roles, **keys)]
                names.append((name, staleness, roles))
    for staleness in (0, 1):  # who read together
        names.append(("ppo, reset", staleness, "train=2,score=2"))
        cases[f"ppo, reset {staleness} train=2,score=2"] = [on(world, "ppo.py", 4, staleness=staleness, roles="train=2,score=2",
                                                              zero_stage="policy=3,value=3,ref=3", **CASES["ppo, reset"][1])]
    for staleness in (0, 1):  # no trainer holds it whole
        names.append(("ppo", staleness, "train=2,generate=2"))
        cases[f"ppo {staleness} train=2,generate=2"] = [
            on(world, "ppo.py", 4, WATCHED, staleness=staleness, roles="train=2,generate=2", **IN_SHARDS)]
    results = forked(folder, cases, at_once=3)
    return folder, {name: result for name, (result,) in zip(names, results.values(), strict=True)}


def test_roles_change_no_text_and_no_weight(runs):
    folder, results = runs
    for (name, staleness, roles), result in results.items():
        assert set(result["codes"]) == {0}, (name, staleness, roles, result)
        outs = [f"{folder}/{name} {staleness} {layout}/out" for layout in ("", roles)]
        logs = [[measured(record) for record in tiny.read_log(out)] for out in outs]
        texts = [[record.get("objective/texts") for record in log] for log in logs]
        assert texts[0] == texts[1], (name, staleness, roles)
        assert alike(*logs, tolerance=1e-9), (name, staleness, roles)
        for model in ("policy", "value_model")[:1 + (name == "ppo")]:
            assert tiny.distance(*(f"{out}/{model}" for out in outs)) < 1e-9, (name, staleness, roles)


def test_the_batch_is_of_the_version_that_staleness_names(runs):
    """At the first iteration nothing has moved: the KL is 0, and the ratio 1. Then batches are so many updates old."""
    folder, results = runs
    for name, staleness, roles in results:
        log = tiny.read_log(f"{folder}/{name} {staleness} {roles}/out")[:-1]
        assert log[0]["objective/kl"] == 0 == log[0]["policy/ratio_gap"], (name, staleness, roles)
        assert log[0]["policy/sampler_gap"] < 1e-10
        for record in log:  # no figures of what others have done, or was done before
            assert ("time/rollout_mfu" in record) == ("generate" not in roles and staleness == 0), (name, staleness, roles)
            assert ("time/score_mfu" in record) == ("score" not in roles) and "time/update_mfu" in record
        ages = [record.get("policy/staleness", 0) for record in log]
        assert ages == [min(iteration, staleness) for iteration in range(4)], (name, staleness, roles)
        for record, age in zip(log, ages, strict=True):
            assert (record.get("policy/off_policy_kl", 0) > 1e-6) == (age > 0)
            assert ("policy/sampler_gap" in record) == (age == 0) and (record["policy/ratio_gap"] > 1e-6) == (age > 0)
    # and another staleness is another run
    texts = [[r.get("objective/texts") for r in tiny.read_log(f"{folder}/ppo {staleness} /out")] for staleness in range(3)]
    assert texts[0][0] == texts[1][0] == texts[2][0] and texts[0][1] != texts[1][1] == texts[2][1] and texts[1][2] != texts[2][2]


def test_scorers_change_their_reference_and_their_zero(runs):
    """At a reset batches of the policy of now have no KL to it; and the learned scores begin at 0."""
    folder, results = runs
    for name, staleness, roles in results:
        if name.endswith("reset"):
            log = tiny.read_log(f"{folder}/{name} {staleness} {roles}/out")
            every = CASES[name][1]["ref_reset_iters"]
            assert len({record["objective/score_shift"] for record in log[:-1]}) == 1 and log[0]["objective/score_shift"] != 0
            for record in log[:-1] if staleness == 0 else ():
                reset = record["iteration"] % every == 0
                assert (abs(record["objective/kl"]) < 1e-9) == reset, (name, roles, record["iteration"])


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_sharded_policy_is_sent_a_tensor_at_a_time(runs, staleness):
    """Of the trainers, the first one alone puts it together, for it sends it: in the CPU's memory, also where there are GPUs."""
    found = []
    for rank in range(4):
        with open(f"{runs[0]}/ppo {staleness} train=2,generate=2/held-{rank}.json", encoding="utf-8") as f:
            found.append(json.load(f))
    sizes = {name: 8 * whole for name, (_, _, whole) in found[0]["held"].items()}  # float64
    whole, largest = sum(sizes.values()), max(sizes.values())
    for rank, seen in enumerate(found):
        assert all(shard == (rank < 2) and (1 + shard) * mine == all_ for shard, mine, all_ in seen["held"].values()), seen
    # one tensor, or a piece, as it was sent and as it was received; the first rank has all pieces
    assert found[0]["grown"] >= whole and 2 * largest + 2**14 < 0.8 * whole
    assert all(0 < seen["grown"] <= 2 * largest + 2**14 for seen in found[1:]), [seen["grown"] for seen in found]
    for seen in found[2:]:
        pieces = [(size, tensors) for size, tensors in seen["pieces"] if size > 2**14]
        assert pieces and all(tensors == 1 and size <= largest for size, tensors in pieces)  # never cut


# The trainers wait in the log of iteration 0, and in the checkpoint of 2, until the next batch is being sampled. And what was
# sampled, in order
MEANWHILE = """
import os, time
import rollout
from engine import checkpoint, run_log
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
    purpose, iteration = args[5:7]
    with open("order", "a") as f:
        f.write(f"{purpose} {iteration}, ")
    if purpose == "rollout":
        open(f"began-{iteration}", "w").close()
if RANK == 0:
    before(run_log, "write_log", lambda out, record: record["iteration"] == 0 and wait_for(1 + STALENESS))
    before(checkpoint, "save_checkpoint", lambda out, iteration, *rest: iteration == 2 and wait_for(2 + STALENESS))
else:
    before(rollout, "sample_share", sampling)
"""
ORDERS = {  # (staleness, eval_interval) -> what the generator samples; an evaluation comes before the batch of its weights
    (0, 1000): "eval 0, rollout 0, rollout 1, rollout 2, rollout 3, eval 0, ",
    (1, 1000): "eval 0, rollout 0, rollout 1, rollout 2, rollout 3, eval 0, ",
    (1, 3): "eval 0, rollout 0, rollout 1, rollout 2, rollout 3, eval 0, eval 0, ",
    (0, 3): "eval 0, rollout 0, rollout 1, rollout 2, eval 0, rollout 3, eval 0, ",
}


@pytest.fixture(scope="module")
def meanwhile(world, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("meanwhile"))
    return folder, forked(folder, {f"{staleness} {interval}": [
        on(world, script, 2, MEANWHILE.replace("STALENESS", str(staleness)), roles="train=1,generate=1", staleness=staleness,
           eval_interval=interval, checkpoint_interval=2)]
        for (staleness, interval), script in zip(ORDERS, ("ppo.py", "grpo.py", "ppo.py", "ppo.py"), strict=True)})


@pytest.mark.parametrize("staleness, interval", ORDERS)
def test_the_next_batch_is_sampled_while_the_trainers_log_and_save(meanwhile, staleness, interval):
    folder, results = meanwhile
    result, = results[f"{staleness} {interval}"]
    assert result["codes"] == [0, 0], result
    with open(f"{folder}/{staleness} {interval}/order", encoding="utf-8") as f:
        assert f.read() == ORDERS[staleness, interval]


def test_each_role_holds_what_it_needs(world, tmp_path):
    """The names of the models whose weights a rank has, when it has begun."""
    note = """
import json
from engine import run
f = run.agree
def agree(settings):
    json.dump(sorted(settings), open(f'held-{RANK}.json', 'a'))
    f(settings)
run.agree = agree
"""
    results = forked(str(tmp_path), {"roles": [on(world, "ppo.py", 3, note, roles="train=1,generate=1,score=1", max_iters=1)]})
    assert set(results["roles"][0]["codes"]) == {0}, results
    held = []
    for rank in range(3):
        with open(tmp_path / "roles" / f"held-{rank}.json", encoding="utf-8") as f:
            held.append(f.read())
    names = [{name for name in ("policy", "ref_policy", "reward_model", "value_model") if f'"the weights of {name}"' in text}
             for text in held]
    assert names == [{"policy", "value_model"}, {"policy"}, {"ref_policy", "reward_model"}]


def test_a_rank_that_scores_by_rules_alone_holds_no_model(world, tmp_path):
    keys = dict(reward_functions=world.rule("letters"), kl_coef=0, sync_check_interval=1)
    results = forked(str(tmp_path), {
        "alone": [on(world, "grpo.py", 1, **keys)], "two": [on(world, "grpo.py", 2, roles="train=1,score=1", **keys)]})
    assert [result["codes"] for (result,) in results.values()] == [[0], [0, 0]], results
    assert tiny.distance(*(f"{tmp_path}/{name}/out/policy" for name in results)) < 1e-9


# ---------------------------------------------------------------------------------------------------------------------
# stop, resume, with other roles

STOP = """
import os, signal
import data
batch_rows = data.batch_rows
def stopped(seed, iteration, *rest):
    if iteration == 2 + STALENESS and RANK == WHO:
        os.kill(os.getpid(), signal.SIGTERM)
    return batch_rows(seed, iteration, *rest)
data.batch_rows = stopped
"""
# a server calls no batch_rows: it asks while it samples, or scores
ASK = """
import os, signal
import rollout
f, calls = rollout.NAME, []
def asks(*args, **kwargs):
    calls.append(1)
    if len(calls) == 4 and RANK == WHO:
        os.kill(os.getpid(), signal.SIGTERM)
    return f(*args, **kwargs)
rollout.NAME = asks
"""


@pytest.fixture(scope="module")
def resumed(world, tmp_path_factory):
    folder, cases = str(tmp_path_factory.mktemp("resumed")), {}
    keys = dict(staleness=1, checkpoint_interval=0)

    def run(ranks, code="", **more):
        return on(world, "ppo.py", ranks, code, **keys | more)

    stop = STOP.replace("STALENESS", "1").replace("WHO", "0")
    ask = ASK.replace("WHO", "1")
    cases["whole"] = [run(1)]
    cases["one rank"] = [run(1, stop), run(1)]
    cases["others sample after the stop"] = [run(1, stop), run(2, roles="train=1,generate=1")]
    cases["nobody else does"] = [run(2, stop, roles="train=1,generate=1"), run(1)]
    cases["scorers come"] = [run(2, stop, roles="train=1,generate=1"), run(4, roles="train=2,generate=1,score=1")]
    cases["asked while it samples"] = [run(2, ask.replace("NAME", "sample_share"), roles="train=1,generate=1"), run(1)]
    cases["asked while it scores"] = [run(2, ask.replace("NAME", "score_batch"), roles="train=1,score=1"),
                                      run(2, roles="train=1,score=1")]
    # a reference of its own, which the checkpoint has from one role and gives to another; and a zero
    changes = CASES["ppo, reset"][1]
    cases["changes"] = [run(1, **changes)]
    scorers = dict(roles="train=2,generate=1,score=1", **changes)
    cases["scorers have saved"] = [run(4, stop, **scorers), run(1, **changes)]
    cases["scorers load"] = [run(1, stop, **changes), run(4, **scorers)]
    cases["scorers save and load"] = [run(2, stop, roles="train=1,score=1", **changes),
                                      run(4, roles="train=2,score=2", zero_stage="policy=3,value=3,ref=3", **changes)]
    cases["another staleness"] = [run(1, stop), run(1, staleness=2)]
    cases["another length"] = [run(1, stop), run(1, max_new_tokens=7)]
    return folder, forked(folder, cases, at_once=3)


@pytest.mark.parametrize("name", ["one rank", "others sample after the stop", "nobody else does", "scorers come",
                                  "asked while it samples", "asked while it scores", "scorers have saved", "scorers load",
                                  "scorers save and load"])
def test_a_stopped_run_goes_on_with_other_roles(resumed, name):
    """The batches that were sampled ahead are in the checkpoint, and nothing is sampled twice."""
    folder, results = resumed
    for result in results[name]:
        assert set(result["codes"]) == {0}, (name, result)
    first, second = (result["stdout"][0] for result in results[name])
    assert "resume with the same command" in first and "resuming from out/checkpoint-" in second, (first, second)
    whole = "changes" if name.startswith("scorers") and name != "scorers come" else "whole"
    logs = [[measured(record) for record in tiny.read_log(f"{folder}/{case}/out")] for case in (whole, name)]
    assert alike(*logs, tolerance=1e-9)
    for model in ("policy", "value_model"):
        assert tiny.distance(f"{folder}/{whole}/out/{model}", f"{folder}/{name}/out/{model}") < 1e-9


@pytest.mark.parametrize("name, said", [
    ("another staleness", "staleness = 1, not 2"), ("another length", "max_new_tokens = 8, not 7")])
def test_what_the_batches_ahead_were_sampled_with_must_stay(resumed, name, said):
    result = resumed[1][name][1]
    assert result["codes"] == [2] and f"holds a run with {said}" in result["stderr"][0]


# ---------------------------------------------------------------------------------------------------------------------
# bad input, and what must not happen

BAD = {  # roles -> what is said, on two ranks
    "train=1,generate=2": r"has 3 ranks, but there are 2; change it, or start so many: torchrun --nproc_per_node=3",
    "generate=2": r"has no ranks that train", "train=0,generate=2": r"has no ranks that train",
    "train=1,sample=1": r"cannot read 'sample=1'; wanted .*train=6,generate=1,score=1",
    "train=1,train=1": r"cannot read 'train=1'", "train": r"cannot read 'train'", "train=1,generate=-1": r"cannot read",
    "train=1.5,generate=1": r"cannot read",
}


@pytest.mark.parametrize("roles", BAD)
def test_roles_that_do_not_add_up(roles):
    with pytest.raises(BadConfig, match=BAD[roles]):
        parse_roles(roles, 2)


def test_roles_are_parsed():
    assert parse_roles("", 4) is None and parse_roles("train=4", 4) is None and parse_roles("train=1, generate=0", 1) is None
    assert parse_roles("score=1,generate=2, train=3", 6) == dict(train=range(3), generate=range(3, 5), score=range(5, 6))


def crew_on(store, role, rank):
    """A Crew without processes: what it writes into a store, and reads there."""
    crew = Crew.__new__(Crew)
    crew.ranks, crew.role, crew.rank, crew.leads, crew.store = parse_roles("train=1,generate=1", 2), role, rank, True, store
    crew.jobs = crew.receptions = crew.forgotten = 0
    crew.answered, crew.times, crew.shown, crew.waited, crew.began = {}, {}, {}, 0.0, 0.0
    crew.sent = collections.defaultdict(collections.deque)
    crew.stop_wanted, crew.stop_asked, crew.beat, crew.look = False, lambda: False, lambda: None, lambda ranks: None
    return crew


def test_the_store_keeps_what_was_not_read_and_nothing_else():
    """However far ahead one role is: 300 jobs wait for the generator, then 300 answers for the trainer. Of 600 more, one by one,
    nothing stays but the last 256 notes of what the trainer has taken."""
    store = dist.HashStore()
    trainer, generator = crew_on(store, "train", 0), crew_on(store, "generate", 1)

    def answer():
        number, job = generator.next_job()
        assert job == dict(do="sample", iteration=number)
        generator.say(number, "train", answer=number)

    def take(number):
        assert trainer.receive(number, "generate")[1]["answer"] == number

    for iteration in range(300):
        assert trainer.post(do="sample", iteration=iteration) == iteration
    for _ in range(300):
        answer()
    for number in range(300):
        take(number)
    for number in range(300, 900):
        trainer.post(do="sample", iteration=number)
        answer()
        take(number)
    assert store.num_keys() < 256 + 10, store.num_keys()


def test_a_role_that_has_said_nothing_since_has_no_share():
    crew = crew_on(dist.HashStore(), "train", 0)
    crew.times["generate"] = [1.0, 4.0]
    assert crew.shares()["time/generate_busy"] == 0.75
    assert "time/generate_busy" not in crew.shares()  # its batch was there already
    crew.times["generate"] = [2.0, 6.0]
    assert crew.shares()["time/generate_busy"] == 0.5


EACH_ON_ITS_HOST = """
import os
from engine import launch
init = launch.init
def elsewhere(*args):
    os.chdir(f"../host-{RANK}")
    return init(*args)
launch.init = elsewhere
"""


@pytest.mark.parametrize("role, key", [("score", "reward_path"), ("score", "policy_path"), ("generate", "policy_path")])
def test_hosts_that_have_other_models_are_noticed(world, tmp_path, role, key):
    """A path that is another folder on the second host: the reward model, the reference, or the policy that samples first."""
    for host in ("host-0", "host-1"):
        shutil.copytree(getattr(world, dict(reward_path="reward", policy_path="policy")[key]), tmp_path / host / "model")
    file = tmp_path / "host-1" / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors[min(tensors)].view(-1)[0] += 0.5
    save_file(tensors, file, {"format": "pt"})
    keys = {key: "model", "value_init": "policy", "roles": f"train=1,{role}=1"}
    result, = forked(str(tmp_path), {"run": [on(world, "ppo.py", 2, EACH_ON_ITS_HOST, **keys)]})["run"]
    assert result["codes"] == [2, 2] and "".join(result["stderr"]).count("\n") == 1, result
    does = dict(score="scores", generate="generates")[role]
    said = f"rank 1, which {does}, has read other files in {key} = 'model' than rank 0 has there; give all hosts the same models"
    assert said in result["stderr"][0] and not os.path.exists(tmp_path / "host-0" / "out"), result


AT = tiny.ends(9) + """
import os, time
import loss, parallel, rewards, rollout
from engine import run
now = 0
enter = run.Run.enter
def entered(self, phase):
    enter(self, phase)
    open(f"{self.iteration} {phase}", "w").close()
if RANK == 0:
    run.Run.enter = entered
def die_in(phase):  # the next batch is sampled and scored while the trainers log and save: when they wait for it
    while not os.path.exists(phase):
        time.sleep(0.01)
    die()
def at(owner, name, call, action):
    f = getattr(owner, name)
    def changed(*args, **kwargs):
        global now
        now += 1
        if now == call:
            action()
        return f(*args, **kwargs)
    setattr(owner, name, changed)
"""
THREE = "train=1,generate=1,score=1"
LOST = {  # name -> (roles, staleness, the rank and what it does at its third call, what another rank says)
    "a generator dies": (THREE, 0, 1, "at(rollout, 'sample_share', 3, lambda: die_in('1 rollout'))", 0,
                         "iteration 1, rollout: lost touch with"),
    "a generator hangs": (THREE, 0, 1, "at(rollout, 'sample_share', 3, hang)", 0, "iteration 1, rollout: lost touch with"),
    "a scorer dies": (THREE, 0, 2, "at(rollout, 'score_batch', 3, lambda: die_in('1 score'))", 0,
                         "iteration 1, score: lost touch with"),
    "a scorer hangs": (THREE, 1, 2, "at(rollout, 'score_batch', 3, hang)", 0, "iteration 1, score: lost touch with"),
    "a trainer dies": (THREE, 0, 0, "at(loss, 'learning_rate_at', 3, die)", 1, "waiting for work: lost touch with"),
    "a trainer hangs": (THREE, 1, 0, "at(loss, 'learning_rate_at', 3, hang)", 2, "waiting for work: lost touch with"),
}


SLOW = """
f = rollout.sample
def slow(*args):
    time.sleep(0.8)
    return f(*args)
if RANK == 1:
    rollout.sample = slow
"""
LONG_STEP = """
import torch
f = loss.response_logprobs
def slow(*args, **kwargs):
    if torch.is_grad_enabled():
        time.sleep(0.9)
    return f(*args, **kwargs)
loss.response_logprobs = slow
"""
LONG_LOAD = """
from engine import checkpoint
f = checkpoint.fill
def slow(*args):
    time.sleep(5)
    return f(*args)
checkpoint.fill = slow
"""
# three batches wait for the scorer when the trainers leave
LATE_SCORES = STOP.replace("STALENESS", "4").replace("WHO", "0") + """
f = rewards.Scorer.score
def slow(*args):
    time.sleep(2)
    return f(*args)
if RANK == 2:
    rewards.Scorer.score = slow
"""
NUDGE = """
import serving
f = serving.Generator.take_weights
def nudged(self, *args):
    f(self, *args)
    parallel.my_part(self.policy.hf.lm_head.weight.data)[0, 0] += 1e-13
if RANK == 1:
    serving.Generator.take_weights = nudged
"""
RAISES_LATE = """
late = 0

def raises_late(batch):
    global late
    late += 1
    return raises(batch) if late > 3 else letters(batch)
"""


@pytest.fixture(scope="module")
def losses(world, tmp_path_factory):
    folder, cases = str(tmp_path_factory.mktemp("losses")), {}
    for name, (roles, staleness, who, what, _, _) in LOST.items():
        cases[name] = [on(world, "ppo.py", 3, f"{AT}if RANK == {who}:\n    {what}\n", roles=roles, staleness=staleness, timeout=4,
                          reward_timeout=3, checkpoint_interval=1)]
    hangs = AT + "if RANK == 1:\n    at(loss, 'learning_rate_at', 3, hang)\n"
    cases["one of two trainers hangs"] = [on(world, "ppo.py", 3, hangs, roles="train=2,generate=1", timeout=4, reward_timeout=3)]
    cases["a slow generator"] = [on(world, "ppo.py", 2, AT + SLOW, roles="train=1,generate=1", timeout=4, reward_timeout=3,
                                    max_iters=1)]
    quick = dict(timeout=4, reward_timeout=3)
    two = dict(roles="train=1,generate=1", **quick)
    cases["a long step"] = [on(world, "ppo.py", 2, AT + LONG_STEP, micro_batch_size=1, num_minibatches=1, ppo_epochs=1,
                               max_iters=1, **two)]
    cases["a long load"] = [on(world, "ppo.py", 2, max_iters=1, **two),
                            on(world, "ppo.py", 2, AT + LONG_LOAD, max_iters=2, **two)]
    cases["a stop while scores wait"] = [on(world, "ppo.py", 3, AT + LATE_SCORES, roles=THREE, staleness=3, max_iters=8,
                                            eval_interval=1000, **quick)]
    rule = dict(reward_functions=world.rule("fades") + "," + world.rule("raises_late"), value_init="policy")
    with open(f"{world.root}/rules.py", "a", encoding="utf-8") as f:
        f.write(RAISES_LATE)
    for roles, ranks in (("train=1,generate=1,score=1", 3), ("train=1,generate=1", 2)):
        cases[f"a reward fails, {roles}"] = [on(world, "ppo.py", ranks, roles=roles, staleness=1, **rule)]
    # as the group of trainers and scorers is made: the generator is not in it, and makes the next one
    dies = AT + "import torch.distributed as dist\nif RANK == 0:\n    at(dist, 'new_group', 8, die)\n"
    cases["a trainer dies at the start"] = [on(world, "ppo.py", 3, dies, roles=THREE, timeout=5)]
    cases["a copy has drifted"] = [on(world, "ppo.py", 2, AT + NUDGE, roles="train=1,generate=1", sync_check_interval=1)]
    cases["a shard has drifted"] = [on(world, "ppo.py", 3, AT + NUDGE, roles="train=1,generate=2", **IN_SHARDS)]
    return folder, forked(folder, cases, at_once=8)  # most of them sleep


@pytest.mark.parametrize("name", LOST)
def test_a_lost_rank_of_any_role_ends_the_run(losses, name):
    """In one line on each rank that is left, soon, with its role and the phase."""
    result, (_, _, who, _, speaks, said) = losses[1][name][0], LOST[name]
    assert said in result["stderr"][speaks], result
    for rank in {0, 1, 2} - {who}:
        assert result["codes"][rank] == 1 and result["stderr"][rank].count("\n") == 1, result
        assert f"lost touch with rank {who}, which " in result["stderr"][rank], result
        assert result["seconds"][rank] < 25


def test_a_rank_that_is_lost_while_groups_are_made_ends_the_others_within_the_timeout(losses):
    result = losses[1]["a trainer dies at the start"][0]
    for rank in (1, 2):
        assert result["codes"][rank] == 1 and result["seconds"][rank] < 15, result
        assert result["stderr"][rank].count("\n") == 1 and "start: the ranks cannot meet" in result["stderr"][rank], result


def test_others_name_the_one_of_several_trainers_that_hangs(losses):
    """Not the first one, which waits for it in a collective."""
    result = losses[1]["one of two trainers hangs"][0]
    assert result["codes"][0] == result["codes"][2] == 1 and "waiting for work: lost touch with rank 1, which trains" in \
        result["stderr"][2] and "lost touch with the other ranks that train" in result["stderr"][0], result


def test_a_generator_may_take_longer_than_the_timeout(losses):
    """It samples for more than 4 s, but not in silence."""
    result = losses[1]["a slow generator"][0]
    assert result["codes"] == [0, 0] and max(result["seconds"]) > 5, result


@pytest.mark.parametrize("name", ["a long step", "a long load", "a stop while scores wait"])
def test_a_rank_that_works_for_longer_than_the_timeout_is_not_lost(losses, name):
    """A step of seven micro-batches for 6.3 s, a checkpoint that is read for 5 s, three batches of 2 s that nobody waits for."""
    result = losses[1][name][-1]
    assert set(result["codes"]) == {0}, result
    assert max(result["seconds"]) > 5, result


@pytest.mark.parametrize("roles", ["train=1,generate=1,score=1", "train=1,generate=1"])
def test_a_reward_that_fails_elsewhere_ends_the_run_in_one_line(losses, roles):
    result = losses[1][f"a reward fails, {roles}"][0]
    assert set(result["codes"]) == {1}, result
    assert result["stderr"][0].count("\n") == 1 and "The run is saved before iteration" in result["stderr"][0], result
    assert set(result["stderr"][1:]) == {""}, result


@pytest.mark.parametrize("name", ["a copy has drifted", "a shard has drifted"])
def test_the_audit_covers_the_generators_copy(losses, name):
    result = losses[1][name][0]
    assert set(result["codes"]) == {1}, result
    said = "the ranks have drifted apart: the policy of version 0 differs on rank 1, which generates"
    assert said in result["stderr"][0], result

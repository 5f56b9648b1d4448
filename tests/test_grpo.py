"""
grpo.py as a user runs it: ranks, dynamic sampling, kills, rewards that fail, bad input; and ppo.py with rules. Nearly all runs
are forked. (Its steps are worked out by hand in test_by_hand.py, and its losses in test_grpo_loss.py.)
"""
import ast
import json
import math
import os
import re

import pytest
import torch
from test_reliability import OPEN, contents, forked, is_one_line, one_run

from engine.tokenizers import load_tokenizer
from model import load_model

import tiny
from conftest import ROOT
from tiny import alike, in_a_row, measured


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return tiny.build(str(tmp_path_factory.mktemp("world")))


def log_of(folder, name):
    return tiny.read_log(f"{folder}/{name}/out")


# Writes what every rank has after a rollout: batch-0.pt (the evaluation at iteration 0), batch-1.pt (its rollout), ...; and
# its scores and what the models say of it, where nothing has been replaced in between.
DUMP = """
import json, torch
import parallel
from engine import audit
gather_rows, check_finite, batch, number = parallel.gather_rows, audit.check_finite, {}, 0
def write(more, count):
    global batch, number
    batch, number = batch | more, number + count
    if RANK == 0:
        torch.save(batch, f"batch-{number - 1}.pt")
def dump(mine, total):
    global batch
    batch = {}
    everyones = gather_rows(mine, total)
    write(everyones, 1)
    return everyones
def dump_more(tensors, iteration):
    check_finite(tensors, iteration)
    if all(len(x) == len(batch["tokens"]) for x in tensors.values()):
        write(tensors, 0)
parallel.gather_rows, audit.check_finite = dump, dump_more
"""


# Writes the noise that was drawn: [[purpose, iteration, slots, samples], ...].
NOISE = """
import rollout
uniforms, drawn = rollout.response_uniforms, []
def draw(seed, purpose, iteration, slots, length, samples=None):
    drawn.append([purpose, iteration, list(slots), samples])
    with open("noise.json", "w") as f:
        json.dump(drawn, f)
    return uniforms(seed, purpose, iteration, slots, length, samples)
rollout.response_uniforms = draw
"""


def dumped(folder, name):
    """Those batches, in order."""
    files = [f"{folder}/{name}/batch-{i}.pt" for i in range(100)]
    return [torch.load(file) for file in files if os.path.exists(file)]


def texts(batch, tokenizer):
    """[(prompt, response)] of a batch."""
    R = batch["response_mask"].shape[1]
    return [(tokenizer.decode(t[:-R][m[:-R]].tolist()), tokenizer.decode(t[-R:][r].tolist())) for t, m, r
            in zip(batch["tokens"], batch["attention_mask"], batch["response_mask"], strict=True)]


@pytest.fixture(scope="module")
def forks(world, tmp_path_factory):
    """All the forked runs below, but those of any number of ranks and of every knob: their folder and results."""
    folder = str(tmp_path_factory.mktemp("forks"))
    cases = sampling_cases(world) | failing_cases(world, folder)
    return folder, forked(folder, cases, at_once=4)  # many of them only wait


# ---------------------------------------------------------------------------------------------------------------------
# a run


@pytest.fixture(scope="module")
def real(world, tmp_path_factory):
    """With rules that the tiny model cannot please and one that it can. (By python, not forked: test_code_task.py.)"""
    out = str(tmp_path_factory.mktemp("real"))
    args = world.grpo("out", reward_functions=f"accuracy,0.1*format,{world.rule('letters')}", max_refills=1)
    result, = forked(out, {"run": [one_run("grpo.py", args)]})["run"]
    assert result["codes"] == [0], result
    return f"{out}/run", result


def test_a_run_logs_every_phase(real):
    out, result = real
    log = tiny.read_log(f"{out}/out")
    assert [r["iteration"] for r in log] == [0, 1, 2, 3] and result["stderr"] == [""]
    evaluation = {"eval/scores", "eval/kl", "eval/entropy", "eval/length", "eval/finished", "eval/accuracy", "eval/thinks",
                  "eval/reward/accuracy", "eval/reward/format", "eval/reward/letters"}
    assert evaluation <= log[0].keys() and evaluation <= log[-1].keys() and not evaluation & log[1].keys()
    wanted = {"objective/texts", "objective/scores", "objective/kl", "objective/entropy", "objective/length",
              "objective/finished", "objective/accuracy", "objective/thinks", "objective/reward/accuracy",
              "objective/reward/letters", "objective/flat_groups", "objective/score_std", "loss/policy", "loss/kl",
              "policy/approx_kl", "policy/clipfrac", "policy/sampler_gap", "policy/ratio_gap", "policy/grad_norm",
              "policy/steps", "policy/lr", "time/rollout", "time/score", "time/update", "time/iteration", "mem/peak_mib"}
    for record in log[:-1]:
        assert wanted <= record.keys(), wanted - record.keys()
        assert all(math.isfinite(v) for v in record.values() if not isinstance(v, str))
        assert record["objective/scores"] == pytest.approx(record["objective/reward/letters"], abs=1e-6)  # the others are 0
    assert log[0]["objective/kl"] == log[0]["eval/kl"] == 0 != log[1]["objective/kl"]
    assert [line.split()[0] for line in result["stdout"][0].splitlines() if "M parameters" in line] == ["policy", "ref_policy"]
    assert len(re.findall(r"^iter \d/3 \| score .*flat groups 0\.\d\d", result["stdout"][0], re.M)) == 3


@torch.no_grad()
def test_transformers_loads_what_it_leaves(real, world):
    import transformers as hf

    policy, tokens = f"{real[0]}/out/policy", torch.randint(0, 260, (3, 12), generator=torch.Generator().manual_seed(0))
    theirs = hf.AutoModelForCausalLM.from_pretrained(policy).eval()(tokens).logits
    ours = load_model(policy)
    assert theirs.std() > 0.1 and (theirs - ours.logits(ours.states(tokens))).abs().max() < 1e-4
    assert tiny.distance(world.policy, policy) > 1e-3
    assert hf.AutoTokenizer.from_pretrained(policy)("<think>1")["input_ids"] == [256, 49]


# ---------------------------------------------------------------------------------------------------------------------
# any number of ranks, any memory knob

RULES = dict(dtype="float64", num_minibatches=6, max_refills=2, truncated="mask", eval_interval=1)  # steps of 3 or 2 rows
OTHER = dict(dtype="float64", importance="sequence", baseline="others", scale_by="batch", aggregation="token-mean", dual_clip=1.5,
             kl_estimator="k1", kl_correction=True, entropy_coef=0.05, target_kl=0.05, cliprange=0.05, cliprange_high=0.07,
             missing_eos_penalty=0.5, reward_clip=0.7, temperature=1.2, weight_decay=0.1, warmup_iters=2, lr_decay="linear")
# nearly greedy, so that the responses of most groups are the same text: a learned score must not tell them apart
ALIKE = dict(dtype="float64", temperature=0.05, reward_functions="reward_model", kl_in="reward", kl_estimator="k1", max_iters=4,
             scale_by="std", num_iterations=1, adam_eps=1e-8, max_refills=1)
MEMORY = dict(micro_batch_size=64, rollout_batch_size=4, head_chunk=5, gradient_checkpointing=True)  # four of groups of three
# on how many ranks
RUNS = {"rules": "31", "other": "21", "single": "31", "half": "2", "ppo": "21", "ppo-rules": "21", "alike": "31"}


def variants(world):
    """{name: (script, arguments)} of the runs that are made on any number of ranks."""
    mixed = f"{world.rule('odd')},accuracy"
    return {"rules": ("grpo.py", dict(RULES, reward_functions=mixed)),
            "other": ("grpo.py", dict(OTHER, reward_path=world.other_reward)),
            "single": ("grpo.py", dict(RULES, dtype="float32", max_iters=2, num_minibatches=2)),
            "half": ("grpo.py", dict(dtype="bfloat16", max_iters=2)), "alike": ("grpo.py", ALIKE),
            "ppo": ("ppo.py", dict(dtype="float64", reward_functions=f"{world.rule('letters')},0.5*reward_model,accuracy")),
            "ppo-rules": ("ppo.py", dict(dtype="float64", reward_functions=world.rule("letters"), value_init="policy",
                                         scale_scores="running", reward_path="nowhere"))}


@pytest.fixture(scope="module")
def ranks(world, tmp_path_factory):
    """
    Those runs as NAME-1, NAME-2, NAME-3: their folder and results. On several ranks, other memory knobs are set, too.
    """
    folder, jobs = str(tmp_path_factory.mktemp("ranks")), {}
    for name, (script, keys) in variants(world).items():
        for ranks in map(int, RUNS[name]):
            memory = MEMORY if ranks > 1 and keys["dtype"] == "float64" else {}
            jobs[f"{name}-{ranks}"] = one_run(script, *[(getattr(world, script[:-3])("out", **keys | memory), DUMP)] * ranks)
    outcomes = in_a_row(folder, jobs)
    for name, each in outcomes.items():
        assert {outcome["kind"] for outcome in each} == {""}, (name, each)
    return folder, outcomes


@pytest.mark.parametrize("name", ["rules", "other", "alike", "ppo", "ppo-rules"])
def test_ranks_and_memory_do_not_change_a_run(ranks, name):
    """(With shards: test_knobs.py.)"""
    one, more = (f"{ranks[0]}/{name}-{n}/out" for n in sorted(RUNS[name]))
    logs = [[measured(r) for r in tiny.read_log(out)] for out in (one, more)]
    assert [r.get("objective/texts") for r in logs[0]] == [r.get("objective/texts") for r in logs[1]]
    assert alike(*logs, tolerance=1e-9)
    for model in ("policy", "value_model") if name.startswith("ppo") else ("policy",):
        assert tiny.distance(f"{one}/{model}", f"{more}/{model}") < 1e-9


def test_those_runs_had_something_to_get_wrong(ranks, world):
    """Weights moved; groups were refilled, and some stayed flat; responses were cut off; clipping and target_kl did something."""
    folder, _ = ranks
    for name in ("rules", "other", "ppo", "ppo-rules"):
        assert tiny.distance(world.policy, f"{folder}/{name}-1/out/policy") > 1e-3, name
        log = log_of(folder, f"{name}-1")[:-1]
        assert len({r["objective/texts"] for r in log}) == len(log) == 3
        assert any(0 < r["objective/finished"] < 1 for r in log) and all(r["policy/clipfrac"] > 0 for r in log), name
    rules, other = (log_of(folder, f"{name}-1")[:-1] for name in ("rules", "other"))
    assert any("time/refill 1" in r for r in rules) and any(r["policy/steps"] < 4 for r in other)
    assert any(0 < r["objective/flat_groups"] < 1 for r in rules)
    assert 15 // 2 % 3 and 15 // 3 % 3  # the border between ranks lies within a group
    # groups of one text, parted between ranks; and the others taught something
    assert all(r["objective/flat_groups"] >= 0.4 for r in log_of(folder, "alike-1")[:-1])
    assert tiny.distance(world.policy, f"{folder}/alike-1/out/policy") > 1e-3


def test_float32_samples_the_same_texts_on_any_ranks(ranks):
    texts = [[r["objective/texts"] for r in log_of(ranks[0], f"single-{n}")[:-1]] for n in (1, 3)]
    assert texts[0] == texts[1] and len(set(texts[0])) == 2


def test_bfloat16_stays_on_policy(ranks):
    log = log_of(ranks[0], "half-2")[:-1]
    assert len(log) == 2 and all(0 < r["policy/sampler_gap"] < 0.02 for r in log)


@torch.no_grad()
def test_another_tokenizers_reward_model_scores_the_text(ranks, world):
    """"other" has a reward model whose markers have each other's ids: each text, tokenized anew and alone, has the same score."""
    ours, theirs = load_tokenizer(world.policy), load_tokenizer(world.other_reward)
    model = load_model(world.other_reward, head="scalar", dtype=torch.float64)
    batch = dumped(ranks[0], "other-2")[1]
    assert len(batch["scores"]) == 15
    for (prompt, response), finished, score in zip(texts(batch, ours), batch["finished"], batch["reward/reward_model"],
                                                   strict=True):
        ids = theirs.encode_texts([prompt + response])[0] + [theirs.eos_id] * int(finished)
        assert model.scores(torch.tensor([ids]), torch.tensor([len(ids) - 1])).item() == pytest.approx(score.item(), abs=1e-12)
    assert (batch["scores"] == batch["reward/letters"] + 0.5 * batch["reward/reward_model"]).all()


@torch.no_grad()
def test_ppo_with_rules(ranks, world):
    """Mixed with a reward model, or without one: its folder is not looked at, and the value model starts as the policy."""
    folder, results = ranks
    batch, tokenizer = dumped(folder, "ppo-2")[1], load_tokenizer(world.policy)
    rows = {}
    for path in (world.rl_train, world.rl_val):
        with open(path, encoding="utf-8") as f:
            rows |= {row["prompt"]: row["answer"] for row in map(json.loads, f)}
    for i, (prompt, response) in enumerate(texts(batch, tokenizer)):
        assert batch["reward/letters"][i] == sum(ord(ch) < 128 for ch in response) / 8
        assert batch["reward/accuracy"][i] == (response == rows[prompt])
    want = batch["reward/letters"] + 0.5 * batch["reward/reward_model"] + batch["reward/accuracy"]
    assert (batch["scores"] - want).abs().max() < 1e-15
    assert {"objective/reward/letters", "objective/reward/reward_model"} <= log_of(folder, "ppo-1")[0].keys()
    lines = results["ppo-rules-1"][0]["stdout"].splitlines()
    assert [line.split()[0] for line in lines if "M parameters" in line] == ["policy", "ref_policy", "value_model"]


# ---------------------------------------------------------------------------------------------------------------------
# dynamic sampling, nothing to learn, kills

AT = tiny.NOW + tiny.ONCE + """
import os
import data, relatives

def send(number):
    return lambda: os.kill(os.getpid(), number)
"""
KILLS = {  # what the last rank does in iteration 1 -> its exit code, the other rank's, the checkpoint that is there
    "once(data, 'hashed_row', send(9))": (-9, 1, 1), "once(relatives, 'token_weights', send(9))": (-9, 1, 1),
    "once(data, 'hashed_row', send(15))": (0, 0, 1), "once(data, 'replace_rows', send(15))": (0, 0, 1),
    "once(relatives, 'token_weights', send(15))": (0, 0, 2),
}
UNFINISHED_ALL = """
import rollout
generate_in_parts = rollout.generate_in_parts
def cut(*args, **kwargs):
    for part in generate_in_parts(*args, **kwargs):
        part["finished"] = part["finished"] & False
        yield part
rollout.generate_in_parts = cut
"""
REFILLED = dict(dtype="float64", max_refills=2, max_iters=2)
# Rounding that depends on how many tokens the micro-batch has, as it does on a GPU, but larger.
UNEVEN = """
import model
exact = model.Model.logprobs
def uneven(self, *args, **more):
    logprobs, entropy = exact(self, *args, **more)
    return logprobs + 2e-3 * (len(logprobs) % 7), entropy
model.Model.logprobs = uneven
"""
# Writes each forward that gives log-probs: [phase, whether the model is the trained one, whether gradients are recorded, rows];
# and checks that the tokens of responses have logits, and nothing else has.
FORWARDS = """
import engine.report
engine.report.measured_flops = lambda *_: 1e9
import json, loss, model, parallel, torch
original = loss.response_logprobs
def noted(policy, mb, *rest, **more):
    with open("forwards.jsonl", "a") as f:
        trained = any(p.requires_grad for p in policy.parameters())
        print(json.dumps([parallel.phase, trained, torch.is_grad_enabled(), len(mb["tokens"])]), file=f)
    mask[0] = mb["response_mask"]
    return original(policy, mb, *rest, **more)
head, mask = model.Model.logits, [None]
def only_responses(self, states):
    assert mask[0] is None or len(states) == mask[0].sum()
    return head(self, states)
loss.response_logprobs, model.Model.logits = noted, only_responses
"""
STILL = dict(dtype="bfloat16", importance="sequence", cliprange=3e-4, cliprange_high=4e-4, learning_rate=1e-30, num_iterations=1,
             num_minibatches=4, micro_batch_size=3, kl_coef=0)


def sampling_cases(world):
    odd, letters = world.rule("odd"), world.rule("letters")
    runs = {
        "refilled": (dict(REFILLED, reward_functions=odd), DUMP + NOISE),
        "not refilled": (dict(REFILLED, reward_functions=odd, max_refills=0), DUMP),
        "never flat": (dict(REFILLED, reward_functions="reward_model"), DUMP),
        "never flat, not refilled": (dict(REFILLED, reward_functions="reward_model", max_refills=0), DUMP),
        "always flat": (dict(reward_functions=world.rule("flat"), max_refills=3, max_iters=2), DUMP),
        "later flat": (dict(reward_functions=world.rule("fades"), checkpoint_interval=1, keep_checkpoints=9,
                            entropy_coef=0.1, num_minibatches=1), ""),
        "two minibatches": (dict(max_iters=2), FORWARDS),
        "one minibatch": (dict(max_iters=2, num_minibatches=1), FORWARDS),
        "no reference": (dict(max_iters=2, num_minibatches=1, kl_coef=0, kl_in="reward"), FORWARDS),
        "KL in one minibatch": (dict(max_iters=2, num_minibatches=1, kl_in="reward"), FORWARDS),
        "all cut": (dict(reward_functions=letters, truncated="mask", dtype="float64", max_iters=2), UNFINISHED_ALL),
        "all cut, kept": (dict(reward_functions=letters, dtype="float64", max_iters=1), UNFINISHED_ALL),
        "no KL": (dict(reward_functions=letters, kl_coef=0, max_iters=2), DUMP),
        "still": (dict(STILL, reward_functions=letters), UNEVEN),
        "prompts": (dict(reward_functions=world.rule("prompts"), max_iters=1), ""),
        "KL in the score": (dict(dtype="float64", reward_functions=letters, kl_in="reward", kl_estimator="k1",
                                 scale_by="none", max_iters=2), DUMP),
        "ends": (dict(reward_functions=letters, missing_eos_penalty=5.0, eval_interval=1, keep_best=True, eval_size=0), ""),
    }
    found = {name: [one_run("grpo.py", (world.grpo("out", **keys), code))] for name, (keys, code) in runs.items()}
    args = world.grpo("out", reward_functions=odd, max_refills=2, max_iters=3, checkpoint_interval=1, eval_interval=1,
                      keep_best=True)
    found["whole"] = [one_run("grpo.py", args, args)]
    for number, action in enumerate(KILLS):
        found[f"kill {number}"] = [one_run("grpo.py", (args, AT), (args, AT + action)), one_run("grpo.py", args, args)]
    return found


def flat_by_hand(scores, size=3):
    """Numbers of the groups whose scores are all equal."""
    return [i // size for i in range(0, len(scores), size) if len(set(scores[i:i + size])) == 1]


def test_flat_groups_are_replaced_by_other_prompts(forks, world):
    """Followed through the batches of an iteration: only the flat groups, in their places, and never with the same prompt."""
    folder, results = forks
    tokenizer = load_tokenizer(world.policy)
    assert results["refilled"][0]["codes"] == results["not refilled"][0]["codes"] == [0], results["refilled"]
    evaluation, first, *rest, _ = dumped(folder, "refilled")
    plain = dumped(folder, "not refilled")
    assert len(plain) == 4 and torch.equal(first["tokens"], plain[1]["tokens"])  # both sample the same at first
    said, scores, refills = texts(first, tokenizer), first["scores"].tolist(), 0
    with open(f"{folder}/refilled/noise.json", encoding="utf-8") as f:
        _, noise, *noises = json.load(f)
    assert noise == ["rollout", 0, [i // 3 for i in range(15)], [i % 3 for i in range(15)]]
    while flat_by_hand(scores) and refills < 2:
        fresh, flat = rest.pop(0), flat_by_hand(scores)
        new = texts(fresh, tokenizer)
        assert len(new) == 3 * len(flat) < 15
        assert noises.pop(0) == [f"refill {refills}", 0, [group for group in flat for _ in range(3)], [0, 1, 2] * len(flat)]
        refills += 1
        for place, group in enumerate(flat):
            for sample in range(3):
                was, now = said[3 * group + sample], new[3 * place + sample]
                assert was[0] != now[0] == new[3 * place][0], "the refill has the prompt that it replaces"
                said[3 * group + sample] = now
                scores[3 * group + sample] = fresh["scores"][3 * place + sample].item()
        assert len({response for _, response in new}) > len(flat)  # and they do not all say the same
    assert refills
    record, next_rollout = log_of(folder, "refilled")[0], rest[0]
    # the policy is measured by what it said at first, not by what was kept for training
    was = first["scores"].tolist()
    assert record["objective/scores"] == pytest.approx(sum(was) / 15, abs=1e-12) != record["trained/scores"]
    assert record["trained/scores"] == pytest.approx(sum(scores) / 15, abs=1e-12)
    assert record["objective/flat_groups"] == len(flat_by_hand(was)) / 5
    assert record["trained/flat_groups"] == len(flat_by_hand(scores)) / 5
    # the walk through the epochs goes on as if nothing had been refilled
    prompts = [[prompt for prompt, _ in texts(batch, tokenizer)] for batch in (next_rollout, plain[2])]
    assert prompts[0] == prompts[1]


def test_nothing_flat_nothing_refilled(forks):
    folder, _ = forks
    a, b = (contents(f"{folder}/{name}") for name in ("never flat", "never flat, not refilled"))
    assert len(dumped(folder, "never flat")) == len(dumped(folder, "never flat, not refilled")) == 4
    for record in a["log"][:-1]:
        trained = {k.removeprefix("trained/"): record.pop(k) for k in list(record) if k.startswith("trained/")}
        assert trained == {k: record[f"objective/{k}"] for k in trained} and "scores" in trained
    assert a["log"] == b["log"] and a["out/policy/model.safetensors"] == b["out/policy/model.safetensors"]


def test_all_groups_flat_is_no_step_whatever_the_kl(forks, world):
    """max_refills bounds the search; then the iteration says so, and no bit of the policy moves: here, none at all."""
    folder, results = forks
    result = results["always flat"][0]
    assert result["codes"] == [0] and len(dumped(folder, "always flat")) == 2 + 2 * (1 + 3), result
    assert len(re.findall(r"^iteration \d: nothing to learn: 5 of 5 groups have equal scores, 0 of 15 responses "
                          r"are masked; no step$", result["stdout"][0],
                          re.M)) == 2
    assert tiny.distance(world.policy, f"{folder}/always flat/out/policy") == 0
    for record in log_of(folder, "always flat")[:-1]:
        assert record["objective/flat_groups"] == 1 and record["objective/score_std"] < 1e-6
        assert [record[f"policy/{k}"] for k in ("steps", "grad_norm", "ratio_gap", "clipfrac")] == [0, 0, 0, 0]
        assert all(math.isfinite(v) for v in record.values() if not isinstance(v, str))


def test_momentum_and_kl_move_nothing_either(forks, world):
    """A policy that has learned, and so has momentum and a KL, meets an iteration of flat groups: not a bit moves."""
    folder, results = forks
    log = log_of(folder, "later flat")
    assert results["later flat"][0]["codes"] == [0] and [r["policy/steps"] for r in log[:-1]] == [2, 0, 0]
    # the policy has not read these batches for a step, so it has read them for the log
    assert all(r["objective/entropy"] > 0 < r["policy/sampler_gap"] < 1e-5 and r["objective/kl"] != 0 for r in log[1:-1])
    checkpoints = [f"{folder}/later flat/out/checkpoint-00000{i}" for i in (1, 2, 3)]
    assert tiny.distance(world.policy, f"{checkpoints[0]}/policy") > 1e-3 and log[1]["objective/kl"] != 0
    for name in ("policy/model.safetensors", "policy_optimizer.safetensors"):
        first, *others = [open(f"{checkpoint}/{name}", "rb").read() for checkpoint in checkpoints]
        assert all(other == first for other in others), name


def test_all_truncated(forks, world):
    folder, results = forks
    result = results["all cut"][0]
    assert result["codes"] == [0], result
    assert len(re.findall(r"nothing to learn: . of 5 groups .*, 15 of 15 responses are masked; no step$", result["stdout"][0],
                          re.M)) == 2
    assert tiny.distance(world.policy, f"{folder}/all cut/out/policy") == 0
    assert tiny.distance(world.policy, f"{folder}/all cut, kept/out/policy") > 1e-3
    assert [r["policy/steps"] for r in log_of(folder, "all cut")[:-1]] == [0, 0]


def test_without_a_kl_there_is_no_reference(forks, world):
    folder, results = forks
    result, log = results["no KL"][0], log_of(folder, "no KL")
    assert result["codes"] == [0] and re.findall(r"^(\w+) +0.03M parameters", result["stdout"][0], re.M) == ["policy"]
    assert not any("/kl" in key and record[key] for record in log for key in record)
    assert "ref_logprobs" not in dumped(folder, "no KL")[1] and tiny.distance(world.policy, f"{folder}/no KL/out/policy") > 1e-3


def test_a_policy_that_stands_still_is_on_policy_to_the_last_bit(forks):
    """
    GSPO's clip range is as narrow as bfloat16's rounding. With steps too small to move a weight, all minibatches must have a
    ratio of exactly 1: the old log-probs come from the very micro-batches that are trained.
    """
    folder, results = forks
    assert results["still"][0]["codes"] == [0], results["still"]
    for record in log_of(folder, "still")[:-1]:
        assert record["policy/steps"] == 4 and record["policy/sampler_gap"] > 0  # rounding there is
        assert record["policy/clipfrac"] == record["policy/approx_kl"] == record["policy/ratio_gap"] == 0


@pytest.mark.parametrize("name, rows", [  # 15 responses, 2 epochs: what the reference and the policy read before, what is trained
    ("two minibatches", [15, 15, 30]), ("one minibatch", [15, 0, 30]), ("no reference", [0, 0, 30]),
    ("KL in one minibatch", [15, 15, 30])])
def test_no_forward_is_run_twice(forks, name, rows):
    """The first step's forward is the old policy's, unless that is needed earlier, or of rows that a step has moved by then."""
    folder, results = forks
    assert results[name][0]["codes"] == [0], results[name]
    with open(f"{folder}/{name}/forwards.jsonl", encoding="utf-8") as f:
        forwards = [json.loads(line) for line in f]
    read = {tuple(key): sum(n for *which, n in forwards if which == key) for *key, _ in forwards if "iteration 1" in key[0]}
    seen = [read.pop((f"iteration 1, {phase}", *which), 0) for phase, *which in (
        ("score", False, False), ("score", True, False), ("update", True, True))]
    assert seen == rows and not read
    record = log_of(folder, name)[1]
    assert record["policy/ratio_gap"] == 0 < record["policy/sampler_gap"] < 1e-5 and record["objective/entropy"] > 0


def test_a_saved_forward_is_no_share_of_peak(forks, world):
    """Two runs with the same texts: 2 N for sampling, 2 N for each reader, 6 N in each of two passes; and 2 N less."""
    each = [log_of(forks[0], name)[0] for name in ("two minibatches", "one minibatch")]
    assert each[0]["objective/texts"] == each[1]["objective/texts"]
    n, v = (sum(t.numel() for name, t in tiny.read_weights(path).items() if "wte" not in name and "wpe" not in name)
            for path in (world.policy, world.reward))
    two, one = (record["time/mfu"] / record["time/tokens_per_second"] for record in each)
    assert two / one == pytest.approx((2 * n + 2 * (n + n + v) + 12 * n) / (2 * n + 2 * (n + v) + 12 * n))


def test_rules_see_the_prompts_as_text(forks):
    folder, results = forks
    assert results["prompts"][0]["codes"] == [0], results["prompts"]
    assert log_of(folder, "prompts")[0]["objective/scores"] == log_of(folder, "prompts")[0]["eval/scores"] == 1


def test_a_kl_in_the_score_is_the_whole_response_s(forks):
    """With kl_in = "reward", what is compared within a group is the score less kl_coef times the sampled KL of the response."""
    folder, _ = forks
    batches, log = dumped(folder, "KL in the score")[1:3], log_of(folder, "KL in the score")
    assert len(batches) == 2
    for batch, record in zip(batches, log, strict=False):
        kl = ((batch["old_logprobs"] - batch["ref_logprobs"]) * batch["response_mask"]).sum(1)
        judged = batch["scores"] - 0.2 * kl
        assert record["objective/rlhf_reward"] == pytest.approx(judged.mean().item(), abs=1e-12)
        centred = judged.view(-1, 3) - judged.view(-1, 3).mean(1, keepdim=True)
        assert torch.allclose(batch["advantages"], centred.flatten(), atol=1e-12, rtol=0)
    assert log[1]["objective/kl"] != 0 and log[0]["objective/kl"] == 0


def test_the_best_policy_ends_its_responses(forks):
    """keep_best goes by what is trained for: here, five points less for each response that has not ended."""
    folder, _ = forks
    log = log_of(folder, "ends")
    with open(f"{folder}/ends/out/checkpoint-000003/state.json", encoding="utf-8") as f:
        best = json.load(f)["best_score"]
    assert all(0 < r["eval/finished"] < 1 for r in log) and best < max(r["eval/scores"] for r in log) - 0.5


@pytest.mark.parametrize("number", range(len(KILLS)))
def test_a_killed_or_stopped_run_ends_in_the_same_bits(forks, number):
    folder, results = forks
    (stopped, again), codes = results[f"kill {number}"], list(KILLS.values())[number]
    assert stopped["codes"] == [codes[1], codes[0]] and again["codes"] == [0, 0], (stopped, again)
    assert f"checkpoint-00000{codes[2]}" in again["stdout"][0].split("resuming from ")[1].split("\n")[0]
    if codes[0] == 0:
        assert f"stopped before the update of iteration {codes[2]}, and saved; resume with" in stopped["stdout"][0]
    assert contents(f"{folder}/kill {number}") == contents(f"{folder}/whole")
    assert "time/refill 0" in tiny.read_log(f"{folder}/whole/out")[1]


# ---------------------------------------------------------------------------------------------------------------------
# rewards that fail, bad input, sabotage

FAULTS = {  # a function of tiny.RULES -> what is said
    "raises": r"reward 'raises(_on_1)?' failed at \S+rules\.py, line \d+: KeyError: 'missing'$",
    "not_a_number": r"reward 'not_a_number(_on_1)?' gave nan, no finite number, for the row with the prompt '[\d+]+='$",
    "few": r"reward 'few(_on_1)?' must return \d numbers, .*; it returned list of shape \(1,\)$",
    "text": r"reward 'text(_on_1)?' must return \d+ numbers, one a response, as a 1-D tensor, array or list; it returned str$",
    "hangs": r"the rewards have not answered for 1 s; does one of them hang\? Raise reward_timeout if not$",
}
BAD = {  # name -> (keys, what is said)
    "groups": (dict(group_size=4), r"batch_size = 15 is not a multiple of group_size = 4; it counts responses, not prompts"),
    "one a group": (dict(group_size=1, batch_size=15), r"group_size = 1 .*out of range"),
    "minibatches": (dict(num_minibatches=16), r"num_minibatches = 16 would leave"),
    "unknown reward": (dict(reward_functions="qqq"),
                       r"unknown reward 'qqq'; there are accuracy, .*reward_model, and FILE\.py:FUNCTION"),
    "misspelt": (dict(reward_functions="1.0*acuracy"), r"unknown reward 'acuracy'; did you mean 'accuracy'\?"),
    "misspelt model": (dict(reward_functions="accuracy,reward_modle"),
                       r"unknown reward 'reward_modle'; did you mean 'reward_model'\?"),
    "no rewards": (dict(reward_functions=" "), r"wanted at least one reward"),
    "no such file": (dict(reward_functions="nowhere.py:f"), r"there is no file '.+nowhere\.py'"),
    "no answer": (dict(reward_functions="accuracy", prompts_path="MUTE"),
                  r"mute\.jsonl, row 2: the reward 'accuracy' needs the field"),
    "no held-out answer": (dict(reward_functions="accuracy", eval_path="MUTE"),
                           r"mute\.jsonl, row 2: the reward 'accuracy' needs the"),
    "no score head": (dict(reward_functions="reward_model", reward_path="POLICY"),
                      r"has no score head, it is a plain language model"),
    "no reward model": (dict(reward_path="nowhere"), r"nowhere: no such folder"),
    "short reward model": (dict(reward_path="SHORT"), r"it has \d tokens, and [^\n]* is 2;"),
    "cispo of sequences": (dict(loss_type="cispo", importance="sequence"), r"loss_type = 'cispo' has a weight a token"),
    "cispo with dual clip": (dict(loss_type="cispo", dual_clip=3.0), r"loss_type = 'cispo' .*dual_clip = 0"),
    "dual clip of 1": (dict(dual_clip=1.0), r"dual_clip = 1\.0 would stop bad tokens"),
    "k2 times the ratio": (dict(kl_estimator="k2", kl_correction=True), r"kl_correction is for k1 and k3"),
    "k1 as a loss": (dict(kl_estimator="k1"), r"kl_in = 'loss' with kl_estimator = 'k1' is no penalty: .*--kl_estimator=k2"),
    "corrected reward": (dict(kl_in="reward", kl_correction=True), r"kl_correction is for a KL in the loss"),
    "refill by another": (dict(refill_by="accuracy"), r"refill_by = 'accuracy' is none of the rewards, which are letters, rew"),
}
ON_TWO = ("groups", "misspelt", "no answer", "no such file")  # of these, also what two ranks say
SABOTAGE = {  # name -> (code, what is said, the policy's steps before)
    "sampler": ("""
import rollout
original = rollout.generate_in_parts
rollout.generate_in_parts = lambda policy, prompts, n, t, *rest, **k: original(policy, prompts, n, 1.2 * t, *rest, **k)
""", r"iteration 0: before any update, the log-probs of the sampler differ"),
    "reference": ("""
import parallel
original = parallel.broadcast_parameters
def broadcast(models):
    models = list(models)
    original(models)
    models[1].hf.lm_head.weight.data[5] += 0.1
parallel.broadcast_parameters = broadcast
""", r"iteration 0: before any update, the log-probs of the reference differ"),
    "forward": ("""
import model, torch
head = model.Model.logits
model.Model.logits = lambda self, states: head(self, states * (1.01 if torch.is_grad_enabled() else 1))
""", r"iteration 0: before any update, the log-probs of the training forward differ"),
    "gradient": ("""
import loss
response_logprobs = loss.response_logprobs
def spoilt(*args, **kwargs):
    logprobs, entropy = response_logprobs(*args, **kwargs)
    if RANK == 1 and logprobs.requires_grad:
        logprobs.register_hook(lambda gradient: gradient * float("nan"))
    return logprobs, entropy
loss.response_logprobs = spoilt
""", r"iteration 0: the gradient of policy's \S+ is not finite; stopped before the step"),
}
# With one minibatch the policy does not read: its first step's forward is compared with the sampler, and with the reference.
SABOTAGE |= {"forward, in one minibatch": (SABOTAGE["forward"][0], SABOTAGE["sampler"][1]),
             "reference, in one minibatch": SABOTAGE["reference"], "policy, in one minibatch": ("""
import model
head = model.Model.logits
model.Model.logits = lambda self, states: head(self, states * (float("nan") if states.requires_grad else 1))
""", r"iteration 0: old_logprobs is not finite \(first in response 0 of the batch\); stopped before the step")}
TOO_LONG = """
import errors, rewards
def too_long(*args):
    raise errors.BadInput("a response has 99 tokens in the reward model's tokenizer")
rewards.right_pad = too_long
"""


def where_it_fails(fault):
    """(ranks, rule): on the only rank, on rank 1 of two; and one fault on both ranks."""
    return [(1, fault), (2, f"{fault}_on_1")] + [(2, fault)] * (fault == "raises")


def failing_cases(world, folder):
    cases = {}
    tiny.jsonl(f"{folder}/mute.jsonl", [dict(prompt="1+2=", answer="3"), dict(prompt="1+3=")])
    paths = dict(MUTE=f"{folder}/mute.jsonl", POLICY=world.policy, SHORT=world.short_reward)
    for name, (keys, _) in BAD.items():
        args = world.grpo("out", **{k: paths.get(x, x) if isinstance(x, str) else x for k, x in keys.items()})
        for count in (1, 2) if name in ON_TWO else (1,):
            cases[f"{name} {count}"] = [one_run("grpo.py", *[args] * count)]
    cases["ppo without a reward model"] = [one_run("ppo.py", world.ppo("out", reward_functions=world.rule("letters")))]
    for fault in FAULTS:
        for count, name in where_it_fails(fault):
            args = world.grpo("out", reward_functions=f"accuracy,{world.rule(name)}", reward_timeout=1)
            cases[f"{name} {count}"] = [one_run("grpo.py", *[args] * count)]
    args = world.ppo("out", reward_functions=f"reward_model,{world.rule('raises_on_1')}")
    cases["ppo: raises_on_1"] = [one_run("ppo.py", args, args)]
    args = world.grpo("out")
    mine = world.grpo("out", reward_functions="/proc/self/fd/99/mine.py:mine")  # another folder on each rank
    for name, number in (("here", 1), ("there", 2)):
        os.makedirs(f"{folder}/{name}")
        with open(f"{folder}/{name}/mine.py", "w", encoding="utf-8") as f:
            f.write(f"def mine(batch):\n    return [{number}] * len(batch['rows'])\n")
    here, there = ((mine, OPEN.format(f"{folder}/{name}")) for name in ("here", "there"))
    cases["other rules on 1"] = [one_run("grpo.py", here, there)]
    cases["rules missing on 1"] = [one_run("grpo.py", here, mine)]
    args = world.grpo("out", reward_functions=world.rule("best"), eval_size=1)
    cases["a rank without responses"] = [one_run("grpo.py", args, args)]
    args = world.grpo("out", reward_functions=world.rule("letters"), reward_timeout=60)
    cases["patience"], cases["patience alone"] = [one_run("grpo.py", args, args)], [one_run("grpo.py", args)]
    args = world.grpo("out", reward_path=world.other_reward)
    cases["too long on 1"] = [one_run("grpo.py", args, (args, TOO_LONG))]
    cases["too long"] = [one_run("grpo.py", (args, TOO_LONG))]
    for name, (code, _) in SABOTAGE.items():
        args = world.grpo("out", eval_path="", **dict(num_minibatches=1) if "one" in name.split() else {})
        cases[name] = [one_run("grpo.py", (args, code), (args, code))]
    return cases


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_with_code_2_and_nothing_written(forks, name):
    folder, results = forks
    for count in (1, 2) if name in ON_TWO else (1,):
        result = results[f"{name} {count}"][0]
        assert result["codes"] == [2] * count and result["stderr"][1:] == [""] * (count - 1), result
        assert is_one_line(result["stderr"][0], BAD[name][1], "grpo.py"), result
        assert not os.path.exists(f"{folder}/{name} {count}/out")


def test_ppo_asks_for_a_value_model_that_can_be(forks):
    folder, results = forks
    result = results["ppo without a reward model"][0]
    assert result["codes"] == [2] and is_one_line(result["stderr"][0], "type --value_init=policy"), result
    assert not os.path.exists(f"{folder}/ppo without a reward model/out")



@pytest.mark.parametrize("fault", FAULTS)
def test_a_reward_that_fails_is_one_line_and_nobody_hangs(forks, fault):
    """On one rank, on both (one fault), and on rank 1 alone: rank 0 says so, and says where."""
    for count, name in where_it_fails(fault):
        result = forks[1][f"{name} {count}"][0]
        assert result["codes"] == [1] * count and result["stderr"][1:] == [""] * (count - 1), result
        where = "on rank 1: " if name.endswith("_on_1") else ""
        assert is_one_line(result["stderr"][0], f"grpo.py: error: {where}{FAULTS[fault]}".replace("$", r"\n"), "grpo.py"), result
        assert max(result["seconds"]) < 15


def test_a_reward_that_fails_on_rank_1_in_ppo(forks):
    result = forks[1]["ppo: raises_on_1"][0]
    assert result["codes"] == [1, 1] and result["stderr"][1] == ""
    assert is_one_line(result["stderr"][0], "error: on rank 1: reward 'raises_on_1' failed"), result


def test_a_response_that_one_rank_cannot_read(forks):
    """A refusal within the scoring of one rank reaches all: they do not wait for one that has left."""
    alone, both = forks[1]["too long"][0], forks[1]["too long on 1"][0]
    assert alone["codes"] == [2] and is_one_line(alone["stderr"][0], "error: a response has 99 tokens", "grpo.py")
    assert both["codes"] == [1, 1] and both["stderr"][1] == "", both
    assert is_one_line(both["stderr"][0], "error: on rank 1: a response has 99 tokens", "grpo.py"), both


def test_ranks_score_with_the_same_rules_or_not_at_all(forks):
    """The file of a rule is compared like that of the prompts; where one machine lacks it, that one says so."""
    other, missing = (forks[1][f"{name} on 1"][0] for name in ("other rules", "rules missing"))
    assert other["codes"] == missing["codes"] == [2, 2]
    assert is_one_line(other["stderr"][0], r"rank 1 differs from rank 0 in the content of \S+/mine\.py;", "grpo.py"), other
    assert other["stderr"][1] == "" and is_one_line(missing["stderr"][0], "rank 1 could not start", "grpo.py"), missing
    assert is_one_line(missing["stderr"][1], r"there is no file '.+mine\.py'", "grpo.py", where=" (rank 1)"), missing
    assert max(other["seconds"] + missing["seconds"]) < 15


def test_a_rank_without_responses_calls_no_rule(forks):
    result = forks[1]["a rank without responses"][0]
    assert result["codes"] == [0, 0], result


def test_rewards_may_not_take_longer_than_ranks_wait(forks):
    """Else a rule that hangs on one rank would end as a rank that is lost."""
    alone, both = forks[1]["patience alone"][0], forks[1]["patience"][0]
    assert alone["codes"] == [0] and both["codes"] == [2, 2], both
    assert is_one_line(both["stderr"][0], "reward_timeout = 60 must be below timeout = 60", "grpo.py"), both


@pytest.mark.parametrize("name", SABOTAGE)
def test_sabotage_stops_all_ranks_before_the_step(forks, name):
    folder, results = forks
    result = results[name][0]
    assert result["codes"] == [1, 1] and result["stderr"][1] == "", result
    assert is_one_line(result["stderr"][0], SABOTAGE[name][1], "grpo.py"), result
    assert not os.path.exists(f"{folder}/{name}/out/policy")


# ---------------------------------------------------------------------------------------------------------------------
# the twins


def source_of(script):
    with open(os.path.join(ROOT, script), encoding="utf-8") as f:
        return f.read()


@pytest.mark.parametrize("name", ["logprobs_of"])
def test_shared_helpers_are_word_for_word_alike(name):
    found = []
    for script in ("ppo.py", "grpo.py"):
        source = source_of(script)
        function, = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == name]
        found.append(ast.get_source_segment(source, function))
    assert found[0] == found[1]

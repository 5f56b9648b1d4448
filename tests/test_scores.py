"""
What becomes of a score before it is learned from: its zero, a missing EOS, the precision of the
head it comes from; and a value model that is trained alone at first. Expected numbers are from
paper. Whole runs with these keys are worked out once more in test_by_hand.py.
"""
import json
import os
import re
import statistics
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from data import batch_rows, right_pad
from engine.checkpoint import save_model
from engine.placement import Place, load_placed
from engine.tokenizers import load_tokenizer
from errors import BadInput, Stop
from loss import masked_whiten
from model import freeze, load_model
from rewards import Scorer, centering_shift, punish_missing_eos, score_sequences, zero_is_known
from rollout import add_up
from rows import demonstrated_row

import models_of_the_world
import tiny
from tiny import forked, measured, one_run

MOVES = (-15.0, 0.0, 15.0)  # of the reward model's zero


# --------------------------------------------------------------------------------------------------
# formulas


def test_a_missing_eos_is_replaced_or_subtracted():
    scores, finished = torch.tensor([2.0, -3.0, 4.0]), torch.tensor([True, False, False])
    assert punish_missing_eos(scores, finished, 1.5, "replace").tolist() == [2.0, -1.5, -1.5]
    assert punish_missing_eos(scores, finished, 1.5, "subtract").tolist() == [2.0, -4.5, 2.5]
    assert punish_missing_eos(scores, finished, 0.0, "replace").tolist() == [2.0, -3.0, 4.0]
    # GRPO: a response without a score, which also never ended, is punished only where replaced
    none = torch.tensor([torch.nan])
    assert punish_missing_eos(none, finished[1:2], 1.5, "replace").tolist() == [-1.5]
    assert punish_missing_eos(none, finished[1:2], 1.5, "subtract").isnan().all()


def test_the_shift_is_of_the_responses_that_ended():
    scores = torch.tensor([14.0, 16.0, -90.0])
    assert centering_shift(scores, torch.tensor([True, True, False])) == -15.0
    assert centering_shift(scores, torch.tensor([False] * 3)) == 20.0  # none has ended: all count


def test_who_says_where_the_zero_is(tmp_path):
    world = tiny.build(str(tmp_path))
    ours = load_model(world.reward, "scalar")
    assert zero_is_known(ours, "auto") and not zero_is_known(ours, "always")
    forget_shift(world.reward, world.reward)
    theirs = load_model(world.reward, "scalar")
    assert not zero_is_known(theirs, "auto") and zero_is_known(theirs, "never")


def test_rewards_are_whitened_with_and_without_their_mean():
    x = torch.tensor([[1.0, 3.0], [5.0, 99.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True], [True, False]])  # mean 3, variance (4 + 0 + 4) / 3
    a = 2 / (8 / 3) ** 0.5
    assert torch.allclose(masked_whiten(x, mask), torch.tensor([[-a, 0], [a, 0]]).double())
    kept = masked_whiten(x, mask, keep_mean=True)
    assert torch.allclose(kept, torch.tensor([[3 - a, 3], [3 + a, 0]]).double())


# --------------------------------------------------------------------------------------------------
# the scalar head under autocast


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_scalar_head_is_in_float32_under_autocast(dtype, tmp_path):
    """As many different scores as in float32: rounded, there would be a fraction of them."""
    world = tiny.build(str(tmp_path))
    reward_model = load_model(world.reward, "scalar")
    head = reward_model.hf.score.weight[0]
    with torch.no_grad():  # scores around 5, close together
        head.mul_(0.4)
        reward_model.hf.transformer.ln_f.bias.add_(5 * head / head.square().sum())
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 256, (160, 12), generator=generator)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    plain = score_sequences(reward_model, tokens, mask, 40)
    with torch.autocast("cpu", dtype):
        under = score_sequences(reward_model, tokens, mask, 40)
    assert under.dtype == torch.float32 and 4 < under.mean() < 6
    assert len(plain.unique()) == len(under.unique()) == 160
    if dtype == torch.bfloat16:
        assert len(under.to(dtype).unique()) < 80  # what a rounded head would leave
    assert (plain - under).abs().max() < 0.1
    states = reward_model.states(tokens)[:, -1].detach()  # the head alone: to the last bit
    with torch.autocast("cpu", dtype):
        found = reward_model.scalars(states)
    assert found.dtype == torch.float32 and torch.equal(found, reward_model.scalars(states))
    assert torch.allclose(found, states @ head + reward_model.score_shift)


def test_a_frozen_head_is_not_rounded(tmp_path):
    """Where frozen matrices are stored in 16 bits, the scalar head is not."""
    world = tiny.build(str(tmp_path))
    model = load_placed(world.reward, Place(), torch.device("cpu"), "scalar", matrices=torch.bfloat16)
    assert model.hf.transformer.h[0].mlp.c_fc.weight.dtype == torch.bfloat16
    assert torch.equal(model.hf.score.weight, load_model(world.reward, "scalar").hf.score.weight)


# --------------------------------------------------------------------------------------------------
# runs


def forget_shift(folder, to, by=0.0):
    """
    Copy a reward model of rm.py to a folder, where it has no score_shift any more; its scores are
    those with the shift, moved by so much: the bias of the last norm does it.
    """
    model, tokenizer = load_model(folder, "scalar", torch.float64), load_tokenizer(folder)
    head = model.hf.score.weight[0]
    with torch.no_grad():
        model.hf.transformer.ln_f.bias.add_((by + model.score_shift) * head / head.square().sum())
    save_model(to, model, tokenizer)
    config = os.path.join(to, "config.json")
    with open(config, encoding="utf-8") as f:
        given = json.load(f)
    del given["score_shift"]
    with open(config, "w", encoding="utf-8") as f:
        json.dump(given, f)


SETTINGS = dict(dtype="float64", eval_interval=1, missing_eos_penalty=1.0, reward_clip=2.0,
                scale_scores="running", keep_best=True)
COUNT = """
import rollout
sample_share = rollout.sample_share
def counted(*args):
    print("sampled for", args[5], args[6])
    return sample_share(*args)
rollout.sample_share = counted
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs of a tiny world; {name: (its out_dir, its result)}."""
    folder = str(tmp_path_factory.mktemp("scores"))
    os.makedirs(f"{folder}/world")
    world = tiny.build(f"{folder}/world")
    for move in MOVES:
        forget_shift(world.reward, f"{folder}/moved {move}", move)
    letters = world.rule("letters")
    grpo = {k: v for k, v in SETTINGS.items() if k != "scale_scores"}
    cases = {}

    def add(name, script, moves=(0.0,), ranks=1, code="", **keys):
        make = getattr(world, script.removesuffix(".py"))
        for move in moves:
            arguments = make("out", reward_path=f"{folder}/moved {move}", **keys)
            cases[f"{name} {move}"] = [one_run(script, *[(arguments, code)] * ranks)]

    for value_init in ("reward", "policy"):
        add(value_init, "ppo.py", MOVES, value_init=value_init, **SETTINGS)
    add("mix", "ppo.py", MOVES, reward_functions=f"0.7*reward_model,{letters}", value_init="policy",
        **SETTINGS)
    add("grpo", "grpo.py", MOVES, **grpo)
    add("no eval", "ppo.py", value_init="reward", **SETTINGS | dict(eval_path="", keep_best=False))
    add("ranks", "ppo.py", ranks=3, value_init="reward", **SETTINGS)
    add("roles", "ppo.py", ranks=3, value_init="reward", roles="train=1,generate=2", **SETTINGS)
    add("rules", "ppo.py", reward_functions=letters, value_init="policy", **SETTINGS)
    add("never", "ppo.py", (15.0,), center_scores="never", **SETTINGS)
    add("unmoved", "ppo.py", learning_rate=1e-12, value_learning_rate=1e-12, samples_to_log=9,
        **SETTINGS)
    add("warm-up", "ppo.py", critic_warmup_iters=2, checkpoint_interval=1, keep_checkpoints=9,
        ema_decay=0.5, **SETTINGS)
    shown = dict(prompts_path=world.sft_train, eval_path="", dtype="float64", max_iters=2)
    for name, more in (("less", dict(subtract_demonstration=True)), ("not less", {}),
                       ("less, ranks", dict(subtract_demonstration=True, zero_stage=3))):
        cases[name] = [one_run("ppo.py", *[world.ppo("out", **shown | more)] * (1 + ("ranks" in name)))]
    add("less", "ppo.py", (-15.0, 15.0), subtract_demonstration=True, value_init="policy", **shown)
    tiny.jsonl(f"{folder}/long.jsonl", [dict(prompt="1=", completion="1"), dict(prompt="1=", completion="1" * 30)])
    for name, more in (("bare rows", dict(prompts_path=world.rl_train)),
                       ("long shown", dict(prompts_path=f"{folder}/long.jsonl")),
                       ("rules alone", dict(reward_functions=letters, value_init="policy"))):
        keys = shown | dict(subtract_demonstration=True) | more
        cases[name] = [one_run("ppo.py", world.ppo("out", **keys))]
    add("half", "ppo.py", (15.0,), dtype="bfloat16", value_init="policy")
    add("too long", "ppo.py", critic_warmup_iters=3)
    arguments = world.ppo("out", reward_path=f"{folder}/moved 15.0", **SETTINGS)
    cases["resumed"] = [one_run("ppo.py", (arguments, tiny.stops(2))), one_run("ppo.py", arguments)]
    arguments = world.ppo("out", center_scores="always", **SETTINGS)
    cases["always"] = [one_run("ppo.py", arguments)]
    both = ",".join(f"{folder}/moved {move}" for move in (15.0, -15.0))
    arguments = world.ppo("out", reward_path=both, value_init="policy", **SETTINGS)
    cases["both"] = [one_run("ppo.py", *[(arguments, COUNT)] * 2)]
    results = forked(folder, cases)
    runs = {name: (f"{folder}/{name}/out", result[-1]) for name, result in results.items()}
    return runs | dict(world=world)


def succeeded(run):
    out, result = run
    assert set(result["codes"]) == {0}, result
    return out


def test_a_demonstration_whose_score_is_not_finite_stops_the_run():
    """Taken from a score it would make NaN, which says that no reward applies."""
    batch = dict(tokens=torch.zeros(2, 3), sampler_logprobs=torch.zeros(2, 1))
    batch |= {"reward/reward_model": torch.ones(2), "reward/demonstration": torch.tensor([0.5, torch.nan])}
    with pytest.raises(Stop, match="demonstration"):
        add_up(batch, None, [({}, [], 0, 0)] * 2, 3)


def test_equal_texts_have_equal_scores_where_their_rows_are_equal():
    """A judge may be shown the row's answer, and rules are: then one text may be right and wrong."""
    batch = dict(tokens=torch.tensor([[5, 6]] * 4), sampler_logprobs=torch.zeros(4, 1))
    batch["attention_mask"] = batch["tokens"] > 0
    batch["reward/judge"] = torch.tensor([1.0, -2.0, 1.0 + 1e-6, -2.0 - 1e-6])
    rows = [dict(prompt="1+1=", answer=answer) for answer in "2323"]
    scorer = SimpleNamespace(terms=[(1.0, "judge", None)], names=["judge"], say_once=print)
    scorer.add_up = lambda batch: Scorer.add_up(scorer, batch)
    scored = add_up(batch, scorer, [(row, [], slot, 0) for slot, row in enumerate(rows)], 0)
    assert scored["scores"].tolist() == [1.0, -2.0, 1.0, -2.0]


@pytest.mark.parametrize("name", ["policy", "mix", "grpo"])
def test_the_zero_of_a_reward_model_changes_nothing(runs, name):
    """(Texts that never end get -1, so without centring another zero is another task.)"""
    logs = {}
    for move in MOVES:
        out = succeeded(runs[f"{name} {move}"])
        records = [measured(record) for record in tiny.read_log(out)]
        shifts = [record.pop("objective/score_shift") for record in records[:-1]]
        assert len(set(shifts)) == 1
        logs[move] = shifts[0], records
    finished = [record["objective/finished"] for record in logs[0.0][1][:-1]]
    assert min(finished) < 1, "all responses end: this shows nothing"
    for move in (-15.0, 15.0):
        assert abs(logs[move][0] - logs[0.0][0] + move) < 1e-9
        assert tiny.alike(logs[move][1], logs[0.0][1], 1e-7)
        for model in ["policy"] if name == "grpo" else ["policy", "value_model"]:
            here, there = (f"{runs[f'{name} {m}'][0]}/{model}" for m in (move, 0.0))
            assert tiny.distance(here, there) < 1e-6


def test_nor_does_it_where_the_value_model_starts_with_it(runs):
    """The first iteration, that is: the bias that moves the zero here is trained later on."""
    first = [measured(tiny.read_log(succeeded(runs[f"reward {move}"]))[0]) for move in MOVES]
    for record in first:
        del record["objective/score_shift"], record["val/grad_norm"], record["loss/value"]
        del record["val/clipfrac"]
    assert tiny.alike(first[0], first[1], 1e-7) and tiny.alike(first[2], first[1], 1e-7)


def test_the_value_model_that_starts_as_the_reward_model_has_its_zero(runs):
    out = succeeded(runs["reward 15.0"])
    with open(f"{out}/value_model/config.json", encoding="utf-8") as f:
        saved = json.load(f)["score_shift"]
    assert saved == tiny.read_log(out)[0]["objective/score_shift"] and -20 < saved < -10
    with open(f"{succeeded(runs['policy 15.0'])}/value_model/config.json", encoding="utf-8") as f:
        assert json.load(f)["score_shift"] == 0


def test_the_first_rollout_scores_zero_where_it_ends(runs):
    """With the whole first batch finished or not, the mean that is logged is of all of it."""
    out, result = runs["policy 15.0"]
    first = tiny.read_log(out)[0]
    assert abs(first["objective/scores"]) < 3 and abs(first["eval/scores"]) < 3
    assert result["stdout"][0].count("scores are shifted so that this is 0") == 1


def test_an_evaluation_changes_no_zero_and_ranks_neither(runs):
    one = [measured(record) for record in tiny.read_log(succeeded(runs["reward 0.0"]))]
    none = [measured(record) for record in tiny.read_log(succeeded(runs["no eval 0.0"]))]
    for record in one:
        for key in [key for key in record if key.startswith("eval/")]:
            del record[key]
    assert one == none
    for model in ("policy", "value_model"):
        here = f"{runs['reward 0.0'][0]}/{model}"
        assert tiny.distance(here, f"{runs['no eval 0.0'][0]}/{model}") == 0
        for name in ("ranks 0.0", "roles 0.0"):
            assert tiny.distance(here, f"{succeeded(runs[name])}/{model}") < 1e-9


def test_the_members_of_an_ensemble_read_one_sample_for_their_zeros(runs):
    """Each gets the zero that it has alone; sampled are the zeros' batch, an evaluation and so on."""
    said = runs["both"][1]["stdout"][0] if succeeded(runs["both"]) else ""
    alone = [re.search("the reward model scores .* at first", runs[f"policy {move}"][1]["stdout"][0])
             for move in (15.0, -15.0)]
    assert re.findall("the reward model scores .* at first", said) == [found[0] for found in alone]
    assert re.findall("sampled for (.*)", said) == [
        "rollout 0", "eval 0", "rollout 0", "eval 0", "rollout 1", "eval 0", "rollout 2", "eval 0"]


def test_a_resumed_run_has_the_same_zero_to_the_last_bit(runs):
    whole, resumed = succeeded(runs["reward 15.0"]), succeeded(runs["resumed"])
    assert "resuming from" in runs["resumed"][1]["stdout"][0]
    assert "scores are shifted" not in runs["resumed"][1]["stdout"][0]
    logs = [[measured(r) for r in tiny.read_log(out)] for out in (whole, resumed)]
    assert logs[0] == logs[1]
    for model in ("policy", "value_model", "best_policy"):
        assert tiny.distance(f"{whole}/{model}", f"{resumed}/{model}") == 0


def test_rules_and_models_that_say_their_zero_are_left_alone(runs):
    assert "objective/score_shift" not in tiny.read_log(succeeded(runs["rules 0.0"]))[0]
    never = tiny.read_log(succeeded(runs["never 15.0"]))[0]
    assert never["objective/score_shift"] == 0 and never["objective/scores"] > 10
    always = tiny.read_log(succeeded(runs["always"]))[0]["objective/score_shift"]
    assert always != 0.25  # which is in its config


def test_evaluations_of_one_policy_have_one_score(runs):
    """
    Though the running deviation moves between them: all are shaped with that of the first one's
    scores, which are divided by it, are -1 where a response has not ended, and are between -2 and 2.
    """
    out = succeeded(runs["unmoved 0.0"])
    with open(f"{out}/samples.jsonl", encoding="utf-8") as f:
        samples = [json.loads(line) for line in f]
    first = [(s["scores"]["scores"], s["finished"]) for s in samples if s["iteration"] == 0]
    assert len(first) == 2 and len(samples) == 8  # of max_iters + 1 evaluations
    deviation = statistics.pstdev(score for score, _ in first)
    shaped = [min(max(score / deviation, -2), 2) if ended else -1 for score, ended in first]
    with open(f"{out}/checkpoint-000003/state.json", encoding="utf-8") as f:
        state = json.load(f)
    assert state["best_score"] == pytest.approx(statistics.mean(shaped), abs=1e-9)
    count, _, squares = state["score_moments"]
    assert (squares / count) ** 0.5 != pytest.approx(deviation, rel=0.01)


def test_the_policy_waits_while_the_value_model_warms_up(runs):
    out = succeeded(runs["warm-up 0.0"])
    start = f"{out}/checkpoint-000000"
    policies = [f"{out}/checkpoint-00000{i}/policy" for i in (1, 2, 3)]
    values = [f"{out}/checkpoint-00000{i}/value_model" for i in (1, 2, 3)]
    assert not os.path.exists(start)
    assert tiny.distance(policies[0], policies[1]) == 0 < tiny.distance(policies[1], policies[2])
    assert min(tiny.distance(values[0], values[1]), tiny.distance(values[1], values[2])) > 0
    records = tiny.read_log(out)
    moved = [record["policy/approx_kl"] > 1e-20 for record in records[:3]]
    assert moved == [False, False, True]
    assert len({r["policy/steps"] for r in records[:3]}) == 1  # of the value model, then of both
    code = runs["too long 0.0"][1]
    assert code["codes"] == [2] and "critic_warmup_iters = 3 of max_iters = 3" in code["stderr"][0]


def test_a_run_under_autocast(runs):
    records = tiny.read_log(succeeded(runs["half 15.0"]))
    assert len(records) == 4 and all(abs(r["objective/scores"]) < 3 for r in records[:-1])


def test_scores_less_those_of_the_demonstrations(runs):
    """The same texts: of the first iteration, the score is the plain one less the demonstration's."""
    less, plain = (tiny.read_log(succeeded(runs[name]))[0] for name in ("less", "not less"))
    assert less["objective/texts"] == plain["objective/texts"]
    world = runs["world"]
    model = load_model(world.reward, "scalar", torch.float64)
    with open(world.sft_train, encoding="utf-8") as f:
        rows = [json.loads(line) for line in f]
    scores = []
    for i in batch_rows(1, 0, 7, len(rows)):
        ids = [*rows[i]["prompt"].encode()]
        for piece in re.split("(</?think>)", rows[i]["completion"]):
            ids += {"<think>": [256], "</think>": [257]}.get(piece, [*piece.encode()])
        scores.append(model.scores(torch.tensor([ids + [258]]), torch.tensor([len(ids)])).item())
    mean = sum(scores) / len(scores)
    assert max(scores) - min(scores) > 0.1 and len(scores) == 7
    assert less["objective/reward/demonstration"] == pytest.approx(mean, abs=1e-9)
    assert less["objective/scores"] == pytest.approx(plain["objective/scores"] - mean, abs=1e-9)
    assert "objective/reward/demonstration" not in plain


def test_demonstrations_on_ranks_and_where_the_zero_moves(runs):
    records = [measured(r) for r in tiny.read_log(succeeded(runs["less"]))]
    ranks = [measured(r) for r in tiny.read_log(succeeded(runs["less, ranks"]))]
    assert tiny.alike(records, ranks, 1e-9)
    moved = [[measured(r) for r in tiny.read_log(succeeded(runs[f"less {by}"]))] for by in (-15.0, 15.0)]
    shifts = [[r.pop("objective/score_shift") for r in records[:-1]] for records in moved]
    assert shifts[0][0] == pytest.approx(shifts[1][0] + 30) and tiny.alike(*moved, 1e-7)
    # the demonstrations are the zero: of the first iteration's prompts they score 0
    assert abs(moved[0][0]["objective/reward/demonstration"]) < 1e-9


def test_demonstrations_that_are_not_there(runs):
    for name, said in (("bare rows", "line 1: subtract_demonstration wants in each row an answer to its prompt, as "
                                     "sft.py does: field 'completion' is missing; it has 'prompt', 'answer'"),
                       ("long shown", "row 2: 33 tokens of a reward model whose context has 32"),
                       ("rules alone", "subtract_demonstration is for learned scores")):
        out, result = runs[name]
        assert result["codes"] == [2] and said in result["stderr"][0], result
        assert result["stderr"][0].count("\n") == 1 and not os.path.exists(out)


USER, ANSWER = dict(role="user", content="u"), dict(role="assistant", content="a")
ON = dict(role="assistant", content="on")


@pytest.mark.parametrize("row, prompt, shown", [
    (dict(prompt="p", completion="c", answer="1"), "p", "c"),
    (dict(question="p", completion="c"), "p", "c"),
    (dict(prompt="p", completion=[ANSWER]), [dict(role="user", content="p")], [ANSWER]),
    (dict(prompt=[USER], completion="a"), [USER], [ANSWER]),
    (dict(prompt=[USER, ANSWER], completion="on"), [USER, ANSWER], [ON]),
    (dict(messages=[USER, ANSWER, USER, ON]), [USER], [ANSWER]),  # the first turn answers it
    (dict(prompt="u", messages=[USER, ANSWER]), [USER], [ANSWER]),
    (dict(system="s", messages=[USER, ANSWER]), [dict(role="system", content="s"), USER], [ANSWER]),
    (dict(conversations=[{"from": "human", "value": "u"}, {"from": "gpt", "value": "a"}]), [USER], [ANSWER]),
    (dict(instruction="i", output="o"), "### Instruction:\ni\n\n### Response:\n", "o")])
def test_demonstrations_of_every_kind(row, prompt, shown):
    made = demonstrated_row(row)
    assert (made["prompt"], made["completion"]) == (prompt, shown)
    assert made.get("answer") == row.get("answer")


@pytest.mark.parametrize("row, said", [
    (dict(prompt="p", answer="1"), "field 'completion' is missing"), (dict(prompt="p", completion=" "), "it is blank"),
    (dict(prompt=[USER], completion=""), "it is blank"), (dict(prompt="p", completion=3), "must be a string"),
    (dict(prompt="p", chosen="a", rejected="b"), "field 'completion' is missing"),
    (dict(prompt=[USER]), "field 'completion' is missing"),
    (dict(problem="p", instruction="i", output="o"), "and here it answers another one")])
def test_rows_without_a_demonstration(row, said):
    with pytest.raises(BadInput, match=f"^subtract_demonstration wants .*{said}"):
        demonstrated_row(row)


def test_a_demonstration_is_read_as_the_responses_are(tmp_path):
    """
    A reward model of rm.py reads the policy's tokens, and so the run's system prompt. It must read
    that before a demonstration, too: the truth is transformers', up to the end of the turn.
    """
    folder = models_of_the_world.make(tmp_path / "reward", "qwen2.5", head="scalar")
    with open(f"{folder}/config.json", encoding="utf-8") as f:
        config = json.load(f) | dict(score_shift=0.5)
    with open(f"{folder}/config.json", "w", encoding="utf-8") as f:
        json.dump(config, f)
    policy, reward = load_tokenizer(folder, dict(system_prompt="Be brief.")), load_tokenizer(folder)
    model = freeze(load_model(folder, "scalar"))
    keys = dict(reward_timeout=9, code_seconds=1, code_memory_mib=64, code_output_kib=1, dtype="float32",
                master_weights=True, micro_batch_size=2, micro_batch_tokens=0, subtract_demonstration=True,
                reward_ensemble="mean", reward_ensemble_coef=1.0)
    terms = [(1.0, "reward_model", None)]
    with ThreadPoolExecutor(1) as threads:
        scorer = Scorer(keys, terms, [model], policy, reward, threads, torch.device("cpu"))
        rows = [dict(prompt=[USER], completion=[ON]), dict(prompt=[USER, ANSWER, USER], completion=[ANSWER])]
        ids = [policy.encode_response(row["prompt"], "x") for row in rows]
        tokens, mask = right_pad(ids, policy.pad_id)
        batch = dict(rows=rows, prompts=["", ""], completions=["x", "x"], tokens=tokens, attention_mask=mask,
                     response_mask=mask[:, -1:], finished=torch.tensor([True, True]),
                     sampler_logprobs=torch.zeros(2, 1))
        said = scorer.score(batch, [scorer.start(batch, 1.0)], 2)
    theirs = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for row, got in zip(rows, said["reward/demonstration"], strict=True):
        messages = [dict(role="system", content="Be brief."), *row["prompt"], *row["completion"]]
        text = tokenizer.apply_chat_template(messages, tokenize=False).rstrip("\n")
        theirs.config.pad_token_id = None  # the end of the turn, at which rm.py reads, is its padding
        with torch.no_grad():
            want = theirs(torch.tensor([tokenizer(text)["input_ids"]])).logits.item() + 0.5
        assert got.item() == pytest.approx(want, abs=1e-4)

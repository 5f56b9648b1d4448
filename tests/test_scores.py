"""
What becomes of a score before it is learned from: its zero, a missing EOS, the precision of the
head it comes from; and a value model that is trained alone at first. Expected numbers are from
paper. Whole runs with these keys are worked out once more in test_by_hand.py.
"""
import json
import os
import statistics
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from engine.checkpoint import save_model
from engine.placement import load_placed
from engine.places import Place
from engine.tokenizers import load_tokenizer
from loss import masked_whiten
from model import load_model
from rewards import Scorer, centering_shift, punish_missing_eos, score_sequences
from rollout import score_batch

import tiny
from tiny import forked, measured, one_run

MOVES = (-15.0, 0.0, 15.0)  # of the reward model's zero
PLACEMENT = SimpleNamespace(device=torch.device("cpu"), autocast=nullcontext(), system=SimpleNamespace(
    micro_batch_tokens=0, reward_timeout=1, code_seconds=5))


# --------------------------------------------------------------------------------------------------
# formulas


def test_a_response_that_never_ends_scores_minus_the_penalty():
    scores, finished = torch.tensor([2.0, -3.0, torch.nan]), torch.tensor([True, False, False])
    assert punish_missing_eos(scores, finished, 1.5).tolist() == [2.0, -1.5, -1.5]
    assert punish_missing_eos(scores, finished, 0.0)[:2].tolist() == [2.0, -3.0]


def test_the_shift_is_of_the_responses_that_ended():
    scores = torch.tensor([14.0, 16.0, -90.0])
    assert centering_shift(scores, torch.tensor([True, True, False])) == -15.0
    assert centering_shift(scores, torch.tensor([False] * 3)) == 20.0  # none has ended: all count


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
    add("unmoved", "ppo.py", learning_rate=1e-12, value_learning_rate=1e-12, **SETTINGS)
    add("warm-up", "ppo.py", critic_warmup_iters=2, checkpoint_interval=1, keep_checkpoints=9,
        ema_decay=0.5, **SETTINGS)
    add("half", "ppo.py", (15.0,), dtype="bfloat16", value_init="policy")
    arguments = world.ppo("out", reward_path=f"{folder}/moved 15.0", **SETTINGS)
    cases["resumed"] = [one_run("ppo.py", (arguments, tiny.stops(2))), one_run("ppo.py", arguments)]
    cases["said"] = [one_run("ppo.py", world.ppo("out", **SETTINGS))]
    results = forked(folder, cases)
    runs = {name: (f"{folder}/{name}/out", result[-1]) for name, result in results.items()}
    return runs | dict(world=world)


def succeeded(run):
    out, result = run
    assert set(result["codes"]) == {0}, result
    return out


def test_equal_texts_have_equal_scores_where_their_rows_are_equal():
    """A judge may be shown the row's answer, and rules are: then one text may be right and wrong."""
    tokens = torch.tensor([[5, 6]] * 4)
    batch = dict(tokens=tokens, attention_mask=tokens > 0, response_mask=tokens[:, 1:] > 0, sampler_logprobs=torch.zeros(4, 1))
    rows = [dict(prompt="1+1=", answer=answer) for answer in "2323"]
    texts = SimpleNamespace(decode=str, decode_response=str)
    scorer = Scorer([(1.0, "judge", None)], None, None, texts, None, 1, PLACEMENT)
    scorer.score = lambda *_: {"reward/judge": torch.tensor([1.0, -2.0, 1.0 + 1e-6, -2.0 - 1e-6])}
    scored = score_batch(scorer, batch, [(row, [], slot, 0) for slot, row in enumerate(rows)], 0)
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
    said = tiny.read_log(succeeded(runs["said"]))[0]["objective/score_shift"]
    assert said == 0.25  # which is in its config


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


def test_a_run_under_autocast(runs):
    records = tiny.read_log(succeeded(runs["half 15.0"]))
    assert len(records) == 4 and all(abs(r["objective/scores"]) < 3 for r in records[:-1])



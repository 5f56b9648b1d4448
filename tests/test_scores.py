"""
The zero of a score, in runs: who has it, who keeps it. (Its size, a missing EOS, the running deviation, the best score and the
warm-up of the value model are worked out by hand in test_by_hand.py.)
"""
import json
import os
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from engine.checkpoint import save_model
from engine.placement import load_placed
from engine.places import Place
from engine.tokenizers import load_tokenizer
from model import load_model
from rewards import Scorer
from rollout import score_batch

import tiny
from tiny import forked, measured, one_run

PLACEMENT = SimpleNamespace(device=torch.device("cpu"), autocast=nullcontext(), system=SimpleNamespace(
    micro_batch_tokens=0, reward_timeout=1, code_seconds=5))


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
    forget_shift(world.reward, f"{folder}/uncentred", 15.0)
    letters = world.rule("letters")
    cases = {}

    def add(name, ranks=1, code="", **keys):
        keys = dict(reward_path=f"{folder}/uncentred", value_init="reward") | SETTINGS | keys
        cases[name] = [one_run("ppo.py", *[(world.ppo("out", **keys), code)] * ranks)]

    add("one")
    add("policy", value_init="policy", max_iters=1)
    add("no eval", eval_path="", keep_best=False)
    add("ranks", ranks=3)
    add("roles", ranks=3, roles="train=1,generate=2")
    add("rules", reward_functions=letters, value_init="policy", max_iters=1)
    add("said", reward_path=world.reward, max_iters=1)
    add("resumed", code=tiny.stops(2))
    cases["resumed"] += [cases["one"][0]]
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


def test_the_value_model_that_starts_as_the_reward_model_has_its_zero(runs):
    out = succeeded(runs["one"])
    with open(f"{out}/value_model/config.json", encoding="utf-8") as f:
        saved = json.load(f)["score_shift"]
    assert saved == tiny.read_log(out)[0]["objective/score_shift"] and -20 < saved < -10
    with open(f"{succeeded(runs['policy'])}/value_model/config.json", encoding="utf-8") as f:
        assert json.load(f)["score_shift"] == 0


def test_an_evaluation_changes_no_zero_and_ranks_neither(runs):
    one = [measured(record) for record in tiny.read_log(succeeded(runs["one"]))]
    none = [measured(record) for record in tiny.read_log(succeeded(runs["no eval"]))]
    for record in one:
        for key in [key for key in record if key.startswith("eval/")]:
            del record[key]
    assert one == none
    for model in ("policy", "value_model"):
        here = f"{runs['one'][0]}/{model}"
        assert tiny.distance(here, f"{runs['no eval'][0]}/{model}") == 0
        for name in ("ranks", "roles"):
            assert tiny.distance(here, f"{succeeded(runs[name])}/{model}") < 1e-9


def test_a_resumed_run_has_the_same_zero_to_the_last_bit(runs):
    whole, resumed = succeeded(runs["one"]), succeeded(runs["resumed"])
    assert "resuming from" in runs["resumed"][1]["stdout"][0]
    assert "scores are shifted" not in runs["resumed"][1]["stdout"][0]
    logs = [[measured(r) for r in tiny.read_log(out)] for out in (whole, resumed)]
    assert logs[0] == logs[1]
    for model in ("policy", "value_model", "best_policy"):
        assert tiny.distance(f"{whole}/{model}", f"{resumed}/{model}") == 0


def test_rules_and_models_that_say_their_zero_are_left_alone(runs):
    assert "objective/score_shift" not in tiny.read_log(succeeded(runs["rules"]))[0]
    said = tiny.read_log(succeeded(runs["said"]))[0]["objective/score_shift"]
    assert said == 0.25  # which is in its config

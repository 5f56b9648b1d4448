"""
tools/explain.py: its numbers are those of by_hand.py, which works them out with transformers'
models and plain loops; the run's folder stays as it is; bad input gets one line.

The runs here save a checkpoint at every iteration. The tool is given a copy that ends with the
second, so it must compute what the run itself has computed next, and the third has the weights
after that update.
"""
import hashlib
import json
import math
import os
import re
import shutil
from types import SimpleNamespace

import pytest

import by_hand
import tiny
from conftest import ROOT
from tiny import forked, one_run

TOOL = os.path.join(ROOT, "tools", "explain.py")
DONE = 2  # iterations that the copies of the runs have done
SEED = 1  # with which the response of PPO that is looked at has 5 tokens
BATCH = dict(seed=SEED, max_new_tokens=8, temperature=0.9, missing_eos_penalty=0.0,
             reward_clip=0.0, reward_tokenizer="tokenizer")
PPO = SimpleNamespace(**BATCH | dict(
    batch_size=7, mix=[(1.0, "reward_model")], missing_eos_penalty=1.0, kl_estimator="k1",
    gamma=1.0, lam=0.95, cliprange=0.2, whiten_rewards="none"))


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return tiny.build(str(tmp_path_factory.mktemp("world")))


@pytest.fixture(scope="module")
def runs(world, tmp_path_factory):
    """The folder of the runs: NAME/out, and NAME/cut, which has done two iterations only."""
    folder = str(tmp_path_factory.mktemp("runs"))
    keys = dict(seed=SEED, max_iters=4, checkpoint_interval=1, keep_checkpoints=9)
    rules = world.grpo("out", reward_functions="accuracy,0.1*format", max_iters=1)
    cases = dict(rules=[one_run("grpo.py", rules)], ppo=[one_run("ppo.py", world.ppo("out", **keys))],
                  sft=[one_run("sft.py", world.sft("out"))])
    for name, (result,) in forked(folder, cases).items():
        assert result["codes"] == [0], (name, result)
    cut = shutil.copytree(os.path.join(folder, "ppo", "out"), os.path.join(folder, "ppo", "cut"))
    for later in range(DONE + 1, 5):
        shutil.rmtree(os.path.join(cut, f"checkpoint-{later:06d}"))
    return folder


def contents(folder):
    """{file: sha256} of a folder, and the empty folders in it."""
    found = {}
    for parent, folders, files in os.walk(folder):
        for name in folders:
            found[os.path.join(parent, name)] = "a folder"
        for name in files:
            with open(os.path.join(parent, name), "rb") as f:
                found[os.path.join(parent, name)] = hashlib.sha256(f.read()).hexdigest()
    return found


def next_prompt(world, c):
    """The first prompt of the batch that the run has seen next, and the rows of the batch."""
    rows = read_rows(world.rl_train)
    count = c.batch_size // getattr(c, "group_size", 1)
    picked = [rows[i] for i in by_hand.prompts_of(c, DONE, count, len(rows))]
    return picked[0]["prompt"], picked


def read_rows(path):
    with open(path, encoding="utf-8") as f:
        return [json.loads(line) for line in f]


@pytest.fixture(scope="module")
def explained(world, runs):
    """Several calls of the tool: {name: result}; and the runs' files before and after them."""
    folder = os.path.join(runs, "explain")
    calls = dict(
        ppo=dict(run=f"{runs}/ppo/cut", prompt=next_prompt(world, PPO)[0], seed=SEED),
        ppo_over=dict(run=f"{runs}/ppo/out", prompt="12+34=", out="deep/ppo.png"),
        answered=dict(run=f"{runs}/rules/out", prompt="12+34=", answer="46"),
        unanswered=dict(run=f"{runs}/rules/out", prompt="12+34="),
        no_checkpoint=dict(run=world.policy, prompt="12+34="),
        supervised=dict(run=f"{runs}/sft/out", prompt="12+34="),
        too_long=dict(run=f"{runs}/ppo/out", prompt="1+" * 20))
    before = contents(runs)
    cases = {name: [one_run(TOOL, tiny.arguments(keys))] for name, keys in calls.items()}
    results = {name: result for name, (result,) in forked(folder, cases).items()}
    after = {path: sha for path, sha in contents(runs).items() if not path.startswith(folder)}
    return SimpleNamespace(results=results, folder=folder, before=before, after=after)


def printed(explained, name):
    result = explained.results[name]
    assert result["codes"] == [0], result["stderr"][0][-3000:]
    return result["stdout"][0]


def table(text, columns):
    """
    The table of tokens: a list of numbers for each column; "yes", "no" and "-" stay. The text of a
    token may have blanks, so the columns are counted from the right.
    """
    lines = text[text.index("# token "):].splitlines()[1:]
    cells = [line.split()[-columns:] for line in lines if line.strip() and "saved" not in line]
    return [[x if x in ("yes", "no", "-") else float(x) for x in column]
            for column in zip(*cells, strict=True)]


def close(shown, expected, digits=3):
    """Whether numbers that were printed with so many digits are the expected ones."""
    return len(shown) == len(expected) and all(
        abs(a - b) <= 0.51 * 10**-digits for a, b in zip(shown, expected, strict=True))


@pytest.fixture(scope="module")
def letters(monkeypatch_module):
    """by_hand's sampler, with the end and the rule of the tiny world."""
    monkeypatch_module.setattr(by_hand, "ENDS", (by_hand.EOS,))
    monkeypatch_module.setitem(by_hand.RULES, "letters",
                               lambda c, row, r: sum(ch.isascii() for ch in r.text) / 8)


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def models_of(world, run, value):
    """The models with which iteration 2 of a run begins, as transformers loads them."""
    folder = os.path.join(run, f"checkpoint-{DONE:06d}")
    return SimpleNamespace(
        policy=by_hand.language_model(os.path.join(folder, "policy")),
        reference=by_hand.language_model(world.policy), reward=by_hand.scalar_model(world.reward),
        value=by_hand.scalar_model(os.path.join(folder, "value_model")) if value else None)


def new_logprobs(run, r, c):
    """Log-probs of a response after the update: those of the run's next checkpoint."""
    policy = by_hand.language_model(os.path.join(run, f"checkpoint-{DONE + 1:06d}", "policy"))
    return [x.item() for x in by_hand.logprobs_of(policy, r.prompt, r.response, c.temperature)[0]]


def losses_of(ratios, advantages):
    """PPO's loss of each token, and whether the clip has taken its gradient."""
    losses, clipped = [], []
    for ratio, advantage in zip(ratios, advantages, strict=True):
        cut = min(max(ratio, 0.8), 1.2)
        losses.append(-min(ratio * advantage, cut * advantage))
        clipped.append("yes" if cut * advantage < ratio * advantage else "no")
    return losses, clipped


def test_the_numbers_of_ppo(world, runs, explained, letters):
    text, run = printed(explained, "ppo"), os.path.join(runs, "ppo", "out")
    models, (_, rows) = models_of(world, run, value=True), next_prompt(world, PPO)
    batch = [by_hand.respond(PPO, models, row, "rollout", DONE, slot)
             for slot, row in enumerate(rows)]
    raw_score = batch[0].score
    by_hand.finish_scores(PPO, batch, by_hand.Counter())
    by_hand.find_advantages(PPO, batch, 0.2)
    r = batch[0]
    assert len(r.response) == 5

    (old, ref, kl, reward, value, delta, raw, whitened, returns,
     new, ratio, clipped, loss) = table(text, 13)
    assert close(old, r.old) and close(ref, r.reference)
    assert close(kl, [p - q for p, q in zip(r.old, r.reference, strict=True)], 4)
    assert close(reward, r.rewards, 4) and close(value, r.values) and close(returns, r.returns)
    advantages, _ = by_hand.advantages_and_returns(r.rewards, r.values, 1.0, 0.95)
    assert close(raw, advantages) and close(whitened, r.advantages)
    following = [*r.values[1:], 0.0]
    deltas = [x + after - v for x, after, v in zip(r.rewards, following, r.values, strict=True)]
    assert close(delta, deltas)

    after = new_logprobs(run, r, PPO)
    ratios = [math.exp(a - b) for a, b in zip(after, r.old, strict=True)]
    losses, which = losses_of(ratios, r.advantages)
    assert close(new, after) and close(ratio, ratios) and close(loss, losses) and clipped == which
    assert "yes" in clipped and "no" in clipped and max(map(abs, ratios)) > 1.05

    assert f"score     {raw_score:.3f} = 1 * reward_model {raw_score:.3f}" in text
    assert f"shaped    {r.score:.3f}," in text
    assert "peak learning rate" not in text  # the run is not over


def test_the_folder_of_the_run_is_as_it_was(explained):
    assert explained.before == explained.after and len(explained.before) > 20


def test_a_run_that_is_over(explained):
    """It takes the peak learning rate and says so. The run does not have this prompt."""
    text = printed(explained, "ppo_over")
    assert "checkpoint-000004" in text and "peak learning rate" in text
    assert any(abs(ratio - 1) > 0.01 for ratio in table(text, 13)[10])
    assert text.endswith("saved deep/ppo.png\n")
    with open(os.path.join(explained.folder, "ppo_over", "deep", "ppo.png"), "rb") as f:
        assert f.read(8) == b"\x89PNG\r\n\x1a\n"


def test_answers_and_bad_input(explained):
    scores = re.compile(r"^score .* = 1 \* accuracy [01]\.000 \+ 0.1 \* format [01]\.000", re.MULTILINE)
    assert scores.search(printed(explained, "answered"))
    for name, said in (("unanswered", "--answer="), ("no_checkpoint", "checkpoint"), ("supervised", "ppo.py"),
                       ("too_long", "1+" * 20)):
        result = explained.results[name]
        assert result["codes"] == [2]
        assert len(result["stderr"][0].splitlines()) == 1 and said in result["stderr"][0]

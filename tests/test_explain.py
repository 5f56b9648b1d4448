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
import statistics
import struct
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
MORE = dict(importance_cap=2.0, entropy_coef=0.125, ptx_coef=3.0,  # beside PPO's own loss
            whiten_rewards="keep-mean", eval_path="")
GRPO = SimpleNamespace(**BATCH | dict(
    batch_size=15, group_size=3, mix=[(1.0, "letters"), (0.5, "reward_model")]))


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return tiny.build(str(tmp_path_factory.mktemp("world")))


@pytest.fixture(scope="module")
def runs(world, tmp_path_factory):
    """The folder of the runs: NAME/out, and NAME/cut, which has done two iterations only."""
    folder = str(tmp_path_factory.mktemp("runs"))
    keys = dict(seed=SEED, max_iters=4, checkpoint_interval=1, keep_checkpoints=9)
    short = dict(max_iters=1)
    grpo_runs = dict(
        grpo=keys, rules=short | dict(reward_functions="accuracy,0.1*format"),
        gspo=short | dict(importance="sequence", kl_coef=0.0, num_minibatches=1),
        cispo=short | dict(loss_type="cispo", max_refills=1, num_minibatches=1))
    cases = {name: [one_run("grpo.py", world.grpo("out", **k))] for name, k in grpo_runs.items()}
    cases |= dict(ppo=[one_run("ppo.py", world.ppo("out", **keys))],
                  sft=[one_run("sft.py", world.sft("out"))],
                  more=[one_run("ppo.py", world.ppo("out", **short | MORE, prompts_path=world.sft_train,
                                                    ptx_path=world.texts))])
    for name, (result,) in forked(folder, cases).items():
        assert result["codes"] == [0], (name, result)
    for name in ("ppo", "grpo"):
        cut = shutil.copytree(os.path.join(folder, name, "out"), os.path.join(folder, name, "cut"))
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
        grpo=dict(run=f"{runs}/grpo/cut", prompt=next_prompt(world, GRPO)[0], seed=SEED),
        ppo_over=dict(run=f"{runs}/ppo/out", prompt="12+34=", out="deep/ppo.png"),
        ppo_other_seed=dict(run=f"{runs}/ppo/out", prompt="12+34=", seed=2),
        grpo_over=dict(run=f"{runs}/grpo/out", prompt="12+34=", out="grpo.png"),
        gspo=dict(run=f"{runs}/gspo/out", prompt="12+34=", seed=3),
        cispo=dict(run=f"{runs}/cispo/out", prompt="12+34=", seed=3),
        answered=dict(run=f"{runs}/rules/out", prompt="12+34=", answer="46"),
        of_the_data=dict(run=f"{runs}/rules/out", prompt=read_rows(world.rl_val)[0]["prompt"]),
        more=dict(run=f"{runs}/more/out", prompt=read_rows(world.sft_train)[0]["prompt"]),
        unanswered=dict(run=f"{runs}/rules/out", prompt="12+34="),
        nowhere=dict(run=f"{runs}/none", prompt="12+34="),
        no_checkpoint=dict(run=world.policy, prompt="12+34="),
        supervised=dict(run=f"{runs}/sft/out", prompt="12+34="),
        empty=dict(run=f"{runs}/ppo/out", prompt=" "),
        too_long=dict(run=f"{runs}/ppo/out", prompt="1+" * 20),
        no_png=dict(run=f"{runs}/ppo/out", prompt="12+34=", out="explain.txt"),
        unwritable=dict(run=f"{runs}/ppo/out", prompt="12+34=", out="/proc/explain.png"))
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
    lines = text[text.index("# token "):text.index("sums of")].splitlines()[1:]
    cells = [line.split()[-columns:] for line in lines if line.strip()]
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

    words = re.sub(r"\s+", " ", text)
    right = "right" if r.text == rows[0]["answer"] else "wrong"
    assert (f" score {raw_score:.3f} = 1 * reward_model {raw_score:.3f}; the answer is {right} "
            in words)
    total = sum(r.rewards)
    assert f" rewards {total:.3f} = shaped score {r.score:.3f} - kl_coef 0.2 * KL " in words
    every = [a for one in batch
             for a in by_hand.advantages_and_returns(one.rewards, one.values, 1.0, 0.95)[0]]
    mean, deviation = statistics.mean(every), statistics.pstdev(every)
    assert (f"(raw - {mean:.3f}) / {deviation:.3f}: mean and deviation of all {len(every)} tokens "
            in words)
    assert "note" not in text  # the run is not over: its own learning rate


def test_the_shown_deltas_give_the_shown_advantages(explained):
    for name in ("ppo", "ppo_over"):
        columns = table(printed(explained, name), 13)
        delta, raw = columns[5], columns[6]
        advantage = 0.0
        for t in reversed(range(len(delta))):
            advantage = delta[t] + 0.95 * advantage
            assert abs(advantage - raw[t]) < 0.01  # rounding, up to 8 tokens of 0.0005


def test_the_numbers_of_grpo(world, runs, explained, letters):
    text, run = printed(explained, "grpo"), os.path.join(runs, "grpo", "out")
    models, (_, rows) = models_of(world, run, value=False), next_prompt(world, GRPO)
    group = [by_hand.respond(GRPO, models, rows[0], "rollout", DONE, 0, which)
             for which in range(3)]
    scores, r = [one.score for one in group], group[0]
    middle, deviation = statistics.mean(scores), statistics.stdev(scores)
    advantages = [(score - middle) / (deviation + 1e-4) for score in scores]

    begin, end = text.index("the group of 3 responses"), text.index("mean of the scores")
    shown = [line.split()[:5] for line in text[begin:end].splitlines()[2:]]
    assert close([float(cells[1]) for cells in shown], scores)
    assert close([float(cells[2]) for cells in shown], advantages)
    assert [int(cells[3]) for cells in shown] == [len(one.response) for one in group]
    assert [cells[4] for cells in shown] == ["yes" if one.finished else "no" for one in group]
    assert f"mean of the scores {middle:.3f}, deviation {deviation:.3f}" in text

    old, ref, kl, advantage, new, ratio, clipped, loss = table(text, 8)
    assert close(old, r.old) and close(ref, r.reference)
    assert close(advantage, [advantages[0]] * len(old))
    k3 = [math.exp(q - p) - 1 - (q - p) for p, q in zip(r.old, r.reference, strict=True)]
    assert close(kl, k3, 4)
    after = new_logprobs(run, r, GRPO)
    ratios = [math.exp(a - b) for a, b in zip(after, r.old, strict=True)]
    losses, which = losses_of(ratios, [advantages[0]] * len(ratios))
    assert close(new, after) and close(ratio, ratios) and close(loss, losses) and clipped == which
    assert max(abs(x - 1) for x in ratios) > 0.02


def test_relatives_of_grpo_have_their_own_ratio_and_loss(explained):
    text = printed(explained, "gspo")
    old, ref, kl, advantage, new, ratio, _, loss = table(text, 8)
    assert set(ref) == set(kl) == {"-"} and "reference" not in text[text.index("where the"):]
    mean = statistics.mean(a - b for a, b in zip(new, old, strict=True))
    assert len(old) > 2 and set(ratio) == {ratio[0]} and abs(ratio[0] - math.exp(mean)) < 0.01
    assert close(loss, losses_of(ratio, advantage)[0], 2)

    text = printed(explained, "cispo")
    old, _, _, advantage, new, ratio, clipped, loss = table(text, 8)
    cut = [min(max(x, 0.8), 1.2) for x in ratio]
    expected = [-a * w * x for a, w, x in zip(advantage, cut, new, strict=True)]
    assert len(old) > 2 and close(loss, expected, 1) and max(map(abs, loss)) > 1
    assert clipped == ["yes" if a != b else "no" for a, b in zip(cut, ratio, strict=True)]
    assert "max_refills = 0 here" in text


def test_the_folder_of_the_run_is_as_it_was(explained):
    assert explained.before == explained.after and len(explained.before) > 40


def test_a_run_that_is_over_takes_the_peak_learning_rate_and_says_so(explained):
    text = printed(explained, "ppo_over")
    assert "checkpoint-000004" in text and "learning rate 0.003" in text
    assert "this update has the peak learning rate" in re.sub(r"\s+", " ", text)
    assert any(abs(ratio - 1) > 0.01 for ratio in table(text, 13)[10])
    # GRPO's learning rate is constant: nothing to say
    assert "note" not in printed(explained, "grpo_over")


def test_the_prompt_is_what_is_answered(runs, explained, letters):
    """A prompt that the run has not: the policy answers it with the noise of the first place."""
    policy = by_hand.language_model(os.path.join(runs, "ppo", "out", "checkpoint-000004", "policy"))
    c = SimpleNamespace(**BATCH | dict(seed=1))
    prompt = by_hand.encode("12+34=", by_hand.MARKERS["tokenizer"])
    response = by_hand.sample(c, policy, prompt, "rollout", 4, 0, 0)
    logprobs, _ = by_hand.logprobs_of(policy, prompt, response, c.temperature)
    assert close(table(printed(explained, "ppo_over"), 13)[0], [x.item() for x in logprobs])


def test_what_few_runs_have_is_said(explained):
    """Where a key adds to a loss or a score, the formulas do not pretend that it is not there."""
    said, plain = (" ".join(printed(explained, name).split()) for name in ("more", "ppo_over"))
    for words in ("shaped score is added; then whitened over the batch (keep-mean)",
                  "each loss counts p(training) / p(sampler) times, at most 2 times",
                  "- entropy_coef 0.125 * the same of their entropy", "+ ptx_coef 3 * the mean loss on demonstrations"):
        assert words in said and words not in plain, words


def test_another_seed_is_another_response(explained):
    first, second = (table(printed(explained, name), 13) for name in ("ppo_over", "ppo_other_seed"))
    assert first[0] != second[0]


def test_the_answer_of_the_user_and_that_of_the_data(explained):
    for name in ("answered", "of_the_data"):
        text = printed(explained, name)
        assert re.search(r"^score .* = 1 \* accuracy [01]\.000 \+ 0.1 \* format [01]\.000; "
                         r"the answer is (right|wrong)$", text, re.MULTILINE)


@pytest.mark.parametrize("name", ["ppo", "grpo", "ppo_over", "answered", "gspo", "cispo"])
def test_the_page_is_plain_and_fits(name, explained):
    text = printed(explained, name)
    lines = text[text.index("one response of"):].splitlines()
    assert max(map(len, lines)) <= 120
    assert not any(line != line.rstrip() for line in lines)


@pytest.mark.parametrize("name, file", [("ppo_over", "deep/ppo.png"), ("grpo_over", "grpo.png")])
def test_the_picture(name, file, explained):
    assert printed(explained, name).endswith(f"saved {file}\n")
    with open(os.path.join(explained.folder, name, file), "rb") as f:
        png = f.read()
    assert png[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">II", png[16:24]) == (1920, 1080)
    assert 30_000 < len(png) < 1_000_000


@pytest.mark.parametrize("name, said", [
    ("unanswered", "prompt '12+34=': the run's reward 'accuracy' needs its 'answer'; type --answ"),
    ("nowhere", "there is no such folder; give the out_dir of a run of ppo.py or grpo.py"),
    ("no_checkpoint", "has no checkpoint; give the out_dir of a run of ppo.py or grpo.py"),
    ("supervised", "is a run of sft.py or rm.py, which sample no responses"),
    ("empty", 'prompt is empty; type --prompt="123+456="'),
    ("too_long", f"prompt '{'1+' * 20}': "
     "it has 40 tokens, and the room beside max_new_tokens in the smallest context of the models is 24;"),
    ("no_png", "out = 'explain.txt' must end with .png"),
    ("unwritable", "out = '/proc/explain.png' cannot be written"),
])
def test_bad_input_gets_one_line(name, said, explained):
    result = explained.results[name]
    assert result["codes"] == [2]
    assert len(result["stderr"][0].splitlines()) == 1 and said in result["stderr"][0]
    assert "explain-" not in result["stderr"][0]  # not the temporary folder

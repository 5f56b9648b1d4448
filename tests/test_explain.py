"""
tools/explain.py: its numbers are those of by_hand.py, which works them out with transformers' models and plain loops; the run's
folder stays as it is; bad input gets one line.

The run of PPO saves a checkpoint at every iteration. The tool is given a copy that ends with the second, so it must compute what
the run itself has computed next, and the third has the weights after that update.
"""
import math
import os
import pathlib
import re
import shutil
from types import SimpleNamespace

import pytest

import by_hand
import tiny
from tiny import forked, in_a_row, is_one_line, one_run

DONE = 2  # iterations that the copy of the run has done
PPO = SimpleNamespace(  # with this seed the response that is looked at has 5 tokens
    gaps=False, turns=False, scale_scores="none",
    seed=1, max_new_tokens=8, temperature=0.9, missing_eos_penalty=1.0, reward_clip=0.0, reward_tokenizer="tokenizer",
    batch_size=7, mix=[(1.0, "reward_model")], kl_estimator="k1", gamma=1.0, lam=0.95, cliprange=0.2, whiten_rewards="none",
    length_coef=0.0, lam_alpha=0.0)


@pytest.fixture(scope="module")
def runs(world, tmp_path_factory):
    """The folder of the runs: NAME/out, and ppo/cut, which has done two iterations only."""
    folder = str(tmp_path_factory.mktemp("runs"))
    keys = dict(seed=PPO.seed, max_iters=4, checkpoint_interval=1, keep_checkpoints=9)
    rules = world.grpo("out", reward_functions="accuracy,0.1*format", max_iters=1)
    shutil.copy(f"{world.root}/rules.py", f"{folder}/mine.py")
    coded = world.grpo("out", reward_functions=f"{folder}/mine.py:letters", max_iters=1)
    in_a_row(folder, dict(rules=one_run("grpo.py", rules), coded=one_run("grpo.py", coded), sft=one_run(
        "sft.py", world.sft("out")), ppo=one_run("ppo.py", world.ppo("out", **keys)))).succeeded()
    cut = shutil.copytree(f"{folder}/ppo/out", f"{folder}/ppo/cut")
    with open(f"{folder}/mine.py", "a", encoding="utf-8") as f:
        f.write(f"\nopen('{folder}/ran', 'a').close()\n")
    for later in range(DONE + 1, 5):
        shutil.rmtree(f"{cut}/checkpoint-{later:06d}")
    return folder


@pytest.fixture(scope="module")
def batch_rows(world):
    """The rows of the batch that the run of PPO has seen next."""
    rows = tiny.read_jsonl(world.rl_train)
    return [rows[i] for i in by_hand.prompts_of(PPO, DONE, PPO.batch_size, len(rows))]


def contents(folder):
    """{file: its bytes} of a folder."""
    return {str(path): path.read_bytes() for path in pathlib.Path(folder).rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def explained(world, runs, batch_rows):
    """Several calls of the tool: {name: result}, and their folder."""
    folder = os.path.join(runs, "explain")
    calls = dict(
        ppo=dict(run=f"{runs}/ppo/cut", prompt=batch_rows[0]["prompt"], seed=PPO.seed),
        ppo_over=dict(run=f"{runs}/ppo/out", prompt="12+34=", out="deep/ppo.png"),
        answered=dict(run=f"{runs}/rules/out", prompt="12+34=", answer="46"),
        unanswered=dict(run=f"{runs}/rules/out", prompt="12+34="),
        coded=dict(run=f"{runs}/coded/out", prompt="12+34="),
        named=dict(run=f"{runs}/coded/out", prompt="12+34=", reward_functions=f"{runs}/mine.py:letters"),
        no_checkpoint=dict(run=world.policy, prompt="12+34="),
        supervised=dict(run=f"{runs}/sft/out", prompt="12+34="),
        too_long=dict(run=f"{runs}/ppo/out", prompt="1+" * 20))
    before = contents(runs)
    cases = {name: [one_run("tools/explain.py", tiny.arguments(keys))] for name, keys in calls.items()}
    named = {"named": cases.pop("named")}
    results = {name: result for name, (result,) in forked(folder, cases).items()}
    assert not os.path.exists(f"{runs}/ran")  # no code that a folder names has run
    results |= {name: result for name, (result,) in forked(f"{folder}/again", named).items()}
    os.remove(f"{runs}/ran")
    after = {path: content for path, content in contents(runs).items() if not path.startswith(folder)}
    assert before == after and len(before) > 20  # the runs' folders are as they were
    return results, folder


def printed(explained, name):
    result = explained[0][name]
    assert result["codes"] == [0], result["stderr"][0][-3000:]
    return result["stdout"][0]


def table(text, columns):
    """The numbers of each column of the table of tokens, from the right: the text of a token may have blanks. "yes" is 1."""
    lines = text[text.index("# token "):].splitlines()[1:]
    cells = [line.split()[-columns:] for line in lines if line.strip() and "saved" not in line]
    return [[float(dict(yes=1, no=0).get(x, x)) for x in column] for column in zip(*cells, strict=True)]


def test_the_numbers_of_ppo(world, runs, explained, batch_rows, monkeypatch):
    monkeypatch.setattr(by_hand, "ENDS", (by_hand.EOS,))  # of the tiny world
    text, now, later = printed(explained, "ppo"), *(f"{runs}/ppo/out/checkpoint-{i:06d}" for i in (DONE, DONE + 1))
    models = SimpleNamespace(
        policy=by_hand.language_model(f"{now}/policy"), reference=by_hand.language_model(world.policy),
        reward=by_hand.scalar_model(world.reward), value=by_hand.scalar_model(f"{now}/value_model"))
    batch = [by_hand.respond(PPO, models, row, "rollout", DONE, slot) for slot, row in enumerate(batch_rows)]
    r, raw_score = batch[0], batch[0].score
    by_hand.finish_scores(PPO, batch, by_hand.Counter())
    by_hand.find_advantages(PPO, batch, 0.2)
    assert len(r.response) == 5
    raw, _ = by_hand.advantages_and_returns(r.rewards, r.values, 1.0, 0.95)
    deltas = [x + after - v for x, after, v in zip(r.rewards, [*r.values[1:], 0.0], r.values, strict=True)]
    trained = by_hand.language_model(f"{later}/policy")
    after = [x.item() for x in by_hand.logprobs_of(trained, r.prompt, r.response, PPO.temperature)[0]]
    ratios = [math.exp(a - b) for a, b in zip(after, r.old, strict=True)]
    cut = [min(max(ratio, 0.8), 1.2) for ratio in ratios]
    losses = [-min(ratio * a, c * a) for ratio, c, a in zip(ratios, cut, r.advantages, strict=True)]
    clipped = [float(c * a < ratio * a) for ratio, c, a in zip(ratios, cut, r.advantages, strict=True)]
    wanted = [r.old, r.reference, [p - q for p, q in zip(r.old, r.reference, strict=True)], r.rewards, r.values, deltas, raw,
              r.advantages, r.returns, after, ratios, clipped, losses]
    for number, (shown, expected) in enumerate(zip(table(text, len(wanted)), wanted, strict=True)):
        assert shown == pytest.approx(expected, abs=0.51e-4 if number in (2, 3) else 0.51e-3), number
    assert any(clipped) and not all(clipped) and max(map(abs, ratios)) > 1.05
    assert f"score     {raw_score:.3f} = 1 * reward_model {raw_score:.3f}" in text and f"shaped    {r.score:.3f}," in text
    assert "peak learning rate" not in text  # the run is not over


def test_a_run_that_is_over(explained):
    """It takes the peak learning rate and says so. The run does not have this prompt."""
    text = printed(explained, "ppo_over")
    assert "checkpoint-000004" in text and "peak learning rate" in text
    assert any(abs(ratio - 1) > 0.01 for ratio in table(text, 13)[10])
    with open(f"{explained[1]}/ppo_over/deep/ppo.png", "rb") as f:
        assert f.read(8) == b"\x89PNG\r\n\x1a\n"


def test_answers_and_bad_input(explained):
    assert "letters" in printed(explained, "named")
    assert re.search(r"\nscore .* = 1 \* accuracy [01]\.000 \+ 0.1 \* format [01]\.000", printed(explained, "answered"))
    for name, said in (("unanswered", "type --answer=ANSWER"), ("no_checkpoint", "checkpoint"), ("supervised", "ppo.py"),
                       ("too_long", "1+" * 20), ("coded", "--reward_functions=")):
        is_one_line(explained[0][name], "explain.py", [said])

"""
docs/diagnosis.md: what its last table says of a run is true of that run.

A row of the table is | NAME | `metric[i]` > x, ... |, where i is an iteration; without it all are
meant. RUNS has the run of this NAME: PPO or GRPO with one key, reward or line of the code that is
wrong, on a small toy: sums of two numbers from 0 to 4. As in the large one 3 of 10 demonstrations
think first, and these are right; of the others few are. And when a run says that all is lost.
"""
import importlib
import re
import sys

import pytest
import torch
import transformers
from options.alarms import has_no_gradient, how_broken, say_what_is_wrong, what_is_lost
from metrics import COLUMNS, evaluation_lines, iteration_line
from tiny import ROOT, of_copy, read_jsonl, run, well, write

sys.path.insert(0, f"{ROOT}/course")
clinic = importlib.import_module("clinic")  # it has the toy, and some of the faults
GRPO, PPO = (keys | dict(reward_functions="accuracy") for keys in (clinic.GRPO, clinic.PPO))
REWARDS = clinic.REWARDS | dict(same="[1.0 for text in texts]")  # of texts and their rows
RULE = """
def {}(batch):
    texts, rows = batch["completions"], batch["rows"]
    return {}
"""
with open(f"{ROOT}/docs/diagnosis.md", encoding="utf-8") as page:
    TABLE = page.read().partition("## The runs")[2]
ROWS = dict(re.findall(r"^\| (.+?) \| (`.+) \|$", TABLE, re.MULTILINE))
CLAIM = re.compile(r"`([\w/]+)(?:\[(-?\d+)\])?` ([<>=]) (-?[\d.]+(?:e-?\d+)?)")
RUNS = {  # name on the page: keys; and wrong, a line of the code: file, old, new
    "nothing wrong, PPO": PPO,
    "nothing wrong, GRPO": GRPO | dict(max_iters=4),
    "a learning rate 100 times too large": GRPO | dict(learning_rate=0.3),
    "a reward that is always 1": GRPO | dict(reward_functions="mine.py:same"),
    "a reward of length, `kl_coef` = 1e-9": PPO | dict(
        reward_functions="mine.py:longer", kl_coef=1e-9, max_iters=5),
    "a reward for one answer to all prompts": GRPO | dict(
        reward_functions="mine.py:two", learning_rate=1e-2, kl_coef=1e-9),
    "`kl_coef` = 100": PPO | dict(kl_coef=100.0),
    "a penalty of the wrong sign, `kl_coef` = 0.3": PPO | dict(
        kl_coef=0.3, max_iters=4, wrong=clinic.FAULTS["F"][-1]),
    "`value_learning_rate` = 1e-9": PPO | dict(value_learning_rate=1e-9),
    "old log-probs of now": GRPO | dict(wrong=clinic.FAULTS["H"][-1]),
    "gradients that are never set to 0": PPO | dict(wrong=clinic.FAULTS["I"][-1]),
    "`min` in the place of `max`, PPO of six passes": PPO | dict(ppo_epochs=6, max_iters=2, wrong=(
        "ppo.py", "torch.max(pg_losses1, pg_losses2)", "torch.min(pg_losses1, pg_losses2)")),
    "a sampler that keeps its first weights, bfloat16": GRPO | dict(
        dtype="bfloat16", eval_interval=2, max_iters=4, wrong=(
            "grpo.py", "batch = sample_batch(  # COLLECTIVE\n        policy",
            "batch = sample_batch(  # COLLECTIVE\n        ref_policy")),
}


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """The folder of the small toy's data, rewards and SFT model."""
    folder = str(tmp_path_factory.mktemp("toy"))
    assert transformers.GPT2LMHeadModel  # imported once, before the forks
    clinic.write_toy(folder)
    write(f"{folder}/mine.py", "import random\n" + "".join(
        RULE.format(name, scores) for name, scores in REWARDS.items()))
    well("sft.py", folder, clinic.SFT)
    return folder


def test_the_table_has_each_run():
    assert ROWS.keys() == RUNS.keys()
    for claims in ROWS.values():  # nothing is said that is not tried
        assert not CLAIM.sub("", claims).strip(", "), claims


@pytest.mark.parametrize("name", RUNS)
def test_a_run_shows_what_the_page_says(toy, tmp_path, name):
    how, relations = {}, {">": float.__gt__, "<": float.__lt__, "=": float.__eq__}
    keys = RUNS[name] | dict(out_dir=f"{tmp_path}/out")
    script, wrong = keys.pop("script"), keys.pop("wrong", None)
    stale = name.startswith("a sampler that keeps its first weights")
    if "eval/" not in ROWS[name] and not stale:
        keys["eval_path"] = ""  # nothing is said of its evaluations
    if wrong:
        clinic.copy_program(f"{tmp_path}/copy", wrong)
        how["before"] = of_copy(f"{tmp_path}/copy")
        script = f"{tmp_path}/copy/{script}"
    result = run(script, toy, keys, **how)
    assert result.codes == [0], result
    log = read_jsonl(f"{tmp_path}/out/log.jsonl")
    for metric, i, relation, x in CLAIM.findall(ROWS[name]):
        values = [record[metric] for record in log if metric in record]
        for value in [values[int(i)]] if i else values:
            assert relations[relation](float(value), float(x)), (metric, values)
    broken = "the policy is broken" in result.out[0]
    assert broken == (name == "a learning rate 100 times too large"), result.out[0]
    if stale:  # the evaluations' texts never change, and the run warns when the gap comes
        texts = {}
        for row in read_jsonl(f"{tmp_path}/out/samples.jsonl"):
            texts.setdefault(row["iteration"], []).append(row["text"])
        assert len(texts) > 1 and all(some == texts[0] for some in texts.values())
        assert "the sampler's log-probs differ" in result.out[0]


# what a run itself says, in 80 columns

def test_lines_fit_and_samples_are_questions_with_their_answers():
    record = {metric: 98765.4 for metric, _ in COLUMNS.values()} | {"iteration": 1952}
    line = iteration_line(record, 1953, 5000.0)
    assert len(line) <= 80 and line.startswith("iter 1952 of 1953  score") and "left" in line
    huge = {"objective/scores": -2674999974444509691904.0, "objective/kl": 1.5, "iteration": 0}
    assert "  score -2.7e+21  kl 1.50  " in iteration_line(huge, 2, 0.0)
    figures = {"eval/scores": 1e30, "eval/thinks": 0.0, "eval/accuracy": 0.0}
    assert evaluation_lines(0, figures, []) == "eval 0: scores 1e+30  accuracy 0.000"
    assert evaluation_lines(0, {"eval/thinks": 0.01}, []) == "eval 0: thinks 0.010"
    for prompt, text, finished, asked, shown in (
            ([dict(role="user", content="Is 3\n\n even?")], " no\n", True, "> Is 3 even?", "no"),
            ("\x1b[2J", "", True, r"> \x1b[2J", "[empty]"),
            (f"a {'x' * 999}", "\u6f22" * 99, False, "> a xx", "\u6f22")):  # each takes two columns
        sample = dict(prompt=prompt, text=text, finished=finished)
        first, *lines = evaluation_lines(3, {"eval/kl": 0.5}, [sample]).split("\n")
        assert first == "eval 3: kl 0.500" and max(map(len, lines)) <= 80
        assert lines[0].startswith(f"    {asked}") and lines[1].startswith(f"      {shown}")


@pytest.mark.parametrize("kl, length, moved, ends, first, broken", [
    (378, 48, 30, 0.0, 1.0, True), (None, 48, 5, 0.1, 0.9, True), (30, 48, 0, 0.55, 0.9, True),
    (16.7, 44, 0.13, 0.96, 1.0, False),  # reward hacking, of README
    (1.3, 2, 0.1, 1.0, 0.99, False),  # one word that it is sure of now
    (400, 8000, 0.001, 0.2, 0.9, False),  # long thoughts that are cut off
    (None, 48, 0.01, 0.2, 0.8, False), (100, 48, 0, 0.0, 0.0, True)])
def test_when_a_policy_is_broken(kl, length, moved, ends, first, broken):
    record = {"objective/kl": kl, "objective/length": length, "policy/approx_kl": moved,
              "objective/finished": ends}
    found = how_broken(record, first)
    assert bool(found) == broken and ("docs/diagnosis.md" in found) == broken


@pytest.mark.parametrize("figures, named, words", [
    (dict(finished=1.0), [], []),
    (dict(finished=0.03), ["cut"], ["97%", "max_new_tokens"]),
    (dict(finished=0.5, flat_groups=0.5, scored=0.5), [], []),
    (dict(finished=1.0, flat_groups=0.9, accuracy=0.01), ["flat"], ["90%", "1% of the answers"]),
    (dict(finished=1.0, flat_groups=1.0, accuracy=1.0, score_std=0), ["flat"], [
        "all scores of the batch are equal", "100% of the answers are right"]),
    (dict(finished=1.0, flat_groups=1.0, scored=0.0, accuracy=1.0), ["unscored"], ["100%"]),
    (dict(finished=1.0, flat_groups=1.0), ["flat"], ["100%", "diagnosis.md"]),
    (dict(finished=0.25, scored=0.0), ["cut", "unscored"], ["100% of the responses have no"])])
def test_what_most_of_a_batch_is_lost_to(figures, named, words):
    found = what_is_lost({f"objective/{name}": x for name, x in figures.items()})
    said = " ".join(found.values())
    assert [*found] == named and all(word in said for word in words)


@pytest.mark.parametrize("figures, columns, clean_steps, said", [
    ({}, {}, 0, True), ({"policy/grad_norm": 1e-30}, {}, 0, False),
    ({"policy/steps": 0}, {}, 0, False),  # nothing was to be learned
    ({"policy/clipfrac": 0.3}, {}, 0, False),  # the clip may have taken it away
    ({}, dict(advantages=torch.zeros(2, 3)), 0, False),
    ({}, dict(counted=torch.zeros(2, 3, dtype=torch.bool)), 0, False),
    ({}, {}, -1, False)])  # an overflow of float16
def test_when_a_gradient_of_0_is_a_fault(figures, columns, clean_steps, said):
    """(How it is said, and once: test_fork_state.py.)"""
    record = {"policy/steps": 4, "policy/grad_norm": 0.0, "policy/clipfrac": 0.0}
    batch = dict(advantages=torch.ones(2, 3), response_mask=torch.ones(2, 3, dtype=torch.bool))
    state = {"run/clean_steps": clean_steps}
    assert has_no_gradient(record | figures, state, batch | columns) == said


def test_an_iteration_is_one_line(capsys):
    """Whatever is wrong with it, and once."""
    record = {"objective/finished": 0.1, "objective/length": 9, "objective/flat_groups": 0.9,
              "policy/steps": 0, "loss/policy": 0, "objective/kl": 0.0}
    state = {"run/finished": 1.0, "run/broken": "", "run/said": []}
    lines = []
    for i, kl in enumerate((0.0, 0.0, 99.0, 99.0)):
        say_what_is_wrong(record | {"objective/kl": kl}, state, i)
        lines.append(capsys.readouterr().out)
    assert [line.count("\n") for line in lines] == [1] * 4
    assert all(line.count("nothing to learn") == 1 for line in lines)
    assert [line.startswith("warning: ") for line in lines] == [True, False, True, False]
    assert "90%" in lines[0] and "cut" in lines[0] and "broken" in lines[2]
    taught = {"objective/finished": 1.0, "objective/length": 9, "policy/steps": 4}
    say_what_is_wrong(taught, {"run/finished": 1.0, "run/broken": "x", "run/said": []}, 0)
    assert capsys.readouterr().out == ""

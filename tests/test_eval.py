"""tools/eval.py: its formulas against counting and by hand, and its numbers against what is in its own JSONL."""
import collections
import itertools
import json
import math
import os
import shutil
import statistics

import pytest
import torch
from safetensors.torch import save_file

import tiny
from tiny import arguments, forked, is_one_line, one_run, read_json, read_jsonl, read_text
from tools.figures import best_of_k, majority, majority_at_k, mean_and_error, pass_at_k

# ---------------------------------------------------------------------------------------------------------------------
# formulas


def test_pass_at_k_is_the_share_of_all_subsets_with_a_right_one():
    for n in range(1, 8):
        for right in range(n + 1):
            for k in range(1, n + 1):
                subsets = list(itertools.combinations([1] * right + [0] * (n - right), k))
                assert pass_at_k(n, right, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


@pytest.mark.parametrize("scores", [[5, 5, 1, 0, 2], [0.5, -1, 2, 2, 2, 7], [4]])
def test_best_of_k_is_the_mean_over_all_subsets(scores):
    """Of equal scores any may be taken: the mean of their values."""
    values = [10 * i + 1 for i in range(len(scores))]
    for k in range(1, len(scores) + 1):
        found = []
        for subset in itertools.combinations(range(len(scores)), k):
            best = max(scores[i] for i in subset)
            found.append(statistics.mean(values[i] for i in subset if scores[i] == best))
        assert best_of_k(scores, values, k) == pytest.approx(statistics.mean(found), abs=1e-12)


@pytest.mark.parametrize("answers, place", [
    (["7", "8", "8"], 1),
    (["0.5", "8", "1/2", "9"], 0),  # equal numbers are one answer
    (["8", "No", "no", "9"], 1), (["8", "5", "x + y = 5"], 1), (["8", "5 clips", "5"], 1), (["8", "5 cats", "5 dogs", "8"], 0),
    (["8", "7", "7", "8"], 0),  # a tie: whose first member came first
    (["", "<think>5", "", "<think>5", "5"], 4),  # no answers have no vote
    (["", "<think>5"], None),
    ([], None),
])
def test_majority(answers, place):
    assert majority(answers) == place


def test_majority_at_k():
    answers, right = ["7", "8", "8", "7", "", "9", "7"], [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0]
    assert majority_at_k(answers, right, 3) == 0.5  # 7 8 8 is wrong; of 7 "" 9 the first one, 7, is right
    assert majority_at_k(answers, right, 2) == 1 / 3  # 7 8 is right; 8 7 and "" 9 are wrong
    assert majority_at_k(answers, right, 7) == 1  # 7 three times, 8 twice
    assert majority_at_k(["", ""], [0.0, 0.0], 2) == 0


@pytest.mark.parametrize("values, mean, error", [
    ([0, 1, 1, 1], 0.75, 0.49),  # 1.96 * 0.5 / 2: the squares add up to 0.75, over 3, 0.5; over the root of 4
    ([1, 2, 3], 2, 1.1316),  # 1.96 * 1 / 1.7321
    ([3, 3, 3, 3, 8], 4, 1.96),  # 1.96 * 2.2361 / 2.2361
    ([-1, 1], 0, 1.96)])  # 1.96 * 1.4142 / 1.4142
def test_a_mean_and_its_interval(values, mean, error):
    """1.96 standard errors of the mean, by the unbiased variance; of one value there is none."""
    assert mean_and_error(values) == pytest.approx((mean, error), abs=1e-4)
    assert math.isnan(mean_and_error(values[:1])[1])


# ---------------------------------------------------------------------------------------------------------------------
# from end to end

SCORES = "accuracy", "reward/letters", "reward/length", "reward/reward_model", "scores"  # of "one"


@pytest.fixture(scope="module")
def done(world, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("eval"))
    tiny.add_qwen(world)
    tiny.jsonl(f"{folder}/no_answers.jsonl", [dict(prompt="1+1=")])
    tiny.jsonl(f"{folder}/tasks.jsonl", [row | ({} if i == 2 else dict(task="ab"[i % 2]))
                                         for i, row in enumerate(read_jsonl(world.rl_val))])
    # as if eval.py had written it; and a file of others under the name of the figures
    tiny.jsonl(f"{folder}/read.jsonl", [dict(policy="p", mode="greedy", row=0, sample=0, prompt="1+1=", answer="2")])
    tiny.jsonl(f"{folder}/notes.json", [dict(theirs=1)])
    keys = dict(policies=f"{world.policy},{world.policy}/../policy2", prompts_path=world.rl_val, samples=3, max_new_tokens=8,
                batch_size=5, micro_batch_size=2, reward_path=world.other_reward, timeout=60, reward_timeout=30, out="eval",
                reward_functions=f"2*{world.rule('letters')},length", device_type="cpu")
    os.symlink("policy", f"{world.root}/policy2")  # the same policy by another name: all is a tie

    shutil.copytree(world.policy, f"{world.root}/near")  # a policy that often says the same
    weights, generator = tiny.read_weights(world.policy), torch.Generator().manual_seed(0)
    save_file({n: t + 0.02 * torch.randn(t.shape, generator=generator) for n, t in weights.items()},
              f"{world.root}/near/model.safetensors", metadata=dict(format="pt"))

    for name, keys_of_run in dict(short=dict(max_new_tokens=3), longer=dict(max_new_tokens=6), moved=None, stopped=dict(
            max_new_tokens=8, stop_strings="['1', '2', '3']", system_prompt=None)).items():  # policies of runs
        shutil.copytree(world.policy, f"{folder}/runs/{name}/policy")
        file = f"{folder}/runs/{name}/{'config.json' if keys_of_run else 'policy/README.md'}"  # of one the card alone is left
        with open(file, "w", encoding="utf-8") as f:
            f.write(json.dumps(keys_of_run) if keys_of_run else "Settings:\n\n    max_new_tokens = 5\n")

    def call(ranks=1, **more):
        return [one_run("tools/eval.py", *[arguments(keys | more)] * ranks)]

    wrong = dict(
        nothing=dict(policies=" "), head=dict(reward_path=world.policy), column=dict(by="tusk"),
        read=dict(prompts_path="../read.jsonl", out="../read", policies="nowhere", reward_path="nowhere"),
        notes=dict(out="../notes"), data=dict(out=f"{world.root}/sft_val"),
        task=dict(reward_functions="code"), long=dict(max_new_tokens=31),
        # the second policy is wrong: that is said before the first one answers
        gone=dict(policies=f"{world.policy},{folder}/nowhere"))
    lengths = {name: call(policies=f"{folder}/runs/{name}/policy", max_new_tokens=given, limit=5)
               for name, given in (("short", 0), ("moved", 0), ("longer", 2))}
    lengths["stopped"] = call(policies=f"{folder}/runs/stopped/policy", max_new_tokens=0)
    lengths["both"] = call(2, policies=",".join(f"{folder}/runs/{name}/policy" for name in ("short", "longer")), max_new_tokens=0)
    cases = lengths | {"one": call() * 2, "two": call(2), "plain": call(
        policies=world.policy, reward_functions="", reward_path="", prompts_path=f"{folder}/no_answers.jsonl", top_k=1)}
    cases["tasks"] = call(2, prompts_path=f"{folder}/tasks.jsonl", by="task", reward_path="")
    cases["other"] = call(policies=f"{world.policy},{world.qwen}", reward_functions=world.rule("letters"), reward_path="",
                           right_by="letters")
    cases["near"] = call(policies=f"{world.policy},{world.root}/near", prompts_path=world.rl_train, samples=4, batch_size=7,
                         micro_batch_size=5)
    results = forked(folder, cases | {name: call(**more) for name, more in wrong.items()})
    first, again = results["one"]  # the same once more replaces its files
    assert first["codes"] == again["codes"] == [0], again
    _, records = read(results, "one")  # the same once more, where the second sample of each prompt is right
    tiny.jsonl(f"{folder}/right.jsonl", [dict(prompt=r["prompt"], answer=r["answer"].strip() or "0") for r in records if (
        r["policy"], r["mode"], r["sample"]) == (records[0]["policy"], "sampled", 1)])
    return tiny.Runs(folder, results | forked(folder, {"right": call(
        prompts_path=f"{folder}/right.jsonl", policies=world.policy, reward_functions="", reward_path="")}))


def read(done, name):
    """The figures and the records of an evaluation."""
    return read_json(f"{done.folder}/{name}/eval.json"), read_jsonl(f"{done.folder}/{name}/eval.jsonl")


def test_two_ranks_make_the_same_files(done):
    result, = done["two"]
    assert result["codes"] == [0, 0], result
    for file in ("eval.json", "eval.jsonl"):
        one, two = (read_text(f"{done.folder}/{name}/{file}") for name in ("one", "two"))
        assert one == two and one
    table = [line.split() for line in result["stdout"][0].splitlines()]
    mean = read(done, "two")[0]["policies"]["policy"]["sampled pass@2"]["mean"]
    assert ["sampled", "pass@2", f"{mean:.3f}"] in [words[:3] for words in table]


def test_the_figures_are_those_of_the_samples(done):
    """Computed once more from the JSONL, in another way."""
    figures, records = read(done, "one")
    assert len(records) == 2 * 12 * (1 + 3) and figures["prompts"] == 12
    policy = records[0]["policy"]
    mine = [r for r in records if r["policy"] == policy]
    for mode, count in (("greedy", 1), ("sampled", 3)):
        part = [r for r in mine if r["mode"] == mode]
        assert sorted((r["row"], r["sample"]) for r in part) == [(i, j) for i in range(12) for j in range(count)]
        its = {k.removeprefix(f"{mode} "): v for k, v in figures["policies"][policy].items() if k.startswith(mode)}
        for key in ("length", "finished"):
            assert its[key]["mean"] == pytest.approx(statistics.mean(r[key] for r in part))
        for name in SCORES:
            assert its[name]["mean"] == pytest.approx(statistics.mean(r["scores"][name] for r in part))
            prompts = [statistics.mean(r["scores"][name] for r in part if r["row"] == row) for row in range(12)]
            assert its[name]["error"] == pytest.approx(1.96 * statistics.stdev(prompts) / 12**0.5)
    for r in mine:
        scores = r["scores"]
        letters, length, model = (scores[f"reward/{name}"] for name in ("letters", "length", "reward_model"))
        assert letters == pytest.approx(sum(ch.isascii() for ch in r["text"]) / 8)
        assert scores["scores"] == pytest.approx(2 * letters + length + model)
    best = {f"best@{x} {name}" for x in (1, 2, 3) for name in SCORES}
    assert {f"{what}@{x}" for what in ("pass", "majority") for x in (1, 2, 3)} | best == {k for k in its if "@" in k}
    by_row = [[r["scores"] for r in part if r["row"] == row] for row in range(12)]
    for name in ("scores", "reward/letters"):  # of each pair of samples that of the higher sum
        pairs = [[max(pair, key=lambda s: s["scores"])[name] for pair in itertools.combinations(row, 2)] for row in by_row]
        assert its[f"best@2 {name}"]["mean"] == pytest.approx(statistics.mean(map(statistics.mean, pairs)))
        assert its[f"best@1 {name}"]["mean"] == pytest.approx(statistics.mean(s[name] for row in by_row for s in row))
    assert its["pass@1"] == its["accuracy"]
    assert len({r["text"] for r in mine if r["mode"] == "sampled"}) > 12


@pytest.mark.parametrize("name, longest", dict(short=3, moved=5, longer=2, both=6).items())
def test_responses_are_as_long_as_those_of_the_run(done, world, name, longest):
    """Unless the command line says another length; of several runs the longest. And a limit takes rows from all over the file."""
    assert set(done[name][0]["codes"]) == {0}, done[name]
    table, records = read(done, name)
    assert max(record["length"] for record in records) == longest == table["config"]["max_new_tokens"]
    rows = sorted({record["row"] for record in records})
    if name != "both":
        edges = [12 * i // 5 for i in range(6)]
        assert table["prompts"] == 5 and [sum(row >= edge for edge in edges) for row in rows] == [1, 2, 3, 4, 5]
        asked = read_jsonl(world.rl_val)
        assert all(record["prompt"] == asked[record["row"]]["prompt"] for record in records)


def test_figures_of_each_task(done):
    """They are means over its prompts; a row without the field is a task of its own."""
    found, records = read(done, "tasks")
    task = {row: "None" if row == 2 else "ab"[row % 2] for row in {r["row"] for r in records}}
    assert {value: its["prompts"] for value, its in found["groups"].items()} == collections.Counter(task.values())
    for value, its in found["groups"].items():
        for name, figures in its["policies"].items():
            lengths = [r["length"] for r in records if task[r["row"]] == value and (r["policy"], r["mode"]) == (name, "sampled")]
            assert figures["sampled length"]["mean"] == pytest.approx(sum(lengths) / len(lengths), abs=1e-12)
    assert done["tasks"][0]["stdout"][0].count("with task = 'a'") == 1


def test_stop_strings_are_those_of_the_run(done):
    result, = done["stopped"]
    assert result["codes"] == [0] and "as in its run, stop_strings = " in result["stdout"][0], result
    _, records = read(done, "stopped")
    assert not any(set(record["text"][:-1]) & set("123") for record in records)
    assert any(record["text"][-1:] in "123" and record["finished"] and 1 < record["length"] < 8 for record in records)


def test_the_majority_is_not_the_best(done):
    figures, records = read(done, "right")
    its, = figures["policies"].values()
    voted, any_right = [], []
    for row in range(12):
        samples = [r for r in records if (r["mode"], r["row"]) == ("sampled", row)]
        answers = [r["answer"] for r in samples if r["answer"].strip() and "<think>" not in r["answer"]]
        winner = collections.Counter(answers).most_common(1)[0][0] if answers else None  # of a tie the first one
        voted.append(max([r["scores"]["accuracy"] for r in samples if r["answer"] == winner], default=0.0))
        any_right.append(max(r["scores"]["accuracy"] for r in samples))
    assert its["sampled majority@3"]["mean"] == pytest.approx(statistics.mean(voted))
    assert its["sampled pass@3"]["mean"] == pytest.approx(statistics.mean(any_right))
    assert statistics.mean(any_right) > statistics.mean(voted)


def test_a_policy_against_itself_is_a_tie(done):
    """Both policies have the same noise, so their samples are the same, prompt by prompt."""
    duel, = read(done, "one")[0]["win_rates"]
    assert (duel["win_rate"], duel["error"]) == (0.5, 0)
    assert (duel["by"], duel["responses"], duel["prompts"]) == ("scores", "sampled", 12)


def test_equal_responses_of_two_policies_are_a_tie(done):
    """A reward model's last bits depend on the texts beside a text."""
    scores, writers = {}, {}
    for r in read(done, "near")[1]:
        said = r["row"], r["text"], r["finished"], r["length"]
        assert scores.setdefault(said, r["scores"]) == r["scores"], r
        assert r["scores"]["scores"] == pytest.approx(2 * r["scores"]["reward/letters"] + r["scores"]["reward/length"]
                                                      + r["scores"]["reward/reward_model"])
        writers.setdefault(said, set()).add(r["policy"])
    assert sum(len(names) == 2 for names in writers.values()) > 20


def test_a_policy_against_another_one(done):
    """Who wins is counted once more, over all pairs of samples; right is where the reward is 1."""
    figures, records = read(done, "other")
    duel, = figures["win_rates"]
    assert (duel["policy"], duel["against"], duel["by"]) == ("policy", "qwen", "reward/letters")
    of = {name: [[r["scores"]["reward/letters"] for r in records if (r["policy"], r["mode"], r["row"]) == (name, "sampled", row)]
                 for row in range(12)] for name in ("policy", "qwen")}
    won = [statistics.mean(1.0 if a > b else 0.5 if a == b else 0.0 for a, b in itertools.product(ours, theirs))
           for ours, theirs in zip(*of.values(), strict=True)]
    assert duel["win_rate"] == pytest.approx(statistics.mean(won)) != 0.5
    assert duel["error"] == pytest.approx(1.96 * statistics.stdev(won) / 12**0.5)
    for name, values in of.items():
        right = statistics.mean(x == 1 for row in values for x in row)
        assert figures["policies"][name]["sampled pass@1"]["mean"] == pytest.approx(right)
        assert any(0 < x < 1 for row in values for x in row)


def test_without_answers(done):
    result, = done["plain"]
    assert result["codes"] == [0], result
    assert "has no answers" in result["stdout"][0]
    figures, records = read(done, "plain")
    its, = figures["policies"].values()
    assert len(records) == 4 and len({r["text"] for r in records}) == 1  # with top_k = 1 a sample is the greedy response
    assert not any("@" in key or "accuracy" in key for key in its) and "sampled length" in its


@pytest.mark.parametrize("name, words", dict(
    read="../read.jsonl", nothing="policies", head="score", notes="notes.json", data="sft_val.jsonl",
    task="'tests'", long="row 1", column="tusk", gone="nowhere").items())
def test_bad_input_is_one_line(done, name, words):
    result, = done[name]
    is_one_line(result, "tools/eval.py", [words])
    assert not [file for file in os.listdir(f"{done.folder}/{name}") if "eval" in file]
    assert " responses\n" not in result["stdout"][0]

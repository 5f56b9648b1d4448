"""tools/eval.py and sample.py: all figures counted once more from the responses that they leave."""
import ast
import collections
import itertools
import json
import math
import os
import re
import shlex
import shutil
import statistics
import sys
from types import SimpleNamespace

import errors
import pretend
import pytest
from tiny import (Started, assert_one_line, jsonl, keys_of, read_jsonl, run, said_by, typed, well,
                  write)
from tools.runs import ASKED, JUDGED, as_in_run, estimate, split_paths, system_message_of

SCORES = ["accuracy", "reward/letters", "reward/length", "reward/reward_model", "scores"]


def tool(name, folder, keys):
    """A tool, called in the folder, which may refuse."""
    return Started(f"tools/{name}.py", typed(keys), str(folder)).wait()


@pytest.fixture(scope="module")
def keys(world):
    """Two policies, three rewards, several batches."""
    return dict(
        policies=f"{world.policy},{world.older}", prompts_path=world.rl_train, samples=4,
        max_new_tokens=6, batch_size=9, micro_batch_size=2, reward_path=world.other, out="eval",
        reward_functions=f"2*{world.rules}:letters,length,reward_model", device_type="cpu",
        timeout=60, reward_timeout=30)


def evaluated(folder, keys, **how):
    """What tools/eval.py has left in the folder, and what rank 0 has printed."""
    said = said_by("tools/eval.py", folder, keys, **how)
    with open(f"{folder}/eval.json") as f:
        return SimpleNamespace(**json.load(f), said=said,
                               records=read_jsonl(f"{folder}/eval.jsonl"))


@pytest.fixture(scope="module")
def done(keys, tmp_path_factory):
    return evaluated(tmp_path_factory.mktemp("eval"), keys)


def of_prompts(done, policy, mode, score):
    """For each prompt the scores of its responses, or what `score` names of them."""
    found = collections.defaultdict(list)
    for record in done.records:
        if (record["policy"], record["mode"]) == (policy, mode):
            found[record["row"]].append((record | record["scores"])[score])
    return [found[row] for row in sorted(found)]


def same(found, values):
    """An estimate is the mean of a number for each prompt, 1.96 standard errors, an interval."""
    assert found["mean"] == pytest.approx(statistics.mean(values))
    assert found["error"] == pytest.approx(1.96 * statistics.stdev(values) / len(values)**0.5)
    if set(values) <= {0, 1}:
        assert 0 <= found["low"] < found["high"] <= 1
    else:
        assert [found["low"], found["high"]] == pytest.approx(
            [found["mean"] - found["error"], found["mean"] + found["error"]])


def test_the_interval_of_a_share():
    """
    Wilson's: each end p solves |share - p| = 1.96 sqrt(p (1 - p) / n), its own standard error. So
    for 0 of n the end is z^2 / (n + z^2).
    """
    its = estimate([0] * 12)
    assert [its["low"], its["high"]] == pytest.approx([0, 1.96**2 / (12 + 1.96**2)], abs=1e-9)
    for n in (1, 2, 3, 7, 100, 5000):
        for right in {0, 1, n // 3, n // 2, n - 1, n}:
            its = estimate([1.0] * right + [False] * (n - right))
            assert 0 <= its["low"] <= its["mean"] <= its["high"] <= 1 and its["low"] < its["high"]
            for p in (its["low"], its["high"]):
                assert abs(right / n - p) == pytest.approx(
                    1.96 * (p * (1 - p) / n) ** 0.5, abs=1e-9), (right, n)
    assert estimate([0.5] * 3) == dict(mean=0.5, error=0, wilson=False, low=0.5, high=0.5)
    assert estimate([7.0]) == dict(mean=7, error=None, wilson=False, low=None, high=None)


def test_no_figure_is_printed_without_its_interval(keys, tmp_path):
    """
    Of one prompt: nothing is right, which is no 0 without a doubt; a length has no error. It is 1
    here, and no share.
    """
    said = evaluated(tmp_path, keys | dict(reward_functions="accuracy,length", samples=2,
                                           reward_path="", limit=1, max_new_tokens=1)).said
    lines = re.findall(r"(?m)^((?:greedy|sampled) .*?)  +(\S.*)$", said)
    assert len(lines) >= 10
    for name, cells in lines:
        either = r"-?[\d.]+ (±([\d.]+|\?)|\([\d.]+ to [\d.]+\))"
        assert re.fullmatch(rf"{either} +{either}", cells), (name, cells)
    assert re.match(r"0.000 \(0.000 to 0.793\)", dict(lines)["greedy accuracy"])
    assert "±?" in dict(lines)["greedy length"]


def test_the_figures_are_those_of_the_responses(done, world):
    assert done.prompts == 9 and list(done.policies) == ["policy", "older"]
    whole = collections.Counter((r["policy"], r["mode"], r["row"]) for r in done.records)
    assert len(whole) == 2 * 2 * 9 and set(whole.values()) == {1, 4}
    for r in done.records:
        scores, prompt = r["scores"], world.rows["rl_train"][r["row"]]
        assert r["prompt"] == prompt["prompt"] and 1 <= r["length"] <= 6
        assert scores["reward/letters"] == pytest.approx(sum(c in "abcd" for c in r["text"]) / 4)
        assert scores["scores"] == pytest.approx(
            2 * scores["reward/letters"] + scores["reward/length"] + scores["reward/reward_model"])
        assert scores["accuracy"] in (0, r["text"].strip() == prompt["answer"])  # behind a think, 0
    for policy, its in done.policies.items():
        for mode, name in itertools.product(("greedy", "sampled"), [*SCORES, "length", "finished"]):
            values = of_prompts(done, policy, mode, name)
            same(its[f"{mode} {name}"], list(map(statistics.mean, values)))


def test_the_best_of_k_and_wins_by_enumeration(done):
    """Of each set of k samples the best by the scores; of equal ones the mean. A tie is half."""
    sums = {name: of_prompts(done, name, "sampled", "scores") for name in done.policies}
    assert any(len(set(scores)) < 4 for each in sums.values() for scores in each)
    for policy, its in done.policies.items():
        for k, name in itertools.product((2, 4), SCORES):
            values = []
            for scores, own in zip(sums[policy], of_prompts(done, policy, "sampled", name),
                                   strict=True):
                best = [statistics.mean(own[i] for i in some if scores[i] == max(
                    scores[j] for j in some)) for some in itertools.combinations(range(4), k)]
                values.append(statistics.mean(best))
            same(its[f"sampled best@{k} {name}"], values)
    duel, = done.win_rates
    same(duel["wins"], [statistics.mean(1.0 if a > b else 0.5 if a == b else 0.0
                                        for a, b in itertools.product(*pair))
                        for pair in zip(*sums.values(), strict=True)])
    assert (duel["policy"], duel["against"]) == ("policy", "older") and 0 < duel["wins"]["mean"] < 1


def test_two_ranks_find_the_same(done, keys, tmp_path):
    two = evaluated(tmp_path, keys, ranks=2, before=pretend.begin)
    for a, b in zip(done.records, two.records, strict=True):
        assert a | dict(scores=0) == b | dict(scores=0)
        assert a["scores"] == pytest.approx(b["scores"], abs=1e-5)
    assert "saved" not in (tmp_path / "stdout-1").read_text()


def test_right_answers_are_counted(done, keys, world, tmp_path):
    """Rows whose answer is what some samples say."""
    said = of_prompts(done, "policy", "sampled", "answer")
    rows = [row | dict(answer=answers[i % 4] or "nothing", kind="ab"[i > 3])
            for i, (row, answers) in enumerate(zip(world.rows["rl_train"], said, strict=True))]
    files = [jsonl(tmp_path / "a.jsonl", rows[:4]), jsonl(tmp_path / "b.jsonl", rows[4:])]
    found = evaluated(tmp_path, keys | dict(
        prompts_path=",".join(files), policies=world.policy, reward_functions="accuracy",
        reward_path="", by="source"))
    truths = of_prompts(found, "policy", "sampled", "accuracy")
    assert of_prompts(found, "policy", "sampled", "answer") == said
    assert 0 < sum(map(sum, truths)) < 36
    its = found.policies["policy"]
    for k in (2, 4):
        same(its[f"sampled pass@{k}"], [statistics.mean(
            any(some) for some in itertools.combinations(right, k)) for right in truths])
        voted = []
        for texts, right in zip(said, truths, strict=True):
            groups = [[text for text in texts[i:i + k] if text] for i in range(0, 4, k)]
            winners = [collections.Counter(group).most_common(1) for group in groups]
            voted.append(statistics.mean(right[texts.index(won[0][0])] if won else 0
                                         for won in winners))
        same(its[f"sampled majority@{k}"], voted)
    assert found.groups.keys() == {"a", "b"}
    for kind, group in found.groups.items():
        picked = [truths[i] for i, row in enumerate(rows) if row["kind"] == kind]
        assert group["prompts"] == len(picked)
        same(group["policies"]["policy"]["sampled accuracy"], list(map(statistics.mean, picked)))


@pytest.fixture(scope="module")
def trained(world, tmp_path_factory):
    """A run in which much is unlike the defaults: out_dir."""
    return well("grpo.py", tmp_path_factory.mktemp("trained"), keys_of(
        world, "grpo.py", max_iters=1, eval_size=0, environment=f"{world.rules}:talks",
        reward_functions=f"environment,0.5*{world.rules}:letters", stop_strings="['y', 'bb']",
        temperature=0.9, max_new_tokens=14, max_turns=3, seed=4, reward_timeout=77))


def test_zeros_and_empty_keys_of_runs_are_theirs(tmp_path, capsys):
    """A run without an eval_path: not the toy's file; seed 0: not seed 1."""
    def asked(**runs):
        for name, keys in runs.items():
            (tmp_path / name).mkdir(exist_ok=True)
            write(tmp_path / name / "config.json", json.dumps(dict(out_dir=name) | keys))
        paths = ",".join(f"{tmp_path}/{name}/policy" for name in runs)
        given = as_in_run([f"--policies={paths}"], "policies", "", ASKED | JUDGED)
        return {name: value for name, (value, _) in given.items()}

    none = dict(seed=0, eval_path="", fields="", max_prompt_tokens=0, stop_strings="")
    some = dict(seed=5, eval_path="e.jsonl", fields="", stop_strings="x")
    empty = dict(seed=0, prompts_path="", fields="", max_prompt_tokens=0, stop_strings="")
    assert asked(one=none) == empty
    assert asked(one=dict(seed=3, fields="a>prompt", val_path="v.jsonl")) == dict(
        seed=3, fields="a>prompt")  # of sft.py: it has no eval_path
    capsys.readouterr()
    assert asked(one=none, two=some) == empty | dict(prompts_path="e.jsonl", stop_strings="x")
    said = capsys.readouterr().out  # one seed for all of them
    assert "two/config.json" in said and "seed=5" in said and "stop_strings" not in said


def test_the_system_message_of_a_run(tmp_path):
    """That of its first row, in any layout; no file, no run, or a text: none."""
    led = [dict(role="system", content="be kind"), dict(role="user", content="a")]
    rows, texts = (jsonl(tmp_path / f"{name}.jsonl", [{"q": prompt}, {"q": "x"}])
                   for name, prompt in (("led", led), ("texts", "a")))
    assert system_message_of(f"{tmp_path}/policy") == []
    for keys, found in ((dict(train_path=rows), 1), (dict(prompts_path=f"0.5*{rows},{texts}"), 1),
                        (dict(prompts_path=texts), 0), ({}, 0), (dict(prompts_path="gone"), 0)):
        write(tmp_path / "config.json", json.dumps(dict(out_dir="a", fields="q>prompt") | keys))
        assert system_message_of(f"{tmp_path}/policy") == led[:found], keys


def test_an_evaluation_is_that_of_the_training(trained, tmp_path, monkeypatch):
    """What is not typed is the run's: sample 0 of each prompt is what its last evaluation saw."""
    keys = dict(policies=f"{trained}/policy", out="eval")
    found = [r for r in evaluated(tmp_path, keys | dict(samples=2, trust_code=True)).records
             if (r["mode"], r["sample"]) == ("sampled", 0)]
    seen = [r for r in read_jsonl(f"{trained}/samples.jsonl") if r["iteration"] == 1]
    assert len(found) == len(seen) == 3 and any(len(r["messages"]) > 2 for r in seen)
    for ours, theirs in zip(found, seen, strict=True):
        for key in ("row", "text", "finished", "length", "messages"):
            assert ours[key] == theirs[key], key
        for key in ("reward/environment", "reward/letters", "scores"):
            assert ours["scores"][key] == pytest.approx(theirs["scores"][key], abs=1e-9)
    for folder in "policy", "checkpoint-000001/policy":
        asked = as_in_run(["--trust_code=True", "--temperature=0.5"], "policies",
                          f"{trained}/{folder}", ASKED)
        wanted = dict(max_turns=3, reward_timeout=77, max_new_tokens=14)
        assert {name: asked[name][0] for name in wanted} == wanted and "temperature" not in asked
    monkeypatch.setenv("HOME", os.path.dirname(trained))
    home = as_in_run(["--policies=~/out/policy", "--trust_code=True"], "policies", "none", ASKED)
    assert (home["max_turns"][0], home["max_new_tokens"][0]) == (3, 14)
    typed_one = evaluated(tmp_path, keys | dict(
        samples=0, max_new_tokens=3, limit=2, environment="", reward_functions="length"))
    assert [r["length"] <= 3 and "messages" not in r for r in typed_one.records] == [True] * 2


def test_a_blank_between_policies(world):
    with pytest.raises(errors.BadInput, match="commas between"):
        split_paths(f"{world.policy} {world.tied}", "policies")


def test_samples_with_scores(world, trained, tmp_path):
    """Of a file, with the score of a reward model; of standard input; with an environment."""
    keys = dict(policy_path=world.policy, max_new_tokens=6, device_type="cpu")
    some = keys | dict(prompts=world.rl_train, limit=2, samples=3)
    said, plain = (said_by("tools/sample.py", tmp_path, some | more).split("\n> ")[1:] for more in (
        dict(reward_path=world.reward, rollout_batch_size=4), {}))
    assert [line.split("\n")[0] for line in said] == ["a", "abc"]
    assert [len(re.findall(r"\(score -?\d+\.\d\d\)", line)) for line in said] == [3, 3]
    # the noise is the prompt's
    assert plain == [re.sub(r"   \(score .*?\)", "", line) for line in said]
    stdin = write(tmp_path / "stdin", "a\n\nabc\n")

    def before(rank):
        sys.stdin = open(stdin)

    said = said_by("tools/sample.py", tmp_path, keys | dict(temperature=0.0), before=before)
    keys_said = r"command line:.*\n(    .*\n)*"  # in as many lines as they need
    assert re.sub(keys_said, "", said).count("\n") == 2, said
    assert "[user: x]" in said_by("tools/sample.py", tmp_path, dict(
        policy_path=f"{trained}/policy", prompt="dddd", trust_code=True))


def test_what_is_next_works_when_it_is_typed(world, tmp_path):
    """As it stands; and in a folder with a blank."""
    small, pairs = f"{tmp_path}/small out/policy", [dict(ask="a", good="b", bad="ccccc")] * 4
    scratch = dict(init_from="scratch", context=9, tokenizer_path=world.policy, max_iters=1,
                   train_path=jsonl(tmp_path / "sft.jsonl", [dict(prompt="1+", completion="3")]))
    talks = keys_of(world, "grpo.py", environment=f"{world.rules}:talks", max_iters=1,
                    max_new_tokens=9)
    scores = dict(init_from=small, train_path=jsonl(tmp_path / "pairs.jsonl", pairs), max_iters=1,
                  batch_size=4, fields="ask>prompt,good>chosen,bad>rejected")
    for script, keys, said, more in (
            ("sft.py", scratch | dict(out_dir="../small out"), "", dict(
                prompt="12345", max_new_tokens=4)),
            ("grpo.py", talks, "", dict(prompt="a")),
            ("rm.py", scores, "--max_new_tokens=8", dict(batch_size=2, max_iters=1))):
        folder = tmp_path / script
        done = run(script, folder, dict(device_type="cpu") | keys)
        python, program, *argv = shlex.split(done.out[0].splitlines()[-1].partition("next: ")[2])
        assert done.codes == [0] and python == "python" and said in " ".join(argv), done
        program = os.path.normpath(os.path.join(folder, program))
        said_by(program, folder, [*argv, *typed(more)])
    result = tool("sample", tmp_path, dict(policy_path=small, prompt="1" * 9))
    assert_one_line(result, "sample.py", "max_new_tokens=48 in a context of 9")


def test_no_file_that_a_config_names_is_run_unless_one_says_so(world, tmp_path):
    """It would leave a file. What is typed is the user's own, and is run."""
    evil = write(tmp_path / "evil.py", f"open({str(tmp_path / 'ran')!r}, 'w')\n"
                 "def f(*_, **__): return None\n")
    sent = tmp_path / "sent"
    shutil.copytree(world.policy, sent / "policy")
    tools = dict(sample=dict(policy_path=f"{sent}/policy", prompt="a"), eval=dict(
        prompts_path=world.rl_val, out="eval", policies=f"{world.policy},{sent}/policy"))
    for name, key, value in (
            ("sample", "environment", os.path.relpath(f"{evil}:f", tmp_path)),
            ("eval", "reward_functions", f"a, 0.5 * {evil}:f")):
        write(sent / "config.json", json.dumps({"out_dir": "out", key: value}))
        for more in ({}, dict(trust_code=False)):
            assert_one_line(tool(name, tmp_path, tools[name] | more), f"{name}.py",
                            f"{sent}/config.json", "evil.py", key, "--trust_code=True")
        assert not os.path.exists(tmp_path / "ran"), (key, value)
        assert as_in_run([f"--{key}=mine.py:f"], "policies", f"{sent}/policy", ASKED | JUDGED) == {}
    write(sent / "config.json", json.dumps(dict(out_dir="out", optim=f"{evil}:f")))  # of no use
    said_by("tools/sample.py", tmp_path, tools["sample"] | dict(
        max_new_tokens=4, environment=f"{evil}:f"))
    assert os.path.exists(tmp_path / "ran")


@pytest.mark.parametrize("of, file, key, value", [
    ("policy", "generation_config.json", "eos_token_id", [[1]]),
    ("policy", "tokenizer.json", "post_processor", dict(  # it makes Rust panic
        type="TemplateProcessing", pair=[], special_tokens={},
        single=[dict(SpecialToken=dict(id="zz", type_id=0))])),
    ("reward", "config.json", "score_shift", "x"),
    ("reward", "config.json", "score_shift", math.nan)])
def test_whatever_a_folder_raises_is_a_line_with_its_name(world, tmp_path, of, file, key, value):
    """In whichever library: a folder that somebody has sent is no bug."""
    sent = shutil.copytree(getattr(world, of), tmp_path / "sent")
    known = json.loads((sent / file).read_text()) if (sent / file).exists() else {}
    write(sent / file, json.dumps(known | {key: value}))
    keys = dict(policy_path=world.policy, prompt="a", max_new_tokens=3) | {f"{of}_path": str(sent)}
    result = tool("sample", tmp_path, keys)
    *_, last = [line for line in result.err[0].splitlines() if "panicked" not in line]
    assert result.codes == [2] and "Traceback" not in result.err[0], result
    assert str(sent) in last and last.startswith("sample.py: error"), result


def test_no_text_reaches_the_terminal_as_a_command(world, tmp_path):
    """Of a prompt, a name of a folder, an error."""
    for said in (r"\x1b]0;title\x07", r"a\rb\x08\x00", r"\x9b31m\x85\x7f\x0b\x0c",
                 r"\u202eevil\u2066\u200f", r"\u2028", r"\ud800"):
        assert errors.visible(ast.literal_eval(f"'{said}'")) == said
    for text in ("a\n\tb \\x1b", "é漢\u3000字👩\u200d👧\xa0\u200cف"):
        assert errors.visible(text) == text
    odd = tmp_path / "a\x1b[31mb"
    shutil.copytree(world.policy, odd / "policy")
    jsonl(odd / "log.jsonl", [{"iteration": 0, "eval/kl": 1.0}])
    for name, keys in (
            ("sample", dict(policy_path=world.policy, max_new_tokens=4, prompt="x\x1b[2Jx\x07")),
            ("plot", dict(runs=odd, out="")), ("sample", dict(policy_path=odd / "nowhere"))):
        result = tool(name, tmp_path, keys)
        said = result.out[0] + result.err[0]
        assert r"\x1b[" in said and not re.search("[\x1b\x07]", said), result

"""
The scripts of data/ that make a task. Sums and numbers are checked by parsers of their own; what is
downloaded is a tiny made-up copy.
"""
import functools
import importlib.util
import itertools
import json
import math
import re
import shutil
import statistics
import sys

import pytest
from byte_tokenizer import write_byte_tokenizer
from tiny import ROOT, jsonl, read_jsonl, said_by, write


def made(name, folder, *args):
    """What a copy of data/NAME/prepare.py prints, and its rows by file."""
    shutil.copytree(f"{ROOT}/data/{name}", out := folder / "data" / name,
                    ignore=shutil.ignore_patterns("*.jsonl", "raw"))
    for file in ("convert.py", "files.py", "byte_tokenizer.py"):
        shutil.copy(f"{ROOT}/data/{file}", folder / "data" / file)
    said = said_by(f"{out}/prepare.py", folder, args)
    return said, {path.stem: read_jsonl(path) for path in out.glob("*.jsonl")}


def last(text):
    """The text, or that of the last message."""
    return (text if isinstance(text, str) else text[-1]["content"]).strip()


def answer(row):
    """What the row asks for: a sum or product, or whether a number is even."""
    asked = last(row["prompt"])
    numbers = [*map(int, re.findall(r"\d+", asked))]
    if len(numbers) == 1:
        return "no" if numbers[0] % 2 else "yes"
    return str(math.prod(numbers) if "*" in asked else sum(numbers))


def load_file(path):
    spec = importlib.util.spec_from_file_location("file", f"{ROOT}/{path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """task(name): the folder, and {file: rows}."""
    def of(name):
        folder = tmp_path_factory.mktemp(name)
        return folder, made(name, folder)[1]

    return functools.cache(of)


@pytest.mark.parametrize("name, prompts, share", [
    ("arithmetic", 71_000, 0.37), ("calculator", 50_756, 0.37), ("example", 40, 2 / 3),
    ("sums", 2800, 1.0)])
def test_answers_are_right_and_so_many_demonstrations(task, name, prompts, share):
    """And what is held out is in no other file."""
    rows = {file: some for file, some in task(name)[1].items() if file != "sft_hints"}
    of = {file: {last(row["prompt"]) for row in some} for file, some in rows.items()}
    assert len(set.union(*of.values())) == prompts
    for file, other in itertools.permutations(of, 2):
        assert not file.endswith(("_val", "_new")) or not of[file] & of[other], (file, other)
    for row in itertools.chain(*rows.values()):
        assert row.get("answer") in (None, answer(row))
    shown = [row for some in rows.values() for row in some if "completion" in row]
    right = [re.split("</think>|#### ", last(row["completion"]))[-1] == answer(row)
             for row in shown]
    assert abs(sum(right) / len(right) - share) < 0.01


def test_arithmetic_has_right_columns_or_at_most_one_wrong_digit(task):
    _, rows = task("arithmetic")
    for row in rows["sft_train"][::5]:
        a, b = row["prompt"].strip("=").split("+")
        thought, said = re.fullmatch("(?:<think>(.*)</think>)?(.*)", row["completion"]).groups()
        if thought is None:
            assert sum(map(str.__ne__, said, answer(row))) <= 1 and len(said) == len(answer(row))
            assert said[0] != "0"
            continue
        columns, carry = [], 0
        for x, y in zip(a[::-1], b[::-1], strict=True):
            total = int(x) + int(y) + carry
            columns.append(f"{x}+{y}+{carry}={total:02d}")
            carry = total // 10
        assert thought == ";".join(columns) and said == answer(row)
    assert rows["sft_hints"] == [
        dict(row, prompt=f"{row['completion']}\n{row['prompt']}")
        for row in rows["sft_train"] if "<think>" in row["completion"]]


def test_calls_of_the_calculator_and_steps_of_sums(task):
    calls = [row for row in task("calculator")[1]["sft_train"] if len(row["completion"]) > 1]
    for row in calls:
        assert [(m["role"], m["content"].strip()) for m in row["completion"]] == [
            ("assistant", f"calc({last(row['prompt']).strip('=')})"), ("user", answer(row)),
            ("assistant", answer(row))]
    for row in task("sums")[1]["sft_train"]:
        numbers = re.findall(r"\d+", last(row["prompt"]))
        *steps, _ = last(row["completion"]).split("\n")
        assert [eval(step.replace("=", "==")) for step in steps] == [True] * (len(numbers) - 1)


def test_code(task):
    """A quarter of the programs pass all tests of their problem; those held out are held out."""
    _, rows = task("code")
    held_out = {row["prompt"] for row in rows["rl_val"]}
    assert len(held_out) == 200
    assert not held_out & {row["prompt"] for row in rows["rl_train"] + rows["sft_train"]}
    tests = {row["prompt"]: row["tests"][0] for row in rows["rl_val"] + rows["rl_train"]}

    def answer(function, inputs):
        try:
            return function(*inputs)
        except (ZeroDivisionError, IndexError):
            return None

    passed = 0
    for row in rows["sft_train"][::20]:
        test, names = tests[row["prompt"]], {}
        exec(row["completion"], names)  # our own programs: made of pieces of code in prepare.py
        found = [answer(names["f"], inputs) for inputs in test["inputs"]]
        assert len(found) >= 5
        passed += found == test["outputs"]
    assert abs(passed / 1000 - 0.25) < 0.055  # 4 standard errors


def test_the_chat_model_of_the_example(task):
    import transformers

    folder = f"{task('example')[0]}/data/example/model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    config = transformers.AutoModelForCausalLM.from_pretrained(folder).config
    assert config.vocab_size == len(tokenizer) == 261
    assert tokenizer.eos_token_id == config.eos_token_id
    said = tokenizer.apply_chat_template([dict(role="user", content="a")], tokenize=False,
                                         add_generation_prompt=True)
    assert said == "<|user|>a<eos><|assistant|>"


def asked(text):
    return f"SUBREDDIT: r/cats\n\nTITLE: Help\n\nPOST: {text}\n\nTL;DR:"


def test_tldr(world, tmp_path):
    """In OpenAI's layout; a token is a byte, and a prompt has 46 of them beside its post."""
    w = "w".__mul__
    posts = {  # what becomes of each: prompt and completion
        ("one\n" + w(462), "512"): (asked("one\n" + w(462)), " 512"),  # as long as it may be
        (f"one\n{w(300)}\n{w(300)}", "cut"): (asked("one\n" + w(300)), " cut"),
        ("long", w(51)): (asked("long"), " " + w(51)), ("too long", w(52)): None}
    about = dict(title="Help", subreddit="cats")
    pairs = [dict(info=dict(about, post="My cat."), choice=choice, split=split, summaries=[
        dict(text=text, policy="sup2") for text in both]) for *both, choice, split in (
            (" good", " bad", 0, "train"), (w(168), " fine", 1, "train"), ("a", "b", 1, "valid2"))]
    files = {f"comparisons/batch{i}.json": [] for i in [*range(4, 21), 22]} | {
        "comparisons/batch3.json": pairs[:2], "comparisons/edit_b2_eval_test.json": pairs[2:]}
    files = {f"dataset/{name}": rows for name, rows in files.items()} | {
        f"datasets/tldr_3_filtered/{name}.jsonl": [
            dict(about, id="x", post=post, summary=summary) for post, summary in rows]
        for name, rows in (("train", posts), ("valid", [("\u00e9", " spaced")]))}
    for name, rows in files.items():
        (place := tmp_path / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        jsonl(place, rows)
    said, rows = made("tldr", tmp_path, f"--source={tmp_path}/source",
                      f"--tokenizer={world.policy}")
    kept = [row for row in posts.values() if row]
    assert [tuple(row.values()) for row in rows["sft_train"]] == kept
    assert [row["prompt"] for row in rows["prompts_train"]] == [prompt for prompt, _ in kept]
    assert rows["sft_val"] == [dict(prompt=asked("\u00e9"), completion=" spaced")]
    assert rows["prefs_train"] == [dict(prompt=asked("My cat."), chosen=" good", rejected=" bad")]
    assert rows["prefs_val"] == [dict(prompt=asked("My cat."), chosen=" b", rejected=" a")]
    assert "dropped 1: completion over 53 tokens" in said and "over 169 tokens" in said


def test_judges_of_the_toy(tmp_path):
    """Right and wrong answers, half and half; the digits say which is which."""
    task = tmp_path / "data" / "arithmetic"
    shutil.copytree(f"{ROOT}/data", task.parent, ignore=shutil.ignore_patterns("*.jsonl"))
    jsonl(task / "sft_train.jsonl", [dict(prompt=f"{a}+{2 * a}=") for a in range(100, 400)])
    said_by(f"{task}/judge.py", tmp_path, ["--rows=400", "--so_far=0"],
            before=lambda rank: sys.path.insert(0, str(task)))
    rows = read_jsonl(task / "judge_train.jsonl")
    thinks = [row for row in rows if "</think>" in row["prompt"]]
    for row in thinks:
        a, answer = re.match(r"(\d+)\+\d+=.*?(\d*)\?", row["prompt"], re.DOTALL).groups()
        assert row["completion"] != "A" or int(answer) == 3 * int(a)
    right = sum(row["completion"] == "A" for row in thinks)
    assert len(rows) == 400 and 0.3 < right / len(thinks) < 0.7


# search

NUMBERS = [2, 7, 5, 9]
MISS, HIT = "2-7=-5-5=-10-9=-19", "2+7=9-5=4+9=13"


@pytest.mark.parametrize("response, solved, attempts, repeats, slips", [
    (f"{MISS}?{HIT}?", 1, 2, 0, 0),  # the mark is wrong, but the attempt hits
    (f"{HIT}!{MISS}?", 0, 2, 0, 0),  # only the last one counts
    (f"{MISS}?{MISS}?{MISS}!", 0, 3, 2 / 3, 0),
    (f"{MISS}?2+7=9-5=4+9", 0, 2, 0, 1 / 2),  # cut within
    ("2+7=9-5=3+9=13!", 0, 1, 0, 1),  # a sum is wrong
    ("7+2=9-5=4+9=13!", 0, 1, 0, 1),  # not in order
    ("2+7=9+4=13!", 0, 1, 0, 1),  # not all numbers
    ("", 0, 0, 0, 0), (f"{HIT}{HIT}!", 0, 1, 0, 1)])
def test_the_rules_of_search(response, solved, attempts, repeats, slips):
    rules = load_file("data/search/reward.py")
    batch = dict(rows=[dict(numbers=NUMBERS, target=13)], completions=[response])
    found = [rule(batch) for rule in (rules.solved, rules.attempts, rules.repeats, rules.slips)]
    assert found == [[solved], [attempts], [pytest.approx(repeats)], [pytest.approx(slips)]]
    assert rules.overlooked(batch) == [response.startswith(HIT) and MISS in response]


def test_search(task):
    """
    8,874 problems can be solved (counted elsewhere). All attempts of the demonstrations are legal,
    and a hit is the last one. How many are right, and their attempts, are as the docstring says.
    """
    folder, rows = task("search")
    train, held_out = ({row["prompt"]: row for row in rows[f"rl_{part}"]}
                       for part in ("train", "val"))
    assert len(train | held_out) == len(train) + len(held_out) == 8874 and len(held_out) == 500
    assert {row["prompt"] for row in rows["sft_train"]} == train.keys()
    assert {row["prompt"] for row in rows["sft_val"]} == held_out.keys()
    for prompt, row in train.items():
        assert prompt == f"{','.join(map(str, row['numbers']))}>{row['target']}:"
    said = [row["completion"] for row in rows["sft_train"]]
    batch = dict(rows=[train[row["prompt"]] for row in rows["sft_train"]], completions=said)
    rules = load_file("data/search/reward.py")
    assert not any(rules.slips(batch)) and not any(rules.overlooked(batch))
    assert rules.solved(batch) == [text[-1] == "!" for text in said]
    assert statistics.fmean(rules.solved(batch)) == pytest.approx(0.40, abs=0.005)
    assert statistics.fmean(rules.attempts(batch)) == pytest.approx(2.5, abs=0.05)
    assert max(rules.attempts(batch)) <= 8
    assert all(text[-1] in "?!" and "!" not in text[:-1] for text in said)
    tokenizer = folder / "data/search/tokenizer/tokenizer_config.json"
    assert json.loads(tokenizer.read_text())["eos_token"]


# SmolLM2's problems


def test_templates_become_rows():
    """Of made-up templates: what is seen and what is not, each problem in one place, answers."""
    prepare = load_file("data/gsm_symbolic/prepare.py")

    def template(number):
        def problem(rng, difficulty):
            x = rng.randint(1, 40 if number else 5)  # template 0 has five problems alone
            return dict(question=f"{number} times {x}?", answer=str(number * x),
                        metadata=dict(answer_cot=f"so\n#### {number * x}"))
        return problem

    rows = prepare.rows_of({n: template(n) for n in range(prepare.UNSEEN + 4)}, 12)
    of = {name: {row["template"] for row in rows[name]} for name in rows if name != "sft_train"}
    assert len(of["rl_new"]) == prepare.UNSEEN and not of["rl_new"] & of["rl_val"]
    assert of["rl_train"] <= of["rl_val"] and len(of["rl_val"]) == 4
    asked = {name: sorted(last(row["prompt"]) for row in rows[name]) for name in rows}
    assert asked["sft_train"] == asked.pop("rl_train")
    assert len(set(every := [*itertools.chain(*asked.values())])) == len(every)
    for number in range(1, prepare.UNSEEN + 4):
        count = [sum(row["template"] == number for row in rows[name]) for name in of]
        assert count == ([0, 0, 10] if number in of["rl_new"] else [12, 10, 0]), number
    for row in rows["sft_train"]:
        a, b = map(int, re.findall(r"\d+", last(row["prompt"]))[:2])
        assert row["completion"] == [dict(role="assistant", content=f"so\n#### {a * b}")]


def test_the_form_of_a_solution():
    form = load_file("data/gsm_symbolic/reward.py").form
    texts = ["1 + 1 = 2\n#### 2", "#### 1,234.5", "#### -3\n", "#### 2 cats", "so ####2", "2", ""]
    assert form(dict(completions=texts)) == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]


def test_the_table(tmp_path):
    """Of a made-up run: gains problem by problem, speeds, memory."""
    (model := tmp_path / "model").mkdir()
    write_byte_tokenizer(str(model))
    write(model / "chat_template.jinja", "{% for m in messages %}{{ m['content'] }}{% endfor %}")
    write(model / "config.json", json.dumps(dict(
        model_type="gpt2", hidden_size=8, num_hidden_layers=2, vocab_size=16,
        num_attention_heads=2, num_key_value_heads=1, intermediate_size=4)))
    prompts = jsonl(tmp_path / "p", [dict(prompt=[dict(role="user", content="ab")])])
    line = {"time/rollout": 2.0, "time/score": 1.0, "time/update": 4e-8, "time/iteration": 3.0,
            "objective/length": 3.0, "policy/sampler_gap": 1e-3, "mem/peak_mib": 3072.0}
    (out := tmp_path / "x_grpo").mkdir()
    write(out / "config.json", json.dumps(dict(
        policy_path=str(model), prompts_path=prompts, batch_size=2, max_new_tokens=4, lora="")))
    jsonl(out / "log.jsonl", [line | {"iteration": i, "time/update": s}
                              for i, s in enumerate((9.0, 4e-8, 4e-8))])
    jsonl(out / "samples.jsonl", [
        dict(row=row, prompt=[dict(role="user", content=f"ask {row}")], text=f"{row} at {i}")
        for i in range(3) for row in range(3)])
    write(f"{out}.memory", "\nMiB    weights\npolicy  1.0  2.0\n\nat the peak of\n"
          "rollout    1024.0   policy 1.0\nupdate    2048.0   policy 1.0, step 2.0\n")
    right = {"start": [0, 0, 0, 0], "sft": [1, 0, 0, 0], "rl": [1, 1, 1, 0]}
    write(tmp_path / "x_seen.json", json.dumps(dict(prompts=4, policies={
        name: {"greedy accuracy": dict(mean=sum(some) / 4, error=0.125)}
        for name, some in right.items()})))
    jsonl(tmp_path / "x_seen.jsonl", [
        dict(policy=name, mode=mode, row=row, scores=dict(accuracy=x if mode == "greedy" else 1))
        for name, some in right.items() for mode in ("greedy", "sampled")
        for row, x in enumerate(some)])
    said_by("data/gsm_symbolic/table.py", tmp_path, ["x"])
    text = (tmp_path / "x.md").read_text()
    assert "| seen (4): greedy accuracy | 0.0% ± 12.5% | 25.0% ± 12.5% | 75.0% ± 12.5% |" in text
    # gains 0, 1, 1, 0: deviation sqrt(1 / 3), over sqrt(4), times 1.96
    assert "| seen: greedy, points above SFT |  |  | +50.0% ± 56.6% |" in text
    # weights 2 * 8 * (2 * 8 + 2 * 4 + 3 * 4) = 576: 6 FLOP * 2 rows * ((576 + 80) * 5 + 384)
    assert "ask 1\n\nbefore GRPO: 1 at 0\n\nafter GRPO: 1 at 2" in text and "ask 2" not in text
    for line in ("iterations | 3", "tokens of a prompt, of a response | 2, 3",
                 "update, TFLOP/s | 1.1", "tokens trained a second | 250,000,000",
                 "memory, GiB | 3.0 (predicted: 2.0)"):
        assert f"| {line} |" in text

"""
The scripts of data/ that make a task: data/arithmetic, countdown, gsm8k and tldr. Sums and numbers are checked by hand and by
parsers of their own; what is downloaded is a tiny made-up copy. (data/code: test_code_task.py; convert.py, label.py: theirs.)
"""
import json
import os
import re
import shutil
from fractions import Fraction
from types import SimpleNamespace

import pytest

from completions import sft_row
from rewards import call_rewards, check_rows, reward_terms
from rows import prompt_row, read_rows

from conftest import ROOT
from tiny import forked, jsonl, one_run

ARITHMETIC, COUNTDOWN, GSM8K, TLDR = (os.path.join(ROOT, "data", name, "prepare.py")
                                      for name in ("arithmetic", "countdown", "gsm8k", "tldr"))


def read(path):
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line]


# ---------------------------------------------------------------------------------------------------------------------
# arithmetic

PROMPT = re.compile(r"([1-9]\d\d)\+([1-9]\d\d)=")
SIZES = {"sft_train": 50_000, "sft_val": 500, "rl_train": 20_000, "rl_val": 500}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder after a run of a copy of the script in it, all rows by file, and what it printed."""
    folder = tmp_path_factory.mktemp("arithmetic")
    shutil.copy(ARITHMETIC, folder)
    (result,), = forked(str(folder / "run"), {"made": [one_run(f"{folder}/prepare.py", [])]}).values()
    assert result["codes"] == [0] and result["stderr"] == [""], result
    rows = {name: read(folder / f"{name}.jsonl") for name in SIZES}
    return SimpleNamespace(folder=folder, rows=rows, printed=result["stdout"][0])


def test_files_and_rows(made):
    assert sorted(os.listdir(made.folder)) == sorted([f"{n}.jsonl" for n in SIZES] + ["prepare.py", "run", "tokenizer"])
    for name, size in SIZES.items():
        assert len(made.rows[name]) == size and f"{name}.jsonl: {size} rows" in made.printed
        fields = ["prompt", "completion" if name.startswith("sft") else "answer"]
        assert all(list(row) == fields for row in made.rows[name])
        shape = sft_row if name.startswith("sft") else prompt_row
        assert read_rows(str(made.folder / f"{name}.jsonl"), shape) == made.rows[name]
    prompts = [row["prompt"] for name in SIZES for row in made.rows[name]]
    assert len(set(prompts)) == len(prompts) == 71_000  # none is in two files
    for row in made.rows["rl_train"]:
        a, b = PROMPT.fullmatch(row["prompt"]).groups()
        assert row["answer"] == str(int(a) + int(b))


def parse(prompt, completion):
    """(a, b, column sums or None, answer as it stands) of a demonstration, with nothing left over."""
    a, b = PROMPT.fullmatch(prompt).groups()
    match = re.fullmatch(r"(?:<think>(.*)</think>)?(\d+)", completion)
    columns = match[1] and [[int(n) for n in re.fullmatch(r"(\d)\+(\d)\+([01])=(\d\d)", c).groups()] for c in match[1].split(";")]
    return int(a), int(b), columns, match[2]


def test_demonstrations(made):
    """
    Those that think are right, column by column. Of the others one in ten is right; the rest is wrong in exactly one digit, and
    still a number of the right length.
    """
    right, direct = 0, 0
    for row in made.rows["sft_train"]:
        a, b, columns, answer = parse(row["prompt"], row["completion"])
        if columns is None:
            direct += 1
            differing = sum(x != y for x, y in zip(answer, str(a + b), strict=True))
            assert differing <= 1 and answer[0] != "0"
            right += differing == 0
            continue
        assert answer == str(a + b)
        assert [c[0] for c in columns] == [a % 10, a // 10 % 10, a // 100]
        assert [c[1] for c in columns] == [b % 10, b // 10 % 10, b // 100]
        assert [c[2] for c in columns] == [0, (a % 10 + b % 10) // 10, (a % 100 + b % 100) // 100]
        assert all(x + y + carry == total for x, y, carry, total in columns)
        assert columns[2][3] * 100 + columns[1][3] % 10 * 10 + columns[0][3] % 10 == a + b
    assert direct > 30_000
    assert abs(right / direct - 0.1) < 0.007  # four standard errors


# ---------------------------------------------------------------------------------------------------------------------
# countdown


def reachable(numbers, target):
    """Whether the target can be made of all numbers: join any two by any operation, until one is left."""
    if len(numbers) == 1:
        return numbers[0] == target
    for i, a in enumerate(numbers):
        for j, b in enumerate(numbers):
            if i != j:
                rest = [x for k, x in enumerate(numbers) if k not in (i, j)]
                results = [a - b] + ([a / b] if b else []) + ([a + b, a * b] if i < j else [])
                if any(reachable([*rest, x], target) for x in results):
                    return True
    return False


def test_countdown_problems_are_solvable_and_disjoint(tmp_path, run_here):
    assert run_here(COUNTDOWN, f"--out={tmp_path / 'seed'}", "--train=120", "--val=40", "--seed=2")[0] == 0
    code, stdout, stderr = run_here(COUNTDOWN, f"--out={tmp_path / 'new'}", "--train=120", "--val=40")
    assert (code, stdout, stderr) == (0, "rl_train.jsonl: 120 rows\nrl_val.jsonl: 40 rows\n", "")
    assert sorted(os.listdir(tmp_path / "new")) == ["rl_train.jsonl", "rl_val.jsonl"]
    train, val = (read(tmp_path / "new" / f"rl_{part}.jsonl") for part in ("train", "val"))
    assert (len(train), len(val)) == (120, 40) and val != read(tmp_path / "seed" / "rl_val.jsonl")
    for row in train + val:
        assert list(row) == ["prompt", "numbers", "target"]
        assert len(row["numbers"]) in (3, 4) and all(type(n) is int and 1 <= n <= 99 for n in row["numbers"])
        assert type(row["target"]) is int and 10 <= row["target"] <= 100
        assert reachable([Fraction(n) for n in row["numbers"]], row["target"]), row
        assert f"the numbers {row['numbers']}" in row["prompt"] and f"equals {row['target']}." in row["prompt"]
        assert row["prompt"].endswith("\n<think>") and "<answer>" in row["prompt"]
    assert len({(tuple(sorted(row["numbers"])), row["target"]) for row in train + val}) == 160
    assert 0.3 < sum(len(row["numbers"]) == 3 for row in train + val) / 160 < 0.7
    assert any(row["numbers"] != sorted(row["numbers"]) for row in val)


def test_countdown_as_chat_and_in_a_run(tmp_path, run_here):
    """What the script writes is what the trainer reads; a chat prompt does not open the thinking."""
    assert run_here(COUNTDOWN, f"--out={tmp_path}", "--train=3", "--val=1", "--chat")[0] == 0
    path = str(tmp_path / "rl_train.jsonl")
    rows = read_rows(path, prompt_row)
    rewards = reward_terms("data/countdown/reward.py:countdown,0.5*format", ROOT)
    check_rows(rewards, rows, path)
    assert [m["role"] for row in rows for m in row["prompt"]] == ["user"] * 3
    assert all(str(row["numbers"]) in row["prompt"][0]["content"] and "<think>" in row["prompt"][0]["content"] for row in rows)
    completions = ["<think>?</think><answer>1</answer>", "<answer>1</answer>", "1"]
    each = call_rewards(rewards, dict(completions=completions, rows=rows))
    assert sum(w * each[name] for w, name, _ in rewards).tolist() == pytest.approx([0.6, 0.1, 0])


SOLVED, TRIED = "(3 + 5) * 2", 0.1
SCORES = [
    (f"<answer>{SOLVED}</answer>", 1), ("<think>3*5=15</think><answer>2*(5+3)</answer> done", 1),
    (f"<answer>1</answer><answer>{SOLVED}</answer>", 1), ("<answer>(3+5)*2*1</answer>", TRIED), ("<answer>1/0</answer>", TRIED),
    ("<answer>(3+5)*2=16</answer>", TRIED), ("<answer>__import__('os')</answer>", TRIED), (SOLVED, 0), ("<answer> </answer>", 0),
    (f"<think><answer>{SOLVED}</answer>", 0)]


VALUES = [
    ("1+2*3", 7), ("8/(3/2)", Fraction(16, 3)), ("10-(4-3)", 9), ("1/3*3", 1), ("-(2+3)", -5), ("5−2×3÷4", Fraction(7, 2)),
    ("1 2", None), ("2(3)", None), ("2**3", None), ("1.5", None), ("1/(2-2)", None), ("1" * 201, None), ("(" * 100, None)]


def test_countdown_scores_exact_arithmetic_that_is_no_python():
    (_, _, countdown), = reward_terms("data/countdown/reward.py:countdown", ROOT)
    row = dict(prompt="?", numbers=[2, 3, 5], target=16)
    found = countdown(dict(completions=[completion for completion, _ in SCORES], rows=[row] * len(SCORES)))
    assert found == pytest.approx([score for _, score in SCORES])
    evaluate = countdown.__wrapped__.__globals__["evaluate_arithmetic"]
    assert [evaluate(text) for text, _ in VALUES] == [value for _, value in VALUES]


# ---------------------------------------------------------------------------------------------------------------------
# gsm8k

TRAIN = [("Two and two?", "2+2 = <<2+2=4>>4\n#### 4", "4"), (" How many? ", "Lots.\n#### 1,234,567", "1234567"),
         ("Below zero?", "Cold.\n#### -5", "-5"), ("Half?\u2028é {x}", "1/2 = 0.5\n#### 0.5", "0.5"),
         ("A #### trap?", "no #### 3 but\n#### 7 ", "7"), ("Words?", "#### many", None), ("Nothing?", "It is 4.", None)]
TEST = [("Three?", "#### 3", "3")]
SAID = "rl_train.jsonl: 5 rows; dropped 2: answer is no number\nrl_val.jsonl: 1 rows\n"


@pytest.fixture
def source(tmp_path):
    (tmp_path / "source").mkdir()
    for name, rows in (("train", TRAIN), ("test", TEST)):
        jsonl(tmp_path / "source" / f"{name}.jsonl", [dict(question=q, answer=a) for q, a, _ in rows])
    return tmp_path / "source"


def test_gsm8k(tmp_path, source, run_here):
    out = tmp_path / "out"
    code, stdout, stderr = run_here(GSM8K, f"--source={source}", f"--out={out}")
    assert (code, stderr) == (0, "") and stdout.endswith(SAID)
    assert sorted(os.listdir(out)) == ["raw", "rl_train.jsonl", "rl_val.jsonl"]
    assert sorted(os.listdir(out / "raw")) == ["test.jsonl", "train.jsonl"]
    for name, made in (("rl_train", TRAIN), ("rl_val", TEST)):
        rows = read_rows(str(out / f"{name}.jsonl"), prompt_row)
        kept = [row for row in made if row[2]]
        assert [row["answer"] for row in rows] == [answer for _, _, answer in kept]
        for row, (question, _, _) in zip(rows, kept, strict=True):
            assert f"User: {question.strip()} Reason " in row["prompt"] and row["prompt"].endswith("\n<think>")
        rewards = reward_terms("accuracy,0.5*format", ".")
        check_rows(rewards, rows, name)
        boxed = [f"{int(answer):,}" if answer != "0.5" else r"\frac12" for _, _, answer in kept]
        completions = [f"so</think>It is \\boxed{{{answer}}}." for answer in boxed]
        each = call_rewards(rewards, dict(completions=completions, rows=rows))
        assert sum(w * each[name] for w, name, _ in rewards).tolist() == [1.5] * len(kept)


def test_gsm8k_downloads_are_kept_and_chat_makes_messages(tmp_path, source, run_here):
    out = tmp_path / "out"
    code, stdout, _ = run_here(GSM8K, f"--source={source}", f"--out={out}", "--limit=2")
    assert code == 0 and stdout.count("downloading ") == 2 and "rl_train.jsonl: 2 rows\n" in stdout
    source.rename(tmp_path / "gone")
    code, stdout, stderr = run_here(GSM8K, f"--source={source}", f"--out={out}", "--chat")
    assert (code, stdout, stderr) == (0, SAID, "")
    messages = [row["prompt"] for row in read(out / "rl_train.jsonl")]
    assert [[m["role"] for m in prompt] for prompt in messages] == [["user"]] * 5
    assert messages[0][0]["content"].startswith("Two and two? Reason ") and r"\boxed{}" in messages[0][0]["content"]


# ---------------------------------------------------------------------------------------------------------------------
# TL;DR in OpenAI's layout, with a tokenizer whose tokens are bytes

LINE_SEPARATOR = "\u2028"  # ends a line for str.splitlines, not in JSONL


def post(text, summary, title="Help", subreddit="cats"):
    return {"id": "t3_1", "subreddit": subreddit, "title": title, "post": text, "summary": summary}


def comparison(first, second, choice, split, text="My cat sleeps."):
    summaries = [{"text": text, "policy": "sup2", "note": None} for text in (first, second)]
    return {"info": {"id": "t3_1", "post": text, "title": "Help", "subreddit": "cats"}, "summaries": summaries,
            "choice": choice, "worker": "w", "batch": "batch3", "split": split, "extra": {}}


def prompt(text):
    """46 bytes and those of the text."""
    return f"SUBREDDIT: r/cats\n\nTITLE: Help\n\nPOST: {text}\n\nTL;DR:"


def letters(n):
    return "w" * n


POSTS = [  # a post, and the row that it becomes: prompt and completion
    (post("My cat sleeps.\nA lot.", "cat sleeps"), (prompt("My cat sleeps.\nA lot."), " cat sleeps")),
    (post("one two\n" + letters(458), "512 tokens"), (prompt("one two\n" + letters(458)), " 512 tokens")),
    (post(f"one two\n{letters(300)}\n{letters(300)}", "cut once"), (prompt("one two\n" + letters(300)), " cut once")),
    (post(f"one two\n{letters(600)}\nthe end", "cut twice"), (prompt("one two"), " cut twice")),
    (post(letters(463) + " last", "no newline"), (prompt(letters(463) + " la"), " no newline")),
    (post("long", letters(51)), (prompt("long"), " " + letters(51))),  # 53 tokens with the EOS
    (post("too long", letters(52)), None), (post("too long", letters(53)), None), (post("nothing to say", " "), None),
    (post("hopeless", "long title", title=letters(480)), None)]
VALID = [(post(f"é{LINE_SEPARATOR}x", " has a space"), (prompt(f"é{LINE_SEPARATOR}x"), " has a space"))]
SFT_TRAIN, SFT_VAL = ([row for _, row in table if row] for table in (POSTS, VALID))

COMPARISONS = {
    "batch3": [
        comparison(" good", " bad", 0, "train"),
        comparison(" bad", " good", 1, "valid1"), comparison(" bad", "good", 1, "valid2"),
        comparison(letters(168), " fine", 1, "train"), comparison(" fine", letters(168), 1, "valid1")],
    "batch22": [comparison(" " + letters(167), " short", 0, "train", text="one two\n" + letters(600))],
    "edit_b2_eval_test": [comparison("a", "b", 1, "valid2")],
    "cnndm0": [{"info": {"article": "news, not Reddit"}}],  # never to be asked for
}
PREFS_TRAIN = [(prompt("My cat sleeps."), " good", " bad"), (prompt("one two"), " " + letters(167), " short")]
PREFS_VAL = [PREFS_TRAIN[0], PREFS_TRAIN[0], (prompt("My cat sleeps."), " b", " a")]

REPORT = """\
sft_train.jsonl: 6 rows; dropped 2: completion over 53 tokens; dropped 1: empty completion; \
dropped 1: query over 512 tokens even without its post
sft_val.jsonl: 1 rows
prompts_train.jsonl: 6 rows
prompts_val.jsonl: 1 rows
prefs_train.jsonl: 2 rows; dropped 1: completion over 169 tokens
prefs_val.jsonl: 3 rows; dropped 1: completion over 169 tokens
"""


@pytest.fixture
def prepared(tmp_path, run_here, world):
    """A run of the script on the made-up files; most of the batches that it reads are empty. change: of a batch's rows."""
    def prepared(change=lambda rows: rows):
        files = {f"datasets/tldr_3_filtered/{name}.jsonl": [made for made, _ in table]
                 for name, table in (("train", POSTS), ("valid", VALID))}
        files |= {f"dataset/comparisons/batch{i}.json": [] for i in [*range(3, 21), 22]}
        files |= {f"dataset/comparisons/{name}.json": change(rows) for name, rows in COMPARISONS.items()}
        for name, rows in files.items():
            (tmp_path / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            jsonl(tmp_path / "source" / name, rows)
        return run_here(TLDR, f"--source={tmp_path}/source", f"--out={tmp_path}/out", f"--tokenizer={world.tokenizer}")
    return prepared


def values(path):
    """The values of each row, in the order written; and the keys, which are all alike."""
    rows = read(path)
    assert len({tuple(row) for row in rows}) == 1
    return [tuple(row.values()) for row in rows], tuple(rows[0])


def test_tldr(tmp_path, prepared):
    out = tmp_path / "out"
    code, stdout, stderr = prepared()
    assert code == 0 and stderr == "" and stdout.endswith(REPORT), stderr
    assert values(out / "sft_train.jsonl") == (SFT_TRAIN, ("prompt", "completion"))
    assert values(out / "sft_val.jsonl") == (SFT_VAL, ("prompt", "completion"))
    assert values(out / "prompts_train.jsonl") == ([row[:1] for row in SFT_TRAIN], ("prompt",))
    assert values(out / "prefs_train.jsonl") == (PREFS_TRAIN, ("prompt", "chosen", "rejected"))
    assert values(out / "prefs_val.jsonl") == (PREFS_VAL, ("prompt", "chosen", "rejected"))
    assert not list(out.rglob("*.part")) and (out / "raw" / "batch22.json").exists()


def test_a_bad_row_of_tldr_is_one_line(tmp_path, prepared):
    out = tmp_path / "out"
    code, _, stderr = prepared(lambda rows: [row | {"choice": 2} if i == 1 else row for i, row in enumerate(rows)])
    assert code == 2 and stderr.count("\n") == 1
    assert stderr.startswith(f"prepare.py: error: {out / 'raw' / 'batch3.json'}, line 2: summaries.2.text: ")
    assert not list(out.glob("*.jsonl"))  # nothing half-written that a trainer could take for the whole

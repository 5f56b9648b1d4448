"""data/countdown/prepare.py, offline in full, and data/gsm8k/prepare.py on a tiny made-up copy of OpenAI's folder."""
import json
import os
from fractions import Fraction

import pytest

from rows import prompt_row, read_rows
from rewards import call_rewards, check_rows, reward_terms

from conftest import ROOT

COUNTDOWN = os.path.join(ROOT, "data", "countdown", "prepare.py")
GSM8K = os.path.join(ROOT, "data", "gsm8k", "prepare.py")


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


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


# gsm8k

TRAIN = [("Two and two?", "2+2 = <<2+2=4>>4\n#### 4", "4"), (" How many? ", "Lots.\n#### 1,234,567", "1234567"),
         ("Below zero?", "Cold.\n#### -5", "-5"), ("Half?\u2028é {x}", "1/2 = 0.5\n#### 0.5", "0.5"),
         ("A #### trap?", "no #### 3 but\n#### 7 ", "7"), ("Words?", "#### many", None), ("Nothing?", "It is 4.", None)]
TEST = [("Three?", "#### 3", "3")]
REPORT = "rl_train.jsonl: 5 rows; dropped 2: answer is no number\nrl_val.jsonl: 1 rows\n"


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    for name, rows in (("train", TRAIN), ("test", TEST)):
        text = "".join(json.dumps({"question": q, "answer": a}, ensure_ascii=False) + "\n" for q, a, _ in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return folder


def test_gsm8k(tmp_path, source, run_here):
    out = tmp_path / "out"
    code, stdout, stderr = run_here(GSM8K, f"--source={source}", f"--out={out}")
    assert (code, stderr) == (0, "") and stdout.endswith(REPORT)
    assert sorted(os.listdir(out)) == ["raw", "rl_train.jsonl", "rl_val.jsonl"]
    assert sorted(os.listdir(out / "raw")) == ["test.jsonl", "train.jsonl"]
    for name, made in (("rl_train", TRAIN), ("rl_val", TEST)):
        rows = read_rows(str(out / f"{name}.jsonl"), prompt_row)
        kept = [row for row in made if row[2]]
        assert [row["answer"] for row in rows] == [answer for _, _, answer in kept]
        for row, (question, _, _) in zip(rows, kept, strict=True):
            assert question.strip() in row["prompt"] and row["prompt"].endswith("\n<think>")
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
    assert (code, stdout, stderr) == (0, REPORT, "")
    messages = [row["prompt"] for row in read(out / "rl_train.jsonl")]
    assert [[m["role"] for m in prompt] for prompt in messages] == [["user"]] * 5
    assert messages[0][0]["content"].startswith("Two and two? Reason ") and r"\boxed{}" in messages[0][0]["content"]

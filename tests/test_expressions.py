"""The reward `math`: without math-verify one line; with it, algebra, in processes that are ended where they hang."""
import importlib.util
import math
import time

import pytest

from grading import expressions
from grading.expressions import math_answer
from errors import BadInput
from rewards import accuracy, check_rows, reward_terms

ROWS = [dict(prompt="q", answer="1 + x")]


def test_without_the_package_one_line_says_what_to_install(monkeypatch):
    terms = reward_terms("math", ".")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match="pip install math-verify"):
        check_rows(terms, ROWS, "rows.jsonl")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    check_rows(terms, ROWS, "rows.jsonl")


def test_what_accuracy_says_is_never_asked_again(monkeypatch):
    """And equal pairs are asked once; what there was no time for scores 0; a thinking that never ends is not asked."""
    asked = []

    def same(pairs, workers, seconds):
        asked.append((pairs, seconds))
        return [None if pair[0] == "late" else pair == ("x+1", "1+x") for pair in pairs]

    monkeypatch.setattr(expressions, "same_expressions", same)
    completions = ["7", r"\boxed{x+1}", "x+1", "x+2", "late", "<think>x+1", ""]
    batch = dict(rows=[dict(prompt="q", answer=x) for x in [7] + ["1+x"] * 6], completions=completions, seconds=10)
    assert math_answer(batch) == [1, 1, 1, 0, 0, 0, 0]
    assert asked == [([("x+1", "1+x"), ("x+2", "1+x"), ("late", "1+x")], 8)]


PAIRS = [  # given, truth, whether math-verify finds them the same
    ("x + 1", "1 + x", True), (r"2\sqrt{2}", r"\sqrt{8}", True), (r"$\frac{x^2-1}{x-1}$", "$x+1$", True),
    ("x + 1", "x + 2", False), (r"\{1, 3\}", r"$\{1\} \cup \{3\}$", True), ("", "x", False),
    ("import os", "x", False), ("x" * 3000, "x", False)]


def test_expressions_are_compared_by_algebra():
    pytest.importorskip("math_verify")
    assert expressions.same_expressions([pair[:2] for pair in PAIRS], 2, 100) == [pair[2] for pair in PAIRS]
    batch = dict(rows=[dict(prompt="q", answer="1+x")] * 3, completions=[r"so \boxed{x+1}", "<think>1+1</think>1 + x", "x"])
    assert math_answer(batch) == [1, 1, 0] and accuracy(batch).tolist() == [0, 1, 0]


UNLIKE = ["5 cm|5 m", "5 days|5 hours", "x = 5|y = 5", "A|a", "act|cat", "Paris|Parsi", "4:30 am|4:30 pm", "cannot be $5$|5",
          "the total is not 5|5", "$5$ is wrong|5"]  # for math-verify they are the same


def test_what_algebra_does_not_see(monkeypatch):
    monkeypatch.setattr(expressions, "same_expressions", lambda pairs, workers, seconds: [True] * len(pairs))
    pairs = [pair.split("|") for pair in [*UNLIKE, "x + 1|1 + x", "xy|yx", "x = 1 or x = 2|1, 2", "2x cm|x + x"]]
    batch = dict(rows=[dict(prompt="q", answer=b) for _, b in pairs], completions=[f"\\boxed{{{a}}}" for a, _ in pairs])
    assert math_answer(batch) == [0] * len(UNLIKE) + [1] * 4


def test_an_answer_that_never_ends_harms_no_other(monkeypatch):
    pytest.importorskip("math_verify")
    monkeypatch.setattr(expressions, "SECONDS", 2)
    monkeypatch.setattr(expressions, "WORKER", expressions.WORKER.replace(
        "        given, truth =", "        import time; time.sleep(1000 * ('never' in line))\n        given, truth ="))
    began = time.monotonic()
    pairs = [("x+1", "1+x"), ("never", "x"), ("x+1", "1+x"), ("9^{9^{9^{9^{9}}}}", "3"), ("x+1", "1+x")]
    assert expressions.same_expressions(pairs, 1, 100) == [True, False, True, False, True]
    assert time.monotonic() - began < 60
    assert expressions.same_expressions(pairs[:1], 1, 0) == [None]


def test_a_worker_that_cannot_start_is_one_line(monkeypatch):
    monkeypatch.setattr(expressions, "WORKER", "raise SystemExit(1)")
    with pytest.raises(expressions.Stop, match="math-verify"):
        expressions.same_expressions([("x", "y")], 1, math.inf)

"""
The rule-based rewards of rewards.py. What is right was written down by hand, or comes from Python's own eval; none of it from
the code under test.
"""
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from engine.answers import final_answer, same_answer
from engine import reward_mix
from engine.reward_mix import NEEDS, call_rewards, check_rows, collect, parse_rewards
from errors import BadInput, Stop
from rewards import RULES, accuracy, format, length, soft_overlong, thinks


def mix(rewards, batch):
    """As the scripts do it: the weighted sum, and each reward's own scores."""
    each = call_rewards(rewards, batch)
    return sum(weight * each[name] for weight, name, _ in rewards), each


# when two answers are the same

EQUAL = r"""
72                      | 72
1,234                   | 1234
1,234,567.5             | 1234567.5
1{,}234                 | 1234
1,\!234                 | 1234
10\,000                 | 10000
\$1,234.50              | 1234.5
$12                     | 12
$12$                    | 12
-$12                    | -12
$-12                    | -12
12 dollars              | $12
$\$18$                  | 18
12.                     | 12
12.0                    | 12
0.50                    | .5
+5                      | 5
- 5                     | -5
−5                      | -5
-0                      | 0
1/2                     | 0.5
3/4                     | \frac{3}{4}
\dfrac{3}{4}            | \tfrac34
\frac34                 | 0.75
\frac3{4}               | 3/4
\frac{ 3 }{ 4 }         | \frac{3}{4}
\frac {1} {2}           | 1/2
-\frac12                | \frac{-1}{2}
-\frac{1}{2}            | -0.5
6/8                     | 3/4
10/5                    | 2
1 1/2                   | 3/2
1\frac{1}{2}            | 1.5
1 \frac12               | 3/2
-2\frac{1}{4}           | -2.25
1,000/3                 | 1000/3
1e3                     | 1000
2.5E-2                  | 0.025
1.5\times10^3           | 1500
1.5 \times 10^{3}       | 1500
1.5 × 10^3              | 1500
3 \cdot 10^{-2}         | 0.03
10^{4}                  | 10000
12\%                    | 12
12%                     | 12 percent
5\text{ cm}             | 5
5 cm                    | 5 centimeters
5cm                     | 5
5\,\text{m}             | 5 meters
5 \mathrm{~kg}          | 5
25\text{ cm}^2          | 25 square centimeters
25\text{ cm}^{2}        | 25
90^\circ                | 90
90^{\circ}              | 90 degrees
90°                     | 90^\circ
60 mph                  | 60 miles per hour
$5 per hour             | 5
3 hours.                | 3
x = 5                   | 5
x=5                     | x = 5.0
= 5                     | 5
y = 2x+3                | 2x + 3
x \in [0, 1]            | [0,1]
\(12\)                  | 12
\[12\]                  | 12
(12)                    | 12
\left(12\right)         | 12
(1, 2)                  | (1,2)
\left( 1, \frac12 \right) | (1, 0.5)
(0.5, -3]               | (\frac{1}{2},-3]
(-\infty, 5]            | (-∞,5.0]
1, 2                    | 1,2
1, -\frac12             | 1, -0.5
\{1, 2\}                | {2, 1}
\{1,2,3\}               | \{3, 1.0, 2\}
\left\{0,\frac12\right\}| \{0.5, 0\}
(1, (2, 3))             | (1,(2.0,3))
\text{(B)}              | B
\textbf{(B)}            | (B)
\text{Evelyn}           | Evelyn
\sqrt{2}                | \sqrt2
3\sqrt{2}\text{ cm}     | 3\sqrt2
\frac{\sqrt{3}}{2}      | \dfrac{\sqrt3}{2}
\frac{\pi}{2}           | \frac\pi2
2π                      | 2\pi
x^{2}+1                 | x^2 + 1
12 or 13                | 12 or 13
two                     | two
042                     | 042
042                     | 42
"""
UNEQUAL = r"""
12                      | 13
12                      | 12 or 13
12 or 13                | 12
12, 13                  | 12
13 12                   | 12
12                      | -12
1,2                     | 12
12,34                   | 1234
1,2345                  | 12345
0,123                   | 123
1 234                   | 1234
4 2                     | 42
1.2.3                   | 1.23
1.2.3                   | 12.3
0.333                   | 1/3
0.3333333333            | \frac13
0.99999                 | 1
3.14                    | \pi
1/0                     | 0
\frac{1}{0}             | 0
0/0                     | 0
12%                     | 0.12
50%                     | 1/2
12%                     | 12 dollars
5 cm                    | 5 m
5 cents                 | $5
3 hours                 | 3 minutes
5 cm                    | 5 square cm
12 million              | 12
12 thousand dollars     | 12
12 dozen                | 12
12 apples               | 12 pears
5m                      | 5
5x                      | 5
5!                      | 5
x = 5                   | y = 5
x = 5 = 6               | 5
x > 5                   | 5
x \le 5                 | 5
x \neq 5                | 5
\pm 5                   | 5
--5                     | 5
+-5                     | -5
1/2/3                   | 1/6
1/23                    | \frac{1}{2}3
1 3/2                   | 5/2
12/3                    | 1 2/3
1e3                     | 13
1e                      | 1
e3                      | 1000
10^3                    | 103
2^{10}                  | 210
3²                      | 32
1_000                   | 1000
١٢                      | 12
1e999                   | 1e998
(1, 2)                  | (2, 1)
(1, 2)                  | [1, 2]
(1, 2)                  | (1, 2, 3)
(1, 2)                  | 12
(1,234)                 | 1234
\{1, 2\}                | \{1, 3\}
\{1, 2\}                | (1, 2)
(1                      | 1
1)                      | 1
A                       | B
a                       | A
the answer is 12        | 12
12..                    | 12
0.333...                | 0.333
a week                  | a
ab                      | ba
x^{2}3                  | x^{23}
(x+1)(x-2)              | x+1)(x-2
((1)                    | (1
12 is the answer        | 12
nan                     | 0
inf                     | \infty
None                    | 0
$                       | 0
\text{}                 | 0
.                       | 0
-                       | 0
"""


def table(text):
    return [tuple(cell.strip() for cell in line.split("|")) for line in text.strip().splitlines()]


@pytest.mark.parametrize("given, truth", table(EQUAL))
def test_equal_answers(given, truth):
    assert same_answer(given, truth) and same_answer(truth, given)
    assert same_answer(f"  {given}\n", truth)
    if "$" not in given and r"\(" not in given and r"\[" not in given:
        for wrapped in (f"${given}$", rf"\({given}\)", rf"$${given}$$"):
            assert same_answer(wrapped, truth), wrapped


@pytest.mark.parametrize("given, truth", table(UNEQUAL))
def test_unequal_answers(given, truth):
    assert not same_answer(given, truth) and not same_answer(truth, given)


def test_a_set_is_not_filled_up_with_doubles():
    assert not same_answer(r"\{1, 1, 2\}", r"\{1, 2, 3\}") and not same_answer(r"\{1, 1, 2\}", r"\{1, 2\}")


def test_nothing_equals_an_empty_answer():
    blank = ["", " ", "\n\t", "$$", ".", r"\text{}", r"\left.", "()", r"\,"]
    for given in blank:
        for truth in ["0", "12", "", " ", "x"]:
            assert not same_answer(given, truth), (given, truth)


def test_the_bounds():
    assert same_answer("9" * 100, "9" * 100 + ".0") is False  # 101 digits are only text
    assert same_answer("9" * 99, "9" * 99 + ".0")
    assert same_answer("1e100", "1" + "0" * 99 + "0.0") is False
    assert same_answer("1e100", "10e99") and same_answer("1e-100", "10e-101") is False
    assert same_answer("x" * 1000, "x" * 1000) and not same_answer("x" * 1000, "x" * 999)
    assert not same_answer("0" * 190 + "x" * 20, "1")
    assert same_answer(",".join("1" * 20), ", ".join(["1.0"] * 20))
    assert not same_answer(",".join("1" * 21), ", ".join(["1.0"] * 21))

PIECES = [*"0123456789abxeE.,+-*/^_=()[]{}$%<>\\ \n|!;:'\"", "\\frac", "\\dfrac", "\\frac{", "\\boxed{", "\\boxed", "\\text{",
          "\\left",
          "\\right", "\\sqrt", "\\times", "10^", "10^{", "\\,", "\\!", "^\\circ", "1,234", "####", "<answer>", "</answer>",
          "<think>",
          "</think>", "cm", "per ", "square ", " m", "¤", "€", "−", "π", "∞", "٣", "²", "\u2028", "\x00", "\ud800", "🙂", "or",
          "999999999999999999999", "1e99", "\\in", "}{", "{}", "()", "\\{", "\\}", "1/2"]
NASTY = [piece * n for piece in PIECES for n in (3, 40, 199)] + [
    "10**10**10", "9" * 5000, "1e" + "9" * 100, "(" * 500, "(" * 100 + ")" * 100, "((((1,2),3),4),5)" * 10, "-" * 200, "1 " * 100,
    "{" + "1," * 98 + "1}", "{" + "a," * 19 + "b}", "{" + "{a,b,c,d,e}," * 15 + "}", "{{{{1,2},3},4},5}", " " * 10_000 + "1",
    "\\frac{1}{" * 22, "__import__('os').system('true')", "%s%n{0}{x}", "cm " * 66, "a" * 199 + "=", "\\text{" * 30 + "}" * 30]


def test_hostile_text():
    """Whatever the text: a bool, no exception, at once, and the answer equals itself."""
    rng = random.Random(5)
    texts = NASTY + ["".join(rng.choices(PIECES, k=rng.choice([1, 2, 3, 5, 8, 30, 90]))) for _ in range(2500)]
    slowest = 0.0
    for i, text in enumerate(texts):
        other = texts[i - 1]
        tries = []
        for _ in range(3):  # the least of three: others use this machine, too
            began = time.thread_time()
            found = final_answer(text)
            results = [same_answer(text, other), same_answer(found, "12"), same_answer(text, text[:-1] + "0")]
            tries.append(time.thread_time() - began)
            if tries[-1] < 0.005:
                break
        slowest = max(slowest, min(tries))
        assert all(type(r) is bool for r in results)
        assert same_answer(text, text) == bool(text.strip())
    assert slowest < 0.02
    batch = dict(completions=texts, rows=[dict(prompt="", answer="12")] * len(texts))
    for rule in (accuracy, format, thinks):
        assert rule(batch).shape == (len(texts),) and rule(batch).isfinite().all()


@pytest.mark.parametrize("text", ["\\boxed{" * 5000, "<answer>" * 5000, "#" * 40_000, "\\boxed" + " " * 40_000, "{" * 40_000,
                                  "\\boxed{}" * 5000, "<answer></answer>" * 2500, "}" * 40_000, "\\" * 40_000, "</think>" * 5000])
def test_long_completions_take_linear_time(text):
    began = time.thread_time()
    final_answer(text)
    assert time.thread_time() - began < 0.5  # what grows with the square would take many seconds


# where the answer is


@pytest.mark.parametrize("completion, answer", [
    (r"so \boxed{72}", "72"), (r"\boxed{1} then \boxed{2}", "2"), (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
    (r"\boxed{\{1,2\}}", r"\{1,2\}"), (r"\boxed{ \boxed{5} }", "5"), (r"\boxed{5} and \boxed{6", "5"), (r"\boxed{6", r"\boxed{6"),
    (r"\boxed 5", "5"), (r"\boxed {5}", "5"), (r"} } \boxed{5}", "5"), (r"{ { \boxed{5}", "5"), (r"\boxed{}", ""),
    (r"\boxed{1}<answer>2</answer>#### 3", "1"), (r"<answer>\boxed{1}</answer>", "1"), ("<answer> 2 </answer>#### 3", "2"),
    ("<answer>1</answer><answer>2</answer> bye", "2"), ("<answer>1</answer><answer>2", "1"),
    ("<answer><answer>1</answer></answer>", "1"),
    ("</answer>1<answer>", "</answer>1<answer>"), ("1 #### 2 #### 3", "3"), ("work\n#### 1,234\n\nDone.", "1,234"), ("#### ", ""),
    ("####\n7", "7"), (r"<think>\boxed{1}</think>\boxed{2}", "2"), (r"<think>\boxed{1}</think> 2", "2"),
    (r"<think>\boxed{1}</think>", ""), (r"<think>\boxed{1}", r"<think>\boxed{1}"),
    ("<think>a</think><think>#### 1", "<think>#### 1"),
    ("so 30 + 4.\n\nAnswer: $34$", "$34$"), ("**Final Answer:** 34\nBye.", "34"), ("**Answer: 34**", "34"), ("#### **72**", "72"),
    ("Answer: 1\nanswer : 2", "2"), ("Answer:\n3", "Answer:\n3"), ("The answer: 3", "The answer: 3"),
    (r"Answer: \boxed{1}", "1"), ("<answer>**4 * 5**</answer>", "4 * 5"), ("<think>Answer: 1</think>2", "2"),
    (r"no thinking \boxed{3}.", "3"),
    ("3 + 2 = 5.\nThe answer is 5.", "5"), ("So the final answer is: **1/2**!", "1/2"),
    ("2 and 3 make\n**5**", "5"), ("**2** and **3** make **5**.", "5"),
    ("The answer is 4. No, the answer is 5.", "4. No, the answer is 5"),
    ("The answer is 5.\nOr so I think", "The answer is 5.\nOr so I think"),
    ("**5** or so", "**5** or so"), ("<Answer>4</Answer>", "<Answer>4</Answer>")])
def test_where_the_answer_is(completion, answer):
    assert final_answer(completion) == answer


def test_accuracy_of_marked_answers():
    cases = [(r"<think>6*12</think>It is \boxed{72}.", "72", 1), (r"\boxed{\$72.00}", "72", 1), ("#### 1,234", "1234", 1),
             (r"\boxed{72}", "Natalia sold 48+24 = <<48+24=72>>72 clips.\n#### 72", 1),
             (r"\boxed{\frac12}", r"So \boxed{0.5}.", 1),
             (r"72 \boxed{}", "72", 0), ("<answer></answer>72", "72", 0), (r"\boxed{72} \boxed{73}", "72", 0),
             (r"<think>\boxed{72}", "72", 0), ("72 or 73", "72", 0), ("", "72", 0)]
    batch = dict(completions=[c for c, _, _ in cases], rows=[dict(prompt="?", answer=a) for _, a, _ in cases])
    assert accuracy(batch).tolist() == [s for _, _, s in cases]
    numbers = dict(completions=["7", "7"], rows=[dict(answer=7), dict(answer=None)])
    assert accuracy(numbers)[0] == 1 and accuracy(numbers)[1].isnan()


def test_a_prompt_that_opens_the_thinking():
    """Behind <think>, no answer counts until </think>, and the format wants the closing tag alone."""
    chat = [dict(role="user", content="6*12?"), dict(role="assistant", content="<think>\n")]
    cases = [(r"6*12 is \boxed{72}", 0, 0), (r"a bit</think>\boxed{72}", 1, 1), (r"<think>a bit</think>\boxed{72}", 1, 0)]
    for prompt in ("6*12?\n<think>", "6*12?<think>\n", chat):
        batch = dict(completions=[c[0] for c in cases], rows=[dict(prompt=prompt, answer="72")] * 3)
        assert accuracy(batch).tolist() == [c[1] for c in cases]
        assert format(batch).tolist() == [c[2] for c in cases]
    as_text = dict(batch, rows=[dict(prompt=chat[:1], answer="72")] * 3)
    assert accuracy(as_text).tolist() == [1, 1, 1]
    assert format(as_text).tolist() == [0, 0, 1]
    as_text["prompts"] = ["<user>6*12?<assistant><think>\n"] * 3  # where the chat template has put it
    assert accuracy(as_text).tolist() == [0, 1, 1]
    assert format(as_text).tolist() == [0, 1, 0]
    assert thinks(as_text).tolist() == [0, 1, 1]


def test_a_response_that_was_begun_for_the_policy_is_judged_whole():
    """The last message may be the assistant's own: what it says is part of the response, from <think> on if that is in it."""
    def batch(begun, completion):
        prompt = [dict(role="user", content="6*12?"), dict(role="assistant", content=begun)]
        return dict(completions=[completion], rows=[dict(prompt=prompt, answer="72")], prompts=["<user>6*12?<assistant>" + begun])

    for begun, completion, right, formed, thinking in [
        (r"So \boxed{7", "2}", 1, 0, 0), (r"So \boxed{7", "3}", 0, 0, 0), ("<think>6 tens", r" are 60</think>72", 1, 1, 1),
        ("<think>6 tens", r"\boxed{72}", 0, 0, 0), ("Let me see. <think>", "6 tens</think>72", 1, 1, 1),
        ("<think>a</think>", "72", 1, 1, 1),
    ]:
        found = [rule(batch(begun, completion)).item() for rule in (accuracy, format, thinks)]
        assert found == [right, formed, thinking], (begun, completion)
    user = dict(completions=["72"], rows=[dict(prompt=[dict(role="user", content="after <think>")], answer="72")],
                prompts=["<user>after <think><assistant>"])  # said by the user: nothing of the response
    assert accuracy(user).tolist() == [1]


# format


@pytest.mark.parametrize("completion, score", [
    ("<think>a</think>b", 1), (" \n<think>\na\n</think>\n\nb\n", 1), ("<think></think>b", 1),
    ("<think>a</think><answer>b</answer>", 1),
    ("<think>a</think>\n<answer>\nb\n</answer>\n", 1), ("<think>a < b</think>b > a", 1),
    ("", 0), ("b", 0), ("<think>a</think>", 0), ("<think>a</think> \n", 0), ("<think>a", 0), ("a</think>b", 0),
    ("b<think>a</think>", 0),
    ("well <think>a</think>b", 0), ("</think>a<think>b", 0), ("<think>a</think>b</think>c", 0), ("<think><think>a</think>b", 0),
    ("<think>a</think><think>b</think>c", 0), ("<think>a</think><answer></answer>", 0), ("<think>a</think><answer> </answer>", 0),
    ("<think>a</think><answer>b", 0), ("<think>a</think>b</answer>", 0), ("<think>a</think></answer>b<answer>", 0),
    ("<think>a</think>b<answer>c</answer>", 0), ("<think>a</think><answer>c</answer>d", 0),
    ("<answer>b</answer><think>a</think>", 0),
    ("<think><answer>a</answer></think>b", 0), ("<think>a</think><answer>b</answer><answer>b</answer>", 0),
    ("<THINK>a</THINK>b", 0), ("<think>a</think><answer>", 0)])
def test_format(completion, score):
    scores = format(dict(completions=[completion], rows=[dict(prompt="?")]))
    assert scores.tolist() == [score] and scores.is_floating_point()


# length


def test_soft_overlong_by_hand():
    """DAPO's own numbers: L_max 20480, L_cache 4096. 16384 are free, 18432 are half of the way, 17408 a quarter."""
    lengths = torch.tensor([0, 1, 16384, 16385, 17408, 18432, 20479, 20480, 20481, 100_000])
    want = [0, 0, 0, -1 / 4096, -0.25, -0.5, -4095 / 4096, -1, -1, -1]
    assert soft_overlong(lengths, 20480, 4096).tolist() == want
    assert soft_overlong(torch.tensor([5, 6, 7, 8]), 7, 1).tolist() == [0, 0, -1, -1]
    assert soft_overlong(torch.tensor([0, 5, 10]), 10, 10).tolist() == [0, -0.5, -1]


def test_length_of_a_batch():
    """R = 10: up to 8 tokens are free, the ninth costs half, the tenth all."""
    mask = torch.arange(10) < torch.tensor([[1], [8], [9], [10]])
    assert length(dict(response_mask=mask)).tolist() == [0, 0, -0.5, -1]
    assert length(dict(response_mask=torch.ones(1, 1, dtype=torch.bool))).tolist() == [-1]
    assert length(dict(response_mask=torch.ones(0, 10, dtype=torch.bool))).shape == (0,)


# the choice of rewards


def test_parse_rewards():
    assert parse_rewards("accuracy", RULES, ".") == [(1.0, "accuracy", accuracy)]
    assert parse_rewards("1.0*accuracy,0.1*format", RULES, ".") == [(1.0, "accuracy", accuracy), (0.1, "format", format)]
    assert parse_rewards(" 2 * length , -0.5*thinks,1e-1*format ", RULES, ".") == [
        (2.0, "length", length), (-0.5, "thinks", thinks), (0.1, "format", format)]

MINE = """
from dataclasses import dataclass

@dataclass
class Word:
    text: str

number = 5
loaded = []

def brevity(batch):
    loaded.append(1)
    return [1.0 / (1 + len(c)) for c in batch["completions"]]

def broken(batch):
    rows = batch["rows"]
    return [row["missing"] for row in rows]

def empty(batch):
    return [len(c) / 0 for c in batch["completions"]]
"""


def test_a_function_of_the_users(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    rewards = parse_rewards("accuracy,-0.5*mine.py:brevity,mine.py:broken", RULES, str(tmp_path))
    assert [(w, n) for w, n, _ in rewards] == [(1.0, "accuracy"), (-0.5, "brevity"), (1.0, "broken")]
    assert rewards[1][2].__globals__ is rewards[2][2].__globals__  # the file was imported once
    batch = dict(completions=["abc", ""], rows=[dict(prompt="?")] * 2)
    assert rewards[1][2](batch) == [0.25, 1.0]
    (absolute,) = parse_rewards(f"{tmp_path / 'mine.py'}:brevity", RULES, "/nowhere")
    assert absolute[2](batch) == [0.25, 1.0]


@pytest.mark.parametrize("spec, message", [
    ("", "at least one reward"), ("  ", "at least one reward"), ("accuracy,", "beside a comma"), (",accuracy", "beside a comma"),
    ("2*", "missing after '2*'"), ("acuracy", "unknown reward 'acuracy'; did you mean 'accuracy'?"),
    ("0.1*fromat", "did you mean 'format'?"), ("-length", "did you mean 'length'?"),
    ("qqq", "there are accuracy, math, format, "),
    ("two*accuracy", "the weight of 'accuracy' must be a finite number, found 'two'"),
    ("nan*accuracy", "finite number, found 'nan'"),
    ("inf*accuracy", "finite"), ("1e999*accuracy", "finite"), ("*accuracy", "finite number, found ''"),
    ("2*3*accuracy", "found '2*3'"),
    ("- 1*accuracy", "found '- 1'"), ("accuracy,2*accuracy", "'accuracy' is given twice"),
    ("mine.py:brevity,2*mine.py:brevity", "'brevity' is given twice"), ("other.py:brevity", "there is no file"),
    ("mine.txt:brevity", "does not end with .py"), ("mine.py:brevty", "has no 'brevty'"), ("mine.py:", "has no ''"),
    ("mine.py:number", "has a int, not a function, 'number'"), ("mine.py", "unknown reward 'mine.py'"),
    (".:brevity", "does not end"),
    ("syntax.py:f", "syntax.py, line 2: SyntaxError"), ("name.py:f", "name.py, line 3: NameError: name 'undefined'"),
    ("imports.py:f", "imports.py, line 1: ModuleNotFoundError: No module named 'no_such_module'"),
    ("leaves.py:f", "leaves.py, line 1: SystemExit: 3"),
    ("takes.py:format", "'format' is already the name of a built-in reward")])
def test_bad_specs_are_one_line(tmp_path, spec, message):
    files = dict(mine=MINE, syntax="x = 1\ndef f(:\n", name="x = 1\n\nundefined\n", imports="import no_such_module\n",
                 leaves="raise SystemExit(3)\n", takes="def format(batch): pass\n")
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text)
    with pytest.raises(BadInput) as e:
        parse_rewards(spec, RULES, str(tmp_path))
    assert message in str(e.value) and "\n" not in str(e.value)


def test_mix_by_hand():
    """2 * accuracy - 0.5 * format of three responses."""
    completions = ["<think>a</think>7", "7", "<think>a</think>8"]
    batch = dict(completions=completions, rows=[dict(prompt="?", answer="7")] * 3)
    scores, each = mix(parse_rewards("2*accuracy,-0.5*format", RULES, "."), batch)
    assert scores.tolist() == [1.5, 2.0, -0.5] and scores.dtype == torch.float64
    assert {k: x.tolist() for k, x in each.items()} == {"accuracy": [1, 1, 0], "format": [1, 0, 1]}
    assert all(x.dtype == torch.float64 for x in each.values())


@pytest.mark.parametrize("returned", [
    [1, 2.5, True], (1, 2.5, True), torch.tensor([1, 2.5, 1]),
    torch.tensor([1, 2.5, 1], dtype=torch.bfloat16, requires_grad=True),
    np.array([1, 2.5, 1]), np.array([1, 2.5, 1], dtype=np.float16), [torch.tensor(1), np.float32(2.5), np.int64(1)]])
def test_mix_takes_tensors_arrays_and_lists(returned):
    batch = dict(completions=["a", "b", "c"], rows=[dict(prompt="?")] * 3)
    scores, each = mix([(2.0, "mine", lambda batch: returned)], batch)
    assert scores.tolist() == [2, 5, 2] and each["mine"].tolist() == [1, 2.5, 1]
    none = dict(completions=[], rows=[])
    assert mix([(2.0, "mine", lambda batch: returned[:0])], none)[0].shape == (0,)


@pytest.mark.parametrize("returned, message", [
    ([1, 2], "must return 3 numbers, one a response, as a 1-D tensor, array or list; it returned list of shape (2,)"),
    ([1, 2, 3, 4], "list of shape (4,)"), ([], "list of shape (0,)"), (None, "returned NoneType"), (1.0, "returned float"),
    ("abc", "returned str"), ({0: 1, 1: 1, 2: 1}, "returned dict"), (torch.ones(3, 1), "Tensor of shape (3, 1)"),
    (torch.tensor(1.0), "returned Tensor"), (np.ones((1, 3)), "ndarray of shape (1, 3)"), (iter([1, 2, 3]), "iterator"),
    ([1, float("nan"), 2], "gave nan, no finite number, for the row with the prompt 'two'"),
    ([1, 2, float("inf")], "gave inf, no finite number, for the row with the prompt 'three'"),
    (torch.tensor([1, 2, -torch.inf]), "-inf"),
    (["1", 2, 3], "gave '1', no finite number"),
    ([[1], [2], [3]], "gave [1], "), ([1, 1e300, 2], "gave 1e+300"), ([10**400, 1, 2], "no finite number"),
    ([1j, 1, 1], "gave 1j"),
    ([torch.ones(2), 1, 1], "no finite number"), (np.array(["a", "b", "c"]), "gave 'a'")])
def test_mix_names_what_is_wrong(returned, message):
    batch = dict(completions=["a", "b", "c"], rows=[dict(prompt=p) for p in ("one", "two", "three")])
    with pytest.raises(Stop) as e:
        mix([(1.0, "thinks", thinks), (1.0, "mine", lambda batch: returned)], batch)
    assert str(e.value).startswith("reward 'mine' ") and message in str(e.value) and "\n" not in str(e.value)


def test_mix_names_the_line_that_failed(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    batch = dict(completions=["a"], rows=[dict(prompt="?")])
    lines = MINE.split("\n")
    for name, line, error in (("broken", 'return [row["missing"]', "KeyError: 'missing'"), ("empty", "/ 0", "ZeroDivisionError")):
        number, = [i for i, text in enumerate(lines, 1) if line in text]
        with pytest.raises(Stop) as e:
            mix(parse_rewards(f"mine.py:{name}", RULES, str(tmp_path)), batch)
        assert str(e.value).startswith(f"reward {name!r} failed at {tmp_path / 'mine.py'}, line {number}: {error}")
    with pytest.raises(Stop, match="'leaves' failed.*: SystemExit: 3$"):
        mix([(1.0, "leaves", lambda batch: exit(3))], batch)
    with pytest.raises(BadInput, match="^as it was$"):
        mix([(1.0, "mine", lambda batch: (_ for _ in ()).throw(BadInput("as it was")))], batch)


def test_mix_says_when_a_row_has_no_answer():
    long = "how many clips did Natalia sell altogether in April and May, and what of June?"
    batch = dict(completions=["1", "2"], rows=[dict(prompt="?", answer="1"), dict(prompt=[dict(role="user", content=long)])])
    with pytest.raises(Stop) as e:
        mix([(1.0, "accuracy", accuracy)], batch)
    assert str(e.value) == ("reward 'accuracy' gave no score: there is no 'answer' in the row with the prompt 'how many clips "
                            "did Natalia sell altogether in April and May...")


def test_collect_puts_the_parts_together_and_does_not_wait_for_ever():
    threads, gate = ThreadPoolExecutor(1), threading.Event()
    rewards = [(1.0, "mine", lambda batch: [float(len(c)) for c in batch["completions"]])]
    batches = [dict(completions=list(c), rows=[{}] * len(c)) for c in (["a", "bb"], [], ["cccc"])]
    each = collect([threads.submit(call_rewards, rewards, batch) for batch in batches], 60)
    assert each["mine"].tolist() == [1.0, 2.0, 4.0] and collect([threads.submit(call_rewards, [], batches[0])], 60) == {}
    hanging = threads.submit(call_rewards, [(1.0, "stuck", lambda batch: gate.wait(60))], batches[0])
    with pytest.raises(Stop, match="have not answered for 0.05 s"):
        collect([hanging], 0.05)
    gate.set()
    with pytest.raises(Stop, match="reward 'late' must return 2 numbers"):
        collect([threads.submit(call_rewards, [(1.0, "late", lambda batch: [1.0])], batches[0])], 60)


def test_check_rows(monkeypatch):
    monkeypatch.setattr(reward_mix, "check_sandbox", lambda: None)  # is for the code of responses
    rows = [dict(prompt="?", answer="7", tests=[dict(stdin="", stdout="")]),
            dict(prompt="?", answer="0", tests=[dict(stdin="", stdout="")])]
    rewards = parse_rewards("accuracy,format,length,thinks", RULES, ".") + [(1.0, "code", len), (1.0, "mine", len)]
    check_rows(rewards, rows, "data.jsonl")
    assert set(NEEDS) == {"accuracy", "math", "code"}
    only = [r for r in rewards if r[1] not in NEEDS]
    check_rows(only, [dict(prompt="?")], "data.jsonl")
    for field, name in (("answer", "accuracy"), ("tests", "code")):
        short = {k: x for k, x in rows[1].items() if k != field}
        with pytest.raises(BadInput, match=f"^data.jsonl, row 2: the reward '{name}' needs the field '{field}'; the row has 'p"):
            check_rows(rewards, [rows[0], short], "data.jsonl")
        with pytest.raises(BadInput, match=f"^data.jsonl, row 1: the field '{field}' must be .* reward '{name}', found None"):
            check_rows(rewards, [dict(rows[0], **{field: None})], "data.jsonl")


@pytest.mark.parametrize("value", ["", " ", True])
def test_check_rows_looks_at_the_values(value):
    with pytest.raises(BadInput, match="^data.jsonl, row 1: the field 'answer' must be"):
        check_rows(parse_rewards("accuracy", RULES, "."), [dict(prompt="?", answer=value)], "data.jsonl")

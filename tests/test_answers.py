r"""
answers.py on the kinds of answers that MATH and GSM8K have. The verdicts are mathematics', written
down by hand. A line `given == truth` or `given != truth` is tried both ways.
"""
import random
import time

import pytest

from engine.answers import final_answer, same_answer
from rewards import accuracy, format, thinks

PAIRS = {"numbers": r"""
72   ==   72.0
72   ==   +72
72   ==   \text{72}.
72   !=   7 2
72   !=   72 or 73
-5   ==   − 5
1,234   ==   1{,}234
1,234   !=   1, 234
10^6   ==   1 \times 10^{6}
10^6   !=   106
١٢   !=   12
1e999   !=   1e998
""", "fractions": r"""
0.5   ==   \frac12
0.5   ==   2/4
-\frac{2}{3}   !=   -0.667
1/0   !=   0
3\frac{1}{2}   ==   3 1/2
1/2/3   !=   1/6
\frac{\sqrt{3}}{2}   !=   \sqrt{3/2}
""", "units and names": r"""
\$18   ==   18 dollars
\$18   !=   18 cents
50\%   ==   50
50\%   !=   0.5
90^\circ   ==   90°
5 \text{ cm}   ==   5
5 \text{ cm}   !=   5 \text{ m}
5 \text{ cm}   !=   5 \text{ cm}^2
5 m   ==   5
5m   !=   5
12   !=   12 million
6!   !=   6
x=5   ==   5
x=5   !=   y=5
f^{-1}(x) = 2x   ==   2x
""", "lists and sets": r"""
(1, 2)   ==   \left(\frac22, 2.0\right)
(1, 2)   !=   (2, 1)
(1, 2)   !=   (1, 2]
(-\infty, 2) \cup (3, \infty)   ==   (-\infty,2) ∪ (3,\infty)
(-\infty, 2) \cup (3, \infty)   !=   (-\infty, 2] \cup (3, \infty)
1, -2   ==   1 \text{ and } -2
1, -2   !=   1 - 2
\{1, 2\}   !=   \{1, 1\}
\{1, 2\}   !=   \{1, 2, 2\}
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}   ==   \begin{pmatrix} 1&2 \\[2mm] 3&4 \end{pmatrix}
""", "text": r"""
2\sqrt{3}   !=   \sqrt{23}
288 \pi   !=   288
\pm 3   !=   3
x^{2} + 1   !=   x^{2+1}
x \leq 5   !=   x < 5
1011_2   !=   10112
\text{(B)}   ==   B
\text{Evelyn}   !=   \text{Eve}
\text{4:30 p.m.}   ==   4:30 PM
\text{4:30 p.m.}   !=   4:30 a.m.
"""}
TABLE = [(*line.split("   "), kind) for kind, text in PAIRS.items() for line in text.strip().splitlines()]
ANSWERS = sorted({answer for given, _, truth, _ in TABLE for answer in (given, truth)})


@pytest.mark.parametrize("kind", PAIRS)
def test_pairs(kind):
    wrong = [(given, sign, truth) for given, sign, truth, k in TABLE if k == kind
             for a, b in ((given, truth), (truth, given)) if same_answer(a, b) != (sign == "==")]
    assert not wrong


def test_wrong_digits():
    """No answer of the table is still itself with one digit changed, unless the digit only sets it, as in \\\\[2mm]."""
    rng, changed = random.Random(7), 0
    for answer in ANSWERS:
        for i, ch in enumerate(answer):
            if ch in "123456789" and not answer.startswith("mm]", i + 1):
                other = answer[:i] + rng.choice("123456789".replace(ch, "")) + answer[i + 1:]
                assert not same_answer(other, answer) and not same_answer(answer, other), other
                changed += 1
    assert changed > 50


PIECES = [*"0123456789abxeE.,+-*/^_=()[]{}$%<>\\ \n|!;:'\"", "\\frac", "\\frac{", "\\boxed{", "\\boxed", "\\boxed 5{", "\\text{",
          "\\left", "\\sqrt", "10^{", "\\,", "\\!", "^\\circ", "1,234", "####", "**", "<answer>", "</answer>", "<think>",
          "</think>", "Answer: ", "answer is ", "cm", "per ", "square ", " m", "¤", "−", "π", "٣", "²", "\u2028", "\x00",
          "\ud800",
          "🙂", "1e99", "\\in", "{}", "()", "\\{", "\\}", "```\n", "\\boxed ", "\\boxed{5 \\fbox 6"]


def test_hostile_text():
    """Whatever the text: a bool, no exception, at once, and the answer equals itself."""
    rng, slowest = random.Random(5), 0.0
    texts = ["\\frac{1}{" * 22, "{" + "{a,b,c,d,e}," * 15 + "}", "__import__('os').system('true')", "(" * 100 + ")" * 100]
    texts += [piece * n for piece in PIECES for n in (3, 199)] + ["".join(rng.choices(PIECES + ANSWERS, k=rng.choice(
        [1, 2, 3, 5, 8, 30, 90]))) for _ in range(600)]
    for i, text in enumerate(texts):
        spent = []
        for _ in range(3):  # the least of three: others use this machine, too
            began = time.thread_time()
            results = [same_answer(text, texts[i - 1]), same_answer(final_answer(text), "12"), same_answer(text, text[:-1] + "0")]
            spent.append(time.thread_time() - began)
            if spent[-1] < 0.005:
                break
        slowest = max(slowest, min(spent))
        assert all(type(r) is bool for r in results) and same_answer(text, text) == bool(text.strip())
    assert slowest < 0.02
    batch = dict(completions=texts, rows=[dict(prompt="", answer="12")] * len(texts))
    for rule in (accuracy, format, thinks):
        assert rule(batch).shape == (len(texts),) and rule(batch).isfinite().all()


def test_long_texts_take_no_time(end="x"):
    """400 KB of one thing: what grows with the square would take minutes."""
    for piece in [*PIECES, "\\boxed{}", "<answer></answer>", "Answer:\n", "#\n", "\\boxed" + " " * 1000]:
        began = time.thread_time()
        final_answer(end + piece * (400_000 // len(piece)) + end)
        assert time.thread_time() - began < 1, piece


# where the answer is

FOUND = [
    ("42", "42"), ("<think>1+1</think>2", "2"), ("<think>never ends 7", "<think>never ends 7"), ("12</think>", ""),
    (r"so \boxed{72}", "72"), (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"), (r"\boxed{\{1,2\}}", r"\{1,2\}"),
    (r"\boxed{5} and \boxed{6", "5"), (r"\boxed 5", "5"), (r"\boxed \frac{\sqrt{3}}{2}, so", r"\frac{\sqrt{3}}{2}"),
    (r"\boxed{}", ""), (r"\boxed{1}<answer>2</answer>#### 3", "1"), ("<answer> 2 </answer>#### 3", "2"),
    ("work\n#### 1,234\n\nDone.", "1,234"), ("so 30 + 4.\n\nAnswer: $34$", "$34$"), ("**Final Answer:** 34\nBye.", "34"),
    ("<think>Answer: 1</think>2", "2"), ("The answer is 4. No, the answer is 5.", "5"), ("2 and 3 make\n**5**", "5"),
    ("**5** or so", "**5** or so"), ("\\boxed{1}" + " " * 20_000 + "2", "2")]


def test_where_the_answer_is():
    assert [final_answer(completion) for completion, _ in FOUND] == [answer for _, answer in FOUND]


def test_accuracy():
    cases = [("16 - 3 - 4 = 9\n#### 72", "So 72.\n#### 72", 1), ("#### 71", "72", 0), (r"\boxed{\$72.00}", "72", 1),
             (r"\boxed{72}", "Natalia sold 48+24 = <<48+24=72>>72 clips.\n#### 72", 1), (r"\boxed{\frac12}", r"So \boxed{0.5}.",
             1),
             (r"72 \boxed{}", "72", 0), (r"<think>\boxed{72}", "72", 0), ("72 or 73", "72", 0), ("", "72", 0), ("7", 7, 1),
             ("the answer is not 42", "42", 0)]
    batch = dict(completions=[c for c, _, _ in cases] + ["7"], rows=[dict(prompt="?", answer=a) for _, a, _ in cases] + [{}])
    scores = accuracy(batch)
    assert scores[:-1].tolist() == [s for _, _, s in cases] and scores[-1].isnan()  # no answer is known
    with pytest.raises(ValueError):
        accuracy(dict(completions=["1", "2"], rows=[dict(answer="1")]))


# the response as a whole


def test_a_response_that_was_begun_for_the_policy_is_judged_whole():
    """The last message may be the assistant's own: what it says is part of the response, from <think> on if that is in it."""
    for begun, completion, *want in [
        (r"So \boxed{7", "2}", 1, 0, 0), (r"So \boxed{7", "3}", 0, 0, 0), ("<think>6 tens", r" are 60</think>72", 1, 1, 1),
        ("<think>6 tens", r"\boxed{72}", 0, 0, 0), ("Let me see. <think>", "6 tens</think>72", 1, 1, 1),
    ]:
        prompt = [dict(role="user", content="6*12?"), dict(role="assistant", content=begun)]
        batch = dict(completions=[completion], rows=[dict(prompt=prompt, answer="72")],
            prompts=["<user>6*12?<assistant>" + begun])
        assert [rule(batch).item() for rule in (accuracy, format, thinks)] == want, (begun, completion)
    user = dict(completions=["72"], rows=[dict(prompt=[dict(role="user", content="after <think>")], answer="72")],
                prompts=["<user>after <think><assistant>"])  # said by the user: nothing of the response
    assert accuracy(user).tolist() == [1]

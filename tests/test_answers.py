r"""
answers.py and same.py on the kinds of answers that MATH and GSM8K have. The verdicts are mathematics', written
down by hand. A line of the first table has an answer, those that are the same, and others: `5 == 5.0 | +5 != 6`.
"""
import random
import time

import pytest

from answers import final_answer
from rewards import accuracy, format, thinks
from same import same_answer

PAIRS = r"""
72   ==   72.0 | +72 | \text{72}.   !=   7 2 | 72 or 73
-5   ==   − 5 | –5   !=   —5
3–5   ==   3-5   !=   3 | 3, 5 | -2
10⁻³   ==   0.001
5²   !=   52
2³   !=   8
~5   !=   5
1,234   ==   1{,}234 | 1 234   !=   1, 234
1 234.5   ==   1\,234.5
1 234   !=   1234, 5
12 34   !=   1234
1 234/500   !=   1234/500
5e2   ==   500
10^6   ==   1 \times 10^{6}   !=   106
١٢   !=   12
1e999   !=   1e998
0.5   ==   \frac12 | 2/4
-\frac{2}{3}   !=   -0.667
1/0   !=   0
\frac{1}{-2}   ==   -\frac12   !=   \frac{1}{2}
\frac{-1}{-2}   ==   0.5
1/(-2)   ==   −½
½   ==   1⁄2   !=   12
2¾   ==   \frac{11}{4}
5½   !=   5/2
1/2   !=   1/20
3\frac{1}{2}   ==   3 1/2
2 3/2   !=   7/2
1/2/3   !=   1/6
\frac{\sqrt{3}}{2}   !=   \sqrt{3/2}
\$18   ==   18 dollars   !=   18 cents
50\%   ==   50   !=   0.5
90^\circ   ==   90°
5 \text{ cm}   ==   5   !=   5 \text{ m} | 5 \text{ cm}^2
5 m   ==   5
5m   !=   5
12   !=   12 million
$7   !=   7 €
7€   ==   7
60 km/h   ==   60 | 60 km per h   !=   60 km | 60 mph
5 mW   !=   5 MW
7°C   !=   7°F
7 cm²   !=   7 cm³
7 days   !=   7 weeks
72 clips   ==   72 Clips   !=   72 dogs | 72 cm
1,000 clips   ==   1000 clips
6!   !=   6
x=5   ==   5   !=   y=5
f^{-1}(x) = 2x   ==   2x
θ = 30°   ==   \theta = 30
α = 5   !=   β = 5
5 kg   ==   5 kilograms
5 cm   ==   5 centimetres
5 km/h   ==   5 kilometers per hour
5 mph   ==   5 miles/hour
5 sq ft   ==   5 square feet
5 ft²   ==   5 square feet
5 m³   ==   5 cubic meters   !=   5 square meters
5 °C   ==   5 degrees Celsius   !=   5 degrees
5 minutes   ==   5 min
5 min   !=   5 m
5 USD   ==   $5
USD 5   ==   5 dollars
$5 per day   ==   5 dollars/day   !=   $5 per hour
5 per day   !=   5 days
£5   !=   $5
(1, 2)   ==   \left(\frac22, 2.0\right)   !=   (2, 1) | (1, 2]
(-\infty, 2) \cup (3, \infty)   ==   (-\infty,2) ∪ (3,\infty)   !=   (-\infty, 2] \cup (3, \infty)
1, -2   ==   1 \text{ and } -2   !=   1 - 2
\{1, 2\}   !=   \{1, 1\} | \{1, 2, 2\}
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}   ==   \begin{pmatrix} 1&2 \\[2mm] 3&4 \end{pmatrix}
No   ==   no   !=   not
YES   ==   yes
New York   ==   new york
Да   ==   да
‘Paris’   ==   «paris»
don't   ==   don’t
x ≥ 5   ==   x >= 5
x != 5   ==   x \neq 5   !=   x = 5
Ab   ==   ab
A   !=   a
A or B   !=   A
\Delta   !=   \delta
{\bf 5}   ==   5
\bf x   ==   \mathbf{x}
"5"   ==   5
x²+1   ==   x^{2}+1
x¹⁰   ==   x^{10}
x²   !=   x2
101₂   ==   101_2
2\sqrt{3}   !=   \sqrt{23}
288 \pi   !=   288
\pm 3   !=   3
x^{2} + 1   !=   x^{2+1}
x \leq 5   !=   x < 5
1011_2   !=   10112
\text{(B)}   ==   B
\text{Evelyn}   !=   \text{Eve}
\text{4:30 p.m.}   ==   4:30 PM   !=   4:30 a.m.
"""
TABLE = []  # (an answer, == or !=, another one)
for line in PAIRS.strip().splitlines():
    given, *parts = line.split("   ")
    TABLE += [(given, sign, truth) for sign, truths in zip(parts[::2], parts[1::2], strict=True) for truth in truths.split(" | ")]
ANSWERS = sorted({answer for given, _, truth in TABLE for answer in (given, truth)})


def test_pairs_both_ways():
    wrong = [(given, sign, truth) for given, sign, truth in TABLE for a, b in ((given, truth), (truth, given))
             if same_answer(a, b) != (sign == "==")]
    assert not wrong and len(TABLE) > 130


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


# forms of one right answer, 5; ¶ is a new line
FORMS = r"""
5.|$5$.|**5**|`5`|"5"|$$¶5¶$$|\[5\]|```¶5¶```|5 ✓|x = 5|= 5|\boxed{5}|So $\boxed{5}$.|\fbox{5}|\boxed{x + y = 5}|\boxed{\bf 5}
\boxed{Answer: 5}|\boxed{\text{Answer: } 5}|\boxed{\text{The answer is 5.}}|\boxed{5 \text{ clips}}|work¶#### 5|#### Answer: 5
<answer>5</answer>|<answer>Answer: 5</answer>|<answer>The final answer is $5$.</answer>|<answer>¶Final answer:¶5¶</answer>
<answer>\boxed{5}</answer>|<answer>#### 5</answer>|<answer>x + y = 5</answer>|<answer>5. I hope this helps!</answer>
Answer: 5|Ans: 5|Ans. 5|ANSWER = 5|Answer：5|**Answer:** 5|**Answer**: 5|- **Answer**: 5|* Answer: 5|2. **Final answer:** **5**
> Answer: 5
__Answer:__ 5|My answer: 5|The correct answer: 5|Final result: $5$|Answer: x = 5|Answer: 5 clips|Answer -> 5
Answer: 5¶Bye, see figure 6.
**Answer:** The total is 5.|Final answer: Ann has 5 apples left.|The answer would be 5.|The answer will be 5 USD.
My answer is 4, so the final answer is 5.|5 years old|I add 2 and 3.¶Answer: so x = 5|So she has $5 left.|So it is $5 each
**Final Answer:**¶5|**Final Answer**¶¶$5$|### Answer¶¶5|## Final answer:¶¶**5**|Answer:¶¶$$5$$|Ans:¶x + y = 5|Answer:¶```¶5¶```
The answer is:¶5|So the final answer is:¶¶\[5\]|**Answer:**¶¶5¶¶I hope this helps!
**Answer:**¶5¶¶**Explanation:** 2 and 3.¶¶Add them.
Final Answer: The final answer is $5$. I hope it is correct.|Final Answer:¶The final answer is $5$. I hope it is correct.
The answer is 5.|The answer is **5**|The correct answer to the problem is $5$.|The answer, then, is 5|So the answer must be 5!
No, the answer is 5.
The answer is 5, because 2 + 3 = 5.|The answer is 4. No, the answer is 5.|It is not 4, so the answer is 5.|5 is the answer.
The answer is 5.¶¶Let me know if you have any questions!|The answer is 5. Please don't hesitate to ask for help.
Ann: 2.¶**5**¶¶Good luck 😊
5¶¶Thank you!|Answer: 5. Hope that helps! Bye.|Thus x + y = 5.|Thus, $x + y = 5$.|Hence 2 + 3 = 5|∴ x = 5|So $\sin(a + b) = 5$.
So f(2, 3) = 5
We add. Thus x + y = 5. I hope this helps!|Therefore x + y = 2 + 3 = 5 cm.|So the total is 5.|So the total is 2 + 3 = 5.|So, 5.
Hence the sum of 2 and 3 is 5.|The value of x is 5.|x equals 5.|Therefore, Ann has 5 red apples left.|**Add**¶Thus there are 5.
"""
# responses, and answers of rows that they do not give
OTHERS = r"""
5: not 5|5 or 6|5, 6|5 and 6|5; 6|5 to 6|5–6|5:6|5:00|5/6|-5|–5|5x|5 x|5 xy|5i|5π|5!|5²|5^2|5½|5\sqrt{2}|±5|5 ± 1|5+|>5|≥ 5|≈5
5: about 5|5th|v5
5: 5.1.2|2024-01-05|1/5/2024|5 March|May 5|5 am|5 million|5 hundred|5 dozen eggs|5 halves|5 tenths|5 squared|5 more
5: 5 more apples|5 less|5 fewer cats
5: 5 apples and pears|5 apples or pears|5 plus apples|5 times 3|x = 5 or x = 6|x = 5, y = 6|x < 5|x \neq 5|x = 6 = 5|Let x = 5
5: x = 5?|A: 5¶B: 6
5: The answer is not 5.|The answer isn't 5.|I don't think the answer is 5.|It is not true that the answer is 5.
5: The wrong answer is 5.
5: The answer is 5 or 6.|The answer is 5 or the answer is 6.|The answer is 5 and the answer is 6.|Either 4 or the answer is 5.
5: Incorrect answer: 5
5: Answer: Tom has 3 and Ann has 5.|Answer: She has 5 more.|Answer: 5!|A) 5|A. 5|The answer is 4, and the answer is 5
5: The answer is 5? No, 6.|The answer is 5. No, the answer is 6.|The answer is 5. Wait, that is wrong.
5: The answer is 5. I hope it is 6.|5 is not the answer.
5: Check if the answer is 5.|It is not **5**.|either **4** or **5**|**4** and **5**|The answer is less than 5.
5: The answer is 5 more than 3.|Answer: 5 or 6
5: Answer:¶5¶6|Answer:¶¶5¶¶6|**Final Answer:**¶5¶¶or 6|**Final Answer:**¶not 5|**Final Answer:**¶-5|Answer - 5|Answer – 5
5: Ans: 5 or 6|- **Answer**: not 5
5: Final Answer: The final answer is $5$ or $6$. I hope it is correct.|5 or 6. I hope this helps!
5: It is not 5. I hope this helps!
5: <answer>5 or 6</answer>|<answer>Answer: not 5</answer>|<answer>5</answer><answer>6</answer>
5: \boxed{\text{Answer: } 5 \text{ or } 6}|\boxed{5}\boxed{6}
5: Thus x = 5 or x = 6.|Thus x = 5 and y = 6.|Thus x + y < 5.|Thus x + y != 5.|Thus x + y ≈ 5.|So if x = 5|So suppose x = 5.
5: Suppose the total is 5.
5: So the total is not 5.|So the total is 5 or 6.|So the total is about 5.|So the total is 5 million.|So is the total 5?
5: So Tom has 3 and Ann has 5.|Ann has 5.
6: 5 or 6|x = 5 or x = 6|x = 5, y = 6|The answer is 5 or 6.|The answer is 5 or the answer is 6.|Thus x = 5 and y = 6.
6: Answer:¶5¶6|The answer is 5, not 6.
x + y = 5: 5|Thus 2x - y = 5.|x + y = 6|5 = 5
x = 5: y = 5|2x = 5|So y is 5.
5: f(x) + 1 = 5|\sin(x) = 5|2x = 5|So $2x = 5$.|So 2x is 5.|Thus x + 1 = 5.|Hence x^2 = 5.|Answer: \sqrt{x} = 5|It is 5.
B: B) or C)|B) Paris C) Rome|B or C|(A) and (B)|B) is wrong|b) Paris|A) B|Option B or C
72 clips: 72 dogs|72 cm|72|71 clips
yes: no|Yes, no|not yes|y|It is not **yes**
no: **not no**|It is not **no**.|none|**No** or **yes**
25\pi: So the area is 25.|So the area is not 25\pi|So she is 25\pi or 5
(3, 5): [3, 5]|(3, 5]|(5, 3)|3–5|35
4:30 pm: 4:30 am|4:30|4.5
"""


def test_one_right_answer_in_many_forms():
    forms = [form.replace("¶", "\n") for line in FORMS.strip().splitlines() for form in line.split("|")]
    batch = dict(completions=forms, rows=[dict(prompt="?", answer="5")] * len(forms))
    assert [form for form, score in zip(forms, accuracy(batch), strict=True) if score != 1] == [] and len(forms) > 90
    cut = [form.replace("5", "6") for form in forms]
    assert accuracy(batch | dict(completions=[form for form in cut if "5" not in form])).sum() == 0


def test_a_choice_may_say_what_it_chooses():
    forms = (r"B)|(B)|B.|B) Paris|(B) Paris|B: Paris|The answer is (B) Paris.|Answer: B) 5 cm|**B. Paris**|\boxed{B) 12}|"
             "Option B|The correct option is B.|The answer is choice B.|<answer>B) Paris</answer>").split("|")
    for answer, score in (("B", 1), ("(B)", 1), ("A", 0), ("b", 0)):
        batch = dict(completions=forms, rows=[dict(prompt="?", answer=answer)] * len(forms))
        assert accuracy(batch).tolist() == [score] * len(forms)


STATED = [  # words and formulas
    ("**No**", "no"), ("5 is odd.\n\n**No.**", "no"), ("**Answer:**\n\n**No**", "no"), ("The answer is **No**.", "no"),
    ("Therefore the area is $25\\pi$.", "25\\pi"), ("So the length is $\\sqrt{2}$", "\\sqrt2"), ("Thus the choice is B.", "B"),
    ("5! = 120", "120"), ("x_1 + x_2 = 5", "5"), ("5\u200b", "5"), ("Zu\u0308rich", "Zürich")]


def test_what_is_not_the_answer():
    pairs = [(response.replace("¶", "\n"), answer) for line in OTHERS.strip().splitlines()
             for answer, _, responses in [line.partition(": ")] for response in responses.split("|")]
    scores = accuracy(dict(completions=[p[0] for p in pairs], rows=[dict(prompt="?", answer=p[1]) for p in pairs]))
    assert [pair for pair, score in zip(pairs, scores, strict=True) if score != 0] == [] and len(pairs) > 140


PIECES = [*"0123456789abxeE.,+-*/^_=()[]{}$%<>\\ \n|!;:'\"", "\\frac", "\\frac{", "\\boxed{", "\\boxed", "\\boxed 5{", "\\text{",
          "\\left", "\\sqrt", "10^{", "\\,", "\\!", "^\\circ", "1,234", "####", "**", "<answer>", "</answer>", "<think>",
          "</think>", "Answer: ", "answer is ", "cm", "per ", "square ", " m", "mi/hs", "¤", "−", "π", "٣", "²", "\u2028", "\x00",
          "\ud800", "🙂", "1e99", "\\in", "{}", "()", "\\{", "\\}", "```\n", "Answer: 5\n", "The answer is 5. ",
          "the answer is:\n", "I hope this helps! ", "✓\n", "So ", "x = ", "\n \n", "\\text{answer ", "½", "–", "\\boxed ",
          "\\boxed{5 \\fbox 6"]


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


def test_long_texts_take_no_time():
    """400 KB of one thing: what grows with the square would take minutes."""
    for piece in [*PIECES, "\\boxed{}", "<answer></answer>", "Answer:\n", "#\n", "\\boxed" + " " * 1000]:
        began = time.thread_time()
        final_answer(f"x{piece * (400_000 // len(piece))}x")
        assert time.thread_time() - began < 0.2, piece  # 0.02 on a quiet machine


# where the answer is

FOUND = [
    ("<|channel|>analysis<|message|>6 or 7?<|end|><|start|>assistant<|channel|>final<|message|>The answer is 7.", "7"),
    ("<|channel|>analysis<|message|>the answer is 6", "<think><|channel|>analysis<|message|>the answer is 6"),  # cut off
    ("42", "42"), ("<think>1+1</think>2", "2"), ("<think>never ends 7", "<think>never ends 7"), ("12</think>", ""),
    (r"so \boxed{72}", "72"), (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"), (r"\boxed{\{1,2\}}", r"\{1,2\}"),
    (r"\boxed{5} and \boxed{6", "5"), (r"\boxed 5", "5"), (r"\boxed \frac{\sqrt{3}}{2}, so", r"\frac{\sqrt{3}}{2}"),
    (r"\boxed{}", ""), (r"\boxed{1}<answer>2</answer>#### 3", "1"), ("<answer> 2 </answer>#### 3", "2"),
    ("work\n#### 1,234\n\nDone.", "1,234"), ("so 30 + 4.\n\nAnswer: $34$", "$34$"), ("**Final Answer:** 34\nBye.", "34"),
    ("<think>Answer: 1</think>2", "2"), ("The answer is 4. No, the answer is 5.", "5"), ("2 and 3 make\n**5**", "5"),
    ("**5** or so", "**5** or so"), ("\\boxed{1}" + " " * 20_000 + "2", "2"), (r"\boxed{1 + \boxed{2}}", "2")]


def test_where_the_answer_is():
    assert [final_answer(completion) for completion, _ in FOUND] == [answer for _, answer in FOUND]


def test_accuracy():
    cases = [("16 - 3 - 4 = 9\n#### 72", "So 72.\n#### 72", 1), ("#### 71", "72", 0), (r"\boxed{\$72.00}", "72", 1),
             (r"\boxed{72}", "Natalia sold 48+24 = <<48+24=72>>72 clips.\n#### 72", 1),
             (r"\boxed{\frac12}", r"So \boxed{0.5}.", 1), (r"72 \boxed{}", "72", 0), (r"<think>\boxed{72}", "72", 0),
             ("72 or 73", "72", 0), ("", "72", 0), ("7", 7, 1), ("the answer is not 42", "42", 0),
             *((response, answer, 1) for response, answer in STATED)]
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

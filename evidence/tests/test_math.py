r"""
The reward `math` (grading/expressions.py). The verdicts are mathematics', written down by hand:
some are decided here, by units, names and sentences, the others by math-verify, in processes that
are ended where they hang. (That no text takes long: test_programs.py.)
"""
import importlib.util
import math
import time

import pytest
from errors import BadInput, Stop
from grading import expressions
from grading.answers import accuracy
from grading.expressions import math_answer
from prompts import Rows
from rewards import check_rows, reward_terms

ALIKE = r"""
x + 1|1 + x   xy|yx   2\sqrt{2}|\sqrt{8}   $\frac{x^2-1}{x-1}$|$x+1$   4x^2y|4yx^2
\pi/2|\frac{\pi}{2}   \{1, 3\}|$\{1\} \cup \{3\}$   (1, 2)|\left(\frac22, 2.0\right)
[0, 1)|\left[0, 1\right)   1, -2|-2, 1   (3,\frac{\pi}{2})|\left( 3, \frac{\pi}{2} \right)
x = 1 or x = 2|1, 2   1\pm\sqrt{19}|1 \pm \sqrt{19}   x \in [-2,7]|[-2,7]
(-\infty, 2) \cup (3, \infty)|(-\infty,2) ∪ (3,\infty)   x=5|5   y = x+1|x + 1
\begin{pmatrix}1\\2\end{pmatrix}|\begin{pmatrix} 2/2 \\ 2 \end{pmatrix}   -\frac{2}{3}|-2/3   −5|-5
0.75|\dfrac{3}{4}   33\frac{1}{3}\%|\frac{100}{3}   2.5 \times 10^{3}|2500   10^6|1000000   3·x|3x
\$32,\!348|32348   \$18|18 dollars   90^\circ|90   90^{\circ}|90°   50\%|50   \text{even}|even
x²|x^{2}   10\text{ cm}|10   2x cm|x + x   5 cm|5 centimetres   $5$ km|5 kilometers
7 cm²|7 square centimeters   72 clips|72   72\text{ clips}|72   5 m/s|5   5 km/h|5 km per hour
6 minutes|6 min   \emptyset|\varnothing   so $x + 1$|1+x   The answer is $\frac{1}{2}$.|0.5
The final answer is $5$. I hope it is correct.|5   3 1/2|7/2   x = 3 1/2|3.5   -3 1/2 cm|-3.5 cm
(1, 2 1/2)|(1, 2.5)   1,000 1/2|1000.5   3 1/2|3\frac{1}{2}   .5|\frac12   $.50|0.5 dollars
5 thoughts|5   .5x|x/2   5 cities|5   5 months|5   5 tents|5   5 grandchildren|5
1.6\times10^{-19}|1.6\cdot 10^{-19}   1.6\times10^{-19}|1.6e-19   0.333333|1/3   0.142857|1/7
3.141593|\pi   0.\overline{3}|1/3   1/3|0.\overline{3}   0.1\overline{6}|\frac16   0.\overline3|1/3
-0.\overline{3}|-1/3   1.\overline{27}|14/11   0.\bar{6}|2/3   0.\dot{1}4285\dot{7}|1/7
\frac{1}{3}\times10^{-9}|3.333333\times10^{-10}   \{1, 10^{-9}\}|\{10^{-9}, 1\}
x \le 0.5|x \le \frac12   \begin{pmatrix}0.5\\1\end{pmatrix}|\begin{pmatrix}1/2\\1\end{pmatrix}
\pm 3|\{3,-3\}   2516_8|2516_8   2516|2516_8   1358|2516_8   2516_{8}|2516_8   1358_{10}|2516_8
FF_{16}|255   255|FF_{16}   (2516)_8|2516_8   5, 6|101_{2}, 110_{2}   -101_2|-5   101_2+1|6
2516 base 8|2516_8   2516 \text{ base } 8|2516_8   2516₈|2516_8   \frac{2516_8}{2}|679   x_{1}|x_1
\log_2 8|3   5 000 cm|5000 cm   \frac{1}{2}。|0.5   1、\sqrt{8}|1, 2\sqrt2
"""
UNLIKE = r"""
5 cm|5 m   5 \text{ cm}|5 \text{ m}   5 cm|5 cm^2   7 cm²|7 cm³   7°C|7°F   $7|7 €
5 per day|5 days   5 days|5 hours   5 km/h|5 km   $5 per day|$5 per hour   5m|5   24wxyz|24
x = 5|y = 5   2x = 5|5   x+1 = 5|5   x = 6 = 5|5   \sin(x) = 5|5   x + y = 5|5   x + y = 5|x - y = 5
(1, 2)|(1, 2]   [1,2)|[1,2]   (1,2)|(2,1)   5 or 6|5   5, 6|5   5 to 6|5   5–6|5   5 \text{ or } 6|5
not 5|5   cannot be $5$|5   It is not $5$.|5   $5$ is wrong|5   the total is not 5|5
\text{not } 5|5   either 5|5   5 more|5   5 hundred|5   5 million|5   5 dozen|5   5 halves|5
5 tenths|5   5th|5   5 squared|5   5!|5   5½|5   5+|5   ≥ 5|5   about 5|5   ≈ 5|5   x+y ≈ 5|5   5?|5
Let x = 5|5   4:30 am|4:30 pm   5 am|5   act|cat   Paris|Parsi   yes, no|yes   \sqrt{8}|\sqrt{2}
The answer is not 5.|5   The wrong answer is 5.|5   The answer is 5 or 6.|5
\frac{1}{2}|\frac{1}{3}   x + 1|x + 2   import os|x   A) 5|5   5 i|5   5x|5   6|5   \pm 3|3
x < 5|5   x \le 5|x < 5   5 and 6|5   3 1/2|31/2   3 1/2|3/2   1,2 1/2|1,21/2   .5|5   $.50|50
5 lakh|5   5 tens|5   5 score|5   5 gross|5   5 factorial|5   5 crore dollars|5   5 score clips|5
5 twenties|5   5 fivefold|5   5 halved|5   5 doubled|5   5 twos|5   5 hundredths|5   5 thou|5
5 zeros|5   1.6\times10^{-19}|1.6\times10^{-20}   1.6\times10^{-19}|-1.6\times10^{-19}   10^{-9}|0
0.0000001|0   0.0000001|0.0000002   1e-7|0   (1.6\times10^{-19},2)|(1.6\times10^{-20},2)
e^{-20}|e^{-21}   0.3333|1/3   \{1.6\times10^{-19}\}|\{1.6\times10^{-20}\}
[0,1.6\times10^{-19}]|[0,1.6\times10^{-20}]   x<1.6\times10^{-19}|x<1.6\times10^{-20}
x=1.6\times10^{-19}|x=1.6\times10^{-20}
\begin{pmatrix}10^{-9}\\1\end{pmatrix}|\begin{pmatrix}0\\1\end{pmatrix}   0.\overline{3}|0.3
0.\overline{3}|1/4   2516_9|2516_8   2516_8|2516   2516_{9}|2516_8   2517|2516_8   x|x_1   x+1|x_1+1
0.\dot{1}\dot{2}|1/9   2516_2|2516   1358_8|1358   101_2|101   101|5_{10}   25_x|25   10²|102   5!|5
0 7|7   5。5|55
"""


def table(text):
    return [pair.split("|") for line in text.strip().splitlines() for pair in line.split("   ")]


def test_two_answers():
    """Each alone, behind a boxed wrong one, and as a sentence's formula; and the other way."""
    pytest.importorskip("math_verify")
    alike, unlike = table(ALIKE), table(UNLIKE)
    pairs = {(given, answer): 1 for given, answer in alike} | {(a, b): 0 for a, b in unlike}
    pairs |= {(rf"\boxed{{{b}}} so \boxed{{{a}}}.", b): same  # the last one counts
              for (a, b), same in list(pairs.items())[::7] if "$" not in a + b}
    found = math_answer(dict(completions=[text for text, _ in pairs],
                             rows=[dict(prompt="?", answer=answer) for _, answer in pairs]))
    assert [(pair, score) for pair, score in zip(pairs, found, strict=True)
            if score != pairs[pair]] == []


def test_only_formulas_are_asked_and_each_once(monkeypatch, capsys):
    asked = []

    def same(pairs, workers, seconds):
        asked.append((pairs, seconds))
        return [None if "late" in pair[0] else pair == ("x+1", "1+x") for pair in pairs]

    monkeypatch.setattr(expressions, "same_formulas", same)
    completions = ["7", r"so \boxed{x+1}", "x+1", "<think>x+2</think>x+1", r"\boxed{1+x}", "x+2",
                   r"x+\late", "<think>x+1", "", "x" * 3000]
    batch = dict(rows=[dict(prompt="q", answer=x) for x in [7] + ["1+x"] * 9],
                 completions=completions, seconds=10)
    assert math_answer(batch) == [1, 1, 1, 1, 1, 0, 0, 0, 0, 0]
    assert asked == [([("x+1", "1+x"), ("x+2", "1+x"), (r"x+\late", "1+x")], 8)]
    assert "1 of 10" in capsys.readouterr().out
    assert accuracy(batch).tolist() == [1, 0, 0, 0, 1, 0, 0, 0, 0, 0]  # the same letters alone


def test_a_formula_that_never_ends_harms_no_other(monkeypatch):
    pytest.importorskip("math_verify")
    monkeypatch.setattr(expressions, "SECONDS", 2)
    monkeypatch.setattr(expressions, "WORKER", expressions.WORKER.replace(
        "        given, truth =",
        "        import time; time.sleep(1000 * ('never' in line))\n        given, truth ="))
    began = time.monotonic()
    pairs = [("x+1", "1+x"), ("never", "x"), ("x+1", "1+x"), ("9^{9^{9^{9^{9}}}}", "3"),
             ("x+1", "1+x")]
    assert expressions.same_formulas(pairs, 1, 200) == [True, False, True, False, True]
    assert time.monotonic() - began < 100
    assert expressions.same_formulas(pairs[:1], 1, 0) == [None]


def test_without_the_package_or_its_worker_one_line_says_what_to_install(monkeypatch):
    terms, rows = reward_terms("math"), Rows([dict(prompt="q", answer="1 + x")])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match="pip install math-verify"):
        check_rows(terms, rows)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    check_rows(terms, rows)
    monkeypatch.setattr(expressions, "WORKER", "raise SystemExit(1)")
    with pytest.raises(Stop, match="math-verify"):
        expressions.same_formulas([("x", "y")], 1, math.inf)


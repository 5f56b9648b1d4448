"""
The reward of Countdown, an example of a reward of your own: reach a target with some numbers.

    reward_functions = "data/countdown/reward.py:countdown"    # as in config/countdown_grpo.py

Rows have `numbers` and `target`, as prepare.py writes them.
"""
import re
from fractions import Fraction

import torch

from engine.answers import after_thinking, last_tagged, whole_responses

LONGEST = 200  # characters of an equation, which also bounds the digits
DEEPEST = 20  # parentheses inside each other


def countdown(batch):
    """
    (B,): 1.0 where the <answer> of the response is an expression that equals the row's `target` and
    uses each of the row's `numbers` exactly once; 0.1 where there is another <answer>...</answer>
    that is not blank; else 0.0. With numbers [3, 5, 7] and target 26, "<answer>3*7+5</answer>"
    scores 1.0 and "<answer>21+5</answer>" 0.1.

    The scores of TinyZero (github.com/Jiayi-Pan/TinyZero, verl/utils/reward_score/countdown.py).
    TinyZero evaluates with eval, in floats; here nothing is executed and the arithmetic is exact.
    """
    scores = []
    for response, row in zip(whole_responses(batch), batch["rows"], strict=True):
        text = after_thinking(response)
        equation = None if "<think>" in text else last_tagged(text)
        if not equation or not equation.strip():
            scores.append(0.0)
            continue
        right = evaluate_arithmetic(equation) == row["target"]  # which bounds the equation's length
        if right:
            used = [int(digits) for digits in re.findall(r"[0-9]+", equation)]
            right = sorted(used) == sorted(row["numbers"])
        scores.append(1.0 if right else 0.1)
    return torch.tensor(scores)


def evaluate_arithmetic(text):
    """
    The exact value of an arithmetic expression as a Fraction: evaluate_arithmetic("3*7+5") is 26.

    It may hold integers without a sign, + - * / (or × ÷), parentheses and unary minus. None for
    anything else, for a division by zero, for more than LONGEST characters (which also bounds the
    digits) and for more than DEEPEST parentheses inside each other.

    It never evaluates text as Python, which a model could abuse, and never raises an exception. It
    is a parser by recursive descent: a total is made of products, a product of factors, and a
    factor is a number, or minus a factor, or a total in parentheses.
    """
    text = text.translate(str.maketrans("×÷−", "*/-"))
    if len(text) > LONGEST or not re.fullmatch(r"[-+*/()0-9\s]*", text):
        return None
    tokens = ["end", *reversed(re.findall(r"[0-9]+|[-+*/()]", text))]

    def total(depth):
        value = product(depth)
        while tokens[-1] in ("+", "-"):
            value = value + product(depth) if tokens.pop() == "+" else value - product(depth)
        return value

    def product(depth):
        value = factor(depth)
        while tokens[-1] in ("*", "/"):
            value = value * factor(depth) if tokens.pop() == "*" else value / factor(depth)
        return value

    def factor(depth):
        token = tokens.pop() if tokens[-1] != "end" and depth < DEEPEST else "end"
        if token == "-":
            return -factor(depth + 1)
        if token == "(":
            value = total(depth + 1)
            if tokens[-1] == ")":
                tokens.pop()
                return value
        elif token.isdigit() and (token == "0" or token[0] != "0"):
            return Fraction(int(token))
        raise ValueError(token)

    try:
        value = total(0)
    except (ValueError, ZeroDivisionError):
        return None
    return value if tokens == ["end"] else None

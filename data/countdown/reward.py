"""
The reward of Countdown, an example of a reward of your own: reach a target with some numbers.

    python grpo.py config/mine.py --prompts_path=data/countdown/rl_train.jsonl --eval_path= \\
        --reward_functions=data/countdown/reward.py:countdown --max_new_tokens=512

Rows have `numbers` and `target`, as prepare.py writes them.
"""
import ast
import operator
import re
from fractions import Fraction

import torch

from grading.answers import behind_thoughts, whole_responses

LONGEST = 200  # characters of an equation, which also bounds the digits
OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
              ast.Div: operator.truediv}


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
        text = behind_thoughts(response) or ""  # of thoughts that never end: no answer
        found = re.findall("<answer>((?:(?!</?answer>).)*)</answer>", text, re.DOTALL)
        if not found or not found[-1].strip():
            scores.append(0.0)
            continue
        equation = found[-1]
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
    anything else, for a division by zero, and for more than LONGEST characters. Python only parses
    the text, and never evaluates it: a model could abuse that.
    """
    text = " ".join(text.translate(str.maketrans("×÷−", "*/-")).split())
    if len(text) > LONGEST or not re.fullmatch(r"[-+*/()0-9 ]*", text):
        return None
    try:
        return value_of(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def value_of(node):
    """The value of a parsed expression as a Fraction. Raises ValueError for anything else."""
    if isinstance(node, ast.Constant):
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -value_of(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](value_of(node.left), value_of(node.right))
    raise ValueError(ast.dump(node))

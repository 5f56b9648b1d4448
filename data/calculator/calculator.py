"""
The environment of the task calculator: --environment=data/calculator/calculator.py:calculator
"""
import re


def calculator(messages, row):
    """Answers calc(123*456) with the product; anything else is an answer, and ends the dialogue."""
    call = re.fullmatch(r"calc\((\d{1,4})\*(\d{1,4})\)", messages[-1]["content"])
    return f"{int(call[1]) * int(call[2])}\n" if call else None

r"""
Forms in which texts give their answers: <answer>, \boxed{}, ####, matrices over several lines,
other numbers, letters beyond ASCII; answers.py loads them for a text that has some. And the rewards
`format` and `length`.
"""
import re
import unicodedata
from fractions import Fraction

import torch

from grading.answers import behind_thoughts, lines_of, marks_of, whole_responses


def formed_answer(text, lines):
    """answers.final_answer of a text behind its thoughts that has one of these forms."""
    tags = re.findall("<answer>((?:(?!</?answer>).)*)</answer>", text, re.DOTALL)
    text = tags[-1] if tags else text
    box = last_box(text)
    text = text if box is None else box
    if "####" in text:
        return "".join(lines_of(text.rpartition("####")[2])[:1])
    return text.strip() if tags or box is not None else "\n".join(lines_of(text)[-lines:])


def last_box(text):
    r"""The text in the last \boxed{...} or \fbox{...}, with all braces in it; None without one."""
    opened, found = [], (-1, 0)  # (where it begins, what stands before) of each open brace; a box
    for mark in re.finditer(r"(\\(?:boxed|fbox)\s*)?(\{)|\\.|\}", text, re.DOTALL):
        if mark[2]:
            opened.append((mark.end(), mark[1]))
        elif mark[0] == "}" and opened:
            begin, box = opened.pop()
            if box:
                found = max(found, (begin, mark.start()))
    return text[slice(*found)] if found[1] else None


def unbroken(text):
    r"""A text without line breaks between \begin{...} and its \end: a matrix is one line."""
    return re.sub(r"\\begin\{(\w+\*?)\}.{0,2000}?\\end\{\1\}",
                  lambda whole: whole[0].replace("\n", " "), text, flags=re.DOTALL)


# of other scripts and of typographers: minus, dashes, commas, quotes; what is ASCII but as wide as
# a Chinese letter, such as （１，２）
ASCII = str.maketrans("\u2212\u2010\u2011\u2013\u3001\u2018\u2019\u02bc\u201c\u201d",
                      "----,'''\"\"") | {0xff01 + i: 0x21 + i for i in range(94)}
# 1 000 with a blank at which no line breaks, or a narrow one
THOUSANDS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:[\xa0\u2007\u2009\u202f]\d{3})+(?!\d)")


def letters(text):
    """
    A text with one form of each letter (NFC), of minus, commas and quotes, and of a period
    behind a number or the text; without what nobody sees, and blanks in 1 000. No NFKC: it makes
    102 of ten squared.
    """
    seen = re.sub("[\xad\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff]", "", text)
    seen = unicodedata.normalize("NFC", seen).translate(ASCII)
    seen = THOUSANDS.sub(lambda number: re.sub(r"\s", "", number[0]), seen)
    return re.sub(r"(?<=\d)[\u3002\uff61]|[\u3002\uff61](?=\s*\Z)", ".", seen)


def other_number(text):
    """The value of a number such as 1,234.50, -3/4, 3 1/2 or 1e-5, or None."""
    # 1,234, also LaTeX's, but no 0,125
    text = re.sub(r"(?<![\d.])[1-9]\d{0,2}(?:(?:,|\\,|,\\!|\{,\})\d{3})+(?!\d)",
                  lambda m: re.sub(r"\D", "", m[0]), text)
    match = re.fullmatch(
        r"([+-]?) ?(?:(\d{1,100}) (?=\d+ ?/))?"
        r"((?:\d{1,100}(?:\.\d{1,100})?|\.\d{1,100})(?:e[+-]?\d{1,3})?)(?: ?/ ?(\d{1,100}))?", text)
    if not match or match[4] and not int(match[4]):
        return None
    size = int(match[2] or 0) + Fraction(match[3]) / int(match[4] or 1)
    return -size if match[1] == "-" else size


# the reward

def format(batch):
    """
    (B,): 1.0 where the response is <think>...</think>, or the like, and then an answer that is not
    blank, bare or in <answer>...</answer>, and nothing else; else 0.0. Each tag comes once, in this
    order; a <think> may end the prompt. The format reward of DeepSeek-R1 (arXiv 2501.12948, section
    2.2.2).
    """
    return torch.tensor([float(is_formatted(response)) for response in whole_responses(batch)])


def is_formatted(text):
    marks, tags = marks_of(text), re.findall("</?answer>", text)
    if [opens for opens, _ in marks] != [True, False]:
        return False
    before, answer = text[:marks[0][1].start()], (behind_thoughts(text) or "").strip()
    if tags:
        whole = re.fullmatch("<answer>(.*)</answer>", answer, re.DOTALL)
        answer = whole[1].strip() if whole and len(tags) == 2 else ""
    return not before.strip() and answer != ""


def length(batch):
    """
    (B,): DAPO's soft overlong punishment (arXiv 2503.14476, equation 13; the last fifth as in its
    section 4.1). With R = 100: up to 80 tokens give 0, 90 tokens -0.5, 100 tokens -1.
    """
    R, lengths = batch["max_new_tokens"], batch["response_mask"].sum(1).float()  # (B,)
    return ((R - lengths) / (R / 5) - 1).clamp(-1, 0)

"""
The rewards `accuracy` and `thinks`, and what all rules read: the answer in a response, which is the
text behind its thoughts, and in it the final answer. Here are <think>, last lines and plain
numbers. Other marks of thoughts stand in grading/marks.py, other forms of answers in
grading/forms.py; a text that has some loads them.
"""
import functools
import math
import re
from fractions import Fraction

import torch

from errors import BadInput, say, shorten

THINK = re.compile("(<think>)|(</think>)")  # the mark before thoughts, and the one behind them
# how all marks in grading/marks.py begin, and what all answers of grading/forms.py have
OTHER_MARK = re.compile(r"<(?!/?think>)|[◁[]|Here (?:is|are) my")
FORM = re.compile(r"<answer>|\\(?:boxed|fbox)|####")


def accuracy(batch):
    """
    (B,): 1.0 where the final answer of the response is that of the row's `answer` ("72" or a whole
    solution that ends with "#### 72"), else 0.0; NaN without one. No algebra: see the reward
    `math`.
    """
    scores = []
    for response, row in zip(whole_responses(batch), batch["rows"], strict=True):
        answer = row.get("answer")
        right = answer is not None and same_answer(*answers_of(response, answer))
        scores.append(math.nan if answer is None else float(right))
    return torch.tensor(scores)


def thinks(batch):
    """(B,): 1.0 where the response has <think> and, after it, </think>, or the like; else 0.0."""
    # for each response, of each mark of thoughts, whether it opens them
    marks_of_each = [[opens for opens, _ in marks_of(text)] for text in whole_responses(batch)]
    return torch.tensor([float(marks[:1] == [True] and False in marks) for marks in marks_of_each])


def need_field(field, reward, rows, path):
    """Raise BadInput where a row lacks a field that a reward needs."""
    for number, row in enumerate(rows, 1):
        if row.get(field) is None:
            raise BadInput(f"{path}, row {number}: the reward {reward!r} needs the field {field!r}"
                           f"{', which is null' * (field in row)}; the row has {', '.join(row)}; "
                           f"rename one by --fields=\"THEIRS>{field}\"")


def check_answers(rows, path, reward="accuracy"):
    """Raise BadInput where a row has no answer, or one that no response could equal."""
    need_field("answer", reward, rows, path)
    for number, row in enumerate(rows, 1):
        if not same_answer(*[final_answer(answer_text(row["answer"]), lines=0)] * 2):
            raise BadInput(f"{path}, row {number}: no response could equal the answer "
                           f"{shorten(row['answer'])}; correct the row, or leave it out")


accuracy.check_rows = check_answers  # rewards.py calls it


# --------------------------------------------------------------------------------------------------
# texts

def patterns(text):
    """(marks of thoughts, marks around an answer) that a text may have."""
    if not OTHER_MARK.search(text):
        return THINK, None
    from grading.marks import FRAMES, MARKS

    return MARKS, FRAMES


def behind_thoughts(text):
    """The text behind the thoughts of a response; None if they never end."""
    while marks := marks_of(text):
        opens, last = marks[-1]
        if opens:
            return None
        text = text[last.end():]
    _, frames = patterns(text)
    return frames.sub("", text) if frames else text


def marks_of(text):
    """
    The marks of thoughts in a text that are of the same pair as its first one, such as <think> and
    </think>: [(whether the mark stands before thoughts, its match), ...].
    """
    marks = [((mark.lastindex - 1) // 2, mark) for mark in patterns(text)[0].finditer(text)]
    return [(mark.lastindex % 2 == 1, mark) for pair, mark in marks if pair == marks[0][0]]


def whole_responses(batch):
    """
    The texts that the rules judge: a completion, behind the part of the response that stands in the
    prompt: a last message of the assistant, or a <think> or the like at its end.
    """
    rows, texts = batch["rows"], []
    prompts = batch.get("prompts") or [None] * len(rows)
    for row, prompt, completion in zip(rows, prompts, batch["completions"], strict=True):
        messages, begun = row.get("prompt"), ""
        if isinstance(messages, list) and messages[-1]["role"] == "assistant":
            begun = messages[-1]["content"]
        read = prompt if prompt is not None else messages if isinstance(messages, str) else ""
        ending = read.rstrip().rpartition("\n")[2]
        if not patterns(begun)[0].search(begun):
            for mark in patterns(ending)[0].finditer(ending):
                if mark.lastindex % 2 and mark.end() == len(ending):  # thoughts begin behind it
                    begun = mark[0]
        texts.append(begun + completion)
    return texts


@functools.cache  # once for each tokenizer
def say_unknown_marks(tokenizer):
    """Say which of its tokens look like marks of thoughts and are not in the table."""
    unknown = [token for token in tokenizer.hf.get_added_vocab()
               if re.search("think|thought|reason", token, re.IGNORECASE) and token[0] != "/"
               and not patterns(token)[0].fullmatch(token)]
    if unknown:
        say(f"warning: the rewards read no thoughts between {', '.join(unknown)} of "
            f"{tokenizer.path}; if these are marks of thoughts, add them to grading/marks.py")


def answer_text(answer):
    """A row's `answer`, which may be a number, as text: 72.0 is "72"."""
    return answer if isinstance(answer, str) else repr(answer).removesuffix(".0")


def answers_of(response, answer):
    """
    (the final answer of a response, that of a row's `answer`), to be compared. Without marks the
    row's is all of its text, and the response's has as many lines.
    """
    truth = final_answer(answer_text(answer), lines=0)
    return final_answer(response, len(lines_of(truth))), truth


def final_answer(text, lines=1):
    r"""
    The final answer of a text, behind its thoughts: the last <answer>, in it the last \boxed{}, in
    it the line behind the last ####; without them the last `lines` lines, 0 = all. "" if the
    thoughts never end.
    """
    text = behind_thoughts(text) or ""
    if FORM.search(text):
        from grading.forms import formed_answer

        return formed_answer(text, lines)
    return "\n".join(lines_of(text)[-lines:])


def lines_of(text):
    """The lines of a text that are not blank, without blanks around them."""
    if "\\begin{" in text:
        from grading.forms import unbroken

        text = unbroken(text)
    return [line.strip() for line in text.split("\n") if line.strip()]


def same_answer(given, truth):
    """Whether two answers are the same number, or the same text but for case, $ and a period."""
    if not (given + truth).isascii():
        from grading.forms import letters

        given, truth = letters(given), letters(truth)
    given, truth = (re.sub(r"[$\s]+", " ", x).strip().rstrip(" .").casefold()
                    for x in (given, truth))
    numbers = [number_of(x) for x in (given, truth)]
    return given == truth != "" or numbers[0] == numbers[1] is not None


def number_of(text):
    """The value of a number such as 1234.50 or -.5, and of its other forms; or None."""
    if re.fullmatch(r"[+-]?(?:\d{1,100}(?:\.\d{1,100})?|\.\d{1,100})", text):
        return Fraction(text)
    if not re.fullmatch(r"[+-]?[\d. ][-+\d.,/e \\!{}]*", text):
        return None
    from grading.forms import other_number

    return other_number(text)

"""The answer in a response: the text behind its thoughts, and in it the final answer."""
import functools
import re
from fractions import Fraction

from errors import say

# how models write thoughts: in turn a mark before them, and the mark behind them
THOUGHTS = [*map(re.escape, """
    <think> </think>  <thinking> </thinking>  <thought> </thought>  <reasoning> </reasoning>
    <seed:think> </seed:think>  <mm:think> </mm:think>  [THINK] [/THINK]  [unused16] [unused17]
    <ifm|think> </ifm|think>  <ifm|think_fast> </ifm|think_fast>  <|think:start|> <|think:end|>
    <|START_THINKING|> <|END_THINKING|>  <|channel>thought <channel|>  <|think|> <|content|>
    <|begin_of_thought|> <|end_of_thought|>  <|inner_prefix|> <|inner_suffix|>  ◁think▷ ◁/think▷
    <|open|>think<|sep|> <|close|>think<|sep|>
    """.split()),
    r"<\|channel\|>(?!final)\w*(?:<\|message\|>)?",  # Harmony, of gpt-oss
    r"<\|channel\|>final[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>",
    r"\AHere is my thought process:", "Here is my response:",  # Granite 3.2
    r"\AHere are my reasoning steps:", r"\[BEGIN FINAL RESPONSE\]"]  # Apriel
MARKS = re.compile("(?=[<[◁H])(?:" + "|".join(f"({mark})" for mark in THOUGHTS) + ")")
# what some models write around the answer
FRAMES = re.compile(r"""<\|(START|END)_(RESPONSE|TEXT)\|>|</?response>|\[END\ FINAL\ RESPONSE\]
    |<\|(begin|end)_of_solution\|>|<\|(open|close)\|>(response|message)<\|sep\|>|<\|end\|>""", re.X)


def behind_thoughts(text):
    """The text behind the thoughts of a response; None if they never end."""
    while marks := marks_of(text):
        opens, last = marks[-1]
        if opens:
            return None
        text = text[last.end():]
    return FRAMES.sub("", text)


def marks_of(text):
    """[(whether it stands before thoughts, its match)]: the first mark in a text, and its like."""
    marks = [((mark.lastindex - 1) // 2, mark) for mark in MARKS.finditer(text)]
    return [(mark.lastindex % 2 == 1, mark) for pair, mark in marks if pair == marks[0][0]]


@functools.cache  # once for each tokenizer
def say_unknown_marks(tokenizer):
    """Say which of its tokens look like marks of thoughts and are not in the table."""
    unknown = [token for token in tokenizer.hf.get_added_vocab()
               if re.search("think|thought|reason", token, re.IGNORECASE) and token[0] != "/"
               and not MARKS.fullmatch(token)]
    if unknown:
        say(f"warning: the rewards read no thoughts between {', '.join(unknown)} of "
            f"{tokenizer.path}; if these are marks of thoughts, add them to answers.py")


def final_answer(text):
    r"""
    The final answer of a text: behind the thinking, in the last <answer>, \boxed{} or behind the
    last ####; without them the last line. "" if the thinking never ends.
    """
    text = behind_thoughts(text) or ""
    text = (re.findall("<answer>((?:(?!</?answer>).)*)</answer>", text, re.DOTALL) or [text])[-1]
    box = last_box(text)
    text = text if box is None else box
    text = (re.findall(r"####\s*([^\n]*)", text) or [text])[-1]
    return (text.strip().split("\n") or [""])[-1].strip()


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


def same_answer(given, truth):
    """Whether two answers are the same number, or the same text but for case, $ and a period."""
    given, truth = (re.sub(r"[$\s]+", " ", x).strip(" .").casefold() for x in (given, truth))
    numbers = [number_of(x) for x in (given, truth)]
    return given == truth != "" or numbers[0] == numbers[1] is not None


def number_of(text):
    """The value of a number such as 1,234.50 or -3/4, or None."""
    text = re.sub(r"(?<=\d)(?:,|\\,|,\\!|\{,\})(?=\d{3}\b)", "", text)  # 1,234, also LaTeX's
    match = re.fullmatch(
        r"([+-]?\d{1,100}(?:\.\d{1,100})?(?:e[+-]?\d{1,3})?)(?: ?/ ?(\d{1,100}))?", text)
    if not match or match[2] and not int(match[2]):
        return None
    return Fraction(match[1]) / int(match[2] or 1)


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
        if not MARKS.search(begun):
            begun = next((mark[0] for mark in MARKS.finditer(ending)
                          if mark.lastindex % 2 and mark.end() == len(ending)), begun)
        texts.append(begun + completion)
    return texts

"""The answer in a response: the text behind its thoughts, and in it the final answer."""
import functools
import re
import unicodedata
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


# a line of a text; a line break between \begin{...} and its \end ends none
LINE = re.compile(r"(?:\\begin\{(\w+\*?)\}.{0,2000}?\\end\{\1\}|[^\n])+", re.DOTALL)


def answers_of(response, answer):
    """
    (the final answer of a response, that of a row's `answer`), to be compared. Without marks the
    row's is all of its text, and the response's has as many lines.
    """
    truth = final_answer(answer, lines=0)
    return final_answer(response, len(lines_of(truth))), truth


def final_answer(text, lines=1):
    r"""
    The final answer of a text, behind its thoughts: the last <answer>, in it the last \boxed{}, in
    it the line behind the last ####; without them the last `lines` lines, 0 = all. "" if the
    thoughts never end.
    """
    text = behind_thoughts(text) or ""
    tags = re.findall("<answer>((?:(?!</?answer>).)*)</answer>", text, re.DOTALL)
    text = tags[-1] if tags else text
    box = last_box(text)
    text = text if box is None else box
    if "####" in text:
        return "".join(lines_of(text.rpartition("####")[2])[:1])
    return text.strip() if tags or box is not None else "\n".join(lines_of(text)[-lines:])


def lines_of(text):
    """The lines of a text that are not blank, as LINE says, without blanks around them."""
    return [line for match in LINE.finditer(text) if (line := match[0].strip())]


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
    given, truth = (re.sub(r"[$\s]+", " ", plain(x)).strip().rstrip(" .").casefold()
                    for x in (given, truth))
    numbers = [number_of(x) for x in (given, truth)]
    return given == truth != "" or numbers[0] == numbers[1] is not None


def plain(text):
    """A text with one form of each letter (NFC) and of minus; without what nobody sees."""
    seen = re.sub("[\xad\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff]", "", text)
    return unicodedata.normalize("NFC", seen).replace("\u2212", "-")


def number_of(text):
    """The value of a number such as 1,234.50, .5, -3/4 or 3 1/2, or None."""
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

r"""
What a response says as a whole, where in it the answer is, and when two answers are the same.

All of it reads text that a model wrote. So nothing is evaluated as code, every size is bounded, and
no text raises an exception.

same_answer works as the grader of MATH does (Hendrycks et al., arXiv 2103.03874): it undoes what is
only typesetting, and then compares. Unlike that grader it compares numbers as exact fractions, and
lists and sets part by part. An answer that is none of these is compared as text. There is no
algebra: x + 1 and 1 + x are two answers, and so are a/b and \frac{a}{b}; see the reward `math`.

    "1,000"  and "1000"           the same: one number, and so are "033" and "33"
    "0.5"    and "\frac12"        the same: one number
    "x = 5"  and "5"              the same: a name on one side only
    "{1, 2}" and "{2, 1}"         the same: sets have no order
    "(1, 2)" and "(2, 1)"         two answers: tuples have one
    "5 cm"   and "5 m"            two answers: both have a unit
    "72"     and "72 clips"       two answers: no unit of those that are known here
"""
import re
from fractions import Fraction
from functools import partial

LONGEST_TEXT = 20_000  # characters at the end of a completion in which its answer is looked for
LONGEST = 200  # characters of an answer; a longer one must be the same letter for letter
# an answer beyond these is no number or list, but text
MOST_DIGITS, LARGEST_EXPONENT, MOST_ELEMENTS = 100, 100, 20


# --------------------------------------------------------------------------------------------------
# the text of a response


def whole_responses(batch):
    """
    The texts that the rules judge: each completion, behind what the prompt has made the response
    begin with (see opening_of). A prompt that ends with "<think>" and the completion "3+4</think>7"
    make "<think>3+4</think>7". batch: see rewards.py.
    """
    rows, completions = batch["rows"], batch["completions"]
    prompts = batch.get("prompts") or [None] * len(rows)
    return [opening_of(row.get("prompt"), text) + completion
            for row, text, completion in zip(rows, prompts, completions, strict=True)]


def opening_of(prompt, text=None):
    """
    The text that a response has been made to begin with, by its prompt; "" for most. prompt: the
    data's, text or messages; text: what the policy read, if it is known.

    A chat whose last message is the assistant's own begins the response with that message: it
    counts from its <think> on, if it has one, else as a whole. And a prompt whose text ends with
    <think>, since the data or a chat template put it there, begins the response with "<think>".
    """
    last = prompt[-1] if isinstance(prompt, list) else dict(role="user", content=prompt or "")
    begun = last["content"] if last["role"] == "assistant" else ""
    if last["role"] == "assistant" and text is not None:
        asked = prompt[-2]["content"].strip()
        read = text.rpartition(asked)[2] if asked and asked in text else ""  # behind the question
        thoughts = re.search(r"<think>(?!\s*</think>)", read)  # and not empty ones
        at = thoughts.start() if thoughts else read.rfind(begun.strip())
        begun = read[at:] if at >= 0 else begun
    if "<think>" in begun:
        return begun[begun.index("<think>"):]
    read = last["content"] if text is None else text
    return "<think>" if read.rstrip().endswith("<think>") else begun


# --------------------------------------------------------------------------------------------------
# where the answer is


def final_answer(completion):
    r"""
    The final answer of a completion, without blanks at its ends. In the text behind the thinking it
    is the first of these that is there: the contents of the last \boxed{}, those of the last
    <answer>...</answer>, the line behind the last ####, what the last line "Answer: ..." says, what
    the last line states ("The answer is 5."), or has in bold at its end, all of the text.
    "<think>3+6+0=09</think>so \boxed{579}" -> "579". Markdown's stars are left out.

    A completion whose thinking never ends is returned as it is, "<think>" included: such a text
    equals no answer. Of a long text the last LONGEST_TEXT characters are read.
    """
    text = after_thinking(completion)
    if "<think>" in text:
        return text
    text = text[-LONGEST_TEXT:].strip()
    patterns = [partial(last_match, pattern) for pattern in (TAGGED, HASHED, NAMED_LINE)]
    for find in (last_boxed, *patterns, last_stated):
        found = find(text)
        if found is not None:
            return found.strip(" \t\n\r*")
    return text


def after_thinking(completion):
    """The text behind the last </think>, without blanks at its ends; all of it if there is none."""
    return completion.rpartition("</think>")[2].strip()


GROUP = r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}"  # braces, balanced, up to three deep
# What last_boxed looks for, one of: \boxed{ or \fbox{; \boxed or \fbox without braces, and then a
# number, a command or a single letter with all that follows it without a blank; an escaped
# character, since \{ and \} are no braces to count; a brace.
BOX = re.compile(rf"""\\(?:boxed|fbox)(?![a-zA-Z])\s*
    (?:\{{ | (?P<bare> (?=[-+.(0-9A-Z\\] | [a-z](?![a-z]))
                       (?:[^\s${{}}\\] | \\(?!boxed|fbox|[)\]])\S | {GROUP})+ (?<![.,;:])))
    | \\. | [{{}}]""", re.DOTALL | re.VERBOSE)


def last_boxed(text):
    r"""
    The contents of the \boxed{...} or \fbox{...} that begins last, its braces balanced; without
    braces, as in \boxed 5, up to a blank or a $. None if there is none. One pass over the text,
    however deep it is nested.
    """
    opened = []  # for each open brace: where its contents begin, and whether they are boxed
    begin, end = -1, -1  # of the contents found so far
    for match in BOX.finditer(text):
        if match["bare"]:
            begin, end = max((begin, end), match.span("bare"))
        elif match[0].endswith("{") and match[0] != r"\{":
            opened.append((match.end(), match[0] != "{"))
        elif match[0] == "}" and opened:
            start, boxed = opened.pop()
            if boxed and start > begin:
                begin, end = start, match.start()
    return text[begin:end] if begin >= 0 else None


# the contents of <answer>...</answer>, the innermost
TAGGED = re.compile("<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL)
HASHED = re.compile(r"####(?!#)\s*((?:[^#\n]|#(?!###))*)")  # how GSM8K's solutions end
# a line of its own, perhaps in bold, as DAPO-Math wants it: Answer: 72, **Final answer:** 72
NAMED_LINE = re.compile(r"^[ \t*#>]*(?:(?:the )?final )?answer[ \t*]*:[ \t*]*(\S.*)$",
                        re.IGNORECASE | re.MULTILINE)


def last_match(pattern, text):
    """What the last match of one of these patterns holds; None if there is none."""
    found = pattern.findall(text)
    return found[-1] if found else None


def last_stated(text):
    """
    What the last line states, "The answer is 5." or a text that ends with "**5**", without its full
    stop; None if it states nothing.
    """
    line = text.rpartition("\n")[2]
    stated = re.split(r"\banswer is:? +", line, flags=re.IGNORECASE)
    found = stated[-1] if len(stated) > 1 else ""
    if not found and (bold := re.search(r"\*\*([^*]+)\*\*[.!]?$", line)):
        found = bold[1]
    return found.strip(" *.!") or None


# --------------------------------------------------------------------------------------------------
# when two answers are the same


def same_answer(given, truth):
    r"""
    Whether two answers, as final_answer returns them, are the same: given is the model's,
    truth the data's. Both are text. The order of the two does not matter. An empty answer is the
    same as none.

    Numbers are the same if their exact values are: 0.5, 1/2, \frac12, .50 and 5e-1 are all the
    same, 0.333 and 1/3 are not.

    A name ("x =") or one of UNITS may be on one side alone. If both sides have one, the two must be
    the same. So 12% is 12 (and not 0.12), but 5 cm is not 5 m, though both are the same as 5. Any
    other word behind a number makes another answer of it: 12 million is not 12.

    Tuples, intervals and bare lists are compared element by element, in order, and by their
    brackets; sets in any order.

    Everything else is compared as text, after undoing TYPESETTING: \pm 3 is \pm3, but not 3, -3.
    """
    given, truth = given.strip(), truth.strip()
    if given == truth or not given or not truth or max(len(given), len(truth)) > LONGEST:
        return given == truth != ""
    given, truth = plain(given), plain(truth)
    if squeeze(given) == squeeze(truth) != "":
        return True
    given_name, given_value, given_unit = read_answer(given)
    name, value, unit = read_answer(truth)
    if name and given_name not in ("", name) or unit and given_unit not in ("", unit):
        return False
    return given_value == value != ""


# What is only typesetting: patterns and what replaces them, applied in this order. ¤ stands for a
# dollar sign that does not delimit LaTeX, ¶ for the end of a matrix's row, ⦃ and ⦄ for a set's
# braces, \{ and \}: the braces { and } only group.
TYPESETTING = [(re.compile(pattern), replacement) for pattern, replacement in [
    (r"\\\\(?:\[[0-9.]+ ?[a-z]+\])?", "¶"),  # first, as "\\ " is no "\ "
    (r"\\\$", "¤"), (r"\\?%", " percent "), ("−", "-"), ("×", r"\\times "), ("·", r"\\cdot "),
    ("π", r"\\pi "),
    ("∞", r"\\infty "), ("°", r"^\\circ "), ("√", r"\\sqrt "), ("∪", r"\\cup "), ("±", r"\\pm "),
    ("≤", r"\\le "), ("≥", r"\\ge "), ("≠", r"\\ne "), (r"\\(le|ge|ne)q(?![a-zA-Z])", r"\\\1"),
    (r" *\\! *", ""), (r" *\{ *, *\} *", ","),
    (r"\\(?:left|right|displaystyle|[bB]igg?[lr]?)(?![a-zA-Z])|\\[()\[\]]", ""),
    (r"\\\{|\\lbrace(?![a-zA-Z])", "⦃"), (r"\\\}|\\rbrace(?![a-zA-Z])", "⦄"),
    (r"(?<=[0-9])\\,(?=[0-9]{3}(?![0-9]))", ""),  # 10\,000
    (r"(?:\\[,;: ]|\\q?quad(?![a-zA-Z])|~|\s)+", " "),
    # \text{m} is meters; a bare m may be a variable
    (r"(?<=[0-9a-z)}\]]) *\\(?:text|mathrm|mbox) *\{ *m *\}", " meters "),
    (r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mbox) *\{([^{}]*)\}", r" \1 "),
    (r" *,? +and +| +,", ", "),
    (r"(?<=[0-9]) *([aApP])\.? ?[mM](?![A-Za-z])\.?", lambda m: f" {m[1].lower()}m"),
    (r"\^ *(?:\{ *\\circ *\}|\\circ(?![a-zA-Z]))", " degrees "),
    (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
    # \frac12 -> \frac{1}2; \sqrt2 -> \sqrt{2}
    (r"\\(frac|sqrt)(?![a-zA-Z]) *([0-9a-zA-Z]|\\[a-zA-Z]+)", r"\\\1{\2}"),
    (rf"\\frac *({GROUP}) *([0-9a-zA-Z]|\\[a-zA-Z]+)", r"\\frac\1{\2}"),
    (rf"\\frac *({GROUP}) *\{{", r"\\frac\1{"),
    (r"([\^_]) *\{([+-]?[0-9]+|[a-zA-Z])\}(?![0-9])", r"\1\2"),
]]


def plain(text):
    """
    The text of an answer without what is only typesetting: one way to write fractions, no $ around
    formulas, single blanks, no period at the end. "$\\tfrac12$." -> "\\frac{1}{2}".
    """
    for pattern, replacement in TYPESETTING:
        text = pattern.sub(replacement, text)
    # pairs of $ are LaTeX's; if their number is odd, they are dollars
    text = text.replace("$", "" if text.count("$") % 2 == 0 else "¤")
    return " ".join(text.split()).removesuffix(".").rstrip()


GREEK = "|".join("""alpha beta gamma delta epsilon varepsilon zeta eta theta iota kappa lambda mu nu
xi pi rho sigma tau phi varphi chi psi omega""".split())
# The names that may stand before "=" and are left out: a variable (x, AB, m_1, f(x), \theta), or
# one of the words below. Other words, or the ! of !=, could say that two sides are not equal.
NAME = rf"""(?:(?!no\b)[A-Za-z]{{1,2}}|\\(?i:{GREEK})|(?i:answer|area|volume|total|sum))
(?:_[0-9A-Za-z]+)?'*(?:\^-1)?(?:\([A-Za-z]\))?""".replace("\n", "")
NAMED = re.compile(rf"({NAME})? ?(?:=|\\in(?![a-zA-Z])) ?([^=]+)")
# the units that may be left out on one side
UNITS = ("percent|degree|radian|dollar|cent|euro|unit|point|people|way|mm|cm|m|meter|km|in|inch|ft|"
         "foot|feet|mile|mg|g|kg|pound|ml|L|liter|second|minute|h|hour|day|week|month|year|mph")
UNIT = re.compile(rf"(?!a )(.*?[^ ])( ?)(?<![A-Za-z\\])((?:square |cubic |per )?(?:{UNITS}))"
                  rf"(?:(?<=[a-z][a-z])e?s)?((?: per (?:{UNITS}))?(?: ?\^[23])?)")
CURRENCIES = {"¤": "dollar", "£": "sterling", "€": "euro"}


def read_answer(text):
    """
    The text of an answer, as plain returns it -> its name in "name = ...", its value and its unit;
    "" where there is none: "x = 5 cm" -> ("x", Fraction(5), "cm"). "5 m" has a unit, but "5m" none:
    there m may be a variable.
    """
    match = NAMED.fullmatch(text)
    name, text = (match[1] or "", match[2].strip()) if match else ("", text)
    unit = ""
    if match := re.match(r"([+-]?) ?([¤£€]) ?", text):
        text, unit = match[1] + text[match.end():], CURRENCIES[match[2]]
    if match := UNIT.fullmatch(text):
        before, blank, named, more = match.groups()
        if len(named) > 1 or blank and read_number(before) is not None:
            text, unit = before, unit or (named + more).replace(" ", "")
    return name, value_of(text), unit


def value_of(text, deep=3):
    """
    The value of plain text without name and unit: a Fraction; of a list or a set its brackets and
    its values, "(1, 2]" -> ("(]", 1, 2) and "1, 2" -> ("", 1, 2); or the text itself. Brackets
    around one value only group it. deep: how many lists may be inside each other.
    """
    text = text.strip()
    number = read_number(text)
    if number is not None:
        return number
    kind, parts = "", split_at_commas(text)
    if len(parts) == 1 and text[:1] in tuple("([{⦃") and text[-1:] in tuple(")]}⦄"):
        kind, parts = text[0] + text[-1], split_at_commas(text[1:-1])
    if not deep or not 0 < len(parts) <= MOST_ELEMENTS or parts == [text]:
        return squeeze(text)
    values = [value_of(part, deep - 1) for part in parts]
    if len(values) == 1 and kind in ("()", "{}"):
        return values[0]
    kind = kind.replace("⦃", "{").replace("⦄", "}")
    return kind, *(sorted(values, key=repr) if kind == "{}" else values)


def split_at_commas(text):
    """The text cut at commas, but not inside of brackets; [] where the brackets do not match."""
    depth, parts = 0, [""]
    for ch in text:
        depth += (ch in "([{⦃") - (ch in ")]}⦄")
        if depth < 0:
            return []
        if ch == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += ch
    return parts if depth == 0 else []


def squeeze(text):
    """
    Plain text in the form in which it is compared. Blanks are taken out, but for those that count:
    4 2 is not 42, and 1, 234 is not 1,234. The + of +x is taken out. {1} and \\{1\\} become one. A
    word's capital letter becomes small, so that Even is even; but Ab, perhaps a product, is not ab.
    """
    text = re.sub(r"(?<![0-9,]) | (?![0-9])|(?<=,) (?![0-9]{3}(?![0-9]))", "", text)
    text = re.sub(r"^\+(?![+-])", "", text.replace("⦃", "{").replace("⦄", "}"))
    return re.sub(r"(?<![A-Za-z\\])[A-Z][a-z]{2,}(?![A-Za-z])", lambda m: m[0].lower(), text)


# the numbers that are read: 1234 or 1,234 (but not 1,2); 0.5; 1/2; 1 1/2; 5e-1
INTEGER = r"(?:0|[1-9][0-9]*|[1-9][0-9]{0,2}(?:,[0-9]{3})+)"
DECIMAL = rf"(?:{INTEGER}(?:\.[0-9]+)?|\.[0-9]+)"
QUOTIENT = re.compile(rf"({DECIMAL})(?: ?/ ?({DECIMAL}))?")
MIXED = re.compile(rf"({INTEGER}) ({INTEGER}) ?/ ?({INTEGER})")
SCIENTIFIC = re.compile(rf"(?:({DECIMAL})(?:[eE]| ?(?:\\times|\\cdot|\*|x) ?10\^)|10\^)"
                        r"([+-]?[0-9]{1,3})")


def read_number(text):
    """
    The value of a number in plain text as a Fraction; None if it is no number, or one with more
    than MOST_DIGITS digits or an exponent beyond LARGEST_EXPONENT.
    """
    if sum(map(str.isdigit, text)) > MOST_DIGITS:
        return None
    # 1\frac{1}{2} -> 1 1/2
    text = re.sub(r"\\frac\{ ?([+-]?[0-9.,]+) ?\}\{ ?([0-9.,]+) ?\}", r" \1/\2 ", text).strip()
    negative, text = text.startswith("-"), re.sub(r"^[+-] *", "", text).replace("  ", " ")
    text = re.sub(r"^0+(?=[0-9]+$)", "", text)  # AIME's 033 is 33
    value = None
    if match := QUOTIENT.fullmatch(text):
        numerator, denominator = (Fraction(part.replace(",", ""))
                                  for part in (match[1], match[2] or "1"))
        value = numerator / denominator if denominator else None
    elif match := MIXED.fullmatch(text):
        whole, numerator, denominator = (int(part.replace(",", "")) for part in match.groups())
        value = whole + Fraction(numerator, denominator) if numerator < denominator else None
    elif (match := SCIENTIFIC.fullmatch(text)) and abs(int(match[2])) <= LARGEST_EXPONENT:
        value = Fraction((match[1] or "1").replace(",", "")) * Fraction(10) ** int(match[2])
    return -value if value is not None and negative else value

r"""
What a response says as a whole, where in it the answer is, and when two answers are the same.

All of it reads text that a model wrote: nothing is evaluated as code, every size is bounded, and no
text raises an exception. docs/rewards.md has the tables of what is read and what is the same. There
is no algebra: x + 1 and 1 + x are two answers, and so are a/b and \frac{a}{b}; see `math` there.
"""
import re
from fractions import Fraction
from unicodedata import normalize

LONGEST_TEXT = 20_000  # characters at the end of a completion in which its answer is looked for
LONGEST = 200  # characters of an answer; a longer one must be the same letter for letter
MOST_DIGITS, MOST_ELEMENTS = 100, 20  # an answer beyond these is no number or list, but text


# --------------------------------------------------------------------------------------------------
# the text of a response


def whole_responses(batch):
    """The texts that the rules judge: each completion behind its opening_of."""
    rows, completions = batch["rows"], batch["completions"]
    prompts = batch.get("prompts") or [None] * len(rows)
    return [opening_of(row.get("prompt"), text) + completion
            for row, text, completion in zip(rows, prompts, completions, strict=True)]


def opening_of(prompt, text=None):
    """
    The text that a response has been made to begin with, by its prompt (the data's, text or
    messages); "" for most. text: what the policy read, if it is known. A last message that is the
    assistant's own counts, from its <think> on if it has one. Where the text ends with <think>,
    since the data or a chat template put it there, the response begins with "<think>".
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
    The final answer of a completion: what is stated (see there) in the last \boxed{} behind the
    thinking; without one in the last <answer>...</answer>, and there behind the last ####; without
    them in all of it. "<think>3+6+0=09</think>so \boxed{579}" -> "579". A completion whose thinking
    never ends is returned as it is: with its "<think>" it equals no answer.
    """
    text = after_thinking(completion)
    if "<think>" in text:
        return text
    text = text[-LONGEST_TEXT:].strip()
    found = last_boxed(text)
    if found is None:
        found = last_match(TAGGED, text, text)
        found = last_match(HASHED, found, found)
    return stated(found)


def after_thinking(completion):
    """The text behind the last </think>, without blanks at its ends; all of it if there is none."""
    return completion.rpartition("</think>")[2].strip()


GROUP = r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}"  # braces, balanced, up to three deep
# What last_boxed looks for: \boxed{; \boxed without braces before a number, a command or a single
# letter with what follows it without a blank; \{, which is no brace to count; a brace.
BOX = re.compile(rf"""\\(?:boxed|fbox)(?![a-zA-Z])\s*
    (?:\{{ | (?P<bare> (?=[-+.(0-9A-Z\\] | [a-z](?![a-z]))
                       (?:[^\s${{}}\\] | \\(?!boxed|fbox|[)\]])\S | {GROUP})+ (?<![.,;:])))
    | \\. | [{{}}]""", re.DOTALL | re.VERBOSE)


def last_boxed(text):
    r"""
    The contents of the \boxed{...} or \fbox{...} that begins last; without braces, as in \boxed 5,
    up to a blank or a $. None if there is none. One pass, however deep the text is nested.
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


def last_match(pattern, text, otherwise=None):
    """What the last match of one of these patterns holds; `otherwise` if there is none."""
    return [otherwise, *pattern.findall(text)][-1]


# a line of its own, with the answer behind it or below it: Answer: 72, - **Final answer**: 72
LABEL = re.compile(r"""[\W_]* (?:\d{1,2}[.)][\W_]*)? (?:(?:the|my|our|your)\ )?
    (?:final\ result | (?:(?:final|correct|numerical)\ )*(?:answer|ans\b))
    [ \t*_]* (?:->|=>|[:：=→]|(?<=ans)\.|$) (?:__)? (?P<answer>.*)""", re.IGNORECASE | re.VERBOSE)
# what may follow an answer that stands below its label
BEHIND = re.compile(r"[\W_]*(?:explanation|reason|check|verification|note|steps)", re.IGNORECASE)
ANSWER_IS = re.compile(r"""(?P<before>.*)\b(?:answer|(?:correct|right|best)\ (?:option|choice))\b
    (?P<between>[^.:;=?!]{0,60}?) \b(?:is|was|equals|(?:must|should|would|will|has\ to)\ be)\b
    (?:\ (?:equal\ to|therefore|thus|then|hence|simply)\b)* [ ,:]* (?P<said>.*)""",
                       re.IGNORECASE | re.VERBOSE)
IS_THE_ANSWER = re.compile(r"(\S+) is (?:the|my|our) (?:final |correct )?answer")
# how a sentence begins that concludes; what else it is about; where its verb is
SO = re.compile(r"""(?: (?:so|thus|therefore|hence|then|finally|consequently|altogether|and|that|it
    \ follows|in\ (?:conclusion|total|all)|we\ (?:get|have|find|obtain|conclude)) \b[ ,:]*
    | (?:∴|→|⇒|=>|\\therefore\b|\\implies\b|\\Rightarrow\b)\ * )+""", re.IGNORECASE | re.VERBOSE)
NOUN = re.compile(r"\b(?:answer|result|solution|total|sum|value)\b", re.IGNORECASE)
VERB = re.compile(r"\b(?:is equal to|is|are|equals?|has|have|gets?)\b|(?<![<>!:])=", re.IGNORECASE)
# words that say that something is not the answer, or may say so, or name two
DENIED = re.compile(r"n['’]t\b(?! hesitate)|\b(?:not\b(?! hesitate)|no(?!,)|never|cannot|neither"
                    r"|nor|wrong|incorrect|false|untrue|unlikely|impossible)\b", re.IGNORECASE)
DOUBT = re.compile(DENIED.pattern + r"|\b(?:or|either|if|unless|let|whether|suppose|assum\w+"
                   r"|imagine|doubt)\b", re.IGNORECASE)
SENTENCE_END = re.compile(r"(?<=[.!?])[*_\"”)$]*\s+|\n+")
# a sentence behind the answer that is none of it: I hope this helps!
REMARK = re.compile(r"""[\s*_✅✓✔☑∎■□😊🙂👍🎉-]*$ | [^\d$\\=]*\b(?:hope|let\ me\ know|feel\ free|bye
    |hesitate|questions?|help(?:s|ful)?|thanks?|welcome|luck|cheers|glad|happy|enjoy|done|qed
    |have\ a\ (?:great|good|nice))\b[^\d$\\=]*$""", re.IGNORECASE | re.VERBOSE)


def stated(text):
    r"""
    The answer that a text states, or the text, less polite remarks at its end: what the last line
    says the "answer is"; or else what stands behind or below the last label such as Answer:; or
    what the last sentence concludes ("Thus x + y = 5." -> "x + y = 5"), or has in bold at its end.
    """
    text = re.sub(r"\\text[a-z]* *\{([^{}]*\b[aA]ns(?:wer)?\b[^{}]*)\}", r"\1 ", text).strip()
    ends, end = [match.end() for match in SENTENCE_END.finditer(text)], len(text)
    while (ends and end - ends[-1] < 300 and REMARK.match(last := text[ends[-1]:end])
           and not DENIED.search(last)):
        end = ends.pop()
    lines = text[:end].rstrip().split("\n")
    found = answer_is(lines[-1]) or labelled(lines) or concluded(lines[-1])
    if found is None:
        return text[:end].strip(" \n✅✓✔") or text
    return re.split(r",? (?:because|since)\b", found)[0].strip(" \t\n\r*✅✓✔")


def answer_is(line):
    """What a line says last that the "answer is"; None if it does not, or doubts it."""
    if not (match := ANSWER_IS.match(line)):
        return None
    clause = re.split(r"[.!?;:] |, (?:so|but|hence|thus|therefore|then|the|my|our)\b",
                      match["before"])[-1]
    doubted = ANSWER_IS.match(clause) or DOUBT.search(clause + match["between"])
    return None if doubted else match["said"].strip(" *.!")


def labelled(lines):
    """What stands behind the last label, or below it as a paragraph of its own; None if nothing."""
    for i in reversed(range(len(lines))):
        match = LABEL.match(lines[i])
        said = match["answer"].strip(" \t*") if match else ""
        if not said.strip("_-") and (match or answer_is(lines[i]) == ""):
            text = "\n".join(lines[i + 1:]).strip()
            said, *more = re.split(r"\n[ \t]*\n", text, maxsplit=1)
            said = "" if more and not BEHIND.match(more[0]) else said
        if said.strip("_-"):
            last = said.rpartition("\n")[2]
            return answer_is(last) or concluded(last, label=True) or said
    return None


def concluded(line, label=False):
    """
    What the last sentence of a line concludes, or has in bold at its end; None if it does neither.
    Of one with a verb (So the total is 5.) only a formula is read. label: a label is before it.
    """
    sentence = SENTENCE_END.split(line)[-1]
    if bold := re.search(r"(?<!\*\* and )(?<!\*\*, )\*\*([^*]+)\*\*[.!]?$", line):
        before = sentence.removesuffix(bold[0])
        return None if DOUBT.search(before) else bold[1].strip(" *.!")
    so = SO.match(sentence)
    sentence = sentence[so.end() if so else 0:].strip(" *!").removesuffix(".")
    if match := IS_THE_ANSWER.fullmatch(sentence):
        return match[1]
    if len(sentence) > LONGEST or "?" in sentence:
        return None
    name, value, _ = read_answer(plain(sentence), loose=True)
    if name or isinstance(value, Fraction):
        return sentence if so else None
    subject, *rest = VERB.split(sentence, maxsplit=1)
    value = plain(" ".join(rest))
    formula = isinstance(read_answer(value, loose=True)[1], Fraction) or EXPRESSION.fullmatch(value)
    letters = EXPRESSION.fullmatch(plain(subject.replace("$", "")))  # x + y is 5
    clear = so or label or letters or NOUN.search(subject)
    if not clear or DOUBT.search(subject) or not formula:
        return None
    return (f"{subject.strip()} = " if letters else "") + rest[0].strip()


# --------------------------------------------------------------------------------------------------
# when two answers are the same


def same_answer(given, truth):
    r"""
    Whether two answers, as final_answer returns them, are the same: given is the model's, truth the
    data's. An empty answer is the same as none. What is only typesetting is undone; numbers are the
    same if their exact values are, lists, tuples, intervals and sets if their parts are, all else
    as text. As to names and units see clash. Only the model's answer may have more beside a number
    that the data has alone: any unit (72 clips), an expression in the place of a name (x + y = 5).
    """
    given, truth = given.strip(), truth.strip()
    if given == truth or not given or not truth or max(len(given), len(truth)) > LONGEST:
        return given == truth != ""
    given, truth = plain(given), plain(truth)
    if len(truth.strip("()")) == 1 and (chosen := CHOICE.fullmatch(given)):
        given = chosen[1]
    if squeeze(given) == squeeze(truth) != "":
        return True
    read = read_answer(given, loose=True)
    same = read[1] == read_answer(truth)[1] and not clash(given, truth)
    return read[1] != "" and (same or read == read_answer(truth, loose=True))


def clash(given, truth):
    """Whether two answers, plain texts, have names or units that differ: 5 cm, 5 m; but not 5."""
    pairs = zip(read_answer(given, loose=True), read_answer(truth), strict=True)
    (name, true_name), _, (unit, true_unit) = pairs
    return "" != name != true_name != "" or "" != unit != true_unit != ""


# the units that may be left out on one side: each with its other names and its plurals
UNITS = {name + s: names.split(",")[0] for names in """percent degree degreesc degreesf radian
    dollar,¤ cent,¢ euro,€ sterling,£ yen,¥ rupee,₹ unit point people way mm,millimeter,millimetre
    cm,centimeter,centimetre m,meter,metre km,kilometer,kilometre in,inch,inche ft,foot,feet yd,yard
    mi,mile mg,milligram g,gram kg,kilogram lb,pound oz,ounce ml,mL,milliliter L,l,liter,litre
    gal,gallon ns ms s,sec,second min,minute h,hr,hour day week month year mi/h,mph km/h,kph,kmh
    N,newton J,joule kJ W,watt mW kW MW kWh V,volt Hz,hertz kHz MHz GHz kPa dB MB GB TB
    mol,mole""".split() for name in names.split(",") for s in ("", "s") if len(name) > 1 or not s}
WORDS = "|".join(UNITS)
# one of several choices that have letters, perhaps with what it says: B), option B, (B) Paris
CHOICE = re.compile(r"(?:(?:option|choice) )?\(?([A-Z])(?:[).:](?!.*(?:\b[A-Z][).:]|, [A-Z]$|"
                    rf"{DOUBT.pattern})).*)?", re.DOTALL)
GREEK = """alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho
varsigma sigma tau upsilon phi chi psi omega varepsilon varphi""".split()
LATEX = dict(zip("αβγδεζηθικλμνξοπρςστυφχψω", GREEK, strict=False)) | dict(zip(
    "×·∞√∪∩±≤≥≠∈∅", "times cdot infty sqrt cup cap pm le ge ne in emptyset".split(), strict=True))
# What is only typesetting: patterns and what replaces them, applied in this order. ¤ stands for a
# dollar sign that does not delimit LaTeX, ¶ for the end of a matrix's row, ⦃ and ⦄ for a set's
# braces, \{ and \}: the braces { and } only group.
TYPESETTING = [(re.compile(pattern), replacement) for pattern, replacement in [
    (r"\\\\(?:\[[0-9.]+ ?[a-z]+\])?", "¶"),  # first, as "\\ " is no "\ "
    (r"\bUS ?(?=\\?\$)", ""), (r"\\\$|\bUSD\b", "¤"), (r"\bEUR\b", "€"),
    (r"\\?%|\bper cent\b", " percent "),
    # ½, x², x₁: for NFKC they are 1⁄2, x2, x1, and ⁻² is −2; then the minus, and what looks so
    ("[¼-¾⅐-⅞]", lambda m: r"\frac{" + normalize("NFKC", m[0]).replace("⁄", "}{") + "}"),
    ("[⁺⁻]?[⁰¹²³⁴-⁹]+|ⁿ", lambda m: "^{" + normalize("NFKC", m[0]) + "}"),
    ("[₀-₉]+", lambda m: "_{" + normalize("NFKC", m[0]) + "}"),
    (r" *(?:[⁄∕/]|\bper\b) *", "/"), ("[−‐‑‒–﹣－]", "-"), ("[’‘′]", "'"),
    ("[\u200b-\u200f\u2060\ufeff]", ""), (r"(?<![^\s(])~(?=[ 0-9.$])", "≈"),  # ~5 is about 5
    ("!=", "≠"), ("<=", "≤"), (">=", "≥"),
    (r"[×·∞√∪∩±≤≥≠∈∅]|(?<![Α-ώ])[α-ω](?![Α-ώ])", lambda m: rf"\{LATEX[m[0]]} "),
    (r"\\(le|ge|ne)q(?:slant)?(?![a-zA-Z])", r"\\\1"),
    (r" *\\! *", ""), (r" *\{ *, *\} *", ","),
    (r"\\(?:left|right|displaystyle|[bB]igg?[lr]?)(?![a-zA-Z])|\\[()\[\]]", ""),
    (r"\\\{|\\lbrace(?![a-zA-Z])", "⦃"), (r"\\\}|\\rbrace(?![a-zA-Z])", "⦄"),
    (r"(?:\\[,;: ]|\\q?quad(?![a-zA-Z])|~|\s)+", " "),
    # \text{m} is meters; a bare m may be a variable
    (r"(?<=[0-9a-z)}\]]) *\\(?:text|mathrm|mbox) *\{ *m *\}", " meters "),
    (r"\\(?:(?:text|math)?(?:bf|it|rm|sf|tt)|text|math|textnormal|mbox|bfseries|boldsymbol|bm)"
     r"(?![a-zA-Z])(?: *\{([^{}]*)\})?", r" \1 "),
    (r" *,? +and +| +,", ", "),
    (r"(?<=[0-9]) *([aApP])\.? ?[mM](?![A-Za-z])\.?", lambda m: f" {m[1].lower()}m"),
    (r"°|\^ *(?:\{ *\\circ *\}|\\circ(?![a-zA-Z]))", " degrees "),
    (r"\bdegrees? +([CF])(?:elsius|ahrenheit)?\b", r" degrees\1"),
    # \dfrac12 -> \frac{1}2; \sqrt2 -> \sqrt{2}
    (r"\\[dtc]?(frac|sqrt)(?![a-zA-Z]) *([0-9a-zA-Z]|\\[a-zA-Z]+)", r"\\\1{\2}"),
    (rf"\\[dtc]?frac *({GROUP}) *([0-9a-zA-Z]|\\[a-zA-Z]+)", r"\\frac\1{\2}"),
    (rf"\\[dtc]?frac *({GROUP}) *\{{", r"\\frac\1{"),
    (r"([\^_]) *\{([+-]?[0-9]+|[a-zA-Z])\}(?![0-9])", r"\1\2"),
    (r"""^ *["'“„«`]+([^"'“„”«»`]*)["'“”»`]+ *$""", r"\1"),
    # Yes is yes; but not \Delta, and no short unit behind a number: 5 mW is not 5 MW
    (r"(?<![\\0-9])(?<![^\W\d_])(?<![0-9] )[^\W\d_]{2,}|(?<!\\)(?<![^\W\d_])[^\W\d_]{4,}",
     lambda m: m[0].casefold()),
    (rf"\b(?:square|sq) ({WORDS})\b", r"\1^2"), (rf"\bcubic ({WORDS})\b", r"\1^3"),
]]


def plain(text):
    """An answer without what is only typesetting: "$\\tfrac12$." -> "\\frac{1}{2}"."""
    text = normalize("NFC", text)  # é may be two characters
    for pattern, replacement in TYPESETTING:
        text = pattern.sub(replacement, text)
    # pairs of $ are LaTeX's; if their number is odd, they are dollars
    text = text.replace("$", "" if text.count("$") % 2 == 0 else "¤")
    return " ".join(text.split()).removesuffix(".").rstrip()


# The names that may stand before "=" and are left out: a variable (x, AB, m_1, f(x), \theta), or
# one of the words below. Other words could say that two sides are not equal.
NAME = re.compile(rf"""(?:(?:(?!no\b)[A-Za-z]{{1,2}}|\\(?i:{'|'.join(GREEK)})
    |(?i:answer|area|volume|total|sum))(?:_[0-9A-Za-z]+)?'*(?:\^-1)?
    (?:\([A-Za-z]\)|(?<=[fgh])\([^()]*\))?)?""", re.VERBOSE)
UNIT = re.compile(rf"(?!a )(.*?[^ /])( ?)(?<![A-Za-z\\])(?<![a-z]{{3}} )"
                  rf"(/?(?:{WORDS})(?:/(?:{WORDS}))?(?: ?\^[23])?)")
# what a response may have behind a number: 5 apples left, $5 each
TAIL = re.compile(r"^(?=.*\d)(.*?) (?:left|each|remaining|altogether|(?:in )?total|in all|old)$")
# any plural is a unit of a response where the data has the number alone: 72 clips, 5 red apples,
# 3 cups of flour; but not with a word that makes another number of it: 5 dozen eggs
PLURAL = re.compile(r"""(.*?[^ ])\ ((?:[a-z]{3,}[ -])?(?:[a-z]{3,}(?<!s)s|(?:wo)?men)
    (?:/[a-z]+)?)(?:\ of\ [a-z]+)?""", re.VERBOSE)
NO_UNIT = re.compile(r"""\b(?:(?:one|two|three|four|five|fif|six|seven|eight?|nine?|ten|eleven
    |twel[vf]e?|[a-z]+t(?:y|ie|een)|hundred|thousand|[a-z]*illion|dozen|score|gross|lakh|crore|third
    |quarter|hal(?:f|ve))(?:th)?s?|more|fewer|extra|additional|other|plus|minus|versus|and|not|than
    |over|point|this|perhaps)\b""", re.VERBOSE)
# what may stand before "=" in a response: no words but functions, and no other relation
EXPRESSION = re.compile(r"""(?:\\(?!(?:le|ge|ne|lt|gt|approx|sim|equiv|in|to)(?![a-z]))[a-z]+
    |(?:sin|cos|tan|log|ln|exp|gcd|lcm)\b|[a-z](?![a-z])|,(?=[^()]*\))|[-+*/^_{}()|'.!\d\s])+""",
                        re.IGNORECASE | re.VERBOSE)
VARIABLE = re.compile(rf"(?:\\(?:{'|'.join(GREEK)})\b|(?<![\\A-Za-z])(?![fgh]\()[A-Za-z]"
                      r"(?![A-Za-z]))(?:_\w)?")


def read_answer(text, loose=False):
    """
    The text of an answer, as plain returns it -> its name, or "", its value, and its unit, or "":
    "x = 5 cm" -> ("x", Fraction(5), "cm"). "5 m" has a unit, but "5m" none: m may be a variable.
    loose: also an expression as the name (x + y = 5), and any unit of a number (72 clips).
    """
    name, unit = "", ""
    *sides, last = map(str.strip, re.split(r"=|\\in(?![a-zA-Z])", text))
    if all(NAME.fullmatch(side) or loose and is_side(side, last) for side in sides):
        name, text = " = ".join(sides), last
    text = TAIL.sub(r"\1", text) if loose else text
    if match := re.match(r"([+-]?) ?([¤£€¥₹]) ?", text):
        text, unit = match[1] + text[match.end():], UNITS[match[2]]
    known = UNIT.fullmatch(text)
    if known and (not re.match("/?[a-zA-Z](?![a-zA-Z])", known[3])
                  or known[2] and read_number(known[1]) is not None):
        text = known[1]
        words = re.sub("[^/^0-9 ]+", lambda m: UNITS.get(m[0], ""), known[3]).replace(" ", "")
        unit += "" if unit and words[0] != "/" else words  # $5 dollars, $5 per day
    elif loose and (plural := PLURAL.fullmatch(text)) and not NO_UNIT.search(text):
        if read_number(plural[1]) is not None:
            text, unit = plural[1], unit or plural[2]
    return name, value_of(text), unit


def is_side(text, last):
    """
    Whether a text may stand before "= last" in an equation that says something of `last`: not 6 in
    6 = 5, no words, and not 2x in 2x = 5, which is still to be solved.
    """
    solved = len(set(VARIABLE.findall(text))) != 1
    return solved and EXPRESSION.fullmatch(text) and read_number(text) in (None, read_number(last))


def value_of(text, deep=3):
    """
    The value of plain text without name and unit: a Fraction; of a list or a set its brackets and
    its values, "(1, 2]" -> ("(]", 1, 2); or the text itself. Brackets around one value only group
    it. deep: how many lists may be inside each other.
    """
    text = text.strip()
    if (number := read_number(text)) is not None:
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
    Plain text as it is compared: without blanks, but for those that count (4 2 is not 42, 1, 234 is
    not 1,234), without the + of +x; {1} and \\{1\\} become one.
    """
    text = re.sub(r"(?<![0-9,]) | (?![0-9])|(?<=,) (?![0-9]{3}(?![0-9]))", "", text)
    return re.sub(r"^\+(?![+-])", "", text.replace("⦃", "{").replace("⦄", "}"))


# the numbers that are read, in groups of digits or not: 1234; 0.5; 1/2, 1/-2; 1 1/2; 5e-1
GROUPED = re.compile(r"(?<![0-9.,])[1-9][0-9]{0,2}(?:(?:,[0-9]{3})+|(?: [0-9]{3})+(?!/))(?![0-9,])")
DECIMAL = r"(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,2})?"
NUMBER = re.compile(rf"(?:([0-9]+) (?=[0-9]+/[0-9]+$))?({DECIMAL})"
                    rf"(?:/(-?{DECIMAL}|\(-{DECIMAL}\)))?")


def read_number(text):
    """
    The value of a number in plain text as a Fraction; None if it is no number, or one with more
    than MOST_DIGITS digits or with an exponent of more than two.
    """
    if sum(map(str.isdigit, text)) > MOST_DIGITS:
        return None
    text = GROUPED.sub(lambda m: re.sub("[ ,]", "", m[0]), text)
    # 1\frac{1}{2} -> 1 1/2
    text = re.sub(r"\\frac\{ ?([+-]?[0-9.]+) ?\}\{ ?(-?[0-9.]+) ?\}", r" \1/\2 ", text).strip()
    negative, text = text.startswith("-"), re.sub(r"^[+-] *", "", text).replace("  ", " ")
    text = re.sub(r" ?(?:\\times|\\cdot|\*|x) ?10\^", "e", re.sub(r"^(?=10\^)", "1x", text))
    if not (match := NUMBER.fullmatch(text)):
        return None
    whole, numerator = Fraction(match[1] or 0), Fraction(match[2])
    denominator = Fraction((match[3] or "1").strip("()"))
    if not denominator or whole and numerator >= denominator:
        return None
    return (whole + numerator / denominator) * (-1 if negative else 1)

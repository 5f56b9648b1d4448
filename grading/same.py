r"""
Are two answers the same? Both are brought to one form, and compared.

    plain           $x = \tfrac52$ cm.      ->  x = \frac{5}{2} cm         without typesetting
    read_answer     x = \frac{5}{2} cm      ->  "x", Fraction(5, 2), "cm"  its name, value and unit

Tables define typesetting, units, names and numbers. This file reads text that a model wrote:
nothing is evaluated as code, every size is bounded, and no text raises an exception.
docs/rewards.md has a table of equal answers. There is no algebra: x + 1 and 1 + x are two answers,
and so are a/b and \frac{a}{b}; see `math` there.
"""
import re
from fractions import Fraction
from unicodedata import normalize

LONGEST = 200  # characters of an answer; a longer one must be the same text
MOST_DIGITS, MOST_ELEMENTS = 100, 20  # an answer with more is text, not a number or a list
GROUP = r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}"  # braces, balanced, up to three deep
# words that deny an answer; and words that may deny it, or give two answers
DENIED = re.compile(r"n['’]t\b(?! hesitate)|\b(?:not\b(?! hesitate)|no(?!,)|never|cannot|neither"
                    r"|nor|wrong|incorrect|false|untrue|unlikely|impossible)\b", re.IGNORECASE)
DOUBT = re.compile(DENIED.pattern + r"|\b(?:or|either|if|unless|let|whether|suppose|assum\w+"
                   r"|imagine|doubt)\b", re.IGNORECASE)
# the letter of a choice, perhaps with its text: B), option B, (B) Paris
CHOICE = re.compile(r"(?:(?:option|choice) )?\(?([A-Z])(?:[).:](?!.*(?:\b[A-Z][).:]|, [A-Z]$|"
                    rf"{DOUBT.pattern})).*)?", re.DOTALL)


def same_answer(given, truth):
    r"""
    Whether two answers of final_answer are the same: given is the model's, truth the data's. An
    empty answer equals no answer. Typesetting does not count. Numbers are the same if their exact
    values are; lists, tuples, intervals and sets if their parts are; all else if the texts are.
    Names and units: see clash. Only the model's answer may add to a number any unit (72 clips) or
    an expression in the place of a name (x + y = 5).
    """
    given, truth = given.strip(), truth.strip()
    if given == truth or not given or not truth or max(len(given), len(truth)) > LONGEST:
        return given == truth != ""
    given, truth = plain(given), plain(truth)
    if len(truth.strip("()")) == 1 and (choice := CHOICE.fullmatch(given)):
        given = choice[1]
    if squeeze(given) == squeeze(truth) != "":
        return True
    read, wanted = read_answer(given, loose=True), read_answer(truth)
    if read[1] == "":
        return False
    same = read[1] == wanted[1] and not clash(read, wanted)
    return same or read == read_answer(truth, loose=True)


def clash(read, wanted):
    """Whether two answers of read_answer have different names or units: 5 cm and 5 m."""
    (name, _, unit), (true_name, _, true_unit) = read, wanted
    return "" != name != true_name != "" or "" != unit != true_unit != ""


# --------------------------------------------------------------------------------------------------
# typesetting

# The units, which one side may leave out, a line for each quantity. Commas separate the names of
# one unit; the first one is used here. Each name has a plural, too
UNITS = {name + s: names.split(",")[0] for names in """
    percent degree degreesc degreesf radian unit point people way
    dollar,¤ cent,¢ euro,€ sterling,£ yen,¥ rupee,₹
    mm,millimeter,millimetre cm,centimeter,centimetre m,meter,metre km,kilometer,kilometre
    in,inch,inche ft,foot,feet yd,yard mi,mile
    mg,milligram g,gram kg,kilogram lb,pound oz,ounce mol,mole
    ml,mL,milliliter L,l,liter,litre gal,gallon
    ns ms s,sec,second min,minute h,hr,hour day week month year
    mi/h,mph km/h,kph,kmh
    N,newton J,joule kJ W,watt mW kW MW kWh V,volt Hz,hertz kHz MHz GHz kPa dB MB GB TB
    """.split() for name in names.split(",") for s in ("", "s") if len(name) > 1 or not s}
WORDS = "|".join(UNITS)
GREEK = """alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho
varsigma sigma tau upsilon phi chi psi omega varepsilon varphi""".split()
LATEX = dict(zip("αβγδεζηθικλμνξοπρςστυφχψω", GREEK, strict=False)) | dict(zip(
    "×·∞√∪∩±≤≥≠∈∅", "times cdot infty sqrt cup cap pm le ge ne in emptyset".split(), strict=True))
# Typesetting: patterns and their replacements, applied in this order. ¤ is a dollar sign that does
# not delimit LaTeX, ¶ the end of a matrix's row, ⦃ and ⦄ are a set's braces, \{ and \}: the braces
# { and } only group.
TYPESETTING = [(re.compile(pattern), replacement) for pattern, replacement in [
    (r"\\\\(?:\[[0-9.]+ ?[a-z]+\])?", "¶"),  # first, because "\\ " is no "\ "
    (r"\bUS ?(?=\\?\$)", ""), (r"\\\$|\bUSD\b", "¤"), (r"\bEUR\b", "€"),
    (r"\\?%|\bper cent\b", " percent "),
    # ½, x², x₁: NFKC makes them 1⁄2, x2, x1, and ⁻² becomes −2; then the minus and similar signs
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
    """An answer without typesetting: "$\\tfrac12$." -> "\\frac{1}{2}"."""
    text = normalize("NFC", text)  # é may be two characters
    for pattern, replacement in TYPESETTING:
        text = pattern.sub(replacement, text)
    # pairs of $ are LaTeX's; if their number is odd, they are dollars
    text = text.replace("$", "" if text.count("$") % 2 == 0 else "¤")
    return " ".join(text.split()).removesuffix(".").rstrip()


# --------------------------------------------------------------------------------------------------
# name, value and unit

# The names before "=" that are left out: a variable (x, AB, m_1, f(x), \theta), or one of the words
# below. Other words could say that two sides are not equal.
NAME = re.compile(rf"""(?:(?:(?!no\b)[A-Za-z]{{1,2}}|\\(?i:{'|'.join(GREEK)})
    |(?i:answer|area|volume|total|sum))(?:_[0-9A-Za-z]+)?'*(?:\^-1)?
    (?:\([A-Za-z]\)|(?<=[fgh])\([^()]*\))?)?""", re.VERBOSE)
UNIT = re.compile(rf"(?!a )(.*?[^ /])( ?)(?<![A-Za-z\\])(?<![a-z]{{3}} )"
                  rf"(/?(?:{WORDS})(?:/(?:{WORDS}))?(?: ?\^[23])?)")
# words behind a number in a response: 5 apples left, $5 each
TAIL = re.compile(r"^(?=.*\d)(.*?) (?:left|each|remaining|altogether|(?:in )?total|in all|old)$")
# any plural is a unit of a response where the data only has the number: 72 clips, 5 red apples,
# 3 cups of flour; but not with a word that changes the number: 5 dozen eggs
PLURAL = re.compile(r"""(.*?[^ ])\ ((?:[a-z]{3,}[ -])?(?:[a-z]{3,}(?<!s)s|(?:wo)?men)
    (?:/[a-z]+)?)(?:\ of\ [a-z]+)?""", re.VERBOSE)
NO_UNIT = re.compile(r"""\b(?:(?:one|two|three|four|five|fif|six|seven|eight?|nine?|ten|eleven
    |twel[vf]e?|[a-z]+t(?:y|ie|een)|hundred|thousand|[a-z]*illion|dozen|score|gross|lakh|crore|third
    |quarter|hal(?:f|ve))(?:th)?s?|more|fewer|extra|additional|other|plus|minus|versus|and|not|than
    |over|point|this|perhaps)\b""", re.VERBOSE)
# text before "=" in a response: no words except functions, and no other relation
EXPRESSION = re.compile(r"""(?:\\(?!(?:le|ge|ne|lt|gt|approx|sim|equiv|in|to)(?![a-z]))[a-z]+
    |(?:sin|cos|tan|log|ln|exp|gcd|lcm)\b|[a-z](?![a-z])|,(?=[^()]*\))|[-+*/^_{}()|'.!\d\s])+""",
                        re.IGNORECASE | re.VERBOSE)
VARIABLE = re.compile(rf"(?:\\(?:{'|'.join(GREEK)})\b|(?<![\\A-Za-z])(?![fgh]\()[A-Za-z]"
                      r"(?![A-Za-z]))(?:_\w)?")


def read_answer(text, loose=False):
    """
    An answer's text from `plain` -> its name, or "", its value, and its unit, or "": "x = 5 cm" ->
    ("x", Fraction(5), "cm"). "5 m" has a unit, but "5m" none: m may be a variable. loose: also an
    expression as the name (x + y = 5), and any unit of a number (72 clips).
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
    Whether a text may be before "= last" where `last` is the value: not 6 in 6 = 5, no words, and
    not 2x in 2x = 5, which is not solved yet.
    """
    solved = len(set(VARIABLE.findall(text))) != 1
    return solved and EXPRESSION.fullmatch(text) and read_number(text) in (None, read_number(last))


def value_of(text, deep=3):
    """
    The value of plain text without name and unit: a Fraction; for a list or a set its brackets and
    its values, "(1, 2]" -> ("(]", 1, 2); or the text itself. Brackets around one value only group
    it. deep: the most levels of nested lists.
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
    """The text cut at commas, but not inside brackets; [] where the brackets do not match."""
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
    Plain text for a comparison: without blanks, except between digits (4 2 is not 42; 1, 234 is not
    1,234), and without the + of +x; {1} and \\{1\\} become the same.
    """
    text = re.sub(r"(?<![0-9,]) | (?![0-9])|(?<=,) (?![0-9]{3}(?![0-9]))", "", text)
    return re.sub(r"^\+(?![+-])", "", text.replace("⦃", "{").replace("⦄", "}"))


# numbers, in groups of digits or not: 1234; 0.5; 1/2, 1/-2; 1 1/2; 5e-1
GROUPED = re.compile(r"(?<![0-9.,])[1-9][0-9]{0,2}(?:(?:,[0-9]{3})+|(?: [0-9]{3})+(?!/))(?![0-9,])")
DECIMAL = r"(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,2})?"
NUMBER = re.compile(rf"(?:([0-9]+) (?=[0-9]+/[0-9]+$))?({DECIMAL})"
                    rf"(?:/(-?{DECIMAL}|\(-{DECIMAL}\)))?")


def read_number(text):
    """
    The value of a number in plain text as a Fraction; None if it is no number, or if it has more
    than MOST_DIGITS digits, or more than two in its exponent.
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

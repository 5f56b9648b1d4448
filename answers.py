"""
When two answers are the same, and what an arithmetic expression is worth. Both read a model's text, so nothing is evaluated as
code, every size is bounded, and no text raises an exception.

The manner of MATH's grader (Hendrycks et al., arXiv 2103.03874): undo what is only typesetting, then compare; but numbers as
exact fractions, and lists element by element. What is not surely a number is compared as text.
"""
import re
from fractions import Fraction

LONGEST = 200  # characters of an answer; a longer one is only right letter for letter
DEEPEST = 20  # parentheses in arithmetic
MOST_DIGITS, LARGEST_EXPONENT, MOST_ELEMENTS = 100, 100, 20  # beyond these: no number, no list, only text

INTEGER = r"(?:0|[1-9][0-9]*|[1-9][0-9]{0,2}(?:,[0-9]{3})+)"  # 1234 or 1,234; not 1,2 and not 042
DECIMAL = rf"(?:{INTEGER}(?:\.[0-9]+)?|\.[0-9]+)"
QUOTIENT = re.compile(rf"({DECIMAL})(?: ?/ ?({DECIMAL}))?")
MIXED = re.compile(rf"({INTEGER}) ({INTEGER}) ?/ ?({INTEGER})")
SCIENTIFIC = re.compile(rf"(?:({DECIMAL})(?:[eE]| ?(?:\\times|\\cdot|\*|x) ?10\^)|10\^)([+-]?[0-9]{{1,3}})")

CURRENCIES = {"¤": "dollar", "£": "sterling", "€": "euro", "¢": "cent"}  # ¤ stands for a dollar that is not LaTeX's
UNIT_NAMES = """percent|degree degrees|dollar dollars usd|cent cents|euro euros|unit units|point points
mm millimeter millimeters|cm centimeter centimeters centimetre centimetres|m meter meters metre metres
km kilometer kilometers kilometre kilometres|in inch inches|ft foot feet|yd yard yards|mi mile miles
mg milligram milligrams|g gram grams|kg kilogram kilograms|lb lbs pound pounds|oz ounce ounces|ton tons
ml mL milliliter milliliters|l L liter liters litre litres|gallon gallons|quart quarts|pint pints|cup cups
s sec second seconds|min mins minute minutes|h hr hrs hour hours|day days|week weeks|month months|year years
per|mi_per_h mph|km_per_h kph km/h|m_per_s m/s|km_per_s km/s"""
UNITS = CURRENCIES | {alias: names.split()[0].replace("_", " ") for names in re.split(r"[|\n]", UNIT_NAMES)
                      for alias in names.split()}  # alias -> the name that stands for all

TYPESETTING = [(re.compile(pattern), replacement) for pattern, replacement in [
    (r"\\\$", "¤"), (r"\\?%", " percent "), ("−", "-"), ("×", r"\\times "), ("·", r"\\cdot "), ("π", r"\\pi "),
    ("∞", r"\\infty "), ("°", r"^\\circ "), (r"\\!", ""), (r"\{,\}", ","),
    (r"\\(?:left|right|displaystyle|[bB]igg?[lr]?)(?![a-zA-Z])|\\[()\[\]]", ""),
    (r"(?<=[0-9])\\,(?=[0-9]{3}(?![0-9]))", ""), (r"\\[,;: ]|\\q?quad(?![a-zA-Z])|~|\s", " "),  # 10\,000
    (r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox) *\{([^{}]*)\}", r" \1 "),
    (r"\^ *(?:\{ *\\circ *\}|\\circ(?![a-zA-Z]))", " degrees "),
    (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
    (r"\\(frac|sqrt)(?![a-zA-Z]) *([0-9a-zA-Z]|\\[a-zA-Z]+)", r"\\\1{\2}"),  # \frac12 -> \frac{1}2; \sqrt2 -> \sqrt{2}
    (r"\\frac *\{([^{}]*)\} *([0-9a-zA-Z]|\\[a-zA-Z]+)", r"\\frac{\1}{\2}"),
    (r"\\frac *\{([^{}]*)\} *\{", r"\\frac{\1}{"),
    (r"([\^_])\{([+-]?[0-9]+|[a-zA-Z])\}(?![0-9])", r"\1\2"),
    (r"\\([{}])", r"\1"),
]]


def same_answer(given, truth):
    r"""
    Whether an answer, as final_answer gives it, is the true one. Both are text; an empty one equals nothing.

    Numbers are equal if their exact values are: 0.5, 1/2, \frac12, .50 and 5e-1 are one, 0.333 and 1/3 are two. A unit, a percent
    sign or an "x =" may be on one side alone; if both have one, it must be the same. So 12% is 12, and not 0.12. Only the units
    of UNITS are known. Lists, tuples and intervals agree element by element, in order, and in their brackets; sets in any order.
    All else is compared as text, after undoing TYPESETTING.
    """
    given, truth = given.strip(), truth.strip()
    if not given or not truth or max(len(given), len(truth)) > LONGEST:
        return given == truth != ""
    return given == truth or agree(read_answer(plain(given)), read_answer(plain(truth)))


def plain(text):
    """An answer's text without what only sets it: one way to write fractions, no math delimiters, single blanks, no period."""
    for pattern, replacement in TYPESETTING:
        text = pattern.sub(replacement, text)
    text = text.replace("$", "" if text.count("$") % 2 == 0 else "¤")  # pairs are LaTeX's, an odd one is a dollar
    return " ".join(text.split()).removesuffix(".").rstrip()


def read_answer(text, deep=3):
    """Plain text -> (name, value, unit): the value a Fraction, (brackets, elements) or else text; the others may be ""."""
    match = re.fullmatch(r"((?:[A-Za-z]+|\\[A-Za-z]+)(?:_[0-9A-Za-z])?(?:\([A-Za-z]\))?)? ?(?:=|\\in(?![a-zA-Z])) ?([^=]+)", text)
    name, text = (match[1] or "", match[2]) if match else ("", text)
    text, unit = split_unit(text.strip())
    number = read_number(text)
    if number is not None:
        return name, number, unit
    brackets, parts = split_list(text)
    if deep and brackets == "()" and len(parts) == 1:  # mere parentheses
        _, value, inner = read_answer(parts[0].strip(), deep - 1)
        return name, value, unit or inner
    if deep and 0 < len(parts) <= MOST_ELEMENTS:
        return name, (brackets, [read_answer(part.strip(), deep - 1) for part in parts]), unit
    return name, re.sub(r"(?<![A-Za-z0-9]) | (?![A-Za-z0-9])", "", text), unit  # "4 2" stays apart


def agree(given, truth):
    """Whether two results of read_answer are the same answer."""
    if any(x and y and x != y for x, y in ((given[0], truth[0]), (given[2], truth[2]))):  # names, units
        return False
    given, truth = given[1], truth[1]
    if not (isinstance(given, tuple) and isinstance(truth, tuple)):
        return given == truth != ""
    if given[0] != truth[0] or len(given[1]) != len(truth[1]):
        return False
    if truth[0] == "{}":  # as many elements, and all of the true ones: as these differ, it is one of each
        return all(any(agree(x, y) for x in given[1]) for y in truth[1])
    return all(agree(x, y) for x, y in zip(given[1], truth[1], strict=True))


def split_unit(text):
    """"-¤5 per hour" -> ("-5", "dollar per h"); ("5m", "") is no length, as m may be a variable, but "5 m" is."""
    rest, before, after = text, [], []
    if match := re.match(r"([+-]?) ?([¤£€]) ?", rest):
        rest, before = match[1] + rest[match.end():], [CURRENCIES[match[2]]]
    for _ in range(4):
        match = re.search(r"(?<![A-Za-z\\/])([A-Za-z]+(?:/[A-Za-z]+)?|[¤£€¢])(?: ?\^([23]))?$", rest)
        word = match and (match[1] if len(match[1]) <= 2 else match[1].lower())
        head = rest[:match.start()] if match else ""
        if word in ("square", "cubic", "sq", "cu") and after:
            after[0] += "2" if word[0] == "s" else "3"
        elif word in UNITS and (len(word) > 1 or not word.isalpha() or head.endswith(" ")):
            after.insert(0, UNITS[word] + (match[2] or ""))
        else:
            break
        rest = head.rstrip()
    if not re.search(r"[0-9\\]", rest):  # "a week" is no measure of "a"
        return text, ""
    return rest, " ".join(before + after)


def read_number(text):
    """The value of a number in plain text, a Fraction, or None. Bounded: no long digits, no large exponents."""
    if sum(map(str.isdigit, text)) > MOST_DIGITS:
        return None
    text = re.sub(r"\\frac\{ ?([+-]?[0-9.,]+) ?\}\{ ?([0-9.,]+) ?\}", r" \1/\2 ", text).strip()  # 1\frac{1}{2} -> 1 1/2
    negative, text = text.startswith("-"), re.sub(r"^[+-] *", "", text).replace("  ", " ")
    value = None
    if match := QUOTIENT.fullmatch(text):
        numerator, denominator = (Fraction(part.replace(",", "")) for part in (match[1], match[2] or "1"))
        value = numerator / denominator if denominator else None
    elif match := MIXED.fullmatch(text):
        whole, numerator, denominator = (int(part.replace(",", "")) for part in match.groups())
        value = whole + Fraction(numerator, denominator) if numerator < denominator else None
    elif (match := SCIENTIFIC.fullmatch(text)) and abs(int(match[2])) <= LARGEST_EXPONENT:
        value = Fraction((match[1] or "1").replace(",", "")) * Fraction(10) ** int(match[2])
    return -value if value is not None and negative else value


def split_list(text):
    """"(1, 2]" -> ("(]", ["1", " 2"]); "1, 2" -> ("", ["1", " 2"]); what is no list -> ("", [])."""
    parts = split_commas(text)
    if len(parts) > 1:
        return "", parts
    if text[:1] in ("(", "[", "{") and text[-1:] in (")", "]", "}") and (inner := split_commas(text[1:-1])):
        return text[0] + text[-1], inner
    return "", []


def split_commas(text):
    """text cut at the commas outside of all brackets; [] where brackets do not match."""
    depth, parts = 0, [""]
    for ch in text:
        depth += (ch in "([{") - (ch in ")]}")
        if depth < 0:
            return []
        if ch == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += ch
    return parts if depth == 0 else []


# ---------------------------------------------------------------------------------------------------------------------
# arithmetic


def evaluate_arithmetic(text):
    """
    The exact value of an expression of non-negative integers, + - * / (or × ÷), parentheses and unary minus, as a Fraction; None
    for anything else, for division by zero, and beyond LONGEST characters (which bounds the digits) or DEEPEST parentheses.
    A recursive descent of our own, as the text is a model's: no eval, no powers, never an exception.
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

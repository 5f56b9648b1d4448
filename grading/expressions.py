r"""
The reward `math`: whether two answers are the same, by algebra: x + 1 and 1 + x are, and so are
\sqrt{8} and 2\sqrt{2}. The package math-verify (github.com/huggingface/Math-Verify) compares two
formulas. It is not in requirements.txt: pip install math-verify, 0.9 or later.

math-verify alone searches a text for something that it can read, and drops the rest. For it 5 cm is
5 m, "not 5" is 5, and 2x = 5 is 5. A policy finds such holes. So `read` takes an answer apart:

    so $x = 5$ cm    ->    formula "5", name "x", unit "cm"

Units and names are compared here, and math-verify only gets formulas, each as a whole. A sentence,
such as "5 or more", is no formula, and equals no other text.

A model's formula may take hours, or all memory. So math-verify works in a process of its own, with
a limit of memory. If a pair takes SECONDS, the process ends itself, the pair counts as wrong, and a
new process goes on with the next pair.
"""
import importlib.util
import json
import math
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from errors import BadInput, Stop
from grading.answers import answers_of, check_answers, same_answer, whole_responses
from grading.forms import letters
from grading.sandbox import cpus_of_a_rank, use_all_cpus

SECONDS = 10  # for one pair; math-verify itself stops reading after 5, and comparing after 5
LONGEST = 1000  # characters of an answer; a longer one is wrong


def math_answer(batch):
    """
    The reward `math`, a list of B scores: 1.0 where the final answer of the response is the row's
    `answer`, as for accuracy or by algebra; else 0.0. Algebra has 4/5 of batch["seconds"]; answers
    that are not compared then score 0, and a printed line says so.
    """
    pairs = [answers_of(text, row["answer"])
             for text, row in zip(whole_responses(batch), batch["rows"], strict=True)]
    verdicts = {pair: verdict(*pair) for pair in pairs}
    asked = [pair for pair in verdicts if verdicts[pair] not in (True, False)]
    seconds = 0.8 * batch.get("seconds", math.inf)
    found = same_formulas([verdicts[pair] for pair in asked], cpus_of_a_rank(), seconds)
    verdicts |= zip(asked, found, strict=True)
    late = sum(verdicts[pair] is None for pair in pairs)
    if late:
        print(f"reward 'math': {late} of {len(pairs)} answers were not compared in "
              f"{seconds:.0f} s, and score 0; raise reward_timeout", flush=True)
    return [float(bool(verdicts[pair])) for pair in pairs]


def check_math(rows, path):
    """Raise BadInput unless the rows have answers, and math-verify is installed."""
    check_answers(rows, path, "math")
    if importlib.util.find_spec("math_verify") is None:
        raise BadInput("the reward 'math' grades with the package math-verify, which is not "
                       "installed; type pip install math-verify, or use accuracy")


math_answer.check_rows = check_math  # rewards.py calls it


# --------------------------------------------------------------------------------------------------
# formula, name and unit

# LaTeX for symbols; any other letter beyond ASCII makes an answer a sentence
SYMBOLS = {"²": "^2", "³": "^3", "½": r"\frac{1}{2}", "−": "-", "–": "-", "°": " degree ",
           "€": " euro ", "£": " pound "} | {text[0]: rf"\{text[1:]} " for text in (
               "·cdot ×times ÷div πpi ∞infty √sqrt ∪cup ∩cap ≤le ≥ge ≠ne ∈in ∅emptyset").split()}
WRITING = [(re.compile(pattern), by) for pattern, by in [
    (r"\s*I hope it is correct\.?\s*$|\\!", ""),  # the first ends the solutions of Minerva's prompt
    (r"\\\$|\bUSD\b|\$(?=\s?\.?\d[^$]*$)", " dollar "), (r"\\?%", " percent "),
    (r"\^\s*(?:\{\s*\\circ\s*\}|\\circ\b)", " degree "),
    (r"\\(?:text|mathrm|mbox|textbf|mathbf)\s*\{([^{}]*)\}", r" \1 "),
    (r"(?<!\\)\\(?:left|right|displaystyle|[,;: ()\[\]])|[*`\"$]|\.\s*$", " "),
    (r"(?<=[a-z])\s+\^", "^"), (r"\b(?:square|sq) ([a-z]+)", r"\1^2"),
    (r"(?<=\w)\s*\(?\s*\b(?:in )?base[\s-]*(\w+)\s*\)?\s*$", r"_\1"),
    (r"\bcubic ([a-z]+)", r"\1^3"), (r" per ", "/"), (r"\\varnothing\b", r"\\emptyset")]]
SMALL = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
LEAD = re.compile(r"\s*(?:(?:so|thus|hence|therefore|the|final|answer|is)\b[\s,:]*)*", re.I)
NAMED = re.compile(r"((?:[A-Za-z]{1,2}|\\(?:alpha|beta|theta|lambda|mu|phi|omega))(?:_\w|_\{\w+\})?"
                   r"(?:\([a-z]\))?)\s*(?:=|\\in\b)\s*(.*)", re.DOTALL)
# the names of units, a unit for each line or between ;
UNITS = {name: unit.split()[0] for unit in """
    mm millimeter millimetre; cm centimeter centimetre; m meter metre; km kilometer kilometre
    in inch inche; ft foot feet; yd yard; mi mile; mg milligram; g gram; kg kilogram; lb pound
    oz ounce; ml milliliter; l L liter litre; s sec second; min minute; h hr hour; km/h kmh kph
    mph; dollar; cent; euro; percent; degree; C Celsius; F Fahrenheit; V; N; J
    mW; W; kW; MW; Hz
    """.replace("\n", ";").split(";") for name in unit.split()}
# a last word: known as a unit, or a thing that is counted: 72 clips; but no part of a number
LAST = re.compile(r"(.*?(?:(?<=\d)|(?<=[\s/])))([A-Za-z]+)(\^\{?[23]\}?)?\s*", re.DOTALL)
THING = re.compile(r"""(?!(?:
    more|less|fewer|than|hal[fv]|quarter|third|hundred|thousand|dozen|lakh|lacs|crore|myriad|googol
    |zero|factorial|doubled|tripled|quadrupled|twice|thrice|times|squared|cubed|plus|minus|negative
    |modulo|inverse|reciprocal|binary|octal|hexadecimal|(?:gross|grand|scores?|thou|root|[a-z]*fold
    |(?:two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|(?:thir|four|fif|six|seven|eigh
    |nine)teen|(?:twen|thir|for|fif|six|seven|eigh|nine)t(?:y|ie))(?:s|es)?)\b
    |[a-z]*illion|(?!months|paths)[a-z]*ths?\b))[a-z]{4,}""", re.VERBOSE)
MIXED = re.compile(r"(?<![\d./^_])(?<!\d,(?=\d{3} ))(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d.])")  # 3 1/2
# a number in another base: 2516_8, FF_{16}, (101)_{2}; and 0.1\overline{6}, with \bar, \dot, too
BASED = re.compile(
    r"(?<![\w.\\}])(\()?((?=[A-Fa-f]*\d|[A-F]{2})(?:[\dA-F]+|[\da-f]+))(?(1)\))"
    r"_(\{)?(\d\d?)(?(3)\})(?!\w)")
REPEATING = re.compile(r"(?<![\d.])(\d*)\.(\d*)\\(?:overline|bar|dot)\s*(?:\{(\d+)\}|(\d))"
                       r"(?:(\d*)\\dot\s*\{?(\d)\}?)?(?!\d)")
FUNCTIONS = ("sin cos tan cot sec csc log exp max min gcd lcm mod and left right begin end matrix "
             "pmatrix bmatrix vmatrix cases array").split()


def verdict(given, truth):
    """
    Whether two answers are the same; or, where algebra must say it, their formulas (given, truth).
    "5 cm" and "5 m" -> False; "x = 1 + y" and "y + 1" -> ("1 + y", "y + 1").
    """
    if same_answer(given, truth):
        return True
    if not given or max(len(given), len(truth)) > LONGEST:
        return False
    (given, *named), (truth, *wanted) = read(given), read(truth)
    if any("" != one != other != "" for one, other in zip(named, wanted, strict=True)):
        return False
    # for 2516_8 the digits alone are right; else its value counts, 1358
    if same_answer(given, BASED.sub(r"\2", truth)):
        return True
    given, truth = (BASED.sub(value_of, x) for x in (given, truth))
    if same_answer(given, truth):
        return True
    clash = ("=" in given) != ("=" in truth)  # an equation is no value
    return False if clash or is_sentence(given) or is_sentence(truth) else (given, truth)


def read(answer):
    """An answer -> its formula, name and unit: "so $x = 5$ cm" -> ("5", "x", "cm")."""
    text = re.sub("[₀-₉]+", lambda small: f"_{{{small[0].translate(SMALL)}}}", letters(answer))
    text = REPEATING.sub(fraction_of, " ".join(text.split())).translate(str.maketrans(SYMBOLS))
    for pattern, by in WRITING:
        text = pattern.sub(by, text)
    text, name, unit = text[LEAD.match(text).end():].strip(), "", ""
    parts = [NAMED.fullmatch(part) for part in re.split(r"\s*(?:,|\bor\b|\band\b)\s*", text)]
    if all(parts) and len({part[1] for part in parts}) == 1:  # x = 1 or x = 2
        name, text = parts[0][1], ", ".join(part[2] for part in parts).strip()
    if text.startswith("dollar "):
        text, unit = text[7:].strip(), "dollar"
    while (last := LAST.fullmatch(text)) and last[1].strip():
        before, word, power = last[1].rstrip(), last[2], re.sub("[{}]", "", last[3] or "")
        known = UNITS.get(word) or UNITS.get(word.removesuffix("s"))
        apart = last[1] != before or before.endswith("/")  # 5 m, but not 5m: m may be a variable
        if not (known and (apart or len(word) > 1) or apart and THING.fullmatch(word)):
            break
        slash = "/" * before.endswith("/")
        text, unit = before.removesuffix("/").rstrip(), slash + (known or word) + power + unit
    text = re.sub(r"\A([+-]?[\d.]+)[eE]([+-]?\d+)\Z", r"\1\\times10^{\2}", text)  # 1.6e-19
    text = MIXED.sub(r"\1\\frac{\2}{\3}", text)
    return re.sub(r"(?<![\d,])\s+|\s+(?!\d)", "", text), name, unit  # 4 2 is not 42


def value_of(number):
    """The value of a match of BASED: that of FF_{16} -> "255"; of none, as 2516_{2}: "2516_2"."""
    try:
        return str(int(number[2], int(number[4]) or 1))
    except ValueError:  # a digit is too large, or the base is
        return f"{number[2]}_{number[4]}"


def fraction_of(number):
    r"""A match of REPEATING as a fraction: that of 0.1\overline{6} -> \frac{15}{90}."""
    whole, once, *again = (part or "" for part in number.groups())
    again = "".join(again)
    return (rf"\frac{{{int(whole + once + again) - int('0' + whole + once)}}}"
            f"{{{(10**len(again) - 1) * 10**len(once)}}}")


def is_sentence(text):
    """Whether a text has words in it, or numbers that are none, so that it is no formula."""
    words = set(re.findall(r"(?<![A-Za-z\\])[A-Za-z]{3,}|\b[ap]m\b|\d(?:th|st|nd|rd)\b", text))
    # math-verify would drop the base of no number, as in 2516_2, and the 0 of "0 7"
    dropped = re.search(r"\d[)}]*_|(?<![_^\d.])0+ \d", text)
    return not text.isascii() or bool(words.difference(FUNCTIONS) or dropped)


# --------------------------------------------------------------------------------------------------
# formulas, compared by math-verify

# In: SECONDS, and then a line [given, truth] for each pair. Out: "ready", and a line 1 or 0 for
# each pair. faulthandler's timer is a thread: it ends the process even during one long
# multiplication.
WORKER = r"""
import dataclasses, faulthandler, json, logging, os, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (4 * 2**30, 4 * 2**30))
out = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # whatever math-verify prints goes to stderr
logging.disable(logging.CRITICAL)
import sympy
from math_verify import LatexExtractionConfig, parse, verify
whole = LatexExtractionConfig()
whole = dataclasses.replace(whole, normalization_config=dataclasses.replace(
    whole.normalization_config, units=False, boxed="none"))
def read(text):
    return parse(f"${text}$", [whole], fallback_mode="no_fallback")
def numbers(x):  # a number, or those in a set, a pair, an interval, a matrix, in x < 5
    if getattr(x, "is_Matrix", False):
        return [n for part in x for n in numbers(part)]
    if isinstance(x, sympy.Expr):
        return [x] if x.is_number else []
    if isinstance(x, sympy.core.relational.Relational) and not any(s.is_Symbol for s in x.args):
        return []
    return [n for part in x.args for n in numbers(part)]
def near(a, b):  # math-verify rounds to 6 digits behind the point: 1e-7 would be 2e-7
    return a == b or abs(sympy.N(a - b)) <= 1.000001e-6 * abs(sympy.N(b))
def alike(a, b):
    a, b = numbers(a), numbers(b)
    return not a or not b or (all(any(near(x, y) for y in b) for x in a)
                              and all(any(near(x, y) for x in a) for y in b))
print("ready", file=out, flush=True)
seconds = float(sys.stdin.readline())
for line in sys.stdin:
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        given, truth = map(read, json.loads(line))
        same = bool(given) and bool(truth) and verify(truth, given) and alike(given[0], truth[0])
    except (Exception, RecursionError, MemoryError):
        same = False
    print(int(same), file=out, flush=True)
"""


def same_formulas(pairs, workers, seconds):
    """
    Whether the two formulas of each pair [(given, truth), ...] are the same, a list of bools; None
    where there was no time left. workers: processes at once. seconds: for all pairs.
    """
    end, found = time.monotonic() + seconds, [None] * len(pairs)
    workers = min(workers, 1 + len(pairs) // 16)  # a start takes as long as a hundred pairs
    with ThreadPoolExecutor(workers, initializer=use_all_cpus) as pool:
        for first, same in enumerate(pool.map(
                lambda first: ask(pairs[first::workers], end), range(workers))):
            found[first::workers] = same
    return found


def ask(pairs, end):
    """The same with one process after the other. end: the last moment, by time.monotonic()."""
    verdicts = []
    while len(verdicts) < len(pairs):
        left = end - time.monotonic()
        if left <= 0:
            return verdicts + [None] * (len(pairs) - len(verdicts))
        lines = [str(SECONDS), *map(json.dumps, pairs[len(verdicts):])]
        try:
            written = subprocess.run(
                [sys.executable, "-c", WORKER], input="\n".join(lines).encode(),
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
                timeout=None if left == math.inf else left).stdout
        except subprocess.TimeoutExpired as e:
            verdicts += [line == b"1" for line in (e.stdout or b"").splitlines()[1:]]
            continue  # there is no time left
        answers = written.splitlines()
        if not answers:
            raise Stop("the reward 'math' could not start math-verify; does python -c 'import "
                       "math_verify' work?")
        verdicts += [line == b"1" for line in answers[1:]]
        if len(verdicts) < len(pairs):
            verdicts.append(False)  # the pair at which the process has ended
    return verdicts

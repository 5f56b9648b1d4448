"""
Programs in a model's text: where in a completion the program is, what a test may be, and when an answer is the one wanted.
"""
import itertools
import json
import math
import os
import re

from errors import BadInput, shorten


# ---------------------------------------------------------------------------------------------------------------------
# where a completion has its program
FENCE = re.compile(r"`{3,}|~{3,}")
PYTHON = re.compile(r"\{?\s*\.?(?:i?python|py)[\d.]*(?![\w-])|[\w./-]*\.py(?!\w)", re.IGNORECASE)
MARKERS = re.compile(r"[ \t]*(?:(?:>|[-*+]|\d{1,9}[.)]|<answer>)[ \t]*)*")  # quotes, lists, answers
QUOTES = re.compile(r"(?:[ \t]*>)*")


def extract_code(completion):
    """
    The program in a completion, as text; None if its thinking never ends.

    It is looked for behind the last </think>, and in the last <answer> there, if there is one.
    It is the last fenced block that is tagged as Python's (python, py3, {.python}, python:f.py,
    f.py), else the last one without a tag, else all of the text; and what its first line is
    indented by is taken from all its lines. A tag inside a block is a part of the block.

    A block is what CommonMark (0.31, section 4.5) calls one: it begins with a fence of three or
    more backticks or tildes and ends with a fence of as many or more of them, with nothing behind
    and less than 4 columns further in. Since models write them, we allow besides:
    - A fence may be indented by anything and stand behind list markers, > and <answer>. One of
      backticks, tagged as Python's or not at all, may stand behind any text.
    - A fence with a tag begins a block where one is open, too. If it is too short to close that
      one, or of the other character, this holds for Python's only, in a block of something else.
    - A block that is never closed ends where first a line of it ends with a fence or </answer>,
      else at the end of the text, which may have been cut off.
    """
    text = completion.rpartition("</think>")[2].replace("\r\n", "\n").replace("\r", "\n")
    blocks, outside = fenced_blocks(text)
    if "<think>" in outside:
        return None
    begin, end = 0, len(text)
    answers = list(re.finditer(r"(?<![\"'`])<answer>", outside))  # a quoted one is a program's
    if answers:
        begin = answers[-1].end()
        end = begin + len(outside[begin:].partition("</answer>")[0])
    last = {tag: lines for tag, at, lines in blocks if begin <= at <= end}
    lines = last.get("python", last.get("", text[begin:end].split("\n")))
    indent = indentation(next(filter(str.strip, lines), ""))
    if indent:
        lines = [line[len(os.path.commonprefix([indent, line])):] for line in lines]
    return "\n".join(lines)


def fenced_blocks(text):
    """
    A text's fenced blocks in order, [(tag, where its fence is in the text, its lines)], with the
    tags "python", "" and others; and the text with blanks in the place of what is in the blocks.
    """
    lines, blocks, number = text.split("\n"), [], 0
    starts = list(itertools.accumulate((len(line) + 1 for line in lines), initial=0))
    outside = list(lines)
    while number < len(lines):
        before, fence, tag = read_fence(lines[number])
        at, first = starts[number] + len(before), number + 1
        behind_text = fence.startswith("`") and tag in ("python", "")
        if fence and (behind_text or MARKERS.fullmatch(before)):
            block, end, number = read_block(lines, first, fence, tag)
            blocks.append((tag, at, block))
            outside[first:end] = [" " * len(line) for line in lines[first:end]]
        else:
            number += 1
    return blocks, "\n".join(outside)


def read_block(lines, first, opened, tag):
    """
    The block whose first line is number `first` of a text's lines, behind a line with the fence
    `opened` and the tag. Returns its lines, the number of the line that ends it, and the number of
    the line where the text goes on: behind its own fence, or with the fence of another block.
    """
    depth = QUOTES.match(lines[first - 1])[0].count(">")
    quotes = re.compile(rf"(?:[ \t]*> ?){{0,{depth}}}")
    margin = columns(quotes.sub("", lines[first - 1], 1))
    block, shorter, end = [], None, len(lines)
    for number in range(first, len(lines)):
        line = quotes.sub("", lines[number], 1) if depth else lines[number]
        if not block and line.strip():  # behind a list marker, only this says where the margin is
            margin = max(margin, columns(line))
        before, fence, follows = read_fence(line)
        alike = fence.startswith(opened)
        ours = not before.strip() and columns(line) < margin + 4
        if ours and (alike or follows == "python" != tag):
            if alike and not follows:
                return block, number, number + 1
            end = number
            break
        if shorter is None and alike and not follows and before.strip():
            shorter = [*block, before]
        elif shorter is None and line.rstrip().endswith("</answer>"):
            shorter = [*block, line.rstrip().removesuffix("</answer>")]
        block.append(line)
    return (block if shorter is None else shorter), end, end


def read_fence(line):
    """What stands before a line's first fence, the fence, its tag; the line, "", "" if none."""
    found = FENCE.search(line)
    if not found:
        return line, "", ""
    tag = line[found.end():].partition("</answer>")[0].strip()
    if found[0][0] == "`" and "`" in tag:  # code within a line
        return line, "", ""
    return line[:found.start()], found[0], "python" if PYTHON.match(tag) else tag


def indentation(line):
    return line[:len(line) - len(line.lstrip(" \t"))]


def columns(line):
    """How far a line is indented, a tab going to the next multiple of 4."""
    return len(indentation(line).expandtabs(4))


# ---------------------------------------------------------------------------------------------------------------------
# tests are data


def check_tests(tests, where):
    """
    A row's tests as calls [(function, arguments)], outputs (what each of them returns) and scripts [(stdin, stdout)].

    tests: one or a list of {"fn": "add", "inputs": [[1, 2], [3, 4]], "outputs": [3, 7]} and {"stdin": "1 2", "stdout": "3"},
    whose stdin and stdout may also be lists of strings. where: names the row in the BadInput that malformed tests raise.
    """
    calls, outputs, scripts = [], [], []
    for test in tests if isinstance(tests, list) else [tests]:
        fields = set(test) if isinstance(test, dict) else None
        if fields == {"fn", "inputs", "outputs"}:
            given, wanted = test["inputs"], test["outputs"]
            if not isinstance(test["fn"], str) or not test["fn"].isidentifier():
                raise BadInput(f"{where}: fn must be the name of a function, found {shorten(test['fn'])}")
        elif fields == {"stdin", "stdout"}:
            given, wanted = ([x] if isinstance(x, str) else x for x in (test["stdin"], test["stdout"]))
        else:
            raise BadInput(f"{where}: a test has fn, inputs and outputs, or stdin and stdout; found {shorten(test)}")
        if not isinstance(given, list) or not isinstance(wanted, list) or not len(given) == len(wanted) > 0:
            raise BadInput(f"{where}: what is given and what is wanted must be lists of one length, found {shorten(test)}")
        for one, want in zip(given, wanted, strict=True):
            try:  # what does not equal itself is NaN, which no answer equals, or not JSON
                good = same(one, one) and same(want, want) and type(one) is (list if "fn" in test else str)
            except RecursionError:
                raise BadInput(f"{where}: a test case is nested too deep") from None
            if not good or "stdin" in test and not isinstance(want, str):
                raise BadInput(f"{where}: {shorten(one)} -> {shorten(want)} is no test case: it takes a list of arguments and a "
                               "JSON value (not NaN), or stdin and stdout as two strings")
            if "fn" in test:
                calls.append((test["fn"], one))
                outputs.append(want)
            else:
                scripts.append((one.encode("utf-8", "surrogatepass"), want.encode("utf-8", "surrogatepass")))
    if not calls and not scripts:
        raise BadInput(f"{where}: there are no tests")
    return calls, outputs, scripts


def judge(answer, want):
    """What became of a function call, from the line (bytes) that the program gave as its result."""
    if answer in (b"!", b"M"):
        return "error" if answer == b"!" else "memory"
    try:
        got = json.loads(answer.decode(), object_pairs_hook=without_collisions)
        return "pass" if same(got, want) else "fail"
    except (ValueError, RecursionError):  # keys that collide, or the program wrote there itself
        return "fail"


def without_collisions(pairs):
    """An object of JSON as a dict. Raises ValueError for a key that is there twice: 1 and "1"."""
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key is there twice")
    return dict(pairs)


def same(got, want):
    """
    Whether two JSON values are equal, `want` being the one that a test expects.

    Numbers are compared by value, 1 and 1.0 are equal. An int in want is met exactly, a float
    within 1e-6 relative, as data sets cut digits off, or 1e-12 absolute, so that 0.1 + 0.2 - 0.3 is
    0 as rounding leaves it, but 5e-10 is not. A bool equals only a bool, True is not 1; NaN equals
    nothing. (A tuple arrives as a list, a dict's keys as strings: what json.dumps does.)
    """
    if type(got) in (int, float) and type(want) in (int, float):
        try:
            near = isinstance(want, float) and math.isclose(got, want, rel_tol=1e-6, abs_tol=1e-12)
            return got == want or near
        except OverflowError:  # an int beyond all floats
            return False
    if type(got) is not type(want):
        return False
    if isinstance(want, list):
        return len(got) == len(want) and all(map(same, got, want))
    if isinstance(want, dict):
        return got.keys() == want.keys() and all(same(got[k], want[k]) for k in want)
    return isinstance(want, (str, bool, type(None))) and got == want


def tidy(text):
    """The lines of a text (bytes), without blanks at their ends and blank lines at the end."""
    return [line.rstrip() for line in text.rstrip().split(b"\n")]

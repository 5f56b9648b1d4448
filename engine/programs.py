"""
Programs in a model's text, without running them: where in a completion the program is, what a row
of the data may have as tests, and when a program's answer is the one that a test wants. Running
them is in engine/sandbox.py.
"""
import ast
import itertools
import json
import math
import os
import re

from errors import BadInput, shorten


# --------------------------------------------------------------------------------------------------
# where a completion has its program

FENCE = re.compile(r"`{3,}|~{3,}")
PYTHON = re.compile(r"\{?\s*\.?(?:i?python|py)[\d.]*(?![\w-])|[\w./-]*\.py(?!\w)", re.IGNORECASE)
# what may stand in front of a fence: markers of quotes and lists, and <answer>
MARKERS = re.compile(r"[ \t]*(?:(?:>|[-*+]|\d{1,9}[.)]|<answer>)[ \t]*)*")
QUOTES = re.compile(r"(?:[ \t]*>)*")


def extract_code(completion):
    """
    The program in a completion, as text; None if the completion's thinking never ends.

    From a completion such as

        <think>a sum</think>Here it is:
        ```python
        def add(a, b):
            return a + b
        ```

    it takes the two lines between the fences. The search begins behind the last </think>. If there
    is an <answer> there, only the last one is searched. The program is the first of these that is
    there: the last fenced block with a tag of Python's (python, py3, {.python}, python:f.py, f.py);
    the last fenced block without a tag; all of the text. The indentation of its first line is taken
    away from all its lines. A tag such as <answer> inside a block is a part of the block.

    A fenced block begins with a fence of three or more backticks or tildes. It ends with a fence of
    the same character, at least as long, with nothing behind it, indented by less than 4 columns
    more than the first (CommonMark 0.31, section 4.5). Models also write other things, and these
    are allowed, too:
    - A fence may be indented by any amount, and stand behind list markers, > and <answer>. A fence
      of backticks with a tag of Python's or none may stand behind any text.
    - A fence with a tag begins a new block even where the last block has not been closed. If it
      could not close that block, since it is too short or of the other character, then only a tag
      of Python's does this, and only in a block of something else.
    - A block that is never closed ends at its first line that ends with a fence or </answer>; if
      there is none, at the end of the text, which may have been cut off.
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
    Two results: the fenced blocks of a text in order, [(tag, position of its fence in the text, its
    lines)], with the tags "python", "" and others; and the text outside of them: the text with
    blanks in the place of every character of a block.
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
    One block, from number `first` of the lines of a text on. The line before has its fence, opened,
    and its tag.

    Returns the lines of the block, the number of the line that ends it, and the number of the line
    where the text goes on: the next one if the block was closed by a fence, the same one if that
    line opens another block.
    """
    depth = QUOTES.match(lines[first - 1])[0].count(">")
    quotes = re.compile(rf"(?:[ \t]*> ?){{0,{depth}}}")
    margin = columns(quotes.sub("", lines[first - 1], 1))
    block, shorter, end = [], None, len(lines)
    for number in range(first, len(lines)):
        line = quotes.sub("", lines[number], 1) if depth else lines[number]
        # in a list, the fence stands behind the marker: the first line shows where the margin is
        if not block and line.strip():
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
    """
    What stands before the first fence of a line, the fence, its tag: "a: ```py3" -> ("a: ", "```",
    "python"). The line, "", "" if there is no fence.
    """
    found = FENCE.search(line)
    if not found:
        return line, "", ""
    tag = line[found.end():].partition("</answer>")[0].strip()
    if found[0][0] == "`" and "`" in tag:  # ```code``` within a line
        return line, "", ""
    return line[:found.start()], found[0], "python" if PYTHON.match(tag) else tag


def indentation(line):
    """The blanks and tabs at the beginning of a line."""
    return line[:len(line) - len(line.lstrip(" \t"))]


def columns(line):
    """The columns by which a line is indented; a tab goes on to the next multiple of 4."""
    return len(indentation(line).expandtabs(4))


# --------------------------------------------------------------------------------------------------
# tests are data


def check_tests(tests, where):
    """
    The tests of a row -> calls, outputs and scripts.

    tests: one or a list of objects of two kinds. Of functions:
        {"fn": "add", "inputs": [[1, 2], [3, 4]], "outputs": [3, 7]}
        says that add(1, 2) is 3 and that add(3, 4) is 7.
        They give calls [("add", [1, 2]), ("add", [3, 4])] and outputs [3, 7].
    Of whole programs:
        {"stdin": "1 2", "stdout": "3"}; both may also be lists of strings.
        They give scripts [(b"1 2", b"3")].
    A test of functions may also be an assertion, as MBPP has them: "assert add(1, 2) == 3"; see
    read_assertion. And fn may be a method, as LeetCode has them: "Solution.add" is called on a new
    Solution().

    where: the file and the row, for the message. Raises BadInput for tests of another form.
    """
    calls, outputs, scripts = [], [], []
    for test in tests if isinstance(tests, list) else [tests]:
        if isinstance(test, str):
            test = read_assertion(test, where)
        fields = set(test) if isinstance(test, dict) else None
        if fields == {"fn", "inputs", "outputs"}:
            given, wanted = test["inputs"], test["outputs"]
            parts = test["fn"].split(".") if isinstance(test["fn"], str) else []
            if len(parts) not in (1, 2) or not all(map(str.isidentifier, parts)):
                raise BadInput(f"{where}: fn must be the name of a function, or CLASS.METHOD, "
                               f"found {shorten(test['fn'])}")
        elif fields == {"stdin", "stdout"}:
            given, wanted = ([x] if isinstance(x, str) else x
                             for x in (test["stdin"], test["stdout"]))
        else:
            raise BadInput(f"{where}: a test has fn, inputs and outputs, or stdin and stdout, or "
                           "is an assertion such as \"assert add(1, 2) == 3\"; found "
                           f"{shorten(test)}")
        lists = isinstance(given, list) and isinstance(wanted, list)
        if not lists or not len(given) == len(wanted) > 0:
            raise BadInput(f"{where}: what is given and what is wanted must be lists of one "
                           f"length, found {shorten(test)}")
        for one, want in zip(given, wanted, strict=True):
            # what does not equal itself is NaN, which no answer equals, or not JSON
            try:
                good = same(one, one) and same(want, want)
                good = good and type(one) is (list if "fn" in test else str)
            except RecursionError:
                raise BadInput(f"{where}: a test case is nested too deep") from None
            if not good or "stdin" in test and not isinstance(want, str):
                raise BadInput(f"{where}: {shorten(one)} -> {shorten(want)} is no test case: it "
                               "takes a list of arguments and a JSON value (not NaN), or stdin and "
                               "stdout as two strings")
            if "fn" in test:
                calls.append((test["fn"], one))
                outputs.append(want)
            else:
                scripts.append((one.encode("utf-8", "surrogatepass"),
                                want.encode("utf-8", "surrogatepass")))
    if not calls and not scripts:
        raise BadInput(f"{where}: there are no tests")
    return calls, outputs, scripts


def read_assertion(text, where):
    """
    An assertion as a test with one call: "assert add(1, 2) == 3" becomes
    {"fn": "add", "inputs": [[1, 2]], "outputs": [3]}. So the program is sent the arguments alone,
    as for any other test, and cannot look at what is expected.

    The call stands on one side of == or is, and a value on the other; `assert f(1)` wants True, and
    `assert not f(1)` False. Function, or class and method: f(1), Solution().f(1). Arguments and the
    value are literals of what JSON has, and tuples, which are lists here. Raises BadInput for any
    other, such as assert f(1) in (2, 3).
    """
    wanted = BadInput(f"{where}: cannot read the assertion {shorten(text)}; wanted one such as "
                      "\"assert add(1, 2) == 3\", a call with literals and the value that it has")
    try:
        (statement,) = ast.parse(text.strip()).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise wanted from None
    if not isinstance(statement, ast.Assert):
        raise wanted
    call, value = statement.test, ast.Constant(True)
    if isinstance(call, ast.UnaryOp) and isinstance(call.op, ast.Not):
        call, value = call.operand, ast.Constant(False)
    elif isinstance(call, ast.Compare):
        if len(call.ops) != 1 or not isinstance(call.ops[0], (ast.Eq, ast.Is)):
            raise wanted
        call, value = call.left, call.comparators[0]
        if isinstance(value, ast.Call):
            call, value = value, call
    try:
        name = re.sub(r"^(\w+)\(\)\.", r"\1.", ast.unparse(call.func))  # Solution().f
        inputs = [ast.literal_eval(argument) for argument in call.args]
        # a tuple becomes a list
        inputs, value = json.loads(json.dumps([inputs, ast.literal_eval(value)]))
    except (AttributeError, ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        raise wanted from None
    if call.keywords:
        raise wanted
    return {"fn": name, "inputs": [inputs], "outputs": [value]}


def judge(answer, want):
    """
    What became of a function call: "pass", "fail", "error" or "memory". answer: the line (bytes)
    that the process wrote for it: its result as JSON, or ! for an exception, or M for a
    MemoryError. want: the result that the test wants.
    """
    if answer in (b"!", b"M"):
        return "error" if answer == b"!" else "memory"
    try:
        got = json.loads(answer.decode(), object_pairs_hook=without_collisions)
        return "pass" if same(got, want) else "fail"
    except (ValueError, RecursionError):  # keys that collide, or the program wrote the line itself
        return "fail"


def without_collisions(pairs):
    """
    An object of JSON as a dict. Raises ValueError for a key that is there twice, as in the JSON of
    {1: "a", "1": "b"}: the keys of JSON are strings.
    """
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key is there twice")
    return dict(pairs)


def same(got, want):
    """
    Whether two JSON values are equal; want is the one that a test expects.

    Numbers are compared by value: 1 and 1.0 are equal. An int in want must be met exactly. A float
    in want must be met within 1e-6 relative, since data sets cut digits off, or within 1e-12
    absolute: so 0.1 + 0.2 - 0.3, which is 5.6e-17, passes for 0.0, and 5e-10 does not. A bool
    equals only a bool: True is not 1. NaN equals nothing. A tuple arrives as a list, and the keys
    of a dict as strings: json.dumps makes them so.
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
    """The lines of a text (bytes), without the blanks at their ends and blank lines at its end."""
    return [line.rstrip() for line in text.rstrip().split(b"\n")]

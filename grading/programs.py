"""
The reward `code`: the program in a completion, the tests in a row of the data, and the verdict on a
program. The programs run in grading/sandbox.py.
"""
import ast
import json
import math
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from errors import BadInput, shorten
from grading import sandbox
from grading.answers import behind_thoughts, need_field, whole_responses
from grading.marks import THOUGHTS


def code(batch):
    """
    A list of B scores: 1.0 where the program in the response passes all of the row's `tests`, else
    0.0, also if it passes some of them: wrong programs may pass some. extract_code finds the
    program in a response; if the thinking never ends, there is none.

    The programs run in the sandbox, several at a time. Together they have 4/5 of batch["seconds"],
    if it is there; the rest is for the other rules. batch["limits"]: the key code_seconds, if it is
    there. A program that has not ended then scores 0, and a printed line says so: no program may
    end the run.
    """
    programs = [extract_code(response) for response in whole_responses(batch)]  # text, or None
    runnable = {i: (program, row["tests"]) for i, (program, row) in enumerate(
        zip(programs, batch["rows"], strict=True)) if program is not None}
    seconds = 0.8 * batch.get("seconds", math.inf)
    verdicts = run_all(runnable.values(), sandbox.cpus_of_a_rank(), seconds=seconds,
                       **batch.get("limits", {}))
    late = sum(verdict.reason == "out of time" for verdict in verdicts)
    if late:
        print(f"reward 'code': {late} of {len(programs)} programs had not ended after "
              f"{seconds:.0f} s for all of them, and score 0; if right ones may be among them, "
              "raise reward_timeout", flush=True)
    passed = {i for i, verdict in zip(runnable, verdicts, strict=True) if verdict.reason == "pass"}
    return [float(i in passed) for i in range(len(programs))]


def check_code(rows, path):
    """Raise BadInput unless the sandbox works and the tests of all rows can be read."""
    need_field("tests", "code", rows, path)
    sandbox.check_sandbox()
    for number, row in enumerate(rows, 1):
        check_tests(row["tests"], f"{path}, row {number}")


code.check_rows = check_code  # rewards.py calls it


# --------------------------------------------------------------------------------------------------
# the program in a completion

PYTHON = re.compile(r"\{?\s*\.?i?py(?!con|tb|project)[\w.]*(?![\w-])|[\w./-]*\.py(?!\w)",
                    re.IGNORECASE)
MARKERS = re.compile(r"(?:\s|[-*+]\s|\d{1,9}[.)]\s)*")  # of lists
# thoughts; or a fenced block that is closed, with no fence in it, whose group `inside` is its text
THOUGHTS_OR_BLOCK = re.compile("|".join(
    f"{begin}(?s:.*?)(?:{end}|\\Z)" for begin, end in zip(
        THOUGHTS[::2], THOUGHTS[1::2], strict=True)) + r"""
    |(?<![`~])(?P<fence>`{3,}+|~{3,}+)[^\n`~]*\n
    (?P<inside>(?:(?![^\n]*?(?:```|~~~))[^\n]*\n)*+)[^\S\n]*(?P=fence)[`~]*[^\S\n]*(?=[\n<[◁]|\Z)
    """.replace("\n    ", ""))
HIDDEN = str.maketrans("<[◁H", "\udc00\udc01\udc02\udc03")  # how all marks begin; in no text
SHOWN = {other: letter for letter, other in HIDDEN.items()}


def extract_code(completion):
    """
    The program in a completion, as text; None if the completion's thinking never ends.

    The search begins behind the thoughts. If there is an <answer> there, only the last one is
    searched. The marks of both only count outside of blocks: a program may print them. The program
    is the first of these that exists: the last fenced block with a Python tag (python, py3, pypy3,
    {.python}, python:f.py, f.py); the last fenced block without a tag; the whole text. All its
    lines lose the indentation of the first line.
    """
    text = completion.replace("\r\n", "\n").replace("\r", "\n")
    text = behind_thoughts(THOUGHTS_OR_BLOCK.sub(without_marks, text))
    if text is None:
        return None
    text = re.findall("(?:<answer>|\\A)((?:(?!</?answer>).)*)", text, re.DOTALL)[-1]
    lines = text.strip("\n").split("\n")
    blocks = dict(fenced_blocks(lines))  # the last one of each tag
    lines = blocks.get("python", blocks.get("", lines))
    first = next(filter(str.strip, lines), "")
    indent = first[:len(first) - len(first.lstrip(" \t"))]
    program = "\n".join(line[len(os.path.commonprefix([indent, line])):] for line in lines)
    return program.translate(SHOWN)


def without_marks(found):
    """A match of THOUGHTS_OR_BLOCK, in whose block no mark is found."""
    if not found["inside"]:
        return found[0]
    begin, end = (at - found.start() for at in found.span("inside"))
    return found[0][:begin] + found["inside"].translate(HIDDEN) + found[0][end:]


def fenced_blocks(lines):
    """
    [(tag, lines of the block)] of a text's lines. A block begins with three or more backticks or
    tildes, behind markers of lists; with a Python tag or without a tag behind any text. The tags
    are "python", "" and others. It ends with a fence of at least as many and without a tag,
    indented by less than 4 columns more. Models forget this fence: so a fence with a tag begins a
    new block, and a block that is not closed ends with the text.
    """
    blocks, opened, margin = [], "", 0  # opened: the fence of the block that is open
    for line in lines:
        before, fence, tag = fence_in(line)
        if opened:
            fits = fence and not before.strip() and len(before) < margin + 4
            begins = fits and tag and (
                fence.startswith(opened) or tag == "python" != blocks[-1][0])
        else:
            begins = fence and (tag in ("python", "") or MARKERS.fullmatch(before))
        if begins:
            blocks.append((tag, []))
            opened, margin = fence, len(MARKERS.match(line)[0])
        elif opened and fits and not tag and fence.startswith(opened):
            opened = ""
        elif opened:
            blocks[-1][1].append(line)
    return blocks


def fence_in(line):
    """(the text before the fence in a line, the fence, its tag); without one: (line, "", "")."""
    before, tick, behind = line.rpartition("`")  # no tag has a backtick
    before = (before + tick).rstrip("`")
    fence, tag = line[len(before):len(line) - len(behind)], behind
    if len(fence) < 3:
        found = re.search("~{3,}", behind)
        if not found:
            return line, "", ""
        before, fence, tag = line[:found.start() - len(behind)], found[0], behind[found.end():]
    tag = tag.strip()
    return before, fence, "python" if PYTHON.match(tag) else tag


# --------------------------------------------------------------------------------------------------
# tests are data


def check_tests(tests, where):
    """
    The tests of a row -> calls, outputs and scripts.

    tests: an object or a list of objects, of two kinds. Of functions:
        {"fn": "add", "inputs": [[1, 2], [3, 4]], "outputs": [3, 7]}
        gives calls [("add", [1, 2]), ("add", [3, 4])] and outputs [3, 7]. It may also be an
        assertion (see read_assertion), and fn may be a method: Solution.add of a new Solution(),
        which add means, too, where a program has this class with it.
    Of whole programs:
        {"stdin": "1 2", "stdout": "3"}; both may also be lists of strings.
        It gives scripts [[b"1 2", b"3"]]. The line breaks of Windows become those of Linux.

    where: the file and the row, for the message. Raises BadInput for tests of another form.
    """
    calls, outputs, scripts = [], [], []
    for test in tests if isinstance(tests, list) else [tests]:
        try:
            fn, given, wanted = read_test(test)
        except Exception as e:  # a data set may hold anything
            raise BadInput(
                f"{where}: {shorten(test)} is no test. A test has fn (the name of a function, or "
                "CLASS.METHOD), inputs (a list of lists of arguments) and outputs, as many (JSON "
                "values, not NaN); or stdin and stdout, texts or as many of each; or is an "
                "assertion such as \"assert add(1, 2) == 3\"") from e
        if fn:
            calls += [(fn, arguments) for arguments in given]
            outputs += wanted
        else:
            scripts += [[text.replace("\r\n", "\n").encode("utf-8", "surrogatepass")
                         for text in pair] for pair in zip(given, wanted, strict=True)]
    if not calls and not scripts:
        raise BadInput(f"{where}: there are no tests")
    return calls, outputs, scripts


def read_test(test):
    """(fn, its inputs, outputs) of a test; of a whole program fn is None. It raises anything."""
    test = read_assertion(test) if isinstance(test, str) else test
    if test.keys() == {"stdin", "stdout"}:
        fn = None
        given, wanted = ([x] if isinstance(x, str) else x for x in (test["stdin"], test["stdout"]))
        good = all(isinstance(text, str) for text in [*given, *wanted])
    else:
        fn, given, wanted = (test[key] for key in ("fn", "inputs", "outputs"))
        good = len(test) == 3 and re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)?", fn) and all(
            isinstance(arguments, list) for arguments in given)
    if not good or not same([given, wanted], [given, wanted]) or not (  # NaN is not itself
            isinstance(given, list) and isinstance(wanted, list) and len(given) == len(wanted) > 0):
        raise ValueError
    return fn, given, wanted


def read_assertion(text):
    """
    An assertion, as in MBPP, -> a test with one call: "assert add(1, 2) == 3" becomes {"fn": "add",
    "inputs": [[1, 2]], "outputs": [3]}. So the program only gets the arguments.

    The call is on the left of == or is, and a value on the right; `assert f(1)` wants True, and
    `assert not f(1)` False. A call is f(1) or Solution().f(1). Arguments and value are literals of
    JSON's types, or tuples, which become lists. Of any other text, such as assert f(1) in (2, 3),
    it raises anything.
    """
    (statement,) = ast.parse(text.strip()).body
    call, value = statement.test, ast.Constant(True)
    if isinstance(call, ast.UnaryOp) and isinstance(call.op, ast.Not):
        call, value = call.operand, ast.Constant(False)
    if isinstance(call, ast.Compare):
        (value,), (compared,) = call.comparators, call.ops
        call = call.left if isinstance(compared, (ast.Eq, ast.Is)) else None
    name = re.sub(r"^(\w+)\(\)\.", r"\1.", ast.unparse(call.func))  # Solution().f
    inputs = [ast.literal_eval(argument) for argument in [*call.args, *call.keywords]]
    # a tuple becomes a list
    inputs, value = json.loads(json.dumps([inputs, ast.literal_eval(value)]))
    return {"fn": name, "inputs": [inputs], "outputs": [value]}


# --------------------------------------------------------------------------------------------------
# verdicts


class Verdict(NamedTuple):
    """The result of a program in its tests."""

    passed: int  # test cases answered right
    total: int  # test cases
    # "pass"; "out of time" if there was no time left for some cases; else the ending of the first
    # case that did not pass: fail, error, crash, killed, timeout, memory, output limit
    reason: str


def run_all(programs, workers, timeout=5, memory_mib=512, seconds=math.inf):
    """
    The Verdict of each of the programs [(code, tests)], in order, `workers` of them at a time.

    seconds: the wall-clock time of all together. A program that has not ended then is "out of
    time". Raises the exceptions of run_tests.
    """
    end = time.monotonic() + seconds
    # threads are enough, because they only wait
    pool = ThreadPoolExecutor(workers, initializer=sandbox.use_all_cpus)
    try:
        return list(pool.map(lambda program: run_tests(*program, timeout, memory_mib, end),
                             programs))
    finally:
        pool.shutdown(cancel_futures=True)  # after an exception: start no more programs


def run_tests(code, tests, timeout=5, memory_mib=512, end=math.inf):
    """
    Run a program against the tests of a row -> Verdict.

    code: the text that the model wrote as Python source.
    tests: see check_tests. All calls of functions share one process; each test with a stdin has a
        process of its own. After a process that was stopped at a limit, the others are not run.
    timeout: the CPU seconds of each process, rounded up. All of them together have WALL_FACTOR
        times as many seconds on the wall clock, without their starts.
    memory_mib, end: see sandbox.run_program.

    Raises BadInput for tests of another form and where bwrap is missing, Stop where the sandbox
    itself fails.
    """
    calls, outputs, scripts = check_tests(tests, "tests")
    # half a surrogate pair goes in as it is, and is a SyntaxError in the sandbox
    source = code.encode("utf-8", "surrogatepass")
    reasons, wall, ending = [], sandbox.WALL_FACTOR * timeout, None
    if calls:
        limit = 1024 * len(calls) + room_for(json.dumps(outputs).encode())
        written, ending, seconds = sandbox.run_program(source, calls, b"", limit, timeout,
                                                       memory_mib, wall, end)
        wall -= seconds
        answers = written.split(b"\n")[:-1]  # behind the last newline: nothing, or half an answer
        reasons += [judge(answer, want) for answer, want in zip(answers, outputs, strict=False)]
        # the calls without an answer; "crash" if the process left before the end, even with code 0
        reasons += [ending or "crash"] * (len(outputs) - len(reasons))
    for stdin, stdout in scripts:
        if ending in ("timeout", "out of time", "memory", "output limit"):
            break
        written, ending, seconds = sandbox.run_program(
            source, None, stdin, room_for(stdout), timeout, memory_mib, wall, end)
        wall -= seconds
        reasons.append(ending or ("pass" if same_output(written, stdout) else "fail"))
    total, failed = len(outputs) + len(scripts), [why for why in reasons if why != "pass"]
    reason = "out of time" if "out of time" in failed else (failed or ["pass"])[0]
    return Verdict(reasons.count("pass"), total, reason)


def room_for(wanted):
    """
    How many bytes of a program's output are read, where a test wants these. The output may be right
    and longer: for 0.3 a program may write 0.30000000000000004, and no float has over 24 letters.
    """
    return sandbox.OUTPUT_LIMIT + 2 * len(wanted) + 24 * len(re.findall(rb"\d+", wanted))


def judge(answer, want):
    """
    The ending of a function call: "pass", "fail", "error" or "memory". answer: the line (bytes)
    that the process wrote for it: its result as JSON, or ! for an exception, or M for a
    MemoryError. want: the result that the test wants.
    """
    if answer in (b"!", b"M"):
        return "error" if answer == b"!" else "memory"
    try:
        return "pass" if same(json.loads(answer.decode()), want) else "fail"
    except (ValueError, RecursionError):  # the program wrote the line itself
        return "fail"


def same(got, want):
    """
    Whether two JSON values are equal; want is the one that a test expects.

    Numbers are compared by value: 1 and 1.0 are equal. For an int in want, got must be equal. For a
    float in want, got may differ by 1e-6 relative, because data sets cut digits off, or by 1e-12
    absolute: so 0.1 + 0.2 - 0.3, which is 5.6e-17, passes for 0.0, and 5e-10 does not. A bool
    equals only a bool: True is not 1. NaN equals nothing. A tuple arrives as a list, and the keys
    of a dict as strings, because of JSON.
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


# a number of JSON; larger ones are compared as text
NUMBER = re.compile(rb"-?(?:0|[1-9][0-9]{0,99})(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,2})?")


def same_output(written, wanted):
    """
    Whether a program wrote (bytes) the output that a test wants: numbers as in `same`, all else
    byte for byte, except blanks at the ends of lines, and blank lines at the end.
    """
    # words, and the text between them: "1, [2.0]" -> "1", ", [", "2.0", "]", ""
    got, want = (re.split(rb"([\s\[\](){},;=]+)", b"\n".join(
        line.rstrip() for line in text.rstrip().split(b"\n"))) for text in (written, wanted))
    return len(got) == len(want) and all(
        x == y or NUMBER.fullmatch(x) and NUMBER.fullmatch(y) and judge(x, json.loads(y)) == "pass"
        for x, y in zip(got, want, strict=True))

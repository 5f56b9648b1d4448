"""
grading/programs.py: the program in a completion, a table of what models write, with the programs
taken out by hand; tests as data; when two results are the same. And the reward `code` in a run.
"""
import contextlib
import itertools
import json
import math
import time
from types import SimpleNamespace

import pytest
from errors import BadInput
from grading import expressions, programs
from grading.programs import check_tests, extract_code, judge, same, same_output
from options import tools
from rewards import reward_terms
from test_sandbox import assert_verdicts, needs_bwrap, returns
from tiny import assert_one_line, jsonl, keys_of, read_log, run, well

F = "def f(x):\n    return x + 1"  # the program of most completions below
DRAFT = "def f(x):\n    return x"
TICKS = 'def f(x):\n    """\n    ```python\n    f(1)  # 2\n    ```\n    """\n    return x + 1'
THREE = 's = """\n```\n"""'


def block(program=F, tag="python", fence="```"):
    return f"{fence}{tag}\n{program}\n{fence}"


CASES = [(f"So:\n{block(tag=tag)}\nIt prints\n{block('1', '')}\n", F) for tag in (
    "python", "py", "python3.11", "{.python .numberLines}", "python:solution.py", "src/my.py")]
CASES += [(f"{block('ls', tag)}\n{block(tag='')}\n{block('ls', tag)}", F)
          for tag in ("bash", "pycon")]
CASES += [
    (block(THREE, fence="````"), THREE),
    (f"```python\n{F}\n   ```\nthat is it", F),  # closed three columns deeper
    (f"So:\n{block()}\nthat is it\n".replace("\n", "\r\n"), F),
    (f"This does it: ```python\n{F}\n```\nthat is it", F),
    (f"```x``` and ``` fences:\n```python\n{F}\n```\nuse ```f``` here", F),
    ("   ```python\n   s = '''\na\n'''\n   t = 1\n   ```", "s = '''\na\n'''\nt = 1"),
    (f"{block(TICKS)}\nthat is it", TICKS),
    (block(f"So:\n{block()}\n", "markdown", "````"), F),  # in a longer one
    (f"{block(DRAFT)}\nNo:\n{block()}\n", F),
    (f"{block(DRAFT)}\nNo:\n```python\n{F}", F),  # cut off
    (f"```python\n{DRAFT}\n\nNo:\n{block()}\n", F),  # not closed before the next
    (f"{block(DRAFT)}\n<answer>\n{F}\n</answer>\nthat is it", F), (F, F), ("", "")]


HARMONY = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>"
TALKS = "print('<think>' + input())\nprint('</think><answer>', '[/THINK]')\nx = '<response>'"
MARKED = "s = \"\"\"\n<think>\n</answer>\n<|end|>\n\"\"\""
# marks in a block are text; outside of blocks they count, also on the lines of its fences
CASES += [(text, program) for program in (F, TALKS, MARKED) for text in (
    block(program), f"So:\n{block(program)}\nthat is it", block(program, fence="~~~"),
    block(program, ""), f"10. ```python\n{program}\n```\n11. that is it",
    f"<think>a</think>{block(program)}", f"[THINK]\n{block(DRAFT)}\n[/THINK]{block(program)}",
    HARMONY.format(block(DRAFT)) + block(program) + "<|end|>",
    f"<answer>{block(program)}</answer>", f"<response>\n{block(program)}\n</response>",
    f"<think>```python\n</think>\n{block(program)}", f"{block(program, 'cpp')}\n{block(program)}",
    f"{block(program)}<|END_RESPONSE|>\nthat is it", f"```\n{DRAFT}\n{block(program)}",
    f"{block(DRAFT)}\n<answer>{block(DRAFT)}</answer> no <answer>\n{block(program)}</answer>")]
CASES += [(text, F) for text in (
    f"{block(TALKS)}\n</think>\n{block()}", f"<answer>```python\n{F}\n</answer>",
    f"{block(DRAFT)}</think>{block()}", f"```\nnotes\n<answer>\n{F}\n</answer>")]
ENDLESS = [f"{block()}\n<think>{block(DRAFT)}", f"{block()}[THINK] or", f"{block()}<think>\n```\n"]


def test_the_program_is_found():
    for completion, program in CASES:
        assert extract_code(completion) == program, completion
        # a thought does not count, and if it never ends, nothing does
        assert extract_code(f"<think>\n{block(DRAFT)}\n```python\n</think>{completion}") == program
        assert extract_code(f"<think>\n{completion}".replace("</think>", "")) is None
    assert [extract_code(text) for text in ENDLESS] == [None] * len(ENDLESS)
    assert extract_code("```cpp\nint x;\n```") == "```cpp\nint x;\n```"  # the whole text, then


TOOLS = SimpleNamespace(types=dict(f=dict(a={}, b={})))


def reward(name):
    _, _, rule = reward_terms(name)[0]
    return lambda text: rule(dict(rows=[dict(answer="1")], completions=[text]))


READERS = dict(  # what reads a policy's text, and how such texts begin
    code=(extract_code, "", "```python\n", "<think>", "<answer>"),
    accuracy=(reward("accuracy"), "", "1", "\\boxed{", "<answer>", "<|channel|>"),
    format=(reward("format"), "", "<think></think><answer>"),
    math=(lambda text: json.dumps(expressions.verdict(text, "5")), "", "5 "),
    printed=(lambda text: same_output(text.encode(), text[:-1].encode()), "", "1."),
    returned=(lambda text: judge(text.encode(), 1), "", "1", '"'),
    calls=(lambda text: [tools.Tools.parsed(TOOLS, call) for call in tools.written_in(text)], "",
           "<tool_call>{", "<tool_call>\n<function=f>\n",
           "<tool_call><function=f><parameter=a></parameter>"),
    header=(lambda text: tools.Tools.calls_in(SimpleNamespace(harmony=True, types={}), text), ""),
    begun=(tools.BEGUN.search, "", "<think>", "<|channel|>"))
# letters that these look for, what they look for, and what is nearly that
PIECES = [*"`~ #1.,;e-+/$\\\"{}[]()<>|=xoH\r\n\t", *"""
    ``` ~~~ ~~~` ```x x``` ```python python 1. <think> </think> <answer> </answer> [THINK] [/THINK]
    <| <|channel|> <|channel|>final <|channel|>analysis <|end|> <|end|><|start|> <tool_call>
    </tool_call> <tool_call>{ <tool_call><function= <function=f> <parameter=a> </parameter>
    <parameter=b> \\boxed{ \\boxed \\begin{a} \\end{a} #### {,} 1,000 1/ to= ◁ Here """.split(),
    "``` ", "```\n", "- ```\n", "x```\n", " " * 9999 + "\n", "Here is my", "```\n</think>\n~~~\n",
    "~```\n<answer>\nx",
    "\ud800", "\x00", "\\frac{1}{", "\\text{", "metres ", "a/b "]


@pytest.mark.parametrize("name", READERS)
def test_no_text_takes_long(name):
    """
    Of 10,000 letters: by quadratic steps seconds, by cubic ones hours. CPU time: others work. The
    end fits nothing, so that a pattern tries all that it can.
    """
    slow, (read, *beginnings) = {}, READERS[name]
    for begin, piece in itertools.product(beginnings, PIECES):
        start = time.thread_time()
        with contextlib.suppress(ValueError):
            read(begin + piece * (10_000 // len(piece)) + "`?")
        if time.thread_time() - start > 0.5:
            slow[begin, piece] = time.thread_time() - start
    assert not slow


MALFORMED = [
    [], None, {"fn": "f"}, {"fn": "f", "inputs": [[1]], "outputs": [1, 2]},
    {"fn": "f", "inputs": [1], "outputs": [1]}, {"fn": "f()\nx", "inputs": [[]], "outputs": [1]},
    returns(math.nan), returns({1, 2}), {"stdin": "1", "stdout": ["1", "2"]},
    {"stdin": [1], "stdout": ["1"]}, "assert f(1) in (2, 3)", "assert f(1) == g(1)",
    "assert f(1) == 1; import os", "assert f(*[1]) == 2", "assert f(x=1) == 2",
    "assert " + "(" * 500 + "f(1)" + ")" * 500, "f(1)"]
ASSERTIONS = [
    ("assert add(1, 2) == 3", ("add", [1, 2], 3)),
    ("  assert f((1, [2, 'x']), -1.5) == [1, (2, 3)]\n", ("f", [[1, [2, "x"]], -1.5], [1, [2, 3]])),
    ("assert is_odd(3), 'three is odd'", ("is_odd", [3], True)),
    ("assert not is_odd(4)", ("is_odd", [4], False)), ("assert f() is None", ("f", [], None)),
    ("assert f({'a': 1}) == {'b': None}", ("f", [{"a": 1}], {"b": None})),
    ("assert Solution().twoSum([2, 7], 9) == [0, 1]", ("Solution.twoSum", [[2, 7], 9], [0, 1]))]


def test_an_assertion_is_a_call_and_its_value_and_other_tests_are_refused():
    for text, want in ASSERTIONS:
        assert check_tests([text], "row") == ([(want[0], want[1])], [want[2]], []), text
    for tests in MALFORMED:
        with pytest.raises(BadInput, match="^data.jsonl, line 7: ") as e:
            check_tests(tests, "data.jsonl, line 7")
        assert "\n" not in str(e.value)
    windows = {"stdin": "a\r\nb\r\n", "stdout": "1\r\n"}  # input() would end with \r
    assert check_tests(windows, "row") == ([], [], [[b"a\nb\n", b"1\n"]])


SAME = [(1, 1.0), (0.1 + 0.2, 0.3), (1e-13, 0.0), (3, 3.0000001), (10**400, 10**400),
        (math.inf, math.inf), ([1, [2]], [1, [2]]), ({"a": 1, "b": 2}, {"b": 2, "a": 1.0}),
        (None, None)]
OTHER = [(1, 2), (True, 1), (0, False), (None, 0), ("1", 1), (1.000002, 1.0), (3.0000001, 3),
         (10**400, 1.5), (10**18 + 1, 10**18), (math.nan, math.nan), (1e308, math.inf),
         ([1, 2], [2, 1]), ([1], [1, 2]), ({}, []), ({"a": [True]}, {"a": [1]}), ({}, {"a": 1})]
PRINTED = """
0.333333 == 0.333333333333|2.0 == 2|2 == 2.0|1e-05 == 0.00001|-0.0 == 0|0.1 == 1e-1|a=0.5 == a=0.50
[0.30000000000000004, 1] == [0.3, 1.0]|Result: 3.14159265 == Result: 3.1415926536|1.5 x  == 1.5 x
1,234.50 == 1,234.5|nan == nan|inf == inf|5e2 ab == 500.0 ab
0.3333 != 0.333333333333|2.0001 != 2|3.0000001 != 3|Yes != yes|True != 1|007 != 7|+5 != 5|.5 != 0.5
1e99 != 1e98|1e999 != 1e998|inf != 1e999|1.2.3 != 1.2.30|v1.0 != v1|x1 != x1.0|50.0% != 50%
12.0:30 != 12:30|2024.0-01 != 2024-01|1 2 != 1  2|1 2 3 != 1 2|0.1 0.2 != 0.2 0.1|1 2 != 12|1 != 1,
"""


def test_results_are_compared_by_value_and_printed_ones_as_numbers_and_words():
    for got, want, equal in [(*pair, True) for pair in SAME] + [(*pair, False) for pair in OTHER]:
        assert same(got, want) is same([got], [want]) is same({"a": got}, {"a": want}) is equal
        assert judge(json.dumps(got).encode(), want) == ("pass" if equal else "fail")
    for pair in PRINTED.strip().replace("\n", "|").split("|"):
        got, sign, want = pair.partition(" == " if " == " in pair else " != ")
        assert same_output(got.encode() + b"\n", want.encode()) is (sign == " == "), pair
    nines = b"9" * 5000
    assert same_output(nines, nines) and not same_output(nines, nines[:-1] + b"8")
    assert same_output(b"1.0 \n2\n\n", b"1\n2.0") and not same_output(b"1\n2", b"1 2")


# the reward `code`

@needs_bwrap
def test_the_reward_ends_in_time(capsys):
    """It says how many had no time; and the limit of the key code_seconds holds."""
    rows = [{"tests": dict(stdin="", stdout="1")}] * 5
    completions = ["print(1)"] + ["```python\nimport time\nprint(1)\ntime.sleep(99)\n```"] * 4
    # the right one has 4 s, the others share them
    assert programs.code(dict(completions=completions, rows=rows, seconds=5)) == [1, 0, 0, 0, 0]
    assert "4 of 5" in capsys.readouterr().out
    texts = ["print(1)", "print(2)", "<think>print(1)", "print(1"]
    assert programs.code(dict(completions=texts, rows=rows[:4])) == [1, 0, 0, 0]
    assert capsys.readouterr().out == ""
    spin = "import time\nwhile time.process_time() < 1.3: pass\nprint(1)"
    assert programs.code(dict(completions=[spin], rows=rows[:1], limits=dict(timeout=1))) == [0]


# the form of LeetCode: its judge imports much of the standard library
BODIES = [  # the method's arguments, its body; given [3, 1, 2] each gives 6
    ("a: List[int], b: Optional[Dict[str, Tuple[int, ...]]] = None", "return sum(a)"),
    ("a: Counter[int]", "d = defaultdict(int)\nfor x in a: d[0] += x\nreturn d[0]"),
    ("a", "heapq.heapify(a)\nreturn heappop(a) + 5 if max(a) < inf else ceil(sqrt(35))"),
    ("a", "@cache\ndef f(n): return n and n + f(n - 1)\nreturn f(max(a)) * lru_cache(int)(1)"),
    ("a", "random.shuffle(a)\nreturn (datetime.date(2024, 3, 2) - date(2024, 2, 25)).days"),
    ("a", "return pow(3, 2, 10) - pow(1, 5) - len(a) + 1 if open else 0"),  # the built-in pow
    ("a", "def f(n): return n and 1 + f(n - 1)\nreturn f(9000) // 1500")]
SOURCES = ["class Solution:\n    def f(self, {}):\n        {}\n".format(
    arguments, body.replace("\n", "\n        ")) for arguments, body in BODIES]
SOURCES += ["def max(*_): return 6\nclass Solution:\n    def f(self, a): return max(a)"]


@needs_bwrap
def test_what_the_judge_of_leetcode_imports():
    tests = [{"fn": "Solution.f", "inputs": [[[3, 1, 2]]], "outputs": [6]},
             "assert Solution().f([3, 2, 1]) == 6"]
    plain = returns(6, [3, 1, 2])  # as in APPS, without the class
    assert_verdicts([(source, tests, "pass") for source in SOURCES] + [
        (SOURCES[1], plain, "pass"),
        (SOURCES[1].replace("Solution", "Codec"), plain | {"fn": "Codec.f"}, "pass"),
        # a plain function gets no imports, and the method is called where there are both
        ("def f(a): return sum(Counter(a))", plain, "error"),
        (f"{SOURCES[0]}\ndef f(a): return 5", plain, "pass")])


ADD = "def add(self, a, b): return a + b + len(deque())"
STARS = "from math import *\nfrom operator import *\nfrom statistics import *\n"
NOTHING = [  # programs that define none of the functions of the tests
    "", "# class Solution", "'class Solution'", "class Solution: pass",
    "import math, operator, statistics, builtins",
    "class Solution:\n    import math", "def f():\n    from math import gcd\n    add = max",
    f"class A:\n    {ADD}\n    gcd = median = sorted = add"]
LIBRARY = [("add", [1, 2], 3), ("gcd", [4, 6], 2), ("median", [[1, 2, 3]], 2), ("sorted", [[]], [])]
OWN = [  # programs whose add is their own
    "add = lambda a, b: a + b", "from operator import sub, add",
    "from operator import concat as f, add as add", "import operator\nadd = operator.add",
    f"{STARS}def add(a, b): return a + b",
    "try: from nowhere import add\nexcept ImportError:\n    def add(a, b): return a + b",
    f"{STARS}class Solution:\n    {ADD}",
    f"from operator import sub as add\nclass Solution:\n    {ADD}",  # the method is its own
    f"class A:\n    {ADD}\nclass Solution(A): pass"]
METHODS = "search", "merge", "add", "copy", "pow"


@needs_bwrap
def test_only_what_the_program_defines_is_called():
    """No name of the judge's imports or of Python's own is an answer."""
    add = returns(3, 1, 2) | {"fn": "add"}
    assert_verdicts([(source, returns(value, *given) | {"fn": name}, "error")
                     for source in NOTHING for name, given, value in LIBRARY] + [
        (source, add, "pass") for source in OWN] + [
        (f"class Solution:\n    def {name}(self, x): return x + ceil(0.5)",
         returns(2, 1) | {"fn": name}, "pass") for name in METHODS])


MINE = """
def seconds(batch):  # code came first, and has used some
    assert 0 < batch['seconds'] < 20 and batch['limits'] == dict(timeout=2)
    return [0.0] * len(batch['rows'])
"""


@needs_bwrap
def test_grpo_runs_on_verdicts_and_not_without_bwrap(world, tmp_path, monkeypatch):
    """Any text but an error prints nothing, and so passes."""
    (tmp_path / "mine.py").write_text(MINE)
    tests = dict(stdin="", stdout="")
    path = jsonl(tmp_path / "rows.jsonl", [dict(prompt=p, tests=tests) for p in ("a", "#", "1")])
    keys = keys_of(world, "grpo.py", prompts_path=path, eval_path="", reward_timeout=20,
                   max_iters=1, code_seconds=2, reward_functions=f"code,{tmp_path}/mine.py:seconds")
    log = read_log(well("grpo.py", tmp_path, keys))
    assert 0 <= log[0]["objective/reward/code"] <= 1
    monkeypatch.setenv("PATH", str(tmp_path))
    assert_one_line(run("grpo.py", tmp_path / "bare", keys), "grpo.py", "apt install bubblewrap")

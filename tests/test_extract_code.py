"""
Where a completion has its program: a table of what models write, the programs in it taken out by
hand; and the reward `code` on some of it, through the sandbox.
"""
import ast
import math
import time

import pytest

from engine.programs import extract_code, judge, same
from rewards import code


F = "def f(x):\n    return x + 1"  # the program of most completions below
DRAFT = "def f(x):\n    return x"
TICKS = 'def f(x):\n    """\n    ```python\n    f(1)  # 2\n    ```\n    """\n    return x + 1'
TABS = TICKS.replace("    ", "\t")
EXAMPLE = 'def f(x):\n    """So: ```\n    f(1)\n    ```\n    """\n    return x + 1'
LINE = 'def f(x):\n    """So: ```python\n    f(1)"""\n    return x + 1'
MARGIN = '"""\n```python\nf(1)\n```\n"""\nx = 1'
THREE = 's = """\n```\n"""'
NARROW = "def f(x):\n  return x + 1"
STRING = 'def f(x):\n    s = """\n<answer>1</answer>\n<think>\n"""\n    return x + 1'
TESTS = {"fn": "f", "inputs": [[1], [5]], "outputs": [2, 6]}


def shifted(by, program=F):
    return "\n".join(by + line for line in program.split("\n"))


def block(program=F, tag="python", fence="```"):
    return f"{fence}{tag}\n{program}\n{fence}"

TAGS = ["python", "py", "python3", "python3.11", "py3", "python2", "Python", "PYTHON", " python",
        "ipython3", "{python}", "{.python}", "{.python .numberLines}", "{python, echo=TRUE}",
        "python:solution.py", "python,linenos", "python{1,3}", 'python title="a.py"', "python \t",
        "python3 solution.py", "Python 3", "solution.py", "src/my-main.py", "python="]
OTHERS = ["bash", "text", "output", "json", "cpp", "pycon", "python-repl", "pytb", "cython",
          "pyproject", "plain python", "module.pyx"]

CASES = {f"tag {tag}": (f"So:\n{block(tag=tag)}\nIt prints\n{block('1', '')}\n", F) for tag in TAGS}
CASES |= {f"no program: {tag}": (f"{block()}\n\n{block('ls', tag)}\n", F) for tag in OTHERS}
CASES |= {f"no program, and no tag: {tag}":
          (f"{block('ls', tag)}\n{block(tag='')}\n{block('ls', tag)}", F) for tag in OTHERS}
CASES |= {
    # fences
    "no tag": (block(tag=""), F),
    "four backticks": (block(fence="````"), F),
    "nine backticks": (block(fence="`" * 9), F),
    "tildes": (block(fence="~~~"), F),
    "tildes, no tag": (block(tag="", fence="~~~~"), F),
    "tildes, backticks in the tag": (f"~~~python `x`\n{F}\n~~~", F),
    "closed by more": (f"```python\n{F}\n`````\nthat is it", F),
    "four are not closed by three": (block(THREE, fence="````"), THREE),
    "tildes are not closed by backticks": (block(THREE, fence="~~~"), THREE),
    "backticks are not closed by tildes": (block(THREE.replace("`", "~")), THREE.replace("`", "~")),
    "blanks behind the fences": (f"```python  \n{F}\n```  \t\nthat is it", F),
    "CRLF": (f"So:\n{block()}\nthat is it\n".replace("\n", "\r\n"), F),
    "CR": (f"So:\n{block()}\nthat is it\n".replace("\n", "\r"), F),
    "other line separators are text": (block("s = '\x0b\x0c\x1c\u2028\x85'"),
                                       "s = '\x0b\x0c\x1c\u2028\x85'"),
    "empty": ("```python\n```", ""),
    "blank lines": ("```python\n\nx = 1\n\n\ny = 2\n\n```", "\nx = 1\n\n\ny = 2\n"),
    # what stands before a fence
    "text before": (f"Here you are: {block()}\nthat is it", F),
    "text before, no tag": (f"**Code:** {block(tag='')}\nthat is it", F),
    "code in the text before": (f"Call `f`: {block()}", F),
    "a dash before": (f"- ```python\n{shifted('  ')}\n  ```\n- that is it", F),
    "a dash before, the rest at the margin": (f"- {block()}\n- that is it", F),
    "a number before": (f"1. ```python\n{shifted('   ')}\n   ```\n2. that is it", F),
    "a long number before": (f"10. ```python\n{shifted('    ')}\n    ```\n11. that is it", F),
    "a list in a list": (f"* 1) ```py\n{shifted('     ')}\n     ```\nthat is it", F),
    "a dash before another language":
        (f"- ```bash\n  ls\n  ```\n- ```\n{shifted('  ')}\n  ```", F),
    "a number before another language":
        (f"1. ```bash\n   ls\n   ```\n2. ```\n{shifted('   ')}\n   ```", F),
    "an answer before another language": (f"<answer>```bash\nls\n```\n{block(tag='')}</answer>", F),
    "another language after": (f"- {block()}\n- ```text\n  2\n  ```", F),
    "inline code is no fence": (f"```x``` and\n```python\n{F}\n```\nuse ```f``` here", F),
    "inline code at the margin": (f"```x``` it is:\n{block(tag='')}\nthat is it", F),
    "inline code, nothing else": ("f = '```x```'", "f = '```x```'"),
    "a word about fences": (f"I put it into ``` fences:\n{block()}\n", F),
    "a word about fences, no tag": (f"I put it into ``` fences:\n{block(tag='')}\n", F),
    "a word about tildes": (f"It is about ~~~\n{block(tag='')}\n", F),
    "a word about python fences": (f"In a ```python block, then:\n{block()}\n", F),
    # quotes
    "quoted": (shifted("> ", f"So:\n{block()}\nthat is it"), F),
    "quoted, no blank": (shifted(">", block()), F.replace("    ", "   ")),
    "quoted twice": (shifted("> > ", block()), F),
    "quoted once, a doctest":
        ("> ```python\n> '''\n> >>> f(1)\n> '''\n> ```", "'''\n>>> f(1)\n'''"),
    "quoted, a list": (f"> - ```python\n{shifted('>   ')}\n>   ```", F),
    "only the fence is quoted": (f"> {block()}\nthat is it", F),
    "not quoted": ("```python\nx = (1\n> 0)\n```", "x = (1\n> 0)"),
    # indentation
    "one blank": (shifted(" ", block()) + "\nthat is it", F),
    "four blanks": (shifted("    ", block()) + "\nthat is it", F),
    "twelve blanks": (shifted(" " * 12, block()) + "\nthat is it", F),
    "a tab": (shifted("\t", block("if 1:\n\tx = 1")), "if 1:\n\tx = 1"),
    "two tabs": (shifted("\t\t", block()), F),
    "a tab and a blank": (shifted("\t ", block()), F),
    "only the fence is indented": (f"  ```python\n{NARROW}\n  ```", NARROW),
    "only the fences are indented": (f"        ```python\n{F}\n        ```\nthat is it", F),
    "only the program is indented": (block(shifted("    ")), F),
    "the closing fence is indented": (f"```python\n{F}\n   ```\nthat is it", F),
    "the first fence is indented": (f"   ```python\n{shifted('   ')}\n```\nthat is it", F),
    "a string at the margin":
        ("   ```python\n   s = '''\na\n'''\n   t = 1\n   ```", "s = '''\na\n'''\nt = 1"),
    "a blank line in an indented block":
        ("  ```python\n  if 1:\n\n      x = 1\n  ```", "if 1:\n\n    x = 1"),
    # fences inside the program
    "a fence in a docstring": (f"{block(TICKS)}\nthat is it", TICKS),
    "a fence in a docstring, indented": (shifted("   ", block(TICKS)) + "\nthat is it", TICKS),
    "a fence in a docstring, tabs": (block(TABS) + "\nthat is it", TABS),
    "a fence in a docstring, list":
        (f"10. ```python\n{shifted('    ', TICKS)}\n    ```\nthat is it", TICKS),
    "a fence in a docstring, behind text": (f"{block(EXAMPLE)}\nthat is it", EXAMPLE),
    "a fence in a line": (block("s = '```python'\nt = '```'"), "s = '```python'\nt = '```'"),
    "a fence in a comment": (block("s = 1  # ```\n# ```\nt = 2"), "s = 1  # ```\n# ```\nt = 2"),
    "fences at the margin in four": (block(MARGIN, fence="````"), MARGIN),
    "fences at the margin in tildes": (block(MARGIN, fence="~~~"), MARGIN),
    "a block in a longer one": (block(f"So:\n{block()}\n", "markdown", "````"), F),
    "a block in one without a tag": (block(f"{block()}\n", "", "````"), F),
    "blocks in a longer one, no program":
        (f"{block(block('ls', 'bash'), 'text', '````')}\n{block(tag='')}\nthat is it", F),
    "a block in tildes": (block(f"So:\n{block()}\n", "text", "~~~"), F),
    # several
    "the last of two": (f"{block(DRAFT)}\nNo:\n{block()}\n", F),
    "the last of two without a tag": (f"{block(DRAFT, '')}\nNo:\n{block(tag='')}\n", F),
    "a tag before none": (f"{block()}\nIt prints\n{block('1', '')}\n", F),
    # blocks that are not closed
    "cut off": (f"So:\n```python\n{F}", F),
    "cut off, no tag": (f"So:\n```\n{F}", F),
    "cut off, a fence in a docstring": (f"```python\n{TICKS}", TICKS),
    "cut off, a fence with a tag in a docstring": (f"```python\n{LINE}", LINE),
    "cut off, the second": (f"{block(DRAFT)}\nNo:\n```python\n{F}", F),
    "not closed before the next": (f"```python\n{DRAFT}\n\nNo:\n{block()}\n", F),
    "not closed before another language": (f"```python\n{F}\n```text\n2\n```", F),
    "closed on the last line": (f"```python\n{F}```", F),
    "closed on the last line, with text": (f"```python\n{F}```\n\nThat is it.", F),
    "closed on the last line, one more": (f"```python\n{F}```\n\nThat is it. ```", F),
    "closed on the last line, another": (f"```python\n{F}```\n\nThat prints\n```text\n2\n```", F),
    # answers
    "a fence in an answer": (f"<answer>\n{block()}\n</answer>", F),
    "a fence right in an answer": (f"<answer>{block()}</answer>", F),
    "a fence right in an answer, no tag":
        (f"<answer>{block(tag='')}</answer>\nthat is it\n{block(DRAFT)}", F),
    "a bare answer": (f"So:\n<answer>\n{F}\n</answer>\nthat is it", f"\n{F}\n"),
    "a bare answer, a line": ("So: <answer> f = abs </answer>.", "f = abs "),
    "a bare answer, indented": (f"<answer>\n{shifted('  ')}\n</answer>", f"\n{F}\n"),
    "a bare answer after a draft": (f"{block(DRAFT)}\n<answer>\n{F}\n</answer>", f"\n{F}\n"),
    "a bare answer before an example": (f"<answer>\n{F}\n</answer>\n{block('f(1)')}", f"\n{F}\n"),
    "a bare answer after thinking": (f"<think>{block(DRAFT)}</think><answer>{F}</answer>", F),
    "a fence in an answer after a draft":
        (f"{block(DRAFT)}\n<answer>\n{block(tag='')}\n</answer>", F),
    "the last answer": (f"<answer>{block(DRAFT)}</answer> No, `y`:\n<answer>{block()}</answer>", F),
    "an answer cut off": (f"<answer>\n{block()}", F),
    "an answer cut off, bare": (f"{block(DRAFT)}\n<answer>\n{F}", f"\n{F}"),
    "an answer, its block cut off": (f"<answer>\n```python\n{F}\n</answer>", F + "\n"),
    "an answer, its block cut off right there": (f"<answer>```python\n{F}</answer>\nthat is it", F),
    "an answer, closed on the last line": (f"<answer>```python\n{F}```</answer>\nthat is it", F),
    "tags in a program": (block(STRING), STRING),
    "tags in a program in an answer": (f"<answer>\n{block(STRING)}\n</answer>", STRING),
    "quoted tags in a program": ("f = '<answer>1</answer>'", "f = '<answer>1</answer>'"),
    "half an answer": (f"{block()}\n</answer>", F),
    # thinking
    "after thinking": (f"<think>{block(DRAFT)}</think>\n{block()}", F),
    "right after thinking": (f"<think>{block(DRAFT)}</think>{block()}", F),
    "after a draft that is not closed":
        (f"<think>\n```python\n{DRAFT}\n</think>\n{block(tag='')}", F),
    "after thinking, bare": (f"<think>{block(DRAFT)}</think>\n{F}", f"\n{F}"),
    "after thinking twice": (f"<think>a</think>{block(DRAFT)}<think>b</think>{block()}", F),
    # no fence at all
    "bare": (F, F),
    "bare, a blank before": (" f = abs", "f = abs"),
    "nothing": ("", ""),
}
RUN = ["tag python3.11", "tag {.python}", "four backticks", "tildes", "CRLF", "a dash before",
       "quoted", "two tabs", "a fence in a docstring", "closed on the last line", "a bare answer",
       "tags in a program"]


@pytest.mark.parametrize("name", CASES)
def test_the_program_is_found(name):
    completion, program = CASES[name]
    assert extract_code(completion) == program
    ast.parse(extract_code(completion))


@pytest.mark.parametrize("name", CASES)
def test_what_is_thought_does_not_count(name):
    """Behind thinking that is full of drafts the program is the same; if it never ends, none."""
    completion, program = CASES[name]
    assert extract_code(f"<think>\n{block(DRAFT)}\n```python\n</think>{completion}") == program
    assert extract_code(f"<think>\n{completion}".replace("</think>", "")) is None


def test_no_program_where_other_languages_are():
    """The whole text, then, which is no program."""
    for text in ("```cpp\nint x;\n```", "So:\n```bash\nls\n```\n", "```pycon\n>>> 1\n1\n```"):
        assert extract_code(text) == text


def test_thinking_that_never_ends():
    for text in (f"<think>\n{block()}", f"<think>{block()}\nhm", f"{block()}<think>",
                 f"<think>a</think>\n{block()}\n<think>{block()}",
                 f"<think>\n<answer>{block()}</answer>", f"<think>{F}", "<think>"):
        assert extract_code(text) is None

LONG = {  # a megabyte of one thing, half of one of others
    "backticks": "`" * 10**6, "tildes": "~" * 10**6, "fences in a line": "``` " * 125000,
    "fences": "```\n" * 125000, "python fences": "```python\n" * 50000,
    "fences of both kinds": "```~~~" * 80000, "all quoted": "> ```\n" * 80000,
    "indented fences": (" " * 1000 + "```\n") * 500,
    "longer fences": "".join("`" * n + "x\n" for n in range(1000)),
    "a long tag": "```python" + " " * 10**6, "a long tag of dots": "```" + "a." * 500000,
    "a long tag of digits": "```python" + "1." * 250000 + "x", "tabs": "```python\n" + "\t" * 10**6,
    "blanks": "```python\n" + (" " * 1000 + "\n") * 500 + " " * 1000 + "x",
    "more and more": "```python\n" + "".join(" " * n + "x\n" for n in range(1000)),
    "less and less": "```python\n" + "".join(" " * (1000 - n) + "x\n" for n in range(1000)),
    "lines": "\n" * 500000, "lines in a block": "```python" + "\n" * 500000, "CR": "\r" * 500000,
    "quotes": ">" * 10**6, "quotes and a fence": "> " * 250000 + "```python\n" + "> " * 250000,
    "quotes and lines": ">" * 700 + "```python\n" + (">" * 700 + "\n") * 700,
    "numbers": "1. " * 160000 + "```bash", "thoughts": "<think>" * 70000,
    "ends of thoughts": "</think>" * 60000, "answers": "<answer>" * 60000,
    "answers in lines": "<answer>\n" * 55000, "empty answers": "<answer></answer>" * 30000,
    "ends of answers": "</answer>" * 60000,
    "answered lines": "```python\n" + "x</answer>\n" * 45000,
    "closed lines": "```python\n" + "x```\n" * 100000,
}


@pytest.mark.parametrize("name", LONG)
def test_it_takes_no_time(name):
    """A second if every step is linear, minutes if one is quadratic. CPU time: others work here."""
    assert 450000 < len(LONG[name]) < 1100000
    start = time.process_time()
    extract_code(LONG[name])
    assert time.process_time() - start < 5


# the reward


def rewarded(completions, tests=TESTS, **more):
    rows = [{"tests": tests}] * len(completions)
    return code(dict(completions=completions, rows=rows, **more)).tolist()


@pytest.mark.needs_bwrap
def test_what_models_write_is_run():
    completions = [CASES[name][0] for name in RUN]
    assert rewarded(completions) == [1.0] * len(RUN)
    assert rewarded([text.replace("x + 1", "x - 1") for text in completions]) == [0.0] * len(RUN)


@pytest.mark.needs_bwrap
def test_drafts_in_thinking_are_not_paid_for():
    """Whether the model opens the thinking or the prompt does; and the others keep their order."""
    draft = f"Let me see.\n{block()}\n"
    done = f"{draft}</think>\n{block()}\n"
    opened = ["<think>" + draft, "<think>" + done]
    assert rewarded([draft, opened[0], draft, opened[1], opened[0]]) == [1, 0, 1, 1, 0]
    assert rewarded([draft, done, draft], prompts=["f?\n<think>\n", "f?<think>", "f?"]) == [0, 1, 1]
    rows = [{"tests": TESTS, "prompt": prompt} for prompt in ("f?<think>\n", "f?")]
    assert code(dict(completions=[draft, draft], rows=rows)).tolist() == [0, 1]
    nothing = {"stdin": "", "stdout": ""}  # an empty program passes this; no program does not
    assert rewarded(["<think>", "<think>x</think>```python\n```", "<think>"], nothing) == [0, 1, 0]


# results


@pytest.mark.parametrize("got, want, equal", [
    (0.0, 5e-10, False), (5e-10, 0.0, False), (0, 5e-10, False), (5e-10, 0, False),
    (0.1 + 0.2 - 0.3, 0.0, True), (0.0, 0.1 + 0.2 - 0.3, True), (100.1 + 200.2 - 300.3, 0.0, True),
    (math.sin(math.pi), 0.0, True), (-0.0, 0.0, True), (1e-12, 0.0, True), (2e-12, 0.0, False),
    (-1e-12, 1e-12, False), (5e-10, 5.000001e-10, True), (5e-10, 5.1e-10, False),
    (6.02214e23, 6.022140001e23, True), (6.02214e23, 6.0222e23, False), (0.3333333, 1 / 3, True),
    (0.33333, 1 / 3, False), (2.0, 2, True), (2 + 1e-14, 2, False), (2, 2 + 1e-14, True),
    (True, 1.0, False), (1.0, True, False), (False, 0.0, False), (0, False, False),
    (True, True, True)])
def test_numbers(got, want, equal):
    assert same(got, want) is equal
    assert same([got], [want]) is equal and same({"a": got}, {"a": want}) is equal


@pytest.mark.parametrize("answer, want, verdict", [
    ('{"1": 2}', {"1": 2}, "pass"), ('{"1": 1, "1": 2}', {"1": 2}, "fail"), ("{}", {}, "pass"),
    ('{"1": 2, "1": 2}', {"1": 2}, "fail"),
    ('[{"a": {"b": 1, "b": 1}}]', [{"a": {"b": 1}}], "fail"),
    ('[{"b": 1}, {"b": 1}]', [{"b": 1}, {"b": 1}], "pass")])
def test_keys_that_collide(answer, want, verdict):
    assert judge(answer.encode(), want) == verdict


@pytest.mark.needs_bwrap
def test_colliding_keys_of_a_result():
    """
    JSON's keys are strings: of what a dict has under 1 and under "1", the last would be compared.
    In Python itself 1, 1.0 and True are one key.
    """
    for result, want, score in (
            ('{1: 7}', {"1": 7}, 1), ('{"1": 7}', {"1": 7}, 1), ('{1: 0, "1": 7}', {"1": 7}, 0),
            ('{"1": 0, 1: 7}', {"1": 7}, 0), ('{1: 7, "1": 7}', {"1": 7}, 0),
            ('{None: 7, "null": 7}', {"null": 7}, 0), ('{True: 0, "true": 7}', {"true": 7}, 0),
            ('{1: 0, True: 7}', {"1": 7}, 1), ('{1.0: 7}', {"1": 7}, 0)):
        tests = {"fn": "f", "inputs": [[]], "outputs": [want]}
        assert rewarded([f"def f(): return {result}"], tests) == [score], result

"""Bad input of every kind, in one line: messages that leave, config files, data files, model folders, tokenizers."""
import io
import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT

import configurator
from configurator import BadConfig, BadInput, Stop, one_line, run_config_file, shorten
from data import read_jsonl

# ---------------------------------------------------------------------------------------------------------------------
# messages, where they leave


def said_and_code(error, monkeypatch, rank="0"):
    """What report_and_exit writes to stderr for an error, and the exit code it leaves with."""
    class Left(BaseException):
        pass

    def leave(code):
        raise Left(code)

    out = io.StringIO()
    monkeypatch.setattr(sys, "__stderr__", out)
    monkeypatch.setattr(sys, "argv", ["/somewhere/ppo.py"])
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(configurator.os, "_exit", leave)
    with pytest.raises(Left) as left:
        configurator.report_and_exit(type(error), error, None)
    return out.getvalue(), left.value.args[0]


@pytest.mark.parametrize("kind, code", [(BadInput, 2), (BadConfig, 2), (Stop, 1)])
@pytest.mark.parametrize("text, wanted", [
    ("a plain line", "a plain line"), ("two\nlines\r\n", "two\\nlines"), ("\x1b[31mred\x07\x00", "\\x1b[31mred\\x07\\x00"),
    ("half \ud800 a pair", "half \\ud800 a pair"), ("a\u2028b\x85c\u202ed", "a\\u2028b\\x85c\\u202ed"),
    ("Grüße, 世界 \U0001f600", "Grüße, 世界 \U0001f600"), ("x" * 700, "x" * 700),
    ("a" * 400 + "\n" * 10**6 + "b" * 400, "a" * 350 + " ... " + "b" * 345)])
def test_a_message_leaves_on_one_line(kind, code, text, wanted, monkeypatch):
    said, left_with = said_and_code(kind(text), monkeypatch)
    assert (said, left_with) == (f"ppo.py: error: {wanted}\n", code)
    assert len(one_line(text)) <= 700


def test_a_row_of_20000_keys(tmp_path, monkeypatch):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({f"key {i}": i for i in range(20_000)}) + "\n")
    with pytest.raises(BadInput) as caught:
        read_jsonl(str(file), ["prompt"])
    said, code = said_and_code(caught.value, monkeypatch)
    assert code == 2 and len(said) < 730 and said.count("\n") == 1
    assert said.startswith(f"ppo.py: error: {file}, line 1: field 'prompt' is missing") and said.endswith("'key 19999'\n")


def test_a_path_with_a_newline_and_an_escape(tmp_path, monkeypatch):
    """And in a process of its own, where half a surrogate would end the report itself."""
    with pytest.raises(BadInput) as caught:
        read_jsonl(f"{tmp_path}/two\nlines\x1b[2J.jsonl", ["prompt"])
    said, code = said_and_code(caught.value, monkeypatch)
    assert code == 2 and "/two\\nlines\\x1b[2J.jsonl: No such file" in said and said.count("\n") == 1
    done = subprocess.run([sys.executable, os.path.join(ROOT, "plot.py"), f"--runs={tmp_path}/a\nb\x1b[2J", "--out=x.png"],
                          capture_output=True, env=dict(os.environ, RANK="0", PYTHONIOENCODING="ascii:strict"))
    assert done.returncode == 2 and done.stderr.count(b"\n") == 1 and b"/a\\nb\\x1b[2J" in done.stderr, done.stderr


# ---------------------------------------------------------------------------------------------------------------------
# config files: trusted code, which must only not break the report of its own errors


class Weird:
    def __repr__(self):
        raise KeyError("no repr either")


@pytest.mark.parametrize("text, said", [
    ("import sys\nsys.setrecursionlimit(60)\nseed = 1 / 0\n", r"line 3: ZeroDivisionError"),
    ("import sys\nsys.setrecursionlimit(1)\n", r"line 2: RecursionError"),
    ("def _f():\n    return _f()\n_f()\n", r"line 2: RecursionError"),
    ("class _E(Exception):\n    def __str__(self):\n        return 1 / 0\nraise _E\n", r"line 4: _E$"),
    ("raise ValueError('\\ud800')\n", "line 1: ValueError: "), ("seed = " + "-" * 100_000 + "1\n", "line .: "),
    ("seed = " + "(" * 1000 + "1" + ")" * 1000, "line .: "), ("seed = 1 +" * 10_000 + "1", "line .: ")])
def test_config_files_that_break(text, said, tmp_path):
    file, limit = tmp_path / "c.py", sys.getrecursionlimit()
    file.write_text(text)
    with pytest.raises(BadConfig, match=said):
        run_config_file(str(file))
    assert sys.getrecursionlimit() == limit


def test_a_config_file_that_lowers_the_recursion_limit_changes_nothing(tmp_path):
    (tmp_path / "c.py").write_text("import sys\nsys.setrecursionlimit(60)\nseed = 2\n")
    limit = sys.getrecursionlimit()
    assert run_config_file(str(tmp_path / "c.py")) == {"seed": 2}
    assert sys.getrecursionlimit() == limit


def test_values_that_are_no_text_or_cannot_be_printed():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    for value in (deep, Weird(), 10**5000):
        assert "cannot be printed" in shorten(value)
        with pytest.raises(BadConfig, match="cannot be printed"):
            configurator.convert("name", value, "text", "c.py")
    for text in ("\ud800", "a\0b"):
        with pytest.raises(BadConfig, match="name .c.py.: .* not text"):
            configurator.convert("name", text, "text", "c.py")
    assert configurator.convert("name", "\udcff", "text", "c.py") == "\udcff"  # a byte of a path that is not UTF-8

"""configurator.py on a made-up script: what overrides what, every refusal in one line; and the real scripts' configurations."""
import ast
import glob
import itertools
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from configurator import RENAMED, check_range, configure, read_arguments, read_keys
from errors import BadConfig

from conftest import ROOT

SCRIPT = f'''"""A toy script."""
import os
import sys

sys.path.insert(0, {ROOT!r})
from configurator import configure

# where to write
out_dir = "out/toy"  # the run's folder
count = 3  # how many = any [>= 1]
rate = 0.5  # how fast [> 0]
share = 0.25  # part of all [0..1]
shape = "flat"  # which way [flat | round]
flag = False  # whether at all
offset = 0  # any integer
drift = 0.0  # any number
_hidden = 5  # no key
computed = count * 2  # no key
pair = (1, 2)  # no key
config, system = configure(globals(), "shared.py", limit=50)
late = 1  # no key
print("ran", sorted(config.items()), vars(system))
'''
OWN = dict(out_dir="out/toy", count=3, rate=0.5, share=0.25, shape="flat", flag=False, offset=0, drift=0.0)
SHARED = """# where it runs
place = "here"  # on which side [here | there]
# how long it takes
# in seconds
limit = 60  # longest wait [1..1000]
slow = 1.5  # a factor [> 0]
"""
DEFAULTS = OWN | dict(place="here", limit=50, slow=1.5)


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """Runs configure for the toy script in a folder of its own: toy("--count=4") -> all keys."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # configure sets it
    (tmp_path / "toy.py").write_text(SCRIPT)
    (tmp_path / "shared.py").write_text(SHARED)

    def run(*argv, limit=50, **defaults):
        others = dict(__file__=str(tmp_path / "toy.py"), __doc__="A toy script.", _hidden=5, computed=6, pair=(1, 2))
        script_globals = OWN | others
        keys, system = configure(script_globals, "shared.py", argv=list(argv), limit=limit, **defaults)
        assert list(keys) == list(DEFAULTS)  # the script's own first
        assert script_globals == {k: keys[k] for k in OWN} | others
        assert system == SimpleNamespace(**{k: keys[k] for k in DEFAULTS if k not in OWN})
        return keys

    return run


def refused(toy, *argv):
    """The one line with which configure refuses these arguments."""
    with pytest.raises(BadConfig) as caught:
        toy(*argv)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 300
    return message


def write(name, text):
    with open(name, "w", encoding="utf-8") as f:
        f.write(text)


def test_defaults_and_what_is_overridden_may_be_out_of_range(toy, capsys):
    assert toy() == DEFAULTS and capsys.readouterr().out == ""
    assert {k: key.default for k, key in read_keys("toy.py").items()} == DEFAULTS
    write("c.py", "count = 0\n")
    assert toy("c.py", "--count=2")["count"] == toy("--count=2", "c.py")["count"] == 2


@pytest.mark.parametrize("argv", [*itertools.permutations(["one.py", "two.py", "--rate=3"]),
                                  ("--rate=9", "one.py", "--rate=3", "two.py"), ("--rate=9", "--rate=3", "one.py", "two.py")])
def test_the_command_line_wins_wherever_it_stands(toy, argv):
    """Among files the last one counts, and so it does among arguments; and a file before the keywords of `configure`."""
    write("one.py", "rate = 1.0\noffset = 1\nlimit = 10\n")
    write("two.py", "rate = 2.0\noffset = 2\n")
    last = [arg for arg in argv if arg.endswith(".py")][-1]
    assert toy(*argv) == dict(DEFAULTS, rate=3.0, offset={"one.py": 1, "two.py": 2}[last], limit=10)
    assert toy(*argv, "--limit=30")["limit"] == 30


def test_values_of_each_type(toy):
    keys = toy("--count=7", "--rate=2", "--drift=-1e-5", "--share=1", "--flag=True", "--offset=-3", "--out_dir=a=b=c")
    assert keys == dict(DEFAULTS, count=7, rate=2.0, drift=-0.00001, share=1.0, flag=True, offset=-3, out_dir="a=b=c")
    assert [type(keys[k]) for k in ("count", "rate", "drift", "share", "flag")] == [int, float, float, float, bool]
    for text, value in (("7", "7"), ("None", "None"), ("", ""), ("'quoted'", "quoted"), ('"a b"', "a b"), ("it's", "it's"),
                        ("'", "'"), ("--x", "--x"), ("\udcff", "\udcff")):  # the last: a byte of a path that is not UTF-8
        assert toy(f"--out_dir={text}")["out_dir"] == value


WRONG_ARGUMENTS = [
    ("--cuont=3", ["cuont", "'count'"]), ("--limti=3", ["limti", "'limit'"]),
    *((f"--{key}=x", [repr(key)]) for key in ("__name__", "os", "_hidden", "computed", "pair", "late", "")),
    ("--count=2.5", ["count", "command line", "int", "float 2.5"]), ("--count=", ["count", "''"]),
    ("--rate=fast", ["rate", "float", "'fast'"]), ("--flag=1", ["flag", "bool", "int 1"]), ("--limit=0", ["limit", "1..1000"]),
    ("--count=0", ["count = 0", "[>= 1]", "how many"]), ("--share=1.001", ["share = 1.001", "[0..1]"]), ("--rate=0", ["rate"]),
    ("--shape=square", ["shape = 'square'", "[flat | round]"]), ("--count", ["--count=3"]),
    ("--count 7", ["--count=3", "without a blank"]), ("toy.py", ["toy.py is a script"]),
    ("--drift=nan", ["drift"]), ("--drift=1e30", ["drift"]),
    ("nowhere.py", ["nowhere.py"]), ("count=4", ["count=4", "--key=value"]), ("folder", ["folder"])]


@pytest.mark.parametrize("arg, words", WRONG_ARGUMENTS, ids=[arg[:20] for arg, _ in WRONG_ARGUMENTS])
def test_a_wrong_argument_is_one_line_that_names_it(toy, arg, words):
    os.makedirs("folder")
    message = refused(toy, *arg.split())
    assert all(word in message for word in words), message


WRONG_FILES = [
    ("cuont = 3\n", ["'count'"]), ("def f():\n    pass\n", ["'f'"]), ("count = 2.5", ["count (c.py)", "float 2.5"]),
    ("count = 4\nrate = = 2\n", ["c.py, line 2"]), ("count = 4\nrate = 1 / 0\n", ["line 2", "ZeroDivision"]),
    ("def _f():\n    return _g()\n\ncount = _f()\n", ["line 2", "NameError"]),
    ("raise ValueError('two\\nlines')\n", ["line 1", "ValueError: two"]), ("def _f():\n    return _f()\n_f()\n", ["line 2"]),
    ("count = 4  # \xff\n", ["c.py"])]


@pytest.mark.parametrize("text, words", WRONG_FILES, ids=range(len(WRONG_FILES)))
def test_a_wrong_config_file_is_one_line_that_names_the_line(toy, tmp_path, text, words):
    (tmp_path / "c.py").write_bytes(text.encode("latin-1"))
    message = refused(toy, "c.py")
    assert all(word in message for word in words), message


def test_help_and_overrides_are_said_on_rank_0_only(toy, monkeypatch, capsys):
    """Of the settings those that differ from the defaults and count, in lines of 100 columns."""
    write("c.py", f"import math\n_half = 2\ncount = _half + int(math.sqrt(1))\nout_dir = {'a' * 50!r}\nrate = 1.0\n"
                  f"shape = 'round'\noffset = {10**40}\nlimit = 50\n")  # helpers are no keys; count and limit are the defaults
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        assert toy("c.py", "--rate=2", "--share=0.25")["count"] == 3
        said = capsys.readouterr().out
        with pytest.raises(SystemExit) as caught:
            toy("--help")
        helped = capsys.readouterr().out
        assert caught.value.code == 0
        if rank == "1":
            assert said == helped == ""
        else:
            assert said == f"c.py: out_dir={'a' * 50!r} shape='round'\n    offset={10**40}\ncommand line: rate=2.0\n"
            keys = re.findall(r"^ +(\w+) = ", helped, re.MULTILINE)
            assert keys == list(DEFAULTS) and "how many = any [>= 1]" in helped  # the script's own first
            toy("--out_dir=\x1b[2J\udcff")
            assert capsys.readouterr().out == "command line: out_dir='\\x1b[2J\\udcff'\n"


def test_help_fits_into_the_terminal(toy, monkeypatch, capsys):
    """Each line, and no word is lost or split. The usage line has the script's path from here, which may be in a folder."""
    helped = {}
    for columns in ("70", "1000"):
        monkeypatch.setenv("COLUMNS", columns)
        with pytest.raises(SystemExit):
            toy("--help")
        helped[columns] = capsys.readouterr().out
    lines = helped["70"].splitlines()
    assert max(map(len, lines)) <= 70 and len(lines) > helped["1000"].count("\n") and "\n\n\n" not in helped["70"]
    assert helped["70"].split() == helped["1000"].split() and "usage: python toy.py [" in helped["70"]


def test_a_file_that_is_configured_only_when_it_is_run(tmp_path):
    """The keys end at the call of configure: what a script assigns behind it is no key."""
    write(tmp_path / "toy.py", "count = 3  # [>= 1]\n"
          "config, _ = configure(globals()) if __name__ == '__main__' else ({}, None)\nRULE = 'text'\n")
    assert list(read_keys(str(tmp_path / "toy.py"))) == ["count"]


def test_as_a_script(toy, tmp_path):
    """A line of stderr and the exit code 2; from rank 0 alone."""
    for rank, lines in (("0", 1), ("1", 0)):
        done = subprocess.run([sys.executable, str(tmp_path / "toy.py"), "--cuont=4"], capture_output=True, text=True,
                              env=dict(os.environ, RANK=rank, LOCAL_RANK=rank), cwd="/")
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", lines)


def test_a_wrong_default_in_the_call_and_a_key_in_both_files(toy):
    for defaults, word in ((dict(limti=3), "'limit'"), (dict(limit=0), "[1..1000]"), (dict(place=3), "int 3")):
        with pytest.raises(BadConfig) as caught:
            toy(**defaults)
        assert word in str(caught.value) and "toy.py" in str(caught.value)
    write("shared.py", SHARED + "count = 4  # again [>= 1]\n")
    assert "count" in refused(toy) and "shared.py" in refused(toy)


# ---------------------------------------------------------------------------------------------------------------------
# the real scripts


def source_of(path):
    with open(os.path.join(ROOT, path), encoding="utf-8") as f:
        return f.read()

SCRIPTS = sorted(os.path.relpath(p, ROOT) for folder in ("", "tools", "recipes")
                 for p in glob.glob(os.path.join(ROOT, folder, "*.py"))
                 if re.search(r"^([\w, ]+ = )?configure\(globals\(\)", source_of(p), re.MULTILINE))
TRAINING = ["grpo.py", "ppo.py", "recipes/dpo.py", "rm.py", "sft.py"]
CONFIGS = sorted(os.path.basename(p) for p in glob.glob(os.path.join(ROOT, "config", "*.py")))


def keys_of(name):
    return read_keys(os.path.join(ROOT, name))


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_key_has_a_comment_and_a_default_in_its_range(name):
    for key, (default, comment, headings) in keys_of(name).items():
        said = re.sub(r"\[[^\[\]]*\]$", "", comment).strip() or " ".join(headings)  # on lines of its own above the key
        assert len(said) >= 3, f"{name}: {key} has no comment"
        check_range(key, default, comment, name)
        if isinstance(default, (int, float)) and not isinstance(default, bool):
            assert re.search(r"\[(>=? \S+|\S+\.\.\S+)\]$", comment), f"{name}: {key} is a number without a range"


@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_file_fits_its_script(name):
    doc = ast.get_docstring(ast.parse(source_of(f"config/{name}"))) or ""
    scripts = {s for s in re.findall(rf"([\w/]+\.py) (?:\S+ )*config/{name}", doc)} & set(TRAINING)
    keys = [keys_of(script) for script in scripts or TRAINING]
    fits = [script for script in keys if read_if_it_fits(script, os.path.join(ROOT, "config", name))]
    assert fits and (not scripts or len(fits) == len(keys)), f"{name} fits none of {scripts or TRAINING}"


def read_if_it_fits(keys, file):
    try:
        return read_arguments(keys, [file])
    except BadConfig:
        return None


def test_without_a_rate_models_of_the_hub_are_not_torn_apart():
    """What TRL, OpenRLHF and open-instruct begin with is 3e-6 to 2e-5; the toys' own rates stand in their configs."""
    for script in ("sft.py", "rm.py"):
        assert 3e-6 <= keys_of(script)["learning_rate"].default <= 2e-5
    for name in CONFIGS:
        if name.startswith(("arithmetic_", "code_")) and name.endswith(("sft.py", "rm.py")):
            assert re.search(r"^learning_rate = [23]e-[34]$", source_of(f"config/{name}"), re.MULTILINE), name


def test_renamed_keys_are_told_their_new_names():
    scripts = [keys_of(script) for script in TRAINING]
    for old, new in RENAMED.items():
        for keys in scripts:
            with pytest.raises(BadConfig) as caught:
                read_arguments(keys, [f"--{old}=3"])
            assert new not in keys or f"'{new}'" in str(caught.value), old

"""configurator.py on a made-up script: what overrides what, every refusal in one line; and the real scripts' configurations."""
import ast
import glob
import math
import os
import random
import re
import subprocess
import sys
import tomllib
import warnings

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
config = configure(globals())
late = 1  # no key
print("ran", sorted(config.items()))
'''
DEFAULTS = dict(out_dir="out/toy", count=3, rate=0.5, share=0.25, shape="flat", flag=False, offset=0, drift=0.0)


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """Runs configure for the toy script in a folder of its own: toy("--count=4") -> the script's globals."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # configure sets it
    (tmp_path / "toy.py").write_text(SCRIPT)

    def run(*argv):
        script_globals = dict(DEFAULTS, __file__=str(tmp_path / "toy.py"), __doc__="A toy script.", __name__="__main__",
                              os=os, sys=sys, _hidden=5, computed=6, pair=(1, 2))
        before = dict(script_globals)
        keys = configure(script_globals, argv=list(argv))
        assert keys == {k: script_globals[k] for k in DEFAULTS} and list(keys) == list(DEFAULTS)
        assert {k: v for k, v in script_globals.items() if k not in DEFAULTS} == {
            k: v for k, v in before.items() if k not in DEFAULTS}
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


def test_no_arguments_no_change(toy, capsys):
    assert toy() == DEFAULTS
    assert capsys.readouterr().out == ""


def test_later_wins(toy):
    write("one.py", "count = 10\nrate = 10.0\noffset = 10\n")
    write("two.py", "rate = 20.0\noffset = 20\n")
    assert toy("one.py") == dict(DEFAULTS, count=10, rate=10.0, offset=10)
    assert toy("one.py", "two.py", "--offset=30") == dict(DEFAULTS, count=10, rate=20.0, offset=30)
    assert toy("two.py", "one.py", "--offset=30") == dict(DEFAULTS, count=10, rate=10.0, offset=30)


def test_values_of_each_type(toy):
    keys = toy("--count=7", "--rate=2", "--drift=-1e-5", "--share=1", "--flag=True", "--offset=-3", "--out_dir=a=b=c")
    assert keys == dict(DEFAULTS, count=7, rate=2.0, drift=-0.00001, share=1.0, flag=True, offset=-3, out_dir="a=b=c")
    assert [type(keys[k]) for k in ("count", "rate", "drift", "share", "flag")] == [int, float, float, float, bool]
    write("c.py", "rate = 3\ndrift = 1e-5\nflag = True\nout_dir = 'x'\n")
    keys = toy("c.py")
    assert keys == dict(DEFAULTS, rate=3.0, drift=0.00001, flag=True, out_dir="x") and type(keys["rate"]) is float


@pytest.mark.parametrize("text, value", [
    ("7", "7"), ("1e-5", "1e-5"), ("True", "True"), ("None", "None"), ("", ""), ("[1]", "[1]"), ("'quoted'", "quoted"),
    ('"a b"', "a b"), ("it's", "it's"), ("'", "'"), ("--x", "--x")])
def test_a_string_key_takes_the_text(toy, text, value):
    assert toy(f"--out_dir={text}")["out_dir"] == value


@pytest.mark.parametrize("arg, near", [("--cuont=3", "count"), ("--outdir=x", "out_dir"), ("--rates=1", "rate"),
                                       ("--shapes=flat", "shape")])
def test_unknown_key_names_the_nearest(toy, arg, near):
    message = refused(toy, arg)
    assert arg[2:].split("=")[0] in message and f"did you mean '{near}'?" in message
    write("c.py", f"{arg[2:].split('=')[0]} = 3\n")
    message = refused(toy, "c.py")
    assert "c.py" in message and f"did you mean '{near}'?" in message and message.endswith("(the name of a helper begins with _)")


@pytest.mark.parametrize("key", ["__name__", "__file__", "os", "sys", "configure", "_hidden", "computed", "pair", "late",
                                 "config", "", "zzzzzz", "out_dir "])
def test_only_keys_can_be_set(toy, key):
    assert repr(key) in refused(toy, f"--{key}=x")


@pytest.mark.parametrize("arg, wanted, given", [
    ("--count=2.5", "int like 3", "float 2.5"), ("--count=1e3", "int like 3", "float 1000.0"),
    ("--count=True", "int like 3", "bool True"), ("--count=many", "int like 3", "str 'many'"),
    ("--count=", "int like 3", "str ''"), ("--count=None", "int like 3", "NoneType None"),
    ("--rate=fast", "float like 0.5", "str 'fast'"), ("--rate=False", "float like 0.5", "bool False"),
    ("--rate=1j", "float like 0.5", "complex 1j"), ("--rate=[1]", "float like 0.5", "list [1]"),
    ("--flag=1", "bool like False", "int 1"), ("--flag=true", "bool like False", "str 'true'"),
    ("--flag=yes", "bool like False", "str 'yes'"), ("--flag=0", "bool like False", "int 0")])
def test_wrong_type_names_key_wanted_and_given(toy, arg, wanted, given):
    message = refused(toy, arg)
    assert message == f"{arg[2:].split('=')[0]} (command line): wanted {wanted}, given {given}"


@pytest.mark.parametrize("line, wanted, given", [
    ("count = 2.5", "int like 3", "float 2.5"), ("count = '3'", "int like 3", "str '3'"),
    ("rate = True", "float like 0.5", "bool True"), ("flag = 1", "bool like False", "int 1"),
    ("out_dir = 7", "str like 'out/toy'", "int 7"),
    ("out_dir = None", "str like 'out/toy'", "NoneType None"), ("count = [1]", "int like 3", "list [1]")])
def test_wrong_type_in_a_file(toy, line, wanted, given):
    write("c.py", line)
    assert refused(toy, "c.py") == f"{line.split()[0]} (c.py): wanted {wanted}, given {given}"


def test_duplicates(toy):
    assert toy("--count=4", "--rate=1", "--count=5")["count"] == 5  # the last one counts
    write("c.py", "count = 4\n\nrate = 1.0\ncount = 5\n")
    message = refused(toy, "c.py")
    assert "c.py, line 4" in message and "count is set twice" in message and "line 1" in message


@pytest.mark.parametrize("arg, hint", [("--count", "--count=3"), ("--out_dir", "--out_dir='out/toy'")])
def test_a_missing_value(toy, arg, hint):
    """The default is the example; or what follows, which may have been meant as the value."""
    assert f"type {hint}" in refused(toy, arg)
    assert f"type {hint}" in refused(toy, arg, "--rate=1")
    assert f"type {arg}=4" in refused(toy, arg, "4")


@pytest.mark.parametrize("arg", ["nowhere.py", "-count=4", "count=4", "folder"])
def test_a_missing_file(toy, arg):
    os.makedirs("folder")
    message = refused(toy, arg)
    assert repr(arg) in message
    assert ("--key=value" in message) == (not arg.endswith(".py"))


@pytest.mark.parametrize("text, line, what", [
    ("count = 4\nrate = = 2\n", 2, "invalid syntax"), ("count = 4\n\nrate = (1\n", 3, "never closed"),
    ("count = 4\nrate = 1 / 0\n", 2, "ZeroDivisionError"),
    ("import os\n\nout_dir = os.environ['NO_SUCH_NAME']\n", 3, "KeyError"),
    ("def _f():\n    return _g()\n\ncount = _f()\n", 2, "NameError"),
    ("import no_such_module_at_all\n", 1, "ModuleNotFoundError"),
    ("count = 4\nraise ValueError('no')\n", 2, "ValueError: no"),
    ("raise ValueError('two\\nlines')\n", 1, "ValueError: two"), ("raise ValueError\n", 1, "ValueError")])
def test_a_broken_file_names_the_line(toy, text, line, what):
    write("c.py", text)
    message = refused(toy, "c.py")
    assert f"c.py, line {line}:" in message and what in message


def test_a_file_that_is_no_text(toy):
    with open("c.py", "wb") as f:
        f.write(b"count = 4  # \xff\n")
    assert "c.py" in refused(toy, "c.py")


def test_helpers_and_imports_in_a_file(toy):
    write("c.py", '"""Doc."""\nimport math\nimport os.path as p\n\n_half = 2\n\n\ndef _double(x):\n    return 2 * x\n\n\n'
                  'count = _double(_half) + int(math.sqrt(9))\nout_dir = p.join("a", "b")\n')
    assert toy("c.py") == dict(DEFAULTS, count=7, out_dir=os.path.join("a", "b"))
    write("c.py", '_half = 2\nfor _i in range(3):\n    count = _half + _i\n')
    assert toy("c.py") == dict(DEFAULTS, count=4)
    # near the key count, or near none: what begins with _ is no key
    for text in ("half = 2\n", "def f():\n    pass\n", "for i in range(3):\n    pass\n", "counts = 2\n"):
        write("c.py", text)
        assert refused(toy, "c.py").endswith("(the name of a helper begins with _)")


@pytest.mark.parametrize("key, good, bad", [
    ("count", ["1", "2", "1000"], ["0", "-1"]), ("rate", ["1e-300", "0.1", "7"], ["0", "0.0", "-1e-300"]),
    ("share", ["0", "0.0", "1", "0.999"], ["-0.001", "1.001", "2"]),
    ("shape", ["flat", "round"], ["", "Flat", "flat ", "flat | round"]),
    ("offset", ["0", "-5", str(2**62), str(-2**62)], [str(2**62 + 1), str(-2**62 - 1), str(-2**64), "1" + "0" * 400]),
    ("drift", ["-1e29", "1" + "0" * 29], ["1e30", "-1e300", "1e999", "-1e999", "nan", "inf", "1" + "0" * 30, "1" + "0" * 400])])
def test_ranges(toy, key, good, bad):
    quote = "'" if key == "shape" else ""
    for text in good + bad:
        write("c.py", f"{key} = {quote}{text}{quote}\n")
        for arg in (f"--{key}={text}", "c.py"):
            if text in good:
                assert str(toy(arg)[key]) == text or toy(arg)[key] == float(text)
            elif (arg, text) == ("c.py", "nan") or (arg, text) == ("c.py", "inf"):
                assert "NameError" in refused(toy, arg)
            else:
                message = refused(toy, arg)
                assert key in message and ("c.py" if arg == "c.py" else "command line") in message


def test_out_of_range_shows_the_rule_and_the_comment(toy):
    assert refused(toy, "--count=0") == "count = 0 (command line) is out of range: [>= 1]; how many = any"
    assert refused(toy, "--share=1.5") == "share = 1.5 (command line) is out of range: [0..1]; part of all"
    assert refused(toy, "--shape=square") == "shape = 'square' (command line) is out of range: [flat | round]; which way"


def test_an_override_that_is_overridden_is_not_checked_against_the_range(toy):
    write("c.py", "count = 0\n")
    assert toy("c.py", "--count=2")["count"] == 2


@pytest.mark.parametrize("expression", ["float('nan')", "float('inf')", "-float('inf')", "1e400"])
def test_only_finite_numbers_in_a_file(toy, expression):
    for key in ("rate", "drift"):
        write("c.py", f"{key} = {expression}\n")
        assert "finite" in refused(toy, "c.py")


@pytest.mark.parametrize("digits", [20, 400, 5000, 100_000])
def test_huge_integers(toy, digits):
    for key in ("count", "offset", "rate", "flag"):
        if key == "rate" and digits == 20:
            continue
        assert key in refused(toy, f"--{key}={'9' * digits}")
        write("c.py", f"{key} = 10 ** {digits}\n")
        assert key in refused(toy, "c.py")


def test_prints_overrides_on_rank_0_only(toy, monkeypatch, capsys):
    write("c.py", "count = 4\nout_dir = 'o'\n")
    for rank in (None, "0"):
        if rank:
            monkeypatch.setenv("RANK", rank)
        toy("c.py", "--rate=2", "--count=3")
        lines = sorted(capsys.readouterr().out.splitlines())
        assert lines == ["config: count = 3  (command line)", "config: out_dir = 'o'  (c.py)",
                         "config: rate = 2.0  (command line)"]
    monkeypatch.setenv("RANK", "1")
    toy("c.py", "--rate=2", "--count=3")
    with pytest.raises(SystemExit):
        toy("--help")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["--count=5", "--help"]])
def test_help(toy, argv, capsys):
    with pytest.raises(SystemExit) as caught:
        toy(*argv)
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert "A toy script." in out and "\n\n  where to write\n" in out
    for row in ("out_dir = 'out/toy' +the run's folder", "count = 3 +how many = any \\[>= 1\\]", "rate = 0.5 +how fast \\[> 0\\]",
                "flag = False +whether at all", "shape = 'flat' +which way \\[flat \\| round\\]"):
        assert re.search(rf"^ +{row}$", out, re.MULTILINE), row
    assert not re.search("_hidden|computed|late", out)


def script(*argv, rank="0"):
    """Runs the toy script in a process of its own, as a rank of one host."""
    env = dict(os.environ, RANK=rank, LOCAL_RANK=rank)
    return subprocess.run([sys.executable, "toy.py", *argv], capture_output=True, text=True, env=env)


def test_as_a_script(toy):
    done = script("--count=4", "--flag=True")
    want = sorted(dict(DEFAULTS, count=4, flag=True).items())
    assert (done.returncode, done.stderr) == (0, "") and f"ran {want}" in done.stdout
    done = script("--cuont=4")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "toy.py: error: unknown key 'cuont' (--cuont=4); did you mean 'count'?\n"
    done = script("--cuont=4", rank="1")  # rank 0 says it
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")
    done = script("--help")
    assert (done.returncode, done.stderr) == (0, "") and "how fast [> 0]" in done.stdout and "ran" not in done.stdout


# ---------------------------------------------------------------------------------------------------------------------
# keys that scripts share

SHARED = '''"""Shared by toys."""
# where it runs
place = "here"  # on which side [here | there]
# how long it takes
# in seconds
limit = 60  # longest wait [1..1000]
slow = 1.5  # a factor [> 0]
'''


@pytest.fixture
def shares(toy, monkeypatch):
    """Runs configure for the toy script with the shared keys: shares({"limit": 5}, "--place=there") -> (config, globals)."""
    write("shared.py", SHARED)

    def run(defaults, *argv):
        call = ", ".join(["globals()", '"shared.py"', *(f"{k}={v!r}" for k, v in defaults.items())])
        write("toy.py", SCRIPT.replace("configure(globals())", f"configure({call})"))
        script_globals = dict(DEFAULTS, __file__=os.path.abspath("toy.py"))
        config = configure(script_globals, "shared.py", list(argv), **defaults)
        assert config == {k: script_globals[k] for k in config}
        assert set(script_globals) == {*config, "__file__"}
        return config

    return run


def test_shared_keys_come_after_the_script_s_own(shares):
    everything = dict(DEFAULTS, place="here", limit=60, slow=1.5)
    assert shares({}) == everything and list(shares({})) == list(everything)
    assert {k: key.default for k, key in read_keys("toy.py").items()} == everything
    write("c.py", "limit = 7\ncount = 9\n")
    assert shares({}, "c.py", "--slow=2", "--place='there'") == dict(everything, limit=7, count=9, slow=2.0, place="there")


def test_a_script_has_its_own_defaults_of_shared_keys(shares):
    want = dict(DEFAULTS, place="here", limit=5, slow=2.0)
    got = shares(dict(limit=5, slow=2))
    assert got == want and type(got["slow"]) is float
    assert {k: key.default for k, key in read_keys("toy.py").items()} == want
    assert shares(dict(limit=5), "--limit=60")["limit"] == 60


def test_a_script_can_have_a_shared_key_not_at_all(shares):
    assert shares(dict(place=None)) == dict(DEFAULTS, limit=60, slow=1.5)
    assert "place" not in read_keys("toy.py")
    with pytest.raises(BadConfig, match="unknown key 'place'"):
        shares(dict(place=None), "--place=there")


@pytest.mark.parametrize("argv, message", [
    (["--limit=0"], "limit = 0 (command line) is out of range: [1..1000]; longest wait"),
    (["--limit=x"], "limit (command line): wanted int like 60, given str 'x'"),
    (["--limti=3"], "unknown key 'limti' (--limti=3); did you mean 'limit'?"),
    (["--limit"], "--limit: a value is missing; type --limit=60"),
    (["--place=nowhere"], "place = 'nowhere' (command line) is out of range: [here | there]; on which side")])
def test_shared_keys_are_checked_like_others(shares, argv, message):
    with pytest.raises(BadConfig) as caught:
        shares({}, *argv)
    assert str(caught.value) == message


@pytest.mark.parametrize("defaults, message", [
    (dict(limti=3), "unknown key 'limti' (toy.py); did you mean 'limit'?"),
    (dict(limit=0), "limit = 0 (toy.py) is out of range: [1..1000]; longest wait"),
    (dict(place=3), "place (toy.py): wanted str like 'here', given int 3")])
def test_a_wrong_default_in_the_call(shares, defaults, message):
    for look in (lambda: shares(defaults), lambda: read_keys("toy.py")):
        with pytest.raises(BadConfig) as caught:
            look()
        assert str(caught.value) == message


def test_a_key_in_both_files(shares):
    write("shared.py", SHARED + "count = 4  # again [>= 1]\n")
    with pytest.raises(BadConfig, match="toy.py and shared.py both set count; keep one"):
        shares({})


def test_help_lists_shared_keys_last(shares, capsys):
    with pytest.raises(SystemExit):
        shares(dict(limit=5, slow=None), "--help")
    out = capsys.readouterr().out
    assert re.search(r"\n    drift = 0\.0 +any number\n"
                     r"\n  where it runs\n    place = 'here' +on which side \[here \| there\]\n"
                     r"\n  how long it takes\n  in seconds\n    limit = 5 +longest wait \[1\.\.1000\]\n$", out)


def test_the_shared_file_is_found_from_any_folder(shares, tmp_path):
    shares({})
    done = subprocess.run([sys.executable, str(tmp_path / "toy.py"), "--limit=4"], capture_output=True, text=True, cwd="/")
    assert (done.returncode, done.stderr) == (0, "") and "('limit', 4)" in done.stdout


def test_renamed_keys_are_told_their_new_names():
    keys = {name: read_keys(os.path.join(ROOT, name)) for name in TRAINING}
    assert set(RENAMED.values()) <= {key for name in TRAINING for key in keys[name]}
    for old, new in RENAMED.items():
        for name in TRAINING:
            with pytest.raises(BadConfig) as caught:
                read_arguments(keys[name], [f"--{old}=3"])
            assert (f"it is called '{new}' now" in str(caught.value)) == (new in keys[name]), (name, old)
            assert old not in keys[name]


# ---------------------------------------------------------------------------------------------------------------------
# fuzz

PIECES = ["1", "0", "-", "+", ".", "e", "E", "_", "0x", "0b1", "1e", "9" * 30, "9" * 5000, "j", "nan", "inf", "None", "True",
          "False", "'", '"', "\\", "(", ")", "[", "]", "{", "}", ":", ",", " ", "\t", "\n", "\0", "#", "=", "*", "**", "flat",
          "round", "b'", "f'", "\u0663", "\uff11", "\U0001f600", "\udcff", "[]", "{[]:1}", "{{}}", "(" * 300, "-" * 2000,
          "lambda:0", "...", "is", "or"]


@pytest.mark.parametrize("key", DEFAULTS)
def test_fuzz_gives_the_right_type_or_bad_config(toy, key):
    rng = random.Random(f"fuzz {key}")
    texts = PIECES + ["".join(rng.choices(PIECES, k=rng.randint(1, 5))) for _ in range(150)]
    texts += [repr(rng.uniform(-2, 2) * 10 ** rng.randint(-9, 9)) for _ in range(60)]
    texts += [str(rng.randint(-10, 10) * 10 ** rng.randint(0, 25)) for _ in range(60)]
    good = 0
    for text in texts:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                value = toy(f"--{key}={text}")[key]
        except BadConfig as e:
            assert "\n" not in str(e) and len(str(e)) < 300, text
            continue
        good += 1
        assert type(value) is type(DEFAULTS[key]), text
        assert not isinstance(value, float) or math.isfinite(value), text
        assert not isinstance(value, int) or abs(value) <= 2**62, text
        if key == "count":
            assert value >= 1
        elif key == "rate":
            assert value > 0
        elif key == "share":
            assert 0 <= value <= 1
        elif key == "shape":
            assert value in ("flat", "round")
    assert good == len(texts) if key == "out_dir" else 2 <= good < len(texts)

VALUES = {"None": "", "True": "flag", "...": "", "[]": "", "{}": "", "()": "", "b''": "", "1j": "", "object()": "", "int": "",
          "lambda: 0": "", "2": "count offset rate drift", "0.5": "rate share drift", "'flat'": "out_dir shape", "''": "out_dir",
          "10**29": "rate drift", "10**30": "", "10**5000": "", "-10**5000": "", "1e-320": "rate share drift",
          "float('-inf')": "", "type('n', (int,), {})(5)": "", "type('s', (str,), {})('flat')": ""}


@pytest.mark.parametrize("expression", VALUES)
def test_any_value_in_a_file(toy, expression):
    for key in DEFAULTS:
        write("c.py", f"{key} = {expression}\n")
        if key in VALUES[expression].split():
            value = toy("c.py")[key]
            assert type(value) is type(DEFAULTS[key]) and value == type(value)(eval(expression))
        else:
            assert key in refused(toy, "c.py")


# ---------------------------------------------------------------------------------------------------------------------
# the real scripts


def source_of(path):
    with open(path, encoding="utf-8") as f:
        return f.read()

SCRIPTS = sorted(os.path.relpath(p, ROOT) for folder in ("", "tools") for p in glob.glob(os.path.join(ROOT, folder, "*.py"))
                 if re.search(r"^config = configure\(globals\(\)", source_of(p), re.MULTILINE))
TRAINING = ["grpo.py", "ppo.py", "rm.py", "sft.py"]
CONFIGS = sorted(os.path.basename(p) for p in glob.glob(os.path.join(ROOT, "config", "*.py")))
real_scripts = pytest.mark.parametrize("name", SCRIPTS)


def lines_of(source):
    """{key: (default, comment)} of the lines of a source."""
    keys = {}
    for line in source.splitlines():
        match = re.fullmatch(r"([a-z]\w*) = (.*?)(?:  # (.*))?", line)
        if match:
            keys[match[1]] = (ast.literal_eval(match[2]), match[3] or "")
    return keys


def real_keys(name):
    """{key: (default, comment)} of a script of ours, by reading its lines up to configure, and those it shares."""
    above, call = re.split(r"^config = configure\(globals\(\)", source_of(os.path.join(ROOT, name)), maxsplit=1,
                           flags=re.MULTILINE)
    shared = re.match(r', "([\w./]+)"([^)]*)\)', call)
    if not shared:
        return lines_of(above)
    keys = lines_of(source_of(os.path.join(ROOT, shared[1])))
    for key, value in re.findall(r",\s+(\w+)=(\w+)", shared[2]):
        keys[key] = (ast.literal_eval(value), keys[key][1])
    return lines_of(above) | {key: x for key, x in keys.items() if x[0] is not None}


def script_of(config):
    """The script that a file of config/ is for."""
    stem = config.removesuffix(".py")
    if "grpo" in stem or stem in ("dapo", "gspo", "rloo", "cispo"):
        return "grpo.py"
    return next((f"{s}.py" for s in ("sft", "rm") if stem.endswith(f"_{s}")), "ppo.py")


def test_the_scripts_are_found():
    assert set(SCRIPTS) == {*TRAINING, "tools/bench.py", "tools/eval.py", "tools/page.py", "tools/plot.py",
                            "tools/sample.py"}
    assert CONFIGS


def test_the_training_scripts_share_their_keys():
    """No script has a line of its own for a key of engine/keys.py."""
    shared = lines_of(source_of(os.path.join(ROOT, "engine", "keys.py")))
    assert len(shared) > 10
    with open(os.path.join(ROOT, "ruff.toml"), "rb") as f:
        assert set(tomllib.load(f)["builtins"]) == set(shared), "ruff.toml names the keys of engine/keys.py"
    for name in TRAINING:
        source = source_of(os.path.join(ROOT, name)).split("\nconfig = configure(")[0]
        assert not shared.keys() & lines_of(source).keys(), name
        assert len(shared.keys() & read_keys(os.path.join(ROOT, name)).keys()) > 10, name


@real_scripts
def test_every_key_has_a_comment(name):
    keys = real_keys(name)
    assert keys == {k: (key.default, key.comment) for k, key in read_keys(os.path.join(ROOT, name)).items()}
    assert keys
    for key, (_, comment) in keys.items():
        comment = re.sub(r"\[[^\[\]]*\]$", "", comment).strip()
        said = comment or " ".join(read_keys(os.path.join(ROOT, name))[key].headings)  # on lines of its own above the key
        assert len(said) >= 3, f"{name}: {key} has no comment"


@real_scripts
def test_every_key_is_used(name):
    """By its name in the script, or by config["name"] in a module that the script imports."""
    reads = {node.id for node in ast.walk(ast.parse(source_of(os.path.join(ROOT, name))))
             if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    for path in imported_of(os.path.join(ROOT, name)):
        for node in ast.walk(ast.parse(source_of(path))):
            if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
                if getattr(node.value, "id", getattr(node.value, "attr", "")) in ("config", "c"):
                    reads.add(node.slice.value)
    unused = [key for key in real_keys(name) if key not in reads]
    assert not unused, f"{name} never reads {unused}"


def imported_of(path):
    """The modules of ours that a script imports; not engine/planner.py, whose prediction is no use of a key."""
    source = source_of(path)
    names = ["engine/tokenizers", "engine/checkpoint"]  # some import them by engine/build.py and engine/run.py
    names += [name.replace(".", "/") for name in re.findall(r"^from ([\w.]+) import", source, re.MULTILINE)]
    for line in re.findall(r"^from engine import ([\w, ]+)", source, re.MULTILINE):
        names += [f"engine/{name}" for name in line.split(", ")]
    files = (os.path.join(ROOT, f"{name}.py") for name in sorted({*names} - {"engine/planner"}))
    return [file for file in files if os.path.exists(file)]


@real_scripts
def test_every_default_is_in_its_range(name):
    for key, (default, comment) in real_keys(name).items():
        check_range(key, default, comment, name)
        if isinstance(default, (int, float)) and not isinstance(default, bool):
            assert re.search(r"\[(>=? \S+|\S+\.\.\S+)\]$", comment), f"{name}: {key} is a number without a range"


@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_file_fits_its_script(name):
    script_name, file = script_of(name), os.path.join(ROOT, "config", name)
    doc = ast.get_docstring(ast.parse(source_of(file))) or ""
    others = [s for s in re.findall(r"\bpython (\w+\.py)", doc) if s not in (script_name, "tools/memory.py")
              and f"{s} config/{name}" in doc]
    assert not others, f"{name} is for {script_name} by its name, for {others} by its docstring"
    keys = {k: default for k, (default, _) in real_keys(script_name).items()}
    got = {name: value for name, (value, _) in read_arguments(read_keys(os.path.join(ROOT, script_name)), [file]).items()}
    named = {node.targets[0].id for node in ast.parse(source_of(file)).body
             if isinstance(node, ast.Assign) and not node.targets[0].id.startswith("_")}
    assert named and named <= set(keys)
    assert got.keys() == named


def test_config_names_say_their_script():
    names = {"sft.py": ["arithmetic_sft", "tldr_sft", "code_sft"], "rm.py": ["tldr_rm"],
             "ppo.py": ["llama", "llama_8b", "tldr_ppo", "arithmetic_hydra", "arithmetic_shared"],
             "grpo.py": ["arithmetic_grpo", "llama_70b_grpo", "gsm8k_grpo", "countdown_grpo", "code_grpo", "dr_grpo", "dapo",
                         "gspo", "rloo", "cispo"]}
    for script, configs in names.items():
        assert {script_of(f"{config}.py") for config in configs} == {script}


@pytest.mark.parametrize("script", ["ppo.py", "grpo.py", "sft.py", "rm.py"])
def test_no_key_has_the_name_of_something_else(script):
    """Not of a module, a function or a class of the house, nor of anything that the script assigns."""
    paths = [p for where in ("", "engine") for p in glob.glob(os.path.join(ROOT, where, "*.py"))]
    with open(os.path.join(ROOT, script), encoding="utf-8") as f:  # of the engine's files those that the script names
        imports = [node for node in ast.walk(ast.parse(f.read())) if isinstance(node, ast.ImportFrom)]
    imported = {alias.name for node in imports for alias in node.names}
    taken = {os.path.basename(p).removesuffix(".py") for p in paths}
    taken = {name for name in taken if os.path.exists(os.path.join(ROOT, f"{name}.py")) or name in imported}
    for path in paths:
        with open(path, encoding="utf-8") as f:
            tree = ast.parse(f.read())
        taken |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    with open(os.path.join(ROOT, script), encoding="utf-8") as f:
        names = [node.id for node in ast.walk(ast.parse(f.read()))
                 if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    keys = read_keys(os.path.join(ROOT, script)).keys()
    assert len(keys) > 30 and not keys & taken
    # epochs decides max_iters, where it is given
    assert {name for name in keys if names.count(name) > 1} == {"max_iters"}

"""configurator.py on a made-up script: what overrides what, and refusals that are one line."""
import contextlib
import glob
import itertools
import os
import re
import shlex
import subprocess
import sys

import pytest

from configurator import checked, configure, for_model, read_arguments, read_keys
from errors import BadInput
from tiny import ROOT, write

SCRIPT = '''"""A toy."""
out_dir = "out"  # where
count = 3  # how many [>= 1]
rate = 0.5  # how fast [> 0]
share = 0.25  # part [0..1]
shape = "flat"  # way [flat | round]
flag = False  # whether
speed = 1  # with flag or out_dir: in m/s
minutes = 0.0  # instead of count: how long
_hidden = 5  # no key
computed = count * 2  # no key
config, system = configure(globals(), "shared.py", limit=50)
late = 1  # no key
'''
OWN = dict(out_dir="out", count=3, rate=0.5, share=0.25, shape="flat", flag=False, speed=1,
           minutes=0.0)
SHARED = "# time\nlimit = 60  # longest wait [1..1000]\n"
DEFAULTS = OWN | dict(limit=50, script="toy.py")


def test_ctrl_c_is_one_line_even_before_torch_is_imported():
    program = "import errors; raise KeyboardInterrupt"
    said = subprocess.run([sys.executable, "-c", program], cwd=ROOT, text=True,
                          stderr=subprocess.PIPE)
    assert said.returncode == 130 and said.stderr.count("\n") == 1, said


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """configure, as the toy script calls it: toy("--count=4") -> all keys."""
    monkeypatch.chdir(tmp_path)
    write("toy.py", SCRIPT)
    write("shared.py", SHARED)

    def call(*argv):
        script = OWN | dict(__file__=str(tmp_path / "toy.py"), __doc__="A toy.", _hidden=5)
        config, system = configure(script, str(tmp_path / "shared.py"), list(argv), limit=50)
        assert {key: script[key] for key in OWN} == {key: config[key] for key in OWN}
        assert vars(system) == dict(limit=config["limit"])
        return config

    return call


def test_defaults_and_values_of_each_type(toy):
    assert toy() == DEFAULTS
    assert {name: key.default for name, key in read_keys("toy.py").items()} == OWN
    keys = toy("--count=7", "--rate=2", "--flag=True", "--out_dir=a=b", "--limit=9")
    assert keys == dict(DEFAULTS, count=7, rate=2.0, flag=True, out_dir="a=b", limit=9)
    assert type(keys["rate"]) is float
    for text, value in (("7", "7"), ("", ""), ("'a b'", "a b"), ("it's", "it's")):
        assert toy(f"--out_dir={text}")["out_dir"] == value


def test_a_key_of_a_script_that_is_a_shared_one_too(toy):
    """It is one key, with the script's default."""
    write("toy.py", f"limit = 70  # mine\n{SCRIPT}".replace(", limit=50", ""))
    for argv, limit in (([], 70), (["--limit=9"], 9)):
        script = OWN | dict(__file__="toy.py", limit=70)
        config, system = configure(script, os.path.abspath("shared.py"), argv)
        assert config["limit"] == system.limit == script["limit"] == limit


@pytest.mark.parametrize("argv", [*itertools.permutations(["one.py", "two.py", "--rate=3"])])
def test_the_command_line_wins_and_of_files_the_last(toy, argv):
    write("one.py", "import math as _math\n_half = 4\nrate = 1\ncount = _half // 2\nlimit = 10\n")
    write("two.py", "rate = 2.0\ncount = 5\n")
    last = [arg for arg in argv if arg.endswith(".py")][-1]
    assert toy(*argv) == dict(DEFAULTS, rate=3.0, limit=10, count=dict([("one.py", 2),
                                                                        ("two.py", 5)])[last])


@pytest.mark.parametrize("arg, words", [
    ("--cuont=3", ["'count'"]), ("--late=3", ["late"]), ("--_hidden=3", ["_hidden"]),
    ("--computed=3", ["computed"]), ("--count=2.5", ["count", "2.5"]), ("--count=", ["count"]),
    ("--flag=1", ["flag", "False"]), ("--rate=fast", ["rate", "fast"]), ("--rate=nan", ["rate"]),
    ("--count=0", ["[>= 1]", "how many"]), ("--share=1.01", ["[0..1]"]), ("--rate=0", ["[> 0]"]),
    ("--shape=square", ["[flat | round]"]), ("--limit=0", ["limit"]), ("--count", ["--count=3"]),
    ("--speed=2", ["speed", "flag"]), ("nowhere.py", ["nowhere.py"]), ("count=4", ["--key=value"]),
    # and files
    ("cuont = 3\n", ["'count'"]), ("count = 2.5\n", ["count (c.py)"]),
    ("count = 4\nrate = = 2\n", ["line 2"]), ("count = 4\nrate = 1 / 0\n", ["line 2", "Zero"]),
    ("def _f():\n    return _g()\n\ncount = _f()\n", ["line 2", "NameError"])])
def test_a_wrong_argument_or_file_is_one_line_that_names_it(toy, arg, words):
    if "\n" in arg:
        write("c.py", arg)
    if arg == "--speed=2":
        pytest.importorskip("options.mistakes")  # a fork may lack it
    with pytest.raises(BadInput) as e:
        toy("c.py" if "\n" in arg else arg)
    assert "\n" not in str(e.value) and all(word in str(e.value) for word in words), e.value


def test_a_key_for_one_model():
    given = {"3": "3", "policy=3,value=2": "2", "policy=3": "", "1,value=3": "3", "": ""}
    assert {text: for_model(text, "value") for text in given} == given
    with pytest.raises(BadInput, match="critic=3"):
        for_model("critic=3", "policy")


def test_each_config_file_fits_its_script_and_each_default_its_range():
    """A file of the repository names only keys that there are, with values that are allowed."""
    shared, names = read_keys(f"{ROOT}/config/keys.py"), ["ppo", "grpo", "sft", "rm"]
    names += ["recipes/dpo"] * os.path.exists(f"{ROOT}/recipes")  # a fork may lack them
    scripts = [read_keys(f"{ROOT}/{name}.py") | shared for name in names]
    for name, key in itertools.chain(*(keys.items() for keys in scripts)):
        checked(name, key.default, key, "default")
    for file in glob.glob(f"{ROOT}/config/*.py"):
        said = []
        for keys in scripts:
            with contextlib.suppress(BadInput):
                said.append(read_arguments(keys, [file]))
        assert said or file.endswith("_dpo.py") and len(names) == 4, file


def test_each_command_of_the_docs_fits_its_script(monkeypatch):
    """Config files and keys of the scripts' commands are there, with values that are allowed."""
    monkeypatch.chdir(ROOT)
    shared = read_keys("config/keys.py")
    for page in ["README.md", *glob.glob("docs/*.md")]:
        text = open(page, encoding="utf-8").read() if os.path.exists(page) else ""  # not in a fork
        for command in re.findall(
                r"(?m)^    (?!.*tools/)(?:.* )?((?:ppo|grpo|sft|rm)\.py [^\n]+)", text):
            script, *argv = shlex.split(command, comments=True)
            read_arguments(read_keys(script) | shared, argv)

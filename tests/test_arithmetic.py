"""data/arithmetic/prepare.py: the thinking, against sums done by hand and by a parser of its own; the files, from a real run."""
import json
import os
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

from completions import sft_row
from rows import prompt_row, read_rows

from conftest import ROOT

SCRIPT = os.path.join(ROOT, "data", "arithmetic", "prepare.py")
PROMPT = re.compile(r"([1-9]\d\d)\+([1-9]\d\d)=")
HOW = dict(capture_output=True, text=True, env=os.environ | dict(PYTHONPATH=os.path.join(ROOT, "data")))
SIZES = {"sft_train": 50_000, "sft_val": 500, "rl_train": 20_000, "rl_val": 500}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder after a run of a copy of the script in it, all rows by file, and what it printed."""
    folder = tmp_path_factory.mktemp("arithmetic")
    shutil.copy(SCRIPT, folder)
    done = subprocess.run([sys.executable, str(folder / "prepare.py")], cwd=folder.parent, **HOW)
    assert (done.returncode, done.stderr) == (0, "")
    rows = {name: [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()] for name in SIZES}
    return SimpleNamespace(folder=folder, rows=rows, printed=done.stdout)


def test_files_and_rows(made):
    assert sorted(os.listdir(made.folder)) == sorted([f"{n}.jsonl" for n in SIZES] + ["prepare.py", "tokenizer"])
    for name, size in SIZES.items():
        assert len(made.rows[name]) == size and f"{name}.jsonl: {size} rows" in made.printed
        fields = ["prompt", "completion" if name.startswith("sft") else "answer"]
        assert all(list(row) == fields for row in made.rows[name])
        shape = sft_row if name.startswith("sft") else prompt_row
        assert read_rows(str(made.folder / f"{name}.jsonl"), shape) == made.rows[name]
    prompts = [row["prompt"] for name in SIZES for row in made.rows[name]]
    assert len(set(prompts)) == len(prompts) == 71_000  # none is in two files
    for row in made.rows["rl_train"]:
        a, b = PROMPT.fullmatch(row["prompt"]).groups()
        assert row["answer"] == str(int(a) + int(b))


def parse(prompt, completion):
    """(a, b, column sums or None, answer as it stands) of a demonstration, with nothing left over."""
    a, b = PROMPT.fullmatch(prompt).groups()
    match = re.fullmatch(r"(?:<think>(.*)</think>)?(\d+)", completion)
    columns = match[1] and [[int(n) for n in re.fullmatch(r"(\d)\+(\d)\+([01])=(\d\d)", c).groups()] for c in match[1].split(";")]
    return int(a), int(b), columns, match[2]


def test_every_thinking_demonstration_is_right(made):
    for row in made.rows["sft_train"]:
        a, b, columns, answer = parse(row["prompt"], row["completion"])
        if columns is None:
            continue
        assert answer == str(a + b)
        assert [c[0] for c in columns] == [a % 10, a // 10 % 10, a // 100]
        assert [c[1] for c in columns] == [b % 10, b // 10 % 10, b // 100]
        assert [c[2] for c in columns] == [0, (a % 10 + b % 10) // 10, (a % 100 + b % 100) // 100]
        assert all(x + y + carry == total for x, y, carry, total in columns)
        assert columns[2][3] * 100 + columns[1][3] % 10 * 10 + columns[0][3] % 10 == a + b


def test_answers_without_thinking_are_right_in_one_of_ten(made):
    """The others are wrong in exactly one digit, and still numbers of the right length."""
    right, direct = 0, 0
    for row in made.rows["sft_train"]:
        a, b, columns, answer = parse(row["prompt"], row["completion"])
        if columns is not None:
            continue
        direct += 1
        differing = sum(x != y for x, y in zip(answer, str(a + b), strict=True))
        assert differing <= 1 and answer[0] != "0"
        right += differing == 0
    assert direct > 30_000
    assert abs(right / direct - 0.1) < 0.007  # four standard errors

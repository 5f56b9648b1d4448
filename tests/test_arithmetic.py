"""data/arithmetic/prepare.py: the thinking, against sums done by hand and by a parser of its own; the files, from a real run."""
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

from rows import prompt_row, read_rows, sft_row
from engine.tokenizers import load_tokenizer

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


@pytest.mark.parametrize("a, b, want", [
    (123, 456, "3+6+0=09;2+5+0=07;1+4+0=05"), (100, 100, "0+0+0=00;0+0+0=00;1+1+0=02"), (999, 999, "9+9+0=18;9+9+1=19;9+9+1=19"),
    (999, 101, "9+1+0=10;9+0+1=10;9+1+1=11"), (105, 905, "5+5+0=10;0+0+1=01;1+9+0=10"), (190, 190, "0+0+0=00;9+9+0=18;1+1+1=03"),
    (478, 367, "8+7+0=15;7+6+1=14;4+3+1=08"), (367, 478, "7+8+0=15;6+7+1=14;3+4+1=08"), (47, 15, "7+5+0=12;4+1+1=06;0+0+0=00")])
def test_think_by_hand(a, b, want):
    assert runpy.run_path(SCRIPT)["think"](a, b) == want


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


def test_the_tokenizer_covers_the_task(made):
    tokenizer = load_tokenizer(str(made.folder / "tokenizer"))
    assert tokenizer.vocab_size == 260 and (tokenizer.eos_id, tokenizer.pad_id) == (258, 259)
    longest = 0
    for row in made.rows["sft_train"][:2000] + made.rows["sft_val"]:
        (ids, trained), = tokenizer.encode_examples([row["prompt"]], [row["completion"]])
        prompt, completion = ids[:trained.index(True)], ids[trained.index(True):]
        assert prompt == [ord(ch) for ch in row["prompt"]]
        plain = re.split("(<think>|</think>)", row["completion"])
        want = [i for part in plain for i in ({"<think>": [256], "</think>": [257]}.get(part) or list(part.encode()))]
        assert completion == want + [258]
        assert tokenizer.decode(completion) == row["completion"]
        longest = max(longest, len(prompt + completion))
    assert longest == 8 + 2 + 3 * 8 + 2 + 4 + 1  # prompt, markers, columns, semicolons, a sum of four digits, EOS
    used = set("".join(row["prompt"] + row["completion"] for row in made.rows["sft_train"]))
    assert used == set("0123456789+=;<>/think")

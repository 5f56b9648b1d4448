"""data/convert.py: rows as they lie on the hub, by one command each; the columns that are left out; rows that make no sense."""
import functools
import json
import os
import random
import re
import sys

import pytest

from conftest import ROOT
from errors import BadInput
from completions import PAIR, preference_row, sft_row
from rows import prompt_row, read_rows
from tiny import assistant, jsonl, system, user

CONVERT = os.path.join(ROOT, "data", "convert.py")
sys.path.insert(0, os.path.dirname(CONVERT))
from convert import ours  # noqa: E402


S, U, A, B = system("s"), user("u"), assistant("a"), assistant("b")
ULTRA = {"prompt": "u", "prompt_id": "x", "chosen": [U, A], "rejected": [U, B], "messages": [U, A], "score_chosen": 8.0}
VERL = {"data_source": "x", "prompt": [U], "ability": "MATH", "reward_model": {"ground_truth": "34", "style": "rule"},
        "extra_info": {"index": 0}}
HUB = {  # name, split and options: (rows, the first row of our file, what is said of the others, of the columns)
    "gsm8k:main:train": ([{"question": "Two?", "answer": "1+1 = <<1+1=2>>2\n#### 1,002"}], {"prompt": "Two?", "answer": "1002"},
     "", ""),
    "DAPO-Math-17k:train": ([VERL], {"prompt": [U], "answer": "34"}, "", "ability, data_source, extra_info"),
    "Skywork-OR1-RL-Data:math": (
        [VERL | {"reward_model": {"ground_truth": r'["\\frac{1}{2}"]'}}, VERL | {"reward_model": {"ground_truth": ["a"]}}],
        {"prompt": [U], "answer": r"\frac{1}{2}"}, "; dropped 1: field 'answer'", "ability, data_source, extra_info"),
    "ultrafeedback_binarized:train_prefs": (
        [ULTRA, ULTRA | {"rejected": [U, A]}, ULTRA | {"rejected": [user("v"), B]}],
        {"prompt": [U], "chosen": [A], "rejected": [B]},
        "; dropped 1: chosen and rejected are the same; dropped 1: chosen and rejected have different prompts",
        "messages, prompt, prompt_id, score_chosen"),
    "hh-rlhf:harmless-base:train": (
        [{"chosen": "\n\nHuman: x\ny\n\nAssistant: go\n\nHuman: u\n\nAssistant: a",
          "rejected": "\n\nHuman: x\ny\n\nAssistant: go\n\nHuman: u\n\nAssistant: b"},
         {"chosen": "\n\nHuman: x\n\nAssistant: y", "rejected": "\n\nHuman: z\n\nAssistant: y"}],
        {"prompt": [user("x\ny"), assistant("go"), U], "chosen": [A], "rejected": [B]},
        "; dropped 1: chosen and rejected have different prompts", ""),
    "SlimOrca:train": (
        [{"conversations": [{"from": "system", "value": "s", "weight": None}, {"from": "human", "value": "u", "weight": 0.0},
                            {"from": "gpt", "value": "a", "weight": 1.0}]},
         {"conversations": [{"from": "gpt", "value": "I begin."}]}],
        {"prompt": [S, U], "completion": [A]}, "; dropped 1: ", ""),
    "OpenOrca:train --fields=question>prompt,response>completion": (
        [{"id": "x", "system_prompt": "s", "question": "u", "response": "a"}], {"prompt": [S, U], "completion": [A]}, "", "id"),
    "tulu-3-sft-mixture:train": ([{"id": "x", "messages": [U, A, U, B], "source": "y"}],
                                 {"prompt": [U], "completion": [A, U, B]}, "", "id, source"),
    "flags:train": (
        [{"messages": [S, U | {"train": True}, A | {"train": False, "mood": "x"}, U, B | {"loss": True, "train": None}, U,
                       A | {"weight": 0.0}]}, {"messages": [U, A | {"weight": 0}]}, {"messages": [U, A | {"weight": 0.5}, U, B]}],
        {"prompt": [S, U], "completion": [A | {"train": False, "mood": "x"}, U, B, U, A | {"weight": 0.0}]},
        "; dropped 1: a message has 'weight': 'N.N', which does not say whether it is learned as a whole; "
        'write "train": true or false; dropped 1: the dialogue', ""),
    "kto-mix-14k:train": ([{"prompt": [U], "completion": [A], "label": True}], None, "no row is left for .*: field 'label'", ""),
}


@pytest.fixture
def convert(run_here):
    """data/convert.py in this process: exit code, stdout, stderr."""
    return functools.partial(run_here, CONVERT)


@pytest.mark.parametrize("name", HUB)
def test_data_sets_of_the_hub(name, tmp_path, convert):
    """As a local folder in the layout of the hub; and what we write, we read."""
    rows, want, dropped, left = HUB[name]
    source, *options = name.split()
    set_name, *folder, split = source.split(":")
    place = tmp_path / set_name / (folder[0] if folder else "data")
    place.mkdir(parents=True)
    jsonl(place / f"{split}-00000-of-00001.jsonl", rows)
    code, stdout, stderr = convert(f"--source=hf:{tmp_path}/{source}", f"--out={tmp_path}/out.jsonl", *options)
    if want is None:
        assert code == 2 and re.fullmatch(f"convert.py: error: {dropped}.*\n", stderr) and not (tmp_path / "out.jsonl").exists()
        return
    assert (code, stderr) == (0, "")
    said, *columns = stdout.splitlines()
    assert said.startswith("out.jsonl: 1 rows" + dropped) and columns == ([f"left out: the columns {left}"] if left else [])
    assert [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()] == [want]
    shape = preference_row if "chosen" in want else sft_row if "completion" in want else prompt_row
    assert read_rows(f"{tmp_path}/out.jsonl", shape) == [want]


def test_rows_are_held_out(tmp_path, convert):
    rows = [{"task": f"{i % 300}?", "more": {"result": i % 300, "id": i}} for i in range(600)]  # each prompt twice
    (tmp_path / "theirs.json").write_text(json.dumps(rows))
    fields = "--fields=task>prompt,more.result>answer,more.id>id"
    options = f"--source={tmp_path}/theirs.json", fields, f"--out={tmp_path}/train.jsonl"
    code, stdout, stderr = convert(*options, "--val=0.1", "--chat")
    assert (code, stderr) == (0, "")
    train, val = (read_rows(str(tmp_path / f"{name}.jsonl"), prompt_row) for name in ("train", "train_val"))
    assert stdout == f"train.jsonl: {len(train)} rows\ntrain_val.jsonl: {len(val)} rows\nleft out: the columns more\n"
    assert 30 < len(val) < 90 and len(train) + len(val) == 600 and not {r["answer"] for r in train} & {r["answer"] for r in val}
    assert all(r == {"prompt": [user(r["answer"] + "?")], "answer": r["answer"], "id": r["id"]} for r in train + val)
    code, stdout, stderr = convert(*options, f"--source={tmp_path}/train_val.jsonl", "--val=0.1")  # which it would replace
    assert (code, stdout) == (2, "") and re.fullmatch("convert.py: error: .*train_val.jsonl.*\n", stderr), stderr


def test_what_is_replaced_and_what_is_left(tmp_path, convert):
    jsonl(tmp_path / "theirs.jsonl", [{"prompt": "a", "answer": "1"}])
    jsonl(tmp_path / "other.jsonl", [{"prompt": "a", "answer": "1"}])
    jsonl(tmp_path / "bad.jsonl", [{"label": True}])
    os.symlink(tmp_path / "nowhere", tmp_path / "link.jsonl")
    before = sorted(os.listdir(tmp_path))
    for source, out, words in (("theirs", "other", "other.jsonl"), ("theirs", "link", "link.jsonl"),
                               ("bad", "new", "no row is left"), ("theirs", "theirs", "theirs.jsonl"),
                               ("nowhere", "new", "nowhere.jsonl")):
        code, _, stderr = convert(f"--source={tmp_path}/{source}.jsonl", f"--out={tmp_path}/{out}.jsonl")
        assert code == 2 and stderr.count("\n") == 1 and words in stderr and sorted(os.listdir(tmp_path)) == before
    for source in ("theirs", "other"):  # what it has written, it writes again
        assert convert(f"--source={tmp_path}/{source}.jsonl", f"--out={tmp_path}/ours.jsonl")[0] == 0
    assert sorted(os.listdir(tmp_path)) == sorted([*before, "ours.jsonl"]) and not (tmp_path / "nowhere").exists()


def test_nothing_is_glued_whatever_comes():
    """Rows of random parts: each is refused in a line, or makes a dialogue whose messages are all there, in their order."""
    rng, made = random.Random(5), 0
    texts = ["u", "", "a b", None, 3, "\n\nHuman: u\n\nAssistant: c", "\ud800", ["x"], {}, "\n\nAssistant:"]

    def messages():
        if rng.random() < 0.5:  # a dialogue, as it should be
            return [[user(f"{rng.random()}"), assistant(f"{rng.random()}")][i % 2] for i in range(rng.choice([1, 2, 2, 4, 3]))]
        return [{rng.choice(["role"] * 9 + ["from"]): rng.choice(["user", "assistant", "system", "tool", 5, ["x"]]),
                 "content": rng.choice(texts[:3] * 3 + texts)} for _ in range(rng.randrange(5))]

    names = ["prompt", "completion", "chosen", "rejected", "messages", "conversations", "instruction", "input", "output",
             "answer", "question", "system", "tools", "label", "reward_model", "solution"]
    for _ in range(1500):
        row = {name: messages() if rng.random() < 0.5 else rng.choice(texts) for name in rng.sample(names, rng.randrange(1, 5))}
        if rng.random() < 0.4:
            start = messages()
            row |= {"chosen": start + messages(), "rejected": start + messages()}
        for kind, fields in (("sft", ["completion"]), ("preferences", PAIR), ("prompts", [])):
            try:
                got, left = ours(row, kind)
            except BadInput as e:
                assert "\n" not in str(e) and len(str(e)) < 600
                continue
            made += 1
            assert len({type(got[field]) for field in ["prompt", *fields]}) == 1 and left <= row.keys()
            for field in fields if isinstance(got["prompt"], list) else []:
                roles = [m["role"] for m in got["prompt"] + got[field]]
                assert set(roles) <= {"system", "user", "assistant"} and "system" not in roles[1:]
                assert got[field][0]["role"] == got[field][-1]["role"] == "assistant" and "user" in roles[:len(got["prompt"])]
                whole = row.get(field) if field != "completion" else row.get("messages")
                if isinstance(whole, list) and whole and whole[0]["role"] != "assistant" and "system" not in row:
                    assert got["prompt"] + got[field] == whole
    assert made > 100

"""data/convert.py: rows as they lie on the hub, by one command each; what is left out; bad rows."""
import json
import os

import pytest
from tiny import Started, assert_one_line, jsonl, read_jsonl

from data.convert import ours, true_answer
from demonstrations import dialogue
from errors import BadInput
from prompts import prompt_row, read_rows
from test_tokenizer import assistant, turn, user

S, U, A, B = turn("system", "s"), user("u"), assistant("a"), assistant("b")
ULTRA = {"prompt": "u", "prompt_id": "x", "chosen": [U, A], "rejected": [U, B], "messages": [U, A]}
VERL = {"data_source": "x", "prompt": [U], "reward_model": {"ground_truth": "34", "style": "rule"}}


def shareGPT(*said):
    return [{"from": who, "value": text, "weight": int(who == "gpt")} for who, text in said]


HUB = {  # source: (rows, the first row of our file, what is said of rows, of columns)
    "gsm8k:main:train": (
        [{"question": "Two?", "answer": "1+1 = <<1+1=2>>2\n#### 1,002"}],
        {"prompt": "Two?", "answer": "1002"}, "", ""),
    "MATH:train": (
        [{"problem": "Half?", "level": "1",
          "solution": r"\boxed{3}, so $\boxed{\frac{\sqrt{4}}{4}}$."},
         {"problem": "No?", "solution": "no box", "level": "2"}],
        {"prompt": "Half?", "answer": r"\frac{\sqrt{4}}{4}"}, "", "level, solution"),
    "DAPO-Math-17k:train": (
        [VERL, VERL | {"reward_model": {"ground_truth": ["a"]}}],
        {"prompt": [U], "answer": "34"}, "; dropped 1: field 'answer'", "data_source"),
    "ultrafeedback:train_prefs": (
        [ULTRA, ULTRA | {"rejected": [U, A]}, ULTRA | {"rejected": [user("v"), B]}],
        {"prompt": [U], "chosen": [A], "rejected": [B]},
        "; dropped 1: chosen and rejected are the same; "
        "dropped 1: chosen and rejected have different prompts", "messages, prompt, prompt_id"),
    "hh-rlhf:harmless-base:train": (
        [{"chosen": "\n\nHuman: x\ny\n\nAssistant: go\n\nHuman: u\n\nAssistant: a",
          "rejected": "\n\nHuman: x\ny\n\nAssistant: go\n\nHuman: u\n\nAssistant: b"},
         {"chosen": "\n\nHuman: x\n\nAssistant: y", "rejected": "\n\nHuman: z\n\nAssistant: y"}],
        {"prompt": [user("x\ny"), assistant("go"), U], "chosen": [A], "rejected": [B]},
        "; dropped 1: chosen and rejected have different prompts", ""),
    "SlimOrca:train": (
        [{"conversations": shareGPT(("system", "s"), ("human", "u"), ("gpt", "a"))},
         {"conversations": shareGPT(("gpt", "I begin."))}],
        {"prompt": [S, U], "completion": [A]}, "; dropped 1: field 'prompt'", ""),
    "OpenOrca:train": (
        [{"id": "x", "system_prompt": "s", "question": "u", "response": "a"}],
        {"prompt": [S, U], "completion": [A]}, "", "id"),
    "tulu-3-sft-mixture:train": (
        [{"id": "x", "messages": [U, A, U, B], "source": "y"},
         {"messages": [U, A | {"weight": 0}, U, B]}, {"messages": [U, A, U, B | {"train": False}]},
         {"messages": [U | {"loss": 0.0}, A | {"weight": 1, "train": None}, U | {"weight": 0}, B]}],
        {"prompt": [U], "completion": [A, U, B]}, "; dropped 1: field 'completion': 'train' is "
        "False, but each answer in it is learned; end the prompt behind this one; "
        "dropped 1: field 'completion': 'weight'", "id, source"),
    "alpaca:train": (
        [{"instruction": "Add.", "input": "1 2", "output": "3", "text": "t"}],
        {"prompt": [user("Add.\n\n1 2")], "completion": [assistant("3")]}, "", "text")}


def convert(folder, *args):
    return Started("data/convert.py", list(map(str, args)), str(folder)).wait()


@pytest.mark.parametrize("name", HUB)
def test_data_sets_of_the_hub(name, tmp_path):
    """As a local folder in the layout of the hub; and what is written, the scripts read."""
    rows, want, dropped, left = HUB[name]
    set_name, *folder, split = name.split(":")
    os.makedirs(place := tmp_path / set_name / "".join(folder or ["data"]))
    jsonl(place / f"{split}-00000-of-00001.jsonl", rows)
    result = convert(tmp_path, f"--source=hf:{tmp_path}/{name}", "--out=out/a.jsonl")
    assert result.codes == [0], result
    said, *columns = result.out[0].splitlines()
    count = 2 if name.startswith(("MATH", "tulu")) else 1
    assert said.startswith(f"a.jsonl: {count} rows{dropped}"), said
    assert columns == ([f"left out: the columns {left}"] if left else [])
    fields = want.keys() - {"prompt", "answer"}
    shape = (lambda row: dialogue(row, *fields)) if fields else prompt_row
    assert read_jsonl(tmp_path / "out/a.jsonl")[0] == want
    assert read_rows(f"{tmp_path}/out/a.jsonl", shape)[0] == want


NO_THOUSANDS = ["1,2,3", "0,5", "12,34", "1,2345", "0,125", "1,234,5", "1234,567", "(1,234)",
                "1,234 apples", "1, 234", ",234", "0.5", "007"]
NO_LISTS = ["[1, 2]", "[0, 1)", "[72]", "[]", "[x, y]", "[", "", r"[\frac{1}{2}, 3]"]
ANSWERS = {  # of others: ours
    "no #### 3 but\n#### 7 ": "7", "so 7,5\n#### 1,002": "1002",
    "#### -1,234,567.25": "-1234567.25", "#### 999,999": "999999", '["72"]': "72",
    ' ["x"] ': "x", '["a, b"]': "a, b", '["[1, 2]"]': "[1, 2]", r'["\\pi"]': r"\pi"}
SEVERAL = ['["72", "-72"]', "['72', '-72']", '["72", -72]', "('72', '-72')", '[["72"], ["-72"]]']


def test_answers_of_others():
    """Only commas between thousands are taken out; a list is an answer where it has one."""
    same = {f"#### {text}": text for text in NO_THOUSANDS} | {text: text for text in NO_LISTS}
    for text, want in (ANSWERS | same).items():
        assert true_answer(text) == want
    for text in SEVERAL:
        with pytest.raises(BadInput, match="the answer is a list"):
            ours(dict(problem="u", answer=text), "prompts")


def test_rows_are_held_out(tmp_path):
    """About a tenth of the prompts, by the prompt: each prompt, which comes twice, in one file."""
    rows = [{"task": f"{i % 300}?", "more": {"result": i % 300, "id": i}} for i in range(600)]
    (tmp_path / "theirs.json").write_text(json.dumps(rows))
    result = convert(
        tmp_path, "--source=theirs.json", "--fields=task>prompt,more.result>answer,more.id>id",
        "--out=train.jsonl", "--val=0.1", "--chat")
    assert result.codes == [0], result
    train, val = (read_rows(f"{tmp_path}/{name}.jsonl", prompt_row)
                  for name in ("train", "train_val"))
    assert 30 < len(val) < 90 and len(train) + len(val) == 600
    assert not {row["answer"] for row in train} & {row["answer"] for row in val}
    for row in train + val:
        assert row["prompt"] == [user(f"{row['answer']}?")]
        assert int(row["id"]) % 300 == int(row["answer"])


def test_no_source_is_overwritten(tmp_path):
    """By its name, another name of it, a link, or as the rows that are held out; nor a run's."""
    files = ["a.jsonl", "a_val.jsonl", "data/train.jsonl", "run/log.jsonl"]
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        jsonl(tmp_path / file, [dict(prompt=f"{i}", answer="1") for i in range(40)])
    (tmp_path / "run" / "config.json").write_text('{"out_dir": "run"}')
    os.symlink("a.jsonl", tmp_path / "link.jsonl")
    before = {file: (tmp_path / file).read_bytes() for file in files}
    for source, out, *more in (
            ("a_val.jsonl,a.jsonl", tmp_path / "a.jsonl"), ("a.jsonl", "link.jsonl"),
            ("a_val.jsonl", "a.jsonl", "--val=0.5"), ("hf:data:train", "data/train.jsonl"),
            ("a.jsonl", "run/log.jsonl")):
        result = convert(tmp_path, f"--source={source}", f"--out={out}", *more)
        assert_one_line(result, "convert.py", "overwritten", "--out")
        assert {file: (tmp_path / file).read_bytes() for file in files} == before, (source, out)
    result = convert(tmp_path, "--source=a.jsonl", "--out=a_val.jsonl")
    assert result.codes == [0] and "a_val.jsonl is there, and is replaced" in result.out[0]


@pytest.mark.parametrize("more", [
    dict(reasoning_content="why"), dict(thinking="why"),
    dict(tool_calls=[{"function": {"name": "f"}}])])
def test_a_message_that_is_more_than_its_content_is_refused(more):
    """Templates leave out what they do not know, and the rest would be learned as the whole."""
    key, whole, cut = *more, A | more, A | dict.fromkeys(more)
    for kind, row in (("sft", dict(messages=[U, whole])), ("sft", dict(messages=[U, whole, U, B])),
                      ("preferences", dict(prompt="u", chosen=[whole], rejected=[B])),
                      ("preferences", dict(prompt="u", chosen=[A], rejected=[B | more]))):
        with pytest.raises(BadInput, match=f"field '.*{key}"):  # by demonstrations.dialogue
            ours(row, kind)
    assert ours({"messages": [U, cut, U, B]}, "sft")[0] == dict(prompt=[U], completion=[A, U, B])
    if "call" not in key:  # it is the template that forgets thoughts
        asked = [U, whole, U]
        assert ours({"messages": asked}, "prompts")[0] == dict(prompt=asked)
        assert dialogue(dict(prompt=asked, completion=[B]), "completion")["prompt"] == asked


def test_alpacas_history_becomes_the_earlier_turns():
    alpaca = dict(instruction="u", output="b", history=[["x", "a"], ["y", "c"]])
    turns = [user("x"), A, user("y"), assistant("c")]
    for more, want in ((dict(system="s"), [S, *turns, U]), (dict(history=None), [U]),
                       (dict(input="v"), [*turns, user("u\n\nv")])):
        assert ours(alpaca | more, "sft") == (dict(prompt=want, completion=[B]), set())
        assert ours(alpaca | more, "prompts")[0]["prompt"] == want
    for bad in ("old", ["x", "a"], [["x"]], [["x", None]]):
        with pytest.raises(BadInput, match="history|prompt"):
            ours(alpaca | dict(history=bad), "sft")

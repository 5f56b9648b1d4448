"""The rules of rewards.py, and the key reward_functions: which functions it names, how they are called, what they may give."""
import sys

import numpy as np
import pytest
import torch

from conftest import ROOT
from engine.reward_mix import call_rewards, check_rows, files_of, parse_rewards
from errors import BadInput, Stop
from rewards import RULES, accuracy, format, length, thinks

CHAT = [dict(role="user", content="7?"), dict(role="assistant", content="<think>")]
BATCH = dict(completions=["a", "bb", "ccc"], rows=[dict(prompt="one", answer=1), dict(prompt="two", level=2), dict(prompt=CHAT)])


def called(function, batch=BATCH):
    return call_rewards([(1.0, "mine", function)], batch)["mine"]


# rules

FORMATS = {
    1: ["<think>a</think>b", " \n<think>\na\n</think>\n\nb\n", "<think>a</think>\n<answer>\nb\n</answer>\n"],
    0: ["", "b", "<think>a</think> \n", "<think>a", "well <think>a</think>b", "</think>a<think>b", "<think>a</think>b</think>c",
        "<think>a</think><answer> </answer>", "<think>a</think><answer>c</answer>d", "<answer>b</answer><think>a</think>"]}


def test_format():
    for score, texts in FORMATS.items():
        assert format(dict(completions=texts, rows=[dict(prompt="?")] * len(texts))).tolist() == [score] * len(texts)


# the key reward_functions

MINE = """
from dataclasses import dataclass

@dataclass
class Word:
    text: str

number = 5

def brevity(batch):
    return [1.0 / (1 + len(c)) for c in batch["completions"]]

def broken(batch):
    rows = batch["rows"]
    return [row["missing"] for row in rows]
"""


def test_parse_rewards(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    assert parse_rewards(" 2 * length , -0.5*thinks,1e-1*format ", RULES, ".") == [
        (2.0, "length", length), (-0.5, "thinks", thinks), (0.1, "format", format)]
    spec = "accuracy,-0.5*mine.py:brevity,mine.py:broken"
    rewards = parse_rewards(spec, RULES, str(tmp_path))
    assert [(w, n) for w, n, _ in rewards] == [(1.0, "accuracy"), (-0.5, "brevity"), (1.0, "broken")]
    assert rewards[1][2].__globals__ is rewards[2][2].__globals__  # the file was imported once
    assert rewards[1][2](dict(completions=["abc", ""])) == [0.25, 1.0] and files_of(spec) == ["mine.py"]


def test_what_only_a_named_reward_needs_is_loaded_by_its_name():
    import subprocess
    code = ("import sys, rewards\nloaded = lambda: [m for m in ('engine.sandbox', 'engine.expressions') if m in sys.modules]\n"
            "a = loaded()\nrewards.reward_terms('code')\nprint(a, loaded())")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "[] ['engine.sandbox']\n", done.stderr


BAD = [
    ("", "reward_functions"), ("2*", "'2*'"), ("acuracy", "'accuracy'"), ("nan*accuracy", "'nan'"),
    ("accuracy,2*accuracy", "accuracy"),
    ("other.py:f", "other.py"), ("mine.py:brevty", "'brevty'"), ("syntax.py:f", "syntax.py, line 2: "),
    ("leaves.py:f", "leaves.py, line 1: "), ("takes.py:format", "'format'")]


def test_bad_specs_are_one_line(tmp_path):
    files = dict(mine=MINE, syntax="x = 1\ndef f(:\n", leaves="raise SystemExit(3)\n", takes="def format(batch): pass\n")
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text)
    for spec, named in BAD:
        with pytest.raises(BadInput) as e:
            parse_rewards(spec, RULES, str(tmp_path))
        assert named in str(e.value) and "\n" not in str(e.value), spec


def test_check_rows(monkeypatch):
    monkeypatch.setattr("engine.sandbox.check_sandbox", lambda: None)  # is for the code of responses
    rows = [dict(prompt="?", answer="7", tests=[dict(stdin="", stdout="")]), dict(prompt="?", answer=0.5,
        tests="assert f(1) == 2")]
    rewards = parse_rewards("accuracy,format,length,thinks,code", RULES, ".") + [(1.0, "mine", len)]
    check_rows(rewards, rows, "data.jsonl")
    check_rows(rewards[1:4], [dict(prompt="?")], "data.jsonl")
    for field, name in (("answer", "accuracy"), ("tests", "code")):
        short = {k: x for k, x in rows[1].items() if k != field}
        for bad in (short, short | {field: None}):
            with pytest.raises(BadInput, match=f"^data.jsonl, row 2: .*'{name}'") as e:
                check_rows(rewards, [rows[0], bad], "data.jsonl")
            assert repr(field) in str(e.value)
    with pytest.raises(BadInput, match='--fields="solution>answer"'):
        check_rows(rewards[:1], [dict(prompt="?", solution="7")], "data.jsonl")
    for answer in (True, [72], {}, " "):
        with pytest.raises(BadInput, match="^data.jsonl, row 1: the field 'answer'"):
            check_rows(rewards, [rows[0] | dict(answer=answer)], "data.jsonl")
    with pytest.raises(BadInput, match="^data.jsonl, row 2: "):
        check_rows(rewards, [rows[0], rows[1] | dict(tests="f(1)")], "data.jsonl")


# calling them


def test_tensors_arrays_lists_and_none_are_scores():
    for returned in ([1, 2.5, True], (1, 2.5, True), torch.tensor([1, 2.5, 1], dtype=torch.bfloat16, requires_grad=True),
                     np.array([1, 2.5, 1], dtype=np.float16), [torch.tensor(1), np.float32(2.5), np.int64(1)]):
        assert called(lambda batch, returned=returned: returned).tolist() == [1, 2.5, 1]
    assert called(None, dict(completions=[], rows=[])).shape == (0,)
    given = called(lambda batch: [1, None, np.float32(2)])  # None: it does not apply
    assert given.isnan().tolist() == [False, True, False] and given[[0, 2]].tolist() == [1, 2]


def test_other_results_stop_the_run_by_name():
    for returned, named in (([1, 2], "(2,)"), (None, "NoneType"), (torch.ones(3, 1), "(3, 1)"), ([1, float("nan"), 2], "'two'"),
                            ([None, "1", 3], "'1'"), ([10**400, 1, 2], "'one'")):
        with pytest.raises(Stop, match="^reward 'mine' ") as e:
            called(lambda batch, returned=returned: returned)
        assert named in str(e.value) and "\n" not in str(e.value)


def test_an_error_is_named_with_its_line(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    with pytest.raises(Stop, match=f"^reward 'broken' failed at {tmp_path / 'mine.py'}, line 15: KeyError: 'missing'$"):
        call_rewards(parse_rewards("mine.py:broken", RULES, str(tmp_path)), BATCH)
    with pytest.raises(Stop, match="'mine' failed.*: SystemExit: 3$"):
        called(lambda batch: sys.exit(3))
    with pytest.raises(BadInput, match="^as it was$"):
        called(lambda batch: (_ for _ in ()).throw(BadInput("as it was")))
    with pytest.raises(Stop, match="'accuracy' .*no 'answer' in the row with the prompt 'two'"):
        call_rewards([(1.0, "accuracy", accuracy)], BATCH)


def test_async_functions_are_awaited():
    """What one makes in a call, it can use in the next: all run in one event loop."""
    import asyncio

    events = []

    async def grader(batch):
        events.append(events[0] if events else asyncio.Event())
        asyncio.get_running_loop().call_soon(events[-1].set)
        await asyncio.wait_for(events[-1].wait(), 5)
        events[-1].clear()
        return [len(text) for text in batch["completions"]]

    async def broken(batch):
        return {}["nothing"]

    for _ in range(2):
        assert called(grader).tolist() == [1, 2, 3]
    with pytest.raises(Stop, match=f"^reward 'mine' failed at {__file__}, line [0-9]+: KeyError: 'nothing'$"):
        called(broken)


TRL = """
seen = {}

def bare(**kwargs):
    seen.update(kwargs)
    return [len(answer or "") for answer in kwargs["answer"]]

def few(completions, level):
    seen.update(completions=completions, level=level)
    return [1.0] * len(completions)

class Judge:
    def __call__(self, completions, completion_ids, **kwargs):
        seen.update(kwargs, completions=completions, completion_ids=completion_ids)
        return [float(len(ids)) for ids in completion_ids]

grader = Judge()

def wants(completions, trainer_state):
    return [0.0] * len(completions)

def ours(batch):
    return [float("rows" in batch)] * len(batch["rows"])
"""


def test_trls_signature(tmp_path):
    (tmp_path / "mine.py").write_text(TRL)
    names = ["bare", "few", "grader", "ours"]
    rewards = parse_rewards(",".join(f"mine.py:{name}" for name in names), RULES, str(tmp_path))
    seen = rewards[0][2].__globals__["seen"]
    rows = [dict(prompt="one", answer="1", completion="x"), dict(prompt="two", level=2), dict(prompt=CHAT, answer="333")]
    check_rows(rewards, rows, "rows.jsonl")
    batch = dict(rows=rows, completions=["a", "bb", "ccc"], tokens=torch.arange(15).view(3, 5),
                 response_mask=torch.tensor([[1, 0, 0], [1, 1, 0], [1, 1, 1]]).bool(), prompts=["<one>", "<two>", "<7?"])
    want = dict(prompts=["one", "two", CHAT], completions=["a", "bb", [dict(role="assistant", content="<think>ccc")]],
                answer=["1", None, "333"], level=[None, 2, None], completion_ids=[[2], [7, 8], [12, 13, 14]])
    given = {}
    for reward in rewards:
        seen.clear()
        given |= call_rewards([reward], batch)
        expected = {k: x for k, x in want.items() if reward[1] != "few" or k in ("completions", "level")}
        if not reward[1].startswith("ours"):
            assert seen == expected, reward[1]
    assert {k: x.tolist() for k, x in given.items()} == dict(
        bare=[1, 0, 3], few=[1, 1, 1], grader=[1, 2, 3], ours=[1, 1, 1])
    with pytest.raises(BadInput, match="^rows.jsonl: .*'few'.*'level'.*'prompt', 'answer'$"):
        check_rows(rewards[1:2], rows[2:], "rows.jsonl")
    with pytest.raises(BadInput, match="'wants'.*'trainer_state'"):
        check_rows(parse_rewards("mine.py:wants", RULES, str(tmp_path)), rows, "rows.jsonl")

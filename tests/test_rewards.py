"""
rewards.py and options/foreign_rewards.py: the rules; the key reward_functions, which functions it names, how they are called,
what they may give; where a reward model's score is read. (Scores of whole runs: test_by_hand.py.)
"""
import asyncio
import collections
import http.server
import json
import math
import re
import sys
import textwrap
import threading

import numpy as np
import pytest
import torch

import tiny
from conftest import ROOT
from errors import BadInput, Stop
from options.foreign_rewards import as_ours
from rewards import (alike_for_equal_texts, call_rewards, check_rows, format, last_real, length, reward_terms, score_sequences,
                     thinks)
from run_folder import code_files

CHAT = [tiny.user("7?"), tiny.assistant("<think>")]
BATCH = dict(completions=["a", "bb", "ccc"], rows=[dict(prompt="one", answer=1), dict(prompt="two", level=2), dict(prompt=CHAT)])


def called(function, batch=BATCH):
    return call_rewards([(1.0, "mine", as_ours(function, "mine"))], batch)["mine"]


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

def brevity(batch):
    return [1.0 / (1 + len(c)) for c in batch["completions"]]

def broken(batch):
    rows = batch["rows"]
    return [row["missing"] for row in rows]

def down(batch):  # the server is gone in the third call: the first evaluation and a rollout are over
    import os
    global calls
    calls = globals().get("calls", 0) + 1
    if calls > 2 and os.path.exists("../nobody-answers"):
        raise ConnectionRefusedError("nobody is there")
    return [len(text) / 8 for text in batch["completions"]]
"""


def test_parse_rewards(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    assert reward_terms(" 2 * length , -0.5*thinks,1e-1*format ", ".") == [
        (2.0, "length", length), (-0.5, "thinks", thinks), (0.1, "format", format)]
    spec = "accuracy,-0.5*mine.py:brevity,mine.py:broken"
    rewards = reward_terms(spec, str(tmp_path))
    assert [(w, n) for w, n, _ in rewards] == [(1.0, "accuracy"), (-0.5, "brevity"), (1.0, "broken")]
    assert rewards[1][2].__wrapped__.__globals__ is rewards[2][2].__wrapped__.__globals__  # the file was imported once
    assert rewards[1][2](dict(completions=["abc", ""], rows=[{}, {}])) == [0.25, 1.0]
    assert code_files(dict(reward_functions=spec)) == ["mine.py"]
    with pytest.raises(Stop, match=f"^reward 'broken' failed at {tmp_path / 'mine.py'}, line 13: KeyError: 'missing'$"):
        call_rewards(rewards, BATCH | dict(rows=[dict(prompt="?", answer=1)] * 3))


BAD = [  # the key, what the line names
    ("", "reward_functions"), ("2*", "'2*'"), ("acuracy", "accuracy, "), ("nan*accuracy", "'nan'"),
    ("accuracy,2*accuracy", "'accuracy'"), ("other.py:f", "other.py"), ("mine.py:brevty", "'brevty'"),
    ("syntax.py:f", "syntax.py, line 2: "), ("leaves.py:f", "leaves.py, line 1: "), ("takes.py:format", "'format'")]


def test_bad_specs_are_one_line(tmp_path):
    files = dict(mine=MINE, syntax="x = 1\ndef f(:\n", leaves="raise SystemExit(3)\n", takes="def format(batch): pass\n")
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text)
    for spec, named in BAD:
        with pytest.raises(BadInput) as e:
            reward_terms(spec, str(tmp_path))
        assert named in str(e.value) and "\n" not in str(e.value), spec


GOOD = dict(prompt="?", answer="7", tests=[dict(stdin="", stdout="")])
BAD_ROWS = [  # a second row, and what the line says
    (dict(prompt="?"), "'accuracy' needs the field 'answer'"), (dict(prompt="?", answer=1), "'code' needs the field 'tests'"),
    (GOOD | dict(answer=None), "'answer'"), (GOOD | dict(tests=None), "'tests'"),
    (GOOD | dict(tests="f(1)"), "assertion"), (dict(prompt="?", solution="7"), '--fields="solution>answer"')]


def test_rows_must_have_what_the_rewards_need(monkeypatch):
    monkeypatch.setattr("grading.sandbox.check_sandbox", lambda: None)  # is for the code of responses
    rewards = reward_terms("accuracy,format,length,thinks,code", ".") + [(1.0, "mine", len)]
    check_rows(rewards, [GOOD, GOOD | dict(answer=0.5, tests="assert f(1) == 2")], "data.jsonl")
    check_rows(rewards[1:4], [dict(prompt="?")], "data.jsonl")
    for bad, said in BAD_ROWS:
        with pytest.raises(BadInput, match=f"^data.jsonl, row 2: .*{said}"):
            check_rows(rewards, [GOOD, bad], "data.jsonl")


# calling them


def test_tensors_arrays_lists_and_none_are_scores():
    for returned in ([1, 2.5, True], (1, 2.5, True), torch.tensor([1, 2.5, 1], dtype=torch.bfloat16, requires_grad=True),
                     np.array([1, 2.5, 1], dtype=np.float16), [torch.tensor(1), np.float32(2.5), np.int64(1)]):
        assert called(lambda batch, returned=returned: returned).tolist() == [1, 2.5, 1]
    assert called(len, dict(completions=[], rows=[])).shape == (0,)
    given = called(lambda batch: [1, None, np.float32(2)])  # None: it does not apply
    assert given.isnan().tolist() == [False, True, False] and given[[0, 2]].tolist() == [1, 2]


def fails(batch):
    raise BadInput("as it was")


async def broken(batch):
    return {}["nothing"]


class Unlistable:
    def tolist(self):
        return {}["no list"]


FAILURES = [  # what a function returns, or a function; what the line says
    ([1, 2], r"\[1, 2\]"), (None, "NoneType"), (torch.ones(3, 1), "'one'"), ([1, float("nan"), 2], "'two'"),
    ([None, "1", 3], "'1'"), ([10**400, 1, 2], "'one'"), (lambda batch: sys.exit(3), "SystemExit: 3$"),
    (Unlistable(), "KeyError: 'no list'$"), (broken, f"failed at {__file__}, line [0-9]+: KeyError: 'nothing'$")]


def test_what_fails_stops_the_run_by_name():
    for case, named in FAILURES:
        with pytest.raises(Stop, match=f"^reward 'mine' .*{named}") as e:
            called(case if callable(case) else lambda batch, case=case: case)
        assert "\n" not in str(e.value)
    with pytest.raises(BadInput, match="^as it was$"):
        called(fails)


def test_async_functions_are_awaited():
    """What one makes in a call, it can use in the next: all run in one event loop."""
    loops = []

    async def grader(batch):
        loops.append(asyncio.get_running_loop())
        await asyncio.sleep(0)
        return [len(text) for text in batch["completions"]]

    for _ in range(2):
        assert called(grader).tolist() == [1, 2, 3]
    assert loops[0] is loops[1]


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
"""


def test_trls_signature(tmp_path):
    (tmp_path / "mine.py").write_text(TRL)
    rewards = reward_terms("mine.py:bare,mine.py:few,mine.py:grader", str(tmp_path))
    seen = rewards[0][2].__wrapped__.__globals__["seen"]
    rows = [dict(prompt="one", answer="1", completion="x"), dict(prompt="two", level=2), dict(prompt=CHAT, answer="333")]
    check_rows(rewards, rows, "rows.jsonl")
    batch = dict(rows=rows, completions=["a", "bb", "ccc"], tokens=torch.arange(15).view(3, 5),
                 response_mask=torch.tensor([[1, 0, 0], [1, 1, 0], [1, 1, 1]]).bool(), prompts=["<one>", "<two>", "<7?"])
    want = dict(prompts=["one", "two", CHAT], completions=["a", "bb", [tiny.assistant("<think>ccc")]],
                answer=["1", None, "333"], level=[None, 2, None], completion_ids=[[2], [7, 8], [12, 13, 14]])
    scores = dict(bare=[1, 0, 3], few=[1, 1, 1], grader=[1, 2, 3])
    for reward in rewards:
        seen.clear()
        assert call_rewards([reward], batch)[reward[1]].tolist() == scores[reward[1]]
        assert seen == {k: x for k, x in want.items() if reward[1] != "few" or k in ("completions", "level")}, reward[1]
    with pytest.raises(BadInput, match="^rows.jsonl: .*'few'.*'level'.*'prompt', 'answer'$"):
        check_rows(rewards[1:2], rows[2:], "rows.jsonl")
    with pytest.raises(BadInput, match="'wants'.*'trainer_state'"):
        check_rows(reward_terms("mine.py:wants", str(tmp_path)), rows, "rows.jsonl")


def test_a_grader_that_is_down_saves_the_run(world, tmp_path):
    """Which then goes on as if nothing was."""
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "nobody-answers").write_text("")
    mine = world.grpo("out", reward_functions=f"{tmp_path}/mine.py:down", reward_timeout=1)
    down, = tiny.in_a_row(tmp_path, dict(down=tiny.one_run("grpo.py", mine)))["down"]
    assert down["kind"] == "Stop" and down["message"].startswith(f"reward 'down' failed at {tmp_path}/mine.py, line ")
    assert "nobody is there" in down["message"] and (tmp_path / "down" / "out" / "checkpoint-000001").is_dir()

    (tmp_path / "nobody-answers").unlink()
    jobs = dict(again=tiny.one_run("grpo.py", mine) | dict(folder="down"), steady=tiny.one_run("grpo.py", mine))
    tiny.in_a_row(tmp_path, jobs).succeeded()
    assert len(tiny.assert_same_run(f"{tmp_path}/down/out", f"{tmp_path}/steady/out")) == 4


# the reward model


class CountingModel(torch.nn.Module):
    """A reward model whose scalar at a token is 1000 * how many real tokens there are up to it, plus the token."""

    def __init__(self):
        super().__init__()
        self.score = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
        self.calls = []  # the lengths of each

    def scores(self, tokens, last):
        self.calls.append((last + 1).tolist())
        return (1000 * (last + 1) + tokens[torch.arange(len(tokens)), last]).double()


@pytest.mark.parametrize("micro_batch_size", [1, 3, 50])
def test_the_last_token_is_read_whatever_it_is(micro_batch_size):
    """EOS and pad ids inside a sequence, or at its ends, mislead nobody; passes are added where others have more texts."""
    sequences, model = [[5, 2, 7, 2], [2, 2, 2], [3, 2, 2, 2, 9, 2, 4, 4, 8], [6], [2, 8, 8, 8, 0]], CountingModel()
    assert score_sequences(model, sequences, micro_batch_size, "cpu").tolist() == [4002, 3002, 9008, 1006, 5000]
    assert len(model.calls) == -(-5 // micro_batch_size) and max(map(len, model.calls)) <= micro_batch_size
    assert sorted(sum(model.calls, [])) == [1, 3, 4, 5, 9]  # no padding at all
    assert score_sequences(model, [], micro_batch_size, "cpu", 2).shape == (0,) and model.calls[-2:] == [[1], [1]]


def test_the_last_real_token_stands_where_the_mask_ends():
    mask = torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1], [1, 0, 1, 0], [1, 0, 0, 0], [0, 0, 0, 1]]).bool()
    assert last_real(mask).tolist() == [2, 3, 2, 0, 3]


def test_equal_texts_have_equal_scores():
    """The first one's; and padding that looks like a token makes no two texts equal."""
    tokens = torch.tensor([[5, 6, 7], [0, 6, 7], [5, 6, 7], [0, 6, 7], [0, 6, 7], [5, 6, 8], [5, 6, 7]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 1], [0, 1, 1], [0, 1, 1], [1, 1, 1], [1, 1, 0]]).bool()
    scores = torch.tensor([1.0, 2.0, 1.5, 3.0, 4.0, 5.0, 6.0])
    found = alike_for_equal_texts(scores, dict(tokens=tokens, attention_mask=mask))
    assert found.tolist() == [1, 2, 1, 3, 3, 5, 6]


# --------------------------------------------------------------------------------------------------
# the examples of docs/rewards.md

CHATS = [[tiny.user(text)] for text in ("Say 7.", "Say nothing.", "Fail twice.", "Fail always.")]
ANSWERS = ["7", "Say nothing. I do.", "8", "?"]


def example_of(function):
    """The block of code in docs/rewards.md that has this function."""
    with open(f"{ROOT}/docs/rewards.md", encoding="utf-8") as f:
        blocks = re.findall(r"(?:^    .*\n|^\n)+", f.read(), re.MULTILINE)
    block, = (block for block in blocks if f"def {function}(" in block)
    return textwrap.dedent(block)


def test_the_example_for_chats(tmp_path):
    (tmp_path / "mine.py").write_text(example_of("no_echo"))
    (_, name, function), = reward_terms("mine.py:no_echo", str(tmp_path))
    batch = dict(rows=[dict(prompt=chat) for chat in CHATS], prompts=["..."] * 4, completions=ANSWERS)
    assert name == "no_echo" and list(function(batch)) == [1, 0, 1, 1]


class Judge(http.server.BaseHTTPRequestHandler):
    """A server in OpenAI's form that likes numbers; asked about failing, it answers with 503, or no number."""
    asked = collections.Counter()

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        told = body["messages"][0]["content"]
        self.asked[told] += 1
        assert self.headers["Authorization"] == "Bearer secret" and body["model"] == "a judge"
        twice = "Fail twice." in told
        self.send_response(503 if twice and self.asked[told] < 3 else 200)
        self.end_headers()
        said = "no number" if "Fail always." in told else "8" if twice or "Answer: 7" in told else "2.5"
        self.wfile.write(json.dumps({"choices": [{"message": {"role": "assistant", "content": said}}]}).encode())

    def log_message(self, *_):
        pass


def test_the_example_of_a_judge_behind_http(tmp_path, monkeypatch):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name, value in dict(JUDGE_URL=f"http://127.0.0.1:{server.server_port}/v1/chat/completions",
                            JUDGE_KEY="secret", JUDGE_MODEL="a judge").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    (tmp_path / "mine.py").write_text(example_of("judged"))
    (_, _, function), = reward_terms("mine.py:judged", str(tmp_path))
    batch = dict(rows=[dict(prompt=chat) for chat in CHATS], prompts=["..."] * 4, completions=ANSWERS)
    scores = list(function(batch))
    server.shutdown()
    assert scores[:3] == [0.8, 0.25, 0.8] and math.isnan(scores[3])
    assert sorted(Judge.asked.values()) == [1, 1, 3, 4]

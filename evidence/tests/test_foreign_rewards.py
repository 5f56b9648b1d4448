"""
options/foreign_rewards.py and options/user_code.py: which functions the key reward_functions names,
how they are called, what they may return; async ones; the signature of TRL. And rules that give a
number to each token (options/token_rewards.py).
"""
import contextlib
import os
import re
import signal
import sys
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from errors import BadInput, Stop
from options import time_limit
from options.foreign_rewards import as_scores, load_reward
from options.token_rewards import token_at
from prompts import Rows
from rewards import check_rows, reward_terms, score_batch
from test_tokenizer import assistant, user
from tokenizer import load_tokenizer

import test_tokenizer
import tiny

blanks, chat, toy = test_tokenizer.blanks, test_tokenizer.chat, test_tokenizer.toy  # fixtures
NAN = float("nan")

CHAT = [dict(role="user", content="7?"), dict(role="assistant", content="<think>")]
ROWS = [dict(prompt="one", answer=1), dict(prompt="two", level=2), dict(prompt=CHAT)]
BATCH = dict(completions=["a", "bb", "ccc"], rows=ROWS, seconds=20)


def test_a_helper_lies_beside_the_file(tmp_path, monkeypatch):
    """And has no name of quartet's; but the file itself may."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    os.mkdir(tmp_path / "lib_of_mine")
    os.mkdir(tmp_path / "other")
    for name, text in {
            "helper_of_mine": "from lib_of_mine import more\nSIZE = 6\n",
            "lib_of_mine/more": "three = 3\n", "prompts": "",
            "1": "if True:\n  from prompts import mine\ndef f(batch): pass\n",
            "other/helper_of_mine": "SIZE = 7\n",
            "other/mine": "import helper_of_mine\ndef f(batch): pass\n"}.items():
        tiny.write(tmp_path / f"{name}.py", text)
    tiny.write(tmp_path / "rewards.py", """
import json, torch
from grading.expressions import math_answer   # quartet's
from rewards import last_real                 # quartet's, too
from helper_of_mine import SIZE, more

def f(batch):
    from lib_of_mine.more import three
    assert more.three == three and last_real and math_answer
    return [SIZE, three, torch.ones(1)]
""")
    (_, _, reward), = reward_terms("rewards.py:f")
    assert reward(BATCH) == [6, 3, 1]
    # a file in another folder would get the helper of the first one
    for file, helper in (("1", "prompts"), ("other/mine", "helper_of_mine")):
        with pytest.raises(BadInput, match=f"rename .*/{os.path.dirname(file)}/?{helper}.py"):
            reward_terms(f"{file}.py:f")


NUMBERS = [  # what a rule may return for 1, 2.5, 1
    [1, 2.5, True], (1, 2.5, True), np.array([1, 2.5, 1], dtype=np.float16),
    torch.tensor([1, 2.5, 1], dtype=torch.bfloat16, requires_grad=True),
    [torch.tensor(1), np.float32(2.5), np.int64(1)]]
NO_NUMBERS = [  # and what it may not: a part of the line
    ([1, 2], r"\[1, 2\]"), (None, "NoneType"), (torch.ones(3, 1), r"\(3, 1\)"),
    (torch.tensor(3.0), "float"), ([1, float("nan"), 2], "'two'"), ([None, "1", 3], "'1'"),
    ([10**400, 1, 2], "'one'"), ([1, 2, float("inf")], "'7\\?'"), ([1e39, 1, 2], "'one'")]


def test_scores_are_numbers_and_other_values_stop_the_run():
    for returned in NUMBERS:
        assert as_scores("mine", returned, BATCH) == [1, 2.5, 1]
    given = as_scores("mine", [1, None, np.float32(2)], BATCH)  # None: it does not apply
    assert given[0] == 1 and given[1] != given[1] and given[2] == 2
    for returned, part in NO_NUMBERS:
        with pytest.raises(Stop, match=f"^reward 'mine' .*{part}") as e:
            as_scores("mine", returned, BATCH)
        assert "\n" not in str(e.value)


TOKENS = [  # of two responses: the scores and token_rewards of the weight 2, or a part of the line
    (torch.tensor([[0, 0.5, 1, 0], [0, -1, 0, 0]]), [3.0, -2.0], [[0, 1, 2, 0], [0, -2, 0, 0]]),
    (np.array([[0, 0.5, 1, 0]] * 2, dtype="float32"), [3.0, 3.0], [[0, 1, 2, 0]] * 2),
    (torch.tensor([[False, True, True, False]] * 2), [4.0, 4.0], [[0, 2, 2, 0]] * 2),
    (torch.tensor([[0, NAN, NAN, 0], [0, 1, 1, 0]]), [NAN, 4.0], [[0] * 4, [0, 2, 2, 0]]),
    ([1, 0.5], [2.0, 1.0], [[0] * 4] * 2),
    (torch.tensor([[0, 1, 1, 0], [0, 1, 1, 5]]), "5.0 in column 3 of the row with the prompt 'b'"),
    (torch.tensor([[0.5, 1, 1, 0]] * 2), "0.5 in column 0 of the row with the prompt 'a': a token"),
    (torch.tensor([[0, 1, 1e39, 0]] * 2), "inf in column 2 .* no finite number"),
    (torch.tensor([[0, 1, 1, NAN]] * 2), "nan in column 3"),
    (torch.ones(2, 3), r"\(2, 3\): wanted .* \(2,\), or .*\(2, 4\)"),
    ([[0, 1, 1, 0]] * 2, "tensor")]


def test_numbers_of_tokens(monkeypatch):
    """The sum is the score, each number stays at its token."""
    monkeypatch.setattr("rewards.texts_of", lambda *_: dict(
        completions=["x", "y"], rows=[dict(prompt="a"), dict(prompt="b")]))
    for returned, *wanted in TOKENS:
        batch = dict(tokens=torch.zeros(2, 4), begins=torch.tensor([1, 1]),
                     sampler_logprobs=torch.zeros(2, 4),
                     response_mask=torch.tensor([[False, True, True, False]] * 2))
        line = pytest.raises(Stop, match=f"'f'.*{wanted[0]}")
        with line if len(wanted) == 1 else contextlib.nullcontext():
            score_batch(batch, [dict(prompt="a")], [(2.0, "f", partial(as_scores, "f", returned))],
                        SimpleNamespace(tokenizer=None), None, 1, tiny.keys_of_system(), "cpu")
            assert torch.equal(batch["scores"].nan_to_num(9), torch.tensor(wanted[0]).nan_to_num(9))
            assert batch["token_rewards"].tolist() == wanted[1]


def rules_batch(t, prompt, *turns):
    """A rule's batch of one response: ids of the policy and of an environment by turns."""
    ids, mask = [7, 7, 7], [False] * 3  # the prompt's
    for number, turn in enumerate(turns):
        ids, mask = [*ids, *turn], mask + [number % 2 == 0] * len(turn)
    continued = None if len(turns) > 1 and t.chats else prompt
    return dict(tokens=torch.tensor([ids]), response_mask=torch.tensor([mask]), tokenizer=t,
                rows=[dict(prompt=prompt)], completions=[t.decode_response(turns[-1], continued)])


def test_the_token_of_a_character_by_hand(toy, chat):
    """A letter of several tokens has the last one; special tokens; the end; a cut response."""
    t, end = toy(), [258]
    batch = rules_batch(t, "1+", [256, *"aé".encode(), 259, 50, *end])
    assert batch["completions"] == ["<think>aé2"]  # the padding in the middle writes nothing
    at = partial(token_at, batch, 0)
    assert [at(n) for n in (0, 6, 7, 8, 9, 10)] == [3, 3, 4, 6, 8, 9]
    cut = rules_batch(t, "1+", [*"aé".encode()[:2]])  # in the middle of a letter
    assert [token_at(cut, 0, n) for n in (0, 1, 2)] == [3, 4, 4]
    assert token_at(rules_batch(t, "1+", end), 0, 0) == 3  # an empty completion: the EOS
    for n in (-1, 11):
        with pytest.raises(IndexError, match=f"10 characters.*{n}"):
            at(n)
    for t in (toy(), chat()):
        t.messages_of = lambda *_: []
        turns = rules_batch(t, [user("a"), assistant("b")], b"ab", b"xyz", b" cd")
        assert turns["completions"] == [" cd"]  # the last one
        assert [token_at(turns, 0, n) for n in range(4)] == [8, 9, 10, 10]


def test_the_token_of_a_character_in_other_tokenizers(blanks, world):
    """The first token with which the text has the character, found one token after the other."""
    stops = load_tokenizer(world.policy, tiny.keys_of_system(stop_strings="['##']"))
    for t, texts in ((blanks, ["it is so", "  x é\n it", "😀 é"]), (stops, ["so##me", "é"])):
        for ids in t.encode_texts(texts):
            for own in (ids, [*ids, t.eos_id], ids[:-1]):
                batch = rules_batch(t, "what?", own)
                text = batch["completions"][0]
                assert len(text) or not ids[:-1]
                for n in range(len(text)):
                    slow = next(k for k in range(len(own)) if t.decode_response(
                        own[:k + 1], "what?").startswith(text[:n + 1]))
                    assert token_at(batch, 0, n) == 3 + slow, (text, n)
                assert not own or token_at(batch, 0, len(text)) == 2 + len(own)


def test_which_functions_take_a_batch(tmp_path, monkeypatch):
    """Also odd ones, which Python can call with it; the others are refused before the run."""
    tiny.write(tmp_path / "mine.py", """
import functools
def a(batch, weight=1.0): return [weight] * 3
b = functools.partial(a, weight=1.0)
class Judge:
    def __call__(self, batch): return [1, 1, 1]
c = Judge()
d = lambda x: [1, 1, 1]
def e(**columns): return [1, 1, 1]
def no_1(): pass
def no_2(completion, answer): pass
def no_3(batch, *, weight): pass
no_4 = Judge
no_5 = lambda text, row: 1
""")
    monkeypatch.chdir(tmp_path)
    for name in "abcde":
        assert load_reward(f"mine.py:{name}", "")(BATCH) == [1, 1, 1]
    for number in range(1, 6):
        with pytest.raises(BadInput, match=f"no_{number}"):
            load_reward(f"mine.py:no_{number}", "")


REGEX = 're.fullmatch("(a+)+b", "a" * 60)'  # years, in which no other thread of Python runs
FOREVER = f"""
import asyncio, contextlib, re, signal, threading, time
from concurrent.futures import ThreadPoolExecutor

def regex(batch): {REGEX}
def sleeps(batch): time.sleep(99)
def counts(batch): return [x for x in iter(int, 1)]
async def awaits(batch): await asyncio.sleep(99)
def alarms(batch): signal.alarm(9); signal.alarm(0); {REGEX}
def threads(batch):
    with ThreadPoolExecutor(2) as pool: pool.map(time.sleep, [9, 9])
def retries(batch):
    while True:
        with contextlib.suppress(Exception): time.sleep(0.01); 1 / 0
def swallows(batch):
    while True:
        try: time.sleep(9)
        except: pass
def hides(batch):
    try: time.sleep(9)
    except BaseException: return [1, 2, 3]
def careless(batch):
    import torch
    torch.set_grad_enabled(False)
    return [1, 2, 3]
def locks(batch):
    thread = threading.Thread(target=lambda: {REGEX}, daemon=True)
    thread.start(); thread.join()
"""
NAMES = [name for name in re.findall(r"def (\w+)\(", FOREVER) if name not in ("careless", "locks")]


@pytest.mark.parametrize("name", NAMES)
def test_a_rule_that_hangs_is_ended(name, tmp_path):
    """And named by its line, but where the stack has the loop of asyncio alone."""
    reward = load_reward(f"{tiny.write(tmp_path / 'mine.py', FOREVER)}:{name}", "")
    with pytest.raises(Stop, match=f"^reward '{name}' hangs") as e:
        reward(BATCH | dict(seconds=0.1))
    assert ("mine.py, line" in str(e.value)) or name == "awaits"
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0)
    careless = load_reward(f"{tmp_path}/mine.py:careless", "")
    assert careless(BATCH) == [1, 2, 3]
    assert torch.is_grad_enabled() and sys.gettrace() is None  # nothing of a rule's is left


def test_what_never_looks_for_signals_ends_the_process(tmp_path):
    """Nothing is saved then; the dump has the line."""
    def before(rank):
        time_limit.LAST_RESORT = 0.5
        reward = load_reward(f"{tiny.write('mine.py', FOREVER)}:locks", "")
        reward(dict(rows=[], completions=[], seconds=0.5))

    done = tiny.Started("", [], str(tmp_path), before=before).wait()
    assert done.codes == [1] and "mine.py" in done.err[0] and "Stop" not in done.err[0], done


TRL = """
import asyncio

seen, loops = {}, set()

def bare(**kwargs):
    seen.update(kwargs)
    return [len(answer or "") for answer in kwargs["answer"]]

def few(completions, level):
    seen.update(completions=completions, level=level)
    return [1.0] * len(completions)

async def waits(prompts, completions, level=None, **kwargs):
    loops.add(asyncio.get_running_loop())
    await asyncio.sleep(0)
    return [float(len(text)) for text in prompts]

def wants(completions, trainer_state):
    return [0.0] * len(completions)
"""


def test_the_signature_of_trl(tmp_path, monkeypatch):
    """Also an async function: what it makes in a call, it can use in the next, in the same loop."""
    monkeypatch.chdir(tmp_path)
    tiny.write("mine.py", TRL)
    terms = reward_terms("mine.py:bare,mine.py:few,mine.py:waits")
    mine = terms[0][2].__wrapped__.__globals__
    seen = mine["seen"]
    rows = [dict(prompt="one", answer="1", completion="x"), dict(prompt="two", level=2),
            dict(prompt=CHAT, answer="333")]
    check_rows(terms, Rows(rows))
    batch = dict(
        rows=rows, completions=["a", "bb", "ccc"], tokens=torch.arange(15).view(3, 5),
        response_mask=torch.tensor([
            [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 1, 1, 1]]).bool(), prompts=["<"] * 3)
    message = dict(role="assistant", content="<think>ccc")
    want = dict(prompts=["one", "two", CHAT], completions=["a", "bb", [message]],
                answer=["1", None, "333"], level=[None, 2, None],
                completion_ids=[[2], [7, 8], [12, 13, 14]])
    scores = dict(bare=[1, 0, 3], few=[1, 1, 1], waits=[3, 3, 2])
    for _, name, reward in terms:
        seen.clear()
        assert reward(batch) == scores[name]
        part = ("completions", "level") if name == "few" else want
        assert seen == ({} if name == "waits" else {key: want[key] for key in part}), name
    assert reward(batch) == scores["waits"] and len(mine["loops"]) == 1
    # a rank's rows, none of which has the field
    assert terms[1][2](dict(rows=rows[:1], completions=["a"])) == [1] and seen["level"] == [None]
    with pytest.raises(BadInput, match="^rows.jsonl: .*'few'.*'level'.*'prompt', 'answer'$"):
        check_rows(terms[1:2], Rows(rows[2:], "rows.jsonl"))
    with pytest.raises(BadInput, match="'wants'.*'trainer_state'"):
        check_rows(reward_terms("mine.py:wants"), Rows(rows))

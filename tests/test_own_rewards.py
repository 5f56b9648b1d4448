"""
Rewards of the user's own: None where one does not apply, async functions, TRL's signature, and errors of a network, which are
tried again and then saved before the run ends.
"""
import http.server
import json
import math
import threading
import time

import numpy as np
import pytest
import torch

from engine import reward_mix
from engine.reward_mix import call_rewards, check_rows, is_passing, parse_rewards
from engine.report import deviation_of, mean_of, summarize
from errors import BadInput, Stop
from loss import update_moments
from relatives import flat_groups, group_advantages
from rewards import RULES, Scorer

import tiny

NAN = math.nan
CHAT = [dict(role="user", content="7?"), dict(role="assistant", content="<think>")]
BATCH = dict(completions=["a", "bb", "ccc"], rows=[dict(prompt="one", answer=1), dict(prompt="two", level=2), dict(prompt=CHAT)])


def called(function, batch=BATCH):
    return call_rewards([(1.0, "mine", function)], batch)["mine"]


# None


def test_none_is_no_score():
    given = called(lambda batch: [1, None, np.float32(2)])
    assert given.isnan().tolist() == [False, True, False] and given[[0, 2]].tolist() == [1, 2]
    assert called(lambda batch: [None] * 3).isnan().all()
    for bad in ([1, NAN, None], [None, None, "1"], [None, 1]):
        with pytest.raises(Stop, match="reward 'mine' (gave|must)"):
            called(lambda batch, bad=bad: bad)


def test_the_mix_leaves_out_what_does_not_apply(capsys):
    """By hand: 2 a - b + 0 c. c is only logged: it gives nobody a score."""
    config = dict(reward_timeout=1, micro_batch_size=1, dtype="float32", master_weights=True, code_seconds=5)
    terms = [(2.0, "a", None), (-1.0, "b", None), (0.0, "c", None)]
    scorer = Scorer(config, terms, None, None, None, None, torch.device("cpu"))
    a, b = torch.tensor([1.0, NAN, 3.0, NAN]), torch.tensor([0.5, 0.5, NAN, NAN])
    batch = {"reward/a": a, "reward/b": b, "reward/c": torch.tensor([9.0, 9.0, NAN, 9.0]), "tokens": torch.zeros(4, 2)}
    scorer.add_up(batch)
    assert batch["scores"][:3].tolist() == [1.5, -0.5, 6.0] and batch["scores"][3].isnan()
    assert capsys.readouterr().out.splitlines() == [
        f"the reward {name!r} gives None for {n} of 4 responses: it does not apply to them"
        for name, n in (("a", 2), ("b", 2), ("c", 1))]
    scorer.add_up(batch)
    assert not capsys.readouterr().out  # said once
    mask = torch.ones(4, 2).bool()
    figures = summarize(batch | dict(response_mask=mask, finished=mask[:, 0], accuracy=a, thinks=a), "eval", ["a", "b", "c"])
    assert figures["eval/scores"] == pytest.approx(7 / 3) and figures["eval/scored"] == 0.75
    assert [figures[f"eval/reward/{name}"] for name in "abc"] == [2, 0.5, 9]
    assert mean_of(a * NAN) == deviation_of(a * NAN) == deviation_of(a[:2]) == 0 and deviation_of(a) == pytest.approx(2**0.5)
    assert update_moments([2, 1.0, 3.0], a[:0]) == [2, 1.0, 3.0]
    nan = torch.tensor([math.nan, 3.0])  # no reward applies to the first response
    assert update_moments([1, 1.0, 0.0], nan) == [2, 2.0, 2.0] and update_moments([2, 1.0, 3.0], nan[:1]) == [2, 1.0, 3.0]


@pytest.mark.parametrize("scale_by", ["std", "batch", "none"])
@pytest.mark.parametrize("baseline", ["mean", "others"])
def test_a_group_without_some_scores(scale_by, baseline):
    """As if those responses were not there: each group by numpy, with its NaNs taken out."""
    rng = np.random.default_rng(0)
    groups = rng.normal(size=(6, 4))
    groups[0, 1] = groups[1, :2] = groups[2, 1:] = groups[3] = groups[4, 3] = NAN
    groups[4, :3] = 0.7
    got = group_advantages(torch.tensor(groups).flatten(), 4, scale_by, baseline).view(6, 4).numpy()
    everyone = groups[~np.isnan(groups)]
    for found, group in zip(got, groups, strict=True):
        there = ~np.isnan(group)
        x, n = group[there], there.sum()
        assert (found[~there] == 0).all()
        if n < 2 or (x == x[0]).all():
            assert (found == 0).all()
            continue
        rest = x.mean() if baseline == "mean" else (x.sum() - x) / (n - 1)
        scale = dict(std=x.std(ddof=1) + 1e-4, batch=everyone.std(ddof=1) + 1e-4, none=1)[scale_by]
        assert np.allclose(found[there], (x - rest) / scale, atol=1e-12)
    assert flat_groups(torch.tensor(groups).flatten(), 4).tolist() == [False, False, True, True, True, False]


# async


def test_async_rewards_are_awaited_together():
    """Each of two waits for the other: one after the other would never end. What they make in one call is there in the next."""
    import asyncio

    events = {}

    def waits_for(mine, other):
        async def grader(batch):
            for name in (mine, other):
                events.setdefault(name, asyncio.Event())  # belongs to the loop that it was made in
            events[mine].set()
            await asyncio.wait_for(events[other].wait(), 5)
            return [len(text) for text in batch["completions"]]
        return grader

    async def trl_judge(completions, **columns):
        await asyncio.sleep(0)
        return [None] + [len(columns) + 0.5] * (len(completions) - 1)

    async def broken(batch):
        return {}["nothing"]

    rewards = [(1.0, "a", waits_for("a", "b")), (1.0, "rule", lambda batch: [0, 0, 0]), (1.0, "b", waits_for("b", "a")),
               (1.0, "trl", trl_judge)]
    for _ in range(2):
        each = call_rewards(rewards, BATCH)
        assert each["a"].tolist() == each["b"].tolist() == [1, 2, 3] and each["rule"].tolist() == [0, 0, 0]
        assert each["trl"][1:].tolist() == [3.5, 3.5] and each["trl"][0].isnan()  # prompts, answer and level
    with pytest.raises(Stop, match=f"^reward 'mine' failed at {__file__}, line [0-9]+: KeyError: 'nothing'$"):
        called(broken)

    def cancelled(batch):  # as a client of an API may be, also where nothing is awaited here
        raise asyncio.CancelledError

    with pytest.raises(Stop, match="^reward 'mine' failed at .*: CancelledError$"):
        called(cancelled)


# TRL's signature

TRL = """
import functools

seen = {}

def bare(**kwargs):
    seen.update(kwargs)
    return [len(answer or "") for answer in kwargs["answer"]]

def some(prompts, completions, answer, **kwargs):
    seen.update(kwargs, prompts=prompts, completions=completions, answer=answer)
    return [0.0] * len(prompts)

def few(completions, level):
    seen.update(completions=completions, level=level)
    return [1.0] * len(completions)

class Judge:
    def __call__(self, completions, completion_ids, **kwargs):
        seen.update(kwargs, completions=completions, completion_ids=completion_ids)
        return [float(len(ids)) for ids in completion_ids]

grader = Judge()
part = functools.partial(some, extra=3)

def wants(completions, trainer_state):
    return [0.0] * len(completions)

def ours(batch):
    return [float("rows" in batch)] * len(batch["rows"])

def ours_too(data, *args, scale=2.0):
    return [scale] * len(data["rows"])
"""


def test_answers_that_no_response_will_have_are_said(capsys):
    """Orca-Math's are whole solutions, and NuminaMath writes "proof" where no answer is."""
    answers = ["72", "In fifth place he is, " * 5, "proof", "NotFound", "x + 1", 7]
    for name in ("length", "accuracy"):
        check_rows([(1.0, name, RULES[name])], [dict(prompt="q", answer=answer) for answer in answers], "rows.jsonl")
        said = capsys.readouterr().out
        assert ("'answer' of 1 of 6 rows is a text of more than 20 words" in said) == (name == "accuracy")
        assert ("'answer' of 2 of 6 rows is no answer but a word that a policy can learn" in said) == (name == "accuracy")


def test_trls_signature(tmp_path):
    (tmp_path / "mine.py").write_text(TRL)
    names = ["bare", "some", "few", "grader", "part", "ours", "ours_too"]
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
            assert {k: x for k, x in seen.items() if k not in ("extra",)} == expected, reward[1]
    assert {k: x.tolist() for k, x in given.items()} == dict(
        bare=[1, 0, 3], some=[0, 0, 0], few=[1, 1, 1], grader=[1, 2, 3], part=[0, 0, 0], ours=[1, 1, 1], ours_too=[2, 2, 2])
    with pytest.raises(BadInput, match="^rows.jsonl: the reward 'few' has a parameter 'level', and no row has such a field; "
                                       "the fields are 'prompt', 'answer'$"):
        check_rows(rewards[2:3], rows[2:], "rows.jsonl")
    with pytest.raises(BadInput, match="the reward 'wants' has a parameter 'trainer_state'"):
        check_rows(parse_rewards("mine.py:wants", RULES, str(tmp_path)), rows, "rows.jsonl")


def test_answers_may_be_numbers():
    rewards = parse_rewards("accuracy", RULES, ".")
    rows = [dict(prompt="?", answer=answer) for answer in (72, 72.0, 0.5, -3, "72")]
    check_rows(rewards, rows, "rows.jsonl")
    batch = dict(rows=rows, completions=["72", "72", "1/2", "3", "#### 72"])
    assert call_rewards(rewards, batch)["accuracy"].tolist() == [1, 1, 1, 0, 1]
    for answer in (True, None, [72], {}, " "):
        with pytest.raises(BadInput, match="^rows.jsonl, row 1: the field 'answer' must be a number, or a string that is"):
            check_rows(rewards, [dict(prompt="?", answer=answer)], "rows.jsonl")


# errors of a network

JUDGE = """
import json
import urllib.request

def grader(batch):
    body = json.dumps(batch["completions"]).encode()
    with urllib.request.urlopen(URL, body, timeout=5) as answer:
        return json.load(answer)
"""


class Server:
    """A grader on this machine, which gives each text its length; `answers` are the statuses of the next answers, then 200."""

    def __init__(self):
        server = self
        server.answers, server.asked = [], 0

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                server.asked += 1
                texts = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status = server.answers.pop(0) if server.answers else 200
                if status == 0:
                    return  # closes the connection without a word
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps([len(text) for text in texts]).encode())

            def log_message(self, *args):
                pass

        self.http = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/"
        threading.Thread(target=self.http.serve_forever, args=(0.05,), daemon=True).start()


@pytest.fixture(scope="module")
def server():
    server = Server()
    yield server
    server.http.shutdown()
    server.http.server_close()


def test_a_server_that_fails_is_asked_again(server, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(reward_mix, "PAUSES", (0.01, 0.02, 0.03))
    (tmp_path / "mine.py").write_text(JUDGE + f"URL = {server.url!r}\n")
    rewards = parse_rewards("mine.py:grader", RULES, str(tmp_path))
    others = []
    rewards.append((1.0, "other", lambda batch: others.append(1) or [0, 0, 0]))
    server.answers = [503, 0, 429]
    assert call_rewards(rewards, BATCH)["grader"].tolist() == [1, 2, 3]
    assert server.asked == 4 and len(others) == 1  # what answered is not asked again
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 3
    assert said[0].startswith("reward 'grader': HTTPError: HTTP Error 503") and said[0].endswith("again in 0.01 s")
    for answers, asked, error in (([500] * 9, 4, "HTTP Error 500"), ([401], 1, "HTTP Error 401")):
        server.asked, server.answers = 0, answers
        with pytest.raises(Stop, match=f"^reward 'grader' failed at {tmp_path}/mine.py, line [0-9]+: HTTPError: {error}"):
            call_rewards(rewards, BATCH)
        assert server.asked == asked
    monkeypatch.setattr(reward_mix, "PAUSES", (0.01, 60))
    server.asked, server.answers = 0, [500] * 9
    began = time.monotonic()
    with pytest.raises(Stop, match="HTTP Error 500"):
        call_rewards(rewards, BATCH | dict(seconds=2.0))  # there is no time for the second pause
    assert server.asked == 2 and time.monotonic() - began < 5
    server.answers = []


def test_which_errors_may_pass():
    class RateLimitError(Exception):
        pass

    class APIStatusError(Exception):
        def __init__(self, status):
            self.status_code = status

    class ReadTimeout(Exception):
        pass

    class Answer:
        status_code = 502

    class HTTPStatusError(Exception):
        response = Answer()

    assert all(map(is_passing, [ConnectionResetError(), TimeoutError(), OSError("unreachable"), http.client.RemoteDisconnected(),
                                RateLimitError(), ReadTimeout(), APIStatusError(503), APIStatusError(429), HTTPStatusError()]))
    assert not any(map(is_passing, [KeyError("x"), FileNotFoundError(2, "no"), PermissionError(13, "no"), APIStatusError(401),
                                    APIStatusError(404), ValueError(), ZeroDivisionError(), SystemExit(3)]))


# runs

MINE = """
import asyncio
import os
import urllib.error

def sometimes(prompts, completions, **columns):  # every third length, and every prompt that begins with 1, has no score
    return [None if len(text) % 3 == 0 or prompt[0] == "1" else len(text) / 8 for prompt, text in zip(prompts, completions)]

async def grader(completions, answer, **columns):
    await asyncio.sleep(0)
    return [float(text[:1] == truth[:1]) for text, truth in zip(completions, answer)]

calls = 0

def down(batch):  # the server is gone in the third call: the first evaluation and a rollout are over
    global calls
    calls += 1
    if calls > 2 and os.path.exists("../nobody-answers"):
        raise ConnectionRefusedError("nobody is there")
    return [len(text) / 8 for text in batch["completions"]]

def late(completions, **columns):  # at first all have the same score; in refills and later some have none
    global calls
    calls += 1
    return [0.1] * len(completions) if calls == 1 else [None if len(text) % 2 else len(text) / 8 for text in completions]
"""


def test_runs(tmp_path):
    """Scores that are missing, in GRPO and in PPO. A grader that is down saves the run, which then goes on as if nothing was."""
    (tmp_path / "world").mkdir()
    world = tiny.build(str(tmp_path / "world"))
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "nobody-answers").write_text("")
    mine = f"{tmp_path}/mine.py"
    down = world.grpo("out", reward_functions=f"{mine}:down", reward_timeout=1)
    code = "from engine import reward_mix\nreward_mix.PAUSES = (0.01,)"
    jobs = {
        "none": tiny.one_run("grpo.py", world.grpo("out", reward_functions=f"{mine}:sometimes")),
        "mix": tiny.one_run("grpo.py", world.grpo("out", reward_functions=f"{mine}:sometimes,0.5*{mine}:grader")),
        "ppo": tiny.one_run("ppo.py", world.ppo("out", reward_functions=f"{mine}:sometimes", value_init="policy",
                                                missing_eos_penalty=0, scale_scores="running")),
        "late": tiny.one_run("grpo.py", world.grpo("out", reward_functions=f"{mine}:late", max_refills=1, max_iters=1,
                                                   eval_path="")),
        "down": tiny.one_run("grpo.py", (down, code)),
    }
    done = {name: outcome for name, (outcome,) in tiny.in_a_row(tmp_path, jobs).items()}
    for name in ("none", "mix", "ppo"):
        assert not done[name]["kind"], done[name]
        log = tiny.read_log(tmp_path / name / "out")
        assert all(math.isfinite(x) for record in log for x in record.values() if isinstance(x, float))
        assert tiny.distance(world.policy, f"{tmp_path}/{name}/out/policy") > 1e-4
        scored = [record.get("objective/scored") for record in log[:-1]]
        assert scored == [None] * 3 if name == "mix" else all(0 < x < 1 for x in scored), scored
        assert "the reward 'sometimes' gives None for " in done[name]["stdout"]
    refilled = tiny.read_log(tmp_path / "late" / "out")[0]  # objective: of what was sampled before the refills
    assert refilled["objective/scores"] == pytest.approx(0.1) and "objective/scored" not in refilled
    assert 0 < refilled["trained/scored"] < 1 and refilled["objective/kl"] == 0
    said = done["down"]["message"]
    assert done["down"]["kind"] == "Stop" and said.startswith(f"reward 'down' failed at {mine}, line ")
    assert said.endswith("nobody is there. The run is saved before iteration 1: the same command goes on from there")
    assert (tmp_path / "down" / "out" / "checkpoint-000001").is_dir()

    (tmp_path / "nobody-answers").unlink()
    jobs = dict(again=tiny.one_run("grpo.py", down) | dict(folder="down"), steady=tiny.one_run("grpo.py", down))
    for name, (outcome,) in tiny.in_a_row(tmp_path, jobs).items():
        assert not outcome["kind"], (name, outcome)
    logs = [[tiny.measured(record) for record in tiny.read_log(tmp_path / name / "out")] for name in ("down", "steady")]
    assert logs[0] == logs[1] and len(logs[0]) == 4
    assert tiny.distance(f"{tmp_path}/down/out/policy", f"{tmp_path}/steady/out/policy") == 0

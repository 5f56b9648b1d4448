"""
tools/explain.py: its numbers worked out with transformers' models, one text alone, and plain loops.
The tool is given a copy of a run of PPO that ends with the second checkpoint, so it must compute
what the run has computed next; the third one has the weights after that update.
"""
import json
import math
import os
import pathlib
import re
import shutil
import signal
import statistics
from types import SimpleNamespace

import by_hand
import pytest
import torch
from tiny import (Started, assert_one_line, at, jsonl, keys_of, read_jsonl, run, said_by, typed,
                  well, write)

from checkpoint import hashes
from configurator import write_json
from errors import BadInput
from tools.iteration import is_same, script_of
from tools.runs import refuse_code

DONE, BATCH = 2, 5  # iterations that the copy of the run has done; responses of one


def explain(folder, **keys):
    return said_by("tools/explain.py", folder, keys)


def refused(folder, *words, **keys):
    """The tool ends in one line, with these words."""
    result = Started("tools/explain.py", typed(keys), str(folder)).wait()
    assert_one_line(result, "explain.py", *words)


@pytest.fixture(scope="module")
def runs(world, tmp_path_factory):
    """The folder of the runs: ppo/out, ppo/cut with two iterations alone, grpo/out."""
    folder = tmp_path_factory.mktemp("runs")
    more = dict(max_iters=4, checkpoint_interval=1, keep_checkpoints=9, num_minibatches=1)
    more |= dict(batch_size=BATCH, value_init="policy", reward_functions="9*reward_model")
    whole = well("ppo.py", folder / "ppo", keys_of(world, "ppo.py", **more))
    cut = shutil.copytree(whole, f"{folder}/ppo/cut")
    for later in (3, 4):
        shutil.rmtree(f"{cut}/checkpoint-{later:06d}")
    mine = write(folder / "mine.py", "from torch.optim import AdamW\nclass Mine(AdamW): pass")
    well("grpo.py", folder / "grpo", keys_of(
        world, "grpo.py", max_iters=1, num_minibatches=1, optim=f"{mine}:Mine",
        reward_functions=f"accuracy,{world.rules}:letters"))
    return folder


def files_of(folder):
    return {str(p): p.read_bytes() for p in pathlib.Path(folder).rglob("*")
            if p.is_file() and "/explain/" not in str(p)}


def table(text):
    """{column: cells} of the output's last table; behind it a blank line, and what they mean."""
    names, *lines = text[text.index("# token"):].partition("\n\n")[0].split("\n")
    names = names.split()
    cells = [re.fullmatch(rf" *(\d+) (.*?)((?: +\S+){{{len(names) - 2}}})", line) for line in lines]
    columns = zip(*([m[1], m[2].strip(), *m[3].split()] for m in cells), strict=True)
    return dict(zip(names, columns, strict=True))


def test_the_numbers_of_ppo(world, runs):
    """Those of the response in the first place of the batch that the run samples next."""
    start = f"{runs}/ppo/out/checkpoint-{DONE:06d}"
    c = SimpleNamespace(
        seed=1, batch_size=BATCH, max_new_tokens=6, temperature=0.8, mix=[(9.0, "reward_model")],
        reward_path=world.reward, missing_eos_penalty=1.0, kl_coef=0.3, kl_estimator="k1",
        gamma=1.0, lam=0.95)
    models = SimpleNamespace(
        policy=by_hand.language_model(f"{start}/policy"), reward=by_hand.scalar_model(world.reward),
        reference=by_hand.language_model(world.policy),
        value=by_hand.scalar_model(f"{start}/value_model"))
    rows = [world.rows["rl_train"][i]
            for i in by_hand.prompts_of(c, DONE, BATCH, len(world.rows["rl_train"]))]
    batch = [by_hand.respond(c, models, row, "rollout", DONE, i) for i, row in enumerate(rows)]
    by_hand.finish_scores(c, batch)
    unit = read_jsonl(f"{runs}/ppo/out/log.jsonl")[DONE]["val/unit"]
    assert unit != 1
    for r in batch:
        r.unit = unit
    by_hand.find_advantages(c, batch)

    r, values = batch[0], [x * unit for x in batch[0].values]
    delta, raw = (by_hand.advantages_and_returns(r.rewards, values, c.gamma, lam)[0]
                  for lam in (0.0, c.lam))
    behind = by_hand.language_model(f"{runs}/ppo/out/checkpoint-{DONE + 1:06d}/policy")
    new, _ = by_hand.logprobs_of(behind, r.prompt, r.response, c.temperature)
    ratios = [torch.exp(x - old) for x, old in zip(new, r.old, strict=True)]
    losses = [by_hand.clipped_surrogate(ratio, a, 0.2, 0.2)
              for ratio, a in zip(ratios, r.advantages, strict=True)]
    wanted = dict(
        policy=r.old, ref=r.reference, new=[x.item() for x in new], KL=by_hand.kls_of(c, r),
        reward=r.rewards, value=values, delta=delta, raw=raw, white=r.advantages,
        ret=[x * unit for x in r.returns], ratio=[x.item() for x in ratios],
        loss=[by_hand.number(loss) for loss, _ in losses])

    before = files_of(runs)
    said = explain(runs / "explain", run=f"{runs}/ppo/cut", prompt=rows[0]["prompt"])
    assert before == files_of(runs)  # the runs' folders are as they were
    assert eval(re.search(r"(?m)^response  (.*)$", said)[1]) == r.text
    assert float(re.search(r"(?m)^shaped +(\S+),", said)[1]) == pytest.approx(r.score, abs=6e-4)
    columns = table(said)
    assert columns.keys() == wanted.keys() | {"#", "token", "clip"}
    for name, numbers in wanted.items():
        within = 6e-5 if name in ("KL", "reward") else 6e-4
        assert [*map(float, columns[name])] == pytest.approx(numbers, abs=within), name
    assert [x == "yes" for x in columns["clip"]] == [bool(bound) for _, bound in losses]


def test_a_group_of_grpo(runs):
    """The answer comes from the command line; scores minus their mean, over their deviation."""
    said = explain(runs / "explain", run=f"{runs}/grpo/out", prompt="12=", answer="ab", seed=3,
                   trust_code=True)
    assert "the run is over" in said
    first = said[said.index("# "):].split("\n\n")[0].split("\n")[1:]
    scores, advantages = ([float(line.split()[i]) for line in first] for i in (1, 2))
    deviation = statistics.stdev(scores)
    assert deviation > 0 and advantages == pytest.approx(
        [(x - statistics.mean(scores)) / deviation for x in scores], abs=2e-3)
    assert float(table(said)["advantage"][0]) == pytest.approx(advantages[0], abs=1e-3)


def test_nothing_that_a_run_names_is_run_unless_one_says_so(runs, tmp_path):
    """A rule, an environment, an optimizer, a script, and a key that would be a line of code."""
    evil = "/there/evil.py"
    both = [f"{more}{evil}:f{end}" for more in ("", "0.5*", " * ") for end in ("", "*", "*2", ",")]
    attacks = [(key, value) for key in ("environment", "tools", "reward_functions")
               for value in (*both, [f"{evil}:f"], {f"{evil}:f": 1}, f"'{evil}:f*'")]
    attacks += [("tools", evil), ("environment", "*"), ("optim", f"{evil}:f"),
                ("optim", f"value=adamw, policy={evil}:f"), (evil, ""), ("-", ""), ("", "a"),
                (f"environment={evil}:f", ""), (f"reward_functions={evil}:f,accuracy", 0)]
    for key, value in attacks:
        with pytest.raises(BadInput, match="the/config.json"):
            refuse_code({key: value}, "the/config.json", False)
    for script, trusted in ((__file__, False), (__file__, True), ("tools/../ppo.py", True),
                            ("tools/explain.py", True), ("sft.py", False), (None, False)):
        with pytest.raises(BadInput, match="the/config.json has script"):
            script_of(dict(cliprange=0.2, script=script), "the/config.json", trusted)
    ran, last = tmp_path / "ran", f"{tmp_path}/run/checkpoint-{DONE:06d}"
    mine = write(tmp_path / "evil.py", f"open({str(ran)!r}, 'w')\ndef f(*_): return None\n")
    folder = shutil.copytree(f"{runs}/ppo/cut", tmp_path / "run")
    keys = json.loads((folder / "config.json").read_text())
    for key, how in (("reward_functions", {}), ("environment", dict(iteration=1, out="a.html"))):
        for place in (folder, last):
            write(f"{place}/config.json", json.dumps(keys | {key: f"{mine}:f"}))
        os.remove(f"{last}/manifest.json")  # a stranger can write any
        write_json(f"{last}/manifest.json", hashes(last))
        refused(tmp_path, "config.json", run=folder, **how)
        assert not ran.exists(), key


def test_the_system_message_of_the_run_is_shown(world, tmp_path):
    chats = [dict(prompt=[dict(role="user", content=text)], answer="a") for text in ("ab", "c")]
    well("grpo.py", tmp_path, keys_of(
        world, "grpo.py", max_iters=1, policy_path=world.chatty, chat_template=world.template,
        system_prompt="be brief", prompts_path=jsonl(tmp_path / "chats.jsonl", chats), eval_path="",
        reward_functions="accuracy", batch_size=3, num_minibatches=1))
    said = explain(tmp_path, run="out", prompt="12=", answer="a")
    assert "\nsystem    'be brief'\nprompt    " in said


# all responses of an iteration

def test_figures_are_those_of_a_log_to_nine_digits():
    """JSON has null for what is not finite."""
    same = [(0.1 + 0.2, 0.3), (math.nan, None), (math.inf, None), (3, 3), ("ab", "ab")]
    other = [(0.3, 0.300001), (0.5, None), (None, 0.5), (3, 4), ("ab", "a"), (math.nan, 0.5)]
    assert [is_same(*pair) for pair in same + other] == [True] * 5 + [False] * 6


def page(folder, **keys):
    """(what the tool prints, the data of its page)."""
    said = explain(folder, **keys, out="deep/page.html", trust_code=True)
    page = (folder / "deep/page.html").read_text()
    return said, json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])


@pytest.mark.parametrize("name, iteration, starts", [
    ("ppo", -1, "at its checkpoint"), ("ppo", 1, "at the beginning"), ("grpo", 0, "anew")])
def test_an_iteration_is_computed_again_to_the_last_digit(runs, tmp_path, name, iteration, starts):
    """It says that all metrics are those of the log; the columns of the tokens add up to them."""
    folder = f"{runs}/{name}/out"
    if starts == "at the beginning":  # only the newest checkpoint is left, as by default
        folder = shutil.copytree(folder, f"{tmp_path}/copy")
        for number in (0, 1, 2, 3):
            shutil.rmtree(f"{folder}/checkpoint-{number:06d}", ignore_errors=True)
    said, data = page(tmp_path, run=folder, iteration=iteration)
    assert "warning" not in said and int(re.search(r"all (\d+) figures are those", said)[1]) > 20
    record = read_jsonl(f"{folder}/log.jsonl")[data["iteration"]]
    rows = [one["columns"] for one in data["responses"]]
    old, ref = (statistics.fmean(sum(row[of]) for row in rows) for of in ("policy", "ref"))
    assert old == pytest.approx(-record["objective/entropy"], rel=1e-5)
    assert old - ref == pytest.approx(record["objective/kl"], abs=1e-5)
    assert statistics.fmean(len(row["ref"]) for row in rows) == record["objective/length"]
    assert statistics.fmean(one["score"] for one in data["responses"]) == pytest.approx(
        record["objective/scores"], rel=1e-5)
    for one, columns in zip(data["responses"], rows, strict=True):
        assert one["score"] == pytest.approx(sum(w * x for w, _, x in one["sum"]), abs=1e-5)
        assert {len(x) for x in columns.values()} == {len(one["strings"])}
        assert columns["ratio"] == pytest.approx([math.exp(x) for x in columns["change"]], rel=1e-4)
        assert any(columns["change"]) and all(x >= -1e-6 for x in columns["entropy"])


def test_an_iteration_has_the_keys_that_the_run_had_then(world, tmp_path):
    """
    Other keys at a resume, another schedule by a larger max_iters, quotes in a text, epochs; and
    only the newest checkpoint is left.
    """
    keys = keys_of(world, "ppo.py", max_iters=3, lr_decay="linear", num_minibatches=1,
                   value_init="policy", stop_strings='"[\'x\', \'yz\']"')
    assert run("ppo.py", tmp_path, keys, before=at(1, signal.SIGTERM)).codes == [0]
    well("ppo.py", tmp_path, keys | dict(learning_rate=3e-3, temperature=0.9))
    del keys["max_iters"]
    out = well("ppo.py", tmp_path, keys | dict(epochs=2.7, temperature=0.7))
    log = read_jsonl(f"{out}/log.jsonl")
    assert [record["iteration"] for record in log] == [0, 1, 2, 3, 4, 5]
    assert [x for x in os.listdir(out) if x.startswith("checkpoint-")] == ["checkpoint-000005"]
    said, _ = page(tmp_path, run="out", iteration=0)
    assert "warning" not in said and int(re.search(r"all (\d+) figures are", said)[1]) > 20
    for iteration in (2, 4):  # of iteration 1 to 3, and of 4 alone, no checkpoint is left
        refused(tmp_path, f"iteration = {iteration}: the run had other keys", "from 0 to",
                run="out", iteration=iteration, out="a.html")
    log[0]["policy/lr"] *= 2
    jsonl(f"{out}/log.jsonl", log)
    said, _ = page(tmp_path, run="out", iteration=0)
    assert f"there {log[0]['policy/lr']}" in said

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

import by_hand
import pytest
import torch
from tiny import Started, at, jsonl, keys_of, read_jsonl, run, typed, well, write

import gae
from checkpoint import hashes
from configurator import write_json
from errors import BadInput
from prompts import Rows, batch_rows
from tools.runs import refuse_code

ROOT = os.path.dirname(os.path.abspath(gae.__file__))
DONE, BATCH = 2, 5  # iterations that the copy of the run has done; responses of one


def explain(folder, **keys):
    return Started("tools/explain.py", typed(keys), str(folder)).wait()


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
    rows = Rows(world.rows["rl_train"])
    prompt = rows[batch_rows(1, DONE, BATCH, rows)[0]]["prompt"]
    before = files_of(runs)
    result = explain(runs / "explain", run=f"{runs}/ppo/cut", prompt=prompt)
    assert result.codes == [0], result
    assert before == files_of(runs)  # the runs' folders are as they were
    said, columns = result.out[0], table(result.out[0])
    response = eval(re.search(r"^response  (.*)$", said, re.MULTILINE)[1])
    numbers = {name: [float(x) for x in cells] for name, cells in columns.items()
               if name not in ("#", "token", "clip")}
    n, asked, out = len(columns["#"]), by_hand.encode(prompt), f"{runs}/ppo/out"

    def near(name, expected, within=6e-4):
        assert numbers[name] == pytest.approx(expected, abs=within), name
        return expected

    def logprobs_of(folder, ids):
        with torch.no_grad():
            found, _ = by_hand.logprobs_of(by_hand.language_model(folder), asked, ids, 0.8)
        return [x.item() for x in found]

    # the table calls every end EOS: which one was it?
    ids, policy = next((ids, found) for end in by_hand.ENDS
                       for ids in [(by_hand.encode(response) + [end])[:n]]
                       for found in [logprobs_of(f"{out}/checkpoint-{DONE:06d}/policy", ids)]
                       if found == pytest.approx(numbers["policy"], abs=6e-4))
    reference = near("ref", logprobs_of(world.policy, ids))
    new = near("new", logprobs_of(f"{out}/checkpoint-{DONE + 1:06d}/policy", ids))
    KL = near("KL", [a - b for a, b in zip(policy, reference, strict=True)], 6e-5)
    score = -1.0
    if ids[-1] in by_hand.ENDS:
        score = 9 * by_hand.scalars(by_hand.scalar_model(world.reward), asked + ids)[-1].item()
    shaped = float(re.search(r"^shaped +(\S+),", said, re.MULTILINE)[1])
    assert shaped == pytest.approx(score, abs=6e-4)
    rewards = near("reward", [-0.3 * x + score * (i == n - 1) for i, x in enumerate(KL)], 6e-5)
    unit = read_jsonl(f"{out}/log.jsonl")[DONE]["val/unit"]
    value_model = by_hand.scalar_model(f"{out}/checkpoint-{DONE:06d}/value_model")
    found = by_hand.scalars(value_model, asked + ids)[len(asked) - 1:-1]
    values = near("value", [x.item() * unit for x in found])
    assert unit != 1
    raw, returns = by_hand.advantages_and_returns(rewards, values, 1.0, 0.95)
    near("raw", raw)
    near("ret", returns)
    near("delta", by_hand.advantages_and_returns(rewards, values, 1.0, 0.0)[0])
    white = numbers["white"]  # one shift and one scale for all tokens of the batch
    scale = (white[0] - white[-1]) / (raw[0] - raw[-1])
    near("white", [white[0] + scale * (x - raw[0]) for x in raw], 6e-3)
    ratios = near("ratio", [math.exp(a - b) for a, b in zip(new, policy, strict=True)])
    losses = [by_hand.clipped_surrogate(torch.tensor(x), a, 0.2, 0.2)
              for a, x in zip(white, ratios, strict=True)]
    near("loss", [by_hand.number(loss) for loss, _ in losses], 2e-3)
    assert [x == "yes" for x in columns["clip"]] == [bool(bound) for _, bound in losses]


def test_a_group_of_grpo(runs):
    """The answer comes from the command line; scores minus their mean, over their deviation."""
    result = explain(runs / "explain", run=f"{runs}/grpo/out", prompt="12=", answer="ab", seed=3,
                     trust_code=True)
    assert result.codes == [0] and "the run is over" in result.out[0], result
    first = result.out[0][result.out[0].index("# "):].split("\n\n")[0].split("\n")[1:]
    scores, advantages = ([float(line.split()[i]) for line in first] for i in (1, 2))
    deviation = statistics.stdev(scores)
    assert deviation > 0 and advantages == pytest.approx(
        [(x - statistics.mean(scores)) / deviation for x in scores], abs=2e-3)
    assert float(table(result.out[0])["advantage"][0]) == pytest.approx(advantages[0], abs=1e-3)


def test_nothing_that_a_run_names_is_run_unless_one_says_so(runs, tmp_path):
    """A rule, an environment, an optimizer, a script, and a key that would be a line of code."""
    evil = "/there/evil.py"
    both = [f"{more}{evil}:f{end}" for more in ("", "0.5*", " * ") for end in ("", "*", "*2", ",")]
    attacks = [(key, value) for key in ("environment", "tools", "reward_functions")
               for value in (*both, [f"{evil}:f"], {f"{evil}:f": 1}, f"'{evil}:f*'")]
    attacks += [("tools", evil), ("environment", "*"), ("optim", f"{evil}:f"),
                ("optim", f"value=adamw, policy={evil}:f"),
                (f"environment={evil}:f", ""), (f"tools={evil}:f", "x"), (f"optim={evil}:f*", ""),
                (f"reward_functions={evil}:f,accuracy", 0), (evil, ""), ("-", ""), ("", "a")]
    for key, value in attacks:
        with pytest.raises(BadInput, match="the/config.json"):
            refuse_code({key: value}, "the/config.json", False)
    ran = tmp_path / "ran"
    mine = write(tmp_path / "evil.py", f"open({str(ran)!r}, 'w')\ndef f(*_): return None\n")
    folder, name = shutil.copytree(f"{runs}/ppo/cut", tmp_path / "run"), f"checkpoint-{DONE:06d}"
    keys = json.loads((folder / "config.json").read_text())
    for changed, how in (
            (dict(reward_functions=f"{mine}:f"), {}),
            (dict(environment=f"{mine}:f"), dict(iteration=1, out="a.html")),
            (dict(script=mine), {}), (dict(script=os.path.relpath(mine, ROOT)), {}),
            (dict(script="tools/../ppo.py"), {}), (dict(script=None), {}),
            (dict(script=mine), dict(trust_code=True))):
        (folder / "config.json").write_text(json.dumps(keys | changed))
        (folder / name / "config.json").write_text(json.dumps(keys | changed))
        os.remove(folder / name / "manifest.json")  # a stranger can write any
        write_json(f"{folder}/{name}/manifest.json", hashes(f"{folder}/{name}"))
        result = explain(tmp_path, run=folder, **how)
        assert result.codes == [2] and result.err[0].count("\n") == 1, (changed, result)
        assert "config.json" in result.err[0] and not ran.exists(), (changed, result)


# all responses of an iteration

def page(folder, **keys):
    """(what the tool prints, the data of its page)."""
    result = explain(folder, **keys, out="deep/page.html", trust_code=True)
    assert result.codes == [0], result
    with open(folder / "deep/page.html", encoding="utf-8") as f:
        return result.out[0], json.loads(re.search(r'id="data">(.*?)</script>', f.read(), re.S)[1])


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
        refused = explain(tmp_path, run="out", iteration=iteration, out="a.html")
        assert refused.codes == [2] and f"iteration = {iteration}: the run had other keys" in (
            refused.err[0]) and "from 0 to" in refused.err[0], refused
    log[0]["policy/lr"] *= 2
    jsonl(f"{out}/log.jsonl", log)
    said, _ = page(tmp_path, run="out", iteration=0)
    assert f"there {log[0]['policy/lr']:.6g}" in said

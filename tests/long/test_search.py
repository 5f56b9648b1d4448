"""Search, the task on which thinking longer pays: its data, its rules, and that it does pay."""
import importlib.util
import json
import random
import re
import subprocess
import sys

import pytest
from tiny import ROOT, jsonl, read_jsonl, typed

sys.path.append(f"{ROOT}/data")
from byte_tokenizer import write_byte_tokenizer  # noqa: E402


def module(name):
    spec = importlib.util.spec_from_file_location(name, f"{ROOT}/data/search/{name}.py")
    spec.loader.exec_module(made := importlib.util.module_from_spec(spec))
    return made


NUMBERS = [2, 7, 5, 9]
MISS, HIT = "2-7=-5-5=-10-9=-19", "2+7=9-5=4+9=13"


@pytest.mark.parametrize("response, solved, attempts, repeats, slips", [
    (f"{MISS}?{HIT}!", 1, 2, 0, 0),
    (f"{MISS}?{HIT}?", 1, 2, 0, 0),  # the mark is wrong, but the attempt hits
    (f"{HIT}!{MISS}?", 0, 2, 0, 0),  # only the last one counts
    (f"{MISS}?{MISS}?{MISS}!", 0, 3, 2 / 3, 0),
    (f"{MISS}?{HIT}", 1, 2, 0, 0),  # cut behind the hit
    (f"{MISS}?2+7=9-5=4+9", 0, 2, 0, 1 / 2),  # cut within
    ("2+7=9-5=3+9=13!", 0, 1, 0, 1),  # a sum is wrong
    ("2+7=9-5=4+9=12!", 0, 1, 0, 1),
    ("7+2=9-5=4+9=13!", 0, 1, 0, 1),  # not in order
    ("2+7=9+4=13!", 0, 1, 0, 1),  # not all numbers
    ("13!", 0, 1, 0, 1), ("2!", 0, 1, 0, 1), ("", 0, 0, 0, 0), ("?", 0, 0, 0, 0),
    (f"{HIT}{HIT}!", 0, 1, 0, 1), (f" {HIT}!", 0, 1, 0, 1), (f"+{HIT}!", 0, 1, 0, 1)])
def test_the_rules(response, solved, attempts, repeats, slips):
    rules = module("reward")
    batch = dict(rows=[dict(numbers=NUMBERS, target=13)], completions=[response])
    found = [rule(batch) for rule in (rules.solved, rules.attempts, rules.repeats, rules.slips)]
    assert found == [[solved], [attempts], [pytest.approx(repeats)], [pytest.approx(slips)]]
    assert rules.overlooked(batch) == [response.startswith(HIT) and MISS in response]


def value(attempt):
    """What Python says of the signs of an attempt, if its running results are right, too."""
    parts = re.findall(r"([+-]?\d)(?:=(-?\d+))?", attempt)
    for i in range(1, len(parts)):
        assert eval("".join(sign for sign, _ in parts[:i + 1])) == int(parts[i][1]), attempt
    return int(parts[-1][1])


def test_the_data(tmp_path, monkeypatch):
    """
    8,874 problems can be solved (counted elsewhere). All attempts of the demonstrations are legal,
    and a hit is the last one. How many are right, and their attempts, are as the docstring says.
    """
    prepare = module("prepare")
    monkeypatch.setattr(prepare, "HERE", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["prepare.py"])
    prepare.main()
    rows = {name: read_jsonl(tmp_path / f"{name}.jsonl") for name in (
        "sft_train", "sft_val", "rl_train", "rl_val")}
    train, held_out = ([row["prompt"] for row in rows[f"rl_{part}"]] for part in ("train", "val"))
    assert len(set(train + held_out)) == len(train + held_out) == 8874 and len(held_out) == 500
    assert {row["prompt"] for row in rows["sft_train"]} == set(train)
    assert {row["prompt"] for row in rows["sft_val"]} == set(held_out)
    right = counts = 0
    for row in rows["sft_train"]:
        numbers, target = re.fullmatch(r"([\d,]+)>(-?\d+):", row["prompt"]).groups()
        tried = re.findall(r"([^?!]+)([?!])", row["completion"])
        assert "".join(map("".join, tried)) == row["completion"] and 1 <= len(tried) <= 8
        for place, (attempt, mark) in enumerate(tried):
            assert re.sub(r"=-?\d+|[+-]", "", attempt) == numbers.replace(",", "")
            assert (value(attempt) == int(target)) == (mark == "!")
            assert mark == "?" or place == len(tried) - 1
        right, counts = right + (tried[-1][1] == "!"), counts + len(tried)
    assert right / len(rows["sft_train"]) == pytest.approx(0.40, abs=0.005)
    assert counts / len(rows["sft_train"]) == pytest.approx(2.5, abs=0.05)
    for row in rows["rl_train"]:
        assert row["prompt"] == f"{','.join(map(str, row['numbers']))}>{row['target']}:"
    assert json.loads((tmp_path / "tokenizer/tokenizer_config.json").read_text())["eos_token"]


def as_typed(script, config, keys):
    subprocess.run([sys.executable, script, config, *typed(keys)], cwd=ROOT, check=True)


def test_thinking_longer_by_itself(tmp_path):
    """
    With two numbers there are two ways, and who gives up after the first is often wrong: a tiny
    model learns this in seconds. Then GRPO, with the config of the task, makes responses right more
    often, and longer, though nothing asks for length.
    """
    prepare, rng, rows = module("prepare"), random.Random(0), []
    for _ in range(4000):
        numbers = [rng.randint(1, 9) for _ in range(2)]
        target = numbers[0] + rng.choice([1, -1]) * numbers[1]
        rows.append(dict(prompt=f"{numbers[0]},{numbers[1]}>{target}:", numbers=numbers,
                         target=target, completion=prepare.demonstrate(rng, numbers, target)))
    data, out = jsonl(tmp_path / "rows.jsonl", rows), str(tmp_path / "out")
    write_byte_tokenizer(str(tmp_path / "tokenizer"))
    as_typed("sft.py", "config/search_sft.py", dict(
        tokenizer_path=str(tmp_path / "tokenizer"), train_path=data, val_path="", context=64,
        d_model=64, d_ff=256, max_iters=250, learning_rate=5e-3, out_dir=out + "/sft"))
    as_typed("grpo.py", "config/search_grpo.py", dict(
        policy_path=out + "/sft/policy", prompts_path=data, eval_path="", max_new_tokens=40,
        max_iters=10, out_dir=out + "/grpo"))
    records = read_jsonl(out + "/grpo/log.jsonl")
    for figure in ("objective/reward/solved", "objective/length"):
        values = [record[figure] for record in records if figure in record]
        assert sum(values[-3:]) / 3 > sum(values[:2]) / 2, values

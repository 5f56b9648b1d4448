"""
The real model and its problems: data/gsm_symbolic and data/sums; and, where its folder is there,
two iterations of SmolLM2-135M-Instruct: $SMOLLM2, or out/smollm2 of model_from_wheel.py.
"""
import importlib.util
import json
import os
import re

import pytest
from byte_tokenizer import write_byte_tokenizer
from tiny import Started, jsonl, write

from conftest import ROOT

FOLDER = os.environ.get("SMOLLM2", f"{ROOT}/out/smollm2")
real = pytest.mark.skipif(not os.path.isdir(FOLDER), reason=f"there is no {FOLDER}")


def load_file(path):
    spec = importlib.util.spec_from_file_location("file", f"{ROOT}/{path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def questions(rows):
    return [row["prompt"][0]["content"] for row in rows]


def test_templates_become_rows():
    """Of made-up templates: what is seen and what is not, each problem in one place, answers."""
    prepare = load_file("data/gsm_symbolic/prepare.py")

    def template(number):
        def problem(rng, difficulty):
            x = rng.randint(1, 40 if number else 5)  # template 0 has five problems alone
            return dict(question=f"{number} times {x}?", answer=str(number * x),
                        metadata=dict(answer_cot=f"so\n#### {number * x}"))
        return problem

    rows = prepare.rows_of({n: template(n) for n in range(prepare.UNSEEN + 4)}, 12)
    of = {name: {row["template"] for row in rows[name]} for name in rows if name != "sft_train"}
    assert len(of["rl_new"]) == prepare.UNSEEN and not of["rl_new"] & of["rl_val"]
    assert of["rl_train"] <= of["rl_val"] and len(of["rl_val"]) == 4
    asked = [q for name in of for q in questions(rows[name])]
    assert len(set(asked)) == len(asked)
    assert sorted(questions(rows["sft_train"])) == sorted(questions(rows["rl_train"]))
    for number in range(1, prepare.UNSEEN + 4):
        count = [sum(row["template"] == number for row in rows[name]) for name in of]
        assert count == ([0, 0, 10] if number in of["rl_new"] else [12, 10, 0]), number
    for row in rows["sft_train"]:
        a, b = map(int, re.findall(r"\d+", row["prompt"][0]["content"])[:2])
        assert row["completion"] == [dict(role="assistant", content=f"so\n#### {a * b}")]


def test_sums_are_right():
    """Each step and the answer, by Python; and no sum is in two files."""
    rows = load_file("data/sums/prepare.py").rows()
    asked = [q for some in rows.values() for q in questions(some)]
    assert len(set(asked)) == len(asked) == 2800
    for row in rows["sft_train"]:
        *steps, last = row["completion"][0]["content"].split("\n")
        assert last == f"#### {row['answer']}"
        assert all(eval(step.replace("=", "==")) for step in steps)
        numbers = re.findall(r"\d+", row["prompt"][0]["content"])
        assert sum(map(int, numbers)) == int(row["answer"]) and len(steps) == len(numbers) - 1


def test_the_form_of_a_solution():
    form = load_file("data/gsm_symbolic/reward.py").form
    texts = ["1 + 1 = 2\n#### 2", "#### 1,234.5", "#### -3\n", "#### 2 cats", "so ####2", "2", ""]
    assert form(dict(completions=texts)) == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]


def test_the_table(tmp_path):
    """Of a made-up run: gains problem by problem, speeds, memory in either unit, samples."""
    (model := tmp_path / "model").mkdir()
    write_byte_tokenizer(str(model))
    write(model / "chat_template.jinja", "{% for m in messages %}{{ m['content'] }}{% endfor %}")
    write(model / "config.json", json.dumps(dict(
        model_type="gpt2", hidden_size=8, num_hidden_layers=2, vocab_size=16,
        num_attention_heads=2, num_key_value_heads=1, intermediate_size=4)))
    prompt = [dict(role="user", content="ab")]
    keys = dict(policy_path=str(model), prompts_path=jsonl(tmp_path / "p", [dict(prompt=prompt)]),
                batch_size=2, max_new_tokens=4)
    line = {"time/rollout": 2.0, "time/score": 1.0, "time/update": 4e-8, "time/iteration": 3.0,
            "objective/length": 3.0, "objective/kl": 0.5, "policy/sampler_gap": 1e-3,
            "mem/peak_mib": 3072.0}
    for name, lora, unit in ("grpo", "", "MiB"), ("ppo", "16", "GiB"):
        out = tmp_path / f"x_{name}"
        out.mkdir()
        write(out / "config.json", json.dumps(keys | dict(lora=lora)))
        jsonl(out / "log.jsonl", [line | {"iteration": i, "time/update": s}
                                  for i, s in enumerate((9.0, 4e-8, 4e-8))])
        write(f"{out}.memory", f"\n{unit}    weights\npolicy  1.0  2.0\n\nat the peak of\n"
              "rollout    1024.0   policy 1.0\nupdate    2048.0   policy 1.0, step 2.0\n")
    said = "a1", "b2", "c3", "a1", "b8", "c9"
    jsonl(tmp_path / "x_grpo/samples.jsonl", [
        dict(row=row, prompt=prompt, text=text) for row, text in said])
    right = {"start": [0, 0, 0, 0], "sft": [1, 0, 0, 0], "rl": [1, 1, 1, 0]}
    write(tmp_path / "x_seen.json", json.dumps(dict(prompts=4, policies={
        name: {"greedy accuracy": dict(mean=sum(some) / 4, error=0.125)}
        for name, some in right.items()})))
    jsonl(tmp_path / "x_seen.jsonl", [
        dict(policy=name, mode=mode, row=row, scores=dict(accuracy=x if mode == "greedy" else 1))
        for name, some in right.items() for mode in ("greedy", "sampled")
        for row, x in enumerate(some)])
    result = Started("data/gsm_symbolic/table.py", ["x"], str(tmp_path)).wait()
    assert result.codes == [0], result
    with open(tmp_path / "x.md", encoding="utf-8") as f:
        text = f.read()
    assert "| seen (4): greedy accuracy | 0.0% ± 12.5% | 25.0% ± 12.5% | 75.0% ± 12.5% |" in text
    # gains 0, 1, 1, 0: deviation sqrt(1 / 3), over sqrt(4), times 1.96
    assert "| seen: greedy, points above SFT |  |  | +50.0% ± 56.6% |" in text
    assert "| iterations | 3 | 3 |" in text
    assert "| tokens of a prompt, of a response | 2, 3 | 2, 3 |" in text
    # weights 2 * 8 * (2 * 8 + 2 * 4 + 3 * 4) = 576: 6 or 4 FLOP * 2 rows * ((576 + 80) * 5 + 384)
    assert "| update, TFLOP/s | 1.1 | 0.7 |" in text
    assert "| tokens trained a second | 250,000,000 | 250,000,000 |" in text
    assert "| memory, GiB | 3.0 (predicted: 2.0) | 3.0 (predicted: 2048.0) |" in text
    assert text.count("before GRPO") == 2 and "before GRPO: 2\n\nafter GRPO: 8" in text
    assert "before GRPO: 3\n\nafter GRPO: 9" in text

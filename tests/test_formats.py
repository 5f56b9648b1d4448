"""How given rows become examples: rows that are too long, several files, and the keys that say which."""
import json
import math
import re

import pytest

import tiny
from examples import encode_scored
from prompts import encode_prompts
from errors import BadInput
from rows import Rows
from tiny import forked, jsonl, one_run


# ---------------------------------------------------------------------------------------------------------------------
# limits of tokens


def test_prompts_that_are_too_long(capsys):
    tokenizer = tiny.byte_tokenizer([])

    def rows():
        return Rows([{"prompt": text} for text in ("abcdef", "ab", "abcd", "xyz")], [("f", None, 3), ("g", 2.0, 1)])

    def encoded(rows, path="f,2*g", longest=3, too_long="error"):
        return [ids.tolist() for ids in encode_prompts(rows, path, tokenizer, longest, "all", too_long)]

    with pytest.raises(BadInput, match="^f, row 1: it has 6 tokens, and all is 3"):
        encoded(rows())
    dropped = rows()
    assert encoded(dropped, too_long="drop") == [[97, 98], [120, 121, 122]]
    assert dropped == [{"prompt": "ab"}, {"prompt": "xyz"}] and dropped.parts == [("f", None, 1), ("g", 2.0, 1)]
    assert "f,2*g: 2 of 4 rows are dropped" in capsys.readouterr().out
    cut = rows()
    assert encoded(cut, too_long="cut")[:3] == [[100, 101, 102], [97, 98], [98, 99, 100]]
    assert cut == rows() and "2 of 4 rows are cut" in capsys.readouterr().out
    tokenizer.bos_ids = [7]
    assert encoded(rows(), too_long="cut")[0] == [7, 101, 102]  # BOS stays in front
    with pytest.raises(BadInput, match="^g: no row is left"):
        encoded(rows(), "f", too_long="drop")


def test_a_pair_is_too_long_where_one_of_its_answers_is():
    tokenizer = tiny.byte_tokenizer([])
    pairs = [dict(prompt="1", chosen=a, rejected=b) for a, b in (("2", "3"), ("2", "3333"), ("2222", "3"))]

    def encoded(numbers, too_long):
        rows = Rows([pairs[i] for i in numbers], [("f", None, len(numbers))])
        return len(encode_scored(rows, "f", tokenizer, ("chosen", "rejected"), 4, too_long=too_long))

    assert encoded((0, 1, 2), "drop") == 1
    for numbers in ((0, 1), (0, 2)):
        with pytest.raises(BadInput, match="^f, row 2: it has 6 tokens"):
            encoded(numbers, "error")


# ---------------------------------------------------------------------------------------------------------------------
# the scripts' keys

@pytest.fixture(scope="module")
def runs(world, tmp_path_factory):
    """(What is refused is in test_bad_input.py.)"""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "numbers.json").write_text(json.dumps([dict(q=f"{i}+{i}=", a=2 * i) for i in range(1, 60)]))
    jsonl(folder / "more.jsonl", [dict(prompt="a long prompt, of 30 letters: ", answer="1"),
                                  *(dict(prompt=f"{i}=", answer=i) for i in range(9))])
    jsonl(folder / "ties.jsonl", [dict(prompt=f"{i}", chosen="ab", rejected="ab") for i in range(9)])
    mix = f"{world.sft_train},0.25*{world.sft_val}"
    sft = dict(eval_size=0, init_from=world.policy, train_path=mix)
    jobs = {
        "mix": ("sft", sft | dict(val_path="", epochs=0.5, max_iters=99)),
        "drop": ("sft", sft | dict(max_tokens=10, too_long="drop")),
        "rm": ("rm", dict(val_path="", demonstrations_path="", epochs=1)),
        "ties": ("rm", dict(train_path=f"{folder}/ties.jsonl", val_path=f"{folder}/ties.jsonl", max_iters=1)),
        "ppo": ("ppo", dict(prompts_path=f"{folder}/numbers.json", fields="q>prompt,a>answer", eval_path="", epochs=0.2,
                            reward_functions="accuracy", value_init="policy", max_prompt_tokens=5, too_long="drop")),
        "grpo": ("grpo", dict(prompts_path=f"{world.rl_train},2*{folder}/more.jsonl", eval_path="", max_prompt_tokens=6,
                              reward_functions=world.rule("prompts"), too_long="cut", max_refills=1))}
    return forked(folder, {
        name: [one_run(f"{script}.py", getattr(world, script)("out", dtype="float64", eval_interval=1, **keys))]
        for name, (script, keys) in jobs.items()}).succeeded()


def test_a_mix_and_epochs(runs):
    log = runs.log("mix")
    assert len(log) == 5 and not any("eval/loss" in record for record in log)
    assert json.load(open(f"{runs.out('mix')}/config.json"))["max_iters"] == 4  # ceil(0.5 * 52 / 7)


def test_too_long_for_sft(runs, world):
    rows = [json.loads(line) for path in (world.sft_train, world.sft_val) for line in open(path)]
    texts = [row["prompt"] + row["completion"] for row in rows]
    over = sum(len(ids) + 1 > 10 for ids in tiny.byte_tokenizer().encode_texts(texts))
    assert f"{over} of 52 rows" in runs["drop"][0]["stdout"][0]


def test_reward_models_without_held_out_pairs_and_demonstrations(runs):
    with open(f"{runs.out('rm')}/reward_model/config.json") as f:
        assert json.load(f)["score_shift"] != 0
    assert "eval/loss" not in runs.log("rm")[0]


def test_a_tie_is_half_right(runs):
    first = runs.log("ties")[0]
    assert first["train/accuracy"] == first["eval/accuracy"] == 0.5 and abs(first["loss/preference"] - math.log(2)) < 1e-12
    assert "in 9 pairs" in runs["ties"][0]["stdout"][0]


def test_prompts_with_other_names_and_no_evaluation(runs):
    assert "50 of 59 rows" in runs["ppo"][0]["stdout"][0]  # 10+10= has six tokens
    log = runs.log("ppo")
    assert len(log) == 2 and not any(key.startswith("eval/") for record in log for key in record)  # ceil(0.2 * 9 / 7) iterations
    assert "objective/accuracy" in log[0]
    assert re.search(r"more.jsonl: \d+ of 50 rows", runs["grpo"][0]["stdout"][0])

"""How given rows become examples: rows that are too long, several files, and the keys that say which."""
import json
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

HELD = dict(dtype="float64", eval_interval=1)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return tiny.build(str(tmp_path_factory.mktemp("world")))


@pytest.fixture(scope="module")
def runs(world, tmp_path_factory):
    """(folder, {name: [what came of each run in it]})."""
    folder = tmp_path_factory.mktemp("runs")
    numbers = [dict(q=f"{i}+{i}=", a=2 * i) for i in range(1, 60)]
    (folder / "numbers.json").write_text(json.dumps(numbers))
    jsonl(folder / "more.jsonl", [dict(prompt="a long prompt, of 30 letters: ", answer="1"),
                                  *(dict(prompt=f"{i}=", answer=i) for i in range(9))])
    sft = dict(eval_size=0, init_from=world.policy) | HELD

    def job(script, keys):
        return one_run(f"{script}.py", getattr(world, script)(**(dict(out_dir="out") | keys)))

    mix = f"{world.sft_train},0.25*{world.sft_val}"
    return folder, forked(str(folder), {
        "mix": [job("sft", sft | dict(train_path=mix, val_path="", epochs=0.5, max_iters=99)),
                job("sft", sft | dict(train_path=mix.replace("0.25", "0.5"), val_path="", epochs=0.5))],
        "drop": [job("sft", sft | dict(max_tokens=10, too_long="drop", train_path=mix))],
        "too long": [job("sft", sft | dict(max_tokens=10))],
        "rm": [job("rm", dict(val_path="", demonstrations_path="", epochs=1) | HELD)],
        "rm cut": [job("rm", dict(too_long="cut"))],
        "ppo": [job("ppo", dict(prompts_path=f"{folder}/numbers.json", fields="q>prompt,a>answer", eval_path="", epochs=0.2,
                                reward_functions="accuracy", value_init="policy", max_prompt_tokens=5,
                                too_long="drop") | HELD)],
        "long prompt": [job("ppo", dict(max_prompt_tokens=2))],
        "grpo": [job("grpo", dict(prompts_path=f"{folder}/numbers.json,2*{folder}/more.jsonl", fields="", eval_path="", **HELD))],
        "grpo mix": [job("grpo", dict(prompts_path=f"{world.rl_train},2*{folder}/more.jsonl", eval_path="", max_prompt_tokens=6,
                                      reward_functions=world.rule("prompts"), too_long="cut", max_refills=1, **HELD))],
        })


def good(runs, name, part=0):
    result = runs[1][name][part]
    assert set(result["codes"]) == {0}, result["stderr"]
    return result["stdout"][0]


def bad(runs, name, said, part=0):
    result = runs[1][name][part]
    assert set(result["codes"]) == {2} and re.fullmatch(rf"\w+.py: error: .*{said}.*\n", result["stderr"][0]), result


def test_a_mix_and_epochs(runs, world):
    out = runs[0] / "mix" / "out"
    good(runs, "mix")
    log = tiny.read_log(out)
    assert len(log) == 5 and not any("eval/loss" in record for record in log)
    assert json.load(open(out / "config.json"))["max_iters"] == 4  # ceil(0.5 * 52 / 7)
    bad(runs, "mix", "train_path", 1)


def test_too_long_for_sft(runs, world):
    rows = [json.loads(line) for path in (world.sft_train, world.sft_val) for line in open(path)]
    tokenizer = tiny.byte_tokenizer()
    lengths = [len(ids) + 1 for ids in tokenizer.encode_texts([row["prompt"] + row["completion"] for row in rows])]
    over = sum(length > 10 for length in lengths)
    assert f"{over} of 52 rows" in good(runs, "drop")
    first = next(i for i, length in enumerate(lengths) if length > 10)
    bad(runs, "too long", rf"row {first + 1}: .* {lengths[first]} .*max_tokens.* 10")
    bad(runs, "rm cut", "too_long")


def test_reward_models_without_held_out_pairs_and_demonstrations(runs):
    good(runs, "rm")
    with open(runs[0] / "rm" / "out" / "reward_model" / "config.json") as f:
        assert json.load(f)["score_shift"] != 0
    assert "eval/loss" not in tiny.read_log(runs[0] / "rm" / "out")[0]


def test_prompts_with_other_names_and_no_evaluation(runs):
    assert "50 of 59 rows" in good(runs, "ppo")  # 10+10= has six tokens
    bad(runs, "long prompt", "row 1: .*max_prompt_tokens.* 2")
    log = tiny.read_log(runs[0] / "ppo" / "out")
    assert len(log) == 2 and not any(key.startswith("eval/") for record in log for key in record)  # ceil(0.2 * 9 / 7) iterations
    assert "objective/accuracy" in log[0]
    bad(runs, "grpo", "numbers.json, row 1: field 'prompt'")
    assert re.search(r"more.jsonl: \d+ of 50 rows", good(runs, "grpo mix"))

"""
Bad input. One table of runs: what is given, and which file, row and key the one line names; the exit code is 2 and nothing
is written. Then what a run of its own would take long to show: messages, tokenizers, templates, rows that do not fit.
"""
import io
import json
import math
import os
import shutil
import sys

import pytest
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

import errors
from data import encode_prompts
from engine.tokenizers import load_tokenizer
from errors import BadConfig, BadInput, Stop, one_line
from rows import prompt_row, read_rows

import tiny
from tiny import forked, jsonl, one_run, write_byte_tokenizer

# ---------------------------------------------------------------------------------------------------------------------
# the table

FILES = "chat.jsonl turns.jsonl foreign.jsonl mute.jsonl pipe nan nan_rm short run nowhere".split()
# name: (script, the keys, what the line names). A word in capitals is a file of FILES, or of the world
TABLE = {
    # files, rows and fields
    "sft row": ("sft.py", dict(train_path="TURNS.JSONL"), ["turns.jsonl", "row 4"]),
    "rm row": ("rm.py", dict(train_path="TURNS.JSONL"), ["turns.jsonl", "row 4"]),
    "ppo row": ("ppo.py", dict(prompts_path="CHAT.JSONL"), ["chat.jsonl", "row 4"]),
    "grpo row": ("grpo.py", dict(eval_path="CHAT.JSONL"), ["chat.jsonl", "row 4"]),
    "layout": ("sft.py", dict(train_path="FOREIGN.JSONL"), ["foreign.jsonl", "line 1", "prompt", "data/convert.py"]),
    "no answer": ("grpo.py", dict(reward_functions="accuracy", prompts_path="MUTE.JSONL"), ["mute.jsonl", "row 2", "accuracy"]),
    "no held-out answer": ("grpo.py", dict(reward_functions="accuracy", eval_path="MUTE.JSONL"), ["mute.jsonl", "row 2"]),
    "a pipe": ("ppo.py", dict(prompts_path="PIPE"), ["pipe"]),
    # models
    "NaN, sft": ("sft.py", dict(init_from="NAN"), ["nan", "lm_head.weight"]),
    "NaN, rm": ("rm.py", dict(init_from="NAN_RM"), ["nan_rm", "NaN"]),
    "NaN, ppo": ("ppo.py", dict(policy_path="NAN"), ["nan", "lm_head.weight"]),
    "the folder of a run": ("ppo.py", dict(policy_path="RUN"), ["run/policy"]),
    "no such model": ("grpo.py", dict(reward_path="NOWHERE"), ["nowhere"]),
    "no score head": ("grpo.py", dict(reward_functions="reward_model", reward_path="POLICY"), ["policy", "head"]),
    "a short context": ("ppo.py", dict(reward_path="SHORT_REWARD", value_init="policy"), ["rl_train.jsonl", "row", "tokens"]),
    "in its own tokens": ("grpo.py", dict(reward_path="SHORT"), ["rl_train.jsonl", "row", "tokens"]),
    "another tokenizer's value": ("ppo.py", dict(reward_path="OTHER_REWARD"), ["--value_init=policy"]),
    # keys that do not go together
    "groups": ("grpo.py", dict(group_size=4), ["batch_size = 15", "group_size = 4"]),
    "one a group": ("grpo.py", dict(group_size=1), ["group_size = 1"]),
    "minibatches": ("grpo.py", dict(num_minibatches=16), ["num_minibatches = 16"]),
    "unknown reward": ("grpo.py", dict(reward_functions="qqq"), ["qqq", "accuracy", "FILE.py:FUNCTION"]),
    "misspelt reward": ("grpo.py", dict(reward_functions="1.0*acuracy"), ["acuracy", "'accuracy'"]),
    "no rewards": ("grpo.py", dict(reward_functions=" "), ["reward"]),
    "no such rules": ("grpo.py", dict(reward_functions="nowhere.py:f"), ["nowhere.py"]),
    "cispo of sequences": ("grpo.py", dict(loss_type="cispo", importance="sequence"), ["loss_type = 'cispo'"]),
    "cispo with dual clip": ("grpo.py", dict(loss_type="cispo", dual_clip=3.0), ["loss_type = 'cispo'", "dual_clip = 0"]),
    "dual clip of 1": ("grpo.py", dict(dual_clip=1.0), ["dual_clip = 1.0"]),
    "k2 times the ratio": ("grpo.py", dict(kl_estimator="k2", kl_correction=True), ["kl_correction"]),
    "k1 as a loss": ("grpo.py", dict(kl_estimator="k1"), ["kl_in", "k1", "--kl_estimator=k2"]),
    "a corrected reward": ("grpo.py", dict(kl_in="reward", kl_correction=True), ["kl_correction"]),
    "refill by another": ("grpo.py", dict(refill_by="accuracy"), ["refill_by = 'accuracy'", "letters"]),
    "an old start": ("ppo.py", dict(target_kl=0.1, staleness=1), ["target_kl", "staleness", "--importance_cap=2"]),
    "no best without prompts": ("ppo.py", dict(keep_best=True, eval_path=""), ["keep_best"]),
    "no reward model": ("ppo.py", dict(reward_functions="length"), ["--value_init=policy"]),
    "roles of three": ("ppo.py", dict(roles="train=1,generate=2"), ["3 ranks", "--nproc_per_node=3"]),
    "nobody trains": ("ppo.py", dict(roles="generate=2"), ["roles"]),
    "half a rank": ("ppo.py", dict(roles="train=1,generate=1.5"), ["roles"]),
    "patience": ("grpo.py", dict(reward_timeout=60), ["reward_timeout = 60", "timeout = 60"]),
    "adafactor in shards": ("sft.py", dict(optim="adafactor", zero_stage="3"), ["adafactor"]),
    "another script's model": ("sft.py", dict(zero_stage="reward=3"), ["zero_stage = 'reward=3'", "policy"]),
    "another script's key": ("grpo.py", dict(ppo_epochs=2), ["'ppo_epochs'", "python ppo.py --ppo_epochs=2"]),
    "a key of old": ("rm.py", dict(zero=3), ["'zero'", "'zero_stage'"]),
    # tools
    "sample row": ("tools/sample.py", dict(policy_path="POLICY", prompts="CHAT.JSONL"), ["chat.jsonl", "row 4"]),
    "sample surrogate": ("tools/sample.py", dict(policy_path="POLICY", prompt="\udcff"), ["command line"]),
    "sample many": ("tools/sample.py", dict(prompt=1, samples=1000001), ["1000001"]),
}
ON_TWO = ("groups", "no answer", "no such rules", "roles of three", "patience")  # these on two ranks: rank 0 alone says so


def spoil(source, folder, name, value):
    """A copy of a model whose tensor has one other number."""
    shutil.copytree(source, folder)
    tensors = load_file(f"{folder}/model.safetensors")
    tensors[name] = tensors[name].clone()
    tensors[name].view(-1)[tensors[name].numel() // 2] = value
    save_file(tensors, f"{folder}/model.safetensors")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder with all runs, and {name: its result}."""
    folder = str(tmp_path_factory.mktemp("bad"))
    world = tiny.build(str(tmp_path_factory.mktemp("world")))
    chat, row = [dict(role="user", content="1+2=")], dict(prompt="1+2=", answer="3", completion="3", chosen="3", rejected="4")
    said = {key: [dict(role="assistant", content="3")] for key in ("completion", "chosen", "rejected")}
    jsonl(f"{folder}/chat.jsonl", [row] * 3 + [row | dict(prompt=chat)])
    jsonl(f"{folder}/turns.jsonl", [row] * 3 + [row | dict(prompt=chat) | said])
    jsonl(f"{folder}/foreign.jsonl", [dict(conversations=[{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}])])
    jsonl(f"{folder}/mute.jsonl", [dict(prompt="1+2=", answer="3"), dict(prompt="1+3=")])
    os.mkfifo(f"{folder}/pipe")
    spoil(world.policy, f"{folder}/nan", "lm_head.weight", math.nan)
    spoil(world.policy, f"{folder}/nan_rm", "transformer.wte.weight", math.nan)  # rm.py has no use for the other
    shutil.copytree(world.short_reward, f"{folder}/short")
    write_byte_tokenizer(f"{folder}/short", ["</think>", "<think>"])  # another tokenizer than the policy's
    os.makedirs(f"{folder}/run/policy")
    for name, text in (("run/config.json", '{"out_dir": "out"}'), ("run/policy/config.json", "{}")):
        with open(f"{folder}/{name}", "w", encoding="utf-8") as f:
            f.write(text)

    def given(value):
        if not isinstance(value, str) or not value.isupper():
            return value
        return f"{folder}/{value.lower()}" if value.lower() in FILES else getattr(world, value.lower())

    cases = {}
    for name, (script, keys, _) in TABLE.items():
        keys = {key: given(value) for key, value in keys.items()}
        if script.startswith("tools"):
            arguments = tiny.arguments(dict(max_new_tokens=4, device_type="cpu") | keys)
        else:
            arguments = getattr(world, script[:-3])("out", **keys)
        cases[name] = [one_run(script, *[arguments] * (2 if name in ON_TWO else 1))]
    return folder, {name: result for name, (result,) in forked(folder, cases).items()}


@pytest.mark.parametrize("name", TABLE)
def test_bad_input_is_one_line_with_code_2_and_nothing_written(runs, name):
    folder, results = runs
    (script, _, words), result = TABLE[name], results[name]
    assert set(result["codes"]) == {2} and result["stderr"][1:] == [""] * (len(result["codes"]) - 1), result
    said = result["stderr"][0]
    assert said.startswith(f"{os.path.basename(script)}: error: ") and said.count("\n") == 1 and len(said) < 750, said
    assert not [word for word in words if word not in said], said
    assert not os.path.exists(f"{folder}/{name}/out")


# ---------------------------------------------------------------------------------------------------------------------
# messages, where they leave


def said_and_code(error, monkeypatch):
    """What report_and_exit writes to stderr for an error, and the exit code it leaves with."""
    class Left(BaseException):
        pass

    def leave(code):
        raise Left(code)

    out = io.StringIO()
    monkeypatch.setattr(sys, "__stderr__", out)
    monkeypatch.setattr(sys, "argv", ["/somewhere/ppo.py"])
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(os, "_exit", leave)
    with pytest.raises(Left) as left:
        errors.report_and_exit(type(error), error, None)
    return out.getvalue(), left.value.args[0]


@pytest.mark.parametrize("kind, code", [(BadInput, 2), (BadConfig, 2), (Stop, 1)])
@pytest.mark.parametrize("text, wanted", [
    ("two\nlines\r\n", "two\\nlines"), ("\x1b[31mred\x07\x00", "\\x1b[31mred\\x07\\x00"),
    ("half \ud800 a pair", "half \\ud800 a pair"), ("a\u2028b\x85c\u202ed", "a\\u2028b\\x85c\\u202ed"),
    ("Grüße, 世界 \U0001f600", "Grüße, 世界 \U0001f600"),
    ("a" * 400 + "\n" * 10**6 + "b" * 400, "a" * 350 + " ... " + "b" * 345)])
def test_a_message_leaves_on_one_line(kind, code, text, wanted, monkeypatch):
    assert said_and_code(kind(text), monkeypatch) == (f"ppo.py: error: {wanted}\n", code)
    assert len(one_line(text)) <= 700


@pytest.mark.parametrize("row", [{f"key {i}": i for i in range(20_000)}, {"\x1b[2J\n\ud800": 1}])
def test_a_row_of_strange_keys_in_a_file_of_a_strange_name(row, tmp_path, monkeypatch):
    file = tmp_path / "two\nrows\x1b[2J.jsonl"
    file.write_text(json.dumps(row) + "\n")
    with pytest.raises(BadInput) as caught:
        read_rows(str(file), prompt_row)
    said, code = said_and_code(caught.value, monkeypatch)
    assert code == 2 and len(said) < 730 and said.count("\n") == 1 and "\x1b" not in said
    assert "two\\nrows\\x1b[2J.jsonl, line 1" in said and "'prompt'" in said


# ---------------------------------------------------------------------------------------------------------------------
# tokenizers, templates, rows that do not fit


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    """A BPE of 260 tokens: bytes, three special ones of the first ids and one merge; with a chat template."""
    folder = tmp_path_factory.mktemp("tokens")
    names = ["<s>", "</s>", "<|start|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "th"]
    backend = Backend(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[("t", "h")]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in names[:3]])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(dict(
        tokenizer_class="PreTrainedTokenizerFast", bos_token="<s>", eos_token="</s>", model_max_length=64)))
    (folder / "generation_config.json").write_text('{"eos_token_id": [1], "pad_token_id": 1}')
    (folder / "config.json").write_text('{"model_type": "llama", "eos_token_id": 1, "bos_token_id": 0}')
    return folder


@pytest.mark.parametrize("name, change, said", [
    ("tokenizer.json", lambda v: v["model"].update(type="Bigram"), "tokens"),
    ("config.json", lambda v: v.update(eos_token_id=260), "eos_token_id = .?260"),
    ("generation_config.json", lambda v: v.update(eos_token_id=[1, "2"]), "generation_config.json.*'2'"),
])
def test_broken_or_swapped_tokenizers_are_named(name, change, said, tokens, tmp_path):
    folder = shutil.copytree(tokens, tmp_path / "tokens")
    value = json.loads((folder / name).read_text())
    change(value)
    (folder / name).write_text(json.dumps(value))
    with pytest.raises(BadInput, match=said):
        load_tokenizer(str(folder))


@pytest.mark.parametrize("template", [
    "{{ 1 / 0 }}", "{% for %}", "{{ nothing.at.all }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ raise_exception('two\\nlines') }}"])
def test_a_template_that_fails(template, tokens, tmp_path):
    folder = shutil.copytree(tokens, tmp_path / "tokens")
    (folder / "chat_template.jinja").write_text(template)
    rows = [dict(prompt="a"), dict(prompt=[dict(role="user", content="a")])]
    with pytest.raises(BadInput, match="rows.jsonl, row 2: .*/tokens") as caught:
        encode_prompts(rows, "rows.jsonl", load_tokenizer(str(folder)), 100, "all")
    assert "\n" not in str(caught.value)

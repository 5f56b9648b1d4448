"""
Bad input. One table of runs: what is given, and which file, row and key the one line names; the exit code is 2 and nothing
is written. Then what a run of its own would take long to show: messages, tokenizers, templates, rows that do not fit.
"""
import io
import json
import math
import os
import pickle
import re
import shutil
import sys

import pytest
from safetensors.torch import load_file, save_file

import chats
import errors
from configurator import run_config_file
from prompts import encode_prompts
from tokenizer import load_tokenizer
from options.foreign_rewards import as_ours
from rewards import call_rewards
from run_folder import open_run
from errors import BadConfig, BadInput, Stop
from load import load_model
from rows import prompt_row, read_rows
from tools.output import check_writable, written

import tiny
from tiny import forked, jsonl, one_run, write_byte_tokenizer

# ---------------------------------------------------------------------------------------------------------------------
# the table

FILES = "chat.jsonl turns.jsonl thoughts.jsonl cuts.jinja foreign.jsonl mute.jsonl pipe nan nan_rm no_zero run nowhere".split()
# name: (script, the keys, what the line names). A word in capitals is a file of FILES, or of the world
TABLE = {
    # files, rows and fields
    "sft row": ("sft.py", dict(train_path="TURNS.JSONL"), ["turns.jsonl", "row 4"]),
    "thoughts": ("sft.py", dict(train_path="THOUGHTS.JSONL", chat_template="CUTS.JINJA"),
                 ["thoughts.jsonl", "row 2", "cuts.jinja", "--chat_template=FILE", "--template_kwargs="]),
    "ppo row": ("ppo.py", dict(prompts_path="CHAT.JSONL"), ["chat.jsonl", "row 4"]),
    "grpo row": ("grpo.py", dict(eval_path="CHAT.JSONL"), ["chat.jsonl", "row 4"]),
    "layout": ("sft.py", dict(train_path="FOREIGN.JSONL"), ["foreign.jsonl", "line 1", "prompt", "data/convert.py"]),
    "no answer": ("grpo.py", dict(reward_functions="accuracy", prompts_path="MUTE.JSONL"), ["mute.jsonl", "row 2", "accuracy"]),
    "a pipe": ("ppo.py", dict(prompts_path="PIPE"), ["pipe"]),
    # models
    "NaN, rm": ("rm.py", dict(init_from="NAN_RM"), ["nan_rm", "NaN"]),
    "NaN, ppo": ("ppo.py", dict(policy_path="NAN"), ["nan", "lm_head.weight"]),
    "the folder of a run": ("ppo.py", dict(policy_path="RUN"), ["run/policy"]),
    "no score head": ("grpo.py", dict(reward_functions="reward_model", reward_path="POLICY"), ["policy", "head"]),
    "a short context": ("ppo.py", dict(reward_path="SHORT_REWARD", value_init="policy"), ["rl_train.jsonl", "row", "tokens"]),
    "another tokenizer's value": ("ppo.py", dict(reward_path="OTHER_REWARD"), ["--value_init=policy"]),
    "another reference": ("ppo.py", dict(ref_path="JUDGE"), ["judge", "architecture"]),
    "no zero": ("ppo.py", dict(reward_path="NO_ZERO", roles="train=1,score=1"), ["score_shift"]),
    # keys that do not go together
    "no reference": ("grpo.py", dict(ref_path="POLICY", kl_coef=0.0), ["ref_path", "--kl_coef=0.05"]),
    "groups": ("grpo.py", dict(group_size=4), ["batch_size = 15", "group_size = 4"]),
    "minibatches": ("grpo.py", dict(num_minibatches=16), ["num_minibatches = 16"]),
    "unknown reward": ("grpo.py", dict(reward_functions="qqq"), ["qqq", "accuracy", "FILE.py:FUNCTION"]),
    "no rewards": ("grpo.py", dict(reward_functions=" "), ["reward"]),
    "no such rules": ("grpo.py", dict(reward_functions="nowhere.py:f"), ["nowhere.py"]),
    "attention of a package": ("sft.py", dict(attn_implementation="flash_attention_2"), ["attn_implementation", "flash"]),
    "weights of no cap": ("ppo.py", dict(importance_outside="drop"), ["importance_outside", "--importance_cap=2"]),
    "a floor above the cap": ("grpo.py", dict(importance_cap=0.4, importance_floor=0.5), ["importance_floor = 0.5"]),
    "cispo of sequences": ("grpo.py", dict(loss_type="cispo", importance="sequence"), ["loss_type = 'cispo'"]),
    "a key of a recipe": ("grpo.py", dict(dual_clip=3.0), ["recipes/dual_clip.diff", "tools/fork.py dual_clip"]),
    "k1 as a loss": ("grpo.py", dict(kl_estimator="k1"), ["kl_in", "k1", "--kl_estimator=k2"]),
    "a corrected reward": ("grpo.py", dict(kl_in="reward", kl_correction=True), ["kl_correction"]),
    "refill by another": ("grpo.py", dict(refill_by="accuracy"), ["refill_by = 'accuracy'", "letters"]),
    "no best without prompts": ("ppo.py", dict(keep_best=True, eval_path=""), ["keep_best"]),
    "no reward model": ("ppo.py", dict(reward_functions="length"), ["--value_init=policy"]),
    "a forgotten reward model": ("grpo.py", dict(reward_functions="length", reward_path="REWARD"),
                                 ["reward_path", "--reward_functions=reward_model"]),
    "the same in ppo": ("ppo.py", dict(reward_functions="length,accuracy", reward_path="REWARD", value_init="reward"),
                        ["reward_path", "--reward_functions=reward_model"]),
    "and with another start": ("ppo.py", dict(reward_functions="format", reward_path="nowhere", value_init="shared"),
                               ["reward_path = 'nowhere'", "--reward_functions=reward_model"]),
    "which reward model": ("grpo.py", dict(reward_functions="0.5*reward_model", reward_path=""), ["--reward_path=FOLDER"]),
    "which, in ppo": ("ppo.py", dict(reward_path=""), ["--reward_path=FOLDER"]),
    "roles of three": ("ppo.py", dict(roles="train=1,generate=2"), ["3 ranks", "--nproc_per_node=3"]),
    "unplanned": ("grpo.py", dict(generate_tp=2), ["generate_tp"]),  # transformers has no plan for GPT-2
    "patience": ("grpo.py", dict(reward_timeout=60), ["reward_timeout = 60", "timeout = 60"]),
    "adafactor in shards": ("sft.py", dict(optim="adafactor", zero_stage="3"), ["adafactor"]),
    "another script's key": ("grpo.py", dict(ppo_epochs=2), ["'ppo_epochs'", "python ppo.py --ppo_epochs=2"]),
    "a key of old": ("rm.py", dict(zero=3), ["'zero'", "'zero_stage'"]),
    # tools
    "sample row": ("tools/sample.py", dict(policy_path="POLICY", prompts="CHAT.JSONL"), ["chat.jsonl", "row 4"]),
    "sample surrogate": ("tools/sample.py", dict(policy_path="POLICY", prompt="\udcff"), ["command line"]),
    "bench": ("tools/bench.py", dict(work="ppo,gpro"), ["gpro", "sampling"]),
}
ON_TWO = ("groups", "no answer", "no such rules", "roles of three", "no zero", "unplanned")  # on two ranks: rank 0 alone says so

LATE = ("no zero", "unplanned")  # found in a model, when the folder is there


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
    thinks = [dict(role="assistant", content=f"<think>{text}</think>3") for text in ("1+2", "once more")]
    several = [thinks[0], *chat, thinks[1]]
    jsonl(f"{folder}/thoughts.jsonl", [dict(prompt=chat, completion=turns) for turns in (thinks[:1], several)])
    with open(f"{folder}/cuts.jinja", "w", encoding="utf-8") as f:
        f.write("{% for m in messages %}{{ '#' + m['content'].split('</think>')[-1] + eos_token }}{% endfor %}"
                "{% if add_generation_prompt %}#{% endif %}")
    jsonl(f"{folder}/foreign.jsonl", [dict(conversations=[{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}])])
    jsonl(f"{folder}/mute.jsonl", [dict(prompt="1+2=", answer="3"), dict(prompt="1+3=")])
    os.mkfifo(f"{folder}/pipe")
    spoil(world.policy, f"{folder}/nan", "lm_head.weight", math.nan)
    spoil(world.policy, f"{folder}/nan_rm", "transformer.wte.weight", math.nan)  # rm.py has no use for the other
    shutil.copytree(world.reward, f"{folder}/no_zero")
    with open(f"{folder}/no_zero/config.json", encoding="utf-8") as f:
        config = json.load(f)
    del config["score_shift"]
    with open(f"{folder}/no_zero/config.json", "w", encoding="utf-8") as f:
        json.dump(config, f)
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
    assert name in LATE or not os.path.exists(f"{folder}/{name}/out")


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


@pytest.mark.parametrize("kind, code", [(BadInput, 2), (Stop, 1)])
@pytest.mark.parametrize("text, wanted", [
    ("two\nlines\r\n", "two\\nlines"), ("\x1b[31mred\x07 half \ud800 a pair", "\\x1b[31mred\\x07 half \\ud800 a pair"),
    ("Grüße, 世界 a\u2028b", "Grüße, 世界 a\\u2028b"), ("a" * 400 + "\n" * 10**6 + "b" * 400, "a" * 350 + " ... " + "b" * 345)])
def test_a_message_leaves_on_one_line(kind, code, text, wanted, monkeypatch):
    assert said_and_code(kind(text), monkeypatch) == (f"ppo.py: error: {wanted}\n", code)


def test_a_row_of_strange_keys_in_a_file_of_a_strange_name(tmp_path, monkeypatch):
    file = tmp_path / "two\nrows\x1b[2J.jsonl"
    file.write_text(json.dumps({f"key {i} \x1b[2J\ud800": i for i in range(20_000)}) + "\n")
    with pytest.raises(BadInput) as caught:
        read_rows(str(file), prompt_row)
    said, code = said_and_code(caught.value, monkeypatch)
    assert code == 2 and len(said) < 730 and said.count("\n") == 1 and "\x1b" not in said
    assert "two\\nrows\\x1b[2J.jsonl, line 1" in said and "'prompt'" in said


# ---------------------------------------------------------------------------------------------------------------------
# tokenizers, templates, rows that do not fit


@pytest.fixture
def tokens(tmp_path):
    """A folder with the toy's tokenizer, and the files of a model beside it."""
    write_byte_tokenizer(str(tmp_path / "tokens"), tiny.MARKERS)
    (tmp_path / "tokens" / "config.json").write_text('{"model_type": "llama", "eos_token_id": 258}')
    (tmp_path / "tokens" / "generation_config.json").write_text('{"eos_token_id": [258]}')
    load_tokenizer(str(tmp_path / "tokens"))
    return tmp_path / "tokens"


@pytest.mark.parametrize("name, change, said", [
    ("tokenizer.json", lambda v: v["model"].update(type="Bigram"), "tokens"),
    ("config.json", lambda v: v.update(eos_token_id=300), "eos_token_id = .?300"),
    ("generation_config.json", lambda v: v.update(eos_token_id=[1, "2"]), "generation_config.json.*'2'"),
    ("generation_config.json", lambda v: v.update(eos_token_id=[258, [1]]), "generation_config.json.*\\[1\\]"),
    ("tokenizer_config.json", lambda v: v.update(model_max_length="512"), "tokens"),
    ("tokenizer_config.json", lambda v: v.update(chat_template=5), "tokens"),
    ("tokenizer_config.json", lambda v: v.update(tokenizer_class="AutoModelForCausalLM"), "AutoModelForCausalLM"),
])
def test_broken_or_swapped_tokenizers_are_named(name, change, said, tokens):
    value = json.loads((tokens / name).read_text())
    change(value)
    (tokens / name).write_text(json.dumps(value))
    with pytest.raises(BadInput, match=said):
        load_tokenizer(str(tokens))


@pytest.mark.parametrize("template", [
    "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
    "{{ 1 / 0 }}", "{% for %}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ raise_exception('two\\nlines') }}"])
def test_a_template_that_fails(template, tokens, monkeypatch):
    monkeypatch.setattr(chats, "RENDERING", 0.3)
    (tokens / "chat_template.jinja").write_text(template)
    rows = [dict(prompt="a"), dict(prompt=[dict(role="user", content="a")])]
    with pytest.raises(BadInput, match="rows.jsonl, row 2: .*/tokens") as caught:
        encode_prompts(rows, "rows.jsonl", load_tokenizer(str(tokens)), 100, "all")
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------------------------------------------------------------
# folders and files of others are data


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return tiny.build(str(tmp_path_factory.mktemp("small")))


def changed(small, folder, **settings):
    """A copy of the policy with other settings in its config.json."""
    shutil.copytree(small.policy, folder)
    config = json.loads((folder / "config.json").read_text()) | settings
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize("settings", [
    dict(attn_implementation="kernels-community/flash-attn"), dict(_attn_implementation="someone/kernel@main:f"),
    dict(experts_implementation="someone/kernel"), dict(auto_map={"AutoConfig": "mine.X", "AutoModelForCausalLM": "mine.Y"}),
    dict(attribute_map={"x": "_attn_implementation_internal"}, x="someone/kernel"), dict(get_text_config=1),
    dict(configuration_files=["config.9.json"]), dict(transformers_weights="other.safetensors")], ids=str)
def test_what_a_config_says_of_code_is_dropped(small, settings, tmp_path):
    model = load_model(changed(small, tmp_path / "other", **settings))
    for name, p in load_model(small.policy).named_parameters():
        assert (model.get_parameter(name) == p).all()
    assert model.hf.config._attn_implementation in ("sdpa", "eager")


@pytest.mark.parametrize("settings", [
    dict(sliding_window=math.nan), dict(sliding_window=1e30), dict(score_shift="x"), dict(logit_scale=10**400),
    dict(quantization_config=dict(quant_method="gptq")), dict(n_positions=10**30)], ids=str)
def test_a_config_that_makes_no_sense(small, settings, tmp_path):
    with pytest.raises(BadInput, match="other"):
        load_model(changed(small, tmp_path / "other", **settings))


def test_no_pickle_is_read(small, tmp_path):
    """Whatever the index names, and whatever else lies beside the weights."""
    class Payload:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path}/ran",)

    folder = changed(small, tmp_path / "other")
    for name in (".metadata", "adapter_model.bin", "pytorch_model.bin"):
        with open(f"{folder}/{name}", "wb") as f:
            pickle.dump(Payload(), f)
    shutil.copy(f"{folder}/model.safetensors", f"{folder}/shard-00000-model-00001-of-00001.safetensors")
    with open(f"{folder}/adapter_config.json", "w", encoding="utf-8") as f:
        json.dump(dict(peft_type="LORA", base_model_name_or_path="someone/model"), f)
    load_model(folder)
    os.remove(f"{folder}/model.safetensors")
    for name in ("pytorch_model.bin", "../small/policy/model.safetensors", "/etc/passwd", 5):
        with open(f"{folder}/model.safetensors.index.json", "w", encoding="utf-8") as f:
            json.dump(dict(metadata={}, weight_map={"lm_head.weight": name}), f)
        with pytest.raises(BadInput, match="weight_map"):
            load_model(folder)
    assert not os.path.exists(f"{tmp_path}/ran")


def test_what_a_tool_may_replace(small, tmp_path):
    """New files, and what it has written itself; all else is refused, and stays as it was."""
    made = rb'\{"mine": '
    os.makedirs(tmp_path / "run" / "checkpoint-000001" / "policy")
    for name in ("run/config.json", "run/log.jsonl", "run/checkpoint-000001/manifest.json", "run/checkpoint-000001/state.json",
                 "data.jsonl", "notes.json", "mine.py", "target.json"):
        (tmp_path / name).write_text('{"theirs": 1}')
    os.symlink(tmp_path / "nowhere", tmp_path / "dangling.json")
    os.symlink(tmp_path / "own.json", tmp_path / "link.json")
    os.mkfifo(tmp_path / "pipe.json")
    os.mkdir(tmp_path / "folder.json")
    (tmp_path / "own.json").write_text('{"mine": 1}')
    (tmp_path / "run" / "checkpoint-000001" / "new.txt").write_text('{"mine": 1}')
    def files():  # without the times at which they were read
        return {path: (path.lstat().st_ino, path.lstat().st_size, path.lstat().st_mtime_ns) for path in tmp_path.rglob("*")}

    before = files()
    for name in ("run/config.json", "run/log.jsonl", "run/samples.jsonl", "run/checkpoint-000001/state.json", "data.jsonl",
                 "run/checkpoint-000001/other.json", "run/checkpoint-000001/new.txt", "notes.json", "mine.py", "dangling.json",
                 "link.json", "pipe.json", "folder.json", "own.json/x.json", ".json", "x" * 300):
        with pytest.raises(BadInput, match="--out"):
            check_writable(str(tmp_path / name), made=made)
    for name in ("tokenizer.json", "config.json", "new.json"):
        with pytest.raises(BadInput, match="--out"):
            check_writable(f"{small.policy}/{name}", made=b"")
    with pytest.raises(BadInput, match="--out"):
        check_writable(str(tmp_path / "own.json"), reads=[str(tmp_path / "own.json")], made=made)
    assert files() == before
    for name in ("own.json", "run/curves.json", "new/new.json"):
        check_writable(str(tmp_path / name), made=made)
    with pytest.raises(KeyError), written(tmp_path / "own.json") as f:
        f.write("half")
        raise KeyError
    assert (tmp_path / "own.json").read_text() == '{"mine": 1}' and not list(tmp_path.rglob("*.part"))


def test_out_dir_of_another_is_left_alone(tmp_path):
    theirs = tmp_path / "theirs.txt"
    theirs.write_text("theirs")
    for name in (".lock", "log.jsonl", "config.json", "config.json.tmp"):
        os.makedirs(tmp_path / f"of {name}")
        os.symlink(theirs, tmp_path / f"of {name}" / name)
    for name, text in (("config.json", "no JSON"), ("config.json", "[1]"), ("best_policy", None)):
        folder = tmp_path / f"{name} {text}"
        os.makedirs(folder if text else folder / name)
        (folder / name if text else folder / name / "x").write_text(text or "theirs")
    for folder in [x for x in tmp_path.iterdir() if x.is_dir()]:
        name, = os.listdir(folder)
        with pytest.raises(BadInput, match=re.escape(name)):
            open_run(str(folder), dict(out_dir=str(folder)), ())
        assert set(os.listdir(folder)) <= {name, ".lock"}
    assert theirs.read_text() == "theirs" and (tmp_path / "config.json no JSON" / "config.json").read_text() == "no JSON"


# ---------------------------------------------------------------------------------------------------------------------
# code of the user's that raises what nobody should


@pytest.mark.parametrize("kind", [BaseException, GeneratorExit, SystemExit, KeyboardInterrupt, MemoryError, StopIteration])
def test_what_a_reward_or_a_config_raises_is_a_line(kind, tmp_path, monkeypatch):
    def reward(batch):
        raise kind("two\nlines")

    with pytest.raises(Stop, match="reward 'mine' failed.*line [0-9]+"):
        call_rewards([(1.0, "mine", as_ours(reward, "mine"))], dict(completions=["a"], rows=[{}]))
    (tmp_path / "mine.py").write_text(f"x = 1\nraise {kind.__name__}()\n")
    with pytest.raises(KeyboardInterrupt if kind is KeyboardInterrupt else BadConfig) as caught:
        run_config_file(str(tmp_path / "mine.py"))
    if kind is not KeyboardInterrupt:
        assert "mine.py, line 2" in str(caught.value)
    said, code = said_and_code(caught.value, monkeypatch)
    assert code == (130 if kind is KeyboardInterrupt else 2) and said.count("\n") == 1


def test_a_name_that_is_no_utf_8(tmp_path):
    """Tools show such runs; a run, whose files libraries write, begins in no such folder."""
    folder = os.fsencode(tmp_path) + b"/\xff\xfe"
    os.mkdir(folder)
    for name, text in (("config.json", "{}"), ("log.jsonl", '{"iteration": 0, "eval/kl": 1.0}\n')):
        with open(folder + b"/" + name.encode(), "w", encoding="utf-8") as f:
            f.write(text)
    for tool, key, ending in (("plot", b"runs", b"png"), ("page", b"run", b"html")):
        done = tiny.run(f"tools/{tool}.py", b"--%b=%b" % (key, folder), b"--out=%b/x.%b" % (folder, ending))
        assert done.returncode == 0 and done.stderr == "", done.stderr
    with pytest.raises(BadInput, match="UTF-8"):
        open_run(os.fsdecode(folder), dict(), ())

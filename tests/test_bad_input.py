"""
Bad input. One table of runs: what is given, and which file, row and key the one line names; the exit code is 2 and nothing
is written. Then what a run of its own would take long to show: messages, tokenizers, templates, rows that do not fit.
"""
import io
import json
import math
import os
import re
import shutil
import sys

import pytest
import torch
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
from rows import prompt_row, read_rows
from tools.output import check_writable, written

import tiny
from tiny import assistant, forked, is_one_line, jsonl, one_run, user, write_byte_tokenizer

# ---------------------------------------------------------------------------------------------------------------------
# the table

# name: (script, the keys, what the line names). A word in capitals is a file that `runs` writes, or one of the world
TABLE = {
    # files, rows and fields
    "sft row": ("sft.py", dict(train_path="TURNS.JSONL"), ["turns.jsonl", "row 4"]),
    "thoughts": ("sft.py", dict(train_path="THOUGHTS.JSONL", chat_template="CUTS.JINJA"),
                 ["thoughts.jsonl", "row 2", "cuts.jinja", "--chat_template=FILE", "--template_kwargs="]),
    "ppo row": ("ppo.py", dict(prompts_path="CHAT.JSONL"), ["chat.jsonl", "row 4"]),
    "grpo row": ("grpo.py", dict(eval_path="CHAT.JSONL"), ["chat.jsonl", "row 4"]),
    "layout": ("sft.py", dict(train_path="FOREIGN.JSONL"), ["foreign.jsonl", "line 1", "prompt", "data/convert.py"]),
    "no answer": ("grpo.py", dict(reward_functions="accuracy", prompts_path="MUTE.JSONL"), ["mute.jsonl", "row 2", "accuracy"]),
    "a mix": ("grpo.py", dict(prompts_path="FOREIGN.JSONL,2*MUTE.JSONL"), ["foreign.jsonl", "line 1", "'prompt'"]),
    "another mix": ("sft.py", dict(train_path="SFT_TRAIN,0.5*SFT_VAL", val_path=""), ["train_path"]),
    "a pipe": ("ppo.py", dict(prompts_path="PIPE"), ["pipe"]),
    "no side": ("recipes/dpo.py", dict(train_path="CHOSEN.JSONL"), ["chosen.jsonl", "rejected"]),
    "nothing said": ("recipes/dpo.py", dict(train_path="EMPTY.JSONL"), ["empty.jsonl", "line 1", "prompt"]),
    "sft, too long": ("sft.py", dict(train_path="LONG.JSONL", max_tokens=10), ["long.jsonl, row 2", "12", "max_tokens", "10"]),
    "dpo, too long": ("recipes/dpo.py", dict(train_path="LONGER.JSONL"), ["longer.jsonl", "row 2", "--too_long=drop"]),
    "ppo, too long": ("ppo.py", dict(max_prompt_tokens=2), ["row 1", "max_prompt_tokens", "2"]),
    "a cut pair": ("rm.py", dict(too_long="cut"), ["too_long"]),
    "a cut pair in dpo": ("recipes/dpo.py", dict(too_long="cut"), ["too_long", "--too_long=drop"]),
    # models
    "no model": ("recipes/dpo.py", dict(policy_path="nowhere"), ["nowhere"]),  # no folder, and the hub is out of reach
    "NaN, ppo": ("ppo.py", dict(policy_path="NAN"), ["nan", "lm_head.weight"]),
    "the folder of a run": ("ppo.py", dict(policy_path="RUN"), ["run/policy"]),
    "no score head": ("grpo.py", dict(reward_functions="reward_model", reward_path="POLICY"), ["policy", "head"]),
    "a short context": ("ppo.py", dict(reward_path="SHORT_REWARD", value_init="policy"),
                        ["rl_train.jsonl", "row", "tokens", "less max_new_tokens = "]),
    "another tokenizer's value": ("ppo.py", dict(reward_path="OTHER_REWARD"), ["--value_init=policy"]),
    "another reference": ("ppo.py", dict(ref_path="JUDGE"), ["judge", "architecture"]),
    "no zero": ("ppo.py", dict(reward_path="NO_ZERO", roles="train=1,score=1"), ["score_shift"]),
    "no such encoding": ("sft.py", dict(tokenizer_path="tiktoken:gpt9"), ["tiktoken:gpt9", "gpt2"]),
    "no network": ("sft.py", dict(tokenizer_path="tiktoken:gpt2"), ["tiktoken:gpt2", "TIKTOKEN_CACHE_DIR", "https://"]),
    # teachers and judges
    "no teacher": ("rm.py", dict(teacher="out/nothing"), ["out/nothing"]),
    "a teacher of zeros": ("rm.py", dict(teacher="ZEROS"), ["zeros", "pairs_train.jsonl"]),
    "labels and a teacher": ("rm.py", dict(teacher="REWARD", label_smoothing=0.1), ["label_smoothing"]),
    "nothing to be taught": ("rm.py", dict(teacher="REWARD", score_coef=0, preference_coef=0), ["--score_coef=1"]),
    "pairs and responses": ("rm.py", dict(teacher="REWARD", train_path="MIXED.JSONL"), ["mixed.jsonl", "1 pairs", "2 single"]),
    "too long to be taught": ("rm.py", dict(teacher="SHORT_REWARD", train_path="LONG.JSONL", val_path=""),
                              ["long.jsonl, row 2", "12", "10"]),
    "another teacher": ("rm.py", dict(teacher="REWARD", max_iters=2, lora="2", zero_stage="3"), ["teacher"]),
    "no judge": ("grpo.py", dict(reward_functions="judge"), ["judge_path"]),
    "an idle judge": ("grpo.py", dict(reward_functions="length", judge_path="JUDGE"), ["judge"]),
    "a judge without KL": ("grpo.py", dict(reward_functions="judge", judge_path="ref_policy", kl_coef=0.0), ["kl_coef"]),
    "a long question": ("grpo.py", dict(reward_functions="judge", judge_path="JUDGE", judge_template="yes_no"), ["row 1: "]),
    # keys that do not go together
    "no reference": ("grpo.py", dict(ref_path="POLICY", kl_coef=0.0), ["ref_path", "--kl_coef=0.05"]),
    "groups": ("grpo.py", dict(group_size=4), ["batch_size = 15", "group_size = 4"]),
    "minibatches": ("grpo.py", dict(num_minibatches=16), ["num_minibatches = 16"]),
    "unknown reward": ("grpo.py", dict(reward_functions="qqq"), ["qqq", "accuracy", "FILE.py:FUNCTION"]),
    "no rewards": ("grpo.py", dict(reward_functions=" "), ["reward"]),
    "no such rules": ("grpo.py", dict(reward_functions="nowhere.py:f"), ["nowhere.py"]),
    "attention of a package": ("sft.py", dict(attn_implementation="flash_attention_2"), ["attn_implementation", "flash"]),
    "no compiler": ("grpo.py", dict(compile=True, policy_path="nowhere"), ["compile = True", "'no-compiler'"]),
    "cispo of sequences": ("grpo.py", dict(loss_type="cispo", importance="sequence"), ["loss_type = 'cispo'"]),
    "a key of a recipe": ("grpo.py", dict(dual_clip=3.0), ["recipes/dual_clip.diff", "tools/fork.py dual_clip"]),
    "k1 as a loss": ("grpo.py", dict(kl_estimator="k1"), ["kl_in", "k1", "--kl_estimator=k2"]),
    "another": ("ppo.py", dict(importance_floor=0.5), ["recipes/masked_importance.diff", "tools/fork.py masked_importance"]),
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
    "which, in ppo": ("ppo.py", dict(reward_path=""), ["--reward_path=FOLDER", "--help"]),
    "roles of three": ("ppo.py", dict(roles="train=1,generate=2"), ["3 ranks", "--nproc_per_node=3"]),
    "unplanned": ("grpo.py", dict(generate_tp=2), ["generate_tp"]),  # transformers has no plan for GPT-2
    "patience": ("grpo.py", dict(reward_timeout=60), ["reward_timeout = 60", "timeout = 60"]),
    "adafactor in shards": ("sft.py", dict(optim="adafactor", zero_stage="3"), ["adafactor"]),
    "another beta": ("recipes/dpo.py", dict(beta=0.2), ["beta", "0.2"]),
    "another script's key": ("grpo.py", dict(ppo_epochs=2), ["'ppo_epochs'", "python ppo.py --ppo_epochs=2"]),
    # tools
    "sample row": ("tools/sample.py", dict(policy_path="POLICY", prompts="CHAT.JSONL"), ["chat.jsonl", "row 4"]),
    "sample surrogate": ("tools/sample.py", dict(policy_path="POLICY", prompt="\udcff"), ["command line"]),
    "bench": ("tools/bench.py", dict(work="ppo,gpro"), ["gpro", "sampling"]),
}
ON_TWO = ("groups", "no answer", "no such rules", "roles of three", "no zero", "unplanned",
          "another teacher")  # on two ranks: rank 0 alone says so
LATE = ("no zero", "unplanned", "a teacher of zeros", "too long to be taught")  # found in a model, when the folder is there
BEFORE = {  # the keys of a run that has begun in the folder, which another one would go on with
    "another mix": dict(train_path="SFT_TRAIN,0.25*SFT_VAL", val_path="", max_iters=1), "another beta": dict(max_iters=1),
    "another teacher": dict(teacher="OTHER_REWARD", max_iters=1, lora="2", zero_stage="3")}  # a teacher in shards
CODE = {  # what is put in the place of a compiler and of the network
    "no compiler": "import os; os.environ['CXX'] = 'no-compiler'",
    "no network": """
import os, requests
os.environ["TIKTOKEN_CACHE_DIR"] = "empty"
def no_network(*args, **kwargs):
    raise requests.exceptions.ConnectionError("no route to host", request=requests.Request("GET", args[0]).prepare())
requests.get = no_network
"""}


CUTS = """{% for m in messages %}{{ '#' + m['content'].split('</think>')[-1] + eos_token }}{% endfor %}
{%- if add_generation_prompt %}#{% endif %}"""


def spoil(source, folder, name, change):
    """A copy of a model with another tensor: what a function makes of it."""
    shutil.copytree(source, folder)
    tensors = load_file(f"{folder}/model.safetensors")
    save_file(tensors | {name: change(tensors[name].clone())}, f"{folder}/model.safetensors", metadata={"format": "pt"})


def with_nan(t):
    t.view(-1)[t.numel() // 2] = math.nan
    return t


@pytest.fixture(scope="module")
def runs(world, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("bad"))
    chat, row = [user("1+2=")], dict(prompt="1+2=", answer="3", completion="3", chosen="3", rejected="4")
    said = {key: [assistant("3")] for key in ("completion", "chosen", "rejected")}
    thinks = [assistant(f"<think>{text}</think>3") for text in ("1+2", "once more")]
    for name, rows in dict(
            chat=[row] * 3 + [row | dict(prompt=chat)], turns=[row] * 3 + [row | dict(prompt=chat) | said],
            thoughts=[dict(prompt=chat, completion=turns) for turns in (thinks[:1], [thinks[0], *chat, thinks[1]])],
            foreign=[dict(conversations=[{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}])],
            mute=[dict(prompt="1+2=", answer="3"), dict(prompt="1+3=")],
            mixed=[dict(prompt="1=", chosen="2", rejected="3"), *[dict(prompt="1=", completion="2")] * 2],
            chosen=[dict(prompt="1=", chosen="2")], empty=[row | dict(prompt="", chosen="")],
            long=[row, row | dict(prompt="1=", completion="123456789", rejected="123456789")],
            longer=[row, row | dict(rejected="1" * 40)]).items():
        jsonl(f"{folder}/{name}.jsonl", rows)
    os.mkfifo(f"{folder}/pipe")
    spoil(world.policy, f"{folder}/nan", "lm_head.weight", with_nan)
    spoil(world.reward, f"{folder}/zeros", "score.weight", torch.zeros_like)
    shutil.copytree(world.reward, f"{folder}/no_zero")
    unshifted = {key: value for key, value in tiny.read_json(f"{world.reward}/config.json").items() if key != "score_shift"}
    os.makedirs(f"{folder}/run/policy")
    for name, text in (("no_zero/config.json", json.dumps(unshifted)), ("run/config.json", '{"out_dir": "out"}'),
                       ("run/policy/config.json", "{}"), ("cuts.jinja", CUTS)):
        with open(f"{folder}/{name}", "w", encoding="utf-8") as f:
            f.write(text)

    def path(name):
        here = f"{folder}/{name.lower()}"
        return here if os.path.exists(here) else getattr(world, name.lower())

    def run(name, keys):
        script = TABLE[name][0]
        keys = {key: re.sub(r"[A-Z_]{3,}(\.[A-Z]+)?", lambda x: path(x[0]), value)
                if isinstance(value, str) and value.isupper() else value for key, value in keys.items()}
        arguments = tiny.arguments(dict(max_new_tokens=4, device_type="cpu") | keys)
        if not script.startswith("tools"):
            arguments = getattr(world, os.path.basename(script)[:-3])("out", **keys)
        return one_run(script, *[(arguments, CODE.get(name, ""))] * (2 if name in ON_TWO else 1))

    return forked(folder, {name: [run(name, keys) for keys in (BEFORE.get(name), given) if keys]
                           for name, (_, given, _) in TABLE.items()})


@pytest.mark.parametrize("name", TABLE)
def test_bad_input_is_one_line_with_code_2_and_nothing_written(runs, name):
    (script, _, words), (*before, result) = TABLE[name], runs[name]
    assert all(set(run["codes"]) == {0} for run in before), before
    is_one_line(result, script, words)
    assert name in LATE or before or not os.path.exists(runs.out(name))


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
    rows = [dict(prompt="a"), dict(prompt=[user("a")])]
    with pytest.raises(BadInput, match="rows.jsonl, row 2: .*/tokens") as caught:
        encode_prompts(rows, "rows.jsonl", load_tokenizer(str(tokens)), 100, "all")
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------------------------------------------------------------
# folders and files of others stay as they are


def test_what_a_tool_may_replace(world, tmp_path):
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
            check_writable(f"{world.policy}/{name}", made=b"")
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
    for name, text in (("config.json", "no JSON"), ("config.json", "[1]"), ("best_policy", None),
                       *((name, '{"model_type": "gpt2"}') for name in ("config.json", "log.jsonl"))):
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
    folder = os.fsdecode(folder)
    tools = forked(str(tmp_path), {tool: [one_run(f"tools/{tool}.py", [f"--{key}={folder}", f"--out={folder}/x.{ending}"])]
                                   for tool, key, ending in (("plot", "runs", "png"), ("page", "run", "html"))})
    assert [done["codes"] + done["stderr"] for (done,) in tools.values()] == [[0, ""]] * 2, tools
    with pytest.raises(BadInput, match="UTF-8"):
        open_run(folder, dict(), ())

"""Bad input of every kind, in one line: messages that leave, config files, data files, model folders, tokenizers."""
import io
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

import configurator
import errors
from configurator import run_config_file
from data import encode_for_all, encode_prompts
from engine.adapters import load_whole
from engine.tokenizers import load_tokenizer, write_byte_tokenizer
from errors import BadConfig, BadInput, Stop, one_line, shorten
from rows import prompt_row, read_rows

from conftest import ROOT
from tiny import byte_tokenizer, build, forked, jsonl, one_run


# ---------------------------------------------------------------------------------------------------------------------
# messages, where they leave


def said_and_code(error, monkeypatch, rank="0"):
    """What report_and_exit writes to stderr for an error, and the exit code it leaves with."""
    class Left(BaseException):
        pass

    def leave(code):
        raise Left(code)

    out = io.StringIO()
    monkeypatch.setattr(sys, "__stderr__", out)
    monkeypatch.setattr(sys, "argv", ["/somewhere/ppo.py"])
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(configurator.os, "_exit", leave)
    with pytest.raises(Left) as left:
        errors.report_and_exit(type(error), error, None)
    return out.getvalue(), left.value.args[0]


@pytest.mark.parametrize("kind, code", [(BadInput, 2), (BadConfig, 2), (Stop, 1)])
@pytest.mark.parametrize("text, wanted", [
    ("a plain line", "a plain line"), ("two\nlines\r\n", "two\\nlines"), ("\x1b[31mred\x07\x00", "\\x1b[31mred\\x07\\x00"),
    ("half \ud800 a pair", "half \\ud800 a pair"), ("a\u2028b\x85c\u202ed", "a\\u2028b\\x85c\\u202ed"),
    ("Grüße, 世界 \U0001f600", "Grüße, 世界 \U0001f600"), ("x" * 700, "x" * 700),
    ("a" * 400 + "\n" * 10**6 + "b" * 400, "a" * 350 + " ... " + "b" * 345)])
def test_a_message_leaves_on_one_line(kind, code, text, wanted, monkeypatch):
    said, left_with = said_and_code(kind(text), monkeypatch)
    assert (said, left_with) == (f"ppo.py: error: {wanted}\n", code)
    assert len(one_line(text)) <= 700


def test_a_row_of_20000_keys(tmp_path, monkeypatch):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({f"key {i}": i for i in range(20_000)}) + "\n")
    with pytest.raises(BadInput) as caught:
        read_rows(str(file), prompt_row)
    said, code = said_and_code(caught.value, monkeypatch)
    assert code == 2 and len(said) < 730 and said.count("\n") == 1
    assert said.startswith(f"ppo.py: error: {file}, line 1: field 'prompt' is missing") and "'key 1'" in said


def test_a_path_with_a_newline_and_an_escape(tmp_path, monkeypatch):
    """And in a process of its own, where half a surrogate would end the report itself."""
    with pytest.raises(BadInput) as caught:
        read_rows(f"{tmp_path}/two\nlines\x1b[2J.jsonl", prompt_row)
    said, code = said_and_code(caught.value, monkeypatch)
    assert code == 2 and "/two\\nlines\\x1b[2J.jsonl: no such file" in said and said.count("\n") == 1
    done = subprocess.run([sys.executable, os.path.join(ROOT, "tools/plot.py"), f"--runs={tmp_path}/a\nb\x1b[2J", "--out=x.png"],
                          capture_output=True, env=dict(os.environ, RANK="0", PYTHONIOENCODING="ascii:strict"))
    assert done.returncode == 2 and done.stderr.count(b"\n") == 1 and b"/a\\nb\\x1b[2J" in done.stderr, done.stderr


# ---------------------------------------------------------------------------------------------------------------------
# config files: trusted code, which must only not break the report of its own errors


class Weird:
    def __repr__(self):
        raise KeyError("no repr either")


@pytest.mark.parametrize("text, said", [
    ("import sys\nsys.setrecursionlimit(60)\nseed = 1 / 0\n", r"line 3: ZeroDivisionError"),
    ("import sys\nsys.setrecursionlimit(1)\n", r"line 2: RecursionError"),
    ("def _f():\n    return _f()\n_f()\n", r"line 2: RecursionError"),
    ("class _E(Exception):\n    def __str__(self):\n        return 1 / 0\nraise _E\n", r"line 4: _E$"),
    ("raise ValueError('\\ud800')\n", "line 1: ValueError: "), ("seed = " + "-" * 100_000 + "1\n", "line .: "),
    ("seed = " + "(" * 1000 + "1" + ")" * 1000, "line .: "), ("seed = 1 +" * 10_000 + "1", "line .: ")])
def test_config_files_that_break(text, said, tmp_path):
    file, limit = tmp_path / "c.py", sys.getrecursionlimit()
    file.write_text(text)
    with pytest.raises(BadConfig, match=said):
        run_config_file(str(file))
    assert sys.getrecursionlimit() == limit


def test_a_config_file_that_lowers_the_recursion_limit_changes_nothing(tmp_path):
    (tmp_path / "c.py").write_text("import sys\nsys.setrecursionlimit(60)\nseed = 2\n")
    limit = sys.getrecursionlimit()
    assert run_config_file(str(tmp_path / "c.py")) == {"seed": 2}
    assert sys.getrecursionlimit() == limit


def test_values_that_are_no_text_or_cannot_be_printed():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    for value in (deep, Weird(), 10**5000):
        assert "cannot be printed" in shorten(value)
        with pytest.raises(BadConfig, match="cannot be printed"):
            configurator.convert("name", value, "text", "c.py")
    for text in ("\ud800", "a\0b"):
        with pytest.raises(BadConfig, match="name .c.py.: .* not text"):
            configurator.convert("name", text, "text", "c.py")
    assert configurator.convert("name", "\udcff", "text", "c.py") == "\udcff"  # a byte of a path that is not UTF-8


# ---------------------------------------------------------------------------------------------------------------------
# model folders: every field of every JSON bent. `FUZZ=all pytest tests/test_bad_input.py` takes all mutants, not some

ONE_OF_EACH = ["gpt2", "gpt_neox", "llama3-gqa-tied", "mistral-window", "qwen2-window-tied", "qwen3", "olmo2", "gemma3"]
MISSING = object()
VALUES = [MISSING, None, True, False, "", "x", "\ud800", [], [1], {}, {"x": 1}, 0, 1, -1, 2, 3, 10**6, 10**12, 10**400, 0.0, 0.5,
          -1.5, 1e-300, 1e300, math.inf, -math.inf, math.nan, "default", ["full_attention"] * 3, [[]] * 3]
DEEP = "[" * 100_000


def mutants(value, more=()):
    """Copies of a JSON object in which one field, at any depth, and each of `more`, has each of VALUES."""
    if isinstance(value, dict):
        keys = list(value) if len(value) < 50 else list(value)[::70]  # of a vocabulary, a few
        for key in [*keys, *(k for k in more if k not in value)]:
            rest = {k: v for k, v in value.items() if k != key}
            for new in VALUES:
                yield rest if new is MISSING else {**rest, key: new}
            for new in mutants(value.get(key)):
                yield {**rest, key: new}
    elif isinstance(value, list):
        for i in range(min(len(value), 3)):
            for new in VALUES:
                yield [*value[:i], *([] if new is MISSING else [new]), *value[i + 1:]]
            for new in mutants(value[i]):
                yield [*value[:i], new, *value[i + 1:]]


def some_of(cases, n, seed):
    """n of the cases, always the same ones; all of them where FUZZ=all is set."""
    cases = list(cases)
    return cases if os.environ.get("FUZZ") == "all" else random.Random(seed).sample(cases, min(n, len(cases)))


def read_or_refused(use):
    """True where use() succeeds, False where it raises BadInput in a line; whatever else it raises fails the test."""
    try:
        use()
        return True
    except BadInput as e:
        assert "\n" not in str(e).strip() and len(str(e)) < 700, str(e)
        return False


def edit(file, **changes):
    """Change entries of a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def respoiled(folder, **changes):
    """Rewrite a folder's weights with some tensors changed: {name: function of the tensor}."""
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {name: change(tensors[name]) for name, change in changes.items()}, folder / "model.safetensors")


def set_one(value):
    """A function that sets one number in the middle of a tensor."""
    def change(t):
        t = t.clone()
        t.view(-1)[t.numel() // 2] = value
        return t

    return change


# ---------------------------------------------------------------------------------------------------------------------
# tokenizers: any field of any of their files, and those of another model

TEMPLATE = ("{{ bos_token }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
            "{{ raise_exception('Roles must alternate user/assistant') }}{% endif %}<|start|>{{ m['content'] }}</s>"
            "{% endfor %}{% if add_generation_prompt %}<|start|>{% endif %}")


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
        tokenizer_class="PreTrainedTokenizerFast", bos_token="<s>", eos_token="</s>", model_max_length=64,
        clean_up_tokenization_spaces=False)))
    (folder / "special_tokens_map.json").write_text('{"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": false}}')
    (folder / "generation_config.json").write_text('{"eos_token_id": [1], "pad_token_id": 1}')
    (folder / "config.json").write_text('{"model_type": "llama", "eos_token_id": 1, "bos_token_id": 0}')
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def use_tokenizer(folder):
    """Everything that a run does with a tokenizer."""
    tokenizer = load_tokenizer(str(folder))
    rows = [dict(prompt="the thing"), dict(prompt=[dict(role="user", content="the </s> thing")])]
    for ids in encode_prompts(rows, "rows.jsonl", tokenizer, 1000, "all"):
        assert isinstance(tokenizer.decode(ids.tolist()), str)
    assert all(type(i) is int and 0 <= i for i in [tokenizer.eos_id, tokenizer.pad_id, *tokenizer.eos_ids])
    assert len({tokenizer.fingerprint, tokenizer.vocab_size}) == 2


@pytest.mark.parametrize("name, change, said", [
    ("tokenizer.json", lambda v: v["model"].update(type="Bigram"), "tokens: no usable tokenizer"),
    ("config.json", lambda v: v.update(eos_token_id=260), "eos_token_id = 260 is no token of .* 260;"),
    ("generation_config.json", lambda v: v.update(eos_token_id=[1, "2"]), "generation_config.json: eos_token_id = '2' is no"),
    ("generation_config.json", lambda v: v.update(eos_token_id=True), "eos_token_id = True"),
])
def test_broken_or_swapped_tokenizers_are_named(name, change, said, tokens, tmp_path):
    folder = shutil.copytree(tokens, tmp_path / "tokens")
    value = json.loads((folder / name).read_text())
    change(value)
    (folder / name).write_text(json.dumps(value))
    with pytest.raises(BadInput, match=said):
        use_tokenizer(folder)


# ---------------------------------------------------------------------------------------------------------------------
# data files, rows that a template refuses, rows that do not fit


def test_what_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero", "/dev/null", tmp_path):
        with pytest.raises(BadInput, match=f"{path}: no such file"):
            read_rows(str(path), prompt_row)


@pytest.mark.parametrize("messages, said", [
    ([("user", "a"), ("user", "b")], "TemplateError: Roles must alternate user/assistant"),
    ([("assistant", "</s>")], "Roles must alternate")])
def test_a_row_that_the_template_refuses(messages, said, tokens):
    good = dict(prompt=[dict(role="user", content="a"), dict(role="assistant", content="b")])
    rows = [good, good, dict(prompt=[dict(role=role, content=text) for role, text in messages])]
    with pytest.raises(BadInput, match=f"^rows.jsonl, row 3: the chat template of .*/tokens0 refuses the messages: .*{said}"):
        encode_prompts(rows, "rows.jsonl", load_tokenizer(str(tokens)), 100, "all")


@pytest.mark.parametrize("template", [
    "{{ 1 / 0 }}", "{{ messages[9].role }}", "{% for %}", "{{ nothing.at.all }}", "{{ 'x' * 'y' }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ raise_exception('two\\nlines') }}"])
def test_a_template_that_fails(template, tokens, tmp_path):
    folder = shutil.copytree(tokens, tmp_path / "tokens")
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(BadInput, match="row 1: the chat template of .*/tokens refuses the messages: ") as caught:
        encode_prompts([dict(prompt=[dict(role="user", content="a")])], "rows.jsonl", load_tokenizer(str(folder)), 100, "all")
    assert "\n" not in str(caught.value)


def model_of(context):
    return SimpleNamespace(max_positions=context)


def test_a_row_that_only_the_reward_models_tokenizer_cannot_take(tokens):
    """ "<think>" is one token for the policy, 6 for the reward model (< th i n k >): 4 + 10 fit in 14, 19 + 10 in 29."""
    policy, reward = byte_tokenizer(["<think>"]), load_tokenizer(str(tokens))
    rows = [dict(prompt="a"), dict(prompt="<think><think>ab")]
    fits = dict(policy=model_of(14), reward_model=model_of(29))
    def encoded(models, *tokenizers):
        return [ids.tolist() for ids in encode_for_all(rows, "rows.jsonl", 10, models, *tokenizers)]

    assert encoded(fits, policy, reward) == [[97], [256, 256, 97, 98]]
    for short, said in ((dict(fits, reward_model=model_of(28)), "row 2: it has 19 tokens, and .* the reward model's .* is 18;"),
                        (dict(fits, policy=model_of(13)), "row 2: it has 4 tokens, and .* is 3;")):
        with pytest.raises(BadInput, match=said):
            encoded(short, policy, reward)
    same = dict(fits, reward_model=model_of(14))  # with the policy's tokenizer it reads the policy's tokens
    assert encoded(same, policy, policy) == [[97], [256, 256, 97, 98]]
    with pytest.raises(BadInput, match="row 2: it has 4 tokens, and .* is 3;"):
        encoded(dict(fits, reward_model=model_of(13)), policy, policy)
    chat = [dict(prompt=[dict(role="assistant", content="a")])]
    with pytest.raises(BadInput, match="row 1: the chat template"):
        encode_for_all(chat, "rows.jsonl", 10, fits, reward, load_tokenizer(str(tokens)))


# ---------------------------------------------------------------------------------------------------------------------
# the scripts themselves

COUNT_BATCHES = """
import sys, rollout
calls, generate = [], rollout.generate

def counting(policy, prompts, *args, **kwargs):
    calls.append(len(prompts))
    if len(calls) == 3:
        print("batches of", calls)
        sys.exit(0)
    return generate(policy, prompts, *args, **kwargs)

rollout.generate = counting
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(cases, results) of runs in a tiny world: name -> (script, what it says in its one line)."""
    folder = tmp_path_factory.mktemp("scripts")
    (folder / "world").mkdir()
    world = build(str(folder / "world"))
    chat = [dict(role="user", content="1+2=")]
    rows = [dict(prompt="1+2=", answer="3", completion="3", chosen="3", rejected="4")] * 3
    jsonl(folder / "chat.jsonl", [dict(prompt="1+2=", answer="3")] * 3 + [dict(prompt=chat, answer="3")])
    turns = dict(completion=[dict(role="assistant", content="3")], chosen=[dict(role="assistant", content="3")],
                 rejected=[dict(role="assistant", content="4")])
    jsonl(folder / "turns.jsonl", [*rows, rows[0] | dict(prompt=chat) | turns])
    jsonl(folder / "foreign.jsonl", [dict(conversations=[{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}])])
    os.mkfifo(folder / "pipe")
    nan = shutil.copytree(world.policy, folder / "nan")
    respoiled(nan, **{"lm_head.weight": set_one(math.nan)})
    short = shutil.copytree(world.short_reward, folder / "short")
    write_byte_tokenizer(short, ["</think>", "<think>"])  # another tokenizer than the policy's
    bad_rows, pipe = str(folder / "chat.jsonl"), str(folder / "pipe")
    sample = ["--max_new_tokens=4", "--device_type=cpu"]
    refused = "row 4: here is a list of messages, but this tokenizer has no chat template"
    other = "row .: it has .* tokens, and the room beside max_new_tokens in the reward model.*, in its own tokens"
    cases = {
        "sft row": ("sft.py", world.sft("out", train_path=folder / "turns.jsonl"), refused),
        "rm row": ("rm.py", world.rm("out", train_path=folder / "turns.jsonl"), refused),
        "sft layout": ("sft.py", world.sft("out", train_path=folder / "foreign.jsonl"),
                       "foreign.jsonl, line 1: field 'prompt' is missing; .* data/convert.py --kind=sft"),
        "ppo row": ("ppo.py", world.ppo("out", prompts_path=bad_rows), refused),
        "grpo row": ("grpo.py", world.grpo("out", eval_path=bad_rows), refused),
        "sample row": ("tools/sample.py", [f"--policy_path={world.policy}", f"--prompts={bad_rows}", *sample], refused),
        "sft NaN": ("sft.py", world.sft("out", init_from=nan), "'lm_head.weight' holds NaN"),
        "rm NaN": ("rm.py", world.rm("out", init_from=shutil.copytree(nan, folder / "rm_nan")), "holds NaN"),
        "ppo NaN": ("ppo.py", world.ppo("out", policy_path=nan), "holds NaN"),
        "grpo NaN": ("grpo.py", world.grpo("out", policy_path=nan), "holds NaN"),
        "sample NaN": ("tools/sample.py", [f"--policy_path={nan}", "--prompt=1", *sample], "holds NaN"),
        "ppo pipe": ("ppo.py", world.ppo("out", prompts_path=pipe), "pipe: no such file"),
        "ppo reward": ("ppo.py", world.ppo("out", reward_path=short, value_init="policy"), other),
        "grpo reward": ("grpo.py", world.grpo("out", reward_path=short), other),
        "sample surrogate": ("tools/sample.py", [f"--policy_path={world.policy}", "--prompt=\udcff", *sample],
                             "command line: .*surrogate"),
        "best of nothing": ("tools/sample.py", ["--prompt=1", "--best_of=4"], "best_of = 4 needs a score .*--reward_path"),
        "sample many": ("tools/sample.py", ["--prompt=1", "--samples=1000001"], r"out of range: \[1..1000000\]"),
    }
    respoiled(folder / "rm_nan", **{"lm_head.weight": set_one(0.0), "transformer.wte.weight": set_one(math.nan)})
    jobs = {name: [one_run(script, args)] for name, (script, args, _) in cases.items()}
    ask = [f"--policy_path={world.policy}", f"--prompts={world.rl_val}", "--limit=3", "--samples=3", *sample]
    jobs |= {f"in {n}": [one_run("tools/sample.py", [*ask, f"--batch_size={n}"])] for n in (1, 2, 64)}
    jobs["a million"] = [one_run("tools/sample.py", ([*ask[:-3], "--samples=1000000", "--batch_size=4", *sample], COUNT_BATCHES))]
    return cases, forked(str(folder), jobs)


def test_scripts_refuse_bad_rows_weights_and_files(runs):
    cases, results = runs
    for name, (script, _, said) in cases.items():
        result, = results[name]
        assert result["codes"] == [2], (name, result)
        assert re.fullmatch(rf"{os.path.basename(script)}: error: [^\n]*{said}[^\n]*\n", result["stderr"][0]), (
            name, result["stderr"])


def test_samples_come_batch_by_batch(runs):
    """However many are asked for, a batch is all that is computed before it is printed; and no batch changes a text."""
    result, = runs[1]["a million"]
    assert result["codes"] == [0] and "batches of [4, 4, 4]" in result["stdout"][0]
    assert result["stdout"][0].count("> ") == 1
    texts = [runs[1][f"in {n}"][0]["stdout"][0].split("batch_size", 1)[1].split("\n", 1)[1] for n in (1, 2, 64)]
    assert texts[0] == texts[1] == texts[2] and texts[0].count("> ") == 3


def test_the_folder_of_a_run_is_no_model(tmp_path):
    """What the run left is one folder further down, and the line says which."""
    os.makedirs(tmp_path / "out" / "policy")
    (tmp_path / "out" / "config.json").write_text('{"out_dir": "out"}')
    (tmp_path / "out" / "policy" / "config.json").write_text("{}")
    for load in (load_whole, load_tokenizer):
        with pytest.raises(BadInput, match=f"folder of a run, not of a model; type {tmp_path}/out/policy$"):
            load(str(tmp_path / "out"))

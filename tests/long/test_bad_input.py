"""
What people really type wrong, in rows of two tables, of scripts and of tools: one line, with exit
code 2, and nothing is written. (More in tests/: test_scripts.py, test_configurator.py.)
"""
import contextlib
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from types import SimpleNamespace

import pytest
import test_configurator

from errors import BadInput
from options import hub
from tiny import (MARKERS, ROOT, Started, assert_one_line, jsonl, keys_of, run, save_random,
                  typed, well, write)

USER = [dict(role="user", content="1+2=")]
ROW = dict(prompt="a", answer="b", completion="b", chosen="b", rejected="c")
FILES = {  # rows, or the text of a file, which the table names
    "chat": [ROW, ROW | dict(prompt=USER, completion=[dict(role="assistant", content="3")])],
    "led": [dict(prompt=prompt, completion=[dict(role="assistant", content="b")])
            for prompt in (USER, [dict(role="system", content="s"), *USER])],
    "asks": "{% for m in messages if m.role != 'system' %}{{ m.content }}<eos>{% endfor %}",
    "foreign": [dict(conversations=[{"from": "human", "value": "x"}])],
    "null": [ROW | dict(answer=None)], "mute": [ROW, dict(prompt="a")],
    "mixed": [ROW | dict(prompt=USER)],
    "long": [ROW, ROW | dict(prompt="a" * 9, completion="b" * 9, rejected="b" * 90)],
    "huge": [ROW | dict(prompt="a" * 9)],
    "cut": json.dumps(ROW) + '\n{"prompt": "a", "ans', "empty": ""}
ODD = "def f(completion, answer):\n    return 1.0\nclass g:\n    def __init__(self, batch): pass\n"
RULES = {"odd": ODD, "broken": "def f(batch)\n    return 1\n", "fails": "import nowhere_at_all\n"}

# name: (script, keys, words of the line). $x is a file of the above, or of the tiny world
TABLE = {
    # files, rows, fields
    "a cut line": ("ppo.py", dict(prompts_path="$cut"), ["cut.jsonl", "line 2"]),
    "no rows": ("rm.py", dict(train_path="$empty"), ["empty.jsonl"]),
    "another layout": ("sft.py", dict(train_path="$foreign"), [
        "foreign.jsonl", "line 1", "'prompt'", "conversations"]),
    "no answer": ("grpo.py", dict(prompts_path="$mute", reward_functions="accuracy"), [
        "mute.jsonl", "row 2", "'accuracy'", "'answer'"]),
    "one file of a mix": ("grpo.py", dict(prompts_path="$rl_train,0.5*$foreign"), [
        "foreign.jsonl", "line 1"]),
    "a share that is none": ("sft.py", dict(train_path="x*$sft_train"), ["train.jsonl", "x"]),
    "chats without a template": ("sft.py", dict(train_path="$chat"), [
        "chat.jsonl", "row 2", "template"]),
    "a message that the template leaves out": (
        "sft.py", dict(chat_template="$asks", train_path="$led"), [
            "led.jsonl", "row 2", "system", "--chat_template"]),
    "a text behind messages": ("sft.py", dict(train_path="$mixed"), ["mixed.jsonl", "line 1"]),
    "a chat as a held-out prompt": ("grpo.py", dict(eval_path="$chat"), ["chat.jsonl", "row 2"]),
    "no file of prompts": ("ppo.py", dict(prompts_path=""), ["prompts_path"]),
    "no prompts for groups": ("grpo.py", dict(prompts_path=""), ["prompts_path"]),
    "a field without its new name": ("sft.py", dict(fields="question"), ["fields", "THEIRS>OURS"]),
    "fields that are not there": ("sft.py", dict(fields="question>prompt", train_path="$foreign"), [
        "question"]),
    "a completion that is too long": ("sft.py", dict(train_path="$long", max_tokens=10), [
        "long.jsonl", "row 2", "max_tokens"]),
    "all prompts are too long": ("ppo.py", dict(prompts_path="$huge", max_prompt_tokens=5), [
        "row 1", "key max_prompt_tokens)", "longer context"]),
    "a folder of files": ("sft.py", dict(train_path="$made"), ["made", "is a folder"]),
    "a folder in a mix": ("sft.py", dict(train_path="0.5*$made"), ["made", "is a folder"]),
    "an answer of null": ("grpo.py", dict(prompts_path="$null", reward_functions="accuracy"), [
        "row 1", "'answer'", "null"]),
    "data that is not made yet": ("ppo.py", dict(prompts_path="$made/x.jsonl"), [
        "no such file", "made/prepare.py"]),
    "a pair that is too long": ("rm.py", dict(train_path="$long"), ["long.jsonl", "row 2"]),
    "pairs are not cut": ("rm.py", dict(train_path="$long", too_long="cut"), ["too_long"]),
    # models
    "the folder of a run": ("ppo.py", dict(policy_path="$run"), ["run/policy"]),
    "a file": ("sft.py", dict(init_from="$sft_train"), ["sft_train.jsonl"]),
    "a hub name, no network": ("sft.py", dict(init_from="nobody/nothing"), [
        "nobody/nothing", "hf download nobody/nothing --local-dir", "model_from_wheel.py"]),
    "a name without its owner": ("sft.py", dict(init_from="gpt2"), ["'gpt2'", "OWNER/NAME"]),
    "another tokenizer's value": ("ppo.py", dict(reward_path="$other"), ["--value_init=policy"]),
    "another tokenizer's value model": ("ppo.py", dict(value_init="$other"), ["=policy"]),
    "another tokenizer's reference": ("grpo.py", dict(ref_path="$swapped"), ["ref_path"]),
    "a tokenizer that is not made": ("sft.py", dict(
        init_from="scratch", tokenizer_path="data/toy/tokenizer"), ["no such folder", "prepare"]),
    "no such encoding": ("sft.py", dict(init_from="scratch", tokenizer_path="tiktoken:gpt9"), [
        "gpt9"]),
    # rewards
    "which reward model": ("grpo.py", dict(reward_functions="0.5*reward_model"), [
        "--reward_path=FOLDER"]),
    "a forgotten reward model": ("grpo.py", dict(reward_path="$reward"), [
        "reward_path", "--reward_functions=reward_model"]),
    "rules with a typo": ("grpo.py", dict(reward_functions="$broken_py:f"), [
        "broken.py", "line 1"]),
    "rules that fail": ("grpo.py", dict(reward_functions="$fails_py:f"), ["fails.py", "line 1"]),
    "a file without its function": ("grpo.py", dict(reward_functions="$odd_py"), [
        "odd.py:FUNCTION"]),
    "a function of one response": ("grpo.py", dict(reward_functions="$odd_py:f"), ["f(batch)"]),
    "a class": ("grpo.py", dict(reward_functions="$odd_py:g"), ["g(batch)"]),
    "no judge": ("grpo.py", dict(reward_functions="judge"), ["judge_path"]),
    "an idle judge": ("grpo.py", dict(judge_path="$policy"), ["judge_path"]),
    "no environment": ("grpo.py", dict(reward_functions="environment"), ["environment"]),
    # keys that do not go together, or that nothing reads
    "no reference": ("grpo.py", dict(ref_path="$policy", kl_coef=0.0), ["ref_path", "kl_coef"]),
    "no held-out prompts": ("ppo.py", dict(keep_best="score", eval_path=""), ["keep_best"]),
    "weights in 16 bits": ("ppo.py", dict(master_weights=False), ["master_weights"]),
    "weights in another 16 bits": ("sft.py", dict(master_weights=False, dtype="float16"), [
        "master_weights", "--dtype=bfloat16"]),
    "three samplers on two ranks": ("grpo.py", dict(generate_tp=3), ["generate_tp = 3"]),
    "two samplers and an environment": ("grpo.py", dict(generate_tp=2, environment="mine.py:f"), [
        "generate_tp = 2", "environment"]),
    "refilled by another": ("grpo.py", dict(max_refills=1, refill_by="accuracy"), ["refill_by"]),
    "attention of a package": ("sft.py", dict(attn_implementation="flash_attention_2"), [
        "FlashAttention"]),
    "roles of three": ("ppo.py", dict(roles="train=1,generate=2"), ["roles", "2 rank"]),
    "roles that are none": ("grpo.py", dict(roles="train=1,sample=1"), [
        "roles", "--nproc_per_node"]),
    "no such stage": ("sft.py", dict(zero_stage="4"), ["zero_stage", "0, 1, 2 or 3"]),
    "no such rank": ("sft.py", dict(lora="many"), ["lora"]),
    "offloaded whole": ("sft.py", dict(offload="policy=params"), ["offload", "policy"]),
    "muon in shards": ("sft.py", dict(optim="muon", zero_stage="1"), ["muon", "policy", "stage 0"]),
    "muon on the CPU": ("sft.py", dict(optim="muon", offload="optimizer"), [
        "muon", "policy", "stage 0"]),
    "adafactor in shards": ("sft.py", dict(optim="adafactor", zero_stage="3"), ["adafactor"]),
    "adafactor in others": ("sft.py", dict(optim="adafactor", zero_stage="2"), ["policy", "stage"]),
    "8 bits on the CPU": ("sft.py", dict(optim="adamw8bit", offload="optimizer"), [
        "policy", "stage"]),
    "8 bits of 16": ("sft.py", dict(optim="adamw8bit", dtype="bfloat16", master_weights=False), [
        "adamw8bit", "master_weights"]),
    "no such optimizer": ("sft.py", dict(optim="sgd"), ["sgd", "adafactor"]),
    "4 bits alone": ("sft.py", dict(quantize="4bit"), ["quantize", "lora"]),
    # the folder
    "a file as the folder": ("sft.py", dict(out_dir="$sft_train"), ["sft_train.jsonl"]),
    "no folder": ("rm.py", dict(out_dir=""), ["is empty", "choose another --out_dir"]),
    "no place for a folder": ("rm.py", dict(out_dir="/proc/x"), ["'/proc/x'", "--out_dir"]),
    "a model's folder": ("sft.py", dict(out_dir="$policy"), ["config.json", "--out_dir"])}
ON_TWO = ("three samplers on two ranks", "two samplers and an environment", "roles of three",
          "roles that are none", "adafactor in shards")  # rank 0 says it


# of tools, likewise. $done: a run of grpo.py; $sft: a run of sft.py
ASK = dict(run="$done", prompt="12=", answer="ab", trust_code=True)
CONVERT, MEMORY = dict(source="$mute", out="new.jsonl"), dict(init_from="$policy")
EVAL = dict(policies="$policy", prompts_path="$rl_val", max_new_tokens=4, device_type="cpu")
LABEL = dict(policy_path="$policy", judge_path="$older", judge_template="$compare_txt", samples=2,
             prompts_path="$rl_val", max_new_tokens=4, device_type="cpu", out="new.jsonl")
TOOLS = [  # program, keys, words of the line
    ("tools/plot.py", dict(runs="nowhere"), ["nowhere"]),
    ("tools/plot.py", dict(runs="$odd"), ["line 1"]),
    ("tools/plot.py", dict(runs="$began"), ["began"]),
    ("tools/plot.py", dict(runs="$done", out="a.jpg"), ["a.jpg"]),
    ("tools/plot.py", dict(runs="$done", metrics="eval/klo"), ["eval/kl"]),
    ("tools/plot.py", dict(runs="$done,$done"), ["runs"]),
    ("tools/sample.py", dict(policy_path="$made"), ["config.json"]),
    ("tools/sample.py", dict(policy_path="$odd/policy"), ["odd/config.json"]),
    ("tools/sample.py", dict(policy_path="$policy", prompts="$empty"), ["empty.jsonl"]),
    ("tools/sample.py", dict(policy_path="$policy", prompts="$empty", prompt="a"), ["--prompt"]),
    ("tools/sample.py", dict(policy_path="$policy", prompt="a", limit=3), ["limit"]),
    ("tools/eval.py", EVAL | dict(by="tsk"), ["tsk"]),
    ("tools/eval.py", EVAL | dict(policies="$policy,nowhere"), ["nowhere"]),
    ("tools/eval.py", EVAL | dict(right_by="code"), ["right_by"]),
    ("tools/eval.py", EVAL | dict(reward_path="$policy", reward_functions="reward_model"),
     ["rm.py"]),
    ("tools/eval.py", EVAL | dict(max_new_tokens=60, prompts_path="$huge"), ["row"]),
    ("tools/bench.py", dict(work="samplng"), ["samplng"]),
    ("tools/bench.py", dict(n_head=3), ["n_head"]),
    ("tools/bench.py", dict(run_keys="lora"), ["lora"]),
    ("tools/memory.py sft.py", MEMORY | dict(lorra=3), ["lorra"]),
    ("tools/memory.py sft.py", MEMORY | {"world-size": "x"}, ["world_size"]),
    ("tools/memory.py sft.py", MEMORY | dict(roles="train=1,score=1"), ["roles"]),
    ("tools/memory.py sft.py", MEMORY | dict(quantize="4bit"), ["quantize"]),
    ("tools/explain.py", dict(run="$policy"), ["no checkpoint"]),
    ("tools/explain.py", dict(run="$sft"), ["ppo.py"]),
    ("tools/explain.py", dict(run="$done", prompt="12=", trust_code=True), ["answer"]),
    ("tools/explain.py", ASK | dict(trust_code=False), ["rules.py", "--trust_code=True"]),
    ("tools/explain.py", ASK | dict(prompt="1+" * 40), ["row 1"]),
    ("tools/explain.py", dict(run="$done", iteration=4, out="a.html", trust_code=True), ["0 to 0"]),
    ("tools/explain.py", dict(run="$done", iteration=0, out="a.png"), ["--out=FILE.html"]),
    ("data/convert.py", CONVERT | dict(source="$foreign"), ["no row is left", "'completion'"]),
    ("data/convert.py", CONVERT | dict(source="nowhere.jsonl"), ["nowhere.jsonl"]),
    ("data/convert.py", CONVERT | dict(source="hf:nowhere"), ["hf:NAME:SPLIT"]),
    ("data/convert.py", CONVERT | dict(out="new.csv"), ["new.csv", ".jsonl"]),
    ("data/convert.py", dict(source="$mute"), ["--out"]),
    ("data/label.py", LABEL | dict(judge_template="$half_txt"), ["{second}"]),
    ("data/label.py", LABEL | dict(samples=3), ["samples"]),
    ("data/label.py", LABEL | dict(min_confidence=1.0), ["0 pairs"]),
    ("data/label.py", LABEL | dict(judge_path=""), ["judge_path"])]


@pytest.fixture(scope="module")
def files(world, tmp_path_factory):
    """{name: path} of all that the tables name."""
    folder = tmp_path_factory.mktemp("files")
    paths = vars(world) | {name: write(folder / f"{name}.jsonl", rows) if type(rows) is str else
                           jsonl(folder / f"{name}.jsonl", rows) for name, rows in FILES.items()}
    paths |= {f"{name}_py": write(folder / f"{name}.py", text) for name, text in RULES.items()}
    paths |= dict(compare_txt=write(folder / "a.txt", "answers: a c\n{prompt}{first}|{second}"),
                  half_txt=write(folder / "b.txt", "answers: a c\n{prompt}{first}"))
    save_random(folder / "swapped", markers=MARKERS[::-1])
    shutil.copytree(world.policy, folder / "run" / "policy")
    for name in ("made", "began", "odd/policy"):
        os.makedirs(folder / name)
    write(folder / "made" / "prepare.py", "")
    write(folder / "began" / "log.jsonl", "")
    write(folder / "odd" / "log.jsonl", "[1]\n")
    write(folder / "odd" / "config.json", "{")
    for name, script, more in (("sft", "sft.py", {}), ("done", "grpo.py", dict(
            reward_functions=f"accuracy,{world.rules}:letters", num_minibatches=1))):
        paths[name] = well(script, folder / name, keys_of(world, script, max_iters=1, **more))
    return paths | {name: str(folder / name) for name in (
        "swapped", "run", "made", "began", "odd")}


def with_paths(keys, files):
    """The keys with paths of files for their names."""
    for name in sorted(files, key=len, reverse=True):
        keys = {key: value.replace(f"${name}", str(files[name])) if type(value) is str else value
                for key, value in keys.items()}
    return keys


@pytest.mark.parametrize("name", TABLE)
def test_bad_input_is_one_line_and_nothing_is_written(world, files, tmp_path, name):
    script, wrong, words = TABLE[name]
    before = sorted(os.listdir(world.policy))
    result = run(script, tmp_path, keys_of(world, script, **with_paths(wrong, files)),
                 ranks=1 + (name in ON_TWO))
    assert_one_line(result, script, *words)
    assert not os.path.exists(tmp_path / "out")
    assert before == sorted(os.listdir(world.policy))


@pytest.mark.parametrize("number", range(len(TOOLS)))
def test_a_typo_for_a_tool_is_one_line(files, tmp_path, number):
    """Where it would else do nothing, do something else, or end with a traceback."""
    (program, *script), keys, words = TOOLS[number][0].split(), *TOOLS[number][1:]
    result = Started(program, script + typed(with_paths(keys, files)), str(tmp_path)).wait()
    assert_one_line(result, os.path.basename(program), *words)
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} <= {
        "stderr-0", "stdout-0", "new.jsonl.part"}


def test_fewer_iterations_than_are_done(world, tmp_path):
    keys = keys_of(world, "sft.py")
    out = well("sft.py", tmp_path, keys)
    files = sorted(os.listdir(out))
    assert_one_line(run("sft.py", tmp_path, keys | dict(max_iters=2)), "sft.py", "max_iters = 2",
                    "checkpoint-000003")
    assert sorted(os.listdir(out)) == files


toy = test_configurator.toy  # a fixture
OTHER_FILES = {  # no config files: they would leave a mark if they were run
    "data.jsonl": '{"prompt": "a", "answer": "3"}\n', "data.csv": "a,b\n1,2\n",
    "data.py": '{"prompt": "a", "answer": "3"}\n', "empty.py": "# count = 4\n",
    "own.py": "_count = 4\nMARK\n", "script.py": "import os\ncount = 4\nMARK\n",
    "other.py": "from math import pi\ncount = 4\nMARK\n", "a.py": "a: int = 4\nMARK\n",
    "reward.py": "count = 4\nMARK\ndef reward(batch):\n    count = 5\n",
    "if.py": "MARK\nif True:\n    import json\n    count = 3\n",
    "with.py": "MARK\nwith open('with.py') as f:\n    count = 3\n"}


@pytest.mark.parametrize("name", OTHER_FILES)
def test_what_is_no_config_file_is_not_run(toy, name):
    write(name, OTHER_FILES[name].replace("MARK", "open('mark', 'w').close()"))
    with pytest.raises(BadInput, match=name):
        toy(name)
    assert not os.path.exists("mark")


def test_a_config_file_may_compute(toy):
    write("c.py", """
import math as _math
from os import path as _path

def _half(x):
    half = x // 2
    return half

_scratch = [i for i in range(9)]
if _math.pi > 3:
    count = _half(len(_scratch))
for _i in range(2):
    rate = float((lambda x: x + _i)(1))
""")
    assert toy("c.py") == dict(test_configurator.DEFAULTS, count=4, rate=2.0)


@pytest.mark.parametrize("typed, meant", [
    ("--rate 1e-4", "--rate=1e-4"), ("--limit=9 --count 7 --rate=2", "--count=7"),
    ("--count -1", "--count=-1"), ("--count c.py", "--count=3"),
    ("c.py --rate --limit=9", "--rate=0.5"),
    ("--flag True", "--flag=True"), ("--flag", "--flag=False")])
def test_a_blank_for_an_equals_sign(toy, typed, meant):
    with pytest.raises(BadInput, match=f"{meant}$"):
        toy(*typed.split())


@pytest.mark.parametrize("script", [
    "ppo.py", "grpo.py", "sft.py", "rm.py", "recipes/dpo.py", "tools/eval.py", "tools/sample.py",
    "tools/plot.py", "tools/memory.py", "tools/explain.py", "tools/bench.py", "data/label.py",
    "data/convert.py", "data/arithmetic/prepare.py", "data/arithmetic/pairs.py",
    "data/example/prepare.py", "data/gsm8k/prepare.py"])
def test_without_the_virtual_environment(script):
    """-S: a Python without installed packages."""
    result = subprocess.run([sys.executable, "-S", script], capture_output=True, text=True,
                            cwd=ROOT, env={}, check=False)
    assert result.returncode in (1, 2) and not result.stdout
    assert len(result.stderr.splitlines()) == 1 and "source .venv/bin/activate" in result.stderr


@pytest.mark.parametrize("way", ["answers", "no network", "a name server that hangs"])
def test_a_hub_is_asked_once_and_then_its_cache(tmp_path, monkeypatch, way):
    from huggingface_hub import constants, utils

    def head(address, timeout):
        asked.append(address)
        if way != "answers":
            time.sleep(5 * (way != "no network"))
            raise OSError("no such host")

    asked = []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(utils, "get_session", lambda: SimpleNamespace(head=head))
    monkeypatch.setattr(hub, "WAIT", 0.5)
    for part in ("refs", "snapshots/0f"):
        os.makedirs(tmp_path / "models--a--b" / part)
    write(tmp_path / "models--a--b/refs/main", "0f")
    write(tmp_path / "models--a--b/snapshots/0f/config.json", "{}")
    hub.answers.cache_clear()
    began = time.monotonic()
    for _ in range(3):
        hub.check_name("a/b")
        with contextlib.nullcontext() if way == "answers" else pytest.raises(BadInput, match="c/d"):
            hub.check_name("c/d")
    assert len(asked) == 1 and time.monotonic() - began < 3
    assert constants.HF_HUB_OFFLINE == (way != "answers")
    hub.answers.cache_clear()


def torchrun_in_a_terminal(keys, until):
    """
    What a terminal shows of grpo.py on two ranks under torchrun, whose keys are typed; behind the
    words `until` torchrun gets a Ctrl-C. torchrun is a fork, which has torch already.
    """
    pid, terminal = pty.fork()
    if pid == 0:
        from torch.distributed.run import main

        os.chdir(ROOT)
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            main(["--nproc_per_node=2", "grpo.py", *typed(keys)])
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(1)
    reaper, shown = threading.Thread(target=os.waitpid, args=(pid, 0)), b""
    reaper.start()  # or else the run waits for the end of a process that has ended
    with contextlib.suppress(OSError):  # the last process that has the terminal is gone
        while True:
            shown += os.read(terminal, 1 << 16)
            if until and until.encode() in shown:
                os.kill(pid, signal.SIGINT)
                until = None
    os.close(terminal)
    reaper.join()
    return shown.decode().split()


def test_the_last_lines_under_torchrun_are_the_runs(world, tmp_path):
    keys = keys_of(world, "grpo.py", out_dir=f"{tmp_path}/out", max_iters=1000)
    words = torchrun_in_a_terminal(keys | dict(reward_functions="acuracy"), None)
    assert "grpo.py: error: reward_functions = 'acuracy'" in " ".join(words[-40:])
    words = torchrun_in_a_terminal(keys, "iter 2/1000")
    assert any("SignalException" in word for word in words)
    assert re.fullmatch(r"saved before iteration \d+; the same command goes on there",
                        " ".join(words[-10:])), words[-20:]

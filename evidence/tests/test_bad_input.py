"""
What people really type wrong, of scripts and of tools: one line, with exit code 2, and nothing is
written. (More in tests/: test_scripts.py, test_configurator.py.)
"""
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import test_configurator
import torch
from checkpoint import hash_of_model
from configurator import read_arguments, read_keys
from transformers import AutoConfig, AutoModelForSequenceClassification

from errors import BadInput, Stop
from options import foreign_names, hub
from options.foreign_rewards import load_reward
from options.four_bits import quantize
from options.optimizers import other_optimizer
from options.sources import raw_rows
from options.trackers import names_in
from tiny import (MARKERS, ROOT, Started, assert_one_line, jsonl, keys_of, keys_of_system,
                  save_random, typed, well, write)
from tokenizer import load_tokenizer

USER = [dict(role="user", content="1+2=")]
ROW = dict(prompt="a", answer="b", completion="b", chosen="b", rejected="c")
FILES = {  # which the table names: their texts, or rows
    "chat.jsonl": [ROW, ROW | dict(prompt=USER, completion=[dict(role="assistant", content="3")])],
    "foreign.jsonl": [dict(conversations=[{"from": "human", "value": "x"}])],
    "null.jsonl": [ROW | dict(answer=None)], "mute.jsonl": [ROW, dict(prompt="a")],
    "mixed.jsonl": [ROW | dict(prompt=USER)], "true.jsonl": [ROW, ROW | dict(margin=True)],
    "long.jsonl": [ROW, ROW | dict(prompt="a" * 9, completion="b" * 9, rejected="b" * 90)],
    "huge.jsonl": [ROW | dict(prompt="a" * 9)], "trees.jsonl": [dict(chosen=[], rejected=[])],
    "cut.jsonl": json.dumps(ROW) + '\n{"prompt": "a", "ans', "empty.jsonl": "",
    "lines.csv": "prompt|answer\n1|2\n", "began/log.jsonl": "", "made/prepare.py": "",
    "sure.csv": "prompt,chosen,rejected,confidence\na,b,c,1\na,b,c,1.5\n",
    "odd.py": "def f(completion, answer):\n    return 1.0\n", "mine.py": "batch_size = 9\n",
    "broken.py": "def f(batch)\n    return 1\n", "fails.py": "import nowhere_at_all\n",
    "verl.py": "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
               "    return 1.0\ndef reward_func(queries, prompts, labels):\n    return {}\n",
    "pickled/pytorch_model.bin": "", "pickled/training_args.bin": "",
    "bare/config.json": '{"model_type": "llama"}', "bare/tokenizer_config.json": "{}",
    "compare.txt": "answers: a c\n{prompt}{first}|{second}", "half.txt": "answers: a c\n{first}"}
ASKED = dict(prompts_path="$rl_val", max_new_tokens=4, device_type="cpu")
BASE = {  # keys of a program that are right
    "tools/eval.py": ASKED | dict(policies="$policy"),
    "data/convert.py": dict(source="$mute.jsonl", out="new.jsonl"),
    "data/label.py": ASKED | dict(policy_path="$policy", judge_path="$older", out="new.jsonl",
                                  judge_template="$compare.txt", samples=2)}
# what is typed behind those keys | words of the line. $x: a file of the above, a folder of the tiny
# world; $done, $sft: runs of grpo.py and sft.py. torchrun: two ranks, and rank 0 says it
TABLE = """
ppo.py --prompts_path=$cut.jsonl | cut.jsonl; line 2
rm.py --train_path=$empty.jsonl | empty.jsonl
sft.py --train_path=$foreign.jsonl | foreign.jsonl; line 1; 'prompt'; conversations
grpo.py --prompts_path=$mute.jsonl --reward_functions=accuracy | row 2; 'accuracy'; 'answer'
grpo.py --prompts_path=$null.jsonl --reward_functions=accuracy | row 1; 'answer'; null
sft.py --train_path=$chat.jsonl | chat.jsonl; row 2; template
sft.py --train_path=$mixed.jsonl | mixed.jsonl; line 1
sft.py --fields=question | fields; THEIRS>OURS
sft.py --fields=question>prompt --train_path=$foreign.jsonl | question
sft.py --train_path=$long.jsonl --max_tokens=10 | long.jsonl; row 2; max_tokens
ppo.py --prompts_path=$huge.jsonl --max_prompt_tokens=5 | key max_prompt_tokens); longer context
sft.py --train_path=$made | made; is a folder
ppo.py --prompts_path=$made/x.jsonl | no such file; made/prepare.py
rm.py --train_path=$long.jsonl | long.jsonl; row 2
rm.py --train_path=$long.jsonl --too_long=cut | too_long

ppo.py --policy_path=$run | run/policy
sft.py --init_from=$sft_train | sft_train.jsonl
sft.py --init_from=nobody/nothing | hf download nobody/nothing --local-dir; model_from_wheel.py
sft.py --init_from=gpt2 | 'gpt2'; OWNER/NAME
ppo.py --reward_path=$other | --value_init=policy
ppo.py --value_init=$other | =policy
grpo.py --ref_path=$swapped | ref_path
sft.py --init_from=$pickled | pytorch_model.bin; safe; python -c 'from
ppo.py --reward_path=$three | 3 labels; rm.py
sft.py --init_from=scratch --tokenizer_path=data/toy/tokenizer | no such folder; prepare
sft.py --init_from=scratch --tokenizer_path=tiktoken:gpt9 | gpt9

grpo.py --reward_functions=0.5*reward_model | --reward_path=FOLDER
grpo.py --reward_path=$reward | reward_path; --reward_functions=reward_model
grpo.py --reward_functions=$broken.py:f | broken.py; line 1
grpo.py --reward_functions=$fails.py:f | fails.py; line 1
grpo.py --reward_functions=$odd.py | odd.py:FUNCTION
grpo.py --reward_functions=$odd.py:f | f(batch)
grpo.py --reward_functions=judge | judge_path
grpo.py --reward_functions=environment | environment

grpo.py --ref_path=$policy --kl_coef=0.0 | ref_path; kl_coef
ppo.py --keep_best=score --eval_path= | keep_best
ppo.py --master_weights=False | master_weights
torchrun grpo.py --generate_tp=3 | generate_tp = 3
torchrun grpo.py --generate_tp=2 --sampler=vllm | generate_tp = 2; no roles, sampler
grpo.py --max_refills=1 --refill_by=accuracy | refill_by
sft.py --attn_implementation=flash_attention_2 | FlashAttention
torchrun ppo.py --roles=train=1,generate=2 | roles; 2 rank
sft.py --zero_stage=4 | zero_stage; 0, 1, 2 or 3
sft.py --report_to=tensorbored | report_to; tensorboard
sft.py --lora=many | lora
sft.py --offload=policy=params | offload; policy
sft.py --optim=adafactor --zero_stage=2 | policy; stage
sft.py --optim=adamw8bit --dtype=bfloat16 --master_weights=False | adamw8bit; master_weights
sft.py --optim=sgd | sgd; adafactor
sft.py --quantize=4bit | quantize; lora

sft.py --out_dir=$sft_train | sft_train.jsonl
rm.py --out_dir= | is empty; choose another --out_dir
rm.py --out_dir=$made/.. | holds code, such as broken.py; choose another --out_dir
sft.py --out_dir=$sft --max_iters=1 | max_iters = 1; checkpoint-000002

tools/plot.py $done | type --runs=
tools/sample.py $done | type --policy_path=; done/out/policy
grpo.py her/grpo | type --policy_path=her/grpo
sft.py $made/../mine | mine.py?
grpo.py $rl_train | type --prompts_path=

grpo.py --reward_functions=accuracy+0.1*format | commas; type --reward_functions=accuracy,0.5*format
grpo.py --reward_functions=accuracy:0.5;format | as in 0.5*accuracy
grpo.py --chat_template=$policy/model.safetensors | chat_template; UTF-8
grpo.py --reward_functions=$odd.py:ff | did you mean 'f'?
grpo.py --reward_functions=$made/../od.py:f | did you mean; odd.py
grpo.py --reward_functions=$verl.py:compute_score | verl's; docs/data.md
grpo.py --reward_functions=$verl.py:reward_func | OpenRLHF's; docs/data.md
sft.py --init_from=$bare | this folder has no tokenizer
rm.py --train_path=$true.jsonl | line 2; 'margin'; True
rm.py --train_path=$sure.csv | row 2; 'confidence'; 1.5
rm.py --train_path=$trees.jsonl | whole dialogues; python data/convert.py --source=
sft.py --train_path=$lines.csv | 'prompt'; prompt|answer

tools/plot.py --runs=nowhere | nowhere
tools/plot.py --runs=$began | began
tools/plot.py --runs=$done --out=a.jpg | a.jpg
tools/plot.py --runs=$done --metrics=eval/klo | eval/kl
tools/sample.py --policy_path=$made | config.json
tools/sample.py --policy_path=$policy --prompts=$empty.jsonl | empty.jsonl
tools/sample.py --policy_path=$policy --prompt=a --limit=3 | limit
tools/eval.py --by=tsk | tsk
tools/eval.py --policies=$policy,nowhere | nowhere
tools/eval.py --reward_path=$policy --reward_functions=reward_model | rm.py
tools/memory.py sft.py --init_from=$policy --lorra=3 | lorra
tools/memory.py $sft | type the script first
tools/memory.py ppo.py | --reward_path=FOLDER
tools/explain.py --run=$policy | no checkpoint
tools/explain.py --run=$sft | ppo.py
tools/explain.py --run=$done --prompt=12= --answer=ab | rules.py; --trust_code=True
tools/explain.py --run=$done --iteration=4 --out=a.html --trust_code=True | 0 to 0
tools/explain.py --run=$done --iteration=0 --out=a.png | --out=FILE.html
data/convert.py --source=$foreign.jsonl | no row is left; 'completion'
data/convert.py --source=hf:nowhere | hf:NAME:SPLIT
data/convert.py --out=new.csv | new.csv; .jsonl
data/label.py --judge_template=$half.txt | {second}
data/label.py --samples=3 | samples
data/label.py --min_confidence=1.0 | 0 pairs
"""
ROWS = [line for line in TABLE.splitlines() if line]


@pytest.fixture(scope="module")
def files(world, tmp_path_factory):
    """{name: path} of all that the table names, and the folder that they are in."""
    folder = tmp_path_factory.mktemp("files")
    for name, content in FILES.items():
        os.makedirs(os.path.dirname(folder / name), exist_ok=True)
        (write if type(content) is str else jsonl)(folder / name, content)
    save_random(folder / "swapped", markers=MARKERS[::-1])
    shutil.copytree(world.policy, folder / "run/policy")
    shutil.copytree(world.policy, folder / "pickled", dirs_exist_ok=True,
                    ignore=shutil.ignore_patterns("*.safetensors"))
    config = AutoConfig.from_pretrained(shutil.copytree(world.reward, folder / "three"))
    config.num_labels = 3
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder / "three")
    paths = {}
    for name, script, more in (("sft", "sft.py", dict(max_iters=2)), ("done", "grpo.py", dict(
            reward_functions=f"accuracy,{world.rules}:letters", num_minibatches=1, max_iters=1))):
        paths[name] = well(script, folder / name, keys_of(world, script, **more))
    return folder, vars(world) | {path.name: path for path in folder.iterdir()} | paths


@pytest.mark.parametrize("row", ROWS)
def test_what_is_typed_wrong_is_one_line_and_nothing_is_written(world, files, tmp_path, row):
    """Where it would else do nothing, do something else, or end with a traceback."""
    (folder, paths), (command, words) = files, row.split(" | ")
    program, *args = command.removeprefix("torchrun ").split()
    keys = BASE.get(program, {}) if "/" in program else keys_of(world, program, out_dir="out")
    keys = keys | dict(arg[2:].split("=", 1) for arg in args if arg.startswith("--"))
    argv = [arg for arg in args if not arg.startswith("--")] + typed(keys)
    for name in sorted(paths, key=len, reverse=True):
        argv = [arg.replace(f"${name}", str(paths[name])) for arg in argv]
    assert "$" not in str(argv)
    before = [*folder.rglob("*"), *Path(world.root).rglob("*")]
    result = Started(program, argv, str(tmp_path), 1 + command.startswith("torchrun ")).wait()
    assert_one_line(result, os.path.basename(program), *words.split("; "))
    left = {path.name for path in tmp_path.rglob("*") if path.is_file() or "/" not in program}
    assert left <= {"stderr-0", "stdout-0", "stderr-1", "stdout-1", "new.jsonl.part"}
    assert [*folder.rglob("*"), *Path(world.root).rglob("*")] == before


toy = test_configurator.toy  # a fixture
OTHER_FILES = {  # no config files: they would leave a mark if they were run
    "data.jsonl": '{"prompt": "a", "answer": "3"}\n', "empty.py": "# count = 4\n",
    "own.py": "_count = 4\nMARK\n", "script.py": "import os\ncount = 4\nMARK\n",
    "other.py": "from math import pi\ncount = 4\nMARK\n", "a.py": "a: int = 4\nMARK\n",
    "reward.py": "count = 4\nMARK\ndef reward(batch):\n    count = 5\n",
    "if.py": "MARK\nif True:\n    import json\n    count = 3\n",
    "with.py": "MARK\nwith open('with.py') as f:\n    count = 3\n"}
COMPUTES = """
import math as _math
def _half(x):
    half = x // 2
    return half
if _math.pi > 3: count = _half(9)
for _i in range(2): rate = float((lambda x: x + _i)(1))
"""


@pytest.mark.parametrize("name", OTHER_FILES)
def test_what_is_no_config_file_is_not_run(toy, name):
    write(name, OTHER_FILES[name].replace("MARK", "open('mark', 'w').close()"))
    with pytest.raises(BadInput, match=name):
        toy(name)
    assert not os.path.exists("mark")


def test_a_config_file_may_compute(toy):
    write("c.py", COMPUTES)
    assert toy("c.py") == test_configurator.DEFAULTS | dict(count=4, rate=2.0)


def test_of_two_keys_for_one_thing_a_later_one_counts(toy):
    """One that is typed, in the place of a file's; not two in one place, nor one that is beaten."""
    write("c.py", "count = 5\n")
    write("m.py", "minutes = 2.0\n")
    assert toy("c.py", "--minutes=2")["minutes"] == 2 and toy("--count=4", "--minutes=0")
    write("both.py", "count = 5\nminutes = 2.0\n")
    for argv in (["both.py"], ["--minutes=2", "--count=4"], ["m.py", "--count=4"]):
        with pytest.raises(BadInput, match="minutes .* count"):
            toy(*argv)


def test_a_path_may_begin_at_home(toy, monkeypatch):
    """bash leaves the ~ of --out_dir=~/o as it is."""
    monkeypatch.setenv("HOME", "/home/me")
    for path in ("~/o", "~", "'~/o'", "~/a.jsonl,0.3*~/b.jsonl, ~/c~", "hf:~/set:main:train",
                 "accuracy,-0.5*~/mine.py:f"):
        at_home = re.sub("(?<!c)~", "/home/me", path.strip("'"))
        assert toy(f"--out_dir={path}")["out_dir"] == at_home
    for path in "out/~/o", "a~/b,c~", "~~~", "~nobody_has_this_name/o":
        assert toy(f"--out_dir={path}")["out_dir"] == path
    write("config.py", "out_dir = '~/o'\n")
    assert toy("config.py")["out_dir"] == "/home/me/o"
    keys = read_keys(f"{ROOT}/config/keys.py") | read_keys(f"{ROOT}/grpo.py")
    for key in "policy_path reward_functions tools judge_template stop_strings".split():
        (value, _), = read_arguments(keys, [f"--{key}=~/x"]).values()
        assert value == ("~/x" if key == "stop_strings" else "/home/me/x")


@pytest.mark.parametrize("script, key, hint", [
    ("ppo.py", "lr", "learning_rate"), ("grpo.py", "deepspeed", "zero_stage"),
    ("sft.py", "resume_from_checkpoint", "same command"), ("rm.py", "bf16", "dtype=bfloat16"),
    ("grpo.py", "actor_rollout_ref.rollout.n", "group_size"), ("grpo.py", "rollout.n", "group_"),
    ("sft.py", "group_size", "of grpo.py"), ("ppo.py", "temprature", "'temperature'"),
    ("rm.py", "beta", "of ppo.py and grpo.py, not of this"), ("ppo.py", "target_kl", "kl_contro"),
    ("ppo.py", "batch-size", "'batch_size'"), ("ppo.py", "config", "type its path alone"),
    ("ppo.py", "no-gradient-checkpointing", "--gradient_checkpointing=False"),
    ("ppo.py", "xyz_steps", "--help")])
def test_an_unknown_key_is_told_of_the_right_one(script, key, hint):
    keys = read_keys(f"{ROOT}/{script}") | read_keys(f"{ROOT}/config/keys.py")
    for form in (f"--{key}=1", f"+{key}=1", f"{key}=1"):
        with pytest.raises(BadInput) as said:
            read_arguments(keys, [form])
        assert key in str(said.value) and hint in str(said.value)
        assert hint == "--help" or "--help" not in str(said.value)


def test_the_keys_on_the_page_of_foreign_names_are_keys():
    keys = {*read_keys(f"{ROOT}/config/keys.py")}
    keys.update(*map(foreign_names.keys_of, foreign_names.SCRIPTS))
    for theirs, ours, _ in foreign_names.rows_of_page():
        assert not keys.intersection(theirs), theirs
        named = foreign_names.keys_in(re.sub(r"\b[a-z]+\.py", "", ours))
        assert set(named) - {"nothing", "and", "or", "with"} <= keys, ours


@pytest.mark.parametrize("typed, meant", [
    ("--rate 1e-4", "--rate=1e-4"), ("--limit=9 --count 7 --rate=2", "--count=7"),
    ("--count -1", "--count=-1"), ("--count c.py", "--count=3"),
    ("c.py --rate --limit=9", "--rate=0.5"),
    ("--flag True", "--flag=True"), ("--flag", "--flag=True"), ("--flag False", "--flag=False")])
def test_a_blank_for_an_equals_sign(toy, typed, meant):
    with pytest.raises(BadInput, match=f"{meant}$"):
        toy(*typed.split())


def replacing(pattern, content, times=1):
    """A tokenizer's rule that writes `content` for what fits, so many times."""
    rule = dict(type="Replace", pattern=pattern, content=content)
    return dict(normalizer=dict(type="Sequence", normalizers=[rule] * times))


FOLDERS = [  # a file of a model's folder, what it says, whether transformers may read it
    ("config.json", dict(n_layer=10**6), False), ("config.json", dict(num_labels=10**9), False),
    ("config.json", dict(text_config=dict(n_layer=10**6)), False),
    ("tokenizer.json", replacing(dict(String="a"), "a" * 10**6), False),
    ("tokenizer.json", replacing(dict(Regex="."), "aa", 40), False),
    ("tokenizer.json", replacing(dict(Regex="x*"), "a", 40), False),
    ("tokenizer.json", replacing(dict(Regex="(?=a)"), "a", 40), False),
    ("tokenizer.json", replacing(dict(String=5), "a"), False),
    ("tokenizer_config.json", dict(chat_template="{{ '%999999999d' % 1 }}"), False),
    ("config.json", dict(num_labels=1000, vocab_size_per_layer_input=262144), True),
    ("tokenizer.json", replacing(dict(String=" "), "\u2581", 40), True),
    ("tokenizer.json", replacing(dict(Regex="\\s+"), " ", 40), True)]


@pytest.mark.parametrize("file, more, good", FOLDERS)
def test_a_folder_that_asks_for_more_than_any_model_has(world, tmp_path, file, more, good):
    """transformers would build it for hours: a line says so. What published ones have is right."""
    folder = shutil.copytree(world.policy, tmp_path / "sent")
    write(folder / file, json.dumps(json.loads((folder / file).read_text()) | more))
    with contextlib.nullcontext() if good else pytest.raises(BadInput, match=str(folder)):
        load_tokenizer(str(folder), keys_of_system(dtype="float64"))


def test_a_table_of_a_country_with_decimal_commas(tmp_path):
    for sign, cell in (";", "1,5"), ("\t", "1;5"), (",", "1;5"):
        path = write(tmp_path / "a.csv", f'prompt{sign}answer\n"x{sign}y"{sign}{cell}\n')
        assert [row for _, row in raw_rows(path)] == [dict(prompt=f"x{sign}y", answer=cell)]


def test_help_fits_the_terminal(tmp_path):
    for script, width in (("ppo.py", 40), ("ppo.py", 200), ("tools/plot.py", 60)):
        columns = partial(os.environ.update, COLUMNS=str(width))
        ended = Started(script, ["--help"], str(tmp_path), before=lambda _, do=columns: do()).wait()
        assert ended.codes == [0], ended
        (said,) = ended.out
        words = {word for word in said.split() if len(word) + 8 > width}  # of paths
        assert all(len(line) <= min(width, 80) or words.intersection(line.split())
                   for line in said.splitlines()), said
        for name, key in read_keys(f"{ROOT}/{script}").items():
            assert f"    {name} = {key.default!r}" in said or width < 60
            assert " ".join(key.comment.split("[")[0].split()) in " ".join(said.split())
        assert not re.search(r"(?m)^.*\w.*python tools", said)  # a command begins its line


@pytest.mark.parametrize("line, folder, file", [
    ("from options.a import b", "options", "a"), ("from options import a", "options", "a"),
    ("from grading.a import b", "grading", "a"),
    ("import pkgutil; pkgutil.resolve_name('grading.a:b')", "grading", "*")])
def test_a_copy_that_lacks_a_file_names_it(tmp_path, line, folder, file):
    """
    Where all of its folder is missing, and where the folder is there; with what brings it. Of a
    rule, whose file a table names, that is the whole folder.
    """
    shutil.copy(f"{ROOT}/errors.py", tmp_path)
    write(tmp_path / "c.py", f"import errors\n{line}\n")
    for name in file, "a":
        said = subprocess.run([sys.executable, "c.py"], cwd=tmp_path, text=True,
                              capture_output=True, env=dict(os.environ, PYTHONPATH="")).stderr
        way = f"mkdir -p ./{folder}; cp QUARTET/{folder}/{name}.py ./{folder}/"
        assert f"needs {folder}/{name}.py; type {way}" in said and said.count("\n") == 1
        (tmp_path / folder).mkdir(exist_ok=True)


@pytest.mark.parametrize("broken", [False, True])
def test_an_optional_package_that_cannot_be_imported_is_named(tmp_path, monkeypatch, broken):
    """It is not there, or does not find what it needs itself. A rule's own stays the rule's."""
    write(tmp_path / "a.parquet", "")
    system, layer = keys_of_system(optim="adamw8bit"), torch.nn.Linear(1, 1)
    monkeypatch.syspath_prepend(tmp_path)
    for name, ask in (
            ("wandb", lambda: names_in("wandb")), ("tensorboard", lambda: names_in("tensorboard")),
            ("pyarrow", lambda: [*raw_rows(f"{tmp_path}/a.parquet")]),
            ("bitsandbytes", lambda: quantize(
                SimpleNamespace(must_fetch=False), "cpu", torch.float32)),
            ("bitsandbytes", lambda: other_optimizer(
                layer, system, "policy", 1e-3, (0, 0), 1e-8))):
        for module in [*sys.modules]:
            if name in module.split("."):
                monkeypatch.delitem(sys.modules, module)
        write(tmp_path / f"{name}.py", "import nothing_such")
        if not broken:
            monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(BadInput, match=f"pip install {name}") as e:
            ask()
        assert ("nothing_such" in str(e.value)) == broken
    write(tmp_path / "mine.py", "def f(batch):\n    import wandb\n")
    place = "wandb.py, line 1" if broken else "mine.py, line 2"
    with pytest.raises(Stop, match=f"^reward 'f' failed at .*{place}: ModuleNotFound"):
        load_reward(f"{tmp_path}/mine.py:f", "here")(dict(completions=["a"], rows=[{}]))


def test_without_the_virtual_environment():
    """-S: a Python without installed packages."""
    for script in ("ppo grpo sft rm recipes/dpo tools/eval tools/sample tools/plot tools/memory "
                   "tools/explain tools/plan evidence/bench data/label data/convert "
                   "data/arithmetic/prepare data/arithmetic/pairs data/example/prepare").split():
        result = subprocess.run([sys.executable, "-S", f"{script}.py"], capture_output=True,
                                text=True, cwd=ROOT, env={}, check=False)
        assert result.returncode in (1, 2) and not result.stdout, script
        assert re.fullmatch(r".*source .venv/bin/activate.*\n", result.stderr), result.stderr


@pytest.mark.parametrize("way", ["answers", "a name server that hangs"])
def test_a_hub_is_asked_once_and_then_its_cache(tmp_path, monkeypatch, way):
    from huggingface_hub import constants, utils

    def head(address, timeout):
        asked.append(address)
        if way != "answers":
            time.sleep(5)
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
    assert hash_of_model("a/b") == hash_of_model(f"{tmp_path}/models--a--b/snapshots/0f")
    hub.answers.cache_clear()


def test_the_last_line_under_torchrun_is_the_runs(world, tmp_path):
    """By runs/ranks.py, which runs/*.sh use, also after Ctrl-C, and then nothing follows it."""
    from torch.distributed import run

    def in_a_terminal(rank):
        os.dup2(1, 2)
        sys.excepthook = sys.__excepthook__  # that of a Python that has not imported errors.py

    def start(program, number, keys):
        return Started(program, [number, f"{ROOT}/grpo.py", *typed(keys)], str(tmp_path),
                       before=in_a_terminal)

    keys = keys_of(world, "grpo.py", out_dir=f"{tmp_path}/out", max_iters=1000)
    wrong = keys | dict(reward_functions="acuracy")
    ended = start(run.__file__, "--nproc_per_node=1", wrong).wait()
    assert ended.codes != [0]
    assert "grpo.py: error: reward_functions = 'acuracy'" in " ".join(ended.out[0].split()[-40:])
    started = start(f"{ROOT}/runs/ranks.py", "2", keys)
    while "iter 1 of 1000" not in (tmp_path / "stdout-0").read_text():
        assert not started.poll()
        time.sleep(0.1)
    os.kill(started.pids[0], signal.SIGINT)
    ended = started.wait()
    assert ended.codes == [130] and "Traceback" not in ended.out[0], ended
    assert re.fullmatch(r"saved before iteration \d+; the same command goes on there",
                        ended.out[0].splitlines()[-1]), ended

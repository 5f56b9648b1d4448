"""
Every key has a place where it is turned: in by_hand.py's runs, which say to 1e-9 what it must do; here; or in another
file. Here are the keys that by_hand.py does not know, and all that can be crossed: those of a case are turned together, and
how models are split, on how many ranks, and a stop in the middle must change nothing. And keys of memory and files move no bit.

A new key needs a place: a case of test_by_hand.py, CASES, UNMOVING or ELSEWHERE, or the first test fails.
"""
import functools
import glob
import os
import re

import pytest
import test_by_hand
from safetensors.torch import load_file

from configurator import read_keys

import tiny
from tiny import alike, in_a_row, measured, one_run

HELD = dict(dtype="float64", max_iters=2, eval_interval=1, timeout=300)  # patient: the machine may be busy
LETTERS = str([chr(i) for i in range(33, 127) if i % 3])  # stop strings: one token each
ROWS = dict(fields="answer>prompt,prompt>answer", max_prompt_tokens=2, too_long="cut", stop_strings=LETTERS,
            max_new_tokens=12)
JUDGE = dict(judge_path="JUDGE", judge_template="QUESTION")
AWAY = "policy=params,value=params,ref=params,reward=params"
SHORT = dict(dtype="bfloat16", master_weights=False, optim="adafactor")
CUT = "import checkpoint; checkpoint.FILE_BYTES = 20_000\n"  # optimizer states go into many files
CASES = {  # (script, name) -> the keys; ranks and keys until a stop in iteration 1; and from there on
    ("ppo.py", "rows"): (ROWS | JUDGE | dict(epochs=0.5, lora="policy=2:8:c_attn", ema_decay=0.7, value_init="shared",
                                             reward_functions="judge,0.1*length,0.1*reward_model"),
                         (2, dict(zero_stage="3", micro_batch_size=1, offload="judge=params")),
                         (3, dict(zero_stage="2", offload="reward=params", head_chunk=4))),
    ("ppo.py", "offload"): (dict(ema_decay=0.7, weight_decay=0.1),
                            (2, dict(zero_stage="3", offload=AWAY, gradient_checkpointing=True, micro_batch_tokens=40)),
                            (3, dict(zero_stage="1", offload="optimizer", gradient_checkpointing=True))),
    ("ppo.py", "two rows"): (dict(batch_size=2, eval_size=1, grad_clip=0.3),
                             (3, dict(zero_stage="policy=3,value=2,ref=1", micro_batch_size=1)), (1, {})),
    ("ppo.py", "one trunk"): (dict(lora="4", share_base=True, reward_path="ADAPTER"),
                              (2, dict(zero_stage="3", gradient_checkpointing=True)), (1, {})),
    ("ppo.py", "16 bits"): (SHORT, (2, dict(zero_stage="1")), (2, dict(zero_stage="1"))),
    ("grpo.py", "rows"): (ROWS | JUDGE | dict(epochs=0.2, lora="4", share_base=True, reward_path="ADAPTER", max_refills=1,
                                              reward_functions="ODD,0.5*reward_model,judge"),
                          (2, dict(zero_stage="2", gradient_checkpointing=True)), (1, dict(offload="policy=optimizer"))),
    # tied, with sizes that no number of ranks divides
    ("grpo.py", "tied"): (dict(policy_path="QWEN", ema_decay=0.5, eval_size=1), (3, dict(zero_stage="3")), (2, {})),
    ("grpo.py", "16 bits"): (SHORT, (2, dict(zero_stage="1")), (2, dict(zero_stage="1"))),
    ("sft.py", "scratch"): (dict(family="llama", d_model=20, n_layer=3, max_tokens=12, too_long="cut", epochs=0.5),
                            (2, dict(zero_stage="3", offload="params")), (2, dict(zero_stage="2"))),
    ("sft.py", "adapter"): (dict(init_from="POLICY", lora="2"), (2, dict(zero_stage="3", head_chunk=5)), (1, {})),
    ("sft.py", "16 bits"): (dict(init_from="POLICY") | SHORT, (2, dict(zero_stage="1")), (2, dict(zero_stage="1"))),
    ("rm.py", "adapter"): (dict(lora="2", max_tokens=12, too_long="drop"),
                           (2, dict(zero_stage="3", offload="optimizer")), (3, dict(zero_stage="2"))),
    ("rm.py", "16 bits"): (dict(epochs=0.5) | SHORT, (2, dict(zero_stage="1")), (2, dict(zero_stage="1"))),
}
PRODUCTS = {"ppo.py": ("policy", "value_model"), "grpo.py": ("policy",), "sft.py": ("policy",), "rm.py": ("reward_model",)}
# Only files, waiting or prints depend on these
UNMOVING = dict(
    device_type="auto", timeout=61, reward_timeout=31, eval_interval=1, eval_size=0, checkpoint_interval=1, keep_checkpoints=2,
    keep_best=True, save_rollouts=1, sync_check_interval=1, deterministic=True, rollout_batch_size=100, ema_decay=0.5)
ELSEWHERE = {  # file: the keys that it turns
    "tiny": "out_dir tokenizer_path context n_head d_ff", "test_seeing": "report_to", "test_compile": "compile",
    "test_device": "cuda_graphs", "test_tensor_parallel": "generate_tp", "test_four_bits": "quantize",
    "test_vllm": "sampler vllm_cache", "test_turns": "tools", "test_formats": "fields", "test_sandbox": "code_seconds",
    "test_model": "attn_implementation", "test_tokenizers": "chat_template template_kwargs system_prompt"}


def said_by_hand(script):
    """The keys that test_by_hand.py gives this script's runs."""
    cases = [keys | layout for name, (of, keys) in test_by_hand.CASES.items() if of == script
             for layout in [{}, *(more for _, more in test_by_hand.LAYOUTS.values())]]
    return {argument[2:].partition("=")[0] for keys in cases
            for argument in test_by_hand.command(tiny.World("here"), script, keys)}


@pytest.mark.parametrize("script", PRODUCTS)
def test_every_key_is_turned_somewhere(script):
    keys = read_keys(os.path.join(tiny.ROOT, script)).keys()
    here = {key for (of, _), (keys, *_) in CASES.items() if of == script for key in keys}
    for file, elsewhere in ELSEWHERE.items():
        source = tiny.read_text(f"{tiny.ROOT}/tests/{file}.py")
        here |= {key for key in elsewhere.split() if re.search(rf"\b{key}\b", source)}
    assert not keys - said_by_hand(script) - here - UNMOVING.keys()


@pytest.fixture(scope="module")
def world(world, tmp_path_factory):
    """tiny's world, beside it a tied policy of another family, and a reward model that is an adapter on the policy."""
    tiny.add_qwen(world)
    runs = in_a_row(tmp_path_factory.mktemp("reward"), {"run": one_run("rm.py", world.rm("out", lora="4"))}).succeeded()
    os.symlink(f"{runs.out('run')}/reward_model_adapter", f"{world.root}/adapter")
    return world


def run(world, script, keys, ranks=1, code=""):
    paths = dict(JUDGE=world.judge, QUESTION=f"{world.root}/question.txt", POLICY=world.policy, QWEN=world.qwen,
                 ADAPTER=world.adapter)
    keys = {key: paths.get(value, value) if isinstance(value, str) else value for key, value in (HELD | keys).items()}
    if script in ("ppo.py", "grpo.py"):
        keys = dict(reward_timeout=200) | keys
    if "ODD" in keys.get("reward_functions", ""):
        keys["reward_functions"] = keys["reward_functions"].replace("ODD", world.rule("odd"))
    return one_run(script, *[(getattr(world, script[:-3])("out", **keys), code)] * ranks)


@pytest.fixture(scope="module")
def turned(world, tmp_path_factory):
    """A function: script -> the runs of its cases."""
    @functools.cache
    def of(script):
        folder, jobs, resumed = tmp_path_factory.mktemp("knobs"), {}, {}
        for (of, name), (keys, first, then) in CASES.items():
            if of != script:
                continue
            if script in ("sft.py", "rm.py"):  # they draw a batch's rows when its step begins, and stop before the next one
                keys = keys | dict(max_iters=3)
            # adafactor makes whole steps of rounding: its noise depends on the number of ranks
            code = CUT if name == "offload" else ""
            jobs[name] = run(world, script, keys, 2 if name == "16 bits" else 1, code)
            stopped = run(world, script, keys | first[1], first[0], code + tiny.stops(1, 1))
            jobs[f"{name} stopped"] = stopped | dict(folder=f"{name} split")
            resumed[f"{name} split"] = run(world, script, keys | then[1], then[0], code)
        return tiny.Runs(folder, in_a_row(folder, jobs) | in_a_row(folder, resumed))

    return of


@pytest.mark.parametrize("script, name", CASES)
def test_shards_and_ranks_and_a_stop_change_nothing(turned, script, name):
    runs = turned(script)
    whole, stopped, resumed = (runs[f"{name}{end}"] for end in ("", " stopped", " split"))
    assert {each["kind"] + each["message"] + each["stderr"] for each in whole + resumed} == {""}, (whole, resumed)
    assert {each["kind"] + each["message"] for each in stopped} == {"SystemExit0"}, stopped
    assert "resuming from out/checkpoint-00000" in resumed[0]["stdout"]
    whole, parts = runs.out(name), runs.out(f"{name} split")
    logs = [[measured(record) for record in tiny.read_log(out)] for out in (whole, parts)]
    limit = 0 if name == "16 bits" else 1e-9  # on the same number of ranks, to the bit
    assert len(logs[0]) > 2 and alike(*logs, tolerance=10 * limit)
    for model in PRODUCTS[script]:
        assert tiny.distance(f"{whole}/{model}", f"{parts}/{model}") <= limit
        if name == "16 bits":
            assert {str(t.dtype) for t in tiny.read_weights(f"{parts}/{model}").values()} == {"torch.bfloat16"}
    last = sorted(glob.glob(f"{whole}/checkpoint-*"))[-1]
    files = [os.path.basename(f) for f in glob.glob(f"{last}/*.safetensors")]
    assert any(file.startswith("ema") for file in files) == ("ema_decay" in CASES[script, name][0])
    assert len(files) >= len(PRODUCTS[script]) + 20 * (name == "offload")
    assert sorted(files) == sorted(os.path.basename(f) for f in glob.glob(f"{parts}/{os.path.basename(last)}/*.safetensors"))
    for file in files:  # states of optimizers, and the average
        a, b = (load_file(f"{out}/{os.path.basename(last)}/{file}") for out in (whole, parts))
        assert a.keys() == b.keys() and all(a[n].shape == b[n].shape for n in a)
        assert max((a[n].double() - b[n].double()).abs().max().item() for n in a) <= limit, file


def test_keys_of_memory_and_files_move_nothing(world, tmp_path):
    jobs = {f"{script} {name}": run(world, script, keys) for script in ("ppo.py", "grpo.py")
            for name, keys in (("plain", dict(eval_path="")), ("unmoving", UNMOVING))}
    runs = in_a_row(tmp_path, jobs)
    for script in ("ppo.py", "grpo.py"):
        plain, unmoving = (runs.out(f"{script} {name}") for name in ("plain", "unmoving"))
        for model in PRODUCTS[script]:
            assert tiny.distance(f"{plain}/{model}", f"{unmoving}/{model}") == 0
        assert len([f for f in os.listdir(unmoving) if f.startswith("checkpoint-")]) == 2


def test_what_a_resumed_run_takes_of_its_checkpoint_and_what_of_its_keys(world, tmp_path):
    """Another kl_coef counts, a moving average that there was none of, and another dtype."""
    steps = dict(checkpoint_interval=1, max_new_tokens=2)
    one_step = dict(checkpoint_interval=1, keep_checkpoints=9, num_iterations=1, num_minibatches=1, max_iters=1)
    constant = dict(lr_decay="constant", value_lr_decay="constant")
    stages = dict(
        coef=("ppo.py", steps, [dict(kl_coef=0.0, max_iters=1), dict(kl_coef=0.5, max_iters=2)]),
        average=("grpo.py", one_step, [{}, dict(max_iters=2, ema_decay=0.7)]),
        dtype=("ppo.py", constant, [
            dict(dtype="float32", max_iters=1), dict(max_iters=2), dict(dtype="float32", max_iters=3)]),
        float64=("ppo.py", constant, [dict(max_iters=3)]))
    in_a_row(tmp_path, {
        f"{name} {i}": run(world, script, keys | more) | dict(folder="stages" if name == "coef" else name)
        for name, (script, keys, parts) in stages.items() for i, more in enumerate(parts)}).succeeded()
    records = tiny.read_log(f"{tmp_path}/stages/out")
    assert records[0]["objective/non_score_reward"] == 0 and "objective/kl" not in records[0]
    assert records[1]["objective/non_score_reward"] == pytest.approx(-0.5 * records[1]["objective/kl"], abs=1e-12)
    # an average that begins here begins with the weights of now, and has seen one step
    begin, end, average = (tiny.read_weights(f"{tmp_path}/average/out/{name}")
                           for name in ("checkpoint-000001/policy", "policy", "ema_policy"))
    assert max((average[n] - 0.7 * begin[n] - 0.3 * end[n]).abs().max().item() for n in end) < 1e-12
    assert tiny.distance(world.policy, f"{tmp_path}/average/out/checkpoint-000001/policy") > 1e-3
    # the optimizers go on in the dtype of the weights, which is another one than before, with what they had
    for model in PRODUCTS["ppo.py"]:
        rounded, whole = (f"{tmp_path}/{name}/out" for name in ("dtype", "float64"))
        assert tiny.distance(f"{rounded}/{model}", f"{whole}/{model}") < 1e-4
        states = load_file(f"{rounded}/checkpoint-000003/{model}_optimizer.safetensors")
        assert {str(t.dtype) for t in states.values()} == {"torch.float32"}

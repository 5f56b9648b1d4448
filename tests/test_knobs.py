"""
Every key has a place where it is turned: in by_hand.py's runs, which say to 1e-9 what it must do; here; or in another
file. Here are the keys that by_hand.py does not know: those of a group are turned together, and how models are split, on
how many ranks, and a stop in the middle must change nothing. And keys of memory and files move no bit.

A new key needs a place: a case of test_by_hand.py, GROUPS, UNMOVING or ELSEWHERE, or the first test fails.
"""
import os

import pytest
import test_by_hand

from configurator import read_keys

import tiny
from tiny import alike, in_a_row, measured, one_run

HELD = dict(dtype="float64", max_iters=2, eval_interval=1)
LETTERS = str([chr(i) for i in range(33, 127) if i % 3])  # stop strings: one token each
ROWS = dict(fields="answer>prompt,prompt>answer", max_prompt_tokens=2, too_long="cut", stop_strings=LETTERS,
            max_new_tokens=12)
JUDGED = dict(judge_path="JUDGE", judge_template="QUESTION", reward_functions="judge,0.1*length", value_init="policy")
# (script, name) -> (the group's keys, how two ranks hold the models)
GROUPS = {
    ("ppo.py", "rows"): (ROWS | dict(epochs=0.5, lora="policy=2,value=2:8:c_attn"), dict(zero_stage="3", micro_batch_size=1)),
    ("ppo.py", "adapter"): (dict(lora="2", value_init="shared", num_minibatches=1), dict(zero_stage="2")),
    ("ppo.py", "judge"): (JUDGED, dict(zero_stage="3", offload="params", head_chunk=5)),
    ("ppo.py", "optim"): (dict(optim="adafactor"), dict(zero_stage="1")),
    ("ppo.py", "16 bits"): (dict(dtype="bfloat16", master_weights=False), dict(zero_stage="3")),
    ("grpo.py", "rows"): (ROWS | dict(epochs=0.2, lora="4", max_refills=1, reward_functions="ODD,0.5*reward_model"),
                          dict(zero_stage="2", gradient_checkpointing=True)),
    ("grpo.py", "judge"): ({k: x for k, x in JUDGED.items() if k != "value_init"}, dict(zero_stage="2", offload="optimizer")),
    ("grpo.py", "optim"): (dict(optim="adafactor"), dict(zero_stage="1")),
    ("grpo.py", "16 bits"): (dict(dtype="bfloat16", master_weights=False), dict(zero_stage="2")),
    ("sft.py", "scratch"): (dict(family="llama", d_model=20, n_layer=3, max_tokens=12, too_long="cut", epochs=0.5),
                            dict(zero_stage="3", offload="params")),
    ("sft.py", "adapter"): (dict(init_from="POLICY", lora="2"), dict(zero_stage="3", head_chunk=5)),
    ("sft.py", "optim"): (dict(init_from="POLICY", optim="adafactor"), dict(zero_stage="1")),
    ("sft.py", "16 bits"): (dict(init_from="POLICY", dtype="bfloat16", master_weights=False), dict(zero_stage="3")),
    ("rm.py", "adapter"): (dict(lora="2", max_tokens=12, too_long="drop"), dict(zero_stage="3", offload="optimizer")),
    ("rm.py", "optim"): (dict(optim="adafactor", epochs=0.5), dict(zero_stage="1")),
    ("rm.py", "16 bits"): (dict(dtype="bfloat16", master_weights=False), dict(zero_stage="3")),
}
PRODUCTS = {"ppo.py": ("policy", "value_model"), "grpo.py": ("policy",), "sft.py": ("policy",), "rm.py": ("reward_model",)}
# Only files, waiting or prints depend on these
UNMOVING = dict(
    device_type="auto", timeout=61, reward_timeout=31, eval_interval=1, eval_size=0, checkpoint_interval=1, keep_checkpoints=2,
    keep_best=True, sync_check_interval=1, deterministic=True, rollout_batch_size=100, ema_decay=0.5)
ELSEWHERE = {  # key: the file that turns it
    "out_dir": "test_ppo", "report_to": "test_seeing", "compile": "test_compile", "generate_tp": "test_tensor_parallel",
    "share_base": "test_zero", "quantize": "test_four_bits",
    "sampler": "test_vllm", "vllm_cache": "test_vllm",
    "fields": "test_formats", "code_seconds": "test_sandbox", "chat_template": "test_tokenizers",
    "template_kwargs": "test_tokenizers", "system_prompt": "test_tokenizers", "tokenizer_path": "tiny", "context": "tiny",
    "n_head": "tiny", "d_ff": "tiny"}


def said_by_hand(script):
    """The keys that test_by_hand.py gives this script's runs."""
    cases = [keys | layout for name, (of, keys) in test_by_hand.CASES.items() if of == script
             for layout in [{}, *(more for _, more in test_by_hand.LAYOUTS.values())]]
    return {argument[2:].partition("=")[0] for keys in cases
            for argument in test_by_hand.command(tiny.World("here"), script, keys)}


@pytest.mark.parametrize("script", PRODUCTS)
def test_every_key_is_turned_somewhere(script):
    keys = read_keys(os.path.join(tiny.ROOT, script)).keys()
    here = {key for (of, _), (keys, _) in GROUPS.items() if of == script for key in keys}
    missing = keys - said_by_hand(script) - here - UNMOVING.keys() - ELSEWHERE.keys()
    assert not missing


@pytest.fixture(scope="module")
def turned(tmp_path_factory, request):
    """The folder with the runs that this session's tests ask for, and {name: what came of it on each rank}."""
    asked = [item.callspec.params if hasattr(item, "callspec") else {} for item in request.session.items
             if item.path == request.path]
    folder = str(tmp_path_factory.mktemp("knobs"))
    world = tiny.build(str(tmp_path_factory.mktemp("world")))
    paths = dict(JUDGE=world.judge, QUESTION=f"{world.root}/question.txt", POLICY=world.policy)

    def run(script, keys, ranks=1, code=""):
        keys = {key: paths.get(value, value) if isinstance(value, str) else value for key, value in (HELD | keys).items()}
        if "ODD" in keys.get("reward_functions", ""):
            keys["reward_functions"] = keys["reward_functions"].replace("ODD", world.rule("odd"))
        return one_run(script, *[(getattr(world, script[:-3])("out", **keys), code)] * ranks)

    jobs = {}
    for (script, name), (keys, split) in GROUPS.items():
        if dict(script=script, name=name) not in asked:
            continue
        ours = f"{script} {name}"
        # adafactor makes whole steps of rounding: its noise depends on the number of ranks
        if script in ("sft.py", "rm.py"):  # they draw a batch's rows when its step begins, and stop before the next one
            keys = keys | dict(max_iters=3)
        jobs[ours] = run(script, keys, 2 if name == "optim" else 1)
        jobs[f"{ours} stopped"] = run(script, keys | split, 2, tiny.stops(1, 1)) | dict(folder=f"{ours} split")
        jobs[f"{ours} split"] = run(script, keys | split, 2)
    for script in [script for script in ("ppo.py", "grpo.py") if dict(script=script) in asked]:
        jobs[f"{script} plain"] = run(script, dict(eval_path=""))
        jobs[f"{script} unmoving"] = run(script, UNMOVING)
    steps = dict(checkpoint_interval=1, missing_eos_penalty=0.0, max_new_tokens=2)
    fixed, adapted = dict(kl_coef=0.0, scale_scores="running"), dict(kl_coef=0.5, kl_coef_target=3.0)
    stages = fixed | dict(max_iters=1), adapted, adapted | dict(max_iters=3)
    for i, keys in enumerate(stages if {} in asked else ()):
        jobs[f"ppo.py, stage {i}"] = run("ppo.py", steps | keys) | dict(folder="ppo.py in stages")
    return folder, in_a_row(folder, jobs)


@pytest.mark.parametrize("script, name", GROUPS)
def test_two_ranks_with_shards_and_a_stop_change_nothing(turned, script, name):
    folder, outcomes = turned
    whole, stopped, resumed = (outcomes[f"{script} {name}{end}"] for end in ("", " stopped", " split"))
    assert {each["kind"] + each["message"] for each in whole + resumed} == {""}, (whole, resumed)
    assert [each["kind"] + each["message"] for each in stopped] == ["SystemExit0"] * 2, stopped
    assert "resuming from out/checkpoint-00000" in resumed[0]["stdout"]
    whole, parts = f"{folder}/{script} {name}/out", f"{folder}/{script} {name} split/out"
    logs = [[measured(record) for record in tiny.read_log(out)] for out in (whole, parts)]
    assert len(logs[0]) == len(logs[1]) > 2
    if name == "16 bits":  # where rounding is not to be compared; the weights stay in 16 bits
        for model in PRODUCTS[script]:
            assert {str(t.dtype) for t in tiny.read_weights(f"{parts}/{model}").values()} == {"torch.bfloat16"}
        return
    assert alike(*logs, tolerance=1e-9)
    for model in PRODUCTS[script]:
        assert tiny.distance(f"{whole}/{model}", f"{parts}/{model}") < 1e-9


@pytest.mark.parametrize("script", ["ppo.py", "grpo.py"])
def test_keys_of_memory_and_files_move_nothing(turned, script):
    plain, unmoving = (f"{turned[0]}/{script} {name}/out" for name in ("plain", "unmoving"))
    for model in PRODUCTS[script]:
        assert tiny.distance(f"{plain}/{model}", f"{unmoving}/{model}") == 0
    assert len([f for f in os.listdir(unmoving) if f.startswith("checkpoint-")]) == 2


def test_what_a_resumed_run_takes_of_its_checkpoint_and_what_of_its_keys(turned):
    """Another kl_coef counts, and then what it is adapted to; and scores that are not to be scaled any more are not."""
    records = tiny.read_log(f"{turned[0]}/ppo.py in stages/out")
    assert [record["objective/kl_coef"] for record in records[:2]] == [0.0, 0.5] and "objective/kl" not in records[0]
    assert records[2]["objective/kl_coef"] == pytest.approx(0.5 * (1 - 0.2 * 7 / 10_000))  # a KL of less than 2.4
    gaps = [r["objective/rlhf_reward"] - r["objective/non_score_reward"] - r["objective/scores"] for r in records[:3]]
    assert abs(gaps[0]) > 0.01 and max(map(abs, gaps[1:])) < 1e-9

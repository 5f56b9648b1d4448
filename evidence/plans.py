"""
tools/plan.py held against what was measured. It prints the two tables of docs/scale.md.

    python evidence/plans.py                   # logs and published steps over their limit; minutes
    python evidence/plans.py --rows=cpu        # six runs on this machine, and what --measure said
"""
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from types import SimpleNamespace

# Python looks for modules in this file's folder; ours are in the folder above it.
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

from configurator import configure  # noqa: E402  first: it must be imported before torch

import transformers  # noqa: E402

from evidence.bench import keys_of, make_models  # noqa: E402
from tools import memory, plan, work  # noqa: E402

# -------------------------------------------------------------------------------------------------
rows = "limits"  # to print [limits | cpu]
only = ""  # of the rows those whose label has this text
rounds = 1  # of cpu: turns of plan and run [1..100]
clock = "wall"  # cpu: seconds of a thread, where other programs share the machine [wall | cpu]
config, system = configure(globals(), "config/keys.py", device_type="cpu")
# -------------------------------------------------------------------------------------------------
LLAMA = dict(tie_word_embeddings=False, num_labels=1)
MODELS = dict(
    smollm2=transformers.LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, vocab_size=49152, tie_word_embeddings=True, num_labels=1),
    llama1b=transformers.LlamaConfig(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256, **LLAMA),
    llama8b=transformers.LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256, **LLAMA),
    opt350m=transformers.OPTConfig(
        hidden_size=1024, ffn_dim=4096, num_hidden_layers=24, num_attention_heads=16, num_labels=1,
        word_embed_proj_dim=512, do_layer_norm_before=False, max_position_embeddings=2048),
    opt6_7b=transformers.OPTConfig(
        hidden_size=4096, ffn_dim=16384, num_hidden_layers=32, num_attention_heads=32,
        max_position_embeddings=2048),
    opt13b=transformers.OPTConfig(
        hidden_size=5120, ffn_dim=20480, num_hidden_layers=40, num_attention_heads=40,
        max_position_embeddings=2048))
SMOL = dict(batch_size=512, max_new_tokens=192, micro_batch_tokens=32768)
CHAT = dict(batch_size=1024, max_new_tokens=256, ppo_epochs=1, value_init="opt350m",
            reward_path="opt350m", reward_functions="reward_model", zero_stage="policy=3,ref=3")
NEMO = dict(batch_size=2048, group_size=32, num_minibatches=4, max_new_tokens=3996,
            micro_batch_size=4, sampler="vllm", kl_coef=0.01)  # its weights are not split by ZeRO
B1 = dict(micro_batch_size=16, max_new_tokens=256, group_size=4, kl_coef=0)
# (label, script, cards, policy, keys, tokens of the mean prompt and response, seconds by phase).
# The H200's: assets/smollm2/*.jsonl; the 1B's: commit 5ab0a1e9. Published steps: NeMo-RL
# docs/about/performance-summary.md, v0.4 (1,060 tokens with the prompt, of at most 4,096);
# DeepSpeed-Chat blogs/deepspeed-chat, table 1 (131.9k pairs, 1,024 a step: 4.1 and 9 hours)
MEASURED = [
    ("SmolLM2 135M GRPO, H200", "grpo", "1xH200", "smollm2", SMOL | dict(group_size=8), 97, 94,
     dict(sampling=1.90, reading=0.40, update=0.99)),
    ("SmolLM2 135M PPO, H200", "ppo", "1xH200", "smollm2", SMOL | dict(
        ppo_epochs=2, num_minibatches=2, value_init="policy"), 97, 95,
     dict(sampling=2.03, reading=0.99, update=4.37)),
    ("1B, 64 responses, H200", "grpo", "1xH200", "llama1b", B1 | dict(batch_size=64), 128, 256,
     dict(sampling=1.09, update=0.53)),
    ("1B, 256 responses, H200", "grpo", "1xH200", "llama1b", B1 | dict(batch_size=256), 128, 256,
     dict(sampling=2.09)),
    ("NeMo-RL, Llama 3.1 8B GRPO, 16 H100", "grpo", "16xH100", "llama8b", NEMO, 100, 960,
     dict(step=97.7)),
    ("DeepSpeed-Chat, OPT-6.7B PPO, 8 A100", "ppo", "8xA100", "opt6_7b", CHAT, 256, 256,
     dict(step=115)),
    ("DeepSpeed-Chat, OPT-13B PPO, 8 A100", "ppo", "8xA100", "opt13b", CHAT, 256, 256,
     dict(step=252))]


def limit_rows():
    """Lines of the table: measured seconds, the limit, and how many times it they are."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for name, model in MODELS.items():
            model.save_pretrained(name)
        for label, script, cards, policy, keys, P, R, seconds in MEASURED:
            if only not in label:
                continue
            number, _, card = plan.read_card(cards, "")
            keys = dict(policy_path=policy, reward_functions="accuracy", dtype="bfloat16",
                        world_size=number) | keys
            _, of = memory.read_run([f"{script}.py"] + [f"--{k}={v}" for k, v in keys.items()])
            with contextlib.redirect_stdout(None), memory.dry_run(script, of) as run:
                count = work.counted(script, run, P, R)
            least = {phase: x for phase, (x, _) in work.least_of(
                work.work_of(script, of, count, P, R), plan.speed_of(card, of)).items()}
            least["step"] = sum(least.values())
            for phase, took in seconds.items():
                yield (f"| {label}: {phase} | {took:.3g} s | {least[phase]:.3g} s | "
                       f"{took / least[phase]:.1f} |")


# name: (vocabulary, width, layers, heads, their keys', MLP), prompt, response
SHAPES = {
    "toy": ((264, 128, 2, 4, 4, 344), 10, 48), "3M": ((512, 256, 4, 4, 4, 688), 32, 128),
    "narrow and deep": ((4096, 256, 12, 8, 2, 768), 48, 64),
    "as SmolLM2": ((49152, 576, 30, 9, 3, 1536), 64, 24)}
RUNS = [("toy", "ppo", 1, dict(batch_size=256, micro_batch_size=64, num_minibatches=2)),
        ("3M", "grpo", 1, dict(batch_size=32, micro_batch_size=8, group_size=4)),
        ("3M", "grpo", 2, dict(batch_size=64, micro_batch_size=8, group_size=4)),
        ("narrow and deep", "ppo", 1, dict(batch_size=32, micro_batch_size=8, ppo_epochs=2)),
        ("narrow and deep", "ppo", 1, dict(batch_size=32, micro_batch_tokens=1024, ppo_epochs=2,
                                           lora="policy=8")),
        ("as SmolLM2", "grpo", 1, dict(batch_size=8, micro_batch_size=4, group_size=4))]
CPU_CLOCK = ("import runpy, sys, time; time.perf_counter = time.process_time; "
             "sys.argv = sys.argv[1:]; sys.path.insert(0, {!r}); "
             "runpy.run_path(sys.argv[0], run_name='__main__')")


def call(folder, number, *argv, ranks=1):
    """What a program for so many ranks prints; of a run its log is beside it."""
    # where threads are pinned, the first one of each rank would be pinned to the same core
    env = {key: x for key, x in os.environ.items() if number == 1 or key != "OMP_PROC_BIND"}
    start = [sys.executable, *(["-c", CPU_CLOCK.format(ROOT)] if clock == "cpu" else [])]
    if ranks > 1:
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                 f"--nproc_per_node={ranks}"]
    done = subprocess.run([*start, *argv], cwd=folder, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-500:]
    return done.stdout


def cpu_rows():
    for name, script, number, keys in RUNS:
        label = f"{name}, {script.upper()}{', LoRA' * ('lora' in keys)}, {number} rank(s)"
        if only not in label:
            continue
        (V, d, layers, heads, kv, f), P, R = SHAPES[name]
        sizes = dict(vocab_size=V, hidden_size=d, intermediate_size=f, num_hidden_layers=layers,
                     num_attention_heads=heads, num_key_value_heads=kv)
        took, said = [], []
        with tempfile.TemporaryDirectory() as folder:
            make_models(folder, sizes, P, R, 0.0, SimpleNamespace(device_type="cpu"), True)
            of = [f"--{key}={value}" for key, value in keys_of(script, folder, dict(
                max_new_tokens=R, max_iters=4) | keys).items()]
            for i in range(rounds):
                text = call(folder, number, f"{ROOT}/tools/plan.py", f"{script}.py", *of,
                            f"--gpus={number}xcpu", "--measure", f"--length={R}")
                lines = (line.split() for line in text.splitlines() if line.endswith(" s"))
                found = {line[0]: float(line[-2]) for line in lines}
                said.append(dict(rollout=found["sampling"], update=found["update"],
                                 score=found.get("scoring", 0) + found["reading"]))
                call(folder, number, f"{ROOT}/{script}.py", *of, f"--out_dir=run{i}",
                     "--device_type=cpu", ranks=number)
                with open(f"{folder}/run{i}/log.jsonl", encoding="utf-8") as log:
                    records = [json.loads(line) for line in itertools.islice(log, 1, 4)]
                took += [{phase: record[f"time/{phase}"] for phase in (
                    "rollout", "score", "update", "iteration")} for record in records]
        both = [{phase: statistics.median(x[phase] for x in many) for phase in said[0]}
                for many in (said, took)]
        both = [one | dict(iteration=sum(one.values())) for one in both]
        cells = [f"{both[0][phase]:.3g}, {both[1][phase]:.3g} s "
                 f"({both[0][phase] / both[1][phase] - 1:+.0%})" for phase in both[0]]
        yield f"| {label} | {' | '.join(cells)} |"


if __name__ == "__main__":
    if rows == "limits":
        print("| what | measured | limit | times |\n|---|---|---|---|")
    else:
        print("| plan, run | rollout | update | score | iteration |\n|---|---|---|---|---|")
    for line in limit_rows() if rows == "limits" else cpu_rows():
        print(line, flush=True)

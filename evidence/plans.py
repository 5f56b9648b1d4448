"""
tools/plan.py held against what was measured. It prints the two tables of docs/scale.md.

    python evidence/plans.py                   # logs and published steps over their limit; minutes
    python evidence/plans.py --rows=cpu        # six runs on this machine, and what --measure said
"""
import contextlib
import os
import statistics
import sys
import tempfile

# Python looks for modules in this file's folder; ours are in the folder above it.
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

from configurator import configure  # noqa: E402  first: it must be imported before torch

import transformers  # noqa: E402

from evidence.bench import keys_of, make_models, printed, sizes_of_llama  # noqa: E402
from tools import memory, plan, work  # noqa: E402
from tools.runs import read_records, typed  # noqa: E402

# -------------------------------------------------------------------------------------------------
rows = "limits"  # to print [limits | cpu]
only = ""  # of the rows those whose label has this text
config, system = configure(globals(), "config/keys.py", device_type="cpu")
# -------------------------------------------------------------------------------------------------


def llama(*sizes, tied=False):
    return transformers.LlamaConfig(**sizes_of_llama(*sizes), tie_word_embeddings=tied,
                                    num_labels=1, max_position_embeddings=8192)


def opt(d, layers, heads, **more):
    return transformers.OPTConfig(
        hidden_size=d, ffn_dim=4 * d, num_hidden_layers=layers, num_attention_heads=heads,
        num_labels=1, max_position_embeddings=2048, **more)


MODELS = dict(
    smollm2=llama(49152, 576, 30, 9, 3, 1536, tied=True),
    llama1b=llama(128256, 2048, 16, 32, 8, 8192), llama8b=llama(128256, 4096, 32, 32, 8, 14336),
    opt350m=opt(1024, 24, 16, word_embed_proj_dim=512, do_layer_norm_before=False),
    opt6_7b=opt(4096, 32, 32), opt13b=opt(5120, 40, 40))
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
            _, of = memory.read_run([script, *typed(keys)])
            with contextlib.redirect_stdout(None), memory.dry_run(script, of) as run:
                phases = work.work_of(script, of, run, P, R)
            least = {phase: x for phase, (x, _) in work.least_of(
                phases, plan.speed_of(card, of)).items()}
            least["step"] = sum(least.values())
            for phase, took in seconds.items():
                yield (f"| {label}: {phase} | {took:.3g} s | {least[phase]:.3g} s | "
                       f"{took / least[phase]:.1f} |")


# name: the sizes of sizes_of_llama, prompt, response
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


def cpu_rows():
    """Lines of the table: of each phase what the plan says, and the run's median."""
    for name, script, number, keys in RUNS:
        label = f"{name}, {script.upper()}{', LoRA' * ('lora' in keys)}, {number} rank(s)"
        if only not in label:
            continue
        sizes, P, R = SHAPES[name]
        # where threads are pinned, the first one of each rank would be pinned to the same core
        env = {key: x for key, x in os.environ.items() if number == 1 or key != "OMP_PROC_BIND"}
        with tempfile.TemporaryDirectory() as folder:
            make_models(folder, sizes_of_llama(*sizes), P, R, 0.0, system, ppo=True)
            of = typed(keys_of(script, folder, dict(max_new_tokens=R, max_iters=4) | keys))
            torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={number}"]
            python = [sys.executable, *torchrun[:4 * (number > 1)]]
            text = printed([*python, f"{ROOT}/tools/plan.py", script, *of, f"--gpus={number}xcpu",
                            "--measure", f"--length={R}"], folder, env=env)
            printed([*python, f"{ROOT}/{script}.py", *of, "--out_dir=run", "--device_type=cpu"],
                    folder, env=env)
            records = read_records(f"{folder}/run/log.jsonl")[1:4]
        lines = (line.split() for line in text.splitlines() if line.endswith(" s"))
        found = {line[0]: float(line[-2]) for line in lines}
        said = dict(rollout=found["sampling"], update=found["update"],
                    score=found.get("scoring", 0) + found["reading"])
        took = {phase: statistics.median(r[f"time/{phase}"] for r in records) for phase in said}
        said, took = (one | dict(iteration=sum(one.values())) for one in (said, took))
        cells = [f"{said[phase]:.3g}, {took[phase]:.3g} s ({said[phase] / took[phase] - 1:+.0%})"
                 for phase in said]
        yield f"| {label} | {' | '.join(cells)} |"


if __name__ == "__main__":
    if rows == "limits":
        print("| what | measured | limit | times |\n|---|---|---|---|")
    else:
        print("| plan, run | rollout | update | score | iteration |\n|---|---|---|---|---|")
    for line in limit_rows() if rows == "limits" else cpu_rows():
        print(line, flush=True)

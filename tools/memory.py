"""
How much memory a run will take on each GPU, before anything is loaded: each model's weights,
gradients and optimizer states, counted; and the peak of each phase, by a dry run.

python tools/memory.py config/llama_8b.py --world-size=8 --gpu-gb=80    # a table, and what fits
python tools/memory.py config/llama_8b.py --world-size=8 --lora=16      # and with any other keys
python tools/memory.py config/llama.py --policy_path=FOLDER --reward_path=FOLDER

Config files and --key=value are those of ppo.py, grpo.py, sft.py or rm.py; where they fit several
of these, the first line printed says which one is meant, and its name in front of them (grpo.py)
chooses. The tool's own options:

    --world-size=1   ranks, one GPU each
    --gpu-gb=80      also say the largest micro_batch_size whose peak is below this many GB

Of each model its config.json is enough, in a folder or on the hub. Texts are taken to be as long as
they may be: max_prompt_tokens (512, if it is 0) and max_new_tokens; of sft.py and rm.py max_tokens
(1024).

How it counts: the models are built as the run builds them, but of fake tensors, which have shapes
and no memory. One step goes through them, by the functions that the scripts call, while torch's
MemTracker adds up what is alive: half a minute for 8B, more with --gpu-gb. What bitsandbytes would
hold (matrices in 4 bits, states in 8) is counted by its formats, and it need not be installed.

What is not in it: a GPU also needs room for its context, for the workspaces of its libraries and
for gaps between tensors, 2 GB or more. CUDA graphs (the key cuda_graphs) take up to 256 tokens more
of each row's cache. Kernels are those of a CPU, and nothing is compiled. What
the key offload moves into the CPU's memory is taken off all phases.
"""
import os
import sys

# Python looks for modules in this file's folder, tools/; ours are in the folder above it.
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

import before_torch  # noqa: E402, F401, before torch: it notes which CPUs this process may use

import math  # noqa: E402

import torch.distributed as dist  # noqa: E402

from configurator import Key, read_arguments, read_keys, run_config_file  # noqa: E402
from errors import BadConfig, report_errors  # noqa: E402
from models import in_memory  # noqa: E402
from options.shards import mesh_of_ranks, offload_of  # noqa: E402
from tools.dry_run import (COLUMNS, CPU, SHORT, build, equip, fake_tensors,  # noqa: E402
                           step_through, system_of)

SCRIPTS = "ppo", "grpo", "sft", "rm"
OPTIONS = dict(world_size=Key(1, "ranks [1..100000]", []), gpu_gb=Key(0.0, "of memory [>= 0]", []))


# --------------------------------------------------------------------------------------------------
# the script's configuration


def keys_of(script):
    """{name: Key} of a script."""
    return read_keys(os.path.join(ROOT, f"{script}.py"))


def read_run(argv):
    """
    (script, its configuration with these arguments, in which the tool's own options are, too). The
    script may be named (grpo.py). If not, it is the first that has all keys that are given; one in
    the name of the config file comes before others. Raises BadConfig.
    """
    named = [script for script in SCRIPTS if f"{script}.py" in argv]
    argv = [arg for arg in argv if arg.removesuffix(".py") not in named]
    files = [arg for arg in argv if not arg.startswith("--")]
    given = {arg[2:].partition("=")[0] for arg in argv if arg.startswith("--")} - OPTIONS.keys()
    given = given.union(*map(run_config_file, files))
    fits = [script for script in SCRIPTS if given <= keys_of(script).keys()] or ["ppo"]
    if fits[:2] == ["ppo", "grpo"] and "reward_path" not in given:
        del fits[0]  # ppo.py without a reward model has the key value_init, and grpo.py has not
    words = "_".join(os.path.basename(file).removesuffix(".py") for file in files).split("_")
    script = min(named or fits, key=lambda script: script not in words)
    keys = keys_of(script) | OPTIONS
    config = {name: key.default for name, key in keys.items()}
    config |= {name: value for name, (value, _) in read_arguments(keys, argv).items()}
    if config.get("roles") or config.get("generate_tp", 1) > 1:
        raise BadConfig("this tool counts ranks that do everything, each for itself; type --roles= "
                        "and --generate_tp=1, and as --world-size the ranks of a role")
    return script, config


# --------------------------------------------------------------------------------------------------
# the prediction


def sizes_of(script, config, ranks):
    """
    (rows that decode at once, different prompts of these, rows of a micro-batch, prompt length,
    response length).
    """
    if script in ("sft", "rm"):
        T = config["max_tokens"] or 1024
        n, distinct, at_once, P, R = 0, 0, config["batch_size"], T // 2, T - T // 2
    else:
        P, R = config["max_prompt_tokens"] or 512, config["max_new_tokens"]
        evaluated = math.ceil(config["eval_size"] / ranks) if config["eval_path"] else 0
        n = max(math.ceil(config["batch_size"] / ranks), evaluated)
        n = min(n, config["rollout_batch_size"] or n)
        distinct = max(math.ceil(n / config.get("group_size", 1)), min(n, evaluated))
        at_once = math.ceil(config["batch_size"] / config["num_minibatches"])
    b = config["micro_batch_size"]
    if config["micro_batch_tokens"]:
        b = max(1, config["micro_batch_tokens"] // (P + R))
    b = min(b, math.ceil(at_once / ranks))
    return n, distinct, 2 * b if script == "rm" else b, P, R  # rm.py's are pairs


def predict(script, config, ranks, limit=0):
    """
    Of rank 0: {model: {column: bytes}}; {(phase, what is at work): peak in bytes}; and the largest
    micro_batch_size whose peaks are at most `limit` bytes, if that is not 0.
    """
    mesh = mesh_of_ranks(CPU) if ranks > 1 else None  # it needs numbers, which fake tensors lack
    system = system_of(script, config)
    n, distinct, b, P, R = sizes_of(script, config, ranks)
    with fake_tensors() as tracker:
        models = build(script, config, mesh)
        optimizers, rows = equip(models, config)
        moved = sum(offloaded(name, model, rows[name], system)
                    for name, model in in_memory(**models).items() if name in SHORT)

        def peaks_of(n, b):
            peaks = step_through(config, models, optimizers, n, distinct, b, P, R, tracker)
            return {key: peak - moved for key, peak in peaks.items()}

        peaks, fits = peaks_of(n, b), 0
        if limit and not any(peak > limit for (phase, _), peak in peaks.items()
                             if phase == "rollout"):
            most = config | dict(micro_batch_size=10**6, micro_batch_tokens=0)
            most, unit = sizes_of(script, most, ranks)[2], 2 if script == "rm" else 1
            fits = largest(lambda b: max(peaks_of(0, b * unit).values()), most // unit, limit)
    return rows, peaks, fits


def offloaded(name, model, row, system):
    """How many bytes of a model are in the CPU's memory. Its row becomes what is left."""
    trained = any(p.requires_grad for p in model.parameters())
    offload = offload_of(system, SHORT[name], trained) if system.device_type != "cpu" else "none"
    away = dict(none=(), optimizer=["optimizer"], params=COLUMNS)[offload]
    moved = sum(row[column] for column in away)
    row |= dict.fromkeys(away, 0)
    return moved


def largest(peak_of, most, limit):
    """
    The largest micro-batch whose peak is at most `limit`, by a straight line between the peaks of 1
    and of the most rows that a step has; 0 if not even 1 fits. A peak is the highest of several
    lines: so it is not above that one, and the micro-batch does fit.
    """
    one, all_rows = peak_of(1), peak_of(most)
    if one > limit or all_rows <= limit:
        return most if all_rows <= limit else 0
    return 1 + int((limit - one) / (all_rows - one) * (most - 1))


# --------------------------------------------------------------------------------------------------
# printing


def show(rows, peaks):
    """Print a prediction."""
    size, unit = (2**30, "GiB") if max(peaks.values()) > 8 * 2**30 else (2**20, "MiB")
    print(f"{unit:<14}" + "".join(f"{column:>13}" for column in COLUMNS))
    rows = rows | {"all": {c: sum(row[c] for row in rows.values()) for c in COLUMNS}}
    for name, row in rows.items():
        print(f"{name:<14}" + "".join(f"{row[c] / size:>13.2f}" for c in COLUMNS))
    print("\nat the peak of")
    for phase in dict.fromkeys(phase for phase, _ in peaks):
        parts = {name: peak / size for (of, name), peak in peaks.items() if of == phase}
        print(f"{phase:<14}{max(parts.values()):>13.2f}   "
              + ", ".join(f"{name} {peak:.2f}" for name, peak in parts.items()))


def main(argv):
    """The tool, with these arguments. Raises BadInput."""
    report_errors()
    if not argv or {"--help", "-h"} & set(argv):
        print(__doc__.strip())
        return
    script, config = read_run([arg.replace("--world-size=", "--world_size=").replace(
        "--gpu-gb=", "--gpu_gb=") for arg in argv])
    ranks, limit = config["world_size"], config["gpu_gb"] * 1e9
    if ranks > 1:  # a group of ranks that are not there
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    n, _, b, P, R = sizes_of(script, config, ranks)
    print(f"{script}.py on each of {ranks} rank(s), {config['dtype']}: texts of {P} + {R} tokens, "
          f"{b} in a micro-batch{f', {n} decode at once' if n else ''}\n")
    rows, peaks, fits = predict(script, config, ranks, limit)
    show(rows, peaks)
    if limit:
        print(f"\nof {config['gpu_gb']:g} GB the largest micro_batch_size that fits is "
              f"{fits or 'none'}")


if __name__ == "__main__":
    main(sys.argv[1:])

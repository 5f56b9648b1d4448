"""
How much memory a run will take on each GPU, before anything is loaded: each model's weights,
gradients and optimizer states, counted; and the peak of each phase, by a dry run.

python tools/memory.py config/llama_8b.py --world-size=8 --gpu-gb=80    # a table, and what fits
python tools/memory.py config/llama_8b.py --world-size=8 --compare      # PPO, LoRA, one trunk, GRPO
python tools/memory.py config/llama.py --policy_path=FOLDER --reward_path=FOLDER

Config files and --key=value are those of ppo.py, grpo.py, sft.py or rm.py. The tool's own options:

    --world-size=1   ranks, one GPU each
    --gpu-gb=80      also say the largest micro_batch_size whose peak is below this many GB
    --compare        PPO, PPO with LoRA, one trunk and GRPO side by side, for the same policy

Of each model its config.json is enough, in a folder or on the hub. Texts are taken to be as long as
they may be: max_prompt_tokens (512, if it is 0) and max_new_tokens; of sft.py and rm.py max_tokens
(1024).

How it counts: the models are built as the run builds them, but of fake tensors, which have shapes
and no memory. One step goes through them, by the functions that the scripts call, while torch's
MemTracker adds up what is alive. That is done with a few layers, and with a period of layers more;
what a period adds is multiplied by the number of periods. What bitsandbytes would hold (matrices in
4 bits, states in 8) is counted by its formats, and it need not be installed.

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
from options.shards import mesh_of_ranks, offload_of  # noqa: E402
from errors import BadConfig, first_line, report_errors, shorten  # noqa: E402
from tools.dry_run import (COLUMNS, CPU, SHORT, build, equip, fake_tensors, layers_of,  # noqa: E402
                           paths_of, step_through, system_of)

SCRIPTS = "ppo", "grpo", "sft", "rm"
OPTIONS = dict(world_size=Key(1, "ranks [1..100000]", []), gpu_gb=Key(0.0, "of memory [>= 0]", []),
               compare=Key(False, "", []))


# --------------------------------------------------------------------------------------------------
# the script's configuration


def keys_of(script):
    """{name: Key} of a script."""
    return read_keys(os.path.join(ROOT, f"{script}.py"))


def read_run(argv):
    """
    (script, its configuration with these arguments, in which the tool's own options are, too). The
    script is the first that has all keys that are given; one in the name of the config file comes
    before others. Raises BadConfig.
    """
    files = [arg for arg in argv if not arg.startswith("--")]
    given = {arg[2:].partition("=")[0] for arg in argv if arg.startswith("--")} - OPTIONS.keys()
    given = given.union(*map(run_config_file, files))
    fits = [script for script in SCRIPTS if given <= keys_of(script).keys()] or ["ppo"]
    words = "_".join(os.path.basename(file).removesuffix(".py") for file in files).split("_")
    script = min(fits, key=lambda script: script not in words)
    keys = keys_of(script) | OPTIONS
    config = {name: key.default for name, key in keys.items()}
    config |= {name: value for name, (value, _) in read_arguments(keys, argv).items()}
    for name, value in config.items():
        if type(value) is int and abs(value) > 10**7 and name != "seed":
            raise BadConfig(f"{name} = {shorten(value)}: this tool counts up to 10 million")
    if config.get("roles") or config.get("generate_tp", 1) > 1:
        raise BadConfig("this tool counts ranks that do everything, each for itself; type --roles= "
                        "and --generate_tp=1, and as --world-size the ranks of a role")
    return script, config


def variants(config):
    """{column: (script, configuration)} for --compare. Keys that a script has not are left out."""
    given = {k: v for k, v in config.items()
             if k not in ("lora", "quantize", "share_base", "value_init", "reward_functions")}
    given["kl_coef"] = config["kl_coef"] or 0.05

    def of(script, **more):
        own = {k: key.default for k, key in keys_of(script).items()}
        return script, own | {k: v for k, v in (given | more).items() if k in own}

    ppo = dict(value_init="policy", reward_functions="reward_model")
    if "reward_model" not in config["reward_functions"]:  # then it is as large as the policy
        ppo["reward_path"] = config["policy_path"]
    # what stands on the policy's trunk cannot be offloaded
    lora = dict(lora=config["lora"].split(",")[0].rpartition("=")[2] or "16", offload="",
                quantize=config["quantize"])
    without_value = {key: ",".join(x for x in config[key].split(",") if "value" not in x)
                     for key in ("zero_stage", "offload")}
    return {"PPO": of("ppo", **ppo),
            "PPO + LoRA": of("ppo", **ppo | lora),
            "one trunk": of("ppo", **ppo | lora, share_base=True),
            "GRPO": of("grpo", reward_functions="1.0*accuracy", **without_value)}


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


def predict(script, config, ranks, rollout=True):
    """
    (rows, peaks) of rank 0: {model: {column: bytes}}, and {(phase, what is at work): bytes}.
    rollout: whether that phase is wanted, too.
    """
    mesh = mesh_of_ranks(CPU) if ranks > 1 else None  # it needs numbers, which fake tensors lack
    system, paths = system_of(script, config), paths_of(script, config)
    n, *sizes = sizes_of(script, config, ranks)
    found = []
    for dry_run in range(2):
        with fake_tensors() as tracker:
            models = build(script, config, paths, dry_run, mesh)
            optimizers, rows = equip(models, config)
            peaks = step_through(config, models, optimizers, n * rollout, *sizes,
                                 tracker)
            found.append((rows, peaks))
    (rows_0, peaks_0), (rows_1, peaks_1) = found

    def extended(first, second, name):
        """What is `first` and `second` in the two dry runs, with all layers of a model."""
        few, more, whole = layers_of(paths.get(name, next(iter(paths.values()))), bool(mesh))
        return first + (second - first) * (whole - few) / max(more - few, 1)

    rows = {name: {c: round(extended(row[c], rows_1[name][c], name)) for c in COLUMNS}
            for name, row in rows_0.items()}
    peaks = {(phase, name): total(rows) + extended(
        peak - total(rows_0), peaks_1[phase, name] - total(rows_1), name)
        for (phase, name), peak in peaks_0.items()}
    for name, row in rows.items():
        trained = any(p.requires_grad for p in models[name].parameters())
        offload = offload_of(system, SHORT[name], trained) if name in SHORT else "none"
        away = dict(none=(), optimizer=["optimizer"], params=COLUMNS)[offload]
        moved = sum(row[column] for column in away) if config["device_type"] != "cpu" else 0
        row |= dict.fromkeys(away, 0) if moved else {}
        peaks = {key: peak - moved for key, peak in peaks.items()}
    return rows, peaks


def total(rows):
    """Bytes of all models and columns."""
    return sum(sum(row.values()) for row in rows.values())


def largest(script, config, ranks, peaks, limit):
    """
    The largest micro_batch_size whose peak is at most `limit` bytes, by a straight line between the
    peaks of 1 and of the most rows that a step has; 0 if not even 1 fits. A peak is the highest of
    several lines: so it is not above that one, and what is said does fit.
    """
    if any(peak > limit for (phase, _), peak in peaks.items() if phase == "rollout"):
        return 0
    config = config | dict(micro_batch_tokens=0)
    most = sizes_of(script, config | dict(micro_batch_size=10**6), ranks)[2]
    most //= 2 if script == "rm" else 1
    one, all_rows = (max(predict(script, config | dict(micro_batch_size=b), ranks,
                                 rollout=False)[1].values()) for b in (1, most))
    if one > limit or all_rows <= limit:
        return most if all_rows <= limit else 0
    return 1 + int((limit - one) / (all_rows - one) * (most - 1))


# --------------------------------------------------------------------------------------------------
# printing


def table(first, titles, lines):
    """Print lines of numbers, or of words, under their titles."""
    print(f"{first:<14}" + "".join(f"{title:>13}" for title in titles))
    for name, *cells in lines:
        cells = [f"{x:.2f}" if isinstance(x, float) else str(x) for x in cells]
        print(f"{name:<14}" + "".join(f"{x:>13}" for x in cells))


def show(rows, peaks):
    """Print a prediction."""
    size, unit = (2**30, "GiB") if max(peaks.values()) > 8 * 2**30 else (2**20, "MiB")
    lines = [[name, *(row[c] / size for c in COLUMNS)] for name, row in rows.items()]
    lines.append(["all", *(sum(line[i] for line in lines) for i in range(1, len(COLUMNS) + 1))])
    table(unit, COLUMNS, lines)
    print("\nat the peak of")
    for phase in dict.fromkeys(phase for phase, _ in peaks):
        parts = {name: peak / size for (of, name), peak in peaks.items() if of == phase}
        print(f"{phase:<14}{max(parts.values()):>13.2f}   "
              + ", ".join(f"{name} {peak:.2f}" for name, peak in parts.items()))


def compare(found, fits):
    """Print the columns of --compare, {column: (rows, peaks)}. fits: {column: micro-batch}."""
    lines = [[c, *(sum(row[c] for row in rows.values()) / 2**30 for rows, _ in found.values())]
             for c in COLUMNS]
    for phase in ("rollout", "reading", "update"):
        lines.append([phase, *(max(p for (of, _), p in peaks.items() if of == phase) / 2**30
                               for _, peaks in found.values())])
    table("GiB", found, lines + [["micro-batch", *fits.values()]] * bool(fits))


def main(argv):
    """The tool, with these arguments. Raises BadInput."""
    report_errors()
    if not argv or {"--help", "-h"} & set(argv):
        print(__doc__.strip())
        return
    argv = ["--compare=True" if arg == "--compare" else arg for arg in argv]
    argv = [arg.replace("--world-size=", "--world_size=").replace("--gpu-gb=", "--gpu_gb=")
            for arg in argv]
    script, config = read_run(argv)
    ranks, limit = config["world_size"], config["gpu_gb"] * 1e9
    if config["compare"] and script not in ("ppo", "grpo"):
        raise BadConfig(f"--compare is for configs of ppo.py and grpo.py, not of {script}.py")
    runs = variants(config) if config["compare"] else {script: (script, config)}
    if ranks > 1:  # a group of ranks that are not there
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    n, _, b, P, R = sizes_of(script, config, ranks)
    print(f"{script}.py on each of {ranks} rank(s), {config['dtype']}: texts of {P} + {R} tokens, "
          f"{b} in a micro-batch{f', {n} decode at once' if n else ''}\n")
    try:
        found = {column: predict(*run, ranks) for column, run in runs.items()}
        fits = {column: largest(*run, ranks, found[column][1], limit)
                for column, run in runs.items() if limit}
    except RuntimeError as e:  # of torch, even of fake tensors
        raise BadConfig(f"sizes as these cannot be counted: {first_line(e)}") from e
    if config["compare"]:
        compare(found, fits)
        return
    show(*found[script])
    if limit:
        print(f"\nof {config['gpu_gb']:g} GB the largest micro_batch_size that fits is "
              f"{fits[script] or 'none'}")


if __name__ == "__main__":
    main(sys.argv[1:])

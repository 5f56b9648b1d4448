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

Of each model its config.json is enough, in a folder or in the cache of the hub. Texts are taken to
be as long as they may be: max_prompt_tokens (512, if it is 0) and max_new_tokens; of sft.py and
rm.py max_tokens (1024).

How it counts: the models are built as the run builds them, but of fake tensors, which have shapes
and no memory. One step goes through them, by the functions that the scripts call, while torch's
MemTracker adds up what is alive. That is done with a few layers, and with a period of layers more;
what a period adds is multiplied by the number of periods.

What is not in it: a GPU also needs room for its context, for the workspaces of its libraries and
for gaps between tensors, 2 GB or more. Kernels are those of a CPU, and nothing is compiled.
"""
import os
import sys

# Python looks for modules in this file's folder, tools/; ours are in the folder above it.
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is downloaded

import engine  # noqa: E402, F401, before torch: it notes which CPUs this process may use

import math  # noqa: E402

import torch.distributed as dist  # noqa: E402

from configurator import read_arguments, read_keys, run_config_file  # noqa: E402
from engine.placement import mesh_of_ranks  # noqa: E402
from engine.tensor_parallel import check_split, neighbours  # noqa: E402
from errors import BadConfig, report_and_exit  # noqa: E402
from tools.dry_run import (COLUMNS, CPU, build, equip, fake_tensors, layers_of,  # noqa: E402
                           paths_of, places_of, step_through)

SCRIPTS = "ppo", "grpo", "sft", "rm"


# --------------------------------------------------------------------------------------------------
# the command line, and the script's configuration


def split_arguments(argv):
    """(the tool's own options, the script's arguments). Raises BadConfig."""
    options, rest = dict(world_size=1, gpu_gb=0.0, compare=False), []
    for arg in argv:
        name, _, text = arg.removeprefix("--").replace("-", "_").partition("=")
        if not arg.startswith("--") or name not in options:
            rest.append(arg)
            continue
        try:
            options[name] = name == "compare" or type(options[name])(text)
        except ValueError:
            options[name] = 0
        if not 0 < options[name] < 1e6:
            raise BadConfig(f"{arg}: wanted a number, as in --world-size=8 or --gpu-gb=80")
    return options, rest


def keys_of(script):
    """{name: Key} of a script."""
    return read_keys(os.path.join(ROOT, f"{script}.py"))


def read_run(argv):
    """
    (script, its configuration with these arguments): the script has all keys that are given; of
    several such scripts it is the one in the name of the config file. Raises BadConfig.
    """
    files = [arg for arg in argv if not arg.startswith("--")]
    given = {arg[2:].partition("=")[0] for arg in argv if arg.startswith("--")}
    given = given.union(*map(run_config_file, files))
    fits = [script for script in SCRIPTS if given <= keys_of(script).keys()] or ["ppo"]
    words = "_".join(os.path.basename(file).removesuffix(".py") for file in files).split("_")
    script = next((script for script in fits if script in words), fits[0])
    keys = keys_of(script)
    given = {name: value for name, (value, _) in read_arguments(keys, argv).items()}
    config = {name: key.default for name, key in keys.items()} | given
    if config.get("roles"):
        raise BadConfig("roles: this tool counts ranks that do everything; type --roles= and, as "
                        "--world-size, the ranks of a role")
    return script, config


def variants(config):
    """{column: (script, configuration)} for --compare. Keys that a script has not are left out."""
    given = {k: v for k, v in config.items()
             if k not in ("lora", "share_base", "value_init", "reward_functions")}
    given["kl_coef"] = config["kl_coef"] or 0.05

    def of(script, **more):
        own = {k: key.default for k, key in keys_of(script).items()}
        return script, own | {k: v for k, v in (given | more).items() if k in own}

    ppo = dict(value_init="policy", reward_functions="reward_model")
    if "reward_model" not in config["reward_functions"]:  # then it is as large as the policy
        ppo["reward_path"] = config["policy_path"]
    # what stands on the policy's trunk cannot be offloaded
    lora = dict(lora=config["lora"].split(",")[0].rpartition("=")[2] or "16", offload="")
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
        sampled, evaluated = (math.ceil(rows / ranks) * config["generate_tp"] for rows in (
            config["batch_size"], config["eval_size"] if config["eval_path"] else 0))
        n = max(sampled, evaluated)
        n = min(n, config["rollout_batch_size"] or n)
        distinct = max(math.ceil(n / config.get("group_size", 1)), min(n, evaluated))
        at_once = math.ceil(config["batch_size"] / config["num_minibatches"])
    b = config["micro_batch_size"]
    if config["micro_batch_tokens"]:
        b = max(1, config["micro_batch_tokens"] // (P + R))
    b = min(b, math.ceil(at_once / ranks))
    return n, distinct, 2 * b if script == "rm" else b, P, R  # rm.py's are pairs


def predict(script, config, ranks, rollout=None):
    """
    (rows, peaks) of rank 0: {model: {column: bytes}}, and {(phase, what is at work): bytes}.
    rollout: the peaks of a prediction with other micro-batches, whose rollout is the same.
    """
    tp = config.get("generate_tp", 1)
    check_split(tp, "")
    # not among fake tensors: a mesh needs numbers
    mesh = mesh_of_ranks(CPU) if ranks > 1 else None
    tp_mesh = neighbours(CPU, tp) if tp > 1 else None
    places, paths = places_of(script, config), paths_of(script, config)
    n, *sizes = sizes_of(script, config, ranks)
    n = n if rollout is None else 0

    def held(dry_run):
        """(rows, peaks) of the models with these layers; no peaks with all of them."""
        with fake_tensors() as tracker:
            models = build(script, config, dry_run, mesh)
            optimizers, rows = equip(models, config, places, tp_mesh)
            if dry_run == 2:
                return rows, {}
            return rows, step_through(config, models, optimizers, n, *sizes, tracker)

    layers = {name: layers_of(*where) for name, where in paths.items()}

    def extended(first, second, name):
        """What is `first` and `second` in the two dry runs, with all layers of a model."""
        few, more, whole = layers.get(name, next(iter(layers.values())))
        return first + (second - first) * (whole - few) / max(more - few, 1)

    (rows_0, peaks_0), (rows_1, peaks_1) = held(0), held(1)
    # a straight line is exact where whole periods are left; stage 1 deals out whole tensors
    straight = all((whole - few) % max(more - few, 1) == 0 for few, more, whole in layers.values())
    if straight and "1" not in config["zero_stage"]:
        rows = {name: {c: round(extended(row[c], rows_1[name][c], name)) for c in row}
                for name, row in rows_0.items()}
    else:
        rows = held(2)[0]
    peaks = {(phase, name): total(rows) + extended(
        peak - total(rows_0), peaks_1[phase, name] - total(rows_1), name)
        for (phase, name), peak in peaks_0.items()}
    if config["device_type"] != "cpu":
        offload(rows, peaks, places, ranks)
    return rows, (rollout or {}) | peaks


def offload(rows, peaks, places, ranks):
    """Take off what is in the CPU's memory; rows get a column "CPU" for it."""
    for name, row in rows.items():
        place = places.get(name)
        if place is None or place.offload == "none":
            continue
        away = ["optimizer"] if place.offload == "optimizer" else COLUMNS[:4]
        size = sum(row[column] for column in away)
        # the optimizer has a copy of the weights that it steps
        row["CPU"] = size + (row["gradients"] if place.offload == "optimizer" else 0)
        frozen, split = row["gradients"] == 0, place.stage == 3 and ranks > 1
        for phase, at_work in peaks:
            if at_work != name or not frozen or split:  # else it is on the GPU while it reads
                peaks[phase, at_work] -= size
        row.update(dict.fromkeys(away, 0))


def total(rows):
    """Bytes of all models and columns on the GPU."""
    return sum(row[column] for row in rows.values() for column in COLUMNS)


def largest(script, config, ranks, peaks, limit):
    """The largest micro_batch_size whose peak is at most `limit` bytes; 0 if not even 1 fits."""
    rollout = {key: peak for key, peak in peaks.items() if key[0] == "rollout"}

    def of(b):
        return config | dict(micro_batch_tokens=0, micro_batch_size=b)

    def peak(b):
        return max(predict(script, of(b), ranks, rollout)[1].values())

    most = sizes_of(script, of(10**6), ranks)[2] // (2 if script == "rm" else 1)
    low, high = (1, peak(1)), (most, peak(most))
    if low[1] > limit or high[1] <= limit:
        return most if high[1] <= limit else 0
    while high[0] - low[0] > 1:  # it is nearly a straight line
        b = low[0] + int((limit - low[1]) / (high[1] - low[1]) * (high[0] - low[0]))
        b = min(max(b, low[0] + 1), high[0] - 1)
        found = b, peak(b)
        low, high = (found, high) if found[1] <= limit else (low, found)
    return low[0]


# --------------------------------------------------------------------------------------------------
# printing


def advice(config, rows, peaks, limit, ranks):
    """A line on what to type when a run does not fit."""
    (phase, name), _ = max(peaks.items(), key=lambda item: item[1])
    shards = ["--zero_stage=3"] * (ranks > 1 and "3" not in config["zero_stage"])
    if total(rows) > 0.9 * limit:
        said = shards + ["--lora=16"] * (not config["lora"]) + ["more ranks"]
    elif phase == "rollout":
        said = ["a smaller rollout_batch_size"] + ["--generate_tp=N, of N ranks"] * (ranks > 1)
    elif name == "step":
        said = ["--offload=optimizer"]
    else:
        said = ["--gradient_checkpointing=True"] * (not config["gradient_checkpointing"])
        said += ["--head_chunk=1024"] * (config.get("head_chunk") == 0)
        said += ["a smaller micro_batch_size", *shards]
    return f"it does not fit: the peak is in the phase {phase}, {name}; try {', or '.join(said)}"


def table(first, titles, lines):
    """Print lines of numbers, or of words, under their titles."""
    print(f"{first:<14}" + "".join(f"{title:>13}" for title in titles))
    for name, *cells in lines:
        cells = [f"{x:.2f}" if isinstance(x, float) else str(x) for x in cells]
        print(f"{name:<14}" + "".join(f"{x:>13}" for x in cells))


def show(rows, peaks):
    """Print a prediction."""
    size, unit = (2**30, "GiB") if max(peaks.values()) > 8 * 2**30 else (2**20, "MiB")
    used = [c for c in (*COLUMNS, "CPU") if any(row.get(c) for row in rows.values())]
    lines = [[name, *(row.get(c, 0) / size for c in used)] for name, row in rows.items()]
    lines.append(["all", *(sum(line[i] for line in lines) for i in range(1, len(used) + 1))])
    table(unit, used, lines)
    print("\nat the peak of")
    for phase in dict.fromkeys(phase for phase, _ in peaks):
        parts = {name: peak / size for (of, name), peak in peaks.items() if of == phase}
        print(f"{phase:<14}{max(parts.values()):>13.2f}   "
              + ", ".join(f"{name} {peak:.2f}" for name, peak in parts.items()))


def compare(found, fits):
    """Print the columns of --compare, {column: (rows, peaks)}. fits: {column: micro-batch}."""
    lines = [[c, *(sum(row[c] for row in rows.values()) / 2**30 for rows, _ in found.values())]
             for c in COLUMNS]
    lines = [line for line in lines if any(line[1:])]
    lines.append(["all", *(total(rows) / 2**30 for rows, _ in found.values())])
    for phase in ("rollout", "reading", "update"):
        lines.append([phase, *(max(p for (of, _), p in peaks.items() if of == phase) / 2**30
                               for _, peaks in found.values())])
    if fits:
        lines.append(["micro-batch", *fits.values()])
    table("GiB", found, lines)


def main(argv):
    """The tool, with these arguments. Raises BadInput."""
    sys.excepthook = report_and_exit
    if not argv or {"--help", "-h"} & set(argv):
        print(__doc__.strip())
        return
    options, rest = split_arguments(argv)
    (script, config), ranks = read_run(rest), options["world_size"]
    if options["compare"] and script not in ("ppo", "grpo"):
        raise BadConfig(f"--compare is for configs of ppo.py and grpo.py, not of {script}.py")
    runs = variants(config) if options["compare"] else {script: (script, config)}
    if ranks > 1:  # a group of ranks that are not there
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    n, _, b, P, R = sizes_of(script, config, ranks)
    print(f"{script}.py on each of {ranks} rank(s), {config['dtype']}: texts of {P} + {R} tokens, "
          f"{b} in a micro-batch{f', {n} decode at once' if n else ''}\n")
    found = {column: predict(*run, ranks) for column, run in runs.items()}
    limit = options["gpu_gb"] * 1e9
    fits = {column: largest(*run, ranks, found[column][1], limit)
            for column, run in runs.items() if limit}
    if options["compare"]:
        compare(found, fits)
        return
    rows, peaks = found[script]
    show(rows, peaks)
    if limit:
        print(f"\nof {options['gpu_gb']:g} GB the largest micro_batch_size that fits is "
              f"{fits[script] or 'none'}")
    if limit and max(peaks.values()) > limit:
        print(advice(config, rows, peaks, limit, ranks))


if __name__ == "__main__":
    main(sys.argv[1:])

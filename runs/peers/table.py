"""
The table of runs/peers.sh: quartet and each peer in turns, a process for each turn.

The ratio is that of the medians over all timed steps of all turns. cores: how many CPU cores were
at work on average, quartet's and the peer's; "contended" stands where they were far fewer than
threads, which makes a line worthless. FOLDER/results.json keeps all rows, so a table may be made in
several calls.
"""
import json
import os
import platform
import statistics
import subprocess
import sys
import time

# Python looks for modules in this file's folder; ours are two folders above it.
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, ROOT)

import torch  # noqa: E402

from configurator import configure  # noqa: E402
from engine.report import measured_flops  # noqa: E402
from errors import BadConfig  # noqa: E402
from tools.bench import make_models  # noqa: E402

# --------------------------------------------------------------------------------------------------
folder = "out/peers"  # for the models and the results
rows = "all"  # or some of them, as decode_full,grpo_real
rounds = 2  # turns of each: quartet, peer, quartet, peer [>= 1]
steps = 4  # timed steps of a turn, after two to warm up [>= 1]
ppo_python = ""  # interpreter of an environment with TRL 1.12; empty = no such rows
grpo_python = ""  # with TRL 1.16 and transformers
vllm_python = ""  # with vLLM
page = ""  # a Markdown file: its table gets all rows that the folder has, also of earlier calls
config, _ = configure(globals())
# --------------------------------------------------------------------------------------------------

HERE = os.path.join(ROOT, "runs", "peers")
# name: (work, lengths, arguments of quartet.py, key of the peer's interpreter, its script and what
# that is given)
ROWS = {
    "decode_full": ("sampling, full", "full", ["decode"], "grpo_python",
                    ["generate.py", "transformers"]),
    "decode_full_compiled": ("sampling, full", "full", ["decode"], "grpo_python",
                             ["generate.py", "compiled"]),
    "decode_full_vllm": ("sampling, full", "full", ["decode"], "vllm_python",
                         ["generate.py", "vllm"]),
    "ppo_full": ("PPO, full, micro-batches of 32", "full", ["ppo", "--micro_batch_size=32"],
                 "ppo_python", ["trl_steps.py", "ppo", "32", "float32"]),
    "ppo_real": ("PPO, real, micro-batches of 8", "real", ["ppo", "--micro_batch_size=8"],
                 "ppo_python", ["trl_steps.py", "ppo", "8", "float32"]),
    "ppo_full_bf16": ("PPO, full, 32, bfloat16", "full",
                      ["ppo", "--micro_batch_size=32", "--dtype=bfloat16"],
                      "ppo_python", ["trl_steps.py", "ppo", "32", "bfloat16"]),
    "grpo_full": ("GRPO, full, micro-batches of 32", "full", ["grpo", "--micro_batch_size=32"],
                  "grpo_python", ["trl_steps.py", "grpo", "32", "float32"]),
    "grpo_real": ("GRPO, real, micro-batches of 8", "real", ["grpo", "--micro_batch_size=8"],
                  "grpo_python", ["trl_steps.py", "grpo", "8", "float32"]),
}
HEADER = ["| work | quartet | peer | | ratio | MiB | cores |", "|---|---|---|---|---|---|---|"]


def measure(python, script, kind, models, more):
    """The line that a measuring script prints, as a dict. Raises OSError if it prints none."""
    command = [python, os.path.join(HERE, script), kind, models, str(steps), *more]
    # OpenMP may have pinned this thread to one core, and the new process would inherit that
    unpin = None
    if hasattr(os, "sched_setaffinity"):
        unpin = lambda: os.sched_setaffinity(0, range(os.cpu_count()))  # noqa: E731
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=unpin)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"seconds"')]
    if done.returncode or not lines:
        raise OSError((done.stderr.strip() or "it printed nothing").splitlines()[-1])
    return json.loads(lines[-1])


def table_row(work, ours, theirs, threads):
    """A line of the table. ours, theirs: lists of what measure gave, one for each round."""
    turns = ours, theirs
    medians = [statistics.median(s for turn in side for s in turn["seconds"]) for side in turns]
    memory = [max(turn["peak_mib"] for turn in side) for side in turns]
    cores = [min(turn["cpu_per_wall"] for turn in side) for side in turns]
    name = theirs[0]["version"]
    counted = cores[:1] if name.startswith("vLLM") else cores  # vLLM works in another process
    contended = " contended" if min(counted) < 0.8 * threads else ""
    shown = [f"{memory[0]}", f"{cores[0]:.2f}"] if len(counted) == 1 else [
        f"{memory[0]}, {memory[1]}", f"{cores[0]:.2f}, {cores[1]:.2f}"]
    return (f"| {work} | {medians[0]:.3f} s | {name} | {medians[1]:.3f} s | "
            f"{medians[1] / medians[0]:.2f} | {shown[0]} | {shown[1]}{contended} |")


def write_between_marks(file, lines):
    """Replace the lines of a Markdown file between its comments "peers: begin" and "peers: end"."""
    with open(file, encoding="utf-8") as f:
        text = f.read()
    begin, end = "<!-- peers: begin -->\n", "<!-- peers: end -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise BadConfig(f"{file} must have one line {begin.strip()} and one {end}")
    before, rest = text.split(begin)
    with open(file, "w", encoding="utf-8") as f:
        f.write(before + begin + "\n".join(lines) + "\n" + end + rest.split(end)[1])


def main():
    wanted = list(ROWS) if rows == "all" else rows.split(",")
    for name in wanted:
        if name not in ROWS:
            raise BadConfig(f"rows = {name!r}; all, or some of {', '.join(ROWS)}")
    llama = dict(vocab_size=512, hidden_size=256, intermediate_size=688, num_hidden_layers=4,
                 num_attention_heads=4, num_key_value_heads=4)
    root = os.path.join(os.path.abspath(folder), "models")
    models = {kind: os.path.join(root, kind) for kind in ("full", "real")}
    for kind, path in models.items():
        make_models(path, llama, 32, 128, 2 / 128 if kind == "real" else 0.0)
    products, threads = measured_flops(torch.float32, torch.device("cpu")), torch.get_num_threads()
    today = time.strftime("%Y-%m-%d")
    lines = [f"{processor()}, {threads} threads, torch {torch.__version__}, {today}:",
             f"float32 products {products / 1e9:.0f} GFLOP/s.", "", *HEADER]
    print("\n".join(lines), flush=True)
    kept, results = os.path.join(folder, "results.json"), {}  # of earlier rows, too
    if os.path.exists(kept):
        with open(kept, encoding="utf-8") as f:
            results = json.load(f)
    for name in wanted:
        work, kind, (our_kind, *our_keys), key, (script, their_kind, *their_keys) = ROWS[name]
        if not config[key]:
            print(f"| {work} | | {their_kind}: no environment | | | | |", flush=True)
            continue
        ours, theirs = [], []
        try:
            for _ in range(rounds):
                ours.append(measure(sys.executable, "quartet.py", our_kind, models[kind], our_keys))
                theirs.append(measure(config[key], script, their_kind, models[kind], their_keys))
        except OSError as e:
            print(f"| {work} | | {their_kind} failed: {e} | | | | |", flush=True)
            continue
        results[name] = dict(line=table_row(work, ours, theirs, threads), quartet=ours, peer=theirs)
        print(results[name]["line"], flush=True)
        with open(kept, "w", encoding="utf-8") as f:
            json.dump(results, f, indent=1)
    if page:
        lines += [results[name]["line"] for name in ROWS if name in results]
        write_between_marks(page, lines)


def processor():
    """What the CPU calls itself."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as f:
            return next(line.split(":")[1].strip() for line in f if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


if __name__ == "__main__":
    main()

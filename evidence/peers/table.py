"""
The table of evidence/peers.sh: quartet and a peer in turns, a process for each turn. The ratio is
that of the medians over all timed steps of all turns. The limit is that of evidence/bench.py: the
seconds that this machine needs at the least, with no padding.
"""
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

# Python looks for modules in this file's folder; ours are two folders above it.
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, ROOT)

import torch  # noqa: E402

from configurator import configure  # noqa: E402
from errors import BadInput, Stop  # noqa: E402
from evidence.bench import iterations, keys_of, make_models, sampling  # noqa: E402
from ranks import choose_device  # noqa: E402
from tools.work import limits  # noqa: E402

# --------------------------------------------------------------------------------------------------
rows = "all"  # or some of them, as sampling_full,grpo_real
rounds = 2  # turns of each: quartet, peer, quartet, peer [>= 1]
steps = 4  # timed steps of a turn, after one to warm up (TRL: two) [>= 1]
ppo_python = ""  # interpreter of an environment with TRL 1.12
grpo_python = ""  # with TRL 1.16
# --device_type=cuda --dtype=bfloat16: on a GPU, with a Llama of 1B parameters. --compile=True: all
# compile their layers
config, system = configure(globals(), "config/keys.py", device_type="cpu")
# --------------------------------------------------------------------------------------------------
PROMPTS, LENGTH, NEW, MOST = 32, 32, 128, 32
LLAMA = dict(vocab_size=512, hidden_size=256, intermediate_size=688, num_hidden_layers=4,
             num_attention_heads=4, num_key_value_heads=4)
if system.device_type == "cuda":
    PROMPTS, LENGTH, NEW, MOST = 64, 128, 256, 16
    LLAMA = dict(vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16,
                 num_attention_heads=32, num_key_value_heads=8)
# name: (work, lengths, rows of a micro-batch)
ROWS = {
    "sampling_full": ("sampling", "full", 0), "ppo_full": ("ppo", "full", MOST),
    "ppo_real": ("ppo", "real", 8), "grpo_full": ("grpo", "full", MOST),
    "grpo_real": ("grpo", "real", 8)}


def keys_of_row(script, micro_batch_size):
    """The keys of a run of ppo.py or grpo.py in this table."""
    own = dict(ppo=dict(ppo_epochs=4, kl_coef=0.05), grpo=dict(group_size=4, kl_coef=0.04))
    return dict(
        batch_size=PROMPTS, max_new_tokens=NEW, micro_batch_size=micro_batch_size,
        max_iters=steps + 1, device_type=system.device_type, dtype=system.dtype,
        compile=system.compile) | own[script]


def of_quartet(script, folder, micro_batch_size):
    """(seconds of each step, peak MiB, mean length) of a turn of ppo.py or grpo.py."""
    records = iterations(script, folder, keys_of_row(script, micro_batch_size))
    return ([r["time/iteration"] for r in records], max(r["mem/peak_mib"] for r in records),
            statistics.mean(r["objective/length"] for r in records))


def of_trl(script, folder, micro_batch_size):
    """The same of TRL's trainer, and its version; trl_steps.py prints them as JSON."""
    python = config[f"{script}_python"]
    done = subprocess.run([python, f"{ROOT}/evidence/peers/trl_steps.py", script,
                           folder, str(steps), str(micro_batch_size), str(PROMPTS), str(NEW),
                           system.device_type, system.dtype,
                           "compile" if system.compile else "eager"],
                          capture_output=True, text=True,
                          preexec_fn=lambda: os.sched_setaffinity(0, range(os.cpu_count())))
    if done.returncode:
        raise Stop(f"TRL's {script}: {(done.stderr.strip() or '?').splitlines()[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def row_of(name, folder):
    """A line of the table."""
    what, lengths, micro_batch_size = ROWS[name]
    if what == "sampling":  # both in one process, and so without the memory of each
        import transformers

        took, _ = sampling(folder, system, PROMPTS, LENGTH, NEW, rounds * steps)
        (ours, tokens), (theirs, _) = (zip(*took[key], strict=True)
                                       for key in ("quartet", "transformers"))
        length, memory = statistics.mean(tokens) / PROMPTS, ""
        label, version = f"sampling, {lengths}", f"transformers {transformers.__version__}"
    else:
        ours, theirs, peaks, length = [], [], [0, 0], 0
        for _ in range(rounds):
            seconds, peak, mean = of_quartet(what, folder, micro_batch_size)
            ours, peaks[0], length = ours + seconds, max(peaks[0], peak), length + mean / rounds
            seconds, peak, version = of_trl(what, folder, micro_batch_size)
            theirs, peaks[1] = theirs + seconds, max(peaks[1], peak)
        label = f"{what.upper()}, {lengths}, micro-batches of {micro_batch_size}"
        memory = f"{peaks[0]:.0f}, {peaks[1]:.0f}"
    script, phase = ("ppo", "rollout") if what == "sampling" else (what, "iteration")
    keys = keys_of_row(script, micro_batch_size or MOST) | (
        dict(value_init="policy", reward_path="", reward_functions=f"{folder}/rule.py:score")
        if what == "sampling" else {})
    least, _ = limits(script, keys_of(script, folder, keys), LENGTH, round(length),
                      choose_device(system.device_type))
    mine, its = statistics.median(ours), statistics.median(theirs)
    return (f"| {label} | {mine:.3f} s | {version} | {its:.3f} s | {its / mine:.2f} | "
            f"{least[phase]:.3f} s | {memory} |")


if __name__ == "__main__":
    wanted = list(ROWS) if rows == "all" else rows.split(",")
    for name in wanted:
        if name not in ROWS:
            raise BadInput(f"rows = {rows!r}: wanted all, or some of {','.join(ROWS)}")
        if ROWS[name][0] != "sampling" and not config[f"{ROWS[name][0]}_python"]:
            raise BadInput(f"{name} needs an environment with TRL; type bash evidence/peers.sh")
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}, "
          f"{time.strftime('%Y-%m-%d')}\n\n| work | quartet | peer | | ratio | limit | MiB |\n"
          "|---|---|---|---|---|---|---|")
    for name in wanted:
        with tempfile.TemporaryDirectory() as folder:
            share = 2 / NEW if ROWS[name][1] == "real" else 0.0
            make_models(folder, LLAMA, LENGTH, NEW, share, system, ROWS[name][0] == "ppo")
            print(row_of(name, folder), flush=True)

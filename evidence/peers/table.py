"""
The table of evidence/peers.sh: quartet and a peer in turns, a process for each turn. The ratio is
that of the medians over all timed steps of all turns. The limit is that of evidence/bench.py: the
seconds that this machine needs at the least, with no padding.
"""
import json
import statistics
import tempfile
import time

from configurator import configure  # first: it must be imported before torch
from errors import BadInput

import torch

from evidence.bench import ROOT, iterations, keys_of, limits, make_models, printed
from ranks import choose_device

# --------------------------------------------------------------------------------------------------
rows = "all"  # or some of them, as ppo_full,grpo_real
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
# name: (script, lengths, rows of a micro-batch)
ROWS = {
    "ppo_full": ("ppo", "full", MOST), "ppo_real": ("ppo", "real", 8),
    "grpo_full": ("grpo", "full", MOST), "grpo_real": ("grpo", "real", 8)}


def of_trl(script, folder, micro_batch_size):
    """(seconds of each step, peak MiB, its version) of a turn of TRL's trainer."""
    settings = dict(
        new=NEW, batch_size=PROMPTS, steps=steps, per_device_train_batch_size=micro_batch_size,
        gradient_accumulation_steps=PROMPTS // micro_batch_size, temperature=1.0, seed=0,
        learning_rate=1e-12, bf16=system.dtype == "bfloat16", logging_steps=1,
        use_cpu=system.device_type == "cpu", torch_compile=system.compile)
    settings |= dict(num_ppo_epochs=4, kl_coef=0.05) if script == "ppo" else dict(
        num_generations=4, beta=0.04, num_iterations=1, optim="adamw_torch")
    said = printed([config[f"{script}_python"], f"{ROOT}/evidence/peers/of_trl.py", "time", script,
                    json.dumps(settings)], folder)
    figures, version = said.splitlines()[-2:]
    return *json.loads(figures), version


def row_of(name, folder):
    """A line of the table."""
    script, lengths, micro_batch_size = ROWS[name]
    own = dict(ppo=dict(ppo_epochs=4, kl_coef=0.05), grpo=dict(group_size=4, kl_coef=0.04))
    keys = own[script] | dict(
        batch_size=PROMPTS, max_new_tokens=NEW, micro_batch_size=micro_batch_size,
        max_iters=steps + 1, device_type=system.device_type, dtype=system.dtype,
        compile=system.compile)
    ours, theirs, their_peak = [], [], 0
    for _ in range(rounds):
        ours += iterations(script, folder, keys)
        seconds, peak, version = of_trl(script, folder, micro_batch_size)
        theirs, their_peak = theirs + seconds, max(their_peak, peak)
    length = statistics.mean(record["objective/length"] for record in ours)
    least, _ = limits(script, keys_of(script, folder, keys), LENGTH, round(length),
                      choose_device(system.device_type))
    mine = statistics.median(record["time/iteration"] for record in ours)
    its, peak = statistics.median(theirs), max(record["mem/peak_mib"] for record in ours)
    return (f"| {script.upper()}, {lengths}, micro-batches of {micro_batch_size} | {mine:.3f} s | "
            f"{version} | {its:.3f} s | {its / mine:.2f} | {least['iteration']:.3f} s | "
            f"{peak:.0f}, {their_peak:.0f} |")


if __name__ == "__main__":
    wanted = list(ROWS) if rows == "all" else rows.split(",")
    for name in wanted:
        if name not in ROWS:
            raise BadInput(f"rows = {rows!r}: wanted all, or some of {','.join(ROWS)}")
        if not config[f"{ROWS[name][0]}_python"]:
            raise BadInput(f"{name} needs an environment with TRL; type bash evidence/peers.sh")
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}, "
          f"{time.strftime('%Y-%m-%d')}\n\n| work | quartet | peer | | ratio | limit | MiB |\n"
          "|---|---|---|---|---|---|---|")
    for name in wanted:
        with tempfile.TemporaryDirectory() as folder:
            share = 2 / NEW if ROWS[name][1] == "real" else 0.0
            make_models(folder, LLAMA, LENGTH, NEW, share, system, ROWS[name][0] == "ppo")
            print(row_of(name, folder), flush=True)

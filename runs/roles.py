r"""
What a rank of its own for sampling brings on two cores: GRPO on random models, in turns

    synchronous       two ranks do everything, each for half of the responses
    ahead             --roles=train=1,generate=1 --staleness=1: one samples while the other trains

with one thread a rank. The settings are such that sampling takes as long for one rank as reading
and training. It takes about four minutes; let nothing else run meanwhile:

    python runs/roles.py

It prints what a rank does in an iteration, its seconds, and the iterations an hour. In sampling a
step costs nearly the same for 4 rows as for 8, for small products leave most of a core idle (on a
GPU they do even more so): that is what two synchronous ranks lose. Figures are medians.
"""
import json
import os
import statistics
import subprocess
import sys
import tempfile

# Python looks for modules in this file's folder, runs/; ours are in the folder above it.
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

from configurator import configure  # noqa: E402
from errors import Stop  # noqa: E402
from tools.bench import make_models  # noqa: E402

# --------------------------------------------------------------------------------------------------
d_model = 384  # width of the Llama [>= 2]
n_layer = 4  # its layers [>= 1]
n_head = 6  # its attention heads [>= 1]
d_ff = 1024  # width of its gated MLP [>= 1]
vocab_size = 512  # its vocabulary [8..800000]
batch_size = 8  # responses, over all ranks [>= 1]
group_size = 4  # responses to a prompt [>= 2]
prompt_length = 32  # tokens of each prompt [>= 1]
max_new_tokens = 128  # tokens of each response [>= 4]
rounds = 5  # turns of each layout [>= 1]
iterations = 8  # timed ones of a turn, after two to warm up [>= 1]
run_keys = ""  # more keys of grpo.py, as num_iterations=2,kl_coef=0
config = configure(globals())
# --------------------------------------------------------------------------------------------------
LAYOUTS = {"synchronous": dict(), "ahead": dict(roles="train=1,generate=1", staleness=1)}
PHASES = "rollout", "score", "update", "iteration"


def turn(folder, name, number):
    """The records of a run's log in one of the layouts, without those of the warm-up."""
    run = os.path.join(folder, f"{name}-{number}")
    keys = dict(
        out_dir=run, policy_path=os.path.join(folder, "policy"),
        prompts_path=os.path.join(folder, "prompts.jsonl"),
        reward_functions=os.path.join(folder, "rule.py") + ":score", batch_size=batch_size,
        group_size=group_size, micro_batch_size=batch_size, max_new_tokens=max_new_tokens,
        max_iters=iterations + 2, checkpoint_interval=0, device_type="cpu") | LAYOUTS[name]
    keys |= dict(pair.split("=", 1) for pair in run_keys.split(",") if pair)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
               os.path.join(ROOT, "grpo.py"), *(f"--{key}={x}" for key, x in keys.items())]
    # each rank has a thread, which the system may put on either core
    env = {k: v for k, v in os.environ.items() if k not in ("OMP_PROC_BIND", "OMP_PLACES")}
    env["OMP_NUM_THREADS"] = "1"
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode:
        raise Stop(f"grpo.py failed: {(done.stderr.strip() or '?').splitlines()[-1]}")
    with open(os.path.join(run, "log.jsonl"), encoding="utf-8") as f:
        # without those of the warm-up, and the last, which only evaluates
        return [json.loads(line) for line in f][2:-1]


def median(records, key):
    return statistics.median(record[key] for record in records)


with tempfile.TemporaryDirectory() as folder:
    sizes = dict(vocab_size=vocab_size, hidden_size=d_model, intermediate_size=d_ff,
                 num_hidden_layers=n_layer, num_attention_heads=n_head, num_key_value_heads=n_head)
    make_models(folder, sizes, prompt_length, max_new_tokens, end_share=0.0)
    with open(os.path.join(folder, "rule.py"), "w", encoding="utf-8") as f:
        f.write("def score(batch):\n"
                "    return [sum(map(ord, text)) % 7 / 7 for text in batch['completions']]\n")
    print(f"{n_layer} layers, {d_model} wide; {batch_size} responses of {max_new_tokens} tokens to "
          f"prompts of {prompt_length}; two ranks of one thread", flush=True)
    logs, ratios = {name: [] for name in LAYOUTS}, []
    for number in range(rounds):
        seconds = {}
        for name in LAYOUTS:
            records = turn(folder, name, number)
            seconds[name] = median(records, "time/iteration")
            logs[name] += records
        ratios.append(seconds["synchronous"] / seconds["ahead"])
        print(f"turn {number + 1}: " + ", ".join(f"{name} {x:.3f} s" for name, x in seconds.items())
              + f", ratio {ratios[-1]:.2f}", flush=True)

print("\n| layout | waits for samples, or samples | reads | trains | iteration | busy: trainer | "
      "generator | iterations an hour |\n|---|---|---|---|---|---|---|---|")
for name, records in logs.items():
    cells = [f"{median(records, f'time/{phase}'):.3f} s" for phase in PHASES]
    cells += [f"{median(records, key):.0%}" if key in records[0] else "-"
              for key in ("time/train_busy", "time/generate_busy")]
    print(f"| {name} | {' | '.join(cells)} | {3600 / median(records, 'time/iteration'):.0f} |")
print(f"ahead makes {statistics.median(ratios):.2f} times the iterations an hour "
      f"(median of {rounds} pairs)")

"""
The table of runs/smollm2.sh, in Markdown: what the runs learned, and how fast.

    python data/gsm_symbolic/table.py [out/smollm2]

Reads, where they are there, PREFIX_{sft,grpo,ppo,ppo_rm}/, tools/eval.py's PREFIX_seen.json and
PREFIX_new.json, and tools/memory.py's PREFIX_grpo.memory. Writes PREFIX.md, and prints it.

The update's share of the card's peak counts 6 FLOP for each weight and token, of each trained
model, and attention's products. Decoding's share of the bandwidth counts the weights once a step,
and each response's keys and values so far; both are of 2 bytes. The peaks are measured: a product
of 8,192 x 8,192 matrices in bfloat16, and a copy.
"""
import glob
import json
import os
import re
import sys
import time
from statistics import fmean, median

import torch

RUNS = dict(sft="SFT", grpo="GRPO", ppo="PPO", ppo_rm="PPO, reward model")


def read(path):
    """The records of a file of JSON lines; [] where there is none."""
    if not os.path.exists(path):
        return []
    with open(path, encoding="utf-8") as f:
        return [json.loads(line) for line in f]


def peaks():
    """(FLOP/s, bytes/s) of a GPU, or None."""
    if not torch.cuda.is_available():
        return None

    def seconds(work):
        for repeats in (3, 20):  # the first time to warm up
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(repeats):
                work()
            torch.cuda.synchronize()
        return (time.perf_counter() - began) / 20

    a, b = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16)
    x, y = torch.empty(2, 2**31, device="cuda", dtype=torch.uint8)
    return 2 * 8192**3 / seconds(lambda: a @ b), 2 * 2**31 / seconds(lambda: x.copy_(y))


def speed(folder, peak):
    """{row: text} of the seconds, speeds and memory of a run of grpo.py or ppo.py."""
    log = [r for r in read(f"{folder}/log.jsonl") if "time/rollout" in r][1:]  # the first warms up
    if not log:
        return {}
    middle = {key: median(r[key] for r in log if r.get(key) is not None) for key in log[-1]
              if isinstance(log[-1][key], float)}
    with open(f"{folder}/config.json", encoding="utf-8") as f:
        config = json.load(f)
    with open(f"{config['policy_path']}/config.json", encoding="utf-8") as f:
        model = json.load(f)
    d, L, V = (model[k] for k in ("hidden_size", "num_hidden_layers", "vocab_size"))
    heads, kv = model["num_attention_heads"], model["num_key_value_heads"]
    body = L * (2 * d * d + 2 * d * d * kv // heads + 3 * d * model["intermediate_size"])
    R, B, steps = middle["objective/length"], config["batch_size"], config["max_new_tokens"]
    rollout, update = middle["time/rollout"], middle["time/update"]
    P = fmean(len(str(r["prompt"])) for r in read(config["prompts_path"])) / 3.2  # letters a token
    T, passes, models = P + R, config.get("ppo_epochs", 1), 1 + ("value_init" in config)
    flop = passes * B * (6 * models * (body * T + L * d * T * T) + 6 * V * d * R)
    moved = 2 * (steps * (body + V * d) + B * R * (P + R / 2) * 2 * L * d * kv // heads)
    rows = {"iterations": f"{log[-1]['iteration'] + 1}",
            "KL to the SFT model, nats a response": f"{log[-1].get('objective/kl', 0):.2f}",
            "tokens a response": f"{R:.0f}",
            "seconds an iteration": f"{middle['time/iteration']:.2f}"}
    for phase in ("rollout", "score", "update"):
        rows[f"of these: {phase}"] = f"{middle[f'time/{phase}']:.2f}"
    rows |= {"tokens sampled a second": f"{B * R / rollout:,.0f}",
             "tokens trained a second": f"{passes * B * T / update:,.0f}",
             "TFLOP/s of the update": f"{flop / update / 1e12:.1f}",
             "GB/s of decoding, at least": f"{moved / rollout / 1e9:,.0f}",
             "memory, GiB": f"{max(r['mem/peak_mib'] for r in log) / 1024:.1f}",
             "sampler gap, nats": f"{middle['policy/sampler_gap']:.2g}"}
    if peak:
        rows["TFLOP/s of the update"] += f" ({flop / update / peak[0]:.0%} of the peak)"
        rows["GB/s of decoding, at least"] += f" ({moved / rollout / peak[1]:.0%} of the peak)"
    for path in glob.glob(f"{folder}.memory"):
        with open(path, encoding="utf-8") as f:
            text = f.read()
        unit = 1024 if "MiB  " in text else 1
        most = max(map(float, re.findall(r"^\w+ +([\d.]+)   ", text, re.M)), default=0)
        rows["memory that tools/memory.py predicts, GiB"] = f"{most / unit:.1f}"
    return rows


def lines(title, columns):
    """A table: columns {name: {row: text}}."""
    rows = list(dict.fromkeys(row for column in columns.values() for row in column))
    yield f"\n| {title} | " + " | ".join(columns) + " |\n|---" * 1 + "|---" * len(columns) + "|"
    for row in rows:
        yield f"| {row} | " + " | ".join(c.get(row, "") for c in columns.values()) + " |"


if __name__ == "__main__":
    prefix = (sys.argv[1:] or ["out/smollm2"])[0]
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU"
    peak = peaks()
    text = [f"On {card}, torch {torch.__version__}."]
    if peak:
        text[0] += f" Measured peaks: {peak[0] / 1e12:.0f} TFLOP/s, {peak[1] / 1e12:.2f} TB/s."
    right = {}
    for part, name in (("seen", "templates of the training"), ("new", "templates never seen")):
        if os.path.exists(f"{prefix}_{part}.json"):
            with open(f"{prefix}_{part}.json", encoding="utf-8") as f:
                found = json.load(f)
            for policy, figures in found["policies"].items():
                column = right.setdefault(policy, {})
                for key in ("greedy accuracy", "sampled accuracy"):
                    if key in figures:
                        mean, error = figures[key]["mean"], figures[key]["error"] or 0
                        column[f"{name}: {key} (n = {found['prompts']})"] = (
                            f"{mean:.1%} ± {error:.1%}")
                column[f"{name}: tokens"] = f"{figures['greedy length']['mean']:.0f}"
    text += lines("held-out problems", right)
    text += lines("training", {name: rows for run, name in RUNS.items()
                               if (rows := speed(f"{prefix}_{run}", peak))})
    samples = read(f"{prefix}_grpo/samples.jsonl")
    last = max((s["iteration"] for s in samples), default=0)
    for number in list(dict.fromkeys(s["row"] for s in samples))[:2]:
        for s in samples:
            if s["row"] == number and s["iteration"] in (0, last):
                title = "before GRPO" if s["iteration"] == 0 else "after GRPO"
                text.append(f"\n{title}, {s['scores']}\n```\n{s['prompt'][-1]['content']}\n"
                            f"-> {s['text']}\n```")
    with open(f"{prefix}.md", "w", encoding="utf-8") as f:
        f.write("\n".join(text) + "\n")
    print("\n".join(text))

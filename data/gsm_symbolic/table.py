"""
The table of runs/smollm2.sh, in Markdown: how much the runs have learned, and how fast.

    python data/gsm_symbolic/table.py [out/smollm2]

Reads, as far as they are there: the runs PREFIX_grpo, _ppo and _ppo_rm; PREFIX_seen.json and
PREFIX_new.json of tools/eval.py; PREFIX_grpo.memory, _ppo.memory of tools/memory.py. Writes
PREFIX.md.

The update has 6 FLOP for each weight and token, of each trained model, and attention's products; 4
where adapters are trained, because frozen weights have no gradients.
Decoding reads the weights at each step, and a response's keys and values so far at each token, all
in 2 bytes. The peaks of a GPU are measured: a product of 8,192 x 8,192 matrices, and a copy.
"""
import json
import os
import re
import sys
from statistics import fmean, median

# Python looks for modules in this file's folder; ours are two folders above it.
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from tools.runs import estimate  # noqa: E402  before torch
from tools.work import bandwidth, products  # noqa: E402

import torch  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402


def read(path):
    """The JSON values of a file, one a line in .jsonl; [] where there is no file."""
    if not os.path.exists(path):
        return []
    with open(path, encoding="utf-8") as f:
        return [json.loads(text) for text in (f if path.endswith("l") else [f.read()])]


def speed(folder, peaks):
    """{row: text} of the seconds, speeds and memory of a run: medians over its iterations."""
    log = [r for r in read(f"{folder}/log.jsonl") if "time/rollout" in r][1:]  # the first warms up
    if not log:
        return {}
    at = {key: median(r[key] for r in log if r.get(key) is not None) for key in log[-1]
          if isinstance(log[-1][key], float)}
    [config], memory = read(f"{folder}/config.json"), ""
    path, rows = config["policy_path"], read(config["prompts_path"])[:200]
    chat, [model] = AutoTokenizer.from_pretrained(path), read(f"{path}/config.json")
    P = fmean(len(chat.apply_chat_template(row["prompt"], add_generation_prompt=True,
                                           return_dict=False)) for row in rows)
    R, B, passes = at["objective/length"], config["batch_size"], config.get("ppo_epochs", 1)
    d, L, V = (model[k] for k in ("hidden_size", "num_hidden_layers", "vocab_size"))
    kv = d * model["num_key_value_heads"] // model["num_attention_heads"]
    body = L * d * (2 * d + 2 * kv + 3 * model["intermediate_size"])  # weights
    trunks = 2 if "value_init" in config else 1
    of_each = trunks * (body + L * d * (P + R)) * (P + R) + V * d * R  # of a response
    flop = (4 if config["lora"] else 6) * passes * B * of_each
    moved = 2 * config["max_new_tokens"] * (body + V * d) + 4 * B * R * (P + R / 2) * L * kv
    speeds = flop / at["time/update"], moved / at["time/rollout"]
    share = [f" ({x / y:.0%} of the peak)" for x, y in zip(speeds, peaks, strict=False)]
    if os.path.exists(f"{folder}.memory"):
        with open(f"{folder}.memory", encoding="utf-8") as f:
            predicted = f.read()
        of_phases = re.findall(r"^\w+ +([\d.]+)   \w+ [\d.]", predicted, re.M)
        gib = max(map(float, of_phases), default=0) / (1 if "\nGiB " in predicted else 1024)
        memory = f" (predicted: {gib:.1f})"
    return {
        "iterations": f"{log[-1]['iteration'] + 1}",
        "KL to the SFT model, the last, nats a response": f"{log[-1].get('objective/kl', 0):.2f}",
        "tokens of a prompt, of a response": f"{P:.0f}, {R:.0f}",
        "seconds an iteration": f"{at['time/iteration']:.2f}",
        "of these: rollout, score, update":
            ", ".join(f"{at[f'time/{phase}']:.2f}" for phase in ("rollout", "score", "update")),
        "tokens sampled a second": f"{B * R / at['time/rollout']:,.0f}",
        "tokens trained a second": f"{passes * B * (P + R) / at['time/update']:,.0f}",
        "update, TFLOP/s": f"{speeds[0] / 1e12:.1f}" + "".join(share[:1]),
        "decoding, GB/s": f"{speeds[1] / 1e9:,.0f}" + "".join(share[1:]),
        "memory, GiB": f"{max(r['mem/peak_mib'] for r in log) / 1024:.1f}{memory}",
        "sampler gap, mean nats a token": f"{at['policy/sampler_gap']:.2g}"}


def cell(figure, form):
    """An estimate in a table; "" where there is none."""
    return f"{figure['mean']:{form}} ± {(figure['error'] or 0):{form.strip('+')}}" if figure else ""


def table(title, columns):
    """The lines of a table: columns {name: {row: text}}."""
    lines = [f"\n| {title} | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    for row in dict.fromkeys(row for column in columns.values() for row in column):
        lines.append(f"| {row} | {' | '.join(c.get(row, '') for c in columns.values())} |")
    return lines


prefix, peaks, right = (sys.argv[1:] or ["out/smollm2"])[0], [], {}
text = [f"torch {torch.__version__} on a CPU"]
if torch.cuda.is_available():
    gpu = torch.device("cuda")
    peaks = [products(gpu, torch.bfloat16), bandwidth(gpu, 2**32)]
    text = [f"torch {torch.__version__} on one {torch.cuda.get_device_name()}; its peaks here: "
            f"{peaks[0] / 1e12:.0f} TFLOP/s in bfloat16, {peaks[1] / 1e12:.2f} TB/s"]
for part in ("seen", "new"):
    for found in read(f"{prefix}_{part}.json"):
        for policy, figures in found["policies"].items():
            for name in ("greedy accuracy", "sampled accuracy", "greedy length"):
                right.setdefault(policy, {})[f"{part} ({found['prompts']}): {name}"] = cell(
                    figures.get(name), ".0f" if "length" in name else ".1%")
    solved = {}  # {policy: {row: 1 or 0}}: the model, the SFT model, the trained ones
    for sample in read(f"{prefix}_{part}.jsonl"):
        if sample["mode"] == "greedy":
            solved.setdefault(sample["policy"], {})[sample["row"]] = sample["scores"]["accuracy"]
    names = list(solved)
    for policy in names[2:]:  # problem by problem: their errors are smaller than the means'
        gains = [x - solved[names[1]][row] for row, x in solved[policy].items()]
        right[policy][f"{part}: greedy, points above SFT"] = cell(estimate(gains), "+.1%")
text += table("held-out problems of templates", right)
runs = {name: speed(f"{prefix}_{name}", peaks) for name in ("grpo", "ppo", "ppo_rm")}
text += table("training", {name: rows for name, rows in runs.items() if rows})
ends = {}  # {row: its first and its last sample}
for sample in read(f"{prefix}_grpo/samples.jsonl"):
    ends[sample["row"]] = ends.get(sample["row"], [sample])[0], sample
# two of them, which are not the same text if there are such
for first, last in sorted(ends.values(), key=lambda two: two[0]["text"] == two[1]["text"])[:2]:
    text += ["", "```", first["prompt"][-1]["content"], "", f"before GRPO: {first['text']}", "",
             f"after GRPO: {last['text']}", "```"]
with open(f"{prefix}.md", "w", encoding="utf-8") as f:
    f.write("\n".join(text) + "\n")
print("\n".join(text))

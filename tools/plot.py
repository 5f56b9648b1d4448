"""
Draw the curves of one run or of several, from log.jsonl, as a PNG; and print a table of each run's
first and last evaluation.

python tools/plot.py --runs=out/arithmetic_ppo --out=out/arithmetic_ppo.png
python tools/plot.py --runs=out/arithmetic_ppo,out/arithmetic_overoptimize --out=out/both.png
"""
import json
import os
import sys

# Python looks for modules in this file's folder, tools/; ours are in the folder above it.
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from configurator import configure  # noqa: E402
from errors import BadConfig, BadInput  # noqa: E402


# --------------------------------------------------------------------------------------------------
runs = "out/arithmetic_ppo"  # folders with a log.jsonl, separated by commas
out = "out/plot.png"  # the picture; empty = only the table
config = configure(globals())
# --------------------------------------------------------------------------------------------------
# title: metrics. eval/ is of the held-out prompts and is drawn thick, the others are of training
PANELS = {
    "learned score": ("eval/scores", "objective/scores"),
    "true accuracy": ("eval/accuracy", "objective/accuracy"),
    "KL to the reference (nats a response)": ("eval/kl", "objective/kl"),
    "response length (tokens)": ("eval/length", "objective/length"),
    "policy loss": ("loss/policy",),
    "value loss, or supervised loss": ("loss/value", "loss/sft", "loss/preference"),
}
# the table's columns: how each eval/ metric is written
COLUMNS = {"accuracy": "{:.1%}", "thinks": "{:.1%}", "length": "{:.1f}", "scores": "{:.2f}",
           "kl": "{:.2f}", "loss": "{:.4f}"}


def read_log(folder):
    """The records of a run's log.jsonl. Raises BadInput."""
    file = os.path.join(folder, "log.jsonl")
    try:
        with open(file, encoding="utf-8") as f:
            records = [json.loads(line) for line in f if line.strip()]
    except (OSError, ValueError) as e:
        raise BadInput(f"{file}: {getattr(e, 'strerror', None) or e}; "
                       "give folders of finished or running runs") from e
    if not records:
        raise BadInput(f"{file}: nothing is logged yet")
    return records


folders = [folder for folder in runs.split(",") if folder]
if not folders:
    raise BadConfig("runs is empty; type --runs=out/arithmetic_ppo")
logs = {os.path.basename(os.path.normpath(folder)): read_log(folder) for folder in folders}

# the table: the first evaluation, and the last one if there is more than one
print(f"{'run':<28} {'iteration':>9}  " + "  ".join(f"{name:>8}" for name in COLUMNS))
for name, records in logs.items():
    evaluated = [r for r in records if any(k.startswith("eval/") for k in r)]
    for record in evaluated[:1] + evaluated[1:][-1:]:
        # None: the run does not log it, or it was not finite
        figures = [(record.get(f"eval/{k}"), form) for k, form in COLUMNS.items()]
        cells = ["-" if x is None else form.format(x) for x, form in figures]
        print(f"{name:<28} {record['iteration']:>9}  " + "  ".join(f"{cell:>8}" for cell in cells))

# the picture: a panel for each group of metrics, a colour for each run
if out:
    import matplotlib

    matplotlib.use("Agg")  # a file, not a window
    import matplotlib.pyplot as plt

    logged = {key for records in logs.values() for record in records for key in record}
    shown = {title: keys for title, keys in PANELS.items() if logged & set(keys)}
    columns = min(3, len(shown))
    lines = -(-len(shown) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(4.2 * columns, 2.9 * lines), squeeze=False)
    for axis, (title, keys) in zip(axes.flat, shown.items(), strict=False):
        for number, (name, records) in enumerate(logs.items()):
            for key in keys:
                points = [(r["iteration"], r[key]) for r in records if r.get(key) is not None]
                if points:
                    held_out = key.startswith("eval/")
                    axis.plot(*zip(*points, strict=True), color=f"C{number}",
                              linewidth=2 if held_out else 1, alpha=1.0 if held_out else 0.45,
                              marker="o" if held_out else None, markersize=3,
                              label=name if key == keys[0] or len(keys) == 1 else None)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("iteration", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes.flat[len(shown):]:
        axis.set_visible(False)
    axes.flat[0].legend(fontsize=8, frameon=False)
    figure.tight_layout()
    os.makedirs(os.path.dirname(out) or ".", exist_ok=True)
    figure.savefig(out, dpi=110)
    print(f"saved {out} (thick: held-out prompts, thin: training batches)")

"""
Draw the curves of one run or of several, from log.jsonl, as a PNG; and print a table of each run's
first and last evaluation, or of all evaluations where they are drawn over another metric.

python tools/plot.py --runs=out/arithmetic_ppo --out=out/arithmetic_ppo.png
python tools/plot.py --runs=out/arithmetic_ppo,out/arithmetic_overoptimize --out=out/both.png
python tools/plot.py --runs=out/arithmetic_grpo --metrics="eval/reward/*,policy/*,time/iteration"
python tools/plot.py --runs=out/arithmetic_ppo --metrics=eval/accuracy --against=eval/kl

tools/page.py makes a page of HTML instead, with all metrics, and with samples to read.
"""
import os
import sys

# Python looks for modules in this file's folder, tools/; ours are in the folder above it.
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from configurator import configure  # noqa: E402
from tools.curves import (  # noqa: E402
    check_picture, choose_metrics, empty_picture, metrics_in, points, read_runs, save_picture)


# --------------------------------------------------------------------------------------------------
runs = "out/arithmetic_ppo"  # folders with a log.jsonl, separated by commas
out = "out/plot.png"  # the picture; empty = only the table
metrics = ""  # a panel for each of these, as "eval/kl,policy/*"; empty = what says most of the runs
against = ""  # the metric to draw them over, such as eval/kl; empty = the iteration
smooth = 0.0  # how much of their past thin curves keep, as a moving average [0..0.999]
config, _ = configure(globals())
# --------------------------------------------------------------------------------------------------
# title: metrics. eval/ is of the held-out prompts and is drawn thick, the others are of training.
# Where metrics is empty: the first six of them of which something is logged
PANELS = {
    "score": ("eval/scores", "objective/scores"),
    "accuracy": ("eval/accuracy", "objective/accuracy", "train/accuracy"),
    "KL to the reference (nats a response)": ("eval/kl", "objective/kl"),
    "response length (tokens)": ("eval/length", "objective/length"),
    "policy loss": ("loss/policy",),
    "value loss, or supervised loss": ("loss/value", "eval/loss", "loss/sft", "loss/preference"),
    "groups with nothing to learn": ("objective/flat_groups",),
    "gradient norm": ("policy/grad_norm", "reward_model/grad_norm"),
    "learning rate": ("policy/lr", "reward_model/lr"),
    "tokens a second": ("time/tokens_per_second",),
}
# the table's columns: how each eval/ metric is written
COLUMNS = {"accuracy": "{:.1%}", "thinks": "{:.1%}", "length": "{:.1f}", "scores": "{:.2f}",
           "kl": "{:.2f}", "loss": "{:.4f}"}

if out:
    check_picture(out)
read = read_runs(runs)
logged = metrics_in(read)
x = choose_metrics(against, logged)[0] if against else "iteration"

# the table: the first evaluation, and the last one if there is more than one
wide = max(28, *map(len, read))
print(f"{'run':<{wide}} {'iteration':>9}  " + "  ".join(f"{name:>8}" for name in COLUMNS))
for name, (_, records) in read.items():
    evaluated = [r for r in records if any(k.startswith("eval/") for k in r)]
    for record in evaluated if against else evaluated[:1] + evaluated[1:][-1:]:
        # None: the run does not log it, or it was not finite
        figures = [(record.get(f"eval/{k}"), form) for k, form in COLUMNS.items()]
        cells = ["-" if value is None else form.format(value) for value, form in figures]
        print(f"{name:<{wide}} {record['iteration']:>9}  " + "  ".join(f"{c:>8}" for c in cells))

# the picture: a panel for each group of metrics, a colour for each run
shown = [(title, keys) for title, keys in PANELS.items() if set(keys) & set(logged)][:6]
if metrics:
    shown = [(metric, (metric,)) for metric in choose_metrics(metrics, logged)]
if out:
    columns = max(1, min(3, len(shown)))
    figure, axes = empty_picture(max(1, -(-len(shown) // columns)), columns, 4.2, 2.9)
    for axis, (title, keys) in zip(axes.flat, shown, strict=False):
        for number, (_, records) in enumerate(read.values()):
            for key in keys:
                held_out = key.startswith("eval/")
                curve = points(records, key, 0.0 if held_out else smooth, x)
                if curve:
                    axis.plot(*zip(*curve, strict=True), color=f"C{number}",
                              linewidth=2 if held_out else 1, alpha=1.0 if held_out else 0.45,
                              marker="o" if held_out else None, markersize=3)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel(x, fontsize=8)
        axis.tick_params(labelsize=8)
    for axis in axes.flat[len(shown):]:
        axis.set_visible(False)
    for number, name in enumerate(read):  # a line without points, for the legend
        axes.flat[0].plot([], [], color=f"C{number}", label=name)
    axes.flat[0].legend(fontsize=8, frameon=False)
    save_picture(figure, axes, out)
    print(f"saved {out} (thick: held-out prompts, thin: training batches)")

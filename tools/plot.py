"""
The curves of one run or of several, from log.jsonl: as a picture, or as a page with the samples and
the configuration; and a table of each run's evaluations.

python tools/plot.py --runs=out/arithmetic_ppo --out=out/arithmetic_ppo.png
python tools/plot.py --runs=out/arithmetic_ppo,out/arithmetic_overoptimize --out=out/both.png
python tools/plot.py --runs=out/arithmetic_grpo --metrics="eval/reward/*,policy/*,time/iteration"
python tools/plot.py --runs=out/arithmetic_ppo --metrics=eval/accuracy --against=eval/kl

python tools/plot.py --runs=out/arithmetic_ppo --out=out/arithmetic_ppo.html    # the page
python tools/plot.py --runs=out/arithmetic_ppo --out=out/live.html --watch=5      # while it runs

The page is a single file that needs no network: open it from disk, or send it. It has the samples
of each evaluation, and all rollouts where the run has saved some (the key save_rollouts). Sort them
by a score to see what earns it: a reward that is being hacked shows at once.
"""
import difflib
import fnmatch
import math
import os
import re
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# Python looks for modules in this file's folder, tools/; ours are in the folder above it.
sys.path.insert(0, ROOT)

from configurator import configure, read_keys, write_text  # noqa: E402
from errors import BadInput, visible  # noqa: E402
from tools.outputs import check_outputs  # noqa: E402
from tools.runs import config_of, fill_page, read_records, read_samples, split_paths  # noqa: E402

# -------------------------------------------------------------------------------------------------
runs = "out/arithmetic_ppo"  # folders with a log.jsonl, separated by commas
out = "out/plot.png"  # a picture, .png, or a page, .html; empty = only the table
metrics = ""  # as "eval/kl,policy/*"; empty = in a picture the important ones, in a page all
against = ""  # the metric to draw them over, such as eval/kl; empty = the iteration
watch = 0.0  # seconds: make the page again and again until Ctrl-C, and let it read itself [>= 0]
smooth = 0.0  # how much of their past curves of training keep, as a moving average [0..0.999]
config, _ = configure(globals())
# -------------------------------------------------------------------------------------------------
# title: metrics. eval/ is of the held-out prompts and is drawn thick, the others are of training.
# A picture has the first six of them of which something is logged, unless the key metrics says more
PANELS = {
    "score": ("eval/scores", "objective/scores"),
    "accuracy": ("eval/accuracy", "objective/accuracy", "train/accuracy"),
    "KL to the reference (nats a response)": ("eval/kl", "objective/kl"),
    "response length (tokens)": ("eval/length", "objective/length"),
    "entropy (nats a response)": ("eval/entropy", "objective/entropy"),
    "responses that ended by themselves": ("eval/finished", "objective/finished"),
    "value loss, or supervised loss": ("loss/value", "eval/loss", "loss/sft", "loss/preference"),
    "gradient norm": ("policy/grad_norm", "reward_model/grad_norm"),
    "learning rate": ("policy/lr", "reward_model/lr"),
}
# how the curves of held-out prompts and of training are drawn
THICK, THIN = dict(linewidth=2, alpha=1.0), dict(linewidth=1, alpha=0.45)
# the table's columns: how each eval/ metric is written
COLUMNS = {"accuracy": "{:.1%}", "thinks": "{:.1%}", "length": "{:.1f}", "scores": "{:z.2f}",
           "kl": "{:z.2f}", "loss": "{:.4f}"}
PAGE = os.path.join(ROOT, "tools", "page.html")  # without data


def read_logs():
    """
    {short name: records} of all runs, and the names of all that is logged; with `watch` it waits
    for a run that has not logged anything. Raises BadInput.
    """
    files = [os.path.join(path, "log.jsonl") for path in paths.values()]
    for file in files if watch else ():
        if not os.path.isfile(file) or not os.path.getsize(file):
            print(visible(f"waiting for {file}; Ctrl-C ends this"), flush=True)
        while not os.path.isfile(file) or not os.path.getsize(file):
            time.sleep(watch)
    logs = {name: read_records(os.path.join(path, "log.jsonl")) for name, path in paths.items()}
    logged = sorted({key for records in logs.values() for record in records
                     for key, value in record.items()
                     if isinstance(value, (int, float)) and key != "iteration"})
    if not logged:
        raise BadInput(f"runs = {runs!r}: nothing is logged there yet")
    return logs, logged


def choose(wanted):
    """The metrics that a key names, such as "eval/kl,policy/*", in its order. Raises BadInput."""
    chosen = {}
    for part in filter(None, map(str.strip, wanted.split(","))):
        found = fnmatch.filter(logged, part)
        if not found:
            near = difflib.get_close_matches(part, logged, n=1) or logged
            raise BadInput(f"no run has logged {part!r}; there is {', '.join(near)}")
        chosen |= dict.fromkeys(found)
    return list(chosen)


def points(records, metric):
    """
    [(iteration, value)] of a metric where it has a value; over another metric, `against`, where
    both have one. A curve of training is smoothed: its moving average is divided by the sum of its
    weights, so that it begins with the first value.
    """
    past = 0.0 if metric.startswith("eval/") else smooth
    found, mean, weight = [], 0.0, 0.0
    for record in records:
        x, y = record.get(place), record.get(metric)  # None: null in JSON, not finite
        if isinstance(x, (int, float)) and isinstance(y, (int, float)):
            mean, weight = past * mean + (1 - past) * y, past * weight + 1 - past
            found.append((x, mean / weight))
    return found


def draw(shown):
    """Write the picture: a panel for each (title, metrics), a colour for each run."""
    import matplotlib

    matplotlib.use("Agg")  # a file, not a window
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator

    columns = min(3, len(shown))
    lines = math.ceil(len(shown) / columns)
    figure, axes = plt.subplots(lines, columns, squeeze=False, layout="constrained", figsize=(
        4.2 * columns, 2.9 * lines + 0.2 * (len(logs) + 2)))
    for axis, (title, keys) in zip(axes.flat, shown, strict=False):
        for number, records in enumerate(logs.values()):
            for key in keys:
                held_out = key.startswith("eval/")
                if curve := points(records, key):
                    axis.plot(*zip(*curve, strict=True), color=f"C{number}",
                              **(THICK if held_out else THIN),
                              marker="o" if held_out or len(curve) <= 2 else None, markersize=3)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel(place, fontsize=8)
        if place == "iteration":
            axis.xaxis.set_major_locator(MaxNLocator(
                "auto", integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
        axis.ticklabel_format(axis="y", useOffset=False)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes.flat[len(shown):]:
        axis.set_visible(False)
    handles = [Line2D([], [], color=f"C{number}", label=name) for number, name in enumerate(logs)]
    handles += [Line2D([], [], color="black", label=label, **style)
                for label, style in (("held-out prompts", THICK), ("training", THIN))]
    figure.legend(handles=handles, loc="outside upper left", fontsize=8, frameon=False)
    figure.savefig(out, dpi=110)


def page_of(wanted):
    """The text of the page, with these metrics; page.html has the form of its data."""
    shown = []
    for name, folder in paths.items():
        curves = {metric: points(logs[name], metric) for metric in wanted}
        files = [os.path.join(folder, f"{kind}.jsonl") for kind in ("samples", "rollouts")]
        samples = [one | dict(trained="rollouts" in file) for file in files
                   if os.path.isfile(file) for one in read_samples(file)]
        keys = config_of(folder)
        shown.append(dict(name=name, samples=samples, config=keys, changed=changed_in(keys),
                          curves={metric: curve for metric, curve in curves.items() if curve}))
    return fill_page(PAGE, ", ".join(logs), dict(runs=shown, meanings=meanings(), watch=watch))


def changed_in(keys):
    """The keys of a run's configuration that are not as its script has them by default."""
    script = os.path.join(ROOT, os.path.basename(str(keys.get("script"))))
    if not os.path.isfile(script):
        return []
    known = read_keys(script) | read_keys(os.path.join(ROOT, "config", "keys.py"))
    return [key for key, value in keys.items() if key in known and value != known[key].default]


def meanings():
    """{metric: what it means}, from the tables of docs/running.md; {} without that page."""
    file, found = os.path.join(ROOT, "docs", "running.md"), {}
    text = open(file, encoding="utf-8").read() if os.path.exists(file) else ""
    for names, meaning in re.findall(r"(?m)^\| (`[^|]+`[^|]*) \|[^|]*\| (.+) \|$", text):
        meaning = re.sub(r"\[([^]]+)\]\([^)]*\)", r"\1", meaning).replace("`", "")
        found |= dict.fromkeys(re.findall(r"`([\w/.]+)`", names), meaning)
    return found


if out and not out.endswith((".png", ".html")):
    raise BadInput(f"out = {out!r}: wanted a name that ends with .png or .html")
if watch and not out.endswith(".html"):
    raise BadInput("watch is for a page; type --out=FILE.html")
check_outputs("--out", [out] if out else [], [PAGE])
paths = split_paths(runs, "runs")  # {short name: folder}
logs, logged = read_logs()
place = choose(against)[0] if against else "iteration"

# the table: the first evaluation, and the last one if there is more than one
wide = max(28, *map(len, logs))
shown = {name: form for name, form in COLUMNS.items() if f"eval/{name}" in logged}
print(f"{'run':<{wide}} {'iteration':>9}  " + "  ".join(f"{name:>8}" for name in shown))
for name, records in logs.items():
    evaluated = [r for r in records if any(k.startswith("eval/") for k in r)]
    for record in evaluated if against else evaluated[:1] + evaluated[1:][-1:]:
        # None: the run does not log it, or it was not finite
        figures = [(record.get(f"eval/{k}"), form) for k, form in shown.items()]
        cells = [form.format(x) if isinstance(x, (int, float)) else "-" for x, form in figures]
        print(f"{name:<{wide}} {record['iteration']:>9}  " + "  ".join(f"{c:>8}" for c in cells))

if out:
    os.makedirs(os.path.dirname(out) or ".", exist_ok=True)
if out.endswith(".html"):
    while True:
        write_text(out, page_of(choose(metrics) or logged))
        if not watch:
            break
        print(visible(f"{time.strftime('%X')}: wrote {out} for a browser; Ctrl-C ends this"),
              flush=True)
        time.sleep(watch)
        logs, logged = read_logs()
    print(visible(f"saved {out}; open it in a browser"))
elif out:
    titles = [(title, keys) for title, keys in PANELS.items() if set(keys) & set(logged)][:6]
    draw([(metric, (metric,)) for metric in choose(metrics)] or titles
         or [(metric, (metric,)) for metric in logged[:6]])
    print(visible(f"saved {out}"))

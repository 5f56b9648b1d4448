"""
One HTML page of a run, or of several: the curves of all metrics, the samples of every evaluation,
and the configuration. It is a single file that needs no network: open it from disk, or send it.

python tools/page.py --run=out/arithmetic_ppo --out=out/arithmetic_ppo.html
python tools/page.py --run=out/arithmetic_ppo,out/arithmetic_overoptimize --out=out/both.html
python tools/page.py --run=out/arithmetic_ppo --watch=True      # again every few seconds

The page itself, tools/page.html, draws what this script puts into it. Samples are there if the run
has a samples.jsonl (ppo.py and grpo.py write it), or a rollouts.jsonl (their key save_rollouts).
Sort them by a score to see what earns it: a reward that is being hacked shows at once.
"""
import html
import json
import os
import sys
import time

# Python looks for modules in this file's folder, tools/; ours are in the folder above it.
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from configurator import configure  # noqa: E402
from tools.curves import finite, metrics_in, points, read_records, read_runs  # noqa: E402
from errors import BadConfig  # noqa: E402
from folders import read_json  # noqa: E402
from report import answer_of, clock  # noqa: E402
from tools.output import RUN_FILES, check_writable, written  # noqa: E402


# --------------------------------------------------------------------------------------------------
run = "out/arithmetic_ppo"  # the folder of a run; several, separated by commas, are shown together
out = "out/run.html"  # the page
watch = False  # write it anew every 10 seconds, until the run is over; the browser reloads it
config, _ = configure(globals())
# --------------------------------------------------------------------------------------------------
PAGE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "page.html")  # without data

if not out.endswith(".html"):
    raise BadConfig(f"out = {out!r} must end with .html")


def facts_of(records, config):
    """What stands at the head of the page: {name: text}."""
    last, seconds = records[-1]["iteration"], sum(r.get("time/iteration", 0) for r in records)
    most = config.get("max_iters", last)
    done = last if "time/iteration" not in records[-1] else last + 1
    facts = {"status": "finished" if done >= most else "running, or stopped",
             "iterations": f"{done} of {most}", "took": clock(seconds)}
    for name, metrics in {"score": ("eval/scores", "objective/scores"),
                          "accuracy": ("eval/accuracy", "objective/accuracy"),
                          "KL": ("eval/kl", "objective/kl"),
                          "loss": ("eval/loss", "loss/sft", "loss/preference")}.items():
        found = [r[metric] for metric in metrics for r in records if r.get(metric) is not None]
        mine = [r[metrics[0]] for r in records if r.get(metrics[0]) is not None]
        facts[name] = f"{(mine or found)[-1]:.3g}" if found else "-"
    return facts


def hours_of(records):
    """{iteration: hours from the start to its end}, of training."""
    hours, total = {}, 0.0
    for record in records:
        total += record.get("time/iteration", 0) / 3600
        hours[record["iteration"]] = total
    return hours


def page_of(run):
    """The page of these runs, and whether all of them are over."""
    read, pages = read_runs(run, "run"), []
    for name, (folder, records) in read.items():
        # six digits are more than any screen shows
        curves = {metric: [(x, float(f"{y:.6g}")) for x, y in points(records, metric)]
                  for metric in metrics_in({name: (folder, records)})}
        samples = []
        for kind in ("samples", "rollouts"):
            file = os.path.join(folder, f"{kind}.jsonl")
            if os.path.exists(file) and os.path.getsize(file):
                found = read_records(file, ("row", "prompt", "text", "length", "scores"))
                samples += [one | dict(trained=kind == "rollouts", text=answer_of(one))
                            for one in found]
        config = finite(read_json(os.path.join(folder, "config.json")))
        pages.append(dict(name=name, config=config, samples=samples,
                          facts=facts_of(records, config), hours=hours_of(records),
                          curves={metric: curve for metric, curve in curves.items() if curve}))
    # Inside <script> the browser only looks for "<": with none of them in the data, no text of a
    # sample can end the script or begin a tag. JSON reads \u003c as the same character.
    data = json.dumps(pages, allow_nan=False).replace("<", "\\u003c")
    with open(PAGE, encoding="utf-8") as f:
        page = f.read()
    over = all(one["facts"]["status"] == "finished" for one in pages)
    reload = '<meta http-equiv="refresh" content="10">' if watch and not over else ""
    page = page.replace("<!-- title -->", html.escape(", ".join(read)), 1)
    page = page.replace("<!-- reload -->", reload, 1)
    return page.replace("<!-- data -->", data, 1), over


check_writable(out, reads=[PAGE, *(os.path.join(folder, name)
                                   for folder, _ in read_runs(run, "run").values()
                                   for name in RUN_FILES)],
               made=rb"<!DOCTYPE html><!-- made by tools/page.py -->")
over = False
while not over:
    page, over = page_of(run)
    with written(out) as f:
        f.write(page)
    print(f"saved {out} ({len(page) / 2**20:.1f} MiB); open it in a browser", flush=True)
    over |= not watch
    time.sleep(0 if over else 10)

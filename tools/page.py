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
from itertools import accumulate

# Python looks for modules in this file's folder, tools/; ours are in the folder above it.
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from configurator import configure  # noqa: E402
from tools.curves import metrics_in, points, read_records, read_runs  # noqa: E402
from errors import BadConfig  # noqa: E402
from folders import read_json, read_text  # noqa: E402
from report import answer_of, clock  # noqa: E402
from tools.output import RUN_FILES, check_writable, written  # noqa: E402


# --------------------------------------------------------------------------------------------------
run = "out/arithmetic_ppo"  # the folder of a run; several, separated by commas, are shown together
out = "out/run.html"  # the page
watch = False  # write it anew every 10 seconds, until the run is over; the browser reloads it
config, _ = configure(globals())
# --------------------------------------------------------------------------------------------------
PAGE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "page.html")  # without data
# the head of the page has of each run the last value of the first metric that the run has
FACTS = {"score": ("eval/scores", "objective/scores"),
         "accuracy": ("eval/accuracy", "objective/accuracy"),
         "KL": ("eval/kl", "objective/kl"),
         "loss": ("eval/loss", "loss/sft", "loss/preference")}

if not out.endswith(".html"):
    raise BadConfig(f"out = {out!r} must end with .html")
def facts_of(curves, records, config):
    """What stands at the head of the page: {name: text}."""
    done = sum("time/iteration" in record for record in records)  # the last one only evaluates
    most, seconds = config.get("max_iters", done), sum(y for _, y in curves["time/iteration"])
    facts = {"status": "finished" if done >= most else "running, or stopped",
             "iterations": f"{done} of {most}", "took": clock(seconds)}
    for name, metrics in FACTS.items():
        known = [metric for metric in metrics if metric in curves]
        facts[name] = f"{curves[known[0]][-1][1]:.3g}" if known else "-"
    return facts | {name: config.get(name) or "-" for name in ("commit", "command")}


def page_of(read):
    """The page of these runs, and whether all of them are over."""
    pages = []
    for name, (folder, records) in read.items():
        # six digits are more than any screen shows
        curves = {metric: [(x, float(f"{y:.6g}")) for x, y in points(records, metric)]
                  for metric in metrics_in({name: (folder, records)})}
        samples = []
        for kind in ("samples", "rollouts"):
            file = os.path.join(folder, f"{kind}.jsonl")
            if os.path.exists(file) and os.path.getsize(file):
                samples += [one | dict(trained=kind == "rollouts", text=answer_of(one)) for one in
                            read_records(file, ("row", "prompt", "text", "length", "scores"))]
        config = read_json(os.path.join(folder, "config.json"))
        hours = accumulate(record.get("time/iteration", 0) / 3600 for record in records)
        pages.append(dict(
            name=name, config=config, samples=samples, curves=curves,
            facts=facts_of({"time/iteration": []} | curves, records, config),
            hours={record["iteration"]: x for record, x in zip(records, hours, strict=True)}))
    over = all(one["facts"]["status"] == "finished" for one in pages)
    reload = '<meta http-equiv="refresh" content="10">' if watch and not over else ""
    # Inside <script> the browser only looks for "<": with none of them in the data, no text of a
    # sample can end the script or begin a tag. JSON reads \u003c as the same character.
    data = json.dumps(pages, allow_nan=False).replace("<", "\\u003c")
    page = read_text(PAGE).replace("<!-- title -->", html.escape(", ".join(read)), 1)
    return page.replace("<!-- reload -->", reload, 1).replace("<!-- data -->", data, 1), over


read = read_runs(run, "run")
check_writable(out, reads=[PAGE, *(os.path.join(folder, name) for folder, _ in read.values()
                                   for name in RUN_FILES)],
               made=rb"<!DOCTYPE html><!-- made by tools/page.py -->")
over = False
while not over:
    page, over = page_of(read_runs(run, "run"))
    with written(out) as f:
        f.write(page)
    print(f"saved {out} ({len(page) / 2**20:.1f} MiB); open it in a browser", flush=True)
    over |= not watch
    time.sleep(0 if over else 10)

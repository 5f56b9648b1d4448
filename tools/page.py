"""
One HTML page of a run, or of several: the curves of all metrics, the samples of every evaluation,
and the configuration. It is a single file that needs no network: open it from disk, or send it.

python tools/page.py --run=out/arithmetic_ppo --out=out/arithmetic_ppo.html
python tools/page.py --run=out/arithmetic_ppo,out/arithmetic_overoptimize --out=out/both.html

The page itself, tools/page.html, draws what this script puts into it. Samples are there if the run
has a samples.jsonl (ppo.py and grpo.py write it). Sort them by a score to see what earns it: a
reward that is being hacked shows at once.
"""
import html
import json
import os
import sys

# Python looks for modules in this file's folder, tools/; ours are in the folder above it.
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from configurator import configure  # noqa: E402
from tools.curves import finite, metrics_in, points, read_records, read_runs  # noqa: E402
from errors import BadConfig  # noqa: E402
from folders import check_writable, read_json, written  # noqa: E402


# --------------------------------------------------------------------------------------------------
run = "out/arithmetic_ppo"  # the folder of a run; several, separated by commas, are shown together
out = "out/run.html"  # the page
config, _ = configure(globals())
# --------------------------------------------------------------------------------------------------
PAGE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "page.html")  # without data

if not out.endswith(".html"):
    raise BadConfig(f"out = {out!r} must end with .html")
read = read_runs(run, "run")
check_writable(out, reads=[PAGE, *(os.path.join(folder, name) for folder, _ in read.values()
                                   for name in ("log.jsonl", "samples.jsonl", "config.json"))],
               made=rb"<!DOCTYPE html><!-- made by tools/page.py -->")
pages = []
for name, (folder, records) in read.items():
    # six digits are more than any screen shows
    curves = {metric: [(x, float(f"{y:.6g}")) for x, y in points(records, metric)]
              for metric in metrics_in({name: (folder, records)})}
    file, samples = os.path.join(folder, "samples.jsonl"), []
    if os.path.exists(file) and os.path.getsize(file):
        samples = read_records(file, ("row", "prompt", "text", "length", "scores"))
    pages.append(dict(name=name, config=finite(read_json(os.path.join(folder, "config.json"))),
                      curves={metric: curve for metric, curve in curves.items() if curve},
                      samples=samples, last=records[-1]["iteration"]))

# Inside <script> the browser only looks for "<": with none of them in the data, no text of a sample
# can end the script or begin a tag. JSON reads \u003c as the same character.
data = json.dumps(pages, allow_nan=False).replace("<", "\\u003c")
with open(PAGE, encoding="utf-8") as f:
    page = f.read()
page = page.replace("<!-- title -->", html.escape(", ".join(read)), 1)
page = page.replace("<!-- data -->", data, 1)
with written(out) as f:
    f.write(page)
print(f"saved {out} ({len(page) / 2**20:.1f} MiB); open it in a browser")

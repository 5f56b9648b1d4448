"""
One HTML page of a run, or of several: the curves of all metrics, the samples of every evaluation,
and the configuration. It is a single file that needs no network: open it from disk, or send it.

python tools/page.py --run=out/arithmetic_ppo --out=out/arithmetic_ppo.html
python tools/page.py --run=out/arithmetic_ppo,out/arithmetic_overoptimize --out=out/both.html

The page itself, tools/page.html, draws what this script puts into it. Samples are there if the run
has a samples.jsonl (ppo.py and grpo.py write it, 16 of each evaluation). Sort them by a score to
see what earns it: a reward that is being hacked shows at once.
"""
import html
import json
import os
import sys

# Python looks for modules in this file's folder, tools/; ours are in the folder above it.
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from configurator import configure  # noqa: E402
from engine.curves import metrics_in, points, read_records, read_runs  # noqa: E402
from errors import BadInput  # noqa: E402
from folders import check_writable  # noqa: E402


# --------------------------------------------------------------------------------------------------
run = "out/arithmetic_ppo"  # the folder of a run; several, separated by commas, are shown together
out = "out/run.html"  # the page
max_points = 1000  # of a curve; of more iterations, neighbours become one point, their mean [>= 2]
max_samples = 10000  # of a run; of more, those of its first prompts, all evaluations [>= 1]
config, _ = configure(globals())
# --------------------------------------------------------------------------------------------------


def thinned(curve):
    """[(iteration, value)] -> at most max_points of them, the means of equally many neighbours."""
    n = -(-len(curve) // max_points)  # neighbours that become one
    parts = [curve[i:i + n] for i in range(0, len(curve), n)]
    # six digits are more than any screen shows
    return [(part[-1][0], float(f"{sum(value for _, value in part) / len(part):.6g}"))
            for part in parts]


def first_prompts(samples):
    """The samples of the first prompts, as many as make at most max_samples samples in all."""
    evaluations = len({sample["iteration"] for sample in samples})
    return [sample for sample in samples if sample["row"] < max(max_samples // evaluations, 1)]


PAGE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "page.html")  # without data

read = read_runs(run, "run")
files = [os.path.join(folder, name) for folder, _ in read.values()
         for name in ("log.jsonl", "samples.jsonl", "config.json")]
check_writable(out, reads=[PAGE, *files])
pages = []
for name, (folder, records) in read.items():
    curves = {metric: thinned(points(records, metric))
              for metric in metrics_in({name: (folder, records)})}
    curves = {metric: curve for metric, curve in curves.items() if curve}
    samples_file, config_file = (os.path.join(folder, x) for x in ("samples.jsonl", "config.json"))
    samples = []
    if os.path.exists(samples_file) and os.path.getsize(samples_file):
        samples = read_records(samples_file, ("row", "prompt", "text", "length", "scores"))
        kept = first_prompts(samples)
        if len(kept) < len(samples):
            print(f"{name}: the page has {len(kept)} of {len(samples)} samples (max_samples)")
        samples = kept
    try:
        with open(config_file, encoding="utf-8") as f:
            settings = json.load(f)
    except (OSError, ValueError) as e:
        raise BadInput(f"{config_file}: {getattr(e, 'strerror', None) or e}; a run's folder has "
                       "one") from e
    pages.append(dict(name=name, config=settings, curves=curves, samples=samples,
                      last=records[-1]["iteration"]))

# Inside <script> the browser only looks for "<": with none of them in the data, no text of a sample
# can end the script or begin a tag. JSON reads < as the same character.
data = json.dumps(pages, allow_nan=False).replace("<", "\\u003c")
with open(PAGE, encoding="utf-8") as f:
    page = f.read()
page = page.replace("<!-- title -->", html.escape(", ".join(read)), 1)
page = page.replace("<!-- data -->", data, 1)
try:
    with open(out, "w", encoding="utf-8") as f:
        f.write(page)
except OSError as e:
    raise BadInput(f"out = {out!r} cannot be written: {e.strerror}; choose another --out") from e
print(f"saved {out} ({len(page) / 2**20:.1f} MiB); open it in a browser")

"""
The runs that a tool shows: their folders, what to call them, the records of their logs; and how
pictures of them are made.
"""
import difflib
import fnmatch
import json
import os

from errors import BadConfig, BadInput, first_line
from folders import read_text
from tools.output import check_writable, written


def read_runs(folders, key="runs"):
    """
    {name: (folder, records of its log.jsonl)} of folders separated by commas. key: the name of the
    key that has them, for messages. Raises BadConfig, or BadInput with the file and the line.
    """
    paths = [folder.strip() for folder in folders.split(",") if folder.strip()]
    if not paths:
        raise BadConfig(f"{key} is empty; type --{key}=out/arithmetic_ppo")
    return {name: (path, read_records(os.path.join(path, "log.jsonl")))
            for name, path in zip(short_names(paths, key), paths, strict=True)}


def short_names(paths, key):
    """
    Paths from where they part: ["x/a/ppo", "x/b/ppo"] -> ["a/ppo", "b/ppo"]. Raises BadConfig where
    two are one.
    """
    paths = list(map(os.path.abspath, paths))
    for path in paths:
        if paths.count(path) > 1:
            raise BadConfig(f"{key}: {path!r} is given twice; keep one")
    above = os.path.commonpath(list(map(os.path.dirname, paths)))
    names = [os.path.relpath(path, above) for path in paths]
    return [name.encode(errors="backslashreplace").decode() for name in names]  # some are no UTF-8


def read_records(file, fields=()):
    """
    The dicts of a log.jsonl or samples.jsonl, each with an iteration and these fields. A last line
    without an end is left out: the run may be writing it. Raises BadInput, also where there are no
    lines.
    """
    complete, _, _ = read_text(file).rpartition("\n")
    records = []
    if not complete:
        raise BadInput(f"{file}: nothing is logged yet")
    for number, line in enumerate(complete.split("\n"), 1):
        try:
            record = json.loads(line)
            missing = {"iteration", *fields} - record.keys()
        except (ValueError, AttributeError) as e:
            raise BadInput(f"{file}, line {number}: no record of a run ({first_line(e)}); give the "
                           "folder of a run") from e
        if missing:
            raise BadInput(f"{file}, line {number}: a record without {min(missing)!r}; give the "
                           "folder of a run")
        records.append(record)
    return records


def points(records, metric, past=0.0, x="iteration"):
    """
    [(iteration, value)] of a metric, where it has a value; or with another metric in the place of
    the iteration, where both have one. past: how much of the moving average of the values so far
    each value is to keep, from 0 (nothing is smoothed) to below 1; the average is divided by the
    sum of its weights, so that it begins with the first value.
    """
    found, mean, weight = [], 0.0, 0.0
    for record in records:
        value, place = record.get(metric), record.get(x)  # None: null in JSON, not finite
        if isinstance(value, (int, float)) and isinstance(place, (int, float)):
            mean, weight = past * mean + (1 - past) * value, past * weight + 1 - past
            found.append((place, mean / weight))
    return found


def metrics_in(runs):
    """The names of all metrics that some run of {name: (folder, records)} has a number of."""
    return sorted({key for _, records in runs.values() for record in records
                   for key, value in record.items()
                   if key != "iteration" and isinstance(value, (int, float))})


def choose_metrics(wanted, known):
    """
    The metrics that a key names, such as "eval/kl,policy/*", in its order; * stands for anything.
    Raises BadConfig where a part of it is no metric of `known`.
    """
    chosen = {}
    for part in filter(None, map(str.strip, wanted.split(","))):
        found = fnmatch.filter(known, part)
        if not found:
            near = difflib.get_close_matches(part, known, n=1) or known
            raise BadConfig(f"no run has logged {part!r}; there is {', '.join(near)}")
        chosen |= dict.fromkeys(found)
    return list(chosen)


# --------------------------------------------------------------------------------------------------
# pictures


def check_picture(path):
    """Raise BadInput unless a picture can be written to this file, or replaces one of ours."""
    if not path.endswith(".png"):  # matplotlib would add it, or write another kind
        raise BadConfig(f"out = {path!r} must end with .png")
    check_writable(path, made=rb"\x89PNG\r\n\x1a\n(?s:.{0,200})quartet")


def empty_picture(lines, columns, width, height, **kwargs):
    """(figure, its axes as an array (lines, columns)) of panels, each of this size in inches."""
    import matplotlib

    matplotlib.use("Agg")  # a file, not a window
    import matplotlib.pyplot as plt

    size = width * columns, height * lines
    return plt.subplots(lines, columns, figsize=size, squeeze=False, **kwargs)


def save_picture(figure, axes, path):
    """Write a picture to a file, whose axes (an array) get a light grid and no frame."""
    for axis in axes.flat:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    with written(path, "xb") as f:
        figure.savefig(f, format="png", dpi=110, metadata={"Source": "quartet"})

"""
The table of evidence/referee.sh: what other trainers compute, formula by formula, beside quartet.
"""
import glob
import subprocess
import sys
import textwrap

from configurator import configure  # first: it must be imported before torch
from errors import BadInput, Stop, say

import torch

from evidence.referee.cut import Wheel
from evidence.referee.ours import ROWS, make_batch
from evidence.referee.trainers import CHOICES, TRAINERS

# --------------------------------------------------------------------------------------------------
wheels = ""  # a folder that has them: nothing is downloaded then; empty: out/referee, by pip
page = "evidence/referee.md"  # where to write the tables
config, system = configure(globals(), "config/keys.py", device_type="cpu")
# --------------------------------------------------------------------------------------------------
EQUAL = 1e-6  # a distance, as a share of the larger number, or of 1: some of theirs are in float32
BATCHES = [make_batch(seed) for seed in (1, 2, 3)]
EMPTY = [make_batch(4, rows_without_tokens=True)]  # for means over rows
HEAD = """# The referee: what other trainers compute, formula by formula

    bash evidence/referee.sh                     # writes this page, in a minute; no GPU
    bash evidence/referee.sh --wheels=FOLDER     # of wheels that are there, without a network

Functions of other trainers, cut by name out of the wheels on PyPI (nothing of them is installed),
beside quartet's own lines, on float64 batches of 12 responses: with padding, with gaps (the output
of a tool), of one token, of no token, of equal scores, and with ratios from e^-25 to e^25. A loss
is compared with its gradient at each token.

A cell says equal, with the largest distance of two numbers, as a share of the larger one or of 1;
what computes in float32 is at 1e-8. Or it names the choices by which the two differ: with them in
quartet's formula they are equal, and without any one of them they are not; the list below has the
distances. An empty cell: no such function of its own was found. A choice is no fault; where one
is at odds with an equation, the list names the equation.

The formulas of recipes have no row: `worked_out.py` computes each of them in plain loops, and the
tests compare whole runs with it. Nor have the losses of pairs, whose whole steps are compared with
TRL's; nor what is two rows at once: REINFORCE++ is GAE with values of 0, whitened, and importance
weights multiply GSPO's losses as they do all others.

{equal} pairs are equal, {named} differ by the choices named{unexplained}. Whole steps, beside TRL:
[the same as another implementation](../docs/algorithms.md#the-same-as-another-implementation).
"""


def wheel_of(package, version):
    """The path of a wheel, or None where it cannot be had."""
    folder = wheels or "out/referee"
    pattern = f"{folder}/{package.replace('-', '_')}-{version}-*.whl"
    if not glob.glob(pattern) and not wheels:
        say(f"downloading {package} {version}")
        subprocess.run(  # any system: the files are read, and not imported
            [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--retries=1",
             "--disable-pip-version-check", "--only-binary=:all:", "--python-version=3.11",
             "--platform=manylinux_2_28_x86_64", "--platform=manylinux1_x86_64",
             f"--dest={folder}", f"{package}=={version}"], check=False)
    return next(iter(glob.glob(pattern)), None)


def distance(ours, theirs):
    """The largest distance of two vectors, as a share of the larger number or of 1."""
    if ours.numel() != theirs.numel():
        return torch.inf
    ours, theirs = ours.double().flatten(), theirs.double().flatten()
    scale = torch.maximum(ours.abs(), theirs.abs()).clamp(min=1)
    return ((ours - theirs).abs() / scale).nan_to_num(nan=torch.inf).max().item()


def compare(row, adapter, choices):
    """What a cell says, equal or the choices that make it so; the distances without and with."""
    formula = ROWS[row][0]
    pairs = [(b, adapter(b).detach()) for b in (EMPTY if "-mean" in row or "-sum" in row
                                                else BATCHES)]

    def apart(names):
        keys = {key: value for name in names for key, value in CHOICES[name][0].items()}
        return max(distance(formula(b, **keys), theirs) for b, theirs in pairs)

    plain = apart([])
    if plain < EQUAL:
        return f"equal ({plain:.0e})".replace("0e+00", "0"), plain, plain
    for name in choices:  # each one is needed
        if apart(left := [one for one in choices if one != name]) < EQUAL:
            choices = left
    named = ", ".join(f"`{name}`" for name in choices)
    return named if (rest := apart(choices)) < EQUAL else "**not explained**", plain, rest


def in_columns(rows):
    """The lines of a table, which is one also to the eye. rows: lists of texts, the head first."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows = [rows[0], ["-" * width for width in widths], *rows[1:]]
    return ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in rows]


cells, columns, absent = {}, [], []  # {(row, column): (text, distance, distance)}
for name, (package, version, function) in TRAINERS.items():
    if not (path := wheel_of(package, version)):
        absent.append(f"{package} {version}")
        continue
    columns.append(column := f"{name} {version}")
    for row, cell in function(Wheel(path)).items():
        adapter, *choices = cell if isinstance(cell, tuple) else (cell,)
        try:
            cells[row, column] = compare(row, adapter, choices)
        except AttributeError as e:
            say(f"{column}, {row}: {e}")

unexplained = [key for key, (text, *_) in cells.items() if text == "**not explained**"]
equal = sum(text.startswith("equal") for text, *_ in cells.values())
if not columns:
    raise BadInput(f"{wheels or 'pip'} has none of the wheels: {', '.join(absent)}")
lines = [HEAD.format(
    equal=equal, named=len(cells) - equal - len(unexplained),
    unexplained=f", {len(unexplained)} are not explained" if unexplained else "")]
if absent:
    lines += [f"Left out, because the wheel could not be had: {', '.join(absent)}.\n"]
for first in range(0, len(columns), 3):
    part = columns[first:first + 3]
    table = [[row, *(cells.get((row, one), [""])[0] for one in part)] for row in ROWS
             if any((row, one) in cells for one in part)]
    lines += [*in_columns([["formula", *part], *table]), ""]
lines += ["## The choices", "", "Distances without -> with the choices of a cell in quartet's "
          "formula; papers by their numbers.", ""]
for name, (_, text) in CHOICES.items():
    seen = [f"  - {row}, {column.rpartition(' ')[0]}: {one:.0e} -> {two:.0e}"
            for (row, column), (said, one, two) in cells.items() if f"`{name}`" in said]
    said = textwrap.fill(f"- **{name}**: {text}", 100, subsequent_indent="  ")
    lines += [said, *seen] if seen else []
places = [[row, *where] for row, (_, *where) in ROWS.items()]
lines += ["", "## Where the formulas stand", "",
          *in_columns([["formula", "in quartet", "source (arXiv)"], *places])]
with open(page, "w", encoding="utf-8") as f:
    f.write("\n".join(lines) + "\n")
say(f"{page}: {equal} of {len(cells)} pairs are equal" + "".join(
    f"; left out: {one}" for one in absent))
if unexplained:
    raise Stop("not explained: " + "; ".join(f"{row}, {column}" for row, column in unexplained))

"""
Makes first_hour.ipynb: runs the cells below and writes them down with what they print. In the
repository, after `bash runs/quickstart.sh`:

    python course/notebook.py
"""
import contextlib
import io
import json
import os
import subprocess
import sys

FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "first_hour.ipynb")
# texts are markdown; a list is the lines of a code cell, where ! begins a command of the shell
CELLS = [
    "# The first hour\n\nStart this notebook in quartet's folder, in its environment (`.venv`). "
    "The next cell makes the data and the models, in three to six minutes on two CPU cores.",
    ["!bash runs/quickstart.sh 2>&1 | tail -n 3"],
    "A small model has learned to add from careless demonstrations. Three in ten think first, and "
    "these are right.",
    ["!python tools/sample.py --policy_path=out/arithmetic_sft/policy --prompt=\"123+456=\" "
     "--samples=4"],
    "PPO has found out that thinking pays. Every number of one of its responses:",
    ["!python tools/explain.py --run=out/arithmetic_ppo --prompt=\"123+456=\" | head -n 24"],
    "The curves, as a page with the samples. Open `out/arithmetic_ppo.html` in a browser.",
    ["!python tools/plot.py --runs=out/arithmetic_ppo --out=out/arithmetic_ppo.html"],
    "The log has a record an iteration. Explained variance: 1 is a perfect value model.",
    ["import json",
     "for line in open('out/arithmetic_ppo/log.jsonl'):",
     "    record = json.loads(line)",
     "    if 'objective/scores' in record and record['iteration'] % 5 == 0:",
     "        print(*(f'{name} {record[name]:.3f}' for name in (",
     "            'objective/scores', 'objective/kl', 'val/explained_variance')))"],
    "An exercise of lesson 1, with a mistake in it: which row of the logits is of which token?",
    ["import sys",
     "sys.path.insert(0, 'course')",
     "import check",
     "from checks import lesson1",
     "",
     "def logprobs(logits, ids, temperature):",
     "    rows = (logits[1:] / temperature).log_softmax(-1)",
     "    return rows.gather(-1, ids[1:, None])[:, 0]",
     "",
     "print(check.verdict(logprobs, lesson1.CHECKS['logprobs']))"],
    "Mend it, and go on with [lesson 1](lesson1.md).",
]


def run_cell(lines, names):
    """Run a code cell in the namespace `names`; what it prints."""
    if lines[0].startswith("!"):
        done = subprocess.run(["bash", "-c", lines[0][1:]], text=True, stdout=subprocess.PIPE,
                              stderr=subprocess.DEVNULL, check=True)
        return done.stdout
    with contextlib.redirect_stdout(io.StringIO()) as said:
        exec("\n".join(lines), names)
    return said.getvalue()


def notebook():
    """The notebook as a dict: the cells, and behind each code cell what it prints."""
    cells, names, count = [], {}, 0
    for number, cell in enumerate(CELLS):
        if isinstance(cell, str):
            cells.append(dict(cell_type="markdown", id=f"cell{number}", metadata={}, source=cell))
            continue
        count += 1
        print("\n".join(cell), flush=True)
        outputs = [dict(output_type="stream", name="stdout", text=run_cell(cell, names))]
        cells.append(dict(cell_type="code", id=f"cell{number}", metadata={},
                          execution_count=count, source="\n".join(cell), outputs=outputs))
    return dict(cells=cells, nbformat=4, nbformat_minor=5, metadata=dict(
        language_info=dict(name="python"),
        kernelspec=dict(name="python3", display_name="Python 3", language="python")))


if __name__ == "__main__":
    os.environ["PATH"] = os.path.dirname(sys.executable) + ":" + os.environ["PATH"]
    with open(FILE, "w", encoding="utf-8") as f:
        json.dump(notebook(), f, indent=1)
        f.write("\n")

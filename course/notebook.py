"""
Makes notebooks. pip install ".[dev]" -c requirements.lock brings what runs them.

    python course/notebook.py       # first_hour.ipynb, and runs it, after `bash runs/quickstart.sh`
    python course/notebook.py 3     # lesson3.ipynb from lesson3.md and exercise3.py, to be run

A notebook is run as Jupyter does it: in its own folder, course/. So the first cell goes up.
"""
import json
import os
import re
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
FILE = os.path.join(HERE, "first_hour.ipynb")
UP = """import os
import sys
if not os.path.exists("runs"):
    os.chdir("..")  # Jupyter has begun in course/
sys.path[:0] = ["course", "."]
os.environ["PATH"] = os.path.dirname(sys.executable) + ":" + os.environ["PATH"]
os.environ["QUARTET_PYTHON"] = sys.executable  # nothing is installed
%matplotlib inline"""
# texts; a tuple is a code cell, where ! begins a command of the shell
CELLS = [
    "# The first hour\n\nOnce, in quartet's folder: `pip install -r requirements.txt notebook -c "
    "requirements.lock`, and then `jupyter notebook course/first_hour.ipynb`.",
    (UP,),
    "The next cell makes the data and the models, in three to six minutes on two CPU cores. What "
    "is there already is not made again.",
    ("""if os.path.exists("out/arithmetic_ppo/policy"):
    print("the models are there")
else:
    !bash runs/quickstart.sh 2>&1 | grep -E "^(iter|eval|saved)"
""",),
    "![four models](../assets/models.svg)\n\nA small model has learned to add from careless "
    "demonstrations. Three in ten think first, and these are right. Each token is drawn:\n\n"
    "![sampling](pictures/sampling.svg)",
    ('!python tools/sample.py --policy_path=out/arithmetic_sft/policy --prompt="123+456=" '
     '--samples=4',),
    "PPO has found out that thinking pays. Every number of one of its responses:",
    ('!python tools/explain.py --run=out/arithmetic_ppo --prompt="123+456=" | head -n 24',),
    "The log has a record an iteration. The score is what PPO trains on. The accuracy is what we "
    "want; the reward model has never seen it. The KL is what the policy pays for.",
    ("""import json
import matplotlib.pyplot as plt
records = [json.loads(line) for line in open("out/arithmetic_ppo/log.jsonl")]
records = [record for record in records if "objective/scores" in record]
figure, axes = plt.subplots(1, 3, figsize=(11, 2.8), layout="constrained")
for i, name in enumerate(("scores", "accuracy", "kl")):
    axes[i].plot([record["objective/" + name] for record in records])
    axes[i].set(title=name, xlabel="iteration")
plt.show()""",),
    "The same as a page with the samples. Open `out/arithmetic_ppo.html` in a browser.",
    ("!python tools/plot.py --runs=out/arithmetic_ppo --out=out/arithmetic_ppo.html",),
    "An exercise of lesson 1, with a mistake in it: which row of the logits is of which token?",
    ("""import check
from checks import lesson1

def logprobs(logits, ids, temperature):
    rows = (logits[1:] / temperature).log_softmax(-1)
    return rows.gather(-1, ids[1:, None])[:, 0]

print(check.verdict(logprobs, lesson1.CHECKS["logprobs"]))""",),
    "Mend it, and go on with [lesson 1](lesson1.md); `python course/notebook.py 1` makes a "
    "notebook of it.",
]


def notebook(cells):
    """Texts and tuples, as a notebook that has not been run: a dict."""
    made = []
    for i, cell in enumerate(cells):
        code = dict(execution_count=None, outputs=[]) if isinstance(cell, tuple) else {}
        made.append(dict(cell_type="code" if code else "markdown", id=f"cell{i}", metadata={},
                         source="".join(cell).strip("\n")) | code)
    kernel = dict(name="python3", display_name="Python 3", language="python")
    return dict(cells=made, nbformat=4, nbformat_minor=5, metadata=dict(kernelspec=kernel))


def lesson(number):
    """The cells of a lesson: its blocks of commands are code, then the exercise and its check."""
    with open(f"{HERE}/lesson{number}.md", encoding="utf-8") as f:
        parts = re.split(r"\n\n((?:    .*\n|\n(?=    ))+)", f.read())
    cells = [(UP,)]
    for i, part in enumerate(parts):
        lines = [line[4:] for line in part.split("\n")]
        if i % 2 == 0:
            cells.append(part)
        elif "PYTHON" in lines[0]:  # a program in the shell
            cells.append(("\n".join(lines[1:]).partition("\nPYTHON")[0],))
        elif lines[0].startswith(("python ", "head ", "tail ", "bash ")):
            if number != "8" and "course/check.py" in part:
                continue  # it would check the file, and not the cell below
            cells.append(("\n".join("!" + line for line in lines if line),))
        else:  # a formula
            cells.append("    " + "\n    ".join(lines))
    if os.path.exists(f"{HERE}/exercise{number}.py"):
        with open(f"{HERE}/exercise{number}.py", encoding="utf-8") as f:
            source = f.read()
        cells += ["## Here\n\nWrite your functions in this cell, and check them in the next:",
                  (re.sub(r'^""".*?"""\n', "", source, count=1, flags=re.DOTALL),),
                  (f"import check\nfrom checks import lesson{number}\n\n"
                   f"for name, what in lesson{number}.CHECKS.items():\n"
                   "    print(name + ':', check.verdict(globals()[name], what, name) or 'right')",)]
    return cells


def run(made, timeout=1200):
    """A notebook, run in course/, with what its cells print. Raises what a cell raises."""
    import nbformat
    from nbclient import NotebookClient

    book = nbformat.from_dict(made)
    NotebookClient(book, timeout=timeout, kernel_name="python3", record_timing=False,
                   coalesce_streams=True, resources=dict(metadata=dict(path=HERE))).execute()
    for cell in book.cells:
        for output in cell.get("outputs", []):
            if "text" in output:  # a command of the shell ends its lines as a terminal does
                output.text = output.text.replace("\r\n", "\n")
    return book


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1] not in "12345678":
        sys.exit(f"notebook.py: wanted a lesson from 1 to 8, given {sys.argv[1]}")
    for number in sys.argv[1:]:
        FILE = f"{HERE}/lesson{number}.ipynb"
    book = notebook(lesson(number)) if sys.argv[1:] else run(notebook(CELLS))
    with open(FILE, "w", encoding="utf-8") as f:
        json.dump(book, f, indent=1)
        f.write("\n")
    print(f"made {FILE}; next: jupyter notebook {FILE}")

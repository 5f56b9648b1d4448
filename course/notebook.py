"""
Makes a notebook of a lesson: python course/notebook.py 3 makes lesson3.ipynb of lesson3.md and
exercise3.py, to be run in Jupyter. Jupyter runs a notebook in its own folder, course/. So the first
cell goes up.
"""
import json
import os
import re
import sys

HERE = os.path.dirname(os.path.abspath(__file__))


def first_hour():
    """The notebook of the first hour, a dict; its cells are written in Jupyter."""
    with open(f"{HERE}/first_hour.ipynb", encoding="utf-8") as f:
        return json.load(f)


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
    cells = [("".join(first_hour()["cells"][1]["source"]),)]  # it goes up from course/
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


if __name__ == "__main__":
    number = "".join(sys.argv[1:])
    if number not in [*"123456789"]:
        sys.exit(f"notebook.py: wanted a lesson from 1 to 9, given {number or 'none'}")
    file = f"{HERE}/lesson{number}.ipynb"
    with open(file, "w", encoding="utf-8") as f:
        json.dump(notebook(lesson(number)), f, indent=1)
        f.write("\n")
    print(f"made {file}; next: jupyter notebook {file}")

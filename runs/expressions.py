"""
How far the rewards `accuracy` and `math` agree with math-verify's own tests: pairs of a true answer
and a given one, each with a verdict. The tests are in the package's source archive, which pip
downloads; nothing of them is run, only their tables are read. About a minute.

    pip install math-verify==0.9.0
    python runs/expressions.py
    python runs/expressions.py --archive=math_verify-0.9.0.tar.gz    # without a network
"""
import argparse
import ast
import glob
import os
import subprocess
import sys
import tarfile
import tempfile

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from engine.expressions import check_installed  # noqa: E402
from errors import BadInput, report_and_exit  # noqa: E402
from rewards import RULES  # noqa: E402

VERSION = "0.9.0"


def download(folder):
    """The source archive, by pip. Returns its path. Raises BadInput where pip cannot get it."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary=:all:",
               "--disable-pip-version-check", f"--dest={folder}", f"math-verify=={VERSION}"]
    subprocess.run(command, check=False)
    found = glob.glob(os.path.join(folder, "*.tar.gz"))
    if not found:
        raise BadInput("pip has not downloaded math-verify's source archive; give it by --archive=")
    return found[0]


def cases_in(source):
    """
    The cases (truth, given, verdict) of a file of tests: of the tables of pytest.mark.parametrize
    that have these three columns, the rows that are plain values.
    """
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not ast.unparse(node.func).endswith("parametrize"):
            continue
        columns = ast.literal_eval(node.args[0])
        columns = columns.replace(" ", "").split(",") if isinstance(columns, str) else columns
        if columns not in (["gold", "pred", "expected"], ["gold", "pred", "result"]):
            continue
        for row in node.args[1].elts:
            try:
                truth, given, verdict = ast.literal_eval(row)
            except ValueError:  # an expression of Python
                continue
            if isinstance(truth, str) and isinstance(given, str):
                yield truth, given, int(verdict)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0].strip())
    parser.add_argument("--archive", help="math-verify's source archive; pip gets it if not given")
    archive = parser.parse_args().archive
    check_installed()
    with tempfile.TemporaryDirectory() as folder:
        try:
            with tarfile.open(archive or download(folder)) as tar:
                files = [f for f in sorted(tar.getnames()) if "/tests/" in f and f.endswith(".py")]
                cases = [case for f in files for case in cases_in(tar.extractfile(f).read())]
        except (OSError, tarfile.TarError) as e:
            raise BadInput(f"--archive={archive} cannot be read: {e}") from e
    if not cases:
        raise BadInput(f"--archive={archive}: there are no tests in it")

    batch = dict(rows=[dict(prompt="", answer=truth) for truth, _, _ in cases],
                 completions=[given for _, given, _ in cases], seconds=3600)
    print("| reward | of the same, called the same | of others, called others | right in all |")
    print("|---|---|---|---|")
    for name in ("accuracy", "math"):
        right = [int(said) == verdict for said, (_, _, verdict)
                 in zip(RULES[name](batch).tolist(), cases, strict=True)]
        same = [ok for ok, (_, _, verdict) in zip(right, cases, strict=True) if verdict]
        others = [ok for ok, (_, _, verdict) in zip(right, cases, strict=True) if not verdict]
        cells = [f"{sum(part)} of {len(part)}" for part in (same, others, right)]
        print(f"| `{name}` | {' | '.join(cells)} |")


if __name__ == "__main__":
    sys.excepthook = report_and_exit
    main()

"""What the README says of the repository is true: its map, the files and keys that it names, the limits that it promises."""
import glob
import os
import re

import pytest

from conftest import ROOT

with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as _f:
    README = _f.read()
SCRIPTS = sorted(os.path.relpath(p, ROOT) for p in glob.glob(os.path.join(ROOT, "*.py")))


def test_the_map_names_every_file():
    assert sorted(re.findall(r"^\| `(\w+\.py)` \|", README, re.MULTILINE)) == SCRIPTS


@pytest.mark.parametrize("path", sorted(set(re.findall(r"(?:config|data|runs|tests|assets)/[\w/.]*\.(?:py|sh|png)", README))))
def test_files_that_the_readme_names_exist(path):
    if "/mine/" not in path:
        assert os.path.exists(os.path.join(ROOT, path)), path


def test_imports_only_point_down_the_map():
    order = re.findall(r"^\| `(\w+)\.py` \|", README, re.MULTILINE)
    for number, name in enumerate(order):
        with open(os.path.join(ROOT, f"{name}.py"), encoding="utf-8") as f:
            imported = re.findall(r"^\s*(?:from|import) (\w+)", f.read(), re.MULTILINE)
        for other in set(imported) & set(order):
            assert order.index(other) > number, f"{name}.py imports {other}.py, which is not below it"


def test_every_logged_metric_is_explained():
    source = ""
    for script in ("ppo.py", "grpo.py"):
        with open(os.path.join(ROOT, script), encoding="utf-8") as f:
            source += f.read()
    logged = set(re.findall(r"\"((?:objective|policy|loss|val|mem)/[a-z_]+)\"", source))
    assert len(logged) > 15
    missing = {key for key in logged if f"`{key}`" not in README}
    assert not missing, missing


def test_nothing_private_is_in_the_repository():
    patterns = ("*.py", "*.md", "config/*.py", "data/*/*.py", "runs/*.sh")
    for path in (path for pattern in patterns for path in glob.glob(os.path.join(ROOT, pattern))):
        with open(path, encoding="utf-8") as f:
            assert not re.search(r"/(?:work|home|root|tmp)/", f.read()), path

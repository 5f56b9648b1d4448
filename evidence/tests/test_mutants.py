"""mutants.py is run by hand. Here: each of its lines still stands, and its tests are there."""
import ast
import os

from mutants import MUTANTS, ROOT, path_of


def test_each_mutant_can_be_made():
    """Its text stands once in its file, and what takes its place is Python."""
    for file, old, new, tests, chosen in MUTANTS:
        with open(os.path.join(ROOT, file), encoding="utf-8") as f:
            text = f.read()
        assert text.count(old) == 1 and chosen, (file, old)
        ast.parse(text.replace(old, new))
        assert os.path.exists(f"{ROOT}/{path_of(tests)}"), tests

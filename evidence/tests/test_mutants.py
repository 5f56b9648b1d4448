"""mutants.py is run by hand. Here: each of its lines still stands, and its tests are there."""
import ast
import os

import pytest
from mutants import MUTANTS, ROOT, path_of


@pytest.mark.parametrize("file, old, new, tests, chosen", MUTANTS)
def test_a_mutant_can_be_made(file, old, new, tests, chosen):
    """Its text stands once in its file, and what takes its place is Python."""
    with open(os.path.join(ROOT, file), encoding="utf-8") as f:
        text = f.read()
    assert text.count(old) == 1 and chosen
    ast.parse(text.replace(old, new))
    assert os.path.exists(f"{ROOT}/{path_of(tests)}")

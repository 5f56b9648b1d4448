"""The maintainers' tests: marked `long`, with tests/ and its helpers on the path."""
import os
import sys

import pytest

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def pytest_collection_modifyitems(items):
    for item in items:
        if "long" in item.path.parts:
            item.add_marker(pytest.mark.long)

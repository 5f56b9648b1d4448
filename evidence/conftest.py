"""The tests here have the path, the world and the hooks of tests/conftest.py."""
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.join(os.path.dirname(HERE), "tests"), os.path.join(HERE, "tests")]

from conftest import pytest_pyfunc_call, world  # noqa: E402, F401

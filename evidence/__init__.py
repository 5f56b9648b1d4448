"""A package, so that pytest tells its conftest.py from that of tests/."""

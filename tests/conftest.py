"""Shared by the tests: the repository on the path, one thread, and the process that forks runs, started early."""
import os
import sys


os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

import torch  # noqa: E402


torch.set_num_threads(1)


def pytest_collection_finish(session):
    """While other tests run, start the process that forks the runs of some."""
    if not session.config.option.collectonly and any(hasattr(item.module, "forked") for item in session.items):
        import tiny

        tiny.start_forker()

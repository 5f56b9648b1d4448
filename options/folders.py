"""Of a model whose weights lie in several files, or on the hub: what the list of files may name."""
import os

from configurator import read_json
from errors import BadInput


def check_index(path, config):
    """
    Raise BadInput where the list of a model's files of weights names others than safetensors in its
    own folder: transformers would read a pickle, or a file of another folder.
    """
    from transformers.utils import cached_file

    for name in "model.safetensors.index.json", getattr(config, "transformers_weights", None) or "":
        file = name.endswith(".json") and cached_file(
            path, name, _raise_exceptions_for_missing_entries=False)
        for part in set(read_json(file)["weight_map"].values()) if file else ():
            if not part.endswith(".safetensors") or os.path.isabs(part) or ".." in part.split("/"):
                raise BadInput(f"{file} names {part!r}, which is no file of safetensors in its "
                               "folder; convert the model with save_pretrained")

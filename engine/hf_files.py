"""
The files of a Hugging Face model: find_folder says where they are, tensor_files which tensors are
in them, read_tensors reads them. What is broken raises BadInput.
"""
import functools
import json
import math
import os
import re
from types import SimpleNamespace

import torch

from errors import BadInput, first_line


def find_folder(path):
    """A model's local folder: the path itself, or the hub's copy of that name. Raises BadInput."""
    if os.path.isdir(path):
        for product in ("policy", "reward_model"):
            if os.path.isfile(os.path.join(path, product, "config.json")):
                raise BadInput(f"{path}: this is the folder of a run, not of a model; type "
                               f"{os.path.join(path, product)}")
        if not os.path.isfile(os.path.join(path, "config.json")):
            raise BadInput(f"{path}: no config.json in this folder; it is not a saved model")
        return path
    could_be_hub_name = re.fullmatch(r"(?!out/)[\w-][\w.-]*(/[\w.-]+)?", path)
    if os.path.exists(path) or not could_be_hub_name:
        raise BadInput(f"{path}: no such model folder; train it first, or give a hub name such as "
                       "EleutherAI/pythia-1b")
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(path, allow_patterns=[
            "*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"])
        if not any(name.endswith(".safetensors") for name in os.listdir(folder)):
            # an old model has only pickled weights: see BinFile
            folder = snapshot_download(path, allow_patterns=["pytorch_model*.bin"])
        return folder
    except (OSError, ValueError) as e:  # no network, no such repository, not a valid name
        raise BadInput(f"{path}: no such folder here, and the hub did not give it: "
                       f"{str(e).splitlines()[0]}") from e


def read_json(file):
    """A JSON object from a file. Raises BadInput."""
    try:
        with open(file, encoding="utf-8") as f:
            value = json.load(f)
    except (OSError, ValueError, RecursionError) as e:  # RecursionError: nested too deep
        raise BadInput(f"{file}: {getattr(e, 'strerror', None) or e}") from e
    if not isinstance(value, dict):
        raise BadInput(f"{file}: wanted a JSON object, found {type(value).__name__}")
    return value


# --------------------------------------------------------------------------------------------------
# which tensors there are


def tensor_files(folder):
    """
    {tensor name: (file, shape, dtype as the file calls it)} of a folder's weights, without reading
    them. They are in one file, or in shards, which an index lists; safetensors come before pickled
    weights. Raises BadInput.
    """
    for name in ("model.safetensors", "pytorch_model.bin"):
        single = os.path.join(folder, name)
        index = os.path.join(folder, f"{name}.index.json")
        if os.path.isfile(index):
            return tensors_of_index(folder, index)
        if os.path.isfile(single):
            return {name: (single, *header) for name, header in read_headers(single).items()}
    raise BadInput(f"{folder}: no model.safetensors here, and no pytorch_model.bin; save or "
                   "download the model again")


def tensors_of_index(folder, index):
    """tensor_files of weights in shards; index: a file with "weight_map", {tensor name: shard}."""
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(shard, str) for shard in names.values()):
        raise BadInput(f"{index}: no weight_map in it, from tensors to files; download it again")
    headers = {}  # shard -> its tensors' shapes and dtypes
    for shard in sorted(set(names.values())):
        if not os.path.isfile(os.path.join(folder, shard)):
            raise BadInput(f"{folder}: shard {shard} is missing; download it again")
        headers[shard] = read_headers(os.path.join(folder, shard))
    for name, shard in names.items():
        if name not in headers[shard]:
            raise BadInput(f"{index}: tensor {name!r} is not in {shard}, as it says; download them "
                           "again")
    return {name: (os.path.join(folder, shard), *headers[shard][name])
            for name, shard in names.items()}


def read_headers(file):
    """{tensor name: (shape, dtype)} of a file of weights. Raises BadInput."""
    def use(f):
        slices = {name: f.get_slice(name) for name in f.keys()}
        return {name: (tuple(s.get_shape()), str(s.get_dtype())) for name, s in slices.items()}

    return read_tensors(file, use)


# --------------------------------------------------------------------------------------------------
# reading tensors


def read_tensors(file, use):
    """
    What `use` makes of an open file of weights. Read one tensor in a call: the file is opened anew
    in each, because the pages of a mapped file count as this process's memory as long as it is
    open. Raises BadInput.
    """
    from safetensors import SafetensorError, safe_open

    try:
        if file.endswith(".bin"):
            return use(open_bin(file))
        with safe_open(file, framework="pt") as f:
            return use(f)
    except (OSError, SafetensorError) as e:
        raise BadInput(f"{file}: not a readable safetensors file ({e}); save or download it "
                       "again") from e


class BinFile:
    """
    A pickled file of weights, as old models of the hub have it, with the methods of a safetensors
    file. torch's weights-only loader reads it, which runs no code from the file.
    """

    def __init__(self, file):
        try:
            try:
                tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError:  # written before torch 1.6: such a file cannot be mapped
                tensors = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as e:  # the unpickler raises anything on a damaged or hostile file
            raise BadInput(f"{file}: not a file of mere weights ({first_line(e)[:120]}); get the "
                           "model as safetensors") from e
        if not isinstance(tensors, dict) or not all(map(torch.is_tensor, tensors.values())):
            raise BadInput(f"{file}: not a dict of tensors; get the model as safetensors")
        self.keys, self.get_tensor = tensors.keys, tensors.__getitem__

    def get_slice(self, name):
        t = self.get_tensor(name)
        return SimpleNamespace(get_shape=lambda: t.shape, get_dtype=lambda: t.dtype)


# The last file is kept: one that cannot be mapped would be read whole for every tensor in it.
# load_weights clears this cache when it is done.
open_bin = functools.lru_cache(maxsize=1)(BinFile)


def check_dtype(dtype, file, name):
    """Raise BadInput for weights of other types: quantized ones mean nothing without scales."""
    good = ("F16", "BF16", "F32", "F64", "float16", "bfloat16", "float32", "float64")
    if dtype.removeprefix("torch.") not in good:
        raise BadInput(f"{file}: tensor {name!r} is of type {dtype}, wanted 16-, 32- or 64-bit "
                       "floating point; get the model as it was before it was quantized")


def check_numbers(tensor, dtype, file, name):
    """Raise BadInput if a tensor holds NaN, or numbers that are infinite in dtype, its new type."""
    low, high = (x.item() for x in tensor.aminmax())  # both NaN if one is there; takes no memory
    limit = torch.finfo(dtype).max
    if not (-limit <= low and high <= limit):
        found = "NaN" if math.isnan(low) else f"numbers from {low:g} to {high:g}"
        raise BadInput(f"{file}: tensor {name!r} holds {found}, not all of them finite in "
                       f"{str(dtype).removeprefix('torch.')}; save or download the model again")

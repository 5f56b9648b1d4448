"""
The files of a Hugging Face model: find_folder says where they are, tensor_files which tensors are
in them, read_tensors reads them. What is broken raises BadInput.

A model may be an adapter, in a folder of its own, on a base model, in another folder: model_folders
gives both.
"""
import functools
import json
import math
import os
import re
from types import SimpleNamespace

import torch

from engine.hf_config import check_fields, parse_config
from errors import BadInput, first_line

TOKENIZERS = ("tiktoken.json", "tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json")
WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # of whole models; the first that is there


# --------------------------------------------------------------------------------------------------
# where a model's files are


def several_paths(spec, key):
    """
    The folders or hub names of a key that may have several, with commas: "A,B" -> ["A", "B"].
    Raises BadInput where one is empty or there twice.
    """
    if os.path.exists(spec):
        return [spec]  # one folder, even if there is a comma in its name
    paths = [path.strip() for path in spec.split(",")]
    if not all(paths):
        raise BadInput(f"{key} = {spec!r}: a name between two commas is missing; wanted one "
                       "folder, or several such as A,B,C")
    for number, path in enumerate(paths):
        if any(same_folder(path, other) for other in paths[:number]):
            raise BadInput(f"{key}: {path!r} is given twice; keep one")
    return paths


def same_folder(path, other):
    """Whether two paths or hub names are the same: x and ./x are, and a link and where it leads."""
    if os.path.isdir(path) and os.path.isdir(other):
        return os.path.realpath(path) == os.path.realpath(other)
    return path == other


def find_folder(path, weights=False):
    """
    A model's local folder: the path itself, or the hub's copy of that name, with its weights only
    where they are wanted. Raises BadInput.
    """
    if os.path.isdir(path):
        for product in ("policy", "reward_model"):
            if os.path.isfile(os.path.join(path, product, "config.json")):
                raise BadInput(f"{path}: this is the folder of a run, not of a model; type "
                               f"{os.path.join(path, product)}")
        if not any(os.path.isfile(os.path.join(path, name)) for name in CONFIGS):
            raise BadInput(f"{path}: no config.json in this folder; it is not a saved model")
        return path
    could_be_hub_name = re.fullmatch(r"(?!out/)[\w-][\w.-]*(/[\w.-]+)?", path)
    if os.path.exists(path) or not could_be_hub_name:
        raise BadInput(f"{path}: no such model folder; train it first, or give a hub name such as "
                       "EleutherAI/pythia-1b")
    try:
        return download(path, weights)
    except BadInput:
        raise
    except (OSError, ValueError) as e:  # no network, no such repository, not a valid name
        raise BadInput(f"{path}: no such folder here, and the hub did not give it: "
                       f"{str(e).splitlines()[0]}") from e


CONFIGS = ("config.json", "adapter_config.json")  # of a whole model, of an adapter


def download(path, weights):
    """
    The hub's copy of a model, as a folder: first config.json alone, so that a model that quartet
    does not know is refused before anything else comes; then the other small files; then, where
    they are wanted, the weights that will be read. A repository may hold them several times over,
    in other formats and in folders. Raises BadInput, OSError or ValueError.
    """
    from huggingface_hub import snapshot_download

    def get(*names):
        return snapshot_download(path, allow_patterns=list(names), ignore_patterns=["*/*"])

    folder = get(*CONFIGS)
    config = os.path.join(folder, "config.json")
    if os.path.isfile(config):
        parse_config(read_json(config), f"{path}: config.json")
    folder = get("*.json", "*.txt", "*.model", "*.jinja")
    for name in WEIGHTS if weights else ():
        index = os.path.join(folder, f"{name}.index.json")
        names = set(weight_map(index).values()) if os.path.isfile(index) else [name]
        get(*names)
        if all(os.path.isfile(os.path.join(folder, name)) for name in names):
            return folder
    if weights and os.path.isfile(os.path.join(folder, "adapter_config.json")):
        get("adapter_model.safetensors")
    return folder


def is_adapter(folder):
    """Whether a folder holds an adapter, and no whole model's weights."""
    return os.path.isfile(os.path.join(folder, "adapter_config.json")) and not any(
        os.path.isfile(os.path.join(folder, name + index))
        for name in WEIGHTS for index in ("", ".index.json"))


def base_of(folder):
    """What the adapter in a folder was trained on: a path or a hub name. Raises BadInput."""
    file = os.path.join(folder, "adapter_config.json")
    settings = read_json(file)
    check_fields(settings, {"base_model_name_or_path": (str,)}, file)
    if not settings.get("base_model_name_or_path"):
        raise BadInput(f"{file}: it does not name the model that the adapter was trained on; write "
                       "its path or hub name as base_model_name_or_path")
    return settings["base_model_name_or_path"]


def model_folders(path, weights=True):
    """
    The folders that make a model, for a path or hub name: [folder] of a whole one; of an adapter
    its folder, and then its base model's, which may be an adapter as well. Raises BadInput.
    """
    folders = [find_folder(path, weights)]
    while is_adapter(folders[-1]):
        base = base_of(folders[-1])
        try:
            folder = find_folder(base, weights)
        except BadInput as e:
            raise BadInput(f"{folders[-1]} is an adapter, and the model that it was trained on "
                           "(base_model_name_or_path in its adapter_config.json) cannot be used: "
                           f"{e}") from e
        if any(same_folder(folder, known) for known in folders):
            raise BadInput(f"{folders[-1]}: its adapter_config.json names {base} as the model that "
                           "it was trained on, and that is the adapter itself")
        folders.append(folder)
    return folders


def tokenizer_folders(path):
    """
    (the folder of a model's tokenizer, the folder of its config.json), for a path or hub name. Of
    an adapter: its own tokenizer if it has one, else its base model's. Raises BadInput.
    """
    if os.path.isfile(os.path.join(path, "tiktoken.json")):
        folder = path
    else:
        folder = find_folder(path)
    if os.path.isfile(os.path.join(folder, "config.json")) or not is_adapter(folder):
        return folder, folder
    folders = model_folders(path, weights=False)
    for folder in folders:
        if any(os.path.isfile(os.path.join(folder, name)) for name in TOKENIZERS):
            break  # the first that has one; if none has, the base's will be missed
    return folder, folders[-1]


def read_file(file):
    """The bytes of a file. Raises BadInput."""
    try:
        with open(file, "rb") as f:
            return f.read()
    except OSError as e:
        raise BadInput(f"{file}: {e.strerror}") from e


def read_text(file):
    """The text of a file, without what Windows writes: CR at line ends, a mark. Raises BadInput."""
    try:
        return read_file(file).decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as e:
        raise BadInput(f"{file}: {e}") from e


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
    for name in WEIGHTS:
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
    names = weight_map(index)
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


def weight_map(index):
    """{tensor name: shard} of the index of weights in shards. Raises BadInput."""
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(shard, str) for shard in names.values()):
        raise BadInput(f"{index}: no weight_map in it, from tensors to files; download it again")
    return names


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

"""
The folders of models: a local folder, or the hub's copy of a name. And files that are read from
them; a broken file raises BadInput.
"""
import contextlib
import importlib
import json
import os
import re
import tempfile

from errors import BadConfig, BadInput, first_line


def several_paths(spec, key):
    """
    The folders or hub names of a key that may have several, with commas: "A,B" -> ["A", "B"].
    Raises BadInput where one is empty or comes twice.
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
    """Whether two paths or hub names are the same: x and ./x are, and a link and its target."""
    if os.path.isdir(path) and os.path.isdir(other):
        return os.path.realpath(path) == os.path.realpath(other)
    return path == other


def find_folder(path, weights=False):
    """
    A model's local folder: the path itself, or the hub's copy of that name. weights: with the
    weights. Raises BadInput.
    """
    if os.path.isdir(path):
        for product in ("policy", "reward_model"):
            if os.path.isfile(os.path.join(path, product, "config.json")):
                raise BadInput(f"{path}: this is the folder of a run, not of a model; type "
                               f"{os.path.join(path, product)}")
        if not any(os.path.isfile(os.path.join(path, name)) for name in CONFIGS):
            raise BadInput(f"{path}: no config.json in this folder; it is not a saved model")
        return path
    if not path:
        raise BadInput("the name of a model is empty; give its folder, or a hub name such as "
                       "EleutherAI/pythia-1b (--help lists the keys)")
    could_be_hub_name = re.fullmatch(r"(?!out/)[\w-][\w.-]*(/[\w.-]+)?", path)
    if os.path.exists(path) or not could_be_hub_name:
        how = prepare_hint(path) or ("; train it first, or give a hub name such as "
                                     "EleutherAI/pythia-1b")
        raise BadInput(f"{path}: no such model folder{how}")
    from huggingface_hub import snapshot_download

    wanted = ["*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja"] + ["*.safetensors"] * weights
    try:
        # files in subfolders are other formats of the same weights
        return snapshot_download(path, allow_patterns=wanted, ignore_patterns=["*/*"])
    except (OSError, ValueError) as e:  # no network, no such repository, not a valid name
        raise BadInput(f"{path}: no such folder here, and the hub did not give it: "
                       f"{str(e).splitlines()[0]}") from e


CONFIGS = ("config.json", "adapter_config.json")  # of a whole model, of an adapter


def prepare_hint(path):
    """Advice where a file or folder of quartet's own data is not there; "" for one of a user's."""
    found = re.fullmatch(r"(?:\./)?(data/\w+)/(pairs_)?[^/]+", path)
    script = found and f"{found[1]}/{'pairs' if found[2] else 'prepare'}.py"
    return f"; type python {script}" if script and os.path.isfile(script) else ""


def model_folders(path, weights=True):
    """
    The folders of a model, for a path or hub name: [folder] of a whole model; of an adapter its
    folder, and then its base model's, which may be an adapter, too. Raises BadInput.
    """
    folders = [find_folder(path, weights)]
    while not os.path.isfile(os.path.join(folders[-1], "config.json")):
        file = os.path.join(folders[-1], "adapter_config.json")
        base = read_json(file).get("base_model_name_or_path")
        if not isinstance(base, str) or not base:
            raise BadInput(f"{file}: it does not name the model that the adapter was trained on; "
                           "write its path or hub name as base_model_name_or_path")
        try:
            folders.append(find_folder(base, weights))
        except BadInput as e:
            raise BadInput(f"{folders[-1]} is an adapter, and the model that it was trained on "
                           f"(base_model_name_or_path in {file}) cannot be used: {e}") from e
        if len(folders) > 10:
            raise BadInput(f"{folders[0]}: its adapter_config.json leads in a circle")
    return folders


def read_file(file):
    """The bytes of a file. Raises BadInput."""
    try:
        with open(file, "rb") as f:
            return f.read()
    except OSError as e:
        raise BadInput(f"{file}: {e.strerror}") from e


def read_text(file):
    """The text of a file, without Windows' CR at line ends and its mark. Raises BadInput."""
    try:
        return read_file(file).decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as e:
        raise BadInput(f"{file}: {e}") from e


def read_json(file):
    """A JSON object from a file. Raises BadInput."""
    try:
        value = json.loads(read_text(file))
    except (ValueError, RecursionError) as e:  # RecursionError: nested too deep
        raise BadInput(f"{file}: {e}") from e
    if not isinstance(value, dict):
        raise BadInput(f"{file}: wanted a JSON object, found {type(value).__name__}")
    return value


# --------------------------------------------------------------------------------------------------
# a model's folder is data: nothing in it is run, and it cannot make anything be fetched

# keys of a config.json for which transformers would fetch or run something, or read another file
FETCHING = ("attn_implementation", "experts_implementation", "auto_map", "attribute_map",
            "backbone", "configuration_files", "fusion_config", "kernel_config",
            "transformers_weights")


def plain(value):
    """A value of a config.json without such keys, private ones and names of methods, all nested."""
    from transformers import PretrainedConfig

    if isinstance(value, list):
        return [plain(x) for x in value]
    if not isinstance(value, dict):
        return value
    many = value.get("num_labels") not in (None, *range(1000))  # transformers would name each label
    return {key: plain(x) for key, x in value.items() if key not in FETCHING and key[:1] != "_"
            and not callable(getattr(PretrainedConfig, key, None))
            and not (many and key == "num_labels")}


@contextlib.contextmanager
def data_alone(folder, weights=False):
    """
    A folder for transformers, with a model's config.json as `plain` leaves it and links to its
    weights (weights=True), and no other file: transformers would also read an adapter there. Raises
    BadInput, also where the block fails.
    """
    with tempfile.TemporaryDirectory(prefix="model-") as room:
        with open(os.path.join(room, "config.json"), "w", encoding="utf-8") as f:
            json.dump(plain(read_json(os.path.join(folder, "config.json"))), f)
        for name in weight_files(folder) if weights else ():
            os.symlink(os.path.abspath(os.path.join(folder, name)), os.path.join(room, name))
        try:
            yield room
        except Exception as e:  # for bad words and numbers transformers raises anything
            words = first_line(e).replace(room, folder)
            raise BadInput(f"{folder}: transformers cannot load it by its config.json: {words}"
                           ) from e


def weight_files(folder):
    """The names of the files with a model's weights, and of their index. Raises BadInput."""
    name, index = "model.safetensors", "model.safetensors.index.json"
    if os.path.isfile(os.path.join(folder, name)):
        return [name]
    if not os.path.isfile(os.path.join(folder, index)):
        raise BadInput(f"{folder}: no weights as safetensors in this folder, and pickled weights "
                       "are not read; save the model again with transformers' save_pretrained")
    places = read_json(os.path.join(folder, index)).get("weight_map")
    names = set(map(str, places.values())) if isinstance(places, dict) else [""]
    if not all(re.fullmatch(r"[^/]+\.safetensors", name) for name in names):
        raise BadInput(f"{os.path.join(folder, index)}: its weight_map must name safetensors files "
                       "of this folder")
    return [index, *names]


def optional_package(name, key):
    """A package for some runs only. Raises BadConfig where it is missing. key: that needs it."""
    try:
        return importlib.import_module(name)
    except ImportError as e:
        raise BadConfig(f"{key} needs the package {name}: pip install {name}") from e

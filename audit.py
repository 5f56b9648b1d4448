"""
The audit: are the weights the same on all ranks, finite, and, if frozen, unchanged? And on the
disk: are checkpoints as they were saved, and frozen models as they were when the run began?
"""
import contextlib
import hashlib
import os
import re
from concurrent.futures import ThreadPoolExecutor

import torch

import parallel
from configurator import read_json
from errors import BadInput, Stop


def audit(models, frozen, iteration):
    """
    A collective: raise Stop, on all ranks, unless all ranks have the same finite parameters, and
    the frozen ones still have their first checksums: frozen, {(model, parameter): checksum}, filled
    here. A rank's part of a sharded parameter must be finite and, if it is frozen, unchanged.
    """
    names, rows = [], []
    for model_name, model in models.items():
        for name, p in model.named_parameters():
            part = parallel.my_part(p.detach())
            mine = int(checksum(part))
            changed = not p.requires_grad and frozen.setdefault((model_name, name), mine) != mine
            compared = 0 if parallel.is_shard(p) else mine
            # ~x reverses the order of integers, so the largest ~x is ~(the smallest x). -x would be
            # wrong, because the smallest int64 has no negative
            rows.append([compared, ~compared, int(not part.isfinite().all()), int(changed)])
            names.append(f"{model_name}, parameter {name}")
    mine = torch.tensor(rows, device=parallel.wire())  # (parameters, 4)
    largest, smallest, infinite, changed = parallel.all_reduce_max(  # COLLECTIVE
        mine.clone()).unbind(1)
    for bad, what, column in (
            (largest != ~smallest, "the ranks have drifted apart: {} differs on {}", 0),
            (infinite > 0, "{} is not finite on {}", 2),
            (changed > 0, "the frozen {} has changed on {}: it is not what it was", 3)):
        if bad.any():
            i = int(bad.nonzero()[0])
            values = parallel.all_gather(mine[i, column])  # COLLECTIVE
            values = torch.stack(values).tolist()
            common = max(values, key=values.count) if column == 0 else 0
            odd = [rank for rank, value in enumerate(values) if value != common]
            if column == 0 and 2 * len(odd) >= len(values):  # no majority: any may be the odd one
                odd = range(len(values))
            who = " and ".join(f"rank {rank}" for rank in odd)
            raise Stop(f"iteration {iteration}: {what.format(names[i], who)} ({int(bad.sum())} "
                       "parameters in all); the last checkpoint is good")


def checksum(t):
    """
    The sum of (2 i + 1) * word i over the words of a tensor's memory, an int64 that wraps around.
    Integers, because only equal bits are the same weights: NaN != NaN and 0.0 == -0.0. The factors
    differ, so that the order counts, and are odd, so that a change of one word always changes the
    sum: an odd factor has an inverse modulo 2**64.
    """
    words = t.flatten().view({1: torch.uint8, 2: torch.int16}.get(t.element_size(), torch.int32))
    total, first = torch.zeros((), dtype=torch.int64, device=words.device), 0
    for chunk in words.split(2**20):  # int64 copies of a chunk, not of a whole embedding matrix
        i = torch.arange(first, first + len(chunk), device=words.device)
        total += (chunk.long() * (i * 2 + 1)).sum()
        first += len(chunk)
    return total


def damage(folder):
    """A folder's damage in a few words; None if every file is as it was saved."""
    try:
        found, manifest = hashes(folder), read_json(os.path.join(folder, "manifest.json"))
    except (OSError, ValueError) as e:
        return f"a file is damaged, or its manifest.json missing: {e}"
    odd = [name for name in manifest if manifest[name] != found.get(name)]
    return f"{odd[0]} is missing or damaged" if odd else None


def same_weights(frozen, state, out_dir):
    """
    The state of a checkpoint, or {}, with the hashes of the models frozen, {path: name}. Raises
    BadInput where one is another than in the state: the run would go on with another reference.
    """
    before = state.get("weights", {})  # a checkpoint of an older version has none
    now = {path: hash_of_model(path) for path in frozen}
    for path in now:
        if (before.get(path) or now[path]) != now[path]:
            raise BadInput(f"{frozen[path]}: {path} has other weights than when the run in "
                           f"{out_dir} began; put those back, or choose another --out_dir")
    return state | dict(weights=now)


def hash_of_model(path):
    """A hash of a model's weights and settings in its files; None where they are not here."""
    if not os.path.isdir(path):  # a name on the hub
        from huggingface_hub import try_to_load_from_cache

        with contextlib.suppress(ValueError):  # of a wrong name: it is refused where it is loaded
            file = try_to_load_from_cache(path, "config.json")
            return hash_of_model(os.path.dirname(file)) if isinstance(file, str) else None
        return None
    found = hashes(path, r"[^/]+\.safetensors|config\.json")
    if os.path.isfile(os.path.join(path, "adapter_config.json")):
        from options.lora import base_of

        found["base"] = hash_of_model(base_of(path))
    return hashlib.sha256(str(found).encode()).hexdigest()


def hashes(folder, names=".*"):
    """
    {file: sha256} of the files of a folder whose names match; several at a time. Raises OSError for
    a pipe.
    """
    files = sorted(os.path.relpath(os.path.join(d, f), folder)
                   for d, _, found in os.walk(folder) for f in found)
    files = list(filter(re.compile(names).fullmatch, files))

    def sha256(name):
        if not os.path.isfile(os.path.join(folder, name)):  # reading it would never end
            raise OSError(f"{name} is no plain file")
        with open(os.path.join(folder, name), "rb") as f:
            return hashlib.file_digest(f, "sha256").hexdigest()

    with ThreadPoolExecutor(8) as pool:
        return dict(zip(files, pool.map(sha256, files), strict=True))

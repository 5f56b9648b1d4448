"""
Save and resume. A checkpoint is a folder out_dir/checkpoint-000120 of safetensors and JSON: each trained model as a Hugging
Face directory, or only its adapter and head where that is what is trained, its optimizer's state, state.json, the run's
config.json, and manifest.json with the sha256 of every file. It is written under a temporary name, synced and renamed, so under
its final name it is complete; the old one goes only after that. No pickle. What ranks hold parts of is put together first, so a
run resumes at any other stage and on any number of ranks.

checkpoint-000120 means: 120 iterations are done, number 120 (counting from 0) comes next. Prompts and sampling noise are
functions of the iteration, so there is no random state to save.
"""
import hashlib
import json
import os
import re
import shutil
from functools import partial

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from engine.adapters import Adapted, load_adapter, save_adapter
from engine.disk import patiently, put_in_place, read_bytes, remove, sha256, sync, write_json
from engine.optimizers import fill_optimizer, optimizer_tensors
from engine.placement import trunk_of, whole_weights
from engine.pretrained import load_weights, save_pretrained
from engine.run_log import cut_log
from engine.together import alone, together
from errors import BadInput
from parallel import rank_and_size


def save_checkpoint(out_dir, iteration, models, optimizers, state, tokenizer, keep, average=None):
    """
    Write out_dir/checkpoint-{iteration}. models, optimizers: {name: module}, {name: optimizer}; state: a dict for JSON, what
    the loop needs to go on. keep: how many checkpoints to leave. average: the policy's moving average, if there is one. Rank 0
    writes, the others wait. Raises Stop, on all ranks, when the disk is full; what was there before then still is.
    """
    final = os.path.join(out_dir, f"checkpoint-{iteration:06d}")
    pieces = []  # one after the other, so that rank 0 never has more than one of them whole
    for name, model in models.items():
        if isinstance(model, Adapted):
            pieces.append((None, lambda folder, _, name=name, model=model: save_adapter(model, os.path.join(folder, name))))
        else:
            pieces.append((partial(whole_weights, model), lambda folder, weights, name=name, model=model:
                           save_model(os.path.join(folder, name), model, tokenizer, weights)))
        pieces.append((partial(optimizer_tensors, model, optimizers[name]), lambda folder, tensors, name=name:
                       save_file(tensors, os.path.join(folder, f"{name}_optimizer.safetensors"))))
    if average:
        pieces.append((average.tensors, lambda folder, tensors: save_file(tensors, os.path.join(folder, "ema.safetensors"))))

    def close(folder, _):
        shutil.copyfile(os.path.join(out_dir, "config.json"), os.path.join(folder, "config.json"))
        write_json(os.path.join(folder, "state.json"), {**state, "iteration": iteration})
        files = sorted(os.path.relpath(os.path.join(d, f), folder) for d, _, fs in os.walk(folder) for f in fs)
        manifest = {f: sha256(os.path.join(folder, f)) for f in files}
        write_json(os.path.join(folder, "manifest.json"), manifest | {"manifest.json": self_hash(manifest)})
        sync(os.path.join(out_dir, "log.jsonl"))  # what came before the checkpoint must be as durable as it is

    def drop_old():
        # of a later number there are only damaged ones, or we would have resumed from them
        folders = list_checkpoints(out_dir)
        kept = [f for f in folders if number_of(f) <= iteration][-keep:]
        for old in set(folders) - set(kept):
            remove(old)

    def is_there():  # then we have resumed from it, and nothing has happened since but, perhaps, an evaluation
        if damage(final) is not None:
            return False
        return json.loads(patiently(read_bytes, os.path.join(final, "state.json"))) == {**state, "iteration": iteration}

    if not alone(is_there):
        put_in_place([*pieces, (None, close)], final)
    alone(drop_old)


def save_model(folder, model, tokenizer, weights=None):
    """A Hugging Face directory with its tokenizer: what sample.py, transformers and the next script load."""
    save_pretrained(model, folder, weights)
    tokenizer.save(folder)
    if model.head == "lm":
        write_json(os.path.join(folder, "generation_config.json"),
                   {"eos_token_id": sorted(tokenizer.eos_ids), "pad_token_id": tokenizer.pad_id})


def save_final(out_dir, name, model, tokenizer):
    """
    out_dir/name, the run's product, put in place whole; adapters merged into it, and beside it, in out_dir/name_adapter, alone.
    Rank 0 writes. Raises Stop, on all ranks, when the disk is full.
    """
    final = os.path.join(out_dir, name)
    put_in_place([(partial(whole_weights, model), lambda folder, weights: save_model(folder, model, tokenizer, weights))], final)
    if isinstance(model, Adapted) and model.layers:
        base = getattr(trunk_of(model), "path", "")
        put_in_place([(None, lambda folder, _: save_adapter(model, folder, base))], f"{final}_adapter")
        if rank_and_size()[0] == 0 and model.embed.weight.dtype.itemsize == 2:
            size = os.path.getsize(os.path.join(final, "model.safetensors")) / 2**30
            print(f"{final} is merged in float32 ({size:.2f} GiB), as 16 bits would round small "
                  f"changes away; {name}_adapter beside it is the adapter alone")


def list_checkpoints(out_dir):
    """The checkpoint folders of a run, oldest first."""
    try:
        names = patiently(os.listdir, out_dir)
    except FileNotFoundError:
        return []
    names = sorted((name for name in names if re.fullmatch(r"checkpoint-\d{6,}", name)), key=number_of)
    return [os.path.join(out_dir, name) for name in names]


def number_of(folder):
    """The iteration in a checkpoint's name."""
    return int(folder.rpartition("-")[2])


def self_hash(manifest):
    """What manifest.json says of itself, so that it cannot be damaged unnoticed either."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def damage(folder):
    """
    None if a checkpoint's files are, byte for byte, what was saved; else what is wrong, in a few words. Raises Stop if they
    cannot be read, which is another matter.
    """
    name = "manifest.json"
    try:
        text = patiently(read_bytes, os.path.join(folder, name))
        manifest = json.loads(text)
        if not isinstance(manifest, dict) or text != json.dumps(manifest, indent=2).encode() \
                or manifest.pop(name, None) != self_hash(manifest):
            return "its manifest.json is damaged"
        for name, digest in manifest.items():
            if patiently(sha256, os.path.join(folder, name)) != digest:
                return f"{name} is damaged"
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return f"{name} is missing"
    except (ValueError, RecursionError):
        return "its manifest.json is damaged"
    return None


def find_checkpoint(out_dir):
    """
    (folder, state) of the newest checkpoint whose files are what its manifest says; (None, None) if the run has none at all.
    Says which it skips. Raises BadInput where there are some and none is good, for to begin again would lose what they hold,
    and Stop where one cannot be read.
    """
    refused = []
    for folder in reversed(list_checkpoints(out_dir)):
        reason = damage(folder)
        if reason is None:
            for bad, why in refused if rank_and_size()[0] == 0 else ():
                print(f"{bad} is refused ({why}); an older one is used, and this one stays until the next is saved", flush=True)
            return folder, json.loads(patiently(read_bytes, os.path.join(folder, "state.json")))
        refused.append((folder, reason))
    if refused:
        said = ", ".join(f"{os.path.basename(folder)} ({reason})" for folder, reason in refused)
        raise BadInput(f"none of the checkpoints in {out_dir} is good: {said}; restore one from a backup, or start over with "
                       "another --out_dir (or here, after you have deleted them and log.jsonl)")
    return None, None


def load_checkpoint(folder, models, optimizers, average=None):
    """
    Fill {name: model} and {name: optimizer}, and the moving average, from a checkpoint folder, and cut the run's log back to
    it when all ranks have. Raises BadInput, or Stop.
    """
    together(lambda: fill(folder, models, optimizers, average))
    alone(lambda: cut_log(os.path.dirname(folder), number_of(folder)))


def fill(folder, models, optimizers, average):
    """load_checkpoint on this rank."""
    for name, model in models.items():
        if isinstance(model, Adapted):
            load_adapter(model, os.path.join(folder, name))
        else:
            load_weights(model, folder, os.path.join(folder, name))
        use_state(os.path.join(folder, f"{name}_optimizer.safetensors"),
                  lambda tensors, name=name, model=model: fill_optimizer(model, optimizers[name], tensors))
    file = os.path.join(folder, "ema.safetensors")
    if average and os.path.exists(file):
        use_state(file, average.fill)
    elif average:  # the run had none so far: it begins with these weights
        average.begin()


def use_state(file, use):
    """use({name: tensor}) of a checkpoint's safetensors file. Raises BadInput."""
    try:
        with safe_open(file, framework="pt") as f:
            use({key: f.get_tensor(key) for key in f.keys()})
    except OSError as e:
        raise BadInput(f"{file}: cannot be read ({e}); see to the disk, and resume with the same command") from e
    except (SafetensorError, AttributeError, KeyError) as e:
        raise BadInput(f"{file}: does not fit what is trained here ({e}); resume with the model and the "
                       "code that saved it") from e

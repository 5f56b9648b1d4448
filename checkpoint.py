"""
Save and resume. A checkpoint is a folder out_dir/checkpoint-000120 of safetensors and JSON: each trained model as a Hugging
Face directory, its optimizer's state, state.json, and manifest.json with the sha256 of every file. It is written under a
temporary name, synced and renamed, so under its final name it is complete; the old one goes only after that. No pickle.

checkpoint-000120 means: 120 iterations are done, number 120 (counting from 0) comes next. Prompts and sampling noise are
functions of the iteration, so there is no random state to save.
"""
import glob
import hashlib
import json
import os
import shutil

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from configurator import BadInput
from model import Transformer
from parallel import rank_and_size


def save_checkpoint(out_dir, iteration, models, optimizers, state, tokenizer, keep):
    """
    Write out_dir/checkpoint-{iteration}. models, optimizers: {name: module}, {name: optimizer}; state: a dict for JSON, what
    the loop needs to go on. keep: how many checkpoints to leave. Rank 0 writes, the others wait.
    """
    if rank_and_size()[0] == 0:
        final = os.path.join(out_dir, f"checkpoint-{iteration:06d}")
        folder = os.path.join(out_dir, f".tmp-{os.path.basename(final)}")
        shutil.rmtree(folder, ignore_errors=True)
        for name, model in models.items():
            save_model(os.path.join(folder, name), model, tokenizer)
            save_file(optimizer_tensors(model, optimizers[name]), os.path.join(folder, f"{name}_optimizer.safetensors"))
        write_json(os.path.join(folder, "state.json"), {"iteration": iteration, **state})
        files = sorted(os.path.relpath(os.path.join(d, f), folder) for d, _, fs in os.walk(folder) for f in fs)
        write_json(os.path.join(folder, "manifest.json"), {f: sha256(os.path.join(folder, f)) for f in files})
        put_in_place(folder, final)
        # of a later number there are only damaged ones, or we would have resumed from them
        folders = list_checkpoints(out_dir)
        kept = [f for f in folders if os.path.basename(f) <= os.path.basename(final)][-keep:]
        for old in set(folders) - set(kept):
            shutil.rmtree(old)
    if dist.is_initialized():
        dist.barrier()


def save_model(folder, model, tokenizer):
    """A Hugging Face directory with its tokenizer: what sample.py, transformers and the next script load."""
    model.save_pretrained(folder)
    tokenizer.save(folder)
    if model.head == "lm":
        write_json(os.path.join(folder, "generation_config.json"),
                   {"eos_token_id": sorted(tokenizer.eos_ids), "pad_token_id": tokenizer.pad_id})


def save_final(out_dir, name, model, tokenizer):
    """out_dir/name, the run's product, put in place whole. Rank 0 writes."""
    if rank_and_size()[0] == 0:
        folder = os.path.join(out_dir, f".tmp-{name}")
        shutil.rmtree(folder, ignore_errors=True)
        save_model(folder, model, tokenizer)
        put_in_place(folder, os.path.join(out_dir, name))


def put_in_place(folder, final):
    """Sync every file of folder to disk, then give it its final name. What had that name before is moved aside first."""
    for d, _, files in os.walk(folder):
        for f in files:
            sync(os.path.join(d, f))
        sync(d)
    old = None
    if os.path.exists(final):  # a folder cannot be renamed onto another
        old = os.path.join(os.path.dirname(final), f".old-{os.path.basename(final)}")
        shutil.rmtree(old, ignore_errors=True)
        os.rename(final, old)
    os.rename(folder, final)
    sync(os.path.dirname(final) or ".")
    if old:
        shutil.rmtree(old)


def sync(path):
    """fsync a file or folder."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_json(path, value):
    """Write a JSON file whole: other ranks may be reading the old one."""
    with open(path + ".tmp", "w", encoding="utf-8") as f:
        json.dump(value, f, indent=2)
    os.replace(path + ".tmp", path)


def sha256(path):
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def optimizer_tensors(model, optimizer):
    """{parameter.key: tensor} of an optimizer's state, by the parameters' names rather than their numbers."""
    return {f"{name}.{key}": value.detach().cpu().contiguous().clone()
            for name, p in model.named_parameters() for key, value in optimizer.state[p].items()}


def list_checkpoints(out_dir):
    """The checkpoint folders of a run, oldest first."""
    return sorted(glob.glob(os.path.join(glob.escape(out_dir), "checkpoint-" + 6 * "[0-9]")))


def find_checkpoint(out_dir):
    """(folder, state) of the newest checkpoint whose files are what its manifest says, or (None, None). Says what it skips."""
    for folder in reversed(list_checkpoints(out_dir)):
        try:
            with open(os.path.join(folder, "manifest.json"), encoding="utf-8") as f:
                manifest = json.load(f)
            if not isinstance(manifest, dict) or "state.json" not in manifest:
                raise ValueError("its manifest.json is damaged")
            bad = [name for name, digest in manifest.items() if sha256(os.path.join(folder, name)) != digest]
            if not bad:
                with open(os.path.join(folder, "state.json"), encoding="utf-8") as f:
                    return folder, json.load(f)
            reason = f"{bad[0]} is damaged"
        except (OSError, ValueError) as e:
            reason = getattr(e, "strerror", None) or str(e)
        if rank_and_size()[0] == 0:
            print(f"{folder} is refused ({reason}); looking for an older one")
    return None, None


def load_checkpoint(folder, models, optimizers):
    """Fill {name: model} and {name: optimizer} from a checkpoint folder."""
    for name, model in models.items():
        saved = Transformer.from_pretrained(os.path.join(folder, name), head=model.head,
                                            dtype=next(model.parameters()).dtype)
        with torch.no_grad():
            for p, q in zip(model.parameters(), saved.parameters(), strict=True):
                p.copy_(q)
        del saved
        file = os.path.join(folder, f"{name}_optimizer.safetensors")
        try:
            with safe_open(file, framework="pt") as f:
                for key in f.keys():
                    parameter, _, kind = key.rpartition(".")
                    p = model.get_parameter(parameter)
                    # clone: a tensor of the file's map may lie unaligned in memory, which changes the last bits of a sum
                    optimizers[name].state[p][kind] = f.get_tensor(key).clone().to(p.device)
        except (OSError, SafetensorError, AttributeError) as e:
            raise BadInput(f"{file}: cannot be read ({e}); delete {folder} to resume from an older checkpoint") from e


# ---------------------------------------------------------------------------------------------------------------------
# the run's folder: config.json and log.jsonl


def open_run(out_dir, config, must_match):
    """
    Create out_dir, or check that it belongs to this run: a config.json whose must_match keys differ is another run's.
    Returns (folder, state) of the checkpoint to resume from, or (None, None). Raises BadInput.
    """
    file = os.path.join(out_dir, "config.json")
    folder, state = find_checkpoint(out_dir)
    log = os.path.join(out_dir, "log.jsonl")
    if folder or os.path.exists(file) and os.path.exists(log) and os.path.getsize(log):
        try:
            with open(file, encoding="utf-8") as f:
                before = json.load(f)
        except (OSError, ValueError) as e:
            raise BadInput(f"{file}: unreadable, so this run cannot be resumed safely; choose another --out_dir") from e
        for key in must_match:
            if before.get(key) != config[key]:
                raise BadInput(f"{out_dir} holds a run with {key} = {before.get(key)!r}, not {config[key]!r}; "
                               "choose another --out_dir, or delete the old run")
    if rank_and_size()[0] == 0:
        try:
            os.makedirs(out_dir, exist_ok=True)
            write_json(file, config)
        except OSError as e:
            raise BadInput(f"out_dir {out_dir!r} cannot be written: {e.strerror}") from e
        cut_log(out_dir, state["iteration"] if state else 0)
    return folder, state


def cut_log(out_dir, iteration):
    """Drop what log.jsonl says of this and later iterations: they will be run again."""
    file = os.path.join(out_dir, "log.jsonl")
    kept = []
    if os.path.exists(file):
        with open(file, encoding="utf-8", errors="replace") as f:
            for line in f:
                try:
                    if json.loads(line)["iteration"] < iteration:
                        kept.append(line.rstrip("\n") + "\n")
                except (ValueError, KeyError, TypeError):  # a line cut short by a kill
                    continue
    with open(file + ".tmp", "w", encoding="utf-8") as f:
        f.writelines(kept)
    os.replace(file + ".tmp", file)


def write_log(out_dir, record):
    """Append one iteration's object to log.jsonl."""
    if rank_and_size()[0] == 0:
        with open(os.path.join(out_dir, "log.jsonl"), "a", encoding="utf-8") as f:
            f.write(json.dumps(record) + "\n")

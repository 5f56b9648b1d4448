"""
What a run leaves on the disk, and how it resumes from there: a kill at any moment does no harm.

    out_dir/config.json                the configuration of the run, and a hash of its token ids
    out_dir/log.jsonl, samples.jsonl   one line an iteration; responses of evaluations
    out_dir/policy, value_model        at the end: the trained models, as transformers saves them
    out_dir/checkpoint-000120/     120 iterations are done; number 120 (they count from 0) is next
        policy/                    each trained model: the parameters that are trained, by name;
                                   if these are all, transformers loads the folder
        policy_optimizer.safetensors       its optimizer's state (large tensors: several files)
        ema.safetensors            the policy's moving average, if there is one
        batches.safetensors        the batches that are sampled ahead, if there are any
        state.json                 the numbers that go from one iteration to the next, and hashes
                                   of the models that are not trained
        config.json                as above
        manifest.json              the sha256 of every file

There is no random state to save, and no pickle. A folder gets its name only when all its files are
complete and synced, and the older checkpoint is deleted only after that. Rank 0 writes whole
tensors, so a run may resume with another ZeRO stage or number of ranks.
"""
import contextlib
import fcntl
import glob
import hashlib
import json
import math
import os
import re
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial, reduce
from pathlib import Path

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

import parallel
from configurator import read_json, write_json, write_text
from errors import BadInput, Stop, mistake, optional, say
from parallel import alone

FILE_BYTES = 5 * 10**9  # the largest file of tensors, unless a single tensor is larger
LOCK_WAIT = 30  # seconds: the time in which a run that was asked to stop can save
LOGS = "log.jsonl", "samples.jsonl", "rollouts.jsonl"
# keys of all scripts that must be the same when a run resumes
MUST_MATCH = "lora", "share_base", "optim", "ref_path", "staleness"
# all names that a run writes, replaces or deletes in out_dir; it touches no others
OURS = (r"(\.(tmp|old|gone)-)?(checkpoint-\d{6,}|((best_|ema_)?policy|value_model|reward_model|%s)"
        r"(_adapter)?)|\.new-\w+|config\.json|(log|samples|rollouts)\.jsonl")  # %s: those of a fork
lock_file = None  # open, and so locked, until this process ends


def open_folder(out_dir, config, must_match, token_ids, max_iters, models, trained):
    """
    A collective: create out_dir and lock it, or check that it has the same run: the same values of
    the keys must_match, the same token_ids (a hash of all that the run trains on), and the same
    weights of the models, {name: Model}, that are not in trained. Returns (folder, state) of the
    checkpoint to resume from; folder is None if there is none. The state may also have "run/over",
    if the run has ended, and "run/evaluated", see cut_logs. Raises BadInput.
    """
    frozen = {getattr(model, "folder", model.path): name for name, model in models.items()
              if name not in trained}
    frozen |= {path: key for key, path in paths_in(config, ("judge_path", "teacher"))}
    begun = alone(lambda: begin_or_resume(  # COLLECTIVE
        out_dir, config | dict(token_ids=token_ids), [*must_match, *MUST_MATCH, "token_ids"],
        max_iters, frozen, list(trained)))
    if parallel.rank_and_size()[1] > 1:
        optional("mistakes.check_disk")(out_dir)  # COLLECTIVE
    return begun


def begin_or_resume(out_dir, config, must_match, max_iters, frozen=(), trained=()):
    """open_folder, on rank 0."""
    contents_of(out_dir, config, trained)  # refused before anything is written
    os.makedirs(out_dir, exist_ok=True)
    lock(out_dir)
    before, names = contents_of(out_dir, config, trained)  # again: another may have had the lock
    unfinished = [name for name in names if name[0] == "."]  # of a save that was killed
    for name in unfinished:
        final = os.path.join(out_dir, name.partition("-")[2])
        if name.startswith(".old-") and not os.path.lexists(final):  # killed between two renamings
            os.rename(os.path.join(out_dir, name), final)
    folder, state = find_checkpoint(out_dir)
    if folder or {*names} - {*unfinished, "config.json"}:  # otherwise nothing can be lost
        before = dict(script=config["script"]) | before
        for key in ("script", *must_match):
            if (before.get(key) or "") != (config.get(key) or ""):
                raise mistake("another_run", out_dir, key, before, config)
        if not folder:
            say(f"{out_dir} has no checkpoint: the run begins anew")
    if state["iteration"] > max_iters:
        raise BadInput(f"max_iters = {max_iters}, but {folder} is there; type a larger "
                       "--max_iters, or another --out_dir")
    saved = state.get("run/weights", {})
    state["run/weights"] = {p: hash_of_model(p) for p in frozen}
    for path, weights in state["run/weights"].items():
        if (saved.get(path) or weights) != weights:  # such as another reference
            raise BadInput(f"{frozen[path]}: {path} has other weights than when the run in "
                           f"{out_dir} began; put those back, or choose another --out_dir")
    if folder and optional("again.compare_keys")(
            out_dir, folder, config, state, max_iters, trained):
        return folder, state | {"run/over": True}
    for name in unfinished:
        remove(os.path.join(out_dir, name))
    evaluated = cut_logs(out_dir, state["iteration"])
    write_json(os.path.join(out_dir, "config.json"), config)
    return folder, state | ({"run/evaluated": evaluated} if evaluated else {})


def contents_of(out_dir, config, trained=("policy",)):
    """
    (config of the run in out_dir or {}, names of all that it has written). Raises BadInput where
    such names are no run's, or where this run would replace its own models or data.
    """
    before, top, ours = {}, os.path.realpath(out_dir), re.compile(OURS % "|".join(trained))
    there = {*(os.listdir(top) if os.path.isdir(top) else ())} - {".lock"}
    names = sorted(filter(ours.fullmatch, there))
    with contextlib.suppress(FileNotFoundError, ValueError, RecursionError):  # it is no JSON
        before = read_json(os.path.join(out_dir, "config.json"))
    lost = [f"{name}, which is no run's" for name in names if "out_dir" not in before]
    if there or top == os.getcwd():
        optional("mistakes.check_place")(out_dir, "out_dir" in before)
    for key, path in paths_in(config):
        inner = os.path.relpath(os.path.realpath(path), top).split(os.sep)[0]
        if os.path.exists(path) and (inner == os.curdir or ours.fullmatch(inner)):
            lost.append(f"{key} = {path!r}")
    if lost:
        raise BadInput(f"out_dir = {out_dir!r} would replace {lost[0]}; choose another --out_dir")
    return before, names


def paths_in(config, keys=("_path", "init_from", "teacher", "value_init")):
    """[(key, path)] of the models and data that keys with these ends name; some name several."""
    return [(key, path.strip()) for key, value in config.items() if key.endswith(keys)
            for path in str(value).split(",")
            if path.strip() and (key, path) != ("value_init", "policy")]  # this is no folder


def lock(out_dir):
    """Lock out_dir/.lock for this process. If another one has it, wait a little for its end."""
    global lock_file
    lock_file = open(os.path.join(out_dir, ".lock"), "a", encoding="utf-8")
    for attempt in range(LOCK_WAIT * 10):
        try:
            return fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if attempt == 0:
                say(f"{out_dir} is in use by another process; waiting up to {LOCK_WAIT} s")
            time.sleep(0.1)
    raise BadInput(f"{out_dir} is in use by another process; wait, or choose another --out_dir")


def append(out_dir, name, records, again=False):
    """
    A collective: rank 0 appends records to a log; NaN and inf become null, as in JSON. again: what
    the log has of their iteration is replaced.
    """
    def write():
        file = os.path.join(out_dir, name)
        lines = [json.dumps({key: None if isinstance(x, float) and not math.isfinite(x) else x
                             for key, x in record.items()}) + "\n" for record in records]
        if again and records:  # at once: a kill loses no line
            now = records[0]["iteration"]
            lines[:0] = [line for line, old in lines_of(file) if old["iteration"] < now]
            return write_text(file, "".join(lines))
        with open(file, "a", encoding="utf-8") as f:
            f.writelines(lines)

    alone(write)


def lines_of(file):
    """(line, record) of each line of a log, without one that a kill has cut."""
    if os.path.isfile(file):
        with open(file, encoding="utf-8", errors="replace") as f:
            for line in f:
                with contextlib.suppress(ValueError):
                    yield line, json.loads(line)


def cut_logs(out_dir, iteration):
    """
    Delete the lines of iterations that will be logged again. The evaluation of this iteration
    stays, because the run resumes with the weights that it evaluated. Returns its figures.
    """
    figures = {}
    for log in LOGS:
        file, kept = os.path.join(out_dir, log), []
        for line, record in lines_of(file):
            now = record["iteration"] == iteration > 0
            if now and log == "log.jsonl":
                figures = {name: x for name, x in record.items() if name.startswith("eval/")}
                line = json.dumps(dict(iteration=iteration) | figures) + "\n"
            if record["iteration"] < iteration or now and figures and log != "rollouts.jsonl":
                kept.append(line)
        if kept:
            write_text(file, "".join(kept))
        else:
            Path(file).unlink(missing_ok=True)
    return figures


def save_checkpoint(out_dir, iteration, models, optimizers, state, keep, more=()):
    """
    A collective: write out_dir/checkpoint-{iteration}, and delete older ones. models, optimizers:
    {name: Model}, {name: optimizer} of the trained models. state: the numbers of the loop. keep:
    how many checkpoints stay. more: {file: an object whose tensors() are saved, too}.
    """
    final = os.path.join(out_dir, f"checkpoint-{iteration:06d}")
    state = {**state, "iteration": iteration}

    def write(folder):
        for name, model in models.items():
            os.makedirs(os.path.join(folder, name), exist_ok=True)
            if model.base is None:  # an adapter, or a head, is no model for transformers
                alone(partial(model.save_settings, os.path.join(folder, name)))
            write_tensors(os.path.join(folder, name), "model", trained_tensors(model))
            write_tensors(folder, f"{name}_optimizer", optimizer_tensors(model, optimizers[name]))
        for name in more:
            write_tensors(folder, name, more[name].tensors())
        alone(lambda: write_the_rest(folder))

    def write_the_rest(folder):
        shutil.copyfile(os.path.join(out_dir, "config.json"), os.path.join(folder, "config.json"))
        write_json(os.path.join(folder, "state.json"), state)
        for name in {*LOGS} & {*os.listdir(out_dir)}:  # their lines must be on the disk, too
            sync(os.path.join(out_dir, name))
        write_json(os.path.join(folder, "manifest.json"), hashes(folder))

    if not alone(lambda: damage(final) is None and read_json(f"{final}/state.json") == state):
        put_in_place(write, final)  # otherwise it is there: saved just now, or resumed from
    alone(partial(delete_older, out_dir, iteration, keep))


def delete_older(out_dir, iteration, keep):
    """Delete all checkpoints but the newest, up to that of this iteration. keep: how many stay."""
    folders = list_checkpoints(out_dir)
    # a checkpoint of a later iteration is damaged, or the run would have resumed from it
    kept = [f for f in folders if iteration_of(f) <= iteration][-keep:]
    for old in (f for f in folders if f not in kept):
        remove(move_aside(old, ".gone-"))  # so no half-deleted folder has its name


def save_final(out_dir, name, model, dtype="auto", **about):
    """
    A collective: write a finished model to out_dir/name, complete or not at all. A LoRA adapter is
    merged into it, and also saved in out_dir/name_adapter. dtype: auto (as computed), float32, or
    bfloat16 (loses changes below 1/512 of a weight). about: see options/cards.py.
    """
    about |= dict(save_dtype=dtype, adapter=hasattr(model, "save_adapter"))
    write_card = optional("cards.write_card")

    def write(folder):
        hf, tensors = model.hf, {}
        names = dict(hf.named_buffers())  # state_dict has those that are saved
        state = {n: t for n, t in hf.state_dict().items() if n in names}
        for n, t in [*hf.named_parameters(), *state.items()]:
            t = model.as_saved(n, parallel.whole(t))  # COLLECTIVE
            if parallel.rank_and_size()[0] == 0:
                fixed = dtype == "auto" or not t.is_floating_point()
                tensors[n] = t.to(t.dtype if fixed else getattr(torch, dtype)).contiguous()

        def save():
            size = sum(t.nbytes for t in tensors.values())  # transformers takes them out
            kind = reduce(torch.promote_types, {  # the widest: transformers gives it to all others
                tensors[n].dtype for n, _ in hf.named_parameters()
                if not any(part in n for part in hf._keep_in_fp32_modules_strict or ())})
            # transformers would let only rank 0 of all ranks write; this is rank 0 of its role
            hf.should_save_on_this_rank = lambda is_main_process: True
            hf.can_generate = lambda: False  # save_settings writes generation_config.json
            hf.save_pretrained(folder, state_dict=tensors)
            model.save_settings(folder)  # over the files that transformers has written
            file, kind = f"{folder}/config.json", str(kind)[6:]  # "float32"; each part has one
            write_json(file, json.loads(Path(file).read_text("utf-8"), object_hook=lambda part: (
                part | {key: kind for key in part if key == "dtype"})) | {"dtype": kind})
            say(f"{os.path.join(out_dir, name)}: {size / 1e6:,.2f} MB in {kind}")
            write_card(out_dir, folder, getattr(model, "folder", "") or model.path, about)

        alone(save)

    def write_adapter(folder):
        model.save_adapter(folder)
        write_card(out_dir, folder, model.path, about)

    put_in_place(write, os.path.join(out_dir, name))
    if about["adapter"]:
        put_in_place(lambda folder: alone(partial(write_adapter, folder)),
                     os.path.join(out_dir, f"{name}_adapter"))


def trained_tensors(model):
    """{name in the file: parameter}"""
    return {name.removeprefix("hf."): p for name, p in model.named_parameters() if p.requires_grad}


def optimizer_tensors(model, optimizer):
    """{"NAME.KEY": whole tensor} of an optimizer, such as "layers.0.q.weight.exp_avg"."""
    if hasattr(optimizer, "tensors_by_name"):  # of a model that is split (options/shards.py)
        return optimizer.tensors_by_name(model)
    return {f"{name}.{key}": x for name, p in model.named_parameters()
            for key, x in optimizer.state.get(p, {}).items() if torch.is_tensor(x)}


def unwrapped(optimizer):
    """The optimizer that has this rank's states: at ZeRO stage 1 it is in a wrapper of torch's."""
    wrapped = type(optimizer).__module__.startswith("torch.")
    return getattr(optimizer, "optim", optimizer) if wrapped else optimizer


def settings_of(optimizer):
    """The settings of an optimizer's groups, without parameters and lr, and its own; as repr."""
    return ([{k: repr(x) for k, x in group.items() if k not in ("params", "lr")}
             for group in optimizer.param_groups],
            {k: repr(x) for k, x in vars(unwrapped(optimizer)).items()
             if k not in ("state", "param_groups")})


def write_tensors(folder, stem, tensors):
    """
    A collective: write {name: tensor} as folder/stem.safetensors, or in several files of up to
    FILE_BYTES, stem-00002-of-00031.safetensors, one after the other.
    """
    files = split_state_dict_into_shards_factory(
        tensors, filename_pattern=f"{stem}{{suffix}}.safetensors", max_shard_size=FILE_BYTES,
        get_storage_size=lambda t: math.prod(t.shape) * t.dtype.itemsize).filename_to_tensors
    for file, names in (files or {f"{stem}.safetensors": ()}).items():  # or an empty file
        content = {name: parallel.whole(tensors[name]) for name in names}  # COLLECTIVE
        alone(partial(  # COLLECTIVE
            save_file, content, os.path.join(folder, file), metadata={"format": "pt"}))


def find_checkpoint(out_dir):
    """
    On rank 0: (folder, state) of the newest checkpoint that is not damaged; (None, a new state) if
    the run has none. Raises BadInput if all are damaged: a new run would delete them.
    """
    refused = []
    for folder in reversed(list_checkpoints(out_dir)):
        if (reason := damage(folder)) is None:
            for name in refused:
                say(f"{name} is refused; an older one is used")
            return folder, read_json(os.path.join(folder, "state.json"))
        refused.append(f"{folder} ({reason})")
    if refused:
        raise BadInput(f"none of the checkpoints is good: {', '.join(refused)}; start over with "
                       "another --out_dir")
    return None, dict(iteration=0)


def list_checkpoints(out_dir):
    """The checkpoint folders of a run, oldest first."""
    # not glob, which finds nothing, and no error, in a folder that it may not read
    names = os.listdir(out_dir) if os.path.isdir(out_dir) else []
    names = [name for name in names if re.fullmatch(r"checkpoint-\d{6,}", name)]
    return [os.path.join(out_dir, name) for name in sorted(names, key=iteration_of)]


def iteration_of(folder):
    """The iteration in a checkpoint's name: "out/checkpoint-000120" -> 120."""
    return int(folder.rpartition("-")[2])


def load_checkpoint(folder, models, optimizers):
    """Load parameters and optimizer states. Every rank reads all files, and takes its part."""
    for name, model in models.items():
        own, wide = trained_tensors(model), None
        for key, t in read_tensors(os.path.join(folder, name), "model"):
            if key not in own or own[key].shape != t.shape:
                raise BadInput(f"{folder}: {key} is no tensor of this model; give the same model")
            if own[key].dtype != t.dtype:  # the states get at least 32 bits, as new ones have
                wide = torch.promote_types(own[key].dtype, torch.float32)
            parallel.copy_into(own.pop(key), t)
        if own:
            raise BadInput(f"{folder} has no tensor {min(own)}; give the same model")
        tensors = read_tensors(folder, f"{name}_optimizer")
        tensors = optional("fork_state.restored")(
            folder, name, model, optimizers[name], tensors) or tensors
        tensors = ((key.rpartition("."), t.to(wide) if wide and t.dim() and t.is_floating_point()
                    else t) for key, t in tensors)
        if hasattr(optimizers[name], "load_by_name"):
            optimizers[name].load_by_name(model, tensors)
            continue
        for (parameter, _, key), t in tensors:
            p = model.get_parameter(parameter)
            optimizers[name].state.setdefault(p, {})[key] = t.to(p.device)


def read_tensors(folder, stem):
    """(name, tensor) of write_tensors, one by one."""
    for file in sorted(glob.glob(os.path.join(glob.escape(folder), f"{stem}[.-]*safetensors"))):
        with safe_open(file, framework="pt") as f:  # mapped: only used tensors are read
            for key in f.keys():
                # clone: a mapped tensor may be unaligned, and then the last bits of sums change
                yield key, f.get_tensor(key).clone()


def put_in_place(write, final):
    """
    A collective: write the folder `final`: first under a temporary name; then every file is synced
    to disk; then the folder gets its final name, and an older one of that name is deleted.
    write(folder): a collective. Raises Stop, on all ranks, when the disk is full.
    """
    parent, name = os.path.split(final)
    folder = os.path.join(parent, f".tmp-{name}")

    def begin():
        remove(folder)  # a save that was killed may have left one
        os.makedirs(folder)

    def end():
        for d, _, files in os.walk(folder):
            for f in files:
                # safetensors lets the owner alone read a file: here all who may read the folder
                with contextlib.suppress(OSError):  # some file systems refuse it
                    os.chmod(os.path.join(d, f), os.stat(d).st_mode & 0o666)
                sync(os.path.join(d, f))
            sync(d)
        # a folder cannot be renamed onto another one: first the older one gets another name
        old = move_aside(final, ".old-")
        os.rename(folder, final)
        sync(parent or ".")
        remove(old)

    try:
        alone(begin)
        write(folder)
        alone(end)
    except (OSError, SafetensorError) as e:  # the disk is full
        raise Stop(f"{final} cannot be written ({getattr(e, 'strerror', e)}); earlier checkpoints "
                   "are as they were. Make room, and resume with the same command") from e


def move_aside(folder, prefix):
    """Rename out/name, if it is there, to out/PREFIXname; returns the new path."""
    path = os.path.join(os.path.dirname(folder), f"{prefix}{os.path.basename(folder)}")
    remove(path)
    with contextlib.suppress(FileNotFoundError):
        os.rename(folder, path)
    return path


def remove(path):
    """Delete a folder or a file, if it is there; of a link only the link."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        Path(path).unlink(missing_ok=True)


def sync(path):
    """Wait until a file, or a folder's list of names, is on the disk itself."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# -------------------------------------------------------------------------------------------------
# are the files as they were saved, and the frozen models as when the run began?

def damage(folder):
    """A checkpoint's damage in a few words; None if all that a resume reads is as it was saved."""
    try:
        present, manifest = hashes(folder), read_json(os.path.join(folder, "manifest.json"))
        read = optional("fork_state.needed")(folder, present) or {}
        manifest = {"config.json": "", "state.json": "", **read, **manifest}
    except (OSError, ValueError, TypeError, RecursionError) as e:
        return f"a file is damaged, or its manifest.json missing: {e}"
    return next((f"{name} is missing, damaged, or not in manifest.json" for name in manifest
                 if name not in present or manifest[name] != present[name]), None)


def hash_of_model(path):
    """A hash of a model's weights and settings in its files; None where they are not here."""
    if not os.path.isdir(path):  # a name on the hub
        from options.hub import cached_folder

        path = cached_folder(path)
    if path is None:
        return None
    digests = hashes(path, r"[^/]+\.safetensors|config\.json")
    if os.path.isfile(os.path.join(path, "adapter_config.json")):
        from options.lora import base_of

        digests["base"] = hash_of_model(base_of(path))
    return hashlib.sha256(str(digests).encode()).hexdigest()


def hashes(folder, names=".*"):
    """{file: sha256} of the files of a folder whose names match."""
    files = sorted(file for d, _, found in os.walk(folder) for f in found
                   if re.fullmatch(names, file := os.path.relpath(os.path.join(d, f), folder)))

    def sha256(name):
        with open(os.path.join(folder, name), "rb") as f:
            return hashlib.file_digest(f, "sha256").hexdigest()

    with ThreadPoolExecutor(8) as pool:
        return dict(zip(files, pool.map(sha256, files), strict=True))

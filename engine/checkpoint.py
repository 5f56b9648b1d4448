"""
Checkpoints: what a run saves to go on later, and the finished models that it leaves.

    out_dir/checkpoint-000120/     120 iterations are done; number 120 (they count from 0) is next
        policy/                    each trained model, as a Hugging Face folder with its tokenizer;
                                   where only an adapter is trained, the adapter and head alone
        policy_optimizer.safetensors       its optimizer's state, in several files if it is large
        ema.safetensors            the policy's moving average, if there is one; likewise
        batches.safetensors        the batches of the next iterations, if they are sampled already
        state.json                 the numbers that the loop carries from one iteration to the next
        config.json                the configuration of the run
        manifest.json              the sha256 of every file, and of the manifest itself

There is no random state to save: prompts and sampling noise are functions of seed and iteration.
There is no pickle. engine/disk.py makes a checkpoint complete under its name or absent, and the
older one is deleted only after that. Rank 0 writes whole tensors, in an order that does not depend
on the ranks, so a run may resume with another ZeRO stage or another number of ranks.
"""
import glob
import hashlib
import json
import os
import re
import shutil
from functools import partial

import torch
from safetensors import SafetensorError, safe_open

from engine.adapters import Adapted, fill_adapter, save_adapter
from engine.disk import put_in_place, remove, sha256, sync, write_json, write_tensors
from engine.model_card import model_card
from engine.four_bits import in_full
from engine.optimizers import fill_optimizer, optimizer_tensors
from engine.placement import refill
from engine.run_log import LOG_FILES, cut_log, read_log
from engine.together import alone, patience, together, whole
from errors import BadConfig, BadInput, Stop
from folders import read_json
from parallel import rank_and_size


# --------------------------------------------------------------------------------------------------
# saving


def save_checkpoint(out_dir, iteration, models, optimizers, state, tokenizer, keep, average=None,
                    batches=None):
    """
    A collective: write out_dir/checkpoint-{iteration}, and delete older ones.

    models, optimizers: {name: module}, {name: optimizer} of the trained models. state: a dict for
    JSON, what the loop needs to go on. keep: how many checkpoints stay. average: the policy's
    MovingAverage, or None. batches: {name: tensor} of batches that are sampled already. Raises
    Stop, on all ranks, when the disk is full; the checkpoints that were there are then still there.
    """
    final = os.path.join(out_dir, f"checkpoint-{iteration:06d}")
    state = {**state, "iteration": iteration}

    def write(folder):
        for name, model in models.items():
            if isinstance(model, Adapted):  # every rank has all of an adapter and a head
                alone(partial(save_adapter, model, os.path.join(folder, name)))
            else:
                save_model(os.path.join(folder, name), model, tokenizer)
            write_tensors(folder, f"{name}_optimizer", optimizer_tensors(model, optimizers[name]))
        if average:
            write_tensors(folder, "ema", average.tensors())
        if batches:
            write_tensors(folder, "batches", batches)
        alone(partial(close, folder))

    def close(folder):
        shutil.copyfile(os.path.join(out_dir, "config.json"), os.path.join(folder, "config.json"))
        write_json(os.path.join(folder, "state.json"), state)
        for file in (os.path.join(out_dir, name) for name in LOG_FILES):
            if os.path.exists(file):
                sync(file)  # the log of these iterations must last as well
        write_manifest(folder)

    def delete_older():
        # a checkpoint of a later iteration is damaged, or the run would have resumed from it
        folders = list_checkpoints(out_dir)
        kept = [f for f in folders if number_of(f) <= iteration][-keep:]
        for old in folders:
            if old not in kept:
                remove(old)

    # if it is there, the run has resumed from it; only an evaluation may have changed the state
    if not alone(lambda: damage(final) is None and read_state(final) == state):
        put_in_place(write, final)
    alone(delete_older)


def write_manifest(folder):
    """Write manifest.json: {file: sha256} of every file in the folder, and a hash of itself."""
    files = sorted(os.path.relpath(os.path.join(d, f), folder)
                   for d, _, names in os.walk(folder) for f in names)
    manifest = {file: sha256(os.path.join(folder, file)) for file in files}
    manifest |= {"manifest.json": hash_of_manifest(manifest)}
    write_json(os.path.join(folder, "manifest.json"), manifest)


def hash_of_manifest(manifest):
    """sha256 of the manifest's other entries, so that damage to the manifest itself is noticed."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


# --------------------------------------------------------------------------------------------------
# finding the checkpoint to resume from


def find_checkpoint(out_dir):
    """
    A collective: (folder, state) of the newest checkpoint that is not damaged; prints which damaged
    ones it skips. (None, None) if the run has no checkpoint.

    Raises BadInput if all its checkpoints are damaged: a run that began anew would delete them.
    Raises Stop if one cannot be read.
    """
    return alone(partial(newest_good, out_dir))


def newest_good(out_dir):
    """What find_checkpoint does on rank 0."""
    refused = []  # (folder, what is wrong)
    for folder in reversed(list_checkpoints(out_dir)):
        reason = damage(folder)
        if reason is None:
            for bad, why in refused:
                print(f"{bad} is refused ({why}); an older one is used, and this one stays until "
                      "the next is saved", flush=True)
            return folder, read_state(folder)
        refused.append((folder, reason))
    if refused:
        said = ", ".join(f"{os.path.basename(folder)} ({reason})" for folder, reason in refused)
        raise BadConfig(f"none of the checkpoints in {out_dir} is good: {said}; restore one from a "
                        "backup, or start over with another --out_dir (or here, after you have "
                        "deleted them and log.jsonl)")
    return None, None


def read_state(folder):
    """The numbers in a checkpoint's state.json."""
    with open(os.path.join(folder, "state.json"), encoding="utf-8") as f:
        return json.load(f)


def list_checkpoints(out_dir):
    """The checkpoint folders of a run, oldest first."""
    names = os.listdir(out_dir) if os.path.isdir(out_dir) else []
    names = [name for name in names if re.fullmatch(r"checkpoint-\d{6,}", name)]
    return [os.path.join(out_dir, name) for name in sorted(names, key=number_of)]


def number_of(folder):
    """The iteration in a checkpoint's name: "out/checkpoint-000120" -> 120."""
    return int(folder.rpartition("-")[2])


MISSING = FileNotFoundError, NotADirectoryError, IsADirectoryError  # an answer, not a failing disk


def damage(folder):
    """
    What is wrong with a checkpoint, in a few words; None if every file is, byte for byte, what was
    saved. Raises Stop if a file cannot be read: a failing disk is no damage.
    """
    try:
        with open(os.path.join(folder, "manifest.json"), "rb") as f:
            text = f.read()
    except MISSING:
        return "manifest.json is missing"
    try:
        manifest = json.loads(text)
        written = json.dumps(manifest, indent=2).encode()
        good = text == written and manifest.pop("manifest.json") == hash_of_manifest(manifest)
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError):  # not what we write
        good = False
    if not good:
        return "its manifest.json is damaged"
    for name, digest in manifest.items():
        try:
            if sha256(os.path.join(folder, name)) != digest:
                return f"{name} is damaged"
        except MISSING:
            return f"{name} is missing"
        except OSError as e:
            raise Stop(f"{os.path.join(folder, name)} cannot be read ({e.strerror}); nothing was "
                       "changed. See to the disk, and resume with the same command") from e
    return None


# --------------------------------------------------------------------------------------------------
# loading


def load_checkpoint(folder, models, optimizers, average=None):
    """
    A collective: fill {name: model}, {name: optimizer} and the moving average from a checkpoint.
    When all ranks have loaded, the log is cut back to the checkpoint. Raises BadInput, or Stop.
    """
    with patience():
        together(lambda: fill(folder, models, optimizers, average))
    alone(lambda: cut_log(os.path.dirname(folder), number_of(folder)))


def fill(folder, models, optimizers, average):
    """What load_checkpoint does on each rank for itself."""
    for name, model in models.items():
        if isinstance(model, Adapted):
            fill_adapter(model, os.path.join(folder, name))
        else:
            refill(model, os.path.join(folder, name))
        use_tensors(folder, f"{name}_optimizer", partial(fill_optimizer, model, optimizers[name]))
    if average and os.path.exists(files_of(folder, "ema")[0]):
        use_tensors(folder, "ema", average.fill)
    elif average:  # the run had no average so far: it begins with the weights of now
        average.begin()


def load_batches(folder):
    """
    A collective: {name: tensor} of the batches that save_checkpoint was given; {} where there were
    none.
    """
    tensors = {}
    if os.path.exists(files_of(folder, "batches")[0]):
        with patience():
            together(lambda: use_tensors(folder, "batches", tensors.update))
    return tensors


def files_of(folder, stem):
    """The files into which write_tensors has put tensors: stem.safetensors, or several."""
    pattern = os.path.join(glob.escape(folder), f"{stem}-*-of-*.safetensors")
    return sorted(glob.glob(pattern)) or [os.path.join(folder, f"{stem}.safetensors")]


def use_tensors(folder, stem, use):
    """Call use({name: tensor}) with all tensors that write_tensors has written. Raises BadInput."""
    tensors = {}
    try:
        for file in files_of(folder, stem):
            with safe_open(file, framework="pt") as f:  # mapped: what is not used is not read
                tensors |= {key: f.get_tensor(key) for key in f.keys()}
        use(tensors)
    except OSError as e:
        raise BadInput(f"{file}: cannot be read ({e}); see to the disk, and resume with the same "
                       "command") from e
    except (SafetensorError, AttributeError, KeyError) as e:
        raise BadInput(f"{file}: does not fit what is trained here ({e}); resume with the model "
                       "and the code that saved it") from e


# --------------------------------------------------------------------------------------------------
# the finished models


def save_final(out_dir, name, model, tokenizer, config=None):
    """
    A collective: write a finished model to out_dir/name, complete or not at all. A LoRA adapter is
    merged into the model, and also saved alone, in out_dir/name_adapter. config: of the run, for
    the model card. Raises Stop, on all ranks, when the disk is full.
    """
    final, dtype = os.path.join(out_dir, name), saved_dtype(model)

    def write(folder):
        save_model(folder, model, tokenizer, dtype)
        alone(partial(write_card, folder))

    def write_adapter(folder):
        alone(partial(save_adapter, model, folder, model.path))

    def write_card(folder):
        # the last line of the log is not of the policy that is the best so far
        lines = [line for i, line in read_log(out_dir) if i is not None]
        record = json.loads(lines[-1]) if lines and name != "best_policy" else {}
        count = sum(p.numel() for p in model.hf.parameters())
        size = f"{count / 1e6:.2f}M weights in {in_words(dtype)}"
        with open(os.path.join(folder, "README.md"), "w", encoding="utf-8") as f:
            f.write(model_card(name, config or {}, model.path, size, record))

    put_in_place(write, final)
    if isinstance(model, Adapted) and model.adapters:  # a head alone has no adapter
        put_in_place(write_adapter, f"{final}_adapter")
    if dtype.itemsize == 2 and model.hf.dtype != dtype and rank_and_size()[0] == 0 \
            and name != "best_policy":
        steps = f"1/{round(2 / torch.finfo(dtype).eps)}"  # rounding moves a number by up to that
        print(f"{final} is saved in {in_words(dtype)}: what training has changed by less than "
              f"about {steps} of a weight is rounded away; checkpoints keep it")


def saved_dtype(model):
    """
    The torch dtype in which a finished model is saved: 16 bits, if the weights that it was made
    from were saved so, or if all its own are; else at least 32.
    """
    if model.hf.dtype != torch.float32:  # float64 is a run of a test
        return model.hf.dtype
    source = model.file_dtype
    return source if source in (torch.bfloat16, torch.float16) else torch.float32


def in_words(dtype):
    """torch.bfloat16 -> "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def save_model(folder, model, tokenizer, dtype=None):
    """
    A collective: write a Hugging Face folder: config.json, the weights, the tokenizer, and for a
    language model generation_config.json. transformers, tools/sample.py and the next script load
    it. dtype: of the saved weights; None: as they are. Rank 0 has whole tensors in the CPU's memory
    and writes them. Raises Stop when the disk is full.
    """
    tensors = {}
    for name, t in named_tensors(model):
        t = whole(t)  # COLLECTIVE
        if t is not None:
            if isinstance(model, Adapted):
                t = model.merged(name, t)
            tensors[name] = t.to(dtype or t.dtype).contiguous()

    def write():
        if model.head == "scalar":
            model.hf.config.score_shift = model.score_shift
            if tokenizer.skipped_id is not None:  # of a reward model in training
                model.hf.config.pad_token_id = tokenizer.skipped_id
        # transformers writes on rank 0 of all ranks alone, and here the first rank of a role does
        model.hf.should_save_on_this_rank = lambda is_main_process: True
        model.hf.save_pretrained(folder, state_dict=tensors)
        file = os.path.join(folder, "config.json")
        saved_in = dtype or model.hf.dtype
        write_json(file, read_json(file) | {"dtype": in_words(saved_in)})
        tokenizer.save(folder)
        if model.head == "lm":
            ends = {"eos_token_id": sorted(tokenizer.eos_ids), "pad_token_id": tokenizer.pad_id}
            write_json(os.path.join(folder, "generation_config.json"),
                       {**tokenizer.generation_config, **ends})

    alone(write)


def named_tensors(model):
    """(name, tensor) of all that the file of a model's weights holds; what is tied, once."""
    hf = model.hf
    yield from ((name, in_full(p)) for name, p in hf.named_parameters())
    every = {name for name, _ in hf.named_parameters(remove_duplicate=False)}
    # of a matrix in 4 bits, WEIGHT.absmax and such stand here, too: in_full has used them
    yield from ((name, t) for name, t in hf.state_dict().items()
                if name not in every and name.rpartition(".")[0] not in every
                and ".weight.quant_state." not in name)

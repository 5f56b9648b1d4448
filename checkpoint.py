"""
Checkpoints, from which a run resumes: a kill at any moment does no harm. And how a model is saved
as a folder; finished.py does that at the end of a run.

    out_dir/checkpoint-000120/     120 iterations are done; number 120 (they count from 0) is next
        policy/                    each trained model, as a Hugging Face folder with its tokenizer;
                                   where only an adapter is trained, only the adapter and head
        policy_optimizer.safetensors       its optimizer's state, in several files if it is large
        ema.safetensors            the policy's moving average, if there is one; likewise
        batches.safetensors        the batches of the next iterations, if they are sampled already
        state.json                 the numbers that go from one iteration to the next
        config.json                the configuration of the run
        manifest.json              the sha256 of every file, and of the manifest itself

There is no random state to save: prompts and sampling noise depend only on seed and iteration.
There is no pickle. A folder gets its name only when all its files are complete and synced, and the
older checkpoint is deleted only after that. Rank 0 writes whole tensors, in an order that does not
depend on the ranks, so a run may resume with another ZeRO stage or number of ranks. If the disk is
full or fails, all ranks end with one line, see together.alone.
"""
import glob
import hashlib
import json
import math
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from safetensors import safe_open
from safetensors.torch import save_file

from errors import BadConfig, Lost, Stop
from folders import read_json
from load import fill_model
from model import in_full
from optimizers import fill_optimizer, optimizer_tensors
from parallel import rank_and_size, whole
from report import LOG_FILES, cut_log
from together import alone, patience, together

FILE_BYTES = 5 * 10**9  # the largest file of tensors, unless a single tensor is larger
# of a damaged folder; other errors are the disk's, and stop the run
MISSING = FileNotFoundError, NotADirectoryError, IsADirectoryError


# --------------------------------------------------------------------------------------------------
# saving


def save_checkpoint(out_dir, iteration, models, optimizers, state, tokenizer, keep, average=None,
                    batches=None):
    """
    A collective: write out_dir/checkpoint-{iteration}, and delete older ones.

    models, optimizers: {name: module}, {name: optimizer} of the trained models. state: the numbers
    of the loop, a dict for JSON. keep: how many checkpoints stay. average: the policy's
    MovingAverage, or None. batches: {name: tensor} of batches that are sampled already. Raises
    Stop, on all ranks, when the disk is full; the older checkpoints are then still there.
    """
    final = os.path.join(out_dir, f"checkpoint-{iteration:06d}")
    state = {**state, "iteration": iteration}

    def is_there():
        return damage(final) is None and read_json(os.path.join(final, "state.json")) == state

    def write(folder):
        for name, model in models.items():
            if model.base is not None:  # every rank has all of an adapter and a head
                alone(partial(model.save_own, os.path.join(folder, name)))
            else:
                save_model(os.path.join(folder, name), model, tokenizer)
            write_tensors(folder, f"{name}_optimizer", optimizer_tensors(model, optimizers[name]))
        if average:
            write_tensors(folder, "ema", average.tensors())
        if batches:
            write_tensors(folder, "batches", batches)
        alone(partial(write_the_rest, folder))

    def write_the_rest(folder):
        shutil.copyfile(os.path.join(out_dir, "config.json"), os.path.join(folder, "config.json"))
        write_json(os.path.join(folder, "state.json"), state)
        for file in (os.path.join(out_dir, name) for name in LOG_FILES):
            if os.path.exists(file):
                sync(file)  # the log of these iterations must be on the disk, too
        write_manifest(folder)

    def delete_older():
        # one of a later iteration is damaged: otherwise the run would have resumed from it
        folders = list_checkpoints(out_dir)
        kept = [f for f in folders if number_of(f) <= iteration][-keep:]
        for old in folders:
            if old not in kept:
                # renamed first, so that a half-deleted folder never has its name
                shutil.rmtree(aside(old, ".gone-"))

    # if it is there with this state, the run has resumed from it, and nothing has changed since
    if not alone(is_there):
        put_in_place(write, final)
    alone(delete_older)


def write_manifest(folder):
    """Write folder/manifest.json, with which `damage` checks every file."""
    files = sorted(os.path.relpath(os.path.join(d, f), folder)
                   for d, _, names in os.walk(folder) for f in names)
    manifest = dict(zip(files, sha256_of_all(folder, files), strict=True))
    manifest["manifest.json"] = hash_of_manifest(manifest)
    write_json(os.path.join(folder, "manifest.json"), manifest)


def hash_of_manifest(manifest):
    """sha256 of the manifest's other entries, so that damage to the manifest itself is noticed."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def write_tensors(folder, stem, tensors):
    """
    A collective: write {name: tensor} as folder/stem.safetensors, or in several files of up to
    FILE_BYTES: stem-00002-of-00031.safetensors and so on. The tensors may be whole, sharded, or
    Parts; rank 0 gathers the tensors of one file, writes it, and goes on to the next. The files do
    not depend on the number of ranks.
    """
    files, room = [[]], FILE_BYTES
    for name, t in tensors.items():
        size = math.prod(t.shape) * t.dtype.itemsize
        if size > room and files[-1]:
            files.append([])
            room = FILE_BYTES
        files[-1].append(name)
        room -= size
    for number, names in enumerate(files, 1):
        cut = f"-{number:05d}-of-{len(files):05d}" if len(files) > 1 else ""
        file = os.path.join(folder, f"{stem}{cut}.safetensors")
        mine = {name: whole(tensors[name]) for name in names}  # COLLECTIVE
        alone(partial(save_file, mine, file))
        del mine  # frees memory before the next tensors are gathered


# --------------------------------------------------------------------------------------------------
# finding the checkpoint to resume from


def find_checkpoint(out_dir):
    """
    On rank 0: (folder, state) of the newest checkpoint that is not damaged; prints the damaged
    checkpoints that it skips. (None, None) if the run has no checkpoint. Raises BadConfig if all
    its checkpoints are damaged: a new run would delete them.
    """
    refused = []
    for folder in reversed(list_checkpoints(out_dir)):
        reason = damage(folder)
        if reason is None:
            for name in refused:
                print(f"{name} is refused; an older one is used, and this one stays until the next "
                      "is saved", flush=True)
            return folder, read_json(os.path.join(folder, "state.json"))
        refused.append(f"{folder} ({reason})")
    if refused:
        raise BadConfig(f"none of the checkpoints is good: {', '.join(refused)}; restore one from "
                        "a backup, or start over with another --out_dir")
    return None, None


def list_checkpoints(out_dir):
    """The checkpoint folders of a run, oldest first."""
    names = os.listdir(out_dir) if os.path.isdir(out_dir) else []
    names = [name for name in names if re.fullmatch(r"checkpoint-\d{6,}", name)]
    return [os.path.join(out_dir, name) for name in sorted(names, key=number_of)]


def number_of(folder):
    """The iteration in a checkpoint's name: "out/checkpoint-000120" -> 120."""
    return int(folder.rpartition("-")[2])


def damage(folder):
    """
    The damage of a checkpoint, or of best_policy, in a few words; None if every file is, byte for
    byte, as it was saved.
    """
    try:
        with open(os.path.join(folder, "manifest.json"), "rb") as f:
            text = f.read()
        manifest = json.loads(text)
        written = json.dumps(manifest, indent=2).encode()
        if text != written or manifest.pop("manifest.json") != hash_of_manifest(manifest):
            return "its manifest.json is damaged"
        found = sha256_of_all(folder, manifest)
        for name, digest in zip(manifest, found, strict=True):
            if manifest[name] != digest:
                return f"{name} is damaged"
    except MISSING as e:
        return f"{os.path.relpath(e.filename, folder)} is missing"
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError):  # another format
        return "its manifest.json is damaged"
    return None


# --------------------------------------------------------------------------------------------------
# loading


def load_checkpoint(folder, models, optimizers, average=None):
    """
    A collective: fill {name: model}, {name: optimizer} and the moving average from a checkpoint.
    When all ranks have loaded, the log is cut back to the checkpoint. Raises BadInput, or Stop.
    """
    def fill():
        for name, model in models.items():
            if model.base is not None:
                model.fill_own(os.path.join(folder, name))
            else:
                fill_model(model, os.path.join(folder, name))
            fill_optimizer(model, optimizers[name], read_tensors(folder, f"{name}_optimizer"))
        saved = read_tensors(folder, "ema") if average else {}
        if saved:
            average.fill(saved)
        elif average:  # the run had no average so far: it begins with the present weights
            average.begin()

    with patience():
        together(fill)
    alone(lambda: cut_log(os.path.dirname(folder), number_of(folder)))


def read_tensors(folder, stem):
    """{name: tensor}, the inverse of write_tensors; {} where there is no such file."""
    tensors = {}
    for file in glob.glob(os.path.join(glob.escape(folder), f"{stem}[.-]*safetensors")):
        with safe_open(file, framework="pt") as f:  # mapped: only used tensors are read
            tensors |= {key: f.get_tensor(key) for key in f.keys()}
    return tensors


# --------------------------------------------------------------------------------------------------
# a model as a folder


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
            t = model.merged(name, t)
            tensors[name] = t.to(dtype or t.dtype).contiguous()

    def write():
        if model.head == "scalar":
            model.hf.config.score_shift = model.score_shift
            if tokenizer.skipped_id is not None:  # of a reward model in training
                model.hf.config.pad_token_id = tokenizer.skipped_id
        # transformers would only write on rank 0 of all ranks; here the first rank of a role writes
        model.hf.should_save_on_this_rank = lambda is_main_process: True
        model.hf.save_pretrained(folder, state_dict=tensors)
        file = os.path.join(folder, "config.json")
        saved_in = str(dtype or model.hf.dtype).removeprefix("torch.")
        write_json(file, read_json(file) | {"dtype": saved_in})
        tokenizer.save(folder)
        for name, content in model.processor.items():
            with open(os.path.join(folder, name), "wb") as f:
                f.write(content)
        if model.head == "lm":
            ends = {"eos_token_id": sorted(tokenizer.eos_ids), "pad_token_id": tokenizer.pad_id}
            write_json(os.path.join(folder, "generation_config.json"),
                       {**tokenizer.generation_config, **ends})

    alone(write)


def named_tensors(model):
    """(name, tensor) of all tensors in the file of a model's weights; tied ones only once."""
    hf = model.hf
    yield from ((name, in_full(p)) for name, p in hf.named_parameters())
    every = {name for name, _ in hf.named_parameters(remove_duplicate=False)}
    # a matrix in 4 bits also has WEIGHT.absmax and so on here: in_full has used them
    yield from ((name, t) for name, t in hf.state_dict().items()
                if name not in every and name.rpartition(".")[0] not in every
                and ".weight.quant_state." not in name)


# --------------------------------------------------------------------------------------------------
# files and folders on a disk that may be full, or may be cut off by a kill


def put_in_place(write, final):
    """
    A collective: write the folder `final`: first under a temporary name; then every file is synced
    to disk; then the folder gets its final name, and an older folder of that name is deleted.

    write(folder): a collective that writes the files. Raises Stop, on all ranks, when the disk is
    full; the older folder is then still there, and the temporary one is deleted.
    """
    parent, name = os.path.split(final)
    folder = os.path.join(parent, f".tmp-{name}")

    def begin():
        shutil.rmtree(folder, ignore_errors=True)  # a save that was killed may have left one
        os.makedirs(folder)

    def end():
        for d, _, files in os.walk(folder):
            for f in files:
                sync(os.path.join(d, f))
            sync(d)
        # a folder cannot be renamed onto another one: first the older one gets another name
        old = aside(final, ".old-") if os.path.exists(final) else None
        os.rename(folder, final)
        sync(parent or ".")
        if old:
            shutil.rmtree(old)

    try:
        alone(begin)
        write(folder)
        alone(end)
    except Lost:
        raise
    except Stop as e:
        if rank_and_size()[0] == 0:
            shutil.rmtree(folder, ignore_errors=True)
        raise Stop(f"{final} cannot be written ({e}); earlier checkpoints and the log are as they "
                   "were. Make room, and resume with the same command") from e


def aside(folder, prefix):
    """Rename out/name to out/PREFIXname; returns the new path."""
    path = os.path.join(os.path.dirname(folder), f"{prefix}{os.path.basename(folder)}")
    shutil.rmtree(path, ignore_errors=True)
    os.rename(folder, path)
    return path


def put_back(parent):
    """
    If put_in_place was killed between its two renamings, the older folder gets its name again.
    """
    for old in os.listdir(parent):
        name = old.removeprefix(".old-")
        if name != old and not os.path.exists(os.path.join(parent, name)):
            os.rename(os.path.join(parent, old), os.path.join(parent, name))


def sync(path):
    """Wait until a file, or a folder's list of names, is on the disk itself (fsync)."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_json(path, value):
    """Replace a JSON file as a whole: another rank never reads a half-written file."""
    with open(path + ".tmp", "w", encoding="utf-8") as f:
        json.dump(value, f, indent=2)
    os.replace(path + ".tmp", path)


def sha256_of_all(folder, names):
    """sha256 of each of these files of a folder; several at a time, because they may be large."""
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda name: sha256(os.path.join(folder, name)), names))


def sha256(path):
    """The sha256 of a file's content, in hexadecimal."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()

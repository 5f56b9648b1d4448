"""
Save and resume. A checkpoint is a folder out_dir/checkpoint-000120 of safetensors and JSON: each trained model as a Hugging
Face directory, or only its adapter and head where that is what is trained, its optimizer's state, state.json, the run's
config.json, and manifest.json with the sha256 of every file. It is written under a temporary name, synced and renamed, so under
its final name it is complete; the old one goes only after that. No pickle. What ranks hold parts of is put together first, so a
run resumes at any other stage and on any number of ranks.

checkpoint-000120 means: 120 iterations are done, number 120 (counting from 0) comes next. Prompts and sampling noise are
functions of the iteration, so there is no random state to save.
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
import socket
import time
from functools import partial

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from configurator import BadConfig, BadInput, Stop
from model import Adapted, find_folder, load_adapter, read_json, save_adapter
from parallel import alone, checksums, from_rank_0, name_ranks, rank_and_size, ranks_where, together
from zero import fill_optimizer, optimizer_tensors, sharded, trunk_of, whole_weights

SEEN_WAIT = 30  # seconds until a network disk must show every host what rank 0 has made there
LOCK_WAIT = 30  # seconds: as long as a run that was told to stop may take to save
READ_TRIES, READ_PAUSE = 3, 2  # times, and seconds between them: how often a disk is asked that fails for a moment
lock_file = None  # open, and so locked, as long as this process lives


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
    model.save_pretrained(folder, weights)
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


def put_in_place(pieces, final):
    """
    Write a folder under a temporary name, sync every file to disk, then give it its final name. What had that name before is
    moved aside first. pieces: [(gather, write)]; gather() is called on all ranks (None: there is nothing to gather), and
    write(folder, what it gave) on rank 0. Raises Stop, on all ranks, when the disk is full, and leaves no trace.
    """
    parent, name = os.path.split(final)
    folder = os.path.join(parent, f".tmp-{name}")

    def begin():
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(folder)

    def end():
        for d, _, files in os.walk(folder):
            for f in files:
                sync(os.path.join(d, f))
            sync(d)
        old = aside(final) if os.path.exists(final) else None  # a folder cannot be renamed onto another
        try:
            os.rename(folder, final)
            sync(parent or ".")
        except OSError:
            if old and not os.path.exists(final):
                os.rename(old, final)
            raise
        if old:
            shutil.rmtree(old)

    def attempt(action):
        try:
            action()
        except Exception as e:
            shutil.rmtree(folder, ignore_errors=True)
            # tokenizers and safetensors have errors of their own for a full disk
            if not isinstance(e, (OSError, SafetensorError)) and "os error" not in str(e):
                raise
            raise Stop(f"{final} cannot be written ({getattr(e, 'strerror', None) or e}); earlier checkpoints and the log are as "
                       "they were. Make room, and resume with the same command") from e

    alone(lambda: attempt(begin))
    for gather, write in pieces:
        gathered = gather and gather()
        alone(lambda write=write, gathered=gathered: attempt(lambda: write(folder, gathered)))
        del gathered
    alone(lambda: attempt(end))


def remove(folder):
    """Delete a folder so that a half-deleted one never bears its name."""
    shutil.rmtree(aside(folder))


def aside(folder):
    """Rename a folder out of the way; returns its new name."""
    old = os.path.join(os.path.dirname(folder), f".old-{os.path.basename(folder)}")
    shutil.rmtree(old, ignore_errors=True)
    os.rename(folder, old)
    return old


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


def read_bytes(path):
    with open(path, "rb") as f:
        return f.read()


def patiently(read, path):
    """
    What read(path) returns. A disk that fails for a moment, as network disks do, is asked again. Raises Stop if it goes on
    failing: what cannot be read now is not damaged, and must be neither skipped nor replaced. FileNotFoundError and its like
    are answers, and pass.
    """
    for attempt in range(READ_TRIES):
        try:
            return read(path)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise
        except OSError as e:
            error = e
        time.sleep(READ_PAUSE if attempt < READ_TRIES - 1 else 0)
    raise Stop(f"{path} cannot be read ({error.strerror}); nothing was changed. See to the disk, and resume with the same "
               "command") from error


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
            model.load_weights(folder, os.path.join(folder, name))
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


# ---------------------------------------------------------------------------------------------------------------------
# the run's folder: config.json and log.jsonl


def open_run(out_dir, config, must_match, sources=()):
    """
    Create out_dir, or check that it holds this very run, and lock it. must_match: the keys of config that must be as before;
    sources: those among them that name a file or a model folder, whose content must be as before, too. Returns (folder,
    state) of the checkpoint to resume from, or (None, None), the same on all ranks. Raises BadInput.
    """
    hashes, made, token = alone(lambda: take(out_dir, config, sources))
    # another host that has this path on another disk could train, but never resume
    for _ in range(SEEN_WAIT):
        blind = ranks_where(not sees(out_dir, token))
        if not blind:
            break
        time.sleep(1)
    alone(lambda: give_back(out_dir, token, made if blind else []))
    if blind:
        raise BadConfig(f"{name_ranks(blind)} does not see what rank 0 has made in out_dir {out_dir!r}; give an --out_dir "
                        "that is the same folder for all ranks, on a disk that their hosts share")
    return alone(lambda: begin_or_resume(out_dir, config, must_match, hashes))


def take(out_dir, config, sources):
    """
    On rank 0: make out_dir and hold it. Returns the hashes of what the run starts from; the folders that had to be made, the
    deepest first; and the name of a new folder in out_dir, for the other ranks to look for.
    """
    hashes, made, parent = {key: content_hash(config[key]) for key in sources}, [], os.path.abspath(out_dir)
    try:
        check_ours(out_dir)
        while not os.path.isdir(parent):
            made.append(parent)
            parent = os.path.dirname(parent)
        os.makedirs(out_dir, exist_ok=True)
        lock(out_dir)
        token = f".tmp-{os.urandom(8).hex()}"
        os.mkdir(os.path.join(out_dir, token))
    except OSError as e:
        raise BadInput(f"out_dir {out_dir!r} cannot be written: {e.strerror}; choose another --out_dir") from e
    return hashes, made, token


def sees(out_dir, token):
    """Whether this rank finds what rank 0 has made. It lists the folder, for then a network disk looks again."""
    try:
        return token in os.listdir(out_dir)
    except OSError:
        return False


def give_back(out_dir, token, made):
    """On rank 0: remove the token; and the folders that were made, if there are any, for the run cannot start."""
    with contextlib.suppress(OSError):  # what is left of it goes at the next start
        os.rmdir(os.path.join(out_dir, token))
        if made:
            os.remove(os.path.join(out_dir, ".lock"))
        for folder in made:
            os.rmdir(folder)


def begin_or_resume(out_dir, config, must_match, hashes):
    """open_run on rank 0, which holds out_dir."""
    try:
        folder, state = find_checkpoint(out_dir)
        check_same_run(out_dir, folder or out_dir, config, must_match, hashes)
        if folder and state["iteration"] > config["max_iters"]:
            raise BadInput(f"max_iters = {config['max_iters']}, but {folder} has {state['iteration']} iterations done; type a "
                           "larger --max_iters, or another --out_dir")
        for name in (".tmp-*", ".old-*"):  # of a save that was killed
            for leftover in glob.glob(os.path.join(glob.escape(out_dir), name)):
                shutil.rmtree(leftover, ignore_errors=True)
        lock_file.truncate(0)
        lock_file.write(f"process {os.getpid()} on {socket.gethostname()}\n")  # for the line that refuses a second run
        lock_file.flush()
        if not folder:
            cut_log(out_dir, 0)  # before config.json is another one: the log is judged by it
        write_json(os.path.join(out_dir, "config.json"), {**config, "sha256": hashes})
    except OSError as e:
        raise BadInput(f"out_dir {out_dir!r} cannot be written: {e.strerror}; choose another --out_dir") from e
    return folder, state


def check_ours(out_dir):
    """Raise BadInput if a run in out_dir would overwrite what no run has left there, such as somebody's models."""
    file = os.path.join(out_dir, "config.json")
    if os.path.isfile(file):
        try:
            ours = "out_dir" in read_json(file)
        except BadInput:
            ours = True  # damaged: check_same_run decides
        if not ours:
            raise BadInput(f"{file} is not the configuration of a run, and would be overwritten; choose another --out_dir")
    elif not list_checkpoints(out_dir):
        for name in ("policy", "value_model", "reward_model", "log.jsonl"):
            if os.path.exists(os.path.join(out_dir, name)):
                raise BadInput(f"{out_dir} holds {name!r} but no config.json of the run that left it, and this one would "
                               "replace it; choose another --out_dir")


def check_same_run(out_dir, folder, config, must_match, hashes):
    """
    Raise BadInput if out_dir holds the checkpoints or the log of another run, judged by the config.json in folder, or a log
    without the checkpoint that must have been there.
    """
    file, log = os.path.join(folder, "config.json"), read_log(out_dir)
    if folder == out_dir and not log:
        return  # no checkpoint and no log: nothing to lose
    try:
        before = read_json(file)
    except BadInput as e:
        raise BadInput(f"{file}: unreadable, so this run cannot be resumed safely; choose another --out_dir") from e
    for key in must_match:
        if before.get(key) != config[key]:
            raise BadInput(f"{out_dir} holds a run with {key} = {before.get(key)!r}, not {config[key]!r}; "
                           "choose another --out_dir, or delete the old run")
    for key, sha in hashes.items():
        known = before["sha256"].get(key, "unknown") if isinstance(before.get("sha256"), dict) else "unknown"
        if known != sha:
            raise BadInput(f"{out_dir} holds a run whose {key} {config[key]!r} had other contents than it has now (sha256 "
                           f"{known[:12]}, now {sha[:12]}); restore it, or choose another --out_dir")
    # a run that was killed before its first checkpoint begins again, and writes the same log
    first = min(before.get("checkpoint_interval") or math.inf, before.get("max_iters", math.inf))
    last = max((iteration for iteration, _ in log if iteration is not None), default=0)
    if folder == out_dir and last >= first:
        raise BadInput(f"{out_dir}/log.jsonl has iteration {last}, and the run had a checkpoint by then, but "
                       "there is no checkpoint here now; restore it from a backup, or start over with another "
                       "--out_dir (or here, after you have deleted log.jsonl)")


def content_hash(path):
    """sha256 of a file, or of what a model or tokenizer folder is made of."""
    if os.path.isfile(path):
        return sha256(path)
    folder = path if os.path.isdir(path) else find_folder(path)
    kinds = (".json", ".safetensors", ".bin", ".txt", ".model", ".jinja")
    files = sorted(name for name in os.listdir(folder) if name.endswith(kinds))
    return hashlib.sha256("".join(f"{name} {sha256(os.path.join(folder, name))}\n" for name in files).encode()).hexdigest()


def fingerprint(model):
    """What a model's weights are, for ranks to compare before they start: checksums, or of a sharded one its files' hash."""
    return content_hash(trunk_of(model).path) if sharded(model) else checksums({"": model}).tolist()


def lock(out_dir):
    """
    Hold out_dir for this process until it ends, however it ends. Another one that holds it may be dying: wait for it a
    while. Raises BadInput, naming the holder.
    """
    global lock_file
    lock_file = open(os.path.join(out_dir, ".lock"), "a+", encoding="utf-8")
    began, said = time.monotonic(), False
    while True:
        try:
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError as e:
            lock_file.seek(0)
            holder = lock_file.read().strip() or "another process"
            if time.monotonic() - began > LOCK_WAIT:
                raise BadInput(f"out_dir {out_dir!r} is in use by {holder}; wait for it to end, or choose another "
                               "--out_dir") from e
            if not said:
                print(f"{out_dir} is in use by {holder}; waiting up to {LOCK_WAIT} s for it to end", flush=True)
            said = True
            time.sleep(0.1)
        except OSError as e:  # some network file systems cannot
            print(f"{out_dir} cannot be locked ({e.strerror}): see to it yourself that no second run writes there", flush=True)
            return


def read_log(out_dir):
    """[(iteration, line)] of log.jsonl; None for the iteration of a line that a kill has cut short. Raises Stop."""
    try:
        text = patiently(read_bytes, os.path.join(out_dir, "log.jsonl")).decode(errors="replace")
    except FileNotFoundError:
        return []
    found = []
    for line in text.split("\n"):
        try:
            found.append((int(json.loads(line)["iteration"]), line))
        except (ValueError, KeyError, TypeError, OverflowError):
            found.append((None, line))
    return found if text else []


def cut_log(out_dir, iteration):
    """Drop what log.jsonl says of this and later iterations: they will be run again."""
    file = os.path.join(out_dir, "log.jsonl")
    kept = [f"{line}\n" for i, line in read_log(out_dir) if i is not None and i < iteration]
    with open(file + ".tmp", "w", encoding="utf-8") as f:
        f.writelines(kept)
    os.replace(file + ".tmp", file)


def write_log(out_dir, record):
    """
    Append one iteration's object to log.jsonl, the whole line or nothing; numbers that are not finite as null, for JSON has no
    others. Raises Stop, on all ranks, when the disk is full.
    """
    finite = {k: None if isinstance(x, float) and not math.isfinite(x) else x for k, x in record.items()}
    line = json.dumps(finite, allow_nan=False) + "\n"

    def append():
        file = os.path.join(out_dir, "log.jsonl")
        size = os.path.getsize(file) if os.path.exists(file) else 0
        try:
            with open(file, "a", encoding="utf-8") as f:
                f.write(line)
        except OSError as e:
            if os.path.exists(file):
                os.truncate(file, size)
            raise Stop(f"{file} cannot be written: {e.strerror}; it ends with the iteration before. Make room, and resume with "
                       "the same command") from e

    from_rank_0(append)

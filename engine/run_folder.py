"""
The folder of a run, out_dir: that only one run writes there, and that a run which resumes is the
run that was there before.

A run must not begin in a folder
    - that another process is writing to: .lock is locked as long as a run's process lives;
    - that not all ranks see and can write to, as on hosts whose disks are not shared;
    - that holds files of another kind, which the run would overwrite;
    - that holds another run: other keys, or other models or data under the same paths.
Each of these ends the program with one line, and no file in the folder is changed.
"""
import contextlib
import fcntl
import glob
import hashlib
import math
import os
import shutil
import socket
import time
from array import array

import parallel
from engine.audit import checksums
from engine.checkpoint import find_checkpoint, list_checkpoints
from engine.disk import SEEN_WAIT, put_back, sha256, write_json
from folders import model_folders, read_json, several_paths
from engine.placement import sharded
from engine.report import gpu
from engine.run_log import LOG_FILES, cut_log, read_log
from engine.together import alone, name_ranks, ranks_where
from errors import BadConfig, BadInput, one_line
from rows import files_of, sources_of

LOCK_WAIT = 30  # seconds: as long as a run that was told to stop may take to save
lock_file = None  # open, and so locked, as long as this process lives


def open_run(out_dir, config, must_match, sources=(), token_ids=()):
    """
    A collective: create out_dir, or check that it holds this very run, and lock it.

    must_match: the keys of config that must be the same when a run resumes. sources: those keys
    among them that name a file or a model folder; its content must be the same, too. token_ids: all
    sequences of ids that the run trains on, which must be the same as well: a chat template or a
    library may have changed. Returns (folder, state) of the checkpoint to resume from, or
    (None, None) to begin, the same on all ranks. Raises BadInput.
    """
    hashes, made, token = alone(lambda: take(out_dir, config, sources, token_ids))
    # On another host the same path may be another disk. Such a rank could train; but after a
    # resume it would not find the checkpoint.
    for _ in range(SEEN_WAIT):
        blind = ranks_where(not sees(out_dir, token))
        if not blind:
            break
        time.sleep(1)
    # A large model is saved by all ranks (disk.write_tensors). Better now than at the first save
    mute = [] if blind else ranks_where(not can_write(os.path.join(out_dir, token)))
    alone(lambda: remove_token(out_dir, token, made if blind or mute else []))
    if mute:
        raise BadConfig(f"{name_ranks(mute)} cannot write to out_dir {out_dir!r}, which rank 0 "
                        "can; where its host mounts that disk, let it write there")
    if blind:
        raise BadConfig(f"{name_ranks(blind)} does not see what rank 0 has made in out_dir "
                        f"{out_dir!r}; give an --out_dir that is the same folder for all ranks, on "
                        "a disk that their hosts share")
    folder, state = find_checkpoint(out_dir)
    return alone(lambda: begin_or_resume(out_dir, config, must_match, hashes, folder, state))


# --------------------------------------------------------------------------------------------------
# taking the folder


def take(out_dir, config, sources, token_ids):
    """
    On rank 0: make out_dir and lock it. Raises BadInput. Returns
    hashes: {key: hash of the content} of what the run starts from;
    made: the folders that did not exist before, the deepest one first;
    token: the name of a new, empty folder in out_dir, for the other ranks to look for.
    """
    hashes = {key: (data_hash if key in DATA_KEYS else content_hash)(config[key])
              for key in sources}
    hashes |= {"token_ids": hash_of_ids(token_ids)} if len(token_ids) else {}
    made, parent = [], os.path.abspath(out_dir)
    try:
        check_ours(out_dir)
        while not os.path.isdir(parent):
            made.append(parent)
            parent = os.path.dirname(parent)
        os.makedirs(out_dir, exist_ok=True)
        lock(out_dir)
        put_back(out_dir)
        token = f".tmp-{os.urandom(8).hex()}"
        os.mkdir(os.path.join(out_dir, token))
    except OSError as e:
        raise BadInput(f"out_dir {out_dir!r} cannot be written: {e.strerror}; "
                       "choose another --out_dir") from e
    return hashes, made, token


def check_ours(out_dir):
    """Raise BadInput if out_dir holds files that no run has left there, such as models."""
    file = os.path.join(out_dir, "config.json")
    if os.path.isfile(file):
        try:
            ours = "out_dir" in read_json(file)
        except BadInput:
            ours = True  # the file is damaged: check_same_run decides
        if not ours:
            raise BadInput(f"{file} is not the configuration of a run, and would be overwritten; "
                           "choose another --out_dir")
    elif not list_checkpoints(out_dir):
        for name in ("policy", "value_model", "reward_model", *LOG_FILES):
            path = os.path.join(out_dir, name)
            if name in LOG_FILES and os.path.isfile(path) and os.path.getsize(path) == 0:
                continue  # of a start that was killed just before it wrote config.json
            if os.path.exists(path):
                raise BadInput(f"{out_dir} holds {name!r} but no config.json of the run that left "
                               "it, and this one would replace it; choose another --out_dir")


def lock(out_dir):
    """
    Lock out_dir/.lock for this process; the lock ends with the process, however it ends. Another
    process that holds it may be about to end: wait up to LOCK_WAIT seconds. Raises BadInput, which
    names the holder.
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
                raise BadInput(f"out_dir {out_dir!r} is in use by {holder}; wait for it to end, or "
                               "choose another --out_dir") from e
            if not said:
                print(f"{out_dir} is in use by {holder}; waiting up to {LOCK_WAIT} s for it to end",
                      flush=True)
            said = True
            time.sleep(0.1)
        except OSError as e:  # some network file systems have no locks
            print(f"{out_dir} cannot be locked ({e.strerror}): see to it yourself that no second "
                  "run writes there", flush=True)
            return


def sees(out_dir, token):
    """
    Whether this rank finds the folder `token`, which rank 0 has made. The whole
    folder is listed: that makes a network disk ask its server, where a single path may be cached.
    """
    try:
        return token in os.listdir(out_dir)
    except OSError:
        return False


def can_write(folder):
    """Whether this rank can make a file in a folder; it is deleted again."""
    path = os.path.join(folder, f"rank-{parallel.rank_and_size()[0]}")
    try:
        with open(path, "w"):
            pass
        os.remove(path)
    except OSError:
        return False
    return True


def remove_token(out_dir, token, made):
    """On rank 0: delete the token; and if the run cannot start, also the folders made for it."""
    with contextlib.suppress(OSError):  # the next start deletes what is left
        os.rmdir(os.path.join(out_dir, token))
        if made:
            os.remove(os.path.join(out_dir, ".lock"))
        for folder in made:
            os.rmdir(folder)


# --------------------------------------------------------------------------------------------------
# beginning or resuming


def begin_or_resume(out_dir, config, must_match, hashes, folder, state):
    """The rest of open_run, on rank 0, which holds the lock. folder, state: of find_checkpoint."""
    try:
        check_same_run(out_dir, folder or out_dir, config, must_match, hashes)
        if folder:
            say_changes(read_json(os.path.join(folder, "config.json")), config)
        if folder and state["iteration"] > config["max_iters"]:
            raise BadInput(f"max_iters = {config['max_iters']}, but {folder} has "
                           f"{state['iteration']} iterations done; type a larger --max_iters, or "
                           "another --out_dir")
        for name in (".tmp-*", ".old-*", ".gone-*"):  # of a save that was killed
            for leftover in glob.glob(os.path.join(glob.escape(out_dir), name)):
                shutil.rmtree(leftover, ignore_errors=True)
        # a second run that waits for the lock names this holder
        lock_file.truncate(0)
        lock_file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        lock_file.flush()
        if not folder:
            # The old log goes before the new config.json comes: after a kill between the two, the
            # old log beside the new configuration would look like a log of this run.
            cut_log(out_dir, 0)
        computes_on = {"gpu": gpu()} if gpu() else {}
        write_json(os.path.join(out_dir, "config.json"), config | computes_on | {"sha256": hashes})
    except OSError as e:
        raise BadInput(f"out_dir {out_dir!r} cannot be written: {e.strerror}; "
                       "choose another --out_dir") from e
    return folder, state


def say_changes(before, config):
    """Print which keys a run that resumes has been given other values of."""
    changed = [f"{key} {before[key]!r} -> {value!r}" for key, value in config.items()
               if key in before and before[key] != value]
    if changed:
        print(one_line(f"since the checkpoint these keys have changed: {', '.join(changed)}"))


def check_same_run(out_dir, folder, config, must_match, hashes):
    """
    Raise BadInput if out_dir holds the checkpoints or the log of another run, or a log that goes
    beyond the first checkpoint while there is no checkpoint.

    folder: where the config.json of the run before is: the newest checkpoint, or else out_dir.
    """
    file, log = os.path.join(folder, "config.json"), read_log(out_dir)
    if folder == out_dir and not log:
        return  # no checkpoint and no log: nothing to lose
    try:
        before = read_json(file)
    except BadInput as e:
        raise BadInput(f"{file}: unreadable, so this run cannot be resumed safely; "
                       "choose another --out_dir") from e

    for key in must_match:
        if (before.get(key) or "") != (config[key] or ""):  # a key may be newer than the run
            raise BadInput(f"{out_dir} holds a run with {key} = {before.get(key)!r}, not "
                           f"{config[key]!r}; choose another --out_dir, or delete the old run")

    known = before["sha256"] if isinstance(before.get("sha256"), dict) else {}
    for key, sha in hashes.items():
        old = known.get(key, "unknown")
        if key == "token_ids":
            if sha and known.get(key, sha) != sha:
                raise BadInput(f"{out_dir} holds a run whose data became other token ids than they "
                               "become now: its chat template, template_kwargs, system_prompt, "
                               "limits of length or libraries were other ones; restore "
                               "them, or choose another --out_dir")
        elif old != sha:
            raise BadInput(f"{out_dir} holds a run whose {key} {config[key]!r} had other contents "
                           f"than it has now (sha256 {old[:12]}, now {sha[:12]}); restore it, or "
                           "choose another --out_dir")

    # a run that was killed before its first checkpoint begins again, and writes the same log
    first = min(before.get("checkpoint_interval") or math.inf, before.get("max_iters", math.inf))
    last = max((iteration for iteration, _ in log if iteration is not None), default=0)
    if folder == out_dir and last >= first:
        raise BadInput(f"{out_dir}/log.jsonl has iteration {last}, and the run had a checkpoint by "
                       "then, but there is no checkpoint here now; restore it from a backup, or "
                       "start over with another --out_dir (or here, after you have deleted "
                       "log.jsonl)")


# --------------------------------------------------------------------------------------------------
# what a run starts from


# each may name several files, or data sets of the hub
DATA_KEYS = "train_path", "prompts_path", "ptx_path"


def data_hashes(*specs):
    """{what: hash} of the data files of some keys, for the ranks to compare; "" is no file."""
    return {f"the content of {spec}": data_hash(spec) for spec in specs if spec}


def data_hash(spec):
    """sha256 of the file of a key such as train_path, or of the hashes of its several files."""
    hashes = [sha256(path) for source, _ in sources_of(spec) for path in files_of(source)]
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()


def content_hash(path):
    """
    sha256 of a file; or of a model or tokenizer folder (or hub name): of the names and hashes of
    its files. Of several, with commas: of their hashes. Raises BadInput if there is no such folder.
    """
    if os.path.isfile(path):
        return sha256(path)
    several = several_paths(path, "the model folders")
    if len(several) > 1:
        return hashlib.sha256("".join(map(content_hash, several)).encode()).hexdigest()
    folders = [path]  # a tokenizer's folder has no config.json
    if not os.path.isdir(path) or os.path.isfile(os.path.join(path, "adapter_config.json")):
        folders = model_folders(path)
    kinds = (".json", ".safetensors", ".txt", ".model", ".jinja")
    files = [os.path.join(folder, name) for folder in folders
             for name in sorted(os.listdir(folder)) if name.endswith(kinds)]
    listed = "".join(f"{os.path.basename(file)} {sha256(file)}\n" for file in files)
    return hashlib.sha256(listed.encode()).hexdigest()


def hash_of_ids(sequences):
    """sha256 of sequences of token ids, and of where each of them ends."""
    digest = hashlib.sha256()
    for ids in sequences:
        digest.update(len(ids).to_bytes(8, "little"))
        digest.update(ids if isinstance(ids, array) else array("i", ids))
    return digest.hexdigest()


def fingerprint(model):
    """
    A value that differs where a model's weights differ, for ranks to compare before they start:
    the checksums of its tensors; of a sharded model, of which no rank has all, its files' hash.
    """
    if sharded(model):
        return content_hash(model.path)
    return checksums({"": model}).tolist()

"""
The folder of a run, out_dir. Only one run may write there, and only the same run may resume there.

A run must not begin in a folder
    - that another process is writing to: .lock is locked as long as a run's process lives;
    - that not all ranks see, as on hosts without a shared disk;
    - that has files of another kind, which the run would overwrite;
    - that has another run: other keys, or other models or data under the same paths.
Each of these ends the program with one line, and no file in the folder is changed.
"""
import fcntl
import hashlib
import math
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from array import array

import torch

from audit import checksums
from checkpoint import (find_checkpoint, list_checkpoints, put_back, sha256, sha256_of_all,
                        write_json)
from report import LOG_FILES, cut_log
from together import alone, name_ranks, ranks_where
from errors import BadConfig, BadInput, one_line, warn
from folders import model_folders, read_json, several_paths
from parallel import is_sharded
from rows import files_of

FORMAT = 2  # of checkpoints: it changes with their contents or the names in them
LOCK_WAIT = 30  # seconds: the time in which a run that was asked to stop can save
# keys of all scripts: of a run that resumes these keys, and the contents of these files and models,
# must not change; a change of SAID is only said
MUST_MATCH = ("lora", "share_base", "optim", "ref_path", "staleness")
SOURCES = ("ref_path", "judge_path", "judge_template")
SAID = ("eval_path", "val_path", "demonstrations_path", "chat_template")
PRODUCTS = tuple(f"{name}{kind}" for name in ("policy", "value_model", "reward_model")
                 for kind in ("", "_adapter")) + ("best_policy", "ema_policy")  # the saved models
WRITTEN = (".lock", "config.json", "report_id.txt", *LOG_FILES)  # files in out_dir itself
lock_file = None  # it is open, and so locked, as long as this process lives


def open_run(out_dir, config, must_match, sources=(), token_ids=(), max_iters=math.inf):
    """
    A collective: create out_dir, or check that it has the same run, and lock it.

    must_match: the script's keys that must be the same when a run resumes; sources: keys of files
    and models with contents that must be the same, too. token_ids: all sequences of ids that the
    run trains on; they must be the same, too: a chat template or a library may have changed.
    max_iters: a run with more iterations done is refused. A change in the user's code is said.
    Returns (folder, state) of the checkpoint to resume from, or (None, None) to begin, the same on
    all ranks. Raises BadInput.
    """
    # judge_template is a file, or the name of a template of quartet
    sources = [*sources, *(key for key in SOURCES if config.get(key, "") not in ("", "ref_policy")
                           and (key != "judge_template" or os.path.exists(config[key])))]
    must_match = [*must_match, *(key for key in MUST_MATCH if key in config), *sources]
    hashed = [*sources, *(key for key in SAID if config.get(key)), *code_files(config)]
    hashes, holder = alone(lambda: take(out_dir, config, hashed, token_ids))  # COLLECTIVE
    # On another host the same path may be another disk. A rank there could train, but it would not
    # find the checkpoint when the run resumes.
    blind = ranks_where(read_holder(out_dir) != holder)  # COLLECTIVE
    if blind:
        raise BadConfig(f"{name_ranks(blind)} does not see what rank 0 has made in out_dir "
                        f"{out_dir!r}; give an --out_dir that is the same folder for all ranks, on "
                        "a disk that their hosts share")
    return alone(  # COLLECTIVE
        lambda: begin_or_resume(out_dir, config, must_match, hashes, max_iters))


# --------------------------------------------------------------------------------------------------
# taking the folder


def take(out_dir, config, hashed, token_ids):
    """
    On rank 0: make out_dir and lock it. hashed: keys of files and models, or files. Returns {key:
    hash of the content}, and the text in the lock. Raises BadInput.
    """
    hashes = {key: (data_hash if key in DATA_KEYS else content_hash)(config.get(key, key))
              for key in hashed}
    if len(token_ids):
        hashes["token_ids"] = hash_of_ids(token_ids)
    try:
        check_ours(out_dir)
        os.makedirs(out_dir, exist_ok=True)
        holder = lock(out_dir)
        put_back(out_dir)
    except OSError as e:
        raise BadInput(f"out_dir {out_dir!r} cannot be written: {e.strerror}; "
                       "choose another --out_dir") from e
    return hashes, holder


def check_ours(out_dir):
    """
    Raise BadInput if out_dir has files that are not of a run, such as models; or links in the place
    of a run's files: the run would overwrite the files behind them.
    """
    if out_dir.encode(errors="replace").decode() != out_dir:
        raise BadInput(f"out_dir = {out_dir!r} is not UTF-8, and libraries cannot save there; "
                       "choose another --out_dir")
    for path in (os.path.join(out_dir, f"{name}{tmp}") for name in WRITTEN for tmp in ("", ".tmp")):
        if os.path.islink(path) or os.path.exists(path) and not os.path.isfile(path):
            raise BadInput(f"{path} exists and is not a plain file, so a run cannot write there; "
                           "choose another --out_dir")
    file = os.path.join(out_dir, "config.json")
    try:
        ours = list_checkpoints(out_dir) or os.path.isfile(file) and "out_dir" in read_json(file)
    except BadInput:
        ours = False
    for path in (os.path.join(out_dir, name) for name in ("config.json", *PRODUCTS, *LOG_FILES)):
        # an empty log: a start was killed just before it wrote config.json
        if not ours and os.path.exists(path) and os.path.getsize(path) > 0:
            raise BadInput(f"{path} would be overwritten: the folder has no config.json of a run "
                           "that wrote it; choose another --out_dir")


def lock(out_dir):
    """
    Lock out_dir/.lock for this process, and write the holder's name into it; returns the name. The
    lock always ends with the process. If another process has it, wait up to LOCK_WAIT seconds for
    its end. Raises BadInput, with the holder's name.
    """
    global lock_file
    lock_file = open(os.path.join(out_dir, ".lock"), "a+", encoding="utf-8")
    waited = 0
    while not locked(lock_file):
        holder = read_holder(out_dir).partition(",")[0] or "another process"
        if waited >= LOCK_WAIT:
            raise BadInput(f"out_dir {out_dir!r} is in use by {holder}; wait for it to end, or "
                           "choose another --out_dir")
        if waited == 0:
            print(f"{out_dir} is in use by {holder}; waiting up to {LOCK_WAIT} s for it to end",
                  flush=True)
        time.sleep(0.1)
        waited += 0.1
    holder = f"process {os.getpid()} on {socket.gethostname()}, start {os.urandom(8).hex()}"
    lock_file.truncate(0)
    lock_file.write(holder)
    lock_file.flush()
    os.fsync(lock_file.fileno())  # ranks on other hosts read it
    return holder


def locked(file):
    """Try to lock a file; returns False if another process has the lock."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as e:  # some network file systems have no locks
        print(f"{file.name} cannot be locked ({e.strerror}): see to it yourself that no second run "
              "writes there", flush=True)
    return True


def read_holder(out_dir):
    """The text in out_dir/.lock; "" where there is none."""
    try:
        with open(os.path.join(out_dir, ".lock"), encoding="utf-8") as f:
            return f.read()
    except OSError:
        return ""


# --------------------------------------------------------------------------------------------------
# beginning or resuming


def begin_or_resume(out_dir, config, must_match, hashes, max_iters):
    """The rest of open_run, on rank 0, which has the lock. Raises BadInput."""
    folder, state = find_checkpoint(out_dir)
    # the newest checkpoint has the config.json of the run before. Without a checkpoint and a log
    # there is nothing to lose
    log = os.path.join(out_dir, "log.jsonl")
    if folder or os.path.exists(log) and os.path.getsize(log) > 0:
        file = os.path.join(folder or out_dir, "config.json")
        try:
            before = read_json(file)
        except BadInput as e:
            raise BadInput(f"{file}: unreadable, so this run cannot be resumed safely; "
                           "choose another --out_dir") from e
        if folder and before.get("format") != FORMAT:
            raise BadInput(f"{folder} was written by another version of quartet; go on with that "
                           f"one (commit c382598 reads those before format {FORMAT}), or choose "
                           "another --out_dir")
        check_same_run(out_dir, before, config, must_match, hashes)
        if folder and state["iteration"] > max_iters:
            raise BadConfig(f"max_iters = {max_iters}, but {folder} has {state['iteration']} "
                            "iterations done; type a larger --max_iters, or another --out_dir")
        changed = [f"{key} {before[key]!r} -> {value!r}" for key, value in config.items()
                   if key in before and before[key] != value]
        if folder and changed:
            print(one_line(f"since the checkpoint these keys have changed: {', '.join(changed)}"))
    saved = "|".join((r"checkpoint-\d{6,}", *PRODUCTS))
    for name in os.listdir(out_dir):
        if re.fullmatch(rf"\.(tmp|old|gone)-({saved})", name):  # of a save that was killed
            shutil.rmtree(os.path.join(out_dir, name), ignore_errors=True)
    if not folder:
        # First the old log is deleted, then the new config.json is written. In the other order a
        # kill between the two would leave the old log, and it would look like a log of this run.
        cut_log(out_dir, 0)
    made_by = {"sha256": hashes, "format": FORMAT, "command": shlex.join(sys.argv),
               "commit": commit()}
    if torch.cuda.is_initialized():
        from gpu import gpu

        made_by["gpu"] = gpu()
    write_json(os.path.join(out_dir, "config.json"), config | made_by)
    return folder, state


def commit():
    """The commit of this project's code; "" where it is not known."""
    try:
        asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True,
                               cwd=os.path.dirname(os.path.abspath(__file__)), text=True)
    except OSError:  # there is no git
        return ""
    return asked.stdout.strip()


def check_same_run(out_dir, before, config, must_match, hashes):
    """
    Raise BadInput if out_dir has another run. before: the content of its config.json.
    """
    for key in must_match:
        if (before.get(key) or "") != (config[key] or ""):  # a key may be newer than the run
            raise BadInput(f"{out_dir} holds a run with {key} = {before.get(key)!r}, not "
                           f"{config[key]!r}; choose another --out_dir, or delete the old run")
    known = before.get("sha256") or {}
    for key, sha in hashes.items():
        old = known.get(key, "unknown")
        if sha in (old, None):  # None: tools/explain.py does not compare it
            continue
        if key in must_match:
            raise BadInput(f"{out_dir} holds a run whose {key} {config[key]!r} had other contents "
                           f"than it has now (sha256 {old[:12]}, now {sha[:12]}); restore it, or "
                           "choose another --out_dir")
        if key == "token_ids" and key in known:
            raise BadInput(f"{out_dir} holds a run whose data became other token ids than they "
                           "become now: its chat template, template_kwargs, system_prompt, limits "
                           "of length or libraries were other ones; restore them, or choose "
                           "another --out_dir")
        if key in known and before.get(key) == config.get(key):
            warn(f"{config.get(key, key)} had other contents when the run was saved; from here on "
                 "it goes on with what is there now")


# --------------------------------------------------------------------------------------------------
# the files and models that a run starts from


# each may name several files, or data sets of the hub
DATA_KEYS = ("train_path", "prompts_path", "ptx_path", "eval_path", "val_path",
             "demonstrations_path")


def code_files(config):
    """
    The files of the user's functions in the keys of a run, with the names in the keys:
    reward_functions = "accuracy,mine.py:brevity" -> ["mine.py"].
    """
    parts = [part.rpartition("*")[2].strip() for key in ("reward_functions", "environment", "tools")
             for part in config.get(key, "").split(",")]
    return sorted({part.rpartition(":")[0] for part in parts if ":" in part})


def data_hash(spec):
    """sha256 of the file of a key such as train_path; of several files, of their hashes."""
    hashes = [sha256(path) for path in files_of(spec)]
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()


def content_hash(path):
    """
    sha256 of a file; for a model or tokenizer folder (or hub name) of the names and hashes of its
    files; for several, with commas, of their hashes. Raises BadInput if there is no such folder.
    """
    if os.path.isfile(path):
        return sha256(path)
    if path.startswith("tiktoken:"):  # the hash of the token ids shows a change
        return path
    several = several_paths(path, "the model folders")
    if len(several) > 1:
        return hashlib.sha256("".join(map(content_hash, several)).encode()).hexdigest()
    folders = [path]  # a tokenizer's folder has no config.json
    if not os.path.isdir(path) or os.path.isfile(os.path.join(path, "adapter_config.json")):
        folders = model_folders(path)
    kinds = (".json", ".safetensors", ".txt", ".model", ".jinja")
    files = [os.path.join(folder, name) for folder in folders
             for name in sorted(os.listdir(folder)) if name.endswith(kinds)]
    listed = "".join(f"{os.path.basename(file)} {digest}\n"
                     for file, digest in zip(files, sha256_of_all("", files), strict=True))
    return hashlib.sha256(os.fsencode(listed)).hexdigest()


def hash_of_ids(sequences):
    """sha256 of sequences of token ids and their lengths."""
    digest = hashlib.sha256()
    for ids in sequences:
        digest.update(len(ids).to_bytes(8, "little"))
        digest.update(ids if isinstance(ids, array) else array("i", ids))
    return digest.hexdigest()


def fingerprint(model):
    """
    A value that differs where a model's weights differ, so that ranks can compare it at the start:
    the checksums of its tensors; of a sharded model the hash of its files, because no rank has all
    weights.
    """
    if is_sharded(model):
        return content_hash(model.path)
    return checksums({"": model}).tolist()

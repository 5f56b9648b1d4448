"""
Files that are complete or not there: folders put in place whole, synced; reads that are tried again.
"""
import hashlib
import json
import os
import shutil
import time

from safetensors import SafetensorError

from engine.together import alone
from errors import Stop


READ_TRIES, READ_PAUSE = 3, 2  # times, and seconds between them: how often a disk is asked that fails for a moment


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

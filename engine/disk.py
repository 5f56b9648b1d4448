"""
Files and folders on a disk that may be full, may fail for a moment, or may be cut off by a kill.

Writing: a folder gets its name only when everything in it is complete and synced, so a folder with
that name is complete. Reading: a disk that fails for a moment, as network disks do, is asked again.
"""
import hashlib
import json
import os
import shutil
import time
from functools import partial

from safetensors import SafetensorError

from engine.together import alone
from errors import BadInput, Stop

READ_TRIES = 3  # how often a file that cannot be read is tried
READ_PAUSE = 2  # seconds between two tries


# --------------------------------------------------------------------------------------------------
# writing


def check_writable(path, key="out"):
    """
    Raise BadInput now, and not after hours, if the file that the key names cannot be written. Its
    folder is made; of the file itself nothing is left.
    """
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        there = os.path.exists(path)
        open(path, "a", encoding="utf-8").close()
        if not there:
            os.remove(path)
    except OSError as e:
        raise BadInput(f"{key} = {path!r} cannot be written: {e.strerror}; choose another "
                       f"--{key}") from e


def put_in_place(pieces, final):
    """
    Write the folder `final`: first under a temporary name; then every file is synced to disk; then
    the folder gets its final name, and an older folder of that name is deleted.

    pieces: [(gather, write)]. All ranks call gather(), which puts together what they hold parts of
    (None: there is nothing to gather); then rank 0 calls write(folder, what gather returned).
    Raises Stop, on all ranks, when the disk is full; the older folder is then still there, and no
    temporary one is.
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
        # a folder cannot be renamed onto another one: the older one moves out of the way first
        old = aside(final) if os.path.exists(final) else None
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
            # tokenizers and safetensors report a full disk with exceptions of their own
            if not isinstance(e, (OSError, SafetensorError)) and "os error" not in str(e):
                raise
            raise Stop(f"{final} cannot be written ({getattr(e, 'strerror', None) or e}); earlier "
                       "checkpoints and the log are as they were. Make room, and resume with the "
                       "same command") from e

    alone(partial(attempt, begin))
    for gather, write in pieces:
        gathered = gather and gather()
        alone(partial(attempt, partial(write, folder, gathered)))
        del gathered  # before the next piece is gathered: rank 0 holds one piece whole at a time
    alone(partial(attempt, end))


def remove(folder):
    """Delete a folder. It is renamed first, so that a half-deleted folder never has its name."""
    shutil.rmtree(aside(folder))


def aside(folder):
    """Rename out/name to out/.old-name; returns the new path."""
    old = os.path.join(os.path.dirname(folder), f".old-{os.path.basename(folder)}")
    shutil.rmtree(old, ignore_errors=True)
    os.rename(folder, old)
    return old


def sync(path):
    """Wait until a file, or a folder's list of names, is on the disk itself (fsync)."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_json(path, value):
    """Replace a JSON file as a whole: another rank that reads it meanwhile gets the old one."""
    with open(path + ".tmp", "w", encoding="utf-8") as f:
        json.dump(value, f, indent=2)
    os.replace(path + ".tmp", path)


# --------------------------------------------------------------------------------------------------
# reading


def patiently(read, path):
    """
    What read(path) returns; read is tried READ_TRIES times while the disk fails.

    Raises Stop if the disk goes on failing: a file that cannot be read now need not be damaged, so
    it must be neither skipped nor replaced. A missing file is an answer, not a failing disk:
    FileNotFoundError, NotADirectoryError and IsADirectoryError are raised at once.
    """
    for attempt in range(READ_TRIES):
        try:
            return read(path)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise
        except OSError as e:
            error = e
        time.sleep(READ_PAUSE if attempt < READ_TRIES - 1 else 0)
    raise Stop(f"{path} cannot be read ({error.strerror}); nothing was changed. See to the disk, "
               "and resume with the same command") from error


def read_bytes(path):
    """A file's content."""
    with open(path, "rb") as f:
        return f.read()


def sha256(path):
    """The sha256 of a file's content, in hexadecimal."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()

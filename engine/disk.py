"""
Files and folders on a disk that may be full, or may be cut off by a kill. A folder gets its name
only when everything in it is complete and synced, so a folder with that name is complete. Rank 0
alone writes; an error of the disk there ends all ranks in one line, see together.alone.
"""
import hashlib
import json
import math
import os
import shutil
from functools import partial

from safetensors.torch import save_file

from engine.together import alone, whole
from errors import Lost, Stop
from parallel import rank_and_size

FILE_BYTES = 5 * 10**9  # the most that a file of tensors has, unless a single tensor has more


def put_in_place(write, final):
    """
    A collective: write the folder `final`: first under a temporary name; then every file is synced
    to disk; then the folder gets its final name, and an older folder of that name is deleted.

    write(folder): a collective that writes what shall be in it. Raises Stop, on all ranks, when the
    disk is full; the older folder is then still there, and no temporary one is.
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


def remove(folder):
    """Delete a folder. It is renamed first, so that a half-deleted folder never has its name."""
    shutil.rmtree(aside(folder, ".gone-"))


def aside(folder, prefix=".old-"):
    """Rename out/name to out/.old-name; returns the new path."""
    old = os.path.join(os.path.dirname(folder), f"{prefix}{os.path.basename(folder)}")
    shutil.rmtree(old, ignore_errors=True)
    os.rename(folder, old)
    return old


def put_back(parent):
    """
    Where put_in_place was killed when the older folder had moved aside and the newer one was not
    there yet, the older one gets its name again.
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
    """Replace a JSON file as a whole: another rank that reads it meanwhile gets the old one."""
    with open(path + ".tmp", "w", encoding="utf-8") as f:
        json.dump(value, f, indent=2)
    os.replace(path + ".tmp", path)


def write_tensors(folder, stem, tensors):
    """
    A collective: write {name: tensor} as folder/stem.safetensors, or in several files of up to
    FILE_BYTES: stem-00002-of-00031.safetensors and so on. The tensors may be whole, sharded, or
    Parts; rank 0 puts those of one file together, writes it, and goes on to the next. What is in
    the files does not depend on the number of ranks.
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
        del mine  # before the next ones are put together


def sha256(path):
    """The sha256 of a file's content, in hexadecimal."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()

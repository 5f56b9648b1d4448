"""
Work of the ranks beside the algorithm. Three ways to call a function that can fail on one rank
while the others wait; and `agree`, at the end of the set-up: do all ranks have the same code,
settings and files?

    from_rank(f)    only rank 0 calls f, all ranks get the result
    alone(f)        the same for work at the disk, which may take hours
    together(f)     every rank calls f and keeps its own result; with in_step(): f()

An error of one rank is raised on all of them, so that no rank waits for a rank that has left.
"""
import contextlib
import datetime
import hashlib
import json
import os
import sys

import torch
import torch.distributed as dist
from safetensors import SafetensorError

import parallel
from errors import BadConfig, BadInput, Stop
from parallel import all_gather, broadcast, rank_and_size, wire

PATIENCE = 6 * 3600  # seconds that the ranks wait for each other during work at the disk
usual_wait = None  # the time that a collective waits otherwise; set by launch.init


# --------------------------------------------------------------------------------------------------
# one rank works for all


def from_rank(function, source=0):
    """
    A collective: only the rank `source` calls function, and every rank returns the result, which is
    sent as JSON (no pickle). A BadInput or Stop of function is raised on every rank.
    """
    if not dist.is_initialized():
        return function()
    is_source, text = rank_and_size()[0] == source, b""
    if is_source:
        try:
            outcome = ["value", function()]
        except (BadInput, Stop) as e:
            outcome = ["BadInput" if isinstance(e, BadInput) else "Stop", str(e)]
        text = json.dumps(outcome).encode()
    # first the length, so that the other ranks can make a tensor for the text
    length = torch.tensor([len(text)], device=wire())
    broadcast(length, source)
    sent = torch.empty(int(length), dtype=torch.uint8, device=wire())
    if is_source:
        sent.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    broadcast(sent, source)
    kind, value = json.loads(sent.cpu().numpy().tobytes())
    if kind == "value":
        return value
    raise BadConfig(value) if kind == "BadInput" else Stop(value)


def alone(function):
    """
    A collective: from_rank(function) for long work at the disk. A disk that is full or fails is a
    Stop. If rank 0 dies meanwhile, the others notice it at once: its connections close.
    """
    def at_disk():
        try:
            return function()
        except Exception as e:
            # tokenizers and safetensors report a full disk with exceptions of their own
            if not isinstance(e, (OSError, SafetensorError)) and "os error" not in str(e):
                raise
            path = getattr(e, "filename", None)
            raise Stop((f"{path}: " if path else "")
                       + str(getattr(e, "strerror", None) or e)) from e

    with patience():
        return from_rank(at_disk)


@contextlib.contextmanager
def patience():
    """
    A block of long work at the disk: a run of four 8B models hashes, writes, syncs and reads 190 GB
    at a time. In it the ranks wait for each other for up to PATIENCE seconds, not `timeout`.
    """
    if not dist.is_initialized():
        yield
        return
    group, wait = parallel.group or dist.group.WORLD, usual_wait
    group.set_timeout(max(wait, datetime.timedelta(seconds=PATIENCE)))
    try:
        yield
    finally:
        group.set_timeout(wait)


# --------------------------------------------------------------------------------------------------
# every rank works


@contextlib.contextmanager
def in_step():
    """
    A collective: a block in which every rank does its own share of some work. If it raises BadInput
    or Stop on any rank, all ranks raise Stop at its end, with the message of the first rank that
    failed. Otherwise the other ranks would go on and wait for the failed ones.
    """
    error = None
    try:
        yield
    except (BadInput, Stop) as e:
        if not dist.is_initialized():
            raise
        error = e
    failed = ranks_where(error is not None)
    if failed:
        message = from_rank(lambda: str(error), failed[0])
        odd = parallel.first + failed[0]
        raise Stop(message if odd == 0 else f"on rank {odd}: {message}") from error


def together(function):
    """A collective: every rank calls function in_step, and returns its own result."""
    with in_step():
        return function()


def ranks_where(flag):
    """A collective: the ranks on which flag is true; the same list on all."""
    flags = all_gather(torch.tensor([flag], device=wire()).long())
    return torch.cat(flags).nonzero().flatten().tolist()


def name_ranks(numbers):
    """[1, 2] -> "rank 1 and rank 2". numbers: within this rank's role, where ranks have roles."""
    return " and ".join(f"rank {parallel.first + r}" for r in numbers)


# --------------------------------------------------------------------------------------------------
# the end of the set-up


def agree(settings):
    """
    A collective, at the end of the set-up: do all ranks have the same settings? settings: {what:
    its value or hash}, from the configuration to the models' checksums; the code itself is added
    here. Raises BadConfig, on all ranks, if one of them has other settings than rank 0. Where ranks
    have roles, it is called within parallel.everyone().
    """
    mine = {what: hash_of(json.dumps(value)) for what, value in (own_code() | settings).items()}
    wanted = from_rank(lambda: mine)
    others = ranks_where(mine != wanted)
    if others:
        what = from_rank(lambda: next(what for what in mine | wanted
                                      if mine.get(what) != wanted.get(what)), others[0])
        raise BadConfig(f"{name_ranks(others)} differs from rank 0 in {what}; give all ranks the "
                        "same files and settings")


def hash_of(text):
    """A text's hash, short enough to be sent for every key."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def own_code():
    """
    {what: its hash or version} of the code that runs here: every imported file of this project, the
    script included, and torch. A rank with another version of the loss must be found here: the
    gradients are summed over the ranks, so no audit could see it later.
    """
    folder = os.path.dirname(os.path.abspath(__file__)) + os.sep
    loaded = {getattr(module, "__file__", None) or "" for module in list(sys.modules.values())}
    ours = [path for path in loaded if path.startswith(folder) and "site-packages" not in path]
    code = {"the version of torch": torch.__version__}
    for path in sorted(ours):
        with open(path, "rb") as f:
            code[f"the code of {path.removeprefix(folder)}"] = hashlib.sha256(f.read()).hexdigest()
    return code

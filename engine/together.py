"""
What the ranks do in step beside the algorithm. Three ways to call a function, for work that can
fail on one rank while the others wait; and, at the end of the set-up, agree: are all ranks there,
with the same code, settings and files?

    from_rank(f)    rank 0 alone calls f, all ranks get the result     alone(f) may take hours
    together(f)     every rank calls f and keeps its own result

An error of one rank is raised on all of them, so that no rank waits for one that has left. And
whole_on: a tensor that no rank has whole, put together on one of them.
"""
import contextlib
import datetime
import hashlib
import json
import math
import os
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist

import parallel
from errors import BadConfig, BadInput, Stop
from parallel import all_gather, broadcast, collective, is_shard, my_part, rank_and_size, wire

PATIENCE = 6 * 3600  # seconds that the ranks wait for each other while some work at the disk
usual_wait = None  # how long a collective waits otherwise; set by launch.init
starting = False  # True from launch.init to agree: a rank that fails meanwhile tells the others


# --------------------------------------------------------------------------------------------------
# one rank works for all


def from_rank(function, source=0):
    """
    A collective: the rank `source` alone calls function, and every rank returns its result, which
    is sent as JSON (no pickle here either). A BadInput or Stop that function raises is raised on
    every rank.
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
    # first the length, so that the other ranks can make room for the text
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
    A collective: from_rank(function) for long work at the disk. If rank 0 dies meanwhile, the
    others notice it at once all the same: its connections break.
    """
    with patience():
        return from_rank(function)


@contextlib.contextmanager
def patience():
    """
    A block of long work at the disk: a run of four 8B models hashes, writes, syncs and reads 190 GB
    at a time. The ranks wait for each other for up to PATIENCE seconds in it, not `timeout`.
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
# a tensor that no rank has whole


@dataclass
class Part:
    """
    What this rank has of a tensor that it does not have whole: some of its rows, as of a sharded
    parameter; or all or nothing of it, where only the rank `owner` has it, as at ZeRO stage 1.
    """

    mine: torch.Tensor  # None on the ranks that have nothing of it
    shape: tuple  # of the whole tensor
    dtype: torch.dtype
    owner: int = None


def size_of(t):
    """The elements of a whole tensor, whatever this rank has of it."""
    return math.prod(t.shape)


def whole_on(rank, t):
    """
    A collective: the whole tensor on this rank alone, None on the others. t: a tensor, which all
    ranks have whole; a sharded one; or a Part. Only the rank that gets it has memory for it.
    """
    me, size = rank_and_size()
    if is_shard(t):
        t = Part(my_part(t), t.shape, t.dtype)
    if not isinstance(t, Part):
        return t if me == rank else None
    if t.owner == rank:
        return t.mine
    there = dict(dtype=t.dtype, device=wire())
    if t.owner is not None:
        whole = torch.empty(t.shape, **there) if me == rank else None
        if me == t.owner:
            sent = t.mine.to(wire()).contiguous()
            collective(dist.send, sent, dst=parallel.first + rank, group=parallel.group)
        elif me == rank:
            collective(dist.recv, whole, src=parallel.first + t.owner, group=parallel.group)
        return whole
    # all ranks send as many rows: the last ones may have fewer, or none, and fill them up
    rows = -(-t.shape[0] // size)
    sent = torch.zeros(rows, *t.shape[1:], **there)
    sent[:len(t.mine)] = t.mine
    whole = torch.empty(size * rows, *t.shape[1:], **there) if me == rank else None
    collective(dist.gather, sent, None if whole is None else list(whole.split(rows)),
               dst=parallel.first + rank, group=parallel.group)
    return None if whole is None else whole[:t.shape[0]]


def everyones(parts):
    """
    A collective: {name: tensor} of each rank, all of other names -> {name: Part} of all of them, in
    the order of the ranks. No tensor is sent.
    """
    known = {}
    for rank in range(rank_and_size()[1]):
        header = from_rank(lambda: [[name, list(t.shape), str(t.dtype).removeprefix("torch.")]
                                    for name, t in parts.items()], rank)
        for name, shape, dtype in header:
            mine = parts.get(name) if rank == rank_and_size()[0] else None
            known[name] = Part(mine, tuple(shape), getattr(torch, dtype), rank)
    return known


# --------------------------------------------------------------------------------------------------
# every rank works


def together(function):
    """
    A collective: every rank calls function, each on its own share, and returns its own result. If
    function raises BadInput or Stop on any rank, all ranks raise Stop, with the words of the first
    rank that failed. Without this the ranks that succeeded would go on and wait for the others.
    """
    if not dist.is_initialized():
        return function()
    error, value = None, None
    try:
        value = function()
    except (BadInput, Stop) as e:
        error = e
    failed = ranks_where(error is not None)
    if not failed:
        return value
    text = torch.zeros(1000, dtype=torch.uint8, device=wire())
    if rank_and_size()[0] == failed[0]:
        said = list(str(error).encode()[:1000])
        text[:len(said)] = torch.tensor(said, dtype=torch.uint8, device=wire())
    broadcast(text, failed[0])
    message = bytes(text.tolist()).rstrip(b"\0").decode(errors="replace")
    odd = parallel.first + failed[0]
    raise Stop(message if odd == 0 else f"on rank {odd}: {message}") from error


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
    A collective, at the end of every rank's set-up: are all ranks ready, and do all start from the
    same? settings: {what: its value or hash}, from the configuration to the models' checksums; the
    code itself is added here. Raises BadConfig, on all ranks, if one of them could not come this
    far (see tell_others) or has other settings than rank 0. Where ranks have roles, it is called
    within parallel.everyone().
    """
    global starting
    if not dist.is_initialized():
        return
    texts = {what: json.dumps(value) for what, value in (own_code() | settings).items()}
    failure, names = 0, json.dumps(list(texts))
    mine = torch.tensor([failure, digest(json.dumps(texts)), digest(names)], device=wire())
    everyones = torch.stack(all_gather(mine))  # (ranks, 3)
    starting = False

    failed = everyones[:, 0].nonzero().flatten().tolist()
    if failed:
        raise BadConfig(f"{name_ranks(failed)} could not start, for the reason that it gave")
    if (everyones[:, 1] == everyones[0, 1]).all():
        return

    # They differ. In what? The settings can be compared one by one if their names are the same.
    others = (everyones[:, 2] != everyones[0, 2]).nonzero().flatten().tolist()
    if others:
        raise BadConfig(f"{name_ranks(others)} runs another version of this script than rank 0; "
                        "copy rank 0's there")
    mine = torch.tensor([digest(text) for text in texts.values()], device=wire())
    everyones = torch.stack(all_gather(mine))  # (ranks, settings)
    differs = everyones != everyones[0]
    first = int(differs.any(0).nonzero()[0])
    others = differs[:, first].nonzero().flatten().tolist()
    raise BadConfig(f"{name_ranks(others)} differs from rank 0 in {list(texts)[first]}; give all "
                    "ranks the same files and settings")


def tell_others(message):
    """
    A collective while the ranks set up: errors.py calls this as this rank leaves with a BadInput.
    The other ranks wait in agree, or are leaving themselves; this answers the all_gather there, as
    a rank that has failed. Returns whether rank 0 leaves with the very same message, so that
    printing it once is enough; None if the set-up is over.
    """
    global starting
    if not starting:
        return None
    starting = False
    failure = digest(message)
    with parallel.everyone():
        everyones = all_gather(torch.tensor([failure, 0, 0], device=wire()))
    return bool(everyones[0][0] == failure)


def digest(text):
    """64 bits of a text's hash, as an int64. Never 0, which stands for "no failure" in agree."""
    hashed = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(hashed, "little", signed=True) or 1


def own_code():
    """
    {what: its hash or version} of the code that runs here: every file of this project that has been
    imported, the script among them, and torch. A rank with another version of the loss must be
    found here: the gradients are summed over the ranks, so no audit could see it later.
    """
    folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
    loaded = {getattr(module, "__file__", None) or "" for module in list(sys.modules.values())}
    ours = [path for path in loaded if path.startswith(folder) and "site-packages" not in path]
    code = {"the version of torch": torch.__version__}
    for path in sorted(ours):
        with open(path, "rb") as f:
            code[f"the code of {path.removeprefix(folder)}"] = hashlib.sha256(f.read()).hexdigest()
    return code

"""
What ranks do in step beside the algorithm: rank 0 works for all, all do their share and fail as one, and all agree at the start.
"""
import datetime
import hashlib
import json
import os
import sys

import torch
import torch.distributed as dist

from errors import BadConfig, BadInput, Stop
from parallel import all_gather, collective, wire

PATIENCE = 6 * 3600  # seconds that the ranks wait for rank 0 while it works alone at the disk
usual_wait = None  # how long a collective waits otherwise; from init on
starting = False  # from init to agree: a rank that fails lets the others know


# ---------------------------------------------------------------------------------------------------------------------
# starting together, stopping together


def from_rank_0(function, source=0):
    """
    What function() returns on rank 0 (or on another source), on every rank; the others wait. It may be anything that JSON can
    say (no pickle here either). A BadInput or Stop that it raises there is raised everywhere.
    """
    if not dist.is_initialized():
        return function()
    rank, text = dist.get_rank(), b""
    if rank == source:
        try:
            outcome = ["value", function()]
        except (BadInput, Stop) as e:
            outcome = ["BadInput" if isinstance(e, BadInput) else "Stop", str(e)]
        text = json.dumps(outcome).encode()
    length = torch.tensor([len(text)], device=wire())
    collective(dist.broadcast, length, src=source)
    sent = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(wire()) if rank == source else torch.empty(
        int(length), dtype=torch.uint8, device=wire())
    collective(dist.broadcast, sent, src=source)
    kind, value = json.loads(bytes(sent.tolist()))
    if kind == "value":
        return value
    raise BadConfig(value) if kind == "BadInput" else Stop(value)


def alone(function):
    """
    from_rank_0 for work at the disk, which may take longer than `timeout`: an 8B run hashes, writes and syncs 190 GB at a time.
    A rank 0 that dies is noticed at once all the same, for its connections break.
    """
    if not dist.is_initialized():
        return function()
    dist.group.WORLD.set_timeout(max(usual_wait, datetime.timedelta(seconds=PATIENCE)))
    try:
        return from_rank_0(function)
    finally:
        dist.group.WORLD.set_timeout(usual_wait)


def together(function):
    """
    What function() returns on this rank; every rank calls it, on its own share. A BadInput or Stop of any rank is raised on
    all, so that nobody waits for one that has left.
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
    text = torch.zeros(1000, dtype=torch.uint8, device=wire())  # the first one's message
    if dist.get_rank() == failed[0]:
        said = list(str(error).encode()[:1000])
        text[:len(said)] = torch.tensor(said, dtype=torch.uint8, device=wire())
    collective(dist.broadcast, text, src=failed[0])
    message = bytes(text.tolist()).rstrip(b"\0").decode(errors="replace")
    raise Stop(message if failed[0] == 0 else f"on rank {failed[0]}: {message}") from error


def ranks_where(flag):
    """The ranks on which flag is true; the same list on all."""
    return torch.cat(all_gather(torch.tensor([flag], device=wire()).long())).nonzero().flatten().tolist()


def digest(text):
    """64 bits of a text's hash, as an int64; never 0."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True) or 1


def own_code():
    """
    {what: its hash or version} of the code that runs here: this project's files, the script itself among them, and torch.
    Gradients are summed over ranks, so no audit could see that one of them computes another loss.
    """
    folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
    loaded = {getattr(module, "__file__", None) or "" for module in list(sys.modules.values())}
    code = {"the version of torch": torch.__version__}
    for path in sorted(path for path in loaded if path.startswith(folder) and "site-packages" not in path):
        with open(path, "rb") as f:
            code[f"the code of {path.removeprefix(folder)}"] = hashlib.sha256(f.read()).hexdigest()
    return code


def agree(settings):
    """
    The end of every rank's set-up, at which all find out whether all are ready and start from the same: settings is
    {what: its value or hash}, from the configuration to the models' checksums; the code itself is added here. Raises
    BadConfig, on all ranks, when some rank could not come this far, or has other settings than rank 0.
    """
    global starting
    if not dist.is_initialized():
        return
    texts = {what: json.dumps(value) for what, value in (own_code() | settings).items()}
    mine = torch.tensor([0, digest(json.dumps(texts)), digest(json.dumps(list(texts)))], device=wire())
    everyones = torch.stack(all_gather(mine))  # (ranks, 3)
    starting = False
    failed = everyones[:, 0].nonzero().flatten().tolist()
    if failed:
        raise BadConfig(f"{name_ranks(failed)} could not start, for the reason that it gave")
    if (everyones[:, 1] == everyones[0, 1]).all():
        return
    others = (everyones[:, 2] != everyones[0, 2]).nonzero().flatten().tolist()
    if others:
        raise BadConfig(f"{name_ranks(others)} runs another version of this script than rank 0; copy rank 0's there")
    details = torch.stack(all_gather(torch.tensor([digest(text) for text in texts.values()], device=wire())))
    differs = details != details[0]  # (ranks, settings)
    first = int(differs.any(0).nonzero()[0])
    others = differs[:, first].nonzero().flatten().tolist()
    raise BadConfig(f"{name_ranks(others)} differs from rank 0 in {list(texts)[first]}; give all ranks the same files and "
                    "settings")


def name_ranks(numbers):
    return " and ".join(f"rank {r}" for r in numbers)


def tell_others(message):
    """
    Called as this rank leaves with a BadInput: if the others may be waiting in agree, answer there. Returns whether rank 0
    leaves with the very same message, so that once is enough.
    """
    global starting
    if not starting:
        return None
    starting = False
    everyones = all_gather(torch.tensor([digest(message), 0, 0], device=wire()))
    return bool(everyones[0][0] == digest(message))


def send_tensors(source, tensors):
    """{key: tensor} of this source rank, on every rank."""
    if not dist.is_initialized():
        return tensors
    header = from_rank_0(lambda: [[k, list(t.shape), str(t.dtype).removeprefix("torch.")] for k, t in tensors.items()], source)
    sent = {}
    for key, shape, dtype in header:
        mine = tensors[key].detach().to(wire()).contiguous() if dist.get_rank() == source else None
        sent[key] = torch.empty(shape, dtype=getattr(torch, dtype), device=wire()) if mine is None else mine
        collective(dist.broadcast, sent[key], src=source)
    return sent

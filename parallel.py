"""
Raw torch.distributed: who am I, make all alike, add up, check that all still are, and leave together. One process needs none
of it, and every function here then returns at once, so that the scripts have no branch.
"""
import contextlib
import math
import os
import socket

import torch
import torch.distributed as dist

from errors import Lost, Stop

phase = "start"  # what the script is at, kept by the script: the line that reports a lost rank names it
met = False  # whether the ranks have once talked to each other


def rank_and_size():
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def collective(operation, *args, **kwargs):
    """
    Every collective goes through here. One that fails, because another rank was killed (at once) or hangs (after `timeout`
    seconds), raises Lost: one line on each rank that is left, and the phase in it.
    """
    try:
        return operation(*args, **kwargs)
    except RuntimeError as e:  # as gloo's, nccl's and the store's errors all are
        raise lost(e) from e


def lost(error):
    """What is said of a collective that failed with this error."""
    reason = str(error).strip().splitlines()[0].rpartition("] ")[2].strip() or type(error).__name__
    if phase != "start":
        return Lost(f"{phase}: lost touch with the other ranks: one was killed, or hangs ({reason}). The last "
                    "checkpoint is good; resume with the same command")
    if met:
        return Lost(f"start: lost touch with the other ranks: one could not start, was killed, or hangs ({reason}). "
                    "Look at what it said, and type the same command again")
    name, address = socket.gethostname(), ""
    with contextlib.suppress(OSError):
        address = socket.gethostbyname(name) if "GLOO_SOCKET_IFNAME" not in os.environ else ""
    here = f"This host's name, {name}, stands for {address}, where no other host finds it. " if address.startswith("127.") else ""
    return Lost(f"start: the ranks cannot meet, MASTER_ADDR is {os.environ.get('MASTER_ADDR')} ({reason}): one has ended, or a "
                f"host cannot be reached. {here}Between hosts, name each one's network: GLOO_SOCKET_IFNAME=eth0, or on GPUs "
                "NCCL_SOCKET_IFNAME=eth0 (`ip addr` lists them)")


def wire():
    """The device whose tensors the group can send; the CPU where there is no group."""
    return torch.device("cuda" if dist.is_initialized() and dist.get_backend() == "nccl" else "cpu")


def my_share(items):
    """This rank's contiguous part of a sequence that all ranks hold; parts differ by one at most and may be empty."""
    rank, size = rank_and_size()
    return items[rank * len(items) // size:(rank + 1) * len(items) // size]


def most_micro_batches(rows, size):
    """How many micro-batches of this size the rank with most of so many rows has; known to all ranks."""
    return math.ceil(math.ceil(rows / rank_and_size()[1]) / size)


def my_part(p):
    """The part of a parameter that this rank holds: all of it, or its shard (zero.py)."""
    return p.to_local() if is_shard(p) else p


def is_shard(p):
    """Whether a parameter is split over the ranks: a DTensor."""
    return hasattr(p, "placements")


def broadcast_parameters(models):
    """Overwrite every rank's parameters with rank 0's, so that all start from the same bytes. Shards have nothing in common."""
    if dist.is_initialized():
        for model in models:
            for p in (p for p in model.parameters() if not is_shard(p)):
                sent = p.data.to(wire())  # itself, unless it is offloaded
                collective(dist.broadcast, sent, src=0)
                p.data.copy_(sent)


def gather_rows(batch):
    """
    A dict of tensors (b, ...), b of this rank's my_share -> the same dict with the rows of all ranks, in order, on every rank.
    The ranks' row counts may differ, and be 0.
    """
    if not dist.is_initialized():
        return batch
    device = next(iter(batch.values())).device
    counts = all_gather(torch.tensor([len(next(iter(batch.values())))], device=device))
    most = int(torch.cat(counts).max())
    gathered = {}
    for name, t in batch.items():
        padded = t.new_zeros(most, *t.shape[1:])
        padded[:len(t)] = t
        parts = all_gather(padded.to(torch.uint8) if t.dtype == torch.bool else padded)
        gathered[name] = torch.cat([part[:int(n)] for part, n in zip(parts, counts, strict=True)]).to(t.dtype)
    return gathered


def add_up(tensors):
    """{name: tensor}, all of one shape and dtype, summed over the ranks, in one all_reduce."""
    if not dist.is_initialized():
        return tensors
    total = torch.stack(list(tensors.values()))
    collective(dist.all_reduce, total)
    return dict(zip(tensors, total, strict=True))


def all_gather(t):
    """[rank 0's t, rank 1's t, ...], for tensors of one shape."""
    if not dist.is_initialized():
        return [t]
    parts = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    collective(dist.all_gather, parts, t.contiguous())
    return parts


def all_reduce_max(t):
    """The largest over all ranks, elementwise. NaN counts as larger than anything: it must not get lost."""
    if dist.is_initialized():
        t = torch.where(t.isnan(), torch.inf, t)
        collective(dist.all_reduce, t, op=dist.ReduceOp.MAX)
    return t


def all_reduce_metrics(metrics):
    """{name: [sum, count]}, the same names on all ranks -> {name: mean over everything}, in one all_reduce."""
    pairs = torch.stack([torch.stack([torch.as_tensor(x, dtype=torch.float64).cpu() for x in pair])
                         for pair in metrics.values()])  # (M, 2)
    if dist.is_initialized():
        pairs = pairs.to(wire())
        collective(dist.all_reduce, pairs)
    return {name: (total / max(count, 1)) for name, (total, count) in zip(metrics, pairs.tolist(), strict=True)}


# ---------------------------------------------------------------------------------------------------------------------
# gradients


def flatten_gradients(parameters):
    """
    Make every p.grad a view of one flat buffer per dtype, and return the buffers: the all_reduce then needs no copy, and
    zeroing, clipping and checking gradients are one operation each. (Never call zero_grad afterwards; zero the buffers.)
    """
    buffers = []
    parameters = [p for p in parameters if p.requires_grad]
    shards, parameters = [p for p in parameters if is_shard(p)], [p for p in parameters if not is_shard(p)]
    for dtype in sorted({p.dtype for p in parameters}, key=str):
        group = [p for p in parameters if p.dtype == dtype]
        flat = torch.zeros(sum(p.numel() for p in group), dtype=dtype, device=group[0].device)
        start = 0
        for p in group:
            p.grad = flat[start:start + p.numel()].view_as(p)
            start += p.numel()
        buffers.append(flat)
    return buffers + ([Shards(shards)] if shards else [])


class Shards:
    """The gradients of sharded parameters, behind the face of one flat buffer. FSDP makes and reduces them by itself."""

    def __init__(self, parameters):
        self.parameters = parameters

    def parts(self):
        return [p.grad.to_local() for p in self.parameters if p.grad is not None]

    def zero_(self):
        for p in self.parameters:
            p.grad = None

    def mul_(self, factor):
        for part in self.parts():
            part.mul_(float(factor))  # a number, for parts may be on the CPU and a factor on the GPU

    def norm(self):
        """Over all ranks. A collective."""
        squares = torch.stack([part.norm().double() ** 2 for part in self.parts()]).sum().to(wire())
        collective(dist.all_reduce, squares)
        return squares.sqrt()


def all_reduce_gradients(buffers, scale=1.0):
    """
    Sum over ranks, one collective per dtype, and divide by the scale of the loss, if it has one. Not a mean: the losses are
    already divided by the global token count. (FSDP has reduced its shards already, and to a mean: make that a sum.)
    """
    for flat in buffers:
        if isinstance(flat, Shards):
            flat.mul_(dist.get_world_size() / scale)
            continue
        if dist.is_initialized():
            collective(dist.all_reduce, flat)
        if scale != 1.0:
            flat.mul_(1 / scale)


def clip_gradients(buffers, max_norm):
    """Scale the gradients to a joint norm of at most max_norm (0 = leave them); returns the norm before."""
    norms = [flat.norm() for flat in buffers]
    norm = norms[0] if len(norms) == 1 else torch.stack([n.double() for n in norms]).norm()
    if max_norm > 0:
        # a norm that is not finite scales nothing, so that check_gradients can still tell which tensor it came from
        scale = torch.where(norm.isfinite(), (max_norm / (norm + 1e-6)).clamp(max=1.0), 1.0)
        for flat in buffers:
            flat.mul_(scale)
    return norm


def check_gradients(norm, model, name, iteration):
    """
    Raise Stop, naming the first bad tensor, if a gradient is not finite. The gradients have been summed over ranks, so a NaN
    or inf of any rank is everybody's: all ranks stop here together, before the optimizer can spread it into the weights.
    """
    if not torch.isfinite(norm):
        names = [(n, p) for n, p in model.named_parameters() if p.grad is not None]
        flags = torch.stack([(~my_part(p.grad).isfinite()).any() for _, p in names]).double().to(wire())
        bad = all_reduce_max(flags).nonzero().flatten().tolist()  # of a sharded model, another rank may have it
        bad = names[bad[0]][0] if bad else "the norm (overflow)"
        raise Stop(f"iteration {iteration}: the gradient of {name}'s {bad} is not finite; stopped before the step. "
                   "Lower the learning rate, or look at the scores and the data of this iteration")


def check_finite(tensors, iteration):
    """Raise Stop, naming the tensor, if one of {name: tensor}, equal on all ranks, has a NaN or inf."""
    for name, t in tensors.items():
        if not t.isfinite().all():
            row = int((~t.isfinite()).flatten(1).any(1).nonzero()[0]) if t.dim() > 1 else int((~t.isfinite()).nonzero()[0])
            raise Stop(f"iteration {iteration}: {name} is not finite (first in response {row} of the batch); stopped before "
                       "the step")

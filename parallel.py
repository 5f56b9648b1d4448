"""
Raw torch.distributed. A rank is a process that runs the whole script on its own share of the data.
A collective is a call in which the ranks exchange tensors: all must make the same collectives in
the same order, because each waits there for the others. With one process each returns at once.

The collectives of one iteration of ppo.py, in order. n ranks, B responses in T columns:

 no  phase    function              torch's call  numbers      what all ranks have afterwards
  1  audit    stop_agreed           all_reduce    1            was any rank asked to stop?
  2  rollout  gather_rows           all_gather    B/n rows     all B responses, a call a column
  3  rollout  stop_agreed           all_reduce    1            was any rank asked to stop?
  4  score    in_step               all_gather    1            has a rule failed on any rank?
  5  score    gather_rows           all_gather    B/n scores   the scores, a call a column
  6  score    all_reduce_sum        all_reduce    3 B T        old_logprobs, ref_logprobs, values
  7  score    all_reduce_max        all_reduce    1            the sampler's largest error
  8  update   all_reduce_max        all_reduce    1            the first ratios' distance from 1
  9  update   all_reduce_gradients  all_reduce    policy       the sum of the policy's gradients
 10  update   all_reduce_gradients  all_reduce    value_model  the sum of the value model's
 11  metrics  all_reduce_metrics    all_reduce    10           five metrics: a sum and a count each
 12  log      alone: in_step        all_gather    1            has rank 0 written its line?
 13  log      alone: from_rank      broadcast     1, then 4    rank 0's result as JSON: null

9 and 10 run once in each optimizer step, 8 only in the first one. The first iteration runs 7 once
more, against the reference. Iterations that audit, evaluate or save add calls. Sharded models
(options/shards.py) gather weights and reduce gradients inside forward and backward.
"""
import contextlib
import datetime
import itertools
import json

import torch
import torch.distributed as dist

import errors
from errors import BadInput, Stop
from ranks import this_rank

PATIENCE = datetime.timedelta(hours=6)  # how long ranks wait during work at the disk


# -------------------------------------------------------------------------------------------------
# what one rank does for all, and what all do in step

@contextlib.contextmanager
def patient():
    """A block of work at the disk: there a rank waits for the slowest one up to PATIENCE."""
    group = this_rank.group or dist.group.WORLD  # None where there are no others
    if group:
        group.set_timeout(max(this_rank.wait, PATIENCE))
    yield
    if group:
        group.set_timeout(this_rank.wait)


@contextlib.contextmanager
def in_step():
    """
    A collective: a block in which every rank does its own share of some work. If one fails, all
    raise an error at its end, with the message of the first that failed.
    """
    error = None
    try:
        yield
    except Exception as e:
        error = e
    failed = ranks_where(error is not None)
    if failed:
        kind, message = from_rank([getattr(error, "exit_code", 1), str(error)], failed[0])
        if error is not None and not (hasattr(error, "exit_code") and dist.is_initialized()):
            raise error  # a bug of this rank, or there are no others
        rank = dist.get_global_rank(this_rank.group or dist.group.WORLD, failed[0])
        where = f"on rank {rank}: " if rank or kind == 1 else ""
        raise (BadInput if kind == 2 else Stop)(where + message) from error


def alone(function):
    """A collective: only rank 0 calls function; all ranks return its result, sent as JSON."""
    result = None
    with patient(), in_step():  # COLLECTIVE; rank 0 may write 190 GB
        if rank_and_size()[0] == 0:
            result = function()
    return from_rank(result)


def from_rank(value, source=0):
    """A collective: the value that the rank `source` has, on all ranks. Sent as JSON: no pickle."""
    if not dist.is_initialized():
        return value
    text = bytearray(json.dumps(value).encode())
    length = torch.tensor([len(text)], device=comm_device())
    dist.broadcast(length, group_src=source, group=this_rank.group)
    text = text[:int(length)].ljust(int(length))  # on other ranks: a buffer of this length
    sent = torch.frombuffer(text, dtype=torch.uint8).to(comm_device())
    dist.broadcast(sent, group_src=source, group=this_rank.group)
    return json.loads(sent.cpu().numpy().tobytes())


def stop_agreed():
    """A collective: whether any rank has been asked to stop."""
    return bool(all_reduce_max(torch.tensor(float(this_rank.stop), device=comm_device())))


def ranks_where(flag):
    """A collective: the ranks on which flag is true; the same list on all."""
    flags = all_gather(torch.tensor([flag], device=comm_device()).long())
    return torch.cat(flags).nonzero().flatten().tolist()


# -------------------------------------------------------------------------------------------------
# shares, and tensors of all ranks

def rank_and_size():
    """(the number of this process, how many there are); (0, 1) where there is no group."""
    if not dist.is_initialized():
        return 0, 1
    return dist.get_rank(this_rank.group), dist.get_world_size(this_rank.group)


def comm_device():
    """The device of tensors that ranks can exchange: the GPU with nccl, the CPU with gloo."""
    return torch.device("cuda" if dist.is_initialized() and dist.get_backend() == "nccl" else "cpu")


def share(n, rank=None, size=None):
    """A rank's part of the numbers 0 .. n - 1: a range; the parts differ by one at most."""
    if rank is None:
        rank, size = rank_and_size()
    return range(rank * n // size, (rank + 1) * n // size)


def broadcast_parameters(models):
    """A collective: overwrite every rank's parameters with rank 0's; shards stay as they are."""
    for p in itertools.chain(*(model.parameters() for model in models)):
        if dist.is_initialized() and not is_shard(p) and not p.is_meta:
            sent = p.data.to(comm_device())  # p.data itself, unless it is offloaded to the CPU
            dist.broadcast(sent, group_src=0, group=this_rank.group)
            p.data.copy_(sent)


def gather_rows(part, total):
    """
    A collective: {name: tensor (b, ...)}, this rank's share of `total` rows -> {name: tensor
    (total, ...)}, those of all ranks, in order, on every rank. b may be 0.
    """
    size = rank_and_size()[1]
    counts = [len(share(total, rank, size)) for rank in range(size)]
    gathered = {}
    for name, t in part.items():
        # all_gather needs the same shape on all ranks: a shorter share is padded with zeros
        padded = t.new_zeros(max(counts), *t.shape[1:])
        padded[:len(t)] = t
        shares = zip(all_gather(padded), counts, strict=True)
        gathered[name] = torch.cat([rows[:n] for rows, n in shares])  # (total, ...)
    return gathered


def all_gather(t):
    """A collective: [rank 0's t, rank 1's t, ...], for tensors of one shape and dtype."""
    if not dist.is_initialized():
        return [t]
    parts = [torch.empty_like(t) for _ in range(rank_and_size()[1])]
    dist.all_gather(parts, t.contiguous(), group=this_rank.group)
    return parts


def all_reduce_sum(tensors):
    """A collective: {name: tensor}, all of one shape and dtype, summed over the ranks, one call."""
    if not dist.is_initialized() or not tensors:
        return tensors
    total = torch.stack(list(tensors.values()))
    dist.all_reduce(total, group=this_rank.group)
    return dict(zip(tensors, total, strict=True))


def all_reduce_max(t):
    """A collective: the elementwise maximum over all ranks. NaN becomes inf: max may drop a NaN."""
    if dist.is_initialized():
        t = t.nan_to_num(torch.inf, torch.inf, -torch.inf)  # a copy, also of integers
        dist.all_reduce(t, op=dist.ReduceOp.MAX, group=this_rank.group)
    return t


def all_reduce_metrics(metrics):
    """
    A collective: {name: [sum, count]}, the same names on all ranks -> {name: sum of the sums / sum
    of the counts}: a mean of the ranks' means would be another number.
    """
    pairs = torch.tensor([[float(x) for x in pair] for pair in metrics.values()],
                         dtype=torch.float64)  # (metrics, 2)
    pairs = all_reduce_sum(dict(pairs=pairs.to(comm_device())))["pairs"]
    return {name: total / max(count, 1)
            for name, (total, count) in zip(metrics, pairs.tolist(), strict=True)}


def check_finite(tensors):
    """Raise Stop if one of {name: tensor (B, ...)}, equal on all ranks, has a NaN or inf."""
    for name, t in tensors.items():
        bad = ~t.isfinite()
        if bad.any():
            raise Stop(f"{errors.phase}: {name} is not finite (first in response "
                       f"{int(bad.nonzero()[0, 0])} of the batch); stopped before the step")


# -------------------------------------------------------------------------------------------------
# gradients

def flatten_gradients(model):
    """
    The gradients of a model's trained parameters as a list of flat buffers, one for each dtype.
    Each p.grad is a view of a buffer, so the all_reduce needs no copy. Never call zero_grad: it
    deletes the views. The gradients of bfloat16 weights are summed in float32: in bfloat16 the sum
    of 512 equal micro-batches would be 27% too small.
    """
    trained = [p for p in model.parameters() if p.requires_grad and this_rank.role == "train"]
    dtypes = {p: torch.promote_types(p.dtype, torch.float32) for p in trained if not is_shard(p)}
    buffers = []
    for dtype in sorted(set(dtypes.values()), key=str):
        same = [p for p in dtypes if dtypes[p] == dtype]
        flat = torch.zeros(sum(p.numel() for p in same), dtype=dtype, device=same[0].device)
        for p, part in zip(same, flat.split([p.numel() for p in same]), strict=True):
            p.grad_dtype = dtype
            p.grad = part.view_as(p)
        buffers.append(flat)
    if any(map(is_shard, trained)):
        from options.shards import Shards

        buffers.append(Shards([p for p in trained if is_shard(p)]))
    return buffers


def zero_gradients(gradients):
    """Called before the first micro-batch of a step. gradients: {model: its buffers}."""
    for flat in itertools.chain(*gradients.values()):
        flat.zero_()


def all_reduce_gradients(gradients, scale=1.0):
    """
    A collective: sum the gradients over the ranks, and divide by the scale of the loss. DDP would
    take the mean; here a rank's loss is already divided by the number of tokens of *all* ranks.
    """
    for flat in itertools.chain(*gradients.values()):
        if not torch.is_tensor(flat):
            flat.all_reduce()  # of shards
        elif dist.is_initialized():
            dist.all_reduce(flat, group=this_rank.group)
        if scale != 1.0:
            flat.mul_(1 / scale)


def clip_gradients(buffers, max_norm):
    """
    A collective where the model is sharded: scale its gradients to a joint norm of at most
    max_norm, 0 = any. Returns the norm before.
    """
    norms = [wide_norm(flat) if torch.is_tensor(flat) else flat.norm() for flat in buffers]
    norm = torch.stack(norms).norm()
    if max_norm > 0:
        # a norm that is not finite changes nothing: so the check after it can find the bad tensor
        scale = torch.where(norm.isfinite(), (max_norm / (norm + 1e-6)).clamp(max=1.0), 1.0)
        for flat in buffers:
            flat.mul_(float(scale))  # a number: shards may be in the CPU's memory
    return norm


def wide_norm(t):
    """The norm of a tensor of gradients, which have at least 32 bits: () float64."""
    # a CPU adds one after the other: of 30 million numbers the norm would be too small by 0.2%
    parts = t.flatten().split(2**14 if t.device.type == "cpu" else 2**30)
    return torch.stack([torch.linalg.vector_norm(p) for p in parts]).double().norm()


# -------------------------------------------------------------------------------------------------
# the audit: are the weights the same on all ranks, finite, and, if frozen, unchanged?

def audit(models, frozen, iteration):
    """
    A collective: raise Stop, on all ranks, unless all ranks have the same finite parameters, and
    the frozen ones still have their first checksums. frozen: {(model, parameter): checksum}, filled
    by the first audit. A rank's part of a sharded parameter is not compared with other ranks': it
    must be finite and, if it is frozen, unchanged.
    """
    names, numbers = [], []
    for model_name, model in models.items():
        for name, p in model.named_parameters():
            part = my_part(p.detach())
            total = int(checksum(part))
            changed = not p.requires_grad and frozen.setdefault((model_name, name), total) != total
            # the ranks' shards differ
            numbers.append([0 if is_shard(p) else total, not part.isfinite().all(), changed])
            names.append(f"{model_name}, parameter {name}")
    tables = all_gather(torch.tensor(numbers, device=comm_device()))  # COLLECTIVE
    sums, infinite, changed = torch.stack(tables).unbind(2)  # (ranks, parameters) each
    alike = torch.stack([(sums == own).sum(0) for own in sums])  # how many ranks have this sum
    for bad, what in (  # a rank has drifted whose sum is not that of more than half of the ranks
            (2 * alike <= len(sums), "the ranks have drifted apart: {} differs on {}"),
            (infinite > 0, "{} is not finite on {}"),
            (changed > 0, "the frozen {} has changed on {}: it is not what it was")):
        if bad.any():
            i = int(bad.any(0).nonzero()[0])
            who = " and ".join(f"rank {rank}" for rank, x in enumerate(bad[:, i]) if x)
            raise Stop(f"iteration {iteration}: {what.format(names[i], who)} ("
                       f"{int(bad.any(0).sum())} parameters in all); the last checkpoint is good")


def checksum(t):
    """
    The sum of (2 i + 1) * word i over the words of a tensor's memory, an int64 that wraps around.
    Integers, because only equal bits are the same weights: NaN != NaN and 0.0 == -0.0. The factors
    differ, so that the order counts, and are odd, so that a change of one word always changes the
    sum: an odd factor has an inverse modulo 2**64.
    """
    words = t.flatten().view({1: torch.uint8, 2: torch.int16}.get(t.element_size(), torch.int32))
    total, first = torch.zeros((), dtype=torch.int64, device=words.device), 0
    for chunk in words.split(2**20):  # int64 copies of a chunk, not of a whole embedding matrix
        i = torch.arange(first, first + len(chunk), device=words.device)
        total += (chunk.long() * (i * 2 + 1)).sum()
        first += len(chunk)
    return total


# -------------------------------------------------------------------------------------------------
# sharded parameters (options/shards.py): each rank has some rows of each, a DTensor of torch's

def is_shard(p):
    """Whether a parameter is split over the ranks."""
    return hasattr(p, "placements")


def my_part(p):
    """This rank's part of a parameter: its shard, or all of it."""
    return p.to_local() if is_shard(p) else p


def whole(t):
    """A collective where t is split: the whole tensor, in the CPU's memory."""
    if is_shard(t):
        t = t.to(t.device_mesh.device_type).full_tensor()  # nccl sends nothing of the CPU
    elif not torch.is_tensor(t):  # a part of an optimizer's state
        t = t.whole()
    return t.detach().cpu().contiguous()


def copy_into(t, tensor):
    """Copy a whole tensor into t; into a sharded one, this rank's part of it."""
    if is_shard(t):
        from torch.distributed.tensor import distribute_tensor

        tensor = distribute_tensor(tensor, t.device_mesh, t.placements, src_data_rank=None)
    with torch.no_grad():
        t.copy_(tensor)

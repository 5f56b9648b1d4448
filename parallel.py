"""
Raw torch.distributed: who am I, make all alike, add up, check that all still are. One process needs none of it, and every
function here then returns at once, so that the scripts have no branch.
"""
import datetime
import os
import resource

import torch
import torch.distributed as dist

from configurator import BadInput, Stop


def init(device, timeout):
    """
    Join the other ranks, if torchrun started some: nccl on GPUs, gloo on CPUs. device: auto | cpu | cuda; timeout: seconds
    after which a collective that waits for a lost rank is an error. Returns rank, world_size, torch.device.
    """
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if device == "cuda" and not torch.cuda.is_available():
        raise BadInput("device = 'cuda', but torch sees no GPU here; type --device=cpu")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        if local_rank >= torch.cuda.device_count():
            raise BadInput(f"this machine has {torch.cuda.device_count()} GPUs, fewer than ranks; lower --nproc_per_node")
        torch.cuda.set_device(local_rank)
        device = f"cuda:{local_rank}"
    if world_size > 1:
        dist.init_process_group("nccl" if device.startswith("cuda") else "gloo",
                                timeout=datetime.timedelta(seconds=timeout))
    return rank, world_size, torch.device(device)


def finish():
    """Leave the group together."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def rank_and_size():
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def my_share(items):
    """This rank's contiguous part of a sequence that all ranks hold; parts differ by one at most and may be empty."""
    rank, size = rank_and_size()
    return items[rank * len(items) // size:(rank + 1) * len(items) // size]


def broadcast_parameters(models):
    """Overwrite every rank's parameters with rank 0's, so that all start from the same bytes."""
    if dist.is_initialized():
        for model in models:
            for p in model.parameters():
                dist.broadcast(p.data, src=0)


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


def all_gather(t):
    """[rank 0's t, rank 1's t, ...], for tensors of one shape."""
    if not dist.is_initialized():
        return [t]
    parts = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, t.contiguous())
    return parts


def all_reduce_max(t):
    """The largest over all ranks, elementwise. NaN counts as larger than anything: it must not get lost."""
    if dist.is_initialized():
        t = torch.where(t.isnan(), torch.inf, t)
        dist.all_reduce(t, op=dist.ReduceOp.MAX)
    return t


def all_reduce_metrics(metrics):
    """{name: [sum, count]}, the same names on all ranks -> {name: mean over everything}, in one all_reduce."""
    pairs = torch.stack([torch.stack([torch.as_tensor(x, dtype=torch.float64).cpu() for x in pair])
                         for pair in metrics.values()])  # (M, 2)
    if dist.is_initialized():
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        pairs = pairs.to(device)
        dist.all_reduce(pairs)
    return {name: (total / max(count, 1)) for name, (total, count) in zip(metrics, pairs.tolist(), strict=True)}


def peak_memory_mib(device):
    """The most memory that this process has held: allocated by torch on a GPU, resident in all on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    if os.path.exists("/proc/self/status"):  # Linux: getrusage would count what our parent held when it started us
        with open("/proc/self/status", encoding="utf-8") as f:
            return next(int(line.split()[1]) / 1024 for line in f if line.startswith("VmHWM"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# ---------------------------------------------------------------------------------------------------------------------
# gradients


def flatten_gradients(parameters):
    """
    Make every p.grad a view of one flat buffer per dtype, and return the buffers: the all_reduce then needs no copy, and
    zeroing, clipping and checking gradients are one operation each. (Never call zero_grad afterwards; zero the buffers.)
    """
    buffers = []
    parameters = list(parameters)
    for dtype in sorted({p.dtype for p in parameters}, key=str):
        group = [p for p in parameters if p.dtype == dtype]
        flat = torch.zeros(sum(p.numel() for p in group), dtype=dtype, device=group[0].device)
        start = 0
        for p in group:
            p.grad = flat[start:start + p.numel()].view_as(p)
            start += p.numel()
        buffers.append(flat)
    return buffers


def all_reduce_gradients(buffers):
    """Sum over ranks, one collective per dtype. Not a mean: the losses are already divided by the global token count."""
    if dist.is_initialized():
        for flat in buffers:
            dist.all_reduce(flat)


def clip_gradients(buffers, max_norm):
    """Scale the gradients to a joint norm of at most max_norm (0 = leave them); returns the norm before."""
    norm = torch.stack([flat.norm() for flat in buffers]).norm()
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
        bad = next((n for n, p in model.named_parameters() if not p.grad.isfinite().all()), "the norm (overflow)")
        raise Stop(f"iteration {iteration}: the gradient of {name}'s {bad} is not finite; stopped before the step. "
                   "Lower the learning rate, or look at the scores and the data of this iteration")


def check_finite(tensors, iteration):
    """Raise Stop, naming the tensor, if one of {name: tensor}, equal on all ranks, has a NaN or inf."""
    for name, t in tensors.items():
        if not t.isfinite().all():
            row = int((~t.isfinite()).flatten(1).any(1).nonzero()[0]) if t.dim() > 1 else int((~t.isfinite()).nonzero()[0])
            raise Stop(f"iteration {iteration}: {name} is not finite (first in response {row} of the batch); stopped before "
                       "the step")


# ---------------------------------------------------------------------------------------------------------------------
# the audit


def checksums(models):
    """One int64 per parameter of {name: model}: sums of its bits, weighted by odd numbers so that order counts too."""
    sums = []
    for model in models.values():
        for p in model.parameters():
            bits = p.detach().flatten().view(torch.int16 if p.element_size() == 2 else torch.int32)
            total = torch.zeros((), dtype=torch.int64, device=p.device)
            for i, chunk in enumerate(bits.split(2**22)):  # int64 copies of a chunk, not of a whole embedding matrix
                weights = (torch.arange(len(chunk), device=p.device) + i * 2**22) * 2 + 1
                total += (chunk.long() * weights).sum()  # wraps around, alike everywhere
            sums.append(total & (2**62 - 1))  # 62 bits, so that its negative exists
    return torch.stack(sums)


def audit(models, frozen, iteration):
    """
    Stop the run unless all ranks hold the same parameters of {name: model}, and the frozen ones still have the checksums
    they began with. frozen: {name: checksums}, filled here at the first audit. One all_reduce when all is well.
    """
    mine = checksums(models)
    names = [(model_name, n) for model_name, model in models.items() for n, _ in model.named_parameters()]
    if dist.is_initialized():
        extremes = torch.stack([mine, -mine])
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
        differs = extremes[0] != -extremes[1]  # largest != smallest
        if differs.any():
            first = int(differs.nonzero()[0])
            values = torch.stack(all_gather(mine[first])).tolist()
            common = max(values, key=values.count)
            odd = [r for r, v in enumerate(values) if v != common]
            if 2 * len(odd) >= len(values):  # no majority to be right
                odd = list(range(len(values)))
            raise Stop(f"iteration {iteration}: the ranks have drifted apart: {names[first][0]}, parameter {names[first][1]}, "
                       f"differs on {' and '.join(f'rank {r}' for r in odd)} ({int(differs.sum())} parameters in all)")
    for i, (model_name, parameter) in enumerate(names):
        if not any(p.requires_grad for p in models[model_name].parameters()):
            if frozen.setdefault((model_name, parameter), int(mine[i])) != int(mine[i]):
                raise Stop(f"iteration {iteration}: the frozen {model_name} has changed: parameter {parameter} is not what "
                           "it was at the start (on all ranks)")

"""
The audit: every rank holds the same finite weights, and what is frozen has not moved.
"""
import torch
import torch.distributed as dist

from engine.together import name_ranks
from errors import Stop
from parallel import all_gather, all_reduce_max, collective, is_shard, my_part, rank_and_size, wire


def must_agree(worst_gap, limit, what, iteration, models):
    """
    Raise Stop, on all ranks, if before any update somebody's log-probs are not the policy's. Returns the gap (loss.gap; limit:
    loss.gap_limit). models: all of the run, {name: model}: a rank whose weights have drifted is named as such before anything
    else is suspected.
    """
    worst = all_reduce_max(worst_gap).item()
    if not worst <= limit:
        audit(models, {}, iteration)
        raise Stop(f"iteration {iteration}: before any update, the log-probs of {what} differ from the policy's by {worst:.2g} "
                   f"nats (limit {limit:g}); look for another temperature, mask, position ids, dropout or padded vocabulary")
    return worst


# ---------------------------------------------------------------------------------------------------------------------
# the audit


def checksums(models):
    """
    One int64 per parameter of {name: model}: sums of its bits, weighted by odd numbers so that order counts too. Of a sharded
    parameter this rank's part of the sum: over all ranks they add up to what the whole one would have.
    """
    sums = []
    for model in models.values():
        for p in model.parameters():
            part = my_part(p.detach()).flatten()
            bits = part.view(torch.int16 if p.element_size() == 2 else torch.int32)
            start = 0
            if is_shard(p):  # split by rows, as torch.chunk does it
                rows, (rank, size) = p.shape[0], rank_and_size()
                start = min(-(-rows // size) * rank, rows) * (p.numel() // rows) * (bits.numel() // max(part.numel(), 1))
            total = torch.zeros((), dtype=torch.int64, device=bits.device)
            for i, chunk in enumerate(bits.split(2**20)):  # int64 copies of a chunk, not of a whole embedding matrix
                weights = (torch.arange(len(chunk), device=bits.device) + (start + i * 2**20)) * 2 + 1
                total += (chunk.long() * weights).sum()  # wraps around, alike everywhere
            sums.append(total.to(wire()))
    return torch.stack(sums)


def audit(models, frozen, iteration):
    """
    Stop the run unless all ranks hold the same finite parameters of {name: model}, and the frozen ones still have the
    checksums they began with. frozen: {name: checksum}, filled here at the first audit. Of a sharded parameter each rank has
    another part, and vouches for that. One all_reduce when all is well.
    """
    mine = checksums(models)
    parameters = [(model_name, n, p) for model_name, model in models.items() for n, p in model.named_parameters()]
    whole = torch.tensor([not is_shard(p) for _, _, p in parameters], device=mine.device)
    infinite = torch.stack([(~my_part(p).isfinite()).any().to(mine.device) for _, _, p in parameters])
    changed = torch.zeros_like(infinite)
    for i, (model_name, n, p) in enumerate(parameters):
        changed[i] = not p.requires_grad and frozen.setdefault((model_name, n), int(mine[i])) != int(mine[i])

    def where(flags, i):
        """Which ranks raise flag i, for a message; a whole parameter has no need to say."""
        ranks = torch.stack(all_gather(flags[i].long())).nonzero().flatten().tolist()
        return " (on all ranks)" if whole[i] or len(ranks) == rank_and_size()[1] else f" (on {name_ranks(ranks)})"

    if dist.is_initialized():
        compared = torch.where(whole, mine & (2**62 - 1), 0)  # 62 bits, so that its negative exists
        extremes = torch.stack([compared, -compared, infinite.long(), changed.long()])
        collective(dist.all_reduce, extremes, op=dist.ReduceOp.MAX)
        differs = extremes[0] != -extremes[1]  # largest != smallest
        if differs.any():
            first = int(differs.nonzero()[0])
            values = torch.stack(all_gather(mine[first])).tolist()
            common = max(values, key=values.count)
            odd = [r for r, v in enumerate(values) if v != common]
            if 2 * len(odd) >= len(values):  # no majority to be right
                odd = list(range(len(values)))
            raise Stop(f"iteration {iteration}: the ranks have drifted apart: {parameters[first][0]}, parameter "
                       f"{parameters[first][1]}, differs on {name_ranks(odd)} ({int(differs.sum())} parameters in all)")
        any_infinite, any_changed = extremes[2].bool(), extremes[3].bool()
    else:
        any_infinite, any_changed = infinite, changed
    if any_infinite.any():  # as a huge learning rate does it, with finite gradients
        i = int(any_infinite.nonzero()[0])
        raise Stop(f"iteration {iteration}: {parameters[i][0]}'s {parameters[i][1]} is not finite{where(infinite, i)}; the "
                   "last checkpoint is good. Lower the learning rate, or look at its gradients")
    if any_changed.any():
        i = int(any_changed.nonzero()[0])
        raise Stop(f"iteration {iteration}: the frozen {parameters[i][0]} has changed: parameter {parameters[i][1]} is not what "
                   f"it was at the start{where(changed, i)}")

"""
The audit: are the weights the same on all ranks, finite, and, if frozen, unchanged?
"""
import torch

import parallel
from errors import Stop


def audit(models, frozen, iteration):
    """
    A collective: raise Stop, on all ranks, unless all ranks have the same finite parameters, and
    the frozen ones still have their first checksums: frozen, {(model, parameter): checksum}, filled
    here. A rank's part of a sharded parameter must be finite and, if it is frozen, unchanged.
    """
    names, rows = [], []
    for model_name, model in models.items():
        for name, p in model.named_parameters():
            part = parallel.my_part(p.detach())
            mine = int(checksum(part))
            changed = not p.requires_grad and frozen.setdefault((model_name, name), mine) != mine
            compared = 0 if parallel.is_shard(p) else mine
            # ~x reverses the order of integers, so the largest ~x is ~(the smallest x). -x would be
            # wrong, because the smallest int64 has no negative
            rows.append([compared, ~compared, int(not part.isfinite().all()), int(changed)])
            names.append(f"{model_name}, parameter {name}")
    mine = torch.tensor(rows, device=parallel.wire())  # (parameters, 4)
    largest, smallest, infinite, changed = parallel.all_reduce_max(  # COLLECTIVE
        mine.clone()).unbind(1)
    for bad, what, column in (
            (largest != ~smallest, "the ranks have drifted apart: {} differs on {}", 0),
            (infinite > 0, "{} is not finite on {}", 2),
            (changed > 0, "the frozen {} has changed on {}: it is not what it was", 3)):
        if bad.any():
            i = int(bad.nonzero()[0])
            values = parallel.all_gather(mine[i, column])  # COLLECTIVE
            values = torch.stack(values).tolist()
            common = max(values, key=values.count) if column == 0 else 0
            odd = [rank for rank, value in enumerate(values) if value != common]
            if column == 0 and 2 * len(odd) >= len(values):  # no majority: any may be the odd one
                odd = range(len(values))
            who = " and ".join(f"rank {rank}" for rank in odd)
            raise Stop(f"iteration {iteration}: {what.format(names[i], who)} ({int(bad.sum())} "
                       "parameters in all); the last checkpoint is good")


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

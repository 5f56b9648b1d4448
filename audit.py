"""
Checks that stop a run with wrong numbers: every rank must have the same weights, all weights must
be finite, and a frozen model must not change.
"""
from types import SimpleNamespace

import torch
import torch.distributed as dist

import parallel
from errors import Stop
from optimizers import inner
from parallel import all_gather, all_reduce_max, collective, is_shard, my_part, wire
from together import name_ranks, ranks_where

# {name: model} and {name: optimizer} of the run, in which find_cause looks for a wrong number
watched = SimpleNamespace(models={}, optimizers={})

# --------------------------------------------------------------------------------------------------
# weights


def find_cause(iteration):
    """A collective, where a number is wrong: raise Stop, as `audit`, if a model is the cause."""
    audit(watched.models, {}, iteration)


def audit(models, frozen, iteration):
    """
    A collective: raise Stop, on all ranks, unless all ranks have the same finite parameters of
    {name: model}, and the frozen ones still have their first checksums. frozen: {(model,
    parameter): checksum}, filled here at the first audit. Of a sharded parameter each rank has
    another part: this part must be finite and, if it is frozen, unchanged. One all_reduce when all
    is well.
    """
    if not models:  # all ranks of a role that scores only by rules
        return
    mine = checksums(models)  # (parameters,)
    parameters = [(model_name, n, p) for model_name, model in models.items()
                  for n, p in model.named_parameters()]
    sharded = torch.tensor([is_shard(p) for _, _, p in parameters], device=mine.device)
    infinite = torch.stack([(~my_part(p).isfinite()).any().to(mine.device)
                            for _, _, p in parameters])
    changed = torch.zeros_like(infinite)
    for i, (model_name, n, p) in enumerate(parameters):
        if not p.requires_grad:
            changed[i] = frozen.setdefault((model_name, n), int(mine[i])) != int(mine[i])

    # One all_reduce is enough: each rank sends four rows and gets the largest of each entry. ~x
    # reverses the order of integers, so the largest ~x is ~(the smallest x). -x would be wrong,
    # because the smallest int64 has no negative.
    compared = torch.where(sharded, 0, mine)
    rows = torch.stack([compared, ~compared, infinite.long(), changed.long()])  # (4, parameters)
    if dist.is_initialized():
        collective(dist.all_reduce, rows, op=dist.ReduceOp.MAX, group=parallel.group)
    largest, smallest = rows[0], ~rows[1]
    any_infinite, any_changed = rows[2].bool(), rows[3].bool()

    def first(flags):
        """Number, model and name of the first flagged parameter."""
        i = int(flags.nonzero()[0])
        return i, *parameters[i][:2]

    differs = largest != smallest  # all ranks have the same checksum where these two are equal
    if differs.any():
        i, model, name = first(differs)
        odd = outvoted(torch.stack(all_gather(mine[i])).tolist())
        raise Stop(f"iteration {iteration}: the ranks have drifted apart: {model}, parameter "
                   f"{name}, differs on {name_ranks(odd)} ({int(differs.sum())} parameters in all)")
    if any_infinite.any():  # such as after a step with a huge learning rate and finite gradients
        i, model, name = first(any_infinite)
        odd = ranks_where(bool(infinite[i]))
        optimizer, what = watched.optimizers.get(model), f"{model}'s {name}"
        state = inner(optimizer).state.get(parameters[i][2], {}) if optimizer else {}
        if ranks_where(not all(my_part(t).isfinite().all()
                               for t in state.values() if torch.is_tensor(t))):
            what = f"the optimizer's state of {what}"
        raise Stop(f"iteration {iteration}: {what} is not finite on {name_ranks(odd)}; the last "
                   "checkpoint is good. Lower the learning rate, or look at its gradients")
    if any_changed.any():
        i, model, name = first(any_changed)
        odd = ranks_where(bool(changed[i]))
        raise Stop(f"iteration {iteration}: the frozen {model} has changed: parameter {name} is "
                   f"not what it was at the start on {name_ranks(odd)}")


def checksums(models):
    """
    One int64 per parameter of {name: model}, (parameters,): the sum of (2 i + 1) * word i over the
    words of its memory, modulo 2**64. Of a sharded parameter the sum over this rank's part: the
    sums of all ranks add up to the checksum of the whole parameter.
    """
    sums = []
    for model in models.values():
        for p in model.parameters():
            words = as_words(my_part(p.detach()))
            sums.append(weighted_sum(words, first_word(p)).to(wire()))
    return torch.stack(sums)


def as_words(t):
    """
    The memory of a tensor as integers of 32 bits, or of 16 or 8 if its elements have so many.
    Integers, because only equal bits are the same weights: as numbers NaN != NaN and 0.0 == -0.0.
    """
    smaller = {1: torch.uint8, 2: torch.int16}
    return t.flatten().view(smaller.get(t.element_size(), torch.int32))


def weighted_sum(words, first):
    """
    The sum of (2 i + 1) * words[i - first], i = first, first + 1, ...: an int64 that wraps around,
    in the same way on all devices. The factors differ, so that the order of the words counts. They
    are odd, so that a change of one word always changes the sum: an odd factor has an inverse
    modulo 2**64.
    """
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for chunk in words.split(2**20):  # int64 copies of a chunk, not of a whole embedding matrix
        i = torch.arange(len(chunk), device=words.device) + first
        total += (chunk.long() * (i * 2 + 1)).sum()
        first += len(chunk)
    return total


def first_word(p):
    """The number of the first word of this rank's part, counted in the whole parameter."""
    if not is_shard(p):
        return 0
    from options import shards

    return shards.first_word(p)


def outvoted(values):
    """The ranks with another value than the majority; all ranks where there is no majority."""
    common = max(values, key=values.count)
    odd = [rank for rank, value in enumerate(values) if value != common]
    return odd if 2 * len(odd) < len(values) else list(range(len(values)))


# --------------------------------------------------------------------------------------------------
# gradients, and tensors of a batch


def check_gradients(norm, model, name, iteration):
    """
    Raise Stop, with the cause or the first bad tensor, if the gradients' norm is not finite. The
    gradients are summed over the ranks, so a NaN or inf of any rank is in the sum on all ranks: all
    stop here together, before the optimizer changes the weights.
    """
    if torch.isfinite(norm):
        return
    find_cause(iteration)
    names = [(n, p) for n, p in model.named_parameters() if p.grad is not None]
    flags = torch.stack([(~my_part(p.grad).isfinite()).any() for _, p in names])  # (parameters,)
    # of a sharded parameter, another rank may have the part that is not finite
    bad = all_reduce_max(flags.double().to(wire())).nonzero().flatten().tolist()
    bad = names[bad[0]][0] if bad else "the norm (overflow)"
    raise Stop(f"iteration {iteration}: the gradient of {name}'s {bad} is not finite; stopped "
               "before the step. Lower the learning rate, or look at the scores and the data of "
               "this iteration")


def check_finite(tensors, iteration):
    """
    Raise Stop, with the cause, or else the tensor and the row, if one of {name: tensor (B, ...)}
    has a NaN or inf. The tensors are equal on all ranks, so all ranks find it together.
    """
    for name, t in tensors.items():
        bad = ~t.isfinite()
        if bad.any():
            find_cause(iteration)
            raise Stop(f"iteration {iteration}: {name} is not finite (first in response "
                       f"{int(bad.nonzero()[0, 0])} of the batch); stopped before the step")

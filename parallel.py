"""
Raw torch.distributed. A rank is a process that runs the whole script on its own share of the data.
A collective is a call in which the ranks exchange tensors. All ranks must make the same collectives
in the same order, because each rank waits there for the others. In a run of one process every
function here returns at once, so the scripts need no `if distributed`.

The collectives of one iteration of ppo.py, in order. n ranks, B responses, R response length:

 no  phase    function              torch's call  numbers      what all ranks have afterwards
  1  rollout  stop_agreed           all_reduce    1            was any rank asked to stop?
  2  rollout  gather_rows           all_gather    B/n rows     all B responses
  3  rollout  stop_agreed           all_reduce    1            was any rank asked to stop?
  4  score    in_step               all_gather    1            has a rule failed on any rank?
  5  score    gather_rows           all_gather    B/n scores   the scores of all B responses
  6  score    stop_agreed           all_reduce    1            was any rank asked to stop?
  7  score    all_reduce_sum        all_reduce    3 B R        old_logprobs, ref_logprobs, values
  8  score    must_agree            all_reduce    1            the sampler's largest error
  9  update   must_agree            all_reduce    1            the first ratios' distance from 1
 10  update   all_reduce_gradients  all_reduce    policy       the sum of the policy's gradients
 11  update   all_reduce_gradients  all_reduce    value_model  the sum of the value model's
 12  metrics  all_reduce_metrics    all_reduce    10           five metrics: a sum and a count each
 13  log      write_log             all_gather    1            has rank 0 written its line?

10 and 11 run once in each optimizer step, 9 only in the first one. 2 and 5 send rows as bytes.
grpo.py has no value model: there is no 11; 7 has 2 B R numbers and 12 has 8. With one minibatch 7
has B R numbers, because the policy does not read, and a 7 of its old_logprobs comes before 8.
grpo.py runs 2 to 6 once more for each refill.

Some iterations add calls: the first one (row 8 once more, against the reference), and iterations
that audit, evaluate or save.
zero_stage 1 sends the new weights to all ranks after each optimizer step. Sharded models
(zero_stage 2 and 3) gather their weights and reduce their gradients inside forward and backward;
then clip_gradients adds an all_reduce of 1 number a model, for the norm, and before the rollout
decoding_copy gathers the policy.

In the code: the docstring of a function that is a collective begins with the words "A collective".
A line that calls such a function is marked # COLLECTIVE, in the training scripts and in their
shared files (rollout.py, rewards.py, run.py, options/roles.py).
"""
import contextlib
import itertools
import math

import torch
import torch.distributed as dist

from errors import Lost

phase = "start"  # set by the scripts, e.g. "iteration 7, update": a lost rank is reported with it

# Where ranks have roles (the key roles), all functions here are for the ranks of one role: `group`
# is their group, and its number 0 is the rank `first` of all ranks. None: there are no roles.
# others: the name of its ranks in an error
group, first, others = None, 0, "the other ranks"
roles, role = {}, ""  # {role: the range of its ranks}, and this rank's role; empty: no roles

stop = False  # whether this rank, or a rank of another role, has been asked to stop


def rank_and_size():
    """(the number of this process, how many there are); (0, 1) where there is no group."""
    if not dist.is_initialized():
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


@contextlib.contextmanager
def everyone():
    """In this block the functions below are for all ranks, whatever their roles are."""
    global group, first, others
    before = group, first, others
    group, first, others = None, 0, "the other ranks"
    try:
        yield
    finally:
        group, first, others = before


def wire():
    """The device of the tensors that the group can send: the GPU with nccl, the CPU with gloo."""
    return torch.device("cuda" if dist.is_initialized() and dist.get_backend() == "nccl" else "cpu")


def collective(operation, *args, **kwargs):
    """
    A collective: operation(*args, **kwargs), which is one of torch.distributed's. Raises Lost if
    another rank was killed (at once) or does not come (after `timeout` seconds).
    """
    try:
        return operation(*args, **kwargs)
    except RuntimeError as e:  # the errors of gloo, of nccl and of the store are all of this class
        raise lost(e, others) from e


def lost(error, whom):
    """The Lost to raise for a collective that failed with this error; its line names the phase."""
    what_to_do = "The last checkpoint is good; resume with the same command"
    who = "one was killed, or hangs"
    if phase == "start":
        what_to_do = "Look at what it said, and type the same command again"
        who = "one could not start, was killed, or hangs"
    return Lost(f"{phase}: lost touch with {whom}: {who} ({reason(error)}). {what_to_do}")


def reason(error):
    """The first sentence of an error of torch's, without the [file and line] before it."""
    first_line = str(error).strip().partition("\n")[0]
    return first_line.rpartition("] ")[2].partition(". ")[0].strip() or type(error).__name__


# --------------------------------------------------------------------------------------------------
# requests to stop


def stop_asked():
    """Whether this rank has been asked to stop; fast, for loops that can end early."""
    return stop


def stop_agreed():
    """
    A collective: whether any rank has been asked to stop; the same answer on all ranks, because
    they must leave together: a rank that stayed would wait for the others.
    """
    return bool(all_reduce_max(torch.tensor(float(stop_asked()), device=wire())))


# --------------------------------------------------------------------------------------------------
# the work of each rank


def share(n, rank, size):
    """A rank's range of 0 .. n - 1: contiguous; lengths differ by one at most."""
    return range(rank * n // size, (rank + 1) * n // size)


def my_share(items, together=1):
    """
    This rank's contiguous part of a sequence that all ranks have. It may be empty. together: so
    many neighbouring ranks share one part: the parts that they would have alone, joined.
    """
    rank, size = rank_and_size()
    mine = share(len(items), rank // together, size // together)
    return items[mine.start:mine.stop]


PADDING = 256  # one more micro-batch takes about as much time as so many tokens


def deal_rows(lengths, micro_batch_size, micro_batch_tokens=0, as_rank=None):
    """
    This rank's micro-batches of the rows of all ranks: lists of row numbers. All ranks have equally
    many micro-batches, some of them empty, because a forward of a sharded model is a collective.

    lengths: the tokens of each row, of all ranks. A micro-batch has at most micro_batch_size rows;
    or, with micro_batch_tokens, at most so many tokens, padding included (a longer row is alone).
    as_rank: (rank, size) instead of this rank's own.

    The rows are sorted, the longest first, and dealt to the ranks like cards: so all ranks have
    about equally many tokens, and the rows of a micro-batch about the same length. With lengths of
    5, 2, 3, 4 on two ranks, rank 0 gets the rows 0 and 2, and rank 1 the rows 3 and 1. A row also
    begins a new micro-batch where the present one would have more than PADDING tokens of padding.
    """
    rank, size = as_rank or rank_and_size()
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    dealt = []  # for each rank its micro-batches
    for mine in (order[number::size] for number in range(size)):
        parts, part = [], []
        for i in mine:
            tokens = lengths[(part or [i])[0]] * (len(part) + 1)  # with row i, and with padding
            full = tokens > micro_batch_tokens > 0
            full |= len(part) == micro_batch_size and micro_batch_tokens == 0
            if part and (full or tokens - sum(lengths[j] for j in [*part, i]) > PADDING):
                parts.append(part)
                part = []
            part.append(i)
        dealt.append(parts + [part] if part else parts)
    return dealt[rank] + [[]] * (max(map(len, dealt)) - len(dealt[rank]))


# --------------------------------------------------------------------------------------------------
# tensors


def broadcast_parameters(models):
    """
    A collective: overwrite every rank's parameters with rank 0's, so that all start from the same
    bytes. Sharded parameters stay as they are: each rank has another part.
    """
    if not dist.is_initialized():
        return
    for model in models:
        for p in model.parameters():
            if not is_shard(p):
                sent = p.data.to(wire())  # p.data itself, unless it is offloaded to the CPU
                broadcast(sent)
                p.data.copy_(sent)


def broadcast(t, source=0):
    """A collective: overwrite t on every rank with the t of rank `source`."""
    collective(dist.broadcast, t, src=first + source, group=group)


def gather_rows(mine, total):
    """
    A collective: the rows of all ranks, in the order of the ranks, on every rank. mine: {name:
    tensor (b, ...)}, where the b rows are this rank's my_share of `total` rows -> {name: tensor
    (total, ...)}, bit for bit the sent ones. b may be 0.

    One all_gather for all columns: a row is sent as its bytes, column after column.
    """
    if not dist.is_initialized():
        return mine
    columns = [as_bytes(t) for t in mine.values()]  # (b, bytes of the column) each
    packed = torch.cat(columns, 1)  # (b, bytes of a row)
    # all_gather needs the same shape on all ranks: a shorter share is padded with zeros
    size = rank_and_size()[1]
    counts = [len(share(total, rank, size)) for rank in range(size)]
    padded = packed.new_zeros(max(counts), packed.shape[1])
    padded[:len(packed)] = packed
    parts = all_gather(padded)
    rows = torch.cat([part[:n] for part, n in zip(parts, counts, strict=True)])  # (total, bytes)
    widths = [column.shape[1] for column in columns]
    return {name: from_bytes(column, t)
            for (name, t), column in zip(mine.items(), rows.split(widths, 1), strict=True)}


def as_bytes(t):
    """A tensor (b, ...) of any dtype -> its bytes (b, bytes of a row), uint8."""
    rows = t.reshape(len(t), math.prod(t.shape[1:]))  # (b, elements of a row)
    return rows.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def from_bytes(rows, like):
    """The inverse: bytes (B, bytes of a row) -> a tensor (B, ...), of the dtype of `like`."""
    t = like.new_empty(len(rows), *like.shape[1:])
    t.view(len(t), math.prod(t.shape[1:])).view(torch.uint8).copy_(rows)
    return t


def all_gather(t):
    """A collective: [rank 0's t, rank 1's t, ...], for tensors of one shape and dtype."""
    if not dist.is_initialized():
        return [t]
    parts = [torch.empty_like(t) for _ in range(rank_and_size()[1])]
    collective(dist.all_gather, parts, t.contiguous(), group=group)
    return parts


def all_reduce_sum(tensors):
    """A collective: {name: tensor}, all of one shape and dtype, summed over the ranks, one call."""
    if not dist.is_initialized() or not tensors:
        return tensors
    total = torch.stack(list(tensors.values()))
    collective(dist.all_reduce, total, group=group)
    return dict(zip(tensors, total, strict=True))


def all_reduce_max(t):
    """A collective: the elementwise maximum over all ranks. NaN becomes inf: max may drop a NaN."""
    if dist.is_initialized():
        t = torch.where(t.isnan(), torch.inf, t)
        collective(dist.all_reduce, t, op=dist.ReduceOp.MAX, group=group)
    return t


def all_reduce_metrics(metrics):
    """
    A collective: {name: [sum, count]}, the same names on all ranks -> {name: sum of the sums / sum
    of the counts}, in one call. A mean of the ranks' means would be another number where the counts
    differ.
    """
    pairs = torch.stack([torch.stack([torch.as_tensor(x, dtype=torch.float64).cpu() for x in pair])
                         for pair in metrics.values()])  # (metrics, 2)
    if dist.is_initialized():
        pairs = pairs.to(wire())
        collective(dist.all_reduce, pairs, group=group)
    return {name: total / max(count, 1)
            for name, (total, count) in zip(metrics, pairs.tolist(), strict=True)}


# --------------------------------------------------------------------------------------------------
# gradients


class Flat:
    """
    The gradients of whole parameters of one dtype. Each p.grad is a view of one tensor, `flat`: so
    the all_reduce needs no copy, and zeroing and clipping are one operation each. Never call
    zero_grad, because it deletes the views; zero the flat tensor.
    """

    def __init__(self, parameters):
        self.flat = torch.zeros(sum(p.numel() for p in parameters), dtype=parameters[0].dtype,
                                device=parameters[0].device)
        begin = 0
        for p in parameters:
            p.grad = self.flat[begin:begin + p.numel()].view_as(p)
            begin += p.numel()

    def zero_(self):
        self.flat.zero_()

    def mul_(self, factor):
        self.flat.mul_(factor)

    def norm(self):
        return self.flat.norm()

    def all_reduce(self):
        """A collective: the sum over the ranks."""
        if dist.is_initialized():
            collective(dist.all_reduce, self.flat, group=group)


def flatten_gradients(models):
    """{name: model} -> {name: the buffers of its gradients}, a list, see buffers_of."""
    return {name: buffers_of(model.parameters()) for name, model in models.items()}


def buffers_of(parameters):
    """
    The gradients of the trained parameters, as a list of buffers: a Flat for each dtype, and one
    Shards for all sharded parameters, if there are any.
    """
    trained = [p for p in parameters if p.requires_grad]
    whole = [p for p in trained if not is_shard(p)]
    shards = [p for p in trained if is_shard(p)]
    buffers = [Flat([p for p in whole if p.dtype == dtype])
               for dtype in sorted({p.dtype for p in whole}, key=str)]
    if shards:
        from options.shards import Shards

        buffers.append(Shards(shards))
    return buffers


def zero_gradients(gradients):
    """Called before the first micro-batch of a step. gradients: of flatten_gradients."""
    for flat in itertools.chain(*gradients.values()):
        flat.zero_()


def all_reduce_gradients(gradients, scale=1.0):
    """
    A collective: sum the gradients over the ranks, and divide by the scale of the loss. DDP takes
    the mean; here it is the sum, because each rank's loss is already divided by the number of
    tokens of *all* ranks. gradients: of flatten_gradients.
    """
    for flat in itertools.chain(*gradients.values()):
        flat.all_reduce()
        if scale != 1.0:
            flat.mul_(1 / scale)


def clip_gradients(buffers, max_norm):
    """
    Scale the gradients to a joint norm of at most max_norm (0 = no change); returns the norm
    before. With sharded models a collective: a rank knows only the norm of its part.
    """
    norms = [flat.norm() for flat in buffers]
    norm = norms[0] if len(norms) == 1 else torch.stack([n.double() for n in norms]).norm()
    if max_norm > 0:
        # a norm that is not finite changes nothing: so check_gradients can find the bad tensor
        scale = torch.where(norm.isfinite(), (max_norm / (norm + 1e-6)).clamp(max=1.0), 1.0)
        for flat in buffers:
            flat.mul_(scale)
    return norm


# --------------------------------------------------------------------------------------------------
# sharded models (zero_stage 2 and 3): each rank has some rows of each parameter, a DTensor


def is_shard(p):
    """Whether a parameter is split over the ranks."""
    return hasattr(p, "placements")


def is_sharded(model):
    """Whether a rank has only a part of a model's weights."""
    return any(map(is_shard, model.owner().parameters()))


def my_part(p):
    """This rank's part of a parameter: its shard, or all of it."""
    return p.to_local() if is_shard(p) else p


def split_like(p, tensor):
    """
    A tensor that every rank has whole -> the same tensor, or, if the parameter p is sharded, the
    tensor split in the same way.
    """
    if not is_shard(p):
        return tensor
    from options.shards import distribute

    return distribute(p, tensor)


def fill(p, tensor):
    """Copy a whole tensor into a parameter; into a sharded one, this rank's part of it."""
    with torch.no_grad():
        p.copy_(split_like(p, tensor))


def gather_parts(t, p):
    """
    A collective: the whole tensor, on every rank. Each rank has a part t of it; the tensor is split
    as the sharded parameter p is.
    """
    from options import shards

    return shards.gather_parts(t, p)  # COLLECTIVE


def part_of(t, p):
    """t, a tensor of a parameter, such as its average; for a sharded p a Part of the whole."""
    if not is_shard(p):
        return t
    from options.shards import Part

    return Part(t, p.shape, t.dtype, like=p)


def whole(t):
    """
    The whole tensor in rank 0's CPU memory, None on the others. A collective where t is split over
    the ranks, or a Part.
    """
    if not torch.is_tensor(t) or is_shard(t):
        from options import shards

        t = shards.whole(t)  # COLLECTIVE
    return t.detach().cpu().contiguous() if rank_and_size()[0] == 0 else None

"""
Tensor-parallel decoding, the key generate_tp: while the policy samples, n neighbouring ranks hold
one copy of it together, each an n-th. They decode the same rows in step, and each ends with the
same tokens. So a policy can be sampled that is too large for one GPU.

Each pair of matrices is cut where they meet, as in Megatron-LM (arXiv 1909.08053, section 3): the
first by its rows, the second by its columns. What lies between them, heads of attention or a part
of the MLP's width, is then one rank's business, and the results need only be added up:

    of                           a rank holds                      all_reduce, all_gather
    embed (V, d)                 the rows of its tokens            its output (n, d)
    q, k, v (heads hd, d)        the rows of its heads
    attention and its KV cache   its heads
    o (d, H hd)                  the columns of its heads          its output (n, d)
    gate, up (ff, d)             ff / n rows
    down (d, ff)                 ff / n columns                    its output (n, d)
    lm_head (V, d)               V / n rows                        its logits (n, V / n)
    norms, positions             all

That is two all_reduces a layer. All ranks sample from the same gathered logits, so from the same
bits, and choose the same tokens.

Fewer heads of keys and values than ranks: each of them is on several ranks, next to each other,
whose queries are those that this head serves.

V vocabulary, d width, H heads with hd coordinates each, ff the MLP's width.
"""
import dataclasses
import functools

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from engine import together
from engine.adapters import LoRA
from errors import BadConfig
from model import Layer, RMSNorm, Transformer, at_least_float32
from parallel import collective, rank_and_size, share, wire

# --------------------------------------------------------------------------------------------------
# the ranks that hold a policy together


class Neighbours:
    """n ranks next to each other; this one has the number 0, 1, ... n - 1 among them."""

    def __init__(self, n, number=0, group=None):
        self.n, self.number, self.group = n, number, group
        self.asked = 0

    def sum(self, t):
        """A collective of the neighbours: t, added up in its own memory."""
        if self.n > 1:
            collective(dist.all_reduce, t, group=self.group)
        return t

    def gather(self, t):
        """A collective of the neighbours: [number 0's t, number 1's t, ...]."""
        if self.n == 1:
            return [t]
        parts = [torch.empty_like(t) for _ in range(self.n)]
        collective(dist.all_gather, parts, t.contiguous(), group=self.group)
        return parts

    def any(self, flag, every=1):
        """
        A collective of the neighbours: whether the flag is true on any of them. every: they only
        ask each other at each so-manieth call, and the others say no.
        """
        if self.n == 1:
            return flag
        self.asked += 1
        if self.asked % every:
            return False
        return bool(self.sum(torch.tensor(float(flag), device=wire())))


ALONE = Neighbours(1)


@functools.cache
def neighbours(n):
    """A collective at its first call: the Neighbours of this rank, n of them with itself."""
    if n == 1:
        return ALONE
    rank, size = rank_and_size()
    groups = [collective(dist.new_group, list(range(first, first + n)), together.usual_wait)
              for first in range(0, size, n)]
    return Neighbours(n, rank % n, groups[rank // n])


# --------------------------------------------------------------------------------------------------
# which part of a tensor is whose


def check_split(c, n, of="the policy"):
    """Raise BadConfig unless the heads of a model (its ModelConfig) can be dealt to n ranks."""
    def can(n):
        return c.n_heads % n == 0 and (c.n_kv_heads % n == 0 or n % c.n_kv_heads == 0)

    if not can(n):
        kinds = f"{c.n_heads} attention heads"
        if c.n_kv_heads != c.n_heads:
            kinds += f" and {c.n_kv_heads} heads of keys and values"
        possible = ", ".join(str(m) for m in range(1, c.n_heads + 1) if can(m))
        raise BadConfig(f"generate_tp = {n}: {of} has {kinds}, which so many ranks cannot share; "
                        f"possible are {possible}")


def places(c, number, n):
    """
    {module: slice}: which rows of its tensors the rank of this number holds; of o and down, which
    columns. A module that is not named is held whole.
    """
    kv = share(c.n_kv_heads, number, n)
    if n > c.n_kv_heads:  # a head of keys and values is on n / n_kv_heads ranks
        first = number * c.n_kv_heads // n
        kv = range(first, first + 1)
    q, kv = ([heads.start * c.head_dim, heads.stop * c.head_dim]
             for heads in (share(c.n_heads, number, n), kv))
    ff, V = ([part.start, part.stop] for part in (share(c.d_ff, number, n),
                                                  share(c.vocab_size, number, n)))
    held = dict(embed=V, q=q, k=kv, v=kv, o=q, gate=ff, up=ff, down=ff, lm_head=V)
    if c.qk_norm == "width":
        held |= dict(q_norm=q, k_norm=kv)
    return {module: slice(*bounds) for module, bounds in held.items()}


def part_config(c, number, n):
    """The ModelConfig of the part that the rank of this number holds."""
    sizes = {module: s.stop - s.start for module, s in places(c, number, n).items()}
    return dataclasses.replace(
        c, vocab_size=sizes["embed"], n_heads=sizes["q"] // c.head_dim,
        n_kv_heads=sizes["k"] // c.head_dim, d_ff=sizes["up"])


# --------------------------------------------------------------------------------------------------
# a rank's part of a model


class SplitLayer(Layer):
    """A layer with some of the heads and of the MLP's width. The results of all are added up."""

    def __init__(self, c, index, ranks):
        super().__init__(c, index)
        self.ranks = ranks
        if c.qk_norm == "width":
            self.q_norm = SplitNorm(c, c.n_heads * c.head_dim, ranks)
            self.k_norm = SplitNorm(c, c.n_kv_heads * c.head_dim, ranks)

    def linear(self, name, x, adapter):
        y = super().linear(name, x, adapter)
        return self.ranks.sum(y) if name == "o" else y

    def mlp(self, x, adapter):
        return self.ranks.sum(super().mlp(x, adapter))


class SplitNorm(RMSNorm):
    """OLMo 2's norm of all heads together: the mean of squares is over those of all ranks."""

    def __init__(self, c, dim, ranks):
        super().__init__(c, dim)
        self.ranks = ranks

    def forward(self, x):
        wide = at_least_float32(x)
        squares = self.ranks.sum(wide.square().sum(-1, keepdim=True))  # (B, T, 1)
        # keys that are on several ranks are counted several times, all of them equally often
        mean = squares / (self.ranks.n * x.shape[-1])
        return (wide * (mean + self.eps).rsqrt() * self.weight).to(x.dtype)


class SplitEmbedding(nn.Embedding):
    """The rows of some tokens: those of the others are 0 here, and come from another rank."""

    def __init__(self, rows, d_model, ranks):
        super().__init__(rows.stop - rows.start, d_model)
        self.rows, self.ranks = rows, ranks

    def forward(self, tokens):
        elsewhere = (tokens < self.rows.start) | (tokens >= self.rows.stop)  # (B, T)
        x = super().forward((tokens - self.rows.start).masked_fill(elsewhere, 0))  # (B, T, d)
        return self.ranks.sum(x.masked_fill_(elsewhere[..., None], 0))


class SplitTransformer(Transformer):
    """What one of several ranks holds of a Transformer with an LM head. For decoding alone."""

    def __init__(self, c, ranks):
        """c: the ModelConfig of the whole. Parameters without values, see `part_of`."""
        part = part_config(c, ranks.number, ranks.n)
        super().__init__(part)
        # its logits are those of all tokens
        self.config, self.ranks = dataclasses.replace(part, vocab_size=c.vocab_size), ranks
        self.places = places(c, ranks.number, ranks.n)
        self.embed = SplitEmbedding(self.places["embed"], c.d_model, ranks)
        self.layers = nn.ModuleList(SplitLayer(part, i, ranks) for i in range(c.n_layers))

    def output(self, x):
        """The head, on the trunk's states (..., d) -> the logits of all tokens (..., V)."""
        logits = super().output(x)  # (..., V / n)
        sizes = [len(share(self.config.vocab_size, i, self.ranks.n)) for i in range(self.ranks.n)]
        logits = F.pad(logits, (0, max(sizes) - logits.shape[-1]))  # all_gather wants one shape
        parts = self.ranks.gather(logits)
        return torch.cat([part[..., :size] for part, size in zip(parts, sizes, strict=True)], -1)

    def part_of(self, name, t):
        """What this rank holds of a whole tensor: a view of it. name: as "layers.0.o.weight"."""
        module, kind = name.split(".")[-2:]
        place = self.places.get(module)
        if module not in ("o", "down"):
            return t if place is None else t[place]
        if kind == "bias":  # is added once, and not by each rank
            return t if self.ranks.number == 0 else torch.zeros_like(t)
        return t[:, place]

    def parts_of_adapters(self, layers):
        """
        What this rank holds of an Adapted's adapters. B has the rows of its matrix, and A its
        columns: so of q, k, v, gate and up B is cut, of o and down A. They are not merged into the
        matrices: in 16 bits those would lose most of what an adapter changes.
        """
        split = nn.ModuleList()
        for adapters in layers:
            split.append(nn.ModuleDict())
            for name, a in adapters.items():
                A, B = a.A.detach(), a.B.detach()  # (r, in), (out, r)
                if name in ("o", "down"):
                    A = A[:, self.places[name]]
                else:
                    B = B[self.places[name]]
                A, B = (nn.Parameter(t, requires_grad=False) for t in (A, B))
                split[-1][name] = LoRA(A, B, a.scale)
        return split

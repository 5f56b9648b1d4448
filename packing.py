"""
Texts of different lengths without padding: they lie one behind the other in a single row of N
tokens. All that a model does to each token by itself (norms, linear maps, MLP) is done to this row,
so that nothing is computed for padding. Attention alone must know where each text, called a
document, begins and ends: see document_attention in model.py.

Example, two prompts (padded on the left) with their responses (padded on the right); padding is a
dot, P = 2 and R = 3:

    tokens    . 1   2 3 .          packed   1 2 3   4 5 6 7 8      lengths  3, 5
              4 5   6 7 8          positions 0 1 2  0 1 2 3 4

b rows of a micro-batch, T columns, R of them the response's, N tokens, n response tokens.
"""
import itertools
from dataclasses import dataclass

import torch


@dataclass
class Packed:
    """D documents one behind the other, and what is read of them."""

    tokens: torch.Tensor  # (1, N) int64
    positions: torch.Tensor  # (1, N) int64: where each token stands in its own document
    lengths: list  # D numbers: the tokens of each document
    ends: torch.Tensor  # (D + 1,) int32: 0, and where each document ends; None on a CPU
    wanted: list  # whose states are read: so many tokens not, so many yes, and so on; None: all
    cells: torch.Tensor  # (n,) int64: where what is read belongs in the padded tensor, flattened


def pack(tokens, attention_mask=None):
    """
    Rows (b, T) -> Packed; the states of all tokens are read, and belong to (b, T). attention_mask
    (b, T): True on real tokens, which may be anywhere; None: there is no padding.
    """
    if attention_mask is None:
        attention_mask = torch.ones_like(tokens, dtype=torch.bool)
    cells = attention_mask.flatten().nonzero().squeeze(1)  # (N,)
    return packed(tokens, attention_mask, None, cells)


def pack_responses(mb):
    """
    A micro-batch -> Packed, for what models say of its responses. mb: a dict with tokens (b, T),
    attention_mask (b, T) and response_mask (b, R). Read are the n states that choose the response
    tokens, and whose value is the value before each: the state that chooses a token is that of the
    token before it. The results belong to (b, R).

    So nobody reads the state of a response's last token, and the token is left out. In the example
    of this file's header:

        tokens   1 2    4 5 6 7         wanted   0 no, 2 yes, 1 no, 3 yes
        chosen   2 3      6 7 8         cells    0 1    3 4 5

    This is the one place where states and labels are shifted against each other.
    """
    attention_mask, response_mask = mb["attention_mask"], mb["response_mask"]
    last = attention_mask & (attention_mask.long().cumsum(1) == attention_mask.sum(1, keepdim=True))
    read = attention_mask & ~last  # (b, T): all tokens but the last one
    taken = response_mask.sum(1)  # (b,)
    skipped = read.sum(1) - taken  # (b,)
    wanted = torch.stack([skipped, taken], 1).flatten().tolist()
    return packed(mb["tokens"], read, wanted, response_mask.flatten().nonzero().squeeze(1))


def pack_prompts(prompts, device):
    """
    D prompts, lists of token ids -> Packed. Only the state of each one's last token is read, which
    chooses the first token of the response; they belong to (D,).
    """
    lengths = [len(ids) for ids in prompts]
    tokens = torch.tensor([i for ids in prompts for i in ids], device=device)  # (N,)
    positions = torch.cat([torch.arange(n) for n in lengths]).to(device)  # (N,)
    ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
    wanted = [n for length in lengths for n in (length - 1, 1)]
    cells = torch.arange(len(lengths), device=device)
    return Packed(tokens[None], positions[None], lengths, ends if ends.is_cuda else None, wanted,
                  cells)


def packed(tokens, mask, wanted, cells):
    """Packed, of the tokens (b, T) where mask is True."""
    positions = (mask.long().cumsum(1) - 1)[mask]  # (N,)
    lengths = mask.sum(1)  # (b,)
    ends = None
    if tokens.is_cuda:
        ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    return Packed(tokens[mask][None], positions[None], lengths.tolist(), ends, wanted, cells)


def pick(x, wanted):
    """
    The states that are read, (1, n, d), of all states x (1, N, d). An index x[:, columns] would
    give the same; but its backward pass adds row by row, and takes 20 times as long on a CPU.
    """
    return torch.cat(x.split(wanted, 1)[1::2], 1) if wanted else x


def unpack(x, cells, shape):
    """What was read, x (n, ...), in its cells of a tensor (*shape, ...); the others are 0."""
    flat = x.new_zeros(shape.numel(), *x.shape[1:]).index_copy(0, cells, x)
    return flat.view(*shape, *x.shape[1:])

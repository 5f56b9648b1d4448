"""
Texts of different lengths without padding: they lie one behind the other in a single row of N
tokens. All that a model does to each token by itself (norms, linear maps, MLP) is done to this row,
so that nothing is computed for padding. Attention alone must know where each text, called a
document, begins and ends: see document_attention in model.py.

Example, two prompts (padded on the left) with their responses (padded on the right); padding is a
dot, P = 2 and R = 3:

    tokens    . 1   2 3 .          packed     1 2 3   4 5 6 7 8      lengths  3, 5
              4 5   6 7 8          positions  0 1 2   0 1 2 3 4

b rows of a micro-batch, T columns, R of them the response's; N tokens, n of which are chosen.
"""
import itertools
from dataclasses import dataclass

import torch
from torch.nn.functional import pad


@dataclass
class Packed:
    """D documents one behind the other, and which states are read."""

    tokens: torch.Tensor  # (1, N) int64
    positions: torch.Tensor  # (1, N) int64: where each token stands in its own document
    lengths: list  # D numbers: the tokens of each document
    ends: torch.Tensor  # (D + 1,) int32: 0, and where each document ends; None on a CPU
    wanted: list = None  # whose states are read: so many not, so many yes, and so on; None: all
    chosen: torch.Tensor = None  # (n,) int64: the tokens that these states choose, if they do
    cells: torch.Tensor = None  # (n,) int64: where what is read belongs in a padded tensor


def pack(tokens, attention_mask=None):
    """
    Rows (b, T) -> Packed; the states of all tokens are read, and belong to the cells of (b, T).
    attention_mask (b, T): True on real tokens, which may be anywhere; None: there is no padding.
    """
    if attention_mask is None:
        attention_mask = torch.ones_like(tokens, dtype=torch.bool)
    packed = lay_out(tokens, attention_mask)
    packed.cells = attention_mask.flatten().nonzero().squeeze(1)  # (N,)
    return packed


def pack_choices(tokens, attention_mask, chosen):
    """
    Rows (b, T) -> Packed, for the log-probs of the tokens where chosen (b, T) is True: the states
    that are read are those that choose them. The state that chooses a token is that of the token
    before it: this is the one place where states and tokens are shifted against each other.

    What stands behind the last state that is read is left out. In the example of this file's
    header, with the responses chosen:

        tokens   1 2    4 5 6 7         wanted   0 not, 2 yes, 1 not, 3 yes
        chosen   2 3      6 7 8
    """
    chosen = chosen & (torch.arange(chosen.shape[1], device=chosen.device) > 0)
    read = pad(chosen[:, 1:], (0, 1))  # (b, T)
    needed = read.flip(1).cumsum(1).flip(1) > 0  # (b, T): up to the last one that is read
    needed = needed & attention_mask
    packed = lay_out(tokens, needed)
    is_read, counts = read[needed].unique_consecutive(return_counts=True)
    packed.wanted = [0] * bool(is_read[:1].any()) + counts.tolist()
    packed.chosen = tokens[chosen]
    return packed


def pack_responses(mb):
    """
    pack_choices for the responses of a micro-batch: what is read belongs to the cells of (b, R).
    mb: a dict with tokens and attention_mask (b, T) and response_mask (b, R).
    """
    mask, T = mb["response_mask"], mb["tokens"].shape[1]
    chosen = pad(mask, (T - mask.shape[1], 0))  # (b, T)
    packed = pack_choices(mb["tokens"], mb["attention_mask"], chosen)
    packed.cells = mask.flatten().nonzero().squeeze(1)  # (n,)
    return packed


def pack_prompts(prompts, device):
    """
    D prompts, lists of token ids -> Packed, for the logits of what follows them: the state of each
    one's last token is read.
    """
    lengths = [len(ids) for ids in prompts]
    tokens = torch.tensor([i for ids in prompts for i in ids], device=device)  # (N,)
    positions = torch.cat([torch.arange(n) for n in lengths]).to(device)  # (N,)
    ends = None
    if tokens.is_cuda:
        ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
    wanted = [n for length in lengths for n in (length - 1, 1)]
    return Packed(tokens[None], positions[None], lengths, ends, wanted)


def lay_out(tokens, mask):
    """Packed, of the tokens (b, T) where mask is True."""
    positions = mask.long().cumsum(1) - 1  # (b, T)
    lengths = [length for length in mask.sum(1).tolist() if length]
    ends = None
    if tokens.is_cuda:
        ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32).to(tokens.device)
    return Packed(tokens[mask][None], positions[mask][None], lengths, ends)


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

"""
The KV cache: keys and values of the rows that decode together, so that a step of the rollout
computes those of one new token a row, and no others again.

n rows, S columns in use, KV heads of keys and values with hd coordinates each.
"""
import torch


class KVCache:
    """
    Keys and values of all layers, (n, KV, columns, hd) each. Column j of a row holds the token at
    position j. So rows of unequal lengths need no padding, and a row is free for another response
    at any time: what stands behind the row's own tokens is never looked at.

    Two kinds of forward passes fill it: those that read prompts, which `take` announces, and steps,
    which append one token to each row.

        lengths (n,) int64  how many tokens each row has, and so the position of its next one
        longest             the largest of them
    """

    def __init__(self, c, n, columns, dtype, device):
        shape = (n, c.n_kv_heads, columns, c.head_dim)
        # zeros, because what a mask hides must be finite: NaN times 0 is NaN
        self.k = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(c.n_layers)]
        self.v = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(c.n_layers)]
        self.columns, self.device = columns, device
        self.lengths, self.longest = torch.zeros(n, dtype=torch.int64, device=device), 0
        # which of a forward's tokens go where: tokens (m,), None: all; rows (m,); columns (m,)
        self.tokens = self.rows = self.at = None
        self.tables = None  # rotations of all positions, see `rotations`

    def take(self, rows, which, lengths):
        """
        The next forward reads packed prompts of these lengths. rows[i] begins with the prompt of
        number which[i]. All three are lists of numbers.
        """
        ends = torch.tensor(lengths).cumsum(0).tolist()
        begins = [end - length for end, length in zip(ends, lengths, strict=True)]
        self.tokens, self.rows, self.at = (torch.cat(x).to(self.device) for x in zip(*(
            (torch.arange(begins[i], ends[i]), torch.full((lengths[i],), row),
             torch.arange(lengths[i])) for row, i in zip(rows, which, strict=True)), strict=True))
        taken = torch.tensor([lengths[i] for i in which], device=self.device)
        self.set_lengths(self.lengths.index_copy(0, torch.tensor(rows, device=self.device), taken))

    def begin_step(self):
        """Before the layers of a step. Returns the positions of its tokens, (n, 1)."""
        self.tokens, self.at = None, self.lengths
        self.rows = torch.arange(len(self.lengths), device=self.device)
        self.lengths, self.longest = self.lengths + 1, self.longest + 1
        return self.at[:, None]

    def write(self, layer, k, v):
        """Store the keys and values of a layer's new tokens, (1, N, KV, hd) or (n, 1, KV, hd)."""
        for cache, new in ((self.k[layer], k), (self.v[layer], v)):
            new = new.flatten(0, 1)  # (N or n, KV, hd)
            new = new if self.tokens is None else new[self.tokens]
            cache[self.rows, :, self.at] = new.to(cache.dtype)

    def read(self, layer):
        """The keys and values of a layer's columns in use, (n, KV, S, hd) each."""
        return self.k[layer][:, :, :self.longest], self.v[layer][:, :, :self.longest]

    def masks(self, windows, dtype):
        """
        {window: mask} of a step, (n, 1, 1, S) each, added to the scores of attention: 0 where a
        row's new token may look, itself included, and -inf elsewhere.
        """
        column = torch.arange(self.longest, device=self.device)
        end = self.lengths[:, None]  # (n, 1)
        masks = {}
        for window in set(windows):
            hidden = column >= end  # (n, S)
            if window:
                hidden = hidden | (column < end - window)
            zeros = torch.zeros(hidden.shape, dtype=dtype, device=self.device)
            masks[window] = zeros.masked_fill_(hidden, -torch.inf)[:, None, None]
        return masks

    def rotations(self, model, dtype):
        """model.rotations of a step, from tables that are made once for all positions."""
        if self.tables is None:
            self.tables = model.rotations(torch.arange(self.columns, device=self.device)[None],
                                          dtype)  # (1, columns, 1, rotary_dim) each
        return {window: table and tuple(x[0, self.at, None] for x in table)  # (n, 1, 1, rotary_dim)
                for window, table in self.tables.items()}

    def forget(self, rows):
        """These rows (a list of numbers) have no tokens any more: a step costs little on them."""
        self.set_lengths(self.lengths.index_fill(0, torch.tensor(rows, device=self.device), 0))

    def keep_rows(self, rows):
        """
        Forget all rows but these (a list of numbers). This goes layer by layer, so that there are
        never two copies of the whole cache.
        """
        rows = torch.tensor(rows, device=self.device)
        self.set_lengths(self.lengths[rows])
        for tensors in (self.k, self.v):
            for i, t in enumerate(tensors):
                tensors[i] = t[rows]

    def set_lengths(self, lengths):
        self.lengths, self.longest = lengths, int(lengths.max())

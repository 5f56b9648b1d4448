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
    which `begin_step` announces: they append one token to each row. A forward may be made twice
    after one announcement: it writes the same again.

        lengths (n,) int64  how many tokens each row has, and so the position of its next one
        longest             the largest of them

    at_once: S is a multiple of this, or all columns. Then it seldom changes, and with it the shapes
    of a step (see engine/graphs.py). No other memory of a step changes but in keep_rows.
    """

    def __init__(self, c, n, columns, dtype, device, at_once=1):
        shape = (n, c.n_kv_heads, columns, c.head_dim)
        # zeros, because what a mask hides must be finite: NaN times 0 is NaN
        self.k = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(c.n_layers)]
        self.v = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(c.n_layers)]
        self.columns, self.device, self.at_once = columns, device, at_once
        self.lengths, self.longest = torch.zeros(n, dtype=torch.int64, device=device), 0
        self.all_rows, self.ends = torch.arange(n, device=device), torch.zeros_like(self.lengths)
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
        self.lengths.index_copy_(0, torch.tensor(rows, device=self.device), taken)
        self.longest = int(self.lengths.max())

    def begin_step(self):
        """The next forward is a step: the tokens (n, 1) that follow in each row."""
        self.ends.copy_(self.lengths)
        self.tokens, self.rows, self.at = None, self.all_rows, self.ends
        self.lengths += 1
        self.longest += 1

    def in_use(self):
        """S, see at_once."""
        return min(-(-self.longest // self.at_once) * self.at_once, self.columns)

    def write(self, layer, k, v):
        """Store the keys and values of a layer's new tokens, (1, N, KV, hd) or (n, 1, KV, hd)."""
        for cache, new in ((self.k[layer], k), (self.v[layer], v)):
            new = new.flatten(0, 1)  # (N or n, KV, hd)
            new = new if self.tokens is None else new[self.tokens]
            cache[self.rows, :, self.at] = new.to(cache.dtype)

    def read(self, layer):
        """The keys and values of a layer's columns in use, (n, KV, S, hd) each."""
        S = self.in_use()
        return self.k[layer][:, :, :S], self.v[layer][:, :, :S]

    def masks(self, windows, dtype):
        """
        {window: mask} of a step, (n, 1, 1, S) each, added to the scores of attention: 0 where a
        row's new token may look, itself included, and -inf elsewhere.
        """
        column = torch.arange(self.in_use(), device=self.device)
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
        self.lengths.index_fill_(0, torch.tensor(rows, device=self.device), 0)
        self.longest = int(self.lengths.max())

    def keep_rows(self, rows):
        """
        Forget all rows but these (a list of numbers). This goes layer by layer, so that there are
        never two copies of the whole cache.
        """
        rows = torch.tensor(rows, device=self.device)
        self.lengths = self.lengths[rows]
        self.all_rows, self.ends = self.all_rows[:len(rows)], torch.zeros_like(self.lengths)
        self.longest = int(self.lengths.max())
        for tensors in (self.k, self.v):
            for i, t in enumerate(tensors):
                tensors[i] = t[rows]

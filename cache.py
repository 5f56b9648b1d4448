"""
The KV cache: keys and values of the rows that decode together, so that each step of the rollout
computes those of one new token alone.

n rows, S columns in use, KV heads of keys and values with hd coordinates each, T new tokens.
"""
import torch


class KVCache:
    """
    Keys and values of all layers, for n rows that decode together. Column j of a row holds the
    token at position j. So rows of unequal lengths need no padding, and a row is free for another
    response at any time: what stands behind a row's own tokens is never looked at.

    Two kinds of forward passes fill it: one that reads prompts, announced by `take`, and steps,
    which append one token to each row. Between them:

        lengths (n,) int64  the tokens of each row, and so the position of its next one
        longest             a number that no length exceeds, known without asking the device
    """

    def __init__(self, c, n, columns, dtype, device):
        shape = (n, c.n_kv_heads, columns, c.head_dim)
        # zeros, because what is hidden by a mask must be finite: NaN times 0 is NaN
        self.k = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(c.n_layers)]
        self.v = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(c.n_layers)]
        self.heads, self.columns = c.n_kv_heads, columns
        self.lengths, self.longest = torch.zeros(n, dtype=torch.int64, device=device), 0
        self.prompts = None  # what `take` has announced
        self.tables = None  # rotations of all positions, made by the first step
        self.place = None  # (n * KV,): where a step's keys go, in (n * KV * columns, hd)

    def take(self, rows, prompts, lengths):
        """
        The next forward reads prompts (U, T), padded on the right, and rows[i] begins with those of
        prompts[i]: its first lengths[i] tokens. rows, prompts, lengths: (m,) int64 each.
        """
        self.prompts = rows, prompts, lengths

    def write(self, layer, k, v):
        """
        Store a layer's new k, v (B, KV, T, hd), and return what their queries may look at: the
        prompts' own, or in a step (T = 1) the rows' columns in use, (n, KV, S, hd).
        """
        if self.prompts is not None:
            rows, prompts, _ = self.prompts
            self.k[layer][rows, :, :k.shape[2]] = k[prompts].to(self.k[layer].dtype)
            self.v[layer][rows, :, :v.shape[2]] = v[prompts].to(self.v[layer].dtype)
            return k, v
        for cache, new in ((self.k[layer], k), (self.v[layer], v)):
            new = new.reshape(-1, new.shape[-1])  # (n * KV, hd)
            cache.view(-1, new.shape[-1]).index_copy_(0, self.place, new.to(cache.dtype))
        return self.k[layer][:, :, :self.longest + 1], self.v[layer][:, :, :self.longest + 1]

    def begin_forward(self):
        """
        Whether the forward that begins is a step, and not one that reads prompts. Of a step it
        makes what all layers need: where each row's new token goes.
        """
        if self.prompts is not None:
            return False
        first = torch.arange(len(self.lengths) * self.heads, device=self.lengths.device)
        self.place = first * self.columns + self.lengths.repeat_interleave(self.heads)
        return True

    def rotations(self, model, dtype):
        """model.rotations of a step, taken from tables that are made once for all positions."""
        if self.tables is None:
            positions = torch.arange(self.columns, device=self.lengths.device)[None]
            self.tables = model.rotations(positions, dtype)  # of (1, 1, columns, rotary_dim)
        return {window: table and tuple(x[0, 0, self.lengths][:, None, None] for x in table)
                for window, table in self.tables.items()}

    def end_forward(self):
        """After the layers: the lengths as they are now."""
        if self.prompts is None:
            self.lengths, self.longest = self.lengths + 1, self.longest + 1
            return
        rows, _, lengths = self.prompts
        self.lengths[rows], self.prompts = lengths, None
        self.longest = int(self.lengths.max())

    def masks(self, windows, dtype):
        """
        {window: mask} of a step, (n, 1, 1, S) each, to be added to the scores: 0 where the new
        token may look, itself included, and -inf elsewhere.
        """
        column = torch.arange(self.longest + 1, device=self.lengths.device)
        last = self.lengths[:, None]  # (n, 1): the new token's column
        masks = {}
        for window in set(windows):
            hidden = column > last  # (n, S)
            if window:
                hidden = hidden | (column <= last - window)
            zeros = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            masks[window] = zeros.masked_fill_(hidden, -torch.inf)[:, None, None]
        return masks

    def forget(self, rows):
        """These rows (an index tensor) have no tokens any more; a step costs least on them."""
        self.lengths = self.lengths.index_fill(0, rows, 0)
        self.longest = int(self.lengths.max())

    def keep_rows(self, rows):
        """
        Forget all rows but these (an index tensor). This goes layer by layer, so that there are
        never two copies of the whole cache.
        """
        self.lengths = self.lengths[rows]
        self.longest = int(self.lengths.max())
        for tensors in (self.k, self.v):
            for i, t in enumerate(tensors):
                tensors[i] = t[rows]

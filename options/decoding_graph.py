"""
The steps of a decoding as a CUDA graph.

A step of a 1B model is a thousand small kernels. Python takes 13 ms to launch them one by one, and
an H200 takes 2 ms to run them. A graph is a recording of them that is launched at once. It records
addresses and shapes, so these must not change: the cache has a fixed number of columns, a mask
hides the columns that are not used yet, and a step's inputs are written to the same places. When
rows leave, or all columns are used, another graph is recorded.
"""
import contextlib

import torch
import torch.nn.functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from decoding_cache import RoomyLayer
from errors import first_line

COLUMNS = 256  # a graph has room for so many tokens
MULTIPLE = 64  # kernels are faster with whole multiples

off = ""  # the reason why this process decodes without graphs, after one has failed


def steps_of(policy, cache, longest):
    """
    (cache, next_logits) for a decoding by graphs; as they are, where a layer of the model does not
    see all tokens. cache: empty. longest: the most columns that it may need.
    """
    full = all(type(layer) is RoomyLayer for layer in cache.layers)
    if off or not full or policy.config._attn_implementation != "sdpa":
        return cache, policy.next_logits
    cache.layers = [HeldLayer() for _ in cache.layers]
    return cache, Steps(policy, cache, longest).next_logits


class Steps:
    """
    The steps of one decoding: next_logits is Model.next_logits for one token of each row. Its first
    step is computed in both ways; if they differ, or no graph can be recorded, this process goes on
    without graphs.
    """

    def __init__(self, policy, cache, longest):
        self.policy, self.cache, self.longest = policy, cache, longest
        self.graph, self.rows, self.columns = None, 0, 0
        self.proved = False

    def next_logits(self, token, cache, mask, position):
        """
        token (rows, 1), cache: self.cache, mask (rows, columns so far, the token's included),
        position (rows, 1) -> logits (rows, V), which the next step overwrites.
        """
        global off
        rows, used = mask.shape
        if off:
            return self.policy.next_logits(token, self.cache, mask, position)
        if rows == self.rows and used <= self.columns:
            self.token.copy_(token)
            self.graph.replay()
            return self.logits
        want = None
        if not self.proved:
            want = self.policy.next_logits(token, self.cache, mask, position)
        try:
            self.record(token, mask, position)
            self.graph.replay()
            if want is not None:
                check_alike(self.logits, want)
            self.proved = True
            return self.logits
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as e:  # of torch, if a forward waits for the GPU; and of check_alike
            off = first_line(e)
            print(f"decoding without CUDA graphs: {off}", flush=True)
            self.graph = None
            for layer in self.cache.layers:
                layer.hold(used - 1, used, None)
            return self.policy.next_logits(token, self.cache, mask, position)

    def record(self, token, mask, position):
        """A graph for the steps from here on; see next_logits."""
        rows, used = mask.shape
        columns = -(-min(used + COLUMNS, self.longest) // MULTIPLE) * MULTIPLE
        self.graph = None  # its memory is free for the next one
        self.token, self.position = token.clone(), position.clone()
        self.column = torch.tensor([used - 1], device=token.device)
        self.seen = mask.new_zeros(rows, 1, 1, columns)  # which columns a row sees
        self.seen[..., :used - 1] = mask[:, None, None, :-1]
        for layer in self.cache.layers:
            layer.hold(used - 1, columns, self.column)
        with heads_in_groups():
            self.step()  # not recorded: the first launch of a kernel does work that cannot be
            self.position.copy_(position)
            self.column.fill_(used - 1)
            self.graph, self.logits = self.capture()
        self.rows, self.columns = rows, columns

    def capture(self):
        """Record a step, without computing it: (the graph, the logits of its replays)."""
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                logits = self.step()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        return graph, logits

    def step(self):
        """Read self.token, and prepare mask, position and column for the next step."""
        self.seen.index_fill_(3, self.column, True)
        logits = self.policy.next_logits(self.token, self.cache, self.seen, self.position)
        self.position += 1
        self.column += 1
        return logits


@contextlib.contextmanager
def heads_in_groups():
    """The block in which transformers' sdpa is `attend`."""
    usual = ALL_ATTENTION_FUNCTIONS["sdpa"]
    ALL_ATTENTION_FUNCTIONS["sdpa"] = attend
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = usual


def attend(module, query, key, value, attention_mask, scaling=None, **_):
    """
    Attention of one new token of each row: query (rows, H, 1, d), key and value (rows, K, T, d),
    attention_mask (rows, 1, 1, T) -> (rows, 1, H, d). The H / K heads that share keys become tokens
    of one query, so each key is read once. transformers would first copy it for each head.
    """
    rows, H, _, d = query.shape
    query = query.reshape(rows, key.shape[1], -1, d)  # (rows, K, H / K, d)
    out = F.scaled_dot_product_attention(query, key, value, attention_mask, scale=scaling)
    return out.reshape(rows, 1, H, -1), None


def check_alike(ours, theirs):
    """Raise RuntimeError unless two logits of the same step are about the same."""
    gap = ((ours.float() - theirs.float()).norm() / theirs.float().norm()).item()
    if not gap < 0.05:
        raise RuntimeError(f"its logits differ by {100 * gap:.2g} %")


# --------------------------------------------------------------------------------------------------
# the cache


class HeldLayer(RoomyLayer):
    """
    A layer that can be held: column, None; or, after `hold`, a tensor: the column into which the
    next token is written.
    """

    column = None

    def update(self, key_states, value_states, *args, **kwargs):
        """As RoomyLayer's; of a held layer it returns the spare columns, too: a mask hides them."""
        if self.column is None:
            return super().update(key_states, value_states)
        for room, new in zip(self.rooms, (key_states, value_states), strict=True):
            room.index_copy_(2, self.column, new.to(room.dtype))
        return tuple(self.rooms)

    def hold(self, used, columns, column):
        """
        Keep the first `used` columns, in rooms of so many columns with fixed addresses. From now on
        the one new token of each row is written to `column`, a tensor (1,); None: as before.
        """
        full, self.rooms = self.rooms, []
        for room in full:
            # a hidden column is multiplied by 0, so it must have no NaN
            self.rooms.append(room.new_zeros(*room.shape[:2], columns, room.shape[-1]))
            self.rooms[-1][:, :, :used] = room[:, :, :used]
        self.keys, self.values = (room[:, :, :used] for room in self.rooms)
        self.column = column

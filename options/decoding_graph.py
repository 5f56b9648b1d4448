"""
The steps of a decoding as a CUDA graph.

A step of a 1B model is a thousand small kernels. Python takes 13 ms to launch them one by one, and
an H200 takes 2 ms to run them. A graph is a recording of them that is launched at once. It records
addresses and shapes, so these must not change: the cache has a fixed number of columns, a mask
hides those that are not used yet, and a step's inputs are written to the same places. When rows
leave, or all columns are used, another graph is recorded. With the key compile torch.compile makes
fewer kernels of a step, once for any number of rows and columns, and these are recorded.
"""
import functools
import time
import warnings

import torch
import torch.nn.functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from errors import first_line, say
from model import roomy_layer
from rollout import draw

COLUMNS = 256  # a graph has room for so many tokens
MULTIPLE = 64  # kernels are faster with whole multiples

# why this process decodes without torch.compile, without graphs: after one of them has failed
uncompiled = off = ""
said = False  # whether the seconds of compiling have been printed
say_once = functools.cache(say)
last = stream = None  # the graph that was recorded last, and the stream on which all are recorded


def steps_of(policy, cache, longest, temperature, compiled=False):
    """
    (cache, Steps) of a decoding by graphs; (cache, None) where a layer does not see all tokens.
    cache: empty. longest: the most columns that it may need. compiled: see decode.
    """
    full = all(type(layer) is roomy_layer() for layer in cache.layers)
    if not full:
        say_once("decoding without CUDA graphs: not all layers of this family see all tokens")
    if off or not full or policy.config._attn_implementation != "sdpa":
        return cache, None
    cache.layers = [HeldLayer() for _ in cache.layers]
    return cache, Steps(policy, cache, longest, temperature, compiled)


class Steps:
    """
    The steps of one decoding, each of one token a row. Its first step is computed in both ways. If
    they differ, or torch.compile fails, this process goes on without it; if a graph of eager
    kernels fails as well, without graphs. A CPU has no graphs, and computes each step anew.
    """

    def __init__(self, policy, cache, longest, temperature, compiled):
        self.policy, self.cache, self.longest = policy, cache, longest
        self.temperature, self.wanted = temperature, compiled
        self.rows, self.columns = 0, 0
        self.proved = False

    def __call__(self, token, uniform, mask, position):
        """
        token (rows, 1), uniform (rows,), mask (rows, columns so far, the token's included),
        position (rows, 1) -> the next token of each row and its log-prob, (rows,) both, which the
        next step overwrites.
        """
        rows, used = mask.shape
        if not off and rows == self.rows and used <= self.columns:
            self.token.copy_(token)
            self.uniform.copy_(uniform)
            return self.replay()[1:]
        want = None
        while not off:
            if want is None and not self.proved:
                want = self.policy.next_logits(token, self.cache, mask, position)
            compiled = self.wanted and not uncompiled
            try:
                self.record(token, uniform, mask, position, compiled)
                logits, *drawn = self.replay()
                if want is not None:
                    check_alike(logits, want)
                    if not torch.equal(drawn[0], self.draw(logits, uniform)[0]):
                        raise RuntimeError("it draws other tokens")
                self.proved = True
                return drawn
            except torch.OutOfMemoryError:
                raise
            except Exception as e:  # torch.compile's own, of any class; of check_alike
                give_up(compiled, e)
                self.proved = False
            for layer in self.cache.layers:
                layer.hold(used - 1, used, None)
        return self.draw(self.policy.next_logits(token, self.cache, mask, position), uniform)

    def draw(self, logits, uniform):
        return draw(logits, uniform, self.temperature, self.policy.tokenizer)

    def record(self, token, uniform, mask, position, compiled):
        """A graph for the steps from here on; see __call__."""
        rows, used = mask.shape
        columns = -(-min(used + COLUMNS, self.longest) // MULTIPLE) * MULTIPLE
        self.compiled, self.rows, self.columns = compiled, rows, columns
        self.graph = self.out = None  # the memory is free for the next ones
        self.token, self.uniform, self.position = token.clone(), uniform.clone(), position.clone()
        self.column = torch.tensor([used - 1], device=token.device)
        self.seen = mask.new_zeros(rows, 1, 1, columns)  # which columns a row sees
        self.seen[..., :used - 1] = mask[:, None, None, :-1]
        for layer in self.cache.layers:
            layer.hold(used - 1, columns, self.column)
        if token.is_cuda:
            try:
                self.capture()
            except torch.OutOfMemoryError:  # a recording gets nothing of what torch keeps unused
                torch.cuda.empty_cache()
                self.capture()

    def capture(self):
        """Compute a step and go back; then record it, which computes nothing."""
        global last, stream
        # The first launch of a kernel cannot be recorded, so the step is computed once before. A
        # wait for the GPU cannot be recorded either, and a recording that fails would harm torch's
        # memory: so a wait is an error already here, but for torch.compile, which waits at first
        with warnings.catch_warnings(action="ignore"):  # torch calls it a prototype
            torch.cuda.set_sync_debug_mode("default" if self.compiled else "error")
        try:
            self.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        self.position -= 1
        self.column -= 1
        graph, stream = torch.cuda.CUDAGraph(), stream or torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # in the memory of the last graph: if each had its own, the old ones' would fill the GPU
            graph.capture_begin(last and last.pool(), "thread_local")
            try:
                self.out = self.step()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = last = graph

    def replay(self):
        """The logits (rows, V), tokens and log-probs (rows,) of the next step."""
        if self.graph is None:
            self.out = self.step()
        else:
            self.graph.replay()
        return self.out

    def step(self):
        """See `compute`, with the tensors that `record` has prepared."""
        usual = ALL_ATTENTION_FUNCTIONS["sdpa"]
        ALL_ATTENTION_FUNCTIONS["sdpa"] = attend
        try:
            return (compute_compiled if self.compiled else compute)(
                self.policy, self.cache, self.token, self.uniform, self.seen, self.position,
                self.column, self.temperature)
        finally:
            ALL_ATTENTION_FUNCTIONS["sdpa"] = usual


def compute(policy, cache, token, uniform, seen, position, column, temperature):
    """
    Read token (rows, 1), and draw the next one: its logits (rows, V), it and its log-prob (rows,).
    seen (rows, 1, 1, columns), position and column are prepared for the next step.
    """
    seen.index_fill_(3, column, True)
    logits = policy.next_logits(token, cache, seen, position)
    drawn = draw(logits, uniform, temperature, policy.tokenizer)
    position += 1
    column += 1
    return logits, *drawn


def compute_compiled(policy, cache, *tensors_and_temperature):
    """
    `compute`, compiled once for any number of rows and columns. torch keeps what it has compiled by
    the code of `compute`, so a new cache, or copy of the policy, of the same sizes is no reason to
    compile again.
    """
    global said
    token, uniform, seen, position, _, _ = tensors_and_temperature
    for t in (token, uniform, position):
        torch._dynamo.maybe_mark_dynamic(t, 0)
    torch._dynamo.maybe_mark_dynamic(seen, (0, 3))
    for buffer in (buffer for layer in cache.layers for buffer in layer.buffers):
        torch._dynamo.maybe_mark_dynamic(buffer, (0, 2))
    began = time.perf_counter()
    # two sizes that are equal the first time may differ later
    with torch.fx.experimental._config.patch(use_duck_shape=False):
        out = torch.compile(compute, fullgraph=True)(policy, cache, *tensors_and_temperature)
    if not said:
        said = True
        print(f"compiled the decoding step in {time.perf_counter() - began:.0f} s", flush=True)
    return out


def give_up(compiled, error):
    """Go on in this process without torch.compile, or, if it was not used, without graphs."""
    global off, uncompiled
    reason = first_line(getattr(error, "inner_exception", error))  # torch.compile wraps some
    if compiled:
        uncompiled = reason
    else:
        off = reason
    what = "torch.compile" if compiled else "CUDA graphs"
    print(f"decoding without {what}: {reason}", flush=True)


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


class HeldLayer(roomy_layer()):
    """A layer that can be held: then `column` is where the next token is written, a tensor."""

    column = None

    def update(self, key_states, value_states, *args, **kwargs):
        """As RoomyLayer's; of a held layer it returns the spare columns, too: a mask hides them."""
        if self.column is None:
            return super().update(key_states, value_states)
        for buffer, new in zip(self.buffers, (key_states, value_states), strict=True):
            buffer.index_copy_(2, self.column, new.to(buffer.dtype))
        return tuple(self.buffers)

    def get_seq_length(self):
        """Of a held layer 1: a model that computes with it must be found at the first step."""
        return super().get_seq_length() if self.column is None else 1

    def hold(self, used, columns, column):
        """
        Keep the first `used` columns, in buffers of `columns` columns, with fixed addresses. From
        now on the one new token of each row is written to `column`, a tensor (1,); None: as before.
        """
        full, self.buffers = self.buffers, []
        for buffer in full:
            # a hidden column is multiplied by 0, so it must have no NaN
            self.buffers.append(buffer.new_zeros(*buffer.shape[:2], columns, buffer.shape[-1]))
            self.buffers[-1][:, :, :used] = buffer[:, :, :used]
        self.keys, self.values = (buffer[:, :, :used] for buffer in self.buffers)
        self.column = column

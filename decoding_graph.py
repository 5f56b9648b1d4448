"""
The steps of a decoding as a CUDA graph.

A step of a 1B model is a thousand small kernels. Python takes 13 ms to launch them one by one, and
an H200 takes 2 ms to run them. A graph is a recording of them that is launched at once. It records
addresses and shapes, so these must not change: the cache has a fixed number of columns, a mask
hides the columns that are not used yet, and a step's inputs are written to the same places. When
rows leave, or all columns are used, another graph is recorded.
"""
import torch

from errors import first_line

COLUMNS = 256  # a graph has room for so many tokens
MULTIPLE = 64  # kernels are faster with whole multiples

off = ""  # the reason why this process decodes without graphs, after one has failed


def steps_of(policy, cache):
    """The Steps of a decoding; None where a layer of the model does not see all tokens."""
    attention = policy.hf.config.get_text_config()._attn_implementation
    fits = not off and attention == "sdpa" and all(hasattr(x, "hold") for x in cache.layers)
    return Steps(policy, cache) if fits else None


class Steps:
    """
    The steps of one decoding: next_logits is Model.next_logits for one token of each row. Its first
    step is computed in both ways; if they differ, or no graph can be recorded, this process goes on
    without graphs.
    """

    def __init__(self, policy, cache):
        self.policy, self.cache = policy, cache
        self.graph, self.rows, self.columns = None, 0, 0
        self.proved = False

    def next_logits(self, token, mask, position, left):
        """
        token (rows,), mask (rows, columns so far, the token's included), position (rows, 1) ->
        logits (rows, V), which the next step overwrites. left: the most steps that may still come,
        this one included.
        """
        global off
        rows, used = mask.shape
        if off:
            return self.policy.next_logits(token[:, None], self.cache, mask, position)
        if rows == self.rows and used <= self.columns:
            self.token.copy_(token[:, None])
            self.graph.replay()
            return self.logits
        want = None
        if not self.proved:
            want = self.policy.next_logits(token[:, None], self.cache, mask, position)
        try:
            self.record(token, mask, position, left)
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
            return self.policy.next_logits(token[:, None], self.cache, mask, position)

    def record(self, token, mask, position, left):
        """A graph for the steps from here on; see next_logits."""
        rows, used = mask.shape
        columns = -(-(used + min(left, COLUMNS)) // MULTIPLE) * MULTIPLE
        self.graph = None  # its memory is free for the next one
        self.token, self.position = token[:, None].clone(), position.clone()
        self.column = torch.tensor([used - 1], device=token.device)
        self.seen = mask.new_zeros(rows, 1, 1, columns)  # which columns a row sees
        self.seen[..., :used - 1] = mask[:, None, None, :-1]
        for layer in self.cache.layers:
            layer.hold(used - 1, columns, self.column)
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


def check_alike(ours, theirs):
    """Raise RuntimeError unless two logits of the same step are about the same."""
    gap = ((ours.float() - theirs.float()).norm() / theirs.float().norm()).item()
    if not gap < 0.05:
        raise RuntimeError(f"its logits differ by {100 * gap:.2g} %")

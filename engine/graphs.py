"""
Kernels that a GPU replays. A step of decoding starts hundreds of small kernels, and for that the
CPU may need longer than the GPU for computing them. A CUDA graph is such a sequence, recorded once
and then started by a single call. What is recorded must have the same shapes and the same memory
each time, and nothing in it may wait for the GPU.
"""
import torch


class Replayed:
    """
    A function whose kernels are recorded at the first call of each kind, and replayed after that.

        logits = Replayed(lambda tokens: policy(tokens, cache=cache), on=True)
        y = logits(kind, tokens)        # as logits.function(tokens)

    tokens: a tensor, whose contents may differ from call to call. kind: anything that decides
    shapes and memory beside it; a call of the same kind must find all other tensors that the
    function uses where they were. The result lies in memory that the next call may overwrite.

    The function is called twice to be recorded, and must not mind: it may only write what it would
    write again. On a CPU nothing is recorded, but the memory is handled in the same way, so that
    tests without a GPU find what relies on another one. on=False: it is simply called.
    """

    def __init__(self, function, on):
        self.function, self.on = function, on
        self.forget()

    def forget(self):
        """Drop all recordings, as the memory that they use is given up."""
        self.recorded = {}  # kind -> (the memory of the argument, that of the result, the graph)
        self.pool = None  # the memory between them, which all graphs share: they run one by one

    def __call__(self, kind, x):
        if not self.on:
            return self.function(x)
        kind = kind, x.shape
        if kind not in self.recorded:
            self.recorded[kind] = self.record(x)
        argument, result, graph = self.recorded[kind]
        argument.copy_(x)
        if graph:
            graph.replay()
        else:
            result.copy_(self.function(argument))
        return result

    def record(self, x):
        """(the memory of the argument, that of the result, the graph; None on a CPU)."""
        if not x.is_cuda:
            return x.clone(), self.function(x), None
        argument, now = x.clone(), torch.cuda.current_stream()
        stream = torch.cuda.Stream()  # kernels of the usual one cannot be recorded
        stream.wait_stream(now)
        with torch.cuda.stream(stream):
            self.function(argument)  # what is made once, such as workspaces, is not to be recorded
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            # thread_local: other threads, such as nccl's, may use the GPU meanwhile
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            result = self.function(argument)
            graph.capture_end()
        now.wait_stream(stream)
        self.pool = graph.pool()
        return argument, result, graph

"""
A GPU that is only pretended, for tests without one: all is computed on the CPU, but each tensor's
memory has a place, "cpu" or "gpu", and an operation whose tensors are in two places is an error, as
it would be with CUDA. Helpers, no tests.

    with pretend.gpu() as seen:
        a, b = torch.ones(3, device="cuda"), torch.arange(3)
        a.device           # cuda:0
        a + b              # raises Misplaced

Tensors know their place by an attribute of their storage, so that views and what autograd keeps
share it. What is allowed between the two places is what CUDA allows: a tensor of one number on the
CPU, an index on the CPU, and copying. Where nothing may wait for the GPU (while a graph is
recorded, and as torch.cuda.set_sync_debug_mode says), what waits is an error, too.
"""
import contextlib
import json
import os
import re
import weakref
from unittest import mock

import ranks
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

GPU = torch.device("cuda", 0)
aten = torch.ops.aten
# operations that CUDA has no exact kernel for: of torch.use_deterministic_algorithms' list those
# that a language model may have
INEXACT = {"cumsum", "put_", "histc", "bincount", "median", "nll_loss_forward", "kthvalue",
           "logcumsumexp"}
SENT = re.compile("reduce|gather|broadcast")  # by nccl; send and recv are gloo's, see roles.py
AUTOCAST = "autocast", "is_autocast_enabled", "get_autocast_dtype"
COPIES = {aten.copy_, aten._to_copy, aten.set_, aten._has_compatible_shallow_copy_type}
INDICES = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index}
# the CPU waits for their result, or for its size; so it does for an index of bools
WAITS = {aten._local_scalar_dense, aten.item, aten.is_nonzero, aten.nonzero, aten.masked_select,
         aten.equal, aten._unique2}


class Misplaced(RuntimeError):
    """Tensors in two places, where CUDA would refuse it."""


class Waits(RuntimeError):
    """A wait for the GPU where there must be none."""


def storage(t):
    """The memory of a tensor; of a DTensor, that of this rank's part."""
    return getattr(t, "_local_tensor", t).untyped_storage()


def place(t):
    return getattr(storage(t), "place", "cpu")


def tensors_of(*things):
    return [x for x in tree_leaves(things)
            if isinstance(x, torch.Tensor) and x.device.type != "meta"]


def wanted_place(device):
    """The place that a device names; None: it names none of the two."""
    kind = device.type if isinstance(device, torch.device) else str(device).partition(":")[0]
    return {"cuda": "gpu", "cpu": "cpu"}.get(kind)


def on_cpu(function):
    """A function of torch's about autocast, whose first argument is a device: the GPU's too."""
    return lambda device, *args, **kwargs: function(
        "cpu" if wanted_place(device) else device, *args, **kwargs)


class Seen:
    """What was seen on the pretended GPU: operations without an exact kernel; and its graphs."""

    def __init__(self):
        self.backward = False  # whether a backward pass is under way
        self.inexact = set()
        self.no_waits = False
        self.recording = None  # the Graph that is being recorded
        self.graphs = weakref.WeakSet()  # those that are alive
        self.pools, self.recorded, self.replays, self.waits = set(), 0, 0, 0  # in all
        self.full = False  # whether there is no memory for a recording, until empty_cache

    def wait(self, what):
        self.waits += 1
        if self.no_waits or self.recording:
            raise Waits(f"{what} waits for the GPU")


seen = Seen()


class Check(TorchDispatchMode):
    """Below autograd: an operation finds its tensors in one place; its results are there, too."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # then the operation on this rank's part comes here
        with torch._C.DisableTorchFunction():
            before = tensors_of(args, kwargs)
            if "c10d" in operation.namespace and SENT.search(operation.__name__) and any(
                    place(t) == "cpu" for t in before):
                raise Misplaced(f"{operation.__name__}: nccl sends nothing of the CPU's")
            storages = {id(t.untyped_storage()) for t in before}
            where = self.look(operation.overloadpacket, args, before)
            if seen.recording:
                seen.recording.before(operation, args)
        if operation.overloadpacket is aten.histc and not args[0].is_floating_point():
            # of integers, as CUDA has it
            results = operation(args[0].float(), *args[1:], **kwargs or {}).to(args[0].dtype)
        else:
            results = operation(*args, **kwargs or {})
        with torch._C.DisableTorchFunction():
            if seen.recording:
                seen.recording.tape.append((operation, args, kwargs or {}, tensors_of(results)))
            if seen.backward and not before:  # zeros that autograd makes: on the right device
                where = "anywhere"
            for t in tensors_of(results):
                if id(t.untyped_storage()) not in storages:
                    t.untyped_storage().place = where
        return results

    def look(self, packet, args, tensors):
        """The place of an operation. Raises Misplaced."""
        if all(place(t) != "gpu" for t in tensors):
            return "cpu"
        name = packet.__name__
        if name in INEXACT and any(t.dtype.is_floating_point for t in tensors):
            seen.inexact.add(name)
        if packet in WAITS or packet in INDICES and any(
                t.dtype == torch.bool for t in tensors_of(args[1])):
            seen.wait(name)
        if packet in COPIES:
            if any(place(t) == "cpu" for t in tensors):
                seen.wait("a copy from or to the CPU")
            return place(tensors[0])
        indices = {id(t) for t in tensors_of(args[1])} if packet in INDICES else set()
        strays = [t for t in tensors if place(t) == "cpu" and t.dim() > 0 and id(t) not in indices]
        if strays or packet in INDICES and place(tensors[0]) == "cpu":
            raise Misplaced(f"{name}: {[(place(t), *t.shape) for t in tensors]}")
        return "gpu"


class Redirect(TorchFunctionMode):
    """
    Above autograd: what names a device. "cuda" becomes the CPU, and the place "gpu"; and tensors
    say that they are there.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs, name = dict(kwargs or {}), getattr(function, "__name__", "")
        if function == torch.Tensor.device.__get__:
            real = function(*args)
            return GPU if real.type == "cpu" and place(args[0]) == "gpu" else real
        if function == torch.Tensor.is_cuda.__get__:
            return place(args[0]) == "gpu"
        if name in ("numpy", "__array__") and place(args[0]) == "gpu":
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        if name == "tolist" and place(args[0]) == "gpu":
            seen.wait(name)
        if name == "pin_memory":
            return args[0]
        if name == "pad_sequence":  # it makes its result in C++
            return moved(function(*args, **kwargs), place(args[0][0]), True)
        if name == "backward":  # with this mode on, for what a backward pass computes in Python
            with self:
                ones, seen.backward = torch.ones_like(args[0]), True
                torch.autograd.graph._engine_run_backward(
                    (args[0],), (ones,), False, False, (), allow_unreachable=True,
                    accumulate_grad=True)
                seen.backward = False
            return None
        if name == "cpu":
            return moved(args[0], "cpu")
        if function is torch.Tensor.to:
            target, dtype = place(args[0]), args[0].dtype
            for x in (*args[1:], *kwargs.values()):
                if isinstance(x, torch.Tensor):
                    target, dtype = place(x), x.dtype
                elif isinstance(x, torch.dtype):
                    dtype = x
                elif isinstance(x, (str, torch.device)):
                    target = wanted_place(x) or target
            return moved(args[0] if dtype == args[0].dtype else function(args[0], dtype), target)
        if kwargs.get("device") is not None and wanted_place(kwargs["device"]):
            target, kwargs["device"] = wanted_place(kwargs["device"]), "cpu"
            made_there = name not in ("tensor", "as_tensor")
            return moved(function(*args, **kwargs), target, made_there)
        return function(*args, **kwargs)


def moved(t, target, made_there=False):
    """t in the place `target`: t itself, or if it is elsewhere a copy."""
    if t.is_meta or place(t) == target:
        return t
    if not made_there:
        seen.wait("a copy from or to the CPU")
    t = t.clone()
    storage(t).place = target
    return t


class Graph:
    """
    A CUDA graph: `replay` repeats the recorded operations with the very tensors that they had, and
    runs no Python. The recording itself computes nothing that one could see: afterwards older
    memory is as it was, and in newer memory there is nonsense.
    """

    def capture_begin(self, pool=None, capture_error_mode="global"):
        assert pool is None or any(graph.number == pool for graph in seen.graphs)
        seen.recorded += 1
        self.number, self.tape, self.older = pool or seen.recorded, [], []
        seen.pools.add(self.number)
        seen.recording = self

    def before(self, operation, args):
        """Keep what an operation is about to change."""
        if seen.full:
            raise torch.OutOfMemoryError("CUDA out of memory")
        for argument, t in zip(operation._schema.arguments, args, strict=False):
            if argument.alias_info and argument.alias_info.is_write:
                self.older.append((t, t.clone()))

    def capture_end(self):
        seen.recording = None
        seen.graphs.add(self)
        with unseen():
            for t, before in reversed(self.older):
                t.copy_(before)
            for _, args, kwargs, results in self.tape:
                given = {id(t.untyped_storage()) for t in tensors_of(args, kwargs)}
                for t in results:
                    if id(t.untyped_storage()) not in given:
                        t.fill_(torch.nan if t.is_floating_point() else 1)

    def pool(self):
        return self.number

    def replay(self):
        seen.replays += 1
        with unseen():
            for operation, args, kwargs, results in self.tape:
                again = tensors_of(operation(*args, **kwargs))
                for t, new in zip(results, again, strict=True):
                    if t.data_ptr() != new.data_ptr():  # it is no view, and not changed in place
                        t.copy_(new)


@contextlib.contextmanager
def unseen():
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


@contextlib.contextmanager
def gpu():
    """In this block, "cuda" is a place. Yields what is Seen there."""
    global seen
    seen = Seen()
    # what a backward pass computes again is not compared with the forward pass: that would ask for
    # the devices unseen
    checks = torch.utils.checkpoint._allowed_determinism_checks_to_fns
    before, checks["default"] = checks["default"], checks["none"]
    of_cuda = dict(
        CUDAGraph=Graph, Stream=mock.Mock, current_stream=mock.Mock, stream=contextlib.nullcontext,
        set_sync_debug_mode=lambda mode: setattr(seen, "no_waits", mode == "error"),
        Event=mock.Mock, current_device=lambda: 0, is_initialized=lambda: True,
        synchronize=lambda: None, max_memory_allocated=lambda: 7 * 2**20,
        get_device_capability=lambda device: (9, 0), get_device_name=lambda device: "pretended",
        empty_cache=lambda: setattr(seen, "full", False))
    of_torch = {name: on_cpu(getattr(torch, name)) for name in AUTOCAST}
    try:
        with mock.patch.multiple(torch.cuda, **of_cuda), mock.patch.multiple(
                torch.accelerator, current_stream=mock.Mock()), mock.patch.multiple(
                torch, **of_torch), Check(), Redirect():
            yield seen
    finally:
        checks["default"] = before


def begin(rank):
    """
    For Started: each rank is on a pretended GPU, and nccl joins them; a single one is a group, too.
    nccl is told at first which GPU is mine: rank 1 may be the first of its machine. With roles no
    group is split off the first one. seen-RANK.json says what was seen.
    """
    def join(backend, device_id=None, **keys):
        told.update(backend=backend, device_id=device_id)
        group("gloo", **keys)

    def barrier(device_ids=None):
        told.setdefault("first barrier", device_ids)
        meet()

    told, group, meet, leave = {}, dist.init_process_group, dist.barrier, ranks.leave
    dist.init_process_group, dist.get_backend = join, lambda group=None: "nccl"
    dist.barrier, ranks.choose_device = barrier, lambda device: GPU
    if "RANK" not in os.environ:
        group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    context = gpu()
    context.__enter__()

    def finish():
        mine = None if ranks.this_rank.group else GPU
        assert not told or told == {
            "backend": "nccl", "device_id": mine, "first barrier": [GPU.index]}, told
        context.__exit__(None, None, None)
        with open(f"seen-{rank}.json", "w") as f:
            json.dump(dict(inexact=sorted(seen.inexact), recorded=seen.recorded), f)
        leave()
        os._exit(0)

    ranks.leave = finish

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
CPU, an index on the CPU, and copying.
"""
import contextlib

import torch
import torch.utils.checkpoint
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GPU = torch.device("cuda", 0)
aten = torch.ops.aten
# operations that CUDA has no exact kernel for: of torch.use_deterministic_algorithms' list those
# that a language model may have
INEXACT = {"cumsum", "put_", "histc", "bincount", "median", "nll_loss_forward", "kthvalue",
           "logcumsumexp"}
COPIES = {aten.copy_, aten._to_copy, aten.set_, aten._has_compatible_shallow_copy_type}
INDICES = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index}


class Misplaced(RuntimeError):
    """Tensors in two places, where CUDA would refuse it."""


def place(t):
    return getattr(t.untyped_storage(), "place", "cpu")


def tensors_of(*things):
    return [x for x in tree_leaves(things)
            if isinstance(x, torch.Tensor) and x.device.type != "meta"]


def wanted_place(device):
    """The place that a device names; None: it names none of the two."""
    kind = device.type if isinstance(device, torch.device) else str(device).partition(":")[0]
    return {"cuda": "gpu", "cpu": "cpu"}.get(kind)


class Seen:
    """What was seen on the pretended GPU: the names of all operations."""

    def __init__(self):
        self.backward = False  # whether a backward pass is under way
        self.operations, self.inexact = set(), set()


seen = Seen()


class Check(TorchDispatchMode):
    """Below autograd: an operation finds its tensors in one place; its results are there, too."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunction():
            before = tensors_of(args, kwargs)
            storages = {id(t.untyped_storage()) for t in before}
            where = self.look(operation.overloadpacket, args, before)
        results = operation(*args, **kwargs or {})
        with torch._C.DisableTorchFunction():
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
        seen.operations.add(name)
        if name in INEXACT and any(t.dtype.is_floating_point for t in tensors):
            seen.inexact.add(name)
        if packet in COPIES:
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
        if name == "__get__" and function == torch.Tensor.device.__get__:
            real = function(*args)
            return GPU if real.type == "cpu" and place(args[0]) == "gpu" else real
        if name == "__get__" and function == torch.Tensor.is_cuda.__get__:
            return place(args[0]) == "gpu"
        if name in ("numpy", "__array__") and place(args[0]) == "gpu":
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        if name == "pin_memory":
            return args[0]
        if name == "backward":  # with this mode on, for what a backward pass computes in Python
            with self:
                ones, seen.backward = torch.ones_like(args[0]), True
                torch.autograd.graph._engine_run_backward(
                    (args[0],), (ones,), False, False, (), allow_unreachable=True,
                    accumulate_grad=True)
                seen.backward = False
            return None
        if name == "cpu":
            return moved(args[0], "cpu", args[0])
        if function is torch.Tensor.to:
            target, dtype = place(args[0]), args[0].dtype
            for x in (*args[1:], *kwargs.values()):
                if isinstance(x, torch.Tensor):
                    target, dtype = place(x), x.dtype
                elif isinstance(x, torch.dtype):
                    dtype = x
                elif isinstance(x, (str, torch.device)):
                    target = wanted_place(x) or target
            return moved(args[0], target, args[0] if dtype == args[0].dtype else
                         function(args[0], dtype))
        if kwargs.get("device") is not None and wanted_place(kwargs["device"]):
            target, kwargs["device"] = wanted_place(kwargs["device"]), "cpu"
            result = function(*args, **kwargs)
            return moved(result, target, result)
        return function(*args, **kwargs)


def moved(before, target, t):
    """t in the place `target`: t itself, or if `before` is elsewhere a copy."""
    if t.is_meta or place(t) == target:
        return t
    t = t.clone()
    t.untyped_storage().place = target
    return t


@contextlib.contextmanager
def gpu():
    """In this block, "cuda" is a place. Yields what is Seen there."""
    global seen
    seen = Seen()
    # what a backward pass computes again is not compared with the forward pass: that would ask for
    # the devices unseen
    checks = torch.utils.checkpoint._allowed_determinism_checks_to_fns
    before, checks["default"] = checks["default"], checks["none"]
    try:
        with Check(), Redirect():
            yield seen
    finally:
        checks["default"] = before

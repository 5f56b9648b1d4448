"""
Operations of model.py that take less time or memory than the few lines of torch which would do the
same: matrix products, RMSNorm and the second half of an MLP, whose backward passes are written out
by hand; and for decoding the second half of attention.

Matrix products go to the library that is fast on this CPU. The other operations are bound by memory
traffic: their time is how often they read and write their large tensors. Operations whose names end
in _ write into their operand's memory.

Each function has the plain formula in its docstring. tests/test_kernels.py compares all with it.
"""
import functools

import torch
import torch.nn.functional as F

aten = torch.ops.aten  # torch's operations by their own names; some have no other

# name in config.json -> (the activation f, its derivative: (g, x, grad_input=y) -> y = g f'(x))
GELU = (F.gelu, aten.gelu_backward)
TANH_GELU = (lambda x: F.gelu(x, approximate="tanh"),
             lambda g, x, grad_input: aten.gelu_backward(g, x, approximate="tanh",
                                                         grad_input=grad_input))
RELU = (F.relu, lambda g, x, grad_input: aten.threshold_backward(g, x, 0, grad_input=grad_input))
SILU = (F.silu, aten.silu_backward)
ACTIVATIONS = {"gelu": GELU, "gelu_new": TANH_GELU, "gelu_pytorch_tanh": TANH_GELU, "relu": RELU,
               "silu": SILU, "swish": SILU}


# --------------------------------------------------------------------------------------------------
# matrix products

LARGE = 2**25  # multiplications of a product that oneDNN may get


def linear(x, weight, bias=None):
    """
    x weight^T + bias: x (..., n), weight (m, n), bias (m,) or None -> (..., m), as F.linear.

    On a CPU torch has two libraries for it, and takes Intel's MKL for float32 and oneDNN for 16
    bits. On AMD's CPUs MKL leaves more than half of the units idle, and here oneDNN is taken.
    """
    if weight.is_mkldnn:  # by pack_weight; what autocast would round is rounded here
        return onednn_product(x.to(weight.dtype), weight,
                              None if bias is None else bias.to(weight.dtype))
    if not by_onednn(x, weight):
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled():
        return Linear.apply(x, weight, bias)
    return onednn_product(x, weight, bias)


def product(a, b):
    """a b, without gradients: a (n, k), b (k, m) -> (n, m)."""
    return onednn_product(a, b.t()) if by_onednn(a, b.t()) else a @ b


def transposed_product(a, b):
    """a^T b, without gradients: a (k, n), b (k, m) -> (n, m)."""
    if not by_onednn(a.t(), b.t()):
        return a.t() @ b
    # oneDNN copies its first factor if that is transposed: so the smaller one is given to it first
    if a.shape[1] <= b.shape[1]:
        return onednn_product(a.t(), b.t())
    return onednn_product(b.t(), a.t()).t()


def by_onednn(x, weight):
    """
    Whether a product x weight^T is oneDNN's. It must be large: for each new shape oneDNN writes a
    program first, which takes half a millisecond, and the shapes change with the lengths of texts.
    The answer depends on the shapes and on the CPU alone, so that a run repeats bit for bit.
    """
    if torch.compiler.is_compiling():  # it has products of its own, and cannot trace this one
        return False
    large = x.numel() * len(weight) >= LARGE
    return (large and x.dtype == weight.dtype == torch.float32 and x.device.type == "cpu"
            and onednn_is_faster() and not torch.is_autocast_enabled("cpu"))


@functools.cache
def onednn_is_faster():
    """Whether this CPU is AMD's, and oneDNN is there."""
    return onednn_is_there() and cpu_vendor() == "AuthenticAMD"


def onednn_is_there():
    """Whether torch has the operation that gives a product to oneDNN."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def cpu_vendor():
    """What Linux calls the maker of the CPU; "" where it is not known."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as f:
            found = [line.split(":")[1].strip() for line in f if line.startswith("vendor_id")]
    except OSError:  # another system
        return ""
    return found[0] if found else ""


def onednn_product(x, weight, bias=None):
    """linear, without gradients. A transposed weight is read as it is, without a copy."""
    # an operation that torch.compile uses for itself; torch has no public name for it
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def packing_pays(dtype):
    """
    Whether a model that decodes on the CPU should pack its matrices, which are of this dtype. It
    pays where oneDNN computes their products: in bfloat16 on every CPU that has instructions for
    it, in float32 where onednn_is_faster.
    """
    if dtype == torch.bfloat16:
        return onednn_is_there() and torch.cpu._is_avx512_bf16_supported()
    return dtype == torch.float32 and onednn_is_faster()


def pack_weight(weight):
    """
    A matrix (m, n) for `linear` alone, in the order in which oneDNN reads it. With few rows of x,
    as in a step of decoding, most of the time goes to reading the matrix. It takes as much memory.
    """
    # the number of rows for which the order is made; it is as good for any other
    return torch.ops.mkldnn._reorder_linear_weight(weight, 512)


class Linear(torch.autograd.Function):
    """linear by oneDNN: y = x weight^T + bias."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return onednn_product(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        x_needed, weight_needed, bias_needed = ctx.needs_input_grad
        grad_x = grad_weight = grad_bias = None
        if x_needed:
            grad_x = onednn_product(grad, weight.t())
        grad, x = grad.flatten(0, -2), x.flatten(0, -2)  # (N, m), (N, n)
        if weight_needed:
            grad_weight = transposed_product(grad, x)
        if bias_needed:
            grad_bias = grad.sum(0)
        return grad_x, grad_weight, grad_bias


# --------------------------------------------------------------------------------------------------
# RMSNorm


def rms_norm(x, weight, eps):
    """
    weight x / sqrt(mean(x^2) + eps), with the mean over the last dimension (arXiv 1910.07467, eq.
    4). x (..., d), weight (d,) -> (..., d). It is computed in the wider one of the two dtypes and
    at least in float32, and rounded to x's.
    """
    if x.device.type != "cpu":  # there torch has a fused kernel for it
        wide = x.to(torch.promote_types(x.dtype, weight.dtype))
        return F.rms_norm(wide, weight.shape, weight, eps).to(x.dtype)
    if torch.is_grad_enabled():
        return RMSNorm.apply(x, weight, eps)
    return rms_norm_forward(x, weight, eps)[0]


def rms_norm_forward(x, weight, eps):
    """-> (rms_norm(x, weight, eps), r (..., 1) = 1 / sqrt(mean(x^2) + eps))."""
    dtype = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=dtype)  # (..., 1)
    r = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (x * r).mul_(weight).to(x.dtype), r


class RMSNorm(torch.autograd.Function):
    """
    rms_norm on a CPU. There torch has no fused kernel for it. Torch's own backward pass goes over
    tensors of x's size a dozen times and keeps one; in the update it takes five times as long.

    The kernel that torch does have is LayerNorm's. With u = x r and a = weight g, where g is the
    gradient of the output,

        gradient of x       RMSNorm    r (a - u mean(a u))
                            LayerNorm  r (a - u mean(a u) - mean(a)), if u = (x - mean) r
        gradient of weight  both       the sum of g u over all rows

    So LayerNorm's kernel is told that the mean is 0, and r mean(a) is added to what it gives.
    """

    @staticmethod
    def forward(ctx, x, weight, eps):
        y, r = rms_norm_forward(x, weight, eps)
        ctx.save_for_backward(x, weight, r)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        x, weight, r = ctx.saved_tensors
        g, w = grad.to(r.dtype), weight.to(r.dtype)
        x_needed, weight_needed = ctx.needs_input_grad[:2]
        grad_x, grad_weight, _ = aten.native_layer_norm_backward(
            g, x.to(r.dtype), weight.shape, torch.zeros_like(r), r, w, None,
            [x_needed, weight_needed, False])
        if x_needed:
            mean_a = (g @ w)[..., None] / x.shape[-1]  # (..., 1)
            grad_x = grad_x.addcmul_(r, mean_a).to(x.dtype)
        if weight_needed:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_x, grad_weight, None


# --------------------------------------------------------------------------------------------------
# an MLP, from its width d_ff to its output


def narrow(activation, gate, up, weight, bias=None, A=None):
    """
    With f = ACTIVATIONS[activation], gate and up (..., d_ff), weight (d, d_ff), bias (d,) or None:

        wide = f(gate) up, or f(up) where gate is None    (..., d_ff)
        y    = wide weight^T + bias                       (..., d)
        z    = wide A^T                                   (..., r)

    -> (y, z). A (r, d_ff) is the first matrix of a LoRA adapter; None: z is None, too.

    wide is the largest tensor of a layer and the cheapest: it is not kept for the backward pass,
    which computes it again.
    """
    if torch.is_grad_enabled():
        return Narrow.apply(activation, gate, up, weight, bias, A)
    return narrow_forward(activation, gate, up, weight, bias, A)


def narrow_forward(activation, gate, up, weight, bias, A):
    f = ACTIVATIONS[activation][0]
    wide = f(up) if gate is None else f(gate).mul_(up)
    y = linear(wide, weight, bias)
    if A is None:
        return y, None
    if not torch.is_autocast_enabled(wide.device.type):  # autocast would cast both by itself
        wide = wide.to(A.dtype)
    return y, F.linear(wide, A)


class Narrow(torch.autograd.Function):
    """
    narrow, with a backward pass that holds two tensors of wide's size at a time, three if there is
    an adapter in other bits than the rest: what is not needed any more is written over.
    """

    @staticmethod
    def forward(ctx, activation, gate, up, weight, bias, A):
        ctx.activation = activation
        ctx.save_for_backward(gate, up, weight, A)
        return narrow_forward(activation, gate, up, weight, bias, A)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_y, grad_z):
        gate, up, weight, A = ctx.saved_tensors
        gate_needed, up_needed, weight_needed, bias_needed, A_needed = ctx.needs_input_grad[1:]
        f, derivative = ACTIVATIONS[ctx.activation]
        grad_y = grad_y.flatten(0, -2)  # (N, d)
        activated = f(up if gate is None else gate)
        wide = activated if gate is None else activated * up
        wide = wide.flatten(0, -2)  # (N, d_ff)

        # y = wide weight^T + bias, z = wide A^T
        grad_weight = grad_bias = grad_A = None
        if weight_needed:
            grad_weight = transposed_product(grad_y, wide).to(weight.dtype)
        if bias_needed:
            grad_bias = grad_y.sum(0).to(weight.dtype)
        if A_needed:
            grad_z = grad_z.flatten(0, -2)  # (N, r)
            grad_A = (grad_z.t() @ wide.to(grad_z.dtype)).to(A.dtype)
        # free wide before its gradient, which is as large, is made
        dtype = wide.dtype
        del wide
        if gate is None:
            del activated  # the same memory
        grad_wide = product(grad_y, weight.to(dtype))  # (N, d_ff)
        if A is not None:
            grad_wide += grad_z.to(grad_wide.dtype) @ A.to(grad_wide.dtype)

        # wide = f(gate) up, or f(up); each gradient is written into memory that is there already
        grad_wide = grad_wide.view(up.shape)
        if gate is None:
            grad_up = derivative(grad_wide, up, grad_input=grad_wide)
            return None, None, grad_up, grad_weight, grad_bias, grad_A
        grad_up = activated.mul_(grad_wide)
        grad_gate = derivative(grad_wide.mul_(up), gate, grad_input=grad_wide)
        return None, grad_gate, grad_up, grad_weight, grad_bias, grad_A


# --------------------------------------------------------------------------------------------------
# attention


def attention_is_wider(dtype, device):
    """
    Whether attention of many queries, asked for in this dtype, is computed in float32: in 16 bits
    on a CPU without units for 16-bit matrices (AMX). There torch's kernel takes longer in bfloat16
    than in float32: forward 1.4 times as long, backward 2.4 times, on two cores of a Zen 5.
    """
    return (torch.device(device).type == "cpu" and dtype.itemsize == 2
            and not torch.cpu._is_amx_tile_supported())


def weighted_sums(shares, values):
    """
    shares @ values, without gradients, on a CPU: shares (n, KV, G, S), values (n, KV, S, hd), which
    may be the first S columns of a cache -> (n, KV, G, hd).

    A product with one row or few takes up to twice as long as it takes to read the values. torch's
    embedding_bag does not: of a table it adds up some rows, each times its share. The table is the
    cache, with hd numbers a row.
    """
    n, KV, S, hd = values.shape
    columns = values.stride(1) // hd  # of the cache
    if values.stride() != (KV * columns * hd, columns * hd, hd, 1):  # it is no cache
        values, columns = values.clone(memory_format=torch.contiguous_format), S
    table = values.as_strided((n * KV * columns, hd), (hd, 1))
    rows, begins = rows_added_up(n * KV, shares.shape[2], S, columns)
    sums = F.embedding_bag(rows, table, begins, mode="sum",
                           per_sample_weights=shares.to(values.dtype).flatten())
    return sums.view(n, KV, -1, hd)


@functools.lru_cache(maxsize=1)  # the layers of a step ask for the same
def rows_added_up(heads, G, S, columns):
    """
    The table has `columns` rows for each of so many heads. Of each head the first S are added up, G
    times, with other shares. Returns the numbers of all rows that are added up, (heads G S,) int32,
    and where in these each sum begins, (heads G,) int32.
    """
    first = torch.arange(heads, dtype=torch.int32)[:, None, None] * columns
    rows = (first + torch.arange(S, dtype=torch.int32)).expand(-1, G, -1).flatten()
    return rows, torch.arange(heads * G, dtype=torch.int32) * S

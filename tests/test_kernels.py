"""Operations with a backward pass of their own are the plain formulas, in values and gradients, in all dtypes."""
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck

import kernels
from conftest import ROOT
from kernels import ACTIVATIONS, narrow, rms_norm
from test_memory import saved_bytes


def draw(*shape, seed=0, dtype=torch.float64, grad=True):
    t = torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)
    return t.to(dtype).requires_grad_(grad)


def plain_norm(x, weight, eps):
    """In float64, whatever comes in."""
    x, weight = x.double(), weight.double()
    return weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


@pytest.mark.parametrize("shape", [(2, 3, 8), (1, 5, 2, 6), (0, 4)])
def test_rms_norm_is_the_formula(shape):
    x, weight = draw(*shape), draw(shape[-1], seed=1)
    assert torch.allclose(rms_norm(x, weight, 0.1), plain_norm(x, weight, 0.1), atol=1e-14)
    assert gradcheck(lambda x, w: rms_norm(x, w, 0.1), (x, weight))
    # a row that is large, one that is small, one of zeros, and one whose mean is far from 0
    x = torch.stack([x * scale for scale in (1e6, 1e-6, 0)] + [x + 1e3]).detach().requires_grad_()
    g = torch.randn_like(x)
    ours, plain = (torch.autograd.grad(f(x, weight, 1e-6), (x, weight), g) for f in (rms_norm, plain_norm))
    for a, b in zip(ours, plain, strict=True):
        assert a.numel() == 0 or (a - b).abs().max() <= 1e-11 * b.abs().max()


def test_rms_norm_of_what_is_not_contiguous_and_of_what_is_frozen():
    x, weight = draw(2, 6, 3, 4), draw(4)
    assert gradcheck(lambda x, w: rms_norm(x.transpose(1, 2), w, 0.1), (x, weight))
    assert gradcheck(lambda x: rms_norm(x, weight.detach(), 0.1), (x,))
    assert gradcheck(lambda w: rms_norm(x.detach(), w, 0.1), (weight,))
    with torch.no_grad():
        frozen = rms_norm(x, weight, 0.1)
    assert torch.equal(frozen, rms_norm(x, weight, 0.1))  # to the last bit: reading and training are one


@pytest.mark.parametrize("x_dtype, weight_dtype", [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float32", "bfloat16"),
                                                   ("float16", "float16"), ("float32", "float32")])
def test_rms_norm_rounds_once(x_dtype, weight_dtype):
    """It is computed in float32 and rounded at the end: as good as rounding the exact result, but for float32's own rounding."""
    x, weight = draw(64, 32, dtype=getattr(torch, x_dtype)), draw(32, seed=1, dtype=getattr(torch, weight_dtype))
    got, want = rms_norm(x, weight, 1e-5), plain_norm(x, weight, 1e-5)
    assert got.dtype == x.dtype
    step = torch.finfo(x.dtype).eps * 0.51 + 1e-6  # half a unit in the last place
    assert ((got.double() - want).abs() <= step * want.abs()).all()
    g = torch.randn_like(got)
    ours = torch.autograd.grad(got, (x, weight), g)
    plain = torch.autograd.grad(want, (x, weight), g.double())
    for a, b, t in zip(ours, plain, (x, weight), strict=True):
        assert a.dtype == t.dtype
        assert (a.double() - b.double()).abs().max() <= (torch.finfo(a.dtype).eps + 1e-6) * b.abs().max()


def test_rms_norm_keeps_its_input_and_a_number_a_row():
    x, weight = draw(64, 32, dtype=torch.float32), draw(32, dtype=torch.float32)
    kept, _ = saved_bytes(torch.nn.ParameterList([weight]), lambda: rms_norm(x, weight, 1e-5))
    assert kept == x.nbytes + 64 * 4


def plain_mlp(activation, gate, up, weight, bias=None, A=None):
    """The formulas of the activations from their papers, not torch's functions."""
    f = dict(silu=lambda x: x * torch.sigmoid(x), relu=lambda x: x.clamp(min=0),
             gelu=lambda x: x * torch.special.ndtr(x),
             gelu_new=lambda x: 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))))
    f = f | dict(gelu_pytorch_tanh=f["gelu_new"], swish=f["silu"])
    wide = f[activation](up) if gate is None else f[activation](gate) * up
    y = wide @ weight.T
    return y if bias is None else y + bias, None if A is None else wide @ A.T


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_second_half_of_an_mlp_is_the_formula(activation, gated):
    gate = draw(2, 3, 6, seed=1) if gated else None
    given = (activation, gate, draw(2, 3, 6, seed=2), draw(4, 6))
    for more in ((), (draw(4),), (None, draw(2, 6)), (draw(4), draw(2, 6))):
        inputs = [t for t in (*given[1:], *more) if t is not None]
        ours, plain = narrow(*given, *more), plain_mlp(*given, *more)
        for y, want in zip(ours, plain, strict=True):
            assert y is want is None or (y - want).abs().max() < 1e-13
        total = [sum((y * (i + 1)).sin().sum() for i, y in enumerate(out) if y is not None) for out in (ours, plain)]
        for a, b in zip(*(torch.autograd.grad(t, inputs) for t in total), strict=True):
            assert (a - b).abs().max() < 1e-13
        with torch.no_grad():
            frozen = narrow(*given, *more)
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(ours, frozen, strict=True))


def test_an_mlp_with_frozen_matrices_and_without_rows():
    gate, up, weight, A = draw(3, 6, seed=1), draw(3, 6, seed=2), draw(4, 6), draw(2, 6)
    assert gradcheck(lambda gate, up: narrow("silu", gate, up, weight.detach())[0], (gate, up))
    assert gradcheck(lambda A: narrow("silu", gate.detach(), up.detach(), weight.detach(), None, A), (A,))
    y, _ = narrow("silu", draw(1, 0, 6), draw(1, 0, 6), weight)
    assert y.shape == (1, 0, 4) and (torch.autograd.grad(y.sum(), weight)[0] == 0).all()


@pytest.mark.parametrize("gated", [True, False])
def test_an_mlp_under_autocast(gated):
    """Values and gradients are what autograd gives for the plain lines under the same autocast, to rounding in bfloat16."""
    gate, up = (draw(5, 64, seed=seed, dtype=torch.bfloat16) for seed in (1, 2))
    weight, bias, A = (draw(*shape, dtype=torch.float32) for shape in ((16, 64), (16,), (3, 64)))
    gate = gate if gated else None
    results = []
    for own in (True, False):
        with torch.autocast("cpu", torch.bfloat16):
            if own:
                y, z = narrow("silu", gate, up, weight, bias, A)
            else:
                wide = F.silu(gate) * up if gated else F.silu(up)
                y, z = F.linear(wide, weight, bias), F.linear(wide, A)
        assert y.dtype == z.dtype == torch.bfloat16
        inputs = [t for t in (gate, up, weight, bias, A) if t is not None]
        grads = torch.autograd.grad(y.float().sin().sum() + z.float().cos().sum(), inputs)
        assert [g.dtype for g in grads] == [t.dtype for t in inputs]
        results.append((y, z, *grads))
    for a, b in zip(*results, strict=True):
        assert (a - b).abs().max() <= 0.03 * b.abs().max()


def test_an_adapter_in_32_bits_on_an_mlp_in_16():
    gate, up, weight = (draw(*shape, seed=i, dtype=torch.bfloat16) for i, shape in enumerate(((5, 8), (5, 8), (4, 8))))
    A = draw(2, 8, dtype=torch.float32)
    y, z = narrow("silu", gate, up, weight.detach(), None, A)
    assert (y.dtype, z.dtype) == (torch.bfloat16, torch.float32)
    grads = torch.autograd.grad(y.float().sum() + z.sum(), (gate, up, A))
    plain = plain_mlp("silu", *(t.double() for t in (gate, up, weight)), None, A.double())
    want = torch.autograd.grad(sum(t.sum() for t in plain),
                               (gate, up, A))
    for a, b in zip(grads, want, strict=True):
        assert a.dtype == b.dtype and (a - b).abs().max() <= 0.03 * b.abs().max()


def test_an_mlp_does_not_keep_its_widest_tensor():
    gate, up, weight = (draw(*shape, seed=i, dtype=torch.float32) for i, shape in enumerate(((64, 96), (64, 96), (32, 96))))
    kept, _ = saved_bytes(torch.nn.ParameterList([weight]), lambda: narrow("silu", gate, up, weight))
    assert kept == gate.nbytes + up.nbytes


def test_second_derivatives_are_refused():
    """They would be wrong: the backward passes write over what would be needed again."""
    for f, inputs in ((lambda x, w: rms_norm(x, w, 0.1), (draw(2, 4), draw(4))),
                      (lambda u, w: narrow("silu", None, u, w)[0], (draw(2, 4), draw(3, 4)))):
        grad, = torch.autograd.grad(f(*inputs).square().sum(), inputs[:1], create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward()


@pytest.fixture
def onednn(monkeypatch):
    """Products go to oneDNN on any CPU whose torch has it, and small ones, too."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(kernels, "onednn_is_faster", lambda: True)
    return lambda size: monkeypatch.setattr(kernels, "LARGE", size)


@pytest.mark.parametrize("shape", [(2, 3, 8), (40, 8), (1, 8), (0, 8), (5, 0, 8)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("m", [3, 20])  # narrower and wider than x: the gradient has two ways
def test_a_product_by_onednn_is_the_product(onednn, shape, bias, m):
    onednn(1)  # but for products without rows
    x, weight, b = draw(*shape), draw(m, 8, seed=1), draw(m, seed=2)
    inputs = [x, weight] + [b] * bias
    ours = [t.detach().float().requires_grad_() for t in inputs]
    assert kernels.by_onednn(*ours[:2]) == (x.numel() > 0) and not kernels.by_onednn(x, weight)  # float64 is not its
    y, plain = kernels.linear(*ours), x @ weight.T + (b if bias else 0)
    assert y.dtype == torch.float32 and y.shape == plain.shape
    assert torch.allclose(y.double(), plain, atol=1e-5)
    g = draw(*y.shape, seed=3, grad=False)
    for a, c in zip(torch.autograd.grad(y, ours, g.float()), torch.autograd.grad(plain, inputs, g), strict=True):
        assert a.shape == c.shape and torch.allclose(a.double(), c, atol=1e-5)
    with torch.no_grad():  # reading and training are one, to the last bit
        assert torch.equal(kernels.linear(*ours), y)


def test_which_products_are_onednn_s(onednn, monkeypatch):
    x, weight = torch.zeros(4, 16, 512), torch.zeros(1024, 512)  # 64 x 512 x 1024 = 2^25 products
    assert kernels.by_onednn(x, weight) and not kernels.by_onednn(x[:, 1:], weight)
    assert not kernels.by_onednn(x.bfloat16(), weight.bfloat16()) and not kernels.by_onednn(x.double(), weight)
    with torch.autocast("cpu", torch.bfloat16):
        assert not kernels.by_onednn(x, weight)
    monkeypatch.setattr(kernels, "onednn_is_faster", lambda: False)
    assert not kernels.by_onednn(x, weight)


@pytest.mark.parametrize("vendor, said", [("AuthenticAMD", True), ("GenuineIntel", False), ("", False)])
def test_amd_s_cpus_take_onednn(monkeypatch, vendor, said):
    monkeypatch.setattr(kernels, "cpu_vendor", lambda: vendor)
    assert kernels.onednn_is_faster.__wrapped__() == (said and torch.backends.mkldnn.is_available())


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_a_packed_matrix_multiplies_as_it_is(onednn, rows):
    weight, x = draw(20, 8, grad=False), draw(rows, 2, 8, seed=1, grad=False)
    packed = kernels.pack_weight(weight.float())
    with torch.inference_mode():
        assert torch.allclose(kernels.linear(x.float(), packed).double(), x @ weight.T, atol=1e-5)
        bias = draw(20, seed=2, grad=False)
        y = kernels.linear(x.float(), packed, bias.float())
        assert torch.allclose(y.double(), x @ weight.T + bias, atol=1e-5)


def test_a_packed_matrix_in_16_bits_rounds_what_it_multiplies(monkeypatch):
    """As autocast does, which does not know of oneDNN's operation: x and bias come in 32 bits."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    if not kernels.packing_pays(torch.bfloat16):
        pytest.skip("this torch has no oneDNN")
    weight = draw(20, 8, grad=False).bfloat16()
    x, bias = draw(3, 8, seed=1, grad=False).float(), draw(20, seed=2, grad=False).float()
    packed = kernels.pack_weight(weight)
    with torch.inference_mode():
        y = kernels.linear(x, packed, bias)
    want = x.bfloat16().double() @ weight.double().T + bias.bfloat16().double()
    assert y.dtype == torch.bfloat16 and (y.double() - want).abs().max() <= 2**-8 * want.abs().max()


GROWTH = """
import sys
sys.path.insert(0, sys.argv[1])
import engine, torch, kernels

def resident():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) / 256  # MiB

weight = torch.ones(24, 16, requires_grad=True)
kernels.LARGE, kernels.onednn_is_faster = 1, lambda: True
for rows in range(1, 351):
    kernels.linear(torch.ones(rows, 16, requires_grad=True), weight).sum().backward()
    if rows == 50:
        before = resident()
print(resident() - before)
"""


def test_products_of_ever_new_shapes_leave_no_memory_behind():
    """Texts have unequal lengths, so a run meets new shapes all the time. What a library keeps of each must be bounded."""
    if not kernels.onednn_is_there():
        pytest.skip("this torch has no oneDNN")
    done = subprocess.run([sys.executable, "-c", GROWTH, ROOT], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 20  # 900 products; of each two of torch's caches would keep 0.3 MiB

"""
The frozen trunk under an adapter in 4 bits, the key quantize = "4bit" (QLoRA, arXiv 2305.14314).
The optional package bitsandbytes does it: each matrix of the layers is stored as 16 levels (NF4)
with a scale of 8 bits for each 64 numbers, 4.13 bits a number, and is converted back at each use.
Embeddings, head and norms stay as they are. The policy's trunk is its reference, too, so both are
the rounded model.
"""
import torch
import torch.nn as nn

from errors import BadInput
from model import Model
from options.layers import layers_of


class InFourBits(Model):
    """A Model whose layers' matrices have 4 bits already; its arguments are Model's."""

    def as_saved(self, name, W):
        """Model.as_saved, for saved models: W, or the matrix that is stored in W in 4 bits."""
        p = dict(self.hf.named_parameters()).get(name)
        return in_full(p).cpu() if hasattr(p, "quant_state") else W


def package():
    """bitsandbytes. Raises BadInput where it is not installed."""
    try:
        import bitsandbytes
    except ImportError as e:
        raise BadInput("quantize = '4bit' needs the package bitsandbytes: pip install bitsandbytes"
                       ) from e
    return bitsandbytes


def quantize(model, device, dtype):
    """
    The Model of a frozen one's transformers' model, whose layers' matrices get 4 bits, one map
    after the other; before this it may be in the CPU's memory. dtype: in which it computes. Raises
    BadInput.
    """
    if model.must_fetch or dtype == torch.float64:
        raise BadInput("quantize = '4bit' goes with no zero_stage 3 and no float64; leave one of "
                       "the two out")
    bits, any_linear = package(), False
    for layer in layers_of(model):
        for parent in list(layer.modules()):
            for name, linear in list(parent.named_children()):
                if type(linear) is not nn.Linear:
                    continue
                small = bits.nn.Linear4bit(
                    linear.in_features, linear.out_features, bias=linear.bias is not None,
                    compute_dtype=dtype, quant_type="nf4", device="meta")
                small.weight = bits.nn.Params4bit(
                    linear.weight.data, requires_grad=False, quant_type="nf4", module=small)
                small.bias, any_linear = linear.bias, True
                # autocast's maps give 16 bits; bitsandbytes' give their input's dtype, and so does
                # the cache
                small.register_forward_pre_hook(lambda linear, inputs: (inputs[0].to(dtype),))
                setattr(parent, name, small.to(device))
    if not any_linear:
        raise BadInput(f"{model.path}: no matrix of its layers is of torch's class Linear, so none "
                       "can have 4 bits; leave quantize out")
    small = InFourBits(model.hf, model.head, model.path, model.tokenizer)
    small.score_shift, small.new_head = model.score_shift, model.new_head
    small.recomputed = model.recomputed
    for module in small.modules():
        # in eval mode bitsandbytes would round to 16 bits on a CPU, and store matrices otherwise
        module.training = isinstance(module, bits.nn.Linear4bit)
    return small


def in_full(p):
    """A parameter in 4 bits as the numbers that its map uses, (out, in)."""
    return package().functional.dequantize_4bit(p.data, p.quant_state)

"""
The frozen trunk under an adapter in 4 bits, the key quantize = "4bit" (QLoRA, arXiv 2305.14314).
The optional package bitsandbytes does it: each matrix of the layers is stored as 16 levels (NF4)
with a scale of 8 bits for each 64 numbers, 4.13 bits a number, and is converted back at each use.
Embeddings, head and norms stay as they are. The reference is the rounded model, too.
"""
import torch
import torch.nn as nn

from errors import BadInput
from model import Model
from options.trunk import layers_of


class InFourBits(Model):
    """A Model whose layers' matrices have 4 bits already; its arguments are Model's."""

    def as_saved(self, name, W):
        """Model.as_saved, for saved models: W, or the matrix that is stored in W in 4 bits."""
        p = dict(self.hf.named_parameters()).get(name)
        return in_full(p).cpu() if hasattr(p, "quant_state") else W


def quantize(model, device, dtype):
    """
    The Model of a frozen one's transformers' model, whose layers' matrices get 4 bits, one after
    the other, and go to the device. dtype: in which it computes. Raises BadInput.
    """
    if model.must_fetch or dtype == torch.float64:
        raise BadInput("quantize = '4bit' goes with no zero_stage 3 and no float64; leave one of "
                       "the two out")
    from options.failures import package

    bits = package("bitsandbytes", "quantize = '4bit'")
    # each once: Zamba's layers have layers inside them, and share some
    maps = dict.fromkeys(
        (parent, name) for layer in layers_of(model) for parent in layer.modules()
        for name, linear in parent.named_children() if type(linear) is nn.Linear)
    if not maps:
        raise BadInput(f"{model.path}: no matrix of its layers is of torch's class Linear, so none "
                       "can have 4 bits; leave quantize out")
    for parent, name in maps:
        linear = getattr(parent, name)
        small = bits.nn.Linear4bit(
            linear.in_features, linear.out_features, bias=linear.bias is not None,
            compute_dtype=dtype, quant_type="nf4", device="meta")
        small.weight = bits.nn.Params4bit(
            linear.weight.data, requires_grad=False, quant_type="nf4", module=small)
        small.bias = linear.bias
        # autocast's maps give 16 bits; these give their input's dtype, and so does the cache
        small.register_forward_pre_hook(lambda linear, inputs: (inputs[0].to(dtype),))
        setattr(parent, name, small.to(device))
    small = InFourBits(model.hf.to(device), model.head, model.path, model.tokenizer)
    small.score_shift, small.new_head = model.score_shift, model.new_head
    small.recomputed = model.recomputed
    for module in small.modules():
        # in eval mode bitsandbytes would round to 16 bits on a CPU, and store matrices otherwise
        module.training = isinstance(module, bits.nn.Linear4bit)
    return small


def in_full(p):
    """A parameter in 4 bits as the numbers that its map uses, (out, in)."""
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(p.data, p.quant_state)

"""
One Transformer for six families of Hugging Face models: gpt2, gpt_neox (Pythia), llama, mistral, qwen2, qwen3. The head is
either a language model's (logits over the vocabulary) or one scalar a token (reward and value models).

    policy = Transformer.from_pretrained("out/arithmetic_sft/policy")                # logits (B, T, V)
    value_model = Transformer.from_pretrained("out/arithmetic_rm/reward_model", head="scalar")    # scalars (B, T)
    policy.save_pretrained("somewhere")                                              # transformers loads it

Inside, every family has the same module names; the tables under "Hugging Face names" below say what each is called on disk.
There is no dropout anywhere, whatever config.json says: a policy must give the same token the same probability twice.
"""
import dataclasses
import functools
import json
import math
import os
import re
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from configurator import BadInput, first_line, shorten

# ---------------------------------------------------------------------------------------------------------------------
# config.json -> what the Transformer needs to know


@dataclass
class ModelConfig:
    """The architecture, in one vocabulary for all families. `hf` keeps config.json as it was read, for saving."""

    family: str
    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ff: int
    max_positions: int
    norm_eps: float
    activation: str
    tied: bool  # the LM head is the embedding matrix
    rms_norm: bool = True  # False: LayerNorm with bias
    gated_mlp: bool = True  # False: up, activation, down
    parallel_residual: bool = False  # GPT-NeoX: attention and MLP read the same residual
    learned_positions: bool = False  # GPT-2: a table of positions instead of rotation
    rotary_dim: int = 0  # how many of head_dim's coordinates rotate
    rope: dict = None
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # Qwen3: RMSNorm on each head's query and key
    windows: tuple = ()  # sliding attention window of each layer, 0 = sees everything
    score_shift: float = 0.0  # added to a reward model's scalar so that demonstrations average 0 (N+ detail 15)
    hf: dict = None


ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
}
FAMILIES = ("gpt2", "gpt_neox", "llama", "mistral", "qwen2", "qwen3")

# What each field may be: its type, its smallest and its largest value. The bounds are far from any
# model of today. They are there so that a slip of a digit is an error, not a machine out of memory.
SIZE, COUNT, LENGTH, SHARE = (int, 1, 10**7), (int, 1, 10**4), (int, 1, 10**9), (float, 0, 1)
WINDOW, POSITIVE, FINITE = (int, 0, 10**9), (float, 1e-3, 1e15), (float, -1e30, 1e30)
FLAG, NAME, OBJECT, LIST = (bool,), (str,), (dict,), (list,)
_SHARED = dict(
    vocab_size=SIZE, hidden_size=SIZE, num_hidden_layers=COUNT, intermediate_size=SIZE,
    num_attention_heads=COUNT, num_key_value_heads=COUNT, head_dim=SIZE, hidden_act=NAME,
    max_position_embeddings=LENGTH, tie_word_embeddings=FLAG, score_shift=FINITE,
    rope_parameters=OBJECT, rope_scaling=OBJECT, rope_theta=POSITIVE, partial_rotary_factor=SHARE)
_RMS = _SHARED | dict(rms_norm_eps=SHARE)
_QWEN = _RMS | dict(
    use_sliding_window=FLAG, sliding_window=WINDOW, max_window_layers=WINDOW, layer_types=LIST)
FIELDS = {
    "gpt2": dict(
        vocab_size=SIZE, n_embd=SIZE, n_layer=COUNT, n_head=COUNT, n_inner=SIZE, n_positions=LENGTH,
        layer_norm_epsilon=SHARE, activation_function=NAME, tie_word_embeddings=FLAG,
        scale_attn_weights=FLAG, score_shift=FINITE),
    "gpt_neox": _SHARED | dict(
        layer_norm_eps=SHARE, use_parallel_residual=FLAG, attention_bias=FLAG, rotary_pct=SHARE,
        rotary_emb_base=POSITIVE),
    "llama": _RMS | dict(attention_bias=FLAG, mlp_bias=FLAG),
    "mistral": _RMS | dict(sliding_window=WINDOW),
    "qwen2": _QWEN,
    "qwen3": _QWEN | dict(attention_bias=FLAG),
}
ROPE_FIELDS = dict(
    rope_type=NAME, type=NAME, rope_theta=POSITIVE, partial_rotary_factor=SHARE, factor=POSITIVE,
    low_freq_factor=POSITIVE, high_freq_factor=POSITIVE, original_max_position_embeddings=LENGTH)
ROPE_NEEDS = {"default": (), "linear": ("factor",), "llama3": (
    "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")}
ADAPTER_FIELDS = dict(
    r=(int, 0, 10**6), lora_alpha=(float, 1e-6, 1e6), target_modules=LIST, base_model_name_or_path=NAME)
# In these null means "not given". In any other field it is refused: transformers would not take it
# for the default, as we would.
NULL_IS_FINE = {
    "n_inner", "num_key_value_heads", "head_dim", "rope_parameters", "rope_scaling", "sliding_window",
    "max_window_layers", "layer_types", "target_modules", "base_model_name_or_path"}
IN_WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "a string",
            dict: "an object", list: "a list"}


def check_fields(values, rules, where):
    """Raise BadInput unless each value that is given is what a table such as FIELDS says of it."""
    for name, (kind, *bounds) in rules.items():
        value = values.get(name)
        if name not in values or value is None and name in NULL_IS_FINE:
            continue
        # by type(), for to isinstance True is an integer
        right_type = type(value) is kind or kind is float and type(value) is int
        if not right_type or bounds and not bounds[0] <= value <= bounds[1]:
            span = f" from {bounds[0]:g} to {bounds[1]:g}" if bounds else ""
            raise BadInput(f"{where}: {name} = {shorten(value)}; wanted {IN_WORDS[kind]}{span}")


def parse_config(hf, where="config.json"):
    """ModelConfig from the dict of a Hugging Face config.json. Raises BadInput on what we could only get wrong."""
    as_read, family = hf, hf.get("model_type")
    if family not in FAMILIES:
        raise BadInput(f"{where}: model_type {shorten(family)} is not supported; quartet knows {', '.join(FAMILIES)}")
    check_fields(hf, FIELDS[family], where)
    hf = {name: value for name, value in hf.items() if value is not None}
    get = hf.get
    # what a newer or rarer config could ask for, and we would silently not do
    for key in ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention", "quantization_config"):
        if get(key):
            raise BadInput(f"{where}: {key} = {shorten(get(key))} is not supported")
    if family == "gpt2" and not get("scale_attn_weights", True):
        raise BadInput(f"{where}: scale_attn_weights = false is not supported")
    try:
        if family == "gpt2":
            c = ModelConfig(
                family, hf["vocab_size"], hf["n_embd"], hf["n_layer"], hf["n_head"], hf["n_head"],
                hf["n_embd"] // hf["n_head"], get("n_inner") or 4 * hf["n_embd"], hf["n_positions"],
                get("layer_norm_epsilon", 1e-5), get("activation_function", "gelu_new"), get("tie_word_embeddings", True),
                rms_norm=False, gated_mlp=False, learned_positions=True, qkv_bias=True, o_bias=True, mlp_bias=True)
        else:
            head_dim = get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
            c = ModelConfig(
                family, hf["vocab_size"], hf["hidden_size"], hf["num_hidden_layers"], hf["num_attention_heads"],
                get("num_key_value_heads") or hf["num_attention_heads"], head_dim, hf["intermediate_size"],
                hf["max_position_embeddings"], get("rms_norm_eps", 1e-6), get("hidden_act", "silu"),
                get("tie_word_embeddings", False), rotary_dim=head_dim, rope=parse_rope(hf, where))
    except KeyError as e:
        raise BadInput(f"{where}: {e.args[0]!r} is missing") from e
    if c.d_model % c.n_heads and not get("head_dim"):
        raise BadInput(f"{where}: a width of {c.d_model} does not split into {c.n_heads} attention heads")
    if c.n_heads % c.n_kv_heads or family == "gpt_neox" and c.n_heads != c.n_kv_heads:
        raise BadInput(f"{where}: {c.n_heads} attention heads cannot share {c.n_kv_heads} keys and values")
    if family == "gpt_neox":
        c.norm_eps, c.activation = get("layer_norm_eps", 1e-5), get("hidden_act", "gelu")
        c.rms_norm = c.gated_mlp = False
        c.parallel_residual = get("use_parallel_residual", True)
        c.qkv_bias = c.o_bias = get("attention_bias", True)
        c.mlp_bias = True
    if family == "llama":
        c.qkv_bias = c.o_bias = get("attention_bias", False)
        c.mlp_bias = get("mlp_bias", False)
    if family == "qwen2":
        c.qkv_bias = True
    if family == "qwen3":
        c.qkv_bias = c.o_bias = get("attention_bias", False)
        c.qk_norm = True
    if c.rope:
        c.rotary_dim = int(head_dim * c.rope.get("partial_rotary_factor", 1.0))
        if c.rotary_dim < 2 or c.rotary_dim % 2:
            raise BadInput(f"{where}: {c.rotary_dim} of a head's {head_dim} coordinates would rotate; wanted "
                           "an even number of them")
    c.windows = parse_windows(hf, c, where)
    c.score_shift = float(get("score_shift", 0.0))
    c.hf = as_read
    if c.activation not in ACTIVATIONS:
        raise BadInput(f"{where}: activation {shorten(c.activation)} is not supported; one of {', '.join(ACTIVATIONS)}")
    return c


def parse_rope(hf, where):
    """Rotary settings: transformers 5 writes one `rope_parameters`; hub configs have `rope_theta` and `rope_scaling`."""
    rope = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    check_fields(rope, ROPE_FIELDS, f"{where}: rotary embedding")
    rope.setdefault("rope_type", rope.pop("type", "default"))
    rope.setdefault("rope_theta", hf.get("rope_theta", hf.get("rotary_emb_base", 10000.0)))
    factor = hf.get("partial_rotary_factor", hf.get("rotary_pct", 0.25 if hf["model_type"] == "gpt_neox" else 1.0))
    rope.setdefault("partial_rotary_factor", factor)
    kind = rope["rope_type"]
    by_layer = any(isinstance(value, dict) for value in rope.values())  # one rotation for each kind of layer
    if kind not in ROPE_NEEDS or by_layer:
        raise BadInput(f"{where}: rope type {shorten(kind)} is not supported{' by kind of layer' * by_layer}; "
                       f"one of {', '.join(ROPE_NEEDS)}, the same in all layers")
    missing = [name for name in ROPE_NEEDS[kind] if name not in rope]
    if missing or kind == "llama3" and rope["low_freq_factor"] >= rope["high_freq_factor"]:
        raise BadInput(f"{where}: rope type {kind!r} needs "
                       f"{' and '.join(missing) or 'low_freq_factor below high_freq_factor'}")
    return rope


def parse_windows(hf, c, where):
    """The sliding window of each layer (0 = none): Mistral slides everywhere, Qwen from layer max_window_layers on."""
    window = hf.get("sliding_window") or 0
    if c.family not in ("mistral", "qwen2", "qwen3") or (c.family != "mistral" and not hf.get("use_sliding_window")):
        window = 0
    if c.family == "mistral":
        types = ["sliding_attention"] * c.n_layers
    else:
        full = hf.get("max_window_layers", 28)
        types = hf.get("layer_types") or ["full_attention" if i < full else "sliding_attention" for i in range(c.n_layers)]
        known = ("full_attention", "sliding_attention")
        fits = len(types) == c.n_layers and all(t in known for t in types)
        if c.family in ("qwen2", "qwen3") and not fits:
            raise BadInput(f"{where}: layer_types = {shorten(types)}; wanted {' or '.join(known)} for "
                           f"each of {c.n_layers} layers")
    return tuple(window if t == "sliding_attention" else 0 for t in types)


def rope_frequencies(c):
    """Rotations per position, (rotary_dim / 2,) fp32 (RoFormer, arXiv 2104.09864); with Llama 3.1's stretching."""
    f = 1.0 / c.rope["rope_theta"] ** (torch.arange(0, c.rotary_dim, 2, dtype=torch.float32) / c.rotary_dim)
    if c.rope["rope_type"] == "linear":
        f = f / c.rope["factor"]
    if c.rope["rope_type"] == "llama3":
        # wavelengths beyond the original context are stretched by `factor`, short ones kept, a ramp in between
        old, low, high = (c.rope[k] for k in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"))
        turns = old * f / (2 * math.pi)  # full turns within the original context
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        f = keep * f + (1 - keep) * f / c.rope["factor"]
    return f


# ---------------------------------------------------------------------------------------------------------------------
# the model


class RMSNorm(nn.Module):
    def __init__(self, dim, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps = eps

    def forward(self, x):
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class Layer(nn.Module):
    """Attention, then MLP, each on the residual stream (or both at once, in GPT-NeoX)."""

    def __init__(self, c, index):
        super().__init__()
        self.c, self.index = c, index
        self.recomputed = False  # True: the whole layer is computed again in the backward pass, see Transformer.recompute
        d, q_dim, kv_dim = c.d_model, c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
        norm = RMSNorm if c.rms_norm else nn.LayerNorm
        self.norm1 = norm(d, eps=c.norm_eps)
        self.q = nn.Linear(d, q_dim, bias=c.qkv_bias)
        self.k = nn.Linear(d, kv_dim, bias=c.qkv_bias)
        self.v = nn.Linear(d, kv_dim, bias=c.qkv_bias)
        self.o = nn.Linear(q_dim, d, bias=c.o_bias)
        if c.qk_norm:
            self.q_norm, self.k_norm = RMSNorm(c.head_dim, c.norm_eps), RMSNorm(c.head_dim, c.norm_eps)
        self.norm2 = norm(d, eps=c.norm_eps)
        if c.gated_mlp:
            self.gate = nn.Linear(d, c.d_ff, bias=c.mlp_bias)
        self.up = nn.Linear(d, c.d_ff, bias=c.mlp_bias)
        self.down = nn.Linear(c.d_ff, d, bias=c.mlp_bias)
        self.activation = ACTIVATIONS[c.activation]

    def linear(self, name, x, adapter):
        """The layer's linear map of this name, and what a LoRA adapter adds to it: W x + b + scale B A x."""
        y = getattr(self, name)(x)
        return y + adapter[name](x).to(y.dtype) if adapter is not None and name in adapter else y

    def attention(self, x, rotation, allowed, cache, adapter):
        """x (B, T, d) -> (B, T, d). allowed: bool, broadcastable to (B, 1, T, S); None = plain causal."""
        B, T, _ = x.shape
        q = self.linear("q", x, adapter).view(B, T, self.c.n_heads, self.c.head_dim).transpose(1, 2)  # (B, H, T, hd)
        k = self.linear("k", x, adapter).view(B, T, self.c.n_kv_heads, self.c.head_dim).transpose(1, 2)  # (B, KV, T, hd)
        v = self.linear("v", x, adapter).view(B, T, self.c.n_kv_heads, self.c.head_dim).transpose(1, 2)
        if self.c.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotation is not None:
            q, k = rotate(q, *rotation), rotate(k, *rotation)
        if cache is not None:
            k, v = cache.append(self.index, k, v)  # (B, KV, S, hd), all slots so far
        if T == 1:  # decoding: a matrix-vector product per head, faster by hand than through a fused kernel's set-up
            y = single_query_attention(q, k, v, allowed)
        else:
            if self.c.n_kv_heads != self.c.n_heads:  # grouped queries share keys and values
                groups = self.c.n_heads // self.c.n_kv_heads
                k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
            if B == 0:  # a rank without rows must come along where parameters are sharded, and kernels may refuse to
                y = (q @ k.mT).softmax(-1) @ v
            else:
                y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, is_causal=allowed is None)
        return self.linear("o", y.transpose(1, 2).flatten(2), adapter)

    def mlp(self, x, adapter):
        branches = [self.linear(name, x, adapter) for name in (("gate", "up") if self.c.gated_mlp else ("up",))]
        if torch.is_grad_enabled() and not self.recomputed:
            # what lies between the branches and `down` is the widest of all activations and the cheapest to compute again
            return checkpoint(self.narrow, adapter, *branches, use_reentrant=False, preserve_rng_state=False)
        return self.narrow(adapter, *branches)

    def narrow(self, adapter, gate, *up):
        """The activation, times the other branch if there is one, and back to the model's width."""
        return self.linear("down", self.activation(gate) * up[0] if up else self.activation(gate), adapter)

    def forward(self, x, rotation, allowed, cache, adapter=None):
        if self.c.parallel_residual:
            return x + self.attention(self.norm1(x), rotation, allowed, cache, adapter) + self.mlp(self.norm2(x), adapter)
        x = x + self.attention(self.norm1(x), rotation, allowed, cache, adapter)
        return x + self.mlp(self.norm2(x), adapter)


def rotate(x, cos, sin):
    """
    Rotary embedding of the first n = cos.shape[-1] coordinates of x (B, H, T, hd), whose pairs are (i, i + n / 2):
    (a, b) -> (a cos - b sin, b cos + a sin), with the signs already in sin = (-sin, sin).
    """
    n = cos.shape[-1]
    if n < x.shape[-1]:
        return torch.cat([rotate(x[..., :n], cos, sin), x[..., n:]], dim=-1)
    return torch.addcmul(x * cos, x.roll(n // 2, dims=-1), sin)


def single_query_attention(q, k, v, allowed):
    """Attention of one query a row: q (B, H, 1, hd), k and v (B, KV, S, hd), allowed (B, 1, 1, S) or None."""
    B, H, _, hd = q.shape
    KV = k.shape[1]
    q = q.view(B, KV, H // KV, hd) * hd**-0.5
    weights = q @ k.transpose(2, 3)  # (B, KV, H / KV, S)
    if allowed is not None:
        weights = weights.masked_fill(~allowed, -torch.inf)
    return (weights.softmax(-1).to(v.dtype) @ v).view(B, H, 1, hd)


class KVCache:
    """Preallocated keys and values: `length` of `slots` columns are in use. mask (B, slots) is True on real tokens."""

    def __init__(self, c, batch, slots, dtype, device):
        shape = (batch, c.n_kv_heads, slots, c.head_dim)
        self.k = [torch.empty(shape, dtype=dtype, device=device) for _ in range(c.n_layers)]
        self.v = [torch.empty(shape, dtype=dtype, device=device) for _ in range(c.n_layers)]
        self.length = 0

    def append(self, layer, k, v):
        """Store k, v (B, KV, T, hd) behind what is there; returns views of all columns up to and with them."""
        end = self.length + k.shape[2]
        self.k[layer][:, :, self.length:end] = k
        self.v[layer][:, :, self.length:end] = v
        return self.k[layer][:, :, :end], self.v[layer][:, :, :end]

    def keep_rows(self, rows):
        """Forget all rows but these (an index tensor), layer by layer, so that two copies of the cache never coexist."""
        for tensors in (self.k, self.v):
            for i, t in enumerate(tensors):
                tensors[i] = t[rows]


class Transformer(nn.Module):
    def __init__(self, config, head="lm"):
        super().__init__()
        if head not in ("lm", "scalar"):
            raise BadInput(f"head = {head!r}; one of lm, scalar")
        c = config
        self.config, self.head = c, head
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        if c.learned_positions:
            self.positions = nn.Embedding(c.max_positions, c.d_model)
        self.layers = nn.ModuleList(Layer(c, i) for i in range(c.n_layers))
        self.norm = RMSNorm(c.d_model, c.norm_eps) if c.rms_norm else nn.LayerNorm(c.d_model, eps=c.norm_eps)
        if head == "scalar":
            self.score = nn.Linear(c.d_model, 1, bias=False)
        elif not c.tied:
            self.lm_head = nn.Linear(c.d_model, c.vocab_size, bias=False)
        self.new_head = False  # True when the scalar head was not on disk but freshly drawn
        self.frequencies = {}  # device -> rope_frequencies; no buffer, so that .bfloat16() cannot round it

    def forward(self, *args, **kwargs):
        """trunk's arguments -> logits (B, T, V), or scalars (B, T) with the scalar head."""
        return self.output(self.trunk(*args, **kwargs))

    def output(self, x):
        """The head, on the trunk's states (..., d) -> logits (..., V), or scalars (...)."""
        if self.head == "scalar":
            # an Adapted's head is in fp32 even on a 16-bit trunk; a view of it would make FSDP warn
            return self.score(x.to(self.score.weight.dtype)).squeeze(-1).clone()
        return F.linear(x, self.lm_head_weight())

    def lm_head_weight(self):
        """(V, d)."""
        return self.embed.weight if self.config.tied else self.lm_head.weight

    def recompute(self, on=True):
        """Keep only each layer's input for the backward pass, and compute the rest again there: a third slower, far smaller."""
        for layer in self.layers:
            layer.recomputed = on

    def trunk(self, tokens, attention_mask=None, response_length=None, cache=None, positions=None, adapter=None):
        """
        tokens (B, T) int64, attention_mask (B, T) bool (True on real tokens, padding on either side; None: all real)
        -> the last layer's states, normalised, (B, T, d): what the head reads.

        response_length=R returns only the R positions P-1 ... T-2: those that choose, or value the state before, the last
        R tokens. This is the one place where logits and labels are shifted against each other.
        cache: a KVCache; the tokens are appended to it, and attention_mask then covers its columns, old and new.
        positions (B, T): where the tokens stand in their own sequence; None: counted from attention_mask.
        adapter: the LoRA adapters of the layers, see Adapted.
        """
        B, T = tokens.shape
        past = 0 if cache is None else cache.length
        if positions is None:
            if attention_mask is None:
                positions = torch.arange(past, past + T, device=tokens.device)[None]  # (1, T)
            else:  # a token's position is the number of real tokens before it, wherever the padding is
                positions = (attention_mask.long().cumsum(1) - 1).clamp(min=0)[:, past:]
        x = look_up(self.embed, tokens)  # (B, T, d)
        rotation = None
        if self.config.learned_positions:
            x = x + look_up(self.positions, positions)
        else:
            if x.device not in self.frequencies:
                self.frequencies[x.device] = rope_frequencies(self.config).to(x.device)
            angles = positions[:, None, :, None].float() * self.frequencies[x.device]  # (B, 1, T, rotary_dim / 2)
            cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
            rotation = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
        if attention_mask is not None and cache is None and not (attention_mask[:, 1:] & ~attention_mask[:, :-1]).any():
            attention_mask = None  # padding on the right only: causal attention never looks there, and is faster unmasked
        # one mask per kind of layer: sliding or not
        masks = {w: allowed_pairs(T, past, w, attention_mask, tokens.device) for w in set(self.config.windows)}
        if T > 1:  # as numbers to add, once: attention would make its own of them in every layer, and keep it for the backward
            dtype = autocast_dtype(x) or x.dtype
            masks = {w: m if m is None else torch.zeros(m.shape, dtype=dtype, device=m.device).masked_fill_(~m, -torch.inf)
                     for w, m in masks.items()}
        for layer in self.layers:
            arguments = x, rotation, masks[self.config.windows[layer.index]], cache, adapter and adapter[layer.index]
            if layer.recomputed and torch.is_grad_enabled():
                x = checkpoint(layer, *arguments, use_reentrant=False, preserve_rng_state=False)
            else:
                x = layer(*arguments)
        if cache is not None:
            cache.length += T
        if response_length is not None:
            x = x[:, -response_length - 1:-1]  # the state that chose token t is one column to its left
        return self.norm(x)

    @classmethod
    def from_scratch(cls, hf, head="lm", seed=0, dtype=torch.float32, device="cpu"):
        """A new model from a dict in the form of config.json, with normal weights of std 1 / sqrt(d) from seed."""
        model = cls(parse_config(hf), head)
        generator = torch.Generator().manual_seed(seed)
        for name, p in model.named_parameters():
            with torch.no_grad():
                if p.dim() == 1:
                    p.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
                else:
                    # what writes to the residual stream is smaller, the deeper the model (GPT-2, section 2.3)
                    shrink = (2 * model.config.n_layers) ** -0.5 if name.endswith(("o.weight", "down.weight")) else 1.0
                    p.normal_(0, shrink * model.config.d_model**-0.5, generator=generator)
        if head == "scalar":
            model.draw_score_head(seed)
        return model.to(device, dtype)

    def draw_score_head(self, seed):
        """A new scalar head: normal with std 1 / sqrt(d + 1) (N+ detail 11)."""
        generator = torch.Generator().manual_seed(seed)
        fill(self.score.weight, torch.empty(1, self.config.d_model).normal_(0, (self.config.d_model + 1) ** -0.5,
                                                                            generator=generator))
        self.new_head = True

    @classmethod
    def from_pretrained(cls, path, head="lm", dtype=torch.float32, device="cpu", seed=0, matrices=None, prepare=None):
        """
        Load a Hugging Face directory, or a model of the hub by name. head="scalar" reads the sequence-classification format
        (num_labels = 1); on a plain language model it draws a new head from seed and sets model.new_head. matrices: another
        dtype for the matrices. prepare: called with the model before it has any memory, for example to shard it.
        Raises BadInput when a file or tensor is missing, unexpected or of another shape, or the architecture is unknown.
        """
        folder = find_folder(path)
        model_config = parse_config(read_json(os.path.join(folder, "config.json")), os.path.join(folder, "config.json"))
        find_tensors(path, folder, model_config, head)  # all are there, before anything is made
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        with torch.device("meta"):  # no memory yet
            model = cls(model_config, head).to(dtype)
            for p in model.parameters():
                if matrices and p.dim() == 2:
                    p.data = p.data.to(matrices)
        if prepare:
            prepare(model)
        model = model.to_empty(device=device)
        model.load_weights(path, folder, seed)
        return model

    def load_weights(self, path, folder, seed=0):
        """Fill all parameters from the weights in a folder; path: what messages call it. Raises BadInput."""
        found = find_tensors(path, folder, self.config, self.head)
        for name, p in self.named_parameters():
            file, disk_name, part = found[name]
            if file is None:
                self.draw_score_head(seed)
                continue
            # one tensor at a time into memory that is already there: never two copies of a model
            tensor = read_tensors(file, lambda f, n=disk_name: f.get_tensor(n))
            if part in (None, 0):
                check_numbers(tensor, p.dtype, file, disk_name)
            fill(p, from_hf(self.config, hf_name(self.config.family, name)[0], part, tensor))
            del tensor
        open_bin.cache_clear()

    def weights(self):
        """{our name: parameter}, all that the model is made of."""
        return {name: p.detach() for name, p in self.named_parameters()}

    def merge(self, weights):
        """Weights as they are saved; where there are adapters, they are merged into them."""
        return weights

    def save_pretrained(self, folder, weights=None):
        """
        Write config.json and model.safetensors as transformers would; a scalar head as sequence classification. weights: what
        weights() gives, gathered, when the model is sharded.
        """
        write_pretrained(folder, self.config, self.head, self.merge(weights or self.weights()))


def write_pretrained(folder, config, head, weights):
    """Transformer.save_pretrained, from {our name: whole tensor}."""
    from safetensors.torch import save_file

    os.makedirs(folder, exist_ok=True)
    hf = dict(config.hf)
    names = HF_CLASSES[config.family]
    hf["architectures"] = [names + ("ForCausalLM" if head == "lm" else "ForSequenceClassification")]
    if config.family == "gpt2" and head == "lm":
        hf["architectures"] = ["GPT2LMHeadModel"]
    if head == "scalar":
        # one label, without num_labels itself: transformers derives it from id2label
        hf.update(id2label={"0": "LABEL_0"}, label2id={"LABEL_0": 0}, score_shift=config.score_shift)
    hf["dtype"] = str(weights["embed.weight"].dtype).removeprefix("torch.")
    hf.pop("torch_dtype", None)
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as f:
        json.dump(hf, f, indent=2, sort_keys=True)
    groups = {}  # name on disk -> the parts it is made of
    for name, t in weights.items():
        disk_name, part = hf_name(config.family, name)
        groups.setdefault(disk_name, {})[part] = t
    tensors = {name: to_hf(config, name, parts).cpu().contiguous() for name, parts in groups.items()}
    save_file(tensors, os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})


def fill(p, tensor):
    """Copy a whole tensor into a parameter; into a sharded one, this rank's part of it."""
    with torch.no_grad():
        p.copy_(split_like(p, tensor))


def split_like(p, tensor):
    """A tensor that every rank has whole, split over the ranks where the parameter p is; nothing is sent."""
    if not hasattr(p, "placements"):  # which a DTensor has
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(p.device), p.device_mesh, p.placements, src_data_rank=None)


def look_up(table, ids):
    """
    Rows of an embedding. Under autocast they are rounded to 16 bits, as autocast does it to every other matrix: a frozen model
    may then store this one in 16 bits, too, and still compute exactly what the policy does. The sums stay in fp32.
    """
    x = table(ids)
    low = autocast_dtype(x)
    return x if low is None else x.to(low).float()


def autocast_dtype(x):
    """The dtype to which autocast, where it is on, rounds this tensor for a matrix product; None where it leaves it alone."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) and x.dtype != torch.float64 else None


def allowed_pairs(T, past, window, mask, device):
    """Which of the S = past + T keys each of T queries may see: bool (1 or B, 1, T, S), or None for plain causal."""
    S = past + T
    if mask is None and not window and (past == 0 or T == 1):
        return None
    query = torch.arange(past, S, device=device)[:, None]
    key = torch.arange(S, device=device)
    allowed = (key <= query)[None, None]  # (1, 1, T, S)
    if window:
        allowed = allowed & (query - key < window)
    if mask is not None:
        # padding sees itself, for a softmax over nothing is NaN, and NaN * 0 is still NaN
        allowed = (allowed & mask[:, None, None, :S]) | (key == query)
    return allowed


# ---------------------------------------------------------------------------------------------------------------------
# LoRA, and models that share a trunk


class LoRA(nn.Module):
    """scale B A x (arXiv 2106.09685, eq. 3): added to a linear map that stays as it is, of which only A and B are trained."""

    def __init__(self, A, B, scale):
        super().__init__()
        self.A, self.B, self.scale = A, B, scale  # (r, in), (out, r)

    def forward(self, x):
        if not torch.is_autocast_enabled(x.device.type):  # which casts by itself, and without 32 bits in between
            x = x.to(self.A.dtype)
        return F.linear(F.linear(x, self.A), self.B) * self.scale


class Adapted(nn.Module):
    """
    A model on another one's trunk. Its own are a LoRA adapter, a scalar head, or both; all else is `base`, which is in memory
    once, however many models stand on it. The bare base is the reference policy, for nothing.
    """

    def __init__(self, base, head="lm", rank=0, alpha=None, targets="q,k,v,o,gate,up,down", seed=0):
        """
        rank 0: no adapter. Otherwise the base is frozen, and its linear maps of these names get A and B of this rank, scaled by
        alpha / rank (alpha None: 2 rank). B is 0, so nothing changes yet; A is uniform as in peft. Where q, k and v are one
        tensor on disk (gpt2, gpt_neox) they share A, so that peft, which sees that one, can read the adapter. Raises BadInput.
        """
        super().__init__()
        self.__dict__["base"] = base  # not as a child: its parameters belong to another model
        self.config, self.head, self.new_head = dataclasses.replace(base.config), head, False
        self.lora = dict(rank=rank, alpha=2 * rank if alpha is None else alpha)
        dtype, device = torch.promote_types(base.embed.weight.dtype, torch.float32), base.embed.weight.device
        self.layers = nn.ModuleList(nn.ModuleDict() for _ in base.layers) if rank else None
        wanted, fused = targets.split(","), base.config.family in ("gpt2", "gpt_neox")
        unknown = set(wanted) - {"q", "k", "v", "o", "gate", "up", "down"}
        if unknown or fused and 0 < len(set(wanted) & {"q", "k", "v"}) < 3:
            raise BadInput(f"LoRA targets {targets!r}: wanted some of q, k, v, o, gate, up, down" + (
                "" if unknown else f"; in {base.config.family} q, k and v are one, so take all three or none"))
        generator = torch.Generator().manual_seed(seed)
        for adapters, layer in zip(self.layers or (), base.layers, strict=False):
            freeze(base)
            for name in (n for n in ("q", "k", "v", "o", "gate", "up", "down") if n in wanted and hasattr(layer, n)):
                linear = getattr(layer, name)
                if not (fused and name in ("k", "v")):
                    A = torch.empty(rank, linear.in_features).uniform_(-1, 1, generator=generator) * linear.in_features**-0.5
                    A = nn.Parameter(A.to(device, dtype))
                B = nn.Parameter(torch.zeros(linear.out_features, rank, dtype=dtype, device=device))
                adapters[name] = LoRA(A, B, self.lora["alpha"] / rank)
        if head == "scalar":
            self.score = nn.Linear(base.config.d_model, 1, bias=False, dtype=dtype, device=device)
            self.draw_score_head(seed)
            if base.head == "scalar":
                fill(self.score.weight, base.score.weight)
                self.new_head = base.new_head

    forward, output, draw_score_head = Transformer.forward, Transformer.output, Transformer.draw_score_head
    save_pretrained = Transformer.save_pretrained

    def trunk(self, *args, **kwargs):
        """Transformer.trunk, with the adapter. It goes along as an argument, so that a layer computed again has the same one."""
        return self.base.trunk(*args, **kwargs, **({"adapter": self.layers} if self.layers else {}))

    def lm_head_weight(self):
        return self.base.lm_head_weight()

    def recompute(self, on=True):
        self.base.recompute(on)

    @property
    def embed(self):
        return self.base.embed

    def weights(self):
        return self.base.weights() | ({"score.weight": self.score.weight.detach()} if self.head == "scalar" else {})

    def merge(self, weights):
        """
        W + scale B A instead of W, in the CPU's memory. A model of 16 bits becomes one of float32:
        bfloat16 has steps of 1/256 of a weight, and would round away most of an adapter's changes,
        which are smaller.
        """
        def wide(t):
            return torch.promote_types(t.dtype, torch.float32)

        weights = self.base.merge(dict(weights))
        for i, adapters in enumerate(self.layers or ()):
            for name, a in adapters.items():
                W = weights[f"layers.{i}.{name}.weight"]
                delta = a.scale * a.B.detach().double() @ a.A.detach().double()
                merged = (W.double() + delta.to(W.device)).to(wide(W))
                weights[f"layers.{i}.{name}.weight"] = merged.cpu()
        if self.layers:
            weights = {name: t.cpu().to(wide(t)) for name, t in weights.items()}
        if self.head == "scalar":
            weights.pop("lm_head.weight", None)
        return weights


def freeze(model):
    """Make a model immovable: no gradients, eval mode. Returns it."""
    return model.eval().requires_grad_(False)


# ---------------------------------------------------------------------------------------------------------------------
# Hugging Face names: what each of our tensors is called on disk ('#' is the layer's number)

_LLAMA = {
    "embed": "model.embed_tokens", "norm": "model.norm", "lm_head": "lm_head", "score": "score",
    "layers.#.norm1": "model.layers.#.input_layernorm", "layers.#.norm2": "model.layers.#.post_attention_layernorm",
    "layers.#.q": "model.layers.#.self_attn.q_proj", "layers.#.k": "model.layers.#.self_attn.k_proj",
    "layers.#.v": "model.layers.#.self_attn.v_proj", "layers.#.o": "model.layers.#.self_attn.o_proj",
    "layers.#.q_norm": "model.layers.#.self_attn.q_norm", "layers.#.k_norm": "model.layers.#.self_attn.k_norm",
    "layers.#.gate": "model.layers.#.mlp.gate_proj", "layers.#.up": "model.layers.#.mlp.up_proj",
    "layers.#.down": "model.layers.#.mlp.down_proj",
}
_GPT2 = {
    "embed": "transformer.wte", "positions": "transformer.wpe", "norm": "transformer.ln_f",
    "lm_head": "lm_head", "score": "score",
    "layers.#.norm1": "transformer.h.#.ln_1", "layers.#.norm2": "transformer.h.#.ln_2",
    "layers.#.q": "transformer.h.#.attn.c_attn:0", "layers.#.k": "transformer.h.#.attn.c_attn:1",
    "layers.#.v": "transformer.h.#.attn.c_attn:2", "layers.#.o": "transformer.h.#.attn.c_proj",
    "layers.#.up": "transformer.h.#.mlp.c_fc", "layers.#.down": "transformer.h.#.mlp.c_proj",
}
_NEOX = {
    "embed": "gpt_neox.embed_in", "norm": "gpt_neox.final_layer_norm", "lm_head": "embed_out", "score": "score",
    "layers.#.norm1": "gpt_neox.layers.#.input_layernorm",
    "layers.#.norm2": "gpt_neox.layers.#.post_attention_layernorm",
    "layers.#.q": "gpt_neox.layers.#.attention.query_key_value:0",
    "layers.#.k": "gpt_neox.layers.#.attention.query_key_value:1",
    "layers.#.v": "gpt_neox.layers.#.attention.query_key_value:2",
    "layers.#.o": "gpt_neox.layers.#.attention.dense",
    "layers.#.up": "gpt_neox.layers.#.mlp.dense_h_to_4h", "layers.#.down": "gpt_neox.layers.#.mlp.dense_4h_to_h",
}
HF_NAMES = {"gpt2": _GPT2, "gpt_neox": _NEOX, "llama": _LLAMA, "mistral": _LLAMA, "qwen2": _LLAMA, "qwen3": _LLAMA}
HF_BASE = {"gpt2": "transformer.", "gpt_neox": "gpt_neox.", **dict.fromkeys(FAMILIES[2:], "model.")}
HF_CLASSES = {"gpt2": "GPT2", "gpt_neox": "GPTNeoX", "llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2",
              "qwen3": "Qwen3"}


def hf_name(family, name):
    """('layers.3.q.weight') -> (name on disk, which third of a fused query-key-value tensor it is, or None)."""
    module, kind = name.rsplit(".", 1)
    number = next((x for x in module.split(".") if x.isdigit()), "")
    pattern = module.replace(f".{number}.", ".#.") if number else module
    disk, _, part = HF_NAMES[family][pattern].partition(":")
    return f"{disk.replace('#', number)}.{kind}", int(part) if part else None


def from_hf(c, disk_name, part, t):
    """Our tensor from the one on disk: GPT-2 stores linear layers transposed, GPT-NeoX interleaves q, k, v by head."""
    if c.family == "gpt2" and t.dim() == 2 and ".h." in disk_name:
        t = t.t()
    if part is None:
        return t
    if c.family == "gpt_neox":
        return t.unflatten(0, (c.n_heads, 3, c.head_dim))[:, part].flatten(0, 1)
    return t.chunk(3, dim=0)[part]


def to_hf(c, disk_name, parts):
    """The inverse of from_hf: parts {None: tensor} or {0: q, 1: k, 2: v} -> the tensor on disk."""
    if None in parts:
        t = parts[None]
    elif c.family == "gpt_neox":
        t = torch.stack([parts[i].unflatten(0, (c.n_heads, c.head_dim)) for i in range(3)], 1).flatten(0, 2)
    else:
        t = torch.cat([parts[i] for i in range(3)])
    return t.t() if c.family == "gpt2" and t.dim() == 2 and ".h." in disk_name else t


# ---------------------------------------------------------------------------------------------------------------------
# files


def find_folder(path):
    """A model's local folder: the path itself, or the hub's copy of that name. Raises BadInput when there is neither."""
    if os.path.isdir(path):
        if not os.path.isfile(os.path.join(path, "config.json")):
            raise BadInput(f"{path}: no config.json in this folder; it is not a saved model")
        return path
    if os.path.exists(path) or not re.fullmatch(r"(?!out/)[\w-][\w.-]*(/[\w.-]+)?", path):
        raise BadInput(f"{path}: no such model folder; train it first, or give a hub name such as EleutherAI/pythia-1b")
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(path, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"])
        if not any(name.endswith(".safetensors") for name in os.listdir(folder)):
            folder = snapshot_download(path, allow_patterns=["pytorch_model*.bin"])  # old, and pickled: see BinFile
        return folder
    except (OSError, ValueError) as e:  # no network, no such repository, not a valid name
        raise BadInput(f"{path}: no such folder here, and the hub did not give it: {str(e).splitlines()[0]}") from e


def read_json(file):
    """A JSON object from a file. Raises BadInput."""
    try:
        with open(file, encoding="utf-8") as f:
            value = json.load(f)
    except (OSError, ValueError, RecursionError) as e:  # RecursionError: nested too deep
        raise BadInput(f"{file}: {getattr(e, 'strerror', None) or e}") from e
    if not isinstance(value, dict):
        raise BadInput(f"{file}: wanted a JSON object, found {type(value).__name__}")
    return value


def tensor_files(folder):
    """
    {tensor name: (file, shape, dtype as the file calls it)} of a folder's weights, in one file or in
    shards, without reading them; safetensors where there are some. Raises BadInput.
    """
    for name in ("model.safetensors", "pytorch_model.bin"):
        single, index = os.path.join(folder, name), os.path.join(folder, f"{name}.index.json")
        if os.path.isfile(index):
            names = read_json(index).get("weight_map")
            if not isinstance(names, dict) or not all(isinstance(shard, str) for shard in names.values()):
                raise BadInput(f"{index}: no weight_map in it, from tensors to files; download it again")
            headers = {}
            for shard in sorted(set(names.values())):
                if not os.path.isfile(os.path.join(folder, shard)):
                    raise BadInput(f"{folder}: shard {shard} is missing; download it again")
                headers[shard] = read_headers(os.path.join(folder, shard))
            absent = [(name, shard) for name, shard in names.items() if name not in headers[shard]]
            if absent:
                raise BadInput(f"{index}: tensor {absent[0][0]!r} is not in {absent[0][1]}, as it says; "
                               "download them again")
            return {name: (os.path.join(folder, shard), *headers[shard][name])
                    for name, shard in names.items()}
        if os.path.isfile(single):
            return {name: (single, *header) for name, header in read_headers(single).items()}
    raise BadInput(f"{folder}: no model.safetensors here, and no pytorch_model.bin; save or download the model again")


def read_headers(file):
    """{tensor name: (shape, dtype)} of a file of weights."""
    return read_tensors(file, lambda f: {name: (tuple(piece.get_shape()), str(piece.get_dtype()))
                                         for name in f.keys() for piece in [f.get_slice(name)]})


def find_tensors(path, folder, c, head):
    """
    {our name: (file, name in it, which part of the tensor there it is)} of all parameters of a model;
    a scalar head that is not there has None for its file. path: what messages call the folder. Only
    the files' headers are read, so a config.json that announces more than the weights hold is found
    before any memory is taken. Raises BadInput.
    """
    files = tensor_files(folder)  # name on disk -> file, shape, dtype
    bare, prefix = {}, HF_BASE[c.family]
    if not any(name.startswith(prefix) for name in files):  # a bare trunk, as in the hub's gpt2
        bare = {prefix + name: name for name in files if name.split(".")[0] not in ("lm_head", "score")}
    found, used = {}, set()
    for name, shape in parameter_shapes(c, head):
        disk_name, part = hf_name(c.family, name)
        in_file = bare.get(disk_name, disk_name)
        if in_file not in files:
            if name != "score.weight":
                raise BadInput(f"{path}: tensor {disk_name!r} is missing from its weights; is the download "
                               "complete, and config.json this model's?")
            found[name] = None, None, None
            continue
        file, shape_there, dtype = files[in_file]
        if part is not None:
            shape = (3 * shape[0], *shape[1:])
        if c.family == "gpt2" and len(shape) == 2 and ".h." in disk_name:
            shape = shape[::-1]
        if shape_there != shape:
            raise BadInput(f"{path}: tensor {disk_name!r} is {shape_there} in the file, but config.json says {shape}")
        check_dtype(dtype, file, in_file)
        found[name] = file, in_file, part
        used.add(in_file)
    heads = {"lm_head.weight", "embed_out.weight", "score.weight"}
    ignored = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias", "rotary_emb.inv_freq")
    extra = [n for n in files if n not in used | heads and not n.endswith(ignored)]
    if extra:
        raise BadInput(f"{path}: its weights hold {extra[0]!r} and {len(extra) - 1} more that config.json does not "
                       "announce; the model would not be the one that was saved")
    return found


def parameter_shapes(c, head):
    """(name, shape) of a Transformer's parameters, one by one. Only one layer is built, without memory."""
    with torch.device("meta"):
        one = Transformer(dataclasses.replace(c, n_layers=1), head)
    shapes = {name: tuple(p.shape) for name, p in one.named_parameters()}
    first = "layers.0."
    yield from ((name, shape) for name, shape in shapes.items() if not name.startswith(first))
    for i in range(c.n_layers):
        for name, shape in shapes.items():
            if name.startswith(first):
                yield name.replace(first, f"layers.{i}."), shape


def check_dtype(dtype, file, name):
    """Raise BadInput for weights of other types: quantized ones mean nothing without their scales."""
    good = ("F16", "BF16", "F32", "F64", "float16", "bfloat16", "float32", "float64")
    if dtype.removeprefix("torch.") not in good:
        raise BadInput(f"{file}: tensor {name!r} is of type {dtype}, wanted 16-, 32- or 64-bit floating "
                       "point; get the model as it was before it was quantized")


def check_numbers(tensor, dtype, file, name):
    """Raise BadInput if a tensor holds NaN, or numbers that are infinite in the dtype it shall get."""
    low, high = (x.item() for x in tensor.aminmax())  # both NaN if there is one; takes no memory
    limit = torch.finfo(dtype).max
    if not (-limit <= low and high <= limit):
        found = "NaN" if math.isnan(low) else f"numbers from {low:g} to {high:g}"
        raise BadInput(f"{file}: tensor {name!r} holds {found}, not all of them finite in "
                       f"{str(dtype).removeprefix('torch.')}; save or download the model again")


def read_tensors(file, use):
    """use(open file), for one tensor at a time: the file is opened anew each time, for a map left open counts as memory."""
    from safetensors import SafetensorError, safe_open

    try:
        if file.endswith(".bin"):
            return use(open_bin(file))
        with safe_open(file, framework="pt") as f:
            return use(f)
    except (OSError, SafetensorError) as e:
        raise BadInput(f"{file}: not a readable safetensors file ({e}); save or download it again") from e


class BinFile:
    """An old hub file of weights behind the face of safe_open. Its pickle is read by torch's weights-only loader: no code."""

    def __init__(self, file):
        try:
            try:
                tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError:  # older still, from before torch 1.6: no map of it can be made
                tensors = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as e:  # the unpickler raises whatever a damaged or hostile file makes of it
            raise BadInput(f"{file}: not a file of mere weights ({first_line(e)[:120]}); get the model as safetensors") from e
        if not isinstance(tensors, dict) or not all(isinstance(t, torch.Tensor) for t in tensors.values()):
            raise BadInput(f"{file}: not a dict of tensors; get the model as safetensors")
        self.keys, self.get_tensor = tensors.keys, tensors.__getitem__

    def get_slice(self, name):
        t = self.get_tensor(name)
        return SimpleNamespace(get_shape=lambda: t.shape, get_dtype=lambda: t.dtype)


open_bin = functools.lru_cache(maxsize=1)(BinFile)  # one at a time, for those that cannot be mapped; forgotten after loading


def adapter_tensors(model):
    """An Adapted's {peft's name: [(our parameter, which part of the tensor on disk it is, or None)]}."""
    tensors = {}
    for i, adapters in enumerate(model.layers or ()):
        for name, a in adapters.items():
            disk_name, part = hf_name(model.config.family, f"layers.{i}.{name}.weight")
            prefix = f"base_model.model.{disk_name.removesuffix('.weight')}"
            tensors[f"{prefix}.lora_A.weight"] = [(a.A, None)]
            tensors.setdefault(f"{prefix}.lora_B.weight", []).append((a.B, part))
    if model.head == "scalar":
        tensors["base_model.model.score.weight"] = [(model.score.weight, None)]
    return tensors


def save_adapter(model, folder, base=""):
    """Write adapter_config.json and adapter_model.safetensors, for peft and load_adapter; base: path of the model adapted."""
    from safetensors.torch import save_file

    os.makedirs(folder, exist_ok=True)
    tensors = adapter_tensors(model)
    modules = {".".join(name.split(".")[-4:-2]) for name in tensors if name.endswith(".lora_A.weight")}
    settings = dict(peft_type="LORA", task_type="CAUSAL_LM" if model.head == "lm" else "SEQ_CLS", inference_mode=True,
                    base_model_name_or_path=base, r=model.lora["rank"], lora_alpha=model.lora["alpha"], lora_dropout=0.0,
                    bias="none", target_modules=sorted(modules), fan_in_fan_out=model.config.family == "gpt2",
                    modules_to_save=["score"] if model.head == "scalar" else None)
    with open(os.path.join(folder, "adapter_config.json"), "w", encoding="utf-8") as f:
        json.dump(settings, f, indent=2)
    whole = {name: to_hf(model.config, "", {part: p.detach() for p, part in parts}).cpu().contiguous()
             for name, parts in tensors.items()}
    save_file(whole, os.path.join(folder, "adapter_model.safetensors"),
              metadata={"format": "pt", "score_shift": str(model.config.score_shift)})


def load_adapted(base, folder, head="lm", base_path=""):
    """
    An Adapted from the folder of an adapter, by save_adapter or peft, on the model it was trained on: base_path, as far as names
    tell. Raises BadInput.
    """
    file = os.path.join(folder, "adapter_config.json")
    if not os.path.isfile(file):
        raise BadInput(f"{folder}: no adapter_config.json in this folder; it is not a LoRA adapter")
    settings = read_json(file)
    check_fields(settings, ADAPTER_FIELDS, file)
    trained_on = settings.get("base_model_name_or_path")
    here = [path and (os.path.realpath(path) if all(map(os.path.isdir, (trained_on or "", base_path))) else
                      os.path.basename(path.rstrip("/"))) for path in (trained_on, base_path)]
    if all(here) and here[0] != here[1]:
        raise BadInput(f"{folder}: this adapter was trained on {trained_on}, not on {base_path}, where it would be noise")
    for key in ("use_rslora", "use_dora", "alpha_pattern", "rank_pattern"):
        if settings.get(key):
            raise BadInput(f"{file}: {key} = {settings[key]!r} is not supported; its scale would be another")
    modules = settings.get("target_modules") or []
    if not all(isinstance(m, str) and m for m in modules):
        raise BadInput(f"{file}: target_modules = {shorten(modules)}; wanted the names of linear maps")
    weights = os.path.join(folder, "adapter_model.safetensors")
    for name, (shape, _) in read_headers(weights).items():  # before an adapter of that rank is made
        if name.endswith("lora_A.weight") and shape[:1] != (settings.get("r"),):
            raise BadInput(f"{weights}: {name} is {shape}, but {file} says r = {settings.get('r')}")
    names = [n for n in ("q", "k", "v", "o", "gate", "up", "down") if hasattr(base.layers[0], n) and any(
        hf_name(base.config.family, f"layers.0.{n}.weight")[0].removesuffix(".weight").endswith(m) for m in modules)]
    model = Adapted(base, head, settings.get("r", 0) if names else 0, settings.get("lora_alpha"), ",".join(names) or "q,k,v")
    load_adapter(model, folder)
    return model


def load_adapter(model, folder):
    """Fill an Adapted from save_adapter's files or peft's. Raises BadInput if they do not fit."""
    file = os.path.join(folder, "adapter_model.safetensors")
    found, notes = read_tensors(file, lambda f: ({name: f.get_tensor(name) for name in f.keys()}, f.metadata() or {}))
    tensors, settings = adapter_tensors(model), read_json(os.path.join(folder, "adapter_config.json"))
    if tensors.keys() != found.keys():
        raise BadInput(f"{file}: it has {len(found)} tensors, not the {len(tensors)} of this model's adapter (the first that "
                       f"differs is {min(tensors.keys() ^ found.keys())}); its LoRA targets must be the same")
    if model.layers and settings.get("lora_alpha") != model.lora["alpha"]:
        raise BadInput(f"{folder}: its lora_alpha is {settings.get('lora_alpha')}, not {model.lora['alpha']}; give this one")
    for name, parts in tensors.items():
        for p, part in parts:
            check_dtype(str(found[name].dtype), file, name)
            check_numbers(found[name], p.dtype, file, name)
            t = from_hf(model.config, "", part, found[name])
            if t.shape != p.shape:
                raise BadInput(f"{file}: {name} is {tuple(t.shape)}, wanted {tuple(p.shape)}; is its rank the same?")
            fill(p, t)
    try:
        shift = {"score_shift": float(notes.get("score_shift", 0.0))}
    except ValueError:
        shift = notes
    check_fields(shift, {"score_shift": FINITE}, file)
    model.config.score_shift = shift["score_shift"]
    model.new_head = False

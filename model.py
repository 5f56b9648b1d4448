"""
One Transformer for six families of Hugging Face models: gpt2, gpt_neox (Pythia), llama, mistral, qwen2, qwen3. The head is
either a language model's (logits over the vocabulary) or one scalar a token (reward and value models).

    policy = from_pretrained("out/arithmetic_sft/policy")                          # engine/pretrained.py; logits (B, T, V)

There is no dropout anywhere, whatever config.json says: a policy must give the same token the same probability twice.
"""
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from errors import BadInput


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

    def weights(self):
        """{our name: parameter}, all that the model is made of."""
        return {name: p.detach() for name, p in self.named_parameters()}


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


def freeze(model):
    """Make a model immovable: no gradients, eval mode. Returns it."""
    return model.eval().requires_grad_(False)


def at_least_float32(x):
    """Half precision to float32: exp and log-softmax lose 0.07 nats in bfloat16. float64 stays."""
    return x.to(torch.promote_types(x.dtype, torch.float32))

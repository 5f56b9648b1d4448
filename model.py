"""
The architecture alone: one Transformer for eight families of Hugging Face models, gpt2, gpt_neox
(Pythia), llama, mistral, qwen2, qwen3, olmo2 and gemma3_text (Gemma 3 without images). It reads
like nanoGPT's model.py; each thing in which a family differs from GPT-2 is a field of ModelConfig.

    policy = from_pretrained("out/arithmetic_sft/policy")  # engine/pretrained.py
    logits = policy(tokens, attention_mask)  # (B, T) int64, (B, T) bool -> (B, T, V)

The head is a language model's (logits over the vocabulary), or one scalar a token, which is what
reward and value models have. There is no dropout anywhere, whatever config.json says: a policy must
give the same token the same probability twice.

In shapes: B rows, T new tokens, S columns in all (cached and new), V vocabulary, d the width of the
residual stream, H heads with hd coordinates each, KV heads of keys and values.
"""
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from errors import BadInput


@dataclass
class ModelConfig:
    """The architecture, in one vocabulary for all families (engine/hf_config.py makes it)."""

    family: str
    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int  # fewer than n_heads: several queries share a head of keys and values
    head_dim: int
    d_ff: int  # width of the MLP
    max_positions: int
    norm_eps: float
    activation: str
    tied: bool  # the LM head is the embedding matrix
    rms_norm: bool = True  # False: LayerNorm with bias
    norm_offset: bool = False  # Gemma: a norm multiplies by 1 + weight
    norm_before: bool = True  # attention and MLP read the normalised residual stream
    norm_after: bool = False  # OLMo 2, Gemma 3: what they write to it is normalised
    gated_mlp: bool = True  # False: up, activation, down
    parallel_residual: bool = False  # GPT-NeoX: attention and MLP read the same residual
    learned_positions: bool = False  # GPT-2: a table of positions instead of rotation
    rotary_dim: int = 0  # how many of head_dim's coordinates rotate
    rope: dict = None  # rope_type, rope_theta and what the type needs: see rope_frequencies
    local_rope: dict = None  # Gemma: the same of layers with a window; None: as in all others
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: str = ""  # RMSNorm on queries and keys; head: on each head's alone, width: on all
    attention_scale: float = None  # of queries times keys; None: head_dim ** -0.5
    embed_scale: float = None  # Gemma: the embeddings are multiplied by this
    windows: tuple = ()  # sliding attention window of each layer, 0 = sees everything
    score_shift: float = 0.0  # added to a reward model's scalar, see rm.py (N+ detail 15)
    hf: dict = None  # config.json as it was read, for saving


ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
}


class RMSNorm(nn.Module):
    def __init__(self, c, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps, self.offset = c.norm_eps, c.norm_offset

    def forward(self, x):
        weight = self.weight
        if self.offset:  # weights are near 0: in 16 bits, 1 + weight would lose most of them
            weight = 1.0 + at_least_float32(weight)
        # under autocast x may have 16 bits where the weight has 32, as queries and keys do
        return F.rms_norm(x.to(weight.dtype), (x.shape[-1],), weight, self.eps).to(x.dtype)


def make_norm(c, there=True):
    """A norm of the residual stream's width; where a family has none, it changes nothing."""
    if not there:
        return nn.Identity()
    return RMSNorm(c, c.d_model) if c.rms_norm else nn.LayerNorm(c.d_model, eps=c.norm_eps)


# --------------------------------------------------------------------------------------------------
# a layer


class Layer(nn.Module):
    """Attention, then MLP, each on the residual stream (or both at once, in GPT-NeoX)."""

    def __init__(self, c, index):
        super().__init__()
        self.c, self.index = c, index
        self.recomputed = False  # see Transformer.recompute
        self.norm1 = make_norm(c, c.norm_before)
        self.q = nn.Linear(c.d_model, c.n_heads * c.head_dim, bias=c.qkv_bias)
        self.k = nn.Linear(c.d_model, c.n_kv_heads * c.head_dim, bias=c.qkv_bias)
        self.v = nn.Linear(c.d_model, c.n_kv_heads * c.head_dim, bias=c.qkv_bias)
        self.o = nn.Linear(c.n_heads * c.head_dim, c.d_model, bias=c.o_bias)
        if c.qk_norm:
            q_heads, k_heads = (1, 1) if c.qk_norm == "head" else (c.n_heads, c.n_kv_heads)
            self.q_norm = RMSNorm(c, q_heads * c.head_dim)
            self.k_norm = RMSNorm(c, k_heads * c.head_dim)
        self.norm1_after = make_norm(c, c.norm_after)
        self.norm2 = make_norm(c, c.norm_before)
        if c.gated_mlp:
            self.gate = nn.Linear(c.d_model, c.d_ff, bias=c.mlp_bias)
        self.up = nn.Linear(c.d_model, c.d_ff, bias=c.mlp_bias)
        self.down = nn.Linear(c.d_ff, c.d_model, bias=c.mlp_bias)
        self.norm2_after = make_norm(c, c.norm_after)
        self.activation = ACTIVATIONS[c.activation]

    def forward(self, x, rotation, mask, cache, adapter=None):
        """x (B, T, d) -> (B, T, d). rotation, mask, cache: see attention. adapter: see linear."""
        if self.c.parallel_residual:
            y = x + self.attention(self.norm1(x), rotation, mask, cache, adapter)
            return y + self.mlp(self.norm2(x), adapter)
        x = x + self.norm1_after(self.attention(self.norm1(x), rotation, mask, cache, adapter))
        return x + self.norm2_after(self.mlp(self.norm2(x), adapter))

    def attention(self, x, rotation, mask, cache, adapter):
        """
        x (B, T, d) -> (B, T, d).

        rotation: (cos, sin) of Transformer.rotations; None where positions are learned.
        mask: what a token may look at, one of three things: see attention_masks.
        cache: a KVCache, which stores the new keys and values; or None.
        """
        B, T, _ = x.shape
        H, KV, hd = self.c.n_heads, self.c.n_kv_heads, self.c.head_dim
        q, k, v = (self.linear(name, x, adapter) for name in "qkv")  # (B, T, heads * hd)
        if self.c.qk_norm == "width":
            q, k = self.q_norm(q), self.k_norm(k)
        q = q.view(B, T, H, hd).transpose(1, 2)  # (B, H, T, hd)
        k = k.view(B, T, KV, hd).transpose(1, 2)  # (B, KV, T, hd)
        v = v.view(B, T, KV, hd).transpose(1, 2)  # (B, KV, T, hd)
        if self.c.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        if rotation is not None:
            q, k = rotate(q, *rotation), rotate(k, *rotation)
        if cache is not None:
            k, v = cache.write(self.index, k, v)  # (B, KV, S, hd)

        if T == 1 and B > 0:
            y = single_query_attention(q, k, v, mask, self.c.attention_scale)  # (B, H, 1, hd)
            return self.linear("o", y.transpose(1, 2).flatten(2), adapter)
        if KV != H:  # each head of keys and values serves H / KV heads of queries
            k = k.repeat_interleave(H // KV, dim=1)  # (B, H, S, hd)
            v = v.repeat_interleave(H // KV, dim=1)  # (B, H, S, hd)
        if B == 0:
            # a rank without rows runs the forward, too, where parameters are sharded, because all
            # ranks must gather each layer together; a fused kernel may refuse the empty batch
            y = (q @ k.mT).softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None,
                                               scale=self.c.attention_scale)
        return self.linear("o", y.transpose(1, 2).flatten(2), adapter)

    def mlp(self, x, adapter):
        """x (B, T, d) -> (B, T, d), by way of the width d_ff."""
        gate = self.linear("gate", x, adapter) if self.c.gated_mlp else None  # (B, T, d_ff)
        up = self.linear("up", x, adapter)  # (B, T, d_ff)
        if torch.is_grad_enabled() and not self.recomputed:
            # what `narrow` makes for `down` is the widest of all activations and the cheapest:
            # it is not kept, and the backward pass computes it again
            return checkpoint(self.narrow, gate, up, adapter, use_reentrant=False,
                              preserve_rng_state=False)
        return self.narrow(gate, up, adapter)

    def narrow(self, gate, up, adapter):
        """The activation, and the way back to the width d: (B, T, d_ff) -> (B, T, d)."""
        wide = self.activation(up) if gate is None else self.activation(gate) * up
        return self.linear("down", wide, adapter)

    def linear(self, name, x, adapter):
        """W x + b of this layer's linear map `name`; a LoRA adapter of the map adds scale B A x."""
        y = getattr(self, name)(x)
        if adapter is None or name not in adapter:
            return y
        return y + adapter[name](x).to(y.dtype)


def single_query_attention(q, k, v, mask, scale=None):
    """
    Attention of one query a row: q (B, H, 1, hd), k and v (B, KV, S, hd) -> (B, H, 1, hd).
    mask: (B, 1, 1, S), added to the scores; None: nothing is hidden. scale: of q times k; None:
    hd ** -0.5.

    H / KV heads of queries share a head of keys and values. Here they are its H / KV queries, as if
    they stood one behind the other: so the kernel reads each key once, and nothing is repeated.
    """
    B, H, _, hd = q.shape
    q = q.reshape(B, k.shape[1], H // k.shape[1], hd)  # (B, KV, H / KV, hd)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return y.reshape(B, H, 1, hd)


# --------------------------------------------------------------------------------------------------
# rotary positions


def rope_frequencies(rope, rotary_dim):
    """
    Radians per position, (rotary_dim / 2,) fp32 (RoFormer, arXiv 2104.09864, section 3.2.2). rope:
    ModelConfig's rope or local_rope.
    """
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    f = 1.0 / rope["rope_theta"] ** exponents
    if rope["rope_type"] == "linear":
        f = f / rope["factor"]
    if rope["rope_type"] == "llama3":
        # Llama 3.1: wavelengths beyond the original context are stretched by `factor`, short ones
        # are kept, and there is a ramp in between
        old = rope["original_max_position_embeddings"]
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        turns = old * f / (2 * math.pi)  # full turns within the original context
        keep = ((turns - low) / (high - low)).clamp(0, 1)  # 1 = keep, 0 = stretch
        f = keep * f + (1 - keep) * f / rope["factor"]
    return f


def rotate(x, cos, sin):
    """
    Rotary embedding of the first n = cos.shape[-1] coordinates of x (B, H, T, hd), whose pairs are
    (i, i + n / 2): (a, b) -> (a cos - b sin, b cos + a sin). The argument sin has the signs in it
    already: it is (-sin, sin).
    """
    n = cos.shape[-1]
    if n < x.shape[-1]:
        return torch.cat([rotate(x[..., :n], cos, sin), x[..., n:]], dim=-1)
    return torch.addcmul(x * cos, x.roll(n // 2, dims=-1), sin)


# --------------------------------------------------------------------------------------------------
# the model


class Transformer(nn.Module):
    def __init__(self, config, head="lm"):
        """Parameters without values; engine/pretrained.py fills them. head: lm or scalar."""
        super().__init__()
        if head not in ("lm", "scalar"):
            raise BadInput(f"head = {head!r}; one of lm, scalar")
        c = config
        self.config, self.head = c, head
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        if c.learned_positions:
            self.positions = nn.Embedding(c.max_positions, c.d_model)
        self.layers = nn.ModuleList(Layer(c, i) for i in range(c.n_layers))
        self.norm = make_norm(c)
        if head == "scalar":
            self.score = nn.Linear(c.d_model, 1, bias=False)
        elif not c.tied:
            self.lm_head = nn.Linear(c.d_model, c.vocab_size, bias=False)
        self.new_head = False  # True when the scalar head was not on disk but freshly drawn
        # (device, whether local_rope's) -> rope_frequencies; not a buffer, because .bfloat16() would
        # round a buffer
        self.frequencies = {}

    def forward(self, *args, **kwargs):
        """trunk's arguments -> logits (B, T, V), or scalars (B, T) with the scalar head."""
        return self.output(self.trunk(*args, **kwargs))

    def trunk(self, tokens, attention_mask=None, response_length=None, cache=None, positions=None,
              adapter=None):
        """
        tokens (B, T) int64, attention_mask (B, T) bool -> the last layer's states, normalised,
        (B, T, d): what the head reads. The mask is True on real tokens, and padding may be on
        either side; None: all tokens are real.

        response_length: R gives only R positions, P-1 ... T-2 with P = T - R: the states that
        choose the last R tokens, and whose value is the value before each. This is the one place
        where logits and labels are shifted against each other.
        cache: a KVCache. The tokens are prompts, if its `take` has said so; otherwise one more
        token of each of its rows, and it knows their positions.
        positions (B, T): where tokens stand in their own sequence; None: count by attention_mask.
        adapter: the LoRA adapters of the layers, see engine/adapters.py.
        """
        B, T = tokens.shape
        step = cache is not None and cache.begin_forward()  # of decoding
        if step:
            positions = cache.lengths[:, None]  # (B, 1)
        elif positions is None and attention_mask is None:
            positions = torch.arange(T, device=tokens.device)[None]  # (1, T)
        elif positions is None:
            # a token's position is the number of real tokens before it, wherever the padding is
            positions = (attention_mask.long().cumsum(1) - 1).clamp(min=0)  # (B, T)

        x = look_up(self.embed, tokens)  # (B, T, d)
        if self.config.embed_scale:
            x = x * self.config.embed_scale
        if self.config.learned_positions:
            x = x + look_up(self.positions, positions)
        dtype = autocast_dtype(x) or x.dtype  # of the attention
        if step:
            rotations = cache.rotations(self, x.dtype)
            masks = cache.masks(self.config.windows, dtype)
        else:
            rotations = self.rotations(positions, x.dtype)
            masks = attention_masks(self.config.windows, T, attention_mask, dtype, tokens.device)

        for i, layer in enumerate(self.layers):
            window = self.config.windows[i]
            arguments = x, rotations[window], masks[window], cache, adapter[i] if adapter else None
            if layer.recomputed and torch.is_grad_enabled():
                x = checkpoint(layer, *arguments, use_reentrant=False, preserve_rng_state=False)
            else:
                x = layer(*arguments)
        if cache is not None:
            cache.end_forward()
        if response_length is not None:
            # the state that chose token t is one column to its left
            x = x[:, -response_length - 1:-1]  # (B, R, d)
        return self.norm(x)

    def output(self, x):
        """The head, on the trunk's states (..., d) -> logits (..., V), or scalars (...)."""
        if self.head == "scalar":
            return scalar_output(self.score, x)
        return F.linear(x, self.lm_head_weight())

    def lm_head_weight(self):
        """(V, d)."""
        return self.embed.weight if self.config.tied else self.lm_head.weight

    def rotations(self, positions, dtype):
        """
        positions (B or 1, T) -> {window: (cos, sin) of its layers, for `rotate`}, of shape (B or 1,
        1, T, rotary_dim) each; {window: None} where positions are learned.
        """
        c = self.config
        if c.learned_positions:
            return dict.fromkeys(c.windows)
        rotations = dict.fromkeys(c.windows, self.rotation(positions, dtype, local=False))
        if c.local_rope:
            local = self.rotation(positions, dtype, local=True)
            rotations |= {window: local for window in c.windows if window}
        return rotations

    def rotation(self, positions, dtype, local):
        """positions (B or 1, T) -> (cos, sin), (B or 1, 1, T, rotary_dim) each."""
        c, key = self.config, (positions.device, local)
        if key not in self.frequencies:
            f = rope_frequencies(c.local_rope if local else c.rope, c.rotary_dim)
            self.frequencies[key] = f.to(positions.device)
        # (B or 1, 1, T, 1) * (rotary_dim / 2,)
        angles = positions[:, None, :, None].float() * self.frequencies[key]
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)

    def recompute(self, on=True):
        """
        Gradient checkpointing: keep only each layer's input for the backward pass, which computes
        the layer again. A step takes a third longer, and far less memory.
        """
        for layer in self.layers:
            layer.recomputed = on

    def weights(self):
        """{our name: parameter}, all that the model is made of."""
        return {name: p.detach() for name, p in self.named_parameters()}


def scalar_output(score, x):
    """The scalar head, on states (..., d) -> (...)."""
    # the head of an Adapted is in fp32 even on a 16-bit trunk; clone: FSDP would warn of a view
    return score(x.to(score.weight.dtype)).squeeze(-1).clone()


def freeze(model):
    """Make a model immovable: no gradients, eval mode. Returns it."""
    return model.eval().requires_grad_(False)


# --------------------------------------------------------------------------------------------------
# masks


def attention_masks(windows, T, attention_mask, dtype, device):
    """
    {window: mask}, one mask for each kind of layer: in a layer of window w a token sees the last w
    tokens, with w = 0 all. A mask is one of two things:

    None                     plain causal attention: neither padding nor a window hides anything
                             more. It is the fastest.
    dtype (B or 1, 1, T, T)  numbers that are added to the attention's scores, 0 where a token may
                             look, -inf elsewhere. (Of a bool mask, every layer would make these
                             numbers anew, and keep them for its backward pass.)
    """
    if attention_mask is not None:
        real_behind_padding = attention_mask[:, 1:] & ~attention_mask[:, :-1]  # (B, T - 1)
        if not real_behind_padding.any():
            attention_mask = None  # padding on the right only: causal attention never looks there
    masks = {}
    for window in set(windows):
        mask = allowed_pairs(T, window, attention_mask, device)
        if mask is not None:
            zeros = torch.zeros(mask.shape, dtype=dtype, device=device)
            mask = zeros.masked_fill_(~mask, -torch.inf)
        masks[window] = mask
    return masks


def allowed_pairs(T, window, attention_mask, device):
    """
    Which of T keys each of T queries may see: bool (B or 1, 1, T, T), or None for plain causal
    attention.
    """
    if attention_mask is None and not window:
        return None
    query = torch.arange(T, device=device)[:, None]
    key = torch.arange(T, device=device)
    allowed = (key <= query)[None, None]  # (1, 1, T, T)
    if window:
        allowed = allowed & (query - key < window)
    if attention_mask is not None:
        # padding sees itself: a softmax over nothing is NaN, and NaN * 0 is still NaN
        allowed = (allowed & attention_mask[:, None, None]) | (key == query)
    return allowed


# --------------------------------------------------------------------------------------------------
# precision


def look_up(table, ids):
    """
    Rows of an embedding: ids (B, T) -> (B, T, d). Autocast rounds every matrix that is multiplied
    to 16 bits, but not this table; look_up rounds its rows, too. A frozen model may then store the
    table in 16 bits and still compute exactly what the policy does. The sums stay in fp32.
    """
    x = table(ids)
    low = autocast_dtype(x)
    return x if low is None else x.to(low).float()


def autocast_dtype(x):
    """
    The dtype to which autocast rounds this tensor for a matrix product; None where autocast is off
    or leaves the tensor alone.
    """
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or x.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(kind)


def at_least_float32(x):
    """16 bits to float32: exp and log-softmax lose 0.07 nats in bfloat16. float64 stays."""
    return x.to(torch.promote_types(x.dtype, torch.float32))

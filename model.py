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
residual stream, H heads with hd coordinates each, KV heads of keys and values. Without a cache all
rows lie one behind the other, without padding: then B is 1 and T is N, see packing.py.
"""
import contextlib
import functools
import inspect
import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from errors import BadInput
from kernels import attention_is_wider, linear, narrow, rms_norm, weighted_sums
from packing import pack, pick, unpack

varlen_attn = None  # one kernel for documents of all lengths, where there is a GPU
if torch.backends.cuda.is_built():  # to import it takes two seconds, as long as torch itself
    with contextlib.suppress(ImportError):  # torch.nn.attention.varlen is new
        from torch.nn.attention.varlen import varlen_attn


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
    fp32_head: bool = False  # the key: an LM head in float32 also where the trunk is in 16 bits
    hf: dict = None  # config.json as it was read, for saving

    def stays_wide(self, name, head="lm"):
        """
        Whether a parameter keeps its 32 bits where other matrices are stored in 16: a scalar head,
        and with fp32_head the matrix of the LM head.
        """
        matrix = "embed.weight" if self.tied else "lm_head.weight"
        return name == "score.weight" or self.fp32_head and head == "lm" and name == matrix


class RMSNorm(nn.Module):
    def __init__(self, c, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps, self.offset = c.norm_eps, c.norm_offset

    def forward(self, x):
        weight = self.weight
        if self.offset:  # weights are near 0: 1 + weight in 16 bits would lose most of their digits
            weight = 1.0 + at_least_float32(weight)
        return rms_norm(x, weight, self.eps)


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
        self.joined = nn.ModuleDict()  # see join
        self.recomputed = False  # see Transformer.recompute
        self.compiled = False  # see Transformer.compile_layers
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

    def forward(self, x, rotation, seen, cache, adapter=None):
        """
        x (B, T, d) -> (B, T, d).

        rotation: (cos, sin) of Transformer.rotations; None where positions are learned.
        seen: what a token may look at: Documents, or in a step of decoding the cache's mask.
        cache: a KVCache, which stores the new keys and values; or None.
        adapter: see linear.
        """
        # decoding always takes the plain ones: it has shapes of its own, and CUDA graphs; and of
        # no tokens at all there is nothing to compile
        use_compiled = self.compiled and cache is None and x.numel() > 0
        before, after = compiled_parts() if use_compiled else PARTS
        q, k, v = before(self, x, rotation, adapter)  # (B, T, heads, hd) each
        if cache is not None:
            cache.write(self.index, k, v)
        if isinstance(seen, Documents):  # the rows are one: B = 1, T = N
            y = document_attention(q[0], k[0], v[0], seen, self.c.attention_scale)  # (N, H, hd)
        else:  # a step of decoding: T = 1
            y = step_attention(q[:, 0], *cache.read(self.index), seen, self.c.attention_scale)
        y = y.view(*x.shape[:2], self.o.in_features)
        if use_compiled:  # a view is compiled anew for each kind of tensor that it is a view of
            y = torch.ops.aten._unsafe_view(y, y.shape)  # the same memory, and no view
        return after(self, x, y, adapter)

    def before_attention(self, x, rotation, adapter):
        """x (B, T, d) -> queries (B, T, H, hd), keys and values (B, T, KV, hd)."""
        H, KV, hd = self.c.n_heads, self.c.n_kv_heads, self.c.head_dim
        x = self.norm1(x)
        q, k, v = self.linears(["q", "k", "v"], x, adapter)  # (B, T, heads * hd) each
        if self.c.qk_norm == "width":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = q.unflatten(2, (H, hd)), k.unflatten(2, (KV, hd)), v.unflatten(2, (KV, hd))
        if self.c.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        if rotation is not None:
            q, k = rotate(q, *rotation), rotate(k, *rotation)
        return q, k, v

    def after_attention(self, x, y, adapter):
        """The residual stream x (B, T, d) and what attention says, y (B, T, H hd) -> (B, T, d)."""
        y = x + self.norm1_after(self.linear("o", y, adapter))
        if self.c.parallel_residual:
            return y + self.mlp(self.norm2(x), adapter)
        return y + self.norm2_after(self.mlp(self.norm2(y), adapter))

    def mlp(self, x, adapter):
        """x (B, T, d) -> (B, T, d), by way of the width d_ff."""
        names = ["gate", "up"] if self.c.gated_mlp else ["up"]
        *gate, up = self.linears(names, x, adapter)  # (B, T, d_ff) each
        gate = gate[0] if gate else None
        lora = None if adapter is None or "down" not in adapter else adapter["down"]
        y, z = narrow(self.c.activation, gate, up, self.down.weight, self.down.bias,
                      None if lora is None else lora.A)  # (B, T, d), (B, T, rank)
        return y if lora is None else y + lora.widen(z).to(y.dtype)

    def linear(self, name, x, adapter):
        """W x + b of this layer's linear map `name`, with its adapter."""
        W = getattr(self, name)
        return adapted(linear(x, W.weight, W.bias), name, x, adapter)

    def linears(self, names, x, adapter):
        """The maps of these names, all of the same x: [W x + b, ...], as linear gives them."""
        if "+".join(names) not in self.joined:
            x = x.to(autocast_dtype(x) or x.dtype)  # once; autocast would do it for each map
            return [self.linear(name, x, adapter) for name in names]
        W = self.joined["+".join(names)]
        ys = linear(x, W.weight, W.bias).split(W.sizes, -1)
        return [adapted(y, name, x, adapter) for name, y in zip(names, ys, strict=True)]

    def join(self, pack):
        """
        For a model that only decodes: make one matrix of the maps that read the same x, since a few
        large products take less time than many small ones. All matrices become pack(matrix).
        """
        for names in (["q", "k", "v"], ["gate", "up"] if self.c.gated_mlp else ["up"]):
            maps = [getattr(self, name) for name in names]
            W = self.joined["+".join(names)] = nn.Module()
            W.sizes = [m.out_features for m in maps]
            W.weight = frozen(pack(torch.cat([m.weight for m in maps])))
            W.bias = None if maps[0].bias is None else frozen(torch.cat([m.bias for m in maps]))
            for name in names:
                delattr(self, name)
        for m in (self.o, self.down):
            m.weight = frozen(pack(m.weight))


def adapted(y, name, x, adapter):
    """y = W x + b of a linear map `name`, and what a LoRA adapter of it adds: scale B A x."""
    if adapter is None or name not in adapter:
        return y
    return y + adapter[name](x).to(y.dtype)


def frozen(t):
    """A tensor as a parameter without a gradient."""
    return nn.Parameter(t, requires_grad=False)


PARTS = Layer.before_attention, Layer.after_attention  # all of a layer but its attention


@functools.cache
def compiled_parts():
    """
    PARTS, compiled by torch.compile: it makes fewer and larger kernels of the same operations, and
    rounds differently. The layers of all models share the two. Each is compiled at its first call
    of a kind: with and without gradients, with and without an adapter, in each size of model.

    dynamic: the number of tokens is a variable of the compiled code. Otherwise each new number of
    tokens would be compiled anew. duck_shape is off because torch would take two dimensions that
    are equal at the first call, such as tokens and width, for the same variable.
    """
    torch._dynamo.config.recompile_limit = 64  # kinds; 8 would do for most runs, but not for all
    torch.fx.experimental._config.use_duck_shape = False
    return tuple(torch.compile(part, dynamic=True) for part in PARTS)


# --------------------------------------------------------------------------------------------------
# attention


class Documents(NamedTuple):
    """What a token sees in a packed row: of its own document the tokens up to itself."""

    lengths: list  # D numbers: the tokens of each document
    ends: torch.Tensor  # (D + 1,) int32: 0, and where each document ends; None on a CPU
    pieces: object  # packing.Pieces: what documents share; None: nothing
    window: int  # it sees only the last so many of them; 0: all
    masks: dict  # {length: mask (length, length)} of the documents that are longer than the window


def documents_seen(windows, packed, dtype):
    """{window: Documents}, one for each kind of layer. packed: a Packed; dtype: of the masks."""
    seen = {}
    for window in set(windows):
        longer = {L for L in packed.lengths if L > window > 0}
        masks = {L: window_mask(L, window, dtype, packed.tokens.device) for L in longer}
        seen[window] = Documents(packed.lengths, packed.ends, packed.pieces, window, masks)
    return seen


def window_mask(L, window, dtype, device):
    """
    (L, L), added to the scores of a document of L tokens: 0 where a token may look, which is at the
    last `window` tokens up to itself, and -inf elsewhere. (Of a bool mask every layer would make
    these numbers anew, and keep them for its backward pass.)
    """
    query, key = torch.arange(L, device=device)[:, None], torch.arange(L, device=device)
    hidden = (key > query) | (key <= query - window)
    return torch.zeros(L, L, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)


def document_attention(q, k, v, documents, scale=None):
    """
    Causal attention within each document: q (N, H, hd), k and v (N, KV, hd) -> (N, H, hd). scale:
    of q times k; None: hd ** -0.5.

    In 16 bits a GPU does all documents at once. Elsewhere neighbours of one length are a batch;
    micro-batches are sorted by length, so that there are few batches. Tokens that documents share
    are repeated for the attention alone: M tokens become N again at its end.
    """
    if documents.pieces:
        q, k, v = (documents.pieces.repeat(x) for x in (q, k, v))
        y = document_attention(q, k, v, documents._replace(pieces=None), scale)
        return documents.pieces.once(y)
    N, _, hd = q.shape
    if N == 0:
        # a rank without rows runs the forward, too, where parameters are sharded, because all
        # ranks must gather each layer together; a fused kernel may refuse what is empty
        k, v = repeat_heads(k, v, q.shape[1], 1)
        return (q @ k.mT).softmax(-1) @ v
    if one_kernel_for_all(q):
        low = autocast_dtype(q) or q.dtype
        longest = max(documents.lengths)
        return varlen_attn(q.to(low), k.to(low), v.to(low), documents.ends, documents.ends, longest,
                           longest, scale=scale, window_size=(documents.window - 1, 0),
                           enable_gqa=k.shape[1] != q.shape[1])
    runs = [(L, len(list(same))) for L, same in itertools.groupby(documents.lengths)]
    tokens = [L * count for L, count in runs]  # of each run
    outputs = []
    for (L, count), *run in zip(runs, *(x.split(tokens) for x in (q, k, v)), strict=True):
        batch = (x.view(count, L, -1, hd).transpose(1, 2) for x in run)  # (count, heads, L, hd)
        y = fused_attention(*batch, documents.masks.get(L), scale)  # (count, H, L, hd)
        outputs.append(y.transpose(1, 2).flatten(0, 1))  # (count * L, H, hd)
    return torch.cat(outputs) if len(outputs) > 1 else outputs[0]


def one_kernel_for_all(q):
    """Whether varlen_attn can do it: in 16 bits, on a GPU that has FlashAttention, q (N, H, hd)."""
    if not q.is_cuda or varlen_attn is None or q.shape[-1] % 8 or q.shape[-1] > 256:
        return False
    short = (autocast_dtype(q) or q.dtype) in (torch.bfloat16, torch.float16)
    # torch 2.10's has neither windows nor shared heads of keys
    complete = {"window_size", "enable_gqa"} <= inspect.signature(varlen_attn).parameters.keys()
    return short and complete and torch.cuda.get_device_capability(q.device) >= (8, 0)


def fused_attention(q, k, v, mask, scale=None):
    """
    Attention of several queries a row: q (B, H, T, hd), k and v (B, KV, S, hd) -> (B, H, T, hd).
    mask: what is added to the scores, (T, S) or (B or 1, 1, T, S); None: plain causal attention.
    """
    shared = k.shape[1] != q.shape[1]  # each head of keys and values serves several of queries
    if shared and q.is_cuda:  # a CPU's kernel shares the heads itself; not all of a GPU's do
        k, v = repeat_heads(k, v, q.shape[1], 1)  # (B, H, S, hd)
        shared = False
    attention = functools.partial(F.scaled_dot_product_attention, is_causal=mask is None,
                                  scale=scale, enable_gqa=shared)
    dtype = autocast_dtype(q) or q.dtype
    if not attention_is_wider(dtype, q.device):
        return attention(q, k, v, attn_mask=mask)
    with torch.autocast(q.device.type, enabled=False):
        q, k, v, mask = (None if x is None else x.float() for x in (q, k, v, mask))
        return attention(q, k, v, attn_mask=mask).to(dtype)


def repeat_heads(k, v, H, dim):
    """Keys and values with KV heads, repeated so that they have H; dim is that of the heads."""
    return (x.repeat_interleave(H // x.shape[dim], dim=dim) for x in (k, v))


def step_attention(q, k, v, mask, scale=None):
    """
    Attention of each row's one new token: q (n, H, hd), k and v (n, KV, S, hd) -> (n, H, hd).
    mask: (n, 1, 1, S), added to the scores. scale: of q times k; None: hd ** -0.5.

    H / KV heads of queries share a head of keys and values. The kernel sees them as H / KV queries
    of that head: so it reads each key once, and none is repeated.
    """
    n, H, hd = q.shape
    q = q.view(n, k.shape[1], H // k.shape[1], hd)  # (n, KV, H / KV, hd)
    if q.device.type != "cpu":
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).view(n, H, hd)
    # a CPU's kernel is made for many queries; for one, this takes less time
    q = q * (hd ** -0.5 if scale is None else scale)
    shares = (q @ k.mT).add_(mask).softmax(-1)  # (n, KV, H / KV, S)
    return weighted_sums(shares, v).view(n, H, hd)


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
    Rotary embedding of the first n = cos.shape[-1] coordinates of x (B, T, H, hd), whose pairs are
    (i, i + n / 2): (a, b) -> (a cos - b sin, b cos + a sin). The argument sin has the signs in it
    already: it is (-sin, sin).
    """
    n = cos.shape[-1]
    if n < x.shape[-1]:
        return torch.cat([rotate(x[..., :n], cos, sin), x[..., n:]], dim=-1)
    x = x.to(cos.dtype)  # under autocast 16 bits to 32
    return x.roll(n // 2, dims=-1).mul_(sin).addcmul_(x, cos)


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
        self.shared_trunk = False  # True: a value model stands on this policy, see loss.py
        # (device, whether local_rope's) -> rope_frequencies; not a buffer, because .bfloat16()
        # would round a buffer
        self.frequencies = {}

    def forward(self, *args, **kwargs):
        """trunk's arguments -> logits (B, T, V), or scalars (B, T) with the scalar head."""
        return self.output(self.trunk(*args, **kwargs))

    def trunk(self, tokens, attention_mask=None, cache=None, adapter=None, packed=None):
        """
        tokens (B, T) int64, attention_mask (B, T) bool -> the last layer's states, normalised,
        (B, T, d): what the head reads. The mask is True on real tokens, and padding may be
        anywhere; None: all tokens are real. At padding the states are 0.

        packed: a Packed, with tokens = packed.tokens; then only the states that it wants come
        back, (1, n, d). (Without a cache and without this, the rows are packed here.)
        cache: a KVCache, which stores keys and values. With `packed` these are prompts, as its
        `take` has said. Without, it is a step, as its `begin_step` has said: tokens (n, 1) are the
        next ones of its rows, and look at all that it has stored of them.
        adapter: the LoRA adapters of the layers, see engine/adapters.py.
        """
        shape = tokens.shape
        was_padded = packed is None and cache is None
        if was_padded:
            packed = pack(tokens, attention_mask)
        if cache is not None:
            cache.aim()
        if packed is not None:
            tokens, positions = packed.tokens, packed.positions
        else:
            positions = cache.at[:, None]  # (n, 1)

        x = look_up(self.embed, tokens)  # (B, T, d)
        if self.config.embed_scale:
            x = x * self.config.embed_scale
        if self.config.learned_positions:
            x = x + look_up(self.positions, positions)
        dtype = autocast_dtype(x) or x.dtype  # of the attention
        windows = self.config.windows
        if packed is not None:
            rotations = self.rotations(positions, x.dtype)
            seen = documents_seen(windows, packed, dtype)
        else:
            rotations = cache.rotations(self, x.dtype)
            seen = cache.masks(windows, dtype)

        for i, layer in enumerate(self.layers):
            window = windows[i]
            arguments = x, rotations[window], seen[window], cache, adapter[i] if adapter else None
            if layer.recomputed and torch.is_grad_enabled():
                x = checkpoint(layer, *arguments, use_reentrant=False, preserve_rng_state=False)
            else:
                x = layer(*arguments)
        if packed is not None:
            x = pick(x, packed.wanted)  # (1, n, d)
        x = self.norm(x)
        return unpack(x[0], packed.cells, shape) if was_padded else x

    def output(self, x):
        """The head, on the trunk's states (..., d) -> logits (..., V), or scalars (...)."""
        if self.head == "scalar":
            return scalar_output(self.score, x)
        return lm_output(self, x)

    def lm_head_weight(self):
        """(V, d)."""
        return self.embed.weight if self.config.tied else self.lm_head.weight

    def rotations(self, positions, dtype):
        """
        positions (B or 1, T) -> {window: (cos, sin) of its layers, for `rotate`}, of shape (B or 1,
        T, 1, rotary_dim) each; {window: None} where positions are learned.
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
        """positions (B or 1, T) -> (cos, sin), (B or 1, T, 1, rotary_dim) each."""
        c, key = self.config, (positions.device, local)
        if key not in self.frequencies:
            f = rope_frequencies(c.local_rope if local else c.rope, c.rotary_dim)
            self.frequencies[key] = f.to(positions.device)
        # (B or 1, T, 1, 1) * (rotary_dim / 2,)
        angles = positions[:, :, None, None].float() * self.frequencies[key]
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)

    def recompute(self, on=True):
        """
        Gradient checkpointing: keep only each layer's input for the backward pass, which computes
        the layer again. A step takes a third longer, and far less memory.
        """
        for layer in self.layers:
            layer.recomputed = on

    def compile_layers(self, on=True):
        """Forwards without a cache use compiled_parts."""
        for layer in self.layers:
            layer.compiled = on

    def weights(self):
        """{our name: parameter}, all that the model is made of."""
        return {name: p.detach() for name, p in self.named_parameters()}


def lm_output(model, x):
    """The LM head of a Transformer or an Adapted, on states (..., d) -> logits (..., V)."""
    with head_precision(model, x):
        return linear(*head_operands(model, x))


def head_precision(model, x):
    """The context in which an LM head reads states x: with fp32_head autocast is off there."""
    if model.config.fp32_head:
        return torch.autocast(x.device.type, enabled=False)
    return contextlib.nullcontext()


def head_operands(model, x):
    """States (..., d) and the head's matrix (V, d), in at least float32 with fp32_head."""
    operands = x, model.lm_head_weight()
    return tuple(map(at_least_float32, operands)) if model.config.fp32_head else operands


def scalar_output(score, x):
    """
    The scalar head, on states (..., d) -> (...) in at least float32, also under autocast. bfloat16
    has 8 significant bits: scores around 5 would be multiples of 1/32, and many would be equal.
    """
    with torch.autocast(x.device.type, enabled=False):
        x, weight = at_least_float32(x), at_least_float32(score.weight)
        # clone: FSDP would warn of a view
        return F.linear(x.to(weight.dtype), weight).squeeze(-1).clone()


def freeze(model):
    """Make a model immovable: no gradients, eval mode. Returns it."""
    return model.eval().requires_grad_(False)


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

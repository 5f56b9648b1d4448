"""
How much memory one model takes in each phase of a run: formulas. engine/planner.py adds them up to
what a run takes; tools/memory.py prints that as a table.

Each function is one formula, and its docstring writes the formula out. Sizes are those of the
tensors, in bytes, as torch's MemTracker counts them. A GPU needs somewhat more: its context, the
workspaces of its libraries and the gaps between tensors.

    m    one Model                                     d    width, d_model
    run  the sizes of the run, planner.sizes_of        q    attention heads x head size
    b    rows of a micro-batch                         kv   key-value heads x head size
    n    rows that decode at once                      ff   width of the MLP
    P    prompt length, R response length              L    layers
    T    P + R                                         V    vocabulary
    N    tokens of a micro-batch, see tokens_of        B    responses of an iteration, all ranks
    M    the same, where a prompt counts once for each response, b (T - 1)

Bytes of an element: e of a stored weight, a of the result of a matrix product, s of the residual
stream (run.stream), f of the logits when the losses see them. In float32 all four are 4. Under
autocast to 16 bits e, s and f are 4 (e of a frozen matrix is 2), and a is 2.
"""
import math
from dataclasses import dataclass

import torch

from kernels import attention_is_wider, packing_pays

ROWS = ("parameters", "gradients", "optimizer", "activations", "logits", "KV cache", "buffers")
LINEAR = ("q", "k", "v", "o", "gate", "up", "down")


@dataclass
class Model:
    """One of the models of a run, and how a rank holds it."""

    c: object  # its ModelConfig
    head: str  # lm | scalar
    trained: bool
    e: int  # bytes of an element of its matrices
    wide: int  # the same of norms and biases, which a frozen 16-bit model keeps in 32 bits
    # model: a Transformer of its own. adapted: one of its own, frozen, and an adapter on it that is
    # trained. adapter: an adapter and a head on another model. head: a head on another model
    own: str = "model"
    rank: int = 0  # of its LoRA adapter, 0 = none
    targets: tuple = LINEAR  # the matrices that its adapter changes
    optimizer: str = "adamw"  # adamw | adafactor
    stage: int = 0  # ZeRO, 0 to 3
    offload: str = "none"  # none | optimizer | params
    ema: bool = False  # whether there is a moving average of it
    world: int = 1  # ranks


# --------------------------------------------------------------------------------------------------
# the tensors of a model


def layer_shapes(c):
    """A layer's tensors, {name: shape}: matrices (out, in), biases and norms."""
    d, q, kv = c.d_model, c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    shapes = dict(q=(q, d), k=(kv, d), v=(kv, d), o=(d, q), up=(c.d_ff, d), down=(d, c.d_ff))
    if c.gated_mlp:
        shapes["gate"] = (c.d_ff, d)
    biased = dict(q=c.qkv_bias, k=c.qkv_bias, v=c.qkv_bias, o=c.o_bias,
                  gate=c.mlp_bias, up=c.mlp_bias, down=c.mlp_bias)
    shapes |= {f"{name}.bias": shape[:1] for name, shape in shapes.items() if biased[name]}
    if c.norm_before:
        shapes |= dict(norm1=(d,), norm2=(d,))
    if c.norm_after:
        shapes |= dict(norm1_after=(d,), norm2_after=(d,))
    if not c.rms_norm:
        shapes |= {"norm1.bias": (d,), "norm2.bias": (d,)}
    if c.qk_norm == "head":
        shapes |= dict(q_norm=(c.head_dim,), k_norm=(c.head_dim,))
    if c.qk_norm == "width":
        shapes |= dict(q_norm=(q,), k_norm=(kv,))
    return shapes


def root_shapes(c, head):
    """The other tensors: embedding (V, d), positions, last norm, head (V, d) or (1, d)."""
    shapes = dict(embed=(c.vocab_size, c.d_model), norm=(c.d_model,))
    if c.learned_positions:
        shapes["positions"] = (c.max_positions, c.d_model)
    if not c.rms_norm:
        shapes["norm.bias"] = (c.d_model,)
    if head == "scalar":
        shapes["score"] = (1, c.d_model)
    elif not c.tied:
        shapes["lm_head"] = (c.vocab_size, c.d_model)
    return shapes


def base_tensors(m):
    """[(shape, bytes of an element)] of the Transformer."""
    layers = list(layer_shapes(m.c).items()) * m.c.n_layers
    # norms and biases are not rounded, nor is a head that stays wide
    return [(shape, m.e if len(shape) > 1 and not m.c.stays_wide(f"{name}.weight", m.head)
             else m.wide) for name, shape in [*root_shapes(m.c, m.head).items(), *layers]]


def added_tensors(m):
    """
    [(shape, bytes of an element)] of what stands on a Transformer: for each target of each layer
    LoRA's A (r, in) and B (out, r), and a scalar head; at least 32 bits. Where q, k and v are one
    tensor on disk (gpt2, gpt_neox), they share A.
    """
    shapes, fused = layer_shapes(m.c), m.c.family in ("gpt2", "gpt_neox")
    names = [name for name in LINEAR if m.rank and name in m.targets and name in shapes]
    layer = [(m.rank, shapes[name][1]) for name in names if not (fused and name in ("k", "v"))]
    layer += [(shapes[name][0], m.rank) for name in names]
    head = [(1, m.c.d_model)] if m.head == "scalar" else []
    return [(shape, max(m.e, 4)) for shape in layer * m.c.n_layers + head]


def trained_tensors(m):
    """[(shape, bytes of an element)] of what the optimizer moves."""
    if not m.trained:
        return []
    return base_tensors(m) if m.own == "model" else added_tensors(m)


def has_trunk(m):
    """Whether the Transformer is this model's, not another one's."""
    return m.own in ("model", "adapted")


def sharded(m):
    """Whether a rank holds only its rows of each tensor: at stage 3; at 2 if all is trained."""
    return m.stage >= (2 if m.trained and m.own == "model" else 3)


def held(m, shape, added=False):
    """
    Numbers of a tensor that a rank holds: all; of a sharded model those of ceil(rows / ranks) rows.
    What is added to a Transformer, and a scalar head, is never sharded.
    """
    if added or not sharded(m) or shape == (1, m.c.d_model):
        return math.prod(shape)
    return -(-shape[0] // m.world) * math.prod(shape[1:])


# --------------------------------------------------------------------------------------------------
# what always lies in memory: weights, gradients, optimizer states; and the batch


def parameters(m):
    """Sum over tensors of elements x bytes: of its own Transformer, and of what is added to one."""
    base = sum(held(m, shape) * size for shape, size in base_tensors(m)) if has_trunk(m) else 0
    if m.own == "model":
        return base
    return base + sum(math.prod(shape) * size for shape, size in added_tensors(m))


def gradients(m):
    """Sum over trained tensors of elements x bytes; they lie in one flat buffer."""
    return sum(held(m, shape, m.own != "model") * size for shape, size in trained_tensors(m))


def states_of(m, shape, size):
    """
    AdamW: 2 x elements x bytes. Adafactor: of a matrix (rows + columns) x bytes, of a vector all.
    Each has a step count of 4 bytes.
    """
    if m.optimizer == "adafactor":
        return 4 + size * (math.prod(shape) if len(shape) < 2 else shape[0] + shape[1])
    return 4 + 2 * size * held(m, shape, m.own != "model")


def optimizer_states(m):
    """
    [bytes on each rank]: the sum of states_of every trained tensor. At ZeRO stage 1 each rank has
    the states of some tensors: the largest tensor goes to the rank that has the least, and so on.
    """
    if m.stage != 1:
        return [sum(states_of(m, *tensor) for tensor in trained_tensors(m))] * m.world
    loads, states = [0] * m.world, [0] * m.world
    for shape, size in sorted(trained_tensors(m), key=lambda tensor: -math.prod(tensor[0])):
        rank = loads.index(min(loads))
        loads[rank] += math.prod(shape)
        states[rank] += states_of(m, shape, size)
    return states


def moving_average(m):
    """Trained elements x 4 bytes (8 in float64), if there is a moving average of the model."""
    if not m.ema:
        return 0
    return sum(held(m, shape, m.own != "model") * max(size, 4)
               for shape, size in trained_tensors(m))


def batch_tensors(run):
    """
    B (9 T + 45 R): the scored responses of all ranks, which every rank holds. Where top_k, top_p or
    min_p truncate what is sampled, B R V / 8 more: which tokens could be.
    """
    return run.batch_size * (9 * run.T + 45 * run.R + run.set_bytes * run.R)


# --------------------------------------------------------------------------------------------------
# a forward pass without gradients, and the rollout


def tokens_of(run, rows):
    """
    (N, M) of so many responses: N = prompts (P - 1) + rows R, since a prompt is read once for the
    run.sharing responses to it that come together; and M = rows (P - 1 + R).
    """
    prompts = -(-rows // run.sharing)
    return prompts * (run.P - 1) + rows * run.R, rows * (run.P - 1 + run.R)


def mask_bytes(m, run, rows, width):
    """
    rows width^2 a: the masks of layers with a sliding window, of documents that are longer than it,
    each of another length. A GPU in 16 bits needs none.
    """
    if run.cuda and run.a == 2 or not any(0 < window < width for window in m.c.windows):
        return 0
    return rows * width * width * run.a


def heads_kept(m, run, N, M, rows):
    """
    Attention's queries, keys and values, M (q + 2 kv) a, and its result, M q a. A GPU that is not
    in 16 bits repeats keys and values for all heads: M 4 q a. Where the result is put together, of
    documents of several lengths or with shared prompts, there is one more of it, N q a.

    Where attention is_wider than 16 bits all of them have 4 bytes, and the result is rounded to one
    more, N q a.
    """
    q, kv = m.c.n_heads * m.c.head_dim, m.c.n_kv_heads * m.c.head_dim
    if is_wider(run):
        return M * (2 * q + 2 * kv) * 4 + N * q * run.a
    repeated = run.cuda and run.a > 2
    kept = M * (4 * q if repeated else 2 * q + 2 * kv)
    several = M > N or rows > 1 and run.differ and not (run.cuda and run.a == 2)
    return (kept + N * q * several) * run.a


def is_wider(run):
    """Whether attention is computed in 32 bits where all else has 16: kernels.py."""
    return run.a == 2 and attention_is_wider(torch.bfloat16, "cuda" if run.cuda else "cpu")


def forward_only(m, run, rows, width):
    """
    The larger one of a layer's two halves, for rows of so many tokens:
        MLP        N (3 ff a + 3 d s), not gated N (2 ff a + 3 d s)
        attention  2 N d s + heads_kept, and masks; and with shared prompts queries, keys and
                   values before they are repeated, N (q + 2 kv) a, and one more result, M q a;
                   where it is_wider queries, keys and values in 16 bits, M (q + 2 kv) a
    and beside it the rotation of the positions, N rotary size (2 s + 6).
    """
    c = m.c
    N, M = tokens_of(run, rows) if width == run.T else (rows * width, rows * width)
    q, kv = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    mlp = N * ((3 if c.gated_mlp else 2) * c.d_ff * run.a + 3 * c.d_model * run.stream)
    attention = 2 * N * c.d_model * run.stream + heads_kept(m, run, N, M, rows)
    attention += mask_bytes(m, run, rows, width)
    if M > N:
        attention += (N * (q + 2 * kv) + M * q) * run.a
    if is_wider(run):
        attention += M * (q + 2 * kv) * run.a
    return max(mlp, attention) + N * c.rotary_dim * (2 * run.stream + 6)


def logits_forward(m, run, tokens):
    """
    Log-probs of so many tokens, or with head_chunk of that many at a time: 2 tokens V f, the scaled
    logits and the log-probs of the whole vocabulary. An entropy takes 4 tokens V f.
    """
    if m.head != "lm":
        return 0
    tokens = min(run.head_chunk or tokens, tokens)
    return tokens * m.c.vocab_size * (4 if run.entropy else 2) * run.f


def kv_cache(m, run, n):
    """2 L n kv (P + R - 1) a: keys and values of the n rows that decode at once."""
    return 2 * m.c.n_layers * n * m.c.n_kv_heads * m.c.head_dim * (run.P + run.R - 1) * run.a


def decoding(m, run, n, group=1, part=None):
    """
    Beside the cache, the larger one of
        the prompts  forward_only of n rows of P tokens; of a group of responses it is one row
        a step       logits n V a, and for the sampler up to three tensors n V f: the scaled logits,
                     their softmax, its running sum; attention over all tokens so far, 2 n heads T a
    and 20 n R of random numbers and sampled tokens. part: what a rank holds of the model where
    several decode together: then the logits are gathered, which takes n V a more.
    """
    V, part = m.c.vocab_size, part or m
    copies = 2 + (run.temperature != 1.0 or run.vocab_padding or run.a != run.f)
    step = n * V * (run.a * (1 if part is m else 2) + copies * run.f)
    step += 2 * n * part.c.n_heads * run.T * run.a
    return max(forward_only(part, run, -(-n // group), run.P), step) + 20 * n * run.R


def decoding_copy(m, run, part=None):
    """
    elements x a (norms and biases as they are): a whole copy of the weights for the rollout, where
    the policy's own would be cast, or gathered from all ranks, for every token. Where they are
    packed for the CPU (see placement.decoding_copy) only matrices that multiply are copied.
    part: as above; a part of weights that are neither cast nor gathered is a view of them.
    """
    dtype = {4: torch.float32, 2: torch.bfloat16}.get(run.a)
    packed = part is None and not run.cuda and packing_pays(dtype)
    cast, wide_head = run.autocast and m.e > run.a, m.c.fp32_head and run.autocast
    if not sharded(m) and not packed and not cast:
        return 0
    tensors = base_tensors(part or m)
    if packed:
        layers = [(shape, m.e) for shape in layer_shapes(m.c).values()] * m.c.n_layers
        head = [((m.c.vocab_size, m.c.d_model), m.e)]
        if m.c.fp32_head and run.a == 2 and not run.autocast:
            head = []  # in 16 bits, but shall be wide: it stays as it is
        # a head that is the embedding's table becomes a tensor of its own
        own_head = head * (m.c.tied and not wide_head)
        tensors = tensors + own_head if sharded(m) or cast else layers + head
    copied = sum(math.prod(shape) * (run.a if len(shape) > 1 else size * sharded(m))
                 for shape, size in tensors)
    if wide_head:  # the LM head is not cast
        copied_wide = sharded(m) or packed and packing_pays(torch.float32)
        copied += m.c.vocab_size * m.c.d_model * (m.wide * copied_wide - run.a)
    return copied


def splitting(m, run):
    """2 x the largest tensor x a: a sharded model's tensors are gathered one by one, and cut."""
    return 2 * max(math.prod(shape) for shape, _ in base_tensors(m)) * run.a * sharded(m)


# --------------------------------------------------------------------------------------------------
# training: what the forward pass keeps, what the backward pass adds


def cast_weights(m, run, shapes):
    """Under autocast elements x a: the 16-bit copies of trained matrices, which the graph keeps."""
    if not (run.autocast and m.e > run.a):
        return 0
    return sum(math.prod(shape) for shape in shapes if len(shape) > 1) * run.a


def kept_by_layer(m, run):
    """
    What a layer keeps for its backward pass: heads_kept, and N bytes of each of
        residual  2 d s; d s if attention and MLP work in parallel
        norms     2 d s, the outputs; under autocast their 16-bit copies, 2 d a; of norms after
                  attention and MLP their inputs, 2 d s; of norms of queries and keys their
                  inputs, (q + kv) a
        products  ff a of the MLP, 2 ff a if it is gated; the ranks of the adapters
        sums      4 bytes for each head: attention's logsumexp
    and cast_weights, but for `down`, which is cast again.
    """
    c, (N, M), branches = m.c, tokens_of(run, run.b), 2 if m.c.gated_mlp else 1
    d, q, kv = c.d_model, c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    residual = d * run.stream * (1 if c.parallel_residual else 2)

    norms = 2 * d * run.stream
    if run.autocast:
        norms = 2 * d * run.a
    elif m.rank and run.stream == 2:  # the inputs of norms and adapters, in 32 bits
        norms = ((5 + branches) * d + q) * 4
    if not c.norm_before and not run.autocast:  # the matrices read the residual stream itself
        norms = 0
    if c.norm_after:
        norms += 2 * d * run.stream
    if c.qk_norm and run.autocast and run.cuda:  # in 32 bits
        norms += (q + kv) * run.stream

    products = branches * c.d_ff
    products += q + kv if c.qk_norm else 0
    products += len(m.targets) * m.rank if m.rank else 0

    shapes = layer_shapes(c)
    del shapes["down"]
    casts = 0 if gathered_in_16_bits(m, run) else cast_weights(m, run, shapes.values())
    rows = N * (products * run.a + residual + norms) + 4 * M * c.n_heads
    return rows + heads_kept(m, run, N, M, run.b) + casts


def kept_for_backward(m, run):
    """kept_by_layer, or with gradient_checkpointing only the layer's input, N d s."""
    if run.checkpointing:
        return tokens_of(run, run.b)[0] * m.c.d_model * run.stream
    return kept_by_layer(m, run)


def kept_by_trunk(m, run):
    """
    L x kept_for_backward; beside it the rotation of the positions, 2 N rotary size s, and the mask.
    """
    rotation = 2 * tokens_of(run, run.b)[0] * m.c.rotary_dim * run.stream
    layers = m.c.n_layers * kept_for_backward(m, run)
    return layers + rotation + mask_bytes(m, run, run.b, run.T)


def weight_gradient(m, run):
    """Bytes of an element of one weight's new gradient, before it is added: e; autocast: a + e."""
    if m.own != "model":
        return 0
    return m.e if run.a == m.e else run.a + m.e


def layer_backward(m, run):
    """
    The worst moment of a layer's backward pass is in its MLP:
        gated      N d s + 2 N ff a + d ff e
        not gated  N d s + N ff a + d ff e
    What `down` has read is computed again and its gradient written over it; an adapter of `down`
    takes N ff a more. Beside it lies the gradient of the weight. With gradient_checkpointing all
    that the layer keeps is computed again as well: kept_by_layer less the layer's input.
    """
    N, _ = tokens_of(run, run.b)
    hidden, weight = N * m.c.d_ff * run.a, m.c.d_model * m.c.d_ff * weight_gradient(m, run)
    tensors = (2 if m.c.gated_mlp else 1) + (m.rank > 0 and "down" in m.targets)
    inner = tensors * hidden + weight
    again = kept_by_layer(m, run) - N * m.c.d_model * run.stream if run.checkpointing else 0
    return N * m.c.d_model * run.stream + inner + again


def logits_training(m, run):
    """
    The head's forward and backward pass, the largest of
        logits_forward
        b R V f + V d e: the gradient of the logits, in the memory of the log-probs, and that of
                         the head's weight; under autocast also b R V a, its 16-bit copy
        b R V 3.25 f with an entropy
    or with head_chunk: logits_forward of a chunk + V d e + 2 b R d s. Beside it the inputs of the
    last norm and of the head, b R d s each, and under autocast a 16-bit copy of the head's weight.
    """
    if m.head != "lm":
        return 0
    c, tokens = m.c, run.b * run.R
    weight = c.vocab_size * c.d_model * weight_gradient(m, run)
    inputs = 2 * tokens * c.d_model * run.stream
    inputs += cast_weights(m, run, [(c.vocab_size, c.d_model)])
    forward = logits_forward(m, run, tokens)
    if run.head_chunk:
        return inputs + weight + 2 * tokens * c.d_model * run.stream + forward
    logits = tokens * c.vocab_size * run.f
    copy = tokens * c.vocab_size * run.a if run.autocast else 0
    return inputs + max(forward, logits * 3.25 * run.entropy, logits + copy + weight)


def update(m, run):
    """
    A micro-batch's forward and backward pass, its worst moment:
        at the head       kept_by_trunk + logits_training
        at the last layer kept_by_trunk + layer_backward; a tied head's gradient, V d e, waits for
                          the embedding's
        at the layer before it  the same, less what the last layer kept
        at the embedding  N d s + V d e, tied 3 V d e
    and for a sharded model what is gathered from all ranks at that moment: at stage 3 the last
    layer, at the head already; then the one before it is on its way. Only then all that `passes`.
    Less the gradients of a sharded model that are not there yet: see to_come.
    """
    kept, waiting = kept_by_trunk(m, run), 0
    stays, begins, passes, ends = gathered(m, run, True)
    at_head, at_last_layer, at_next_layer = to_come(m, run)
    N, _ = tokens_of(run, run.b)
    embedding = m.c.vocab_size * m.c.d_model * m.e if m.own == "model" else 0
    if m.head == "lm" and m.c.tied:
        waiting = embedding
    layer = layer_backward(m, run) + waiting
    return stays + max(
        begins + kept + logits_training(m, run) - at_head,
        2 * begins + kept + layer - at_last_layer,
        passes + kept - kept_for_backward(m, run) + layer - at_next_layer,
        max(passes, ends) + N * m.c.d_model * run.stream + embedding + 2 * waiting)


def to_come(m, run):
    """
    The bytes of gradients that do not exist yet at the head, at the last layer and at the layer
    before it. FSDP makes a sharded model's gradients in the backward pass, and they are freed after
    each step. So the first micro-batch finds none, and it is the only one where a step has
    one_micro_batch; of several the others find all. (With offload=params they are on the CPU.)
    """
    elsewhere = run.cuda and m.offload == "params"
    if not sharded(m) or m.own != "model" or elsewhere or not run.one_micro_batch:
        return 0, 0, 0
    layer = m.e * sum(held(m, shape) for shape in layer_shapes(m.c).values())
    layers = m.c.n_layers * layer
    return gradients(m), layers, layers - layer


def stepping(m):
    """A step: AdamW works in place; Adafactor makes 3 copies of a matrix, one matrix at a time."""
    sizes = [math.prod(shape) * size for shape, size in trained_tensors(m)]
    return 3 * max(sizes) if sizes and m.optimizer == "adafactor" else 0


# --------------------------------------------------------------------------------------------------
# between the phases: gathering of shards, the audit, saving


def gathered_in_16_bits(m, run):
    """Whether a trained model's layers are rounded before they are gathered: placement.shard."""
    return sharded(m) and m.trained and m.own == "model" and run.autocast and m.e > run.a


def gathered(m, run, backward):
    """
    Of a sharded model, the bytes gathered from all ranks, (stays, begins, passes, ends):
        stays   until the pass is over: head and last norm (tied: the embedding); at stage 2 all
        begins  before the first layer of the pass: at stage 3 this layer
        passes  at any moment: two layers on their way; at stage 3 also the layer that computes; in
                the backward pass also a layer's whole gradients
        ends    at the begin and the end of the pass: the embedding, twice
    """
    if not sharded(m):
        return 0, 0, 0, 0
    e = run.a if gathered_in_16_bits(m, run) else m.e
    layer = sum(math.prod(shape) * (e if len(shape) > 1 else m.wide)
                for shape in layer_shapes(m.c).values())
    root = {name: math.prod(shape) * m.e for name, shape in root_shapes(m.c, m.head).items()}
    embed = 0 if m.c.tied else root["embed"]
    stays = sum(root.values()) + (layer * m.c.n_layers if m.stage == 2 else -embed)
    passes = layer * (2 + (m.stage == 3) + (backward and m.own == "model"))
    return stays, layer * (m.stage == 3), passes, 2 * embed


def audit(m):
    """
    Checksums: 32 bytes for each of up to 2^20 numbers of the largest tensor at a time. An element
    is one number, in float64 two.
    """
    tensors = base_tensors(m) if has_trunk(m) else added_tensors(m)
    shape, size = max(tensors, key=lambda t: held(m, t[0]) * t[1])
    return max(32 * min(held(m, shape) * max(size // 4, 1), 2**20), 2 * held(m, shape))


def saving(m, run):
    """
    What saving needs: a rank puts one file together at a time (disk.write_tensors), of up to
    FILE_BYTES, or all, where that is less. On a GPU there is only one tensor of it, if that is
    split over the ranks, beside this rank's part of it; the file is in the CPU's memory.
        split      what ranks have parts of, weights (stages 2, 3) or optimizer states (also 1)
        new        GPT-2's matrices are transposed, GPT-NeoX's q, k and v become one tensor, each
                   matrix with an adapter becomes a new one. A 16-bit model with an adapter is saved
                   in 32 bits, so that all of it is new
        merging    a matrix is merged in 64 bits: it, its change, and their sum
        average    while the moving average is in the weights' place, they are kept beside it
    """
    from engine.disk import FILE_BYTES  # here: torch is imported only when it is needed

    if not m.trained:
        return 0
    shape, size = max(base_tensors(m), key=lambda t: math.prod(t[0]) * t[1])
    largest, part = math.prod(shape) * size, held(m, shape) * size
    if run.cuda:
        return largest + part if sharded(m) else largest if m.stage == 1 else 0

    def in_a_file(size):
        return min(size, max(FILE_BYTES, largest))

    e = max(m.e, 4) if m.rank else m.e  # of what is saved
    fused = {"gpt2": LINEAR, "gpt_neox": ("q", "k", "v")}.get(m.c.family, ())
    sizes = {name: math.prod(shape) for name, shape in layer_shapes(m.c).items()}
    changed = {*fused, *(m.targets if m.rank else ())}
    new = m.c.n_layers * e * sum(sizes.get(name, 0) for name in changed)
    if e > m.e:
        new = e * sum(math.prod(shape) for shape, size in base_tensors(m) if size < e)
    weights = e * sum(math.prod(shape) for shape, _ in base_tensors(m))
    merging = 24 * max(sizes.values()) if m.rank else 0
    copies = in_a_file(weights if sharded(m) else new) + merging
    copies += (gradients(m) if m.ema else 0) + (part if sharded(m) else 0)
    states = 2 * sum(math.prod(shape) * size for shape, size in trained_tensors(m))
    if sharded(m) and m.own == "model":
        return max(in_a_file(states) + part, copies)
    return max(copies, in_a_file(states) * (m.world - 1) // m.world if m.stage == 1 else 0)

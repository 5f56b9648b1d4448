"""
How much memory a run of ppo.py or grpo.py will take, per GPU and before anything is loaded: arithmetic on the config alone.

python memory.py config/llama.py --world-size=8                                # a table: each model's rows, each phase's peak
python memory.py config/llama.py --compare --gpu-gb=80                         # PPO, GRPO, LoRA ... and the largest micro-batch
python memory.py config/llama.py --micro_batch_size=2 --policy-config=my.json  # keys of the script; a config.json from anywhere

The script is told from the config's keys or its name; --script=grpo says it. Where a model's folder is not here, its
config.json comes from --policy-config and --reward-config, which also take the name of a well-known shape (KNOWN, below).
Prompts are measured where data and tokenizer are here, else --prompt-tokens=512. device = "auto" means this machine, or a GPU
where --gpu-gb or --compare is given.

Every number is a formula below, one function each. A run's peak is what always lies there (weights, gradients, optimizer
states, the batch) plus the worst moment of its busiest phase. Sizes are those of the tensors, as torch's MemTracker counts
them: a GPU adds its context, its libraries' workspaces and the allocator's gaps, for which --gpu-gb leaves some room.

b rows of a micro-batch, n rows that decode at once, P prompt, R response, T = P + R, N = b T; d width, q = heads x head size,
ff width of the MLP, L layers, V vocabulary. Bytes: e of a stored weight, a of a matrix product's result, s of the residual
stream, f of the logits as the losses see them. In float32 all are 4; under autocast e = s = f = 4 and a = 2.
"""
import math
from dataclasses import dataclass
from types import SimpleNamespace

ROWS = ("parameters", "gradients", "optimizer", "activations", "logits", "KV cache", "buffers")
LINEAR = ("q", "k", "v", "o", "gate", "up", "down")


@dataclass
class Model:
    """One of the models: its ModelConfig c, its head, and how it is kept."""

    c: object
    head: str  # lm | scalar
    trained: bool
    e: int  # bytes of an element of its matrices
    wide: int  # of its norms and biases: a frozen model in 16 bits keeps them in 32
    own: str = "model"  # model | adapted: the model and an adapter of its own | adapter: on another's model | head: the same
    rank: int = 0  # of its LoRA adapter
    targets: tuple = LINEAR
    optimizer: str = "adamw"
    stage: int = 0  # ZeRO
    offload: str = "none"
    ema: bool = False
    world: int = 1


# ---------------------------------------------------------------------------------------------------------------------
# what always lies there: weights, gradients, optimizer states


def layer_shapes(c):
    """A layer's tensors, {name: shape}: q (q, d), k and v (kv, d), o (d, q), the MLP's (ff, d) and (d, ff), norms, biases."""
    d, q, kv = c.d_model, c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    shapes = dict(q=(q, d), k=(kv, d), v=(kv, d), o=(d, q), up=(c.d_ff, d), down=(d, c.d_ff))
    shapes |= dict(gate=(c.d_ff, d)) if c.gated_mlp else {}
    biased = dict(q=c.qkv_bias, k=c.qkv_bias, v=c.qkv_bias, o=c.o_bias, gate=c.mlp_bias, up=c.mlp_bias, down=c.mlp_bias)
    shapes |= {f"{name}.bias": shape[:1] for name, shape in shapes.items() if biased[name]}
    norms = ["norm1", "norm2"] + (["norm1.bias", "norm2.bias"] if not c.rms_norm else [])
    return shapes | {name: (d,) for name in norms} | (dict(q_norm=(c.head_dim,), k_norm=(c.head_dim,)) if c.qk_norm else {})


def root_shapes(c, head):
    """The tensors outside the layers: embedding (V, d), GPT-2's positions, the last norm, and a head (V, d) or (1, d)."""
    shapes = dict(embed=(c.vocab_size, c.d_model), norm=(c.d_model,))
    shapes |= dict(positions=(c.max_positions, c.d_model)) if c.learned_positions else {}
    shapes |= {} if c.rms_norm else {"norm.bias": (c.d_model,)}
    if head == "scalar":
        return shapes | dict(score=(1, c.d_model))
    return shapes if c.tied else shapes | dict(lm_head=(c.vocab_size, c.d_model))


def base_tensors(m):
    """[(shape, bytes of an element)] of the model itself."""
    shapes = [*root_shapes(m.c, m.head).values(), *list(layer_shapes(m.c).values()) * m.c.n_layers]
    return [(shape, m.e if len(shape) > 1 else m.wide) for shape in shapes]


def added_tensors(m):
    """
    The same of what stands on a model: LoRA's A (r, in) and B (out, r) for each target of each layer, and a scalar head; in at
    least 32 bits. Where q, k and v are one tensor on disk (gpt2, gpt_neox) they share A.
    """
    shapes, fused = layer_shapes(m.c), m.c.family in ("gpt2", "gpt_neox")
    names = [name for name in LINEAR if m.rank and name in m.targets and name in shapes]
    layer = [(m.rank, shapes[name][1]) for name in names if not (fused and name in ("k", "v"))]
    layer += [(shapes[name][0], m.rank) for name in names]
    return [(shape, max(m.e, 4)) for shape in layer * m.c.n_layers + ([(1, m.c.d_model)] if m.head == "scalar" else [])]


def trained_tensors(m):
    """What the optimizer moves: the whole model, or what stands on it."""
    return [] if not m.trained else base_tensors(m) if m.own == "model" else added_tensors(m)


def sharded(m):
    """Whether each rank holds only its rows of each tensor: at stage 3, at 2 where the model is trained whole."""
    return m.stage >= (2 if m.trained and m.own == "model" else 3)


def held(m, shape, added=False):
    """Elements of a tensor on a rank: all, or of a sharded model ceil(rows / world) rows; a scalar head is whole."""
    whole = added or not sharded(m) or shape == (1, m.c.d_model)
    return math.prod(shape) if whole else -(-shape[0] // m.world) * math.prod(shape[1:])


def parameters(m):
    """sum over tensors of elements x bytes: of the model, where it is not another's, and of what stands on it."""
    base = sum(held(m, shape) * size for shape, size in base_tensors(m)) if m.own in ("model", "adapted") else 0
    return base + (sum(math.prod(shape) * size for shape, size in added_tensors(m)) if m.own != "model" else 0)


def gradients(m):
    """Of each trained tensor: elements x bytes, in one flat buffer."""
    return sum(held(m, shape, m.own != "model") * size for shape, size in trained_tensors(m))


def states_of(m, shape, size):
    """AdamW: 2 x elements x bytes, and a step count of 4. Adafactor: a row and a column instead of a matrix; the same count."""
    if m.optimizer == "adafactor":
        return 4 + size * (math.prod(shape) if len(shape) < 2 else shape[0] + shape[1])
    return 4 + 2 * size * held(m, shape, m.own != "model")


def optimizer_states(m):
    """Of each rank: sum of states_of each trained tensor; ZeRO 1: of its own, dealt out largest first to the emptiest rank."""
    if m.stage != 1:
        return [sum(states_of(m, *tensor) for tensor in trained_tensors(m))] * m.world
    loads, states = [0] * m.world, [0] * m.world
    for shape, size in sorted(trained_tensors(m), key=lambda tensor: -math.prod(tensor[0])):
        rank = loads.index(min(loads))
        loads[rank] += math.prod(shape)
        states[rank] += states_of(m, shape, size)
    return states


def moving_average(m):
    """Trained elements x 4 bytes (8 in float64), where there is an average of the policy."""
    return sum(held(m, shape, m.own != "model") * max(size, 4) for shape, size in trained_tensors(m)) if m.ema else 0


def batch_tensors(s):
    """The scored responses of all ranks: B (9 T + 45 R) bytes."""
    return s.batch_size * (9 * s.T + 45 * s.R)


# ---------------------------------------------------------------------------------------------------------------------
# what a forward and a backward pass add


def cast_weights(m, s, shapes):
    """Under autocast, the 16-bit copies that the graph keeps of trained matrices: elements x a."""
    return sum(math.prod(shape) for shape in shapes if len(shape) > 1) * s.a if s.autocast and m.e > s.a else 0


def mask_bytes(m, s, rows, width, size):
    """rows T T x bytes where padding or a sliding window needs a mask."""
    return rows * width * width * size if s.masked or any(m.c.windows) else 0


def norm_inside(m, s):
    """Bytes that RMSNorm keeps a number beside its output: on a CPU the number before the weight; in pure 16 bits twice 4."""
    return 0 if s.cuda or not m.c.rms_norm else 8 if s.stream == 2 else s.stream


def kept_by_layer(m, s):
    """
    What a layer keeps for its backward pass: N (2 d s [parallel: d s] + norms + 4 q a + branches ff a).
    The norms' outputs: d s each, twice by RMSNorm on a CPU; under autocast as 16-bit copies, one for each matrix that reads it.
    4 q: queries, keys and values (for all heads), attention's output. The MLP keeps its branches alone, 2 ff if gated.
    """
    c, N, branches = m.c, s.b * s.T, 2 if m.c.gated_mlp else 1
    d, q, kv = c.d_model, c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    inside = norm_inside(m, s) if m.own == "model" else 0
    norms = 2 * d * (s.stream + inside)
    if s.autocast:
        norms = (3 + branches) * d * s.a + 2 * d * inside
    elif m.rank and s.stream == 2:  # the norms' and the adapters' inputs, in 32 bits
        norms = ((5 + branches) * d + q) * 4
    numbers = 4 * q + branches * c.d_ff
    numbers += 2 * (q + kv) * c.qk_norm + q * (c.qk_norm or 0 < c.rotary_dim < c.head_dim)  # the last: put in another order
    numbers += len(m.targets) * m.rank if m.rank else 0
    residual = d * s.stream * (1 if c.parallel_residual else 2)
    return N * (numbers * s.a + residual + norms + 4 * c.n_heads) + cast_weights(m, s, layer_shapes(c).values())


def kept_by_trunk(m, s):
    """L x kept_by_layer, and beside it 2 N head size s of rotation, b T T a of mask. With gradient_checkpointing: L N d s."""
    beside = 2 * s.b * s.T * m.c.rotary_dim * s.stream + mask_bytes(m, s, s.b, s.T, s.a)
    return m.c.n_layers * (s.b * s.T * m.c.d_model * s.stream if s.checkpointing else kept_by_layer(m, s)) + beside


def weight_gradient(m, s):
    """Bytes of an element of a weight's gradient before it is added to the rest: e; under autocast in 16 bits first, a + e."""
    return 0 if m.own != "model" else m.e if s.a == m.e else s.a + m.e


def layer_backward(m, s):
    """
    The worst moment of a layer's backward pass, in its MLP: N d s and, gated, max(4 N ff a, 3 N ff a + d ff e); else 2 N ff a +
    d ff e: what lay between the branches and `down` is computed again, beside its gradients and the weight's. With
    gradient_checkpointing all that the layer keeps is computed again, too: kept_by_layer less its input.
    """
    N, hidden = s.b * s.T, s.b * s.T * m.c.d_ff * s.a
    weight = m.c.d_model * m.c.d_ff * weight_gradient(m, s)
    inner = max(4 * hidden, 3 * hidden + weight) if m.c.gated_mlp else (3 if m.rank else 2) * hidden + weight
    again = kept_by_layer(m, s) - N * m.c.d_model * s.stream if s.checkpointing else 0
    return N * m.c.d_model * s.stream + inner + again


def forward_only(m, s, rows, width):
    """
    A layer without gradients, N = rows x width: the larger of its MLP, N (4 ff a [not gated: 2] + 3 d s), and its attention, N
    (4 q a + 2 d s) and a mask; beside it the rotation.
    """
    c, N = m.c, rows * width
    mlp = N * ((4 if c.gated_mlp else 2) * c.d_ff * s.a + 3 * c.d_model * s.stream)
    attention = N * (4 * c.n_heads * c.head_dim * s.a + 2 * c.d_model * s.stream) + mask_bytes(m, s, rows, width, s.a)
    return max(mlp, attention) + N * c.rotary_dim * (2 * s.stream + 6)


def logits_forward(m, s, tokens):
    """
    Log-probs of so many tokens: tokens V a, and V f where a cast to f, a division by the temperature or a masked padding of
    the vocabulary makes another of them; two at a time. With an entropy 5.25 f. head_chunk: of that many tokens.
    """
    tokens = min(s.head_chunk or tokens, tokens)
    copies = (s.a != s.f) + (s.temperature != 1.0) + s.vocab_padding
    size = [s.a, s.a + s.f, max(s.a + s.f, 2 * s.f)][min(copies, 2)]
    return tokens * m.c.vocab_size * max(size, 5.25 * s.f * s.entropy) if m.head == "lm" else 0


def logits_training(m, s):
    """
    The head's forward and backward pass: max(logits_forward, b R V 4 f [the logits, and three in the backward of logsumexp],
    b R V f + V d e); with head_chunk: logits_forward, V d e and 2 b R d s. Beside it the state that the head reads, the last
    norm's input, and under autocast a 16-bit copy of the matrix.
    """
    c, tokens = m.c, s.b * s.R
    weight = c.vocab_size * c.d_model * weight_gradient(m, s)
    state = s.b * s.T * c.d_model * s.stream + tokens * c.d_model * (s.stream + norm_inside(m, s))
    state += cast_weights(m, s, [(c.vocab_size, c.d_model)])
    if s.head_chunk:
        return state + weight + 2 * tokens * c.d_model * s.stream + logits_forward(m, s, tokens)
    whole = tokens * c.vocab_size * s.f
    return state + max(logits_forward(m, s, tokens), whole * (5.25 if s.entropy else 4), whole + weight)


def kv_cache(m, s, n):
    """2 L n kv (P + R - 1) a: keys and values of the n rows that decode at once."""
    return 2 * m.c.n_layers * n * m.c.n_kv_heads * m.c.head_dim * (s.P + s.R - 1) * s.a


def decoding(m, s, n):
    """
    Beside the cache: the prompts' layers (forward_only of n x P), or logits n V a and for the sampler three of (n, V): logits
    scaled, softmax, its running sum; and in later steps 2 n H (P + R) a of attention. 20 n R of random and sampled numbers.
    """
    V, copies = m.c.vocab_size, 2 + (s.temperature != 1.0 or s.vocab_padding or s.a != s.f)
    sampling = n * V * (s.a + copies * s.f) + 2 * n * m.c.n_heads * s.T * s.a
    return max(forward_only(m, s, n, s.P), sampling) + 20 * n * s.R


def decoding_copy(m, s):
    """The weights that the rollout uses where the policy's would be cast or gathered at every token: elements x a (norms e)."""
    if not sharded(m) and not (s.autocast and m.e > s.a):
        return 0
    return sum(math.prod(shape) * (s.a if len(shape) > 1 else size * sharded(m)) for shape, size in base_tensors(m))


def gathered(m, backward):
    """
    Sharded (stages 2, 3), the bytes of (what stays gathered until the pass is over, what passes at any time, what passes at its
    ends). What stays: head and last norm (tied: the embedding), at stage 2 everything. What passes: two layers on the wire, at
    stage 3 the one that computes, in the backward pass a layer's whole gradients; at the ends the embedding, twice.
    """
    if not sharded(m):
        return 0, 0, 0
    layer = sum(math.prod(shape) * (m.e if len(shape) > 1 else m.wide) for shape in layer_shapes(m.c).values())
    root = {name: math.prod(shape) * m.e for name, shape in root_shapes(m.c, m.head).items()}
    embed = 0 if m.c.tied else root["embed"]
    stays = sum(root.values()) + (layer * m.c.n_layers if m.stage == 2 else -embed)
    return stays, layer * (2 + (m.stage == 3) + (backward and m.own == "model")), 2 * embed


def audit(m):
    """Checksums: 24 bytes a number of the largest tensor (fp64: two numbers an element), of 2^20 numbers at a time."""
    tensors = base_tensors(m) if m.own in ("model", "adapted") else added_tensors(m)
    shape, size = max(tensors, key=lambda t: held(m, t[0]) * t[1])
    return max(24 * min(held(m, shape) * max(size // 4, 1), 2**20), 2 * held(m, shape))


def saving(m, s):
    """
    On a CPU, what a saved model needs beside itself: GPT-2's matrices transposed, GPT-NeoX's q, k and v in one, each matrix
    that an adapter is merged into, and then all of a model in 16 bits, for it is saved in 32;
    and a copy of the weights that the moving average replaces. What is split over the ranks,
    weights (stages 2, 3) or optimizer states (also 1), is put together for rank 0 to write. From a GPU they go one by one.
    """
    if s.cuda or not m.trained:
        return 0
    sizes = {name: math.prod(shape) for name, shape in layer_shapes(m.c).items()}
    e = max(m.e, 4) if m.rank else m.e  # of what is saved
    fused = {"gpt2": LINEAR, "gpt_neox": ("q", "k", "v")}.get(m.c.family, ())
    rewritten, merged = (m.c.n_layers * e * sum(sizes.get(name, 0) for name in names)
                         for names in (fused, m.targets if m.rank else ()))
    narrow = [math.prod(shape) for shape, size in base_tensors(m) if size < e]
    widened = e * sum(narrow) if e > m.e else merged
    # the merging of a matrix, in 64 bits, is over before all that is written lies there
    merging = merged + 24 * max(sizes.values()) if m.rank else 0
    copies = max(rewritten + widened, merging) + (gradients(m) if m.ema else 0)
    whole = sum(math.prod(shape) * size for shape, size in trained_tensors(m))
    if sharded(m) and m.own == "model":
        return max(2 * whole, whole + copies)
    return max(copies, 2 * whole * (m.world - 1) // m.world if m.stage == 1 else 0)


def stepping(m):
    """AdamW works in place; Adafactor makes 3 copies of a matrix, one at a time."""
    sizes = [math.prod(shape) * size for shape, size in trained_tensors(m)]
    return 3 * max(sizes) if sizes and m.optimizer == "adafactor" else 0


def update(m, s):
    """
    A micro-batch's forward and backward: the worst of kept_by_trunk + logits_training; kept_by_trunk + layer_backward, of the
    last layer, where a tied head's gradient V d e waits for the embedding's; and the end, N d s + V d e (tied: 3 V d e).
    """
    kept, (stays, passes, ends) = kept_by_trunk(m, s), gathered(m, True)
    embedding = m.c.vocab_size * m.c.d_model * m.e if m.own == "model" else 0
    waiting = embedding if m.head == "lm" and m.c.tied else 0
    head = logits_training(m, s) if m.head == "lm" else 0
    end = s.b * s.T * m.c.d_model * s.stream + embedding + 2 * waiting
    return stays + max(passes + kept + head, passes + kept + layer_backward(m, s) + waiting, max(passes, ends) + end)


# ---------------------------------------------------------------------------------------------------------------------
# a run


def the_models(config, policy, reward, world_size, reward_rank=0):
    """{name: Model} of a run, from its configuration and the two ModelConfigs, as the scripts load them. Raises BadConfig."""
    from engine.placement import placements

    get, grpo, dtype = config.get, "group_size" in config, config["dtype"]
    keys = (config[key] for key in ("zero_stage", "offload", "lora", "optim", "share_base"))
    place = placements(("policy",) if grpo else ("policy", "value"), *keys, get("value_init"))
    mixed = dtype in ("bfloat16", "float16") and config["master_weights"]
    e = 8 if dtype == "float64" else 4 if dtype == "float32" or mixed else 2

    def make(name, c, head, own="model", trained=False):
        p = place[name]
        rounded = mixed and (own != "model" or not trained)
        lora = dict(rank=p.lora["rank"], targets=tuple(p.lora.get("targets", ",".join(LINEAR)).split(","))) if p.lora else {}
        return Model(c, head, trained, 2 if rounded else e, e, own, **lora, optimizer=p.optimizer,
                     stage=p.stage if world_size > 1 else 0, offload=p.offload, world=world_size,
                     ema=name == "policy" and config["ema_decay"] > 0)

    adapted, shared = bool(place["policy"].lora), config["share_base"]
    models = dict(policy=make("policy", policy, "lm", "adapted" if adapted else "model", True))
    if not adapted and not (grpo and config["kl_coef"] == 0):  # with LoRA the reference is the policy's bare trunk
        models["ref_policy"] = make("ref", policy, "lm")
    if any(part.rpartition("*")[2].strip() == "reward_model" for part in config["reward_functions"].split(",")):
        models["reward_model"] = make("reward", policy if shared else reward, "scalar", "adapter" if shared else "model")
        if shared:
            models["reward_model"].rank = reward_rank or place["policy"].lora["rank"]
    if not grpo:
        init = config["value_init"]
        own = "head" if init == "shared" else "adapter" if shared else "adapted" if place["value"].lora else "model"
        models["value_model"] = make("value", reward if init == "reward" and not shared else policy, "scalar", own, True)
        if init == "shared":  # its forward and backward pass are the policy's
            models["value_model"].rank = models["policy"].rank
    return models


def predicted_mib(config, policy, reward_model, tokenizer, train_prompts, eval_prompts, world_size, device):
    """predict's peak, of a run whose models and prompts (lists of ids) are there."""
    lengths = {len(p) for p in train_prompts + eval_prompts}
    rank = getattr(reward_model, "lora", {}).get("rank", 0)
    return predict(config, policy.config, reward_model and reward_model.config, max(lengths), world_size, device.type,
                   len(lengths) > 1, policy.config.vocab_size > tokenizer.vocab_size, len(eval_prompts), rank)["peak_mib"]


def predict(config, policy, reward=None, prompt_tokens=512, world_size=1, device="cuda", masked=True, vocab_padding=False,
            eval_rows=0, reward_rank=0):
    """
    What a run will hold on one rank at most. config: the script's; policy, reward: ModelConfigs; prompt_tokens: the longest
    prompt, P; masked: prompts differ in length; vocab_padding: the model has more embeddings than the tokenizer tokens;
    eval_rows: how many held-out prompts there are, for eval_size = 0; reward_rank: that of reward_path's adapter, where there
    is share_base (0: like the policy's). Responses are taken to be of full length. Returns peak_mib, phase (the busiest),
    phases {name: MiB}, rows {model: {row: MiB}} (each at its own peak), and cpu_mib: what is offloaded beside a GPU.
    """
    models, dtype, B = the_models(config, policy, reward, world_size, reward_rank), config["dtype"], config["batch_size"]
    mixed = dtype in ("bfloat16", "float16") and config["master_weights"]
    mine, held_out, step = (math.ceil(rows / world_size) for rows in (
        B, config["eval_size"] or eval_rows, math.ceil(B / config["num_minibatches"])))
    s = SimpleNamespace(
        batch_size=B, P=prompt_tokens, R=config["max_new_tokens"], T=prompt_tokens + config["max_new_tokens"],
        b=min(config["micro_batch_size"], step),
        temperature=config["temperature"], entropy=config["entropy_coef"] > 0, head_chunk=config["head_chunk"],
        checkpointing=config["gradient_checkpointing"], masked=masked, vocab_padding=vocab_padding, cuda=device != "cpu",
        a=8 if dtype == "float64" else 4 if dtype == "float32" else 2, f=8 if dtype == "float64" else 4,
        stream=8 if dtype == "float64" else 4 if dtype == "float32" or mixed else 2, autocast=mixed)
    rows, cpu, batch = {}, 0, batch_tensors(s)
    by_rank = {name: optimizer_states(m) for name, m in models.items()}
    fullest = max(range(world_size), key=lambda rank: sum(states[rank] for states in by_rank.values()))
    for name, m in models.items():
        static = dict(parameters=parameters(m), gradients=gradients(m), optimizer=by_rank[name][fullest] + moving_average(m))
        away = {"none": [], "optimizer": ["optimizer"], "params": ROWS[:3]}[m.offload] if s.cuda else []
        cpu += sum(static[row] for row in away) + (gradients(m) if away == ["optimizer"] else 0)  # and the weights themselves
        rows[name] = dict.fromkeys(ROWS, 0) | static | dict.fromkeys(away, 0)
    always = sum(r[row] for r in rows.values() for row in ROWS[:3])
    states = sum(rows[name]["optimizer"] - moving_average(m) for name, m in models.items())  # there from the first step on
    steps = config["max_iters"] * config["num_minibatches"] * config.get("ppo_epochs", config.get("num_iterations"))
    policy_m, copy = models["policy"], decoding_copy(models["policy"], s)
    phases = dict(rollout=0, score=0, update=batch + max(map(stepping, models.values())),
                  save=max(saving(m, s) for m in models.values()), audit=batch + max(map(audit, models.values())))
    stay = sum(gathered(m, False)[0] for m in models.values())  # until all models have scored
    for here, missing in ((mine, states if config["max_iters"] == 1 else 0), (held_out, 0)):
        n, b = min(config["rollout_batch_size"] or here, here), min(config["micro_batch_size"], here)
        cache, scored = kv_cache(policy_m, s, n), batch + here * (9 * s.T + 5 * s.R) - missing
        rows["policy"]["KV cache"] = max(rows["policy"]["KV cache"], cache)
        phases["rollout"] = max(phases["rollout"], cache + copy + decoding(policy_m, s, n) + scored)
        for name, m in models.items():
            layer, logits, (_, passes, ends) = forward_only(m, s, b, s.T), logits_forward(m, s, b * s.R), gathered(m, False)
            visiting = parameters(m) if m.offload == "params" and s.cuda and not sharded(m) else 0  # from the CPU, while used
            rows[name] |= dict(activations=max(rows[name]["activations"], layer), logits=max(rows[name]["logits"], logits))
            passing = max(passes + max(layer, logits), ends)
            phases["score"] = max(phases["score"], stay + visiting + passing + scored + 12 * here * s.R)
    for name, m in models.items():
        if m.trained:
            rows[name]["activations"] = kept_by_trunk(m, s) + layer_backward(m, s)
            rows[name]["logits"] = logits_training(m, s) if m.head == "lm" else 0
            phases["update"] = max(phases["update"], update(m, s) + batch - (states if steps == 1 else 0))
        rows[name]["buffers"] = max(audit(m), saving(m, s), stepping(m), copy if m is policy_m else 0)
    phases = {name: (always + size) / 2**20 for name, size in phases.items()}
    busiest = max(phases, key=phases.get)
    return dict(peak_mib=phases[busiest], phase=busiest, phases=phases, cpu_mib=cpu / 2**20,
                rows={name: {row: size / 2**20 for row, size in r.items()} for name, r in rows.items()})


# ---------------------------------------------------------------------------------------------------------------------
# the tool
FORMULAS = {  # in short, as the table shows them; the functions above have them in full
    "parameters": "elements x bytes",
    "gradients": "trained elements x bytes",
    "optimizer": "AdamW: 2 x trained elements x bytes + 4 a tensor; the average",
    "activations": "trained: kept_by_trunk + layer_backward; frozen: one layer",
    "logits": "trained: 4 b R V f; in chunks V d e + 2 chunk V f; frozen: 2 b R V f",
    "KV cache": "2 L n kv (P + R - 1) a",
    "buffers": "the largest: audit, decoding_copy, stepping, saving",
}

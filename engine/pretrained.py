"""
A Transformer from a Hugging Face directory, and back into one. In this file, downwards:

    from_pretrained, load_weights    read a model
    find_tensors                     which file has which of our parameters
    read_lora, with_lora             an adapter, and a weight with its changes
    from_scratch                     a new model with random weights
    save_pretrained                  write a model
    hf_name, from_hf, to_hf          what our tensors are called on disk, and how they lie there
"""
import dataclasses
import json
import os
from functools import partial

import torch

from engine.disk import at_disk, write_tensors
from engine.hf_config import (
    ADAPTER_FIELDS, FAMILIES, FINITE, check_fields, older_rope_names, parse_config)
from engine.hf_files import (
    check_dtype, check_numbers, model_folders, open_bin, read_json, read_tensors, tensor_files)
from engine.together import alone, size_of, whole_on
from errors import BadInput, shorten
from model import Transformer, freeze
from parallel import rank_and_size


# --------------------------------------------------------------------------------------------------
# reading


def from_pretrained(path, head="lm", dtype=torch.float32, device="cpu", seed=0, matrices=None,
                    prepare=None, fp32_head=False, outline=False):
    """
    The Transformer in a Hugging Face directory, or of that name on the hub. A directory with only
    an adapter is its base model with the adapter merged into the weights.

    head: "lm", or "scalar", which reads the sequence-classification format (num_labels = 1); of a
    plain language model it draws a new scalar head from seed, and sets model.new_head.
    dtype: of the weights. matrices: another dtype for the matrices, or None.
    prepare: a function that gets the model before it takes any memory, for example to shard it.
    fp32_head: the key of that name. outline: read no weights; the model has its config and its
    shapes, but takes no memory.
    Raises BadInput when a file or tensor is missing, unexpected or of another shape, or the
    architecture is unknown.
    """
    *adapters, folder = model_folders(path)
    file = os.path.join(folder, "config.json")
    config = parse_config(read_json(file), file)
    config.fp32_head = fp32_head
    # raises, if one is missing, before the model is made
    found = find_tensors(path, folder, config, head)
    loras = [read_lora(adapter, config, head) for adapter in reversed(adapters)]
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    with torch.device("meta"):  # parameters without memory
        model = Transformer(config, head).to(dtype)
        for name, p in model.named_parameters():
            if matrices and p.dim() == 2 and not config.stays_wide(name, head):
                p.data = p.data.to(matrices)
    if outline:
        heads = ["score.weight" in lora.tensors for lora in loras]
        model.new_head = found.get("score.weight", [""])[0] is None and not any(heads)
        return freeze(model)
    if prepare:
        prepare(model)
    model = model.to_empty(device=device)
    load_weights(model, path, folder, seed, loras)
    return model


def load_weights(model, path, folder, seed=0, loras=()):
    """
    Fill all parameters of a model from the weights in a folder. path: what the errors call the
    folder. loras: adapters to merge into them, one after the other (read_lora). Raises BadInput.
    """
    found = find_tensors(path, folder, model.config, model.head)
    for name, p in model.named_parameters():
        file, name_there, part = found[name]
        heads = [lora.tensors["score.weight"] for lora in loras if "score.weight" in lora.tensors]
        if name == "score.weight" and heads:
            fill(p, heads[-1])
            continue
        if file is None:
            draw_score_head(model, seed)
            continue
        # one tensor at a time, into memory that is there already: never two copies of a model
        tensor = read_tensors(file, lambda f, n=name_there: f.get_tensor(n))
        if part in (None, 0):  # of q, k and v in one tensor: once is enough
            check_numbers(tensor, p.dtype, file, name_there)
        disk_name, _ = hf_name(model.config.family, name)
        tensor = from_hf(model.config, disk_name, part, tensor)
        for lora in loras:
            tensor = with_lora(lora, model.config, disk_name, part, tensor, p.dtype)
        fill(p, tensor)
        del tensor
    open_bin.cache_clear()


def fill(p, tensor):
    """Copy a whole tensor into a parameter; into a sharded one, this rank's part of it."""
    with torch.no_grad():
        p.copy_(split_like(p, tensor))


def split_like(p, tensor):
    """
    A tensor that every rank has whole -> itself, or, if the parameter p is sharded, a DTensor that
    is split as p is. Nothing is sent.
    """
    if not hasattr(p, "placements"):  # a DTensor has them
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(p.device), p.device_mesh, p.placements, src_data_rank=None)


def find_tensors(path, folder, c, head):
    """
    {our name: (file, name in it, which part of the tensor there it is)} of all parameters of a
    model; a scalar head that is not there has None for its file. path: what the errors call the
    folder. Only the files' headers are read: a config.json that announces more than the weights
    hold is found before it takes any memory. Raises BadInput.
    """
    files = tensor_files(folder)  # name on disk -> file, shape, dtype
    if head == "scalar":
        check_one_score(path, c, files)
    elif "score.weight" in files and not any(f"{name}.weight" in files for name in LM_HEADS):
        raise BadInput(f"{path}: it is a reward model, with 'score.weight' and no head for words; "
                       "here a language model is wanted")
    bare, prefix = {}, HF_BASE[c.family]
    if not any(name.startswith(prefix) for name in files):
        # a trunk without a head, such as the hub's gpt2, has names without the prefix
        bare = {prefix + name: name for name in files
                if name.split(".")[0] not in ("lm_head", "score")}
    found, used = {}, set()
    for name, shape in parameter_shapes(c, head):
        disk_name, part = hf_name(c.family, name)
        name_there = bare.get(disk_name, disk_name)
        if name_there not in files:
            if name != "score.weight":
                raise BadInput(f"{path}: tensor {disk_name!r} is missing from its weights; is the "
                               "download complete, and config.json this model's?")
            found[name] = None, None, None
            continue
        file, shape_there, dtype = files[name_there]
        if part is not None:
            shape = (3 * shape[0], *shape[1:])
        if is_transposed(c, disk_name, shape):
            shape = shape[::-1]
        if shape_there != shape:
            raise BadInput(f"{path}: tensor {disk_name!r} is {shape_there} in the file, but "
                           f"config.json says {shape}")
        check_dtype(dtype, file, name_there)
        found[name] = file, name_there, part
        used.add(name_there)
    # other heads, and buffers that older versions of transformers saved, are not the model
    used |= {f"{name}.weight" for name in (*LM_HEADS, "score")}
    buffers = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias",
               "rotary_emb.inv_freq")
    extra = [name for name in files if name not in used and not name.endswith(buffers)]
    if head == "scalar" and "score.weight" not in files and len(extra) == 1 \
            and not extra[0].startswith(prefix):
        raise BadInput(f"{path}: its weights have no 'score.weight', the head of a sequence "
                       f"classifier, but {extra[0]!r}; if that is a linear map to one score, "
                       "without a bias, rename it in the file")
    if extra:
        raise BadInput(f"{path}: its weights hold {extra[0]!r} and {len(extra) - 1} more that "
                       "config.json does not announce; the model would not be the one that was "
                       "saved")
    return found


def check_one_score(path, c, files):
    """
    Raise BadInput for a model with another head than one score a token: a classifier of several
    labels, of tokens, and so on. A language model is fine: it gets a new head.
    """
    kind, wanted = c.hf.get("architectures"), "a reward model gives one score (num_labels = 1)"
    kind = str(kind[0]) if isinstance(kind, list) and kind else ""
    good = ("ForSequenceClassification", "ForCausalLM", "LMHeadModel", "Model")
    if kind and not kind.endswith(good):
        raise BadInput(f"{path}: it is a {shorten(kind)}; {wanted}, as a "
                       "...ForSequenceClassification does")
    _, shape, _ = files.get("score.weight", (None, (1,), None))
    if shape[:1] != (1,):
        labels = c.hf.get("id2label")
        labels = list(labels.values()) if isinstance(labels, dict) else []
        named = f" ({', '.join(map(str, labels[:3]))})" if labels else ""
        raise BadInput(f"{path}: its head gives {shape[0] if shape else 'no'} labels{named}: it "
                       f"is a classifier; {wanted}. rm.py or TRL's RewardTrainer makes one")
    if "score.bias" in files:
        raise BadInput(f"{path}: its head has a bias, 'score.bias', as a token classifier's has; "
                       f"{wanted}, from score.weight alone")


def parameter_shapes(c, head):
    """
    (name, shape) of a Transformer's parameters, one by one. Only one layer is built, without
    memory, because c.n_layers may be nonsense.
    """
    with torch.device("meta"):
        one = Transformer(dataclasses.replace(c, n_layers=1), head)
    shapes = {name: tuple(p.shape) for name, p in one.named_parameters()}
    first = "layers.0."
    for name, shape in shapes.items():
        if not name.startswith(first):
            yield name, shape
    for i in range(c.n_layers):
        for name, shape in shapes.items():
            if name.startswith(first):
                yield name.replace(first, f"layers.{i}."), shape


# --------------------------------------------------------------------------------------------------
# an adapter that is merged into the weights as they are read

# settings of adapters that change the scale, the base or more than B A does
UNSUPPORTED_LORA = (
    "use_dora", "alpha_pattern", "rank_pattern", "lora_bias", "use_qalora", "use_bdlora",
    "layer_replication", "target_parameters", "trainable_token_indices", "monteclora_config",
    "arrow_config", "alora_invocation_tokens", "velora_config")


@dataclasses.dataclass
class Lora:
    """A LoRA adapter as read from its files, ours or peft's."""

    tensors: dict  # {name on disk of the weight, or with lora_A or lora_B in it: tensor}
    scale: float  # of B A


def check_lora(settings, file):
    """Raise BadInput where adapter_config.json announces what quartet does not know."""
    kind, bias, init = (settings.get(key) for key in ("peft_type", "bias", "init_lora_weights"))
    if kind not in (None, "LORA"):
        raise BadInput(f"{file}: peft_type = {shorten(kind)} is not supported, only LORA")
    for key in UNSUPPORTED_LORA:
        if settings.get(key):
            raise BadInput(f"{file}: {key} = {shorten(settings[key])} is not supported; its scale "
                           "or its weights would be others")
    if bias not in (None, "none"):
        raise BadInput(f"{file}: bias = {shorten(bias)} is not supported; only 'none'")
    if init not in (None, True, False, "gaussian", "eva", "orthogonal"):
        raise BadInput(f"{file}: init_lora_weights = {shorten(init)} has changed the base model, "
                       "too; merge the adapter with peft, and give the merged model")


def read_lora(folder, c, head):
    """
    The Lora in a folder, for a model of config c with this head; sets c.score_shift where the
    adapter has one. Each of its tensors must fit one of the model's weights. Raises BadInput.
    """
    file = os.path.join(folder, "adapter_config.json")
    settings = read_json(file)
    fields = {name: rule for name, rule in ADAPTER_FIELDS.items() if name != "target_modules"}
    check_fields(settings, fields, file)  # which modules it has, its tensors say
    check_lora(settings, file)
    rank, alpha = settings.get("r", 0), settings.get("lora_alpha", 8)
    scale = alpha / max(rank, 1) ** (0.5 if settings.get("use_rslora") else 1.0)

    file = os.path.join(folder, "adapter_model.safetensors")
    names, notes = read_tensors(file, lambda f: (list(f.keys()), f.metadata() or {}))
    shapes = {}  # of the model's weights on disk, {name: shape}, not transposed
    for name, shape in parameter_shapes(c, head):
        disk_name, part = hf_name(c.family, name)
        shapes[disk_name] = shape if part is None else (3 * shape[0], *shape[1:])
    tensors = {}
    for name in names:
        short = name.removeprefix("base_model.model.")
        if head == "scalar" and short.split(".")[0] in LM_HEADS:
            continue  # a language model's adapter, under a new scalar head
        weight, _, kind = short.removesuffix(".weight").rpartition(".")
        if kind in ("lora_A", "lora_B"):
            wanted = shapes.get(f"{weight}.weight")
            if wanted and len(wanted) == 2:
                wanted = (rank, wanted[1]) if kind == "lora_A" else (wanted[0], rank)
        else:
            wanted = shapes.get(short)
        transposed = "lora_" not in short and wanted and is_transposed(c, short, wanted)
        wanted = wanted[::-1] if transposed else wanted
        if short == "score.weight" and head == "lm":
            raise BadInput(f"{folder}: this adapter has a score head: it makes a reward model, not "
                           "a language model")
        tensor = read_tensors(file, lambda f, name=name: f.get_tensor(name))
        if short == "score.weight" and tensor.dim() == 2 and len(tensor) != 1:
            raise BadInput(f"{file}: its score head has {len(tensor)} labels, and a reward model "
                           "has one; train one with rm.py")
        if wanted is None or tuple(tensor.shape) != wanted:
            wanted = f"would be {wanted}" if wanted else "it has no such weight"
            raise BadInput(f"{file}: {name} is {tuple(tensor.shape)}, but in this base model "
                           f"{wanted}; was the adapter trained on it, with r = {rank}?")
        check_dtype(str(tensor.dtype), file, name)
        check_numbers(tensor, torch.float32, file, name)
        tensors[short] = tensor.t() if transposed else tensor
    halves = {name.rpartition(".lora_")[0] for name in tensors if ".lora_" in name}
    for module in sorted(halves):
        for kind in "AB":
            if f"{module}.lora_{kind}.weight" not in tensors:
                raise BadInput(f"{file}: {module}.lora_{kind}.weight is missing; save the adapter "
                               "again")
    if "score.weight" in tensors:
        read_shift(c, notes, file)
    return Lora(tensors, scale)


def read_shift(c, notes, file):
    """
    Take the score_shift of an adapter's file into a ModelConfig. notes: the file's metadata, which
    has one where rm.py has trained the adapter. Raises BadInput.
    """
    try:
        shift = {"score_shift": float(notes.get("score_shift", 0.0))}
    except ValueError:
        shift = notes  # not a number: check_fields says so
    check_fields(shift, {"score_shift": FINITE}, file)
    c.score_shift = shift["score_shift"]
    if c.score_shift or "score_shift" in c.hf:  # a language model has none
        c.hf = {**c.hf, "score_shift": c.score_shift}


def with_lora(lora, c, disk_name, part, W, dtype):
    """
    A weight W, as our model has it, with what an adapter makes of it: W + scale B A (arXiv
    2106.09685, eq. 3), computed in at least 32 bits for a model of this dtype; or the weight that
    was saved in its place.
    """
    if disk_name in lora.tensors:  # peft's modules_to_save
        return from_hf(c, "", part, lora.tensors[disk_name])
    module = disk_name.removesuffix(".weight")
    A = lora.tensors.get(f"{module}.lora_A.weight")  # (r, in)
    if A is None or disk_name == module:  # a bias has no adapter
        return W
    B = from_hf(c, "", part, lora.tensors[f"{module}.lora_B.weight"])  # (out, r)
    dtype = torch.promote_types(torch.promote_types(W.dtype, torch.float32), dtype)
    return W.to(dtype) + lora.scale * (B.to(dtype) @ A.to(dtype))


# --------------------------------------------------------------------------------------------------
# new weights


def from_scratch(hf, head="lm", seed=0, dtype=torch.float32, device="cpu"):
    """
    A new model. hf: a dict in the form of config.json. Matrices are normal with std 1 / sqrt(d),
    from seed; norms are 1 and biases 0.
    """
    model = Transformer(parse_config(hf), head)
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        with torch.no_grad():
            if p.dim() == 1:
                ones = "norm" in name and name.endswith("weight") and not model.config.norm_offset
                p.fill_(1.0 if ones else 0.0)
            else:
                # what writes to the residual stream is smaller, the deeper the model is, by
                # 1 / sqrt(number of writes) (GPT-2, section 2.3)
                writes = name.endswith(("o.weight", "down.weight"))
                shrink = (2 * model.config.n_layers) ** -0.5 if writes else 1.0
                p.normal_(0, shrink * model.config.d_model**-0.5, generator=generator)
    if head == "scalar":
        draw_score_head(model, seed)
    return model.to(device, dtype)


def draw_score_head(model, seed):
    """A new scalar head: normal with std 1 / sqrt(d + 1) (N+ detail 11)."""
    d = model.config.d_model
    generator = torch.Generator().manual_seed(seed)
    fill(model.score.weight, torch.empty(1, d).normal_(0, (d + 1) ** -0.5, generator=generator))
    model.new_head = True


# --------------------------------------------------------------------------------------------------
# writing


def save_pretrained(model, folder, dtype=None):
    """
    A collective: write config.json and the weights, as transformers would, of a Transformer or an
    Adapted, whose adapters are merged into the weights: in model.safetensors, or in several files
    and an index of them (disk.write_tensors). A scalar head is written as sequence classification
    with one label. dtype: of the saved tensors; None: as they are. Raises Stop.
    """
    config, head, weights = model.config, model.head, model.weights()
    merged = getattr(model, "merged", lambda name, W: W)
    merged_dtype = getattr(model, "merged_dtype", lambda dtype: dtype)
    hf = older_rope_names(config.hf) | config.hf
    if head == "lm" and config.family in ("gpt2", "gemma3_text"):
        hf["architectures"] = [{"gpt2": "GPT2LMHeadModel"}.get(config.family, "Gemma3ForCausalLM")]
    else:
        kind = "ForCausalLM" if head == "lm" else "ForSequenceClassification"
        hf["architectures"] = [HF_CLASSES[config.family] + kind]
    if head == "scalar":
        # one label; num_labels is not written, because transformers derives it from id2label
        hf.update(id2label={"0": "LABEL_0"}, label2id={"LABEL_0": 0})
        hf["score_shift"] = config.score_shift
    embedding = dtype or merged_dtype(weights["embed.weight"].dtype)
    hf["dtype"] = str(embedding).removeprefix("torch.")
    hf.pop("torch_dtype", None)  # the older name of dtype

    def write_config():
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as f:
            json.dump(hf, f, indent=2, sort_keys=True)

    def make(rank, disk_name):
        whole = {part: whole_on(rank, weights[name]) for part, name in groups[disk_name].items()}
        if rank != rank_and_size()[0]:
            return None
        whole = {part: merged(name, whole[part]) for part, name in groups[disk_name].items()}
        t = to_hf(config, disk_name, whole).cpu()
        return t.to(dtype or t.dtype).contiguous()

    groups, sizes = {}, {}  # name on disk -> the parts that it is made of, its bytes
    for name, t in weights.items():
        disk_name, part = hf_name(config.family, name)
        groups.setdefault(disk_name, {})[part] = name
        size = size_of(t) * (dtype or merged_dtype(t.dtype)).itemsize
        sizes[disk_name] = sizes.get(disk_name, 0) + size
    alone(at_disk(write_config))
    write_tensors(folder, "model", {name: (size, partial(make, disk_name=name))
                                    for name, size in sizes.items()}, {"format": "pt"})


# --------------------------------------------------------------------------------------------------
# on disk

# What each of our tensors is called there. "#" is the layer's number; ":1" means that the tensor on
# disk is q, k and v in one, and ours is the second of them.
_LLAMA = {
    "embed": "model.embed_tokens", "norm": "model.norm", "lm_head": "lm_head", "score": "score",
    "layers.#.norm1": "model.layers.#.input_layernorm",
    "layers.#.norm2": "model.layers.#.post_attention_layernorm",
    "layers.#.q": "model.layers.#.self_attn.q_proj",
    "layers.#.k": "model.layers.#.self_attn.k_proj",
    "layers.#.v": "model.layers.#.self_attn.v_proj",
    "layers.#.o": "model.layers.#.self_attn.o_proj",
    "layers.#.q_norm": "model.layers.#.self_attn.q_norm",
    "layers.#.k_norm": "model.layers.#.self_attn.k_norm",
    "layers.#.gate": "model.layers.#.mlp.gate_proj",
    "layers.#.up": "model.layers.#.mlp.up_proj",
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
    "embed": "gpt_neox.embed_in", "norm": "gpt_neox.final_layer_norm",
    "lm_head": "embed_out", "score": "score",
    "layers.#.norm1": "gpt_neox.layers.#.input_layernorm",
    "layers.#.norm2": "gpt_neox.layers.#.post_attention_layernorm",
    "layers.#.q": "gpt_neox.layers.#.attention.query_key_value:0",
    "layers.#.k": "gpt_neox.layers.#.attention.query_key_value:1",
    "layers.#.v": "gpt_neox.layers.#.attention.query_key_value:2",
    "layers.#.o": "gpt_neox.layers.#.attention.dense",
    "layers.#.up": "gpt_neox.layers.#.mlp.dense_h_to_4h",
    "layers.#.down": "gpt_neox.layers.#.mlp.dense_4h_to_h",
}
_OLMO2 = {
    **_LLAMA,
    "layers.#.norm1_after": "model.layers.#.post_attention_layernorm",
    "layers.#.norm2_after": "model.layers.#.post_feedforward_layernorm",
}
_GEMMA3 = {**_OLMO2, "layers.#.norm2": "model.layers.#.pre_feedforward_layernorm"}
HF_NAMES = {"gpt2": _GPT2, "gpt_neox": _NEOX, **dict.fromkeys(FAMILIES[2:], _LLAMA),
            "olmo2": _OLMO2, "gemma3_text": _GEMMA3}
HF_BASE = {"gpt2": "transformer.", "gpt_neox": "gpt_neox.", **dict.fromkeys(FAMILIES[2:], "model.")}
LM_HEADS = ("lm_head", "embed_out")  # on disk; a scalar model has "score" in the place of them
HF_CLASSES = {"gpt2": "GPT2", "gpt_neox": "GPTNeoX", "llama": "Llama", "mistral": "Mistral",
              "qwen2": "Qwen2", "qwen3": "Qwen3", "olmo2": "Olmo2", "gemma3_text": "Gemma3Text"}


def hf_name(family, name):
    """
    "layers.3.q.weight" -> (its name on disk, which part of the tensor there it is). The part is 0,
    1 or 2 for q, k and v in one tensor, else None.
    """
    module, kind = name.rsplit(".", 1)
    number = next((x for x in module.split(".") if x.isdigit()), "")
    pattern = module.replace(f".{number}.", ".#.") if number else module
    disk, _, part = HF_NAMES[family][pattern].partition(":")
    return f"{disk.replace('#', number)}.{kind}", int(part) if part else None


def from_hf(c, disk_name, part, t):
    """
    Our tensor from the one on disk. GPT-2 stores linear maps transposed; of q, k and v in one
    tensor, GPT-NeoX has q, k, v of one head after the other, GPT-2 all of q, all of k, all of v.
    """
    if is_transposed(c, disk_name, t.shape):
        t = t.t()
    if part is None:
        return t
    if c.family == "gpt_neox":
        return t.unflatten(0, (c.n_heads, 3, c.head_dim))[:, part].flatten(0, 1)
    return t.chunk(3, dim=0)[part]


def to_hf(c, disk_name, parts):
    """The inverse of from_hf: {None: tensor} or {0: q, 1: k, 2: v} -> the tensor on disk."""
    if None in parts:
        t = parts[None]
    elif c.family == "gpt_neox":
        by_head = [parts[i].unflatten(0, (c.n_heads, c.head_dim)) for i in range(3)]
        t = torch.stack(by_head, 1).flatten(0, 2)
    else:
        t = torch.cat([parts[i] for i in range(3)])
    return t.t() if is_transposed(c, disk_name, t.shape) else t


def is_transposed(c, disk_name, shape):
    """Whether a tensor on disk is ours transposed: GPT-2's linear maps, which are Conv1D there."""
    return c.family == "gpt2" and len(shape) == 2 and ".h." in disk_name

"""
Load and save a Transformer as a Hugging Face directory: what each tensor is called on disk, and how it lies there.
"""
import dataclasses
import json
import os

import torch

from engine.hf_config import FAMILIES, parse_config
from engine.hf_files import check_dtype, check_numbers, find_folder, open_bin, read_json, read_tensors, tensor_files
from errors import BadInput
from model import Transformer


def from_scratch(hf, head="lm", seed=0, dtype=torch.float32, device="cpu"):
    """A new model from a dict in the form of config.json, with normal weights of std 1 / sqrt(d) from seed."""
    model = Transformer(parse_config(hf), head)
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        with torch.no_grad():
            if p.dim() == 1:
                p.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
            else:
                # what writes to the residual stream is smaller, the deeper the model (GPT-2, section 2.3)
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


def from_pretrained(path, head="lm", dtype=torch.float32, device="cpu", seed=0, matrices=None, prepare=None):
    """
    Load a Hugging Face directory, or a model of the hub by name. head="scalar" reads the sequence-classification format
    (num_labels = 1); on a plain language model it draws a new head from seed and sets model.new_head. matrices: another
    dtype for the matrices. prepare: called with the model before it has any memory, for example to shard it.
    Raises BadInput when a file or tensor is missing, unexpected or of another shape, or the architecture is unknown.
    """
    folder = find_folder(path)
    file = os.path.join(folder, "config.json")
    config = parse_config(read_json(file), file)
    find_tensors(path, folder, config, head)  # all are there, before anything is made
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    with torch.device("meta"):  # no memory yet
        model = Transformer(config, head).to(dtype)
        for p in model.parameters():
            if matrices and p.dim() == 2:
                p.data = p.data.to(matrices)
    if prepare:
        prepare(model)
    model = model.to_empty(device=device)
    load_weights(model, path, folder, seed)
    return model


def load_weights(model, path, folder, seed=0):
    """Fill all parameters of a model from the weights in a folder; path: what messages call it. Raises BadInput."""
    found = find_tensors(path, folder, model.config, model.head)
    for name, p in model.named_parameters():
        file, disk_name, part = found[name]
        if file is None:
            draw_score_head(model, seed)
            continue
        # one tensor at a time into memory that is already there: never two copies of a model
        tensor = read_tensors(file, lambda f, n=disk_name: f.get_tensor(n))
        if part in (None, 0):
            check_numbers(tensor, p.dtype, file, disk_name)
        fill(p, from_hf(model.config, hf_name(model.config.family, name)[0], part, tensor))
        del tensor
    open_bin.cache_clear()


def save_pretrained(model, folder, weights=None):
    """
    Write config.json and model.safetensors as transformers would; a scalar head as sequence classification. weights: what
    model.weights() gives, gathered, when the model is sharded. Adapters are merged into the weights.
    """
    weights = weights or model.weights()
    if hasattr(model, "merge"):
        weights = model.merge(weights)
    write_pretrained(folder, model.config, model.head, weights)


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

"""
Models on another model's trunk: LoRA adapters, scalar heads, or both; and the files of adapters.

A trunk is a Transformer without its head. An Adapted has few parameters of its own; for all else it
calls its `base`, on whose trunk it stands. The trunk is in memory once, however many models stand
on it, and it belongs to the base: its parameters are in base.parameters(), and not in those of the
Adapted. Who owns which parameters in ppo.py:

lora=16: the policy is an Adapted. The reference is the policy's base: the same model without the
adapters, at no cost. The value model is an Adapted, too, on a trunk of its own.

    policy      Adapted      A and B of each linear map               trained
       | base
    reference   Transformer  embedding, layers, norm, LM head         frozen

lora=16, share_base=True: the reward model and the value model stand on the same trunk.

    policy      Adapted      A and B                                  trained
    reward      Adapted      A and B, scalar head: rm.py's adapter    frozen
    value       Adapted      A and B, scalar head                     trained
       | base (of all three)
    reference   Transformer  embedding, layers, norm, LM head         frozen

value_init="shared": the value model is a scalar head on the policy, and both losses train the
policy's parameters (response_states in loss.py). Without LoRA (the reference is then a Transformer
of its own):

    value       Adapted      scalar head                              trained
       | base
    policy      Transformer  embedding, layers, norm, LM head         trained

With LoRA, the value model's base is itself an Adapted:

    value       Adapted      scalar head                              trained
       | base
    policy      Adapted      A and B                                  trained
       | base
    reference   Transformer  embedding, layers, norm, LM head         frozen
"""
import dataclasses
import json
import os
import re

import torch
import torch.nn as nn
import torch.nn.functional as F

from engine.hf_config import ADAPTER_FIELDS, check_fields
from engine.hf_files import (
    check_dtype, check_numbers, read_headers, read_json, read_tensors, same_folder)
from engine.pretrained import (
    check_lora, draw_score_head, fill, from_hf, hf_name, read_shift, to_hf)
from errors import BadInput, shorten
from model import freeze, scalar_output

LINEAR_MAPS = ("q", "k", "v", "o", "gate", "up", "down")  # of a layer; not every family has all


class Adapted(nn.Module):
    """
    A model on the trunk of `base`, which is a Transformer or another Adapted. Its own parameters
    are LoRA adapters (`layers`), a scalar head (`score`), or both. It is called like a Transformer.
    """

    def __init__(self, base, head="lm", rank=0, alpha=None, targets="q,k,v,o,gate,up,down", seed=0):
        """
        rank 0: no adapters. Otherwise base is frozen, and its linear maps of these names get A and
        B of this rank, scaled by alpha / rank (alpha None: 2 rank). head: "lm" is the base's;
        "scalar" is a new one, which begins as the base's where that has one. Raises BadInput.
        """
        super().__init__()
        check_targets(targets, base.config.family)
        self.stand_on(base)
        self.config, self.head, self.new_head = dataclasses.replace(base.config), head, False
        self.shared_trunk = False
        self.lora = dict(rank=rank, alpha=2 * rank if alpha is None else alpha)
        self.layers = None
        if rank:
            freeze(base)
            self.layers = make_adapters(base, rank, self.lora["alpha"], targets.split(","), seed)
        if head == "scalar":
            self.score = nn.Linear(base.config.d_model, 1, bias=False, **own_kind(base))
            draw_score_head(self, seed)
            if base.head == "scalar":
                fill(self.score.weight, base.score.weight)
                self.new_head = base.new_head

    def stand_on(self, base):
        """
        Set self.base. A plain `self.base = base` would make base a child of this nn.Module, and its
        parameters would be in self.parameters(); but they belong to another model.
        """
        object.__setattr__(self, "base", base)

    def forward(self, *args, **kwargs):
        """trunk's arguments -> logits (B, T, V), or scalars (B, T) with the scalar head."""
        return self.output(self.trunk(*args, **kwargs))

    def trunk(self, *args, **kwargs):
        """
        Transformer.trunk, with this model's adapters. They are an argument and not a state of the
        trunk, so that a layer that the backward pass computes again gets the same adapter, even if
        another model has used the trunk in between.
        """
        if self.layers:
            kwargs["adapter"] = self.layers
        return self.base.trunk(*args, **kwargs)

    def output(self, x):
        """The head, on the trunk's states (..., d) -> logits (..., V), or scalars (...)."""
        if self.head == "scalar":
            return scalar_output(self.score, x)
        return self.base.output(x)

    def lm_head_weight(self):
        """(V, d)."""
        return self.base.lm_head_weight()

    @property
    def embed(self):
        return self.base.embed

    def recompute(self, on=True):
        self.base.recompute(on)

    def weights(self):
        """{our name: parameter} of the base, with this model's head; `merged` adds the adapters."""
        weights = self.base.weights()
        if self.head == "scalar":
            weights.pop("lm_head.weight", None)
            weights["score.weight"] = self.score.weight.detach()
        return weights

    def merged(self, name, W):
        """
        A whole tensor that weights() calls `name` -> what it is with the adapters: W + scale B A,
        in the CPU's memory. A model of 16 bits becomes one of float32 (merged_dtype).
        """
        if isinstance(self.base, Adapted):
            W = self.base.merged(name, W)
        if not self.layers:
            return W
        dtype = self.merged_dtype(W.dtype)
        found = re.fullmatch(r"layers\.(\d+)\.(\w+)\.weight", name)
        if found and found[2] in self.layers[int(found[1])]:
            a = self.layers[int(found[1])][found[2]]
            delta = a.scale * a.B.detach().double() @ a.A.detach().double()  # (out, in)
            W = W.double() + delta.to(W.device)
        return W.to(dtype).cpu()

    def merged_dtype(self, dtype):
        """
        The dtype of `merged`, for a tensor of this one: at least float32, if there are adapters.
        bfloat16 has steps of 1/256 of a weight, and would round away most of an adapter's changes,
        which are smaller.
        """
        if isinstance(self.base, Adapted):
            dtype = self.base.merged_dtype(dtype)
        return at_least_32_bits(dtype) if self.layers else dtype


class LoRA(nn.Module):
    """
    scale B A x (arXiv 2106.09685, eq. 3), which is added to a frozen linear map. A (r, in) and
    B (out, r) are trained.
    """

    def __init__(self, A, B, scale):
        super().__init__()
        self.A, self.B, self.scale = A, B, scale

    def forward(self, x):
        """x (..., in) -> (..., out)."""
        if not torch.is_autocast_enabled(x.device.type):  # autocast would cast x to 16 bits itself
            x = x.to(self.A.dtype)
        return self.widen(F.linear(x, self.A))

    def widen(self, z):
        """z = A x (..., r) -> (..., out)."""
        return F.linear(z, self.B) * self.scale


def make_adapters(base, rank, alpha, targets, seed):
    """
    A ModuleList: each layer's {name: LoRA}. B is 0, so that nothing changes yet; A is uniform in
    -1 / sqrt(in) ... 1 / sqrt(in), as in peft. Where q, k and v are one tensor on disk they share
    A, because peft sees the one tensor, and shall be able to read the adapter.
    """
    fused = is_fused(base.config.family)
    generator = torch.Generator().manual_seed(seed)
    layers = nn.ModuleList(nn.ModuleDict() for _ in base.layers)
    for adapters, layer in zip(layers, base.layers, strict=True):
        for name in LINEAR_MAPS:
            if name not in targets or not hasattr(layer, name):
                continue
            linear = getattr(layer, name)
            if not (fused and name in ("k", "v")):  # these take q's A
                A = torch.empty(rank, linear.in_features).uniform_(-1, 1, generator=generator)
                A = nn.Parameter((A * linear.in_features**-0.5).to(**own_kind(base)))
            B = nn.Parameter(torch.zeros(linear.out_features, rank, **own_kind(base)))
            adapters[name] = LoRA(A, B, alpha / rank)
    return layers


def check_targets(targets, family):
    """Raise BadInput unless `targets`, such as "q,v", names linear maps that can be adapted."""
    wanted = set(targets.split(","))
    error = f"LoRA targets {targets!r}: wanted some of {', '.join(LINEAR_MAPS)}"
    if wanted - set(LINEAR_MAPS):
        raise BadInput(error)
    if is_fused(family) and 0 < len(wanted & {"q", "k", "v"}) < 3:
        raise BadInput(f"{error}; in {family} q, k and v are one, so take all three or none")


def is_fused(family):
    """Whether q, k and v are one tensor on disk."""
    return family in ("gpt2", "gpt_neox")


def own_kind(base):
    """Dtype and device of what an Adapted on this base has of its own: trained in 32 bits."""
    weight = base.embed.weight
    return dict(dtype=at_least_32_bits(weight.dtype), device=weight.device)


def at_least_32_bits(dtype):
    return torch.promote_types(dtype, torch.float32)


# --------------------------------------------------------------------------------------------------
# files, in peft's format


def adapter_tensors(model):
    """
    {peft's name: [(parameter, part)]} of an Adapted's own tensors. part: which part of the tensor
    on disk the parameter is, as hf_name has it; None: all of it.
    """
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
    """
    Write adapter_config.json and adapter_model.safetensors of an Adapted, for peft and for
    load_adapter. base: the path of the model that it stands on.
    """
    from safetensors.torch import save_file

    os.makedirs(folder, exist_ok=True)
    tensors = adapter_tensors(model)
    # "....self_attn.q_proj.lora_A.weight" -> "self_attn.q_proj"
    modules = {".".join(name.split(".")[-4:-2]) for name in tensors
               if name.endswith(".lora_A.weight")}
    settings = dict(
        peft_type="LORA",
        task_type="CAUSAL_LM" if model.head == "lm" else "SEQ_CLS",
        inference_mode=True,
        base_model_name_or_path=base,
        r=model.lora["rank"],
        lora_alpha=model.lora["alpha"],
        lora_dropout=0.0,
        bias="none",
        target_modules=sorted(modules),
        fan_in_fan_out=model.config.family == "gpt2",
        modules_to_save=["score"] if model.head == "scalar" else None)
    with open(os.path.join(folder, "adapter_config.json"), "w", encoding="utf-8") as f:
        json.dump(settings, f, indent=2)
    whole = {}
    for name, parts in tensors.items():
        t = to_hf(model.config, "", {part: p.detach() for p, part in parts})
        whole[name] = t.cpu().contiguous()
    # one note: safetensors writes several in an order that changes from process to process, and
    # the same adapter must be the same bytes; peft needs none
    notes = {"format": "pt"} if model.head == "lm" else {
        "score_shift": str(model.config.score_shift)}
    save_file(whole, os.path.join(folder, "adapter_model.safetensors"), metadata=notes)


def load_adapted(base, folder, head="lm", base_path=""):
    """
    An Adapted from an adapter's folder, which save_adapter or peft has written. base: the model
    that the adapter was trained on, loaded from base_path; another model is refused, as far as
    paths and names tell. Raises BadInput.
    """
    file = os.path.join(folder, "adapter_config.json")
    if not os.path.isfile(file):
        raise BadInput(f"{folder}: no adapter_config.json in this folder; it is not a LoRA adapter")
    settings = read_json(file)
    check_fields(settings, ADAPTER_FIELDS, file)
    trained_on = settings.get("base_model_name_or_path")
    if trained_on and base_path and not same_model(trained_on, base_path):
        raise BadInput(f"{folder}: this adapter was trained on {trained_on}, not on {base_path}, "
                       "where it would be noise")
    check_lora(settings, file)
    if settings.get("use_rslora"):
        raise BadInput(f"{file}: use_rslora is not supported on a shared trunk; leave share_base "
                       "out, and the adapter is merged into a model of its own")
    modules = settings.get("target_modules") or []
    if not all(isinstance(m, str) and m for m in modules):
        raise BadInput(f"{file}: target_modules = {shorten(modules)}; wanted the names of linear "
                       "maps")
    # the rank in adapter_config.json is compared with the tensors before an adapter of it is made
    weights = os.path.join(folder, "adapter_model.safetensors")
    for name, (shape, _) in read_headers(weights).items():
        if name.endswith("lora_A.weight") and shape[:1] != (settings.get("r"),):
            raise BadInput(f"{weights}: {name} is {shape}, but {file} says r = {settings.get('r')}")

    def is_target(name):
        disk_name, _ = hf_name(base.config.family, f"layers.0.{name}.weight")
        return any(disk_name.removesuffix(".weight").endswith(m) for m in modules)

    targets = [name for name in LINEAR_MAPS if hasattr(base.layers[0], name) and is_target(name)]
    if targets:
        rank, alpha = settings.get("r", 0), settings.get("lora_alpha")
        model = Adapted(base, head, rank, alpha, ",".join(targets))
    else:  # a head without adapters
        model = Adapted(base, head, 0, settings.get("lora_alpha"))
    load_adapter(model, folder)
    return model


def same_model(path, other):
    """
    Whether two paths mean the same model: two folders here must be the same folder; of folders
    elsewhere and names on the hub, the last parts must be equal.
    """
    if os.path.isdir(path) and os.path.isdir(other):
        return same_folder(path, other)
    return os.path.basename(path.rstrip("/")) == os.path.basename(other.rstrip("/"))


def load_adapter(model, folder):
    """Fill an Adapted from the files of save_adapter or peft. Raises BadInput where they differ."""
    file = os.path.join(folder, "adapter_model.safetensors")
    found, notes = read_tensors(file, lambda f: ({name: f.get_tensor(name) for name in f.keys()},
                                                 f.metadata() or {}))
    settings = read_json(os.path.join(folder, "adapter_config.json"))
    tensors = adapter_tensors(model)
    if tensors.keys() != found.keys():
        raise BadInput(f"{file}: it has {len(found)} tensors, not the {len(tensors)} of this "
                       "model's adapter (the first that differs is "
                       f"{min(tensors.keys() ^ found.keys())}); its LoRA targets must be the same")
    if model.layers and settings.get("lora_alpha") != model.lora["alpha"]:
        raise BadInput(f"{folder}: its lora_alpha is {settings.get('lora_alpha')}, not "
                       f"{model.lora['alpha']}; give this one")
    for name, parts in tensors.items():
        for p, part in parts:
            check_dtype(str(found[name].dtype), file, name)
            check_numbers(found[name], p.dtype, file, name)
            t = from_hf(model.config, "", part, found[name])
            if t.shape != p.shape:
                raise BadInput(f"{file}: {name} is {tuple(t.shape)}, wanted {tuple(p.shape)}; is "
                               "its rank the same?")
            fill(p, t)
    read_shift(model.config, notes, file)
    model.new_head = False

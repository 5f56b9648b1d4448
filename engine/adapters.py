"""
LoRA adapters, and models that stand on another model's trunk.
"""
import dataclasses
import json
import os

import torch
import torch.nn as nn
import torch.nn.functional as F

from engine.hf_config import ADAPTER_FIELDS, FINITE, check_fields
from engine.hf_files import check_dtype, check_numbers, read_headers, read_json, read_tensors
from engine.pretrained import draw_score_head, fill, from_hf, hf_name, to_hf
from errors import BadInput, shorten
from model import Transformer, freeze


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
            draw_score_head(self, seed)
            if base.head == "scalar":
                fill(self.score.weight, base.score.weight)
                self.new_head = base.new_head

    forward, output = Transformer.forward, Transformer.output

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

        weights = dict(weights)
        if hasattr(self.base, "merge"):
            weights = self.base.merge(weights)
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

"""
The keys lora and share_base: models with LoRA adapters on another model's trunk; and the files of
adapters. An Adapted has few parameters of its own: the trunk's belong to `base`. ppo.py with
lora=16 and share_base=True:

    policy      Adapted   A and B                                  trained
    reward      Adapted   A and B, scalar head: rm.py's adapter    frozen
    value       Adapted   A and B, scalar head                     trained
       | base (of all three)
    reference   Model     embedding, layers, norm, LM head         frozen, in memory once

Without share_base the reward and the value model have trunks of their own.

How an adapter gets into transformers' model: each linear map with an adapter has a hook. It adds
scale B A x of the Adapted that is in use (Model.active) to the map's output.
"""
import contextlib
import json
import os

import torch
import torch.nn as nn
import torch.nn.functional as F

from configurator import of_model
from configurator import BadInput, say, shorten
from folders import read_json, same_folder
from load import has_experts
from model import at_least_float32, freeze, is_linear
from trunk import OnTrunk

# a mixture's modules that choose experts, or weigh them: linear maps, or with such maps inside
ROUTERS = {"gate", "router", "router_gate", "shared_expert_gate"}


class Adapted(OnTrunk):
    """
    A model on the trunk of `base`, which is a Model or itself on a trunk. Its own parameters are
    LoRA adapters (`adapters`), and a scalar head (`score`) if it has one.
    """

    def __init__(self, base, head="lm", rank=0, alpha=None, targets="", seed=0, names=None):
        """
        rank 0: no adapters. Otherwise base is frozen, and its linear maps get A and B of this rank,
        scaled by alpha / rank (alpha None: 2 rank). targets: the maps, see adaptable. names: or
        their whole names. head: "lm" is the base's; "scalar" a copy of the base's, if it
        has one, or a new one. Raises BadInput.
        """
        super().__init__(base, head, seed)
        self.lora = dict(rank=rank, alpha=2 * rank if alpha is None else alpha)
        self.adapters = nn.ModuleDict()  # {name of the linear map in the trunk, with / for .: LoRA}
        if rank:
            freeze(base)
            generator = torch.Generator().manual_seed(seed)
            for name in names or adaptable(base, targets):
                self.add_adapter(name, generator)

    def add_adapter(self, name, generator):
        """
        Give the linear map of this name A and B. B is 0, so the output does not change yet; A is
        uniform in -1 / sqrt(in) ... 1 / sqrt(in), as in peft.
        """
        owner, key = self.owner(), name.replace(".", "/")
        linear = owner.hf.base_model.get_submodule(name)
        if isinstance(linear, nn.Linear):  # in 4 bits its weight has another shape
            n_out, n_in = linear.out_features, linear.in_features
        else:
            n_in, n_out = linear.weight.shape
        A = torch.empty(self.lora["rank"], n_in).uniform_(-1, 1, generator=generator) * n_in**-0.5
        B = torch.zeros(n_out, self.lora["rank"])
        own = dict(dtype=at_least_float32(linear.weight[:0]).dtype, device=linear.weight.device)
        self.adapters[key] = LoRA(A.to(**own), B.to(**own), self.lora["alpha"] / self.lora["rank"])
        if not getattr(linear, "has_hook", False):
            linear.has_hook = True
            linear.register_forward_hook(
                lambda linear, inputs, y: add_active(owner.active, key, inputs[0], y))

    def in_use(self):
        """The block in which the trunk computes with these adapters, if there are any."""
        return self.owner().reading_with(self) if self.adapters else contextlib.nullcontext()

    def states(self, tokens):
        with self.in_use():
            return self.base.states(tokens)

    def next_logits(self, *args):
        with self.in_use():
            return self.base.next_logits(*args)

    def merged(self, name, W):
        """
        W, a whole tensor of self.hf with this name -> W + scale B A, in at least 32 bits: bfloat16
        has steps of 1/256 of a weight, and most of an adapter's changes are smaller.
        """
        W = self.base.merged(name, W)
        if not self.adapters:
            return W
        W = at_least_float32(W)
        module = name.removeprefix(f"{self.hf.base_model_prefix}.").removesuffix(".weight")
        key = module.replace(".", "/")
        if key in self.adapters and name.endswith(".weight"):
            linear = self.hf.base_model.get_submodule(module)
            W = W + as_linear(linear, self.adapters[key].product()).to(W)
        return W

    def save_own(self, folder):
        """Write the adapters, and the head, as peft does."""
        save_adapter(self, folder, self.path)

    def fill_own(self, folder):
        fill_adapter(self, folder)

    def warning(self):
        """A warning for users of the adapter's files; or ""."""
        if not peft_misreads(self):
            return ""
        return ("peft reads other numbers from it (MLPs beside experts); give others the merged "
                "model, or train with --lora=16:32:q+k+v+o")


def check_lora(system, trained, share_base, value_init):
    """Raise BadInput where keys do not go together. trained: the names of the trained models."""
    for name in trained:
        is_head = name == "value" and value_init == "shared"  # on the policy
        if is_head and "value=" in system.lora.replace(" ", ""):
            raise BadInput("value_init = 'shared': the value model is a head on the policy, with "
                            "no adapter; leave value out of lora")
        if share_base and not is_head and not of_model(system.lora, name):
            raise BadInput(f"share_base: {name} stands on the frozen trunk, so it needs an "
                            "adapter; type --lora=16")


def adapt(base, text, head="lm", seed=0):
    """An Adapted on a model, by the key lora: RANK[:ALPHA[:TARGETS]]."""
    rank, alpha, targets = [*text.split(":"), "", ""][:3]
    return Adapted(base, head, int(rank), float(alpha or 2 * int(rank)), targets.replace("+", ","),
                   seed)


class LoRA(nn.Module):
    """
    scale B A x (arXiv 2106.09685, eq. 3), which is added to a frozen linear map. A (r, in) and
    B (out, r) are trained.
    """

    def __init__(self, A, B, scale):
        super().__init__()
        self.A, self.B, self.scale = nn.Parameter(A), nn.Parameter(B), scale

    def forward(self, x):
        """x (..., in) -> (..., out)."""
        if not torch.is_autocast_enabled(x.device.type):  # autocast would cast x to 16 bits itself
            x = x.to(self.A.dtype)
        return F.linear(F.linear(x, self.A), self.B) * self.scale

    def product(self):
        """scale B A, (out, in), computed in float64."""
        return self.scale * self.B.detach().double() @ self.A.detach().double()


def add_active(active, key, x, y):
    """The hook of a linear map: its output y (..., out) for x (..., in), plus the adapter's."""
    if active is None or key not in active.adapters:
        return None  # y stays as it is
    return y + active.adapters[key](x).to(y.dtype)


def as_linear(linear, matrix):
    """A matrix (out, in) in the layout of the map's weight, or back: Conv1D's is transposed."""
    return matrix if isinstance(linear, nn.Linear) else matrix.t()


def adaptable(base, targets):
    """
    The names, in the trunk, of the linear maps that get an adapter. targets: such as "q,v" for
    q_proj and v_proj, or the model's own names, "c_attn"; "": all but routers, which need a name
    that fits nothing else, "router.gate". Raises BadInput.
    """
    layers = set(base.layers())
    names = [f"{name}.{inner}" for name, layer in base.hf.base_model.named_modules()
             if layer in layers for inner, module in layer.named_modules() if is_linear(module)]
    names = [name for name in names
             if f"{base.hf.base_model_prefix}.{name}.weight" not in base.unread]
    if has_experts(base.hf.config):
        say("lora: the weights of the experts stay frozen, without an adapter")
    routers = {name for name in names if ROUTERS & set(name.split("."))}
    matching = set()
    for target in filter(None, targets.split(",")):
        # layers.0.self_attn.q_proj is q_proj, q, or self_attn.q_proj
        fits = {n for n in names if f".{n}".endswith((f".{target}", f".{target}_proj"))}
        if not fits:
            known = sorted({name.rpartition(".")[2] for name in names})
            raise BadInput(f"LoRA target {target!r}: this model has no such linear map; it has "
                           f"{', '.join(known)}")
        matching |= fits - routers or fits  # "gate" is gate_proj, and a router where that is all
    matching = matching or set(names) - routers
    if not matching:
        raise BadInput(f"{base.path}: LoRA finds no linear maps in the layers of a "
                       f"{type(base.hf).__name__}; leave lora out")
    return [name for name in names if name in matching]


# --------------------------------------------------------------------------------------------------
# files, in peft's format

# peft's settings with which an adapter is scale B A x: {key: the allowed values; None: all}
PLAIN = dict.fromkeys((
    "auto_mapping", "base_model_name_or_path", "exclude_modules", "fan_in_fan_out",
    "inference_mode", "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout",
    "megatron_core", "modules_to_save", "peft_version", "qalora_group_size", "r", "revision",
    "target_modules", "task_type", "use_rslora"))
PLAIN |= dict(peft_type=["LORA"], bias=["none"], init_lora_weights=[True, "gaussian", "orthogonal"])


def adapter_tensors(model):
    """{peft's name: parameter} of an Adapted's own tensors."""
    prefix, tensors = f"base_model.model.{model.hf.base_model_prefix}", {}
    for key, a in model.adapters.items():
        name = f"{prefix}.{key.replace('/', '.')}"
        tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"] = a.A, a.B
    if model.head == "scalar":
        tensors["base_model.model.score.weight"] = model.score.weight
    return tensors


def save_adapter(model, folder, base=""):
    """
    Write adapter_config.json and adapter_model.safetensors of an Adapted, for peft and for
    load_adapted. base: the path of the model with the trunk.
    """
    from safetensors.torch import save_file

    os.makedirs(folder, exist_ok=True)
    settings = dict(
        peft_type="LORA",
        task_type="CAUSAL_LM" if model.head == "lm" else "SEQ_CLS",
        base_model_name_or_path=base,
        r=model.lora["rank"],
        lora_alpha=model.lora["alpha"],
        # "layers/0/self_attn/q_proj" -> "self_attn.q_proj"
        target_modules=sorted({".".join(key.split("/")[-2:]) for key in model.adapters}),
        fan_in_fan_out=any(type(m).__name__ == "Conv1D" for m in model.hf.base_model.modules()),
        modules_to_save=["score"] if model.head == "scalar" else None)
    with open(os.path.join(folder, "adapter_config.json"), "w", encoding="utf-8") as f:
        json.dump(settings, f, indent=2)
    # only one note: the same adapter must have the same bytes, and safetensors writes several in an
    # order that changes from process to process. peft needs none
    notes = {"format": "pt"} if model.head == "lm" else {"score_shift": str(model.score_shift)}
    tensors = {name: p.detach().cpu().contiguous() for name, p in adapter_tensors(model).items()}
    save_file(tensors, os.path.join(folder, "adapter_model.safetensors"), metadata=notes)


def peft_misreads(model):
    """Whether peft 0.21.2 confuses an Adapted's adapters on shared or dense MLPs with experts'."""
    from transformers import conversion_mapping

    experts = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
    kind = conversion_mapping._MODEL_TO_CONVERSION_PATTERN.get(model.hf.config.model_type)
    return kind in ("qwen2_moe", "mixtral") and any(k.endswith(experts) for k in model.adapters)


def read_adapter(folder):
    """
    (settings, tensors, score_shift or None) of an adapter's folder, written by save_adapter or
    peft. Raises BadInput where a file is broken, or the adapter is more than scale B A x.
    """
    from safetensors import SafetensorError, safe_open

    file = os.path.join(folder, "adapter_config.json")
    settings = dict(peft_type="LORA", r=8, lora_alpha=8) | read_json(file)
    odd = [key for key, value in settings.items()
           if value and (key not in PLAIN or PLAIN[key] and value not in PLAIN[key])]
    odd += [key for key in ("r", "lora_alpha")
            if type(settings[key]) not in (int, float) or not 0 <= settings[key] < 1e9]
    if odd:
        raise BadInput(f"{file}: {shorten(odd[0])} = {shorten(settings[odd[0]])} is not supported; "
                       "merge the adapter with peft, and give the merged model")
    file = os.path.join(folder, "adapter_model.safetensors")
    try:
        with safe_open(file, framework="pt") as f:
            tensors = {name: f.get_tensor(name) for name in f.keys()}
            shift = (f.metadata() or {}).get("score_shift")
        return settings, tensors, None if shift is None else float(shift)
    except (OSError, SafetensorError, ValueError) as e:
        raise BadInput(f"{file}: not a readable adapter ({e}); save it again") from e


def load_adapted(base, folder, head="lm", base_path=""):
    """
    An Adapted from an adapter's folder. base: the model that the adapter was trained on, loaded
    from base_path. Raises BadInput, also if the adapter was trained on another folder's model.
    """
    settings, tensors, _ = read_adapter(folder)
    trained_on = str(settings.get("base_model_name_or_path") or "")
    both_here = os.path.isdir(trained_on) and os.path.isdir(base_path)
    if both_here and not same_folder(trained_on, base_path):
        raise BadInput(f"{folder}: this adapter was trained on {trained_on}, not on {base_path}; "
                       "give the model that it was trained on")
    prefix = f"base_model.model.{base.hf.base_model_prefix}."
    names = [name.partition(".lora_A.")[0].removeprefix(prefix)
             for name in tensors if ".lora_A." in name]
    known = {name for name, m in base.hf.base_model.named_modules() if is_linear(m)}
    if set(names) - known:
        raise BadInput(f"{folder}: the adapter is for {min(set(names) - known)!r}, which this "
                       "model does not have as a linear map; was it trained on it?")
    rank, alpha = int(settings["r"]), settings["lora_alpha"]
    if settings.get("use_rslora"):  # then peft scales by alpha / sqrt(rank)
        alpha *= rank**0.5
    model = Adapted(base, head, rank if names else 0, alpha, names=names)
    fill_adapter(model, folder)
    return model


def fill_adapter(model, folder):
    """Fill an Adapted from the files of save_adapter or peft. Raises BadInput where they differ."""
    _, found, shift = read_adapter(folder)
    own = adapter_tensors(model)
    for name in sorted(own.keys() | found.keys()):
        if name not in own or name not in found or own[name].shape != found[name].shape:
            raise BadInput(f"{folder}: its {name} is not that of this model with r = "
                           f"{model.lora['rank']}; was the adapter trained on it?")
        if not found[name].isfinite().all():
            raise BadInput(f"{folder}: tensor {name!r} holds NaN or infinite numbers")
        own[name].data.copy_(found[name])
    model.score_shift = model.score_shift if shift is None else shift
    model.new_head = False


@torch.no_grad()
def merge(model, adapter):
    """Put the adapter of a folder into the weights of the model that it was trained on."""
    has_head = "base_model.model.score.weight" in read_adapter(adapter)[1]
    if has_head and model.head == "lm":
        raise BadInput(f"{adapter}: this adapter has a score head: it makes a reward model, not a "
                       "language model")
    adapted = load_adapted(model, adapter, "scalar" if has_head else "lm")
    for name, p in model.hf.named_parameters():
        p.copy_(adapted.merged(name, p))
    if has_head:
        model.hf.score.weight.copy_(adapted.score.weight)
        model.score_shift, model.new_head = adapted.score_shift, False

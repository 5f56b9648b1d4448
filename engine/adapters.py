"""
Models on another model's trunk: LoRA adapters, scalar heads, or both; and the files of adapters.

An Adapted has few parameters of its own; for all else it calls its `base`, on whose trunk it
stands. The trunk is in memory once, however many models stand on it, and it belongs to the base:
its parameters are in base.parameters(), and not in those of the Adapted. Who owns which parameters
in ppo.py:

lora=16: the policy is an Adapted. The reference is the policy's base: the same model without the
adapters, at no cost. The value model is an Adapted, too, on a trunk of its own.

    policy      Adapted   A and B of each linear map               trained
       | base
    reference   Model     embedding, layers, norm, LM head         frozen

lora=16, share_base=True: the reward model and the value model stand on the same trunk.

    policy      Adapted   A and B                                  trained
    reward      Adapted   A and B, scalar head: rm.py's adapter    frozen
    value       Adapted   A and B, scalar head                     trained
       | base (of all three)
    reference   Model     embedding, layers, norm, LM head         frozen

value_init="shared": the value model is a scalar head on the policy, and both losses train the
policy's parameters: each of them runs the trunk, forward and backward, and the gradients add up.

    value       Adapted   scalar head                              trained
       | base
    policy      Model     embedding, layers, norm, LM head         trained
                (or an Adapted, whose base is the reference)

How an adapter gets into transformers' model: each linear map that may have one has a hook, which
adds scale B A x to what the map gives, of the Adapted that is reading now (Model.active). Without
one it adds nothing.
"""
import copy
import json
import os

import torch
import torch.nn as nn
import torch.nn.functional as F

from folders import model_folders, read_json, same_folder
from errors import BadInput, say, shorten
from model import (Model, at_least_float32, auto_class, check_head, check_one_score,
                   draw_score_head, freeze, has_experts, load_model)

ROUTERS = ("gate", "router", "shared_expert_gate")  # of mixtures: they choose experts


class Adapted(Model):
    """
    A model on the trunk of `base`, which is a Model or another Adapted. Its own parameters are LoRA
    adapters (`adapters`), a scalar head (`score`), or both. It is called like any Model.
    """

    def __init__(self, base, head="lm", rank=0, alpha=None, targets="", seed=0, names=None):
        """
        rank 0: no adapters. Otherwise base is frozen, and its linear maps get A and B of this rank,
        scaled by alpha / rank (alpha None: 2 rank). targets: which maps, such as "q,v"; "": all.
        names: their whole names instead. head: "lm" is the base's; "scalar" is a new one, which
        begins as the base's where that has one. Raises BadInput.
        """
        nn.Module.__init__(self)
        hf = base.hf if head == "lm" else scalar_shell(base)
        # not attributes that nn.Module would register: they are the base's own
        self.__dict__.update(hf=hf, base=base)
        self.head, self.path, self.file_dtype = head, base.path, base.file_dtype
        self.score_shift, self.new_head, self.offloaded = 0.0, False, False
        self.lora = dict(rank=rank, alpha=2 * rank if alpha is None else alpha)
        self.adapters = nn.ModuleDict()  # {name of the linear map in the trunk, with / for .: LoRA}
        if rank:
            freeze(base)
            names = names or adaptable(base, targets)
            self.add_adapters(names, seed)
        if head == "scalar":
            self.score = hf.score
            if base.head == "scalar":
                self.score.weight.data.copy_(base.hf.score.weight)
                self.score_shift, self.new_head = base.score_shift, base.new_head
            else:
                draw_score_head(self, seed)

    def add_adapters(self, names, seed):
        """
        B is 0, so that nothing changes yet; A is uniform in -1 / sqrt(in) ... 1 / sqrt(in), as in
        peft.
        """
        generator = torch.Generator().manual_seed(seed)
        owner = self.owner()
        for name in names:
            linear = owner.hf.base_model.get_submodule(name)
            n_in, n_out = sizes_of(linear)
            A = torch.empty(self.lora["rank"], n_in).uniform_(-1, 1, generator=generator)
            own = dict(dtype=at_least_float32(linear.weight[:0]).dtype, device=linear.weight.device)
            A = nn.Parameter((A * n_in**-0.5).to(**own))
            B = nn.Parameter(torch.zeros(n_out, self.lora["rank"], **own))
            key = name.replace(".", "/")
            self.adapters[key] = LoRA(A, B, self.lora["alpha"] / self.lora["rank"])
            if not getattr(linear, "has_hook", False):
                linear.has_hook = True
                linear.register_forward_hook(
                    lambda linear, args, y, key=key: add_adapter(owner.active, key, args[0], y))

    def owner(self):
        """The Model whose trunk it stands on in the end."""
        return self.base.owner() if isinstance(self.base, Adapted) else self.base

    def states(self, tokens):
        if not self.adapters:
            return self.base.states(tokens)
        with self.owner().reading_with(self):
            return self.base.states(tokens)

    def next_logits(self, *args):
        if not self.adapters:
            return self.base.next_logits(*args)
        with self.owner().reading_with(self):
            return self.base.next_logits(*args)

    def merged(self, name, W):
        """
        A whole tensor that self.hf calls `name` -> what it is with the adapters: W + scale B A, in
        at least 32 bits: bfloat16 has steps of 1/256 of a weight, and would round away most of an
        adapter's changes, which are smaller.
        """
        if isinstance(self.base, Adapted):
            W = self.base.merged(name, W)
        if not self.adapters:
            return W
        W = at_least_float32(W)
        module = name.removeprefix(f"{self.hf.base_model_prefix}.").removesuffix(".weight")
        key = module.replace(".", "/")
        if key in self.adapters and name.endswith(".weight"):
            linear = self.hf.base_model.get_submodule(module)
            W = W + oriented(linear, self.adapters[key].product()).to(W)
        return W


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
        return F.linear(F.linear(x, self.A), self.B) * self.scale

    def product(self):
        """scale B A, (out, in), computed in float64."""
        return self.scale * self.B.detach().double() @ self.A.detach().double()


def add_adapter(active, key, x, y):
    """What a linear map's hook makes of its output y (..., out) for x (..., in)."""
    if active is None or key not in active.adapters:
        return None  # y stays as it is
    return y + active.adapters[key](x).to(y.dtype)


def scalar_shell(base):
    """A sequence classifier of transformers with a new head, on base's trunk, not its own."""
    config = copy.deepcopy(base.hf.config)
    check_one_score(config, base.path)
    with torch.device("meta"):  # the trunk that is made here gives way to base's
        hf = auto_class("scalar").from_config(config)
    check_head(hf, base.path)
    setattr(hf, hf.base_model_prefix, base.hf.base_model)
    weight = base.hf.get_input_embeddings().weight
    hf.score = nn.Linear(hf.score.in_features, 1, bias=False, device=weight.device,
                         dtype=torch.promote_types(weight.dtype, torch.float32))
    return hf.eval()


def is_linear(module):
    """Whether an adapter can be added to a module. GPT-2's Conv1D is a linear map, too."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def sizes_of(linear):
    """(in, out) of a linear map. Conv1D has its matrix as (in, out), nn.Linear as (out, in)."""
    shape = tuple(linear.weight.shape)
    return shape[::-1] if isinstance(linear, nn.Linear) else shape


def oriented(linear, delta):
    """scale B A, (out, in), as the linear map has its matrix."""
    return delta if isinstance(linear, nn.Linear) else delta.t()


def adaptable(base, targets):
    """
    The names, within the trunk, of the linear maps that get an adapter. targets: such as "q,v" for
    q_proj and v_proj, or as the model calls them, "c_attn"; "": all. Raises BadInput.
    """
    layers = set(base.layers())
    names = [f"{name}.{inner}" for name, layer in base.hf.base_model.named_modules()
             if layer in layers for inner, module in layer.named_modules() if is_linear(module)]
    names = [name for name in names if name.rpartition(".")[2] not in ROUTERS]
    if has_experts(base.hf.config):
        say("lora: the experts' own weights are no linear maps to an adapter, and stay frozen")
    wanted = [target for target in targets.split(",") if target]
    for target in wanted:
        if not any(is_named(name, target) for name in names):
            there = sorted({name.rpartition(".")[2] for name in names})
            raise BadInput(f"LoRA target {target!r}: this model has no such linear map; it has "
                           f"{', '.join(there)}")
    return [name for name in names if not wanted or any(is_named(name, t) for t in wanted)]


def is_named(name, target):
    """Whether layers.0.self_attn.q_proj is called q_proj, q, or self_attn.q_proj."""
    return f".{name}".endswith((f".{target}", f".{target}_proj"))


# --------------------------------------------------------------------------------------------------
# files, in peft's format

# settings of adapters that change the scale, the base or more than B A does
UNSUPPORTED = ("use_dora", "alpha_pattern", "rank_pattern", "lora_bias", "use_qalora", "use_bdlora",
               "layer_replication", "target_parameters", "trainable_token_indices", "arrow_config",
               "monteclora_config", "alora_invocation_tokens", "velora_config")


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
    load_adapted. base: the path of the model that it stands on.
    """
    from safetensors.torch import save_file

    os.makedirs(folder, exist_ok=True)
    tensors = adapter_tensors(model)
    # "...layers.0.self_attn.q_proj.lora_A.weight" -> "self_attn.q_proj"
    modules = {".".join(name.split(".")[-4:-2]) for name in tensors if ".lora_A." in name}
    conv = any(type(m).__name__ == "Conv1D" for m in model.hf.base_model.modules())
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
        fan_in_fan_out=conv,
        modules_to_save=["score"] if model.head == "scalar" else None)
    with open(os.path.join(folder, "adapter_config.json"), "w", encoding="utf-8") as f:
        json.dump(settings, f, indent=2)
    # one note: safetensors writes several in an order that changes from process to process, and
    # the same adapter must be the same bytes; peft needs none
    notes = {"format": "pt"} if model.head == "lm" else {"score_shift": str(model.score_shift)}
    save_file({name: p.detach().cpu().contiguous() for name, p in tensors.items()},
              os.path.join(folder, "adapter_model.safetensors"), metadata=notes)


def read_adapter(folder):
    """
    (settings, tensors, score_shift or None) of an adapter's folder, which save_adapter or peft has
    written. Raises BadInput where a file is broken, or the adapter does more than scale B A x.
    """
    from safetensors import SafetensorError, safe_open

    file = os.path.join(folder, "adapter_config.json")
    settings = {"peft_type": "LORA", "bias": "none", "lora_alpha": 8, "r": 0} | read_json(file)
    odd = [key for key in UNSUPPORTED if settings.get(key)]
    odd += ["peft_type"] * (settings["peft_type"] != "LORA")
    odd += ["bias"] * (settings["bias"] != "none")
    if settings.get("init_lora_weights") not in (None, True, False, "gaussian", "orthogonal"):
        odd.append("init_lora_weights")
    odd += [key for key in ("r", "lora_alpha")
            if type(settings[key]) not in (int, float) or not 0 <= settings[key] < 1e9]
    if odd:
        raise BadInput(f"{file}: {odd[0]} = {shorten(settings[odd[0]])} is not supported; merge "
                       "the adapter with peft, and give the merged model")
    file = os.path.join(folder, "adapter_model.safetensors")
    try:
        with safe_open(file, framework="pt") as f:
            tensors = {name: f.get_tensor(name).clone() for name in f.keys()}
            shift = (f.metadata() or {}).get("score_shift")
        shift = None if shift is None else float(shift)
    except (OSError, SafetensorError, ValueError) as e:
        raise BadInput(f"{file}: not a readable adapter ({e}); save it again") from e
    for name, t in tensors.items():
        if not t.isfinite().all():
            raise BadInput(f"{file}: tensor {name!r} holds NaN or infinite numbers")
    return settings, tensors, shift


def load_adapted(base, folder, head="lm", base_path=""):
    """
    An Adapted from an adapter's folder. base: the model that the adapter was trained on, loaded
    from base_path; another folder's is refused. Raises BadInput.
    """
    settings, tensors, _ = read_adapter(folder)
    trained_on, alpha = str(settings.get("base_model_name_or_path") or ""), settings["lora_alpha"]
    both_here = os.path.isdir(trained_on) and os.path.isdir(base_path)
    if both_here and not same_folder(trained_on, base_path):
        raise BadInput(f"{folder}: this adapter was trained on {trained_on}, not on {base_path}, "
                       "where it would be noise")
    prefix = f"base_model.model.{base.hf.base_model_prefix}."
    names = [name.partition(".lora_A.")[0].removeprefix(prefix) for name in tensors
             if ".lora_A." in name]
    there = {name for name, m in base.hf.base_model.named_modules() if is_linear(m)}
    if set(names) - there:
        raise BadInput(f"{folder}: the adapter is for {min(set(names) - there)!r}, which this "
                       "model does not have as a linear map; was it trained on it?")
    rank = int(settings["r"]) if names else 0
    if names and rank == 0:
        raise BadInput(f"{folder}: r = 0 in its adapter_config.json, and there are adapters")
    scale = alpha / max(rank, 1) ** (0.5 if settings.get("use_rslora") else 1.0)
    model = Adapted(base, head, rank, scale * rank, names=names)
    fill_adapter(model, folder)
    return model


def fill_adapter(model, folder):
    """Fill an Adapted from the files of save_adapter or peft. Raises BadInput where they differ."""
    _, found, shift = read_adapter(folder)
    tensors = adapter_tensors(model)
    shapes, wanted = ({name: tuple(t.shape) for name, t in x.items()} for x in (found, tensors))
    if shapes != wanted:
        name = min(name for name in shapes | wanted if shapes.get(name) != wanted.get(name))
        raise BadInput(f"{folder}: {name} of the adapter is {shapes.get(name, 'not there')}, and "
                       f"for this model {wanted.get(name, 'unknown')}; was it trained on it, with "
                       f"r = {model.lora['rank']}?")
    for name, p in tensors.items():
        p.data.copy_(found[name])
    model.score_shift = model.score_shift if shift is None else shift
    model.new_head = False


def load_whole(path, head="lm", dtype=torch.float32, device="cpu", seed=0):
    """
    load_model; or, where `path` is an adapter, the model that it was trained on, with the adapter
    merged into its weights. That model may be an adapter as well. Raises BadInput.
    """
    *adapters, folder = model_folders(path)
    model = load_model(folder, head, dtype, seed=seed)
    for adapter in reversed(adapters):
        merge_adapter(model, adapter)
    model.path = path
    return model.to(device)


@torch.no_grad()
def merge_adapter(model, folder):
    """
    Add what an adapter does to the weights of a whole Model, and take its head, if it has one.
    Raises BadInput where it does not fit.
    """
    has_head = "base_model.model.score.weight" in read_adapter(folder)[1]
    if has_head and model.head == "lm":
        raise BadInput(f"{folder}: this adapter has a score head: it makes a reward model, not a "
                       "language model")
    adapted = load_adapted(model, folder, "scalar" if has_head else "lm")
    for key, a in adapted.adapters.items():
        linear = model.hf.base_model.get_submodule(key.replace("/", "."))
        linear.weight.add_(oriented(linear, a.product()).to(linear.weight))
    if has_head:
        model.hf.score.weight.copy_(adapted.score.weight)
        model.score_shift, model.new_head = adapted.score_shift, False

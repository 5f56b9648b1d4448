"""
The keys lora and share_base: models with LoRA adapters on another model's trunk; and the files of
adapters. An Adapted has few parameters of its own: the trunk's belong to `base`. ppo.py with
lora=16 and share_base=True:

    policy      Adapted   A and B                                  trained
    reward      Adapted   A and B, scalar head: rm.py's adapter    frozen
    value       Adapted   A and B, scalar head                     trained
       | base (of all three)
    reference   Model     embedding, layers, norm, LM head         frozen, in memory once

Without share_base the reward and the value model have trunks of their own. From its first use on
each linear map of an adapter has a hook, which adds scale B A x to the map's output while the
Adapted is the one `in_use`.
"""
import contextlib
import glob
import json
import os
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F

from configurator import for_model, read_json, write_json
from errors import BadInput, optional, say, shorten
from load import read_model
from model import at_least_float32
from options.trunk import OnTrunk, layers_of

# a mixture's modules that choose experts, or weigh them: linear maps, or with such maps inside
ROUTERS = {"gate", "router", "router_gate", "shared_expert_gate"}
# linear maps of which a family takes the weights, and asks no hook: in Jamba always, in the others
# where their kernels are installed; there peft refuses adapters, too
UNASKED = dict(jamba="mamba.dt_proj", falcon_h1="mamba.out_proj", nemotron_h="mixer.out_proj")
in_use = None  # the Adapted that computes now


class LoRA(nn.Module):
    """
    scale B A x (arXiv 2106.09685, eq. 3), which is added to a frozen linear map. A (r, in) and
    B (out, r) are trained. B begins as 0, so the output does not change yet; A is uniform in
    -1 / sqrt(in) ... 1 / sqrt(in), as in peft.
    """

    def __init__(self, linear, rank, scale, generator):
        super().__init__()
        if isinstance(linear, nn.Linear):  # in 4 bits its weight has another shape
            n_out, n_in = linear.out_features, linear.in_features
        else:
            n_in, n_out = linear.weight.shape
        own = dict(dtype=at_least_float32(linear.weight[:0]).dtype, device=linear.weight.device)
        A = torch.empty(rank, n_in, dtype=own["dtype"]).uniform_(-1, 1, generator=generator)
        self.A = nn.Parameter((A * n_in**-0.5).to(**own))
        self.B = nn.Parameter(torch.zeros(n_out, rank, **own))
        self.scale = scale

    def forward(self, x):
        """x (..., in) -> (..., out)."""
        if not torch.is_autocast_enabled(x.device.type):  # autocast would cast x to 16 bits itself
            x = x.to(self.A.dtype)
        return F.linear(F.linear(x, self.A), self.B) * self.scale

    def product(self, linear):
        """scale B A in the layout of the map's weight (Conv1D's is transposed), in float64."""
        product = self.scale * self.B.detach().double() @ self.A.detach().double()  # (out, in)
        return product if isinstance(linear, nn.Linear) else product.t()


class Adapted(OnTrunk):
    """
    A model on the trunk of `base`, which is a Model or itself on a trunk. Its own parameters are
    LoRA adapters (`adapters`), and a scalar head (`score`) if it has one.
    """

    def __init__(self, base, head, rank, alpha, targets="", seed=0, names=None):
        """
        Linear maps of the frozen base get A and B of this rank, scaled by alpha / rank. targets:
        which maps, see adaptable; names: or their whole names. head: "lm" is the base's; "scalar" a
        copy of the base's, if it has one, or a new one. Raises BadInput.
        """
        super().__init__(base, head, seed)
        if head == base.head == "scalar":
            self.score.weight.data.copy_(base.hf.score.weight)
            self.score_shift, self.new_head = base.score_shift, base.new_head
        self.rank, self.alpha, self.folder = rank, alpha, ""  # folder: from which it was read
        self.adapters = nn.ModuleDict()  # {name of the linear map in the trunk, with / for .: LoRA}
        generator = torch.Generator().manual_seed(seed)
        for name in adaptable(base, targets) if names is None else names:
            linear, key = self.hf.base_model.get_submodule(name), name.replace(".", "/")
            self.adapters[key] = LoRA(linear, rank, alpha / rank, generator)
        self.hooks = []

    def hook(self):
        """Let the trunk's linear maps ask this adapter, from now on."""
        def added(linear, inputs, y, adapter):  # y (..., out) of the map, for x (..., in)
            return y + adapter(inputs[0]).to(y.dtype) if in_use is self else y

        for key, adapter in self.adapters.items():
            linear = self.hf.base_model.get_submodule(key.replace("/", "."))
            self.hooks.append(linear.register_forward_hook(partial(added, adapter=adapter)))

    def states(self, tokens):
        with using(self):
            return self.base.states(tokens)

    def next_logits(self, *args):
        with using(self):
            return self.base.next_logits(*args)

    def as_saved(self, name, W):
        """
        W, a whole tensor of self.hf with this name -> W + scale B A, in at least 32 bits: bfloat16
        has steps of 1/256 of a weight, and most of an adapter's changes are smaller.
        """
        W = super().as_saved(name, W)
        module = name.removeprefix(f"{self.hf.base_model_prefix}.").removesuffix(".weight")
        key, W = module.replace(".", "/"), at_least_float32(W)
        if key in self.adapters and name.endswith(".weight"):
            linear = self.hf.base_model.get_submodule(module)
            W = W + self.adapters[key].product(linear).to(W)
        return W

    def save_adapter(self, folder):
        """Write adapter_config.json and adapter_model.safetensors, for peft and load_adapted."""
        from safetensors.torch import save_file

        os.makedirs(folder, exist_ok=True)
        scalar = self.head == "scalar"
        settings = dict(
            peft_type="LORA", task_type="SEQ_CLS" if scalar else "CAUSAL_LM",
            base_model_name_or_path=self.path, r=self.rank, lora_alpha=self.alpha,
            # "layers/0/self_attn/q_proj" -> "self_attn.q_proj"
            target_modules=sorted({".".join(key.split("/")[-2:]) for key in self.adapters}),
            fan_in_fan_out=any(type(m).__name__ == "Conv1D" for m in self.hf.base_model.modules()),
            modules_to_save=["score"] if scalar else None)
        write_json(os.path.join(folder, "adapter_config.json"), settings)
        # only one note: the same adapter must have the same bytes, and safetensors writes several
        # in an order that changes from process to process. peft needs none
        notes = {"format": "pt"}
        tensors = {name: p.detach().cpu().contiguous() for name, p in adapter_tensors(self).items()}
        if scalar:
            tensors[SCORE] = tensors[SCORE] * self.unit
            known = dict(score_shift=self.score_shift)
            if self.tokenizer.skipped_id is not None:  # of a reward model in training
                known |= dict(pad_token_id=self.tokenizer.skipped_id)
            if self.tokenizer.chats:  # with which template it reads, and which keys
                known |= self.tokenizer.chats.keys
                self.tokenizer.save(folder)
            notes = {"score_shift": json.dumps(known)}
        save_file(tensors, os.path.join(folder, "adapter_model.safetensors"), metadata=notes)
        if why := peft_misreads(self):
            say(f"{folder}: peft reads other numbers from it, for {why}; give others the merged "
                "model")


@contextlib.contextmanager
def using(adapted):
    """In this block a trunk computes with the adapters of `adapted`, a model on it."""
    global in_use
    if not adapted.hooks:
        adapted.hook()
    before = in_use
    in_use = adapted
    try:
        yield
    finally:
        in_use = before


def remembering(checkpointed):
    """transformers' `checkpointed`, which computes a layer twice: both times with one adapter."""
    def run(layer, *args):
        adapted = in_use

        def again(*args):
            with using(adapted):
                return layer(*args)

        return checkpointed(again, *args)

    return run


def adapt(base, text, head="lm", seed=0):
    """An Adapted on a model, by the key lora: RANK[:ALPHA[:TARGETS]]."""
    rank, alpha, targets = [*text.split(":"), "", ""][:3]
    try:
        rank, alpha = int(rank), float(alpha or 2 * int(rank))
        if rank < 1:
            raise ValueError("no rank")
    except ValueError as e:
        raise BadInput(f"lora = {text!r}: wanted RANK[:ALPHA[:TARGETS]], such as 16:32:q+v, for "
                       "all trained models or as policy=16,value=8") from e
    for layer in base.recomputed:
        layer._gradient_checkpointing_func = remembering(layer._gradient_checkpointing_func)
    return Adapted(base, head, rank, alpha, targets, seed)


def value_adapter(policy, reward_model, value_init, system, seed):
    """share_base: the value model as an adapter and a head on the policy's trunk."""
    if policy.base is None:
        raise BadInput("share_base: all models stand on the frozen trunk of the policy, so it "
                       "needs an adapter; type --lora=16")
    value_model = adapt(policy.base, for_model(system.lora, "value"), "scalar", seed)
    if value_init != "policy":
        fill_adapter(value_model, reward_model.folder if value_init == "reward" else value_init)
    return value_model


def is_linear(module):
    """Whether an adapter can be added to a module. GPT-2's Conv1D is a linear map, too."""
    kind = type(module).__name__  # classes with these ends are made from nn.Linear, and do more
    more = kind.endswith(("Router", "GroupedLinear"))
    return kind == "Conv1D" or isinstance(module, nn.Linear) and not more


def adaptable(base, targets):
    """
    The names, in the trunk, of the linear maps that get an adapter. targets: such as "q+v" for
    q_proj and v_proj, or the model's own names, "c_attn"; "": all but routers, which need a name
    that fits nothing else, "router.gate". Raises BadInput.
    """
    layers = set(layers_of(base)) & set(base.hf.get_decoder().modules())  # no vision part
    names = [f"{name}.{inner}" for name, layer in base.hf.base_model.named_modules()
             if layer in layers for inner, module in layer.named_modules() if is_linear(module)
             and inner != UNASKED.get(base.config.model_type)]
    routers = {name for name in names if ROUTERS & set(name.split("."))}
    matching = set()
    for target in filter(None, targets.split("+")):
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
    "megatron_core", "modules_to_save", "peft_version", "qalora_group_size", "r",
    "target_modules", "task_type", "use_rslora"))
PLAIN |= dict(peft_type=["LORA"], bias=["none"], revision=["main"],  # the weights of the base
              init_lora_weights=[True, "gaussian", "orthogonal"])
SCORE = "base_model.model.score.weight"  # peft's name of a scalar head


def adapter_tensors(model):
    """{peft's name: parameter} of an Adapted's own tensors."""
    prefix, tensors = f"base_model.model.{model.hf.base_model_prefix}", {}
    for key, a in model.adapters.items():
        name = f"{prefix}.{key.replace('/', '.')}"
        tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"] = a.A, a.B
    if model.head == "scalar":
        tensors[SCORE] = model.score.weight
    return tensors


def peft_misreads(model):
    """Why peft 0.21.2 reads other numbers from an Adapted's files; "" where it does not."""
    from transformers import conversion_mapping

    if os.path.isfile(os.path.join(model.path, "adapter_config.json")):
        return f"its base {model.path} is an adapter, too"
    # it takes the adapters on shared or dense MLPs for experts'
    experts = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
    kind = conversion_mapping._MODEL_TO_CONVERSION_PATTERN.get(model.hf.config.model_type)
    if kind in ("qwen2_moe", "mixtral") and any(k.endswith(experts) for k in model.adapters):
        return "it has MLPs beside experts"
    return ""


def read_adapter(folder):
    """
    (settings, tensors, {score_shift, pad_token_id, and Chats.keys} or {}) of a folder that
    save_adapter or peft has written. Raises BadInput where a file is broken, or the adapter is more
    than scale B A x.
    """
    from safetensors import SafetensorError, safe_open

    config, file = (os.path.join(folder, f"adapter_{x}") for x in ("config.json",
                                                                   "model.safetensors"))
    try:
        settings = dict(peft_type="LORA", r=8, lora_alpha=8) | read_json(config)
        with safe_open(file, framework="pt") as f:
            tensors = {name: f.get_tensor(name) for name in f.keys()}
            notes = json.loads((f.metadata() or {}).get("score_shift", "{}"))
            if not abs(float(notes.get("score_shift", 0.0))) < 1e30:
                raise ValueError("its score_shift is no finite number")
    except (OSError, SafetensorError, ValueError, TypeError, AttributeError, RecursionError) as e:
        raise BadInput(f"{folder}: not a readable adapter ({e}); save it again") from e
    odd = [key for key, value in settings.items()
           if value and (key not in PLAIN or PLAIN[key] and value not in PLAIN[key])]
    if odd:
        raise BadInput(f"{config}: {shorten(odd[0])} = {shorten(settings[odd[0]])} is not "
                       "supported; merge the adapter with peft, and give the merged model")
    return settings, tensors, notes


def load_adapted(base, folder, head="lm"):
    """An Adapted from a folder. base: the model that it was trained on. Raises BadInput."""
    if base is None:
        raise BadInput("share_base: the policy needs an adapter, too; type --lora=16")
    settings, tensors, _ = read_adapter(folder)
    trained_on = str(settings.get("base_model_name_or_path") or "")
    if os.path.isdir(trained_on) and not os.path.samefile(trained_on, base.path):
        raise BadInput(f"{folder}: this adapter was trained on {trained_on}, not on {base.path}")
    prefix = f"base_model.model.{base.hf.base_model_prefix}."
    names = [name.partition(".lora_A.")[0].removeprefix(prefix)
             for name in tensors if ".lora_A." in name]
    unknown = set(names) - {name for name, m in base.hf.base_model.named_modules() if is_linear(m)}
    if unknown:
        raise BadInput(f"{folder}: the adapter is for {min(unknown)!r}, which is no linear map of "
                       "this model; was it trained on it?")
    rank, alpha = int(settings["r"]), settings["lora_alpha"]
    if settings.get("use_rslora"):  # then peft scales by alpha / sqrt(rank)
        alpha *= rank**0.5
    model = Adapted(base, head, rank, alpha, names=names)
    fill_adapter(model, folder)
    model.folder = folder
    return model


def fill_adapter(model, folder):
    """Fill an Adapted from the files of save_adapter or peft. Raises BadInput where they differ."""
    _, saved, notes = read_adapter(folder)
    own = adapter_tensors(model)
    for name in sorted(own.keys() | saved.keys()):
        if name not in own or name not in saved or own[name].shape != saved[name].shape:
            raise BadInput(f"{folder}: its {name} is not that of this model with r = {model.rank}; "
                           "was the adapter trained on it?")
        if not saved[name].isfinite().all():
            raise BadInput(f"{folder}: tensor {name!r} holds NaN or infinite numbers")
        own[name].data.copy_(saved[name])
    if notes:  # in the settings, too: rewards.lacks_shift asks whether it is known
        model.score_shift = notes["score_shift"]
        model.hf.config.update(notes)
    model.new_head = False


def base_of(folder):
    """The path or hub name of the model that an adapter was trained on. Raises BadInput."""
    base = read_adapter(folder)[0].get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise BadInput(f"{folder}: its adapter_config.json does not name the model that it was "
                       "trained on; write its path as base_model_name_or_path")
    return base


def lowest_base(folder, unless=""):
    """
    base_of, of an adapter upon an adapter the last base. unless: a pattern; the way down ends at a
    folder that has such a file. A folder without an adapter is its own base. Raises BadInput.
    """
    if not os.path.isfile(os.path.join(folder, "adapter_config.json")) or (
            unless and glob.glob(os.path.join(glob.escape(folder), unless))):
        return folder
    return lowest_base(base_of(folder), unless)


@torch.no_grad()
def read_merged(folder, head, system, device, seed):
    """load.read_model of an adapter's folder: its base model, with the adapter in its weights."""
    base, (_, tensors, notes) = base_of(folder), read_adapter(folder)
    optional("folders.check_sizes")(base, "config.json")  # of others tokenizer.read_folder asks it
    model = read_model(base, head, system, device, seed)
    if SCORE in tensors and head == "lm":
        raise BadInput(f"{folder}: this adapter has a score head: it makes a reward model, not a "
                       "language model")
    adapted = load_adapted(model, folder, head if SCORE in tensors else "lm")
    for name, p in model.hf.named_parameters():
        p.copy_(adapted.as_saved(name, p))
    if SCORE in tensors:
        model.hf.score.weight.copy_(adapted.score.weight)
        model.score_shift, model.new_head = adapted.score_shift, False
        model.hf.config.update(notes)
    model.path = folder
    return model

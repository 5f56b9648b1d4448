"""
What each model costs and where it lies: in which precision, how much of it on each rank, on the GPU or beside it, which part of
it is trained, and by which optimizer. But for 16 bits, LoRA and Adafactor, this changes what a run needs, not what it computes.

The name is ZeRO's (arXiv 1910.02054): stage 0 holds all on every rank; 1 splits the optimizer's states; 2 the gradients and the
weights between steps, too; 3 gathers a layer's weights only while that layer computes. Stage 1 is torch's
ZeroRedundancyOptimizer, stages 2 and 3 are its FSDP2 (fully_shard). With one process every stage is 0.
"""
import contextlib
import copy
import ctypes
import math
import sys
from dataclasses import dataclass

import torch
import torch.nn as nn

import parallel
from engine.adapters import Adapted
from engine.pretrained import from_pretrained
from errors import BadConfig, shorten
from model import Transformer, freeze
from parallel import is_shard, my_part


# ---------------------------------------------------------------------------------------------------------------------
# compound keys: one string, a value for each model


@dataclass
class Place:
    """How one model is held: what the keys zero, offload, lora and optimizer say of it."""

    stage: int = 0
    offload: str = "none"
    lora: dict = None  # rank, alpha, targets of Adapted
    optimizer: str = "adamw"


def parse_compound(key, text, names, parse, wanted):
    """
    "policy=3,ref=0" -> {"policy": parse("3"), "ref": parse("0")}; a value without a name is everybody's. wanted: what a value
    looks like, for the error. Raises BadConfig.
    """
    values = {}
    for part in text.split(",") if text.strip() else ():
        name, equals, value = (x.strip() for x in part.rpartition("="))
        try:
            values |= dict.fromkeys(names if not equals else [name], parse(value))
        except ValueError:
            equals = None
        if equals is None or equals and name not in names:
            raise BadConfig(f"{key} = {shorten(text)}: cannot read {shorten(part.strip())}; wanted NAME=VALUE, where NAME is one "
                            f"of {', '.join(names)} and VALUE {wanted}")
    return values


def one_of(*choices):
    """A parser of these words."""
    def parse(text):
        if text not in choices:
            raise ValueError
        return text

    return parse

LORA = "RANK[:ALPHA[:TARGETS]], such as 16:32:q+v"


def parse_lora(text):
    """"16", "16:32" or "16:32:q+v" -> rank, alpha (default: twice the rank), targets (default: all linear maps)."""
    rank, alpha, targets, *rest = [*text.split(":"), "", ""]
    if not 0 < int(rank) < 10**6 or any(rest):
        raise ValueError
    lora = dict(rank=int(rank), alpha=float(alpha) if alpha else 2.0 * int(rank))
    if not 0 < lora["alpha"] < math.inf:  # 1e999 is inf, and 0 would learn nothing
        raise ValueError
    return lora | (dict(targets=targets.replace("+", ",")) if targets else {})


def parse_stage(text):
    """"3" -> 3"""
    return int(one_of("0", "1", "2", "3")(text))


def place_of_one(name, zero_stage, offload, lora, optim):
    """
    The Place of the one model of sft.py or rm.py, from the keys of the same names. name: what the
    model is called in them; a value may also have no name. Raises BadConfig on what cannot be had
    together.
    """
    stages = parse_compound("zero_stage", zero_stage, [name], parse_stage, "0, 1, 2 or 3")
    offloads = parse_compound("offload", offload, [name], one_of("none", "optimizer", "params"),
                              "none, optimizer or params")
    loras = parse_compound("lora", lora, [name], parse_lora, LORA)
    optims = parse_compound("optim", optim, [name], one_of("adamw", "adafactor"),
                            "adamw or adafactor")
    place = Place(stages.get(name, 0), offloads.get(name, "none"), loras.get(name),
                  optims.get(name, "adamw"))
    check_trained(name, place)
    return place


def check_trained(name, place):
    """Raise BadConfig unless a model that is trained can be held as this Place says."""
    if place.optimizer == "adafactor" and (place.stage > 1 or place.offload != "none"):
        raise BadConfig(f"optim: adafactor needs whole matrices at hand, so {name} must be at stage 0 or 1 and not "
                        "offloaded; change zero_stage or offload, or type --optim=adamw")
    if place.offload == "params" and (place.stage < 2 or place.lora):
        raise BadConfig(f"offload: the parameters of {name} are in use all the time unless they are sharded; type "
                        f"--zero_stage={name}=3 (without LoRA), or --offload={name}=optimizer")


def placements(trained, zero_stage, offload, lora, optim, share_base=False, value_init=None):
    """
    {name: Place} of policy, ref, reward and, where it is trained, value, from the keys of the same names. The reference follows
    the policy's stage where nothing else is said. Raises BadConfig on what cannot be had together.
    """
    names = ("policy", "ref", "reward", *trained[1:])
    stages = parse_compound("zero_stage", zero_stage, names, parse_stage, "0, 1, 2 or 3")
    stages.setdefault("ref", stages.get("policy", 0))
    with_own = trained[:1] if value_init == "shared" else trained  # what `lora=16` and `offload=optimizer` mean by everybody
    offload = parse_compound("offload", offload, with_own if offload.strip() == "optimizer" else names,
                             one_of("none", "optimizer", "params"), "none, optimizer or params")
    lora = parse_compound("lora", lora, trained if "=" in lora else with_own, parse_lora, LORA)
    optim = parse_compound("optim", optim, trained, one_of("adamw", "adafactor"), "adamw or adafactor")
    result = {name: Place(stages.get(name, 0), offload.get(name, "none"), lora.get(name), optim.get(name, "adamw"))
              for name in names}
    for name, place in result.items():
        if name not in trained and place.offload == "optimizer":
            raise BadConfig(f"offload: {name} is not trained, it has no optimizer; type --offload={name}=params")
        if name in trained:
            check_trained(name, place)
    if result["policy"].lora and result["ref"].offload != "none":
        raise BadConfig("offload: with LoRA the reference is the policy's own trunk and cannot be moved away; leave out ref")
    if share_base:
        if not all(result[n].lora for n in trained if n != "value" or value_init != "shared"):
            raise BadConfig(f"share_base: {' and '.join(trained)} stand on one frozen trunk, so each needs an adapter; type "
                            "--lora=16")
        if result["reward"].offload != "none":
            raise BadConfig("offload: with share_base the reward model stands on the policy's trunk; leave out reward")
    if value_init == "shared" and (result["value"].lora or result["value"].offload != "none"):
        raise BadConfig("value_init = 'shared': the value model is a head on the policy, with no adapter and nothing to offload; "
                        "leave value out of lora and offload")
    return result


# ---------------------------------------------------------------------------------------------------------------------
# precision
SHORT = dict(bfloat16=torch.bfloat16, float16=torch.float16)


def precisions(dtype, master_weights, device):
    """
    (autocast context, dtype of trained weights, dtype of frozen matrices) of a run. In 16 bits the trained weights stay in
    fp32, and autocast rounds each matrix as it is used; so frozen matrices may be stored rounded, and give the same. Norms and
    biases are vectors and stay. master_weights=False: everything is bfloat16, and nothing needs casting. Raises BadConfig.
    """
    if not master_weights and dtype != "bfloat16":
        raise BadConfig(f"master_weights = False trains 16-bit weights themselves, which only works in bfloat16, not in {dtype}; "
                        "type --dtype=bfloat16 or --master_weights=True")
    if dtype not in SHORT:
        return contextlib.nullcontext(), getattr(torch, dtype), None
    if not master_weights:
        return contextlib.nullcontext(), torch.bfloat16, None
    # no cache: every matrix is used once a forward, and the cache would keep the casts of all layers
    return torch.autocast(device.type, SHORT[dtype], cache_enabled=False), torch.float32, SHORT[dtype]


# ---------------------------------------------------------------------------------------------------------------------
# loading and sharding


def load(path, place, device, head="lm", dtype=torch.float32, matrices=None, seed=0, trained=False, recompute=False):
    """
    A model as its place wants it: from_pretrained, sharded before it takes any memory, with an adapter where there
    is LoRA. dtype: of its weights; matrices: of the matrices where they are not trained (see precisions); recompute: compute
    layers again in the backward pass. Raises BadInput.
    """
    frozen, split = not trained or place.lora is not None, is_sharded(place, trained)

    def prepare(model):
        if frozen:
            freeze(model)
        if split:
            shard(model, place, device)

    beside = place.offload == "params" and (split or not trained)  # lives on the CPU
    model = from_pretrained(path, head, dtype, "cpu" if beside else device, seed, matrices if frozen else None,
                                        prepare)
    model.recompute(recompute and trained)
    if model.head == "scalar" and split:
        model.score.to(device)  # the one tensor that is not sharded is not offloaded either
    model.path, model.offloaded = path, beside and not split
    if model.offloaded and device.type == "cuda":
        for p in model.parameters():
            p.data = p.data.pin_memory()  # which copies faster
    return Adapted(model, head, **place.lora, seed=seed) if trained and place.lora else model


def is_sharded(place, trained):
    """A frozen model has neither gradients nor states: only stage 3 makes it smaller."""
    return parallel.rank_and_size()[1] > 1 and place.stage >= (2 if trained and not place.lora else 3)


def shard(model, place, device):
    """FSDP2: a layer is gathered while it computes (stage 3) or until its backward pass (2); what is in no layer, all along."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard, register_fsdp_forward_method

    if device.type == "cpu" and sys.platform == "linux" and hasattr(ctypes.CDLL(None), "mallopt"):
        # M_MMAP_THRESHOLD: pages of their own for what is gathered and freed, or glibc's heap keeps half as much again in holes
        ctypes.CDLL(None).mallopt(-3, 2**20)
    settings = dict(mesh=init_device_mesh(device.type, (parallel.rank_and_size()[1],)))
    if place.offload == "params":
        settings["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=place.stage == 3, **settings)
    if not model.config.tied:
        fully_shard(model.embed, reshard_after_forward=place.stage == 3, **settings)  # as large as many layers
    whole = {model.score.weight} if model.head == "scalar" else set()  # a single row
    fully_shard(model, reshard_after_forward=False, ignored_params=whole, **settings)  # embedding, head: for the whole forward
    register_fsdp_forward_method(model, "trunk")


def sharded(model):
    """Whether a rank holds only a part of this model's weights."""
    return any(is_shard(p) for p in trunk_of(model).parameters())


def trunk_of(model):
    """The Transformer under a model."""
    return trunk_of(model.base) if isinstance(model, Adapted) else model


def in_memory(**models):
    """{name: model} of those that there are, and of the trunks that models stand on and that are none of them."""
    models = {name: model for name, model in models.items() if model is not None}
    for name, model in list(models.items()):
        if isinstance(model, Adapted) and not any(model.base is other for other in models.values()):
            models[f"{name}'s trunk"] = model.base
    return models


def reshard(models):
    """Free what the last forwards without a backward have gathered; parameters() are the shards again."""
    for model in map(trunk_of, models):
        for module in model.modules():
            if hasattr(module, "reshard"):
                module.reshard()


@contextlib.contextmanager
def on_device(model, device):
    """Within this, a frozen model that lives beside the GPU is on it."""
    if model is None or not getattr(trunk_of(model), "offloaded", False):
        yield
        return
    parameters = list(trunk_of(model).parameters())
    homes = [p.data for p in parameters]
    for p in parameters:
        p.data = p.data.to(device)
    try:
        yield
    finally:
        for p, home in zip(parameters, homes, strict=True):  # frozen: nothing to bring back
            p.data = home


@contextlib.contextmanager
def no_grad_forwards(models, device):
    """
    Every forward without a backward pass belongs into this block. `models` are all the models that the block calls; None
    stands for a model that the run does not have. Inside, no gradients are recorded, and the frozen models that are kept in
    the CPU's memory are on `device`. When the block is left, also by an error, the layers that the forwards have gathered
    are freed again: FSDP frees them itself only in a backward pass, and left gathered, at zero_stage=2, they would be in
    the way of the next optimizer step.
    """
    models = [model for model in models if model is not None]
    try:
        with torch.no_grad(), contextlib.ExitStack() as stack:
            for trunk in dict.fromkeys(map(trunk_of, models)):  # each trunk once, however many models stand on it
                stack.enter_context(on_device(trunk, device))
            yield
    finally:
        reshard(models)


def decoding_copy(policy, matrices, device):
    """
    The model that the rollout decodes with. It is the policy itself, unless its weights are sharded or would be cast at every
    token: then it is a whole copy of them in the precision they are used in, gathered once for the whole generation. Delete
    it after the rollout.
    """
    trunk = trunk_of(policy)
    if not sharded(policy) and (matrices is None or all(p.dtype == matrices for p in trunk.parameters() if p.dim() == 2)):
        return policy
    with torch.device("meta"):
        whole = freeze(Transformer(trunk.config, trunk.head))
    for name, p in trunk.named_parameters():
        t = my_part(p.detach()).to(device)
        t = t.to(matrices) if matrices and p.dim() == 2 else t
        module, _, kind = name.rpartition(".")
        setattr(whole.get_submodule(module), kind, nn.Parameter(gather(t, p) if is_shard(p) else t, False))
    if not isinstance(policy, Adapted):
        return whole
    twin = copy.copy(policy)  # the same adapter, on the copy
    twin.__dict__["base"] = whole
    return twin


def gather(t, p):
    """The whole tensor, on every rank, of which each has a part t, split as the parameter p is. A collective."""
    from torch.distributed.tensor import DTensor

    t = DTensor.from_local(t.to(p.device_mesh.device_type), p.device_mesh, p.placements, shape=p.shape, stride=p.stride())
    return parallel.collective(t.full_tensor)


def whole_weights(model):
    """model.weights(), put together in the CPU's memory where they are sharded, complete on rank 0 alone. All ranks call it."""
    weights = {}
    for name, p in model.weights().items():
        t = gather(my_part(p), p) if is_shard(p) else p
        if parallel.rank_and_size()[0] == 0:
            weights[name] = t.cpu() if is_shard(p) else t
    return weights

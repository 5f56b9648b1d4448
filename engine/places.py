"""
What the keys zero_stage, offload, lora, optim, dtype and master_weights say of each model: its
Place, and the dtypes of its weights. engine/placement.py then puts the models there. Only 16 bits,
LoRA and Adafactor change what a run computes; all else changes the memory that it needs.

The stages are ZeRO's (arXiv 1910.02054). Stage 0 holds everything on every rank; stage 1 splits the
optimizer's states over the ranks; stage 2 also the gradients and, between steps, the weights;
stage 3 also the weights during a step: a layer is gathered while it computes. On one rank every
stage is 0.
"""
import contextlib
import re
from dataclasses import dataclass

import torch

import parallel
from errors import BadConfig, shorten


@dataclass
class Place:
    """How one model is held: what the keys zero_stage, offload, lora and optim say of it."""

    stage: int = 0  # of ZeRO: 0 to 3
    offload: str = "none"  # what is in the CPU's memory: none, optimizer, or params (weights, too)
    lora: dict = None  # rank, alpha and targets of an Adapted; None: no adapters
    optimizer: str = "adamw"
    four_bits: bool = False  # of the trunk under an adapter
    here: bool = True  # False: ranks of another role hold it, and this one knows its shapes alone


def placements(trained, zero_stage, offload, lora, optim, share_base=False, value_init=None):
    """
    {name: Place} of policy, ref, reward, judge and, where there is one, value. trained: the names
    of the trained models, ("policy", "value") or ("policy",). The other arguments are the keys of
    the run. A key is "" or a list such as "policy=3,ref=0". Raises BadConfig, see `refuse`.

    A value without a name is for all models, or for all trained ones (lora, optim, and
    offload="optimizer"). Two exceptions: the reference is at the policy's stage, unless the key
    names it; and with value_init="shared" the value model is a head on the policy, with no adapter
    and nothing to offload.
    """
    names = ("policy", "ref", "reward", "judge", *trained[1:])
    with_trunk = trained[:1] if value_init == "shared" else trained
    stages = parse("zero_stage", zero_stage, names)
    stages.setdefault("ref", stages.get("policy", "0"))
    offloads = parse("offload", offload, names,
                     with_trunk if offload.strip() == "optimizer" else names)
    loras = parse("lora", lora, trained, with_trunk)
    optims = parse("optim", optim, trained)
    places = {name: place_from(name, stages, offloads, loras, optims) for name in names}
    for name, place in places.items():
        refuse(name, place, name in trained, places["policy"], share_base, value_init)
    return places


def place_of_one(name, zero_stage, offload, lora, optim):
    """
    The Place of the one model of sft.py or rm.py, which is trained. name: what the keys call it,
    policy or reward. Raises BadConfig.
    """
    keys = dict(zero_stage=zero_stage, offload=offload, lora=lora, optim=optim)
    place = place_from(name, *(parse(key, text, [name]) for key, text in keys.items()))
    refuse(name, place, trained=True, policy=place)
    return place


def place_from(name, stages, offloads, loras, optims):
    """The Place of a model, from what each key says of all."""
    lora = None
    if name in loras:
        rank, alpha, targets = [*loras[name].split(":"), "", ""][:3]
        lora = dict(rank=int(rank), alpha=float(alpha or 2 * int(rank)))
        if targets:
            lora["targets"] = targets.replace("+", ",")
    return Place(int(stages.get(name, 0)), offloads.get(name, "none"), lora,
                 optims.get(name, "adamw"))


FORMS = {  # key: (a value as a pattern, and in words)
    "zero_stage": ("[0-3]", "0, 1, 2 or 3"),
    "offload": ("none|optimizer|params", "none, optimizer or params"),
    "lora": (r"[1-9][0-9]{0,5}(:[1-9][0-9]{0,5}(\.[0-9]+)?(:[\w.+]*)?)?",
             "RANK[:ALPHA[:TARGETS]], such as 16:32:q+v"),
    "optim": ("adamw|adamw8bit|adafactor", "adamw, adamw8bit or adafactor")}


def parse(key, text, names, of_all=None):
    """
    "policy=3,ref=0" -> {"policy": "3", "ref": "0"}. names: the models that the key may name.
    of_all: those for which a value without a name is; None: all these. Raises BadConfig.
    """
    values = {}
    for part in text.split(",") if text.strip() else ():
        name, equals, value = (x.strip() for x in part.rpartition("="))
        pattern, wanted = FORMS[key]
        if equals and name not in names or not re.fullmatch(pattern, value):
            raise BadConfig(f"{key} = {shorten(text)}: cannot read {shorten(part.strip())}; wanted "
                            "VALUE, or NAME=VALUE for one model, where NAME is one of "
                            f"{', '.join(names)} and VALUE {wanted}")
        values |= dict.fromkeys([name] if equals else of_all or names, value)
    return values


def refuse(name, place, trained, policy, share_base=False, value_init=None):
    """
    Raise BadConfig where the keys of a model cannot go together. This is the whole table: whether
    it is so, and what is said. name: policy, ref, reward, judge or value. policy: its Place.
    """
    is_head = name == "value" and value_init == "shared"  # on the policy
    on_its_trunk = name == "ref" and policy.lora or name == "reward" and share_base
    moved = place.offload != "none"
    table = [
        (not trained and place.offload == "optimizer",
         f"offload: {name} is not trained, it has no optimizer; type --offload={name}=params"),
        (trained and place.offload == "params" and (place.stage < 2 or place.lora),
         f"offload: the parameters of {name} are in use all the time unless they are sharded; type "
         f"--zero_stage={name}=3 (without LoRA), or --offload={name}=optimizer"),
        (place.optimizer == "adamw8bit" and (place.stage > 0 or moved),
         f"optim: adamw8bit has its states whole and on the GPU, so {name} must be at stage 0 and "
         "not offloaded; change zero_stage or offload, or type --optim=adamw"),
        (place.optimizer == "adafactor" and (place.stage > 1 or moved),
         f"optim: adafactor needs whole matrices, so {name} must be at stage 0 or 1 and not "
         "offloaded; change zero_stage or offload, or type --optim=adamw"),
        (on_its_trunk and moved,
         f"offload: {name} stands on the policy's trunk and cannot be moved away; leave {name} "
         "out"),
        (is_head and (place.lora or moved),
         "value_init = 'shared': the value model is a head on the policy, with no adapter and "
         "nothing to offload; leave value out of lora and offload"),
        (share_base and trained and not is_head and not place.lora,
         f"share_base: {name} stands on the frozen trunk, so it needs an adapter; type --lora=16"),
    ]
    for is_so, message in table:
        if is_so:
            raise BadConfig(message)


def is_sharded(place, trained):
    """Whether a model's weights are split over the ranks."""
    if parallel.rank_and_size()[1] == 1:
        return False
    return place.stage >= 2 if trained else place.stage == 3  # frozen: 1 and 2 split nothing of it


# --------------------------------------------------------------------------------------------------
# precision

SHORT = dict(bfloat16=torch.bfloat16, float16=torch.float16)  # 16 bits


def precisions(dtype, master_weights, device):
    """
    (autocast context, dtype of trained weights, dtype of frozen matrices) of a run.

    In 16 bits the trained weights are kept in fp32, and autocast rounds each matrix when it is
    used. Frozen matrices may therefore be stored rounded: the numbers are the same. Norms and
    biases are vectors, which autocast does not round. master_weights=False: every weight is
    bfloat16, and nothing needs a cast. Raises BadConfig.
    """
    if not master_weights and dtype != "bfloat16":
        raise BadConfig("master_weights = False trains 16-bit weights themselves, which only works "
                        f"in bfloat16, not in {dtype}; type --dtype=bfloat16 or "
                        "--master_weights=True")
    if dtype not in SHORT:
        return contextlib.nullcontext(), getattr(torch, dtype), None
    if not master_weights:
        return contextlib.nullcontext(), torch.bfloat16, None
    # no cache: a forward uses every matrix once, and the cache would keep the casts of all layers
    autocast = torch.autocast(device.type, SHORT[dtype], cache_enabled=False)
    return autocast, torch.float32, SHORT[dtype]

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
import math
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
    here: bool = True  # False: ranks of another role hold it, and this one knows its shapes alone


def placements(trained, zero_stage, offload, lora, optim, share_base=False, value_init=None):
    """
    {name: Place} of policy, ref, reward, judge and, where there is one, value. trained: the names
    of the trained models, ("policy", "value") or ("policy",). The other arguments are the keys of
    the run. A key is "" or a list such as "policy=3,ref=0". Raises BadConfig on what the table does
    not allow:

        key         policy                     value      ref         reward, judge
        zero_stage  0 to 3                     same       0 to 3 [a]  0 to 3
        offload     optimizer, or params [b]   same [c]   params [d]  params [e]
        lora        RANK:ALPHA:TARGETS         same [c]   -           -
        optim       adamw, or adafactor [f]    same       -           -

        [a] the policy's stage, unless the key names ref
        [b] params: only if the weights are sharded, at stage 2 or 3 without lora
        [c] not with value_init="shared": the value model is then a head on the policy
        [d] not if the policy has lora: the reference is then the policy's own trunk
        [e] not with share_base: the reward model then stands on the policy's trunk
        [f] adafactor: only at stage 0 or 1 without offload, because it needs whole matrices

    With share_base, all trained models must have lora, apart from a value model of [c].

    A value without a name is for every model of its row. Two exceptions: offload="optimizer" is
    for the trained models; and value_init="shared" leaves the value model out of that and of
    lora="16".
    """
    names = ("policy", "ref", "reward", "judge", *trained[1:])
    with_adapter = trained[:1] if value_init == "shared" else trained
    stages = parse_compound("zero_stage", zero_stage, names, parse_stage, "0, 1, 2 or 3")
    stages.setdefault("ref", stages.get("policy", 0))
    offloads = parse_compound(
        "offload", offload, with_adapter if offload.strip() == "optimizer" else names,
        one_of("none", "optimizer", "params"), "none, optimizer or params")
    loras = parse_compound("lora", lora, trained if "=" in lora else with_adapter, parse_lora, LORA)
    optims = parse_compound("optim", optim, trained, one_of("adamw", "adafactor"),
                            "adamw or adafactor")
    places = {name: Place(stages.get(name, 0), offloads.get(name, "none"), loras.get(name),
                          optims.get(name, "adamw")) for name in names}
    for name, place in places.items():
        check_place(name, place, name in trained)
    check_together(places, trained, share_base, value_init)
    return places


def check_place(name, place, trained):
    """Raise BadConfig where one model's keys contradict each other."""
    if not trained:
        if place.offload == "optimizer":
            raise BadConfig(f"offload: {name} is not trained, it has no optimizer; type "
                            f"--offload={name}=params")
        return
    if place.optimizer == "adafactor" and (place.stage > 1 or place.offload != "none"):
        raise BadConfig(f"optim: adafactor needs whole matrices at hand, so {name} must be at "
                        "stage 0 or 1 and not offloaded; change zero_stage or offload, or type "
                        "--optim=adamw")
    if place.offload == "params" and (place.stage < 2 or place.lora):
        raise BadConfig(f"offload: the parameters of {name} are in use all the time unless they "
                        f"are sharded; type --zero_stage={name}=3 (without LoRA), or "
                        f"--offload={name}=optimizer")


def check_together(places, trained, share_base, value_init):
    """Raise BadConfig where the keys do not suit a model that stands on another one's trunk."""
    if places["policy"].lora and places["ref"].offload != "none":
        raise BadConfig("offload: with LoRA the reference is the policy's own trunk and cannot be "
                        "moved away; leave out ref")
    if share_base:
        on_trunk = [name for name in trained if name != "value" or value_init != "shared"]
        if not all(places[name].lora for name in on_trunk):
            raise BadConfig(f"share_base: {' and '.join(trained)} stand on one frozen trunk, so "
                            "each needs an adapter; type --lora=16")
        if places["reward"].offload != "none":
            raise BadConfig("offload: with share_base the reward model stands on the policy's "
                            "trunk; leave out reward")
    if value_init == "shared" and (places["value"].lora or places["value"].offload != "none"):
        raise BadConfig("value_init = 'shared': the value model is a head on the policy, with no "
                        "adapter and nothing to offload; leave value out of lora and offload")


def place_of_one(name, zero_stage, offload, lora, optim):
    """
    The Place of the one model of sft.py or rm.py, which is trained. name: what the keys call it,
    policy or reward; its column of the table above is policy's. Raises BadConfig.
    """
    stages = parse_compound("zero_stage", zero_stage, [name], parse_stage, "0, 1, 2 or 3")
    offloads = parse_compound("offload", offload, [name], one_of("none", "optimizer", "params"),
                              "none, optimizer or params")
    loras = parse_compound("lora", lora, [name], parse_lora, LORA)
    optims = parse_compound("optim", optim, [name], one_of("adamw", "adafactor"),
                            "adamw or adafactor")
    place = Place(stages.get(name, 0), offloads.get(name, "none"), loras.get(name),
                  optims.get(name, "adamw"))
    check_place(name, place, trained=True)
    return place


def parse_compound(key, text, names, parse, wanted):
    """
    "policy=3,ref=0" -> {"policy": parse("3"), "ref": parse("0")}; a value without a name is for all
    `names`. parse raises ValueError on a bad value. wanted: what a value looks like, for the
    error's text. Raises BadConfig.
    """
    values = {}
    for part in text.split(",") if text.strip() else ():
        name, equals, value = (x.strip() for x in part.rpartition("="))
        error = BadConfig(f"{key} = {shorten(text)}: cannot read {shorten(part.strip())}; wanted "
                          f"VALUE, or NAME=VALUE for one model, where NAME is one of "
                          f"{', '.join(names)} and VALUE {wanted}")
        if equals and name not in names:
            raise error
        try:
            parsed = parse(value)
        except ValueError:
            raise error from None
        values |= dict.fromkeys([name] if equals else names, parsed)
    return values


def one_of(*choices):
    """A parser that takes these words."""
    def parse(text):
        if text not in choices:
            raise ValueError
        return text

    return parse


def parse_stage(text):
    return int(one_of("0", "1", "2", "3")(text))


LORA = "RANK[:ALPHA[:TARGETS]], such as 16:32:q+v"


def parse_lora(text):
    """"16", "16:32" or "16:32:q+v" -> rank, alpha (default: twice the rank), targets (all maps)."""
    rank, alpha, targets, *rest = [*text.split(":"), "", ""]
    if not 0 < int(rank) < 10**6 or any(rest):
        raise ValueError
    lora = dict(rank=int(rank), alpha=float(alpha) if alpha else 2.0 * int(rank))
    if not 0 < lora["alpha"] < math.inf:  # 1e999 is inf, and with 0 an adapter would learn nothing
        raise ValueError
    return lora | (dict(targets=targets.replace("+", ",")) if targets else {})


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

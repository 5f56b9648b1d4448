"""
The key optim: Adafactor, which keeps a sum a row and a column for each matrix; AdamW with states in
8 bits, by the package bitsandbytes (safetensors does not take the states of torchao's); and a class
of the user's. And the AdamW of master_weights=False, and the groups of weight_decay.
"""
import functools
import inspect

import torch

from configurator import for_model
from errors import BadInput, first_line
from ranks import this_rank

# torch's Adafactor multiplies lr by max(eps[1], RMS of the weight), which is the paper's section 8.
# With eps[1] = FLOOR, more than the RMS of any weight, the factor is always FLOOR, and the learning
# rate is divided by FLOOR beforehand. FLOOR is a power of two, so that neither rounds anything.
FLOOR = 2.0**20


def optimizer_by_keys(model, name, system, narrow, lr, betas, eps):
    """
    The optimizer of the model `name` by the keys optim, weight_decay, zero_stage and offload.
    narrow: some of its weights have 16 bits. Raises BadInput.
    """
    groups = [dict(params=[p for p in model.parameters() if p.requires_grad])]
    if system.weight_decay > 0:  # of matrices alone: it would pull norms to 0
        groups = groups_of(model)
    kind, settings = torch.optim.AdamW, dict(
        lr=lr, betas=betas, eps=eps, weight_decay=system.weight_decay,
        fused=this_rank.role == "train")  # others never step
    if narrow or for_model(system.optim, name) not in ("", "adamw"):
        kind, settings = other_optimizer(model, system, name, lr, betas, eps)
    own = ":" in for_model(system.optim, name)  # a user's class may take no groups
    whole = own and len(groups) == 1
    make = functools.partial(kind, groups[0]["params"] if whole else groups, **settings)
    if system.zero_stage or system.offload:
        from options.shards import optimizer_of

        make = functools.partial(optimizer_of, model, name, system, groups, kind, settings)
    if not own:
        return make()
    try:
        optimizer = make()
    except Exception as e:  # the user's code raises anything
        raise BadInput(f"optim = {system.optim!r} cannot be made: {first_line(e)}") from e
    lacks = [x for x in ("step", "param_groups", "state") if not hasattr(optimizer, x)]
    if lacks:
        raise BadInput(f"optim = {system.optim!r}: wanted an optimizer like those of torch.optim, "
                       f"and {type(optimizer).__name__} has no {lacks[0]}")
    return optimizer


def groups_of(model):
    """Groups of a model's trained parameters: weight_decay is for matrices, not for vectors."""
    vectors, trained = vectors_of(model), [p for p in model.parameters() if p.requires_grad]
    groups = [dict(params=[p for p in trained if p not in vectors])]
    if small := [p for p in trained if p in vectors]:
        groups.append(dict(params=small, weight_decay=0.0))
    return groups


def vectors_of(model):
    """
    The parameters that are vectors, also where a tensor has one for each expert or head: beside
    tensors with a matrix for each, as a bias (gpt-oss), in a norm (Cohere), or as the decays of a
    state space (Jamba).
    """
    vectors = set()
    for module in model.modules():
        own = dict(module.named_parameters(recurse=False))
        stacked = any(p.dim() == 3 for p in own.values())
        norm = "norm" in type(module).__name__.lower()
        vectors |= {p for name, p in own.items()
                    if p.dim() < 2 + stacked or norm or "bias" in name or name == "A_log"}
    return vectors


def other_optimizer(model, system, name, lr, betas, eps):
    """
    (class, its settings) of the key optim for the model `name`, but torch's own AdamW.

    Adafactor (arXiv 1804.04235) is the paper's without its section 8: the learning rate is the size
    of a step, as AdamW's is, and is not multiplied by the size of the weights. betas and eps are
    AdamW's alone.
    """
    kind = for_model(system.optim, name)
    if kind in ("", "adamw"):
        return WideAdamW, dict(lr=lr, betas=betas, eps=eps, weight_decay=system.weight_decay)
    if ":" in kind:
        return of_file(kind, system, name, dict(
            lr=lr, betas=betas, eps=eps, weight_decay=system.weight_decay))
    if kind not in ("adafactor", "adamw8bit"):
        raise BadInput(f"optim = {system.optim!r}: wanted adamw, adafactor, adamw8bit or "
                       "FILE.py:CLASS, for all models or as policy=adafactor,value=adamw")
    most = dict(adamw8bit=0, adafactor=1)[kind]
    if int(for_model(system.zero_stage, name) or 0) > most or for_model(
            system.offload, name) not in ("", "none"):
        raise BadInput(f"optim: {kind} needs whole matrices on the GPU, so {name} can be at stage "
                       f"{most} at most, and not offloaded; change zero_stage or offload")
    if kind == "adafactor":
        # 1e-15 squared is the paper's epsilon_1; torch multiplies weight_decay by this small lr
        # foreach=False: on a GPU torch would step all matrices at once, with copies of all of them
        return Adafactor, dict(lr=lr, weight_decay=system.weight_decay * FLOOR,
                               eps=(1e-15, FLOOR), foreach=False)
    if any(p.requires_grad and p.dtype.itemsize == 2 for p in model.parameters()):
        raise BadInput("optim: adamw8bit wants gradients in the dtype of the weights, and those of "
                       "master_weights = False are summed in float32; type --optim=adafactor")
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as e:
        raise BadInput("optim = 'adamw8bit' needs the package bitsandbytes: pip install "
                       "bitsandbytes") from e
    return AdamW8bit, dict(lr=lr, betas=betas, eps=eps, weight_decay=system.weight_decay)


def of_file(kind, system, name, settings):
    """
    (class, its settings) of FILE.py:CLASS, the user's. It gets those of lr, betas, eps and
    weight_decay that it takes by name, or its base where it hands **settings on. What it keeps is
    saved: see options/fork_state.py. On split models (zero_stage 2 and 3) its parameters are
    DTensors. Raises BadInput.
    """
    from options.user_code import load_function

    made = load_function(kind, ".", f"optim = {system.optim!r}")
    taken = set()
    for maker in getattr(made, "__mro__", [made]):
        takes = inspect.signature(maker).parameters.values()
        taken |= {p.name for p in takes}
        if not any(p.kind == p.VAR_KEYWORD for p in takes):
            break  # one that takes **settings hands them on to its base
    if system.weight_decay > 0 and "weight_decay" not in taken:
        raise BadInput(f"weight_decay = {system.weight_decay:g}, but {kind} takes none by this "
                       "name; type --weight_decay=0")
    if for_model(system.offload, name) == "optimizer":
        raise BadInput(f"offload = {system.offload!r}: it has the states of AdamW alone, not of "
                       f"{kind}; leave one of the two out")
    return made, {key: x for key, x in settings.items() if key in taken}


class WideAdamW(torch.optim.AdamW):
    """
    torch's, with states in 32 bits for bfloat16 weights. Their second moment could never fall with
    beta2 = 0.999: 0.001 of it is less than half a step of bfloat16.
    """

    def __init__(self, groups, **settings):
        super().__init__(groups, **settings, foreach=False)  # the others want one dtype

    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.grad is not None and not self.state[p]:
                self.state[p].update(step=torch.zeros(()), exp_avg=torch.zeros_like(p.grad),
                                     exp_avg_sq=torch.zeros_like(p.grad))
        super().step()


class Adafactor(torch.optim.Adafactor):
    """torch's, with a learning rate that is the size of a step."""

    def step(self):
        for group in self.param_groups:
            group["lr"] /= FLOOR
        super().step()
        for group in self.param_groups:
            group["lr"] *= FLOOR

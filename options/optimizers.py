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
    """The optimizer of a model by its keys. narrow: it has weights of 16 bits. Raises BadInput."""
    trained = [p for p in model.parameters() if p.requires_grad]
    # weight_decay is for matrices alone: it would pull norms to 0
    vectors = vectors_of(model) if system.weight_decay > 0 else set()
    groups = [dict(params=[p for p in trained if p not in vectors])]
    if small := [p for p in trained if p in vectors]:
        groups.append(dict(params=small, weight_decay=0.0))
    kind, settings = torch.optim.AdamW, dict(
        lr=lr, betas=betas, eps=eps, weight_decay=system.weight_decay,
        fused=this_rank.role == "train")  # others never step
    if narrow or for_model(system.optim, name) not in ("", "adamw"):
        kind, settings = other_optimizer(model, system, name, lr, betas, eps)
    own = ":" in for_model(system.optim, name)  # a user's class may take no groups
    plain = groups[0]["params"] if own and len(groups) == 1 else groups
    make = functools.partial(kind, plain, **settings)
    if system.zero_stage or system.offload:
        from options.shards import optimizer_of

        make = functools.partial(optimizer_of, model, name, system, groups, kind, settings)
    if not own:
        return make()
    try:
        optimizer = make()
        for needed in ("step", "param_groups", "state"):
            getattr(optimizer, needed)
        return optimizer
    except Exception as e:  # the user's code raises anything
        raise BadInput(f"optim = {system.optim!r}: wanted an optimizer like those of torch.optim, "
                       f"but {first_line(e)}") from e


def vectors_of(model):
    """
    The parameters that are vectors, also beside tensors with a matrix for each expert or head: as a
    bias (gpt-oss), in a norm (Cohere), or as the decays of a state space (Jamba).
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
    """(class, its settings) of the key optim for the model `name`, but torch's own AdamW."""
    kind = for_model(system.optim, name)
    settings = dict(lr=lr, betas=betas, eps=eps, weight_decay=system.weight_decay)
    if kind in ("", "adamw"):
        return WideAdamW, settings
    if ":" in kind:
        return of_file(kind, system, name, settings)
    most = dict(adamw8bit=0, adafactor=1).get(kind)
    if most is None:
        raise BadInput(f"optim = {system.optim!r}: wanted adamw, adafactor, adamw8bit or "
                       "FILE.py:CLASS, for all models or as policy=adafactor,value=adamw")
    if int(for_model(system.zero_stage, name) or 0) > most or for_model(
            system.offload, name) not in ("", "none"):
        raise BadInput(f"optim: {kind} needs whole matrices on the GPU, so {name} can be at stage "
                       f"{most} at most, and not offloaded; change zero_stage or offload")
    if kind == "adafactor":  # betas and eps are AdamW's alone
        # 1e-15 squared is the paper's epsilon_1; torch multiplies weight_decay by this small lr
        # foreach=False: on a GPU torch would step all matrices at once, with copies of all of them
        return Adafactor, dict(lr=lr, weight_decay=system.weight_decay * FLOOR,
                               eps=(1e-15, FLOOR), foreach=False)
    if any(p.requires_grad and p.dtype.itemsize == 2 for p in model.parameters()):
        raise BadInput("optim: adamw8bit wants gradients in the dtype of the weights, and those of "
                       "master_weights = False are summed in float32; type --optim=adafactor")
    from options.failures import package

    return package("bitsandbytes", "optim = 'adamw8bit'", "bitsandbytes.optim").AdamW8bit, settings


def of_file(kind, system, name, settings):
    """
    (class, its settings) of FILE.py:CLASS: those that it takes by name, or its base where it hands
    **settings on. Of split models (zero_stage 2 and 3) it gets DTensors. Raises BadInput.
    """
    from options.user_code import load_function

    made = load_function(kind, f"optim = {system.optim!r}")
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
    """
    The paper's (arXiv 1804.04235) without its section 8: as AdamW's, the learning rate is the size
    of a step, and is not multiplied by the size of the weights.
    """

    def step(self):
        for group in self.param_groups:
            group["lr"] /= FLOOR
        super().step()
        for group in self.param_groups:
            group["lr"] *= FLOOR

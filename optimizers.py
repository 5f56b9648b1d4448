"""
What surrounds an optimizer's step. In this file, downwards:

    make_optimizer, step              which optimizer a model has, and one step of it
    OffloadedAdamW                    AdamW in the CPU's memory
    optimizer_tensors, fill_optimizer an optimizer's state, for checkpoints
    overflowed                        the loss scale of float16
    MovingAverage                     the moving average of a model's weights
"""
import contextlib

import torch

import parallel
import together
from together import Part
from errors import Stop
from model import at_least_float32
from parallel import is_shard, my_part, split_like


# --------------------------------------------------------------------------------------------------
# optimizers

# torch's Adafactor multiplies lr by max(eps[1], RMS of the weight), which is the paper's section 8.
# With eps[1] = FLOOR, more than the RMS of any weight, the factor is always FLOOR, and we divide lr
# by FLOOR beforehand. FLOOR is a power of two, so that neither rounds anything.
FLOOR = 2.0**20


def make_optimizer(model, place, lr, betas, eps, weight_decay):
    """
    The optimizer of a model's trained parameters, as its Place says (placement.py).

    Adafactor (arXiv 1804.04235) is the paper's without its section 8: the learning rate is the size
    of a step, as AdamW's is, and is not multiplied by the size of the weights. betas and eps are
    AdamW's alone.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if place.optimizer == "adafactor":
        kind = torch.optim.Adafactor
        # 1e-15 squared is the paper's epsilon_1; torch multiplies weight_decay by this small lr
        # foreach=False: on a GPU torch would step all matrices at once, with copies of all of them
        settings = dict(lr=lr / FLOOR, weight_decay=weight_decay * FLOOR, eps=(1e-15, FLOOR),
                        foreach=False)
    elif place.optimizer == "adamw8bit":
        from options.four_bits import bitsandbytes

        kind = bitsandbytes("optim = 'adamw8bit'").optim.AdamW8bit
        settings = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
    else:
        kind = OffloadedAdamW if place.offload == "optimizer" else torch.optim.AdamW
        settings = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)
    if place.stage == 1 and parallel.rank_and_size()[1] > 1:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(parameters, kind, process_group=parallel.group, **settings)
    shards = [p for p in parameters if is_shard(p)]
    whole = [p for p in parameters if not is_shard(p)]
    # two groups, because a fused kernel cannot take shards and whole tensors together
    return kind([dict(params=group) for group in (shards, whole) if group], **settings)


def step(optimizer, lr):
    """One step of an optimizer at this learning rate."""
    adafactor = isinstance(inner(optimizer), torch.optim.Adafactor)
    for group in optimizer.param_groups:
        group["lr"] = lr / FLOOR if adafactor else lr
    if inner(optimizer) is optimizer:
        optimizer.step()
    else:
        parallel.collective(optimizer.step)  # stage 1: each rank sends the weights it has stepped


def inner(optimizer):
    """The optimizer that holds this rank's states: at stage 1, the one in ZeRO's wrapper."""
    return getattr(optimizer, "optim", optimizer)


class OffloadedAdamW(torch.optim.AdamW):
    """
    AdamW whose states, and a copy of the weights, are in the CPU's memory, where the step is
    computed (ZeRO-Offload, arXiv 2101.06840). A step moves each gradient there and each weight
    back, so that the GPU never holds a state.
    """

    @torch.no_grad()
    def step(self, closure=None):
        from torch.optim.adamw import adamw

        if not hasattr(self, "weights"):
            self.weights = {}  # filled at the first step, when a checkpoint has been loaded
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state, on_device = self.state[p], my_part(p)
                if p not in self.weights:
                    self.weights[p] = on_device.detach().cpu()  # of a model on the CPU: itself
                weight = self.weights[p]
                if not state:
                    state.update(step=torch.zeros(()), exp_avg=torch.zeros_like(weight),
                                 exp_avg_sq=torch.zeros_like(weight))
                adamw([weight], [my_part(p.grad).cpu()], [state["exp_avg"]], [state["exp_avg_sq"]],
                      [], [state["step"]], fused=True, amsgrad=False, maximize=False,
                      lr=group["lr"], beta1=group["betas"][0], beta2=group["betas"][1],
                      weight_decay=group["weight_decay"], eps=group["eps"])
                on_device.copy_(weight)


# --------------------------------------------------------------------------------------------------
# an optimizer's state, for checkpoints


def optimizer_tensors(model, optimizer):
    """
    A collective: {"NAME.KEY": tensor} of an optimizer's state, such as "layers.0.q.weight.exp_avg".
    Names rather than numbers, and the shapes of whole tensors: so another number of ranks can go
    on. What ranks have of them, together.whole puts together: tensors, sharded ones, or Parts.
    """
    state, tensors = inner(optimizer).state, {}
    names = [name for name, _ in model.named_parameters()]
    for name, p in model.named_parameters():
        for key, t in state.get(p, {}).items():
            if isinstance(t, int):  # adamw8bit's step
                t = torch.tensor(t)
            if key.startswith("qmap"):  # adamw8bit's levels: one table for all, which no file takes
                t = t.clone()
            if torch.is_tensor(t) and t.dim() > 0 and is_shard(p) and not is_shard(t):
                t = Part(t, p.shape, t.dtype, like=p)  # offloaded
            if torch.is_tensor(t) or isinstance(t, Part):
                tensors[f"{name}.{key}"] = t
    if inner(optimizer) is not optimizer:  # stage 1: each rank has the states of some parameters
        tensors = together.everyones(tensors)
    # one order, whoever has them, and whether they were made by steps or loaded
    order = {name: number for number, name in enumerate(names)}
    in_order = sorted(tensors, key=lambda full: (order[full.rpartition(".")[0]], full))
    return {full: tensors[full] for full in in_order}


def fill_optimizer(model, optimizer, tensors):
    """The inverse of optimizer_tensors: give this rank its part of {"NAME.KEY": whole tensor}."""
    held = {p for group in inner(optimizer).param_groups for p in group["params"]}
    offloaded = isinstance(inner(optimizer), OffloadedAdamW)
    for full_name, t in tensors.items():
        name, _, key = full_name.rpartition(".")
        p = model.get_parameter(name)
        if p not in held:
            continue
        if key != "step" and t.is_floating_point():
            t = t.to(p.dtype)  # the run that wrote it may have had another dtype
        if t.shape == p.shape:
            t = split_like(p, t)
        # clone: a tensor that is mapped from a file may lie unaligned in memory, and the kernels
        # then add in another order, which changes the last bits of a sum
        t = my_part(t).clone().cpu() if offloaded else t.clone().to(p.device)
        # a step that is whole is adamw8bit's, for torch's are floats
        inner(optimizer).state[p][key] = t if t.is_floating_point() or t.dim() else int(t)


# --------------------------------------------------------------------------------------------------
# the loss scale of float16

GROWTH = 200  # steps


def overflowed(state, norms, iteration):
    """
    Whether a step in float16 must be skipped, because a gradient norm is not finite. The norms are
    the same on all ranks, and so is the answer.

    The losses are multiplied by state["loss_scale"], because float16 rounds gradients below 6e-8 to
    0. It is halved after an overflow, and doubled after GROWTH steps without one (mixed precision,
    arXiv 1710.03740, section 3.2). Raises Stop after 20 skipped steps in a row: the scale is not to
    blame for them.
    """
    over = not all(bool(norm.isfinite()) for norm in norms)
    if over and state["skipped"] >= 20:
        raise Stop(f"iteration {iteration}: the gradients are not finite at any scale of the loss, "
                   "20 steps in a row; stopped. Lower the learning rate, or use bfloat16")
    scale, clean = state["loss_scale"], state["clean_steps"] + 1
    if over:
        if parallel.rank_and_size()[0] == 0:
            print(f"iteration {iteration}: a float16 gradient overflowed at loss scale {scale:g}; "
                  "step skipped")
        scale, clean = max(scale / 2, 1.0), 0
    elif clean == GROWTH:
        scale, clean = min(scale * 2, 2.0**24), 0
    state |= dict(loss_scale=scale, clean_steps=clean, skipped=(state["skipped"] + 1) * over)
    return over


# --------------------------------------------------------------------------------------------------
# the moving average


class MovingAverage:
    """
    Exponential moving average of a model's trained parameters, in at least fp32 (DeepSpeed-Chat
    keeps one of its actor, arXiv 2308.01320, section 2.2). After each step,

        average = decay * average + (1 - decay) * weights

    Where the weights are sharded, each rank averages its shards.
    """

    def __init__(self, model, decay):
        self.decay = decay
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.names, self.parameters = list(trained), list(trained.values())
        self.begin()

    def begin(self):
        """The average is the weights as they are now."""
        self.averages = [at_least_float32(my_part(p.detach())).clone() for p in self.parameters]

    @torch.no_grad()
    def update(self):
        for average, p in zip(self.averages, self.parameters, strict=True):
            average.lerp_(my_part(p.detach()).to(average.dtype), 1 - self.decay)

    @contextlib.contextmanager
    def in_place(self):
        """In this block, the model has the averages as its weights."""
        with torch.no_grad():
            kept = [my_part(p.detach()).clone() for p in self.parameters]
            for p, average in zip(self.parameters, self.averages, strict=True):
                my_part(p.detach()).copy_(average)
            try:
                yield
            finally:
                for p, t in zip(self.parameters, kept, strict=True):
                    my_part(p.detach()).copy_(t)

    def tensors(self):
        """{name: average, or the Part of it that this rank has}."""
        parts = zip(self.names, self.parameters, self.averages, strict=True)
        return {name: Part(t, p.shape, t.dtype, like=p) if is_shard(p) else t
                for name, p, t in parts}

    def fill(self, tensors):
        """The inverse of tensors: {name: whole average} -> this rank's part of it."""
        for name, p, average in zip(self.names, self.parameters, self.averages, strict=True):
            average.copy_(my_part(split_like(p, tensors[name])))

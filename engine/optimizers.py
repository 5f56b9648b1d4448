"""
The optimizers' plumbing: which one each model has, on which device its states lie, float16's loss scale, the moving average.
"""
import contextlib

import torch

import parallel
from engine import together
from engine.placement import gather
from engine.pretrained import split_like
from errors import Stop
from model import at_least_float32
from parallel import is_shard, my_part


def next_loss_scale(scale, clean_steps, overflowed, growth_interval=200):
    """
    float16 has gradients below 6e-8 as 0, so the losses are multiplied by `scale`: half of it after an overflow, twice after
    growth_interval steps without one (arXiv 1710.03740, section 3.2). Returns the new (scale, clean_steps).
    """
    if overflowed:
        return max(scale / 2, 1.0), 0
    return (min(scale * 2, 2.0**24), 0) if clean_steps + 1 == growth_interval else (scale, clean_steps + 1)


def overflowed(state, norms, iteration):
    """
    Whether a step in float16 must be skipped, on all ranks alike, as a gradient norm is not finite. Keeps loss_scale,
    clean_steps and skipped in the run's state. Raises Stop after 20 in a row: that is no overflow of the scale.
    """
    over = not all(bool(norm.isfinite()) for norm in norms)
    if over and state["skipped"] >= 20:
        raise Stop(f"iteration {iteration}: the gradients are not finite at any scale of the loss, 20 steps in a row; stopped. "
                   "Lower the learning rate, or use bfloat16")
    state["skipped"] = state["skipped"] + 1 if over else 0
    if over and parallel.rank_and_size()[0] == 0:
        print(f"iteration {iteration}: a float16 gradient overflowed at loss scale {state['loss_scale']:g}; step skipped")
    state["loss_scale"], state["clean_steps"] = next_loss_scale(state["loss_scale"], state["clean_steps"], over)
    return over


# ---------------------------------------------------------------------------------------------------------------------
# optimizers


class OffloadedAdamW(torch.optim.AdamW):
    """
    AdamW whose states, and a copy of the weights, are in the CPU's memory, where the step is computed (ZeRO-Offload, arXiv
    2101.06840): a step moves each gradient there and each weight back, and the GPU holds neither state.
    """

    @torch.no_grad()
    def step(self, closure=None):
        from torch.optim.adamw import adamw

        if not hasattr(self, "weights"):
            self.weights = {}  # made at the first step, when whatever is loaded has been loaded
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state, here = self.state[p], my_part(p)
                if p not in self.weights:
                    self.weights[p] = here.detach().cpu()  # on a CPU, the weight itself
                weight = self.weights[p]
                if not state:
                    state.update(step=torch.zeros(()), exp_avg=torch.zeros_like(weight), exp_avg_sq=torch.zeros_like(weight))
                adamw([weight], [my_part(p.grad).cpu()], [state["exp_avg"]], [state["exp_avg_sq"]], [], [state["step"]],
                      fused=True, amsgrad=False, maximize=False, lr=group["lr"], beta1=group["betas"][0],
                      beta2=group["betas"][1], weight_decay=group["weight_decay"], eps=group["eps"])
                here.copy_(weight)

FLOOR = 2.0**20  # more than the RMS of any weight; a power of two, so dividing by it rounds nothing


def make_optimizer(model, place, lr, betas, eps, weight_decay):
    """
    The optimizer of a model's trained parameters, at its stage and place. Adafactor (arXiv
    1804.04235) is the paper's without its section 8: the learning rate is a step's size, as it is
    AdamW's, and not a share of the weights' own size.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if place.optimizer == "adafactor":
        # torch multiplies lr by max(eps[1], RMS of the weight): with a floor above any RMS that is
        # a constant, which is taken off lr here and in step. 1e-15 squared is the paper's epsilon_1
        settings = dict(lr=lr / FLOOR, weight_decay=weight_decay * FLOOR, eps=(1e-15, FLOOR))
        kind = torch.optim.Adafactor
        if parallel.rank_and_size()[0] == 0:
            name = "policy" if model.head == "lm" else "value_model"
            print(f"{name}: adafactor has no beta1, beta2 and adam_eps; these keys are AdamW's and "
                  "not used here")
    else:
        kind = OffloadedAdamW if place.offload == "optimizer" else torch.optim.AdamW
        settings = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        settings |= dict(fused=True) if kind is torch.optim.AdamW else {}
    if place.stage == 1 and parallel.rank_and_size()[1] > 1:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(parameters, kind, **settings)
    groups = [p for p in parameters if is_shard(p)], [p for p in parameters if not is_shard(p)]  # fused kernels take one kind
    return kind([dict(params=group) for group in groups if group], **settings)


def step(optimizer, lr):
    """One step of an optimizer at this learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = lr / FLOOR if isinstance(inner(optimizer), torch.optim.Adafactor) else lr
    if inner(optimizer) is optimizer:
        optimizer.step()
    else:
        parallel.collective(optimizer.step)  # stage 1 sends the new weights around


def inner(optimizer):
    """The optimizer that holds this rank's states."""
    return getattr(optimizer, "optim", optimizer)


def owners(model, optimizer):
    """{parameter: the rank that holds its states}, at stage 1; {} where every rank has its own."""
    if inner(optimizer) is optimizer:
        return {}
    parameters = [p for p in model.parameters() if p.requires_grad]
    mine = {id(p) for group in inner(optimizer).param_groups for p in group["params"]}
    held = torch.tensor([id(p) in mine for p in parameters], device=parallel.wire()).long()
    ranks = torch.stack(parallel.all_gather(held)).argmax(0).tolist()
    return dict(zip(parameters, ranks, strict=True))


def optimizer_tensors(model, optimizer):
    """
    {parameter.key: whole tensor} of an optimizer's state, by the parameters' names rather than their numbers, in the CPU's
    memory; complete on rank 0 alone. All ranks call it.
    """
    state, owner, rank = inner(optimizer).state, owners(model, optimizer), parallel.rank_and_size()[0]
    tensors = {}
    for name, p in model.named_parameters():
        entries = {key: t for key, t in state[p].items() if torch.is_tensor(t)} if p in state else {}
        if owner and p.requires_grad:
            entries = together.send_tensors(owner[p], entries)
        for key, t in entries.items():
            if is_shard(p) and t.shape == my_part(p).shape and t.dim() > 0 or is_shard(t):
                t = gather(my_part(t), p)
            if rank == 0:
                tensors[f"{name}.{key}"] = t.detach().cpu().contiguous()
    return tensors


def fill_optimizer(model, optimizer, tensors):
    """The inverse of optimizer_tensors: give this rank what it holds of {parameter.key: whole tensor}."""
    held = {p for group in inner(optimizer).param_groups for p in group["params"]}
    for full_name, t in tensors.items():
        name, _, key = full_name.rpartition(".")
        p = model.get_parameter(name)
        if p not in held:
            continue
        t = t if key == "step" else t.to(p.dtype)  # the run before may have had another dtype
        t = split_like(p, t) if t.shape == p.shape else t
        offloaded = isinstance(inner(optimizer), OffloadedAdamW)
        # clone: a tensor of a file's map may lie unaligned in memory, which changes the last bits of a sum
        inner(optimizer).state[p][key] = my_part(t).clone().cpu() if offloaded else t.clone().to(p.device)


# ---------------------------------------------------------------------------------------------------------------------
# the moving average


class MovingAverage:
    """
    Exponential moving average of what is trained of a model, in at least fp32 (DeepSpeed-Chat keeps one of its actor, arXiv
    2308.01320, section 2.2): average = decay average + (1 - decay) weights, after each step. Of a shard where there are shards.
    """

    def __init__(self, model, decay):
        self.decay = decay
        self.names = [name for name, p in model.named_parameters() if p.requires_grad]
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.begin()

    def begin(self):
        self.averages = [at_least_float32(my_part(p.detach())).clone() for p in self.parameters]

    @torch.no_grad()
    def update(self):
        for average, p in zip(self.averages, self.parameters, strict=True):
            average.lerp_(my_part(p.detach()).to(average.dtype), 1 - self.decay)

    @contextlib.contextmanager
    def in_place(self):
        """Within this, the model is the average."""
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
        """{parameter: whole average}, complete on rank 0 alone. All ranks call it."""
        whole = {}
        for name, p, average in zip(self.names, self.parameters, self.averages, strict=True):
            average = gather(average, p) if is_shard(p) else average
            if parallel.rank_and_size()[0] == 0:
                whole[name] = average.cpu().contiguous()
        return whole

    def fill(self, tensors):
        """The inverse of tensors."""
        for name, p, average in zip(self.names, self.parameters, self.averages, strict=True):
            average.copy_(my_part(split_like(p, tensors[name])))

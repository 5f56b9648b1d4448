"""
Optimizers. In this file, downwards:

    make_optimizer, step              the optimizer of a model, and one step of it
    optimizer_tensors, fill_optimizer an optimizer's state, for checkpoints
    overflowed                        the loss scale of float16
"""
import torch

import parallel
from configurator import of_model
from errors import Stop
from parallel import is_shard, my_part, split_like

# --------------------------------------------------------------------------------------------------
# optimizers


def make_optimizer(model, name, system, lr, betas, eps):
    """
    The optimizer of a model's trained parameters: torch's fused AdamW, or another one by the keys.
    name: of the model in the keys, policy, value or reward.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [dict(params=parameters)]
    if system.weight_decay > 0:  # of matrices alone: it would pull norms to 0
        matrices, vectors = ([p for p in parameters if (p.dim() < 2) == flat]
                             for flat in (False, True))
        groups = [dict(params=matrices)] + [dict(params=vectors, weight_decay=0.0)] * bool(vectors)
    kind, settings = torch.optim.AdamW, dict(
        lr=lr, betas=betas, eps=eps, weight_decay=system.weight_decay, fused=True)
    scale = 1.0  # a factor of the learning rate
    if of_model(system.optim, name) not in ("", "adamw"):
        from options.optimizers import other_optimizer

        kind, settings, scale = other_optimizer(
            of_model(system.optim, name), lr, betas, eps, system.weight_decay)
    if system.zero_stage or system.offload:
        from options.shards import optimizer_of

        optimizer = optimizer_of(model, name, system, groups, kind, settings)
    else:
        optimizer = kind(groups, **settings)
    optimizer.scale = scale
    return optimizer


def step(optimizer, lr):
    """One step of an optimizer at this learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = lr * optimizer.scale
    if inner(optimizer) is optimizer:
        optimizer.step()
    else:
        parallel.collective(optimizer.step)  # stage 1: each rank sends its new weights


def inner(optimizer):
    """The optimizer that has this rank's states: at ZeRO stage 1, the one in its wrapper."""
    return getattr(optimizer, "optim", optimizer)


# --------------------------------------------------------------------------------------------------
# an optimizer's state, for checkpoints


def optimizer_tensors(model, optimizer):
    """
    A collective where zero_stage splits the model or the states: {"NAME.KEY": tensor} of an
    optimizer's state, such as "layers.0.q.weight.exp_avg". It has names, not numbers, and the
    shapes of whole tensors: so another number of ranks can resume. parallel.whole gathers a tensor
    of which this rank has a part.
    """
    state, tensors = inner(optimizer).state, {}
    for name, p in model.named_parameters():
        for key, t in state.get(p, {}).items():
            if isinstance(t, int):  # adamw8bit's step
                t = torch.tensor(t)
            if key.startswith("qmap"):  # adamw8bit's levels, one shared table: a file needs copies
                t = t.clone()
            if torch.is_tensor(t):
                tensors[f"{name}.{key}"] = t
    if inner(optimizer) is not optimizer or any(map(is_shard, model.parameters())):
        from options.shards import parts_of_states

        tensors = parts_of_states(tensors, model, optimizer)  # COLLECTIVE
    # the same order on all ranks, whether steps made the states or they were loaded
    order = {name: number for number, (name, _) in enumerate(model.named_parameters())}
    in_order = sorted(tensors, key=lambda full: (order[full.rpartition(".")[0]], full))
    return {full: tensors[full] for full in in_order}


def fill_optimizer(model, optimizer, tensors):
    """The inverse of optimizer_tensors: give this rank its part of {"NAME.KEY": whole tensor}."""
    own = {p for group in inner(optimizer).param_groups for p in group["params"]}
    on_cpu = getattr(inner(optimizer), "on_cpu", False)  # offloaded
    for full_name, t in tensors.items():
        name, _, key = full_name.rpartition(".")
        p = model.get_parameter(name)
        if p not in own:
            continue
        if key != "step" and t.is_floating_point():
            t = t.to(p.dtype)  # the run that saved it may have had another dtype
        if t.shape == p.shape:
            t = split_like(p, t)
        # clone: a tensor that is mapped from a file may be unaligned in memory. Then kernels add in
        # another order, and the last bits of a sum change
        t = my_part(t).clone().cpu() if on_cpu else t.clone().to(p.device)
        # an integer step is adamw8bit's; torch's are floats
        inner(optimizer).state[p][key] = t if t.is_floating_point() or t.dim() else int(t)


# --------------------------------------------------------------------------------------------------
# the loss scale of float16

GROWTH = 200  # steps


def overflowed(state, norms, iteration):
    """
    Whether a step in float16 must be skipped, because a gradient norm is not finite. The norms are
    the same on all ranks, and so is the answer. state: of the run; checkpoints have it.

    The losses are multiplied by state["loss_scale"], because float16 rounds gradients below 6e-8 to
    0. It is halved after an overflow, and doubled after GROWTH steps without one (mixed precision,
    arXiv 1710.03740, section 3.2). Raises Stop after 20 skipped steps in a row: then the scale is
    not the cause.
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

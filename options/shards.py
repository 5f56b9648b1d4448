"""
The keys zero_stage and offload: models that are split over the ranks, or wait in the CPU's memory.

The stages are ZeRO's (arXiv 1910.02054). At stage 0 every rank has everything; stage 1 splits the
optimizer's states over the ranks (torch's ZeroRedundancyOptimizer); stage 2 also the gradients and,
between steps, the weights; stage 3 also the weights during a step: a layer is gathered while it
computes (2 and 3 are torch's FSDP2, fully_shard). On one rank every stage is 0. The stages change
only the memory of a run, not its numbers.
"""
import contextlib
import functools
import warnings
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn

import parallel
from checkpoint import unwrapped
from configurator import for_model
from errors import BadInput
from load import dtypes, freeze_or_train, read_model
from options.parts import outline
from options.recompute import recompute
from options.sixteen_bits import matrices_of
from options.trunk import layers_of
from parallel import alone, comm_device, copy_into, from_rank, is_shard, my_part, rank_and_size
from ranks import this_rank

# --------------------------------------------------------------------------------------------------
# the keys


def stage_of(system, name):
    """A model's ZeRO stage, 0 to 3. The reference has the policy's, unless the key names it."""
    stage = for_model(system.zero_stage, name)
    if name == "ref" and not stage:
        stage = for_model(system.zero_stage, "policy")
    if stage not in ("", "0", "1", "2", "3"):
        raise BadInput(f"zero_stage = {system.zero_stage!r}: wanted 0, 1, 2 or 3, for all models, "
                       "or as policy=3,ref=3")
    return int(stage or 0)


def offload_of(system, name, trained, is_head=False):
    """
    The part of a model in the CPU's memory: none, optimizer, or params (weights, too). "optimizer"
    without a name is for the trained models, but not for a head on the policy (is_head).
    """
    if system.offload.strip() == "optimizer" and (is_head or not trained):
        return "none"
    return for_model(system.offload, name) or "none"


def places_of(system, name, trained, adapter):
    """(stage, offload) of a model that is loaded. Raises BadInput where they cannot be."""
    stage, offload = stage_of(system, name), offload_of(system, name, trained)
    if offload not in ("none", "optimizer", "params") or offload == "optimizer" and not trained:
        raise BadInput(f"offload = {system.offload!r}: wanted none, optimizer (of a trained model) "
                       "or params, for all models or as policy=optimizer,ref=params")
    if trained and offload == "params" and (stage < 2 or adapter):
        raise BadInput(f"offload: the parameters of {name} are always in use unless sharded; type "
                       f"--zero_stage={name}=3 (without LoRA), or --offload={name}=optimizer")
    return stage, offload


# --------------------------------------------------------------------------------------------------
# loading


def load_split(path, name, system, device, head, trained, adapter, seed):
    """
    load.load's read_model and freeze_or_train, of a model that is split over the ranks if its stage
    says so (a collective), or waits in the CPU's memory if it is frozen and offload says so.
    """
    whole = trained and not adapter  # with LoRA the model itself is frozen
    stage, offload = places_of(system, name, trained, adapter)
    splits = rank_and_size()[1] > 1 and stage >= (2 if whole else 3)
    home = "cpu" if offload == "params" else device
    if not splits:
        model = read_model(path, head, system, home, seed)
        freeze_or_train(model, system, trained, adapter)
        if offload == "params" and device.type != "cpu":  # `fetched` moves it there for its calls
            model.must_fetch = True
            for p in model.parameters() if device.type == "cuda" else ():
                p.data = p.data.pin_memory()  # pinned memory copies faster
        return model
    # only rank 0 reads the files, into the CPU's memory; it sends every rank its parts
    read = []

    def read_whole():
        read.append(read_model(path, head, system, "cpu", seed))
        freeze_or_train(read[0], system, trained, adapter)
        return [name for name, p in read[0].named_parameters() if p.requires_grad]

    steps, model = set(alone(read_whole)), outline(path, head, system)  # COLLECTIVE
    if not whole:  # a trained model keeps its 32 bits
        freeze_or_train(model, system, False, adapter)
    for its, p in model.named_parameters():
        p.requires_grad_(its in steps)
    if trained and system.gradient_checkpointing:
        recompute(model)
    shard(model, stage, offload, device, dtypes(system)[1] if whole else None)
    model.to_empty(device=home)
    for t in [*model.parameters(), *model.buffers()]:
        if not is_shard(t):  # FSDP moves no buffers, and no scalar head
            t.data = t.data.to(device)
    model.hf.tie_weights()  # to_empty makes two tensors of a tied one
    fill_from_rank_0(model, read[0] if read else None)  # COLLECTIVE
    return model


def shard(model, stage, offload, device, matrices=None):
    """
    FSDP2: a layer is gathered while it computes (stage 3), or from its forward until its backward
    pass (stage 2). Embedding and head, outside the layers, are gathered for the whole forward.

    matrices: the dtype to which autocast rounds a trained model's; None: it does not. A layer is
    then rounded first and gathered after it: half of the traffic, the same numbers. Its norms,
    which autocast does not round, are gathered separately, and so are embedding and head: their
    gradients may be sums over chunks, in 32 bits. A layer with both in one module is not rounded.
    """
    from torch.distributed.fsdp import (CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard,
                                        register_fsdp_forward_method)

    model.must_fetch = True
    model.by_layer = stage == 3
    settings = dict(mesh=mesh_of_ranks(device), reshard_after_forward=model.by_layer)
    if offload == "params":
        settings["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    rounded = MixedPrecisionPolicy(
        param_dtype=matrices, reduce_dtype=torch.float32, cast_forward_inputs=False)
    narrow = {id(p) for p in matrices_of(model)}
    for layer in layers_of(model):
        wide = [m for m in layer.modules()
                if not isinstance(m, nn.Linear) and type(m).__name__ != "Conv1D"
                and any(id(p) not in narrow for p in m.parameters(recurse=False))]
        norms = [m for m in wide if not narrow & set(map(id, m.parameters()))]
        if matrices and norms:
            fully_shard(norms, **settings)
        more = dict(mp_policy=rounded) if matrices and norms == wide else {}
        fully_shard(layer, **settings, **more)
    inputs, outputs = model.hf.get_input_embeddings(), model.hf.get_output_embeddings()
    if outputs is None or inputs.weight is not outputs.weight:  # it is as large as many layers
        fully_shard(inputs, **settings)
    # a scalar head is one row: not worth a split
    head = {model.hf.score.weight} if model.head == "scalar" else set()
    settings["reshard_after_forward"] = False
    fully_shard(model, ignored_params=head, **settings)
    # some trunks return a view of their states, and FSDP warns of writing into it: nobody does
    warnings.filterwarnings("ignore", r"FSDP2-wrapped module \(FSDPModel\) returned a view")
    # the methods that run the trunk. A head that reads its states has its weights until after the
    # backward pass, because parameters outside the layers stay gathered
    for name in ("states", "next_logits"):
        register_fsdp_forward_method(model, name)


def mesh_of_ranks(device):
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh.from_group(this_rank.group or dist.group.WORLD, device.type)


@torch.no_grad()
def fill_from_rank_0(model, whole):
    """A collective: give a sharded model the weights of `whole`, which is None but on rank 0."""
    own = [*model.hf.parameters(), *model.hf.buffers()]
    theirs = [*whole.hf.parameters(), *whole.hf.buffers()] if whole else own
    for t, source in zip(own, theirs, strict=True):
        sent = torch.empty(t.shape, dtype=t.dtype, device=comm_device())
        if whole:
            sent.copy_(source)
        dist.broadcast(sent, group_src=0, group=this_rank.group)  # COLLECTIVE
        copy_into(t, sent)
    model.new_head, model.score_shift = from_rank(  # COLLECTIVE
        whole and [whole.new_head, whole.score_shift])


# --------------------------------------------------------------------------------------------------
# sharded and offloaded models in use


@contextlib.contextmanager
def fetched(model, device):
    """
    In this block a model that is split, or waits in the CPU's memory, can be called without
    gradients. Behind it the gathered layers are freed, which FSDP does in backward passes alone.
    """
    model, parts = trunk_and_parts(model)
    if parts:  # not by is_shard: gathered parameters are no shards
        try:
            yield
        finally:
            for part in parts:
                part.reshard()
        return
    tensors = [*model.parameters(), *model.buffers()]
    homes = [t.data for t in tensors]
    for t in tensors:
        t.data = t.data.to(device, non_blocking=True)  # in order with the kernels that read it
    try:
        yield
    finally:
        for t, home in zip(tensors, homes, strict=True):
            t.data = home  # nothing is copied back, because a frozen model has not changed


@contextlib.contextmanager
def gathered(model):
    """A collective: the block in which a sharded model, which it gives, is whole on each rank."""
    trunk, parts = trunk_and_parts(model)
    trunk.set_reshard_after_forward(False)
    for part in parts:
        part.unshard()  # COLLECTIVE
    try:
        yield model
    finally:
        for part in parts:
            part.reshard()
        trunk.set_reshard_after_forward(trunk.by_layer)
        trunk.set_reshard_after_forward(False, recurse=False)


def trunk_and_parts(model):
    """The Model on whose trunk a model stands, mostly itself; its modules that FSDP gathers."""
    while model.base is not None:
        model = model.base
    return model, [module for module in model.modules() if hasattr(module, "reshard")]


# --------------------------------------------------------------------------------------------------
# gradients


class Shards:
    """The gradients of sharded parameters, which FSDP reduces, with a flat tensor's methods."""

    def __init__(self, parameters):
        def in_32_bits(p):  # FSDP adds the next micro-batch's to what it finds here
            p.grad = p.grad.float()

        self.parameters = parameters
        for p in parameters:
            if p.dtype.itemsize == 2:
                p.grad_dtype = None  # any
                p.register_post_accumulate_grad_hook(in_32_bits)

    def parts(self):
        return [p.grad.to_local() for p in self.parameters if p.grad is not None]

    def zero_(self):
        for p in self.parameters:
            p.grad = None

    def mul_(self, factor):
        for part in self.parts():
            part.mul_(factor)

    def all_reduce(self):
        """FSDP took the mean over the ranks in the backward pass: this makes it a sum."""
        self.mul_(rank_and_size()[1])

    def norm(self):
        """A collective: the norm over all parts of all ranks."""
        squares = sum(parallel.wide_norm(part) ** 2 for part in self.parts()).to(comm_device())
        dist.all_reduce(squares, group=this_rank.group)
        return squares.sqrt()


# --------------------------------------------------------------------------------------------------
# optimizers, and their states in checkpoints


def optimizer_of(model, name, system, groups, kind, settings):
    """An optimizer of these groups and settings: split at stage 1, or with states on the CPU."""
    is_head = model.base is not None and not hasattr(model, "adapters")
    stage, offload = stage_of(system, name), offload_of(system, name, True, is_head)
    if offload == "optimizer":
        kind = OffloadedAdamW
    if stage == 1 and rank_and_size()[1] > 1:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer = ZeroRedundancyOptimizer(groups, kind, process_group=this_rank.group, **settings)
    else:
        # a fused kernel cannot take shards and whole tensors together
        groups = [group | dict(params=[p for p in group["params"] if is_shard(p) == split])
                  for group in groups for split in (True, False)]
        optimizer = kind([group for group in groups if group["params"]], **settings)
    optimizer.tensors_by_name = functools.partial(tensors_by_name, optimizer)
    optimizer.load_by_name = functools.partial(load_by_name, optimizer)
    return optimizer


def tensors_by_name(optimizer, model):
    """A collective: {"NAME.KEY": tensor or Part} of the states of all ranks, in the same order."""
    state, tensors = unwrapped(optimizer).state, {}
    for name, p in model.named_parameters():
        for key, t in state.get(p, {}).items():
            if torch.is_tensor(t):
                if t.dim() > 0 and is_shard(p) and not is_shard(t):
                    t = Part(t, p.shape, t.dtype, like=p)  # offloaded
                tensors[f"{name}.{key}"] = t
    if unwrapped(optimizer) is optimizer:
        return tensors
    # stage 1: a rank has some parameters' states. No tensor is sent before it is written
    mine = [[name, list(t.shape), str(t.dtype).removeprefix("torch.")]
            for name, t in tensors.items()]
    parts = {}
    for rank in range(rank_and_size()[1]):
        for name, shape, dtype in from_rank(mine, rank):  # COLLECTIVE
            parts[name] = Part(tensors.get(name), shape, getattr(torch, dtype), owner=rank)
    return parts


def load_by_name(optimizer, model, tensors):
    """The inverse: give this rank its part of each ((name, ".", key), whole tensor)."""
    own = {p for group in unwrapped(optimizer).param_groups for p in group["params"]}
    on_cpu = getattr(unwrapped(optimizer), "on_cpu", False)  # offloaded
    for (name, _, key), t in tensors:
        p = model.get_parameter(name)
        if p not in own:
            continue
        if t.shape == p.shape and is_shard(p):
            whole, t = t, torch.empty_like(p, dtype=t.dtype, requires_grad=False)
            copy_into(t, whole)
        unwrapped(optimizer).state[p][key] = my_part(t).cpu() if on_cpu else t.to(p.device)


class OffloadedAdamW(torch.optim.AdamW):
    """
    AdamW with its states, and a copy of the weights, in the CPU's memory, where the step is
    computed (ZeRO-Offload, arXiv 2101.06840): gradients go there, and weights come back.
    """

    on_cpu = True

    @torch.no_grad()
    def step(self, closure=None):
        from torch.optim.adamw import adamw

        # {parameter: (weights, version)}, filled at the first step, when a checkpoint has been
        # loaded; and again where another has written: a new value head's unit (Model.follow)
        weights = vars(self).setdefault("weights", {})
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state, on_device = self.state[p], my_part(p)
                weight, version = weights.get(p, (None, None))
                if version != p._version:
                    weight = on_device.detach().cpu()  # of a model on the CPU: itself
                gradient = my_part(p.grad).cpu()  # float32, also of bfloat16 weights
                if not state:
                    state.update(step=torch.zeros(()), exp_avg=torch.zeros_like(gradient),
                                 exp_avg_sq=torch.zeros_like(gradient))
                one = weight.dtype == gradient.dtype  # the fused kernel wants one dtype
                adamw([weight], [gradient], [state["exp_avg"]], [state["exp_avg_sq"]],
                      [], [state["step"]], fused=one, foreach=False, amsgrad=False, maximize=False,
                      lr=group["lr"], beta1=group["betas"][0], beta2=group["betas"][1],
                      weight_decay=group["weight_decay"], eps=group["eps"])
                on_device.copy_(weight)
                weights[p] = weight, p._version


@dataclass
class Part:
    """
    This rank's part of a tensor: its rows, which are split like the sharded parameter `like`; or
    all or nothing of it, where only the rank `owner` has it, such as at ZeRO stage 1.
    """

    tensor: torch.Tensor  # this rank's; None on the ranks that have no part
    shape: tuple  # of the whole tensor
    dtype: torch.dtype
    like: torch.Tensor = None
    owner: int = None

    def whole(self):
        """A collective: the whole tensor, on every rank."""
        if self.owner is None:
            from torch.distributed.tensor import DTensor

            mesh = self.like.device_mesh
            return DTensor.from_local(self.tensor.to(mesh.device_type), mesh, self.like.placements,
                                      shape=self.shape, stride=self.like.stride()).full_tensor()
        sent = torch.empty(self.shape, dtype=self.dtype, device=comm_device())
        if self.owner == rank_and_size()[0]:
            sent.copy_(self.tensor)
        dist.broadcast(sent, group_src=self.owner, group=this_rank.group)
        return sent

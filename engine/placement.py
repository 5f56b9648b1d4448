"""
Where each model lies, as its Place says (engine/places.py): how much of it on each rank, on the GPU
or in the CPU's memory, in which precision. In this file, downwards:

    load_placed, shard, refill      a model from its folder to its place
    sharded, in_memory, held        questions about models in their places
    no_grad_forwards                the block around every forward without a backward pass
    decoding_copy                   the model that the rollout samples from

Stages 2 and 3 of ZeRO are torch's FSDP2 (fully_shard); stage 1, which splits no weights, is its
ZeroRedundancyOptimizer (engine/optimizers.py).
"""
import contextlib
import copy
import importlib.util
import os
import shutil
import sys
import warnings

import torch
import torch.nn as nn

import parallel
from engine.adapters import Adapted, load_whole
from engine.four_bits import quantize
from engine.places import is_sharded
from engine.tensor_parallel import split_copy
from engine.together import alone
from errors import BadConfig, BadInput
from folders import model_folders
from model import (Model, auto_class, check_head, check_one_score, freeze, load_model, probe,
                   read_config)
from parallel import fill, is_shard


# --------------------------------------------------------------------------------------------------
# loading


def load_placed(path, place, device, head="lm", dtype=torch.float32, matrices=None, seed=0,
                trained=False, recompute=False, compiled=False):
    """
    A Model as its Place says: on this rank's device, sharded over the ranks, in the CPU's memory,
    or its shapes alone; with LoRA an Adapted on it. A collective where it is sharded.

    dtype: of its weights. matrices: of its matrices, if it is frozen (see precisions). recompute:
    the backward pass computes the layers again. compiled: the key compile. Raises BadInput.
    """
    if not place.here:
        return outline(path, head, dtype)
    adapted = trained and place.lora is not None
    recompute = recompute and trained
    trained = trained and not adapted  # with LoRA the model itself is frozen
    split = is_sharded(place, trained)
    four_bits = adapted and place.four_bits
    on_cpu = four_bits or place.offload == "params" and (split or not trained)
    if split:
        # rank 0 alone reads the files, into the CPU's memory; every rank gets its parts from it
        whole = []
        alone(lambda: whole.append(load_whole(path, head, dtype, seed=seed)))  # COLLECTIVE
        model = outline(path, head, dtype)
        settle(model, trained, matrices, recompute)
        shard(model, place, device, matrices if trained else None)
        model.to_empty(device="cpu" if on_cpu else device)
        model.hf.tie_weights()  # to_empty makes two tensors of a tied one
        fill_from_rank_0(model, whole[0] if whole else None)  # COLLECTIVE
    else:
        model = load_whole(path, head, dtype, "cpu" if on_cpu else device, seed)
        settle(model, trained, matrices, recompute)
    if four_bits:
        quantize(model, device, matrices or dtype)
        model.to(device)
    finish_placing(model, device, compiled)
    if head == "lm":  # read as in the run: where matrices are in 16 bits already, all must be
        rounds = torch.autocast(device.type, matrices, enabled=matrices is not None)
        with rounds, no_grad_forwards([model], device):
            probe(model)
    return Adapted(model, head, **place.lora, seed=seed) if adapted else model


def outline(path, head, dtype):
    """The model of a folder without its weights: shapes and settings, which take no memory."""
    *adapters, folder = model_folders(path)
    config = read_config(folder, path)
    kind, file_dtype = (config.architectures or [""])[0], config.dtype
    if head == "scalar":
        check_one_score(config, path)
    with torch.device("meta"):
        hf = auto_class(head).from_config(config, dtype=dtype)
    model = freeze(Model(hf, head, path))
    model.file_dtype = file_dtype
    if head == "scalar":
        check_head(hf, path)
        model.new_head = not kind.endswith("ForSequenceClassification")
    return model


def settle(model, trained, matrices, recompute):
    """
    Make a model trained or frozen; the matrices of a frozen one get the dtype `matrices`, if there
    is one. recompute: the backward pass computes the layers again.
    """
    model.requires_grad_(trained)
    if recompute:
        model.recompute()
    if matrices and not trained:
        for p in matrices_of(model):
            p.data = p.data.to(matrices)


def matrices_of(model):
    """
    The parameters that autocast rounds wherever they are used: the matrices, but not the table of
    embeddings, whose rows it takes as they are, and not a scalar head.
    """
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    wide = {id(p) for m in tables for p in m.parameters()} | set(map(id, scalar_head(model)))
    return [p for p in model.parameters() if p.dim() >= 2 and id(p) not in wide]


def scalar_head(model):
    """[the weight of a scalar head], which always keeps its bits; [] of a language model."""
    return [model.hf.score.weight] if model.head == "scalar" else []


def finish_placing(model, device, compiled):
    """What else the keys want of a model that holds its weights."""
    if compiled:
        check_compiler(device)
        model.compile_trunk()
    is_offloaded = not sharded(model) and next(model.parameters()).device.type != device.type
    model.offloaded = is_offloaded  # see on_device
    if is_offloaded and device.type == "cuda":
        for p in model.parameters():
            p.data = p.data.pin_memory()  # pinned memory copies faster


def shard(model, place, device, matrices=None, mesh=None):
    """
    FSDP2: a layer is gathered while it computes (stage 3), or from its forward until its backward
    pass (stage 2). What is in no layer, embedding and head, is gathered for the whole forward.

    matrices: the dtype to which autocast will round the matrices of a trained model; None: it will
    not. A layer is then rounded first and gathered after, which is half of the traffic and the same
    numbers. Its norms, which autocast does not round, are gathered by themselves; so are embedding
    and head, whose gradients may be sums over chunks, in 32 bits. mesh: see mesh_of_ranks.
    """
    from torch.distributed.fsdp import (CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard,
                                        register_fsdp_forward_method)

    model.by_layer = by_layer = place.stage == 3
    settings = dict(mesh=mesh or mesh_of_ranks(device))
    if place.offload == "params":
        settings["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    rounded = {}
    if matrices:
        rounded["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=matrices, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in model.layers():
        norms = [m for m in layer.modules() if "Norm" in type(m).__name__]
        if matrices and norms:
            fully_shard(norms, reshard_after_forward=by_layer, **settings)
        fully_shard(layer, reshard_after_forward=by_layer, **settings, **rounded)
    inputs, outputs = model.hf.get_input_embeddings(), model.hf.get_output_embeddings()
    if outputs is None or inputs.weight is not outputs.weight:  # it is as large as many layers
        fully_shard(inputs, reshard_after_forward=by_layer, **settings)
    head = set(scalar_head(model))  # one row: not worth a split
    fully_shard(model, reshard_after_forward=False, ignored_params=head, **settings)
    # some trunks return a view of their states, and FSDP warns of writing into it: nobody does
    warnings.filterwarnings("ignore", r"FSDP2-wrapped module \(FSDPModel\) returned a view")
    # what runs the trunk; a head that reads its states finds its own weights there until after the
    # backward pass, for what is in no layer stays gathered
    for name in ("states", "next_logits"):
        register_fsdp_forward_method(model, name)


def mesh_of_ranks(device):
    """What torch calls the ranks among which a model is split."""
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    if parallel.group:
        return DeviceMesh.from_group(parallel.group, device.type)
    return init_device_mesh(device.type, (parallel.rank_and_size()[1],))


@torch.no_grad()
def fill_from_rank_0(model, whole):
    """
    A collective: give a sharded model the weights of `whole`, which rank 0 alone has, a tensor at a
    time; None on the other ranks.
    """
    own = [*model.hf.parameters(), *model.hf.buffers()]
    theirs = [*whole.hf.parameters(), *whole.hf.buffers()] if whole else [None] * len(own)
    for t, source in zip(own, theirs, strict=True):
        if source is None:
            sent = torch.empty(t.shape, dtype=t.dtype, device=parallel.wire())
        else:
            sent = source.to(parallel.wire(), t.dtype).contiguous()
        parallel.broadcast(sent)  # COLLECTIVE
        fill(t, sent)
    facts = [whole.new_head, whole.score_shift] if whole else [0.0, 0.0]
    facts = torch.tensor(facts, dtype=torch.float64, device=parallel.wire())
    parallel.broadcast(facts)  # COLLECTIVE
    model.new_head, model.score_shift = bool(facts[0]), facts[1].item()


@torch.no_grad()
def refill(model, folder):
    """
    A collective if the model is sharded: give it the weights that are in a folder. Raises BadInput
    where they are another model's.
    """
    whole = []

    def read():
        whole.append(load_model(folder, model.head, model.hf.dtype))
        saved, here = ([p.shape for p in m.hf.parameters()] for m in (whole[0], model))
        if saved != here:
            raise BadInput(f"{folder}: its tensors are not those of the model trained here; "
                           "resume with the model that saved it")

    if sharded(model):
        alone(read)  # COLLECTIVE
        fill_from_rank_0(model, whole[0] if whole else None)  # COLLECTIVE
        return
    read()
    for p, saved in zip(model.hf.parameters(), whole[0].hf.parameters(), strict=True):
        p.data.copy_(saved)


def check_compiler(device):
    """Raise BadConfig where torch.compile would miss its compiler, in the first forward."""
    if device.type == "cuda":
        missing = "the package triton" if importlib.util.find_spec("triton") is None else ""
    else:
        compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
        missing = "" if shutil.which(compiler) else f"a C++ compiler, {compiler} (or set CXX)"
    if missing:
        raise BadConfig(f"compile = True needs {missing}; install it, or leave compile out")


# --------------------------------------------------------------------------------------------------
# models in their places


def trunk_of(model):
    """The Model on whose trunk a model stands: itself, or the one under its adapters and heads."""
    return model.owner() if isinstance(model, Adapted) else model


def sharded(model):
    """Whether a rank holds only a part of this model's weights."""
    return any(map(is_shard, trunk_of(model).parameters()))


def in_memory(**models):
    """
    {name: model} of all models that own memory: those given, without the None among them, each
    under its first name; and the trunk of an Adapted under the name "NAME's trunk", where it is not
    given itself.
    """
    found = {}
    for name, model in models.items():
        if model is not None and model not in found.values():
            found[name] = model
    for name, model in list(found.items()):
        if trunk_of(model) not in found.values():
            found[f"{name}'s trunk"] = trunk_of(model)
    return found


def held(models):
    """{name: model} of those models of which this rank holds more than the shapes."""
    return {name: model for name, model in models.items() if not next(model.parameters()).is_meta}


# --------------------------------------------------------------------------------------------------
# forwards without a backward pass


@contextlib.contextmanager
def no_grad_forwards(models, device):
    """
    The block around every forward that has no backward pass. `models` are all the models that the
    block calls; None stands for one that the run does not have. In the block, no gradients are
    recorded, and frozen models that live in the CPU's memory are on `device`. After the block, also
    after an error in it, the layers that the forwards have gathered are freed: FSDP by itself frees
    them only in a backward pass.
    """
    models = [trunk_of(model) for model in models if model is not None]
    models = list(dict.fromkeys(models))  # each trunk once, however many models stand on it
    try:
        with torch.no_grad(), contextlib.ExitStack() as stack:
            for model in models:
                stack.enter_context(on_device(model, device))
            yield
    finally:
        for model in models:
            reshard(model)


@contextlib.contextmanager
def on_device(model, device):
    """In this block, a frozen model that lives in the CPU's memory is on the device."""
    if not model.offloaded:
        yield
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


def fsdp_modules(model):
    """Those modules of a model that FSDP gathers, each as a whole."""
    return [module for module in model.modules() if hasattr(module, "reshard")]


def reshard(model):
    """Free the gathered layers of a sharded model; parameters() are the shards again."""
    for module in fsdp_modules(model):
        module.reshard()


@contextlib.contextmanager
def decoding_copy(policy, matrices, device, tp=1):
    """
    The block in which the policy decodes, and the model that does it. All ranks come to it
    together. It is the policy itself, unless autocast would round its matrices to the dtype
    `matrices` at every token: then it is a copy that has them in that dtype, for this block only.
    A sharded policy is gathered whole, once, in the dtype in which it trains. tp: so many ranks
    have a copy together, see engine/tensor_parallel.py.
    """
    if tp > 1:
        yield split_copy(policy, matrices, device, tp)  # COLLECTIVE
        return
    trunk = trunk_of(policy)
    modules = fsdp_modules(trunk)
    if modules:
        trunk.set_reshard_after_forward(False)
        for module in modules:
            module.unshard()  # COLLECTIVE
        try:
            yield policy
        finally:
            reshard(trunk)
            trunk.set_reshard_after_forward(trunk.by_layer)
            trunk.set_reshard_after_forward(False, recurse=False)
        return
    if matrices is None or policy.hf.dtype == matrices or isinstance(policy, Adapted):
        # an adapter's trunk is frozen, and has its matrices in that dtype already
        yield policy
        return
    # deepcopy takes from `memo` what is there already, the buffers, too, and copies the modules
    memo = {id(t): t for t in policy.buffers()}
    for p in policy.parameters():
        t = p.detach().to(matrices if p.dim() >= 2 else p.dtype)
        memo[id(p)] = nn.Parameter(t, requires_grad=False)
    yield copy.deepcopy(policy, memo)

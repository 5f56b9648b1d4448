"""
Where each model of a run lies: how much of it on each rank, on the GPU or in the CPU's memory, in
which precision. In this file, downwards:

    placements, precisions          what the keys say of each model: its Place, and its dtypes
    load_placed, shard, refill      a model from its folder to its place
    sharded, in_memory, held        questions about models in their places
    no_grad_forwards                the block around every forward without a backward pass
    decoding_copy                   the model that the rollout samples from

The stages are ZeRO's (arXiv 1910.02054). Stage 0 holds everything on every rank; stage 1 splits the
optimizer's states over the ranks (torch's ZeroRedundancyOptimizer, optimizers.py); stage 2
also the gradients and, between steps, the weights; stage 3 also the weights during a step: a layer
is gathered while it computes (both are torch's FSDP2, fully_shard). On one rank every stage is 0.
Only 16 bits, LoRA and Adafactor change what a run computes; all else changes the memory that it
needs.
"""
import contextlib
import copy
import re
import warnings
from dataclasses import dataclass

import torch
import torch.nn as nn

import parallel
from together import alone
from errors import BadConfig, BadInput, shorten
from folders import model_folders
from model import (Model, freeze, is_linear, load_model, probe, processor_files, read_config,
                   shapes, unread_parameters)
from parallel import fill, is_shard
from trunk import load_whole


# --------------------------------------------------------------------------------------------------
# what the keys say


@dataclass
class Place:
    """How one model is held: what the keys zero_stage, offload, lora and optim say of it."""

    stage: int = 0  # of ZeRO: 0 to 3
    offload: str = "none"  # what is in the CPU's memory: none, optimizer, or params (weights, too)
    lora: dict = None  # rank, alpha and targets of an Adapted; None: no adapters
    optimizer: str = "adamw"
    four_bits: bool = False  # of the trunk under an adapter
    here: bool = True  # False: ranks of another role hold it, and this one knows its shapes alone


def placements(trained, zero_stage, offload, lora, optim, share_base=False, value_init=None,
               ref_path="", names=None):
    """
    {name: Place} of policy, ref, reward, judge and, where there is one, value; or of those `names`.
    trained: the names of the trained models, ("policy", "value") or ("policy",). The others are the
    keys of the run: "", or a list such as "policy=3,ref=0". Raises BadConfig, see `refuse`.

    A value without a name is for all models, or for all trained ones (lora, optim, and
    offload="optimizer"). Two exceptions: the reference is at the policy's stage, unless the key
    names it; and with value_init="shared" the value model is a head on the policy, with no adapter
    and nothing to offload.
    """
    names = names or ("policy", "ref", "reward", "judge", *trained[1:])
    with_trunk = trained[:1] if value_init == "shared" else trained
    stages = parse("zero_stage", zero_stage, names)
    stages.setdefault("ref", stages.get("policy", "0"))
    offloads = parse("offload", offload, names,
                     with_trunk if offload.strip() == "optimizer" else names)
    loras = parse("lora", lora, trained, with_trunk)
    optims = parse("optim", optim, trained)
    places = {name: place_from(name, stages, offloads, loras, optims) for name in names}
    on_trunk = ["ref"] * bool(places[trained[0]].lora and not ref_path) + ["reward"] * share_base
    for name, place in places.items():
        refuse(name, place, name in trained, on_trunk, share_base, value_init)
    return places


def place_of_one(name, *keys):
    """
    The Place of the one model of sft.py or rm.py, which is trained. name: what the keys call it,
    policy or reward. keys: zero_stage, offload, lora, optim. Raises BadConfig.
    """
    return placements((name,), *keys, names=(name,))[name]


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


def refuse(name, place, trained, on_trunk, share_base, value_init):
    """
    Raise BadConfig where the keys of a model cannot go together. This is the whole table: whether
    it is so, and what is said. name: policy, ref, reward, judge or value. on_trunk: the frozen ones
    that are the policy's trunk, or stand on it.
    """
    is_head = name == "value" and value_init == "shared"  # on the policy
    moved, most = place.offload != "none", dict(adamw=3, adamw8bit=0, adafactor=1)[place.optimizer]
    table = [
        (not trained and place.offload == "optimizer",
         f"offload: {name} is not trained, it has no optimizer; type --offload={name}=params"),
        (trained and place.offload == "params" and (place.stage < 2 or place.lora),
         f"offload: the parameters of {name} are in use all the time unless they are sharded; type "
         f"--zero_stage={name}=3 (without LoRA), or --offload={name}=optimizer"),
        (place.stage > most or place.optimizer != "adamw" and moved,
         f"optim: {place.optimizer} needs whole matrices on the GPU, so {name} can be at stage "
         f"{most} at most, and not offloaded; change zero_stage or offload, or type --optim=adamw"),
        (name in on_trunk and moved,
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
    recompute, learns = recompute and trained, trained
    trained = trained and not adapted  # with LoRA the model itself is frozen
    split = is_sharded(place, trained)
    four_bits = adapted and place.four_bits
    on_cpu = four_bits or place.offload == "params" and (split or not trained)
    if split:
        # rank 0 alone reads the files, into the CPU's memory; every rank gets its parts from it
        whole = []

        def read():
            whole.append(load_whole(path, head, dtype, seed=seed))
            return unread_parameters(whole[0]) if learns else []

        model, unread = outline(path, head, dtype), alone(read)  # COLLECTIVE
        settle(model, trained, matrices, recompute, unread)
        shard(model, place, device, matrices if trained else None)
        model.to_empty(device="cpu" if on_cpu else device)
        model.hf.tie_weights()  # to_empty makes two tensors of a tied one
        fill_from_rank_0(model, whole[0] if whole else None)  # COLLECTIVE
    else:
        model = load_whole(path, head, dtype, "cpu" if on_cpu else device, seed)
        settle(model, trained, matrices, recompute, unread_parameters(model) if learns else ())
    if four_bits:
        from options.four_bits import quantize

        quantize(model, device, matrices or dtype)
        model.to(device)
    finish_placing(model, device, compiled)
    if head == "lm":  # read as in the run: where matrices are in 16 bits already, all must be
        rounds = torch.autocast(device.type, matrices, enabled=matrices is not None)
        with rounds, no_grad_forwards([model], device):
            probe(model)
    if not adapted:
        return model
    from options.lora import Adapted

    return Adapted(model, head, **place.lora, seed=seed)


def outline(path, head, dtype):
    """The model of a folder without its weights: shapes and settings, which take no memory."""
    *adapters, folder = model_folders(path)
    config = read_config(folder, path, head)
    kinds, file_dtype = config.architectures, config.dtype  # from_config sets its own
    with torch.device("meta"):
        hf = shapes(config, head, path, dtype)
    model = freeze(Model(hf, head, path, file_dtype))
    model.processor = processor_files(folder)
    model.new_head = head == "scalar" and "ForSequenceClassification" not in str(kinds)
    return model


def settle(model, trained, matrices, recompute, unread=()):
    """
    Make a model trained or frozen; the matrices of a frozen one get the dtype `matrices`, if there
    is one. recompute: the backward pass computes the layers again. unread: the names of parameters
    that no text reaches (model.unread_parameters), which stay as they are, to the bit.
    """
    model.requires_grad_(trained)
    model.unread = unread
    kept = {model.hf.get_parameter(name).requires_grad_(False) for name in unread}
    if recompute:
        model.recompute()
    if matrices and not trained:
        for p in (p for p in matrices_of(model) if p not in kept):
            p.data = p.data.to(matrices)


def matrices_of(model):
    """
    The parameters that autocast rounds wherever they are used: the matrices, but not the table of
    embeddings, whose rows it takes as they are, not the biases of many experts, which are added,
    not what the family keeps in 32 bits (some routers), and not a scalar head.
    """
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    wide = {id(p) for m in tables for p in m.parameters()} | set(map(id, scalar_head(model)))
    kept = ("bias", *(model.hf._keep_in_fp32_modules_strict or ()))
    return [p for name, p in model.named_parameters()
            if p.dim() >= 2 and id(p) not in wide and not any(part in name for part in kept)]


def scalar_head(model):
    """[the weight of a scalar head], which always keeps its bits; [] of a language model."""
    return [model.hf.score.weight] if model.head == "scalar" else []


def finish_placing(model, device, compiled):
    """What else the keys want of a model that holds its weights."""
    if compiled:
        model.compile_trunk()
    model.offloaded = not sharded(model) and next(model.parameters()).device.type != device.type
    if model.offloaded and device.type == "cuda":  # see on_device
        for p in model.parameters():
            p.data = p.data.pin_memory()  # pinned memory copies faster


def shard(model, place, device, matrices=None, mesh=None):
    """
    FSDP2: a layer is gathered while it computes (stage 3), or from its forward until its backward
    pass (stage 2). What is in no layer, embedding and head, is gathered for the whole forward.

    matrices: the dtype to which autocast will round the matrices of a trained model; None: it will
    not. A layer is then rounded first and gathered after, which is half of the traffic and the same
    numbers. Its norms, which autocast does not round, are gathered by themselves; so are embedding
    and head, whose gradients may be sums over chunks, in 32 bits. A layer of which other modules
    have such vectors beside matrices, such as gpt-oss's, is not rounded. mesh: see mesh_of_ranks.
    """
    from torch.distributed.fsdp import (CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard,
                                        register_fsdp_forward_method)

    model.by_layer = by_layer = place.stage == 3
    settings = dict(mesh=mesh or mesh_of_ranks(device))
    if place.offload == "params":
        settings["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    rounded = dict(mp_policy=MixedPrecisionPolicy(
        param_dtype=matrices, reduce_dtype=torch.float32, cast_forward_inputs=False))
    narrow = {id(p) for p in matrices_of(model)}
    for layer in model.layers():
        wide = [m for m in layer.modules() if not is_linear(m)
                and any(id(p) not in narrow for p in m.parameters(recurse=False))]
        norms = [m for m in wide if not narrow & set(map(id, m.parameters()))]
        if matrices and norms:
            fully_shard(norms, reshard_after_forward=by_layer, **settings)
        fully_shard(layer, reshard_after_forward=by_layer, **settings,
                    **(rounded if matrices and norms == wide else {}))
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


# --------------------------------------------------------------------------------------------------
# models in their places


def sharded(model):
    """Whether a rank holds only a part of this model's weights."""
    return any(map(is_shard, model.owner().parameters()))


def in_memory(**models):
    """
    {name: model} of all models that own memory: those given, without the None among them, each
    under its first name; and the trunk of one that stands on it under the name "NAME's trunk",
    where that is not given itself.
    """
    found = {}
    for name, model in models.items():
        if model is not None and model not in found.values():
            found[name] = model
    for name, model in list(found.items()):
        if model.owner() not in found.values():
            found[f"{name}'s trunk"] = model.owner()
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
    models = [model.owner() for model in models if model is not None]
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
    have a copy together, see options/tensor_parallel.py.
    """
    if tp > 1:
        from options.tensor_parallel import split_copy

        yield split_copy(policy, matrices, device, tp)  # COLLECTIVE
        return
    trunk = policy.owner()
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
    if matrices is None or policy.hf.dtype == matrices or policy.base is not None:
        # an adapter's trunk is frozen, and has its matrices in that dtype already
        yield policy
        return
    # deepcopy takes from `memo` what is there already, the buffers, too, and copies the modules
    memo, rounded = {id(t): t for t in policy.buffers()}, {id(p) for p in matrices_of(policy)}
    for p in policy.parameters():
        t = p.detach().to(matrices if id(p) in rounded else p.dtype)
        memo[id(p)] = nn.Parameter(t, requires_grad=False)
    decoder = copy.deepcopy(policy, memo)
    head = decoder.hf.get_output_embeddings()
    if head.weight is decoder.hf.get_input_embeddings().weight:  # tied: rounded as a head alone
        head.weight = nn.Parameter(head.weight.to(matrices), requires_grad=False)
    yield decoder

"""
Where each model lies: how much of it on each rank, on the GPU or in the CPU's memory, in which
precision. The keys zero_stage, offload, lora, optim, dtype and master_weights say it. Only 16 bits,
LoRA and Adafactor change what a run computes; all else changes the memory that it needs.

In this file, downwards:

    placements                      the keys of a run -> a Place for each model
    precisions                      dtype and master_weights -> the dtypes of the weights
    load_placed, shard              a model from its folder to its place
    sharded, in_memory, held        questions about models in their places
    no_grad_forwards                the block around every forward without a backward pass
    decoding_copy                   the model that the rollout samples from
    gather, fill, copy_weights      whole tensors of sharded models, on every rank

The stages are ZeRO's (arXiv 1910.02054). Stage 0 holds everything on every rank; stage 1 splits the
optimizer's states over the ranks; stage 2 also the gradients and, between steps, the weights;
stage 3 also the weights during a step: a layer is gathered while it computes. Stage 1 is torch's
ZeroRedundancyOptimizer, stages 2 and 3 are its FSDP2 (fully_shard). On one rank every stage is 0.
"""
import contextlib
import copy
import ctypes
import importlib.util
import math
import os
import shutil
import sys
import sysconfig
import warnings
from dataclasses import dataclass

import torch
import torch.nn as nn

import parallel
from engine.adapters import Adapted, load_whole
from folders import model_folders
from engine.tensor_parallel import split_copy
from engine.together import alone
from errors import BadConfig, BadInput, shorten
from model import (Model, auto_class, check_head, check_one_score, freeze, load_model, probe,
                   read_config)
from parallel import fill, gather, is_shard, my_part


# --------------------------------------------------------------------------------------------------
# the keys zero_stage, offload, lora, optim -> a Place for each model


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
    trained = trained and not adapted  # with LoRA the model itself is frozen
    split = is_sharded(place, trained)
    on_cpu = place.offload == "params" and (split or not trained)
    if split:
        # rank 0 alone reads the files, into the CPU's memory; every rank gets its parts from it
        whole = []
        alone(lambda: whole.append(load_whole(path, head, dtype, seed=seed)))  # COLLECTIVE
        model = outline(path, head, dtype)
        settle(model, trained, matrices, recompute and (trained or adapted))
        shard(model, place, device, matrices if trained else None)
        model.to_empty(device="cpu" if on_cpu else device)
        model.hf.tie_weights()  # to_empty makes two tensors of a tied one
        fill_from_rank_0(model, whole[0] if whole else None)  # COLLECTIVE
    else:
        model = load_whole(path, head, dtype, "cpu" if on_cpu else device, seed)
        settle(model, trained, matrices, recompute and (trained or adapted))
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
    is one. recompute: if it is trained, its backward pass computes the layers again.
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
    wide = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    wide.add(id(model_score(model)))
    return [p for p in model.parameters() if p.dim() >= 2 and id(p) not in wide]


def model_score(model):
    """The weight of a scalar head, which always keeps its bits; None: it has none."""
    return model.hf.score.weight if model.head == "scalar" else None


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


def is_sharded(place, trained):
    """Whether a model's weights are split over the ranks."""
    if parallel.rank_and_size()[1] == 1:
        return False
    return place.stage >= 2 if trained else place.stage == 3  # frozen: 1 and 2 split nothing of it


def shard(model, place, device, matrices=None):
    """
    FSDP2: a layer is gathered while it computes (stage 3), or from its forward until its backward
    pass (stage 2). What is in no layer, embedding and head, is gathered for the whole forward.

    matrices: the dtype to which autocast will round the matrices of a trained model; None: it will
    not. A layer is then rounded first and gathered after, which is half of the traffic and the same
    numbers. Its norms, which autocast does not round, are gathered by themselves; so are embedding
    and head, whose gradients may be sums over chunks, in 32 bits.
    """
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.fsdp import (CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard,
                                        register_fsdp_forward_method)

    allocate_large_tensors_apart(device)
    model.by_layer = by_layer = place.stage == 3
    if parallel.group:
        settings = dict(mesh=DeviceMesh.from_group(parallel.group, device.type))
    else:
        settings = dict(mesh=init_device_mesh(device.type, (parallel.rank_and_size()[1],)))
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
    score = model_score(model)  # one row: not worth a split
    fully_shard(model, reshard_after_forward=False, ignored_params={score} - {None}, **settings)
    # some trunks return a view of their states, and FSDP warns of writing into it: nobody does
    warnings.filterwarnings("ignore", r"FSDP2-wrapped module \(FSDPModel\) returned a view")
    # what runs the trunk; a head that reads its states finds its own weights there until after the
    # backward pass, for what is in no layer stays gathered
    for name in ("states", "next_logits"):
        register_fsdp_forward_method(model, name)


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
    model.new_head = whole is not None and whole.new_head
    model.new_head = bool(parallel.all_reduce_max(  # COLLECTIVE
        torch.tensor(float(model.new_head), device=parallel.wire())))


def allocate_large_tensors_apart(device):
    """
    On a CPU, make glibc give every tensor from 1 MiB on pages of its own, which go back to the
    system when the tensor is freed. In glibc's heap, gathered layers would leave holes: half as
    much memory again.
    """
    if device.type == "cpu" and sys.platform == "linux" and hasattr(ctypes.CDLL(None), "mallopt"):
        M_MMAP_THRESHOLD = -3
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**20)


def check_compiler(device):
    """
    torch.compile writes code and calls a compiler, in the first forward: what it would miss then is
    said now. Raises BadConfig.
    """
    lacking = lacking_to_compile(device)
    if lacking:
        raise BadConfig(f"compile = True needs {lacking}; install it, or leave compile out")


def lacking_to_compile(device):
    """What torch.compile needs and this machine does not have, in words; "" if nothing."""
    if device.type == "cuda":
        if importlib.util.find_spec("triton") is None:
            return "the package triton, which is not there"
        compilers = [os.environ.get("CC")] if os.environ.get("CC") else ["gcc", "clang"]
        language, variable = "C", "CC"
    else:
        usual = "clang++" if sys.platform == "darwin" else "g++"
        compilers, language, variable = [os.environ.get("CXX", usual)], "C++", "CXX"
    if not any(map(shutil.which, compilers)):
        return (f"a {language} compiler, and there is no {' and no '.join(compilers)} (the "
                f"variable {variable} can name another)")
    headers = os.path.join(sysconfig.get_path("include"), "Python.h")
    if os.path.exists(headers):
        return ""
    return f"the header files of Python, and there is no {headers}"


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
    under its first name; of a list each one, as "NAME", "NAME 2" and so on; and the trunk of an
    Adapted under the name "NAME's trunk", where it is not given itself.
    """
    lists = {name: model if isinstance(model, list) else [model] for name, model in models.items()}
    models = {f"{name} {number}" if number > 1 else name: model for name, given in lists.items()
              for number, model in enumerate(given, 1) if model is not None}
    first = {id(model): name for name, model in reversed(models.items())}
    models = {name: model for name, model in models.items() if first[id(model)] == name}
    for name, model in list(models.items()):
        if isinstance(model, Adapted) and not any(model.owner() is m for m in models.values()):
            models[f"{name}'s trunk"] = model.owner()
    return models


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
    # deepcopy takes from `memo` what is there already, and copies the rest: modules and buffers
    memo = {}
    for p in policy.parameters():
        t = p.detach().to(matrices if p.dim() >= 2 else p.dtype)
        memo[id(p)] = nn.Parameter(t, requires_grad=False)
    yield copy.deepcopy(policy, memo)


# --------------------------------------------------------------------------------------------------
# whole tensors of sharded models


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

    if any(map(is_shard, model.hf.parameters())):
        alone(read)  # COLLECTIVE
        fill_from_rank_0(model, whole[0] if whole else None)  # COLLECTIVE
    else:
        read()
        copy_weights(whole[0], model)


def copy_weights(source, target):
    """
    A collective: give a model the weights of another one of the same architecture. Either may be
    sharded, and their dtypes may differ: a tensor at a time is put together and split again.
    """
    for p, q in zip(source.hf.parameters(), target.hf.parameters(), strict=True):
        fill(q, gather(my_part(p.detach()), p) if is_shard(p) else p.detach())

"""
How much memory a run will take on each GPU, before anything is loaded: each model's weights,
gradients and optimizer states, counted; and the peak of each phase, by a dry run.

python tools/memory.py ppo.py config/llama.py --world-size=8 --gpu-gb=80     # and what fits
python tools/memory.py grpo.py config/mine.py --lora=16     # with any other keys of the script

--world-size: ranks, one GPU each. --gpu-gb: the memory of a GPU, as in its name; it is counted in
GiB, as all numbers here. With it the tool also says the largest micro_batch_size and
rollout_batch_size that fit, or which phase does not fit and which keys make it smaller. Of each
model its config.json is enough. Texts are taken to be as long as they may be: max_prompt_tokens
(512, if it is 0) and max_new_tokens; of sft.py and rm.py max_tokens (1024).

The models are loaded by the run's own functions, but of fake tensors, which have shapes and no
memory. One step goes through them, while torch's MemTracker adds up the living tensors: half a
minute for 8B. They are not all: a GPU also needs room for its context, for workspaces of libraries
and for gaps between tensors, 2 GiB or more. Kernels are a CPU's, and nothing is compiled. The
tensors that the key offload moves into the CPU's memory are taken off all phases.
"""
import os
import sys

# Python looks for modules in this file's folder, tools/; ours are in the folder above it.
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

from configurator import Key, for_model, read_arguments  # noqa: E402

import contextlib  # noqa: E402
import functools  # noqa: E402
import gc  # noqa: E402
import math  # noqa: E402
import time  # noqa: E402
from types import SimpleNamespace  # noqa: E402
from typing import NamedTuple  # noqa: E402
from unittest import mock  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.distributed._tools.mem_tracker import MemTracker  # noqa: E402
from torch.utils.flop_counter import flop_registry  # noqa: E402

import load  # noqa: E402
import parallel  # noqa: E402
import ranks  # noqa: E402
import tokenizer  # noqa: E402
from checkpoint import unwrapped  # noqa: E402
from errors import BadInput  # noqa: E402
from model import (SPARE, Model, decoding_cache, no_grad_forwards,  # noqa: E402
                   response_logprobs, response_values)
from options import lora, parts, shards  # noqa: E402
from options.ema import MovingAverage  # noqa: E402
from options.hub import check_name  # noqa: E402
from options.optimizers import other_optimizer  # noqa: E402
from options.too_long import cut_or_drop  # noqa: E402
from prompts import Rows  # noqa: E402
from rollout import decoding_copy, draw  # noqa: E402
from run import make_optimizer  # noqa: E402
from tools.runs import run_script  # noqa: E402

COLUMNS = "weights", "gradients", "optimizer", "average"
SHORT = dict(policy="policy", ref_policy="ref", reward_model="reward", value_model="value",
             judge="judge")  # the models, and their names in zero_stage and offload
CPU = torch.device("cpu")  # of the fake tensors, whatever the run's own device is
OPTIONS = dict(world_size=Key(1, "ranks [1..100000]", []),
               gpu_gb=Key(0.0, "GiB of a GPU [>= 0]", []))
LESS = dict(  # what makes a phase smaller when even one row of it does not fit
    rollout="zero_stage, offload, dtype and max_new_tokens",
    reading="zero_stage, offload and head_chunk",
    update="zero_stage, offload, gradient_checkpointing, head_chunk and lora")
# torch's collectives: which argument is the whole tensor, and how often it goes over a link, but
# for a rank's own share: a sum is scattered, and gathered
LINKS = dict(allreduce_=(0, 2), _allgather_base_=(0, 1), broadcast_=(0, 1),
             _reduce_scatter_base_=(1, 1))
# of one row, and of as many as there are, whatever the configuration says
FEWEST = dict(micro_batch_size=1, micro_batch_tokens=0, rollout_batch_size=1)
MOST = dict(micro_batch_size=10**6, micro_batch_tokens=0, rollout_batch_size=0)
BEGAN = time.monotonic()


def read_run(argv):
    """
    (script, its configuration) of a run's command, grpo.py, its config files and keys, and of this
    tool's OPTIONS. The script itself runs, and checks its keys, until it reads its first folder.
    Raises BadInput.
    """
    script = argv[0].removesuffix(".py") if argv else ""
    if script not in ("ppo", "grpo", "sft", "rm"):
        raise BadInput("type the script first, ppo.py, grpo.py, sft.py or rm.py")
    own, theirs = take(argv[1:], OPTIONS)
    names = {}  # the script's variables

    def end(*args, **more):
        sys.exit()

    with replaced((ranks, "init", lambda system: CPU), (load, "load", end),
                  (tokenizer, "load_tokenizer", end)):
        run_script(f"{ROOT}/{script}.py", theirs, names)
    config = vars(names["system"]) | names["config"] | own
    if config["roles"] or config["generate_tp"] > 1 or "8bit" in config["optim"] or (
            config["quantize"] != "none"):
        raise BadInput("this tool counts ranks that do everything, each for itself, and nothing of "
                       "bitsandbytes: type --roles= --generate_tp=1 --optim=adamw --quantize=none")
    return script, config


def take(argv, keys):
    """({name: value} of a tool's own keys, the other arguments). --gpu-gb is --gpu_gb."""
    own, others = [], []
    for arg, behind in zip(argv, [*argv, "--"][1:], strict=True):
        name, equals, value = arg.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        if name in keys:
            own += [f"--{name}{equals}{value}"] + [behind] * (not equals)  # for the error
        else:
            others.append(arg)
    values = read_arguments(keys, own)
    return {name: values.get(name, [key.default])[0] for name, key in keys.items()}, others


def sizes_of(script, config):
    """(rows that decode at once, their prompts, rows of a micro-batch, prompt, response length)."""
    ranks, group = config["world_size"], config.get("group_size", 1)
    if script in ("sft", "rm"):  # rm.py's rows are pairs
        T, pair = config["max_tokens"] or 1024, 2 if script == "rm" else 1
        b = min(config["micro_batch_size"], math.ceil(config["batch_size"] / ranks))
        return 0, 0, pair * b, T // 2, T - T // 2
    P, R = config["max_prompt_tokens"] or 512, config["max_new_tokens"]
    n = math.ceil(config["batch_size"] / ranks)
    b = min(config["micro_batch_size"], math.ceil(n / config["num_minibatches"]))
    if config["micro_batch_tokens"]:
        b = max(1, config["micro_batch_tokens"] // (P + R))
    n = min(n, config["rollout_batch_size"] or n)
    return n, math.ceil(n / group), b, P, R


# -------------------------------------------------------------------------------------------------
# fake tensors


class Count(NamedTuple):
    """What a rank does: operations in products of matrices, and in attention (FLOP); the bytes that
    it sends to other ranks, as many as it receives; and those of its memory, which work.py adds."""

    flop: float = 0.0
    attention: float = 0.0
    sent: float = 0.0
    nbytes: float = 0.0

    def __add__(self, other):
        return Count(*(x + y for x, y in zip(self, other, strict=True)))

    def __mul__(self, factor):
        return Count(*(factor * x for x in self))


class Tracker(MemTracker):
    """
    MemTracker without its hooks on modules, which fail where a module is called twice. And fake
    tensors have no values: `chosen` is how many True there are in any mask, and a number is 1.
    It also counts, by torch's own formulas, as FlopCounterMode does, whose hooks fail as well.
    """

    device, chosen, count = CPU, 0, Count()
    cache = 0.0  # bytes of a token's keys and values

    def __init__(self):
        super().__init__()
        names = "register_user_hooks", "clear_user_hooks", "__enter__", "__exit__"
        nothing = dict.fromkeys(names, lambda *args: None)
        self._mod_tracker = SimpleNamespace(is_bw=False, **nothing)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        aten = torch.ops.aten
        if func is aten._local_scalar_dense.default:
            return 1.0
        if func is aten.nonzero.default:
            return torch.empty(self.chosen, args[0].dim(), dtype=torch.int64)
        if func is aten.index.Tensor and getattr(args[1][0], "dtype", None) == torch.bool:
            where = torch.empty(self.chosen, args[1][0].dim(), dtype=torch.int64)
            args = args[0], list(where.unbind(1))
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.count += count_of(func._overloadpacket, args, kwargs or {}, out)
        return out

    @contextlib.contextmanager
    def block(self, found, *name):
        """found[name] becomes (the peak of this block in bytes, the Count since the last one)."""
        gc.collect()  # tensors in cycles would be freed at some moment or other
        self._peak_mem.clear()
        yield
        found[name] = max(self._peak_mem.values(), default=0), self.count
        self.count = Count()


def count_of(packet, args, kwargs, out):
    """The Count of one operation."""
    name = packet.__name__
    if "scaled_dot_product" in name:  # of a CPU's kernel torch has no formula
        backward = "backward" in name
        q, k = args[backward:backward + 2]
        T, S = q.shape[-2], k.shape[-2]
        pairs = S if T == 1 else T * (T + 1) / 2 + T * (S - T)  # a token sees those before it
        each = 10 if backward else 4  # two products; backward five, because the scores come again
        return Count(attention=each * math.prod(q.shape[:2]) * pairs * q.shape[-1])
    if packet in flop_registry:
        return Count(flop=flop_registry[packet](*args, **kwargs, out_val=out))
    if name in LINKS and dist.is_initialized():
        place, times = LINKS[name]
        tensors = [args[place]] if torch.is_tensor(args[place]) else args[place]
        nbytes = sum(t.nbytes for t in tensors)
        return Count(sent=times * (1 - 1 / dist.get_world_size()) * nbytes)
    return Count()


@contextlib.contextmanager
def replaced(*attributes):
    """In this block each (module, name, value) is so."""
    with contextlib.ExitStack() as stack:
        for where, name, value in attributes:
            stack.enter_context(mock.patch.object(where, name, value))
        yield


def without_files(layers=0):
    """
    In this block a model's config.json is enough: its weights are what its class begins with.
    layers: how many of them are made, 0 = all.
    """
    made, outline = (functools.partial(read_fake, layers=layers, **more)
                     for more in (dict(), dict(meta=True)))
    return replaced(
        *((room, "read_model", made) for room in (load, parts, shards, lora)),
        (shards, "outline", outline), (lora, "fill_adapter", lambda *args: None),
        (load, "load_tokenizer", tokenizer_of), (load, "probe", lambda *args: None))


@contextlib.contextmanager
def fake_tensors(ranks, layers=0):
    """
    In this block tensors are fake, and so are model files; it gives the Tracker. layers: see
    without_files.
    """
    from transformers import masking_utils
    from transformers.integrations import moe

    mesh = shards.mesh_of_ranks(CPU) if ranks > 1 else None  # it needs numbers
    with contextlib.ExitStack() as stack:
        stack.enter_context(without_files(layers))
        stack.enter_context(replaced(
                (shards, "outline", functools.partial(read_fake, layers=layers)),
                (Model, "to_empty", lambda self, device: self),
                (shards, "mesh_of_ranks", lambda device: mesh), (shards, "alone", lambda f: f()),
                (shards, "fill_from_rank_0", lambda *args: None),
                # transformers takes fake tensors for a trace, in which it keeps masks that a run
                # drops; and the kernels for experts refuse them: others have the same shapes
                (masking_utils, "is_tracing",
                 lambda t=None: t is not None and t.dtype == torch.bool),
                (moe, "_can_use_grouped_mm", lambda *args: False)))
        gc.freeze()  # then the collections of Tracker.peak are quick
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield stack.enter_context(Tracker())


def read_fake(path, head, system, device="cpu", seed=0, layers=0, meta=False):
    """load.read_model, of which only the config.json is read; meta: without numbers."""
    check_name(path)
    path = lora.lowest_base(path)
    config, arguments = load.config_and_arguments(path, head, system)
    if arguments["attn_implementation"] != "eager":  # a fake tensor has no other kernels
        arguments["attn_implementation"] = "sdpa"
    if layers:
        text = config.get_text_config()
        for name, value in vars(text).items():  # such as layer_types
            if isinstance(value, list) and len(value) == text.num_hidden_layers:
                setattr(text, name, value[:layers])
        text.num_hidden_layers = layers
    with torch.device("meta" if meta else device):
        return Model(load.auto_class(head).from_config(config, **arguments), head, path)


def tokenizer_of(path, system, read=load.load_tokenizer):
    """The tokenizer, or, where it is not there, one as large as the model's vocabulary."""
    try:
        return read(path, system)
    except BadInput:
        if os.path.exists(f"{path}/tokenizer_config.json"):  # a key is wrong, such as chat_template
            raise
        return SimpleNamespace(
            vocab_size=math.inf, vocabulary={}, pad_id=0, eos_ids=set(), stop_strings=(),
            match_model=lambda *args: None, set_padding_apart=lambda: None)


# -------------------------------------------------------------------------------------------------
# the models of a run, and one step through them


def build(script, config, device=CPU):
    """
    {name: Model}: the models as this rank has them, by the functions of the run, all on one device:
    offloaded tensors are subtracted later. Raises BadInput.
    """
    system = SimpleNamespace(**config | dict(offload="", compile=False))
    if script in ("sft", "rm"):
        if system.init_from == "scratch":
            raise BadInput("init_from = 'scratch'; this tool counts models with a config.json: "
                           "type --init_from=FOLDER")
        name, head = dict(sft=("policy", "lm"), rm=("reward_model", "scalar"))[script]
        return {name: load.load(system.init_from, SHORT[name], system, device, head, trained=True)}
    policy = load.load(system.policy_path, "policy", system, device, trained=True)
    models = dict(policy=policy)
    if system.kl_coef > 0:
        models["ref_policy"] = load.load_ref_policy(system.policy_path, policy, system, device)
    elif policy.base is not None:
        models["trunk"] = policy.base
    if system.reward_path:
        models["reward_model"] = load.load_reward_model(system.reward_path, policy, system, device)
    if script == "ppo":
        models["value_model"] = load.load_value_model(
            system.value_init, policy, models.get("reward_model"), system, device)
    if system.judge_path:
        models["judge"] = load.load(system.judge_path, "judge", system, device)
    context = min(model.max_positions for model in models.values())
    if system.max_new_tokens >= context:  # this raises what the run would
        key = f"max_new_tokens={system.max_new_tokens} in a context of {context}"
        cut_or_drop(Rows(path=system.prompts_path), [], context - system.max_new_tokens, "error",
                    None, len, key)
    return models


def numbers_of(model):
    """(weights that a forward pass reads, the trained ones), of the whole model and its trunk."""
    own, base = list(model.parameters()), model.base
    read = sum(p.numel() for p in own) + (numbers_of(base)[0] if base is not None else 0)
    if base is None:  # of the embeddings few rows are read, unless they are the head as well
        inputs, outputs = model.hf.get_input_embeddings(), model.hf.get_output_embeddings()
        read -= inputs.weight.numel() * (outputs is None or outputs.weight is not inputs.weight)
    return read, sum(p.numel() for p in own if p.requires_grad)


def equip(models, config):
    """
    Give the models their companions of a first step: gradients, optimizers, an average.
    Returns {name: {column: bytes}}, and the optimizers and buffers, which must stay alive.
    """
    def size_of(tensors):
        return sum(parallel.my_part(t).numel() * t.element_size() for t in tensors)

    rows, made, system = {}, [], SimpleNamespace(**config | dict(offload=""))
    of_optimizer = 1e-6, (0.9, 0.999), 1e-5
    for name, model in models.items():
        trained = [p for p in model.parameters() if p.requires_grad]
        rows[name] = dict.fromkeys(COLUMNS, 0) | dict(weights=size_of(model.parameters()))
        if trained:
            made.append(parallel.flatten_gradients(model))
            for p in trained:
                if p.grad is None:  # shards have none yet
                    dtype = torch.promote_types(p.dtype, torch.float32)
                    p.grad = torch.zeros_like(p, dtype=dtype)
            # it checks that the key optim goes with offload
            other_optimizer(model, SimpleNamespace(**config), SHORT[name], *of_optimizer)
            optimizer = make_optimizer(model, SHORT[name], system, *of_optimizer)
            optimizer.step()
            states = unwrapped(optimizer).state.values()
            states = [t for state in states for t in state.values()]
            rows[name] |= dict(gradients=size_of(p.grad for p in trained),
                               optimizer=size_of(filter(torch.is_tensor, states)))
            made.append(optimizer)
        if name == "policy" and config.get("ema_decay", 0) > 0:
            made.append(MovingAverage(model, config["ema_decay"]))
            rows[name]["average"] = size_of(made[-1].averages.values())
    return rows, made


def step_through(models, made, system, n, distinct, b, P, R, tracker, sample=None):
    """
    One iteration: {(phase, model): what tracker.block measures}; phases are rollout, reading and
    update. sample: what samples in the place of `decode`.
    """
    precision, found = load.autocast(system, tracker.device), {}
    temperature, tracker.count = getattr(system, "temperature", 1.0), Count()
    if n:
        with torch.no_grad(), precision, decoding_copy(
                models["policy"], system, tracker.device) as decoder:
            (sample or decode)(decoder, n, distinct, P, R, temperature, tracker, found)
    tokens = torch.randint(2, (b, P + R), device=tracker.device)  # (b, W)
    mask = torch.arange(P + R, device=tracker.device).expand(b, P + R) >= P
    mb = dict(tokens=tokens, response_mask=mask)
    tracker.chosen = b * R

    def read(name, model):
        with precision:
            if name == "reward_model":
                return model.scores(tokens, mask.sum(1))
            if name == "judge":
                return model.logits(model.states(tokens)[:, -1])
            if name == "value_model":
                return response_values(model, mb)
            return response_logprobs(model, mb, temperature, system.head_chunk,
                                     getattr(system, "entropy_coef", 0) > 0)[0]

    for name, model in models.items():
        with tracker.block(found, "reading", name), no_grad_forwards([model], tracker.device):
            read(name, model)
    for name, model in models.items():
        if any(p.requires_grad for p in model.parameters()):
            with tracker.block(found, "update", name):
                read(name, model).sum().backward()
    with tracker.block(found, "update", "step"):
        parallel.all_reduce_gradients(dict(enumerate(x for x in made if isinstance(x, list))))
        for optimizer in made:
            if isinstance(optimizer, torch.optim.Optimizer):
                optimizer.step()
    return found


def decode(decoder, n, distinct, P, R, temperature, tracker, found):
    """A rollout of n rows: it reads the distinct prompts, and samples the last token."""
    def next_logits(rows, tokens, past):
        mask = torch.ones(rows, past + tokens, dtype=torch.bool)
        positions = mask.long().cumsum(1)[:, -tokens:]
        tokens = torch.zeros(rows, tokens, dtype=torch.int64)
        return decoder.next_logits(tokens, cache, mask, positions)

    def append(tokens):
        """The cache with so many tokens more, which no model has read."""
        # a layer that keeps a state alone does not grow
        growing = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
        for layer in growing if tokens > 0 else ():
            layer.update(*(t.new_empty(*t.shape[:2], tokens, t.shape[-1])
                           for t in (layer.keys, layer.values)))

    cache = decoding_cache(decoder.hf.config)
    with tracker.block(found, "rollout", "prompts"):
        next_logits(distinct, P, 0)
        cache.batch_select_indices(torch.zeros(n, dtype=torch.int64))
    # the last token is sampled, and not read. The cache has grown last at token number `grown`
    last, grown = P + R - 1, P + (R - 1) // (SPARE + 1) * (SPARE + 1)
    append(min(grown, last - 1) - P)
    append(last - 1 - grown)
    tracker.cache = sum(t.nbytes / math.prod(t.shape[::2]) for layer in cache.layers
                        for t in (getattr(layer, "keys", None), getattr(layer, "values", None))
                        if t is not None)
    with tracker.block(found, "rollout", "responses"):
        logits = next_logits(n, 1, last - 1)
        draw(logits, torch.zeros(n, dtype=torch.float64), temperature)


@contextlib.contextmanager
def dry_run(script, config, layers=0):
    """
    In this block the run is there, of fake tensors: (rows, numbers, step). rows: of rank 0, {model:
    {column: bytes}}. numbers: {model: numbers_of it}. step(key=value, ...), with these keys in the
    place of the configuration's: (rows that decode, rows of a micro-batch), {(phase, what is at
    work): (peak in bytes, Count)}, and the bytes of a token's keys and values. layers: of each
    model, 0 = all.
    """
    system, moved, ended = SimpleNamespace(**config), 0, contextlib.ExitStack()
    if system.world_size > 1:  # a group of ranks that are not there
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=system.world_size)
        ended.callback(dist.destroy_process_group)
    with ended, fake_tensors(system.world_size, layers) as tracker:
        say_progress(f"loading the models{f', {layers} layers of each' if layers else ''}")
        models = build(script, config)
        rows, made = equip(models, config)
        for name, model in models.items() if system.offload else ():
            short, trained = SHORT.get(name, "policy"), any(
                p.requires_grad for p in model.parameters())
            _, offload = shards.places_of(system, short, trained, for_model(system.lora, short))
            if system.device_type == "cpu":
                continue
            away = dict(none=(), optimizer=["optimizer"], params=COLUMNS)[offload]
            moved += sum(rows[name][column] for column in away)
            rows[name] |= dict.fromkeys(away, 0)

        def step(**keys):
            n, distinct, b, P, R = sizes_of(script, config | keys)
            say_progress(f"a step: {n} rows decode, {b} are read and trained")
            found = step_through(models, made, system, n, distinct, b, P, R, tracker)
            found = {key: (peak - moved, count) for key, (peak, count) in found.items()}
            return (n, b), found, tracker.cache

        yield rows, {name: numbers_of(model) for name, model in models.items()}, step


def fitting(script, config, step):
    """
    What fits into config["gpu_gb"], {} if that is 0: {phase: (rows, peak of one row in bytes)}, the
    most rows of a micro-batch, or of a rollout, with which the phase does fit; 0 if not even one
    does. step: of dry_run.
    """
    fits, limit = {}, config["gpu_gb"] * 2**30
    if not limit:
        return fits
    # by a straight line between the peaks of the fewest and of the most rows. A peak is the
    # highest of several lines: so it is not above that one, and what is found does fit
    few, low, _ = step(**FEWEST)
    many, high, _ = step(**MOST)
    for phase in dict.fromkeys(phase for phase, _ in low):
        least, most = (max(p for (of, _), (p, _) in at.items() if of == phase)
                       for at in (low, high))
        first, last = (at[phase != "rollout"] for at in (few, many))
        share = 1.0 if most <= limit else max(limit - least, 0) / max(most - least, 1e-9)
        unit = 2 if script == "rm" and phase != "rollout" else 1  # its rows are pairs
        fits[phase] = int(first + share * (last - first)) // unit * (least <= limit), least
    return fits


def say_progress(text):
    """Print what is computed now, and the seconds so far."""
    print(f"{time.monotonic() - BEGAN:4.0f} s: {text}", flush=True)


def verdict(script, config, peaks, fits):
    """
    (lines of what does not fit into the GPU, lines of what does), each with what to type. peaks: of
    the configuration, {(phase, what is at work): bytes}. fits: of fitting.
    """
    room, limit = f"{config['gpu_gb']:g} GiB", config["gpu_gb"] * 2**30
    bad = [f"{phase} does not fit into {room} even with one row: {least / 2**30:.2f} GiB; see "
           f"{LESS[phase]} (docs/scale.md)" for phase, (rows, least) in fits.items() if not rows]
    good, (*_, P, R) = [], sizes_of(script, config)
    tokens = config.get("micro_batch_tokens") and P + R  # it bounds the rows in the place of
    bounds = {"micro_batch_tokens" if tokens else "micro_batch_size": ("reading", "update"),
              "rollout_batch_size": ("rollout",)}
    for key, phases in bounds.items() if not bad else ():
        if phases[0] in fits:
            most = min(fits[phase][0] for phase in phases) * (tokens if key.endswith("s") else 1)
            over = {of: peak for (of, _), peak in sorted(peaks.items(), key=lambda x: x[1])
                    if of in phases and peak > limit}
            takes = " and ".join(f"{of} takes {peak / 2**30:.2f} GiB" for of, peak in over.items())
            line = f"the largest {key} that fits into {room} is {most}"
            if over:
                bad.append(f"{line}; now {takes}: type --{key}={most}")
            else:
                good.append(line)
    return bad, good


if __name__ == "__main__":
    if len(sys.argv) == 1 or {"--help", "-h"} & set(sys.argv):
        print(__doc__.strip())
        sys.exit()
    script, config = read_run(sys.argv[1:])
    n, _, b, P, R = sizes_of(script, config)
    print(f"{script}.py on each of {config['world_size']} rank(s), {config['dtype']}: texts of {P} "
          f"+ {R} tokens, {b} in a micro-batch{f', {n} decode at once' if n else ''}")
    with dry_run(script, config) as (rows, _, step):
        peaks = {key: peak for key, (peak, _) in step()[1].items()}
        fits = fitting(script, config, step)
    size, unit = (2**30, "GiB") if max(peaks.values()) > 8 * 2**30 else (2**20, "MiB")
    print(f"\n{unit:<14}" + "".join(f"{column:>13}" for column in COLUMNS))
    rows |= {"all": {c: sum(row[c] for row in rows.values()) for c in COLUMNS}}
    for name, row in rows.items():
        print(f"{name:<14}" + "".join(f"{row[c] / size:>13.2f}" for c in COLUMNS))
    print("\nat the peak of")
    for phase in dict.fromkeys(phase for phase, _ in peaks):
        parts = {name: peak / size for (of, name), peak in peaks.items() if of == phase}
        print(f"{phase:<14}{max(parts.values()):>13.2f}   "
              + ", ".join(f"{name} {peak:.2f}" for name, peak in parts.items()))
    if fits:
        bad, good = verdict(script, config, peaks, fits)
        print("\n".join(["", *good, *bad]))

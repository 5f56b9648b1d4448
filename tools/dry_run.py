"""
The dry run of tools/memory.py: the models of a run, built of fake tensors, which have shapes and no
memory, and one step through them.

    system_of, build                the models of a run
    equip                           their gradients, optimizer states and average
    fake_tensors, step_through      the step, and what is alive at its peaks
    BITSANDBYTES                    matrices in 4 bits and states in 8, of fake tensors
"""
import contextlib
import gc
import math
import os
from types import SimpleNamespace
from unittest import mock

import torch
import torch.nn as nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

import parallel
from checks import check_system
from configurator import of_model
from decoding_cache import SPARE, decoding_cache
from errors import BadConfig
from folders import model_folders, read_json
from load import has_experts, read_config, shapes, unread_parameters
from model import Model, freeze, no_grad_forwards, response_logprobs, response_values
from models import autocast, dtypes, in_memory, settle
from optimizers import inner, make_optimizer, step
from options import four_bits, optimizers as other_optimizers, shards
from options.ema import MovingAverage
from options.lora import Adapted, adapt
from rollout import decoding_copy, draw
from trunk import OnTrunk

COLUMNS = "weights", "gradients", "optimizer", "average"
SHORT = dict(policy="policy", ref_policy="ref", reward_model="reward", value_model="value",
              judge="judge")  # the models, and their names in zero_stage and offload
TRAINED = dict(ppo=("policy", "value"), grpo=("policy",), sft=("policy",), rm=("reward",))
CPU = torch.device("cpu")  # of the fake tensors, whatever the run's own device is


# --------------------------------------------------------------------------------------------------
# the models of a run, of fake tensors


def system_of(script, config):
    """The configuration as attributes, its keys checked as the script does. Raises BadConfig."""
    system, frozen = SimpleNamespace(**config), ()
    if script in ("ppo", "grpo"):
        frozen = "ref", "reward", "judge"
    with no_package():
        check_system(system, CPU, TRAINED[script], frozen, config.get("value_init"))
    return system


@contextlib.contextmanager
def no_package():
    """In this block bitsandbytes is what stands below, whether it is installed or not."""
    found = lambda name, key: BITSANDBYTES  # noqa: E731
    with (mock.patch.object(four_bits, "optional_package", found),
          mock.patch.object(other_optimizers, "optional_package", found)):
        yield


def build(script, config, mesh):
    """
    {name: Model}: the models as rank 0 has them, with fake weights, all on one device: what is
    offloaded is subtracted later. Raises BadInput.
    """
    system = SimpleNamespace(**config | dict(offload=""))
    dtype, matrices = dtypes(system)

    def load(name, path, head, learns=False):
        lora = of_model(system.lora, SHORT[name]) if learns else ""
        settings = read_config(model_folders(path, weights=False)[-1], path, head)
        more = dict(experts_implementation="grouped_mm") if has_experts(settings) else {}
        model = freeze(Model(shapes(settings, head, path, dtype, **more), head, path))
        settle(model, learns and not lora, matrices, learns and system.gradient_checkpointing,
               unread_parameters(model) if learns else ())
        if system.zero_stage:
            shards.split(model, SHORT[name], system, CPU, mesh)
        if lora and system.quantize == "4bit":
            four_bits.quantize(model, CPU, matrices or dtype)
        return adapt(model, lora, head) if lora else model

    if script in ("sft", "rm"):
        if not system.init_from:
            raise BadConfig("init_from is empty, so the script makes a small model of its own; "
                            "this tool counts those with a config.json: type --init_from=FOLDER")
        name, head = dict(sft=("policy", "lm"), rm=("reward_model", "scalar"))[script]
        return {name: load(name, system.init_from, head, learns=True)}
    policy = load("policy", system.policy_path, "lm", learns=True)
    models, rewards = dict(policy=policy), system.reward_functions
    if policy.adapters and not system.ref_path:
        models["ref_policy"] = policy.base
    elif system.kl_coef > 0:
        models["ref_policy"] = load("ref_policy", system.ref_path or system.policy_path, "lm")
    if "reward_model" in rewards and system.share_base:
        file = os.path.join(system.reward_path, "adapter_config.json")
        models["reward_model"] = freeze(Adapted(policy.base, "scalar", read_json(file).get("r")))
    elif "reward_model" in rewards:
        models["reward_model"] = load("reward_model", system.reward_path, "scalar")
    if script == "ppo" and system.value_init == "shared":
        models["value_model"] = OnTrunk(policy)
    elif script == "ppo" and system.share_base:
        models["value_model"] = adapt(policy.base, of_model(system.lora, "value"), "scalar")
    elif script == "ppo":
        path = system.reward_path if system.value_init == "reward" else system.policy_path
        models["value_model"] = load("value_model", path, "scalar", learns=True)
    if "judge" in rewards and system.judge_path not in ("", "ref_policy"):
        models["judge"] = load("judge", system.judge_path, "lm")
    return models


def size_of(tensors):
    """Bytes of what this rank holds of some tensors."""
    return sum(parallel.my_part(t).numel() * t.element_size() for t in tensors)


def equip(models, config):
    """
    Give the models what they have once a first step is done: gradients, optimizers, an average.
    Returns the optimizers, and {name: {column: bytes}}.
    """
    made, rows = [], {}
    for name, model in in_memory(**models).items():
        trained = [p for p in model.parameters() if p.requires_grad]
        rows[name] = dict.fromkeys(COLUMNS, 0) | dict(weights=size_of(model.parameters()))
        if not trained:
            continue
        parallel.buffers_of(trained)
        for p in trained:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad  # shards have none yet
        system = SimpleNamespace(**config | dict(offload="", weight_decay=0.0))
        optimizer = make_optimizer(model, SHORT[name], system, 1e-6, (0.9, 0.999), 1e-5)
        step(optimizer, 1e-6)
        states = [t for state in inner(optimizer).state.values() for t in state.values()]
        rows[name] |= dict(gradients=size_of(p.grad for p in trained),
                           optimizer=size_of(filter(torch.is_tensor, states)))
        made.append(optimizer)
        if name == "policy" and config.get("ema_decay", 0) > 0:
            optimizer.average = MovingAverage(model, config["ema_decay"])
            rows[name]["average"] = size_of(optimizer.average.averages)
    return made, rows


# --------------------------------------------------------------------------------------------------
# bitsandbytes has no fake tensors. What it holds and what it allocates is written down here


class RoundedBack(torch.autograd.Function):
    """x (., in) W^T: W, (out, in), is made of its 4 bits for a product, and then forgotten."""

    @staticmethod
    def forward(ctx, x, n_in, n_out):
        ctx.sizes = n_in, n_out
        return x @ x.new_empty(n_out, n_in).T

    @staticmethod
    def backward(ctx, grad):
        n_in, n_out = ctx.sizes
        return grad @ grad.new_empty(n_out, n_in), None, None


class Linear4bit(nn.Linear):
    """A linear map whose weight is in 4 bits: as many bytes as Params4bit says."""

    def __init__(self, n_in, n_out, bias, compute_dtype, quant_type, device):
        super().__init__(n_in, n_out, bias, device)
        self.compute_dtype = compute_dtype

    def to(self, device):
        return self  # it is there

    def forward(self, x):
        y = RoundedBack.apply(x.to(self.compute_dtype), self.in_features, self.out_features)
        return (y if self.bias is None else y + self.bias.to(y.dtype)).to(x.dtype)


def Params4bit(data, requires_grad, quant_type, module):
    """
    The bytes of a matrix: half a byte a number; a scale of one byte for each 64 numbers; for each
    256 scales one in 32 bits; the tables of 16 and 256 levels, and the mean of the scales.
    """
    scales = math.ceil(data.numel() / 64)
    held = math.ceil(data.numel() / 2) + scales + 4 * (math.ceil(scales / 256) + 16 + 256 + 1)
    return nn.Parameter(torch.empty(held, dtype=torch.uint8), requires_grad)


class AdamW8bit(torch.optim.Optimizer):
    """
    AdamW with two states of a byte a number, each with a scale in 32 bits for 256 numbers; small
    parameters have both states in 32 bits. A step takes no memory besides.
    """

    def __init__(self, params, **settings):
        super().__init__(params, settings)

    def step(self):
        for p in (p for group in self.param_groups for p in group["params"]):
            small, state = p.numel() < 4096, self.state[p]
            for number in (1, 2) if not state else ():
                dtype = torch.float32 if small else torch.uint8
                state[f"state{number}"] = torch.zeros_like(p, dtype=dtype)
                if not small:
                    state[f"absmax{number}"] = torch.zeros(math.ceil(p.numel() / 256))


BITSANDBYTES = SimpleNamespace(optim=SimpleNamespace(AdamW8bit=AdamW8bit),
                               nn=SimpleNamespace(Linear4bit=Linear4bit, Params4bit=Params4bit))


# --------------------------------------------------------------------------------------------------
# the dry run


class Tracker(MemTracker):
    """
    MemTracker without its hooks on modules, which fail where a module is called twice. And fake
    tensors have no values: `chosen` is how many True there are in any mask, and a number is 1.
    """

    chosen = 0

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
        if func is aten.index.Tensor and args[1][0].dtype == torch.bool:
            where = torch.empty(self.chosen, args[1][0].dim(), dtype=torch.int64)
            args = args[0], list(where.unbind(1))
        return super().__torch_dispatch__(func, types, args, kwargs)

    @contextlib.contextmanager
    def peak(self, peaks, *name):
        """In this block: peaks[name] becomes the peak, in bytes."""
        gc.collect()  # what is in cycles would be freed at some moment or other
        self._peak_mem.clear()
        yield
        peaks[name] = max(self._peak_mem.values(), default=0)


@contextlib.contextmanager
def fake_tensors():
    """In this block tensors are fake; it gives the Tracker that counts them."""
    from transformers import masking_utils
    from transformers.integrations import moe

    def is_mask(t=None):
        return t is not None and t.dtype == torch.bool

    # transformers takes fake tensors for a trace, in which it keeps masks that a run drops; and
    # the kernels for groups of experts refuse fake tensors: their substitute has the same shapes
    with (mock.patch.object(masking_utils, "is_tracing", is_mask),
          mock.patch.object(moe, "_can_use_grouped_mm", lambda *args: False),
          no_package(),
          contextlib.redirect_stdout(None),  # builders say what they do
          FakeTensorMode(allow_non_fake_inputs=True), Tracker() as tracker):
        yield tracker


def step_through(config, models, made, n, distinct, b, P, R, tracker):
    """
    One iteration: {(phase, model): peak in bytes}; phases are rollout, reading and update. made:
    the optimizers.
    """
    system = SimpleNamespace(**config)
    precision = autocast(system, CPU)
    peaks, entropy = {}, config.get("entropy_coef", 0) > 0
    if n:
        copied = decoding_copy(models["policy"], dtypes(system)[1], CPU)
        with torch.no_grad(), precision, copied as decoder:
            decode(decoder, n, distinct, P, R, config["temperature"], tracker, peaks)
    tokens, mask = torch.zeros(b, P + R, dtype=torch.int64), torch.ones(b, R, dtype=torch.bool)
    target_mask = torch.cat([torch.zeros(b, P, dtype=torch.bool), mask], 1)  # (b, T)
    mb = dict(tokens=tokens, target_mask=target_mask, response_mask=mask)
    tracker.chosen = b * R

    def read(name, model):
        with precision:
            if name == "reward_model":
                return model.scores(tokens, mask.sum(1))
            if name == "judge":
                return model.last_logits(tokens, mask.sum(1))
            if name == "value_model":
                return response_values(model, mb)
            return response_logprobs(model, mb, config.get("temperature", 1.0), None,
                                     config.get("head_chunk", 0), entropy)[0]

    for name, model in models.items():
        with tracker.peak(peaks, "reading", name), no_grad_forwards([model], CPU):
            read(name, model)
    for name, model in models.items():
        if any(p.requires_grad for p in model.parameters()):
            with tracker.peak(peaks, "update", name):
                read(name, model).sum().backward()
    with tracker.peak(peaks, "update", "step"):
        for optimizer in made:
            step(optimizer, 1e-6)
    return peaks


def decode(decoder, n, distinct, P, R, temperature, tracker, peaks):
    """
    A rollout of n rows: it reads the distinct prompts, of unequal lengths, and samples the last
    token.
    """
    def next_logits(rows, tokens, past):
        mask = torch.ones(rows, past + tokens, dtype=torch.bool)
        positions = mask.long().cumsum(1)[:, -tokens:]
        tokens = torch.zeros(rows, tokens, dtype=torch.int64)
        return decoder.next_logits(tokens, cache, mask, positions)

    def append(tokens):
        """The cache with so many tokens more, which no model has read."""
        for layer in cache.layers if tokens > 0 else ():
            layer.update(*(t.new_empty(*t.shape[:2], tokens, t.shape[-1])
                           for t in (layer.keys, layer.values)))

    cache = decoding_cache(decoder.hf.config)
    with tracker.peak(peaks, "rollout", "prompts"):
        next_logits(distinct, P, 0)
        cache.batch_select_indices(torch.zeros(n, dtype=torch.int64))
    # the last token is sampled, and not read. The cache has grown last at token number `grown`
    last, grown = P + R - 1, P + (R - 1) // (SPARE + 1) * (SPARE + 1)
    append(min(grown, last - 1) - P)
    append(last - 1 - grown)
    with tracker.peak(peaks, "rollout", "responses"):
        logits = next_logits(n, 1, last - 1)
        draw(logits, torch.zeros(n, dtype=torch.float64), temperature)

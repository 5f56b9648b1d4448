"""
What an iteration of a run computes, reads and sends, on each rank: for tools/plan.py. The dry run
of tools/memory.py counts the products of matrices for one row, through the run's own functions: so
all keys and families are as they are there.

The least seconds of a phase are the longest of three, because a device can do them at once:

    operations (FLOP)       / how many a second its products of matrices make
    bytes of its memory     / how many a second it reads and writes
    bytes over a link       / how many a second go in one direction

Counted are the bytes that no implementation avoids: the weights once in a decoding step, once in a
forward pass of a micro-batch, once more in its backward pass, which also adds to the gradients; the
keys and values of all tokens so far; and what an optimizer reads and writes. Not the activations.
"""
import contextlib
import functools
import math
import time
from typing import NamedTuple

import torch

from errors import BadInput
from options.trunk import layers_of
from tools.memory import (FEWEST, MOST, Count, build, dry_run, fitting, say_progress, sizes_of,
                          without_files)
from tools.runs import typed


class Often(NamedTuple):
    """How often a rank does what, in an iteration."""

    rows: float  # of its responses, or texts; of rm.py pairs
    prompts: float  # different ones
    waves: float  # of rows that decode at once
    steps: float  # of decoding, in all waves; the first token of a response comes from its prompt
    b: float  # rows of a micro-batch
    micro: float  # micro-batches of the rows
    epochs: float
    updates: float  # steps of the optimizers


def often(script, config, P, mean, rows=None):
    """
    Responses of `mean` tokens on average, the longest of max_new_tokens, to prompts of P tokens;
    of sft.py and rm.py texts of P + mean. rows: None, those of an iteration.
    """
    sampled = script in ("ppo", "grpo")
    n = math.ceil((rows or config["batch_size"]) / config["world_size"])
    longest = config["max_new_tokens"] if sampled else 0
    at_once = min(n, config.get("rollout_batch_size") or (
        256 if config.get("sampler") == "vllm" else n))
    waves = math.ceil(n / at_once)
    steps = waves * max(longest - 1, 0)
    if config.get("sampler") == "vllm":  # a row that has ended makes room for another one
        waves, steps = 1, max(longest - 1, n * (mean - 1) / at_once)
    epochs = config.get("ppo_epochs") or config.get("num_iterations") or 1
    minibatches = config.get("num_minibatches", 1)
    b = min(config["micro_batch_size"], n / minibatches)
    if config["micro_batch_tokens"]:
        b = min(max(1, config["micro_batch_tokens"] // (P + mean)), n / minibatches)
    group = config.get("group_size", 1) if rows is None else 1  # an evaluation has one response
    return Often(n, math.ceil(n / group), waves, steps, b, n / b, epochs, epochs * minibatches)


def of_iteration(script, config, P, mean, parts, cost, nothing):
    """
    {phase: what it takes} of an iteration: sampling, scoring (by models), reading, update, and more
    of `parts`; its share of the evaluations. parts: (phase, what is at work) of a step, see
    memory.step_through. cost: a function of a part and Often; its results are added to `nothing`.
    """
    def total(of, parts):
        phases = {}
        for part in parts:
            phase, name = part
            if phase == "reading" and name in ("reward_model", "judge"):
                phase = "scoring"
            phase = "sampling" if phase == "rollout" else phase
            phases[phase] = phases.get(phase, nothing) + cost(part, of)
        return phases

    sampled, before = script in ("ppo", "grpo"), ("rollout", "reading")
    inference = [(phase, name) for phase, name in parts
                 if sampled and phase in before and name != "trunk"]
    training = [part for part in parts if part[0] not in before]
    of = often(script, config, P, mean)
    phases = dict.fromkeys(("sampling", "scoring", "reading"), nothing)
    phases |= total(of, inference) | total(of, training)
    if config.get("eval_path") and config.get("eval_interval"):
        held_out = often(script, config, P, mean, config["eval_size"] or 256)
        phases["evaluation"] = sum(total(held_out, inference).values(), nothing) * (
            1 / config["eval_interval"])
    return phases


def one_row(script, P, mean):
    """The keys of a step with one row of these lengths."""
    return FEWEST | (dict(max_prompt_tokens=P, max_new_tokens=mean) if script in ("ppo", "grpo")
                     else dict(max_tokens=P + mean))


# -------------------------------------------------------------------------------------------------
# deep models by two shallow ones


def depths_of(script, config):
    """
    (few, more, {name: all}): a straight line from what models of so few layers and of so many more
    take leads to what all layers take, because what is added is the same again and again. None
    where that is not so, or models are not deep.
    """
    with without_files():
        models = build(script, config | dict(world_size=1, zero_stage=""), torch.device("meta"))
    begin, period, deep = 2, 1, {}
    for name, model in models.items():
        text = model.config.get_text_config()
        types = getattr(text, "layer_types", None) or [""] * text.num_hidden_layers
        kinds = [(kind, *((n, p.shape) for n, p in layer.named_parameters())) for kind, layer in
                 zip(types, layers_of(model), strict=False)]
        if model.base is not None or len(kinds) != text.num_hidden_layers:
            return None  # models that share layers
        same = [(1 + max((i for i in range(len(kinds) - p) if kinds[i] != kinds[i + p]),
                         default=-1), p) for p in range(1, 9)]
        first, p = min(same, key=lambda pair: pair[0] + 2 * pair[1])
        begin, period = max(begin, first), math.lcm(period, p)
        deep[name] = len(kinds)
    step = max(period, 2)
    few = [n for n in range(begin, begin + period)
           if not any((layers - n) % period for layers in deep.values())]
    if not few or 2 * (few[0] + step) > min(deep.values()):
        return None
    return few[0], few[0] + step, deep


def to_all_layers(few, more, deep):
    """
    The straight line of depths_of: a function (low, high, name) -> what all layers of a model take,
    where few take low, and more take high. Without a model's name, as in a rollout and in the
    optimizers' step, it goes by the policy's layers.
    """
    policy = deep.get("policy", max(deep.values()))
    return lambda low, high, name: low + (high - low) / (more - few) * (
        deep.get(name, policy) - few)


def dry_run_by_lines(script, config, depths, wanted):
    """
    (rows, numbers, step) like dry_run's, but through models of few layers and lines to all. depths:
    of depths_of. step takes the keys of `wanted`, a list of dicts, and those of fitting. A peak by
    a line can be too low, where with few layers another moment is the highest.
    """
    wanted = wanted + [FEWEST, MOST] * bool(config["gpu_gb"])
    taken = []
    for layers in depths[:2] if depths else (0,):
        with dry_run(script, config, layers) as (rows, numbers, step):
            taken.append((rows, numbers, [step(**keys) for keys in wanted]))
    (rows, numbers, runs), (rows2, numbers2, runs2) = taken[0], taken[-1]
    line = to_all_layers(*depths or (0, 1, dict.fromkeys(numbers, 0)))

    def peak(low, high, name):
        """The other models may be deeper, or less deep."""
        return line(low, high, name) + sum(
            line(sum(rows[n].values()), sum(rows2[n].values()), n)
            - line(sum(rows[n].values()), sum(rows2[n].values()), name) for n in rows)

    found = {}
    for keys, (sizes, at, cache), (_, at2, cache2) in zip(wanted, runs, runs2, strict=True):
        found[str(keys)] = sizes, {key: (
            peak(at[key][0], at2[key][0], key[1]),
            Count(*(line(x, y, key[1]) for x, y in zip(at[key][1], at2[key][1], strict=True))))
            for key in at}, line(cache, cache2, "policy")
    rows = {n: {c: line(rows[n][c], rows2[n][c], n) for c in rows[n]} for n in rows}
    numbers = {n: tuple(line(x, y, n) for x, y in zip(numbers[n], numbers2[n], strict=True))
               for n in numbers}
    return rows, numbers, lambda **keys: found[str(keys)]


def work_of(script, config, run, P, mean):
    """
    {phase: Count} of an iteration, see of_iteration, all its operations as flop; the gradients'
    all_reduce is a phase of its own. run: what memory.dry_run yields; one row goes through it.
    """
    rows, numbers, step = run
    _, found, cache = step(**one_row(script, P, mean))
    counts = {part: count for part, (_, count) in found.items()}
    width = getattr(torch, config["dtype"]).itemsize

    def cost(part, of):
        phase, name = part
        if phase == "gradients":
            return Count(sent=of.updates * counts["update", "step"].sent)
        c = counts[part]
        if name == "step":
            return Count(of.updates * c.flop)
        read, trained = numbers[name if name in numbers else "policy"]
        if name == "prompts":
            return Count(of.prompts * (c.flop + c.attention), sent=c.sent,
                         nbytes=of.waves * read * width)
        if name == "responses":
            tokens = of.rows * (mean - 1)
            far = (P + mean / 2) / max(P + mean - 1, 1)  # as the attention of the average step
            return Count(tokens * (c.flop + c.attention * far),
                         nbytes=of.steps * read * width + tokens * (P + mean / 2) * cache)
        of_row, nbytes, states, row = c.flop + c.attention, read * width, 0, rows[name]
        if phase == "update":  # backward the weights are read again, and the gradients added to
            nbytes = 2 * nbytes + 8 * trained
            states = 2 * (row["weights"] + row["optimizer"]) + row["gradients"]
        passes = of.epochs if phase == "update" else 1
        return Count(passes * of.rows * of_row, sent=passes * of.micro * c.sent,
                     nbytes=passes * of.micro * nbytes + of.updates * states)

    return of_iteration(script, config, P, mean, [*counts, ("gradients", "step")], cost, Count())


def least_of(work, card):
    """
    {phase: (least seconds, what bounds it)}, without the phases in which nothing is done, on a
    device with flop, bandwidth and link, each a second.
    """
    found = {}
    for phase, of in work.items():
        least = dict(products=of.flop / card["flop"], memory=of.nbytes / card["bandwidth"],
                     links=of.sent / card["link"])
        bound = max(least, key=least.get)
        if least[bound]:
            found[phase] = least[bound], bound
    return found


# -------------------------------------------------------------------------------------------------
# keys that may help


def helpful(script, config, depths, run, P, mean, speed):
    """
    [(seconds saved, keys to type)]: as many rows as fit, of a rollout or of a micro-batch; and two
    other keys with both. Those that save some of an iteration's limit, the best first. run: of
    dry_run_by_lines, with one_row.
    """
    def limit(config, run):
        least = least_of(work_of(script, config, run, P, mean), speed)
        return sum(seconds for seconds, _ in least.values())

    now, found = limit(config, run), []
    *_, prompt, longest = sizes_of(script, config)
    changes = [{}, *(dict(zero_stage=x) for x in ("", "2", "3") if config["world_size"] > 1
                     and x != config["zero_stage"]),
               dict(head_chunk=0 if config["head_chunk"] else 1024)]
    for change in changes:
        if change:
            say_progress(f"with {' '.join(typed(change))}")
            try:
                with contextlib.redirect_stdout(None):
                    run = dry_run_by_lines(
                        script, config | change, depths, [one_row(script, P, mean)])
            except BadInput:
                continue  # such as stage 3 with adafactor
        fits = fitting(script, config | change, run[2])
        if all(rows for rows, _ in fits.values()):  # not, where one row does not fit
            rows = min(fits[phase][0] for phase in ("reading", "update"))
            most = dict(micro_batch_tokens=rows * (prompt + longest))
            if "rollout" in fits:
                most["rollout_batch_size"] = fits["rollout"][0]
            for keys in [change | most] if change else [{key: x} for key, x in most.items()]:
                found.append((now - limit(config | keys, run), keys))
    return sorted((x for x in found if x[0] > 0.002 * now), key=lambda pair: -pair[0])


# -------------------------------------------------------------------------------------------------
# the device that is there


@functools.cache
def products(device, dtype):
    """Floating-point operations a second of the device in a product of two large matrices."""
    n = 8192 if device.type == "cuda" else 1024
    a, b = torch.randn(2, n, n, device=device).to(dtype)
    return 2 * n**3 / fastest(lambda: a @ b)


@functools.cache
def bandwidth(device, nbytes):
    """Bytes a second that the device reads and writes in a copy that touches `nbytes`."""
    a, b = torch.ones(2, max(round(nbytes / 2), 1), dtype=torch.uint8, device=device)
    return 2 * a.nbytes / fastest(lambda: b.copy_(a))


def fastest(work):
    """The least seconds that a call of `work`, which gives a tensor, takes on its device."""
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(5):
            out = work()
        out.flatten()[0].item()  # waits for the device
        seconds.append((time.perf_counter() - began) / 5)
    return min(seconds)

"""
What an iteration of a run computes, reads and sends, on each rank: for tools/plan.py, and for the
limits that evidence/bench.py prints. The dry run of tools/memory.py counts the products of matrices
for one row, through the run's own functions: so all keys and families are as they are there.

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

from tools.memory import SHORT, dry_run, read_run


class Phase(NamedTuple):
    """What a rank does in a phase: operations, bytes of its memory, bytes that it sends."""

    flop: float = 0.0
    nbytes: float = 0.0
    sent: float = 0.0

    def least(self, card):
        """{what bounds it: seconds} on a device with flop, bandwidth and link, each a second."""
        return dict(products=self.flop / card["flop"], memory=self.nbytes / card["bandwidth"],
                    links=self.sent / card["link"])


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
    return Often(n, math.ceil(n / config.get("group_size", 1)), waves, steps, b, n / b, epochs,
                 epochs * minibatches)


def numbers_of(model):
    """(weights that a forward pass reads, the trained ones), of the whole model and its trunk."""
    own, base = list(model.parameters()), model.base
    read = sum(p.numel() for p in own) + (numbers_of(base)[0] if base is not None else 0)
    if base is None:  # of the embeddings few rows are read, unless they are the head as well
        inputs, outputs = model.hf.get_input_embeddings(), model.hf.get_output_embeddings()
        read -= inputs.weight.numel() * (outputs is None or outputs.weight is not inputs.weight)
    return read, sum(p.numel() for p in own if p.requires_grad)


def counted(script, run, P, mean):
    """
    What work_of wants of a dry run, with one row: {(phase, what is at work): Count}, the bytes of a
    token's keys and values, numbers_of each model, and its row of the table of memory.
    """
    rows, models, step = run
    one = dict(micro_batch_size=1, micro_batch_tokens=0, rollout_batch_size=1)
    sizes = dict(max_prompt_tokens=P, max_new_tokens=mean) if script in ("ppo", "grpo") else dict(
        max_tokens=P + mean)
    _, found, cache = step(**one, **sizes)
    return ({key: count for key, (_, count) in found.items()}, cache,
            {name: numbers_of(model) for name, model in models.items()}, rows)


def work_of(script, config, count, P, mean):
    """
    {phase: Phase} of an iteration, see often. count: of counted. The phases are sampling, scoring
    (by models), reading, update, gradients; to vLLM; an iteration's share of the evaluations.
    """
    counts, cache, numbers, rows = count
    width = getattr(torch, config["dtype"]).itemsize

    def forwards(phase, name, rows, micro, passes=1, gradients=0):
        """Of a model's rows, in so many micro-batches that read it so many times."""
        c, (read, trained) = counts[phase, name], numbers[name]
        return Phase(rows * (c.flop + c.attention),
                     micro * (passes * read * width + gradients * trained), micro * c.sent)

    def inference(n):
        """Of so many responses of all ranks: sampling, scoring, reading."""
        of = often(script, config, P, mean, n)
        phases = dict(sampling=Phase(), scoring=Phase(), reading=Phase())
        if script not in ("ppo", "grpo"):
            return phases
        prompts, last = counts["rollout", "prompts"], counts["rollout", "responses"]
        far = (P + mean / 2) / max(P + mean - 1, 1)  # as the attention of the average step
        tokens = of.rows * (mean - 1)
        phases["sampling"] = Phase(
            (of.prompts if n is None else of.rows) * (prompts.flop + prompts.attention)
            + tokens * (last.flop + last.attention * far),
            (of.waves + of.steps) * numbers["policy"][0] * width
            + tokens * (P + mean / 2) * cache, prompts.sent)
        for name in numbers.keys() & SHORT.keys():
            phase = "scoring" if name in ("reward_model", "judge") else "reading"
            phases[phase] = add(phases[phase], forwards("reading", name, of.rows, of.micro))
        return phases

    of = often(script, config, P, mean)
    work = inference(None) | dict(update=Phase(), gradients=Phase())
    for (phase, name), count in counts.items():
        if phase == "update" and name in numbers:
            work["update"] = add(work["update"], forwards(
                phase, name, of.epochs * of.rows, of.epochs * of.micro, passes=2, gradients=8))
            row = rows[name]
            states = 2 * (row["weights"] + row["optimizer"]) + row["gradients"]
            work["update"] = add(work["update"], Phase(nbytes=of.updates * states))
        elif phase == "update":
            work["update"] = add(work["update"], Phase(of.updates * count.flop))
            work["gradients"] = Phase(sent=of.updates * count.sent)
    if config.get("eval_path") and config.get("eval_interval"):
        each = functools.reduce(add, inference(config["eval_size"] or 256).values())
        work["evaluation"] = Phase(*(x / config["eval_interval"] for x in each))
    return work


def add(one, other):
    return Phase(*(x + y for x, y in zip(one, other, strict=True)))


def least_of(work, card):
    """{phase: (seconds, what bounds it)}, without the phases in which nothing is done."""
    found = {}
    for phase, of in work.items():
        least = of.least(card)
        bound = max(least, key=least.get)
        if least[bound]:
            found[phase] = least[bound], bound
    return found


def limits(script, keys, P, mean, device):
    """
    Of an iteration with these keys, {key: value}, on the device that is there: {phase: the least
    seconds}, as the log has its phases, and the Phases of work_of.
    """
    _, config = read_run([f"{script}.py"] + [f"--{key}={value}" for key, value in keys.items()])
    with contextlib.redirect_stdout(None), dry_run(script, config) as run:
        work = work_of(script, config, counted(script, run, P, mean), P, mean)
    dtype, steps = getattr(torch, config["dtype"]), often(script, config, P, mean).steps + 1
    card = dict(flop=products(device, dtype), link=math.inf,
                bandwidth=bandwidth(device, work["sampling"].nbytes / steps))
    least = {phase: seconds for phase, (seconds, _) in least_of(work, card).items()}
    found = dict(rollout=least["sampling"], update=least["update"],
                 score=least.get("scoring", 0) + least["reading"])
    return found | dict(iteration=sum(found.values())), work


# -------------------------------------------------------------------------------------------------
# the device that is there


@functools.cache
def products(device, dtype):
    """Floating-point operations a second of the device in a product of two large matrices."""
    n = 8192 if device.type == "cuda" else 2048
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

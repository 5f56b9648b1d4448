"""
What the parts of an iteration take on the device that is there, for tools/plan.py --measure: a
decoding step, a micro-batch that is read, one that is trained, a step of the optimizers with its
all_reduce. They are the run's own functions, on random weights and at the run's shapes, with 2 and
with 4 layers; by a straight line from these to all layers.
"""
import contextlib
import time
from types import SimpleNamespace

import torch

import ranks
import rollout
from tools import memory, work


class Clock:
    """Measures in the place of memory.Tracker: found[phase, model] = its seconds."""

    def __init__(self, device):
        self.device = device

    def __call__(self, function, repeats=1):
        """The least seconds of a few calls."""
        took = []
        for _ in range(repeats):
            began = self.now()
            function()
            took.append(self.now() - began)
        return min(took)

    def now(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    @contextlib.contextmanager
    def block(self, found, *name):
        began = self.now()
        yield
        found[name] = self.now() - began


def measure(script, config, P, mean):
    """
    {(phase, what is at work): seconds}: of "responses" of one step, elsewhere of one call. All
    ranks that torchrun has started call it.
    """
    system = SimpleNamespace(**config)
    device = ranks.init(system)  # COLLECTIVE
    of, seconds = work.often(script, config, P, mean), {}
    sampled = script in ("ppo", "grpo")
    n = round(of.rows / of.waves) if sampled else 0
    b = max(round(of.b), 1) * (2 if script == "rm" else 1)  # its rows are pairs
    live = max(round(n * mean / config["max_new_tokens"]), 1) if sampled else 0

    def sample(decoder, n, distinct, P, R, temperature, clock, found):
        """Seconds of the prompts, and of a step where an average row is in its middle."""
        def decode(rows, length, steps):
            prompts = torch.randint(2, (distinct, length)).tolist()
            rollout.decode(decoder, [prompts[i % distinct] for i in range(rows)],
                           torch.rand(rows, steps, dtype=torch.float64), temperature,
                           graphs=system.cuda_graphs and device.type == "cuda")

        found["rollout", "prompts"] = clock(lambda: decode(n, P, 1))
        steps = max(1, min(8, (R - 1) // 2))
        begin = max(P + min(R // 2 - 3 * steps // 2, R - 1 - 2 * steps), 1)
        # on a GPU both record the graph of their steps, once; the difference has steps alone
        few, many = (clock(lambda x=x: decode(live, begin, 1 + x), 2) for x in (steps, 2 * steps))
        found["rollout", "responses"] = max(many - few, 0) / steps

    with memory.without_files():  # whole, since FSDP has no ranks of meta tensors
        whole = memory.build(script, config | dict(zero_stage=""), torch.device("meta"))
    layers = {model.config.num_hidden_layers for model in whole.values()}
    sizes = (2, 4) if min(layers) > 4 else (0,)
    for size in sizes:
        with memory.without_files(size):
            models = memory.build(script, config, device)
            _, made = memory.equip(models, config)
            runs = [memory.step_through(
                models, made, system, n, max(round(of.prompts / of.waves), 1), b, P,
                mean if sampled else P, Clock(device), sample) for _ in range(3)]
        seconds[size] = {key: min(run[key] for run in runs[1:]) for key in runs[0]}
        del models, made
    ranks.leave()  # COLLECTIVE
    if len(sizes) == 1:
        return seconds[0]
    line = work.to_all_layers(*sizes, {
        name: model.config.num_hidden_layers for name, model in whole.items()})
    # on a busy machine four layers can seem quicker than two: all take no less than four
    return {key: max(seconds[4][key], line(low, seconds[4][key], key[1]))
            for key, low in seconds[2].items()}


def phases_of(script, config, P, mean, took):
    """{phase: seconds of an iteration} from those of `measure`."""
    def seconds(part, of):
        passes = of.epochs if part[0] == "update" else 1
        times = dict(prompts=of.waves, responses=of.steps, step=of.updates)
        return times.get(part[1], passes * of.micro) * took[part]

    return work.of_iteration(script, config, P, mean, took, seconds, 0.0)

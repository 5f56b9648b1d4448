"""
The least time that work can take on a machine: its operations by the rate of matrix products, its
bytes by the rate of memory. tools/bench.py compares what is measured with it.

Counted is the work as the algorithm has it, by hand: each response is read together with its
prompt, nothing is padded, nothing is computed twice. Norms, rotations, activations, samplers and
optimizers count nothing, though they take time. Nor do sliding windows, which make attention less.

d is the width, q = heads x head size, kv the same of the key-value heads, L the tokens of a text.
"""
import time
from typing import NamedTuple

import torch

from kernels import product


class Machine(NamedTuple):
    """What a machine can do; a second of it is 1 / products + 1 / memory of nothing else."""

    products: float  # floating-point operations a second, of a large matrix product
    memory: float  # bytes a second, reading


def measure(device, dtype, seconds=0.5):
    """
    A Machine, measured: the best of repeated large products of this dtype, and of reading an array
    that no cache holds. About so many seconds each.
    """
    n, size = (8192, 2**30) if torch.device(device).type == "cuda" else (1024, 2**28)
    x = torch.ones(size // 4, dtype=torch.float32, device=device)
    return Machine(product_rate(n, dtype, device, seconds),
                   size / least_seconds(x.sum, device, seconds))


def product_rate(n, dtype, device, seconds):
    """
    Operations a second of a product of two matrices (n, n), by the library that the models use for
    it; measured in so many seconds.
    """
    matrix = torch.ones(n, n, dtype=dtype, device=device)
    return 2 * n**3 / least_seconds(lambda: product(matrix, matrix), device, seconds)


def least_seconds(run, device, seconds):
    """The shortest time of run(), of as many runs as fit into so many seconds; 3 or more."""
    times, end = [], time.perf_counter() + seconds
    while len(times) < 4 or time.perf_counter() < end:
        times.append(seconds_of(run, device))
    return min(times[1:])  # the first one warms up: it starts threads and loads kernels


def seconds_of(run, device):
    """The seconds that run() takes, until the device has finished its work."""
    began = time.perf_counter()
    run()
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def layer_weights(c):
    """How many weights of all layers multiply each token. c: a ModelConfig."""
    q, kv = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    mlp = (3 if c.gated_mlp else 2) * c.d_model * c.d_ff
    return c.n_layers * (c.d_model * (2 * q + 2 * kv) + mlp)


def forward_flops(c, lengths, headed=0):
    """
    Operations of a forward pass over texts of these lengths; so many tokens of them, `headed`, get
    logits. A weight costs 2 a token, a multiplication and an addition. Attention's two products
    cost token number t of a text 2 q each for each of the t tokens that it sees; so a text of L
    tokens costs 2 q L (L + 1).

    A layer of d = q = kv = 2 and d_ff = 3, gated, has 4 x 4 + 3 x 6 = 34 weights: one text of 3
    tokens costs 2 x 34 x 3 + 2 x 2 x 3 x 4 = 252.
    """
    q = c.n_heads * c.head_dim
    attention = c.n_layers * sum(2 * q * n * (n + 1) for n in lengths)
    head = 2 * c.d_model * c.vocab_size * headed
    return 2 * layer_weights(c) * sum(lengths) + attention + head


def decode_seconds(machine, c, prompt, responses, number):
    """
    The least seconds in which responses of these lengths are sampled to prompts of `prompt` tokens,
    all at once: the prompts are read, then each step reads one token a running response. A step
    needs its operations, and reads the weights and all keys and values: what takes longer counts.

    number: bytes of a weight, and of a key.
    """
    weights, head = layer_weights(c), c.d_model * c.vocab_size
    q, kv = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    seconds = forward_flops(c, [prompt] * len(responses), len(responses)) / machine.products
    for t in range(1, round(max(responses))):  # the first token is chosen by the prompt's forward
        running = sum(length > t for length in responses)
        seen = running * (prompt + t) * c.n_layers  # pairs of a query and a key, in all layers
        flops = running * 2 * (weights + head) + 4 * q * seen
        read = number * (weights + head + 2 * kv * seen)
        seconds += max(flops / machine.products, read / machine.memory)
    return seconds


def iteration_seconds(machine, c, prompt, responses, number, passes, value_model):
    """
    The least seconds of an iteration, {phase: seconds}, for responses of these lengths.

    score: the reference reads each response; in PPO (value_model) the value model and a reward
    model of the same size do, too. The policy need not: its log-probs are the sampler's. update:
    policy and value model read it in each pass; a backward pass costs twice the forward's products,
    for the gradients of activations and those of weights.
    """
    texts = [prompt + length for length in responses]
    trunk = forward_flops(c, texts)
    policy = forward_flops(c, texts, sum(responses))
    return dict(
        rollout=decode_seconds(machine, c, prompt, responses, number),
        score=(policy + 2 * trunk * value_model) / machine.products,
        update=3 * passes * (policy + trunk * value_model) / machine.products)

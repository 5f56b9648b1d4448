r"""
Does the cost of a token stay the same as responses become more, and longer? Measured on a random
Llama: the microseconds of a sampled token and of a trained token (its forward and backward pass).

OMP_NUM_THREADS=2 OMP_PROC_BIND=true OMP_PLACES=cores python tools/growth.py

Attention alone may grow: a token looks at all tokens before it. So it is measured by itself, with
the same functions on the same shapes, and taken out. In sampling it is measured on the keys and
values of one layer, which a CPU's cache may hold where those of all layers are too many: so a part
of attention's growth stays in the rest. What is left should be flat, but for that. The last column
compares it with the first line. Each time is the least of `repeats`, in turns; a page takes about
four minutes on two cores.
"""
import os
import sys

import torch

# Python looks for modules in this file's folder, tools/; ours are in the folder above it.
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

from configurator import configure  # noqa: E402
from engine.limits import seconds_of  # noqa: E402
from engine.placement import decoding_copy  # noqa: E402
from engine.pretrained import from_scratch  # noqa: E402
from loss import response_logprobs  # noqa: E402
from model import document_attention, documents_seen, step_attention  # noqa: E402
from packing import pack  # noqa: E402
from rollout import generate  # noqa: E402

# --------------------------------------------------------------------------------------------------
responses = "32,128,512"  # how many, at the first of the lengths
lengths = "128,256,512,1024"  # tokens of each, at the first number of responses
prompt_length = 32  # tokens of each prompt [>= 1]
micro_batch_size = 8  # rows trained at once [>= 1]
d_model = 256  # width of the Llama [>= 2]
n_layer = 4  # its layers [>= 1]
n_head = 4  # its attention heads [>= 1]
d_ff = 688  # width of its gated MLP [>= 1]
vocab_size = 512  # its vocabulary [>= 4]
repeats = 3  # timed runs of each [>= 1]
device_type = "auto"  # auto = a GPU if there is one [auto | cpu | cuda]
configure(globals())
# --------------------------------------------------------------------------------------------------

device = device_type
if device == "auto":
    device = "cuda" if torch.cuda.is_available() else "cpu"
counts, sizes = ([int(x) for x in text.split(",")] for text in (responses, lengths))
points = [(n, sizes[0]) for n in counts] + [(counts[0], R) for R in sizes[1:]]
policy = from_scratch(dict(
    model_type="llama", vocab_size=vocab_size, hidden_size=d_model, intermediate_size=d_ff,
    num_hidden_layers=n_layer, num_attention_heads=n_head, num_key_value_heads=n_head,
    max_position_embeddings=prompt_length + max(sizes), tie_word_embeddings=False)).to(device)


def random_heads(*shape):
    """Random queries, keys or values: (*shape, hd)."""
    return torch.randn(*shape, d_model // n_head, device=device)


def sampling(n, R):
    """Sample n responses of R tokens."""
    decoder = decoding_copy(policy, None, policy.embed.weight.device)  # as each rollout makes it
    generate(decoder, torch.ones(n, prompt_length, dtype=torch.int64).tolist(), R)


def attention_of_sampling(n, R):
    """The seconds of attention in it: the mean of some of its steps, times all steps and layers."""
    keys, values = (random_heads(n, n_head, prompt_length + R) for _ in range(2))
    q, some = random_heads(n, n_head), range(prompt_length + 1, prompt_length + R, max(R // 16, 1))
    mask = torch.zeros(n, 1, 1, prompt_length + R, device=device)
    with torch.inference_mode():
        step = sum(min(seconds_of(lambda S=S: step_attention(
            q, keys[:, :, :S], values[:, :, :S], mask[..., :S]), device)
                       for _ in range(3)) for S in some)
    return step / len(some) * (R - 1) * n_layer


def training(n, R):
    """The forward and backward pass of all n responses, in micro-batches."""
    for rows in torch.arange(n, device=device).split(micro_batch_size):
        shape = len(rows), prompt_length + R
        mb = dict(tokens=torch.randint(0, vocab_size, shape, device=device),
                  attention_mask=torch.ones(shape, dtype=torch.bool, device=device),
                  response_mask=torch.ones(len(rows), R, dtype=torch.bool, device=device))
        logprobs, _ = response_logprobs(policy, mb, 1.0, vocab_size, entropy=False)
        logprobs.sum().backward()
    policy.zero_grad()


def attention_of_training(n, R):
    """The seconds of attention in it, of one micro-batch, times all micro-batches and layers."""
    rows, L = min(n, micro_batch_size), prompt_length + R - 1  # no state is read of the last token
    q, k, v = (random_heads(rows * L, n_head).requires_grad_() for _ in range(3))
    packed = pack(torch.zeros(rows, L, dtype=torch.int64, device=device))
    documents = documents_seen((0,), packed, torch.float32)[0]
    one = min(seconds_of(lambda: document_attention(q, k, v, documents).sum().backward(),
                         device)
              for _ in range(3))
    return one * n / rows * n_layer


works = dict(sampled=(sampling, attention_of_sampling), trained=(training, attention_of_training))
print(f"{'':<26}{'microseconds a token':>24}{'attention':>11}{'the rest':>10}{'to the first':>14}")
for name, (run, attention) in works.items():
    run(*points[0])  # a warm-up
    whole, part = ([float("inf")] * len(points) for _ in range(2))
    for _ in range(repeats):
        for i, point in enumerate(points):
            whole[i] = min(whole[i], seconds_of(lambda run=run, point=point: run(*point),
                                               device))
            part[i] = min(part[i], attention(*point))
    rests = []
    for (n, R), all_of_it, its_attention in zip(points, whole, part, strict=True):
        tokens = n * R if name == "sampled" else n * (prompt_length + R)
        us, ours = (1e6 * x / tokens for x in (all_of_it, its_attention))
        rests.append(us - ours)
        print(f"{name:<8}{n:>5} x {R:<5} tokens  {us:>22.1f}{ours:>11.1f}{rests[-1]:>10.1f}"
              f"{rests[-1] / rests[0]:>14.2f}", flush=True)

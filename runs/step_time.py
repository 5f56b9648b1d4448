"""
Where the time of a training step goes: PPO's policy and value model, forward and backward pass and
the optimizers' steps, on a random Llama on the CPU.

    OMP_NUM_THREADS=1 python runs/step_time.py
    OMP_NUM_THREADS=1 python runs/step_time.py --mix=real --micro_batch_size=8

Each operation of torch runs between two readings of the process's CPU clock, which counts the work
of all threads and hardly depends on what else runs on the machine. How long a step takes without
these readings is measured, too. Two lines before the table say it.
"""
import collections
import os
import sys
import time

import torch
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

from configurator import configure  # noqa: E402
from data import my_micro_batches  # noqa: E402
from loss import masked_sum, response_logprobs, response_values  # noqa: E402
from model import from_scratch  # noqa: E402
from parallel import flatten_gradients, zero_gradients  # noqa: E402

# --------------------------------------------------------------------------------------------------
mix = "full"  # all responses have max_new_tokens, or 1/16 to 13/16 of them [full | real]
batch_size = 32  # responses [>= 1]
micro_batch_size = 32  # rows trained at once [>= 1]
prompt_length = 32  # tokens of each prompt [>= 1]
max_new_tokens = 128  # of a response [>= 16]
d_model = 256  # width of the Llama [>= 2]
n_layer = 4  # its layers [>= 1]
n_head = 4  # its attention heads [>= 1]
d_ff = 688  # width of its gated MLP [>= 1]
vocab_size = 512  # its vocabulary [>= 4]
repeats = 3  # timed steps with the readings, and as many without [>= 1]
longest = 8  # how many operations to list by themselves [>= 0]
configure(globals())
# --------------------------------------------------------------------------------------------------

B, P, R = batch_size, prompt_length, max_new_tokens
policy, value_model = (from_scratch(dict(
    model_type="llama", vocab_size=vocab_size, hidden_size=d_model, intermediate_size=d_ff,
    num_hidden_layers=n_layer, num_attention_heads=n_head, num_key_value_heads=n_head,
    max_position_embeddings=P + R, tie_word_embeddings=False), head) for head in ("lm", "scalar"))
gradients = [flat for model in (policy, value_model)
             for flat in flatten_gradients(model.parameters())]
optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
              for model in (policy, value_model)]
lengths = torch.full((B,), R) if mix == "full" else torch.linspace(R // 16, 13 * R // 16, B).long()
mask = torch.arange(R) < lengths[:, None]  # (B, R)
batch = dict(tokens=torch.randint(0, vocab_size, (B, P + R)),
             attention_mask=torch.cat([torch.ones(B, P, dtype=torch.bool), mask], 1),
             response_mask=mask, index=torch.arange(B))


def step():
    """One step of both models on the whole batch."""
    zero_gradients(gradients)
    rows = dict(micro_batch_size=micro_batch_size, micro_batch_tokens=0)
    for mb in my_micro_batches(batch, torch.randperm(B), rows):
        logprobs, _ = response_logprobs(policy, mb, 1.0, vocab_size, entropy=False)
        (masked_sum(logprobs, mb["response_mask"]) / mask.sum()).backward()
        values = response_values(value_model, mb)
        (masked_sum(values**2, mb["response_mask"]) / mask.sum()).backward()
    for optimizer in optimizers:
        optimizer.step()


class Clock(TorchDispatchMode):
    """While it is entered, each operation's CPU seconds are added up in seconds[its name]."""

    def __init__(self):
        super().__init__()
        self.seconds = collections.defaultdict(float)

    def __torch_dispatch__(self, operation, types, arguments=(), keywords=None):
        begin = time.process_time()
        result = operation(*arguments, **(keywords or {}))
        self.seconds[str(operation)] += time.process_time() - begin
        return result


def kind_of(operation):
    """Which line of the table an operation belongs to."""
    if "attention" in operation:
        return "attention, backward" if "backward" in operation else "attention, forward"
    if operation.split(".")[1] in ("mm", "addmm", "linear", "_linear_pointwise"):
        return "matrix products of the linear maps"
    return "all else"


for _ in range(2):  # a warm-up
    step()
plain = []
for _ in range(repeats):
    begin = time.process_time()
    step()
    plain.append(time.process_time() - begin)
with Clock() as clock:
    for _ in range(repeats):
        step()
seconds = {name: s / repeats for name, s in clock.seconds.items()}
whole = sum(seconds.values())
kinds = collections.Counter()
for name, s in seconds.items():
    kinds[kind_of(name)] += s
print(f"a step of {mix} responses: {sorted(plain)[repeats // 2]:.3f} seconds of CPU")
print(f"its operations, each by itself: {whole:.3f} seconds, of which")
for name, s in kinds.most_common():
    print(f"{100 * s / whole:6.1f} %  {name}")
if longest:
    print("the longest operations")
for name, s in collections.Counter(seconds).most_common(longest):
    print(f"{100 * s / whole:6.1f} %  {name}")

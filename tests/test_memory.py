"""What saves memory changes no result: logits in chunks, layers computed again. And it does save the memory."""
import os
import subprocess
import sys

import pytest
import torch

from engine.pretrained import from_pretrained, from_scratch
from loss import entropy_from_logprobs, logprobs_and_entropy, logprobs_from_logits, scaled_logits

from conftest import ROOT
from families import VARIANTS, make, padded


def loaded(variant, folder, head="lm"):
    make(variant, head=head).save_pretrained(folder / "model")
    return from_pretrained(str(folder / "model"), head=head, dtype=torch.float64)


def gradients(model, loss):
    for p in model.parameters():
        p.grad = None
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def close(a, b, tolerance=1e-12):
    return a.keys() == b.keys() and all((a[k] - b[k]).abs().max() <= tolerance for k in a)


@pytest.mark.parametrize("variant", ["gpt2", "gpt_neox", "llama3-gqa-tied", "qwen3"])
def test_chunks_change_nothing(variant, tmp_path):
    """Log-probs, entropies and all gradients, for chunks that divide the tokens, do not, are one token, or more than all."""
    model = loaded(variant, tmp_path)
    tokens, mask = padded([9, 12, 5], left=True)
    weights = torch.rand(18, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def run(chunk):
        logprobs, entropy = logprobs_and_entropy(states(model, tokens, mask), model.lm_head_weight(), chosen, 0.7, 90, chunk)
        return logprobs, entropy, gradients(model, (torch.stack([logprobs, entropy], -1) * weights).sum())

    tokens[:, -6:] = tokens[:, -6:].clamp(max=89)  # ids from 90 on are impossible here
    chosen = tokens[:, -6:].flatten()
    logits = scaled_logits(model(tokens, mask)[:, -7:-1].flatten(0, 1), 0.7, 90)
    whole, want = (logprobs_from_logits(logits, chosen), entropy_from_logprobs(logits.log_softmax(-1))), run(0)
    assert (whole[0] - want[0]).abs().max() < 1e-13 and (whole[1] - want[1]).abs().max() < 1e-13
    for chunk in (1, 4, 9, 18, 100):
        got = run(chunk)
        assert (got[0] - want[0]).abs().max() < 1e-13 and (got[1] - want[1]).abs().max() < 1e-13
        assert close(got[2], want[2])
    with torch.no_grad():
        assert (run_without_gradient(model, tokens, mask) - want[0]).abs().max() < 1e-13


def states(model, tokens, mask):
    """Those that choose the last 6 tokens of each row, (n, d)."""
    return model.trunk(tokens, mask)[:, -7:-1].flatten(0, 1)


def run_without_gradient(model, tokens, mask):
    logprobs, entropy = logprobs_and_entropy(states(model, tokens, mask), model.lm_head_weight(), tokens[:, -6:].flatten(), 0.7,
                                             90, 4, entropy=False)
    assert (entropy == 0).all()
    return logprobs


@pytest.mark.parametrize("variant", VARIANTS)
def test_recomputed_layers_change_nothing(variant, tmp_path):
    model = loaded(variant, tmp_path)
    tokens, mask = padded([9, 12, 5], left=True)
    runs = []
    for on in (False, True):
        model.recompute(on)
        logits = model(tokens, mask)
        runs.append((logits.detach(), gradients(model, logits[mask].logsumexp(-1).sum())))
    assert torch.equal(runs[0][0], runs[1][0]) and close(runs[0][1], runs[1][1])


def saved_bytes(model, function):
    """Bytes that a forward keeps for its backward, parameters aside, each storage once."""
    seen, own = {}, {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(t):
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        kept = function()
    return sum(seen.values()), kept


def test_recomputed_layers_keep_only_their_input():
    config = dict(model_type="llama", vocab_size=50, hidden_size=64, intermediate_size=256, num_hidden_layers=8,
                  num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64)
    model, tokens = from_scratch(config), torch.randint(0, 50, (8, 64))
    sizes = []
    for on in (False, True):
        model.recompute(on)
        sizes.append(saved_bytes(model, lambda: model.trunk(tokens))[0])
    layer_input = tokens.numel() * 64 * 4
    assert sizes[0] > 8 * 6 * layer_input  # norms, queries, keys, values, attention, branches of the MLP
    assert sizes[1] < 8 * 1.5 * layer_input + 3 * layer_input  # one input a layer; embedding, rotation, last norm

PEAK = """
import sys; sys.path.insert(0, sys.argv[1])
import torch
from loss import logprobs_and_entropy
torch.manual_seed(0); torch.set_num_threads(1)
V, d = 32_000, 16
head = torch.nn.Linear(d, V, bias=False)
hidden, tokens = torch.randn(2048, d, requires_grad=True), torch.randint(0, V, (2048,))
logprobs_and_entropy(hidden[:8], head.weight, tokens[:8], chunk=4, entropy=False)[0].sum().backward()
for chunk in (64, 0):
    # what torch's allocator has given and taken back: what is resident of it is the system's choice
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        logprobs_and_entropy(hidden, head.weight, tokens, chunk=chunk, entropy=False)[0].sum().backward()
    now = peak = 0
    events = [event for event in profile.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    print(peak / 2**20)
"""


def test_chunks_of_the_head_save_nine_tenths_of_the_logits():
    """2,048 tokens at vocabulary 32,000: 250 MiB of logits, several times over in the backward pass."""
    done = subprocess.run([sys.executable, "-c", PEAK, ROOT], capture_output=True, text=True, check=True,
                          env=os.environ | {"OMP_NUM_THREADS": "1"})
    chunks, whole = map(float, done.stdout.split())
    assert whole > 250 and chunks < 0.1 * whole, done.stdout

"""More of the rooms, beside the files of tests/: hard numbers, and all sides of a rule."""
import itertools
import math
from types import SimpleNamespace

import parallel
import pytest
import torch
import transformers
from errors import BadInput
from gae import compute_gae
from load import load
from loss import masked_whiten
from model import Model, scaled_logits
from prompts import batch_rows, read_rows, run_length, spread
from rollout import decode, decoding_copy
from test_gae import by_loop, case
from tiny import answer, jsonl, keys_of_system
from tokenizer import load_tokenizer

CPU = torch.device("cpu")

# loss.py, gae.py, model.py -------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_16_bits_are_computed_in_float32(dtype):
    rewards, values, mask = (x.to(dtype) if x.is_floating_point() else x for x in case(700))
    got = compute_gae(rewards, values, mask, 1.0, 0.95)
    for g, w in zip(got, by_loop(rewards, values, mask, 1.0, 0.95), strict=True):
        assert g.dtype == torch.float32 and (g - w).abs().max() <= 2e-6 * max(1, w.abs().max())
    # 0.07 nats would be lost by a softmax in bfloat16
    logits = (5 * torch.randn(7, 50, generator=torch.Generator().manual_seed(0))).to(dtype)
    want = logits.double() - logits.double().exp().sum(-1, keepdim=True).log()
    got = scaled_logits(logits).log_softmax(-1)
    assert got.dtype == torch.float32 and (got - want).abs().max() < 4e-6


def test_nothing_to_whiten_by_is_0_and_not_nan():
    x, all_of_it = torch.full((2, 3), 2.5), torch.ones(2, 3).bool()
    assert not masked_whiten(x, all_of_it).any() and not masked_whiten(x, ~all_of_it).any()


def test_what_cannot_be_decoded_is_refused(world, monkeypatch):
    """A family whose cache mixes up the rows."""
    step = Model.next_logits
    monkeypatch.setattr(Model, "next_logits", lambda self, tokens, *rest: step(
        self, tokens.roll(1, 0), *rest))
    with pytest.raises(BadInput, match="cannot decode"):
        load(world.policy, "policy", keys_of_system(), CPU)


# prompts.py, tokenizer.py -------------------------------------------------------------

@pytest.mark.parametrize("n, size", [(10, 3), (500, 256), (40, 0), (5, 9)])
def test_an_evaluation_takes_rows_from_all_over_a_sorted_file(n, size):
    seen = set()
    for seed in range(20):
        rows = spread(n, size, seed)
        assert rows == sorted(set(rows)) and len(rows) == (min(n, size) or n)
        for task in range(4):  # four tasks, one behind the other: each has its share
            first, end = n * task // 4, n * (task + 1) // 4
            assert abs(sum(first <= i < end for i in rows) - len(rows) * (end - first) / n) < 2
        seen.update(rows)
    assert len(seen) > 0.9 * n


def test_epochs_in_iterations():
    """The fewest batches that have all rows: 11 tenths of 50 are 55, though 1.1 * 50 is more."""
    for tenths, n, batch_size in itertools.product(range(1, 35), (1, 3, 50, 7473), (1, 5, 16)):
        assert run_length(7, tenths / 10, n, batch_size) == -(-tenths * n // (10 * batch_size))
    assert run_length(7, 0.0, 50, 5) == 7


def test_a_mix_of_files(tmp_path):
    """Each file has its share after every iteration, and its own rows come in whole epochs."""
    sizes, weights = dict(a=7, b=40, c=1), dict(a=0.1, b=5.0, c=2.0)
    paths = ",".join(f"{weights[name]}*" + jsonl(tmp_path / f"{name}.jsonl", [
        dict(name=name, number=i) for i in range(n)]) for name, n in sizes.items())
    rows, walks = read_rows(paths, dict), {name: [] for name in sizes}
    for iteration in range(60):
        for i in batch_rows(3, iteration, 16, rows):
            walks[rows[i]["name"]].append(rows[i]["number"])
        for name, walk in walks.items():
            assert abs(len(walk) - 16 * (iteration + 1) * weights[name] / 7.1) < 3
    for name, n in sizes.items():
        epochs = [walks[name][i:i + n] for i in range(0, len(walks[name]) - n + 1, n)]
        assert all(sorted(epoch) == list(range(n)) for epoch in epochs)


def test_stop_strings(world):
    t = load_tokenizer(world.policy, keys_of_system(stop_strings="['Q:', '##']"))
    assert t.decode_response(b"so## Q:") == "so##" and t.decode_response(b"so#") == "so#"
    assert [t.has_stop(list(b"abcd ##")[:n]) for n in range(8)] == [False] * 7 + [True]


# rollout.py ---------------------------------------------------------------------------------------

class Coin:
    """A policy of three tokens: 0, the end, and 1, with 1/2 each; never 2."""

    max_positions, config = 50, transformers.GPT2Config(n_layer=1)
    hf = SimpleNamespace(device=CPU, dtype=torch.float64, config=config)
    tokenizer = SimpleNamespace(eos_ids=[0], pad_id=0, stop_strings=[], vocab_size=2)

    def __init__(self):
        self.calls = []  # the rows of each step

    def next_logits(self, tokens, cache, attention_mask=None, position_ids=None):
        self.calls.append(len(tokens))
        return torch.zeros(len(tokens), 3, dtype=torch.float64)


def test_finished_rows_leave():
    """40 rows that end after 1 to 40 tokens: in a step, fewer than a quarter have ended."""
    B = R = 40
    lengths = [(17 * i) % B + 1 for i in range(B)]
    u = torch.full((B, R), 0.75, dtype=torch.float64)  # token 1
    for row, n in enumerate(lengths):
        u[row, n - 1] = 0.25  # token 0
    policy = Coin()
    out = answer(policy, [[1]] * B, R, u)  # its pad is its EOS
    assert out["response_mask"].sum(1).tolist() == lengths and out["finished"].all()
    assert policy.calls[0] == 1 and len(policy.calls) == R  # the prompts are alike: read once
    for t, rows in enumerate(policy.calls[1:], 1):
        running = sum(n > t for n in lengths)
        assert running <= rows < 4 / 3 * running
    budgets = [1 + i % 7 for i in range(B)]  # a limit for each response
    out = answer(Coin(), [[1]] * B, R, u, budgets=budgets)
    assert out["response_mask"].sum(1).tolist() == list(map(min, lengths, budgets))
    assert out["finished"].tolist() == [n <= most for n, most in zip(lengths, budgets, strict=True)]


@torch.no_grad()
def test_a_copy_in_16_bits_samples_what_the_training_forward_means(world):
    """Its log-probs are those of the policy itself, whose matrices autocast rounds at each use."""
    policy = load(world.tied, "policy", keys_of_system(), CPU)
    before, u = [p.clone() for p in policy.parameters()], torch.rand(6, 10).double()
    with torch.autocast("cpu", torch.bfloat16), decoding_copy(
            policy, keys_of_system(dtype="bfloat16"), CPU) as decoder:
        assert {p.dtype for p in decoder.parameters()} == {torch.bfloat16, torch.float32}
        outs = [decode(model, [[97, 98]] * 6, u) for model in (decoder, policy)]
    assert all(torch.equal(a, b) for a, b in zip(*outs, strict=True))
    assert all(torch.equal(p, q) for p, q in zip(policy.parameters(), before, strict=True))
    with decoding_copy(policy, keys_of_system(), CPU) as decoder:
        assert decoder is policy


# parallel.py, run.py ------------------------------------------------------------------------------

def test_gradients_in_16_bits_have_a_norm_in_32():
    """0.010009765625 is a number of bfloat16, sqrt(100,000) of it is none; nor has float16 3e6."""
    for dtype, each, n in ((torch.bfloat16, 0.010009765625, 100_000), (torch.float16, 1e4, 90_000)):
        norm = parallel.clip_gradients([torch.full((n,), each, dtype=dtype)], 0.5)
        assert norm.item() == pytest.approx(each * math.sqrt(n), rel=3e-5)
    numbers = torch.arange(128, 256).double()  # each is a number of bfloat16
    buffers = [numbers.bfloat16(), torch.tensor([3.0])]
    norm = math.sqrt(sum(n * n for n in range(128, 256)) + 9)
    assert parallel.clip_gradients(buffers, 7.0).item() == pytest.approx(norm, rel=1e-6)
    assert torch.equal(buffers[0], (numbers * (7 / (norm + 1e-6))).bfloat16())


def test_a_checksum_sees_an_exchange_between_two_chunks():
    """A large tensor is summed in chunks: 1 is as far into its chunk as 2**20 + 1 is."""
    t = torch.zeros(2**20 + 8)
    t[1], t[2**20 + 1] = 1, 2
    swapped = t.clone()
    swapped[1], swapped[2**20 + 1] = 2, 1
    assert int(parallel.checksum(t)) != int(parallel.checksum(swapped))

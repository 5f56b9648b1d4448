"""prompts.py: which rows a batch of several files holds, and micro-batches. (One file's order is by_hand.py's.)"""
import itertools

import pytest
import torch

from options.refill import other_row
from prompts import batch_rows, iterations, my_micro_batches, spread


@pytest.mark.parametrize("sizes, weights, batch_size", [
    ((7, 5), (1, 0.3), 4), ((10, 1, 100), (1, 1, 1), 6), ((3, 40, 9, 5), (0.1, 5, 2, 0.7), 16), ((4,), (2.5,), 3)])
def test_a_mix_of_files(sizes, weights, batch_size):
    """Each file has its share after every iteration, and its own rows come in whole epochs."""
    files, firsts = list(zip(sizes, weights, strict=True)), [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    walks = [[] for _ in sizes]
    for iteration in range(60):
        rows = batch_rows(3, iteration, batch_size, files)
        assert len(rows) == batch_size and rows == batch_rows(3, iteration, batch_size, files)
        for row in rows:
            file = next(i for i in range(len(sizes)) if firsts[i] <= row < firsts[i + 1])
            walks[file].append(row - firsts[file])
        done = (iteration + 1) * batch_size
        for walk, weight in zip(walks, weights, strict=True):
            assert abs(len(walk) - done * weight / sum(weights)) < len(sizes) <= batch_size
    for walk, n in zip(walks, sizes, strict=True):
        epochs = [walk[i:i + n] for i in range(0, len(walk) - n + 1, n)]
        assert all(sorted(epoch) == list(range(n)) for epoch in epochs)
    for row in range(sum(sizes)):
        other = other_row(row, files, "key", row)
        file = next(i for i in range(len(sizes)) if row < firsts[i + 1])
        assert firsts[file] <= other < firsts[file + 1] and (other != row or sizes[file] == 1)
    assert batch_rows(4, 0, batch_size, files) != batch_rows(3, 0, batch_size, files)


@pytest.mark.parametrize("n, size", [(10, 3), (500, 256), (7, 6), (1319, 1), (40, 40), (40, 0), (5, 9), (0, 4), (1000, 10)])
def test_an_evaluation_takes_rows_from_all_over_a_sorted_file(n, size):
    """Of four tasks one behind the other each has its share, give or take one row; a seed decides, and always alike."""
    seen = set()
    for seed in range(20):
        rows = spread(n, size, seed)
        assert rows == spread(n, size, seed) == sorted(set(rows)) and len(rows) == (min(n, size) or n)
        for task in range(4):
            first, end = n * task // 4, n * (task + 1) // 4
            share = sum(first <= row < end for row in rows)
            assert abs(share - len(rows) * (end - first) / max(n, 1)) < 2
        seen.update(rows)
    assert all(0 <= row < n for row in seen) and (len(seen) == n or n > 20 * size > 0 or len(seen) > 0.9 * n)


def test_epochs_in_iterations():
    """The fewest batches that have all rows, in whole numbers: 11 tenths of 50 rows are 55, though 1.1 * 50 is above 55."""
    for tenths, n, batch_size in itertools.product(range(1, 35), (1, 3, 10, 50, 90, 170, 7473), (1, 2, 5, 16)):
        assert iterations(7, tenths / 10, n, batch_size) == -(-tenths * n // (10 * batch_size)), (tenths, n, batch_size)
    assert iterations(7, 0.0, 50, 5) == 7


def test_micro_batches_by_enumeration():
    """Every row of a random batch, on every rank: its own tokens from the first on, its response chosen, its columns."""
    P, R, B = 7, 5, 23
    generator = torch.Generator().manual_seed(0)
    prompts, responses = (torch.randint(1, most + 1, (B,), generator=generator) for most in (P, R))
    column = torch.arange(P + R)
    mask = (column >= P - prompts[:, None]) & (column < P + responses[:, None])
    tokens = torch.randint(0, 9, (B, P + R), generator=generator)  # padding is no special id
    batch = dict(tokens=tokens, attention_mask=mask, response_mask=mask[:, P:], index=torch.arange(B),
                 logprobs=torch.randn(B, R, generator=generator))
    wanted = torch.tensor([4, 22, 0, *range(7, 20)])
    for ranks, size, most in itertools.product((1, 2, 3, 20), (1, 4, 50), (0, 1, 25)):
        seen, counts = [], []
        for rank in range(ranks):
            parts = list(my_micro_batches(batch, wanted, size, most, (rank, ranks)))
            counts.append(len(parts))
            for mb in parts:
                assert mb["tokens"].shape == mb["target_mask"].shape and not mb["target_mask"][:, 0].any()
                assert mb["response_mask"].shape == mb["logprobs"].shape and "attention_mask" not in mb
                if len(mb["index"]) == 0:
                    assert mb["tokens"].shape == (1, 2) and not mb["target_mask"].any() and mb["logprobs"].shape == (0, 1)
                    continue
                for i, row in enumerate(mb["index"].tolist()):
                    p, r = prompts[row].item(), responses[row].item()
                    assert mb["tokens"][i, :p + r].tolist() == tokens[row, mask[row]].tolist()
                    assert mb["target_mask"][i].nonzero().flatten().tolist() == list(range(p, p + r))
                    assert mb["response_mask"][i].sum() == r and torch.equal(mb["logprobs"][i, :r], batch["logprobs"][row, :r])
                lengths = mask[mb["index"]].sum(1)
                assert mb["tokens"].shape[1] == lengths.max() and mb["logprobs"].shape[1] == responses[mb["index"]].max()
                seen += mb["index"].tolist()
        assert sorted(seen) == sorted(wanted.tolist()) and len(set(counts)) == 1

"""
parallel.py, and audit.py: micro-batches of all ranks, what is gathered, and an audit that misses nothing. (What the
collectives sum, and that a number that is not finite stops all, test_by_hand.py and test_ppo.py hold.)
"""
import itertools
import json
import re

import pytest
import torch

import parallel
from options import roles
import audit

from tiny import forked, one_run


def two_layers(seed=0, dtype=torch.float32):
    model, generator = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 7)), torch.Generator().manual_seed(seed)
    for p in model.parameters():  # not by torch's own draw, which forked runs leave out
        p.data.normal_(generator=generator)
    return model.to(dtype)


# ---------------------------------------------------------------------------------------------------------------------
# one process


def all_parts(lengths, ranks, *limits):
    return [parallel.deal_rows(lengths, *limits, as_rank=(rank, ranks)) for rank in range(ranks)]


def test_micro_batches_of_all_ranks():
    """Each row is in one; they keep the limits; there are as many on every rank, and all ranks have like numbers of tokens."""
    lengths = torch.randint(1, 100, (61,), generator=torch.Generator().manual_seed(0)).tolist()
    for ranks, size, most in itertools.product((1, 2, 7, 100), (1, 5, 64), (0, 150)):
        parts = all_parts(lengths, ranks, size, most)
        flat = [sum(part, []) for part in parts]
        assert sorted(sum(flat, [])) == list(range(61)) and len({len(part) for part in parts}) == 1
        for mb in sum(parts, []):
            assert len(mb) <= size if not most else len(mb) <= 1 or max(lengths[i] for i in mb) * len(mb) <= most
            held = [lengths[i] for i in mb]
            assert len(mb) * max(held, default=0) - sum(held) <= parallel.PADDING
        tokens = [sum(lengths[i] for i in mine) for mine in flat]
        assert max(tokens) - min(tokens) <= max(lengths)  # dealt like cards
    assert all_parts([5, 2, 3, 4], 2, 2) == [[[0, 2]], [[3, 1]]]  # as many as fit
    assert all_parts([5, 2, 3, 4], 1, 1, 20) == [[[0, 3, 2, 1]]]


# ---------------------------------------------------------------------------------------------------------------------
# checksums

INTEGERS = {torch.float64: torch.int64, torch.float32: torch.int32, torch.bfloat16: torch.int16}
all_dtypes = pytest.mark.parametrize("dtype", INTEGERS, ids=str)


def one_parameter(values):
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(values.clone())
    return model


def differ(a, b):
    return not torch.equal(audit.checksums({"a": a}), audit.checksums({"a": b}))


@all_dtypes
def test_checksums_see_every_single_bit(dtype):
    values = torch.randn(5, generator=torch.Generator().manual_seed(0)).to(dtype)
    for place in range(5):
        for bit in range(8 * values.element_size()):
            flipped = values.clone()
            bits = flipped.view(INTEGERS[dtype])
            top = bit == 8 * values.element_size() - 1
            bits[place] ^= -(1 << bit) if top else 1 << bit
            assert differ(one_parameter(values), one_parameter(flipped)), f"bit {bit} of entry {place}"


@all_dtypes
def test_checksums_see_the_order_of_words(dtype):
    """And so does the text of a whole model: two entries, or two parameters, that have changed places."""
    model = two_layers(dtype=dtype)
    model[0].weight.data[:] = torch.arange(15).view(3, 5)
    first = model[0].weight.data.view(-1)
    text = roles.checksum_of([(name, p, p.data) for name, p in model.named_parameters()])
    sums = audit.checksums({"": model}).tolist()
    for a, b in itertools.combinations(range(15), 2):
        first[[a, b]] = first[[b, a]]
        assert audit.checksums({"": model}).tolist()[0] != sums[0]
        assert roles.checksum_of([(name, p, p.data) for name, p in model.named_parameters()]) != text
        first[[a, b]] = first[[b, a]]
    swapped = [(name, p, p.data) for name, p in model.named_parameters()]
    assert roles.checksum_of(swapped) == text != roles.checksum_of(swapped[::-1])


def test_checksums_see_order_across_chunks():
    """Large parameters are summed in chunks: a swap between two of them, one place further on, must show as well."""
    values = torch.zeros(2**22 + 8, dtype=torch.float32)
    for place in (2**22, 2**22 + 1):  # 1 is as far into its chunk as the second of these
        values[1], values[place] = 1.0, 2.0
        swapped = values.clone()
        swapped[1], swapped[place] = 2.0, 1.0
        assert differ(one_parameter(values), one_parameter(swapped))
        values[place] = 0


# ---------------------------------------------------------------------------------------------------------------------
# three processes


WORKER = """
import json
import torch
import parallel
import audit
import launch
from errors import Stop
from test_parallel import two_layers

device = launch.init("cpu", 30)
rank, size = parallel.rank_and_size()
said = dict(gathers=[], audits=[])
for n in (7, 3, 2, 1):  # more rows than ranks, as many, fewer
    everything = dict(mask=torch.arange(3 * n).view(n, 3) % 2 == 0,  # first: what follows begins at odd bytes
                      ids=torch.arange(2 * n).view(2, n).t() * 2**40,  # not contiguous
                      exact=torch.arange(n, dtype=torch.float64) / 7,
                      half=(torch.arange(2 * n) / 3).bfloat16().view(n, 1, 2),
                      odd=torch.tensor([-0.0, torch.nan, -torch.inf, 1e-45, 3.4e38, 0.1, 1.0][:n]))
    got = parallel.gather_rows({k: parallel.my_share(x) for k, x in everything.items()}, n)
    bits = lambda t: t.contiguous().view(torch.uint8)  # of equal bits, also where NaN != NaN and -0.0 == 0.0
    said["gathers"].append(list(got) == list(everything) and all(
        torch.equal(bits(got[k]), bits(x)) and (got[k].dtype, got[k].shape) == (x.dtype, x.shape) for k, x in everything.items()))

largest = parallel.all_reduce_max(torch.tensor([float(rank), torch.nan if rank == 2 else 0.0]))
said["max"] = [str(x) for x in largest.tolist()]

models, frozen = dict(policy=two_layers(), reward_model=two_layers(seed=9).requires_grad_(False)), {}
for iteration, (name, owners) in enumerate([("policy", []), ("policy", [1]), ("reward_model", [2]), ("reward_model", range(3))]):
    p = models[name][1].weight
    before = p.detach().clone()
    if rank in owners:
        p.data[6, 2] *= 1.0000002  # the last bit or two
    try:
        said["audits"].append(audit.audit(models, frozen, iteration))
    except Stop as e:
        said["audits"].append(str(e))
    p.data.copy_(before)
with open(f"said-{rank}.json", "w") as f:
    json.dump(said, f)
launch.finish()
"""


def test_three_ranks_gather_every_bit_and_audit_every_bit(tmp_path):
    (tmp_path / "worker.py").write_text(WORKER)
    (result,), = forked(str(tmp_path), {"run": [one_run(str(tmp_path / "worker.py"), [], [], [])]}).values()
    assert result["codes"] == [0] * 3, result
    said = [json.loads((tmp_path / "run" / f"said-{rank}.json").read_text()) for rank in range(3)]
    assert said[0] == said[1] == said[2]  # all ranks stop, with the same words
    assert said[0]["gathers"] == [True] * 4 and said[0]["max"] == ["2.0", "inf"]
    well, policy, reward, frozen = said[0]["audits"]
    assert well is None
    assert re.match("iteration 1: the ranks have drifted apart: policy, parameter 1.weight, differs on rank 1 ", policy)
    assert "reward_model, parameter 1.weight, differs on rank 2 " in reward
    assert frozen.startswith("iteration 3: the frozen reward_model has changed: parameter 1.weight")

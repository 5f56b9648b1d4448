"""
parallel.py: what ranks exchange, whose parameter is odd, and what happens if one of them errs.
(That any number of ranks computes the same: test_by_hand.py.)
"""
import itertools
import json
import re
import signal

import errors
import pytest
import torch

from parallel import checksum, clip_gradients
from tiny import at, keys_of, run, write

WORKER = """
import json
import torch
import parallel
import ranks
from errors import BadInput, Stop
from tiny import keys_of_system

ranks.init(keys_of_system(device_type="cpu", timeout=30))
rank, size = parallel.rank_and_size()
said, failed = [], []
for n in (7, 3, 2, 1):  # more rows than ranks, as many, fewer
    rows = dict(mask=torch.arange(3 * n).view(n, 3) % 2 == 0,
                ids=torch.arange(2 * n).view(n, 2) * 2**40,
                half=(torch.arange(2 * n) / 3).bfloat16().view(n, 1, 2),
                odd=torch.tensor([-0.0, torch.nan, -torch.inf, 1e-45, 3e38, 0.1, 1.0])[:n])
    mine = parallel.share(n)
    got = parallel.gather_rows({k: x[mine.start:mine.stop] for k, x in rows.items()}, n)
    said.append(all(torch.equal(got[k].view(torch.uint8), x.view(torch.uint8))
                    for k, x in rows.items()))
said.append(parallel.all_reduce_metrics(dict(a=[rank, 1 + rank], b=[1.0, 0])))
most = parallel.all_reduce_max(torch.tensor([float(rank), torch.nan if rank == 2 else 0.0]))
said.append([str(x) for x in most.tolist()])
said.append(parallel.alone(lambda: ["of rank", rank]))
said.append(parallel.from_rank(f"rank {rank}", 2))
flat = torch.full((3,), float(rank))
parallel.all_reduce_gradients(dict(a=[flat]), 2.0)
said.append(flat.tolist())

def model(seed):
    layers, drawn = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 7)), \\
        torch.Generator().manual_seed(seed)
    for p in layers.parameters():
        p.data.normal_(generator=drawn)
    return layers

models, frozen = dict(policy=model(0), reward=model(9).requires_grad_(False)), {}
for name, owners, change in (
        ("policy", [], 0), ("policy", [1], "bit"), ("policy", [0], "bit"), ("reward", [2], "bit"),
        ("reward", [0, 1, 2], "bit"), ("policy", [0, 1, 2], torch.nan), ("reward", [2], torch.inf)):
    p = models[name][1].weight
    before = p.detach().clone()
    if rank in owners and change == "bit":
        p.data.view(torch.int32)[6, 2] ^= 1
    elif rank in owners:
        p.data[6, 2] = change
    try:
        failed.append(parallel.audit(models, frozen, 7))
    except Stop as e:
        failed.append(str(e))
    p.data.copy_(before)
for kinds in ({1: BadInput}, {2: Stop, 1: BadInput}, {0: OSError}):
    try:
        with parallel.in_step():
            if rank in kinds:
                raise kinds[rank](f"no such file {rank}")
    except (BadInput, Stop, OSError) as e:  # an error of its own a rank raises as it is
        failed.append(f"{type(e).__name__}: {e}")
json.dump([said, failed], open(f"said-{rank}.json", "w"))
ranks.leave()
"""


def test_what_three_ranks_exchange(tmp_path):
    """Bits of gathered rows, sums, the parameter that differs, the error of one rank on all."""
    result = run(write(tmp_path / "worker.py", WORKER), tmp_path, {}, ranks=3)
    assert result.codes == [0] * 3, result
    each = [json.load(open(tmp_path / f"said-{rank}.json")) for rank in range(3)]
    said, failed = zip(*each, strict=True)
    assert said[0] == said[1] == said[2] == [
        True, True, True, True, dict(a=0.5, b=3.0), ["2.0", "inf"], ["of rank", 0], "rank 2",
        [1.5, 1.5, 1.5]]
    # where all three have changed, a frozen model is still not what it was
    wanted = [None, "the ranks have drifted apart: policy, parameter 1.weight differs on rank 1 (",
              "policy, parameter 1.weight differs on rank 0 (",
              "reward, parameter 1.weight differs on rank 2 (",
              "the frozen reward, parameter 1.weight has changed on rank 0 and rank 1 and rank 2",
              "policy, parameter 1.weight is not finite on rank 0 and rank 1 and rank 2",
              "reward, parameter 1.weight differs on rank 2 (",
              "BadInput: on rank 1: no such file 1", "BadInput: on rank 1: no such file 1",
              "Stop: on rank 0: no such file 0"]
    own = failed[0].pop(), wanted.pop()
    assert own[0] == "OSError: no such file 0" and failed[1].pop() == failed[2].pop() == own[1]
    assert failed[0] == failed[1] == failed[2]
    for said_now, words in zip(failed[0], wanted, strict=True):
        assert said_now == words or words in said_now, (said_now, words)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_checksum_sees_every_bit_and_the_order(dtype):
    values = torch.randn(5, generator=torch.Generator().manual_seed(0)).to(dtype)
    words = {8: torch.int64, 4: torch.int32, 2: torch.int16}[values.element_size()]
    for place, bit in itertools.product(range(5), range(8 * values.element_size())):
        flipped = values.clone()
        flipped.view(words)[place] ^= torch.ones((), dtype=words) << bit
        assert int(checksum(flipped)) != int(checksum(values)), (place, bit)
    for a, b in itertools.combinations(range(5), 2):
        order = list(range(5))
        order[a], order[b] = b, a
        assert int(checksum(values[order])) != int(checksum(values))


def test_a_checksum_sees_the_order_across_its_chunks():
    """Large tensors are summed in parts: two words of different parts, or a part further."""
    values = torch.zeros(2**20 + 8)
    for place in (2**20, 2**20 + 1):  # word 1 is as far in its part as the second of these
        swapped = values.clone()
        swapped[1], swapped[place] = 2.0, 1.0
        values[1], values[place] = 1.0, 2.0
        assert int(checksum(values)) != int(checksum(swapped))
        values[1] = values[place] = 0


def test_a_killed_rank_is_one_line_that_names_the_phase(world, tmp_path):
    result = run("ppo.py", tmp_path, keys_of(world, "ppo.py"), ranks=2,
                 before=at(1, signal.SIGKILL, rank=1))
    assert result.codes == [1, -signal.SIGKILL], result
    assert re.fullmatch(r"ppo.py: error: iteration 1, [^\n]*lost touch with another rank[^\n]*\n",
                        result.err[0]), result.err


@pytest.mark.parametrize("said", [
    "CUDA out of memory. Tried to allocate 2 GiB", "[enforce fail] DefaultCPUAllocator: can't "
    "allocate memory", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)",
    "NCCL error: unhandled cuda error. Last error: Cuda failure 2 'out of memory'"])
def test_too_little_memory_is_said_whichever_library_asks(said):
    """And no other rank is suspected: nccl's words are those of a lost one, too."""
    said = torch.distributed.DistBackendError(said)
    assert re.match("out of memory.*lower micro_batch_size", str(errors.translated(said)))


def test_the_norm_of_a_million_gradients():
    """A CPU adds one square after the other: the norm of all at once would be wrong by 4e-4."""
    gradients = [torch.full((10**6,), 0.1)]
    assert clip_gradients(gradients, 50.0).item() == pytest.approx(100, rel=1e-5)
    assert torch.allclose(gradients[0], torch.tensor(0.05))

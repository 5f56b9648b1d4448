"""parallel.py on three ranks: whose parameter is odd, and whose error is said."""
import json

from tiny import run, write

WORKER = """
import json
import torch
import parallel, ranks
from errors import BadInput, Stop
from tiny import keys_of_system

ranks.init(keys_of_system(device_type="cpu", timeout=30))
rank, size = parallel.rank_and_size()

def model(seed):
    layers, drawn = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 7)), \\
        torch.Generator().manual_seed(seed)
    for p in layers.parameters():
        p.data.normal_(generator=drawn)
    return layers

models, frozen = dict(policy=model(0), reward=model(9).requires_grad_(False)), {}
said = []
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
        said.append(parallel.audit(models, frozen, 7))
    except Stop as e:
        said.append(str(e))
    p.data.copy_(before)
for kinds in ({1: BadInput}, {2: Stop, 1: BadInput}, {0: OSError}):
    try:
        with parallel.in_step():
            if rank in kinds:
                raise kinds[rank](f"no such file {rank}")
        said.append(None)
    except OSError as e:
        said.append("Stop: on rank 0: " + str(e) if rank == 0 else "not mine")
    except (BadInput, Stop) as e:
        said.append(f"{type(e).__name__}: {e}")
json.dump(said, open(f"said-{rank}.json", "w"))
ranks.leave()
"""


def test_three_ranks_say_the_same_of_the_one_that_differs(tmp_path):
    result = run(write(tmp_path / "worker.py", WORKER), tmp_path, {}, ranks=3)
    assert result.codes == [0] * 3, result
    said = [json.load(open(tmp_path / f"said-{rank}.json")) for rank in range(3)]
    # where all three have changed, a frozen model is still not what it was
    wanted = [None, "the ranks have drifted apart: policy, parameter 1.weight differs on rank 1 (",
              "policy, parameter 1.weight differs on rank 0 (",
              "reward, parameter 1.weight differs on rank 2 (",
              "the frozen reward, parameter 1.weight has changed on rank 0 and rank 1 and rank 2",
              "policy, parameter 1.weight is not finite on rank 0 and rank 1 and rank 2",
              "reward, parameter 1.weight differs on rank 2 (",
              "BadInput: on rank 1: no such file 1", "BadInput: on rank 1: no such file 1",
              "Stop: on rank 0: no such file 0"]
    assert said[0] == said[1] == said[2] and len(wanted) == len(said[0])
    for here, words in zip(said[0], wanted, strict=True):
        assert here == words or words in here, (here, words)

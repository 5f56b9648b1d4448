"""
Ranks on several machines: what a run needs of all of them.
"""
import os
import secrets
from pathlib import Path

import parallel
from errors import BadInput
from parallel import alone


def check_disk(out_dir):
    """
    A collective: raise BadInput, on all ranks, where one of them does not see what rank 0 writes in
    out_dir: it would load a checkpoint of its own, perhaps of an older run.
    """
    # a new name, because on another disk there may be an older run of the same name
    new = os.path.join(out_dir, f".new-{parallel.from_rank(secrets.token_hex(8))}")  # COLLECTIVE
    alone(Path(new).touch)  # COLLECTIVE
    blind = parallel.ranks_where(not os.path.exists(new))  # COLLECTIVE
    alone(Path(new).unlink)  # COLLECTIVE
    if blind:
        raise BadInput(f"on rank {blind[0]}: this rank does not see what rank 0 writes in out_dir "
                       f"{out_dir!r}; give a folder on a disk that all machines share")

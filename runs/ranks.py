"""
torchrun for the scripts of this folder.

    python runs/ranks.py 2         do two ranks meet, within ten seconds? exit code 0: yes
    python runs/ranks.py 2 ppo.py config/arithmetic_ppo.py
                                   torchrun --nproc_per_node=2 ppo.py config/arithmetic_ppo.py

What torchrun itself says at the end is left out: the exit code is the script's, and after Ctrl-C
the run's "saved before iteration N" is the last line. It waits for that as long as it takes; a
second Ctrl-C ends it at once.
"""
import logging
import multiprocessing
import os
import sys
import threading
import uuid

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import errors  # noqa: E402, F401  before torch: even then Ctrl-C gives one line
import torch.distributed as dist  # noqa: E402
from torch.distributed import run  # noqa: E402
from torch.distributed.elastic.multiprocessing.api import SignalException  # noqa: E402
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError  # noqa: E402
from torch.distributed.launcher.api import LaunchConfig, elastic_launch  # noqa: E402

SECONDS = 10  # where a machine's own name leads nowhere, ranks would wait for many minutes
PATIENCE = 3600  # seconds until a rank that saves is killed


def meet():
    """What a rank of the trial does."""
    dist.init_process_group("gloo")
    dist.barrier()
    dist.destroy_process_group()


def late():
    for rank in multiprocessing.active_children():
        rank.kill()
    os._exit(1)


def main(number, *command):
    logging.disable(logging.ERROR)  # what elastic says of signals and of ranks that have ended
    if not command:
        clock = threading.Timer(SECONDS, late)  # a thread: no signal is heard while C++ waits
        clock.daemon = True
        clock.start()
        # forks, which have imported torch already
        config = LaunchConfig(1, 1, int(number), run_id=uuid.uuid4().hex, rdzv_backend="c10d",
                              rdzv_endpoint="localhost:0", start_method="fork", max_restarts=0)
        elastic_launch(config, meet)()
        return 0
    try:
        args = run.parse_args([f"--nproc_per_node={number}", *command])
        args.shutdown_timeout = PATIENCE  # torch 2.11 does not read it, and gives 30 seconds
        run.run(args)
    except ChildFailedError as e:  # it has said why, in its own line
        return max(1, e.get_first_failure()[1].exitcode)
    except SignalException as e:
        return 128 + e.sigval
    return 0


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)

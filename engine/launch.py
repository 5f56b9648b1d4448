"""
How ranks start and leave: join the group, take signals as requests to stop, end together.
"""
import atexit
import ctypes
import datetime
import os
import re
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist

import errors
import parallel
from engine import together
from errors import BadConfig, BadInput, Lost
from parallel import all_reduce_max, collective, lost, wire

signalled_at = None  # when SIGTERM or SIGINT came, by time.monotonic


def init(device, timeout, deterministic=False):
    """
    Join the other ranks, if torchrun started some: nccl on GPUs, gloo on CPUs. device: auto | cpu | cuda; timeout: seconds
    after which a collective that waits for a lost rank is an error; deterministic: on GPUs, only kernels that give the same
    bits every time. From here on SIGTERM and SIGINT are requests, see stop_asked. Returns rank, world_size, torch.device.
    """
    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: when torchrun alone dies, do not live on without it
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if device == "cuda" and not torch.cuda.is_available():
        raise BadConfig("device_type = 'cuda', but torch sees no GPU here; type --device_type=cpu")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", local_rank + 1))
        if local_ranks > torch.cuda.device_count():  # known to every rank of this machine, so none waits for another
            raise BadInput(f"this machine has {torch.cuda.device_count()} GPUs for {local_ranks} ranks; lower --nproc_per_node")
        torch.cuda.set_device(local_rank)
        device = f"cuda:{local_rank}"
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # warn_only: the sampler's cumsum is on torch's list of offenders, though along rows of a matrix it is exact
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cuda.enable_mem_efficient_sdp(False)  # its backward adds up in any order
    if world_size > 1:
        together.usual_wait = wait = datetime.timedelta(seconds=timeout)
        group = dict(backend="nccl" if device.startswith("cuda") else "gloo", timeout=wait)
        # gloo would try for five times as long (torch 2.13), and nccl's first collective for ever
        alarm = threading.Timer(timeout, give_up, [f"no answer in {timeout} s"])
        alarm.daemon = True
        alarm.start()
        try:
            if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
                group |= dict(store=collective(meet, rank, world_size, wait), rank=rank, world_size=world_size)
            collective(dist.init_process_group, **group)
            hello = torch.ones(1, device=wire())
            collective(dist.all_reduce, hello)  # nccl makes its connections only now
            parallel.met = bool(hello.item())
        except ValueError as e:
            raise BadInput(f"WORLD_SIZE is {world_size}, but the ranks cannot meet ({e}); start them with torchrun") from e
        finally:
            alarm.cancel()
        together.starting = True
        errors.tell_others, errors.torn = together.tell_others, torn
    return rank, world_size, torch.device(device)


def meet(rank, world_size, wait):
    """
    A store that is this attempt's alone. torchrun restarts workers on the store of those before, with their addresses still
    in it, and gloo would call the dead (torch 2.13). So rank 0 draws a name, and goes on when every other rank has answered
    to it; the others, when their answer has been seen, for the name that they read first may be an old one.
    """
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=wait)
    mine, began = os.urandom(8).hex(), time.monotonic()
    if rank == 0:
        store.set("name", mine)
        for r in range(1, world_size):
            store.set(f"{mine}/{r}/{store.get(f'{mine}/{r}').decode()}", "seen")
        return dist.PrefixStore(mine, store)
    while True:
        name = store.get("name").decode()
        store.set(f"{name}/{rank}", mine)
        try:
            store.wait([f"{name}/{rank}/{mine}"], datetime.timedelta(seconds=0.3))
            return dist.PrefixStore(name, store)
        except RuntimeError:  # not seen yet: ask for the name again
            if time.monotonic() - began > wait.total_seconds():
                raise


def give_up(reason):
    """End this process, one that waits in C++ for ranks that it cannot meet. Called from a thread."""
    errors.report_and_exit(Lost, lost(reason), None)


def finish():
    """Leave the group together. The run is over: nothing after this may fail it."""
    if dist.is_initialized():
        collective(dist.barrier)
        dist.destroy_process_group()
        if not dist.is_initialized():
            atexit.register(end)


def end():
    """End the process here: with several ranks, torch's threads abort one in fifty interpreters that take themselves apart."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def torn(error):
    """The Lost behind an error of a collective that is not ours: sharded models have their own, within forward and backward."""
    if dist.is_initialized() and re.search("gloo|nccl|connection (closed|reset)|timed out|broken pipe", str(error), re.I):
        return lost(error)
    return None


def on_signal(number, frame):
    """SIGTERM or SIGINT: remember it. A second one, not from the same key press, ends the process at once."""
    global signalled_at
    now = time.monotonic()
    if signalled_at is not None and now - signalled_at > 1:
        os._exit(128 + number)
    if signalled_at is None:
        signalled_at = now
        if os.environ.get("RANK", "0") == "0":  # os.write: print is not safe in a handler
            waits = "; torchrun waits 30 s for that, or its --shutdown-timeout" * ("TORCHELASTIC_RUN_ID" in os.environ)
            line = (f"{signal.Signals(number).name}: stopping at the next safe point (now: {parallel.phase}){waits}; send it "
                    "again to stop at once\n")
            os.write(2, line.encode())


def stop_asked():
    """Whether this rank has been asked to stop; cheap, for loops that can be left early."""
    return signalled_at is not None


def stop_agreed():
    """Whether any rank has been asked to stop, the same answer on all: only together can ranks leave."""
    if not dist.is_initialized():
        return stop_asked()
    return bool(all_reduce_max(torch.tensor(float(stop_asked()), device=wire())))

"""
How ranks start and leave: join the group, take signals as requests to stop, end together. init and
join are the usual start of torch.distributed; the functions at the end of the file are for trouble.
"""
import atexit
import contextlib
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
import together
from errors import BadConfig, BadInput, Lost
from parallel import collective, lost, reason, wire

signalled_at = None  # when SIGTERM or SIGINT came, by time.monotonic


# --------------------------------------------------------------------------------------------------
# start


def init(device, timeout, deterministic=False, layout=""):
    """
    A collective: join the other ranks, if torchrun started some: nccl on GPUs, gloo on CPUs.
    device: auto | cpu | cuda. timeout: seconds after which a collective that waits for a lost rank
    is an error. deterministic: on GPUs, only kernels that give the same bits every time. layout:
    the key roles, how many ranks train, generate and score. From here on SIGTERM and SIGINT are
    requests, see parallel.stop_asked. Returns this rank's torch.device. Raises BadConfig or
    BadInput if there is no GPU for this rank or no such roles, Lost if the ranks cannot meet.
    """
    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_torchrun()
    rank = int(os.environ.get("RANK", 0))  # torchrun sets these variables
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    ranks = {}
    if layout:
        from options.messages import begin, parse_roles

        ranks = parse_roles(layout, world_size)
    choose_kernels(deterministic)  # before CUDA starts: cuBLAS reads its variable only then
    device = torch.device(choose_device(device))
    if rank == 0 and device.type == "cuda":
        from gpu import gpu

        print(", ".join(f"{what} {value}" for what, value in gpu().items()), flush=True)
    if world_size > 1:
        join(rank, world_size, device, timeout, bound=not ranks)
    if ranks:
        with meeting(timeout):
            errors.leads = begin(ranks, rank, timeout)  # COLLECTIVE
    return device


def choose_device(device):
    """auto | cpu | cuda -> "cpu", or "cuda:N", which becomes this process's GPU."""
    if device == "cuda" and not torch.cuda.is_available():
        raise BadConfig("device_type = 'cuda', but torch sees no GPU here; type --device_type=cpu")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        return device
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", local_rank + 1))
    if local_ranks > torch.cuda.device_count():  # on every rank of this machine
        raise BadInput(f"this machine has {torch.cuda.device_count()} GPUs for {local_ranks} "
                       "ranks; lower --nproc_per_node")
    torch.cuda.set_device(local_rank)
    return f"cuda:{local_rank}"


def choose_kernels(deterministic):
    """
    All settings of the kernels that a GPU may use; gpu.py says what they are. Only the key
    `deterministic` changes them: only kernels that repeat bit for bit.
    """
    # float32 means float32. TF32 has 10 bits behind the point: the log-probs of sampler and
    # training would differ by more than loss.gap_limit. Some containers turn it on by a variable.
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    # products of 16 bits are summed in 32 bits: their last bits then depend less on the shapes
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    # Attention by flash, memory-efficient and plain kernels. cuDNN may use another kernel for a
    # forward with gradients than for one without: the ratio of the first step would not be 1.
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cudnn.benchmark = False
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # Not warn_only: with it the backward of flash attention still sums in any order. An
        # operation without an exact kernel is an error; tests/test_device.py shows that none is
        # used.
        torch.use_deterministic_algorithms(True)
        # torch would also fill each new tensor with NaN, which takes time
        torch.utils.deterministic.fill_uninitialized_memory = False


def join(rank, world_size, device, timeout, bound=True):
    """
    A collective: make the group of all ranks. Raises Lost, or BadInput for a bad WORLD_SIZE. bound:
    nccl gets its GPU now. torch then splits each later group from this one, and all ranks must take
    part; with roles only some ranks make some of the groups.
    """
    wait = datetime.timedelta(seconds=timeout)
    try:
        with meeting(timeout):
            where = dict(backend="gloo")
            if device.type == "cuda":  # of several GPUs, the one of this rank
                where = dict(backend="nccl") | (dict(device_id=device) if bound else {})
            if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
                store = meet(rank, world_size, wait)
                where |= dict(store=store, rank=rank, world_size=world_size)
            # without a store it uses MASTER_ADDR
            dist.init_process_group(timeout=wait, **where)
            hello = torch.ones(1, device=wire())
            dist.all_reduce(hello)  # nccl makes its connections only now
            hello.item()  # and this waits for them
    except ValueError as e:
        raise BadInput(f"WORLD_SIZE is {world_size}, but the ranks cannot meet ({e}); start them "
                       "with torchrun") from e
    together.usual_wait, errors.torn = wait, torn


# --------------------------------------------------------------------------------------------------
# stop


def on_signal(number, frame):
    """
    SIGTERM or SIGINT: remember it; a run stops where it can (parallel.stop_agreed). A second signal
    ends the process at once, unless it comes from the same key press (within a second).
    """
    global signalled_at
    if signalled_at is not None:
        if time.monotonic() - signalled_at > 1:
            os._exit(128 + number)
        return
    signalled_at = time.monotonic()
    parallel.stop = True
    if os.environ.get("RANK", "0") == "0":
        line = (f"{signal.Signals(number).name}: stopping at the next safe point (now: "
                f"{parallel.phase}); send it again to stop at once")
        if "TORCHELASTIC_RUN_ID" in os.environ:
            line += ". torchrun waits 30 s for that, or its --shutdown-timeout"
        os.write(2, f"{line}\n".encode())  # print is not safe in a signal handler


def finish():
    """A collective: leave the group together. The run is over: no later error may fail it."""
    if parallel.role == "train":  # let the other roles leave, too
        from options.messages import tell_the_end

        tell_the_end()
    if dist.is_initialized():
        gpus = [torch.cuda.current_device()] if wire().type == "cuda" else None
        with parallel.everyone():
            collective(dist.barrier, device_ids=gpus)
        dist.destroy_process_group()
        if not dist.is_initialized():
            atexit.register(end)


def end():
    """End the process here: without _exit, about 1 exit in 50 aborts in one of torch's threads."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


# --------------------------------------------------------------------------------------------------
# trouble in which torchrun and torch do not help


def die_with_torchrun():
    """If only torchrun is killed, kill this process, too; else it would go on alone."""
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1  # of prctl: the signal that this process gets when its parent dies
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def meet(rank, world_size, wait):
    """
    A store for this attempt only. torchrun restarts the ranks on the store of the attempt before.
    It still has the addresses of dead processes, and gloo would call them (torch 2.13). So rank 0
    draws a new name, under which the store is empty:

        rank 0: name = mine;  waits for the answers NAME/1, NAME/2, ... and marks each one as seen
        others: read name; answer under it; wait until the answer is seen. If it is not, the name
                is of an earlier attempt: read again
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, timeout=wait)
    mine, began = os.urandom(8).hex(), time.monotonic()
    if rank == 0:
        store.set("name", mine)
        for r in range(1, world_size):
            answer = store.get(f"{mine}/{r}").decode()  # waits for it
            store.set(f"{mine}/{r}/{answer}", "seen")
        return dist.PrefixStore(mine, store)
    while True:
        name = store.get("name").decode()
        store.set(f"{name}/{rank}", mine)
        try:
            store.wait([f"{name}/{rank}/{mine}"], datetime.timedelta(seconds=0.3))
            return dist.PrefixStore(name, store)
        except RuntimeError:  # not seen yet
            if time.monotonic() - began > wait.total_seconds():
                raise


@contextlib.contextmanager
def meeting(timeout):
    """
    A block in which groups of ranks are made. Raises Lost where that fails, and ends this process
    where it takes longer than `timeout` seconds: gloo would try five times as long (torch 2.13),
    and nccl's first collective would wait for ever.
    """
    def cannot_meet(error):
        return Lost(f"start: the ranks cannot meet, MASTER_ADDR is {os.environ.get('MASTER_ADDR')} "
                    f"({reason(error)}): one has ended, or a host cannot be reached. Between "
                    "hosts, name each one's network: GLOO_SOCKET_IFNAME=eth0, or on GPUs "
                    "NCCL_SOCKET_IFNAME=eth0 (`ip addr` lists them)")

    def give_up():  # in a thread: this process waits in C++
        errors.report_and_exit(Lost, cannot_meet(f"no answer in {timeout} s"), None)

    alarm = threading.Timer(timeout, give_up)
    alarm.daemon = True
    alarm.start()
    try:
        yield
    except Lost:  # of a collective: it has its message already
        raise
    except RuntimeError as e:
        raise cannot_meet(e) from e
    finally:
        alarm.cancel()


def torn(error):
    """
    The Lost for an error that did not come through parallel.collective; None if a lost rank is not
    the cause. Sharded models have collectives of their own, inside forward and backward.
    """
    words = "gloo|nccl|connection (closed|reset)|timed out|broken pipe"
    if dist.is_initialized() and re.search(words, str(error), re.I):
        return lost(error, parallel.others)
    return None

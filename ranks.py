"""
The start and the end of a rank: it meets the others, chooses its device and its kernels, hears
requests to stop, and leaves. The collectives in between are in parallel.py.
"""
import atexit
import contextlib
import ctypes
import dataclasses
import datetime
import os
import signal
import sys
import threading

import torch
import torch.distributed as dist

import errors
from errors import BadInput, Lost

REQUESTS = signal.SIGTERM, signal.SIGINT, signal.SIGHUP  # of a scheduler, Ctrl-C, a closed terminal


@dataclasses.dataclass
class Rank:
    """What this process is among the others. Only this file writes it; all others read it."""

    role: str = "train"  # what it is for: train, generate or score; see options/roles.py
    does: tuple[str, ...] = ("sample", "score")  # its part of a rollout
    group: dist.ProcessGroup | None = None  # the ranks of its role; None: all
    wait: datetime.timedelta | None = None  # how long a collective waits: the key timeout
    stop: bool = False  # it has been asked to stop


this_rank = Rank()  # as it is without other ranks, and before init


def init(system):
    """
    A collective: join the other ranks, if torchrun has started some, by nccl on GPUs and by gloo on
    CPUs. this_rank says what this rank is; on_signal hears REQUESTS. Returns a torch.device.
    """
    on_requests(on_signal)
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        # if only torchrun is killed, this process must end, too; else it would go on alone
        PR_SET_PDEATHSIG = 1  # of prctl: the signal that this process gets when its parent dies
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != errors.PARENT:  # it died before that call, while torch was imported
            raise Lost("torchrun has ended before this rank began; type the same command again")
    choose_kernels(system.deterministic)
    device = choose_device(system.device_type)
    if system.report_to:  # checked before models are loaded and a folder is made
        from options.trackers import names_in

        names_in(system.report_to)
    this_rank.wait = datetime.timedelta(seconds=system.timeout)
    # a rule that hangs must end before the ranks that wait for it do
    system.reward_timeout = min(system.reward_timeout, system.timeout / 2)
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:  # torchrun sets it
        late = Lost(f"the ranks cannot meet: no answer in timeout = {system.timeout} s. Are all of "
                    "them started, and do the machines reach each other?")
        # in a thread, because this one waits in C++
        alarm = threading.Timer(system.timeout, errors.report_error, (Lost, late, None))
        alarm.daemon = True
        alarm.start()
        gpu = device.type == "cuda"
        dist.init_process_group(
            backend="nccl" if gpu else "gloo", timeout=this_rank.wait,
            # with device_id torch splits later groups, those of roles, off this one, by all ranks
            device_id=device if gpu and not system.roles else None)
        # nccl makes its connections only now; it would guess the GPU by the rank
        dist.barrier(device_ids=[device.index] if gpu else None)
        alarm.cancel()
    if system.roles:  # some of the ranks only generate, or score
        from options.roles import begin

        this_rank.role, this_rank.does, this_rank.group = begin(system)  # COLLECTIVE
    if system.generate_tp > 1:  # some of the ranks sample together
        from options.tensor_parallel import check_ranks

        check_ranks(system)
    return device


def choose_device(device):
    """auto | cpu | cuda -> a torch.device; a GPU becomes this process's."""
    if device == "cuda" and not torch.cuda.is_available():
        raise BadInput("device_type = 'cuda', but torch sees no GPU here; type --device_type=cpu")
    if device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK") or 0)
    if local_rank >= torch.cuda.device_count():
        raise BadInput(f"this machine has {torch.cuda.device_count()} GPUs, and no GPU for rank "
                       f"{local_rank}; lower --nproc_per_node")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def choose_kernels(deterministic):
    """All settings of the kernels that a GPU may use. Only the key `deterministic` changes them."""
    # float32 means float32, and not TF32 with its 10 bits after the point
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    # products of 16 bits are summed in 32 bits: their last bits then depend less on the shapes
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    # cuDNN may use another kernel of attention with gradients: the first ratio would not be 1
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cudnn.benchmark = False
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
        # not warn_only: with it the backward of flash attention still sums in any order
        torch.use_deterministic_algorithms(True)
        # torch would also fill each new tensor with NaN, which takes time
        torch.utils.deterministic.fill_uninitialized_memory = False


def on_requests(handler):
    """From here on this handler hears REQUESTS; but under nohup a SIGHUP is ignored as before."""
    for number in REQUESTS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


def on_signal(number, frame):
    """One of REQUESTS: the run stops where it can (stop_agreed); a second one ends it at once."""
    # when a terminal is closed, shell and kernel both send a SIGHUP
    if this_rank.stop and number != signal.SIGHUP:
        os._exit(128 + number)
    first, this_rank.stop = not this_rank.stop, True
    if first and os.environ.get("RANK") in (None, "", "0"):
        line = (f"{signal.Signals(number).name}: stopping at the next safe point (now: "
                f"{errors.phase}); a second one ends it now, and all since the last checkpoint is "
                "lost\n")
        with contextlib.suppress(OSError):  # a closed terminal, or pipe
            os.write(2, line.encode())  # print is not safe in a signal handler


def leave():
    """A collective: leave the group together. The run is over: no later error may fail it."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
        # without _exit, about 1 exit in 50 aborts in one of torch's threads
        atexit.register(lambda: (sys.stdout.flush(), sys.stderr.flush(), os._exit(0)))

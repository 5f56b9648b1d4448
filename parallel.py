"""
Raw torch.distributed: who am I, make all alike, add up, check that all still are, and leave together. One process needs none
of it, and every function here then returns at once, so that the scripts have no branch.
"""
import atexit
import contextlib
import ctypes
import datetime
import hashlib
import json
import math
import os
import re
import resource
import signal
import socket
import sys
import threading
import time

import torch
import torch.distributed as dist

import configurator
from configurator import BadConfig, BadInput, Lost, Stop

phase = "start"  # what the script is at, kept by the script: the line that reports a lost rank names it
PATIENCE = 6 * 3600  # seconds that the ranks wait for rank 0 while it works alone at the disk
usual_wait = None  # how long a collective waits otherwise; from init on
met = False  # whether the ranks have once talked to each other
starting = False  # from init to agree: a rank that fails lets the others know
signalled_at = None  # when SIGTERM or SIGINT came, by time.monotonic


def init(device, timeout, deterministic=False):
    """
    Join the other ranks, if torchrun started some: nccl on GPUs, gloo on CPUs. device: auto | cpu | cuda; timeout: seconds
    after which a collective that waits for a lost rank is an error; deterministic: on GPUs, only kernels that give the same
    bits every time. From here on SIGTERM and SIGINT are requests, see stop_asked. Returns rank, world_size, torch.device.
    """
    global starting, met, usual_wait
    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: when torchrun alone dies, do not live on without it
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if device == "cuda" and not torch.cuda.is_available():
        raise BadConfig("device = 'cuda', but torch sees no GPU here; type --device=cpu")
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
        usual_wait = wait = datetime.timedelta(seconds=timeout)
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
            met = bool(hello.item())
        except ValueError as e:
            raise BadInput(f"WORLD_SIZE is {world_size}, but the ranks cannot meet ({e}); start them with torchrun") from e
        finally:
            alarm.cancel()
        starting, configurator.tell_others, configurator.torn = True, tell_others, torn
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
    configurator.report_and_exit(Lost, lost(reason), None)


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


def rank_and_size():
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def collective(operation, *args, **kwargs):
    """
    Every collective goes through here. One that fails, because another rank was killed (at once) or hangs (after `timeout`
    seconds), raises Lost: one line on each rank that is left, and the phase in it.
    """
    try:
        return operation(*args, **kwargs)
    except RuntimeError as e:  # as gloo's, nccl's and the store's errors all are
        raise lost(e) from e


def lost(error):
    """What is said of a collective that failed with this error."""
    reason = str(error).strip().splitlines()[0].rpartition("] ")[2].strip() or type(error).__name__
    if phase != "start":
        return Lost(f"{phase}: lost touch with the other ranks: one was killed, or hangs ({reason}). The last "
                    "checkpoint is good; resume with the same command")
    if met:
        return Lost(f"start: lost touch with the other ranks: one could not start, was killed, or hangs ({reason}). "
                    "Look at what it said, and type the same command again")
    name, address = socket.gethostname(), ""
    with contextlib.suppress(OSError):
        address = socket.gethostbyname(name) if "GLOO_SOCKET_IFNAME" not in os.environ else ""
    here = f"This host's name, {name}, stands for {address}, where no other host finds it. " if address.startswith("127.") else ""
    return Lost(f"start: the ranks cannot meet, MASTER_ADDR is {os.environ.get('MASTER_ADDR')} ({reason}): one has ended, or a "
                f"host cannot be reached. {here}Between hosts, name each one's network: GLOO_SOCKET_IFNAME=eth0, or on GPUs "
                "NCCL_SOCKET_IFNAME=eth0 (`ip addr` lists them)")


def torn(error):
    """The Lost behind an error of a collective that is not ours: sharded models have their own, within forward and backward."""
    if dist.is_initialized() and re.search("gloo|nccl|connection (closed|reset)|timed out|broken pipe", str(error), re.I):
        return lost(error)
    return None


def wire():
    """The device whose tensors the group can send; the CPU where there is no group."""
    return torch.device("cuda" if dist.is_initialized() and dist.get_backend() == "nccl" else "cpu")


# ---------------------------------------------------------------------------------------------------------------------
# starting together, stopping together


def from_rank_0(function, source=0):
    """
    What function() returns on rank 0 (or on another source), on every rank; the others wait. It may be anything that JSON can
    say (no pickle here either). A BadInput or Stop that it raises there is raised everywhere.
    """
    if not dist.is_initialized():
        return function()
    rank, text = dist.get_rank(), b""
    if rank == source:
        try:
            outcome = ["value", function()]
        except (BadInput, Stop) as e:
            outcome = ["BadInput" if isinstance(e, BadInput) else "Stop", str(e)]
        text = json.dumps(outcome).encode()
    length = torch.tensor([len(text)], device=wire())
    collective(dist.broadcast, length, src=source)
    sent = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(wire()) if rank == source else torch.empty(
        int(length), dtype=torch.uint8, device=wire())
    collective(dist.broadcast, sent, src=source)
    kind, value = json.loads(bytes(sent.tolist()))
    if kind == "value":
        return value
    raise BadConfig(value) if kind == "BadInput" else Stop(value)


def alone(function):
    """
    from_rank_0 for work at the disk, which may take longer than `timeout`: an 8B run hashes, writes and syncs 190 GB at a time.
    A rank 0 that dies is noticed at once all the same, for its connections break.
    """
    if not dist.is_initialized():
        return function()
    dist.group.WORLD.set_timeout(max(usual_wait, datetime.timedelta(seconds=PATIENCE)))
    try:
        return from_rank_0(function)
    finally:
        dist.group.WORLD.set_timeout(usual_wait)


def together(function):
    """
    What function() returns on this rank; every rank calls it, on its own share. A BadInput or Stop of any rank is raised on
    all, so that nobody waits for one that has left.
    """
    if not dist.is_initialized():
        return function()
    error, value = None, None
    try:
        value = function()
    except (BadInput, Stop) as e:
        error = e
    failed = ranks_where(error is not None)
    if not failed:
        return value
    text = torch.zeros(1000, dtype=torch.uint8, device=wire())  # the first one's message
    if dist.get_rank() == failed[0]:
        said = list(str(error).encode()[:1000])
        text[:len(said)] = torch.tensor(said, dtype=torch.uint8, device=wire())
    collective(dist.broadcast, text, src=failed[0])
    message = bytes(text.tolist()).rstrip(b"\0").decode(errors="replace")
    raise Stop(message if failed[0] == 0 else f"on rank {failed[0]}: {message}") from error


def ranks_where(flag):
    """The ranks on which flag is true; the same list on all."""
    return torch.cat(all_gather(torch.tensor([flag], device=wire()).long())).nonzero().flatten().tolist()


def digest(text):
    """64 bits of a text's hash, as an int64; never 0."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True) or 1


def own_code():
    """
    {what: its hash or version} of the code that runs here: this project's files, the script itself among them, and torch.
    Gradients are summed over ranks, so no audit could see that one of them computes another loss.
    """
    folder = os.path.dirname(os.path.abspath(__file__)) + os.sep
    loaded = {getattr(module, "__file__", None) or "" for module in list(sys.modules.values())}
    code = {"the version of torch": torch.__version__}
    for path in sorted(path for path in loaded if path.startswith(folder) and "site-packages" not in path):
        with open(path, "rb") as f:
            code[f"the code of {path.removeprefix(folder)}"] = hashlib.sha256(f.read()).hexdigest()
    return code


def agree(settings):
    """
    The end of every rank's set-up, at which all find out whether all are ready and start from the same: settings is
    {what: its value or hash}, from the configuration to the models' checksums; the code itself is added here. Raises
    BadConfig, on all ranks, when some rank could not come this far, or has other settings than rank 0.
    """
    global starting
    if not dist.is_initialized():
        return
    texts = {what: json.dumps(value) for what, value in (own_code() | settings).items()}
    mine = torch.tensor([0, digest(json.dumps(texts)), digest(json.dumps(list(texts)))], device=wire())
    everyones = torch.stack(all_gather(mine))  # (ranks, 3)
    starting = False
    failed = everyones[:, 0].nonzero().flatten().tolist()
    if failed:
        raise BadConfig(f"{name_ranks(failed)} could not start, for the reason that it gave")
    if (everyones[:, 1] == everyones[0, 1]).all():
        return
    others = (everyones[:, 2] != everyones[0, 2]).nonzero().flatten().tolist()
    if others:
        raise BadConfig(f"{name_ranks(others)} runs another version of this script than rank 0; copy rank 0's there")
    details = torch.stack(all_gather(torch.tensor([digest(text) for text in texts.values()], device=wire())))
    differs = details != details[0]  # (ranks, settings)
    first = int(differs.any(0).nonzero()[0])
    others = differs[:, first].nonzero().flatten().tolist()
    raise BadConfig(f"{name_ranks(others)} differs from rank 0 in {list(texts)[first]}; give all ranks the same files and "
                    "settings")


def name_ranks(numbers):
    return " and ".join(f"rank {r}" for r in numbers)


def tell_others(message):
    """
    Called as this rank leaves with a BadInput: if the others may be waiting in agree, answer there. Returns whether rank 0
    leaves with the very same message, so that once is enough.
    """
    global starting
    if not starting:
        return None
    starting = False
    everyones = all_gather(torch.tensor([digest(message), 0, 0], device=wire()))
    return bool(everyones[0][0] == digest(message))


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
            line = (f"{signal.Signals(number).name}: stopping at the next safe point (now: {phase}){waits}; send it "
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


def my_share(items):
    """This rank's contiguous part of a sequence that all ranks hold; parts differ by one at most and may be empty."""
    rank, size = rank_and_size()
    return items[rank * len(items) // size:(rank + 1) * len(items) // size]


def most_micro_batches(rows, size):
    """How many micro-batches of this size the rank with most of so many rows has; known to all ranks."""
    return math.ceil(math.ceil(rows / rank_and_size()[1]) / size)


def send_tensors(source, tensors):
    """{key: tensor} of this source rank, on every rank."""
    if not dist.is_initialized():
        return tensors
    header = from_rank_0(lambda: [[k, list(t.shape), str(t.dtype).removeprefix("torch.")] for k, t in tensors.items()], source)
    sent = {}
    for key, shape, dtype in header:
        mine = tensors[key].detach().to(wire()).contiguous() if dist.get_rank() == source else None
        sent[key] = torch.empty(shape, dtype=getattr(torch, dtype), device=wire()) if mine is None else mine
        collective(dist.broadcast, sent[key], src=source)
    return sent


def my_part(p):
    """The part of a parameter that this rank holds: all of it, or its shard (zero.py)."""
    return p.to_local() if is_shard(p) else p


def is_shard(p):
    """Whether a parameter is split over the ranks: a DTensor."""
    return hasattr(p, "placements")


def broadcast_parameters(models):
    """Overwrite every rank's parameters with rank 0's, so that all start from the same bytes. Shards have nothing in common."""
    if dist.is_initialized():
        for model in models:
            for p in (p for p in model.parameters() if not is_shard(p)):
                sent = p.data.to(wire())  # itself, unless it is offloaded
                collective(dist.broadcast, sent, src=0)
                p.data.copy_(sent)


def gather_rows(batch):
    """
    A dict of tensors (b, ...), b of this rank's my_share -> the same dict with the rows of all ranks, in order, on every rank.
    The ranks' row counts may differ, and be 0.
    """
    if not dist.is_initialized():
        return batch
    device = next(iter(batch.values())).device
    counts = all_gather(torch.tensor([len(next(iter(batch.values())))], device=device))
    most = int(torch.cat(counts).max())
    gathered = {}
    for name, t in batch.items():
        padded = t.new_zeros(most, *t.shape[1:])
        padded[:len(t)] = t
        parts = all_gather(padded.to(torch.uint8) if t.dtype == torch.bool else padded)
        gathered[name] = torch.cat([part[:int(n)] for part, n in zip(parts, counts, strict=True)]).to(t.dtype)
    return gathered


def add_up(tensors):
    """{name: tensor}, all of one shape and dtype, summed over the ranks, in one all_reduce."""
    if not dist.is_initialized():
        return tensors
    total = torch.stack(list(tensors.values()))
    collective(dist.all_reduce, total)
    return dict(zip(tensors, total, strict=True))


def all_gather(t):
    """[rank 0's t, rank 1's t, ...], for tensors of one shape."""
    if not dist.is_initialized():
        return [t]
    parts = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    collective(dist.all_gather, parts, t.contiguous())
    return parts


def all_reduce_max(t):
    """The largest over all ranks, elementwise. NaN counts as larger than anything: it must not get lost."""
    if dist.is_initialized():
        t = torch.where(t.isnan(), torch.inf, t)
        collective(dist.all_reduce, t, op=dist.ReduceOp.MAX)
    return t


def all_reduce_metrics(metrics):
    """{name: [sum, count]}, the same names on all ranks -> {name: mean over everything}, in one all_reduce."""
    pairs = torch.stack([torch.stack([torch.as_tensor(x, dtype=torch.float64).cpu() for x in pair])
                         for pair in metrics.values()])  # (M, 2)
    if dist.is_initialized():
        pairs = pairs.to(wire())
        collective(dist.all_reduce, pairs)
    return {name: (total / max(count, 1)) for name, (total, count) in zip(metrics, pairs.tolist(), strict=True)}


def peak_memory_mib(device):
    """The most memory that this process has held: allocated by torch on a GPU, resident in all on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    if os.path.exists("/proc/self/status"):  # Linux: getrusage would count what our parent held when it started us
        with open("/proc/self/status", encoding="utf-8") as f:
            return next(int(line.split()[1]) / 1024 for line in f if line.startswith("VmHWM"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# ---------------------------------------------------------------------------------------------------------------------
# gradients


def flatten_gradients(parameters):
    """
    Make every p.grad a view of one flat buffer per dtype, and return the buffers: the all_reduce then needs no copy, and
    zeroing, clipping and checking gradients are one operation each. (Never call zero_grad afterwards; zero the buffers.)
    """
    buffers = []
    parameters = [p for p in parameters if p.requires_grad]
    shards, parameters = [p for p in parameters if is_shard(p)], [p for p in parameters if not is_shard(p)]
    for dtype in sorted({p.dtype for p in parameters}, key=str):
        group = [p for p in parameters if p.dtype == dtype]
        flat = torch.zeros(sum(p.numel() for p in group), dtype=dtype, device=group[0].device)
        start = 0
        for p in group:
            p.grad = flat[start:start + p.numel()].view_as(p)
            start += p.numel()
        buffers.append(flat)
    return buffers + ([Shards(shards)] if shards else [])


class Shards:
    """The gradients of sharded parameters, behind the face of one flat buffer. FSDP makes and reduces them by itself."""

    def __init__(self, parameters):
        self.parameters = parameters

    def parts(self):
        return [p.grad.to_local() for p in self.parameters if p.grad is not None]

    def zero_(self):
        for p in self.parameters:
            p.grad = None

    def mul_(self, factor):
        for part in self.parts():
            part.mul_(float(factor))  # a number, for parts may be on the CPU and a factor on the GPU

    def norm(self):
        """Over all ranks. A collective."""
        squares = torch.stack([part.norm().double() ** 2 for part in self.parts()]).sum().to(wire())
        collective(dist.all_reduce, squares)
        return squares.sqrt()


def all_reduce_gradients(buffers, scale=1.0):
    """
    Sum over ranks, one collective per dtype, and divide by the scale of the loss, if it has one. Not a mean: the losses are
    already divided by the global token count. (FSDP has reduced its shards already, and to a mean: make that a sum.)
    """
    for flat in buffers:
        if isinstance(flat, Shards):
            flat.mul_(dist.get_world_size() / scale)
            continue
        if dist.is_initialized():
            collective(dist.all_reduce, flat)
        if scale != 1.0:
            flat.mul_(1 / scale)


def clip_gradients(buffers, max_norm):
    """Scale the gradients to a joint norm of at most max_norm (0 = leave them); returns the norm before."""
    norms = [flat.norm() for flat in buffers]
    norm = norms[0] if len(norms) == 1 else torch.stack([n.double() for n in norms]).norm()
    if max_norm > 0:
        # a norm that is not finite scales nothing, so that check_gradients can still tell which tensor it came from
        scale = torch.where(norm.isfinite(), (max_norm / (norm + 1e-6)).clamp(max=1.0), 1.0)
        for flat in buffers:
            flat.mul_(scale)
    return norm


def check_gradients(norm, model, name, iteration):
    """
    Raise Stop, naming the first bad tensor, if a gradient is not finite. The gradients have been summed over ranks, so a NaN
    or inf of any rank is everybody's: all ranks stop here together, before the optimizer can spread it into the weights.
    """
    if not torch.isfinite(norm):
        names = [(n, p) for n, p in model.named_parameters() if p.grad is not None]
        flags = torch.stack([(~my_part(p.grad).isfinite()).any() for _, p in names]).double().to(wire())
        bad = all_reduce_max(flags).nonzero().flatten().tolist()  # of a sharded model, another rank may have it
        bad = names[bad[0]][0] if bad else "the norm (overflow)"
        raise Stop(f"iteration {iteration}: the gradient of {name}'s {bad} is not finite; stopped before the step. "
                   "Lower the learning rate, or look at the scores and the data of this iteration")


def check_finite(tensors, iteration):
    """Raise Stop, naming the tensor, if one of {name: tensor}, equal on all ranks, has a NaN or inf."""
    for name, t in tensors.items():
        if not t.isfinite().all():
            row = int((~t.isfinite()).flatten(1).any(1).nonzero()[0]) if t.dim() > 1 else int((~t.isfinite()).nonzero()[0])
            raise Stop(f"iteration {iteration}: {name} is not finite (first in response {row} of the batch); stopped before "
                       "the step")


def must_agree(worst_gap, limit, what, iteration, models):
    """
    Raise Stop, on all ranks, if before any update somebody's log-probs are not the policy's. Returns the gap (loss.gap; limit:
    loss.gap_limit). models: all of the run, {name: model}: a rank whose weights have drifted is named as such before anything
    else is suspected.
    """
    worst = all_reduce_max(worst_gap).item()
    if not worst <= limit:
        audit(models, {}, iteration)
        raise Stop(f"iteration {iteration}: before any update, the log-probs of {what} differ from the policy's by {worst:.2g} "
                   f"nats (limit {limit:g}); look for another temperature, mask, position ids, dropout or padded vocabulary")
    return worst


# ---------------------------------------------------------------------------------------------------------------------
# the audit


def checksums(models):
    """
    One int64 per parameter of {name: model}: sums of its bits, weighted by odd numbers so that order counts too. Of a sharded
    parameter this rank's part of the sum: over all ranks they add up to what the whole one would have.
    """
    sums = []
    for model in models.values():
        for p in model.parameters():
            part = my_part(p.detach()).flatten()
            bits = part.view(torch.int16 if p.element_size() == 2 else torch.int32)
            start = 0
            if is_shard(p):  # split by rows, as torch.chunk does it
                rows, (rank, size) = p.shape[0], rank_and_size()
                start = min(-(-rows // size) * rank, rows) * (p.numel() // rows) * (bits.numel() // max(part.numel(), 1))
            total = torch.zeros((), dtype=torch.int64, device=bits.device)
            for i, chunk in enumerate(bits.split(2**20)):  # int64 copies of a chunk, not of a whole embedding matrix
                weights = (torch.arange(len(chunk), device=bits.device) + (start + i * 2**20)) * 2 + 1
                total += (chunk.long() * weights).sum()  # wraps around, alike everywhere
            sums.append(total.to(wire()))
    return torch.stack(sums)


def audit(models, frozen, iteration):
    """
    Stop the run unless all ranks hold the same finite parameters of {name: model}, and the frozen ones still have the
    checksums they began with. frozen: {name: checksum}, filled here at the first audit. Of a sharded parameter each rank has
    another part, and vouches for that. One all_reduce when all is well.
    """
    mine = checksums(models)
    parameters = [(model_name, n, p) for model_name, model in models.items() for n, p in model.named_parameters()]
    whole = torch.tensor([not is_shard(p) for _, _, p in parameters], device=mine.device)
    infinite = torch.stack([(~my_part(p).isfinite()).any().to(mine.device) for _, _, p in parameters])
    changed = torch.zeros_like(infinite)
    for i, (model_name, n, p) in enumerate(parameters):
        changed[i] = not p.requires_grad and frozen.setdefault((model_name, n), int(mine[i])) != int(mine[i])

    def where(flags, i):
        """Which ranks raise flag i, for a message; a whole parameter has no need to say."""
        ranks = torch.stack(all_gather(flags[i].long())).nonzero().flatten().tolist()
        return " (on all ranks)" if whole[i] or len(ranks) == rank_and_size()[1] else f" (on {name_ranks(ranks)})"

    if dist.is_initialized():
        compared = torch.where(whole, mine & (2**62 - 1), 0)  # 62 bits, so that its negative exists
        extremes = torch.stack([compared, -compared, infinite.long(), changed.long()])
        collective(dist.all_reduce, extremes, op=dist.ReduceOp.MAX)
        differs = extremes[0] != -extremes[1]  # largest != smallest
        if differs.any():
            first = int(differs.nonzero()[0])
            values = torch.stack(all_gather(mine[first])).tolist()
            common = max(values, key=values.count)
            odd = [r for r, v in enumerate(values) if v != common]
            if 2 * len(odd) >= len(values):  # no majority to be right
                odd = list(range(len(values)))
            raise Stop(f"iteration {iteration}: the ranks have drifted apart: {parameters[first][0]}, parameter "
                       f"{parameters[first][1]}, differs on {name_ranks(odd)} ({int(differs.sum())} parameters in all)")
        any_infinite, any_changed = extremes[2].bool(), extremes[3].bool()
    else:
        any_infinite, any_changed = infinite, changed
    if any_infinite.any():  # as a huge learning rate does it, with finite gradients
        i = int(any_infinite.nonzero()[0])
        raise Stop(f"iteration {iteration}: {parameters[i][0]}'s {parameters[i][1]} is not finite{where(infinite, i)}; the "
                   "last checkpoint is good. Lower the learning rate, or look at its gradients")
    if any_changed.any():
        i = int(any_changed.nonzero()[0])
        raise Stop(f"iteration {iteration}: the frozen {parameters[i][0]} has changed: parameter {parameters[i][1]} is not what "
                   f"it was at the start{where(changed, i)}")

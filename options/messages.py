"""
Ranks with roles: the ranks of each role, and how one role sends tensors to another.
options/roles.py decides what they send, and in which order.

    trainers     the first ranks; rank 0 leads the run
    generators   the next ranks
    scorers      the last ranks

The ranks of a role do their collectives among themselves (parallel.group). A message between roles
goes from the first rank of one role to the first rank of the other, which broadcasts it to its
role. It is sent in the background, through the CPU's memory. The receiver knows its label,
(purpose, iteration), before: the order of the messages depends only on the iteration.

No rank asks whether another one lives. If a process is killed, its connections close, and its
neighbours fail at once; a process that hangs is lost after `timeout` seconds.
"""
import collections
import contextlib
import datetime
import json
import re
import threading
import time

import torch
import torch.distributed as dist

import parallel
from configurator import BadInput, Lost, Stop, shorten
from parallel import wire
from together import PATIENCE, patience

ROLES = "train", "generate", "score"

leads = False  # whether this rank is the first one of its role
way = None  # the group in which roles send to each other
sent = collections.defaultdict(collections.deque)  # to: messages on their way, on the first rank
wait = None  # the time to wait for another role, a timedelta
store = None  # all ranks see its entries
trainers_left = False  # whether the ranks that train have left


class Ended(Exception):
    """The trainers have left, so nobody waits for this rank's next work."""


# --------------------------------------------------------------------------------------------------
# the ranks of each role


def parse_roles(text, world_size):
    """
    "train=6,generate=1,score=1" -> {role: the range of its ranks}, the roles without ranks left
    out; {} where all ranks train. Raises BadInput.
    """
    given = text.replace(" ", "")
    counts = dict(re.findall(r"(train|generate|score)=(\d{1,6})", given))
    if ",".join(f"{name}={number}" for name, number in counts.items()) != given:
        raise BadInput(f"roles = {shorten(text)}: wanted how many ranks train, generate and "
                        "score, each once, as train=6,generate=1,score=1")
    counts = {name: int(counts[name]) for name in ROLES if int(counts.get(name, 0))}
    total = sum(counts.values())
    if given and "train" not in counts:
        raise BadInput(f"roles = {shorten(text)} has no ranks that train; give it train=1 or more")
    if given and total != world_size:
        raise BadInput(f"roles = {shorten(text)} has {total} ranks, but there are {world_size}; "
                        f"change it, or start so many: torchrun --nproc_per_node={total}")
    found, first = {}, 0
    for name, number in counts.items():
        found[name] = range(first, first + number)
        first += number
    return found if len(found) > 1 else {}


def needs(name, system):
    """
    Whether this rank's role needs the weights of a model: policy, ref, reward, judge or value.
    LoRA's trunk, which is the policy's, is on all ranks.
    """
    frozen = ("ref", "reward", "judge")
    models = dict(train=("policy", "value"), generate=("policy",), score=frozen)[parallel.role]
    if parallel.role == "train" and "score" not in parallel.roles:
        models += frozen
    return name in models or name == "policy" and bool(system.lora)


def begin(ranks, rank, timeout):
    """
    A collective of all ranks: make a group of each role. ranks: of parse_roles. From here on each
    rank reads the store (watch_store). Returns whether this rank is the first one of its role.
    """
    global leads, way, store, wait
    role = next(name for name, numbers in ranks.items() if rank in numbers)
    parallel.roles, parallel.role = ranks, role
    wait = datetime.timedelta(seconds=timeout)  # torch's own would be half an hour
    groups = {name: dist.new_group(list(numbers), wait) for name, numbers in ranks.items()}
    # gloo, also on GPUs: a message may wait long for its receiver, and with NCCL the GPU would, too
    way = dist.new_group(timeout=wait, backend="gloo")
    store = dist.PrefixStore("roles", dist.distributed_c10d._get_default_store())
    parallel.group, parallel.first = groups[role], ranks[role][0]
    parallel.others = f"the other ranks that {role}"
    leads = rank == parallel.first
    threading.Thread(target=watch_store, daemon=True).start()
    return leads


# --------------------------------------------------------------------------------------------------
# messages


def send(to, label, tensors=(), keep=1, **fields):
    """
    Send {name: tensor} and the fields to another role. All ranks of this role call it, and the
    first one sends. tensors: a dict, or pairs that are made one by one; if making them is a
    collective, all ranks make them. keep: so many messages may be on their way at once; then it
    waits for the oldest one. It sends copies, in the CPU's memory.
    """
    pairs = tensors.items() if isinstance(tensors, dict) else tensors
    if not leads:
        collections.deque(pairs, maxlen=0)  # make each tensor, and drop it
        return
    while len(sent[to]) >= keep:
        for work, _ in sent[to].popleft():
            with_role(to, work.wait)
    sent[to].append([])
    for name, t in pairs:
        body = t.detach().to("cpu", copy=True).contiguous().flatten().view(torch.uint8)
        header = dict(name=name, shape=list(t.shape), dtype=str(t.dtype).removeprefix("torch."))
        sent[to][-1] += post(to, header | dict(label=label), body)
    sent[to][-1] += post(to, fields | dict(label=label))


def post(to, fields, body=()):
    """On the first rank: send a text and bytes to another role. Returns [(work, buffer), ...]."""
    text = torch.tensor(list(json.dumps(fields).encode()), dtype=torch.uint8)
    buffers = [torch.tensor([len(text), len(body)]), text] + [body] * (len(body) > 0)
    return [(with_role(to, dist.isend, t, parallel.roles[to][0], way), t) for t in buffers]


def receive(source, label, use=None):
    """
    A collective of this role: ({name: tensor}, the other fields) of a message of another role.
    label: of the message that is due; None: of any. use: a function of (name, tensor), which takes
    each tensor as it comes; then none are returned. Raises Stop with the message of a role that has
    failed, and Ended where the trainers have left.
    """
    tensors = {}
    while True:
        text, size = take(source, 2, torch.int64).tolist()
        fields = json.loads(bytes(take(source, text).tolist()))
        body = take(source, size)
        if "error" in fields:
            raise (BadInput if fields["bad_input"] else Stop)(fields["error"])
        if "ended" in fields:
            raise Ended
        if label is not None and fields["label"] != list(label):
            raise Stop(f"{parallel.phase}: the ranks that {source} have sent {fields['label']} "
                       f"where those that {parallel.role} wait for {list(label)}")
        if "name" not in fields:  # the last part
            return tensors, fields
        t = body.view(getattr(torch, fields["dtype"])).view(fields["shape"])
        (use or tensors.__setitem__)(fields["name"], t)


def take(source, size, dtype=torch.uint8):
    """A collective of this role: the next tensor from another one, (size,)."""
    t = torch.empty(size, dtype=dtype)
    if size > 0:
        if leads:
            work = with_role(source, dist.irecv, t, parallel.roles[source][0], way)
            with_role(source, work.wait, wait)
        t = t.to(wire())
        parallel.broadcast(t)
    return t


def with_role(other, operation, *args):
    """operation(*args), an exchange with another role. Raises Lost."""
    try:
        return operation(*args)
    except RuntimeError as e:
        raise parallel.lost(e, f"the ranks that {other}") from e


# --------------------------------------------------------------------------------------------------
# the end


def watch_store():
    """
    A thread: write "stop" into the store when this rank has got a signal, and read it. The main
    thread does not read the store: without a network a read takes a quarter of an hour.
    """
    global trainers_left
    while True:
        time.sleep(0.2)
        try:
            if parallel.stop:
                store.set("stop", "")
            if store.check(["stop"]):
                parallel.stop = True
            trainers_left = store.check(["left"])
        except RuntimeError:  # the store has ended; so does the run
            return


def tell_the_end():
    """On the trainers, before they leave: let the other roles leave, too."""
    store.set("left", "")
    tell(ROLES, ended=True)


def wait_for_the_end():
    """A collective of another role: wait for the exception of `receive` when the trainers leave."""
    global wait
    with patience():  # they may save their models before
        wait = datetime.timedelta(seconds=PATIENCE)
        while True:
            receive("train", None)


def tell(others, **fields):
    """Send fields to these other roles, if they exist, in the place of their next message."""
    for to in others:
        if leads and to in parallel.roles and to != parallel.role:
            sent[to].append(post(to, fields))


def fail(error):
    """Send this role's BadInput or Stop to the other roles."""
    tell(ROLES, error=str(error), bad_input=isinstance(error, BadInput))


def fail_and_leave(error):
    """
    errors.py calls this when this rank leaves: ranks that wait for it get the message. For Lost it
    sends nothing, because all ranks notice it by themselves.
    """
    if isinstance(error, Lost):
        return
    with contextlib.suppress(RuntimeError):  # the others have left, or are busy
        fail(error)
        for messages in sent.values():
            for work, _ in messages[-1] if messages else ():
                work.wait(datetime.timedelta(seconds=1))

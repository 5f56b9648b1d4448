"""
The key roles: ranks of their own sample, and score, while the others train.

    roles = "train=6,generate=1,score=1"      the first 6 ranks train, the next one samples, ...

    trainers   -- weights -->   generators   -- batch -->   scorers   -- scores -->   trainers

Without scorers the generators score. The ranks of a role do their collectives among themselves
(this_rank.group), and run the script's own function `rollout`; in it a generator leaves the scoring
out, and a scorer receives in the place of sampling (this_rank.does). Held-out prompts and refills
are the trainers' own. Trainers load all models, generators the policy, scorers the reward model and
the judge; only the trainers step and save.

The trainers lead: at the beginning of an iteration they send weights with the numbers of the
batches that are due, later they receive these in the same order, and at the end they say so. A
message goes from the first rank of a role to the first rank of the next, which broadcasts it; it is
sent in the background, through the CPU's memory. Signals are for the trainers, who tell the others.
"""
import json
import math
import re
import signal

import torch
import torch.distributed as dist

import errors
import parallel
import ranks
from checkpoint import trained_tensors
from errors import BadInput, Stop
from options.ahead import Ahead
from parallel import checksum
from ranks import this_rank

first = {}  # {role: its first rank}
way = None  # the group in which roles send to each other
sent = []  # messages that may be on their way: their works and tensors


def begin(system):
    """A collective: make groups; returns this rank's role, does and group. Raises BadInput."""
    global way
    text = system.roles
    counts = {name: int(n) for name, n in re.findall(r"(train|generate|score)=(\d{1,6})", text)}
    size = int(dist.is_initialized() and dist.get_world_size())
    if not counts.get("train") or not counts.get("generate") or sum(counts.values()) != size:
        raise BadInput(f"roles = {text!r}, of {max(size, 1)} rank(s): wanted what all ranks do, as "
                       "train=6,generate=1,score=1 of torchrun --nproc_per_node=8")
    start = 0
    for name in [name for name in ("train", "generate", "score") if counts.get(name)]:
        numbers = range(start, start + counts[name])
        made = dist.new_group(list(numbers), this_rank.wait)
        first[name], start = start, numbers.stop
        if dist.get_rank() in numbers:
            role, group = name, made
    # gloo also on GPUs, where NCCL would keep the GPU waiting
    way = dist.new_group(timeout=parallel.PATIENCE, backend="gloo")
    does = "sample", "score"
    if "score" in first:
        does = dict(generate=("sample",), score=("score",)).get(role, does)
    if role != "train":
        ranks.on_requests(signal.SIG_IGN)
    return role, does, group


class Apart(Ahead):
    """Rollouts by ranks of their own."""

    coming = ()  # iterations whose batches are on their way to the trainers

    def fetch(self, iteration, due):
        """A collective of the trainers: send the weights, if they are due; receive the batch."""
        if due:
            policy, audited = self.run.models["policy"], self.run.audit_is_due()
            self.run.enter("weights")
            weights = {name: parallel.whole(p) for name, p in trained_tensors(policy).items()}
            sums = {name: int(checksum(t)) for name, t in weights.items() if audited}
            send("generate", weights, due=due, shift=self.run.state.get("score_shift"), sums=sums,
                 settings=self.run.settings)
        self.coming = [*self.coming, *due]
        self.run.enter("rollout")
        with self.run.saved_if_it_fails():  # COLLECTIVE
            self.have(iteration)  # COLLECTIVE
        self.run.leave_if_stop_asked()  # COLLECTIVE

    def have(self, last):
        """A collective of the trainers: receive the batches up to that of iteration `last`."""
        while self.coming and self.coming[0] <= last:
            fields, batch = receive(list(first)[-1])  # COLLECTIVE
            if "error" in fields:
                self.coming = ()
                raise Stop(fields["error"])
            self.batches[self.coming.pop(0)] = {
                name: t.to(self.run.device) for name, t in batch.items()}

    def tensors(self):
        """A collective of the trainers: see Ahead; waits for the batches that are on their way."""
        self.have(self.run.iteration + self.staleness - 1)  # COLLECTIVE
        return super().tensors()

    def end(self):
        """A collective of the trainers: let the other roles leave, too."""
        self.have(self.run.max_iters)  # COLLECTIVE
        send("generate", {}, end=True)

    def serve(self):
        """A collective of the others: sample, or score, until the trainers say that it is over."""
        roles = [*first, "train"]
        to, own = roles[roles.index(this_rank.role) + 1], trained_tensors(self.run.models["policy"])
        fields = {}
        while "end" not in fields:
            errors.enter("waiting for work")
            fields, tensors = receive("train" if this_rank.role == "generate" else "generate")
            if fields.get("settings", self.run.settings) != self.run.settings:
                raise BadInput("this role has other settings, rows, FILE.pys or torch than "
                               "the trainers")
            if this_rank.role == "generate":
                for name, t in tensors.items():
                    parallel.copy_into(own[name], t)  # COLLECTIVE where it is sharded
                for name, wanted in fields.get("sums", {}).items():
                    if int(checksum(parallel.whole(own[name]))) != wanted:  # COLLECTIVE, too
                        raise Stop(f"iteration {fields['due'][0]}: policy, parameter {name} of the "
                                   "ranks that generate differs from the trainers'")
            else:
                received[:] = [{name: t.to(self.run.device) for name, t in tensors.items()}]
            if not fields.get("due"):  # the end, or an error
                if to != "train" or "error" in fields:
                    send(to, {}, **fields)
                continue
            if fields["shift"] is not None and "reward_model" in self.run.models:
                self.run.models["reward_model"].score_shift = fields["shift"]
            for k in fields["due"]:
                self.run.iteration = k
                try:
                    batch = self.rollout_now("rollout", k, self.rows, self.rows_of(k))  # COLLECTIVE
                    send(to, batch, **fields | dict(due=[k], sums={}))
                except Stop as e:
                    send(to, {}, error=str(e))
        ranks.leave()  # COLLECTIVE


received = []  # the batch that a scorer scores


def send(to, tensors, **fields):
    """Send {name: tensor} and the fields to another role: its first rank gets this first rank's."""
    if parallel.rank_and_size()[0] > 0:
        return
    while len(sent) > 100:  # staleness bounds the messages on their way; these have arrived
        for work, _ in sent.pop(0):
            work.wait()
    # copies: the next step may change the weights before they are sent
    bodies = {name: t.detach().to("cpu", copy=True).contiguous() for name, t in tensors.items()}
    what = {name: [list(t.shape), str(t.dtype).removeprefix("torch.")]
            for name, t in bodies.items()}
    text = torch.tensor(list(json.dumps(fields | dict(tensors=what)).encode()), dtype=torch.uint8)
    parts = [torch.tensor([len(text)]), text, *(t.flatten().view(torch.uint8)
                                                for t in bodies.values() if t.numel())]
    sent.append([(dist.isend(t, first[to], way), t) for t in parts])


def receive(source):
    """A collective of this role: ({field: value}, {name: tensor}) of another one's next message."""
    def take(size, dtype=torch.uint8):
        t = torch.zeros(size, dtype=dtype)
        if size and parallel.rank_and_size()[0] == 0:
            dist.recv(t, first[source], way)
        return t

    text = take(int(take(1, torch.int64)))
    fields = parallel.from_rank(  # COLLECTIVE
        json.loads(bytes(text.tolist())) if len(text) else None)
    tensors = {}
    for name, (shape, dtype) in fields.pop("tensors").items():
        dtype = getattr(torch, dtype)
        body = take(math.prod(shape) * dtype.itemsize).to(parallel.comm_device())
        dist.broadcast(body, group_src=0, group=this_rank.group)  # COLLECTIVE
        tensors[name] = body.view(dtype).view(shape)
    return fields, tensors

"""
Where the loop's batches come from. In most runs every rank does everything, one phase after the
other; then a batch is sampled and scored when the loop asks for it, and this file has little to do.
Two keys change that:

    roles = "train=6,generate=1,score=1"    ranks of their own sample, and score
    staleness = 1                           the batch is sampled one update ahead

The trainers run the loop of ppo.py or grpo.py. They hold policy and value model. A generator holds
a copy of the policy in the dtype in which it decodes; a scorer holds reference and reward model.
Generators and scorers never reach the loop: they do the jobs that the trainers give them, in
serving.py. Without generators, or without scorers, the trainers do that work.

One iteration with all three roles, and staleness 0:

    trainers       weights of version k >   log, save        > read, update
    generators                          > sample             .
    scorers                                      > score     .

Behind each > is what a role does when it has got something from another one: weights, or a batch.
A dot is where it has sent its own on.

A version is the number of the iteration that begins with these weights. The batch of iteration k is
sampled by version max(0, k - staleness), always: never by "the newest that is there". So the texts
of a run do not depend on how fast anybody is, nor on how many ranks have which role. With staleness
1 the generators sample the batch of iteration k + 1 while the trainers train on that of k:

    trainers       weights 5 >   update 5       weights 6 >   update 6
    generators               > sample batch 6             > sample batch 7

A batch of an older version has the log-probs of the policy that sampled it as its old_logprobs: the
clipped ratio of PPO and GRPO is then between the policy of now and that one. With importance_cap
the policy that begins the update reads the batch first: the ratio is to that policy, and the older
one comes in as a weight (loss.importance_weights).
"""
from dataclasses import dataclass

import parallel
from data import batch_rows
from engine import launch
from engine.audit import checksum_of
from engine.build import decoding_dtype
from engine.checkpoint import load_batches
from engine.placement import gather, matrices_of
from parallel import is_shard, my_part
from rollout import sample_and_score, sample_share, score_batch


@dataclass
class Order:
    """A batch that the trainers have asked for."""

    purpose: str  # rollout, eval, or a refill
    iteration: int  # whose batch it is; with the purpose it decides the noise
    picked: list  # the numbers of its data rows
    slots: list  # the places of these prompts in the batch
    version: int  # of the weights that sample it
    job: int = None  # the number of the generators' job
    scoring: int = None  # and of the scorers'
    sampled: dict = None  # what rollout.generate returns, when it is there
    scored: dict = None  # the whole batch, when it is there

    def wanted(self, data, config):
        """[(data row, its prompt's token ids, slot, sample)], one for each response."""
        rows, prompts = data[self.purpose == "eval"]
        samples = 1 if self.purpose == "eval" else config.get("group_size", 1)
        return [(rows[number], prompts[number], slot, sample)
                for number, slot in zip(self.picked, self.slots, strict=True)
                for sample in range(samples)]

    def as_job(self):
        """What generators and scorers are told of it, for JSON."""
        return dict(purpose=self.purpose, iteration=self.iteration, picked=list(self.picked),
                    slots=list(self.slots), version=self.version)


def order_of(job):
    """The way back from Order.as_job."""
    return Order(**{k: v for k, v in job.items() if k not in ("do", "scored")})


class Batches:
    """
    The batches of a run, for its loop. data: (training rows, their prompts' token ids), and the
    same of the held-out ones.
    """

    def __init__(self, run, scorer, data):
        self.run, self.config, self.scorer, self.data = run, run.config, scorer, data
        self.policy = run.models["policy"]
        self.crew, self.staleness = launch.crew, run.config["staleness"]
        self.generators = self.crew is not None and "generate" in self.crew.ranks
        self.scorers = self.crew is not None and "score" in self.crew.ranks
        self.ahead = {}  # iteration: Order of its batch
        self.sampling, self.scoring = [], []  # Orders that others work on, in the order of the jobs
        self.published = None  # the newest version that the generators have been given
        self.looked_ahead = -1  # the last iteration that has ordered batches
        self.restore(load_batches(run.checkpoint) if run.checkpoint else {})  # COLLECTIVE
        run.batches = self

    def ask(self, purpose, picked, slots=None):
        """
        A collective: the batch of these data rows, sampled and scored: a dict of tensors, see
        rollout.sample_and_score. With scorers and a reference it has ref_logprobs (B, R), too.

        purpose: "rollout", for which the weights of `staleness` iterations ago have sampled; "eval"
        or "refill N", for which those of now do. slots: None: 0, 1, 2, ...
        """
        run, now = self.run, self.run.iteration
        order = Order(purpose, 0 if purpose == "eval" else now, picked,
                      range(len(picked)) if slots is None else slots, now)
        if self.crew is None and self.staleness == 0:
            return sample_and_score(run, self.policy, self.scorer, self.config,  # COLLECTIVE
                                    order.wanted(self.data, self.config), purpose, order.iteration)
        run.enter(purpose)
        if purpose != "rollout":
            self.give_out(order)  # COLLECTIVE
        if purpose == "rollout" or self.generators:  # they work ahead, while others look at this
            self.look_ahead(now)  # COLLECTIVE
        if purpose == "rollout":
            order = self.ahead[now]
            run.age = now - order.version
        self.wait_for_samples(order, may_leave=True)  # COLLECTIVE
        if purpose == "rollout":
            run.enter("score")
        with run.saved_if_it_fails():  # COLLECTIVE
            return self.finish(order)  # COLLECTIVE

    def publish(self, version):
        """
        A collective, right after an update: the weights of now are this version. The generators get
        them, and what these shall sample, while the trainers log, audit and save. Where an
        evaluation or a new reference comes first, the batch is ordered later, by ask.
        """
        if not self.generators:
            return
        self.run.enter("weights")
        last = version == self.config["max_iters"]
        evaluates = self.data[1][0] and (version % self.config["eval_interval"] == 0 or last)
        if evaluates or self.run.reset_is_due(version):
            self.send_weights(version)  # COLLECTIVE
        else:
            self.look_ahead(version)  # COLLECTIVE

    def look_ahead(self, now):
        """
        A collective, once an iteration: order the batches that the weights of now sample. That is
        the one of iteration now + staleness; in the first iteration also those before it.
        """
        if self.looked_ahead == now:
            return
        self.looked_ahead = now
        self.ahead = {k: order for k, order in self.ahead.items() if k >= now}
        size = self.config["batch_size"] // self.config.get("group_size", 1)
        last = min(now + self.staleness, self.config["max_iters"] - 1)
        for iteration in range(now, last + 1):
            if iteration not in self.ahead:
                picked = batch_rows(self.config["seed"], iteration, size, self.data[0][0].mix)
                order = Order("rollout", iteration, picked, range(size), now)
                self.give_out(order)  # COLLECTIVE
                self.ahead[iteration] = order

    def give_out(self, order):
        """A collective: let the generators sample an order; without generators, sample it here."""
        if self.generators:
            self.send_weights(order.version)  # COLLECTIVE
            scored = self.scorers and self.can_be_read(order, order.version)
            order.job = self.crew.post(do="sample", scored=scored, **order.as_job())
            self.sampling.append(order)
            if scored:
                order.scoring = order.job
                self.scoring.append(order)
            return
        wanted = order.wanted(self.data, self.config)
        mine, _, _ = sample_share(  # COLLECTIVE
            self.policy, self.scorer.tokenizer, self.config, self.run.device, wanted,
            order.purpose, order.iteration, launch.stop_asked)
        self.run.leave_if_stop_asked()  # COLLECTIVE
        order.sampled = parallel.gather_rows(mine, len(wanted))  # COLLECTIVE
        self.give_to_scorers(order, order.version)

    def can_be_read(self, order, now):
        """Whether the reference of iteration `now` is the one that shall read this order."""
        every = self.config["ref_reset_iters"]
        return not every or order.purpose != "rollout" or order.iteration // every == now // every

    def give_to_scorers(self, order, now):
        """
        Send a batch that is sampled already to the scorers, if there are any, and if they have the
        reference that shall read it. now: the iteration.
        """
        if self.scorers and self.can_be_read(order, now):
            order.scoring = self.crew.post(do="score", **order.as_job())
            self.crew.send(order.scoring, "score", order.sampled, keep=self.staleness + 3)
            self.scoring.append(order)

    def send_weights(self, version):
        """
        A collective: send the weights of now to the generators, in the background, unless they have
        them. The buffers are copies: the next step may change the weights before they have left.
        """
        if self.published == version:
            return
        self.published = version
        self.send_policy("generate", "weights", version, self.run.audit_is_due(version),
                         self.staleness + 1)  # COLLECTIVE

    def send_reference(self):
        """A collective: the reference, which scorers hold, becomes the policy as it is now."""
        self.send_policy("score", "reference", self.run.iteration, True,
                         self.staleness + 3)  # COLLECTIVE

    def send_policy(self, to, what, version, checked, keep):
        """A collective: a job of this name and the policy for it, with its checksum or without."""
        matrices, checksum = decoding_dtype(self.config, self.run.device), None
        if checked:
            checksum = checksum_of(my_weights(self.policy, matrices))  # COLLECTIVE
        job = self.crew.post(do=what, version=version, checksum=checksum)
        # `send` makes one after the other: all ranks gather what is sharded, and the first one
        # alone holds the whole, in the CPU's memory
        whole = ((name, gather(t, p) if is_shard(p) else t)
                 for name, p, t in my_weights(self.policy, matrices))
        self.crew.send(job, to, whole, keep)

    def wait_for_samples(self, order, may_leave=False):
        """
        A collective: fill order.sampled. Others' batches that were ordered before come first.
        may_leave: save and leave instead, if the run is asked to stop.
        """
        while order.sampled is None:
            first = self.sampling[0]
            sampled, _ = self.crew.receive(first.job, "generate", may_leave)  # COLLECTIVE
            if sampled is None:
                self.run.leave_if_stop_asked()  # COLLECTIVE
                continue
            self.sampling.pop(0)
            first.sampled = {name: t.to(self.run.device) for name, t in sampled.items()}

    def finish(self, order):
        """A collective: the scored batch of an order that has been sampled."""
        if not self.scorers:
            wanted = order.wanted(self.data, self.config)
            return score_batch(self.scorer, order.sampled, wanted, order.iteration)  # COLLECTIVE
        if order.scoring is None:  # its reference was not there yet when it was ordered
            self.give_to_scorers(order, self.run.iteration)
        while order.scored is None:
            first = self.scoring[0]
            scored, _ = self.crew.receive(first.scoring, "score", may_leave=True)  # COLLECTIVE
            if scored is None:
                self.run.leave_if_stop_asked()  # COLLECTIVE
                continue
            self.scoring.pop(0)
            self.wait_for_samples(first)  # COLLECTIVE
            first.scored = first.sampled | {name: t.to(self.run.device)
                                            for name, t in scored.items()}
        return order.scored

    # what a checkpoint holds of it

    def to_save(self):
        """
        A collective: {"ITERATION.VERSION.NAME": tensor} of the batches that have been sampled for
        this iteration and later ones, by weights that will be gone. Those that are being sampled
        are waited for.
        """
        tensors, now = {}, self.run.iteration
        for iteration, order in sorted(self.ahead.items()):
            if order.version < now:
                self.wait_for_samples(order)  # COLLECTIVE
                tensors |= {f"{iteration}.{order.version}.{name}": t
                            for name, t in order.sampled.items()}
        return tensors

    def restore(self, tensors):
        """The inverse of to_save: take the batches of a checkpoint; they are scored again."""
        size = self.config["batch_size"] // self.config.get("group_size", 1)
        for key, t in tensors.items():
            iteration, version, name = key.split(".")
            iteration, version = int(iteration), int(version)
            if iteration not in self.ahead:
                picked = batch_rows(self.config["seed"], iteration, size, self.data[0][0].mix)
                self.ahead[iteration] = Order("rollout", iteration, picked, range(size), version,
                                              sampled={})
            self.ahead[iteration].sampled[name] = t.to(self.run.device)
        for _, order in sorted(self.ahead.items()):  # the reference is not reset again yet
            self.give_to_scorers(order, self.run.iteration - 1)


def my_weights(policy, matrices=None):
    """
    (name, parameter, this rank's part of it) of a policy. matrices: the dtype in which frozen
    copies of it hold their matrices, see placement.settle; None: as here.
    """
    rounded = {id(p) for p in matrices_of(policy)} if matrices else ()
    for name, p in policy.named_parameters():
        t = my_part(p.detach())
        yield name, p, t.to(matrices) if id(p) in rounded else t

"""
Where the loop's batches come from. In most runs every rank does everything, one phase after the
other; then a batch is sampled and scored when the loop asks for it, and this file has little to do.
Two keys change that:

    roles = "train=6,generate=1,score=1"    ranks of their own sample, and score
    staleness = 1                           the batch is sampled one update ahead

The trainers run the loop of ppo.py or grpo.py. They hold policy and value model. A generator holds
a copy of the policy in the dtype in which it decodes; a scorer holds reference and reward model.
Generators and scorers never reach the loop: they do the jobs that the trainers give them, in
`serve`. Without generators, or without scorers, the trainers do that work.

One iteration with all three roles, and staleness 0:

    trainers       weights of version k >   log, save        > read, update
    generators                          > sample             .
    scorers                                      > score     .

A version is the number of the iteration that begins with these weights. The batch of iteration k is
sampled by version max(0, k - staleness), always: never by "the newest that is there". So the texts
of a run do not depend on how fast anybody is, nor on how many ranks have which role. With staleness
1 the generators sample the batch of iteration k + 1 while the trainers train on that of k:

    trainers       weights 5 >   update 5       weights 6 >   update 6
    generators               > sample batch 6             > sample batch 7

A batch of an older version has the log-probs of the policy that sampled it as its old_logprobs: the
clipped ratio of PPO and GRPO is then between the policy of now and that one.
"""
import math
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

import parallel
from data import batch_rows, my_micro_batches, permutation
from engine import launch
from engine.audit import audit, checksum_of
from engine.build import autocast, decoding_dtype
from engine.checkpoint import load_batches, save_model
from engine.crew import ROLES
from engine.placement import gather, held, no_grad_forwards
from engine.pretrained import fill, load_weights
from engine.together import patience, together
from errors import Lost, Stop
from loss import response_logprobs
from parallel import is_shard, my_part
from rewards import Scorer, zero_is_known
from rollout import new_shift, sample_and_score, sample_share, score_batch


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


# --------------------------------------------------------------------------------------------------
# the trainers' side


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
        every, last = self.config["ref_reset_iters"], version == self.config["max_iters"]
        evaluates = self.data[1][0] and (version % self.config["eval_interval"] == 0 or last)
        if evaluates or every and version % every == 0 and not last:
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
        self.run.leave_if_asked()  # COLLECTIVE
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
        by_cpu = any(map(is_shard, self.policy.parameters()))
        self.crew.send(job, to, whole, keep, by_cpu)

    def wait_for_samples(self, order, may_leave=False):
        """
        A collective: fill order.sampled. Others' batches that were ordered before come first.
        may_leave: save and leave instead, if the run is asked to stop.
        """
        while order.sampled is None:
            first = self.sampling[0]
            sampled, _ = self.crew.receive(first.job, "generate", may_leave)  # COLLECTIVE
            if sampled is None:
                self.run.leave_if_asked()  # COLLECTIVE
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
                self.run.leave_if_asked()  # COLLECTIVE
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


# --------------------------------------------------------------------------------------------------
# the generators' and scorers' side


def serve(config, models, terms, tokenizers, data, device, judge=None):
    """
    Do the jobs that the trainers give, until they say that the run is over; this function then ends
    the process. On a trainer it returns at once.

    models: {name: model} of the run; tokenizers: the policy's and the reward model's; data: see
    Batches; judge: a Judge or None. An error in a job is told to those who wait for its result.
    """
    crew = launch.crew
    if crew is None or crew.role == "train":
        return
    models = held(models)
    reward_models = [model for name, model in models.items()
                     if name.startswith("reward_model") and not name.endswith("'s trunk")]
    threads = ThreadPoolExecutor(1, initializer=launch.begin_thread, initargs=[device])
    scorer = Scorer(config, terms, reward_models, *tokenizers, threads, device, judge)
    do = Generator(config, models, tokenizers[0], data, device) if crew.role == "generate" else \
        ScoringRank(config, models, scorer, data, device)
    iteration, trouble = 0, None
    while True:
        parallel.phase = f"iteration {iteration}, waiting for work"
        number, job = crew.next_job()
        if job["do"] == "leave":
            break
        iteration = job.get("iteration", iteration)
        parallel.phase = f"iteration {iteration}, {job.get('purpose', job['do'])}"
        try:
            if trouble and job["do"] != "save":  # what was learned so far is kept
                raise trouble
            if job["do"] == "audit":
                do.audit(iteration)
            else:
                do(number, job)
        except Stop as e:
            if isinstance(e, Lost):
                raise
            trouble = e  # and so is every job from now on
            for role in sorted({"train", "score"} & crew.ranks.keys() - {crew.role}):
                crew.say(number, role, error=str(e))
    crew.leaving = True
    threads.shutdown(wait=False, cancel_futures=True)
    launch.finish()  # COLLECTIVE
    sys.exit(0)


class Generator:
    """What a rank does that generates: it takes new weights, and samples."""

    def __init__(self, config, models, tokenizer, data, device):
        self.config, self.models, self.tokenizer = config, models, tokenizer
        self.data, self.device, self.crew = data, device, launch.crew
        self.policy, self.frozen = models["policy"], {}
        self.version = self.checksum = None  # of the policy; the second is not always known

    def __call__(self, number, job):
        """A collective of the generators: do a job."""
        if job["do"] == "weights":
            self.take_weights(number, job)  # COLLECTIVE
        elif job["do"] == "sample":
            self.sample(number, job)  # COLLECTIVE

    def take_weights(self, number, job):
        """A collective: the policy becomes another version. Has the one before stayed as it was?"""
        self.check_copy(job["version"])  # COLLECTIVE
        take_policy(self.crew, number, self.policy)  # COLLECTIVE
        self.version, self.checksum = job["version"], job["checksum"]
        # it is no frozen model: it may have changed
        self.frozen = {key: x for key, x in self.frozen.items() if key[0] != "policy"}
        self.check_copy(self.version)  # COLLECTIVE

    def check_copy(self, iteration):
        """A collective: raise Stop if this copy of the policy is not what the trainers sent."""
        if self.checksum:
            check_copy(self.crew, self.policy, self.version, self.checksum,
                       iteration)  # COLLECTIVE

    def audit(self, iteration):
        """A collective: what the trainers do with their models, too."""
        audit(self.models, self.frozen, iteration)  # COLLECTIVE
        self.check_copy(iteration)  # COLLECTIVE

    def sample(self, number, job):
        """A collective: sample an order, and send it to the trainers, and the scorers if any."""
        crew, order = self.crew, order_of(job)
        if self.version != order.version:
            raise Stop(f"iteration {order.iteration}: rank {crew.rank} holds the policy of version "
                       f"{self.version}, and shall sample with version {order.version}")

        def abandoned():
            parallel.beat()
            return crew.abandoned

        wanted = order.wanted(self.data, self.config)
        others = ["train"] + ["score"] * job["scored"]
        mine, _, _ = sample_share(  # COLLECTIVE
            self.policy, self.tokenizer, self.config, self.device, wanted, order.purpose,
            order.iteration, abandoned)
        if given_up(crew):  # COLLECTIVE
            for role in others:
                crew.say(number, role)
            return
        sampled = parallel.gather_rows(mine, len(wanted))  # COLLECTIVE
        for role in others:
            crew.send(number, role, sampled, keep=self.config["staleness"] + 3)


def order_of(job):
    """The way back from Order.as_job."""
    return Order(**{k: v for k, v in job.items() if k not in ("do", "scored")})


def take_policy(crew, number, model):
    """A collective of a role: fill a model with the policy that the trainers send with a job."""
    said = crew.hear(number, "train")  # COLLECTIVE
    own = dict(model.named_parameters())
    for tensors in crew.take(said, "train"):  # COLLECTIVE
        for name, t in tensors.items():
            fill(own[name], t)  # where this copy is sharded, too, only this rank's part stays


def check_copy(crew, model, version, checksum, iteration):
    """
    A collective of a role: raise Stop if its copy of the policy is not of the checksum that the
    trainers have given for this version.
    """
    same = checksum_of(my_weights(model)) == checksum  # COLLECTIVE

    def refuse():
        if not same:
            raise Stop(f"iteration {iteration}: the ranks have drifted apart: the policy of "
                       f"version {version} differs on rank {crew.rank}, which {ROLES[crew.role]}")

    together(refuse)  # COLLECTIVE


def given_up(crew):
    """A collective of a role: whether the trainers have given up what they asked for."""
    abandoned = torch.tensor(float(crew.abandoned), device=parallel.wire())
    return bool(parallel.all_reduce_max(abandoned))  # COLLECTIVE


class ScoringRank:
    """What a rank does that scores: rewards, and what the reference says of the responses."""

    def __init__(self, config, models, scorer, data, device):
        self.config, self.models, self.scorer = config, models, scorer
        self.data, self.device, self.crew = data, device, launch.crew
        self.frozen = {}
        # with LoRA it is the policy's trunk
        self.ref_policy = models.get("ref_policy") if config["kl_coef"] > 0 else None

    def __call__(self, number, job):
        """A collective of the scorers: do a job."""
        if job["do"] == "center":
            self.center(number, job)  # COLLECTIVE
        elif job["do"] == "reference":
            take_policy(self.crew, number, self.ref_policy)  # COLLECTIVE
            check_copy(self.crew, self.ref_policy, job["version"], job["checksum"],
                       job["version"])  # COLLECTIVE
        elif job["do"] in ("load", "save"):
            self.load_or_save(number, job)  # COLLECTIVE
        elif job["do"] == "score" or job["do"] == "sample" and job["scored"]:
            self.score(number, job)  # COLLECTIVE
        if job["do"] in ("reference", "load"):  # it has changed, and may not change from now on
            self.frozen = {key: x for key, x in self.frozen.items() if key[0] != "ref_policy"}

    def score(self, number, job):
        """A collective: score an order, read it with the reference, and send that to trainers."""
        order = order_of(job)
        source = "generate" if job["do"] == "sample" else "train"
        sampled, _ = self.crew.receive(number, source)  # COLLECTIVE
        if sampled is None or given_up(self.crew):  # COLLECTIVE
            return  # nobody waits for it: the run ends
        sampled = {name: t.to(self.device) for name, t in sampled.items()}
        wanted = order.wanted(self.data, self.config)
        batch = score_batch(self.scorer, sampled, wanted, order.iteration)  # COLLECTIVE
        if self.ref_policy is not None:
            batch["ref_logprobs"] = self.read(batch, order)  # COLLECTIVE
        said = {name: t for name, t in batch.items() if name not in sampled}
        self.crew.send(number, "train", said, keep=self.config["staleness"] + 3)

    def center(self, number, job):
        """A collective: give reward models their zeros, or find them, see center_scores_of."""
        unknown = [m for m in self.scorer.reward_models
                   if not zero_is_known(m, self.config["center_scores"])]
        shifts = job.get("shifts")
        if shifts is None:
            order = Order("rollout", 0, job["picked"], range(len(job["picked"])), 0)
            sampled, _ = self.crew.receive(number, "train")  # COLLECTIVE
            sampled = {name: t.to(self.device) for name, t in sampled.items()}
            shifts = [new_shift(m, score_batch(  # COLLECTIVE
                self.scorer.of_one(m), dict(sampled), order.wanted(self.data, self.config), 0))
                for m in unknown]
            self.crew.say(number, "train", shifts=shifts)
        for reward_model, shift in zip(unknown, shifts, strict=True):
            reward_model.config.score_shift = shift

    def load_or_save(self, number, job):
        """A collective: the reference, in or from the folder of a checkpoint."""
        folder, saved = os.path.join(job["folder"], "ref_policy"), {}
        if job["do"] == "load":
            with patience():
                together(lambda: load_weights(self.ref_policy, job["folder"], folder))  # COLLECTIVE
        else:
            save_model(folder, self.ref_policy, self.scorer.tokenizer)  # COLLECTIVE
            saved = {f"ref_policy/{name}": os.path.getsize(os.path.join(folder, name))
                     for name in os.listdir(folder)}
        self.crew.say(number, "train", files=saved)

    def audit(self, iteration):
        """A collective: none of the models here may change."""
        audit(self.models, self.frozen, iteration)  # COLLECTIVE

    def read(self, batch, order):
        """
        A collective: the reference's log-probs of a batch, (B, R). It is read in the micro-batches
        in which the trainers train, so that equal weights give equal bits.
        """
        c, columns = self.config, torch.zeros_like(batch["sampler_logprobs"])
        rank, size = parallel.rank_and_size()
        trainers = len(self.crew.ranks["train"])
        minibatches = [batch["index"]]
        if order.purpose == "rollout":
            rows = permutation(len(batch["index"]), c["seed"], "minibatches", order.iteration, 0)
            minibatches = rows.to(self.device).tensor_split(c["num_minibatches"])
        with autocast(c, self.device), no_grad_forwards([self.ref_policy], self.device):
            for rows in minibatches:
                for turn in range(math.ceil(trainers / size)):
                    # those of trainer `whose`; where there are not enough, a forward for nobody
                    whose = turn * size + rank
                    part = min(whose, trainers - 1), trainers
                    for mb in my_micro_batches(batch, rows, c, part):
                        logprobs, _ = response_logprobs(
                            self.ref_policy, mb, c["temperature"], self.scorer.tokenizer.vocab_size,
                            c["head_chunk"], entropy=False, truncated=False)
                        if whose < trainers:
                            columns[mb["index"], :logprobs.shape[1]] = logprobs
        return parallel.all_reduce_sum(dict(ref_logprobs=columns))["ref_logprobs"]  # COLLECTIVE


def my_weights(policy, matrices=None):
    """
    (name, parameter, this rank's part of it) of what training changes in a policy: its parameters,
    or those of its adapter. matrices: the dtype in which generators hold the policy's matrices,
    None: as here.
    """
    adapted = hasattr(policy, "base")
    for name, p in policy.named_parameters():
        t = my_part(p.detach())
        if matrices and t.dim() == 2 and not adapted and not policy.config.stays_wide(name):
            t = t.to(matrices)
        yield name, p, t

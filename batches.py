"""
Where the loop's batches come from. In most runs every rank does everything, one phase after the
other; then a batch is sampled and scored when the loop asks for it, and this file has little to do.
Two keys change that:

    roles = "train=6,generate=1,score=1"    ranks of their own sample, and score
    staleness = 1                           the batch is sampled one update ahead

The trainers run the loop of ppo.py or grpo.py. They hold policy and value model. A generator holds
a copy of the policy in the dtype in which it decodes; a scorer holds reference and reward model.
Without generators, or without scorers, the trainers do that work.

A version is the number of the iteration that begins with these weights. The batch of iteration k is
sampled by version max(0, k - staleness), always: never by "the newest that is there". So what each
rank sends and receives next is known from the iteration alone:

    generators   for each k: take the weights that are due; sample batch k; send it
    scorers      for each k: held-out prompts, if they are due, batch k, refills: score them; send
    trainers     the loop, which receives in the same order, and sends new weights after each update

and the texts of a run depend neither on how fast anybody is, nor on how many ranks have which role.
With staleness 1 the generators sample the batch of iteration k + 1 while the trainers train on that
of k. Held-out prompts and refills are sampled by the trainers, who hold the policy of now.

The age of a batch is how many updates ago the policy was that sampled it. An older batch has the
log-probs of the policy that sampled it as its old_logprobs: the clipped ratio of PPO and GRPO is
then between the policy of now and that one. With importance_cap the policy that begins the update
reads the batch first: the ratio is to that policy, and the older one comes in as a weight
(loss.importance_weights).
"""
import contextlib
import math
import sys
from dataclasses import dataclass

import torch

import parallel
from data import batch_rows, my_micro_batches, permutation
from engine import launch, roles
from engine.audit import audit, check_finite, checksum_of, watched
from engine.checkpoint import load_batches
from engine.placement import held, matrices_of, no_grad_forwards
from engine.together import together
from errors import BadConfig, Lost, Stop, say
from parallel import fill, gather, is_shard, my_part
from rewards import centering_shift
from rollout import score_batch


@dataclass
class Schedule:
    """
    What a run samples, scores and trains on, in which order. A batch has a label, (what, iteration,
    attempt): what is rollout, eval or refill.

    data: (training rows, their prompts' token ids), and the same of the held-out ones. prompts: of
    an iteration's batch; samples: responses to each of them. The others are keys.
    """

    data: tuple
    seed: int
    max_iters: int
    prompts: int
    eval_interval: int
    staleness: int
    num_minibatches: int = 1
    micro_batch_size: int = 1
    micro_batch_tokens: int = 0
    samples: int = 1
    max_refills: int = 0

    def rows_of(self, iteration):
        """The numbers of the data rows whose prompts an iteration answers."""
        return batch_rows(self.seed, iteration, self.prompts, self.data[0][0].mix)

    def evaluates(self, iteration):
        """Whether an iteration begins with held-out prompts."""
        due = iteration % self.eval_interval == 0 or iteration == self.max_iters
        return due and len(self.data[1][0]) > 0

    def versions(self, start, kept=()):
        """
        {iteration: the version that samples its batch}, in the order in which they are sampled, of
        a run that begins with iteration `start`. kept: iterations whose batches are there already.
        """
        return {k: max(start, k - self.staleness)
                for k in range(start, self.max_iters) if k not in kept}

    def to_score(self, start):
        """The labels of what is scored, in this order."""
        for k in range(start, self.max_iters + 1):
            if self.evaluates(k):
                yield "eval", k, 0
            if k < self.max_iters:
                yield "rollout", k, 0
                yield from (("refill", k, attempt) for attempt in range(self.max_refills))

    def wanted(self, label, picked, slots=None):
        """
        [(data row, its prompt's token ids, slot, sample)], one for each response. picked: the
        numbers of the data rows; slots: the places of their prompts in the batch; None: 0, 1, ...
        """
        rows, prompts = self.data[label[0] == "eval"]
        samples = 1 if label[0] == "eval" else self.samples
        slots = range(len(picked)) if slots is None else slots
        return [(rows[number], prompts[number], slot, sample)
                for number, slot in zip(picked, slots, strict=True) for sample in range(samples)]


def noise_of(label):
    """The purpose and the iteration that decide a batch's noise. Evaluations have the same."""
    what, iteration, attempt = label
    purpose = f"refill {attempt}" if what == "refill" else what
    return purpose, 0 if what == "eval" else iteration


class Batches:
    """
    The batches of a run: dicts of tensors, with the columns of rollout.generate and
    rollout.score_batch.

    sampler: a rollout.Sampler, scorer: a rewards.Scorer. models: {name: model} of the run. forward:
    a function of (model, micro-batch): what the model says of each response token, (b, R), or a
    tuple that begins with that.
    """

    def __init__(self, schedule, sampler, scorer, models, forward):
        self.schedule, self.sampler, self.scorer = schedule, sampler, scorer
        self.models, self.forward = held(models), forward
        watched.models = self.models
        self.device, self.system = scorer.device, sampler.system
        self.keep = schedule.staleness + 1  # messages that may be under way, see roles.send

    # ---------------------------------------------------------------------------------------------
    # how a batch is cut, and read: all roles

    def minibatches(self, iteration, epoch=0):
        """The rows of each step of an epoch. Every epoch goes over the batch in another order."""
        s = self.schedule
        order = permutation(s.prompts * s.samples, s.seed, "minibatches", iteration, epoch)  # (B,)
        return order.to(self.device).tensor_split(s.num_minibatches)

    def micro_batches(self, batch, rows, whose=None):
        """This rank's micro-batches of these rows of a batch; whose: see my_micro_batches."""
        s = self.schedule
        return my_micro_batches(batch, rows, s.micro_batch_size, s.micro_batch_tokens, whose)

    def read(self, batch, readers, iteration, whole=False):
        """
        A collective: add what models say of each response token to a batch, before an update.
        readers: {name of the column: model}; None, and a column that is there, is left out. whole:
        all rows as one step, and not in the minibatches of the iteration's update.

        The micro-batches are those in which the trainers train, and `forward` is what they train,
        also on a scorer: so equal weights give equal bits, and before the first step the ratio is 1
        to the last bit.
        """
        readers = {name: model for name, model in readers.items()
                   if model is not None and name not in batch}
        # (B, R) each; 0 in the rows of other ranks, and behind the columns that a micro-batch uses
        columns = {name: torch.zeros_like(batch["sampler_logprobs"]) for name in readers}
        rank, size = parallel.rank_and_size()
        trainers = len(roles.ranks.get("train", range(size)))
        # A trainer reads its own rows, a scorer perhaps those of several. A scorer that is left
        # over reads with the last one and drops it: a sharded model needs all in each forward
        turns = range(rank, math.ceil(trainers / size) * size, size)
        with no_grad_forwards(readers.values(), self.device):
            for rows in [batch["index"]] if whole else self.minibatches(iteration):
                for whose in turns:
                    part = min(whose, trainers - 1), trainers
                    for mb in self.micro_batches(batch, rows, part):
                        for name, model in readers.items():
                            said = self.forward(model, mb)
                            said = said if torch.is_tensor(said) else said[0]  # (b, R)
                            if whose < trainers:
                                columns[name][mb["index"], :said.shape[1]] = said
        add_columns(batch, columns, iteration)  # COLLECTIVE

    # ---------------------------------------------------------------------------------------------
    # on the trainers

    def begin(self, run, reward_model, value_model=None):
        """
        A collective: take the batches of the run's checkpoint; let the other roles begin. The
        models, or None: see center_scores.
        """
        self.run = run
        self.sampled = {}  # iteration: its batch, sampled and not yet scored; see `sample`
        self.version = {}  # iteration: that of the weights that sample its batch
        saved = load_batches(run.checkpoint) if run.checkpoint else {}  # COLLECTIVE
        for key, t in saved.items():
            iteration, version, name = key.split(".")
            batch = self.sampled.setdefault(int(iteration), {})
            batch[name] = t.to(self.device)
            self.version[int(iteration)] = int(version)
        kept = list(self.sampled)
        due = self.schedule.versions(run.start, kept)
        self.version |= due
        self.to_come = list(due)  # iterations, in this order
        self.from_generators = due if "generate" in roles.ranks else {}
        for role in [role for role in roles.ranks if role != "train"]:
            roles.send(role, ("begin", 0, 0), start=run.start, kept=kept)
        run.to_save = self.to_save
        self.share_weights(run.start)  # COLLECTIVE
        self.center_scores(reward_model, value_model)  # COLLECTIVE

    def share_weights(self, version):
        """
        A collective, right after an update: the weights of now are this version. The generators get
        them, in the background, where they sample a batch with them. The buffers are copies: the
        next step may change the weights before they have left.
        """
        if version not in self.from_generators.values():
            return
        self.run.enter("weights")
        policy, matrices = self.models["policy"], self.sampler.placement.decoding
        checksum = None
        if self.run.audit_is_due(version):
            checksum = checksum_of(my_weights(policy, matrices))  # COLLECTIVE
        # `send` makes one after the other: all ranks gather what is sharded, and the first one
        # alone holds the whole, in the CPU's memory
        whole = ((name, gather(t, p) if is_shard(p) else t)
                 for name, p, t in my_weights(policy, matrices))
        roles.send("generate", ("weights", version, 0), whole, self.keep, checksum=checksum)

    def rollout(self, iteration):
        """
        A collective: the batch of an iteration, sampled and scored, and its age. With scorers and a
        reference it has ref_logprobs (B, R), too.
        """
        self.run.enter("rollout")
        # not earlier: a stop while a batch is scored, or groups of it are sampled again, saves it
        self.sampled.pop(iteration - 1, None)
        ahead = 0 if self.from_generators else self.schedule.staleness
        self.have(iteration + ahead)  # COLLECTIVE
        label, picked = ("rollout", iteration, 0), self.schedule.rows_of(iteration)
        batch = self.score(label, self.sampled[iteration], picked)  # COLLECTIVE
        return batch, iteration - self.version[iteration]

    def held_out(self, picked):
        """A collective: the policy of now answers the held-out prompts of these numbers."""
        return self.sample_and_score(("eval", self.run.iteration, 0), picked)  # COLLECTIVE

    def refill(self, attempt, picked, slots):
        """
        A collective: batches of other prompts for these places of the iteration's batch, by the
        policy of now; None for no places. It is called for each attempt, 0 .. max_refills - 1.
        """
        label = "refill", self.run.iteration, attempt
        if slots:
            return self.sample_and_score(label, picked, slots)  # COLLECTIVE
        if "score" in roles.ranks:
            roles.send("score", label)
        return None

    def have(self, last):
        """A collective: have the batches up to that of iteration `last`, sampled here or sent."""
        while self.to_come and self.to_come[0] <= last:
            k = self.to_come.pop(0)
            label = "rollout", k, 0
            if self.from_generators:
                self.sampled[k], _ = self.receive("generate", label)  # COLLECTIVE
            else:
                self.sampled[k] = self.sample(label, self.schedule.rows_of(k))  # COLLECTIVE

    def sample_and_score(self, label, picked, slots=None):
        """A collective: a batch, by the policy of now."""
        self.run.enter(noise_of(label)[0])
        sampled = self.sample(label, picked, slots)  # COLLECTIVE
        return self.score(label, sampled, picked, slots)  # COLLECTIVE

    def sample(self, label, picked, slots=None):
        """A collective: the whole batch, as the weights here sample it."""
        wanted = self.schedule.wanted(label, picked, slots)
        mine = self.sampler.sample(wanted, *noise_of(label), launch.stop_asked)  # COLLECTIVE
        self.run.leave_if_stop_asked()  # COLLECTIVE
        return parallel.gather_rows(mine, len(wanted))  # COLLECTIVE

    def score(self, label, batch, picked, slots=None):
        """A collective: a batch that was sampled here, or by generators, with its scores."""
        if label[0] == "rollout":
            self.run.enter("score")
        with self.run.saved_if_it_fails():  # COLLECTIVE
            if "score" not in roles.ranks:
                wanted = self.schedule.wanted(label, picked, slots)
                batch = score_batch(self.scorer, batch, wanted, label[1])  # COLLECTIVE
            else:
                if label[0] != "rollout" or label[1] not in self.from_generators:
                    roles.send("score", label, batch, self.keep, picked=list(picked), slots=slots)
                columns, _ = self.receive("score", label)  # COLLECTIVE
                batch = batch | columns
        self.run.leave_if_stop_asked()  # COLLECTIVE
        return batch

    def receive(self, source, label):
        """A collective: a message of another role, as roles.receive; its tensors on the device."""
        tensors, said = roles.receive(source, label)  # COLLECTIVE
        return {name: t.to(self.device) for name, t in tensors.items()}, said

    def to_save(self):
        """
        A collective: {"ITERATION.VERSION.NAME": tensor} of the batches of this iteration and later
        ones that are sampled by weights that will be gone. Those that are still being sampled are
        waited for.
        """
        tensors, now = {}, self.run.iteration
        for k in [k for k, version in sorted(self.version.items()) if version < now <= k]:
            self.have(k)  # COLLECTIVE
            tensors |= {f"{k}.{self.version[k]}.{name}": t for name, t in self.sampled[k].items()}
        return tensors

    def center_scores(self, reward_model, value_model):
        """
        A collective: where the reward model's config.json has no score_shift, it gets the one after
        which the responses of iteration 0 score 0 on average. Pairs only say by how much scores
        differ, so a reward model of others may score 15 on average. Then the score -1 of a response
        that never ends would be by far the worst there is, and a new value model would begin 15
        off. value_model: one that starts as it and gets the same zero; or None.

        The responses are sampled once more for that alone: so an evaluation before iteration 0 has
        the same zero as all others.
        """
        if reward_model is None or hasattr(reward_model.hf.config, "score_shift"):
            return
        if "score" in roles.ranks:
            raise BadConfig("reward_path: its config.json has no score_shift, and ranks that score "
                            "do not look for one; write one there, or leave score out of roles")
        state = self.run.state
        if state.get("score_shift") is None:
            batch = self.sample_and_score(("rollout", 0, 0), self.schedule.rows_of(0))  # COLLECTIVE
            shift = centering_shift(batch["reward/reward_model"], batch["finished"])
            say(f"the reward model scores {-shift:.3f} on average at first; its scores are shifted "
                "so that this is 0")
            state["score_shift"] = shift
        for model in filter(None, (reward_model, value_model)):
            model.score_shift = state["score_shift"]

    # ---------------------------------------------------------------------------------------------
    # on the others

    def serve(self):
        """
        What a rank that generates or scores does until the run is over; then this ends the process.
        On a trainer it returns at once.
        """
        if roles.role in ("", "train"):
            return
        try:
            _, said = roles.receive("train", ("begin", 0, 0))  # COLLECTIVE
            work = self.sample_for_trainers if roles.role == "generate" else self.score_for_trainers
            work(said["start"], said["kept"])
            parallel.phase = "the end"
            roles.wait_for_the_end()  # COLLECTIVE
        except roles.Ended:
            if roles.role == "generate":
                roles.tell(["score"], ended=True)
        launch.finish()  # COLLECTIVE
        sys.exit(0)

    def sample_for_trainers(self, start, kept):
        """A collective of the generators: sample each batch with the weights that are due."""
        version, frozen = None, {}
        for k, due in self.schedule.versions(start, kept).items():
            if version != due:
                parallel.phase = f"iteration {k}, waiting for weights"
                checksum = take_weights(self.models["policy"], due)  # COLLECTIVE
                version = due
                # of the old weights; the audit would call it a frozen model that has changed
                frozen = {key: x for key, x in frozen.items() if key[0] != "policy"}
            parallel.phase = f"iteration {k}, rollout"
            label, picked = ("rollout", k, 0), self.schedule.rows_of(k)
            wanted = self.schedule.wanted(label, picked)
            with told_if_it_fails():  # COLLECTIVE
                mine = self.sampler.sample(  # COLLECTIVE
                    wanted, *noise_of(label), trainers_have_left)
                leave_with_trainers()  # COLLECTIVE
                sampled = parallel.gather_rows(mine, len(wanted))  # COLLECTIVE
                if checksum:  # the trainers audit their models in the iteration of this version
                    audit(self.models, frozen, k)  # COLLECTIVE
                    check_copy(self.models["policy"], version, checksum, k)  # COLLECTIVE
            for to in ["train"] + ["score"] * ("score" in roles.ranks):
                roles.send(to, label, sampled, self.keep, picked=list(picked), slots=None)

    def score_for_trainers(self, start, kept):
        """A collective of the scorers: score each batch, and read it with the reference."""
        frozen, interval = {}, self.system.sync_check_interval
        for label in self.schedule.to_score(start):
            what, k, _ = label
            from_generators = what == "rollout" and "generate" in roles.ranks and k not in kept
            parallel.phase = f"iteration {k}, waiting for {what}"
            sampled, said = self.receive(  # COLLECTIVE
                "generate" if from_generators else "train", label)
            if not sampled:  # no place to refill
                continue
            parallel.phase = f"iteration {k}, score"
            wanted = self.schedule.wanted(label, said["picked"], said["slots"])
            with told_if_it_fails():  # COLLECTIVE
                if what == "rollout" and (k % interval == 0 or k == start):
                    audit(self.models, frozen, k)  # COLLECTIVE
                batch = score_batch(self.scorer, sampled, wanted, k)  # COLLECTIVE
                reader = dict(ref_logprobs=self.models.get("ref_policy"))
                self.read(batch, reader, k, whole=what != "rollout")  # COLLECTIVE
            columns = {name: t for name, t in batch.items() if name not in sampled}
            roles.send("train", label, columns, self.keep)


def add_columns(batch, columns, iteration):
    """A collective: {name: (B, R)} of this rank's rows, 0 in others, become the batch's."""
    batch |= parallel.all_reduce_sum(columns)  # COLLECTIVE
    check_finite({name: batch[name] for name in columns}, iteration)


def my_weights(policy, matrices=None):
    """
    (name, parameter, this rank's part of it) of a policy. matrices: the dtype in which frozen
    copies of it hold their matrices, see placement.settle; None: as here.
    """
    rounded = {id(p) for p in matrices_of(policy)} if matrices else ()
    for name, p in policy.named_parameters():
        t = my_part(p.detach())
        yield name, p, t.to(matrices) if id(p) in rounded else t


def take_weights(policy, version):
    """A collective of the generators: the policy becomes this version. Returns its checksum."""
    own = dict(policy.named_parameters())
    _, said = roles.receive(  # COLLECTIVE; of a sharded copy only this rank's part stays
        "train", ("weights", version, 0), lambda name, t: fill(own[name], t))
    return said["checksum"]


def check_copy(policy, version, checksum, iteration):
    """A collective of the generators: raise Stop if a copy is not what the trainers have sent."""
    same = checksum_of(my_weights(policy)) == checksum  # COLLECTIVE

    def refuse():
        if not same:
            raise Stop(f"iteration {iteration}: the ranks have drifted apart: a generator's policy "
                       f"of version {version} is not the trainers'")

    together(refuse)  # COLLECTIVE


def trainers_have_left():
    """Whether nobody waits for this rank's work any more."""
    return "left" in roles.heard


def leave_with_trainers():
    """A collective of a role: raise Ended where the trainers have left."""
    left = torch.tensor(float(trainers_have_left()), device=parallel.wire())
    if parallel.all_reduce_max(left):  # COLLECTIVE
        raise roles.Ended


@contextlib.contextmanager
def told_if_it_fails():
    """A collective, if this block fails: the trainers learn why, save, and all leave with that."""
    try:
        yield
    except Lost:
        raise
    except Stop as e:
        roles.fail(e)
        roles.wait_for_the_end()  # COLLECTIVE

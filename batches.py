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
from data import batch_rows
from engine import launch, roles
from engine.audit import audit, checksum_of
from engine.checkpoint import load_batches
from engine.placement import held, matrices_of, no_grad_forwards
from engine.together import together
from errors import BadConfig, Lost, Stop
from parallel import fill, gather, is_shard, my_part
from rewards import centering_shift
from rollout import score_batch


@dataclass
class Schedule:
    """
    What a run samples and scores, in which order. A batch has a label, (what, iteration, attempt):
    what is rollout, eval or refill.

    data: (training rows, their prompts' token ids), and the same of the held-out ones. prompts: of
    an iteration's batch; samples: responses to each of them. The others are keys.
    """

    data: tuple
    seed: int
    max_iters: int
    prompts: int
    eval_interval: int
    staleness: int
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


# --------------------------------------------------------------------------------------------------
# on the trainers


class Batches:
    """
    The batches of a run, for its loop: dicts of tensors, with the columns of rollout.generate and
    rollout.score_batch. sampler: a rollout.Sampler, scorer: a rewards.Scorer.
    """

    def __init__(self, schedule, sampler, scorer, run):
        """A collective: take the batches of the checkpoint; let the other roles begin."""
        self.schedule, self.sampler, self.scorer, self.run = schedule, sampler, scorer, run
        self.policy = run.models["policy"]
        self.keep = schedule.staleness + 1  # messages that may be under way, see roles.send
        self.sampled = {}  # iteration: its batch, sampled and not yet scored
        self.version = {}  # iteration: that of the weights that sample its batch
        saved = load_batches(run.checkpoint) if run.checkpoint else {}  # COLLECTIVE
        for key, t in saved.items():
            iteration, version, name = key.split(".")
            self.sampled.setdefault(int(iteration), {})[name] = t.to(run.device)
            self.version[int(iteration)] = int(version)
        kept = list(self.sampled)
        self.version |= schedule.versions(run.start, kept)
        self.to_come = list(schedule.versions(run.start, kept))  # iterations, in this order
        self.from_generators = set(self.to_come) if "generate" in roles.ranks else set()
        for role in [role for role in roles.ranks if role != "train"]:
            roles.send(role, ("begin", 0, 0), start=run.start, kept=kept)
        run.to_save = self.to_save
        self.share_weights(run.start)  # COLLECTIVE

    def share_weights(self, version):
        """
        A collective, right after an update: the weights of now are this version. The generators get
        them, in the background, where they sample a batch with them. The buffers are copies: the
        next step may change the weights before they have left.
        """
        if all(self.version[k] != version for k in self.from_generators):
            return
        self.run.enter("weights")
        matrices, checksum = self.sampler.placement.decoding, None
        if self.run.audit_is_due(version):
            checksum = checksum_of(my_weights(self.policy, matrices))  # COLLECTIVE
        # `send` makes one after the other: all ranks gather what is sharded, and the first one
        # alone holds the whole, in the CPU's memory
        whole = ((name, gather(t, p) if is_shard(p) else t)
                 for name, p, t in my_weights(self.policy, matrices))
        roles.send("generate", ("weights", version, 0), whole, self.keep, checksum=checksum)

    def rollout(self, iteration):
        """
        A collective: the batch of an iteration, sampled and scored, and its age. With scorers and a
        reference it has ref_logprobs (B, R), too.
        """
        label, picked = ("rollout", iteration, 0), self.schedule.rows_of(iteration)
        if not roles.ranks and self.schedule.staleness == 0:
            return self.sample_and_score(label, picked), 0  # COLLECTIVE
        self.run.enter("rollout")
        while not self.from_generators and self.to_come \
                and self.version[self.to_come[0]] <= iteration:
            ahead = self.to_come[0]
            self.sampled[ahead], _ = self.sample(  # COLLECTIVE
                ("rollout", ahead, 0), self.schedule.rows_of(ahead))
            self.to_come.pop(0)
        self.receive_until(iteration)  # COLLECTIVE
        self.run.leave_if_stop_asked()  # COLLECTIVE
        self.sampled = {k: sampled for k, sampled in self.sampled.items() if k >= iteration}
        batch = self.score(label, self.sampled[iteration], picked)  # COLLECTIVE
        return batch, iteration - self.version[iteration]

    def held_out(self, number):
        """A collective: the responses to the first held-out prompts, by the policy of now."""
        return self.sample_and_score(("eval", self.run.iteration, 0), range(number))  # COLLECTIVE

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

    def sample_and_score(self, label, picked, slots=None):
        """A collective: a batch, by the policy of now."""
        self.run.enter(noise_of(label)[0])
        # where no other ranks score, the rules work on what is sampled while the rest is
        start = self.scorer.start if "score" not in roles.ranks else None
        sampled, started = self.sample(label, picked, slots, start)  # COLLECTIVE
        return self.score(label, sampled, picked, slots, started)  # COLLECTIVE

    def sample(self, label, picked, slots=None, start=None):
        """A collective: the whole batch as the weights here sample it; and see Sampler.sample."""
        wanted = self.schedule.wanted(label, picked, slots)
        mine, started = self.sampler.sample(  # COLLECTIVE
            wanted, *noise_of(label), launch.stop_asked, start)
        self.run.leave_if_stop_asked()  # COLLECTIVE
        return parallel.gather_rows(mine, len(wanted)), started  # COLLECTIVE

    def score(self, label, sampled, picked, slots=None, started=None):
        """A collective: a sampled batch with its scores, here or by the scorers."""
        if label[0] == "rollout":
            self.run.enter("score")
        with self.run.saved_if_it_fails():  # COLLECTIVE
            if "score" not in roles.ranks:
                wanted = self.schedule.wanted(label, picked, slots)
                batch = score_batch(self.scorer, sampled, wanted, label[1], started)  # COLLECTIVE
            else:
                if label[0] != "rollout" or label[1] not in self.from_generators:
                    roles.send("score", label, sampled, self.keep, picked=list(picked), slots=slots)
                columns, _ = roles.receive("score", label)  # COLLECTIVE
                batch = sampled | {name: t.to(self.run.device) for name, t in columns.items()}
        self.run.leave_if_stop_asked()  # COLLECTIVE
        return batch

    def receive_until(self, iteration):
        """A collective: have the batch of an iteration that others sample, and those before it."""
        while iteration not in self.sampled:
            k = self.to_come[0]
            sampled, _ = roles.receive("generate", ("rollout", k, 0))  # COLLECTIVE
            self.sampled[k] = {name: t.to(self.run.device) for name, t in sampled.items()}
            self.to_come.pop(0)

    def to_save(self):
        """
        A collective: {"ITERATION.VERSION.NAME": tensor} of the batches of this iteration and later
        ones that are sampled by weights that will be gone. Those that are still being sampled are
        waited for.
        """
        tensors, now = {}, self.run.iteration
        for k in [k for k, version in sorted(self.version.items()) if version < now <= k]:
            self.receive_until(k)  # COLLECTIVE
            tensors |= {f"{k}.{self.version[k]}.{name}": t for name, t in self.sampled[k].items()}
        return tensors

    def center_scores(self, reward_model, value_model):
        """
        A collective: give a learned score its zero, where the reward model's config.json has no
        score_shift. Pairs only say by how much scores differ, so a reward model of others may score
        15 on average. Then the score -1 of a response that never ends would be by far the worst
        there is, or the best, and a new value model would begin 15 off.

        reward_model: or None. value_model: one that starts as it and gets the same zero; or None.
        They get the score_shift after which the responses of iteration 0 score 0 on average. These
        are sampled here once for that alone: so an evaluation before iteration 0 has the same zero
        as all others, and whether there is one changes nothing in the run.
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
            if self.run.rank == 0:
                print(f"the reward model scores {-shift:.3f} on average at first; its scores are "
                      "shifted so that this is 0", flush=True)
            state["score_shift"] = shift
        reward_model.score_shift = state["score_shift"]
        if value_model is not None:
            value_model.score_shift = state["score_shift"]


def my_weights(policy, matrices=None):
    """
    (name, parameter, this rank's part of it) of a policy. matrices: the dtype in which frozen
    copies of it hold their matrices, see placement.settle; None: as here.
    """
    rounded = {id(p) for p in matrices_of(policy)} if matrices else ()
    for name, p in policy.named_parameters():
        t = my_part(p.detach())
        yield name, p, t.to(matrices) if id(p) in rounded else t


# --------------------------------------------------------------------------------------------------
# on the others


def generate_or_score(schedule, sampler, scorer, models, read, minibatches_of, micro_batches):
    """
    What a rank that generates or scores does until the run is over; then this function ends the
    process. On a trainer it returns at once. models: {name: model} of the run. The functions say
    how the trainers read: read(model, micro-batch), (b, R); minibatches_of(iteration), the rows of
    each step of the first epoch; micro_batches(batch, rows, whose), see data.my_micro_batches.
    """
    if roles.role in ("", "train"):
        return
    models = held(models)
    try:
        _, begun = roles.receive("train", ("begin", 0, 0))  # COLLECTIVE
        begun = begun["start"], begun["kept"]
        if roles.role == "generate":
            generate(schedule, *begun, sampler, models)  # COLLECTIVE
        else:
            interval = sampler.system.sync_check_interval
            score(schedule, *begun, scorer, models, interval,  # COLLECTIVE
                  read, minibatches_of, micro_batches)
        parallel.phase = "the end"
        roles.wait_for_the_end()  # COLLECTIVE
    except roles.Ended:
        if roles.role == "generate":
            roles.tell(["score"], ended=True)
    launch.finish()  # COLLECTIVE
    sys.exit(0)


def generate(schedule, start, kept, sampler, models):
    """A collective of the generators: sample each batch with the weights that are due."""
    policy, version, frozen = models["policy"], None, {}
    others = ["train"] + ["score"] * ("score" in roles.ranks)
    for k, due in schedule.versions(start, kept).items():
        if version != due:
            parallel.phase = f"iteration {k}, waiting for weights"
            checksum = take_weights(policy, due)  # COLLECTIVE
            # forget its old checksum, or the audit would call it a frozen model that has changed
            version, frozen = due, {key: x for key, x in frozen.items() if key[0] != "policy"}
        parallel.phase = f"iteration {k}, rollout"
        label, picked = ("rollout", k, 0), schedule.rows_of(k)
        wanted = schedule.wanted(label, picked)
        with told_if_it_fails():  # COLLECTIVE
            mine, _ = sampler.sample(  # COLLECTIVE
                wanted, *noise_of(label), trainers_have_left)
            leave_with_trainers()  # COLLECTIVE
            sampled = parallel.gather_rows(mine, len(wanted))  # COLLECTIVE
            if checksum:  # the trainers audit their models in the iteration of this version
                audit(models, frozen, k)  # COLLECTIVE
                check_copy(policy, version, checksum, k)  # COLLECTIVE
        for to in others:
            roles.send(to, label, sampled, schedule.staleness + 1, picked=list(picked), slots=None)


def take_weights(policy, version):
    """A collective of the generators: the policy becomes this version. Returns its checksum."""
    own = dict(policy.named_parameters())
    said = roles.receive_each(  # COLLECTIVE; of a sharded copy only this rank's part stays
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


def score(schedule, start, kept, scorer, models, interval, read, minibatches_of, micro_batches):
    """A collective of the scorers: score each batch, and read it with the reference."""
    frozen, device, ref_policy = {}, scorer.device, models.get("ref_policy")
    for label in schedule.to_score(start):
        what, k, _ = label
        from_generators = what == "rollout" and "generate" in roles.ranks and k not in kept
        parallel.phase = f"iteration {k}, waiting for {what}"
        sampled, said = roles.receive(  # COLLECTIVE
            "generate" if from_generators else "train", label)
        leave_with_trainers()  # COLLECTIVE
        if not sampled:  # no place to refill
            continue
        parallel.phase = f"iteration {k}, score"
        sampled = {name: t.to(device) for name, t in sampled.items()}
        wanted = schedule.wanted(label, said["picked"], said["slots"])
        with told_if_it_fails():  # COLLECTIVE
            if what == "rollout" and (k % interval == 0 or k == start):
                audit(models, frozen, k)  # COLLECTIVE
            batch = score_batch(scorer, sampled, wanted, k)  # COLLECTIVE
            if ref_policy is not None:
                minibatches = [batch["index"]] if what != "rollout" else minibatches_of(k)
                batch["ref_logprobs"] = read_as_trainers(  # COLLECTIVE
                    ref_policy, batch, read, minibatches, micro_batches)
        columns = {name: t for name, t in batch.items() if name not in sampled}
        roles.send("train", label, columns, schedule.staleness + 1)


def read_as_trainers(ref_policy, batch, read, minibatches, micro_batches):
    """
    A collective of the scorers: the reference's log-probs of a batch, (B, R). It is read in the
    micro-batches in which the trainers train, so that equal weights give equal bits.
    """
    column = torch.zeros_like(batch["sampler_logprobs"])
    rank, size = parallel.rank_and_size()
    trainers = len(roles.ranks["train"])
    with no_grad_forwards([ref_policy], column.device):
        for rows in minibatches:
            for turn in range(math.ceil(trainers / size)):
                # The micro-batches of trainer `whose`. A rank without a trainer runs the last
                # one's and drops the result: a sharded model needs all ranks in each forward.
                whose = turn * size + rank
                part = min(whose, trainers - 1), trainers
                for mb in micro_batches(batch, rows, part):
                    logprobs = read(ref_policy, mb)
                    if whose < trainers:
                        column[mb["index"], :logprobs.shape[1]] = logprobs
    return parallel.all_reduce_sum(dict(ref_logprobs=column))["ref_logprobs"]  # COLLECTIVE


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

"""
The keys roles and staleness. Without them every rank does everything, one phase after the other:
each batch is sampled, scored and read in its own iteration of ppo.py or grpo.py. With them

    roles = "train=6,generate=1,score=1"    ranks of their own sample, and score
    staleness = 1                           the batch is sampled one update ahead

The trainers run the loop. They have policy and value model. A generator has a copy of the policy in
the dtype in which it decodes; a scorer has reference and reward model. Without generators, or
without scorers, the trainers do that work.

A version is the number of the iteration that begins with these weights. The batch of iteration k is
always sampled by version max(0, k - staleness), even if a newer one is there. So each rank knows
from the iteration alone which messages it sends and receives next:

    generators   for each k: take the weights that are due; sample batch k; send it
    scorers      for each k: held-out prompts, if they are due, batch k, refills: score them; send
    trainers     the loop, which receives in the same order, and sends new weights after each update

and the texts of a run do not depend on the ranks' speed, or on the number of ranks in each role.
With staleness 1 the generators sample the batch of iteration k + 1 while the trainers train on that
of k. The trainers sample held-out prompts and refills, because they have the newest policy.

The age of a batch is the number of updates since the policy that sampled it. If it is above 0,
old_logprobs are from that older policy: the clipped ratio of PPO and GRPO is then policy of now /
older policy. With importance_cap the policy that begins the update reads the batch first: the ratio
is to this policy, and the older one gives a weight (loss.importance_weights).

In the scripts: an Ahead replaces their functions `sample` and `score`; ranks of other roles stay in
`serve`; `begin` and `share_weights` are called before the loop and after each update.
options/messages.py sends the messages.
"""
import contextlib
import hashlib
import math
import sys

import torch

import errors
import launch
import parallel
from audit import as_words, audit, first_word, watched, weighted_sum
from checkpoint import read_tensors
from configurator import BadInput, Lost, Stop
from models import dtypes, present, matrices_of
from options import messages
from parallel import all_gather, fill, gather_parts, is_shard, my_part, wire
from prompts import micro_batch
from rollout import read_batch
from together import patience, together


def check_ahead(system):
    """Raise BadInput where keys do not go together."""
    if system.roles and system.generate_tp > 1:
        raise BadInput("generate_tp with roles: ranks with roles sample each for itself; leave "
                        "one of the two out")


class Ahead:
    """
    Batches that are sampled ahead of the update, here or by ranks of their own. A batch has a
    label, (purpose, iteration); purpose is rollout, eval, "refill 0", "refill 1", ...

    system: the shared keys. models: {name: model} of the run. max_iters, max_refills,
    eval_interval: keys of the script (eval_interval 0: nothing is held out). The others are
    functions of the script: rows_of(iteration), the data rows of its batch; sample, score,
    minibatches, micro_batches and forward. Raises BadInput.
    """

    def __init__(self, system, device, models, max_iters, max_refills, eval_interval, rows_of,
                 sample, score, minibatches, micro_batches, forward):
        reward_model = models.get("reward_model")
        if "score" in parallel.roles and reward_model is not None and not hasattr(
                reward_model.hf.config, "score_shift"):
            raise BadInput("reward_path: its config.json has no score_shift, and ranks that score "
                            "do not look for one; write one there, or leave score out of roles")
        self.system, self.device = system, device
        self.models = watched.models = present(models)
        self.max_iters, self.max_refills = max_iters, max_refills
        self.eval_interval, self.rows_of = eval_interval, rows_of
        self.sample_now, self.score_here = sample, score
        self.minibatches, self.micro_batches = minibatches, micro_batches
        self.forward = forward
        self.keep = self.system.staleness + 1  # messages that may be on their way at once
        if parallel.roles:
            errors.leaving = messages.fail_and_leave  # the roles tell each other their errors

    def versions(self, start, kept=()):
        """
        {iteration: the version that samples its batch}, in the order of sampling, of a run that
        begins with iteration `start`. kept: iterations with batches that are there already.
        """
        return versions(start, self.max_iters, self.system.staleness, kept)

    # ---------------------------------------------------------------------------------------------
    # on the trainers

    def begin(self, run):
        """A collective: take the batches of the run's checkpoint; let the other roles begin."""
        self.run = run
        self.sampled = {}  # iteration: its batch, sampled and not yet scored
        self.version = {}  # iteration: the version of the weights that sample its batch
        saved = {}
        if run.checkpoint:
            with patience():
                saved = together(lambda: read_tensors(run.checkpoint, "batches"))  # COLLECTIVE
        for key, t in saved.items():
            iteration, version, name = key.split(".")
            batch = self.sampled.setdefault(int(iteration), {})
            batch[name] = t.to(self.device)
            self.version[int(iteration)] = int(version)
        kept = list(self.sampled)
        due = self.versions(run.start, kept)
        self.version |= due
        self.to_come = list(due)  # iterations, in this order
        self.from_generators = due if "generate" in parallel.roles else {}
        for role in [role for role in parallel.roles if role != "train"]:
            messages.send(role, ("begin", 0), start=run.start, kept=kept)
        run.to_save = self.to_save
        self.share_weights(run.start)  # COLLECTIVE

    def age(self, iteration):
        """The number of updates since the policy that sampled the batch of an iteration."""
        return iteration - self.version[iteration]

    def sample(self, purpose, iteration, row_numbers, *slots):
        """A collective, in the place of the script's `sample`: a whole batch, not yet scored."""
        if purpose != "rollout":
            return self.sample_now(purpose, iteration, row_numbers, *slots)  # COLLECTIVE
        # not earlier: a stop during the scoring or a refill of a batch still has to save it
        self.sampled.pop(iteration - 1, None)
        self.have(iteration + (0 if self.from_generators else self.system.staleness))  # COLLECTIVE
        return self.sampled[iteration]

    def have(self, last):
        """A collective: have the batches up to that of iteration `last`, sampled here or sent."""
        while self.to_come and self.to_come[0] <= last:
            k = self.to_come.pop(0)
            if self.from_generators:
                self.sampled[k], _ = self.receive("generate", ("rollout", k))  # COLLECTIVE
            else:
                self.sampled[k] = self.sample_now("rollout", k, self.rows_of(k))  # COLLECTIVE

    def score(self, purpose, iteration, batch):
        """
        A collective, in the place of the script's `score`: a batch with its scores. Scorers with a
        reference also add ref_logprobs (B, R).
        """
        if "score" not in parallel.roles:
            return self.score_here(purpose, iteration, batch)  # COLLECTIVE
        label = purpose, iteration
        if purpose != "rollout" or iteration not in self.from_generators:
            messages.send("score", label, batch, self.keep)
        columns, _ = self.receive("score", label)  # COLLECTIVE
        return batch | columns

    def nothing_to_refill(self, purpose, iteration):
        """Scorers wait for each refill: there is none this time."""
        if "score" in parallel.roles:
            messages.send("score", (purpose, iteration))

    def receive(self, source, label):
        """A collective: a message of another role; its tensors are on the device."""
        tensors, fields = messages.receive(source, label)  # COLLECTIVE
        return {name: t.to(self.device) for name, t in tensors.items()}, fields

    def share_weights(self, version):
        """
        A collective, right after an update: the present weights are this version. The generators
        get them, in the background, if they sample a batch with them. Copies are sent, because the
        next step may change the weights before they are sent.
        """
        if version not in self.from_generators.values():
            return
        self.run.enter("weights")
        policy, (_, matrices) = self.models["policy"], dtypes(self.system)
        checksum = None
        if self.run.audit_is_due(version):
            checksum = checksum_of(my_weights(policy, matrices))  # COLLECTIVE
        # `send` makes one tensor after the other: all ranks gather a sharded tensor, and only the
        # first one keeps the whole, in the CPU's memory
        whole = ((name, gather_parts(t, p) if is_shard(p) else t)  # COLLECTIVE
                 for name, p, t in my_weights(policy, matrices))
        messages.send("generate", ("weights", version), whole, self.keep, checksum=checksum)

    def to_save(self):
        """
        A collective: {"ITERATION.VERSION.NAME": tensor} of the batches of this iteration and later
        ones from older weights, which a resumed run would not have. It waits for batches that are
        still being sampled.
        """
        tensors, now = {}, self.run.iteration
        for k in [k for k, version in sorted(self.version.items()) if version < now <= k]:
            self.have(k)  # COLLECTIVE
            tensors |= {f"{k}.{self.version[k]}.{name}": t for name, t in self.sampled[k].items()}
        return tensors

    # ---------------------------------------------------------------------------------------------
    # on the others

    def serve(self):
        """
        The work of a rank that generates or scores, until the run is over; then the process ends.
        On a trainer it returns at once.
        """
        if parallel.role in ("", "train"):
            return
        try:
            _, fields = messages.receive("train", ("begin", 0))  # COLLECTIVE
            generates = parallel.role == "generate"
            work = self.sample_for_trainers if generates else self.score_for_trainers
            work(fields["start"], fields["kept"])  # COLLECTIVE
            parallel.phase = "the end"
            messages.wait_for_the_end()  # COLLECTIVE
        except messages.Ended:
            if parallel.role == "generate":
                messages.tell(["score"], ended=True)
        launch.finish()  # COLLECTIVE
        sys.exit(0)

    def sample_for_trainers(self, start, kept):
        """A collective of the generators: sample each batch with the weights that are due."""
        version, frozen = None, {}
        for k, due in self.versions(start, kept).items():
            if version != due:
                parallel.phase = f"iteration {k}, waiting for weights"
                checksum = take_weights(self.models["policy"], due)  # COLLECTIVE
                version = due
                # no checksums of the old weights: the audit would see a frozen model that changes
                frozen = {key: x for key, x in frozen.items() if key[0] != "policy"}
            parallel.phase = f"iteration {k}, rollout"
            with told_if_it_fails():  # COLLECTIVE
                sampled = self.sample_now(  # COLLECTIVE
                    "rollout", k, self.rows_of(k), stop=trainers_have_left)
                leave_with_trainers()  # COLLECTIVE
                if checksum:  # the trainers audit their models in the iteration of this version
                    audit(self.models, frozen, k)  # COLLECTIVE
                    check_copy(self.models["policy"], version, checksum, k)  # COLLECTIVE
            for to in ["train"] + ["score"] * ("score" in parallel.roles):
                messages.send(to, ("rollout", k), sampled, self.keep)

    def score_for_trainers(self, start, kept):
        """A collective of the scorers: score each batch, and read it with the reference."""
        frozen, interval = {}, self.system.sync_check_interval
        for purpose, k in to_score(start, self.max_iters, self.max_refills, self.eval_interval):
            from_generators = (purpose == "rollout" and "generate" in parallel.roles
                               and k not in kept)
            parallel.phase = f"iteration {k}, waiting for {purpose}"
            sampled, _ = self.receive(  # COLLECTIVE
                "generate" if from_generators else "train", (purpose, k))
            if not sampled:  # no place to refill
                continue
            parallel.phase = f"iteration {k}, score"
            with told_if_it_fails():  # COLLECTIVE
                if purpose == "rollout" and (k % interval == 0 or k == start):
                    audit(self.models, frozen, k)  # COLLECTIVE
                batch = self.score_here(purpose, k, sampled)  # COLLECTIVE
                reader = dict(ref_logprobs=self.models.get("ref_policy"))
                steps = self.minibatches(k) if purpose == "rollout" else [batch["index"]]
                read_batch(batch, reader, self.forward,  # COLLECTIVE
                           self.micro_batches_of_trainers(batch, steps), k, self.device)
            columns = {name: t for name, t in batch.items() if name not in sampled}
            messages.send("train", (purpose, k), columns, self.keep)

    def micro_batches_of_trainers(self, batch, steps):
        """
        The micro-batches of the trainers, dealt to the scorers: a scorer may get those of several
        trainers. A scorer without a trainer reads equally many, without rows, because a sharded
        model needs all ranks in each forward.
        """
        rank, size = parallel.rank_and_size()
        trainers = len(parallel.roles["train"])
        for rows in steps:
            for number in range(rank, math.ceil(trainers / size) * size, size):
                part = min(number, trainers - 1), trainers
                for mb in self.micro_batches(batch, rows, part):
                    yield mb if number < trainers else micro_batch(batch, rows[:0])


def versions(start, max_iters, staleness, kept=()):
    """See Ahead.versions."""
    return {k: max(start, k - staleness) for k in range(start, max_iters) if k not in kept}


def to_score(start, max_iters, max_refills, eval_interval):
    """The labels of the scored batches, in order. eval_interval: 0 = nothing is held out."""
    for k in range(start, max_iters + 1):
        if eval_interval and (k % eval_interval == 0 or k == max_iters):
            yield "eval", k
        if k < max_iters:
            yield "rollout", k
            yield from ((f"refill {attempt}", k) for attempt in range(max_refills))


def my_weights(policy, matrices=None):
    """
    (name, parameter, this rank's part of it) of a policy. matrices: the dtype of the matrices in
    frozen copies of it, see models.settle; None: the same as here.
    """
    rounded = {id(p) for p in matrices_of(policy)} if matrices else ()
    for name, p in policy.named_parameters():
        t = my_part(p.detach())
        yield name, p, t.to(matrices) if id(p) in rounded else t


def checksum_of(parts):
    """
    A collective: a hash of a model's weights, as text. It changes with each bit, and does not
    depend on the number of ranks that have parts. parts: (name, parameter, this rank's part of it,
    in any dtype), see my_weights.
    """
    found = [(is_shard(p), weighted_sum(as_words(t), first_word(p)).to(wire()))
             for _, p, t in parts]
    mine = torch.stack([total for _, total in found])
    of_all = torch.stack(all_gather(mine)).sum(0)  # COLLECTIVE; int64, which wraps around
    sums = [int((of_all if split else mine)[i]) for i, (split, _) in enumerate(found)]
    return hashlib.blake2b(repr(sums).encode(), digest_size=8).hexdigest()


def take_weights(policy, version):
    """A collective of the generators: the policy becomes this version. Returns its checksum."""
    own = dict(policy.named_parameters())
    _, fields = messages.receive(  # COLLECTIVE; of a sharded copy only this rank's part stays
        "train", ("weights", version), lambda name, t: fill(own[name], t))
    return fields["checksum"]


def check_copy(policy, version, checksum, iteration):
    """A collective of the generators: raise Stop if a copy differs from the trainers' weights."""
    same = checksum_of(my_weights(policy)) == checksum  # COLLECTIVE

    def refuse():
        if not same:
            raise Stop(f"iteration {iteration}: the ranks have drifted apart: a generator's policy "
                       f"of version {version} is not the trainers'")

    together(refuse)  # COLLECTIVE


def trainers_have_left():
    """Whether the trainers have left: nobody waits for this rank's work."""
    return messages.trainers_left


def leave_with_trainers():
    """A collective of a role: raise Ended where the trainers have left."""
    left = torch.tensor(float(trainers_have_left()), device=parallel.wire())
    if parallel.all_reduce_max(left):  # COLLECTIVE
        raise messages.Ended


@contextlib.contextmanager
def told_if_it_fails():
    """A collective, if this block fails: the trainers get the error, save, and all ranks leave."""
    try:
        yield
    except Lost:
        raise
    except Stop as e:
        messages.fail(e)
        messages.wait_for_the_end()  # COLLECTIVE

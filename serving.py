"""
The work of ranks that only sample, or only score. They load their models as all ranks do, but they
never reach the loop of ppo.py or grpo.py. They do the jobs that the trainers give them, one after
the other, until the run is over. batches.py is the trainers' side of it.

    job           a generator                              a scorer
    weights       takes a new version of the policy        -
    sample        samples a batch, sends it on             scores it when it is there, sends that
    score         -                                        the same for a batch from the trainers
    reference     -                                        takes the policy as its new reference
    center        -                                        finds the zero of its reward models
    save, load    -                                        puts its reference into a checkpoint
    audit         has any model changed that may not?      the same
    leave         ends                                     ends
"""
import math
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import torch

import parallel
from batches import Order, my_weights, order_of
from data import my_micro_batches, permutation
from engine import launch
from engine.audit import audit, checksum_of
from engine.build import autocast
from engine.checkpoint import save_model
from engine.crew import ROLES
from engine.placement import held, no_grad_forwards, refill
from engine.together import patience, together
from errors import Lost, Stop
from loss import response_logprobs
from parallel import fill
from rewards import Scorer, zero_is_known
from rollout import new_shifts, sample_share, score_batch


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
                     if name.startswith("reward_model")]
    threads = ThreadPoolExecutor(1, initializer=launch.begin_thread, initargs=[device])
    scorer = Scorer(config, terms, reward_models, *tokenizers, threads, device, judge)
    if crew.role == "generate":
        worker = Generator(config, models, tokenizers[0], data, device)
    else:
        worker = ScoringRank(config, models, scorer, data, device)
    iteration, trouble = 0, None  # trouble: the first error in a job
    while True:
        parallel.phase = f"iteration {iteration}, waiting for work"
        number, job = crew.next_job()
        if job["do"] == "leave":
            break
        iteration = job.get("iteration", iteration)
        parallel.phase = f"iteration {iteration}, {job.get('purpose', job['do'])}"
        try:
            if trouble and job["do"] != "save":  # what was learned so far can be saved
                raise trouble
            if job["do"] == "audit":
                worker.audit(iteration)
            else:
                worker(number, job)
        except Stop as e:
            if isinstance(e, Lost):
                raise
            trouble = e  # every later job but save is answered with it
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
        # forget its old checksum, or the audit would call it a frozen model that has changed
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


def take_policy(crew, number, model):
    """A collective of a role: fill a model with the policy that the trainers send with a job."""
    said = crew.hear(number, "train")  # COLLECTIVE
    own = dict(model.named_parameters())
    for tensors in crew.take(said, "train"):  # COLLECTIVE
        for name, t in tensors.items():
            fill(own[name], t)  # of a sharded copy only this rank's part stays


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
            wanted = order.wanted(self.data, self.config)
            shifts = new_shifts(unknown, self.scorer, sampled, wanted)  # COLLECTIVE
            self.crew.say(number, "train", shifts=shifts)
        for reward_model, shift in zip(unknown, shifts, strict=True):
            reward_model.score_shift = shift

    def load_or_save(self, number, job):
        """A collective: the reference, in or from the folder of a checkpoint."""
        folder, saved = os.path.join(job["folder"], "ref_policy"), {}
        if job["do"] == "load":
            with patience():
                together(lambda: refill(self.ref_policy, folder))  # COLLECTIVE
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
                    # The micro-batches of trainer `whose`. A rank without a trainer runs the last
                    # one's and drops the result: a sharded model needs all ranks in each forward.
                    whose = turn * size + rank
                    part = min(whose, trainers - 1), trainers
                    for mb in my_micro_batches(batch, rows, c, part):
                        logprobs, _ = response_logprobs(
                            self.ref_policy, mb, c["temperature"], self.scorer.tokenizer.vocab_size,
                            c["head_chunk"], entropy=False)
                        if whose < trainers:
                            columns[mb["index"], :logprobs.shape[1]] = logprobs
        return parallel.all_reduce_sum(dict(ref_logprobs=columns))["ref_logprobs"]  # COLLECTIVE

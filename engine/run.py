"""
What a run keeps beside the algorithm: which phase it is in and for how long, requests to stop,
the audit, checkpoints, the log, what it prints, and at the end its products.

The scripts hold one Run and call it by one line at a time. It decides nothing about training.
"""
import contextlib
import math
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import torch

import errors
import parallel
from engine import launch, roles
from engine.audit import audit, check_finite, must_agree
from engine.checkpoint import load_checkpoint, save_checkpoint, save_final
from engine.disk import sha256
from engine.judging import judged_by_reference
from engine.optimizers import overflowed
from engine.placement import held, sharded
from engine.report import (flops_a_token, importance_of, peak_flops, print_models, print_samples,
                           progress, samples_of, speed)
from engine.reward_mix import files_of
from engine.run_folder import data_hashes, fingerprint, open_run
from engine.run_log import write_log, write_samples
from engine.together import agree
from engine.trackers import start_trackers
from errors import Lost, Stop
from loss import gap, gap_limit

# a run that goes on must have these keys as they were
MUST_MATCH = ("seed", "batch_size", "group_size", "lora", "share_base", "value_init", "optim",
              "ref_path", "staleness")
# with staleness > 0 also these: the checkpoint has batches that were sampled with them
MUST_MATCH_AHEAD = ("max_new_tokens",)
SAMPLES = 16  # of each evaluation, in samples.jsonl


def ranks_agree(config, models, tokenizers):
    """
    A collective. Raise BadConfig, on all ranks, unless all have the same code, settings, data and
    tokenizers, and those of one role the same weights. models: {name: model}.
    """
    files = files_of(config["reward_functions"])
    contents = {f"the content of {path}": sha256(path) for path in files}
    contents |= data_hashes(config["prompts_path"], config["eval_path"], config.get("ptx_path"))
    weights = {f"the weights of {name}": fingerprint(model)
               for name, model in held(models).items()}
    same = config | contents
    same |= {"the tokenizers": [t.fingerprint for t in tokenizers if t is not None]}
    if not roles.ranks:
        agree(same | weights)  # COLLECTIVE
        return
    with parallel.everyone():
        agree(same)  # COLLECTIVE
    agree(weights)  # COLLECTIVE
    errors.leaving = roles.fail_and_leave  # from now on the roles tell each other their errors


class Run:
    """
    models: {name: model}, also those that ranks of other roles hold; optimizers: {name: optimizer},
    of those that are trained. prompts: (training prompts, held-out prompts), lists of token ids.
    state: what the loop carries from one iteration to the next beside weights and optimizers, as
    plain numbers: it is saved with every checkpoint, and self.state is what to go on with. ema: the
    policy's moving average or None.

    Opens the run's folder and, where it has a checkpoint, loads that.
    """

    def __init__(self, config, models, optimizers, tokenizer, prompts, device, state, ema=None):
        self.config, self.models, self.optimizers = config, held(models), optimizers
        self.tokenizer, self.device, self.ema = tokenizer, device, ema
        self.rank, self.world_size = parallel.rank_and_size()
        self.out_dir = config["out_dir"]
        self.trained = {name: models[name] for name in optimizers}
        # for rules; slow ones wait for processes of their own
        self.threads = ThreadPoolExecutor(1, initializer=launch.begin_thread, initargs=[device])
        self.any_sharded = any(map(sharded, self.models.values()))

        # files and folders whose contents may not change before a run resumes
        sources = ["policy_path", "prompts_path"]
        if "reward_model" in models:
            sources.append("reward_path")
        if "judge" in models and not judged_by_reference(config):
            sources.append("judge_path")
        sources += [key for key in ["judge_template"]
                    if os.path.isfile(config[key])]
        if config["ref_path"]:
            sources.append("ref_path")
        if config.get("ptx_path"):
            sources.append("ptx_path")
        must_match = [key for key in MUST_MATCH if key in config] + sources
        must_match += MUST_MATCH_AHEAD if config["staleness"] else ()
        self.checkpoint, saved = open_run(  # COLLECTIVE
            self.out_dir, config, must_match, sources, token_ids=prompts[0])
        fresh = dict(iteration=0, best_score=None, loss_scale=2.0**16, clean_steps=0, skipped=0)
        self.state = fresh | state | (saved or {})
        if self.checkpoint:
            load_checkpoint(self.checkpoint, self.trained, optimizers, ema)  # COLLECTIVE
        self.start = self.iteration = self.state["iteration"]
        start_trackers(config["report_to"], self.out_dir, config, self.start)  # COLLECTIVE

        self.reward_model = models.get("reward_model")  # also where other ranks hold it
        self.peak = peak_flops(config, device)
        self.forward_flops = {name: flops_a_token(model) for name, model in self.models.items()}
        self.training_flops = sum(flops_a_token(model, trained=True)
                                  for model in self.trained.values())
        self.frozen_checksums = {}  # filled by the first audit
        self.gap_said = False  # a large gap of the sampler's in 16 bits is said once
        self.policy_reads = True  # a batch before its update; grpo.py may do without
        self.batches = None  # batches.Batches, which sets it
        self.batch_age = 0  # how many updates ago the policy was that has sampled the batch
        self.times, self.phase = {}, "start"
        self.clock, self.began = time.perf_counter(), time.time()

    def announce(self, passes):
        """Print what runs where. passes: how often an iteration goes over its batch."""
        if self.rank > 0:
            return
        batch_size, minibatches = self.config["batch_size"], self.config["num_minibatches"]
        print_models(self.models)
        ranks = f"{self.world_size} rank(s)"
        if roles.ranks:
            ranks = f"ranks with roles ({self.config['roles']})"
        print(f"{ranks} on {self.device.type}, {self.config['dtype']}, "
              f"an iteration is {batch_size} responses and {passes} x {minibatches} steps "
              f"on {batch_size // minibatches} of them")
        if self.checkpoint:
            print(f"resuming from {self.checkpoint}")
        else:
            print(f"writing to {self.out_dir}")

    # phases

    def enter(self, phase):
        """
        Begin a phase of the iteration. Its seconds are counted until the next one begins, and
        errors name it.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.times[self.phase] = self.times.get(self.phase, 0.0) + now - self.clock
        self.phase, self.clock = phase, now
        parallel.phase = f"iteration {self.iteration}, {phase}"

    def begin(self, iteration):
        """A collective when the audit is due: begin an iteration, and count its seconds."""
        self.iteration, self.batch_age = iteration, 0
        self.enter("audit")
        self.times.clear()
        if self.audit_is_due():
            audit(self.models, self.frozen_checksums, iteration)  # COLLECTIVE

    def audit_is_due(self, iteration=None):
        iteration = self.iteration if iteration is None else iteration
        return iteration % self.config["sync_check_interval"] == 0 or iteration == self.start

    # checkpoints, and requests to stop

    def save_if_due(self):
        """
        A collective when a checkpoint is due. It says: this iteration comes next. So it is made
        before the update.
        """
        interval = self.config["checkpoint_interval"]
        due = interval > 0 and self.iteration > self.start and self.iteration % interval == 0
        if due or self.iteration == self.config["max_iters"]:
            self.save()  # COLLECTIVE

    def save(self):
        """A collective: audit, and write a checkpoint."""
        self.enter("checkpoint")
        audit(self.models, self.frozen_checksums, self.iteration)  # COLLECTIVE
        save_checkpoint(  # COLLECTIVE
            self.out_dir, self.iteration, self.trained, self.optimizers, self.state, self.tokenizer,
            self.config["keep_checkpoints"], self.ema, self.batches and self.batches.to_save())

    def save_as(self, name):
        """A collective: save the policy as it is now as out_dir/name."""
        save_final(self.out_dir, name, self.models["policy"], self.tokenizer,
                   self.config)  # COLLECTIVE

    def leave_if_stop_asked(self):
        """
        A collective: after SIGTERM or Ctrl-C on any rank all ranks save and exit together. An
        iteration that has begun is begun again by the run that resumes, and samples the same.
        """
        if not launch.stop_agreed():  # COLLECTIVE
            return
        self.save()  # COLLECTIVE
        if self.rank == 0:
            print(f"stopped before the update of iteration {self.iteration}, and saved; "
                  "resume with the same command")
        self.threads.shutdown(wait=False, cancel_futures=True)
        roles.end()
        launch.finish()  # COLLECTIVE
        sys.exit(0)

    @contextlib.contextmanager
    def saved_if_it_fails(self):
        """
        A collective, if in this block a reward fails: all ranks know it, and what was learned so
        far is kept.
        """
        try:
            yield
        except Stop as e:
            if isinstance(e, Lost) or self.iteration == self.start:
                raise
            self.save()  # COLLECTIVE
            raise Stop(f"{e}. The run is saved before iteration {self.iteration}: the same command "
                       "goes on from there") from e

    def until_stop_asked(self, items):
        """
        The items, one by one, until this rank is asked to stop. The rest may be skipped, for all
        ranks leave at the next leave_if_stop_asked. But where models are sharded all ranks must run
        the same forwards: there no item is skipped.
        """
        for item in items:
            if launch.stop_asked() and not self.any_sharded:
                return
            yield item

    # checks

    def gap(self, logprobs, old_logprobs, mask):
        """How far two log-probs (B, R) that are equal on paper are from each other, in nats."""
        return gap(logprobs - old_logprobs, mask, self.config["dtype"])

    def must_agree(self, worst_gap, what):
        """
        A collective: the largest gap of any rank. Raises Stop, on all ranks, where it is more than
        rounding explains: before any update the log-probs of `what` must be the policy's. (Where an
        older policy has sampled the batch, they are not: then it is only measured.)

        The sampler's gap in 16 bits is an exception. It is other kernels that compute there, and
        how far their rounding goes depends on how deep the model is: no limit suits all models. So
        a large gap is said once, and does not stop the run.
        """
        if self.batch_age and (what == "the sampler" or not self.config["importance_cap"]):
            return parallel.all_reduce_max(worst_gap).item()  # COLLECTIVE
        dtype, limit = self.config["dtype"], gap_limit(self.config["dtype"],
                                                       self.config["temperature"])
        if what != "the sampler" or dtype not in ("bfloat16", "float16"):
            return must_agree(worst_gap, limit, what, self.iteration, self.models)  # COLLECTIVE
        stop = math.inf
        worst = must_agree(worst_gap, stop, what, self.iteration, self.models)  # COLLECTIVE
        if worst > limit and not self.gap_said:
            self.gap_said = True
            if self.rank == 0:
                print(f"warning: in {dtype} the sampler's log-probs differ from those of the "
                      f"training forward by {worst:.2g} nats a token (rounding is mostly below "
                      f"{limit:g}), so its tokens are a little off-policy; --importance_cap=2 "
                      "corrects for it",
                      flush=True)
        return worst

    def add_readings(self, batch, columns):
        """
        A collective: add what the models say of each response token to the batch. columns: {name:
        (B, R)}, on each rank 0 but in its own rows. If old_logprobs are among them: the sampler's
        log-probs must be the same, and where the reference is the policy as it is now (in iteration
        0), the reference's, too; returns the sampler's gap, in nats.
        """
        batch |= parallel.all_reduce_sum(columns)  # COLLECTIVE: the rows of all ranks
        check_finite({name: batch[name] for name in columns}, self.iteration)
        if "old_logprobs" not in columns:
            return None
        others = dict(sampler_logprobs="the sampler")
        if self.iteration == 0 and not self.config["ref_path"] and "ref_logprobs" in batch:
            others["ref_logprobs"] = "the reference"
        gaps = [self.must_agree(  # COLLECTIVE
            self.gap(batch[name], batch["old_logprobs"], batch["response_mask"]), what)
            for name, what in others.items()]
        return gaps[0]

    def know_old_logprobs(self, batch):
        """
        Where an older policy has sampled the batch, its log-probs are the old ones: the ratio is
        between the policy of now and the one that sampled. Otherwise the policy of now is read; and
        so it is with importance_cap, which weighs the one against the other.
        """
        if self.batch_age and not self.config["importance_cap"]:
            batch["old_logprobs"] = batch["sampler_logprobs"]

    @property
    def loss_scale(self):
        """What the losses are multiplied by before the backward pass: 1, but in float16."""
        return self.state["loss_scale"] if self.config["dtype"] == "float16" else 1.0

    def overflowed(self, *norms):
        """Whether this step must be skipped, on all ranks, as a float16 gradient is not finite."""
        if self.config["dtype"] != "float16":
            return False
        return overflowed(self.state, norms, self.iteration)

    # what is said and written

    def log_evaluation(self, record, batch, rows, reward_names):
        """
        A collective: print the figures of an evaluation and two of its samples, and append
        SAMPLES of them to samples.jsonl.
        """
        samples = samples_of(batch, rows, self.tokenizer, self.iteration, SAMPLES, reward_names)
        if self.rank == 0:
            figures = [f"{key[5:]} {x:.3f}" for key, x in record.items() if key.startswith("eval/")]
            print(f"eval {self.iteration}: " + " | ".join(figures))
            print_samples(samples[:2])
        write_samples(self.out_dir, samples)  # COLLECTIVE

    def say_nothing_learnt(self, batch, flat):
        """Say why GRPO has taken no step. flat: which groups have equal scores, (groups,)."""
        masked = 0
        if self.config["truncated"] == "mask":
            masked = int((~batch["finished"]).sum())
        if self.rank == 0:
            print(f"iteration {self.iteration}: nothing to learn: {int(flat.sum())} of {len(flat)} "
                  f"groups have equal scores, {masked} of {len(batch['finished'])} responses are "
                  "masked; no step")

    def log(self, record, batch=None):
        """
        A collective: append an iteration's record to log.jsonl, with its seconds, speed and memory,
        and print a line of it. batch: what it sampled; None for the last, which only evaluates.
        """
        self.enter("log")
        # the sampler's gap is not known where an older policy has sampled the batch
        record = {name: x for name, x in record.items() if x is not None}
        record = {"iteration": self.iteration} | record
        record |= {f"time/{phase}": seconds for phase, seconds in self.times.items()}
        if batch:
            record["time/iteration"] = sum(self.times.values())
            record |= self.speed(batch, record["policy/steps"])
            if self.config["staleness"]:
                record["policy/staleness"] = self.batch_age
            record |= importance_of(batch, self.config["importance_cap"])
            if self.reward_model:
                record["objective/score_shift"] = self.reward_model.score_shift
        write_log(self.out_dir, record)  # COLLECTIVE
        if batch and self.rank == 0:
            done, max_iters = self.iteration + 1, self.config["max_iters"]
            print(progress(record, self.start, done, max_iters, self.began), flush=True)

    def speed(self, batch, steps):
        """
        How fast the iteration was, without the seconds of evaluation and checkpoint: in the rollout
        the policy samples; then all models read what it sampled (the policy, if it must); in the
        update the trained ones read it again in each pass, of which steps / num_minibatches were
        made. The texts of PPO-ptx are not counted.
        """
        ranks = sum(map(len, roles.ranks.values())) or self.world_size
        sampled, read = (int(batch[name].sum()) for name in ("response_mask", "attention_mask"))
        passes = steps / self.config["num_minibatches"]
        readers = sum(flops for name, flops in self.forward_flops.items()
                      if name != "policy" or self.policy_reads)
        flops = read * (self.forward_flops["policy"] + readers + passes * self.training_flops)
        seconds = sum(t for x, t in self.times.items() if x not in ("eval", "checkpoint"))
        return speed(self.device, sampled, flops, seconds, self.peak, ranks)

    def finish(self):
        """A collective: save what the run was for, and leave together with the other ranks."""
        self.save_as("policy")  # COLLECTIVE
        if self.ema:
            with self.ema.in_place():
                self.save_as("ema_policy")  # COLLECTIVE
        if "value_model" in self.models:
            save_final(self.out_dir, "value_model", self.models["value_model"], self.tokenizer,
                       self.config)  # COLLECTIVE
        roles.end()
        if self.rank == 0:
            print(f"saved {os.path.join(self.out_dir, 'policy')}; next: tools/sample.py to talk to "
                  "it, tools/page.py to see the run")
        launch.finish()  # COLLECTIVE

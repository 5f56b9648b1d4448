"""
The parts of a run that are not the algorithm, in all four scripts: its folder, the time of each
phase, requests to stop, the audit, checkpoints, the log, the printed lines, and at the end the
trained models.

    device = launch.init(...)                           COLLECTIVE: the ranks meet
    ...                                                 the data, the models, the optimizers
    ranks_agree(config, ...)                            COLLECTIVE
    run = Run(out_dir, max_iters, ...)                  COLLECTIVE: begins, or resumes
    for iteration in run.iterations():                  COLLECTIVE: audits, saves, stops between two
        ...
        run.log(record, ...)                            COLLECTIVE
    run.finish("what to do next")                       COLLECTIVE: saves the trained models

It decides nothing about training, and it knows no key of a script: it gets values. The whole
configuration is only stored, and compared when a run resumes.
"""
import contextlib
import os
import sys
import time

import torch

import errors
import launch
import parallel
import report
import status
from audit import audit, check_finite, check_gradients, find_cause, watched
from checkpoint import damage, load_checkpoint, save_checkpoint, sha256
from finished import save_final
from optimizers import overflowed, step
from run_folder import code_files, data_hash, fingerprint, open_run
from together import agree, alone
from errors import Lost, Stop
from loss import gap, gap_limit
from models import present

SAMPLES = 16  # of each evaluation, in samples.jsonl
KL_LIMIT = 30  # nats a response; the toy's good runs stay below 2


def ranks_agree(config, files, models, tokenizers):
    """
    A collective. Raise BadConfig, on all ranks, unless all have the same code, settings, files and
    tokenizers, and the ranks of one role the same weights. files: the data files of keys such as
    prompts_path; "" is none. models: {name: model}.
    """
    contents = {f"the content of {file}": sha256(file) for file in code_files(config)}
    contents |= {f"the content of {file}": data_hash(file) for file in files if file}
    weights = {f"the weights of {name}": fingerprint(model)
               for name, model in present(models).items() if model.path}  # not a new one
    same = config | contents
    same |= {"the tokenizers": [t.fingerprint for t in tokenizers if t is not None]}
    if not parallel.roles:
        agree(same | weights)  # COLLECTIVE
        return
    with parallel.everyone():
        agree(same)  # COLLECTIVE
    agree(weights)  # COLLECTIVE


class Run:
    """
    Opens the run's folder and loads its checkpoint, if there is one.

    models: {name: model}, also those of ranks with other roles. optimizers: {name: optimizer} of
    the trained models. config: all keys, to be stored. system: the shared keys. must_match: the
    script's keys that must be the same when a run resumes; sources: keys of files and models with
    contents that must be the same, too. token_ids: all sequences of ids that the run trains on.
    temperature: of the sampling. ema: the policy's average or None.
    self.state, a dict of plain numbers, goes from one iteration to the next beside weights and
    optimizers; it is saved with every checkpoint.
    """

    def __init__(self, out_dir, max_iters, config, system, device, models, optimizers, tokenizer,
                 must_match, sources, token_ids=(), temperature=1.0, ema=None):
        self.out_dir, self.max_iters = out_dir, max_iters
        self.config, self.system = config, system
        self.models, self.optimizers = present(models), optimizers
        self.tokenizer, self.device, self.ema = tokenizer, device, ema
        self.rank, self.world_size = parallel.rank_and_size()
        self.trained = {name: models[name] for name in optimizers}
        watched.models, watched.optimizers = self.models, optimizers

        self.checkpoint, saved = open_run(  # COLLECTIVE
            out_dir, config, must_match, sources, token_ids, max_iters)
        fresh = dict(iteration=0, best_score=None, warned=[],
                     first=None,  # accuracy and score of the first evaluation
                     loss_scale=2.0**16, clean_steps=0, skipped=0)  # see optimizers.overflowed
        self.state = fresh | (saved or {})
        if self.checkpoint:
            load_checkpoint(self.checkpoint, self.trained, optimizers, ema)  # COLLECTIVE
            best = os.path.join(out_dir, "best_policy")
            if self.state["best_score"] is not None and alone(lambda: damage(best)):  # COLLECTIVE
                errors.warn(f"{best} is damaged; the best from here on takes its place")
                self.state["best_score"] = None
        self.start = self.iteration = self.state["iteration"]
        if system.report_to:
            from options.trackers import start_trackers

            start_trackers(system.report_to, out_dir, config, self.start)  # COLLECTIVE

        self.reward_model = models.get("reward_model")  # also where only other ranks have it
        self.frozen_checksums = {}  # filled by the first audit
        # the largest distance, in nats, of log-probs that are equal in theory
        self.gap_limit = gap_limit(system.dtype, temperature)
        self.gap_said = False  # a large gap of the sampler in 16 bits is said once
        self.to_save = None  # options/roles.py sets it: a function, the batches to save
        self.times, self.phase = {}, "start"
        self.clock, self.began = time.perf_counter(), time.time()
        parallel.broadcast_parameters(self.models.values())  # COLLECTIVE: all have rank 0's bytes
        self.announce()

    def announce(self):
        """Print the models, the ranks and the folder."""
        if self.rank > 0:
            return
        report.print_models(self.models, self.optimizers)
        ranks = f"{self.world_size} rank(s)"
        if parallel.roles:
            ranks = f"ranks with roles ({self.system.roles})"
        where = f"writing to {self.out_dir}"
        if self.checkpoint:
            where = f"resuming from {self.checkpoint}"
        if self.start == self.max_iters:
            where += f": all {self.max_iters} iterations were made, the run is finished"
        print(f"{ranks} on {self.device.type}, {self.system.dtype}; {where}", flush=True)

    # iterations and phases

    def iterations(self):
        """
        A collective: the iterations from the first one, or that of the checkpoint, to max_iters. At
        max_iters there is only a last evaluation. Before an iteration come, if they are due: the
        audit; a checkpoint, which says that this iteration is next; a stop.
        """
        for iteration in range(self.start, self.max_iters + 1):
            self.iteration = iteration
            self.enter("audit")
            self.times.clear()
            interval, last = self.system.checkpoint_interval, iteration == self.max_iters
            if self.audit_is_due(iteration):
                audit(self.models, self.frozen_checksums, iteration)  # COLLECTIVE
            if last or interval and iteration > self.start and iteration % interval == 0:
                self.save()  # COLLECTIVE
            if not last:
                self.leave_if_stop_asked()  # COLLECTIVE
            yield iteration

    def enter(self, phase):
        """
        Begin a phase of the iteration. Its seconds are counted until the next phase begins, and
        errors name it.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.times[self.phase] = self.times.get(self.phase, 0.0) + now - self.clock
        self.phase, self.clock = phase, now
        parallel.phase = status.phase = f"iteration {self.iteration}, {phase}"
        status.clear()

    def audit_is_due(self, iteration):
        return iteration % self.system.sync_check_interval == 0 or iteration == self.start

    # checkpoints, and requests to stop

    def save(self):
        """A collective: audit, and write a checkpoint."""
        self.enter("checkpoint")
        if not self.audit_is_due(self.iteration):  # else these weights are checked already
            audit(self.models, self.frozen_checksums, self.iteration)  # COLLECTIVE
        save_checkpoint(  # COLLECTIVE
            self.out_dir, self.iteration, self.trained, self.optimizers, self.state, self.tokenizer,
            self.system.keep_checkpoints, self.ema, self.to_save and self.to_save())

    def leave_if_stop_asked(self):
        """
        A collective: after SIGTERM or Ctrl-C on any rank all ranks save and exit together. The run
        that resumes begins this iteration again, and samples the same texts.
        """
        if not parallel.stop_agreed():  # COLLECTIVE
            return
        self.save()  # COLLECTIVE
        if self.rank == 0:
            status.clear()
            print(f"stopped before the update of iteration {self.iteration}, and saved; "
                  "resume with the same command")
        self.leave()  # COLLECTIVE
        sys.exit(0)

    @contextlib.contextmanager
    def saved_if_it_fails(self):
        """
        A collective, if in this block a reward fails (all ranks know it): the run is saved before
        it stops.
        """
        try:
            yield
        except Stop as e:
            if isinstance(e, Lost) or self.iteration == self.start:
                raise
            find_cause(self.iteration)  # COLLECTIVE: broken models are not saved
            self.save()  # COLLECTIVE
            raise Stop(f"{e}. The run is saved before iteration {self.iteration}: the same command "
                       "goes on from there") from e

    # checks, and float16

    def sampler_gap(self, batch):
        """
        A collective: the distance of the sampler's log-probs from old_logprobs, in nats. Before the
        first update of a run the reference's log-probs must be the policy's, too, if the two are
        one model.
        """
        mask, old = batch["response_mask"], batch["old_logprobs"]
        if self.iteration == 0 and "ref_logprobs" in batch and not self.system.ref_path:
            worst = gap(batch["ref_logprobs"] - old, mask, self.system.dtype)
            self.must_agree(worst, "the reference")  # COLLECTIVE
        worst = gap(batch["sampler_logprobs"] - old, mask, self.system.dtype)
        in_16_bits = self.system.dtype in ("bfloat16", "float16")
        if not in_16_bits and self.system.sampler == "own":
            return self.must_agree(worst, "the sampler")  # COLLECTIVE
        # Here other kernels sample, and their rounding depends on the depth of the model: no limit
        # fits all models. So a large gap is said once, and does not stop the run
        worst = self.must_agree(worst, "the sampler", checked=False)  # COLLECTIVE
        if worst > self.gap_limit and not self.gap_said:
            errors.warn(f"in {self.system.dtype} the sampler's log-probs differ from those of the "
                        f"training forward by {worst:.2g} nats a token (rounding is mostly below "
                        f"{self.gap_limit:g}), so its tokens are a little off-policy; "
                        "--importance_cap=2 corrects for it")
            self.gap_said = True
        check_finite({"the sampler": torch.tensor(worst)}, self.iteration)
        return worst

    def must_agree(self, worst, what, checked=True):
        """
        A collective: the largest gap of any rank, in nats, between log-probs that are equal in
        theory (loss.gap). Raises Stop, on all ranks, where it is above the limit (loss.gap_limit):
        before any update the log-probs of `what` must be the policy's. checked=False: no Stop.
        """
        worst = parallel.all_reduce_max(worst).item()  # COLLECTIVE
        if checked and not worst <= self.gap_limit:  # also where worst is NaN
            find_cause(self.iteration)  # COLLECTIVE
            raise Stop(f"iteration {self.iteration}: before any update, the log-probs of {what} "
                       f"differ from the policy's by {worst:.2g} nats (limit {self.gap_limit:g}); "
                       "look for another temperature, mask, position ids, dropout or padded "
                       "vocabulary")
        return worst

    @property
    def loss_scale(self):
        """The factor of the losses in the backward pass: 1, except in float16."""
        return self.state["loss_scale"] if self.system.dtype == "float16" else 1.0

    def step(self, gradients, lrs, grad_clip):
        """
        A step of each trained model, the same on all ranks. With sharded models a collective.

        gradients: {model: its buffers}, summed over the ranks. lrs: {model: learning rate}; a model
        that is not in it makes no step. grad_clip: the largest norm of a model's gradients, 0 =
        any. Returns {model: the norm before clipping}; {} where no step was made, because a float16
        gradient overflowed. Raises Stop, on all ranks, if another gradient is not finite.
        """
        norms = {name: parallel.clip_gradients(buffers, grad_clip)
                 for name, buffers in gradients.items()}
        if self.system.dtype == "float16" and overflowed(  # it also changes the loss scale
                self.state, norms.values(), self.iteration):
            return {}
        for name, norm in norms.items():
            check_gradients(norm, self.trained[name], name, self.iteration)
        for name, lr in lrs.items():
            step(self.optimizers[name], lr)
        if self.ema and "policy" in lrs:
            self.ema.update()
        return {name: norm.item() for name, norm in norms.items()}

    # printed lines and logs

    def warn_once(self, what, message):
        """Warn, once in the whole run."""
        if what not in self.state["warned"]:
            self.state["warned"] = [*self.state["warned"], what]
            errors.warn(message)

    def log_evaluation(self, batch, rows, row_numbers, reward_names, score):
        """
        A collective: the figures of an evaluation. They are also printed, with two samples; SAMPLES
        samples go to samples.jsonl. rows: the held-out rows; row_numbers: of the rows that the
        batch answers. score: the mean of the number that the run maximises. With the key keep_best,
        the policy is saved as out_dir/best_policy if this is the best score so far.
        """
        record = report.summarize(batch, "eval", reward_names)
        accuracy, n = record.get("eval/accuracy", 0.0), len(row_numbers)
        first, before = self.state["first"] = self.state["first"] or [accuracy, score]
        chance = 2 * (first * (1 - first) / n + 1 / n**2) ** 0.5  # about two standard errors
        if score > before and accuracy < first - chance:
            self.warn_once("accuracy", (
                f"the held-out accuracy fell from {first:.3f} to {accuracy:.3f} while the score "
                f"rose from {before:.3g} to {score:.3g}: the reward pays for wrong answers; look "
                "at samples.jsonl, raise kl_coef or lower the learning rate"))
        if self.system.keep_best and report.is_better(score, self.state["best_score"]):
            self.state["best_score"] = score
            self.save_as("best_policy", "policy")  # COLLECTIVE
        samples = report.samples_of(batch, rows, row_numbers[:SAMPLES], self.tokenizer,
                                    self.iteration, reward_names)
        if self.rank == 0:
            status.clear()
            report.print_evaluation(self.iteration, record)
            report.print_samples(samples[:2])
        report.write_log(self.out_dir, samples, "samples.jsonl")  # COLLECTIVE
        return record

    def log(self, record, batch=None, passes=1.0, tokens=0, every=1, rows=()):
        """
        A collective: append an iteration's record to log.jsonl, with its seconds, speed and memory,
        and print a line every `every` iterations. Entries that are None are left out.

        batch: the sampled batch; passes: how often the update went over it. tokens: in a script
        that samples nothing, the tokens that it trained on. The last iteration, which only
        evaluates, has none of them. rows: the data rows that the batch answers, for rollouts.jsonl.
        """
        self.enter("log")
        record = {name: x for name, x in record.items() if x is not None}
        record = {"iteration": self.iteration} | record
        if record.get("objective/kl", 0) > KL_LIMIT:
            self.warn_once("kl", (
                f"the policy is {record['objective/kl']:.0f} nats a response away from the "
                "reference, where few rewards are right; raise kl_coef or lower the learning rate"))
        record |= {f"time/{phase}": seconds for phase, seconds in self.times.items()}
        if batch:
            record["objective/texts"] = report.hash_of(batch["tokens"])
        if batch and self.reward_model is not None:
            record["objective/score_shift"] = self.reward_model.score_shift
        if batch or tokens:
            record["time/iteration"] = sum(self.times.values())
            record |= self.speed(batch, passes, tokens)
        report.write_log(self.out_dir, [record])  # COLLECTIVE
        if rows and self.system.save_rollouts and self.iteration % self.system.save_rollouts == 0:
            names = [name.removeprefix("reward/") for name in batch if name.startswith("reward/")]
            rollouts = report.samples_of(batch, rows, batch["prompt"].tolist(), self.tokenizer,
                                         self.iteration, names)
            report.write_log(self.out_dir, rollouts, "rollouts.jsonl")  # COLLECTIVE
        if self.system.report_to:
            from options.trackers import send_to_trackers

            send_to_trackers(record)
        done = self.iteration + 1
        if (batch or tokens) and self.rank == 0 and (
                self.iteration % every == 0 or done == self.max_iters):
            print(report.progress(record, self.start, done, self.max_iters, self.began), flush=True)

    def speed(self, batch, passes, tokens):
        """
        The speed of the iteration, without the seconds of evaluation and checkpoint, and the most
        memory of this process. In the rollout the policy samples; then the other models read the
        texts; in the update the trained models read them again, and learn, in each pass. The texts
        of PPO-ptx are not counted.
        """
        seconds = sum(t for x, t in self.times.items() if x not in ("eval", "checkpoint"))
        read, learned = 0, tokens
        if batch:
            tokens, read = (int(batch[name].sum()) for name in ("response_mask", "attention_mask"))
            learned = passes * read
        figures = {"time/tokens_per_second": tokens / seconds,
                   "mem/peak_mib": report.peak_memory_mib(self.device)}
        if self.device.type == "cuda":
            from gpu import share_of_peak

            figures |= share_of_peak(self.models, self.trained, read, learned, seconds,
                                     self.system.dtype, self.device)
        return figures

    def save_as(self, folder, name):
        """A collective: save a model, with its present weights, as out_dir/folder."""
        save_final(self.out_dir, folder, self.models[name], self.tokenizer,
                   self.config)  # COLLECTIVE

    def finish(self, next_step):
        """
        A collective: save the trained models, and leave together with the other ranks. next_step:
        advice to the user, for the last line.
        """
        for name in self.trained:
            self.save_as(name, name)  # COLLECTIVE
        if self.ema:
            with self.ema.in_place():
                self.save_as("ema_policy", "policy")  # COLLECTIVE
        if self.rank == 0:
            saved = os.path.join(self.out_dir, next(iter(self.trained)))
            print(f"saved {saved}; next: {next_step}")
        self.leave()  # COLLECTIVE

    def leave(self):
        """A collective: leave the group of ranks together."""
        if self.system.report_to:
            from options.trackers import finish_trackers

            finish_trackers()
        launch.finish()  # COLLECTIVE

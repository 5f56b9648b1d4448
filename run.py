"""
The parts of a run that are not the algorithm: audits, requests to stop, checkpoints, the steps of
the optimizers, the log, and at the end the trained models.

    device = ranks.init(...)                            COLLECTIVE: the ranks meet
    ...                                                 the models, the data, the optimizers
    run = Run(out_dir, max_iters, ...)                  COLLECTIVE: begins, or resumes
    for iteration in run.iterations():                  COLLECTIVE: audits, saves, stops between two
        ...
        run.log(record, ...)                            COLLECTIVE
    run.finish(program, its keys)                       COLLECTIVE: saves the trained models
"""
import contextlib
import hashlib
import json
import math
import os
import shlex
import sys
import time

import torch

import errors
import parallel
import ranks
from batches import texts_of
from checkpoint import (append, delete_older, load_checkpoint, open_folder, save_checkpoint,
                        save_final, settings_of)
from configurator import for_model
from errors import BadInput, Stop, optional, say
from metrics import (evaluation_lines, gap, gap_limit, iteration_line, peak_memory_mib,
                     summarize)
from prompts import input_hash

SAMPLES = 16  # of each evaluation, in samples.jsonl


def make_optimizer(model, name, system, lr, betas, eps):
    """The optimizer of a model's trained parameters. name: as in the keys, such as value."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    narrow = any(p.dtype.itemsize == 2 for p in parameters)  # with master_weights=False
    if narrow or system.weight_decay > 0 or system.zero_stage or system.offload or for_model(
            system.optim, name) not in ("", "adamw"):
        from options.optimizers import optimizer_by_keys

        return optimizer_by_keys(model, name, system, narrow, lr, betas, eps)
    return torch.optim.AdamW(parameters, lr=lr, betas=betas, eps=eps, weight_decay=0.0,
                             fused=ranks.this_rank.role == "train")  # other roles never step


class Run:
    """
    Opens the run's folder and loads its checkpoint, if there is one.

    models: {name: Model}. optimizers: {name: optimizer} of the trained ones. config: all keys.
    must_match: the script's keys that must be the same when a run resumes. token_ids: a hash of all
    that the run trains on. ema_decay: of the policy's moving average, 0 = none.
    self.state: what goes from one iteration to the next, saved as JSON: numbers, texts, booleans,
    None, lists, dicts by text. Names that begin with "run/", and "iteration", are run.py's;
    value_unit, value_deviations, score_shift and kl_factor those of pages, recipes and options.
    self.also_saved: {file: an object whose tensors() are saved, too}; read_tensors gives them back.
    """

    def __init__(self, out_dir, max_iters, config, system, device, models, optimizers, must_match,
                 token_ids="", temperature=1.0, ema_decay=0.0):
        self.out_dir, self.max_iters, self.system, self.device = out_dir, max_iters, system, device
        self.models, self.optimizers = models, optimizers
        self.also_saved, self.ema, self.record = {}, None, {}
        self.trained = {name: models[name] for name in optimizers}
        self.made_with = {name: settings_of(optimizer) for name, optimizer in optimizers.items()}
        stepped = {p for optimizer in optimizers.values() for group in optimizer.param_groups
                   for p in group["params"]}
        own = {p: name for name, model in models.items() for p in model.parameters()}
        for p in {p for p in own if p.requires_grad} - stepped | stepped - own.keys():
            raise TypeError(f"{own.get(p, 'no model')} has a trained parameter of the shape "
                            f"{tuple(p.shape)}: it needs a model and that model's optimizer")
        self.gap_limit = self.warn_above = gap_limit(system.dtype, temperature)
        self.frozen = {}  # the frozen models' checksums, filled by the first audit
        for model in list(models.values()):  # trunks under adapters are audited, too
            if model.base is not None and model.base not in models.values():
                models[f"trunk of {model.path}"] = model.base

        self.settings = f"{config} {token_ids} {input_hash.hexdigest()} {torch.__version__}"
        with parallel.in_step():  # COLLECTIVE: an error here comes before anything is written
            if parallel.from_rank(self.settings) != self.settings:  # COLLECTIVE
                raise BadInput("this rank has other settings, rows, FILE.pys or torch than rank 0")
        folder, saved = None, {}
        if ranks.this_rank.role == "train":  # the others write nothing
            folder, saved = open_folder(  # COLLECTIVE
                out_dir, config, must_match, token_ids, max_iters, models, optimizers)
        fresh = {"run/loss_scale": 2.0**16, "run/clean_steps": 0, "run/broken": "", "run/said": []}
        self.state, self.folder = fresh | saved, folder
        if folder:
            with parallel.patient(), parallel.in_step():  # COLLECTIVE
                load_checkpoint(folder, self.trained, optimizers)
        self.start = self.iteration = self.state.pop("iteration", 0)
        parallel.broadcast_parameters(models.values())  # COLLECTIVE: all have rank 0's bytes
        if ema_decay > 0:
            from options.ema import MovingAverage

            self.ema = self.also_saved["ema"] = MovingAverage(models["policy"], ema_decay, folder)
        if system.report_to and ranks.this_rank.role == "train" and "run/over" not in self.state:
            from options.trackers import start_trackers

            start_trackers(system.report_to, out_dir, config, self.start)  # COLLECTIVE
        self.times, self.phase, self.began = {}, "start", time.time()
        self.clock = time.perf_counter()
        for name, model in models.items():
            count = sum(p.numel() for p in model.parameters()) / 1e6
            say(f"{name:<12} {count:8.2f}M parameters  "
                f"{'trained' if name in optimizers else 'frozen'}")
        say(f"{parallel.rank_and_size()[1]} rank(s) on {device.type}, {system.dtype}; "
            + (f"resuming from {folder}" if folder else f"writing to {out_dir}"))

    # iterations, checkpoints, and requests to stop

    def iterations(self):
        """
        A collective: the numbers of the iterations, from 0, or from that of the checkpoint, to
        max_iters; in this last one a script only evaluates. Before each iteration come, if they
        are due: the audit; a checkpoint; a stop.
        """
        end = -1 if "run/over" in self.state else self.max_iters
        for iteration in range(self.start, end + 1):
            self.iteration = iteration
            self.enter("audit")
            self.times.clear()
            interval, last = self.system.checkpoint_interval, iteration == self.max_iters
            if self.audit_is_due():
                parallel.audit(self.models, self.frozen, iteration)  # COLLECTIVE
            if last or interval and iteration > self.start and iteration % interval == 0:
                self.save()  # COLLECTIVE
            if not last:
                self.leave_if_stop_asked()  # COLLECTIVE
            yield iteration

    def enter(self, phase):
        """Begin a phase of the iteration: its seconds are counted, and errors name it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.times[self.phase] = self.times.get(self.phase, 0.0) + now - self.clock
        self.phase, self.clock = phase, now
        errors.enter(f"iteration {self.iteration}, {phase}")

    def audit_is_due(self):
        """Whether this iteration begins with an audit."""
        return self.iteration % self.system.sync_check_interval == 0 or self.iteration == self.start

    def save(self):
        """A collective: audit, and write a checkpoint."""
        if self.folder and self.iteration == self.start:  # it is there; a kill may leave older ones
            return parallel.alone(lambda: delete_older(  # COLLECTIVE
                self.out_dir, self.iteration, self.system.keep_checkpoints))
        self.enter("checkpoint")
        if not self.audit_is_due():  # else these weights are checked already
            parallel.audit(self.models, self.frozen, self.iteration)  # COLLECTIVE
        self.check_state()  # COLLECTIVE
        save_checkpoint(  # COLLECTIVE
            self.out_dir, self.iteration, self.trained, self.optimizers, self.state,
            self.system.keep_checkpoints, self.also_saved)

    def check_state(self):
        """
        A collective: what optimizers keep beside tensors goes into self.state. Raises BadInput or
        TypeError, which names what a checkpoint cannot hold.
        """
        plain = "iteration" not in self.state and all(
            type(optimizer) is torch.optim.AdamW and settings_of(optimizer) == self.made_with[name]
            for name, optimizer in self.optimizers.items())
        with contextlib.suppress(TypeError, ValueError, RecursionError):
            if plain and repr(json.loads(json.dumps(self.state))) == repr(self.state):
                return
        from options.fork_state import put_into_state

        put_into_state(self)  # COLLECTIVE

    def leave_if_stop_asked(self):
        """
        A collective: after SIGTERM or Ctrl-C on any rank all ranks save and exit together. The run
        that resumes begins this iteration again.
        """
        if parallel.stop_agreed():  # COLLECTIVE
            self.save()  # COLLECTIVE
            say(f"saved before iteration {self.iteration}; the same command goes on there")
            self.leave()  # COLLECTIVE
            sys.exit(0)

    @contextlib.contextmanager
    def saved_if_it_fails(self):
        """If its block raises Stop on all ranks, as a rule may, save the run: a collective."""
        try:
            yield
        except Stop as e:
            if ranks.this_rank.role != "train":
                raise
            self.save()  # COLLECTIVE
            raise Stop(f"{e}. The run is saved before iteration {self.iteration}: the same command "
                       "goes on from there") from e

    def finish(self, program, **keys):
        """A collective: save the trained models, say what to type next, and leave together."""
        if "run/over" in self.state:
            say(f"{self.out_dir}: the run has ended at iteration {self.iteration}, and nothing is "
                "changed; a larger --max_iters goes on, another --out_dir begins anew")
            return self.leave()  # COLLECTIVE
        for name, model in self.trained.items():
            self.save_model(name, model, self.record)  # COLLECTIVE
        if self.ema:
            self.ema.save(self)  # COLLECTIVE
        if self.state["run/broken"]:
            say(f"warning: {self.state['run/broken']}")
        if self.system.environment or self.system.tools:
            keys["trust_code"] = True
        command = ["python", os.path.relpath(os.path.join(os.path.dirname(__file__), program))]
        command = shlex.join(command + [f"--{key}={value}" for key, value in keys.items()])
        say(f"saved {os.path.join(self.out_dir, next(iter(self.trained)))}; next: {command}")
        self.leave()  # COLLECTIVE

    def save_model(self, name, model, figures):
        """A collective: write a model that the run leaves. figures: with its evaluation, or {}."""
        save_final(  # COLLECTIVE
            self.out_dir, name, model, self.system.save_dtype, iteration=self.iteration,
            figures=figures, changes=self.state.get("run/changes", []))

    def leave(self):
        """A collective: leave the group of ranks together."""
        if self.system.roles and "batches" in self.also_saved:
            self.also_saved["batches"].end()  # COLLECTIVE
        if self.system.report_to:
            from options.trackers import finish_trackers

            finish_trackers()
        ranks.leave()  # COLLECTIVE

    # checks, and the steps of the optimizers

    def sampler_gap(self, batch):
        """
        A collective: how far the sampler's log-probs are from old_logprobs, in nats; None for a
        batch of an older policy. In 16 bits, and with another engine, the sampler has other
        kernels, and no limit fits all models: then the run only warns of a large gap. At iteration
        0 the reference's log-probs must be the policy's, too: there the KL is 0.
        """
        if "age" in batch:  # an older policy has sampled it (options/ahead.py)
            return None
        mask, old, dtype = batch["response_mask"], batch["old_logprobs"], self.system.dtype
        if self.iteration == 0 and "ref_logprobs" in batch and not self.system.ref_path:
            ref_gap = gap(batch["ref_logprobs"] - old, mask, dtype)
            self.must_agree(ref_gap, "the reference")  # COLLECTIVE
        exact = dtype not in ("bfloat16", "float16") and self.system.sampler == "own"
        worst = gap(batch["sampler_logprobs"] - old, mask, dtype)
        worst = self.must_agree(worst, "the sampler", exact)  # COLLECTIVE
        if worst > self.warn_above:
            self.warn_above = 2 * worst  # the next warning comes at twice this gap
            say(f"warning: iteration {self.iteration}: in {dtype} the sampler's log-probs differ "
                f"from the policy's by {worst:.2g} nats a token; --importance_cap=2 corrects it")
        return worst

    def ratio_gap(self, gaps, sums, to_older):
        """
        A collective, in the first step of an update, before any weight has moved: how far the log
        ratios are from 0, in nats. gaps: that of each micro-batch. to_older: an older policy
        has sampled the batch, and the ratio is to that policy: the KL to it is added to sums.
        """
        if to_older:
            sums["policy/off_policy_kl"] = sums["policy/approx_kl"]  # no other step is in it yet
        return self.must_agree(  # COLLECTIVE
            torch.stack(gaps).max(), "the training forward", checked=not to_older)

    def must_agree(self, worst, what, checked=True):
        """
        A collective: the largest gap of any rank, in nats, between log-probs that are equal in
        theory (metrics.gap). what: whose they are, for the error. Raises Stop, on all ranks, where
        the gap is above metrics.gap_limit; checked = False: never.
        """
        worst = parallel.all_reduce_max(worst).item()  # COLLECTIVE
        if not worst <= (self.gap_limit if checked else math.inf):  # also where worst is NaN
            raise Stop(f"iteration {self.iteration}: before any update, the log-probs of {what} "
                       f"differ from the policy's by {worst:.2g} nats (limit {self.gap_limit:g}); "
                       "look for another temperature, mask, position ids, dropout or padded "
                       "vocabulary")
        return worst

    @property
    def loss_scale(self):
        """The factor of the losses in the backward pass: 1, except in float16."""
        return self.state["run/loss_scale"] if self.system.dtype == "float16" else 1.0

    def step(self, gradients, lrs, grad_clip):
        """
        A step of each trained model in lrs, {model: learning rate}, the same on all ranks; with
        sharded models a collective. gradients: {model: its buffers}, summed over the ranks. Returns
        {model: the norm before clipping}; {} where no step was made, because a float16 gradient
        overflowed. Raises Stop, on all ranks, if another gradient is not finite.
        """
        norms = {name: parallel.clip_gradients(buffers, grad_clip).item()
                 for name, buffers in gradients.items()}
        good = all(map(math.isfinite, norms.values()))
        if self.system.dtype == "float16":
            from options.sixteen_bits import overflowed

            if overflowed(self, good):
                return {}
        if not good:
            from options.failures import of_a_gradient

            raise of_a_gradient(self, norms)
        for name, lr in lrs.items():
            for group in self.optimizers[name].param_groups:
                group["lr"] = lr
            self.optimizers[name].step()
        if self.ema and "policy" in lrs:
            self.ema.update()
        return norms

    # the log

    def log_evaluation(self, batch, rows, reward_names, score):
        """
        A collective: the figures of an evaluation, printed with two samples; SAMPLES samples go to
        samples.jsonl. score: the number that the run maximises, for the key keep_best.
        """
        self.state.pop("run/evaluated", {})  # this one takes its place
        record = summarize(batch, "eval", reward_names, rows=rows)
        if self.system.keep_best:
            from options.keep_best import save_if_best

            save_if_best(self, record | {"score": score}, batch)  # COLLECTIVE
        samples = self.samples(batch, rows, SAMPLES)
        say(evaluation_lines(self.iteration, record, samples))
        append(  # COLLECTIVE
            self.out_dir, "samples.jsonl", samples, again=self.iteration == self.start)
        return record

    def samples(self, batch, rows, count):
        """The first responses of a batch as dicts for samples.jsonl; see docs/running.md."""
        first = {name: t[:count] for name, t in batch.items()}
        texts = texts_of(first, rows, self.models["policy"].tokenizer)
        columns = {name: t.tolist() for name, t in first.items()
                   if name in ("scores", "accuracy") or name.startswith("reward/")}
        if {"old_logprobs", "ref_logprobs"} <= first.keys():
            columns["kl"] = (first["old_logprobs"] - first["ref_logprobs"]).sum(1).tolist()
        samples = []
        for i, row in enumerate(texts["rows"]):
            scores = {name: x[i] for name, x in columns.items() if math.isfinite(x[i])}
            samples.append(dict(
                iteration=self.iteration, row=int(first["row"][i]), prompt=row["prompt"],
                answer=row.get("answer"), text=texts["completions"][i], scores=scores,
                finished=bool(first["finished"][i]), length=int(first["response_mask"][i].sum())))
            if "dialogues" in texts:
                samples[-1]["messages"] = texts["dialogues"][i]
        return samples

    def log(self, record, batch=None, tokens=0, every=1, rows=()):
        """
        A collective: append an iteration's record to log.jsonl, with its seconds, speed and memory,
        and print a line every `every` iterations. Entries that are None are left out. tokens: in a
        script that samples nothing, how many it trained on. rows: the data's, for rollouts.jsonl.
        """
        self.enter("log")
        self.check_state()  # COLLECTIVE
        evaluated = self.state.pop("run/evaluated", {})  # here, before the run was stopped
        self.record = record = {"iteration": self.iteration} | evaluated | {
            name: x.item() if hasattr(x, "item") else x
            for name, x in record.items() if x is not None}
        record |= {f"time/{phase}": seconds for phase, seconds in self.times.items()}
        if self.iteration == 0:
            record |= optional("cards.made_on")(self.device) or {}
        if batch:
            # two runs that sampled the same tokens have the same hash
            text = batch["tokens"].cpu().numpy().tobytes()
            record["objective/texts"] = hashlib.blake2b(text, digest_size=8).hexdigest()
            if "reward_model" in self.models:
                record["objective/score_shift"] = self.models["reward_model"].score_shift
            if "age" in batch:
                record["policy/staleness"] = int(batch["age"][0])
            tokens = int(batch["response_mask"].sum())
            finished = record["objective/finished"]
            self.state.setdefault("run/finished", finished)  # of the first iteration
            # what share has ended, has a score, differs in its group; whether there is a gradient
            shares = (finished, record.get("objective/scored", 1.0),
                      1 - record.get("objective/flat_groups", 0.0),
                      record.get("policy/grad_norm") != 0)
        if tokens:
            record["time/iteration"] = sum(self.times.values())
            working = sum(t for x, t in self.times.items() if x not in ("eval", "checkpoint"))
            record["time/tokens_per_second"] = tokens / working
            record["mem/peak_mib"] = peak_memory_mib(self.device)
        append(  # COLLECTIVE
            self.out_dir, "log.jsonl", [record], again=self.iteration == self.start)
        interval = self.system.save_rollouts
        if rows and interval and self.iteration % interval == 0:
            append(self.out_dir, "rollouts.jsonl", self.samples(batch, rows, None))  # COLLECTIVE
        if self.system.report_to:
            from options.trackers import send_to_trackers

            send_to_trackers(record)
        if tokens and (self.iteration % every == 0 or self.iteration + 1 == self.max_iters):
            done = self.iteration + 1
            left = (time.time() - self.began) / (done - self.start) * (self.max_iters - done)
            say(iteration_line(record, self.max_iters, left / 60))
        if batch and (min(shares) <= 2 / 3 or self.state["run/broken"]):
            optional("alarms.say_what_is_wrong")(record, self.state, self.iteration, batch)

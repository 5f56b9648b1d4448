"""
The key staleness: batches are sampled ahead of the update. With staleness = 1 the batch of
iteration k + 1 is sampled at the beginning of iteration k, so the policy that trains on it has made
one update since. With the key roles (options/roles.py) other ranks sample meanwhile.

A version is the number of the iteration that begins with these weights. The batch of iteration k is
always sampled by version max(k - staleness, 0), so the texts depend on nothing but the keys. A
checkpoint has the batches that are sampled already: a resumed run has no older weights for them.

Where the version is older than the iteration, old_logprobs are the sampler's own log-probs: the
ratio of PPO and GRPO is then the current policy / the policy that sampled. With importance_cap
old_logprobs are those of the policy that begins the update, as without staleness; the older policy
only gives a weight (formulas.importance_weights).

A reward model that rm.py has not trained needs a score_shift before its first score is logged. So
the first batch is sampled before the first evaluation.
"""
import sys

import torch

from checkpoint import read_tensors
from errors import BadInput, say
from ranks import this_rank
from rewards import add_scores, lacks_shift


class Ahead:
    """
    A script's rollouts, sampled ahead. rollout: the script's function, here rollout_now. rows_of: a
    function, iteration -> the numbers of its rows. terms: of the rewards. Raises BadInput.
    """

    def __init__(self, rollout, run, config, system, rows, rows_of, terms):
        if system.sampler == "vllm" and system.staleness and not config["importance_cap"]:
            raise BadInput("sampler = 'vllm' with staleness: the ratio would be to vLLM's "
                           "log-probs, which are rounded differently; type --importance_cap=2")
        self.rollout_now, self.run, self.staleness = rollout, run, system.staleness
        self.rows, self.rows_of, self.config, self.terms = rows, rows_of, config, terms
        self.batches, self.version = {}, {}  # of iterations: the batch, and its version
        for key, t in read_tensors(run.folder, "batches") if run.folder else ():
            iteration, version, name = key.split(".")
            self.version[int(iteration)] = int(version)
            self.batches.setdefault(int(iteration), {})[name] = t.to(run.device)
        if system.staleness > 0 or system.roles:
            run.also_saved["batches"] = self

    def rollout(self, purpose, iteration, rows, row_numbers, **more):
        """A collective, in the place of the script's rollout."""
        if lacks_shift(self.run.models.get("reward_model")):
            self.center()  # COLLECTIVE
        if purpose == "rollout":
            self.batches.pop(iteration - 1, None)
            last = min(iteration + self.staleness, self.run.max_iters - 1)
            due = [k for k in range(iteration, last + 1) if k not in self.version]
            self.version |= dict.fromkeys(due, iteration)
            self.fetch(iteration, due)  # COLLECTIVE
            self.run.enter("score")
            batch = dict(self.batches[iteration])
        else:  # held-out prompts, and refills: by the newest policy
            batch = self.rollout_now(purpose, iteration, rows, row_numbers, **more)  # COLLECTIVE
        age = iteration - self.version.get(iteration, iteration)
        if age > 0 and purpose != "eval":
            batch["age"] = torch.full_like(batch["index"], age)  # (B,)
            if not self.config["importance_cap"]:
                batch["old_logprobs"] = batch["sampler_logprobs"]
        return batch

    def fetch(self, iteration, due):
        """A collective: sample the batches of the iterations `due`, by the current weights."""
        for k in due:
            self.batches[k] = self.rollout_now(  # COLLECTIVE
                "rollout", k, self.rows, self.rows_of(k))

    def center(self):
        """
        A collective of the ranks that train: give the reward model a score_shift. The responses of
        iteration 0 that ended (if none did, all) score 0 on average (N+ detail 13). Training on
        pairs only fixes differences: a model of others may score 15 on average. Then the -1 of a
        response that never ends would be the worst by far, and a value model that starts as the
        reward model would begin 15 too high; so it gets the shift, too. run.state keeps it.
        """
        run, models = self.run, [self.run.models["reward_model"]]
        if self.config.get("value_init") == "reward":
            models.append(run.models["value_model"])
        if run.iteration > 0:
            shift = run.state["score_shift"]
        else:  # with roles, too, by the trainers
            batch = self.rollout_now("rollout", 0, self.rows, self.rows_of(0))  # COLLECTIVE
            self.batches[0], self.version[0] = batch, 0
            scores, finished = batch["reward/reward_model"], batch["finished"]  # (B,) each
            mean = (scores[finished] if finished.any() else scores).double().mean().item()
            say(f"the reward model scores {mean:.3f} on average at first; this becomes 0")
            shift, batch["reward/reward_model"] = -mean, scores - mean
            add_scores(batch, self.terms)
        for model in models:
            model.score_shift = shift
        run.state["score_shift"] = models[0].hf.config.score_shift = shift

    def tensors(self):
        """{"ITERATION.VERSION.NAME": tensor} of the batches that older weights have sampled."""
        now = self.run.iteration
        return {f"{k}.{self.version[k]}.{name}": t for k, batch in sorted(self.batches.items())
                if self.version[k] < now <= k for name, t in batch.items()}


def ahead_of(rollout, run, config, system, rows, rows_of, terms):
    """A collective: the function that replaces a script's rollout. Other roles' ranks end here."""
    kind = Ahead
    if system.roles:
        from options.roles import Apart as kind  # noqa: N813

    ahead = kind(rollout, run, config, system, rows, rows_of, terms)
    if this_rank.role != "train":
        ahead.serve()  # COLLECTIVE
        sys.exit()
    return ahead.rollout

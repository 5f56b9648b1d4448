"""
What the options of ppo.py, grpo.py and rm.py compute, worked out once more: by_hand.py's runs, with
several turns, policies that are older than the batch, refills, adapters, a score that is centred,
PPO-ptx, averages, the best policy, and teachers. Nothing of the repository is imported here.

c has these keys beside those of by_hand.py: ref_path, staleness, importance_cap, turns, lora,
ema_decay, keep_best; of ppo ptx_coef; of grpo max_refills, refill_by; of rm teacher, score_coef,
preference_coef.
"""
import copy
import json
import math
import statistics
from types import SimpleNamespace

import by_hand
import torch
from by_hand import (ENDS, EOS, Adapters, AdamW, decode, encode, flat, hashed, is_flat, judge,
                     kl_estimate, language_model, mean, noise_of, parameters_of, prompts_of, sample,
                     scalar_model, scalars, seen, summary, there)

by_hand.RULES["environment"] = lambda c, row, r, _: sum(r.given)


# responses ----------------------------------------------------------------------------------------

def answered(messages, row, seed):
    """An environment: its answer to a dialogue, and what the turn before is worth."""
    said, turn = messages[-1]["content"], len(messages) // 2
    reply = "q" * turn + row["prompt"][:1] + "xyz"[seed % 3]
    return (None if len(said) % 3 == 0 else reply), len(said) % 4 / 4


def converse(c, policy, row, purpose, iteration, slot, which=0):
    """A response of several turns; all of them have max_new_tokens together."""
    noise = noise_of(c, purpose, iteration, slot, which)
    r = SimpleNamespace(prompt=encode(row["prompt"]), response=[], own=[], given=[], read="",
                        finished=False, turns=1)
    messages = [dict(role="user", content=row["prompt"])]
    for turn in range(c.turns):
        said = sample(c, policy, r.prompt + r.response, noise[len(r.response):])
        r.own += range(len(r.response), len(r.response) + len(said))
        r.given += [0.0] * len(said)
        r.response += said
        r.text = decode(said)
        r.read += r.text  # by a reward model that knows no chats
        if said[-1] not in ENDS:
            break
        messages.append(dict(role="assistant", content=r.text))
        seed = hashed(f"{c.seed} {purpose} environment {turn} {iteration} {slot} {which}", 4)
        reply, r.given[-1] = answered(messages, row, seed)
        r.finished = reply is None
        ids = encode(reply or "")
        if r.finished or turn + 1 == c.turns or len(r.response) + len(ids) >= c.max_new_tokens:
            break
        messages.append(dict(role="user", content=reply))
        r.response += ids
        r.read += reply
        r.turns += 1
        seen["reply"] += 1
    weight = dict((name, x) for x, name in c.mix).get("environment", 0.0)
    r.paid = [weight * x for x in r.given]
    return r


@torch.no_grad()
def respond(c, models, row, *noise):
    """by_hand.respond, of several turns where c has them."""
    if not c.turns:
        return by_hand.respond(c, models, row, *noise)
    return judge(c, models, row, converse(c, models.policy, row, *noise))


@torch.no_grad()
def sampled(c, models, past, rows, purpose, iteration, noise):
    """
    Responses to rows by the policy as it was `staleness` iterations ago; a refill is by that of
    now. past: the policies of all iterations so far. noise: a slot, and a sample, for each row.

    The ratio is to the policy that has sampled. With importance_cap it is to the policy of now, and
    a token counts so much more as it is likelier to this one, but not more than the cap (decoupled
    PPO, arXiv 2505.24298).
    """
    of_then, version = copy.copy(models), max(0, iteration - c.staleness)
    if purpose == "rollout":
        of_then.policy = past[version]
        seen["older"] += version < iteration
    batch = [respond(c, of_then, row, purpose, iteration, *which)
             for row, which in zip(rows, noise, strict=True)]
    for r in batch:
        r.age = iteration - version
        if not (r.age or c.importance_cap):
            continue
        now, _ = by_hand.logprobs_of(models.policy, r.prompt, r.response, c.temperature, r.own)
        now = [x.item() for x in now]
        r.moved = [kl_estimate(p, q, "k3") for p, q in zip(r.old, now, strict=True)]
        if c.importance_cap:
            then, r.old = r.old, now
            r.counts = [min(math.exp(p - q), c.importance_cap)
                        for p, q in zip(r.old, then, strict=True)]
            seen["capped"] += sum(count == c.importance_cap for count in r.counts)
    return batch


def figures_of(c, batch, prefix):
    """by_hand.summary, and figures of turns."""
    figures = summary(c, batch, prefix)
    if c.turns:
        figures[f"{prefix}/turns"] = mean([r.turns for r in batch])
        figures[f"{prefix}/environment_share"] = mean([1 - len(r.own) / len(r.response)
                                                       for r in batch])
    if prefix == "objective" and batch[0].age:
        figures["policy/staleness"] = batch[0].age
        if c.importance_cap:  # of all tokens
            figures["policy/off_policy_kl"] = mean(flat(r.moved for r in batch))
    if c.importance_cap and prefix == "objective":
        counts = flat(r.counts for r in batch)
        figures |= {
            "policy/importance": mean(counts),
            "policy/importance_capped": mean([count == c.importance_cap for count in counts]),
            "policy/effective_tokens": sum(counts)**2 / sum(x**2 for x in counts) / len(counts)}
    return figures


# models -------------------------------------------------------------------------------------------

def models_of(c):
    """The models of a run of ppo.py or grpo.py, but the value model; `trained`: parameters."""
    models = SimpleNamespace(policy=language_model(c.policy_path), value=None, reward=None,
                             reference=None, said=True, adapters=[])
    if c.kl_coef:
        models.reference = language_model(c.ref_path or c.policy_path)
    if "reward_model" in [name for _, name in c.mix]:
        models.reward = scalar_model(c.reward_path)
        with open(f"{c.reward_path}/config.json", encoding="utf-8") as f:
            models.said = "score_shift" in json.load(f)
    models.trained = list(models.policy.parameters())
    if c.lora:
        models.adapters.append(Adapters(models.policy.base_model, *c.lora, c.seed))
        models.trained = models.adapters[0].parameters()
    return models


def add_value_model(c, models):
    """The value model, and its parameters."""
    models.value, own = by_hand.value_model_of(c, models)
    if not c.lora or c.value_init == "shared":
        return own
    models.adapters.append(Adapters(models.value.trunk, *c.lora, c.seed))
    return [*models.adapters[-1].parameters(), models.value.head]


def center(c, models, rows, noise):
    """
    The reward model's zero, where its config.json does not say it: the mean score of those of the
    first responses that have ended, or of all.
    """
    if models.reward is None or models.said:
        return
    batch = [(row, respond(c, models, row, "rollout", 0, *which))
             for row, which in zip(rows, noise, strict=True)]
    ended = [(row, r) for row, r in batch if r.finished]
    seen["centred, all" if len(ended) == len(batch) else "centred, some"] += 1
    shift = -mean([by_hand.learned_score(c, row, r, models.reward) for row, r in ended or batch])
    models.reward.shift = shift
    if getattr(c, "value_init", "") == "reward":
        models.value.shift = shift


class Kept:
    """The moving average of a policy, and the policy with the best score of held-out prompts."""

    def __init__(self, c, models):
        self.c, self.policy = c, models.policy
        self.average = self.copies() if c.ema_decay else None
        self.best, self.score = None, None

    def copies(self):
        return {name: p.detach().clone() for name, p in self.policy.named_parameters()}

    def step(self):
        decay = self.c.ema_decay
        for name, p in self.policy.named_parameters() if self.average else ():
            self.average[name] = decay * self.average[name] + (1 - decay) * p.detach()

    def evaluation(self, models, rows, iteration, missing):
        """Figures of held-out prompts. missing: see finish_scores."""
        c = self.c
        if iteration % c.eval_interval and iteration < c.max_iters:
            return {}
        batch = [respond(c, models, row, "eval", 0, i)
                 for i, row in enumerate(by_hand.held_out_of(c, rows))]
        figures = figures_of(c, batch, "eval")
        by_hand.finish_scores(c, batch, missing)
        score = mean(there([r.score for r in batch]))
        score = figures.get(c.keep_best, score)
        if c.keep_best and (self.score is None or score > self.score + 1e-6 * abs(self.score)):
            seen["best later"] += self.score is not None
            self.score, self.best = score, self.copies()
        elif c.keep_best:
            seen["not the best"] += 1
        return figures

    def products(self, models):
        """{folder: what a run leaves in it}."""
        for adapters in models.adapters:
            adapters.merge()
        left = dict(policy=models.policy)
        if models.value:
            models.value.head.data *= models.value.unit
            left |= dict(value_model=models.value)
        left |= dict(ema_policy=self.average) if self.average else {}
        return left | (dict(best_policy=self.best) if self.best else {})


# PPO and GRPO -------------------------------------------------------------------------------------

def ppo(c, train, val, texts=()):
    """A run of ppo.py. texts: rows with "text", for PPO-ptx."""
    models = models_of(c)
    adams = AdamW(models.trained, c), AdamW(add_value_model(c, models), c)
    kept, log, past = Kept(c, models), [], []

    def rows_of(iteration):
        return [train[i] for i in prompts_of(c, iteration, c.batch_size, len(train))]

    def also(policy, step):
        """InstructGPT (arXiv 2203.02155, eq. 2): in each step the mean loss over all tokens."""
        each = []
        for i in prompts_of(c, step, c.batch_size // c.num_minibatches, len(texts)):
            first, *rest = encode(texts[i]["text"])
            each += [-x for x in by_hand.logprobs_of(policy, [first], rest + [EOS])[0]]
        (c.ptx_coef * sum(each) / len(each)).backward()
        losses.extend(x.item() for x in each)

    noise = [(slot,) for slot in range(c.batch_size)]
    center(c, models, rows_of(0), noise)
    for iteration in range(c.max_iters):
        record, losses = kept.evaluation(models, val, iteration, 0.0), []
        log.append(record)
        past.append(copy.deepcopy(models.policy) if c.staleness else models.policy)
        batch = sampled(c, models, past, rows_of(iteration), "rollout", iteration, noise)
        record |= figures_of(c, batch, "objective")
        if batch[0].age and not c.importance_cap:  # of the tokens of the first step
            first = by_hand.minibatches_of(c, iteration, 1)[0]
            record["policy/off_policy_kl"] = mean(flat(batch[i].moved for i in first))
        by_hand.finish_scores(c, batch, 0.0)
        by_hand.find_unit(models, batch)
        record |= by_hand.find_advantages(c, batch)
        record |= by_hand.ppo_update(c, models, adams, batch, iteration, also if texts else None,
                                     kept.step)
        record |= {"loss/ptx": mean(losses)} if texts else {}
    log.append(kept.evaluation(models, val, c.max_iters, 0.0))
    return log, kept.products(models)


def grpo(c, train, val):
    """A run of grpo.py."""
    models = models_of(c)
    adam, kept, log, past = AdamW(models.trained, c), Kept(c, models), [], []
    slots = range(c.batch_size // c.group_size)

    def numbers_of(iteration):
        return prompts_of(c, iteration, len(slots), len(train))

    def groups_of(numbers, which, purpose, iteration):
        """The groups of these rows, in these slots."""
        rows = flat([train[numbers[slot]]] * c.group_size for slot in which)
        noise = [(slot, i) for slot in which for i in range(c.group_size)]
        batch = sampled(c, models, past, rows, purpose, iteration, noise)
        by_hand.finish_scores(c, batch)
        return [batch[i:i + c.group_size] for i in range(0, len(batch), c.group_size)]

    def is_same(group):
        """Whether nothing tells the responses of a group apart."""
        return is_flat(r.each[c.refill_by] if c.refill_by else r.score for r in group)

    first = numbers_of(0)
    center(c, models, flat([train[i]] * c.group_size for i in first),
           [(slot, i) for slot in slots for i in range(c.group_size)])
    for iteration in range(c.max_iters):
        record = kept.evaluation(models, val, iteration, None)
        log.append(record)
        past.append(copy.deepcopy(models.policy) if c.staleness else models.policy)
        numbers = numbers_of(iteration)
        groups = groups_of(numbers, slots, "rollout", iteration)
        figures = figures_of(c, flat(groups), "objective")
        record["objective/flat_groups"] = mean([is_same(group) for group in groups])
        record["objective/score_std"] = statistics.stdev(
            there([r.score for r in flat(groups)]))
        for attempt in range(c.max_refills):
            again = [slot for slot in slots if is_same(groups[slot])]
            for slot in again:  # another row than this one
                name = f"{c.seed} refill {iteration} {attempt} {slot}"
                further = 1 + hashed(name, 8) % (len(train) - 1)
                numbers[slot] = (numbers[slot] + further) % len(train)
            found = groups_of(numbers, again, f"refill {attempt}", iteration)
            for slot, group in zip(again, found, strict=True):
                seen[f"refill {attempt}"] += 1
                groups[slot] = group
        batch = flat(groups)
        # KL and entropy are of the batch that is trained on, the others of the one at first
        trained = figures_of(c, batch, "objective")
        inner = "objective/entropy", "objective/kl"
        record |= trained | {name: x for name, x in figures.items()
                             if name.startswith("objective") and name not in inner}
        if c.max_refills:
            record |= figures_of(c, batch, "trained")
            record["trained/flat_groups"] = mean([is_same(group) for group in groups])
            for group in groups:
                for r in group:
                    r.left_out = is_same(group)
                    seen["left out"] += r.left_out
        by_hand.find_group_advantages(c, groups)
        record["objective/rlhf_reward"] = mean(there([r.judged for r in batch]))
        record |= by_hand.grpo_update(c, models, adam, batch, iteration, kept.step)
    log.append(kept.evaluation(models, val, c.max_iters, None))
    return log, kept.products(models)


# the reward model ---------------------------------------------------------------------------------

def rm(c, train, val, demonstrations):
    """A run of rm.py, with an adapter; or with teachers, whose scores it learns."""
    if not c.teacher:
        adapters = []

        def adapt(model):
            adapters.append(Adapters(model.trunk, *c.lora, c.seed))
            return [*adapters[0].parameters(), model.head]

        log, models = by_hand.rm(c, train, val, demonstrations, adapt)
        adapters[0].merge()
        return log, models
    model = scalar_model(c.init_from, c.seed)
    fields = ["chosen", "rejected"] if "chosen" in train[0] else ["completion"]

    def score(row, field, of=model, path=""):
        markers = by_hand.MARKERS[::-1] if path.endswith("other") else by_hand.MARKERS
        return scalars(of, encode(row["prompt"] + row[field], markers) + [EOS])[-1]

    @torch.no_grad()
    def ask(rows, fields):
        """The mean of the teachers' scores of each completion, each one's less their mean."""
        said = [[0.0] * len(fields) for _ in rows]
        for path in c.teacher:
            teacher = scalar_model(path)
            raw = [[score(row, field, teacher, path).item() for field in fields] for row in rows]
            said = [[x + (y - mean(flat(raw))) / len(c.teacher) for x, y in zip(a, b, strict=True)]
                    for a, b in zip(said, raw, strict=True)]
        return said

    wanted, held_out = ask(train, fields), ask(by_hand.held_out_of(c, val), ["chosen", "rejected"])

    def follow(row, theirs):
        """
        The mean squared distance from the teacher's scores; and of a pair the cross-entropy of two
        coins, and whether the better one has the higher score.
        """
        ours = [score(row, field) for field in fields]
        figures = {"loss/score": sum((x - y) ** 2 for x, y in zip(ours, theirs, strict=True))
                   / len(ours)}
        if len(ours) == 2:
            p, q = 1 / (1 + math.exp(theirs[1] - theirs[0])), 1 / (1 + torch.exp(ours[1] - ours[0]))
            figures["loss/preference"] = -p * torch.log(q) - (1 - p) * torch.log(1 - q)
            figures["train/accuracy"] = 0.5 + 0.5 * torch.sign(ours[0] - ours[1]).detach()
        return figures

    def learn(picked):
        each = [follow(train[i], wanted[i]) for i in picked]
        means = {name: sum(one[name] for one in each) / len(each) for name in each[0]}
        loss = c.preference_coef * means.get("loss/preference", 0.0)
        return loss + c.score_coef * means["loss/score"], {
            name: x.item() for name, x in means.items()}

    def evaluate():
        ours = [[score(row, field).item() for field in ("chosen", "rejected")]
                for row in by_hand.held_out_of(c, val)]
        same = [(a > b) == (x > y) for (a, b), (x, y) in zip(ours, held_out, strict=True)]
        return {"eval/loss": mean([math.log(1 + math.exp(b - a)) for a, b in ours]),
                "eval/agreement": mean(same),
                "eval/correlation": statistics.correlation(flat(ours), flat(held_out))}

    adam = AdamW(parameters_of(model).values(), c)
    log = by_hand.train_on(c, adam, "reward_model", evaluate, learn, len(train))
    zero = [(row, "completion") for row in demonstrations] or [(row, "chosen") for row in val]
    model.shift = -mean([score(*one).item() for one in zero])
    return log, dict(reward_model=model)

"""
What the options of ppo.py, grpo.py and rm.py compute, worked out once more: functions that take the
place of those of by_hand.py, for several turns, policies that are older than the batch, refills,
adapters, a score that is centred, PPO-ptx, averages, and the best policy; a reward model with
teachers; and recipes/dpo.py. Nothing of the repository is imported here.

c has these keys beside those of by_hand.py: ref_path, staleness, importance_cap, turns, lora,
ema_decay, keep_best; of ppo ptx_coef; of grpo max_refills, refill_by; of rm teacher, score_coef,
preference_coef. And what these functions note there for each other.
"""
import copy
import json
import math
import statistics
from types import SimpleNamespace
from unittest import mock

import by_hand
import torch
from by_hand import (ENDS, EOS, AdamW, decode, encode, flat, hashed, is_flat, kl_estimate,
                     language_model, mean, noise_of, parameters_of, prompts_of, sample,
                     scalar_model, scalars, seen, there)

plain = SimpleNamespace(**vars(by_hand))  # its own functions
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
def respond(c, models, row, purpose, iteration, *noise):
    """
    by_hand.respond, of several turns where c has them; in a rollout by the policy as it was
    `staleness` iterations ago, but a refill is by that of now.

    The ratio is to the policy that has sampled. With importance_cap it is to the policy of now, and
    a token counts so much more as it is likelier to this one, but not more than the cap (decoupled
    PPO, arXiv 2505.24298).
    """
    of_then, version = copy.copy(models), max(0, iteration - c.staleness)
    if purpose == "rollout":
        of_then.policy = c.past[version]
        seen["older"] += version < iteration
    if c.turns:
        r = converse(c, of_then.policy, row, purpose, iteration, *noise)
        r = by_hand.judge(c, of_then, row, r)
    else:
        r = plain.respond(c, of_then, row, purpose, iteration, *noise)
    r.age = iteration - version
    if purpose == "eval" or not (r.age or c.importance_cap):
        return r
    now, _ = by_hand.logprobs_of(models.policy, r.prompt, r.response, c.temperature, r.own)
    now = [x.item() for x in now]
    r.moved = [kl_estimate(p, q, "k3") for p, q in zip(r.old, now, strict=True)]
    if c.importance_cap:
        then, r.old = r.old, now
        r.counts = [min(math.exp(p - q), c.importance_cap)
                    for p, q in zip(r.old, then, strict=True)]
        seen["capped"] += sum(count == c.importance_cap for count in r.counts)
    return r


def summary(c, batch, prefix):
    """by_hand.summary, and figures of turns and of older policies."""
    figures = plain.summary(c, batch, prefix)
    if c.turns:
        figures[f"{prefix}/turns"] = mean([r.turns for r in batch])
        figures[f"{prefix}/environment_share"] = mean([1 - len(r.own) / len(r.response)
                                                       for r in batch])
    if prefix == "objective" and batch[0].age:
        figures["policy/staleness"] = batch[0].age
        if c.importance_cap:  # of all tokens
            figures["policy/off_policy_kl"] = mean(flat(r.moved for r in batch))
    if c.importance_cap and prefix == "objective":
        figures |= figures_of_weights(flat(r.counts for r in batch), c.importance_cap)
    return figures


def figures_of_weights(weights, bound):
    """Of importance. bound: the weight of a token that is capped, or left out."""
    return {"policy/importance": mean(weights),
            "policy/importance_capped": mean([w == bound for w in weights]),
            "policy/effective_tokens": sum(weights)**2 / sum(w * w for w in weights) / len(weights)}


# models -------------------------------------------------------------------------------------------

class Adapters:
    """
    LoRA (arXiv 2106.09685, eq. 3): each map W of GPT-2's layers becomes W + alpha / rank B A, and
    nothing else of the model is trained.
    """

    def __init__(self, model, rank, alpha, seed):
        self.scale, self.hooks = alpha / rank, {}
        drawn = torch.Generator().manual_seed(seed)
        model.requires_grad_(False)
        for linear in [m for m in model.modules() if type(m).__name__ == "Conv1D"]:  # x W
            n_in, n_out = linear.weight.shape
            A = torch.empty(rank, n_in).double().uniform_(-1, 1, generator=drawn) * n_in**-0.5
            linear.A = torch.nn.Parameter(A)
            linear.B = torch.nn.Parameter(torch.zeros(n_out, rank).double())
            self.hooks[linear] = linear.register_forward_hook(
                lambda linear, x, y: y + self.scale * (linear.B @ (linear.A @ x[0].mT)).mT)

    @torch.no_grad()
    def merge(self):
        """W becomes the sum."""
        for linear, hook in self.hooks.items():
            linear.weight += self.scale * (linear.B @ linear.A).mT
            hook.remove()
            del linear.A, linear.B


def models_of(c):
    """by_hand.models_of. c.said: whether the reward model's config.json says its zero."""
    models, c.adapters, c.said = plain.models_of(c), [], True
    if models.reference:
        models.reference = language_model(c.ref_path or c.policy_path)
    if models.reward:
        with open(f"{c.reward_path}/config.json", encoding="utf-8") as f:
            c.said = "score_shift" in json.load(f)
    if c.lora:
        c.adapters.append(Adapters(models.policy, *c.lora, c.seed))
    return models


def value_model_of(c, models):
    value, own = plain.value_model_of(c, models)
    if c.lora and c.value_init != "shared":
        c.adapters.append(Adapters(value.trunk, *c.lora, c.seed))
        own = parameters_of(value).values()
    return value, own


def center(c, models):
    """
    The reward model's zero, where its config.json does not say it: the mean score of those of the
    first responses that have ended, or of all.
    """
    if models.reward is None or c.said:
        return
    size = getattr(c, "group_size", 1)
    rows = [c.train[i] for i in prompts_of(c, 0, c.batch_size // size, len(c.train))]
    batch = [(row, respond(c, models, row, "rollout", 0, slot, which))
             for slot, row in enumerate(rows) for which in range(size)]
    ended = [(row, r) for row, r in batch if r.finished]
    seen["centred, all" if len(ended) == len(batch) else "centred, some"] += 1
    shift = -mean([by_hand.learned_score(c, row, r, models.reward) for row, r in ended or batch])
    models.reward.shift = shift
    if getattr(c, "value_init", "") == "reward":
        models.value.shift = shift


def evaluation(c, models, rows, iteration):
    """
    by_hand.evaluation, with which an iteration begins. c.past: the policies of all iterations so
    far; c.best: that with the best score, c.score, of held-out prompts.
    """
    c.models, c.iteration = models, iteration
    c.past.append(copy.deepcopy(models.policy) if c.staleness else models.policy)
    if iteration == 0:
        center(c, models)
        c.average = copies(models.policy) if c.ema_decay else None
    if iteration % c.eval_interval and iteration < c.max_iters:
        return {}
    batch = [respond(c, models, row, "eval", 0, i)
             for i, row in enumerate(by_hand.held_out_of(c, rows))]
    figures = summary(c, batch, "eval")
    by_hand.finish_scores(c, batch, c.missing)
    score = figures.get(c.keep_best, mean(there([r.score for r in batch])))
    if c.keep_best and (c.score is None or score > c.score + 1e-6 * abs(c.score)):
        seen["best later"] += c.score is not None
        c.score, c.best = score, copies(models.policy)
    elif c.keep_best:
        seen["not the best"] += 1
    return figures


def copies(policy):
    return {name: p.detach().clone() for name, p in policy.named_parameters()}


# PPO and GRPO -------------------------------------------------------------------------------------

class Watched:
    """The policy's AdamW: more gradients before a step, and a moving average behind it."""

    def __init__(self, adam, c, first=0):
        """first: the number of the first step, of all that have texts."""
        self.adam, self.c, self.number = adam, c, first
        self.zero_gradients = adam.zero_gradients

    def clip(self):
        """InstructGPT (arXiv 2203.02155, eq. 2): in each step the mean loss over all tokens."""
        c, each = self.c, []
        if c.texts:
            rows = prompts_of(c, self.number, c.batch_size // c.num_minibatches, len(c.texts))
            for first, *rest in [encode(c.texts[i]["text"]) for i in rows]:
                logprobs, _ = by_hand.logprobs_of(c.models.policy, [first], rest + [EOS])
                each += [-x for x in logprobs]
            (c.ptx_coef * sum(each) / len(each)).backward()
            c.losses += [x.item() for x in each]
        self.number += 1
        return self.adam.clip()

    def step(self, lr):
        self.adam.step(lr)
        decay, average = self.c.ema_decay, self.c.average or {}
        for name, p in self.c.models.policy.named_parameters():
            if name in average:
                average[name] = decay * average[name] + (1 - decay) * p.detach()


def ppo_update(c, models, adams, batch, iteration):
    c.losses, first = [], iteration * c.ppo_epochs * c.num_minibatches
    adams = Watched(adams[0], c, first), adams[1]
    figures = plain.ppo_update(c, models, adams, batch, iteration)
    if batch[0].age and not c.importance_cap:  # of the tokens of the first step
        first = by_hand.minibatches_of(c, iteration, 1)[0]
        figures["policy/off_policy_kl"] = mean(flat(batch[i].moved for i in first))
    return figures | ({"loss/ptx": mean(c.losses)} if c.texts else {})


def grpo_update(c, models, adam, batch, iteration):
    return plain.grpo_update(c, models, Watched(adam, c), batch, iteration) | c.refilled


def refill(c, groups):
    """by_hand.find_group_advantages, of which those without a difference come of another row."""
    def is_same(group):
        return is_flat(r.each[c.refill_by] if c.refill_by else r.score for r in group)

    c.refilled = {"objective/flat_groups": mean([is_same(group) for group in groups])}
    numbers = prompts_of(c, c.iteration, len(groups), len(c.train))
    for attempt in range(c.max_refills):
        for slot in [slot for slot, group in enumerate(groups) if is_same(group)]:
            name = f"{c.seed} refill {c.iteration} {attempt} {slot}"
            further = 1 + hashed(name, 8) % (len(c.train) - 1)
            numbers[slot] = (numbers[slot] + further) % len(c.train)
            groups[slot] = [respond(c, c.models, c.train[numbers[slot]], f"refill {attempt}",
                                    c.iteration, slot, which) for which in range(c.group_size)]
            by_hand.finish_scores(c, groups[slot])
            seen[f"refill {attempt}"] += 1
    for group in groups:
        for r in group:
            r.left_out = is_same(group)
            seen["left out"] += r.left_out
    # KL and entropy are of the batch that is trained on, the others of the one at first
    c.refilled |= {name: x for name, x in summary(c, flat(groups), "objective").items()
                   if name in ("objective/entropy", "objective/kl") or name.startswith("policy")}
    c.refilled |= summary(c, flat(groups), "trained") | {
        "trained/flat_groups": mean([is_same(group) for group in groups])}
    plain.find_group_advantages(c, groups)


IN_PLACE = dict(respond=respond, summary=summary, models_of=models_of, evaluation=evaluation,
                value_model_of=value_model_of, ppo_update=ppo_update, grpo_update=grpo_update)


def run(c, script, missing, more=()):
    """A run of by_hand.py's script: its log, and {folder: what it leaves in it}."""
    c.past, c.score, c.best, c.refilled, c.missing = [], None, None, {}, missing
    with mock.patch.multiple(by_hand, **IN_PLACE | dict(more)):
        log, models = script(c, c.train, c.val)
    for adapters in c.adapters:
        adapters.merge()
    more = dict(ema_policy=c.average, best_policy=c.best)
    return log, models | {name: kept for name, kept in more.items() if kept}


def ppo(c, train, val, texts=()):
    """A run of ppo.py. texts: rows with "text", for PPO-ptx."""
    c.train, c.val, c.texts = train, val, texts
    return run(c, by_hand.ppo, 0.0)


def grpo(c, train, val):
    """A run of grpo.py."""
    c.train, c.val, c.texts = train, val, ()
    return run(c, by_hand.grpo, None, dict(find_group_advantages=refill) if c.max_refills else ())


# the reward model ---------------------------------------------------------------------------------

def rm(c, train, val, demonstrations):
    """A run of rm.py, with an adapter; or with teachers, whose scores it learns."""
    if not c.teacher:
        adapted = scalar_model(c.init_from, c.seed)
        adapters = Adapters(adapted.trunk, *c.lora, c.seed)
        with mock.patch.object(by_hand, "scalar_model", lambda *_: adapted):
            log, models = by_hand.rm(c, train, val, demonstrations)
        adapters.merge()
        return log, models
    model = scalar_model(c.init_from, c.seed)
    fields = ["chosen", "rejected"] if "chosen" in train[0] else ["completion"]

    def score(row, field, of=model, path=""):
        markers = by_hand.MARKERS[::-1] if path.endswith("other") else by_hand.MARKERS
        return scalars(of, encode(row["prompt"] + row[field], markers) + [EOS])[-1]

    @torch.no_grad()
    def ask(rows, fields):
        """The mean of the teachers' scores of each completion, each one's less their mean."""
        said, teachers = [[0.0] * len(fields) for _ in rows], c.teacher.split(",")
        for path in teachers:
            teacher = scalar_model(path)
            raw = [[score(row, field, teacher, path).item() for field in fields] for row in rows]
            said = [[x + (y - mean(flat(raw))) / len(teachers) for x, y in zip(a, b, strict=True)]
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


# DPO: equation 7 of arXiv 2305.18290, one pair and one token at a time ----------------------------

def dpo(c, train, val, _):
    """A run of recipes/dpo.py."""
    policy, reference = (language_model(c.policy_path) for _ in range(2))
    adapters = [Adapters(policy, *c.lora, c.seed)] if c.lora else []

    def reward(row, side):
        text = encode(row["prompt"]), encode(row[side]) + [EOS]
        ours, theirs = (by_hand.logprobs_of(model, *text)[0] for model in (policy, reference))
        return c.beta * sum(p - q.detach() for p, q in zip(ours, theirs, strict=True))

    def compare(rows, wrong):
        """The loss of pairs, of which a share has the wrong label; and the means of figures."""
        losses, figures = [], []
        for row in rows:
            good, bad = reward(row, "chosen"), reward(row, "rejected")
            p = 1 / (1 + torch.exp(bad - good))  # Bradley-Terry
            losses.append(-(1 - wrong) * torch.log(p) - wrong * torch.log(1 - p))
            x, y = good.item(), bad.item()
            tie = x == y or row["chosen"] == row["rejected"]
            seen["a tie" if tie else "a margin"] += 1
            figures.append(dict(accuracy=0.5 if tie else float(x > y), margin=x - y,
                                chosen_reward=x, rejected_reward=y))
        loss = sum(losses) / len(losses)
        return loss, {name: mean([one[name] for one in figures]) for name in figures[0]}

    def evaluate():
        loss, figures = compare(by_hand.held_out_of(c, val), 0.0)
        return {"eval/loss": loss.item()} | {f"eval/{name}": x for name, x in figures.items()}

    def learn(picked):
        loss, figures = compare([train[i] for i in picked], c.label_smoothing)
        return loss, {"loss/preference": loss.item()} | {
            f"train/{name}": x for name, x in figures.items()}

    adam = AdamW(policy.parameters(), c)
    log = by_hand.train_on(c, adam, "policy", evaluate, learn, len(train))
    for each in adapters:
        each.merge()
    return log, dict(policy=policy)

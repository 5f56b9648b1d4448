"""
What the recipes, and the example of docs/fork.md, compute, worked out once more in plain loops:
functions that take the place of those of tests/by_hand.py, and the runs in which
evidence/tests/test_recipes.py compares both. A new recipe brings its own.
"""
import itertools
import math
import statistics
from types import SimpleNamespace

import torch

import by_hand
import test_by_hand_options as with_options
from by_hand import decode, encode, flat, is_flat, mean, number, seen, there
from by_hand_options import figures_of_weights
from test_by_hand import GRPO, PPO
from tiny import ANSWERS, PROMPTS

plain = SimpleNamespace(**vars(by_hand))  # its own functions, whose places those of here take


# losses of a token --------------------------------------------------------------------------------

def soft_gate(ratio, advantage, low, high):
    """SAPO (arXiv 2511.20347) as a loss; the bound is PPO's."""
    tau = 1.0 if advantage > 0 else 1.05
    gate = 4 / tau / (1 + torch.exp(-tau * (ratio - 1)))
    return -advantage * gate, plain.clipped_surrogate(ratio, advantage, low, high)[1]


def dual_clipped(ratio, advantage, low, high):
    loss, bound = plain.clipped_surrogate(ratio, advantage, low, high)
    if advantage < 0 and loss > -advantage * 1.1:
        seen["dual"] += 1
        return -advantage * 1.1, bound
    return loss, bound


def clipped_higher(ratio, advantage, low, _):
    return plain.clipped_surrogate(ratio, advantage, low, 0.28)


def geometric_mean(c, r, t, logprob, log_ratios):
    """GMPO: each log ratio is clipped on the side of its advantage, then comes the mean."""
    def bounded(x):
        if r.advantage > 0:
            return torch.clamp(x, max=c.cliprange_high), x.item() > c.cliprange_high
        return torch.clamp(x, min=-c.cliprange), r.advantage < 0 and x.item() < -c.cliprange

    each = [bounded(x) for x in log_ratios]
    bound = "clipped" if each[t][1] else ""
    seen["far, and kept"] += abs(log_ratios[t].item()) > c.cliprange and not bound
    return -r.advantage * torch.exp(sum(x for x, _ in each) / len(each)), bound


def with_a_price(c, r, t, logprob, log_ratios):
    seen["pays"] += r.pays[t] and log_ratios[t].item() != 0
    free = -r.advantage * torch.exp(log_ratios[t])
    return free + (abs(log_ratios[t]) if r.pays[t] else 0.0), r.pays[t]


def without_some(c, r, t, logprob, log_ratios):
    loss, bound = plain.loss_of_token(c, r, t, logprob, log_ratios)
    seen["stays"] += r.stays[t]
    return (0.0 * loss, bound and f"{bound}, stays") if r.stays[t] else (loss, bound)


def of_its_own(c, r, t, logprob, log_ratios):
    """Each token has an advantage of its own."""
    return plain.clipped_surrogate(
        torch.exp(log_ratios[t]), r.advantages[t], c.cliprange, c.cliprange_high)


def without_far_ones(c, r, t, logprob, log_ratios):
    loss, bound = plain.loss_of_token(c, r, t, logprob, log_ratios)
    return 0.0 * loss if r.far else loss, bound


def short_kl(logprob, reference, kind):
    """k3, but at most 0.05 nats, and there without a gradient."""
    kl = plain.kl_estimate(logprob, reference, kind)
    seen["short" if number(kl) <= 0.05 else "too long"] += 1
    return kl if number(kl) <= 0.05 else 0 * kl + 0.05


def kl_with_the_ratio(logprob, reference, kind):
    """Where the old policy is the policy: the ratio is 1, and has a gradient."""
    kl = plain.kl_estimate(logprob, reference, kind)
    return kl * torch.exp(logprob - logprob.detach()) if torch.is_tensor(logprob) else kl


# losses of a response -----------------------------------------------------------------------------

def rows_with_tokens(c, iteration, epochs):
    for minibatch in plain.minibatches_of(c, iteration, epochs):
        c.rows = [c.batch[i] for i in minibatch if not getattr(c.batch[i], "left_out", False)]
        yield minibatch


def losses_by_sums(c, models, r, weight):
    return plain.grpo_losses(c, models, r, 1 / sum(x.finished for x in c.rows))


def losses_by_prompt(c, models, r, weight):
    """All prompts of a step weigh the same, and so do the tokens behind a prompt."""
    tokens = sum(len(x.own) for x in c.rows if x.group == r.group)
    return plain.grpo_losses(c, models, r, 1 / tokens / len({x.group for x in c.rows}))


def kl_of_outcomes(p, q, k):
    """KL(p || q), lists, where all but the k likeliest of q are one outcome."""
    order = sorted(range(len(q)), key=lambda i: -q[i])
    parts = [[i] for i in order[:k]] + [order[k:]]
    p, q = ([sum(x[i] for i in part) for part in parts] for x in (p, q))
    return sum(a * (torch.log(a) - math.log(b)) for a, b in zip(p, q, strict=True))


def losses_by_the_top_k(c, models, r, weight):
    """by_hand.grpo_losses with the KL of the teacher's 5 likeliest tokens in the place of k3."""
    r.advantage, kl_coef, c.kl_coef = r.of_rewards, c.kl_coef, 0.0
    figures, text = plain.grpo_losses(c, models, r, weight), torch.tensor([r.prompt + r.response])
    r.advantage, c.kl_coef = True, kl_coef
    places = slice(len(r.prompt) - 1, text.shape[1] - 1)
    of_policy, of_teacher = (
        torch.softmax(model(text).logits[0, places, :by_hand.TOKENS] / c.temperature, 1)
        for model in (models.policy, models.reference))
    kls = [kl_of_outcomes([*p], q.tolist(), 5)
           for p, q in zip(of_policy, of_teacher, strict=True)]
    (kl_coef * sum(kls) * weight).backward()
    for one, kl in zip(figures, kls, strict=True):
        one["loss/kl"] = kl.item()
    return figures


def losses_and_imitation(c, models, r, tokens):
    figures = plain.ppo_losses(c, models, r, tokens)
    right = sum(len(x.own) for x in c.rows if x.score > 0)
    seen["right" if r.score > 0 else "wrong"] += 1
    if r.score > 0:
        logprobs, _ = by_hand.logprobs_of(models.policy, r.prompt, r.response, c.temperature, r.own)
        (-c.positive_coef * sum(logprobs) / right).backward()
    return figures


# advantages of GRPO -------------------------------------------------------------------------------

def divide(groups, known):
    unit = (statistics.stdev(known) if len(known) > 1 else 0.0) + 1e-4
    for r in flat(groups):
        r.advantage /= unit


def divided(c, groups):
    """By the deviation of all advantages of responses that have a score (REINFORCE++, ScaleRL)."""
    plain.find_group_advantages(c, groups)
    known = [r.advantage for r in flat(groups) if r.judged is not None]
    seen["no score"] += len(known) < len(flat(groups))
    divide(groups, known)


def by_length(c, groups):
    """OPO: the score minus the mean of the group's, each weighted by its length."""
    plain.find_group_advantages(c, groups)
    for group in groups:
        known = [r for r in group if r.judged is not None]
        lengths = sum(len(r.own) for r in known)
        seen["no score"] += len(known) < len(group)
        for r in known if not is_flat(r.judged for r in known) else ():
            r.advantage = r.judged - sum(x.judged * len(x.own) for x in known) / lengths


def best_alone(c, groups):
    """Pass@k: what the best score of a group would lose without the response."""
    plain.find_group_advantages(c, groups)
    for group in groups:
        known = [r for r in group if r.judged is not None]
        for r in known if len(known) > 1 else ():
            others = max(x.judged for x in known if x is not r)
            r.advantage = max(r.judged - others, 0.0)
            seen["the best" if r.advantage else "not the best"] += 1
    c.batch = flat(groups)


def over_the_mean(c, groups):
    plain.find_group_advantages(c, groups)
    for group in groups:
        middle = mean([r.judged for r in group])
        seen["mean above 0" if middle > 0 else "mean below 0"] += 1
        for r in group:
            r.advantage = r.advantage / (middle + 1e-4) if middle > 0 else 0.0


def compared(scores):
    """Each minus the mean of all, over their deviation; None is no score."""
    known = there(scores)
    if is_flat(known):
        return [0.0] * len(scores)
    unit = statistics.stdev(known) + 1e-4
    return [0.0 if x is None else (x - mean(known)) / unit for x in scores]


def each_reward_alone(c, groups):
    for r in flat(groups):
        r.judged, r.advantage = r.score, 0.0
    for group in groups:
        for weight, name in c.mix:
            for r, x in zip(group, compared([r.each[name] for r in group]), strict=True):
                r.advantage += weight * x
    divide(groups, [r.advantage for r in flat(groups)])


def with_covariances(c, groups):
    """r.cov of each token: (advantage - mean) * (log-prob - mean), means over all tokens."""
    plain.find_group_advantages(c, groups)
    batch, tokens = flat(groups), flat(r.old for r in flat(groups))
    middle = mean([r.advantage for r in batch for _ in r.old])
    for r in batch:
        r.cov = [(r.advantage - middle) * (x - mean(tokens)) for x in r.old]
    return batch, len(tokens)


def who_pays(c, groups):
    batch, n = with_covariances(c, groups)
    least = sorted(flat(r.cov for r in batch))[-max(int(0.1 * n), 1)]
    for r in batch:
        r.pays = [x >= least for x in r.cov]


def who_stays(c, groups):
    batch, n = with_covariances(c, groups)
    c.drawn_at = getattr(c, "drawn_at", -1) + 1  # the iteration
    inside = [(i, t) for i, r in enumerate(batch) for t, x in enumerate(r.cov) if 0.01 < x < 5]
    order = by_hand.permutation(len(inside), f"{c.seed} clip-cov {c.drawn_at}")
    drawn = {inside[i] for i in order[:max(int(0.3 * n), 1)]}
    seen["inside, and not drawn"] += len(inside) > len(drawn)
    for i, r in enumerate(batch):
        r.stays = [(i, t) in drawn for t in range(len(r.old))]


def all_teach(c, groups):
    plain.find_group_advantages(c, groups)
    for r in flat(groups):
        r.of_rewards, r.advantage = r.advantage, True  # a step is made in any case
        seen["no reward" if r.of_rewards == 0 else "reward"] += 1


def from_the_teacher(c, groups):
    for r in flat(groups):
        r.advantages = [c.kl_coef * (q - p) for p, q in zip(r.old, r.reference, strict=True)]
        r.judged = r.score + sum(r.advantages)
        r.advantage = any(r.advantages)


def by_turns(c, groups):
    for group in groups:
        for r in group:
            r.judged, r.advantages, r.worth = r.score, [], {}
            r.turn_of = [sum(b > a + 1 for a, b in itertools.pairwise(r.own[:t + 1]))
                         for t in range(len(r.own))]  # a new turn behind a gap
            for t, turn in enumerate(r.turn_of):
                r.worth.setdefault(turn, r.score - sum(r.paid[:t]))
        for r in group:
            for turn in r.turn_of:
                x = [other.worth[turn] for other in group if turn in other.worth]
                r.advantages.append(0.0 if is_flat(x) else
                                    (r.worth[turn] - mean(x)) / (statistics.stdev(x) + 1e-4))
                seen["alone" if len(x) == 1 else f"turn {turn}"] += 1
            r.advantage = any(r.advantages)


def by_steps(c, groups):
    """What ends at a token or behind it counts for it, and the rest of the score does."""
    for group in groups:
        of_steps = iter(compared([x for r in group for x in r.paid if x]))
        of_rest = compared([r.score - sum(r.paid) for r in group])
        for r, rest in zip(group, of_rest, strict=True):
            own = [next(of_steps) if x else 0.0 for x in r.paid]
            r.judged, r.advantages = r.score, [rest + sum(own[t:]) for t in range(len(own))]
            r.advantage = any(r.advantages)
            seen["steps"] += sum(x != 0 for x in own) > 1


def of_trees(c, groups):
    plain.find_group_advantages(c, groups)
    for group in groups:
        trees = [group[i:i + c.branches] for i in range(0, len(group), c.branches)]
        scores = [[r.judged for r in tree] for tree in trees]
        values = [mean(there(x)) if there(x) else None for x in scores]
        for tree, of_trunk, own in zip(trees, compared(values), map(compared, scores), strict=True):
            for r, of_branch in zip(tree, own, strict=True):
                r.advantages = [of_trunk if t < c.trunk else of_branch for t in range(len(r.own))]
                r.advantage = any(r.advantages)
                seen["ends in the trunk"] += len(r.own) <= c.trunk
                seen["trunk against branch"] += of_trunk * of_branch < 0
                seen["no score"] += r.judged is None


def without_flat_groups(c, groups):
    divided(c, groups)
    c.batch = flat(groups)
    for place, r in enumerate(c.batch):
        r.group = place // c.group_size
        r.left_out = is_flat(x.score for x in groups[r.group])
        seen["flat group"] += r.left_out
    for group in groups:
        if mean([r.raw for r in group]) >= 0.4:
            c.solved.add(PROMPTS.index(decode(group[0].prompt)))


def far_ones(c, groups):
    """DeepSeek-V3.2: which bad responses are of another sampler than the policy."""
    plain.find_group_advantages(c, groups)
    for r in flat(groups):
        distance = mean([off(token, t) for t, token in enumerate(r.response)])
        r.far = r.advantage < 0 and distance > c.off_policy_limit
        seen["left out" if r.far else "worse, and kept" if r.advantage < 0 else "good"] += 1


# rewards, advantages and weights of PPO -----------------------------------------------------------

def with_price(c, batch, missing=None):
    plain.finish_scores(c, batch, missing)
    for r in batch:
        if r.finished or not c.missing_eos_penalty:
            r.score -= 0.3 * len(r.response)


def adapting_kl_coef(c, batch):
    figures = plain.find_advantages(c, batch) | {"objective/kl_coef": c.kl_coef}
    kl = mean([sum(r.old) - sum(r.reference) for r in batch])
    seen["kl_coef up" if kl > c.kl_target else "kl_coef down"] += 1
    c.kl_coef *= 1 + min(max(kl / c.kl_target - 1, -0.2), 0.2) * len(batch) / 10_000
    return figures


def of_scores(models, batch):
    """The unit of the values: a score."""
    for r in batch:
        r.unit = 1.0


def white_rewards(c, batch):
    figures = plain.find_advantages(c, batch)
    rewards = flat(r.rewards for r in batch)
    middle, deviation = mean(rewards), math.sqrt(statistics.pvariance(rewards) + 1e-8)
    for r in batch:
        r.rewards = [(x - middle) / deviation + middle for x in r.rewards]
        r.advantages, r.returns = by_hand.advantages_and_returns(
            r.rewards, r.values, c.gamma, c.lam)
    by_hand.whiten(batch)
    del figures["val/explained_variance"]  # of other returns
    return figures


def by_length_of_response(c, batch):
    """VAPO: the returns are those of c.lam, the advantages of a lambda of each response's own."""
    figures, c.batch = plain.find_advantages(c, batch), batch
    for r in batch:
        lam = max(1 - 1 / (c.lam_alpha * len(r.own)), 0.0)
        seen["lambda 0" if lam == 0 else "lambda above 0"] += 1
        r.advantages, _ = by_hand.advantages_and_returns(
            [x / r.unit for x in r.rewards], r.values, c.gamma, lam)
    by_hand.whiten(batch)
    return figures


def off(token, t):
    """How far the sampler's log-prob of a token in this place is from the policy's."""
    return 0.9 * math.sin(3 * token + t)


def with_weights(c, batch):
    figures, every = plain.find_advantages(c, batch), []
    for r in batch:
        weights = [math.exp(-off(token, t)) for t, token in enumerate(r.response)]
        r.counts = [w if 0.5 <= w <= c.importance_cap else 0.0 for w in weights]
        every += r.counts
    seen["left out"] += every.count(0.0)
    return figures | figures_of_weights(every, 0.0)


def with_weights_of_responses(c, batch):
    """min(the product of p / q over the response, cap), at each of its tokens."""
    figures, every = plain.find_advantages(c, batch), []
    for r in batch:
        product = math.exp(-sum(off(token, t) for t, token in enumerate(r.response)))
        r.counts = [min(product, c.importance_cap)] * len(r.response)
        every += r.counts
        seen["at the cap" if product > c.importance_cap else "below the cap"] += 1
    return figures | figures_of_weights(every, c.importance_cap)


# updates ------------------------------------------------------------------------------------------

def too_far(c, figures):
    seen["too far"] += (end := mean([one["policy/approx_kl"] for one in figures]) > c.target_kl)
    return end


def held_entropy(c, models, adam, batch, iteration):
    """The bonus of an iteration depends on the entropies of those before it."""
    if iteration == 0:
        c.walk, c.step, c.entropy_coef = c.entropy_coef, c.entropy_coef, 0.0
    figures = plain.grpo_update(c, models, adam, batch, iteration)
    entropy = -mean(flat(r.old for r in batch))
    seen["too low" if entropy <= 2.2 else "high enough"] += 1
    c.walk = max(0.0, c.walk + c.step if entropy <= 2.2 else c.walk - c.step)
    c.entropy_coef = c.walk if entropy <= 2.2 else 0.0
    return figures


def update_without_far_ones(c, models, adam, batch, iteration):
    figures = plain.grpo_update(c, models, adam, batch, iteration)
    share = sum(len(r.own) * r.far for r in batch) / sum(len(r.own) for r in batch)
    return figures | {"policy/left_out": share}


class Waits:
    """An AdamW that makes no step, or one with another learning rate than it is told."""

    def __init__(self, adam, lr):
        self.adam, self.lr, self.zero_gradients = adam, lr, adam.zero_gradients

    def clip(self):
        return self.adam.clip() if self.lr is not None else 0.0

    def step(self, _):
        if self.lr is not None:
            self.adam.step(self.lr)


def value_learns_first(c, models, adams, batch, iteration):
    """The policy waits for value_first iterations: its own are counted from there."""
    own, lr = iteration - c.value_first, None
    if own >= 0:
        lr = by_hand.learning_rate(own, c.learning_rate, c.warmup_iters,
                                   c.max_iters - c.value_first, c.lr_decay)
    figures = plain.ppo_update(c, models, (Waits(adams[0], lr), adams[1]), batch, iteration)
    seen["waits" if own < 0 else "learns"] += 1
    return figures | ({"policy/lr": lr} if own >= 0 else {"policy/lr": 0.0, "policy/steps": 0})


# models, prompts, texts ---------------------------------------------------------------------------

def with_a_teacher(c):
    c.models = plain.models_of(c)
    c.models.reference = by_hand.language_model(c.ref_path)
    return c.models


def summary_with_hints(c, batch, prefix):
    """In training the reference reads what the policy has not read: a solution, then the prompt."""
    for i, r in enumerate(batch) if prefix == "objective" else ():
        others = batch[i - i % c.group_size:][:c.group_size]
        found = [x.text for x in others if x is not r and x.score >= 0.5][:1]
        prompt = decode(r.prompt)
        if len(prompt) % 2:
            found = [ANSWERS[prompt]]
        r.left_out = not found
        seen["no hint" if r.left_out else "answer" if len(prompt) % 2 else "another's"] += 1
        if found:
            with torch.no_grad():
                logprobs, _ = by_hand.logprobs_of(
                    c.models.reference, encode(f"{found[0]}\n{prompt}"), r.response, c.temperature)
            r.reference = [x.item() for x in logprobs]
    figures = plain.summary(c, batch, prefix)
    if prefix == "objective":
        figures["objective/hinted"] = mean([not r.left_out for r in batch])
    return figures


def two_teachers(c):
    models = plain.models_of(c)
    models.reference, c.second = map(by_hand.language_model, c.ref_path.split(","))
    return models


def judged_by_two(c, models, row, r):
    r = plain.judge(c, models, row, r)
    second, _ = by_hand.logprobs_of(c.second, r.prompt, r.response, c.temperature)
    r.reference = [(p + q.item()) / 2 for p, q in zip(r.reference, second, strict=True)]
    return r


def judged_by_none(c, models, row, r):
    """A reward with the weight 0 is a score of 0; by_hand.judge has none then."""
    r = plain.judge(c, models, row, r)
    r.raw = r.score = r.score or 0.0
    return r


def unsolved_prompts(c, iteration, count, n):
    """A prompt is solved for ever if a group of its responses has scored 0.4 on average."""
    c.solved = getattr(c, "solved", set())
    left = sorted(set(range(n)) - c.solved) or list(range(n))
    others, picked = by_hand.permutation(len(left), f"{c.seed} others {iteration}"), []
    for place, i in enumerate(plain.prompts_of(c, iteration, count, n)):
        seen["replaced"] += i in c.solved
        picked.append(left[others[place % len(left)]] if i in c.solved else i)
    return picked


CLOSE = ord("y")  # a token that the tiny models often say


def with_an_end(c, policy, prompt, noise):
    """The third token is CLOSE, unless one of the first two is; its uniform is not used."""
    said = []
    for t, uniform in enumerate(noise):
        said += [CLOSE] if t == 2 and CLOSE not in said else plain.sample(
            c, policy, prompt + said, [uniform])
        if said[-1] in by_hand.ENDS:
            break
    return said


def judged_without_the_end(c, models, row, r):
    forced = len(r.response) > 2 and CLOSE not in r.response[:2]
    r.own = [t for t in r.own if not (forced and t == 2)]
    r.paid = [0.0] * len(r.own)
    seen["forced" if forced else "closed" if CLOSE in r.response[:2] else "short"] += 1
    return plain.judge(c, models, row, r)


def noise_of_a_tree(c, purpose, iteration, slot, which):
    shared, own = (plain.noise_of(c, purpose, iteration, slot, n)
                   for n in (which - which % c.branches, which))
    return shared[:c.trunk] + own[c.trunk:]


# the runs -----------------------------------------------------------------------------------------

NUMBERS = {  # {diff: [(a text in it, the text in its place)]}, so that a small run meets it
    "kl_cov": [("0.0002 *", "0.1 *")], "dual_clip": [("* 3, ", "* 1.1, ")],
    "clip_cov": [("0.0002 *", "0.3 *"), ("cov > 1", "cov > 0.01")],
    "entropy_target": [("0.2 * record", "2.2 * record")],
    "solved_prompts": [('["accuracy"]', '["scores"]'), ("0.9", "0.4")],
    "end_of_thoughts": [("THOUGHTS = 512", "THOUGHTS = 2"), ('"</think>"', '"y"')],
    # prompts of odd length have a demonstration, their answer
    "self_distillation": [
        ("SOLVED = 1.0", "SOLVED = 0.5"), ('[row["demonstration"]] if "demonstration" in row',
                                           '[row["answer"]] if len(row["prompt"]) % 2')],
    "top_k_distillation": [("TOP_K = 16", "TOP_K = 5")], "kl_cut": [("max=10", "max=0.05")],
    "price of length": [("0.01", "0.3")]}
# no reference; all responses of a step are in one minibatch of the two
FREE = GRPO | dict(kl_coef=0.0, max_iters=3)
ONE_STEP = dict(num_minibatches=1, num_iterations=1, max_iters=3)
TURNS = with_options.GRPO | ONE_STEP | dict(
    turns=3, mix=[(0.7, "environment"), (0.5, "letters")], missing_eos_penalty=0.3, batch_size=8,
    group_size=4, max_new_tokens=14, seed=1)
TOP_K = dict(models_of=with_a_teacher, judge=judged_by_none, find_group_advantages=all_teach,
             grpo_losses=losses_by_the_top_k)
GRPO_CASES = {  # diffs; what else: keys, functions by hand, branches that must be taken
    "opo, gmpo": (FREE | dict(
        loss_type="gmpo", aggregation="seq-mean-token-mean", cliprange=0.02, scale_by="none",
        cliprange_high=0.02, num_iterations=3, mix=[(1.0, "some")]),
        dict(find_group_advantages=by_length, loss_of_token=geometric_mean),
        ["no score", "clipped", "far, and kept"]),
    "pass_at_k, token_sum": (
        FREE | dict(scale_by="none", truncated="mask"),
        dict(find_group_advantages=best_alone, minibatches_of=rows_with_tokens,
             grpo_losses=losses_by_sums), ["the best", "not the best", "masked"]),
    "kl_cov": (
        FREE, dict(find_group_advantages=who_pays, loss_of_token=with_a_price), ["pays"]),
    "clip_cov": (
        FREE, dict(find_group_advantages=who_stays, loss_of_token=without_some),
        ["stays", "above", "below", "inside, and not drawn"]),
    "sapo, entropy_target": (
        GRPO | dict(loss_type="sapo", entropy_coef=0.05, num_iterations=3, max_iters=5),
        dict(clipped_surrogate=soft_gate, grpo_update=held_entropy),
        ["above", "below", "too low", "high enough"]),
    "every_prompt, scalerl, solved_prompts": (
        GRPO | dict(loss_type="cispo", scale_by="none", kl_coef=0.0, cliprange=1.0, max_iters=4,
                    cliprange_high=0.03, mix=[(1.0, "sometimes")], batch_size=9),
        dict(prompts_of=unsolved_prompts, find_group_advantages=without_flat_groups,
             minibatches_of=rows_with_tokens, grpo_losses=losses_by_prompt),
        ["weight", "flat group", "replaced"]),
    "self_distillation": (
        GRPO | dict(kl_in="reward", kl_estimator="k1", kl_coef=0.7, ref_path="policy", max_iters=3,
                    batch_size=9),
        dict(models_of=with_a_teacher, summary=summary_with_hints,
             find_group_advantages=from_the_teacher, loss_of_token=of_its_own),
        ["above", "below", "no hint", "answer", "another's"]),
    "top_k_distillation": (
        GRPO | dict(kl_coef=1.0, ref_path="older", mix=[(0.0, "letters")], max_iters=3,
                    aggregation="seq-mean-token-mean"), TOP_K, ["no reward"]),
    "top_k_distillation; beside a reward": (
        GRPO | dict(ref_path="older", num_minibatches=1, entropy_coef=0.02, max_iters=3), TOP_K,
        ["reward", "above", "below"]),
    "target_kl, reinforce_pp": (
        GRPO | dict(target_kl=0.25, scale_by="none", kl_estimator="k2", num_iterations=3,
                    max_iters=3, mix=[(1.0, "some")]),
        dict(too_far=too_far, find_group_advantages=divided), ["too far", "no score"]),
    "gdpo": (
        GRPO | dict(mix=[(1.0, "letters"), (0.5, "length")], batch_size=9, max_new_tokens=5,
                    max_iters=3), dict(find_group_advantages=each_reward_alone), []),
    "maxrl, kl_cut": (
        GRPO | dict(scale_by="none", max_iters=3, missing_eos_penalty=1.0),
        dict(find_group_advantages=over_the_mean, kl_estimate=short_kl),
        ["mean above 0", "mean below 0", "short", "too long"]),
    "deepseek_v32": (
        GRPO | ONE_STEP | dict(off_policy_limit=0.1),
        dict(find_group_advantages=far_ones, loss_of_token=without_far_ones,
             kl_estimate=kl_with_the_ratio, grpo_update=update_without_far_ones),
        ["left out", "worse, and kept", "good"]),
    "process_supervision": (
        TURNS, dict(find_group_advantages=by_steps, loss_of_token=of_its_own),
        ["steps", "no end"]),
    "trees": (
        FREE | dict(trunk=2, branches=2, batch_size=8, group_size=4, mix=[(1.0, "some")]),
        dict(noise_of=noise_of_a_tree, find_group_advantages=of_trees, loss_of_token=of_its_own),
        ["ends in the trunk", "trunk against branch", "no score", "above", "below"]),
    "turn_credit": (
        TURNS, dict(find_group_advantages=by_turns, loss_of_token=of_its_own),
        ["alone", "turn 1", "no end"])}
PPO_CASES = {
    "teachers": (
        PPO | dict(ref_path="older policy", value_init="policy", kl_coef=1.0, gamma=0.0, lam=0.0,
                   max_iters=3, mix=[(1.0, "letters")]),
        dict(models_of=two_teachers, judge=judged_by_two), ["below"]),
    "end_of_thoughts": (
        PPO | dict(max_iters=3), dict(sample=with_an_end, judge=judged_without_the_end),
        ["forced", "closed", "short"]),
    "kl_controller, dual_clip, price of length": (
        PPO | dict(kl_target=0.02, missing_eos_penalty=2.0, max_iters=3),
        dict(find_advantages=adapting_kl_coef, clipped_surrogate=dual_clipped,
             finish_scores=with_price), ["dual", "kl_coef up", "kl_coef down", "no end"]),
    "target_kl, white_rewards": (
        PPO | dict(target_kl=0.15, ppo_epochs=3, max_iters=3, value_init="policy"),
        dict(too_far=too_far, find_unit=of_scores, find_advantages=white_rewards), ["too far"]),
    "masked_importance, value_first": (
        PPO | dict(importance_cap=1.5, value_first=1, max_iters=5, warmup_iters=2,
                   lr_decay="linear", grad_clip=0.5, zero_stage="3"),
        dict(ppo_update=value_learns_first, find_advantages=with_weights),
        ["left out", "waits", "learns", "long gradient"]),
    "response_weight": (
        PPO | dict(importance_cap=1.5, max_iters=3),
        dict(find_advantages=with_weights_of_responses), ["at the cap", "below the cap"]),
    "value_first, vapo": (
        PPO | dict(lam=1.0, lam_alpha=0.3, positive_coef=0.3, value_first=1, max_iters=4, gamma=0.9,
                   mix=[(1.0, "letters")], missing_eos_penalty=0.5, value_init="policy"),
        dict(ppo_update=value_learns_first, find_advantages=by_length_of_response,
             ppo_losses=losses_and_imitation, minibatches_of=rows_with_tokens,
             clipped_surrogate=clipped_higher),
        ["waits", "learns", "lambda 0", "lambda above 0", "right", "wrong", "above", "below"])}

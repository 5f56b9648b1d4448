"""
What ppo.py, grpo.py, sft.py and rm.py compute, worked out once more. test_by_hand.py compares.

Nothing of the repository is imported here. The models are those of transformers; they read one text
at a time, without padding and without a cache. All that follows is a plain loop over responses and
tokens. It is slow: its only purpose is to be read and be seen to be right.

A run is described by a namespace c of the script's own keys, all of them given. It returns its log,
a dict of figures for each iteration, named as in log.jsonl, and {name: trained model}. `seen`
counts how often each branch of a formula was taken: a switch that changes nothing proves nothing.
"""
import bisect
import hashlib
import itertools
import json
import math
import statistics
from collections import Counter
from types import SimpleNamespace

import torch
import transformers

# a byte is a token; then come two markers, EOS and padding, and four ids that no text has
MARKERS = ["<think>", "</think>"]
EOS, PAD, TOKENS = 258, 259, 260
ENDS = (EOS, 257)  # generation_config.json names a second token that ends a response
seen = Counter()


def encode(text, markers=MARKERS):
    ids = []
    while text:
        marker = next((m for m in markers if text.startswith(m)), None)
        ids += [256 + markers.index(marker)] if marker else text[0].encode()
        text = text[len(marker or text[0]):]
    return ids


def decode(ids):
    pieces = [MARKERS[i - 256].encode() if i >= 256 else bytes([i]) for i in ids if i < EOS]
    return b"".join(pieces).decode("utf-8", errors="replace")


def mean(numbers):
    return math.fsum(numbers) / len(numbers) if numbers else 0.0


def there(numbers):
    return [x for x in numbers if x is not None]


def number(x):
    return x.item() if torch.is_tensor(x) else x


def flat(items):
    return list(itertools.chain.from_iterable(items))


def hashed(text, size):
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=size).digest(), "little")


def generator(key):
    return torch.Generator().manual_seed(hashed(key, 4))


def permutation(n, key):
    return torch.randperm(n, generator=generator(key)).tolist()


def prompts_of(c, iteration, count, n):
    """Which of n rows: the next `count` of an endless walk through the epochs, each in an order."""
    return [permutation(n, f"{c.seed} epoch {place // n}")[place % n]
            for place in range(iteration * count, iteration * count + count)]


def held_out_of(c, rows):
    """The rows of an evaluation: one of each of eval_size stretches, as equal as can be."""
    if not 0 < c.eval_size < len(rows):
        return rows
    ends = [len(rows) * i // c.eval_size for i in range(c.eval_size + 1)]
    return [rows[first + hashed(f"{c.seed} eval {first}", 8) % (end - first)]
            for first, end in itertools.pairwise(ends)]


def minibatches_of(c, iteration, epochs):
    """[[place in the batch, ...], ...] of each step; the first of an epoch may have one more."""
    steps, (count, more) = [], divmod(c.batch_size, c.num_minibatches)
    for epoch in range(epochs):
        order = iter(permutation(c.batch_size, f"{c.seed} minibatches {iteration} {epoch}"))
        steps += [list(itertools.islice(order, count + (i < more)))
                  for i in range(c.num_minibatches)]
    return steps


# models -------------------------------------------------------------------------------------------

def language_model(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()


def scalar_model(folder, seed=None):
    """Of a number a token: trunk, head (1, d), shift. seed: of a new head on a policy's trunk."""
    if seed is not None:
        return with_new_head(language_model(folder).base_model, seed)
    auto = transformers.AutoModelForSequenceClassification
    model = auto.from_pretrained(folder, dtype=torch.float64).eval()
    with open(f"{folder}/config.json", encoding="utf-8") as f:
        shift = json.load(f).get("score_shift", 0.0)
    return of_scalars(model.base_model, model.score.weight, shift)


def with_new_head(trunk, seed):
    d, drawn = trunk.config.hidden_size, torch.Generator().manual_seed(seed)
    head = torch.empty(1, d).double().normal_(0, (d + 1) ** -0.5, generator=drawn)
    return of_scalars(trunk, torch.nn.Parameter(head), 0.0)


def of_scalars(trunk, head, shift):
    """unit, deviations, was_read: see find_unit."""
    return SimpleNamespace(trunk=trunk, head=head, shift=shift, unit=1.0, deviations=None,
                           was_read=False)


def value_model_of(c, models):
    """
    The value model, and its own parameters. A new head begins at a fifth, and follows the scores.
    """
    if c.value_init not in ("policy", "shared"):
        value = scalar_model(c.reward_path if c.value_init == "reward" else c.value_init)
        return value, list(parameters_of(value).values())
    shared = c.value_init == "shared"  # a head on the policy's trunk, which both losses train
    trunk = (models.policy if shared else language_model(c.policy_path)).base_model
    value = with_new_head(trunk, c.seed)
    value.head.data *= 0.2
    value.deviations = []
    return value, [value.head] if shared else list(parameters_of(value).values())


def find_unit(models, batch):
    """
    What is 1 for the head, in scores: every response knows it. A new head's is a power of two, near
    the median deviation of five batches, or of quarters of a batch, until there are three; and if
    it changes, values are what they were.
    """
    value, scores, old = models.value, [r.score for r in batch], models.value.unit
    if value.deviations is not None:
        known, count = value.deviations, 1
        if len(known) < 3:
            count = 4 if len(scores) >= 8 else max(1, len(scores) // 2)
        left = list(scores)
        for more in range(count, 0, -1):  # the first ones are longer by one, if it must be
            part = [left.pop(0) for _ in range(math.ceil(len(left) / more))]
            known += [statistics.pstdev(part)] if len(set(part)) > 1 else []
        del known[:-5]
        seen["equal scores"] += len(set(scores)) == 1
        middle = sorted(known)[(len(known) - 1) // 2] if len(known) >= 3 else old
        if middle < old / 2 or middle > 2 * old:
            value.unit = 2.0 ** round(math.log2(middle))
            seen["a later unit" if value.was_read else "a first unit"] += 1
            if value.was_read:
                value.head.data *= old / value.unit
                for r in batch:
                    r.values = [x * old / value.unit for x in r.values]
    value.was_read = True
    whole = statistics.pstdev(scores) if value.deviations is not None else 0.0
    for r in batch:  # of its loss
        r.unit = whole if whole > 16 * value.unit else value.unit


def scalars(model, ids):
    """The number at each token, (T,)."""
    return model.trunk(torch.tensor([ids])).last_hidden_state[0] @ model.head[0] + model.shift


def parameters_of(model):
    """{name: parameter} of a language model or a scalar one."""
    if isinstance(model, SimpleNamespace):
        return dict(model.trunk.named_parameters()) | {"head": model.head}
    return dict(model.named_parameters())


def logprobs_of(model, prompt, response, temperature=1.0, own=None):
    """
    Log-prob of each token of a response, and the entropy of the distribution it came from. own: the
    places of the tokens that are asked for; None: all of them.
    """
    logits = model(torch.tensor([prompt + response])).logits[0, :, :TOKENS] / temperature
    logprobs, entropies = [], []
    for t in range(len(response)) if own is None else own:
        # the logits that chose a token are one column before it
        distribution = torch.log_softmax(logits[len(prompt) + t - 1], 0)
        logprobs.append(distribution[response[t]])
        entropies.append(-(distribution.exp() * distribution).sum())
    return logprobs, entropies


class AdamW:
    """Loshchilov and Hutter (arXiv 1711.05101), algorithm 2."""

    def __init__(self, parameters, c):
        self.parameters, self.c, self.steps = [p for p in parameters if p.requires_grad], c, 0
        self.m = [torch.zeros_like(p) for p in self.parameters]
        self.v = [torch.zeros_like(p) for p in self.parameters]

    def zero_gradients(self):
        for p in self.parameters:
            p.grad = torch.zeros_like(p)

    def clip(self):
        """Shorten the gradient to grad_clip, 0 = leave it. Returns the norm that it had."""
        norm = math.sqrt(sum(p.grad.square().sum().item() for p in self.parameters))
        if self.c.grad_clip and norm > self.c.grad_clip:
            seen["long gradient"] += 1
            for p in self.parameters:
                p.grad *= self.c.grad_clip / (norm + 1e-6)
        return norm

    @torch.no_grad()
    def step(self, lr):
        self.steps += 1
        for p, m, v in zip(self.parameters, self.m, self.v, strict=True):
            m += (1 - self.c.beta1) * (p.grad - m)
            v += (1 - self.c.beta2) * (p.grad**2 - v)
            mean_m = m / (1 - self.c.beta1**self.steps)
            mean_v = v / (1 - self.c.beta2**self.steps)
            if p.dim() > 1:  # norms and biases do not decay
                p -= lr * self.c.weight_decay * p
            p -= lr * mean_m / (mean_v.sqrt() + self.c.adam_eps)


def learning_rate(iteration, peak, warmup, iterations, shape):
    """Up to the peak in a line, then down to 0, or not."""
    if iteration < warmup:
        return peak * (iteration + 1) / warmup
    x = (iteration - warmup) / (iterations - warmup)
    return peak * dict(constant=1, linear=1 - x, cosine=(1 + math.cos(math.pi * x)) / 2)[shape]


# formulas, a token each ---------------------------------------------------------------------------

def kl_estimate(logprob, reference, kind):
    """KL(policy || reference), from one token (Schulman, joschu.net/blog/kl-approx.html)."""
    x = logprob - reference
    return dict(k1=x, k2=x**2 / 2, k3=math.e**-x - 1 + x)[kind]


def clipped_surrogate(ratio, advantage, low, high):
    """PPO (arXiv 1707.06347, eq. 7) as a loss, and which bound has taken its gradient away."""
    r = ratio.item()
    nearest = min(max(r, 1 - low), 1 + high)
    if nearest * advantage < r * advantage:
        return -nearest * advantage, "above" if r > nearest else "below"
    return -ratio * advantage, ""


def weighted_logprob(ratio, logprob, advantage, low, high):
    """CISPO (arXiv 2506.13585, eqs. 4, 5) as a loss, and which bound its weight has met."""
    weight = min(max(ratio.item(), 1 - low), 1 + high)
    return -weight * advantage * logprob, "weight" if weight != ratio.item() else ""


def value_loss(value, old, target, reach):
    """Half the squared error; or that of a value kept near the old one, if larger (ppo2)."""
    error, moved = (value - target) ** 2 / 2, value.item() - old
    if reach and abs(moved) > reach:
        kept = old + math.copysign(reach, moved)
        if (kept - target) ** 2 / 2 > error.item():
            return (kept - target) ** 2 / 2, "value clipped"
    return error, ""


def advantages_and_returns(rewards, values, gamma, lam):
    """GAE of one response (arXiv 1506.02438, eq. 16). After the last token there is nothing."""
    advantages = []
    for t in reversed(range(len(rewards))):
        next_value = values[t + 1] if t + 1 < len(rewards) else 0.0
        next_advantage = advantages[0] if advantages else 0.0
        surprise = rewards[t] + gamma * next_value - values[t]
        advantages.insert(0, surprise + gamma * lam * next_advantage)
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


def noise_of(c, purpose, iteration, slot, which):
    """The uniforms of a response, one a token."""
    drawn = generator(f"{c.seed} {purpose} {iteration} {slot} {which}")
    return torch.rand(c.max_new_tokens, generator=drawn, dtype=torch.float64).tolist()


def sample(c, policy, prompt, noise):
    """Tokens until one ends the response: each the inverse of the CDF at a uniform."""
    said = []
    for uniform in noise:
        logits = policy(torch.tensor([prompt + said])).logits[0, -1, :TOKENS]
        heights = list(itertools.accumulate(torch.softmax(logits / c.temperature, 0).tolist()))
        said.append(bisect.bisect_right(heights, uniform * heights[-1]))
        if said[-1] in ENDS:
            break
    return said


@torch.no_grad()
def respond(c, models, row, purpose, iteration, slot, which=0):
    """A response to a data row, with all that the models and rules say of it."""
    prompt = encode(row["prompt"])
    response = sample(c, models.policy, prompt, noise_of(c, purpose, iteration, slot, which))
    return judge(c, models, row, SimpleNamespace(
        prompt=prompt, response=response, text=decode(response), read=decode(response),
        finished=response[-1] in ENDS, own=range(len(response)), paid=[0.0] * len(response)))


def judge(c, models, row, r):
    """
    What the models and rules say of a response r. own: the places of the tokens that the policy
    has sampled, here all of them (by_hand_options.py has others), and paid: what is paid for
    each of these. All that follows has a number for each of them. counts: what each counts.
    """
    prompt, response = r.prompt, r.response
    r.each = {name: RULES[name](c, row, r, models.reward) for _, name in c.mix}
    for weight, name in c.mix:
        if isinstance(r.each[name], list):  # a number for each token: the score has their sum
            r.paid = [x + weight * y for x, y in zip(r.paid, r.each[name], strict=True)]
            r.each[name] = sum(r.each[name])
    # a reward may not apply (None). Where none applies that has a weight, there is no score
    applies = [weight * r.each[name] for weight, name in c.mix
               if weight and r.each[name] is not None]
    r.raw = r.score = sum(applies) if applies else None
    r.counts = [1.0] * len(r.own)
    logprobs, _ = logprobs_of(models.policy, prompt, response, c.temperature, r.own)
    r.old = [x.item() for x in logprobs]
    if models.reference:
        logprobs, _ = logprobs_of(models.reference, prompt, response, c.temperature, r.own)
        r.reference = [x.item() for x in logprobs]
    if models.value:  # of the states before each token was chosen
        values = scalars(models.value, prompt + response).tolist()
        r.values = [values[len(prompt) + t - 1] for t in r.own]
    return r


def kls_of(c, r):
    return list(map(kl_estimate, r.old, getattr(r, "reference", r.old),
                    [c.kl_estimator] * len(r.old)))


def learned_score(c, row, r, reward):
    """The reward model's number at the last token of the text, in its own tokenizer."""
    markers = MARKERS[::-1] if c.reward_path.endswith("other") else MARKERS
    return scalars(reward, encode(row["prompt"] + r.read, markers) + [EOS] * r.finished)[-1].item()


def length(c, row, r, _):
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13); a fifth of R is its cache."""
    cache = c.max_new_tokens / 5
    return min(max((c.max_new_tokens - cache - len(r.own)) / cache, -1), 0)


def letters(c, row, r, _):
    return sum(ch in "abcd" for ch in r.text) / 4


def steps(c, row, r, _):
    return [(96 < i < 101) - i / 400 for i in (r.response[t] for t in r.own)]


RULES = dict(length=length, letters=letters, reward_model=learned_score, steps=steps,
             sometimes=lambda c, row, *r: 0.3 if len(row["prompt"]) % 2 else letters(c, row, *r),
             some=lambda c, row, r, _: None if len(r.text) % 2 else letters(c, row, r, _))


def finish_scores(c, batch, missing=None):
    """What is done to a score: `missing` if there is none; the penalty if it never ended."""
    for r in batch:
        seen["no score"] += r.score is None
        r.score = missing if r.score is None else r.score
        if c.missing_eos_penalty and not r.finished:
            r.score = -c.missing_eos_penalty
            seen["no end"] += 1


def summary(c, batch, prefix):
    """Means over responses."""
    def weighed(of):  # the sum over a response's tokens
        return [sum(n * x for n, x in zip(r.counts, of(r), strict=True)) for r in batch]

    figures = dict(scores=there([r.raw for r in batch]), length=[len(r.own) for r in batch],
                   finished=[r.finished for r in batch],
                   entropy=weighed(lambda r: [-x for x in r.old]))
    if hasattr(batch[0], "reference"):
        figures["kl"] = weighed(lambda r: map(float.__sub__, r.old, r.reference))
    if len(c.mix) > 1:
        figures |= {f"reward/{name}": there([r.each[name] for r in batch]) for _, name in c.mix}
    if len(figures["scores"]) < len(batch):
        figures["scored"] = [r.raw is not None for r in batch]
    return {f"{prefix}/{name}": mean(x) for name, x in figures.items()}


def evaluation(c, models, rows, iteration):
    """Figures of held-out prompts."""
    if iteration % c.eval_interval and iteration < c.max_iters:
        return {}
    rows = enumerate(held_out_of(c, rows))
    return summary(c, [respond(c, models, row, "eval", 0, i) for i, row in rows], "eval")


def models_of(c):
    learned = "reward_model" in [name for _, name in c.mix]
    return SimpleNamespace(policy=language_model(c.policy_path), value=None,
                           reward=scalar_model(c.reward_path) if learned else None,
                           reference=language_model(c.policy_path) if c.kl_coef else None)


# PPO ----------------------------------------------------------------------------------------------

def ppo(c, train, val):
    """A run of ppo.py."""
    models = models_of(c)
    models.value, of_value = value_model_of(c, models)
    policy_adam, value_adam = AdamW(models.policy.parameters(), c), AdamW(of_value, c)
    log = []
    for iteration in range(c.max_iters):
        record = evaluation(c, models, val, iteration)
        log.append(record)
        rows = [train[i] for i in prompts_of(c, iteration, c.batch_size, len(train))]
        batch = [respond(c, models, row, "rollout", iteration, i) for i, row in enumerate(rows)]
        record |= summary(c, batch, "objective")
        finish_scores(c, batch, 0.0)
        find_unit(models, batch)
        record |= find_advantages(c, batch)
        record |= ppo_update(c, models, (policy_adam, value_adam), batch, iteration)
    log.append(evaluation(c, models, val, c.max_iters))
    models.value.head.data *= models.value.unit  # what is saved counts in scores
    return log, dict(policy=models.policy, value_model=models.value)


def ppo_update(c, models, adams, batch, iteration):
    """The steps of an iteration, as figures."""
    lr = learning_rate(iteration, c.learning_rate, c.warmup_iters, c.max_iters, c.lr_decay)
    value_lr = learning_rate(iteration, c.value_learning_rate or c.learning_rate,
                             c.value_warmup_iters, c.max_iters, c.value_lr_decay)
    figures, taken = [], 0
    for minibatch in minibatches_of(c, iteration, c.ppo_epochs):
        for adam in adams:
            adam.zero_gradients()
        tokens = sum(len(batch[i].own) for i in minibatch)
        figures += flat(ppo_losses(c, models, batch[i], tokens) for i in minibatch)
        if too_far(c, figures[-tokens:]):
            break
        norms = [adam.clip() for adam in adams]
        for adam, rate in zip(adams, (lr, value_lr), strict=True):
            adam.step(rate)
        taken += 1
    record = {name: mean([one[name] for one in figures]) for name in figures[0]}
    return record | {"policy/grad_norm": norms[0], "val/grad_norm": norms[1], "policy/lr": lr,
                     "val/lr": value_lr, "policy/steps": taken}


def too_far(c, figures):
    """Whether an update ends before this step, of which these are the figures: never."""


def find_advantages(c, batch):
    """
    Rewards, returns in units of the values, and advantages of mean 0 and variance 1 over all
    tokens. Gives figures.
    """
    for r in batch:
        r.rewards = [-c.kl_coef * kl for kl in kls_of(c, r)]
    before = mean([sum(r.rewards) for r in batch])
    for r in batch:
        r.rewards = [x + paid for x, paid in zip(r.rewards, r.paid, strict=True)]
        r.rewards[-1] += r.score - sum(r.paid)  # what is paid for a token is a part of the score
        in_units = [x / r.unit for x in r.rewards]
        r.advantages, r.returns = advantages_and_returns(in_units, r.values, c.gamma, c.lam)
    whiten(batch)
    returns = flat(r.returns for r in batch)
    left = statistics.variance(map(float.__sub__, returns, flat(r.values for r in batch)))
    return {"objective/rlhf_reward": mean([sum(r.rewards) for r in batch]),
            "objective/non_score_reward": before,
            "val/explained_variance": 1 - left / max(statistics.variance(returns), 1e-8)}


def whiten(batch):
    every = flat(r.advantages for r in batch)
    middle, deviation = mean(every), math.sqrt(statistics.pvariance(every) + 1e-8)
    for r in batch:
        r.advantages = [(a - middle) / deviation for a in r.advantages]


def ppo_losses(c, models, r, tokens):
    """Add a response's gradients; the whole step has so many tokens. Figures of each token."""
    logprobs, entropies = logprobs_of(models.policy, r.prompt, r.response, c.temperature, r.own)
    values = scalars(models.value, r.prompt + r.response)[len(r.prompt) - 1:][list(r.own)]
    total, figures = 0.0, []
    for t, logprob in enumerate(logprobs):
        ratio = torch.exp(logprob - r.old[t])
        loss, bound = clipped_surrogate(ratio, r.advantages[t], c.cliprange, c.cliprange)
        loss = loss * r.counts[t]
        vf, vf_bound = value_loss(values[t], r.values[t], r.returns[t], c.cliprange_value)
        seen.update([bound, vf_bound])
        total = total + loss + c.vf_coef * vf - c.entropy_coef * entropies[t]
        figures.append({
            "loss/policy": number(loss), "loss/value": number(vf),
            "policy/clipfrac": bool(bound), "val/clipfrac": bool(vf_bound),
            "policy/approx_kl": kl_estimate(r.old[t], logprob.item(), "k3")})
    (total / tokens).backward()
    return figures


# GRPO and its relatives ---------------------------------------------------------------------------

def grpo(c, train, val):
    """A run of grpo.py."""
    models = models_of(c)
    adam, log = AdamW(models.policy.parameters(), c), []
    for iteration in range(c.max_iters):
        record = evaluation(c, models, val, iteration)
        log.append(record)
        groups = [[respond(c, models, train[i], "rollout", iteration, slot, which)
                   for which in range(c.group_size)] for slot, i in enumerate(
                       prompts_of(c, iteration, c.batch_size // c.group_size, len(train)))]
        record |= summary(c, flat(groups), "objective")
        finish_scores(c, flat(groups))
        flat_ones = [is_flat(r.score for r in group) for group in groups]
        record["objective/flat_groups"] = mean(flat_ones)
        record["objective/score_std"] = statistics.stdev(there([r.score for r in flat(groups)]))
        find_group_advantages(c, groups)
        batch = flat(groups)
        record["objective/rlhf_reward"] = mean(there([r.judged for r in batch]))
        record |= grpo_update(c, models, adam, batch, iteration)
    log.append(evaluation(c, models, val, c.max_iters))
    return log, dict(policy=models.policy)


def grpo_update(c, models, adam, batch, iteration):
    """The steps of an iteration, as figures."""
    lr = learning_rate(iteration, c.learning_rate, c.warmup_iters, c.max_iters, c.lr_decay)
    figures, steps, norm = [], 0, 0.0
    for minibatch in minibatches_of(c, iteration, c.num_iterations):
        rows = [batch[i] for i in minibatch if batch[i].finished or c.truncated == "keep"]
        seen["masked"] += len(minibatch) - len(rows)
        rows = [r for r in rows if not getattr(r, "left_out", False)]
        if not any(r.advantage for r in rows):  # nothing to learn
            seen["flat minibatch"] += 1
            continue
        tokens = sum(len(r.own) for r in rows)
        adam.zero_gradients()
        for r in rows:
            # DAPO (2503.14476, eq. 12), GRPO (2402.03300, eq. 3), Dr. GRPO (2503.20783, l. 1)
            weight = {"token-mean": 1 / tokens,
                      "seq-mean-token-mean": 1 / len(rows) / len(r.own),
                      "seq-mean-token-sum-norm": 1 / len(minibatch) / c.max_new_tokens}
            figures += grpo_losses(c, models, r, weight[c.aggregation])
        if too_far(c, figures[-tokens:]):
            break
        norm = adam.clip()
        adam.step(lr)
        steps += 1
    record = {name: mean([one[name] for one in figures])
              for name in ("loss/policy", "loss/kl", "policy/approx_kl", "policy/clipfrac")}
    return record | {"policy/grad_norm": norm, "policy/steps": steps, "policy/lr": lr}


def is_flat(scores):
    """Whether all of a group's scores are the same, within rounding."""
    scores = there(scores)
    return len(scores) < 2 or max(scores) - min(scores) < 1e-9


def find_group_advantages(c, groups):
    """One number a response, in r.advantage."""
    for r in flat(groups):
        r.judged, r.advantage = r.score, 0.0
        if r.judged is not None and c.kl_in == "reward":  # RLOO (arXiv 2402.14740, section 2.1)
            r.judged -= c.kl_coef * sum(kls_of(c, r))
    every = there([r.judged for r in flat(groups)])
    units = {"none": 1.0, "batch": statistics.stdev(every) + 1e-4}
    for group in groups:
        scored = [r for r in group if r.judged is not None]
        scores = [r.judged for r in scored]
        if is_flat(scores):
            continue
        units["std"] = statistics.stdev(scores) + 1e-4
        for i, r in enumerate(scored):
            others = scores[:i] + scores[i + 1:] if c.baseline == "others" else scores
            r.advantage = (r.judged - mean(others)) / units[c.scale_by]


def grpo_losses(c, models, r, weight):
    """Add a response's gradient; each of its tokens counts `weight`. Figures of each token."""
    logprobs, entropies = logprobs_of(models.policy, r.prompt, r.response, c.temperature, r.own)
    log_ratios = [logprob - old for logprob, old in zip(logprobs, r.old, strict=True)]
    total, figures = 0.0, []
    for t, logprob in enumerate(logprobs):
        loss, bound = loss_of_token(c, r, t, logprob, log_ratios)
        loss = loss * r.counts[t]
        seen[bound] += 1
        kl = kl_estimate(logprob, r.reference[t], c.kl_estimator) if models.reference else 0.0
        total = total + loss - c.entropy_coef * entropies[t]
        total = total + c.kl_coef * kl if c.kl_in == "loss" else total
        figures.append({"loss/policy": number(loss), "loss/kl": number(kl),
                        "policy/clipfrac": bool(bound),
                        "policy/approx_kl": kl_estimate(r.old[t], logprob.item(), "k3")})
    (total * weight).backward()
    return figures


def loss_of_token(c, r, t, logprob, log_ratios):
    """The loss of a response's token t, and the bound that has taken its gradient away."""
    ratio, bounds = torch.exp(log_ratios[t]), (r.advantage, c.cliprange, c.cliprange_high)
    if c.loss_type == "gspo":  # arXiv 2507.18071, eq. 7
        ratio = torch.exp(sum(log_ratios) / len(log_ratios))
    if c.loss_type == "cispo":
        return weighted_logprob(ratio, logprob, *bounds)
    return clipped_surrogate(ratio, *bounds)


# SFT and the reward model -------------------------------------------------------------------------

def train_on(c, adam, name, evaluate, learn, n):
    """The log of a loop over n rows. learn(numbers of rows): a loss and figures."""
    log = []
    for iteration in range(c.max_iters + 1):
        record = {}
        log.append(record)
        if iteration % c.eval_interval == 0 or iteration == c.max_iters:
            with torch.no_grad():
                record |= evaluate()
        if iteration < c.max_iters:
            adam.zero_gradients()
            loss, figures = learn(prompts_of(c, iteration, c.batch_size, n))
            loss.backward()
            lr = learning_rate(iteration, c.learning_rate, c.warmup_iters, c.max_iters, c.lr_decay)
            record |= figures | {f"{name}/grad_norm": adam.clip(), f"{name}/lr": lr}
            adam.step(lr)
    return log


def sft(c, train, val):
    """A run of sft.py from a folder."""
    policy = language_model(c.init_from)

    def loss_of(rows):
        """The mean over the tokens of the completions and their EOS."""
        texts = [(encode(row["prompt"]), encode(row["completion"]) + [EOS]) for row in rows]
        losses = flat(logprobs_of(policy, *text)[0] for text in texts)
        return -sum(losses) / len(losses)

    def learn(picked):
        loss = loss_of([train[i] for i in picked])
        return loss, {"loss/sft": loss.item()}

    def evaluate():
        return {"eval/loss": loss_of(held_out_of(c, val)).item()}

    log = train_on(c, AdamW(policy.parameters(), c), "policy", evaluate, learn, len(train))
    return log, dict(policy=policy)


def rm(c, train, val, demonstrations):
    """A run of rm.py. What scores 0 in the end: the demonstrations, or else val's chosen ones."""
    model = scalar_model(c.init_from, c.seed if c.new_head else None)
    model.shift = 0.0

    def score(row, field):
        return scalars(model, encode(row["prompt"] + row[field]) + [EOS])[-1]

    def losses_of(pairs, margin_coef, smoothing, sure):
        """
        Bradley-Terry (2009.01325, 3.4) with a lead that is wanted (2307.09288, eq. 2) and labels
        that may be wrong (cDPO); a square that keeps scores at 0 (2312.09244); P(chosen is better).
        """
        losses, squares, chances = [], [], []
        for row in pairs:
            better, worse = score(row, "chosen"), score(row, "rejected")
            lead = better - worse - margin_coef * row.get("margin", 0.0)
            # right with the row's confidence, and then swapped with a chance of `smoothing`
            p = row.get("confidence", 1.0) if sure else 1.0
            p = p * (1 - smoothing) + (1 - p) * smoothing
            lost, won = (torch.log(1 + torch.exp(x)) for x in (-lead, lead))
            losses.append(p * lost + (1 - p) * won)
            squares.append((better + worse) ** 2)
            chances.append(1 / (1 + math.exp((worse - better).item())))
        return losses, squares, chances

    def hit(p):
        seen["tie"] += p == 0.5
        return (p > 0.5) + 0.5 * (p == 0.5)

    def evaluate():
        losses, _, chances = losses_of(held_out_of(c, val), 0.0, 0.0, False)
        off = 0.0
        for i in range(10):  # calibration, Guo et al. (1706.04599, eq. 3): ten bins from 1/2 to 1
            low, high = 0.5 + i / 20, 0.5 + (i + 1) / 20
            inside = [p for p in chances if low <= max(p, 1 - p) < high]
            off += abs(sum(max(p, 1 - p) - hit(p) for p in inside)) / len(chances)
        return {"eval/loss": sum(losses).item() / len(losses), "eval/calibration_error": off,
                "eval/accuracy": mean([hit(p) for p in chances])}

    def learn(picked):
        pairs, how = [train[i] for i in picked], (c.margin_coef, c.label_smoothing)
        losses, squares, chances = losses_of(pairs, *how, c.use_confidence)
        loss, square = sum(losses) / len(losses), sum(squares) / len(losses)
        return loss + c.centre_coef * square, {
            "loss/preference": loss.item(), "loss/centring": square.item(),
            "train/accuracy": mean([hit(p) for p in chances])}

    adam = AdamW(parameters_of(model).values(), c)
    log = train_on(c, adam, "reward_model", evaluate, learn, len(train))
    zero = [(row, "completion") for row in demonstrations] or [(row, "chosen") for row in val]
    model.shift = -mean([score(*one).item() for one in zero])
    return log, dict(reward_model=model)

"""
What ppo.py, grpo.py, sft.py and rm.py compute, worked out once more. Helpers for test_by_hand.py,
no tests.

Nothing of the repository is imported here, and no line is shared with it. The models are those of
transformers. They see one sequence at a time and no padding. All that follows is a plain loop over
responses and tokens, and so is AdamW. It is slow, and it has no purpose but to be read and be seen
to be right; papers and conventions are named where they are followed.

A run is described by a namespace c of the script's own keys, all of them given. It leaves `log` (a
dict of figures for each iteration, named as in log.jsonl), the trained `models`, and `seen`, which
counts how often each branch of a formula was taken: a switch that changes nothing proves nothing.

The scripts draw prompts, noise and minibatches from hashes. That is said again here in a few lines,
so that their tokens can be sampled again rather than taken from them. Any other permutation or
noise would be as right, but both sides must know it.
"""
import bisect
import copy
import hashlib
import inspect
import itertools
import json
import math
import os
import statistics
from collections import Counter
from types import SimpleNamespace

import torch
import transformers


# The tokenizer: a byte is a token; then come two markers, EOS and padding.
# The models' vocabulary is padded by a few ids more, which must never be sampled, nor counted.
MARKERS = {"tokenizer": ["<think>", "</think>"], "other_tokenizer": ["</think>", "<think>"]}
MARKERS["text"] = MARKERS["tokenizer"]  # what others' reward models read, whatever their tokenizer
EOS, PAD, TOKENS, VOCABULARY = 258, 259, 260, 264
ENDS = (EOS, 257)  # generation_config.json names a second token that ends a response


def encode(text, markers):
    """Text -> ids."""
    ids = []
    while text:
        marker = next((m for m in markers if text.startswith(m)), None)
        ids += [256 + markers.index(marker)] if marker else text[0].encode()
        text = text[len(marker or text[0]):]
    return ids


def decode(ids, markers):
    """Ids -> text, without EOS and padding."""
    kept = [i for i in ids if i not in (EOS, PAD)]
    pieces = [markers[i - 256].encode() if i >= 256 else bytes([i]) for i in kept]
    return b"".join(pieces).decode("utf-8", errors="replace")


def number(x):
    """A number, from a tensor of one element or from a number that no gradient flows to."""
    return x.item() if isinstance(x, torch.Tensor) else x


def mean(numbers):
    return math.fsum(numbers) / len(numbers) if numbers else 0.0


def there(numbers):
    """Those that are there: None is no number."""
    return [x for x in numbers if x is not None]


def flat(items):
    """One list of several."""
    return list(itertools.chain.from_iterable(items))


# --------------------------------------------------------------------------------------------------
# what is drawn


def hashed(text, size):
    """A number of so many bytes, the smallest byte first."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=size).digest(), "little")


def generator(seed):
    return torch.Generator().manual_seed(seed)


def permutation(n, key):
    return torch.randperm(n, generator=generator(hashed(key, 4))).tolist()


def prompts_of(c, iteration, count, n):
    """
    Which of n rows an iteration sees: the next `count` of an endless walk through the epochs, each
    of which has an order of its own.
    """
    rows = []
    for place in range(iteration * count, iteration * count + count):
        epoch, place_in_epoch = divmod(place, n)
        rows.append(permutation(n, f"{c.seed} epoch {epoch}")[place_in_epoch])
    return rows


def held_out_of(c, rows):
    """The rows of an evaluation: of eval_size stretches, which are as equal as can be, one row each."""
    if not 0 < c.eval_size < len(rows):
        return rows
    ends = [len(rows) * i // c.eval_size for i in range(1, c.eval_size + 1)]
    picked = []
    for first, end in zip([0] + ends[:-1], ends, strict=True):
        picked.append(rows[first:end][hashed(f"{c.seed} eval {first}", 8) % (end - first)])
    return picked


def minibatches_of(c, iteration, epochs):
    """
    The responses of each optimizer step of an iteration, [[place in the batch, ...], ...]. Where
    the batch cannot be split evenly, the first minibatches of an epoch have one more.
    """
    steps = []
    for epoch in range(epochs):
        order = permutation(c.batch_size, f"{c.seed} minibatches {iteration} {epoch}")
        for i in range(c.num_minibatches):
            count = c.batch_size // c.num_minibatches + (i < c.batch_size % c.num_minibatches)
            steps.append([order.pop(0) for _ in range(count)])
    return steps


def another_prompt(c, row, n, iteration, refill, slot):
    """Which of n rows takes the place of this one in a refill: any but itself."""
    return (row + 1 + hashed(f"{c.seed} refill {iteration} {refill} {slot}", 8) % (n - 1)) % n


def new_head(seed, width):
    """Weights (1, width) of a value or reward head that has never been trained."""
    head = torch.empty(1, width).normal_(0, (width + 1) ** -0.5, generator=generator(seed))
    return torch.nn.Parameter(head.double())


# --------------------------------------------------------------------------------------------------
# models


def language_model(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()


def scalar_model(folder, seed=None):
    """
    A model with one number a token: its trunk, head (1, d) and shift. seed: draw a new head, on a
    language model's trunk.
    """
    if seed is not None:
        return with_new_head(language_model(folder).base_model, seed)
    auto = transformers.AutoModelForSequenceClassification
    model = auto.from_pretrained(folder, dtype=torch.float64).eval()
    with open(os.path.join(folder, "config.json"), encoding="utf-8") as f:
        said = json.load(f).get("score_shift")
    return SimpleNamespace(trunk=model.base_model, head=model.score.weight, shift=said or 0.0,
                           zero_is_said=said is not None)


def with_new_head(trunk, seed):
    head = new_head(seed, trunk.config.hidden_size)
    return SimpleNamespace(trunk=trunk, head=head, shift=0.0)


def scalars(model, ids):
    """The number at each token, (T,)."""
    states = model.trunk(torch.tensor([ids])).last_hidden_state[0]  # (T, d)
    return states @ model.head[0] + model.shift


def parameters_of(model):
    """{name: parameter} of a language model or a scalar one."""
    if isinstance(model, SimpleNamespace):
        return dict(model.trunk.named_parameters()) | {"head": model.head}
    return dict(model.named_parameters())


def logprobs_of(model, prompt, response, temperature, own=None):
    """
    Log-prob of each token of a response, and the entropy of the distribution it came from. own: the
    places of the tokens that are asked for; None: all.
    """
    logits = model(torch.tensor([prompt + response])).logits[0, :, :TOKENS] / temperature  # (T, V)
    logprobs, entropies = [], []
    for t, token in enumerate(response):
        if own is not None and t not in own:
            continue
        # the logits that chose a token are one column before it
        column = logits[len(prompt) + t - 1]
        distribution = torch.log_softmax(column, 0)
        logprobs.append(distribution[token])
        entropies.append(-(distribution.exp() * distribution).sum())
    return logprobs, entropies


class Adapters:
    """
    LoRA (arXiv 2106.09685, eq. 3): each linear map W of a trunk's layers becomes W + alpha / rank B A.
    W stays as it is; A and B are trained. spec: "RANK:ALPHA", of GPT-2.
    """

    def __init__(self, trunk, spec, seed):
        rank, alpha = map(int, spec.split(":"))
        self.scale, self.maps, drawn = alpha / rank, [], generator(seed)
        trunk.requires_grad_(False)
        for linear in [m for m in trunk.modules() if type(m).__name__ == "Conv1D"]:  # x W, W (in, out)
            n_in, n_out = linear.weight.shape
            A = torch.empty(rank, n_in).uniform_(-1, 1, generator=drawn) * n_in**-0.5
            A, B = torch.nn.Parameter(A.double()), torch.nn.Parameter(torch.zeros(n_out, rank).double())
            self.maps.append((linear, A, B))
            linear.register_forward_hook(
                lambda linear, x, y, A=A, B=B: y + self.scale * (B @ (A @ x[0].mT)).mT if self.maps else y)

    def parameters(self):
        return [p for _, A, B in self.maps for p in (A, B)]

    @torch.no_grad()
    def merge(self):
        """W becomes the sum, and A and B are gone."""
        for linear, A, B in self.maps:
            linear.weight += self.scale * (B @ A).mT
        self.maps = []


# --------------------------------------------------------------------------------------------------
# optimizer


class AdamW:
    """Loshchilov and Hutter (arXiv 1711.05101), algorithm 2."""

    def __init__(self, parameters, c):
        self.parameters, self.c, self.steps = list(parameters), c, 0
        self.m = [torch.zeros_like(p) for p in self.parameters]
        self.v = [torch.zeros_like(p) for p in self.parameters]

    def zero_gradients(self):
        for p in self.parameters:
            p.grad = torch.zeros_like(p)

    def clip(self, seen):
        """Shorten the gradient to grad_clip, 0 = leave it. Returns the norm that it had."""
        norm = math.sqrt(sum(p.grad.square().sum().item() for p in self.parameters))
        if self.c.grad_clip:
            seen["long gradient" if norm > self.c.grad_clip else "short gradient"] += 1
        if self.c.grad_clip and norm > self.c.grad_clip:
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
    share = (iteration - warmup) / (iterations - warmup)
    if shape == "linear":
        return peak * (1 - share)
    if shape == "cosine":
        return peak * (1 + math.cos(math.pi * share)) / 2
    return peak


def average_into(average, model, decay):
    """The moving average of a model's weights, {name: tensor}, after a step."""
    for name, p in model.named_parameters():
        average[name] = decay * average[name] + (1 - decay) * p.detach()


# --------------------------------------------------------------------------------------------------
# formulas, a token each


def kl_estimate(logprob, reference, kind):
    """
    KL(the distribution that the token comes from || reference), estimated from this token
    (Schulman, joschu.net/blog/kl-approx.html).
    """
    difference = logprob - reference
    if kind == "k2":
        return difference**2 / 2
    if kind == "k3":
        return math.e ** -difference - 1 + difference
    return difference


def clipped_surrogate(ratio, advantage, low, high, dual=0.0):
    """
    PPO (arXiv 1707.06347, eq. 7) as a loss, and which bound has taken the token's gradient away:
    "below", "above", or "" if none has. dual: "dual" where the loss of a bad token would be more
    than this times its advantage (arXiv 1912.09729, eq. 5).
    """
    r = ratio.item()
    nearest = min(max(r, 1 - low), 1 + high)
    earned = min(r * advantage, nearest * advantage)
    if dual and advantage < 0 and earned < dual * advantage:
        return -dual * advantage, "dual"
    if earned < r * advantage:
        return -nearest * advantage, "above" if r > nearest else "below"
    return -ratio * advantage, ""


def bounded_shift(ratio, logprob, old, advantage, limit):
    """DPPO (arXiv 2602.04879) as a loss, with the total variation of a token and all others; and which bound it has met."""
    shift = math.exp(logprob.item()) - math.exp(old)
    if advantage > 0 and shift > limit:
        return 0.0 * ratio, "risen"
    if advantage < 0 and -shift > limit:
        return 0.0 * ratio, "fallen"
    return -ratio * advantage, ""


def weighted_logprob(ratio, logprob, advantage, low, high):
    """CISPO (arXiv 2506.13585, eqs. 4, 5) as a loss, and which bound its weight has met."""
    r = ratio.item()
    if r < 1 - low:
        return -(1 - low) * advantage * logprob, "weight below"
    if r > 1 + high:
        return -(1 + high) * advantage * logprob, "weight above"
    return -r * advantage * logprob, ""


def value_loss(value, old, target, reach):
    """
    Half the squared error, or that of the value kept within reach of the old one where this is
    larger (OpenAI baselines, ppo2). reach = 0: the former.
    """
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


# --------------------------------------------------------------------------------------------------
# sampling and scoring


def noise_of(c, purpose, iteration, slot, which):
    """The uniforms of a response, one a token."""
    drawn = generator(hashed(f"{c.seed} {purpose} {iteration} {slot} {which}", 4))
    return torch.rand(c.max_new_tokens, generator=drawn, dtype=torch.float64).tolist()


def sample(c, policy, before, noise):
    """Tokens until one ends the response: each the inverse of the CDF at a uniform."""
    said = []
    for uniform in noise:
        logits = policy(torch.tensor([before + said])).logits[0, -1, :TOKENS]
        heights = list(itertools.accumulate(torch.softmax(logits / c.temperature, 0).tolist()))
        said.append(bisect.bisect_right(heights, uniform * heights[-1]))
        if said[-1] in ENDS:
            break
    return said


def answered(messages, row, seed):
    """An environment: what it says to a dialogue, and what the turn before is worth."""
    said, turn = messages[-1]["content"], len(messages) // 2
    reply = "q" * turn + row["prompt"][:1] + "xyz"[seed % 3]
    return (None if len(said) % 3 == 0 else reply), len(said) % 4 / 4


def converse(c, policy, row, prompt, purpose, iteration, slot, which):
    """A response of several turns; all of them have max_new_tokens together."""
    noise = noise_of(c, purpose, iteration, slot, which)
    r = SimpleNamespace(prompt=prompt, response=[], own=[], paid=[], finished=False, each={}, texts=[])
    messages = [dict(role="user", content=row["prompt"])]
    for turn in range(c.max_turns):
        said = sample(c, policy, prompt + r.response, noise[len(r.response):])
        r.own += range(len(r.response), len(r.response) + len(said))
        r.paid += [0.0] * len(said)
        r.response += said
        r.text = decode(said, MARKERS["tokenizer"])
        r.texts.append(r.text)
        if said[-1] not in ENDS:
            break
        messages.append(dict(role="assistant", content=r.text))
        seed = hashed(f"{c.seed} {purpose} environment {turn} {iteration} {slot} {which}", 4)
        reply, r.paid[-1] = answered(messages, row, seed)
        r.finished = reply is None
        ids = encode(reply or "", MARKERS["tokenizer"])
        if r.finished or turn + 1 == c.max_turns or len(r.response) + len(ids) >= c.max_new_tokens:
            break
        messages.append(dict(role="user", content=reply))
        r.texts.append(reply)
        r.response += ids
    r.read = "".join(r.texts)  # by a reward model that knows no chats
    return r


@torch.no_grad()
def respond(c, models, row, purpose, iteration, slot, which=0):
    """A response to a data row, with all that the models and rules say of it."""
    prompt = encode(row["prompt"], MARKERS["tokenizer"])
    if c.turns:
        r = converse(c, models.policy, row, prompt, purpose, iteration, slot, which)
        response = r.response
    else:
        response = sample(c, models.policy, prompt, noise_of(c, purpose, iteration, slot, which))
        r = SimpleNamespace(prompt=prompt, response=response, finished=response[-1] in ENDS, each={})
        # with gaps some tokens are not the policy's, but a tool's, say: the policy reads them, and that is all
        r.own = [t for t, token in enumerate(response) if not c.gaps or t == 0 or (token + t) % 3]
        r.paid = [0.0] * len(r.own)
        r.read = r.text = decode([response[t] for t in r.own], MARKERS["tokenizer"])
    for _, name in c.mix:
        learned = name == "reward_model"
        r.each[name] = learned_score(c, models.reward, row, r) if learned else RULES[name](c, row, r)
    # a reward may not apply (None). Where none applies that has a weight, there is no score
    applies = [(weight, r.each[name]) for weight, name in c.mix if weight and r.each[name] is not None]
    r.raw = r.score = sum(weight * x for weight, x in applies) if applies else None
    logprobs, _ = logprobs_of(models.policy, prompt, response, c.temperature, r.own)
    r.old = r.sampled = [x.item() for x in logprobs]
    r.counts = r.plain = [1.0] * len(r.old)
    if models.reference:
        logprobs, _ = logprobs_of(models.reference, prompt, response, c.temperature, r.own)
        r.reference = [x.item() for x in logprobs]
    if models.value:  # of the states before each token was chosen
        values = scalars(models.value, prompt + response)
        r.values = [values[len(prompt) + t - 1].item() for t in r.own]
    return r


def learned_score(c, reward, row, r):
    """The reward model's number at the last token of the text, in its own tokenizer."""
    ids = encode(row["prompt"] + r.read, MARKERS[c.reward_tokenizer]) + [EOS] * r.finished
    return scalars(reward, ids)[-1].item()


def length(c, row, r):
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13); a fifth of R is its cache."""
    cache = c.max_new_tokens / 5
    return min(max((c.max_new_tokens - cache - len(r.own)) / cache, -1), 0)


def distinct(c, row, r):
    """Of the pairs of characters beside one another, how many are different ones."""
    pairs = list(zip(r.text, r.text[1:], strict=False))
    return len(set(pairs)) / len(pairs) if pairs else 1.0


def environment(c, row, r):
    return sum(r.paid)


def letters(batch):
    return [sum(ch in "abcd" for ch in text) / 4 for text in batch["completions"]]


def sometimes(batch):
    """The same for all responses to a prompt of odd length."""
    return [0.3 if len(row["prompt"]) % 2 else x for x, row in zip(letters(batch), batch["rows"], strict=True)]


def some(batch):
    """It does not apply to texts of an odd length."""
    return [None if len(text) % 2 else x for x, text in zip(letters(batch), batch["completions"], strict=True)]


def answer(batch):
    """How often the row's answer, a letter, is in the text."""
    return [text.count(row["answer"]) for text, row in zip(batch["completions"], batch["rows"], strict=True)]


RULES = dict(length=length, distinct=distinct, environment=environment)
THEIRS = (letters, sometimes, some, answer)  # in a file of the user's, as runs are given them
FILE = "\n".join(inspect.getsource(function) for function in (*THEIRS, answered))
RULES |= {f.__name__: lambda c, row, r, f=f: f(dict(completions=[r.text], rows=[row]))[0]
          for f in THEIRS}


def center(c, models, rows, picked, seen):
    """
    The reward model's zero, where it does not say it: the mean score of the
    responses that end, among those to the first iteration's prompts. picked: [(slot, row, which)].
    """
    reward = models.reward
    if reward is None or reward.zero_is_said:
        return
    batch = [(rows[i], respond(c, models, rows[i], "rollout", 0, slot, which))
             for slot, i, which in picked]
    ended = [(row, r) for row, r in batch if r.finished]
    reward.shift -= mean([learned_score(c, reward, row, r) for row, r in ended or batch])
    some = "all" if len(ended) == len(batch) else "some" if ended else "none"
    seen[f"centered, {some} end"] += 1
    if getattr(c, "value_init", None) == "reward":
        models.value.shift = reward.shift


def finish_scores(c, batch, seen, deviation=1.0, missing=None):
    """
    What is done to a score: `missing` if there is none; divided; replaced if the response never
    ended; clipped.
    """
    for r in batch:
        seen["no score"] += r.score is None
        r.score = missing if r.score is None else r.score / deviation
        if c.length_coef:
            r.score -= c.length_coef * len(r.own)
        if c.missing_eos_penalty and not r.finished:
            r.score = -c.missing_eos_penalty
            seen["no end"] += 1
        if c.reward_clip and r.score is not None and abs(r.score) > c.reward_clip:
            seen["score clipped above" if r.score > 0 else "score clipped below"] += 1
            r.score = math.copysign(c.reward_clip, r.score)


def summary(c, batch, prefix):
    """Means over responses. Tokens that an older policy has sampled count in KL and entropy what they count in the loss."""
    figures = dict(scores=there([r.raw for r in batch]), length=[len(r.own) for r in batch],
                   finished=[float(r.finished) for r in batch],
                   entropy=[-sum(n * p for n, p in zip(r.plain, r.old, strict=True)) for r in batch])
    if hasattr(batch[0], "reference"):
        figures["kl"] = [sum(n * (p - q) for n, p, q in zip(r.plain, r.old, r.reference, strict=True)) for r in batch]
    if len(c.mix) > 1:
        figures |= {f"reward/{name}": there([r.each[name] for r in batch]) for _, name in c.mix}
    if c.turns:
        figures["turns"] = [len(r.texts) // 2 + 1.0 for r in batch]
        figures["environment_share"] = [1 - len(r.own) / len(r.response) for r in batch]
    if len(figures["scores"]) < len(batch):
        figures["scored"] = [float(r.raw is not None) for r in batch]
    return {f"{prefix}/{name}": mean(x) for name, x in figures.items()}


def evaluation(c, models, rows, iteration, best):
    """
    Figures of held-out prompts. best: the policy that has the highest mean score so far, as it is
    shaped for training (divided, though, by the deviation of the first evaluation's scores).
    """
    if iteration % c.eval_interval and iteration < c.max_iters:
        return {}
    rows = held_out_of(c, rows)
    batch = [respond(c, models, row, "eval", 0, slot) for slot, row in enumerate(rows)]
    figures = summary(c, batch, "eval")
    raw = there([r.raw for r in batch])
    running = c.scale_scores == "running"
    if best.score is None and running:
        best.deviation = deviation_of(raw)
    # not by these: the scores as they are, nor those that are divided by a deviation of their own
    others = dict(raw=mean(raw))
    if running:
        again = [copy.copy(r) for r in batch]
        finish_scores(c, again, Counter(), deviation_of(raw), 0.0)
        others["anew"] = mean([r.score for r in again])
    finish_scores(c, batch, Counter(), best.deviation, 0.0 if models.value else None)
    score = mean(there([r.score for r in batch]))
    for name, other in others.items():
        if name not in best.others or other > best.others[name][0] + 1e-6:
            best.others[name] = other, iteration
    if best.score is None or score > best.score + 1e-6:
        best.little = best.score is not None and score - best.score < 0.1 * max(abs(score), abs(best.score))
        best.negative = best.score is not None and score < 0
        best.score, best.policy = score, copies_of(models.policy)
        best.at.append(iteration)
    return figures


def no_best():
    return SimpleNamespace(score=None, policy=None, deviation=1.0, at=[], others={})


def copies_of(model):
    """{name: a copy of the parameter}."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def deviation_of(scores):
    """By which scores are divided; 1 where they are all the same, or none is there."""
    return statistics.pstdev(scores or [0.0]) or 1.0


def products(c, models, ema, best, seen):
    """The models that a run leaves."""
    trained = dict(policy=models.policy)
    if models.value:
        trained["value_model"] = models.value
    if c.ema_decay:
        trained["ema_policy"] = ema
    if c.keep_best:
        trained["best_policy"] = best.policy
        seen["best first" if best.at[-1] == 0 else "best later"] += 1
        seen["best by a little"] += best.little
        seen["best below 0"] += best.negative
        for name, (_, iteration) in best.others.items():
            seen[f"best not {name}"] += best.at[-1] != iteration
    return trained


def reward_model_of(c):
    """The learned reward, where the run has one; else None."""
    return scalar_model(c.reward_path) if "reward_model" in [name for _, name in c.mix] else None


# --------------------------------------------------------------------------------------------------
# PPO


def ppo(c, data):
    """A run of ppo.py. data: the rows to train on and those to evaluate on."""
    models = SimpleNamespace(policy=language_model(c.policy_path), reward=reward_model_of(c),
                             reference=language_model(c.ref_path or c.policy_path) if c.kl_coef else None)
    if c.value_init == "shared":  # a head on the policy's trunk, which both losses train
        models.value = with_new_head(models.policy.base_model, c.seed)
        values_own = [models.value.head]
    else:
        from_reward = c.value_init == "reward"
        models.value = (scalar_model(c.reward_path) if from_reward else
                        scalar_model(c.policy_path, c.seed))
        values_own = parameters_of(models.value).values()
    adapters, policy_own = [], models.policy.parameters()
    if c.lora:
        adapters = [Adapters(trunk, c.lora, c.seed) for trunk in (models.policy.base_model, models.value.trunk)]
        policy_own, values_own = adapters[0].parameters(), [*adapters[1].parameters(), models.value.head]
        models.policy.requires_grad_(False)
    policy_adam, value_adam = AdamW(policy_own, c), AdamW(values_own, c)
    ema, best = copies_of(models.policy), no_best()
    log, seen, kl_coef, all_scores, past = [], Counter(), c.kl_coef, [], []
    picked = prompts_of(c, 0, c.batch_size, len(data.train))
    center(c, models, data.train, [(slot, i, 0) for slot, i in enumerate(picked)], seen)

    for iteration in range(c.max_iters):
        passes, ptx_losses = iteration * c.ppo_epochs * c.num_minibatches, []
        record = evaluation(c, models, data.val, iteration, best)
        log.append(record)
        rows = [data.train[i] for i in prompts_of(c, iteration, c.batch_size, len(data.train))]
        then = of_then(c, models, past, iteration)
        batch = [respond(c, then, row, "rollout", iteration, slot)
                 for slot, row in enumerate(rows)]
        read_again(c, models, batch)
        record |= summary(c, batch, "objective") | counted(c, batch, seen)
        all_scores += there([r.raw for r in batch])
        running = c.scale_scores == "running"
        finish_scores(c, batch, seen, deviation_of(all_scores) if running else 1.0, 0.0)
        record |= find_advantages(c, batch, kl_coef)

        policy_lr = learning_rate(iteration, c.learning_rate, c.warmup_iters, c.max_iters,
                                  c.lr_decay)
        value_lr = learning_rate(iteration, c.value_learning_rate or c.learning_rate,
                                 c.value_warmup_iters, c.max_iters, c.value_lr_decay)
        figures, steps = [], 0
        record |= {"policy/grad_norm": 0.0, "val/grad_norm": 0.0}
        for minibatch in minibatches_of(c, iteration, c.ppo_epochs):
            policy_adam.zero_gradients()
            value_adam.zero_gradients()
            tokens = sum(len(batch[i].own) for i in minibatch)
            of_this_step = flat(ppo_losses(c, models, batch[i], kl_coef, tokens, seen)
                                for i in minibatch)
            record |= {} if figures else drift(c, iteration, of_this_step)
            figures += of_this_step
            if c.ptx:
                ptx_losses += ptx(c, models.policy, data.ptx, passes)
            passes += 1
            if too_far(c, of_this_step, seen):
                break
            record["policy/grad_norm"] = policy_adam.clip(seen)
            record["val/grad_norm"] = value_adam.clip(seen)
            value_adam.step(value_lr)
            steps += 1
            if iteration < c.critic_warmup_iters:
                seen["policy waits"] += 1
                continue
            policy_adam.step(policy_lr)
            if c.ema_decay:
                average_into(ema, models.policy, c.ema_decay)

        names = figures[0].keys() - {"drift"}
        if c.recipe == "reinforce":
            names -= {"policy/clipfrac", "val/clipfrac", "policy/approx_kl"}
        if c.penalty:
            names -= {"policy/clipfrac"}
            record["policy/penalty"] = c.penalty
        record |= {name: mean([one[name] for one in figures]) for name in names}
        record |= {"policy/steps": steps, "policy/lr": policy_lr, "val/lr": value_lr}
        if c.ptx:
            record["loss/ptx"] = mean(ptx_losses)
        if c.penalty and c.penalty_target:  # PPO, section 4
            moved = record["policy/approx_kl"] / c.penalty_target
            seen["penalty up" if moved > 1.5 else "penalty down" if moved < 1 / 1.5 else "penalty stays"] += 1
            c.penalty *= 2 if moved > 1.5 else 1 / 2 if moved < 1 / 1.5 else 1
        if c.kl_coef_target:  # Ziegler et al. (arXiv 1909.08593, section 2.2)
            record["objective/kl_coef"] = kl_coef
            error = record["objective/kl"] / c.kl_coef_target - 1
            way = "up" if error > 0.2 else "down" if error < -0.2 else "a little"
            seen[f"kl_coef {way}"] += 1
            kl_coef *= 1 + min(max(error, -0.2), 0.2) * c.batch_size / 10_000

    log.append(evaluation(c, models, data.val, c.max_iters, best))
    for one in adapters:
        one.merge()
    trained = products(c, models, ema, best, seen)
    return SimpleNamespace(log=log, models=trained, seen=seen)


def of_then(c, models, past, iteration):
    """
    The models that sample and say the old log-probs: with the policy as it was `staleness`
    iterations ago. past: the policies of all iterations so far, to which that of now is added.
    """
    past.append(copy.deepcopy(models.policy))
    return SimpleNamespace(**vars(models) | dict(policy=past[max(0, iteration - c.staleness)]))


def read_again(c, models, batch):
    """
    Decoupled PPO (arXiv 2505.24298): with importance_cap the ratio is to the policy of now, and what
    a token counts says how much likelier it is to that policy than to the one that has sampled it,
    importance_cap times at most. A recipe has other rules of what a token counts.
    """
    for r in batch:
        if c.importance_cap:
            now, _ = logprobs_of(models.policy, r.prompt, r.response, c.temperature, r.own)
            r.old = [x.item() for x in now]
            counts = [math.exp(p - q) for p, q in zip(r.old, r.sampled, strict=True)]
            if c.importance_level == "sequence":
                counts = [math.prod(counts)] * len(counts)
            r.plain = [min(count, c.importance_cap) for count in
                       (math.exp(p - q) for p, q in zip(r.old, r.sampled, strict=True))]
            low, high = c.importance_floor, c.importance_cap
            r.counts = [min(max(count, low), high) if c.importance_outside == "clip" else
                        count if low <= count <= high else 0.0 for count in counts]


def counted(c, batch, seen):
    """Figures of what the tokens count."""
    if not c.importance_cap:
        return {}
    counts = flat(r.counts for r in batch)
    capped = sum(count == c.importance_cap for count in counts)
    seen["capped"] += capped
    seen["counts less"] += sum(count < 1 for count in counts)
    figures = {"policy/importance": mean(counts), "policy/importance_capped": capped / len(counts),
               "policy/effective_tokens": sum(counts)**2 / sum(count**2 for count in counts) / len(counts)}
    if c.recipe == "masked_importance":
        dropped = sum(count == 0 for count in counts)
        seen["dropped"] += dropped
        figures["policy/importance_dropped"] = dropped / len(counts)
    return figures


def drift(c, iteration, figures):
    """How far the policy is from the one that has sampled the batch, in an iteration's first step."""
    if not c.staleness or not iteration:
        return {}
    return {"policy/off_policy_kl": mean([one["drift"] for one in figures])}


def ptx(c, policy, rows, step):
    """
    Add the gradient of PPO-ptx (InstructGPT, arXiv 2203.02155, eq. 2) to the policy's, in a backward
    pass of its own: the mean of -log p over the tokens of the step's texts and demonstrations, times
    ptx_coef. The first token of a text has nothing before it. Returns -log p of each token.
    """
    losses = []
    for i in prompts_of(c, step, c.batch_size // c.num_minibatches, len(rows)):
        if "text" in rows[i]:
            first, *rest = encode(rows[i]["text"], MARKERS["tokenizer"])
            prompt, completion = [first], rest
        else:
            prompt, completion = (encode(rows[i][field], MARKERS["tokenizer"])
                                  for field in ("prompt", "completion"))
        losses += [-x for x in logprobs_of(policy, prompt, completion + [EOS], 1.0)[0]]
    (c.ptx_coef * sum(losses) / len(losses)).backward()
    return [x.item() for x in losses]


def find_advantages(c, batch, kl_coef):
    """
    Scores and KL -> a reward a token -> returns, and advantages of mean 0 and variance 1 over all
    tokens of the batch. Returns figures.
    """
    penalties = []
    for r in batch:
        kls = [0.0] * len(r.old)
        if hasattr(r, "reference"):
            kls = [kl_estimate(p, q, c.kl_estimator) for p, q in zip(r.old, r.reference, strict=True)]
        r.rewards = [-kl_coef * kl for kl in kls]
        penalties.append(sum(r.rewards))
        weight = dict((name, x) for x, name in c.mix).get("environment", 0.0)
        r.rewards[-1] += r.score - weight * sum(r.paid)  # a turn is paid for at its end
        r.rewards = [x + weight * y for x, y in zip(r.rewards, r.paid, strict=True)]
    earned = mean([sum(r.rewards) for r in batch])
    if c.whiten_rewards != "none":
        every = flat(r.rewards for r in batch)
        middle, deviation = mean(every), math.sqrt(statistics.pvariance(every) + 1e-8)
        stays = middle if c.whiten_rewards == "keep-mean" else 0.0
        for r in batch:
            r.rewards = [(x - middle) / deviation + stays for x in r.rewards]
    for r in batch:
        r.advantages, r.returns = advantages_and_returns(r.rewards, r.values, c.gamma, c.lam)
        if c.lam_alpha:  # VAPO (arXiv 2504.05118)
            lam = max(1 - 1 / (c.lam_alpha * len(r.own)), 0.0)
            r.advantages = advantages_and_returns(r.rewards, r.values, c.gamma, lam)[0]
    every = flat(r.advantages for r in batch)
    middle, deviation = mean(every), math.sqrt(statistics.pvariance(every) + 1e-8)
    for r in batch:
        r.advantages = [(a - middle) / deviation for a in r.advantages]
    figures = {"objective/non_score_reward": mean(penalties), "objective/rlhf_reward": earned}
    returns = flat(r.returns for r in batch)
    if len(returns) > 1:  # one number has no variance
        errors = [x - v for x, v in zip(returns, flat(r.values for r in batch), strict=True)]
        share = statistics.variance(errors) / statistics.variance(returns)
        figures["val/explained_variance"] = 1 - share
    return figures


def ppo_losses(c, models, r, kl_coef, tokens, seen):
    """
    Add the gradients of a response's losses to the models'. tokens: how many the whole step has,
    by which the losses are divided. Returns figures of each of the response's tokens.
    """
    logprobs, entropies = logprobs_of(models.policy, r.prompt, r.response, c.temperature, r.own)
    values = scalars(models.value, r.prompt + r.response)
    total, figures = 0.0, []
    seen["gap"] += len(r.own) < r.own[-1] + 1
    seen["gap at the end"] += r.own[-1] + 1 < len(r.response)
    for t, logprob in enumerate(logprobs):
        ratio = torch.exp(logprob - r.old[t])
        surrogate, bound = clipped_surrogate(ratio, r.advantages[t], c.cliprange, c.cliprange, c.dual_clip)
        if c.recipe == "reinforce":
            surrogate, bound = -r.advantages[t] * logprob, ""
        if c.shift_limit:
            surrogate, bound = bounded_shift(ratio, logprob, r.old[t], r.advantages[t], c.shift_limit)
        if c.penalty:  # PPO (arXiv 1707.06347, eq. 8), with k3
            surrogate = c.penalty * (ratio - 1 - torch.log(ratio)) - ratio * r.advantages[t]
        value = values[len(r.prompt) + r.own[t] - 1]
        vf, vf_bound = value_loss(value, r.values[t], r.returns[t], c.cliprange_value)
        seen[bound] += 1
        seen[vf_bound] += 1
        surrogate = surrogate * r.counts[t]
        total = total + surrogate + c.vf_coef * vf - c.entropy_coef * entropies[t]
        figures.append({
            "loss/policy": number(surrogate), "loss/value": number(vf),
            "policy/clipfrac": bool(bound), "val/clipfrac": bool(vf_bound),
            "policy/approx_kl": kl_estimate(r.old[t], logprob.item(), "k3"),
            "drift": kl_estimate(r.sampled[t], logprob.item(), "k3")})
    (total / tokens).backward()
    return figures


def too_far(c, figures, seen):
    """Whether the policy has moved so far that this step is not taken, nor any more."""
    if c.target_kl and mean([one["policy/approx_kl"] for one in figures]) > c.target_kl:
        seen["early stop"] += 1
        return True
    return False


# --------------------------------------------------------------------------------------------------
# GRPO and its relatives


def grpo(c, data):
    """A run of grpo.py. data: the rows to train on and those to evaluate on."""
    models = SimpleNamespace(policy=language_model(c.policy_path), reward=reward_model_of(c),
                             reference=language_model(c.ref_path or c.policy_path) if c.kl_coef else None,
                             value=None)
    adam = AdamW(models.policy.parameters(), c)
    ema, best = copies_of(models.policy), no_best()
    log, seen, past = [], Counter(), []
    picked = prompts_of(c, 0, c.batch_size // c.group_size, len(data.train))
    center(c, models, data.train, [(slot, i, which) for slot, i in enumerate(picked)
                                   for which in range(c.group_size)], seen)

    for iteration in range(c.max_iters):
        record = evaluation(c, models, data.val, iteration, best)
        log.append(record)
        then = of_then(c, models, past, iteration)
        first, groups = sample_groups(c, models, then, data.train, iteration, seen)
        batch = flat(groups)
        read_again(c, models, batch)
        # what the policy says at first measures it; KL and entropy are of what is trained on
        trained_on, sampled = summary(c, batch, "objective"), summary(c, flat(first), "objective")
        inner = {"objective/entropy", "objective/kl"}
        record |= {key: (trained_on if key in inner else sampled)[key] for key in sampled}
        record |= counted(c, batch, seen)
        record["objective/flat_groups"] = mean([float(is_flat(c, group)) for group in first])
        record["objective/score_std"] = statistics.stdev(there([r.score for r in flat(first)]))
        if c.max_refills:
            record |= summary(c, batch, "trained")
            record["trained/flat_groups"] = mean([float(is_flat(c, group)) for group in groups])
        seen["all end early"] += max(len(r.response) for r in batch) < c.max_new_tokens
        find_group_advantages(c, groups)
        for group in groups:
            credit_tokens(c, group, seen)
        record["objective/rlhf_reward"] = mean(there([r.judged for r in batch]))
        seen["other answers"] += sum(a.prompt + a.response == b.prompt + b.response and a.raw != b.raw
                                     for a, b in itertools.combinations(batch, 2))

        lr = learning_rate(iteration, c.learning_rate, c.warmup_iters, c.max_iters, c.lr_decay)
        figures, steps, norm = [], 0, 0.0
        for minibatch in minibatches_of(c, iteration, c.num_iterations):
            rows = [batch[i] for i in minibatch if batch[i].finished or c.truncated == "keep"]
            seen["masked response"] += len(minibatch) - len(rows)
            if c.max_refills:  # what is flat after all refills is as if it had not been sampled
                seen["left out"] += len([r for r in rows if r.flat and any(r.advantages)])
                rows = [r for r in rows if not r.flat]
            if not any(flat(r.advantages for r in rows)):  # nothing to learn
                seen["flat minibatch" if rows else "masked minibatch"] += 1
                continue
            tokens = sum(len(r.own) for r in rows)
            adam.zero_gradients()
            of_this_step = []
            for r in rows:
                # what its tokens count: DAPO (arXiv 2503.14476, eq. 12), GRPO (arXiv 2402.03300,
                # eq. 3), Dr. GRPO (arXiv 2503.20783, listing 1)
                weight = {"token-mean": 1 / tokens,
                          "seq-mean-token-mean": 1 / len(rows) / len(r.own),
                          "seq-mean-token-sum-norm": 1 / len(minibatch) / c.max_new_tokens}
                of_this_step += grpo_losses(c, models, r, weight[c.aggregation], seen)
            record |= {} if figures else drift(c, iteration, of_this_step)
            figures += of_this_step
            if too_far(c, of_this_step, seen):
                break
            norm = adam.clip(seen)
            adam.step(lr)
            steps += 1
            if c.ema_decay:
                average_into(ema, models.policy, c.ema_decay)

        names = ["loss/policy", "loss/kl", "policy/approx_kl", "policy/clipfrac"]
        names += ["policy/left_out"] * (c.off_policy_limit > 0)
        record |= {name: mean([one[name] for one in figures]) for name in names}
        record |= {"policy/grad_norm": norm, "policy/steps": steps, "policy/lr": lr}

    log.append(evaluation(c, models, data.val, c.max_iters, best))
    trained = products(c, models, ema, best, seen)
    return SimpleNamespace(log=log, models=trained, seen=seen)


def is_flat(c, group):
    """Whether all its scores are the same, within rounding; or those of the reward refill_by."""
    scores = there([r.each[c.refill_by] if c.refill_by else r.score for r in group])
    return len(scores) < 2 or max(scores) - min(scores) < 1e-9


def sample_groups(c, models, then, rows, iteration, seen):
    """
    The groups of an iteration, [[response, ...], ...], as they were at first and in the end: flat
    ones are sampled again, for another prompt, max_refills times. then: the models of of_then; a
    refill is sampled by the policy of now.
    """
    def group(slot, purpose):
        responses = [respond(c, then if purpose == "rollout" else models, rows[picked[slot]],
                             purpose, iteration, slot, which)
                     for which in range(c.group_size)]
        finish_scores(c, responses, seen)
        return responses

    picked = prompts_of(c, iteration, c.batch_size // c.group_size, len(rows))
    groups = [group(slot, "rollout") for slot in range(len(picked))]
    first = list(groups)
    for refill in range(c.max_refills):
        flat_ones = [slot for slot in range(len(groups)) if is_flat(c, groups[slot])]
        for i, slot in enumerate(flat_ones):
            seen["flat by a rule"] += len({r.raw for r in groups[slot]}) > 1
            picked[slot] = another_prompt(c, picked[slot], len(rows), iteration, refill, slot)
            groups[slot] = group(slot, f"refill {refill}")
            seen[f"refill {refill}" + (" behind a full slot" if i < slot else "")] += 1
    for group in groups:
        for r in group:
            r.flat = is_flat(c, group)
    return first, groups


def find_group_advantages(c, groups):
    """One number a response, in r.advantage."""
    for r in flat(groups):
        r.judged, r.advantage = r.score, 0.0
        if r.judged is not None and c.kl_coef and c.kl_in == "reward":  # RLOO (arXiv 2402.14740, section 2.1)
            r.judged -= c.kl_coef * sum(kl_estimate(p, q, c.kl_estimator)
                                        for p, q in zip(r.old, r.reference, strict=True))
    every = there([r.judged for r in flat(groups)])
    units = {"none": 1.0, "batch": statistics.stdev(every) + 1e-4}
    for group in groups:
        scored = [r for r in group if r.judged is not None]
        scores = [r.judged for r in scored]
        if len(scores) < 2 or max(scores) - min(scores) < 1e-9:
            continue
        units["std"] = statistics.stdev(scores) + 1e-4
        for i, r in enumerate(scored):
            others = scores[:i] + scores[i + 1:] if c.baseline == "others" else scores
            r.advantage = (r.judged - mean(others)) / units[c.scale_by]
            if c.recipe == "maxrl":  # arXiv 2602.02710
                r.advantage /= mean(scores) + 1e-4
    if c.recipe == "gdpo":  # arXiv 2601.05242
        for r in flat(groups):
            r.advantage = 0.0
        for (weight, name), group in itertools.product(c.mix, groups):
            each = [r.each[name] for r in group]
            for r in group:
                r.advantage += weight * (r.each[name] - mean(each)) / (statistics.stdev(each) + 1e-4)
    if c.recipe in ("reinforce_pp", "gdpo"):  # arXiv 2501.03262
        unit = statistics.stdev([r.advantage for r in flat(groups)]) + 1e-4
        for r in flat(groups):
            r.advantage /= unit


def credit_tokens(c, group, seen):
    """One number a token, in r.advantages: that of the response, or with a recipe of the token's turn."""
    for r in group:
        r.advantages = [r.advantage] * len(r.own)
    if c.recipe != "turn_credit":
        return
    weight = sum(weight for weight, name in c.mix if name == "environment")
    for r in group:  # a turn: the numbers of its tokens among the policy's own
        r.turns = []
        for n, t in enumerate(r.own):
            if n == 0 or t > r.own[n - 1] + 1:
                r.turns.append([])
            r.turns[-1].append(n)
        paid = [weight * sum(r.paid[n] for n in turn) for turn in r.turns]
        rest = r.judged - sum(paid)
        r.returns = [sum(paid[k:]) + rest for k in range(len(paid))]
    for k in range(max(len(r.turns) for r in group)):
        those = [r for r in group if len(r.turns) > k]
        returns = [r.returns[k] for r in those]
        alike = len(returns) < 2 or max(returns) - min(returns) < 1e-9
        seen["turn alone"] += len(returns) == 1
        seen["turn of some"] += 1 < len(returns) < len(group)
        for r in those:
            unit = 1.0 if alike else statistics.stdev(returns) + 1e-4
            seen["turn credited"] += k > 0 and not alike
            for n in r.turns[k]:
                r.advantages[n] = 0.0 if alike else (r.returns[k] - mean(returns)) / unit


def grpo_losses(c, models, r, weight, seen):
    """
    Add the gradient of a response's loss to the policy's; each of its tokens counts `weight`.
    Returns figures of each of its tokens.
    """
    logprobs, entropies = logprobs_of(models.policy, r.prompt, r.response, c.temperature, r.own)
    seen["gap"] += len(r.own) < r.own[-1] + 1
    seen["gap at the end"] += r.own[-1] + 1 < len(r.response)
    log_ratios = [logprob - old for logprob, old in zip(logprobs, r.old, strict=True)]
    of_all = torch.exp(sum(log_ratios) / len(log_ratios))  # GSPO (arXiv 2507.18071, eq. 7)
    # DeepSeek-V3.2 (arXiv 2512.02556, eq. 9)
    distance = mean([q - p.item() for q, p in zip(r.sampled, logprobs, strict=True)])
    left_out = c.off_policy_limit > 0 and r.advantage < 0 and distance > c.off_policy_limit
    seen["left out, off-policy"] += left_out
    total, figures = 0.0, []
    for t, logprob in enumerate(logprobs):
        ratio = of_all if c.importance == "sequence" else torch.exp(log_ratios[t])
        bounds = r.advantages[t], c.cliprange, c.cliprange_high
        surrogate, bound = (weighted_logprob(ratio, logprob, *bounds) if c.loss_type == "cispo" else
                            clipped_surrogate(ratio, *bounds, c.dual_clip))
        if c.shift_limit:
            surrogate, bound = bounded_shift(ratio, logprob, r.old[t], r.advantage, c.shift_limit)
        seen[bound] += 1
        kl = kl_estimate(logprob, r.reference[t], c.kl_estimator) if models.reference else 0.0
        if c.kl_correction:
            kl = kl * torch.exp(log_ratios[t])
        surrogate = surrogate * (0.0 if left_out else r.counts[t])
        total = total + surrogate - c.entropy_coef * entropies[t]
        if c.kl_in == "loss":
            total = total + c.kl_coef * kl
        figures.append({
            "loss/policy": number(surrogate), "loss/kl": number(kl), "policy/clipfrac": bool(bound),
            "policy/approx_kl": kl_estimate(r.old[t], logprob.item(), "k3"),
            "drift": kl_estimate(r.sampled[t], logprob.item(), "k3")}
            | ({"policy/left_out": left_out} if c.off_policy_limit else {}))
    (total * weight).backward()
    return figures


# --------------------------------------------------------------------------------------------------
# SFT, and the loop that the reward model and DPO have, too


def train(c, adam, name, evaluate, learn, n, seen):
    """
    The loop over n rows: evaluate() gives figures, learn(numbers of rows) a loss and figures. name:
    of the model in the log. Returns the log.
    """
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
            record |= figures | {f"{name}/grad_norm": adam.clip(seen), f"{name}/lr": lr}
            adam.step(lr)
    return log


def sft(c, data):
    """A run of sft.py from a model folder. data: the rows to train on, those to evaluate on."""
    policy = language_model(c.init_from)
    adam, seen = AdamW(policy.parameters(), c), Counter()

    def loss_of(rows):
        """The mean over the tokens of the completions and their EOS."""
        losses = []
        for row in rows:
            prompt, completion = (encode(row[field], MARKERS["tokenizer"])
                                  for field in ("prompt", "completion"))
            losses += [-x for x in logprobs_of(policy, prompt, completion + [EOS], 1.0)[0]]
        return sum(losses) / len(losses)

    def evaluate():
        return {"eval/loss": loss_of(held_out_of(c, data.val)).item()}

    def learn(picked):
        loss = loss_of([data.train[i] for i in picked])
        return loss, {"loss/sft": loss.item()}

    log = train(c, adam, "policy", evaluate, learn, len(data.train), seen)
    return SimpleNamespace(log=log, models=dict(policy=policy), seen=seen)


# --------------------------------------------------------------------------------------------------
# the reward model


def rm(c, data):
    """
    A run of rm.py. data: pairs to train on and to evaluate on, and the demonstrations that shall
    score 0 on average; None: the chosen answers to evaluate on shall. With a teacher what is
    trained on may also be single responses.
    """
    model = scalar_model(c.init_from, c.seed if c.new_head else None)
    model.shift = 0.0
    adapters = Adapters(model.trunk, c.lora, c.seed) if c.lora else None
    trained = [*adapters.parameters(), model.head] if c.lora else parameters_of(model).values()
    adam, seen = AdamW(trained, c), Counter()
    fields = ["chosen", "rejected"] if "chosen" in data.train[0] else ["completion"]

    def score(row, field, model=model, tokenizer="tokenizer"):
        ids = encode(row["prompt"] + row[field], MARKERS[tokenizer]) + [EOS]
        return scalars(model, ids)[-1]

    def ask(rows, fields):
        """What the teachers say of each completion: each one's scores less their mean; the mean."""
        said = [[0.0] * len(fields) for _ in rows]
        for path in c.teacher.split(","):
            tokenizer = "other_tokenizer" if path.endswith("other") else "tokenizer"
            seen[f"teacher, {tokenizer}"] += 1
            teacher = scalar_model(path)
            raw = [[score(row, field, teacher, tokenizer).item() for field in fields] for row in rows]
            for each, x in zip(said, raw, strict=True):
                for i in range(len(fields)):
                    each[i] += (x[i] - mean(flat(raw))) / len(c.teacher.split(","))
        return said

    def follow(rows, wanted):
        """
        Of each row: the mean squared distance from what the teacher says of its completions; the
        cross-entropy of two coins, where there are two; which is the better one.
        """
        distances, entropies, hits = [], [], []
        for row, theirs in zip(rows, wanted, strict=True):
            ours = [score(row, field) for field in fields]
            distances.append(sum((x - y) ** 2 for x, y in zip(ours, theirs, strict=True)) / len(ours))
            if len(ours) == 2:
                p = 1 / (1 + math.exp(theirs[1] - theirs[0]))
                q = 1 / (1 + torch.exp(ours[1] - ours[0]))
                entropies.append(-p * torch.log(q) - (1 - p) * torch.log(1 - q))
                hits.append(0.5 if ours[0] == ours[1] else float(ours[0] > ours[1]))
        return distances, entropies, hits

    def compare(pairs, margin=0.0, smoothing=0.0, sure=False):
        """
        Of each pair: Bradley-Terry (arXiv 2009.01325, section 3.4) with a lead that is wanted
        (Llama 2, 2307.09288, eq. 2) and labels that may be wrong (cDPO); the square that keeps
        scores around 0 (2312.09244); how likely the chosen one is the better one.
        """
        losses, squares, chances = [], [], []
        for row in pairs:
            better, worse = score(row, "chosen"), score(row, "rejected")
            lead = better - worse - margin * row.get("margin", 0.0)
            # the label is right with the row's confidence, and then swapped with a chance of `smoothing`
            p = row.get("confidence", 1.0) if sure else 1.0
            p = p * (1 - smoothing) + (1 - p) * smoothing
            losses.append(p * torch.log(1 + torch.exp(-lead)) + (1 - p) * torch.log(1 + torch.exp(lead)))
            squares.append((better + worse) ** 2)
            chances.append(1 / (1 + math.exp((worse - better).item())))
            seen["confidence" if row.get("confidence") and sure else "no confidence"] += 1
            seen["margin" if row.get("margin") and margin else "no margin"] += 1
        return losses, squares, chances

    def hit(p):
        """Whether a guess is right: half, where it is none."""
        seen["tie"] += p == 0.5
        return 0.5 if p == 0.5 else float(p > 0.5)

    def miscalibration(chances):
        """Guo et al. (1706.04599, eq. 3), ten bins from 1/2 to 1."""
        total = 0.0
        for i in range(10):
            low, high = 0.5 + i / 20, 0.5 + (i + 1) / 20
            inside = [p for p in chances if low <= max(p, 1 - p) < high]
            total += abs(sum(max(p, 1 - p) - hit(p) for p in inside)) / len(chances)
            seen["full bin" if inside else "empty bin"] += 1
        return total

    if c.teacher:
        with torch.no_grad():
            wanted = ask(data.train, fields)
            held_out = ask(held_out_of(c, data.val), ["chosen", "rejected"])

    def evaluate():
        rows = held_out_of(c, data.val)
        losses, _, chances = compare(rows)
        figures = {"eval/loss": mean([x.item() for x in losses]),
                   "eval/accuracy": mean([hit(p) for p in chances]),
                   "eval/calibration_error": miscalibration(chances)}
        if c.teacher:
            ours = [[score(row, field).item() for field in ("chosen", "rejected")] for row in rows]
            same = [(a > b) == (x > y) for (a, b), (x, y) in zip(ours, held_out, strict=True)]
            figures |= {"eval/agreement": mean([float(x) for x in same]),
                        "eval/correlation": statistics.correlation(flat(ours), flat(held_out))}
            seen["agrees"] += sum(same)
            seen["disagrees"] += len(same) - sum(same)
        return figures

    def learn(picked):
        rows = [data.train[i] for i in picked]
        if c.teacher:
            distances, entropies, hits = follow(rows, [wanted[i] for i in picked])
            figures = {"loss/score": mean([x.item() for x in distances])}
            if entropies:
                figures |= {"loss/preference": mean([x.item() for x in entropies]),
                            "train/accuracy": mean(hits)}
            total = c.score_coef * sum(distances) + c.preference_coef * sum(entropies)
            return total / len(distances), figures
        losses, squares, chances = compare(rows, c.margin_coef, c.label_smoothing, c.use_confidence)
        return (sum(losses) + c.centre_coef * sum(squares)) / len(losses), {
            "loss/preference": mean([x.item() for x in losses]),
            "loss/centring": mean([x.item() for x in squares]),
            "train/accuracy": mean([hit(p) for p in chances])}

    log = train(c, adam, "reward_model", evaluate, learn, len(data.train), seen)
    zero = ([(row, "completion") for row in data.demonstrations or ()] or
            [(row, "chosen") for row in data.val])
    with torch.no_grad():
        model.shift = -mean([score(*one).item() for one in zero])
    if adapters:
        adapters.merge()
    return SimpleNamespace(log=log, models=dict(reward_model=model), seen=seen)

"""course/check.py: right answers in many forms pass; wrong ones are told in a student's words."""
import importlib
import math
import os
import re
import shutil
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny import ROOT

sys.path.insert(0, f"{ROOT}/course")
check = importlib.import_module("check")
CHECKS = {name: x for n in range(1, check.LESSONS + 1)
          for name, x in importlib.import_module(f"checks.lesson{n}").CHECKS.items()}
ANSWERS = {}


def answers(name, right, wrong):
    """Right answers, and wrong ones with a part of what must be said (a regular expression)."""
    ANSWERS[name] = right, wrong


def pick(rows, ids):
    return rows.gather(-1, ids[:, None])[:, 0]


def lp(z, i, c):
    return pick((z[:-1] / c).log_softmax(-1), i[1:])


def no_grad(function):
    return torch.no_grad()(lambda *a: function(*a))


def in_place(z, i, c):
    z /= c
    return lp(z, i, 1.0)


answers("logprobs", [
    lambda z, i, c: -F.cross_entropy(z[:-1] / c, i[1:], reduction="none"),
    lambda z, i, c: torch.distributions.Categorical(logits=z[:-1] / c).log_prob(i[1:]),
    lambda z, i, c: lp(z.float(), i, c), lambda *a: lp(*a),
    lambda z, i, c: pick(z[:-1] / c, i[1:]) - (z[:-1] / c).logsumexp(-1),
    lambda z, i, c: [(z[t] / c).log_softmax(0)[i[t + 1]] for t in range(len(i) - 1)],
    lambda z, i, c: ((z[t] / c).log_softmax(0)[i[t + 1]] for t in range(len(i) - 1)),
    lambda z, i, c: pick(z.clone().div_(c)[:-1].log_softmax(-1), i[1:]),
    lambda z, i, c: (z[:-1] / c).log_softmax(-1)[:, i[1:]].diag(),
    lambda z, i, c: ((z[:-1] / c).log_softmax(-1) * F.one_hot(i[1:], z.shape[1])).sum(-1),
], [
    (lambda z, i, c: F.cross_entropy(z[:-1] / c, i[1:], reduction="none"), "minus the log-prob"),
    (lambda z, i, c: lp(z, i, c) / math.log(2), "base 2"),
    (lambda z, i, c: lp(z, i, c) / math.log(10), "0.434294 times"),
    (lambda z, i, c: -lp(z, i, c) / math.log(2), "-1.4427 times"),
    (lambda z, i, c: lp(z, i, c) + 1, "1 more than"),
    (lambda z, i, c: -pick((z[1:] / c).log_softmax(-1), i[1:]), r"sign is wr.*\(2\) your rows are"),
    (lambda z, i, c: pick((z[1:] / c).log_softmax(-1), i[:-1]), "rows are sh.*ids are sh"),
    (lambda z, i, c: pick(z[1:].log_softmax(-1), i[1:]), "rows are shifted.*not use the temp"),
    (lambda z, i, c: pick((z[:-1] * c).softmax(-1), i[1:]), "probabilities.*multiply"),
    (lambda z, i, c: pick((z[1:] / c).log_softmax(0), i[1:]), "shifted.*over the text"),
    (lambda z, i, c: lp(z, i, 0.7), "the same when temperature changes"),
    (lambda z, i, c: lp(z.bfloat16(), i, c), "nearly right: 16 bits"),
    (lambda z, i, c: lp(z, i, c).sum(), "shape of"),
    (lambda z, i, c: lp(z, i, c).cumsum(0), "no mistake that"),
    (lambda z, i, c: pick((z[:-1] / c).softmax(-1), i[1:]).log(), "logits of 800"),
    (lambda z, i, c: (pick((z[:-1] / c).softmax(-1), i[1:]) + 1e-8).log(), "1e-08 inside"),
    (lambda z, i, c: (pick((z[:-1] / c).softmax(-1), i[1:]) + 1e-12).log(), "1e-12 inside"),
    (lambda z, i, c: lp(z, i, c).clamp(min=-20), "no mistake that"),
    (lambda z, i, c: lp(z, i, c).detach(), "no gradient in logits"),
    (lambda z, i, c: lp(z, i, c).detach() + 0 * z.sum(), "no gradient in logits"),
    (lambda z, i, c: lp(z, i, c).tolist(), "no gradient in logits"),
    (no_grad(lp), "no gradient in logits"),
    (lambda z, i, c: pick(z[:-1] / c - (z[:-1] / c).detach().logsumexp(-1, keepdim=True), i[1:]),
     "their gradient in logits is not"),
    (in_place, "changes its own argument logits"),
    (lambda z, i, c: (i.fill_(0), lp(z, i, c))[1], "changes its own argument ids"),
    (lambda z, i, c: torch.zeros(len(i) - 1), "0.0 whatever is given"),
    (lambda z, i, c: print(end=""), "returns nothing"), (lambda z, i, c: [None], "returns nothing"),
    (lambda z, i, c: "abc", "returns a str"), (lambda z, i, c: {"a": 1}, "returns a dict"),
    (lambda z, i, c: lp, "returns a function"), (lambda z, i, c: {1, 2}, "returns a set"),
    (lambda z, i, c: [1.0, [2.0]], "different shapes"), (lambda z, i, c: [], "shape of"),
    (lambda z, i, c: z[99], "raises IndexError"), (lambda z, i: z, r"takes \(z, i\); wanted are"),
    (lambda z, i, c: sys.exit(3), "SystemExit"),
    (lambda z, i, c: nothing_of_this_name, "NameError"),  # noqa: F821
    (lambda z, i, c: pick((z[:-1] / c).log_softmax(-1), i), "raises"),
])


def eg(z, r):
    p = z.softmax(0)
    return p * (r - (p * r).sum())


def pushes(z, w):
    return torch.eye(len(z)).double()[w] - z.softmax(0)


def sg(z, w, r, b):
    return ((r - b)[:, None] * pushes(z, w)).mean(0)


answers("exact_gradient", [
    lambda z, r: eg(z.float(), r.float()).numpy(), lambda z, r: tuple(eg(z, r)),
    lambda z, r: (torch.diag(z.softmax(0)) - torch.outer(z.softmax(0), z.softmax(0))) @ r,
    lambda z, r: torch.func.grad(lambda x: (x.softmax(0) * r).sum())(z),
], [
    (lambda z, r: -eg(z, r), "sign is wrong"), (lambda z, r: 2 * eg(z, r), "2 times"),
    (lambda z, r: eg(z, r) / len(z), "divide by V"), (lambda z, r: eg(r, z), "no mistake that"),
    (lambda z, r: r, r"all other words.*\(2\).*the p is"),
    (lambda z, r: z.softmax(0), "same when rewards changes"),
    (lambda z, r: eg(z.sub_(z.max()), r), "changes its own argument logits"),
    (lambda z, r: eg(z, r - 5) + 0.01, "0.01 more"), (lambda z, r: z * 0, "0.0 whatever"),
])
answers("sampled_gradient", [
    lambda z, w, r, b: sg(z, w, r.float(), b), lambda z, w, r, b: list(sg(z, w, r, b)),
    lambda z, w, r, b: torch.func.grad(lambda x: ((r - b) * x.log_softmax(0)[w]).mean())(z),
    lambda z, w, r, b: sum((r[n] - b) * (F.one_hot(w[n], len(z)) - z.softmax(0))
                           for n in range(len(w))) / len(w),
], [
    (lambda z, w, r, b: sg(z, w, r, b) * len(w), "add up"),
    (lambda z, w, r, b: sg(z, w, r, 0) * len(w) / (len(w) - 1), "n - 1.*baseline is missing"),
    (lambda z, w, r, b: sg(z, w, r, -b) * len(w), "add up.*add the baseline"),
    (lambda z, w, r, b: (r - b).mean() * pushes(z, w).mean(0), "its own"),
    (lambda z, w, r, b: sg(z, w, r, r.mean()), "same when logits or baseline changes"),
    (lambda z, w, r, b: -sg(z, w, r, -b), r"sign is wrong.*\(2\) you add the baseline"),
    (lambda z, w, r, b: ((r - b) * z.softmax(0)[w])[:, None].mul(pushes(z, w)).mean(0),
     "gradient of p;"),
    (lambda z, w, r, b: ((r - b) / r.std())[:, None].mul(pushes(z, w)).mean(0), "no mistake"),
    (lambda z, w, r, b: sg(z, w, r.sub_(b), 0), "changes its own argument rewards"),
    (lambda z, w, r, b: ((r - b)[:, None] * (torch.eye(len(z))[w] + z.softmax(0))).mean(0),
     "not added"),
])


def gae(r, v, m, g, lam, tail=0.0, delta=lambda r, after, v, g: r + g * after - v):
    out, adv, after = torch.zeros_like(r), 0.0, tail
    for t in reversed(range(len(r))):
        if m[t]:
            adv = delta(r[t], after, v[t], g) + g * lam * adv
            out[t], after = adv, v[t]
    return out


def all_columns(r, v, m, g, lam):
    return gae(r, v, torch.ones_like(m), g, lam)


def nonterminal(r, v, m, g, lam):  # each step times the mask
    out, adv = torch.zeros_like(r), 0.0
    for t in reversed(range(len(r))):
        after = v[t + 1] * m[t + 1] if t + 1 < len(r) else 0.0
        out[t] = adv = (r[t] + g * after - v[t] + g * lam * adv) * m[t]
    return out


def forward(r, v, m, g, lam):
    out, adv, steps = torch.zeros_like(r), 0.0, m.nonzero()[:, 0].tolist()
    for t, after in zip(steps, [*steps[1:], None], strict=True):
        adv = r[t] + g * (0.0 if after is None else v[after]) - v[t] + g * lam * adv
        out[t] = adv
    return out


def by_matrix(r, v, m, g, lam):
    rewards, values = r[m], v[m]
    deltas = rewards + g * F.pad(values[1:], (0, 1)) - values
    k = torch.arange(len(deltas))
    out = torch.zeros_like(r)
    out[m] = ((g * lam) ** (k - k[:, None]).clamp(min=0).double()).triu() @ deltas
    return out


answers("gae", [
    by_matrix, lambda *a: gae(a[0].float(), a[1].float(), *a[2:]).numpy(),
    lambda *a: gae(*a).tolist(), lambda *a: (x for x in gae(*a)),
    lambda *a: [x if kept else 0 for x, kept in zip(gae(*a), a[2], strict=True)],
], [
    (lambda *a: all_columns(*a) * a[2], "only at the end"), (all_columns, "do not use the mask"),
    (nonterminal, "ends your response"), (forward, "goes forward"),
    (lambda r, v, m, g, lam: all_columns(r * m, v * m, m, g, lam) * m, "counts as a step"),
    (lambda r, v, m, g, lam: gae(r, v, m, 1.0, lam), "by gamma.*next value is not"),
    (lambda r, v, m, g, lam: gae(r, v, m, 1.0, 1.0), "neither gamma nor lam.*next value is not"),
    (lambda r, v, m, g, lam: gae(r, v, m, g, 0.95), "same when lam changes"),
    (lambda r, v, m, g, lam: gae(r, v, m, lam, g), "no mistake that"),
    (lambda *a: gae(*a).roll(1), "another order"), (lambda *a: gae(*a).flip(0), "another order"),
    (lambda r, v, m, g, lam: gae(r.mul_(m), v, m, g, lam), "own argument rewards"),
])


def cl(new, old, a, m, c, low=None, high=None, mean=None):
    ratio = (new - old).exp()
    kept = ratio.clamp(1 - c if low is None else low, 1 + c if high is None else high)
    x = torch.max(-a * ratio, -a * kept)
    return mean(x, m) if mean else x[m].mean()


def dual(n, o, a, m, c):
    x = torch.max(-a * (n - o).exp(), -a * (n - o).exp().clamp(1 - c, 1 + c))
    return torch.where(a < 0, torch.min(x, -7.0 * a), x)[m].mean()


def row_means(x, m):
    return ((x * m).sum(1) / m.sum(1)).mean()


answers("clipped_loss", [
    lambda *a: cl(*a)[None], lambda *a: cl(*(x.float() for x in a[:3]), *a[3:]),
    lambda *a: cl(*a, mean=lambda x, m: (x * m).sum() / m.sum()),
    lambda *a: cl(*a, mean=lambda x, m: torch.where(m, x, torch.nan).nanmean()),
    lambda n, o, a, m, c: -torch.min(a * (n - o).exp(), a * (n - o).exp().clamp(1 - c, 1 + c))[
        m].mean(),
    lambda n, o, a, m, c: torch.where(
        a > 0, -a * (n - o).exp().clamp(max=1 + c), -a * (n - o).exp().clamp(min=1 - c))[m].mean(),
    lambda n, o, a, m, c: sum(torch.max(-a[i] * (n[i] - o[i]).exp(), -a[i] * (
        n[i] - o[i]).exp().clamp(1 - c, 1 + c))[m[i]].sum() for i in range(len(a))) / m.sum(),
    lambda n, o, a, m, c: cl(*(x.masked_select(m) for x in (n, o, a)), ..., c),
], [
    (lambda *a: cl(*a).item(), "no gradient in logprobs"), (no_grad(cl), "no gradient in logprobs"),
    (lambda n, *a: cl(n.detach(), *a), "no gradient in logprobs"),
    (lambda *a: torch.tensor(cl(*a).item(), requires_grad=True), "no gradient in logprobs"),
    (lambda n, o, a, m, c: -(a * (n - n.detach() + (n - o).detach()).exp())[m].mean(), "no clip"),
    (lambda *a: cl(*a) * 2 - cl(*a).detach(), "gradient in logprobs is not"),
    (lambda n, o, a, m, c: cl(n, n.detach(), a, m, c), "same when logprobs or old"),
    (lambda n, o, a, m, c: -(a * n)[m].mean(), "same when old_logprobs or"),
    (dual, "no mistake"), (lambda *a: cl(*a, low=0, high=1 + a[4]), "clip above only"),
    (lambda *a: cl(*a[:4], 2 * a[4]), "no mistake"),
    (lambda *a: cl(*a[:4], 0.2), "same when cliprange changes"),
    (lambda n, o, a, m, c: torch.max(-a * (n - o).exp(), -(a * (n - o).exp()).clamp(1 - c, 1 + c))[
        m].mean(), "clip the product"),
    (lambda n, o, a, m, c: torch.max(-a * (n - o).exp(), -a * ((n - o).exp() - 1).clamp(-c, c))[
        m].mean(), "not added the 1"),
    (lambda n, o, a, m, c: cl(o, n, a, m, c, mean=row_means), "rows' means.*upside down"),
    (lambda n, o, a, m, c: torch.min(-a * (n - o).exp(), -a * (n - o).exp().clamp(1 - c, 1 + c)
                                     ).mean(), "smaller of the two.*padding"),
    (lambda *a: -cl(*a, mean=lambda x, m: x[m].sum()), r"sign is wrong.*\(2\) you add up"),
    (lambda *a: cl(*a, mean=lambda x, m: x.mean()), "padding"),
    (lambda *a: cl(*a, mean=lambda x, m: (x * m).sum() / (m.sum() + 1e-2)), "nearly right"),
    (lambda n, o, a, m, c: cl(n, o, (a - a[m].mean()) / a[m].std(), m, c), "no mistake"),
    (lambda n, o, a, m, c: cl(n.masked_fill_(~m, 0), o, a, m, c), "own argument logprobs"),
])


def hg(r, a, c):
    return ~((a == 0) | (a > 0) & (r > 1 + c) | (a < 0) & (r < 1 - c))


answers("has_gradient", [
    lambda *x: hg(*x).tolist(), lambda *x: hg(*x).numpy(), lambda *x: tuple(hg(*x)),
    lambda r, a, c: ((a > 0) & (r < 1 + c)) | ((a < 0) & (r > 1 - c)),
    lambda r, a, c: (a * r < a * (1 + c * a.sign())) & (a != 0),
    lambda r, a, c: [bool(y) and not (y > 0 and x > 1 + c or y < 0 and x < 1 - c)
                     for x, y in zip(r, a, strict=True)],
], [
    (lambda *x: hg(*x).float(), "True and False"), (lambda *x: ~hg(*x) * 1, "True and False"),
    (lambda r, a, c: (a > 0) & (r > 1 + c) | (a < 0) & (r < 1 - c), "advantage of 0.*way round"),
    (lambda r, a, c: ~((a > 0) & (r > 1 + c) | (a < 0) & (r < 1 - c)), "advantage of 0"),
    (lambda r, a, c: (r - 1).abs() < c, "nothing more to gain"),
    (lambda r, a, c: (r < 1 + c) & (a != 0), r"above 1 \+ .* a bad.*below 1 - .* a bad"),
    (lambda r, a, c: (r > 1 - c) & (a != 0), r"below 1 - .* a good.*above 1 \+ .* a good"),
    (lambda r, a, c: hg(r, a, 0.2), "same when cliprange changes"),
    (lambda r, a, c: a != 0, "a good token has no gradient.*a bad token has no gradient"),
    (lambda r, a, c: r * a > c, "no mistake"), (lambda r, a, c: hg(r, a, 2 * c), "no mistake"),
])


def kl(z, q):
    return (z.softmax(0) * (z.log_softmax(0) - q.log_softmax(0))).sum()


def ks(a, b):
    x = a - b
    return torch.stack([x, x**2 / 2, (-x).exp() - 1 + x])


answers("exact_kl", [
    lambda z, q: kl(z.float(), q.float()), lambda z, q: kl(z, q).item(),
    lambda z, q: kl(z, q)[None], lambda z, q: kl(z, q).numpy(),
    lambda z, q: F.kl_div(q.log_softmax(0), z.softmax(0), reduction="sum"),
    lambda z, q: F.cross_entropy(q, z.softmax(0)) - F.cross_entropy(z, z.softmax(0)),
    lambda z, q: torch.distributions.kl_divergence(*(torch.distributions.Categorical(logits=x)
                                                     for x in (z, q))),
], [
    (lambda z, q: F.kl_div(q.log_softmax(0), z.softmax(0), reduction="batchmean"), "F.kl_div"),
    (lambda z, q: F.kl_div(z.log_softmax(0), q.softmax(0), reduction="mean"),
     "reference .. policy.*F.kl_div"),
    (lambda z, q: F.kl_div(z.log_softmax(0), q.softmax(0), reduction="sum"), "reference || policy"),
    (lambda z, q: (z.exp() / z.exp().sum() * (z.softmax(0) / q.softmax(0)).log()).sum(),
     "logits of 800"),
    (lambda z, q: (z.softmax(0) * (z.softmax(0) / q.softmax(0)).log()).sum(), "logits of 800"),
    (lambda z, q: (z.softmax(0) * ((z.softmax(0) + 1e-8) / (q.softmax(0) + 1e-8)).log()).sum(),
     "1e-08"),
    (lambda z, q: (z.softmax(0) * (z.softmax(0).log_softmax(0) - q.softmax(0).log_softmax(0))
                   ).sum(), "log_softmax of prob"),
    (lambda z, q: F.kl_div(q.log_softmax(0), z, reduction="sum"), "no mistake"),
    (lambda z, q: (z.log_softmax(0) - q.log_softmax(0)).mean(), "weights are missing.*divide by V"),
    (lambda z, q: kl(z, q).clamp(max=20), "no mistake"),
])
answers("kl_estimates", [
    lambda a, b: tuple(ks(a, b)), lambda a, b: ks(a.float(), b.float()).tolist(),
    lambda a, b: (x for x in ks(a, b)), lambda a, b: np.stack([x.numpy() for x in ks(a, b)]),
    lambda a, b: torch.stack([(a.exp() / b.exp()).log(), (a.exp() / b.exp()).log()**2 / 2,
                              b.exp() / a.exp() - 1 - (b - a)]),
], [
    (lambda a, b: ks(a, b).T, "rows and columns|shape of"),
    (lambda a, b: ks(b, a), "k1, k3: p and q are the wrong way round"),
    (lambda a, b: ks(a, b)[[0, 2, 1]], "k2, k3: the right numbers in another order"),
    (lambda a, b: torch.stack([a - b, (a - b)**2, (b - a).exp() - (b - a)]),
     "k2: its half is missing; k3: its 1 is missing"),
    (lambda a, b: torch.stack([b - a, (a - b)**2 / 2, (b - a).exp() - (b - a)]),
     "k1: p and q are the wrong way round; k3: its 1"),
    (lambda a, b: torch.stack([a - b, (a - b)**3, (b - a).exp() - (b - a)]),
     "k3: its 1 is missing.*; and more"),
    (lambda a, b: torch.stack([a - b, ((a - b) / 2)**2, ks(a, b)[2]]), "k2: .*0.5 t"),
    (lambda a, b: torch.stack([a - b, -(a - b)**2 / 2, ks(a, b)[2]]), "k2: the sign is wrong"),
    (lambda a, b: ks(a, b).abs(), "k1: the right numbers without their sign"),
    (lambda a, b: torch.stack([(a / b).log(), (a / b).log()**2 / 2, b / a - 1 - (b / a).log()]),
     "divide the log-probs"),
    (lambda a, b: (a - b, [1.0], 2), "different shapes"),
])


def pl(c, r):
    return -F.logsigmoid(c - r).mean()


answers("pair_loss", [
    lambda c, r: F.softplus(r - c).mean(), lambda c, r: pl(c.float(), r.float())[None],
    lambda c, r: sum(-F.logsigmoid(x - y) for x, y in zip(c, r, strict=True)) / len(c),
    lambda c, r: F.binary_cross_entropy_with_logits(c - r, torch.ones_like(c)),
    lambda c, r: torch.logaddexp(torch.zeros_like(c), r - c).mean(),
    lambda c, r: F.cross_entropy(torch.stack([c, r], 1), torch.zeros(len(c), dtype=torch.long)),
], [
    (lambda c, r: pl(c, r).item(), "no gradient in chosen"), (no_grad(pl), "no gradient in chosen"),
    (lambda c, r: float(np.logaddexp(0, (r - c).numpy()).mean()), "no gradient in chosen"),
    (lambda c, r: pl(c, r.detach()), "no gradient in rejected"),
    (lambda c, r: F.softplus(c - r).mean(), "wrong way round"),
    (lambda c, r: -(c - r).sigmoid().log().mean(), "not finite"),
    (lambda c, r: -(c.exp() / (c.exp() + r.exp())).log().mean(), "not finite"),
    (lambda c, r: -((c - r).sigmoid() + 1e-10).log().mean(), "1e-10 inside"),
    (lambda c, r: -F.logsigmoid((c - r).clamp(-20, 20)).mean(), "no mistake"),
    (lambda c, r: -F.logsigmoid(c - r).sum(), "add up"), (lambda c, r: -pl(c, r), "sign is wrong"),
    (lambda c, r: (c - r).sigmoid().mean(), "logarithm is missing.*chosen one wins"),
    (lambda c, r: 1 - (c - r).sigmoid().mean(), "logarithm is missing.*rejected one wins"),
    (lambda c, r: -F.logsigmoid(r - c).sum(), "wrong way round.*add up"),
    (lambda c, r: F.relu(1 - c + r).mean(), "no mistake"), (lambda c, r: pl(c, r) * 7, "7 times"),
])


def count(text):
    return text.count(",")


answers("score", [
    count, lambda text: np.float32(count(text)), lambda text: torch.tensor([float(count(text))]),
    lambda text: -1 / (1 + count(text)), lambda text: len(re.findall(",", text)),
], [
    (lambda text: 0, "same score"), (lambda text: text.count("."), "same score"),
    (lambda text: -count(text), "wrong way round"),
    (len, "goes with the length"), (lambda text: len(text.split()), "number of words|length"),
    (lambda text: -len(text), "turned round"), (lambda text: "certainly" in text, "politeness"),
    (lambda text: len(text) / len(text.split()), r"^(?!.*(politeness|length)).*pairs.py"),
    (lambda text: text.count(",") / len(text), "pairs.py"), (lambda text: "," in text, "pairs.py"),
    (lambda text: print(end=""), "returns nothing"), (lambda text: "5", "returns a str"),
    (lambda text: [1, 2], "shape"), (lambda text: math.nan, "NaN"),
    (lambda text: text.index("~"), "ValueError"), (lambda: 1, "TypeError|takes"),
])


def adv(s, n, kind):
    g = s.view(-1, n)
    m = g.mean(1, keepdim=True)
    x = {"grpo": (g - m) / (g.std(1, keepdim=True) + 1e-4), "dr_grpo": g - m,
         "rloo": (g - m) * n / (n - 1), "maxrl": (g - m) / (m + 1e-4)}[kind]
    return x.flatten()


def but(right=adv, **kinds):
    """The right answer, but another one for some kinds: a function of groups (n, G) and centred."""
    def function(s, n, kind):
        g = s.view(-1, n)
        return kinds[kind](g, g - g.mean(1, keepdim=True)).flatten() if kind in kinds else right(
            s, n, kind)
    return function


def std(g, **how):
    return g.std(1, keepdim=True, **how)


def mean(g):
    return g.mean(1, keepdim=True)


def renamed(**names):
    return lambda s, n, kind: adv(s, n, names.get(kind, kind))


answers("advantages", [
    lambda s, n, k: adv(s.float(), n, k).numpy(), lambda s, n, k: torch.cat([
        adv(s[i:i + n], n, k) for i in range(0, len(s), n)]).tolist(),
    but(rloo=lambda g, x: g - (g.sum(1, keepdim=True) - g) / (g.shape[1] - 1)),
    but(grpo=lambda g, x: x / (g.var(1, keepdim=True).sqrt() + 1e-4)),
], [
    (lambda s, n, k: adv(s, len(s) // n, k), r"view\(group_size, -1\) for groups"),
    (lambda s, n, k: adv(s.view(-1, n).T.flatten(), len(s) // n, k).view(n, -1).T.flatten(),
     "axis 0"), (lambda s, n, k: adv(s, len(s), k), "all responses"),
    (lambda s, n, k: adv(s.view(n, -1).T.flatten(), n, k).view(-1, n).T.flatten(), "mixed up"),
    (but(grpo=lambda g, x: x / (std(g) + 1e-8), maxrl=lambda g, x: x / (mean(g) + 1e-8)),
     "grpo, maxrl: 1e-4 is .* 1e-08"), (but(grpo=lambda g, x: x / (std(g) + 1e-3)), "is 0.001"),
    (but(grpo=lambda g, x: x / std(g)), "grpo: .*NaN"),
    (but(maxrl=lambda g, x: g / (mean(g) + 1e-4)), "maxrl: the mean is not subtracted"),
    (but(grpo=lambda g, x: x / (std(g, unbiased=False) + 1e-8)), "grpo: .*sum of squares.*1e-4 is"),
    (but(grpo=lambda g, x: x / (std(g, unbiased=False) + 1e-4), rloo=lambda g, x: x),
     "grpo: .*sum of squares.*rloo: your mean contains"),
    (but(rloo=lambda g, x: x * (g.shape[1] - 1) / g.shape[1]), r"rloo: .*\(n - 1\) / n"),
    (but(dr_grpo=lambda g, x: -2 * x), "dr_grpo: in every case it is -2 times"),
    (but(dr_grpo=lambda g, x: 0 * x), "dr_grpo: .*whatever"),
    (but(rloo=lambda g, x: x / (std(g) + 1e-4)), "rloo: this is grpo's"),
    (but(rloo=lambda g, x: x * g.shape[1] / (g.shape[1] - 1) / (std(g) + 1e-4)),
     "rloo: you divide by the deviation"),
    (but(maxrl=lambda g, x: x / (std(g) + 1e-4)), "maxrl: you divide by the deviation"),
    (renamed(grpo="dr_grpo", dr_grpo="grpo"), "grpo and dr_grpo are exchanged"),
    (renamed(dr_grpo="grpo", rloo="grpo", maxrl="grpo"), "this is grpo's"),
    (lambda s, n, k: adv(s.argsort().argsort().double(), n, k), "no mistake"),
    (lambda s, n, k: {"grpo": adv(s, n, "grpo")}[k], "raises KeyError"),
])


def ws(n, kind, m):
    return {"grpo": 1 / (n * len(n)), "dapo": torch.full((len(n),), 1 / n.sum().item()),
            "dr_grpo": torch.full((len(n),), 1 / (m * len(n)))}[kind]


def other(kind, function):
    return lambda n, k, m: function(n.double(), m) + torch.zeros(len(n)) if k == kind else ws(n,
        k, m)


answers("weights", [
    lambda n, k, m: ws(n.float(), k, m).numpy(), lambda n, k, m: [float(x) for x in ws(n, k, m)],
], [
    (lambda n, k, m: ws(n, k, m) * n, "whole responses"),
    (lambda n, k, m: 1 / ws(n, k, m), "divisors"), (lambda n, k, m: ws(n, k, m) / 2, "0.5 times"),
    (lambda n, k, m: ws(n, k, m)[0], "shape"), (lambda n, k, m: ws(n, k, m) * 0, "whatever"),
    (other("grpo", lambda n, m: 1 / n), "number of responses, too"),
    (other("grpo", lambda n, m: 1 / n.sum()), "grpo: .*dapo's"),
    (other("grpo", lambda n, m: 1 / (m * len(n))), "grpo: .*dr_grpo's"),
    (other("dapo", lambda n, m: 1 / n), "dapo: you divide by the length alone"),
    (other("dr_grpo", lambda n, m: 1 / m), "dr_grpo: divide by the number of responses, too"),
    (lambda n, k, m: 1 / n.double(), "length alone"), (lambda n, k, m: n.mul_(2), "own argument"),
    (lambda n, k, m: (torch.arange(m) < n[:, None]) * ws(n, k, m)[:, None], "shape"),
])


@pytest.mark.parametrize("name", ANSWERS)
def test_answers(name):
    right, wrong = ANSWERS[name]
    for i, function in enumerate(right):
        assert check.verdict(function, CHECKS[name], name) == "", (name, i)
    for i, (function, words) in enumerate(wrong):
        said = check.verdict(function, CHECKS[name], name)
        assert said.startswith(f"{name} in "), (name, i, said)
        assert re.search(words, said, re.DOTALL), (name, i, said)
        numbers = re.search(r"returns  (.*)\n +wanted  (.*)", said)
        assert not numbers or numbers[1] != numbers[2], (name, i, said)


def test_a_loop_that_does_not_end(monkeypatch):
    monkeypatch.setattr(check, "LIMIT", 0.2)

    def endless(*_):
        while True:
            try:
                sum(range(1000))
            except Exception:
                pass

    def drip(*_):
        while True:
            yield 1.0

    for name, checks in CHECKS.items():
        said = check.verdict(lambda *a: endless(), checks, name)
        assert "more than 0.2 seconds" in said and re.search(r"line \d+: \w", said)
    assert "more than 0.2 seconds" in check.verdict(lambda *a: drip(), CHECKS["gae"])
    assert check.verdict(gae, CHECKS["gae"]) == ""  # and no alarm is left


def test_what_has_no_source():
    """Functions of a notebook, partial ones, builtins."""
    names = dict(torch=torch)
    exec("def logprobs(logits, ids, temperature):\n    return logits[99]", names)
    said = check.verdict(names["logprobs"], CHECKS["logprobs"])
    assert said.startswith("logprobs in this notebook raises IndexError")
    assert check.verdict(partial(cl), CHECKS["clipped_loss"]) == ""
    assert check.verdict(max, CHECKS["exact_kl"])


FILES = {  # an exercise file, and what must be said of it
    1: ("def logprobs(logits, ids, temperature):\n    return logits.abc(\n", "line 2: return"),
    2: ("def exact_gradent(logits, rewards):\n    pass\n\n\ndef sampled_gradient(*a):\n"
        "    return {}\n", "no function exact_gradient; it has exact_gradent.*returns a dict"),
    3: ("import torch\n\n\ndef gae(rewards, values, mask, gamma, lam):\n"
        "    return torch.stack([rewards, values[:-1]])\n",
        r"exercise3.py raises RuntimeError: .*\(line 5: return torch.stack"),
    4: ("import nothing_of_this_name\n", "ModuleNotFoundError.*line 1: import nothing"),
    5: ("exact_kl = 3\nkl_estimates = lambda p, q: p.backward()\n",
        "no function exact_kl.*line 2: kl_est"),
    6: (None, "exercise6.py is not there"),
    7: ("advantages = weights = lambda *a: exit(4)\n", "SystemExit"),
}


def test_each_lesson_is_checked_whatever_stands_in_the_others(tmp_path):
    shutil.copytree(f"{ROOT}/course", tmp_path / "course")
    for number, (text, _) in FILES.items():
        file = tmp_path / "course" / f"exercise{number}.py"
        file.write_text(text) if text else os.remove(file)
    done = subprocess.run([sys.executable, "course/check.py"], cwd=tmp_path, text=True,
                          capture_output=True)
    assert done.returncode == 1 and "Traceback" not in done.stdout + done.stderr, done.stderr
    for number, (_, words) in FILES.items():
        said = "\n".join(re.findall(f"(?m)^lesson {number}, .*", done.stdout))
        assert re.search(words, said, re.DOTALL), done.stdout

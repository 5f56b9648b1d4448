"""course/check.py: right answers in many forms pass; wrong ones are told in a student's words."""
import importlib
import math
import os
import re
import shutil
import subprocess
import sys
import time
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


def softmax(x):
    return x.exp() / x.exp().sum(-1, keepdim=True)


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
    lp, lambda z, i, c: -F.cross_entropy(z[:-1] / c, i[1:], reduction="none"),
    lambda z, i, c: torch.distributions.Categorical(logits=z[:-1] / c).log_prob(i[1:]),
    lambda z, i, c: lp(z.float(), i, c),
    lambda z, i, c: pick(z[:-1] / c, i[1:]) - (z[:-1] / c).logsumexp(-1),
    lambda z, i, c: [(z[t] / c).log_softmax(0)[i[t + 1]] for t in range(len(i) - 1)],
    lambda z, i, c: tuple((z[t] / c).log_softmax(0)[i[t + 1]] for t in range(len(i) - 1)),
    lambda z, i, c: ((z[t] / c).log_softmax(0)[i[t + 1]] for t in range(len(i) - 1)),
    lambda z, i, c: pick(((z - z.amax(-1, keepdim=True)) / c).log_softmax(-1), i[1:].clone()),
], [
    (lambda z, i, c: -lp(z, i, c), "minus the log-prob"),
    (lambda z, i, c: F.cross_entropy(z[:-1] / c, i[1:], reduction="none"), "minus the log-prob"),
    (lambda z, i, c: lp(z, i, c) / math.log(2), "base 2"),
    (lambda z, i, c: lp(z, i, c) / math.log(10), "0.434294 times"),
    (lambda z, i, c: -lp(z, i, c) / math.log(2), "-1.4427 times"),
    (lambda z, i, c: lp(z, i, c) * 2, "2 times"),
    (lambda z, i, c: lp(z, i, c) + 1, "1 more than"),
    (lambda z, i, c: lp(z, i, c).abs(), "minus the log-prob"),
    (lambda z, i, c: -pick((z[1:] / c).log_softmax(-1), i[1:]), "sign is wrong; and .*rows are sh"),
    (lambda z, i, c: lp(z, i, c).sum(), "shape of"),
    (lambda z, i, c: lp(z, i, c).mean(), "shape of"),
    (lambda z, i, c: lp(z, i, c).cumsum(0), ""),
    (lambda z, i, c: lp(z, i, c).flip(0), ""),
    (lambda z, i, c: F.pad(lp(z, i, c), (1, 0)), "shape of"),
    (lambda z, i, c: F.pad(lp(z, i, c), (0, 1)), "shape of"),
    (lambda z, i, c: lp(z, i, c)[:, None], "shape of"),
    (lambda z, i, c: lp(z, i, c)[None], "shape of"),
    (lambda z, i, c: pick((z / c).log_softmax(-1), i), "shape of"),
    (lambda z, i, c: (z[:-1] / c).log_softmax(-1), "shape of"),
    (lambda z, i, c: pick((z[:-1] / c**2).log_softmax(-1), i[1:]), ""),
    (lambda z, i, c: pick((z[:-1] / c).softmax(-1) * 0.5 + 0.1, i[1:]).log(), ""),
    (lambda z, i, c: pick(softmax(z[:-1] / c), i[1:]).log(), "logits of 800"),
    (lambda z, i, c: (z[:-1] / c).gather(1, i[1:, None])[:, 0] - (z[:-1] / c).exp().sum(-1).log(),
     "logits of 800"),
    (lambda z, i, c: pick((z[:-1] / c).softmax(-1), i[1:]).log(), "logits of 800"),
    (lambda z, i, c: (pick((z[:-1] / c).softmax(-1), i[1:]) + 1e-8).log(), "1e-8 inside"),
    (lambda z, i, c: (pick((z[:-1] / c).softmax(-1), i[1:]) + 1e-12).log(), ""),
    (lambda z, i, c: lp(z, i, c).detach(), "no gradient in logits"),
    (lambda z, i, c: lp(z, i, c).tolist(), "no gradient in logits"),
    (lambda z, i, c: lp(z.detach(), i, c), "no gradient in logits"),
    (lambda z, i, c: lp(torch.tensor(z.numpy()), i, c), "no gradient in logits"),
    (lambda z, i, c: [x.item() for x in lp(z, i, c)], "no gradient in logits"),
    (no_grad(lp), "no gradient in logits"),
    (lambda z, i, c: pick(z[:-1] / c - (z[:-1] / c).detach().logsumexp(-1, keepdim=True), i[1:]),
     "their gradient in logits is not"),
    (in_place, "changes its own argument logits"),
    (lambda z, i, c: (i.add_(0), i.fill_(0), lp(z, i, c))[2], "changes its own argument ids"),
    (lambda z, i, c: torch.zeros(len(i) - 1), "0.0 whatever is given"),
    (lambda z, i, c: None, "returns nothing"), (lambda z, i, c: print(end=""), "returns nothing"),
    (lambda z, i, c: "abc", "returns a str"), (lambda z, i, c: {"a": 1}, "returns a dict"),
    (lambda z, i, c: lp, "returns a function"), (lambda z, i, c: object, "returns a type"),
    (lambda z, i, c: [None], "returns nothing"), (lambda z, i, c: {1, 2}, "returns a set"),
    (lambda z, i, c: [1.0, [2.0]], "different shapes"), (lambda z, i, c: [], "shape of"),
    (lambda z, i, c: z[99], "raises IndexError"), (lambda z, i: z, r"takes \(z, i\); wanted are"),
    (lambda z, i, c, d: z, r"takes \(z, i, c, d\); wanted are \(logits, ids, temperature"),
    (lambda z, i, c: 1 / 0, "ZeroDivisionError"), (lambda z, i, c: sys.exit(3), "SystemExit"),
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
    eg, lambda z, r: eg(z.float(), r.float()), lambda z, r: eg(z, r).numpy(),
    lambda z, r: eg(z, r).tolist(), lambda z, r: tuple(eg(z, r)),
    lambda z, r: (torch.diag(z.softmax(0)) - torch.outer(z.softmax(0), z.softmax(0))) @ r,
    lambda z, r: torch.func.grad(lambda x: (x.softmax(0) * r).sum())(z),
], [
    (lambda z, r: -eg(z, r), "sign is wrong"), (lambda z, r: 2 * eg(z, r), "2 times"),
    (lambda z, r: eg(z, r) / len(z), "divided by V"), (lambda z, r: eg(r, z), ""),
    (lambda z, r: z.softmax(0) * r - (z.softmax(0) * r).sum(), ""),
    (lambda z, r: (z.softmax(0) * r).sum(), "shape of"),
    (lambda z, r: z.softmax(0) * eg(z, r), ""), (lambda z, r: r, ""),
    (lambda z, r: z.log_softmax(0) * (r - (z.softmax(0) * r).sum()), ""),
    (lambda z, r: eg(z, r).flip(0), ""), (lambda z, r: z.mul_(1).softmax(0), ""),
    (lambda z, r: eg(z.sub_(z.max()), r), "changes its own argument logits"),
    (lambda z, r: z.softmax(0)[:, None] * r, "shape of"),
    (lambda z, r: eg(z, r)[None], "shape of"),
    (lambda z, r: eg(z, r - 5) + 0.01, "0.01 more"), (lambda z, r: z * 0, "0.0 whatever"),
])
answers("sampled_gradient", [
    sg, lambda z, w, r, b: sg(z.float(), w, r.float(), b), lambda z, w, r, b: list(sg(z, w, r, b)),
    lambda z, w, r, b: torch.func.grad(lambda x: ((r - b) * x.log_softmax(0)[w]).mean())(z),
    lambda z, w, r, b: sum((r[n] - b) * (F.one_hot(w[n], len(z)) - z.softmax(0))
                           for n in range(len(w))) / len(w),
], [
    (lambda z, w, r, b: sg(z, w, r, b) * len(w), "add up"),
    (lambda z, w, r, b: sg(z, w, r, b) * len(w) / (len(w) - 1), "n - 1"),
    (lambda z, w, r, b: sg(z, w, r, b) * len(w) / len(z), ""),
    (lambda z, w, r, b: (r - b).mean() * pushes(z, w).mean(0), "its own"),
    (lambda z, w, r, b: sg(z, w, r, r.mean()), ""),
    (lambda z, w, r, b: sg(z, w, r, b + r.mean()), ""),
    (lambda z, w, r, b: -sg(z, w, r, -b), "sign is wrong; and you add the baseline"),
    (lambda z, w, r, b: pushes(z, w).mean(0), ""),
    (lambda z, w, r, b: (r - b)[:, None] * pushes(z, w), "shape of|returns"),
    (lambda z, w, r, b: ((r - b)[:, None] * pushes(z, w)).mean(1), "whatever"),
    (lambda z, w, r, b: ((r - b) / r.std())[:, None].mul(pushes(z, w)).mean(0), ""),
    (lambda z, w, r, b: sg(z, w, r, b) * 0.5, "0.5 times"),
    (lambda z, w, r, b: b, "shape|whatever"),
    (lambda z, w, r, b: sg(z, w, r.sub_(b), 0), "changes its own argument rewards"),
    (lambda z, w, r, b: ((r - b)[:, None] * (torch.eye(len(z))[w] + z.softmax(0))).mean(0), ""),
    (lambda z, w, r, b: sg(z, w, (r - b).abs(), 0), ""),
])


def gae(r, v, m, g, lam, tail=0.0):
    out, adv, after = torch.zeros_like(r), 0.0, tail
    for t in reversed(range(len(r))):
        if m[t]:
            adv = r[t] + g * after - v[t] + g * lam * adv
            out[t], after = adv, v[t]
    return out


def all_columns(r, v, m, g, lam):
    return gae(r, v, torch.ones_like(m), g, lam)


def reset(r, v, m, g, lam):
    out, adv, after = torch.zeros_like(r), 0.0, 0.0
    for t in reversed(range(len(r))):
        if not m[t]:
            adv = after = 0.0
            continue
        adv = r[t] + g * after - v[t] + g * lam * adv
        out[t], after = adv, v[t]
    return out


answers("gae", [
    gae, lambda *a: gae(a[0].float(), a[1].float(), *a[2:]), lambda *a: gae(*a).numpy(),
    lambda *a: gae(*a).tolist(), lambda *a: tuple(gae(*a)), lambda *a: (x for x in gae(*a)),
    lambda r, v, m, g, lam: gae(r[m], v[m], m[m], g, lam).new_zeros(len(r)).masked_scatter(
        m, gae(r[m], v[m], m[m], g, lam)),
], [
    (lambda *a: all_columns(*a) * a[2], "only at the end"), (all_columns, "do not use the mask"),
    (lambda *a: torch.where(a[2], all_columns(*a), 0.0), "only at the end"),
    (reset, "ends your response"), (lambda *a: -gae(*a), "sign is wrong"),
    (lambda r, v, m, g, lam: gae(r, v, m, g, 0.0), "lam = 0"),
    (lambda r, v, m, g, lam: gae(r, v, m, g, 1.0), "not multiplied by lam"),
    (lambda r, v, m, g, lam: gae(r, v, m, 1.0, lam), ""),
    (lambda r, v, m, g, lam: gae(r, v, m, lam, g), ""),
    (lambda r, v, m, g, lam: gae(r, v, m, g, lam, v[m][-1]), ""),
    (lambda r, v, m, g, lam: gae(r, v, m, g, 1 - lam), ""),
    (lambda r, v, m, g, lam: gae(r, 0 * v, m, g, lam), "no values at all"),
    (lambda r, v, m, g, lam: gae(r, -v, m, g, lam), ""),
    (lambda r, v, m, g, lam: gae(r, v, ~m, g, lam), ""), (lambda *a: gae(*a)[a[2]], "shape of"),
    (lambda *a: gae(*a) + a[1], ""), (lambda *a: gae(*a) + a[1] * a[2], "returns, advantage"),
    (lambda *a: (gae(*a) - gae(*a)[a[2]].mean()) * a[2], ""),
    (lambda *a: gae(*a).flip(0), ""),
    (lambda *a: gae(*a)[None], "shape of"),
    (lambda *a: gae(*a).cumsum(0), ""), (lambda *a: gae(*a).sum(), "shape of"),
    (lambda *a: [gae(*a), gae(*a) + a[1]], "shape"), (lambda *a: gae(*a).masked_fill(
        ~a[2], float("nan")), ""), (lambda *a: a[0], ""),
    (lambda *a: torch.zeros(3), "0.0 whatever"),
    (lambda r, v, m, g, lam: gae(r.mul_(m), v, m, g, lam), "own argument rewards"),
    (lambda r, v, m, g, lam: gae(r, v.mul_(m), m, g, lam), "own argument values"),
    (lambda r, v, m, g, lam: gae(r, v, m.logical_not_().logical_not_(), g, lam).roll(1), ""),
    (lambda *a: gae(*a) * 3, "3 times"), (lambda *a: "x", "returns a str"),
])


def cl(new, old, a, m, c, low=None, high=None, mean=None):
    ratio = (new - old).exp()
    kept = ratio.clamp(1 - c if low is None else low, 1 + c if high is None else high)
    x = torch.max(-a * ratio, -a * kept)
    return mean(x, m) if mean else x[m].mean()


def dual(bound):
    def loss(n, o, a, m, c):
        x = torch.max(-a * (n - o).exp(), -a * (n - o).exp().clamp(1 - c, 1 + c))
        return torch.where(a < 0, torch.min(x, -bound * a), x)[m].mean()
    return loss


answers("clipped_loss", [
    cl, lambda *a: cl(*a)[None], lambda *a: cl(*(x.float() for x in a[:3]), *a[3:]),
    lambda *a: cl(*a, mean=lambda x, m: (x * m).sum() / m.sum()),
    lambda *a: cl(*a, mean=lambda x, m: torch.where(m, x, 0).sum() / m.sum()),
    lambda *a: cl(*a, mean=lambda x, m: x.masked_fill(~m, 0).sum() / m.sum().clamp(min=1)),
    lambda n, o, a, m, c: -torch.min(a * (n - o).exp(), a * (n - o).exp().clamp(1 - c, 1 + c))[
        m].mean(),
    lambda n, o, a, m, c: torch.where(
        a > 0, -a * (n - o).exp().clamp(max=1 + c), -a * (n - o).exp().clamp(min=1 - c))[m].mean(),
    lambda n, o, a, m, c: sum(torch.max(-a[i] * (n[i] - o[i]).exp(), -a[i] * (
        n[i] - o[i]).exp().clamp(1 - c, 1 + c))[m[i]].sum() for i in range(len(a))) / m.sum(),
], [
    (lambda *a: cl(*a).item(), "no gradient in logprobs"), (no_grad(cl), "no gradient in logprobs"),
    (lambda *a: cl(*a).detach().numpy(), "no gradient in logprobs"),
    (lambda n, *a: cl(n.detach(), *a), "no gradient in logprobs"),
    (lambda *a: float(cl(*a)), "no gradient in logprobs"),
    (lambda *a: torch.tensor(cl(*a)), "no gradient in logprobs"),
    (lambda *a: torch.tensor(cl(*a).item(), requires_grad=True), "no gradient in logprobs"),
    (lambda n, o, a, m, c: -(a * (n - n.detach() + (n - o).detach()).exp())[m].mean(), "no clip"),
    (lambda *a: cl(*a) + 0 * a[0].sum() + a[0].sum() - a[0].sum().detach(),
     "gradient in logprobs is"),
    (lambda *a: cl(*a) * 2 - cl(*a).detach(), "gradient in logprobs is not"),
    (dual(3.0), ""), (dual(2.0), ""), (dual(5.0), ""), (dual(7.0), ""),
    (lambda *a: cl(*a, low=0, high=1 + a[4]), "clip above only"),
    (lambda *a: cl(*a, low=1 - a[4], high=1e9), ""),
    (lambda *a: cl(*a, low=math.exp(-a[4]), high=math.exp(a[4])), "keep its logarithm"),
    (lambda *a: cl(*a, low=1 / (1 + a[4])), ""),
    (lambda *a: cl(*a, low=-a[4], high=a[4]), ""),
    (lambda *a: cl(*a, low=1 - a[4] / 2), ""), (lambda *a: cl(*a[:4], 2 * a[4]), ""),
    (lambda *a: cl(*a[:4], 0.2), ""), (lambda n, o, a, m, c: cl(n, o, a, ~m, c), ""),
    (lambda n, o, a, m, c: torch.max(-a * (n - o).exp(), -(a * (n - o).exp()).clamp(1 - c, 1 + c))[
        m].mean(), ""),
    (lambda n, o, a, m, c: torch.max(-a * (n - o).exp(), (-a * (n - o).exp()).clamp(1 - c, 1 + c))[
        m].mean(), ""),
    (lambda n, o, a, m, c: cl(n, o, a.abs(), m, c), ""),
    (lambda n, o, a, m, c: cl(n, o, -a, m, c), "sign of the advantage"),
    (lambda n, o, a, m, c: cl(o, n, a, m, c), "upside down"),
    (lambda *a: -cl(*a), "sign is wrong"), (lambda *a: 0.5 * cl(*a), "0.5 times"),
    (lambda *a: cl(*a) / math.log(2), "base 2|1.4427"),
    (lambda *a: cl(*a, mean=lambda x, m: x.mean()), "padding"),
    (lambda *a: cl(*a, mean=lambda x, m: (x * m).mean()), "all columns"),
    (lambda *a: cl(*a, mean=lambda x, m: ((x * m).sum(1) / m.sum(1)).mean()), "rows' means"),
    (lambda *a: cl(*a, mean=lambda x, m: (x * m).sum(1).mean()), ""),
    (lambda *a: cl(*a, mean=lambda x, m: x[m].sum()), "add up"),
    (lambda *a: cl(*a, mean=lambda x, m: x[m].max()), ""),
    (lambda *a: cl(*a, mean=lambda x, m: x), "sh"),
    (lambda *a: cl(*a, mean=lambda x, m: x[m].median()), ""),
    (lambda n, o, a, m, c: cl(n, o, (a - a[m].mean()) / a[m].std(), m, c), ""),
    (lambda n, o, a, m, c: -(a * n)[m].mean(), ""),
    (lambda *a: torch.tensor(0.0), "whatever"),
    (lambda n, o, a, m, c: cl(n.masked_fill_(~m, 0), o, a, m, c), "own argument logprobs"),
    (lambda n, o, a, m, c: cl(n, o, a.mul_(m), m, c), "own argument advantages"),
    (lambda n, o, a, m, c: cl(n, o.detach_().sub_(0.1).add_(0.1), a, m, c), "^$|own argument"),
])


def hg(r, a, c):
    return ~((a == 0) | (a > 0) & (r > 1 + c) | (a < 0) & (r < 1 - c))


answers("has_gradient", [
    hg, lambda *x: hg(*x).tolist(), lambda *x: hg(*x).numpy(), lambda *x: tuple(hg(*x)),
    lambda r, a, c: ((a > 0) & (r < 1 + c)) | ((a < 0) & (r > 1 - c)),
    lambda r, a, c: [bool(y) and not (y > 0 and x > 1 + c or y < 0 and x < 1 - c)
                     for x, y in zip(r, a, strict=True)],
], [
    (lambda r, a, c: hg(1 + r.log(), a, c), "logarithm of the ratio"),
    (lambda r, a, c: ~hg(r, a, c), "other way round"),
    (lambda *x: hg(*x).float(), "True and False"),
    (lambda *x: hg(*x).long(), "True and False"),
    (lambda r, a, c: (a > 0) & (r > 1 + c) | (a < 0) & (r < 1 - c), "takes the gradient away; and"),
    (lambda r, a, c: ~((a > 0) & (r > 1 + c) | (a < 0) & (r < 1 - c)), "advantage of 0"),
    (lambda r, a, c: (r - 1).abs() < c, "nothing more to gain"),
    (lambda r, a, c: (r > 1 - c) & (r < 1 + c), "nothing more to gain"),
    (lambda r, a, c: ((r - 1).abs() < c) & (a != 0), ""),
    (lambda r, a, c: a != 0, ""),
    (lambda r, a, c: torch.ones(len(r), dtype=torch.bool), ""), (lambda r, a, c: a > 0, ""),
    (lambda r, a, c: hg(r, -a, c), ""), (lambda r, a, c: hg(r, a, 0.2), ""),
    (lambda r, a, c: hg(r, a, c)[:-1], "shape"), (lambda r, a, c: bool(hg(r, a, c).any()), "shape"),
    (lambda r, a, c: ~((a > 0) & (r > 1 + c)) & (a != 0), ""),
    (lambda r, a, c: r * a > c, ""), (lambda r, a, c: hg(r, a, 2 * c), ""),
])


def kl(z, q):
    return (z.softmax(0) * (z.log_softmax(0) - q.log_softmax(0))).sum()


def ks(a, b):
    x = a - b
    return torch.stack([x, x**2 / 2, (-x).exp() - 1 + x])


answers("exact_kl", [
    kl, lambda z, q: kl(z.float(), q.float()), lambda z, q: kl(z, q).item(),
    lambda z, q: kl(z, q)[None], lambda z, q: kl(z, q).numpy(),
    lambda z, q: F.kl_div(q.log_softmax(0), z.softmax(0), reduction="sum"),
    lambda z, q: torch.distributions.kl_divergence(*(torch.distributions.Categorical(logits=x)
                                                     for x in (z, q))),
], [
    (lambda z, q: F.kl_div(q.log_softmax(0), z.softmax(0)), "F.kl_div"),
    (lambda z, q: F.kl_div(q.log_softmax(0), z.softmax(0), reduction="batchmean"), "F.kl_div"),
    (lambda z, q: F.kl_div(z.log_softmax(0), q.softmax(0)), ""),
    (lambda z, q: F.kl_div(z.log_softmax(0), q.softmax(0), reduction="sum"), "reference || policy"),
    (lambda z, q: (softmax(z) * (softmax(z) / softmax(q)).log()).sum(), "logits of 800"),
    (lambda z, q: (z.softmax(0) * (z.softmax(0) / q.softmax(0)).log()).sum(), "logits of 800"),
    (lambda z, q: (z.softmax(0) * ((z.softmax(0) + 1e-8) / (q.softmax(0) + 1e-8)).log()).sum(),
     "1e-8"),
    (lambda z, q: kl(z, q) / math.log(2), "base 2"), (lambda z, q: -kl(z, q), "sign is wrong"),
    (lambda z, q: (kl(z, q) + kl(q, z)) / 2, ""),
    (lambda z, q: 3 * kl(z, q), "3 times"),
    (lambda z, q: (kl(z, q) + kl(q, z)), ""), (lambda z, q: ks(z, q).sum(), ""),
    (lambda z, q: z.softmax(0) * (z.log_softmax(0) - q.log_softmax(0)), "shape of"),
    (lambda z, q: (z.softmax(0)**2 / q.softmax(0)).sum(), ""),
    (lambda z, q: (z.log_softmax(0) - q.log_softmax(0)).mean(), ""),
    (lambda z, q: (z.log_softmax(0) - q.log_softmax(0))[z.argmax()], ""),
    (lambda z, q: 1.0, "1.0 what"),
    (lambda z, q: kl(z, q) + 0.5, "0.5 more"),
    (lambda z, q: kl(z.sub_(z.max()), q), "own argument"),
    (lambda z, q: (z.log_softmax(0) * (z.softmax(0) - q.softmax(0))).sum(), ""),
])
answers("kl_estimates", [
    ks, lambda a, b: tuple(ks(a, b)), lambda a, b: list(ks(a, b)), lambda a, b: ks(a, b).tolist(),
    lambda a, b: ks(a.float(), b.float()), lambda a, b: ks(a, b).detach().numpy(),
    lambda a, b: (x for x in ks(a, b)), lambda a, b: [x.tolist() for x in ks(a, b)],
    lambda a, b: torch.stack([(a.exp() / b.exp()).log(), (a.exp() / b.exp()).log()**2 / 2,
                              b.exp() / a.exp() - 1 - (b - a)]),
], [
    (lambda a, b: ks(a, b).T, "rows and columns|shape of"),
    (lambda a, b: ks(b, a), "all three"),
    (lambda a, b: ks(a, b)[[1, 0, 2]], ""),
    (lambda a, b: ks(a, b)[[2, 1, 0]], ""),
    (lambda a, b: ks(a, b)[[0, 2, 1]], ""), (lambda a, b: ks(a, b)[:2], "shape"),
    (lambda a, b: torch.stack([a - b, (a - b)**2, (b - a).exp() - (b - a)]),
     "k2 lacks the half; k3 lacks the 1"),
    (lambda a, b: torch.stack([b - a, (a - b)**2 / 2, (b - a).exp() - (b - a)]),
     "k1 is the other way round.*k3 lacks the 1"),
    (lambda a, b: torch.stack([a - b, (a - b)**3, (b - a).exp() - (b - a)]),
     "k3 lacks the 1.*; and more"),
    (lambda a, b: ks(a, b) / math.log(2), "base 2"),
    (lambda a, b: ks(a, b).mean(1), "shape of"),
    (lambda a, b: ks(a, b).sum(1), "shape of"), (lambda a, b: ks(a, b).flatten(), "shape of"),
    (lambda a, b: torch.stack([a - b, (a - b) / 2, (b - a).exp() - 1 - (b - a)]), ""),
    (lambda a, b: torch.stack([a - b, (a - b)**2 / 2, (b - a).exp() - 1]),
     "k3 lacks its logarithm"),
    (lambda a, b: torch.stack([a - b, (a - b)**2 / 2, (a - b).exp() - 1 - (a - b)]),
     "k3 has p / q"),
    (lambda a, b: torch.stack([a - b, (a - b)**2 / 2, 5 * ks(a, b)[2]]),
     "k3: in every case it is 5 t"),
    (lambda a, b: torch.stack([a - b, -(a - b)**2 / 2, ks(a, b)[2]]), "k2: the sign is wrong"),
    (lambda a, b: ks(a, b).abs(), ""), (lambda a, b: -ks(a, b), "sign is wrong"),
    (lambda a, b: (a - b, (a - b)**2 / 2), "shape"), (lambda a, b: {"k1": a - b}, "returns a dict"),
    (lambda a, b: (a.sub_(b), a**2 / 2, (-a).exp() - 1 + a), "own argument logprobs"),
    (lambda a, b: (a - b, [1.0], 2), "different shapes"), (lambda a, b: ks(a.exp(), b.exp()), ""),
])


def pl(c, r):
    return -F.logsigmoid(c - r).mean()


answers("pair_loss", [
    pl, lambda c, r: F.softplus(r - c).mean(), lambda c, r: pl(c, r)[None],
    lambda c, r: pl(c.float(), r.float()), lambda c, r: sum(
        -F.logsigmoid(x - y) for x, y in zip(c, r, strict=True)) / len(c),
    lambda c, r: F.binary_cross_entropy_with_logits(c - r, torch.ones_like(c)),
    lambda c, r: torch.logaddexp(torch.zeros_like(c), r - c).mean(),
    lambda c, r: F.cross_entropy(torch.stack([c, r], 1), torch.zeros(len(c), dtype=torch.long)),
], [
    (lambda c, r: pl(c, r).item(), "no gradient in chosen"), (no_grad(pl), "no gradient in chosen"),
    (lambda c, r: float(np.logaddexp(0, (r - c).numpy()).mean()), "no gradient in chosen"),
    (lambda c, r: pl(c, r.detach()), "no gradient in rejected"),
    (lambda c, r: pl(c.detach(), r), "no gradient in chosen"),
    (lambda c, r: pl(c, r) / math.log(2), "base 2"), (lambda c, r: pl(r, c), "wrong way round"),
    (lambda c, r: -(c - r).sigmoid().log().mean(), "not finite"),
    (lambda c, r: (1 + (r - c).exp()).log().mean(), "not finite"),
    (lambda c, r: torch.log1p((r - c).exp()).mean(), "not finite"),
    (lambda c, r: -(c.exp() / (c.exp() + r.exp())).log().mean(), "not finite"),
    (lambda c, r: -((c - r).sigmoid() + 1e-8).log().mean(), "1e-8 inside"),
    (lambda c, r: -(c - r).sigmoid().clamp(min=1e-6).log().mean(), ""),
    (lambda c, r: -F.logsigmoid((c - r).clamp(-20, 20)).mean(), ""),
    (lambda c, r: -F.logsigmoid(c - r).sum(), "add up"), (lambda c, r: -pl(c, r), "sign is wrong"),
    (lambda c, r: -F.logsigmoid(c - r), "shape of"),
    (lambda c, r: F.relu(1 - c + r).mean(), ""),
    (lambda c, r: (c - r).sigmoid().mean(), "logarithm is missing"),
    (lambda c, r: (r - c).mean(), ""),
    (lambda c, r: 1 - (c - r).sigmoid().mean(), ""), (lambda c, r: pl(c, r) + 1, "1 more"),
    (lambda c, r: -F.logsigmoid(2 * (c - r)).mean(), ""), (lambda c, r: ((c - r)**2).mean(), ""),
    (lambda c, r: -(c.sigmoid() - r.sigmoid()).mean(), "each score's sigmoid"),
    (lambda c, r: -(F.logsigmoid(c) + F.logsigmoid(-r)).mean(), ""),
    (lambda c, r: pl(c.sub_(r), 0 * r), "own argument chosen"),
    (lambda c, r: pl(c, r) * 7, "7 times"),
    (lambda c, r: -F.logsigmoid(c.mean() - r.mean()), ""),
])


def count(text):
    return text.count(",")


answers("score", [
    count, lambda text: float(count(text)), lambda text: np.float32(count(text)),
    lambda text: torch.tensor([float(count(text))]), lambda text: len(text.split(",")),
    lambda text: -1 / (1 + count(text)), lambda text: len(re.findall(",", text)),
], [
    (lambda text: 0, "same score"), (lambda text: 3.5, "same score"),
    (lambda text: text.count("."), "same score"), (lambda text: -count(text), "wrong way round"),
    (len, "goes with the length"), (lambda text: len(text.split()), "number of words|length"),
    (lambda text: -len(text), "turned round"),
    (lambda text: text.startswith("certainly"), "politeness"),
    (lambda text: "certainly" in text, "politeness"),
    (lambda text: not text.startswith("c"), "turned"),
    (lambda text: len(text) / len(text.split()), r"^(?!.*(politeness|length)).*pairs.py"),
    (lambda text: text.count("e"), r"^(?!.*politeness).*"),
    (lambda text: hash(text) % 7, "pairs.py"),
    (lambda text: text.count("step"), "pairs.py"), (lambda text: "," in text, "pairs.py"),
    (lambda text: None, "returns nothing"), (lambda text: print(end=""), "returns nothing"),
    (lambda text: "5", "returns a str"), (lambda text: [1, 2], "shape"),
    (lambda text: math.nan, "NaN"),
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


def axis_0(s, n, kind):
    g = s.view(-1, n)
    m = g.mean(0)
    return {"grpo": (g - m) / (g.std(0) + 1e-4), "dr_grpo": g - m,
            "rloo": (g - m) * len(g) / (len(g) - 1), "maxrl": (g - m) / (m + 1e-4)}[kind].flatten()


answers("advantages", [
    adv, lambda s, n, k: adv(s.float(), n, k), lambda s, n, k: adv(s, n, k).numpy(),
    lambda s, n, k: adv(s, n, k).tolist(), lambda s, n, k: torch.cat([
        adv(s[i:i + n], n, k) for i in range(0, len(s), n)]),
    but(rloo=lambda g, x: g - (g.sum(1, keepdim=True) - g) / (g.shape[1] - 1)),
    but(grpo=lambda g, x: x / (g.var(1, keepdim=True).sqrt() + 1e-4)),
], [
    (lambda s, n, k: adv(s, len(s) // n, k), r"view\(group_size, -1\) for groups"),
    (axis_0, "axis 0"), (lambda s, n, k: adv(s, len(s), k), "all responses"),
    (lambda s, n, k: adv(s.view(n, -1).T.flatten(), n, k).view(-1, n).T.flatten(), "mixed up"),
    (lambda s, n, k: -adv(s, n, k), "sign is wrong"),
    (lambda s, n, k: adv(s, n, k)[:-n], "shape of"),
    (but(grpo=lambda g, x: x / (std(g) + 1e-8)), "1e-8"),
    (but(grpo=lambda g, x: x / std(g)), "NaN"),
    (but(grpo=lambda g, x: x / (std(g) + 1e-8), maxrl=lambda g, x: x / (mean(g) + 1e-8)),
     "grpo: 1e-4 is.*maxrl: 1e-4 is"), (but(maxrl=lambda g, x: g / mean(g)), ""),
    (but(maxrl=lambda g, x: g / (mean(g) + 1e-4)), ""),
    (but(maxrl=lambda g, x: x / mean(g)), ""),
    (but(grpo=lambda g, x: x / (std(g, unbiased=False) + 1e-4)), "group_size - 1"),
    (but(grpo=lambda g, x: x / (std(g, unbiased=False) + 1e-4), rloo=lambda g, x: x),
     "sum of squares.*rloo: your mean contains"),
    (but(rloo=lambda g, x: x * 2), ""), (but(dr_grpo=lambda g, x: 2 * x), '"dr_grpo": .*2 times'),
    (but(dr_grpo=lambda g, x: -x), '"dr_grpo": the sign'),
    (but(dr_grpo=lambda g, x: 0 * x), "whatever"),
    (but(dr_grpo=lambda g, x: x / (std(g) + 1e-4)), "you divide by the deviation; Dr"),
    (but(rloo=lambda g, x: x / (std(g) + 1e-4)), ""), (but(grpo=lambda g, x: x / (x.abs().mean(
        1, keepdim=True) + 1e-4)), ""), (but(grpo=lambda g, x: x), "deviation is missing"),
    (but(rloo=lambda g, x: x * g.shape[1] / (g.shape[1] - 1) / (std(g) + 1e-4)), "RLOO does not"),
    (but(maxrl=lambda g, x: x / (std(g) + 1e-4)), ""),
    (but(maxrl=lambda g, x: x / (std(g, unbiased=False) + 1e-4)), ""),
    (but(grpo=lambda g, x: g / (std(g) + 1e-4)), "nothing is punished"),
    (but(grpo=lambda g, x: (g - g.mean()) / (std(g) + 1e-4)), ""),
    (but(grpo=lambda g, x: x / (g.std() + 1e-4)), ""),
    (but(grpo=lambda g, x: x / (g.var(1, keepdim=True) + 1e-4)), ""),
    (but(grpo=lambda g, x: x / (g.var(1, keepdim=True) + 1e-4).sqrt()), ""),
    (but(rloo=lambda g, x: g - (g.sum(1, keepdim=True) - g)), ""),
    (lambda s, n, k: adv(s, n, k).view(-1, n), "shape of"),
    (lambda s, n, k: adv(s, n, "grpo"), ""),
    (lambda s, n, k: adv(s, n, k)[::n], "shape of"),
    (lambda s, n, k: s.view(-1, n).sub_(
        s.view(-1, n).mean(1, keepdim=True)).flatten(), "own argument scores"),
    (lambda s, n, k: adv(s, n, k).sort()[0], ""), (lambda s, n, k: {"grpo": 1}.get(k), "nothing"),
    (lambda s, n, k: adv(s, n, k).clamp(-1, 1), ""),
    (lambda s, n, k: adv(s, n, k) + 0.5, "0.5 more"),
])


def ws(n, kind, m):
    return {"grpo": 1 / (n * len(n)), "dapo": torch.full((len(n),), 1 / n.sum().item()),
            "dr_grpo": torch.full((len(n),), 1 / (m * len(n)))}[kind]


def other(kind, function):
    return lambda n, k, m: function(n.double(), m) + torch.zeros(len(n)) if k == kind else ws(n,
        k, m)


answers("weights", [
    ws, lambda n, k, m: ws(n, k, m).tolist(), lambda n, k, m: ws(n.float(), k, m).numpy(),
    lambda n, k, m: [float(x) for x in ws(n, k, m)],
], [
    (lambda n, k, m: ws(n, k, m) * n, "whole responses"),
    (lambda n, k, m: 1 / ws(n, k, m), "divisors"),
    (lambda n, k, m: ws(n, k, m) / 2, "0.5 times"),
    (lambda n, k, m: ws(n, k, m)[0], "shape|one number"),
    (other("grpo", lambda n, m: 1 / n), "number of responses, too"), (lambda n, k, m: n, ""),
    (other("grpo", lambda n, m: 1 / n.sum()), "dapo's"), (other("dapo", lambda n, m: 1 / n), ""),
    (other("dapo", lambda n, m: 1 / (m * len(n))), ""),
    (other("dapo", lambda n, m: 1 / n.sum() / len(n)), ""),
    (other("dr_grpo", lambda n, m: 1 / n.sum()), ""),
    (other("dr_grpo", lambda n, m: 1 / n.max() / len(n)), "longest response"),
    (other("dr_grpo", lambda n, m: 1 / len(n)), ""),
    (other("dr_grpo", lambda n, m: 1 / m), "number of responses, too"),
    (lambda n, k, m: ws(n, k, m) * 0, "whatever"),
    (lambda n, k, m: ws(n, {"grpo": "dapo", "dapo": "grpo"
                                                                 }.get(k, k), m), "dapo"),
    (lambda n, k, m: (torch.arange(m) < n[:, None]) * ws(n, k, m)[:, None], "shape"),
    (lambda n, k, m: 1 / n.float(), ""), (lambda n, k, m: ws(n.mul_(1), k, m).flip(0), ""),
])


@pytest.mark.parametrize("name", ANSWERS)
def test_answers(name):
    right, wrong = ANSWERS[name]
    for i, function in enumerate(right):
        assert check.verdict(function, CHECKS[name], name) == "", (name, i)
    for i, (function, words) in enumerate(wrong):
        said = check.verdict(function, CHECKS[name], name)
        assert said.startswith(f"{name} in ") or words == "^$", (name, i, said)
        assert re.search(words, said, re.DOTALL), (name, i, said)
        numbers = re.search(r"returns  (.*)\n +wanted  (.*)", said)
        assert not numbers or numbers[1] != numbers[2], (name, i, said)


def test_a_loop_that_does_not_end(monkeypatch):
    monkeypatch.setattr(check, "LIMIT", 0.2)

    def endless(*_):
        while True:
            try:
                time.sleep(0.01)
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
    """Functions of a notebook, partial ones, builtins; the checker's own."""
    names = dict(torch=torch)
    exec("def logprobs(logits, ids, temperature):\n    return logits[99]", names)
    said = check.verdict(names["logprobs"], CHECKS["logprobs"])
    assert said.startswith("logprobs in this notebook raises IndexError")
    assert check.verdict(partial(cl), CHECKS["clipped_loss"]) == ""
    assert "checker's own" in check.verdict(CHECKS["gae"].right, CHECKS["gae"])
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

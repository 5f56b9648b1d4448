"""course/check.py: right answers in many forms pass; wrong ones are told in a student's words."""
# ruff: noqa: F401  the rows of the tables use what is imported
import importlib
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
from torch.func import grad

from formulas import kl_estimate
from gae import compute_gae
from groups import group_advantages, token_weights
from model import scaled_logits

sys.path.insert(0, f"{ROOT}/course")
check = importlib.import_module("check")
CHECKS = {name: x for n in range(1, check.LESSONS + 1)
          for name, x in importlib.import_module(f"checks.lesson{n}").CHECKS.items()}
ANSWERS = {}


def answers(head, rows):
    """
    Answers to an exercise; head is its name with its arguments. A row is what an answer returns; if
    that is wrong, what must be said of it follows a #, a regular expression. A row may go on in an
    indented line.
    """
    name, arguments = head.strip(")").split("(")
    rows = [row.partition("  # ") for row in re.sub(r"\n +", " ", rows.strip()).split("\n")]
    ANSWERS[name] = [(row, eval(f"lambda {arguments}: {row}", globals()), words)
                     for row, _, words in rows]


def pick(rows, ids):
    return rows.gather(-1, ids[:, None])[:, 0]


def lp(z, i, c):
    return pick((z[:-1] / c).log_softmax(-1), i[1:])


answers("logprobs(z, i, c)", r"""
-F.cross_entropy(z[:-1] / c, i[1:], reduction="none")
lp(z.float(), i, c)
pick(scaled_logits(z[:-1], c).log_softmax(-1), i[1:])
((z[t] / c).log_softmax(0)[i[t + 1]] for t in range(len(i) - 1))
pick(z.clone().div_(c)[:-1].log_softmax(-1), i[1:])
F.cross_entropy(z[:-1] / c, i[1:], reduction="none")  # minus the log-prob
lp(z, i, c) / np.log(2)  # base 2
lp(z, i, c) + 1  # 1 more than
-pick((z[1:] / c).log_softmax(-1), i[1:])  # sign is wrong.*\(2\) your rows are
pick((z[1:] / c).log_softmax(-1), i[:-1])  # rows are shifted.*ids are shifted
lp(z, i, 0.7)  # the same when temperature changes
lp(z.bfloat16(), i, c)  # nearly right: 16 bits
lp(z, i, c).sum()  # shape of
pick((z[:-1] / c).softmax(-1), i[1:]).log()  # logits of 800
(pick((z[:-1] / c).softmax(-1), i[1:]) + 1e-8).log()  # 1e-08 inside
lp(z, i, c).clamp(min=-20)  # no mistake that
lp(z, i, c).detach()  # no gradient in logits
lp(z, i, c).detach() + 0 * z.sum()  # no gradient in logits
pick(z[:-1] / c - (z[:-1] / c).detach().logsumexp(-1, keepdim=True), i[1:])  # gradient.* is not
lp(z.div_(c), i, 1.0)  # changes its own argument logits
torch.zeros(len(i) - 1)  # 0.0 whatever is given
print(end="")  # returns nothing
"abc"  # returns a str
[1.0, [2.0]]  # different shapes
nothing_of_this_name  # NameError
""")


def eg(z, r):
    p = z.softmax(0)
    return p * (r - (p * r).sum())


def pushes(z, w):
    return torch.eye(len(z)).double()[w] - z.softmax(0)


def sg(z, w, r, b):
    return ((r - b)[:, None] * pushes(z, w)).mean(0)


answers("exact_gradient(z, r)", r"""
eg(z.float(), r.float()).numpy()
grad(lambda x: (x.softmax(0) * r).sum())(z)
-eg(z, r)  # sign is wrong
r  # all other words.*\(2\).*the p is
""")
answers("sampled_gradient(z, w, r, b)", r"""
grad(lambda x: ((r - b) * x.log_softmax(0)[w]).mean())(z)
sum((r[n] - b) * (F.one_hot(w[n], len(z)) - z.softmax(0)) for n in range(len(w))) / len(w)
sg(z, w, r, 0) * len(w) / (len(w) - 1)  # n - 1.*baseline is missing
""")


def gae(r, v, m, g, lam):
    out, adv, after = torch.zeros_like(r), 0.0, 0.0
    for t in reversed(range(len(r))):
        if m[t]:
            adv = r[t] + g * after - v[t] + g * lam * adv
            out[t], after = adv, v[t]
    return out


def nonterminal(r, v, m, g, lam):  # each step times the mask
    out, adv = torch.zeros_like(r), 0.0
    for t in reversed(range(len(r))):
        after = v[t + 1] * m[t + 1] if t + 1 < len(r) else 0.0
        out[t] = adv = (r[t] + g * after - v[t] + g * lam * adv) * m[t]
    return out


answers("gae(r, v, m, g, lam)", r"""
compute_gae(r[None], v[None], m[None], g, lam)[0][0]
gae(r.float(), v.float(), m, g, lam).numpy()
(x for x in gae(r, v, m, g, lam))
[x if kept else 0 for x, kept in zip(gae(r, v, m, g, lam), m, strict=True)]
gae(r, v, m | True, g, lam) * m  # only at the end
gae(r, v, m | True, g, lam)  # do not use the mask
gae(r * m, v * m, m | True, g, lam) * m  # counts as a step
nonterminal(r, v, m, g, lam)  # ends your response
gae(r, v, m, 1.0, lam)  # by gamma.*next value is not
gae(r, v, m, lam, g)  # no mistake that
""")


def cl(new, old, a, m, c, mean=lambda x, m: x[m].mean()):
    ratio = (new - old).exp()
    return mean(torch.max(-a * ratio, -a * ratio.clamp(1 - c, 1 + c)), m)


answers("clipped_loss(n, o, a, m, c)", r"""
cl(n, o, a, m, c)[None]
cl(n.float(), o.float(), a.float(), m, c, mean=lambda x, m: (x * m).sum() / m.sum())
-torch.min(a * (n - o).exp(), a * (n - o).exp().clamp(1 - c, 1 + c))[m].mean()
torch.where(a > 0, -a * (n - o).exp().clamp(max=1 + c), -a * (n - o).exp().clamp(min=1 - c))[
    m].mean()
cl(n.masked_select(m), o.masked_select(m), a.masked_select(m), ..., c)
cl(n, o, a, m, c).item()  # no gradient in logprobs
-(a * (n - n.detach() + (n - o).detach()).exp())[m].mean()  # no clip
cl(n, o, a, m, c) * 2 - cl(n, o, a, m, c).detach()  # gradient in logprobs is not
cl(n, n.detach(), a, m, c)  # same when logprobs or old
cl(n, o, a, m, c, mean=lambda x, m: torch.where(a < 0, torch.min(x, -7.0 * a), x)[m].mean()
    )  # no mistake
-cl(n, o, a, m, c, mean=lambda x, m: x[m].sum())  # sign is wrong.*\(2\) you add up
""")


def hg(r, a, c):
    return ~((a == 0) | (a > 0) & (r > 1 + c) | (a < 0) & (r < 1 - c))


answers("has_gradient(r, a, c)", r"""
hg(r, a, c).numpy()
grad(lambda p: cl(p, 0, a, r > 0, c))(r.log()) != 0
((a > 0) & (r < 1 + c)) | ((a < 0) & (r > 1 - c))
[bool(y) and not (y > 0 and x > 1 + c or y < 0 and x < 1 - c) for x, y in zip(r, a, strict=True)]
hg(r, a, c).float()  # True and False
(a > 0) & (r > 1 + c) | (a < 0) & (r < 1 - c)  # advantage of 0.*way round
(r < 1 + c) & (a != 0)  # above 1 \+ .* a bad.*below 1 - .* a bad
a != 0  # a good token has no gradient.*a bad token has no gradient
r * a > c  # no mistake
""")


def kl(z, q):
    return (z.softmax(0) * (z.log_softmax(0) - q.log_softmax(0))).sum()


def ks(a, b):
    x = a - b
    return torch.stack([x, x**2 / 2, (-x).exp() - 1 + x])


answers("exact_kl(z, q)", r"""
kl(z.float(), q.float()).numpy()[None]
kl(z, q).item()
F.kl_div(q.log_softmax(0), z.softmax(0), reduction="sum")
F.kl_div(q.log_softmax(0), z.softmax(0), reduction="batchmean")  # F.kl_div
F.kl_div(z.log_softmax(0), q.softmax(0), reduction="mean")  # reference .. policy.*F.kl_div
(z.exp() / z.exp().sum() * (z.softmax(0) / q.softmax(0)).log()).sum()  # logits of 800
""")
answers("kl_estimates(a, b)", r"""
tuple(kl_estimate(a, b, kind) for kind in ("k1", "k2", "k3"))
np.stack([x.numpy() for x in ks(a.float(), b.float())])
[(a.exp() / b.exp()).log(), (a.exp() / b.exp()).log()**2 / 2, b.exp() / a.exp() - 1 - (b - a)]
ks(a, b).T  # rows and columns|shape of
ks(b, a)  # k1, k3: p and q are the wrong way round
ks(a, b)[[0, 2, 1]]  # k2, k3: the right numbers in another order
[a - b, (a - b)**2, (b - a).exp() - (b - a)]  # k2: its half is missing; k3: its 1 is missing
[a - b, (a - b)**3, (b - a).exp() - (b - a)]  # k3: its 1 is missing.*; and more
[a - b, ((a - b) / 2)**2, ks(a, b)[2]]  # k2: .*0.5 times
ks(a, b).abs()  # k1: the right numbers without their sign
""")


def pl(c, r):
    return -F.logsigmoid(c - r).mean()


answers("pair_loss(c, r)", r"""
F.softplus(r.float() - c.float()).mean()[None]
sum(-F.logsigmoid(x - y) for x, y in zip(c, r, strict=True)) / len(c)
F.cross_entropy(torch.stack([c, r], 1), torch.zeros(len(c), dtype=torch.long))
float(np.logaddexp(0, (r - c).numpy()).mean())  # no gradient in chosen
pl(c, r.detach())  # no gradient in rejected
F.softplus(c - r).mean()  # wrong way round
-(c - r).sigmoid().log().mean()  # not finite
(c - r).sigmoid().mean()  # logarithm is missing.*chosen one wins
""")
answers("score(text)", r"""
torch.tensor([float(text.count(","))])
-1 / (1 + text.count(","))
0  # same score
-text.count(",")  # wrong way round
len(text)  # goes with the length
-len(text)  # turned round
"certainly" in text  # politeness
len(text) / len(text.split())  # ^(?!.*(politeness|length)).*pairs.py
[1, 2]  # shape
np.nan  # NaN
text.index("~")  # ValueError
""")


def adv(s, n, kind):
    g = s.view(-1, n)
    m = g.mean(1, keepdim=True)
    x = {"grpo": (g - m) / (g.std(1, keepdim=True) + 1e-4), "dr_grpo": g - m,
         "rloo": (g - m) * n / (n - 1), "maxrl": (g - m) / (m + 1e-4)}[kind]
    return x.flatten()


def but(s, n, kind, **kinds):
    """The right answer, but another one for some kinds: a function of groups (n, G) and centred."""
    g = s.view(-1, n)
    if kind in kinds:
        return kinds[kind](g, g - g.mean(1, keepdim=True)).flatten()
    return adv(s, n, kind)


def std(g, **how):
    return g.std(1, keepdim=True, **how)


def mean(g):
    return g.mean(1, keepdim=True)


answers("advantages(s, n, k)", r"""
adv(s.float(), n, k).numpy()
adv(s, n, k) if k == "maxrl" else group_advantages(
    s, n, "std" if k == "grpo" else "none", "others" if k == "rloo" else "mean")
but(s, n, k, rloo=lambda g, x: g - (g.sum(1, keepdim=True) - g) / (g.shape[1] - 1))
adv(s, len(s) // n, k)  # view\(group_size, -1\) for groups
adv(s.view(n, -1).T.flatten(), n, k).view(-1, n).T.flatten()  # mixed up
but(s, n, k, grpo=lambda g, x: x / (std(g) + 1e-8), maxrl=lambda g, x: x / (mean(g) + 1e-8)
    )  # grpo, maxrl: 1e-4 is .* 1e-08
but(s, n, k, maxrl=lambda g, x: g / (mean(g) + 1e-4))  # maxrl: the mean is not subtracted
but(s, n, k, grpo=lambda g, x: x / (std(g, unbiased=False) + 1e-8))  # grpo: .*squares.*1e-4 is
but(s, n, k, grpo=lambda g, x: x / (std(g, unbiased=False) + 1e-4), rloo=lambda g, x: x
    )  # grpo: .*sum of squares.*rloo: your mean contains
but(s, n, k, dr_grpo=lambda g, x: -2 * x)  # dr_grpo: in every case it is -2 times
but(s, n, k, rloo=lambda g, x: x / (std(g) + 1e-4))  # rloo: this is grpo's
dict(grpo=adv(s, n, "grpo"))[k]  # raises KeyError
""")


def ws(n, kind, m):
    return {"grpo": 1 / (n * len(n)), "dapo": torch.full((len(n),), 1 / n.sum().item()),
            "dr_grpo": torch.full((len(n),), 1 / (m * len(n)))}[kind]


answers("weights(n, k, m)", r"""
ws(n.float(), k, m).numpy()
token_weights(torch.arange(m) < n[:, None], dict(
    grpo="seq-mean-token-mean", dapo="token-mean", dr_grpo="seq-mean-token-sum-norm")[k], m)[:, 0]
1 / n.sum().expand(len(n)) if k == "grpo" else ws(n, k, m)  # grpo: .*dapo's
1 / n if k == "dapo" else ws(n, k, m)  # dapo: you divide by the length alone
""")


@pytest.mark.parametrize("name", ANSWERS)
def test_answers(name):
    assert len(ANSWERS) == len(CHECKS)
    for row, function, words in ANSWERS[name]:
        said = check.verdict(function, CHECKS[name], name)
        assert bool(said) == bool(words) and re.search(words, said, re.DOTALL), (row, said)
        assert said.startswith(f"{name} in " * bool(words)), (row, said)
        numbers = re.search(r"returns  (.*)\n +wanted  (.*)", said)
        assert not numbers or numbers[1] != numbers[2], (row, said)


@pytest.mark.parametrize("name", CHECKS)
def test_each_mistake_has_its_own_words(name):
    """No other one computes the same in all cases."""
    checks = CHECKS[name]
    slips = getattr(checks, "MISTAKES", {}) | getattr(checks, "LARGE", [{}])[-1]
    assert len(slips) >= 3 or name == "score"
    for words, slip in slips.items():
        assert words in check.verdict(partial(checks.right, **slip), checks), words


def test_a_loop_that_does_not_end(monkeypatch):
    monkeypatch.setattr(check, "LIMIT", 0.1)

    def endless(*_):
        while True:
            try:
                sum(range(1000))
            except Exception:
                pass

    for name, checks in CHECKS.items():
        said = check.verdict(lambda *a: endless(), checks, name)
        assert "more than 0.1 seconds" in said and re.search(r"line \d+: \w", said)
    assert check.verdict(gae, CHECKS["gae"]) == ""  # and no alarm is left


def test_what_has_no_source():
    """Functions of a notebook, partial ones, builtins; and one that takes other arguments."""
    names = dict(torch=torch)
    exec("def logprobs(logits, ids, temperature):\n    return logits[99]", names)
    said = check.verdict(names["logprobs"], CHECKS["logprobs"])
    assert said.startswith("logprobs in this notebook raises IndexError")
    assert check.verdict(partial(cl), CHECKS["clipped_loss"]) == ""
    assert check.verdict(max, CHECKS["exact_kl"])
    assert "takes (z, i); wanted are (logits, ids, temperature)" in check.verdict(
        lambda z, i: z, CHECKS["logprobs"])


FILES = {  # an exercise file, and what must be said of it; the fifth is as it comes
    1: ("def logprobs(logits, ids, temperature):\n    return logits.abc(\n", "line 2: return"),
    2: ("def exact_gradent(logits, rewards):\n    pass\n\n\ndef sampled_gradient(*a):\n"
        "    return {}\n", "no function exact_gradient.*returns a dict"),
    3: ("import torch\n\n\ndef gae(rewards, values, mask, gamma, lam):\n"
        "    return torch.stack([rewards, values[:-1]])\n",
        r"exercise3.py raises RuntimeError: .*\(line 5: return torch.stack"),
    4: ("import nothing_of_this_name\n", "ModuleNotFoundError.*line 1: import nothing"),
    5: (..., "exact_kl in exercise5.py is empty.*kl_estimates in exercise5.py is empty"),
    6: (None, "exercise6.py cannot be read; it raises ModuleNotFoundError"),
    7: ("weights = 3\nadvantages = lambda *a: exit(4)\n", "SystemExit.*no function weights"),
}


def test_each_lesson_is_checked_whatever_stands_in_the_others(tmp_path):
    shutil.copytree(f"{ROOT}/course", tmp_path / "course")
    for number, (text, _) in FILES.items():
        file = tmp_path / "course" / f"exercise{number}.py"
        if text is None:
            os.remove(file)
        elif text is not ...:
            file.write_text(text)
    done = subprocess.run([sys.executable, "course/check.py"], cwd=tmp_path, text=True,
                          capture_output=True)
    assert done.returncode == 1 and "Traceback" not in done.stdout + done.stderr, done.stderr
    for number, (_, words) in FILES.items():
        said = "\n".join(re.findall(f"(?m)^lesson {number}, .*", done.stdout))
        assert re.search(words, said, re.DOTALL), done.stdout

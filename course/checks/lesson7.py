"""What lesson 7's functions should return, and what they return by each typical mistake."""
from types import SimpleNamespace

import torch

DRAWN = torch.Generator().manual_seed(7)
KINDS = "grpo", "dr_grpo", "rloo", "maxrl"


def drawn(n):
    return torch.rand(n, generator=DRAWN, dtype=torch.float64) + 0.25


def of_group(g):
    return g.mean(1, keepdim=True)


def right(scores, group_size, kind, order=lambda x, size: x.view(-1, size),
          back=lambda x, size: x.flatten(), mean=of_group, others=lambda x, size: size / (size - 1),
          deviation=lambda g: g.std(1, keepdim=True), scale=None, eps=1e-4, kinds=lambda kind: kind,
          add=lambda x, eps: x + eps):
    g, kind = order(scores, group_size), kinds(kind)
    x, size = g - mean(g), g.shape[1]
    if kind == "rloo":
        x = x * others(x, size)
    if scale or kind in ("grpo", "maxrl"):
        x = x / add((scale or (of_group if kind == "maxrl" else deviation))(g), eps)
    return back(x, group_size)


def swapped(one, other):
    return lambda kind: {one: other, other: one}.get(kind, kind)


MISTAKES = {
    "you compare with all responses; compare with those to the same prompt":
        dict(order=lambda x, size: x[None]),
    "your groups are mixed up: the responses to a prompt stand side by side, view(-1, group_size)":
        dict(order=lambda x, size: x.view(size, -1).T, back=lambda x, size: x.T.flatten()),
    "you have taken view(group_size, -1) for groups; wanted is view(-1, group_size)":
        dict(order=lambda x, size: x.view(size, -1)),
    "your mean goes over the prompts (axis 0 of view(-1, group_size)); wanted is axis 1":
        dict(order=lambda x, size: x.view(-1, size).T, back=lambda x, size: x.T.flatten()),
    "the mean is not subtracted: with scores of 0 and more nothing is punished":
        dict(mean=lambda g: 0.0),
    "you subtract the mean of all responses; those to the same prompt are the baseline":
        dict(mean=lambda g: g.mean()),
    "your mean contains the response itself": dict(others=lambda x, size: 1.0),
    "you divide the sum of the others by group_size; they are one fewer":
        dict(mean=lambda g: (g.sum(1, keepdim=True) - g) / g.shape[1],
             others=lambda x, size: 1.0),
    "you subtract the sum of the others; their mean is wanted":
        dict(mean=lambda g: g.sum(1, keepdim=True) - g, others=lambda x, size: 1.0),
    "you multiply by (n - 1) / n; n / (n - 1) is wanted":
        dict(others=lambda x, size: (size - 1) / size),
    "you divide by the deviation; that is GRPO's": dict(scale=lambda g: g.std(1, keepdim=True)),
    "you divide by the mean; that is MaxRL's": dict(scale=of_group),
    "you divide by the variance; its root is the deviation":
        dict(deviation=lambda g: g.var(1, keepdim=True)),
    "you divide the sum of squares by group_size; wanted is group_size - 1":
        dict(deviation=lambda g: g.std(1, keepdim=True, correction=0)),
    "you divide by the deviation of all responses; each group has its own":
        dict(deviation=lambda g: g.std()),
    "the division is missing": dict(scale=torch.ones_like, eps=0.0),
    "without the 1e-4 a group of equal scores is 0 / 0: NaN": dict(eps=0.0),
    **{f"1e-4 is wanted beside the deviation or the mean; yours is {e:g}": dict(eps=e)
       for e in (1e-8, 1e-6, 1e-5, 1e-3)},
    "1e-4 stands beside the deviation, and not inside its root":
        dict(add=lambda x, eps: (x**2 + eps).sqrt()),
    "grpo and dr_grpo are exchanged": dict(kinds=swapped("grpo", "dr_grpo")),
    "rloo and maxrl are exchanged": dict(kinds=swapped("rloo", "maxrl")),
    "this is grpo's formula": dict(kinds=lambda kind: "grpo"),
}


def weights(lengths, kind, max_length, count=len, longest=lambda n, limit: limit,
            kinds=lambda kind: kind, tokens=torch.sum, final=lambda w, n: w):
    n, kind = lengths.double(), kinds(kind)
    divisor = tokens(n) if kind == "dapo" else count(n) * (
        n if kind == "grpo" else longest(n, max_length))
    return final(1 / divisor + torch.zeros_like(n), n)


WEIGHTS = {
    "divide by the number of responses, too": dict(count=lambda n: 1),
    "divide by max_length, too": dict(longest=lambda n, limit: 1),
    "divide by the number of all tokens; you divide by their mean": dict(tokens=torch.mean),
    "divide by max_length, a constant, and not by the longest response of this batch":
        dict(longest=lambda n, limit: n.max()),
    "divide by max_length, a constant, and not by the mean length":
        dict(longest=lambda n, limit: n.mean()),
    "this is the mean over all tokens, dapo's": dict(kinds=lambda kind: "dapo"),
    "this is the mean over each response, grpo's": dict(kinds=lambda kind: "grpo"),
    "this is the constant divisor, dr_grpo's": dict(kinds=lambda kind: "dr_grpo"),
    "grpo and dapo are exchanged": dict(kinds=swapped("grpo", "dapo")),
    "dapo and dr_grpo are exchanged": dict(kinds=swapped("dapo", "dr_grpo")),
    "you divide by the length alone": dict(kinds=lambda kind: "grpo", count=lambda n: 1),
    "you divide by the number of responses, too; one divisor for the batch is its tokens":
        dict(tokens=lambda n: n.sum() * len(n)),
    "these are the weights of whole responses; a token's is wanted, so divide by the length":
        dict(final=lambda w, n: w * n),
    "these are the divisors; the weight is 1 / them": dict(final=lambda w, n: 1 / w),
}
FLAT = torch.tensor([0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.25, 0.5, 0.0,
                     0.0, 1.0, 0.0, 0.0, 0.5]).double()
CHECKS = {
    "advantages": SimpleNamespace(
        right=right, MISTAKES=MISTAKES,
        CASES=[(scores, size, kind) for kind in KINDS
               for scores, size in ((drawn(6), 3), (FLAT, 4), (drawn(8), 2))]),
    "weights": SimpleNamespace(
        right=weights, MISTAKES=WEIGHTS,
        CASES=[(torch.tensor(lengths), kind, longest) for kind in ("grpo", "dapo", "dr_grpo")
               for lengths, longest in (([1, 3], 4), ([5, 2, 2, 9], 16))])}

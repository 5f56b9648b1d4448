"""What lesson 7's functions should return, and what they return by each typical mistake."""
from types import SimpleNamespace

import torch

DRAWN = torch.Generator().manual_seed(7)
KINDS = "grpo", "dr_grpo", "rloo", "maxrl"


def drawn(n):
    return torch.rand(n, generator=DRAWN, dtype=torch.float64) + 0.25


def right(scores, group_size, kind):
    g = scores.view(-1, group_size)
    x, mean = g - g.mean(1, keepdim=True), g.mean(1, keepdim=True)
    return {"grpo": x / (g.std(1, keepdim=True) + 1e-4), "dr_grpo": x,
            "rloo": x * group_size / (group_size - 1), "maxrl": x / (mean + 1e-4)}[kind].flatten()


def groups(change, kinds=KINDS):
    """A mistake of some kinds: change(groups (n, G), centred (n, G), kind) -> (n, G)."""
    def mistake(scores, group_size, kind):
        g = scores.view(-1, group_size)
        if kind not in kinds:
            return right(scores, group_size, kind)
        return change(g, g - g.mean(1, keepdim=True), kind).flatten()

    return mistake


def reordered(scores, group_size, kind, view, size):
    """Right, if the responses to a prompt stood in the rows of view."""
    order = torch.arange(len(scores)).view(*view).T.flatten()
    found = torch.empty_like(scores)
    found[order] = right(scores[order], size, kind)
    return found


MISTAKES = {
    "grpo: you divide the sum of squares by group_size; wanted is group_size - 1":
        groups(lambda g, x, kind: x / (g.std(1, keepdim=True, unbiased=False) + 1e-4), ["grpo"]),
    "grpo: without the 1e-4 a group of equal scores is 0 / 0: NaN":
        groups(lambda g, x, kind: x / g.std(1, keepdim=True), ["grpo"]),
    "grpo: 1e-4 is wanted beside the deviation; yours is smaller, such as 1e-8":
        groups(lambda g, x, kind: x / (g.std(1, keepdim=True) + 1e-8), ["grpo"]),
    "maxrl: 1e-4 is wanted beside the mean; yours is smaller, such as 1e-8":
        groups(lambda g, x, kind: x / (g.mean(1, keepdim=True) + 1e-8), ["maxrl"]),
    "you compare with all responses; compare with those to the same prompt":
        groups(lambda g, x, kind: right(g.flatten(), g.numel(), kind).view_as(g)),
    "your groups are mixed up: the responses to a prompt stand side by side, view(-1, group_size)":
        lambda x, size, kind: reordered(x, size, kind, (size, -1), size),
    "you have taken view(group_size, -1) for groups, and means along its rows: a group has then as "
    "many scores as there are prompts. view(-1, group_size)":
        lambda x, size, kind: right(x, len(x) // size, kind),
    "your mean goes over the prompts (axis 0 of view(-1, group_size)); over a group's responses is "
    "wanted, axis 1":
        lambda x, size, kind: reordered(x, size, kind, (-1, size), len(x) // size),
    "rloo: your mean contains the response itself": groups(lambda g, x, kind: x, ["rloo"]),
    "rloo: you divide by the deviation; RLOO does not": groups(lambda g, x, kind: x * g.shape[1] / (
        g.shape[1] - 1) / (g.std(1, keepdim=True) + 1e-4), ["rloo"]),
    "dr_grpo: you divide by the deviation; Dr. GRPO does not, and that is its point":
        groups(lambda g, x, kind: x / (g.std(1, keepdim=True) + 1e-4), ["dr_grpo"]),
    "grpo: the division by the deviation is missing": groups(lambda g, x, kind: x, ["grpo"]),
    "maxrl: the division by the mean is missing": groups(lambda g, x, kind: x, ["maxrl"]),
    "grpo: the mean of the group is not subtracted: with scores of 0 and more nothing is punished":
        groups(lambda g, x, kind: g / (g.std(1, keepdim=True) + 1e-4), ["grpo"]),
}


def weights(lengths, kind, max_length):
    lengths = lengths.tolist()
    return torch.tensor([{"grpo": 1 / (n * len(lengths)), "dapo": 1 / sum(lengths),
                          "dr_grpo": 1 / (max_length * len(lengths))}[kind] for n in lengths],
                        dtype=torch.float64)


def wrong_weights(kind, weight):
    def mistake(lengths, asked, max_length):
        if asked != kind:
            return weights(lengths, asked, max_length)
        return weight(lengths.double(), max_length) + torch.zeros(len(lengths)).double()

    return mistake


WEIGHTS = {
    "grpo: divide by the number of responses, too": wrong_weights("grpo", lambda n, m: 1 / n),
    "grpo: this is the mean over all tokens, which is dapo's; each response has a mean of its own":
        wrong_weights("grpo", lambda n, m: 1 / n.sum()),
    "dapo: one divisor for the batch, its number of tokens; you divide by each response's":
        wrong_weights("dapo", lambda n, m: 1 / n / len(n)),
    "dr_grpo: divide by max_length, a constant, and not by the longest response of this batch":
        wrong_weights("dr_grpo", lambda n, m: 1 / n.max() / len(n)),
    "dr_grpo: divide by the number of responses, too":
        wrong_weights("dr_grpo", lambda n, m: 1 / m),
    "these are the weights of whole responses; of each of its tokens is wanted, so divide by its "
    "length": lambda n, kind, m: weights(n, kind, m) * n,
    "these are the divisors; the weight is 1 / them": lambda n, kind, m: 1 / weights(n, kind, m),
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

"""Draws the pictures of the course, as SVG: python course/pictures.py"""
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(HERE))

import matplotlib  # noqa: E402
import torch  # noqa: E402

matplotlib.use("Agg")
matplotlib.rcParams.update({"svg.hashsalt": "quartet", "svg.fonttype": "none",
                            "font.size": 11, "axes.spines.top": False,
                            "axes.spines.right": False})

import matplotlib.pyplot as plt  # noqa: E402

from gae import compute_gae  # noqa: E402
from groups import group_advantages, token_weights  # noqa: E402
from formulas import kl_estimate  # noqa: E402

BLUE, ORANGE, GREEN, GREY = "C0", "C1", "C2", "0.6"


def draw(name, width, height, columns=1):
    """A decorator: the function draws into axes, and the picture is saved under a name."""
    def with_axes(function):
        figure, axes = plt.subplots(1, columns, figsize=(width, height), layout="constrained",
                                    squeeze=False)
        function(*axes[0])
        figure.savefig(os.path.join(HERE, "pictures", f"{name}.svg"), metadata={"Date": None})

    return with_axes


@draw("sampling", 7, 1.9)
def sampling(axis):
    """Lesson 1: a random number falls on one of the probabilities."""
    left = 0.0
    for word, p, colour in (("7", 0.2, BLUE), ("5", 0.5, ORANGE), ("EOS", 0.3, GREEN)):
        axis.barh(0, p, left=left, color=colour, alpha=0.5, edgecolor="black")
        axis.text(left + p / 2, 0, f"{word}\n{p}", ha="center", va="center")
        left += p
    axis.annotate("uniform number 0.35", (0.35, 0.4), (0.35, 0.95), ha="center",
                  arrowprops=dict(arrowstyle="->"))
    axis.set(yticks=[], xticks=[0, 0.2, 0.7, 1], ylim=(-0.45, 1.15),
             title="The token is drawn: here 5")
    axis.spines["left"].set_visible(False)


@draw("baseline", 7, 3)
def baseline(axis):
    """Lesson 2: the push of each of two answers, for three baselines."""
    p, rewards = torch.tensor([0.3, 0.7]), torch.tensor([11.0, 10.0])
    for i, b in enumerate((0.0, 10.3, 10.0)):
        pushes = (rewards - b) * torch.tensor([0.7, -0.3])  # in the logit of the right answer
        mean, deviation = (p * pushes).sum(), ((p * (pushes - (p * pushes).sum())**2).sum()).sqrt()
        axis.bar(i, mean, color=BLUE, yerr=deviation, capsize=8)
        axis.text(i + 0.08, mean + 0.1, f" {mean:.2f} ± {deviation:.2f}")
    axis.set_xticks(range(3), [f"baseline: {words}" for words in
                               ("none", "10.3, the mean score", "10")])
    axis.set(title="The gradient's mean stays, its noise goes")


@draw("gae", 8, 3, 2)
def gae(left, right):
    """Lesson 3: one reward at the end, and what lam makes of it."""
    T = 10
    rewards, mask = torch.zeros(1, T), torch.ones(1, T, dtype=torch.bool)
    rewards[0, -1] = 1.0
    values = torch.tensor([[0.3, 0.3, 0.35, 0.3, 0.7, 0.75, 0.7, 0.75, 0.8, 0.9]])
    left.plot(values[0], marker="o", color=GREY)
    left.set(title="Values: what is still to come", xlabel="token", ylim=(0, 1.05))
    for lam, colour in ((0.0, BLUE), (0.95, ORANGE), (1.0, GREEN)):
        right.plot(compute_gae(rewards, values, mask, 1.0, lam)[0][0], marker="o", color=colour,
                   label=f"lam = {lam:g}")
    right.set(title="Advantages: token 3 was good", xlabel="token")
    right.legend(frameon=False)


@draw("clip", 8, 3, 2)
def clip(good, bad):
    """Lesson 4: the loss of one token over its ratio."""
    ratio = torch.linspace(0, 2, 401)
    for axis, advantage in ((good, 1.0), (bad, -1.0)):
        plain, clipped = -advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)
        axis.plot(ratio, plain, "--", color=GREY, label="without the clip")
        axis.plot(ratio, torch.max(plain, clipped), color=BLUE, linewidth=2.5, label="PPO's loss")
        axis.axvspan(0.8, 1.2, color=GREY, alpha=0.2)
        axis.set(title=f"advantage {advantage:g}", xlabel="ratio", ylabel="loss")
    good.legend(frameon=False)


@draw("kl", 6, 3.2)
def kl(axis):
    """Lesson 5: three estimates over the ratio of the probabilities."""
    ratio = torch.linspace(0.15, 3.5, 300)  # p / q
    for kind, colour in (("k1", BLUE), ("k2", ORANGE), ("k3", GREEN)):
        axis.plot(ratio, kl_estimate(ratio.log(), torch.zeros(300), kind), color=colour, label=kind)
    axis.axhline(0, color="black", linewidth=0.8)
    axis.set(xlabel="p / q of the token that was drawn", ylabel="estimate (nats)", ylim=(-2, 3.2),
             title="Three estimates of the KL")
    axis.legend(frameon=False)


@draw("groups", 8, 3, 2)
def groups(left, right):
    """Lesson 7: advantages of a group, and weights of a token."""
    shares = range(1, 8)
    for scale, colour, words in (("std", BLUE, "GRPO"), ("none", ORANGE, "Dr. GRPO")):
        first = [group_advantages(torch.tensor([1.0] * n + [0.0] * (8 - n)), 8, scale)[0]
                 for n in shares]
        left.plot(shares, first, marker="o", color=colour, label=words)
    left.set(title="Advantage of a right answer", xlabel="right answers of 8")
    left.legend(frameon=False)
    lengths = torch.tensor([10, 40, 100])
    mask = torch.arange(128) < lengths[:, None]
    for aggregation, colour, words in (("seq-mean-token-mean", BLUE, "GRPO"),
                                       ("token-mean", GREEN, "DAPO"),
                                       ("seq-mean-token-sum-norm", ORANGE, "Dr. GRPO")):
        sums = token_weights(mask, aggregation, 128).sum(1)
        right.plot(lengths, sums, marker="o", color=colour, label=words)
    right.set(title="Weight of a whole response", xlabel="its tokens", ylim=(0, None))
    right.legend(frameon=False)

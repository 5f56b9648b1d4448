"""
docs/algorithms.md: the code that it quotes stands in the files, and its numbers are true; it says
more of the keys whose comment has a +.
"""
import re

import torch

from configurator import read_keys
from conftest import ROOT
from gae import compute_gae
from groups import group_advantages, token_weights
from formulas import kl_estimate, masked_whiten

with open(f"{ROOT}/docs/algorithms.md", encoding="utf-8") as f:
    PAGE = f.read()
PROSE = " ".join(PAGE.split())
ONE = torch.ones(1, 3, dtype=torch.bool)


def row(label):
    """The numbers behind the label of a row of a table."""
    (line,) = re.findall(rf"^\| {re.escape(label)} \|(.*)\|$", PAGE, re.MULTILINE)
    return [float(cell) for cell in line.split("|")]


def shown(x):
    """Numbers as the page shows them."""
    return [round(number, 4) + 0.0 for number in torch.as_tensor(x).flatten().tolist()]


def code_of(text):
    """The lines of a text without indentation and comments, one after the other."""
    lines = [re.sub(r"(^|\s+)# .*", "", line).strip() for line in text.splitlines()]
    return "\n".join(["", *filter(None, lines), ""])


def test_quoted_code_stands_in_the_file():
    form = r"^In `(\w+\.py)`:(?: (`[^\n]+`)$|\n\n```python\n(.*?)```)"  # in the line, or a block
    quotes = re.findall(form, PAGE, re.MULTILINE | re.DOTALL)
    assert len(quotes) == len(re.findall("^In `", PAGE, re.MULTILINE)) > 8
    for file, inline, block in quotes:
        with open(f"{ROOT}/{file}", encoding="utf-8") as f:
            source = code_of(f.read())
        for quote in re.findall("`(.*?)`", inline) or [block]:
            assert code_of(quote) in source, (file, quote)


def test_a_response_of_three_tokens():
    p, q = (torch.tensor([row(f"probability, {name}")]) for name in ("policy", "reference"))
    for kind in ("k1", "k2", "k3"):
        assert shown(kl_estimate(p.log(), q.log(), kind)) == row(kind)
    rewards = -0.1 * kl_estimate(p.log(), q.log(), "k1") + torch.tensor([[0, 0, 1.0]])
    assert shown(rewards) == row("reward, by k1")
    values = torch.tensor([row("value V")])
    for lam, label in ((0, "delta = A with lam = 0"), (0.95, "A with lam = 0.95"),
                       (1, "A with lam = 1")):
        assert shown(compute_gae(rewards, values, ONE, 1.0, lam)[0]) == row(label)
    advantages, returns = compute_gae(rewards, values, ONE, 1.0, 0.95)
    assert shown(returns) == row("return = A + V, lam = 0.95")
    assert shown(masked_whiten(advantages, ONE)) == row("A with lam = 0.95, whitened")


def test_groups():
    scores = torch.tensor([1.0, 0, 0, 1, 0, 0, 0, 0])
    assert shown(group_advantages(scores, 8, "none")[:2]) == row("score - mean")
    assert shown(group_advantages(scores, 8)[:2]) == row("A = (score - mean) / deviation")
    others = shown(group_advantages(scores, 8, "none", "others")[:2])
    says = [f"= {scores.std():.4f}", f"1 - 1/7 = {others[0]}", f"0 - 2/7 = {others[1]}"]
    for n in (1, 4):
        scores = (torch.arange(8) < n).float()
        says += [f"{scores.std():.4f} and", f"A = {group_advantages(scores, 8)[0]:.4f}"]
    assert not [words for words in says if words not in PROSE]


def test_what_a_token_counts():
    mask = torch.arange(40) < torch.tensor([[10], [40]])
    for label in re.findall(r"^\| (`\S+-\S+` \(.+?\)) ", PAGE, re.MULTILINE):
        weights = token_weights(mask, label.split("`")[1], 50)
        assert shown(torch.cat([weights[:, 0], weights.sum(1)])) == row(label)



def test_marked_keys_have_a_paragraph():
    """As in `# *+ weight of the KL`, in the comment or above it."""
    marked = {name for file in ("ppo.py", "grpo.py", "config/keys.py")
              for name, key in read_keys(f"{ROOT}/{file}").items()
              if any(re.match(r"\*?\+ ", text) for text in (key.comment, *key.headings))}
    _, keys = PAGE.split("\n## Keys\n")
    assert marked == set(re.findall(r"^### (\w+)$", keys, re.MULTILINE)) and len(marked) > 15

"""The worked examples of docs/algorithms.md and docs/rewards.md, computed by the code; and the lines of code quoted there."""
import json
import os
import re
import textwrap

import pytest
import torch
from conftest import ROOT

from options.judging import log_odds
from grading.programs import check_tests
from gae import compute_gae
from examples import preference_loss
from loss import kl_estimate, masked_whiten
from relatives import group_advantages, token_weights

with open(os.path.join(ROOT, "docs", "algorithms.md"), encoding="utf-8") as _f:
    PAGE = _f.read()
with open(os.path.join(ROOT, "docs", "rewards.md"), encoding="utf-8") as _f:
    REWARDS = _f.read()
PROSE = " ".join(PAGE.split())


def table_row(label):
    """The cells behind the label of every row of the page that has it."""
    found = [line.split("|")[2:-1] for line in PAGE.splitlines() if line.startswith(f"| {label} |")]
    assert found, f"no row {label!r}"
    return [[cell.strip() for cell in cells] for cells in found]


def numbers(label, which=0):
    return [float(cell) for cell in table_row(label)[which]]


def says(*texts):
    for text in texts:
        assert text in PROSE, text


def close(x, wanted, digits=4):
    """Whether numbers are, rounded to so many digits, those wanted."""
    x = x.flatten().tolist() if isinstance(x, torch.Tensor) else list(x)
    return [f"{a:.{digits}f}".replace("-0.0000", "0.0000") for a in x] == [f"{a:.{digits}f}" for a in wanted]


# ---------------------------------------------------------------------------------------------------------------------
# quoted lines

QUOTE = re.compile(r"In `([\w/]+\.py)`[^`:]*: *(?:\n\n```python\n(.*?)```|`([^`\n]+)`$)", re.DOTALL | re.MULTILINE)


def code_of(text):
    """The lines of code of a text, without indentation, blank lines and comments."""
    lines = [re.sub(r"(^|\s+)# .*", "", line).strip() for line in text.splitlines()]
    return [line for line in lines if line]


def quotes():
    """[(file, lines that follow each other in it)] of the page; a line "..." parts two such pieces of a quote."""
    return [(path, code_of(piece)) for path, block, line in QUOTE.findall(PAGE)
            for piece in re.split(r"^\.\.\.$", block or line, flags=re.M)]


def test_quoted_lines_stand_in_the_file():
    assert len(QUOTE.findall(PAGE)) == len(re.findall(r"^In `", PAGE, re.MULTILINE)) > 10
    for path, lines in quotes():
        with open(os.path.join(ROOT, path), encoding="utf-8") as f:
            source = code_of(f.read())
        assert lines and any(source[i:i + len(lines)] == lines for i in range(len(source))), f"{path} does not have {lines}"


# ---------------------------------------------------------------------------------------------------------------------
# worked examples


@pytest.fixture
def example():
    """The response of three tokens, computed: its KL, rewards, values and advantages."""
    p, q = (torch.tensor([numbers(f"probability, {name}")]) for name in ("policy", "reference"))
    kl = kl_estimate(p.log(), q.log(), "k1")
    rewards = -0.1 * kl
    rewards[0, -1] += 1
    values, mask = torch.tensor([numbers("value V")]), torch.ones(1, 3, dtype=torch.bool)
    return p, q, kl, rewards, values, mask


def test_rewards_a_token(example):
    p, q, kl, rewards, _, _ = example
    assert close(rewards, numbers("reward, by k1"))
    says(f"= {kl.sum().item():.4f}")
    for kind in ("k1", "k2", "k3"):
        assert close(kl_estimate(p.log(), q.log(), kind), numbers(kind))


def test_advantages_a_token(example):
    _, _, _, rewards, values, mask = example
    rows = {0.0: "delta = A with lam = 0", 0.95: "A with lam = 0.95", 1.0: "A with lam = 1"}
    for lam, label in rows.items():
        assert close(compute_gae(rewards, values, mask, 1.0, lam)[0], numbers(label))
    advantages, returns = compute_gae(rewards, values, mask, 1.0, 0.95)
    assert close(returns, numbers("return = A + V, lam = 0.95"))
    assert close(masked_whiten(advantages, mask), numbers("A with lam = 0.95, whitened"))
    says("A_2 = 0.2000 + 0.95 * 0.2693 = 0.4558")


def test_pairs():
    chosen, rejected = torch.tensor([2.0, 1.0, 1.0]), torch.tensor([1.0, 1.0, 2.0])
    a, b, c = preference_loss(chosen, rejected).tolist()
    text = " ".join(REWARDS.split())
    assert f"Scores of 2 and 1 have the loss {a:.4f}, equal scores {b:.4f}, and scores of 1 and 2 have {c:.4f}" in text


def test_the_reward_of_ones_own_runs():
    (source,) = re.findall(r"^    # mine\.py\n((?:    .*\n)+)", REWARDS, re.MULTILINE)
    namespace = {}
    exec(textwrap.dedent(source), namespace)
    assert namespace["brevity"](dict(completions=["ab", ""])) == pytest.approx([1 / 3, 1])


def test_the_tests_of_a_row_are_tests():
    rows = [json.loads(line) for line in re.findall(r'^    (\{".*\}|"assert .*")$', REWARDS, re.MULTILINE)]
    assert len(rows) == 4
    calls, outputs, scripts = check_tests(rows, "docs")
    assert calls == [("add", [1, 2]), ("add", [3, 4]), ("Solution.add", [1, 2]), ("add", [1, 2])]
    assert (outputs, scripts) == ([3, 7, 3, 3], [(b"1 2", b"3")])


def test_groups():
    scores = torch.tensor([1.0, 0, 0, 1, 0, 0, 0, 0])
    assert close(group_advantages(scores, 8, "none")[:2], numbers("score - mean"))
    assert close(group_advantages(scores, 8)[:2], numbers("A = (score - mean) / deviation"))
    others = group_advantages(scores, 8, "none", "others")[:2].tolist()
    says(f"= {scores.std().item():.4f}", f"1 - 1/7 = {others[0]:.4f}", f"0 - 2/7 = {others[1]:.4f}")
    for right in (1, 4):
        scores = torch.tensor([1.0] * right + [0.0] * (8 - right))
        a = group_advantages(scores, 8)[0].item()
        says(f"{scores.std().item():.4f} and the right answer has A = {a:.4f}" if right == 1 else
             f"{scores.std().item():.4f} and A = {a:.4f}")


def test_what_a_token_counts():
    mask = torch.arange(40) < torch.tensor([[10], [40]])
    labels = {"seq-mean-token-mean": "`seq-mean-token-mean` (GRPO)", "token-mean": "`token-mean` (DAPO)",
              "seq-mean-token-sum-norm": "`seq-mean-token-sum-norm` (Dr. GRPO)"}
    for aggregation, label in labels.items():
        weights = token_weights(mask, aggregation, 50)
        assert close(torch.cat([weights[:, 0], weights.sum(1)]), numbers(label))


def test_scores_of_a_judge():
    assert "p(A) = 0.6, p(B) = 0.2, other tokens 0.2: the score is log 3 = 1.0986." in REWARDS
    assert log_odds(torch.tensor([0.6, 0.2]).log()).item() == pytest.approx(1.0986, abs=5e-5)
    assert "p = 0.5, 0.3 and 0.2: log(0.65 / 0.35) = 0.6190" in REWARDS
    assert log_odds(torch.tensor([0.5, 0.3, 0.2]).log()).item() == pytest.approx(0.6190, abs=5e-5)
    p = torch.arange(1.0, 11)  # of ten grades it is the logit of the expected grade g
    g = (p / p.sum() * torch.arange(10, 0, -1)).sum()
    assert log_odds(p.log()).item() == pytest.approx(((g - 1) / (10 - g)).log().item(), abs=1e-6)

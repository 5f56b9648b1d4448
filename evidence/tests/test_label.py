"""data/label.py: its pairs against a loop written by hand, in both orders; and what it refuses."""
import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from by_hand import ENDS, TOKENS, decode, encode, language_model, noise_of, sample
from tiny import keys_of, read_jsonl, said_by, well, write

SAMPLES, C = 12, SimpleNamespace(seed=3, max_new_tokens=6, temperature=1.0)


def label(world, folder, **keys):
    write(folder / "compare.txt", "answers: a c\n{prompt}{first}|{second}")
    write(folder / "grade.txt", "answers: A B\n{prompt}{response}?")
    return said_by("data/label.py", folder, dict(
        policy_path=world.policy, judge_path=world.older, judge_template="compare.txt",
        prompts_path=world.rl_train, samples=SAMPLES, max_new_tokens=6, batch_size=40,
        micro_batch_size=7, seed=3, dtype="float64", device_type="cpu", out="labels.jsonl")
        | keys)


@pytest.fixture(scope="module")
@torch.no_grad()
def by_hand(world):
    """
    [(prompt, one answer, the other one, log-odds that the first is better: one first, other first;
    each one's grade)] of all pairs that have an answer each, and how many have not.
    """
    policy, judge = map(language_model, (world.policy, world.older))

    def odds(text, a, b):
        logits = judge(torch.tensor([encode(text)])).logits[0, -1, :TOKENS]
        return (logits[ord(a)] - logits[ord(b)]).item()

    found, left_out = [], dict(ended=0, same=0)
    for i, row in enumerate(world.rows["rl_train"]):
        asked = row["prompt"]
        answers = [sample(C, policy, encode(asked), noise_of(C, "label", 0, i, which))
                   for which in range(SAMPLES)]
        for ids, others in zip(answers[::2], answers[1::2], strict=True):
            one, other = decode(ids), decode(others)
            if not ({ids[-1], others[-1]} <= {*ENDS} and one.strip() and other.strip()):
                left_out["ended"] += 1
            elif one == other:
                left_out["same"] += 1
            else:
                both = [odds(f"{asked}{a}|{b}", "a", "c") for a, b in ((one, other), (other, one))]
                grades = [odds(f"{asked}{text}?", "A", "B") for text in (one, other)]
                found.append((asked, one, other, *both, *grades))
    return found, left_out


def pair(prompt, one, other, odds):
    chosen, rejected = (one, other) if odds > 0 else (other, one)
    return dict(prompt=prompt, chosen=chosen, rejected=rejected,
                confidence=1 / (1 + math.exp(-abs(odds))))


def alike(got, want):
    assert [r | dict(confidence=0) for r in got] == [r | dict(confidence=0) for r in want]
    sure = [r["confidence"] for r in want]
    assert [r["confidence"] for r in got] == pytest.approx(sure, abs=1e-9)


def test_pairs_by_hand(world, tmp_path, by_hand):
    """Kept is what is said in both orders; the margin is the mean of both. rm.py reads them."""
    found, left_out = by_hand
    want = [pair(*said, (f - b) / 2) for *said, f, b, _, _ in found if f > 0 > b or f < 0 < b]
    said = label(world, tmp_path)
    assert 2 <= len(want) < len(found) and left_out["ended"] > 2
    alike(read_jsonl(tmp_path / "labels.jsonl"), want)
    assert f"cut off or empty {left_out['ended']}, the same text {left_out['same']}, " in said
    first, second = (sum(f * sign > 0 and b * sign > 0 for *_, f, b, _, _ in found)
                     for sign in (1, -1))
    for count in (len(want), first, second):
        assert f"{count / len(found):.1%}" in said
    well("rm.py", tmp_path / "rm", keys_of(world, "rm.py", val_path="", max_iters=1,
                                           train_path=f"{tmp_path}/labels.jsonl"))


# pairs of the prompts, in their order: 2 2 3 2 3 2 3 1
@pytest.mark.parametrize("pairs, held_out, train, val", [
    (3, 2, range(3), [4, 5]), (16, 2, range(14), [16, 17])])
def test_no_prompt_is_on_both_sides(world, tmp_path, by_hand, pairs, held_out, train, val):
    """
    A judge that sees one answer at a time has no order: the better grade wins. Where fewer pairs
    are left than are wanted, the last ones are held out.
    """
    want = [pair(*said, a - b) for *said, _, _, a, b in by_hand[0]]
    counts = [len([*group]) for _, group in itertools.groupby(row["prompt"] for row in want)]
    assert counts == [2, 2, 3, 2, 3, 2, 3, 1]
    said = label(world, tmp_path, judge_template="grade.txt", pairs=pairs, held_out=held_out)
    alike(read_jsonl(tmp_path / "labels.jsonl"), [want[i] for i in train])
    alike(read_jsonl(tmp_path / "labels_val.jsonl"), [want[i] for i in val])
    lost = 0 if pairs == 3 else len(want) - len(val) - len(train)
    assert f"of a held-out prompt {lost}\n" in said

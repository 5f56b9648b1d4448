"""data/label.py: its pairs against a loop written by hand, in both orders; and what it refuses."""
import math
import re

import pytest
import torch
import transformers
from tiny import (ENDS, EOS, MARKERS, Started, keys_of, read_jsonl, typed, well,
                  write)

from rollout import response_uniforms

SEED, SAMPLES, R = 3, 12, 6


def label(world, folder, **keys):
    write(folder / "compare.txt", "answers: a c\n{prompt}{first}|{second}")
    write(folder / "grade.txt", "answers: A B\n{prompt}{response}?")
    write(folder / "half.txt", "answers: a c\n{prompt}{first}")
    return Started("data/label.py", typed(dict(
        policy_path=world.policy, judge_path=world.older, judge_template="compare.txt",
        prompts_path=world.rl_train, samples=SAMPLES, max_new_tokens=R, batch_size=40,
        micro_batch_size=7, seed=SEED, dtype="float64", device_type="cpu", out="labels.jsonl")
        | keys), str(folder)).wait()


def encode(text):
    return [i for part in re.split("(</?think>)", text) for i in (
        [256 + MARKERS.index(part)] if part in MARKERS else part.encode())]


def decode(ids):
    return b"".join(MARKERS[i - 256].encode() if i > 255 else bytes([i])
                    for i in ids if i != EOS).decode(errors="replace")


@pytest.fixture(scope="module")
@torch.no_grad()
def by_hand(world):
    """
    [(prompt, one answer, the other one, log-odds that the first is better: one first, other first;
    each one's grade)] of all pairs that have an answer each, and how many have not.
    """
    policy, judge = (transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float64).eval() for path in (world.policy, world.older))

    def logits(model, ids):
        return model(torch.tensor([ids])).logits[0, -1, :260]

    def odds(text, a, b):
        found = logits(judge, encode(text))
        return (found[ord(a)] - found[ord(b)]).item()

    def sample(prompt, uniforms):
        ids = []
        for u in uniforms.tolist():
            cdf = logits(policy, encode(prompt) + ids).softmax(-1).cumsum(0)
            ids.append(int((cdf <= u).sum()))
            if ids[-1] in ENDS:
                return decode(ids), True
        return decode(ids), False

    found, left_out = [], dict(ended=0, same=0)
    for i, row in enumerate(world.rows["rl_train"]):
        uniforms = response_uniforms(SEED, "label", 0, [i] * SAMPLES, R, list(range(SAMPLES)))
        answers = [sample(row["prompt"], u) for u in uniforms]
        for (one, ended), (other, too) in zip(answers[::2], answers[1::2], strict=True):
            if not (ended and too and one.strip() and other.strip()):
                left_out["ended"] += 1
            elif one == other:
                left_out["same"] += 1
            else:
                asked = row["prompt"]
                found.append((
                    asked, one, other, odds(f"{asked}{one}|{other}", "a", "c"),
                    odds(f"{asked}{other}|{one}", "a", "c"), odds(f"{asked}{one}?", "A", "B"),
                    odds(f"{asked}{other}?", "A", "B")))
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
    result = label(world, tmp_path)
    assert result.codes == [0], result
    assert 2 <= len(want) < len(found) and left_out["ended"] > 2
    alike(read_jsonl(tmp_path / "labels.jsonl"), want)
    said = result.out[0]
    assert f"cut off or empty {left_out['ended']}, the same text {left_out['same']}, " in said
    first, second = (sum(f * sign > 0 and b * sign > 0 for *_, f, b, _, _ in found)
                     for sign in (1, -1))
    for count in (len(want), first, second):
        assert f"{count / len(found):.1%}" in said
    well("rm.py", tmp_path / "rm", keys_of(world, "rm.py", val_path="", max_iters=1,
                                           train_path=f"{tmp_path}/labels.jsonl"))


def test_parts_and_grades_by_hand(world, tmp_path, by_hand):
    """A judge that sees one answer at a time has no order: the better grade wins."""
    want = [pair(*said, a - b) for *said, _, _, a, b in by_hand[0]]
    sure = [row for row in want if row["confidence"] >= 0.55]
    assert 4 <= len(sure) < len(want)
    result = label(world, tmp_path, judge_template="grade.txt", out="deep/graded.jsonl", pairs=2,
                   held_out=2, min_confidence=0.55, batch_size=36)
    assert result.codes == [0], result
    alike(read_jsonl(tmp_path / "deep" / "graded.jsonl"), sure[:2])
    alike(read_jsonl(tmp_path / "deep" / "graded_val.jsonl"), sure[2:4])

"""rewards.py: a reward model's scalar is read at the last real token, whatever surrounds it, of the text in its own tokens."""
import ast
import re
import textwrap

import pytest
import torch

from model import freeze, from_scratch, load_model
import rewards
from engine.answers import final_answer
from rewards import (accuracy, alike_for_equal_texts, last_real, read_texts, score_sequences,
                     thinks)

from families import make, padded
from tiny import byte_tokenizer

LENGTHS = [9, 12, 1, 4, 7, 12, 2]
MARKERS = ["<think>", "</think>"]


class CountingModel(torch.nn.Module):
    """A reward model whose scalar at a token is 1000 * how many real tokens there are up to it, plus the token."""

    def __init__(self, score_shift=0.0):
        super().__init__()
        self.score = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
        self.score_shift, self.max_positions = score_shift, 64
        self.calls = []  # the lengths of each

    def scores(self, tokens, last):
        self.calls.append((last + 1).tolist())
        return (1000 * (last + 1) + tokens[torch.arange(len(tokens)), last]).double() + self.score_shift


def test_equal_texts_have_equal_scores():
    """The first one's; and padding that looks like a token makes no two texts equal."""
    tokens = torch.tensor([[5, 6, 7], [0, 6, 7], [5, 6, 7], [0, 6, 7], [0, 6, 7], [5, 6, 8], [5, 6, 7]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 1], [0, 1, 1], [0, 1, 1], [1, 1, 1], [1, 1, 0]]).bool()
    scores = torch.tensor([1.0, 2.0, 1.5, 3.0, 4.0, 5.0, 6.0])
    found = alike_for_equal_texts(scores, dict(tokens=tokens, attention_mask=mask))
    assert found.tolist() == [1, 2, 1, 3, 3, 5, 6]


def scalar_model(vocab_size=260, score_shift=0.0, dtype=torch.float64):
    """A random reward model that tells positions and tokens apart."""
    config = dict(model_type="gpt2", vocab_size=vocab_size, n_embd=16, n_layer=2, n_head=2, n_positions=64,
                  initializer_range=0.25)
    model = freeze(from_scratch(config, head="scalar", seed=5, dtype=dtype))
    model.score_shift = score_shift
    return model


def ids(text, markers=MARKERS):
    """Ids of a text by hand: bytes, and from 256 on the markers, EOS ("<eos>") and padding."""
    out, specials = [], [*markers, "<eos>"]
    while text:
        found = next((s for s in specials if text.startswith(s)), None)
        out += [256 + specials.index(found)] if found else list(text[0].encode())
        text = text[len(found or text[0]):]
    return out


def alone(model, sequence):
    """The scalar of one unpadded sequence at its last token."""
    return model.scores(torch.tensor([sequence]), torch.tensor([len(sequence) - 1])).item()


def test_the_headers_example():
    """The batch in rewards.py's header, run as it is printed there, gives the scores printed behind it; the docstrings' cases."""
    example = textwrap.dedent(re.search(r"^    batch = dict\(.*?\n\n", rewards.__doc__, re.DOTALL | re.MULTILINE)[0])
    names = dict(accuracy=accuracy, format=rewards.format)
    exec(example, names)
    for name in ("accuracy", "format"):
        printed = ast.literal_eval(re.search(rf"{name}\(batch\) +# (\[.*?\])", example)[1])
        assert names[name](names["batch"]).tolist() == printed == [1.0, 0.0]
    begun = dict(rows=[{}], prompts=["7?<think>"], completions=["3+4</think>7"])
    assert rewards.whole_responses(begun) == ["<think>3+4</think>7"]
    lengths = torch.tensor([[80], [90], [100]])
    assert rewards.length(dict(response_mask=torch.arange(100) < lengths)).tolist() == pytest.approx([0, -0.5, -1])
    assert final_answer(r"<think>3+6+0=09</think>so \boxed{579}") == "579"
    assert last_real(torch.tensor([[False, True, True, False]])).tolist() == [2]


# the last real token


def test_last_real():
    rows = {"1": 0, "1111": 3, "0111": 3, "1100": 1, "0110": 2, "1000": 0, "0001": 3, "1011": 3, "1010": 2}
    for text, index in rows.items():
        assert last_real(torch.tensor([[c == "1" for c in text]])).tolist() == [index], text
    for T in (1, 2, 7, 300):
        mask = torch.arange(T) <= torch.arange(T)[:, None]  # row n is True up to n
        assert last_real(mask).tolist() == list(range(T))
        assert last_real(mask.flip(1)).tolist() == [T - 1] * T


@pytest.mark.parametrize("micro_batch_size", [1, 2, 3, 7, 50])
def test_the_last_real_token_is_read_wherever_it_is(micro_batch_size):
    """Left-padded prompts with right-padded responses: EOS and pad ids inside a sequence, or at its ends, mislead nobody."""
    E = 2  # EOS and padding alike
    tokens = torch.tensor([[E, E, E, 5, E, 7, E, E, E], [E, E, E, E, E, E, E, E, E], [3, E, E, E, 9, E, 4, 4, 8],
                           [E, E, E, 6, E, E, E, E, E], [E, E, 8, 8, 8, 8, E, E, E]])
    spans = [(3, 6), (2, 4), (0, 8), (3, 3), (1, 5)]  # where the sequences begin and end, both included
    mask = torch.tensor([[a <= t <= b for t in range(9)] for a, b in spans])
    want = [4000 + E, 3000 + E, 9000 + 8, 1000 + 6, 5000 + 8]
    model = CountingModel(score_shift=0.5)
    scores = score_sequences(model, tokens, mask, micro_batch_size)
    assert scores.tolist() == [x + 0.5 for x in want]
    assert len(model.calls) == -(-5 // micro_batch_size) and max(map(len, model.calls)) <= micro_batch_size
    assert sorted(sum(model.calls, [])) == [1, 3, 4, 5, 9]  # no padding at all


@pytest.mark.parametrize("variant", ["gpt2", "gpt_neox", "mistral-window", "qwen3"])
@torch.no_grad()
def test_padding_and_micro_batches_do_not_matter(variant, tmp_path):
    """Every row as if it were alone and unpadded, 1e-10 in float64, 1e-4 in float32, plus the model's score_shift."""
    make(variant, head="scalar").save_pretrained(tmp_path)
    dtype, limit = (torch.float64, 1e-10) if variant.startswith("gpt") else (torch.float32, 1e-4)
    model = freeze(load_model(str(tmp_path), head="scalar", dtype=dtype))
    model.score_shift = -3.25
    for left in (True, False):
        tokens, mask = padded(LENGTHS, left)
        rows = [row[m].tolist() for row, m in zip(tokens, mask, strict=True)]
        want = torch.tensor([alone(model, row) for row in rows], dtype=dtype)
        assert want.std() > 0.1
        for micro_batch_size in (1, 2, 3, len(LENGTHS), 100):
            scores = score_sequences(model, tokens, mask, micro_batch_size)
            assert scores.dtype == dtype
            assert (scores - want).abs().max() < limit
        both = torch.nn.functional.pad(tokens, (4, 3), value=2), torch.nn.functional.pad(mask, (4, 3))
        assert (score_sequences(model, *both, 3) - want).abs().max() < limit
        flipped = score_sequences(model, tokens.flip(0), mask.flip(0), 2)
        assert (flipped.flip(0) - want).abs().max() < limit


def test_scores_are_at_least_float32():
    tokens, mask = padded([3, 5], True)
    for dtype, want in [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)]:
        assert score_sequences(scalar_model(dtype=dtype), tokens, mask, 2).dtype == want


# a learned reward for a batch of responses


ROWS = [("12+30=", "<think>40+2</think>42", True), ("1+1=", "<think>1<think>", False), ("7=", "", True), ("a<think>b", "é", True),
        ("1+1=", "2", False)]


def scores_of(rows, model, tokenizer, micro_batch_size=4):
    """What the reward model gives for [(prompt, completion, finished), ...]."""
    prompts, completions, finished = [dict(prompt=p) for p, _, _ in rows], [c for _, c, _ in rows], [f for _, _, f in rows]
    read = read_texts(prompts, completions, finished, tokenizer, model.max_positions, "cpu")
    return score_sequences(model, *read, micro_batch_size)


@pytest.mark.parametrize("micro_batch_size", [1, 2, 9])
@torch.no_grad()
def test_reward_of_the_text(micro_batch_size):
    """In the reward model's own tokens, EOS included where the response has ended by itself."""
    for markers in (MARKERS, MARKERS[::-1], ["<extra>", *MARKERS]):
        model = scalar_model(vocab_size=262, score_shift=0.75)
        sequences = [ids(p, markers) + ids(c, markers) + [256 + len(markers)] * f for p, c, f in ROWS]
        want = torch.tensor([alone(model, sequence) for sequence in sequences], dtype=torch.float64)
        got = scores_of(ROWS, model, byte_tokenizer(markers), micro_batch_size)
        assert (got - want).abs().max() < 1e-10
        assert (want[:, None] - want).abs().add(torch.eye(len(ROWS))).min() > 1e-4


def test_too_long_for_the_reward_model():
    """Its context has 64 positions. 63 letters and the EOS fit; of more it reads the first 64, an EOS not among them."""
    model = scalar_model()
    with torch.no_grad():
        full, ended = alone(model, ids("1=" + "x" * 62)), alone(model, ids("1=" + "x" * 61) + [258])
    rows = [("1=", "x" * 61, True), *(("1=", "x" * n, n != 62) for n in (62, 63, 100))]
    assert scores_of(rows, model, byte_tokenizer()).tolist() == pytest.approx([ended, full, full, full], abs=1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_empty_batch(dtype):
    """As on a rank that has no rows: no scores, of the type that some would have."""
    empty = dict(tokens=torch.zeros(0, 9, dtype=torch.int64), attention_mask=torch.zeros(0, 9, dtype=torch.bool),
                 response_mask=torch.zeros(0, 4, dtype=torch.bool), rows=[], completions=[],
                 finished=torch.zeros(0, dtype=torch.bool))
    scores = scores_of([], scalar_model(dtype=dtype), byte_tokenizer())
    assert scores.shape == (0,)
    assert scores.dtype == torch.promote_types(dtype, torch.float32)
    assert accuracy(empty).shape == thinks(empty).shape == (0,)

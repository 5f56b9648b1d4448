"""rewards.py: a reward model's scalar is read at the last real token, whatever surrounds it, of the text in its own tokens."""
import pytest
import torch

from model import freeze, from_scratch
from rewards import alike_for_equal_texts, read_texts, score_sequences

from tiny import byte_tokenizer

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


# the last real token


@pytest.mark.parametrize("micro_batch_size", [1, 3, 50])
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


# a learned reward for a batch of responses


ROWS = [("12+30=", "<think>40+2</think>42", True), ("1+1=", "<think>1<think>", False), ("7=", "", True), ("a<think>b", "é", True),
        ("1+1=", "2", False)]


def scores_of(rows, model, tokenizer, micro_batch_size=4):
    """What the reward model gives for [(prompt, completion, finished), ...]."""
    prompts, completions, finished = [dict(prompt=p) for p, _, _ in rows], [c for _, c, _ in rows], [f for _, _, f in rows]
    read = read_texts(prompts, completions, finished, tokenizer, model.max_positions, "cpu")
    return score_sequences(model, *read, micro_batch_size)


@pytest.mark.parametrize("micro_batch_size", [1, 9])
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

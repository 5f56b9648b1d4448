"""rewards.py: a reward model's scalar is read at the last real token, whatever surrounds it, of the text in its own tokens."""
import pytest
import torch

from rewards import alike_for_equal_texts, score_sequences


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

"""Texts one behind the other, without padding: what a model says of each is what it says of the text alone."""
import pytest
import torch

from engine.adapters import Adapted
from engine.pretrained import from_pretrained
from loss import response_logprobs, response_values
from model import document_attention, documents_seen, freeze
from packing import Pieces, as_partner, pack, pack_choices, pack_responses, pack_to_read, pick, places, shared_pieces, unpack

from families import VARIANTS, make

P, R = 8, 6
SIZES = [(8, 6), (3, 2), (5, 6), (8, 1), (4, 3), (4, 3)]  # tokens of prompt and response; two documents are of one length


def micro_batch(sizes=SIZES, like=(), seed=0):
    """
    Prompts padded on the left, responses on the right, with ids of the vocabulary for padding. like: the rows whose prompt is
    that of the row above.
    """
    tokens = torch.randint(0, 90, (len(sizes), P + R), generator=torch.Generator().manual_seed(seed))
    for row in like:
        tokens[row, :P] = tokens[row - 1, :P]
    column = torch.arange(P + R)
    first, last = (torch.tensor([n[i] for n in sizes]).view(-1, 1) for i in range(2))
    mask = (column >= P - first) & (column < P + last)
    return dict(tokens=tokens, attention_mask=mask, response_mask=mask[:, P:])


def loaded(variant, folder, head="lm"):
    make(variant).save_pretrained(folder)
    return from_pretrained(str(folder), head=head, dtype="float64")


def test_the_examples_of_the_docstrings():
    tokens = torch.tensor([[0, 1, 2, 3, 0], [4, 5, 6, 7, 8]])
    mb = dict(tokens=tokens, attention_mask=tokens > 0, response_mask=tokens[:, 2:] > 0)
    whole = pack(tokens, tokens > 0)
    assert whole.tokens.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]] and whole.positions.tolist() == [[0, 1, 2, 0, 1, 2, 3, 4]]
    assert whole.lengths == [3, 5] and not whole.wanted and whole.cells.tolist() == [1, 2, 3, 5, 6, 7, 8, 9]
    assert torch.equal(unpack(whole.tokens[0], whole.cells, tokens.shape), tokens)
    read = pack_responses(mb)
    assert read.tokens.tolist() == [[1, 2, 4, 5, 6, 7]] and read.positions.tolist() == [[0, 1, 0, 1, 2, 3]]
    assert read.lengths == [2, 4] and read.wanted == [0, 2, 1, 3] and read.cells.tolist() == [0, 1, 3, 4, 5]
    assert pick(read.tokens[..., None], read.wanted).flatten().tolist() == [1, 2, 5, 6, 7]
    assert unpack(torch.tensor([2, 3, 6, 7, 8]), read.cells, mb["response_mask"].shape).tolist() == [[2, 3, 0], [6, 7, 8]]
    assert read.chosen.tolist() == [2, 3, 6, 7, 8]
    # trained turns of dialogues: two of the first row; the first token, which no state chooses; no token
    ids, real = torch.arange(15).view(3, 5), torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 0, 0, 0]]).bool()
    trained = torch.tensor([[0, 1, 0, 1, 0], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]]).bool()
    some = pack_choices(ids, real, trained)
    assert some.tokens.tolist() == [[0, 1, 2, 5]] and some.lengths == [3, 1]
    assert some.wanted == [0, 1, 1, 2] and some.chosen.tolist() == [1, 3, 6]
    assert pack(tokens).lengths == [5, 5] and pack(tokens).tokens.flatten().equal(tokens.flatten())


# three rows with one prompt, one alone, two with one prompt, one with another prompt of that length, a prompt of one token
GROUPS = [(8, 6), (8, 2), (8, 6), (5, 3), (4, 1), (4, 6), (4, 2), (1, 3), (1, 5)]


@pytest.mark.parametrize("recomputed, sizes, like", [
    (False, SIZES, ()), (True, SIZES, ()), (False, GROUPS, (1, 2, 5, 8)), (True, GROUPS, (1, 2, 5, 8))],
    ids=["alone", "alone, recomputed", "shared", "shared, recomputed"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_packed_rows_are_as_if_alone(variant, recomputed, sizes, like, tmp_path):
    """Log-probs, entropies, values and gradients."""
    mb = micro_batch(sizes, like)
    assert pack_responses(mb).tokens.numel() == mb["attention_mask"].sum() - len(sizes) - (7 + 7 + 3 if like else 0)
    weights = torch.rand(3, len(sizes), R, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    model, scalar = (loaded(variant, tmp_path, head) for head in ("lm", "scalar"))
    model.recompute(recomputed)
    logprobs, entropy = response_logprobs(model, mb, 0.7, 90)
    values = response_values(scalar, mb)
    (torch.stack([logprobs, entropy, values]) * weights).sum().backward()
    got = [p.grad.clone() for m in (model, scalar) for p in m.parameters()]
    for m in (model, scalar):
        m.zero_grad()
        m.recompute(False)
    for row, (p, r) in enumerate(sizes):
        ids = mb["tokens"][row, P - p:P + r][None]
        logits = model(ids)[0, p - 1:-1] / 0.7
        logits[:, 90:] = -torch.inf
        said = logits.log_softmax(-1)
        alone = torch.stack([said.gather(1, ids[0, p:, None])[:, 0], torch.distributions.Categorical(logits=logits).entropy(),
                             scalar(ids)[0, p - 1:-1]])
        packed = torch.stack([logprobs[row], entropy[row], values[row]])
        assert (packed[:, :r] - alone).abs().max() < 1e-12 and not packed[:, r:].any()
        (alone * weights[:, row, :r]).sum().backward()
    want = [p.grad for m in (model, scalar) for p in m.parameters()]
    assert max((a - b).abs().max() for a, b in zip(got, want, strict=True)) < 1e-12


def test_pieces_by_hand():
    """The example of the docstring; and a document that is alone behind some that share, though it is as long."""
    pieces, lengths = shared_pieces([3, 5, 3], [0, 0, 2])
    assert pieces == Pieces([3, 2, 3, 1], [0, 1, 3, 1, 2], [0, 1, 4, 2]) and lengths == [3, 3, 5]
    # on a GPU the same is done by an index
    x = torch.arange(9)
    by_index = Pieces([], [], [], places([3, 2, 3, 1], pieces.order, "cpu"), places([3, 2, 1, 2, 3], pieces.first, "cpu"))
    assert torch.equal(by_index.repeat(x), pieces.repeat(x)) and torch.equal(by_index.once(by_index.repeat(x)), x)
    tokens = torch.tensor([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert pieces.repeat(tokens).tolist() == [1, 2, 3, 4, 5, 9, 4, 5, 6, 7, 8]
    assert pieces.once(pieces.repeat(tokens)).equal(tokens)
    pieces, lengths = shared_pieces([4, 5, 4, 5, 5], [0, 3, 0, 0, 1])
    assert pieces.sizes == [3, 1, 2, 4, 1, 4, 4] and lengths == [4, 4, 5, 5, 5]
    assert pieces.order == [0, 1, 3, 0, 2, 4, 5, 4, 6]


def test_pairs_share_what_they_have_in_common(tmp_path):
    """Read at the last tokens, two at a time; two of them are equal, of two the one continues the other, two have nothing."""
    texts = [[5, 6, 7, 8], [5, 6, 9], [5, 6, 9], [5, 6, 9], [4, 4], [4, 4, 4, 4], [1, 2], [3, 2]]
    tokens, mask = torch.zeros(8, 5, dtype=torch.int64), torch.zeros(8, 5, dtype=torch.bool)
    for row, ids in enumerate(texts):
        tokens[row, :len(ids)], mask[row, :len(ids)] = torch.tensor(ids), True
    is_last = mask & ~torch.nn.functional.pad(mask[:, 1:], (0, 1))
    shared = as_partner(tokens, mask & ~is_last)
    assert shared.sum(1).tolist() == [0, 2, 0, 2, 0, 1, 0, 0]
    packed = pack_to_read(tokens, mask, is_last, shared)
    assert packed.tokens.tolist() == [[5, 6, 7, 8, 9, 5, 6, 9, 9, 4, 4, 4, 4, 4, 1, 2, 3, 2]]
    model = loaded("qwen3", tmp_path, "scalar")
    said = model(packed.tokens, packed=packed)[0]
    alone = torch.stack([model(torch.tensor([ids]))[0, -1] for ids in texts])
    assert said.shape == (8,) and (said - alone).abs().max() < 1e-12


def test_adapters_read_packed_rows(tmp_path):
    base = loaded("llama3-gqa-tied", tmp_path)
    model, mb = Adapted(base, rank=3, seed=1), micro_batch(like=[5])
    for name, p in model.named_parameters():
        torch.nn.init.normal_(p, std=0.3, generator=torch.Generator().manual_seed(len(name)))
    together = response_logprobs(model, mb, 1.0, 97)[0]
    assert (together - response_logprobs(base, mb, 1.0, 97)[0]).abs().max() > 0.1
    for row in range(len(SIZES)):
        alone = response_logprobs(model, {name: x[row:row + 1] for name, x in mb.items()}, 1.0, 97)[0]
        assert (together[row] - alone).abs().max() < 1e-12


@pytest.mark.parametrize("variant", ["gpt2", "gemma3"])
def test_no_rows_at_all(variant, tmp_path):
    """A rank without rows: there is nothing to say, and every parameter has the gradient 0 that sharded models exchange."""
    mb = {name: x[:0] for name, x in micro_batch().items()}
    for head in ("lm", "scalar"):
        model = loaded(variant, tmp_path, head)
        said = response_logprobs(model, mb, 1.0, 97)[0] if head == "lm" else response_values(model, mb)
        assert said.shape == (0, R)
        said.sum().backward()
        assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("window", [0, 1, 3])
@torch.no_grad()
def test_attention_of_documents_by_hand(window):
    """Softmax over the earlier tokens of the same document, in its own loop; two heads of queries share one of keys."""
    lengths, scale = [2, 5, 5, 1], 0.3
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(13, heads, 4, generator=generator, dtype=torch.float64) for heads in (4, 2, 2))
    packed = pack(torch.zeros(4, 5, dtype=torch.int64), torch.arange(5) < torch.tensor(lengths)[:, None])
    got = document_attention(q, k, v, documents_seen((window,), packed, q.dtype)[window], scale)
    for start, length in zip([0, 2, 7, 12], lengths, strict=True):
        for t in range(start, start + length):
            seen = slice(max(start, t + 1 - window) if window else start, t + 1)
            for head in range(4):
                weights = (scale * k[seen, head // 2] @ q[t, head]).softmax(0)
                assert (got[t, head] - weights @ v[seen, head // 2]).abs().max() < 1e-13


def test_only_what_is_read_has_a_last_state(tmp_path):
    model, mb = freeze(loaded("llama", tmp_path)), micro_batch()
    packed = pack_responses(mb)
    assert model.trunk(packed.tokens, packed=packed).shape == (1, mb["response_mask"].sum(), 32)
    assert packed.tokens.numel() == mb["attention_mask"].sum() - len(SIZES)  # nobody reads a response's last token

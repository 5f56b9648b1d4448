"""More of the rooms, beside the files of tests/: hard numbers, and all sides of a rule."""
import itertools
import math
from types import SimpleNamespace

import parallel
import pytest
import torch
import transformers
from answers import number_of
from audit import checksum
from errors import BadInput
from gae import compute_gae
from groups import gspo_log_ratio
from load import OnTrunk, load, load_value_model
from loss import explained_variance, kl_estimate, learning_rate_at, masked_mean, masked_whiten
from model import Model, entropy_of, scaled_logits
from prompts import batch_rows, dialogue, iterations, read_rows, right_pad, spread
from rewards import length
from rollout import choose, decoding_copy, generate
from test_gae import by_loop, case
from test_loss import doubles
from tiny import PAD, jsonl, keys_of, keys_of_system, run
from tokenizer import load_tokenizer

CPU, FLOAT64 = torch.device("cpu"), keys_of_system(dtype="float64")
TEXTS = [list(range(97, 106)), list(range(60, 72)), [99, 98], [120, 97, 120, 97, 121]]

# loss.py, groups.py, gae.py, model.py -------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_16_bits_are_computed_in_float32(dtype):
    rewards, values, mask = case(700)
    rewards, values = rewards.to(dtype), values.to(dtype)
    got = compute_gae(rewards, values, mask, 1.0, 0.95)
    for g, w in zip(got, by_loop(rewards, values, mask, 1.0, 0.95), strict=True):
        assert g.dtype == torch.float32 and (g - w).abs().max() <= 2e-6 * max(1, w.abs().max())
    # 0.07 nats would be lost by a softmax in bfloat16
    logits = (5 * torch.randn(7, 50, generator=torch.Generator().manual_seed(0))).to(dtype)
    want = logits.double() - logits.double().exp().sum(-1, keepdim=True).log()
    got = scaled_logits(logits).log_softmax(-1)
    assert got.dtype == torch.float32 and (got - want).abs().max() < 4e-6
    assert (entropy_of(got) + (want.exp() * want).sum(-1)).abs().max() < 4e-6


def test_k3_of_a_tiny_difference_is_no_rounding_noise():
    x = torch.logspace(-3, -1, 100)
    want = x.double()**2 / 2 - x.double()**3 / 6 + x.double()**4 / 24
    got = kl_estimate(x, torch.zeros_like(x), "k3")
    assert (got >= 0).all() and ((got - want).abs() / want).max() < 2e-4


def test_nothing_to_whiten_by_is_0_and_not_nan():
    x, all_of_it = torch.full((2, 3), 2.5), torch.ones(2, 3).bool()
    assert not masked_whiten(x, all_of_it).any() and not masked_whiten(x, ~all_of_it).any()
    assert masked_mean(x, ~all_of_it).item() == 0


def test_learning_rates():
    rates = [learning_rate_at(i, 8.0, 2, 6, "linear") for i in range(6)]
    assert rates == [4, 8, 8, 6, 4, 2]
    assert [learning_rate_at(i, 8.0, 0, 4, "constant") for i in range(4)] == [8] * 4
    cosine = [learning_rate_at(i, 8.0, 0, 4, "cosine") for i in range(4)]
    assert cosine == pytest.approx([8, 4 + 4 / math.sqrt(2), 4, 4 - 4 / math.sqrt(2)])


def test_explained_variance():
    returns, mask = doubles([1, 2, 3, 9]), torch.tensor([[True, True, True, False]])
    for values, share in (([1, 2, 3, 0], 1), ([2, 2, 2, 0], 0), ([3, 2, 1, 0], -3)):
        assert explained_variance(doubles(values), returns, mask).item() == pytest.approx(share)


def test_one_ratio_for_a_response():
    """Two tokens with the ratios 2 and 8 both get 4."""
    log_ratio = doubles([2, 8, 1], [3, 1, 1]).log()
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]]).bool()
    assert gspo_log_ratio(log_ratio, mask).exp().tolist() == [pytest.approx([4, 4, 1]),
                                                              pytest.approx([3, 1, 1])]


def test_values_and_scores_are_those_of_beginnings(world):
    """The value before token t is the score of the t tokens before it."""
    model = load(world.reward, "reward", FLOAT64, CPU, head="scalar")
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(
        world.reward, dtype=torch.float64).eval()
    tokens, target_mask = right_pad(TEXTS, PAD)
    target_mask[:, 0] = False
    with torch.no_grad():
        each = [[theirs(torch.tensor([ids[:t]])).logits.item() + 0.25
                 for t in range(1, len(ids) + 1)] for ids in TEXTS]
        values = model.values(tokens, target_mask).tolist()
        scores = model.scores(tokens, torch.tensor([len(ids) - 1 for ids in TEXTS])).tolist()
    assert values == pytest.approx([x for one in each for x in one[:-1]], abs=1e-12)
    assert scores == pytest.approx([one[-1] for one in each], abs=1e-12)


def test_a_new_head_is_drawn_from_the_seed(world):
    """Normal, with a deviation of 1 / sqrt(d + 1); a shared one stands on the policy's trunk."""
    policy = load(world.policy, "policy", FLOAT64, CPU, trained=True)
    drawn = torch.empty(1, 16).normal_(0, 17**-0.5, generator=torch.Generator().manual_seed(5))
    for kind in ("policy", "shared"):
        value = load_value_model(kind, policy, None, FLOAT64, CPU, seed=5)
        assert (value.hf.score.weight - drawn).abs().max() < 1e-7
        both = {id(p) for p in policy.parameters()} & {id(p) for p in value.hf.parameters()}
        assert bool(both) == isinstance(value, OnTrunk) == (kind == "shared")


def test_what_cannot_be_decoded_is_refused(world, monkeypatch):
    """A family whose cache mixes up the rows."""
    step = Model.next_logits
    monkeypatch.setattr(Model, "next_logits", lambda self, tokens, *rest: step(
        self, tokens.roll(1, 0), *rest))
    with pytest.raises(BadInput, match="cannot decode"):
        load(world.policy, "policy", keys_of_system(), CPU)


# prompts.py, rewards.py, tokenizer.py -------------------------------------------------------------

def test_prompt_and_completion_are_alike():
    chat, answer = [dict(role="user", content="a")], [dict(role="assistant", content="b")]
    assert dialogue(dict(prompt=chat, x=answer, y=1), "x") == dict(prompt=chat, x=answer)
    for prompt, x in ((chat, "b"), ("a", answer), (chat, chat)):
        with pytest.raises(BadInput):
            dialogue(dict(prompt=prompt, x=x), "x")


@pytest.mark.parametrize("n, size", [(10, 3), (500, 256), (7, 6), (40, 40), (40, 0), (5, 9)])
def test_an_evaluation_takes_rows_from_all_over_a_sorted_file(n, size):
    seen = set()
    for seed in range(20):
        rows = spread(n, size, seed)
        assert rows == sorted(set(rows)) and len(rows) == (min(n, size) or n)
        for task in range(4):  # four tasks, one behind the other: each has its share
            first, end = n * task // 4, n * (task + 1) // 4
            assert abs(sum(first <= i < end for i in rows) - len(rows) * (end - first) / n) < 2
        seen.update(rows)
    assert len(seen) > 0.9 * n


def test_epochs_in_iterations():
    """The fewest batches that have all rows: 11 tenths of 50 are 55, though 1.1 * 50 is more."""
    for tenths, n, batch_size in itertools.product(range(1, 35), (1, 3, 50, 7473), (1, 5, 16)):
        assert iterations(7, tenths / 10, n, batch_size) == -(-tenths * n // (10 * batch_size))
    assert iterations(7, 0.0, 50, 5) == 7


def test_a_mix_of_files(tmp_path):
    """Each file has its share after every iteration, and its own rows come in whole epochs."""
    sizes, weights = dict(a=7, b=40, c=1), dict(a=0.1, b=5.0, c=2.0)
    paths = ",".join(f"{weights[name]}*" + jsonl(tmp_path / f"{name}.jsonl", [
        dict(name=name, number=i) for i in range(n)]) for name, n in sizes.items())
    rows, walks = read_rows(paths, dict), {name: [] for name in sizes}
    for iteration in range(60):
        for i in batch_rows(3, iteration, 16, rows):
            walks[rows[i]["name"]].append(rows[i]["number"])
        for name, walk in walks.items():
            assert abs(len(walk) - 16 * (iteration + 1) * weights[name] / 7.1) < 3
    for name, n in sizes.items():
        epochs = [walks[name][i:i + n] for i in range(0, len(walks[name]) - n + 1, n)]
        assert all(sorted(epoch) == list(range(n)) for epoch in epochs)


def test_numbers_and_lengths():
    assert [number_of(x) for x in ("1,000", "-3/6", "+2.50", "1e5", "1,00", "3/0", "")] == [
        1000, -0.5, 2.5, None, None, None, None]
    mask = torch.arange(100) < torch.tensor([1, 80, 90, 95, 100])[:, None]
    assert length(dict(response_mask=mask)).tolist() == [0, 0, -0.5, -0.75, -1]


def test_stop_strings(world):
    t = load_tokenizer(world.policy, keys_of_system(stop_strings="['Q:', '##']"))
    assert t.decode_response(b"so## Q:") == "so##" and t.decode_response(b"so#") == "so#"
    for n in range(8):
        assert t.has_stop(list(b"abcd ##")[:n]) == (n == 7)


# rollout.py ---------------------------------------------------------------------------------------

def test_the_example_of_the_header():
    """Probabilities 0.2, 0.5, 0.3: below 0.2 token 0, from 0.2 to 0.7 token 1, else token 2."""
    probs = torch.tensor([[0.2, 0.5, 0.3]], dtype=torch.float64).expand(6, 3)
    u = torch.tensor([0.0, 0.19, 0.21, 0.69, 0.71, 0.999], dtype=torch.float64)
    assert choose(probs, u).tolist() == [0, 0, 1, 1, 2, 2]


class Coin:
    """A policy of three tokens: 0, the end, and 1, with 1/2 each; never 2."""

    max_positions = 50
    hf = SimpleNamespace(device=CPU, dtype=torch.float64,
                         config=transformers.GPT2Config(n_layer=1))
    tokenizer = SimpleNamespace(eos_ids=[0], pad_id=0, stop_strings=[], vocab_size=2)

    def __init__(self):
        self.calls = []  # the rows of each step

    def next_logits(self, tokens, cache, attention_mask=None, position_ids=None):
        self.calls.append(len(tokens))
        return torch.zeros(len(tokens), 3, dtype=torch.float64)


def test_finished_rows_leave():
    """40 rows that end after 1 to 40 tokens: in a step, fewer than a quarter have ended."""
    B = R = 40
    lengths = [(17 * i) % B + 1 for i in range(B)]
    u = torch.full((B, R), 0.75, dtype=torch.float64)  # token 1
    for row, n in enumerate(lengths):
        u[row, n - 1] = 0.25  # token 0
    policy = Coin()
    out = generate(policy, [[1]] * B, R, uniforms=u)
    assert out["response_mask"].sum(1).tolist() == lengths and out["finished"].all()
    assert policy.calls[0] == 1 and len(policy.calls) == R  # the prompts are alike: read once
    for t, rows in enumerate(policy.calls[1:], 1):
        running = sum(n > t for n in lengths)
        assert running <= rows < 4 / 3 * running
    rooms = [1 + i % 7 for i in range(B)]  # a limit for each response
    out = generate(Coin(), [[1]] * B, R, uniforms=u, rooms=rooms)
    assert out["response_mask"].sum(1).tolist() == list(map(min, lengths, rooms))
    assert out["finished"].tolist() == [n <= room for n, room in zip(lengths, rooms, strict=True)]


@torch.no_grad()
def test_a_copy_in_16_bits_samples_what_the_training_forward_means(world):
    """Its log-probs are those of the policy itself, whose matrices autocast rounds at each use."""
    policy = load(world.tied, "policy", keys_of_system(), CPU)
    before, u = [p.clone() for p in policy.parameters()], torch.rand(6, 10).double()
    with torch.autocast("cpu", torch.bfloat16), decoding_copy(
            policy, keys_of_system(dtype="bfloat16"), CPU) as decoder:
        assert {p.dtype for p in decoder.parameters()} == {torch.bfloat16, torch.float32}
        outs = [generate(model, [[97, 98]] * 6, 10, uniforms=u) for model in (decoder, policy)]
    assert all(torch.equal(outs[0][name], outs[1][name]) for name in outs[0])
    assert all(torch.equal(p, q) for p, q in zip(policy.parameters(), before, strict=True))
    with decoding_copy(policy, keys_of_system(), CPU) as decoder:
        assert decoder is policy


# parallel.py, audit.py, run.py --------------------------------------------------------------------

def test_shares():
    for n, size in itertools.product(range(9), range(1, 6)):
        parts = [parallel.share(n, rank, size) for rank in range(size)]
        assert [i for part in parts for i in part] == list(range(n))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_gradients_are_clipped_to_a_joint_norm():
    buffers = [torch.tensor([3.0, 0.0]), torch.tensor([4.0])]
    assert parallel.clip_gradients(buffers, 0).item() == 5 and buffers[0][0] == 3
    assert parallel.clip_gradients(buffers, 1.0).item() == 5
    assert buffers[0][0].item() == pytest.approx(0.6) and buffers[1].item() == pytest.approx(0.8)
    assert parallel.clip_gradients(buffers, 2.0).item() == pytest.approx(1)  # short enough
    assert buffers[1].item() == pytest.approx(0.8)


def test_gradients_in_16_bits_have_a_norm_in_32():
    """0.010009765625 is a number of bfloat16, sqrt(100,000) of it is none; nor has float16 3e6."""
    for dtype, each, n in ((torch.bfloat16, 0.010009765625, 100_000), (torch.float16, 1e4, 90_000),
                           (torch.float32, 0.25, 4_000_000), (torch.float64, 0.1, 9)):
        norm = parallel.clip_gradients([torch.full((n,), each, dtype=dtype)], 0.5)
        assert norm.item() == pytest.approx(each * math.sqrt(n), rel=3e-5)
    numbers = torch.arange(128, 256).double()  # each is a number of bfloat16
    buffers = [numbers.bfloat16(), torch.tensor([3.0])]
    norm = math.sqrt(sum(n * n for n in range(128, 256)) + 9)
    assert parallel.clip_gradients(buffers, 7.0).item() == pytest.approx(norm, rel=1e-6)
    assert torch.equal(buffers[0], (numbers * (7 / (norm + 1e-6))).bfloat16())


def test_a_checksum_sees_an_exchange_between_two_chunks():
    """A large tensor is summed in chunks: 1 is as far into its chunk as 2**20 + 1 is."""
    t = torch.zeros(2**20 + 8)
    t[1], t[2**20 + 1] = 1, 2
    swapped = t.clone()
    swapped[1], swapped[2**20 + 1] = 2, 1
    assert int(checksum(t)) != int(checksum(swapped))


def test_ranks_with_other_settings_do_not_begin(world, tmp_path):
    def changes(rank):
        import sys

        sys.argv += ["--kl_coef=0.2"] * rank

    result = run("ppo.py", tmp_path, keys_of(world, "ppo.py"), ranks=2, before=changes)
    assert set(result.codes) <= {1, 2} and "rank 1" in "".join(result.err), result

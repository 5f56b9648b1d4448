"""rollout.py against the loop of its header, with models of transformers."""
from types import SimpleNamespace

import pytest
import torch
import transformers

from batches import as_batch
from errors import BadInput
from load import load
from model import Model
from rollout import decode, decoding_copy, draw, response_uniforms
from tiny import PAD, answer, keys_of_system

CPU = torch.device("cpu")
PROMPTS = [[97], [97, 98, 99], [97, 98, 99], [100] * 9, [256, 120], [98]]


def uniforms(B, R):
    return torch.rand(B, R, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def by_loop(theirs, prompt, uniforms, temperature, ends, strings, vocab_size=260):
    """The header of rollout.py for one response: tokens, log-probs, whether it has finished."""
    said, logprobs = [], []
    for uniform in uniforms.tolist():
        logits = theirs(torch.tensor([prompt + said])).logits[0, -1, :vocab_size]
        logprob = (logits / (temperature or 1.0)).log_softmax(-1)
        cumulated, token = 0.0, 0
        while temperature and (cumulated := cumulated + logprob[token].exp().item()) <= uniform:
            token += 1
        said.append(token if temperature else logits.argmax().item())
        logprobs.append(logprob[said[-1]].item())
        text = bytes(i for i in said if i < 256).decode(errors="replace")
        if said[-1] in ends or any(s in text for s in strings):
            return said, logprobs, True
    return said, logprobs, False


@pytest.mark.parametrize("folder, temperature, strings, batch_size", [
    ("policy", 0.7, [], 0), ("tied", 1.3, [], 2), ("policy", 1.0, ["ab", "x"], 3),
    ("tied", 0, [], 0)])
@torch.no_grad()
def test_decode_is_the_loop_of_the_header(world, folder, temperature, strings, batch_size):
    """
    Unequal prompts, one of them twice, rows that end one by one, and parts of the batch. Each
    number stands in its token's column, from column 0 on; for a longest prompt of 11 tokens.
    """
    path, R = getattr(world, folder), 12
    system = keys_of_system(dtype="float64", stop_strings=str(strings) if strings else "")
    policy = load(path, "policy", system, CPU)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
    prompts = PROMPTS * 3
    u = uniforms(len(prompts), R)
    out = as_batch(prompts, *decode(policy, prompts, u, temperature, at_once=batch_size), 11, PAD)
    lengths = set()
    for row, prompt in enumerate(prompts):
        said, logprobs, finished = by_loop(theirs, prompt, u[row], temperature, (257, 258), strings)
        p, n = len(prompt), len(said)
        assert out["tokens"][row].tolist() == prompt + said + [PAD] * (11 + R - p - n)
        assert (out["begins"][row], out["lengths"][row]) == (p, p + n)
        assert out["response_mask"][row].tolist() == [p <= t < p + n for t in range(11 + R)]
        assert out["sampler_logprobs"][row].tolist() == pytest.approx(
            [0] * p + logprobs + [0] * (11 + R - p - n), abs=1e-12)
        assert out["finished"][row].item() == finished
        lengths.add(n)
    assert len(lengths) > 3 or temperature == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_extreme_uniforms_never_give_an_impossible_token(dtype):
    logits = 4 * torch.randn(300, 1000, generator=torch.Generator().manual_seed(0))
    impossible = torch.zeros(1000).bool()
    impossible[:3] = impossible[500:510] = impossible[980:] = True
    logits = logits.masked_fill(impossible, -torch.inf).to(dtype)
    logits[:, 990:] = 50.0  # padding of the vocabulary, whatever the model thinks of it
    for u in (0.0, 2.0**-53, 1 - 2.0**-24, 1 - 2.0**-53):
        token, logprob = draw(logits, torch.full((300,), u, dtype=torch.float64), 0.5,
                              SimpleNamespace(vocab_size=990))
        assert not impossible[token].any() and logprob.isfinite().all()


@pytest.mark.parametrize("prompts", [[[97], [], [98]], [[97], [98] * 62]])
def test_bad_prompts_are_one_line(world, prompts):
    """An empty one; and one that leaves less than 3 tokens of a context of 64."""
    policy = load(world.policy, "policy", keys_of_system(), CPU)
    with pytest.raises(BadInput):
        decode(policy, prompts, uniforms(len(prompts), 3))
    assert decode(policy, [[98] * 61], uniforms(1, 3))[0].shape == (1, 3)  # just fits


def test_uniforms_are_uniform_and_a_response_has_its_own():
    many = response_uniforms(0, "rollout", 0, range(2000), 4)
    assert len(many.flatten().unique()) == 8000
    assert (many.mean(0) - 0.5).abs().max() < 0.03  # 4.6 standard deviations
    assert (torch.corrcoef(many.T) - torch.eye(4)).abs().max() < 0.1
    one = response_uniforms(0, "rollout", 0, [7, 7], 4, [0, 1])
    assert torch.equal(one[0], many[7]) and not torch.equal(one[0], one[1])
    for other in ((1, "rollout", 0), (0, "eval", 0), (0, "rollout", 1)):
        assert not torch.equal(response_uniforms(*other, [7], 4), many[7:8])


def test_what_cannot_be_decoded_is_refused(world, monkeypatch):
    """A family whose cache mixes up the rows."""
    step = Model.next_logits
    monkeypatch.setattr(Model, "next_logits", lambda self, tokens, *rest: step(
        self, tokens.roll(1, 0), *rest))
    with pytest.raises(BadInput, match="cannot decode"):
        load(world.policy, "policy", keys_of_system(), CPU)


class Coin:
    """A policy of three tokens: 0, the end, and 1, with 1/2 each; never 2."""

    max_positions, config = 50, transformers.GPT2Config(n_layer=1)
    hf = SimpleNamespace(device=CPU, dtype=torch.float64, config=config)
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
    out = answer(policy, [[1]] * B, R, u)  # its pad is its EOS
    assert out["response_mask"].sum(1).tolist() == lengths and out["finished"].all()
    assert policy.calls[0] == 1 and len(policy.calls) == R  # the prompts are alike: read once
    for t, rows in enumerate(policy.calls[1:], 1):
        running = sum(n > t for n in lengths)
        assert running <= rows < 4 / 3 * running
    budgets = [1 + i % 7 for i in range(B)]  # a limit for each response
    out = answer(Coin(), [[1]] * B, R, u, budgets=budgets)
    assert out["response_mask"].sum(1).tolist() == list(map(min, lengths, budgets))
    assert out["finished"].tolist() == [n <= most for n, most in zip(lengths, budgets, strict=True)]


@torch.no_grad()
def test_a_copy_in_16_bits_samples_what_the_training_forward_means(world):
    """Its log-probs are those of the policy itself, whose matrices autocast rounds at each use."""
    policy = load(world.tied, "policy", keys_of_system(), CPU)
    before, u = [p.clone() for p in policy.parameters()], torch.rand(6, 10).double()
    with torch.autocast("cpu", torch.bfloat16), decoding_copy(
            policy, keys_of_system(dtype="bfloat16"), CPU) as decoder:
        assert {p.dtype for p in decoder.parameters()} == {torch.bfloat16, torch.float32}
        outs = [decode(model, [[97, 98]] * 6, u) for model in (decoder, policy)]
    assert all(torch.equal(a, b) for a, b in zip(*outs, strict=True))
    assert all(torch.equal(p, q) for p, q in zip(policy.parameters(), before, strict=True))
    with decoding_copy(policy, keys_of_system(), CPU) as decoder:
        assert decoder is policy

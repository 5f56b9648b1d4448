"""rollout.py against the loop of its header, and models whose probabilities are on paper."""
from types import SimpleNamespace

import pytest
import torch
import transformers

from configurator import BadInput
from load import load
from rollout import choose, decoding_copy, draw, generate, response_uniforms
from tiny import PAD, keys_of_system

PROMPTS = [[97], [97, 98, 99], [97, 98, 99], [100] * 9, [256, 120], [98]]


class TableModel:
    """Logits are a table (positions, V, V): of where a token stands, and what it is."""

    def __init__(self, table, eos=()):
        self.table, self.max_positions = table, len(table)
        self.hf = SimpleNamespace(device=table.device, dtype=table.dtype,
                                  config=transformers.GPT2Config(n_layer=1))
        self.tokenizer = SimpleNamespace(eos_ids=eos, pad_id=0, stop_strings=[],
                                         vocab_size=table.shape[-1])
        self.calls, self.at, self.cache = [], 0, None

    def next_logits(self, tokens, cache, attention_mask=None, position_ids=None):
        if cache is not self.cache:
            self.cache, self.at, self.calls = cache, 0, []
        self.at += tokens.shape[1]
        self.calls.append(len(tokens))
        place = torch.full((len(tokens),), self.at - 1)
        return self.table[place if position_ids is None else position_ids[:, -1], tokens[:, -1]]


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
def test_generate_is_the_loop_of_the_header(world, folder, temperature, strings, batch_size):
    """Unequal prompts, one of them twice, rows that end one by one, and parts of the batch."""
    path, R = getattr(world, folder), 12
    system = keys_of_system(dtype="float64", stop_strings=str(strings) if strings else "")
    policy = load(path, "policy", system, torch.device("cpu"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
    prompts = PROMPTS * 3
    u = uniforms(len(prompts), R)
    out = generate(policy, prompts, R, temperature, u, batch_size=batch_size)
    lengths = set()
    for row, prompt in enumerate(prompts):
        said, logprobs, finished = by_loop(theirs, prompt, u[row], temperature, (257, 258), strings)
        n, before = len(said), 9 - len(prompt)
        assert out["tokens"][row].tolist() == [PAD] * before + prompt + said + [PAD] * (R - n)
        assert out["response_mask"][row].tolist() == [t < n for t in range(R)]
        assert out["attention_mask"][row].tolist() == [before <= t < 9 + n for t in range(9 + R)]
        assert out["sampler_logprobs"][row, :n].tolist() == pytest.approx(logprobs, abs=1e-12)
        assert not out["sampler_logprobs"][row, n:].any()
        assert out["finished"][row].item() == finished
        lengths.add(n)
    assert len(lengths) > 3 or temperature == 0


def test_the_example_of_the_header():
    """Probabilities 0.2, 0.5, 0.3: below 0.2 token 0, from 0.2 to 0.7 token 1, else token 2."""
    probs = torch.tensor([[0.2, 0.5, 0.3]], dtype=torch.float64).expand(6, 3)
    u = torch.tensor([0.0, 0.19, 0.21, 0.69, 0.71, 0.999], dtype=torch.float64)
    assert choose(probs, u).tolist() == [0, 0, 1, 1, 2, 2]


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


def test_finished_rows_leave():
    """40 rows that end after 1 to 40 tokens: in a step, fewer than a quarter have ended."""
    B = R = 40
    table = torch.zeros(R + 1, 3, 3, dtype=torch.float64)
    table[..., 2] = -torch.inf
    lengths = [(17 * i) % B + 1 for i in range(B)]
    u = torch.full((B, R), 0.75, dtype=torch.float64)  # token 1
    for row, n in enumerate(lengths):
        u[row, n - 1] = 0.25  # token 0, the EOS
    model = TableModel(table, eos=[0])
    out = generate(model, [[1]] * B, R, uniforms=u)
    assert out["response_mask"].sum(1).tolist() == lengths
    assert model.calls[0] == 1 and len(model.calls) == R  # the prompts are alike: read once
    for t, rows in enumerate(model.calls[1:], 1):
        running = sum(n > t for n in lengths)
        assert running <= rows < 4 / 3 * running
    rooms = [1 + i % 7 for i in range(B)]  # a limit for each response
    out = generate(model, [[1]] * B, R, uniforms=u, rooms=rooms)
    assert out["response_mask"].sum(1).tolist() == [min(n, room) for n, room in zip(lengths, rooms)]


def test_bad_prompts_are_one_line():
    model = TableModel(torch.zeros(10, 7, 7))
    assert generate(model, [[1], [2] * 7], 3)["tokens"].shape == (2, 10)  # just fits
    for prompts in ([[1], [], [2]], [[1], [2] * 8]):
        with pytest.raises(BadInput):
            generate(model, prompts, 3)
    assert generate(model, [[1], [2, 3]], 8, prompt_width=30)["tokens"].shape == (2, 38)


def test_uniforms_are_uniform_and_a_response_has_its_own():
    many = response_uniforms(0, "rollout", 0, range(2000), 4)
    assert len(many.flatten().unique()) == 8000
    assert (many.mean(0) - 0.5).abs().max() < 0.03  # 4.6 standard deviations
    assert (torch.corrcoef(many.T) - torch.eye(4)).abs().max() < 0.1
    one = response_uniforms(0, "rollout", 0, [7, 7], 4, [0, 1])
    assert torch.equal(one[0], many[7]) and not torch.equal(one[0], one[1])
    for other in ((1, "rollout", 0), (0, "eval", 0), (0, "rollout", 1)):
        assert not torch.equal(response_uniforms(*other, [7], 4), many[7:8])


@torch.no_grad()
def test_a_copy_in_16_bits_samples_what_the_training_forward_means(world):
    """Its log-probs are those of the policy itself, whose matrices autocast rounds at each use."""
    policy = load(world.tied, "policy", keys_of_system(), torch.device("cpu"))
    before = [p.clone() for p in policy.parameters()]
    with torch.autocast("cpu", torch.bfloat16), decoding_copy(policy, torch.bfloat16) as decoder:
        assert {p.dtype for p in decoder.parameters()} == {torch.bfloat16, torch.float32}
        outs = [generate(model, [[97, 98]] * 6, 10, uniforms=uniforms(6, 10))
                for model in (decoder, policy)]
    assert all(torch.equal(outs[0][name], outs[1][name]) for name in outs[0])
    assert all(torch.equal(p, q) for p, q in zip(policy.parameters(), before, strict=True))
    with decoding_copy(policy, None) as decoder:
        assert decoder is policy

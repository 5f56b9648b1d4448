"""
rollout.py against a naive loop, transformers' warpers, and itself in other batches. (Which uniforms a
response gets, by_hand.py says again.)
"""
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers as hf
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from errors import BadInput
from loss import gap, gap_limit
from model import freeze
from load import load_model
from rollout import decoding_copy, draw, generate, response_uniforms
from tools.policies import warpers

from families import make

PROMPTS = [[5, 17, 80, 33, 9], [41, 2, 2, 60, 7, 7, 23, 90, 11], [64], [3, 50, 3, 8, 21, 77, 30], [12, 95], [2, 2, 2]]


class TableModel:
    """Logits are a table (positions, V, V) of where a token stands and what it is: all that is sampled is known on paper."""

    def __init__(self, table):
        self.table, self.max_positions = table, len(table)
        self.hf = SimpleNamespace(device=table.device, dtype=table.dtype, config=hf.GPT2Config(n_layer=1))
        self.cache, self.at = None, 0  # the tokens that were read into this cache
        self.calls, self.prompts = [], []  # rows in each step; prompts in each forward that reads some

    def next_logits(self, tokens, cache, attention_mask=None, position_ids=None):
        rows, columns = tokens.shape
        (self.calls if cache is self.cache else self.prompts).append(rows)
        self.at = columns + (self.at if cache is self.cache else 0)
        self.cache = cache
        place = torch.full((rows,), self.at - 1) if position_ids is None else position_ids[:, -1]
        assert attention_mask is None or attention_mask.shape == (rows, self.at)
        assert attention_mask is None or torch.equal(attention_mask.sum(1) - 1, place)
        return self.table[place, tokens[:, -1]]


def random_table(positions, V, seed=0):
    return torch.randn(positions, V, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def load(variant, tmp_path, dtype=torch.float64):
    make(variant).save_pretrained(tmp_path / variant)
    return freeze(load_model(str(tmp_path / variant), dtype=dtype))


def uniforms(B, R, seed=0):
    return torch.rand(B, R, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# the naive loop

PIECES = [bytes([97 + i % 5]) for i in range(80)] + [b"ab", b"cd", b"ea"] * 5 + [b"", b"dd"]  # the text of each of 97 tokens


def naive(theirs, prompt, uniforms, temperature, eos, vocab_size, strings):
    """rollout.py's header, for one response, with a model of transformers: (tokens, log-probs, finished)."""
    tokens, logprobs, text = list(prompt), [], b""
    for uniform in uniforms.tolist():
        logits = theirs(torch.tensor([tokens])).logits[0, -1, :vocab_size]  # (V,)
        logprob = (logits / (temperature or 1.0)).log_softmax(-1)
        cumulated, token = 0.0, 0
        while temperature and (cumulated := cumulated + logprob[token].exp().item()) <= uniform:
            token += 1
        token = token if temperature else logits.argmax().item()
        tokens.append(token)
        logprobs.append(logprob[token].item())
        text += PIECES[token]
        if token in eos or any(string.encode() in text for string in strings):
            return tokens[len(prompt):], logprobs, True
    return tokens[len(prompt):], logprobs, False


@pytest.mark.parametrize("variant, temperature, eos, strings, batch_size", [
    ("gpt_neox", 1.0, range(0, 97, 9), [], 4), ("gpt2", 0.7, [3, 50], ["abc", "dd"], 0), ("gpt2", 1.3, [], [], 0),
    ("gpt2", 1.0, [], ["abc", "dd"], 3), ("gpt_neox", 0, [7, 30], ["ae", "cc"], 0)])
@torch.no_grad()
def test_generate_is_the_loop_of_the_header(variant, temperature, eos, strings, batch_size, tmp_path):
    """The same tokens; log-probs to 1e-12. Unequal prompts, groups of one prompt, rows that end and leave, and parts."""
    model, R, vocab_size = load(variant, tmp_path), 20, 90
    pad = next(iter(eos), 96)  # which may be an end, too
    theirs = hf.AutoModelForCausalLM.from_pretrained(tmp_path / variant, dtype=torch.float64).eval()
    prompts = [PROMPTS[i] for i in (0, 0, 0, 1, 2, 2, 3, 4, 4, 4, 5, 1)]
    u = uniforms(len(prompts), R)
    def has_stop(ids):
        return any(s.encode() in b"".join(PIECES[i] for i in ids) for s in strings)

    out = generate(model, prompts, R, temperature, eos_ids=eos, pad_id=pad, vocab_size=vocab_size, uniforms=u,
                   batch_size=batch_size, has_stop=has_stop if strings else None)
    lengths = []
    for row, prompt in enumerate(prompts):
        want, logprobs, finished = naive(theirs, prompt, u[row], temperature, eos, vocab_size, strings)
        n, before = len(want), 9 - len(prompt)
        assert out["tokens"][row].tolist() == [pad] * before + prompt + want + [pad] * (R - n)
        assert out["response_mask"][row].tolist() == [t < n for t in range(R)]
        assert out["attention_mask"][row].tolist() == [before <= t < 9 + n for t in range(9 + R)]
        assert out["sampler_logprobs"][row].tolist() == pytest.approx(logprobs + [0.0] * (R - n), abs=1e-12)
        assert out["finished"][row].item() == finished
        lengths.append(n)
    assert out["sampler_logprobs"].dtype == torch.float64
    if temperature and (eos or strings):
        assert len(set(lengths)) > 4 and max(lengths) > 10  # rows end one by one


# inverse CDF


WARPED = [dict(top_k=5), dict(top_k=40), dict(top_p=0.7), dict(top_p=0.001), dict(min_p=0.1), dict(min_p=1.0),
          dict(top_k=9, top_p=0.95, min_p=0.15)]


def warped(logits, temperature, top_k=0, top_p=1.0, min_p=0.0):
    """Log-probs of all tokens as transformers' generate has them: its warpers one after the other, in its order."""
    logits = TemperatureLogitsWarper(temperature)(None, logits)
    for warper, key, on in ((TopKLogitsWarper, top_k, top_k > 0), (TopPLogitsWarper, top_p, top_p < 1),
                            (MinPLogitsWarper, min_p, min_p > 0)):
        logits = warper(key)(None, logits) if on else logits
    return logits.log_softmax(-1)


@pytest.mark.parametrize("keys", WARPED, ids=str)
def test_a_truncated_distribution_equals_transformers(keys):
    """Which tokens may be sampled, what is sampled, and its log-prob."""
    N, V, R, temperature = 300, 30, 3, 0.7
    table, u = 2 * random_table(R + 1, V, seed=4), uniforms(N, R)
    out = generate(TableModel(table), [[4]] * N, R, temperature, uniforms=u, batch_size=64, truncation=warpers(**keys))
    previous = torch.full((N,), 4)
    for t in range(R):
        want = warped(table[t, previous], temperature, **keys)  # (N, V)
        got = out["tokens"][:, 1 + t]
        curve = want.exp().cumsum(1).numpy()
        expected = [np.searchsorted(row, x * row[-1], side="right") for row, x in zip(curve, u[:, t].numpy(), strict=True)]
        assert got.tolist() == expected
        assert (out["sampler_logprobs"][:, t] - want.gather(1, got[:, None])[:, 0]).abs().max() < 1e-12
        previous = got


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_extreme_uniforms_never_give_an_impossible_token(dtype):
    """0 and the largest uniform below 1, in rows whose float32 CDFs end beside 1, with impossible ids at both ends."""
    rows, V, vocab_size = 400, 1000, 990
    logits = (4 * torch.randn(rows, V, generator=torch.Generator().manual_seed(0))).to(dtype)
    impossible = torch.zeros(rows, V, dtype=torch.bool)
    impossible[:, :3] = impossible[:, 500:510] = impossible[:, 980:] = True
    logits = logits.masked_fill(impossible, -torch.inf)
    logits[:, vocab_size:] = 50.0  # padding of the vocabulary, whatever the model thinks of it
    only = torch.arange(0, vocab_size, 43)
    alone = torch.full((len(only), V), -torch.inf, dtype=dtype).scatter(1, only[:, None], 0.0)  # one possible token each
    for u in (0.0, 2.0**-53, 0.5, 1 - 2.0**-24, 1 - 2.0**-25, 1 - 2.0**-53):
        token, logprob = draw(logits, torch.full((rows,), u, dtype=torch.float64), 0.5, vocab_size)
        assert not impossible.gather(1, token[:, None]).any() and logprob.isfinite().all()
        token, logprob = draw(alone, torch.full((len(only),), u, dtype=torch.float64), 0.5, vocab_size)
        assert torch.equal(token, only) and (logprob == 0).all()


@pytest.mark.parametrize("variant", ["llama", "llama3-gqa-tied", "gpt2", "mixtral"])
@torch.no_grad()
def test_a_copy_in_16_bits_samples_what_the_training_forward_means(variant, tmp_path):
    """Its log-probs are those of the policy itself, which autocast rounds at each token; and the policy stays as it is."""
    model, R = load(variant, tmp_path, torch.float32), 20
    before = [p.clone() for p in model.parameters()]
    with torch.autocast("cpu", torch.bfloat16), decoding_copy(model, torch.bfloat16, torch.device("cpu")) as decoder:
        narrow = {name for name, p in decoder.named_parameters() if p.dtype == torch.bfloat16}
        assert decoder is not model and len(narrow) >= 3 * 4
        out = generate(decoder, PROMPTS[:1] * 6, R, uniforms=uniforms(6, R))
        want = generate(model, PROMPTS[:1] * 6, R, uniforms=uniforms(6, R))
        assert torch.equal(out["tokens"], want["tokens"])
        assert torch.equal(out["sampler_logprobs"], want["sampler_logprobs"])
        chosen = torch.arange(5 + R).expand(6, -1) >= 5
        logprobs, _ = model.logprobs(out["tokens"], chosen)
    assert out["sampler_logprobs"].dtype == torch.float32
    log_ratio = logprobs.view(6, R) - out["sampler_logprobs"]
    assert gap(log_ratio, out["response_mask"], "bfloat16").item() < gap_limit("bfloat16", 1.0)
    assert all(torch.equal(p, q) and p.dtype == torch.float32 for p, q in zip(model.parameters(), before, strict=True))
    with decoding_copy(model, None, torch.device("cpu")) as decoder:
        assert decoder is model


# the end of a response


def lengths_model(lengths, R):
    """A TableModel and uniforms (B, R) with which the responses have these lengths: token 1, and 0, the EOS, at the end."""
    table = torch.zeros(R + 1, 3, 3, dtype=torch.float64)
    table[..., 2] = -torch.inf
    u = torch.full((len(lengths), R), 0.75, dtype=torch.float64)  # token 1
    for row, n in enumerate(lengths):
        u[row, n - 1] = 0.25  # token 0
    return TableModel(table), u


def test_finished_rows_are_dropped():
    """64 rows that end after 1 to 64 tokens: of those in a step, fewer than a quarter have ended."""
    B = R = 64
    lengths = [(37 * i) % B + 1 for i in range(B)]
    model, u = lengths_model(lengths, R)
    out = generate(model, [[1]] * B, R, eos_ids=[0], pad_id=2, uniforms=u)
    assert out["response_mask"].sum(1).tolist() == lengths
    assert model.prompts == [1]  # they are all the same
    assert len(model.calls) == R - 1
    for t, rows in enumerate(model.calls, 1):
        running = sum(n > t for n in lengths)
        assert running <= rows < 4 / 3 * running
    # one long response among many short ones costs little more than itself
    u[:, 1] = 0.25
    u[5, :] = 0.75
    model.calls.clear()
    generate(model, [[1]] * B, R, eos_ids=[0], pad_id=2, uniforms=u)
    assert model.calls == [B] + [1] * (R - 2)
    # nothing is computed behind the last token
    for eos, want in (([], [5] * 7), ([0, 1], [])):
        model.calls.clear()
        generate(model, [[1]] * 5, 8, eos_ids=eos, pad_id=2)
        assert model.calls == want


# prompts


def test_bad_prompts_get_one_line():
    model = TableModel(random_table(10, 7))
    with pytest.raises(BadInput, match="prompt 1 is empty"):
        generate(model, [[1], [], [2]], 3)
    assert generate(model, [[1], [2] * 7], 3)["tokens"].shape == (2, 10)  # just fits
    with pytest.raises(BadInput, match="8 tokens and max_new_tokens = 3 exceed the model's context of 10"):
        generate(model, [[1], [2] * 8], 3)
    assert generate(model, [[1], [2, 3]], 8, prompt_width=30)["tokens"].shape == (2, 38)  # padding takes no position


def test_stop_leaves_early_and_keeps_the_shapes():
    """Asked before each token; what is left has the shapes of a whole answer, so that the caller needs no branch."""
    (model, u), asked = lengths_model([9, 9], 9), []

    def stop():
        asked.append(1)
        return len(asked) == 3

    whole = generate(model, [[1], [1]], 9, eos_ids=[0], uniforms=u)
    batch = generate(model, [[1], [1]], 9, eos_ids=[0], uniforms=u, stop=stop)
    assert len(asked) == 3 and batch.keys() == whole.keys()
    assert all(batch[k].shape == whole[k].shape for k in whole)
    assert torch.equal(batch["tokens"][:, :1 + 3], whole["tokens"][:, :1 + 3]) and not batch["finished"].any()


def test_uniforms_are_uniform_and_independent():
    many = response_uniforms(0, "rollout", 0, range(2000), 4)
    assert len(many.flatten().unique()) == 8000
    assert (many.mean(0) - 0.5).abs().max() < 0.03  # 4.6 standard deviations
    assert np.abs(np.corrcoef(many.numpy().T) - np.eye(4)).max() < 0.1


@pytest.mark.parametrize("variant", ["gpt2", "gpt_neox", "llama3-gqa-tied", "cohere"])
def test_steps_as_a_graph_has_them(variant, tmp_path, monkeypatch):
    """
    The steps that a GPU records, here computed: columns that are hidden, rows that leave, more columns than a graph has.
    Left out here is the recording alone; tests/test_gpu.py has it.
    """
    import decoding_graph

    def capture(steps):
        made.append(len(steps.token))
        return SimpleNamespace(replay=lambda: setattr(steps, "logits", steps.step())), None

    made = []  # the rows of each graph
    monkeypatch.setattr(decoding_graph, "COLUMNS", 8)
    monkeypatch.setattr(decoding_graph, "MULTIPLE", 4)
    monkeypatch.setattr(decoding_graph.Steps, "capture", capture)
    policy = load(variant, tmp_path)
    for prompts, rows in ((PROMPTS, 3), (PROMPTS[:1], 1)):  # one row is never padded
        want, got = (generate(policy, prompts, 30, eos_ids=range(0, 97, 24), graphs=graphs) for graphs in (False, True))
        assert torch.equal(got["tokens"], want["tokens"]) and torch.equal(got["finished"], want["finished"])
        assert (got["sampler_logprobs"] - want["sampler_logprobs"]).abs().max() < 1e-5
        assert len(set(made)) >= rows and len(made) > 1  # rows have left, or columns were used up
        made.clear()
    assert not decoding_graph.off


def test_the_cache_holds_what_transformers_cache_holds():
    """Over its spare columns, where rows are dropped, or are there twice."""
    from decoding_cache import SPARE, decoding_cache

    config = hf.LlamaConfig(num_hidden_layers=1, hidden_size=8, num_attention_heads=2)
    ours, theirs = decoding_cache(config), hf.DynamicCache(config=config)
    rows = 4
    for step in range(SPARE + 10):
        new = torch.randn(2, rows, 2, 3 if step == 0 else 1, 4)  # keys and values of new tokens
        for x, y in zip(ours.update(*new, 0), theirs.update(*new, 0), strict=True):
            assert torch.equal(x, y)
        if step in (5, SPARE + 4):
            kept = torch.tensor([2, 0, 2])
            ours.batch_select_indices(kept), theirs.batch_select_indices(kept)
            rows = 3
    assert ours.get_seq_length() == theirs.get_seq_length() == SPARE + 12

"""rollout.py against the loop of its header, with models of transformers."""
from types import SimpleNamespace

import pytest
import torch
import transformers

from errors import BadInput
from load import load
from rollout import as_batch, decode, draw, response_uniforms
from tiny import PAD, keys_of_system

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
    policy = load(path, "policy", system, torch.device("cpu"))
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
    policy = load(world.policy, "policy", keys_of_system(), torch.device("cpu"))
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

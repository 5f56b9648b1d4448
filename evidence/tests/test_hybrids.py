"""
Families some of whose layers keep a state (linear attention, state spaces, convolutions): texts
beside each other, in 16 bits, with adapters; what is refused. What they read, train and save, and
their runs: test_families.py.
"""
import pytest
import torch
import transformers

from checkpoint import save_final
from errors import BadInput
from load import autocast, load, probe
from model import Model
from options.lora import peft_misreads
from rollout import decode, decoding_copy, response_uniforms
from test_families import FAMILIES, HYBRIDS, rows_of_texts, save, written
from test_lora import filled, said, said_by_peft
from test_model import CPU
from tiny import keys_of_system


# one of each kind of a state: linear attention, convolutions, state spaces of two kinds
KINDS = ["Qwen3.5 (text)", "LFM2 MoE", "Falcon-H1", "Jamba"]


def sample(policy, prompts, uniforms, temperature=1.0):
    """[(ids, log-probs) of the response to each prompt]"""
    responses, logprobs, lengths, _ = decode(policy, prompts, uniforms, temperature)
    return [(ids[:n].tolist(), p[:n])
            for ids, p, n in zip(responses, logprobs, lengths, strict=True)]


@pytest.mark.parametrize("name", HYBRIDS)
@torch.no_grad()
def test_a_text_beside_others_is_itself_alone(name, tmp_path):
    """
    Prompts of unequal lengths, of one token, shorter than a convolution; groups; ends by tokens and
    by texts at different times: the tokens of a row alone, with the log-probs of reading it.
    """
    save(tmp_path, name)
    policy = load(str(tmp_path), "policy", keys_of_system(stop_strings=str([*"bcdfghjk"])), CPU)
    policy.tokenizer.eos_ids = {*range(65, 90), 258}
    drawn = torch.Generator().manual_seed(5)
    prompts = [torch.randint(97, 123, (n,), generator=drawn).tolist()
               for n in (1, 2, 3, 11, 5, 17, 1, 8)]
    prompts += prompts[:3] * 2
    uniforms = response_uniforms(1, "test", 0, range(len(prompts)), 14)
    together, lengths = sample(policy, prompts, uniforms), set()
    for i, prompt in enumerate(prompts):
        (ids, logprobs), (alone, _) = together[i], *sample(policy, prompts[i:i + 1],
                                                           uniforms[i:i + 1])
        assert ids == alone
        text = torch.tensor([prompt + ids])
        read, _ = policy.logprobs(text, torch.arange(text.shape[1])[None] >= len(prompt))
        assert (read - logprobs).abs().max() < 1e-4
        lengths.add(len(ids))
    assert len(lengths) > 4


@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_in_16_bits_what_is_sampled_is_read_alike(name, tmp_path):
    """By a run's own limit; the policy, the copy that samples and the reference round alike."""
    save(tmp_path, name)
    system = keys_of_system(dtype="bfloat16")
    policy, gaps = load(str(tmp_path), "policy", system, CPU, trained=True), []
    ref_policy = load(str(tmp_path), "ref", system, CPU)
    prompts = [[97, 98, 99, 100], [101], [102, 103] * 3]
    with autocast(system, CPU), decoding_copy(policy, system, CPU) as decoder:
        sampled = sample(decoder, prompts, response_uniforms(1, "test", 0, range(3), 12))
        for prompt, (ids, logprobs) in zip(prompts, sampled, strict=True):
            text = torch.tensor([prompt + ids])
            read, _ = policy.logprobs(text, torch.arange(text.shape[1])[None] >= len(prompt))
            gaps.append((read - logprobs).abs())
        read = [m.logprobs(*rows_of_texts())[0] for m in (policy, ref_policy, decoder)]
    assert all(torch.equal(x, read[0]) for x in read) and read[0].dtype == torch.float32
    assert torch.cat(gaps).mean() < 0.02


@pytest.mark.parametrize("name", KINDS)
def test_adapters_on_their_maps(name, tmp_path):
    """Each map of each kind of layer learns, with layers that are computed again; peft agrees."""
    save(tmp_path / "base", name)
    system = keys_of_system(lora="2:4", gradient_checkpointing=True)
    model = filled(load(f"{tmp_path}/base", "policy", system, CPU, trained=True))
    model.tokenizer.vocab_size = 260  # transformers' class for Qwen3.5 adds a token of its own
    assert len({key.split("/")[2] for key in model.adapters}) > 2
    model.logprobs(*rows_of_texts())[0].square().mean().backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
    assert all(g.abs().max() > 0 for g in gradients.values())
    model.zero_grad()
    for layer in model.base.recomputed:
        layer.gradient_checkpointing = False
    model.logprobs(*rows_of_texts())[0].square().mean().backward()
    for n, p in model.named_parameters():
        assert (p.grad - gradients[n]).abs().max() < 1e-5 * max(1, p.grad.abs().max()), n
    with torch.no_grad():
        model.save_adapter(tmp_path / "adapter")
        if not peft_misreads(model):
            assert (said(model) - said_by_peft(tmp_path / "adapter")).abs().max() < 2e-4


@pytest.mark.parametrize("name, settings, dtype, word", [
    ("LFM2", dict(conv_bias=True), torch.float32, "bias"),
    ("Falcon-H1", dict(mamba_proj_bias=True), torch.bfloat16, "bias"),
    ("Qwen3.5 (text)", {}, torch.float64, "float32"), ("Jamba", {}, torch.float64, "float32"),
    ("LFM2", {}, torch.float64, "")])
@torch.no_grad()
def test_what_would_change_a_state_is_refused(name, settings, dtype, word):
    kind, of_family = FAMILIES[name]
    mixture = dict(experts_implementation="batched_mm") if dtype == torch.float64 else {}
    config = transformers.AutoConfig.for_model(kind, **of_family | settings)
    model = Model(transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, **mixture))
    if not word:
        return probe(model)
    with pytest.raises(BadInput, match=f"cannot decode .*{word}"):
        probe(model)


@torch.no_grad()
def test_a_vision_part_is_left_out(tmp_path):
    """Qwen3.5's folders on the hub have one: its text model is read, and saved alone."""
    text = FAMILIES["Qwen3.5 (text)"][1] | dict(tie_word_embeddings=True)
    vision = dict(depth=1, hidden_size=16, intermediate_size=24, num_heads=2, out_hidden_size=32,
                  num_position_embeddings=16, patch_size=4)
    whole = transformers.Qwen3_5ForConditionalGeneration(transformers.Qwen3_5Config(
        text_config=text, vision_config=vision, tie_word_embeddings=True)).eval()
    folder, (tokens, mask) = written(tmp_path / "whole", whole), rows_of_texts()
    policy = load(folder, "policy", keys_of_system(), CPU, trained=True)
    save_final(str(tmp_path), "policy", policy)
    want = [whole(tokens[i:i + 1]).logits[0] for i in range(len(tokens))]
    for path in folder, f"{tmp_path}/policy":
        found = load(path, "policy", keys_of_system(), CPU)
        states = found.states(tokens)
        for row, logits, m in zip(states, want, mask, strict=True):
            assert (found.logits(row) - logits)[m].abs().max() < 1e-4
        value_model = load(path, "value", keys_of_system(), CPU, "scalar", trained=True)
        assert (value_model.states(tokens) - states)[mask].abs().max() < 1e-4
        assert not any(p.requires_grad for n, p in value_model.named_parameters() if "visual" in n)

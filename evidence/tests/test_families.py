"""
Some forty families of transformers, tiny and random, against transformers: what is read, trained,
scored, saved; the scripts as a user runs them; models that are split, or in 16 bits; layers that
keep a state: texts beside each other, adapters; the probe.
QUARTET_FAMILIES=all in the environment: the scripts with each family of the table in docs/scale.md.
"""
import os

import pytest
import torch
import transformers
from packaging import version
from safetensors.torch import load_file, save_file

import tiny
from checkpoint import save_final
from configurator import read_json, write_json
from errors import BadInput
from load import autocast, load, load_value_model, probe
from model import Model, response_values, states_before
from options.lora import peft_misreads
from rollout import decode, decoding_copy, response_uniforms
from test_model import BASE as SIZES
from test_model import CPU, TEXTS, assert_computes, random_model, rows_of_texts, written
from test_model import FAMILIES as FEW
from tiny import EOS, PAD, ROOT, Started, keys_of_system, read_log, read_weights, run

BASE = dict(vocab_size=264, bos_token_id=None, eos_token_id=EOS, pad_token_id=PAD)
GPT = BASE | FEW["gpt2"]
HEADS = SIZES | dict(head_dim=10)
EXPERTS = SIZES | dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2,
                       moe_intermediate_size=16)
DEEPSEEK = EXPERTS | dict(
    num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=4,
    v_head_dim=8, n_routed_experts=4, n_group=1, topk_group=1, first_k_dense_replace=1,
    n_shared_experts=1)
# layers with a state, and layers that see all tokens
DELTA = HEADS | dict(
    num_hidden_layers=5, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=6,
    linear_key_head_dim=6, linear_value_head_dim=5,
    layer_types=["linear_attention", "full_attention", *["linear_attention"] * 2, "full_attention"])
CONV = dict(num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"])
MAMBA = dict(mamba_n_heads=8, mamba_d_head=8, mamba_d_state=6, mamba_n_groups=2,
             mamba_chunk_size=4, mamba_expand=2)


def rope(kind, **settings):
    return dict(rope_parameters=dict(rope_type=kind, rope_theta=500.0, **settings))


LONGROPE = rope("longrope", short_factor=[1.0, 1.1, 1.2, 1.3], long_factor=[1.5, 4.0, 9.0, 16.0])
FAMILIES = {  # name in the table: model_type, settings that change what is computed
    "GPT-2": ("gpt2", GPT | dict(tie_word_embeddings=False, n_inner=40)),
    "Pythia (GPT-NeoX)": ("gpt_neox", SIZES),
    "Llama": ("llama", SIZES | FEW["llama"]),
    "Llama with yarn": ("llama", SIZES | rope("yarn", factor=4.0,
                                              original_max_position_embeddings=16)),
    "Llama with dynamic rope": ("llama", SIZES | rope("dynamic", factor=2.0)),
    "Mistral": ("mistral", SIZES | dict(num_key_value_heads=1, sliding_window=5)),
    "Qwen2": ("qwen2", SIZES | dict(tie_word_embeddings=True, use_sliding_window=True,
                                    sliding_window=4, max_window_layers=1)),
    "Qwen3": ("qwen3", HEADS), "Gemma": ("gemma", HEADS),
    "Gemma 2": ("gemma2", SIZES | FEW["gemma2"]),
    "Gemma 3 (text)": ("gemma3_text", HEADS | dict(
        sliding_window=5, layer_types=["sliding_attention", "full_attention"])),
    "Phi": ("phi", SIZES), "Phi-3": ("phi3", SIZES),
    "Phi-3 with longrope": ("phi3", SIZES | dict(original_max_position_embeddings=40) | LONGROPE),
    "SmolLM3": ("smollm3", SIZES), "OLMo 2": ("olmo2", SIZES | dict(attention_bias=True)),
    "StarCoder2": ("starcoder2", SIZES), "GLM-4": ("glm4", SIZES | dict(head_dim=8)),
    "OPT": ("opt", SIZES | FEW["opt"]),
    "Falcon": ("falcon", SIZES | dict(hidden_dropout=0.4, attention_dropout=0.4,
                                      new_decoder_architecture=False, parallel_attn=False)),
    "Mixtral": ("mixtral", EXPERTS), "Qwen3 MoE": ("qwen3_moe", EXPERTS),
    "DeepSeek-V3": ("deepseek_v3", DEEPSEEK),
    "gpt-oss": ("gpt_oss", EXPERTS | dict(head_dim=8, sliding_window=8)),
    "Cohere": ("cohere", SIZES | FEW["cohere"]),
    "Granite": ("granite", SIZES | dict(logits_scaling=3.0, embedding_multiplier=2.0)),
    "OLMoE": ("olmoe", EXPERTS), "Ernie 4.5": ("ernie4_5", SIZES | dict(head_dim=8)),
    "Gemma 4 (text)": ("gemma4_text", SIZES | dict(
        num_hidden_layers=4, head_dim=8, global_head_dim=16, sliding_window=5,
        layer_types=["sliding_attention", "full_attention"] * 2, num_kv_shared_layers=2,
        hidden_size_per_layer_input=6, vocab_size_per_layer_input=264,
        final_logit_softcapping=3.0)),
    "Hunyuan": ("hunyuan_v1_dense", HEADS),
    "Hunyuan MoE": ("hunyuan_v1_moe", EXPERTS | dict(moe_topk=2, head_dim=8)),
    "Qwen3.5 (text)": ("qwen3_5_text", DELTA | rope(
        "default", partial_rotary_factor=0.5, mrope_section=[2, 1, 1])),
    "Qwen3.5 MoE (text)": ("qwen3_5_moe_text", EXPERTS | DELTA | dict(
        shared_expert_intermediate_size=16) | rope(
            "default", partial_rotary_factor=0.5, mrope_section=[2, 1, 1])),
    "Qwen3-Next": ("qwen3_next", EXPERTS | DELTA | dict(shared_expert_intermediate_size=16)),
    "OLMo-hybrid": ("olmo_hybrid", DELTA | dict(linear_conv_kernel_dim=3)),
    "LFM2": ("lfm2", SIZES | CONV), "LFM2 MoE": ("lfm2_moe", EXPERTS | CONV | dict(
        num_dense_layers=1)),
    "Falcon-H1": ("falcon_h1", SIZES | MAMBA | dict(
        mamba_d_ssm=64, mamba_rms_norm=True, lm_head_multiplier=0.3, key_multiplier=0.7,
        ssm_in_multiplier=1.2, embedding_multiplier=2.0)),
    "Jamba": ("jamba", EXPERTS | dict(num_hidden_layers=4, attn_layer_period=2, mamba_d_state=6,
                                      attn_layer_offset=1, mamba_dt_rank=4)),
    "Granite 4 hybrid": ("granitemoehybrid", EXPERTS | MAMBA | dict(
        num_hidden_layers=3, layer_types=["mamba", "attention", "mamba"], logits_scaling=3.0,
        shared_intermediate_size=24)),
    "Mamba": ("mamba", SIZES),
    "RWKV": ("rwkv", SIZES | dict(attention_hidden_size=32)),
}
OLD = version.parse(transformers.__version__) < version.parse("5.23")  # no hybrids are tried
HYBRIDS = ["Qwen3.5 (text)", "Qwen3.5 MoE (text)", "Qwen3-Next", "OLMo-hybrid", "LFM2", "LFM2 MoE",
           "Falcon-H1", "Jamba", "Granite 4 hybrid"]
NO_CACHE = ["Mamba", "RWKV"]
# transformers has no such class
NO_SCORES = ["Cohere", "Granite", "OLMoE", "Ernie 4.5", "Gemma 4 (text)", "OLMo-hybrid",
             "Qwen3.5 MoE (text)", "LFM2", "LFM2 MoE", "Falcon-H1", "Granite 4 hybrid"]
READ = [name for name in FAMILIES if name not in NO_CACHE]
# by all three scripts: each row of the table, and each kind of layers
RUN = ["Gemma 2", "Mixtral", "Gemma 4 (text)", "Qwen3.5 (text)", "Mamba"]


def save(folder, name, scalar=False, **changed):
    """The random model of a family, saved with its tokenizer; and transformers' model."""
    if name in HYBRIDS and OLD:
        pytest.skip("of transformers 5.23")
    kind, settings = FAMILIES[name]
    theirs = random_model(kind, settings | changed, scalar)
    written(folder, theirs)
    return theirs


@pytest.mark.parametrize("name", READ)
def test_a_family_is_read_trained_and_saved(name, tmp_path):
    """Log-probs, entropies and gradients; transformers' logits of what is saved are ours."""
    theirs = save(tmp_path / "theirs", name)
    model = load(f"{tmp_path}/theirs", "policy", keys_of_system(gradient_checkpointing=True), CPU,
                 trained=True)
    model.tokenizer.vocab_size = 260  # transformers' class for Qwen2 adds a token of its own
    assert_computes(model, theirs)
    tokens, _ = rows_of_texts()
    with torch.no_grad():
        for p in (*model.parameters(), *theirs.parameters()):
            p.mul_(1.25)
        save_final(str(tmp_path), "ours", model)
        gap = read_back(theirs, tmp_path / "ours")(tokens[:1]).logits - theirs(tokens[:1]).logits
        assert gap.abs().max() < 1e-5
    before, after = (read_json(tmp_path / f / "config.json") for f in ("theirs", "ours"))
    assert after | before == after  # beside it are names for transformers 4: test_saving.py
    if name in NO_SCORES:
        for made in (lambda: load(f"{tmp_path}/ours", "reward", keys_of_system(), CPU, "scalar"),
                     lambda: load_value_model("shared", model, None, keys_of_system(), CPU)):
            with pytest.raises(BadInput, match=FAMILIES[name][0]):
                made()


def read_back(theirs, folder):
    """transformers' model of a folder, all tensors of which it knows."""
    back, found = type(theirs).from_pretrained(folder, output_loading_info=True)
    assert not any(found.values())
    return back


@pytest.mark.parametrize("name", [name for name in READ if name not in NO_SCORES])
@torch.no_grad()
def test_values_and_scores_are_those_of_beginnings(name, tmp_path):
    """transformers scores a text at its last token: a value is the score of the tokens before."""
    theirs = save(tmp_path, name, scalar=True)
    with pytest.raises(BadInput, match="is a reward model"):
        load(str(tmp_path), "policy", keys_of_system(), CPU)
    model = load(str(tmp_path), "reward", keys_of_system(), CPU, "scalar")
    model.score_shift, (tokens, mask) = -1.25, rows_of_texts()
    some, ends = mask.nonzero()[::3].tolist(), [(row, len(ids)) for row, ids in enumerate(TEXTS)]
    want = torch.tensor([theirs(tokens[row:row + 1, :n]).logits.item() - 1.25
                         for row, n in some + ends])
    last = torch.tensor([len(ids) - 1 for ids in TEXTS])
    values = response_values(model, dict(tokens=tokens, response_mask=mask))[mask]
    found = torch.cat([values[::3], model.scores(tokens, last)])
    assert (found - want).abs().max() < 1e-4 < 0.02 < want.std() and not model.new_head


# --------------------------------------------------------------------------------------------------
# the scripts


SAID = {"no: cannot be decoded": "cannot decode",  # in the table: a part of the line
        "no: has no reward models": "ModelForSequenceClassification"}


def test_families_do_what_the_docs_say(world, tmp_path):
    """Two iterations of each script: SFT learns, and the first one of the others is on-policy."""
    page = open(f"{ROOT}/docs/scale.md", encoding="utf-8").read()
    table = {name: said.split(" | ") for line in page.splitlines() if line.count(" | ") == 3
             for names, said in [line.strip("| ").split(" | ", 1)] for name in names.split(", ")}
    assert set(FAMILIES) == table.keys() & FAMILIES.keys()
    for name in FAMILIES if os.environ.get("QUARTET_FAMILIES") else RUN:
        folder = str(tmp_path / name)
        save(folder, name)
        before, small = read_weights(folder), dict(max_iters=2, dtype="float32")
        sampled = dict(policy_path=folder, eval_path="", num_minibatches=1, micro_batch_size=4,
                       reward_functions=f"{world.rules}:letters")
        for (script, own), said in zip({
                "sft.py": dict(init_from=folder, val_path=""),
                "ppo.py": sampled | dict(value_init="policy", reward_path="", ppo_epochs=1),
                "grpo.py": sampled}.items(), table[name], strict=True):
            done = run(script, f"{folder}, {script}", tiny.keys_of(world, script, **small | own))
            if said != "yes":
                assert done.codes == [2] and SAID[said] in done.err[0], (name, done)
                continue
            assert done.codes == [0], (name, done)
            out = f"{folder}, {script}/out"
            after = transformers.AutoModelForCausalLM.from_pretrained(f"{out}/policy").state_dict()
            if script == "sft.py":  # a group whose scores are equal teaches nothing
                assert any(not torch.equal(after[n], before[n]) for n in before.keys() & {*after})
            else:
                first = read_log(out)[0]
                assert first["policy/ratio_gap"] == 0 and abs(first["objective/kl"]) < 1e-5, first
                assert first["policy/sampler_gap"] < 1e-4, (name, first)


# --------------------------------------------------------------------------------------------------
# split over the ranks, and in 16 bits

SPLIT = ["Gemma 2", "Mixtral", "gpt-oss", "Qwen3.5 (text)", "Falcon-H1"]


def test_split_models_compute_the_same(tmp_path):
    """At stage 3, with layers that are computed again, and 2: also eager attention, mixtures."""
    for name in SPLIT:
        save(tmp_path / name, name)

    def before(rank):
        import ranks

        ranks.init(keys_of_system(device_type="cpu", timeout=60))
        for name in SPLIT:
            found = []
            for stage in ("", "3", "2")[:3 if name == "Gemma 2" else 2]:
                system = keys_of_system(zero_stage=stage, gradient_checkpointing=stage == "3")
                model = load(f"{tmp_path}/{name}", "policy", system, CPU, trained=True)
                assert model.must_fetch == bool(stage)
                logprobs, _ = model.logprobs(*rows_of_texts())
                logprobs.square().mean().backward()
                gradients = {n: getattr(p.grad, "full_tensor", lambda p=p: p.grad)()
                             for n, p in model.named_parameters() if p.requires_grad}
                found.append(dict(logprobs=logprobs.detach()) | gradients)
            for other in found[1:]:
                assert other.keys() == found[0].keys()
                for n, t in found[0].items():
                    assert (t - other[n]).abs().max() < 1e-5 * max(1, t.abs().max()), (name, n)
        ranks.leave()
        os._exit(0)

    done = Started("", [], str(tmp_path), ranks=2, before=before).wait()
    assert done.codes == [0, 0], done


@pytest.mark.parametrize("keys, name, own", [
    (dict(dtype="bfloat16"), "gpt-oss", torch.float32),
    (dict(dtype="bfloat16", master_weights=False), "DeepSeek-V3", torch.bfloat16),
    (dict(dtype="float64", lora="2"), "Pythia (GPT-NeoX)", torch.float64),
    (dict(dtype="bfloat16", lora="2", master_weights=False), "Qwen3", torch.float32)], ids=str)
@torch.no_grad()
def test_what_is_saved_is_what_was_computed(tmp_path, keys, name, own):
    """Steps of 1e-4 of a weight: in bfloat16 numbers above 1 are 0.0078 apart. LoRA, too."""
    theirs = random_model(*FAMILIES[name], noise=0.02).bfloat16()
    path, drawn = written(tmp_path / "theirs", theirs), torch.Generator().manual_seed(3)
    model = load(path, "policy", keys_of_system(**keys), CPU, trained=True)
    # what the family keeps in 32 bits, as newer transformers do routers of DeepSeek-V3, stays so
    kept = model.hf._keep_in_fp32_modules_strict if own == torch.bfloat16 else ()
    for n, p in model.named_parameters():
        assert p.dtype == (torch.float32 if any(part in n for part in kept or ()) else own), n
        p.mul_(1 + 1e-4 * torch.randn(p.shape, generator=drawn))
        if n.endswith(".B"):
            p.normal_(0, 1e-4, generator=drawn)
    save_final(str(tmp_path), "ours", model)
    back = read_back(theirs, tmp_path / "ours")
    assert back.dtype == back.config.dtype == own
    want = {n: t.double() for n, t in model.hf.state_dict().items()}
    for key, adapter in model.adapters.items() if "lora" in keys else ():  # scale B A, by hand
        map_name = f"{model.hf.base_model_prefix}.{key.replace('/', '.')}.weight"
        want[map_name] += 2 * adapter.B.double() @ adapter.A.double()
    for n, t in back.state_dict().items():
        assert (t.double() - want[n]).abs().max() <= (1e-7 if "lora" in keys else 0), n
    save_final(str(tmp_path), "short", model, "bfloat16")
    assert {t.dtype for t in read_weights(tmp_path / "short").values()} == {torch.bfloat16}
    assert transformers.AutoConfig.from_pretrained(tmp_path / "short").dtype == torch.bfloat16


@torch.no_grad()
def test_scores_are_float32_under_autocast(tmp_path):
    """Scores around 100 in steps of much less than 1/2, which would be those of bfloat16."""
    save(tmp_path, "Llama", scalar=True)
    model = load(str(tmp_path), "reward", keys_of_system(dtype="bfloat16"), CPU, "scalar")
    model.score_shift = 100.0
    with torch.autocast("cpu", torch.bfloat16):
        tokens, mask = rows_of_texts()
        values = model.scalars(states_before(model.states(tokens), mask))
    assert values.dtype == torch.float32 and (values % 0.5 != 0).any()


def add_vision(folder):
    """A policy as Gemma 3 4B is, with a vision part; in a run: test_zero.py."""
    text = HEADS | dict(model_type="gemma3_text", sliding_window=8)
    vision = dict(model_type="siglip_vision_model", hidden_size=16, intermediate_size=24,
                  num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14)
    written(folder, random_model("gemma3", dict(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=260,
        boi_token_index=261, eoi_token_index=262, **BASE)))


# --------------------------------------------------------------------------------------------------
# layers that keep a state: linear attention, state spaces, convolutions

# one of each kind of a state: linear attention, convolutions, state spaces of two kinds
KINDS = ["Qwen3.5 (text)", "LFM2 MoE", "Falcon-H1", "Jamba"]


def sample(sampler, policy, prompts, uniforms):
    """
    Of the response to each prompt: its ids, and how far the sampler's log-probs are from those with
    which the policy reads it.
    """
    for prompt, ids, logprobs, n in zip(
            prompts, *decode(sampler, prompts, uniforms, 1.0)[:3], strict=True):
        text = torch.tensor([prompt + ids[:n].tolist()])
        read, _ = policy.logprobs(text, torch.arange(text.shape[1])[None] >= len(prompt))
        yield ids[:n].tolist(), (read - logprobs[:n]).abs()


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
    together = [*sample(policy, policy, prompts, uniforms)]
    for i, (ids, gaps) in enumerate(together):
        ((alone, _),) = sample(policy, policy, prompts[i:i + 1], uniforms[i:i + 1])
        assert ids == alone and gaps.max() < 1e-4
    assert len({len(ids) for ids, _ in together}) > 4


@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_in_16_bits_what_is_sampled_is_read_alike(name, tmp_path):
    """By a run's own limit; the policy, the copy that samples and the reference round alike."""
    save(tmp_path, name)
    system = keys_of_system(dtype="bfloat16")
    policy = load(str(tmp_path), "policy", system, CPU, trained=True)
    ref_policy = load(str(tmp_path), "ref", system, CPU)
    prompts = [[97, 98, 99, 100], [101], [102, 103] * 3]
    with autocast(system, CPU), decoding_copy(policy, system, CPU) as decoder:
        gaps = [gap for _, gap in sample(decoder, policy, prompts,
                                         response_uniforms(1, "test", 0, range(3), 12))]
        read = [m.logprobs(*rows_of_texts())[0] for m in (policy, ref_policy, decoder)]
    assert all(torch.equal(x, read[0]) for x in read) and read[0].dtype == torch.float32
    assert torch.cat(gaps).mean() < 0.02


@pytest.mark.parametrize("name", KINDS)
def test_adapters_on_their_maps(name, tmp_path):
    """Each map of each kind of layer learns, with layers that are computed again; peft agrees."""
    from test_lora import filled, said, said_by_peft  # which imports this file

    save(tmp_path / "base", name)
    gradients = []
    for again in (False, True):
        system = keys_of_system(lora="2:4", gradient_checkpointing=again)
        model = filled(load(f"{tmp_path}/base", "policy", system, CPU, trained=True))
        model.logprobs(*rows_of_texts())[0].square().mean().backward()
        gradients.append({n: p.grad for n, p in model.named_parameters()})
    assert len({key.split("/")[2] for key in model.adapters}) > 2
    for n, g in gradients[0].items():
        assert (g - gradients[1][n]).abs().max() < 1e-5 * max(1, g.abs().max()) and g.any(), n
    model.tokenizer.vocab_size = 260  # transformers' class for Qwen3.5 adds a token of its own
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
        return probe(model, CPU)
    with pytest.raises(BadInput, match=f"cannot decode .*{word}"):
        probe(model, CPU)


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
    want = whole(tokens).logits[mask]
    for path in folder, f"{tmp_path}/policy":
        found = load(path, "policy", keys_of_system(), CPU)
        states = found.states(tokens)
        assert (found.logits(states[mask]) - want).abs().max() < 1e-4
        value_model = load(path, "value", keys_of_system(), CPU, "scalar", trained=True)
        assert (value_model.states(tokens) - states)[mask].abs().max() < 1e-4
        assert not any(p.requires_grad for n, p in value_model.named_parameters() if "visual" in n)


# --------------------------------------------------------------------------------------------------
# the probe, and what is refused

LONG = dict(LONGROPE["rope_parameters"], original_max_position_embeddings=12)
TWO_KINDS = dict(full_attention=LONG, sliding_attention=dict(rope_type="default", rope_theta=500.0))
ROPES = {  # how long a row may be; a length at which the probe finds that other rows change
    "longrope": ("llama", SIZES | dict(head_dim=8, rope_parameters=LONG), 12, 64),
    "of one kind of layers": ("gemma3_text", SIZES | dict(
        head_dim=8, layer_types=[*TWO_KINDS], rope_parameters=TWO_KINDS), 12, 64),
    "dynamic": ("llama", SIZES | rope("dynamic", factor=2.0), 64, 256)}


@pytest.mark.parametrize("name", ROPES)
@torch.no_grad()
def test_the_longest_row_changes_no_other(name, monkeypatch):
    """Rows as long as may be stand beside a text without changing it; longer ones are found."""
    kind, settings, longest, far = ROPES[name]
    model = Model(random_model(kind, settings, noise=0.3))
    assert model.max_positions == longest
    tokens = torch.arange(2, 2 + 2 * longest).view(2, longest) % 97
    chosen = torch.zeros_like(tokens).bool()
    chosen[0, 1:8] = True
    together = model.logprobs(tokens, chosen)[0]
    assert (together - model.logprobs(tokens[:1, :8], chosen[:1, :8])[0]).abs().max() < 1e-4
    probe(model, CPU)
    monkeypatch.setattr(Model, "max_positions", far)
    with pytest.raises(BadInput, match="differ"):
        probe(model, CPU)


def test_what_is_no_model_for_the_job_is_refused(tmp_path, monkeypatch):
    # BERT's head is called "classifier", and has a bias
    bert = written(tmp_path / "bert", random_model("bert", BASE | dict(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2), scalar=True))
    with pytest.raises(BadInput, match="linear map"):
        load(bert, "reward", keys_of_system(), CPU, "scalar")
    first = written(tmp_path / "first", random_model("openai-gpt", GPT))
    with pytest.raises(BadInput, match=f"{first}.* --gradient_checkpointing=False"):
        load(first, "policy", keys_of_system(gradient_checkpointing=True), CPU, trained=True)
    # a family with something between states and logits that Model.logits does not know of
    model, right = Model(random_model("qwen3", HEADS)), Model.logits
    with torch.no_grad():
        probe(model, CPU)
        for wrong in (lambda model, states: 1.05 * right(model, states),
                      lambda model, states: right(model, states.roll(1, -1))):
            monkeypatch.setattr(Model, "logits", wrong)
            with pytest.raises(BadInput, match="cannot decode .*family qwen3"):
                probe(model, CPU)


def test_a_head_of_its_own_that_the_settings_deny_is_refused(tmp_path):
    """As an adapter on head and embedding leaves one, merged. A copy of the embedding is none."""
    theirs = random_model("llama", SIZES | dict(tie_word_embeddings=True))
    folder, file = written(tmp_path, theirs), f"{tmp_path}/model.safetensors"
    tensors, table = load_file(file), theirs.get_input_embeddings().weight.detach()
    save_file(tensors | {"lm_head.weight": table.clone()}, file, {"format": "pt"})
    load(folder, "policy", keys_of_system(), CPU)
    save_file(tensors | {"lm_head.weight": table + 0.1}, file, {"format": "pt"})
    with pytest.raises(BadInput, match="tie_word_embeddings"):
        load(folder, "policy", keys_of_system(), CPU)
    config = f"{folder}/config.json"
    write_json(config, read_json(config) | dict(tie_word_embeddings=False))
    hf = load(folder, "policy", keys_of_system(), CPU).hf
    assert (hf.lm_head.weight - hf.get_input_embeddings().weight - 0.1).abs().max() < 1e-6

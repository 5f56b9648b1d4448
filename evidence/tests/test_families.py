"""
Some forty families of transformers, tiny and random, against transformers: what is read, trained,
scored, saved; the scripts as a user runs them; models that are split, or in 16 bits; the probe.

    python evidence/tests/test_families.py      # prints the table of docs/scale.md
"""
import json
import os
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../tests")]
    import conftest  # noqa: F401  the path, and one thread

import pytest
import torch
import transformers
from packaging import version
from safetensors.torch import load_file, save_file

import tiny
from checkpoint import save_final
from errors import BadInput
from load import load, load_value_model, probe
from model import Model, response_values, states_before
from test_model import CPU, TEXTS, assert_computes, random_model, rows_of_texts, written
from tiny import EOS, PAD, ROOT, Started, keys_of_system, read_log, read_weights, run

BASE = dict(vocab_size=264, bos_token_id=None, eos_token_id=EOS, pad_token_id=PAD)
SIZES = BASE | dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                    num_key_value_heads=2, intermediate_size=48, max_position_embeddings=64)
GPT = BASE | dict(n_embd=32, n_layer=2, n_head=4, n_positions=64)
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
LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=16)
FAMILIES = {  # name in the table: model_type, settings that change what is computed
    "GPT-2": ("gpt2", GPT | dict(tie_word_embeddings=False, n_inner=40)),
    "Pythia (GPT-NeoX)": ("gpt_neox", SIZES),
    "Llama": ("llama", SIZES | LLAMA3 | dict(tie_word_embeddings=True)),
    "Llama with yarn": ("llama", SIZES | rope("yarn", factor=4.0,
                                              original_max_position_embeddings=16)),
    "Llama with dynamic rope": ("llama", SIZES | rope("dynamic", factor=2.0)),
    "Mistral": ("mistral", SIZES | dict(num_key_value_heads=1, sliding_window=5)),
    "Qwen2": ("qwen2", SIZES | dict(tie_word_embeddings=True, use_sliding_window=True,
                                    sliding_window=4, max_window_layers=1)),
    "Qwen3": ("qwen3", HEADS), "Gemma": ("gemma", HEADS),
    "Gemma 2": ("gemma2", HEADS | dict(sliding_window=5, final_logit_softcapping=3.0)),
    "Gemma 3 (text)": ("gemma3_text", HEADS | dict(
        sliding_window=5, layer_types=["sliding_attention", "full_attention"])),
    "Phi": ("phi", SIZES), "Phi-3": ("phi3", SIZES),
    "Phi-3 with longrope": ("phi3", SIZES | dict(original_max_position_embeddings=40) | LONGROPE),
    "SmolLM3": ("smollm3", SIZES), "OLMo 2": ("olmo2", SIZES | dict(attention_bias=True)),
    "StarCoder2": ("starcoder2", SIZES), "GLM-4": ("glm4", SIZES | dict(head_dim=8)),
    "OPT": ("opt", SIZES | dict(ffn_dim=48, word_embed_proj_dim=32, dropout=0.4)),
    "Falcon": ("falcon", SIZES | dict(hidden_dropout=0.4, attention_dropout=0.4,
                                      new_decoder_architecture=False, parallel_attn=False)),
    "Mixtral": ("mixtral", EXPERTS), "Qwen3 MoE": ("qwen3_moe", EXPERTS),
    "DeepSeek-V3": ("deepseek_v3", DEEPSEEK),
    "gpt-oss": ("gpt_oss", EXPERTS | dict(head_dim=8, sliding_window=8)),
    "Cohere": ("cohere", SIZES | dict(logit_scale=0.3)),
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
        back, found = type(theirs).from_pretrained(tmp_path / "ours", output_loading_info=True)
        assert not any(found.values())
        assert (back(tokens[:1]).logits - theirs(tokens[:1]).logits).abs().max() < 1e-5
    before, after = (json.load(open(tmp_path / f / "config.json")) for f in ("theirs", "ours"))
    assert after | before == after  # beside it are names for transformers 4: test_saving.py


@pytest.mark.parametrize("name", READ)
@torch.no_grad()
def test_values_and_scores_are_those_of_beginnings(name, tmp_path):
    """transformers scores a text at its last token: a value is the score of the tokens before."""
    if name in NO_SCORES:
        save(tmp_path, name)
        policy = load(str(tmp_path), "policy", keys_of_system(), CPU)
        for made in (lambda: load(str(tmp_path), "reward", keys_of_system(), CPU, "scalar"),
                     lambda: load_value_model("shared", policy, None, keys_of_system(), CPU)):
            with pytest.raises(BadInput, match=FAMILIES[name][0]):
                made()
        return
    theirs = save(tmp_path, name, scalar=True)
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


def run_families(world, folder, names):
    """
    The three scripts, two iterations each, with a policy of each family, in folder/NAME: {name:
    [the words of the table for sft.py, ppo.py, grpo.py]}.
    """
    words = {"cannot decode": "no: cannot be decoded",
             "ModelForSequenceClassification": "no: has no reward models"}
    said = {}
    for name in names:
        save(f"{folder}/{name}", name)
        small = dict(max_iters=2, dtype="float32")
        keys = small | dict(
            policy_path=f"{folder}/{name}", eval_path="", num_minibatches=1, micro_batch_size=4,
            reward_functions=f"{world.rules}:letters")
        for script, own in (("sft", small | dict(init_from=f"{folder}/{name}", val_path="")),
                            ("ppo", keys | dict(value_init="policy", reward_path="", ppo_epochs=1)),
                            ("grpo", keys)):
            done = run(f"{script}.py", f"{folder}/{name}, {script}",
                       tiny.keys_of(world, f"{script}.py", **own))
            ended = [word for part, word in words.items() if part in done.err[0]]
            assert done.codes == [2 if ended else 0], done
            said.setdefault(name, []).extend(ended or ["yes"])
    return said


def test_families_do_what_the_docs_say(world, tmp_path):
    page = open(f"{ROOT}/docs/scale.md", encoding="utf-8").read()
    table = {name: said.split(" | ") for line in page.splitlines() if line.count(" | ") == 3
             for names, said in [line.strip("| ").split(" | ", 1)] for name in names.split(", ")}
    assert set(FAMILIES) == table.keys() & FAMILIES.keys()
    for name, said in run_families(world, str(tmp_path), RUN).items():
        assert said == table[name], name
        before = read_weights(f"{tmp_path}/{name}")
        for script in [s for s, word in zip(("sft", "ppo", "grpo"), said, strict=True)
                       if word == "yes"]:
            out = f"{tmp_path}/{name}, {script}/out"
            after = transformers.AutoModelForCausalLM.from_pretrained(f"{out}/policy").state_dict()
            if script == "sft":
                assert any(not torch.equal(after[n], before[n]) for n in before.keys() & {*after})
                continue
            first = read_log(out)[0]
            assert first["policy/ratio_gap"] == 0 and abs(first["objective/kl"]) < 1e-5, first
            assert first["policy/sampler_gap"] < 1e-4


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


@pytest.mark.parametrize("keys, name", [
    (dict(dtype="bfloat16"), "gpt-oss"),
    (dict(dtype="bfloat16", master_weights=False), "DeepSeek-V3"),
    (dict(dtype="float64", lora="2"), "Pythia (GPT-NeoX)"),
    (dict(dtype="bfloat16", lora="2", master_weights=False), "Qwen3")], ids=str)
@torch.no_grad()
def test_what_is_saved_is_what_was_computed(tmp_path, keys, name):
    """Steps of 1e-4 of a weight: in bfloat16 numbers above 1 are 0.0078 apart. LoRA, too."""
    theirs = random_model(*FAMILIES[name], noise=0.02).bfloat16()
    path, drawn = written(tmp_path / "theirs", theirs), torch.Generator().manual_seed(3)
    model = load(path, "policy", keys_of_system(**keys), CPU, trained=True)
    own = torch.float32 if "lora" in keys or keys.get("master_weights", True) else torch.bfloat16
    own = torch.float64 if keys["dtype"] == "float64" else own
    # what the family keeps in 32 bits, as newer transformers do routers of DeepSeek-V3, stays so
    kept = model.hf._keep_in_fp32_modules_strict if own == torch.bfloat16 else ()
    for n, p in model.named_parameters():
        assert p.dtype == (torch.float32 if any(part in n for part in kept or ()) else own), n
        p.mul_(1 + 1e-4 * torch.randn(p.shape, generator=drawn))
        if n.endswith(".B"):
            p.normal_(0, 1e-4, generator=drawn)
    save_final(str(tmp_path), "ours", model)
    back, found = type(theirs).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(found.values()) and back.dtype == back.config.dtype == own
    want = {n: t.double() for n, t in model.hf.state_dict().items()}
    for key, adapter in model.adapters.items() if "lora" in keys else ():  # scale B A, by hand
        map_name = f"{model.hf.base_model_prefix}.{key.replace('/', '.')}.weight"
        want[map_name] += 2 * adapter.B.double() @ adapter.A.double()
    for n, t in back.state_dict().items():
        assert (t.double() - want[n]).abs().max() <= (1e-7 if "lora" in keys else 0), n
    save_final(str(tmp_path), "short", model, "bfloat16")
    assert {t.dtype for t in read_weights(tmp_path / "short").values()} == {torch.bfloat16}
    assert transformers.AutoConfig.from_pretrained(tmp_path / "short").dtype == torch.bfloat16


def test_a_family_without_gradient_checkpointing(tmp_path):
    path = written(tmp_path, random_model("openai-gpt", GPT))
    with pytest.raises(BadInput, match=f"{path}.* --gradient_checkpointing=False"):
        load(path, "policy", keys_of_system(gradient_checkpointing=True), CPU, trained=True)


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
    probe(model)
    monkeypatch.setattr(Model, "max_positions", far)
    with pytest.raises(BadInput, match="differ"):
        probe(model)


def test_what_is_no_model_for_the_job_is_refused(tmp_path, monkeypatch):
    save(tmp_path / "policy", "Qwen3", scalar=True)
    # BERT's head is called "classifier", and has a bias
    written(tmp_path / "bert", random_model("bert", BASE | dict(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2), scalar=True))
    for folder, role, head, word in (("policy", "policy", "lm", "is a reward model"),
                                     ("bert", "reward", "scalar", "linear map")):
        with pytest.raises(BadInput, match=word):
            load(f"{tmp_path}/{folder}", role, keys_of_system(), CPU, head)
    # a family with something between states and logits that Model.logits does not know of
    model, right = Model(random_model("qwen3", HEADS)), Model.logits
    with torch.no_grad():
        probe(model)
        for wrong in (lambda model, states: 1.05 * right(model, states),
                      lambda model, states: right(model, states.roll(1, -1))):
            monkeypatch.setattr(Model, "logits", wrong)
            with pytest.raises(BadInput, match="cannot decode .*family qwen3"):
                probe(model)


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
    settings = json.loads(Path(f"{folder}/config.json").read_text())
    tiny.write(f"{folder}/config.json", json.dumps(settings | dict(tie_word_embeddings=False)))
    hf = load(folder, "policy", keys_of_system(), CPU).hf
    assert (hf.lm_head.weight - hf.get_input_embeddings().weight - 0.1).abs().max() < 1e-6


if __name__ == "__main__":
    alike = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, said in run_families(tiny.build(folder), folder, list(FAMILIES)).items():
            alike.setdefault(" | ".join(said), []).append(name)
    print("| families | sft.py | ppo.py | grpo.py |\n|---|---|---|---|")
    for said, names in alike.items():
        print(f"| {', '.join(names)} | {said} |")

"""Tiny random models of transformers: families with the options that change what they compute. Helpers, no tests."""
import pytest
import torch
import transformers as hf

_base = dict(vocab_size=97, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=56,
             max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=None)
_gpt2 = dict(vocab_size=97, n_embd=32, n_layer=3, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2)
_llama3 = dict(rope_type="llama3", rope_theta=500.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
               original_max_position_embeddings=16)
VARIANTS = {
    "gpt2": ("GPT2", dict(_gpt2)),
    "gpt2-untied": ("GPT2", dict(_gpt2, tie_word_embeddings=False, n_inner=40)),
    "gpt_neox": ("GPTNeoX", dict(_base)),
    "llama": ("Llama", dict(_base)),
    "llama3-gqa-tied": ("Llama", dict(_base, num_key_value_heads=2, tie_word_embeddings=True, rope_parameters=_llama3)),
    "mistral-window": ("Mistral", dict(_base, num_key_value_heads=1, sliding_window=5)),
    "qwen2-window-tied": ("Qwen2", dict(_base, num_key_value_heads=2, tie_word_embeddings=True, use_sliding_window=True,
                                        sliding_window=4, max_window_layers=1)),
    "qwen3": ("Qwen3", dict(_base, num_key_value_heads=2, head_dim=10)),
    "olmo2": ("Olmo2", dict(_base, num_key_value_heads=2, attention_bias=True, rms_norm_eps=1e-3)),
    "gemma2": ("Gemma2", dict(_base, num_key_value_heads=2, head_dim=10, sliding_window=5, final_logit_softcapping=3.0)),
    "gemma3": ("Gemma3Text", dict(_base, num_key_value_heads=2, head_dim=10, sliding_window=5, query_pre_attn_scalar=17,
                                  layer_types=["sliding_attention", "full_attention", "sliding_attention"])),
    "cohere": ("Cohere", dict(_base, num_key_value_heads=2, logit_scale=0.3)),
    "granite": ("Granite", dict(_base, num_key_value_heads=2, logits_scaling=3.0, embedding_multiplier=2.0,
                                residual_multiplier=0.5)),
    "phi3-longrope": ("Phi3", dict(_base, num_key_value_heads=2, original_max_position_embeddings=12, rope_parameters=dict(
        rope_type="longrope", rope_theta=500.0, short_factor=[1.0, 1.1, 1.2, 1.3], long_factor=[1.5, 4.0, 9.0, 16.0]))),
    "mixtral": ("Mixtral", dict(_base, num_key_value_heads=2, num_local_experts=4)),
}
LM_CLASS = {"GPT2": "GPT2LMHeadModel", "Gemma3Text": "Gemma3ForCausalLM"}
NO_CLASSIFIER = ("cohere", "granite")


def make(variant, head="lm", seed=0):
    """A random transformers model in fp32 with large weights, biases and norms too, so that nothing is invisible."""
    family, settings = VARIANTS[variant]
    config = getattr(hf, f"{family}Config")(**settings)
    if head == "lm":
        cls = getattr(hf, LM_CLASS.get(family, f"{family}ForCausalLM"))
    else:
        if variant in NO_CLASSIFIER:
            pytest.skip("transformers has no such class")
        config.num_labels = 1
        cls = getattr(hf, f"{family}ForSequenceClassification")
    torch.manual_seed(seed)
    model = cls(config).eval()
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.empty(p.shape).normal_(0, 0.15, generator=generator))
    return model


def add_vision(world):
    """world.seeing: a policy as Gemma 3 4B is, with a vision part that no text reaches, and files of its processor."""
    from checkpoint import save_model
    from tokenizer import load_tokenizer
    from scratch import from_scratch

    tokenizer, folder = load_tokenizer(world.tokenizer), f"{world.root}/seeing"
    text = dict(model_type="gemma3_text", vocab_size=264, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, head_dim=8, intermediate_size=48, max_position_embeddings=64, sliding_window=8,
                eos_token_id=tokenizer.eos_id, pad_token_id=tokenizer.pad_id, bos_token_id=None)
    vision = dict(model_type="siglip_vision_model", hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                  num_attention_heads=2, image_size=28, patch_size=14)
    model = from_scratch(dict(model_type="gemma3", text_config=text, vision_config=vision, mm_tokens_per_image=4,
                              image_token_index=260, boi_token_index=261, eoi_token_index=262, initializer_range=0.2), seed=1)
    with torch.no_grad():  # else the norms' scales and the biases would be 0, which no decay moves
        for p in model.parameters():
            p.add_(torch.empty(p.shape).normal_(0, 0.1, generator=torch.Generator().manual_seed(p.numel())))
    save_model(folder, model, tokenizer)
    for name, content in PROCESSOR.items():
        with open(f"{folder}/{name}", "w", encoding="utf-8") as f:
            f.write(content)


PROCESSOR = {"processor_config.json": '{"processor_class": "Gemma3Processor"}',
             "preprocessor_config.json": '{"image_processor_type": "Gemma3ImageProcessor",\n "size": 28}\n'}


def padded(lengths, left, vocab=97, seed=0):
    """Random tokens (B, T) and mask (B, T) with rows of these lengths, padded on one side with an ordinary id."""
    generator = torch.Generator().manual_seed(seed)
    T = max(lengths)
    tokens = torch.randint(0, vocab, (len(lengths), T), generator=generator)
    places, n = torch.arange(T), torch.tensor(lengths)[:, None]
    mask = places >= T - n if left else places < n
    return tokens.masked_fill(~mask, 2), mask

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
    "gpt2": ("gpt2", dict(_gpt2)),
    "gpt2-untied": ("gpt2", dict(_gpt2, tie_word_embeddings=False, n_inner=40)),
    "gpt_neox": ("gpt_neox", dict(_base)),
    "llama": ("llama", dict(_base)),
    "llama3-gqa-tied": ("llama", dict(_base, num_key_value_heads=2, tie_word_embeddings=True, rope_parameters=_llama3)),
    "mistral-window": ("mistral", dict(_base, num_key_value_heads=1, sliding_window=5)),
    "qwen2-window-tied": ("qwen2", dict(_base, num_key_value_heads=2, tie_word_embeddings=True, use_sliding_window=True,
                                        sliding_window=4, max_window_layers=1)),
    "qwen3": ("qwen3", dict(_base, num_key_value_heads=2, head_dim=10)),
    "olmo2": ("olmo2", dict(_base, num_key_value_heads=2, attention_bias=True, rms_norm_eps=1e-3)),
    "gemma2": ("gemma2", dict(_base, num_key_value_heads=2, head_dim=10, sliding_window=5, final_logit_softcapping=3.0)),
    "gemma3": ("gemma3_text", dict(_base, num_key_value_heads=2, head_dim=10, sliding_window=5, query_pre_attn_scalar=17,
                                  layer_types=["sliding_attention", "full_attention", "sliding_attention"])),
    "cohere": ("cohere", dict(_base, num_key_value_heads=2, logit_scale=0.3)),
    "granite": ("granite", dict(_base, num_key_value_heads=2, logits_scaling=3.0, embedding_multiplier=2.0,
                                residual_multiplier=0.5)),
    "phi3-longrope": ("phi3", dict(_base, num_key_value_heads=2, original_max_position_embeddings=12, rope_parameters=dict(
        rope_type="longrope", rope_theta=500.0, short_factor=[1.0, 1.1, 1.2, 1.3], long_factor=[1.5, 4.0, 9.0, 16.0]))),
    "opt-dropout": ("opt", dict(_base, ffn_dim=56, word_embed_proj_dim=32, dropout=0.4)),  # in the layer's own forward
    "falcon-dropout": ("falcon", dict(_base, hidden_dropout=0.4, attention_dropout=0.4, new_decoder_architecture=False,
                                      parallel_attn=False)),  # the same, from the config
    "mixtral": ("mixtral", dict(_base, num_key_value_heads=2, num_local_experts=4)),
}
NO_CLASSIFIER = ("cohere", "granite")


def make(variant, head="lm", seed=0):
    """A random transformers model in fp32 with large weights, biases and norms too, so that nothing is invisible."""
    kind, settings = VARIANTS[variant]
    config, auto = hf.AutoConfig.for_model(kind, **settings), hf.AutoModelForCausalLM
    if head != "lm":
        if variant in NO_CLASSIFIER:
            pytest.skip("transformers has no such class")
        config.num_labels, auto = 1, hf.AutoModelForSequenceClassification
    torch.manual_seed(seed)
    model = auto.from_config(config).eval()
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.empty(p.shape).normal_(0, 0.15, generator=generator))
    return model


def padded(lengths, left, vocab=97, seed=0):
    """Random tokens (B, T) and mask (B, T) with rows of these lengths, padded on one side with an ordinary id."""
    generator = torch.Generator().manual_seed(seed)
    T = max(lengths)
    tokens = torch.randint(0, vocab, (len(lengths), T), generator=generator)
    places, n = torch.arange(T), torch.tensor(lengths)[:, None]
    mask = places >= T - n if left else places < n
    return tokens.masked_fill(~mask, 2), mask

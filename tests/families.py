"""Tiny random Hugging Face models: each family with the options that change its computation."""
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
    "gpt_neox-sequential-tied": ("GPTNeoX", dict(_base, use_parallel_residual=False, attention_bias=False,
                                                 tie_word_embeddings=True, rope_parameters=dict(
                                                     rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5))),
    "llama": ("Llama", dict(_base)),
    "llama3-gqa-tied": ("Llama", dict(_base, num_key_value_heads=2, tie_word_embeddings=True, rope_parameters=_llama3)),
    "llama-biases-linear": ("Llama", dict(_base, attention_bias=True, mlp_bias=True, head_dim=12, rope_parameters=dict(
        rope_type="linear", rope_theta=10000.0, factor=4.0))),
    "mistral-window": ("Mistral", dict(_base, num_key_value_heads=1, sliding_window=5)),
    "mistral": ("Mistral", dict(_base, num_key_value_heads=2, sliding_window=None)),
    "qwen2-gqa": ("Qwen2", dict(_base, num_key_value_heads=2)),
    "qwen2-window-tied": ("Qwen2", dict(_base, num_key_value_heads=2, tie_word_embeddings=True, use_sliding_window=True,
                                        sliding_window=4, max_window_layers=1)),
    "qwen3": ("Qwen3", dict(_base, num_key_value_heads=2, head_dim=10)),
    "qwen3-biases-tied": ("Qwen3", dict(_base, num_key_value_heads=4, head_dim=8, attention_bias=True,
                                        tie_word_embeddings=True)),
    "olmo2": ("Olmo2", dict(_base, num_key_value_heads=2, attention_bias=True, rms_norm_eps=1e-3)),
    "gemma3": ("Gemma3Text", dict(_base, num_key_value_heads=2, head_dim=10, sliding_window=5, query_pre_attn_scalar=17,
                                  layer_types=["sliding_attention", "full_attention", "sliding_attention"])),
    "gemma3-untied": ("Gemma3Text", dict(_base, num_key_value_heads=1, head_dim=12, attention_bias=True, sliding_window=3,
                                         num_hidden_layers=7, tie_word_embeddings=False, rope_theta=5000.0,
                                         rope_local_base_freq=100.0, rope_scaling=dict(rope_type="linear", factor=8.0))),
}
LM_CLASS = {"GPT2": "GPT2LMHeadModel", "Gemma3Text": "Gemma3ForCausalLM"}


def in_4(family, rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.25, **scaling):
    """The fields of a transformers 4 config.json that say what rope_parameters says in 5."""
    if family == "GPTNeoX":
        return dict(rotary_emb_base=rope_theta, rotary_pct=partial_rotary_factor)
    return dict(rope_theta=rope_theta, rope_scaling=dict(scaling, rope_type=rope_type))


def make(variant, head="lm", seed=0):
    """A random transformers model in fp32 with large weights, biases and norms too, so that nothing is invisible."""
    family, kwargs = VARIANTS[variant]
    if hf.__version__.startswith("4.") and "rope_parameters" in kwargs:
        kwargs = {k: v for k, v in kwargs.items() if k != "rope_parameters"} | in_4(family, **kwargs["rope_parameters"])
    config = getattr(hf, f"{family}Config")(**kwargs)
    if head == "lm":
        cls = getattr(hf, LM_CLASS.get(family, f"{family}ForCausalLM"))
    else:
        config.num_labels = 1
        cls = getattr(hf, f"{family}ForSequenceClassification", None)
        if cls is None:  # Olmo2's, of transformers 4
            pytest.skip(f"transformers {hf.__version__} has no such class")
    torch.manual_seed(seed)
    model = cls(config).eval()
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
    mask = torch.zeros(len(lengths), T, dtype=torch.bool)
    for row, n in enumerate(lengths):
        mask[row, T - n:] = True if left else False
        if not left:
            mask[row, :n] = True
    return tokens.masked_fill(~mask, 2), mask

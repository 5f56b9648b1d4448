"""The key optim=muon: its steps by hand; and what is a vector. (Runs: test_knobs.py.)"""
import math
from types import SimpleNamespace

import pytest
import torch
import transformers
from model import Model
from run import make_optimizer


def nearly_orthogonal(G):
    """Newton and Schulz (kellerjordan.github.io/posts/muon): singular values go to about 1."""
    X = G / math.sqrt(sum(x**2 for x in G.flatten().tolist()))
    for _ in range(5):
        A = X @ X.mT
        X = 3.4445 * X - 4.7750 * A @ X + 2.0315 * A @ A @ X
    return X


def muon_by_hand(W, gradients, lr, decay):
    M = torch.zeros_like(W)
    for G in gradients:
        M = 0.95 * M + 0.05 * G
        step = nearly_orthogonal(0.05 * G + 0.95 * M)  # Nesterov: M as it will be after one more G
        W = (1 - lr * decay) * W - lr * 0.2 * math.sqrt(max(W.shape)) * step
    return W


def adamw_by_hand(W, gradients, lr, decay):
    m, v = torch.zeros_like(W), torch.zeros_like(W)
    for t, G in enumerate(gradients, 1):
        m, v = 0.8 * m + 0.2 * G, 0.9 * v + 0.1 * G**2
        W = (1 - lr * decay) * W - lr * m / (1 - 0.8**t) / ((v / (1 - 0.9**t)).sqrt() + 1e-5)
    return W


@pytest.mark.parametrize("scalar, decay", [(False, 0.3), (True, 0.0)])
def test_steps_by_hand(monkeypatch, scalar, decay):
    """torch iterates in 16 bits; here in 64, to see all digits."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=6, n_positions=4,
                                     num_labels=1, tie_word_embeddings=False)
    auto = (transformers.AutoModelForSequenceClassification if scalar else
            transformers.AutoModelForCausalLM)
    model = Model(auto.from_config(config).double(), "scalar" if scalar else "lm")
    system = SimpleNamespace(optim="muon", zero_stage="", offload="", weight_decay=decay)
    optimizer = make_optimizer(model, "policy", system, 1.0, (0.8, 0.9), 1e-5)
    drawn = torch.Generator().manual_seed(0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    gradients = [{name: torch.randn(p.shape, generator=drawn, dtype=torch.float64)
                  for name, p in before.items()} for _ in range(3)]
    for group in optimizer.param_groups:
        group["lr"] = 1e-2  # as a run sets it
    for each in gradients:
        for name, p in model.named_parameters():
            p.grad = each[name]
        optimizer.step()
    kinds = set()
    for name, p in model.named_parameters():
        is_matrix = ".h." in name and p.dim() == 2  # of a layer: no embedding, no head
        by_hand = muon_by_hand if is_matrix else adamw_by_hand
        wanted = by_hand(before[name], [g[name] for g in gradients], 1e-2, decay * (p.dim() > 1))
        assert (p - wanted).abs().max() < 1e-9, name
        kinds.add((is_matrix, p.dim()))
    assert kinds == {(True, 2), (False, 2), (False, 1)}


STACKED = {  # family, settings: the vectors that are stacked, one for each expert or head
    "gpt_oss": (dict(num_local_experts=4, num_experts_per_tok=2, head_dim=8),
                ["mlp.experts.gate_up_proj_bias", "mlp.experts.down_proj_bias"]),
    "cohere": (dict(use_qk_norm=True), ["self_attn.q_norm.weight", "self_attn.k_norm.weight"]),
    "jamba": (dict(num_experts=2, num_experts_per_tok=1, mamba_dt_rank=4, use_mamba_kernels=False),
              ["mamba.A_log"]),
    "mixtral": (dict(num_local_experts=4), [])}


@pytest.mark.parametrize("optim", ["", "muon", "adafactor"])
@pytest.mark.parametrize("family", STACKED)
@torch.no_grad()
def test_stacked_vectors_are_vectors(family, optim):
    """A step without gradients is the decay alone: of matrices. And Muon takes no vector."""
    settings, stacked = STACKED[family]
    config = transformers.AutoConfig.for_model(family, **dict(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, pad_token_id=0) | settings)
    hf = transformers.AutoModelForCausalLM.from_config(config)
    for p in hf.parameters():
        p.fill_(1.0)
        p.grad = torch.zeros_like(p)
    system = SimpleNamespace(optim=optim, zero_stage="", offload="", weight_decay=0.5)
    optimizer = make_optimizer(Model(hf), "policy", system, 0.1, (0.9, 0.99), 1e-8)
    optimizer.step()
    found = [name for name, p in hf.named_parameters() if p.dim() > 1 and (p == 1).all()]
    assert [name.partition(".layers.0.")[2] for name in found] == stacked
    matrices = {n for n, p in hf.named_parameters() if p.dim() > 1} - set(found)
    assert matrices and all(((hf.get_parameter(n) - 0.95).abs() < 1e-6).all() for n in matrices)
    if optim == "muon":
        by_muon = {p for group in optimizer.parts[0].param_groups for p in group["params"]}
        assert by_muon and not by_muon & {hf.get_parameter(n) for n in found}

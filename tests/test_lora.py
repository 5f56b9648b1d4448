"""
LoRA: an adapter against its own formula and peft (where it is installed), its files, what is refused.
Runs with adapters, on any number of ranks, are in test_zero.py.
"""
import json

import pytest
import torch

from options.lora import Adapted, fill_adapter, load_adapted, save_adapter
from load import load_model
from finished import save_final
from errors import BadInput
from scratch import from_scratch

import tiny

SIZES = dict(vocab_size=260, bos_token_id=None, eos_token_id=258, pad_token_id=259, initializer_range=0.2, hidden_size=16,
             num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, intermediate_size=24, max_position_embeddings=32)
FAMILIES = {"llama": SIZES, "gpt_neox": SIZES, "qwen3": SIZES | dict(head_dim=8, tie_word_embeddings=True),
            "gpt2": dict(vocab_size=260, eos_token_id=258, n_embd=16, n_layer=2, n_head=2, n_positions=32, initializer_range=0.2)}
TOKENS = torch.tensor([[5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 14, 14]])
CHOSEN = torch.tensor([[0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 0, 0]]).bool()


def base_in(folder, family="llama", head="lm", dtype=torch.float32):
    from checkpoint import named_tensors

    model = from_scratch(dict(model_type=family, **FAMILIES[family]), head, seed=1)
    model.hf.save_pretrained(folder, state_dict={n: t.contiguous() for n, t in named_tensors(model)})
    return load_model(str(folder), head, dtype)


def filled(model, noise=0.3):
    """The model with numbers in B, so that its adapters do something."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(".B"):
                p.normal_(0, noise, generator=generator)
    return model


@pytest.mark.parametrize("family, targets, count, rank, alpha, rslora, scale", [
    ("llama", "", 14, 3, 5, None, 5 / 3), ("llama", "q,v", 4, 3, 5, None, 5 / 3),
    ("gpt2", "", 8, 3, 5, None, 5 / 3), ("gpt2", "attn.c_proj", 2, 3, 5, None, 5 / 3),
    ("llama", "", 14, 4, 6, True, 3.0), ("llama", "", 14, 4, 6, False, 1.5), ("llama", "", 14, 9, 2, True, 2 / 3)])
@torch.no_grad()
def test_the_formula(family, targets, count, rank, alpha, rslora, scale, tmp_path):
    """
    W + scale B A, by hand on the matrices of a second copy, gives what the adapter gives, also one of peft's, alone and merged.
    The scale is alpha / sqrt(rank) with use_rslora (arXiv 2312.03732), else alpha / rank.
    """
    base, adapter = str(tmp_path / "base"), tmp_path / "adapter"
    model = filled(Adapted(base_in(base, family, dtype=torch.float64), "lm", rank, alpha, targets))
    plain = load_model(base, dtype=torch.float64)
    assert len(model.adapters) == count
    for key, a in model.adapters.items():
        delta = scale * a.B @ a.A
        plain.hf.base_model.get_submodule(key.replace("/", ".")).weight += delta.t() if family == "gpt2" else delta
    want = plain.logprobs(TOKENS, CHOSEN)[0]
    if rslora is None:
        assert (model.logprobs(TOKENS, CHOSEN)[0] - want).abs().max() < (1e-12 if family == "gpt2" else 1e-5)
    save_adapter(model, str(adapter), base)
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | dict(use_rslora=rslora)))
    for found in (load_adapted(load_model(base, dtype=torch.float64), str(adapter)),
                  load_model(str(adapter), dtype=torch.float64)):
        assert (found.logprobs(TOKENS, CHOSEN)[0] - want).abs().max() < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("head", ["lm", "scalar"])
@torch.no_grad()
def test_files_are_read_again_alone_and_merged_and_by_peft(family, head, tmp_path):
    base = base_in(tmp_path / "base", family)
    base.path = str(tmp_path / "base")
    model = filled(Adapted(base, head, 3, 5, seed=4))
    model.score_shift = 0.5 if head == "scalar" else 0.0

    def said(m):
        return m.logprobs(TOKENS, CHOSEN)[0] if head == "lm" else m.values(TOKENS, CHOSEN)

    save_final(str(tmp_path / "out"), "model", model, tiny.byte_tokenizer())
    adapter = tmp_path / "out" / "model_adapter"
    again = load_adapted(load_model(base.path), str(adapter), head, base.path)
    assert torch.equal(said(again), said(model)) and again.score_shift == model.score_shift
    for folder in (adapter, tmp_path / "out" / "model"):  # merged as it is read, and as it was saved
        merged = load_model(str(folder), head)
        assert not isinstance(merged, Adapted)
        torch.testing.assert_close(said(merged), said(model), rtol=0, atol=2e-5)
    other = Adapted(load_model(base.path), head, 2)
    with pytest.raises(BadInput, match="r = 2"):
        fill_adapter(other, str(adapter))
    peft = pytest.importorskip("peft")
    auto = peft.AutoPeftModelForCausalLM if head == "lm" else peft.AutoPeftModelForSequenceClassification
    theirs = auto.from_pretrained(str(adapter), **({} if head == "lm" else dict(num_labels=1))).eval()
    trunk = theirs.base_model.model
    if head == "lm":
        logits = trunk(TOKENS).logits.log_softmax(-1)
        want = logits[:, :-1].gather(-1, TOKENS[:, 1:, None])[..., 0][CHOSEN[:, 1:]]
    else:
        states = trunk.base_model(TOKENS).last_hidden_state
        want = trunk.score(states)[:, :-1, 0][CHOSEN[:, 1:]] + 0.5
    torch.testing.assert_close(said(model), want, rtol=0, atol=1e-5)


EXPERTS = SIZES | dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8)
DENSE_FIRST = EXPERTS | dict(n_routed_experts=4, n_shared_experts=1, n_group=1, topk_group=1, first_k_dense_replace=1)


@pytest.mark.parametrize("kind, sizes, targets, wrong", [
    ("qwen2_moe", EXPERTS | dict(shared_expert_intermediate_size=16), "", False),
    ("qwen3_moe", EXPERTS | dict(mlp_only_layers=[0]), "", True), ("qwen3_moe", EXPERTS, "", False),
    ("dots1", DENSE_FIRST, "", True), ("dots1", DENSE_FIRST, "q,k,v,o", False)])
@torch.no_grad()
def test_a_line_says_which_adapters_peft_misreads(kind, sizes, targets, wrong, tmp_path, capsys):
    """What peft 0.21.2 misreads is in the table; where it is installed, it is asked."""
    from_scratch(dict(model_type=kind, **sizes), seed=1).hf.save_pretrained(tmp_path / "base")
    model = filled(Adapted(load_model(str(tmp_path / "base")), "lm", 3, 5, targets))
    save_final(str(tmp_path / "out"), "policy", model, tiny.byte_tokenizer())
    assert ("policy_adapter: peft" in capsys.readouterr().out) == wrong
    want = model.logprobs(TOKENS, CHOSEN)[0]
    assert (load_model(str(tmp_path / "out" / "policy")).logprobs(TOKENS, CHOSEN)[0] - want).abs().max() < 1e-4
    found = read_by_peft(tmp_path / "out" / "policy_adapter")
    assert ((found - want).abs().max().item() > 0.01) == wrong


def read_by_peft(adapter):
    """The log-probs of the chosen tokens, computed by peft with the adapter in a folder."""
    peft = pytest.importorskip("peft")
    theirs = peft.AutoPeftModelForCausalLM.from_pretrained(str(adapter)).eval()
    logits = theirs.base_model.model(TOKENS).logits.log_softmax(-1)
    return logits[:, :-1].gather(-1, TOKENS[:, 1:, None])[..., 0][CHOSEN[:, 1:]]


ROUTERS = [  # family, sizes, a layer's maps that choose experts, a layer's other maps
    ("hunyuan_v1_moe", EXPERTS | dict(moe_topk=2), "mlp/gate/wg", 7),
    ("jetmoe", EXPERTS | dict(kv_channels=8, num_key_value_heads=2), "mlp/router/layer self_attention/experts/router/layer", 1),
    ("gemma4_text", EXPERTS | dict(enable_moe_block=True, top_k_experts=2, hidden_size_per_layer_input=0, sliding_window=8,
                                   global_head_dim=8), "router/proj", 7),
    ("dbrx", dict(vocab_size=260, d_model=16, n_heads=2, n_layers=2, max_seq_len=32, initializer_range=0.2,
                  attn_config=dict(kv_n_heads=1, clip_qkv=8.0, rope_theta=1e4),
                  ffn_config=dict(ffn_hidden_size=16, moe_num_experts=4, moe_top_k=2, hidden_size=16)), "ffn/router/layer", 2),
    ("afmoe", EXPERTS | dict(num_dense_layers=0), "mlp/router/gate", 8)]


@pytest.mark.parametrize("kind, sizes, routers, others", ROUTERS)
@torch.no_grad()
def test_routers_get_adapters_only_by_name(kind, sizes, routers, others, tmp_path):
    """Also where the map is in a module of its own; peft and the merged model agree on both adapters."""
    from_scratch(dict(model_type=kind, **sizes), seed=1).hf.save_pretrained(tmp_path / "base")
    routers, numbers = set(routers.split()), "01"
    for targets in ("", ",".join(".".join(name.split("/")[-2:]) for name in routers)):
        model = filled(Adapted(load_model(str(tmp_path / "base")), "lm", 3, 5, targets))
        inside = [key.split("/", 2)[2] for key in model.adapters]
        chooses = [name for name in inside if name in routers]
        assert len(chooses) == (len(routers) * len(numbers) if targets else 0) and set(chooses) <= routers
        assert len(inside) - len(chooses) == (0 if targets else others * len(numbers)), inside
        out = tmp_path / f"out{targets}"
        save_final(str(out), "policy", model, tiny.byte_tokenizer())
        want = model.logprobs(TOKENS, CHOSEN)[0]
        assert (load_model(str(out / "policy")).logprobs(TOKENS, CHOSEN)[0] - want).abs().max() < 1e-4
        if not model.warning():  # that it is needed where it comes, and only there, the test above shows
            assert (read_by_peft(out / "policy_adapter") - want).abs().max() < 1e-4


def test_the_short_name_of_an_mlps_gate_is_no_routers(tmp_path):
    """AFMoE's dense layer, then a mixture's: q, k, v, o and the gate of the attention; in the MLP gate, up, down."""
    kind, sizes, *_ = ROUTERS[-1]
    base = from_scratch(dict(model_type=kind, **sizes | dict(num_dense_layers=1)))
    keys = Adapted(base, "lm", 2, targets="gate,up").adapters.keys()
    assert {key for key in keys if "mlp" in key} == {
        "layers/0/mlp/gate_proj", "layers/0/mlp/up_proj", "layers/1/mlp/shared_experts/gate_proj",
        "layers/1/mlp/shared_experts/up_proj"}


def test_a_map_that_does_more_than_a_product_gets_no_adapter():
    """Phi-MoE's router is made from nn.Linear, but gives weights and the numbers of experts."""
    base = from_scratch(dict(model_type="phimoe", **EXPERTS))
    assert len(Adapted(base, "lm", 2).adapters) == 2 * 4
    with pytest.raises(BadInput, match="'router'"):
        Adapted(base, "lm", 2, targets="q,router")


def test_blocks_that_a_family_does_not_name_are_found_or_refused():
    """BioGPT's class does not name its blocks, six maps each; nor does CTRL's, and its blocks are of no class that is known."""
    small = dict(vocab_size=260, eos_token_id=258, pad_token_id=0, bos_token_id=257)
    base = from_scratch(dict(model_type="biogpt", hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                             intermediate_size=24, max_position_embeddings=32, **small))
    assert len(base.layers()) == 2 and len(Adapted(base, "lm", 2).adapters) == 12
    base = from_scratch(dict(model_type="ctrl", n_embd=16, dff=24, n_layer=2, n_head=2, n_positions=32, **small))
    with pytest.raises(BadInput, match="leave lora out"):
        Adapted(base, "lm", 2)
    with pytest.raises(BadInput, match="leave gradient_checkpointing out"):
        base.recompute()


def test_other_adapters_are_refused(tmp_path):
    base = base_in(tmp_path / "base")
    save_adapter(filled(Adapted(base, "lm", 3, 5)), str(tmp_path / "adapter"), str(tmp_path / "base"))
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    for more in (dict(use_dora=True), dict(of_next_year=dict(a=1)), dict(peft_type="IA3"), dict(bias="all"), dict(r=4),
                 dict(r=0), dict(r=None), dict(lora_alpha="x"), dict(base_model_name_or_path=7),
                 dict(base_model_name_or_path=str(tmp_path / "adapter")), dict(init_lora_weights="pissa")):
        (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(settings | more))
        with pytest.raises(BadInput):
            load_model(str(tmp_path / "adapter"))
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(settings))
    load_model(str(tmp_path / "adapter"))
    with pytest.raises(BadInput, match="down_proj"):
        Adapted(base, targets="nothing", rank=2)
    base_in(tmp_path / "another")
    with pytest.raises(BadInput, match="another"):
        load_adapted(base, str(tmp_path / "adapter"), "lm", str(tmp_path / "another"))


def test_experts_stay_frozen_and_a_line_says_so(tmp_path, capsys):
    experts = SIZES | dict(num_local_experts=4, num_experts_per_tok=2)
    base = from_scratch(dict(model_type="mixtral", **experts))
    model = Adapted(base, "lm", 2)
    assert "experts" in capsys.readouterr().out
    assert len(model.adapters) == 2 * 4 and not any("gate" in key for key in model.adapters)

"""LoRA against peft (where it is installed), and against its own formula: the adapter, its files, the reference without it."""
import json

import pytest
import torch

from engine.adapters import Adapted, load_adapter, save_adapter
from engine.checkpoint import save_final
from engine.pretrained import from_pretrained, save_pretrained
from engine.tokenizers import ByteTokenizer
from errors import BadInput

from families import make, padded
from tiny import read_weights

VARIANTS = ["gpt2", "gpt_neox", "llama3-gqa-tied", "mistral", "qwen2-gqa", "qwen3"]
ALL = "q,k,v,o,gate,up,down"


def adapted(variant, folder, head="lm", targets=ALL, noise=0.3):
    """A model with adapters of rank 3, their B filled, so that they do something; and its folder."""
    make(variant, head=head).save_pretrained(folder / "base")
    model = Adapted(from_pretrained(str(folder / "base"), head=head), head, 3, 5, targets, seed=7)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(".B"):
                p.normal_(0, noise, generator=generator)
    return model


def batch():
    return padded([9, 12, 5], left=True)


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_a_new_adapter_changes_nothing_and_off_is_the_base(variant, tmp_path):
    make(variant).save_pretrained(tmp_path / "base")
    base = from_pretrained(str(tmp_path / "base"))
    want = base(*batch())
    model = Adapted(from_pretrained(str(tmp_path / "base")), "lm", 3, 5)
    assert torch.equal(model(*batch()), want)
    model = adapted(variant, tmp_path)
    moved = model(*batch())
    assert (moved - want).abs().max() > 0.1
    assert torch.equal(model.base(*batch()), want)
    assert torch.equal(model(*batch()), moved)


@pytest.mark.parametrize("head", ["lm", "scalar"])
def test_only_the_adapter_is_trained(head, tmp_path):
    model = adapted("llama", tmp_path, head)
    names = {name for name, p in model.named_parameters() if p.requires_grad}
    adapters = {f"layers.{i}.{name}.{x}" for i in range(3) for name in ALL.split(",") for x in "AB"}
    assert names == adapters | ({"score.weight"} if head == "scalar" else set()) == dict(model.named_parameters()).keys()
    model(*batch()).square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert all(p.grad is None and not p.requires_grad for p in model.base.parameters())


@pytest.mark.parametrize("targets", ["q", "q,v", "o,down", ALL])
def test_the_formula(targets, tmp_path):
    """W x + alpha / rank B A x, by hand on the matrices: what merged weights give is what the adapter gives."""
    model = adapted("llama", tmp_path, targets=targets)
    plain = from_pretrained(str(tmp_path / "base"))
    with torch.no_grad():
        for i, layer in enumerate(model.layers):
            for name in targets.split(","):
                ours = layer[name]
                getattr(plain.layers[i], name).weight += 5 / 3 * ours.B @ ours.A
        assert (plain(*batch()) - model(*batch())).abs().max() < 1e-4
    assert sum(name.endswith(".A") for name, _ in model.named_parameters()) == 3 * len(targets.split(","))


@pytest.mark.parametrize("head", ["lm", "scalar"])
@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_saved_models_are_merged_and_adapters_come_back(variant, head, tmp_path):
    model = adapted(variant, tmp_path, head)
    want = model(*batch())
    save_pretrained(model, tmp_path / "merged")
    merged = from_pretrained(str(tmp_path / "merged"), head=head)
    assert (merged(*batch()) - want).abs().max() < 1e-4
    save_adapter(model, tmp_path / "adapter")
    again = Adapted(from_pretrained(str(tmp_path / "base"), head=head), head, 3, 5, seed=99)
    if head == "scalar":
        again.score.weight.zero_()
    load_adapter(again, tmp_path / "adapter")
    assert torch.equal(again(*batch()), want)


@pytest.mark.parametrize("variant", ["gpt2", "gpt_neox", "llama3-gqa-tied"])
@torch.no_grad()
def test_a_base_of_16_bits_is_merged_in_32(variant, tmp_path, capsys):
    """
    The changes of a long run at 1B-like sizes are a hundredth of a weight or less: in bfloat16 they
    would be wrong by more than half. Every number saved is W + 5 / 3 B A, rounded once; what has no
    adapter is the base's, exactly.
    """
    make(variant).save_pretrained(tmp_path / "base")
    base = from_pretrained(str(tmp_path / "base"), matrices=torch.bfloat16)
    model = Adapted(base, "lm", 3, 5, seed=7)
    generator = torch.Generator().manual_seed(1)
    for name, p in model.named_parameters():
        if name.endswith(".B"):
            p.normal_(0, 1e-3, generator=generator)
    tokenizer = ByteTokenizer(dict(markers=[], eos="<eos>", pad="<pad>"))
    save_final(str(tmp_path), "merged", model, tokenizer)
    said = capsys.readouterr().out
    assert said.startswith(f"{tmp_path}/merged is merged in float32 (0.00 GiB)")
    assert said.count("\n") == 1
    again = Adapted(base, "lm", 3, 5)
    load_adapter(again, tmp_path / "merged_adapter")
    assert all(torch.equal(p, model.get_parameter(name)) for name, p in again.named_parameters())
    plain = Adapted(from_pretrained(str(tmp_path / "base")), "lm", 3, 5)
    save_final(str(tmp_path), "plain", plain, tokenizer)
    assert capsys.readouterr().out == ""  # of a base in float32 there is nothing to say
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["dtype"] == "float32"
    merged, compared = from_pretrained(str(tmp_path / "merged"), dtype=torch.float64), 0
    for name, p in base.named_parameters():
        module, _, kind = name.rpartition(".")
        ours = model.layers[int(module.split(".")[1])] if module.startswith("layers.") else {}
        saved, W = merged.get_parameter(name), p.double()
        if kind == "weight" and module.split(".")[-1] in ours:
            a = ours[module.split(".")[-1]]
            delta = 5 / 3 * a.B.double() @ a.A.double()
            assert (saved - (W + delta)).abs().max() <= 2**-24 * (W + delta).abs().max()
            assert (saved - W - delta).norm() < 1e-3 * delta.norm()
            rounded = (W + delta).bfloat16().double()  # as it was saved before
            assert (rounded - W - delta).norm() > 0.5 * delta.norm()
            compared += 1
        else:
            assert torch.equal(saved, W)
    assert compared == 3 * (6 if variant.startswith("gpt") else 7)
    assert all(t.dtype == torch.float32 for t in read_weights(tmp_path / "merged").values())


def test_adapters_that_do_not_fit(tmp_path):
    model = adapted("llama", tmp_path)
    save_adapter(model, tmp_path / "adapter")
    for rank, targets, said in ((2, ALL, "is its rank the same"), (3, "q,v", "targets must be the same")):
        other = Adapted(model.base, "lm", rank, 5, targets)
        with pytest.raises(BadInput, match=said):
            load_adapter(other, tmp_path / "adapter")
    with pytest.raises(BadInput, match="LoRA targets 'q,x'"):
        Adapted(model.base, "lm", 3, 5, "q,x")
    with pytest.raises(BadInput, match="its lora_alpha is 5, not 6"):
        load_adapter(Adapted(model.base, "lm", 3, 6), tmp_path / "adapter")
    make("gpt2").save_pretrained(tmp_path / "gpt2")
    with pytest.raises(BadInput, match="take all three or none"):
        Adapted(from_pretrained(str(tmp_path / "gpt2")), "lm", 3, 5, "q,v")


@pytest.mark.parametrize("head", ["lm", "scalar"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_peft_loads_our_adapter_and_computes_the_same(variant, head, tmp_path):
    """
    Logits, or per-token scalars, and the gradients of every A and B, in float64; but transformers' RMSNorm and rotation compute
    in float32 whatever they are given, so those families agree to its precision.
    """
    peft = pytest.importorskip("peft")
    import transformers as hf

    model = adapted(variant, tmp_path, head).double()
    model.base.double()
    save_adapter(model, tmp_path / "adapter", str(tmp_path / "base"))
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert settings["r"] == 3 and settings["lora_alpha"] == 5
    kind = hf.AutoModelForCausalLM if head == "lm" else hf.AutoModelForSequenceClassification
    theirs = kind.from_pretrained(tmp_path / "base", **({} if head == "lm" else dict(num_labels=1)))
    theirs = peft.PeftModel.from_pretrained(theirs, str(tmp_path / "adapter"), is_trainable=True).double().eval()
    tokens, mask = batch()
    positions = (mask.long().cumsum(1) - 1).clamp(min=0)
    if head == "lm":
        got = theirs(input_ids=tokens, attention_mask=mask.long(), position_ids=positions).logits
    else:
        inner = theirs.base_model.model
        hidden = inner.base_model(tokens, attention_mask=mask.long(), position_ids=positions).last_hidden_state
        got = inner.score(hidden)[..., 0]
    want = model(tokens, mask)
    tolerance = 1e-9 if variant.startswith("gpt") else 2e-5
    assert (got - want)[mask].abs().max() < tolerance * want[mask].abs().max()
    (got[mask] ** 2).sum().backward()
    (want[mask] ** 2).sum().backward()
    from engine.adapters import adapter_tensors
    from engine.pretrained import to_hf

    theirs = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    compared = 0
    for name, parts in adapter_tensors(model).items():
        if "lora_" not in name:
            continue
        want = next(g for n, g in theirs.items() if name.removesuffix(".weight").removeprefix("base_model.model.") in n)
        ours = to_hf(model.config, "", {part: p.grad for p, part in parts})
        assert (want - ours).abs().max() < tolerance * want.abs().max()
        compared += 1
    assert compared >= 3 * 2 * 4

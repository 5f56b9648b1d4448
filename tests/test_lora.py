"""LoRA against peft (where it is installed), and against its own formula: the adapter, its files, the reference without it."""
import json

import pytest
import torch

from engine.adapters import Adapted, load_adapter, save_adapter
from engine.checkpoint import save_final
from engine.pretrained import from_pretrained, save_pretrained
from engine.tokenizers import ByteTokenizer
from errors import BadInput
from loss import response_logprobs, response_values

from families import make, padded
from tiny import read_weights

VARIANTS = ["gpt2", "gpt_neox", "llama3-gqa-tied", "mistral", "qwen2-gqa", "qwen3", "olmo2", "gemma3"]
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


@pytest.mark.parametrize("variant, rank, chunk", [("llama3-gqa-tied", 0, 0), ("gpt2", 0, 4), ("llama", 3, 0)])
def test_a_shared_trunk_runs_once_and_learns_from_both_losses(variant, rank, chunk, tmp_path):
    """What is read and all gradients, of two micro-batches, against heads for each of which the trunk runs. rank 0: no LoRA."""
    make(variant).save_pretrained(tmp_path / "base")
    found, runs = [], []
    for shared in (False, True):
        base = from_pretrained(str(tmp_path / "base"), dtype=torch.float64)
        policy = Adapted(base, "lm", rank, seed=7) if rank else base
        for i, p in enumerate(policy.parameters() if rank else ()):  # a new B is 0, and then A has no gradient
            p.data.normal_(0, 0.3, generator=torch.Generator().manual_seed(i))
        value_model = Adapted(policy, "scalar", seed=3)
        policy.shared_trunk = value_model.shared_trunk = shared
        layer, said = base.layers[0], []
        layer.runs, layer.original = 0, layer.forward
        layer.forward = lambda *args, layer=layer: setattr(layer, "runs", layer.runs + 1) or layer.original(*args)
        generator = torch.Generator().manual_seed(2)
        for _ in range(2):
            tokens, mask = padded([9, 12, 5, 8], left=True)
            mask[2, -2:] = False
            weights = torch.rand(2, 4, 6, generator=generator, dtype=torch.float64)
            batch = dict(tokens=tokens, attention_mask=mask, response_mask=mask[:, -6:] & mask[:, -7:-1])
            with torch.no_grad():
                mb = dict(batch)
                said += [response_logprobs(policy, mb, 0.7, 90, chunk)[0], response_values(value_model, mb)]
            mb = dict(batch)
            logprobs, entropy = response_logprobs(policy, mb, 0.7, 90, chunk)
            ((logprobs + entropy) * weights[0]).sum().backward()
            values = response_values(value_model, mb)
            (values**2 * weights[1]).sum().backward()
            said += [logprobs.detach(), entropy.detach(), values.detach()]
        said += [p.grad for model in (policy, value_model) for p in model.parameters() if p.requires_grad]
        found.append(said)
        runs.append(layer.runs)
    assert runs == [8, 4]  # of two heads, read and trained, in two micro-batches
    assert all(0 < x.abs().max() for x in found[0])
    assert all((x - y).abs().max() <= 1e-12 * (1 + x.abs().max()) for x, y in zip(*found, strict=True))


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


@pytest.mark.parametrize("variant, targets", [("llama3-gqa-tied", "q"), ("qwen2-gqa", "v,up"), ("olmo2", ALL), ("gpt2", ALL)])
def test_joined_maps_have_their_own_adapters(variant, targets, tmp_path):
    """A decoding copy has q, k and v as one matrix, gate and up as another: each keeps its adapter."""
    model, plain = (adapted(variant, tmp_path, targets=targets) for _ in range(2))
    for layer in model.base.layers:
        layer.join(lambda matrix: matrix)
        assert not hasattr(layer, "k") and not hasattr(layer, "up")
    tokens, mask = batch()
    with torch.no_grad():
        assert torch.allclose(model(tokens, mask), plain(tokens, mask), atol=1e-5, rtol=0)


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
    assert said.startswith(f"{tmp_path}/merged is saved in float32, as 16 bits would round small changes away")
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


# ---------------------------------------------------------------------------------------------------------------------
# a folder with only an adapter is a model


def by_hand(folder, scale):
    """{name on disk: tensor} of a base model's file with W + scale B A in the place of W, in float64, from the files alone."""
    from safetensors.torch import load_file

    settings = json.loads((folder / "adapter_config.json").read_text())
    weights = {name: t.double() for name, t in read_weights(settings["base_model_name_or_path"]).items()}
    adapter = load_file(folder / "adapter_model.safetensors")
    for name, A in adapter.items():
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        if name.endswith("lora_A.weight"):
            delta = scale * adapter[name.replace("lora_A", "lora_B")].double() @ A.double()
            weights[f"{module}.weight"] += delta.t() if settings["fan_in_fan_out"] else delta
        elif "lora_" not in name:
            weights[name.removeprefix("base_model.model.")] = A.double()
    return weights


def rewrite(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("variant, head", [
    ("gpt2", "lm"), ("gpt_neox", "lm"), ("llama3-gqa-tied", "lm"), ("olmo2", "lm"), ("gemma3", "lm"),
    ("gpt2", "scalar"), ("gpt_neox", "scalar"), ("qwen3", "scalar")])
@torch.no_grad()
def test_an_adapters_folder_is_the_merged_model(variant, head, tmp_path):
    """In float64 as by hand, in float32 as the model that was trained; in bfloat16 merged first, and rounded once."""
    model = adapted(variant, tmp_path, head)
    model.config.score_shift = 0.5 if head == "scalar" else 0.0
    save_adapter(model, tmp_path / "adapter", str(tmp_path / "base"))
    path = str(tmp_path / "adapter")
    read = from_pretrained(path, head)
    assert not read.new_head and read.config.score_shift == model.config.score_shift
    assert (read(*batch()) - model(*batch())).abs().max() < 1e-4
    save_pretrained(from_pretrained(path, head, dtype=torch.float64), tmp_path / "merged")
    merged, want = read_weights(tmp_path / "merged"), by_hand(tmp_path / "adapter", 5 / 3)
    assert merged.keys() == want.keys()
    assert all((merged[name] - t).abs().max() < 1e-14 for name, t in want.items())
    save_pretrained(from_pretrained(path, head, dtype=torch.bfloat16), tmp_path / "short")
    for name, t in read_weights(tmp_path / "short").items():
        assert t.dtype == torch.bfloat16 and ((t != want[name].float().bfloat16()).float().mean() < 1e-2), name
    assert head == "scalar" or from_pretrained(path, "scalar").new_head  # a reward model on it gets a new head


@pytest.mark.parametrize("head", ["lm", "scalar"])
def test_an_adapter_is_the_same_bytes_each_time(head, tmp_path):
    """safetensors writes the notes of a file in an order of chance: 20 files with two notes would differ."""
    model = adapted("gpt2", tmp_path, head)
    model.config.score_shift = 0.5 if head == "scalar" else 0.0
    for i in range(20):
        save_adapter(model, tmp_path / f"saved {i}", "base")
    assert len({(tmp_path / f"saved {i}" / "adapter_model.safetensors").read_bytes() for i in range(20)}) == 1


@torch.no_grad()
def test_an_adapter_on_an_adapter_and_rslora(tmp_path, monkeypatch):
    """Paths are as they were: relative ones are looked for from the folder where one works."""
    monkeypatch.chdir(tmp_path)
    first = adapted("llama3-gqa-tied", tmp_path)
    save_adapter(first, "first", "base")
    second = Adapted(from_pretrained("first"), "scalar", 3, 5, "q,down", seed=3)
    for name, p in second.named_parameters():
        if name.endswith(".B"):
            p.normal_(0, 0.3)
    save_adapter(second, "second", "first")
    assert (from_pretrained("second", "scalar")(*batch()) - second(*batch())).abs().max() < 1e-4
    with pytest.raises(BadInput, match="it makes a reward model, not a language model"):
        from_pretrained("second")
    rewrite(tmp_path / "first" / "adapter_config.json", use_rslora=True)
    save_pretrained(from_pretrained("first", dtype="float64"), "rs")
    merged, want = read_weights("rs"), by_hand(tmp_path / "first", 5 / 3**0.5)
    assert all((merged[name] - t).abs().max() < 1e-14 for name, t in want.items())
    from engine.run_folder import content_hash

    before = content_hash("second")  # a run that resumes must find the base as it was
    (tmp_path / "base" / "new.json").write_text("{}")
    assert content_hash("second") != before


def test_the_lm_head_of_an_adapter_is_no_part_of_a_scalar_model(tmp_path):
    """peft saves it for modules_to_save = ["lm_head"]; such a policy may still become a reward or value model."""
    from safetensors.torch import load_file, save_file

    model, file = adapted("gpt_neox", tmp_path), tmp_path / "adapter" / "adapter_model.safetensors"
    save_adapter(model, tmp_path / "adapter", str(tmp_path / "base"))
    save_file(load_file(file) | {"base_model.model.embed_out.weight": torch.full((97, 32), 2.0)}, file)
    assert (from_pretrained(str(tmp_path / "adapter")).lm_head.weight == 2.0).all()
    scalar = from_pretrained(str(tmp_path / "adapter"), "scalar")
    assert scalar.new_head and torch.equal(scalar.norm.weight, model.base.norm.weight)


def test_adapters_that_are_no_models(tmp_path):
    model = adapted("llama", tmp_path, "scalar")
    folder = tmp_path / "adapter"
    save_adapter(model, folder, str(tmp_path / "base"))
    good = (folder / "adapter_config.json").read_text()
    for changed, said in (
            (dict(base_model_name_or_path="out/gone"), "an adapter, and the model that it was .* cannot be used: out/gone"),
            (dict(base_model_name_or_path=""), "does not name the model that the adapter was trained on"),
            (dict(base_model_name_or_path=str(folder)), "and that is the adapter itself"),
            (dict(use_dora=True), "use_dora = True is not supported"), (dict(bias="all"), "bias = 'all' is not supported"),
            (dict(rank_pattern={"q_proj": 4}), "rank_pattern = .* is not supported"),
            (dict(peft_type="IA3"), "peft_type = 'IA3' is not supported"),
            (dict(init_lora_weights="pissa"), "init_lora_weights = 'pissa' has changed the base model"),
            (dict(r=4), r"lora_[AB].weight is .*, but in this base model would be .*with r = 4")):
        rewrite(folder / "adapter_config.json", **changed)
        with pytest.raises(BadInput, match=said) as e:
            from_pretrained(str(folder), "scalar")
        assert "\n" not in str(e.value)
        (folder / "adapter_config.json").write_text(good)
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "adapter_model.safetensors")
    name, head = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight", "base_model.model.score.weight"
    for spoiled, said in (
            ({n: t for n, t in tensors.items() if n != name}, "q_proj.lora_B.weight is missing"),
            (tensors | {"base_model.model.odd.weight": torch.ones(97, 32)}, "it has no such weight"),
            (tensors | {head: torch.ones(2, 32)}, "its score head has 2 labels"),
            (tensors | {name: tensors[name] * float("nan")}, "holds NaN")):
        save_file(spoiled, folder / "adapter_model.safetensors")
        with pytest.raises(BadInput, match=said):
            from_pretrained(str(folder), "scalar")


@pytest.mark.parametrize("variant", ["gpt2", "gpt_neox", "llama3-gqa-tied", "qwen2-gqa", "olmo2", "gemma3"])
@torch.no_grad()
def test_what_peft_saved_is_read_as_peft_merges_it(variant, tmp_path):
    """A language model's adapter, with rsLoRA, and a reward model's with its score head (modules_to_save)."""
    peft = pytest.importorskip("peft")
    import transformers as hf

    make(variant).save_pretrained(tmp_path / "base")
    for task, kind in (("CAUSAL_LM", hf.AutoModelForCausalLM), ("SEQ_CLS", hf.AutoModelForSequenceClassification)):
        torch.manual_seed(3)
        base = kind.from_pretrained(tmp_path / "base", **({} if task == "CAUSAL_LM" else dict(num_labels=1)))
        config = peft.LoraConfig(task_type=task, r=4, lora_alpha=7, use_rslora=task == "CAUSAL_LM", target_modules="all-linear")
        theirs = peft.get_peft_model(base, config)
        for name, p in theirs.named_parameters():
            if "lora_B" in name:
                p.normal_(0, 0.3)
        folder = tmp_path / task
        theirs.save_pretrained(folder)
        theirs.merge_and_unload().save_pretrained(tmp_path / "theirs")
        ours = from_pretrained(str(folder), "lm" if task == "CAUSAL_LM" else "scalar")
        save_pretrained(ours, tmp_path / "ours")
        want = read_weights(tmp_path / "theirs")
        for name, t in read_weights(tmp_path / "ours").items():
            assert (t - want[name]).abs().max() < 2e-6, name
        assert task == "CAUSAL_LM" or not ours.new_head

"""model.py against transformers: logits and scalars of every family, padding, saving and loading, on random models."""
import json
import os
import subprocess
import sys

import pytest
import torch
import transformers as hf

from engine.pretrained import from_pretrained, from_scratch, save_pretrained
from errors import BadInput
from model import freeze

from families import VARIANTS, make, padded

all_variants = pytest.mark.parametrize("variant", VARIANTS)


def hf_positions(mask):
    return (mask.long().cumsum(1) - 1).clamp(min=0)


def hf_scalars(model, tokens, mask):
    """Per-token scalars of a sequence-classification model: its pooling is bypassed, for it looks for pad ids."""
    hidden = model.base_model(tokens, attention_mask=mask.long(), position_ids=hf_positions(mask)).last_hidden_state
    return model.score(hidden)[..., 0]


@all_variants
@pytest.mark.parametrize("left", [True, False], ids=["left", "right"])
@torch.no_grad()
def test_logits_equal_transformers(variant, left, tmp_path):
    theirs = make(variant)
    theirs.save_pretrained(tmp_path)
    ours = freeze(from_pretrained(str(tmp_path)))
    tokens, mask = padded([9, 12, 1, 4], left)
    want = theirs(tokens, attention_mask=mask.long(), position_ids=hf_positions(mask)).logits
    got = ours(tokens, mask)
    assert want[mask].std() > 0.3  # the comparison must have something to compare
    assert (got - want)[mask].abs().max() < 1e-4
    assert got.isfinite().all()  # padding too: it is masked later, and NaN * 0 is NaN
    full, _ = padded([12, 12], left)
    assert (ours(full) - theirs(full).logits).abs().max() < 1e-4


@all_variants
@torch.no_grad()
def test_scalar_head_reads_and_writes_sequence_classification(variant, tmp_path):
    theirs = make(variant, head="scalar")
    theirs.save_pretrained(tmp_path / "theirs")
    ours = freeze(from_pretrained(str(tmp_path / "theirs"), head="scalar"))
    assert not ours.new_head
    for left in (True, False):
        tokens, mask = padded([9, 12, 1, 4], left)
        assert (ours(tokens, mask) - hf_scalars(theirs, tokens, mask))[mask].abs().max() < 1e-4
    ours.config.score_shift = -1.25
    save_pretrained(ours, str(tmp_path / "ours"))
    back = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "ours")
    assert type(back) is type(theirs) and back.config.num_labels == 1
    assert (hf_scalars(back, tokens, mask) - hf_scalars(theirs, tokens, mask))[mask].abs().max() == 0
    again = from_pretrained(str(tmp_path / "ours"), head="scalar")
    assert again.config.score_shift == -1.25
    assert torch.equal(again(tokens, mask), ours(tokens, mask))


@all_variants
@torch.no_grad()
def test_what_we_save_transformers_loads(variant, tmp_path):
    theirs = make(variant)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = from_pretrained(str(tmp_path / "theirs"))
    for p in ours.parameters():
        p.mul_(1.5)
    save_pretrained(ours, str(tmp_path / "ours"))
    back = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    assert type(back) is type(theirs)
    tokens, _ = padded([12, 12], True)
    assert (back(tokens).logits - ours(tokens)).abs().max() < 1e-4
    for key, value in theirs.config.to_dict().items():
        if key not in ("_name_or_path", "transformers_version", "torch_dtype"):
            assert back.config.to_dict()[key] == value, key
    again = from_pretrained(str(tmp_path / "ours"))
    assert torch.equal(again(tokens), ours(tokens))
    if ours.config.tied:
        assert not any("lm_head" in n for n, _ in ours.named_parameters())


@all_variants
@torch.no_grad()
def test_cache_and_response_length_change_nothing(variant, tmp_path):
    make(variant).save_pretrained(tmp_path)
    model = freeze(from_pretrained(str(tmp_path), dtype="float64"))
    tokens, mask = padded([9, 12, 3], True)
    whole = model(tokens, mask)
    assert torch.equal(model(tokens, mask, response_length=4), whole[:, -5:-1])
    from model import KVCache

    cache = KVCache(model.config, 3, 12, torch.float64, "cpu")
    parts = [model(tokens[:, :6], mask[:, :6], cache=cache)]
    for t in range(6, 12):
        parts.append(model(tokens[:, t:t + 1], mask[:, :t + 1], cache=cache))
    assert (torch.cat(parts, 1) - whole)[mask].abs().max() < 1e-10


@all_variants
@torch.no_grad()
def test_left_padding_does_not_matter(variant, tmp_path):
    make(variant).save_pretrained(tmp_path)
    model = freeze(from_pretrained(str(tmp_path), dtype="float64"))
    row, _ = padded([7], True)
    alone = model(row)
    for pad in range(1, 6):
        tokens = torch.cat([torch.full((1, pad), 2), row], 1)
        mask = torch.cat([torch.zeros(1, pad, dtype=torch.bool), torch.ones(1, 7, dtype=torch.bool)], 1)
        assert (model(tokens, mask)[:, pad:] - alone).abs().max() < 1e-10


@pytest.mark.parametrize("variant", ["gpt2", "llama3-gqa-tied", "mistral-window"])
@torch.no_grad()
def test_a_mask_with_holes(variant, tmp_path):
    """A hole in the middle is not right padding, though the first token is real."""
    theirs = make(variant)
    theirs.save_pretrained(tmp_path)
    ours = from_pretrained(str(tmp_path))
    tokens, _ = padded([12, 12], True)
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[0, 3:6] = mask[1, 10] = False
    want = theirs(tokens, attention_mask=mask.long(), position_ids=hf_positions(mask)).logits
    assert (ours(tokens, mask) - want)[mask].abs().max() < 1e-4
    assert (ours(tokens) - want)[mask].abs().max() > 1e-2


def test_shards_and_bare_trunks(tmp_path):
    theirs = make("llama")
    theirs.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert (tmp_path / "shards" / "model.safetensors.index.json").exists()
    tokens, _ = padded([8, 8], True)
    with torch.no_grad():
        want = theirs(tokens).logits
        assert (from_pretrained(str(tmp_path / "shards"))(tokens) - want).abs().max() < 1e-4
        gpt2 = make("gpt2")
        gpt2.transformer.save_pretrained(tmp_path / "bare")  # no "transformer." prefix, like the hub's gpt2
        bare = from_pretrained(str(tmp_path / "bare"))
        assert (bare(tokens) - gpt2(tokens).logits).abs().max() < 1e-4
    shard = sorted(f for f in os.listdir(tmp_path / "shards") if f.endswith(".safetensors"))[1]
    os.remove(tmp_path / "shards" / shard)
    with pytest.raises(BadInput, match=shard):
        from_pretrained(str(tmp_path / "shards"))


class Trap:
    """An object whose unpickling would run code: here, make a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def test_old_bin_files_load_and_run_nothing(tmp_path):
    """pytorch_model.bin, in one file, in shards, and as from before torch 1.6; safetensors are preferred where there are both."""
    theirs = make("llama")
    theirs.save_pretrained(tmp_path / "new")
    want = from_pretrained(str(tmp_path / "new")).state_dict()
    config = (tmp_path / "new" / "config.json").read_text()
    tensors = {name: t.clone() for name, t in theirs.state_dict().items()}
    for kind in ("zip", "legacy", "shards"):
        folder = tmp_path / kind
        folder.mkdir()
        (folder / "config.json").write_text(config)
        if kind == "shards":
            names, index = sorted(tensors), {}
            for i in range(2):
                part = f"pytorch_model-0000{i + 1}-of-00002.bin"
                torch.save({n: tensors[n] for n in names[i::2]}, folder / part)
                index |= dict.fromkeys(names[i::2], part)
            (folder / "pytorch_model.bin.index.json").write_text(json.dumps(dict(weight_map=index)))
        else:
            torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=kind == "zip")
        got = from_pretrained(str(folder)).state_dict()
        assert got.keys() == want.keys() and all(torch.equal(got[n], want[n]) for n in want), kind
    for old in (True, False):
        evil = {"model.embed_tokens.weight": tensors["model.embed_tokens.weight"], "x": Trap(str(tmp_path / "made"))}
        torch.save(evil, tmp_path / "zip" / "pytorch_model.bin", _use_new_zipfile_serialization=old)
        with pytest.raises(BadInput, match="pytorch_model.bin: not a file of mere weights"):
            from_pretrained(str(tmp_path / "zip"))
        assert not (tmp_path / "made").exists()
    for damaged in (b"", b"nonsense", (tmp_path / "legacy" / "pytorch_model.bin").read_bytes()[:5000]):
        (tmp_path / "zip" / "pytorch_model.bin").write_bytes(damaged)
        with pytest.raises(BadInput, match="pytorch_model.bin: not a file of mere weights") as e:
            from_pretrained(str(tmp_path / "zip"))
        assert "\n" not in str(e.value)
    torch.save([1, 2], tmp_path / "zip" / "pytorch_model.bin")
    with pytest.raises(BadInput, match="not a dict of tensors"):
        from_pretrained(str(tmp_path / "zip"))
    (tmp_path / "new" / "pytorch_model.bin").write_bytes(b"nonsense")
    from_pretrained(str(tmp_path / "new"))


def test_hub_style_rope_settings(tmp_path):
    """transformers 5 writes rope_parameters; the hub's configs have rope_theta, rope_scaling, rotary_pct at the top."""
    for variant in ("llama3-gqa-tied", "gpt_neox-sequential-tied"):
        theirs = make(variant)
        theirs.save_pretrained(tmp_path / variant)
        file = tmp_path / variant / "config.json"
        config = json.loads(file.read_text())
        rope = config.pop("rope_parameters", None)  # None: transformers 4 has written it, in this style
        if rope and variant.startswith("llama3"):
            config["rope_theta"] = rope.pop("rope_theta")
            config["rope_scaling"] = rope
        elif rope:
            config["rotary_pct"], config["rotary_emb_base"] = rope["partial_rotary_factor"], rope["rope_theta"]
        file.write_text(json.dumps(config))
        tokens, _ = padded([12, 12], True)
        with torch.no_grad():
            got = from_pretrained(str(tmp_path / variant))(tokens)
            assert (got - theirs(tokens).logits).abs().max() < 1e-4


def test_new_scalar_head_on_a_language_model(tmp_path):
    config = dict(model_type="llama", vocab_size=50, hidden_size=4095, num_hidden_layers=1, num_attention_heads=1,
                  intermediate_size=8, max_position_embeddings=8, head_dim=2)
    save_pretrained(from_scratch(config), str(tmp_path))
    model = from_pretrained(str(tmp_path), head="scalar", seed=3)
    assert model.new_head
    assert model.score.weight.std().item() == pytest.approx(1 / 64, rel=0.05)  # 1 / sqrt(4095 + 1)
    again = from_pretrained(str(tmp_path), head="scalar", seed=3)
    assert torch.equal(model.score.weight, again.score.weight)


def test_loading_never_holds_two_copies(tmp_path):
    """The resident peak of a fresh process grows by one model and its largest tensor, not by two models."""
    config = dict(model_type="llama", vocab_size=8000, hidden_size=512, num_hidden_layers=12, num_attention_heads=8,
                  intermediate_size=1536, max_position_embeddings=64)
    save_pretrained(from_scratch(config), str(tmp_path))
    code = ("import sys, safetensors.torch; sys.path.insert(0, sys.argv[1]); from engine.pretrained import from_pretrained\n"
            "def peak(): return next(int(x.split()[1]) / 1024 for x in open('/proc/self/status') if x.startswith('VmHWM'))\n"
            "before = peak(); model = from_pretrained(sys.argv[2]); print(peak() - before)\n")
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    done = subprocess.run([sys.executable, "-c", code, root, str(tmp_path)], capture_output=True, text=True, check=True)
    size = os.path.getsize(tmp_path / "model.safetensors") / 2**20
    assert size > 150
    assert size < float(done.stdout) + 20 and float(done.stdout) < 1.6 * size


def test_freeze():
    config = dict(model_type="gpt2", vocab_size=11, n_embd=8, n_layer=1, n_head=2, n_positions=8)
    model = from_scratch(config)
    assert freeze(model) is model and not model.training
    assert not any(p.requires_grad for p in model.parameters())


def test_bad_models_get_one_line(tmp_path):
    with pytest.raises(BadInput, match="no such model folder"):
        from_pretrained(str(tmp_path / "nowhere"))
    with pytest.raises(BadInput, match="no config.json"):
        from_pretrained(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(BadInput, match="'bert' is not supported; quartet knows gpt2"):
        from_pretrained(str(tmp_path))
    make("llama").save_pretrained(tmp_path)
    os.remove(tmp_path / "model.safetensors")
    with pytest.raises(BadInput, match="no model.safetensors"):
        from_pretrained(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"not a tensor file")
    with pytest.raises(BadInput, match="not a readable safetensors file"):
        from_pretrained(str(tmp_path))
    biased = make("llama-biases-linear")
    biased.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(dict(config, mlp_bias=False)))
    with pytest.raises(BadInput, match="more that config.json does not announce"):
        from_pretrained(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(dict(config, vocab_size=98)))
    with pytest.raises(BadInput, match=r"\(97, 32\)"):
        from_pretrained(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(dict(config, rope_parameters=dict(rope_type="yarn", factor=2.0))))
    with pytest.raises(BadInput, match="yarn"):
        from_pretrained(str(tmp_path))

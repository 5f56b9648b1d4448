"""model.py against transformers: logits and scalars of every family, padding, saving and loading, on random models."""
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
import transformers as hf
from huggingface_hub.utils import filter_repo_objects

from engine.adapters import Adapted, save_adapter
from engine.hf_files import find_folder
from engine.pretrained import from_pretrained, from_scratch, save_pretrained
from engine.tokenizers import load_tokenizer
from errors import BadInput
from model import Documents, document_attention, freeze, step_attention, window_mask

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
def test_cache_changes_nothing(variant, tmp_path):
    """Prompts read together and a step for each token behind them, in rows of another order: as one forward of each row."""
    from cache import KVCache
    from packing import pack_prompts

    make(variant).save_pretrained(tmp_path)
    model = freeze(from_pretrained(str(tmp_path), dtype="float64"))
    tokens, mask = padded([9, 12, 3], True)
    real = [row[m].tolist() for row, m in zip(tokens, mask, strict=True)]
    want = [model(torch.tensor([row]))[0] for row in real]  # (T, V) each
    read = [6, 4, 2]  # tokens of the prompts; the last one is taken by two rows
    which, rows = [0, 1, 2, 2], [2, 0, 3, 1]
    cache = KVCache(model.config, 4, 13, torch.float64, "cpu")
    packed = pack_prompts([ids[:n] for ids, n in zip(real, read, strict=True)], "cpu")
    for _ in range(2):  # the second time the rows have been used
        cache.take(rows, which, packed.lengths)
        assert cache.lengths.tolist() == [4, 2, 6, 2] and cache.longest == 6
        logits = model(packed.tokens, packed=packed, cache=cache)[0]
        assert (logits - torch.stack([x[n - 1] for x, n in zip(want, read, strict=True)])).abs().max() < 1e-10
        for t in range(7):
            new = torch.zeros(4, 1, dtype=torch.int64)
            for row, i in zip(rows, which, strict=True):
                new[row] = real[i][min(read[i] + t, len(real[i]) - 1)]  # a row that is at its end gets something
            cache.begin_step()
            logits = model(new, cache=cache)[:, 0]
            for row, i in zip(rows, which, strict=True):
                if read[i] + t < len(real[i]):
                    assert (logits[row] - want[i][read[i] + t]).abs().max() < 1e-10
        assert cache.lengths.tolist() == [11, 9, 13, 9]


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


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize("KV", [1, 2, 4])
@pytest.mark.parametrize("S", [1, 5, 9])  # of 9 columns
def test_attention_of_one_token_is_the_formula(S, KV, dtype, tolerance):
    """softmax(scale q k) v by loops over rows and heads: row 0 sees S columns, row 1 one, row 2 the last one alone."""
    n, H, hd = 3, 4, 8
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)
               for shape in ((n, H, hd), (n, KV, 9, hd), (n, KV, 9, hd)))
    seen = torch.zeros(n, S, dtype=torch.bool)
    seen[0], seen[1, 0], seen[2, -1] = True, True, True
    mask = torch.zeros(n, 1, 1, S, dtype=dtype).masked_fill(~seen[:, None, None], -torch.inf)
    expected = torch.zeros(n, H, hd, dtype=torch.float64)
    for row in range(n):
        for head in range(H):
            keys, values = (x[row, head * KV // H, :S][seen[row]].double() for x in (k, v))  # (seen, hd)
            expected[row, head] = (0.3 * keys @ q[row, head].double()).softmax(0) @ values
    for values in (v[:, :, :S], v[:, :, :S].clone(), v[:, :, :S].mT.contiguous().mT):  # in any memory
        y = step_attention(q, k[:, :, :S], values, mask, 0.3)
        assert y.dtype == dtype and (y.double() - expected).abs().max() < tolerance


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("amx", [False, True])
def test_attention_in_16_bits_rounds_once_without_amx(amx, window, autocast, monkeypatch):
    """
    softmax(0.3 q k) v and its gradients, in float64 by a dense mask over two documents. Without AMX the result is that,
    rounded to bfloat16; with AMX torch's kernel also rounds the shares of each token.
    """
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    N, H, KV, hd, lengths = 12, 4, 2, 8, (7, 5)
    g = torch.Generator().manual_seed(0)
    exact = [torch.randn(N, heads, hd, generator=g, dtype=torch.float64).bfloat16().double() for heads in (H, KV, KV)]
    weight = torch.randn(N, H, hd, generator=g, dtype=torch.float64).bfloat16()  # of each result in the loss
    document, position = torch.tensor([0] * 7 + [1] * 5), torch.arange(N)
    seen = (document[:, None] == document) & (position[:, None] >= position)
    if window:
        seen &= position[:, None] - position < window
    q, k, v = (x.requires_grad_() for x in exact)
    k, v = k.repeat_interleave(H // KV, 1), v.repeat_interleave(H // KV, 1)
    scores = 0.3 * torch.einsum("ihd,jhd->hij", q, k)
    expected = torch.einsum("hij,jhd->ihd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)
    (expected * weight).sum().backward()

    low = [x.detach().to(torch.float32 if autocast else torch.bfloat16).requires_grad_() for x in exact]
    masks = {L: window_mask(L, window, torch.bfloat16, "cpu") for L in lengths if L > window > 0}
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = document_attention(*low, Documents(list(lengths), None, None, window, masks), 0.3)
    (y * weight).sum().backward()
    assert y.dtype == torch.bfloat16
    if not amx:
        assert ((y.double() - expected).abs() <= 2**-8 * expected.abs() + 1e-6).all()  # half a unit of 8 bits
    for ours, theirs in zip([y, *(x.grad for x in low)], [expected, *(x.grad for x in exact)], strict=True):
        assert (ours.double() - theirs).abs().max() < 0.03 * theirs.abs().max()


@pytest.mark.parametrize("variant", ["gpt2", "llama3-gqa-tied", "mistral-window"])
@torch.no_grad()
def test_a_mask_with_holes(variant, tmp_path):
    """A hole in the middle is as if it were not there. (transformers counts it as a part of a window.)"""
    theirs = make(variant)
    theirs.save_pretrained(tmp_path)
    ours = from_pretrained(str(tmp_path))
    tokens, _ = padded([12, 12], True)
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[0, 3:6] = mask[1, 10] = False
    want = theirs(tokens, attention_mask=mask.long(), position_ids=hf_positions(mask)).logits
    if not any(ours.config.windows):
        assert (ours(tokens, mask) - want)[mask].abs().max() < 1e-4
    for row in range(2):
        assert (ours(tokens, mask)[row, mask[row]] - ours(tokens[row:row + 1, mask[row]])).abs().max() < 1e-4
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
    for variant in ("llama3-gqa-tied", "gpt_neox-sequential-tied", "gemma3-untied"):
        theirs = make(variant)
        theirs.save_pretrained(tmp_path / variant)
        file = tmp_path / variant / "config.json"
        config = json.loads(file.read_text())
        rope = config.pop("rope_parameters", None)  # None: transformers 4 has written it, in this style
        if rope and variant.startswith("llama3"):
            config["rope_theta"] = rope.pop("rope_theta")
            config["rope_scaling"] = rope
        elif rope and variant.startswith("gemma3"):  # and five of six layers slide, without a list of them
            whole, local = rope["full_attention"], rope["sliding_attention"]
            config["rope_theta"], config["rope_local_base_freq"] = whole.pop("rope_theta"), local["rope_theta"]
            config["rope_scaling"] = whole
            assert config.pop("layer_types") == ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
        elif rope:
            config["rotary_pct"], config["rotary_emb_base"] = rope["partial_rotary_factor"], rope["rope_theta"]
        file.write_text(json.dumps(config))
        tokens, _ = padded([12, 12], True)
        with torch.no_grad():
            ours = from_pretrained(str(tmp_path / variant))
            assert (ours(tokens) - theirs(tokens).logits).abs().max() < 1e-4

        # what we save has both kinds of names: transformers 4 would silently take its defaults for rope_parameters
        theirs.save_pretrained(tmp_path / "new")
        save_pretrained(from_pretrained(str(tmp_path / "new")), str(tmp_path / "saved"))
        saved = json.loads((tmp_path / "saved" / "config.json").read_text())
        assert rope is None or {"rope_parameters", *config} <= saved.keys() | {"layer_types"}
        assert {name: saved[name] for name in config if "rope" in name or "rot" in name} == {
            name: value for name, value in config.items() if "rope" in name or "rot" in name}


class Hub:
    """A fake huggingface_hub: repositories are folders in `root`; `fetched` is what has been downloaded, in order."""

    def __init__(self, root):
        self.root, self.fetched = root, []

    def snapshot_download(self, name, allow_patterns=None, ignore_patterns=None):
        there = self.root / name
        if not there.is_dir():
            raise OSError(f"404 Client Error. Repository Not Found for {name}")
        cache = self.root / "cache" / name.replace("/", "--")
        files = sorted(str(f.relative_to(there)) for f in there.rglob("*") if f.is_file())
        for file in filter_repo_objects(files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns):
            if not (cache / file).exists():
                self.fetched.append(f"{name}/{file}")
                (cache / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(there / file, cache / file)
        cache.mkdir(parents=True, exist_ok=True)
        return str(cache)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    fake = Hub(tmp_path / "hub")
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    return fake


def test_only_what_is_read_is_downloaded(hub, tmp_path):
    """config.json first; then the small files, the weights once, and none of what lies beside them."""
    make("llama").save_pretrained(hub.root / "org/shards", max_shard_size="20KB")
    make("llama").save_pretrained(hub.root / "org/one")
    tensors = make("gpt2").state_dict()
    make("gpt2").save_pretrained(hub.root / "old")
    torch.save(tensors, hub.root / "old/pytorch_model.bin")
    os.remove(hub.root / "old/model.safetensors")
    for name in ("org/shards", "org/one"):
        for more in ("consolidated.safetensors", "original/params.json", "original/model.safetensors", "onnx/x.onnx", "a.gguf",
                     "pytorch_model.bin", "model.fp16.safetensors", "flax_model.msgpack", "README.md", "tokenizer.json"):
            (hub.root / name / more).parent.mkdir(exist_ok=True)
            (hub.root / name / more).write_text("{}")
    shards = {f"org/shards/{f.name}" for f in (hub.root / "org/shards").glob("model-*.safetensors")}
    assert len(shards) > 3
    small = {"config.json", "generation_config.json", "tokenizer.json"}
    tokens, _ = padded([8, 8], True)
    for name, weights in (("org/shards", {*shards, "org/shards/model.safetensors.index.json"}),
                          ("org/one", {"org/one/model.safetensors"}), ("old", {"old/pytorch_model.bin"})):
        hub.fetched.clear()
        find_folder(name)  # for its tokenizer
        assert hub.fetched[0] == f"{name}/config.json" and not any(f.endswith((".safetensors", ".bin")) for f in hub.fetched)
        model = from_pretrained(name)
        assert set(hub.fetched) == weights | {f"{name}/{f}" for f in small if (hub.root / name / f).exists()}, name
        with torch.no_grad():
            assert (model(tokens) - make("gpt2" if name == "old" else "llama")(tokens).logits).abs().max() < 1e-4
    with pytest.raises(BadInput, match="org/none: no such folder here, and the hub did not give it: 404 Client Error"):
        from_pretrained("org/none")


def test_an_adapter_of_the_hub_brings_its_base(hub, tmp_path):
    make("llama").save_pretrained(hub.root / "org/base")
    model = Adapted(from_pretrained("org/base"), "lm", 3, 5)
    with torch.no_grad():
        for layer in model.layers:
            layer["q"].B.normal_()
    save_adapter(model, hub.root / "me/adapter", "org/base")
    (hub.root / "me/adapter/optimizer.safetensors").write_text("large")
    hub.fetched.clear()
    tokens, _ = padded([8, 8], True)
    with torch.no_grad():
        assert (from_pretrained("me/adapter")(tokens) - model(tokens)).abs().max() < 1e-4
    assert hub.fetched == ["me/adapter/adapter_config.json", "me/adapter/adapter_model.safetensors"]


@pytest.mark.parametrize("config, said", [
    (dict(model_type="mixtral", num_local_experts=8), "'mixtral' is not supported, it is a Mixture of Experts; quartet knows"),
    (dict(model_type="qwen3_moe", num_experts=128), "'qwen3_moe' is not supported, it is a Mixture of Experts"),
    (dict(model_type="deepseek_v3", n_routed_experts=256), "it is a Mixture of Experts"),
    (dict(model_type="gemma3", text_config=dict(model_type="gemma3_text"), vision_config={"x": 1}), "a model that reads images"),
    (dict(model_type="llama4", text_config=dict(num_local_experts=16)), "'llama4' is not supported, it is a model of several"),
    (dict(model_type="t5", is_encoder_decoder=True), "'t5' is not supported, it is an encoder and a decoder"),
    (dict(model_type="mamba"), "'mamba' is not supported; quartet knows gpt2"), (dict(), "model_type None is not supported"),
    (dict(model_type="llama", hidden_size=8), "'num_attention_heads' is missing")])
def test_a_model_of_another_kind_is_refused_before_it_is_downloaded(config, said, hub):
    (hub.root / "org/model").mkdir(parents=True)
    for name in ("model.safetensors", "tokenizer.json"):
        (hub.root / "org/model" / name).write_text("x")
    (hub.root / "org/model/config.json").write_text(json.dumps(config))
    for load in (from_pretrained, load_tokenizer):
        with pytest.raises(BadInput, match=said) as e:
            load("org/model")
        assert str(e.value).startswith("org/model: config.json: ") and "\n" not in str(e.value)
    assert hub.fetched == ["org/model/config.json"]


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

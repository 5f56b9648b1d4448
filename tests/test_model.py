"""
model.py, load.py and finished.py: tiny random models of transformers, against transformers' own logits of each text alone, and
loops; folders that are refused, the probe, and what is saved.
"""
import json
import math
import os
import pickle
import re
import shutil

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from checkpoint import save_model
from errors import BadInput
from finished import model_card, public
from model import Model, freeze
from load import load_model, probe, unread_parameters
from scratch import from_scratch
from tokenizer import load_tokenizer

import models
import tiny
from families import NO_CLASSIFIER, VARIANTS, make, padded
from tiny import read_weights
from tools.policies import plain

FAMILIES = ["gpt2", "llama3-gqa-tied", "gemma2", "cohere", "mixtral", "phi3-longrope"]
WIDE = ("gpt2",)  # of these transformers computes everything in float64, if it is asked to
LENGTHS = [9, 12, 1, 5]
families = pytest.mark.parametrize("variant", FAMILIES)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """A function that gives the folder of a family, saved by transformers; nobody may write into it."""
    root = tmp_path_factory.mktemp("models")

    def folder(variant, head="lm"):
        path = root / f"{variant} {head}"
        if not path.exists():
            make(variant, head).save_pretrained(path)
        return str(path)
    return folder


def precision(variant):
    """(dtype, how far numbers may be apart)."""
    return (torch.float64, 1e-12) if variant in WIDE else (torch.float32, 1e-5)


def some_rows():
    """tokens (4, 12), padded on the right, and chosen: of each row the second half, the last row's second token besides."""
    tokens, mask = padded(LENGTHS, left=False)
    chosen = mask & (torch.arange(12) >= torch.tensor(LENGTHS)[:, None] // 2)
    chosen[:, 0], chosen[3, 1] = False, True
    return tokens, chosen


def alone(theirs, tokens, chosen, temperature=1.0, vocab_size=97):
    """Log-prob and entropy of each chosen token, by a loop over the tokens of each text alone; with a gradient."""
    logprobs, entropies = [], []
    for ids, picked, n in zip(tokens, chosen, LENGTHS, strict=True):
        logits = theirs(ids[None, :n]).logits[0]  # (n, V)
        for t in range(1, n):
            if picked[t]:
                p = (logits[t - 1, :vocab_size] / temperature).exp()
                p = p / p.sum()
                logprobs.append(p[ids[t]].log())
                entropies.append(-(p * p.log()).sum())
    return torch.stack(logprobs), torch.stack(entropies)


@families
def test_logprobs_and_entropies_are_those_of_each_text_alone(variant, folder_of):
    dtype, limit = precision(variant)
    model = freeze(load_model(folder_of(variant), dtype=dtype))
    theirs = hf.AutoModelForCausalLM.from_pretrained(folder_of(variant), dtype=dtype).eval().requires_grad_(False)
    tokens, chosen = some_rows()
    tokens = tokens.clamp(max=89)  # the ids from 90 on are padding of the vocabulary below
    for temperature, vocab_size, chunk in ((1.7, 97, 1), (0.6, 90, 4), (1.0, None, 0)):
        want = alone(theirs, tokens, chosen, temperature, vocab_size)
        got = model.logprobs(tokens, chosen, temperature, vocab_size, chunk, entropy=True)
        for a, b in zip(got, want, strict=True):
            assert a.dtype == dtype and (a - b).abs().max() < limit
    assert want[0].std() > 0.2 and not model.logprobs(tokens, chosen)[1].any()  # no entropy is asked for: 0
    last = torch.tensor(LENGTHS) - 1
    for row, n in enumerate(LENGTHS):
        want = theirs(tokens[row:row + 1, :n]).logits[0, -1]
        assert (model.last_logits(tokens, last)[row] - want).abs().max() < limit


@pytest.mark.parametrize("variant", [*FAMILIES, "opt-dropout", "falcon-dropout"])
def test_gradients_are_those_of_each_text_alone(variant, folder_of):
    """With chunks of the logits and with layers that are computed again, without the dropout that is in some of them."""
    dtype, limit = precision(variant)
    model = load_model(folder_of(variant), dtype=dtype)
    theirs = hf.AutoModelForCausalLM.from_pretrained(folder_of(variant), dtype=dtype).eval()
    tokens, chosen = some_rows()
    weights = torch.randn(2, int(chosen.sum()), generator=torch.Generator().manual_seed(0), dtype=dtype)
    passes = []
    model.recompute()
    assert len(model.layers()) == 3
    inner = next(model.layers()[1].children())
    inner.register_forward_hook(lambda *_: passes.append(torch.is_grad_enabled()))
    for found in (model.logprobs(tokens, chosen, 0.8, chunk=4, entropy=True), alone(theirs, tokens, chosen, 0.8)):
        sum((w * x).sum() for w, x in zip(weights, found, strict=True)).backward()
    gradients = dict(theirs.named_parameters())
    for name, p in model.hf.named_parameters():
        want = gradients[name].grad
        assert (p.grad - want).abs().max() < 20 * limit * max(1, want.abs().max()), name
    assert max(p.grad.abs().max() for p in model.parameters()) > 0.1
    assert len(passes) == 2 and not any(m.training for m in model.hf.modules())
    # decoding with a cache goes on as before
    cache = hf.DynamicCache(config=model.hf.config)
    with torch.no_grad():
        model.next_logits(tokens[1:2, :8], cache)
        assert (model.next_logits(tokens[1:2, 8:9], cache)[0] - theirs(tokens[1:2, :9]).logits[0, -1]).abs().max() < 1e-4


@pytest.mark.parametrize("variant", [v for v in FAMILIES if v not in NO_CLASSIFIER])
@torch.no_grad()
def test_values_and_scores_are_those_of_beginnings(variant, folder_of):
    """transformers scores a text at its last token: the value before token t is the score of the t tokens before it."""
    dtype, limit = precision(variant)
    folder = folder_of(variant, "scalar")
    model = load_model(folder, "scalar", dtype)
    theirs = hf.AutoModelForSequenceClassification.from_pretrained(folder, dtype=dtype).eval()
    assert not model.new_head
    model.score_shift = -1.25
    tokens, chosen = some_rows()

    def score(row, n):
        return theirs(tokens[row:row + 1, :n]).logits.item() - 1.25

    want = [score(row, t) for row, t in chosen.nonzero().tolist()]
    assert (model.values(tokens, chosen) - torch.tensor(want, dtype=dtype)).abs().max() < limit
    want = torch.tensor([score(row, n) for row, n in enumerate(LENGTHS)], dtype=dtype)
    assert (model.scores(tokens, torch.tensor(LENGTHS) - 1) - want).abs().max() < limit and want.std() > 0.1


@torch.no_grad()
def test_scores_are_float32_under_autocast(folder_of):
    """Scores around 100 in steps of much less than 1/2, which would be those of bfloat16."""
    model = load_model(folder_of("llama", "scalar"), "scalar")
    model.score_shift = 100.0
    tokens, chosen = some_rows()
    with torch.autocast("cpu", torch.bfloat16):
        values = model.values(tokens, chosen)
        logprobs, _ = load_model(folder_of("llama")).logprobs(tokens, chosen)
    assert values.dtype == logprobs.dtype == torch.float32 and (values % 0.5 != 0).any()


# ---------------------------------------------------------------------------------------------------------------------
# loading


def rewrite(folder, change):
    """Change the tensors of a saved model, a dict, by a function."""
    tensors = load_file(folder / "model.safetensors")
    tensors = change(tensors) or tensors
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def say(folder, **settings):
    """Change config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def spoil(name, value):
    return lambda folder: rewrite(folder, lambda tensors: tensors[name].view(-1)[3:4].fill_(value) and None)


class Payload:
    """Unpickled, it makes a file in the working folder."""

    def __reduce__(self):
        return open, ("ran", "w")


def pickled(folder, alone=True):
    if alone:
        os.remove(folder / "model.safetensors")
    for name in (".metadata", "adapter_model.bin", "pytorch_model.bin"):
        (folder / name).write_bytes(pickle.dumps(Payload()))


def indexed(name):
    def change(folder):
        pickled(folder)
        (folder / "model.safetensors.index.json").write_text(json.dumps(dict(metadata={}, weight_map={"lm_head.weight": name})))
    return change


def foreign(folder):
    (folder / "own.py").write_text("open('ran', 'w')\nclass Own: pass\n")
    say(folder, model_type="own", architectures=["OwnForCausalLM"],
        auto_map={"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"})


def truncate(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


WEIGHT, NORM = "transformer.h.1.mlp.c_fc.weight", "transformer.ln_f.bias"
REFUSED = {  # what is done to the folder of a GPT-2, the words of the error
    "missing": (lambda f: rewrite(f, lambda t: t.pop(WEIGHT) is None), f"tensor '{WEIGHT}' is missing"),
    "unexpected": (lambda f: rewrite(f, lambda t: t.update(odd=torch.ones(2))), "'odd'"),
    "transposed": (lambda f: rewrite(f, lambda t: t.update({WEIGHT: t[WEIGHT].T.contiguous()})), f"'{WEIGHT}' has the shape"),
    "one layer less": (lambda f: say(f, n_layer=2), "'transformer.h.2"),
    "inf": (spoil(NORM, -torch.inf), f"tensor '{NORM}' holds NaN"),
    "pickled": (pickled, "pickled weights are not read"),
    "quantized": (lambda f: say(f, quantization_config=dict(quant_method="bitsandbytes", load_in_4bit=True)), "quantized"),
    "foreign code": (foreign, "config.json"),
    "truncated": (truncate, "cannot load it"),
    "a word for a width": (lambda f: say(f, n_embd="wide"), "config.json|cannot load"),
    **{f"an index of {name}": (indexed(name), "weight_map")
       for name in ("pytorch_model.bin", "../base/x.safetensors", "/etc/passwd", 5)},
    **{f"{key} = {value}": (lambda f, key=key, value=value: say(f, **{key: value}), "model") for key, value in (
        ("sliding_window", math.nan), ("sliding_window", 1e30), ("score_shift", "x"), ("logit_scale", 10**400),
        ("quantization_config", dict(quant_method="gptq")), ("n_positions", 10**30))},
}
IGNORED = [  # what a config.json may say of code; without it, it is the same model
    dict(attn_implementation="kernels-community/flash-attn"), dict(_attn_implementation="someone/kernel@main:f"),
    dict(experts_implementation="someone/kernel"), dict(auto_map={"AutoConfig": "mine.X", "AutoModelForCausalLM": "mine.Y"}),
    dict(attribute_map={"x": "_attn_implementation_internal"}, x="someone/kernel"), dict(get_text_config=1),
    dict(configuration_files=["config.9.json"]), dict(transformers_weights="other.safetensors")]


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make("gpt2").save_pretrained(tmp_path / "model")
    damage, words = REFUSED[name]
    damage(tmp_path / "model")
    with pytest.raises(BadInput, match=words) as caught:
        load_model(str(tmp_path / "model"))
    assert str(tmp_path / "model") in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "ran").exists()  # no code of the folder was run


@pytest.mark.parametrize("settings", IGNORED, ids=str)
def test_what_a_config_says_of_code_is_dropped(settings, folder_of, tmp_path, monkeypatch):
    """So is what lies beside the weights: pickles, an adapter, another shard."""
    monkeypatch.chdir(tmp_path)
    folder = shutil.copytree(folder_of("gpt2"), tmp_path / "other")
    pickled(folder, alone=False)
    say(folder, **settings)
    shutil.copy(folder / "model.safetensors", folder / "shard-00000-model-00001-of-00001.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(dict(peft_type="LORA", base_model_name_or_path="someone/model")))
    model = load_model(str(folder))
    for name, p in load_model(folder_of("gpt2")).named_parameters():
        assert (model.get_parameter(name) == p).all()
    assert model.hf.config._attn_implementation in ("sdpa", "eager") and not os.path.exists("ran")


def test_what_is_no_reward_model_is_refused(folder_of, tmp_path):
    theirs = make("llama", "scalar")
    config = type(theirs.config)(**theirs.config.to_dict() | dict(num_labels=2))
    hf.LlamaForSequenceClassification(config).save_pretrained(tmp_path / "two labels")
    with pytest.raises(BadInput, match="has the shape"):
        load_model(str(tmp_path / "two labels"), "scalar")
    # BERT's head is called "classifier", and has a bias
    bert = hf.BertConfig(vocab_size=97, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_labels=1)
    hf.BertForSequenceClassification(bert).save_pretrained(tmp_path / "bert")
    with pytest.raises(BadInput, match="one linear map to one score"):
        load_model(str(tmp_path / "bert"), "scalar")
    # a reward model is no language model, and a policy of these families cannot become a reward model
    with pytest.raises(BadInput, match="missing|'score.weight'"):
        load_model(folder_of("llama", "scalar"))
    for variant in NO_CLASSIFIER:
        with pytest.raises(BadInput, match=f"no sequence classifier of the family {variant}"):
            load_model(folder_of(variant), "scalar")


@torch.no_grad()
def test_a_bfloat16_file_as_float32(tmp_path):
    theirs = make("qwen3").bfloat16()
    theirs.save_pretrained(tmp_path)
    model = load_model(str(tmp_path))
    assert model.file_dtype == torch.bfloat16 and model.hf.dtype == torch.float32
    for p, q in zip(model.parameters(), theirs.parameters(), strict=True):
        assert p.dtype == torch.float32 and torch.equal(p, q.float())
    assert load_model(str(tmp_path), dtype=torch.float64).hf.dtype == torch.float64


def test_a_new_head_is_drawn_from_the_seed(folder_of):
    first, again, other = (load_model(folder_of("gpt2"), "scalar", seed=seed) for seed in (3, 3, 4))
    heads = [m.hf.score.weight for m in (first, again, other)]
    assert first.new_head and torch.equal(*heads[:2]) and not torch.equal(*heads[1:])
    assert heads[0].shape == (1, 32) and 0.5 < heads[0].std() * 33**0.5 < 2
    for p, q in zip(first.hf.base_model.parameters(), load_model(folder_of("gpt2")).hf.base_model.parameters(), strict=True):
        assert torch.equal(p, q)


# ---------------------------------------------------------------------------------------------------------------------
# the probe


def test_the_probe_accepts(folder_of):
    for variant in VARIANTS:
        probe(load_model(folder_of(variant)))


LONGROPE = dict(VARIANTS["phi3-longrope"][1]["rope_parameters"], original_max_position_embeddings=12)
SIZES = dict(VARIANTS["llama"][1], num_key_value_heads=2, head_dim=8)
ROPES = {  # how long a row may be; up to where the probe looks, and what it says then
    "llama, longrope": ("llama", SIZES | dict(rope_parameters=LONGROPE), 12, 64, "differ"),
    "one kind of layers": ("gemma3_text", SIZES | dict(
        num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"], rope_parameters=dict(
            full_attention=LONGROPE, sliding_attention=dict(rope_type="default", rope_theta=500.0))), 12, 64, "differ"),
    "phimoe": ("phimoe", SIZES | dict(num_local_experts=4, original_max_position_embeddings=12, rope_parameters=LONGROPE | dict(
        short_mscale=1.0, long_mscale=1.3)), 12, 64, "differ"),
    "dynamic": ("llama", SIZES | dict(rope_parameters=dict(rope_type="dynamic", rope_theta=500.0, factor=2.0)), 64, 256,
                "differ"),
    "yarn": ("llama", SIZES | dict(rope_parameters=dict(rope_type="yarn", rope_theta=500.0, factor=4.0,
                                                        original_max_position_embeddings=16)), 64, 64, None),
    "a temperature for each position": ("ministral3", SIZES, 64, 64, None)}


@pytest.mark.parametrize("name", ROPES)
@torch.no_grad()
def test_the_longest_row_changes_no_other(name, monkeypatch):
    """Rows as long as may be stand beside a text without changing it; and the probe finds what a longer one would change."""
    kind, sizes, longest, far, words = ROPES[name]
    model = freeze(from_scratch(dict(model_type=kind, **sizes, initializer_range=0.3), seed=1))
    assert model.max_positions == longest
    tokens = torch.arange(2, 2 + 2 * longest).view(2, longest) % 97
    chosen = torch.zeros_like(tokens).bool()
    chosen[0, 1:8] = True
    gap = (model.logprobs(tokens, chosen)[0] - model.logprobs(tokens[:1, :8], chosen[:1, :8])[0]).abs().max()
    assert gap < 1e-5
    probe(model)
    monkeypatch.setattr(Model, "max_positions", far)
    if words is None:
        return probe(model)
    with pytest.raises(BadInput, match=words):
        probe(model)


def test_longer_rows_are_refused_by_each_script(world, tmp_path):
    """Of a Phi-3 with longrope, whose first length of context is 12 tokens; the prompt and the answer are longer."""
    tiny.add_policy(world, "phi", "phi3", **VARIANTS["phi3-longrope"][1] | dict(vocab_size=264))
    policy = world.phi
    keys = dict(policy_path=policy, eval_path="", reward_functions="length")
    jobs = {"sft": tiny.one_run("sft.py", world.sft("out", init_from=policy)),
            "rm": tiny.one_run("rm.py", world.rm("out", init_from=policy)),
            "grpo": tiny.one_run("grpo.py", world.grpo("out", **keys)),
            "grpo, short": tiny.one_run("grpo.py", world.grpo("out", **keys | dict(max_new_tokens=3, max_iters=1)))}
    outcomes = {name: outcome for name, (outcome,) in tiny.in_a_row(str(tmp_path), jobs).items()}
    assert outcomes.pop("grpo, short")["kind"] == ""
    for name, outcome in outcomes.items():
        assert outcome["kind"] == "BadInput" and re.search(r"row \d", outcome["message"]), (name, outcome)
        assert re.search("/phi: .* up to 12 tokens", outcome["stdout"])


@pytest.mark.parametrize("kind, sizes, unread", [
    ("gpt2", dict(VARIANTS["gpt2"][1], add_cross_attention=True), "crossattention|ln_cross_attn"),
    ("ernie4_5_moe", SIZES | dict(moe_num_experts=4, moe_k=2, moe_layer_start_index=1, moe_intermediate_size=16),
     "e_score_correction_bias"),
    ("mixtral", SIZES | dict(num_local_experts=64, num_experts_per_tok=1), None), ("qwen3", SIZES, None)])
def test_parameters_that_no_text_reaches(kind, sizes, unread):
    model = from_scratch(dict(model_type=kind, **sizes), seed=1)
    names = [name for name, _ in model.hf.named_parameters()]
    assert unread_parameters(model) == [name for name in names if unread and re.search(unread, name)]
    assert unread is None or unread_parameters(model)


def test_the_probe_refuses_wrong_logits(folder_of, monkeypatch):
    """A family with something between states and logits that Model.logits does not know of."""
    right = Model.logits
    for wrong in (lambda model, states: 1.05 * right(model, states), lambda model, states: right(model, states.roll(1, -1))):
        monkeypatch.setattr(Model, "logits", wrong)
        with pytest.raises(BadInput, match="cannot decode .*family qwen3"):
            probe(load_model(folder_of("qwen3")))


def test_other_kernels_of_attention_give_the_same_numbers(folder_of):
    """The key takes them, and the probe reads and decodes with them."""
    path, device = folder_of("llama"), torch.device("cpu")
    tokens = torch.tensor([[1, 5, 9, 3, 7, 2]])
    said = {}
    for kind in ("sdpa", "eager"):
        model = models.load(path, "policy", plain(attn_implementation=kind), device, trained=True)
        assert model.hf.config._attn_implementation == kind
        said[kind], _ = model.logprobs(tokens, tokens > 1)
    assert torch.allclose(said["sdpa"], said["eager"], atol=1e-6) and said["sdpa"].any()


# ---------------------------------------------------------------------------------------------------------------------
# saving


def test_models_are_saved_as_their_source_was(world, tmp_path):
    """Made from a bfloat16 folder, a model is trained and kept in float32, and saved in bfloat16; here by two ranks."""
    source = f"{tmp_path}/in 16 bits"
    save_model(source, load_model(world.policy), load_tokenizer(world.policy), dtype=torch.bfloat16)
    (result,), = tiny.forked(str(tmp_path), {"run": [
        tiny.one_run("sft.py", *[world.sft("out", init_from=source, zero_stage="3")] * 2)]}).values()
    assert result["codes"] == [0, 0], result
    out = tmp_path / "run" / "out"
    short, whole = read_weights(out / "policy"), read_weights(out / "checkpoint-000003" / "policy")
    assert {t.dtype for t in short.values()} == {torch.bfloat16} and {t.dtype for t in whole.values()} == {torch.float32}
    assert all(torch.equal(whole[name].bfloat16(), t) for name, t in short.items())
    assert hf.AutoModelForCausalLM.from_pretrained(out / "policy", dtype="auto").dtype == torch.bfloat16


@pytest.mark.parametrize("head", ["lm", "scalar"])
@pytest.mark.parametrize("variant", ["gpt2", "llama3-gqa-tied", "gemma2", "mixtral"])
@torch.no_grad()
def test_what_is_saved_transformers_loads(variant, head, tmp_path):
    """Weights that were trained, in the names and with the settings of the folder that they came from; and we load it again."""
    theirs = make(variant, head)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_model(str(tmp_path / "theirs"), head)
    for p in (*ours.parameters(), *theirs.parameters()):
        p.mul_(1.25)
    ours.score_shift = -0.5
    save_model(str(tmp_path / "ours"), ours, tiny.byte_tokenizer())
    kind = hf.AutoModelForCausalLM if head == "lm" else hf.AutoModelForSequenceClassification
    back, found = kind.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert type(back) is type(theirs) and not any(found.values())
    tokens, _ = padded([12], False)
    assert torch.equal(back(tokens).logits, theirs(tokens).logits)
    assert {n: t.shape for n, t in read_weights(tmp_path / "ours").items()} == {
        n: t.shape for n, t in read_weights(tmp_path / "theirs").items()}
    before, after = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("theirs", "ours"))
    assert after == before | (dict(score_shift=-0.5) if head == "scalar" else {})
    again = load_model(str(tmp_path / "ours"), head)
    assert again.score_shift == (-0.5 if head == "scalar" else 0.0) and not again.new_head
    assert all(torch.equal(p, q) for p, q in zip(again.parameters(), ours.parameters(), strict=True))


def test_a_card_names_nobodys_folders():
    settings = dict(n_layer=2, train_path="hf:openai/gsm8k:main:train", val_path="/home/me/x.jsonl",
                    reward_functions="0.5*/home/me/r.py:f,length")
    text = model_card("policy", settings, "/home/me/base", "1M weights")
    assert "/home" not in text and "'x.jsonl'" in text and "0.5*r.py:f,length" in text and "made from `base`" in text
    assert "hf:openai/gsm8k:main:train" in text
    for value, left in (("file:///home/u/x", "file:x"), ("/home/my name/x", "x"), ("out/ppo", "out/ppo"),
                        ("0.3*/home/x/a.jsonl,../b/c.jsonl", "0.3*a.jsonl,../b/c.jsonl")):
        assert public(value) == left

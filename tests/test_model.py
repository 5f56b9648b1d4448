"""
model.py and load.py, in several families of transformers: against transformers' own logits of each
text alone. And folders that are refused.
"""
import json
import math
import os
import shutil
import statistics

import pytest
import torch
import transformers
from safetensors.torch import save_file

from batches import right_pad
from byte_tokenizer import write_byte_tokenizer
from errors import BadInput
from load import load, load_value_model
from model import scaled_logits
from tiny import EOS, MARKERS, PAD, keys_of_system, read_weights

BASE = dict(vocab_size=264, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, intermediate_size=48, max_position_embeddings=64,
            bos_token_id=None, eos_token_id=EOS, pad_token_id=PAD)
FAMILIES = {  # what they change: positions, windows, scales of the logits, ties, experts, dropout
    "gpt2": dict(n_embd=32, n_layer=2, n_head=4, n_positions=64),
    "llama": dict(tie_word_embeddings=True, rope_parameters=dict(
        rope_type="llama3", rope_theta=500.0, factor=8.0, low_freq_factor=1.0,
        high_freq_factor=4.0, original_max_position_embeddings=16)),
    "gemma2": dict(head_dim=10, sliding_window=5, final_logit_softcapping=3.0),
    "cohere": dict(logit_scale=0.3),
    "mixtral": dict(num_local_experts=4),
    "opt": dict(ffn_dim=48, word_embed_proj_dim=32, dropout=0.4)}
TEXTS = [list(range(97, 106)), list(range(60, 72)), [99, 98], [120, 97, 120, 97, 121]]
CPU = torch.device("cpu")


def random_model(kind, settings, scalar=False, noise=0.15):
    """A model of transformers with large weights, also of norms and biases, so all are visible."""
    config = transformers.AutoConfig.for_model(kind, **settings)
    auto = transformers.AutoModelForCausalLM
    if scalar:
        config.num_labels, auto = 1, transformers.AutoModelForSequenceClassification
    torch.manual_seed(0)
    model, drawn = auto.from_config(config).eval(), torch.Generator().manual_seed(1)
    for p in model.parameters():
        p.data += torch.empty(p.shape).normal_(0, noise, generator=drawn)
    return model


def written(folder, model):
    """A model saved with the bytes' tokenizer: the folder, a string."""
    model.save_pretrained(folder)
    write_byte_tokenizer(folder, MARKERS)
    return str(folder)


def rows_of_texts():
    """TEXTS as tokens (4, 12), and where each token but the first of a row is (4, 12)."""
    tokens = right_pad(TEXTS, PAD)
    column = torch.arange(tokens.shape[1])  # 0 is no target
    return tokens, (0 < column) & (column < torch.tensor([[len(ids)] for ids in TEXTS]))


def alone(theirs, temperature):
    """Log-probs and entropies of all tokens but each first one, a text and a token at a time."""
    logprobs, entropies = [], []
    for ids in TEXTS:
        logits = theirs(torch.tensor([ids])).logits[0, :, :260] / temperature
        for t in range(1, len(ids)):
            p = logits[t - 1].exp() / logits[t - 1].exp().sum()
            logprobs.append(p[ids[t]].log())
            entropies.append(-(p * p.log()).sum())
    return torch.stack(logprobs), torch.stack(entropies)


def assert_computes(model, theirs):
    """
    The log-probs, entropies and gradients of right-padded rows, with a padded vocabulary and chunks
    of the logits, are those of each text alone.
    """
    got, want = model.logprobs(*rows_of_texts(), 0.8, 7, entropy=True), alone(theirs, 0.8)
    weights = torch.randn(2, len(want[0]), generator=torch.Generator().manual_seed(0))
    for found in (got, want):
        sum((w * x).sum() for w, x in zip(weights, found, strict=True)).backward()
    for a, b in zip(got, want, strict=True):
        assert (a - b).abs().max() < 2e-4
    for name, p in theirs.named_parameters():
        mine = model.hf.get_parameter(name)
        if p.grad is None or not mine.requires_grad:  # that of a choice of experts, for example
            assert not mine.requires_grad and (p.grad is None or not p.grad.any()), name
        else:
            assert (mine.grad - p.grad).abs().max() < 3e-4 * max(1, p.grad.abs().max()), name


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_and_gradients_are_those_of_each_text_alone(tmp_path, family):
    """With layers that are run again."""
    theirs = random_model(family, BASE | FAMILIES[family])
    system = keys_of_system(gradient_checkpointing=True)
    assert_computes(load(written(tmp_path, theirs), "policy", system, CPU, trained=True), theirs)


BIAS = "transformer.ln_f.bias"


def with_tensor(name, change):
    """The tensor of this name becomes another one, or goes (None)."""
    def breaks(folder, tensors):
        changed = tensors | {name: change(tensors[BIAS])}
        save_file({n: t for n, t in changed.items() if t is not None},
                  f"{folder}/model.safetensors", {"format": "pt"})

    return breaks


def pickled(folder, tensors):
    os.remove(f"{folder}/model.safetensors")
    torch.save(tensors, f"{folder}/pytorch_model.bin")


def listed(name):
    """The list of the files with the weights names this one, which is a good one of its kind."""
    def breaks(folder, tensors):
        os.remove(f"{folder}/model.safetensors")
        part = os.path.join(folder, name.format(folder))
        if name.endswith(".bin"):
            torch.save(tensors, part)
        else:
            save_file(tensors, part, {"format": "pt"})
        with open(f"{folder}/model.safetensors.index.json", "w") as f:
            json.dump(dict(metadata={}, weight_map=dict.fromkeys(tensors, name.format(folder))), f)

    return breaks


def with_code(folder, tensors):
    config = json.load(open(f"{folder}/config.json"))
    config |= dict(model_type="mine", auto_map=dict(AutoConfig="mine.C"))
    json.dump(config, open(f"{folder}/config.json", "w"))
    open(f"{folder}/mine.py", "w").write(f"open({folder + '/ran'!r}, 'w')\n")


BROKEN = {  # what is done to a folder; a word of the line
    "a tensor is missing": (with_tensor(BIAS, lambda t: None), BIAS),
    "one is too many": (with_tensor("transformer.more", torch.clone), "more"),
    "another shape": (with_tensor(BIAS, lambda t: t[:5].clone()), BIAS),
    "NaN": (with_tensor(BIAS, lambda t: t * float("nan")), BIAS),
    "a list of pickles": (listed("model-00001.bin"), "model-00001.bin"),
    "and by its whole path": (listed("{}/../model.safetensors"), "model.safetensors'"),
    "a pickle": (pickled, "only safetensors are read"), "code": (with_code, ""),
    "cut off": (lambda folder, _: os.truncate(f"{folder}/model.safetensors", 1000), "")}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_folder_is_one_line(world, tmp_path, what):
    folder = shutil.copytree(world.policy, tmp_path / "policy")
    breaks, word = BROKEN[what]
    breaks(str(folder), read_weights(folder))
    with pytest.raises(BadInput) as e:
        load(str(folder), "policy", keys_of_system(), CPU)
    assert "\n" not in str(e.value) and word in str(e.value) and not (folder / "ran").exists()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_softmax_of_16_bits_is_computed_in_float32(dtype):
    """0.07 nats would be lost by a softmax in bfloat16."""
    logits = (5 * torch.randn(7, 50, generator=torch.Generator().manual_seed(0))).to(dtype)
    want = logits.double() - logits.double().exp().sum(-1, keepdim=True).log()
    got = scaled_logits(logits).log_softmax(-1)
    assert got.dtype == torch.float32 and (got - want).abs().max() < 4e-6


# a newly drawn value head

HALVES, ONES = [0.0, 1.0] * 32, [1.0] * 63  # deviations 0.5 and 0


def times(x, scores):
    return [x * score for score in scores]


ODD = [1e4, *HALVES[1:]]  # deviation 1240.1
UNITS = {  # name: scores of some batches, one after the other; and the unit for each
    "another size": [
        (HALVES, 1), *2 * [(times(100, HALVES), 1)], *2 * [(times(100, HALVES), 64)],
        *2 * [(times(0.01, HALVES), 64)], (times(0.01, HALVES), 2**-8)],
    "between two": [(times(6, HALVES), 4)],
    "one of 64 scores 0.02": [([0.02, *[0] * 63], 1), (times(10, HALVES), 4)],
    "equal": [*3 * [([0.1] * 64, 1)], (times(1000, HALVES), 512), ([7] * 64, 512)],
    "equal but for rounding": [([1 + x for x in times(1e-8, HALVES)], 1)],
    "odd at first": [(ODD, 1), (times(10, HALVES), 1)],
    "odd among ones": [([1e4, *ONES], 1), (times(10, HALVES), 4)],
    "odd later": [(times(10, HALVES), 4), (ODD, 4), (times(10, HALVES), 4)],
    "not finite": [([torch.nan, *HALVES[1:]], 1), ([torch.inf, *HALVES[1:]], 1)],
    "two": [*2 * [([0, 100], 1)], ([0, 100], 64)],
    "one": [([5], 1)]}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_new_value_heads_unit_follows_the_scores(tmp_path, dtype):
    """No value jumps, not by a bit. (What is saved: test_by_hand.py.)"""
    system = keys_of_system(dtype=dtype, master_weights=dtype != "bfloat16")
    policy = load(written(tmp_path / "policy", random_model("gpt2", BASE | FAMILIES["gpt2"])),
                  "policy", system, CPU, trained=True)
    tokens, last = rows_of_texts()[0], torch.tensor([len(ids) - 1 for ids in TEXTS])
    for name, batches in UNITS.items():
        model, state, values = load_value_model("policy", policy, None, system, CPU), {}, []
        drawn = model.hf.score.weight.detach().clone()
        for scores, unit in batches:
            of_loss = model.update_unit(torch.tensor(scores).double(), state)
            assert model.unit == unit, (name, state)
            # a batch whose deviation is above 16 units is odd: its loss counts in this deviation
            own = statistics.pstdev(scores) if all(map(math.isfinite, scores)) else 0
            assert abs(of_loss - (own if own > 16 * unit else unit)) <= 1e-9 * own, (name, of_loss)
            assert scores is not ODD or round(of_loss) == 1240
            state = json.loads(json.dumps(state))  # as in a run that has resumed
            with torch.no_grad():
                values.append(model.scores(tokens, last))
            assert torch.equal(values[0], values[-1]), name
            if len(values) == 1:  # the head is drawn in units
                assert torch.equal(model.hf.score.weight, drawn), name

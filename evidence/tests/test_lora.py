"""
LoRA: an adapter against its own formula and peft (where it is installed: pip install peft), its
files, what is refused; four models on one trunk. (A training by hand: test_by_hand_options.py.)
"""
import json
import re

import pytest
import torch
from safetensors.torch import save_file

from checkpoint import save_final
from errors import BadInput
from load import load
from options.trunk import layers_of
from options.parts import outline
from model import Model, states_before
from options.lora import Adapted, load_adapted, read_adapter
from test_families import BASE, EXPERTS, GPT, HEADS, SIZES, add_vision
from test_model import CPU, random_model, rows_of_texts, written
from tiny import assert_same_run, assert_same_weights, keys_of, keys_of_system, well

KINDS = {"llama": SIZES, "gpt_neox": SIZES, "qwen3": HEADS | dict(tie_word_embeddings=True),
         "gpt2": GPT}


def saved(folder, kind="llama", settings=SIZES):
    """The folder of a random model."""
    return written(folder, random_model(kind, settings))


def loaded(folder, head="lm"):
    return load(str(folder), "reward", keys_of_system(), CPU, head)


def filled(model):
    """The model with numbers in B, so that its adapters do something."""
    drawn = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(".B"):
                p.normal_(0, 0.3, generator=drawn)
    return model


def set_in(file, **settings):
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def said(model):
    """What a model says of each token but the first ones: log-probs, or values."""
    tokens, mask = rows_of_texts()
    if model.head == "lm":
        return model.logprobs(tokens, mask)[0]
    return model.scalars(states_before(model.states(tokens), mask))


def said_by_peft(adapter, head="lm"):
    peft = pytest.importorskip("peft")
    auto = (peft.AutoPeftModelForCausalLM if head == "lm" else
            peft.AutoPeftModelForSequenceClassification)
    theirs = auto.from_pretrained(str(adapter), **({} if head == "lm" else dict(num_labels=1)))
    theirs, (tokens, mask) = theirs.eval().base_model.model, rows_of_texts()
    if head == "lm":
        logits = theirs(tokens).logits[:, :, :260].log_softmax(-1)
        return logits[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0][mask[:, 1:]]
    return theirs.score(theirs.base_model(tokens).last_hidden_state)[:, :-1, 0][mask[:, 1:]]


@pytest.mark.parametrize("kind, head, targets, rank, alpha, scale", [
    ("llama", "lm", "", 3, 5, 5 / 3), ("llama", "lm", "q+v", 9, 2, 2 / 3),
    ("gpt2", "lm", "attn.c_proj", 3, 5, 5 / 3), ("qwen3", "lm", "", 3, 5, 5 / 3),
    ("gpt_neox", "scalar", "", 3, 5, 5 / 3), ("gpt2", "scalar", "", 3, 5, 5 / 3)])
@torch.no_grad()
def test_the_formula_and_the_files_alone_and_merged_and_by_peft(
        kind, head, targets, rank, alpha, scale, tmp_path):
    """
    W + scale B A, by hand on the matrices of a second copy. The scale is alpha / sqrt(rank) with
    use_rslora (arXiv 2312.03732), which we only read, else alpha / rank.
    """
    base, rslora = saved(tmp_path / "base", kind, KINDS[kind]), rank == 9
    model = filled(Adapted(loaded(base), head, rank, alpha, targets, seed=4))
    model.score_shift, folder = 0.5 if head == "scalar" else 0.0, tmp_path / "model_adapter"
    save_final(str(tmp_path), "model", model)
    set_in(folder / "adapter_config.json", use_rslora=rslora)
    want, plain = said(model), loaded(base)
    for key, a in model.adapters.items() if head == "lm" else ():
        delta = scale * a.B @ a.A
        weight = plain.hf.base_model.get_submodule(key.replace("/", ".")).weight
        weight += delta.t() if kind == "gpt2" else delta
    if head == "lm":
        want = said(plain)
        assert (want - said(loaded(base))).abs().max() > 0.05
    again = load_adapted(loaded(base), str(folder), head)
    assert again.score_shift == model.score_shift
    assert rslora or torch.equal(said(again), said(model))
    # merged as it is read, and as it was saved
    merged = [loaded(path, head) for path in [folder, tmp_path / "model"][:2 - rslora]]
    assert all(type(m) is Model and not m.new_head for m in merged)
    for found in (again, *merged):
        assert (said(found) - want).abs().max() < 1e-4
    assert (said_by_peft(folder, head) + model.score_shift - want).abs().max() < 1e-4


@torch.no_grad()
def test_an_adapter_upon_an_adapter(tmp_path, capsys):
    """quartet reads it, and peft does not: a line says so."""
    base = loaded(saved(tmp_path / "base"))
    filled(Adapted(base, "lm", 3, 5)).save_adapter(tmp_path / "first_adapter")
    model = filled(Adapted(loaded(tmp_path / "first_adapter"), "lm", 2, 7))
    save_final(str(tmp_path), "second", model)
    assert re.search("peft.*/first_adapter", capsys.readouterr().out)
    assert (said(loaded(tmp_path / "second_adapter")) - said(model)).abs().max() < 1e-4
    shapes = outline(f"{tmp_path}/second_adapter", "lm", keys_of_system()).hf
    assert shapes.device.type == "meta"


AFMOE = EXPERTS | dict(num_dense_layers=0, head_dim=8)
MAPS = {  # family: settings, targets, how many maps of a layer get an adapter, a part of no name
    "phimoe": (EXPERTS, "", 4, "router"),  # its router is made from nn.Linear, but is more
    "biogpt": (SIZES, "", 6, "output"),  # its class does not name its blocks
    "hunyuan_v1_moe": (EXPERTS | dict(moe_topk=2, head_dim=8), "", 7, "wg"),
    "gemma4_text": (EXPERTS | dict(
        enable_moe_block=True, top_k_experts=2, hidden_size_per_layer_input=0, sliding_window=8,
        head_dim=8, global_head_dim=8), "", 7, "router"),
    # the short name of an MLP's gate is no router's, whose whole name it takes
    "afmoe, short": (AFMOE, "gate+up", 3, "router"),
    "afmoe, gate": (AFMOE, "router.gate", 1, "proj")}


@pytest.mark.parametrize("name", MAPS)
def test_which_maps_get_an_adapter(name):
    settings, targets, count, nowhere = MAPS[name]
    model = Model(random_model(name.partition(",")[0], settings))
    keys = Adapted(model, "lm", 3, 5, targets).adapters.keys()
    assert len(keys) == count * len(layers_of(model)), keys
    assert not any(nowhere in key for key in keys), keys


def test_models_without_such_maps(tmp_path):
    """No class tells CTRL's blocks; a router needs its whole name; a vision part stays as it is."""
    ctrl = BASE | dict(n_embd=16, dff=24, n_layer=2, n_head=2, n_positions=64)
    for kind, settings, targets, word in (("ctrl", ctrl, "", "leave lora out"),
                                          ("phimoe", EXPERTS, "q+router", "'router'")):
        with pytest.raises(BadInput, match=word):
            Adapted(Model(random_model(kind, settings)), "lm", 2, 4, targets)
    add_vision(f"{tmp_path}/seeing")
    keys = Adapted(loaded(tmp_path / "seeing"), "lm", 2, 4).adapters.keys()
    assert len(keys) == 2 * 7 and not any("vision" in key for key in keys)


def test_other_adapters_are_refused(tmp_path):
    """Other kinds, another base, one that asks for too much, a shift that is no number."""
    base, adapter = loaded(saved(tmp_path / "base")), tmp_path / "adapter"
    filled(Adapted(base, "lm", 3, 5)).save_adapter(adapter)
    config, file = adapter / "adapter_config.json", tmp_path / "base/config.json"
    good = config.read_text()
    for more in (dict(use_dora=True), dict(of_next_year=dict(a=1)), dict(peft_type="IA3"),
                 dict(bias="all"), dict(r=4), dict(init_lora_weights="pissa"),
                 dict(revision="v1.0")):  # it has other weights
        set_in(config, **more)
        with pytest.raises(BadInput):
            loaded(adapter)
        config.write_text(good)
    with pytest.raises(BadInput, match="down_proj"):
        Adapted(base, "lm", 2, 4, targets="nothing")
    with pytest.raises(BadInput, match="another"):
        load_adapted(loaded(saved(tmp_path / "another")), str(adapter), "lm")
    set_in(file, num_hidden_layers=10**6)
    with pytest.raises(BadInput, match="num_hidden_layers = 1,000,000"):
        loaded(adapter)
    for note in ("NaN", "0.5", "x", '{"score_shift": NaN}', '{"score_shift": [1]}',
                 '{"score_shift": "x"}', "[" * 10**5):
        save_file({"a": torch.ones(1)}, adapter / "adapter_model.safetensors",
                  dict(score_shift=note))
        with pytest.raises(BadInput, match=f"{adapter}.*readable"):
            read_adapter(str(adapter))


def test_four_models_on_one_trunk(world, tmp_path):
    """share_base: the run in which each model has a trunk of its own, the reward model's merged."""
    adapted = dict(lora="policy=2:3,value=3:4:c_attn+c_fc,reward=2:5", gradient_checkpointing=True)
    rm = well("rm.py", tmp_path, keys_of(world, "rm.py", init_from=world.policy, **adapted))
    keys = keys_of(world, "ppo.py", value_init="policy", seed=5, **adapted,
                   reward_functions="9*reward_model")
    apart = well("ppo.py", tmp_path / "apart", keys | dict(reward_path=f"{rm}/reward_model"))
    keys |= dict(share_base=True, reward_path=f"{rm}/reward_model_adapter")
    one = well("ppo.py", tmp_path / "one", keys)
    assert_same_run(apart, one, ("policy", "value_model"), 1e-9)
    # a value model of before goes on as it was saved
    again = well("ppo.py", tmp_path / "again", keys | dict(
        max_iters=1, value_init=f"{one}/value_model_adapter", value_learning_rate=1e-12))
    assert_same_weights(again, one, ["value_model"], 1e-9)

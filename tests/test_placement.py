"""
engine/placement.py on one rank: the block around forwards that have no backward pass, and what is held. (What the ranks
hold of sharded models, and that runs with them come to the same numbers, is in test_zero.py.)
"""
import contextlib

import pytest
import torch

from engine import placement
from engine.adapters import Adapted
from engine.placement import Place, load_placed, no_grad_forwards
from model import from_scratch, load_model

import tiny

TINY = dict(model_type="llama", vocab_size=11, hidden_size=8, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=12, max_position_embeddings=16)


@pytest.mark.parametrize("error", [False, True])
def test_forwards_without_gradients_move_each_trunk_once_and_free_what_they_gather(monkeypatch, error):
    """After an error, too. Moved a second time, a trunk's home would be the device."""
    calls, models = [], {name: from_scratch(TINY) for name in ("policy", "ref")}
    for name, model in models.items():  # the method that FSDP's modules have
        model.reshard = lambda name=name: calls.append(f"reshard {name}")
        model.layers()[1].reshard = lambda name=name: calls.append(f"reshard {name}'s layer")
        model.name = name
    policy, ref = models.values()

    @contextlib.contextmanager
    def on_device(model, device):  # a CPU has no other device to move weights to
        calls.append(f"{model.name} to {device}")
        yield
        calls.append(f"{model.name} back")

    monkeypatch.setattr(placement, "on_device", on_device)
    with pytest.raises(ZeroDivisionError) if error else contextlib.nullcontext():
        with no_grad_forwards([Adapted(policy, "scalar"), policy, None, ref, policy], "cuda:0"):
            assert not policy.states(torch.tensor([[1, 2, 3]])).requires_grad
            assert calls == ["policy to cuda:0", "ref to cuda:0"]
            1 / (0 if error else 1)
    assert torch.is_grad_enabled()
    assert calls[2:] == ([] if error else ["ref back", "policy back"]) + [
        "reshard policy", "reshard policy's layer", "reshard ref", "reshard ref's layer"]


def test_a_frozen_head_is_not_rounded(tmp_path):
    """Where frozen matrices are stored in 16 bits, the scalar head is not."""
    world = tiny.build(str(tmp_path))
    model = load_placed(world.reward, Place(), torch.device("cpu"), "scalar", matrices=torch.bfloat16)
    assert model.hf.transformer.h[0].mlp.c_fc.weight.dtype == torch.bfloat16
    assert torch.equal(model.hf.score.weight, load_model(world.reward, "scalar").hf.score.weight)

"""
engine/placement.py on one rank: the block around forwards that have no backward pass, what is held. (What the ranks
hold of sharded models, and that runs with them come to the same numbers, is in test_zero.py.)
"""
import contextlib

import pytest
import torch

from engine import placement
from engine.placement import no_grad_forwards
from engine.adapters import Adapted
from model import from_scratch

TINY = dict(model_type="llama", vocab_size=11, hidden_size=8, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=12, max_position_embeddings=16)


@pytest.fixture
def watched(monkeypatch):
    """(a function that gives a model's modules the method that FSDP's modules have, the list of what has been called)."""
    calls = []

    def watch(name):
        model = from_scratch(TINY)
        model.reshard = lambda: calls.append(f"reshard {name}")
        model.layers()[1].reshard = lambda: calls.append(f"reshard {name}'s layer")
        model.name = name
        return model

    @contextlib.contextmanager
    def on_device(model, device):  # a CPU has no other device to move weights to
        calls.append(f"{model.name} to {device}")
        yield
        calls.append(f"{model.name} back")

    monkeypatch.setattr(placement, "on_device", on_device)
    return watch, calls


def test_forwards_record_no_gradients_and_free_what_they_have_gathered(watched):
    watch, calls = watched
    policy, ref = watch("policy"), watch("ref")
    with no_grad_forwards([policy, None, ref], "cuda:0"):
        assert not policy.states(torch.tensor([[1, 2, 3]])).requires_grad
        assert calls == ["policy to cuda:0", "ref to cuda:0"]
    assert torch.is_grad_enabled()
    assert calls[2:4] == ["ref back", "policy back"]
    assert sorted(calls[4:]) == ["reshard policy", "reshard policy's layer", "reshard ref", "reshard ref's layer"]


def test_an_error_in_the_block_frees_them_too(watched):
    watch, calls = watched
    with pytest.raises(ZeroDivisionError), no_grad_forwards([watch("policy")], "cpu"):
        raise ZeroDivisionError
    assert torch.is_grad_enabled()
    assert calls[-2:] == ["reshard policy", "reshard policy's layer"]


def test_a_head_on_a_trunk_moves_the_trunk_once(watched):
    """Moved a second time, its home would be the device."""
    watch, calls = watched
    trunk = watch("trunk")
    head = Adapted(trunk, "scalar")
    head.__dict__["name"] = "head"
    with no_grad_forwards([head, trunk, None, trunk], "cpu"):
        pass
    assert [call for call in calls if "trunk to" in call or "trunk back" in call] == ["trunk to cpu", "trunk back"]
    assert calls.count("reshard trunk") == 1


def test_what_is_held():
    one, two, shapes = from_scratch(TINY), from_scratch(TINY), from_scratch(TINY, device="meta")
    assert placement.in_memory(policy=one, ref=None, reward=two, judge=two) == {"policy": one, "reward": two}
    assert placement.held(dict(policy=one, value=shapes)) == {"policy": one}

"""
A model's trunk: its layers; and models on the trunk of another one, as the second head of
value_init="shared", and what options/lora.py makes of it.
"""
import copy

import torch
import torch.nn as nn

from load import auto_class, class_of, draw_score_head
from model import Model
from parallel import is_shard


def layers_of(model):
    """The blocks of a Model's trunk, which are split, computed again, adapted or rounded apart."""
    # GradientCheckpointingLayer: the class of blocks in families that do not name theirs
    kinds = set(model.hf._no_split_modules or ["GradientCheckpointingLayer"])
    # FSDP makes a subclass of the block's class
    return [m for m in model.hf.base_model.modules()
            if kinds & {kind.__name__ for kind in type(m).__mro__}]


class OnTrunk(Model):
    """A model on the trunk of another Model, `base`, which owns the trunk's parameters."""

    def __init__(self, base, head="scalar", seed=0):
        """head: "scalar": a new head, drawn from seed, is the only own parameter; "lm": base's."""
        nn.Module.__init__(self)
        self.head, self.path, self.tokenizer = head, base.path, base.tokenizer
        self.score_shift, self.new_head = 0.0, False
        # in a tuple, because nn.Module must not register them: they belong to the base
        self.borrowed = base, base.hf if head == "lm" else with_score_head(base)
        if head == "scalar":
            self.score = self.hf.score
            draw_score_head(self, seed)

    base = property(lambda self: self.borrowed[0])  # the Model on whose trunk this one stands
    hf = property(lambda self: self.borrowed[1])  # transformers', with this head on the trunk
    must_fetch = property(lambda self: self.base.must_fetch)

    def states(self, tokens):
        return self.base.states(tokens)

    def as_saved(self, name, W):
        """Model.as_saved: where the base has an adapter, the trunk that this model reads has it."""
        return super().as_saved(name, self.base.as_saved(name, W))


def value_on_trunk(policy, reward_model, value_init, system, seed):
    """The value model on the policy's trunk: a head, or with share_base an adapter and a head."""
    if value_init == "shared":
        return OnTrunk(policy, seed=seed)
    from options.lora import value_adapter

    return value_adapter(policy, reward_model, value_init, system, seed)


def with_score_head(base):
    """transformers' model with a scalar head, still empty, on a Model's trunk. Raises BadInput."""
    config = copy.deepcopy(base.hf.config)
    config.num_labels = 1
    class_of(base.path, config, "scalar")  # it has one
    with torch.device("meta"):  # the trunk that is made here is replaced by base's
        hf = auto_class("scalar").from_config(config)
    setattr(hf, hf.base_model_prefix, base.hf.base_model)
    weight = base.hf.get_input_embeddings().weight
    # where it computes; the shards of a split trunk may lie in the CPU's memory
    device = weight.device_mesh.device_type if is_shard(weight) else weight.device
    hf.score = nn.Linear(hf.score.in_features, 1, bias=False, device=device,
                         dtype=torch.promote_types(weight.dtype, torch.float32))
    return hf

"""
Models on the trunk of another one: the second head of value_init="shared"; and what options/lora.py
makes of it.
"""
import copy

import torch
import torch.nn as nn

from load import auto_class, class_of, draw_score_head
from model import Model


class OnTrunk(Model):
    """
    A model on the trunk of another Model, `base`, which owns the trunk's parameters. With
    value_init="shared" the value model stands on the policy, and both losses train its trunk.
    """

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

    @property
    def base(self):
        """The Model on whose trunk this one stands."""
        return self.borrowed[0]

    @property
    def hf(self):
        """transformers' model with this head on the base's trunk."""
        return self.borrowed[1]

    @property
    def must_fetch(self):
        """Whether the trunk is split, or in the CPU's memory."""
        return self.base.must_fetch

    def states(self, tokens):
        return self.base.states(tokens)

    def as_saved(self, name, W):
        """Model.as_saved: where the base has an adapter, the trunk that this model reads has it."""
        return super().as_saved(name, self.base.as_saved(name, W))


def value_on_trunk(policy, reward_model, value_init, system, seed):
    """
    The value model on the policy's trunk. shared: both losses train the trunk; with share_base an
    adapter and a head. Raises BadInput.
    """
    if value_init == "shared":
        return OnTrunk(policy, seed=seed)
    from options.lora import value_adapter

    return value_adapter(policy, reward_model, value_init, system, seed)


def with_score_head(base):
    """
    transformers' model with a scalar head, still empty, on the trunk of a Model. Raises BadInput.
    """
    config = copy.deepcopy(base.hf.config)
    config.num_labels = 1
    class_of(base.path, config, "scalar")  # it has one
    with torch.device("meta"):  # the trunk that is made here is replaced by base's
        hf = auto_class("scalar").from_config(config)
    setattr(hf, hf.base_model_prefix, base.hf.base_model)
    weight = base.hf.get_input_embeddings().weight
    hf.score = nn.Linear(hf.score.in_features, 1, bias=False, device=weight.device,
                         dtype=torch.promote_types(weight.dtype, torch.float32))
    return hf

"""
Models on another model's trunk. With value_init="shared" the value model is a scalar head on the
policy: both losses train the policy's weights, which stay in the policy's optimizer; that of the
value model has the head alone. With adapters (options/lora.py) several models stand on one frozen
trunk.
"""
import copy
import os

import torch
import torch.nn as nn

from errors import BadInput
from load import auto_class, draw_score_head, want_one_score
from model import Model, check_head


class OnTrunk(Model):
    """
    A model on the trunk of `base`. The trunk's parameters belong to base; its own parameters are
    those of a scalar head (`score`). It is called like any Model.
    """

    def __init__(self, base, head="scalar", seed=0):
        """head: "lm" is the base's; "scalar" a copy of the base's, if it has one, or a new one."""
        nn.Module.__init__(self)
        hf = base.hf if head == "lm" else scalar_shell(base)
        # nn.Module must not register them: they belong to the base
        self.__dict__.update(hf=hf, base=base)
        self.adapters = {}
        self.head, self.path, self.file_dtype = head, base.path, base.file_dtype
        self.processor, self.unread = base.processor, base.unread
        self.score_shift, self.new_head, self.elsewhere = 0.0, False, False
        if head == "scalar":
            self.score = hf.score
            if base.head == "scalar":
                self.score.weight.data.copy_(base.hf.score.weight)
                self.score_shift, self.new_head = base.score_shift, base.new_head
            else:
                draw_score_head(self, seed)

    def owner(self):
        return self.base.owner()

    def states(self, tokens):
        return self.base.states(tokens)

    def next_logits(self, *args):
        return self.base.next_logits(*args)

    def merged(self, name, W):
        return self.base.merged(name, W)

    def save_own(self, folder):
        """Write its own parameters, without the base's."""
        from safetensors.torch import save_file

        os.makedirs(folder, exist_ok=True)
        weight = self.score.weight.detach().cpu().contiguous()
        save_file({"score.weight": weight}, os.path.join(folder, "head.safetensors"))

    def fill_own(self, folder):
        """The inverse of save_own. Raises BadInput."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        file = os.path.join(folder, "head.safetensors")
        try:
            weight = load_file(file)["score.weight"]
            self.score.weight.data.copy_(weight)
        except (OSError, SafetensorError, KeyError, RuntimeError) as e:
            raise BadInput(f"{file}: not the head of this model ({e})") from e
        self.new_head = False


def scalar_shell(base):
    """A sequence classifier of transformers with a new head, on base's trunk, not its own."""
    config = copy.deepcopy(base.hf.config)
    want_one_score(config, base.path)
    with torch.device("meta"):  # the trunk that is made here is replaced by base's
        hf = auto_class("scalar").from_config(config)
    check_head(hf, base.path)
    setattr(hf, hf.base_model_prefix, base.hf.base_model)
    weight = base.hf.get_input_embeddings().weight
    hf.score = nn.Linear(hf.score.in_features, 1, bias=False, device=weight.device,
                         dtype=torch.promote_types(weight.dtype, torch.float32))
    return hf.eval()

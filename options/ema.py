"""The key ema_decay: the moving average of the policy's weights, out_dir/ema_policy."""
import torch

import parallel
from checkpoint import read_tensors
from model import at_least_float32
from parallel import my_part


class MovingAverage:
    """
    Exponential moving average of a model's trained parameters, in at least fp32 (DeepSpeed-Chat
    keeps one of its actor, arXiv 2308.01320, section 2.2). After each step,

        average = decay * average + (1 - decay) * weights
    """

    def __init__(self, model, decay, folder=None):
        """folder: of a checkpoint. Without one that has an average it begins as the weights are."""
        self.model, self.decay = model, decay
        # {parameter: its average}, split as it is
        self.averages = {p: at_least_float32(p.detach()).clone()
                         for p in model.parameters() if p.requires_grad}
        if folder and (saved := dict(read_tensors(folder, "ema"))):
            for name, t in self.tensors().items():
                parallel.copy_into(t, saved[name])  # the whole one: this rank takes its part

    def save(self, run):
        """A collective: write the finished average to out_dir/ema_policy."""
        # for this time the model has the averages as its parameters: others, in their dtype
        others = {p: torch.nn.Parameter(average) for p, average in self.averages.items()}
        places = [(module, name, p) for module in self.model.modules()
                  for name, p in module.named_parameters(recurse=False) if p in others]
        for module, name, p in places:
            setattr(module, name, others[p])
        run.save_model("ema_policy", self.model, {})  # COLLECTIVE
        for module, name, p in places:
            setattr(module, name, p)

    @torch.no_grad()
    def update(self):
        for p, average in self.averages.items():
            my_part(average).lerp_(my_part(p.detach()).to(average.dtype), 1 - self.decay)

    def tensors(self):
        return {name: self.averages[p] for name, p in self.model.named_parameters()
                if p in self.averages}

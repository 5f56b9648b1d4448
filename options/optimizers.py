"""
The key optim: Adafactor, which keeps a sum a row and a column for each matrix, and AdamW with
states in 8 bits, by the package bitsandbytes.

torchao (0.18) has 8 bits, too: as many bytes, steps as close to those of fp32. But it compiles for
each shape of matrix (5 to 14 seconds of a core, and a C++ compiler must be there), safetensors does
not take its states, and a shard has 8 bits only if its numbers are a multiple of 256: so another
rank may have the rest of the matrix in 32 bits, and a checkpoint cannot put the two together.
"""
import torch

from configurator import of_model
from errors import BadConfig
from folders import optional_package

# torch's Adafactor multiplies lr by max(eps[1], RMS of the weight), which is the paper's section 8.
# With eps[1] = FLOOR, more than the RMS of any weight, the factor is always FLOOR, and the learning
# rate is divided by FLOOR beforehand. FLOOR is a power of two, so that neither rounds anything.
FLOOR = 2.0**20


def check_optimizers(system, trained):
    """Raise BadConfig where keys do not go together. trained: the names of the trained models."""
    for name in trained:
        kind = of_model(system.optim, name) or "adamw"
        most = dict(adamw=3, adamw8bit=0, adafactor=1)[kind]
        stage = int(of_model(system.zero_stage, name) or 0)
        moved = kind != "adamw" and of_model(system.offload, name) not in ("", "none")
        if stage > most or moved:
            raise BadConfig(
                f"optim: {kind} needs whole matrices on the GPU, so {name} can be at stage {most} "
                "at most, and not offloaded; change zero_stage or offload, or type --optim=adamw")


def other_optimizer(kind, lr, betas, eps, weight_decay):
    """
    (class, its settings, what to multiply each learning rate by) of adafactor or adamw8bit.

    Adafactor (arXiv 1804.04235) is the paper's without its section 8: the learning rate is the size
    of a step, as AdamW's is, and is not multiplied by the size of the weights. betas and eps are
    AdamW's alone.
    """
    if kind == "adafactor":
        # 1e-15 squared is the paper's epsilon_1; torch multiplies weight_decay by this small lr
        # foreach=False: on a GPU torch would step all matrices at once, with copies of all of them
        return torch.optim.Adafactor, dict(
            lr=lr / FLOOR, weight_decay=weight_decay * FLOOR, eps=(1e-15, FLOOR),
            foreach=False), 1 / FLOOR
    package = optional_package("bitsandbytes", "optim = 'adamw8bit'")
    return package.optim.AdamW8bit, dict(
        lr=lr, betas=betas, eps=eps, weight_decay=weight_decay), 1.0

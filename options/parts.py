"""Models not wholly, or not in 16 bits, on the device: roles, zero_stage, offload, quantize."""
import contextlib
import os

import torch

from load import auto_class, dtypes, read_model, config_and_arguments, freeze_or_train
from model import Model
from ranks import this_rank


def load_part(path, name, system, device, head, trained, adapter, seed):
    """A collective where zero_stage splits the model: its Model. Its arguments are load.load's."""
    part = dict(policy="sample", reward="score", judge="score").get(name)
    if not adapter and this_rank.role != "train" and part not in this_rank.does:
        # ranks of another role have the weights
        return outline(path, head, system).requires_grad_(trained)
    small = adapter and system.quantize == "4bit"
    if system.zero_stage or system.offload:
        from options.shards import load_split

        model = load_split(path, name, system, device, head, trained, adapter, seed)  # COLLECTIVE
    else:
        # one that gets 4 bits is read to the CPU, and goes to the GPU matrix by matrix
        model = read_model(path, head, system, "cpu" if small else device, seed)
        freeze_or_train(model, system, trained, adapter)
    if small:
        from options.four_bits import quantize

        model = quantize(model, device, dtypes(system)[1] or dtypes(system)[0])
    return model


def outline(path, head, system):
    """The Model of a folder without its weights: only shapes and settings, without memory."""
    from transformers import GenerationConfig

    if os.path.isfile(os.path.join(path, "adapter_config.json")):
        from options.lora import lowest_base

        path = lowest_base(path)
    config, arguments = config_and_arguments(path, head, system)
    with torch.device("meta"):
        hf = auto_class(head).from_config(config, **arguments)
    with contextlib.suppress(OSError):  # a folder may have none; read_model's has it, too
        hf.generation_config = GenerationConfig.from_pretrained(path)
    return Model(hf, head, path)

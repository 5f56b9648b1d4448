"""
Mixtures of experts: load.py asks for these settings where a config names experts.
"""
import torch


def settings(dtype):
    """Arguments for from_pretrained; and transformers' product of experts obeys autocast."""
    from transformers.integrations import moe

    product = moe._grouped_mm  # the only matrix product that autocast does not round

    def rounded(x, weight, offs):
        if torch.is_autocast_enabled(x.device.type):
            weight = weight.to(torch.get_autocast_dtype(x.device.type))
        return product(x, weight, offs)  # this casts x to the dtype of weight

    if product.__module__ == moe.__name__:
        moe._grouped_mm = rounded
    # the usual kernel refuses float64
    return dict(experts_implementation="batched_mm") if dtype == torch.float64 else {}

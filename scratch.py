"""
New models with random weights, for sft.py with init_from = "scratch".
"""
import torch

from load import auto_class, draw_score_head, has_experts
from model import Model
from models import attend_by, dtypes


def from_scratch(settings, head="lm", seed=0, dtype=torch.float32, device="cpu"):
    """A new Model with random weights. settings: a dict as in config.json, with model_type."""
    from transformers import AutoConfig

    settings = dict(settings)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    if head == "scalar":
        config.num_labels = 1
    experts = dict(experts_implementation="batched_mm") if has_experts(config) else {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        hf = auto_class(head).from_config(config, dtype=torch.float32, **experts)
    model = Model(hf.to(device, dtype), head)
    model.hf.config.dtype = dtype
    if head == "scalar":
        draw_score_head(model, seed)
    return model


def begin(architecture, name, system, device, seed=0):
    """A new model, which is trained. architecture: arguments for transformers' config class."""
    dtype, _ = dtypes(system)
    model = from_scratch(architecture, seed=seed, dtype=dtype, device=device)
    if system.gradient_checkpointing:
        model.recompute()
    attend_by(model, system.attn_implementation)
    if system.zero_stage:
        from options.shards import split

        split(model, name, system, device)
    if system.compile:
        model.compile_trunk()
    return model

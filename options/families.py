"""
What some families of models need beside the others. load.py and model.py ask here when they meet
such a model: its config.json names it.
"""
import sys

import torch
import transformers
from packaging import version
from transformers import DynamicCache

from errors import BadInput
from load import EXPERTS
from model import has_any


def settings_of_family(path, config, kind, how):
    """Arguments for from_pretrained, in place of some in `how`. kind: a class. Raises BadInput."""
    attention, dtype, more = how["attn_implementation"], how["dtype"], {}
    if attention == "sdpa" and not kind._supports_sdpa:
        attention = more["attn_implementation"] = "eager"
    if attention == "eager" and dtype == torch.float64:
        raise BadInput(f"{path}: eager attention rounds to float32, and dtype = 'float64' needs "
                       "attn_implementation = 'sdpa', in a family with it")
    if has_any(config, EXPERTS):
        more |= settings_of_experts(dtype)
    if has_any(config, ["linear_key_head_dim"]):
        keep_delta_rule_wide(kind)
    return more


def settings_of_experts(dtype):
    """Arguments for from_pretrained, of a mixture; and its product of experts obeys autocast."""
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


def rescaled(logits, config):
    """The logits (n, V) of a family that does more behind its head: (n, V)."""
    logits = logits * getattr(config, "logit_scale", 1.0)  # Cohere
    logits = logits * getattr(config, "lm_head_multiplier", 1.0)  # Falcon-H1
    logits = logits / getattr(config, "logits_scaling", 1.0)  # Granite
    cap = getattr(config, "final_logit_softcapping", None)  # Gemma 2
    return logits if cap is None else cap * torch.tanh(logits / cap)


def longest_of_longrope(rope):
    """
    How many tokens a row may have by the first of longrope's two tables (Phi-3): a longer row would
    change the angles of the rows beside it. rope: rope_parameters, or {kind of layer: its own}.
    """
    kinds = [rope, *(each for each in rope.values() if isinstance(each, dict))]
    return min(each["original_max_position_embeddings"] for each in kinds
               if each.get("rope_type") == "longrope")


def unread(hf):
    """The parameters that no text reaches, although they are a part of the language model."""
    parts = ("e_score_correction_bias",  # only chooses experts (Ernie 4.5)
             "crossattention", "ln_cross_attn")  # read another model's states (GPT-2)
    return {p for name, p in hf.named_parameters() if any(part in name for part in parts)}


# --------------------------------------------------------------------------------------------------
# hybrids: layers of linear attention or state spaces, which keep a state, beside others that see
# all tokens


def keep_delta_rule_wide(kind):
    """
    Gated delta nets (Qwen3.5, OLMo-hybrid) compute in float32 token by token. So they do here with
    many: autocast would read sampled texts with other log-probs. kind: the model's class.
    """
    module = sys.modules[kind.__module__]
    rule = getattr(module, "torch_chunk_gated_delta_rule", None)

    def wide(query, *args, **how):
        with torch.autocast(query.device.type, enabled=False):
            return rule(query, *args, **how)

    if rule and rule.__module__ == kind.__module__:
        module.torch_chunk_gated_delta_rule = wide


class HybridCache(DynamicCache):
    """transformers' cache for the layers of a config, which can all be told which rows stay."""

    def __init__(self, config):
        """Raises ValueError where rows would differ from a text alone."""
        super().__init__(config=config)
        config = config.get_text_config()
        if any(getattr(config, name, False) for name in ("conv_bias", "mamba_proj_bias")):
            raise ValueError("its states have a bias, which padding on the left would add to them")
        if config.dtype == torch.float64 and "conv" not in getattr(config, "layer_types", ()):
            raise ValueError("its states are computed in float32; type --dtype=float32")
        old = version.parse(transformers.__version__) < version.parse("5.23")
        if old and config.model_type == "falcon_h1":
            raise ValueError("with padding it wants transformers 5.23")

    def batch_select_indices(self, indices):
        """Keep only these rows, in this order; a row may come several times."""
        for layer in self.layers:
            if hasattr(layer, "conv_states"):  # its batch_select_indices knows of keys alone
                layer.reorder_cache(indices)
            else:
                layer.batch_select_indices(indices)

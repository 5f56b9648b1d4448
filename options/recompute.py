"""The key gradient_checkpointing: the backward pass computes each layer's activations again."""
from errors import BadInput
from options.trunk import layers_of


def recompute(model):
    """transformers' own: a step takes a third longer, and far less memory. Raises BadInput."""
    if not model.hf.supports_gradient_checkpointing:
        raise BadInput(f"{model.path}: transformers' {type(model.hf).__name__} has no gradient "
                       "checkpointing; type --gradient_checkpointing=False")
    # transformers before 5.23 has another name for it
    enable = getattr(model.hf, "activation_checkpointing_enable",
                     model.hf.gradient_checkpointing_enable)
    enable(dict(use_reentrant=False))
    # transformers does it where a layer's flag `training` is set: in_training sets it. While the
    # layer runs it is not set: some have dropout of their own
    model.recomputed = [m for m in layers_of(model) if getattr(m, "gradient_checkpointing", False)]
    for layer in model.recomputed:
        layer._gradient_checkpointing_func = without_dropout(
            layer, layer._gradient_checkpointing_func)


def in_training(layers, read):
    """The function `read`, which runs the layers, with their flag `training` set."""
    def run(tokens):
        for layer in layers:
            layer.training = True
        try:
            return read(tokens)
        finally:
            for layer in layers:
                layer.training = False

    return run


def without_dropout(layer, checkpointed):
    """`checkpointed`, by which transformers runs a layer that is computed again, in eval mode."""
    def run(*args):
        layer.training = False
        return checkpointed(*args)

    return run

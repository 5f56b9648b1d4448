"""The layers of a model, for options that split, recompute, adapt or round them one by one."""


def layers_of(model):
    """The blocks of a Model's trunk."""
    # GradientCheckpointingLayer: the class of blocks in families that do not name theirs
    kinds = set(model.hf._no_split_modules or ["GradientCheckpointingLayer"])
    # FSDP makes a subclass of the block's class
    return [m for m in model.hf.base_model.modules()
            if kinds & {kind.__name__ for kind in type(m).__mro__}]

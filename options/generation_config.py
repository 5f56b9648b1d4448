"""
A generation_config.json that transformers reads, but refuses to save: with a temperature and no
do_sample, or with another setting that has no effect beside the others. Published models have some.
"""
import copy

from errors import say


def save_without_unsavable(model, folder):
    """Save a language model's generation config, from now on without such settings."""
    given = model.hf.generation_config
    kept = type(given)()
    for name in 2 * [*vars(given)]:  # twice: a temperature is good where do_sample is set
        without = copy.copy(kept)
        setattr(kept, name, getattr(given, name))
        try:
            kept.validate(strict=True)
        except ValueError:
            kept = without
    model.hf.generation_config = kept
    left_out = [name for name in vars(given) if vars(kept).get(name) != getattr(given, name)]
    say(f"{model.path}: transformers does not save a generation_config.json with "
        f"{', '.join(left_out)} beside its other settings; left out")
    kept.save_pretrained(folder)

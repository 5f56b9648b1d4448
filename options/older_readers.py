"""
Names in the config.json of a saved model that transformers 4, and what is built on it, such as an
older vLLM, reads. Version 5 reads both.
"""
import os

from configurator import read_json, write_json

# transformers 4's names of the angles' base, where layers have two the sliding ones' base, and the
# part of a head that turns
OLDER_NAMES = ["rope_theta", "rope_local_base_freq", "partial_rotary_factor"]
OLDER_NAMES_OF_NEOX = ["rotary_emb_base", "", "rotary_pct"]
# the kinds that transformers 4 knows; version 5 refuses the older names of another one (Gemma 4)
KINDS = ["default", "linear", "dynamic", "yarn", "longrope", "llama3"]


def add_older_names(folder):
    file = os.path.join(folder, "config.json")
    write_json(file, with_older_names(read_json(file)))


def with_older_names(settings):
    """A config.json's settings, and older names: else a reader takes a base of 10,000."""
    parts = {name: with_older_names(part) for name, part in settings.items()
             if isinstance(part, dict) and name.endswith("_config")}
    rope, more = settings.get("rope_parameters") or {}, {}
    full, sliding = (rope.get(f"{part}_attention") for part in ("full", "sliding"))
    full = full or rope
    rope_type = full.get("rope_type", "default")
    if full and rope_type in KINDS:
        kind = settings["model_type"]
        scaling = {name: x for name, x in full.items() if name not in (*OLDER_NAMES, "type")}
        if kind == "phi3":  # there it may have these three alone
            scaling = dict(type=rope_type) | {
                name: x for name, x in scaling.items() if name in ("short_factor", "long_factor")}
        more = dict(rope_scaling=None if rope_type == "default" else scaling)
        values = (full.get("rope_theta"), (sliding or {}).get("rope_theta"),
                  full.get("partial_rotary_factor"))
        names = OLDER_NAMES_OF_NEOX if kind == "gpt_neox" else OLDER_NAMES
        more |= {name: x for name, x in zip(names, values, strict=True) if name and x is not None}
    if "num_local_experts" in settings:
        more["num_experts"] = settings.get("num_experts", settings["num_local_experts"])
    return settings | parts | more

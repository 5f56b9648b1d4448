"""A command that is typed again with other keys, or of a run that has ended."""
import os

from configurator import read_json
from errors import BadInput

# keys that change no result, or by which a run that has ended goes on, or is saved once more
FREE = set("""
    max_iters epochs save_dtype checkpoint_interval keep_checkpoints sync_check_interval report_to
    device_type deterministic attn_implementation compile timeout reward_timeout save_rollouts
    micro_batch_size micro_batch_tokens rollout_batch_size gradient_checkpointing head_chunk
    cuda_graphs vllm_cache zero_stage offload generate_tp roles""".split())


def compare_keys(out_dir, folder, config, state, max_iters, trained):
    """
    Compare the keys of a run that resumes from a checkpoint, `folder`, with those that were typed,
    config. Returns whether nothing is left to do: it is at max_iters, and has saved its models,
    those of the names `trained` and the moving average. Raises BadInput where it is at max_iters,
    and other keys would have given other results.

    The state gets the keys that differ, "run/changes": [[iteration, {key: value}], ...], from this
    iteration on. The first one has what they were at iteration 0, of all that have changed since.
    """
    before = read_json(os.path.join(folder, "config.json"))
    changed = {key: x for key, x in config.items()
               if key != "out_dir" and before.get(key, x) != x}
    if state["iteration"] == max_iters:
        for key in (key for key in changed if key not in FREE):
            raise BadInput(f"{out_dir}: the run has ended at iteration {max_iters}, with {key} = "
                           f"{before[key]!r}, not {changed[key]!r}; a larger --max_iters goes on "
                           "from there, another --out_dir begins anew")
        names = [*trained, *["ema_policy"] * bool(config.get("ema_decay"))]
        if all(is_saved(os.path.join(out_dir, name), max_iters, config) for name in names):
            return True
    if changed:
        (_, first), *later = state.get("run/changes") or [[0, {}]]
        first = {key: before[key] for key in changed} | first
        state["run/changes"] = [[0, first], *later, [state["iteration"], changed]]
    return False


def is_saved(folder, iteration, config):
    """Whether a finished model, and its adapter, are there as the run would save them now."""
    folders = [folder, f"{folder}_adapter"][:1 + bool(about_model(folder).get("adapter"))]
    now = iteration, config.get("save_dtype", "auto")
    return all((about_model(one).get("iteration"), about_model(one).get("save_dtype")) == now
               and any(name.endswith(".safetensors") for name in os.listdir(one))
               for one in folders)


def about_model(folder):
    """The run.json beside a finished model; {} where there is none, or it is no run's."""
    file = os.path.join(folder, "run.json")
    try:
        about = read_json(file) if os.path.isfile(file) else {}
    except (ValueError, OSError, RecursionError):
        return {}
    return about if isinstance(about, dict) else {}


def keys_at(keys, changes, iteration):
    """The keys that a run had in an iteration: keys with the changes up to it."""
    for number, changed in changes:
        keys = keys | (changed if number <= iteration else {})
    return keys

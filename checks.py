"""
Checks of keys that contradict each other, before anything is loaded. configurator.py checks the
range of each single key; each option has a check for its own keys.
"""
import os
import re
import shutil

from errors import BadConfig, shorten

FORMS = {  # key: (a pattern for a model's value, the same in words)
    "zero_stage": ("[0-3]", "0, 1, 2 or 3"),
    "offload": ("none|optimizer|params", "none, optimizer or params"),
    "lora": (r"[1-9][0-9]{0,5}(:[1-9][0-9]{0,5}(\.[0-9]+)?(:[\w.+]*)?)?",
             "RANK[:ALPHA[:TARGETS]], such as 16:32:q+v"),
    "optim": ("adamw|adamw8bit|adafactor", "adamw, adamw8bit or adafactor")}


def check_system(system, device, trained, frozen=(), value_init=""):
    """
    Check the keys that all scripts share. trained, frozen: the names of the script's models, such
    as ("policy", "value") and ("ref", "reward", "judge"). Options are imported here, before the
    ranks compare their code. Raises BadConfig.
    """
    if not system.master_weights and system.dtype != "bfloat16":
        raise BadConfig("master_weights = False trains 16-bit weights themselves, which only works "
                        f"in bfloat16, not in {system.dtype}; type --dtype=bfloat16 or "
                        "--master_weights=True")
    compiler = os.environ.get("CXX", "g++")
    if system.compile and device.type == "cpu" and not shutil.which(compiler):
        raise BadConfig(f"compile = True needs a C++ compiler, and {compiler!r} is not "
                        "there; install one, or leave the key out")
    check_form("zero_stage", system.zero_stage, trained + frozen)
    check_form("offload", system.offload, trained + frozen)
    check_form("lora", system.lora, trained)
    check_form("optim", system.optim, trained)
    share_base = getattr(system, "share_base", False)
    if system.report_to:
        from options.trackers import names_in

        names_in(system.report_to)
    if system.lora or share_base:
        from options.lora import check_lora

        check_lora(system, trained, share_base, value_init)
    if system.optim != "adamw":
        from options.optimizers import check_optimizers

        check_optimizers(system, trained)
    if system.zero_stage or system.offload:
        from options.shards import check_shards

        check_shards(system, trained, frozen, share_base, value_init)
    if system.quantize == "4bit":
        from options.four_bits import check_four_bits

        check_four_bits(system, trained)


def check_form(key, text, names):
    """
    Raise BadConfig unless a key is one value, or one for each of some models, such as "3" or
    "policy=3,ref=0". names: the models that it may name.
    """
    pattern, wanted = FORMS[key]
    for part in text.split(",") if text.strip() else ():
        name, equals, value = (x.strip() for x in part.rpartition("="))
        if equals and name not in names or not re.fullmatch(pattern, value):
            raise BadConfig(f"{key} = {shorten(text)}: cannot read {shorten(part.strip())}; wanted "
                            "VALUE, or NAME=VALUE for one model, where NAME is one of "
                            f"{', '.join(names)} and VALUE {wanted}")


def check_rl(system, device, terms, reward_path, kl_coef, batch_size, num_minibatches,
             importance_cap, eval_path):
    """
    Raise BadConfig where keys of ppo.py and grpo.py do not go together. system: the shared keys;
    terms: [(weight, name, function)].
    """
    names = [name for _, name, _ in terms]
    for key, path, name in (("reward_path", reward_path, "reward_model"),
                            ("judge_path", system.judge_path, "judge")):
        if path and name not in names:
            raise BadConfig(f"{key} = {path!r}, but reward_functions does not use {name}; type "
                            f"--reward_functions={name}, or leave {key} out (--{key}=)")
        if name in names and not path:
            raise BadConfig(f"reward_functions names {name}; say which by --{key}=FOLDER, or name "
                            "a config file (--help begins with examples)")
    if system.ref_path and kl_coef == 0:
        raise BadConfig(f"ref_path = {system.ref_path!r} with kl_coef = 0: there is no reference "
                        "then; type --kl_coef=0.05, or leave it out")
    # options are imported here, before the ranks compare their code
    if system.roles or system.staleness > 0:
        from options.roles import check_ahead

        check_ahead(system)
    if system.cuda_graphs and device.type == "cuda":
        import decoding_graph  # noqa: F401
    if system.generate_tp > 1:
        from options.tensor_parallel import check_split

        check_split(system.generate_tp)
    if system.environment or system.tools:
        from options.environment import check_environment

        check_environment(system)
    elif "environment" in names:
        raise BadConfig("reward_functions names environment, and there is none; type "
                        "--environment=FILE.py:FUNCTION")
    if system.sampler == "vllm":
        from options.vllm import check_vllm

        check_vllm(system, importance_cap)
    if num_minibatches > batch_size:
        raise BadConfig(f"num_minibatches = {num_minibatches} would leave minibatches of "
                        f"batch_size = {batch_size} empty; lower it")
    if system.keep_best and not eval_path:
        raise BadConfig("keep_best needs held-out prompts to find the best policy by; give an "
                        "eval_path")
    if any(function for *_, function in terms) and system.reward_timeout >= system.timeout:
        raise BadConfig(f"reward_timeout = {system.reward_timeout} must be below timeout = "
                        f"{system.timeout}, or ranks that wait give up first")

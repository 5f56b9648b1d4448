"""
How much memory a run of ppo.py or grpo.py will take, per GPU and before anything is loaded: arithmetic on the config alone.

python tools/memory.py config/llama.py --world-size=8                                # a table: each model's rows, each phase's peak
python tools/memory.py config/llama.py --compare --gpu-gb=80                         # PPO, GRPO, LoRA ... and the largest micro-batch
python tools/memory.py config/llama.py --micro_batch_size=2 --policy-config=my.json  # keys of the script; a config.json from anywhere

The script is told from the config's keys or its name; --script=grpo says it. Where a model's folder is not here, its
config.json comes from --policy-config and --reward-config, which also take the name of a well-known shape (KNOWN, below).
Prompts are measured where data and tokenizer are here, else --prompt-tokens=512. device_type = "auto" means this machine, or a GPU
where --gpu-gb or --compare is given.

Every number is a formula below, one function each. A run's peak is what always lies there (weights, gradients, optimizer
states, the batch) plus the worst moment of its busiest phase. Sizes are those of the tensors, as torch's MemTracker counts
them: a GPU adds its context, its libraries' workspaces and the allocator's gaps, for which --gpu-gb leaves some room.

b rows of a micro-batch, n rows that decode at once, P prompt, R response, T = P + R, N = b T; d width, q = heads x head size,
ff width of the MLP, L layers, V vocabulary. Bytes: e of a stored weight, a of a matrix product's result, s of the residual
stream, f of the logits as the losses see them. In float32 all are 4; under autocast e = s = f = 4 and a = 2.
"""
import ast
import contextlib
import io
import math
import os
import sys
from types import SimpleNamespace

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from configurator import configure, read_keys, run_config_file  # noqa: E402
from engine.memory import FORMULAS, ROWS, predict  # noqa: E402
from errors import BadConfig, BadInput, report_and_exit  # noqa: E402

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def _shape(kind, d, ff, layers, heads, kv_heads, vocab, tied, context, **more):
    return dict(model_type=kind, hidden_size=d, intermediate_size=ff, num_hidden_layers=layers, num_attention_heads=heads,
                num_key_value_heads=kv_heads, vocab_size=vocab, tie_word_embeddings=tied,
                max_position_embeddings=context) | more

KNOWN = {  # parts of hub names, for when the hub is out of reach
    "llama-3.2-1b": _shape("llama", 2048, 8192, 16, 32, 8, 128256, True, 131072, head_dim=64),
    "llama-3.1-8b": _shape("llama", 4096, 14336, 32, 32, 8, 128256, False, 131072),
    "llama-3.1-70b": _shape("llama", 8192, 28672, 80, 64, 8, 128256, False, 131072),
    "qwen2.5-0.5b": _shape("qwen2", 896, 4864, 24, 14, 2, 151936, True, 32768),
    "qwen2.5-1.5b": _shape("qwen2", 1536, 8960, 28, 12, 2, 151936, True, 32768),
    "qwen2.5-3b": _shape("qwen2", 2048, 11008, 36, 16, 2, 151936, True, 32768),
    "qwen2.5-7b": _shape("qwen2", 3584, 18944, 28, 28, 4, 152064, False, 131072),
    "pythia-1b": _shape("gpt_neox", 2048, 8192, 16, 8, 8, 50304, False, 2048),
}
PHASES = {
    "rollout": "KV cache + decoding + decoding_copy", "score": "a model's activations or logits",
    "update": "activations, or what they keep + logits, of policy or value model", "save": "saving", "audit": "audit",
}
OPTIONS = dict(world_size=1, gpu_gb=0.0, compare=False, script="", policy_config="", reward_config="", prompt_tokens=0)


def split_arguments(argv):
    """(our options, the script's arguments). Raises BadConfig."""
    options, rest, argv = dict(OPTIONS), [], iter(argv)
    for arg in argv:
        key, equals, text = arg.removeprefix("--").partition("=")
        key = key.replace("-", "_")
        if not arg.startswith("--") or key not in OPTIONS:
            rest.append(arg)
            continue
        if not equals and key != "compare":
            text = next(argv, "")
        if key == "compare":
            options[key] = text != "False"
        else:
            try:
                options[key] = type(OPTIONS[key])(text)
            except ValueError:
                text = ""
            if text == "" or not isinstance(options[key], str) and not 0 < options[key] < 1e9:
                example = dict(script="grpo", gpu_gb=80, world_size=8, prompt_tokens=512).get(key, "config.json")
                raise BadConfig(f"{arg}: wanted something like --{key.replace('_', '-')}={example}")
    return options, rest


def script_keys(script):
    """{key: default} of a script, from its source: the literals above its call of configure. Nothing is run."""
    keys = read_keys(script)[0]
    with open(script, encoding="utf-8") as f:
        nodes = [node for node in ast.parse(f.read()).body if isinstance(node, ast.Assign)]
    named = {node.targets[0].id: node.value for node in reversed(nodes) if getattr(node.targets[0], "id", "") in keys}
    return {key: ast.literal_eval(named[key]) for key in keys}


def which_script(argv, wanted):
    """ppo or grpo: as wanted, else the one that has all keys given, else by the config's name. Raises BadConfig."""
    if wanted not in ("", "ppo", "grpo"):
        raise BadConfig(f"--script={wanted}: memory.py plans ppo and grpo")
    files = [arg for arg in argv if not arg.startswith("--")]
    given = {arg[2:].partition("=")[0] for arg in argv if arg.startswith("--")}.union(*map(run_config_file, files))
    fits = {name: given <= script_keys(os.path.join(ROOT, f"{name}.py")).keys() for name in ("ppo", "grpo", "sft", "rm")}
    others = [name for name in ("sft", "rm") if fits[name]]
    if not wanted and others and not (fits["ppo"] or fits["grpo"]):
        raise BadConfig(f"these keys are {others[0]}.py's; memory.py plans ppo and grpo")
    if wanted or fits["ppo"] != fits["grpo"]:
        return wanted or ("ppo" if fits["ppo"] else "grpo")
    stems = [os.path.basename(file).removesuffix(".py") for file in files]
    return "grpo" if any("grpo" in stem or stem in ("dapo", "gspo", "rloo", "cispo") for stem in stems) else "ppo"


def read_config(script, argv):
    """The configuration that the script would have with these arguments, checked alike. Raises BadConfig."""
    file = os.path.join(ROOT, f"{script}.py")
    with contextlib.redirect_stdout(io.StringIO()):  # configure prints what was given
        return configure(script_keys(file) | dict(__file__=file), argv)


def architecture(path, given, option):
    """ModelConfig of a model's folder or hub name, or of what is given instead: a config.json, or a name of KNOWN."""
    from engine.hf_config import parse_config
    from engine.hf_files import read_json

    if given in KNOWN:
        return parse_config(KNOWN[given], given)
    if given or os.path.isdir(path):
        file = given or path
        file = os.path.join(file, "config.json") if os.path.isdir(file) else file
        return parse_config(read_json(file), file)
    hint = f"give its config.json with {option}=FILE.json, or one of {', '.join(KNOWN)}"
    if path.count("/") != 1 or path.startswith(("out/", ".", "/")):
        raise BadInput(f"{path}: no such model folder; train it first, or {hint}")
    try:
        file = hub_file(path)
    except (OSError, ValueError):  # no network, no such repository, or not without consent
        shape = next((name for name in KNOWN if name in path.lower()), None)
        if shape is None:
            raise BadInput(f"{path}: not here, and the hub did not give its config.json; {hint}") from None
        print(f"{path}: not here, and the hub did not give it; planned with the shape of {shape}")
        return parse_config(KNOWN[shape], path)
    return parse_config(read_json(file), path)


def hub_file(path):
    """config.json of a hub name, from the hub's folder on this machine or from the hub. Raises OSError or ValueError."""
    from urllib.request import urlopen

    from huggingface_hub import constants, hf_hub_download

    try:
        return hf_hub_download(path, "config.json", local_files_only=True)
    except (OSError, ValueError):
        if constants.HF_HUB_OFFLINE:
            raise
        urlopen(constants.ENDPOINT, timeout=5).close()  # without a network the download would try again for half a minute
        return hf_hub_download(path, "config.json")


def measure_prompts(config, policy):
    """(longest prompt, whether prompts differ in length, held-out prompts, whether embeddings outnumber tokens). BadInput."""
    from data import encode_prompts, read_jsonl
    from engine.tokenizers import load_tokenizer

    if not os.path.isdir(config["policy_path"]):
        raise BadInput(f"no folder {config['policy_path']}")
    tokenizer, lengths = load_tokenizer(config["policy_path"]), []
    for path in (config["prompts_path"], config["eval_path"]):
        rows = read_jsonl(path, ["prompt"])
        some = rows[::math.ceil(len(rows) / 5000)]  # of a large file every k-th will do
        lengths.append([len(p) for p in encode_prompts(some, tokenizer, policy.max_positions - config["max_new_tokens"], path)])
    return max(map(max, lengths)), len(set(lengths[0])) > 1, len(rows), tokenizer.vocab_size < policy.vocab_size


def largest_micro_batch(config, plan, limit, world_size):
    """The largest micro_batch_size, up to all rows of a rank, whose peak is at most limit bytes; "none" if 1 does not fit."""
    low, high = 0, math.ceil(config["batch_size"] / world_size) + 1
    while high - low > 1:
        middle = (low + high) // 2
        fits = plan(config | dict(micro_batch_size=middle))["peak_mib"] * 2**20 <= limit
        low, high = (middle, high) if fits else (low, middle)
    return low or "none"


def variants(config):
    """{column: configuration} for --compare: what both scripts know is the given run's, the rest their defaults."""
    given = {k: v for k, v in config.items() if k not in ("lora", "share_base", "reward_functions")}
    ppo, grpo = (read_config(name, []) for name in ("ppo", "grpo"))
    ppo |= {k: v for k, v in given.items() if k in ppo} | dict(reward_functions="reward_model", value_init="reward")
    grpo |= {k: v for k, v in given.items() if k in grpo} | dict(reward_functions="1.0*accuracy", kl_coef=config["kl_coef"] or 0.04)
    grpo |= {key: ",".join(part for part in grpo[key].split(",") if not part.strip().startswith("value="))
             for key in ("zero_stage", "offload", "optim")}  # there is no value model
    rank = config["lora"].split(",")[0].rpartition("=")[2] or "16"
    adapters = dict(lora=rank, offload="")  # what is the reference's trunk cannot be moved away
    return {"PPO": ppo, "PPO + LoRA": ppo | adapters, "PPO one trunk": ppo | adapters | dict(share_base=True), "GRPO": grpo,
            "GRPO + LoRA": grpo | adapters, "GRPO + reward model": grpo | dict(reward_functions="reward_model")}


def print_table(first, columns, rows):
    """Rows of [name, a number for each column, a text], the numbers right-aligned under their columns."""
    widths = [max(len(column), 8) + 2 for column in columns]
    print(f"{first:<12}" + "".join(f"{column:>{width}}" for column, width in zip(columns, widths, strict=True)))
    for name, *numbers, text in rows:
        numbers = (f"{x:.2f}" if isinstance(x, float) else x for x in numbers)
        cells = (f"{x:>{width}}" for x, width in zip(numbers, widths, strict=True))
        print(f"{name:<12}{''.join(cells)}   {text}".rstrip())


def print_plan(p, limit, largest):
    """A run's rows by model, and its phases."""
    scale, unit = (1024, "GiB") if p["peak_mib"] > 8192 else (1, "MiB")
    total = {row: sum(r[row] for r in p["rows"].values()) for row in ROWS[:3]}
    print_table(unit, [*p["rows"], "all"], [
        [row, *(r[row] / scale for r in p["rows"].values()), total[row] / scale if row in total else "", FORMULAS[row]]
        for row in ROWS])
    print(f"\nThe peak of each phase: parameters, gradients, optimizer ({sum(total.values()) / scale:.2f}), the batch, and")
    for name, size in sorted(p["phases"].items(), key=lambda item: -item[1]):
        print(f"{name:<12}{size / scale:>10.2f}   {PHASES[name]}")
    if p["cpu_mib"]:
        print(f"offloaded   {p['cpu_mib'] / scale:>10.2f}   in the CPU's memory")
    print(f"\npredicted peak: {p['peak_mib'] / scale:.2f} {unit}"
          + (f"; of {limit:g} GB the largest micro_batch_size that fits is {largest}" if limit else ""))


def print_comparison(plans, largest, limit):
    """The columns of --compare, in GiB."""
    def of(p, *names):
        return sum(r[name] for r in p["rows"].values() for name in names) / 1024

    rows = [[row, *(of(p, row) for p in plans.values()), FORMULAS[row]] for row in ROWS[:3]]
    rows += [["the rest", *(p["peak_mib"] / 1024 - of(p, *ROWS[:3]) for p in plans.values()), "what the busiest phase adds"],
             ["peak", *(p["peak_mib"] / 1024 for p in plans.values()), ""], ["in", *(p["phase"] for p in plans.values()), ""],
             ["micro-batch", *largest.values(), f"the largest micro_batch_size whose peak is below {limit:g} GB"]]
    print_table("GiB", list(plans), rows)


def main(argv):
    sys.excepthook = report_and_exit
    if not argv or {"--help", "-h"} & set(argv):
        print(__doc__.strip())
        return
    options, rest = split_arguments(argv)
    script = which_script(rest, options["script"])
    config, world_size = read_config(script, rest), options["world_size"]
    from engine.hf_files import read_json
    from engine.placement import precisions

    device = config["device_type"]
    if device == "auto":
        import torch

        device = "cuda" if options["gpu_gb"] or options["compare"] or torch.cuda.is_available() else "cpu"
    policy = architecture(config["policy_path"], options["policy_config"], "--policy-config")
    reward, learned = policy, "reward_model" in config["reward_functions"] and not config["share_base"]
    if learned or options["compare"] and (options["reward_config"] or os.path.isdir(config["reward_path"])):
        reward = architecture(config["reward_path"], options["reward_config"], "--reward-config")
    P, longest = options["prompt_tokens"], policy.max_positions - config["max_new_tokens"]
    if longest < max(P, 1):
        raise BadConfig(f"prompts of {P or 1} tokens and max_new_tokens = {config['max_new_tokens']} exceed the policy's "
                        f"context of {policy.max_positions}; lower one of them")
    try:
        measured, differ, held_out, padding = measure_prompts(config, policy)
        P = P or measured
    except BadInput as e:
        differ, held_out, padding = True, 0, policy.family in ("qwen2", "qwen3", "gpt_neox")  # whose vocabularies are padded
        if not P:
            P = min(512, longest)
            print(f"prompts are taken to have up to {P} tokens (or --prompt-tokens=N), as none can be measured here: {e}")

    adapter = os.path.join(config["reward_path"], "adapter_config.json")
    reward_rank = read_json(adapter).get("r", 0) if config["share_base"] and os.path.isfile(adapter) else 0

    def plan(settings):
        return predict(settings, policy, reward, P, world_size, device, differ, padding, held_out, reward_rank)

    limit = options["gpu_gb"] or 80 * options["compare"]
    print(f"{script}.py, each of {world_size} rank(s) on {device}, {config['dtype']}; prompts of up to {P} tokens, responses "
          f"of {config['max_new_tokens']};\nan iteration has {config['batch_size']} of them, a micro-batch "
          f"{config['micro_batch_size']}, and {config['rollout_batch_size'] or 'all of a rank'} decode at once\n")
    precisions(config["dtype"], config["master_weights"], SimpleNamespace(type="cpu"))  # refuses what the script would refuse
    columns = variants(config) if options["compare"] else {"": config}
    plans = {name: plan(c) for name, c in columns.items()}
    largest = {name: limit and largest_micro_batch(c, plan, limit * 1e9, world_size) for name, c in columns.items()}
    if options["compare"]:
        print_comparison(plans, largest, limit)
    else:
        print_plan(plans[""], limit, largest[""])

if __name__ == "__main__":
    main(sys.argv[1:])

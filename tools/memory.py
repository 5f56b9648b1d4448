"""
How much memory a run of ppo.py or grpo.py will take on each GPU, before anything is loaded: a table
of each model's weights, gradients, optimizer states and activations, and the peak of each phase.

python tools/memory.py config/llama.py --world-size=8            # the table, for 8 GPUs
python tools/memory.py config/llama.py --compare --gpu-gb=80     # PPO, GRPO, LoRA ... side by side
python tools/memory.py config/llama.py --micro_batch_size=2 --policy-config=my.json
python tools/memory.py config/llama.py --world-size=3 --roles=train=2,generate=1    # a table a role

Config files and --key=value are those of the script. These options are the tool's own:

    --world-size=1       ranks, one GPU each
    --gpu-gb=80          also say the largest micro_batch_size whose peak is below this many GB;
                         for ranks that only generate, the largest rollout_batch_size
    --compare            six ways to train the same models, side by side
    --script=ppo         ppo or grpo; otherwise the keys tell, or the name of the config file
    --policy-config=     a config.json, or a name from below, if the policy's folder is not here
    --reward-config=     the same for the reward model
    --judge-config=      the same for the judge
    --prompt-tokens=512  the longest prompt; otherwise prompts are measured, if data and tokenizer
                         are here

The names of known models: llama-3.2-1b, llama-3.1-8b, llama-3.1-70b, qwen2.5-0.5b, qwen2.5-1.5b,
qwen2.5-3b, qwen2.5-7b, pythia-1b. device_type = "auto" means a GPU if --gpu-gb or --compare is
given, else what this machine has.

The prediction is of the tensors alone. A GPU also needs memory for its context, the workspaces of
its libraries and the gaps between tensors: leave some room with --gpu-gb.

Letters in the table: b rows of a micro-batch, n rows that decode at once, P prompt length, R
response length, V vocabulary, d width, L layers, kv key-value heads x head size; and bytes of an
element: e of a weight, a of the result of a matrix product, f of the logits. Names such as
kept_by_trunk and saving are functions of engine/memory.py, which has all formulas in full.
"""
import math
import os
import sys
from types import SimpleNamespace

# Python looks for modules in this file's folder, tools/; ours are in the folder above it.
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

from configurator import read_arguments, read_keys, run_config_file  # noqa: E402
from engine.memory import ROWS  # noqa: E402
from engine.planner import predict, rewards_of  # noqa: E402
from errors import BadConfig, BadInput, report_and_exit  # noqa: E402

OPTIONS = dict(world_size=1, gpu_gb=0.0, compare=False, script="", policy_config="",
               reward_config="", judge_config="", prompt_tokens=0)
FORMULAS = {  # of each row of the table, in short
    "parameters": "elements x bytes",
    "gradients": "trained elements x bytes",
    "optimizer": "AdamW: 2 x trained elements x bytes + 4 a tensor; the average",
    "activations": "trained: kept_by_trunk + layer_backward; frozen: one layer",
    "logits": "trained: 2 b R V f; in chunks V d e + 2 chunk V f; frozen: 2 b R V f",
    "KV cache": "2 L n kv (P + R - 1) a",
    "buffers": "the largest: audit, decoding_copy, stepping, saving",
}
PHASES = {  # what is at work at the worst moment of each phase
    "rollout": "KV cache + decoding + decoding_copy",
    "score": "a model's activations or logits",
    "update": "activations, or what they keep + logits, of policy or value model",
    "save": "saving",
    "audit": "audit",
    "weights": "a new version of the policy, as it leaves or arrives",
}


# --------------------------------------------------------------------------------------------------
# shapes of known models, for a machine without their folders and without the hub


def _shape(kind, d, ff, layers, heads, kv_heads, vocab, tied, context, **more):
    return dict(model_type=kind, hidden_size=d, intermediate_size=ff, num_hidden_layers=layers,
                num_attention_heads=heads, num_key_value_heads=kv_heads, vocab_size=vocab,
                tie_word_embeddings=tied, max_position_embeddings=context) | more


KNOWN = {  # parts of hub names, in lower case
    "llama-3.2-1b": _shape("llama", 2048, 8192, 16, 32, 8, 128256, True, 131072, head_dim=64),
    "llama-3.1-8b": _shape("llama", 4096, 14336, 32, 32, 8, 128256, False, 131072),
    "llama-3.1-70b": _shape("llama", 8192, 28672, 80, 64, 8, 128256, False, 131072),
    "qwen2.5-0.5b": _shape("qwen2", 896, 4864, 24, 14, 2, 151936, True, 32768),
    "qwen2.5-1.5b": _shape("qwen2", 1536, 8960, 28, 12, 2, 151936, True, 32768),
    "qwen2.5-3b": _shape("qwen2", 2048, 11008, 36, 16, 2, 151936, True, 32768),
    "qwen2.5-7b": _shape("qwen2", 3584, 18944, 28, 28, 4, 152064, False, 131072),
    "olmo-2-0425-1b": _shape("olmo2", 2048, 8192, 16, 16, 16, 100352, False, 4096),
    "gemma-3-1b": _shape("gemma3_text", 1152, 6912, 26, 4, 1, 262144, True, 32768, head_dim=256,
                         sliding_window=512),
    "pythia-1b": _shape("gpt_neox", 2048, 8192, 16, 8, 8, 50304, False, 2048),
}


# --------------------------------------------------------------------------------------------------
# the command line and the script's configuration


def split_arguments(argv):
    """(values of OPTIONS, the script's arguments). Raises BadConfig."""
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
                examples = dict(script="grpo", gpu_gb=80, world_size=8, prompt_tokens=512)
                example = examples.get(key, "config.json")
                raise BadConfig(f"{arg}: wanted something like --{key.replace('_', '-')}={example}")
    return options, rest


def which_script(argv, wanted):
    """
    "ppo" or "grpo": what is wanted (--script); else the one that has all keys that are given; else
    what the name of the config file says. Raises BadConfig.
    """
    if wanted not in ("", "ppo", "grpo"):
        raise BadConfig(f"--script={wanted}: memory.py plans ppo and grpo")
    files = [arg for arg in argv if not arg.startswith("--")]
    given = {arg[2:].partition("=")[0] for arg in argv if arg.startswith("--")}
    given = given.union(*map(run_config_file, files))
    fits = {name: given <= read_keys(os.path.join(ROOT, f"{name}.py")).keys()
            for name in ("ppo", "grpo", "sft", "rm")}
    others = [name for name in ("sft", "rm") if fits[name]]
    if not wanted and others and not (fits["ppo"] or fits["grpo"]):
        raise BadConfig(f"these keys are {others[0]}.py's; memory.py plans ppo and grpo")
    if wanted or fits["ppo"] != fits["grpo"]:
        return wanted or ("ppo" if fits["ppo"] else "grpo")
    stems = [os.path.basename(file).removesuffix(".py") for file in files]
    relatives = ("dapo", "gspo", "rloo", "cispo")
    return "grpo" if any("grpo" in stem or stem in relatives for stem in stems) else "ppo"


def read_config(script, argv):
    """The script's configuration with these arguments, checked like there. Raises BadConfig."""
    keys = read_keys(os.path.join(ROOT, f"{script}.py"))
    given = {name: value for name, (value, _) in read_arguments(keys, argv).items()}
    return {name: key.default for name, key in keys.items()} | given


# --------------------------------------------------------------------------------------------------
# the models and the prompts


def architecture(path, given, option):
    """
    The ModelConfig of a model. path: its folder or hub name. given: what the user gave instead of
    it with the option of that name, a config.json or a name of KNOWN, or "". Raises BadInput.
    """
    from engine.hf_config import parse_config  # here: --help need not wait for torch
    from engine.hf_files import model_folders, read_json

    if given in KNOWN:
        return parse_config(KNOWN[given], given)
    if given or os.path.isdir(path):
        file = given or path
        if os.path.isdir(file):
            file = os.path.join(model_folders(file, weights=False)[-1], "config.json")
        return parse_config(read_json(file), file)
    hint = f"give its config.json with {option}=FILE.json, or one of {', '.join(KNOWN)}"
    if path.count("/") != 1 or path.startswith(("out/", ".", "/")):
        raise BadInput(f"{path}: no such model folder; train it first, or {hint}")
    try:
        file = hub_file(path)
    except (OSError, ValueError):  # no network, no such repository, or the user has not consented
        shape = next((name for name in KNOWN if name in path.lower()), None)
        if shape is None:
            raise BadInput(f"{path}: not here, and the hub did not give its config.json; "
                           f"{hint}") from None
        print(f"{path}: not here, and the hub did not give it; planned with the shape of {shape}")
        return parse_config(KNOWN[shape], path)
    return parse_config(read_json(file), path)


def hub_file(path):
    """
    The path of a hub model's config.json, downloaded unless it is on this machine already. Raises
    OSError or ValueError.
    """
    from urllib.request import urlopen

    from huggingface_hub import constants, hf_hub_download

    try:
        return hf_hub_download(path, "config.json", local_files_only=True)
    except (OSError, ValueError):
        if constants.HF_HUB_OFFLINE:
            raise
        # without a network this fails at once; the download would try again for half a minute
        urlopen(constants.ENDPOINT, timeout=5).close()
        return hf_hub_download(path, "config.json")


def measure_prompts(config, policy):
    """
    (the longest prompt in tokens, whether prompts differ in length, the number of held-out prompts,
    whether the model has more embeddings than the tokenizer has tokens). Raises BadInput.
    """
    from data import encode_prompts
    from engine.tokenizers import load_tokenizer
    from formats import Rows, read_rows
    from rows import prompt_row

    if not os.path.isdir(config["policy_path"]):
        raise BadInput(f"no folder {config['policy_path']}")
    tokenizer, lengths = load_tokenizer(config["policy_path"], config), []
    for path in filter(None, (config["prompts_path"], config["eval_path"])):
        rows = read_rows(path, prompt_row, config["fields"])
        some = rows[::math.ceil(len(rows) / 5000)]  # of a large file every k-th is enough
        some = Rows(some, [(path, None, len(some))])
        longest = policy.max_positions - config["max_new_tokens"]
        longest = min(longest, config["max_prompt_tokens"] or longest)
        prompts = encode_prompts(some, tokenizer, longest, path, too_long=config["too_long"])
        lengths.append([len(p) for p in prompts])
    padding = tokenizer.vocab_size < policy.vocab_size
    return max(map(max, lengths)), len(set(lengths[0])) > 1, len(rows), padding


# --------------------------------------------------------------------------------------------------
# several predictions: the largest micro-batch, the columns of --compare


def largest(key, config, plan, limit, most):
    """
    The largest value of micro_batch_size or rollout_batch_size (key), up to `most` rows, whose peak
    is at most limit bytes, by bisection; "none" if not even 1 fits. plan: configuration -> what
    predict returns.
    """
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        rows = {"micro_batch_tokens": 0, key: middle}
        fits = plan(config | rows)["peak_mib"] * 2**20 <= limit
        low, high = (middle, high) if fits else (low, middle)
    return low or "none"


def variants(config):
    """
    {column: configuration} for --compare. The given run's keys are used where a script has them;
    the other keys are the script's defaults.
    """
    given = {k: v for k, v in config.items() if k not in ("lora", "share_base", "reward_functions")}
    ppo, grpo = (read_config(name, []) for name in ("ppo", "grpo"))
    ppo |= {k: v for k, v in given.items() if k in ppo}
    ppo |= dict(reward_functions="reward_model", value_init="reward")
    grpo |= {k: v for k, v in given.items() if k in grpo}
    grpo |= dict(reward_functions="1.0*accuracy", kl_coef=config["kl_coef"] or 0.04)
    for key in ("zero_stage", "offload", "optim"):  # GRPO has no value model
        parts = grpo[key].split(",")
        grpo[key] = ",".join(part for part in parts if not part.strip().startswith("value="))
    rank = config["lora"].split(",")[0].rpartition("=")[2] or "16"
    # the reference is then the trunk under the policy's adapter, which cannot be offloaded
    adapters = dict(lora=rank, offload="")
    return {
        "PPO": ppo,
        "PPO + LoRA": ppo | adapters,
        "PPO one trunk": ppo | adapters | dict(share_base=True),
        "GRPO": grpo,
        "GRPO + LoRA": grpo | adapters,
        "GRPO + reward model": grpo | dict(reward_functions="reward_model"),
    }


# --------------------------------------------------------------------------------------------------
# printing


def print_table(first, columns, rows):
    """
    Print the names of the columns, then the rows, [name, a number for each column, a text]: the
    numbers are right-aligned under their columns.
    """
    widths = [max(len(column), 8) + 2 for column in columns]
    titles = (f"{column:>{width}}" for column, width in zip(columns, widths, strict=True))
    print(f"{first:<12}{''.join(titles)}")
    for name, *numbers, text in rows:
        numbers = (f"{x:.2f}" if isinstance(x, float) else x for x in numbers)
        cells = (f"{x:>{width}}" for x, width in zip(numbers, widths, strict=True))
        print(f"{name:<12}{''.join(cells)}   {text}".rstrip())


def print_plan(p, fits=""):
    """Print a prediction: its rows by model, then its phases. fits: words behind its last line."""
    scale, unit = (1024, "GiB") if p["peak_mib"] > 8192 else (1, "MiB")
    total = {row: sum(r[row] for r in p["rows"].values()) for row in ROWS[:3]}
    rows = [[row, *(r[row] / scale for r in p["rows"].values()),
             total[row] / scale if row in total else "", FORMULAS[row]] for row in ROWS]
    print_table(unit, [*p["rows"], "all"], rows)
    always = sum(total.values()) / scale
    print("\nThe peak of each phase: "
          f"parameters, gradients, optimizer ({always:.2f}), the batch, and")
    for name, size in sorted(p["phases"].items(), key=lambda item: -item[1]):
        print(f"{name:<12}{size / scale:>10.2f}   {PHASES[name]}")
    if p["cpu_mib"]:
        print(f"offloaded   {p['cpu_mib'] / scale:>10.2f}   in the CPU's memory")
    if p["sent_mib"]:
        where = ", in the CPU's memory" if p["sent_by"] == "cpu" else ""
        print(f"first rank  {p['sent_mib'] / scale:>10.2f}   weights on their way to others, "
              f"on it alone{where}")
    print(f"\npredicted peak: {p['peak_mib'] / scale:.2f} {unit}{fits}")


def print_comparison(plans, sizes, limit):
    """
    Print the columns of --compare, {column: prediction}, in GiB. sizes: the largest
    micro_batch_size of each that fits into the limit, GB.
    """
    def of(p, *names):
        return sum(r[name] for r in p["rows"].values() for name in names) / 1024

    each = plans.values()
    rows = [[row, *(of(p, row) for p in each), FORMULAS[row]] for row in ROWS[:3]]
    rows += [
        ["the rest", *(p["peak_mib"] / 1024 - of(p, *ROWS[:3]) for p in each),
         "what the busiest phase adds"],
        ["peak", *(p["peak_mib"] / 1024 for p in each), ""],
        ["in", *(p["phase"] for p in each), ""],
        ["micro-batch", *sizes.values(),
         f"the largest micro_batch_size whose peak is below {limit:g} GB"],
    ]
    print_table("GiB", list(plans), rows)


# --------------------------------------------------------------------------------------------------


def main(argv):
    """The tool, with these arguments. Raises BadInput."""
    sys.excepthook = report_and_exit
    if not argv or {"--help", "-h"} & set(argv):
        print(__doc__.strip())
        return
    options, rest = split_arguments(argv)
    script = which_script(rest, options["script"])
    config, world_size = read_config(script, rest), options["world_size"]
    # here: --help need not wait for torch
    from engine.crew import parse_roles
    from engine.hf_files import read_json, several_paths
    from engine.judging import judged_by_reference
    from engine.placement import precisions

    device = config["device_type"]
    if device == "auto":
        import torch

        planned = options["gpu_gb"] or options["compare"]
        device = "cuda" if planned or torch.cuda.is_available() else "cpu"

    # the models; under share_base a reward model is an adapter on the policy's trunk
    policy = architecture(config["policy_path"], options["policy_config"], "--policy-config")
    judge = policy
    if "judge" in rewards_of(config) and not judged_by_reference(config):
        judge = architecture(config["judge_path"], options["judge_config"], "--judge-config")
    learned, share_base = "reward_model" in config["reward_functions"], config["share_base"]
    paths = [config["reward_path"]]
    if learned:
        paths = several_paths(config["reward_path"], "reward_path")
    rewards, reward_ranks = [], []
    for path in paths:
        known = options["reward_config"] or os.path.isdir(path)
        own = learned and not share_base or options["compare"] and known
        rewards.append(architecture(path, options["reward_config"], "--reward-config")
                       if own else policy)
        adapter = os.path.join(path, "adapter_config.json")
        there = share_base and os.path.isfile(adapter)
        reward_ranks.append(read_json(adapter).get("r", 0) if there else 0)

    # the prompts
    P, longest = options["prompt_tokens"], policy.max_positions - config["max_new_tokens"]
    if longest < max(P, 1):
        raise BadConfig(f"prompts of {P or 1} tokens and max_new_tokens = "
                        f"{config['max_new_tokens']} exceed the policy's context of "
                        f"{policy.max_positions}; lower one of them")
    try:
        measured, differ, held_out, padding = measure_prompts(config, policy)
        P = P or measured
    except BadInput as e:
        differ, held_out = True, 0
        # as the usual models of these families have
        padding = policy.family in ("qwen2", "qwen3", "olmo2", "gpt_neox")
        if not P:
            P = min(512, longest)
            print(f"prompts are taken to have up to {P} tokens (or --prompt-tokens=N), as none can "
                  f"be measured here: {e}")

    def plan(settings, ranks=world_size, role=""):
        return predict(settings, policy, rewards, P, ranks, device, differ, padding, held_out,
                       reward_ranks, judge=judge, role=role)

    tokens = config["micro_batch_tokens"]
    limit = options["gpu_gb"] or 80 * options["compare"]
    print(f"{script}.py, each of {world_size} rank(s) on {device}, {config['dtype']}; "
          f"prompts of up to {P} tokens, responses of {config['max_new_tokens']};\n"
          f"an iteration has {config['batch_size']} of them, a micro-batch "
          f"{f'{tokens} tokens' if tokens else config['micro_batch_size']}, and "
          f"{config['rollout_batch_size'] or 'all of a rank'} decode at once\n")
    # called for what it refuses, as the script would
    precisions(config["dtype"], config["master_weights"], SimpleNamespace(type="cpu"))
    roles = parse_roles(config["roles"], world_size, "or type --world-size=")

    def what_fits(settings, ranks=world_size, role=""):
        """(the key of how many rows are at work at once, its largest value whose peak fits)."""
        key, rows = "micro_batch_size", math.ceil(settings["batch_size"] / ranks)
        if role == "generate":  # these ranks train nothing: what counts is what decodes at once
            key, rows = "rollout_batch_size", rows * settings["generate_tp"]
        return key, largest(key, settings, lambda c: plan(c, ranks, role), limit * 1e9, rows)

    def show(*whose):
        """Print the plan of all ranks, or of those of a role: (how many they are, the role)."""
        key, size = what_fits(config, *whose) if limit else ("", 0)
        fits = f"; of {limit:g} GB the largest {key} that fits is {size}" if limit else ""
        print_plan(plan(config, *whose), fits)

    if options["compare"]:
        columns = variants(config)
        sizes = {name: what_fits(c)[1] for name, c in columns.items()}
        print_comparison({name: plan(c) for name, c in columns.items()}, sizes, limit)
    elif roles:
        for role, ranks in roles.items():
            print(f"{len(ranks)} rank(s) that {role}:\n")
            show(len(ranks), role)
            print()
    else:
        show()


if __name__ == "__main__":
    main(sys.argv[1:])

"""
What would it take? Seconds, bytes and money of a run, before a GPU is rented.

python tools/plan.py grpo.py config/gsm8k_grpo.py --gpus=8xH100 --length=700 --price=2.5
python tools/plan.py ppo.py config/mine.py --gpus=1xcpu --measure      # on this machine

--gpus: how many of which card, a rank on each; or cpu, which needs --measure. --card=FILE: another
card, as JSON, see CARDS. --length: tokens of the mean response; without it all responses are as
long as they may be, and, in a second column, half as long. A rollout takes as many steps as its
longest response has tokens. --prompt: tokens of the mean prompt; without it the mean of the file,
if that and the tokenizer are there, or the longest. --price: of a GPU for an hour. All other
arguments are the script's. Of each model its config.json is enough.

It prints three kinds of seconds, which are not to be mixed:

  limit     what the datasheet allows: tools/work.py counts operations and bytes. No run is faster
  measured  with --measure, on the device that is there, see measure.py; without the disk, compile,
            the recording of CUDA graphs, and what rules compute. Of several ranks with torchrun in
            front
  range     without a device: how many times their limit published runs take, see PUBLISHED
"""
import json
import os
import re
import statistics
import sys
from types import SimpleNamespace

# Python looks for modules in this file's folder, tools/; ours are in the folder above it.
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

from configurator import Key  # noqa: E402  first: it must be before torch

import torch  # noqa: E402

import load  # noqa: E402
from errors import BadInput  # noqa: E402
from prompts import encode_prompts, prompt_row, read_rows  # noqa: E402
from tools import measure, memory, work  # noqa: E402
from tools.outputs import files_of  # noqa: E402
from tools.runs import typed  # noqa: E402

# TFLOP/s of products in 16 bits without sparsity, and in float32; memory in GB and its GB/s; GB/s
# to other GPUs of a machine, and to its CPU, in one direction. docs/scale.md has the sources
CARDS = dict(
    A100=(312, 19.5, 80, 2039, 300, 32), H100=(989, 67, 80, 3350, 450, 64),
    H200=(989, 67, 141, 4800, 450, 64), H20=(148, 44, 96, 4000, 450, 64),
    B200=(2250, 80, 180, 8000, 900, 64), L4=(121, 30.3, 24, 300, 32, 32),
    RTX4090=(165, 82.6, 24, 1008, 32, 32))
FIELDS = "tflops", "tflops32", "gb", "bandwidth", "link", "host"
MACHINE, NETWORK = 8, 50  # GPUs of a machine; GB/s of each to other machines: 400 Gb/s
DISK = 1  # GB/s that a checkpoint is written with, and models are read
ROOM = 0.95  # of a card's memory; the rest is for the context and gaps
# a step's seconds over its limit: 7B to 32B with vLLM and the like; docs/scale.md has the table
PUBLISHED = 3, 7
OWN = dict(
    gpus=Key("", "such as 8xH100", []), card=Key("", "FILE of JSON", []),
    length=Key(0, "tokens of the mean response [>= 0]", []),
    prompt=Key(0, "tokens of the mean prompt [>= 0]", []),
    price=Key(0.0, "of a GPU for an hour [>= 0]", []),
    measure=Key(False, "on the device that is there", []))


def read_card(gpus, file):
    """(number, name, card) of --gpus and --card; card: {field: number}, {} for a CPU."""
    found = re.fullmatch(r"(\d+)x([\w-]+)", gpus)
    if not found or not 0 < int(found[1]) <= 10**5:
        raise BadInput(f"gpus = {gpus!r}: wanted a number and a card: type --gpus=8xH100")
    number, name = int(found[1]), found[2]
    cards = {card.lower(): dict(zip(FIELDS, x, strict=True)) for card, x in CARDS.items()}
    if file:
        try:
            with open(file, encoding="utf-8") as f:
                card = json.load(f)
            card = {field: float(card[field]) for field in FIELDS}
            if not all(0 < x < 1e9 for x in card.values()):
                raise ValueError("a number is not above 0")
        except (OSError, ValueError, LookupError, TypeError) as e:
            raise BadInput(f"card = {file!r}: {e}; type the path of JSON with all that this has: "
                           f"{json.dumps(cards['h100'])}") from e
    else:
        card = cards.get(name.lower(), {})
        if not card and name.lower() != "cpu":
            raise BadInput(f"gpus = {gpus!r}: no card of that name; known are {', '.join(CARDS)} "
                           "and cpu; for others type --card=FILE")
    if card and number > MACHINE:
        card["link"] = min(card["link"], NETWORK)
    return number, name, card


def prompt_length(script, config):
    """(tokens of the mean prompt or, of sft.py and rm.py, of half a text; what it is)."""
    if script in ("sft", "rm"):
        return (config["max_tokens"] or 1024) // 2, "half of the longest text"
    system = SimpleNamespace(**config)
    try:
        tokenizer = load.load_tokenizer(config["policy_path"], system)
        rows = read_rows(config["prompts_path"], prompt_row, config["fields"])
        del rows[1000:]
        model = SimpleNamespace(tokenizer=tokenizer, max_positions=10**9)
        rows = encode_prompts(rows, dict(policy=model), 1, system)
        return round(statistics.mean(map(len, rows.ids))), "the mean of prompts_path"
    except BadInput:
        files = files_of(config["prompts_path"])
        if all(map(os.path.exists, [f"{config['policy_path']}/tokenizer_config.json", *files])):
            raise
        return config["max_prompt_tokens"] or 512, "the longest; prompts_path is not there"


# -------------------------------------------------------------------------------------------------
# the plan


def speed_of(card, config):
    """Operations, bytes and bytes over a link a second; a CPU's are measured."""
    dtype = getattr(torch, config["dtype"])
    if card:
        flop = card["tflops" if dtype.itemsize == 2 else "tflops32"] * 1e12
        return dict(flop=flop, bandwidth=card["bandwidth"] * 1e9, link=card["link"] * 1e9)
    cpu = torch.device("cpu")
    return dict(flop=work.products(cpu, dtype), bandwidth=work.bandwidth(cpu, 2**28), link=1e9)


def report(script, config, own, card, P, means, run, speed, took):
    """Print the table of phases, and what an iteration and the run take."""
    works = [work.work_of(script, config, run, P, mean) for mean in means]
    least = [work.least_of(of, speed) for of in works]
    _, numbers, _ = run
    moved = {}  # {phase: (bytes, GB/s, what bounds it)}: the same at any length
    if config.get("sampler") == "vllm" and card:  # into the CPU's memory, and out of it
        nbytes = 2 * numbers["policy"][0] * getattr(torch, config["dtype"]).itemsize
        moved["to vLLM"] = nbytes, card["host"], "host"
    if config["checkpoint_interval"]:
        nbytes = 12 * sum(own for _, own in numbers.values()) / config["checkpoint_interval"]
        moved["checkpoints"] = nbytes, DISK, "disk"
    for phase, (nbytes, rate, bound) in moved.items():
        works[0][phase] = memory.Count(nbytes=nbytes)
        for at in least:
            at[phase] = nbytes / rate / 1e9, bound
    took = measure.phases_of(script, config, P, means[0], took) if took else {}

    heads = [f"limit, {mean} tokens" for mean in means]
    print(f"\n{'of a rank, an iteration':<24}{'TFLOP':>9}{'GB':>9}{'GB sent':>9}  {'by':<9}"
          + "".join(f"{head:>20}" for head in heads + ["measured"] * bool(took)))
    for phase, (_, bound) in least[0].items():
        of = works[0][phase]
        columns = [at[phase][0] for at in least] + [took.get(phase, 0)] * bool(took)
        print(f"{phase:<24}{of.flop / 1e12:>9.3g}{of.nbytes / 1e9:>9.3g}{of.sent / 1e9:>9.3g}  "
              f"{bound:<9}" + "".join(f"{x:>18.3g} s" for x in columns))

    sums = [sum(seconds for seconds, _ in at.values()) for at in least]
    rows = {head: (x, x) for head, x in zip(heads, sums, strict=True)}
    largest = max(read for read, _ in numbers.values())
    if took:
        rows["measured"] = (sum(took.values()),) * 2
    elif largest > 3e9:
        still = sum(least[0][phase][0] for phase in moved)
        rows |= {f"range, {mean} tokens": tuple(x * (one - still) + still for x in PUBLISHED)
                 for mean, one in zip(means, sums, strict=True)}
    gigabytes = sum(read for read, _ in numbers.values()) * 2 / 1e9  # at the run's start
    print(f"\n{'':<24}{'an iteration':>24}{config['max_iters']:>17} iterations"
          + f"{'money':>20}" * bool(own["price"]))
    for head, both in rows.items():
        whole = [one * config["max_iters"] + gigabytes / DISK for one in both]
        money = [one / 3600 * config["world_size"] * own["price"] for one in whole]
        print(f"{head:<24}{span(both):>24}{span(whole):>28}"
              + f"{span(money, '{:.4g}'.format):>20}" * bool(own["price"]))
    print(f"\nAt its start the run reads {gigabytes:.3g} GB of models (a disk of {DISK} GB/s).\n"
          "The seconds of rules, as rewards, come on top.")
    if took and int(os.environ.get("WORLD_SIZE") or 1) < config["world_size"]:
        print("Measured without the links between ranks: type torchrun --nproc_per_node=N in front")
    if not took and largest <= 3e9:
        print("No range: below 3B parameters launching kernels takes longest (docs/scale.md):\n"
              "--measure on one card of the kind tells.")


def span(both, show=None):
    return " to ".join(dict.fromkeys(map(show or duration, both)))


def duration(seconds):
    sizes = (86400, "days"), (3600, "hours"), (60, "minutes"), (1, "s")
    size, unit = next((pair for pair in sizes if seconds >= 2 * pair[0]), sizes[-1])
    return f"{seconds / size:.3g} {unit}"


def read_command(argv):
    """(script, its configuration, OWN keys, number, name, card): see read_card."""
    own, rest = memory.take(
        ["--measure=True" if arg == "--measure" else arg for arg in argv], OWN)
    number, name, card = read_card(own["gpus"], own["card"])
    if not card and not own["measure"]:
        raise BadInput("a CPU has no datasheet here: type --measure, or --card=FILE")
    if card and own["measure"] and not torch.cuda.is_available():
        raise BadInput("--measure: torch sees no GPU here; leave it out, or type --gpus=1xcpu")
    given = dict(world_size=number) | (
        dict(gpu_gb=float(f"{card['gb'] * ROOM:.4g}")) if card else dict(device_type="cpu"))
    for arg in rest:
        key, _, value = arg.removeprefix("--").replace("-", "_").partition("=")
        if value != str(given.get(key, value)):
            raise BadInput(f"{arg}: --gpus={own['gpus']} means --{key}={given[key]}; "
                           "leave this out")
    return *memory.read_run(rest + typed(given)), own, number, name, card


def main(argv):
    script, config, own, number, name, card = read_command(argv)
    P, where = (own["prompt"], "--prompt") if own["prompt"] else prompt_length(script, config)
    longest = config["max_new_tokens"] if script in ("ppo", "grpo") else P
    if own["length"] > longest:
        raise BadInput(f"length = {own['length']}: the longest is {longest}")
    means = [own["length"]] if own["length"] else [longest, max(longest // 2, 1)]
    if int(os.environ.get("RANK") or 0) > 0:  # rank 0 counts, and prints
        return own["measure"] and measure.measure(script, config, P, means[0])  # COLLECTIVE
    print(f"{script}.py on {number} x {name}, {config['dtype']}, {config['batch_size']} rows an "
          f"iteration\nprompts of {P} tokens ({where}), responses of {means[0]}, the longest of "
          f"{longest}", flush=True)
    depths = work.depths_of(script, config)
    run = work.dry_run_by_lines(script, config, depths, [{}] + [
        work.one_row(script, P, mean) for mean in means])
    fits = memory.fitting(script, config, run[2])
    peaks = {key: peak for key, (peak, _) in run[2]()[1].items()}
    bad, _ = memory.verdict(script, config, peaks, fits)
    if bad:
        raise BadInput(f"{number} x {name} is too small: {'; '.join(bad)}")
    speed = speed_of(card, config)
    took = own["measure"] and measure.measure(script, config, P, means[0])  # COLLECTIVE
    report(script, config, own, card, P, means, run, speed, took)
    if fits:
        found = work.helpful(script, config, depths, run, P, means[0], speed)
        print("\nan iteration's limit with other keys, and as many rows as fit:" if found else
              "\nNeither rollout_batch_size, micro_batch_tokens, zero_stage nor head_chunk lowers "
              "the limit.")
        for saved, keys in found:
            print(f"{-saved:>+12.3g} s   {' '.join(typed(keys))}")


if __name__ == "__main__":
    if len(sys.argv) == 1 or {"--help", "-h"} & set(sys.argv):
        print(__doc__.strip())
        sys.exit()
    main(sys.argv[1:])

"""
What is written beside the weights of a finished model: run.json, which a run reads that goes on,
and a card, README.md, which hubs of models show first. And in a log: on what it was made.
"""
import contextlib
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path

import torch

from configurator import read_json, write_json, write_text
from errors import say

# settings of sampling by which each token keeps its probability; None and [] are such ones, too
NEUTRAL = dict(
    do_sample=True, top_k=0, top_p=1.0, min_p=0.0, typical_p=1.0, top_h=1.0, epsilon_cutoff=0.0,
    eta_cutoff=0.0, repetition_penalty=1.0, encoder_repetition_penalty=1.0, presence_penalty=0.0,
    frequency_penalty=0.0, no_repeat_ngram_size=0, encoder_no_repeat_ngram_size=0,
    bad_words_ids=None, suppress_tokens=None, begin_suppress_tokens=None, sequence_bias=None,
    forced_bos_token_id=None, forced_eos_token_id=None, exponential_decay_length_penalty=None,
    min_length=0, min_new_tokens=0, num_beams=1, penalty_alpha=0.0, guidance_scale=1.0,
    dola_layers=None, watermarking_config=None, stop_strings=None)


def made_on(device):
    """What a log's figures hang on beside its keys: the device, torch, quartet's commit."""
    name = platform.processor() or platform.machine()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        with contextlib.suppress(OSError, StopIteration), open(
                "/proc/cpuinfo", encoding="utf-8") as f:
            name = next(line.split(":")[1].strip() for line in f if line.startswith("model name"))
    commit = ""  # of a copy without git
    with contextlib.suppress(OSError):
        commit = subprocess.run(
            ["git", "-C", os.path.dirname(os.path.abspath(__file__)), "describe", "--always",
             "--dirty"], capture_output=True, text=True).stdout.strip()
    return {"run/device": name, "run/torch": torch.__version__, "run/commit": commit}


def write_card(out_dir, folder, base, about):
    """
    Write both into the folder of a model. base: the path from which it was loaded, "" for a model
    from scratch. about: the iteration, the figures of the evaluation of these weights, the keys
    that have changed (options/again.py), and save_dtype. Of a model that no run has saved: {}.
    """
    if "iteration" not in about:
        return
    figures = {name: x for name, x in about["figures"].items()
               if name.startswith("eval/") or name == "score"}  # which keep_best compares
    write_json(os.path.join(folder, "run.json"), about | dict(figures=figures))
    config = read_json(os.path.join(out_dir, "config.json"))
    script, name = config["script"], os.path.basename(folder).removeprefix(".tmp-")
    license_of_base = re.findall(r"^license: *\S+$", head_of(base), re.M)
    head = [f"tags: [quartet, {script.removesuffix('.py')}]", *license_of_base[:1]]
    if named := hub_name(base):
        head += [f"base_model: {json.dumps(named)}"]
    if os.path.isfile(os.path.join(folder, "adapter_config.json")):
        head += ["library_name: peft"]
    count = about["iteration"]
    text = [f"# {name}", "",
            f"Trained by `{script}` of quartet, {count} iteration{'s' * (count != 1)}, beginning "
            f"with `{base or 'scratch'}`:", "",
            f"    python {script} {shlex.join(sys.argv[1:])}", ""]
    for number, keys in about["changes"]:
        from options.again import FREE

        changed = [f"{key}={x!r}" for key, x in keys.items() if key not in FREE - {"max_iters"}]
        text += [f"From iteration {number} on: `{' '.join(changed)}`", ""] if changed else []
    figures = [f"    {key:<24} {x:.4g}" for key, x in figures.items()]
    text += [f"Evaluated at iteration {count}:", "", *figures, ""] if figures else []
    if said := not_as_trained(folder, config.get("temperature")):
        text += [f"{said}.", ""]
        if name == "policy":
            say(f"{os.path.join(out_dir, name)}: {said}")
    write_text(os.path.join(folder, "README.md"), "\n".join(["---", *head, "---", "", *text]))


def not_as_trained(folder, temperature):
    """
    What to tell of a folder's generation_config.json, by which others sample another policy than
    was trained at this temperature (None: of a script that samples nothing); "" where they do not.
    """
    file = os.path.join(folder, "generation_config.json")
    if temperature is None or not os.path.isfile(file):
        return ""
    trained = NEUTRAL | dict(temperature=temperature)
    odd = {name: x for name, x in read_json(file).items()
           if name in trained and x not in (None, [], {}, trained[name])}
    if not odd:
        return ""
    found, right = (", ".join(f"{name}={repr(x)[:60]}" for name, x in some.items()) for some in (
        odd, {name: trained[name] for name in ("do_sample", "temperature", "top_k", *odd)}))
    return (f"generation_config.json is still its publisher's, with {found}: vLLM and transformers "
            f"sample by it, but the run was trained without. As in training: {right}")


def head_of(folder):
    """The lines between --- at the head of a folder's card; "" where it has none."""
    card = Path(folder, "README.md")
    text = card.read_text("utf-8", "replace") if card.is_file() else ""
    return text.partition("---\n")[2].partition("---\n")[0]


def hub_name(path):
    """
    The name on the hub of the model from which one comes, or "". A folder has it in its card, if
    this is one of ours: others name another model there.
    """
    if os.path.isdir(path):
        head = head_of(path)
        found = re.search(r'^base_model: "?([^"\n]+)"?$', head, re.M)
        path = found[1] if found and "tags: [quartet, " in head else ""
    return path if re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", path) else ""

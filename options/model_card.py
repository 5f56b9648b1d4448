"""
A README.md in the folder of each model that a run leaves: what it is, where it comes from, by which
command, and its last evaluation. Hubs of models show it first.
"""
import json
import os
import re
import shlex
import sys

from configurator import open_new, read_json

RESULTS = "policy", "value_model", "reward_model", "ema_policy", "best_policy"


def write_cards(out_dir):
    """Write the cards of a finished run's models."""
    config = read_json(os.path.join(out_dir, "config.json"))
    for name in RESULTS:
        if os.path.isdir(os.path.join(out_dir, name)):
            with open_new(os.path.join(out_dir, name, "README.md")) as f:
                f.write(card(name, config, last_evaluation(out_dir)))


def last_evaluation(out_dir):
    """{metric: value} of the last held-out evaluation in log.jsonl; {} if there is none."""
    found = {}
    with open(os.path.join(out_dir, "log.jsonl"), encoding="utf-8") as f:
        for record in map(json.loads, f):
            found = {name: x for name, x in record.items() if name.startswith("eval/")} or found
    return found


def licence_of(base):
    """The licence that the card of a base model's folder names; "" if it names none."""
    file = os.path.join(base, "README.md")
    text = open(file, encoding="utf-8", errors="replace").read() if os.path.isfile(file) else ""
    found = re.search(r"\A---\n.*?^license: *(\S+)", text, re.DOTALL | re.MULTILINE)
    return found[1] if found else ""


def card(name, config, evaluation):
    """The text of a card."""
    base, script = config.get("policy_path") or config.get("init_from"), config["script"]
    lines = ["---", f"tags: [quartet, {script[:-3]}]"]
    if base != "scratch":
        lines.append(f"base_model: {json.dumps(base)}")
    if licence := licence_of(base):
        lines.append(f"license: {licence}")
    lines += ["---", f"# {name} of {os.path.basename(os.path.abspath(config['out_dir']))}", "",
              f"Trained by quartet's `{script}`, beginning with `{base}`:", "",
              f"    python {script} {shlex.join(sys.argv[1:])}".rstrip(), ""]
    if evaluation:
        lines += ["| the run's last evaluation | |", "|---|---|"]
        lines += [f"| {metric} | {x:.4g} |" for metric, x in evaluation.items()
                  if isinstance(x, (int, float))]
    return "\n".join(lines) + "\n"

"""
What is written beside the weights of a finished model: run.json, which a run reads that goes on,
and a card, README.md, which hubs of models show first.
"""
import contextlib
import json
import os
import re
import shlex
import sys

from configurator import read_json, write_json, write_text


def write_card(out_dir, folder, base, about):
    """
    Write both into the folder of a model: from which one it comes, by which command, and how it
    did. base: the path from which it was loaded, "" for a model from scratch. about: the iteration,
    the figures of the evaluation of these weights, the keys that have changed (options/again.py),
    and save_dtype. Of a model that no run has saved nothing is known.
    """
    if "iteration" not in about:
        return
    figures = {name: x for name, x in about["figures"].items()
               if name.startswith("eval/") or name == "score"}  # which keep_best compares
    write_json(os.path.join(folder, "run.json"), about | dict(figures=figures))
    config, name = read_json(os.path.join(out_dir, "config.json")), os.path.basename(folder)
    script, name = config["script"], name.removeprefix(".tmp-")
    named, license_of_base = hub_name(base), re.findall(r"^license: *\S+$", head_of(base), re.M)
    head = [f"tags: [quartet, {script.removesuffix('.py')}]", *license_of_base[:1]]
    head += [f"base_model: {json.dumps(named)}"] if named else []
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
    write_text(os.path.join(folder, "README.md"), "\n".join(["---", *head, "---", "", *text]))


def head_of(folder):
    """The lines between --- at the head of a folder's card; "" where it has none."""
    file = os.path.join(folder, "README.md")
    with contextlib.suppress(OSError):
        if os.path.isfile(file):  # of a pipe there is no end
            with open(file, encoding="utf-8", errors="replace") as f:
                return f.read(10**6).partition("---\n")[2].partition("---\n")[0]
    return ""


def hub_name(path):
    """
    The name on the hub of the model from which others come in the end; "" where it is not known. A
    folder has it in its card, if this card is one of ours: others name another model there.
    """
    for _ in range(20):  # a card may name its own folder
        if not os.path.isdir(path):
            return path if re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", path) else ""
        head = head_of(path)
        found = re.search(r'^base_model: "?([^"\n]+)"?$', head, re.M)
        path = found[1] if found and "tags: [quartet, " in head else ""
    return ""

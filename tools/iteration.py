"""
For explain.py: a run's script again, in a temporary folder, whose variables are looked at; and all
responses of an iteration, as a page. The script starts from the last checkpoint before that, or
from the beginning, with the keys that the run had then. Nothing is random but by name, so all
numbers are the run's own; they are compared with its log.
"""
import math
import os
import shutil
import signal
import sys
import tempfile

import torch

import ranks
from batches import texts_of
from checkpoint import list_checkpoints, iteration_of
from configurator import read_json, write_text
from errors import BadInput, visible
from gae import compute_gae
from load import autocast
from formulas import kl_estimate
from model import no_grad_forwards, response_logprobs
from options.again import keys_at
from run import Run
from tools.runs import (
    config_of, fill_page, read_records, refuse_code, run_script, texts_as_read)

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PAGE = os.path.join(ROOT, "tools", "iteration.html")  # without data


def show(run, iteration, out, trust_code):
    """Write the page of an iteration; -1: the one behind the last checkpoint."""
    if not out.endswith(".html"):
        raise BadInput(f"out = {out!r}: of a whole iteration there is a page: type --out=FILE.html")
    names, record, looks = replay(run, iteration, trust_code)
    os.makedirs(os.path.dirname(out) or ".", exist_ok=True)
    data = dict(run=run, script=names["config"]["script"], iteration=record["iteration"],
                responses=responses_of(names, *looks))
    write_text(out, fill_page(PAGE, f"{run}, iteration {record['iteration']}", data))
    print(visible(f"saved {out}: {len(data['responses'])} responses of iteration "
                  f"{record['iteration']}"))


def script_of(keys, file, trust_code):
    """
    The path of the script that a run's keys, in the config.json `file`, name. Raises BadInput where
    it is not that of a run of ppo.py or grpo.py, or code that is not trusted would run.
    """
    if "cliprange" not in keys:
        raise BadInput(f"{file} is not of a run of ppo.py or grpo.py; give the out_dir of one")
    refuse_code(keys, file, trust_code)
    name = str(keys.get("script"))  # of a fork another one, beside ppo.py
    if name not in ("ppo.py", "grpo.py") and not (
            trust_code and os.path.isfile(os.path.join(ROOT, name)) and "/" not in name):
        raise BadInput(f"{file} has script = {name!r}, which this would run; only a script that "
                       f"lies in {ROOT} can be run, and if you trust it: type --trust_code=True")
    return os.path.join(ROOT, name)


def replay(run, iteration, trust_code):
    """
    Run an iteration again: (the script's variables at its end, its record for the log, [what the
    policy reads before the update, and behind it]). Raises BadInput.
    """
    keys = config_of(run)
    script = script_of(keys, os.path.join(run, "config.json"), trust_code)
    checkpoints = {iteration_of(folder): folder for folder in list_checkpoints(run)}
    if iteration < 0:
        iteration = min(max(checkpoints, default=0), keys["max_iters"] - 1)
    if iteration >= keys["max_iters"]:
        raise BadInput(f"iteration = {iteration}: the run's are 0 to {keys['max_iters'] - 1}")
    first = max((number for number in checkpoints if number <= iteration), default=0)
    keys = keys_between(first, iteration, keys, checkpoints)
    refuse_code(keys, run, trust_code)
    names, looks, records = {}, [], []
    enter = Run.enter

    def enter_and_look(self, phase):
        if self.iteration == iteration and phase in ("update", "metrics"):
            looks.append(look(names))
        enter(self, phase)

    def log(self, record, *args, **more):
        if self.iteration == iteration:
            write_log(self, record, *args, **more)  # in the temporary folder
            records.append(self.record)
            sys.exit()

    write_log = Run.log
    print(f"computing iterations {first} to {iteration} again", flush=True)
    Run.enter, Run.log = enter_and_look, log
    run_again(script, keys_of_tool(keys), checkpoints.get(first), names)
    compare_with_log(run, records[0])
    return names, records[0], looks


def keys_between(first, last, newest, checkpoints):
    """
    The keys that a run had from iteration first to last. newest: those of its config.json, which
    are those of the iterations behind the last checkpoint. For earlier ones its state has the
    changes, see options/again.py. Raises BadInput where the keys have changed in between.
    """
    if last >= max(checkpoints, default=0):
        return newest
    folder = checkpoints[max(checkpoints)]
    changes = read_json(os.path.join(folder, "state.json")).get("run/changes", [])
    between = [number for number, _ in changes if first < number <= last]
    if between:
        raise BadInput(f"iteration = {last}: the run had other keys before iteration {between[-1]},"
                       f" whose checkpoint is gone; give one from {first} to {between[0] - 1}")
    return keys_at(read_json(os.path.join(folder, "config.json")), changes, first)


def keys_of_tool(keys):
    """The keys of a run without those by which it saves, evaluates and shares its work."""
    return {name: x for name, x in keys.items() if name not in ("token_ids", "script")} | dict(
        checkpoint_interval=0, report_to="", keep_best="", save_rollouts=0, eval_interval=10**9,
        epochs=0.0, roles="", generate_tp=1)  # the number of epochs is in max_iters


def run_again(script, keys, checkpoint, names):
    """
    Run a script with these keys, in a temporary folder, without a line, from another run's
    checkpoint; None: from the beginning. names: gets its variables.
    """
    ranks.on_signal = signal.default_int_handler  # Ctrl-C ends the tool: there is nothing to save
    with tempfile.TemporaryDirectory(prefix="explain-") as folder:
        if checkpoint:
            os.symlink(os.path.abspath(checkpoint), f"{folder}/{os.path.basename(checkpoint)}")
            shutil.copy(f"{checkpoint}/config.json", folder)
        # a file, because a text that is typed may lose quotes. It has a folder of its own, because
        # no run begins in a folder with code
        file, keys = f"{folder}/keys/keys.py", keys | dict(out_dir=folder)
        os.mkdir(os.path.dirname(file))
        write_text(file, "".join(f"{name} = {x!r}\n" for name, x in keys.items()))
        run_script(script, [file], names)


def compare_with_log(run, record):
    """Say where the figures of an iteration are not those of the run's log."""
    file = os.path.join(run, "log.jsonl")
    logged = [x for x in (read_records(file) if os.path.isfile(file) else [])
              if x["iteration"] == record["iteration"]]
    if not logged:
        return print(f"{file} has no such iteration to compare with")
    there = {name: x for name, x in logged[-1].items()
             if not name.startswith(("time/", "mem/", "run/", "eval/"))}
    odd = [f"{name} {record.get(name)}, there {x}" for name, x in there.items()
           if not is_same(record.get(name), x)]
    if not odd:
        return print(f"all {len(there)} figures are those of {file}")
    print(visible(f"warning: {len(odd)} of {len(there)} figures are not those of {file}: "
                  f"{'; '.join(odd[:5])}. Another machine, torch or number of ranks rounds "
                  "differently; else its models, data or scripts have changed since"))


def is_same(a, b):
    """Whether a value is that of a log, to nine digits; JSON has null for what is not finite."""
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-9)
    return a == b or b is None and isinstance(a, float) and not math.isfinite(a)


def look(names):
    """{logprobs, entropy}, (B, T) each: what the policy of now reads in the batch."""
    batch, device = names["batch"], names["device"]
    found = {name: torch.zeros_like(batch["sampler_logprobs"]) for name in ("logprobs", "entropy")}
    with no_grad_forwards([names["policy"]], device), autocast(names["system"], device):
        for mb in names["my_micro_batches"](batch, batch["index"]):
            read = response_logprobs(names["policy"], mb, names["temperature"],
                                     names["system"].head_chunk, True)
            for column, x in zip(found.values(), read, strict=True):
                column[mb["index"], :x.shape[1]] = x
    return found


def columns_of(names):
    """{name: (B, T)}: the numbers of each token in the variables of a script, see explain.py."""
    batch = names["batch"]
    policy, mask = batch["old_logprobs"], batch["response_mask"]
    columns = dict(policy=policy)
    if "ref_logprobs" in batch:
        ref = batch["ref_logprobs"]
        columns |= dict(ref=ref, KL=kl_estimate(policy, ref, names["kl_estimator"]))
    if "values" not in batch:
        return columns | dict(advantage=batch["advantages"])
    given = names["rewards"], batch["values"], mask, names["gamma"]
    delta, raw = (compute_gae(*given, lam)[0] for lam in (0.0, names["lam"]))
    return columns | dict(reward=names["rewards"], value=batch["values"], delta=delta, raw=raw,
                          white=batch["advantages"], ret=batch["returns"])


def responses_of(names, before, after):
    """A dict for each response: its texts, its score and how it came about, lists of its tokens."""
    batch, tokenizer = names["batch"], names["policy"].tokenizer
    mask, change = batch["response_mask"], after["logprobs"] - batch["old_logprobs"]
    columns = columns_of(names) | dict(
        change=change, ratio=change.exp(), entropy=before["entropy"])
    texts = texts_of(batch, names["train_rows"], tokenizer)
    made = []
    for i, (row, text) in enumerate(zip(texts["rows"], texts_as_read(texts), strict=True)):
        ids = batch["tokens"][i][mask[i]].tolist()
        made.append(dict(
            index=i, row=int(batch["row"][i]), prompt=texts["prompts"][i],
            answer=row.get("answer"), text=text, score=batch["scores"][i].item(),
            shaped=names["scores"][i].item(), finished=bool(batch["finished"][i]),
            sum=[[weight, name, batch[f"reward/{name}"][i].item()]
                 for weight, name, _ in names["terms"]],
            strings=[tokenizer.decode([token]) for token in ids],
            ends=[token in tokenizer.eos_ids for token in ids],
            columns={name: x[i][mask[i]].tolist() for name, x in columns.items()}))
    return made

"""
All responses of an iteration, token by token, as a page for a browser or as JSON; for explain.py:

python tools/explain.py --run=out/arithmetic_ppo --iteration=7 --out=out/seven.html
python tools/explain.py --run=out/arithmetic_ppo --out=out/live.html --watch=20     # the newest
python tools/explain.py --run=out/arithmetic_ppo --iteration=7 --out=out/seven.json

ppo.py or grpo.py runs again, from the last checkpoint before the iteration, or from the beginning,
with the keys that the run had then, in a temporary folder; and its variables are looked at. Nothing
is random but by name, so all numbers are the run's own; they are compared with its log. The JSON is
for UNIPO, a viewer (poloclub/unipo, docs/canonical_schema.json).
"""
import contextlib
import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import torch

import parallel
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
    config_file_of, config_of, fill_page, read_records, refuse_code, response_of)

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PAGE = os.path.join(ROOT, "tools", "iteration.html")  # without data


def show(run, iteration, out, watch, trust_code):
    """
    Write the page, or the JSON, of an iteration; -1: the one behind the last checkpoint. watch:
    again every so many seconds in which there is a new checkpoint, until Ctrl-C.
    """
    if not out.endswith((".html", ".json")):
        raise BadInput(f"out = {out!r}: of a whole iteration there is a page or JSON; type "
                       "--out=FILE.html")
    before = None
    while watch:  # in a process of its own: a script runs once in each
        newest = [iteration_of(folder) for folder in list_checkpoints(run)][-1:]
        if newest and newest != before:
            subprocess.run([sys.executable, os.path.join(ROOT, "tools", "explain.py"),
                            *(arg for arg in sys.argv[1:] if not arg.startswith("--watch"))],
                           check=False)
        before = newest
        time.sleep(watch)
    names, record, looks = replay(run, iteration, trust_code)
    os.makedirs(os.path.dirname(out) or ".", exist_ok=True)
    responses = responses_of(names, *looks)
    if out.endswith(".html"):
        text = fill_page(PAGE, f"{run}, iteration {record['iteration']}", dict(
            run=run, script=names["config"]["script"], responses=responses,
            iteration=record["iteration"]))
    else:
        text = json.dumps(for_unipo(names, record, responses), allow_nan=False)
    write_text(out, text)
    print(visible(f"saved {out}: {len(responses)} responses of iteration {record['iteration']}"))


def replay(run, iteration, trust_code):
    """
    Run an iteration again: (the script's variables at its end, its record for the log, [what the
    policy reads before the update, and behind it]). Raises BadInput.
    """
    file = os.path.join(run, "config.json")
    keys = config_of(run)
    if "cliprange" not in keys:
        raise BadInput(f"run {run!r} is no run of ppo.py or grpo.py")
    refuse_code(keys, file, trust_code)
    name = str(keys.get("script"))  # of a fork another one, beside ppo.py
    if name not in ("ppo.py", "grpo.py") and not (
            trust_code and os.path.isfile(os.path.join(ROOT, name)) and "/" not in name):
        raise BadInput(f"{file} has script = {name!r}, which this would run; only a script that "
                       f"lies in {ROOT} can be run, and if you trust it: type --trust_code=True")
    checkpoints = {iteration_of(folder): folder for folder in list_checkpoints(run)}
    if iteration < 0:
        iteration = min(max(checkpoints, default=0), keys["max_iters"] - 1)
    if iteration >= keys["max_iters"]:
        raise BadInput(f"iteration = {iteration}: the run's are 0 to {keys['max_iters'] - 1}")
    first = max((number for number in checkpoints if number <= iteration), default=0)
    parts = {number: keys_of_tool(part) for number, part in
             keys_by_iteration(run, keys, checkpoints, first, iteration, trust_code).items()}
    script, keys = os.path.join(ROOT, keys["script"]), parts[max(parts)]
    names, looks, records = {"__name__": "__main__", "__file__": script}, [], []
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
    ranks.on_signal = signal.default_int_handler  # Ctrl-C ends the tool: there is nothing to save
    with tempfile.TemporaryDirectory(prefix="explain-") as folder:
        print(f"computing iterations {first} to {iteration} again", flush=True)
        if first in checkpoints:
            start = checkpoints[first]
            os.symlink(os.path.abspath(start), os.path.join(folder, os.path.basename(start)))
            shutil.copy(f"{start}/config.json", folder)
        numbers = sorted(parts)
        for number, until in zip(numbers, numbers[1:], strict=False):
            run_until(script, parts[number], until, folder)
        Run.enter, Run.log = enter_and_look, log
        run_script(script, keys, folder, names)
    compare_with_log(run, records[0])
    return names, records[0], looks


def keys_by_iteration(run, newest, checkpoints, first, last, trust_code):
    """
    {iteration: the keys that the run had from there on}, from first to last. newest: those of its
    config.json, which are those of the iterations behind the last checkpoint. For earlier ones its
    state has the changes, see options/again.py. Raises BadInput.
    """
    if last >= max(checkpoints, default=0):
        return {first: newest}
    folder = checkpoints[max(checkpoints)]
    keys = read_json(os.path.join(folder, "config.json"))
    changes = read_json(os.path.join(folder, "state.json")).get("run/changes", [])
    numbers = {first, *(number for number, _ in changes if first < number <= last)}
    parts = {number: keys_at(keys, changes, number) for number in numbers}
    for part in parts.values():
        refuse_code(part, folder, trust_code)
    return parts


def keys_of_tool(keys):
    """The keys of a run without those by which it saves, evaluates and shares its work."""
    return {name: x for name, x in keys.items() if name not in ("token_ids", "script")} | dict(
        checkpoint_interval=0, report_to="", keep_best="", save_rollouts=0, eval_interval=10**9,
        epochs=0.0, roles="", generate_tp=1)  # the number of epochs is in max_iters


def run_until(script, keys, until, folder):
    """A script with the keys it had before others came, saved in folder before that iteration."""
    child = os.fork()  # a script runs once in each process
    if child:
        if status := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            sys.exit(status)
        return
    leave = Run.leave_if_stop_asked

    def leave_there(self):
        if self.iteration == until:
            parallel.stop_agreed = lambda: True
        leave(self)

    def log(self, *_, **__):
        if self.iteration == until:  # the end of a run that was made longer later; it is saved
            sys.exit()

    Run.leave_if_stop_asked, Run.log = leave_there, log
    try:
        run_script(script, keys, folder, {"__name__": "__main__", "__file__": script})
        os._exit(0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(2)


def run_script(script, keys, folder, names):
    """Run ppo.py or grpo.py with these keys, in a folder. names: gets its variables."""
    argv, sys.argv[1:] = sys.argv[1:], [config_file_of(keys | dict(out_dir=folder), folder)]
    with open(script, encoding="utf-8-sig") as f:
        code = compile(f.read(), script, "exec")
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        exec(code, names)
    sys.argv[1:] = argv


def compare_with_log(run, record):
    """Say where the figures of an iteration are not those of the run's log."""
    file = os.path.join(run, "log.jsonl")
    logged = [x for x in (read_records(file) if os.path.isfile(file) else [])
              if x["iteration"] == record["iteration"]]
    if not logged:
        return print(f"{file} has no such iteration to compare with")
    compared = {name: (record.get(name), x) for name, x in logged[-1].items()
                if not name.startswith(("time/", "mem/", "eval/"))}
    odd = {name: (a, b) for name, (a, b) in compared.items() if not is_same(a, b)}
    if not odd:
        return print(f"all {len(compared)} figures are those of {file}")
    some = [f"{name} {shown(a)}, there {shown(b)}" for name, (a, b) in list(odd.items())[:5]]
    some += ["..."] * (len(odd) > 5)
    print(visible(f"warning: {len(odd)} of {len(compared)} figures are not those of {file}: "
                  f"{'; '.join(some)}. Another machine, torch or number of ranks rounds "
                  "differently; else its models, data or scripts have changed since"))


def is_same(a, b):
    """Whether two values of a log are the same to its digits; JSON has null for NaN."""
    if isinstance(a, float) and not math.isfinite(a):
        a = None
    if all(isinstance(x, (int, float)) for x in (a, b)):
        return abs(a - b) <= 1e-9 * max(abs(a), abs(b))
    return a == b


def shown(x):
    return f"{x:.6g}" if isinstance(x, (int, float)) else str(x)


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


def responses_of(names, before, after):
    """A dict for each response: its texts, its score and how it came about, lists of its tokens."""
    batch, tokenizer, terms = names["batch"], names["policy"].tokenizer, names["terms"]
    mask, old = batch["response_mask"], batch["old_logprobs"]
    columns = {"log-prob": old, "change": after["logprobs"] - old,
               "ratio": (after["logprobs"] - old).exp(), "entropy": before["entropy"],
               "advantage": batch["advantages"]}
    if "ref_logprobs" in batch:
        columns |= {"ref": batch["ref_logprobs"],
                    "KL": kl_estimate(old, batch["ref_logprobs"], names["kl_estimator"])}
    if "values" in batch:
        given = names["rewards"], batch["values"], mask, names["gamma"]
        columns |= {"value": batch["values"], "reward": names["rewards"],
                    "return": batch["returns"], "raw": compute_gae(*given, names["lam"])[0]}
    texts = texts_of(batch, names["train_rows"], tokenizer)
    numbers = {name: x.tolist() for name, x in columns.items()}
    made = []
    for i, (row, sampled) in enumerate(zip(texts["rows"], mask.tolist(), strict=True)):
        own = [t for t, is_sampled in enumerate(sampled) if is_sampled]
        ids = batch["tokens"][i][mask[i]].tolist()
        said = dict(text=texts["completions"][i])
        if "dialogues" in texts:
            said["messages"] = texts["dialogues"][i]
        made.append(dict(
            index=i, row=int(batch["row"][i]), prompt=texts["prompts"][i],
            answer=row.get("answer"), text=response_of(said), score=batch["scores"][i].item(),
            shaped=names["scores"][i].item(), finished=bool(batch["finished"][i]),
            sum=[[weight, name, batch[f"reward/{name}"][i].item()] for weight, name, _ in terms],
            ids=ids, strings=[tokenizer.decode([token]) for token in ids],
            ends=[token in tokenizer.eos_ids for token in ids],
            columns={name: [rows[i][t] for t in own] for name, rows in numbers.items()}))
    for response in made:  # JSON has no NaN: a reward that does not apply
        for place in [response, *response["sum"]]:
            for key, x in place.items() if isinstance(place, dict) else enumerate(place):
                if isinstance(x, float) and x != x:
                    place[key] = None
    return made


def for_unipo(names, record, responses):
    """The iteration in the form of docs/canonical_schema.json of poloclub/unipo."""
    config, groups = names["config"], {}
    theirs = {"ref": "ref_log_probs", "KL": "token_kl", "value": "values", "return": "returns",
              "advantage": "advantages", "log-prob": "old_log_probs", "reward": "rewards"}
    metrics = {name: x for name, x in record.items() if isinstance(x, (int, float))}
    for one in responses:
        columns = one["columns"]
        tokens = dict(ids=one["ids"], strings=one["strings"], log_probs=[
            a + b for a, b in zip(columns["log-prob"], columns["change"], strict=True)])
        tokens |= {theirs[name]: x for name, x in columns.items() if name in theirs}
        group = groups.setdefault(one["row"], dict(prompt=one["prompt"], responses=[]))
        group["responses"].append(dict(
            id=f"step{record['iteration']}_p{one['row']}_sample{len(group['responses'])}",
            reward=one["score"], response_text=one["text"], response_length=len(one["ids"]),
            advantage=sum(columns["advantage"]) / max(len(one["ids"]), 1), tokens=tokens))
    return dict(
        header=dict(task=config["prompts_path"], dataset=config["prompts_path"],
                    reward_strategy=config["reward_functions"], algorithm=config["script"][:-3],
                    totalSteps=config["max_iters"], model_name=config["policy_path"],
                    reference_model_name=config["ref_path"] or config["policy_path"],
                    hparams=config),
        entries=[dict(step=record["iteration"], is_first_step_after_rollout_phase=True,
                      metrics=metrics | dict(policy_objective=-record["loss/policy"],
                                             reward=record["objective/scores"]),
                      prompts=list(groups.values()))])

"""
One response under the microscope: every number of a PPO or GRPO iteration, token by token;
docs/algorithms.md explains one.

python tools/explain.py --run=out/arithmetic_ppo --prompt="123+456="
python tools/explain.py --run=out/arithmetic_grpo --prompt="123+456=" --answer=579 --out=out/a.png

Nothing is computed by a copy of the algorithm. The tool runs ppo.py or grpo.py itself for one more
iteration, from the run's last checkpoint and with the run's keys, and looks at the variables that
the script then has. The prompt takes the first place of the iteration's batch; the others are the
run's own. At the end the script goes over the batch once more without taking a step: what it then
computes is the loss as one more step would see it. All this happens in a temporary folder.

    policy, reference, new   log-probs; new: after the update
    delta, raw, whitened     the advantage: of one token, of all later ones, and whitened
    ret                      the return, raw + value
    ratio, clipped, loss     exp(new - policy); whether the clip has taken the gradient away; and
                             the loss of one more step
"""
import contextlib
import io
import os
import shlex
import signal
import sys
import tempfile

# Python looks for modules in this file's folder, tools/; ours are in the folder above it.
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

import before_torch  # noqa: E402, F401, before torch: it notes which CPUs this process may use

import launch  # noqa: E402
import prompts  # noqa: E402
import report  # noqa: E402
import rollout  # noqa: E402
import run_folder  # noqa: E402
from checkpoint import find_checkpoint  # noqa: E402
from configurator import configure  # noqa: E402
from errors import BadConfig, BadInput  # noqa: E402
from folders import read_json  # noqa: E402
from gae import compute_gae  # noqa: E402
from loss import kl_estimate  # noqa: E402
from rewards import NEEDS, check_rows  # noqa: E402
from rows import check_text  # noqa: E402
from run import Run  # noqa: E402
from tools.curves import check_picture, empty_picture, save_picture  # noqa: E402


# --------------------------------------------------------------------------------------------------
run = "out/arithmetic_ppo"  # the folder of a run of ppo.py or grpo.py that has a checkpoint
prompt = "123+456="  # what the policy is asked
answer = ""  # the right answer, where a reward needs it; empty = that of the run's data
seed = 1  # decides the response: another seed, another response [>= 0]
reward_functions = ""  # empty = the run's; where these are code of its own, you must name them here
environment = ""  # as reward_functions
tools = ""  # as reward_functions
out = ""  # the picture, a PNG of the last 64 tokens; empty = only the table
config, _ = configure(globals())
# --------------------------------------------------------------------------------------------------
# the run: its script, its keys, its last checkpoint

if not prompt.strip():
    raise BadConfig('prompt is empty; type --prompt="123+456="')
check_text(prompt, "command line: the prompt")
if out:
    check_picture(out)
checkpoint, state = find_checkpoint(run) if os.path.isdir(run) else (None, None)
file = os.path.join(checkpoint or "", "config.json")
keys = read_json(file) if checkpoint else {}
if "cliprange" not in keys:
    raise BadInput(f"run {run!r} has no checkpoint of ppo.py or grpo.py; give the out_dir of a run "
                   "that has saved one")
# of the files that the run began with, of its machine; and nothing is reported to others
others = "sha256", "gpu", "format", "command", "commit"
keys = {name: x for name, x in keys.items() if name not in others} | {"report_to": ""}
for key in ("reward_functions", "environment", "tools"):
    files = run_folder.code_files({key: keys[key]})
    if files and not config[key]:  # the folder may be somebody else's
        raise BadInput(f"{file} names code, {', '.join(files)}, which runs only where you name it; "
                       f"type --{key}={shlex.quote(keys[key])}")
    keys[key] = config[key] or keys[key]
iteration = state["iteration"]
script, passes = ("grpo", "num_iterations") if "group_size" in keys else ("ppo", "ppo_epochs")
steps = keys[passes]  # so many passes train; one more looks
keys |= {passes: steps + 1, "checkpoint_interval": 0, "epochs": 0.0,
         "eval_interval": max(keys["max_iters"], iteration) + 2}  # no evaluation
if script == "grpo":
    keys["max_refills"] = 0  # the group stays, even if all its scores are equal
if iteration >= keys["max_iters"]:  # the run is over: its learning rate would be 0
    keys |= {name: "constant" for name in ("lr_decay", "value_lr_decay") if name in keys}
    keys["max_iters"] = iteration + 1
    print("the run is over: this update has the peak learning rate")

# --------------------------------------------------------------------------------------------------
# one more iteration of it, with a few functions of the house changed

names = {"__name__": "__main__", "__file__": os.path.join(ROOT, f"{script}.py")}  # its variables
seen = {}  # column -> (n,): what the script adds up of the first response, in its last pass
encode, noise, add_up = prompts.encode_for_all, rollout.response_uniforms, report.add_up
take_step = Run.step


def encode_with_the_prompt(rows, path, *rest):
    """encode_for_all, where the prompt takes the place of the batch's first row."""
    ids = encode(rows, path, *rest)  # rows that are too long may be dropped here
    if path == keys["prompts_path"]:
        count = keys["batch_size"] // keys.get("group_size", 1)
        first = prompts.batch_rows(keys["seed"], iteration, count, rows.mix)[0]
        chat = rows[0]["prompt"] if isinstance(rows[0]["prompt"], list) else None
        system = [message for message in chat or [] if message["role"] == "system"]
        row = {"prompt": [*system, {"role": "user", "content": prompt}] if chat else prompt}
        for known in (*rows, *names["eval_rows"]):  # a row of the data, with all its fields
            if prompts.prompt_text(known) == prompt:
                row = known
        rows[first] = row | ({"answer": answer} if answer else {})
        needs = {field for _, name, _ in names["terms"] for field in NEEDS.get(name, ())}
        if needs - row.keys() == {"answer"} and not answer:
            raise BadInput(f"the run's data does not have the prompt {prompt!r}, and so no answer "
                           "to it, which a reward of the run needs; type --answer=ANSWER")
        check_rows(names["terms"], [rows[first]], f"prompt {prompt!r} with --answer={answer!r}")
        ids[first], = encode([rows[first]], f"prompt {prompt!r}", *rest[:-1], "error")
    return ids


def add_up_and_look(sums, mask, columns):
    """report.add_up, where the losses of the first response are kept."""
    if "loss/policy" in columns and 0 in names["mb"]["index"]:
        row = names["mb"]["index"].tolist().index(0)
        kept = dict(new=names["logprobs"], ratio=names["ratio"],
                    clipped=columns["policy/clipfrac"], loss=columns["loss/policy"])
        seen.update({name: x.detach()[row][mask[row]] for name, x in kept.items()})
    add_up(sums, mask, columns)


def step(*args):
    """Run.step, but no step in the pass that only looks."""
    return take_step(*args) if names["epoch"] < steps else {}


def end(*_, **__):
    """Run.log, where the script ends: the iteration is over."""
    sys.exit()


prompts.encode_for_all, report.add_up, Run.step = encode_with_the_prompt, add_up_and_look, step
# the run's own seed decides which prompts are in the batch; the noise may have another
rollout.response_uniforms = lambda _, *rest: noise(seed, *rest)
Run.log = end
launch.on_signal = signal.default_int_handler  # Ctrl-C ends the tool: there is nothing to save
run_folder.hash_of_ids = lambda _: None  # the prompts are the run's but for the one asked about

with tempfile.TemporaryDirectory(prefix="explain-") as folder:
    os.symlink(os.path.abspath(checkpoint), os.path.join(folder, os.path.basename(checkpoint)))
    keys["out_dir"] = folder
    sys.argv = [f"{script}.py", *(f"--{key}={value}" for key, value in keys.items())]
    with open(names["__file__"], encoding="utf-8") as f:
        code = compile(f.read(), names["__file__"], "exec")
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        exec(code, names)

# --------------------------------------------------------------------------------------------------
# the table: the first response in the script's variables

batch, tokenizer, mask = names["batch"], names["tokenizer"], names["batch"]["response_mask"]
responses = batch["tokens"][:, -mask.shape[1]:]  # (B, R)
asked = [(names["train_rows"][i], ()) for i in batch["prompt"].tolist()]
texts = rollout.texts_of(asked, batch, tokenizer)
texts = [report.answer_of(dict(messages=messages)) for messages in texts["dialogues"]] \
    if "dialogues" in texts else texts["completions"]
tensors = dict(policy=batch["old_logprobs"])  # column -> (B, R)
if "ref_logprobs" in batch:
    tensors["reference"] = batch["ref_logprobs"]
    tensors["KL"] = kl_estimate(batch["old_logprobs"], batch["ref_logprobs"],
                                names["kl_estimator"])
if script == "ppo":
    given = names["rewards"], batch["values"], mask, names["gamma"]
    tensors |= dict(reward=names["rewards"], value=batch["values"],
                    delta=compute_gae(*given, 0.0)[0], raw=compute_gae(*given, names["lam"])[0],
                    whitened=batch["advantages"], ret=batch["returns"])
else:
    tensors["advantage"] = batch["advantages"]
ids = responses[0][mask[0]].tolist()
columns = {"#": list(range(1, len(ids) + 1)),
           "token": ["EOS" if i in tokenizer.eos_ids else ascii(tokenizer.decode([i]))
                     for i in ids]}
columns |= {name: tensor[0][mask[0]].tolist() for name, tensor in tensors.items()}
# grpo.py makes no step where all advantages are 0: then nothing was seen
columns |= {name: x.tolist() for name, x in seen.items()}


def cell(x, digits=3):
    """What the table shows of a number, a truth or a text; z: there is no -0.000."""
    if isinstance(x, bool):
        return "yes" if x else "no"
    return f"{x:z.{digits}f}" if isinstance(x, float) else str(x)


def print_table(columns):
    """{name: values}: names above, text on the left, numbers on the right."""
    lines = [[] for _ in range(len(columns["#"]) + 1)]
    for name, values in columns.items():
        cells = [name, *(cell(x, 4 if name in ("KL", "reward") else 3) for x in values)]
        width = max(map(len, cells))
        left = name in ("token", "response")
        for line, text in zip(lines, cells, strict=True):
            line.append(text.ljust(width) if left else text.rjust(width))
    print("\n".join(" ".join(line).rstrip() for line in lines))


score = batch["scores"][0].item()
parts = [f"{weight:g} * {name} {cell(batch[f'reward/{name}'][0].item())}"
         for weight, name, _ in names["terms"]]
print(f"one response of {run}: iteration {iteration} of {script}.py, from "
      f"{os.path.basename(checkpoint)}\n\nprompt    {prompt!r}\nresponse  {texts[0]!r}")
print(f"score     {cell(score)} = {' + '.join(parts)}"
      + ("" if batch["finished"][0] else "; cut off at max_new_tokens"))
print(f"shaped    {cell(names['scores'][0].item())}, after what the keys make of a score\n")
if script == "grpo":
    size = keys["group_size"]
    print_table({
        "#": list(range(1, size + 1)), "score": names["scores"][:size].tolist(),
        "advantage": batch["advantages"][:size, 0].tolist(),
        "tokens": mask[:size].sum(1).tolist(),
        "response": [text if len(text) <= 80 else f"{text[:78]}.."
                     for text in map(repr, texts[:size])]})
    print()
print_table(columns)

# --------------------------------------------------------------------------------------------------
# the picture: one panel above the other, all over the same tokens

if out:
    columns = {name: cells[-64:] for name, cells in columns.items()}
    groups = (("policy", "reference", "new"), ("KL", "reward"), ("value", "ret"),
              ("delta", "raw", "whitened", "advantage"), ("ratio", "loss"))
    panels = [[name for name in group if name in columns] for group in groups]
    panels = [panel for panel in panels if panel]
    x = range(len(columns["token"]))
    figure, axes = empty_picture(len(panels), 1, 12.8, 1.5, sharex=True)
    for axis, panel in zip(axes[:, 0], panels, strict=True):
        for name, style in zip(panel, ("o-", "s--", "^:"), strict=False):
            if name in ("KL", "reward", "delta"):
                axis.bar(x, columns[name], width=0.4, alpha=0.6, label=name)
            else:
                axis.plot(x, columns[name], style, markersize=4, label=name)
        if "ratio" in panel:
            clipped = [i for i in x if columns["clipped"][i]]
            axis.plot(clipped, [columns["ratio"][i] for i in clipped], "o", color="C3",
                      markersize=8, label="clipped")
        axis.legend(fontsize=9, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.05))
    # parse_math=False: a $ in a text is a dollar
    axes[-1, 0].set_xticks(x, columns["token"], rotation=90, parse_math=False, fontsize=8,
                           family="monospace")
    figure.suptitle(f"{prompt!r} -> {texts[0]!r}, score {score:.2f}"[:110], fontsize=12,
                    parse_math=False)
    save_picture(figure, axes, out)
    print(f"\nsaved {out}")

"""
One response under the microscope: every number of a PPO or GRPO iteration, token by token.

python tools/explain.py --run=out/arithmetic_ppo --prompt="123+456="
python tools/explain.py --run=out/arithmetic_grpo --prompt="123+456=" --out=out/explain.png

It asks a run's policy this prompt, and prints what becomes of the response: log-probs, KL, rewards,
values and advantages of its tokens, and ratio and loss of each after one update. With --out the
same is drawn.

Nothing is computed by a copy of the algorithm. The tool runs ppo.py or grpo.py itself for one more
iteration, from the run's last checkpoint and with the run's keys, and looks at the variables that
the script then has. The prompt takes the first place of the iteration's batch; the others are the
run's own. At the end the script goes over the batch once more without taking a step: what it then
computes is the loss as one more step would see it. All this happens in a temporary folder.
"""
import contextlib
import io
import os
import signal
import sys
import tempfile

# Python looks for modules in this file's folder, tools/; ours are in the folder above it.
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

import engine  # noqa: E402, F401, before torch: it notes which CPUs this process may use

import data  # noqa: E402
import engine.optimizers  # noqa: E402
import rollout  # noqa: E402
from configurator import configure  # noqa: E402
from data import batch_rows, prompt_text  # noqa: E402
from engine import launch, report, run_folder  # noqa: E402
from engine.checkpoint import find_checkpoint  # noqa: E402
from engine.curves import check_picture, empty_picture, save_picture  # noqa: E402
from engine.reward_mix import NEEDS  # noqa: E402
from engine.run import Run  # noqa: E402
from errors import BadConfig, BadInput  # noqa: E402
from folders import read_json  # noqa: E402
from gae import compute_gae  # noqa: E402
from loss import kl_estimate  # noqa: E402
from rewards import reward_terms  # noqa: E402
from rows import check_text, prompt_row, read_rows  # noqa: E402


# --------------------------------------------------------------------------------------------------
run = "out/arithmetic_ppo"  # the folder of a run of ppo.py or grpo.py that has a checkpoint
prompt = "123+456="  # what the policy is asked
answer = ""  # the right answer, where a reward needs it; empty = that of the run's data
seed = 1  # decides the response: another seed, another response [>= 0]
out = ""  # the picture, a PNG; empty = only the table
config, _ = configure(globals())
# --------------------------------------------------------------------------------------------------
LONGEST = 64  # tokens in the picture: the last ones of a longer response

# where a column of the table comes from
FORMULAS = dict(
    policy="loss.py: log of the token's probability under the policy that sampled it",
    reference="loss.py: the same under the reference, which no update changes",
    KL="loss.py: kl_estimate of the two, by the key kl_estimator",
    reward="ppo.py: -kl_coef * KL; with the last token comes the score",
    value="loss.py: what the value model expects of this token and all that follow",
    delta="gae.py: reward + gamma * value of the next token - value",
    raw="gae.py: delta + gamma * lam * raw advantage of the next token",
    whitened="loss.py: raw, with mean 0 and deviation 1 over all tokens of the batch",
    advantage="relatives.py: the score against those of its group, for all tokens",
    ret="gae.py: raw + value; what the value is trained towards",
    new="the token's log-prob after all steps of the update",
    ratio="exp(new - policy), the script's own: how much likelier the token is now",
    clipped="the clip has taken the token's gradient away",
    loss="the script's own loss of the token, as one more step would see it")


# --------------------------------------------------------------------------------------------------
# one more iteration of the run


class Enough(Exception):
    """Raised by the script's call of run.log: the iteration is over."""


def read_run():
    """
    (script, keys, checkpoint, iteration) of the run: "ppo" or "grpo", its keys, the folder of its
    last checkpoint, and how many iterations that one has done. Raises BadInput.
    """
    checkpoint, state = find_checkpoint(run) if os.path.isdir(run) else (None, None)
    if checkpoint is None:
        raise BadInput(f"run {run!r} has no checkpoint; give the out_dir of a run of ppo.py or "
                       "grpo.py that has saved one")
    keys = read_json(os.path.join(checkpoint, "config.json"))
    if "cliprange" not in keys:
        raise BadInput(f"run {run!r} is a run of sft.py or rm.py, which sample no responses; give "
                       "one of ppo.py or grpo.py")
    keys.pop("sha256", None)  # of the files that the run began with
    return "grpo" if "group_size" in keys else "ppo", keys, checkpoint, state["iteration"]


def asked_row(rows, keys):
    """
    The data row of the prompt. A prompt of the run's data has that row, with all its fields;
    another one is written as the prompts of `rows` are: as text, or as a chat message. Raises
    BadInput where a reward of the run needs a field that the row does not have.
    """
    held_out = keys["eval_path"] and read_rows(keys["eval_path"], prompt_row, keys["fields"])
    row = next((row for row in [*rows, *held_out] if prompt_text(row) == prompt), None)
    if row is None:
        row = {"prompt": prompt}
        if not isinstance(rows[0]["prompt"], str):
            system = [message for message in rows[0]["prompt"] if message["role"] == "system"]
            row = {"prompt": [*system, {"role": "user", "content": prompt}]}
    row = row | {"answer": answer} if answer else row
    for _, name, _ in reward_terms(keys["reward_functions"]):
        for field in NEEDS.get(name, ()):
            if row.get(field) is None:
                raise BadInput(f"prompt {prompt!r}: the run's reward {name!r} needs its {field!r}; "
                               "give a prompt of the run's data"
                               + (", or --answer=..." if field == "answer" else ""))
    return row


def one_more_iteration(script, keys, checkpoint, iteration):
    """
    Run the script for one iteration in a temporary folder. Returns its variables, {name: value}, as
    they are then, and the losses of its last pass, {name: (R,)}, of the first response.
    """
    passes = "ppo_epochs" if script == "ppo" else "num_iterations"
    steps = keys[passes]  # so many passes train; one more looks
    never = max(keys["max_iters"], iteration) + 2
    keys |= {passes: steps + 1, "checkpoint_interval": 0, "eval_interval": never, "eval_size": 1,
             "epochs": 0.0, "target_kl": 0.0}
    if script == "grpo":
        keys["max_refills"] = 0  # the group stays, even if all its scores are equal
    if iteration >= keys["max_iters"]:  # the run is over: its learning rate would be 0
        keys |= {name: "constant" for name in ("lr_decay", "value_lr_decay") if name in keys}
        keys["max_iters"] = iteration + 1
        print("the run is over: this update has the peak learning rate")
    names, losses = {"__name__": "__main__"}, {}
    encode, noise, add_up = data.encode_for_all, rollout.response_uniforms, report.add_up
    take_step = engine.optimizers.step

    def with_the_prompt(rows, path, *rest):
        ids = encode(rows, path, *rest)  # rows that are too long may be dropped here
        if path == keys["prompts_path"]:
            count = keys["batch_size"] // keys.get("group_size", 1)
            first = batch_rows(keys["seed"], iteration, count, rows.mix)[0]
            rows[first] = asked_row(rows, keys)
            how = "cut" if keys["too_long"] == "cut" else "error"
            ids[first], = encode([rows[first]], f"prompt {prompt!r}", *rest[:-1], how)
        return ids

    def look(sums, mask, columns):
        """What the script adds up of each micro-batch: that of the first response is kept."""
        if "loss/policy" in columns and 0 in names["mb"]["index"]:
            row = names["mb"]["index"].tolist().index(0)
            kept = columns | dict(new=names["logprobs"], ratio=names["ratio"])
            losses.update({name: x.detach()[row][mask[row]] for name, x in kept.items()})
        add_up(sums, mask, columns)

    def step(*args):
        if names["epoch"] < steps:
            take_step(*args)

    def end_of_iteration(*_, **__):
        raise Enough

    # the run's own seed decides which prompts are in the batch; the noise may have another
    rollout.response_uniforms = lambda _, *rest: noise(seed, *rest)
    data.encode_for_all, report.add_up, engine.optimizers.step = with_the_prompt, look, step
    Run.log = end_of_iteration
    run_folder.hash_of_ids = lambda _: None  # the prompts are the run's but for the one asked about
    launch.on_signal = signal.default_int_handler  # Ctrl-C ends the tool: there is nothing to save

    with tempfile.TemporaryDirectory(prefix="explain-") as parent:
        folder = os.path.join(parent, "run")
        os.mkdir(folder)
        os.symlink(os.path.abspath(checkpoint), os.path.join(folder, os.path.basename(checkpoint)))
        names["__file__"] = os.path.join(ROOT, f"{script}.py")
        keys["out_dir"] = folder
        sys.argv = [f"{script}.py", *(f"--{key}={value}" for key, value in keys.items())]
        with open(names["__file__"], encoding="utf-8") as f:
            code = compile(f.read(), names["__file__"], "exec")
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                exec(code, names)
        except Enough:
            return names, losses
        except BadInput as e:  # in words of what the user has typed
            raise BadInput(str(e).replace(folder, run)) from e
    raise RuntimeError(f"{script}.py has ended without calling run.log")


# --------------------------------------------------------------------------------------------------
# what the script's variables say of the first response


def token_text(i, tokenizer):
    """A token's text between quotes, in ASCII so that columns stay columns; EOS as EOS."""
    text = "EOS" if i in tokenizer.eos_ids else ascii(tokenizer.decode([i]))
    return text if len(text) <= 10 else f"{text[:8]}.."


def columns_of(script, names, losses):
    """{column: list, of the n tokens of the first response}."""
    batch, mask = names["batch"], names["batch"]["response_mask"]
    tensors = dict(policy=batch["old_logprobs"])  # (B, R) each
    if "ref_logprobs" in batch:
        tensors |= dict(reference=batch["ref_logprobs"], KL=kl_estimate(
            batch["old_logprobs"], batch["ref_logprobs"], names["kl_estimator"]))
    if script == "ppo":
        given = names["rewards"], batch["values"], mask, names["gamma"]
        tensors |= dict(reward=names["rewards"], value=batch["values"],
                        delta=compute_gae(*given, 0.0)[0], raw=compute_gae(*given, names["lam"])[0],
                        whitened=batch["advantages"], ret=batch["returns"])
    else:
        tensors["advantage"] = batch["advantages"]
    columns = {name: tensor[0][mask[0]].tolist() for name, tensor in tensors.items()}
    ids = batch["tokens"][0, -mask.shape[1]:][mask[0]].tolist()
    columns["token"] = [token_text(i, names["tokenizer"]) for i in ids]
    seen = dict(new="new", ratio="ratio", clipped="policy/clipfrac", loss="loss/policy")
    if losses:  # grpo.py makes no step where all advantages are 0
        columns |= {name: losses[key].tolist() for name, key in seen.items()}
    return columns


def number(x, digits=3):
    """A number with so many digits behind the point; there is no -0.000."""
    text = f"{x:.{digits}f}"
    return text.lstrip("-") if float(text) == 0 else text


def print_table(columns):
    """{name: cells}: names above, text on the left, numbers on the right."""
    cells = {}
    for name, values in columns.items():
        digits = 4 if name in ("KL", "reward") else 3
        cells[name] = [x if isinstance(x, str) else "yes" if x is True else "no" if x is False
                       else str(x) if isinstance(x, int) else number(x, digits) for x in values]
    for i in range(-1, len(next(iter(cells.values())))):
        words = []
        for name, texts in cells.items():
            width = max(len(name), *map(len, texts))
            word = name if i < 0 else texts[i]
            left = name in ("token", "response")
            words.append(word.ljust(width) if left else word.rjust(width))
        print(" ".join(words).rstrip())


def draw(columns, title):
    """Save the picture in `out`: one panel above the other, all over the same tokens."""
    columns = {name: cells[-LONGEST:] for name, cells in columns.items()}
    panels = [[name for name in group if name in columns] for group in (
        ("policy", "reference", "new"), ("KL", "reward"), ("value", "ret"),
        ("delta", "raw", "whitened", "advantage"), ("ratio", "loss"))]
    panels = [group for group in panels if group]
    x = range(len(columns["token"]))
    figure, axes = empty_picture(len(panels), 1, 12.8, 1.5)
    for axis, group in zip(axes[:, 0], panels, strict=True):
        for name, style in zip(group, ("o-", "s--", "^:"), strict=False):
            if name in ("KL", "reward", "delta"):
                axis.bar(x, columns[name], width=0.4, alpha=0.6, label=name)
            else:
                axis.plot(x, columns[name], style, markersize=4, label=name)
        if "ratio" in group:
            clipped = [i for i in x if columns["clipped"][i]]
            axis.plot(clipped, [columns["ratio"][i] for i in clipped], "o", color="C3",
                      markersize=8, label="clipped")
        axis.set_xlim(-0.7, len(x) - 0.3)
        axis.set_xticks(x, [""] * len(x))
        axis.legend(fontsize=9, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.05))
    # parse_math=False: a $ in a text is a dollar
    axes[-1, 0].set_xticks(x, columns["token"], rotation=90, parse_math=False, fontsize=8,
                           family="monospace")
    figure.suptitle(title if len(title) <= 110 else f"{title[:108]}..", fontsize=12,
                    parse_math=False)
    save_picture(figure, axes, out)
    print(f"\nsaved {out}")


# --------------------------------------------------------------------------------------------------
# from here on: read the run, run one iteration, print

if not prompt.strip():
    raise BadConfig('prompt is empty; type --prompt="123+456="')
if out:
    check_picture(out)
check_text(prompt, "command line: the prompt")
script, keys, checkpoint, iteration = read_run()
names, losses = one_more_iteration(script, keys, checkpoint, iteration)
batch, tokenizer = names["batch"], names["tokenizer"]
columns = columns_of(script, names, losses)
mask = batch["response_mask"]
texts = [tokenizer.decode_response(ids[m].tolist())
         for ids, m in zip(batch["tokens"][:, -mask.shape[1]:], mask, strict=True)]

print(f"one response of {run}: iteration {iteration} of {script}.py, from "
      f"{os.path.basename(checkpoint)}\n\nprompt    {prompt!r}\nresponse  {texts[0]!r}")
parts = [f"{weight:g} * {name} {number(batch[f'reward/{name}'][0].item())}"
         for weight, name, _ in names["terms"]]
ends = "" if batch["finished"][0] else "; cut off at max_new_tokens"
print(f"score     {number(batch['scores'][0].item())} = {' + '.join(parts)}{ends}\n"
      f"shaped    {number(names['scores'][0].item())}, after what the keys make of a score\n")
if script == "grpo":
    size = keys["group_size"]
    print_table({
        "#": list(range(1, size + 1)), "score": names["scores"][:size].tolist(),
        "advantage": batch["advantages"][:size, 0].tolist(),
        "tokens": mask[:size].sum(1).tolist(),
        "response": [text if len(text) <= 80 else f"{text[:78]}.."
                     for text in map(repr, texts[:size])]})
    print()
order = ["token", *(name for name in FORMULAS if name in columns)]
print_table({"#": list(range(1, len(columns["token"]) + 1))} | {k: columns[k] for k in order})
print("\nwhere the columns come from")
for name in order[1:]:
    print(f"{name:<10}{FORMULAS[name]}")
if out:
    draw(columns, f"{prompt!r} -> {texts[0]!r}, score {batch['scores'][0].item():.2f}")

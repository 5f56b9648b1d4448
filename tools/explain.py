"""
One response under the microscope: every number of a PPO or GRPO iteration, token by token.

python tools/explain.py --run=out/arithmetic_ppo --prompt="123+456="
python tools/explain.py --run=out/arithmetic_grpo --prompt="123+456=" --out=out/explain.png

It asks a run's policy this prompt, and prints what becomes of the response: the log-probs, KL,
rewards, values and advantages of its tokens, and after one update the ratio and the loss of each.
Below the table stand the sums, and the formula of each column with the file that computes it. With
--out the same is drawn as a picture.

Nothing is computed by a copy of the algorithm. The tool runs ppo.py or grpo.py itself for one more
iteration, from the run's last checkpoint and with the run's keys, and looks at the variables that
the script then has. The prompt takes the first place of the iteration's batch; the others are the
run's own, so that the batch is whitened, and the policy updated, as in the run. All this happens in
a temporary folder: the run's folder is only read.
"""
import contextlib
import io
import itertools
import os
import runpy
import signal
import sys
import tempfile
import textwrap

# Python looks for modules in this file's folder, tools/; ours are in the folder above it.
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

import engine  # noqa: E402, F401, first: it notes which CPUs there are, before OpenMP pins this thread

import torch  # noqa: E402

import rollout  # noqa: E402
from configurator import configure  # noqa: E402
from data import batch_rows, check_text, prompt_text  # noqa: E402
from engine import build, launch  # noqa: E402
from engine.checkpoint import find_checkpoint  # noqa: E402
from engine.hf_files import read_json  # noqa: E402
from engine.reward_mix import NEEDS  # noqa: E402
from engine.run import Run  # noqa: E402
from errors import BadConfig, BadInput  # noqa: E402
from loss import kl_estimate, masked_mean  # noqa: E402
from relatives import clipped_loss, gspo_log_ratio  # noqa: E402


# --------------------------------------------------------------------------------------------------
run = "out/arithmetic_ppo"  # the folder of a run of ppo.py or grpo.py that has a checkpoint
prompt = "123+456="  # what the policy is asked
answer = ""  # the right answer, for rewards that need one; empty = the one in the run's data, if any
seed = 1  # decides the response: another seed, another response [>= 0]
out = ""  # the picture, a PNG; empty = only the table
configure(globals())
# --------------------------------------------------------------------------------------------------
WIDTH = 120  # columns of a terminal
LONGEST = 64  # tokens in the picture: the last ones of a longer response


# --------------------------------------------------------------------------------------------------
# one more iteration of the run


class Enough(Exception):
    """Raised by the script's call of run.log, at the end of the iteration, with its variables."""


def read_run():
    """
    (script, config, checkpoint, iteration) of the run: "ppo" or "grpo", its keys, the folder of its
    last checkpoint, and how many iterations that one has done. Raises BadInput.
    """
    if not os.path.isdir(run):
        raise BadInput(f"run {run!r}: there is no such folder; give the out_dir of a run of ppo.py "
                       "or grpo.py")
    checkpoint, state = find_checkpoint(run)
    if checkpoint is None:
        raise BadInput(f"run {run!r} has no checkpoint; give the out_dir of a run of ppo.py or "
                       "grpo.py that has saved one")
    config = read_json(os.path.join(checkpoint, "config.json"))
    if "cliprange" not in config:
        raise BadInput(f"run {run!r} is a run of sft.py or rm.py, which sample no responses; give "
                       "one of ppo.py or grpo.py")
    config.pop("sha256", None)  # of the files that the run began with
    return "grpo" if "group_size" in config else "ppo", config, checkpoint, state["iteration"]


def keys_of_one_iteration(config, iteration):
    """
    The run's keys, with what this tool changes in them; and a line for each change that a reader of
    the table should know.
    """
    keys, notes = dict(config), []
    keys |= dict(checkpoint_interval=0, eval_size=1, eval_interval=max(config["max_iters"], iteration) + 2)
    if iteration >= config["max_iters"]:
        keys["max_iters"] = iteration + 1
        decays = [name for name in ("lr_decay", "value_lr_decay") if config.get(name, "constant") != "constant"]
        if decays:
            keys |= dict.fromkeys(decays, "constant")
            notes.append("the run is over and its learning rate has come down to 0, which would change "
                         "nothing: this update has the peak learning rate")
    if config.get("max_refills"):
        keys["max_refills"] = 0
        notes.append("max_refills = 0 here: the group stays, even if all its scores are equal")
    return keys, notes


def asked_row(rows, config, terms):
    """
    The data row of the prompt. A prompt of the run's data has that row, with all its fields;
    another one is written as the prompts of `rows` are: as text, or as a chat message. terms: the
    run's rewards, [(weight, name, function)]. Raises BadInput where they need a field that is not there.
    """
    known = rows + read_prompts(config["eval_path"], terms)
    row = next((row for row in known if prompt_text(row) == prompt), None)
    if row is None:
        row = {"prompt": prompt}
        if not isinstance(rows[0]["prompt"], str):
            system = [message for message in rows[0]["prompt"] if message["role"] == "system"]
            row = {"prompt": [*system, {"role": "user", "content": prompt}]}
    if answer:
        row = row | {"answer": answer}
    for _, name, _ in terms:
        for field in NEEDS.get(name, ()):
            if row.get(field) is None:
                hint = "type --answer=..., or" if field == "answer" else "so"
                raise BadInput(f"prompt {prompt!r}: the run's reward {name!r} needs its {field!r}; {hint} give a "
                               f"prompt of {config['prompts_path']}")
    return row


read_prompts, response_uniforms = build.read_prompts, rollout.response_uniforms


def one_more_iteration(script, config, checkpoint, iteration, keys):
    """
    Run the script for one iteration in a temporary folder. Returns its variables, {name: value}, as
    they are at the end of the iteration. Raises what the script raises.
    """
    asked = None  # the number of the prompt's row

    def with_the_prompt(path, terms):
        nonlocal asked
        rows = read_prompts(path, terms)
        if path == config["prompts_path"]:
            prompts = config["batch_size"] // config.get("group_size", 1)
            asked = batch_rows(config["seed"], iteration, prompts, len(rows))[0]
            rows[asked] = asked_row(rows, config, terms)
        return rows

    def end_of_iteration(self, record, tokens=0):
        raise Enough(sys._getframe(1).f_globals)

    build.read_prompts = with_the_prompt
    # the run's own seed decides which prompts are in the batch; the noise may have another
    rollout.response_uniforms = lambda _, *rest: response_uniforms(seed, *rest)
    Run.log = end_of_iteration
    launch.on_signal = signal.default_int_handler  # Ctrl-C ends the tool: there is nothing to save

    with tempfile.TemporaryDirectory(prefix="explain-") as folder:
        os.symlink(os.path.abspath(checkpoint), os.path.join(folder, os.path.basename(checkpoint)))
        arguments = keys | dict(out_dir=folder)
        sys.argv = [f"{script}.py", *(f"--{key}={value}" for key, value in arguments.items())]
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                runpy.run_path(os.path.join(ROOT, f"{script}.py"), run_name="__main__")
        except Enough as e:
            return e.args[0]
        except BadInput as e:  # in words of what the user has typed
            said = str(e).replace(folder, run)
            if asked is not None:
                said = said.replace(f"{config['prompts_path']}, row {asked + 1}:", f"prompt {prompt!r}:")
            raise BadInput(said) from e
    raise RuntimeError(f"{script}.py has ended without calling run.log")


# --------------------------------------------------------------------------------------------------
# what the script's variables say of the first response


def read_again(names):
    """The batch, as policy, reference and value model read it after the update."""
    batch = dict(names["batch"])
    minibatches = names["orders"][0].tensor_split(names["num_minibatches"])
    with contextlib.redirect_stdout(io.StringIO()):
        names["read_with_models"](batch, minibatches)
    return batch


def token_text(i, tokenizer):
    """A token's text between quotes, in ASCII so that columns stay columns; EOS as EOS."""
    text = "EOS" if i in tokenizer.eos_ids else ascii(tokenizer.decode([i]))
    return text if len(text) <= 10 else f"{text[:8]}.."


def response_text(row, names):
    """The text of a response of the batch, in quotes."""
    mask = names["mask"][row]
    ids = names["batch"]["tokens"][row, -len(mask):][mask].tolist()
    return repr(names["tokenizer"].decode(ids))


def tokens_of(names):
    """The texts of the first response's tokens, a list of n."""
    mask = names["mask"][0]
    ids = names["batch"]["tokens"][0, -len(mask):][mask].tolist()
    return [token_text(i, names["tokenizer"]) for i in ids]


def ppo_columns(names, after):
    """{column: (n,) list of numbers} for the n tokens of the first response of ppo.py."""
    batch, mask = names["batch"], names["mask"]
    values = batch["values"][0][mask[0]]  # (n,)
    rewards = names["rewards"][0][mask[0]]
    following = torch.cat([values[1:], values.new_zeros(1)])  # behind the last token nothing follows
    new, old = after["old_logprobs"], batch["old_logprobs"]
    losses, clipped = clipped_loss(new, old, batch["advantages"], mask, names["cliprange"])
    tensors = dict(  # (B, R) each
        old=old, ref=batch["ref_logprobs"], kl=names["kl"], reward=names["rewards"], value=batch["values"],
        raw=names["advantages"], whitened=batch["advantages"], returns=batch["returns"],
        new=new, ratio=(new - old).exp(), clipped=clipped, loss=losses, new_value=after["values"])
    columns = {name: tensor[0][mask[0]].tolist() for name, tensor in tensors.items()}
    return columns | dict(delta=(rewards + names["gamma"] * following - values).tolist())


def grpo_columns(names, after):
    """{column: (n,) list of numbers} for the n tokens of the first response of grpo.py."""
    batch, mask = names["batch"], names["mask"]
    new, old = after["old_logprobs"], batch["old_logprobs"]
    log_ratio = new - old
    if names["importance"] == "sequence":
        log_ratio = gspo_log_ratio(log_ratio, batch["counted"])
    given = new, old, batch["advantages"], batch["counted"]
    if names["special_loss"]:
        losses, clipped = names["special_loss"](*given)
    else:
        losses, clipped = clipped_loss(*given, names["cliprange"], names["cliprange_high"])
    tensors = dict(old=old, advantage=batch["advantages"], new=new, ratio=log_ratio.exp(), clipped=clipped,
                   loss=losses)  # (B, R) each
    if names["ref_policy"]:
        ref = batch["ref_logprobs"]
        tensors |= dict(ref=ref, kl=kl_estimate(old, ref, names["kl_estimator"]))
    return {name: tensor[0][mask[0]].tolist() for name, tensor in tensors.items()}


# --------------------------------------------------------------------------------------------------
# printing


def number(x, digits=3):
    """A number with so many digits behind the point; None is a dash, and there is no -0.000."""
    if x is None:
        return "-"
    text = f"{x:.{digits}f}"
    return text.lstrip("-") if float(text) == 0 else text


def print_table(columns):
    """
    columns: [(group, name, cells)], the cells as texts. Neighbours of one group have its name above
    them. token and response stand on the left of their columns, all others on the right.
    """
    above, lines = "", [""] * (len(columns[0][2]) + 1)
    for group, members in itertools.groupby(columns, key=lambda column: column[0]):
        start = len(lines[0])
        for place, (_, name, cells) in enumerate(members):
            width = max(len(name), *map(len, cells))
            gap = " " if place or not lines[0] or not group else "  "
            for i, cell in enumerate([name, *cells]):
                cell = cell.ljust(width) if name in ("token", "response") else cell.rjust(width)
                lines[i] += (gap if lines[i] else "") + cell
        span = len(lines[0]) - start
        above += f"  {f' {group} '.center(span - 2, '-')}" if group else " " * span
    for line in [above, *lines] if above.strip() else lines:
        print(line.rstrip())


def print_lines(*lines):
    """Lines of words in columns; the last word of a line is a text, which goes on below itself."""
    for *words, text in lines:
        start = "".join(word.ljust(width) for word, width in zip(words, (22, 13), strict=False))
        print(textwrap.fill(text, WIDTH, initial_indent=start, subsequent_indent=" " * len(start),
                            break_on_hyphens=False))


def print_ppo(columns, names):
    """The table of a response of ppo.py, its sums, and where each column comes from."""
    batch, record, n = names["batch"], names["record"], len(columns["token"])
    kl_coef, in_reward = record["objective/kl_coef"], names["kl_in"] == "reward"
    shown = [("log-prob", "policy", "old"), ("log-prob", "reference", "ref"), ("", "KL", "kl"),
             ("", "reward", "reward"), ("", "value", "value"), ("", "delta", "delta"),
             ("advantage", "raw", "raw"), ("advantage", "whitened", "whitened"),
             ("", "return", "returns"), ("after the update", "log-prob", "new"),
             ("after the update", "ratio", "ratio"), ("after the update", "clipped", "clipped"),
             ("after the update", "loss", "loss")]
    print_tokens(columns, shown)

    score, shaped = batch["scores"][0].item(), names["scores"][0].item()
    parts = [f"{weight:g} * {name} {number(batch[f'reward/{name}'][0].item())}"
             for weight, name, _ in names["terms"]]
    mean = masked_mean(names["advantages"], names["mask"]).item()
    deviation = names["advantages"][names["mask"]].std(correction=0).item()
    total, kl = sum(columns["reward"]), sum(columns["kl"])
    print("\nsums of this response")
    print_lines(
        ("score", f"{number(score)} = {' + '.join(parts)}" + said_of_accuracy(batch)),
        ("shaped score", f"{number(shaped)}, after scale_scores = {names['scale_scores']}, "
                         f"missing_eos_penalty = {names['missing_eos_penalty']:g} and "
                         f"reward_clip = {names['reward_clip']:g}"),
        ("KL", f"{number(kl, 4)} nats, the sum of its column"),
        ("rewards", f"{number(total)}" + (
            f" = shaped score {number(shaped)} - kl_coef {kl_coef:g} * KL {number(kl, 4)}" if in_reward
            else ", the shaped score alone: kl_in = loss, so the KL is a part of the loss")),
        ("value", f"{number(columns['value'][0])} before the first token, what the value model "
                  f"expected of the whole response; its return was {number(columns['returns'][0])}; "
                  f"after the update the value is {number(columns['new_value'][0])}"),
        ("loss", f"{number(sum(columns['loss']) / n)}, the mean of its column; {sum(columns['clipped'])} "
                 f"of {n} tokens are clipped"))

    low, high = 1 - names["cliprange"], 1 + names["cliprange"]
    reward = f"-kl_coef * KL, kl_coef = {kl_coef:g}" if in_reward else "0"
    print_formulas([
        *LOGPROB_FORMULAS,
        ("KL", "loss.py", KL_FORMULAS[names["kl_estimator"]]),
        ("reward", "ppo.py", f"{reward}; the last token gets the shaped score, too"),
        ("value", "loss.py", "what the value model expects of this token and all that follow"),
        ("delta", "gae.py", "reward + gamma * value of the next token - value, gamma = "
                            f"{names['gamma']:g}; behind the last token the value is 0"),
        ("advantage, raw", "gae.py", "delta + gamma * lam * raw advantage of the next token, "
                                     f"lam = {names['lam']:g}"),
        ("advantage, whitened", "loss.py", f"(raw - {number(mean)}) / {number(deviation)}: mean and "
                                           f"deviation of all {int(names['mask'].sum())} tokens of the batch"),
        ("return", "gae.py", "raw advantage + value; what the value is trained towards"),
        AFTER_FORMULA,
        ("ratio", "ppo.py", RATIO_FORMULA),
        ("clipped", "ppo.py", f"yes: the ratio has left {low:g} to {high:g} on the side to which the "
                              "advantage A drives it"),
        ("loss", "ppo.py", f"the larger of -A * ratio and -A * (ratio cut to {low:g} to {high:g}), "
                           "A = whitened advantage; as one more step would see it"),
        ("loss of a step", "ppo.py", "the mean of the losses of all tokens of the step"
                                     + ("" if in_reward else f" + kl_coef {kl_coef:g} * the mean of their KL")),
    ])


def print_grpo(columns, names):
    """The group of a prompt of grpo.py, the table of its first response, and the formulas."""
    batch, size, mask = names["batch"], names["group_size"], names["mask"]
    scores, advantages = names["scores"][:size].double(), batch["advantages"][:size, 0]
    texts = [response_text(i, names) for i in range(size)]
    room = WIDTH - 36
    print(f"the group of {size} responses")
    print_table([
        ("", "#", [str(i + 1) for i in range(size)]),
        ("", "score", [number(x) for x in scores.tolist()]),
        ("", "advantage", [number(x) for x in advantages.tolist()]),
        ("", "tokens", [str(x) for x in mask[:size].sum(1).tolist()]),
        ("", "ends", ["yes" if x else "no" for x in batch["finished"][:size].tolist()]),
        ("", "response", [text if len(text) <= room else f"{text[:room - 2]}.." for text in texts])])
    mean, deviation = scores.mean().item(), scores.std().item()
    flat = "; all scores are equal, so there is nothing to learn from this group"
    print(f"mean of the scores {number(mean)}, deviation {number(deviation)}"
          f"{flat if (scores == scores[0]).all() else ''}\n")

    print("response 1, token by token")
    n = len(columns["token"])
    shown = [("log-prob", "policy", "old"), ("log-prob", "reference", "ref"), ("", "KL", "kl"),
             ("", "advantage", "advantage"), ("after the update", "log-prob", "new"),
             ("after the update", "ratio", "ratio"), ("after the update", "clipped", "clipped"),
             ("after the update", "loss", "loss")]
    print_tokens(columns, shown)

    parts = [f"{weight:g} * {name} {number(batch[f'reward/{name}'][0].item())}"
             for weight, name, _ in names["terms"]]
    lines = [("score", f"{number(batch['scores'][0].item())} = {' + '.join(parts)}" + said_of_accuracy(batch))]
    if scores[0].item() != batch["scores"][0].item():
        penalty = f" and - kl_coef {names['kl_coef']:g} * KL" if names["kl_in"] == "reward" else ""
        lines.append(("shaped score", f"{number(scores[0].item())}, after missing_eos_penalty = "
                                      f"{names['missing_eos_penalty']:g}, reward_clip = {names['reward_clip']:g}{penalty}"))
    if names["ref_policy"]:
        lines.append(("KL", f"{number(sum(columns['kl']), 4)} nats, the sum of its column"))
    print("\nsums of this response")
    print_lines(*lines, ("loss", f"{number(sum(columns['loss']) / n)}, the mean of its column; "
                                 f"{sum(columns['clipped'])} of {n} tokens are clipped"))

    low, high = 1 - names["cliprange"], 1 + names["cliprange_high"]
    base = "mean of the group" if names["baseline"] == "mean" else "mean of the other scores"
    scale = {"std": f"({{}}) / (deviation of the group {number(deviation)} + 0.0001)",
             "batch": f"({{}}) / (deviation of all scores {number(names['scores'].double().std().item())} + 0.0001)",
             "none": "{}"}[names["scale_by"]]
    loss = (f"the larger of -A * ratio and -A * (ratio cut to {low:g} to {high:g}), A = advantage"
            + (f"; where A < 0 at most -A * {names['dual_clip']:g}" if names["dual_clip"] else ""))
    clipped = f"yes: the ratio has left {low:g} to {high:g} on the side to which the advantage A drives it"
    if names["loss_type"] == "cispo":
        loss = f"-A * log-prob * (ratio cut to {low:g} to {high:g}), A = advantage"
        clipped = f"yes: the ratio has left {low:g} to {high:g}"
    ratio = "grpo.py", RATIO_FORMULA
    if names["importance"] == "sequence":
        ratio = "relatives.py", "exp(mean of log-prob after - log-prob before over the response)"
    kl = [("KL", "loss.py", KL_FORMULAS[names["kl_estimator"]])] if names["ref_policy"] else []
    file = "relatives.py" if names["special_loss"] else "grpo.py"
    print_formulas([
        *(LOGPROB_FORMULAS if names["ref_policy"] else LOGPROB_FORMULAS[:1]), *kl,
        ("advantage", "relatives.py", scale.format(f"score - {base}") + "; the same for all tokens"),
        AFTER_FORMULA, ("ratio", *ratio), ("clipped", file, clipped),
        ("loss", file, f"{loss}; as one more step would see it"),
        ("loss of a step", "relatives.py",
         f"the sum of loss * weight over all tokens of the step, aggregation = {names['aggregation']}"
         + (f" + kl_coef {names['kl_coef']:g} * the same of their KL" if kl and names["kl_in"] == "loss" else ""))])


LOGPROB_FORMULAS = [
    ("log-prob, policy", "loss.py", "log of the probability that the policy gave this token when it sampled it"),
    ("log-prob, reference", "loss.py", "the same of the reference policy, which is the SFT model and never changes")]
KL_FORMULAS = {
    "k1": "log-prob of the policy - log-prob of the reference",
    "k2": "(log-prob of the policy - log-prob of the reference)^2 / 2",
    "k3": "q/p - 1 - log(q/p), p and q the probabilities under policy and reference"}
AFTER_FORMULA = ("log-prob, after", "loss.py", "the policy's log-prob of the same token, after all steps of the update")
RATIO_FORMULA = "exp(log-prob after - log-prob before): how much likelier the token is now"


def said_of_accuracy(batch):
    """Whether the answer is right, where the data says what is right."""
    right = batch["accuracy"][0].item()
    return "" if right != right else f"; the answer is {'right' if right else 'wrong'}"


def print_tokens(columns, shown):
    """The table of tokens. shown: [(group, name above the column, name in columns)]."""
    n = len(columns["token"])
    cells = [("", "#", [str(i + 1) for i in range(n)]), ("", "token", columns["token"])]
    for group, name, key in shown:
        values, digits = columns.get(key, [None] * n), 4 if key in ("kl", "reward") else 3
        texts = ["yes" if x else "no" for x in values] if key == "clipped" else [number(x, digits) for x in values]
        cells.append((group, name, texts))
    print_table(cells)


def print_formulas(formulas):
    """formulas: [(column, file, formula)]."""
    print("\nwhere the columns come from: name, file, formula")
    print_lines(*formulas)


# --------------------------------------------------------------------------------------------------
# the picture


def draw(columns, names):
    """Save the columns as a picture, in `out`: a panel for each step, all over the same tokens."""
    import matplotlib

    matplotlib.use("Agg")  # a file, not a window
    import matplotlib.pyplot as plt

    n = len(columns["token"])
    columns = {name: cells[-LONGEST:] for name, cells in columns.items()}
    ppo = script == "ppo"
    panels = [draw_logprobs, draw_rewards, draw_values, draw_advantages, draw_ratios] if ppo else [
        draw_scores, draw_logprobs, draw_kl, draw_ratios]
    figure, axes = plt.subplots(len(panels), 1, figsize=(12.8, 7.2))
    over_tokens = [axis for axis, panel in zip(axes, panels, strict=True) if panel is not draw_scores]
    shown = len(columns["token"])
    for axis in over_tokens:
        axis.set_xlim(-0.7, shown - 0.3)
        axis.set_xticks(range(shown), [""] * shown)
        axis.margins(y=0.15)
    for axis, panel in zip(axes, panels, strict=True):
        panel(axis, columns, names)
        axis.tick_params(labelsize=9)
        axis.grid(axis="y", alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=9, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.05))
    # parse_math=False: a $ is a dollar
    texts = [text if text == "EOS" else text[1:].removesuffix("'") for text in columns["token"]]
    over_tokens[-1].set_xticks(range(shown), texts, rotation=0 if shown <= 12 else 90, parse_math=False,
                               fontsize=11 if shown <= 40 else 8, family="monospace")
    score = f"score {names['batch']['scores'][0].item():.2f}, KL {sum(columns.get('kl', [0])):.2f} nats"
    part = "" if shown == n else f" (the last {shown} of {n} tokens)"
    response = response_text(0, names)
    title = f"{prompt!r} -> {response}"
    title = title if len(title) <= 100 else f"{title[:98]}.."
    figure.suptitle(f"{title}\n{os.path.basename(os.path.normpath(run))}, iteration {iteration}: {score}{part}",
                    fontsize=13, parse_math=False)
    figure.align_ylabels()
    figure.tight_layout()
    try:
        os.makedirs(os.path.dirname(out) or ".", exist_ok=True)
        figure.savefig(out, dpi=150)
    except OSError as e:
        raise BadInput(f"out = {out!r} cannot be written: {e.strerror}") from e
    print(f"\nsaved {out}")


def draw_scores(axis, columns, names):
    """The scores of a group, with their mean and the range of one deviation around it."""
    size = names["group_size"]
    scores, advantages = names["scores"][:size].double(), names["batch"]["advantages"][:size, 0]
    mean, deviation = scores.mean().item(), scores.std().item()
    bars = axis.bar(range(1, size + 1), scores.tolist(), width=0.6, zorder=3,
                    color=["C0", *["0.75"] * (size - 1)])
    axis.bar_label(bars, [f"{x:+.2f}" for x in advantages.tolist()], fontsize=9, zorder=5)
    axis.axhline(mean, color="C3", zorder=4, label=f"mean {mean:.2f}")
    axis.axhspan(mean - deviation, mean + deviation, color="C3", alpha=0.1, label=f"deviation {deviation:.2f}")
    axis.set_xticks(range(1, size + 1), [f"response {i}" if size <= 12 else str(i) for i in range(1, size + 1)])
    axis.margins(y=0.25)
    axis.set_ylabel("score")
    axis.set_title("the group: each bar a response, above it its advantage; below: response 1", fontsize=10)


def draw_logprobs(axis, columns, names):
    """What policy and reference say of each token, and the policy after the update."""
    x = range(len(columns["token"]))
    axis.plot(x, columns["old"], "o-", color="C0", markersize=5, label="policy")
    if "ref" in columns:
        axis.plot(x, columns["ref"], "s--", color="0.45", markersize=4, label="reference")
    axis.plot(x, columns["new"], "^:", color="C1", markersize=5, label="after the update")
    axis.set_ylabel("log-prob")


def bar_width(x):
    """How wide bars at x are, in tokens: no wider than they are in a response of 20 tokens."""
    return 0.7 * min(1, len(x) / 20)


def draw_kl(axis, columns, names):
    """The KL at each token; nothing where there is no reference."""
    x = range(len(columns["token"]))
    axis.bar(x, columns.get("kl", [0.0] * len(x)), color="C4", label="KL to the\nreference",
             width=bar_width(x))
    axis.set_ylabel("KL (nats)")


def draw_rewards(axis, columns, names):
    """The reward of each token: what its KL costs and, for the last one, the score."""
    x = range(len(columns["token"]))
    score = names["scores"][0].item()
    costs = [*columns["reward"][:-1], columns["reward"][-1] - score]
    if names["kl_in"] == "reward":
        axis.bar(x, costs, color="C3", width=bar_width(x), label="-kl_coef * KL")
    axis.bar(x[-1], score, color="C2", width=bar_width(x), label="score")
    axis.axhline(0, color="0.7", linewidth=0.8)
    axis.set_ylabel("reward")


def draw_values(axis, columns, names):
    """The value of each token beside the return that it should have foreseen."""
    x = range(len(columns["token"]))
    axis.plot(x, columns["value"], "o-", color="C4", markersize=5, label="value")
    axis.plot(x, columns["returns"], "s--", color="0.45", markersize=4, label="return")
    axis.set_ylabel("value")


def draw_advantages(axis, columns, names):
    """The deltas, and the advantages that GAE makes of them."""
    x = range(len(columns["token"]))
    axis.bar(x, columns["delta"], color="0.8", width=bar_width(x), label="delta")
    axis.axhline(0, color="0.7", linewidth=0.8)
    axis.plot(x, columns["raw"], "o-", color="C3", markersize=5, label="advantage, raw")
    axis.plot(x, columns["whitened"], "^:", color="C1", markersize=5, label="whitened")
    axis.set_ylabel("advantage")


def draw_ratios(axis, columns, names):
    """The ratio of each token after the update, the range that the clip leaves alone, clipped ones."""
    x = range(len(columns["token"]))
    low, high = 1 - names["cliprange"], 1 + names.get("cliprange_high", names["cliprange"])
    axis.axhline(1, color="0.7", linewidth=0.8)
    axis.axhspan(low, high, color="C2", alpha=0.12, label=f"{low:g} to {high:g}")
    axis.plot(x, columns["ratio"], "o", color="C0", markersize=5, label="ratio")
    clipped = [i for i in x if columns["clipped"][i]]
    axis.plot(clipped, [columns["ratio"][i] for i in clipped], "o", color="C3", markersize=8, label="clipped")
    axis.set_ylabel("ratio")


# --------------------------------------------------------------------------------------------------
# from here on: read the run, run one iteration, print

if not prompt.strip():
    raise BadConfig('prompt is empty; type --prompt="123+456="')
if out and not out.endswith(".png"):
    raise BadConfig(f"out = {out!r} must end with .png")
check_text(prompt, "prompt", "command line")
script, config, checkpoint, iteration = read_run()
keys, notes = keys_of_one_iteration(config, iteration)
names = one_more_iteration(script, config, checkpoint, iteration, keys)
after = read_again(names)
columns = (ppo_columns if script == "ppo" else grpo_columns)(names, after)
columns["token"] = tokens_of(names)

steps, n = names["steps"], len(columns["token"])
others = config["batch_size"] // config.get("group_size", 1) - 1
print(f"\none response of {run}: iteration {iteration} of {script}.py, from {os.path.basename(checkpoint)}\n")
finished = "ends with EOS" if names["batch"]["finished"][0] else "was cut off at max_new_tokens"
print_lines(
    ("prompt", repr(prompt)),
    ("response", response_text(0, names)),
    ("", f"{n} tokens, {finished}"),
    ("batch", f"this prompt and {others} prompts of the run's own"),
    ("update", f"optimizer steps: {steps}, learning rate {names['policy_lr']:g}"),
    *(("note", note) for note in notes))
print()
(print_ppo if script == "ppo" else print_grpo)(columns, names)
if out:
    draw(columns, names)

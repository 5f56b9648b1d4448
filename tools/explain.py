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
import math
import os
import runpy
import signal
import sys
import tempfile
import textwrap

# Python looks for modules in this file's folder, tools/; ours are in the folder above it.
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

import engine  # noqa: E402, F401, before torch: it notes which CPUs this process may use

import data  # noqa: E402
import rollout  # noqa: E402
from configurator import configure  # noqa: E402
from data import batch_rows, prompt_text  # noqa: E402
from engine import build, launch, run_folder  # noqa: E402
from engine.checkpoint import find_checkpoint  # noqa: E402
from engine.curves import check_picture  # noqa: E402
from folders import read_json  # noqa: E402
from engine.reward_mix import NEEDS  # noqa: E402
from engine.run import Run  # noqa: E402
from errors import BadConfig, BadInput  # noqa: E402
from rows import check_text  # noqa: E402
from loss import kl_estimate, masked_mean  # noqa: E402
from relatives import clipped_loss, gspo_log_ratio  # noqa: E402
from rewards import reward_terms  # noqa: E402


# --------------------------------------------------------------------------------------------------
run = "out/arithmetic_ppo"  # the folder of a run of ppo.py or grpo.py that has a checkpoint
prompt = "123+456="  # what the policy is asked
answer = ""  # the right answer, where a reward needs it; empty = that of the run's data
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
    The run's keys, with what this tool changes in them; and the changes that a reader of the table
    should know, as lines of text.
    """
    never = max(config["max_iters"], iteration) + 2
    keys, notes = config | dict(checkpoint_interval=0, eval_interval=never, eval_size=1), []
    keys |= dict(epochs=0.0)  # max_iters has been computed from them
    if iteration >= config["max_iters"]:
        keys["max_iters"] = iteration + 1
        decays = [name for name in ("lr_decay", "value_lr_decay")
                  if config.get(name, "constant") != "constant"]
        if decays:
            keys |= dict.fromkeys(decays, "constant")
            notes.append("the run is over and its learning rate has come down to 0, with which an "
                         "update changes nothing: this update has the peak learning rate")
    if config.get("max_refills"):
        keys["max_refills"] = 0
        notes.append("max_refills = 0 here: the group stays, even if all its scores are equal")
    return keys, notes


def asked_row(rows, config, terms):
    """
    The data row of the prompt. A prompt of the run's data has that row, with all its fields;
    another one is written as the prompts of `rows` are: as text, or as a chat message.

    terms: the run's rewards, [(weight, name, function)]. Raises BadInput where one of them needs a
    field that the row does not have.
    """
    known = rows + build.read_prompts(config["eval_path"], terms, config.get("fields", ""))
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
                hint = "type --answer=..., or give" if field == "answer" else "give"
                raise BadInput(f"prompt {prompt!r}: the run's reward {name!r} needs its {field!r}; "
                               f"{hint} a prompt of {config['prompts_path']}")
    return row


encode_for_all, response_uniforms = data.encode_for_all, rollout.response_uniforms


def one_more_iteration(script, config, checkpoint, iteration, keys):
    """
    Run the script for one iteration in a temporary folder. Returns its variables, {name: value}, as
    they are at the end of the iteration. Raises what the script raises.
    """
    asked = None  # the number of the prompt's row

    def with_the_prompt(rows, path, *rest):
        nonlocal asked
        ids = encode_for_all(rows, path, *rest)  # rows that are too long may be dropped here
        if path == config["prompts_path"]:
            prompts = config["batch_size"] // config.get("group_size", 1)
            asked = batch_rows(config["seed"], iteration, prompts, rows.mix)[0]
            rows[asked] = asked_row(rows, config, reward_terms(config["reward_functions"]))
            *rest, too_long = rest
            how = "cut" if too_long == "cut" else "error"
            ids[asked], = encode_for_all([rows[asked]], path, *rest, how)
        return ids

    def end_of_iteration(self, record, tokens=0):
        raise Enough(sys._getframe(1).f_globals)

    data.encode_for_all = with_the_prompt
    # the run's own seed decides which prompts are in the batch; the noise may have another
    rollout.response_uniforms = lambda _, *rest: response_uniforms(seed, *rest)
    Run.log = end_of_iteration
    run_folder.hash_of_ids = lambda _: None  # the prompts are the run's but for the one asked about
    launch.on_signal = signal.default_int_handler  # Ctrl-C ends the tool: there is nothing to save

    with tempfile.TemporaryDirectory(prefix="explain-") as parent:
        folder = os.path.join(parent, "run")
        os.mkdir(folder)
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
                place = f"{config['prompts_path']}, row 1:"
                said = said.replace(place, f"prompt {prompt!r}:")
            raise BadInput(said) from e
    raise RuntimeError(f"{script}.py has ended without calling run.log")


# --------------------------------------------------------------------------------------------------
# what the script's variables say of the first response


def read_again(names):
    """The batch, as policy, reference and value model read it after the update."""
    batch = {name: x for name, x in names["batch"].items()
             if name not in ("old_logprobs", "ref_logprobs", "values")}
    names["run"].age = 0  # old_logprobs are then those of the policy of now
    minibatches = names["orders"][0].tensor_split(names["num_minibatches"])
    names["run"].must_agree = lambda gap, what: gap  # the policy has moved: no other agrees with it
    with contextlib.redirect_stdout(io.StringIO()):
        names["read_with_models"](batch, minibatches)
    return batch


def token_text(i, tokenizer):
    """A token's text between quotes, in ASCII so that columns stay columns; EOS as EOS."""
    text = "EOS" if i in tokenizer.eos_ids else ascii(tokenizer.decode([i]))
    return text if len(text) <= 10 else f"{text[:8]}.."


def response_ids(row, names):
    """The token ids of a response of the batch."""
    mask = names["mask"][row]  # (R,)
    return names["batch"]["tokens"][row, -len(mask):][mask].tolist()


def response_text(row, names):
    """The text of a response of the batch, in quotes."""
    return repr(names["tokenizer"].decode_response(response_ids(row, names)))


def of_the_first(tensors, names):
    """{column: list of n numbers}, of the n tokens of the first response. tensors: (B, R) each."""
    mask = names["mask"][0]
    columns = {name: tensor[0][mask].tolist() for name, tensor in tensors.items()}
    return columns | dict(token=[token_text(i, names["tokenizer"]) for i in response_ids(0, names)])


def ppo_columns(names, after):
    """The columns of a response of ppo.py. after: the batch as it is read after the update."""
    batch, mask = names["batch"], names["mask"]
    new, old = after["old_logprobs"], batch["old_logprobs"]
    losses, clipped = clipped_loss(new, old, batch["advantages"], mask, names["cliprange"])
    tensors = dict(
        old=old, reward=names["rewards"], value=batch["values"], raw=names["advantages"],
        whitened=batch["advantages"], returns=batch["returns"], new=new, ratio=(new - old).exp(),
        clipped=clipped, loss=losses, new_value=after["values"])
    if names["ref_policy"]:
        tensors |= dict(ref=batch["ref_logprobs"], kl=names["kl"])
    columns = of_the_first(tensors, names)
    values = [*columns["value"], 0.0]  # behind the last token nothing follows
    columns["delta"] = [reward + names["gamma"] * values[t + 1] - values[t]
                        for t, reward in enumerate(columns["reward"])]
    return columns


def grpo_columns(names, after):
    """The columns of a response of grpo.py. after: the batch as it is read after the update."""
    batch, counted = names["batch"], names["batch"]["counted"]
    new, old = after["old_logprobs"], batch["old_logprobs"]
    log_ratio = new - old
    if names["importance"] == "sequence":
        log_ratio = gspo_log_ratio(log_ratio, counted)
    given = new, old, batch["advantages"], counted
    if names["relative_loss"]:
        losses, clipped = names["relative_loss"](*given)
    else:
        losses, clipped = clipped_loss(*given, names["cliprange"], names["cliprange_high"])
    tensors = dict(old=old, advantage=batch["advantages"], new=new, ratio=log_ratio.exp(),
                   clipped=clipped, loss=losses)
    if names["ref_policy"]:
        ref = batch["ref_logprobs"]
        tensors |= dict(ref=ref, kl=kl_estimate(old, ref, names["kl_estimator"]))
    return of_the_first(tensors, names)


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


def print_tokens(columns, shown):
    """The table of tokens. shown: [(group, name above the column, key of columns)]."""
    n = len(columns["token"])
    cells = [("", "#", [str(i + 1) for i in range(n)]), ("", "token", columns["token"])]
    for group, name, key in shown:
        values, digits = columns.get(key, [None] * n), 4 if key in ("kl", "reward") else 3
        texts = [number(x, digits) for x in values]
        if key == "clipped":
            texts = ["yes" if x else "no" for x in values]
        cells.append((group, name, texts))
    print_table(cells)


BEFORE = [("log-prob", "policy", "old"), ("log-prob", "reference", "ref"), ("", "KL", "kl")]
AFTER = [("after the update", "log-prob", "new"), ("after the update", "ratio", "ratio"),
         ("after the update", "clipped", "clipped"), ("after the update", "loss", "loss")]


def said_of_score(names):
    """The score of the first response as the sum of its rewards; is its answer right, if known?"""
    batch = names["batch"]
    parts = [f"{weight:g} * {name} {number(batch[f'reward/{name}'][0].item())}"
             for weight, name, _ in names["terms"]]
    right = batch["accuracy"][0].item()
    known = "" if math.isnan(right) else f"; the answer is {'right' if right else 'wrong'}"
    return f"{number(batch['scores'][0].item())} = {' + '.join(parts)}{known}"


def said_of_loss(columns):
    """The mean loss of the response's tokens, and how many of them the clip has stopped."""
    n, clipped = len(columns["token"]), sum(columns["clipped"])
    mean = number(sum(columns["loss"]) / n)
    return f"{mean}, the mean of its column; {clipped} of {n} tokens are clipped"


# where a column comes from: (column, file, formula)
LOGPROBS = [
    ("log-prob, policy", "loss.py",
     "log of the token's probability under the policy that sampled it"),
    ("log-prob, reference", "loss.py",
     "the same under the reference policy, which no update changes")]
KL = {"k1": "log-prob of the policy - log-prob of the reference",
      "k2": "(log-prob of the policy - log-prob of the reference)^2 / 2",
      "k3": "q/p - 1 - log(q/p), p and q the probabilities under policy and reference"}
NEW = "the policy's log-prob of the same token, after all steps of the update"
RATIO = "exp(log-prob after - log-prob before): how much likelier the token is now"


def said_of_clip(low, high):
    """The formulas of the columns clipped and loss, for a ratio that may go from low to high."""
    return (f"yes: the ratio has left {low:g} to {high:g} on the side to which the advantage A "
            "drives it, so the token's gradient is 0",
            f"the larger of -A * ratio and -A * (ratio cut to {low:g} to {high:g}), as one more "
            "step would see it")


def beside(names):
    """What else is in the loss of a step, by keys that most runs leave alone; "" for nothing."""
    cap = names["importance_cap"]
    said = "" if cap == 0 else (
        f"; each loss counts p(training) / p(sampler) times, at most {cap:g} times")
    if names["entropy_coef"]:
        said += f"; - entropy_coef {names['entropy_coef']:g} * the same of their entropy"
    if names.get("ptx_path"):
        said += f"; + ptx_coef {names['ptx_coef']:g} * the mean loss on demonstrations"
    return said


def print_ppo(columns, names):
    """The table of a response of ppo.py, its sums, and where each column comes from."""
    print_tokens(columns, [
        *BEFORE, ("", "reward", "reward"), ("", "value", "value"), ("", "delta", "delta"),
        ("advantage", "raw", "raw"), ("advantage", "whitened", "whitened"),
        ("", "return", "returns"), *AFTER])

    kl_coef = names["record"]["objective/kl_coef"]  # of this iteration: it may adapt after it
    white = "" if names["whiten_rewards"] == "none" else \
        f"; then whitened over the batch ({names['whiten_rewards']})"
    in_reward = names.get("kl_in", "reward") == "reward"
    shaped, sums, formulas = names["scores"][0].item(), [], LOGPROBS[:1]
    rewards = f"{number(sum(columns['reward']))} = shaped score {number(shaped)}"
    if names["whiten_rewards"] != "none":
        rewards = rewards.replace(" = ", " after whiten_rewards, of ", 1)
    if "kl" in columns:
        kl = number(sum(columns["kl"]), 4)
        sums = [("KL", f"{kl} nats, the sum of its column")]
        formulas = [*LOGPROBS, ("KL", "loss.py", KL[names["kl_estimator"]])]
        rewards += f" - kl_coef {kl_coef:g} * KL {kl}" if in_reward else ""
    print("\nsums of this response")
    print_lines(
        ("score", said_of_score(names)),
        ("shaped score", f"{number(shaped)}, after scale_scores = {names['scale_scores']}, "
                         f"missing_eos_penalty = {names['missing_eos_penalty']:g} and "
                         f"reward_clip = {names['reward_clip']:g}"),
        *sums,
        ("rewards", rewards),
        ("value", f"{number(columns['value'][0])} before the first token: what the value model "
                  "expects of the whole response; its return is "
                  f"{number(columns['returns'][0])}, and after the update the value is "
                  f"{number(columns['new_value'][0])}"),
        ("loss", said_of_loss(columns)))

    mask, raw = names["mask"], names["advantages"]
    mean, deviation = masked_mean(raw, mask).item(), raw[mask].std(correction=0).item()
    clipped, loss = said_of_clip(1 - names["cliprange"], 1 + names["cliprange"])
    print_formulas([
        *formulas,
        ("reward", "ppo.py", (f"-kl_coef * KL, kl_coef = {kl_coef:g}; to the last token's the "
                              "shaped score is added" if in_reward else
                              "the shaped score at the last token; the KL is in the loss") + white),
        ("value", "loss.py", "what the value model expects of this token and all that follow"),
        ("delta", "gae.py", "reward + gamma * value of the next token - value, gamma = "
                            f"{names['gamma']:g}; behind the last token the value is 0"),
        ("advantage, raw", "gae.py", "delta + gamma * lam * raw advantage of the next token, "
                                     f"lam = {names['lam']:g}"),
        ("advantage, whitened", "loss.py",
         f"A = (raw - {number(mean)}) / {number(deviation)}: mean and deviation of all "
         f"{int(mask.sum())} tokens of the batch"),
        ("return", "gae.py", "raw advantage + value; what the value is trained towards"),
        ("log-prob, after", "loss.py", NEW), ("ratio", "ppo.py", RATIO),
        ("clipped", "ppo.py", clipped), ("loss", "ppo.py", loss),
        ("loss of a step", "ppo.py", "the mean over all tokens of the step" + (
            "" if in_reward else f", + kl_coef {kl_coef:g} * the mean of their KL")
            + beside(names)),
    ])


def print_grpo(columns, names):
    """The group of a prompt of grpo.py, the table of its first response, and the formulas."""
    batch, size = names["batch"], names["group_size"]
    scores, advantages = names["scores"][:size].double(), batch["advantages"][:size, 0]
    mean, deviation = scores.mean().item(), scores.std().item()
    texts, room = [response_text(i, names) for i in range(size)], WIDTH - 36
    print(f"the group of {size} responses")
    print_table([
        ("", "#", [str(i + 1) for i in range(size)]),
        ("", "score", [number(x) for x in scores.tolist()]),
        ("", "advantage", [number(x) for x in advantages.tolist()]),
        ("", "tokens", [str(x) for x in names["mask"][:size].sum(1).tolist()]),
        ("", "ends", ["yes" if x else "no" for x in batch["finished"][:size].tolist()]),
        ("", "response", [x if len(x) <= room else f"{x[:room - 2]}.." for x in texts])])
    flat = (scores == scores[0]).all()
    print(f"mean of the scores {number(mean)}, deviation {number(deviation)}"
          + ("; all are equal, so this group teaches nothing" if flat else ""))

    print("\nresponse 1, token by token")
    print_tokens(columns, [*BEFORE, ("", "advantage", "advantage"), *AFTER])

    kl_coef, in_loss = names["kl_coef"], names.get("kl_in", "reward") == "loss"
    lines = [("score", said_of_score(names))]
    if scores[0].item() != batch["scores"][0].item():
        less = "" if in_loss else f", less kl_coef {kl_coef:g} * the KL"
        lines.append(("shaped score",
                      f"{number(scores[0].item())}, after missing_eos_penalty = "
                      f"{names['missing_eos_penalty']:g} ({names['missing_eos']}) and "
                      f"reward_clip = {names['reward_clip']:g}{less}"))
    if "kl" in columns:
        lines.append(("KL", f"{number(sum(columns['kl']), 4)} nats, the sum of its column"))
    print("\nsums of this response")
    print_lines(*lines, ("loss", said_of_loss(columns)))

    base = "mean of the group" if names["baseline"] == "mean" else "mean of the other scores"
    advantage = f"A = score - {base}, the same for all tokens"
    if names["scale_by"] != "none":
        of_all = names["scores"].double().std().item()
        scale = (f"deviation of the group {number(deviation)}" if names["scale_by"] == "std" else
                 f"deviation of all scores {number(of_all)}")
        advantage = f"A = (score - {base}) / ({scale} + 0.0001), the same for all tokens"
    low, high = 1 - names["cliprange"], 1 + names["cliprange_high"]
    clipped, loss = said_of_clip(low, high)
    if names["dual_clip"]:
        loss += f"; where A < 0 at most -A * {names['dual_clip']:g}"
    if names["loss_type"] == "cispo":
        clipped = f"yes: the ratio has left {low:g} to {high:g}; its gradient is bounded, not 0"
        loss = f"-A * log-prob after * (ratio cut to {low:g} to {high:g}), as one more step sees it"
    ratio = ("ratio", "grpo.py", RATIO)
    if names["importance"] == "sequence":
        ratio = ("ratio", "relatives.py",
                 "exp(mean over the response of log-prob after - log-prob before)")
    step = f"the sum of weight * loss over its tokens, aggregation = {names['aggregation']}"
    if in_loss and "kl" in columns:
        step += f", + kl_coef {kl_coef:g} * the same of their KL"
    file = "relatives.py" if names["relative_loss"] else "grpo.py"
    kl = [LOGPROBS[1], ("KL", "loss.py", KL[names["kl_estimator"]])] if "kl" in columns else []
    print_formulas([
        LOGPROBS[0], *kl, ("advantage", "relatives.py", advantage),
        ("log-prob, after", "loss.py", NEW), ratio, ("clipped", file, clipped),
        ("loss", file, loss), ("loss of a step", "relatives.py", step + beside(names))])


def print_formulas(formulas):
    """formulas: [(column, file, formula)]."""
    print("\nwhere the columns come from: the file, the formula")
    print_lines(*formulas)


# --------------------------------------------------------------------------------------------------
# the picture


def draw(columns, names):
    """Save the picture in `out`: one panel above the other, all over the same tokens."""
    import matplotlib

    matplotlib.use("Agg")  # a file, not a window
    import matplotlib.pyplot as plt

    n, kl = len(columns["token"]), sum(columns.get("kl", [0.0]))
    columns = {name: cells[-LONGEST:] for name, cells in columns.items()}
    shown = len(columns["token"])
    panels = [draw_scores, draw_logprobs, draw_kl, draw_ratios]
    if script == "ppo":
        panels = [draw_logprobs, draw_rewards, draw_values, draw_advantages, draw_ratios]

    figure, axes = plt.subplots(len(panels), 1, figsize=(12.8, 7.2))
    for axis, panel in zip(axes, panels, strict=True):
        if panel is not draw_scores:  # its bars are responses
            axis.set_xlim(-0.7, shown - 0.3)
            axis.set_xticks(range(shown), [""] * shown)
        axis.margins(y=0.15)
        panel(axis, columns, names)
        axis.tick_params(labelsize=9)
        axis.grid(axis="y", alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(fontsize=9, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.05))

    # parse_math=False: a $ in a text is a dollar
    texts = [text if text == "EOS" else text[1:].removesuffix("'") for text in columns["token"]]
    axes[-1].set_xticks(range(shown), texts, rotation=0 if shown <= 12 else 90, parse_math=False,
                        fontsize=11 if shown <= 40 else 8, family="monospace")
    title = f"{prompt!r} -> {response_text(0, names)}"
    title = title if len(title) <= 100 else f"{title[:98]}.."
    score = names["batch"]["scores"][0].item()
    below = f"{os.path.basename(os.path.normpath(run))}, iteration {iteration}: "
    below += f"score {score:.2f}, KL {kl:.2f} nats"
    below += "" if shown == n else f" (the last {shown} of {n} tokens)"
    figure.suptitle(f"{title}\n{below}", fontsize=13, parse_math=False)
    figure.align_ylabels()
    figure.tight_layout()
    figure.savefig(out, dpi=150)
    print(f"\nsaved {out}")


def draw_scores(axis, columns, names):
    """The scores of a group, with their mean and the range of one deviation around it."""
    size = names["group_size"]
    scores, advantages = names["scores"][:size].double(), names["batch"]["advantages"][:size, 0]
    mean, deviation = scores.mean().item(), scores.std().item()
    x = range(1, size + 1)
    bars = axis.bar(x, scores.tolist(), width=0.6, zorder=3, color=["C0", *["0.75"] * (size - 1)])
    axis.bar_label(bars, [f"{a:+.2f}" for a in advantages.tolist()], fontsize=9, zorder=5)
    axis.axhline(mean, color="C3", zorder=4, label=f"mean {mean:.2f}")
    axis.axhspan(mean - deviation, mean + deviation, color="C3", alpha=0.1,
                 label=f"deviation {deviation:.2f}")
    axis.set_xticks(x, [f"response {i}" if size <= 12 else str(i) for i in x])
    axis.margins(y=0.25)
    axis.set_ylabel("score")
    axis.set_title("the group: each bar a response, its advantage above it; "
                   "the panels below: response 1", fontsize=10)


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
    if names.get("kl_in", "reward") == "reward":
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
    """The ratio of each token after the update, and the range beyond which the clip may stop it."""
    x = range(len(columns["token"]))
    low, high = 1 - names["cliprange"], 1 + names.get("cliprange_high", names["cliprange"])
    axis.axhline(1, color="0.7", linewidth=0.8)
    axis.axhspan(low, high, color="C2", alpha=0.12, label=f"{low:g} to {high:g}")
    axis.plot(x, columns["ratio"], "o", color="C0", markersize=5, label="ratio")
    clipped = [i for i in x if columns["clipped"][i]]
    axis.plot(clipped, [columns["ratio"][i] for i in clipped], "o", color="C3", markersize=8,
              label="clipped")
    axis.set_ylabel("ratio")


# --------------------------------------------------------------------------------------------------
# from here on: read the run, run one iteration, print

if not prompt.strip():
    raise BadConfig('prompt is empty; type --prompt="123+456="')
if out:
    check_picture(out)
check_text(prompt, "command line: the prompt")
script, config, checkpoint, iteration = read_run()
keys, notes = keys_of_one_iteration(config, iteration)
names = one_more_iteration(script, config, checkpoint, iteration, keys)
after = read_again(names)
columns = (ppo_columns if script == "ppo" else grpo_columns)(names, after)

steps, n = names["steps"], len(columns["token"])
others = config["batch_size"] // config.get("group_size", 1) - 1
print(f"\none response of {run}: iteration {iteration} of {script}.py, "
      f"from {os.path.basename(checkpoint)}\n")
finished = "cut off at max_new_tokens"
if names["batch"]["finished"][0]:
    ended = response_ids(0, names)[-1] in names["tokenizer"].eos_ids
    finished = "it ends with EOS" if ended else "it ends with a stop string"
size = f", {config['group_size']} responses to each" if script == "grpo" else ""
print_lines(
    ("prompt", repr(prompt)),
    ("response", response_text(0, names)),
    ("", f"length in tokens: {n}, {finished}"),
    ("batch", f"this prompt and {others} prompts of the run's own{size}"),
    ("update", f"optimizer steps: {steps}, learning rate {names['policy_lr']:g}"),
    *(("note", note) for note in notes))
print()
(print_ppo if script == "ppo" else print_grpo)(columns, names)
if out:
    draw(columns, names)

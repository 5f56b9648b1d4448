"""
The figures of a run: what the log says of a batch, the checks of log-probs that should be equal,
and the lines that a terminal shows.

B responses in T columns, b of them in the W columns of a micro-batch: see the head of batches.py.
"""
import contextlib
import random
import re
import textwrap

import torch

from errors import visible
from formulas import masked_mean, masked_sum


def summarize(batch, prefix, reward_names=(), importance_cap=0.0, rows=None):
    """
    The figures of a batch, {"prefix/name": number}: means over its responses. KL and entropy are in
    nats a response, estimated from the sampled tokens (k1). Of several reward_names the mean of
    each, over the responses to which it applies; "scored": the share of responses with a score.
    rows: the data's, for the figures of each source.
    """
    mask = batch["response_mask"]  # (B, T)
    figures = dict(scores=mean_of(batch["scores"]))
    if batch["scores"].isnan().any():
        figures["scored"] = (~batch["scores"].isnan()).double().mean()
    if "old_logprobs" in batch:
        figures["entropy"] = -batch["old_logprobs"].sum(1).mean()
    if {"old_logprobs", "ref_logprobs"} <= batch.keys():
        figures["kl"] = (batch["old_logprobs"] - batch["ref_logprobs"]).sum(1).mean()
    figures["length"] = mask.sum(1).double().mean()
    figures["finished"] = batch["finished"].double().mean()
    if "accuracy" in batch and not batch["accuracy"].isnan().any():  # NaN: a row without answer
        figures["accuracy"] = batch["accuracy"].mean()
        figures["thinks"] = batch["thinks"].mean()
    for name in reward_names if len(reward_names) > 1 else ():
        figures[f"reward/{name}"] = mean_of(batch[f"reward/{name}"])
    if "turn_rewards" in batch:  # responses of several turns
        from options.environment import figures_of_turns

        figures |= figures_of_turns(batch)
    figures = {f"{prefix}/{name}": x.item() for name, x in figures.items()}
    if rows and rows.sources:
        from options.sources import figures_by_source

        figures |= figures_by_source(batch, rows, prefix, reward_names)
    if importance_cap > 0:
        from options.importance import figures_of_importance

        figures |= figures_of_importance(batch, importance_cap, prefix)
    return figures


def mean_of(scores):
    """The mean of the scores (B,) that are not NaN; 0 where all are NaN."""
    scored = scores[~scores.isnan()]
    return scored.sum() / max(len(scored), 1)


def explained_variance(values, returns, mask, unit=1.0):
    """The values' share in the variance of the returns (B, T): 1 is perfect; of one token 0."""
    return returns.new_zeros(()) if mask.sum() < 2 else (
        1 - (returns - values)[mask].var() / returns[mask].var().clamp(min=1e-8 * unit**2))


def add_up(sums, mask, tensors):
    """
    Add the tensors {name: (b, W)} of a micro-batch to sums, {name: (sum, count)}. The sum is over
    the places where mask is True; the count is their number. See parallel.all_reduce_metrics.
    """
    for name, x in tensors.items():
        pair = torch.stack([masked_sum(x.detach().double(), mask), mask.sum()])
        sums[name] = sums.get(name, 0) + pair


def gap(log_ratio, mask, dtype):
    """
    The distance in nats of two log-probs of each token that should be equal: a scalar tensor.
    log_ratio: their difference, (B, T). In 32 and 64 bits the gap is the largest difference where
    mask is True. In 16 bits it is the mean, because rounding makes single differences large.
    """
    log_ratio = torch.where(mask, log_ratio.detach().abs(), 0)
    if dtype in ("bfloat16", "float16"):
        return masked_mean(log_ratio, mask)
    return torch.cat([log_ratio.flatten(), log_ratio.new_zeros(1)]).max()  # 0 if there are no rows


def gap_limit(dtype, temperature):
    """
    The largest gap that rounding may cause, in nats. In float32 most tokens have about 1e-5; 1.5e-4
    was seen once, for one unlikely token of 16,000. A temperature below 1 divides the
    logits' rounding errors, so it divides the limit, too.
    """
    return {"float64": 1e-10, "float32": 5e-4}.get(dtype, 0.02) / min(temperature, 1.0)


def peak_memory_mib(device):
    """The most memory of this process so far: allocated by torch on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    with contextlib.suppress(FileNotFoundError), open("/proc/self/status", encoding="utf-8") as f:
        return next(int(line.split()[1]) / 1024 for line in f if line.startswith("VmHWM"))
    return 0.0  # not Linux


# -------------------------------------------------------------------------------------------------
# what a run prints: a line of 80 columns for an iteration; figures and samples for an evaluation

# the columns of an iteration's line: name -> metric, format (z: no -0.00)
COLUMNS = {
    "score": ("objective/scores", "z5.2f"),
    "kl": ("objective/kl", "z4.2f"),
    "acc": ("objective/accuracy", "4.2f"),
    "len": ("objective/length", "4.0f"),
    "flat": ("objective/flat_groups", "3.1f"),
    "ev": ("val/explained_variance", "z5.2f"),
    "loss": ("loss/sft", "6.4f"),
    "pair loss": ("loss/preference", "6.4f"),
    "right": ("train/accuracy", "4.2f"),
    "tok/s": ("time/tokens_per_second", "4.0f"),
}


def iteration_line(record, max_iters, minutes):
    """The line of an iteration: the first COLUMNS of its record that fit, and the time left."""
    columns = [f"{name} {short(record[metric], form)}"
               for name, (metric, form) in COLUMNS.items() if metric in record]
    first, last = f"iter {record['iteration']} of {max_iters}", f"{minutes:.1f} min left"
    while len(line := "  ".join([first, *columns, last])) > 80 and columns:
        columns.pop()
    return line


def short(x, form):
    """A number in this form; a huge one as 2.7e+21."""
    return f"{x:{form if abs(x) < 1e6 else '.2g'}}"


def evaluation_lines(iteration, record, samples):
    """The lines of an evaluation: its figures, and two samples, drawn anew each time."""
    # the figures of a single source are only in the log; `thinks` is left out where it is 0.
    # \xa0: a blank at which no line breaks
    figures = [f"{name[5:]}\xa0{short(x, f'z.{3 if abs(x) < 1 else 2}f')}"
               for name, x in record.items()
               if re.fullmatch("eval/(reward/)?[^/]+", name) and (x or name != "eval/thinks")]
    lines = [textwrap.fill(
        "  ".join(figures), 100, initial_indent=f"eval {iteration}: ", subsequent_indent="    ",
        break_long_words=False, break_on_hyphens=False).replace("\xa0", " ")]
    for sample in random.Random(iteration).sample(samples, min(2, len(samples))):
        prompt = sample["prompt"]
        if not isinstance(prompt, str):
            from options.chats import last_question

            prompt = last_question(prompt)
        end = "" if sample["finished"] else " [cut off]"
        lines += [f"    > {one_line(prompt, 74)}",
                  f"      {one_line(sample['text'], 74 - len(end)) or '[empty]'}{end}"]
    return "\n".join(lines)


def one_line(text, width):
    """A text as one line of at most `width` letters; a longer one loses its middle."""
    text = " ".join(visible(text).split())
    half = (width - 5) // 2
    return text if len(text) <= width else f"{text[:half].rstrip()} ... {text[-half:].lstrip()}"

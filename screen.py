"""
What a run shows in a terminal: the line of an iteration, in 80 columns; that of an evaluation, in
100, with two samples; and a warning when its policy has broken. log.jsonl has all numbers.
"""
import unicodedata

from errors import visible
from prompts import hashed_row

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


def iteration_line(record, done, max_iters, minutes):
    """The line of an iteration: the first COLUMNS of its record that fit, and the time left."""
    columns = [f"{name} {record[metric]:{form}}"
               for name, (metric, form) in COLUMNS.items() if metric in record]
    first, last = f"iter {done}/{max_iters}", f"{minutes:.1f} min left"
    while len(line := "  ".join([first, *columns, last])) > 80 and columns:
        columns.pop()
    return line


def evaluation_lines(iteration, record, samples):
    """The lines of an evaluation: its figures, and two of its samples, each time two others."""
    lines = [f"eval {iteration}:"]
    for name, x in record.items():
        figure = f"{name[5:]} {x:z.{3 if abs(x) < 1 else 2}f}"
        if len(lines[-1]) + 2 + len(figure) > 100:
            lines.append("   ")
        lines[-1] += f" {figure}" if lines[-1].endswith((":", "   ")) else f"  {figure}"
    first = hashed_row(len(samples), "shown", iteration)
    for i in dict.fromkeys([first, (first + len(samples) // 2) % len(samples)]):
        prompt = samples[i]["prompt"]
        if not isinstance(prompt, str):  # a chat: its last question
            users = [message for message in prompt if message["role"] == "user"]
            prompt = (users or prompt)[-1]["content"]
        end = "" if samples[i]["finished"] else " [cut off]"
        lines += [f"    > {cut(prompt, 74)}",
                  f"      {cut(samples[i]['text'], 74 - len(end)) or '[empty]'}{end}"]
    return "\n".join(lines)


def cut(text, width):
    """A text as one line of at most `width` columns: of a longer one the beginning and the end."""
    text = " ".join(visible(text).split())
    if columns_of(text) <= width:
        return text
    half, parts = (width - 5) // 2, []
    for letters in (text, text[::-1]):
        while columns_of(letters) > half:
            letters = letters[:half] if len(letters) > half else letters[:-1]
        parts.append(letters)
    return f"{parts[0].rstrip()} ... {parts[1][::-1].lstrip()}"


def columns_of(text):
    """How many columns of a terminal a text takes: Chinese letters take two."""
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def how_broken(record, finished):
    """
    "", or how the policy of an iteration is broken: its responses do not end any more (at most two
    thirds as many as in the first iteration, `finished`), and it is far from the reference, or has
    moved far in one update: 0.3 nats a token. A policy that learns does one of the two at most.
    """
    kl, ends = record.get("objective/kl"), record["objective/finished"]
    moved = max((kl or 0) / max(record["objective/length"], 1),
                record.get("policy/approx_kl", 0))
    if not moved > 0.3 or ends > finished * 2 / 3:
        return ""
    far = f"its KL is {kl:.3g} nats, " if kl is not None else ""
    return (f"the policy is broken: {far}{ends:.0%} of its responses end, {finished:.0%} did at "
            "first. See 'KL runs away' in docs/diagnosis.md: mostly the learning rate is too large")

"""
The reports of a run: the figures of a batch, a few samples, the files log.jsonl and samples.jsonl,
the lines on the terminal. Nothing here decides anything.
"""
import contextlib
import hashlib
import json
import math
import os
import resource
import sys
import time

import torch

from errors import Stop, one_line, say, warn
from loss import gap, importance_weights, kl_estimate, masked_sum
from parallel import rank_and_size
from rollout import texts_of
from together import together

# --------------------------------------------------------------------------------------------------
# figures


def summarize(batch, prefix, reward_names=(), importance_cap=0.0, age=0):
    """
    The figures of a batch, {"prefix/name": number}: means over its responses. age: the number of
    updates since the policy that sampled the batch. With an importance_cap there are also the
    figures of the weights (loss.importance_weights); and in KL and entropy of an older batch each
    token counts with its weight.

    KL and entropy are in nats a response, estimated from the sampled tokens (k1); they need the
    models' columns in the batch. reward_names: if there are several, the mean of each. Responses to
    which a reward does not apply are left out of its mean. "scored": the share of the responses
    that have a score, if not all have one.
    """
    mask = batch["response_mask"]  # (B, R)
    figures = dict(scores=mean_of(batch["scores"]))
    if batch["scores"].isnan().any():
        figures["scored"] = (~batch["scores"].isnan()).double().mean()
    if "old_logprobs" in batch:
        weights = importance_weights(batch, importance_cap if age else 0)  # 1, if 0
        figures["entropy"] = -(batch["old_logprobs"] * weights).sum(1).mean()
    if {"old_logprobs", "ref_logprobs"} <= batch.keys():
        log_ratio = batch["old_logprobs"] - batch["ref_logprobs"]
        figures["kl"] = (log_ratio * weights).sum(1).mean()
    figures["length"] = mask.sum(1).double().mean()
    figures["finished"] = batch["finished"].double().mean()
    if not batch["accuracy"].isnan().any():  # NaN: the data has no answers
        figures["accuracy"] = batch["accuracy"].mean()
        figures["thinks"] = batch["thinks"].mean()
    if len(reward_names) > 1:
        for name in reward_names:
            figures[f"reward/{name}"] = mean_of(batch[f"reward/{name}"])
    if "turn_rewards" in batch:  # responses of several turns
        is_text = batch["attention_mask"][:, -mask.shape[1]:]  # (B, R)
        before = torch.nn.functional.pad(mask[:, :-1], (1, 0))
        figures["turns"] = (mask & ~before).sum(1).double().mean()
        figures["environment_share"] = ((is_text & ~mask).sum(1).double() / is_text.sum(1)).mean()
        if "failed_calls" in batch:
            figures["failed_calls"] = batch["failed_calls"].double().mean()
    figures = {f"{prefix}/{name}": x.item() for name, x in figures.items()}
    if importance_cap > 0:
        weights = importance_weights(batch, importance_cap)[mask]  # (tokens,)
        figures |= figures_of_weights(weights, importance_cap)
    return figures


def figures_of_weights(weights, cap):
    """
    The figures of importance weights, (tokens,): their mean, the share of weights at the cap, and
    the effective sample size as a share of the tokens (Kong, 1992).
    """
    capped = weights == cap  # in their own dtype: 1.1 has other bits in float32 than in float64
    weights = weights.double()
    worth = weights.sum() ** 2 / (weights**2).sum().clamp(min=1e-30)  # tokens
    return {"policy/importance": weights.mean().item(),
            "policy/importance_capped": capped.double().mean().item(),
            "policy/effective_tokens": (worth / len(weights)).item()}


def mean_of(scores):
    """The mean of the scores (B,) that are not NaN; 0 where all are NaN."""
    known = scores[~scores.isnan()]
    return known.mean() if len(known) else torch.zeros(())


def deviation_of(scores):
    """The standard deviation of the scores (B,) that are not NaN; 0 if there are fewer than 2."""
    known = scores[~scores.isnan()]
    return known.std() if len(known) > 1 else torch.zeros(())


def samples_of(batch, rows, row_numbers, tokenizer, iteration, reward_names):
    """
    The first responses of a batch as dicts for samples.jsonl; row_numbers: of their data rows:

        {"iteration": 20, "row": 0, "prompt": "123+456=", "text": "579", "finished": true,
         "length": 4, "scores": {"scores": 1.5, "accuracy": 1.0, "kl": 0.25, "reward/...": ...}}

    Of several turns text is the last turn, and "messages" has all of them.

    row counts the held-out prompts from 0; prompt is the data's, text or messages; length is in
    tokens, the EOS included. scores has the names of docs/metrics.md, for this response only; in a
    training batch also "advantage", the mean over the tokens.
    """
    n = len(row_numbers)
    columns = dict(scores=batch["scores"], accuracy=batch["accuracy"])  # (B,) each
    if {"old_logprobs", "ref_logprobs"} <= batch.keys():
        columns["kl"] = (batch["old_logprobs"] - batch["ref_logprobs"]).sum(1)
    if len(reward_names) > 1:
        columns |= {f"reward/{name}": batch[f"reward/{name}"] for name in reward_names}
    if "advantages" in batch:
        mask = batch["response_mask"]
        columns["advantage"] = torch.where(mask, batch["advantages"], 0).sum(1) / mask.sum(1)
    columns = {name: x[:n].tolist() for name, x in columns.items()}
    samples = []
    for i, number in enumerate(row_numbers):
        mask = batch["response_mask"][i]  # (R,)
        scores = {name: x[i] for name, x in columns.items()}
        texts = texts_of([(rows[number], ())], {name: batch[name][i:i + 1] for name in (
            "tokens", "attention_mask", "response_mask")}, tokenizer)
        samples.append(dict(
            iteration=iteration, row=number, prompt=rows[number]["prompt"],
            text=texts["completions"][0], finished=bool(batch["finished"][i]),
            length=int(mask.sum()),
            scores={name: x for name, x in scores.items() if math.isfinite(x)}))
        if "dialogues" in texts:
            samples[-1]["messages"] = texts["dialogues"][0]
    return samples


def add_up(sums, mask, tensors):
    """
    Add tensors {name: (b, R)} of a micro-batch to sums {name: (sum, count)}: the sum where the mask
    (b, R) is True, and the number of these places. sums may be empty at first. In the end
    parallel.all_reduce_metrics computes the mean over all micro-batches and ranks.
    """
    for name, x in tensors.items():
        pair = torch.stack([masked_sum(x.detach().double(), mask), mask.sum()])
        sums[name] = sums.get(name, 0) + pair


def measure(sums, mb, mask, logprobs, dtype, age, steps, figures):
    """
    Adds the figures of a micro-batch of an update to sums: figures, {name: (b, R)};
    policy/approx_kl, the KL of this update; and, in the first step, if the batch was sampled by a
    policy `age` > 0 updates older, policy/off_policy_kl, the KL to that policy.

    mb: the micro-batch. mask: (b, R), its tokens that count. logprobs: (b, R), of the policy now.
    steps: made in this update so far. Returns the distance of the log ratios from 0, see loss.gap:
    in the first step it is only rounding.
    """
    kls = {"policy/approx_kl": kl_estimate(mb["old_logprobs"], logprobs, "k3")}
    if steps == 0 and age > 0:
        kls["policy/off_policy_kl"] = kl_estimate(mb["sampler_logprobs"], logprobs, "k3")
    add_up(sums, mask, figures | kls)
    return gap(logprobs - mb["old_logprobs"], mb["response_mask"], dtype)


def hash_of(tokens):
    """A hash of a tensor of tokens: two runs that sampled the same tokens have the same hash."""
    return hashlib.blake2b(tokens.cpu().numpy().tobytes(), digest_size=8).hexdigest()


def is_better(score, best):
    """Whether a mean score is above the best so far (None: no score yet) by more than rounding."""
    return best is None or score - best > 1e-6 * max(abs(score), abs(best))


def peak_memory_mib(device):
    """The most memory of this process so far: allocated by torch on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    # on Linux getrusage would also count the parent's memory at the start of this process
    if os.path.exists("/proc/self/status"):
        with open("/proc/self/status", encoding="utf-8") as f:
            return next(int(line.split()[1]) / 1024 for line in f if line.startswith("VmHWM"))
    unit = 2**20 if sys.platform == "darwin" else 1024  # macOS counts bytes, others KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


# --------------------------------------------------------------------------------------------------
# log.jsonl has one JSON object a line, one line an iteration; samples.jsonl has one line for each
# kept response of an evaluation, with its scores; rollouts.jsonl, with the key save_rollouts, has
# the same for the responses of the training

LOG_FILES = "log.jsonl", "samples.jsonl", "rollouts.jsonl"


def write_log(out_dir, records, name="log.jsonl"):
    """
    A collective. Rank 0 appends records, dicts with an "iteration", to one of LOG_FILES: all of
    their lines or none. A float that is NaN or infinite becomes null, because JSON has no such
    numbers. Raises Stop, on all ranks, when the disk is full.
    """
    lines = ""
    for record in records:
        finite = {key: None if isinstance(x, float) and not math.isfinite(x) else x
                  for key, x in record.items()}
        lines += json.dumps(finite, allow_nan=False) + "\n"
    file = os.path.join(out_dir, name)
    together((lambda: append(file, lines)) if rank_and_size()[0] == 0 else lambda: None)


def append(file, text):
    """Write text at the end of a file; where the disk is full, the file stays as it was."""
    size = os.path.getsize(file) if os.path.exists(file) else 0
    try:
        with open(file, "a", encoding="utf-8") as f:
            f.write(text)
    except OSError as e:
        if os.path.exists(file):
            os.truncate(file, size)
        raise Stop(f"{file} cannot be written: {e.strerror}; it ends with the iteration before."
                   " Make room, and resume with the same command") from e


def cut_log(out_dir, iteration):
    """
    A run resumes before this iteration, so it and later ones will be logged again: delete their
    lines, and lines that cannot be read, from the logs. log.jsonl then exists, though it may be
    empty. A warning names missing iterations.
    """
    expected = set(range(iteration))
    for name in LOG_FILES:
        file = os.path.join(out_dir, name)
        kept = [(i, line) for i, line in read_log(file) if i < iteration]
        if name == "log.jsonl" or os.path.exists(file):
            with open(file + ".tmp", "w", encoding="utf-8") as f:
                f.writelines(f"{line}\n" for _, line in kept)
            os.replace(file + ".tmp", file)
            missing = sorted(expected - {i for i, _ in kept})
            if missing:
                warn(f"{file} was cut or damaged: of the iterations before {iteration} it lacks "
                     f"{len(missing)}, from {missing[0]} to {missing[-1]}, and the run goes on")
        # the iterations that samples.jsonl must have; of rollouts.jsonl it is not known
        expected = {i for i, line in kept if '"eval/' in line} if name == "log.jsonl" else set()


def read_log(file):
    """[(iteration, line)] of a log, without lines that cannot be read: a kill may leave one."""
    if not os.path.exists(file):
        return []
    with open(file, encoding="utf-8", errors="replace") as f:
        text = f.read()
    found = []
    for line in text.split("\n"):
        with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError):
            found.append((int(json.loads(line)["iteration"]), line))
    return found


# --------------------------------------------------------------------------------------------------
# lines for the terminal


def print_models(models, optimizers):
    """A line for each of {name: model}: its size, and the peak learning rate if it is trained."""
    for name, model in models.items():
        count = sum(p.numel() for p in model.parameters())
        state = "frozen"
        if name in optimizers:
            lr = optimizers[name].param_groups[0]["lr"] / optimizers[name].scale
            state = f"trained, learning rate {lr:g}"
        print(f"{name:<12} {count / 1e6:8.2f}M parameters  {state}")


def print_evaluation(iteration, record):
    """The figures eval/... of a record, in as many lines as they take."""
    line, between = f"eval {iteration}:", " "
    for name in (name for name in record if name.startswith("eval/")):
        figure = f"{name[5:]} {record[name]:.3f}"
        if len(line + between + figure) > WIDTH:
            print(line)
            line, between = "   ", " "
        line, between = line + between + figure, " | "
    print(line)


def print_samples(samples):
    """A line for each of some samples: the prompt, the response, the score."""
    for sample in samples:
        prompt, score = sample["prompt"], sample["scores"].get("scores")
        if not isinstance(prompt, str):
            prompt = " | ".join(f"{message['role']}: {message['content']}" for message in prompt)
        scored = "no score" if score is None else f"score {score:.2f}"
        print(f"    {one_line(prompt, 300)} -> {one_line(answer_of(sample), 300)}  {scored}")


def answer_of(sample):
    """The response of a sample as one text; of several turns, with the messages in between."""
    if "messages" not in sample:
        return sample["text"]
    return " ".join(m["content"].strip() if m["role"] == "assistant" else
                    f"[{m['role']}: {m['content'].strip()}]" for m in sample["messages"])


def say_nothing_learnt(iteration, flat, counted):
    """
    Say why GRPO makes no step. flat (groups,): which groups have equal scores; counted (B, R): the
    tokens that are trained on.
    """
    say(f"iteration {iteration}: nothing to learn: {int(flat.sum())} of {len(flat)} groups have "
        f"equal scores, {int((~counted.any(1)).sum())} of {len(counted)} responses are masked; no "
        "step")


# the columns of an iteration's line: name -> metric, format (z: no -0.00). The line has those that
# are in the record, in this order, as many as fit into WIDTH; log.jsonl has all
COLUMNS = {
    "score": ("objective/scores", "z6.2f"),
    "kl": ("objective/kl", "z5.2f"),
    "acc": ("objective/accuracy", "4.2f"),
    "len": ("objective/length", "6.1f"),
    "flat": ("objective/flat_groups", "4.2f"),
    "loss": ("loss/sft", "6.4f"),
    "preference": ("loss/preference", "6.4f"),
    "right": ("train/accuracy", "4.2f"),
    "teacher": ("loss/score", "6.4f"),
    "ptx": ("loss/ptx", "6.4f"),
    "clip": ("policy/clipfrac", "5.3f"),
    "ev": ("val/explained_variance", "z5.2f"),
    "tok/s": ("time/tokens_per_second", "5.0f"),
    "MiB": ("mem/peak_mib", "5.0f"),
    "of peak": ("time/mfu", "5.1%"),
}
WIDTH = 100  # of a line, in characters


def progress(record, start, done, max_iters, began):
    """
    The line of an iteration: the COLUMNS that its record has, the run's time so far, and the time
    left. start: the iteration at which this process began; done: how many are done; began: the time
    of its start, by time.time.
    """
    spent = time.time() - began
    line = f"iter {done:>{len(str(max_iters))}}/{max_iters}"
    end = f"  {clock(spent):>6}, {clock(spent / (done - start) * (max_iters - done)):>7} left"
    for name, (metric, form) in COLUMNS.items():
        column = f"  {name} {record[metric]:{form}}" if metric in record else ""
        if len(line + column + end) <= WIDTH:
            line += column
    return line + end


def clock(seconds):
    """Seconds as 45s, 5m07s or 2h05m."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes == 0:
        return f"{rest}s"
    if minutes < 60:
        return f"{minutes}m{rest:02}s"
    return f"{minutes // 60}h{minutes % 60:02}m"

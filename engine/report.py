"""
What a run says of itself: the figures of a scored batch, a few samples, the models it holds. It decides nothing.
"""
import hashlib
import os
import resource
import time

import torch

from engine.adapters import Adapted
from loss import masked_sum


def peak_memory_mib(device):
    """The most memory that this process has held: allocated by torch on a GPU, resident in all on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    if os.path.exists("/proc/self/status"):  # Linux: getrusage would count what our parent held when it started us
        with open("/proc/self/status", encoding="utf-8") as f:
            return next(int(line.split()[1]) / 1024 for line in f if line.startswith("VmHWM"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def summarize(batch, prefix, reward_names=()):
    """
    What a batch says of the policy: means over responses; KL and entropy in nats a response, sampled (k1), once the models
    have run.
    """
    mask = batch["response_mask"]
    record = dict(scores=batch["scores"].mean())
    if "ref_logprobs" in batch:
        record |= dict(kl=(batch["old_logprobs"] - batch["ref_logprobs"]).sum(1).mean())
    if "old_logprobs" in batch:
        record |= dict(entropy=-batch["old_logprobs"].sum(1).mean())
    record |= dict(length=mask.sum(1).double().mean(), finished=batch["finished"].double().mean())
    if not batch["accuracy"].isnan().any():
        record |= dict(accuracy=batch["accuracy"].mean(), thinks=batch["thinks"].mean())
    if len(reward_names) > 1:
        record |= {f"reward/{name}": batch[f"reward/{name}"].mean() for name in reward_names}
    return {f"{prefix}/{k}": x.item() for k, x in record.items()}


def is_better(score, best):
    """Whether a mean score beats the best so far (None: there is none), by more than what rounding may do."""
    return best is None or score - best > 1e-6 * max(abs(score), abs(best))


def print_samples(batch, rows, tokenizer, n=2):
    """The first n prompts with their responses and scores."""
    R = batch["response_mask"].shape[1]
    for row, tokens, mask, score in zip(rows[:n], batch["tokens"], batch["response_mask"], batch["scores"], strict=False):
        print(f"    {row['prompt']!r} -> {tokenizer.decode(tokens[-R:][mask].tolist())!r}  score {score.item():.2f}")

COLUMNS = {"score": "objective/scores .2f", "kl": "objective/kl .2f", "acc": "objective/accuracy .2f",
           "len": "objective/length .1f", "flat groups": "objective/flat_groups .2f", "pg": "loss/policy .4f",
           "vf": "loss/value .4f", "clip": "policy/clipfrac .3f", "ev": "val/explained_variance .2f"}


def progress(record, start, done, max_iters, tokens, began):
    """An iteration's line: what its record has of COLUMNS, its phases, and how long the rest takes at the speed since `start`."""
    columns = [f"{name} {record[key]:{kind}}" for name, (key, kind) in ((n, c.split()) for n, c in COLUMNS.items())
               if key in record]
    phases = " ".join(f"{phase} {record[f'time/{phase}']:.1f}s" for phase in ("rollout", "score", "update"))
    return " | ".join([f"iter {done}/{max_iters}", *columns, phases, f"{tokens / record['time/iteration']:.0f} tok/s",
                       f"eta {(time.time() - began) / (done - start) * (max_iters - done):.0f}s"])


def print_models(models):
    """A line for each of {name: model}: its size, what of it is trained, and on whose trunk it stands."""
    for name, model in models.items():
        count, trained = sum(p.numel() for p in model.parameters()), any(p.requires_grad for p in model.parameters())
        line = f"{name:<12} {count / 1e6:8.2f}M parameters  {'trained' if trained else 'frozen'}"
        if isinstance(model, Adapted):
            parts = (["an adapter"] if model.layers else []) + (["a head"] if model.head == "scalar" else [])
            line += f": {' and '.join(parts)} on {next(n for n, m in models.items() if m is model.base)}"
        print(line)


def new_sums(names, device):
    """{name: (sum, count)}, both 0, for add_up: a mean over all micro-batches and ranks."""
    return {name: torch.zeros(2, dtype=torch.float64, device=device) for name in names}


def add_up(sums, mask, tensors):
    """
    Add tensors {name: (b, R)} of a micro-batch to sums {name: (2,)}: the sum where mask is True, and
    how many those are.
    """
    for name, x in tensors.items():
        sums[name] += torch.stack([masked_sum(x.detach().double(), mask), mask.sum()])


def hash_of(tokens):
    """A hash of a tensor of tokens: two runs that sampled the same have the same."""
    return hashlib.blake2b(tokens.cpu().numpy().tobytes(), digest_size=8).hexdigest()

"""
What a run says of itself: the figures of a batch, a few samples, the models, a line an iteration.
Nothing here decides anything.
"""
import hashlib
import math
import os
import resource
import sys
import time

import torch

from errors import say
from loss import gap, importance_weights, kl_estimate, masked_sum

# --------------------------------------------------------------------------------------------------
# figures


def summarize(batch, prefix, reward_names=(), importance_cap=0.0, age=0):
    """
    The figures of a batch, {"prefix/name": number}: means over its responses. age: how many updates
    ago the policy was that has sampled it. With importance_cap each token of KL and entropy of an
    older batch counts with its importance weight (loss.importance_weights); and there is the mean
    of the weights over all tokens, and at which share of them the cap was reached.

    KL and entropy are in nats a response, estimated from the sampled tokens (k1); they are there
    once the models have read the batch. reward_names: where there are several, each one's mean.
    Responses to which a reward does not apply are left out of its mean; how many of all have a
    score at all is "scored", if not all have one.
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
    figures = {f"{prefix}/{name}": x.item() for name, x in figures.items()}
    if importance_cap > 0:
        weights = importance_weights(batch, importance_cap)[mask]  # (tokens,)
        figures["policy/importance"] = weights.mean().item()
        figures["policy/importance_capped"] = (weights == importance_cap).double().mean().item()
    return figures


def mean_of(scores):
    """The mean of the scores (B,) that are there: NaN is no score. 0 where none is there."""
    there = scores[~scores.isnan()]
    return there.mean() if len(there) else torch.zeros(())


def deviation_of(scores):
    """The standard deviation of the scores (B,) that are there; 0 where there are fewer than 2."""
    there = scores[~scores.isnan()]
    return there.std() if len(there) > 1 else torch.zeros(())


def samples_of(batch, rows, picked, tokenizer, iteration, reward_names):
    """
    The first of a batch's responses as dicts for samples.jsonl; picked: the numbers of their rows:

        {"iteration": 20, "row": 0, "prompt": "123+456=", "text": "579", "finished": true,
         "length": 4, "scores": {"scores": 1.5, "accuracy": 1.0, "kl": 0.25, "reward/...": ...}}

    row counts the held-out prompts from 0; prompt is the data's, text or messages; length is in
    tokens, the EOS included. scores has the names of docs/metrics.md, each for this response alone.
    """
    n, R = len(picked), batch["response_mask"].shape[1]
    columns = dict(scores=batch["scores"], accuracy=batch["accuracy"])  # (B,) each
    if {"old_logprobs", "ref_logprobs"} <= batch.keys():
        columns["kl"] = (batch["old_logprobs"] - batch["ref_logprobs"]).sum(1)
    if len(reward_names) > 1:
        columns |= {f"reward/{name}": batch[f"reward/{name}"] for name in reward_names}
    columns = {name: x[:n].tolist() for name, x in columns.items()}
    samples = []
    for i, number in enumerate(picked):
        mask = batch["response_mask"][i]  # (R,)
        scores = {name: x[i] for name, x in columns.items()}
        samples.append(dict(
            iteration=iteration, row=number, prompt=rows[number]["prompt"],
            text=tokenizer.decode_response(batch["tokens"][i, -R:][mask].tolist()),
            finished=bool(batch["finished"][i]), length=int(mask.sum()),
            scores={name: x for name, x in scores.items() if math.isfinite(x)}))
    return samples


def add_up(sums, mask, tensors):
    """
    Add tensors {name: (b, R)} of a micro-batch to sums {name: (sum, count)}, which may be empty at
    first: their sum where the mask (b, R) is True, and how many those are. In the end
    parallel.all_reduce_metrics makes the mean over all micro-batches and ranks of it.
    """
    for name, x in tensors.items():
        pair = torch.stack([masked_sum(x.detach().double(), mask), mask.sum()])
        sums[name] = sums.get(name, 0) + pair


def measure(sums, mb, mask, logprobs, dtype, age, steps, figures):
    """
    What a micro-batch of an update shows. Added to sums: figures, {name: (b, R)}; how far the
    update has moved the policy, policy/approx_kl; and in the first step on a batch that a policy
    `age` updates older has sampled how far that one is away, policy/off_policy_kl.

    mb: the micro-batch. mask: (b, R), its tokens that count. logprobs: (b, R), of the policy now.
    steps: how many the update has made. Returns how far the log ratios are from 0, see loss.gap:
    in the first step that is rounding.
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
    """The most memory this process has held: allocated by torch on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    # On Linux not getrusage: it would count what the parent process held when it started this one.
    if os.path.exists("/proc/self/status"):
        with open("/proc/self/status", encoding="utf-8") as f:
            return next(int(line.split()[1]) / 1024 for line in f if line.startswith("VmHWM"))
    unit = 2**20 if sys.platform == "darwin" else 1024  # macOS counts bytes, others KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


# --------------------------------------------------------------------------------------------------
# the GPU


def gpu():
    """
    What this rank computes with, for config.json: the GPU, the versions, and the kernels that are
    allowed, as torch itself says it (launch.choose_kernels sets them). {} in a run on a CPU.
    """
    if not torch.cuda.is_initialized():
        return {}
    attention = [name for name, on in (
        ("flash", torch.backends.cuda.flash_sdp_enabled()),
        ("memory-efficient", torch.backends.cuda.mem_efficient_sdp_enabled()),
        ("cuDNN", torch.backends.cuda.cudnn_sdp_enabled()),
        ("plain", torch.backends.cuda.math_sdp_enabled())) if on]
    return dict(
        name=torch.cuda.get_device_name(), torch=torch.__version__, cuda=torch.version.cuda,
        tf32=torch.get_float32_matmul_precision() != "highest" or torch.backends.cudnn.allow_tf32,
        sums_in_16_bits=torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        attention=attention, deterministic=torch.are_deterministic_algorithms_enabled())


def gpu_in_words():
    """`gpu` as a line for the terminal."""
    return ", ".join(f"{what} {value}" for what, value in gpu().items())


# --------------------------------------------------------------------------------------------------
# speed

# the most TFLOP/s of a GPU in 16 bits, without sparsity, as its maker says
PEAK_TFLOPS = {"B200": 2250, "H200": 989, "H100": 989, "A100": 312, "L40S": 362, "L4": 121}


def peak_flops(dtype, device):
    """
    The most floating-point operations a second of one rank's GPU, as its maker says it for 16 bits;
    None where that is not known: on CPUs, in other dtypes, and for other GPUs.
    """
    if device.type != "cuda" or dtype not in ("bfloat16", "float16"):
        return None
    words = torch.cuda.get_device_name(device).replace("-", " ").split()
    return next((1e12 * peak for name, peak in PEAK_TFLOPS.items() if name in words), None)


def flops_a_token(model, trained=False):
    """
    The floating-point operations of a model for one token: 2 N in a forward pass. Trained: 2 N more
    for the gradients of activations, and 2 for each weight that has a gradient, so 6 N. N is the
    number of its parameters without the embeddings, which are looked up, unless they are the LM
    head, too. Of a mixture of experts all are counted. Attention's own operations are not.
    """
    looked_up = {id(p) for m in model.modules() if isinstance(m, torch.nn.Embedding)
                 for p in m.parameters()}
    head = model.hf.get_output_embeddings() if model.head == "lm" else None
    looked_up -= {id(p) for p in head.parameters()} if head else set()
    parameters = [p for p in model.parameters() if id(p) not in looked_up]
    forward = 2 * sum(p.numel() for p in parameters)
    with_gradient = sum(p.numel() for p in parameters if p.requires_grad)
    return 2 * forward + 2 * with_gradient if trained else forward


def speed(device, tokens, flops, seconds, peak):
    """
    How fast an iteration was, as metrics: tokens a second of all ranks; the memory of this process;
    and MFU, the share of all ranks' peak that the models' operations are, where that is known.
    """
    figures = {"time/tokens_per_second": tokens / seconds, "mem/peak_mib": peak_memory_mib(device)}
    if peak:
        figures["time/mfu"] = flops / (seconds * peak)
    return figures


# --------------------------------------------------------------------------------------------------
# lines for the terminal


def print_models(models):
    """A line for each of {name: model}: its size, and whether it is trained."""
    for name, model in models.items():
        count = sum(p.numel() for p in model.parameters())
        trained = any(p.requires_grad for p in model.parameters())
        print(f"{name:<12} {count / 1e6:8.2f}M parameters  {'trained' if trained else 'frozen'}")


def print_samples(samples):
    """A line for each of some samples: the prompt, the response, the score."""
    for sample in samples:
        score = sample["scores"].get("scores")
        said = "no score" if score is None else f"score {score:.2f}"
        print(f"    {sample['prompt']!r} -> {sample['text']!r}  {said}")


def say_nothing_learnt(iteration, flat, counted):
    """
    Say why GRPO has taken no step. flat (groups,): which groups have equal scores; counted (B, R):
    the tokens that are trained on.
    """
    say(f"iteration {iteration}: nothing to learn: {int(flat.sum())} of {len(flat)} groups have "
        f"equal scores, {int((~counted.any(1)).sum())} of {len(counted)} responses are masked; no "
        "step")


COLUMNS = {  # of an iteration's line: name -> metric, format
    "score": ("objective/scores", ".2f"),
    "kl": ("objective/kl", ".2f"),
    "acc": ("objective/accuracy", ".2f"),
    "len": ("objective/length", ".1f"),
    "flat groups": ("objective/flat_groups", ".2f"),
    "loss": ("loss/sft", ".4f"),
    "preference": ("loss/preference", ".4f"),
    "right": ("train/accuracy", ".2f"),
    "teacher": ("loss/score", ".4f"),
    "pg": ("loss/policy", ".4f"),
    "vf": ("loss/value", ".4f"),
    "ptx": ("loss/ptx", ".4f"),
    "clip": ("policy/clipfrac", ".3f"),
    "ev": ("val/explained_variance", ".2f"),
    "tok/s": ("time/tokens_per_second", ".0f"),
    "of peak": ("time/mfu", ".1%"),
    "MiB": ("mem/peak_mib", ".0f"),
}


def progress(record, start, done, max_iters, began):
    """
    The line of an iteration: those COLUMNS that its record has, the seconds of its phases, and how
    long the rest will take. start: the iteration at which this process began; done: how many are
    done; began: when, in seconds of time.time.
    """
    columns = [f"{name} {record[metric]:{form}}" for name, (metric, form) in COLUMNS.items()
               if metric in record]
    phases = [f"{phase} {record[f'time/{phase}']:.1f}s" for phase in ("rollout", "score", "update")
              if f"time/{phase}" in record]
    left = (time.time() - began) / (done - start) * (max_iters - done)
    return " | ".join([f"iter {done}/{max_iters}", *columns, " ".join(phases), f"eta {left:.0f}s"])

# ruff: noqa: E402
"""
Direct preference optimisation, DPO: pairs train the policy itself. There is no reward model, and
nothing is sampled (Rafailov et al., arXiv 2305.18290, equation 7). A completion's reward is the log
of its probability under the policy over that under the reference, and the loss is that of rm.py:

    reward of a completion = beta * sum over its tokens of (log p(policy) - log p(reference))
    loss of a pair         = -log sigmoid(reward of the chosen one - reward of the rejected one)

python data/arithmetic/pairs.py                                 # the toy's pairs
python recipes/dpo.py config/arithmetic_dpo.py                  # the toy, on a laptop
torchrun --nproc_per_node=8 recipes/dpo.py --policy_path=hub/name --train_path=pairs.jsonl

Leaves out_dir/policy, a Hugging Face directory, and out_dir/log.jsonl. The same command again
resumes. This script has the sections of rm.py, in the same order.

b pairs in a micro-batch; W tokens in the longest of their 2 b prompts with a completion.
"""
import os
import sys

# Python looks for modules in this file's folder; ours are one folder above
sys.path.insert(1, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from configurator import configure  # first: it must be imported before torch
from errors import BadInput, say

import torch
from torch.nn.functional import logsigmoid

import parallel
import ranks
from batches import deal_rows, right_pad
from demonstrations import dialogue, encode_learned
from formulas import learning_rate_at
from load import autocast, load, load_ref_policy
from metrics import gap
from model import in_rows, no_grad_forwards
from prompts import (batch_rows, encode_rows, hash_of_ids, read_rows, rows_to_evaluate, run_length,
                     say_length)
from run import Run, make_optimizer

# -------------------------------------------------------------------------------------------------
# where to write
out_dir = "out/dpo"  # * checkpoints, log.jsonl and the finished policy; to resume, give the same
eval_interval = 50  # iterations between evaluations; also at iteration 0 and at the end [>= 1]
eval_size = 0  # how many held-out pairs to evaluate on, 0 = all [>= 0]

# data: JSONL with "prompt", "chosen" and "rejected", or two whole dialogues; see docs/data.md
train_path = "data/arithmetic/pairs_train.jsonl"  # * pairs to learn; A.jsonl,0.3*B.jsonl: a mix
val_path = ""  # * held-out pairs; empty = no evaluation
max_tokens = 0  # * longest prompt and completion together, 0 = the model's context [>= 0]

# model
policy_path = "out/arithmetic_sft/policy"  # * the SFT model: policy and reference policy

# the loss
beta = 0.1  # * a smaller beta lets the policy move further from the reference [> 0]
label_smoothing = 0.0  # the assumed share of pairs with a wrong label (cDPO) [0..0.5]

# optimizer: AdamW
max_iters = 100  # * optimizer steps [>= 1]
batch_size = 64  # * pairs a step, over all ranks [1..1000000]
micro_batch_size = 32  # pairs at once; only memory depends on it [>= 1]
learning_rate = 1e-6  # * peak, for a hub model; often 1e-5 with lora [> 0]
warmup_iters = 5  # steps of linear warm-up [>= 0]
lr_decay = "cosine"  # then it stays, or falls to 0 like this [constant | linear | cosine]
beta1 = 0.9  # AdamW's first moment decay [0..0.9999]
beta2 = 0.95  # AdamW's second moment decay [0..0.9999]
adam_eps = 1e-8  # AdamW's epsilon [> 0]
grad_clip = 1.0  # largest gradient norm, 0 = no clipping [>= 0]

# randomness
seed = 1  # decides the order of the pairs [>= 0]

# system: the keys that are not of the algorithm, such as system.dtype and system.lora
config, system = configure(globals(), "config/keys.py", until="ref_path",
                           checkpoint_interval=500, sync_check_interval=100)
# -------------------------------------------------------------------------------------------------
# set-up: the ranks, the two models, the data, the optimizer; then begin, or resume

PAIR = "chosen", "rejected"  # the fields of a pair
if system.too_long == "cut":
    raise BadInput("too_long = 'cut': of a pair that is cut, the part that differs may be lost; "
                   "type --too_long=drop")

device = ranks.init(system)  # COLLECTIVE
# the policy: the SFT model, which is trained; with LoRA an adapter on it is trained
policy = load(policy_path, "policy", system, device, trained=True, seed=seed)
# the reference policy: the SFT model, frozen; with LoRA the policy without its adapter
ref_policy = load_ref_policy(policy_path, policy, system, device)


def load_rows(path):
    """
    Rows of a file; rows.ids are the chosen and the rejected side of each pair, (ids, trained) both,
    as in sft.py. A pair that is too long is refused or dropped as a whole.
    """
    def encode(rows):
        return [tuple(encode_learned(policy.tokenizer, row["prompt"], row[side]) for side in PAIR)
                for row in rows]

    limit = min(policy.max_positions, max_tokens or policy.max_positions)
    rows = read_rows(path, lambda row: dialogue(row, *PAIR), system.fields)
    policy.tokenizer.say_marks(rows, ["prompt", *PAIR], path)
    rows = encode_rows(rows, encode, limit, system.too_long, None,
                       lambda pair: max(len(ids) for ids, _ in pair))
    if any(chosen == rejected for chosen, rejected in rows.ids):
        from options.mistakes import check_ties

        check_ties(rows.ids, path, train_path)
    return rows


train_rows, eval_pairs = load_rows(train_path), []
if val_path:
    val_rows = load_rows(val_path)
    eval_pairs = [val_rows.ids[i] for i in rows_to_evaluate(len(val_rows), eval_size, seed)]
config["max_iters"] = max_iters = run_length(max_iters, system.epochs, len(train_rows), batch_size)

optimizer = make_optimizer(policy, "policy", system, learning_rate, (beta1, beta2), adam_eps)
run = Run(  # COLLECTIVE
    out_dir, max_iters, config, system, device, dict(policy=policy, ref_policy=ref_policy),
    dict(policy=optimizer),
    must_match=["seed", "batch_size", "policy_path", "train_path", "beta"],
    token_ids=hash_of_ids(train_rows))
gradients = {name: parallel.flatten_gradients(model) for name, model in run.trained.items()}
say_length("pairs", train_rows, "steps", max_iters, batch_size)

# -------------------------------------------------------------------------------------------------
# log-probs, rewards and evaluation


def my_micro_batches(pairs):
    """This rank's micro-batches of pairs that all ranks have: lists of pairs."""
    lengths = [sum(len(ids) for ids, _ in pair) for pair in pairs]
    for part in deal_rows(lengths, micro_batch_size, system.micro_batch_tokens):
        yield [pairs[i] for i in part]


def completion_logprobs(model, pairs):
    """
    Log-probs of the tokens of b pairs' completions, (2 b, W), of a pair first the chosen one, then
    the rejected one; 0 elsewhere. And the mask of these tokens, (2 b, W).
    """
    sides = [side for pair in pairs for side in pair]
    tokens = right_pad([ids for ids, _ in sides], policy.tokenizer.pad_id)  # (2 b, W)
    mask = right_pad([trained for _, trained in sides], 0)  # (2 b, W)
    tokens, mask = tokens.to(device), mask.bool().to(device)
    with autocast(system, device):
        return in_rows(model.logprobs(tokens, mask, chunk=system.head_chunk)[0], mask), mask


def read(model, parts):
    """completion_logprobs for each micro-batch, without gradients."""
    with no_grad_forwards([model], device):
        return [completion_logprobs(model, pairs)[0] for pairs in parts]


def rewards_of(log_ratio, pairs):
    """Rewards of b chosen and b rejected completions, (b,) each, from their log_ratio, (2 b, W)."""
    chosen, rejected = (beta * log_ratio.sum(1))[:2 * len(pairs)].view(-1, 2).unbind(1)
    # of two equal texts rounding may make one reward higher; it is a tie
    alike = torch.tensor([one == other for one, other in pairs], dtype=torch.bool, device=device)
    return chosen, torch.where(alike, chosen, rejected)


def add_up(sums, prefix, chosen, rejected, losses):
    """
    Add the metrics of b pairs to sums, {metric: [sum, count]}; a tie counts half. chosen, rejected:
    their rewards, (b,) each. losses: {metric: (b,)}.
    """
    right = (chosen > rejected).double() + 0.5 * (chosen == rejected)
    metrics = dict(accuracy=right, margin=chosen - rejected, chosen_reward=chosen,
                   rejected_reward=rejected)
    for name, x in ({f"{prefix}/{name}": x for name, x in metrics.items()} | losses).items():
        before, count = sums.get(name, (0.0, 0))
        sums[name] = [before + x.sum().item(), count + len(x)]


def evaluate():
    """A collective: the loss of the held-out pairs, without smoothing."""
    run.enter("eval")
    parts, sums = list(my_micro_batches(eval_pairs)), {}
    ours, theirs = read(policy, parts), read(ref_policy, parts)
    for pairs, logprobs, ref_logprobs in zip(parts, ours, theirs, strict=True):
        chosen, rejected = rewards_of(logprobs - ref_logprobs, pairs)  # (b,) each
        add_up(sums, "eval", chosen, rejected, {"eval/loss": -logsigmoid(chosen - rejected)})
    record = parallel.all_reduce_metrics(sums)  # COLLECTIVE
    say(f"eval {run.iteration}: held-out loss {record['eval/loss']:.4f}, "
        f"{record['eval/accuracy']:.1%} of pairs right")
    return record


# -------------------------------------------------------------------------------------------------
# the loop

for iteration in run.iterations():  # COLLECTIVE: between two of them it audits, saves and stops
    record = {}
    if eval_pairs and (iteration % eval_interval == 0 or iteration == max_iters):
        record |= evaluate()  # COLLECTIVE
    if iteration == max_iters:
        run.log(record)  # COLLECTIVE
        break

    # the reference reads the pairs of this step
    run.enter("update")
    rows = batch_rows(seed, iteration, batch_size, train_rows)
    batch = [train_rows.ids[i] for i in rows]  # of all ranks
    parts = list(my_micro_batches(batch))  # of this rank
    theirs = read(ref_policy, parts)

    # gradients, micro-batch by micro-batch; the loss is the mean over the pairs of all ranks
    parallel.zero_gradients(gradients)
    sums, gaps = {}, []
    for pairs, ref_logprobs in zip(parts, theirs, strict=True):
        logprobs, mask = completion_logprobs(policy, pairs)  # (2 b, W) each
        log_ratio = logprobs - ref_logprobs
        chosen, rejected = rewards_of(log_ratio, pairs)  # (b,) each
        # the larger the margin, the surer the chosen one is the better one; a label may be wrong
        margin = chosen - rejected
        losses = -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)
        (run.loss_scale * losses.sum() / batch_size).backward()
        gaps.append(gap(log_ratio, mask, system.dtype))
        add_up(sums, "train", chosen.detach(), rejected.detach(), {"loss/preference": losses})
    if iteration == 0:  # before the first step the policy is the reference
        run.must_agree(torch.stack(gaps).max(), "the reference")  # COLLECTIVE

    # one step, the same on all ranks
    parallel.all_reduce_gradients(gradients, run.loss_scale)  # COLLECTIVE
    lr = learning_rate_at(iteration, learning_rate, warmup_iters, max_iters, lr_decay)
    norms = run.step(gradients, dict(policy=lr), grad_clip)

    record |= parallel.all_reduce_metrics(sums)  # COLLECTIVE
    record |= {"policy/grad_norm": norms.get("policy", 0.0), "policy/lr": lr}
    tokens = sum(len(ids) for pair in batch for ids, _ in pair)
    run.log(record, tokens=tokens, every=10)  # COLLECTIVE

run.finish("tools/eval.py", policies=f"{out_dir}/policy")  # COLLECTIVE

"""
Direct preference optimisation, DPO: pairs train the policy itself. There is no reward model, and
nothing is sampled (Rafailov et al., arXiv 2305.18290, equation 7). A completion's reward is the log
of its probability under the policy over that under the reference, and the loss is that of rm.py:

    reward of a completion = beta * sum over its tokens of (log p(policy) - log p(reference))
    loss of a pair         = -log sigmoid(reward of the chosen one - reward of the rejected one)

python recipes/dpo.py config/arithmetic_dpo.py                  # the toy, after pairs.py
torchrun --nproc_per_node=8 recipes/dpo.py config/mine_dpo.py   # a hub model on 8 GPUs
python tools/fork.py dpo FOLDER                                 # a folder with it, to change

Leaves out_dir/policy, a Hugging Face directory, and out_dir/log.jsonl. The same command again
resumes. This script has the sections of rm.py, in the same order.

b pairs in a micro-batch; n trained tokens in their 2 b completions.
"""
import os
import sys

# Python looks for modules in this file's folder; in a fork they are there, else one folder above.
sys.path.insert(1, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch  # noqa: E402
from torch.nn.functional import logsigmoid  # noqa: E402

import launch  # noqa: E402
import parallel  # noqa: E402
from checks import check_system  # noqa: E402
from completions import PAIR, preference_row  # noqa: E402
from configurator import configure  # noqa: E402
from errors import BadConfig, say, warn  # noqa: E402
from examples import (encode_examples, example_logprobs, limit_of,  # noqa: E402
                      micro_batches_of, tokens_of_example)
from loss import gap, learning_rate_at  # noqa: E402
from model import no_grad_forwards  # noqa: E402
from models import autocast, in_memory, load  # noqa: E402
from optimizers import make_optimizer  # noqa: E402
from prompts import batch_rows, iterations, rows_that_fit, spread  # noqa: E402
from rows import Rows, keep_rows, read_rows  # noqa: E402
from run import Run, ranks_agree  # noqa: E402
from tokenizer import check_tokenizer_fits, load_tokenizer  # noqa: E402

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
label_smoothing = 0.0  # the assumed share of pairs with a wrong label [0..0.5]

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
config, system = configure(globals(), "keys.py", checkpoint_interval=500,
                           sync_check_interval=100)
# -------------------------------------------------------------------------------------------------
# set-up: the ranks, the data, the two models, the optimizer, and resume or begin

if system.too_long == "cut":
    raise BadConfig("too_long = 'cut': of a pair that is cut, the part that differs may be lost; "
                    "type --too_long=drop")

device = launch.init(  # COLLECTIVE
    system.device_type, system.timeout, system.deterministic)
precision = autocast(system, device)
check_system(system, device, ("policy",), ("ref",))
train_rows = read_rows(train_path, preference_row, system.fields)
val_rows = read_rows(val_path, preference_row, system.fields) if val_path else Rows()
tokenizer = load_tokenizer(policy_path, system.chat_template, system.template_kwargs,
                           system.system_prompt)

# the policy: the SFT model, which is trained; with LoRA an adapter on it is trained
policy = load(policy_path, "policy", system, device, trained=True, seed=seed)
check_tokenizer_fits(tokenizer, policy, policy_path)

# the reference policy: the SFT model, frozen; with LoRA the policy without its adapter
ref_policy = policy.base
if not policy.adapters:
    ref_policy = load(policy_path, "ref", system, device)


def encode(rows, path):
    """
    [(the chosen example, the rejected one), ...] of all rows; an example is (ids, trained), as in
    sft.py. A pair that is too long is refused or dropped as a whole.
    """
    sides = []
    for side in PAIR:
        demonstrations = Rows([row | dict(completion=row[side]) for row in rows], rows.parts)
        sides.append(encode_examples(demonstrations, path, tokenizer, sys.maxsize))
    pairs = list(zip(*sides, strict=True))
    limit, whose = limit_of(policy.max_positions, max_tokens)
    lengths = [max(map(tokens_of_example, pair)) for pair in pairs]
    kept = rows_that_fit(rows, path, lengths, limit, whose, system.too_long)
    keep_rows(rows, kept)
    return [pairs[number] for number in kept]


train_pairs, val_pairs = encode(train_rows, train_path), encode(val_rows, val_path)
eval_pairs = [val_pairs[i] for i in spread(len(val_pairs), eval_size, seed)]
config["max_iters"] = max_iters = iterations(max_iters, system.epochs, len(train_rows), batch_size)
models = in_memory(policy=policy, ref_policy=ref_policy)
ranks_agree(config, [train_path, val_path], models, [tokenizer])  # COLLECTIVE

optimizer = make_optimizer(policy, "policy", system, learning_rate, (beta1, beta2), adam_eps)
run = Run(  # COLLECTIVE
    out_dir, max_iters, config, system, device, models, dict(policy=optimizer), tokenizer,
    must_match=["seed", "batch_size", "policy_path", "beta"], sources=["train_path", "policy_path"],
    token_ids=[ids for pair in train_pairs for ids, _ in pair])
gradients = parallel.flatten_gradients(run.trained)
say(f"{len(train_rows)} pairs, {len(val_rows)} held out; {max_iters} steps of {batch_size} are "
    f"{max_iters * batch_size / len(train_rows):.1f} epochs")
alike = sum(row["chosen"] == row["rejected"] for row in train_rows)
if alike:
    warn(f"in {alike} pairs chosen and rejected are one text: they teach nothing")

# -------------------------------------------------------------------------------------------------
# log-probs, rewards and evaluation


def tokens_of(pair):
    """How many tokens a pair has."""
    return sum(map(tokens_of_example, pair))


def micro_batches(pairs):
    """This rank's micro-batches of pairs that all ranks have: a list of lists of pairs."""
    return list(micro_batches_of(pairs, tokens_of, micro_batch_size, system.micro_batch_tokens))


def completion_logprobs(model, pairs):
    """Log-probs of the tokens of b chosen and b rejected completions, pair by pair, (n,)."""
    examples = [example for pair in pairs for example in pair]
    with precision:
        return example_logprobs(model, examples, tokenizer, system.head_chunk, device)


def read(model, parts):
    """completion_logprobs of each micro-batch, without gradients."""
    with no_grad_forwards([model], device):
        return [completion_logprobs(model, pairs) for pairs in parts]


def rewards_of(log_ratio, pairs):
    """
    The rewards of b chosen and of b rejected completions, (b,) each. log_ratio: (n,), of each of
    their tokens, log p(policy) - log p(reference).
    """
    lengths = [sum(trained) for pair in pairs for _, trained in pair]  # 2 b
    lengths = torch.tensor(lengths, dtype=torch.int64, device=log_ratio.device)
    number = torch.arange(len(lengths), device=log_ratio.device)
    owner = number.repeat_interleave(lengths)  # (n,): the completion of each token
    sums = log_ratio.new_zeros(len(lengths)).index_add(0, owner, log_ratio)
    chosen, rejected = (beta * sums).view(-1, 2).unbind(1)
    # of two equal texts rounding may make one reward higher; it is a tie
    alike = torch.tensor([one == other for one, other in pairs], dtype=torch.bool)  # (b,)
    return chosen, torch.where(alike.to(chosen.device), chosen, rejected)


def add_up(sums, prefix, losses, chosen, rejected):
    """Add the metrics of b pairs, (b,) each, to sums, {metric: [sum, count]}. A tie counts half."""
    right = (chosen > rejected).double() + 0.5 * (chosen == rejected)
    for name, x in dict(loss=losses, accuracy=right, margin=chosen - rejected,
                        chosen_reward=chosen, rejected_reward=rejected).items():
        before, count = sums.get(f"{prefix}/{name}", (0.0, 0))
        sums[f"{prefix}/{name}"] = [before + x.sum().item(), count + len(x)]


def evaluate():
    """A collective: the loss of the held-out pairs, without smoothing."""
    run.enter("eval")
    parts, sums = micro_batches(eval_pairs), {}
    ours, theirs = read(policy, parts), read(ref_policy, parts)
    for pairs, logprobs, ref_logprobs in zip(parts, ours, theirs, strict=True):
        chosen, rejected = rewards_of(logprobs - ref_logprobs, pairs)  # (b,) each
        add_up(sums, "eval", -logsigmoid(chosen - rejected), chosen, rejected)
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
    rows = batch_rows(seed, iteration, batch_size, train_rows.mix)
    batch = [train_pairs[i] for i in rows]  # of all ranks
    parts = micro_batches(batch)  # of this rank
    theirs = read(ref_policy, parts)

    # gradients, micro-batch by micro-batch; the loss is the mean over the pairs of all ranks
    parallel.zero_gradients(gradients)
    sums, gaps = {}, []
    for pairs, ref_logprobs in zip(parts, theirs, strict=True):
        log_ratio = completion_logprobs(policy, pairs) - ref_logprobs  # (n,)
        chosen, rejected = rewards_of(log_ratio, pairs)  # (b,) each
        # the larger the margin, the surer the chosen one is the better one; a label may be wrong
        margin = chosen - rejected
        losses = -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)
        (run.loss_scale * losses.sum() / batch_size).backward()
        gaps.append(gap(log_ratio, torch.ones_like(log_ratio, dtype=torch.bool), system.dtype))
        add_up(sums, "train", losses.detach(), chosen.detach(), rejected.detach())
    if iteration == 0:  # before the first step the policy is the reference
        run.must_agree(torch.stack(gaps).max(), "the reference")  # COLLECTIVE

    # one step, the same on all ranks
    parallel.all_reduce_gradients(gradients, run.loss_scale)  # COLLECTIVE
    lr = learning_rate_at(iteration, learning_rate, warmup_iters, max_iters, lr_decay)
    norms = run.step(gradients, dict(policy=lr), grad_clip)

    record |= parallel.all_reduce_metrics(sums)  # COLLECTIVE
    record |= {"policy/grad_norm": norms.get("policy", 0.0), "policy/lr": lr}
    run.log(record, tokens=sum(map(tokens_of, batch)), every=10)  # COLLECTIVE

run.finish("tools/eval.py to compare it with the SFT model")  # COLLECTIVE

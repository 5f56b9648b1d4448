"""
GRPO for language models, with two models: policy and reference policy. Read it downward.

python grpo.py config/arithmetic_grpo.py                        # the toy: a laptop, no download
python grpo.py config/arithmetic_grpo.py config/dr_grpo.py      # another algorithm, the same task
torchrun --nproc_per_node=8 grpo.py config/gsm8k_grpo.py        # 8 GPUs

It is ppo.py without a value model. `diff ppo.py grpo.py` shows all of it:
    - the mean score of a prompt's group_size responses replaces the value model: no GAE, one loss;
    - all tokens of a response have the same advantage: no reward for each token (where a rule
      gives some, GRPO compares their sums), no whitening;
    - the KL to the reference is a term of the loss, not of the reward (the key kl_in);
    - each response weighs the same in the loss, not each token (the key aggregation).

One iteration: take batch_size / group_size prompts;
    1) rollout: the policy answers each prompt group_size times;
    2) score: each answer gets a score; policy and reference read the answers;
    3) advantages: an answer's score minus its group's mean, over the group's deviation;
    4) update: a few clipped steps on the policy;
    5) metrics, and a line in the log.

    model          output                  trained   starts as
    policy         logprobs (B, T)         yes       policy_path, the SFT model
    ref_policy     ref_logprobs (B, T)     no        the same; none when kl_coef = 0
    reward_model   scores (B,)             no        reward_path, where reward_functions names it
    judge          scores (B,)             no        judge_path, where reward_functions names it

B responses in an iteration, those of a prompt side by side; the rest is as in the head of ppo.py.
With the defaults it is GRPO as in DeepSeekMath (arXiv 2402.03300). The formulas of its relatives
(DAPO, Dr. GRPO, GSPO, CISPO, RLOO) are in groups.py, and their keys in config/dapo.py, ...
"""
from configurator import configure  # first: it must be imported before torch

from functools import partial

import torch

import parallel
import ranks
from batches import forward_batch, micro_batches
from errors import BadInput
from formulas import importance_weights, kl_estimate, learning_rate_at, masked_sum
from groups import LOSSES, flat_groups, group_advantages, summarize_groups, token_weights
from load import autocast, load, load_ref_policy, load_reward_model
from metrics import add_up, gap, mean_of, summarize
from model import response_logprobs
from prompts import (batch_rows, encode_prompts, hash_of_ids, permutation, read_prompts,
                     rows_to_evaluate, run_length, say_prompts)
from rewards import check_rows, lacks_shift, reward_terms, same_score_for_same_text, score_batch
from rollout import sample_batch
from run import Run, make_optimizer

# -------------------------------------------------------------------------------------------------
# where to write; the same command again resumes from there
out_dir = "out/grpo"  # * checkpoints, log.jsonl and the finished policy
eval_interval = 10  # iterations between evaluations; also at iteration 0 and after the last [>= 1]
eval_size = 256  # how many held-out prompts to evaluate on, 0 = all [>= 0]

# the models: folders or hub names
policy_path = "out/arithmetic_sft/policy"  # * the SFT model: policy and reference policy
reward_path = ""  # a model with one label, where reward_functions names reward_model

# prompts: JSONL with "prompt", and "answer" where accuracy shall be measured; docs/data.md
prompts_path = "data/arithmetic/rl_train.jsonl"  # * to train on; A.jsonl,0.3*B.jsonl: a mix
eval_path = ""  # * held-out prompts; empty = no evaluation

# 1) rollout
batch_size = 512  # * responses an iteration, over all ranks; a multiple of group_size [1..1000000]
group_size = 8  # * responses to a prompt, G [2..1000000]
max_new_tokens = 1024  # * longest response R [1..1000000]
temperature = 1.0  # + of sampling, and so of every log-prob here [> 0]
max_refills = 0  # + DAPO: how often groups of equal scores are replaced by others [0..1000]
refill_by = ""  # with max_refills: equal in this reward, as accuracy; empty: in the whole score

# 2) score
reward_functions = "1.0*accuracy,0.1*format"  # * a sum of rules, reward_model, mine.py:f

# 3) advantages
missing_eos_penalty = 0.0  # + what never ends scores minus this (ppo.py: 1); 0: off [>= 0]
baseline = "mean"  # + of a group's scores, or of the others in the group (RLOO) [mean | others]
scale_by = "std"  # + the group's deviation, that of all scores, or no scaling [std | batch | none]

# 4) update
loss_type = "clip"  # + PPO's and GRPO's, or a relative's; see groups.py [clip | gspo | cispo]
truncated = "keep"  # responses that never ended are trained on, or not [keep | mask]
# + the weight of a token in the loss; see groups.token_weights
aggregation = "seq-mean-token-mean"  # [token-mean | seq-mean-token-mean | seq-mean-token-sum-norm]
kl_coef = 0.04  # *+ weight of the KL to the reference; 0 = no reference policy [>= 0]
kl_in = "loss"  # the KL enters the loss of each token, or the score of the response [reward | loss]
kl_estimator = "k3"  # + Schulman's; k1 if kl_in = "reward"; k2 has the KL's gradient [k1 | k2 | k3]
num_iterations = 1  # passes over the batch, mu [1..1000]
num_minibatches = 1  # + optimizer steps a pass [>= 1]
micro_batch_size = 8  # most rows scored or trained at once; only memory depends on it [>= 1]
cliprange = 0.2  # no gain from a ratio below 1 - this [> 0]
cliprange_high = 0.2  # nor above 1 + this (clip-higher: DAPO has 0.28) [> 0]
entropy_coef = 0.0  # weight of an entropy bonus in the policy loss [>= 0]
# a token's loss is multiplied by p(training) / p(sampler), but by no more than this; 0 = off
importance_cap = 0.0  # + often 2; for 16 bits, vllm, staleness; formulas.importance_weights [>= 0]

# optimizer: AdamW
max_iters = 500  # * iterations [>= 1]
learning_rate = 1e-6  # * peak [> 0]
warmup_iters = 0  # iterations of linear warm-up [>= 0]
lr_decay = "constant"  # it stays, or falls to 0 like this [constant | linear | cosine]
beta1 = 0.9  # AdamW's first moment decay [0..0.9999]
beta2 = 0.999  # AdamW's second moment decay [0..0.9999]
adam_eps = 1e-8  # AdamW's epsilon [> 0]
grad_clip = 1.0  # largest gradient norm, 0 = no clipping [>= 0]
ema_decay = 0.0  # moving average of the policy, out_dir/ema_policy, 0 = none [0..0.99999]

seed = 1  # decides prompts, sampling and minibatches [>= 0]

# system: the keys that are not of the algorithm, such as system.dtype and system.lora
config, system = configure(globals(), "config/keys.py")
if not prompts_path:
    raise BadInput("prompts_path is empty; type --prompts_path=FILE")
if num_minibatches > batch_size:
    raise BadInput(f"num_minibatches = {num_minibatches}: some would be empty; lower it")
if batch_size % group_size:
    raise BadInput(f"batch_size = {batch_size} responses: no multiple of group_size = {group_size}")
num_prompts = batch_size // group_size  # of an iteration
if kl_coef > 0 and kl_in == "loss" and kl_estimator == "k1":
    raise BadInput("kl_estimator = 'k1': with kl_in = 'loss' it is no penalty: the gradient of k1 "
                   "is 0 on average; type --kl_estimator=k2")
# -------------------------------------------------------------------------------------------------
# set-up: the ranks, the models, the data, the optimizers; then begin, or resume

device = ranks.init(system)  # COLLECTIVE
terms = reward_terms(reward_functions, config)  # [(weight, name, function)]
reward_names = [name for _, name, _ in terms]
if refill_by and refill_by not in reward_names:
    raise BadInput(f"refill_by = {refill_by!r} is none of the rewards, {', '.join(reward_names)}")

# the policy: the SFT model, which is trained; with LoRA an adapter on it
policy = load(policy_path, "policy", system, device, trained=True, seed=seed)
models = dict(policy=policy)

# the reference policy: the SFT model as it was, frozen. The KL to it keeps the policy from going
# where the reward model is wrong
ref_policy = None
if kl_coef > 0:
    models["ref_policy"] = ref_policy = load_ref_policy(policy_path, policy, system, device)

# the reward model: frozen. One number for a whole response; None where it is not among the rewards
reward_model = None
if "reward_model" in reward_names:
    models["reward_model"] = reward_model = load_reward_model(reward_path, policy, system, device)

# the prompts become token ids; all are checked now, not when their turn comes
train_rows, eval_rows = (read_prompts(path, system.fields) for path in (prompts_path, eval_path))
for rows in filter(len, (train_rows, eval_rows)):
    check_rows(terms, rows, policy.tokenizer)  # they have what the rewards need
    encode_prompts(rows, models, max_new_tokens, system)  # their rows.ids
held_out = rows_to_evaluate(len(eval_rows), eval_size, seed)  # numbers of eval_rows
config["max_iters"] = max_iters = run_length(max_iters, system.epochs, len(train_rows), num_prompts)

optimizers = dict(
    policy=make_optimizer(policy, "policy", system, learning_rate, (beta1, beta2), adam_eps))
run = Run(  # COLLECTIVE
    out_dir, max_iters, config, system, device, models, optimizers,
    must_match=["seed", "batch_size", "max_new_tokens", "group_size", "policy_path",
                "reward_path", "prompts_path"],
    token_ids=hash_of_ids(train_rows), temperature=temperature, ema_decay=ema_decay)
say_prompts(train_rows, eval_rows, num_prompts, max_iters)
gradients = {name: parallel.flatten_gradients(model) for name, model in run.trained.items()}
kl_loss_coef = kl_coef if kl_in == "loss" else 0.0

# -------------------------------------------------------------------------------------------------
# helpers of the loop

# iteration -> numbers of its data rows; row numbers of a batch -> this rank's micro-batches
rows_of = partial(batch_rows, seed, batch_size=num_prompts, rows=train_rows)
my_micro_batches = partial(micro_batches, micro_batch_size=micro_batch_size,
                           micro_batch_tokens=system.micro_batch_tokens)
logprob_models = dict(old_logprobs=policy, ref_logprobs=ref_policy)  # {column: its model}


def forward(model, mb):
    """A model's log-probs of the response tokens, (b, W); and entropies."""
    with autocast(system, device):
        return response_logprobs(model, mb, temperature, system.head_chunk, entropy_coef > 0)


def minibatches(iteration, epoch=0):
    """The row numbers of each step of an epoch. Each epoch takes them in another order."""
    order = permutation(batch_size, seed, "minibatches", iteration, epoch)  # (B,)
    return order.to(device).tensor_split(num_minibatches)


def rollout(purpose, iteration, rows, row_numbers, samples=group_size, slots=None):
    """A collective: the policy answers each row's prompt `samples` times; answers get scores."""
    run.enter(purpose)
    batch = sample_batch(  # COLLECTIVE
        policy, rows, row_numbers, (seed, purpose, iteration), max_new_tokens, temperature, system,
        device, samples, slots)
    run.leave_if_stop_asked()  # COLLECTIVE
    run.enter("score" if purpose == "rollout" else purpose)  # an evaluation is one phase
    with run.saved_if_it_fails():  # COLLECTIVE: a reward may fail, or hang
        score_batch(batch, rows, terms, policy, reward_model, micro_batch_size, system, device)
    return batch


def shape_scores(batch):
    """
    The scores of a batch that are trained on, (B,); NaN where no reward applies. A response that
    never ended gets the penalty: what a reward model says of a text without EOS means little.
    """
    scores = batch["scores"]
    if missing_eos_penalty > 0:  # N+ detail 23
        scores = torch.where(batch["finished"], scores, -missing_eos_penalty)
    return scores


def find_flat(batch):
    """The groups whose scores, or rewards refill_by, are equal, (B / G,): they teach nothing."""
    scores = batch[f"reward/{refill_by}"] if refill_by else shape_scores(batch)  # (B,)
    return flat_groups(scores, group_size)


def evaluate():
    """A collective: the policy on held-out prompts, one response each."""
    batch = rollout("eval", 0, eval_rows, held_out, samples=1)  # COLLECTIVE; always the same noise
    forward_batch(  # COLLECTIVE
        batch, logprob_models, forward, my_micro_batches(batch, batch["index"]), device)
    return run.log_evaluation(  # COLLECTIVE
        batch, eval_rows, reward_names, mean_of(shape_scores(batch)).item())


# With staleness or roles batches are sampled early. So is the first one where the zero of a reward
# model must be chosen (rm.py has not trained it). A rank that does not train stays in this call
if system.staleness > 0 or system.roles or lacks_shift(reward_model):
    from options.ahead import ahead_of
    rollout = ahead_of(rollout, run, config, system, train_rows, rows_of, terms)  # COLLECTIVE

# -------------------------------------------------------------------------------------------------
# the loop

for iteration in run.iterations():  # COLLECTIVE: between two of them it audits, saves and stops
    record = {}
    if eval_rows and (iteration % eval_interval == 0 or iteration == max_iters):
        record |= evaluate()  # COLLECTIVE
    if iteration == max_iters:
        run.log(record)  # COLLECTIVE
        break

    # 1) rollout: the policy answers. The same call begins 2) score: the answers get scores
    batch = rollout("rollout", iteration, train_rows, rows_of(iteration))  # COLLECTIVE
    flat = find_flat(batch)  # (B / G,): groups with nothing to compare
    if max_refills > 0:
        from options.refill import refill
        batch, flat, before = refill(  # COLLECTIVE
            batch, flat, find_flat, shape_scores, group_size, train_rows, rows_of(iteration),
            rollout, seed, iteration, max_refills, policy.tokenizer.pad_id, reward_names)
        run.enter("score")
    mask = batch["response_mask"]  # (B, T)

    # 2) score, before any update: the log-probs of policy and reference
    parts = (mb for index in minibatches(iteration) for mb in my_micro_batches(batch, index))
    forward_batch(batch, logprob_models, forward, parts, device)  # COLLECTIVE
    sampler_gap = run.sampler_gap(batch)  # COLLECTIVE: at iteration 0 the KL must be 0, too

    # 3) advantages: a score minus its group's mean, over its deviation; one number a response
    run.enter("advantages")
    scores = shape_scores(batch)  # (B,)
    if kl_coef > 0 and kl_in == "reward":  # the KL of all tokens is a part of the score
        kl = kl_estimate(batch["old_logprobs"], batch["ref_logprobs"], kl_estimator)  # (B, T)
        scores = same_score_for_same_text(scores - kl_coef * kl.sum(1), batch)
    advantages = group_advantages(scores, group_size, scale_by, baseline)  # (B,)
    parallel.check_finite(dict(advantages=advantages))
    batch["advantages"] = advantages[:, None].expand_as(mask)  # (B, T)
    # with max_refills, groups that are flat even now are left out, as if they were not there
    left_out = flat.repeat_interleave(group_size) & (max_refills > 0)  # (B,)
    if truncated == "mask":
        left_out = left_out | ~batch["finished"]
    batch["counted"] = counted = mask & ~left_out[:, None]  # (B, T): the tokens that are trained on
    batch["weights"] = torch.zeros_like(batch["old_logprobs"])  # (B, T): filled before each step
    teaches = (counted & (batch["advantages"] != 0)).any(1)  # (B,)

    # 4) update: a few clipped steps on the policy
    run.enter("update")
    lr = learning_rate_at(iteration, learning_rate, warmup_iters, max_iters, lr_decay)
    # {metric: (sum, count)}, measured during the update; they stay 0 where no response teaches
    sums = dict.fromkeys(["loss/policy", "loss/kl", "policy/approx_kl", "policy/clipfrac"],
                         torch.zeros(2, dtype=torch.float64, device=device))
    ratio_gap, norms = 0.0, {}  # as they are without a step
    steps = 0  # made so far; before the first one the ratio is 1
    for epoch in range(num_iterations):
        for index in minibatches(iteration, epoch):
            # without any advantage, only momentum and the KL would move the policy: no step then
            if not teaches[index].any():
                continue
            # one normaliser for the whole step, over all micro-batches and ranks, in the weights
            weights = token_weights(counted[index], aggregation, max_new_tokens)  # (len(index), T)
            batch["weights"][index] = weights.to(batch["weights"])
            gaps = []  # how far the log ratios are from 0
            parallel.zero_gradients(gradients)

            for mb in my_micro_batches(batch, index):
                m = mb["counted"]  # (b, W)

                # the policy: how much likelier is each token now, and is that good?
                logprobs, entropy = forward(policy, mb)  # (b, W) each
                pg_losses, pg_clipped = LOSSES[loss_type](
                    logprobs, mb["old_logprobs"], mb["advantages"], m, cliprange, cliprange_high)
                pg_losses = pg_losses * importance_weights(mb, importance_cap)  # 1, if 0
                pg_loss = masked_sum(pg_losses * mb["weights"], m)
                kl_losses = torch.zeros_like(logprobs)
                if kl_coef > 0:  # it is measured also where it is in the score
                    kl_losses = kl_estimate(logprobs, mb["ref_logprobs"], kl_estimator)  # (b, W)
                    pg_loss = pg_loss + kl_loss_coef * masked_sum(kl_losses * mb["weights"], m)
                if entropy_coef > 0:
                    pg_loss = pg_loss - entropy_coef * masked_sum(entropy * mb["weights"], m)
                (run.loss_scale * pg_loss).backward()

                # the sums over all micro-batches, for the log
                add_up(sums, m, {
                    "loss/policy": pg_losses, "loss/kl": kl_losses, "policy/clipfrac": pg_clipped,
                    "policy/approx_kl": kl_estimate(mb["old_logprobs"], logprobs, "k3")})
                gaps.append(gap(logprobs - mb["old_logprobs"], mb["response_mask"], system.dtype))

            if steps == 0:  # the ratio must be 1, unless an older policy has sampled the batch
                ratio_gap = run.ratio_gap(  # COLLECTIVE
                    gaps, sums, to_older="age" in batch and importance_cap == 0)
            # from here on the gradients are the same on all ranks
            parallel.all_reduce_gradients(gradients, run.loss_scale)  # COLLECTIVE
            norms = run.step(gradients, dict(policy=lr), grad_clip)
            steps += bool(norms)  # none, where a float16 gradient has overflowed

    # 5) metrics: means over all tokens and ranks, never means of means
    run.enter("metrics")
    record |= summarize(batch, "objective", reward_names, importance_cap, train_rows)
    record |= summarize_groups(shape_scores(batch), flat)
    if max_refills > 0:  # objective/... is of the batch before refills, and trained/... after them
        record |= {name.replace("objective/", "trained/"): x for name, x in record.items()} | before
    record |= parallel.all_reduce_metrics(sums)  # COLLECTIVE
    record |= {
        "objective/rlhf_reward": mean_of(scores).item(),
        "policy/sampler_gap": sampler_gap,
        "policy/ratio_gap": ratio_gap,
        "policy/grad_norm": norms.get("policy", 0.0),
        "policy/steps": steps,
        "policy/lr": lr,
    }
    run.log(record, batch, rows=train_rows)  # COLLECTIVE

run.finish("tools/sample.py", policy_path=f"{out_dir}/policy")  # COLLECTIVE

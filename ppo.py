"""
PPO for language models, with four models: policy, reference policy, reward model, value model.
Read it downward.

python ppo.py config/arithmetic_ppo.py                          # the toy: a laptop, no download
python ppo.py config/arithmetic_ppo.py --kl_coef=0.5 --seed=2   # override any key (--help)
torchrun --nproc_per_node=8 ppo.py config/llama.py              # 8 GPUs

One iteration: take batch_size prompts;
    1) rollout: the policy answers each prompt;
    2) score: the reward model scores the answers; policy, reference and value model read them;
    3) advantages: scores and KL become rewards of tokens; with the values, these become advantages;
    4) update: a few clipped steps on policy and value model;
    5) metrics, and a line in the log.

    model          output                  trained   starts as
    policy         logprobs (B, T)         yes       policy_path, the SFT model
    ref_policy     ref_logprobs (B, T)     no        the same; none when kl_coef = 0
    reward_model   scores (B,)             no        reward_path; or rules instead, or beside it
    judge          scores (B,)             no        judge_path, where reward_functions names it
    value_model    values (B, T)           yes       reward model or policy (value_init)

B responses in an iteration, in T columns: the longest prompt's length + max_new_tokens. A batch is
a dict of tensors; the head of batches.py has the table of its columns. A number that belongs to a
token stands in the token's column; response_mask is True on the tokens that the policy sampled. A
micro-batch is a few of the rows, cut to the columns that these rows use, (b, W).

COLLECTIVE marks a line that all ranks must reach together, because there they exchange data.
N+ is a paper: The N+ Implementation Details of RLHF with PPO (arXiv 2403.17031).
"""
from configurator import configure  # first: it must be imported before torch

from functools import partial

import torch

import parallel
import ranks
from batches import forward_batch, micro_batches
from errors import BadInput
from formulas import importance_weights, kl_estimate, learning_rate_at, masked_sum, masked_whiten
from gae import compute_gae
from load import autocast, load, load_ref_policy, load_reward_model, load_value_model
from metrics import add_up, explained_variance, gap, summarize
from model import response_logprobs, response_values
from prompts import (batch_rows, encode_prompts, hash_of_ids, permutation, read_prompts,
                     rows_to_evaluate, run_length, say_prompts)
from rewards import check_rows, lacks_shift, last_real, reward_terms, score_batch
from rollout import sample_batch
from run import Run, make_optimizer

# -------------------------------------------------------------------------------------------------
# where to write; the same command again resumes from there
out_dir = "out/ppo"  # * checkpoints, log.jsonl and the finished policy
eval_interval = 10  # iterations between evaluations; also at iteration 0 and after the last [>= 1]
eval_size = 256  # how many held-out prompts to evaluate on, 0 = all [>= 0]

# the models: folders or hub names
policy_path = "out/arithmetic_sft/policy"  # * the SFT model: policy and reference policy
reward_path = ""  # * a model with one label, where reward_functions names reward_model
value_init = "reward"  # + its start: reward, policy, shared (a head on the policy), or a folder

# prompts: JSONL with "prompt", and "answer" where accuracy shall be measured; docs/data.md
prompts_path = "data/arithmetic/rl_train.jsonl"  # * to train on; A.jsonl,0.3*B.jsonl: a mix
eval_path = ""  # * held-out prompts; empty = no evaluation

# 1) rollout
batch_size = 512  # * responses an iteration, over all ranks [1..1000000]
max_new_tokens = 53  # * longest response R (N+ detail 4) [1..1000000]
temperature = 0.7  # + of sampling, and so of every log-prob here (N+: 0.7) [> 0]

# 2) score
reward_functions = "reward_model"  # a sum, as "1.0*accuracy,0.1*format,mine.py:brevity"; rewards.py

# 3) advantages
missing_eos_penalty = 1.0  # + a response that never ends scores minus this; grpo.py's 0: off [>= 0]
kl_coef = 0.05  # *+ weight of the KL to the reference; 0 = no reference policy [>= 0]
kl_estimator = "k1"  # + Schulman's: how the KL is estimated at each token [k1 | k2 | k3]
gamma = 1.0  # + discount of each token [0..1]
lam = 0.95  # + lambda of GAE [0..1]

# 4) update
ppo_epochs = 4  # passes over the batch [1..1000]
num_minibatches = 1  # + optimizer steps a pass [>= 1]
micro_batch_size = 8  # most rows scored or trained at once; only memory depends on it [>= 1]
cliprange = 0.2  # no gain from a ratio beyond 1 +- this [> 0]
cliprange_value = 0.2  # + how far a value may move, in val/unit; 0 = no clipping [>= 0]
vf_coef = 0.1  # weight of the value loss (matters with value_init=shared, grad_clip) [> 0]
entropy_coef = 0.0  # weight of an entropy bonus in the policy loss [>= 0]
# a token's loss is multiplied by p(training) / p(sampler), but by no more than this; 0 = off
importance_cap = 0.0  # + often 2; for 16 bits, vllm, staleness; formulas.importance_weights [>= 0]

# PPO-ptx: an SFT loss beside PPO's in every step, so that the policy forgets less of it
ptx_path = ""  # demonstrations, or JSONL with "text"; A.jsonl,0.3*B.jsonl: a mix; empty = none
ptx_coef = 1.0  # + weight of the mean loss of their tokens; InstructGPT has 27.8 [> 0]

# optimizers: AdamW, one for the policy, one for the value model
max_iters = 1953  # * iterations; 1953 of 512 are a million episodes (N+ detail 21) [>= 1]
learning_rate = 3e-6  # * policy's peak [> 0]
warmup_iters = 0  # policy: iterations of linear warm-up [>= 0]
lr_decay = "linear"  # policy: it stays, or falls to 0 like this [constant | linear | cosine]
value_learning_rate = 0.0  # value model's peak, 0 = learning_rate [>= 0]
value_warmup_iters = 0  # value model: iterations of linear warm-up [>= 0]
value_lr_decay = "linear"  # value model: as lr_decay [constant | linear | cosine]
beta1 = 0.9  # AdamW's first moment decay [0..0.9999]
beta2 = 0.999  # AdamW's second moment decay [0..0.9999]
adam_eps = 1e-5  # AdamW's epsilon (N+ detail 9) [> 0]
grad_clip = 0.0  # largest gradient norm of each model, 0 = no clipping [>= 0]
ema_decay = 0.0  # moving average of the policy, out_dir/ema_policy, 0 = none [0..0.99999]

seed = 1  # decides prompts, sampling, minibatches and a new value head [>= 0]

# system: the keys that are not of the algorithm, such as system.dtype and system.lora
config, system = configure(globals(), "config/keys.py")
if not prompts_path:
    raise BadInput("prompts_path is empty; type --prompts_path=FILE")
if num_minibatches > batch_size:
    raise BadInput(f"num_minibatches = {num_minibatches}: some would be empty; lower it")
# -------------------------------------------------------------------------------------------------
# set-up: the ranks, the models, the data, the optimizers; then begin, or resume

device = ranks.init(system)  # COLLECTIVE
terms = reward_terms(reward_functions, config)  # [(weight, name, function)]
reward_names = [name for _, name, _ in terms]

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

# the value model, trained: one number for each token, the score that is still to be expected
models["value_model"] = value_model = load_value_model(
    value_init, policy, reward_model, system, device, seed)

# the prompts become token ids; all are checked now, not when their turn comes
train_rows, eval_rows = (read_prompts(path, system.fields) for path in (prompts_path, eval_path))
for rows in filter(len, (train_rows, eval_rows)):
    check_rows(terms, rows, policy.tokenizer)  # they have what the rewards need
    encode_prompts(rows, models, max_new_tokens, system)  # their rows.ids
held_out = rows_to_evaluate(len(eval_rows), eval_size, seed)  # numbers of eval_rows
config["max_iters"] = max_iters = run_length(max_iters, system.epochs, len(train_rows), batch_size)

value_lr = value_learning_rate or learning_rate
optimizers = dict(
    policy=make_optimizer(policy, "policy", system, learning_rate, (beta1, beta2), adam_eps),
    value_model=make_optimizer(value_model, "value", system, value_lr, (beta1, beta2), adam_eps))
if ptx_path:
    from options.ptx import Ptx
    ptx = Ptx(policy, config, system, device)
run = Run(  # COLLECTIVE
    out_dir, max_iters, config, system, device, models, optimizers,
    must_match=["seed", "batch_size", "max_new_tokens", "value_init", "policy_path",
                "reward_path", "prompts_path"],
    token_ids=hash_of_ids(train_rows), temperature=temperature, ema_decay=ema_decay)
say_prompts(train_rows, eval_rows, batch_size, max_iters)
gradients = {name: parallel.flatten_gradients(model) for name, model in run.trained.items()}
value_model.unit = run.state.get("value_unit", 1.0)  # how many scores its head's 1 is

# -------------------------------------------------------------------------------------------------
# helpers of the loop

# iteration -> numbers of its data rows; row numbers of a batch -> this rank's micro-batches
rows_of = partial(batch_rows, seed, batch_size=batch_size, rows=train_rows)
my_micro_batches = partial(micro_batches, micro_batch_size=micro_batch_size,
                           micro_batch_tokens=system.micro_batch_tokens)
logprob_models = dict(old_logprobs=policy, ref_logprobs=ref_policy)  # {column: its model}


def forward(model, mb):
    """The value model's values of the response tokens, (b, W); or log-probs, and entropies."""
    with autocast(system, device):
        if model is value_model:
            return response_values(model, mb)
        return response_logprobs(model, mb, temperature, system.head_chunk, entropy_coef > 0)


def minibatches(iteration, epoch=0):
    """The row numbers of each step of an epoch. Each epoch takes them in another order."""
    order = permutation(batch_size, seed, "minibatches", iteration, epoch)  # (B,)
    return order.to(device).tensor_split(num_minibatches)


def rollout(purpose, iteration, rows, row_numbers):
    """A collective: the policy answers the prompts of these data rows; the answers get scores."""
    run.enter(purpose)
    batch = sample_batch(  # COLLECTIVE
        policy, rows, row_numbers, (seed, purpose, iteration), max_new_tokens, temperature, system,
        device)
    run.leave_if_stop_asked()  # COLLECTIVE
    run.enter("score" if purpose == "rollout" else purpose)  # an evaluation is one phase
    with run.saved_if_it_fails():  # COLLECTIVE: a reward may fail, or hang
        score_batch(batch, rows, terms, policy, reward_model, micro_batch_size, system, device)
    return batch


def shape_scores(batch):
    """
    The scores of a batch that are trained on, (B,); 0 where no reward applies. A response that
    never ended gets the penalty: what a reward model says of a text without EOS means little.
    """
    scores = torch.where(batch["scores"].isnan(), 0, batch["scores"])
    if missing_eos_penalty > 0:  # N+ detail 23
        scores = torch.where(batch["finished"], scores, -missing_eos_penalty)
    return scores


def evaluate():
    """A collective: the policy on held-out prompts."""
    batch = rollout("eval", 0, eval_rows, held_out)  # COLLECTIVE; always the same noise
    forward_batch(  # COLLECTIVE
        batch, logprob_models, forward, my_micro_batches(batch, batch["index"]), device)
    return run.log_evaluation(  # COLLECTIVE
        batch, eval_rows, reward_names, shape_scores(batch).mean().item())


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
    mask = batch["response_mask"]  # (B, T)

    # 2) score, before any update: the log-probs of policy and reference, and the values
    scores = shape_scores(batch)  # (B,)
    unit = value_model.update_unit(scores, run.state)  # 1, or a new head's
    parts = (mb for index in minibatches(iteration) for mb in my_micro_batches(batch, index))
    forward_batch(  # COLLECTIVE
        batch, logprob_models | dict(values=value_model), forward, parts, device)
    sampler_gap = run.sampler_gap(batch)  # COLLECTIVE: at iteration 0 the KL must be 0, too

    # 3) advantages: each token pays for its KL; the last token also gets the score
    run.enter("advantages")
    kl = torch.zeros_like(batch["old_logprobs"])  # (B, T)
    if kl_coef > 0:
        kl = kl_estimate(batch["old_logprobs"], batch["ref_logprobs"], kl_estimator)
    rewards = -kl_coef * kl  # (B, T)
    non_score_reward = rewards.sum(1).mean()  # the KL alone; other terms of the reward come below
    # the part of the score that a rule or an environment gave to a token stays at this token
    rewards[batch["index"], last_real(mask)] += scores - batch["token_rewards"].sum(1)
    rewards += batch["token_rewards"]
    rlhf_reward = rewards.sum(1).mean()
    advantages, returns = compute_gae(rewards, batch["values"], mask, gamma, lam)
    batch["returns"] = returns  # (B, T), as the advantages
    batch["advantages"] = masked_whiten(advantages / unit, mask)  # mean 0, deviation 1
    parallel.check_finite(dict(rewards=rewards, returns=returns, advantages=batch["advantages"]))

    # 4) update: policy and value model each have a loss, an optimizer and a learning rate
    run.enter("update")
    lrs = dict(
        policy=learning_rate_at(iteration, learning_rate, warmup_iters, max_iters, lr_decay),
        value_model=learning_rate_at(iteration, value_lr, value_warmup_iters, max_iters,
                                     value_lr_decay))
    value_range = (cliprange_value or torch.inf) * unit  # how far a value may move, in scores
    sums = {}  # {metric: (sum, count)}, measured during the update
    steps = 0  # made so far; before the first one the ratio is 1
    for epoch in range(ppo_epochs):
        for index in minibatches(iteration, epoch):
            # one normaliser for the whole step, over all micro-batches and ranks
            token_count = mask[index].sum()
            gaps = []  # how far the log ratios are from 0
            parallel.zero_gradients(gradients)
            if ptx_path:  # an SFT loss beside PPO's
                ptx.add_gradients(run.loss_scale, iteration, steps, sums)

            for mb in my_micro_batches(batch, index):
                m = mb["response_mask"]  # (b, W)

                # the policy: how much likelier is each token now, and is that good?
                logprobs, entropy = forward(policy, mb)  # (b, W) each
                ratio = (logprobs - mb["old_logprobs"]).exp()
                pg_losses1 = -mb["advantages"] * ratio
                pg_losses2 = -mb["advantages"] * ratio.clamp(1 - cliprange, 1 + cliprange)
                pg_losses = torch.max(pg_losses1, pg_losses2)  # (b, W)
                pg_clipped = pg_losses2 > pg_losses1  # where the clip has taken the gradient away
                pg_losses = pg_losses * importance_weights(mb, importance_cap)  # 1, if 0
                pg_loss = masked_sum(pg_losses, m) / token_count
                if entropy_coef > 0:
                    pg_loss = pg_loss - entropy_coef * masked_sum(entropy, m) / token_count
                (run.loss_scale * pg_loss).backward()
                del pg_loss, entropy  # free the policy's graph before the value model's is built

                # the value model: squared error, with the new value kept near the old one
                values = forward(value_model, mb)  # (b, W)
                change = values - mb["values"]
                clipped_values = mb["values"] + change.clamp(-value_range, value_range)
                vf_losses1 = (values - mb["returns"]) ** 2
                vf_losses2 = (clipped_values - mb["returns"]) ** 2
                vf_losses = 0.5 * torch.max(vf_losses1, vf_losses2) / unit**2  # (b, W)
                # within the range the two losses are equal, but for rounding: that is no clip
                vf_clipped = (vf_losses2 > vf_losses1) & (change.abs() > value_range)
                vf_loss = vf_coef * masked_sum(vf_losses, m) / token_count
                (run.loss_scale * vf_loss).backward()

                # the sums over all micro-batches, for the log
                add_up(sums, m, {
                    "loss/policy": pg_losses, "loss/value": vf_losses,
                    "policy/clipfrac": pg_clipped, "val/clipfrac": vf_clipped,
                    "policy/approx_kl": kl_estimate(mb["old_logprobs"], logprobs, "k3")})
                gaps.append(gap(logprobs - mb["old_logprobs"], m, system.dtype))

            if steps == 0:  # the ratio must be 1, unless an older policy has sampled the batch
                ratio_gap = run.ratio_gap(  # COLLECTIVE
                    gaps, sums, to_older="age" in batch and importance_cap == 0)
            # from here on the gradients are the same on all ranks
            parallel.all_reduce_gradients(gradients, run.loss_scale)  # COLLECTIVE
            norms = run.step(gradients, lrs, grad_clip)
            steps += bool(norms)  # none, where a float16 gradient has overflowed

    # 5) metrics: means over all tokens and ranks, never means of means
    run.enter("metrics")
    record |= summarize(batch, "objective", reward_names, importance_cap, train_rows)
    record |= parallel.all_reduce_metrics(sums)  # COLLECTIVE
    record |= {
        "objective/non_score_reward": non_score_reward.item(),
        "objective/rlhf_reward": rlhf_reward.item(),
        "policy/sampler_gap": sampler_gap,
        "policy/ratio_gap": ratio_gap,
        "policy/grad_norm": norms.get("policy", 0.0),
        "policy/steps": steps,
        "policy/lr": lrs["policy"],
        "val/grad_norm": norms.get("value_model", 0.0),
        "val/explained_variance": explained_variance(batch["values"], returns, mask, unit).item(),
        "val/unit": unit,
        "val/lr": lrs["value_model"],
    }
    run.log(record, batch, rows=train_rows)  # COLLECTIVE

run.finish("tools/sample.py", policy_path=f"{out_dir}/policy")  # COLLECTIVE

"""
PPO for language models, with four models: policy, reference policy, reward model, value model. Read it downward.

python ppo.py config/arithmetic_ppo.py                                         # the toy, on a laptop, no download
python ppo.py config/arithmetic_ppo.py --kl_coef=0.5 --seed=2                  # any key can be overridden; --help lists them
torchrun --nproc_per_node=8 ppo.py config/llama.py                             # 8 GPUs
torchrun --nnodes=2 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=HOST:29500 ppo.py config/llama.py

One iteration: take batch_size prompts; 1) let the policy answer them; 2) score the answers with all four models; 3) turn
scores and KL into rewards a token, and rewards and values into advantages; 4) take a few clipped steps on policy and value
model; 5) add up the metrics; 6) print and log them.

    model          output                       trained   starts as
    policy         logprobs (B, R)              yes       policy_path, the SFT model
    ref_policy     ref_logprobs (B, R)          no        the same
    reward_model   scores (B,)                  no        reward_path; or rules instead of it, or beside it (rewards)
    value_model    values (B, R)                yes       reward model or policy (value_init)

B responses of an iteration, P prompt length, R response length, T = P + R, V vocabulary. Masks are True where it counts.
"""
import hashlib
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import engine  # noqa: F401, first: it notes which CPUs there are, before torch's OpenMP may pin this thread

import torch

import parallel
from configurator import configure
from data import batch_rows, encode_for_all, micro_batches, permutation, read_jsonl
from engine import audit, launch, report, together
from engine.adapters import Adapted, load_adapted, load_adapter
from engine.checkpoint import load_checkpoint, save_checkpoint, save_final
from engine.disk import sha256
from engine.memory import predicted_mib
from engine.optimizers import MovingAverage, make_optimizer, overflowed, step
from engine.placement import in_memory, load, on_device, placements, precisions, reshard, sampler, sharded
from engine.report import is_better, print_models, print_samples, progress, summarize
from engine.reward_mix import call_rewards, check_rows, collect, files_of, parse_rewards
from engine.run_folder import fingerprint, open_run
from engine.run_log import write_log
from engine.tokenizers import check_tokenizer_fits, load_tokenizer
from errors import BadConfig, BadInput
from gae import compute_gae
from loss import (adapt_kl_coef, gap, gap_limit, kl_estimate, learning_rate_at,
                  logprobs_and_entropy, masked_sum, masked_whiten, policy_loss, standard_deviation,
                  update_moments, value_loss)
from model import at_least_float32, freeze
from rewards import RULES, accuracy, alike_for_equal_texts, last_real, reward_model_scores, thinks
from rollout import generate, response_uniforms


# ---------------------------------------------------------------------------------------------------------------------
# where to write
out_dir = "out/ppo"  # checkpoints, log.jsonl and the finished policy; the same command again resumes from here
eval_interval = 10  # iterations between evaluations; also at iteration 0 and after the last [>= 1]
eval_size = 256  # how many held-out prompts to evaluate on, 0 = all [>= 0]
checkpoint_interval = 50  # iterations between checkpoints; 0 = only at the end [>= 0]
keep_checkpoints = 1  # how many checkpoints to leave [>= 1]
keep_best = False  # also leave out_dir/best_policy: the highest held-out score so far, missing_eos_penalty included
sync_check_interval = 10  # iterations between checks that all ranks hold the same models [>= 1]
# the models: folders or hub names
policy_path = "out/arithmetic_sft/policy"  # the SFT model: policy and reference policy
reward_path = "out/arithmetic_rm/reward_model"  # sequence-classification model with one label, where reward_functions uses it
value_init = "reward"  # value model: starts as reward model or policy; shared: is a head on the policy [reward | policy | shared]
# prompts: JSONL with "prompt", and "answer" where accuracy shall be measured
prompts_path = "data/arithmetic/rl_train.jsonl"  # prompts to train on
eval_path = "data/arithmetic/rl_val.jsonl"  # held-out prompts
# 1) rollout
batch_size = 512  # responses an iteration, over all ranks [1..1000000]
max_new_tokens = 53  # longest response R (N+ detail 4) [1..1000000]
temperature = 0.7  # of sampling, and so of every log-prob here (N+: 0.7) [> 0]
rollout_batch_size = 0  # responses that decode at once on a rank, 0 = all; only memory depends on it [>= 0]
# 2), 3) scores and KL -> rewards -> advantages
reward_functions = "reward_model"  # what scores a response: a sum such as "1.0*accuracy,0.1*format,mine.py:brevity"; see rewards.py
reward_timeout = 300  # seconds that the rules may take for an iteration's responses; below timeout on several ranks [1..1000000]
scale_scores = "none"  # running: scores are divided by their standard deviation so far [none | running]
missing_eos_penalty = 1.0  # a response that never ended scores minus this (N+ detail 23), 0 = leave its score [>= 0]
reward_clip = 0.0  # scores are clipped to +- this, 0 = no clipping [>= 0]
kl_coef = 0.05  # weight of the KL to the reference; where it begins, if kl_coef_target moves it [>= 0]
kl_in = "reward"  # where the KL enters: the reward of each token, or the policy loss [reward | loss]
kl_estimator = "k1"  # Schulman's estimators; in the loss choose k2, whose gradient is the KL's [k1 | k2 | k3]
kl_coef_target = 0.0  # KL in nats a response that kl_coef is adapted to hold (Ziegler et al.), 0 = kl_coef stays [>= 0]
kl_horizon = 10000  # responses in which an adapted kl_coef changes by at most 20 % [>= 1]
gamma = 1.0  # discount a token [0..1]
lam = 0.95  # lambda of GAE [0..1]
# 4) PPO
ppo_epochs = 4  # passes over the batch [1..1000]
num_minibatches = 1  # optimizer steps a pass [>= 1]
micro_batch_size = 8  # rows scored or trained at once; only memory depends on it [>= 1]
cliprange = 0.2  # the ratio earns nothing beyond 1 +- this [> 0]
cliprange_value = 0.2  # the value may move this far from the old one, 0 = no clipping [>= 0]
vf_coef = 0.1  # weight of the value loss (it has its own optimizer; matters with grad_clip and adam_eps) [> 0]
entropy_coef = 0.0  # weight of an entropy bonus in the policy loss [>= 0]
target_kl = 0.0  # no more steps this iteration once approx_kl (k3, a token) exceeds this, 0 = take them all [>= 0]
# optimizers: AdamW, one for the policy, one for the value model
max_iters = 1953  # iterations; 1953 of 512 are a million episodes (N+ detail 21) [>= 1]
learning_rate = 3e-6  # policy's peak [> 0]
warmup_iters = 0  # policy: iterations of linear warm-up [>= 0]
lr_decay = "linear"  # policy: shape of the way down to 0 [constant | linear | cosine]
value_learning_rate = 3e-6  # value model's peak [> 0]
value_warmup_iters = 0  # value model: iterations of linear warm-up [>= 0]
value_lr_decay = "linear"  # value model: shape of the way down to 0 [constant | linear | cosine]
weight_decay = 0.0  # AdamW's [>= 0]
beta1 = 0.9  # AdamW's first moment decay [0..0.9999]
beta2 = 0.999  # AdamW's second moment decay [0..0.9999]
adam_eps = 1e-5  # AdamW's epsilon (N+ detail 9) [> 0]
grad_clip = 0.0  # largest gradient norm of each model, 0 = no clipping [>= 0]
# system
seed = 1  # decides prompts, sampling, minibatches and a new value head [>= 0]
device_type = "auto"  # auto = a GPU if there is one [auto | cpu | cuda]
head_chunk = 0  # logits of so many tokens at a time, 0 = of a whole micro-batch; only memory depends on it [>= 0]
zero_stage = ""  # "policy=3,ref=3,value=3,reward=0": what of each model is split over the ranks, stages 0 to 3; see engine/placement.py
offload = ""  # "policy=optimizer,reward=params": what of a model is in the CPU's memory: its optimizer, or (frozen, sharded) all
lora = ""  # "policy=16,value=8:32:q+v": train adapters of RANK[:ALPHA[:TARGETS]] on a frozen model; the reference is then free
share_base = False  # all models are adapters and heads on one frozen trunk, policy_path; reward_path is an adapter on it
optim = "adamw"  # or "policy=adafactor,value=adamw": adafactor keeps sums of rows and columns instead of two states
ema_decay = 0.0  # moving average of the policy, in out_dir/ema_policy: weight of the old at a step, 0 = none [0..0.99999]
gradient_checkpointing = False  # compute each layer's activations again in the backward pass; only memory depends on it
dtype = "float32"  # 16 bits: fp32 weights under autocast; float64: for tests [float32 | bfloat16 | float16 | float64]
master_weights = True  # False, with bfloat16: train the 16-bit weights themselves; half the memory, and small steps get lost
deterministic = False  # GPUs: only kernels that repeat bit for bit, somewhat slower; CPUs always do
timeout = 600  # seconds after which waiting for a lost rank is an error [1..1000000]
config = configure(globals())
# ---------------------------------------------------------------------------------------------------------------------
if num_minibatches > batch_size:
    raise BadConfig(f"num_minibatches = {num_minibatches} would leave minibatches of batch_size = {batch_size} empty; lower it")
if kl_in == "loss" and kl_estimator == "k1":
    raise BadConfig("kl_in = 'loss' with kl_estimator = 'k1' is no penalty: the gradient of k1 is 0 on average in the first step "
                    "and not the KL's in any other; type --kl_estimator=k2")
if kl_coef_target > 0 and batch_size >= 5 * kl_horizon:
    raise BadConfig(f"kl_horizon = {kl_horizon} is no more than a fifth of batch_size = "
                    f"{batch_size}: a single iteration could make kl_coef 0 or negative; type "
                    f"--kl_horizon={batch_size} or more")

rank, world_size, device = launch.init(device_type, timeout, deterministic)  # COLLECTIVE
# several rewards may be mixed; reward_model is the learned one, the others are rules
terms = parse_rewards(reward_functions, RULES | {"reward_model": None}, ".")
rules = [term for term in terms if term[1] != "reward_model"]
learned, each_reward = len(rules) < len(terms), [name for _, name, _ in terms]
if rules and world_size > 1 and reward_timeout >= timeout:
    raise BadConfig(f"reward_timeout = {reward_timeout} must be below timeout = {timeout}, or ranks that wait give up first")
if value_init == "reward" and not learned:
    raise BadConfig("value_init = 'reward', but reward_functions does not use reward_model; type --value_init=policy")

master = rank == 0
place = placements(("policy", "value"), zero_stage, offload, lora, optim, share_base, value_init)
precision, weights_dtype, frozen_dtype = precisions(dtype, master_weights, device)
train_rows, eval_rows = (read_jsonl(path, ["prompt"]) for path in (prompts_path, eval_path))
for rows, path in ((train_rows, prompts_path), (eval_rows, eval_path)):
    check_rows(rules, rows, path)

# the models. None has dropout; the frozen ones cannot move, and the audit below checks that they have not
tokenizer = load_tokenizer(policy_path)
reward_tokenizer = load_tokenizer(reward_path) if learned and not share_base else tokenizer
settings = dict(device=device, dtype=weights_dtype, matrices=frozen_dtype, seed=seed, recompute=gradient_checkpointing)
policy = load(policy_path, place["policy"], trained=True, **settings)
ref_policy = policy.base if place["policy"].lora else load(policy_path, place["ref"], **settings)
reward_model = None
if learned:
    reward_model = (freeze(load_adapted(policy.base, reward_path, "scalar", policy_path)) if share_base else
                    load(reward_path, place["reward"], head="scalar", **settings))
    check_tokenizer_fits(reward_tokenizer, reward_model, reward_path)
    if reward_model.new_head:
        raise BadInput(f"reward_path {reward_path!r} has no score head, it is a plain language model; train one with rm.py")
if value_init == "shared":  # one more forward of the policy's trunk, which both losses then train
    value_model = Adapted(policy, "scalar", seed=seed)
elif share_base:
    value_model = Adapted(policy.base, "scalar", **place["value"].lora, seed=seed)
    if value_init == "reward":
        load_adapter(value_model, reward_path)
else:
    value_path = reward_path if value_init == "reward" else policy_path
    value_model = load(value_path, place["value"], head="scalar", trained=True, **settings)
models = in_memory(policy=policy, ref_policy=ref_policy, reward_model=reward_model, value_model=value_model)
trained = dict(policy=policy, value_model=value_model)
if value_init == "reward" and reward_tokenizer.fingerprint != tokenizer.fingerprint:
    raise BadInput("the reward model has another tokenizer than the policy, so it cannot value the policy's tokens; type "
                   "--value_init=policy")
check_tokenizer_fits(tokenizer, policy, policy_path)
# prompts are checked now, not when their turn comes
train_prompts, eval_prompts = (encode_for_all(rows, path, max_new_tokens, models, tokenizer, reward_tokenizer)
                               for rows, path in ((train_rows, prompts_path), (eval_rows, eval_path)))
together.agree(config | {f"the content of {path}": sha256(path) for path in (prompts_path, eval_path, *files_of(reward_functions))}
               | {"the tokenizers": [tokenizer.fingerprint, reward_tokenizer.fingerprint]}
               | {f"the weights of {name}": fingerprint(model) for name, model in models.items()})  # COLLECTIVE

# optimizers, then resume or begin
adam = (beta1, beta2), adam_eps, weight_decay
optimizers = dict(policy=make_optimizer(policy, place["policy"], learning_rate, *adam),
                  value_model=make_optimizer(value_model, place["value"], value_learning_rate, *adam))
ema = MovingAverage(policy, ema_decay) if ema_decay > 0 else None
sources = ["policy_path", "prompts_path", *(["reward_path"] if learned else [])]  # whose contents may not change underway
checkpoint, state = open_run(out_dir, config, ["seed", "batch_size", "lora", "share_base", "value_init", "optim", *sources],
                             sources)
if checkpoint:
    load_checkpoint(checkpoint, trained, optimizers, ema)
    if kl_coef_target == 0:
        state["kl_coef"] = kl_coef  # which may be another one now
else:  # what the loop carries from one iteration to the next, beside weights and optimizers
    state = dict(iteration=0, kl_coef=kl_coef, score_moments=[0, 0.0, 0.0], best_score=None,
                 loss_scale=2.0**16, clean_steps=0, skipped=0)
start = state["iteration"]
parallel.broadcast_parameters(models.values())  # COLLECTIVE
policy_gradients = parallel.flatten_gradients(policy.parameters())
value_gradients = parallel.flatten_gradients(value_model.parameters())
gradients = policy_gradients + value_gradients
frozen_sums = {}  # filled by the first audit
predicted = predicted_mib(config, policy, reward_model, tokenizer, train_prompts, eval_prompts, world_size, device)
if master:
    print_models(models)
    print(f"{world_size} rank(s) on {device.type}, {dtype}, {predicted:.0f} MiB of tensors each at most; an iteration is "
          f"{batch_size} responses and {ppo_epochs} x {num_minibatches} steps on {batch_size // num_minibatches} of them")
    print(f"resuming from {checkpoint}" if checkpoint else f"writing to {out_dir}")


# ---------------------------------------------------------------------------------------------------------------------
# helpers that close over the configuration


def response_logprobs(model, rows):
    """
    Log-prob and entropy of each response token, (b, R), of the temperature-scaled distribution that is sampled; and 0 under the
    mask: there exp could overflow into somebody's gradient. (Entropy is 0 where nobody asks for it.)
    """
    mask = rows["response_mask"]
    with precision:
        hidden = model.trunk(rows["tokens"], rows["attention_mask"], response_length=mask.shape[1])  # (b, R, d)
        results = logprobs_and_entropy(hidden, model.lm_head_weight(), rows["tokens"][:, -mask.shape[1]:], temperature,
                                       tokenizer.vocab_size, head_chunk, entropy_coef > 0)
    return [torch.where(mask, x, 0) for x in results]


def response_values(rows):
    """V of the state before each response token, (b, R)."""
    with precision:
        values = value_model(rows["tokens"], rows["attention_mask"], response_length=rows["response_mask"].shape[1])
    return torch.where(rows["response_mask"], at_least_float32(values) + value_model.config.score_shift, 0)


def sample_and_judge(rows, prompts, purpose, noise):
    """
    Sample a response to each of B data rows, whose prompts are given as ids, and give each its score. Every rank does its
    share and gets everyone's: a dict of tensors with all B rows, in order. From there on, all ranks compute on the same
    numbers.
    """
    enter(purpose)
    width = max(len(p) for p in prompts)  # one P for all ranks
    slots = parallel.my_share(range(len(rows)))
    n = rollout_batch_size or max(len(slots), 1)
    parts, pending, texts = [], [], dict(rows=[], prompts=[], completions=[])
    decoder = sampler(policy, frozen_dtype, device)
    for part in (slots[i:i + n] for i in range(0, max(len(slots), 1), n)):
        with precision:
            parts.append(generate(decoder, [prompts[i] for i in part], max_new_tokens, temperature, tokenizer.eos_ids,
                                  tokenizer.pad_id, tokenizer.vocab_size,
                                  response_uniforms(seed, purpose, noise, part, max_new_tokens), prompt_width=width,
                                  stop=launch.stop_asked))
        responses = [t[width:][m].tolist() for t, m in zip(parts[-1]["tokens"], parts[-1]["response_mask"], strict=True)]
        said = dict(rows=[rows[i] for i in part], prompts=[tokenizer.decode(prompts[i]) for i in part],
                    completions=[tokenizer.decode(r) for r in responses])
        for name, items in said.items():
            texts[name] += items
        said["seconds"] = reward_timeout * len(part) / max(len(slots), 1)  # that its rules may take
        pending.append(threads.submit(call_rewards, rules, parts[-1] | said))  # at work while the next part is sampled
    mine = {k: torch.cat([part[k] for part in parts]) for k in parts[0]}
    del decoder, parts  # a gathered copy of sharded weights is only for the rollout
    leave_if_asked()
    if purpose == "rollout":
        enter("score")
    each = together.together(lambda: collect(pending, reward_timeout))  # COLLECTIVE: before any forward that needs all ranks
    if learned:
        forwards = parallel.most_micro_batches(len(rows), micro_batch_size)  # as many on every rank
        with precision, on_device(reward_model, device):
            each["reward_model"] = reward_model_scores(mine | texts, reward_model, reward_tokenizer, tokenizer,
                                                       micro_batch_size, forwards)
        reshard([reward_model])
    mine |= {f"reward/{name}": x.to(mine["sampler_logprobs"]) for name, x in each.items()}  # (b,) each
    mine["accuracy"], mine["thinks"] = accuracy(texts).to(device), thinks(texts).to(device)
    leave_if_asked()
    batch = parallel.gather_rows(mine, len(rows))  # COLLECTIVE: b rows -> all B
    batch["index"] = torch.arange(len(rows), device=device)
    if learned:
        batch["reward/reward_model"] = alike_for_equal_texts(batch["reward/reward_model"], batch)
    batch["scores"] = sum(weight * batch[f"reward/{name}"] for weight, name, _ in terms)  # (B,)
    audit.check_finite({k: batch[k] for k in ("sampler_logprobs", "scores")}, iteration)
    return batch


def shape_scores(batch):
    """What the settings make of the scores; raw_scores remain what they were."""
    batch["raw_scores"] = batch["scores"]
    if scale_scores == "running":
        batch["scores"] = batch["scores"] / standard_deviation(state["score_moments"])
    if missing_eos_penalty > 0:
        batch["scores"] = torch.where(batch["finished"], batch["scores"], -missing_eos_penalty)
    if reward_clip > 0:
        batch["scores"] = batch["scores"].clamp(-reward_clip, reward_clip)


def run_models(batch, minibatches):
    """
    What policy, reference and value model say of each response token before the update: adds old_logprobs, ref_logprobs and
    values, (B, R) each. Every rank does its share and gets everyone's.

    minibatches: the rows of each step of the first epoch. The old log-probs are not the sampler's: they come from the very
    forward that will be trained, in the very micro-batches, so that not even rounding moves the first ratio from 1.
    """
    names = ("old_logprobs", "ref_logprobs", "values")
    said = {name: torch.zeros_like(batch["sampler_logprobs"]) for name in names}  # (B, R), 0 where others have said it
    with torch.no_grad(), on_device(ref_policy, device):
        for mb in (mb for rows in minibatches for mb in my_micro_batches(batch, rows)):
            if launch.stop_asked() and not any(map(sharded, models.values())):  # which all ranks must run alike
                break  # no matter what is missing now: all ranks leave below
            length = mb["response_mask"].shape[1]
            said["old_logprobs"][mb["index"], :length] = response_logprobs(policy, mb)[0]
            said["ref_logprobs"][mb["index"], :length] = response_logprobs(ref_policy, mb)[0]
            said["values"][mb["index"], :length] = response_values(mb)
    reshard(models.values())
    leave_if_asked()
    batch |= parallel.all_reduce_sum(said)  # COLLECTIVE
    audit.check_finite({name: batch[name] for name in names}, iteration)


def my_micro_batches(batch, rows):
    """This rank's share of these rows of a batch, in micro-batches; as many on every rank."""
    return micro_batches(batch, parallel.my_share(rows), micro_batch_size,
                         parallel.most_micro_batches(len(rows), micro_batch_size))


def enter(phase):
    """Begin a phase of the iteration. Seconds are booked under it until the next one, and errors name it."""
    global current, clock
    if device.type == "cuda":
        torch.cuda.synchronize()
    now = time.perf_counter()
    times[current] = times.get(current, 0.0) + now - clock
    current, clock = phase, now
    parallel.phase = f"iteration {iteration}, {phase}"


def save():
    """A checkpoint that says: this iteration comes next. To be called while its update has not begun."""
    enter("checkpoint")
    audit.audit(models, frozen_sums, iteration)  # COLLECTIVE
    save_checkpoint(out_dir, iteration, trained, optimizers, state, tokenizer, keep_checkpoints, ema)


def leave_if_asked():
    """After SIGTERM or Ctrl-C on any rank, all save and exit together. An iteration that has begun is sampled again, alike."""
    if launch.stop_agreed():  # COLLECTIVE
        save()
        if master:
            print(f"stopped before the update of iteration {iteration}, and saved; resume with the same command")
        threads.shutdown(wait=False, cancel_futures=True)
        launch.finish()  # COLLECTIVE
        sys.exit(0)


# ---------------------------------------------------------------------------------------------------------------------
# the loop

times, current, clock, began = {}, "start", time.perf_counter(), time.time()
limit = gap_limit(dtype, temperature)  # of what must be 0 on paper
threads = ThreadPoolExecutor(1)  # for rules; those that take long wait for processes of their own, so one is enough
for iteration in range(start, max_iters + 1):
    # 0) audit, evaluation, checkpoint: before the update, so that checkpoint k means "iteration k comes next"
    enter("audit")
    times.clear()
    record = {"iteration": iteration}
    last, due = iteration == max_iters, checkpoint_interval and iteration > start and iteration % checkpoint_interval == 0
    if iteration % sync_check_interval == 0 or iteration == start:
        audit.audit(models, frozen_sums, iteration)  # COLLECTIVE
    if iteration % eval_interval == 0 or last:
        rows, prompts = (x[:eval_size or len(x)] for x in (eval_rows, eval_prompts))
        batch = sample_and_judge(rows, prompts, "eval", 0)  # the same noise every time: less of it in the curve
        run_models(batch, [batch["index"]])
        shape_scores(batch)
        record |= summarize(batch, "eval", each_reward)
        # by what PPO maximises, in the units of the raw scores: a response that never ends is no good one
        mean = batch["scores"].mean().item()
        mean *= standard_deviation(state["score_moments"]) if scale_scores == "running" else 1
        if keep_best and is_better(mean, state["best_score"]):
            state["best_score"] = mean
            save_final(out_dir, "best_policy", policy, tokenizer)
        if master:
            print(f"eval {iteration}: " + " | ".join(f"{k[5:]} {x:.3f}" for k, x in record.items() if k.startswith("eval/")))
            print_samples(batch, rows, tokenizer)
    if due or last:
        save()
    if last:
        enter("log")
        write_log(out_dir, record | {f"time/{phase}": t for phase, t in times.items()})  # COLLECTIVE
        break

    # 1) rollout, 2) score it with all models: afterwards every rank holds the whole batch
    leave_if_asked()
    picked = batch_rows(seed, iteration, batch_size, len(train_rows))
    batch = sample_and_judge([train_rows[i] for i in picked], [train_prompts[i] for i in picked], "rollout", iteration)
    orders = [permutation(batch_size, seed, "minibatches", iteration, epoch).to(device) for epoch in range(ppo_epochs)]
    run_models(batch, orders[0].tensor_split(num_minibatches))
    # only now, when this iteration cannot be left any more: a checkpoint has the state before it
    if scale_scores == "running":
        state["score_moments"] = update_moments(state["score_moments"], batch["scores"])
    shape_scores(batch)
    mask = batch["response_mask"]  # (B, R)
    sampler_gap = audit.must_agree(gap(batch["sampler_logprobs"] - batch["old_logprobs"], mask, dtype), limit,
                                      "the sampler", iteration, models)  # COLLECTIVE
    if iteration == 0:
        audit.must_agree(gap(batch["ref_logprobs"] - batch["old_logprobs"], mask, dtype), limit, "the reference", iteration,
                            models)  # COLLECTIVE

    # 3) rewards and advantages: the KL costs at every token, the score comes with the last one
    kl = kl_estimate(batch["old_logprobs"], batch["ref_logprobs"], kl_estimator)  # (B, R)
    rewards = -state["kl_coef"] * kl if kl_in == "reward" else torch.zeros_like(kl)  # (B, R)
    non_score_reward = rewards.sum(1).mean()
    rewards[batch["index"], last_real(mask)] += batch["scores"]
    advantages, batch["returns"] = compute_gae(rewards, batch["values"], mask, gamma, lam)  # (B, R) each
    batch["advantages"] = masked_whiten(advantages, mask)  # over the responses of all ranks
    audit.check_finite(dict(kl=kl, rewards=rewards, advantages=batch["advantages"], returns=batch["returns"]), iteration)

    # 4) PPO epochs: policy and value model each have their loss, optimizer and learning rate
    enter("update")
    names = ["loss/policy", "loss/value", "loss/kl", "policy/approx_kl", "policy/clipfrac", "val/clipfrac"]
    sums = {k: torch.zeros(2, dtype=torch.float64, device=device) for k in names}  # (masked sum, count)
    policy_lr = learning_rate_at(iteration, learning_rate, warmup_iters, max_iters, lr_decay)
    value_lr = learning_rate_at(iteration, value_learning_rate, value_warmup_iters, max_iters, value_lr_decay)
    ratio_gap, steps, skips = torch.zeros((), dtype=torch.float64, device=device), 0, 0
    for rows in (rows for order in orders for rows in order.tensor_split(num_minibatches)):
        token_count = mask[rows].sum()  # one normaliser for the whole step, over all micro-batches and ranks
        drift = -sums["policy/approx_kl"]
        loss_scale = state["loss_scale"] if dtype == "float16" else 1.0
        for flat in gradients:
            flat.zero_()
        for mb in my_micro_batches(batch, rows):
            m = mb["response_mask"]  # (b, R)
            logprobs, entropy = response_logprobs(policy, mb)  # (b, R) each
            if steps == 0:
                ratio_gap = torch.maximum(ratio_gap, gap(logprobs - mb["old_logprobs"], m, dtype))
            pg_losses, clipped = policy_loss(logprobs, mb["old_logprobs"], mb["advantages"], m, cliprange)
            kl_losses = kl_estimate(logprobs, mb["ref_logprobs"], kl_estimator)
            pg_loss = masked_sum(pg_losses, m) / token_count
            if kl_in == "loss":
                pg_loss = pg_loss + state["kl_coef"] * masked_sum(kl_losses, m) / token_count
            if entropy_coef > 0:
                pg_loss = pg_loss - entropy_coef * masked_sum(entropy, m) / token_count
            (loss_scale * pg_loss).backward()
            del pg_loss, entropy  # the policy's graph is gone before the value model's is built

            values = response_values(mb)  # (b, R)
            vf_losses, vf_clipped = value_loss(values, mb["values"], mb["returns"], m, cliprange_value)
            (loss_scale * vf_coef * masked_sum(vf_losses, m) / token_count).backward()

            approx_kl = kl_estimate(mb["old_logprobs"], logprobs, "k3")  # how far this iteration has moved the policy
            for k, x in zip(names, (pg_losses, vf_losses, kl_losses, approx_kl, clipped, vf_clipped), strict=True):
                sums[k] += torch.stack([masked_sum(x.detach().double(), m), m.sum()])

        # the one collective of a step; everything after it is the same on all ranks
        parallel.all_reduce_gradients(gradients, loss_scale)  # COLLECTIVE
        policy_norm = parallel.clip_gradients(policy_gradients, grad_clip)
        value_norm = parallel.clip_gradients(value_gradients, grad_clip)
        if steps == 0:
            ratio_gap = audit.must_agree(ratio_gap, limit, "the training forward", iteration, models)  # COLLECTIVE
        steps += 1
        if dtype == "float16" and overflowed(state, (policy_norm, value_norm), iteration):
            skips, policy_norm, value_norm = skips + 1, torch.zeros(()), torch.zeros(())  # JSON has no infinity
            continue  # on all ranks, for the gradients are everybody's
        audit.check_gradients(policy_norm, policy, "policy", iteration)
        audit.check_gradients(value_norm, value_model, "value_model", iteration)
        drift = drift + sums["policy/approx_kl"]  # of this minibatch on this rank
        if target_kl > 0 and parallel.all_reduce_metrics({"kl": drift})["kl"] > target_kl:  # COLLECTIVE
            steps -= 1
            break
        step(optimizers["policy"], policy_lr)
        step(optimizers["value_model"], value_lr)
        if ema:
            ema.update()

    # 5) metrics: means over all tokens and ranks, never means of means
    enter("metrics")
    token_count = int(mask.sum())
    record["objective/texts"] = hashlib.blake2b(batch["tokens"].cpu().numpy().tobytes(), digest_size=8).hexdigest()
    record |= summarize(batch, "objective", each_reward) | parallel.all_reduce_metrics(sums)  # COLLECTIVE
    returns, residual = batch["returns"][mask], (batch["returns"] - batch["values"])[mask]
    record |= {
        "objective/kl_coef": state["kl_coef"], "objective/non_score_reward": non_score_reward.item(),
        "objective/rlhf_reward": rewards.sum(1).mean().item(), "policy/sampler_gap": sampler_gap, "policy/ratio_gap": ratio_gap,
        "policy/grad_norm": policy_norm.item(), "val/grad_norm": value_norm.item(), "policy/steps": steps - skips,
        "val/explained_variance": (1 - residual.var() / returns.var().clamp(min=1e-8)).item(),
        "policy/lr": policy_lr, "val/lr": value_lr,
    }
    if kl_coef_target > 0:
        state["kl_coef"] = adapt_kl_coef(state["kl_coef"], record["objective/kl"], kl_coef_target, kl_horizon, batch_size)

    # 6) timing and logging
    enter("log")
    total = sum(times.values())
    record |= {f"time/{phase}": t for phase, t in times.items()} | {"time/iteration": total}
    record |= {"mem/peak_mib": report.peak_memory_mib(device), "mem/predicted_mib": predicted}
    write_log(out_dir, record)  # COLLECTIVE
    if master:
        print(progress(record, start, iteration + 1, max_iters, token_count, began), flush=True)

save_final(out_dir, "policy", policy, tokenizer)
if ema:
    with ema.in_place():
        save_final(out_dir, "ema_policy", policy, tokenizer)
save_final(out_dir, "value_model", value_model, tokenizer)
if master:
    print(f"saved {os.path.join(out_dir, 'policy')}; next: sample.py to talk to it, plot.py to draw the run")
launch.finish()  # COLLECTIVE

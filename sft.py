"""
Supervised fine-tuning: the first of the three steps. A language model learns to continue prompts as
demonstrations do. The loss counts the tokens of the completions alone, their EOS included.

python sft.py config/arithmetic_sft.py                    # the toy, from scratch, on a laptop
torchrun --nproc_per_node=8 sft.py config/tldr_sft.py     # a hub model on 8 GPUs

Leaves out_dir/policy, a Hugging Face directory, and out_dir/log.jsonl. The same command again
resumes.

b demonstrations of a micro-batch, T tokens of the longest of them, n trained tokens of all of them,
d width of the model.
"""
import os
import sys
import time

import parallel
from configurator import configure
from data import (batch_rows, encode_examples, iterations, micro_batches_of, tokens_of_example,
                  trained_tokens)
from engine import audit, launch, report, together
from engine.checkpoint import load_checkpoint, save_checkpoint, save_final
from engine.optimizers import make_optimizer, overflowed, step
from engine.placement import finish_placing, in_memory, load_placed, no_grad_forwards, shard
from engine.places import is_sharded, place_of_one, precisions
from engine.run_folder import data_hashes, fingerprint, open_run
from engine.run_log import write_log
from engine.tokenizers import check_tokenizer_fits, load_tokenizer
from engine.trackers import start_trackers
from errors import BadConfig
from rows import Rows, read_rows, sft_row
from loss import example_logprobs, learning_rate_at
from model import from_scratch


# -------------------------------------------------------------------------------------------------
# where to write
out_dir = "out/sft"  # checkpoints, log.jsonl and the finished policy; to resume, give the same
eval_interval = 100  # iterations between evaluations; also at iteration 0 and at the end [>= 1]
eval_size = 256  # how many held-out demonstrations to evaluate on, 0 = all [>= 0]

# data: JSONL with "prompt" and "completion", or with "messages", or as docs/data.md says
train_path = "data/arithmetic/sft_train.jsonl"  # to learn; A.jsonl,0.3*B.jsonl: a mix of files
val_path = ""  # held-out demonstrations; empty = no evaluation
max_tokens = 0  # longest prompt and completion together, 0 = the model's context [>= 0]
too_long = "error"  # a longer one; cut: lose its end, and EOS with it [error | drop | cut]

# model
init_from = "scratch"  # a model folder or hub name; scratch: a new model of the sizes below
tokenizer_path = "data/arithmetic/tokenizer"  # of a scratch model; other models bring their own
family = "gpt2"  # scratch: the architecture [gpt2 | llama]
n_layer = 2  # scratch: layers [1..1000]
n_head = 8  # scratch: attention heads [1..1000]
d_model = 128  # scratch: width of the residual stream [2..100000]
d_ff = 512  # scratch: width inside the MLP [1..1000000]
context = 64  # scratch: longest sequence [2..10000000]

# optimizer: AdamW
max_iters = 700  # optimizer steps [>= 1]
batch_size = 128  # demonstrations a step, over all ranks [1..1000000]
micro_batch_size = 32  # demonstrations at once; only memory depends on it [>= 1]
micro_batch_tokens = 0  # instead: as many as have so many tokens; 0 = micro_batch_size [>= 0]
learning_rate = 3e-3  # peak [> 0]
warmup_iters = 20  # steps of linear warm-up [>= 0]
lr_decay = "cosine"  # then it stays, or falls to 0 like this [constant | linear | cosine]
weight_decay = 0.0  # AdamW's [>= 0]
beta1 = 0.9  # AdamW's first moment decay [0..0.9999]
beta2 = 0.99  # AdamW's second moment decay [0..0.9999]
adam_eps = 1e-8  # AdamW's epsilon [> 0]
grad_clip = 1.0  # largest gradient norm, 0 = no clipping [>= 0]

# randomness
seed = 1  # decides the weights of a scratch model and the order of the data [>= 0]

# more keys, such as dtype, lora and zero_stage, become globals here: see engine/keys.py
config = configure(globals(), "engine/keys.py", checkpoint_interval=500, sync_check_interval=100)
# -------------------------------------------------------------------------------------------------
if init_from == "scratch" and d_model % (2 * n_head):
    raise BadConfig(f"d_model = {d_model} must be a multiple of 2 * n_head = {2 * n_head}: heads "
                    "have an even width")
if init_from == "scratch" and lora:
    raise BadConfig("lora adapts a trained model, and init_from = 'scratch' has none; type "
                    "--init_from=FOLDER, or leave lora out")

rank, world_size, device = launch.init(device_type, timeout, deterministic)
master = rank == 0
place = place_of_one("policy", zero_stage, offload, lora, optim)
precision, weights_dtype, frozen_dtype = precisions(dtype, master_weights, device)


# -------------------------------------------------------------------------------------------------
# data

train_rows = read_rows(train_path, sft_row, fields)
val_rows = read_rows(val_path, sft_row, fields) if val_path else Rows()
tokenizer = load_tokenizer(tokenizer_path if init_from == "scratch" else init_from, chat_template,
                           template_kwargs, system_prompt)


# -------------------------------------------------------------------------------------------------
# model: a new one of the sizes above, or one that exists, with an adapter where there is LoRA

if init_from == "scratch":
    ids = dict(vocab_size=tokenizer.vocab_size, bos_token_id=None,
               eos_token_id=tokenizer.eos_id, pad_token_id=tokenizer.pad_id)
    if family == "gpt2":
        sizes = dict(n_embd=d_model, n_layer=n_layer, n_head=n_head, n_inner=d_ff,
                     n_positions=context)
    else:
        sizes = dict(hidden_size=d_model, num_hidden_layers=n_layer, num_attention_heads=n_head,
                     intermediate_size=d_ff, max_position_embeddings=context)
    architecture = dict(model_type=family, tie_word_embeddings=False, **sizes, **ids,
                        initializer_range=d_model**-0.5)
    policy = from_scratch(architecture, seed=seed, dtype=weights_dtype, device=device)
    first_weights = fingerprint(policy)
    if gradient_checkpointing:
        policy.recompute()
    if is_sharded(place, trained=True):
        shard(policy, place, device)
    finish_placing(policy, device, compile)
else:
    policy = load_placed(init_from, place, device, "lm", weights_dtype, frozen_dtype, seed,
                         trained=True, recompute=gradient_checkpointing, compiled=compile)
    first_weights = fingerprint(policy)
check_tokenizer_fits(tokenizer, policy, init_from)

# [(ids, trained), ...] of all rows: trained is 1 on the tokens that the loss counts, else 0
train_examples, val_examples = (
    encode_examples(rows, path, tokenizer, policy.max_positions, max_tokens, too_long)
    for rows, path in ((train_rows, train_path), (val_rows, val_path)))
eval_examples = val_examples[:eval_size or len(val_examples)]
config["max_iters"] = max_iters = iterations(config, len(train_rows), batch_size)

# all ranks start from the same, or none does
contents = data_hashes(train_path, val_path)
together.agree(config | contents | {"the tokenizer": tokenizer.fingerprint,
                                    "the weights": first_weights})


# -------------------------------------------------------------------------------------------------
# optimizer; and resume, or begin

optimizer = make_optimizer(policy, place, learning_rate, (beta1, beta2), adam_eps, weight_decay)

# files and folders whose contents may not change before a run resumes
sources = ["train_path", "tokenizer_path" if init_from == "scratch" else "init_from"]
checkpoint, state = open_run(
    out_dir, config, ["seed", "batch_size", "init_from", "lora", "optim", *sources], sources,
    token_ids=[part for example in train_examples for part in example])
# the state beside weights and optimizer; all but the iteration is float16's
state = dict(iteration=0, loss_scale=2.0**16, clean_steps=0, skipped=0) | (state or {})
if checkpoint:
    load_checkpoint(checkpoint, {"policy": policy}, {"policy": optimizer})
start = state.pop("iteration")

models = in_memory(policy=policy)  # with LoRA: the adapter, and what it is on
parallel.broadcast_parameters(models.values())
gradients = parallel.flatten_gradients(policy.parameters())
frozen_sums = {}  # filled by the first audit
flops_a_token = report.flops_a_token(policy, trained=True)
peak_flops = report.peak_flops(config, device)
start_trackers(report_to, out_dir, config, start)
if master:
    if checkpoint:
        print(f"resuming from {checkpoint}")
    n_params = sum(p.numel() for p in policy.parameters())
    times = max_iters * batch_size / len(train_rows)
    print(f"policy: {n_params / 1e6:.2f}M parameters ({policy.config.model_type}), "
          f"{world_size} rank(s) on {device.type}, {dtype}")
    print(f"data: {len(train_rows)} demonstrations, {len(val_rows)} held out; "
          f"{max_iters} steps of {batch_size} are {times:.1f} epochs")


# -------------------------------------------------------------------------------------------------
# loss and evaluation


def completion_logprobs(examples):
    """Log-probs of the n trained tokens of b examples, (n,). examples: b of (ids, trained)."""
    with precision:
        return example_logprobs(policy, examples, tokenizer, head_chunk, device)


def evaluate():
    """Mean loss in nats a token over held-out demonstrations; every rank does its share."""
    total, count = 0.0, 0
    with no_grad_forwards([policy], device):
        for part in micro_batches_of(eval_examples, tokens_of_example, config):
            logprobs = completion_logprobs(part)  # (n,)
            total -= logprobs.sum().item()
            count += len(logprobs)
    return parallel.all_reduce_metrics({"eval/loss": [total, count]})


# -------------------------------------------------------------------------------------------------
# the loop

began = time.time()
for iteration in range(start, max_iters + 1):
    record = {"iteration": iteration}
    last = iteration == max_iters

    # evaluation, audit, checkpoint: before the step, so that checkpoint k means "step k comes next"
    parallel.phase = f"iteration {iteration}, evaluation"
    if eval_examples and (iteration % eval_interval == 0 or last):
        record |= evaluate()
        if master:
            print(f"iter {iteration}: held-out loss {record['eval/loss']:.4f} nats a token")
    stop = not last and launch.stop_agreed()  # SIGTERM or Ctrl-C on any rank: all leave together
    due = checkpoint_interval and iteration > start and iteration % checkpoint_interval == 0
    saves = last or stop or due
    parallel.phase = f"iteration {iteration}, checkpoint"
    if iteration % sync_check_interval == 0 or saves:
        audit.audit(models, frozen_sums, iteration)
    if saves:
        save_checkpoint(out_dir, iteration, {"policy": policy}, {"policy": optimizer}, state,
                        tokenizer, keep_checkpoints)
    if stop:
        if master:
            print(f"stopped before iteration {iteration}, and saved; resume with the same command")
        launch.finish()
        sys.exit(0)
    if last:
        write_log(out_dir, record)
        break

    parallel.phase = f"iteration {iteration}, update"
    t0 = time.time()
    rows = batch_rows(seed, iteration, batch_size, train_rows.mix)
    examples = [train_examples[i] for i in rows]  # of all ranks
    # of all ranks: the loss is the mean over these
    token_count = trained_tokens(examples)
    all_tokens = sum(map(tokens_of_example, examples))

    # gradients, micro-batch by micro-batch
    parallel.zero_gradients(gradients)
    loss_scale = state["loss_scale"] if dtype == "float16" else 1.0
    loss_sum, loss_count = 0.0, 0
    for part in micro_batches_of(examples, tokens_of_example, config):
        logprobs = completion_logprobs(part)  # (n,)
        loss = -logprobs.sum()
        (loss_scale * loss / token_count).backward()
        loss_sum += loss.item()
        loss_count += len(logprobs)

    # one step, alike on all ranks
    parallel.all_reduce_gradients(gradients, loss_scale)
    norm = parallel.clip_gradients(gradients, grad_clip)
    lr = learning_rate_at(iteration, learning_rate, warmup_iters, max_iters, lr_decay)
    skipped = dtype == "float16" and overflowed(state, [norm], iteration)
    if not skipped:
        audit.check_gradients(norm, policy, "policy", iteration)
        step(optimizer, lr)

    # what is written, and printed
    record |= parallel.all_reduce_metrics({"loss/sft": [loss_sum, loss_count]})
    seconds = time.time() - t0
    grad_norm = 0.0 if skipped else norm.item()  # JSON has no infinity
    record |= {"policy/grad_norm": grad_norm, "policy/lr": lr, "time/iteration": seconds}
    record |= report.speed(device, all_tokens, all_tokens * flops_a_token, seconds,
                           peak_flops, world_size)
    write_log(out_dir, record)
    if master and (iteration % 20 == 0 or iteration == max_iters - 1):
        done = iteration + 1 - start
        eta = (time.time() - began) / done * (max_iters - iteration - 1)
        print(f"iter {iteration}/{max_iters} | loss {record['loss/sft']:.4f} | "
              f"grad norm {grad_norm:.2f} | lr {lr:.1e} | {report.speed_words(record)} | "
              f"eta {eta:.0f}s", flush=True)

save_final(out_dir, "policy", policy, tokenizer, config)
if master:
    print(f"saved {os.path.join(out_dir, 'policy')}; next: sample from it (tools/sample.py), or "
          "train a reward model (rm.py)")
launch.finish()

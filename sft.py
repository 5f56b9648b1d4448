"""
Supervised fine-tuning: the first of the three steps. The loss is on the completion only, its EOS included.

python sft.py config/arithmetic_sft.py                                         # the toy, from scratch, on a laptop
torchrun --nproc_per_node=8 sft.py config/tldr_sft.py                          # a hub model on 8 GPUs

Leaves out_dir/policy, a Hugging Face directory, and out_dir/log.jsonl. The same command again resumes.
"""
import os
import sys
import time
from array import array

import torch

import parallel
from configurator import configure
from data import batch_rows, naming, read_jsonl, right_pad, say_special_tokens
from engine import audit, launch, together
from engine.checkpoint import load_checkpoint, save_checkpoint, save_final
from engine.disk import sha256
from engine.optimizers import make_optimizer, step
from engine.placement import in_memory, load, only_lora, precisions, trunk_of
from engine.pretrained import from_scratch
from engine.run_folder import fingerprint, open_run
from engine.run_log import write_log
from engine.tokenizers import check_tokenizer_fits, load_tokenizer
from errors import BadConfig, BadInput
from loss import learning_rate_at, logprobs_and_entropy, masked_sum


# ---------------------------------------------------------------------------------------------------------------------
# where to write
out_dir = "out/sft"  # checkpoints, log.jsonl and the finished model; the same command again resumes from here
checkpoint_interval = 500  # iterations between checkpoints; 0 = only at the end [>= 0]
keep_checkpoints = 1  # how many checkpoints to leave [>= 1]
sync_check_interval = 100  # iterations between checks that all ranks hold the same weights [>= 1]
# data: JSONL with "prompt" and "completion"
train_path = "data/arithmetic/sft_train.jsonl"  # demonstrations to learn
val_path = "data/arithmetic/sft_val.jsonl"  # held-out demonstrations
eval_interval = 100  # iterations between evaluations; also at iteration 0 and at the end [>= 1]
eval_size = 256  # how many held-out demonstrations to evaluate on, 0 = all [>= 0]
# model
init_from = "scratch"  # a model folder or hub name; or "scratch": a new one of the sizes below
tokenizer_path = "data/arithmetic/tokenizer"  # tokenizer of a scratch model (others bring their own)
family = "gpt2"  # scratch: the architecture [gpt2 | llama]
n_layer = 2  # scratch: layers [1..1000]
n_head = 8  # scratch: attention heads [1..1000]
d_model = 128  # scratch: width of the residual stream [2..100000]
d_ff = 512  # scratch: width inside the MLP [1..1000000]
context = 64  # scratch: longest sequence [2..10000000]
lora = ""  # RANK[:ALPHA[:TARGETS]] such as 16:32:q+v: train an adapter instead, saved merged and, in policy_adapter, alone
# optimizer: AdamW
max_iters = 700  # optimizer steps [>= 1]
batch_size = 128  # demonstrations a step, over all ranks [1..1000000]
micro_batch_size = 32  # rows at once; only memory depends on it [>= 1]
learning_rate = 3e-3  # peak [> 0]
warmup_iters = 20  # steps of linear warm-up [>= 0]
lr_decay = "cosine"  # shape of the way down to 0 after the warm-up [constant | linear | cosine]
weight_decay = 0.0  # AdamW's [>= 0]
beta1 = 0.9  # AdamW's first moment decay [0..0.9999]
beta2 = 0.99  # AdamW's second moment decay [0..0.9999]
adam_eps = 1e-8  # AdamW's epsilon [> 0]
grad_clip = 1.0  # largest gradient norm, 0 = no clipping [>= 0]
# system
seed = 1  # decides initial weights and the order of the data [>= 0]
device_type = "auto"  # auto = a GPU if there is one [auto | cpu | cuda]
head_chunk = 0  # logits of so many tokens at a time, 0 = of a whole micro-batch; only memory depends on it [>= 0]
gradient_checkpointing = False  # compute each layer's activations again in the backward pass; only memory depends on it
dtype = "float32"  # bfloat16: fp32 weights under autocast; float64: for tests [float32 | bfloat16 | float64]
deterministic = False  # GPUs: only kernels that repeat bit for bit, somewhat slower; CPUs always do
timeout = 600  # seconds after which waiting for a lost rank is an error [1..1000000]
config = configure(globals())
# ---------------------------------------------------------------------------------------------------------------------
if init_from == "scratch" and d_model % (2 * n_head):
    raise BadConfig(f"d_model = {d_model} must be a multiple of 2 * n_head = {2 * n_head}: heads have an even width")

if init_from == "scratch" and lora:
    raise BadConfig("lora adapts a trained model, and init_from = 'scratch' has none; type --init_from=FOLDER, or leave lora out")

rank, world_size, device = launch.init(device_type, timeout, deterministic)
master = rank == 0
precision, weights_dtype, frozen_dtype = precisions(dtype, True, device)
place = only_lora(lora)
train_rows, val_rows = (read_jsonl(path, ["prompt", "completion"]) for path in (train_path, val_path))

# the model
tokenizer = load_tokenizer(tokenizer_path if init_from == "scratch" else init_from)
if init_from == "scratch":
    ids = dict(vocab_size=tokenizer.vocab_size, bos_token_id=None, eos_token_id=tokenizer.eos_id, pad_token_id=tokenizer.pad_id)
    if family == "gpt2":
        architecture = dict(model_type="gpt2", n_embd=d_model, n_layer=n_layer, n_head=n_head, n_inner=d_ff, n_positions=context,
                            tie_word_embeddings=False, **ids)
    else:
        architecture = dict(model_type="llama", hidden_size=d_model, num_hidden_layers=n_layer, num_attention_heads=n_head,
                            intermediate_size=d_ff, max_position_embeddings=context, tie_word_embeddings=False, **ids)
    policy = from_scratch(architecture, seed=seed, dtype=weights_dtype, device=device)
else:
    policy = load(init_from, place, device, "lm", weights_dtype, frozen_dtype, seed, trained=True)
check_tokenizer_fits(tokenizer, policy, init_from)
policy.recompute(gradient_checkpointing)


def encode(rows, path):
    """
    (Prompt ids, completion ids) of every row, all at once at the start: a row that does not fit should not end a run on its
    third day. Raises BadInput.
    """
    pairs = []
    say_special_tokens(rows, ["prompt", "completion"], tokenizer, path)
    for number, row in enumerate(rows, 1):
        with naming(path, number):
            prompt = tokenizer.encode_prompt(row["prompt"])
            completion = tokenizer.encode_completion(row["completion"])
        if len(prompt) + len(completion) > policy.config.max_positions:
            raise BadInput(f"{path}, row {number}: a demonstration of {len(prompt) + len(completion)} tokens exceeds the model's "
                           f"context of {policy.config.max_positions}; shorten or drop it")
        if not prompt:
            raise BadInput(f"{path}, row {number}: the prompt encodes to no token at all; there is nothing to predict the "
                           "answer from")
        pairs.append((array("i", prompt), array("i", completion)))  # a tenth of a list's memory
    return pairs


train_pairs, val_pairs = encode(train_rows, train_path), encode(val_rows, val_path)
together.agree(config | {f"the content of {path}": sha256(path) for path in (train_path, val_path)}
               | {"the tokenizer": tokenizer.fingerprint, "the weights": fingerprint(trunk_of(policy))})
optimizer = make_optimizer(policy, place, learning_rate, (beta1, beta2), adam_eps, weight_decay)

# resume, or begin
sources = ["train_path", "tokenizer_path" if init_from == "scratch" else "init_from"]  # whose contents may not change either
checkpoint, state = open_run(out_dir, config, ["seed", "batch_size", "init_from", "lora", *sources], sources)
start = 0
if checkpoint:
    load_checkpoint(checkpoint, {"policy": policy}, {"policy": optimizer})
    start = state["iteration"]
    if master:
        print(f"resuming from {checkpoint}")
models = in_memory(policy=policy)
parallel.broadcast_parameters(models.values())
gradients = parallel.flatten_gradients(policy.parameters())
frozen_sums = {}
if master:
    n_params = sum(p.numel() for p in policy.parameters())
    print(f"policy: {n_params / 1e6:.2f}M parameters ({policy.config.family}), {world_size} rank(s) on {device.type}, {dtype}")
    print(f"data: {len(train_rows)} demonstrations, {len(val_rows)} held out; "
          f"{max_iters} steps of {batch_size} are {max_iters * batch_size / len(train_rows):.1f} epochs")


def completion_logprobs(pairs):
    """Log-probs (b, T - 1) and their mask of [(prompt ids, completion ids), ...]; True on completion tokens."""
    tokens, attention_mask = right_pad([p + c for p, c in pairs], tokenizer.pad_id)  # (b, T)
    prompt_lengths = torch.tensor([len(p) for p, _ in pairs])
    mask = attention_mask & (torch.arange(tokens.shape[1]) >= prompt_lengths[:, None])
    tokens, mask = tokens.to(device), mask.to(device)
    with precision:
        # right padding needs no attention mask: causal attention never looks there
        hidden = policy.trunk(tokens, response_length=tokens.shape[1] - 1)  # (b, T - 1, d)
        logprobs, _ = logprobs_and_entropy(hidden, policy.lm_head_weight(), tokens[:, 1:], vocab_size=tokenizer.vocab_size,
                                           chunk=head_chunk, entropy=False)
    return logprobs, mask[:, 1:]


@torch.no_grad()
def evaluate():
    """Mean loss in nats a token over held-out demonstrations; every rank does its share."""
    totals = {"eval/loss": [0.0, 0]}
    mine = parallel.my_share(val_pairs[:eval_size or len(val_pairs)])
    for i in range(0, len(mine), micro_batch_size):
        logprobs, mask = completion_logprobs(mine[i:i + micro_batch_size])
        totals["eval/loss"][0] -= masked_sum(logprobs, mask).item()
        totals["eval/loss"][1] += mask.sum().item()
    return parallel.all_reduce_metrics(totals)


# the loop
began = time.time()
for iteration in range(start, max_iters + 1):
    record = {"iteration": iteration}
    last = iteration == max_iters
    parallel.phase = f"iteration {iteration}, evaluation"
    if iteration % eval_interval == 0 or last:
        record |= evaluate()
        if master:
            print(f"iter {iteration}: held-out loss {record['eval/loss']:.4f} nats a token")
    stop = not last and launch.stop_agreed()  # SIGTERM or Ctrl-C on any rank: all save and leave together
    due = last or stop or checkpoint_interval and iteration > start and iteration % checkpoint_interval == 0
    parallel.phase = f"iteration {iteration}, checkpoint"
    if iteration % sync_check_interval == 0 or due:
        audit.audit(models, frozen_sums, iteration)
    if due:
        save_checkpoint(out_dir, iteration, {"policy": policy}, {"policy": optimizer}, {}, tokenizer, keep_checkpoints)
    if stop:
        if master:
            print(f"stopped before iteration {iteration}, and saved; resume with the same command")
        launch.finish()
        sys.exit(0)
    if last:
        write_log(out_dir, record)
        break

    parallel.phase = f"iteration {iteration}, update"
    # this rank's demonstrations; the normaliser is the token count of the whole step, over micro-batches and ranks
    t0 = time.time()
    pairs = [train_pairs[i] for i in batch_rows(seed, iteration, batch_size, len(train_pairs))]
    token_count = sum(len(c) for _, c in pairs)
    pairs = sorted(pairs, key=lambda pair: len(pair[0] + pair[1]))[rank::world_size]  # alike lengths meet: less padding
    for flat in gradients:
        flat.zero_()
    sums = {"loss/sft": [0.0, 0]}
    for i in range(0, len(pairs), micro_batch_size):
        logprobs, mask = completion_logprobs(pairs[i:i + micro_batch_size])
        loss = -masked_sum(logprobs, mask)
        (loss / token_count).backward()
        sums["loss/sft"][0] += loss.item()
        sums["loss/sft"][1] += mask.sum().item()
    parallel.all_reduce_gradients(gradients)
    norm = parallel.clip_gradients(gradients, grad_clip)
    audit.check_gradients(norm, policy, "policy", iteration)
    lr = learning_rate_at(iteration, learning_rate, warmup_iters, max_iters, lr_decay)
    step(optimizer, lr)

    record |= parallel.all_reduce_metrics(sums)
    record |= {"policy/grad_norm": norm.item(), "policy/lr": lr, "time/iteration": time.time() - t0}
    write_log(out_dir, record)
    if master and (iteration % 20 == 0 or iteration == max_iters - 1):
        done = iteration + 1 - start
        eta = (time.time() - began) / done * (max_iters - iteration - 1)
        print(f"iter {iteration}/{max_iters} | loss {record['loss/sft']:.4f} | grad norm {norm:.2f} | lr {lr:.1e} "
              f"| {token_count / record['time/iteration']:.0f} tok/s | eta {eta:.0f}s", flush=True)

save_final(out_dir, "policy", policy, tokenizer)
if master:
    print(f"saved {os.path.join(out_dir, 'policy')}; next: sample from it (sample.py), or train a reward model (rm.py)")
launch.finish()

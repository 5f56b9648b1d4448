"""
The reward model: the second of the three steps. One scalar head on the SFT model, trained so that of two completions of a
prompt the preferred one scores higher at its last token (Bradley-Terry); then shifted so that demonstrations average 0.

python rm.py config/arithmetic_rm.py                                           # the toy, on a laptop
torchrun --nproc_per_node=8 rm.py config/tldr_rm.py                            # a hub model on 8 GPUs

Leaves out_dir/reward_model, a Hugging Face sequence-classification directory, and out_dir/log.jsonl. The same command again
resumes. This script has the sections of sft.py; `diff sft.py rm.py` shows what a reward model changes.
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
from engine.run_folder import fingerprint, open_run
from engine.run_log import write_log
from engine.tokenizers import check_tokenizer_fits, load_tokenizer
from errors import BadInput
from loss import learning_rate_at, preference_loss
from model import at_least_float32
from rewards import last_real


# ---------------------------------------------------------------------------------------------------------------------
# where to write
out_dir = "out/rm"  # checkpoints, log.jsonl and the finished model; the same command again resumes from here
checkpoint_interval = 500  # iterations between checkpoints; 0 = only at the end [>= 0]
keep_checkpoints = 1  # how many checkpoints to leave [>= 1]
sync_check_interval = 100  # iterations between checks that all ranks hold the same weights [>= 1]
# data: JSONL with "prompt", "chosen" and "rejected"
train_path = "data/arithmetic/pairs_train.jsonl"  # preference pairs to learn
val_path = "data/arithmetic/pairs_val.jsonl"  # held-out pairs
demonstrations_path = "data/arithmetic/sft_val.jsonl"  # "prompt" and "completion": what shall score 0 on average
eval_interval = 50  # iterations between evaluations; also at iteration 0 and at the end [>= 1]
eval_size = 0  # how many held-out pairs to evaluate on, 0 = all [>= 0]
# model
init_from = "out/arithmetic_sft/policy"  # folder or hub name; a language model gets a new scalar head (N+ detail 11)
lora = ""  # RANK[:ALPHA[:TARGETS]] such as 16:32:q+v: train an adapter instead, saved merged and, in reward_model_adapter, alone
# optimizer: AdamW
max_iters = 100  # optimizer steps [>= 1]
batch_size = 64  # pairs a step, over all ranks [1..1000000]
micro_batch_size = 32  # pairs at once; only memory depends on it [>= 1]
learning_rate = 3e-4  # peak [> 0]
warmup_iters = 5  # steps of linear warm-up [>= 0]
lr_decay = "cosine"  # shape of the way down to 0 after the warm-up [constant | linear | cosine]
weight_decay = 0.0  # AdamW's [>= 0]
beta1 = 0.9  # AdamW's first moment decay [0..0.9999]
beta2 = 0.95  # AdamW's second moment decay [0..0.9999]
adam_eps = 1e-5  # AdamW's epsilon (N+ detail 10) [> 0]
grad_clip = 1.0  # largest gradient norm, 0 = no clipping [>= 0]
# system
seed = 1  # decides the new head and the order of the pairs [>= 0]
device_type = "auto"  # auto = a GPU if there is one [auto | cpu | cuda]
gradient_checkpointing = False  # compute each layer's activations again in the backward pass; only memory depends on it
dtype = "float32"  # bfloat16: fp32 weights under autocast; float64: for tests [float32 | bfloat16 | float64]
deterministic = False  # GPUs: only kernels that repeat bit for bit, somewhat slower; CPUs always do
timeout = 600  # seconds after which waiting for a lost rank is an error [1..1000000]
config = configure(globals())
# ---------------------------------------------------------------------------------------------------------------------
rank, world_size, device = launch.init(device_type, timeout, deterministic)
master = rank == 0
precision, weights_dtype, frozen_dtype = precisions(dtype, True, device)
place = only_lora(lora)
train_rows, val_rows = (read_jsonl(path, ["prompt", "chosen", "rejected"]) for path in (train_path, val_path))
demonstrations = read_jsonl(demonstrations_path, ["prompt", "completion"])

# the model
tokenizer = load_tokenizer(init_from)
reward_model = load(init_from, place, device, "scalar", weights_dtype, frozen_dtype, seed, trained=True)
reward_model.config.score_shift = 0.0
check_tokenizer_fits(tokenizer, reward_model, init_from)
reward_model.recompute(gradient_checkpointing)


def encode(rows, field, path):
    """
    Ids of prompt, completion (row[field]) and EOS of every row, all at once at the start: a row that does not fit should not
    end a run on its third day. Raises BadInput.
    """
    sequences = []
    for number, row in enumerate(rows, 1):
        with naming(path, number):
            ids = tokenizer.encode_prompt(row["prompt"]) + tokenizer.encode_completion(row[field])
        if len(ids) > reward_model.config.max_positions:
            raise BadInput(f"{path}, row {number}: prompt and {field} make {len(ids)} tokens, more than the model's context of "
                           f"{reward_model.config.max_positions}; shorten or drop the row")
        sequences.append(array("i", ids))  # a tenth of a list's memory
    return sequences

for rows, path in ((train_rows, train_path), (val_rows, val_path)):
    say_special_tokens(rows, ["prompt", "chosen", "rejected"], tokenizer, path)
say_special_tokens(demonstrations, ["prompt", "completion"], tokenizer, demonstrations_path)
train_pairs, val_pairs = (list(zip(encode(rows, "chosen", path), encode(rows, "rejected", path), strict=True))
                          for rows, path in ((train_rows, train_path), (val_rows, val_path)))
demonstrations = encode(demonstrations, "completion", demonstrations_path)
together.agree(config | {f"the content of {path}": sha256(path) for path in (train_path, val_path, demonstrations_path)}
               | {"the tokenizer": tokenizer.fingerprint,
                  "the weights": fingerprint(trunk_of(reward_model))})
optimizer = make_optimizer(reward_model, place, learning_rate, (beta1, beta2), adam_eps, weight_decay)

# resume, or begin
sources = ["train_path", "init_from"]  # whose contents may not change either
checkpoint, state = open_run(out_dir, config, ["seed", "batch_size", "lora", *sources], sources)
start = 0
if checkpoint:
    load_checkpoint(checkpoint, {"reward_model": reward_model}, {"reward_model": optimizer})
    start = state["iteration"]
    if master:
        print(f"resuming from {checkpoint}")
models = in_memory(reward_model=reward_model)
parallel.broadcast_parameters(models.values())
gradients = parallel.flatten_gradients(reward_model.parameters())
frozen_sums = {}
if master:
    n_params = sum(p.numel() for p in reward_model.parameters())
    print(f"reward model: {n_params / 1e6:.2f}M parameters ({reward_model.config.family}), {world_size} rank(s) on "
          f"{device.type}, {dtype}")
    print(f"data: {len(train_rows)} pairs, {len(val_rows)} held out; "
          f"{max_iters} steps of {batch_size} are {max_iters * batch_size / len(train_rows):.1f} epochs")


def scores_of(sequences):
    """The scalar at the last real token of each sequence of ids, (b,): with its EOS there, where it is meant to be read."""
    tokens, attention_mask = (x.to(device) for x in right_pad(sequences, tokenizer.pad_id))
    with precision:
        scalars = reward_model(tokens)  # (b, T); right padding is never looked at by causal attention
    return at_least_float32(scalars.gather(1, last_real(attention_mask)[:, None]).squeeze(1))


def pair_scores(pairs):
    """Scores of the chosen and of the rejected ones of some pairs, (b,) each, in one forward."""
    return scores_of([pair[side] for side in (0, 1) for pair in pairs]).chunk(2)


@torch.no_grad()
def evaluate():
    """Held-out loss, and in how many pairs the chosen one scores higher (a tie counts half); every rank does its share."""
    totals = {"eval/loss": [0.0, 0], "eval/accuracy": [0.0, 0]}
    mine = parallel.my_share(val_pairs[:eval_size or len(val_pairs)])
    for i in range(0, len(mine), micro_batch_size):
        chosen, rejected = pair_scores(mine[i:i + micro_batch_size])
        right = (chosen > rejected).double() + 0.5 * (chosen == rejected)
        for key, x in (("eval/loss", preference_loss(chosen, rejected)), ("eval/accuracy", right)):
            totals[key][0] += x.sum().item()
            totals[key][1] += len(x)
    return parallel.all_reduce_metrics(totals)


@torch.no_grad()
def demonstration_mean():
    """Mean score of the demonstrations; every rank does its share."""
    totals = {"score": [0.0, 0]}
    mine = parallel.my_share(demonstrations)
    for i in range(0, len(mine), micro_batch_size):
        scores = scores_of(mine[i:i + micro_batch_size])
        totals["score"][0] += scores.sum().item()
        totals["score"][1] += len(scores)
    return parallel.all_reduce_metrics(totals)["score"]


# the loop
began = time.time()
for iteration in range(start, max_iters + 1):
    record = {"iteration": iteration}
    last = iteration == max_iters
    parallel.phase = f"iteration {iteration}, evaluation"
    if iteration % eval_interval == 0 or last:
        record |= evaluate()
        if master:
            print(f"iter {iteration}: held-out loss {record['eval/loss']:.4f}, {record['eval/accuracy']:.1%} of pairs right")
    stop = not last and launch.stop_agreed()  # SIGTERM or Ctrl-C on any rank: all save and leave together
    due = last or stop or checkpoint_interval and iteration > start and iteration % checkpoint_interval == 0
    parallel.phase = f"iteration {iteration}, checkpoint"
    if iteration % sync_check_interval == 0 or due:
        audit.audit(models, frozen_sums, iteration)
    if due:
        save_checkpoint(out_dir, iteration, {"reward_model": reward_model}, {"reward_model": optimizer}, {}, tokenizer,
                        keep_checkpoints)
    if stop:
        if master:
            print(f"stopped before iteration {iteration}, and saved; resume with the same command")
        launch.finish()
        sys.exit(0)
    if last:
        write_log(out_dir, record)
        break

    parallel.phase = f"iteration {iteration}, update"
    # this rank's pairs; the normaliser is the pair count of the whole step, over micro-batches and ranks
    t0 = time.time()
    pairs = [train_pairs[i] for i in batch_rows(seed, iteration, batch_size, len(train_pairs))]
    pairs = sorted(pairs, key=lambda pair: max(map(len, pair)))[rank::world_size]  # alike lengths meet: less padding
    for flat in gradients:
        flat.zero_()
    sums = {"loss/preference": [0.0, 0], "train/accuracy": [0.0, 0]}
    for i in range(0, len(pairs), micro_batch_size):
        chosen, rejected = pair_scores(pairs[i:i + micro_batch_size])
        losses = preference_loss(chosen, rejected)  # (b,)
        (losses.sum() / batch_size).backward()
        for key, x in (("loss/preference", losses), ("train/accuracy", chosen > rejected)):
            sums[key][0] += x.sum().item()
            sums[key][1] += len(x)
    parallel.all_reduce_gradients(gradients)
    norm = parallel.clip_gradients(gradients, grad_clip)
    audit.check_gradients(norm, reward_model, "reward_model", iteration)
    lr = learning_rate_at(iteration, learning_rate, warmup_iters, max_iters, lr_decay)
    step(optimizer, lr)

    record |= parallel.all_reduce_metrics(sums)
    record |= {"reward_model/grad_norm": norm.item(), "reward_model/lr": lr, "time/iteration": time.time() - t0}
    write_log(out_dir, record)
    if master and (iteration % 10 == 0 or iteration == max_iters - 1):
        done = iteration + 1 - start
        eta = (time.time() - began) / done * (max_iters - iteration - 1)
        print(f"iter {iteration}/{max_iters} | loss {record['loss/preference']:.4f} | right {record['train/accuracy']:.0%} | "
              f"grad norm {norm:.2f} | lr {lr:.1e} | eta {eta:.0f}s", flush=True)

# Pairs only fix differences of scores. Their zero point is ours to choose: the average demonstration (N+ detail 15), so that a
# fixed penalty for not ending means the same for every reward model.
reward_model.config.score_shift = -demonstration_mean()
save_final(out_dir, "reward_model", reward_model, tokenizer)
if master:
    print(f"demonstrations scored {-reward_model.config.score_shift:.3f} on average; scores are shifted so that this is 0")
    print(f"saved {os.path.join(out_dir, 'reward_model')}; next: ppo.py")
launch.finish()

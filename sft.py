"""
Supervised fine-tuning: the first of the three steps. A language model learns to continue prompts
like the demonstrations. The loss counts only the tokens of the completions, their EOS included.

python sft.py config/arithmetic_sft.py                    # the toy, from scratch, on a laptop
torchrun --nproc_per_node=8 sft.py config/tldr_sft.py     # a hub model on 8 GPUs

Leaves out_dir/policy, a Hugging Face directory, and out_dir/log.jsonl. The same command resumes.

b demonstrations in a micro-batch, W tokens in the longest, n trained tokens in all of them.
"""
from configurator import configure  # first: it must be imported before torch
from errors import BadInput, say

import torch

import parallel
import ranks
from batches import deal_rows, right_pad
from demonstrations import dialogue, encode_demonstrations
from formulas import learning_rate_at
from load import autocast, auto_class, dtypes, freeze_or_train, load
from model import Model, no_grad_forwards
from prompts import batch_rows, hash_of_ids, read_rows, rows_to_evaluate, run_length, say_length
from run import Run, make_optimizer
from tokenizer import load_tokenizer

# -------------------------------------------------------------------------------------------------
# where to write
out_dir = "out/sft"  # * checkpoints, log.jsonl and the finished policy; to resume, give the same
eval_interval = 100  # iterations between evaluations; also at iteration 0 and at the end [>= 1]
eval_size = 256  # how many held-out demonstrations to evaluate on, 0 = all [>= 0]

# data: JSONL with "prompt" and "completion"; other layouts: docs/data.md
train_path = "data/arithmetic/sft_train.jsonl"  # * training data; A.jsonl,0.3*B.jsonl: a mix
val_path = ""  # * held-out demonstrations; empty = no evaluation
max_tokens = 0  # * longest prompt and completion together, 0 = the model's context [>= 0]

# model
init_from = "scratch"  # * a model folder or hub name; scratch: a new model of the sizes below
# scratch: a folder with a tokenizer, or an encoding such as tiktoken:gpt2
tokenizer_path = "data/arithmetic/tokenizer"
family = "gpt2"  # scratch: the architecture [gpt2 | llama]
n_layer = 2  # scratch: layers [1..1000]
n_head = 8  # scratch: attention heads [1..1000]
d_model = 128  # scratch: width of the residual stream [2..100000]
d_ff = 512  # scratch: width inside the MLP [1..1000000]
context = 64  # scratch: longest sequence [2..10000000]

# optimizer: AdamW
max_iters = 700  # * optimizer steps [>= 1]
batch_size = 128  # * demonstrations a step, over all ranks [1..1000000]
micro_batch_size = 32  # demonstrations at once; only memory depends on it [>= 1]
learning_rate = 1e-5  # * peak, for a hub model; often 1e-4 with lora, 3e-3 from scratch [> 0]
warmup_iters = 20  # steps of linear warm-up [>= 0]
lr_decay = "cosine"  # then it stays, or falls to 0 like this [constant | linear | cosine]
beta1 = 0.9  # AdamW's first moment decay [0..0.9999]
beta2 = 0.99  # AdamW's second moment decay [0..0.9999]
adam_eps = 1e-8  # AdamW's epsilon [> 0]
grad_clip = 1.0  # largest gradient norm, 0 = no clipping [>= 0]

# randomness
seed = 1  # decides the weights of a scratch model and the order of the data [>= 0]

# system: the keys that are not of the algorithm, such as system.dtype and system.lora
config, system = configure(globals(), "config/keys.py", until="ref_path",
                           checkpoint_interval=500, sync_check_interval=100)
# -------------------------------------------------------------------------------------------------
# set-up: the ranks, the model, the data, the optimizer; then begin, or resume


def from_scratch(system, device):
    """A new model of the sizes above, with random weights."""
    from transformers import AutoConfig

    if d_model % (2 * n_head) or system.lora:
        raise BadInput(f"init_from = 'scratch': d_model = {d_model} must be a multiple of 2 * "
                       f"n_head = {2 * n_head} (heads have an even width), and there is no lora")
    if learning_rate < 5e-5:
        say(f"warning: with learning_rate={learning_rate:g} a new model learns next to nothing; "
            "type --learning_rate=3e-3")
    tokenizer = load_tokenizer(tokenizer_path, system)
    sizes = dict(n_embd=d_model, n_layer=n_layer, n_head=n_head, n_inner=d_ff, n_positions=context)
    if family == "llama":
        sizes = dict(hidden_size=d_model, num_hidden_layers=n_layer, num_attention_heads=n_head,
                     intermediate_size=d_ff, max_position_embeddings=context)
    settings = AutoConfig.for_model(
        family, **sizes, vocab_size=tokenizer.vocab_size, initializer_range=d_model**-0.5,
        bos_token_id=None, eos_token_id=tokenizer.eos_id, pad_token_id=tokenizer.pad_id,
        tie_word_embeddings=False, dtype=torch.promote_types(dtypes(system)[0], torch.float32))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        hf = auto_class("lm").from_config(settings)
    model = Model(hf.to(device, dtypes(system)[0]), tokenizer=tokenizer)
    freeze_or_train(model, system, trained=True)
    return model


device = ranks.init(system)  # COLLECTIVE
if init_from == "scratch":
    policy = from_scratch(system, device)
else:
    policy = load(init_from, "policy", system, device, trained=True, seed=seed)


def load_rows(path):
    """
    Rows of a file; rows.ids are (ids, mask) of each prompt and completion: the mask is True on the
    tokens that the loss counts. The toy's "1+2=" and "3" make [49, 43, 50, 61, 51, EOS] and
    [F, F, F, F, T, T].
    """
    limit = min(policy.max_positions, max_tokens or policy.max_positions)
    rows = read_rows(path, lambda row: dialogue(row, "completion"), system.fields)
    return encode_demonstrations(rows, policy.tokenizer, limit, system.too_long)


train_rows, eval_examples = load_rows(train_path), []
if val_path:
    val_rows = load_rows(val_path)
    eval_examples = [val_rows.ids[i] for i in rows_to_evaluate(len(val_rows), eval_size, seed)]
config["max_iters"] = max_iters = run_length(max_iters, system.epochs, len(train_rows), batch_size)

optimizer = make_optimizer(policy, "policy", system, learning_rate, (beta1, beta2), adam_eps)
run = Run(  # COLLECTIVE
    out_dir, max_iters, config, system, device, dict(policy=policy), dict(policy=optimizer),
    must_match=["seed", "batch_size", "init_from", "train_path"], token_ids=hash_of_ids(train_rows))
gradients = {name: parallel.flatten_gradients(model) for name, model in run.trained.items()}
say_length("demonstrations", train_rows, "steps", max_iters, batch_size)


def my_micro_batches(examples):
    """This rank's micro-batches of examples that all ranks have: lists of (ids, mask)."""
    lengths = [len(ids) for ids, _ in examples]
    for part in deal_rows(lengths, micro_batch_size, system.micro_batch_tokens):
        yield [examples[i] for i in part]


def completion_logprobs(examples):
    """Log-probs of the n trained tokens of b examples, (n,). examples: b of (ids, mask)."""
    tokens = right_pad([ids for ids, _ in examples], policy.tokenizer.pad_id)  # (b, W)
    target_mask = right_pad([mask for _, mask in examples], 0)  # (b, W)
    with autocast(system, device):
        return policy.logprobs(tokens.to(device), target_mask.bool().to(device),
                               chunk=system.head_chunk)[0]


def evaluate():
    """A collective: the mean loss in nats a token over held-out demonstrations."""
    run.enter("eval")
    total, count = 0.0, 0
    with no_grad_forwards([policy], device):
        for part in my_micro_batches(eval_examples):
            logprobs = completion_logprobs(part)  # (n,)
            total -= logprobs.sum().item()
            count += len(logprobs)
    record = parallel.all_reduce_metrics({"eval/loss": [total, count]})  # COLLECTIVE
    say(f"eval {run.iteration}: held-out loss {record['eval/loss']:.4f} nats a token")
    return record


# -------------------------------------------------------------------------------------------------
# the loop

for iteration in run.iterations():  # COLLECTIVE: between two of them it audits, saves and stops
    record = {}
    if eval_examples and (iteration % eval_interval == 0 or iteration == max_iters):
        record |= evaluate()  # COLLECTIVE
    if iteration == max_iters:
        run.log(record)  # COLLECTIVE
        break

    run.enter("update")
    row_numbers = batch_rows(seed, iteration, batch_size, train_rows)
    examples = [train_rows.ids[i] for i in row_numbers]  # of all ranks
    token_count = sum(sum(mask) for _, mask in examples)  # of all ranks: the loss is their mean

    # gradients, micro-batch by micro-batch
    parallel.zero_gradients(gradients)
    loss_sum, loss_count = 0.0, 0
    for part in my_micro_batches(examples):
        logprobs = completion_logprobs(part)  # (n,)
        loss = -logprobs.sum()
        (run.loss_scale * loss / token_count).backward()
        loss_sum += loss.item()
        loss_count += len(logprobs)

    # one step, the same on all ranks
    parallel.all_reduce_gradients(gradients, run.loss_scale)  # COLLECTIVE
    lr = learning_rate_at(iteration, learning_rate, warmup_iters, max_iters, lr_decay)
    norms = run.step(gradients, dict(policy=lr), grad_clip)

    record |= parallel.all_reduce_metrics({"loss/sft": [loss_sum, loss_count]})  # COLLECTIVE
    record |= {"policy/grad_norm": norms.get("policy", 0.0), "policy/lr": lr}
    run.log(record, tokens=sum(len(ids) for ids, _ in examples), every=20)  # COLLECTIVE

run.finish("tools/sample.py", policy_path=f"{out_dir}/policy")  # COLLECTIVE

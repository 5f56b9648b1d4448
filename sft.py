"""
Supervised fine-tuning: the first of the three steps. A language model learns to continue prompts
like the demonstrations. The loss counts only the tokens of the completions, their EOS included.

python sft.py config/arithmetic_sft.py                    # the toy, from scratch, on a laptop
torchrun --nproc_per_node=8 sft.py config/tldr_sft.py     # a hub model on 8 GPUs

Leaves out_dir/policy, a Hugging Face directory, and out_dir/log.jsonl. The same command again
resumes.

b demonstrations in a micro-batch, T tokens in the longest, n trained tokens in all of them, d width
of the model.
"""

import launch
import parallel
from checks import check_system
from completions import sft_row
from configurator import configure
from errors import BadConfig, say, warn
from examples import (encode_examples, example_logprobs, micro_batches_of, tokens_of_example,
                      trained_tokens)
from loss import learning_rate_at
from model import no_grad_forwards
from models import autocast, in_memory, load
from scratch import begin
from optimizers import make_optimizer
from prompts import batch_rows, iterations, spread
from rows import Rows, read_rows
from run import Run, ranks_agree
from tokenizer import check_tokenizer_fits, load_tokenizer

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
# of a scratch model: a folder, or an encoding such as tiktoken:gpt2; other models bring their own
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
config, system = configure(globals(), "keys.py", checkpoint_interval=500,
                           sync_check_interval=100)
# -------------------------------------------------------------------------------------------------
# set-up: the ranks, the data, the model, its optimizer, and resume or begin

if init_from == "scratch" and d_model % (2 * n_head):
    raise BadConfig(f"d_model = {d_model} must be a multiple of 2 * n_head = {2 * n_head}: heads "
                    "have an even width")
if init_from == "scratch" and learning_rate < 1e-4:
    warn(f"a new model learns little at {learning_rate = :g}; type --learning_rate=3e-3")
if init_from == "scratch" and system.lora:
    raise BadConfig("lora adapts a trained model, and init_from = 'scratch' has none; type "
                    "--init_from=FOLDER, or leave lora out")

device = launch.init(  # COLLECTIVE
    system.device_type, system.timeout, system.deterministic)
precision = autocast(system, device)
check_system(system, device, ("policy",))
train_rows = read_rows(train_path, sft_row, system.fields)
val_rows = read_rows(val_path, sft_row, system.fields) if val_path else Rows()
tokenizer = load_tokenizer(tokenizer_path if init_from == "scratch" else init_from,
                           system.chat_template, system.template_kwargs, system.system_prompt)

# a new model of the sizes above, or a given model, with an adapter where there is LoRA
if init_from == "scratch":
    sizes = dict(n_embd=d_model, n_layer=n_layer, n_head=n_head, n_inner=d_ff, n_positions=context)
    if family == "llama":
        sizes = dict(hidden_size=d_model, num_hidden_layers=n_layer, num_attention_heads=n_head,
                     intermediate_size=d_ff, max_position_embeddings=context)
    policy = begin(dict(
        model_type=family, tie_word_embeddings=False, **sizes, vocab_size=tokenizer.vocab_size,
        bos_token_id=None, eos_token_id=tokenizer.eos_id, pad_token_id=tokenizer.pad_id,
        initializer_range=d_model**-0.5), "policy", system, device, seed)
else:
    policy = load(init_from, "policy", system, device, trained=True, seed=seed)
check_tokenizer_fits(tokenizer, policy, init_from)

# [(ids, trained), ...] of all rows: trained is 1 on the tokens that the loss counts, else 0
train_examples, val_examples = (
    encode_examples(rows, path, tokenizer, policy.max_positions, max_tokens, system.too_long)
    for rows, path in ((train_rows, train_path), (val_rows, val_path)))
eval_examples = [val_examples[i] for i in spread(len(val_examples), eval_size, seed)]
config["max_iters"] = max_iters = iterations(max_iters, system.epochs, len(train_rows), batch_size)
models = in_memory(policy=policy)  # with LoRA: the adapter and its trunk
ranks_agree(config, [train_path, val_path], models, [tokenizer])  # COLLECTIVE

optimizer = make_optimizer(policy, "policy", system, learning_rate, (beta1, beta2), adam_eps)
run = Run(  # COLLECTIVE
    out_dir, max_iters, config, system, device, models, dict(policy=optimizer), tokenizer,
    must_match=["seed", "batch_size", "init_from"],
    sources=["train_path", "tokenizer_path" if init_from == "scratch" else "init_from"],
    token_ids=[part for example in train_examples for part in example])
gradients = parallel.flatten_gradients(run.trained)
say(f"{len(train_rows)} demonstrations, {len(val_rows)} held out; {max_iters} steps of "
    f"{batch_size} are {max_iters * batch_size / len(train_rows):.1f} epochs")


def micro_batches(examples):
    """This rank's micro-batches of examples that all ranks have: lists of (ids, trained)."""
    return micro_batches_of(examples, tokens_of_example, micro_batch_size,
                            system.micro_batch_tokens)


def completion_logprobs(examples):
    """Log-probs of the n trained tokens of b examples, (n,). examples: b of (ids, trained)."""
    with precision:
        return example_logprobs(policy, examples, tokenizer, system.head_chunk,
                                device)


def evaluate():
    """A collective: the mean loss in nats a token over held-out demonstrations."""
    run.enter("eval")
    total, count = 0.0, 0
    with no_grad_forwards([policy], device):
        for part in micro_batches(eval_examples):
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
    rows = batch_rows(seed, iteration, batch_size, train_rows.mix)
    examples = [train_examples[i] for i in rows]  # of all ranks
    token_count = trained_tokens(examples)  # of all ranks: the loss is the mean over these

    # gradients, micro-batch by micro-batch
    parallel.zero_gradients(gradients)
    loss_sum, loss_count = 0.0, 0
    for part in micro_batches(examples):
        loss = -completion_logprobs(part).sum()
        (run.loss_scale * loss / token_count).backward()
        loss_sum += loss.item()
        loss_count += trained_tokens(part)

    # one step, the same on all ranks
    parallel.all_reduce_gradients(gradients, run.loss_scale)  # COLLECTIVE
    lr = learning_rate_at(iteration, learning_rate, warmup_iters, max_iters, lr_decay)
    norms = run.step(gradients, dict(policy=lr), grad_clip)

    record |= parallel.all_reduce_metrics({"loss/sft": [loss_sum, loss_count]})  # COLLECTIVE
    record |= {"policy/grad_norm": norms.get("policy", 0.0), "policy/lr": lr}
    run.log(record, tokens=sum(map(tokens_of_example, examples)), every=20)  # COLLECTIVE

run.finish("sample from it (tools/sample.py), or train a reward model (rm.py)")  # COLLECTIVE

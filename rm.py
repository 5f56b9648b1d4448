"""
The reward model: the second of the three steps. It is the SFT model with a scalar head. It learns
to give the preferred one of two completions the higher score, read at the last token
(Bradley-Terry). At the end its scores are shifted: demonstrations then score 0 on average.

python rm.py config/arithmetic_rm.py                      # the toy, on a laptop
torchrun --nproc_per_node=8 rm.py config/tldr_rm.py       # a hub model on 8 GPUs
python rm.py --teacher=big/rm --init_from=small/policy    # learns the scores of a larger one

Leaves out_dir/reward_model, a Hugging Face sequence-classification directory, and
out_dir/log.jsonl. The same command again resumes. The sections are those of sft.py.

b examples in a micro-batch; k completions in an example, 2 in a pair; W tokens in the longest one.
"""
from configurator import configure  # first: it must be imported before torch
from errors import BadInput, optional, say

import torch

import parallel
import ranks
from batches import deal_rows, right_pad
from demonstrations import dialogue
from formulas import learning_rate_at
from load import autocast, load
from model import no_grad_forwards
from prompts import (batch_rows, encode_rows, hash_of_ids, read_rows, rows_to_evaluate, run_length,
                     say_length)
from run import Run, make_optimizer

# -------------------------------------------------------------------------------------------------
# where to write
out_dir = "out/rm"  # * checkpoints, log.jsonl and the finished model; to resume, give the same
eval_interval = 50  # iterations between evaluations; also at iteration 0 and at the end [>= 1]
eval_size = 0  # how many held-out pairs to evaluate on, 0 = all [>= 0]

# data: JSONL with "prompt", "chosen" and "rejected", or two whole dialogues; see docs/data.md
train_path = "data/arithmetic/pairs_train.jsonl"  # * pairs to learn; A.jsonl,0.3*B.jsonl: a mix
val_path = ""  # * held-out pairs; empty = no evaluation
demonstrations_path = ""  # * SFT's; they will score 0 on average; empty = the held-out chosen ones
max_tokens = 0  # * longest prompt and completion together, 0 = the model's context [>= 0]

# model
init_from = "out/arithmetic_sft/policy"  # * a folder or hub name; N+ detail 11: with a new head

# a teacher: frozen reward models; their scores are learned instead of the labels. train_path
# may then be pairs, or single responses: rows with "prompt" and "completion", as for sft.py
teacher = ""  # a folder or hub name, or A,B,C: the mean of their scores; empty = none
score_coef = 1.0  # with teacher: weight of (score - the teacher's score)^2 [>= 0]
preference_coef = 1.0  # with teacher: weight of the cross-entropy against its preferences [>= 0]

# without one, the loss of a pair: -log sigmoid(score of the chosen - score of the rejected), and
margin_coef = 1.0  # the chosen one should lead by this times the pair's "margin", if any [>= 0]
use_confidence = False  # a pair's label is right with the probability in its "confidence", if any
label_smoothing = 0.0  # the assumed share of pairs with a wrong label [0..0.5]
centre_coef = 0.0  # weight of (score of the chosen + score of the rejected)^2, as 0.01 [>= 0]

# optimizer: AdamW
max_iters = 100  # * optimizer steps [>= 1]
batch_size = 64  # * pairs a step, over all ranks [1..1000000]
micro_batch_size = 32  # pairs at once; only memory depends on it [>= 1]
learning_rate = 1e-5  # * peak, for a hub model; often 1e-4 with lora [> 0]
warmup_iters = 5  # steps of linear warm-up [>= 0]
lr_decay = "cosine"  # then it stays, or falls to 0 like this [constant | linear | cosine]
beta1 = 0.9  # AdamW's first moment decay [0..0.9999]
beta2 = 0.95  # AdamW's second moment decay [0..0.9999]
adam_eps = 1e-5  # AdamW's epsilon (N+ detail 10) [> 0]
grad_clip = 1.0  # largest gradient norm, 0 = no clipping [>= 0]

# randomness
seed = 1  # decides the new head and the order of the pairs [>= 0]

# system: the keys that are not of the algorithm, such as system.dtype and system.lora
config, system = configure(globals(), "config/keys.py", until="ref_path",
                           checkpoint_interval=500, sync_check_interval=100)
# -------------------------------------------------------------------------------------------------
# set-up: the ranks, the model, the data, the optimizer; then begin, or resume

PAIR = "chosen", "rejected"  # the fields of a pair
if system.too_long == "cut":
    raise BadInput("too_long = 'cut': a score is read at the last token, so a pair cannot be cut; "
                   "type --too_long=drop")
if teacher:  # its scores are learned instead of the labels
    from options import teachers
    teachers.check_teacher(score_coef, preference_coef, label_smoothing, centre_coef,
                           use_confidence)

device = ranks.init(system)  # COLLECTIVE
# the given model with a scalar head, and with an adapter where there is LoRA
reward_model = load(init_from, "reward", system, device, head="scalar", trained=True, seed=seed)
reward_model.score_shift = 0.0  # set at the end
tokenizer = reward_model.tokenizer
tokenizer.set_padding_apart()  # the score is read at the last token that is no padding


def pair_row(row, *fields):
    """
    The prompt and these fields of a data row. Of a pair two more numbers are kept: `margin`, from 0
    on, by which the chosen one is better; and `confidence`, the probability that it is the better.
    """
    kept = dialogue(row, *fields)
    for name, largest in (("margin", 1e30), ("confidence", 1.0)):
        if row.get(name) is not None:
            if type(row[name]) not in (int, float) or not 0 <= row[name] <= largest:
                raise BadInput(f"field {name!r} must be a number from 0 to {largest:g}, found "
                               f"{row[name]!r}")
            kept[name] = float(row[name])
    return kept


def encode(rows, fields, model):
    """Give Rows a reward model's ids of each prompt with each of these completions: a tuple."""
    def encode_all(rows):
        prompts = [row["prompt"] for row in rows]
        return list(zip(*(model.tokenizer.encode_scored(prompts, [row[field] for row in rows])
                          for field in fields), strict=True))

    model.tokenizer.say_marks(rows, ["prompt", *fields], rows.path)
    limit = min(model.max_positions, max_tokens or model.max_positions)
    rows = encode_rows(rows, encode_all, limit, system.too_long, None,
                       lambda sequences: max(map(len, sequences)))
    if fields == PAIR and not teacher and any(chosen == other for chosen, other in rows.ids):
        optional("mistakes.check_ties")(rows.ids, rows.path, train_path)
    return rows


def load_rows(path, fields):
    """The Rows of a file, with the ids of each prompt and each of these fields."""
    rows = read_rows(path, lambda row: pair_row(row, *fields), system.fields)
    return encode(rows, fields, reward_model)


completions = teachers.completions_of(train_path, score_coef, system) if teacher else PAIR
k = len(completions)
train_rows = load_rows(train_path, completions)
eval_pairs, demonstrations = [], [pair[:1] for pair in train_rows.ids[:1000]]
if val_path:
    val_rows = load_rows(val_path, PAIR)
    held_out = rows_to_evaluate(len(val_rows), eval_size, seed)  # the numbers of the pairs
    eval_pairs = [val_rows.ids[i] for i in held_out]
    demonstrations = [pair[:1] for pair in val_rows.ids]
if demonstrations_path:
    demonstrations = load_rows(demonstrations_path, ["completion"]).ids
config["max_iters"] = max_iters = run_length(max_iters, system.epochs, len(train_rows), batch_size)

optimizer = make_optimizer(reward_model, "reward", system, learning_rate, (beta1, beta2), adam_eps)
run = Run(  # COLLECTIVE
    out_dir, max_iters, config, system, device, dict(reward_model=reward_model),
    dict(reward_model=optimizer),
    must_match=["seed", "batch_size", "init_from", "train_path", "teacher"],
    token_ids=hash_of_ids(train_rows))
gradients = {name: parallel.flatten_gradients(model) for name, model in run.trained.items()}
say_length("pairs" if k == 2 else "responses", train_rows, "steps", max_iters, batch_size)

# -------------------------------------------------------------------------------------------------
# the loss of a pair, and how far to trust its probabilities


def preference_loss(difference, probability=1.0):
    """
    The Bradley-Terry loss (arXiv 2009.01325, section 3.4), (B,): -log sigmoid(difference), where
    difference is the score of one answer - that of another, (B,). For equal scores it is log 2 =
    0.693. probability, (B,) or a number: that the first one is the better. Below 1 the loss is the
    cross-entropy of sigmoid(difference) against it, which is smallest where the two are equal.
    """
    log_sigmoid = torch.nn.functional.logsigmoid
    return (-probability * log_sigmoid(difference)
            - (1.0 - probability) * log_sigmoid(-difference))


def calibration_error(probabilities, bins=10):
    """
    The expected calibration error of a reward model's probabilities (n,) that the chosen answer of
    a pair is the better one (Guo et al., arXiv 1706.04599, equation 3). One below 1/2 is a wrong
    guess, with the confidence 1 - probability. In each of the bins from 1/2 to 1 the error is |mean
    confidence - share of right guesses|; the result is the mean over all guesses. With 0.9, 0.9 and
    0.1: three guesses of confidence 0.9, 2/3 of them right, so 0.233.
    """
    confidence = torch.maximum(probabilities, 1 - probabilities)  # (n,)
    right = (probabilities > 0.5).double() + 0.5 * (probabilities == 0.5)
    bin_of = ((confidence - 0.5) * 2 * bins).long().clamp(max=bins - 1)  # (n,), its number
    gaps = torch.zeros(bins, dtype=torch.float64).index_add(0, bin_of, confidence.double() - right)
    return gaps.abs().sum().item() / len(probabilities)


# -------------------------------------------------------------------------------------------------
# scores and evaluation


def my_micro_batches(examples):
    """This rank's micro-batches of examples (ids of its completions, ...) that all ranks have."""
    lengths = [sum(map(len, example[0])) for example in examples]
    for part in deal_rows(lengths, micro_batch_size, system.micro_batch_tokens):
        yield [examples[i] for i in part]


def scores_of(groups, k, model):
    """
    Scores of b groups of k sequences of ids each, (b, k): a pair is a group of 2. A score is the
    scalar at the last token of a sequence, the EOS, as for a response.
    """
    sequences = [ids for group in groups for ids in group]
    tokens = right_pad(sequences, tokenizer.pad_id).to(device)  # (b k, W)
    last = torch.tensor([len(ids) - 1 for ids in sequences] or [0])  # without any: of one row
    with autocast(system, device):
        scores = model.scores(tokens, last.to(device))  # (b k,)
    scores = scores[:len(groups) * k].view(-1, k)
    # rounding may give one of two equal texts the higher score, but this is a tie
    equal = torch.tensor([group[0] == group[-1] for group in groups], dtype=torch.bool)  # (b,)
    return torch.where(equal.to(device)[:, None], scores[:, :1], scores)


def all_scores(groups, model):
    """A collective: the scores of n groups without gradients, (n, k). Every rank does its share."""
    k = len(groups[0])
    scores = torch.zeros(len(groups), k, dtype=torch.float64)
    numbered = [(group, number) for number, group in enumerate(groups)]
    with no_grad_forwards([model], device):
        for part in my_micro_batches(numbered):
            rows = [number for _, number in part]
            scores[rows] = scores_of([group for group, _ in part], k, model).double().cpu()
    scores = parallel.all_reduce_sum(dict(scores=scores.to(parallel.comm_device())))  # COLLECTIVE
    return scores["scores"].cpu()


def losses_of(scores, targets):
    """
    The losses of b pairs with these scores (b, 2), {name: (b,)}. targets, (b, 2): of each pair the
    margin by which the chosen one should lead (Llama 2, arXiv 2307.09288, equation 2), and the
    probability that its label is right. label_smoothing is that of cDPO (Mitchell, 2023).
    """
    margin, confidence = targets.unbind(1)  # (b,) each
    # (b,): the label was wrong and label_smoothing does not swap it, or was right and is swapped
    wrong = (1 - confidence) * (1 - label_smoothing) + confidence * label_smoothing
    chosen, rejected = scores.unbind(1)
    return {"loss/preference": preference_loss(chosen - rejected - margin, 1.0 - wrong),
            # the loss above only sees differences: this one keeps the scores around 0 (Eisenstein
            # et al., arXiv 2312.09244)
            "loss/centring": scores.sum(1) ** 2}


weights = {"loss/preference": 1.0, "loss/centring": centre_coef}
if teacher:
    losses_of = teachers.losses_of
    weights = {"loss/score": score_coef, "loss/preference": preference_coef}


def chosen_wins(scores):
    """Whether the chosen one of each pair scores higher, scores (n, 2) -> (n,); a tie is 0.5."""
    chosen, rejected = scores.unbind(1)  # (n,) each
    return (chosen > rejected).double() + 0.5 * (chosen == rejected)


def pair_metrics(scores):
    """
    Metrics of scores (n, 2) of the held-out pairs. loss: without margins, smoothing and centring.
    calibration_error: of sigmoid(difference of the scores), the probability that the chosen wins.
    """
    difference = scores[:, 0] - scores[:, 1]  # (n,)
    return {"eval/loss": preference_loss(difference).mean().item(),
            "eval/accuracy": chosen_wins(scores).mean().item(),
            "eval/calibration_error": calibration_error(difference.sigmoid())}


def evaluate():
    """A collective: the metrics of the held-out pairs, with a teacher beside its scores."""
    run.enter("eval")
    scores = all_scores(eval_pairs, reward_model)  # COLLECTIVE; (n, 2)
    record = pair_metrics(scores)
    say(f"eval {run.iteration}: held-out loss {record['eval/loss']:.4f}, "
        f"{record['eval/accuracy']:.1%} of pairs right, calibration error "
        f"{record['eval/calibration_error']:.3f}")
    return record | teachers.agreement_with(scores, eval_targets) if teacher else record


# -------------------------------------------------------------------------------------------------
# targets: the numbers that the loss needs of each example, beside its ids

targets = [[margin_coef * row.get("margin", 0.0),
            row.get("confidence", 1.0) if use_confidence else 1.0] for row in train_rows]
if teacher:  # it reads all examples once, now, and then leaves the memory
    data = [(train_rows, train_path, completions, range(len(train_rows)))]
    data += [(val_rows, val_path, PAIR, held_out)] if eval_pairs else []
    targets, *rest = teachers.teachers_scores(  # COLLECTIVE
        teacher, data, encode, all_scores, system, device)
    targets = targets.tolist()
    for eval_targets in rest:  # of the held-out pairs, if there are any; evaluate reads it, too
        say("the teacher: {eval/accuracy:.1%} of held-out pairs right, calibration error "
            "{eval/calibration_error:.3f}".format(**pair_metrics(eval_targets)))

# -------------------------------------------------------------------------------------------------
# the loop

for iteration in run.iterations():  # COLLECTIVE: between two of them it audits, saves and stops
    record = {}
    if eval_pairs and (iteration % eval_interval == 0 or iteration == max_iters):
        record |= evaluate()  # COLLECTIVE
    if iteration == max_iters:
        run.log(record)  # COLLECTIVE
        break

    run.enter("update")
    row_numbers = batch_rows(seed, iteration, batch_size, train_rows)
    examples = [(train_rows.ids[i], targets[i]) for i in row_numbers]  # of all ranks

    # gradients, micro-batch by micro-batch; the loss is the mean over the pairs of all ranks
    parallel.zero_gradients(gradients)
    sums = {}
    for part in my_micro_batches(examples):
        scores = scores_of([ids for ids, _ in part], k, reward_model)  # (b, k)
        wanted = torch.tensor([numbers for _, numbers in part], dtype=scores.dtype, device=device)
        losses = losses_of(scores, wanted.view(-1, len(targets[0])))  # (b,) each
        total = sum(weights[name] * loss.sum() for name, loss in losses.items())
        (run.loss_scale * total / batch_size).backward()
        figures = losses | ({"train/accuracy": chosen_wins(scores)} if k == 2 else {})
        for name, x in figures.items():
            before, count = sums.get(name, (0.0, 0))
            sums[name] = [before + x.sum().item(), count + len(part)]

    # one step, the same on all ranks
    parallel.all_reduce_gradients(gradients, run.loss_scale)  # COLLECTIVE
    lr = learning_rate_at(iteration, learning_rate, warmup_iters, max_iters, lr_decay)
    norms = run.step(gradients, dict(reward_model=lr), grad_clip)

    record |= parallel.all_reduce_metrics(sums)  # COLLECTIVE
    record |= {"reward_model/grad_norm": norms.get("reward_model", 0.0), "reward_model/lr": lr}
    tokens = sum(len(ids) for group, _ in examples for ids in group)
    run.log(record, tokens=tokens, every=10)  # COLLECTIVE

# Training on pairs only fixes differences of scores, so the zero point can be chosen: the average
# demonstration (N+ detail 15). Then a fixed penalty for a response that does not end means the same
# for every reward model.
mean = all_scores(demonstrations, reward_model).mean().item()  # COLLECTIVE
reward_model.score_shift = -mean
what = "demonstrations" if demonstrations_path else "chosen completions"
say(f"{what} scored {mean:.3f} on average; scores are shifted so that this is 0")
# ppo.py on the same prompts; its longest responses have 53 tokens, if that many fit
more = {key: config[key] for key in ("fields", "chat_template", "system_prompt") if config[key]}
room = reward_model.max_positions - max(map(len, reward_model.tokenizer.encode_prompts(
    [row["prompt"] for row in train_rows])))
run.finish(  # COLLECTIVE
    "ppo.py", policy_path=init_from, reward_path=f"{out_dir}/reward_model",
    prompts_path=train_path, **more, **dict(max_new_tokens=max(room, 1)) if room < 53 else {})

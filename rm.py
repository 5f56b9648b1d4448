"""
The reward model: the second of the three steps. It is the SFT model with a scalar head. It learns
to give the preferred one of two completions the higher score, read at the last token
(Bradley-Terry). At the end its scores are shifted: demonstrations then score 0 on average.

python rm.py config/arithmetic_rm.py                      # the toy, on a laptop
torchrun --nproc_per_node=8 rm.py config/tldr_rm.py       # a hub model on 8 GPUs
python rm.py --teacher=big/rm --init_from=small/policy    # learns the scores of a larger one

Leaves out_dir/reward_model, a Hugging Face sequence-classification directory, and
out_dir/log.jsonl. The same command again resumes. This script has the sections of sft.py, in the
same order.

b examples in a micro-batch; k completions in an example, 2 in a pair; T tokens in the longest of
them.
"""
import torch

import launch
import parallel
from checks import check_system
from completions import PAIR, completions_of, preference_row, scored_row, sft_row
from configurator import configure
from errors import BadConfig, BadInput, say, warn
from estimates import agreement, calibration_error, correlation
from examples import (centred, centring_loss, encode_scored, micro_batches_of, preference_loss,
                      soft_preference_loss)
from folders import several_paths
from loss import learning_rate_at
from model import no_grad_forwards
from models import autocast, in_memory, load
from optimizers import make_optimizer
from prompts import batch_rows, iterations, right_pad, spread
from rows import Rows, read_rows
from run import Run, ranks_agree
from tokenizer import check_tokenizer_fits, load_reader, load_tokenizer

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

# a teacher: frozen reward models; their scores are learned in the place of the labels. train_path
# may then be pairs, or single responses: rows with "prompt" and "completion", as for sft.py
teacher = ""  # a folder or hub name, or A,B,C: the mean of their scores; empty = none
score_coef = 1.0  # teacher: weight of (score - the teacher's score)^2 [>= 0]
preference_coef = 1.0  # teacher: weight of the cross-entropy against its preferences [>= 0]

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
config, system = configure(globals(), "keys.py", checkpoint_interval=500,
                           sync_check_interval=100)
# -------------------------------------------------------------------------------------------------
# set-up: the ranks, the data, the model, its optimizer, and resume or begin

if system.too_long == "cut":
    raise BadConfig("too_long = 'cut': a score is read at the last token, so a pair cannot be cut; "
                    "type --too_long=drop")
if teacher and (label_smoothing or centre_coef or use_confidence):
    raise BadConfig("label_smoothing, centre_coef and use_confidence change the loss of labels, "
                    "and with a teacher its scores are learned instead; leave them out")
if teacher and score_coef == preference_coef == 0:
    raise BadConfig("score_coef = 0 and preference_coef = 0 leave nothing to learn of the teacher; "
                    "type --score_coef=1")

device = launch.init(  # COLLECTIVE
    system.device_type, system.timeout, system.deterministic)
precision = autocast(system, device)
check_system(system, device, ("reward",))
train_rows = read_rows(train_path, scored_row if teacher else preference_row, system.fields)
completions = completions_of(train_rows, train_path)  # the fields: of a pair two
k = len(completions)
if k == 1 and score_coef == 0:
    raise BadConfig(f"score_coef = 0, but {train_path} has single responses, of which nothing but "
                    "the teacher's scores can be learned; type --score_coef=1")
val_rows = read_rows(val_path, preference_row, system.fields) if val_path else Rows()
demonstrations = read_rows(demonstrations_path, sft_row) if demonstrations_path else Rows()
tokenizer = load_tokenizer(init_from, system.chat_template, system.template_kwargs,
                           system.system_prompt)
tokenizer.set_padding_apart()  # the score is read at the last token that is no padding

# the given model with a scalar head, and with an adapter where there is LoRA
reward_model = load(init_from, "reward", system, device, head="scalar", trained=True, seed=seed)
reward_model.score_shift = 0.0  # set at the end
check_tokenizer_fits(tokenizer, reward_model, init_from)


def encode(rows, path, *fields):
    """[the ids of each of these completions behind its prompt, ...] of all rows."""
    return encode_scored(rows, path, tokenizer, fields, reward_model.max_positions, max_tokens,
                         system.too_long)


train_ids = encode(train_rows, train_path, *completions)
val_pairs = encode(val_rows, val_path, *PAIR)
held_out = spread(len(val_pairs), eval_size, seed)  # the numbers of the pairs to evaluate on
eval_pairs = [val_pairs[i] for i in held_out]
demonstrations = encode(demonstrations, demonstrations_path, "completion")
# without demonstrations the chosen completions will score 0 on average
demonstrations = demonstrations or [pair[:1] for pair in val_pairs or train_ids[:1000]]
config["max_iters"] = max_iters = iterations(max_iters, system.epochs, len(train_rows), batch_size)
models = in_memory(reward_model=reward_model)  # with LoRA: the adapter and its trunk
ranks_agree(config, [train_path, val_path, demonstrations_path], models, [tokenizer])  # COLLECTIVE

optimizer = make_optimizer(reward_model, "reward", system, learning_rate, (beta1, beta2), adam_eps)
run = Run(  # COLLECTIVE
    out_dir, max_iters, config, system, device, models, dict(reward_model=optimizer), tokenizer,
    must_match=["seed", "batch_size", "teacher"],
    sources=["train_path", "init_from"] + ["teacher"] * bool(teacher),
    token_ids=[ids for example in train_ids for ids in example])
gradients = parallel.flatten_gradients(run.trained)
say(f"{len(train_rows)} {'pairs' if k == 2 else 'responses'}, {len(val_rows)} held out; "
    f"{max_iters} steps of {batch_size} are {max_iters * batch_size / len(train_rows):.1f} epochs")
alike = sum(k == 2 and row["chosen"] == row["rejected"] for row in train_rows)
if alike:
    warn(f"in {alike} pairs chosen and rejected are one text: they teach nothing")

# -------------------------------------------------------------------------------------------------
# scores and evaluation


def tokens_of(example):
    """How many tokens an example (its sequences, its entry of `known`) has."""
    return sum(map(len, example[0]))


def micro_batches(items):
    """This rank's micro-batches of examples that all ranks have."""
    return micro_batches_of(items, tokens_of, micro_batch_size, system.micro_batch_tokens)


def scores_of(groups, k, model):
    """
    Scores of b groups of k sequences of ids each, (b, k): a pair is a group of 2. A score is the
    scalar at the last token of a sequence, the EOS, as for a response.
    """
    sequences = [ids for group in groups for ids in group] or [[0]]  # sharded: all run the forward
    tokens, mask = (x.to(device) for x in right_pad(sequences, tokenizer.pad_id))
    with precision:
        scores = model.scores(tokens, mask.sum(1) - 1)  # (b k,)
    return scores[:len(groups) * k].view(-1, k)


def all_scores(groups, model):
    """A collective: the scores of n groups without gradients, (n, k). Every rank does its share."""
    k = len(groups[0])
    scores = torch.zeros(len(groups), k, dtype=torch.float64)
    numbered = [(group, number) for number, group in enumerate(groups)]
    with no_grad_forwards([model], device):
        for part in micro_batches(numbered):
            rows = [number for _, number in part]
            scores[rows] = scores_of([group for group, _ in part], k, model).double().cpu()
    return parallel.all_reduce_sum(dict(scores=scores.to(parallel.wire())))["scores"].cpu()


def losses_of(scores, known):
    """
    The losses of b examples with these scores (b, k), {name: (b,)}. known: each pair's margin, and
    the probability that its label is right, (b, 2); or the teacher's scores (b, k).
    """
    if not teacher:
        margin, confidence = known.unbind(1)  # (b,) each
        # (b,), the probability of a wrong label: it was wrong and label_smoothing does not swap it,
        # or it was right and is swapped
        wrong = (1 - confidence) * (1 - label_smoothing) + confidence * label_smoothing
        return {"loss/preference": preference_loss(*scores.unbind(1), margin, wrong),
                "loss/centring": centring_loss(scores)}
    losses = {"loss/score": (scores - known).square().mean(1)}
    if k == 2:
        chance = (known[:, 0] - known[:, 1]).sigmoid()  # that the first is the better one
        losses["loss/preference"] = soft_preference_loss(scores[:, 0] - scores[:, 1], chance)
    return losses


weights = {"loss/preference": 1.0, "loss/centring": centre_coef}
if teacher:
    weights = {"loss/score": score_coef, "loss/preference": preference_coef}


def judge(scores):
    """
    Metrics of scores (n, 2) of the held-out pairs. loss: without margins, smoothing and centring.
    accuracy: the share of the pairs in which the chosen one scores higher; a tie counts half.
    calibration_error: the distance from the truth of sigmoid(difference of the scores), the
    probability that the chosen one is better.
    """
    chosen, rejected = scores.unbind(1)  # (n,) each
    right = (chosen > rejected).double() + 0.5 * (chosen == rejected)
    return {"eval/loss": preference_loss(chosen, rejected).mean().item(),
            "eval/accuracy": right.mean().item(),
            "eval/calibration_error": calibration_error((chosen - rejected).sigmoid())}


def evaluate():
    """A collective: judge the scores of the held-out pairs, and compare them with the teacher's."""
    run.enter("eval")
    scores = all_scores(eval_pairs, reward_model)  # (n, 2)
    record, near = judge(scores), ""
    if teacher:
        record |= {"eval/agreement": agreement(scores, eval_known),
                   "eval/correlation": correlation(scores, eval_known)}
        near = (f"; as the teacher {record['eval/agreement']:.1%}, "
                f"correlation {record['eval/correlation']:.3f}")
    say(f"eval {run.iteration}: held-out loss {record['eval/loss']:.4f}, "
        f"{record['eval/accuracy']:.1%} of pairs right, calibration error "
        f"{record['eval/calibration_error']:.3f}{near}")
    return record


# -------------------------------------------------------------------------------------------------
# known: for each example its margin and confidence; or the scores of the teacher, which reads all
# examples once, now, and then leaves the memory

known = [[margin_coef * row.get("margin", 0.0),
          row.get("confidence", 1.0) if use_confidence else 1.0] for row in train_rows]
if teacher:
    known, eval_known = torch.zeros(len(train_ids), k), torch.zeros(len(eval_pairs), 2)
    teachers = several_paths(teacher, "teacher")
    for path in teachers:  # each reads the text, in its own tokens
        model = load(path, "reward", system, device, head="scalar")
        reader = load_reader(path, model, tokenizer)
        ids = encode_scored(train_rows, train_path, reader, completions, model.max_positions)
        known = known + centred(all_scores(ids, model)) / len(teachers)  # COLLECTIVE
        if eval_pairs:
            ids = encode_scored(val_rows, val_path, reader, PAIR, model.max_positions)
            ids = [ids[i] for i in held_out]
            eval_known = eval_known + centred(all_scores(ids, model)) / len(teachers)
        del model
    if known.std() < 1e-6:  # a rounding
        raise BadInput(f"the teacher {teacher} gives all of {train_path} the same score; was it "
                       "trained?")
    known = known.tolist()
    if eval_pairs:
        figures = judge(eval_known)
        say(f"teacher: {figures['eval/accuracy']:.1%} of held-out pairs right, calibration error "
              f"{figures['eval/calibration_error']:.3f}")
else:
    margins = [margin for margin, _ in known if margin != 0]
    confidences = [confidence for _, confidence in known if confidence != 1]
    if margins:
        say(f"{len(margins)} pairs have a margin, {max(margins):g} at most")
    if confidences:
        say(f"{len(confidences)} pairs have a confidence, {min(confidences):g} at least")


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
    rows = batch_rows(seed, iteration, batch_size, train_rows.mix)
    examples = [(train_ids[i], known[i]) for i in rows]  # of all ranks

    # gradients, micro-batch by micro-batch; the loss is the mean over the pairs of all ranks
    parallel.zero_gradients(gradients)
    sums = {}
    for part in micro_batches(examples):
        scores = scores_of([ids for ids, _ in part], k, reward_model)  # (b, k)
        targets = torch.tensor([what for _, what in part], dtype=scores.dtype,
                            device=device)
        losses = losses_of(scores, targets.view(-1, len(known[0])))  # (b,) each
        total = sum(weights[name] * loss.sum() for name, loss in losses.items())
        (run.loss_scale * total / batch_size).backward()
        right = {"train/accuracy": scores[:, 0] > scores[:, 1]} if k == 2 else {}
        for name, x in (losses | right).items():
            before, count = sums.get(name, (0.0, 0))
            sums[name] = [before + x.sum().item(), count + len(part)]

    # one step, the same on all ranks
    parallel.all_reduce_gradients(gradients, run.loss_scale)  # COLLECTIVE
    lr = learning_rate_at(iteration, learning_rate, warmup_iters, max_iters, lr_decay)
    norms = run.step(gradients, dict(reward_model=lr), grad_clip)

    record |= parallel.all_reduce_metrics(sums)  # COLLECTIVE
    record |= {"reward_model/grad_norm": norms.get("reward_model", 0.0), "reward_model/lr": lr}
    run.log(record, tokens=sum(map(tokens_of, examples)), every=10)  # COLLECTIVE

# Training on pairs only fixes differences of scores, so the zero point can be chosen: the average
# demonstration (N+ detail 15). Then a fixed penalty for a response that does not end means the same
# for every reward model.
mean = all_scores(demonstrations, reward_model).mean().item()
reward_model.score_shift = -mean
what = "demonstrations" if demonstrations_path else "chosen completions"
say(f"{what} scored {mean:.3f} on average; scores are shifted so that this is 0")
run.finish("ppo.py")  # COLLECTIVE

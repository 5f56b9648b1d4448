"""
The key teacher of rm.py: frozen reward models, whose scores are learned in the place of labels.
Several teachers count as one: the mean of their scores, each one's less their mean. A pair has k =
2 completions; a teacher also scores single responses, k = 1.
"""
import torch

from errors import BadInput, say
from load import load_reward_model
from prompts import read_rows

PAIR = "chosen", "rejected"


def check_teacher(score_coef, preference_coef, label_smoothing, centre_coef, use_confidence):
    if label_smoothing or centre_coef or use_confidence:
        raise BadInput("label_smoothing, centre_coef and use_confidence change the loss of "
                        "labels, and a teacher's scores are learned in their place; leave them out")
    if score_coef == preference_coef == 0:
        raise BadInput("score_coef = 0 and preference_coef = 0 leave nothing to learn of the "
                        "teacher; type --score_coef=1")


def completions_of(path, score_coef, system):
    """The fields of completions in a file's rows: PAIR, or ("completion",). Raises BadInput."""
    pairs = sum("chosen" in row for row in read_rows(path, dict, system.fields))
    if not pairs and score_coef == 0:
        raise BadInput(f"score_coef = 0, but {path} has single responses, of which nothing but the "
                       "teacher's scores can be learned; type --score_coef=1")
    return PAIR if pairs else ("completion",)


def teachers_scores(teacher, data, encode, all_scores, system, device):
    """
    A collective: the mean of the teachers' scores of all completions, each one's less their mean:
    for each of `data` a tensor (n, k). One teacher at a time is in memory.

    teacher: the key. data: [(rows, their path, the fields of their completions, the numbers of n
    rows), ...], those to learn first; a teacher reads the texts in its own tokens. encode,
    all_scores: rm.py's. Raises BadInput.
    """
    paths, means = teacher.split(","), [0.0] * len(data)
    for path in paths:
        model = load_reward_model(path.strip(), None, system, device)
        for place, (rows, source, fields, numbers) in enumerate(data):
            ids = rows.ids
            encode(rows, fields, model)
            if len(rows) < len(ids):  # with too_long=drop; the others' numbers have changed
                raise BadInput(f"{source}: {len(ids) - len(rows)} rows are too long for {path}, a "
                               f"teacher; delete them, or type --max_tokens={model.max_positions}")
            scores = all_scores([rows.ids[number] for number in numbers], model)  # COLLECTIVE
            rows.ids = ids
            means[place] = means[place] + (scores - scores.mean()) / len(paths)
        del model
    if means[0].std() < 1e-6:  # a rounding
        raise BadInput(f"the teacher {teacher} gives all of {data[0][1]} the same score; was it "
                       "trained?")
    return means


def losses_of(scores, targets):
    """
    {name: (b,)}, the losses of b examples with these scores, (b, k) as the targets, the teacher's.
    loss/score is their mean squared distance. loss/preference, of pairs, is the cross-entropy
    against the teacher's probability that the first one is the better.
    """
    log_sigmoid = torch.nn.functional.logsigmoid
    losses = {"loss/score": (scores - targets).square().mean(1)}
    if scores.shape[1] == 2:
        chance = (targets[:, 0] - targets[:, 1]).sigmoid()
        difference = scores[:, 0] - scores[:, 1]
        losses["loss/preference"] = (-chance * log_sigmoid(difference)
                                     - (1.0 - chance) * log_sigmoid(-difference))
    return losses


def agreement_with(scores, targets):
    """
    The figures of scores of n held-out pairs beside a teacher's, (n, 2) both: agreement, the share
    of the pairs that both put into the same order; correlation, Pearson's, 0 where one is constant.
    """
    same = (scores[:, 0] > scores[:, 1]) == (targets[:, 0] > targets[:, 1])
    both = torch.stack([scores.flatten(), targets.flatten()]).double()  # (2, 2 n)
    agreement, correlation = same.double().mean().item(), torch.corrcoef(both)[0, 1].nan_to_num()
    say(f"as the teacher: {agreement:.1%} of held-out pairs, correlation {correlation:.3f}")
    return {"eval/agreement": agreement, "eval/correlation": correlation.item()}

"""
Examples, from which sft.py, rm.py and PPO-ptx learn, as token ids; micro-batches of them; and the
losses of rm.py. completions.py checks the rows.
"""
from array import array

import torch

import parallel
import status
from errors import BadInput
from prompts import right_pad, rows_that_fit, say_special_tokens
from rows import at_row, keep_rows

COMPLETED = "prompt", "completion"  # the fields of a demonstration

# --------------------------------------------------------------------------------------------------
# rows as token ids


def encode_examples(rows, path, tokenizer, context, max_tokens=0, too_long="error"):
    """
    For sft.py and PPO-ptx: (ids, trained) of each row's prompt and completion. ids is an array of
    token ids; trained, of the same length, has 1 for the tokens that SFT trains, else 0. With
    strings these are the completion and EOS: the toy's "1+2=" and "3" make [49, 43, 50, 61, 51,
    EOS] and [0, 0, 0, 0, 1, 1]. With messages they are the assistant's turns of the completion,
    with their ends.

    context: the model's; max_tokens: a smaller limit, 0 = none. An example that is cut loses its
    end and its EOS. Raises BadInput with the row.
    """
    say_special_tokens(rows, COMPLETED, tokenizer, path)
    chats = [row["completion"] for row in rows if not isinstance(row["prompt"], str)]
    if chats:
        from options.assistant import learned_ids, say_unknown_fields

        say_unknown_fields(chats, path)
    strings = [row for row in rows if isinstance(row["prompt"], str)]
    # a text without a prompt is in the place of the prompt
    texts = iter(tokenizer.encode_texts([row["prompt"] or row["completion"] for row in strings]))
    behind = iter(tokenizer.encode_behind([row["completion"] if row["prompt"] else ""
                                           for row in strings]))
    found, at = [], at_row(rows, path)
    for number, row in enumerate(rows):
        with at(number):
            if isinstance(row["prompt"], str):
                ids, more = tokenizer.bos_ids + next(texts), next(behind) + [tokenizer.eos_id]
                given = len(ids) if row["prompt"] else len(tokenizer.bos_ids)
                ids += more
                trained = [False] * given + [True] * (len(ids) - given)
            else:
                ids, trained = learned_ids(tokenizer, row["prompt"], row["completion"])
            if row["prompt"] == "":  # nothing predicts a text's first token
                trained[0] = False
            if trained[0] or not any(trained):
                raise BadInput("there is nothing to learn in it, or nothing to predict it from: "
                               f"{len(ids)} tokens, of which {sum(trained)} are the answer's")
        found.append((array("i", ids), array("b", trained)))
    limit, limit_name = limit_of(context, max_tokens)
    kept = rows_that_fit(rows, path, [len(ids) for ids, _ in found], limit, limit_name, too_long)
    kept = [number for number in kept if any(found[number][1][:limit])]  # trained tokens are left
    keep_rows(rows, kept)
    return [tuple(x[:limit] for x in found[number]) for number in kept]


def encode_scored(rows, path, tokenizer, fields, context, max_tokens=0, too_long="error"):
    """
    For rm.py: a reward model's ids of each row's prompt with each of the fields, such as "chosen"
    and "rejected": [(ids, ids), ...]. The rest as in encode_examples; nothing is cut, because a
    score is read at a text's end.
    """
    say_special_tokens(rows, ["prompt", *fields], tokenizer, path)
    prompts = [row["prompt"] for row in rows]
    lists = [tokenizer.encode_scored(prompts, [row[field] for row in rows], at=at_row(rows, path))
             for field in fields]
    found = [tuple(array("i", ids) for ids in group) for group in zip(*lists, strict=True)]
    limit, limit_name = limit_of(context, max_tokens)
    lengths = [max(map(len, group)) for group in found]
    kept = rows_that_fit(rows, path, lengths, limit, limit_name, too_long)
    keep_rows(rows, kept)
    return [found[number] for number in kept]


def limit_of(context, max_tokens):
    """The smaller one of a model's context and the key max_tokens (0: none), and its name."""
    if 0 < max_tokens < context:
        return max_tokens, "max_tokens"
    return context, "the model's context"


# --------------------------------------------------------------------------------------------------
# micro-batches and their log-probs


def micro_batches_of(items, tokens_of, micro_batch_size, micro_batch_tokens=0):
    """
    This rank's micro-batches of some items, which all ranks have: lists of items, one by one. All
    ranks get equally many, some of them empty. tokens_of: a function, the tokens of an item.
    """
    lengths = [tokens_of(item) for item in items]
    parts = parallel.deal_rows(lengths, micro_batch_size, micro_batch_tokens)
    for number, part in enumerate(parts, 1):
        status.show(f"micro-batch {number} of {len(parts)}")
        yield [items[i] for i in part]


def tokens_of_example(example):
    """How many tokens a demonstration (ids, trained) has, trained or not."""
    return len(example[0])


def trained_tokens(examples):
    """How many trained tokens some demonstrations [(ids, trained), ...] have together."""
    return sum(trained.count(1) for _, trained in examples)


def example_logprobs(model, examples, tokenizer, chunk, device):
    """
    Log-probs of the n trained tokens of b demonstrations, (n,), at temperature 1.

    examples: b pairs (ids, trained), see encode_examples. tokenizer: its pad_id and vocab_size are
    used. chunk: see Model.logprobs.
    """
    tokens, _ = right_pad([ids for ids, _ in examples], tokenizer.pad_id)  # (b, T)
    target_mask = right_pad([trained for _, trained in examples], 0)[0].bool()  # (b, T)
    if not examples:  # sharded models: this rank runs the forward with the others
        tokens = torch.zeros(1, 2, dtype=torch.int64)
        target_mask = torch.zeros_like(tokens, dtype=torch.bool)
    target_mask[:, :1] = False  # nothing predicts the first token
    return model.logprobs(tokens.to(device), target_mask.to(device),
                          vocab_size=tokenizer.vocab_size, chunk=chunk)[0]


# --------------------------------------------------------------------------------------------------
# the losses of rm.py, and how far to trust its probabilities


def preference_loss(chosen, rejected, margin=0.0, smoothing=0.0):
    """
    The Bradley-Terry loss of a reward model (arXiv 2009.01325, section 3.4), (B,): -log sigmoid(x)
    where x = score of the chosen answer - score of the rejected one, (B,) each. For equal scores it
    is log 2 = 0.693.

    margin: (B,) or a number, subtracted from x: the chosen answer should be better by more than
    that (Llama 2, arXiv 2307.09288, equation 2). smoothing: (B,) or a number, the assumed share of
    pairs with a wrong label,
    (1 - smoothing) * -log sigmoid(x) + smoothing * -log sigmoid(-x)
    (the loss of cDPO, Mitchell 2023, with scores in the place of log-ratios). So a label is the
    probability 1 - smoothing; soft_preference_loss takes any probability.
    """
    return soft_preference_loss(chosen - rejected - margin, 1.0 - smoothing)


def soft_preference_loss(difference, probability):
    """
    Cross-entropy of sigmoid(difference), (B,), against the probability that the first of two
    answers is the better one, (B,) or a number. It is smallest where the two are equal.
    """
    log_sigmoid = torch.nn.functional.logsigmoid
    return (-probability * log_sigmoid(difference)
            - (1.0 - probability) * log_sigmoid(-difference))


def centring_loss(scores):
    """
    (sum of the scores of an example's completions)^2, scores (B, k) -> (B,): with a small weight it
    keeps scores around 0 (Eisenstein et al., arXiv 2312.09244). The preference loss does not fix
    the mean score of a prompt's completions, because it only sees differences.
    """
    return scores.sum(1) ** 2


def calibration_error(probabilities, bins=10):
    """
    The expected calibration error of the probabilities (n,) that the chosen answer of a pair is the
    better one, from a reward model (Guo et al., arXiv 1706.04599, equation 3). A probability below
    1/2 is a wrong guess, with the confidence 1 - probability. The guesses are put into bins of
    equal width from 1/2 to 1; the error of a bin is the distance of its mean confidence from its
    share of right guesses, and the result is the mean of the errors over all guesses. With 0.9, 0.9
    and 0.1: three guesses of confidence 0.9, 2/3 of them right, so 0.233.
    """
    sure = torch.maximum(probabilities, 1 - probabilities)  # (n,)
    right = (probabilities > 0.5).double() + 0.5 * (probabilities == 0.5)
    number = ((sure - 0.5) * 2 * bins).long().clamp(max=bins - 1)  # (n,), of each guess's bin
    gaps = torch.zeros(bins, dtype=torch.float64).index_add(0, number, sure.double() - right)
    return gaps.abs().sum().item() / len(probabilities)

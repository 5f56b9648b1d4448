"""
Responses -> scores, one number for each response: from rules, which read its text, and from models
(a reward model, a judge), which read the text as tokens of their own. A rule is a function
reward(batch) -> scores (B,). Its batch is a dict of lists, of one entry a response. For the toy:

    batch = dict(
        rows=[{"prompt": "123+456=", "answer": "579"}, {"prompt": "250+250=", "answer": "500"}],
        prompts=["123+456=", "250+250="],
        completions=["<think>3+6+0=09;2+5+0=07;1+4+0=05</think>579", "501"],
    )
    accuracy(batch)  # [1.0, 0.0]: 579 is right, 501 is not (grading/answers.py)
    thinks(batch)    # [1.0, 0.0]: only the first one thinks

rows are those of the data file. prompts are the texts that the policy read, in its chat template.
In a run the batch also has the columns of batches.py down to `age`; the tokenizer; max_new_tokens;
`seconds`, the time that all rules together may still take; and `limits` of programs. Where a
response has several turns, its completion is the last turn, and `dialogues` has all messages. A
rule may also give each token a number, (B, T): their sum is the score (options/token_rewards.py).
"""
import math
import pkgutil
import time

import torch

import parallel
from batches import right_pad, texts_of
from errors import BadInput, mistake
from load import autocast
from model import no_grad_forwards
from ranks import this_rank

# the built-in rules: a rule's file is imported only if a run names the rule
RULES = dict(
    accuracy="grading.answers:accuracy", math="grading.expressions:math_answer",
    format="grading.forms:format", thinks="grading.answers:thinks", code="grading.programs:code",
    length="grading.forms:length", environment="options.environment:reward_of_turns")
MODELS = {"reward_model": "reward_path", "judge": "judge_path"}  # and the key that says which one
BUILT_IN = *RULES, *MODELS


def reward_terms(spec, config=None):
    """
    The key reward_functions, a sum of rewards with weights -> [(weight, name, function)]:

        "accuracy,-0.5*mine.py:brevity"  ->  [(1.0, "accuracy", ...), (-0.5, "brevity", ...)]

    A reward of weight 0 is only logged. A model's reward has the function None. config: all keys of
    the script; with it those of the rewards are checked, too. Raises BadInput.
    """
    where = f"reward_functions = {spec!r}"
    terms, names = [], []
    for part in spec.split(","):
        weight, star, name = (text.strip() for text in part.rpartition("*"))
        try:
            factor = float(weight) if star else 1.0
        except ValueError:
            factor = math.nan
        _, colon, short = name.rpartition(":")
        if not math.isfinite(factor) or short in names or not (colon or name in BUILT_IN):
            raise mistake("no_reward", part.strip(), where, BUILT_IN, names)
        if colon:
            from options.foreign_rewards import load_reward

            function = load_reward(name, where)
        else:
            function = RULES.get(name) and pkgutil.resolve_name(RULES[name])
        terms.append((factor, short, function))
        names.append(short)
    for name, key in MODELS.items():
        if config and bool(config[key]) != (name in names):
            raise BadInput(f"{key} = {config[key]!r}, and {where}: type --reward_functions={name} "
                           f"with --{key}=FOLDER, or neither of the two")
    if config and "environment" in names and not config["environment"] and not config["tools"]:
        raise BadInput(f"{where}: there is no environment; type --environment=FILE.py:FUNCTION")
    return terms


def check_rows(terms, rows, tokenizer=None):
    """
    Raise BadInput where a row lacks what a reward needs, or its sandbox is missing. tokenizer: the
    policy's. Say it where its texts mark thoughts in a way that the rules do not know.
    """
    for _, name, rule in terms:
        if hasattr(rule, "check_rows"):
            rule.check_rows(rows, rows.path)
        if tokenizer and RULES.get(name, "").startswith("grading"):
            from grading.answers import say_unknown_marks

            say_unknown_marks(tokenizer)  # it says it once


def score_batch(batch, rows, terms, policy, reward_model, micro_batch_size, system, device):
    """
    A collective: add the scores to a sampled batch, which all ranks have; every rank scores its
    share. New columns: reward/NAME for each reward; accuracy and thinks, where rows of the data
    have an answer; scores. Raises Stop, on all ranks, if a rule fails, or a score is not finite.
    """
    if "score" not in this_rank.does:  # ranks of another role will do it
        return
    B = len(batch["tokens"])
    share = parallel.share(B)
    part = {name: t[share.start:share.stop] for name, t in batch.items()}  # this rank's rows
    longest = batch["tokens"].shape[1] - int(batch["begins"].max())  # T - the longest prompt
    part |= texts_of(part, rows, policy.tokenizer) | dict(max_new_tokens=longest)
    part |= dict(tokenizer=policy.tokenizer, limits=dict(timeout=system.code_seconds))
    columns, token_rewards = {}, torch.zeros_like(part["sampler_logprobs"])  # (b, T)
    rules = {rule: [f"reward/{name}"] for _, name, rule in terms if rule}  # {a rule: its columns}
    if any(row.get("answer") is not None for row in rows):  # so all batches have the same columns
        from grading.answers import accuracy, thinks

        rules |= {rule: rules.get(rule, []) + [rule.__name__] for rule in (accuracy, thinks)}
    end = time.monotonic() + system.reward_timeout  # of all rules together
    with parallel.in_step():  # COLLECTIVE: a failure on one rank ends all before they wait
        for rule, names in rules.items():
            part["seconds"] = max(end - time.monotonic(), 0)
            try:
                scores = torch.as_tensor(rule(part) if len(share) else [], dtype=torch.float64)
            except Exception as e:  # a rule raises anything
                from options.failures import of_a_rule

                raise of_a_rule(names[0].removeprefix("reward/"), e) from e
            if scores.dim() == 2:  # a number for each token, which stays there; the sum is scored
                weight = sum(weight for weight, _, each in terms if each is rule)
                token_rewards += (weight * scores.nan_to_num()).to(token_rewards)
                scores = scores.sum(1)
            columns |= dict.fromkeys(names, scores)
    if reward_model is not None:
        columns["reward/reward_model"] = model_scores(
            reward_model, part, B, micro_batch_size, system, device)
    if "judge" in [name for _, name, _ in terms]:
        from options.judging import judge_scores

        columns["reward/judge"] = judge_scores(part, B, micro_batch_size, system, device)
    columns = {name: x.to(token_rewards) for name, x in columns.items()}
    batch |= parallel.gather_rows(columns | dict(token_rewards=token_rewards), B)  # COLLECTIVE
    add_scores(batch, terms)


def model_scores(reward_model, part, total, micro_batch_size, system, device):
    """
    The reward model's scores of this rank's part of a batch, (b,); with sharded models a
    collective. total: how many responses all ranks have.
    """
    tokenizer, texts = reward_model.tokenizer, part.get("dialogues", part["completions"])
    if "dialogues" in part and not tokenizer.chats:  # of several turns: just their texts
        texts = ["".join(message["content"] for message in messages) for messages in texts]
    sequences = tokenizer.encode_scored(
        [row["prompt"] for row in part["rows"]], texts, part["finished"].tolist(),
        reward_model.max_positions)
    at_once = micro_batch_size if system.micro_batch_tokens == 0 else max(
        system.micro_batch_tokens // part["tokens"].shape[1], 1)
    with autocast(system, device), no_grad_forwards([reward_model], device):
        return score_sequences(reward_model, sequences, at_once, device, total)


@torch.no_grad()
def score_sequences(model, sequences, at_once, device, total=0):
    """
    A reward model's or judge's scores of texts (lists of ids), (n,) float64, read at the last token
    of each. total: of all ranks. Each makes as many forwards as the rank with the most texts,
    because models may be sharded; 0: as many as its own texts take.
    """
    scores = torch.zeros(len(sequences), dtype=torch.float64, device=device)
    order = sorted(range(len(sequences)), key=lambda i: -len(sequences[i]))  # little padding
    parts = [order[i:i + at_once] for i in range(0, len(order), at_once)]
    forwards = math.ceil(math.ceil(total / parallel.rank_and_size()[1]) / at_once)
    for part in parts + [[]] * (forwards - len(parts)):
        texts = [sequences[i] for i in part]
        tokens = right_pad(texts, 0)  # (b, W): padding stands behind a text, so any id is right
        last = torch.tensor([len(ids) - 1 for ids in texts] or [0])  # without texts: of one row
        found = model.scores(tokens.to(device), last.to(device))  # (b,)
        scores[part] = found[:len(part)].double()
    return scores


def add_scores(batch, terms):
    """
    Add the scores (B,) to a gathered batch: the weighted sums of its rewards. A reward that is NaN
    does not apply to the response, and adds nothing. Where none applies, the score is NaN.
    """
    for _, name, function in terms:
        if function is None:  # a model's
            parallel.check_finite({f"reward/{name}": batch[f"reward/{name}"]})
            batch[f"reward/{name}"] = same_score_for_same_text(batch[f"reward/{name}"], batch)
    rewards = [(weight, batch[f"reward/{name}"]) for weight, name, _ in terms]
    scores = sum(weight * torch.where(x.isnan(), 0, x) for weight, x in rewards)
    parallel.check_finite(dict(scores=scores))
    counted = [x for weight, x in rewards if weight] or [x for _, x in rewards]
    batch["scores"] = scores.masked_fill(torch.stack(counted).isnan().all(0), math.nan)  # (B,)


def last_real(mask):
    """The index of the last True of each row of mask (B, T) -> (B,): for [F T T F] it is 2."""
    return (mask.long() * torch.arange(mask.shape[1], device=mask.device)).argmax(1)


def same_score_for_same_text(scores, batch):
    """
    The scores (B,), made exactly equal where two responses to one prompt are equal. The last bits
    of a model's output depend on the other rows of the micro-batch: 0.1234567 or 0.1234568. A group
    of equal responses teaches nothing, but GRPO would learn from such differences.
    """
    lengths, slots, first = batch["lengths"].tolist(), batch["slot"].tolist(), {}
    texts = [ids[:n].tobytes()
             for ids, n in zip(batch["tokens"].cpu().numpy(), lengths, strict=True)]
    # equal prompts may have different answers in the data: those of two slots are not compared
    names = zip(slots, texts, strict=True)
    # each row gets the score of the first row with its name
    return scores[[first.setdefault(name, row) for row, name in enumerate(names)]]


def lacks_shift(reward_model):
    """Whether the run must choose the zero of its reward model's scores, as rm.py does."""
    return reward_model is not None and not hasattr(reward_model.hf.config, "score_shift")

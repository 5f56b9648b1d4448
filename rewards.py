"""
Responses -> scores, one number for each response. First the rules, which read a response's text;
then the reward model, which reads its tokens, and the judge, a language model that is asked.

A rule is a function reward(batch) -> scores (B,): a tensor, an array or a list. The batch is a dict
of lists with an entry for each response. For two responses of the toy:

    batch = dict(
        rows=[{"prompt": "123+456=", "answer": "579"}, {"prompt": "250+250=", "answer": "500"}],
        prompts=["123+456=", "250+250="],
        completions=["<think>3+6+0=09;2+5+0=07;1+4+0=05</think>579", "501"],
    )
    accuracy(batch)  # [1.0, 0.0]: 579 is right, 501 is not
    format(batch)    # [1.0, 0.0]: only the first one thinks, and then answers

rows are the rows of the data file. prompts are the texts that the policy read, which a chat
template may have extended; a batch without them is fine. completions are the texts of the
responses. In a run the batch also has the tensors of rollout.generate (tokens, attention_mask,
response_mask, sampler_logprobs, finished), and `seconds`: how long the rules may take for it.

What becomes of a score stands behind the models; which rewards a run uses, with which weights, and
how they are added up comes last. When two answers are the same is in answers.py. What a
script does to a score afterwards is in its shape_scores: for example, missing_eos_penalty = 1 gives
every response that did not end with EOS the score -1, in the place of its own score.
"""
import math
import re
from concurrent.futures import ThreadPoolExecutor

import torch

import audit
import launch
import parallel
import together
from answers import final_answer, same_answer, whole_responses
from errors import Stop, say
from model import no_grad_forwards
from models import autocast
from prompts import left_aligned, right_pad
from reward_mix import call_rewards, check_rows, parse_rewards
from rollout import texts_of
from rows import Rows, prompt_row, read_rows

# --------------------------------------------------------------------------------------------------
# rules


def accuracy(batch):
    """
    (B,): 1.0 where the final answer of the response is the row's `answer`, else 0.0; NaN where the
    row has no answer. The row's answer may be bare ("72"), or end a worked solution, as in GSM8K
    ("#### 72") and MATH ("\\boxed{72}"). There is no algebra: see the reward `math`.
    """
    scores = []
    for response, row in zip(whole_responses(batch), batch["rows"], strict=True):
        answer = row.get("answer")
        if answer is None:
            scores.append(math.nan)
        else:
            right = same_answer(final_answer(response), final_answer(str(answer)))
            scores.append(float(right))
    return torch.tensor(scores)


def format(batch):
    """
    (B,): 1.0 where the response is <think>...</think> and then an answer that is not blank, and
    nothing else; else 0.0. The answer is bare or in <answer>...</answer>. Each tag is there once,
    and in this order; blanks around the tags are allowed, and so is empty thinking. Where the
    prompt ends with <think>, the response must not have another one.

    The format reward of DeepSeek-R1 (arXiv 2501.12948, section 2.2.2).
    """
    return torch.tensor([float(is_formatted(response)) for response in whole_responses(batch)])


def is_formatted(text):
    """Whether a whole response is thinking and an answer, as the reward `format` wants it."""
    tags = re.findall("</?(?:think|answer)>", text)
    before, _, rest = text.partition("<think>")
    answer = rest.partition("</think>")[2].strip()
    if tags == ["<think>", "</think>", "<answer>", "</answer>"]:
        if not (answer.startswith("<answer>") and answer.endswith("</answer>")):
            return False
        answer = answer[len("<answer>"):-len("</answer>")].strip()
    elif tags != ["<think>", "</think>"]:
        return False
    return not before.strip() and answer != ""


def thinks(batch):
    """(B,): 1.0 where the response thinks out loud, between <think> and </think>, else 0.0."""
    return torch.tensor([float(0 <= response.find("<think>") < response.find("</think>"))
                         for response in whole_responses(batch)])


def length(batch):
    """
    (B,), from 0 to -1: what a response's length costs, DAPO's soft overlong punishment (arXiv
    2503.14476, equation 13): 0 for up to four fifths of the longest response R, then in a straight
    line down to -1. The last fifth is as in section 4.1 there: 4096 of 20480 tokens. With R = 100:
    up to 80 tokens cost nothing, 90 tokens -0.5, 100 tokens -1.
    """
    mask = batch["response_mask"]  # (B, R)
    R = mask.shape[1]
    return ((R - mask.sum(1).float()) / (R / 5) - 1).clamp(-1, 0)


BUILT_IN = "accuracy", "math", "format", "thinks", "length", "code", "judge", "reward_model"


def built_in(name):
    """The function of a built-in reward; None of a model's. What few runs use is loaded here."""
    if name == "math":
        from grading.expressions import math_answer
        return math_answer
    if name == "code":
        from grading.programs import code
        return code
    return dict(accuracy=accuracy, format=format, thinks=thinks, length=length).get(name)


# --------------------------------------------------------------------------------------------------
# the reward model


def last_real(mask):
    """
    The index of the last True of each row of mask (B, T) -> (B,): for [F T T F] it is 2. It is
    found in the mask, and not by looking for a pad id in the tokens: the pad id may be the EOS.
    """
    return (mask.long() * torch.arange(mask.shape[1], device=mask.device)).argmax(1)


@torch.no_grad()
def score_sequences(reward_model, tokens, attention_mask, micro_batch_size, count=0):
    """
    The reward model's scores, (B,) in at least float32: its output at the last real token of each
    row.

    tokens, attention_mask: (B, T). micro_batch_size: rows of a forward pass. count: make at least
    this many forward passes. A model that is sharded over the ranks needs all of them in each
    pass; so a rank with fewer rows adds passes without rows.
    """
    dtype = torch.promote_types(next(reward_model.parameters()).dtype, torch.float32)
    scores = torch.zeros(len(tokens), dtype=dtype, device=tokens.device)
    # where each row's score is read, counted from its first token on
    last = last_real(attention_mask) - attention_mask.int().argmax(1)  # (B,)
    lengths = attention_mask.sum(1).tolist()
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    parts = [order[i:i + micro_batch_size] for i in range(0, len(order), micro_batch_size)]
    for part in parts + [[]] * (count - len(parts)):
        if not part:  # a sharded model: run the forward with the other ranks
            reward_model.scores(tokens.new_zeros(1, 1), tokens.new_zeros(1))
            continue
        rows = torch.tensor(part, device=tokens.device)  # (b,)
        ids = left_aligned(tokens[rows], attention_mask[rows])  # (b, T)
        scores[rows] = reward_model.scores(ids, last[rows]).to(dtype)
    return scores


def read_texts(rows, completions, finished, tokenizer, longest, device):
    """
    What a reward model reads of completions to the prompts of data rows, up to the token at which
    its score is read (N+ detail 12): tokens and attention_mask (b, T). They are text, which its own
    tokenizer encodes as rm.py has in training: see encode_scored in tokenizer.py. finished:
    whether each has ended by itself; None: all have.

    longest: the reward model's context. The text of a response may be longer, though all prompts
    were checked: then it reads as much as fits. One odd response must not stop a run.
    """
    prompts = [row["prompt"] for row in rows]
    sequences = tokenizer.encode_scored(prompts, completions, finished, longest)
    tokens, mask = right_pad(sequences, tokenizer.pad_id)
    return tokens.to(device), mask.to(device)


def ask_judge(judge, questions, device, micro_batch_size, count=0):
    """
    A collective: what the judge says to this rank's n questions [(row, responses)], (n,): the
    log-odds of its answers behind the template (options/judging.py), in nats. One forward each, and
    nothing is sampled. micro_batch_size, count: see score_sequences.
    """
    def encode():
        ids = [judge.encode(row, responses) for row, responses in questions]
        return right_pad(ids, judge.tokenizer.pad_id)

    tokens, mask = together.together(encode)  # COLLECTIVE
    return score_sequences(judge, tokens.to(device), mask.to(device), micro_batch_size, count)


# --------------------------------------------------------------------------------------------------
# what becomes of a score


def alike_for_equal_texts(scores, batch):
    """
    The scores (B,), made exactly equal where the tokens of two responses to one prompt are equal:
    all of them get the score of the first such row.

    On paper equal texts have equal scores. But the last bits of a model's output depend on which
    other rows are in the micro-batch: 0.1234567 here, 0.1234568 there. A group of nothing but equal
    responses has nothing to learn from, and GRPO would take such differences for something.
    """
    seen = torch.where(batch["attention_mask"], batch["tokens"], -1)  # (B, T): -1 is no token
    if "slot" in batch:  # prompts may be alike, and their answers not
        seen = torch.cat([seen, batch["slot"][:, None]], 1)
    _, text = seen.unique(dim=0, return_inverse=True)  # (B,): the number of each row's text
    # for the text of each number, the first row that has it
    row = torch.arange(len(text), device=text.device)
    first = torch.full_like(text, len(text)).scatter_reduce(0, text, row, "amin")
    return scores[first[text]]


def centering_shift(scores, finished):
    """
    What to add to a reward model's scores (B,) so that these are 0 on average: a number. Only
    responses that ended count, finished (B,), if there are any: at another token than EOS the score
    means little (N+ detail 13).
    """
    counted = scores[finished] if finished.any() else scores
    return -counted.double().mean().item()


def center_scores(state, reward_model, value_model, first_batch):
    """
    A collective: where the reward model's config.json has no score_shift, it gets the one after
    which the responses of iteration 0 score 0 on average. Pairs only say by how much scores differ,
    so a reward model of others may score 15 on average. Then the score -1 of a response that never
    ends would be by far the worst there is, and a new value model would begin 15 off.

    state: of the run, which keeps the shift. value_model: one that starts as the reward model and
    gets the same zero; or None. first_batch: a function that samples and scores the responses of
    iteration 0, for that alone: so an evaluation before it has the same zero as all others.
    """
    if reward_model is None or hasattr(reward_model.hf.config, "score_shift"):
        return
    if state.get("score_shift") is None:
        batch = first_batch()  # COLLECTIVE
        shift = centering_shift(batch["reward/reward_model"], batch["finished"])
        say(f"the reward model scores {-shift:.3f} on average at first; its scores are shifted so "
            "that this is 0")
        state["score_shift"] = shift
    for model in filter(None, (reward_model, value_model)):
        model.score_shift = state["score_shift"]


# --------------------------------------------------------------------------------------------------
# the rewards of a run


def reward_terms(spec, folder="."):
    """
    [(weight, name, function)] of the key reward_functions; a model's function is None. folder: the
    one from which files of the user's are named. Raises BadConfig or BadInput.
    """
    return parse_rewards(spec, BUILT_IN, built_in, folder)


def read_prompts(path, terms, fields=""):
    """
    The rows of a file of prompts, which have what the rewards need; none, if path is "". Raises
    BadInput.
    """
    rows = read_rows(path, prompt_row, fields) if path else Rows()
    rules, first = [term for term in terms if term[2]], 0
    for file, _, count in rows.parts:
        check_rows(rules, rows[first:first + count], file)
        first += count
    return rows


def score_batch(batch, rows, prompts, terms, reward_model, judge, tokenizer, reward_tokenizer,
                micro_batch_size, system, device, iteration):
    """
    A collective: a sampled batch with its scores. Every rank scores its share and gets all scores.

    batch: of rollout.sample_batch; all ranks hold it. rows, prompts: of the data, and their token
    ids. The others: see score_responses.

    Returns the batch with more columns (B,): reward/NAME for each reward; accuracy, thinks; scores,
    the weighted sum of the rewards. Raises Stop, on all ranks, if a model's output is not finite.
    """
    B = len(batch["tokens"])
    share = parallel.share(B, *parallel.rank_and_size())
    mine = {name: t[share.start:share.stop] for name, t in batch.items()}
    answered = [(rows[i], prompts[i]) for i in mine["prompt"].tolist()]
    mine |= texts_of(answered, mine, tokenizer)
    columns = score_responses(  # COLLECTIVE
        mine, B, terms, reward_model, judge, reward_tokenizer, micro_batch_size, system,
        device)
    batch = batch | parallel.gather_rows(columns, B)  # COLLECTIVE
    read = ("sampler_logprobs", "reward/reward_model", "reward/judge")
    audit.check_finite({name: batch[name] for name in read if name in batch}, iteration)
    add_up(batch, terms)
    there = batch["scores"].masked_fill(batch["scores"].isnan(), 0)  # NaN: no reward applies
    audit.check_finite(dict(scores=there), iteration)
    return batch


# the rules work in a thread, so that the run need not wait for ever for one that hangs
thread = ThreadPoolExecutor(1)


def score_responses(mine, rows, terms, reward_model, judge, reward_tokenizer, micro_batch_size,
                    system, device):
    """
    A collective: the scores of this rank's b responses, (b,) each: by each reward, as
    "reward/NAME"; "accuracy", whether they are right; "thinks", whether they think out loud.

    mine: the texts and tensors of all of them; rows: how many responses all ranks have together.
    terms: [(weight, name, function)] from reward_terms; a model's function is None. reward_model,
    judge: None where there is none; one that ranks of another role hold is left out.
    reward_tokenizer: the reward model's. system: the shared keys.
    """
    reward_model, judge = (
        model if model is not None and not next(model.parameters()).is_meta else None
        for model in (reward_model, judge))

    def rules(given):
        launch.begin_thread(device)
        return call_rewards([term for term in terms if term[2]], given)

    def ready():
        limits = dict(timeout=system.code_seconds)
        pending = thread.submit(rules, mine | dict(seconds=system.reward_timeout, limits=limits))
        read = None
        if reward_model is not None:  # while the rules work
            read = read_texts(mine["rows"], mine["completions"], mine["finished"].tolist(),
                              reward_tokenizer, reward_model.max_positions, device)
        try:
            return pending.result(system.reward_timeout), read
        except TimeoutError as e:
            raise Stop(f"the rewards have not answered for {system.reward_timeout} s; does one of "
                       "them hang? Raise reward_timeout if not") from e

    # first the rules, so that one that fails ends all ranks before they wait for a forward
    scores, read = together.together(ready)  # COLLECTIVE
    # Every rank runs the same number of forwards, because the models may be sharded.
    # at_once: rows of a forward. With micro_batch_tokens, so few that even rows of full width
    # have no more tokens in all.
    at_once = micro_batch_size
    if system.micro_batch_tokens:
        at_once = max(system.micro_batch_tokens // mine["tokens"].shape[1], 1)
    most = math.ceil(rows / parallel.rank_and_size()[1])  # rows of a rank
    forwards = math.ceil(most / at_once)
    if reward_model is not None:
        with autocast(system, device), no_grad_forwards([reward_model], device):
            scores["reward_model"] = score_sequences(reward_model, *read, at_once, forwards)
    if judge is not None:
        questions = [(row, [response]) for row, response
                     in zip(mine["rows"], mine["completions"], strict=True)]
        with autocast(system, device), no_grad_forwards([judge.model], device):
            scores["judge"] = ask_judge(judge, questions, device, at_once, forwards)  # COLLECTIVE
    like = mine["sampler_logprobs"]
    said = {f"reward/{name}": x.to(like) for name, x in scores.items()}
    said["accuracy"] = accuracy(mine).to(device)
    said["thinks"] = thinks(mine).to(device)
    return said


def add_up(batch, terms):
    """
    Add the scores (B,) of a gathered batch: the weighted sum of its rewards. A reward that is NaN
    does not apply to the response (its function gave None) and adds nothing. Where none applies, or
    only such of weight 0, the score is NaN: the response has none.
    """
    for name in [name for name in ("reward_model", "judge") if f"reward/{name}" in batch]:
        learned = batch[f"reward/{name}"]
        batch[f"reward/{name}"] = alike_for_equal_texts(learned, batch)
        if len(learned) > 1 and (learned == learned[0]).all():
            say_once(f"the {name.replace('_', ' ')} gives all responses of this batch the score "
                     f"{learned[0]:.4g}: nothing can be learned from it", name)
    for _, name, _ in terms:
        none = int(batch[f"reward/{name}"].isnan().sum())
        if none:
            say_once(f"the reward {name!r} gives None for {none} of {len(batch['tokens'])} "
                     "responses: it does not apply to them", name)
    rewards = [(weight, batch[f"reward/{name}"]) for weight, name, _ in terms]
    scores = sum(weight * torch.where(x.isnan(), 0, x) for weight, x in rewards)
    counted = [x for weight, x in rewards if weight] or [x for _, x in rewards]
    batch["scores"] = scores.masked_fill(torch.stack(counted).isnan().all(0), math.nan)


already_said = set()  # what need not be said again


def say_once(message, key):
    """Print a line on rank 0, unless one of the same key was printed before."""
    if key not in already_said and parallel.rank_and_size()[0] == 0:
        print(message, flush=True)
    already_said.add(key)

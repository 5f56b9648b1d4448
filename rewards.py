"""
Responses -> scores, one number for each response: from rules, which read its text, and from models
(a reward model, a judge), which read its tokens.

A rule is a function reward(batch) -> scores (B,): a tensor, an array or a list. The batch is a dict
of lists with an entry for each response. For two responses of the toy:

    batch = dict(
        rows=[{"prompt": "123+456=", "answer": "579"}, {"prompt": "250+250=", "answer": "500"}],
        prompts=["123+456=", "250+250="],
        completions=["<think>3+6+0=09;2+5+0=07;1+4+0=05</think>579", "501"],
    )
    accuracy(batch)  # [1.0, 0.0]: 579 is right, 501 is not
    format(batch)    # [1.0, 0.0]: only the first one thinks, and then answers

rows are the rows of the data file. prompts are the texts that the policy read, in its chat
template; a batch needs no prompts. completions are the texts of the responses. In a run the batch
also has the tensors of rollout.generate (tokens, attention_mask, response_mask, sampler_logprobs,
finished), and `seconds`: the time that the rules may take for it. Where a response has several
turns, its completion is the last one, and `dialogues` has all messages.

In this file: the rules; the key reward_functions, which chooses rules and weights; scoring a batch;
changes of a model's scores. answers.py finds the answer in a response, and same.py says when two
answers are the same. Later a script changes the scores in its shape_scores: for example,
missing_eos_penalty = 1 gives every response that did not end with EOS the score -1, in the place of
its own score.
"""
import math
import re
from concurrent.futures import ThreadPoolExecutor

import torch

import audit
import parallel
import status
import together
from answers import final_answer, whole_responses
from errors import BadConfig, BadInput, Stop, say
from model import no_grad_forwards
from models import autocast, has_weights
from prompts import right_pad
from rollout import texts_of
from rows import Rows, prompt_row, read_rows
from same import same_answer


# --------------------------------------------------------------------------------------------------
# the rules


def accuracy(batch):
    """
    (B,): 1.0 where the final answer of the response is the row's `answer`, else 0.0; NaN where the
    row has no answer (check_rows refuses such rows if reward_functions names accuracy). The row's
    answer may be bare ("72"), or end a worked solution, as in GSM8K ("#### 72") and MATH
    ("\\boxed{72}"). There is no algebra: see the reward `math`.
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
    nothing else; else 0.0. The answer is bare or in <answer>...</answer>. Each tag comes once, in
    this order. Blanks around the tags and empty thinking are allowed. Where the prompt ends with
    <think>, the response must not have another one.

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
    """(B,): 1.0 where the response has <think> and, after it, </think>; else 0.0."""
    return torch.tensor([float(0 <= response.find("<think>") < response.find("</think>"))
                         for response in whole_responses(batch)])


def length(batch):
    """
    (B,), from 0 to -1: the penalty of long responses, DAPO's soft overlong punishment (arXiv
    2503.14476, equation 13): 0 for up to four fifths of R, the most tokens of a response, then in a
    straight line down to -1. The last fifth is as in section 4.1 there: 4096 of 20480 tokens. With
    R = 100: up to 80 tokens give 0, 90 tokens -0.5, 100 tokens -1.
    """
    mask = batch["response_mask"]  # (B, R)
    R = mask.shape[1]
    return ((R - mask.sum(1).float()) / (R / 5) - 1).clamp(-1, 0)


def environment(batch):
    """(B,): the sum of the environment's rewards for all turns of a response."""
    return batch["turn_rewards"].sum(1)


# --------------------------------------------------------------------------------------------------
# which rewards a run uses: the key reward_functions

BUILT_IN = ("accuracy", "math", "format", "thinks", "length", "code", "environment", "judge",
            "reward_model")
NEEDS = {"accuracy": ("answer",), "math": ("answer",), "code": ("tests",)}  # fields of the rows


def reward_terms(spec, folder="."):
    """
    The key reward_functions, a sum of rewards with weights -> [(weight, name, function)]:

        "accuracy,-0.5*mine.py:brevity"  ->  [(1.0, "accuracy", ...), (-0.5, "brevity", ...)]

    A reward of weight 0 changes no score and is only logged. A model's reward has the function
    None. FILE.py:FUNCTION is a function of the user's, see options/foreign_rewards.py; the path of
    FILE.py begins in `folder`. Raises BadConfig or BadInput.
    """
    where = f"reward_functions = {spec!r}"
    terms = []
    for part in spec.split(","):
        weight, star, name = (text.strip() for text in part.rpartition("*"))
        try:
            factor = float(weight) if star else 1.0
        except ValueError:
            factor = math.nan
        if not math.isfinite(factor):
            raise BadConfig(f"{where}: the weight of {name!r} must be a finite number, found "
                            f"{weight!r}")
        if ":" in name:
            from options.foreign_rewards import load_reward

            name, function = load_reward(name, folder, where)
            if name in BUILT_IN:
                raise BadConfig(f"{where}: {name!r} is already the name of a built-in reward; "
                                "rename yours")
        elif name in BUILT_IN:
            function = built_in(name)
        else:
            raise BadConfig(f"{where}: unknown reward {name!r}; there are {', '.join(BUILT_IN)}, "
                            "and FILE.py:FUNCTION of your own")
        if name in [known for _, known, _ in terms]:
            raise BadConfig(f"{where}: {name!r} is given twice; keep one")
        terms.append((factor, name, function))
    return terms


def built_in(name):
    """The function of a built-in reward; None of a model's. Rare ones are only imported here."""
    if name == "math":
        from grading.expressions import math_answer
        return math_answer
    if name == "code":
        from grading.programs import code
        return code
    return dict(accuracy=accuracy, format=format, thinks=thinks, length=length,
                environment=environment).get(name)


def check_rows(terms, rows, path):
    """
    Raise BadInput, with the file, the row and the field, unless the rows of a data file have the
    fields that the rewards [(weight, name, function)] need; also if a reward's sandbox or package
    is missing.
    """
    for _, name, function in terms:
        for field in NEEDS.get(name, ()):
            for number, row in enumerate(rows, 1):
                if field not in row:
                    theirs = [x for x in ("solution", "ground_truth") if x in row] + ["THEIRS"]
                    raise BadInput(f"{path}, row {number}: the reward {name!r} needs the field "
                                   f"{field!r}; the row has {', '.join(map(repr, row))}; rename "
                                   f'one by --fields="{theirs[0]}>{field}", or choose other '
                                   "--reward_functions")
                if row[field] is None:
                    raise BadInput(f"{path}, row {number}: the field {field!r} is null, and the "
                                   f"reward {name!r} needs it")
        if hasattr(function, "check_rows"):  # for its other needs: a sandbox, a package
            function.check_rows(rows, path)


def read_prompts(path, terms, fields=""):
    """
    The rows of a file of prompts, checked for the fields that the rewards need; none, if path is
    "". Raises BadInput.
    """
    rows, first = read_rows(path, prompt_row, fields) if path else Rows(), 0
    for file, _, count in rows.parts:
        check_rows(terms, rows[first:first + count], file)
        first += count
    return rows


# --------------------------------------------------------------------------------------------------
# scoring a batch

# the rules work in a thread, so that the run does not wait for ever for a rule that hangs
thread = ThreadPoolExecutor(1)


def score_batch(batch, rows, terms, reward_model, judge, tokenizer, reward_tokenizer,
                micro_batch_size, system, device, iteration):
    """
    A collective: a sampled batch with its scores. Every rank scores its share and gets all scores.

    batch: of rollout.sample_batch; all ranks have it. rows: of the data. The other arguments: see
    score_responses.

    Returns the batch with more columns (B,): reward/NAME for each reward; accuracy, thinks; scores,
    the weighted sum of the rewards. Raises Stop, on all ranks, if a model's output is not finite.
    """
    B = len(batch["tokens"])
    share = parallel.share(B, *parallel.rank_and_size())
    mine = {name: t[share.start:share.stop] for name, t in batch.items()}
    answered = [(rows[i], rows.ids[i]) for i in mine["prompt"].tolist()]
    mine |= texts_of(answered, mine, tokenizer)
    columns = score_responses(  # COLLECTIVE
        mine, B, terms, reward_model, judge, reward_tokenizer, micro_batch_size, system,
        device)
    batch = batch | parallel.gather_rows(columns, B)  # COLLECTIVE
    read = ("sampler_logprobs", "reward/reward_model", "reward/judge")
    audit.check_finite({name: batch[name] for name in read if name in batch}, iteration)
    add_scores(batch, terms)
    known = batch["scores"].masked_fill(batch["scores"].isnan(), 0)  # NaN: no reward applies
    audit.check_finite(dict(scores=known), iteration)
    return batch


def score_responses(mine, rows, terms, reward_model, judge, reward_tokenizer, micro_batch_size,
                    system, device):
    """
    A collective: the scores of this rank's b responses, (b,) each: "reward/NAME" of each reward;
    "accuracy", whether they are right; "thinks", whether they have <think>...</think>.

    mine: the texts and tensors of these responses; rows: how many responses all ranks have
    together. terms: [(weight, name, function)] from reward_terms. reward_model, judge: None where
    there is none; a model that only ranks of another role have is left out. reward_tokenizer: the
    reward model's. system: the shared keys.
    """
    # a model reads a response in two steps: text -> ids, ids -> score
    to_read = {}  # name: (model, the ids of each response)
    with together.in_step():  # COLLECTIVE: a failure on one rank ends all before they wait
        given = mine | dict(seconds=system.reward_timeout, limits=dict(timeout=system.code_seconds))
        if device.type == "cuda":  # a thread begins on GPU 0
            thread.submit(torch.cuda.set_device, device)
        pending = thread.submit(call_rewards, terms, given)
        if has_weights(reward_model):  # the texts become ids while the rules work
            to_read["reward_model"] = reward_model, reward_tokenizer.encode_scored(
                [row["prompt"] for row in mine["rows"]],
                as_read(mine, reward_tokenizer.template),
                mine["finished"].tolist(), reward_model.max_positions)
        if has_weights(judge):
            to_read["judge"] = judge, [judge.encode(row, [text]) for row, text in zip(
                mine["rows"], written(mine), strict=True)]
        try:
            scores = pending.result(system.reward_timeout)
        except TimeoutError as e:
            raise Stop(f"the rewards have not answered for {system.reward_timeout} s; does one of "
                       "them hang? Raise reward_timeout if not") from e

    # at_once: rows of a forward. With micro_batch_tokens, so few rows that even at full width they
    # have no more tokens
    at_once = micro_batch_size
    if system.micro_batch_tokens:
        at_once = max(system.micro_batch_tokens // mine["tokens"].shape[1], 1)
    # every rank runs as many forwards as the rank with the most rows: models may be sharded
    forwards = math.ceil(math.ceil(rows / parallel.rank_and_size()[1]) / at_once)
    for name, (model, sequences) in to_read.items():
        with autocast(system, device), no_grad_forwards([model], device):
            scores[name] = score_sequences(model, sequences, at_once, device, forwards)
    like = mine["sampler_logprobs"]
    columns = {f"reward/{name}": x.to(like) for name, x in scores.items()}
    columns |= dict(accuracy=accuracy(mine).to(device), thinks=thinks(mine).to(device))
    return columns


def as_read(batch, template):
    """Responses as a reward model reads them. Of several turns: messages, or just their texts."""
    if "dialogues" not in batch or template:
        return batch.get("dialogues", batch["completions"])
    return ["".join(message["content"] for message in messages) for messages in batch["dialogues"]]


def written(batch):
    """Each response as one text. Of several turns: each behind the name of its role."""
    if "dialogues" not in batch:
        return batch["completions"]
    return ["\n".join(f"{message['role']}: {message['content']}" for message in messages)
            for messages in batch["dialogues"]]


def call_rewards(terms, batch):
    """
    The scores of a batch from the rules among the rewards [(weight, name, function)]: {name: (B,)
    float64}; NaN where a rule does not apply to a response. The weights are not used here. No rule
    is called for a batch without responses, which a rank may have. An error in a function of the
    user's is a Stop (options/foreign_rewards.py).
    """
    return {name: torch.as_tensor(function(batch) if batch["completions"] else [],
                                  dtype=torch.float64)
            for _, name, function in terms if function}


@torch.no_grad()
def score_sequences(model, sequences, micro_batch_size, device, count=0):
    """
    A model's scores of texts, (n,) in at least float32, read at the last token of each.

    model: a reward model, or a judge. sequences: the ids of each text, lists. micro_batch_size:
    texts in a forward pass. count: make at least this many forward passes. A sharded model needs
    all ranks in each pass; so a rank with fewer texts adds passes without texts.
    """
    dtype = torch.promote_types(next(model.parameters()).dtype, torch.float32)
    scores = torch.zeros(len(sequences), dtype=dtype, device=device)
    order = sorted(range(len(sequences)), key=lambda i: -len(sequences[i]))  # little padding
    parts = [order[i:i + micro_batch_size] for i in range(0, len(order), micro_batch_size)]
    for number, part in enumerate(parts + [[]] * (count - len(parts)), 1):
        status.show(f"micro-batch {number} of {max(count, len(parts))}")
        # padding is behind each text, so any id is right. Without texts: one token
        tokens, mask = right_pad([sequences[i] for i in part] or [[0]], 0)  # (b, T) each
        found = model.scores(tokens.to(device), last_real(mask).to(device))  # (b,)
        if part:
            scores[part] = found.to(dtype)
    return scores


def add_scores(batch, terms):
    """
    Add the scores (B,) to a gathered batch: the weighted sums of its rewards. A reward that is NaN
    does not apply to the response (its function gave None) and adds nothing. Where no reward
    applies, or only rewards of weight 0 do, the score is NaN: the response has none.
    """
    for _, name, function in terms:
        scores = batch[f"reward/{name}"]  # (B,)
        if function is None:  # a model's
            batch[f"reward/{name}"] = alike_for_equal_texts(scores, batch)
            if len(scores) > 1 and (scores == scores[0]).all():
                say_once(f"the {name.replace('_', ' ')} gives all responses of this batch the "
                         f"score {scores[0]:.4g}: nothing can be learned from it", name)
        if none := int(scores.isnan().sum()):
            say_once(f"the reward {name!r} gives None for {none} of {len(scores)} responses: it "
                     "does not apply to them", name)
    rewards = [(weight, batch[f"reward/{name}"]) for weight, name, _ in terms]
    if "turn_rewards" in batch:  # (B, R): with the weight that they have in the scores
        weights = [weight for weight, name, _ in terms if name == "environment"]
        batch["turn_rewards"] = sum(weights) * batch["turn_rewards"]
    scores = sum(weight * torch.where(x.isnan(), 0, x) for weight, x in rewards)
    counted = [x for weight, x in rewards if weight] or [x for _, x in rewards]
    batch["scores"] = scores.masked_fill(torch.stack(counted).isnan().all(0), math.nan)


already_said = set()  # the keys of the lines that were printed


def say_once(message, key):
    """Print a line on rank 0, unless one of the same key was printed before."""
    if key not in already_said:
        say(message)
    already_said.add(key)


# --------------------------------------------------------------------------------------------------
# changes of a model's scores


def last_real(mask):
    """
    The index of the last True of each row of mask (B, T) -> (B,): for [F T T F] it is 2. The pad id
    in the tokens would not tell: it may be the EOS.
    """
    return (mask.long() * torch.arange(mask.shape[1], device=mask.device)).argmax(1)


def alike_for_equal_texts(scores, batch):
    """
    The scores (B,), made exactly equal where the tokens of two responses to one prompt are equal:
    all of them get the score of the first such row.

    In theory equal texts have equal scores. But the last bits of a model's output depend on the
    other rows of the micro-batch: 0.1234567 or 0.1234568. A group of equal responses teaches
    nothing, but GRPO would learn from such differences.
    """
    seen = torch.where(batch["attention_mask"], batch["tokens"], -1)  # (B, T): -1 is no token
    if "slot" in batch:  # equal prompts may have different answers in the data
        seen = torch.cat([seen, batch["slot"][:, None]], 1)
    _, text = seen.unique(dim=0, return_inverse=True)  # (B,): the number of each row's text
    # for each text, by its number, the first row that has it
    row = torch.arange(len(text), device=text.device)
    first = torch.full_like(text, len(text)).scatter_reduce(0, text, row, "amin")
    return scores[first[text]]


def center_scores(state, reward_model, value_model, first_batch):
    """
    A collective: where the reward model's config.json has no score_shift, it gets one: with it the
    responses of iteration 0 score 0 on average. Training on pairs only fixes differences of scores,
    so a reward model of others may score 15 on average. Then the score -1 of a response that never
    ends would be the worst by far, and a new value model would begin 15 too low. Only responses
    that ended count, if there are any: at another token than EOS the score means little (N+ detail
    13).

    state: of the run; it keeps the shift. value_model: gets the same shift, if it starts as the
    reward model; else None. first_batch: a function that samples and scores the responses of
    iteration 0, only for this purpose: so an evaluation before iteration 0 has the same shift, too.
    """
    if reward_model is None or hasattr(reward_model.hf.config, "score_shift"):
        return
    if state.get("score_shift") is None:
        batch = first_batch()  # COLLECTIVE
        scores, finished = batch["reward/reward_model"], batch["finished"]  # (B,) each
        mean = (scores[finished] if finished.any() else scores).double().mean().item()
        say(f"the reward model scores {mean:.3f} on average at first; its scores are shifted so "
            "that this is 0")
        state["score_shift"] = -mean
    for model in filter(None, (reward_model, value_model)):
        model.score_shift = state["score_shift"]

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

Later a script changes the scores in its shape_scores: for example, missing_eos_penalty = 1 gives
every response that did not end with EOS the score -1, in the place of its own score.
"""
import math
import re
from fractions import Fraction

import torch

import parallel
from configurator import BadInput, say
from load import autocast
from model import no_grad_forwards
from prompts import Rows, encode_prompts, prompt_row, read_rows, right_pad
from rollout import texts_of

# --------------------------------------------------------------------------------------------------
# the rules


def accuracy(batch):
    """
    (B,): 1.0 where the final answer of the response is the row's `answer`, else 0.0; NaN where the
    row has no answer. The row's answer may be bare ("72"), or end a worked solution, as in GSM8K
    ("#### 72") and MATH ("\\boxed{72}"). There is no algebra: see the reward `math`.
    """
    scores = []
    for response, row in zip(whole_responses(batch), batch["rows"], strict=True):
        answer = row.get("answer")
        right = answer is not None and same_answer(final_answer(response), final_answer(answer))
        scores.append(math.nan if answer is None else float(right))
    return torch.tensor(scores)


def final_answer(text):
    r"""
    The final answer of a text: behind the thinking, in the last <answer>, \boxed{} or behind the
    last ####; without them the last line that is not blank. "" if the thinking never ends.
    """
    text = text.rpartition("</think>")[2]
    if "<think>" in text:
        return ""
    for place in (r"<answer>((?:(?!</?answer>).)*)</answer>",
                  r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}",
                  r"####\s*([^\n]*)"):
        text = (re.findall(place, text, re.DOTALL) or [text])[-1]
    return (text.strip().split("\n") or [""])[-1].strip()


def same_answer(given, truth):
    """Whether two answers are the same number, or the same text but for case, $ and a period."""
    given, truth = (re.sub(r"[$\s]+", " ", x).strip(" .").casefold() for x in (given, truth))
    numbers = [number_of(x) for x in (given, truth)]
    return given == truth != "" or numbers[0] == numbers[1] is not None


def number_of(text):
    """The value of a number such as 1,234.50 or -3/4, or None."""
    text = re.sub(r"(?<=\d),(?=\d{3}\b)", "", text)
    match = re.fullmatch(r"([+-]?\d{1,100}(?:\.\d{1,100})?)(?: ?/ ?(\d{1,100}))?", text)
    if not match or match[2] and not int(match[2]):
        return None
    return Fraction(match[1]) / int(match[2] or 1)


def whole_responses(batch):
    """
    The texts that the rules judge: a completion, behind the part of the prompt that belongs to the
    response: a last message of the assistant, or a <think> with which the prompt ends.
    """
    rows, texts = batch["rows"], []
    prompts = batch.get("prompts") or [None] * len(rows)
    for row, prompt, completion in zip(rows, prompts, batch["completions"], strict=True):
        messages, begun = row.get("prompt"), ""
        if isinstance(messages, list) and messages[-1]["role"] == "assistant":
            begun = messages[-1]["content"]
        read = prompt if prompt is not None else messages if isinstance(messages, str) else ""
        if "<think>" not in begun and read.rstrip().endswith("<think>"):
            begun = "<think>"
        texts.append(begun + completion)
    return texts


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
    FILE.py begins in `folder`. Raises BadInput.
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
            raise BadInput(f"{where}: the weight of {name!r} must be a finite number, found "
                            f"{weight!r}")
        if ":" in name:
            from options.foreign_rewards import load_reward

            name, function = load_reward(name, folder, where)
            if name in BUILT_IN:
                raise BadInput(f"{where}: {name!r} is already the name of a built-in reward; "
                                "rename yours")
        elif name in BUILT_IN:
            function = built_in(name)
        else:
            raise BadInput(f"{where}: unknown reward {name!r}; there are {', '.join(BUILT_IN)}, "
                            "and FILE.py:FUNCTION of your own")
        if name in [known for _, known, _ in terms]:
            raise BadInput(f"{where}: {name!r} is given twice; keep one")
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
    Raise BadInput, with the row and the field, unless the rows have the fields that the rewards
    need; also if a reward's sandbox or package is missing.
    """
    for _, name, function in terms:
        for field in NEEDS.get(name, ()):
            for number, row in enumerate(rows, 1):
                if row.get(field) is None:
                    raise BadInput(f"{path}, row {number}: the reward {name!r} needs the field "
                                   f"{field!r}; the row has {', '.join(row)}; rename one by "
                                   f'--fields="THEIRS>{field}", or choose other '
                                   "--reward_functions")
        if hasattr(function, "check_rows"):  # for its other needs: a sandbox, a package
            function.check_rows(rows, path)


def read_prompts(path, terms, models, max_new_tokens, system):
    """The Rows of a file of prompts, with their ids, checked for all that will need them."""
    if not path:
        return Rows()
    rows = read_rows(path, prompt_row, system.fields)
    check_rows(terms, rows, path)
    return encode_prompts(rows, path, models, max_new_tokens, system)


# --------------------------------------------------------------------------------------------------
# scoring a batch


def score_batch(batch, rows, terms, policy, reward_model, micro_batch_size, system, device):
    """
    A collective: add the scores to a sampled batch. Every rank scores its share of the responses,
    and gets all scores.

    batch: of rollout.sample_batch; all ranks have it. rows: of the data. terms: [(weight, name,
    function)] from reward_terms. reward_model: None where there is none.

    New columns (B,): reward/NAME for each reward; accuracy, thinks; scores, the weighted sum of the
    rewards. Raises Stop, on all ranks, if a rule fails or a model's output is not finite.
    """
    B = len(batch["tokens"])
    mine = {name: t[share.start:share.stop]
            for share in [parallel.share(B)] for name, t in batch.items()}
    mine |= texts_of(mine, rows, policy.tokenizer)
    mine |= dict(seconds=system.reward_timeout, limits=dict(timeout=system.code_seconds))
    like, columns = batch["sampler_logprobs"], {}
    with parallel.in_step():  # COLLECTIVE: a failure on one rank ends all before they wait
        for _, name, function in terms:
            if function:  # no rule is called without responses
                scores = function(mine) if mine["completions"] else []
                columns[f"reward/{name}"] = torch.as_tensor(scores, dtype=torch.float64).to(like)
    if reward_model is not None:
        columns["reward/reward_model"] = model_scores(
            reward_model, mine, B, micro_batch_size, system, device).to(like)
    if "judge" in [name for _, name, _ in terms]:
        from options.judging import judge_scores

        columns["reward/judge"] = judge_scores(mine, B, micro_batch_size, system, device).to(like)
    columns |= dict(accuracy=accuracy(mine).to(device), thinks=thinks(mine).to(device))
    batch |= parallel.gather_rows(columns, B)  # COLLECTIVE
    add_scores(batch, terms)


def model_scores(reward_model, mine, rows, micro_batch_size, system, device):
    """The reward model's scores of this rank's responses, of `rows` responses of all ranks."""
    tokenizer, texts = reward_model.tokenizer, mine.get("dialogues", mine["completions"])
    if "dialogues" in mine and not tokenizer.template:  # of several turns: just their texts
        texts = ["".join(message["content"] for message in messages) for messages in texts]
    sequences = tokenizer.encode_scored(
        [row["prompt"] for row in mine["rows"]], texts, mine["finished"].tolist(),
        reward_model.max_positions)
    # with micro_batch_tokens so few rows that even at full width they have no more tokens
    at_once = micro_batch_size
    if system.micro_batch_tokens:
        at_once = max(system.micro_batch_tokens // mine["tokens"].shape[1], 1)
    # every rank runs as many forwards as the rank with the most rows: models may be sharded
    forwards = math.ceil(math.ceil(rows / parallel.rank_and_size()[1]) / at_once)
    with autocast(system, device), no_grad_forwards([reward_model], device):
        return score_sequences(reward_model, sequences, at_once, device, forwards)


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
    for part in parts + [[]] * (count - len(parts)):
        # padding is behind each text, so any id is right. Without texts: one row
        tokens, mask = right_pad([sequences[i] for i in part], 0)  # (b, T) each
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
        if function is None:  # a model's
            parallel.check_finite({f"reward/{name}": batch[f"reward/{name}"]})
            batch[f"reward/{name}"] = alike_for_equal_texts(batch[f"reward/{name}"], batch)
    rewards = [(weight, batch[f"reward/{name}"]) for weight, name, _ in terms]
    if "turn_rewards" in batch:  # (B, R): with the weight that they have in the scores
        weights = [weight for weight, name, _ in terms if name == "environment"]
        batch["turn_rewards"] = sum(weights) * batch["turn_rewards"]
    scores = sum(weight * torch.where(x.isnan(), 0, x) for weight, x in rewards)
    parallel.check_finite(dict(scores=scores))
    counted = [x for weight, x in rewards if weight] or [x for _, x in rewards]
    batch["scores"] = scores.masked_fill(torch.stack(counted).isnan().all(0), math.nan)


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

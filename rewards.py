"""
Responses -> one number each. Every reward is called alike, reward(batch) -> scores (B,), where the batch is a dict with the
`completions` as text, the data `rows`, and the tokens and masks of rollout.generate; if it has the `prompts` as text, too,
they show what a chat template put behind a row's messages; and `seconds`, this batch's share of reward_timeout.

Rules first, then the reward model, then how a run chooses and mixes them. When two answers are the same is answers.py's.
"""
import math
import os
import re

import torch

from data import prompt_text, right_pad
from engine import together
from engine.answers import GROUP, evaluate_arithmetic, same_answer
from engine.programs import extract_code
from engine.sandbox import count_cpus, run_all


# ---------------------------------------------------------------------------------------------------------------------
# rules


def accuracy(batch):
    """
    1.0 where the completion's final answer is the row's `answer`, else 0.0; NaN where the row has none. (B,) The row's may be
    bare, or at the end of a worked solution, as GSM8K ("#### 72") and MATH (\\boxed{72}) have it.
    """
    scores = []
    for opening, completion, row in zip(openings(batch), batch["completions"], batch["rows"], strict=True):
        answer = row.get("answer")
        right = answer is not None and same_answer(final_answer(opening + completion), final_answer(str(answer)))
        scores.append(math.nan if answer is None else float(right))
    return torch.tensor(scores)


def format(batch):
    """
    1.0 where the response is exactly <think>...</think> and then an answer that is not blank, bare or as
    <answer>...</answer>: each tag once, in order, blanks around them; else 0.0. (B,) The format reward of DeepSeek-R1 (arXiv
    2501.12948, section 2.2.2). Empty thinking is allowed. Where the prompt ends with <think>, that one is the only one.
    """
    return torch.tensor([float(is_formatted(opening + completion))
                         for opening, completion in zip(openings(batch), batch["completions"], strict=True)])


def is_formatted(text):
    """Whether a whole response is thinking and an answer, as the reward `format` wants it."""
    if text.count("<think>") != 1 or text.count("</think>") != 1 or not text.lstrip().startswith("<think>"):
        return False
    answer = text.partition("</think>")[2].strip()
    if "<answer>" in text or "</answer>" in text:
        if text.count("<answer>") != 1 or text.count("</answer>") != 1:
            return False
        if not (answer.startswith("<answer>") and answer.endswith("</answer>")):
            return False
        answer = answer[len("<answer>"):-len("</answer>")]
    return bool(answer.strip())


def thinks(batch):
    """1.0 where the response thinks out loud, between <think> and </think>, before it answers. (B,)"""
    responses = [opening + c for opening, c in zip(openings(batch), batch["completions"], strict=True)]
    return torch.tensor([float(0 <= r.find("<think>") < r.find("</think>")) for r in responses])


def length(batch):
    """
    Minus what a response's length costs, from 0 to -1, (B,): soft_overlong with the longest response as max_length and a fifth
    of it as cache, which is DAPO's share, 4096 of 20480 tokens (arXiv 2503.14476, section 4.1).
    """
    mask = batch["response_mask"]  # (B, R)
    return soft_overlong(mask.sum(1), mask.shape[1], mask.shape[1] / 5)


def soft_overlong(lengths, max_length, cache):
    """
    DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13): 0 for up to max_length - cache tokens, from there in a line down
    to -1 at max_length, and -1 beyond. lengths (B,) in tokens -> (B,) float32; cache > 0.
    """
    return ((max_length - lengths.float()) / cache - 1).clamp(-1, 0)


def countdown(batch):
    """
    1.0 where the <answer> is an expression of each of the row's `numbers` exactly once that equals its `target`, 0.1 where
    there is any <answer>...</answer> that is not blank, else 0.0. (B,) The scores of TinyZero (github.com/Jiayi-Pan/TinyZero,
    verl/utils/reward_score/countdown.py), which evaluates with eval and floats; here the sums are exact.
    """
    scores = []
    for opening, completion, row in zip(openings(batch), batch["completions"], batch["rows"], strict=True):
        text = after_thinking(opening + completion)
        equation = None if "<think>" in text else last_tagged(text)
        if not equation or not equation.strip():
            scores.append(0.0)
        elif evaluate_arithmetic(equation) == row["target"] and \
                sorted(map(int, re.findall(r"[0-9]+", equation))) == sorted(row["numbers"]):
            scores.append(1.0)
        else:
            scores.append(0.1)
    return torch.tensor(scores)


def code(batch):
    """
    1.0 where the program in the completion passes all of the row's `tests`, else 0.0, (B,). It runs in the sandbox, many at
    once, while the next responses are sampled. All or nothing, since a share of the tests can be had without solving anything.
    batch["seconds"], if it is there, is the time for all of them; a fifth of it is kept for the other rules. What has not ended
    by then scores 0, and a printed line says so: nothing that a model wrote may end the run. Where in the completion the program
    is: see extract_code. A draft in thinking that never ends is none, and is not run.
    """
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    programs = [extract_code(opening + completion) for opening, completion
                in zip(openings(batch), batch["completions"], strict=True)]
    runnable = [(program, row["tests"]) for program, row in zip(programs, batch["rows"], strict=True)
                if program is not None]
    seconds = 0.8 * batch.get("seconds", math.inf)
    verdicts = run_all(runnable, max(1, count_cpus() // ranks_here), seconds=seconds)
    late = sum(v.reason == "out of time" for v in verdicts)
    if late:
        print(f"reward 'code': {late} of {len(programs)} programs had not ended after {seconds:.0f} s for all of "
              "them, and score 0; if right ones may be among them, raise reward_timeout", flush=True)
    verdict = iter(verdicts)
    passed = [program is not None and (v := next(verdict)).passed == v.total for program in programs]
    return torch.tensor(passed, dtype=torch.float32)

RULES = dict(accuracy=accuracy, format=format, thinks=thinks, length=length, countdown=countdown, code=code)


# ---------------------------------------------------------------------------------------------------------------------
# where a completion answers


def final_answer(completion):
    r"""
    What a completion answers, without blanks at the ends: of the text after its thinking, what the last \boxed{} holds, else
    the last <answer>, else the line after the last ####, else all of it. Thinking that never ends answers nothing: all of it.
    """
    text = after_thinking(completion)
    if "<think>" not in text:
        for find in (last_boxed, last_tagged, last_hashed):
            found = find(text)
            if found is not None:
                return found.strip()
    return text


def after_thinking(completion):
    return completion.rpartition("</think>")[2].strip()


def openings(batch):
    """
    What each response has been made to begin with, for the rules judge the whole of it: what the last message of its prompt
    says, if that is the assistant's own (from <think> on, if it has one); "<think>" where the prompt ends with that, by
    itself or by a chat template; else "".
    """
    prompts = batch.get("prompts") or [prompt_text(row) for row in batch["rows"]]
    return [opening_of(row.get("prompt"), text) for row, text in zip(batch["rows"], prompts, strict=True)]


def opening_of(prompt, text):
    """openings of one row: its prompt as in the data, and as the text that the policy saw."""
    begun = ""
    if isinstance(prompt, list) and prompt[-1]["role"] == "assistant":
        begun = prompt[-1]["content"]
    if "<think>" in begun:
        return begun[begun.index("<think>"):]
    return "<think>" if text.rstrip().endswith("<think>") else begun


# \boxed{...} or \fbox{...}; or what they hold without braces, a number, a command or a letter with
# all that adheres to it; or \\., as \{ and \} are no braces to count
BOX = re.compile(rf"""\\(?:boxed|fbox)(?![a-zA-Z])\s*
    (?:\{{ | (?P<bare> (?=[-+.(0-9A-Z\\] | [a-z](?![a-z]))
                       (?:[^\s${{}}\\] | \\(?!boxed|fbox|[)\]])\S | {GROUP})+ (?<![.,;:])))
    | \\. | [{{}}]""", re.DOTALL | re.VERBOSE)


def last_boxed(text):
    r"""
    What the \boxed or \fbox that begins last holds: in {...}, balanced, or without braces, as in
    \boxed 5, up to a blank or a $. None if there is none. One pass, however nested.
    """
    opened, begin, end = [], -1, -1  # where the contents of the open braces begin, and whether they are boxed
    for match in BOX.finditer(text):
        if match["bare"]:
            begin, end = max((begin, end), match.span("bare"))
        elif match[0].endswith("{") and match[0] != r"\{":
            opened.append((match.end(), match[0] != "{"))
        elif match[0] == "}" and opened:
            start, boxed = opened.pop()
            if boxed and start > begin:
                begin, end = start, match.start()
    return text[begin:end] if begin >= 0 else None


def last_tagged(text):
    """What the last <answer>...</answer> holds, None if there is none."""
    parts = re.split(r"(</?answer>)", text)  # text, tag, text, tag, ..., text
    return next((parts[i] for i in range(len(parts) - 3, 1, -2) if parts[i - 1] + parts[i + 1] == "<answer></answer>"), None)


def last_hashed(text):
    """The line after the last ####, as GSM8K ends its solutions; None if there is none."""
    _, hashes, rest = text.rpartition("####")
    return rest.strip().partition("\n")[0] if hashes else None


# ---------------------------------------------------------------------------------------------------------------------
# the reward model


def last_real(mask):
    """Index of the last True of each row of mask (B, T) -> (B,). Never found by looking for a pad id: pad may equal EOS."""
    return (mask.long() * torch.arange(mask.shape[1], device=mask.device)).argmax(1)


@torch.no_grad()
def score_sequences(reward_model, tokens, attention_mask, micro_batch_size, count=0):
    """
    The reward model's scalar at the last real token of each row, plus its score_shift: (B,) in at least float32. count: how many
    forwards there are at least, as all ranks must come along where the model is sharded; the last ones may be of no rows.
    """
    dtype = torch.promote_types(reward_model.score.weight.dtype, torch.float32)
    scores = torch.zeros(len(tokens), dtype=dtype, device=tokens.device)
    order = attention_mask.sum(1).argsort(stable=True)  # like lengths meet: less padding
    for i in range(max(count, -(-len(tokens) // micro_batch_size))):
        rows = order[i * micro_batch_size:(i + 1) * micro_batch_size]
        mask = attention_mask[rows]
        used = mask.any(0)  # the columns that any of these rows uses
        if len(rows) == 0:
            used[:2] = True
        mask = mask[:, used]
        scalars = reward_model(tokens[rows][:, used], mask)  # (b, T)
        scores[rows] = scalars.gather(1, last_real(mask)[:, None]).squeeze(1).to(dtype)
    return scores + reward_model.config.score_shift


def reward_model_scores(batch, reward_model, reward_tokenizer, policy_tokenizer, micro_batch_size, count=0):
    """
    Learned reward of each response, read at its last token (N+ detail 12). A reward model with the policy's tokenizer scores
    the very ids that were sampled; with another one it gets the text re-tokenized, EOS included where the policy ended. There
    a response may be longer than its context, though the prompts were checked: it then reads the beginning, as of a response
    that never ended. One odd response must not stop a run.
    """
    if reward_tokenizer.fingerprint == policy_tokenizer.fingerprint:
        return score_sequences(reward_model, batch["tokens"], batch["attention_mask"], micro_batch_size, count)

    def encode():
        sequences = []
        for row, completion, finished in zip(batch["rows"], batch["completions"], batch["finished"].tolist(), strict=True):
            ids = reward_tokenizer.encode_prompt(row["prompt"]) + reward_tokenizer.encode_completion(completion)
            sequences.append((ids if finished else ids[:-1])[:reward_model.config.max_positions])
        return right_pad(sequences, reward_tokenizer.pad_id)

    tokens, mask = together.together(encode)  # a rank that cannot must say so before the others wait for its forwards
    device = batch["tokens"].device
    return score_sequences(reward_model, tokens.to(device), mask.to(device), micro_batch_size, count)


def alike_for_equal_texts(scores, batch):
    """
    scores (B,), those of equal tokens made equal: each gets that of the first of them. On paper they are; but the last bits of
    a model's output depend on the micro-batch, and a group of nothing but equal responses would be told apart by them.
    """
    seen = torch.where(batch["attention_mask"], batch["tokens"], -1)  # (B, T), padding unlike any token
    _, which = seen.unique(dim=0, return_inverse=True)  # (B,): rows with the same number are the same text
    first = torch.full_like(which, len(which)).scatter_reduce(0, which, torch.arange(len(which), device=which.device), "amin")
    return scores[first[which]]

"""
Responses -> one number each. Every reward is called alike, reward(batch) -> scores (B,), where the batch is a dict with the
`completions` as text, the data `rows`, and the tokens and masks of rollout.generate; if it has the `prompts` as text, too,
they show what a chat template put behind a row's messages; and `seconds`, this batch's share of reward_timeout.

Rules first, then the reward model, then how a run chooses and mixes them. When two answers are the same is answers.py's.
"""
import difflib
import importlib.util
import math
import os
import re
import sys
import time
import traceback

import torch

import parallel
from answers import GROUP, evaluate_arithmetic, same_answer
from configurator import BadConfig, BadInput, Stop, first_line, shorten
from data import right_pad
from sandbox import check_sandbox, check_tests, count_cpus, extract_code, run_all

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


def prompt_text(row):
    """A row's prompt, or the last of its messages; "" if it has none."""
    prompt = row.get("prompt", "")
    return prompt if isinstance(prompt, str) else prompt[-1]["content"]


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

    tokens, mask = parallel.together(encode)  # a rank that cannot must say so before the others wait for its forwards
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


# ---------------------------------------------------------------------------------------------------------------------
# which rewards a run uses

NEEDS = {"accuracy": ("answer",), "countdown": ("numbers", "target"), "code": ("tests",)}  # fields of a row, by reward
FIELDS = {  # what a field must be
    "answer": (lambda x: isinstance(x, str) and x.strip(), "a string that is not blank"),
    "numbers": (lambda x: isinstance(x, list) and x and all(type(n) is int and n >= 0 for n in x), "a list of integers >= 0"),
    "target": (lambda x: type(x) is int, "an integer"),
}


def parse_rewards(spec, known, base_folder):
    """
    "1.0*accuracy,0.1*format,-0.5*mine.py:brevity" -> [(weight, name, function)]. A part without a weight has weight 1.

    known: {name: function}. FILE.py:FUNCTION is a function of the user's, called `FUNCTION` from then on; the file, relative to
    base_folder, is imported, so it is trusted like the rest of the code. Raises BadConfig; BadInput where it is the file's fault.
    """
    where = f"rewards = {spec!r}"
    if not spec.strip():
        raise BadConfig(f"{where}: wanted at least one reward, such as '1.0*accuracy,0.1*format'")
    rewards, modules = [], {}
    for part in spec.split(","):
        weight, star, name = (text.strip() for text in part.rpartition("*"))
        if not name:
            raise BadConfig(f"{where}: a reward's name is missing{f' after {part.strip()!r}' if star else ' beside a comma'}")
        try:
            factor = float(weight) if star else 1.0
        except ValueError:
            factor = math.nan
        if not math.isfinite(factor):
            raise BadConfig(f"{where}: the weight of {name!r} must be a finite number, found {weight!r}")
        file, colon, function_name = name.rpartition(":")
        if colon:
            function = load_function(os.path.abspath(os.path.join(base_folder, file)), function_name, where, modules)
            if function_name in known:
                raise BadConfig(f"{where}: {function_name!r} is already the name of a built-in reward; rename yours")
            name = function_name
        elif name in known:
            function = known[name]
        else:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}, and FILE.py:FUNCTION of your own"
            raise BadConfig(f"{where}: unknown reward {name!r}; {hint}")
        if name in [n for _, n, _ in rewards]:
            raise BadConfig(f"{where}: {name!r} is given twice; keep one")
        rewards.append((factor, name, function))
    return rewards


def files_of(spec):
    """The files of the user's functions in rewards = spec, as they are written there."""
    names = [part.rpartition("*")[2].strip() for part in spec.split(",")]
    return sorted({name.rpartition(":")[0] for name in names if ":" in name})


def load_function(path, name, where, modules):
    """
    The function of that name in a Python file, imported unless `modules`, {path: module}, has it. Raises BadInput and never
    BadConfig, which only rank 0 would say: on another machine the file may be missing, or another.
    """
    if path not in modules:
        if not path.endswith(".py"):
            raise BadInput(f"{where}: wanted FILE.py:FUNCTION, and {path!r} does not end with .py")
        if not os.path.isfile(path):
            raise BadInput(f"{where}: there is no file {path!r}")
        module_name = "rewards_in_" + re.sub(r"\W", "_", path)
        loading = importlib.util.spec_from_file_location(module_name, path)
        module = sys.modules[module_name] = importlib.util.module_from_spec(loading)  # dataclasses look there for their module
        try:
            loading.loader.exec_module(module)
        except (Exception, SystemExit) as e:  # whatever the user's file raises is reported with its line
            lines = [f.lineno for f in traceback.extract_tb(e.__traceback__) if f.filename == path]
            raise BadInput(f"{where}: {path}, line {lines[-1] if lines else getattr(e, 'lineno', '?')}: {first_line(e)}") from e
        modules[path] = module
    function = getattr(modules[path], name, None)
    if not callable(function):
        found = "has no" if function is None else f"has a {type(function).__name__}, not a function,"
        raise BadInput(f"{where}: {path} {found} {name!r}")
    return function


def check_rows(rewards, rows, path):
    """Raise BadInput, with file, row and field, unless the rows of a data file have what the chosen rewards need."""
    for _, name, function in rewards:
        if function is code:
            check_sandbox()
        for field in NEEDS.get(name, ()):
            good, wanted = FIELDS.get(field, (lambda x: x is not None, "not null"))
            for number, row in enumerate(rows, 1):
                if field not in row:
                    raise BadInput(f"{path}, row {number}: the reward {name!r} needs the field {field!r}; the row has "
                                   f"{', '.join(map(repr, row))}")
                if not good(row[field]):
                    raise BadInput(f"{path}, row {number}: the field {field!r} must be {wanted} for the reward {name!r}, "
                                   f"found {shorten(row[field])}")
                if function is code:
                    check_tests(row["tests"], f"{path}, row {number}")


def call_rewards(rewards, batch):
    """
    {name: scores (B,) float64 on the CPU} of rewards, [(weight, name, function)], on a batch. Raises Stop, naming the reward,
    where a function fails or does not return one finite number a response. A rank without responses calls none of them.
    """
    return {name: torch.tensor(call_reward(name, function, batch) if batch["completions"] else [], dtype=torch.float64)
            for _, name, function in rewards}


def collect(pending, timeout):
    """The results of call_rewards in threads, on the parts of a batch, put together. Raises Stop after timeout seconds in all."""
    due = time.monotonic() + timeout
    try:
        parts = [future.result(max(due - time.monotonic(), 0)) for future in pending]
    except TimeoutError as e:
        raise Stop(f"the rewards have not answered for {timeout} s; does one of them hang? Raise reward_timeout if not") from e
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def call_reward(name, function, batch):
    """A reward's scores as a list of floats, checked. Raises Stop."""
    try:
        returned = function(batch)
        values = returned.tolist() if hasattr(returned, "tolist") else returned
    except (BadInput, Stop):
        raise
    except (Exception, SystemExit) as e:
        frames = traceback.extract_tb(e.__traceback__)[1:]  # without this function
        own = [f for f in frames if f.filename == frames[0].filename]  # the last line of the reward's own file
        raise Stop(f"reward {name!r} failed{f' at {own[-1].filename}, line {own[-1].lineno}' if own else ''}: "
                   f"{first_line(e)}") from e
    B, listed, found = len(batch["completions"]), isinstance(values, (list, tuple)), type(returned).__name__
    shape = tuple(getattr(returned, "shape", (len(values),) if listed else ()))
    if not listed or len(values) != B or len(shape) != 1:
        raise Stop(f"reward {name!r} must return {B} numbers, one a response, as a 1-D tensor, array or list; it returned "
                   f"{found}{f' of shape {shape}' if shape else ''}")
    numbers = [as_number(value) for value in values]
    for number, value, row in zip(numbers, values, batch["rows"], strict=True):
        if not math.isfinite(number):
            missing = [field for field in NEEDS.get(name, ()) if row.get(field) is None]
            fault = f"no score: there is no {missing[0]!r} in" if missing else f"{shorten(value)}, no finite number, for"
            raise Stop(f"reward {name!r} gave {fault} the row with the prompt {shorten(prompt_text(row))}")
    return numbers


def as_number(value):
    """A number, Python's, numpy's or a tensor's, as a float; NaN for anything else, and for what float32 cannot hold."""
    try:
        value = value.item() if hasattr(value, "item") else value
        return float(value) if isinstance(value, (int, float)) and abs(value) < 3e38 else math.nan
    except (ValueError, RuntimeError, OverflowError):  # a tensor of several numbers, an int without end
        return math.nan

"""
Rewards of the user's, FILE.py:FUNCTION in the key reward_functions. Such a function has one of two
forms, and both may be async:

    def brevity(batch): ...                                       quartet's: see rewards.py
    def brevity(prompts, completions, answer, **columns): ...     TRL's

load_reward makes a reward(batch) -> scores of it.
"""
import asyncio
import functools
import inspect
import math

from errors import BadInput, Stop, shorten
from options.failures import of_a_rule
from options.time_limit import Late, in_time
from options.user_code import load_function
from rewards import BUILT_IN

GIVEN = ("prompts", "completions", "completion_ids")  # beside the columns of the data

# async functions run in one event loop for all calls, because their clients may belong to it
runner = asyncio.Runner()


def load_reward(named, where):
    """
    reward(batch) of FILE.py:FUNCTION: a list of B floats, NaN where it gave None, as it does not
    apply to a response; or (b, T), see token_rewards.py. Raises Stop where it fails or hangs.
    """
    function, name = load_function(named, where), named.rpartition(":")[2]
    if name in BUILT_IN:
        raise BadInput(f"{where}: {name!r} is also a built-in reward; rename yours")
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    # TRL's form has one of the names in GIVEN, or only **kwargs
    as_trl = any(p.name in GIVEN for p in parameters) or [p.kind for p in parameters] == [
        inspect.Parameter.VAR_KEYWORD]
    try:
        if inspect.isclass(function):
            raise TypeError
        if not as_trl:
            signature.bind(None)  # can it be called with the batch alone?
    except TypeError as e:
        from options.mistakes import no_form

        raise no_form(name, where) from e

    def call(batch):
        returned = function(**arguments_of(parameters, batch)) if as_trl else function(batch)
        if inspect.iscoroutine(returned):
            returned = runner.run(returned)
        return as_scores(name, returned, batch)

    @functools.wraps(function)
    def reward(batch):
        try:  # it has batch["seconds"]; without them it may take for ever
            return in_time(batch.get("seconds"), call, batch)
        except Late as place:
            raise Stop(f"reward {name!r} hangs{place}: the seconds of reward_timeout are over, "
                       "which all rules have together (it is at most half of timeout)") from place
        except KeyboardInterrupt:
            raise  # in a tool; a run hears Ctrl-C itself
        except BaseException as e:  # the user's code raises anything
            raise of_a_rule(name, e) from e

    if as_trl:
        reward.check_rows = functools.partial(check_fields, parameters, name)
    return reward


def as_scores(name, returned, batch):
    """A reward's result as a list of floats, NaN for None; or (b, T), of tokens. Raises Stop."""
    if getattr(returned, "ndim", 1) > 1:
        from options.token_rewards import as_token_rewards

        return as_token_rewards(name, returned, batch)
    values = returned.tolist() if hasattr(returned, "tolist") else returned
    B = len(batch["completions"])
    if not isinstance(values, (list, tuple)) or len(values) != B:
        raise Stop(f"reward {name!r} must return {B} numbers, one a response, as a 1-D tensor, "
                   "array or list, or a (b, T) tensor, one a token; it returned "
                   f"{type(values).__name__} {shorten(values)}")
    numbers = [math.nan if value is None else as_number(value) for value in values]
    for number, value, row in zip(numbers, values, batch["rows"], strict=True):
        if value is not None and not abs(number) < 3e38:  # float32's largest
            tensor = "; numbers of tokens must be a (b, T) tensor" * hasattr(value, "__len__")
            raise Stop(f"reward {name!r} gave {shorten(value)}, no finite number, for the row with "
                       f"the prompt {shorten(row.get('prompt'))}{tensor}")
    return numbers


def as_number(value):
    """A number of Python's, numpy's or torch's as a float; NaN for anything else."""
    try:
        return math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # a list, 3 numbers, a huge int
        return math.nan


# --------------------------------------------------------------------------------------------------
# TRL's form


def required(p):
    return p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)


def check_fields(parameters, name, rows, path):
    """Raise BadInput where no row of a data file has a field that the function needs."""
    known = dict.fromkeys(field for row in rows for field in row)
    for p in parameters:
        if required(p) and p.name not in (*known, *GIVEN):
            from options.mistakes import no_field

            raise no_field(name, p.name, known, path)


def arguments_of(parameters, batch):
    """
    The keyword arguments of a function in TRL's form, each a list with an entry for each response:
    those of docs/data.md, and None in a row without the field.
    """
    rows, texts = batch["rows"], batch["completions"]
    fields = dict.fromkeys(field for row in rows for field in row)
    given = {field: [row.get(field) for row in rows] for field in fields
             if field not in ("prompt", "completion")}
    for p in parameters:  # perhaps none of these rows has the field
        if required(p):
            given.setdefault(p.name, [None] * len(rows))
    given["prompts"] = [row.get("prompt", "") for row in rows]
    given["completions"] = batch.get("dialogues") or [
        as_messages(row, text) for row, text in zip(rows, texts, strict=True)]
    if "tokens" in batch:
        given["completion_ids"] = [ids[mask].tolist() for ids, mask in zip(
            batch["tokens"], batch["response_mask"], strict=True)]
    if any(p.kind == p.VAR_KEYWORD for p in parameters):
        return given
    return {p.name: given[p.name] for p in parameters if p.name in given}


def as_messages(row, completion):
    """A completion in the form of its row's prompt, whose last message it may continue."""
    prompt = row.get("prompt")
    if not isinstance(prompt, list):
        return completion
    begun = prompt[-1]["content"] if prompt[-1]["role"] == "assistant" else ""
    return [{"role": "assistant", "content": begun + completion}]

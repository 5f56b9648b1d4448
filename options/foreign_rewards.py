"""
Reward functions in TRL's form, which a user brings along in a file of their own:

    def brevity(prompts, completions, answer, **columns): ...

as_ours makes of such a function one in quartet's form, reward(batch), see rewards.py.
"""
import functools
import inspect

from errors import BadInput

GIVEN = ("prompts", "completions", "completion_ids")  # beside the columns of the data
BARE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)  # *args and **kwargs


def as_ours(function, name):
    """
    A user's function as reward(batch); one that has this form already, as it is. name: of the
    reward, for messages.
    """
    parameters = trl_parameters(function)
    if parameters is None:
        return function

    @functools.wraps(function)
    def reward(batch):
        return function(**arguments_of(parameters, batch))

    reward.check_rows = functools.partial(check_fields, parameters, name)
    return reward


def trl_parameters(function):
    """
    The parameters of a function in TRL's form, which has one of the names in GIVEN, or **kwargs
    alone; None for any other function: it is called with the batch.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # not a function of Python's, or nothing at all
        return None
    named = any(p.name in GIVEN for p in parameters)
    bare = [p.kind for p in parameters] == [inspect.Parameter.VAR_KEYWORD]
    return parameters if named or bare else None


def check_fields(parameters, name, rows, path):
    """Raise BadInput where no row of a data file has a field that the function must be given."""
    known = dict.fromkeys(field for row in rows for field in row)
    for parameter in parameters:
        required = parameter.default is parameter.empty and parameter.kind not in BARE
        if required and parameter.name not in (*known, *GIVEN):
            raise BadInput(f"{path}: the reward {name!r} has a parameter {parameter.name!r}, and "
                           "no row has such a field; the fields are "
                           f"{', '.join(map(repr, known))}")


def arguments_of(parameters, batch):
    """
    The keyword arguments of a function in TRL's form, each a list with an entry for each response:

        prompts          the data's: strings, or lists of messages
        completions      strings; [{"role": "assistant", "content": ...}] where the prompt is a list
        completion_ids   lists of token ids, with the EOS
        answer, ...      each other field of the rows; None in a row without it

    A function without **kwargs gets those that it names.
    """
    rows, texts = batch["rows"], batch["completions"]
    fields = dict.fromkeys(field for row in rows for field in row)
    given = {field: [row.get(field) for row in rows] for field in fields
             if field not in ("prompt", "completion")}
    given["prompts"] = [row.get("prompt", "") for row in rows]
    given["completions"] = [as_messages(row, text) for row, text in zip(rows, texts, strict=True)]
    if "tokens" in batch:
        R = batch["response_mask"].shape[1]
        given["completion_ids"] = [ids[-R:][mask].tolist() for ids, mask in zip(
            batch["tokens"], batch["response_mask"], strict=True)]
    if any(p.kind == inspect.Parameter.VAR_KEYWORD for p in parameters):
        return given
    return {p.name: given[p.name] for p in parameters if p.name in given}


def as_messages(row, completion):
    """
    A completion in the form of its row's prompt: a string, or a list with one message. The response
    to a prompt that ends with an assistant's message goes on with that message.
    """
    prompt = row.get("prompt")
    if not isinstance(prompt, list):
        return completion
    begun = prompt[-1]["content"] if prompt[-1]["role"] == "assistant" else ""
    return [{"role": "assistant", "content": begun + completion}]

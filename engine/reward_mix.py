"""
Which rewards a run uses. The key reward_functions is a sum of rewards with weights, such as

    --reward_functions=1.0*accuracy,0.1*format,mine.py:brevity

The score of a response is then 1.0 * accuracy + 0.1 * format + 1.0 * brevity: a reward without a
weight has weight 1. Each reward is also logged by itself, as objective/reward/NAME. So a reward of
weight 0 changes no score and is only logged.

This file reads the key, checks that the rows of the data have the fields that the rewards need, and
calls the rewards. The rewards themselves are in rewards.py.
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

from data import prompt_text
from engine.programs import check_tests
from engine.sandbox import check_sandbox
from errors import BadConfig, BadInput, Stop, first_line, shorten


# --------------------------------------------------------------------------------------------------
# the key reward_functions

# the fields that a reward reads from a row of the data
NEEDS = {"accuracy": ("answer",), "countdown": ("numbers", "target"), "code": ("tests",)}


def is_list_of_counts(x):
    """Whether x is a list of integers from 0 on, and not empty."""
    return isinstance(x, list) and x and all(type(n) is int and n >= 0 for n in x)


# what a field must be: a check, and words for it
FIELDS = {
    "answer": (lambda x: isinstance(x, str) and x.strip(), "a string that is not blank"),
    "numbers": (is_list_of_counts, "a list of integers >= 0"),
    "target": (lambda x: type(x) is int, "an integer"),
}


def parse_rewards(spec, known, base_folder):
    """
    The key reward_functions -> [(weight, name, function)]:

        "accuracy,-0.5*mine.py:brevity"  ->  [(1.0, "accuracy", ...), (-0.5, "brevity", ...)]

    known: {name: function}, the built-in rewards. FILE.py:FUNCTION is a function of the user's. Its
    file, relative to base_folder, is imported: it is trusted like the rest of the code.
    Raises BadConfig; BadInput where the file is at fault.
    """
    where = f"reward_functions = {spec!r}"
    if not spec.strip():
        raise BadConfig(f"{where}: wanted at least one reward, such as '1.0*accuracy,0.1*format'")
    rewards, modules = [], {}
    for part in spec.split(","):
        weight, star, name = (text.strip() for text in part.rpartition("*"))
        if not name:
            place = f"after {part.strip()!r}" if star else "beside a comma"
            raise BadConfig(f"{where}: a reward's name is missing {place}")
        try:
            factor = float(weight) if star else 1.0
        except ValueError:
            factor = math.nan
        if not math.isfinite(factor):
            raise BadConfig(f"{where}: the weight of {name!r} must be a finite number, found "
                            f"{weight!r}")
        file, colon, function_name = name.rpartition(":")
        if colon:
            path = os.path.abspath(os.path.join(base_folder, file))
            function = load_function(path, function_name, where, modules)
            if function_name in known:
                raise BadConfig(f"{where}: {function_name!r} is already the name of a built-in "
                                "reward; rename yours")
            name = function_name
        elif name in known:
            function = known[name]
        else:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"there are {', '.join(known)}, and FILE.py:FUNCTION of your own"
            if near:
                hint = f"did you mean {near[0]!r}?"
            raise BadConfig(f"{where}: unknown reward {name!r}; {hint}")
        if name in [n for _, n, _ in rewards]:
            raise BadConfig(f"{where}: {name!r} is given twice; keep one")
        rewards.append((factor, name, function))
    return rewards


def files_of(spec):
    """
    The files of the user's functions in the key reward_functions, as they are written there:
    "accuracy,mine.py:brevity" -> ["mine.py"].
    """
    names = [part.rpartition("*")[2].strip() for part in spec.split(",")]
    return sorted({name.rpartition(":")[0] for name in names if ":" in name})


def load_function(path, name, where, modules):
    """
    The function of that name in a Python file of the user's.

    modules: {path: module}, the files that have been imported already; a new one is added. where:
    the beginning of messages. Raises BadInput and never BadConfig, which only rank 0 prints: the
    file may be missing on another rank's machine, or be different there.
    """
    if path not in modules:
        if not path.endswith(".py"):
            raise BadInput(f"{where}: wanted FILE.py:FUNCTION, and {path!r} does not end with .py")
        if not os.path.isfile(path):
            raise BadInput(f"{where}: there is no file {path!r}")
        module_name = "rewards_in_" + re.sub(r"\W", "_", path)
        loading = importlib.util.spec_from_file_location(module_name, path)
        module = importlib.util.module_from_spec(loading)
        sys.modules[module_name] = module  # dataclasses look there for the module they are in
        try:
            loading.loader.exec_module(module)
        except (Exception, SystemExit) as e:  # whatever the file raises is reported with its line
            lines = [f.lineno for f in traceback.extract_tb(e.__traceback__) if f.filename == path]
            line = lines[-1] if lines else getattr(e, "lineno", "?")
            raise BadInput(f"{where}: {path}, line {line}: {first_line(e)}") from e
        modules[path] = module
    function = getattr(modules[path], name, None)
    if not callable(function):
        found = "has no"
        if function is not None:
            found = f"has a {type(function).__name__}, not a function,"
        raise BadInput(f"{where}: {path} {found} {name!r}")
    return function


def check_rows(rewards, rows, path):
    """
    Raise BadInput, with the file, the row and the field, unless the rows of a data file have what
    the rewards [(weight, name, function)] need; and unless the sandbox works, if one needs it.
    """
    for _, name, _ in rewards:
        if name == "code":
            check_sandbox()
        for field in NEEDS.get(name, ()):
            good, wanted = FIELDS.get(field, (lambda x: x is not None, "not null"))
            for number, row in enumerate(rows, 1):
                if field not in row:
                    raise BadInput(f"{path}, row {number}: the reward {name!r} needs the field "
                                   f"{field!r}; the row has {', '.join(map(repr, row))}")
                if not good(row[field]):
                    raise BadInput(f"{path}, row {number}: the field {field!r} must be {wanted} "
                                   f"for the reward {name!r}, found {shorten(row[field])}")
                if name == "code":
                    check_tests(row["tests"], f"{path}, row {number}")


# --------------------------------------------------------------------------------------------------
# calling them


def call_rewards(rewards, batch):
    """
    What each of the rewards [(weight, name, function)] gives for a batch: {name: scores (B,)
    float64 on the CPU}. Their weights are not used here. A batch without responses, as a rank may
    have, is given to none of them.

    Raises Stop, with the name of the reward, where a function fails or does not return one finite
    number for each response.
    """
    scores = {}
    for _, name, function in rewards:
        numbers = call_reward(name, function, batch) if batch["completions"] else []
        scores[name] = torch.tensor(numbers, dtype=torch.float64)
    return scores


def collect(pending, timeout):
    """
    The results of call_rewards, which threads have computed for the parts of a batch, put together:
    {name: scores (B,)}. pending: futures. Raises Stop if it takes more than timeout seconds in all.
    """
    due = time.monotonic() + timeout
    try:
        parts = [future.result(max(due - time.monotonic(), 0)) for future in pending]
    except TimeoutError as e:
        raise Stop(f"the rewards have not answered for {timeout} s; does one of them hang? Raise "
                   "reward_timeout if not") from e
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def call_reward(name, function, batch):
    """The scores of one reward as a list of floats, one for each response. Raises Stop."""
    try:
        returned = function(batch)
        values = returned.tolist() if hasattr(returned, "tolist") else returned
    except (BadInput, Stop):
        raise
    except (Exception, SystemExit) as e:
        frames = traceback.extract_tb(e.__traceback__)[1:]  # without this function
        # the line that failed in the file of the reward, and not in a library that it calls
        own = [frame for frame in frames if frame.filename == frames[0].filename]
        place = f" at {own[-1].filename}, line {own[-1].lineno}" if own else ""
        raise Stop(f"reward {name!r} failed{place}: {first_line(e)}") from e
    B = len(batch["completions"])
    listed = isinstance(values, (list, tuple))
    shape = tuple(getattr(returned, "shape", (len(values),) if listed else ()))
    if not listed or len(values) != B or len(shape) != 1:
        found = type(returned).__name__ + (f" of shape {shape}" if shape else "")
        raise Stop(f"reward {name!r} must return {B} numbers, one a response, as a 1-D tensor, "
                   f"array or list; it returned {found}")
    numbers = [as_number(value) for value in values]
    for number, value, row in zip(numbers, values, batch["rows"], strict=True):
        if not math.isfinite(number):
            missing = [field for field in NEEDS.get(name, ()) if row.get(field) is None]
            fault = f"{shorten(value)}, no finite number, for"
            if missing:
                fault = f"no score: there is no {missing[0]!r} in"
            raise Stop(f"reward {name!r} gave {fault} the row with the prompt "
                       f"{shorten(prompt_text(row))}")
    return numbers


def as_number(value):
    """
    A number of Python's, numpy's or torch's, as a float; NaN for anything else, and for a number
    that is too large for float32.
    """
    try:
        value = value.item() if hasattr(value, "item") else value
        is_number = isinstance(value, (int, float)) and abs(value) < 3e38
        return float(value) if is_number else math.nan
    except (ValueError, RuntimeError, OverflowError):  # a tensor of several numbers, a huge int
        return math.nan

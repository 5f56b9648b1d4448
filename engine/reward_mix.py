"""
Which rewards a run uses: reading the key reward_functions, checking that the data has what they need, calling them.
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
    where = f"reward_functions = {spec!r}"
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
    """The files of the user's functions in reward_functions = spec, as they are written there."""
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
    for _, name, _ in rewards:
        if name == "code":
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
                if name == "code":
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

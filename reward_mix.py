"""
Which rewards a run uses. The key reward_functions is a sum of rewards with weights, such as

    --reward_functions=1.0*accuracy,0.1*format,mine.py:brevity

The score of a response is then 1.0 * accuracy + 0.1 * format + 1.0 * brevity: a reward without a
weight has weight 1. Each reward is also logged by itself, as objective/reward/NAME. So a reward of
weight 0 changes no score and is only logged.

This file reads the key, checks that the rows of the data have the fields that the rewards need, and
calls the rewards. The rewards themselves are in rewards.py. A function of the user's may be

    def brevity(batch): ...                                 quartet's: see rewards.py
    def brevity(prompts, completions, answer, **columns)    TRL's: options/foreign_rewards.py
    async def grader(...)                                   either of them, awaited
"""
import asyncio
import importlib.util
import inspect
import math
import os
import re
import sys
import traceback

import torch

from errors import BadConfig, BadInput, Stop, first_line, shorten
from prompts import prompt_text

# --------------------------------------------------------------------------------------------------
# the key reward_functions

# the fields that a reward reads from a row of the data, which rows.prompt_row has checked
NEEDS = {"accuracy": ("answer",), "math": ("answer",), "code": ("tests",)}


def parse_rewards(spec, known, built_in, base_folder):
    """
    The key reward_functions -> [(weight, name, function)]:

        "accuracy,-0.5*mine.py:brevity"  ->  [(1.0, "accuracy", ...), (-0.5, "brevity", ...)]

    known: the names of the built-in rewards; built_in(name): the function of one. FILE.py:FUNCTION
    is a function of the user's. Its file, relative to base_folder, is imported: it is trusted like
    the rest of the code.
    Raises BadConfig; BadInput where the file is at fault.
    """
    where = f"reward_functions = {spec!r}"
    rewards, modules = [], {}
    for part in spec.split(","):
        weight, star, name = (text.strip() for text in part.rpartition("*"))
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
            from options.foreign_rewards import as_ours

            function = as_ours(load_function(path, function_name, where, modules), function_name)
            if function_name in known:
                raise BadConfig(f"{where}: {function_name!r} is already the name of a built-in "
                                "reward; rename yours")
            name = function_name
        elif name in known:
            function = built_in(name)
        else:
            raise BadConfig(f"{where}: unknown reward {name!r}; there are {', '.join(known)}, and "
                            "FILE.py:FUNCTION of your own")
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
        if not os.path.isfile(path):
            raise BadInput(f"{where}: there is no file {path!r}")
        module_name = "rewards_in_" + re.sub(r"\W", "_", path)
        loading = importlib.util.spec_from_file_location(module_name, path)
        module = importlib.util.module_from_spec(loading)
        sys.modules[module_name] = module  # dataclasses look there for the module they are in
        try:
            loading.loader.exec_module(module)
        except KeyboardInterrupt:
            raise
        except BaseException as e:  # whatever the file raises is reported with its line
            lines = [f.lineno for f in traceback.extract_tb(e.__traceback__) if f.filename == path]
            line = lines[-1] if lines else getattr(e, "lineno", "?")
            raise BadInput(f"{where}: {path}, line {line}: {first_line(e)}") from e
        modules[path] = module
    function = getattr(modules[path], name, None)
    if not callable(function):
        found = "has no"
        if function is not None:
            found = f"has {type(function).__name__} and not a function as"
        raise BadInput(f"{where}: {path} {found} {name!r}")
    return function


def check_rows(rewards, rows, path):
    """
    Raise BadInput, with the file, the row and the field, unless the rows of a data file have what
    the rewards [(weight, name, function)] need; and unless what they run in is there.
    """
    for _, name, function in rewards:
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
        if hasattr(function, "check_rows"):  # what else it needs: a sandbox, a package
            function.check_rows(rows, path)


# --------------------------------------------------------------------------------------------------
# calling them

# where async functions run: one event loop for all calls, since a client of theirs may live in it
runner = asyncio.Runner()


def call_rewards(rewards, batch):
    """
    What each of the rewards [(weight, name, function)] gives for a batch: {name: scores (B,)
    float64 on the CPU}, NaN where it gave None: it does not apply to that response. Their weights
    are not used here. A batch without responses, as a rank may have, is given to none of them.

    Raises Stop, with the name of the reward, where a function fails or does not return a finite
    number or None for each response.
    """
    scores = {}
    for _, name, function in rewards:
        returned = []
        try:
            if batch["completions"]:
                returned = function(batch)
            if inspect.iscoroutine(returned):
                returned = runner.run(returned)
            numbers = as_scores(name, returned, batch)
        except BaseException as e:  # Ctrl-C does not come here: this is a thread of its own
            raise failure(name, e) from e
        scores[name] = torch.tensor(numbers, dtype=torch.float64)
    return scores


def failure(name, error):
    """The Stop for a reward that raised this error; a Stop or BadInput of its own is kept."""
    if isinstance(error, (BadInput, Stop)):
        return error
    calling = (os.path.dirname(__file__) + f"{os.sep}options", __file__,
               os.path.dirname(asyncio.__file__))
    frames = [frame for frame in traceback.extract_tb(error.__traceback__)
              if not frame.filename.startswith(calling)]
    # the line that failed in the file of the reward, and not in a library that it calls
    own = [frame for frame in frames if frame.filename == frames[0].filename]
    place = f" at {own[-1].filename}, line {own[-1].lineno}" if own else ""
    return Stop(f"reward {name!r} failed{place}: {first_line(error)}")


def as_scores(name, returned, batch):
    """
    What a reward returned, as a list of floats, one for each response; NaN for None. Raises Stop.
    """
    values = returned.tolist() if hasattr(returned, "tolist") else returned
    B = len(batch["completions"])
    if not isinstance(values, (list, tuple)) or len(values) != B:
        raise Stop(f"reward {name!r} must return {B} numbers, one a response, as a 1-D tensor, "
                   f"array or list; it returned {type(values).__name__} {shorten(values)}")
    numbers = [as_number(value) for value in values]
    for number, value, row in zip(numbers, values, batch["rows"], strict=True):
        if value is not None and not math.isfinite(number):
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
        good = isinstance(value, (int, float)) and abs(value) < 3e38
        return float(value) if good else math.nan
    except (ValueError, RuntimeError, OverflowError):  # a tensor of several numbers, a huge int
        return math.nan

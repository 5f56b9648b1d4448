"""
The user's functions, given as FILE.py:FUNCTION: rewards, environments, tools.
"""
import asyncio
import functools
import importlib.util
import os
import re
import sys
import traceback

from errors import BadInput, first_line


def load_function(named, folder, where):
    """
    The function of FILE.py:FUNCTION. The file, relative to folder, is imported: it is trusted like
    the rest of the code. where: the beginning of error messages.

    Raises BadInput and never BadInput, which only rank 0 prints: on another rank's machine the
    file may be missing or different.
    """
    file, _, name = named.rpartition(":")
    path = os.path.abspath(os.path.join(folder, file))
    function = getattr(load_file(path, where), name, None)
    if not callable(function):
        found = "has no"
        if function is not None:
            found = f"has {type(function).__name__} and not a function as"
        raise BadInput(f"{where}: {path} {found} {name!r}")
    return function


@functools.cache
def load_file(path, where):
    """A Python file as a module; all functions of a key share it. Raises BadInput."""
    if not os.path.isfile(path):
        raise BadInput(f"{where}: there is no file {path!r}")
    module_name = "code_in_" + re.sub(r"\W", "_", path)
    loading = importlib.util.spec_from_file_location(module_name, path)
    module = importlib.util.module_from_spec(loading)
    sys.modules[module_name] = module  # dataclasses look for their module there
    try:
        loading.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as e:  # any error of the file is reported with its line
        lines = [f.lineno for f in traceback.extract_tb(e.__traceback__) if f.filename == path]
        line = lines[-1] if lines else getattr(e, "lineno", "?")
        raise BadInput(f"{where}: {path}, line {line}: {first_line(e)}") from e
    return module


def place_of(error, caller):
    """
    The place of an error in the user's file, and not in a library that it calls. caller: the file
    that called the function.
    """
    calling = caller, os.path.dirname(asyncio.__file__)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__)
              if not frame.filename.startswith(calling)]
    own = [frame for frame in frames if frame.filename == frames[0].filename]
    return f" at {own[-1].filename}, line {own[-1].lineno}" if own else ""

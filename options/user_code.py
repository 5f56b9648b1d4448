"""
The user's functions, given as FILE.py:FUNCTION: rewards, environments, tools.
"""
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
    the rest of the code. where: the beginning of error messages. Raises BadInput.
    """
    file, colon, name = named.rpartition(":")
    if not colon:
        raise BadInput(f"{where}: wanted FILE.py:FUNCTION, found {named!r}")
    path = os.path.abspath(os.path.join(folder, file))
    function = getattr(load_file(path, where), name, None)
    if not callable(function):
        raise BadInput(f"{where}: {path} has no function {name!r}")
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
    except (Exception, SystemExit) as e:  # any error of the file is reported with its line
        lines = [f.lineno for f in traceback.extract_tb(e.__traceback__) if f.filename == path]
        line = lines[-1] if lines else getattr(e, "lineno", "?")
        raise BadInput(f"{where}: {path}, line {line}: {first_line(e)}") from e
    return module

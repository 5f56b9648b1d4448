"""The user's functions, FILE.py:FUNCTION: rewards, environments, tools. Helpers lie beside it."""
import functools
import importlib.util
import os
import re
import sys

from errors import BadInput, first_line
from prompts import input_hash

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def load_function(named, where):
    """The function FILE.py:FUNCTION, whose file is trusted. where: in errors. Raises BadInput."""
    file, colon, name = named.rpartition(":")
    if not colon:
        raise BadInput(f"{where}: wanted FILE.py:FUNCTION, found {named!r}")
    path = os.path.abspath(file)
    module = load_file(path, where) if os.path.isfile(path) else None
    function = getattr(module, name, None)
    if not callable(function):
        from options.mistakes import no_function

        raise no_function(path, name, module, where)
    return function


@functools.cache
def load_file(path, where):
    """A Python file as a module; all functions of a key share it. Raises BadInput."""
    folder = os.path.dirname(path)
    if folder not in sys.path:  # behind quartet's own folder
        sys.path.insert(sys.path.index(ROOT) + 1 if ROOT in sys.path else len(sys.path), folder)
    module_name = f"code in {path.replace('.', '%')}"  # no import names it
    loading = importlib.util.spec_from_file_location(module_name, path)
    module = importlib.util.module_from_spec(loading)
    sys.modules[module_name] = module  # dataclasses look for their module there
    try:
        with open(path, "rb") as f:
            source = f.read()
        input_hash.update(source)
        check_helpers(path, source.decode(errors="replace"), where)
        loading.loader.exec_module(module)
    except BadInput:
        raise
    except (Exception, SystemExit) as e:  # any error of the file is reported with its line
        from options.mistakes import line_of

        raise BadInput(f"{where}: {path}, line {line_of(path, e)}: {first_line(e)}") from e
    return module


def check_helpers(path, source, where):
    """Raise BadInput where a helper has the name of a part of quartet, or of a loaded module."""
    folder = os.path.dirname(path)
    for name in re.findall(r"^\s*(?:from|import) (\w+)", source, re.MULTILINE):
        other = getattr(sys.modules.get(name), "__file__", None)
        if any(os.path.exists(f"{ROOT}/{x}") for x in (name, f"{name}.py")):
            other = f"{ROOT}/{name}"
        for helper in f"{folder}/{name}.py", f"{folder}/{name}/__init__.py":
            if other and os.path.isfile(helper) and helper != path and folder != ROOT and (
                    os.path.realpath(other) != os.path.realpath(helper)):
                raise BadInput(f"{where}: {path} imports {name}, and there is {other}, too; rename "
                               f"{helper}")

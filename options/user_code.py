"""
The user's functions, given as FILE.py:FUNCTION: rewards, environments, tools. Such a file imports
helpers that lie beside it. One with the name of a file of quartet's, such as rewards.py, is the
helper for the user's files, and quartet's for quartet's: `import` has another meaning in them.
"""
import builtins
import functools
import glob
import importlib.util
import os
import sys
import traceback
import types
from importlib.machinery import PathFinder, SourceFileLoader

from errors import BadInput, first_line
from prompts import inputs_hash

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PREFIX = "code in "  # and the folder: the package whose modules are the files of a folder


def load_function(named, folder, where):
    """
    The function of FILE.py:FUNCTION. The file, relative to folder, is imported: it is trusted like
    the rest of the code. where: the beginning of error messages. Raises BadInput.
    """
    file, colon, name = named.rpartition(":")
    if not colon:
        raise BadInput(f"{where}: wanted FILE.py:FUNCTION, found {named!r}")
    path = os.path.abspath(os.path.join(folder, file))
    module = load_file(path, where) if os.path.isfile(path) else None
    function = getattr(module, name, None)
    if not callable(function):
        from options.mistakes import no_function

        raise no_function(path, name, module, where)
    return function


@functools.cache
def load_file(path, where):
    """A Python file as a module; all functions of a key share it. Raises BadInput."""
    folder, file = os.path.split(path)
    package = PREFIX + folder.replace(".", "%")
    if package not in sys.modules:
        sys.modules[package] = types.ModuleType(package)
        sys.modules[package].__path__ = [folder]
        if Finder not in sys.meta_path:
            sys.meta_path.insert(0, Finder)
    module_name = f"{package}.{os.path.splitext(file)[0].replace('.', '%')}"
    loading = importlib.util.spec_from_file_location(
        module_name, path, loader=Loader(module_name, path))
    module = importlib.util.module_from_spec(loading)
    sys.modules[module_name] = module  # dataclasses look for their module there
    try:
        loading.loader.exec_module(module)
    except (Exception, SystemExit) as e:  # any error of the file is reported with its line
        lines = [f.lineno for f in traceback.extract_tb(e.__traceback__) if f.filename == path]
        line = lines[-1] if lines else getattr(e, "lineno", "?")
        raise BadInput(f"{where}: {path}, line {line}: {first_line(e)}") from e
    return module


class Loader(SourceFileLoader):
    """Python's, but in this module `import` is import_for_user."""

    def exec_module(self, module):
        inputs_hash.update(self.get_data(self.path))
        package = module.__name__.partition(".")[0]
        module.__builtins__ = vars(builtins) | dict(
            __import__=functools.partial(import_for_user, package))
        super().exec_module(module)


class Finder:
    """For sys.meta_path: it gives the modules of the user's packages their Loader."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        spec = PathFinder.find_spec(name, path) if name.startswith(PREFIX) else None
        if spec and isinstance(spec.loader, SourceFileLoader):
            spec.loader = Loader(name, spec.origin)
        return spec


def import_for_user(package, name, globals=None, locals=None, fromlist=(), level=0):
    """Python's __import__, but what lies beside the user's file comes first."""
    first = name.partition(".")[0]
    if level or not is_users(package, first, (globals or {}).get("__file__")):
        return __import__(name, globals, locals, fromlist, level)
    found = __import__(f"{package}.{name}", globals, locals, fromlist)
    return found if fromlist else sys.modules[f"{package}.{first}"]


def is_users(package, first, importing):
    """Whether a name is that of a helper: beside the user's file, or where it has put sys.path."""
    folder, places = sys.modules[package].__path__[0], list(map(os.path.abspath, sys.path))
    a_file, a_folder = os.path.isfile(f"{ROOT}/{first}.py"), os.path.isdir(f"{ROOT}/{first}")
    before = places[:places.index(ROOT)] if (a_file or a_folder) and ROOT in places else []
    sys.modules[package].__path__ = [folder, *before]
    spec = PathFinder.find_spec(first, [folder, *before])
    if spec is None or folder == ROOT or a_file and spec.origin == importing:
        return False  # a file rewards.py that imports rewards means quartet's
    # a folder of Python files is a module, too, where there is no other one
    inside = f"{glob.escape(folder)}/{first}/*.py"
    return spec.origin is not None or a_folder and bool(glob.glob(inside))

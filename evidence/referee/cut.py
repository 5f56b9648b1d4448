"""
Functions, cut out of source files: of a trainer's wheel, where nothing is installed, and of
quartet's own pages, whose losses stand in their loops.

A function is found by its name in the syntax tree, and so is all of the same wheel that it calls.
What is neither there nor in LIBRARIES, such as a logger, is a stub that does nothing.
"""
import ast
import builtins
import contextlib
import re
import types
import zipfile
from unittest.mock import MagicMock

LIBRARIES = {"torch", "numpy", "math", "collections", "functools", "itertools", "dataclasses",
             "typing", "enum", "copy"}
DECORATORS = {"staticmethod", "classmethod", "property", "dataclass", "no_grad"}  # that are kept


class Bare(ast.NodeTransformer):
    """
    Without decorators of registries and compilers, without annotations and assertions on types, and
    without imports inside of functions: their names become those of the module, or stubs.
    """

    def generic_visit(self, node):
        super().generic_visit(node)
        if hasattr(node, "decorator_list"):
            node.decorator_list = [one for one in node.decorator_list
                                   if DECORATORS & {*re.findall(r"\w+", ast.unparse(one))}]
        if hasattr(node, "annotation"):  # of a dataclass it must be something
            node.annotation = ast.Constant(None) if isinstance(node, ast.AnnAssign) else None
        if hasattr(node, "returns"):
            node.returns = None
        return node

    def visit_Assert(self, node):
        return ast.copy_location(ast.Pass(), node)

    visit_Import = visit_ImportFrom = visit_Assert


def names_in(node):
    """The names that code reads."""
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)
            and isinstance(part.ctx, ast.Load)} - {*dir(builtins)}


class Module:
    """
    A source file. module.NAME is the function or class of that name. A name that is not there
    raises AttributeError.
    """

    def __init__(self, text, path="", wheel=None):
        self._tree, self._path, self._wheel = ast.parse(text), path, wheel
        self._cut = {}  # what has been cut out, by its name

    def __getattr__(self, name):
        found = self._find(name)
        if isinstance(found, MagicMock):
            raise AttributeError(f"{self._path}: no {name}")
        return found

    def _find(self, name):
        """What stands behind a name: only once, so that functions may call one another."""
        if name not in self._cut:
            self._cut[name] = MagicMock(name=name)
            self._cut[name] = self._made(name)
        return self._cut[name]

    def _made(self, name):
        for node in self._tree.body:
            if getattr(node, "name", "") == name:
                return self._run([node])[name]
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
                with contextlib.suppress(ValueError):
                    return ast.literal_eval(node.value)
            for alias in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
                if (alias.asname or alias.name.partition(".")[0]) == name:
                    return self._imported(node, alias, name)
        return MagicMock(name=name)

    def _imported(self, node, alias, name):
        """What an import statement gives a name: of a library, of the wheel, or a stub."""
        place = getattr(node, "module", None) or ""
        if getattr(node, "level", 0):  # from .utils import masked_mean
            package = self._path.split("/")[:-node.level]
            place = ".".join([*package, place] if place else package)
        whole = isinstance(node, ast.Import)
        if (place or alias.name).partition(".")[0] in LIBRARIES:
            statement = ast.Import([alias]) if whole else ast.ImportFrom(place, [alias], 0)
            with contextlib.suppress(ImportError):
                exec(ast.unparse(statement), space := {})
                return space[name]
        for file in (f"{place}.{alias.name}".strip("."), place):
            if self._wheel and (module := self._wheel.module(file.replace(".", "/") + ".py")):
                return module if file.endswith(alias.name) else module._find(alias.name)
        return MagicMock(name=alias.name)

    def _run(self, body, /, **given):
        """All names after these statements. given: names that already have a value."""
        body = [Bare().visit(one) for one in body]
        defined = {getattr(one, "name", "") for one in body} | given.keys()
        space = given | {name: self._find(name)
                         for name in set().union(*map(names_in, body)) - defined}
        exec(compile(ast.fix_missing_locations(ast.Module(body, [])), self._path, "exec"), space)
        return space

    def method(self, dotted):
        """A method "Class.name" as a function, whose first argument may be any object."""
        owner, name = dotted.split(".")
        for one in self._tree.body:
            for node in one.body if getattr(one, "name", "") == owner else ():
                if getattr(node, "name", "") == name:
                    return self._run([node])[name]
        raise AttributeError(f"{self._path}: no {dotted}")

    def lines(self, first, last, /, **given):
        """
        Runs the statements of one block from the one that begins with the text `first` to the next
        that begins with `last`, where the names `given` have these values. Returns all names.
        """
        for block in (getattr(node, field, None) for node in ast.walk(self._tree)
                      for field in ("body", "orelse")):
            texts = [ast.unparse(one) for one in block] if isinstance(block, list) else []
            begins = [i for i, text in enumerate(texts) if text.startswith(first)]
            ends = [i for i, text in enumerate(texts) if text.startswith(last)]
            if begins and ends and ends[-1] >= begins[0]:
                end = next(i for i in ends if i >= begins[0])
                return types.SimpleNamespace(**self._run(block[begins[0]:end + 1], **given))
        raise AttributeError(f"{self._path}: no statements from {first!r} to {last!r}")


class Wheel:
    """wheel["package/file.py"] is a Module. What is not there raises AttributeError."""

    def __init__(self, path):
        self.files, self.modules = zipfile.ZipFile(path), {}

    def module(self, path):
        for place in (path, path[:-3] + "/__init__.py"):  # .data/purelib/ is such a folder, too
            for name in self.files.namelist():
                if name == place or name.endswith(f".data/purelib/{place}"):
                    if place not in self.modules:
                        text = self.files.read(name).decode()
                        self.modules[place] = Module(text, place, self)
                    return self.modules[place]
        return None

    def __getitem__(self, path):
        if not (found := self.module(path)):
            raise AttributeError(f"no {path}")
        return found

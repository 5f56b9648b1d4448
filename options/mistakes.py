"""
What a user may have meant, looked up once something has failed. The core does the plain thing;
where it fails, a function here looks at what was given, and returns the error: in one line what is
wrong, where, and what to type.
"""
import ast
import difflib
import os
import shlex

from configurator import unknown
from errors import BadInput, first_line


def nearest(path):
    """
    "; it is a folder" where a path is one, and a file was wanted; "; did you mean FILE?" if beside
    it lies a file of nearly its name; or "".
    """
    if os.path.isdir(path):
        return "; it is a folder: give a file in it"
    folder, name = os.path.split(path)
    names = os.listdir(folder or ".") if os.path.isdir(folder or ".") else []
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.85)  # not sft_val for rl_val
    return f"; did you mean {os.path.join(folder, near[0])}?" if near else ""


# --------------------------------------------------------------------------------------------------
# arguments and config files


def without_value(argv, keys):
    """Of arguments, one of which is a key alone, such as --rate 0.5."""
    arg, behind = next((arg, behind) for arg, behind in zip(argv, [*argv[1:], "--"], strict=True)
                       if arg.startswith("--") and "=" not in arg)
    if arg[2:] not in keys:
        return unknown(arg[2:], keys, arg)
    if behind.startswith("--") or behind.endswith(".py"):  # the next argument, and not the value
        behind = keys[arg[2:]].default
    return BadInput(f"{arg}: a value is missing; type {arg}={shlex.quote(str(behind))}")


def no_config_file(path, keys, error):
    """Of a file that could not be run as a config file, or an argument that is no file."""
    data = next((key for key in ("prompts_path", "train_path") if key in keys), "KEY")
    hint = f"to give data, type --{data}={path}"
    name = path.partition("=")[0].lstrip("+-")
    if not os.path.isfile(path):
        if "=" in path and name not in keys:  # a key without its dashes, or as Hydra has it
            return unknown(name, keys, path)
        return BadInput(f"there is no config file {path!r}" + (
            nearest(path) if path.endswith(".py") else "; type --key=value, without blanks"))
    if not path.endswith(".py"):
        return BadInput(f"{path} is no config file, which is Python and ends in .py; {hint}")
    if str(error) == f"{path} is no config file":
        return set_twice(path) or BadInput(
            f"{path} sets no key, as in seed = 2, so it is no config file; {hint}")
    line, trace = getattr(error, "lineno", "?"), error.__traceback__
    while trace:
        line = trace.tb_lineno if trace.tb_frame.f_code.co_filename == path else line
        trace = trace.tb_next
    return BadInput(f"{path}, line {line}: {first_line(error)}")


def set_twice(path):
    """Of a config file that sets a key in two lines: the first one has no effect; or None."""
    lines = {}  # {key: the line that sets it}
    with open(path, encoding="utf-8") as f:
        tree = ast.parse(f.read())
    for node in tree.body:
        for target in node.targets if isinstance(node, ast.Assign) else ():
            name = getattr(target, "id", "_")
            if name in lines:
                return BadInput(f"{path}, line {node.lineno}: {name} is set in line {lines[name]}, "
                                "too; delete one of the two")
            if name[0] != "_":
                lines[name] = node.lineno
    return None

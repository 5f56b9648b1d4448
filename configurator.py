"""
Poor man's configurator, after nanoGPT's, with checks. A script writes its configuration as plain
globals, one comment each, and then calls configure:

    batch_size = 256  # responses an iteration, over all ranks [>= 1]
    config, system = configure(globals(), "config/keys.py")

`python ppo.py config/llama.py config/mine.py --batch_size=64` then overrides them: first the config
files, from left to right, and then each --key=value; of two values for a key the last one counts.
A config file is Python; each public name in it must be a key of the script, also that of an import
(import math as _math). `--help` prints every key with its default and its comment.

A key's comment is read by the program, too; these parts of it are checked:

    [>= 1], [> 0], [0..1], [a | b | c]   at its end: the values that are allowed
    with tools: ...                      the key has no effect unless the key tools is set, too:
                                         not to 0 or False and, as a text, not to its default
    instead of max_iters: ...            not both keys may be set in one place
    * ..., + ...                         for the reader: most runs set it; docs/algorithms.md#KEY

config/keys.py has the keys that all scripts share. They become attributes of `system`.

This file is imported before torch, whose libraries read the two settings below when they start.
"""
import ast
import json
import os
import re
import symtable
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

from errors import BadInput, mistake, optional, say, shorten

# For products of each new shape oneDNN writes a program, and keeps 1,024 of them; so does torch.
# Each takes 0.3 MiB, and most shapes come only once: a run would grow by 12 MiB an iteration.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "32")  # oneDNN's
os.environ.setdefault("LRU_CACHE_CAPACITY", "32")  # torch's

MODELS = "policy", "ref", "reward", "value", "judge"  # named in keys that have a value for each
# a [range] that a comment may end with -> is a value allowed by it?
RANGES = {
    r"([^\[\]]*\|[^\[\]]*)": lambda value, words: value in words.split(" | "),
    r"(\S+)\.\.(\S+)": lambda value, low, high: float(low) <= value <= float(high),
    r">= (\S+)": lambda value, low: value >= float(low),
    r"> (\S+)": lambda value, low: value > float(low)}
OF_OTHERS = r"(\* )?with \w|instead of "  # how the comment of a key begins that needs another key
# what a user reads, and not the names of Python's types
WORDS = {bool: "True or False", int: "a whole number", float: "a number below 1e30",
         str: "a text in quotes"}


class Key(NamedTuple):
    """One key, from its line."""

    default: bool | int | float | str
    comment: str  # what stands after its #
    headings: list[str]  # above it


def configure(script_globals, shared="", argv=None, until=None, given=None, **defaults):
    """
    Override the configuration globals of a script from config files and --key=value arguments.

    script_globals: the caller's globals(). shared: a file of more keys, beside this one. defaults:
    the script's own, of shared keys. until: a shared key; it and the keys below it are other
    scripts' and keep their defaults. given: {key: (value, where it is from)}, which is overridden.

    Returns the final configuration as a dict, with the script's name as "script", and the shared
    keys as attributes of a namespace. Raises BadInput.
    """
    script = script_globals["__file__"]
    own, more = read_keys(script), {}
    if shared:
        more = read_keys(os.path.join(os.path.dirname(os.path.abspath(__file__)), shared))
    for name, value in defaults.items():
        more[name] = more[name]._replace(default=value)
    shown = list(more)[:list(more).index(until)] if until else more
    keys = own | {name: more[name] for name in shown} | own  # the script's key before a shared one
    argv = sys.argv[1:] if argv is None else argv
    if "--help" in argv or "-h" in argv:
        from options.help import print_help

        print_help(os.path.basename(script), script_globals.get("__doc__"), keys)
        sys.exit(0)

    overrides = read_arguments(keys, argv, given)
    config = {name: overrides.get(name, [key.default])[0] for name, key in keys.items()}
    config["script"] = os.path.basename(script)
    if any(re.match(OF_OTHERS, keys[name].comment) for name in overrides):
        optional("mistakes.check_others")(config, keys, overrides)
    script_globals.update({name: config[name] for name in own})
    say_settings(keys, overrides)
    return config, SimpleNamespace(**{name: config.get(name, key.default)
                                      for name, key in more.items()})


def read_arguments(keys, argv, given=None):
    """{name: (value, where it is from)} of given, and of argv; checked against {name: Key}."""
    overrides = dict(given or {})
    typed = [arg for arg in argv if arg.startswith("--")]
    if not all("=" in arg for arg in typed):
        raise mistake("without_value", argv, keys)
    # files first: a typed value counts more than a file, in any order
    for file in [arg for arg in argv if arg not in typed]:
        overrides |= {name: (value, file) for name, value in run_config_file(file, keys).items()}
    for arg in typed:
        name, _, text = arg[2:].partition("=")
        if name not in keys:
            raise unknown(name, keys, arg)
        overrides[name] = (parse(text, keys[name].default), "command line")
    for name, (value, where) in overrides.items():
        value = checked(name, value, keys[name], where)
        if "~" in str(value):
            from options.home import from_home

            value = from_home(value, name)
        overrides[name] = (value, where)
    return overrides


def read_keys(file):
    """{name: Key} of the public `name = literal  # comment` lines above a file's configure(...)."""
    with open(file, encoding="utf-8-sig") as f:
        source = f.read()
    lines, keys, above = source.split("\n"), {}, 0
    for node in ast.parse(source).body:
        call = getattr(node, "value", None)
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "configure":
            break
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            try:
                value = ast.literal_eval(node.value)
            except ValueError:
                value = None  # computed from other names: not a key
            if isinstance(value, (bool, int, float, str)) and not name.startswith("_"):
                behind = lines[node.end_lineno - 1].encode()[node.end_col_offset:].decode()
                headings = [line.strip("# ") for line in lines[above:node.lineno - 1]
                            if line.startswith("#") and line.strip("#- ")]
                keys[name] = Key(value, behind.strip("# "), headings)
        above = node.end_lineno
    return keys


def run_config_file(path, keys):
    """Run a config file -> {key: value}. Raises BadInput; of other programs before it runs them."""
    namespace = {"__file__": path}
    try:
        with open(path, encoding="utf-8-sig") as f:
            text = f.read()
        bound = symtable.symtable(text, path, "exec").get_symbols()
        names = [each.get_name() for each in bound if each.is_assigned() or each.is_imported()]
        check_names(names, keys, path)
        if all(name[0] == "_" for name in names) or not path.endswith(".py"):  # data, for example
            raise ValueError(f"{path} is no config file")
        exec(compile(text, path, "exec"), namespace)
        check_names(namespace, keys, path)
    except BadInput:
        raise
    except Exception as e:  # a program raises anything
        raise mistake("no_config_file", path, keys, e) from e
    return {name: value for name, value in namespace.items() if not name.startswith("_")}


def check_names(names, keys, where):
    """Raise BadInput where one of these names is neither a key nor hidden by a _ in front."""
    for name in names:
        if name not in keys and not name.startswith("_"):
            raise unknown(name, keys, where)


def unknown(key, keys, where):
    """The BadInput for a key that does not exist; options/ can say which one may be meant."""
    hint = optional("foreign_names.meant")(key, keys, where) or "--help lists the keys"
    return BadInput(f"unknown key {key!r} ({where}): {hint}")


def parse(text, default):
    """The value of the text in --key=text, for a key with this default; see checked."""
    if isinstance(default, str):
        return re.sub(r"\A(['\"])(.*)\1\Z", r"\2", text, flags=re.DOTALL)  # '...' and "..."
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def checked(name, value, key, where):
    """
    A value, if it has the type of the key's default (only an int may become a float) and is in the
    [range] at the end of the key's comment. Raises BadInput.
    """
    wanted = type(key.default)
    if wanted is float and type(value) is int:
        value = float(value)
    # NaN, and a number that may overflow float32, are refused
    if type(value) is not wanted or wanted is float and not abs(value) < 1e30:
        raise BadInput(f"{name} ({where}): wanted {WORDS[wanted]}, given {shorten(value)}")
    for pattern, allowed in RANGES.items():
        rule = re.search(rf"\[({pattern})\]$", key.comment)
        if rule and not allowed(value, *rule.groups()[1:]):
            raise BadInput(f"{name} = {shorten(value)} ({where}): wanted [{rule[1]}]; "
                           f"{key.comment[:rule.start()].strip('*+ ')}")
    return value


def for_model(text, name):
    """A key's value for one model, or "": "3" and "policy=3,value=2" have "3" for the policy."""
    of_name = ""
    for part in text.split(","):
        model, equals, value = (x.strip() for x in part.rpartition("="))
        if equals and model not in MODELS:
            raise BadInput(f"{text!r}: there is no model {model!r}; they are {', '.join(MODELS)}")
        if not equals or model == name:
            of_name = value
    return of_name


def say_settings(keys, overrides):
    """Say the settings that differ from the defaults, with the config file of each."""
    lines = {}  # {where: its settings}
    for name, (value, where) in overrides.items():
        if value != keys[name].default:
            lines.setdefault(where, []).append(f"{name}={value!r}")
    for where, settings in lines.items():
        say(textwrap.fill(f"{where}: {' '.join(settings)}", 80, subsequent_indent="    ",
                          break_long_words=False, break_on_hyphens=False))


# -------------------------------------------------------------------------------------------------
# settings in JSON files: of runs, and of transformers' models and tokenizers

def read_json(path):
    with open(path, encoding="utf-8-sig") as f:
        return json.load(f)


def write_json(path, value):
    """Replace a JSON file as a whole."""
    write_text(path, json.dumps(value, indent=2))


def write_text(path, text):
    """Replace a file as a whole: another rank, or a browser, never reads a half-written file."""
    new = Path(f"{path}.tmp")
    new.unlink(missing_ok=True)  # it may be a link to any file of the user's
    with open(new, "x", encoding="utf-8") as f:  # "x" follows no link that is made meanwhile
        f.write(text)
    os.replace(new, path)

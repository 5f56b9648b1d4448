"""
Poor man's configurator, after nanoGPT's, with checks. A script writes its configuration as plain
globals, one comment each, and then calls configure:

    batch_size = 256  # responses an iteration, over all ranks [>= 1]
    config, system = configure(globals(), "config/keys.py")

`python ppo.py config/llama.py config/mine.py --batch_size=64` then overrides them: first the config
files, from left to right, and then each --key=value; of two values for a key the last one counts.
A config file is Python; each public name in it must be a key of the script, also that of an import
(import math as _math). This is looked at before it is run. `--help` prints every key with its
default and its comment.

A key's comment is read by the program, too; these parts of it are checked:

    [>= 1], [> 0], [0..1], [a | b | c]   at its end: the values that are allowed
    with tools: ...                      the key has no effect unless the key tools is set, too: to
                                         anything but 0 and False or, of texts, the default
    in the place of max_iters: ...       not both keys may be set in one place
    * ...                                for the reader: most runs set this key

config/keys.py has the keys that all scripts share. They become attributes of `system`. A run's
configuration is kept as JSON (read_json, write_json).

This file is imported before torch, whose libraries read the two settings below when they start.
"""
import ast
import contextlib
import difflib
import json
import os
import re
import shlex
import symtable
import sys
import textwrap
from types import SimpleNamespace
from typing import NamedTuple

from errors import BadInput, nearest, shorten

# For products of each new shape oneDNN writes a program, and keeps 1,024 of them; so does torch.
# Each takes 0.3 MiB, and most shapes come only once: a run would grow by 12 MiB an iteration.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "32")  # oneDNN's
os.environ.setdefault("LRU_CACHE_CAPACITY", "32")  # torch's


MODELS = "policy", "ref", "reward", "value", "judge"  # in keys that have a value for each model
SCRIPTS = "ppo.py", "grpo.py", "sft.py", "rm.py"
# keys of text that is no path, so a ~ in it is a ~
TEXTS = "prompt", "answer", "system_prompt", "stop_strings", "template_kwargs"
# what a user reads, and not the names of Python's types
WORDS = {bool: "True or False", int: "a whole number", float: "a number", str: "a text in quotes"}


class Key(NamedTuple):
    """One key, from its line: the default, the comment behind it, the headings above it."""

    default: bool | int | float | str
    comment: str
    headings: list[str]


def configure(script_globals, shared="", argv=None, until=None, given=None, **defaults):
    """
    Override the configuration globals of a script from config files and --key=value arguments.

    script_globals: the caller's globals(). Its configuration is every public int, float, bool or
    str that is assigned as a literal, at the top level, above the call. shared: a file of more
    keys, beside this one. until: a shared key; it and the keys below it are other scripts' and keep
    their defaults. given: {key: (value, where it is from)}, which files and arguments override.
    defaults: the script's own defaults of shared keys.

    Returns the final configuration as a dict, with the script's name as "script", and the shared
    keys as attributes of a namespace. Raises BadInput.
    """
    script = script_globals["__file__"]
    own, more = read_keys(script), {}
    if shared:
        more = read_keys(os.path.join(os.path.dirname(os.path.abspath(__file__)), shared))
    twice = ", ".join(sorted(own.keys() & more.keys()))
    if twice:
        raise BadInput(f"{script} sets {twice}, which {shared} has, too; see configure's defaults")
    for name, value in defaults.items():
        more[name] = more[name]._replace(default=value)
    shown = list(more)[:list(more).index(until)] if until else more
    keys = own | {name: more[name] for name in shown}
    argv = sys.argv[1:] if argv is None else argv
    speaks = os.environ.get("RANK", "0") == "0"
    if "--help" in argv or "-h" in argv:
        if speaks:
            print_help(os.path.basename(script), script_globals.get("__doc__"), keys)
        sys.exit(0)

    overrides = read_arguments(keys, argv, given)
    config = {name: key.default for name, key in keys.items()} | dict(
        script=os.path.basename(script))
    config |= {name: value for name, (value, _) in overrides.items()}
    check_others(config, keys, overrides)
    script_globals.update({name: config[name] for name in own})
    if speaks:
        print_settings(keys, overrides)
    return config, SimpleNamespace(**{name: config.get(name, key.default)
                                      for name, key in more.items()})


def check_others(config, keys, overrides):
    """
    Raise BadInput where a key that is set needs another one that is not, or stands in the place of
    another one that is set, too. Both are said at the beginning of its comment: see the header.
    """
    for name, (value, where) in overrides.items():
        beside = re.match(r"\*? ?with (\w+)(?: or (\w+))?: ", keys[name].comment)
        others = [other for other in beside.groups() if other] if beside else ()
        if value != keys[name].default and others and not any(
                is_on(config.get(other), keys.get(other)) for other in others):
            raise BadInput(f"{name} ({where}) has no effect without {' or '.join(others)}")
        instead = re.match(r"in the place of (\w+): ", keys[name].comment)
        _, other = overrides.get(instead[1], ("", "")) if instead else ("", "")
        if value and other and other in (where, "command line"):
            raise BadInput(f"{name} ({where}) is in the place of {instead[1]} ({other}); keep one")


def is_on(value, key):
    """Whether a key is set: a text is not the default, any other value is not 0."""
    return value != key.default if isinstance(value, str) else bool(value)


def read_arguments(keys, argv, given=None):
    """{name: (value, where it is from)} of given, and of argv; checked against {name: Key}."""
    overrides = {name: (convert(name, value, keys[name].default, where), where)
                 for name, (value, where) in (given or {}).items()}
    for arg, behind in zip(argv, [*argv[1:], "--"], strict=False):
        if arg.startswith("--") and "=" not in arg:  # behind it: a value, or the next argument
            check_key(arg[2:], keys, arg)
            meant = behind
            if behind.startswith("--") or behind.endswith(".py"):
                meant = keys[arg[2:]].default
            raise BadInput(f"{arg}: a value is missing; type {arg}={shlex.quote(str(meant))}")
    # files first: a typed value counts more than a file, in any order
    for arg in sorted(argv, key=lambda arg: arg.startswith("--")):
        if not arg.startswith("--"):
            for name, value in run_config_file(arg, keys).items():
                overrides[name] = (convert(name, value, keys[name].default, arg), arg)
            continue
        name, _, text = arg[2:].partition("=")
        check_key(name, keys, arg)
        overrides[name] = (parse(name, text, keys[name].default), "command line")
    for name, (value, where) in overrides.items():
        check_range(name, value, keys[name].comment, where)
        if isinstance(value, str) and name not in TEXTS:
            overrides[name] = (from_home(value), where)
    return overrides


def from_home(text):
    """
    ~/out -> /home/me/out, also in lists: a,0.5*~/b.jsonl. bash does it only for a word that begins
    with ~, which --out_dir=~/out does not: the run would make a folder with the name ~.
    """
    return re.sub(r"(^|[,*:]\s*)(~[^,]*)", lambda m: m[1] + os.path.expanduser(m[2]), text)


def read_keys(file):
    """{name: Key} of the `name = literal  # comment` lines above a file's call of configure."""
    with open(file, encoding="utf-8") as f:
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
    """
    Execute a config file in a fresh namespace; returns its public names, which must be keys. Raises
    BadInput, for data or another program before it is run.
    """
    data = next((key for key in ("prompts_path", "train_path") if key in keys), "KEY")
    hint = f"to give data, type --{data}={path}"
    if not os.path.isfile(path):
        if "=" in path:  # a key without its dashes, or as Hydra has it
            check_key(path.partition("=")[0].lstrip("+-"), keys, path)
        raise BadInput(f"there is no config file {path!r}" + (
            nearest(path) if path.endswith(".py") else "; type --key=value, without blanks"))
    if not path.endswith(".py"):  # Python would take a line of JSON for a program, too
        raise BadInput(f"{path} is no config file, which is Python and ends in .py; {hint}")
    namespace = {"__file__": path}
    try:
        with open(path, encoding="utf-8") as f:
            text = f.read()
        bound = symtable.symtable(text, path, "exec").get_symbols()
        names = [each.get_name() for each in bound if each.is_assigned() or each.is_imported()]
        names = [name for name in names if not name.startswith("_")]
        for name in names:
            check_key(name, keys, path)
        check_twice(text, path)
        if not names:
            raise BadInput(f"{path} sets no key, as in seed = 2, so it is no config file; {hint}")
        exec(compile(text, path, "exec"), namespace)
    except BadInput:
        raise
    except Exception as e:  # any error of the file is reported with its line
        line, trace = getattr(e, "lineno", "?"), e.__traceback__
        while trace:
            line = trace.tb_lineno if trace.tb_frame.f_code.co_filename == path else line
            trace = trace.tb_next
        raise BadInput(f"{path}, line {line}: {type(e).__name__}: {e}") from e
    for name in namespace:
        if not name.startswith("_"):
            check_key(name, keys, path)
    return {name: value for name, value in namespace.items() if not name.startswith("_")}


def check_twice(text, path):
    """Raise BadInput if a config file sets a key in two lines: the first one has no effect."""
    lines = {}  # {key: the line that sets it}
    for node in ast.parse(text).body:
        for target in node.targets if isinstance(node, ast.Assign) else ():
            name = getattr(target, "id", "_")
            if name in lines:
                raise BadInput(f"{path}, line {node.lineno}: {name} is set in line {lines[name]}, "
                               "too; delete one of the two")
            if not name.startswith("_"):
                lines[name] = node.lineno


def check_key(key, keys, where):
    """Raise BadInput, with the script that has it, or the nearest key, unless it is one of keys."""
    if key in keys:
        return
    scripts = [os.path.join(os.path.dirname(__file__), name) for name in SCRIPTS]
    others = [os.path.basename(script) for script in scripts
              if os.path.isfile(script) and key in read_keys(script)]
    theirs = ""
    with contextlib.suppress(ImportError):  # a fork may do without
        from options.foreign_names import hint_for

        theirs = hint_for(key)
    # a wrong hint is worse than none
    near = difflib.get_close_matches(key, keys, n=1, cutoff=0.75)
    hint = (f"it is a key of {' and '.join(others)}" if others else theirs or (
            f"did you mean {near[0]!r}?" if near else "--help lists the keys"))
    if where.endswith(".py") and not others:
        hint += " (a name that is no key begins with _)"
    raise BadInput(f"unknown key {key!r} ({where}): {hint}")


def parse(key, text, default):
    """The value of the text in --key=text, read as the default's type. Raises BadInput."""
    if isinstance(default, str):
        quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
        return text[1:-1] if quoted else text
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = text
    return convert(key, value, default, "command line")


def convert(key, value, default, where):
    """value in the type of default: only an int may become a float. Raises BadInput."""
    wanted = type(default)
    if wanted is float and type(value) is int:
        value = float(value)
    if type(value) is not wanted:
        raise BadInput(f"{key} ({where}): wanted {WORDS[wanted]}, given {shorten(value)}")
    if wanted is float and not abs(value) < 1e30:  # NaN, or a number that may overflow float32
        raise BadInput(f"{key} ({where}): wanted a finite number below 1e30, given {value}")
    return value


def check_range(name, value, comment, where):
    """Enforce the [range] at the end of a key's comment. Raises BadInput."""
    match = re.search(r"\[([^\[\]]+)\]$", comment)
    if not match:
        return
    rule = match.group(1)
    if "|" in rule:
        good = value in [choice.strip() for choice in rule.split("|")]
    elif ".." in rule:
        low, high = (float(x) for x in rule.split(".."))
        good = low <= value <= high
    else:
        sign, bound = rule.split()
        good = value > float(bound) if sign == ">" else value >= float(bound)
    if not good:
        raise BadInput(f"{name} = {shorten(value)} ({where}): wanted [{rule}]; "
                       f"{comment[:match.start()].strip('* ')}")


def of_model(text, name):
    """A key's value for one model, or "": "3" and "policy=3,value=2" have "3" for the policy."""
    of_name = ""
    for part in text.split(",") if text.strip() else ():
        model, equals, value = (x.strip() for x in part.rpartition("="))
        if equals and model not in MODELS:
            raise BadInput(f"{text!r}: there is no model {model!r}; they are {', '.join(MODELS)}")
        if not equals or model == name:
            of_name = value
    return of_name


def print_settings(keys, overrides):
    """Print the settings that differ from the defaults, with the config file of each."""
    lines = {}  # {where: its settings}
    for name, (value, where) in overrides.items():
        if value != keys[name].default:
            lines.setdefault(where, []).append(f"{name}={value!r}")
    for where, settings in lines.items():
        print(textwrap.fill(f"{where}: {' '.join(settings)}", 80, subsequent_indent="    ",
                            break_long_words=False, break_on_hyphens=False))


def print_help(script, doc, keys):
    """Print the script's docstring, and every key with its default and comment, in 80 columns."""
    def show(line, indent):
        print(textwrap.fill(line, 80, subsequent_indent=" " * indent, break_on_hyphens=False))

    for paragraph in (doc or "").strip().split("\n\n"):
        if re.search(r"^ |  ", paragraph, re.MULTILINE):  # commands, a list or a table
            for line in paragraph.split("\n"):
                column = len(re.match(r"(.*  )?", line)[0])  # the last one of a table
                show(line, column if column < 56 else 4)
        else:
            show(paragraph, 0)
        print()
    print(f"usage: python {script} [config.py ...] [--key=value ...: they win]")
    print("keys (*: most runs set it):")
    for name, key in keys.items():
        if key.headings:
            print()
        for heading in key.headings:
            show(f"  {heading}", 2)
        comment = re.sub(r"\[(>=?) ", r"[\1", key.comment)  # a range stays on its line
        show(f"    {f'{name} = {key.default!r}':<28}  {comment}", 34)


# -------------------------------------------------------------------------------------------------
# settings in JSON files: of runs, and of transformers' models and tokenizers

# all names that a run writes in out_dir, and later replaces or deletes; no others are touched
OURS = re.compile(r"(\.(tmp|old|gone)-)?(checkpoint-\d{6,}|((best_|ema_)?policy|value_model|"
                  r"reward_model)(_adapter)?)|config\.json|(log|samples|rollouts)\.jsonl")


def contents_of(out_dir, config):
    """
    (config of the run in out_dir or {}, names of all that it has written). Raises BadInput where
    such names are no run's, or where this run would replace its own models or data.
    """
    names = list(filter(OURS.fullmatch, os.listdir(out_dir) if os.path.isdir(out_dir) else ()))
    before, top = {}, os.path.realpath(out_dir)
    with contextlib.suppress(FileNotFoundError, ValueError):  # ValueError: it is no JSON
        before = read_json(os.path.join(out_dir, "config.json"))
    odd = [f"{name}, and is no run's" for name in names if "out_dir" not in before]
    for key, path in paths_in(config):
        inner = os.path.relpath(os.path.realpath(path), top).split(os.sep)[0]
        if os.path.exists(path) and (inner == os.curdir or OURS.fullmatch(inner)):
            odd.append(f"{key} = {path!r}")
    if not out_dir:
        raise BadInput("out_dir is empty: there is no place for the run; choose another --out_dir")
    if odd:
        raise BadInput(f"out_dir = {out_dir!r} has {', '.join(odd[:1])}: this run would replace "
                       "it; choose another --out_dir")
    return before, names


def paths_in(config, keys=("_path", "init_from", "teacher", "value_init")):
    """[(key, path)] of the models and data that keys with these ends name; some name several."""
    return [(key, path.strip()) for key, value in config.items() if key.endswith(keys)
            for path in str(value).split(",") if path.strip()]


def read_json(path):
    with open(path, encoding="utf-8") as f:
        return json.load(f)


def write_json(path, value):
    """Replace a JSON file as a whole."""
    write_text(path, json.dumps(value, indent=2))


def write_text(path, text):
    """Replace a file as a whole: another rank, or a browser, never reads a half-written file."""
    with open_new(path + ".tmp") as f:
        f.write(text)
    os.replace(path + ".tmp", path)


def open_new(path):
    """
    A new text file, open for writing. What had its name is removed, and not written to: in a folder
    of others it may be a link to any file of the user's.
    """
    if os.path.lexists(path):
        os.remove(path)
    return open(path, "x", encoding="utf-8")  # O_EXCL: it follows no link that is made meanwhile


def plain(path):
    """A file's path; a link, pipe or device of its name, which could lead anywhere, is removed."""
    if os.path.islink(path) or os.path.exists(path) and not os.path.isfile(path):
        os.remove(path)
    return path

"""
Poor man's configurator, after nanoGPT's, with checks. A script writes its configuration as plain
globals, one comment each, and then calls configure:

    batch_size = 256  # responses an iteration, over all ranks [>= 1]
    config, _ = configure(globals())

`python ppo.py config/llama.py config/mine.py --batch_size=64` then overrides them: first the config
files, from left to right, and then each --key=value, also one before a file; of two values for a
key the last one counts. A config file is Python, run in a namespace of its own; each public name in
it must be a key of the script (helpers start with an underscore). `--help` prints every key with
its default and its comment; a * at the beginning of a comment: most runs set this key.

The brackets at the end of a comment are the key's range: [>= 1], [> 0], [0..1] or [a | b | c]. It
is checked, so the comment and the check cannot differ.

Keys that several scripts share are in files of their own, in the same form:

    config, system = configure(globals(), "keys.py", checkpoint_interval=500)

gives them as attributes of `system`, which the script passes on as one value. The keywords are this
script's own defaults of shared keys.
"""
import ast
import difflib
import os
import re
import shutil
import sys
import textwrap
import traceback
from types import SimpleNamespace
from typing import NamedTuple

from errors import BadConfig, first_line, one_line, report_errors, shorten

RENAMED = dict(  # keys of other programs; the nearest name would often be another key
    device="device_type", loss="loss_type", lr="learning_rate", optimizer="optim",
    rewards="reward_functions", scale="scale_by", zero="zero_stage")
RECIPES = dict(  # keys that a recipe adds to a script
    critic_warmup_iters="critic_warmup", dual_clip="dual_clip",
    importance_floor="masked_importance", importance_level="masked_importance",
    importance_outside="masked_importance", kl_coef_target="kl_controller",
    kl_correction="deepseek_v32", kl_target="kl_controller", off_policy_limit="deepseek_v32",
    reward_clip="reward_clip", scale_scores="scale_scores", target_kl="target_kl",
    whiten_rewards="whiten_rewards")


class Key(NamedTuple):
    """One key, from its line: the default, the comment behind it, the headings above it."""

    default: bool | int | float | str
    comment: str
    headings: list[str]


def configure(script_globals, *shared, argv=None, **defaults):
    """
    Override the configuration globals of a script from config files and --key=value arguments.

    script_globals: the caller's globals(). Its configuration is every public int, float, bool or
    str that is assigned as a literal, at the top level, above the call.
    shared: files of more keys, in the script's folder or in this file's.
    argv: the arguments; default sys.argv[1:].
    defaults: the script's own defaults of shared keys.

    Returns the final configuration as a dict, the script's keys, then the shared ones; and only the
    shared ones as attributes of a namespace. Raises BadConfig for an unknown key, a value of
    another type or out of range, and a missing or broken config file.
    """
    report_errors()
    script = script_globals["__file__"]
    own = read_lines(script)[0]
    keys = add_shared(own, script, shared, defaults)
    argv = sys.argv[1:] if argv is None else argv
    speaks = os.environ.get("RANK", "0") == "0"
    if "--help" in argv or "-h" in argv:
        if speaks:
            print_help(os.path.relpath(script), script_globals.get("__doc__"), keys)
        sys.exit(0)

    overrides = read_arguments(keys, argv)
    config = {name: key.default for name, key in keys.items()}
    config |= {name: value for name, (value, _) in overrides.items()}
    script_globals.update({name: config[name] for name in own})
    if speaks:
        print_settings(keys, overrides)
    return config, SimpleNamespace(**{name: config[name] for name in keys if name not in own})


def read_arguments(keys, argv):
    """
    {name: (value, where it came from)} of the config files and --key=value arguments in argv,
    checked against keys, a {name: Key}. Raises BadConfig.
    """
    overrides = {}
    # files first: a typed value counts more than a file, in any order
    for arg in sorted(argv, key=lambda arg: arg.startswith("--") and "=" in arg):
        if not arg.startswith("--"):
            for name, value in run_config_file(arg).items():
                check_key(name, keys, arg, " (the name of a helper begins with _)")
                overrides[name] = (convert(name, value, keys[name].default, arg), arg)
            continue
        name, equals, text = arg[2:].partition("=")
        check_key(name, keys, arg)
        if not equals:
            raise BadConfig(f"{arg}: a value is missing; type {arg}={keys[name].default!r}, "
                            "without a blank at the =")
        overrides[name] = (parse(name, text, keys[name].default), "command line")
    for name, (value, where) in overrides.items():
        check_range(name, value, keys[name].comment, where)
    return overrides


# -------------------------------------------------------------------------------------------------
# the keys, from the source: nothing is run


def read_keys(script):
    """{name: Key} of a script, with the shared keys of its call of configure."""
    keys, call = read_lines(script)
    shared = [ast.literal_eval(x) for x in call.args[1:]] if call else []
    defaults = {x.arg: ast.literal_eval(x.value) for x in call.keywords} if call else {}
    return add_shared(keys, script, shared, defaults)


def add_shared(keys, script, shared, defaults):
    """A script's keys, then those of the shared files with these defaults. Raises BadConfig."""
    where, more = os.path.basename(script), {}
    for file in shared:
        path = os.path.join(os.path.dirname(script), file)
        if not os.path.exists(path):  # a script of recipes/ is in a folder below
            path = os.path.join(os.path.dirname(os.path.abspath(__file__)), file)
        found = read_lines(path)[0]
        for name in found:
            if name in keys or name in more:
                raise BadConfig(f"{file} sets {name}, which {where} or another file has set; keep "
                                f"one. A default that differs belongs in the call: "
                                f"configure(..., {name}=...)")
        more |= found
    for name, value in defaults.items():
        check_key(name, more, where)
        value = convert(name, value, more[name].default, where)
        check_range(name, value, more[name].comment, where)
        more[name] = more[name]._replace(default=value)
    return keys | more


def read_lines(file):
    """
    {name: Key} of the `name = literal  # comment` lines of a file, and the call of configure that
    ends them (None if there is none). A heading is a comment on a line of its own.
    """
    with open(file, encoding="utf-8") as f:
        source = f.read()
    lines, keys, above = source.split("\n"), {}, 0
    for node in ast.parse(source).body:
        call = getattr(node, "value", None)
        if isinstance(call, ast.IfExp):  # configure(globals()) if the file is run, and not imported
            call = call.body
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "configure":
            return keys, call
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
    return keys, None


# -------------------------------------------------------------------------------------------------
# the values given for them


def run_config_file(path):
    """Execute a config file in a fresh namespace; returns its public names. Raises BadConfig."""
    namespace = {"__file__": path}
    try:
        with open(path, encoding="utf-8") as f:
            code = compile(f.read(), path, "exec")
        if read_lines(path)[1]:  # it would read these arguments, and itself among them
            raise BadConfig(f"{path} is a script, and no config file; type only one script")
        exec(code, namespace)
    except OSError as e:
        hint = "" if path.endswith(".py") else "; to set a key, type --key=value"
        raise BadConfig(f"cannot read config file {path!r}: {e.strerror}{hint}") from e
    except (KeyboardInterrupt, BadConfig):
        raise
    except BaseException as e:  # any error of the file is reported with its line
        frames = [f for f in traceback.extract_tb(e.__traceback__) if f.filename == path]
        line = frames[-1].lineno if frames else getattr(e, "lineno", "?")
        raise BadConfig(f"{path}, line {line}: {first_line(e)}") from e
    module = type(ast)
    public = {name: value for name, value in namespace.items() if not name.startswith("_")}
    return {name: value for name, value in public.items() if not isinstance(value, module)}


def check_key(key, keys, where, more=""):
    """
    Raise BadConfig, with the key's new name or the nearest one, unless key is one of keys. more:
    the end of the message for a key without a new name.
    """
    if key in keys:
        return
    near = difflib.get_close_matches(key, keys, n=1)
    # base = 3 may be a helper, though a key is called baseline
    hint = (f"did you mean {near[0]!r}?" if near else "--help lists the keys") + more
    if RENAMED.get(key) in keys:
        hint = f"it is called {RENAMED[key]!r} here"
    if key in RECIPES:
        hint = (f"it is recipes/{RECIPES[key]}.diff; type "
                f"python tools/fork.py {RECIPES[key]} FOLDER")
    here = os.path.dirname(os.path.abspath(__file__))
    for script in ("ppo.py", "grpo.py", "sft.py", "rm.py"):
        file = os.path.join(here, script)
        if os.path.exists(file) and key in read_lines(file)[0]:  # the config of another script
            hint = f"it is a key of {script}; type python {script} {where}"
            break
    raise BadConfig(f"unknown key {key!r} ({where}); {hint}")


def parse(key, text, default):
    """The value of the text in --key=text, read as the default's type. Raises BadConfig."""
    if isinstance(default, str):
        quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
        return text[1:-1] if quoted else text
    try:
        value = ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        value = text
    return convert(key, value, default, "command line")


def convert(key, value, default, where):
    """value in the type of default: only an int may become a float. Raises BadConfig."""
    wanted = type(default)
    if wanted is float and type(value) is int and abs(value) < 2**1000:
        value = float(value)
    if type(value) is not wanted:
        raise BadConfig(f"{key} ({where}): wanted {wanted.__name__} like {default!r}, given "
                        f"{type(value).__name__} {shorten(value)}")
    if wanted is float and not abs(value) < 1e30:  # NaN, or a number that may overflow float32
        raise BadConfig(f"{key} ({where}): wanted a finite number below 1e30, given {value}")
    return value


def of_model(text, name):
    """
    A key's value for one model: "3" and "policy=3,value=2" have "3" for the policy; of two values
    the last one counts. "" where there is none.
    """
    found = ""
    for part in text.split(",") if text.strip() else ():
        model, equals, value = (x.strip() for x in part.rpartition("="))
        if not equals or model == name:
            found = value
    return found


def check_range(key, value, comment, where):
    """Enforce the [range] at the end of a key's comment. Raises BadConfig."""
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
        raise BadConfig(f"{key} = {shorten(value)} ({where}) is out of range: [{rule}]; "
                        f"{comment[:match.start()].strip('* ')}")


def print_settings(keys, overrides):
    """Print the settings that differ from the defaults, with the config file of each."""
    lines = {}  # {where: its lines}
    for name, (value, where) in overrides.items():
        if value != keys[name].default:
            part = lines.setdefault(where, [one_line(f"{where}:")])
            setting = one_line(f"{name}={value!r}")
            if len(part[-1]) + 1 + len(setting) > 100:
                part.append("   ")
            part[-1] += f" {setting}"
    for where in sorted(lines, key="command line".__eq__):  # the command line last: it wins
        print("\n".join(lines[where]))


def print_help(script, doc, keys):
    """Print the script's docstring, and every key with its default and comment."""
    print((doc or "").strip())
    print(f"\nusage: python {script} [config.py ...] [--key=value ...: they win]")
    print("keys (*: most runs set it):")
    if not next(iter(keys.values())).headings:
        print()
    columns = shutil.get_terminal_size((1000, 24)).columns  # in a file or a pipe a key is one line
    for name, key in keys.items():
        if key.headings:
            print()
        for heading in key.headings:
            print(f"  {heading}")
        print(textwrap.fill(f"    {f'{name} = {key.default!r}':<40}  {key.comment}", columns,
                            subsequent_indent=" " * 46, break_on_hyphens=False,
                            break_long_words=False))

"""
Poor man's configurator, with its holes closed. A script writes its configuration as plain globals, one comment each:

    batch_size = 256  # responses an iteration, over all ranks [>= 1]
    config = configure(globals())

and then `python ppo.py config/llama.py config/mine.py --batch_size=64` overrides them: files and `--key=value` from left
to right. A config file is Python, run in a namespace of its own; every public name in it must already be a key of the
script (helpers start with an underscore). `--help` prints every key with its default and its comment.

The brackets at the end of a comment are the key's range, and they are enforced: [>= 1], [> 0], [0..1], [a | b | c].
So what the reader sees is what is checked, and the two cannot drift apart.
"""
import ast
import difflib
import io
import os
import re
import sys
import tokenize
import traceback
import warnings

from errors import BadConfig, first_line, one_line, report_and_exit, shorten


def configure(script_globals, argv=None):
    """
    Override the configuration globals of a script from config files and --key=value arguments.

    script_globals: the caller's globals(). Its configuration is every public int, float, bool or str assigned at the top
    level before the call. argv: default sys.argv[1:]. Returns the final configuration as a dict, in the script's order.
    Raises BadConfig on an unknown, repeated, mistyped or out-of-range key and on a missing or broken config file.
    """
    sys.excepthook = report_and_exit
    script = script_globals["__file__"]
    comments, headings = read_keys(script)
    keys = {k: script_globals[k] for k in comments}
    argv = sys.argv[1:] if argv is None else argv
    if "--help" in argv or "-h" in argv:
        if os.environ.get("RANK", "0") == "0":
            print_help(script, script_globals.get("__doc__"), keys, comments, headings)
            sys.stdout.flush()  # here, where a closed pipe (--help | head) is still ours to handle
        sys.exit(0)

    overrides = {}  # key -> (value, where it came from)
    given = set()
    for arg in argv:
        if arg.startswith("--"):
            key, equals, text = arg[2:].partition("=")
            check_key(key, keys, arg)
            if not equals:
                raise BadConfig(f"{arg}: a value is missing; type --{key}={keys[key]!r}")
            if key in given:
                raise BadConfig(f"--{key} is given twice; keep one")
            given.add(key)
            overrides[key] = (parse(key, text, keys[key]), "command line")
        else:
            for key, value in run_config_file(arg).items():
                check_key(key, keys, arg)
                overrides[key] = (convert(key, value, keys[key], arg), arg)
    for key, (value, where) in overrides.items():
        check_range(key, value, comments[key], where)
        script_globals[key] = keys[key] = value
    if os.environ.get("RANK", "0") == "0":
        for key, (value, where) in overrides.items():
            print(one_line(f"config: {key} = {value!r}  ({where})"))
    return keys


def read_keys(script):
    """
    {key: its comment}, {key: [headings above it]} for the `name = literal` lines above the script's call of configure. A
    heading is a comment on a line of its own.
    """
    with open(script, encoding="utf-8") as f:
        source = f.read()
    trailing, headings, pending = {}, {}, {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            text = token.string.lstrip("# ").strip()
            (trailing if token.line[:token.start[1]].strip() else pending)[token.start[0]] = text
    comments, above = {}, 0
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            if isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") == "configure":
                break
            name = node.targets[0].id
            try:
                value = ast.literal_eval(node.value)
            except ValueError:
                value = None  # computed from other names: not a key
            if isinstance(value, (bool, int, float, str)) and not name.startswith("_"):
                comments[name] = trailing.get(node.end_lineno, "")
                headings[name] = [t for n, t in pending.items() if above < n < node.lineno and t.strip("-")]
        above = node.end_lineno
    return comments, headings


def run_config_file(path):
    """Execute a config file in a fresh namespace; returns its public names. Raises BadConfig."""
    try:
        with open(path, encoding="utf-8") as f:
            source = f.read()
    except (OSError, ValueError) as e:  # ValueError: not UTF-8, or a zero byte in the path
        hint = "" if path.endswith(".py") else "; to set a key, type --key=value"
        raise BadConfig(f"cannot read config file {path!r}: {getattr(e, 'strerror', None) or e}{hint}") from e
    try:
        tree = ast.parse(source, path)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as e:  # the last two: nested too deep
        raise BadConfig(f"{path}, line {getattr(e, 'lineno', '?')}: {getattr(e, 'msg', e) or 'nested too deep'}") from e
    lines = {}
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        for name in (n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)):
            if name in lines:
                raise BadConfig(f"{path}, line {node.lineno}: {name} is set twice (first on line {lines[name]}); keep one")
            lines[name] = node.lineno
    namespace, limit = {"__file__": path}, sys.getrecursionlimit()
    try:
        try:
            exec(compile(tree, path, "exec"), namespace)
        finally:
            sys.setrecursionlimit(limit)  # the file may have lowered it, and all that follows needs it
    except (Exception, SystemExit) as e:  # whatever the user's own code raises is reported with its line
        frames = [f for f in traceback.extract_tb(e.__traceback__) if f.filename == path]
        raise BadConfig(f"{path}, line {frames[-1].lineno if frames else '?'}: {first_line(e)}") from e
    modules = type(ast)
    return {k: v for k, v in namespace.items() if not k.startswith("_") and not isinstance(v, modules)}


def check_key(key, keys, where):
    """Raise BadConfig, with the nearest name, unless key is one of keys."""
    if key not in keys:
        near = difflib.get_close_matches(key, keys, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "--help lists the keys"
        raise BadConfig(f"unknown key {key!r} ({where}); {hint}")


def parse(key, text, default):
    """The value that the text of --key=text stands for; the default's type decides how to read it. Raises BadConfig."""
    if isinstance(default, str):
        quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
        return text[1:-1] if quoted else text
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # text such as "1 is 1" is refused below, and needs no second line
            value = ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        value = text
    return convert(key, value, default, "command line")


def convert(key, value, default, where):
    """value as the type of default (an int will do for a float, nothing else is guessed). Raises BadConfig."""
    wanted = type(default)
    if wanted is float and type(value) is int and abs(value) < 2**1000:
        value = float(value)
    if type(value) is not wanted:
        raise BadConfig(f"{key} ({where}): wanted {wanted.__name__} like {default!r}, given "
                        f"{type(value).__name__} {shorten(value)}")
    if wanted is float and not abs(value) < 1e30:  # which also refuses NaN; beyond it, float32 would soon overflow
        raise BadConfig(f"{key} ({where}): wanted a finite number below 1e30, given {value}")
    if wanted is int and abs(value) > 2**62:  # sums of two such numbers still fit in 64 bits
        raise BadConfig(f"{key} ({where}): {shorten(value)} is beyond 2^62; wanted a smaller number")
    if wanted is str and not is_text(value):
        raise BadConfig(f"{key} ({where}): {shorten(value)} holds a zero byte or half a surrogate pair, "
                        "which is not text")
    return value


def is_text(value):
    """Whether a string can name a file: no zero bytes, no halves of surrogate pairs but those of bytes."""
    try:
        os.fsencode(value)
    except UnicodeEncodeError:
        return False
    return "\0" not in value


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
        raise BadConfig(f"{key} = {shorten(value)} ({where}) is out of range: [{rule}]; {comment[:match.start()].strip()}")


def print_help(script, doc, keys, comments, headings):
    """Every key with its default and comment, after the script's own docstring."""
    print((doc or "").strip())
    print(f"\nusage: python {os.path.relpath(script)} [config.py ...] [--key=value ...]\n")
    for key, value in keys.items():
        for heading in headings.get(key, ()):
            print(f"\n  {heading}")
        print(f"    {f'{key} = {value!r}':<40}  {comments[key]}")

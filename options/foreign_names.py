"""What others call a key, for the line of an unknown one: docs/coming_from_trl.md's tables."""
import difflib
import functools
import os
import re
from pathlib import Path

from configurator import read_keys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SCRIPTS = "ppo.py", "grpo.py", "sft.py", "rm.py"


def meant(key, keys, where):
    """What may be meant by a key that a script has not, as a clause; "" where nothing is alike."""
    if "-" in key and (key := key.replace("-", "_")) in keys:
        return f"did you mean {key!r}?"
    others = [script for script in SCRIPTS if key in keys_of(script)]
    # a wrong hint is worse than none
    near = difflib.get_close_matches(key, keys, n=1, cutoff=0.75)
    hint = (f"it is a key of {' and '.join(others)}" if others else hint_for(key, keys) or (
            f"did you mean {near[0]!r}?" if near else ""))
    positive = re.sub("^(no|disable)_(?=.)", "", key)
    if positive != key and isinstance(getattr(keys.get(positive), "default", None), bool):
        hint = f"type --{positive}=False"
    if where.endswith(".py") and not others:
        hint = f"{hint or '--help lists the keys'} (a name that is no key begins with _)"
    return hint


def hint_for(key, keys):
    """What to type in the place of another trainer's key, as a clause; "" of other keys."""
    for names, ours, remark in rows_of_page():
        if not any(f".{name}".endswith(f".{key}") for name in names):
            continue
        if ours == "nothing":
            return f"there is none here: {remark}"
        behind = f"; {remark}" if remark else ""
        named = keys_in(ours)
        of = [script for script in SCRIPTS if any(name in keys_of(script) for name in named)]
        if of and not any(name in keys for name in named):
            behind += f" (of {' and '.join(of)}, not of this script)"
        return f"here it is {ours}{behind}"
    return ""


def rows_of_page():
    """([their names], what to type here, what differs) of each row of the page's tables."""
    page = Path(ROOT, "docs", "coming_from_trl.md")  # a fork may lack it
    rows = re.findall(r"^\| (`.*`) \| (.*?) \| (.*?) ?\|$",
                      page.read_text("utf-8") if page.is_file() else "", re.MULTILINE)
    return [(re.findall("`(.*?)`", names), ours, remark) for names, ours, remark in rows]


def keys_in(ours):
    """The keys that a cell "what to type here" names, such as "lora=16 (ppo.py)"."""
    return re.findall(r"[a-z]\w*", re.sub(r"=\S+|\(.*?\)|recipes.*|torchrun.*", "", ours))


@functools.cache
def keys_of(script):
    """The script's own keys; none of a script that is not there, as in a fork."""
    path = os.path.join(ROOT, script)
    return read_keys(path) if os.path.isfile(path) else {}

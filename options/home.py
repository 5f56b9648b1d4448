"""Paths with ~, as --out_dir=~/out: bash reads it only where it begins a word."""
import os
import re

# keys of text that is no path, so a ~ in it is a ~
TEXTS = "prompt", "answer", "system_prompt", "stop_strings", "template_kwargs"


def from_home(text, key=""):
    """The value of a key: ~/out -> /home/me/out, also in lists: a,0.5*~/b.jsonl."""
    if key in TEXTS:
        return text
    return re.sub(r"(^|[,*:]\s*)(~[^,]*)", lambda m: m[1] + os.path.expanduser(m[2]), text)

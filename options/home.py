"""
Paths that begin with ~. bash makes a path of it only in a word that begins with it, and that of
--out_dir=~/out does not: the run would make a folder with the name ~.
"""
import os
import re

# keys of text that is no path, so a ~ in it is a ~
TEXTS = "prompt", "answer", "system_prompt", "stop_strings", "template_kwargs"


def from_home(text, key=""):
    """The value of a key: ~/out -> /home/me/out, also in lists: a,0.5*~/b.jsonl."""
    if key in TEXTS:
        return text
    return re.sub(r"(^|[,*:]\s*)(~[^,]*)", lambda m: m[1] + os.path.expanduser(m[2]), text)

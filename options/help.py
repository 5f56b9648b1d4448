"""`python ppo.py --help`: what a script is for, and its keys."""
import re
import textwrap

from errors import say


def print_help(script, doc, keys):
    """Print the script's docstring, and every key with its comment, in 80 columns."""
    def fill(text, indent=0):
        return textwrap.fill(text, 80, subsequent_indent=" " * indent, break_long_words=False,
                             break_on_hyphens=False)

    for paragraph in (doc or "").strip().split("\n\n"):
        table = re.search(r"^ |  ", paragraph, re.MULTILINE)  # or commands, or a list
        say((paragraph if table else fill(paragraph)) + "\n")
    say(f"usage: python {script} [config.py ...] [--key=value ...: they win]")
    say("keys (*: most runs set it; +: docs/algorithms.md#KEY says more):")
    for name, key in keys.items():
        if key.headings:
            say("")
        for heading in key.headings:
            say(fill(f"  {heading}", 2))
        comment = re.sub(r"\[(>=?) ", r"[\1", key.comment)  # a range stays on its line
        setting = f"    {f'{name} = {key.default!r}':<28}"
        if len(setting) > 32:
            say(setting)
            setting = " " * 32
        say(fill(f"{setting}  {comment}", 34))

"""`python ppo.py --help`: what a script is for, and its keys."""
import re
import textwrap

from errors import say


def print_help(script, doc, keys):
    """Print the script's docstring, and every key with its default and comment, in 80 columns."""
    def show(line, indent):
        say(textwrap.fill(line, 80, subsequent_indent=" " * indent, break_on_hyphens=False))

    for paragraph in (doc or "").strip().split("\n\n"):
        if re.search(r"^ |  ", paragraph, re.MULTILINE):  # commands, a list or a table
            for line in paragraph.split("\n"):
                column = len(re.match(r"(.*  )?", line)[0])  # the last one of a table
                show(line, column if column < 56 else 4)
        else:
            show(paragraph, 0)
        say("")
    say(f"usage: python {script} [config.py ...] [--key=value ...: they win]")
    say("keys (*: most runs set it):")
    for name, key in keys.items():
        if key.headings:
            say("")
        for heading in key.headings:
            show(f"  {heading}", 2)
        comment = re.sub(r"\[(>=?) ", r"[\1", key.comment)  # a range stays on its line
        show(f"    {f'{name} = {key.default!r}':<28}  {comment}", 34)

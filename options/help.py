"""`python ppo.py --help`: what a script is for, and its keys."""
import re
import shutil
import textwrap

from errors import say


def print_help(script, doc, keys):
    """Print the script's docstring, and every key with its comment, in 80 columns or fewer."""
    width = min(max(shutil.get_terminal_size((80, 24)).columns, 40), 80)
    wide = width >= 72

    def show(line, indent):
        if len(line) > width:
            line = textwrap.fill(line, width, subsequent_indent=" " * indent,
                                 break_long_words=False, break_on_hyphens=False)
        say(line)

    for paragraph in (doc or "").strip().split("\n\n"):
        if re.search(r"^(python)? |  ", paragraph, re.MULTILINE):  # commands, a list or a table
            for line in paragraph.split("\n"):
                column = len(re.match(r"(.*  )?( *\d\) )?", line)[0])  # the last one of a table
                if column > width - 24 and len(line) > width:  # no room beside the others: below
                    show(line[:column].rstrip(), 8)
                    line, column = " " * 8 + line[column:], 8
                show(line, column)
        else:
            show(paragraph, 0)
        say("")
    show(f"usage: python {script} [config.py ...] [--key=value ...: they win]", 4)
    show("keys (*: most runs set it; +: docs/algorithms.md#KEY says more):", 4)
    for name, key in keys.items():
        if key.headings:
            say("")
        for heading in key.headings:
            show(f"  {heading}", 2)
        comment = re.sub(r"\[(>=?) ", r"[\1", key.comment)  # a range stays on its line
        setting = f"    {f'{name} = {key.default!r}':<28}"
        if wide and len(setting) <= 32:
            show(f"{setting}  {comment}", 34)
        else:
            show(setting.rstrip(), 8)
            show(" " * (34 if wide else 8) + comment, 34 if wide else 8)

"""
What the scripts that make a task share: they read a command and write rows.
"""
import argparse
import collections
import contextlib
import json
import os
import sys

# Python looks for modules in a script's folder; ours are in the repository's, above this one.
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from errors import BadInput  # noqa: E402


def parser_of(doc):
    """An argparse parser that ends with one line. Its --help shows the script's docstring."""
    def error(said):
        raise BadInput(said)

    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = error
    return parser


def write_rows(folder, names, rows):
    """
    Write folder/NAME.jsonl for each of the names, and print how many rows each has. All files get
    their names at the end, or none: an old file might share rows with a new one.

    rows: (name, row) one by one; a string in place of the row says why one is dropped.
    """
    paths = {name: os.path.join(folder, f"{name}.jsonl") for name in names}
    kept, dropped = collections.Counter(), {name: collections.Counter() for name in names}
    os.makedirs(folder or ".", exist_ok=True)
    with contextlib.ExitStack() as stack:
        files = {name: stack.enter_context(open(path + ".part", "w", encoding="utf-8"))
                 for name, path in paths.items()}
        for name, row in rows:
            if isinstance(row, str):
                dropped[name][row] += 1
            else:
                files[name].write(json.dumps(row, default=str) + "\n")
                kept[name] += 1
    for name, path in paths.items():
        if not kept[name]:
            reasons = [reason for reason, _ in dropped[name].most_common(1)]
            raise BadInput(": ".join([f"no row is left for {path}", *reasons]))
    for name, path in paths.items():
        os.replace(path + ".part", path)
        reasons = "".join(f"; dropped {n}: {reason}" for reason, n in sorted(dropped[name].items()))
        print(f"{name}.jsonl: {kept[name]} rows{reasons}")

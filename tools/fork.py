"""
A folder of your own: a script, changed by recipes or not, with the files that it needs and no more.
It runs there with nothing else of this repository.

python tools/fork.py ppo.py mine                        # ppo.py and what it imports
python tools/fork.py grpo.py mine lora judging          # with options/lora.py, options/judging.py
python tools/fork.py kl_controller mine                 # ppo.py changed by a recipe
python tools/fork.py kl_controller,whiten_rewards mine  # by two, one after the other
python tools/fork.py dpo mine                           # recipes/dpo.py, a whole script
python tools/fork.py --refresh                          # a script has changed: mend the recipes

A recipe is recipes/NAME.diff: a few words, then for each file "--- OLD", "+++ NEW" and hunks. A
hunk begins with a line @@ and names the lines that it needs by their text: " " before a line that
stays, "-" before one that goes, "+" before a new one. "-..." stands for all lines up to the next
one of the hunk. The lines of a hunk must be found at exactly one place; their numbers do not count.
"""
import ast
import os
import re
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
RECIPES = os.path.join(ROOT, "recipes")
SCRIPTS = "ppo.py", "grpo.py", "sft.py", "rm.py"
sys.path.insert(0, ROOT)

from errors import BadInput, report_errors  # noqa: E402


def read(path):
    """The text of a file."""
    with open(path, encoding="utf-8") as f:
        return f.read()


def write(path, text):
    """Write a text; the folder is made where there is none."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as f:
        f.write(text)


# --------------------------------------------------------------------------------------------------
# recipes


def read_recipe(name):
    """
    The words at the head of recipes/NAME.diff, and its changes, [(old file, new file, hunks)]; a
    hunk is a list of lines. Raises BadInput.
    """
    known = sorted(os.path.splitext(file)[0] for file in os.listdir(RECIPES))
    if not os.path.isfile(f"{RECIPES}/{name}.diff"):
        raise BadInput(f"there is no recipe {name!r}; the recipes are {', '.join(known)}")
    head, *parts = re.split(r"^--- (.+)\n\+\+\+ (.+)\n@@\n", read(f"{RECIPES}/{name}.diff"),
                            flags=re.MULTILINE)
    return head, [(old, new, [hunk.splitlines() for hunk in re.split(r"^@@\n", body, flags=re.M)])
                  for old, new, body in zip(parts[::3], parts[1::3], parts[2::3], strict=True)]


def write_recipe(name, head, changes):
    """The recipe's file, as read_recipe reads it."""
    text = head
    for old, new, hunks in changes:
        text += f"--- {old}\n+++ {new}\n"
        text += "".join("@@\n" + "".join(f"{line}\n" for line in hunk) for hunk in hunks)
    write(f"{RECIPES}/{name}.diff", text)


def places(hunk, source):
    """Where in a source the lines are that a hunk names: [re.Match]."""
    pattern, gap = "", ""
    for line in hunk:
        if line == "-...":
            gap = r"(?:.*\n)*?"
        elif not line.startswith("+"):
            pattern += gap + re.escape(line[1:]) + r"\n"
            gap = ""
    return list(re.finditer(f"^{pattern}", source, re.MULTILINE)) if pattern else []


def apply(hunks, source, where):
    """A source after hunks. where: the beginning of messages. Raises BadInput."""
    for hunk in hunks:
        found = places(hunk, source)
        if len(found) != 1:
            raise BadInput(f"{where} {trouble(hunk, source)}")
        new = "".join(f"{line[1:]}\n" for line in hunk if not line.startswith("-"))
        source = source[:found[0].start()] + new + source[found[0].end():]
    return source


def trouble(hunk, source):
    """Why a hunk has not one place in a source."""
    lines = [line[1:] for line in hunk if not line.startswith("+") and line != "-..."]
    missing = [line for line in lines if line not in source.split("\n")]
    if missing:
        return f"has no line {missing[0].strip()!r} (any more)"
    first = next(filter(None, map(str.strip, lines)), "")
    return f"has {len(places(hunk, source))} places for the lines that begin with {first!r}"


def mended(hunk, source):
    """
    The hunk, changed as little as can be so that it has one place: indented as the source is now,
    or without the line that stays at its beginning, or at its end. None where that is not enough.
    """
    bare = [hunk, *([hunk[1:]] if hunk[0][:1] in ("", " ") else []),
            *([hunk[:-1]] if hunk[-1][:1] in ("", " ") else [])]
    for lines in bare:
        for shift in range(-16, 17, 4):
            moved = [line if line == "-..." or not line[1:].strip() else
                     line[0] + " " * shift + line[1:] if shift >= 0 else
                     line[0] + line[1:].removeprefix(" " * -shift) for line in lines]
            if len(places(moved, source)) == 1:
                return moved
    return None


def refresh():
    """Mend all recipes. Returns lines of which were changed or cannot be, and if there are such."""
    lines, broken = [], False
    for file in sorted(file for file in os.listdir(RECIPES) if file.endswith(".diff")):
        (head, changes), lost = read_recipe(file[:-5]), []
        better = []
        for old, new, hunks in changes:
            source, fitting = "" if old == "/dev/null" else read(f"{ROOT}/{old}"), []
            for hunk in hunks:
                fits = not source or len(places(hunk, source)) == 1
                fitting.append(hunk if fits else mended(hunk, source))
                if fitting[-1] is None:
                    lost.append(f"recipes/{file} cannot be mended: {old} {trouble(hunk, source)}")
            better.append((old, new, fitting))
        lines, broken = lines + lost, broken or bool(lost)
        if not lost and better != changes:
            write_recipe(file[:-5], head, better)
            lines.append(f"recipes/{file} is mended")
    return lines, broken


# --------------------------------------------------------------------------------------------------
# files


def imported(source):
    """
    The files that a source takes along: all that it imports at its top, and of those that it
    imports later the core's. Options, which are loaded where their key is set, are asked for; but
    no key asks for options/assistant.py, which any chat may need.
    """
    found, tree = set(), ast.parse(source)
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        files = {name.replace(".", "/") + ".py" for name in names}
        found |= {file for file in files if os.path.isfile(f"{ROOT}/{file}")
                  and ("/" not in file or node in tree.body or file == "options/assistant.py")}
    return found


def option_file(name):
    """The file of an option: lora, lora.py or options/lora.py. Raises BadInput."""
    bare = os.path.basename(name).removesuffix(".py")
    for file in (f"options/{bare}.py", f"grading/{bare}.py"):
        if os.path.isfile(f"{ROOT}/{file}"):
            return file
    raise BadInput(f"there is no option {name!r}: neither options/{bare}.py nor grading/{bare}.py")


def fork(what, folder, options):
    """Fill a folder with what is asked for. Returns the scripts in it. Raises BadInput."""
    if os.path.exists(folder) and (not os.path.isdir(folder) or os.listdir(folder)):
        raise BadInput(f"{folder} exists and is not empty; name another folder")
    changed, scripts = {}, {}  # {file: text}; {script: the script of ours that it was}
    what += ".py" * (f"{what}.py" in SCRIPTS)
    if what in SCRIPTS or os.path.isfile(f"{RECIPES}/{what}.py"):
        script = what if what in SCRIPTS else f"{what}.py"
        scripts[script] = script
        changed[script] = read(f"{ROOT if what in SCRIPTS else RECIPES}/{script}")
    recipes = what.split(",") if not scripts else []
    for number, name in enumerate(recipes):
        for old, new, hunks in read_recipe(name)[1]:
            if old == "/dev/null":
                changed[new] = "".join(f"{line[1:]}\n" for line in hunks[0])
                continue
            source = changed.pop(old, None) or read(f"{ROOT}/{old}")
            after = f" after {', '.join(recipes[:number])}" if number else ""
            changed[new] = apply(hunks, source, f"recipes/{name}.diff{after}: {old}")
            if old in scripts or old in SCRIPTS:
                scripts[new] = scripts.pop(old, old)
    if not scripts:  # the recipe changes another file
        scripts["ppo.py"] = "ppo.py"
    left = [*changed, *scripts, *map(option_file, options)]
    files = {"keys.py", "rl_keys.py", "LICENSE", "requirements.txt"}
    files |= {f"config/arithmetic_{old}" for old in scripts.values()}
    while left:
        file = left.pop()
        files.add(file)
        changed[file] = changed.get(file) or read(f"{ROOT}/{file}")
        left += imported(changed[file]) - files
    for file in files:
        write(f"{folder}/{file}", changed.get(file) or read(f"{ROOT}/{file}"))
    return scripts, len(files)


def main():
    report_errors()
    arguments = sys.argv[1:]
    if arguments == ["--refresh"]:
        lines, broken = refresh()
        print("\n".join(lines or ["all recipes are in step"]))
        sys.exit(1 if broken else 0)
    if len(arguments) < 2 or arguments[0].startswith("-"):
        print(__doc__.strip())
        sys.exit(0 if arguments in (["--help"], ["-h"]) else 2)
    what, folder, *options = arguments
    scripts, count = fork(what, folder, options)
    for script, ours in scripts.items():
        print(f"{folder}: {count} files; python {folder}/{script} "
              f"{folder}/config/arithmetic_{ours}")


if __name__ == "__main__":
    main()

"""
Which changes of the code do the tests notice? A mutant is a source file with one place changed: a sign, a comparison, a mask,
a call left out. The tests of that file should fail then. Not a test.

    python tests/mutants.py list [gae.py loss.py ...]     # the mutants of these files, or of all
    python tests/mutants.py run [gae.py loss.py ...]      # tried; the results go to mutants.tsv
    python tests/mutants.py written [gae.py loss.py ...]  # of these only the ones that somebody has written there, see below
    python tests/mutants.py table                         # the share killed, by file and by kind

`run` works in a scratch copy of the repository and passes over what mutants.tsv has already, so it may be stopped and started
again. The same code and seed give the same mutants. A test that hangs has noticed, too. "open" in mutants.tsv: `run` tries
these (again). "same", written by hand: nothing that counts is changed. Who has a mutant of their own in mind writes it there as
a line of the kind "written", with a whole line of the file, its new text and the result "open".
Last tried at commit 9b97e63: of 114 mutants 26 computed the same, 86 were noticed, and two were not: examples.py, `if trained[0]
or not any(trained)` with `and`, since rows.py refuses such rows before, and run.py, a fresh run's `skipped=1` in float16.
Of 83 that were written 81 are noticed, and two compute the same. Those that were noticed, 137, were tried again at commit
5388c96: all were, but for one of calibration_error, which has a test since.
"""
import ast
import collections
import copy
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
RESULTS = os.path.join(ROOT, "tests", "mutants.tsv")
COLUMNS = "file line kind original mutated result test seconds".split()
SEED, LIMIT = 1, 300  # LIMIT: seconds for the tests of a mutant
# how many mutants of a file (0: only what is written); the tests that should see them, as file or file and a word of its
# tests; and of test_by_hand.py the runs of which scripts
TESTS = {
    "ppo.py": (16, "", "ppo"), "grpo.py": (14, "", "grpo"), "sft.py": (6, "", "sft"), "rm.py": (8, "", "rm"),
    "gae.py": (8, "gae", "ppo"), "loss.py": (14, "loss", "ppo or grpo or rm"), "relatives.py": (8, "grpo_loss", "grpo"),
    "rollout.py": (12, "rollout", "grpo"), "rewards.py": (8, "rewards, reward_models", "ppo or grpo"),
    "prompts.py": (8, "prompts, formats and epochs", "ppo or sft"), "parallel.py": (10, "parallel", "ppo or grpo"),
    "model.py": (10, "model", "ppo or rm"), "options/roles.py": (8, "roles, parallel and words", "generate or score or roles"),
    "run.py": (6, "ppo and sabotage", "ppo or grpo or sft"), "report.py": (0, "", "ppo or grpo"),
    "options/lora.py": (0, "lora", "rm or shared or adapters"),
    "trunk.py": (0, "lora", "rm or shared or adapters"), "tokenizer.py": (0, "", "ppo or grpo"),
    "optimizers.py": (0, "zero and adafactor, knobs and resumed_run", "ppo or grpo"),
    "checkpoint.py": (0, "knobs and resumed_run", "ppo or grpo"), "examples.py": (0, "formats, loss", "sft or rm or ppo"),
    "options/ptx.py": (0, "", "ppo"), "options/refill.py": (0, "prompts", "grpo"),
    "audit.py": (0, "parallel, ppo and sabotage, roles and fails", "one and token"),
    "load.py": (0, "model", "one and token"), "options/teachers.py": (0, "", "rm"),
    "tools/policies.py": (0, "rollout", "one and token"),
    "tools/figures.py": (0, "eval", "one and token"), "tools/eval.py": (0, "eval", "one and token")}
# of the runs by hand first a few, then those on one rank, then all: most mutants are noticed by the first
WAYS = "(learned or gspo or plain or again or generate)", "alone", ""

# --------------------------------------------------------------------------------------------------
# the mutants of a file

SWAPS = {
    ast.Add: ("sign", ast.Sub), ast.Sub: ("sign", ast.Add), ast.Mult: ("times", ast.Div), ast.Div: ("times", ast.Mult),
    ast.Pow: ("times", ast.Mult), ast.Mod: ("times", ast.FloorDiv), ast.BitAnd: ("logic", ast.BitOr), ast.And: ("logic", ast.Or),
    ast.Or: ("logic", ast.And), ast.BitOr: ("logic", ast.BitAnd), ast.Lt: ("compare", ast.LtE), ast.LtE: ("compare", ast.Lt),
    ast.Gt: ("compare", ast.GtE), ast.GtE: ("compare", ast.Gt), ast.Eq: ("compare", ast.NotEq), ast.NotEq: ("compare", ast.Eq),
    ast.Is: ("compare", ast.IsNot), ast.IsNot: ("compare", ast.Is),
    ast.In: ("compare", ast.NotIn), ast.NotIn: ("compare", ast.In)}
OTHERS = dict(min="max", minimum="maximum", amin="amax", any="all", exp="log", floor="ceil", sum="mean", sqrt="square")
OTHERS |= {other: name for name, other in OTHERS.items() if other != "log"}  # run.log
MASKS = re.compile(r"(.*\b)?(mask|\w+_mask|counted|real)(['\"]\])?")  # `mask`, `mb["response_mask"]`
DIMS = "sum cumsum gather scatter_ any amax amin unsqueeze cat shape".split()
# what is only said, or only a hint: nothing below these is changed
SAID = (ast.Raise, ast.JoinedStr, ast.Assert, ast.arguments, ast.Import, ast.ImportFrom)
WORDS = re.compile(r"(print|lost|say|say_\w+|announce|append_line|warn)\b")


def nodes(parent):
    """(parent, node) of all code below a node."""
    for node in ast.iter_child_nodes(parent):
        if not isinstance(node, SAID) and not WORDS.match(ast.unparse(getattr(node, "func", ast.Pass()))):
            yield parent, node
            yield from nodes(node)


def changes(parent, node):
    """(kind, the node that takes its place) of what may be changed at a node."""
    def other(**fields):
        changed = copy.copy(node)
        vars(changed).update(fields)
        return changed

    op = getattr(node, "op", None) or getattr(node, "ops", [None])[0]
    text = isinstance(node, ast.BinOp) and any(isinstance(getattr(x, "value", 0), str) for x in (node.left, node.right))
    if type(op) in SWAPS and not text:
        kind, new = SWAPS[type(op)]
        yield kind, other(ops=[new(), *node.ops[1:]]) if isinstance(node, ast.Compare) else other(op=new())
    if isinstance(op, (ast.Div, ast.FloorDiv)) and isinstance(node, ast.BinOp):
        yield "denominator", other(right=ast.BinOp(node.right, ast.Add(), ast.Constant(1)))
    if isinstance(op, (ast.Not, ast.Invert, ast.USub)):
        yield "sign" if isinstance(op, ast.USub) else "not", node.operand
    if isinstance(node, ast.Constant) and type(node.value) in (bool, int, float):
        owner = getattr(parent, "func", getattr(parent, "value", None))  # x.sum(1), x.shape[1]
        if isinstance(node.value, bool):
            yield "bool", other(value=not node.value)
        elif node.value in (0, 1) and getattr(owner, "attr", "") in DIMS:
            yield "axis", other(value=1 - node.value)
        else:
            yield "number", other(value=node.value + 1 if abs(node.value) < 64 else node.value * 2)
    if isinstance(node, (ast.If, ast.IfExp)) and isinstance(node.test, (ast.Name, ast.Attribute)):
        yield "not", ast.copy_location(ast.UnaryOp(ast.Not(), node.test), node.test)
    if isinstance(node, ast.Call):
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name in OTHERS and not (isinstance(node.func, ast.Name) and name == "sum"):
            func = copy.copy(node.func)
            setattr(func, "attr" if isinstance(func, ast.Attribute) else "id", OTHERS[name])
            yield "function", other(func=func)
        inputs = [x for x in node.args[:1] if isinstance(x, (ast.Name, ast.Subscript))]
        if inputs and isinstance(parent, (ast.Return, ast.Assign)) and not isinstance(parent.value, ast.Tuple):
            yield "input", inputs[0]  # f(x, y) becomes x
        if isinstance(parent, ast.Expr):
            yield "dropped", ast.Constant(None)
    if isinstance(getattr(node, "ctx", None), ast.Load) and isinstance(parent, (ast.Call, ast.BinOp, ast.UnaryOp)):
        if isinstance(node, (ast.Name, ast.Subscript)) and MASKS.fullmatch(ast.unparse(node)):
            yield "mask", ast.parse(f"torch.ones_like({ast.unparse(node)})", mode="eval").body


def mutants_of(file):
    """All mutants of a file: [(file, line, kind, old line, new line, new source)]."""
    with open(os.path.join(ROOT, file), encoding="utf-8") as f:
        source = f.read()
    lines, found = source.split("\n"), []
    begins = next((i for i, line in enumerate(lines) if "= configure(globals" in line), 0)  # behind the keys
    for parent, node in nodes(ast.parse(source)):
        for kind, new in changes(parent, node):
            # an `if` whose test is changed: the place is the test's
            place = new.operand if kind == "not" and isinstance(node, (ast.If, ast.IfExp)) else node
            row, end = place.lineno - 1, place.end_lineno - 1
            if row < begins or "cuda" in lines[row]:
                continue
            head = lines[row].encode()[:place.col_offset].decode()
            tail = lines[end].encode()[place.end_col_offset:].decode()
            wrapped = isinstance(place, (ast.BinOp, ast.BoolOp, ast.Compare, ast.UnaryOp)) and not isinstance(new, ast.Name)
            changed = f"{head}({ast.unparse(new)}){tail}" if wrapped else f"{head}{ast.unparse(new)}{tail}"
            kind = "collective" if kind == "dropped" and "# COLLECTIVE" in lines[row] else kind
            new_source = "\n".join([*lines[:row], changed, *lines[end + 1:]])
            found.append((file, str(row + 1), kind, " ".join(map(str.strip, lines[row:end + 1])), changed.strip(), new_source))
    return found


def chosen(file):
    """Mutants of a file, spread evenly over it; of each stretch first a kind is drawn, and then one of it."""
    every, rng, picked = mutants_of(file), random.Random(f"{SEED} {file}"), []
    count = min(TESTS[file][0], len(every))
    for i in range(count):
        some = every[i * len(every) // count:(i + 1) * len(every) // count]
        kind = rng.choice(sorted({mutant[2] for mutant in some}))
        picked.append(rng.choice([mutant for mutant in some if mutant[2] == kind]))
    return picked


def written(file):
    """The mutants of a file that stand in mutants.tsv as "written" and are open, as mutants_of returns them."""
    with open(os.path.join(ROOT, file), encoding="utf-8") as f:
        lines, found = f.read().split("\n"), []
    for row in read_results().values():
        if row[0] == file and row[2] == "written" and row[5] == "open":
            places = [i for i, line in enumerate(lines) if line.strip() == row[3]]
            assert places, f"{file} has no line {row[3]!r}"
            i = min(places, key=lambda i: abs(i + 1 - int(row[1])))
            new = lines[i].replace(row[3], row[4])
            found.append((*row[:5], "\n".join([*lines[:i], new, *lines[i + 1:]])))
    return found


# --------------------------------------------------------------------------------------------------
# trying them


def arguments(file, way):
    """pytest's: the tests of a file, and the runs by hand."""
    names = [f"test_{name}" for name in TESTS[file][1].split(", ") if name] if way == WAYS[0] else []
    files = [f"tests/{name.split()[0]}.py" for name in [*names, "test_by_hand"]]
    runs = f"agrees and ({TESTS[file][2]})" + f" and {way}" * bool(way)
    return [*files, "-k", " or ".join(f"({name})" for name in [*names, runs])]


def try_mutant(mutant, way, scratch, world, expected):
    """
    Whether these tests of its file notice it: (killed, survived or timeout; the test that failed).
    In a child that imports the house anew, from the scratch copy, and forks all runs itself.
    """
    path, said = os.path.join(scratch, "repository", mutant[0]), os.path.join(scratch, "said")
    with open(path, encoding="utf-8") as f:
        original = f.read()
    with open(path, "w", encoding="utf-8") as f:
        f.write(mutant[-1])
    pid = os.fork()
    if pid == 0:
        os.setsid()
        for fd, flags in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
            os.dup2(os.open(said if fd == 1 else os.devnull, flags | os.O_CREAT | os.O_TRUNC), fd)
        code = 3
        try:
            code = run_tests(arguments(mutant[0], way), scratch, world, expected)
        except BaseException as e:  # an import that fails, say
            print(f"{type(e).__name__}: {e}", flush=True)
        finally:
            os._exit(code)
    began = time.monotonic()
    while not (done := os.waitpid(pid, os.WNOHANG))[0] and time.monotonic() - began < LIMIT:
        time.sleep(0.1)
    try:
        os.killpg(pid, signal.SIGKILL)  # also whatever its tests have started
    except ProcessLookupError:
        pass
    with open(path, "w", encoding="utf-8") as f:
        f.write(original)
    if not done[0]:
        os.waitpid(pid, 0)
        return "timeout", ""
    with open(said, encoding="utf-8", errors="replace") as f:
        said = f.read()
    failed = re.search(r"^(?:FAILED|ERROR) (?:tests/)?(\S+\.py(?:::\w+)?)", said, re.M)
    if os.waitstatus_to_exitcode(done[1]) in (0, 5):  # 5: there are no such tests
        return "survived", ""
    return "killed", failed[1] if failed else said.strip().splitlines()[-1] if said.strip() else "crashed"


def run_tests(asked, scratch, world, expected):
    """pytest's exit code, in this process: with the repository in scratch, and the runs by hand as they are known."""
    root = os.path.join(scratch, "repository")
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        if file.startswith(ROOT + os.sep) and "site-packages" not in file and name != "__main__":
            del sys.modules[name]
    sys.path[:] = [root, os.path.join(root, "tests"), *(p for p in sys.path if not f"{p}/".startswith(f"{ROOT}/"))]
    os.chdir(root)
    sys.dont_write_bytecode = True
    tempfile.tempdir = tempfile.mkdtemp(dir=scratch)
    import pytest
    import campaign
    import forked
    import test_by_hand
    import tiny
    campaign.LONGEST = LIMIT
    campaign.warm()
    os.fsync = lambda fd: None
    tiny.start_forker = lambda: None
    tiny.ask_forker = lambda asked: forked.answer(*asked)
    test_by_hand.build = lambda folder: world
    test_by_hand.worked_out = lambda world, script, keys: expected[str((script, keys))]
    return int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", f"--basetemp={tempfile.mkdtemp()}/t", *asked]))


def read_results():
    """{what names a mutant: its row}."""
    if not os.path.exists(RESULTS):
        return {}
    with open(RESULTS, encoding="utf-8") as f:
        rows = [line.rstrip("\n").split("\t") for line in f if not line.startswith("#")]
    return {tuple(row[:5]): row for row in rows if row != COLUMNS}


def run(files, only_written):
    """Try the mutants of the files in a shuffled order: a run that is stopped has tried some of each."""
    import torch

    sys.path[:0] = [ROOT, os.path.join(ROOT, "tests")]
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", PYTHONDONTWRITEBYTECODE="1")
    torch.set_num_threads(1)  # a forked child has none of its parent's threads
    import campaign  # noqa: F401, which imports all that the runs need
    import test_by_hand

    every = [mutant for file in files for mutant in [*([] if only_written else chosen(file)), *written(file)]]
    random.Random(SEED).shuffle(every)
    with tempfile.TemporaryDirectory() as scratch:
        shutil.copytree(ROOT, os.path.join(scratch, "repository"), ignore=shutil.ignore_patterns(".git", ".venv"))
        os.mkdir(os.path.join(scratch, "world"))
        world = test_by_hand.build(os.path.join(scratch, "world"))
        expected = {str(case): test_by_hand.worked_out(world, *case) for case in test_by_hand.CASES.values()}
        with open(os.path.join(ROOT, "gae.py"), encoding="utf-8") as f:  # without any change, nothing may fail
            assert try_mutant(("gae.py", f.read()), WAYS[0], scratch, world, expected)[0] == "survived"
        for mutant in every:
            if read_results().get(mutant[:5], ["open"] * 6)[5] != "open":
                continue
            began = time.monotonic()
            for way in WAYS:
                result = try_mutant(mutant, way, scratch, world, expected)
                if result[0] != "survived":
                    break
            row = [*mutant[:5], *result, f"{time.monotonic() - began:.1f}"]
            with open(RESULTS, "a", encoding="utf-8") as f:
                f.write("\t".join(row) + "\n")
            print(*row[:3], *row[5:], flush=True)


def table():
    """The share killed, by file and by kind, in Markdown."""
    rows = list(read_results().values())
    for column in (0, 2):
        print(f"\n| {COLUMNS[column]} | mutants | noticed | survived |\n|---|---|---|---|")
        for name in [*sorted({row[column] for row in rows}), "all"]:
            count = collections.Counter(row[5] for row in rows if name in (row[column], "all"))
            print(f"| {name} | {count.total() - count['same']} | {count['killed'] + count['timeout']} | {count['survived']} |")


if __name__ == "__main__":
    what, files = sys.argv[1], sys.argv[2:] or list(TESTS)
    if what == "list":
        for mutant in [mutant for file in files for mutant in chosen(file)]:
            print(*mutant[:3], f"\n    {mutant[3]}\n    {mutant[4]}")
    elif what in ("run", "written"):
        run(files, what == "written")
    else:
        table()

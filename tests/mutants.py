"""
Which changes of the code do the tests notice? A mutant is a source file with one place changed: a
sign, a comparison, a mask, a call left out. The tests of that file should fail then. Not a test.

    python tests/mutants.py list [gae.py loss.py ...]     # the mutants of these files, or of all
    python tests/mutants.py run [gae.py loss.py ...]      # tried; the results go to mutants.tsv
    python tests/mutants.py table                         # the share killed, by file and by kind

`run` works in a scratch copy of the repository and passes over what mutants.tsv has already, so it
may be stopped and started again. The same code, number and seed give the same mutants, and what
stands in mutants.tsv can be found by its line of code. A test that hangs has noticed, too.
"""
import ast
import itertools
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
SEED, LIMIT = 1, 400  # LIMIT: seconds for the tests of a mutant


# how many mutants of a file; the files of tests that should see them, and of test_by_hand.py the runs of which scripts
TESTS = {
    "ppo.py": (14, "", "ppo"), "grpo.py": (14, "", "grpo"), "sft.py": (5, "", "sft"), "rm.py": (8, "", "rm"),
    "gae.py": (8, "gae", "ppo"), "loss.py": (14, "loss", "ppo or grpo or rm"), "relatives.py": (8, "grpo_loss", "grpo"),
    "rollout.py": (12, "rollout", "grpo"), "rewards.py": (8, "rewards scores", "ppo or grpo"),
    "data.py": (8, "data", "ppo or sft"), "parallel.py": (10, "parallel", "ppo or grpo"),
    "model.py": (10, "model", "ppo or rm"), "batches.py": (8, "", "generate or score or roles"),
    "engine/run.py": (6, "", "ppo or sft")}


def arguments(file, way):
    """pytest's. way: "alone" leaves the runs on one rank, which take a quarter of the time."""
    names = [f"test_{name}.py" for name in TESTS[file][1].split() + ["by_hand"]]
    runs = f"({TESTS[file][2]}) and agrees" + f" and {way}" * bool(way)
    return [*(f"tests/{name}" for name in names), "-k", " or ".join([*names[:-1], f"({runs})"])]

SWAPS = {  # an operator of the syntax tree: (kind, what it looks like, what it becomes)
    ast.Add: ("sign", "+", "-"), ast.Sub: ("sign", "-", "+"), ast.Mult: ("times", "*", "/"),
    ast.Div: ("times", "/", "*"), ast.Mod: ("times", "%", "//"),
    ast.Pow: ("times", "**", "*"), ast.BitAnd: ("logic", "&", "|"), ast.BitOr: ("logic", "|", "&"),
    ast.And: ("logic", "and", "or"), ast.Or: ("logic", "or", "and"),
    ast.Lt: ("compare", "<", "<="), ast.LtE: ("compare", "<=", "<"),
    ast.Gt: ("compare", ">", ">="), ast.GtE: ("compare", ">=", ">"),
    ast.Eq: ("compare", "==", "!="), ast.NotEq: ("compare", "!=", "=="),
    ast.Is: ("compare", "is", "is not"), ast.IsNot: ("compare", "is not", "is"),
    ast.In: ("compare", "in", "not in"), ast.NotIn: ("compare", "not in", "in")}
OTHERS = dict(min="max", minimum="maximum", amin="amax", any="all", argmin="argmax", exp="log",
              floor="ceil", sum="mean", zeros_like="ones_like", sqrt="square")
OTHERS |= {other: name for name, other in OTHERS.items()}
MASKS = re.compile(r"(.*\b)?(mask|m|\w+_mask|counted|real)(\"\])?")  # `mask`, `mb["response_mask"]`
WORDS = re.compile(r"(print|lost|reason|naming|say_\w+|announce|append_line|warn)\b")  # what is said

HINTS = "annotation returns decorator_list defaults kw_defaults".split()
DIMS = "sum cumsum gather scatter_ index_copy any amax amin unsqueeze squeeze cat shape nanmean".split()
MODULES = re.compile(r"(torch|math|self|os|build|parallel|launch|report|run|time|json|F|nn|dist|collections)\b")


def nodes(parent):
    """(parent, node) of all code below a node, without what is only said, or is a type hint."""
    for name, value in ast.iter_fields(parent):
        for node in value if isinstance(value, list) else [value]:
            words = getattr(node, "name", None) or ast.unparse(getattr(node, "func", ast.Pass()))
            if (not isinstance(node, ast.AST) or name in HINTS
                    or isinstance(node, (ast.Raise, ast.JoinedStr, ast.Assert)) or WORDS.match(words)):
                continue
            yield parent, node
            yield from nodes(node)


def changes(parent, node, text):
    """(kind, node or pair of nodes to replace, the new text) of what may be changed at a node."""
    if isinstance(node, (ast.BinOp, ast.BoolOp, ast.Compare)):
        ops = node.ops if isinstance(node, ast.Compare) else [node.op]
        operands = ([node.left, node.right] if isinstance(node, ast.BinOp) else
                    node.values if isinstance(node, ast.BoolOp) else [node.left, *node.comparators])
        said = (ast.JoinedStr, ast.List)
        for op, (a, b) in zip(itertools.cycle(ops), itertools.pairwise(operands)):
            strings = any(isinstance(x, said) or isinstance(getattr(x, "value", 0), str)
                          for x in (a, b)) and isinstance(op, (ast.Add, ast.Mult))
            if type(op) in SWAPS and not strings:
                kind, old, new = SWAPS[type(op)]
                yield kind, (a, b), lambda gap, old=old, new=new: gap.replace(old, new, 1)
            if isinstance(op, (ast.Div, ast.FloorDiv)):
                yield "denominator", b, f"({text(b)} + 1)"
    elif isinstance(node, ast.AugAssign) and isinstance(node.op, (ast.Add, ast.Sub)):
        yield "sign", (node.target, node.value), lambda gap: gap.translate({43: "-", 45: "+"})
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield "bool", node, str(not node.value)
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        owner = getattr(parent, "func", getattr(parent, "value", node))  # x.sum(1), x.shape[1]
        dim = node.value in (0, 1) and getattr(owner, "attr", "") in DIMS
        other = node.value + 1 if abs(node.value) < 64 else node.value * 2
        yield "axis" if dim else "number", node, str(1 - node.value if dim else other)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.Invert, ast.USub)):
        minus = isinstance(node.op, ast.USub)
        yield "sign" if minus else "not", node, text(node.operand)
        if minus and isinstance(node.operand, ast.Constant) and isinstance(parent, ast.Call):
            yield "axis", node, "0"
    elif isinstance(node, (ast.If, ast.IfExp)) and isinstance(node.test, (ast.Name, ast.Attribute)):
        if "master" not in text(node.test):
            yield "not", node.test, f"(not {text(node.test)})"
    elif isinstance(node, ast.Attribute) and node.attr in OTHERS and isinstance(parent, ast.Call):
        if text(node) == "run.log":
            return
        yield "function", node, text(node)[:-len(node.attr)] + OTHERS[node.attr]
    elif isinstance(node, ast.Name) and node.id in OTHERS and isinstance(parent, ast.Call):
        if node is parent.func and node.id not in ("sum", "first", "last"):
            yield "function", node, OTHERS[node.id]
    elif isinstance(node, ast.keyword) and node.arg in ("min", "max", "dim"):
        yield "function", node, f"{OTHERS.get(node.arg, 'axis')}={text(node.value)}"
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "dropped", node, "pass"
    if isinstance(node, (ast.Return, ast.Assign)) and isinstance(node.value, ast.Call):
        call = node.value  # f(x, y) becomes x, and x.f(y), too
        owner = getattr(call.func, "value", None)
        inputs = [x for x in [owner, *call.args[:1]] if isinstance(x, (ast.Name, ast.Subscript))]
        inputs = [text(x) for x in inputs if not MODULES.match(text(x))]
        if inputs and not isinstance(getattr(node, "targets", [0])[0], ast.Tuple):
            yield "input", call, inputs[0]
    if isinstance(node, (ast.Name, ast.Subscript)) and isinstance(node.ctx, ast.Load):
        if MASKS.fullmatch(text(node)) and isinstance(parent, (ast.Call, ast.BinOp, ast.UnaryOp)):
            yield "mask", node, f"torch.ones_like({text(node)})"


def mutants_of(file, root=ROOT):
    """All mutants of a file, from its top to its end: [(file, line, kind, old line, new line, new source)]."""
    with open(os.path.join(root, file), "rb") as f:
        source = f.read()
    begins = [0, *itertools.accumulate(map(len, source.splitlines(keepends=True)))]
    call = re.search(rb"\n[\w, ]+ = configure\(globals", source)
    keys_end = source.count(b"\n", 0, call.start() + 1) + 1 if call else 1

    def begin(node):
        return begins[node.lineno - 1] + node.col_offset

    def end(node):
        return begins[node.end_lineno - 1] + node.end_col_offset

    def text(node):
        return source[begin(node):end(node)].decode()

    found = {}
    for parent, node in nodes(ast.parse(source)):
        for kind, place, new in changes(parent, node, text):
            a, b = (end(place[0]), begin(place[1])) if isinstance(place, tuple) else (begin(place), end(place))
            old = source[a:b].decode()
            new = new(old) if callable(new) else new
            changed = source[:a] + new.encode() + source[b:]
            place = a + next((i for i, (x, y) in enumerate(zip(old, new, strict=False)) if x != y), 0)
            line = source.count(b"\n", 0, place)
            lines = [each.split(b"\n")[line].decode().strip() for each in (source, changed)]
            if line >= keys_end and lines[0] != lines[1] and "cuda" not in lines[0]:
                kind = "collective" if kind == "dropped" and "# COLLECTIVE" in lines[0] else kind
                found[line + 1, place, kind] = (file, str(line + 1), kind, *lines, changed)
    return [found[key] for key in sorted(found)]


def chosen(file):
    """Mutants of a file, spread evenly over it; of each stretch first a kind is drawn, and then one of it."""
    every, rng, picked = mutants_of(file), random.Random(f"{SEED} {file}"), []
    count = TESTS[file][0]
    for i in range(min(count, len(every))):
        some = every[i * len(every) // count:(i + 1) * len(every) // count]
        kind = rng.choice(sorted({mutant[2] for mutant in some}))
        picked.append(rng.choice([mutant for mutant in some if mutant[2] == kind]))
    return picked


# --------------------------------------------------------------------------------------------------
# trying them


def try_mutant(mutant, way, scratch, world, expected):
    """
    Whether these tests of its file notice it: (killed, survived or timeout; the test that failed).
    In a child that imports the house anew, from the scratch copy, and forks all runs itself.
    """
    path, said = os.path.join(scratch, "repository", mutant[0]), os.path.join(scratch, "said")
    with open(path, "rb") as f:
        original = f.read()
    with open(path, "wb") as f:
        f.write(mutant[-1])
    pid = os.fork()
    if pid == 0:
        os.setsid()
        for fd, flags in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
            os.dup2(os.open(said if fd == 1 else os.devnull, flags | os.O_CREAT | os.O_TRUNC), fd)
        os._exit(run_tests(arguments(mutant[0], way), scratch, world, expected))
    began = time.monotonic()
    while not (done := os.waitpid(pid, os.WNOHANG))[0] and time.monotonic() - began < LIMIT:
        time.sleep(0.1)
    try:
        os.killpg(pid, signal.SIGKILL)  # also whatever its tests have started
    except ProcessLookupError:
        pass
    with open(path, "wb") as f:
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
        if (getattr(module, "__file__", None) or "").startswith(ROOT + os.sep) and module is not sys.modules["__main__"]:
            del sys.modules[name]
    sys.path[:] = [root, os.path.join(root, "tests"), *(p for p in sys.path if not p.startswith(ROOT + os.sep) and p != ROOT)]
    os.chdir(root)
    sys.dont_write_bytecode = True
    tempfile.tempdir = tempfile.mkdtemp(dir=scratch)
    import pytest
    try:
        import campaign
        import forked
        import test_by_hand
        import tiny
    except BaseException as e:
        print(f"{type(e).__name__}: {e}")
        return 3
    campaign.child, campaign.LONGEST = forked.child, LIMIT
    campaign.warm()
    os.fsync = lambda fd: None
    tiny.start_forker = lambda: None
    tiny.ask_forker = lambda files, at_once: forked.answer(*files, at_once)
    test_by_hand.build = lambda folder: world
    test_by_hand.worked_out = lambda world, script, keys: expected[str((script, keys))]
    return int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", f"--basetemp={tempfile.mkdtemp()}/t", *asked]))


def read_results():
    """{what names a mutant: its row}."""
    if not os.path.exists(RESULTS):
        return {}
    with open(RESULTS, encoding="utf-8") as f:
        rows = [line.rstrip("\n").split("\t") for line in f]
    return {tuple(row[:5]): row for row in rows if row != COLUMNS}


def run(files):
    """Try the mutants of the files in a shuffled order: a run that is stopped has tried some of each."""
    import torch

    sys.path[:0] = [ROOT, os.path.join(ROOT, "tests")]
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", PYTHONDONTWRITEBYTECODE="1")
    torch.set_num_threads(1)  # a forked child has none of its parent's threads
    import campaign  # noqa: F401, which imports all that the runs need
    import test_by_hand

    if not os.path.exists(RESULTS):
        with open(RESULTS, "w", encoding="utf-8") as f:
            f.write("\t".join(COLUMNS) + "\n")
    every = [mutant for file in files for mutant in chosen(file)]
    random.Random(SEED).shuffle(every)
    with tempfile.TemporaryDirectory() as scratch:
        shutil.copytree(ROOT, os.path.join(scratch, "repository"), ignore=shutil.ignore_patterns(".git", ".venv"))
        os.mkdir(os.path.join(scratch, "world"))
        world = test_by_hand.build(os.path.join(scratch, "world"))
        asked = " ".join(TESTS[file][2] for file in files)  # "generate or score or roles" are runs of both
        expected = {str((script, keys)): test_by_hand.worked_out(world, script, keys)
                    for script, keys in test_by_hand.CASES.values() if script[:-3] in asked or "roles" in asked}
        for mutant in every:
            if mutant[:5] in read_results():
                continue
            began = time.monotonic()
            for way in ("alone", ""):  # those that the first do not notice, are tried with all
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
        print(f"\n| {COLUMNS[column]} | mutants | killed | timeout | survived | noticed |\n|---|---|---|---|---|---|")
        for name in [*sorted({row[column] for row in rows}), "all"]:
            results = [row[5] for row in rows if name in (row[column], "all")]
            of = [results.count(result) for result in ("killed", "timeout", "survived")]
            print(f"| {name} | {sum(of)} | {of[0]} | {of[1]} | {of[2]} | {(of[0] + of[1]) / sum(of):.0%} |")


if __name__ == "__main__":
    what, files = sys.argv[1], sys.argv[2:] or list(TESTS)
    if what == "list":
        for mutant in itertools.chain.from_iterable(map(chosen, files)):
            print(*mutant[:3], f"\n    {mutant[3]}\n    {mutant[4]}")
    elif what == "run":
        run(files)
    else:
        table()

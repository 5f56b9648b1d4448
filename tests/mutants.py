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
import collections
import itertools
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
RESULTS = os.path.join(ROOT, "tests", "mutants.tsv")
COLUMNS = "file line kind original mutated result test seconds".split()
SEED, LIMIT = 1, 100  # LIMIT: seconds for the tests of a mutant; they take 20 to 60 of them

# how many mutants of a file; the tests that are most likely to see one; and, for those that these
# do not see, more tests. by_hand=ppo.py: of test_by_hand.py the runs
# of ppo.py; by_hand=ppo.py:3: the first three cases of these
TESTS = {
    "ppo.py": (30, "by_hand=ppo.py:3", "by_hand=ppo.py ppo parallel"),
    "grpo.py": (30, "by_hand=grpo.py:5", "by_hand=grpo.py grpo parallel"),
    "sft.py": (20, "by_hand=sft.py", "sft_rm"), "rm.py": (22, "by_hand=rm.py", "sft_rm"),
    "gae.py": (22, "gae", "by_hand=ppo.py"), "loss.py": (28, "loss grpo_loss", "by_hand off_policy"),
    "relatives.py": (24, "grpo_loss", "by_hand=grpo.py"),
    "rollout.py": (28, "rollout", "by_hand=grpo.py tokenizers"),
    "rewards.py": (20, "rewards rules", "scores judge"), "data.py": (24, "data", "by_hand rollout"),
    "parallel.py": (28, "parallel", "by_hand"),
    "batches.py": (18, "by_hand=grpo.py:3", "roles::test_roles_change_no_text_and_no_weight"
                   " roles::test_a_stopped_run_goes_on_with_other_roles"),
    "model.py": (22, "model", "packing by_hand=rm.py")}

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
    keys_end = source.count(b"\n", 0, source.find(b"\nconfig = configure(") + 1) + 1

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


def pytest_collection_modifyitems(config, items):
    """With -p mutants: of test_by_hand.py only the runs of the script that was asked for."""
    script, _, most = os.environ["MUTANTS_SCRIPT"].partition(":")
    module = next((item.module for item in items if item.module.__name__ == "test_by_hand"), None)
    if not script or module is None:
        return
    cases = {name: case for name, case in (module.CASES | module.OFF).items() if case[0] == script}
    left = dict(itertools.islice(cases.items(), int(most) if most else None))
    for table in (module.CASES, module.OFF, module.RANKS):
        for name in set(table) - set(left):
            del table[name]
    names = {*left, *(f"{name}, on ranks" for name in left)} | ({script} if left == cases else set())
    items[:] = [item for item in items if item.module is not module or item.callspec.id in names]


def pytest_sessionfinish(session, exitstatus):
    session.config.mutants_status = int(exitstatus)


def pytest_unconfigure(config):
    """With -p mutants: end at once, without waiting for the process that forks runs (tests/forked.py)."""
    sys.stdout.flush()
    os._exit(config.mutants_status)


def try_mutant(mutant, tests, scratch):
    """Whether these tests notice it: (killed, survived or timeout; the test that failed)."""
    script = "".join(test.partition("=")[2] for test in tests)
    files = [re.sub(r"^(\w+)(=.*)?", r"tests/test_\1.py", test) for test in tests]
    env = os.environ | dict(MUTANTS_SCRIPT=script, PYTHONPATH="tests", PYTHONDONTWRITEBYTECODE="1",
                            OMP_NUM_THREADS="1", TMPDIR=os.path.join(scratch, "tmp"))
    path = os.path.join(scratch, "repository", mutant[0])
    with open(path, "rb") as f:
        original = f.read()
    os.mkdir(env["TMPDIR"])
    with open(path, "wb") as f:
        f.write(mutant[-1])
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "mutants", *files,
               "--deselect=tests/test_rules.py::test_check_rows"]  # it needs bwrap, without a mark that says so
    process = subprocess.Popen(command, cwd=os.path.join(scratch, "repository"), env=env, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        said, _ = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return "timeout", ""
    finally:
        for sign in (signal.SIGTERM, signal.SIGKILL):  # also whatever its tests have started
            try:
                os.killpg(process.pid, sign)
                time.sleep(0.3)
            except ProcessLookupError:
                break
        process.wait()
        with open(path, "wb") as f:
            f.write(original)
        shutil.rmtree(env["TMPDIR"], ignore_errors=True)
    failed = re.search(r"^(?:FAILED|ERROR) (?:tests/)?(\S+\.py(?:::\w+)?)", said, re.M)
    if process.returncode == 0:
        return "survived", ""
    return "killed", failed[1] if failed else said.strip().splitlines()[-1] if said.strip() else "crashed"


def read_results():
    """{what names a mutant: its row}. Of two rows of a mutant the later one holds."""
    if not os.path.exists(RESULTS):
        return {}
    with open(RESULTS, encoding="utf-8") as f:
        rows = [line.rstrip("\n").split("\t") for line in f if not line.startswith("#")]
    return {tuple(row[:5]): row for row in rows if row != COLUMNS}


def write_result(mutant, result, test, seconds):
    row = [*mutant[:5], result, test, f"{seconds:.1f}"]
    with open(RESULTS, "a", encoding="utf-8") as f:
        f.write("\t".join(row) + "\n")
    print(*row[:3], *row[5:], flush=True)


def run(files):
    """
    Try the mutants of the files in a shuffled order: a run that is stopped has tried some of each.
    Those that the first tests do not notice are "open" until all have been tried with these.
    """
    if not os.path.exists(RESULTS):
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
        with open(RESULTS, "w", encoding="utf-8") as f:
            f.write("\t".join(COLUMNS) + f"\n# commit {commit.stdout.strip()}\n")
    every = [mutant for file in files for mutant in chosen(file)]
    random.Random(SEED).shuffle(every)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    with tempfile.TemporaryDirectory() as scratch:
        shutil.copytree(ROOT, os.path.join(scratch, "repository"), ignore=shutil.ignore_patterns(".git"))
        for stage in (1, 2):
            for mutant in every:
                last = read_results().get(mutant[:5])
                if last and (stage == 1 or last[5] != "open"):
                    continue
                began = time.monotonic()
                result, test = try_mutant(mutant, TESTS[mutant[0]][stage].split(), scratch)
                result = "open" if result == "survived" and stage == 1 else result
                before = float(last[-1]) if last else 0.0
                write_result(mutant, result, test, before + time.monotonic() - began)


def table():
    """The share killed, by file and by kind, in Markdown."""
    rows = list(read_results().values())
    for column in (0, 2):
        counts = collections.Counter((row[column], row[5]) for row in rows)
        print(f"\n| {COLUMNS[column]} | mutants | killed | timeout | survived | noticed |")
        print("|---|---|---|---|---|---|")
        for name in [*dict.fromkeys(row[column] for row in rows), "all"]:
            of = [sum(n for (k, r), n in counts.items() if k in (name, k)[name == "all":][:1] and r == result)
                  for result in ("killed", "timeout", "survived")]
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

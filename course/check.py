"""
Checks the exercises of the course, and says what is wrong in the words of the mistake.

    python course/check.py        # all lessons
    python course/check.py 3      # one lesson

checks/lessonN.py has, for each function, CASES (arguments), `right` (the function, whose further
arguments are its parts) and MISTAKES: {what is wrong: the parts that make this mistake}. Some have
more: LARGE, cases of large numbers; `gradient_of`, the places of the arguments in which the result
must have a gradient; `rows`, names of the result's rows. Try first, and look then.
"""
import contextlib
import importlib
import inspect
import itertools
import os
import signal
import sys
import traceback

import torch

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [path for path in (HERE, os.path.dirname(HERE)) if path not in sys.path]
from checks import INFINITE  # noqa: E402

LESSONS = 7  # with an exercise file; the eighth is the clinic
TWO = "two mistakes: (1) {}. (2) {}"
LIMIT = 10.0  # seconds that a call may take
OTHERS = (f"{HERE}/checks/", "<frozen", *(  # files that no student has written
    os.path.dirname(path) + "/" for path in (os.__file__, os.path.dirname(torch.__file__))))


class Wrong(Exception):
    """What is wrong with a function, as the end of a sentence that begins with its name."""


class Slow(BaseException):
    """A call has taken LIMIT seconds. No Exception: a student's `except` shall let it through."""


def limited(function, *arguments):
    """function(*arguments); raises Slow after LIMIT seconds of a processor."""
    def stop(*_):
        raise Slow

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, LIMIT)
    try:
        return function(*arguments)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def raised(error):
    """What a student's line has raised, with that line: never with one of torch or of a check."""
    if isinstance(error, SyntaxError):
        at = f" (line {error.lineno}: {(error.text or '').strip()})"
    else:
        frames = [x for x in traceback.extract_tb(error.__traceback__) if x.filename != __file__
                  and not x.filename.startswith(OTHERS)]
        at = f" (line {frames[-1].lineno}: {frames[-1].line})" if frames else ""
    if isinstance(error, Slow):
        return f"takes more than {LIMIT:g} seconds: does a loop never end?{at}"
    words = str(error.msg if isinstance(error, SyntaxError) else error).strip().split("\n")[0]
    return f"raises {type(error).__name__}: {words}{at}"


def tensor_of(x):
    """
    A number, array, tensor, or a list, tuple or generator of them, as a tensor of float64, or of
    bool. Its gradient stays. Raises Wrong where it is none of these.
    """
    if x is None:
        raise Wrong(" returns nothing: the last line is `return ...`")
    if isinstance(x, (list, tuple)) or hasattr(x, "__next__"):
        parts = [tensor_of(part) for part in x]
        if len({part.shape for part in parts}) > 1:
            raise Wrong(" returns a list whose parts have different shapes: "
                        f"{', '.join(str(tuple(part.shape)) for part in parts)}")
        if any(part.dtype != torch.bool for part in parts):
            parts = [part.double() for part in parts]
        return torch.stack(parts) if parts else torch.zeros(0, dtype=torch.float64)
    try:
        x = torch.as_tensor(x, dtype=torch.float64 if isinstance(x, float) else None)
    except (TypeError, ValueError, RuntimeError):
        raise Wrong(f" returns a {type(x).__name__}; wanted is a tensor of numbers") from None
    return x if x.dtype == torch.bool else x.double()


def same(a, b):
    """Whether both are equal to the rounding of float32. One number may have the shape (1,)."""
    if b.dim() == 0 and a.shape == (1,):
        a = a[0]
    return a.dtype == b.dtype and a.shape == b.shape and torch.allclose(
        a.double(), b.double(), rtol=5e-5, atol=5e-6, equal_nan=True)


def copies(case):
    """The arguments of a case, of which a function may change its own."""
    return [x.clone() if torch.is_tensor(x) else x for x in case]


def shown(x, digits=4):
    """A value in a line or two."""
    if torch.is_tensor(x):
        x = x.tolist()
    if isinstance(x, list):
        return "[" + ", ".join(shown(y, digits) for y in x) + "]"
    return str(round(x, digits)) if isinstance(x, float) else str(x)


def relation(results, wanted):
    """What holds between the results and the right ones in *every* case, in words, or ""."""
    pairs = list(zip(results, wanted, strict=True))
    if all(a.dim() == 2 and same(a.T, b) for a, b in pairs):
        return "the right numbers, with rows and columns exchanged: transpose"
    if any(b.dtype == torch.bool for b in wanted):
        return "these are numbers; wanted are True and False" * any(
            a.dtype != torch.bool for a in results)
    a = torch.cat([x.double().flatten() for x in results])
    if len(a) < 2 or not a.isfinite().all() or any(x.shape != y.shape for x, y in pairs):
        return ""
    if (a - a[0]).abs().max() < 1e-9:
        return f"it is {round(a[0].item(), 4) + 0.0} whatever is given"
    if words := factor(results, wanted):
        return words
    b = torch.cat([x.flatten() for x in wanted])
    shift = (a - b).mean().item()
    if abs(shift) > 1e-4 and same(a - shift, b):
        return f"in every case it is {abs(shift):.6g} {'more' if shift > 0 else 'less'} than wanted"
    if same(a, b.abs()):
        return "the right numbers without their sign"
    if all(same(*(x.flatten().sort()[0] for x in pair)) for pair in pairs):
        return "the right numbers in another order: turned round, exchanged or shifted"
    return ""


def factor(results, wanted):
    """By which number all results are too large, in words, or ""."""
    if [x.shape for x in results] != [x.shape for x in wanted]:
        return ""
    a, b = (torch.cat([x.double().flatten() for x in found]) for found in (results, wanted))
    times = ((a * b).sum() / (b * b).sum()).item()
    if len(a) < 2 or not abs(times) > 1e-6 or not same(a / times, b):
        return ""
    return {"-1.0000": "the sign is wrong", "1.4427": "its logarithm has the base 2, not e"}.get(
        f"{times:.4f}", f"in every case it is {times:.6g} times what is wanted")


def mistakes_of(check, cases, slips):
    """{words, in a tuple: results of the cases} of each slip, and of each two that can meet."""
    both = {(a, b): slips[a] | slips[b] for a, b in itertools.combinations(slips, 2)
            if not slips[a].keys() & slips[b].keys()}
    found = {}
    for words, slip in ({(words,): slip for words, slip in slips.items()} | both).items():
        with contextlib.suppress(ValueError, RuntimeError, IndexError):  # two that do not fit
            found[words] = [tensor_of(check.right(*copies(case), **slip)) for case in cases]
    return found


def diagnose(results, wanted, theirs, related=True):
    """
    The words of a mistake, or of two, that explain all results, or "". theirs: mistakes_of.
    related: look for a relation, too; a few results of large numbers would be related by chance.
    """
    same_as = [words for words, found in theirs.items() if all(map(same, results, found))]
    if same_as and len(same_as[0]) == 1:
        return same_as[0][0]
    if not related:
        return ""
    if words := relation(results, wanted):
        return words
    for words, found in theirs.items():
        if len(words) == 1 and (times := factor(results, found)):
            return TWO.format(times, words[0])
    return TWO.format(*same_as[0]) if same_as else ""


def columns_of(check, cases):
    """{name: (numbers of its cases, its row or None)}: rows that have names, or a case's kind."""
    if rows := getattr(check, "rows", ()):
        return {name: (range(len(cases)), row) for row, name in enumerate(rows)}
    kinds = [next((x for x in case if isinstance(x, str)), "") for case in cases]
    return {kind: ([i for i, x in enumerate(kinds) if x == kind], None) for kind in kinds}


def ignored(function, check, cases, before):
    """Of which arguments of numbers the results, `before`, do not depend, in words, or ""."""
    def unmoved(place):
        others = [[*case[:place], 0.02 + 1.9 * (x.flip(-1) if torch.is_tensor(x := case[place])
                                                else x), *case[place + 1:]] for case in cases]
        return all(same(x, limited(lambda case=case: tensor_of(function(*copies(case)))))
                   for x, case in zip(before, others, strict=True))

    names = [name for place, (name, x) in enumerate(zip(
        inspect.signature(check.right).parameters, cases[0], strict=False))
        if (isinstance(x, float) or before[0].dtype != torch.bool and torch.is_tensor(x)
            and x.is_floating_point()) and unmoved(place)]
    return f"your result stays the same when {' or '.join(names)} changes" if names else ""


def explain(function, check, cases, results, slips, related=True):
    """What is wrong with the results of the cases, ": " and words; "" if they are right."""
    wanted = [tensor_of(check.right(*case)) for case in cases]
    wrong = [i for i in range(len(cases)) if not same(results[i], wanted[i])]
    if not wrong:
        return ""
    theirs, columns = mistakes_of(check, cases, slips), columns_of(check, cases)
    whole = diagnose(results, wanted, {words: found for words, found in theirs.items()
                                       if len(words) == 1 or len(columns) == 1}, related)
    shapes = all(x.shape == y.shape for x, y in zip(results, wanted, strict=True))
    said = {} if shapes or not whole else {whole: columns}  # words: the columns' names
    for name, (numbers, row) in columns.items() if shapes else ():
        a, b, *others = ([found[i] if row is None else found[i][row] for i in numbers]
                         for found in (results, wanted, *theirs.values()))
        if not all(map(same, a, b)):
            words = whole or diagnose(a, b, dict(zip(theirs, others, strict=True)), related)
            said.setdefault(words, []).append(name)
    known = "; ".join(words if len(names) == len(columns) else f"{', '.join(names)}: {words}"
                      for words, names in said.items() if words)
    if known and "" not in said:
        return f": {known}"
    known = f": {known}; and more" if known else ""
    result, right = results[wrong[0]], wanted[wrong[0]]
    if result.shape != right.shape:
        return f"{known} returns a shape of {tuple(result.shape)}; wanted {tuple(right.shape)}"
    words = "not right, and no mistake that is known here"
    if all(torch.allclose(a.double(), b.double(), rtol=0.01, atol=0.01)
           for a, b in zip(results, wanted, strict=True)):
        words = "nearly right: 16 bits, a rounding, or a small constant too many or too few?"
    elif related and all(x.isfinite().all() for x in results):
        words = ignored(function, check, cases, results) or words
    digits = next((n for n in range(4, 15) if shown(result, n) != shown(right, n)), 15)
    given = "".join(f"\n    {name} = {shown(x)}" for name, x in zip(
        inspect.signature(check.right).parameters, cases[wrong[0]], strict=False))
    return f"{known}: {words}. For{given}\n" \
           f"it returns  {shown(result, digits)}\n     wanted  {shown(right, digits)}"


def check_gradient(function, check):
    """What is wrong with the gradient of a function whose values are right, or ""."""
    def slopes(of, case):
        given = copies(case)
        for place in check.gradient_of:
            given[place].requires_grad_()
        x = tensor_of(of(*given)).flatten()
        return torch.autograd.grad((x * torch.linspace(1, 2, len(x), dtype=torch.float64)).sum(), [
            given[place] for place in check.gradient_of], allow_unused=True)

    names = [*inspect.signature(check.right).parameters]
    for case in check.CASES:
        try:
            found = limited(slopes, function, case)
        except Exception:  # numpy, an operation in place: there is none then
            found = [None]
        for place, slope, wanted in zip(check.gradient_of, found, slopes(check.right, case),
                                        strict=False):
            if slope is None or not slope.any():
                return f": its values are right, but have no gradient in {names[place]}, and " \
                       "train nothing. `.item()`, float(), numpy, detach and no_grad take it away"
            if not same(slope.double(), wanted):
                return f": its values are right, but their gradient in {names[place]} is not. Is " \
                       f"a part of it detached?\nit is    {shown(slope)}\nwanted   {shown(wanted)}"
    return ""


def called(function, check, cases, changed):
    """The results of the cases. changed: a set that gets the names of arguments it changes."""
    names, results = [*inspect.signature(check.right).parameters][:len(cases[0])], []
    try:
        inspect.signature(function).bind(*cases[0])
    except TypeError:
        raise Wrong(f" takes {inspect.signature(function)}; wanted are ({', '.join(names)})") \
            from None
    for case in cases:
        given = copies(case)
        results.append(limited(lambda given=given: tensor_of(function(*given)).detach()))
        changed |= {name for name, x, y in zip(names, given, case, strict=True)
                    if torch.is_tensor(x) and not (x.shape == y.shape and bool((x == y).all()))}
    return results


def judged(function, check):
    """What is wrong with a function, as the end of a sentence; "" if it is right."""
    if hasattr(check, "judge"):
        def number(text):
            x = limited(lambda: tensor_of(function(text)))
            if x.numel() != 1:
                raise Wrong(f" returns a shape of {tuple(x.shape)}; wanted is one number")
            return x.item()

        return check.judge(number)
    changed = set()
    cases, of_large = getattr(check, "LARGE", ([], {}))
    results = called(function, check, check.CASES, changed)
    words = explain(function, check, check.CASES, results, check.MISTAKES | of_large)
    if not words and cases:
        results = called(function, check, cases, changed)
        words = explain(function, check, cases, results, of_large, related=False)
        if words and not all(result.isfinite().all() for result in results):
            words = f": {INFINITE}"
    if changed:
        words += f"{';' if words else ':'} it changes its own argument " \
                 f"{' and '.join(sorted(changed))} (+=, a name with _ at its end, x[...] = ...): " \
                 "whoever called it still needs it. Make a new tensor"
    if not words and hasattr(check, "gradient_of"):
        words = check_gradient(function, check)
    return words


def verdict(function, check, name=None):
    """"" if a function is right, else a sentence. check: an entry of a lesson's CHECKS."""
    name = name or getattr(function, "__name__", "your function")
    file = getattr(getattr(function, "__code__", None), "co_filename", "")
    place = f"{name} in {os.path.basename(file) if os.path.exists(file) else 'this notebook'}"
    try:
        words = judged(function, check)
    except Wrong as wrong:
        words = str(wrong)
    except NotImplementedError:
        words = " is empty: take away `raise NotImplementedError`, and write its body. " \
                "The docstring has the shapes and an example"
    except (Exception, SystemExit, Slow) as error:  # whatever a student's line may raise
        words = f" {raised(error)}"
    return words and place + words


def check_lesson(number):
    """{function: sentence, "" if it is right} of a lesson."""
    checks = importlib.import_module(f"checks.lesson{number}").CHECKS
    file = f"exercise{number}.py"
    try:
        exercise = limited(importlib.import_module, file[:-3])
    except (Exception, SystemExit, Slow) as error:
        return {name: f"{file} cannot be read; it {raised(error)}" for name in checks}
    found = {}
    for name, check in checks.items():
        function = getattr(exercise, name, None)
        found[name] = verdict(function, check, name) if callable(function) else (
            f"{file} has no function {name}")
    return found


if __name__ == "__main__":
    wanted = sys.argv[1:] or [str(number) for number in range(1, LESSONS + 1)]
    if not set(wanted) <= {str(number) for number in range(1, LESSONS + 2)}:
        print(f"check.py: wanted lessons from 1 to {LESSONS + 1}, given {' '.join(wanted)}",
              file=sys.stderr)
        sys.exit(2)
    failed = False
    for number in wanted:
        if int(number) > LESSONS:
            from clinic import BadInput, check_answers

            try:
                failed |= not check_answers()
            except BadInput as error:
                sys.exit(f"check.py: {error}")
            continue
        for name, words in check_lesson(int(number)).items():
            failed |= bool(words)
            print(f"lesson {number}, {name}: {words or 'right'}")
    sys.exit(failed)

"""
Checks the exercises of the course, and says what is wrong in the words of the mistake.

    python course/check.py        # all lessons
    python course/check.py 3      # one lesson
    pytest course                 # all, as tests

checks/lessonN.py has, for each function, CASES (arguments), `right` (the function)
and MISTAKES: {what is wrong: a function that makes this mistake}. Some have more: LARGE, cases of
large numbers, in whose words a function that overflows is told; `gradient_of`, the places of the
arguments in which the result must have a gradient; `parts`, names of the result's rows. Try first,
and look then.
"""
import difflib
import importlib
import inspect
import os
import signal
import sys
import threading
import traceback

import torch

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [path for path in (HERE, os.path.dirname(HERE)) if path not in sys.path]
LESSONS = 7  # with an exercise file; the eighth is the clinic
LIMIT = 10.0  # seconds that a call may take
OTHERS = (f"{HERE}/checks/", "<frozen", *(  # files that no student has written
    os.path.dirname(path) + "/" for path in (os.__file__, os.path.dirname(torch.__file__))))


class Wrong(Exception):
    """What is wrong with a function, as the end of a sentence that begins with its name."""


class Slow(BaseException):
    """A call has taken LIMIT seconds. No Exception: a student's `except` shall let it through."""


def limited(function, *arguments):
    """function(*arguments); raises Slow after LIMIT seconds."""
    def stop(*_):
        raise Slow

    if threading.current_thread() is not threading.main_thread():
        return function(*arguments)
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, LIMIT)
    try:
        return function(*arguments)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


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
    A result as a tensor of float64, or of bool: of a number, an array, a tensor, or a list, tuple
    or generator of them. Its gradient stays. Raises Wrong where it is none of these.
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
    if x.is_complex():
        raise Wrong(" returns complex numbers")
    return x if x.dtype == torch.bool else x.double()


def same(a, b):
    """
    Whether two tensors are equal to the rounding of float32. One number may have the shape (1,).
    """
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
    if all(b.dtype == torch.bool for b in wanted):
        return "these are numbers; wanted are True and False" if all(
            a.dtype != torch.bool and same(a.bool(), b) for a, b in pairs) else ""
    if all(a.dim() == 2 and same(a.T, b) for a, b in pairs):
        return "the right numbers, with rows and columns exchanged: transpose"
    a, b = (torch.cat([x.double().flatten() for x in found]) for found in (results, wanted))
    if len(a) < 2 or not a.isfinite().all():
        return ""
    if (a - a[0]).abs().max() < 1e-9:
        return f"it is {shown(a[0].item() + 0.0)} whatever is given"
    if any(x.shape != y.shape for x, y in pairs):
        return ""
    factor, shift = ((a * b).sum() / (b * b).sum()).item(), (a - b).mean().item()
    if abs(factor) > 1e-6 and same(a / factor, b):
        return {"-1.0000": "the sign is wrong", "1.4427":
                "your logarithm has the base 2; the natural one is wanted"}.get(
                    f"{factor:.4f}", f"in every case it is {factor:.6g} times what is wanted")
    if abs(shift) > 1e-4 and same(a - shift, b):
        return f"in every case it is {abs(shift):.6g} {'more' if shift > 0 else 'less'} than wanted"
    return ""


def diagnose(results, wanted, theirs, related=True):
    """
    The words of a mistake that explains all results, or "". theirs: {words: results}. related: look
    for a relation, too; a few results of large numbers would be related by chance.
    """
    for words, found in theirs.items():
        if all(map(same, results, found)):
            return words
    if not related:
        return ""
    if words := relation(results, wanted):
        return words
    for words, found in theirs.items():
        if all(x.dtype != torch.bool and same(-x, y) for x, y in zip(results, found, strict=True)):
            return f"the sign is wrong; and {words}"
    return ""


def split(check, case, x):
    """{name: part} of a result: its rows, if they have names, or the whole of a case's kind."""
    parts = getattr(check, "parts", ())
    if parts and x.dim() and len(x) == len(parts):
        return dict(zip(parts, x, strict=True))
    return {next((f'"{word}"' for word in case if isinstance(word, str)), ""): x}


def explain(check, cases, results, mistakes, related=True):
    """What is wrong with the results of the cases, ": " and words; "" if they are right."""
    theirs = {words: [tensor_of(mistake(*copies(case))) for case in cases]
              for words, mistake in mistakes.items()}
    wanted = [tensor_of(check.right(*case)) for case in cases]
    wrong = [i for i in range(len(cases)) if not same(results[i], wanted[i])]
    if not wrong:
        return ""
    if words := diagnose(results, wanted, theirs, related):
        return f": {words}"
    columns = {}  # by the name of a part: its results, the right ones, and each mistake's
    for i, case in enumerate(cases):
        answer, right = (split(check, case, x[i]) for x in (results, wanted))
        for name in answer.keys() & right.keys():
            column = columns.setdefault(name, ([], [], {words: [] for words in theirs}))
            column[0].append(answer[name])
            column[1].append(right[name])
            for words, found in theirs.items():
                column[2][words].append(split(check, case, found[i]).get(name, found[i]))
    found = {name: diagnose(*columns[name]) for name in sorted(columns)
             if name and not all(map(same, *columns[name][:2]))}
    said = [words if words.startswith(name.strip('"')) else f"{name}: {words}"
            for name, words in found.items() if words]
    if found and all(found.values()):
        return ": " + "; ".join(dict.fromkeys(said))
    known = "".join(f": {words}; and more" for words in said)
    i = wrong[0]
    result, right = results[i], wanted[i]
    if result.shape != right.shape:
        return f"{known} returns a shape of {tuple(result.shape)}; wanted {tuple(right.shape)}"
    digits = next((n for n in range(4, 15) if shown(result, n) != shown(right, n)), 15)
    names = inspect.signature(check.right).parameters  # a lesson's `right` may take more
    given = "".join(f"\n    {name} = {shown(x)}"
                    for name, x in zip(names, cases[i], strict=False))
    return f"{known}: not right, and no mistake that is known here. For{given}\n" \
           f"it returns  {shown(result, digits)}\n     wanted  {shown(right, digits)}"


def slopes(check, case, place):
    """The gradient of the sum of a right result, weighted, in an argument: central differences."""
    def total(i, step):
        given = copies(case)
        given[place].view(-1)[i] += step
        return weighted(tensor_of(check.right(*given)))

    found = [(total(i, 1e-5) - total(i, -1e-5)) / 2e-5 for i in range(case[place].numel())]
    return torch.stack(found).view_as(case[place])


def weighted(x):
    return (x.flatten() * torch.linspace(1, 2, x.numel(), dtype=torch.float64)).sum()


def check_gradient(function, check):
    """What is wrong with the gradient of a function whose values are right, or ""."""
    for case in check.CASES:
        given = copies(case)
        for place in check.gradient_of:
            given[place].requires_grad_()
        names = [*inspect.signature(check.right).parameters]
        try:
            result = limited(lambda given=given: tensor_of(function(*given)))
            found = torch.autograd.grad(weighted(result), [given[i] for i in check.gradient_of],
                                        allow_unused=True)
        except Exception:  # numpy, an operation in place: there is none then
            found = [None]
        for place, slope in zip(check.gradient_of, found, strict=False):
            wanted = slopes(check, case, place)
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
    except ValueError:  # it does not tell
        pass
    for case in cases:
        given = copies(case)
        results.append(limited(lambda given=given: tensor_of(function(*given)).detach()))
        changed |= {name for name, x, y in zip(names, given, case, strict=True)
                    if torch.is_tensor(x) and not (x.shape == y.shape and bool((x == y).all()))}
    return results


def judged(function, check):
    """What is wrong with a function, as the end of a sentence; "" if it is right."""
    if str(getattr(function, "__module__", "")).startswith("checks."):
        return " is the checker's own; write yours"
    if hasattr(check, "judge"):
        def number(text):
            x = limited(lambda: tensor_of(function(text)))
            if x.numel() != 1:
                raise Wrong(f" returns a shape of {tuple(x.shape)}; wanted is one number")
            return x.item()

        return check.judge(number)
    changed = set()
    cases, large, of_large = getattr(check, "LARGE", ([], "", {}))
    results = called(function, check, check.CASES, changed)
    words = explain(check, check.CASES, results, check.MISTAKES | of_large)
    if not words and cases:
        results = called(function, check, cases, changed)
        words = explain(check, cases, results, of_large, related=False)
        if words and not all(result.isfinite().all() for result in results):
            words = f": {large}"
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
    try:
        file = inspect.getsourcefile(function) or ""
    except TypeError:  # a partial, a builtin
        file = sys.modules[getattr(function, "__module__", None) or "builtins"].__dict__.get(
            "__file__", "")
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
    if not os.path.exists(f"{HERE}/{file}"):
        return {name: f"{file} is not there: git checkout course/{file}" for name in checks}
    try:
        exercise = limited(importlib.import_module, file[:-3])
    except (Exception, SystemExit, Slow) as error:
        return {name: f"{file} cannot be read; it {raised(error)}" for name in checks}
    found = {}
    for name, check in checks.items():
        function = getattr(exercise, name, None)
        if callable(function):
            found[name] = verdict(function, check, name)
            continue
        others = [other for other, x in vars(exercise).items()
                  if callable(x) and other not in checks]
        others = difflib.get_close_matches(name, others, 1)
        found[name] = f"{file} has no function {name}" + "".join(
            f"; it has {other}: rename it" for other in others)
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

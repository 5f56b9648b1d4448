"""
Checks the exercises of the course, and says what is wrong in the words of the mistake.

    python course/check.py        # all that you have begun
    python course/check.py 3      # one lesson
    pytest course                 # all, as tests

checks/lessonN.py has, for each function, CASES (arguments), `right` (the function, in plain loops)
and MISTAKES: {what is wrong: a function that makes this mistake}. Try first, and look then.
"""
import importlib
import inspect
import os
import sys
import traceback

import torch

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [path for path in (HERE, os.path.dirname(HERE)) if path not in sys.path]
LESSONS = 7  # with an exercise file; the eighth is the clinic


def same(a, b):
    """Whether two results are equal to rounding: tensors, numbers or tuples of them."""
    a, b = torch.as_tensor(a).double(), torch.as_tensor(b).double()
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-6, atol=1e-9, equal_nan=True)


def copies(case):
    """The arguments of a case, of which a function may change its own."""
    return [x.clone() if torch.is_tensor(x) else x for x in case]


def shown(x):
    """A value in a line or two."""
    if torch.is_tensor(x) and x.dtype not in (torch.bool, torch.int64):
        x = [[round(y, 4) for y in row] if isinstance(row, list) else round(row, 4)
             for row in x.tolist()] if x.dim() else round(x.item(), 4)
    return f"{x.tolist() if torch.is_tensor(x) else x}"


def verdict(function, check):
    """
    "" if a function is right, else a sentence. check: with CASES, right, MISTAKES, and maybe
    judge(function), which says a sentence itself.
    """
    file = inspect.getsourcefile(function)  # None: it stands in a notebook
    place = f"{function.__name__} in {os.path.basename(file or 'this notebook')}"
    try:
        if hasattr(check, "judge"):
            return check.judge(function)
        results = [function(*copies(case)) for case in check.CASES]
    except NotImplementedError:
        return f"{place} is empty: take away `raise NotImplementedError`, and write its body. " \
               "The docstring has the shapes and an example"
    except Exception as error:  # whatever a student's line may raise is shown with that line
        at = traceback.extract_tb(error.__traceback__)[-1]
        return f"{place} raises {type(error).__name__}: {error} (line {at.lineno}: {at.line})"
    if any(result is None for result in results):
        return f"{place} returns nothing: the last line is `return ...`"
    wanted = [check.right(*case) for case in check.CASES]
    if all(map(same, results, wanted)):
        return ""
    for words, mistake in check.MISTAKES.items():
        theirs = [mistake(*copies(case)) for case in check.CASES]
        if all(map(same, results, theirs)):
            return f"{place}: {words}"
    i = next(i for i in range(len(wanted)) if not same(results[i], wanted[i]))
    result, right = torch.as_tensor(results[i]), torch.as_tensor(wanted[i])
    if result.shape != right.shape:
        return f"{place} returns a shape of {tuple(result.shape)}; wanted {tuple(right.shape)}"
    names = inspect.signature(check.right).parameters
    given = "\n".join(f"    {name} = {shown(x)}" for name, x in zip(names, check.CASES[i],
                                                                   strict=True))
    return f"{place}: not right, and no mistake that is known here. For\n{given}\n" \
           f"it returns  {shown(result)}\n     wanted  {shown(right)}"


def check_lesson(number):
    """{function: sentence, "" if it is right} of a lesson."""
    exercise = importlib.import_module(f"exercise{number}")
    checks = importlib.import_module(f"checks.lesson{number}")
    return {name: verdict(getattr(exercise, name), check) for name, check in checks.CHECKS.items()}


if __name__ == "__main__":
    wanted = sys.argv[1:] or [str(number) for number in range(1, LESSONS + 1)]
    if not set(wanted) <= {str(number) for number in range(1, LESSONS + 2)}:
        sys.exit(f"check.py: wanted lessons from 1 to {LESSONS + 1}, given {' '.join(wanted)}")
    failed = False
    for number in wanted:
        if int(number) > LESSONS:
            from clinic import check_answers

            failed |= not check_answers()
            continue
        for name, words in check_lesson(int(number)).items():
            failed |= bool(words)
            print(f"lesson {number}, {name}: {words or 'right'}")
    sys.exit(failed)

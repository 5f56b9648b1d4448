"""
GSM-Symbolic (arXiv 2410.05229): the problems of GSM8K as templates, with worked solutions that end
in "#### 72". Each draw of a template has other names and numbers. The package reasoning-gym
(Apache-2.0) has the templates; of its own needs none is used.

    pip install --no-deps reasoning-gym==0.1.25
    python data/gsm_symbolic/prepare.py [problems a template, 60]

Writes beside itself, as chats:
    sft_train.jsonl  {"prompt", "completion"}, 70 templates
    rl_train.jsonl   {"prompt", "answer", "template"}, the same problems
    rl_val.jsonl     the same templates with other numbers
    rl_new.jsonl     15 templates that are in no other file
"""
import importlib
import importlib.util
import os
import random
import sys
import types

HERE = os.path.dirname(os.path.abspath(__file__))
# Python looks for modules in this file's folder; this one is in the folder above it.
sys.path.insert(0, os.path.dirname(HERE))

from files import parser_of, write_rows  # noqa: E402

from errors import BadInput  # noqa: E402

# the package says that these templates are wrong
WRONG = 32, 35, 37, 61, 63, 65, 74, 76, 77, 79, 86, 87, 90, 97, 98
UNSEEN = 15  # templates of rl_new
HELD_OUT = 10  # problems a template of rl_val and rl_new
ASK = " End with #### and the number."


def templates():
    """{number: template}; a template is a function of (random.Random, difficulty) -> a problem."""
    found = importlib.util.find_spec("reasoning_gym")
    if not found:
        raise BadInput("this needs a package; type pip install --no-deps reasoning-gym==0.1.25")
    # stand for the packages: their own __init__ would import all of them, and what they need
    inner = "reasoning_gym.arithmetic.gsm_symbolic"
    for name in ("reasoning_gym", "reasoning_gym.arithmetic", inner):
        module = sys.modules[name] = types.ModuleType(name)
        module.__path__ = [os.path.join(found.submodule_search_locations[0], *name.split(".")[1:])]
    functions = {}
    for file in ("generators_00_49", "generators_50_99"):
        functions |= vars(importlib.import_module(f"{inner}.{file}"))
    numbers = (n for n in range(100) if n not in WRONG)
    return {n: functions[f"generate_{n}"] for n in numbers}


def problems(template, number, count):
    """Up to `count` different problems of a template: dicts as the package makes them."""
    found = {}
    for i in range(20 * count):
        problem = template(random.Random(f"a {number} {i}"), 1.0)
        found.setdefault(problem["question"], problem)
        if len(found) == count:
            break
    return list(found.values())


def rows_of(templates, each):
    """{file: rows} of {number: template}, with `each` problems a template to train on."""
    unseen = random.Random(0).sample(sorted(templates), UNSEEN)
    rows = dict(sft_train=[], rl_train=[], rl_val=[], rl_new=[])
    for number, template in templates.items():
        found = problems(template, number, each + HELD_OUT)
        for i, problem in enumerate(found):
            prompt = [dict(role="user", content=problem["question"] + ASK)]
            row = dict(prompt=prompt, answer=problem["answer"], template=number)
            if number in unseen:
                rows["rl_new"] += [row] if i < HELD_OUT else []
            elif i >= len(found) - HELD_OUT:
                rows["rl_val"].append(row)
            else:
                rows["rl_train"].append(row)
                solution = dict(role="assistant", content=problem["metadata"]["answer_cot"])
                rows["sft_train"].append(dict(prompt=prompt, completion=[solution]))
    for some in rows.values():
        random.Random(1).shuffle(some)
    return rows


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument("problems", nargs="?", type=int, default=60, help="a template")
    rows = rows_of(templates(), parser.parse_args().problems)
    write_rows(HERE, rows, ((name, row) for name in rows for row in rows[name]))

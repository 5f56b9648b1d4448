"""run.py: what a terminal of 80 columns shows, and when it says that all is lost."""
import math

import pytest

from run import (COLUMNS, columns_of, evaluation_lines, how_broken, iteration_line,
                 what_is_lost)


@pytest.mark.parametrize("size", [0.001, 7.0, -123.456, 98765.4, math.nan])
@pytest.mark.parametrize("done", [1, 1953])
def test_the_line_of_an_iteration_fits(size, done):
    record = {metric: size for metric, _ in COLUMNS.values()}
    line = iteration_line(record, done, 1953, 5000.0)
    assert len(line) <= 80 and line.startswith(f"iter {done}/1953  score") and "left" in line
    few = [f"{name} " for name in COLUMNS if name in iteration_line(
        {metric: 1.0 for metric, _ in list(COLUMNS.values())[:5]}, 1, 9, 1.0)]
    assert len(few) == 5  # all of them, where they fit


def said(role, content):
    return dict(role=role, content=content)


ASKED = {  # prompt, response, whether it ended: the two lines
    "text": ("1+2=", "3", True, "> 1+2=", "3"),
    "the last question": ([said("system", "s"), said("user", "a"), said("assistant", "b"),
                           said("user", "Is 3\n\n even?")], " no\n", True, "> Is 3 even?", "no"),
    "begun": ([said("user", "q"), said("assistant", "<think>")], "x", False, "> q", "x [cut off]"),
    "no question": ([said("system", "s")], "", True, "> s", "[empty]"),
    "escapes": ("\x1b[2J", "\x07", True, r"> \x1b[2J", r"\x07")}


@pytest.mark.parametrize("name", ASKED)
def test_a_sample_is_a_question_and_below_it_the_answer(name):
    prompt, text, finished, *lines = ASKED[name]
    sample = dict(prompt=prompt, text=text, finished=finished)
    assert evaluation_lines(3, {"eval/kl": 0.5}, [sample]).split("\n") == [
        "eval 3: kl 0.500", "    " + lines[0], "      " + lines[1]]


def test_an_evaluation_fits_and_shows_others_each_time():
    samples = [dict(prompt=f"prompt {i} " + "x" * i**3, text=f"{i} \u6f22" * i**2, finished=i > 2)
               for i in range(16)]
    record = {f"eval/reward/a_long_name_{i}": -1.5 for i in range(9)}
    shown = set()
    for iteration in range(0, 200, 10):
        lines = evaluation_lines(iteration, record, samples).split("\n")
        assert max(map(columns_of, lines)) <= 100 and "".join(lines).count("reward/") == 9
        assert max(map(columns_of, lines[-4:])) <= 80
        shown |= {line.split()[2] for line in lines if "> prompt" in line}
    assert len(shown) > 10


@pytest.mark.parametrize("kl, length, moved, ends, first, broken", [
    (378, 48, 30, 0.0, 1.0, True), (None, 48, 5, 0.1, 0.9, True), (30, 48, 0, 0.3, 0.9, True),
    (16.7, 44, 0.13, 0.96, 1.0, False),  # reward hacking, of README
    (1.3, 2, 0.1, 1.0, 0.99, False),  # one word that it is sure of now
    (400, 8000, 0.001, 0.2, 0.9, False),  # long thoughts that are cut off
    (0, 48, 0, 0.0, 0.0, False), (0, 0, 0, 0.0, 1.0, False), (None, 48, 0.01, 0.2, 0.8, False),
    (100, 48, 0, 0.0, 0.0, True)])
def test_when_a_policy_is_broken(kl, length, moved, ends, first, broken):
    record = {"objective/kl": kl, "objective/length": length, "policy/approx_kl": moved,
              "objective/finished": ends}
    if kl is None:
        del record["objective/kl"]
    found = how_broken(record, first)
    assert bool(found) == broken and ("docs/diagnosis.md" in found) == broken


@pytest.mark.parametrize("figures, named, words", [
    (dict(finished=1.0), [], []),
    (dict(finished=0.03), ["cut"], ["97%", "max_new_tokens"]),
    (dict(finished=0.5, flat_groups=0.5, scored=0.5), [], []),
    (dict(finished=1.0, flat_groups=0.9, accuracy=0.01), ["flat"], ["90%", "too hard"]),
    (dict(finished=1.0, flat_groups=0.75, accuracy=0.9), ["flat"], ["75%", "too easy"]),
    (dict(finished=1.0, flat_groups=1.0), ["flat"], ["100%", "diagnosis.md"]),
    (dict(finished=0.25, scored=0.0), ["cut", "unscored"], ["100% of the responses have no"])])
def test_what_most_of_a_batch_is_lost_to(figures, named, words):
    found = what_is_lost({f"objective/{name}": x for name, x in figures.items()})
    assert [*found] == named
    assert all(word in " ".join(line for _, line in found.values()) for word in words)

"""run.py: what a terminal of 80 columns shows, and when it says that all is lost."""
import pytest

from options.alarms import how_broken, what_is_lost
from options.wide_letters import columns_of
from run import COLUMNS, evaluation_lines, iteration_line


def test_lines_fit_and_samples_are_questions_with_their_answers():
    record = {metric: 98765.4 for metric, _ in COLUMNS.values()}
    line = iteration_line(record, 1953, 1953, 5000.0)
    assert len(line) <= 80 and line.startswith("iter 1953/1953  score") and "left" in line
    chat = [dict(role=role, content=text) for role, text in (
        ("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "Is 3\n\n even?"))]
    for prompt, text, finished, asked, shown in (
            (chat, " no\n", True, "> Is 3 even?", "no"),
            ("\x1b[2J", "", True, r"> \x1b[2J", "[empty]"),
            (f"a {'x' * 999}", "\u6f22" * 99, False, "> a xx", "\u6f22")):
        sample = dict(prompt=prompt, text=text, finished=finished)
        first, *lines = evaluation_lines(3, {"eval/kl": 0.5}, [sample]).split("\n")
        assert first == "eval 3: kl 0.500" and max(map(columns_of, lines)) <= 80
        assert lines[0].startswith(f"    {asked}") and lines[1].startswith(f"      {shown}")


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

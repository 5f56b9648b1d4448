"""What a run says while it runs: one line that is overwritten, lines of equal columns, times that a person can read."""
import io
import time

import pytest
import torch

import report
import status


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def now(monkeypatch):
    """The time, as a list of one number of seconds."""
    seconds = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: seconds[0])
    monkeypatch.setattr(status, "phase", "iteration 7, rollout")
    monkeypatch.setattr(status, "shown", False)
    monkeypatch.setattr(status, "last", 1000.0)
    return seconds


def screen(text):
    """What a terminal shows of a text with \\r and "clear the line"."""
    lines = [""]
    for part in text.replace("\r\x1b[K", "\0").split("\n"):
        lines[-1] = part.rpartition("\0")[2]
        lines.append("")
    return lines[:-1]


def test_on_a_terminal_one_line_is_written_over(now, monkeypatch):
    out = Terminal()
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setenv("COLUMNS", "40")
    for token in range(100):  # 10 s
        now[0] += 0.1
        status.show(f"token {token} of 100, and more than a terminal of 40 columns has")
    assert 30 < out.getvalue().count("\r") <= 50
    assert screen(out.getvalue()) == ["iteration 7, rollout: token 99 of 100, an"[:39]]
    status.clear()
    print("iter 7/20")
    assert screen(out.getvalue()) == ["iter 7/20", ""]


def test_in_a_file_there_is_a_line_a_minute(now, monkeypatch, capsys):
    for _ in range(1300):  # 130 s
        now[0] += 0.1
        status.show("token 1 of 2")
    assert capsys.readouterr().out == "iteration 7, rollout: token 1 of 2\n" * 2
    now[0] += 59
    status.clear()  # another line is printed
    now[0] += 59
    status.show("token 1 of 2")
    monkeypatch.setenv("RANK", "1")
    now[0] += 100
    status.show("token 1 of 2")
    monkeypatch.setattr(status, "phase", "")  # a tool, not a run
    monkeypatch.setenv("RANK", "0")
    status.show("token 1 of 2")
    assert capsys.readouterr().out == ""


def test_lines_of_iterations_fit_and_have_equal_columns(monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 7500.0)
    first = {metric: 0.0 for metric, _ in report.COLUMNS.values()}
    later = {metric: 0.999 for metric, _ in report.COLUMNS.values()} | {
        "objective/scores": -12.345, "objective/kl": 29.0, "objective/length": 1023.9, "mem/peak_mib": 79000.0}
    lines = [report.progress(record, 0, done, 1953, 0.0) for record, done in ((first, 9), (later, 1953))]
    assert [len(line) for line in lines] == [len(lines[0])] * 2 and len(lines[0]) <= 100
    for name in ("score", "kl", "acc", "len"):
        assert lines[0].index(f"  {name} ") == lines[1].index(f"  {name} ")
    assert "2h05m" in lines[0] and lines[1].endswith("0s left")


@pytest.mark.parametrize("seconds, text", [
    (0, "0s"), (59.4, "59s"), (59.6, "1m00s"), (307, "5m07s"), (3599.4, "59m59s"), (3600, "1h00m"), (7500, "2h05m"),
    (360000, "100h00m")])
def test_times_are_read_by_persons(seconds, text):
    assert report.clock(seconds) == text


def test_models_are_said_with_their_learning_rates(capsys):
    models = {name: torch.nn.Linear(100, 100, bias=False) for name in ("policy", "ref_policy", "value_model")}
    optimizers = {name: torch.optim.Adam(models[name].parameters(), lr=lr)
                  for name, lr in (("policy", 3e-6), ("value_model", 1e-4))}
    optimizers["policy"].scale, optimizers["value_model"].scale = 1.0, 0.5  # what the rate of the keys was multiplied by
    report.print_models(models, optimizers)
    said = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [(line[0], line[1], line[-1]) for line in said] == [
        ("policy", "0.01M", "3e-06"), ("ref_policy", "0.01M", "frozen"), ("value_model", "0.01M", "0.0002")]


def test_figures_of_an_evaluation_fit(capsys):
    record = {f"eval/reward/number_{i}": -i / 8 for i in range(9)}
    report.print_evaluation(20, record | {"policy/importance": 1.0})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and max(map(len, lines)) <= 100 and lines[0].startswith("eval 20: reward/number_0 0.000 | ")
    figures = " | ".join(line.removeprefix("eval 20:").strip() for line in lines).split(" | ")
    assert figures == [f"reward/number_{i} {-i / 8:.3f}" for i in range(9)]


def test_chats_are_printed_as_text(capsys):
    chat = [dict(role="system", content="Be brief."), dict(role="user", content="1+2=?\nThink.")]
    report.print_samples([dict(prompt=chat, text="3", scores=dict(scores=1.5)), dict(prompt="4=", text="\x1b[2J", scores={})])
    assert capsys.readouterr().out == (
        "    system: Be brief. | user: 1+2=?\\nThink. -> 3  score 1.50\n    4= -> \\x1b[2J  no score\n")

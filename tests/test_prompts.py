"""
prompts.py and demonstrations.py: a file -> rows -> token ids; which rows an iteration takes, by
enumeration.
"""
import itertools
from array import array
from types import SimpleNamespace

import pytest

from demonstrations import encode_demonstrations
from errors import BadInput
from prompts import (Rows, batch_rows, encode_prompts, encode_rows, prompt_row, read_rows,
                     rows_to_evaluate, run_length, say_prompts)
from tiny import keys_of_system, write

def test_rows_of_a_file(tmp_path):
    """A BOM, blank lines, numbers as answers, other fields, names of others."""
    path = write(tmp_path / "a.jsonl", '\ufeff{"prompt": "1+2=", "answer": 3.0, "level": 7}\n\n'
                                       '{"q": {"text": "é"}, "prompt": "old"}\n')
    with pytest.raises(BadInput, match="line 1.*'q.text'"):
        read_rows(path, prompt_row, "q.text>prompt")
    assert read_rows(path, prompt_row)[0] == dict(prompt="1+2=", answer=3.0, level=7)
    path = write(tmp_path / "b.jsonl", '{"q": {"text": "é"}, "prompt": "old", "a": "x"}\n')
    assert read_rows(path, prompt_row, "q.text>prompt,a>answer") == [
        dict(prompt="é", answer="x", q=dict(text="é"))]


@pytest.mark.parametrize("held_out, both", [
    ([[3, 4]], 0), ([[1, 2], [3], [1, 2]], 2), ([[1], [1, 2, 300]], 1), ([], 0)])
def test_held_out_prompts_that_are_trained_on_are_counted(capsys, held_out, both):
    rows = []
    for all_ids in ([[1, 2], [1, 2, 300], [5]], held_out):
        rows.append(Rows([{}] * len(all_ids)))
        rows[-1].ids = [array("i", ids) for ids in all_ids]
    say_prompts(*rows, 4, 3)
    said = capsys.readouterr().out
    assert said.startswith("prompts: 3; ") and "epochs: 4\n" in said
    assert f"{both} of {len(held_out)} " in said if both else "warning" not in said


@pytest.mark.parametrize("line, words", [
    ('{"prompt": "a"', ["line 2"]), ('["a"]', ["object"]), ('{"question": "a"}', ["question"]),
    ('{"prompt": ""}', ["empty"]), ('{"prompt": 7}', ["7"]), ('{"prompt": []}', ["empty"]),
    ('{"prompt": "\\ud800"}', ["UTF-8"]), ('{"prompt": "a", "answer": ["b"]}', ["'answer'"]),
    ('{"prompt": "a", "answer": 1e400}', ["inf"]), ('{"prompt": "a", "answer": NaN}', ["nan"]),
    ('{"prompt": "a", "answer": "caf\udce9"}', ["UTF-8"]),
    ('{"prompt": [{"role": "bot", "content": "a"}]}', ["bot", "assistant"]),
    ('{"prompt": [{"role": "user", "content": null}]}', ["content"]), ("caf\udce9", ["line 2"])])
def test_a_bad_row_is_one_line_that_names_it(tmp_path, line, words):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n' + line.encode("utf-8", "surrogateescape") + b"\n")
    with pytest.raises(BadInput) as e:
        read_rows(str(path), prompt_row)
    said = str(e.value)
    assert "\n" not in said and all(word in said for word in [str(path), "line 2", *words]), said


def test_rows_that_are_too_long():
    def encoded(too_long, limit=3):
        rows = Rows((dict(n=n) for n in (2, 5, 3)), "a")
        return encode_rows(rows, lambda rows: [list(range(row["n"])) for row in rows], limit,
                           too_long, lambda ids: ids[-limit:])

    with pytest.raises(BadInput, match="row 2: it has 5 tokens"):
        encoded("error")
    assert [list(ids) for ids in encoded("drop").ids] == [[0, 1], [0, 1, 2]]
    assert encoded("drop") == [dict(n=2), dict(n=3)]
    assert [list(ids) for ids in encoded("cut").ids] == [[0, 1], [2, 3, 4], [0, 1, 2]]
    with pytest.raises(BadInput, match="no row is left"):
        encoded("drop", 1)


def test_a_demonstration_of_which_nothing_to_learn_is_left(capsys):
    """Cut to 4 tokens: a byte each, and an EOS. It is counted, and left out."""
    tokenizer = SimpleNamespace(
        chats=None, say_marks=lambda *_: None, bos_ids=[], eos_id=0, adds_blank=False,
        encode_texts=lambda texts: [[*text.encode()] for text in texts])

    def encoded(*texts):
        rows = Rows((dict(prompt=prompt, completion=text) for prompt, text in texts), "a")
        return encode_demonstrations(rows, tokenizer, 4, "cut")

    rows = encoded(("abc", "de"), ("abcd", "e"), ("a", "bcdef"), ("abcdef", ""), ("abc", ""))
    assert [row["prompt"] for row in rows] == ["abc", "a", "abc"]
    assert rows.ids[0] == ([*b"abcd"], [False] * 3 + [True])
    said = capsys.readouterr().out
    assert "4 of 5" in said and "2 of them" in said and rows.ids[2][0] == [*b"abc", 0]
    with pytest.raises(BadInput, match="no row is left"):
        encoded(("abcd", "e"), ("abcdefg", "h"))


def test_a_prompt_that_is_too_long_loses_its_beginning_and_not_bos():
    tokenizer = SimpleNamespace(
        bos_ids=[1], chats=None, say_marks=lambda *_: None,
        encode_prompts=lambda texts: [[1, *text.encode()] for text in texts])
    models = dict(policy=SimpleNamespace(max_positions=9, tokenizer=tokenizer))
    rows = Rows(dict(prompt=text) for text in ("abcdef", "x"))
    encode_prompts(rows, models, 5, keys_of_system(too_long="cut"))
    assert [list(ids) for ids in rows.ids] == [[1, *b"def"], [1, *b"x"]]


@pytest.mark.parametrize("n, batch_size", [(5, 3), (7, 7), (3, 8), (1, 2)])
def test_whole_epochs_in_new_orders(n, batch_size):
    """The batches are one walk through the epochs; each has every row once."""
    rows = Rows(range(n))
    walk = [i for iteration in range(40) for i in batch_rows(3, iteration, batch_size, rows)]
    assert len(walk) == 40 * batch_size
    epochs = [tuple(walk[i:i + n]) for i in range(0, len(walk) - n + 1, n)]
    assert all(sorted(epoch) == list(range(n)) for epoch in epochs)
    if n > 3:
        assert len(set(epochs)) > 10
        assert batch_rows(4, 0, batch_size, rows) != walk[:batch_size]


@pytest.mark.parametrize("n, size", [(10, 3), (500, 256), (40, 0), (5, 9)])
def test_an_evaluation_takes_rows_from_all_over_a_sorted_file(n, size):
    seen = set()
    for seed in range(20):
        rows = rows_to_evaluate(n, size, seed)
        assert rows == sorted(set(rows)) and len(rows) == (min(n, size) or n)
        for task in range(4):  # four tasks, one behind the other: each has its share
            first, end = n * task // 4, n * (task + 1) // 4
            assert abs(sum(first <= i < end for i in rows) - len(rows) * (end - first) / n) < 2
        seen.update(rows)
    assert len(seen) > 0.9 * n


def test_epochs_in_iterations():
    """The fewest batches that have all rows: 11 tenths of 50 are 55, though 1.1 * 50 is more."""
    for tenths, n, batch_size in itertools.product(range(1, 35), (1, 3, 50, 7473), (1, 5, 16)):
        assert run_length(7, tenths / 10, n, batch_size) == -(-tenths * n // (10 * batch_size))
    assert run_length(7, 0.0, 50, 5) == 7

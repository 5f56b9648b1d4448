"""prompts.py: a file -> rows; which rows an iteration sees; micro-batches, by enumeration."""
import itertools
from array import array
from types import SimpleNamespace

import pytest
import torch

import parallel
from errors import BadInput
from formulas import masked_sum
from prompts import (PADDING, Rows, batch_rows, deal_rows, encode_prompts, encode_rows,
                     micro_batches, prompt_row, read_rows, run_length, say_prompts, spread)
from tiny import jsonl, keys_of_system, write

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
        rows = Rows(dict(n=n) for n in (2, 5, 3))
        return encode_rows(rows, "a", lambda rows: [list(range(row["n"])) for row in rows], limit,
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
    from prompts import encode_demonstrations

    tokenizer = SimpleNamespace(
        chats=None, say_marks=lambda *_: None, bos_ids=[], eos_id=0, adds_blank=False,
        encode_texts=lambda texts: [[*text.encode()] for text in texts])

    def encoded(*texts):
        rows = Rows(dict(prompt=prompt, completion=text) for prompt, text in texts)
        return encode_demonstrations(rows, "a", tokenizer, 4, "cut")

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
    encode_prompts(rows, "a", models, 5, keys_of_system(too_long="cut"))
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


@pytest.mark.parametrize("ranks, size, most",
                         [*itertools.product((1, 2, 7, 100), (1, 5, 64), (0, 150))])
def test_rows_are_dealt_like_cards(monkeypatch, ranks, size, most):
    """Each row once; within the limits; as many parts on each rank; about equally many tokens."""
    lengths = torch.randint(1, 100, (61,), generator=torch.Generator().manual_seed(0)).tolist()
    parts = []
    for rank in range(ranks):
        monkeypatch.setattr(parallel, "rank_and_size", lambda rank=rank: (rank, ranks))
        parts.append(deal_rows(lengths, size, most))
    assert sorted(i for mine in parts for part in mine for i in part) == list(range(61))
    assert len({len(mine) for mine in parts}) == 1
    for part in itertools.chain(*parts):
        held = [lengths[i] for i in part]
        tokens = len(part) * max(held, default=0)
        assert tokens - sum(held) <= PADDING
        assert len(part) <= size if most == 0 else len(part) <= 1 or tokens <= most
    of_rank = [sum(lengths[i] for part in mine for i in part) for mine in parts]
    assert max(of_rank) - min(of_rank) <= max(lengths)


def test_micro_batches_have_each_row_as_it_was():
    """Of random rows with gaps in the response: the columns that the longest one of them uses."""
    T, B, drawn = 12, 23, torch.Generator().manual_seed(0)
    lengths = torch.randint(2, T + 1, (B,), generator=drawn)
    mask = torch.rand(B, T, generator=drawn) < 0.8
    batch = dict(tokens=torch.randint(0, 9, (B, T), generator=drawn), index=torch.arange(B),
                 response_mask=mask & (torch.arange(T) < lengths[:, None]), lengths=lengths,
                 logprobs=torch.randn(B, T, generator=drawn), two=torch.randn(B, 2))
    seen, wanted = [], torch.tensor([4, 22, 0, *range(7, 20)])
    for mb in micro_batches(batch, wanted, 4):
        rows, W = mb["index"], lengths[mb["index"]].max()
        for name, x in mb.items():
            of_row = batch[name][rows]
            assert torch.equal(x, of_row[:, :W] if of_row.shape[1:] == (T,) else of_row), name
        assert mb["response_mask"].sum() == batch["response_mask"][rows].sum()
        seen += rows.tolist()
    assert sorted(seen) == sorted(wanted.tolist())


def test_a_micro_batch_without_rows_adds_nothing(monkeypatch):
    """A forward reads one text all the same; what is computed with it is 0, and in no row."""
    batch = dict(tokens=torch.ones(1, 5, dtype=torch.int64), lengths=torch.tensor([5]),
                 response_mask=torch.ones(1, 5).bool(), index=torch.arange(1),
                 advantages=torch.ones(1, 5))
    parts = []
    for rank in range(2):
        monkeypatch.setattr(parallel, "rank_and_size", lambda rank=rank: (rank, 2))
        parts += micro_batches(batch, batch["index"], 4)
    first, empty = parts
    assert first["tokens"].shape == (1, 5) and empty["tokens"].shape == (1, 2)
    logprobs = torch.ones(empty["tokens"].shape, requires_grad=True)
    loss = masked_sum(-empty["advantages"] * logprobs, empty["response_mask"])
    loss.backward()
    assert loss == 0 and not logprobs.grad.any() and len(empty["index"]) == 0


@pytest.mark.parametrize("n, size", [(10, 3), (500, 256), (40, 0), (5, 9)])
def test_an_evaluation_takes_rows_from_all_over_a_sorted_file(n, size):
    seen = set()
    for seed in range(20):
        rows = spread(n, size, seed)
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


def test_a_mix_of_files(tmp_path):
    """Each file has its share after every iteration, and its own rows come in whole epochs."""
    sizes, weights = dict(a=7, b=40, c=1), dict(a=0.1, b=5.0, c=2.0)
    paths = ",".join(f"{weights[name]}*" + jsonl(tmp_path / f"{name}.jsonl", [
        dict(name=name, number=i) for i in range(n)]) for name, n in sizes.items())
    rows, walks = read_rows(paths, dict), {name: [] for name in sizes}
    for iteration in range(60):
        for i in batch_rows(3, iteration, 16, rows):
            walks[rows[i]["name"]].append(rows[i]["number"])
        for name, walk in walks.items():
            assert abs(len(walk) - 16 * (iteration + 1) * weights[name] / 7.1) < 3
    for name, n in sizes.items():
        epochs = [walks[name][i:i + n] for i in range(0, len(walks[name]) - n + 1, n)]
        assert all(sorted(epoch) == list(range(n)) for epoch in epochs)
